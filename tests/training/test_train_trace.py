"""Training on the trace environment from the command line."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from players import FunctionPlayer
from tiny import LEDUC, base_model
from tiny_runs import copy_of, final_bytes, rows, summary, train
from transformers import AutoTokenizer

import train_ppo
from config.reader import ConfigError, load_config
from curriculum import Curriculum
from env_wrapper import Action, EnvConfig, Task, play
from envs.trace import TASKS_PER_LEVEL
from envs.trace.env import _workshop
from envs.trace.sandbox import Sandbox
from evaluation.players import Roster
from training.config import DEFAULT_FILES
from training.config import SECTIONS as KNOBS

TRACE: dict[str, Any] = {"env_type": "trace", "answer_mode": "free", "protocol": "affinetes"}
LEVELS = {"stages": [{"name": "sums", "games": [[0, 2 * TASKS_PER_LEVEL - 1]]}]}
SECTIONS = {
    "env": TRACE,
    "curriculum": LEVELS,
    "ppo": {"num_train_steps": 2, "max_new_tokens": 12, "mini_batch_size": 16, "init_kl_coef": 0.0},
}


def train_trace(folder, *args, **env):
    return train(folder, *args, **{**SECTIONS, "env": TRACE | env})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    assert train_trace(folder) == 0
    return folder


def test_a_run_trains_and_evaluates_every_level_of_its_stages(finished):
    assert [row["step"] for row in rows(finished)] == [1, 2]
    assert all(row["failed"] == 0 and row["decisions"] == row["games"] == 16 for row in rows(finished))
    assert summary(finished)["games"].keys() == {"trace_l0", "trace_l1"}
    assert summary(finished)["mean_share_of_ceiling"] is None
    shown = [json.loads(line) for line in (finished / "run" / "episodes.jsonl").read_text().splitlines()]
    assert {row["game"] for row in shown} == {"trace_l0", "trace_l1"}
    assert all(row["history"] is None and "print" in row["turns"][0]["user"] for row in shown)


def test_what_nothing_constrains_has_no_legal_mass_to_learn(tmp_path):
    """The default configuration wants legal mass; with free answers there is none to read."""
    knobs = ("--set", "ppo.num_train_steps=1", "ppo.legal_mass_coef=0.1")
    assert train_trace(tmp_path, *knobs) == 0
    assert "legal_mass" not in rows(tmp_path)[0]


def test_resuming_is_exact(finished, tmp_path):
    copy_of(finished / "run", tmp_path, 1)
    assert train_trace(tmp_path, "--resume") == 0
    assert rows(tmp_path) == rows(finished)
    assert final_bytes(tmp_path, 2) == final_bytes(finished, 2)
    assert summary(tmp_path) == summary(finished)


@pytest.mark.slow
def test_programs_that_changed_under_a_run_are_refused_unless_forced(tmp_path, capsys):
    """A task is a place among them: one more file, and every task is another program."""
    source = tmp_path / "programs"
    source.mkdir()
    for i in range(8):
        (source / f"{i}.py").write_text(f"print({i})")
    knobs: dict[str, Any] = {"trace": {"source": str(source), "sandbox_min_level": 0}}
    assert train_trace(tmp_path, "--set", "ppo.num_train_steps=1", **knobs) == 0
    more, name = ("--resume", "--set", "ppo.num_train_steps=2"), str(tmp_path / "run")
    before = Roster([], [], 0, False, None).contestant(name, [name]).origin  # stands in the file of an evaluation
    (source / "00.py").write_text("print(9)")
    _workshop.cache_clear()  # another process has not read them yet
    after = Roster([], [], 0, False, None).contestant(name, [name]).origin
    assert {key for key in before if before[key] != after[key]} == {"programs"}
    for dry in ([], ["--dry-run"]):
        assert train_trace(tmp_path, *more, *dry, **knobs) == 2
        assert f"the programs of {source} are not those that it was trained with; --force" in capsys.readouterr().err
    assert train_trace(tmp_path, *more, "--force-config", **knobs) == 0
    assert "WARNING" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"trace": {"sourse": "x"}}, 'env: trace.sourse = "x": no such key; the nearest is trace.source'),
        ({"trace": {"sandbox_min_level": -1}}, "env: trace.sandbox_min_level = -1: expected an integer >= 0"),
        ({"trace": {"source": "nowhere.jsonl"}}, "env.trace: trace.source 'nowhere.jsonl' is not there"),
        ({"answer_mode": "constrained"}, 'env.answer_mode = "constrained": expected "free" with env_type trace'),
        (
            {"answer_mode": "constrained", "env_mode": "url", "env_url": "http://127.0.0.1:9", "prompt": "full"},
            'env.answer_mode = "constrained": expected "free" with env_type trace',
        ),
    ],
)
def test_a_mistake_is_told_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, env, message, words):
    monkeypatch.setattr("training.state.load_policy", None)
    assert train_trace(tmp_path, *words, **env) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_a_task_that_is_no_level_and_a_weak_sandbox_are_told_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "one.py").write_text("print(1)")
    stages = {"stages": [{"name": "cards", "games": [[LEDUC, LEDUC]]}]}
    own = SECTIONS["env"] | {"trace": {"source": str(tmp_path)}}
    for env in (SECTIONS["env"], own):
        assert train(tmp_path, **{**SECTIONS, "curriculum": stages, "env": env}) == 2
        told = f"curriculum.stages: task {LEDUC} is of a game, not of a program: expected 0 to 99999999, as in config/"
        assert told in capsys.readouterr().err
    monkeypatch.setattr(Sandbox.__init__, "__defaults__", (None, 1, 2, 0, "none"))
    assert train_trace(tmp_path, trace={"source": str(tmp_path)}) == 2
    assert "error: env.trace: sandbox_min_level is 1" in capsys.readouterr().err


@pytest.mark.parametrize("opponent", ["self", {"random": 1, "mcts": 1}])
def test_programs_have_no_opponents(tmp_path, capsys, opponent):
    stages = {"stages": [{"name": "sums", "games": [[0, 9]], "opponent": opponent}]}
    assert train(tmp_path, **{**SECTIONS, "curriculum": stages}) == 2
    assert "curriculum.stages: stage 'sums': opponent: programs (env.env_type trace) have" in capsys.readouterr().err


def test_settings_of_trace_are_laid_key_by_key():
    sets = ["env.env_type=trace", 'env.trace={"source": "x"}', "env.trace.sandbox_min_level=2"]
    config = load_config({"env": EnvConfig}, sets=sets)["env"]
    assert config.trace == {"source": "x", "sandbox_min_level": 2}
    assert hash(config) == hash(EnvConfig(env_type="trace"))
    with pytest.raises(ConfigError, match=r"trace\.sandbox_min_level = 3: expected an integer >= 0 and <= 2"):
        EnvConfig(env_type="trace", trace={"sandbox_min_level": 3})


def test_settings_and_scores_reach_the_environment_and_the_episode(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"program": "print(\'A b\')"}\n')

    class Answerer:
        def act(self, queries):
            return [Action("ab") for _ in queries]

    [episode] = play(EnvConfig(**TRACE, trace={"source": str(tmp_path / "p.jsonl")}), Answerer(), [Task(0)])
    assert (episode.score, episode.info["match"], episode.info["exact"], episode.info["share"]) == (1.0, 1.0, 0.0, 1.0)


def printed_by(text):
    """What the program of a prompt prints, found by running it."""
    program, inputs = re.search(r"```python\n(.*?)\n```\n\nStandard input:\n```\n(.*?)```", text, re.DOTALL).groups()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "stdin", io.StringIO(inputs))
        with contextlib.suppress(Exception):  # a program that crashes is a task like any other
            exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    return out.getvalue()


@pytest.mark.parametrize(
    ("tokens", "games", "stage", "least"), [(None, 500, "everything", 0.95), (16, 300, "branches and loops", 0)]
)
def test_a_player_that_runs_the_programs_passes_all_stages_of_the_preset(tokens, games, stage, least):
    """With answers of 16 tokens, nobody could."""
    root = Path(train_ppo.__file__).parent
    config = load_config(KNOBS, [*(root / name for name in DEFAULT_FILES), root / "config" / "trace_config.json"])
    tokenizer, limit = AutoTokenizer.from_pretrained(base_model()), tokens or config["ppo"].max_new_tokens
    perfect = FunctionPlayer(
        lambda query: tokenizer.decode(tokenizer.encode(printed_by(query.conversation[-1]["content"]))[:limit])
    )
    curriculum = Curriculum(config["curriculum"], run_seed=0)
    for first in range(0, games, 50):
        for episode in play(config["env"], perfect, [curriculum.next(i) for i in range(first, first + 50)]):
            curriculum.update(episode.task, episode.score)
    assert curriculum.stage.name == stage
    assert curriculum.success_rate >= (tokens is None) * 0.95
