"""Debug prints put into a program, as the public trace environment does.

``inject`` reproduces AffineFoundation/affinetes (environments/trace, 345b7bcf); ``inject_safe`` is the same injection
without the prints that break the program.
"""

import ast
import random
import re
from collections.abc import Callable, Set

from envs.trace.interpreter import Run

MAX_PRINTS = 6
# By which a program may go on after a print that raises: handlers, and what ends a thread or a task alone.
SWALLOWS = re.compile(
    r"\b(except|suppress|finally|__a?exit__|[Tt]hread\w*|submit|gather|create_task|ensure_future|wait|__del__|atexit|"
    r"finalize)\b"
)
AFTER_ASSIGNMENT, AFTER_IF = 0.6, 0.4  # probability of a print
SHOWN = "repr({0}) if isinstance({0}, (int, float, str, bool, type(None))) else type({0}).__name__"
# In the trial run a print that raises reports itself once and lets the program go on.
TRIAL = """
try:
    {printed}
except Exception:
    if {tag!r} not in __import__('sys').modules['__main__'].__dict__:
        __import__('sys').modules['__main__'].__dict__[{tag!r}] = None
        __import__('sys').stderr.write({tag!r} + '\\n')
"""
Execute = Callable[[str], Run]


class _Injector:
    """One pass over a program. ``scopes`` holds the names bound so far, outermost function first."""

    def __init__(self, seed: int, max_prints: int, trial: bool, skip: Set[str]):
        self.rng = random.Random(seed)
        self.left, self.trial, self.skip = max_prints, trial, skip
        self.max_prints = max_prints
        self.scopes: list[dict[str, None]] = [{}]

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The statements of a module, def, for or if, with prints after some assignments and ifs."""
        result: list[ast.stmt] = []
        for statement in body:
            result.append(statement)
            if isinstance(statement, ast.Assign | ast.AugAssign | ast.For | ast.AsyncFor):
                self.bind(statement)
            self.inside(statement)
            if isinstance(statement, ast.Assign | ast.AugAssign):
                result += self.site(AFTER_ASSIGNMENT)
            elif isinstance(statement, ast.If):
                result += self.site(AFTER_IF)
        return result

    def bind(self, statement: ast.Assign | ast.AugAssign | ast.For | ast.AsyncFor) -> None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        while targets:
            target, *targets = targets
            if isinstance(target, ast.Name):
                self.scopes[-1].setdefault(target.id)
            elif isinstance(target, ast.Tuple | ast.List):
                targets = [*target.elts, *targets]

    def inside(self, statement: ast.AST) -> None:
        """Go through what the statement contains; other compound statements get no prints of their own."""
        if isinstance(statement, ast.FunctionDef):
            self.scopes.append(dict.fromkeys(argument.arg for argument in statement.args.args))
            statement.body = self.block(statement.body)
            self.scopes.pop()
        elif isinstance(statement, ast.For | ast.If):
            statement.body = self.block(statement.body)
            statement.orelse = self.block(statement.orelse)
        else:
            for child in ast.iter_child_nodes(statement):
                self.inside(child)

    def site(self, probability: float) -> list[ast.stmt]:
        """A print of one to three live names, or nothing."""
        if not self.left or self.rng.random() >= probability:
            return []
        names = list(dict.fromkeys(name for scope in self.scopes for name in scope))
        if not names:
            return []
        chosen = self.rng.sample(names, self.rng.randint(1, min(3, len(names))))
        tag = f"__DBG_{self.max_prints - self.left}__"
        self.left -= 1
        if tag in self.skip:
            return []
        printed = f"print({tag!r}, {', '.join(SHOWN.format(name) for name in chosen)})"
        return ast.parse(TRIAL.format(printed=printed, tag=tag) if self.trial else printed).body


def _without_fence(program: str) -> str:
    program = program.strip()
    if not program.startswith("```"):
        return program
    return program[max(program.find("\n"), 0) :].strip().removesuffix("```").strip()


def inject(
    program: str, seed: int, max_prints: int = MAX_PRINTS, trial: bool = False, skip: Set[str] = frozenset()
) -> str:
    """Return ``program`` as the public environment shows it: re-formatted, with up to ``max_prints`` debug prints.

    Each print is tagged ``__DBG_0__``, ``__DBG_1__``, ... and shows one to three names bound before it: the
    ``repr`` of a number, string, truth value or None, else the name of the type. ``seed`` (the task id) decides
    where. A print may raise where its names are not bound (a branch not taken, ``del``); see ``inject_safe``.
    A program that is no Python comes back below a comment that says so.
    """
    program = _without_fence(program)
    try:
        tree = ast.parse(program)
    except SyntaxError as error:
        return f"# Syntax Error in source: {error}\n{program}"
    tree.body = _Injector(seed, max_prints, trial, skip).block(tree.body)
    return ast.unparse(ast.fix_missing_locations(tree))


def compiles(program: str) -> bool:
    """Whether a program, out of its code block, is Python."""
    try:
        compile(_without_fence(program), "program", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def inject_safe(program: str, seed: int, execute: Execute, max_prints: int = MAX_PRINTS) -> tuple[str, Run]:
    """``inject`` without the prints that raise, and the run of the result; without any where they fill the output.

    ``execute`` runs a program. Which prints raise is seen in a trial run in which they report themselves; the
    others keep their tags. Programs that end well and cannot have swallowed an exception need no trial.
    """
    shown = inject(program, seed, max_prints)
    run = execute(shown)
    if run.status == "error" or (run.status == "ok" and SWALLOWS.search(program)):
        broken = frozenset[str]()
        if not compiles(shown) and compiles(program):  # a print before ``global``
            tags = {f"__DBG_{n}__" for n in range(max_prints)}
            broken = frozenset(t for t in tags if not compiles(inject(program, seed, max_prints, skip=tags - {t})))
        trial = execute(inject(program, seed, max_prints, trial=True, skip=broken))
        broken |= frozenset(re.findall(r"^__DBG_\d+__$", trial.stderr, re.MULTILINE))
        if broken:
            shown = inject(program, seed, max_prints, skip=broken)
            run = execute(shown)
    if run.status == "output" and max_prints:  # a print in a loop of many rounds
        return inject_safe(program, seed, execute, 0)
    return shown, run
