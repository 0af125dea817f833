"""What a model's raw answer means: the one parser of training, evaluation, play and serving."""

from __future__ import annotations

import re
from itertools import chain


def _without_thinking(text: str) -> str:
    """Drop complete think blocks, then what precedes a stray closing tag, then what follows an unclosed one."""
    text = text.strip()
    if "<" not in text:
        return text
    text = re.sub(r"<(think|thinking)>.*?</\1>", "", text, flags=re.DOTALL | re.IGNORECASE)
    text = re.split(r"</think(?:ing)?>", text, flags=re.IGNORECASE)[-1]
    text = re.split(r"<think(?:ing)?>", text, maxsplit=1, flags=re.IGNORECASE)[0]
    return text.strip()


def _integer(digits: str) -> int | None:
    try:
        return int(digits)
    except ValueError:  # Python refuses to convert more than 4300 digits
        return None


def _squeeze(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def parse_action(text: str, legal: dict[int, str], protocol: str = "affinetes") -> int | None:
    """Read an action id out of a model's raw answer, as the public affinetes environment does.

    Args:
        text: the answer; think blocks are removed inside.
        legal: action id -> action string.
        protocol: "affinetes" is the parser of its ``evaluate``: a bare number, else the lowest legal id that
            stands as a word of its own, else the first action whose name the text contains. "affinetes_step" is
            the parser of its ``step``: the first number of the raw text.

    Returns:
        A legal action id, None if there is none.

    Raises:
        ValueError: unknown protocol.
    """
    if protocol == "affinetes_step":
        number = re.search(r"\d+", text)
        action = _integer(number[0]) if number else None
        return action if action in legal else None
    if protocol != "affinetes":
        raise ValueError(f"protocol {protocol!r} is not known: affinetes or affinetes_step")
    text = _without_thinking(text)
    if re.fullmatch(r"\d+", text):
        action = _integer(text)
        return action if action in legal else None
    words = set(re.findall(r"\b[0-9]+\b", text))
    by_word = (action for action in sorted(legal) if str(action) in words)
    lowered = text.lower()
    by_name = (action for action, name in legal.items() if name.lower() in lowered)
    squeezed = _squeeze(text)
    by_squeezed_name = (action for action, name in legal.items() if _squeeze(name) and _squeeze(name) in squeezed)
    return next(chain(by_word, by_name, by_squeezed_name), None)
