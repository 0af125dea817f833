"""Whole runs under what machines, disks, servers and strangers do to them: each has a defined end."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from saving import damages, flip
from serving import SERVE
from tiny import KUHN, base_model, micro_file, tiny_policy
from tiny_runs import (
    ADAPTIVE,
    FEW_TEXTS,
    ROOT,
    STEPS,
    assert_same_run,
    copy_of,
    final_bytes,
    rows,
    train,
    undisturbed_run,
)

import train_ppo
import utils
from env_wrapper import EnvConfig, Task, play
from games import CONFIGS_PER_GAME, NAMES
from scripts import make_tiny_model, merge, warmstart
from scripts.make_tiny_model import make_model
from training.state import Checkpointed, TrainerState
from utils import latest_checkpoint, verify_checkpoint


@pytest.fixture
def undisturbed():
    return undisturbed_run()


def process(code, *args, **options):
    """Run the program in a process of its own, ``code`` before it."""
    prelude = f"import os, signal, sys, time; sys.path.insert(0, {str(ROOT)!r}); import train_ppo, utils; {FEW_TEXTS}\n"
    program = f"{prelude}{code}\nsys.exit(train_ppo.main(sys.argv[1:]))"
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())} | options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-c", program, *args], env=environment, cwd=ROOT, capture_output=True, text=True, **options
    )


def arguments(folder, *args, **sections):
    return ["--config", micro_file(folder, **sections), "--output-dir", str(folder / "run"), *args]


# ------------------------------------------------------------------------------------------------------ kills, signals


@pytest.mark.slow
def test_killed_between_the_last_flush_and_the_rename(undisturbed, tmp_path):
    code = """
real = utils.Path.rename
def rename(self, target):
    if self.name == ".tmp-checkpoint-000003":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, target)
utils.Path.rename = rename"""
    killed = process(code, *arguments(tmp_path, **ADAPTIVE))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "run" / ".tmp-checkpoint-000003" / "manifest.json").exists()
    assert latest_checkpoint(tmp_path / "run").name == "checkpoint-000002"
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert not list((tmp_path / "run").glob(".tmp-*"))
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_signal_while_saving_lets_the_checkpoint_be_finished(undisturbed, tmp_path, monkeypatch):
    real, saves = utils.save_checkpoint, iter(range(10**6))

    def save_checkpoint(*args, **options):
        if next(saves) == 3:  # the first is that of step 0
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(utils, "save_checkpoint", save_checkpoint)
        assert train(tmp_path, **ADAPTIVE) == 128 + signal.SIGTERM
    assert len(rows(tmp_path)) == 3
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_second_interrupt_ends_the_run_at_once_and_leaves_the_last_checkpoint(undisturbed, tmp_path):
    """In the middle of the update of step 4, which the first one would have let finish."""
    code = """
real, updates = train_ppo._backward, iter(range(10**6))
def backward(*args):
    if train_ppo.TRAINERS[0].state.step == 3:
        time.sleep(2 * train_ppo.process.TOGETHER)
        os.kill(os.getpid(), signal.SIGINT)
    return real(*args)
train_ppo._backward, train_ppo.TRAINERS, init = backward, [], train_ppo.Trainer.__init__
def noted(self, *args):
    train_ppo.TRAINERS.append(self)
    init(self, *args)
train_ppo.Trainer.__init__ = noted"""
    ended = process(code, *arguments(tmp_path, **ADAPTIVE))
    assert ended.returncode == 128 + signal.SIGINT, ended.stderr
    assert "interrupted" not in ended.stdout
    assert len(rows(tmp_path)) == 3
    last = latest_checkpoint(tmp_path / "run")
    assert (last.name, verify_checkpoint(last)) == ("checkpoint-000003", [])
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.slow
def test_kills_at_random_instants():
    """As many as the variable KILLS says: ``KILLS=100 pytest -m slow -k random_instants``."""
    done = subprocess.run(
        [sys.executable, "tests/tools/kills.py", os.environ.get("KILLS", "10")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_ten_thousand_steps_leave_memory_descriptors_and_pace_as_they_were():
    done = subprocess.run([sys.executable, "tests/tools/soak.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


FOUR = NAMES.index("connect_four") * CONFIGS_PER_GAME
LONG = {  # a search of minutes a move
    "curriculum": {"stages": [{"name": "only", "games": [[FOUR, FOUR]], "opponent": "mcts:100000000x1"}]},
    "ppo": {"batch_size": 8, "mini_batch_size": 8, "eval_games": 2, "max_seq_length": 512, "eval_exact": "never"},
}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_search_of_minutes_ends_the_run_in_seconds(tmp_path, number):
    command = [sys.executable, "train_ppo.py", *arguments(tmp_path, **LONG)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        while not (tmp_path / "run" / "checkpoint-000000").exists() and run.poll() is None:
            time.sleep(0.1)
        time.sleep(2)  # the searches are on their way
        assert run.poll() is None
        run.send_signal(number)
        start = time.monotonic()
        try:
            told = run.communicate(timeout=30)[0]
        finally:
            run.kill()
        assert time.monotonic() - start < 5, told
    assert run.returncode == 128 + number, told
    assert f"interrupted after step 0; checkpoint: {tmp_path / 'run' / 'checkpoint-000000'}" in told
    assert "Traceback" not in told


# ---------------------------------------------------------------------------------------------------------------- disks


def test_any_damage_to_the_newest_checkpoint_is_found_and_the_run_goes_on_exactly_from_the_one_before(
    undisturbed, tmp_path
):
    copy_of(undisturbed / "run", tmp_path, 4)
    older, newest = (tmp_path / "run" / f"checkpoint-{step:06d}" for step in (3, 4))
    files = [path for path in sorted(newest.rglob("*")) if path.is_file()]
    tried = 0
    for file in files:
        data = file.read_bytes()
        for damaged in damages(data):
            file.write_bytes(damaged)
            assert latest_checkpoint(tmp_path / "run") == older, file
            tried += 1
        file.write_bytes(data)
    assert latest_checkpoint(tmp_path / "run") == newest
    assert (len(files), tried) == (13, 13 * 24)
    damaged_file = newest / "optimizer.safetensors"
    damaged_file.write_bytes(next(damages(damaged_file.read_bytes())))
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)


class FullDisk:
    """``os.fsync`` that finds no space left while checkpoints of these steps are written."""

    def __init__(self, monkeypatch, steps):
        self.steps, self.trainers = steps, []
        real, init = os.fsync, train_ppo.Trainer.__init__

        def fsync(descriptor):
            if self.trainers and self.trainers[0].state.step in self.steps:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        def noted(trainer, *args):
            self.trainers.append(trainer)
            init(trainer, *args)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(train_ppo.Trainer, "__init__", noted)


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(undisturbed, tmp_path, monkeypatch, capsys):
    FullDisk(monkeypatch, {2, 3, 5})
    assert train(tmp_path, **ADAPTIVE) == 0
    assert capsys.readouterr().err.count("training goes on without a checkpoint: ") == 3
    kept = sorted(path.name for path in (tmp_path / "run").glob("*checkpoint-*"))
    assert kept == [f"checkpoint-00000{step}" for step in (0, 1, 4, 6)]
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_with_the_last_checkpoint_as_it_was(
    undisturbed, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        FullDisk(patch, {3, 4, 5, 6})
        assert train(tmp_path, **ADAPTIVE) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("training failed: ")
    assert "No space left on device" in message
    assert len(rows(tmp_path)) == 5
    assert latest_checkpoint(tmp_path / "run").name == "checkpoint-000002"
    assert not list((tmp_path / "run").glob(".tmp-*"))
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.slow
def test_files_that_may_not_grow_end_the_run_in_one_line(tmp_path):
    """A limit of the system's, met in the middle of a write: the optimizer does not fit."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))"
    ended = process(code, *arguments(tmp_path))
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(
        "training failed: after step 3: checkpoint-000003: optimizer.safetensors: "
    )
    assert len(rows(tmp_path)) == 3
    assert [path.name for path in (tmp_path / "run").glob("*checkpoint-*")] == ["checkpoint-000000"]


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("training.state.load_policy", None)
    place = "/proc/run"  # where not even root may write
    assert train_ppo.main(["--config", micro_file(tmp_path), "--output-dir", place]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {place}: cannot be written: ")


@pytest.mark.parametrize("args", [[], ["--dry-run"]])
def test_a_disk_that_is_full_from_the_start_is_told_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, args):
    monkeypatch.setattr("training.state.load_policy", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 10**9, 0))
    assert train(tmp_path, *args) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: run.output_dir: {tmp_path / 'run'}: ")
    assert line.endswith(" MB are needed, its disk has 0 MB free")


@pytest.mark.slow
def test_a_disk_too_small_for_a_checkpoint_is_told_before_it_is_written(undisturbed, tmp_path, monkeypatch, capsys):
    real, asked = shutil.disk_usage, iter(range(10**6))

    def usage(place):
        return real(place)._replace(free=0) if next(asked) in (2, 3) else real(place)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert train(tmp_path, **ADAPTIVE) == 0
    assert capsys.readouterr().err.count("MB are needed, its disk has 0 MB free") == 2
    assert_same_run(tmp_path, undisturbed)


PROGRAMS = {
    "make_tiny_model": lambda folder: make_tiny_model.main([folder]),
    "merge": lambda folder: merge.main(["--adapters", str(undisturbed_run() / "run"), "--output", folder]),
    "merge, the adapter": lambda folder: merge.main(
        ["--adapters", str(undisturbed_run() / "run"), "--output", folder, "--adapter-only"]
    ),
    "warmstart": lambda folder: warmstart.main(
        [
            f"--output={folder}/adapter",
            "--teacher=cfr",
            "--set",
            f"model.model_name={base_model()}",
            "model.device=cpu",
            "model.use_4bit=false",
            'env.allowed_game_indices=["kuhn_poker"]',
        ]
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_say_in_a_line_that_a_folder_cannot_be_written(capsys, program):
    """Before anything is loaded or played."""
    assert PROGRAMS[program]("/proc/self/mine") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: /proc/self/mine: cannot be written: ")


@pytest.mark.parametrize("program", ["merge", "warmstart"])
def test_programs_say_in_a_line_before_their_work_that_the_disk_is_full(
    undisturbed, tmp_path, monkeypatch, capsys, program
):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 10**9, 0))
    monkeypatch.setattr(merge, "merge", None)
    monkeypatch.setattr(warmstart, "_measure", None)
    assert PROGRAMS[program](str(tmp_path / "out")) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: --output {tmp_path / 'out'}")
    assert line.endswith(" MB are needed, its disk has 0 MB free")


@pytest.mark.slow
def test_a_run_whose_reader_is_gone_goes_on_to_its_end(undisturbed, tmp_path):
    """As with ``| head -1``; so does one that writes into a terminal that was closed."""
    reader, writer = os.pipe()
    os.close(reader)
    stdout = f"os.dup2({writer}, 1)"
    ended = process(stdout, *arguments(tmp_path, **ADAPTIVE), pass_fds=[writer])
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_terminal_of_few_letters_a_machine_without_git_and_a_tilde(tmp_path):
    """What cannot be shown is shown as "?", and what is not there is not needed."""
    set_up = "os.environ['HOME'] = sys.argv.pop()"
    args = [*arguments(tmp_path), "--output-dir", "~/run", "--set", "ppo.num_train_steps=1", str(tmp_path)]
    ended = process(set_up, *args, env={"PYTHONIOENCODING": "ascii", "PATH": str(tmp_path)})
    assert ended.returncode == 0, ended.stderr
    assert " ? commit unknown ? " in ended.stdout
    assert (tmp_path / "run" / "final").is_dir()


@pytest.mark.parametrize("where", ["train_ppo.preflight.check", "training.state.load_policy"])
def test_an_interrupt_before_there_is_anything_to_save_is_one_line(tmp_path, monkeypatch, capsys, where):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    assert train(tmp_path) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "error: interrupted"


def test_a_folder_called_checkpoint_something_is_a_run_all_the_same(undisturbed, tmp_path):
    copy_of(undisturbed / "run", tmp_path, STEPS)
    run = (tmp_path / "run").rename(tmp_path / "checkpoint-mine")
    assert train_ppo.main(["--resume", str(run), "--set", f"ppo.num_train_steps={STEPS + 1}"]) == 0
    assert (run / f"checkpoint-{STEPS + 1:06d}").is_dir()


def test_a_tiny_model_does_not_replace_a_folder_of_the_users_own(tmp_path, capsys):
    (tmp_path / "config.json").write_text("mine")
    assert make_tiny_model.main([str(tmp_path)]) == 2
    line = f"error: {tmp_path}: holds files of yours, which would be replaced; name another folder"
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.json", "mine")]


def test_the_recipe_of_a_tiny_model_outlives_a_full_disk(tmp_path, monkeypatch):
    """Make has it written again whenever a game's file is newer; it was left empty, and no later call got past it."""
    monkeypatch.setattr(make_tiny_model, "prompts", lambda *_: ["a few words"] * 3)
    words, recipe = [str(tmp_path), "--hidden", "8", "--layers", "1"], tmp_path / "recipe.json"
    assert make_tiny_model.main(words) == 0
    before = recipe.read_bytes()

    def full(path, *_, **__):
        path.open("wb").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", full)
        disk.setattr(Path, "write_bytes", full)
        assert make_tiny_model.main(words) == 2
    assert recipe.read_bytes() == before
    assert make_tiny_model.main(words) == 0


@pytest.mark.slow
def test_nor_what_lies_beside_another_tiny_model_and_one_without_weights_is_made_anew(tmp_path, capsys):
    small, other = ["--hidden", "8", "--layers", "1"], ["--hidden", "16", "--layers", "1"]
    assert make_tiny_model.main([str(tmp_path), *small]) == 0
    (tmp_path / "notes.txt").write_text("mine")
    assert make_tiny_model.main([str(tmp_path), *other]) == 2
    assert "holds files of yours, which would be replaced" in capsys.readouterr().err
    (tmp_path / "notes.txt").unlink()
    assert make_tiny_model.main([str(tmp_path), *small]) == 0
    assert "is already there" in capsys.readouterr().out
    whole, note = (tmp_path / "model.safetensors").read_bytes(), tmp_path / "recipe.json"
    files = json.loads(note.read_text()).pop("files")
    note.write_text(json.dumps({k: v for k, v in json.loads(note.read_text()).items() if k != "files"}))
    assert make_tiny_model.main([str(tmp_path), *small]) == 0  # from before files were noted
    assert "is already there" in capsys.readouterr().out
    assert json.loads(note.read_text())["files"] == files
    (tmp_path / "model.safetensors").write_bytes(whole[:1000])
    assert make_tiny_model.main([str(tmp_path), *small]) == 0
    assert "is already there" not in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").read_bytes() == whole
    assert len(list(tmp_path.parent.glob(f"{tmp_path.name}-*"))) == 0  # a damaged one is nobody's base
    (tmp_path / "model.safetensors").unlink()
    assert make_tiny_model.main([str(tmp_path), *small]) == 0
    assert (tmp_path / "model.safetensors").exists()
    assert make_tiny_model.main([str(tmp_path), *other]) == 0


# ------------------------------------------------------------------------------------------------------- memory, clocks


@pytest.mark.slow
def test_a_batch_that_was_halved_for_lack_of_memory_stays_halved_after_a_resume(tmp_path, monkeypatch):
    """Memory runs out in step 2; the run that is resumed after step 3 is the one that was not interrupted."""

    def run(name, *args):
        real, calls = train_ppo._backward, iter(range(10**6))

        def backward(*parts):
            if next(calls) == 4 and not args:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(*parts)

        (tmp_path / name).mkdir(exist_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(train_ppo, "_backward", backward)
            assert train(tmp_path / name, *args, model={"tokens_per_batch": 256}) == 0

    run("whole")
    states = [json.loads((tmp_path / "whole" / "run" / f"checkpoint-{k:06d}" / "trainer_state.json").read_text())
              for k in (1, 2, STEPS)]  # fmt: skip
    assert [state["tokens_per_batch"] for state in states] == [256, 128, 128]
    (tmp_path / "resumed").mkdir()
    copy_of(tmp_path / "whole" / "run", tmp_path / "resumed", 3)
    run("resumed", "--resume")
    assert rows(tmp_path / "resumed") == rows(tmp_path / "whole")
    assert final_bytes(tmp_path / "resumed") == final_bytes(tmp_path / "whole")


@pytest.mark.parametrize(("tokens", "step", "after"), [(64, 49, 64), (64, 50, 128), (256, 100, 256), (200, 50, 256)])
def test_batches_grow_back_now_and_then_up_to_what_was_asked_for(tokens, step, after):
    policy, state = SimpleNamespace(tokens_per_batch=tokens), TrainerState(step=step)
    config = SimpleNamespace(model=SimpleNamespace(tokens_per_batch=256))
    trainer = SimpleNamespace(policy=policy, state=state, config=config, agree_on_batches=lambda: None)
    Checkpointed.grow_batches(trainer)
    assert policy.tokens_per_batch == state.tokens_per_batch == after


def test_batches_that_an_evaluation_halved_are_those_of_its_checkpoint(tmp_path, monkeypatch):
    evaluate = train_ppo.Trainer.evaluate

    def short_of_memory(self, *args):
        self.policy.halve_batches()
        return evaluate(self, *args)

    monkeypatch.setattr(train_ppo.Trainer, "evaluate", short_of_memory)
    assert train(tmp_path, "--set", "ppo.num_train_steps=1", "ppo.eval_freq=1") == 0
    states = [json.loads((tmp_path / "run" / f"checkpoint-{k:06d}" / "trainer_state.json").read_text()) for k in (0, 1)]
    whole = json.loads((tmp_path / "run" / "run_config.json").read_text())["model"]["tokens_per_batch"]
    assert [state["tokens_per_batch"] for state in states] == [whole // 2, whole // 4]


@pytest.mark.slow
def test_a_clock_that_jumps_back_changes_nothing(undisturbed, tmp_path, monkeypatch):
    hours = iter(range(10**6))
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1.7e9 - 3600 * next(hours))
        assert train(tmp_path, **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)
    for step in range(1, STEPS + 1):
        os.utime(tmp_path / "run" / f"checkpoint-{step:06d}", (1.7e9 - step, 1.7e9 - step))
    assert latest_checkpoint(tmp_path / "run").name == f"checkpoint-{STEPS:06d}"


# --------------------------------------------------------------------------------------------------------- environments

SMALL = {"curriculum": {"stages": [{"name": "only", "games": [[KUHN, KUHN]]}]}}
REMOTE = SMALL | {
    "env": {"env_mode": "url", "prompt": "full", "env_timeout": 2.0},
    "ppo": {"max_seq_length": 1024, "batch_size": 4, "mini_batch_size": 4, "ppo_epochs": 1, "eval_games": 2},
}  # fmt: skip


@pytest.mark.slow
def test_a_server_that_dies_ends_the_run_with_its_address_and_a_checkpoint(tmp_path, monkeypatch, capsys):
    real, steps = train_ppo.play, iter(range(10**6))
    command = [sys.executable, str(SERVE), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, contextlib.ExitStack() as closing:
        closing.callback(server.kill)
        url = server.stdout.readline().split()[-1]

        def play(*args):
            if next(steps) == 1:
                server.kill()
                server.wait()
            return real(*args)

        monkeypatch.setattr(train_ppo, "play", play)
        assert train(tmp_path, "--set", f"env.env_url={url}", **REMOTE) == 1
    lines = capsys.readouterr().err.splitlines()
    assert not [line for line in lines if "HTTP Request" in line]
    message = lines[-1]
    assert message.startswith("training failed: after step 1: 4 of 4 episodes failed; the first: ServerError: ")
    assert url in message
    checkpoint = Path(message.rpartition("checkpoint: ")[2])
    assert (checkpoint.name, verify_checkpoint(checkpoint)) == ("checkpoint-000001", [])
    assert [row["failed"] for row in rows(tmp_path)] == [0]


def test_a_server_that_is_not_there_is_told_at_once_with_its_address(tmp_path, capsys):
    url = "http://127.0.0.1:9"
    sections = REMOTE | {"env": REMOTE["env"] | {"env_timeout": 0.2, "env_url": url}}
    assert train(tmp_path, **sections) == 2
    assert f"env.env_url: no server answers at {url}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("move", ["crash", 10**6, None], ids=str)
def test_an_opponent_that_crashes_or_plays_illegally_costs_the_episode_and_is_no_win(monkeypatch, move):
    from envs.opponents import RandomBot

    real, calls = RandomBot.step, iter(range(10**6))

    def step(self, state, legal):
        if next(calls) != 0:
            return real(self, state, legal)
        if move == "crash":
            raise RuntimeError("no move")
        return move

    monkeypatch.setattr(RandomBot, "step", step)
    from players import random_player

    tasks = [Task(0, seed) for seed in range(4)]
    episodes = play(EnvConfig(), random_player(), tasks)
    outcomes = [episode.outcome for episode in episodes]
    assert sorted(outcomes) == ["failed", "finished", "finished", "finished"]
    assert episodes[outcomes.index("failed")].score == 0.0
    assert episodes[outcomes.index("failed")].info["error"]


def test_a_hundred_servers_that_hang_leave_no_thread_and_no_descriptor():
    import socket
    import threading

    from players import random_player

    def held():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    tasks = [Task(0, seed) for seed in range(10)]
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:  # takes connections, never answers
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = EnvConfig(env_mode="url", env_url=address, env_timeout=0.1)
        counts = []
        for _ in range(10):
            episodes = play(config, random_player(), tasks)
            assert [episode.outcome for episode in episodes] == ["failed"] * 10
            counts.append(held())
    assert counts[-1] == counts[0]


# ----------------------------------------------------------------------------------------------- what belongs together


def own_base(folder):
    """A base model of the test's own."""
    shutil.copytree(base_model(), folder / "base")
    return {"model_name": str(folder / "base")}


def change_weights(folder):
    words = json.loads((folder / "config.json").read_text())["vocab_size"]
    make_model(words, 32, 2, 0.15, 1).save_pretrained(folder)


def change_tokenizer(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    one, other = [word for word in words if len(word) > 3 and word.isalpha()][:2]
    words[one], words[other] = words[other], words[one]
    file.write_text(json.dumps(content))


def change_template(folder):
    said = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    asked = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    (folder / "chat_template.jinja").write_text(f"{{% for m in messages %}}{said}{{% endfor %}}{asked}")


def change_one_bit(folder):
    file = folder / "model.safetensors"
    file.write_bytes(flip(file.read_bytes(), 8 * (file.stat().st_size - 777)))


CHANGES = [pytest.param("weights", change_weights, marks=pytest.mark.slow), ("weights", change_one_bit),
           ("tokenizer", change_tokenizer), ("tokenizer", change_template)]  # fmt: skip


@pytest.mark.parametrize(("part", "change"), CHANGES)
def test_a_base_that_changed_under_a_checkpoint_is_refused_unless_forced(tmp_path, capsys, part, change):
    sections = SMALL | {"model": own_base(tmp_path), "ppo": {"num_train_steps": 2}}
    assert train(tmp_path, **sections) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoint-000002")
    before = (tmp_path / "run" / "checkpoint-000001" / "manifest.json").read_bytes()
    change(tmp_path / "base")
    told = f"the {part} of {tmp_path / 'base'} are not those that it was trained with"
    capsys.readouterr()
    assert train(tmp_path, "--resume", **sections) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: --resume: ")
    assert f"{told}; --force-config goes on" in line
    assert (tmp_path / "run" / "checkpoint-000001" / "manifest.json").read_bytes() == before
    assert train(tmp_path, "--resume", "--force-config", **sections) == 0
    assert f"WARNING: {tmp_path / 'run' / 'checkpoint-000001'}: {told}" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoint-000002").exists()


def test_a_starting_adapter_that_changed_under_a_checkpoint_is_refused(tmp_path, capsys):
    sections = SMALL | {"model": {"adapter": str(tmp_path / "warm")}, "ppo": {"num_train_steps": 2}}
    tiny_policy(tmp_path, seed=1).save(tmp_path / "warm")
    assert train(tmp_path, **sections) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoint-000002")
    tiny_policy(tmp_path, seed=2).save(tmp_path / "warm")
    assert train(tmp_path, "--resume", **sections) == 2
    assert "not those that it was trained with; --force-config goes on" in capsys.readouterr().err
