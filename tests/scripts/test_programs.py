"""Programs are alike: what --help shows, and what flags are called."""

import argparse
import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from training.process import ProgramError, at_least, run_program

ROOT = Path(__file__).parents[2]
PROGRAMS = ["train_ppo", *(f"scripts.{path.stem}" for path in sorted((ROOT / "scripts").glob("[a-z]*.py")))]
# One meaning, one name: how long it is, whom it is about, where it goes.
NAMES = {"--num-episodes", "--num-games", "--checkpoint-dir", "--adapters", "--run-dir", "--out", "--output-file"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_shows_two_examples_and_flags_by_their_usual_names(name, capsys):
    program = importlib.import_module(name)
    with pytest.raises(SystemExit) as ended:
        program.main(["--help"])
    assert ended.value.code == 0
    shown, file = capsys.readouterr().out, name.replace(".", "/") + ".py"
    assert len(re.findall(rf"^ +python {file} ?.*$", shown, re.MULTILINE)) >= 2
    flags = set(re.findall(r"^ +(--[\w-]+)", shown, re.MULTILINE))
    assert not {flag for flag in flags if "_" in flag} | flags & NAMES


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "train_ppo")) for name in PROGRAMS]
)
def test_a_program_finds_its_modules_where_python_does_not_look_beside_it(name, tmp_path):
    """From any folder, and with PYTHONSAFEPATH."""
    command = [sys.executable, "-P", str(ROOT / f"{name.replace('.', '/')}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_python_without_the_libraries_is_told_where_they_are(name):
    """As of a shell in which .venv was not activated."""
    command = [sys.executable, "-S", str(ROOT / f"{name.replace('.', '/')}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"source {ROOT}/.venv/bin/activate" in done.stderr


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ("sys.version_info = (3, 10, 12)", "error: this is Python 3.10 of {}, too old: source "),
        ("sys.modules['peft'] = None", ", without peft: source "),  # as of an installation that was interrupted
    ],
)
def test_an_old_python_and_an_unfinished_installation_are_told(cause, told):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {cause}; import config.start"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert told.format(sys.executable) in done.stderr


@pytest.mark.parametrize(
    "name",
    ["train_ppo", *(pytest.param(f"scripts.{name}", marks=pytest.mark.slow)
                    for name in ("configure", "evaluate", "import_gguf", "merge", "play", "serve", "warmstart"))],
)  # fmt: skip
def test_an_interrupt_while_libraries_load_is_no_traceback(name, tmp_path):
    """For seconds, in which whoever sees a mistake in the command presses Ctrl-C."""
    for library in ("torch", "pyspiel"):  # whichever it loads first
        text = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)"
        (tmp_path / f"{library}.py").write_text(text)
    command = [sys.executable, str(ROOT / f"{name.replace('.', '/')}.py")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_an_interrupt_that_is_ignored_stays_so_while_libraries_load(tmp_path):
    """As of programs that a shell script starts with &."""
    (tmp_path / "numpy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(3)")
    command = ["sh", "-c", 'trap \'\' INT; exec "$0" "$1"', sys.executable, str(ROOT / "train_ppo.py")]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}).returncode == 3


@pytest.mark.parametrize(
    ("handler", "told"), [("SIG_DFL", ("130\n", "error: interrupted\n")), ("SIG_IGN", ("0\n", ""))]
)
def test_an_interrupt_once_they_are_loaded_is_a_line_unless_it_is_ignored(handler, told):
    code = (f"import os, signal, time; signal.signal(signal.SIGINT, signal.{handler})\n"
            "from training.process import run_program\n"
            "print(run_program(lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(0.1)))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == told


@pytest.mark.parametrize(
    ("name", "others"),
    [("train_ppo", []), ("scripts.evaluate", ["--checkpoint", "random"]), ("scripts.warmstart", ["--output", "x"])],
)
def test_settings_are_given_one_by_one_or_together(name, others, capsys):
    program = importlib.import_module(name)
    with contextlib.suppress(SystemExit):
        program.main([*others, "--set", "model.dtype=float32", "ppo.gama=1", "--set", "ppo.gamma=1"])
    assert "--set: ppo.gama = 1: no such key; the nearest is ppo.gamma" in capsys.readouterr().err


def program(body, **options):
    """A program of one line, as the scripts run theirs."""
    code = f"import sys\nfrom training.process import run_program\nsys.exit(run_program(lambda: {body}))"
    return subprocess.Popen([sys.executable, "-u", "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("size", [9, 99999])
def test_a_program_does_its_work_though_its_reader_leaves(tmp_path, size):
    file, (read, write) = tmp_path / "file", os.pipe()
    os.close(read)
    body = f"print('x' * {size}) or print('y', flush=True) or open({str(file)!r}, 'w').write('work') and None"
    with program(body, stdout=write) as done:
        assert (done.stderr.read(), done.wait()) == ("", 0)
    os.close(write)
    assert file.read_text() == "work"


def test_a_broken_pipe_to_somebody_else_is_told():
    with program("(_ for _ in ()).throw(BrokenPipeError(32, 'Broken pipe'))", stdout=subprocess.PIPE) as done:
        assert (done.stderr.read(), done.wait()) == ("error: [Errno 32] Broken pipe\n", 2)


@pytest.mark.parametrize("typed", [None, b"", b"\xe9\n"], ids=["closed", "empty", "latin"])
def test_whoever_asks_and_is_not_answered_says_so(typed):
    code = "from training.process import run_program; print(run_program(lambda: input() and None))"
    command = [sys.executable, "-c", code]
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *command] if typed is None else command
    done = subprocess.run(command, cwd=ROOT, input=typed, capture_output=True)
    assert done.stdout == (b"130\n" if not typed else b"0\n")
    assert done.stderr == (b"error: interrupted\n" if not typed else b"")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_without_memory_is_told_in_a_line(error, capsys):
    def fail():
        raise error("CUDA out of memory.\nTried to allocate 20.00 MiB.")

    assert run_program(fail) == 1
    assert capsys.readouterr().err == "error: CUDA out of memory. Tried to allocate 20.00 MiB.\n"


def test_a_secret_that_lies_where_a_long_message_is_cut_is_not_told(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "SECRETKEY0123456789")
    for before in range(470, 500, 4):
        long = "x" * before + "SECRETKEY0123456789" + "y" * 900

        def fail(long=long):
            raise ProgramError(long)

        assert run_program(fail) == 1
        assert "SECRET" not in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["2>&-", pytest.param("0<&- 1>&-", marks=pytest.mark.slow)])
def test_nobody_needs_to_listen(tmp_path, closed):
    command = [sys.executable, "scripts/evaluate.py", "--checkpoint", "random", "--episodes", "2"]
    command += ["--games", "tic_tac_toe", "--json", str(tmp_path / "tables.json")]
    latin = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=latin)
    assert (done.returncode, "Traceback" in done.stdout + done.stderr) == (0, False)
    assert "settings" in (tmp_path / "tables.json").read_text()


@pytest.mark.parametrize(
    ("typed", "told"),
    [("inf", "a finite number"), ("nan", "at least 0.0"), ("-inf", "at least 0.0"), ("1e300", "at least 0.0 and at")],
)
def test_numbers_are_finite(typed, told):
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{typed}: expected {told}"):
        at_least(0.0)(typed)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "train_ppo"])
def test_numbers_without_end_are_refused_before_anything_is_done(name, capsys):
    module = importlib.import_module(name)
    with pytest.raises(SystemExit):
        module.main(["--help"])
    for flag in set(re.findall(r"--(?:episodes|deals|seed)\b", capsys.readouterr().out)):
        with pytest.raises(SystemExit) as ended:
            module.main([flag, "9" * 30])
        assert ended.value.code == 2
        assert "at most" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_what_is_printed_onto_a_full_disk_is_lost_alone():
    """Files that were asked for are still written."""
    script = "from training.process import setup_logging\nimport sys\nsetup_logging()\n"
    script += "print('x' * 100_000)\nprint('y')\nsys.stdout.flush()\nprint('done', file=sys.stderr)\n"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["WARNING: what is printed is lost: No space left on device", "done"]
