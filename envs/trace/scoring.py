"""Compares an answer with what a program printed: as the public trace environment does, or character by character.

``score(..., "affinetes")`` reproduces AffineFoundation/affinetes (environments/trace, 345b7bcf).
"""

import re


def clean(prediction: str) -> str:
    """Return the answer in a model's text: what follows its thinking, or the first code block in that."""
    text = prediction
    for tag in ("think", "thinking"):
        head, end, rest = text.rpartition(f"</{tag}>")  # no block ends after it, and searching there is quadratic
        text = re.sub(rf"<{tag}>.*?</{tag}>", "", head + end, flags=re.DOTALL) + rest
    text = re.split(r"</think>|</thinking>", text)[-1].strip()
    _, _, rest = text.partition("```")
    block, closed, _ = rest.partition("```")
    return re.sub(r"\A[a-zA-Z]*", "", block).strip() if closed else text


def _squeezed(text: str) -> str:
    return "".join(text.split()).lower()


def score(expected: str, prediction: str, protocol: str = "affinetes") -> float:
    """1.0 if the prediction, a model's raw text, is the expected output, else 0.0.

    ``protocol`` "affinetes" compares the cleaned answer without any whitespace and case ("12 3" equals "1 23");
    "native" wants the raw or the cleaned answer to be the expected text exactly, surrounding whitespace aside.
    ValueError: another protocol.
    """
    if protocol == "affinetes":
        return float(_squeezed(clean(prediction)) == _squeezed(expected))
    if protocol == "native":
        said = prediction.replace("\r\n", "\n")
        return float(expected.strip() in (said.strip(), clean(said).strip()))  # the output itself may look like a fence
    raise ValueError(f"protocol {protocol!r} is not known: affinetes or native")


def leading_share(expected: str, prediction: str, protocol: str = "affinetes") -> float:
    """Return the share of lines before the first wrong one; missing and extra lines count as wrong."""
    if score(expected, prediction, protocol):
        return 1.0
    native, wanted = protocol == "native", expected.split("\n")
    answers = [clean(prediction), *([prediction.strip()] if native else [])]  # as in ``score``

    def share(answer: str) -> float:
        given = answer.replace("\r\n", "\n").split("\n")
        pairs = zip(wanted, given, strict=False)
        same = [ours == theirs if native else _squeezed(ours) == _squeezed(theirs) for ours, theirs in pairs]
        return [*same, False].index(False) / max(len(wanted), len(given))

    return max(map(share, answers))
