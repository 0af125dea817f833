"""Puts debug prints into a program, as the public trace environment does.

``inject`` reproduces AffineFoundation/affinetes (environments/trace, 345b7bcf); ``inject_safe`` leaves out the prints
that would break the program.
"""

import ast
import random
import re
import warnings
from collections.abc import Callable, Set

from envs.trace.interpreter import Run

MAX_PRINTS = 6
# Signs that a program may go on after a print that raises: it handles exceptions, or one ends only a thread or a task.
SWALLOWS = re.compile(
    r"\b(except|suppress|finally|__a?exit__|[Tt]hread\w*|submit|gather|create_task|ensure_future|wait|__del__|atexit|"
    r"finalize)\b"
)
AFTER_ASSIGNMENT, AFTER_IF = 0.6, 0.4  # probability of a print
SHOWN = "repr({0}) if isinstance({0}, (int, float, str, bool, type(None))) else type({0}).__name__"
# In the trial run a print that raises writes its tag to stderr, once, and lets the program go on.
TRIAL = """
try:
    {printed}
except Exception:
    if {tag!r} not in __import__('sys').modules['__main__'].__dict__:
        __import__('sys').modules['__main__'].__dict__[{tag!r}] = None
        __import__('sys').stderr.write('\\n' + {tag!r} + '\\n')
"""
Execute = Callable[[str], Run]
# What Python remarks on a program (an invalid escape, say) when it is read is not about this one.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=r"program|<unknown>")


class _Injector:
    """One pass over a program; ``scopes`` holds the names bound so far, the module's first."""

    def __init__(self, seed: int, max_prints: int, trial: bool, skip: Set[str]):
        self.rng, self.max_prints, self.trial, self.skip = random.Random(seed), max_prints, trial, skip
        self.prints = 0
        self.scopes: list[dict[str, None]] = [{}]

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements of a module, def, for or if, with prints after some assignments and ifs."""
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
        """Handle the statements inside a statement; only bodies of def, for and if get prints."""
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
        """Return a print of one to three bound names, or nothing."""
        if self.prints == self.max_prints or self.rng.random() >= probability:
            return []
        names = list(dict.fromkeys(name for scope in self.scopes for name in scope))
        if not names:
            return []
        chosen = self.rng.sample(names, self.rng.randint(1, min(3, len(names))))
        tag = f"__DBG_{self.prints}__"
        self.prints += 1
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
    A program that is not valid Python comes back below a comment that says so.
    """
    program = _without_fence(program)
    try:
        tree = ast.parse(program)
    except SyntaxError as error:
        return f"# Syntax Error in source: {error}\n{program}"
    tree.body = _Injector(seed, max_prints, trial, skip).block(tree.body)
    return ast.unparse(ast.fix_missing_locations(tree))


def compiles(program: str) -> bool:
    """Return whether a program, taken out of its code fence, is valid Python."""
    try:
        compile(_without_fence(program), "program", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def inject_safe(program: str, seed: int, execute: Execute, max_prints: int = MAX_PRINTS) -> tuple[str, Run]:
    """Return the program with those prints of ``inject`` that do not raise, and its run; none if the output is full.

    ``execute`` runs a program. A trial run, in which prints that raise report their tags, tells which to leave out; the
    others keep their tags. Programs that end well and cannot have swallowed an exception need no trial run.
    """
    shown = inject(program, seed, max_prints)
    run = execute(shown)
    if run.status == "error" or (run.status == "ok" and SWALLOWS.search(program)):
        broken = frozenset[str]()
        if not compiles(shown) and compiles(program):  # a print of a name before its ``global`` statement
            tags = {f"__DBG_{n}__" for n in range(max_prints)}
            broken = frozenset(t for t in tags if not compiles(inject(program, seed, max_prints, skip=tags - {t})))
        trial = execute(inject(program, seed, max_prints, trial=True, skip=broken))
        broken |= frozenset(re.findall(r"^__DBG_\d+__$", trial.stderr, re.MULTILINE))
        if broken:
            shown = inject(program, seed, max_prints, skip=broken)
            run = execute(shown)
    if run.status == "output" and max_prints:  # perhaps because of a print in a long loop
        return inject_safe(program, seed, execute, 0)
    return shown, run
