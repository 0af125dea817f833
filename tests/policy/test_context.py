"""Updates whose gradients flow through answers alone: prompts are constants that the rollout has left behind."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from env_wrapper import EnvConfig, Task, play
from games import CONFIGS_PER_GAME, NAMES
from policy import network

GAMES = ["kuhn_poker", "leduc_poker", "tic_tac_toe", "liars_dice_small"] * 2
TASKS = [Task(NAMES.index(name) * CONFIGS_PER_GAME, seed=i, index=i) for i, name in enumerate(GAMES)]


@pytest.fixture(params=["qwen2", "llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def policy(request, new_policy):
    return new_policy(request.param, ppo={"context_grad": False})


@pytest.fixture
def qwen2_constant(new_policy):
    return new_policy(ppo={"context_grad": False})


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


def last(sequence):
    """How many tokens were read: those before the last choice."""
    decision = sequence.decisions[-1]
    return max(decision.start, *(p + 1 for p in decision.positions))


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


@pytest.mark.parametrize("recompute", [True, False])
def test_a_pass_leaves_what_another_one_has_read_until_its_gradients_are_known(new_policy, recompute):
    policy = new_policy(ppo={"context_grad": False}, model={"gradient_checkpointing": recompute})
    halves, gradients = [TASKS[:4], TASKS[4:]], []
    with policy.keeping_context():
        parts = [played(policy, tasks) for tasks in halves]
        policy.forget()
        held = policy.reader.store.held
        for order in ("one by one", "together"):
            for parameter in policy.trainable().values():
                parameter.grad = None
            losses = []
            for part in parts:
                losses.append(policy.evaluate_batch(part).logprobs.sum())
                if order == "one by one":
                    losses[-1].backward()
            if order == "together":
                sum(losses).backward()
            gradients.append({n: p.grad for n, p in policy.trainable().items() if p.grad is not None})
            assert policy.reader.store.held == held, "and no longer, although there are losses"
    assert_close(*gradients)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_store_that_has_grown_is_in_memory_once_while_there_are_losses(new_policy, recompute):
    """A finished micro-batch's loss is there until the next one's is computed, for which the store may have to grow."""
    policy = new_policy(ppo={"context_grad": False}, model={"gradient_checkpointing": recompute})
    with policy.keeping_context():
        sequences = played(policy)
        policy.forget()
        found = policy.evaluate_batch(sequences)
        before = [weakref.ref(x.untyped_storage()) for pair in policy.reader.store.layers for x in pair]
        sum(x.sum() for x in found[:3]).backward()
        policy.reader.store.hold(policy.reader.store.take(len(policy.reader.store.layers[0][0])), -1)
        assert not [storage for storage in before if storage()]


@pytest.mark.parametrize(
    ("env", "legal_mass"), [({}, True), ({"history_turns": 0}, True), ({"answer_mode": "free"}, False)]
)
def test_what_is_scored_is_the_same(policy, env, legal_mass):
    policy.constrained, policy.max_new_tokens = "answer_mode" not in env, 4
    with policy.keeping_context():
        sequences = played(policy, **env)
        policy.forget()
        found, _ = scores(policy, sequences, legal_mass=legal_mass)
    expected, _ = scores(policy, sequences, legal_mass=legal_mass)
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_an_update_computes_the_ends_of_prompts_and_the_answers(qwen2_constant, monkeypatch):
    policy, real, computed = qwen2_constant, network.run_trunk, []

    def run_trunk(model, tree, store, recompute, held):
        assert recompute == len(model.layers), "with gradient_checkpointing, on a CPU"
        computed.append(tree.ids_N.tolist())
        return real(model, tree, store, recompute, held)

    alone = [s.ids for s in played(policy)]
    policy.forget()
    with policy.keeping_context():
        sequences = played(policy)
        assert [s.ids for s in sequences] == alone, "a rollout is the same with it"
        policy.forget()
        assert policy.reader.store.held == len({tuple(s.ids[: n + 1]) for s in sequences for n in range(last(s))})
        monkeypatch.setattr(network, "run_trunk", run_trunk)
        scores(policy, sequences)
    decisions = {tuple(s.ids[: d.stop - 1]): s.ids[d.start - 1 : d.stop - 1] for s in sequences for d in s.decisions}
    assert sum(map(len, computed)) <= sum(map(len, decisions.values()))
    assert policy.context is None
    assert not policy.reader.store.held
    assert not len(policy.reader.store.layers[0][0]), "nor is there room for it any more"


def test_what_nobody_has_read_is_read_once(qwen2_constant):
    """As the games of other processes are, and those that a server played."""
    policy = qwen2_constant
    with policy.keeping_context():
        sequences = played(policy)
        policy.forget()
        expected = scores(policy, sequences)
    with policy.keeping_context():
        assert_close(scores(policy, sequences), expected)
        held = policy.reader.store.held
        assert held > 0
        assert_close(scores(policy, sequences), expected)
        assert policy.reader.store.held == held


def test_what_a_past_self_reads_is_none_of_it(qwen2_constant, new_policy, tmp_path):
    """It reads the same words, and makes something else of them."""
    policy = qwen2_constant
    new_policy(noise=1).save(tmp_path)
    policy.add_adapter("other", tmp_path)
    mixed = [replace(task, opponent="past:other") for task in TASKS]
    with policy.keeping_context():
        sequences = played(policy, mixed)
        policy.forget()
        found, _ = scores(policy, sequences)
    assert_close(found, scores(policy, sequences)[0], atol=1e-5, rtol=1e-4)


def test_the_weights_that_change_leave_what_was_read_as_it_was(qwen2_constant):
    policy = qwen2_constant
    with policy.keeping_context():
        sequences = played(policy)
        policy.forget()
        before, _ = scores(policy, sequences)
        for parameter in policy.trainable().values():
            parameter.data *= 1.5
        after, _ = scores(policy, sequences)
        with torch.no_grad():
            measured = policy.evaluate_batch(sequences)[:3]  # as ``update_kl`` is
    anew, _ = scores(policy, sequences)
    assert not torch.allclose(before[0], after[0], atol=1e-4)
    assert not torch.allclose(after[0], anew[0], atol=1e-5), "prompts are not read again"
    assert_close([*measured], anew, atol=1e-5, rtol=1e-4)
