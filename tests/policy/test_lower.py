"""Layers below all adapters: what they made of a token in a rollout is what an update goes on from."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from env_wrapper import EnvConfig, Task, play
from games import CONFIGS_PER_GAME, NAMES
from policy.lower import LowerLayers

GAMES = ["kuhn_poker", "leduc_poker", "tic_tac_toe", "liars_dice_small"] * 2
TASKS = [Task(NAMES.index(name) * CONFIGS_PER_GAME, seed=i, index=i) for i, name in enumerate(GAMES)]


MORE = [pytest.param(one, marks=pytest.mark.slow) for one in (("qwen2", 2), ("qwen3", 1))]


@pytest.fixture(params=[("qwen2", 1), ("llama", 2), *MORE], ids=str)
def policy(request, new_policy):
    """One with adapters from layer 1 or 2 of three on."""
    architecture, first = request.param
    return new_policy(architecture, lora={"first_layer": first})


def played(policy, **env):
    episodes = play(EnvConfig(**env), policy, TASKS)
    return [s for e in episodes for sequences in e.sequences.values() for s in sequences]


def scores(policy, sequences, **how):
    """All that an update reads of ``sequences``, and the gradient of its sum."""
    for parameter in policy.trainable().values():
        parameter.grad = None
    read = policy.evaluate_decisions(sequences, **how)
    columns = [x for x in read if x is not None]
    if columns[0].requires_grad:
        sum((x.float() * torch.linspace(-1, 1, len(x))).sum() for x in columns[:4]).backward()
    return columns, {n: p.grad for n, p in policy.trainable().items() if p.grad is not None}


@contextmanager
def ruined(policy):
    """Each layer without an adapter says nonsense inside: who asks it again is found out."""
    below = policy.trunk.layers[: policy.first_layer]
    held = {name: x.clone() for name, x in below.state_dict().items()}
    for weight in below.parameters():
        weight.data.fill_(float("nan"))
    yield
    below.load_state_dict(held)


def check_same(one, other):
    assert one[1].keys() == other[1].keys()
    assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("env", "legal_mass"),
    [({}, True), ({}, False), ({"history_turns": 0}, True), ({"answer_mode": "free"}, False)],
)
def test_an_update_asks_no_lower_layer_for_what_a_rollout_read(policy, env, legal_mass):
    policy.constrained, policy.max_new_tokens = "answer_mode" not in env, 4
    with policy.lower_layers_once():
        sequences = played(policy, **env)
        policy.forget()
        with ruined(policy):
            once = scores(policy, sequences, legal_mass=legal_mass)
            base = scores(policy, sequences, adapter="base", legal_mass=legal_mass)
    assert once[1], "gradients"
    check_same(once, scores(policy, sequences, legal_mass=legal_mass))
    check_same(base, scores(policy, sequences, adapter="base", legal_mass=legal_mass))


def test_a_rollout_is_the_same_with_it(policy):
    alone = [s.ids for s in played(policy)]
    policy.forget()
    with policy.lower_layers_once():
        assert [s.ids for s in played(policy)] == alone
    assert policy.reader.lower is None
    with policy.lower_layers_once(processes=2):
        assert policy.reader.lower is None, "most of an update's games were played elsewhere"


def test_what_nobody_has_read_is_read_once(policy):
    """As texts that are rehearsed are, the games of other processes, and those that a server played."""
    sequences = played(policy)
    policy.forget()
    alone = scores(policy, sequences)
    with policy.lower_layers_once():
        first = scores(policy, sequences)
        with ruined(policy):
            second = scores(policy, sequences)
    check_same(first, alone)
    check_same(second, alone)


def test_who_has_adapters_below_reads_for_itself(new_policy, tmp_path):
    """An earlier run's player, loaded to be played against, may have been trained in all layers."""
    policy, other = new_policy(lora={"first_layer": 2}), new_policy(noise=1)
    other.save(tmp_path)
    policy.add_adapter("other", tmp_path)
    sequences = played(policy)
    alone = [scores(policy, sequences, adapter=name) for name in ("other", "base", None)]
    mixed = [replace(task, opponent="past:other") for task in TASKS]
    policy.forget()
    with policy.lower_layers_once():
        both = play(EnvConfig(), policy, mixed)
        for _ in range(2):
            found = [scores(policy, sequences, adapter=name) for name in ("other", "base", None)]
            for one, two in zip(found, alone, strict=True):
                check_same(one, two)
        sequences = [s for e in both for rows in e.sequences.values() for s in rows]
        learnt = scores(policy, sequences)
    check_same(learnt, scores(policy, sequences))


@pytest.mark.usefixtures("frozen")
def test_where_memory_runs_out_nothing_is_held_and_nothing_is_lost(new_policy, monkeypatch):
    policy = new_policy(lora={"first_layer": 2})
    sequences, tokens = played(policy), policy.tokens_per_batch
    policy.forget()
    alone, write, calls = scores(policy, sequences), LowerLayers._write, []
    read_anew, begun = [], {tuple(s.ids[:n]) for s in sequences for n in range(len(s.ids))}

    def some_fail(lower, *args):
        calls.append(lower)
        if len(calls) in failing:
            raise torch.OutOfMemoryError
        write(lower, *args)

    monkeypatch.setattr(LowerLayers, "_write", some_fail)
    for failing in [{}, *({n, n + 1} for n in range(1, 40))]:
        calls.clear()
        with policy.lower_layers_once():
            assert [s.ids for s in played(policy)] == [s.ids for s in sequences]
            policy.forget()
            rollout = len(calls)
            check_same(scores(policy, sequences), alone)
            read_anew.append(len(calls) > rollout)
            read = {0: ()}
            for (before, token), place in policy.reader.lower._next.items():
                read[place] = (*read[before], token)
            assert {*read.values()} <= begun, "nothing is held of what nobody read"
            with ruined(policy):
                check_same(scores(policy, sequences), alone)
        if failing and min(failing) >= rollout:
            break
    assert not read_anew[0]
    assert sum(read_anew) > 8, "what is missing is read, and held then"
    assert policy.tokens_per_batch == tokens


def test_it_takes_as_much_memory_as_it_says(new_policy):
    policy = new_policy(lora={"first_layer": 2}, model={"dtype": "bfloat16"})
    with policy.lower_layers_once():
        sequences = played(policy)
        held = policy.reader.lower._hidden_CD
    distinct = len({tuple(s.ids[: n + 1]) for s in sequences for n in range(len(s.ids) - 1)})
    assert held.dtype == torch.bfloat16
    assert distinct < held.shape[0] <= 1.5 * distinct, "each token once, and room for a quarter more"
