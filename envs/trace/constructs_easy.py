"""The statements that generated programs are made of, for levels 1 to 6; see ``programs.py``."""

from envs.trace.writer import WORDS, Writer


def _assignment(w: Writer) -> None:
    w.bind("int", w.number(1 + (w.level >= 3)))


def _augmented(w: Writer) -> None:
    operator = w.one_of("+=", "-=", "*=") if not w.loops else w.one_of("+=", "-=")
    name = w.get("int")
    w.emit(f"{name} {operator} {w.small(2, 4) if operator == '*=' else w.number()}")


def _swap(w: Writer) -> None:
    first, second = w.get("int"), w.bind("int", w.number())
    w.emit_one(f"{first}, {second} = {second}, {first}", f"{first}, {second} = {second}, {first} + {second}")


def _branch(w: Writer) -> None:
    target = w.get("int")
    change = w.one_of(f"{target} += {w.number()}", f"{target} = {w.number(2)}")
    with w.block(f"if {w.condition()}:"):
        w.emit(change)
        if w.rng.random() < 0.4:
            w.show()
    if w.rng.random() < 0.4:
        w.nested(f"elif {w.condition()}:", f"{target} -= {w.number()}")
    if w.rng.random() < 0.7:
        w.nested("else:", w.one_of(f"{target} = {w.number()}", f"print({w.number()})"))


def _truth(w: Writer) -> None:
    w.bind("int", f"{w.number()} if {w.condition()} else {w.number()}")


def _range(w: Writer) -> str:
    start, steps, stride = w.small(0, 3), w.small(2, 6), w.small(1, 3)
    if w.rng.random() < 0.6:
        return f"range({steps})"
    if w.rng.random() < 0.3:
        return f"range({start + steps * stride}, {start}, -{stride})"
    return f"range({start}, {start + steps * stride}, {stride})" if stride > 1 else f"range({start}, {start + steps})"


def _accumulate(w: Writer) -> None:
    total, i = w.bind("int", str(w.small(0, 5))), w.fresh("int")
    with w.block(f"for {i} in {_range(w)}:"):
        w.live["int"].append(i)
        if w.rng.random() < 0.4:
            w.nested(f"if {w.condition()}:", w.one_of("continue", "break", f"{total} += {i}"))
        w.emit(f"{total} {w.one_of('+=', '+=', '-=')} {w.number()}")
        if w.rng.random() < 0.3:
            w.emit(f"print({i}, {total})")
    w.emit(f"print({total})")


def _countdown(w: Writer) -> None:
    fuel, other = w.bind("int", str(w.small(4, 30))), w.bind("int", str(w.small(0, 9)))
    with w.block(f"while {fuel} > {w.small(0, 3)}:"):
        w.emit(f"{fuel} {w.one_of(f'-= {w.small(2, 5)}', '//= 2')}")
        w.emit_one(f"{other} += {fuel}", f"{other} = ({other} * {w.small(2, 5)} + {fuel}) % {w.small(7, 50)}")
        if w.rng.random() < 0.4:
            w.emit(f"print({fuel}, {other})")
    w.emit(f"print({other})")


def _grid(w: Writer) -> None:
    i, j, total = w.fresh("int"), w.fresh("int"), w.bind("int", "0")
    with w.block(f"for {i} in range({w.small(2, 3)}):"):
        header = w.one_of(f"for {j} in range({w.small(2, 3)}):", f"for {j} in range({i} + 1):")
        with w.block(header):
            w.live["int"] += [i, j]
            w.emit(f"{total} += {w.one_of(f'{i} * {j}', f'{i} + {j}', w.number())}")
        w.emit(f"print({i}, {total})")


def _collatz(w: Writer) -> None:
    n, steps = w.bind("int", str(w.small(3, 20))), w.bind("int", "0")
    with w.block(f"while {n} != 1 and {steps} < {w.small(5, 12)}:"):
        w.emit(f"{n} = {n} // 2 if {n} % 2 == 0 else {w.one_of('3', '5')} * {n} + 1", f"{steps} += 1")
    w.emit(f"print({n}, {steps})")


def _string(w: Writer) -> None:
    w.bind("str", w.text())
    w.emit(f"print({w.text()})")


def _characters(w: Writer) -> None:
    text, count, char = w.get("str"), w.bind("int", "0"), w.one_of("ch", "c", "letter")
    test = w.one_of(
        f"{char} in 'aeiou'", f"{char} > {w.rng.choice('fgmnp')!r}", f"{char}.isalpha()", f"{char} != {text}[0]"
    )
    with w.block(f"for {char} in {text}:"), w.block(f"if {test}:"):
        w.emit_one(f"{count} += 1", f"{count} = ({count} * 3 + ord({char})) % {w.small(10, 90)}")
    w.emit(f"print({count})")


def _rebuild(w: Writer) -> None:
    source, result, i = w.get("str"), w.bind("str", "''"), w.fresh("int")
    with w.block(f"for {i} in range(0, len({source}), {w.small(1, 3)}):"):
        w.emit_one(
            f"{result} += {source}[{i}]", f"{result} = {source}[{i}] + {result}", f"{result} += {source}[-{i} - 1]"
        )
    w.emit(f"print({result})")


def _caesar(w: Writer) -> None:
    text, shift = w.bind("str", repr(w.rng.choice(WORDS))), w.small(1, 9)
    result = w.bind("str", f"''.join(chr((ord(c) - 97 + {shift}) % 26 + 97) for c in {text})")
    w.emit(f"print({result}, {result} < {text})")


def _splitting(w: Writer) -> None:
    separator = w.one_of(",", " ", "-", ";")
    parts = w.bind("words", f"{separator.join(w.words(3, 5))!r}.split({separator!r})")
    joined = f"{w.one_of('+', '/', '')!r}.join({parts}[::{w.one_of('-1', '2')}])"
    w.emit(f"print({w.one_of('len', 'max', 'min')}({parts}), {joined})")


def _mutate(w: Writer) -> None:
    name = w.bind("list", w.literal("list"))
    for _ in range(w.small(2, 4)):
        w.emit_one(
            f"{name}.append({w.number()})", f"{name}.insert({w.small(0, 2)}, {w.number()})", f"{name}.sort()",
            f"{name}.reverse()", f"{name}.extend([{w.number()}, {w.small(0, 9)}])", f"{name} += [{w.number()}] * 2",
            f"{name}[{w.small(0, 2)}] = {w.number()}", f"{name}[{w.small(0, 2)}] += {w.small()}",
            f"{name} = {name}[1:] + {name}[:1]", f"{name}.append({name}.pop({w.small(0, 2)}))",
        )  # fmt: skip
    w.print_one(name, f"{name}[::-1]", f"{name}[1:{w.small(2, 4)}]", f"sorted({name})", f"sum({name})")


def _comprehension(w: Writer) -> None:
    source = w.one_of(w.get("list"), f"range({w.small(4, 9)})")
    value = w.one_of("x * x", f"x + {w.atom()}", f"x % {w.small(2, 5)}", f"{w.small(2, 6)} * x - 1", "-x")
    test = w.one_of("", f" if x % {w.small(2, 3)} == 0", f" if x > {w.small(1, 6)}")
    name = w.fresh("list")
    w.emit(f"{name} = [{value} for x in {source}{test}]", f"print({name}, len({name}))")
    if not test:
        w.live["list"].append(name)


def _enumerated(w: Writer) -> None:
    words, total = w.get("words"), w.bind("int", "0")
    counted = w.one_of(f"enumerate({words})", f"enumerate(sorted({words}), {w.small(1, 3)})")
    with w.block(f"for i, item in {counted}:"):
        w.emit(f"{total} += i * len(item)")
        if w.rng.random() < 0.5:
            w.emit_one("print(i, item)", "print(item[i % len(item)], end=' ')", f"print(f'{{i}}:{{item}} {{{total}}}')")
    w.emit(f"print({total})")


def _pairs(w: Writer) -> None:
    left, right = w.get("list"), w.bind("list", w.literal("list"))
    result = w.one_of(f"sum(p * q for p, q in zip({left}, {right}))", f"[p - q for p, q in zip({left}, {right})]")
    w.print_one(result, f"max(zip({right}, {left}))", f"list(zip({left}, {right}))[:{w.small(1, 2)}]")


def _bubble(w: Writer) -> None:
    name, swaps = w.bind("list", w.literal("list")), w.bind("int", "0")
    with (
        w.block(f"for i in range(len({name}) - 1):"),
        w.block(f"for j in range(len({name}) - 1 - i):"),
        w.block(f"if {name}[j] {w.one_of('<', '>')} {name}[j + 1]:"),
    ):
        w.emit(f"{name}[j], {name}[j + 1] = {name}[j + 1], {name}[j]", f"{swaps} += 1")
    w.emit(f"print({name}, {swaps})")


def _matrix(w: Writer) -> None:
    rows, columns = w.small(2, 3), w.small(2, 3)
    name = w.one_of("grid", "matrix", "board") + str(len(w.lines))
    w.emit(f"{name} = {[[w.small(0, 9) for _ in range(columns)] for _ in range(rows)]}")
    w.emit(f"{name}[{w.small(0, rows - 1)}][{w.small(0, columns - 1)}] = {w.number()}")
    w.print_one(
        f"[sum(r) for r in {name}]", f"[list(c) for c in zip(*{name})]", f"{name}[-1]", f"sum(map(sum, {name}))"
    )


def _function(w: Writer) -> None:
    name, parameters = w.fresh("function"), [w.fresh("int") for _ in range(w.small(1, 3))]
    default = f"={w.small()}" if w.rng.random() < 0.3 else ""
    with w.function(f"def {name}({', '.join(parameters)}{default}):", parameters):
        if w.rng.random() < 0.5:
            w.nested(f"if {w.condition()}:", f"return {w.number()}")
        if w.rng.random() < 0.4:
            _accumulate(w)
        for _ in range(w.small(0, 2)):
            _assignment(w)
        w.emit(f"return {w.number(2)}")
    given = len(parameters) - bool(default)
    w.functions += [(name, len(parameters)), (name, given)] if given else [(name, len(parameters))]
    w.emit(f"print({w.number(0)}, {name}({', '.join(w.number() for _ in parameters)}))")


def _recursion(w: Writer) -> None:
    name, n = w.fresh("function"), w.one_of("n", "k", "m")
    base, step, extra = w.small(0, 2), w.small(1, 3), w.small(1, 9)
    combine = w.one_of(
        f"{n} + {name}({n} - {step})", f"{n} % {w.small(2, 4)} + {name}({n} - {step})",
        f"{name}({n} - {step}) * 2 - {extra}", f"{name}({n} // 2) + {extra}",
        f"{name}({n} - 1) + {name}({n} - 2)", f"{extra} - {name}({n} - {step})",
    )  # fmt: skip
    with w.function(f"def {name}({n}):", [n]):
        w.nested(f"if {n} <= {base}:", f"return {w.one_of(n, str(extra), '1')}")
        if w.rng.random() < 0.3:
            w.emit(f"print('{name}', {n})")
        w.emit(f"return {combine}")
    w.emit(f"print({name}({w.small(4, 7)}))")


def _digits(w: Writer) -> None:
    name = w.fresh("function")
    with w.function(f"def {name}(n):", ["n"]):
        w.nested(f"if n < {w.one_of('10', '2', '8')}:", f"return {w.one_of('n', 'n + 1', 'n * n')}")
        w.emit_one(
            f"return {name}(n // 10) + n % 10",
            f"return {name}(n // 2) + n % 2",
            f"return {name}(n // 4) * {w.small(2, 3)} + n % 4",
        )
    w.emit(f"print([{name}(v) for v in ({w.small(10, 999)}, {w.small(10, 99)}, {w.small(0, 9)})])")


def _two_results(w: Writer) -> None:
    name, first, second = w.fresh("function"), w.fresh("int"), w.fresh("int")
    with w.function(f"def {name}(x, y):", ["x", "y"]):
        w.emit(f"return {w.number(2)}, {w.number()}")
    w.emit(f"{first}, {second} = {name}({w.number(0)}, {w.number(0)})", f"print({first}, {second})")
    w.live["int"] += [first, second]


def _anonymous(w: Writer) -> None:
    name = w.get("list")
    w.emit_one(
        f"print(list(map(lambda v: v * {w.small(2, 5)} - {w.small(0, 9)}, {name})))",
        f"print(list(filter(lambda v: v % {w.small(2, 3)}, {name})))",
        f"print(sorted({name}, key=lambda v: (v % {w.small(2, 7)}, -v)))",
        f"print(max({name}, key=lambda v: v % {w.small(3, 9)}), any(v > {w.small(5, 25)} for v in {name}))",
    )  # fmt: skip


BY_LEVEL = {
    1: (_assignment, _augmented, _swap, Writer.show),
    2: (_branch, _truth),
    3: (_accumulate, _countdown, _grid, _collatz),
    4: (_string, _characters, _rebuild, _caesar, _splitting),
    5: (_mutate, _comprehension, _enumerated, _pairs, _bubble, _matrix),
    6: (_function, _recursion, _digits, _two_results, _anonymous),
}
