"""The statements that generated programs are made of, for levels 7 to 9; see ``programs.py``."""

from envs.trace.writer import WORDS, Writer


def _counting(w: Writer) -> None:
    table, source = w.fresh("dict"), w.one_of(w.get("str"), w.get("words"))
    w.emit(f"{table} = {{}}")
    with w.block(f"for item in {source}:"):
        key = w.one_of("item", "item[0]", "len(item)")
        w.emit_one(
            f"{table}[{key}] = {table}.get({key}, 0) + {w.small(1, 3)}", f"{table}.setdefault({key}, []).append(item)"
        )
    w.print_one(table, f"sorted({table}.items(), key=str)", f"len({table}), list({table})[:3]")


def _dictionary(w: Writer) -> None:
    table, word = w.bind("dict", w.literal("dict")), w.rng.choice(WORDS)
    for _ in range(w.small(1, 3)):
        w.emit_one(
            f"{table}[{word!r}] = {w.number()}", f"{table}.update({{{w.rng.choice(WORDS)!r}: {w.number()}}})",
            f"{table}[{word!r}] = {table}.get({word!r}, {w.small()}) * 2",
            f"{table}.pop({w.rng.choice(WORDS)!r}, None)",
        )  # fmt: skip
    w.print_one(table, f"sum({table}.values())", f"sorted({table})", f"max({table}, key={table}.get)")
    if w.rng.random() < 0.5:
        with w.block(f"for key, value in {w.one_of('', 'sorted')}({table}.items()):"):
            w.emit_one("print(key, value)", "print(f'{key}={value * 2}', end=';')")
        w.emit("print()")


def _inverted(w: Writer) -> None:
    table = w.get("dict")
    inverted = f"{{value % {w.small(2, 5)}: key for key, value in {table}.items()}}"
    w.emit(f"print({inverted}, {w.rng.choice(WORDS)!r} in {table})")


def _sets(w: Writer) -> None:
    first, second = w.get("list"), w.bind("list", w.literal("list"))
    w.emit(f"print(sorted(set({first}) {w.rng.choice('&|-^')} set({second})), len(set({second})))")


def _read_numbers(w: Writer) -> None:
    values = [w.small(0, 50) for _ in range(w.small(2, 5))]
    w.stdin += [str(len(values)), " ".join(map(str, values))]
    n, name = w.bind("int", "int(input())"), w.bind("list", "list(map(int, input().split()))")
    w.print_one(f"sum({name}) // {n}", f"max({name}) - min({name})", f"{name}[{n} // 2]", f"sorted({name})[:{n} - 1]")


def _read_commands(w: Writer) -> None:
    stack = w.fresh("list")
    lines = [w.one_of(f"push {w.small()}", f"add {w.small()}", "pop", "double") for _ in range(w.small(3, 6))]
    w.stdin += [str(len(lines)), *lines]
    w.emit(f"{stack} = [{w.small()}]")
    with w.block("for _ in range(int(input())):"):
        w.emit("command, *rest = input().split()")
        w.nested("if command == 'push':", f"{stack}.append(int(rest[0]))")
        w.nested("elif command == 'add':", f"{stack}[-1] += int(rest[0])")
        with w.block(f"elif command == 'pop' and len({stack}) > 1:"):
            w.print_one(f"'popped', {stack}.pop()", f"command, {stack}.pop()")
        w.nested("else:", f"{stack}[-1] {w.one_of('*= 2', '-= 1', '= -' + stack + '[-1]')}")
    w.emit(f"print({stack})")


def _read_records(w: Writer) -> None:
    table = w.bind("dict", "{}")
    w.stdin += [f"{word}={w.small(0, 30)}" for word in w.words(2, 4)] + ["end"]
    w.emit("line_in = input()")
    with w.block("while line_in != 'end':"):
        w.emit(
            "key, value = line_in.split('=')",
            f"{table}[key] = int(value) {w.one_of('+', '-', '%')} {w.small(2, 9)}",
            "line_in = input()",
        )
    w.print_one(f"sorted({table}, key={table}.get)", table, f"min({table}.values())")


def _class(w: Writer) -> None:
    kind, field, method = w.fresh("class"), w.fresh("int"), w.one_of("update", "advance", "apply", "grow")
    start, target = w.small(0, 9), w.one_of("a_box", "thing", "obj", "it") + str(len(w.lines))
    with w.block(f"class {kind}:"):
        w.emit(f"made = {w.small(0, 3)}")
        w.nested(f"def __init__(self, {field}={start}):", f"self.{field} = {field}", f"{kind}.made += 1")
        with w.function(f"def {method}(self, x):", [f"self.{field}", "x"]):
            w.nested(f"if {w.condition()}:", f"self.{field} {w.one_of('+=', '-=')} {w.number()}")
            w.emit(f"return {w.one_of(f'self.{field}', 'self', w.number())}")
        w.emit("def __repr__(self):", f"    return f'{kind}({{self.{field}}})'")
        if w.rng.random() < 0.4:
            same = f"self.{field} % {w.small(2, 5)} == other.{field} % {w.small(2, 5)}"
            w.nested("def __eq__(self, other):", f"return {same}")
    w.emit(f"{target} = {kind}({w.one_of('', w.number(0))})")
    for _ in range(w.small(1, 3)):
        w.emit_one(f"{target}.{method}({w.number(0)})", f"print({target}.{method}({w.number(0)}))")
    w.emit(f"print({target}, {target}.{field}, {kind}.made, {target} == {kind}({w.small()}))")


def _subclass(w: Writer) -> None:
    parent, child, method = w.fresh("class"), w.fresh("class"), w.one_of("area", "speak", "cost", "rank")
    with w.block(f"class {parent}:"):
        w.emit("def __init__(self, size):", f"    self.size = size {w.one_of('+', '-', '*')} {w.small(1, 4)}")
        w.emit(f"def {method}(self):", f"    return self.size {w.one_of('+', '*', '%')} {w.small(2, 6)}")
        w.emit("def describe(self):", f"    return type(self).__name__ + ':' + str(self.{method}())")
    with w.block(f"class {child}({parent}):"):
        if w.rng.random() < 0.5:
            w.emit("def __init__(self, size):", f"    super().__init__(size {w.one_of('+', '*')} {w.small(2, 5)})")
        w.emit(f"def {method}(self):", f"    return super().{method}() {w.one_of('-', '*', '+')} {w.small(1, 5)}")
    with w.block(f"for shape in [{parent}({w.small()}), {child}({w.small()}), {child}({w.number(0)})]:"):
        w.emit_one("print(shape.describe())", f"print(shape.{method}(), isinstance(shape, {child}))")


RISKS = [  # what may raise, and what it raises
    ("{x} // ({x} - {c})", "ZeroDivisionError"),
    ("int('{word}'[{x} % 3:])", "ValueError"),
    ("[{c}, {x}][{x} - {c}]", "IndexError"),
    ("{{'{word}': {x}}}['{word}'[: {x} % 5 + 1]]", "KeyError"),
    ("'{word}' + {x}", "TypeError"),
    ("None.{word}", "AttributeError"),
]


def _catch(w: Writer) -> None:
    risky, error = w.rng.choice(RISKS)
    result, x, c = w.bind("int", "0"), w.fresh("int"), w.small(1, 4)
    with w.block(f"for {x} in range({w.small(0, 2)}, {w.small(3, 5)}):"):
        w.nested("try:", f"print({x}, {risky.format(x=x, c=c, word=w.rng.choice(WORDS))})", f"{result} += {w.small()}")
        with w.block(f"except {w.one_of(error, error, 'Exception', f'({error}, OSError)')} as error:"):
            w.emit_one(
                "print(type(error).__name__)", f"print('failed', {x})", f"{result} -= {x}", "print('caught:', error)"
            )
        if w.rng.random() < 0.4:
            w.nested("else:", f"{result} *= 2")
        if w.rng.random() < 0.4:
            w.nested("finally:", f"{result} += 1")
    w.emit(f"print({result})")


def _raise(w: Writer) -> None:
    kind, name = w.fresh("class") + "Error", w.fresh("function")
    w.emit(f"class {kind}({w.one_of('Exception', 'ValueError', 'ArithmeticError')}):", "    pass")
    with w.function(f"def {name}(x):", ["x"]):
        w.nested(f"if {w.condition()}:", f"raise {kind}(f'bad {{x}}')")
        w.emit(f"return {w.number()}")
    with w.block(f"for v in ({w.small(0, 20)}, {w.small(0, 20)}, {w.small(0, 20)}):"):
        w.nested("try:", f"print('ok', {name}(v))")
        with w.block(f"except {kind} as problem:"):
            w.emit_one("print(problem)", "print('error:', problem, v)", "print(problem.args)")


def _cleanup(w: Writer) -> None:
    name = w.fresh("function")
    with w.function(f"def {name}(x):", ["x"]):
        w.nested("try:", f"return {w.small(10, 99)} // x")
        w.nested("except ZeroDivisionError:", f"return {w.number()}")
        w.nested("finally:", f"print('leaving', {w.number()})")
    w.emit(f"print({name}({w.small(0, 5)}) + {name}(0))")


def _generator(w: Writer) -> None:
    name, total = w.fresh("function"), w.fresh("int")
    with w.function(f"def {name}(n):", ["n"]):
        w.emit(f"{total} = {w.small(0, 4)}")
        w.live["int"].append(total)
        with w.block("for i in range(n):"):
            w.live["int"].append("i")
            w.emit(f"{total} += {w.number()}")
            w.nested(f"if {w.condition()}:", w.one_of("continue", f"yield -{total}", "yield i"))
            w.emit(f"yield {total}")
        if w.rng.random() < 0.4:
            w.emit(f"yield from [{total}, n]")
    steps = w.small(3, 6)
    first = f"next({name}({steps}), None)"
    w.print_one(f"list({name}({steps}))", f"sum({name}({steps}))", f"{first}, max({name}({steps}), default=0)")


def _closure(w: Writer) -> None:
    name, inner, state = w.fresh("function"), w.fresh("function"), w.fresh("int")
    with w.function(f"def {name}({state}):", [state]):
        with w.block(f"def {inner}(x={w.small()}):"):
            w.live["int"].append("x")
            w.emit(f"nonlocal {state}", f"{state} {w.one_of('+=', '-=')} {w.number()}", f"return {w.number()}")
        w.emit(f"return {inner}")
    handle = f"{inner}_{len(w.lines)}"
    w.emit(f"{handle} = {name}({w.number(0)})", f"print({handle}(), {handle}({w.small()}), {handle}())")


def _decorator(w: Writer) -> None:
    name, wrapped = w.fresh("function"), w.fresh("function")
    with w.block(f"def {name}(function):"):
        with w.block("def wrapper(*args):"):
            w.print_one("'call', args", "'call', len(args)", "'call', sum(args)")
            w.emit(f"return function(*args) {w.one_of('+', '*', '-')} {w.small(1, 5)}")
        w.emit("return wrapper")
    w.emit(f"@{name}")
    with w.function(f"def {wrapped}(x, y={w.small()}):", ["x", "y"]):
        w.emit(f"return {w.number(2)}")
    w.emit(f"print({wrapped}({w.small()}), {wrapped}({w.number(0)}, {w.small()}))")


def _variadic(w: Writer) -> None:
    name = w.fresh("function")
    w.emit(f"def {name}(first, *rest, scale={w.small(1, 3)}, **options):")
    w.emit(f"    return first * scale + {w.one_of('sum(rest)', 'len(rest)', 'max(rest, default=0)')}, sorted(options)")
    call = f"{name}({w.small()}, *{w.get('list')}, scale={w.small()}, {w.rng.choice(WORDS)}=1)"
    w.emit(f"print({name}({w.number(0)}), {call})")


LIBRARY = [  # what to import, and an expression of {numbers}, {words}, {text}, {table} and small integers {a}, {b}
    ("from collections import Counter", "sorted(Counter(''.join({words})).items())[:{a}]"),
    ("from collections import deque", "list(deque({numbers}, maxlen={a}))"),
    ("from itertools import accumulate", "list(accumulate({numbers}))[-{a}:]"),
    ("from itertools import combinations", "sum(1 for a, b in combinations({numbers}, 2) if a < b + {a})"),
    ("from itertools import groupby", "[(k, len(list(g))) for k, g in groupby(sorted({words}, key=len), key=len)]"),
    ("from functools import reduce", "reduce(lambda a, b: a * {a} + b, {numbers}) % {b}"),
    ("import math", "math.gcd({b}, {a} * 6), math.isqrt({b}), math.comb({a} + 2, 2)"),
    ("import re", "re.findall('[aeiou]+', {text}), re.sub('[a-m]', '{a}', {text})"),
    ("import heapq", "heapq.nsmallest({a}, {numbers}), heapq.nlargest(1, {numbers})"),
    ("import bisect", "bisect.bisect_left(sorted({numbers}), {a} * 3), bisect.bisect(sorted({numbers}), {a})"),
    ("import json", "json.dumps({table}, sort_keys=True)"),
    ("import string", "string.ascii_lowercase[{a}:{b} % 26:{a}]"),
]


def _library(w: Writer) -> None:
    module, expression = w.rng.choice(LIBRARY)
    w.imports.append(module)
    kinds = (("numbers", "list"), ("words", "words"), ("text", "str"), ("table", "dict"))
    bound = {name: w.get(kind) for name, kind in kinds if "{" + name + "}" in expression}
    w.emit(f"print({expression.format(**bound, a=w.small(1, 5), b=w.small(12, 99))})")


def _memo(w: Writer) -> None:
    name = w.fresh("function")
    w.imports.append("from functools import lru_cache")
    w.emit("@lru_cache(maxsize=None)")
    with w.function(f"def {name}(n):", ["n"]):
        w.nested(f"if n < {w.small(1, 3)}:", f"return {w.one_of('n', '1', '2')}")
        earlier = f"{w.small(1, 3)} * {name}(n - {w.small(2, 3)})"
        w.emit(f"return ({name}(n - 1) {w.one_of('+', '*', '-')} {earlier}) % {w.small(50, 999)}")
    w.emit(f"print([{name}(i) for i in range({w.small(4, 10)})], {name}({w.small(20, 60)}))")


def _match(w: Writer) -> None:
    value, limit = w.fresh("int"), w.small(3, 15)
    subjects = f"{w.number()}, [{w.small()}, {w.small()}], {w.rng.choice(WORDS)!r}, None"
    with w.block(f"for {value} in ({subjects}):"), w.block(f"match {value}:"):
        w.emit(f"case int() if {value} > {limit}:", f"    print('big', {value} - {limit})")
        w.emit(f"case [p, {w.one_of('q', '*q')}]:", "    print(p, q)")
        w.emit(f"case {w.one_of('str()', repr(w.rng.choice(WORDS)) + ' | str()')}:", f"    print({value}[::-1])")
        w.emit("case other:", "    print('other', other)")


def _search(w: Writer) -> None:
    values, found = w.get("list"), w.bind("int", "-1")
    with (
        w.block(f"for i, v in enumerate({values}):"),
        w.block(f"if (half := v // 2) {w.one_of('>', '==')} {w.small(2, 9)}:"),
    ):
        w.emit(f"{found} = i * 10 + half", "break")
    w.nested("else:", "print('none')")
    w.emit(f"print({found})")


BY_LEVEL = {
    7: (_counting, _dictionary, _inverted, _sets, _read_numbers, _read_commands, _read_records),
    8: (_class, _subclass, _catch, _raise, _cleanup),
    9: (_generator, _closure, _decorator, _variadic, _library, _memo, _match, _search),
}
