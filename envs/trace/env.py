"""Programs as an environment: the model reads one, with debug prints put in, and answers with its output.

An episode is one free-form answer. Programs come from the generator (``programs.py``), from files, or from a
dataset on the Hub. With files and datasets the task id picks the program (modulo their number) and seeds the
prints, as in the public trace environment. With the generator it picks the level, ``task_id // 10_000_000``,
and together with the task's seed the program and the prints.

The expected output is found by running the program (``sandbox.py``): untrusted programs each in a locked-in
interpreter of their own, the generator's, which are ours, one after another in the same locked-in interpreter.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config.reader import blaming, read_text
from envs.client import hub_problem, one_line
from envs.config import EnvConfig, TraceConfig
from envs.trace.prints import MAX_PRINTS, compiles, inject_safe
from envs.trace.programs import LEVELS, Program, generate
from envs.trace.sandbox import Run, Sandbox, SandboxError
from envs.trace.scoring import leading_share, score
from envs.types import Step, Task

TASKS_PER_LEVEL = 10_000_000
SOURCE_BYTES = 2**31  # of a file of programs
PROGRAM_CHARACTERS = 2**15  # a few hundred thousand can cost Python's parser gigabytes, or crash the process
CACHED_TASKS = 4096  # so that replayed and evaluated tasks are not run again
SHOWN_CHARACTERS = 500  # of the expected output, in the info of a finished episode
NO_END = "does not finish here:"
LOCAL = ".jsonl", ".json", ".py"  # with these endings a source is never the name of a dataset on the Hub
# The last line of Python at the limits on memory, threads, open files, and the sizes of a file and of the folder; and
# where a program asks for what the sandbox does not have: modules, other processes, sockets, its own file.
LIMIT_MET = re.compile(
    r"MemoryError\b|RuntimeError: can't start new thread|"
    r"(OSError|PermissionError|_g?dbm\.error): \[Errno (1|13|24|27|28|38)\]|"
    r"ModuleNotFoundError: No module named|NameError: name '__file__' is not defined|"
    r"OSError: could not get source code|urllib\.error\.URLError\b|socket\.(gai|h)error\b|"
    r"sqlite3\.OperationalError: (access permission|unable to open)|"
    r"FileNotFoundError: \[Errno 2\] (No usable temporary directory|"
    r"No such file or directory($|: '(program|/psm_\w+)'$))|"  # of no file: a semaphore of several processes
    r"This probably means that Tcl wasn't installed|KeyError: 'getpwuid\(\)|"
    r"OSError: No username set in the environment"
)
# Signals that end the interpreter when memory or the C stack is exhausted: output that it had buffered is lost.
KILLED = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
SYSTEM = (
    "You execute Python programs in your head. You are given a program and its standard input. Answer with exactly "
    "what it writes to standard output, every line of it, and nothing else: no explanation and no code block.\n"
    "Prints that begin with __DBG_ were added to the program and belong to its output. They show the repr of a "
    "number, a string, a truth value or None, and only the name of the type of anything else."
)


class Traced(NamedTuple):
    """A prepared task: the program as shown, its standard input, its output without surrounding whitespace."""

    name: str
    program: str
    inputs: str
    expected: str


class TraceEnv:
    """One program an episode; see ``envs.types.Env``. It uses prompt, protocol and trace of the configuration.

    The game in ``Step.info`` is ``trace``, or ``trace_l3`` for level 3 of the generator. When done, info also holds
    match (equal as the public environment compares) and exact (equal character by character), both whatever the
    configured protocol, share (of leading lines that are correct by that protocol) and expected (the first 500
    characters of the output).

    ValueError: the source does not exist, or has rows without programs. SandboxError: programs of others on a machine
    below ``sandbox_min_level``.
    """

    def __init__(self, config: EnvConfig):
        self.config, self.trace = config, TraceConfig(**config.trace)
        self._workshop = _workshop(self.trace)
        self._task: Traced | None = None  # None: no episode, steps are refused

    def reset(self, task: Task) -> Step:
        """Show the task's program; ValueError: its id is out of range; NoAnswerError: its output cannot be found."""
        self.close()
        self._task = self._workshop.prepare(task.task_id, task.seed)
        return Step(self._message(self._task), {}, False, 0.0, self._info(self._task, None))

    def step(self, text: str) -> Step:
        """Score the model's raw answer, which ends the episode; RuntimeError if no episode is running."""
        if self._task is None:
            raise RuntimeError("step without a running episode: it has finished or was closed; call reset first")
        task = self._task
        share = leading_share(task.expected, text, self.config.protocol)
        result = share if self.trace.partial_credit else score(task.expected, text, self.config.protocol)
        self.close()
        info = self._info(task, "finished") | {
            "returns": [result],
            "scores": {0: result},
            "match": score(task.expected, text, "affinetes"),
            "exact": score(task.expected, text, "native"),
            "share": share,
            "expected": task.expected[:SHOWN_CHARACTERS],
        }
        return Step("", {}, True, result, info)

    def close(self) -> None:
        """End the episode; further steps are refused until the next reset."""
        self._task = None

    def _message(self, task: Traced) -> str:
        if self.config.prompt == "compact":
            return f"{task.program}\n<<<\n{task.inputs}" if task.inputs else task.program
        inputs = task.inputs if task.inputs.endswith("\n") or not task.inputs else task.inputs + "\n"
        return f"Program:\n```python\n{task.program}\n```\n\nStandard input:\n```\n{inputs}```\n\nStandard output:"

    def _info(self, task: Traced, outcome: str | None) -> dict[str, Any]:
        system = SYSTEM if self.config.prompt == "full" else "trace"
        known = {"game": task.name, "seat": 0, "system": system, "attempt": 1, "adapter": None}
        return known | {"history": [] if outcome is None else [[0, 0]], "outcome": outcome}


class NoAnswerError(ValueError):
    """A program's output cannot be determined; its episodes fail."""


def check_config(config: EnvConfig, task_ids: Iterable[int]) -> None:
    """Prepare tasks before a model is loaded; ConfigError: no such source, an id out of range, a sandbox too weak."""
    with blaming("env.trace: ", (ValueError, SandboxError)):
        env = TraceEnv(config)
        for task_id in task_ids:
            with contextlib.suppress(NoAnswerError):
                env.reset(Task(task_id))


def expected_output(config: EnvConfig, task: Task) -> str:
    """Return a task's output, without surrounding whitespace; raises what ``TraceEnv.reset`` raises."""
    return TraceEnv(config)._workshop.prepare(task.task_id, task.seed).expected


def programs_digest(config: EnvConfig) -> dict[str, str]:
    """Return ``{"programs": SHA-256}`` of a source's programs in their order; {} for the generator's."""
    if config.env_type != "trace" or config.env_mode != "local" or (rows := TraceEnv(config)._workshop.rows) is None:
        return {}
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, default=str).encode())
    return {"programs": digest.hexdigest()}


class _Workshop:
    """Prepares tasks. Shared by all environments of one configuration; safe to use from many threads."""

    def __init__(self, trace: TraceConfig):
        self.trace = trace
        self.rows = None if trace.source == "generator" else load_programs(trace.source)
        level = 0 if self.rows is None else trace.sandbox_min_level
        self.sandbox, self.again = Sandbox(min_level=level), Sandbox(min_level=level, spares=1, hash_seed=1)
        atexit.register(self.sandbox.close)
        atexit.register(self.again.close)
        self.endless = set[Program]()  # rows that ran out of time; every task on one would wait for the limit again
        self._cached = functools.lru_cache(CACHED_TASKS)(self._prepare)

    def prepare(self, task_id: int, seed: int | None) -> Traced:
        """Return a task as it is shown, and its output; the seed is the generator's, rows ignore it."""
        prepared = self._cached(task_id, seed if self.rows is None else None)
        if isinstance(prepared, str):
            raise NoAnswerError(f"task_id {task_id}: the program {prepared}")
        return prepared

    def _prepare(self, task_id: int, seed: int | None) -> Traced | str:
        """Return the task, or what is wrong with its program."""
        if not 0 <= task_id < LEVELS * TASKS_PER_LEVEL:  # a game's, say, also where every id would mean some row
            raise ValueError(f"task_id {task_id} is out of range: allowed are 0 to {LEVELS * TASKS_PER_LEVEL - 1}")
        if self.rows is None:
            level, key = task_id // TASKS_PER_LEVEL, task_id
            if seed is not None:
                key = int.from_bytes(hashlib.sha256(f"trace:{task_id}:{seed}".encode()).digest()[:8], "big")
            row, name, injection_seed = generate(level, key), f"trace_l{level}", key
            max_prints = min(MAX_PRINTS, max(0, level - 1))
            run = self.sandbox.run_trusted
        else:
            row, name, injection_seed = _row(self.rows[task_id % len(self.rows)]), "trace", task_id
            max_prints, run = MAX_PRINTS, self.sandbox.run
            if len(row.program) > PROGRAM_CHARACTERS:
                return f"has {len(row.program):,} characters; {PROGRAM_CHARACTERS:,} at most are allowed"
            if not compiles(row.program):
                return "is not valid Python"
        if row in self.endless:
            return f"{NO_END} timeout"

        try:
            row.inputs.encode()
            shown, result = inject_safe(row.program, injection_seed, lambda p: run(p, row.inputs), max_prints)
        except (RecursionError, MemoryError, ValueError):  # too deep, half a surrogate pair, or a null character
            return "cannot be read"
        if limit := _limit_of(result):
            if self.rows is None:  # the generator's programs all end: the machine is to blame, so this is not cached
                raise NoAnswerError(f"task_id {task_id}: the program {NO_END} {limit}")
            if result.status == "timeout":
                self.endless.add(row)
            return f"{NO_END} {limit}"
        if self.rows is not None:
            again = self.again.run(shown, row.inputs)
            if limit := _limit_of(again):
                return f"{NO_END} {limit}"
            if again.stdout != result.stdout:
                return "prints something else when it is run again"
        return Traced(name, shown, row.inputs, result.stdout.strip())


_workshop = functools.cache(_Workshop)


def _limit_of(run: Run) -> str:
    """Return what kept a program from its end, a limit or the sandbox, "" if nothing did."""
    if run.status not in ("ok", "error"):
        return run.status
    last = run.stderr.rstrip().rpartition("\n")[2]
    return last if LIMIT_MET.match(last) else "killed" if run.returncode - 128 in KILLED else ""


def level_parts(first: int, last: int) -> list[tuple[int, int]]:
    """Return the first and last task id of the range's part of each level that it touches."""
    size = TASKS_PER_LEVEL
    levels = range(first // size, last // size + 1)
    return [(max(first, level * size), min(last, (level + 1) * size - 1)) for level in levels]


def load_programs(source: str) -> Sequence[Any]:
    """Return the programs of a folder (its .jsonl and .py files, by name) or .jsonl file, or a Hub dataset's rows.

    Hidden files are left out. A .jsonl line is ``{"program": text, "inputs": text}``; ``inputs`` may be missing. The
    standard input of ``name.py`` is ``name.in``, if there is such a file.

    ValueError: no such source, no programs in it, or a row that is not a program (file and line are named).
    """
    path = Path(os.path.expanduser(source))
    if source and path.is_dir():
        shown = [file for file in path.rglob("*") if "/." not in f"/{file.relative_to(path)}"]
        files = sorted(file for file in shown if file.suffix in (".jsonl", ".py"))
        rows = [row for file in files for row in _read(file)]
    elif path.suffix == ".jsonl" and path.is_file():
        rows = _read(path)
    elif source.count("/") == 1 and source[0] not in "./~" and path.suffix not in LOCAL and not path.exists():
        problem = hub_problem()  # first: the library then knows, and does not try for half a minute
        import datasets  # installed with trl; imported only for this source: it takes half a second

        try:
            rows = datasets.load_dataset(source, split="train")
        except Exception as error:  # the network, the Hub or the dataset's files may raise anything
            cause = problem or one_line(f"{type(error).__name__} {error}")
            raise ValueError(f"trace.source {source!r} cannot be read from the Hub: {cause}") from error
    else:
        allowed = 'generator, a folder, a .jsonl file, or the name of a Hub dataset ("owner/name")'
        problem = "is no source" if source and path.exists() else "is not there"  # one .py file, say
        raise ValueError(f"trace.source {source!r} {problem}: {allowed}")
    if not rows:
        raise ValueError(f"trace.source {source!r} holds no programs: .jsonl lines or .py files are expected")
    return rows


def _read(file: Path) -> list[Program]:
    text = read_text(file, SOURCE_BYTES)
    if file.suffix == ".py":
        inputs = file.with_suffix(".in")
        return [Program(text, read_text(inputs, SOURCE_BYTES, "utf-8") if inputs.exists() else "")]
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        with blaming(f"{file}:{number}: ", (ValueError, RecursionError), raising=ValueError):
            rows += [_row(json.loads(line))] if line.strip() else []
    return rows


def _row(data: Any) -> Program:
    """Return a row as a program; ValueError if it has none, or an input that is not text."""
    if isinstance(data, Program):
        return data
    program, inputs = (data.get("program"), data.get("inputs")) if isinstance(data, dict) else (None, "")
    inputs = "" if inputs is None else inputs
    if not isinstance(program, str) or not isinstance(inputs, str):
        raise ValueError('expected {"program": text, "inputs": text}')
    if "inputs" not in data and (typed := {"input", "stdin"} & {*data}):
        raise ValueError(f'{min(typed)!r} is not read: the standard input is "inputs"')
    return Program(program, inputs)
