"""Runs that are interrupted, killed or starved: what they leave, and that they go on exactly."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mutants
import pytest
import torch
from safetensors.torch import load_file, save_file
from saving import seal_again
from tiny import micro_file
from tiny_runs import (
    ADAPTIVE,
    FEW_TEXTS,
    ROOT,
    STEPS,
    assert_same_run,
    copy_of,
    final_bytes,
    rows,
    summary,
    train,
    undisturbed_run,
)

import train_ppo
from policy import network
from training import loggers
from training.process import ProgramError
from training.trajectories import Batch


@pytest.fixture
def undisturbed():
    return undisturbed_run()


def signal_in_rollout(number, step):
    """``play`` whose player gets a signal at its second answer of a step."""
    steps, real = iter(range(10**6)), train_ppo.play

    def play(config, player, tasks):
        answers = iter(range(10**6)) if next(steps) == step else iter([])
        act = player.act

        def act_or_signal(queries):
            if next(answers, None) == 1:
                os.kill(os.getpid(), number)
            return act(queries)

        player.act = act_or_signal
        return real(config, player, tasks)

    return play


def signal_in_update(number, step):
    """``ppo_update`` that gets a signal at its start in a step."""
    steps, real = iter(range(10**6)), train_ppo.ppo_update

    def ppo_update(*args):
        if next(steps) == step:
            os.kill(os.getpid(), number)
        return real(*args)

    return ppo_update


def signal_in_evaluation(number, nth):
    """``evaluate`` whose player gets a signal at its first answer of one evaluation."""
    evaluations, real = iter(range(10**6)), train_ppo.evaluate

    def evaluate(*args, **options):
        if next(evaluations) == nth:
            os.kill(os.getpid(), number)
        return real(*args, **options)

    return evaluate


@pytest.mark.parametrize(
    ("name", "patched", "number", "step", "done"),
    [
        pytest.param("evaluate", signal_in_evaluation, signal.SIGTERM, 0, 0, marks=pytest.mark.slow),  # before step 1
        # Of step 4, whose row waits for it.
        pytest.param("evaluate", signal_in_evaluation, signal.SIGTERM, 1, 4, marks=pytest.mark.slow),
        pytest.param(
            "evaluate", signal_in_evaluation, signal.SIGINT, 2, 6, marks=pytest.mark.slow
        ),  # after the last step
        pytest.param("play", signal_in_rollout, signal.SIGTERM, 0, 0, marks=pytest.mark.slow),
        pytest.param("play", signal_in_rollout, signal.SIGTERM, 3, 3, marks=pytest.mark.slow),
        ("ppo_update", signal_in_update, signal.SIGTERM, 2, 3),
        pytest.param("ppo_update", signal_in_update, signal.SIGINT, 5, 6, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_a_checkpoint_from_which_the_run_goes_on_exactly(
    undisturbed, tmp_path, monkeypatch, capsys, name, patched, number, step, done
):
    """In the rollout the step is dropped, in the update it is finished, an evaluation is done again on resume."""
    with monkeypatch.context() as patch:
        patch.setattr(train_ppo, name, patched(number, step))
        assert train(tmp_path, "--set", "ppo.save_freq=100", **ADAPTIVE) == 128 + number
    assert f"interrupted after step {done}; checkpoint: {tmp_path / 'run'}" in capsys.readouterr().out
    assert len(rows(tmp_path)) == done - (name == "evaluate" and done == 4)
    assert train(tmp_path, "--resume", "--set", "ppo.save_freq=100", **ADAPTIVE) == 0
    assert "there are no rows" not in capsys.readouterr().err  # that of an interrupted evaluation is yet to come
    assert_same_run(tmp_path, undisturbed)


# -------------------------------------------------------------------------------------------------- what breaks


def test_a_loss_that_stays_not_finite_ends_the_run_with_the_last_good_state(tmp_path, monkeypatch, capsys):
    real = train_ppo.ppo_loss
    calls = iter(range(10**6))

    def loss(*args):
        total, stats = real(*args)
        return (total if next(calls) < 8 else total * torch.nan), stats

    monkeypatch.setattr(train_ppo, "ppo_loss", loss)
    monkeypatch.setattr(train_ppo, "MAX_BAD_UPDATES", 4)
    assert train(tmp_path) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "4 minibatches in a row gave a loss or gradient that is not finite; the last are in " in message
    last = Path(message.rpartition("checkpoint: ")[2])
    step = json.loads((last / "trainer_state.json").read_text())["step"]
    assert 1 <= step < STEPS
    assert len(rows(tmp_path)) == step  # the step is whole: its good minibatches, and what was played
    dumped = json.loads((tmp_path / "run" / "bad_batch.json").read_text())
    assert dumped["step"] == step
    assert sum(len(s["decisions"]) for s in dumped["sequences"]) == rows(tmp_path)[-1]["decisions"]
    assert {len(s["advantages"]) - len(s["decisions"]) for s in dumped["sequences"]} == {0}


@pytest.mark.parametrize(("factor", "learnt"), [(1.0, True), (torch.nan, False)])
def test_a_short_run_that_learnt_nothing_says_so(tmp_path, monkeypatch, capsys, factor, learnt):
    real = train_ppo.ppo_loss
    monkeypatch.setattr(train_ppo, "ppo_loss", lambda *args: ((found := real(*args))[0] * factor, found[1]))
    monkeypatch.setattr(train_ppo, "MAX_BAD_UPDATES", 100)
    assert train(tmp_path, "--set", "ppo.num_train_steps=1") == 0
    assert ("nothing was learnt after step 0: " in capsys.readouterr().out) != learnt
    if learnt:  # nor does one that goes on
        monkeypatch.setattr(train_ppo, "ppo_loss", lambda *args: ((found := real(*args))[0] * torch.nan, found[1]))
        assert train(tmp_path, "--resume", "--set", "ppo.num_train_steps=2") == 0
        assert "nothing was learnt after step 1: " in capsys.readouterr().out


def test_a_dump_that_cannot_be_written_is_told_and_ends_nothing(tmp_path, caplog):
    (tmp_path / "bad_batch.json").mkdir()
    Batch.dump(SimpleNamespace(unit=[], sequences=[], spans=[]), tmp_path / "bad_batch.json", 3, [])
    assert "bad_batch.json: " in caplog.text


@pytest.mark.slow
def test_no_memory_in_the_middle_of_a_step_leaves_the_last_checkpoint_alone(undisturbed, tmp_path, monkeypatch, capsys):
    """Some minibatches of step 5 are applied when it fails: that state must not be saved as if it were step 4's."""
    real, calls = train_ppo._backward, iter(range(10**6))
    limit = 1 + int(sum(row["updates"] + row["skipped"] for row in rows(undisturbed)[:4]))

    def backward(*args):
        if next(calls) == limit:
            args[0].tokens_per_batch = 1  # nothing is left to halve
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train_ppo, "_backward", backward)
        assert train(tmp_path, **ADAPTIVE) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    told = "in step 5: out of memory with one sequence at a time: lower ppo.max_seq_length"
    more = " or ppo.batch_size, whose keys and values are all held (ppo.context_grad=true holds none)"
    assert f"{told}{more}; checkpoint: " in message
    assert message.endswith("checkpoint-000004")
    assert final_bytes(tmp_path, 4) == final_bytes(undisturbed, 4)
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)


def test_memory_that_runs_out_in_a_rollout_is_free_again_for_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    """What the games had read is held by the error's own frames, and a checkpoint's weights are asked to read first."""
    real, now = network.Reader.forward, {"step": 0}

    def forward(self, *args):
        if now["step"] == 3 and len(self.store.layers[0][0]):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *args)

    def step(self, stop):
        now["step"] = self.state.step + 1
        return real_step(self, stop)

    real_step = train_ppo.Trainer.step
    monkeypatch.setattr(train_ppo.Trainer, "step", step)
    monkeypatch.setattr(network.Reader, "forward", forward)
    monkeypatch.setattr(network.Reader, "halve_batches", lambda self: False)
    assert train(tmp_path, "--set", "ppo.save_freq=100", "--set", "env.history_turns=all") == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "after step 2: CUDA out of memory; checkpoint: " in message
    assert message.endswith("checkpoint-000002")


PLACES = {  # where a device fails -> the checkpoint that is left, in step 3 or the evaluation of step 4
    "play": 2, "collate": 2, "Batch.moved": 2, "_backward": 2, "Trainer.keep_past": 2, "evaluate": 4,
}  # fmt: skip


DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


@pytest.mark.parametrize(  # one of the twelve; the others with `make test-all`
    ("place", "error"),
    [pytest.param(place, error, marks=[pytest.mark.slow] * ((place, error) != ("Batch.moved", torch.AcceleratorError)))
     for place in PLACES for error in DEVICE_ERRORS],
)  # fmt: skip
def test_a_device_that_fails_leaves_a_checkpoint_wherever_it_was(
    undisturbed, tmp_path, monkeypatch, capsys, place, error
):
    home, _, name = place.rpartition(".")
    owner = getattr(train_ppo, home) if home else train_ppo
    real, now = getattr(owner, name), {"step": 0}

    def step(self, stop):
        now["step"] = self.state.step + 1
        return real_step(self, stop)

    def failing(*args, **options):
        if now["step"] == PLACES[place] + (place != "evaluate"):
            if place == "_backward":
                args[0].tokens_per_batch = 1  # nothing is left to halve
            raise error("device lost\nfor ever")
        return real(*args, **options)

    with monkeypatch.context() as patch:
        real_step = train_ppo.Trainer.step
        patch.setattr(train_ppo.Trainer, "step", step)
        patch.setattr(owner, name, failing)
        assert train(tmp_path, "--set", "ppo.save_freq=2", **ADAPTIVE) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("training failed: ")
    left = Path(message.rpartition("checkpoint: ")[2])
    assert left == tmp_path / "run" / f"checkpoint-{PLACES[place]:06d}"
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)


def test_failing_environments_end_the_run_with_the_cause_and_a_checkpoint(tmp_path, monkeypatch, capsys):
    from envs.openspiel import OpenSpielEnv

    real, train_step = OpenSpielEnv.step, train_ppo.Trainer.step

    def lost(self, text):
        raise OSError("engine lost")

    def step(self, stop):
        monkeypatch.setattr(OpenSpielEnv, "step", lost if self.state.step else real)
        return train_step(self, stop)

    monkeypatch.setattr(train_ppo.Trainer, "step", step)
    assert train(tmp_path) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert re.search(
        r"episodes failed; the first: OSError: engine lost \(test_train_faults.py:\d+\); checkpoint: ", message
    )
    assert Path(message.rpartition("checkpoint: ")[2]).is_dir()


def test_a_signal_that_comes_while_processes_agree_is_neither_lost_nor_followed_alone(tmp_path, monkeypatch):
    """Whoever leaves before the others know leaves them waiting: it counts when they look the next time."""
    calls = iter(range(10**6))

    def largest(ranks, number):
        if number >= 0 and next(calls) == 1:  # below: limits of batches
            os.kill(os.getpid(), signal.SIGTERM)
        return number

    monkeypatch.setattr(train_ppo.Ranks, "largest", largest)
    monkeypatch.setattr(
        train_ppo.Trainer, "player", lambda trainer, *_, **__: trainer.policy
    )  # as one of several plays
    assert train(tmp_path, "--set", "ppo.num_train_steps=5") == 128 + signal.SIGTERM
    assert len(rows(tmp_path)) == 3


def test_a_signal_that_another_process_was_sent_decides_how_all_end(tmp_path, monkeypatch):
    calls = iter(range(10**6))

    def largest(ranks, number):
        return signal.SIGINT if number >= 0 and next(calls) == 1 else number

    monkeypatch.setattr(train_ppo.Ranks, "largest", largest)
    monkeypatch.setattr(train_ppo.Trainer, "player", lambda trainer, *_, **__: trainer.policy)
    assert train(tmp_path, "--set", "ppo.num_train_steps=5") == 128 + signal.SIGINT
    assert len(rows(tmp_path)) == 2


@pytest.mark.slow
def test_an_evaluation_that_fails_costs_no_step(undisturbed, tmp_path, monkeypatch, capsys):
    """A server that died, say: the step before it is in the checkpoint, and its evaluation is made on resuming."""
    real, evaluations = train_ppo.evaluate, iter(range(10**6))

    def evaluate(*args, **options):
        if next(evaluations) == 1:
            raise ProgramError("every game of kuhn_poker failed; the first: no answer")
        return real(*args, **options)

    sent = []
    wandb = partial(SimpleNamespace, takes_back=False, log=sent.append, games=print, close=print)
    monkeypatch.setattr(loggers, "_wandb", lambda *_: wandb())
    offline = ("--set", "run.logger=offline")
    with monkeypatch.context() as patch:
        patch.setattr(train_ppo, "evaluate", evaluate)
        assert train(tmp_path, *offline, **ADAPTIVE) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("training failed: after step 4: every game of kuhn_poker failed; the first: no answer")
    assert line.endswith(f"checkpoint: {tmp_path / 'run' / 'checkpoint-000004'}")
    assert train(tmp_path, "--resume", *offline, **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)
    assert [row["step"] for row in sent] == list(range(1, 1 + len(rows(tmp_path))))


@pytest.mark.parametrize(
    ("where", "error", "told"),
    [*((place, RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), "CUDA error: CUBLAS_[redacted]_FAILED")
       for place in ("play", "collate", "evaluate")),
     ("collate", KeyError("tensor"), "KeyError: 'tensor'")],
)  # fmt: skip
def test_what_a_library_raises_between_steps_is_a_line_and_a_checkpoint(
    tmp_path, monkeypatch, capsys, where, error, told
):
    """As cuBLAS does, for one: neither memory nor a device that is gone. What a game raises is told with its kind."""
    real, calls, codes = getattr(train_ppo, where), iter(range(10**6)), []

    def failing(*args, **options):
        found = real(*args, **options)
        if next(calls) == 2:  # at its end: what it has changed belongs to no step
            raise error
        return found

    monkeypatch.setattr(train_ppo, where, failing)
    monkeypatch.setattr(loggers.Loggers, "close", lambda self, code=0: codes.append(code))
    monkeypatch.setenv("HF_TOKEN", "STATUS_EXECUTION")
    assert train(tmp_path, "--set", "ppo.save_freq=100", "ppo.eval_freq=1") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"training failed: after step 2: {told}; checkpoint: ")
    assert codes == [1], "trackers are told that the run has failed"
    saved = json.loads((tmp_path / "run" / "checkpoint-000002" / "trainer_state.json").read_text())
    assert max(updates for updates, *_ in saved["moments"].values()) == 2
    assert "Traceback" in (tmp_path / "run" / "run.log").read_text()


def test_a_resume_that_is_refused_leaves_the_configuration_and_players_keep_their_own(undisturbed, tmp_path, capsys):
    copy_of(undisturbed / "run", tmp_path, STEPS)
    run = tmp_path / "run"
    shutil.copy(undisturbed / "run" / "run_config.json", run)
    before = (run / "run_config.json").read_bytes()
    assert json.loads((undisturbed / "run" / "final" / "run_config.json").read_text()) == json.loads(before)
    assert train(tmp_path, "--resume", "--force-config", "--set", "lora.r=3", f"ppo.num_train_steps={STEPS + 1}") != 0
    assert (run / "run_config.json").read_bytes() == before


def test_a_checkpoint_that_is_saved_again_keeps_its_score(tmp_path, monkeypatch):
    """It may be the best one, which is kept."""
    knobs = ("--set", "ppo.num_train_steps=6", "ppo.save_freq=100")
    for attempt in ((), ("--resume",)):
        with monkeypatch.context() as patch:
            patch.setattr(train_ppo, "play", signal_in_rollout(signal.SIGTERM, 0 if attempt else 4))
            assert train(tmp_path, *attempt, *knobs, **ADAPTIVE) == 128 + signal.SIGTERM
        manifest = json.loads((tmp_path / "run" / "checkpoint-000004" / "manifest.json").read_text())
        assert manifest["score"] is not None


def test_an_end_that_was_cut_short_is_made_again_though_there_was_an_earlier_one(tmp_path, monkeypatch):
    assert train(tmp_path, "--set", "ppo.num_train_steps=1") == 0
    more = ("--resume", "--set", "ppo.num_train_steps=2")
    with monkeypatch.context() as patch:
        patch.setattr(train_ppo, "evaluate", signal_in_evaluation(signal.SIGTERM, 0))
        assert train(tmp_path, *more) == 128 + signal.SIGTERM
    assert summary(tmp_path)["steps"] == 1
    assert train(tmp_path, *more) == 0
    assert summary(tmp_path)["steps"] == 2


LATE = [OSError(28, "No space left on device"), pytest.param(RuntimeError("engine\nlost"), marks=pytest.mark.slow)]


@pytest.mark.parametrize("late", LATE)
def test_a_late_failure_costs_no_result(undisturbed, tmp_path, monkeypatch, capsys, late):
    """Games are recorded for people to look at. A resume tries again, and is then the undisturbed run."""

    def record(*args):
        raise late

    with monkeypatch.context() as patch:
        patch.setattr(train_ppo, "record", record)
        assert train(tmp_path, **ADAPTIVE) == 0
    told = capsys.readouterr()
    assert f"nothing is shown of it: {type(late).__name__}: {' '.join(str(late).split())}" in told.out
    assert "mean share" in told.out
    assert_same_run(tmp_path, undisturbed)
    assert (tmp_path / "run" / "final" / "adapter_model.safetensors").exists()
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert (tmp_path / "run" / "episodes.jsonl").read_bytes() == (undisturbed / "run" / "episodes.jsonl").read_bytes()


@pytest.mark.parametrize("rate", ["1e30", pytest.param("1e20", marks=pytest.mark.slow)])
def test_a_rate_that_ruins_the_weights_leaves_the_last_checkpoint_that_plays(tmp_path, capsys, rate):
    assert train(tmp_path, "--set", f"ppo.learning_rate={rate}") == 1
    told = capsys.readouterr().err
    assert "Traceback" not in told
    line = told.splitlines()[-1]
    assert line.startswith("training failed: after step ")
    assert ": the weights are ruined: what the model computes for a prompt is not finite; checkpoint: " in line
    assert f"{tmp_path / 'run' / 'checkpoint-000000'} " in line
    assert train(tmp_path, "--resume") == 0


def ruin(checkpoint, value):
    """Put a value into every adapter tensor of a checkpoint."""
    file = checkpoint / "adapter_model.safetensors"
    save_file({k: torch.full_like(t, value) for k, t in load_file(file).items()}, file, metadata={"format": "pt"})
    seal_again(file)


@pytest.mark.parametrize("value", [1e30, pytest.param(torch.nan, marks=pytest.mark.slow)])
def test_a_resume_goes_on_from_the_last_checkpoint_that_plays(undisturbed, tmp_path, capsys, value):
    copy_of(undisturbed / "run", tmp_path, 5)
    checkpoints = [tmp_path / "run" / f"checkpoint-{step:06d}" for step in range(1, 6)]
    for ruined in checkpoints[3:]:
        ruin(ruined, value)
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert capsys.readouterr().err.count(" is skipped: the weights are ruined: ") == 2
    assert_same_run(tmp_path, undisturbed)


def test_a_run_whose_checkpoints_are_all_ruined_is_told_in_one_line(undisturbed, tmp_path, capsys):
    copy_of(undisturbed / "run", tmp_path, 1)
    ruin(tmp_path / "run" / "checkpoint-000001", 1e30)
    assert train(tmp_path, "--resume", **ADAPTIVE) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"training failed: {tmp_path / 'run' / 'checkpoint-000001'}: the weights are ruined: ")


def test_games_that_do_not_fit_are_counted_and_the_run_goes_on(tmp_path):
    sets = ["ppo.max_seq_length=17", "env.history_turns=all", "ppo.num_train_steps=2"]
    assert train(tmp_path, *(word for value in sets for word in ("--set", value))) == 0
    assert all(0 < row["truncated"] < row["games"] for row in rows(tmp_path))


class BrokenWandb:
    """Cannot be reached: at the start, or only once the run is on its way."""

    Settings = SimpleNamespace

    def __init__(self, fails_at):
        self.fails_at, self.calls = fails_at, []

    def init(self, **options):
        self.called("init")
        return SimpleNamespace(log=lambda row, step: self.called("log"), finish=lambda exit_code: self.called("finish"))

    def called(self, name):
        self.calls.append(name)
        if name == self.fails_at:
            raise ConnectionError("api.wandb.ai is unreachable")


@pytest.mark.parametrize(
    ("fails_at", "calls"), [pytest.param("init", ["init"], marks=pytest.mark.slow), ("log", ["init", "log"])]
)
def test_training_does_not_need_wandb(undisturbed, tmp_path, monkeypatch, capsys, fails_at, calls):
    broken = BrokenWandb(fails_at)
    monkeypatch.setitem(sys.modules, "wandb", broken)
    monkeypatch.setenv("WANDB_API_KEY", "canary-0123456789")
    assert train(tmp_path, run={"logger": "wandb", "keep_last": 20}, **ADAPTIVE) == 0
    assert broken.calls == calls
    assert "wandb is off from here: ConnectionError" in capsys.readouterr().err
    assert_same_run(tmp_path, undisturbed)


# ------------------------------------------------------------------------------------------------ real processes

KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
import train_ppo
{before}
real, updates = train_ppo.ppo_update, iter(range(10**6))

def update(*args):
    stats = real(*args)
    if next(updates) == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    return stats

train_ppo.ppo_update = update
sys.exit(train_ppo.main(sys.argv[1:]))
"""


def process(program, *args):
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.run([sys.executable, *program, *args], env=env, cwd=ROOT, capture_output=True, text=True)


def test_a_killed_run_resumed_is_the_undisturbed_one(undisturbed, tmp_path):
    """SIGKILL in the update of step 5, two steps after the last checkpoint; metrics of step 4 are written again."""
    config = micro_file(tmp_path, **ADAPTIVE)
    args = ["--config", config, "--output-dir", str(tmp_path / "run"), "--set", "ppo.save_freq=3"]
    killed = process(["-c", KILLED.format(root=str(ROOT), at=4, before=FEW_TEXTS)], *args)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(rows(tmp_path)) == 4
    assert train(tmp_path, "--resume", "--set", "ppo.save_freq=3", **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.slow
def test_forty_steps_of_the_tiny_preset_killed_after_step_25(tmp_path):
    assert process(["scripts/make_tiny_model.py", "models/tiny"]).returncode == 0
    args = ["--config", "config/presets/tiny.json", "--set", "ppo.num_train_steps=40", "--set", "ppo.save_freq=5"]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    out = {name: ["--output-dir", str(tmp_path / name / "run")] for name in ("whole", "killed")}
    whole = process(["train_ppo.py"], *args, *out["whole"])
    assert whole.returncode == 0, whole.stderr
    killed = process(["-c", KILLED.format(root=str(ROOT), at=26, before="")], *args, *out["killed"])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = process(["train_ppo.py"], *args, *out["killed"], "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert final_bytes(tmp_path / "killed", 40) == final_bytes(tmp_path / "whole", 40)


def test_every_deliberate_fault_still_has_its_place_in_the_code():
    assert mutants.not_applicable() == []


@pytest.mark.slow
def test_every_deliberate_fault_is_noticed():
    done = process(["tests/tools/mutants.py"])
    assert done.returncode == 0, done.stdout + done.stderr
