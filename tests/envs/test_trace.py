"""The trace environment: golden rows, safe injection, scores, programs of every level, sources, contract."""

import ast
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from attacks import run_all, works
from hypothesis import given
from hypothesis import strategies as st
from players import FunctionPlayer

from config.reader import ConfigError, load_config
from env_wrapper import EnvConfig, Task
from envs.contract import check_contract
from envs.trace import TASKS_PER_LEVEL, TraceConfig, TraceEnv, inject, inject_safe, load_programs, programs, score
from envs.trace.env import LIMIT_MET, NoAnswerError, check_config
from envs.trace.programs import CONSTRUCTS, LEVELS, generate
from envs.trace.sandbox import Limits, Run, Sandbox, SandboxError
from envs.trace.scoring import clean, leading_share
from evaluation.measure import evaluate

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "trace.json").read_text())
ROWS = [row for row in GOLDEN["rows"] if row["py312_same"] or sys.version_info < (3, 12)]
BROKEN = {row["name"] for row in ROWS if row["stderr_last_line"] and not row["original_stderr_last_line"]}
LEVEL = TASKS_PER_LEVEL


@pytest.fixture(scope="module")
def box():
    with Sandbox(min_level=0, spares=3) as made:
        yield made


def new_env(prompt="full", protocol="affinetes", **settings):
    config = EnvConfig(env_type="trace", prompt=prompt, protocol=protocol, answer_mode="free", trace=settings)
    return TraceEnv(config)


# Injection and comparison


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']}-{row['task_id']}")
def test_golden_injection(row):
    assert inject(row["program"], row["task_id"]) == row["transformed"]


def test_golden_output(box):
    runs = run_all(box, [(row["transformed"], row["stdin"]) for row in ROWS])
    for row, run in zip(ROWS, runs, strict=True):
        assert run.stdout == row["stdout"], row["name"]
        assert run.stdout.strip() == row["ground_truth"]
        assert (run.stderr.strip().split("\n")[-1] or None) == row["stderr_last_line"]


@pytest.mark.parametrize("pair", GOLDEN["compare"], ids=lambda pair: repr(pair["prediction"][:20]))
def test_golden_comparison(pair):
    assert clean(pair["prediction"]) == pair["cleaned"]
    assert score(pair["expected"], pair["prediction"]) == pair["score"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']}-{row['task_id']}")
def test_safe_injection_never_breaks_a_program(row, box):
    shown, run = inject_safe(row["program"], row["task_id"], lambda program: box.run_trusted(program, row["stdin"]))
    if row["stderr_last_line"] == row["original_stderr_last_line"]:
        assert shown == row["transformed"]
        return
    assert run.status == "ok"
    left_out = set(row["transformed"].split("\n")) - set(shown.split("\n"))
    assert left_out
    assert all(line.strip().startswith("print('__DBG_") for line in left_out)
    plain = [line for line in run.stdout.split("\n") if not line.startswith("__DBG_")]
    assert plain == row["original_stdout"].split("\n")


def test_some_golden_rows_break():
    assert {"untaken_branch", "del_var"} <= BROKEN


SWALLOWING = """
def f(flag):
    for i in range(3):
        try:
            if flag:
                hidden = 1
            if i:
                x = 5
        except Exception:
            print('caught')
    return 0
f(False)
"""


def test_safe_injection_sees_swallowed_exceptions(box):
    """A print that raises inside a try ends no program, but changes what it does."""
    changed = 0
    for seed in range(40):
        public = box.run_trusted(inject(SWALLOWING, seed))
        shown, run = inject_safe(SWALLOWING, seed, box.run_trusted)
        changed += "caught" in public.stdout
        assert "caught" not in run.stdout
        assert run == box.run_trusted(shown)._replace(seconds=run.seconds)
    assert changed


QUIET = """
class Quiet:
    def __enter__(self):
        return self
    def __exit__(self, *what):
        return True
def work(flag):
    if flag:
        hidden = 1
    x = 5
    print('done', x)
with Quiet():
    work(0)
print('end')
"""


def test_safe_injection_sees_exceptions_that_end_in_a_context(box):
    public = [box.run_trusted(inject(QUIET, seed)).stdout for seed in range(20)]
    assert not all("done" in text for text in public)
    assert all("done" in inject_safe(QUIET, seed, box.run_trusted)[1].stdout for seed in range(20))


def test_safe_injection_with_shadowed_builtins(box):
    program = "type = 3\nrows = [1]\nstr = 'x'\nrows += [2]\nrows += [3]\nprint(type, str)"
    results = [inject_safe(program, seed, box.run_trusted)[1] for seed in range(20)]
    assert {run.status for run in results} == {"ok"}


def test_at_most_so_many_prints():
    program = "\n".join(f"x{n} = {n}" for n in range(40))
    assert max(inject(program, seed).count("__DBG_") for seed in range(20)) == 6
    assert max(inject(program, seed, 2).count("__DBG_") for seed in range(20)) == 2
    assert inject(program, 1, 0) == program


@pytest.mark.parametrize(("site", "probability"), [("if y:\n    pass", 0.4), ("y.z = 1", 0.6), ("y.z += 1", 0.6)])
def test_how_often_a_site_gets_a_print(site, probability):
    for seed in range(300):
        drawn = random.Random(seed).random() < probability
        assert ("__DBG_0__" in inject(f"for x in y:\n    pass\n{site}", seed)) == drawn


def test_which_statements_get_prints():
    """Names of while, with, try, class and async bodies are not seen and they get no prints; for-else bodies do."""
    hidden = "while y:\n    a = 1\nwith y:\n    b = 1\ntry:\n    c = 1\nfinally:\n    d = 1\nclass C:\n    e = 1"
    assert all(inject(hidden, seed) == ast.unparse(ast.parse(hidden)) for seed in range(20))
    shown = "async def g(n):\n    if n:\n        p = 1\ndef h(q, *r, s=1, **t):\n    u = q\n"
    shown += "for v in w:\n    pass\nelse:\n    x = 2"
    seen = {name for seed in range(60) for name in re.findall(r"repr\((\w+)\)", inject(shown, seed))}
    assert seen == {"p", "q", "u", "v", "x"}


def test_not_python():
    assert inject("def f(:", 0).startswith("# Syntax Error in source: invalid syntax")
    assert inject("```python\nx = 1\n```", 3) == inject("x = 1", 3)


SCORES = [
    ("1 2", "12", 1.0, 0.0),
    ("a\nb", "a\nb\n", 1.0, 1.0),
    ("a\nb", "A\nB", 1.0, 0.0),
    ("a", "```\na\n```", 1.0, 1.0),
    ("a", "<think>b</think>a", 1.0, 1.0),
    ("a", "<THINK>b</THINK>a", 0.0, 0.0),
    ("a", "b</thinking>a", 1.0, 1.0),
    ("a", "<thinking>x<think>y</thinking>z</think>a", 0.0, 0.0),
    ("a", "", 0.0, 0.0),
    ("a  b", "a b", 1.0, 0.0),
]


@pytest.mark.parametrize(("expected", "prediction", "public", "exact"), SCORES)
def test_scores(expected, prediction, public, exact):
    assert score(expected, prediction) == public
    assert score(expected, prediction, "native") == exact


def test_score_names_its_protocols():
    with pytest.raises(ValueError, match="'strict' is not known: affinetes or native"):
        score("a", "a", "strict")


SHARES = [("a\nb\nc\nd", "a\nb\nx\nd", 0.5), ("a\nb", "a\nb\nc\nd", 0.5), ("a\nb", "x\nb", 0.0), ("a\nb", "A \nb", 1.0)]


@pytest.mark.parametrize(("expected", "prediction", "share"), SHARES)
def test_leading_share(expected, prediction, share):
    assert leading_share(expected, prediction) == share


def test_line_ends_of_windows_are_line_ends():
    fenced = "# Title\n```\ncode\n```\nfour\n"  # an answer that holds a block of code need not be one
    assert leading_share(f"{fenced}five", f"{fenced}5", "native") == 5 / 6
    assert leading_share("a\nb\nc", "a\r\nb\r\nX", "native") == leading_share("a\nb\nc", "a\nb\nX", "native") == 2 / 3


def test_partial_credit():
    task = Task(3 * LEVEL, 1)
    for partial in (False, True):
        env = new_env(partial_credit=partial)
        env.reset(task)
        expected = env._task.expected
        lines = expected.split("\n")
        assert len(lines) > 1
        step = env.step("\n".join([*lines[:-1], "wrong"]))
        assert step.score == ((len(lines) - 1) / len(lines) if partial else 0.0)
        env.reset(task)
        assert env.step(expected).score == 1.0


# Programs


def test_generated_programs_end_alike_in_two_hash_seeds(box):
    """Of every level; ten thousand in the slow test below."""
    check_programs(box, 60)


@pytest.mark.slow
def test_ten_thousand_generated_programs(box):
    check_programs(box, 1000)


def check_programs(box, per_level):
    with Sandbox(min_level=0, hash_seed=4242) as other:
        seen = set()
        for level in range(LEVELS):
            lengths = []
            for seed in range(per_level):
                program = generate(level, seed)
                assert program == generate(level, seed)
                run, again = box.run_trusted(*program), other.run_trusted(*program)
                assert run.status == "ok", (program, run)
                assert run.stdout == again.stdout, program
                assert run.stdout.strip(), program
                assert run.seconds < 1
                seen.add(program)
                lengths.append(len(program.program))
            assert sum(lengths) / len(lengths) > (level > 0) * 50, "programs grow with the level"
        assert len(seen) >= 0.99 * LEVELS * per_level


def test_trusted_runs_equal_runs_in_an_interpreter_of_their_own(box):
    programs = [generate(level, f"own {seed}") for level in range(LEVELS) for seed in range(4)]
    alone = run_all(box, programs)
    assert [run.stdout for run in alone] == [box.run_trusted(*program).stdout for program in programs]


@pytest.mark.parametrize("level", [2, 5, LEVELS - 1])
def test_every_construct_appears(level, monkeypatch):
    """Each construct of the level and those below is really drawn, and none above."""
    drawn = set()

    def noting(number, function):
        def noted(writer):
            drawn.add(number)
            function(writer)

        return noted

    noted = [(minimum, noting(number, function)) for number, (minimum, function) in enumerate(CONSTRUCTS)]
    monkeypatch.setattr(programs, "CONSTRUCTS", noted)
    for seed in range(600):
        generate(level, seed)
    assert drawn == {number for number, (minimum, _) in enumerate(noted) if minimum <= level}


WANTED = {
    "for": 3, "while": 3, "def": 6, "lambda": 6, "class": 8, "try": 8, "raise": 8, "yield": 9, "nonlocal": 9,
    "input()": 7, "return": 6, ".append(": 5, ".upper()": 4, "{": 7, "import": 9, "match": 9, "super()": 8,
}  # fmt: skip


def test_levels_bring_what_they_say():
    texts = {level: "\n".join(generate(level, seed).program for seed in range(300)) for level in range(LEVELS)}
    for word, level in WANTED.items():
        assert word in texts[level], (word, level)
        if word != "{":
            assert all(word not in texts[lower] for lower in range(level)), word


def test_level_0_is_one_digit_from_two():
    for seed in range(300):
        program = generate(0, seed).program
        assert re.fullmatch(r"([a-z]) = \d\n([a-z] = [^\n]+\n)?print\([^\n]+\)\n", program), program
        assert len(program) <= 30


def test_no_such_level():
    with pytest.raises(ValueError, match="level 10 does not exist: 0 to 9"):
        generate(10, 0)


# The environment


@pytest.mark.parametrize("level", range(LEVELS))
@pytest.mark.parametrize("prompt", ["full", "compact"])
def test_contract(level, prompt):
    steps = check_contract(lambda: new_env(prompt), Task(level * LEVEL + 7, 3), lambda step, rng: "wrong")
    first, last = steps
    assert first.info["game"] == f"trace_l{level}"
    assert (first.info["seat"], first.info["attempt"], first.info["adapter"], first.legal) == (0, 1, None, {})
    assert (last.score, last.info["exact"], last.info["match"]) == (0.0, 0.0, 0.0)
    assert len(last.info["history"]) == 1


def test_right_answers_score_one():
    for level in range(LEVELS):
        env = new_env()
        env.reset(Task(level * LEVEL, 11))
        expected = env._task.expected
        step = env.step(f"<think>hm</think>```\n{expected}\n```")
        assert (step.score, step.info["exact"], step.info["match"], step.info["share"]) == (1, 1, 1, 1)
        assert step.info["expected"] == expected[:500]


def test_native_protocol_is_exact():
    for protocol, wanted in (("affinetes", 1.0), ("native", 0.0)):
        env = new_env(protocol=protocol)
        env.reset(Task(3 * LEVEL, 5))
        assert env.step(env._task.expected.replace("\n", "")).score == wanted


def test_task_and_seed_decide_the_program():
    def text(task_id, seed):
        return new_env().reset(Task(task_id, seed)).text

    assert text(LEVEL, 1) == text(LEVEL, 1)
    assert len({text(LEVEL, 1), text(LEVEL, 2), text(LEVEL + 1, 1), text(LEVEL, None)}) == 4


def test_easy_levels_have_fewer_prints():
    most = [
        max(new_env("compact").reset(Task(level * LEVEL + n, 0)).text.count("'__DBG_") for n in range(40))
        for level in range(LEVELS)
    ]
    assert most == [0, 0, 1, 2, 3, 4, 5, 6, 6, 6]


@pytest.mark.parametrize("task_id", [-1, LEVELS * LEVEL])
@pytest.mark.parametrize("own", [False, True])
def test_task_ids_out_of_range(task_id, own, folder):
    env = new_env(**({"source": str(folder)} if own else {}))
    with pytest.raises(ValueError, match=rf"task_id {task_id} is out of range: allowed are 0 to 99999999"):
        env.reset(Task(task_id))


def test_no_secret_in_the_prompt_and_no_answer_either():
    env = new_env("compact")
    step = env.reset(Task(LEVEL * 7 + 3, 2))
    assert env._task.expected not in step.text
    assert set(step.info) == {"game", "seat", "system", "attempt", "adapter", "history", "outcome"}


# Programs of others


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"program": "n = int(input())\nprint(n * 2)", "inputs": "21\n"})
        + "\n\n"
        + json.dumps({"program": "print('b')"})
    )
    (tmp_path / "b.py").write_text("s = input()\nprint(s[::-1])\n")
    (tmp_path / "b.in").write_text("abc\n")
    (tmp_path / "notes.txt").write_text("not a program")
    for hidden in ("._b.py", ".ipynb_checkpoints/b-checkpoint.py"):  # what other systems and editors leave behind
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_bytes(b"\x00\x05\x16\x07")
    return tmp_path


def test_programs_of_a_folder(folder):
    assert [row.inputs for row in load_programs(str(folder))] == ["21\n", "", "abc\n"]
    assert len(load_programs(str(folder / "a.jsonl"))) == 2
    answers = []
    for task_id in (0, 1, 2, 3):
        env = new_env(source=str(folder))
        step = env.reset(Task(task_id, 99))
        assert step.info["game"] == "trace"
        assert inject(load_programs(str(folder))[task_id % 3].program, task_id) in step.text
        answers.append(env._task.expected.split("\n")[-1])
    assert answers == ["42", "b", "cba", "42"]


def test_a_program_of_a_file_runs_twice_whatever_the_seed(tmp_path, monkeypatch):
    """Its output is known after that: thousands of episodes of a small file must not pay for it again."""
    (tmp_path / "a.jsonl").write_text('{"program": "print(3)"}\n')
    new_env(source=str(tmp_path / "a.jsonl"))  # the machine is probed once, by a run of its own
    runs, real = [], Sandbox.run
    monkeypatch.setattr(Sandbox, "run", lambda self, *args: runs.append(args) or real(self, *args))
    source = str(tmp_path / "a.jsonl")
    shown = {new_env(source=source).reset(Task(0, seed)).text for seed in (None, 1, 2)}
    assert (len(shown), len(runs)) == (1, 2)


def test_a_program_that_takes_too_long_the_second_time_is_not_said_to_change(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("print(3)")
    env, real = new_env(source=str(tmp_path)), Sandbox.run

    def slow_again(self, *args):
        run = real(self, *args)
        return run if self.hash_seed == 0 else run._replace(status="timeout", stdout="")

    monkeypatch.setattr(Sandbox, "run", slow_again)
    with pytest.raises(NoAnswerError, match="task_id 0: the program does not finish here: timeout"):
        env.reset(Task(0))


CHANGING = [
    "print({'a', 'b', 'c'})", "print(object())", "import random\nprint(random.random())",
    "import time\nprint(time.time())", "from datetime import datetime\nprint(datetime.now().strftime('%Y-%m-%d'))",
    "import os\nprint(os.environ)",
]  # fmt: skip


@pytest.mark.parametrize("program", CHANGING)
def test_a_program_that_prints_something_else_the_next_time_is_no_task(tmp_path, program):
    (tmp_path / "a.py").write_text(program)
    with pytest.raises(NoAnswerError, match="task_id 0: the program prints something else when it is run again"):
        new_env(source=str(tmp_path)).reset(Task(0))


def test_a_print_that_breaks_a_program_is_found_though_a_line_was_not_ended(box):
    """On standard error: the print's tag stood behind it, and the program was shown as one that crashes."""
    program = "import sys\nsys.stderr.write('working')\nif sys.argv == 3:\n    x = 1\ny = 2\nz = 3\nprint(y + z)"
    assert {inject_safe(program, seed, box.run_trusted)[1].status for seed in range(20)} == {"ok"}


LATE_GLOBAL = """
count = 1
def add(item):
    text = item.strip()
    global count
    count = count + len(text)
    return count
print(add(' ab '))
"""
HUGE = "a = 7 ** 6000\nr = a % 97\nprint('rest', r)"


@pytest.mark.parametrize("program", [LATE_GLOBAL, HUGE])
def test_safe_injection_leaves_out_prints_that_are_no_python_or_cannot_be_shown(box, program):
    plain, broken = box.run_trusted(program).stdout, 0
    for seed in range(30):
        broken += box.run_trusted(inject(program, seed)).status != "ok"
        _, run = inject_safe(program, seed, box.run_trusted)
        assert run.status == "ok"
        assert "".join(line for line in run.stdout.splitlines(True) if not line.startswith("__DBG_")) == plain
    assert broken, "the public environment's injection breaks it"


def test_safe_injection_puts_no_prints_into_a_long_loop(box):
    program = "a = b = c = 3\nif 0:\n    extra = 1\nfor i in range(40000):\n    a += i\nprint(a)"
    public = {seed: box.run(inject(program, seed)).status for seed in (3, 4)}
    assert public == {3: "error", 4: "output"}, "in one of them a print raises before the loop"
    for seed in public:
        shown, run = inject_safe(program, seed, box.run)
        assert (run.status, run.stdout.split()[-1], "__DBG_" in shown) == ("ok", "799980003", False)
    assert inject_safe("while 1: print(1)", 0, box.run)[1].status == "output"


@pytest.mark.parametrize("program", ["print('\ud800')", "-" * 30_000 + "1", "print 1", "print(1)\0"])
def test_a_program_that_python_cannot_read_is_no_task(tmp_path, program):
    (tmp_path / "a.jsonl").write_text(json.dumps({"program": program}))
    with pytest.raises(NoAnswerError, match="task_id 0: the program"):
        new_env(source=str(tmp_path / "a.jsonl")).reset(Task(0))


def test_half_a_character_of_standard_input_is_no_task(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"program": "print(1)", "inputs": "\ud800"}))
    with pytest.raises(NoAnswerError, match="task_id 0: the program cannot be read"):
        new_env(source=str(tmp_path / "a.jsonl")).reset(Task(0))


def test_a_long_program_is_not_given_to_the_parser(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(json.dumps({"program": "import a" + ".b" * 2**14}))
    monkeypatch.setattr("envs.trace.env.compiles", lambda program: pytest.fail("parsed"))
    with pytest.raises(NoAnswerError, match="program has 32,776 characters; 32,768 at most are allowed"):
        new_env(source=str(tmp_path / "a.jsonl")).reset(Task(0))


def test_sources_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "x.py").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=rf"^env.trace: {tmp_path}/x.py: cannot be read: No such file"):
        check_config(EnvConfig(env_type="trace", answer_mode="free", trace={"source": str(tmp_path)}), [0])
    with pytest.raises(ConfigError, match=r"^env.trace: trace.source '' is not there"):
        check_config(EnvConfig(env_type="trace", answer_mode="free", trace={"source": ""}), [0])


@given(st.text("`a \n1", max_size=24))
def test_the_answer_in_a_code_block_is_the_public_environments(text):
    block = re.search(r"```[a-zA-Z]*\s*(.*?)```", text.strip(), re.DOTALL)
    assert clean(text) == (block[1].strip() if block else text.strip())


LIMITS = [
    "bytearray(600_000_000)",
    "import threading, time\nfor _ in range(60): threading.Thread(target=time.sleep, args=(1,)).start()",
    "files = [open('/dev/null') for _ in range(200)]",
    "x = " + "+".join(["1"] * 5000),
    "import sys\nsys.stderr.write('warning\\n' * 9000)\nprint('begun')\nbytearray(600_000_000)",
    *(f"import signal\nprint(1)\nsignal.raise_signal(signal.{name})" for name in ("SIGSEGV", "SIGBUS", "SIGABRT")),
    # Not of the program, but of the sandbox: what is not there.
    "import no_such_library",
    "import subprocess\nprint('start')\nsubprocess.run(['echo', 'hi'])",
    "import socket\nprint('ok')\nsocket.socket()",
    "import urllib.request\nurllib.request.urlopen('http://example.com')",
    "import socket\nsocket.gethostbyname('example.com')",
    "import sqlite3\nsqlite3.connect('x.db').execute('create table t(a)')",
    "import multiprocessing\nprint(multiprocessing.Pool(2).map(abs, [-1]))",
    "print(__file__)",
    "import sys\nprint('my source has')\nprint(len(open(sys.argv[0]).readlines()))",
    "print('drawing')\nimport turtle\nturtle.forward(9)",
    "import getpass, os\nos.environ.clear()\nprint(getpass.getuser())",
    "from multiprocessing.shared_memory import SharedMemory\nSharedMemory(create=True, size=8)",
]


@pytest.mark.parametrize("program", [
    "print(12)\nopen('notes.txt', 'w').write('12')", "import os\nos.makedirs('a/b')",
    "import tempfile\ntempfile.NamedTemporaryFile()", "import shelve\nshelve.open('x')['a'] = 1",
])  # fmt: skip
def test_a_program_that_writes_files_is_no_task_without_namespaces(tmp_path, monkeypatch, program):
    """In namespaces it has a folder, and goes on: the machine decided what was right."""
    if not works("landlock+seccomp"):
        pytest.skip("this machine has no landlock+seccomp")
    (tmp_path / "a.jsonl").write_text(json.dumps({"program": program}) + "\n" + json.dumps({"program": "open('no')"}))
    monkeypatch.setattr("envs.trace.sandbox.probe", lambda: "landlock+seccomp")
    env = new_env(source=str(tmp_path / "a.jsonl"))
    with pytest.raises(NoAnswerError, match="task_id 0: the program"):
        env.reset(Task(0))
    env.reset(Task(1))
    assert env._task.expected == "", "to read what is not there is an error of its own"


def test_help_is_there_as_in_python(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"program": "print('about len')\nhelp(len)"}))
    env = new_env(source=str(tmp_path / "a.jsonl"))
    env.reset(Task(0))
    assert "Return the number of items" in env._task.expected


def test_what_is_not_there_is_a_limit_in_every_version_of_python():
    for last in ("KeyError: 'getpwuid(): uid not found: 65534'", "OSError: No username set in the environment"):
        assert LIMIT_MET.match(last), "the second since 3.13"
    assert LIMIT_MET.match("_dbm.error: [Errno 13] Permission denied: 'x'"), "of shelve, where Python was built with it"


@pytest.mark.parametrize("program", LIMITS)
def test_a_program_that_meets_a_limit_is_no_task(tmp_path, program):
    """Nothing that it printed until then is an answer: an empty one would be right."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"program": program}) + "\n" + json.dumps({"program": "1 / 0"}))
    env = new_env(source=str(tmp_path / "a.jsonl"))
    with pytest.raises(NoAnswerError, match="task_id 0: the program"):
        env.reset(Task(0))
    env.reset(Task(1))
    assert env._task.expected == "", "an error of its own is part of a program"


@pytest.mark.parametrize("where", ["before", "after", "around"])
def test_a_print_that_raises_is_left_out_however_much_goes_to_stderr(tmp_path, where):
    said, rest = (
        "sys.stderr.write('progress\\n' * 9000)\n",
        "flag = False\nif flag:\n    extra = 1\ntotal = 5\nprint(total)\n",
    )
    before, after = said * (where != "after"), said * (where != "before")
    program = f"import sys\n{before}{rest}{after}"
    (tmp_path / "a.jsonl").write_text((json.dumps({"program": program}) + "\n") * 9)
    env = new_env(source=str(tmp_path / "a.jsonl"))
    for task_id in range(9):  # other prints in each
        env.reset(Task(task_id))
        assert "5" in env._task.expected.splitlines()


@pytest.mark.parametrize("printed", ["```\nx\n```", "<think>a</think>", "```"])
def test_what_a_program_prints_may_look_like_an_answer_s_wrapping(printed):
    assert score(printed, printed, "native") == 1.0
    assert score(printed, "x", "native") == 0.0


def test_rows_may_hold_any_text(tmp_path):
    rows = [{"program": f"print('a{separator}b')"} for separator in "\u2028\x85\x0b\u2029"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows), newline="")
    (tmp_path / "b.py").write_bytes(b"\xef\xbb\xbfprint(1)")
    programs = load_programs(str(tmp_path))
    assert [row.program for row in programs] == [*(row["program"] for row in rows), "print(1)"]


def test_what_python_remarks_on_a_program_is_not_told():
    script = """from envs.trace import inject; from envs.trace.prints import compiles
program = "x = '\\\\d' is 1"
print(compiles(program), inject(program, 1))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout[:5], done.stderr) == ("True ", "")


BAD = [
    ("nowhere", "is not there: generator, a folder"),
    ("./a/b", "is not there"),
    ("{folder}/latin/a.py", "a.py' is no source: generator, a folder"),
    ("latin/b.txt", "is no source"),  # and no dataset of the Hub
    ("{folder}/empty", "holds no programs"),
    ("{folder}/bad.jsonl", r'bad.jsonl:2: expected \{"program": text'),
    ("{folder}/number.jsonl", r'number.jsonl:1: expected \{"program": text'),
    ("{folder}/stdin.jsonl", r"""stdin.jsonl:2: 'stdin' is not read: the standard input is "inputs"$"""),
    ("{folder}/input.jsonl", r"""input.jsonl:1: 'input' is not read: the standard input is "inputs"$"""),
    ("{folder}/broken.jsonl", "broken.jsonl:1: Expecting"),
    ("{folder}/latin.jsonl", "latin.jsonl: is not UTF-8 text"),
    ("{folder}/latin", "a.py: is not UTF-8 text"),
    ("{folder}/deep.jsonl", "deep.jsonl:1: maximum recursion depth"),
    ("{folder}/pipe", "a.py: cannot be read: is no regular file"),
]


@pytest.mark.parametrize(("source", "message"), BAD)
def test_bad_sources(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"program": "1"}\n{"program": 1}\n')
    (tmp_path / "number.jsonl").write_text('{"program": "1", "inputs": 0}\n')
    twice = [{"program": "1", "inputs": "", "stdin": ""}, {"program": "1", "stdin": ""}]
    (tmp_path / "stdin.jsonl").write_text("\n".join(map(json.dumps, twice)))
    (tmp_path / "input.jsonl").write_text('{"program": "print(input())", "input": "1"}\n')
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "latin").mkdir()
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "a.py")  # nobody writes into it
    for name in ("latin.jsonl", "latin/a.py", "latin/b.txt"):
        (tmp_path / name).write_bytes(b"# caf\xe9\n")
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=message):
        new_env(source=source.format(folder=tmp_path))


@pytest.mark.parametrize("source", ["owner/programs", "owner/programs-v1.5"])
def test_a_hub_dataset(monkeypatch, source):
    class Datasets:
        @staticmethod
        def load_dataset(name, split):
            assert (name, split) == (source, "train")
            return [{"program": "print(input())", "inputs": "hub\n"}]

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    monkeypatch.setattr("envs.trace.env.hub_problem", lambda: "")
    env = new_env(source=source)
    env.reset(Task(5))
    assert env._task.expected == "hub"
    with pytest.raises(ValueError, match="'owner/others' cannot be read from the Hub: AssertionError"):
        new_env(source="owner/others")
    monkeypatch.setattr(Datasets, "load_dataset", lambda name, split: [])
    with pytest.raises(ValueError, match="'owner/empty' holds no programs"):
        new_env(source="owner/empty")


def test_programs_of_others_run_alone_and_only_in_a_sandbox(folder, monkeypatch):
    calls = []
    monkeypatch.setattr(Sandbox, "run_trusted", lambda *_: calls.append(1))
    new_env(source=str(folder)).reset(Task(1))
    assert not calls
    monkeypatch.setattr("envs.trace.sandbox.probe", lambda: "none")
    with pytest.raises(SandboxError, match="sandbox_min_level is 2"):
        new_env(source=str(folder), sandbox_min_level=2)


def test_a_program_that_does_not_end_is_no_task(tmp_path, monkeypatch):
    (tmp_path / "loop.py").write_text("while True: pass")
    env = new_env(source=str(tmp_path))
    env._workshop.sandbox.limits = Limits(wall_s=0.5)
    runs, real = [], Sandbox.run
    monkeypatch.setattr(Sandbox, "run", lambda self, *args: runs.append(args) or real(self, *args))
    for task_id in (0, 0, 1):  # another task shows it with other prints
        with pytest.raises(NoAnswerError, match=f"task_id {task_id}: the program does not finish here: timeout"):
            env.reset(Task(task_id))
    assert len(runs) == 1, "the time is waited for once"


def test_a_program_that_crashes_is_one(tmp_path):
    (tmp_path / "crash.py").write_text("print('so far')\n1 / 0")
    env = new_env(source=str(tmp_path))
    env.reset(Task(0))
    assert env.step("so far").score == 1.0


def test_a_generated_program_that_met_a_limit_is_run_again(monkeypatch):
    """It ends: a machine that stood still is no property of it."""
    runs = [Run("", "", "timeout", 137, 10.0), Run("1\n", "", "ok", 0, 0.0)]
    monkeypatch.setattr(Sandbox, "run_trusted", lambda self, program, inputs="": runs.pop(0))
    with pytest.raises(NoAnswerError, match="does not finish here: timeout"):
        new_env().reset(Task(2, 4242))
    assert new_env().reset(Task(2, 4242)).text


def test_tasks_are_not_run_twice(box, monkeypatch):
    calls = []

    def counted(self, program, inputs=""):
        calls.append(program)
        return Run("1\n", "", "ok", 0, 0.0)

    monkeypatch.setattr(Sandbox, "run_trusted", counted)
    for _ in range(3):
        new_env().reset(Task(1, 4242))
    assert len(calls) == 1


# Configuration and play


def test_configuration_file():
    file = Path(__file__).parents[2] / "config" / "trace_config.json"
    configs = load_config({"env": EnvConfig}, [file], skip_unknown_sections=True)
    assert configs["env"].trace == dataclasses.asdict(TraceConfig())
    env = configs["env"]
    assert (env.env_type, env.answer_mode, env.protocol) == ("trace", "free", "affinetes")


def test_play():
    from env_wrapper import play

    tasks = [Task(level * LEVEL + 1, level, index=level) for level in range(LEVELS)]
    player = FunctionPlayer(lambda query: random.Random(str(query.rng_key)).choice(["1", "2"]))
    episodes = play({"env_type": "trace", "answer_mode": "free", "prompt": "compact"}, player, tasks)
    assert [episode.outcome for episode in episodes] == ["finished"] * LEVELS
    assert [episode.game for episode in episodes] == [f"trace_l{level}" for level in range(LEVELS)]
    assert all(len(query.conversation) == 2 for query in player.queries)


def test_an_evaluation_draws_from_all_rows_of_a_file(tmp_path):
    """Seeds choose no row: an evaluation of the first task id alone would ask for one program again and again."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"program": "print({i})"}}\n' for i in range(10)))
    asked = []

    def answer(query):
        asked.append(query.conversation[-1]["content"])
        return "0"

    config = EnvConfig("trace", answer_mode="free", trace={"source": str(tmp_path / "a.jsonl")})
    evaluate(FunctionPlayer(answer), config, [(0, 9_999_999)], 60)
    assert len(set(asked)) == 10
    asked.clear()
    evaluate(FunctionPlayer(answer), config, [(2, 4)], 60)  # of a stage's rows only those
    assert len(set(asked)) == 3
