"""The program from its command line: what a run leaves behind, and that a resumed run is the undisturbed one."""

import json
import os
import re
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saving import seal_again
from tiny import base_model, micro_config, micro_file
from tiny_runs import (
    ADAPTIVE,
    CLIMB,
    ROOT,
    STEPS,
    VOLATILE,
    Drawing,
    assert_same_run,
    copy_of,
    final_bytes,
    program,
    rows,
    summary,
    train,
    undisturbed_run,
)  # fmt: skip
from transformers import AutoTokenizer

import env_wrapper
import train_ppo
import utils
from config.reader import ConfigError, config_dict
from curriculum import EVAL_SEEDS, PAST_SIZE, TRAIN_SEEDS, Curriculum, CurriculumConfig, Stage
from env_wrapper import Task
from envs.types import InterruptedRolloutError
from evaluation import english
from evaluation import measure as evaluation
from evaluation.players import find_adapter
from scripts.make_tiny_model import make_model
from training import about, console, preflight, state
from training.config import SECTIONS, PPOConfig, parse_args, past_every, read_config
from training.folder import CONTINUES, find_checkpoint
from training.process import StopSignal, TrainingError, lock_run
from utils import Checkpoint, CheckpointError, uniform, verify_checkpoint


@pytest.fixture
def drawing(monkeypatch):
    stand_in = Drawing()
    monkeypatch.setattr(train_ppo, "subprocess", stand_in)
    return stand_in


@pytest.fixture
def undisturbed():
    return undisturbed_run()


# ------------------------------------------------------------------------------------------------ a run's files


def test_a_run_leaves_a_row_a_step_a_summary_and_an_adapter(undisturbed):
    run = undisturbed / "run"
    assert [row["step"] for row in rows(undisturbed)] == list(range(1, STEPS + 1))
    expected = {
        "step", "stage", "games", "score_mean", "success_rate", "truncated", "forfeited", "failed", "retries",
        "opponents", "decisions", "reward_mean", "kl_ref", "kl_average", "explained_variance", "skipped", "grad_norm",
        "updates", "epochs", "update_kl",
        "legal_mass", "ratio_max", "policy_loss", "value_loss", "entropy", "approx_kl",
        "clip_fraction", "kl_coef", "learning_rate", "buffer_size", "window_success", "gate_success",
        "logprob_gap_mean", "logprob_gap_max", "mutual_information", "rehearsal_kl",
        "state_loss",
    }  # fmt: skip
    for row in rows(undisturbed):
        extra = {key for key in row if key not in expected and not key.startswith(("score/", "eval/"))}
        assert expected <= row.keys()
        assert extra <= {"stage_change", "stage_reason"}
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first.keys() >= VOLATILE
    explained = set(re.findall(r"`([a-z_]+/?)", (ROOT / "docs" / "metrics.md").read_text()))
    for key in {*first, "stage_change", "stage_reason"}:
        assert re.match(r"[a-z_]+/?", key)[0] in explained
    assert rows(undisturbed)[3]["eval/leduc_poker"] is not None
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "value_head.safetensors"):
        assert (run / "final" / name).exists()
        assert (run / f"checkpoint-{STEPS:06d}" / name).exists()


def test_the_summary_has_values_before_and_after_with_interval_ceiling_and_share(undisturbed):
    closing = summary(undisturbed)
    assert closing["games"].keys() == {"kuhn_poker", "leduc_poker"}
    for game in closing["games"].values():
        low, high = game["interval"]
        assert low <= game["after"] <= high
        assert game["share"] == pytest.approx(
            (game["exact_after"] - game["random"]) / (game["ceiling"] - game["random"])
        )
    shares = [game["share"] for game in closing["games"].values()]
    assert closing["mean_share_of_ceiling"] == pytest.approx(sum(shares) / 2)
    assert (closing["steps"], closing["seed"], closing["checkpoint"]) == (STEPS, 0, f"checkpoint-{STEPS:06d}")


def test_what_plays_itself_is_measured_by_what_its_best_answer_would_gain(undisturbed, tmp_path):
    for game in summary(undisturbed)["games"].values():
        assert 0 < game["nash_conv"] != game["nash_conv_before"] > 0
    assert train(tmp_path, "--set", "ppo.num_train_steps=1", "ppo.eval_exact=auto") == 0
    assert {game["nash_conv"] for game in summary(tmp_path)["games"].values()} == {None}


def test_a_run_says_what_it_is_and_keeps_its_start_and_its_time(tmp_path, capsys):
    assert train(tmp_path, "--set", "ppo.num_train_steps=1") == 0
    head, place, *shown = capsys.readouterr().out.splitlines()
    assert shown[shown.index("What remains is for the report.") + 1].startswith("curves: ")  # seconds or minutes later
    assert head.endswith(" plays kuhn_poker, leduc_poker against random")
    assert re.fullmatch(r"\S+/run · seed 0 · 1 steps of 16 games · commit \S+ · .*CPU cores, \d+ GiB", place)
    path = tmp_path / "run" / "about.json"
    first = json.loads(path.read_text())
    assert first["games"] == ["kuhn_poker", "leduc_poker"]
    assert first["versions"]["torch"]
    path.write_text(json.dumps(first | {"started": "2020-01-01T00:00:00+00:00", "seconds": 1000.0}))
    assert train_ppo.main(["--resume", str(tmp_path / "run"), "--set", "ppo.num_train_steps=2"]) == 0
    again = json.loads(path.read_text())
    assert (again["started"], again["steps"]) == ("2020-01-01T00:00:00+00:00", 2)
    assert 1000 < again["seconds"] < 1000 + 600
    (other := tmp_path / "other").mkdir()
    shutil.copy(path, other)  # left by another run, which had not come to a checkpoint
    assert train_ppo.main(["--resume", str(tmp_path / "run"), "--output-dir", str(other)]) == 0
    begun = json.loads((other / "about.json").read_text())
    assert begun["started"] > again["started"]
    assert begun["seconds"] < 600


def test_the_commit_is_not_that_of_a_repository_around_this_one(monkeypatch):
    monkeypatch.setattr(about, "ROOT", ROOT / "training")
    assert about.commit() == "unknown"


def test_a_run_that_is_started_through_a_link_is_drawn(tmp_path, monkeypatch, drawing):
    (tmp_path / "link.py").symlink_to(train_ppo.__file__)
    monkeypatch.setattr(train_ppo, "__file__", str(tmp_path / "link.py"))
    assert train(tmp_path, "--set", "ppo.num_train_steps=1") == 0
    [[_, script, *_]] = drawing.commands
    assert os.path.isfile(script)


def test_a_change_of_stage_is_in_its_row_and_announced(tmp_path, capsys):
    assert train(tmp_path, "--set", "ppo.num_train_steps=4", curriculum=CLIMB) == 0
    changes = [(row["stage"], row.get("stage_change")) for row in rows(tmp_path)]
    assert changes == [("low", None), ("low", "high"), ("high", None), ("high", None)]
    *rates, second, third, fourth = [(row["gate_success"], row["window_success"]) for row in rows(tmp_path)]
    assert second == third == fourth == (None, None)  # no games count in the second stage
    assert all(gate <= window for gate, window in rates)
    assert any(gate < window for gate, window in rates)  # of the game won least, and of all
    reason = rows(tmp_path)[1]["stage_reason"]
    shown = capsys.readouterr().out
    assert shown.index("Stage 1/2, low: kuhn_poker, leduc_poker against random\n") < shown.index("Step 1/4")
    assert f"Stage 2/2, high: leduc_poker against random, self, past (low is passed: {reason})" in shown
    assert reason.startswith("success of the game won least 0.")
    assert reason.endswith(" games")


def test_curves_are_drawn_of_the_finished_run_and_the_time_it_took(tmp_path, drawing, monkeypatch, capsys):
    def run(*command, **options):
        assert json.loads((tmp_path / "run" / "about.json").read_text())["seconds"] > 0
        return drawn(*command, **options)

    drawn = drawing.run
    monkeypatch.setattr(drawing, "run", run)
    assert train(tmp_path, "--set", "ppo.num_train_steps=1") == 0
    [command] = drawing.commands
    assert [*map(str, command[1:])] == [str(ROOT / "scripts" / "visualize.py"), f"--run={tmp_path / 'run'}"]
    shown = capsys.readouterr().out
    assert "mean share of the best-response ceiling" in shown
    assert str(tmp_path / "run" / "checkpoint-000001") in shown
    again = f"python scripts/visualize.py --run {tmp_path / 'run'}"
    assert again not in shown
    assert train(tmp_path, "--resume", "--set", "ppo.num_train_steps=1") == 0  # killed before the curves were drawn
    assert f"; {again} draws it;" in capsys.readouterr().out
    monkeypatch.setattr(drawing, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr="error: a full disk"))
    assert train(tmp_path, "--resume", "--set", "ppo.num_train_steps=2") == 0
    assert f"no curves were drawn: error: a full disk; {again}\n" in capsys.readouterr().out


def test_evaluation_never_sees_a_seed_or_a_random_stream_of_training(tmp_path, monkeypatch):
    seen: dict[str, list[Task]] = {"train": [], "eval": []}

    def recording(kind):
        def play(config, player, tasks):
            seen[kind] += tasks
            return env_wrapper.play(config, player, tasks)

        return play

    monkeypatch.setattr(train_ppo, "play", recording("train"))
    monkeypatch.setattr(evaluation, "play", recording("eval"))
    assert train(tmp_path, "--set", "ppo.num_train_steps=3", **ADAPTIVE) == 0
    assert len(seen["train"]) == 3 * 16
    assert all(task.seed in TRAIN_SEEDS for task in seen["train"])
    assert all(task.seed in EVAL_SEEDS for task in seen["eval"])
    assert min(task.index for task in seen["train"]) == 0
    assert len([task for task in seen["eval"] if task.index < 0]) == 2 * 2 * 4  # before and after, two games


# ------------------------------------------------------------------------------------------------ the beginning


def test_the_first_evaluation_is_kept(tmp_path, monkeypatch):
    """A run that dies in its first step does not evaluate again, and ends as if it had not died."""
    two, calls, real = ("--set", "ppo.num_train_steps=2"), [], train_ppo.evaluate

    def dies(self, stop):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_ppo.Trainer, "step", dies)
        assert train(tmp_path, *two) == 130
    with monkeypatch.context() as patch:
        patch.setattr(train_ppo, "evaluate", lambda *args, **options: calls.append(1) or real(*args, **options))
        assert train(tmp_path, "--resume", *two) == 0
    assert len(calls) == 1  # the one after the last step
    (tmp_path / "other").mkdir()
    assert train(tmp_path / "other", *two) == 0
    assert summary(tmp_path) == summary(tmp_path / "other")


@pytest.mark.slow
def test_the_time_left_is_that_of_steps_and_of_evaluations_to_come(tmp_path, monkeypatch):
    real, left, took = train_ppo.evaluate, [], []

    def slow(*args, **options):
        options["progress"]("slowly", 0, 1)
        time.sleep(2)
        options["progress"]("slowly", 1, 1)
        return real(*args, **options)

    monkeypatch.setattr(train_ppo, "evaluate", slow)
    monkeypatch.setattr(console, "progress_line", lambda row, *_: took.append(row["time_total"]) or "a step")
    monkeypatch.setattr(console, "duration", lambda seconds: left.append(seconds) or "")
    assert train(tmp_path, "--set", "ppo.num_train_steps=3", "--set", "ppo.eval_freq=2") == 0
    of_steps = [seconds for seconds in left if seconds > 1]  # others are those of an evaluation's own progress
    for seconds, steps, evaluations in zip(of_steps, (2 * took[0], took[1], 0), (2, 1, 1), strict=True):
        assert seconds == pytest.approx(steps + evaluations * 2, abs=1.5)


@pytest.mark.parametrize(("seconds", "saved"), [(15 * 60, {0, 3}), (0, {0, 1, 2, 3})])
def test_checkpoints_are_written_by_the_clock_too(tmp_path, monkeypatch, seconds, saved):
    assert state.SAVE_SECONDS == 15 * 60
    monkeypatch.setattr(state, "SAVE_SECONDS", seconds)
    assert train(tmp_path, "--set", "ppo.num_train_steps=3", "--set", "ppo.save_freq=100") == 0
    assert {int(path.name[-6:]) for path in (tmp_path / "run").glob("checkpoint-*")} == saved


def test_what_learns_to_be_legal_unconstrained_is_measured_so(tmp_path, monkeypatch, capsys):
    """The free games are those of the evaluation; a model that always answers "1" is legal in all of them."""
    options = {"num_train_steps": 1, "legal_mass_coef": 0.1, "max_new_tokens": 2}
    assert train(tmp_path, ppo=options) == 0
    shown = capsys.readouterr().out
    assert "free before" in shown
    for game in summary(tmp_path)["games"].values():
        for found in (game["free_play_before"], game["free_play"]):
            assert -1 <= found["value"] < game["before"]  # a random model forfeits
            assert 0 <= found["legal_rate"] < 0.5
    real = train_ppo.Policy._choose_free

    def says_nothing_but_1(self, turns, hidden_ND):
        real(self, turns, hidden_ND)
        for turn in turns:
            turn.ids[-1] = self.chat.answer_ids["1"] if turn.written == 1 else self.chat.end_id

    monkeypatch.setattr(train_ppo.Policy, "_choose_free", says_nothing_but_1)
    (tmp_path / "legal").mkdir()
    assert train(tmp_path / "legal", ppo=options) == 0
    assert {game["free_play"]["legal_rate"] for game in summary(tmp_path / "legal")["games"].values()} == {1.0}
    monkeypatch.setattr("evaluation.measure.legal_rate", lambda episodes: None)  # as where no game asked for any
    (tmp_path / "unasked").mkdir()
    for steps in (1, 2):  # a checkpoint may hold it
        more = ["--resume"] * (steps > 1)
        assert train(tmp_path / "unasked", *more, ppo=options | {"num_train_steps": steps}) == 0
        assert ", no answers" in capsys.readouterr().out
        [told] = {game["free_play"]["legal_rate"] for game in summary(tmp_path / "unasked")["games"].values()}
        assert told is None  # 0 % were told


# ------------------------------------------------------------------------------------------------ the same again


def test_the_seed_decides_every_byte(undisturbed, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    again.mkdir()
    other.mkdir()
    assert train(again, **ADAPTIVE) == 0
    assert_same_run(again, undisturbed)
    assert train(other, "--seed", "1", "--set", "ppo.num_train_steps=1", **ADAPTIVE) == 0
    assert all(a != b for a, b in zip(final_bytes(other, 1), final_bytes(undisturbed, 1), strict=True))
    assert rows(other) != rows(undisturbed)[:1]


@pytest.mark.parametrize("step", [pytest.param(s, marks=[pytest.mark.slow] * (s != 4)) for s in range(1, STEPS)])
def test_resuming_after_any_step_is_exact(undisturbed, tmp_path, step):
    copy_of(undisturbed / "run", tmp_path, step)
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)


def wider_model(folder):
    """Whose sums depend on how many rows are multiplied at once; those of 32 hidden units do not."""
    tokenizer = AutoTokenizer.from_pretrained(base_model())
    make_model(len(tokenizer), 64, 2, 0.15, 0).save_pretrained(folder / "wider")
    tokenizer.save_pretrained(folder / "wider")
    return folder / "wider"


@pytest.mark.slow
def test_what_an_evaluation_had_read_does_not_reach_the_next_step(tmp_path):
    """Full prompts have system messages long enough to be kept; here each step meets one or two of four games."""
    options = {
        "model": {"model_name": str(wider_model(tmp_path))},
        "ppo": {"batch_size": 2, "mini_batch_size": 2, "num_train_steps": 3, "eval_freq": 1, "eval_games": 2,
                "max_seq_length": 2048, "eval_exact": "never"},
        "env": {"prompt": "full"},
        "curriculum": {"stages": [{"name": "all", "games": ["kuhn_poker", "leduc_poker", "tic_tac_toe", "hex_small"]}]},
    }  # fmt: skip
    whole, resumed, without = (tmp_path / name for name in ("whole", "resumed", "without"))
    for folder in (whole, resumed, without):
        folder.mkdir()
    assert train(whole, **options) == 0
    copy_of(whole / "run", resumed, 1)
    assert train(resumed, "--resume", **options) == 0
    assert_same_run(resumed, whole)
    assert train(without, **options | {"ppo": options["ppo"] | {"eval_freq": 0}}) == 0
    assert final_bytes(without) == final_bytes(whole)


def test_texts_that_a_resumed_run_writes_again_do_not_reach_its_games(tmp_path, monkeypatch):
    """All begin as every game does, and what a rollout makes of a game's tokens is held for a step."""
    model = wider_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    first = (tokenizer.convert_tokens_to_ids("<|im_start|>") + 0.5) / len(tokenizer)
    monkeypatch.setattr("policy.rehearsal.uniform", lambda *key: uniform(*key) if key[-1] else first)
    ppo = {"context_grad": False, "batch_size": 4, "mini_batch_size": 2, "num_train_steps": 3, "rehearsal_coef": 0.5}
    options = {"model": {"model_name": str(model)}, "ppo": ppo}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        folder.mkdir()
    assert train(whole, **options) == 0
    copy_of(whole / "run", resumed, 1)
    assert train(resumed, "--resume", **options) == 0
    assert_same_run(resumed, whole)


def test_what_a_rollout_had_read_takes_no_memory_from_the_update(tmp_path, monkeypatch):
    real, slots, played = train_ppo.collate, [], []
    play = train_ppo.play

    def playing(config, player, tasks):
        episodes = play(config, player, tasks)
        played.append(len(player.policy.reader.store.layers[0][0]))
        return episodes

    def collate(episodes, policy, *rest):
        slots.append(len(policy.reader.store.layers[0][0]))
        return real(episodes, policy, *rest)

    monkeypatch.setattr(train_ppo, "play", playing)
    monkeypatch.setattr(train_ppo, "collate", collate)
    assert train(tmp_path, "--set", "ppo.num_train_steps=2", env={"history_turns": "all"}) == 0
    assert min(played) > 0
    assert slots == [0, 0]


def test_resuming_from_an_earlier_checkpoint_sets_the_later_ones_aside(undisturbed, tmp_path, capsys):
    copy_of(undisturbed / "run", tmp_path, 4)
    assert train(tmp_path, "--resume", str(tmp_path / "run" / "checkpoint-000002"), **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)
    aside = tmp_path / "run" / "abandoned-000004"
    assert train_ppo.main(["--resume", str(aside), "--dry-run"]) == 2
    assert f"--resume: {aside} was set aside, and the run went on without it" in capsys.readouterr().err
    words = "--resume", str(aside), "--output-dir", str(tmp_path / "other")
    assert read_config(parse_args(words, "")).run.output_dir == str(tmp_path / "other")


def test_resuming_a_finished_run_does_nothing(undisturbed, capsys):
    def state():
        files = [path for path in (undisturbed / "run").rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files}

    before = state()
    assert train(undisturbed, "--resume", **ADAPTIVE) == 0
    assert state() == before
    assert "is finished: see" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------- what is refused


def test_a_folder_with_checkpoints_is_not_overwritten(undisturbed, capsys):
    assert train(undisturbed, **ADAPTIVE) == 2
    assert "--resume goes on" in capsys.readouterr().err


def test_a_folder_of_the_users_own_is_not_replaced(tmp_path, capsys):
    mine = tmp_path / "run" / "final" / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("all of it")
    assert train(tmp_path, **ADAPTIVE) == 2
    assert f"{mine.parent} is there and is no adapter" in capsys.readouterr().err
    assert mine.read_text() == "all of it"


def test_another_runs_checkpoint_does_not_overwrite_a_run(undisturbed, tmp_path, capsys):
    copy_of(undisturbed / "run", tmp_path, 4)
    other, source = tmp_path / "run", undisturbed / "run" / "checkpoint-000002"
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    assert train(tmp_path, "--resume", str(source), **ADAPTIVE) == 2
    assert f"{other} holds checkpoints; --resume {other} goes on" in capsys.readouterr().err
    assert all(path.read_bytes() == data for path, data in before.items())


@pytest.mark.parametrize("link", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_checkpoint_named_in_another_way_belongs_to_its_run(undisturbed, tmp_path, monkeypatch, link):
    """As ``--resume .``, and by a link that lies elsewhere."""
    copy_of(undisturbed / "run", tmp_path, 4)
    checkpoint = tmp_path / "run" / "checkpoint-000004"
    if link:
        (tmp_path / "latest").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path if link else checkpoint)
    assert program("--resume", "latest" if link else ".") == 0
    assert verify_checkpoint(checkpoint) == []
    assert_same_run(tmp_path, undisturbed)


def test_a_checkpoint_on_another_disk_belongs_to_the_run_it_is_linked_from(undisturbed, tmp_path):
    copy_of(undisturbed / "run", tmp_path, 4)
    (tmp_path / "disk").mkdir()
    checkpoint = tmp_path / "run" / "checkpoint-000004"
    checkpoint.rename(tmp_path / "disk" / checkpoint.name)
    checkpoint.symlink_to(tmp_path / "disk" / checkpoint.name)
    config = config_dict(vars(read_config(parse_args(["--resume", str(tmp_path / "run")], None))))
    assert find_checkpoint(tmp_path / "run", str(checkpoint), config, False, look_only=True) == checkpoint


def test_a_run_in_use_is_refused(tmp_path, capsys):
    with lock_run(tmp_path / "run"):
        assert train(tmp_path) == 2
    assert f"in use by another run (process {os.getpid()})" in capsys.readouterr().err


@pytest.mark.parametrize(("what", "when"), [("deleted", "evaluate"), ("moved", "step"), ("replaced", "save_players")])
def test_a_run_whose_folder_is_moved_writes_nothing_more(tmp_path, monkeypatch, capsys, what, when):
    run, real = tmp_path / "run", getattr(train_ppo.Trainer, when)

    def meanwhile(self, *args):
        found = real(self, *args) if when != "save_players" else None
        shutil.rmtree(run) if what == "deleted" else run.rename(tmp_path / "moved")
        if what == "replaced":
            lock_run(run).close()
        return found or real(self, *args)

    monkeypatch.setattr(train_ppo.Trainer, when, meanwhile)
    assert train(tmp_path, "--set", "ppo.num_train_steps=1", "ppo.eval_games=2") == 1
    assert f"training failed: {run}: the run's folder was moved, deleted or replaced" in capsys.readouterr().err
    assert [path.name for path in run.rglob("*")] == ([".lock"] if what == "replaced" else [])


def test_what_a_run_still_saved_when_it_was_resumed_is_not_set_aside(undisturbed, tmp_path, monkeypatch, capsys):
    """The checkpoint is chosen before the folder is taken, since the configuration lies in it."""
    copy_of(undisturbed / "run", tmp_path, 2)
    check = preflight.check

    def while_it_is_checked(*args, **kwargs):
        if not (tmp_path / "run" / "checkpoint-000004").exists():
            shutil.copy(undisturbed / "run" / "metrics.jsonl", tmp_path / "run" / "metrics.jsonl")
            shutil.copytree(undisturbed / "run" / "checkpoint-000004", tmp_path / "run" / "checkpoint-000004")
        return check(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(preflight, "check", while_it_is_checked)
        assert train(tmp_path, "--resume", **ADAPTIVE) == 2
    assert "another run has written to it meanwhile; the same command goes on" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("abandoned-*"))
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.parametrize("older", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_checkpoint_killed_between_two_renames_is_gone_on_from(undisturbed, tmp_path, older):
    copy_of(undisturbed / "run", tmp_path, 4)
    newest = tmp_path / "run" / "checkpoint-000004"
    newest.rename(newest.with_name(".old-checkpoint-000004"))
    if not older:
        for path in (tmp_path / "run").glob("checkpoint-*"):
            shutil.rmtree(path)
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)
    assert not list((tmp_path / "run").glob("abandoned-*"))


@pytest.mark.parametrize(("what", "was"), [
    ("threads", 999), pytest.param("processes", 2, marks=pytest.mark.slow),
    pytest.param("torch", "1.0", marks=pytest.mark.slow), pytest.param("device", "H100", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_makes_a_resume_inexact_is_told(undisturbed, tmp_path, capsys, what, was):
    copy_of(undisturbed / "run", tmp_path, 4)
    checkpoint = tmp_path / "run" / "checkpoint-000004"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps(state | {what: was}))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").unlink()
    utils.write_manifest(checkpoint, 4, manifest["base"], score=manifest["score"], scale=manifest["scale"])
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert f"saved with {what} {was}, now " in capsys.readouterr().err


def test_a_run_that_is_killed_before_its_english_was_read_is_not_finished(tmp_path, monkeypatch, capsys):
    once = ("--set", "ppo.num_train_steps=1")
    with monkeypatch.context() as patch:
        patch.setattr(english, "measure", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            train(tmp_path, *once)
    assert summary(tmp_path)["steps"] == 1
    monkeypatch.setattr(english, "measure", lambda *_: {"perplexity": 1.0})
    monkeypatch.setattr(english, "line", lambda *_: "told")
    assert train(tmp_path, "--resume", *once) == 0
    assert summary(tmp_path)["english"] == {"perplexity": 1.0}
    assert train(tmp_path, "--resume", *once) == 0
    assert "is finished" in capsys.readouterr().out


def test_a_changed_knob_is_refused_with_the_difference_unless_forced(undisturbed, tmp_path, capsys):
    copy_of(undisturbed / "run", tmp_path, 4)
    assert train(tmp_path, "--resume", "--set", "ppo.gamma=0.5", **ADAPTIVE) == 2
    assert "the configuration has changed since checkpoint-000004: ppo.gamma: 0.99 -> 0.5" in capsys.readouterr().err
    assert len(rows(undisturbed)) == STEPS
    assert train(tmp_path, "--resume", "--set", "run.keep_last=1", "--set", "ppo.save_freq=5", **ADAPTIVE) == 0
    assert_same_run(tmp_path, undisturbed)


def test_a_forced_change_goes_on_with_the_new_value(undisturbed, tmp_path):
    copy_of(undisturbed / "run", tmp_path, 4)
    assert train(tmp_path, "--resume", "--force-config", "--set", "ppo.learning_rate=1e-4", **ADAPTIVE) == 0
    assert rows(tmp_path)[:4] == rows(undisturbed)[:4]
    assert rows(tmp_path)[4]["learning_rate"] < 1e-4 < rows(undisturbed)[4]["learning_rate"]


def test_the_rate_falls_from_the_first_step_to_the_last(tmp_path):
    """Linearly, and reaches its end in the last step: one step later would be below it."""
    assert train(tmp_path, ppo={"learning_rate": 1e-3, "lr_final": 0.2, "num_train_steps": 3}) == 0
    assert [row["learning_rate"] for row in rows(tmp_path)] == pytest.approx([1e-3, 6e-4, 2e-4])


def test_past_selves_are_kept_now_and_then_and_those_that_made_room_take_no_memory():
    kept, forgotten = list[str](), list[str]()
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(ppo=PPOConfig(num_train_steps=400), curriculum=SimpleNamespace(opponents={"past"})),
        policy=SimpleNamespace(keep_past=kept.append, forget_past=forgotten.append),
        curriculum=Curriculum(CurriculumConfig([Stage("one", ["hex"], {"past": 1.0, "random": 1.0})]), 0),
    )
    steps = 20 * (PAST_SIZE + 2)
    for step in range(1, steps + 1):
        trainer.state = SimpleNamespace(step=step)
        state.Checkpointed.keep_past(trainer)
    assert kept == [f"step-{step:06d}" for step in range(20, steps + 1, 20)]
    assert len(forgotten) == 2
    assert {*trainer.curriculum.past} == {*kept} - {*forgotten}


def test_a_dry_run_refuses_what_a_forced_resume_cannot_take(tmp_path, capsys):
    train_ppo.Trainer(micro_config(tmp_path), tmp_path / "run").save()
    forced = ["--resume", "--force-config", "--set"]
    other = 'curriculum.stages=[{"name": "other", "games": ["kuhn_poker#0"]}]'
    refused = {"ppo.state_coef=0.1": "ppo.state_coef: ", "lora.r=8": "lora.r = 8: ", other: "curriculum.stages: "}
    for change, told in refused.items():
        assert train(tmp_path, *forced, change) == 2
        capsys.readouterr()
        assert train(tmp_path, *forced, change, "--dry-run") == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {told}")
    assert train(tmp_path, *forced, "lora.lora_alpha=16", "--dry-run") == 0


def test_a_dry_run_refuses_games_that_the_state_head_does_not_know(undisturbed, tmp_path, capsys):
    copy_of(undisturbed / "run", tmp_path, 4)
    fewer = ["--resume", "--force-config", "--dry-run", "--set", "env.allowed_game_indices=kuhn_poker"]
    assert train(tmp_path, *fewer, **ADAPTIVE) == 2
    assert "learnt positions of other games; expected the same games, or 0" in capsys.readouterr().err
    assert train(tmp_path, *fewer, "ppo.state_coef=0", **ADAPTIVE) == 0


@pytest.mark.parametrize(("knob", "scale"), [
    ("ppo.learning_rate=1e-4", 1.0), ("ppo.alarms=off", 1.0), ("ppo.alarms=act", 0.25), ("ppo.save_freq=2", 0.25),
])  # fmt: skip
def test_a_learning_rate_that_is_given_is_what_is_used(tmp_path, knob, scale):
    """What alarms made of the old one was said of that one."""
    config = micro_config(tmp_path, run={"output_dir": str(tmp_path / "run")})
    trainer = train_ppo.Trainer(config, tmp_path / "run")
    trainer.state.lr_scale = 0.25
    trainer.save()
    assert loaded(tmp_path, 0, knob).state.lr_scale == scale


@pytest.mark.parametrize(
    ("halved", "knob", "used"), [(1, 8192, 8192), (1, 1024, 1024), (2, 8192, 2048), (2, 4096, 2048)]
)
def test_larger_batches_that_are_given_are_used_where_memory_sufficed(tmp_path, halved, knob, used):
    config = micro_config(tmp_path, run={"output_dir": str(tmp_path / "run")})
    trainer = train_ppo.Trainer(config, tmp_path / "run")
    trainer.policy.tokens_per_batch = 4096 // halved
    trainer.save()
    again = loaded(tmp_path, 0, f"model.tokens_per_batch={knob}")
    assert again.policy.tokens_per_batch == again.state.tokens_per_batch == used


def test_an_average_of_an_earlier_end_is_no_player_of_a_later_one(undisturbed, tmp_path):
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    loaded(tmp_path, STEPS).save_players()
    assert (tmp_path / "run" / "average").exists()
    loaded(tmp_path, STEPS, "ppo.magnet_coef=0").save_players()
    assert not (tmp_path / "run" / "average").exists()
    assert find_adapter(str(tmp_path / "run" / "abandoned-average"))


@pytest.mark.parametrize("knob", ["env.opponent=", "env.allowed_game_indices=[]"])
def test_what_narrowed_the_stages_of_a_checkpoint_cannot_be_given_up_in_silence(tmp_path, knob, capsys):
    key, folder = knob.split("=")[0], str(tmp_path / "run")
    env = {"opponent": "mcts:2x1", "allowed_game_indices": ["kuhn_poker"]}
    read = read_config(parse_args(["--config", micro_file(tmp_path, env=env), "--output-dir", folder], None))
    train_ppo.Trainer(read, tmp_path / "run").save()
    words = ["--resume", folder, "--force-config", "--dry-run", "--set", knob]
    assert train_ppo.main(words) == 2
    assert f"error: {key}: the checkpoint's stages are narrowed to it already: give curriculum.stages" in (
        capsys.readouterr().err
    )
    stages = config_dict({"curriculum": micro_config(tmp_path).curriculum})["curriculum"]["stages"]
    assert train_ppo.main([*words, f"curriculum.stages={json.dumps(stages)}"]) == 0


@pytest.mark.parametrize("flags", [(), ("--force-config",), ("--force-config", "--dry-run")])
def test_an_adapter_of_another_shape_is_told_before_anything_goes_on(undisturbed, tmp_path, capsys, flags):
    """It began with "goes on from ... with lora.r: 4 -> 2", and ended with an error that named neither."""
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    assert train(tmp_path, "--resume", *flags, "--set", "lora.r=2", "ppo.num_train_steps=20", **ADAPTIVE) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: lora.r = 2: .*checkpoint-\d+ was made with \d+; expected the same", line)
    alpha = ["lora.lora_alpha=3", "ppo.num_train_steps=20"]  # which changes no shape
    assert train(tmp_path, "--resume", "--force-config", "--dry-run", "--set", *alpha, **ADAPTIVE) == 0


def test_a_head_that_is_not_wanted_any_more_is_left_behind(undisturbed, tmp_path):
    copy_of(undisturbed / "run", tmp_path, 4)
    assert train(tmp_path, "--resume", "--force-config", "--set", "ppo.state_coef=0", **ADAPTIVE) == 0
    assert len(rows(tmp_path)) == STEPS
    assert "state_loss" in rows(tmp_path)[3]
    assert "state_loss" not in rows(tmp_path)[4]
    assert not list((tmp_path / "run" / f"checkpoint-{STEPS:06d}").glob("state_head*"))


def test_a_past_self_that_its_checkpoint_does_not_hold_is_not_made_up(undisturbed, tmp_path, monkeypatch):
    """It would be a copy of the policy, under another's name."""
    copy_of(undisturbed / "run", tmp_path, STEPS - 1)
    folder = tmp_path / "run" / f"checkpoint-{STEPS - 1:06d}"
    trainer = train_ppo.Trainer(read_config(parse_args(["--resume", str(tmp_path / "run")], None)), tmp_path / "run")
    past = load_file(folder / "past.safetensors")
    [name, *_] = sorted({key.split("/")[0] for key in past if not key.startswith("average/")})
    lost = {key: tensor for key, tensor in past.items() if not key.startswith(f"{name}/")}
    read = Checkpoint.tensors
    monkeypatch.setattr(Checkpoint, "tensors", lambda saved, name: lost if name == "past" else read(saved, name))
    with pytest.raises(CheckpointError, match=f"past.safetensors holds no {name}"):
        trainer.load(folder)


def test_each_step_rehearses_texts_of_its_own_and_none_with_a_weight_of_zero(tmp_path, monkeypatch):
    rehearsed = []

    def update(policy, optimizer, batch, *args):
        rehearsed.append([tuple(text.ids) for text in batch.texts])
        return ppo_update(policy, optimizer, batch, *args)

    ppo_update = train_ppo.ppo_update
    monkeypatch.setattr(train_ppo, "ppo_update", update)
    assert train(tmp_path, "--set", "ppo.num_train_steps=3", ppo={"rehearsal_coef": 0.5}) == 0
    texts = [text for step in rehearsed for text in step]
    assert len(set(texts)) == len(texts) == 6
    rehearsed.clear()
    again = ["--resume", "--force-config", "--set", "ppo.num_train_steps=4", "--set"]
    assert train(tmp_path, *again, "ppo.rehearsal_coef=0", ppo={"rehearsal_coef": 0.5}) == 0
    assert rehearsed == [[]]


def test_a_name_too_long_is_bad_usage(tmp_path, capsys):
    assert train_ppo.main(["--config", "config/presets/tiny.json", "--output-dir", str(tmp_path / ("z" * 300))]) == 2
    assert "error: run.output_dir: [Errno 36] File name too long" in capsys.readouterr().err


@pytest.mark.slow
def test_values_of_other_answers_are_not_put_before_those_of_the_run_that_goes_on(tmp_path):
    assert train(tmp_path, "--set", "ppo.num_train_steps=1", "ppo.eval_games=2") == 0
    longer = ["--set", "ppo.num_train_steps=2", "ppo.eval_games=2"]
    assert train(tmp_path, "--resume", *longer) == 0
    assert utils.read_json(tmp_path / "run" / "summary.json")["games"]["kuhn_poker"]["before"] is not None
    assert train(tmp_path, "--resume", "--force-config", *longer, "ppo.num_train_steps=3", "env.answer_mode=free") == 0
    summary = utils.read_json(tmp_path / "run" / "summary.json")
    assert summary["games"]["kuhn_poker"]["before"] is None
    assert summary["games"]["kuhn_poker"]["after"] is not None


@pytest.mark.slow
def test_a_finished_run_that_goes_on_has_evaluated_what_a_longer_one_has(tmp_path):
    level = ("--set", "ppo.eval_freq=2", "ppo.lr_final=1.0", "ppo.num_train_steps=4")
    folders = (tmp_path / "a", tmp_path / "b")
    for folder, words in zip(folders, ([], ["ppo.num_train_steps=2"]), strict=True):
        folder.mkdir()
        assert train(folder, *level, *words) == 0
    assert train(folders[1], "--resume", *level) == 0
    for folder in folders:
        assert [row["step"] for row in rows(folder) if any("eval/" in key for key in row)] == [2, 4]
        manifest = json.loads((folder / "run/checkpoint-000002/manifest.json").read_text())
        assert manifest["score"] is not None


def test_a_finished_run_is_not_finished_with_other_knobs(tmp_path, capsys):
    once = ("--set", "ppo.num_train_steps=1")
    assert train(tmp_path, *once) == 0
    assert train(tmp_path, "--resume", *once) == 0
    assert "is finished" in capsys.readouterr().out
    assert train(tmp_path, "--resume", *once, "ppo.gamma=0.5") == 2
    assert "the configuration has changed since checkpoint-000001: ppo.gamma" in capsys.readouterr().err
    assert train(tmp_path, "--resume", "--force-config", *once) == 0
    assert "is finished" in capsys.readouterr().out
    assert train(tmp_path, "--resume", "--force-config", *once, "ppo.eval_games=8") == 0
    assert {game["episodes"] for game in summary(tmp_path)["games"].values()} == {8}


def test_an_end_that_is_made_again_and_interrupted_is_no_end(tmp_path, monkeypatch, capsys):
    """The checkpoint has the new knobs by then, and the results are the old ones."""
    once = ("--set", "ppo.num_train_steps=1", "ppo.eval_games=2")
    assert train(tmp_path, *once) == 0

    def interrupted(*args):
        raise InterruptedRolloutError

    def again(*knobs):
        with monkeypatch.context() as context:
            context.setattr(train_ppo.Trainer, "evaluate", interrupted)
            assert train(tmp_path, "--resume", "--force-config", *once, *knobs) == 128
        assert train_ppo.main(["--resume", str(tmp_path / "run")]) == 0
        assert "is finished" not in capsys.readouterr().out

    again("ppo.eval_games=4")
    assert {game["episodes"] for game in summary(tmp_path)["games"].values()} == {4}
    for place in ("policy.model", "training.folder"):  # the games alone have changed
        monkeypatch.setattr(f"{place}.own_digest", lambda: "other")
    again("ppo.eval_games=4")


@pytest.mark.parametrize("base", ["missing", [], "x"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_checkpoint_without_a_base_is_told_in_a_line(undisturbed, tmp_path, capsys, base, dry):
    copy_of(undisturbed / "run", tmp_path, 4)
    file = tmp_path / "run" / "checkpoint-000004" / "manifest.json"
    manifest = {key: value for key, value in utils.read_json(file).items() if key not in ("base", "digest")}
    file.write_text(utils._seal(manifest if base == "missing" else manifest | {"base": base}))
    capsys.readouterr()
    assert train(tmp_path, "--resume", *dry, **ADAPTIVE) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: --resume: {file.parent}: ")


def test_a_resume_tells_that_its_metrics_are_gone(undisturbed, tmp_path, capsys):
    copy_of(undisturbed / "run", tmp_path, 4)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert "metrics.jsonl: there are no rows of 4 steps: [1, 2, 3, 4]" in capsys.readouterr().err


def test_a_finished_run_whose_player_is_gone_gets_it_again(tmp_path):
    once = ("--set", "ppo.num_train_steps=1", "ppo.eval_games=2")
    assert train(tmp_path, *once) == 0
    before = (tmp_path / "run" / "final" / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run" / "final")
    assert train(tmp_path, "--resume", *once) == 0
    assert (tmp_path / "run" / "final" / "adapter_model.safetensors").read_bytes() == before


def test_the_score_that_chooses_the_best_checkpoint_is_the_mean_of_what_the_curve_shows(tmp_path, monkeypatch):
    measured, real = [], train_ppo.evaluate
    monkeypatch.setattr(train_ppo, "evaluate", lambda *args, **how: measured.append(real(*args, **how)) or measured[-1])
    knobs = ("ppo.num_train_steps=4", "ppo.eval_freq=1", "ppo.save_freq=1", "ppo.eval_exact=always", "run.keep_last=2")
    assert train(tmp_path, "--set", *knobs, "ppo.learning_rate=0.02") == 0
    grades = [{r.game: r.grade for r in results} for results in measured[1:]]
    assert [{key[5:]: row[key] for key in row if key.startswith("eval/")} for row in rows(tmp_path)] == grades
    means = [sum(found.values()) / len(found) for found in grades]
    assert len(set(means)) == 4
    kept = {
        path.name: utils.read_json(path / "manifest.json")["score"] for path in (tmp_path / "run").glob("checkpoint-*")
    }
    best = 1 + max(range(4), key=lambda i: means[i])
    assert kept == {f"checkpoint-{step:06d}": pytest.approx(means[step - 1]) for step in {best, 3, 4}}


def test_an_evaluated_step_is_saved_though_no_checkpoint_is_due(tmp_path):
    assert train(tmp_path, "--set", "ppo.num_train_steps=3", "ppo.save_freq=100", "ppo.eval_freq=2") == 0
    scores = [utils.read_json(path / "manifest.json")["score"] for path in utils.checkpoints_in(tmp_path / "run")]
    assert [score is None for score in scores] == [True, False, True], "of steps 3, 2 and 0"


def test_so_is_one_whose_score_cannot_be_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(train_ppo, "mean_grade", lambda *_: None)  # an exact value could not be made, say
    assert train(tmp_path, "--set", "ppo.num_train_steps=3", "ppo.save_freq=100", "ppo.eval_freq=2") == 0
    assert [utils.step_of(path) for path in utils.checkpoints_in(tmp_path / "run")] == [3, 2, 0]


def test_without_evaluations_the_best_checkpoint_is_the_one_furthest_in_the_curriculum(tmp_path):
    """In a stage it is the one that wins most, once it has played enough for that to be no luck."""
    stage = {"games": ["kuhn_poker"], "threshold": 1.0, "min_episodes": 4}
    stages = [stage | {"name": name} for name in ("low", "high")]
    trainer = train_ppo.Trainer(micro_config(tmp_path, curriculum={"stages": stages}), tmp_path / "run")

    def saved(*scores):
        for score in scores:
            trainer.curriculum.update(trainer.curriculum.next(0), score)
        trainer.state.step += 1
        return utils.read_json(trainer.save() / "manifest.json")["score"]

    assert [saved(1.0, 1.0, 1.0), saved(0.0)] == [0, 0.75]
    trainer.curriculum.load_state_dict(trainer.curriculum.state_dict() | {"stage": "high", "episodes": 0})
    assert saved() == 1


def test_a_copied_checkpoint_does_not_make_the_folder_around_it_a_run(undisturbed, tmp_path, capsys):
    """It may be anybody's: its files were replaced, and other backups in it deleted."""
    run, backups = undisturbed / "run", tmp_path / "backups"
    for name in ("best", "checkpoint-000003", "checkpoint-000002"):
        shutil.copytree(run / "checkpoint-000003" if name == "best" else run / name, backups / name)
    (backups / "report.html").write_text("mine")
    for name in ("best", "checkpoint-000003"):
        assert train_ppo.main(["--resume", str(backups / name)]) == 2
        told = (
            f"error: --resume: {backups} is not the folder of a run (it has no about.json), and this one would write "
        )
        assert capsys.readouterr().err.splitlines()[-1].startswith(told)
        config = read_config(parse_args(["--resume", str(backups / name), "--output-dir", str(tmp_path / "on")], None))
        assert config.run.output_dir == str(tmp_path / "on")
    shutil.copytree(run, old := tmp_path / "old")
    (old / "about.json").unlink()  # runs of 0.1.0 have none
    for folder in (run, old):
        config = read_config(parse_args(["--resume", str(folder / "checkpoint-000003")], None))
        assert config.run.output_dir == str(folder)


def test_a_last_step_that_has_passed_is_refused(undisturbed, capsys):
    for words in (["ppo.num_train_steps=2"], ["ppo.num_train_steps=2", "--dry-run"]):
        assert train_ppo.main(["--resume", str(undisturbed / "run" / "checkpoint-000004"), "--set", *words]) == 2
        told = "error: --resume: ppo.num_train_steps = 2: checkpoint-000004 has done 4 already; expected the last step "
        assert capsys.readouterr().err.splitlines()[-1].startswith(told)


def test_what_a_resume_changed_is_kept_by_a_run_that_dies_at_once(undisturbed, tmp_path, monkeypatch, capsys):
    def dies(self, stop):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_ppo.Trainer, "step", dies)
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    score = json.loads((tmp_path / "run" / "checkpoint-000004" / "manifest.json").read_text())["score"]
    for words in (["--set", f"ppo.num_train_steps={STEPS + 1}", "ppo.learning_rate=1e-4"], []):
        assert train_ppo.main(["--resume", str(tmp_path / "run"), *words]) == 130  # the second is not finished either
        ppo = read_config(parse_args(["--resume", str(tmp_path / "run")], None)).ppo
        assert (ppo.num_train_steps, ppo.learning_rate) == (STEPS + 1, 1e-4)
    other = ["--resume", str(tmp_path / "run" / "checkpoint-000004"), "--output-dir", str(tmp_path / "other")]
    capsys.readouterr()
    assert train_ppo.main(other) == 130
    place = f"{other[1]} in {tmp_path / 'other'}, without the earlier rows of metrics"
    assert f"INFO: goes on from {place}\n" in capsys.readouterr().err
    saved = tmp_path / "other" / "checkpoint-000004"
    assert verify_checkpoint(saved) == []
    assert json.loads((saved / "manifest.json").read_text())["score"] == score is not None


@pytest.mark.slow
def test_a_longer_run_killed_while_it_ends_is_not_finished(tmp_path, monkeypatch, capsys):
    once, twice = (("--set", f"ppo.num_train_steps={steps}") for steps in (1, 2))
    assert train(tmp_path, *once) == 0
    with monkeypatch.context() as context:
        context.setattr("train_ppo.record", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            train(tmp_path, "--resume", *twice)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert train(tmp_path, "--resume", *twice) == 0
    assert "is finished" not in capsys.readouterr().out
    games = (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()
    assert {json.loads(game)["step"] for game in games} == {2}


def test_a_folder_where_games_are_written_costs_no_result(tmp_path, capsys):
    assert train(tmp_path, "--set", "ppo.num_train_steps=1") == 0
    (tmp_path / "run" / "episodes.jsonl").unlink()
    (tmp_path / "run" / "episodes.jsonl").mkdir()
    assert train(tmp_path, "--resume", "--set", "ppo.num_train_steps=2") == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert "nothing is shown of it" in capsys.readouterr().out


@pytest.fixture
def drawn(monkeypatch):
    """The indices of all tasks that are played in training."""
    found: list[int] = []

    def play(config, player, tasks):
        found.extend(task.index for task in tasks)
        return env_wrapper.play(config, player, tasks)

    monkeypatch.setattr(train_ppo, "play", play)
    return found


def test_a_run_of_an_older_version_goes_on(tmp_path, drawn):
    """A knob that came since has its default; one that went is left out; no task is drawn twice."""
    assert train(tmp_path, "--set", "ppo.num_train_steps=1") == 0
    folder = tmp_path / "run" / "checkpoint-000001"
    config, held, manifest = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("run_config", "trainer_state", "manifest")
    )
    del config["ppo"]["rehearsal_coef"], config["env"]["trace"], held["drawn"], manifest["digest"]
    config["run"]["keep_best"], config["lora"] = True, config["lora"] | {"lora_dropout": 0.0, "first_layer": 1}
    config["ppo"] |= {"lr_target_kl": None, "critic_warmup_steps": 0}
    config["curriculum"]["past_every"] = 5
    for path, content in ((folder / "run_config.json", config), (folder / "trainer_state.json", held)):
        path.write_text(json.dumps(content))
        manifest["files"][path.name] = utils.fingerprint(path)
    (folder / "manifest.json").write_text(utils._seal(manifest))
    more = ("--resume", "--force-config", "--set", "ppo.num_train_steps=2", "ppo.batch_size=8")
    assert train(tmp_path, *more) == 0
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert drawn == list(range(16 + 8))


def test_past_selves_are_kept_as_often_as_the_run_is_long(undisturbed, tmp_path, capsys):
    assert [past_every(steps) for steps in (1, 39, 400, 2000, 10_000)] == [1, 1, 20, 100, 100]
    copy_of(undisturbed / "run", tmp_path, 4)
    for steps, told in ((7, False), (60, True)):
        words = ("--resume", "--dry-run", "--set", f"ppo.num_train_steps={steps}")
        assert train(tmp_path, *words, **ADAPTIVE) == 0
        config = config_dict(vars(read_config(parse_args(["--resume", str(tmp_path / "run"), *words[2:]], None))))
        find_checkpoint(tmp_path / "run", str(tmp_path / "run" / "checkpoint-000004"), config, False)
        assert ("a past self is now kept every 3 steps" in capsys.readouterr().err) == told


def test_a_forced_resume_takes_a_smaller_batch_and_a_magnet_that_was_not_there(tmp_path):
    """The magnet begins as a copy of the policy, not as the base; where memory is short, what is asked for counts."""
    assert train(tmp_path, "--set", "ppo.num_train_steps=2") == 0
    knobs = ["model.tokens_per_batch=256", "ppo.magnet_coef=0.1", "ppo.num_train_steps=3", "ppo.init_kl_coef=0.02"]
    config = read_config(parse_args(["--resume", str(tmp_path / "run"), "--set", *knobs], None))
    trainer = train_ppo.Trainer(config, tmp_path / "run")
    trainer.load(tmp_path / "run" / "checkpoint-000002", force=True)
    assert (trainer.policy.tokens_per_batch, trainer.state.kl_coef) == (256, 0.02)
    mine, average = (trainer.policy.past_adapter(name) for name in ("default", "average"))
    assert any(tensor.abs().max() > 0 for key, tensor in mine.items() if "lora_B" in key)
    assert all(torch.equal(mine[key], average[key]) for key in mine)


def test_games_that_are_kept_for_the_viewer_hold_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_canary_0123456789")
    monkeypatch.setattr(train_ppo, "record", lambda *_: [{"step": 1, "error": "no answer at hf_canary_0123456789"}])
    assert train(tmp_path, "--set", "ppo.num_train_steps=1") == 0
    assert "[redacted]" in (kept := (tmp_path / "run" / "episodes.jsonl").read_text())
    assert "canary" not in kept


@pytest.mark.parametrize("lost", [1, 2])
def test_an_evaluation_of_few_games_that_were_not_lost_is_none(tmp_path, caplog, lost):
    """A server is away for a while: the value of the rest would choose the best checkpoint."""
    trainer = train_ppo.Trainer(micro_config(tmp_path), tmp_path)
    act = trainer.policy.act

    def flaky(queries):
        return [replace(a, error="away") if q.episode < lost else a for q, a in zip(queries, act(queries), strict=True)]

    trainer.policy.act = flaky
    refused = pytest.raises(TrainingError, match=r"2 of 4 games of \w+ failed in an evaluation")
    with refused if lost > 1 else nullcontext():
        results = trainer.evaluate(StopSignal(), lambda *_: None)
        told = "leduc_poker: 1 of 4 games failed and are left out, with 1 more of the same deals; the first: away"
        assert caplog.messages == [told]
        assert [r.failed for r in results] == [1, 0]
        table, found = evaluation.result_table([], results)
        assert "failed" in table.split("\n")[0]
        assert [game["failed"] for game in found["games"].values()] == [1, 0]


def test_luck_stays_in_games_on_a_server(tmp_path):
    """Which tells their moves at the end: less luck where one answer was made, a king's bet was hardly worth more."""
    served = {"env_mode": "url", "env_url": "http://127.0.0.1:9", "prompt": "full"}
    config = micro_config(tmp_path, env=served)
    assert config.ppo.less_luck
    assert not train_ppo.Trainer(config, tmp_path).ppo.less_luck


def test_nor_is_one_whose_free_answers_were_lost(tmp_path):
    trainer = train_ppo.Trainer(micro_config(tmp_path, ppo={"legal_mass_coef": 1.0}), tmp_path)
    act = trainer.policy.act

    def flaky(queries):
        away = [q.episode < 3 and not trainer.policy.constrained for q in queries]
        return [replace(a, error="away" * lost) for a, lost in zip(act(queries), away, strict=True)]

    trainer.policy.act = flaky
    with pytest.raises(TrainingError, match=r"3 of 4 games of \w+ failed"):
        trainer.evaluate(StopSignal(), lambda *_: None)
    assert trainer.policy.constrained


def loaded(folder, step, *knobs):
    """A trainer that goes on from a checkpoint with other knobs."""
    config = read_config(parse_args(["--resume", str(folder / "run"), "--set", "run.keep_last=9", *knobs], None))
    trainer = train_ppo.Trainer(config, folder / "run")
    trainer.load(folder / "run" / f"checkpoint-{step:06d}", force=True)
    return trainer


def test_nothing_that_adapts_is_forgotten_by_a_checkpoint(tmp_path):
    """Whatever a later version adds to it, too."""
    trainer = train_ppo.Trainer(micro_config(tmp_path, run={"output_dir": str(tmp_path / "run")}), tmp_path / "run")
    trainer.policy.tokens_per_batch = 1024
    row = dict.fromkeys(state.ROW_NUMBERS, 0.5) | {"step": 3, "stage": "only"}
    before = {"game": "kuhn_poker", "value": 0.1, "exact": None, "share": 0.2}
    trainer.state = state.TrainerState(3, 50, 0.3, 2, 1024, {"kuhn_poker/0": (3.0, 0.1, 0.5)}, [before], row, 0.25,
                                       {"kl_steps": 2})  # fmt: skip
    fresh = vars(state.TrainerState())
    assert not [key for key, value in vars(trainer.state).items() if value == fresh[key]]
    trainer.save()
    assert vars(loaded(tmp_path, 3).state) == vars(trainer.state)


LOW = '{"name": "low", "games": {"leduc_poker#0": 2, "kuhn_poker#0": 1}, "threshold": 0.0, "min_episodes": 30}'
REMEMBERED = {"score", "entropy", "grad", "kl"}


@pytest.mark.parametrize(("knob", "counted", "compared", "before"), [
    ("ppo.gamma=0.5", True, REMEMBERED, True), ("ppo.eval_freq=0", True, REMEMBERED, True),
    ("env.opponent=mcts:2x1", False, {"grad", "kl"}, True), ("ppo.temperature=0.7", False, {"grad", "kl"}, False),
    ("model.dtype=bfloat16", False, {"grad", "kl"}, False), ("lora.lora_alpha=99", False, {"grad", "kl"}, False),
    ("env.history_turns=2", False, {"grad", "kl"}, False), (f"curriculum.stages=[{LOW}]", False, {"grad", "kl"}, True),
])  # fmt: skip
def test_a_forced_resume_forgets_what_others_did(undisturbed, tmp_path, knob, counted, compared, before):
    """Games of another opponent count for no stage, are not replayed, and are no measure for alarms."""
    copy_of(undisturbed / "run", tmp_path, 1)
    trainer = loaded(tmp_path, 1, knob)
    curriculum = trainer.curriculum.state_dict()
    assert (curriculum["episodes"] > 0, curriculum["window"] != []) == (counted, counted)
    assert {name.split("_")[0] for name in trainer.state.alarms} & REMEMBERED == compared
    assert [row["value"] is not None for row in trainer.state.before] == [before] * 2


def test_a_secret_that_is_given_again_is_no_other_play(tmp_path, monkeypatch):
    """It is not in the checkpoint, whose place says so."""
    monkeypatch.setenv("DATA_PASSWORD", "hunter2-hunter2")
    source = "env.trace.source=hunter2-hunter2"
    assert train(tmp_path, "--set", "ppo.num_train_steps=1", source) == 0
    assert "[redacted]" in (tmp_path / "run" / "checkpoint-000001" / "run_config.json").read_text()
    trainer = loaded(tmp_path, 1, source)
    assert trainer.curriculum.state_dict()["episodes"] > 0
    assert trainer.state.before[0]["value"] is not None


def test_a_resume_may_change_these_knobs_and_no_others():
    """Those that end, save, tell and place a run, its learning rate, and where games and servers are."""
    free = {
        "ppo.num_train_steps", "ppo.learning_rate", "ppo.lr_final", "ppo.save_freq", "ppo.eval_freq",
        "ppo.alarms", "env.games_path", "env.env_url", "env.env_timeout", "env.vllm_base_url", "run.output_dir",
        "run.logger", "run.keep_last", "run.threads",
    }  # fmt: skip
    knobs = {f"{section}.{field.name}" for section, kind in SECTIONS.items() for field in fields(kind)}
    assert {knob for knob in knobs if knob.startswith(CONTINUES)} == free


def test_a_key_is_not_sent_where_only_a_checkpoint_says(undisturbed, tmp_path, monkeypatch, capsys):
    """It may be somebody else's, and so may the server."""
    copy_of(undisturbed / "run", tmp_path, 2)
    file, away = tmp_path / "run" / "checkpoint-000002" / "run_config.json", "http://away.invalid:8000/v1"
    config = json.loads(file.read_text())
    config["env"] |= {"use_vllm": True, "vllm_base_url": ["http://127.0.0.1:8000/v1", away]}
    file.write_text(json.dumps(config))
    seal_again(file)
    resume, again = ["--resume", str(tmp_path / "run")], f'env.vllm_base_url=["http://127.0.0.1:8000/v1", "{away}"]'
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert read_config(parse_args(resume, None)).env.use_vllm
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-0123")
    assert train_ppo.main(resume) == 2
    told = f"error: env.vllm_base_url: the checkpoint names {away}, which would be told your OPENAI_API_KEY; "
    assert capsys.readouterr().err.splitlines()[-1].startswith(told)
    assert read_config(parse_args([*resume, "--set", again], None)).env.use_vllm
    monkeypatch.setattr("training.config.urlsplit", lambda url: SimpleNamespace(hostname="localhost"))
    assert read_config(parse_args(resume, None)).env.use_vllm


def test_a_dry_run_sends_no_commands_to_the_terminal(tmp_path, monkeypatch, capsys):
    """A received run may name its stages anything."""
    monkeypatch.setattr(preflight, "describe", lambda config: "stage \x1b]0;a\x07\x1b[2J: 1 s\nmemory")
    assert train(tmp_path, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.index("1 s\n") < out.index("memory")


def test_failures_against_an_opponent_that_went_are_not_replayed(undisturbed, tmp_path):
    copy_of(undisturbed / "run", tmp_path, 2)
    assert loaded(tmp_path, 2, "ppo.gamma=0.5").curriculum.buffer_size == 2
    assert loaded(tmp_path, 2, "env.opponent=mcts:2x1").curriculum.buffer_size == 0


def test_a_forced_resume_of_what_was_only_evaluated_evaluates_anew(undisturbed, tmp_path):
    shutil.copytree(undisturbed / "run" / "checkpoint-000000", tmp_path / "run" / "checkpoint-000000")
    assert loaded(tmp_path, 0, "env.history_turns=2").state.before == []
    assert len(loaded(tmp_path, 0, "ppo.gamma=0.5").state.before) == 2


def test_a_score_on_another_scale_is_none(undisturbed, tmp_path):
    """It would be saved again as one of an evaluation, and stay the best for ever."""
    copy_of(undisturbed / "run", tmp_path, 4)
    assert loaded(tmp_path, 4).score is not None
    for knob in ("ppo.eval_freq=0", "ppo.temperature=0.7", "model.dtype=bfloat16", "ppo.eval_exact=never"):
        assert loaded(tmp_path, 4, knob).score is None
    low, high = (loaded(tmp_path, 4, "ppo.eval_freq=0", *stages).scale for stages in ((), ("env.opponent=mcts:2x1",)))
    assert low != high  # success rates against another opponent


def test_a_score_of_other_games_or_another_base_is_on_another_scale(undisturbed, tmp_path):
    copy_of(undisturbed / "run", tmp_path, 4)
    never = "ppo.eval_exact=never"
    high = '{"name": "high", "games": ["kuhn_poker#0", "leduc_poker#1"], "threshold": 0.0}'
    trainer, other = loaded(tmp_path, 4, never), loaded(tmp_path, 4, never, f"curriculum.stages=[{high}]")
    assert trainer.scale != other.scale
    before = trainer.scale
    for part in ("weights", "tokenizer", "games"):
        kept, trainer.base[part] = trainer.base[part], "another"
        assert trainer.scale != before, part
        trainer.base[part] = kept
    assert trainer.scale == before


def test_a_player_in_the_hubs_cache_is_links(undisturbed, tmp_path):
    """Their targets lie elsewhere; it is their bytes that count."""
    shutil.copytree(undisturbed / "run" / "final", tmp_path / "blobs")
    folder = tmp_path / "snapshots" / "abc"
    folder.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (folder / file.name).symlink_to(f"../../blobs/{file.name}")
    assert find_adapter(str(folder)) == folder
    (tmp_path / "blobs" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="0 bytes instead of"):
        find_adapter(str(folder))


@pytest.mark.parametrize("folder", ["final", "average"])
def test_a_player_that_changed_is_not_taken(undisturbed, tmp_path, folder, capsys):
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    file = tmp_path / "run" / folder / "adapter_model.safetensors"
    assert find_adapter(str(file.parent)) == file.parent
    weights = bytearray(file.read_bytes())
    weights[-300] ^= 64
    file.write_bytes(weights)
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors: sha256 differs from the manifest's"):
        find_adapter(str(file.parent))
    assert train_ppo.main(["--resume", str(file.parent)]) == 2
    assert f"error: --resume: there is no checkpoint in {file.parent}; " in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    assert train(other, "--set", f"model.adapter={file.parent}") == 2
    assert "adapter_model.safetensors: sha256 differs from the manifest's" in capsys.readouterr().err


def test_no_task_is_drawn_twice_by_a_run_that_goes_on_with_smaller_steps(tmp_path, drawn):
    assert train(tmp_path, "--set", "ppo.num_train_steps=2") == 0
    smaller = ("ppo.batch_size=8", "ppo.mini_batch_size=8", "ppo.num_train_steps=4")
    assert train(tmp_path, "--resume", "--force-config", "--set", *smaller) == 0
    assert drawn == list(range(2 * 16 + 2 * 8))


def test_the_average_is_of_the_steps_so_far(tmp_path):
    """After two steps: 8/9 of the second, as polynomial decay has it; ``follow`` is told which step it is."""
    assert train(tmp_path, "--set", "ppo.num_train_steps=2", "ppo.save_freq=1", "ppo.magnet_coef=0.1") == 0
    folders = ("checkpoint-000001", "checkpoint-000002", "average")
    first, second, average = (load_file(tmp_path / "run" / name / "adapter_model.safetensors") for name in folders)
    assert any((second[key] - first[key]).abs().max() > 1e-4 for key in first)
    for key in first:
        torch.testing.assert_close(average[key], first[key].lerp(second[key], 8 / 9), rtol=0, atol=1e-7)
