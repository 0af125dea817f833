"""The sandbox: escapes contained, limits, cleanliness."""

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from attacks import ATTACKS, run_all, works

from envs.trace import interpreter
from envs.trace import sandbox as sandbox_module
from envs.trace.interpreter import Limits, SandboxError
from envs.trace.sandbox import LEVELS, MECHANISMS, Sandbox, level_of, probe

PROJECT = Path(__file__).resolve().parents[2]
WALL_S = 1.0
LIMITS = Limits(wall_s=WALL_S, memory_mb=256, output_kb=64, disk_mb=4)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of Linux")


def children(states="RSD"):
    """Processes whose parent is this one; orphans below become such by the subreaper. Z: ended, not reaped."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid() and fields[0] in states:
                    found.add(int(entry.name))
    return found


@pytest.fixture(scope="module", autouse=True)
def _no_traces():
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: no orphan gets past this process
    before, signals = children(), []
    previous = signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))
    os.environ["SANDBOX_TEST_TOKEN"] = "secret"
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    del os.environ["SANDBOX_TEST_TOKEN"]
    signal.signal(signal.SIGUSR1, previous)
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
    deadline = time.monotonic() + 5
    while not children() <= before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children() <= before, "processes were left running"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss
    assert grown < 32 * 1024, f"this process grew by {grown} KiB"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_text("secret")
    folder.chmod(0o755)
    tcp = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    name = f"sandbox-test-{os.getpid()}"
    abstract.bind("\0" + name)
    abstract.listen()
    yield {
        "secret": folder / "secret", "outside": folder / "new", "spare": folder / "spare", "project": PROJECT,
        "home": Path.home(), "port": tcp.getsockname()[1], "parent": os.getpid(), "abstract": name,
    }  # fmt: skip
    tcp.close()
    abstract.close()


@pytest.fixture(scope="module", params=["namespaces+landlock+seccomp", "landlock+seccomp",
                                        pytest.param("namespaces+seccomp", marks=pytest.mark.slow)])  # fmt: skip
def box(request):
    if not works(request.param):
        pytest.skip(f"this machine has no {request.param}")
    with Sandbox(LIMITS, spares=3, mechanisms=request.param) as made:
        yield made


def test_a_crash_leaves_no_core_file(box):
    assert box.run("import resource\nprint(resource.getrlimit(resource.RLIMIT_CORE))").stdout == "(0, 0)\n"


def test_a_program_does_not_learn_the_machines_name(box):
    """What it prints would be another task elsewhere, and the name would be in whatever shows it.

    Without namespaces the kernel has no other name to tell.
    """
    name = "sandbox" if "namespaces" in box.mechanisms else socket.gethostname()
    program = "import platform, socket\nprint(platform.node(), socket.gethostname())"
    assert box.run(program).stdout == f"{name} {name}\n"


def state(places):
    stat = places["secret"].stat()
    return (places["secret"].read_text(), oct(stat.st_mode), stat.st_mtime, sorted(os.listdir(places["secret"].parent)))


def reset(places):
    places["secret"].write_text("secret")
    places["secret"].chmod(0o600)
    places["spare"].write_text("spare")
    places["outside"].unlink(missing_ok=True)


def test_escapes(box, places):
    """Every attack in one go: together, as a training step runs them, with three at a time."""
    reset(places)
    before = state(places)
    runs = run_all(box, [(attack.program.format(**places), "") for attack in ATTACKS.values()])
    failures = []
    for (name, attack), run in zip(ATTACKS.items(), runs, strict=True):
        expected = run.status == attack.status if attack.status else run.status in ("ok", "error", "timeout")
        if "ESCAPED" in run.stdout or not expected or run.seconds > WALL_S + 2 or len(run.stdout) > 64 << 10:
            failures.append((name, run.status, run.stdout[:99], run.seconds))
    assert not failures
    assert state(places) == before


BARE = [name for name, attack in ATTACKS.items() if attack.bare]


@pytest.mark.parametrize("name", BARE)
def test_the_attacks_are_real(name, places):
    """Without locks the same program succeeds: what stops it above is the sandbox."""
    reset(places)
    with Sandbox(LIMITS, min_level=0, spares=1, mechanisms="none") as bare:
        run = bare.run(ATTACKS[name].program.format(**places))
        user = int(bare.run("import os\nprint(os.geteuid())").stdout)
    reset(places)
    for child in children():
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            if Path(f"/proc/{child}/cmdline").read_bytes().find(b"confine.start") >= 0:
                os.kill(child, signal.SIGKILL)  # what setsid took out of the group: level 0 does not hold it
            os.waitpid(child, 0)
    if user != os.geteuid() and "ESCAPED" not in run.stdout:
        pytest.skip("root became nobody, which stops it too: nobody can read this interpreter's library")
    assert "ESCAPED" in run.stdout, run


def test_programs_run(box):
    run = box.run("import json, math, re, sys\nprint(sys.stdin.read().upper(), math.pi)", "über\r\n")
    assert (run.stdout, run.status, run.returncode) == ("ÜBER\n 3.141592653589793\n", "ok", 0)
    run = box.run("print('before')\n1 / 0")
    assert (run.stdout, run.status) == ("before\n", "error")
    assert run.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert box.run("exit(3)").returncode == 3
    assert box.run("def f(:").stderr.endswith("SyntaxError: invalid syntax\n")
    assert box.run("print(__name__, type(exit).__name__)").stdout == "__main__ Quitter\n"


def test_what_programs_may_do(box):
    own_file = "try: open('x', 'w').write('mine')\nexcept OSError: print('none')\nelse: print(open('x').read())"
    threads = "import threading\nt = threading.Thread(target=print, args=('thread',))\nt.start(); t.join()"
    event_loop = "import asyncio\nprint(asyncio.run(asyncio.sleep(0, 'loop')))"
    alarm = "import signal\nsignal.signal(14, lambda *_: print('alarm'))\nsignal.alarm(1)\nsignal.pause()"
    own_signal = "import os, signal\nsignal.signal(10, lambda *_: print('signal'))\nos.kill(os.getpid(), 10)"
    with Sandbox(Limits(), mechanisms=box.mechanisms) as roomy:
        runs = run_all(roomy, [(program, "") for program in (own_file, threads, event_loop, alarm, own_signal)])
    assert [run.stdout for run in runs] == [
        "mine\n" if "namespaces" in box.mechanisms else "none\n", "thread\n", "loop\n", "alarm\n", "signal\n",
    ]  # fmt: skip


def test_a_signal_that_nobody_handles_ends_a_program(box):
    runs = [
        box.run(f"import os, signal\nprint(1, flush=True)\nos.kill(os.getpid(), {number})\nprint(2)")
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGSEGV)
    ]
    assert [(run.stdout, run.status, run.returncode - 128) for run in runs] == [
        ("1\n", "error", number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGSEGV)
    ]


def test_each_program_is_alone(box):
    box.run("import builtins\nbuiltins.left = 1\ntry: open('left', 'w').close()\nexcept OSError: pass")
    assert (
        box.run("import builtins, os\nprint(hasattr(builtins, 'left'), os.path.exists('left'))").stdout
        == "False False\n"
    )


def test_hash_seed_is_fixed(box):
    program = "print(hash('a'), list({'a', 'b', 'c', 'd'}))"
    with Sandbox(LIMITS, hash_seed=1, mechanisms=box.mechanisms) as other:
        assert box.run(program).stdout == box.run(program).stdout != other.run(program).stdout


def test_results_in_order_and_large_input(box):
    runs = run_all(box, [(f"print({n}, len(input()))", "x" * 200_000) for n in range(8)])
    assert [run.stdout for run in runs] == [f"{n} 200000\n" for n in range(8)]


def test_output_cap_keeps_the_head(box):
    run = box.run("for n in range(10 ** 6): print(n)")
    assert run.status == "output"
    assert run.stdout.startswith("0\n1\n2\n")
    assert len(run.stdout) == 64 << 10


@pytest.mark.slow
def test_the_time_an_interpreter_takes_to_start_is_not_the_programs(monkeypatch):
    """On a busy machine it took longer than programs may, which then were told to have no end, or not to start."""
    monkeypatch.setattr(interpreter, "START", f"import time; time.sleep({1.5 * WALL_S})\n{interpreter.START}")
    with Sandbox(LIMITS, spares=1) as box:
        run = box.run("print(1)")
        assert (run.stdout, run.status) == ("1\n", "ok")
        assert run.seconds < WALL_S
        assert box.run("while True: pass").status == "timeout"
        assert box.run_trusted("print(1)").stdout == "1\n"


def test_many_open_files_are_in_no_sandboxs_way():
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 2048), most))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        with Sandbox(LIMITS, spares=1) as box:
            assert box.run_trusted("print(1)").stdout == box.run("print(1)").stdout == "1\n"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))


def test_limits_of_the_machine_that_are_lower_hold_and_lock_nothing_out():
    """No interpreter started, so that a machine with all mechanisms was said to reach level 0."""
    mechanisms = probe()
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (9, 9))\n"
        "from envs.trace.sandbox import Sandbox\n"
        f"run = Sandbox(min_level=0, spares=1, mechanisms={mechanisms!r}).run\n"
        "print(run('import resource; print(resource.getrlimit(resource.RLIMIT_CPU))').stdout)"
    )
    answer = subprocess.run([sys.executable, "-B", "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert answer.stdout.split() == ["(9,", "9)"], answer.stderr


def test_output_of_a_killed_program_is_kept(box):
    run = box.run("print('so far', flush=True)\nwhile True: pass")
    assert (run.stdout, run.status) == ("so far\n", "timeout")


def test_nothing_is_left_behind(box):
    before = children("RSDZ")
    with Sandbox(LIMITS, mechanisms=box.mechanisms) as other:
        run_all(other, [("while True: pass", ""), ("print(1)", ""), ("import os\nos.abort()", "")])
        other.run_trusted("print(1)")
    assert children("RSDZ") == before


def test_from_threads_that_end(box):
    """Interpreters are started ahead by whichever thread asks, and must survive its end."""
    outputs = []
    threads = [threading.Thread(target=lambda n=n: outputs.append(box.run(f"print({n})").stdout)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs.append(box.run("print(6)").stdout)
    assert sorted(outputs) == [f"{n}\n" for n in range(7)]


def test_trusted_programs(box):
    run = box.run_trusted("print(input())\nimport sys\nprint('e', file=sys.stderr)", "hello\n")
    assert (run.stdout, run.stderr, run.status) == ("hello\n", "e\n", "ok")
    assert box.run_trusted("x = 1\nprint('a')\n1 / 0").stdout == "a\n"
    assert box.run_trusted("print('x' in dir())\nexit()").stdout == "False\n"
    started = time.monotonic()
    assert box.run_trusted("while True: pass").status == "timeout"
    assert time.monotonic() - started < WALL_S + 1
    assert box.run_trusted("print(2)").stdout == "2\n"


def test_trusted_programs_are_locked_in_too(box, places):
    assert "Error" in box.run_trusted(ATTACKS["read a secret"].program.format(**places)).stderr
    assert "Error" in box.run_trusted(ATTACKS["TCP"].program.format(**places)).stderr


def test_a_serving_interpreter_that_died_is_replaced(box):
    with pytest.raises(SandboxError, match="ended"):
        box.run_trusted("import os\nos._exit(1)")
    assert box.run_trusted("print(3)").stdout == "3\n"


def test_a_serving_interpreter_that_starts_too_late_is_replaced(monkeypatch):
    """Its late READY was read as the length of an answer."""
    mechanisms = probe()
    with Sandbox(LIMITS, min_level=0, mechanisms=mechanisms) as box, monkeypatch.context() as late:
        late.setattr(sandbox_module, "receive", lambda *_: (_ for _ in ()).throw(TimeoutError))
        with pytest.raises(SandboxError, match=r"^sandbox: the interpreter did not start in time$"):
            box.run_trusted("print(1)")
        late.undo()
        assert box.run_trusted("print(2)").stdout == "2\n"


def test_probe_reaches_a_level():
    assert probe() in MECHANISMS
    assert level_of(probe()) == max(level_of(mechanisms) for mechanisms in MECHANISMS if works(mechanisms))


def test_probe_believes_what_it_sees(monkeypatch):
    """Mechanisms that could be switched on but do not hold do not count."""
    monkeypatch.setattr(sandbox_module, "PROBE", "print(False, False)")
    assert probe.__wrapped__() == "none"


def test_levels():
    assert [level_of(mechanisms) for mechanisms in MECHANISMS] == [2, 1, 1, 0, 0, 0]
    assert len(LEVELS) == 3


def test_refuses_below_the_minimum():
    with pytest.raises(SandboxError, match=r"sandbox_min_level is 1 .* reaches 0"):
        Sandbox(min_level=1, mechanisms="none")


def test_no_lock_no_run(monkeypatch):
    """Where locking in fails the program is not run at all."""
    monkeypatch.setattr(sandbox_module, "level_of", lambda mechanisms: 2)
    with Sandbox(Limits(open_files=3), mechanisms="landlock+seccomp", spares=1) as box, pytest.raises(SandboxError):
        box.run("print('ran')")


DISK_RUN = """
import json, sys
sys.path[:0] = [".", "tests/helpers"]
from attacks import DISK, run_all
from envs.trace.interpreter import Limits, SandboxError
from envs.trace.sandbox import Sandbox
try:
    with Sandbox(Limits(wall_s=2.0, memory_mb=256, disk_mb=4), 0, 3, mechanisms=sys.argv[1]) as box:
        runs = run_all(box, [(program, "") for program in DISK.values()])
    print(json.dumps({name: [run.status, run.stdout[:99], run.stderr[-300:]] for name, run in zip(DISK, runs)}))
except SandboxError:
    print("null")
"""


def written():
    """All that lies where programs of this user and of nobody could leave something."""
    places = [Path(place) for place in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/") if Path(place).is_dir()]
    return {path for place in places for path in place.glob("*sandbox*")} | set(PROJECT.iterdir())


@pytest.mark.parametrize(("mechanisms", "user"), [
    pytest.param(m, {"user": 65534, "group": 65534, "extra_groups": []} if user else {},
                 marks=[pytest.mark.slow] * (user == i % 2 or i == 1), id=f"{m}-{'user' if user else 'root'}")
    for i, m in enumerate(["none", *(m for m in MECHANISMS if level_of(m) > 0)]) for user in (False, True)
])  # fmt: skip
def test_disk(mechanisms, user):
    """Whatever a program does, no more than 4 MB are held and nothing is left behind; it is an outcome like any."""
    if user and os.geteuid():
        pytest.skip("only root can be somebody else")
    before = written()
    command = ["/usr/bin/python3" if user else sys.executable, "-B", "-c", DISK_RUN, mechanisms]
    answer = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, **user)
    assert answer.returncode == 0, answer.stderr
    runs = json.loads(answer.stdout)
    if runs is None:
        pytest.skip(f"this machine has no {mechanisms}")
    assert len(runs) >= 40
    assert {name: run for name, run in runs.items() if run[0] not in ("ok", "error", "timeout")} == {}
    left = written() - before
    if mechanisms == "none":  # level 0: empty files where this user may write, but not one byte, and nothing to sweep
        assert all(path.stat().st_size == 0 for path in left)
        for path in left:
            path.unlink()
        runs = {name: run for name, run in runs.items() if "memory" not in name and "filled" not in name}
    else:
        assert left == set()
    assert {name: run for name, run in runs.items() if "ESCAPED" in run[1]} == {}


def test_python_below_tmp(tmp_path):
    """A Python that lies where the sandbox makes its folder is as well locked in as any other."""
    python = Path(tempfile.mkdtemp(dir="/tmp")) / "python"
    (python / "bin").mkdir(parents=True)
    shutil.copy(os.path.realpath(sys.executable), python / "bin" / "python3")
    (python / "lib").symlink_to(Path(sys.base_prefix) / "lib")
    code = (
        "from envs.trace.sandbox import *; print(probe(), Sandbox(min_level=0).run('import colorsys; print(7)').stdout)"
    )
    command = [python / "bin" / "python3", "-B", "-c", code]
    answer = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, env={"PYTHONHOME": str(python)})
    shutil.rmtree(python.parent)
    assert answer.stdout.split() == [probe(), "7"], answer.stderr


def test_interpreters_end_with_their_parent(tmp_path):
    """A killed trainer leaves nothing behind, not even a program that sleeps."""
    code = (
        "import sys, threading, time\n"
        f"sys.path.insert(0, {str(PROJECT)!r})\n"
        "from envs.trace.sandbox import Sandbox\n"
        "box = Sandbox(min_level=0, spares=2)\n"
        "threading.Thread(target=box.run, args=('import time; time.sleep(600)',), daemon=True).start()\n"
        "box.run('1'); print('up', flush=True); time.sleep(600)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout
    assert trainer.stdout.readline() == "up\n"
    time.sleep(0.3)
    others = children()
    trainer.kill()
    trainer.communicate()
    deadline = time.monotonic() + 5
    while (left := children() - others) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def elsewhere(code, **user):
    """What the system's interpreter prints, in words; every user can read that one."""
    command = ["/usr/bin/python3", "-B", "-c", code]
    if not Path(command[0]).exists():
        pytest.skip("no system interpreter")
    answer = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, **user)
    if "SyntaxError" in answer.stderr or "nknown option" in answer.stderr:
        pytest.skip("the system interpreter is too old")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.split()


ALONE = {  # what one mechanism stops by itself
    "namespaces": [
        "read a secret",
        "list home",
        "read /etc/passwd",
        "TCP",
        "abstract Unix socket",
        "signal to the parent",
        "mount",
        "chroot",
    ],
    "landlock": ["read a secret", "read /etc/passwd", "write outside", "symbolic link", "dots"],
    "seccomp": ["TCP", "UDP", "fork", "exec", "signal to the parent", "change a mode", "truncate by opening"],
}


@pytest.mark.parametrize("mechanism", ALONE)
def test_each_mechanism_holds_by_itself(mechanism, places):
    if not works(mechanism):
        pytest.skip(f"this machine has no {mechanism}")
    reset(places)
    with Sandbox(LIMITS, min_level=0, mechanisms=mechanism) as box:
        runs = run_all(box, [(ATTACKS[name].program.format(**places), "") for name in ALONE[mechanism]])
    assert ["ESCAPED" in run.stdout for run in runs] == [False] * len(runs)


COUNT_THREADS = (
    "import threading, time\nthreading.stack_size(32768)\ncount = 0\n"
    "try:\n    while count < 999:\n"
    "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); count += 1\n"
    "except RuntimeError: pass\nprint(count)"
)


def test_a_namespace_of_its_own():
    if not works("namespaces"):
        pytest.skip("this machine has no namespaces")
    with Sandbox(LIMITS, min_level=0, spares=1, mechanisms="namespaces") as box:
        assert box.run("import os\nprint(os.getpid(), os.getuid())").stdout == "2 65534\n"
        assert "proc" not in box.run("import os\nprint(os.listdir('/'))").stdout
        assert 0 < int(box.run(COUNT_THREADS).stdout) <= LIMITS.threads


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_as_an_ordinary_user():
    """The same level without any privilege, where an interpreter is within that user's reach."""
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from envs.trace.sandbox import Sandbox, probe\n"
        "print(probe(), Sandbox(min_level=0).run('print(7)').stdout)"
    )
    nobody: dict = {"user": 65534, "group": 65534, "extra_groups": []}
    assert elsewhere(code, **nobody) == [probe(), "7"]


@pytest.mark.skipif(os.geteuid() != 0, reason="root leaves root behind where everybody may read the interpreter")
def test_root_is_left_without_namespaces_too():
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from envs.trace.sandbox import Sandbox\n"
        "box = Sandbox(min_level=0, mechanisms='seccomp')\n"
        "print(box.run('import os; print(os.getuid(), os.getgid())').stdout)"
    )
    assert elsewhere(code) == ["65534", "65534"]
