"""An endless stream of small Python programs to trace; (level, seed) determines the program.

A program is written statement by statement by a ``Writer`` (``writer.py``); the statements are those of
``constructs_easy.py`` and ``constructs_hard.py``.

Levels: 0 a sum or difference of digits · 1 arithmetic · 2 branches · 3 loops · 4 strings · 5 lists · 6 functions,
recursion · 7 dicts, sets, standard input · 8 classes, exceptions · 9 generators, closures, libraries, everything mixed.
"""

import random

from envs.trace import constructs_easy, constructs_hard
from envs.trace.writer import LETTERS, Program, Writer

LEVELS = 10
BY_LEVEL = constructs_easy.BY_LEVEL | constructs_hard.BY_LEVEL
CONSTRUCTS = [(level, function) for level, functions in BY_LEVEL.items() for function in functions]


def _one_sum(rng: random.Random) -> Program:
    """Write a program of level 0: two names, one sum or difference of digits, one digit printed."""
    first, second = rng.sample(LETTERS, 2)
    result, part = rng.randint(0, 9), rng.randint(0, 9)
    value = abs(result - part)
    operator = "+" if result >= part else "-"
    start = part if operator == "+" else result + value
    sides = f"{first} {operator} {value}"
    lines = [f"{first} = {start}", *rng.choice([[f"{second} = {sides}", f"print({second})"], [f"print({sides})"]])]
    if len(lines) == 2 and rng.random() < 0.6:
        lines = [lines[0], f"{second} = {value}", f"print({first} {operator} {second})"]
    return Program("\n".join(lines) + "\n", "")


def generate(level: int, seed: int | str) -> Program:
    """Return the program of (level, seed); ValueError: no such level."""
    if not 0 <= level < LEVELS:
        raise ValueError(f"level {level} does not exist: 0 to {LEVELS - 1}")
    rng = random.Random(f"{level}:{seed}")
    if level == 0:
        return _one_sum(rng)
    writer = Writer(rng, level)
    known = [(minimum, function) for minimum, function in CONSTRUCTS if minimum <= level]
    # This level and the one below it each weigh four times as much as an earlier one.
    share = {minimum: 4.0 if minimum >= level - 1 else 1.0 for minimum, _ in known}
    weights = [share[minimum] / sum(minimum == other for other, _ in known) for minimum, _ in known]
    for _ in range(rng.randint(1, 2)):
        writer.bind("int", writer.literal("int"))
    for _ in range(rng.randint(2, 3) if level < 3 else rng.randint(2, 4) if level < 9 else rng.randint(4, 7)):
        rng.choices(known, weights)[0][1](writer)
    writer.show()
    return writer.program()
