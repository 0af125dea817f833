"""What a running program shows and guards."""

import errno
import fcntl
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

from envs.types import InterruptedRolloutError
from training import loggers
from training.console import Console, progress_line
from training.folder import set_aside
from training.loggers import Loggers
from training.metrics import MetricsLog
from training.process import TOGETHER, StoppablePlayer, StopSignal, lock_run, say_how_to_go_on
from utils import CheckpointError, ConfigError

ROOT = Path(__file__).parents[2]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def python(code, *args, **options):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


# ------------------------------------------------------------------------------------------------------------- metrics


def test_resuming_leaves_no_duplicate_and_no_gap(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 8):
        log.append({"step": step, "reward": step / 3})
    assert [row["step"] for row in rows(log.path)] == list(range(1, 8))  # each row is on its way without a close
    os.utime(log.path, (1, 1))
    log.truncate_to(7)
    assert log.path.stat().st_mtime > 1, "a summary that is newer would say that the run has ended"
    log.truncate_to(5)
    for step in range(6, 9):
        log.append({"step": step, "reward": step / 3})
    log.sync()
    assert rows(log.path) == [{"step": step, "reward": step / 3} for step in range(1, 9)]
    log.truncate_to(0)
    assert rows(log.path) == []


@pytest.mark.parametrize(
    "torn", [b'{"step": 4, "rew', b'{"step": 4}', b"\x00" * 20, b"[]\n", b'{"step": "4"}\n', b"\xff\n"]
)
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n' + torn)
    MetricsLog(path).truncate_to(9)
    assert rows(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


ROW = b'{"step": %d, "x": 1}\n'
DAMAGE = [
    b"\n",
    b"  \n",
    b"\x00\xff\n",
    b"{}\n",
    b'{"step": 2}\n',
    b'{"step": -1}\n',
    b'{"step": 3\n',
    b"[" * 9999 + b"\n",
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_no_intact_row_is_lost_with_a_damaged_one(tmp_path, caplog, damage):
    path = tmp_path / "metrics.jsonl"
    whole = [ROW % step for step in range(1, 9)]
    path.write_bytes(b"".join([*whole[:3], damage, *whole[3:5], damage, *whole[5:]]) + b'{"step": 9, "to')
    MetricsLog(path).truncate_to(7)
    assert path.read_bytes() == b"".join(whole[:7])
    aside = tmp_path / "damaged-metrics.jsonl"
    assert (aside.read_bytes() if aside.exists() else b"") == (damage * 2 if damage.strip() else b"")
    told = f"{path}: lines [4, 7] are no rows in their order: set aside in {aside}"
    assert [r.getMessage() for r in caplog.records] == ([told] if damage.strip() else [])


@pytest.mark.parametrize("name", ["metrics.jsonl", "damaged-metrics.jsonl"])
@pytest.mark.parametrize("make", [lambda path: path.symlink_to("mine"), os.mkfifo], ids=["link", "pipe"])
def test_nothing_is_appended_through_a_link_or_to_a_pipe(tmp_path, name, make):
    """A run of a stranger's could otherwise have its lines written into a file of one's own."""
    mine, metrics = tmp_path / "mine", tmp_path / "metrics.jsonl"
    mine.write_bytes(ROW % 1)
    metrics.write_bytes(ROW % 1 + b"touch me\n")
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name}"):
        MetricsLog(metrics).truncate_to(2)
    assert mine.read_bytes() == ROW % 1


def test_metrics_that_are_a_pipe_are_not_copied(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: cannot be read: is no regular file"):
        set_aside(tmp_path / "metrics.jsonl", copied=True)


@pytest.mark.parametrize("wrong", [2, 15, 55])
def test_a_wrong_digit_of_a_step_costs_no_other_row(tmp_path, caplog, wrong):
    path = tmp_path / "metrics.jsonl"
    whole = [ROW % step for step in range(1, 21)]
    path.write_bytes(b"".join([*whole[:4], ROW % wrong, *whole[5:]]))
    MetricsLog(path).truncate_to(18)
    assert path.read_bytes() == b"".join([*whole[:4], *whole[5:18]])
    aside = tmp_path / "damaged-metrics.jsonl"
    assert aside.read_bytes() == ROW % wrong
    assert caplog.messages == [f"{path}: lines [5] are no rows in their order: set aside in {aside}",
                               f"{path}: there are no rows of 1 steps: [5]"]  # fmt: skip


def test_steps_without_a_row_are_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(ROW % 1 + ROW % 3)
    MetricsLog(path).truncate_to(12)
    assert path.read_bytes() == ROW % 1 + ROW % 3
    assert caplog.messages == [f"{path}: there are no rows of 10 steps: [2, 4, 5, 6, 7, 8, ...]"]
    for may_lack in (True, False):  # a run that goes on in another folder has said so
        path.unlink()
        caplog.clear()
        MetricsLog(path).truncate_to(2, may_lack)
        assert caplog.messages == ([] if may_lack else [f"{path}: there are no rows of 2 steps: [1, 2]"])


def test_a_forged_step_costs_no_memory(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(ROW % 1)
    MetricsLog(path).truncate_to(2**50)
    assert caplog.messages == [f"{path}: there are no rows of {2**50 - 1} steps: [2, 3, 4, 5, 6, 7, ...]"]


def test_rows_that_could_never_be_written_end_a_resume_at_once(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(ROW % 1)
    opened = os.open

    def read_only(name, flags, *mode):
        if flags & os.O_WRONLY:
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return opened(name, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(ConfigError, match="Permission denied"):
        MetricsLog(path).truncate_to(1)


def test_rows_are_strict_json_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "kl": float("nan"), "nested": {"x": [float("inf"), 1.5]}, "text": "by hf_canary"})
    assert rows(log.path) == [{"step": 1, "kl": None, "nested": {"x": [None, 1.5]}, "text": "by [redacted]"}]


class FullDisk(io.FileIO):
    """A file that takes ``left`` more bytes."""

    left = 5

    def write(self, data):
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(data[: self.left])
        self.left -= taken
        return taken


def test_rows_that_a_full_disk_does_not_take_are_written_later(tmp_path, caplog):
    """One is cut in its middle. A checkpoint, after which none may be missing, has to wait."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log._file = disk = FullDisk(log.path, "a")
    for step in (1, 2):
        log.append({"step": step})
    with pytest.raises(CheckpointError, match="No space left on device"):
        log.sync()
    disk.left = 1000
    log.append({"step": 3})
    log.close()
    assert rows(log.path) == [{"step": step} for step in (1, 2, 3)]
    [told] = caplog.messages
    assert "metrics.jsonl cannot be written, its rows wait in memory: " in told


# ---------------------------------------------------------------------------------------------------------------- lock


def test_a_second_process_is_refused_until_the_first_lets_go(tmp_path):
    run_dir = tmp_path / "new" / "run"
    held = lock_run(run_dir)
    code = "import sys; from training import process; process.lock_run(sys.argv[1])"
    second = python(code, run_dir)
    error = second.communicate(timeout=60)[1]
    assert second.returncode == 1
    assert f"ConfigError: {run_dir}: in use by another run (process {os.getpid()})" in error
    held.close()
    third = python(code, run_dir)
    third.communicate(timeout=60)
    assert third.returncode == 0


def test_a_disk_without_locks_is_told_apart_from_one_in_use(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="cannot be locked: Function not implemented; choose a folder on another"):
        lock_run(tmp_path)


@pytest.mark.parametrize("code", [1, 130])
def test_a_program_that_failed_does_not_wait_for_servers(code):
    """Python would wait for the threads that still ask them: for half an hour, after the last line."""
    program = ("import atexit, concurrent.futures, time; from training.process import leave\n"
               "atexit.register(print, 'closed'); print('error')\n"
               "concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 60)\n"
               f"leave({code})")  # fmt: skip
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "error\nclosed\n")
    assert time.monotonic() - started < 50


def test_a_killed_process_leaves_no_lock(tmp_path):
    code = (
        "import sys, time; from training import process; held = process.lock_run(sys.argv[1]); "
        "print('held', flush=True); time.sleep(60)"
    )
    child = python(code, tmp_path)
    assert child.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"process {child.pid}"):
        lock_run(tmp_path)
    child.kill()
    child.communicate()
    (tmp_path / ".lock").write_text("9" * 20)  # a longer number than ours
    lock_run(tmp_path).close()
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_locking_sweeps_what_a_crash_left(tmp_path):
    """All that a run writes; what was killed between its two renames is there again."""
    (tmp_path / ".tmp-checkpoint-000001" / "sub").mkdir(parents=True)
    written = "metrics.jsonl episodes.jsonl summary.json about.json run_config.json wandb_id bad_batch.json"
    for name in [*written.split(), "abandoned-metrics.jsonl"]:
        (tmp_path / f".tmp-{name}").write_text("")
    replaced = ["average", "checkpoint-000002", "final"]
    for name in replaced:
        (tmp_path / f".old-{name}").mkdir()
    lock_run(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", *replaced]


def test_locking_leaves_what_is_not_the_runs(tmp_path):
    for name in (".tmp-draft", ".old-thesis", ".tmp-notes.json"):
        (tmp_path / name).write_text("mine")
    lock_run(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".old-thesis", ".tmp-draft", ".tmp-notes.json"]


def test_nobody_is_told_how_to_go_on_in_a_place_that_cannot_be(capsys):
    say_how_to_go_on("train_ppo.py", "x" * 300, 1, sys.stdout)
    assert capsys.readouterr().out == ""


def test_how_to_go_on_is_told_where_the_working_directory_was_deleted(tmp_path, monkeypatch, capsys):
    """The last line, which says what failed, was a traceback."""
    (tmp_path / "run" / "checkpoint-000001").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    say_how_to_go_on("/p/train_ppo.py", str(tmp_path / "run"), 1, sys.stdout)
    assert capsys.readouterr().out.endswith(f" /p/train_ppo.py --resume {tmp_path}/run\n")


def test_a_directory_that_cannot_be_written_is_a_one_line_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run: cannot be written: Not a directory"):
        lock_run(tmp_path / "file" / "run")


def test_a_lock_that_is_a_pipe_is_named(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ConfigError, match=r"/\.lock: cannot be written: (?!None)"):
        lock_run(tmp_path)


def test_nor_is_a_run_begun_where_the_lock_of_before_is_all_that_can_be_written(tmp_path, monkeypatch):
    """Such a run trained for a while before it failed."""
    lock_run(tmp_path).close()
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: open("/proc/run", "w"))  # noqa: SIM115, it fails
    with pytest.raises(ConfigError, match="cannot be written: "):
        lock_run(tmp_path)


# ------------------------------------------------------------------------------------------------------------- signals

LOOP = """
    import time
    from training import process
    with process.StopSignal() as stop:
        print("ready", flush=True)
        while not stop.received:
            time.sleep(0.01)
        print("stopping", stop.received, flush=True)
        time.sleep({grace})
        print("left", flush=True)
    raise SystemExit(128 + stop.received)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_first_signal_asks_and_second_ends(number):
    polite = python(LOOP.format(grace=0))
    assert polite.stdout.readline() == "ready\n"
    polite.send_signal(number)
    assert polite.communicate(timeout=60)[0] == f"stopping {int(number)}\nleft\n"
    assert polite.returncode == 128 + number

    stuck = python(LOOP.format(grace=60))
    assert stuck.stdout.readline() == "ready\n"
    stuck.send_signal(number)
    assert stuck.stdout.readline().startswith("stopping")
    time.sleep(2 * TOGETHER)
    stuck.send_signal(number)
    assert stuck.wait(timeout=10) == 128 + number
    stuck.communicate()


@pytest.mark.parametrize("other", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_signals_that_come_together_are_one(other):
    """A shell that is closed passes SIGHUP on twice; service managers send it beside SIGTERM."""
    loop = python(LOOP.format(grace=0.2))
    assert loop.stdout.readline() == "ready\n"
    loop.send_signal(signal.SIGTERM)
    loop.send_signal(other)
    assert loop.stdout.readline().startswith("stopping")
    loop.send_signal(other)
    assert loop.communicate(timeout=60)[0] == "left\n"
    assert loop.returncode in (128 + signal.SIGTERM, 128 + other)


def test_what_the_others_were_told_is_no_first_signal():
    """Several processes agree on a signal that one of them has received; the others' own may come after that."""
    told = LOOP.format(grace=0.2).replace("print", f"stop.received = {int(signal.SIGTERM)}; print", 1)
    loop = python(told)
    assert loop.stdout.readline() == "ready\n"
    assert loop.stdout.readline().startswith("stopping")
    loop.send_signal(signal.SIGTERM)
    assert loop.communicate(timeout=60)[0] == "left\n"
    assert loop.returncode == 128 + signal.SIGTERM


def test_a_closed_terminal_does_not_end_what_ignores_it():
    """As under nohup."""
    ignores = "import signal, time; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    loop = python(LOOP.format(grace=0).replace("import time", ignores))
    assert loop.stdout.readline() == "ready\n"
    loop.send_signal(signal.SIGHUP)
    loop.send_signal(signal.SIGTERM)
    assert loop.communicate(timeout=60)[0] == f"stopping {int(signal.SIGTERM)}\nleft\n"


def test_a_player_is_asked_nothing_once_a_signal_has_come():
    """Least of all for the probabilities in all positions of a game, which may take minutes."""
    player = StoppablePlayer(SimpleNamespace(act=list, action_probs=list), stop := StopSignal())
    assert player.act([1]) == player.action_probs([1]) == [1]
    stop.received = signal.SIGTERM
    for ask in (player.act, player.action_probs):
        with pytest.raises(InterruptedRolloutError):
            ask([1])


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


# ----------------------------------------------------------------------------------------------------- console and log


def test_a_step_that_trained_nothing_shows_no_number():
    """All its games were cut off, say."""
    row = {"step": 3, "score_mean": 0.5, "success_rate": 0.5, "stage": "mix", "games_per_s": 2.0}
    assert "| kl - | entropy - | stage mix" in progress_line(row | {"update_kl": None, "entropy": math.nan}, 9, "1m")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    stream = io.StringIO()
    console = Console(1, stream=stream)
    console.update(1, "Step 1/1 | reward 0.45 [bold]")
    console.say("hf_canary")
    console.close()
    assert stream.getvalue() == "Step 1/1 | reward 0.45 [bold] | ETA 0m00s\n[redacted]\n"


STEP_ROW = {
    "step": 7, "score_mean": 0.625, "success_rate": 0.6, "entropy": 0.5, "update_kl": -0.00001, "stage": "mix [bold]",
    "explained_variance": 0.0, "clip_fraction": 0.25, "games_per_s": 1850.0, "time_total": 3.0,
}  # fmt: skip


def screen(monkeypatch, width, work):
    """What a terminal of so many columns shows at the end of ``work(console)``, and what is shown for good."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    console = Console(40, stream=stream)
    work(console)
    if console._live:
        console._live.refresh()
    console.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_a_terminal_shows_rows_a_curve_a_bar_and_the_time_left(monkeypatch):
    def work(console):
        console.say("stage easy is passed")
        for step in range(1, 13):
            console.step(STEP_ROW | {"step": step, "score_mean": step / 20})
        console.step(STEP_ROW | {"step": 13, "alarms": ["kl"]})

    narrow, wide = (screen(monkeypatch, width, work) for width in (80, 140))
    for shown in (narrow, wide):
        last = shown.rpartition("step ")[2].splitlines()
        assert max(map(len, shown.splitlines())) <= (80 if shown is narrow else 140)
        assert [line.split()[0] for line in last[1:9]] == [str(step) for step in range(6, 14)]
        assert last[8].rstrip().endswith("mix [bold] !kl")
        assert last[9].rstrip() == "score ▁▂▂▃▃▄▅▅▆▆▇██ 0.050 → 0.625"
        assert last[10].rstrip().endswith("13/40 took 0m00s")
        assert "13/40 1m21s left" in shown
        assert "stage easy is passed" in shown
        assert "critic" not in shown  # a column of zeros
    assert "clipped" not in narrow
    assert "clipped" in wide
    assert re.search(r" 0\.0000 .* mix", narrow)  # no -0.0000


def test_a_small_terminal_shows_fewer_numbers_but_whole_ones(monkeypatch):
    shown = screen(monkeypatch, 40, lambda console: [console.step(STEP_ROW | {"step": step}) for step in (1, 2)])
    head, row = shown.rpartition("step ")[2].splitlines()[:2]
    assert "…" not in head + row.rpartition(" ")[0]
    assert row.split()[0] == "1"
    assert head.split()[0] == "score"


def test_a_terminal_is_shown_names_as_they_are(monkeypatch):
    """A command that is copied from it has to work."""
    assert "runs/a:100:b" in screen(monkeypatch, 80, lambda console: console.say("runs/a:100:b"))


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_lines_on_a_terminal_that_wants_no_picture(monkeypatch, variable):
    monkeypatch.setenv(*variable)
    stream = Terminal()
    console = Console(40, stream=stream)
    console.step(STEP_ROW)
    console.close()
    assert stream.getvalue() == (
        "Step 7/40 | score 0.625 | success 60% | kl 0.0000 | entropy 0.50 | stage mix [bold] | 1850.0 games/s | "
        "ETA 1m39s\n"
    )


def test_log_lines_stand_above_the_picture_and_are_given_back(monkeypatch, capsys):
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    before = handler.stream
    shown = screen(
        monkeypatch, 80, lambda c: (c.step(STEP_ROW), logging.getLogger().warning("alarm kl"), c.step(STEP_ROW))
    )
    assert shown.count("alarm kl") == 1
    assert handler.stream is before
    assert "alarm" not in capsys.readouterr().err


def test_another_programs_bar_has_a_time_left(monkeypatch):
    now = {"t": 100.0}
    monkeypatch.setattr("training.console.time.monotonic", lambda: now["t"])

    def work(console):
        now["t"] = 110.0
        console.update(10, "10 games played")

    assert "10/40 10 games played · 0m30s left" in screen(monkeypatch, 80, work)
    now["t"] = 100.0
    work(Console(40, stream=(plain := io.StringIO())))
    assert plain.getvalue() == "10 games played | ETA 0m30s\n"


def test_what_is_done_between_games_is_no_part_of_their_pace(monkeypatch):
    """A best response was trained for ten minutes: its first games were said to have an hour and a half to go."""
    clock = iter([0.0, 1.0, 500.0, 600.0, 610.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    plain = io.StringIO()
    console = Console(40, plain)
    for done in (0, 50, 100):
        console.progress("best response", done, 100)
    console.update(11, "11 games played")
    assert plain.getvalue().splitlines()[-1] == "11 games played | ETA 0m29s"  # 11 s for 11 games


def test_the_first_step_soon_counts_no_more_and_old_ones_neither():
    console = Console(1000, stream=io.StringIO())

    def left(step, seconds):
        console._scores.append(0.5)
        return console._seconds_left(step, seconds)

    assert left(1, 60.0) == 999 * 60
    assert left(2, 2.0) == 998 * 2
    assert [left(step, 2.0 if step < 10 else 4.0) for step in range(3, 40)][-1] == (1000 - 39) * 4


def test_the_time_left_holds_the_evaluations_to_come(monkeypatch):
    """Each as long as the last, and one of them is at the end; a last step that is due for one is evaluated once."""
    clock = {"t": 0.0}
    monkeypatch.setattr("training.console.time.monotonic", lambda: clock["t"])
    left = {}
    for total in (8, 10):
        console = Console(total, stream=io.StringIO(), eval_freq=4)
        for step in range(1, total + 1):
            for done in (0, 1) if step in (1, 4, 8) else ():
                console.progress("evaluation", done, 1)
                clock["t"] += 30.0 * (not done)
            console._scores.append(0.5)
            left[total, step] = console._seconds_left(step, 2.0)
    assert left == {(8, n): (8 - n) * 2 + 30 * (1 + (n < 4)) for n in range(1, 9)} | {
        (10, n): (10 - n) * 2 + 30 * (1 + (n < 4) + (n < 8)) for n in range(1, 11)}  # fmt: skip


def test_progress_tells_the_time_left_now_and_then(monkeypatch):
    now = {"t": 100.0}
    monkeypatch.setattr("training.console.time.monotonic", lambda: now["t"])
    plain = io.StringIO()
    console = Console(10, stream=plain)

    def work(console):
        now["t"] = 100.0
        for done in (0, 500, 1000, 1500, 2000)[: 2 if console._drawn else 5]:
            console.progress("games", done, 2000)
            now["t"] += 6.0

    work(console)
    assert plain.getvalue().splitlines() == ["games: 0 of 2,000", "games: 1,000 of 2,000, 0m12s left",
                                             "games: 2,000 of 2,000, 0m00s left"]  # fmt: skip

    assert "games: 500 of 2,000, 0m18s left" in screen(monkeypatch, 80, work)


def test_logs_and_tracebacks_hold_no_secret():
    code = """
        import logging
        from training import process
        process.setup_logging()
        logging.getLogger("x").warning("token %s", "hf_canary")
        try:
            raise RuntimeError("hf_canary")
        except RuntimeError:
            logging.getLogger("x").exception("caught")
        def fails():
            raise process.ProgramError("hf_canary")
        process.run_program(fails)
        raise ValueError("hf_canary")
    """
    child = python(code, env={**os.environ, "HF_TOKEN": "hf_canary"})
    error = child.communicate(timeout=60)[1]
    assert "WARNING: token [redacted]\n" in error
    assert "RuntimeError: [redacted]" in error
    assert "\nerror: [redacted]\n" in error
    assert error.endswith("ValueError: [redacted]\n")
    assert "canary" not in error.replace('"hf_canary"', "")  # the quoted one is this test's own source line


def test_nothing_that_is_shown_commands_the_terminal(tmp_path, capsys):
    """What strangers name their files, stages and games."""
    code = r"""
        import logging
        from training import process
        process.setup_logging()
        logging.getLogger("x").warning("%s", "\x1b]0;title\x07 two\nlines")
        def fail():
            raise process.ConfigError("\x1b[2J")
        process.run_program(fail)
    """
    error = python(code).communicate(timeout=60)[1]
    assert error == "WARNING: \\x1b]0;title\\x07 two\nlines\nerror: \\x1b[2J\n"
    Console(2, stream=sys.stdout).say("stage \x1b[31m\nof two lines")
    assert capsys.readouterr().out == "stage \\x1b[31m\nof two lines\n"


# --------------------------------------------------------------------------------------------------------------- wandb


class FakeRun:
    def __init__(self, fails=False):
        self.fails, self.rows, self.exit_code = fails, [], None

    def log(self, row, step):
        if self.fails:
            raise ConnectionError("unreachable hf_canary")
        self.rows.append((step, row))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    fake = types.SimpleNamespace(run=FakeRun(), started=[], Settings=lambda **options: options)
    fake.init = lambda **options: fake.started.append(options) or fake.run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_is_sent_what_was_asked_for_without_secrets(wandb, monkeypatch, tmp_path):
    """Nor is the command line, which it reads by itself."""
    monkeypatch.setattr(sys, "argv", ["train_ppo.py", "--set", "env.env_url=http://host/hf_canary"])
    wandb.init = lambda **options: wandb.started.append(options | {"argv": sys.argv}) or wandb.run
    monkeypatch.setenv("WANDB_API_KEY", "wandb_canary")
    sender = Loggers("auto", tmp_path, {"url": "hf_canary", "key": "wandb_canary"})
    sender.log({"step": 3, "text": "hf_canary"})
    sender.close(exit_code=1)
    (options,) = wandb.started
    assert (options["mode"], options["project"], options["dir"]) == ("online", "chat-games-ppo", str(tmp_path))
    assert options["config"] == {"url": "[redacted]", "key": "[redacted]"}
    assert options["argv"] == ["train_ppo.py", "--set", "env.env_url=http://host/[redacted]"]
    assert wandb.run.rows == [(3, {"step": 3, "text": "[redacted]"})]
    assert wandb.run.exit_code == 1


def test_sample_games_are_sent_without_secrets_and_to_the_project_of_the_variable(wandb, monkeypatch, tmp_path):
    tables = []
    wandb.Table = lambda columns, data: tables.append(data)
    monkeypatch.setenv("WANDB_API_KEY", "wandb_canary")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    sender = Loggers("auto", tmp_path, {})
    sender.games([{"step": 1, "game": "hex", "outcome": "failed at hf_canary", "score": None}])
    assert wandb.started[0]["project"] == "mine"
    [[[told]]] = tables
    assert "[redacted]" in told
    assert "canary" not in told


def test_wandb_takes_a_login_and_goes_on_with_the_same_run(wandb, tmp_path):
    """``wandb login`` writes the netrc file. A fresh run in the folder is a new one there too."""
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password 0123456789\n")
    stages = {"curriculum": {"stages": [{"name": "easy"}, {"name": "hard"}]}}
    for after, steps in ((None, (1, 2)), (1, (2, 3)), (None, (1,))):  # the checkpoint was older than the last row
        sender = Loggers("auto", tmp_path, stages, after)
        for step in steps:
            sender.log({"step": step, "stage": "hard"})
    first, second, third = (options["id"] for options in wandb.started)
    assert first == second != third
    rows = [(step, {"step": step, "stage": "hard", "stage_number": 1}) for step in (1, 2, 3, 1)]
    assert wandb.run.rows == rows


def test_a_copied_folder_is_a_run_of_its_own_there_and_a_moved_one_the_same(wandb, tmp_path, monkeypatch):
    """Both went on in one run, which keeps of each step what came first."""
    monkeypatch.chdir(tmp_path)
    first, copy, moved = (tmp_path / name for name in ("first", "copy", "moved"))
    first.mkdir()
    Loggers("offline", Path("first"), {}).log({"step": 1})
    shutil.copytree(first, copy)
    monkeypatch.chdir(copy)  # where its name of then leads elsewhere
    for folder in (copy, first, copy):
        Loggers("offline", folder, {}, 1)
    first.rename(moved)
    first.mkdir()
    Loggers("offline", first, {})  # another run, where it was
    (tmp_path / "link").symlink_to(moved)
    for folder in (moved, tmp_path / "link"):
        Loggers("offline", folder, {}, 1)
    (copy / "wandb_id").write_text(f"{wandb.started[0]['id']} 1")  # of before it held where it lies
    Loggers("offline", copy, {}, 1)
    begun, copied, *others = (options["id"] for options in wandb.started)
    assert len({begun, copied, others.pop(2)}) == 3
    assert others == [begun, copied, begun, begun, begun]


def test_past_selves_are_sent_as_one(wandb, tmp_path):
    met = {"self": 3, "mcts:5x1": 1, "past:step-000001": 2, "past:step-000002": 4}
    Loggers("offline", tmp_path, {}).log(row := {"step": 3, "opponents": met})
    assert wandb.run.rows == [(3, {"step": 3, "opponents": {"self": 3, "mcts:5x1": 1, "past": 6}})]
    assert row["opponents"] is met


def test_what_tensorboard_alone_was_sent_wandb_is_sent_when_it_comes(wandb, tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "_tensorboard", lambda *_: SimpleNamespace(takes_back=True, log=lambda row: None))
    Loggers("tensorboard", tmp_path, {}).log({"step": 50})
    Loggers("offline", tmp_path, {}, 30).log({"step": 31})
    assert wandb.run.rows == [(31, {"step": 31})]


@pytest.mark.parametrize("kept", ["", "a b", "../x 3", "1234567 -1", "\xff", "x" * 200, None])
def test_what_is_no_name_at_wandb_is_another_run_there(wandb, tmp_path, kept):
    if kept is None:
        os.mkfifo(tmp_path / "wandb_id")
    else:
        (tmp_path / "wandb_id").write_text(kept, encoding="latin-1")
    Loggers("offline", tmp_path, {}, 3).log({"step": 4})
    assert wandb.run.rows == [(4, {"step": 4})]
    assert re.fullmatch(f"[0-9a-f]{{8}} 4 {tmp_path / 'wandb_id'}", (tmp_path / "wandb_id").read_text())


@pytest.mark.parametrize(("name", "mode", "started"), [("auto", "offline", ["offline"]), ("wandb", "disabled",
                         ["disabled"]), ("none", "offline", []), ("offline", "online", ["offline"])])  # fmt: skip
def test_wandbs_own_variable_counts(wandb, tmp_path, monkeypatch, name, mode, started):
    monkeypatch.setenv("WANDB_MODE", mode)
    Loggers(name, tmp_path, {})
    assert [options["mode"] for options in wandb.started] == started


@pytest.mark.parametrize(
    ("mode", "started"), [("auto", 0), ("wandb", 0), ("online", 0), ("offline", 1), ("none", 0), ("disabled", 0)]
)
def test_wandb_without_a_key(wandb, tmp_path, caplog, mode, started):
    sender = Loggers(mode, tmp_path, {})
    sender.log({"step": 1})
    sender.close()
    assert len(wandb.started) == started
    assert ("neither WANDB_API_KEY nor a login" in caplog.text) == (mode in ("online", "wandb"))


@pytest.mark.parametrize("odd", ["netrc", "address"])
def test_an_odd_netrc_or_address_is_no_login_and_costs_no_run(wandb, tmp_path, monkeypatch, odd):
    (tmp_path / "netrc").write_bytes(b"machine m login \xfc password p\n" if odd == "netrc" else b"")
    if odd == "address":
        monkeypatch.setenv("WANDB_BASE_URL", "https://[wandb.local")
    Loggers("auto", tmp_path, {}).close()
    assert not wandb.started


def test_wandb_failures_are_told_once_and_harm_nothing(wandb, tmp_path, caplog):
    wandb.run.fails = True
    sender = Loggers("offline", tmp_path, {})
    for step in (1, 2, 3):
        sender.log({"step": step})
    sender.close()
    assert [record.getMessage() for record in caplog.records] == [
        "wandb is off from here: ConnectionError: unreachable [redacted]"
    ]


def test_wandb_that_cannot_start_or_is_not_installed(wandb, tmp_path, caplog, monkeypatch):
    wandb.init = lambda **options: 1 / 0
    Loggers("offline", tmp_path, {}).log({"step": 1})
    monkeypatch.setitem(sys.modules, "wandb", None)
    Loggers("offline", tmp_path, {}).log({"step": 1})
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert caplog.messages[1] == "wandb is off: it is not installed (pip install wandb)"


# ------------------------------------------------------------------------------------------------------ other loggers

SENT = {"step": 1, "stage": "hard", "score_mean": 0.25, "opponents": {"random": 8}, "text": "x", "kl_ref": None}
STAGES = {"curriculum": {"stages": [{"name": "easy"}, {"name": "hard"}]}}
GAME = {"game": "hex", "opponent": "random", "outcome": "finished", "score": 1.0, "step": 3,
        "turns": [{"user": "a board\n```\n![](http://x/)", "answer": "4", "action": 4,
                   "legal": {4: "x(1,1)"}}]}  # fmt: skip


def send(names, folder, monkeypatch):
    """Three steps, killed; resumed after the second with another third step and a sample game."""
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    first = Loggers(names, folder, STAGES)
    for step in (1, 2, 3):
        first.log(SENT | {"step": step, "score_mean": step / 4})
    first.close(1)
    again = Loggers(names, folder, STAGES, 2)
    again.log(SENT | {"step": 3, "score_mean": 0.9})
    again.games([GAME])
    again.close(0)


def test_tensorboard_reads_what_it_was_sent_and_a_resume_takes_back(tmp_path, monkeypatch, caplog):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    send("tensorboard", tmp_path, monkeypatch)
    assert not caplog.messages
    found = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("score_mean")] == [(1, 0.25), (2, 0.5), (3, pytest.approx(0.9))]
    assert {"stage_number", "opponents/random"} <= set(found.Tags()["scalars"])
    assert not {"text", "kl_ref"} & set(found.Tags()["scalars"])
    [game] = found.Tensors("games/0/text_summary")
    [text] = game.tensor_proto.string_val
    shown = pytest.importorskip("tensorboard.plugin_util").markdown_to_safe_html(text)
    told = "hex against random: finished, score 1.0\na board\n```\n![](http://x/)\nplayed: x(1,1)"
    assert shown == f"<pre><code>{told}\n</code></pre>", "nothing of a game is markup, or loads anything"


def test_trackio_reads_what_it_was_sent_in_one_run(tmp_path):
    pytest.importorskip("trackio")
    code = f"""
        import json, sys
        from pathlib import Path
        sys.path.insert(0, "tests/training")
        import pytest, test_runlog
        with pytest.MonkeyPatch.context() as patch:
            test_runlog.send(["trackio", "none"], Path({str(tmp_path)!r}), patch)
            from trackio.sqlite_storage import SQLiteStorage
            [run] = SQLiteStorage.get_runs("chat-games-ppo")
            print(json.dumps([run, SQLiteStorage.get_logs("chat-games-ppo", run)]))
    """
    reading = python(code, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    out, error = reading.communicate(timeout=100)
    assert reading.returncode == 0, error
    name, told = json.loads(next(line for line in out.splitlines() if line.startswith("[")))
    assert name.startswith(f"{tmp_path.name}-")
    scores = [(row["step"], row["score_mean"]) for row in told if "score_mean" in row]
    assert scores == [(1, 0.25), (2, 0.5), (3, 0.75)]  # it cannot take a step back: the first stays
    assert told[0].keys() == {"score_mean", "stage_number", "opponents/random", "timestamp", "step"}
    assert "    ```\n    ![](http://x/)\n    played: x(1,1)" in told[-1]["games"]["_value"]


def test_a_logger_that_is_not_installed_is_one_line_and_the_others_go_on(tmp_path, monkeypatch, caplog, wandb):
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    senders = Loggers(["trackio", "tensorboard", "offline"], tmp_path, {})
    senders.log({"step": 1})
    senders.close()
    assert caplog.messages == ["trackio is off: it is not installed (pip install trackio)",
                               "tensorboard is off: it is not installed (pip install tensorboard)"]  # fmt: skip
    assert wandb.run.rows == [(1, {"step": 1})]
