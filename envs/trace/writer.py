"""Writes a random program: keeps track of the names bound so far and makes expressions out of them.

By construction a program ends (loops run over short ranges or count down; recursion descends), catches everything it
raises, computes no large numbers (products inside loops are reduced), and prints nothing that depends on the clock, on
addresses, or on the order of a set.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

LETTERS = "abcdefghijkmnpqrstuvwxyz"
FREE_LETTERS = "defhorstuwz"  # some constructs use the others as loop variables and parameters
NAMES = {
    "int": "total count amount result score limit step size price level width height offset base rate power weight "
    "delta bonus left right low high first second last best num acc depth shift gain cost area speed",
    "str": "text word name label line title phrase msg code tag city token",
    "list": "items nums data values row scores xs ys marks steps prices queue stack levels",
    "words": "words names labels tokens parts colors fruits animals",
    "dict": "counts table ages stock lookup prices_by grades index_of totals cache",
    "function": "compute combine adjust rescale transform update mix fold helper apply_rule convert merge blend",
    "class": "Ledger Account Box Stack Point Robot Tank Player Meter Shelf Machine Wallet Garden Sensor",
}
NOUNS = (
    "apple pear plum fig kiwi lemon mango grape red blue green amber cat dog owl fox bee ant tiger horse north south "
    "east west rain snow wind storm iron gold tin salt code data loop node tree leaf root stone river hill"
)
WORDS = NOUNS.split()


class Program(NamedTuple):
    """A program's source text and its standard input."""

    program: str
    inputs: str


class Writer:
    """A program being written: its lines, and the names bound at this point, by kind."""

    def __init__(self, rng: random.Random, level: int):
        self.rng, self.level = rng, level
        self.lines: list[str] = []
        self.imports: list[str] = []
        self.stdin: list[str] = []
        self.live: dict[str, list[str]] = {kind: [] for kind in ("int", "str", "list", "words", "dict")}
        self.functions: list[tuple[str, int]] = []  # (name, number of int parameters); all return an int
        self.used: set[str] = set()
        self.depth = self.loops = 0

    def emit(self, *lines: str) -> None:
        """Append lines at the current indentation."""
        self.lines += ["    " * self.depth + line for line in lines]

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """Indent below ``header``; names first bound inside are forgotten afterwards."""
        self.emit(header)
        outer = self.live, self.functions, self.loops
        self.live = {kind: names.copy() for kind, names in self.live.items()}
        self.loops += header.startswith(("for ", "while "))
        self.depth += 1
        yield
        self.depth -= 1
        self.live, self.functions, self.loops = outer

    def nested(self, header: str, *lines: str) -> None:
        """Emit ``lines`` indented below ``header``."""
        with self.block(header):
            self.emit(*lines)

    @contextmanager
    def function(self, header: str, parameters: list[str]) -> Iterator[None]:
        """Indent a function's body, which sees its int parameters and no variables from outside."""
        with self.block(header):
            self.live = {kind: [] for kind in self.live} | {"int": parameters.copy()}
            self.loops = 0
            yield

    def fresh(self, kind: str) -> str:
        """Return a name that the program does not use yet, without binding it."""
        single = self.level < 4 and kind == "int"
        pool = [name for name in (LETTERS if single else NAMES[kind].split()) if name not in self.used]
        if not single and kind == "int" and self.rng.random() < 0.3:
            pool = [name for name in FREE_LETTERS if name not in self.used] or pool
        name = self.rng.choice(pool) if pool else f"{NAMES[kind].split()[0]}{len(self.used)}"
        self.used.add(name)
        return name

    def bind(self, kind: str, value: str) -> str:
        """Emit ``name = value`` with a fresh name and return it."""
        name = self.fresh(kind)
        self.emit(f"{name} = {value}")
        self.live[kind].append(name)
        return name

    def get(self, kind: str) -> str:
        """Return a bound name of this kind, and bind one first if there is none."""
        return self.rng.choice(self.live[kind]) if self.live[kind] else self.bind(kind, self.literal(kind))

    def one_of(self, *options: str) -> str:
        """Return one of the options, drawn uniformly."""
        return self.rng.choice(options)

    def small(self, low: int = 1, high: int = 9) -> int:
        """Return an integer drawn uniformly, both ends included."""
        return self.rng.randint(low, high)

    def words(self, least: int, most: int) -> list[str]:
        """Return ``least`` to ``most`` different words."""
        return self.rng.sample(WORDS, self.small(least, most))

    def literal(self, kind: str) -> str:
        """Return a random constant of this kind; no empty ones."""
        if kind == "int":
            return str(self.small(0, 9 if self.level < 2 else 20 if self.level < 5 else 99))
        if kind == "str":
            return repr(self.one_of(" ", "", "-").join(self.words(1, 3)))
        if kind == "list":
            return repr([self.small(0, 30) for _ in range(self.small(3, 6))])
        if kind == "words":
            return repr(self.words(3, 5))
        return repr({word: self.small(0, 20) for word in self.words(2, 4)})

    def atom(self) -> str:
        """Return a bound int name or, less often, a constant."""
        bound = self.live["int"]
        return self.rng.choice(bound) if bound and self.rng.random() < 0.75 else self.literal("int")

    def number(self, depth: int = 1) -> str:
        """Return an int expression that cannot raise."""
        if depth == 0 or self.rng.random() < 0.15:
            return self.atom()
        options = [self._arithmetic]
        if self.level >= 2:
            options.append(self._remainder)
        if self.level >= 3:
            options.append(self._builtin)
        if self.level >= 4 and (self.live["str"] or self.live["words"]):
            options.append(self._length)
        if self.level >= 5 and self.live["list"]:
            options.append(self._of_list)
        if self.functions and not self.loops:
            options += [self._call] * 2
        return self.rng.choice(options)(depth - 1)

    def _arithmetic(self, depth: int) -> str:
        operator = self.rng.choice("++--*")
        left, right = self.number(depth), self.number(depth)
        if operator == "*":
            product = f"{left} * {self.small(2, 5)}" if left.isidentifier() else f"({left}) * {self.small(2, 5)}"
            return f"({product}) % {self.small(11, 97)}" if self.loops else f"({product})"
        return f"({left} {operator} {right})"

    def _remainder(self, depth: int) -> str:
        return f"({self.number(depth)}) {self.one_of('%', '//', '%')} {self.small(2, 9)}"

    def _builtin(self, depth: int) -> str:
        if self.rng.random() < 0.3:
            return f"abs({self.number(depth)})"
        if self.rng.random() < 0.3 and self.level >= 6:
            return f"({self.number(depth)} if {self.condition()} else {self.number(depth)})"
        if self.rng.random() < 0.3 and self.level >= 5:
            return f"(({self.number(depth)}) {self.rng.choice('&|^')} {self.small(1, 15)})"
        return f"{self.one_of('max', 'min')}({self.number(depth)}, {self.number(depth)})"

    def _length(self, depth: int) -> str:
        return f"len({self.rng.choice(self.live['str'] + self.live['words'])})"

    def _of_list(self, depth: int) -> str:
        name = self.rng.choice(self.live["list"])
        return self.one_of(f"len({name})", f"sum({name})", f"{name}[{self.atom()} % len({name})]", f"{name}[-1]")

    def _call(self, depth: int) -> str:
        name, count = self.rng.choice(self.functions)
        return f"{name}({', '.join(self.number(0) for _ in range(count))})"

    def condition(self) -> str:
        """Return a boolean expression."""
        left, right = self.number(self.level >= 4), self.atom()
        kind = self.rng.random()
        if kind < 0.25:
            return f"({left}) % {self.small(2, 4)} == {self.small(0, 1)}"
        if kind < 0.4 and self.level >= 4:
            test = f"{self.atom()} {self.one_of('<', '>')} {self.atom()}"
            return f"{left} {self.one_of('<', '>=')} {right} {self.one_of('and', 'or')} {self.one_of('', 'not ')}{test}"
        if kind < 0.5 and self.level >= 5:
            return f"{self.small(0, 5)} < {left} <= {self.small(10, 60)}"
        return f"{left} {self.one_of('<', '>', '<=', '>=', '==', '!=')} {right}"

    def text(self) -> str:
        """Return a str expression."""
        source = self.rng.choice(self.live["str"]) if self.live["str"] else self.literal("str")
        first, second = self.small(0, 2), self.small(3, 6)
        return self.one_of(
            f"{source}.upper()", f"{source}.title()", f"{source}[::-1]", f"{source}[{first}:{second}]", f"{source} * 2",
            f"{source}[{-second}:]", f"{source}.replace({self.rng.choice('aeiorst')!r}, {self.one_of('*', '', 'o')!r})",
            f"{source} + {self.literal('str')}", f"str({self.number()}) + {source}", f"{source}.strip('aeg')",
            f"{source}.center({self.small(8, 16)}, '.')", f"{source}[::2]", f"{source}.swapcase()",
        )  # fmt: skip

    def show(self) -> None:
        """Emit a print of one or more values."""
        shown = [self.number(1 + (self.level >= 4)) for _ in range(self.rng.choice([1, 1, 2]))]
        if self.level >= 4 and self.rng.random() < 0.4:
            shown.append(self.text())
        if self.level >= 2 and self.rng.random() < 0.2:
            shown.append(self.condition())
        if self.level >= 4 and self.rng.random() < 0.3:
            self.emit(f'print(f"{self.one_of("", "got ", "= ")}{" ".join("{" + part + "}" for part in self.plain())}")')
        else:
            self.emit(f"print({', '.join(shown)})")

    def emit_one(self, *options: str) -> None:
        """Append one of the lines, drawn uniformly."""
        self.emit(self.one_of(*options))

    def print_one(self, *options: str) -> None:
        """Emit a print of one of the expressions, drawn uniformly."""
        self.emit(f"print({self.one_of(*options)})")

    def plain(self) -> list[str]:
        """Return one or two replacement fields of an f-string, without quotes or braces in them."""
        name, number = self.get("int"), self.number()
        return [name, f"{number}:{self.one_of('d', '>4', '03d', '.1f', '+d', 'x')}"][: self.small(1, 2)]

    def program(self) -> Program:
        """Return the finished program and its input."""
        lines = [*sorted(set(self.imports)), *self.lines]
        return Program("\n".join(lines) + "\n", "".join(line + "\n" for line in self.stdin))
