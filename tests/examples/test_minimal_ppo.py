"""The example on one page is the trainer's algorithm, learns what it says it learns, and is what the notebook holds."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import notebook
import numpy as np
import pytest
import torch
from tiny import LEDUC, micro_config, tiny_policy

import train_ppo
from env_wrapper import play
from envs.types import Task
from examples import minimal_ppo as example

KEY = (3, 1)


@pytest.fixture
def ppo(tmp_path):
    """The example's settings as the trainer's; the example leaves luck in."""
    return replace(
        micro_config(tmp_path).ppo, cliprange=example.CLIP, vf_coef=example.VALUE_COEF, gamma=example.GAMMA,
        lam=example.LAMBDA, max_grad_norm=example.MAX_GRAD_NORM, entropy_coef=example.ENTROPY_COEF, batch_size=48,
        mini_batch_size=16, ppo_epochs=2, init_kl_coef=0.0, target_kl=None, recompute_logprobs=False,
        less_luck=False,
    )  # fmt: skip


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Games of Leduc poker as the trainer and as the example hold them, and two players with the same weights."""
    monkeypatch.setattr(example, "MINIBATCH", 16)
    monkeypatch.setattr(example, "EPOCHS", 2)
    policy, twin = tiny_policy(tmp_path), tiny_policy(tmp_path)
    answers = [policy.chat.answer_ids[str(action)] for action in range(3)]
    env = replace(micro_config(tmp_path).env, history_turns=0)
    episodes = play(env, policy, [Task(LEDUC, seed=i, index=i) for i in range(48)])
    games = []
    for episode in episodes:
        ((seat, sequences),) = episode.sequences.items()
        decisions = []
        for sequence in sequences:
            (made,) = sequence.decisions
            legal = [answer in made.allowed[0] for answer in answers]
            prompt, pick = tuple(sequence.ids[: made.start]), answers.index(made.chosen[0])
            decisions.append(example.Decision(prompt, legal, pick, made.logprob, made.value))
        games.append(example.Game(seat, decisions, episode.info["returns"][seat]))
    assert sum(len(game.decisions) for game in games) > 80
    return policy, episodes, example.Player(twin.peft_model, twin.value_head, answers), games


def named(policy, player):
    """Pairs of the same parameter, the trainer's and the example's."""
    ours, theirs = dict(policy.peft_model.named_parameters()), dict(player.model.named_parameters())
    pairs = {name: (p, theirs[name]) for name, p in ours.items() if p.requires_grad}
    return pairs | {
        "head": (policy.value_head.weight, player.head.weight),
        "bias": (policy.value_head.bias, player.head.bias),
    }


def test_it_credits_decisions_as_the_trainer_does(both, ppo):
    policy, episodes, _, games = both
    batch = train_ppo.collate(episodes, policy, ppo, 0.0, moments={})
    example.credit(games)
    for name, column in (("advantage", batch.advantages_M), ("target", batch.returns_M)):
        found = torch.tensor([getattr(d, name) for game in games for d in game.decisions])
        torch.testing.assert_close(found, column, atol=2e-5, rtol=0)
        assert column.std() > 0.5


def test_its_loss_and_gradient_are_the_trainers(both, ppo):
    policy, episodes, player, games = both
    batch = train_ppo.collate(episodes, policy, ppo, 0.0, moments={})
    example.credit(games)
    drift = torch.linspace(-0.5, 0.5, len(batch.values_M))  # or every ratio is 1 and nothing is clipped
    batch.old_logprobs_M += drift
    batch.values_M += drift
    for decision, moved in zip((d for game in games for d in game.decisions), drift.tolist(), strict=True):
        decision.logprob += moved
        decision.value += moved
    expected, sums = train_ppo._backward(policy, batch, list(range(len(batch.sequences))), ppo)
    loss = example.ppo_loss(player, [d for game in games for d in game.decisions], ppo.entropy_coef)
    loss.backward()
    assert 0.05 < float(sums["clip_fraction"] / sums["decisions"]) < 0.95
    torch.testing.assert_close(loss.detach(), expected, atol=1e-5, rtol=0)
    for name, (ours, theirs) in named(policy, player).items():
        torch.testing.assert_close(
            theirs.grad, ours.grad, atol=2e-5, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_its_update_leaves_the_trainers_weights(both, ppo):
    """Two epochs of three minibatches. SGD: AdamW's first step is the gradient's sign, which rounding turns."""
    policy, episodes, player, games = both
    before = {name: ours.detach().clone() for name, (ours, _) in named(policy, player).items()}
    batch = train_ppo.collate(episodes, policy, ppo, 0.0, moments={})
    train_ppo.ppo_update(policy, torch.optim.SGD(policy.trainable().values(), lr=0.1), batch, ppo, KEY)
    example.credit(games)
    optimizer = torch.optim.SGD([p for p in player.parameters() if p.requires_grad], lr=0.1)
    example.update(player, optimizer, games, ppo.entropy_coef, KEY)
    moved = max(float((ours.detach() - before[name]).abs().max()) for name, (ours, _) in named(policy, player).items())
    assert moved > 0.01
    for name, (ours, theirs) in named(policy, player).items():
        torch.testing.assert_close(theirs, ours, atol=1e-3 * moved, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def test_it_reads_the_prompt_as_the_trainer_does(both):
    policy, episodes, player, games = both
    sequences = [s for e in episodes for found in e.sequences.values() for s in found]
    expected = policy.evaluate_decisions(sequences)
    decisions = [d for game in games for d in game.decisions]
    logprobs_MA, values_M = player([d.prompt for d in decisions], torch.tensor([d.legal for d in decisions]))
    picked_M = logprobs_MA[np.arange(len(decisions)), [d.pick for d in decisions]]
    torch.testing.assert_close(picked_M, expected.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(values_M, expected.values, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_it_is_short_and_stands_alone():
    text = notebook.SCRIPT.read_text()
    assert text.count("\n") <= 250
    code = f"import sys; sys.path.insert(0, {str(notebook.SCRIPT.parent)!r}); import minimal_ppo; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert not {"train_ppo", "policy", "envs", "games", "utils", "training", "matplotlib"} & {*done.stdout.split()}


def test_the_notebook_is_the_script():
    held = json.loads(notebook.NOTEBOOK.read_text())["cells"]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in held]
    assert found == notebook.cells(notebook.SCRIPT.read_text())
    assert notebook.NOTEBOOK.stat().st_size < 100_000
    outputs = [out for cell in held for out in cell.get("outputs", [])]
    assert any("image/png" in out.get("data", {}) for out in outputs)
    assert not [out for out in outputs if out["output_type"] == "error"]


@pytest.mark.slow
def test_it_learns_within_a_minute_of_one_core():
    code = "import sys, time, runpy; curve = runpy.run_path(sys.argv[1], run_name='__main__')['curve']"
    code += "; print(curve[-1][1], time.process_time())"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(notebook.SCRIPT)], env=environment, capture_output=True, text=True, check=True
    )
    share, seconds = map(float, done.stdout.splitlines()[-1].split())
    assert share >= 0.85
    assert seconds < 60


@pytest.mark.slow
def test_the_notebook_runs():
    started = time.monotonic()
    outputs = [out for cell in notebook.run(notebook.notebook(notebook.SCRIPT.read_text())).cells
               for out in cell.get("outputs", [])]  # fmt: skip
    printed = "".join(out.text for out in outputs if out.output_type == "stream")
    assert float(printed.split("share")[-1].split()[0]) >= 0.85
    assert any("image/png" in out.get("data", {}) for out in outputs)
    print(f"{time.monotonic() - started:.0f} s")
