"""Training on the trace environment from the command line, and PPO with a ratio a token."""

import json
import math
from typing import Any

import pytest
import torch
from tiny import LEDUC, rollout, tiny_policy
from tiny_runs import Drawing, copy_of, final_bytes, rows, summary, train

import train_ppo
from env_wrapper import Action, EnvConfig, Task, play
from envs import trace
from envs.trace import TASKS_PER_LEVEL
from options import PPOConfig
from settings import ConfigError, load_config
from train_ppo import by_token, collate, ppo_loss, ppo_update

TRACE: dict[str, Any] = {"env_type": "trace", "answer_mode": "free", "protocol": "affinetes", "max_attempts": 1}
LEVELS = {"stages": [{"name": "sums", "games": [[0, 2 * TASKS_PER_LEVEL - 1]]}]}
SECTIONS = {
    "env": TRACE,
    "curriculum": LEVELS,
    "ppo": {"num_train_steps": 2, "max_new_tokens": 3, "ratio": "token", "mini_batch_size": 16, "init_kl_coef": 0.0},
}


def train_trace(folder, *args, **env):
    return train(folder, *args, **{**SECTIONS, "env": TRACE | env})


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch):
    monkeypatch.setattr(train_ppo, "subprocess", Drawing())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_ppo, "subprocess", Drawing())
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


def test_resuming_is_exact(finished, tmp_path):
    copy_of(finished / "run", tmp_path, 1)
    assert train_trace(tmp_path, "--resume") == 0
    assert rows(tmp_path) == rows(finished)
    assert final_bytes(tmp_path, 2) == final_bytes(finished, 2)
    assert summary(tmp_path) == summary(finished)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"trace": {"max_print": 3}}, "env: trace.max_print = 3: no such key; the nearest is trace.max_prints"),
        ({"trace": {"max_prints": -1}}, "env: trace.max_prints = -1: expected an integer >= 0"),
        ({"trace": {"source": "nowhere.jsonl"}}, "env.trace: trace.source 'nowhere.jsonl' is not there"),
        ({"answer_mode": "constrained"}, 'env.answer_mode = "constrained": expected "free" with env_type trace'),
    ],
)
def test_a_mistake_is_told_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, env, message):
    monkeypatch.setattr(train_ppo, "load_policy", None)
    assert train_trace(tmp_path, **env) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_a_task_that_is_no_level_and_a_weak_sandbox_are_told_too(tmp_path, monkeypatch, capsys):
    stages = {"stages": [{"name": "cards", "games": [[LEDUC, LEDUC]]}]}
    assert train(tmp_path, **{**SECTIONS, "curriculum": stages}) == 2
    assert f"env.trace: task_id {LEDUC} is out of range: allowed are 0 to 99999999" in capsys.readouterr().err
    (tmp_path / "one.py").write_text("print(1)")
    monkeypatch.setattr(trace.Sandbox.__init__, "__defaults__", (None, 1, 2, 0, "none"))
    assert train_trace(tmp_path, trace={"source": str(tmp_path)}) == 2
    assert "error: env.trace: sandbox_min_level is 1" in capsys.readouterr().err


def test_settings_of_trace_are_laid_key_by_key():
    sets = ["env.env_type=trace", 'env.trace={"max_prints": 2}', "env.trace.output_kb=9"]
    config = load_config({"env": EnvConfig}, sets=sets)["env"]
    assert config.trace == {"max_prints": 2, "output_kb": 9}
    assert hash(config) == hash(EnvConfig(env_type="trace"))
    with pytest.raises(ConfigError, match=r"trace\.output_kb = 0: expected an integer >= 1"):
        EnvConfig(env_type="trace", trace={"output_kb": 0})


def test_settings_and_scores_reach_the_environment_and_the_episode(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"program": "print(\'A b\')"}\n')

    class Answerer:
        def act(self, queries):
            return [Action("ab") for _ in queries]

    [episode] = play(EnvConfig(**TRACE, trace={"source": str(tmp_path / "p.jsonl")}), Answerer(), [Task(0)])
    assert (episode.score, episode.info["match"], episode.info["exact"], episode.info["share"]) == (1.0, 1.0, 0.0, 1.0)


# ------------------------------------------------------------------------------------------------ a ratio a token


def test_each_token_is_clipped_alone():
    """Answers of two and of one token, advantages 1 and -2; ratios 1.5 and 0.5, and 1.1; clipped at 0.8 and 1.2."""
    old, mask = by_token([[-1.0, -2.0], [-0.5]])
    new = (old + torch.tensor([[math.log(1.5), math.log(0.5)], [math.log(1.1), 0.0]])).requires_grad_()
    zeros_M = torch.zeros(2)
    ppo = PPOConfig(vf_coef=0.0)
    loss, stats = ppo_loss(new.T, zeros_M, zeros_M, old.T, zeros_M, torch.tensor([1.0, -2.0]), zeros_M,
                           torch.ones(2), ppo, mask.T)  # fmt: skip
    # -min(1.5, 1.2) - min(0.5, 0.8), and -min(-2 * 1.1, -2 * 1.1); the padding counts nowhere
    assert loss.item() == pytest.approx(-1.2 - 0.5 + 2.2)
    loss.backward()
    torch.testing.assert_close(new.grad, torch.tensor([[0.0, -0.5], [2.2, 0.0]]))
    assert stats["clip_fraction"].item() == pytest.approx(1.0)  # both of the first answer's, none of the second's
    assert stats["ratio_max"].item() == pytest.approx(0.5)
    k3 = [r - 1 - math.log(r) for r in (1.5, 0.5, 1.1)]
    assert stats["approx_kl"].item() == pytest.approx(sum(k3), rel=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_update_of_both_ratios_is_the_same(tmp_path, recompute):
    """Answers of one to three tokens, sampled: at ratio 1 a sum over tokens has the gradient of the whole answer."""
    policy = tiny_policy(tmp_path, ppo={"max_new_tokens": 3}, env=TRACE | {"prompt": "compact"})
    policy.constrained = False
    tasks = [Task(TASKS_PER_LEVEL, seed=i, index=i) for i in range(6)]
    episodes = play(EnvConfig(**TRACE, prompt="compact"), policy, tasks)
    gradients = []
    for ratio in ("decision", "token"):
        ppo = PPOConfig(batch_size=6, mini_batch_size=6, ppo_epochs=1, ratio=ratio, recompute_logprobs=recompute,
                        max_grad_norm=1e9)  # fmt: skip
        batch = collate(episodes, policy, ppo, 0.0)
        assert (batch.old_tokens_MA is None) == (ratio == "decision")
        recorded: list[torch.Tensor] = []

        class Recorder:
            def step(self, recorded=recorded):
                recorded.append(torch.cat([p.grad.flatten() for p in policy.trainable().values()]))

            def zero_grad(self, set_to_none):
                for parameter in policy.trainable().values():
                    parameter.grad = None

        recorder: Any = Recorder()
        stats = ppo_update(policy, recorder, batch, ppo, (0,))
        assert stats["ratio_max"] < 1e-4
        gradients += recorded
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_log_probabilities_by_token_are_those_of_the_rollout_in_any_order(tmp_path):
    policy = tiny_policy(tmp_path)
    episodes = rollout(policy, 9)
    sequences = [s for e in episodes for seat in e.sequences for s in e.sequences[seat]]
    policy.tokens_per_batch = 64
    rows_MA, mask_MA = by_token([d.token_logprobs for s in sequences for d in s.decisions])
    got = policy.evaluate_decisions(sequences)
    torch.testing.assert_close(got.tokens.detach(), rows_MA, rtol=0, atol=1e-5)
    torch.testing.assert_close((got.tokens * mask_MA).sum(1), got.logprobs, rtol=0, atol=1e-5)
