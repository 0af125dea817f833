"""Updates whose gradients flow through answers alone: prompts are constants that the rollout has left behind."""

import pytest
import torch
from torch.testing import assert_close

from env_wrapper import EnvConfig, Task, play
from games import CONFIGS_PER_GAME, NAMES

GAMES = ["kuhn_poker", "leduc_poker", "tic_tac_toe", "liars_dice_small"] * 2
TASKS = [Task(NAMES.index(name) * CONFIGS_PER_GAME, seed=i, index=i) for i, name in enumerate(GAMES)]


@pytest.fixture(params=["qwen2", "llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def policy(request, new_policy):
    return new_policy(request.param, ppo={"context_grad": False})


def played(policy, tasks=TASKS, **env):
    episodes = play(EnvConfig(**env), policy, tasks)
    return [s for e in episodes for sequences in e.sequences.values() for s in sequences]


def scores(policy, sequences, **how):
    """All that an update reads of ``sequences``, and the gradient of its sum."""
    for parameter in policy.trainable().values():
        parameter.grad = None
    columns = [x for x in policy.evaluate_batch(sequences, **how)[:4] if x is not None]
    sum((x.float() * torch.linspace(-1, 1, len(x))).sum() for x in columns).backward()
    return columns, {n: p.grad for n, p in policy.trainable().items() if p.grad is not None}


def without_context_grad(policy, sequence):
    """``scores`` by the library's own forward pass, which reads each decision's prompt without gradients."""
    logprobs, entropies, values = [], [], []
    for d in sequence.decisions:
        ids = torch.tensor([sequence.ids])
        with torch.no_grad():
            past = policy.trunk(ids[:, : d.start - 1], use_cache=True).past_key_values
        hidden_ND = policy.trunk(ids[:, d.start - 1 : d.stop - 1], past_key_values=past).last_hidden_state[0]
        logp = entropy = torch.zeros(())
        for p, chosen, allowed in zip(d.positions, d.chosen, d.allowed, strict=True):
            logits = policy.lm_head(hidden_ND[p - d.start + 1])[allowed].log_softmax(-1)
            logp, entropy = logp + logits[allowed.index(chosen)], entropy - (logits.exp() * logits).sum()
        logprobs.append(logp)
        entropies.append(entropy)
        values.append(policy.value_head(hidden_ND[0])[0])
    return logprobs, entropies, values


@pytest.mark.parametrize("env", [{}, {"history_turns": 0}])
def test_gradients_flow_through_answers_alone(policy, env):
    with policy.keeping_context():
        sequences = played(policy, **env)
        policy.forget()
        found, gradients = scores(policy, sequences)
    for parameter in policy.trainable().values():
        parameter.grad = None
    parts = [without_context_grad(policy, s) for s in sequences]
    expected = [torch.stack([x for part in parts for x in part[i]]) for i in range(3)]
    assert_close(found, expected, atol=1e-5, rtol=1e-4)
    sum((x * torch.linspace(-1, 1, len(x))).sum() for x in expected).backward()
    theirs = {n: p.grad for n, p in policy.trainable().items() if p.grad is not None}
    assert gradients.keys() == theirs.keys()
    assert_close(gradients, theirs, atol=1e-4, rtol=1e-3)
