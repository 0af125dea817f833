"""Parses a model's raw answer, for training, evaluation, play and serving alike."""

import re

TAGS = [[re.compile(f"<{mark}{tag}>", re.IGNORECASE) for mark in ("", "/")] for tag in ("think", "thinking")]
SQUEEZED = re.compile(r"[^a-z0-9]")


def without_thinking(text: str) -> str:
    """Drop complete think blocks, then everything before a stray closing tag, then everything after an unclosed one.

    As in the public environment a stray closing tag counts in lower case only, other tags in any case. Every search
    continues where the last one ended, so that the time is linear in the length of the text.
    """
    text = text.strip()
    if "<" not in text:
        return text
    for opening, closing in TAGS:
        kept, at = [], 0
        while (start := opening.search(text, at)) and (end := closing.search(text, start.end())):
            kept.append(text[at : start.start()])
            at = end.end()
        text = "".join(kept) + text[at:]
    for _, closing in TAGS:
        text = text.rpartition(closing.pattern)[2]
    for opening, _ in TAGS:
        if unclosed := opening.search(text):
            text = text[: unclosed.start()]
    return text.strip()


def _integer(digits: str) -> int | None:
    try:
        return int(digits)
    except ValueError:  # Python refuses to convert more than 4300 digits
        return None


def _by_name(text: str, legal: dict[int, str]) -> int | None:
    """Return the first action whose name the text contains, punctuation and spaces aside if need be."""
    text, squeezed_text, names = text.lower(), SQUEEZED.sub("", text.lower()), {}
    for action, name in legal.items():  # of two with the same name the later one counts, in the first one's place
        names[name.lower()] = action
        if squeezed := SQUEEZED.sub("", name.lower()):
            names[squeezed] = action
    for name, action in names.items():
        squeezed = SQUEEZED.sub("", name)
        if name in text or (squeezed and squeezed in squeezed_text):
            return action
    return None


def parse_action(text: str, legal: dict[int, str], protocol: str = "affinetes") -> int | None:
    """Read an action id out of a model's raw answer, as the public affinetes environment does.

    ``protocol`` "affinetes" is the parser of its ``evaluate``, without think blocks: a bare number, else the lowest
    legal id that stands as a word of its own, else the first action whose name the text contains (letters and digits
    suffice). "affinetes_step" is the parser of its ``step``: the first number in the raw text.

    None: the text has no legal action. ValueError: unknown protocol.
    """
    if protocol == "affinetes_step":
        number = re.search(r"\d+", text)
        action = _integer(number[0]) if number else None
        return action if action in legal else None
    if protocol != "affinetes":
        raise ValueError(f"protocol {protocol!r} is not known: affinetes or affinetes_step")
    if not text.isdecimal():  # a bare number needs no search
        text = without_thinking(text)
    if text.isdecimal():
        action = _integer(text)
        return action if action in legal else None
    words = set(re.findall(r"\b[0-9]+\b", text))
    by_word = [action for action in legal if str(action) in words]
    return min(by_word) if by_word else _by_name(text, legal)
