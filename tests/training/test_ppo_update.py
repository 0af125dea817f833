"""The update through a real, tiny Qwen: its gradient, its ratio, and what happens when something goes wrong."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import base_model, micro_config, rollout, tiny_policy
from torch.nn.utils import clip_grad_norm_
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

import train_ppo
from env_wrapper import Episode, Sequence, play
from policy import network
from policy.rehearsal import divergence, read_by_base
from train_ppo import Trainer, TrainingError, _backward, collate, minibatches, ppo_loss, ppo_update
from training import trajectories
from training.config import PPOConfig
from training.process import StopSignal
from utils import pack_optimizer

WHOLE = PPOConfig(
    batch_size=8, mini_batch_size=8, ppo_epochs=1, vf_coef=0.5, entropy_coef=0.1, max_grad_norm=1e9, target_kl=None,
    recompute_logprobs=False, learning_rate=1e-2, legal_mass_coef=0.0, gamma=0.99,
)  # fmt: skip


@pytest.fixture
def float64(monkeypatch):
    """Lift what is fixed to float32: rounding no longer hides a difference of formulas."""

    def norm(self, x):
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    base_model()  # kept for the tests to come: in float64 other numbers would be drawn
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def policy64(folder):
    policy = tiny_policy(folder)
    policy.peft_model.double()
    policy.value_head.double()
    return policy


def played(policy, history=0, ppo=WHOLE):
    """A batch whose old log-probabilities and values are off the policy's, so that some decisions are clipped."""
    batch = collate(rollout(policy, 8, history=history), policy, ppo, 0.1)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(2, len(batch.values_M), generator=generator) * 0.15
    return replace(batch, old_logprobs_M=batch.old_logprobs_M + noise[0], values_M=batch.values_M + noise[1])


class Recorder:
    """An optimizer that keeps the gradient instead of following it."""

    def __init__(self, policy):
        self.parameters = policy.trainable()
        self.gradients = []

    def step(self):
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters.values()]))

    def zero_grad(self, set_to_none):
        for parameter in self.parameters.values():
            parameter.grad = None


def gradient(policy, batch, ppo=WHOLE):
    """The gradient of the one optimizer step that ``ppo`` makes of the batch."""
    recorder = Recorder(policy)
    ppo_update(policy, recorder, batch, ppo, (0,))  # type: ignore[arg-type]
    [only] = recorder.gradients
    return only


def weights(policy):
    return {name: p.detach().numpy().tobytes() for name, p in policy.trainable().items()}


def states_of(policy):
    """A state head for the games of ``rollout``, with opinions."""
    policy.learn_states({"tic_tac_toe": [27], "leduc_poker": [30], "hex_small": [144]})
    with torch.no_grad():
        for parameter in policy.state_head.parameters():
            parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(2))
    return policy.state_head


def adam(policy, lr=1e-2):
    return torch.optim.AdamW(list(policy.trainable().values()), lr=lr, weight_decay=0.0)


# ---------------------------------------------------------------------------------------------------- gradient


@pytest.mark.usefixtures("float64")
def test_the_whole_losss_gradient_is_that_of_finite_differences(tmp_path):
    """Through the network, all terms on: along random directions, and for one coordinate of every tensor."""
    policy = policy64(tmp_path)
    ppo = replace(WHOLE, legal_mass_coef=0.05, rehearsal_coef=0.7, state_coef=0.01)
    states_of(policy).double()
    batch = played(policy, ppo=ppo)
    batch = replace(batch, texts=read_by_base(policy, [[5, 1, 4, 4, 2], [3, 9, 2]]))
    members = list(range(len(batch.sequences)))
    names, parameters = zip(*policy.trainable().items(), strict=True)

    start = [p.detach().clone() for p in parameters]

    def loss_at(deltas):
        with torch.no_grad():
            for parameter, origin, delta in zip(parameters, start, deltas, strict=True):
                parameter.copy_(origin + delta)
        return float(_backward(policy, batch, members, ppo)[0])

    loss_at([0.0] * len(parameters))
    gradients = [p.grad.clone() for p in parameters]
    generator = torch.Generator().manual_seed(1)
    directions = [[torch.randn(p.shape, generator=generator) for p in parameters] for _ in range(3)]
    for i, g in enumerate(gradients):
        one = [torch.zeros_like(p) for p in parameters]
        one[i].view(-1)[g.abs().argmax()] = 1.0
        directions.append(one)
    h = 1e-6
    for direction, name in zip(directions, ["random"] * 3 + list(names), strict=True):
        above = loss_at([h * d for d in direction])
        below = loss_at([-h * d for d in direction])
        slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
        assert (above - below) / (2 * h) == pytest.approx(slope, rel=1e-5, abs=1e-8), name
        assert slope != 0, name


def test_states_count_as_decisions_do_and_are_told_so(tmp_path):
    policy, ppo = tiny_policy(tmp_path), replace(WHOLE, state_coef=0.7)
    head = states_of(policy)
    batch = played(policy, ppo=ppo)
    weights_M = torch.linspace(0, 1, len(batch.values_M))
    batch = replace(batch, weights_M=weights_M)
    with torch.no_grad():
        nats_M = head(policy.evaluate_batch(batch.sequences).prompts, batch.states)
    mean = float((weights_M * nats_M).sum() / weights_M.sum())
    stats = ppo_update(policy, Recorder(policy), batch, ppo, (0,))
    assert stats["state_loss"] == pytest.approx(mean, rel=1e-4)
    members = list(range(len(batch.sequences)))
    with_states, without = (_backward(policy, batch, members, ppo)[0] for ppo in (ppo, WHOLE))
    assert float(with_states - without) == pytest.approx(0.7 * mean, rel=1e-4)
    assert "state_loss" not in ppo_update(policy, Recorder(policy), batch, WHOLE, (0,))


def test_the_state_heads_own_gradient_is_no_part_of_the_norm(tmp_path):
    policy, ppo = tiny_policy(tmp_path), replace(WHOLE, state_coef=0.1, max_grad_norm=0.01)
    states_of(policy)
    batch, norms = played(policy, ppo=ppo), []
    clipped, whole = (Recorder(policy), Recorder(policy))
    for recorder, limit in ((clipped, 0.01), (whole, 1e9)):
        norms.append(ppo_update(policy, recorder, batch, replace(ppo, max_grad_norm=limit), (0,))["grad_norm"])
    own = sum(p.numel() for p in policy.state_head.parameters())
    [cut], [full] = clipped.gradients, whole.gradients
    assert float(cut[:-own].norm()) == pytest.approx(0.01, rel=1e-4)
    assert norms == pytest.approx([float(full[:-own].norm())] * 2, rel=1e-4)
    assert_close(cut[-own:], full[-own:])
    assert full[-own:].norm() > 1


def test_what_is_rehearsed_counts_by_its_mean_token_and_is_told_so(tmp_path):
    policy = tiny_policy(tmp_path)
    texts = read_by_base(policy, [[5, 1, 4, 4, 2], [3, 9, 2]])
    kl = divergence(policy, texts).item() / 8
    batch = replace(played(policy), texts=texts)
    assert ppo_update(policy, Recorder(policy), batch, replace(WHOLE, rehearsal_coef=0.7), (0,))["rehearsal_kl"] == (
        pytest.approx(kl, rel=1e-4))  # fmt: skip
    members = list(range(len(batch.sequences)))
    with_texts, without = (_backward(policy, b, members, replace(WHOLE, rehearsal_coef=0.7))[0]
                           for b in (batch, replace(batch, texts=())))  # fmt: skip
    assert float(with_texts - without) == pytest.approx(0.7 * kl, rel=1e-3)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("tokens", "shared"), [(4096, 10**6), (80, 10**6), (4096, 1), (80, 1)])
@pytest.mark.parametrize(("mini", "accumulation"), [(8, 1), (4, 2), (1, 8)])
def test_the_gradient_is_that_of_the_whole_step_however_it_is_cut(
    tmp_path, monkeypatch, mini, accumulation, tokens, shared
):
    """Into micro-batches, and with the system message read once for many sequences or anew for each."""
    policy = policy64(tmp_path)
    batch = played(policy)
    new = policy.evaluate_decisions(batch.sequences)
    loss, _ = ppo_loss(
        new.logprobs, new.values, new.entropies, batch.old_logprobs_M, batch.values_M, batch.advantages_M,
        batch.returns_M, batch.weights_M, WHOLE,
    )  # fmt: skip
    expected = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss / batch.weights_M.sum(), policy.trainable().values())]
    )
    monkeypatch.setattr(network, "SHARED_PREFIX_MIN", shared)
    policy.tokens_per_batch = tokens
    got = gradient(policy, batch, replace(WHOLE, mini_batch_size=mini, gradient_accumulation_steps=accumulation))
    assert float((got - expected).norm() / expected.norm()) < 1e-10
    assert abs(float((got - expected).mean())) < 1e-12


@pytest.mark.usefixtures("float64")
def test_without_a_clip_range_an_update_follows_preferences(tmp_path):
    """The policy's are those of its probabilities (of two answers: half the log of their ratio); values are free."""
    policy, ppo = policy64(tmp_path), replace(WHOLE, cliprange=None)
    batch = played(policy)
    new = policy.evaluate_batch(batch.sequences, preferences=True)
    of_two = torch.tensor([[len(a) for a in d.allowed] == [2] for s in batch.sequences for d in s.decisions])
    assert of_two.any()
    half_M = (new.logprobs - (-new.logprobs.exp()).log1p())[of_two] / 2
    assert_close(new.preferences[of_two], half_M, rtol=0, atol=1e-12)
    assert_close(new.spread[of_two], half_M**2, rtol=0, atol=1e-12)
    policy_M = -batch.advantages_M * (-batch.old_logprobs_M).exp().clamp(max=train_ppo.NEURD_CAP) * new.preferences
    value_M = 0.5 * (new.values - batch.returns_M) ** 2
    loss = (batch.weights_M * (policy_M + 0.5 * value_M + 0.1 * new.spread)).sum() / batch.weights_M.sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, policy.trainable().values())])
    got = gradient(policy, batch, ppo)
    assert float((got - expected).norm() / expected.norm()) < 1e-10


@pytest.mark.usefixtures("float64")
def test_a_game_in_one_sequence_is_scored_like_its_decisions_one_by_one(tmp_path):
    policy = policy64(tmp_path)
    packed = played(policy, history="all")
    assert max(len(s.decisions) for s in packed.sequences) >= 3
    alone = [Sequence(s.ids[: d.stop], [d], s.shared) for s in packed.sequences for d in s.decisions]
    unit = [u for s, u in zip(packed.sequences, packed.unit, strict=True) for _ in s.decisions]
    for one, other in zip(policy.evaluate_decisions(packed.sequences), policy.evaluate_decisions(alone), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    expected = gradient(policy, packed)
    got = gradient(policy, replace(packed, sequences=alone, unit=unit))
    assert float((got - expected).norm() / expected.norm()) < 1e-10


@pytest.mark.usefixtures("float64")
def test_decisions_that_are_not_trained_have_no_gradient(tmp_path):
    policy = policy64(tmp_path)
    batch = played(policy)
    rows = batch.spans[0]
    silent = replace(batch, weights_M=batch.weights_M.index_fill(0, rows, 0.0))
    loud = {name: getattr(silent, name).index_fill(0, rows, 5.0) for name in ("advantages_M", "returns_M")}
    expected = gradient(policy, silent)
    assert float((gradient(policy, replace(silent, **loud)) - expected).abs().max()) < 1e-12
    assert float((gradient(policy, batch) - expected).abs().max()) > 1e-6


# ------------------------------------------------------------------------------------------------------- ratio


@pytest.mark.parametrize("history", [0, "all"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_first_ratio_is_one(tmp_path, history, temperature):
    policy = tiny_policy(tmp_path, ppo={"temperature": temperature})
    batch = collate(rollout(policy, 8, history=history), policy, WHOLE, 0.0)
    stats = ppo_update(policy, Recorder(policy), batch, WHOLE, (0,))  # type: ignore[arg-type]
    assert stats["ratio_max"] < 1e-5
    assert stats["clip_fraction"] == 0
    old_M = collate(rollout(policy, 8, history=history), policy, replace(WHOLE, recompute_logprobs=True), 0.0)
    new = policy.evaluate_decisions(old_M.sequences)
    assert torch.equal(new.logprobs, old_M.old_logprobs_M)  # the same batch: the same bits


def test_the_gap_to_the_sampler_is_that_of_the_first_minibatch(tmp_path):
    """Read before the weights move, which they do far in this step: the gaps of later minibatches say nothing of it."""
    policy, ppo, key = tiny_policy(tmp_path), replace(WHOLE, ppo_epochs=2, mini_batch_size=2), (0,)
    batch = played(policy)
    first = [i for game in minibatches(8, ppo, (*key, 0))[0] for i in batch.games[game]]
    at_M = torch.cat([batch.spans[i] for i in first])
    with torch.no_grad():
        gap_M = (policy.evaluate_decisions(batch.sequences).logprobs - batch.old_logprobs_M)[at_M].abs()
    stats = ppo_update(policy, adam(policy, 3e-1), batch, ppo, key)
    assert stats["logprob_gap_mean"] == pytest.approx(float(gap_M.mean()), rel=1e-4)
    assert stats["logprob_gap_max"] == pytest.approx(float(gap_M.max()), rel=1e-4)
    assert stats["ratio_max"] > float(gap_M.exp().max())


@pytest.mark.parametrize("recompute", [False, True])
def test_a_row_tells_the_gap_of_the_whole_batch_where_it_is_known(tmp_path, monkeypatch, recompute):
    real = train_ppo.ppo_update
    monkeypatch.setattr(train_ppo, "ppo_update", lambda *args: real(*args) | {"logprob_gap_mean": 5.0})
    trainer = Trainer(micro_config(tmp_path, ppo={"recompute_logprobs": recompute}), tmp_path)
    with StopSignal() as stop:
        row = trainer.step(stop)
    assert (row["logprob_gap_mean"] < 1e-4) if recompute else (row["logprob_gap_mean"] == 5.0)
    assert 0 <= row["logprob_gap_max"] < 1e-4


class ByRows(TorchDispatchMode):
    """Products in bf16 whose sums are rounded in four parts where there are few rows, as some kernels of GPUs do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and out.dtype == torch.bfloat16:
            a, b = args[-2:]
            if len(a) <= 16:
                parts = zip(a.chunk(4, 1), b.chunk(4, 0), strict=True)
                out = sum((func(*args[:-2], *part) if not i else part[0] @ part[1]) for i, part in enumerate(parts))
        return out


def test_kernels_that_switch_with_the_rows_leave_a_small_gap_and_it_is_told(tmp_path):
    """Rollouts read a few rows at a time, updates all of them: in bf16 they do not agree to the bit."""
    means = []
    for emulated in (ByRows(), nullcontext()):
        policy = tiny_policy(tmp_path, model={"dtype": "bfloat16"})
        with emulated:
            batch = collate(rollout(policy, 8, history="all"), policy, WHOLE, 0.0)
            stats = ppo_update(policy, adam(policy), batch, WHOLE, (0,))
        means.append(stats["logprob_gap_mean"])
        assert stats["logprob_gap_max"] < 0.1
    assert 3 * means[1] < means[0] < 0.02


def test_rollout_values_are_those_that_the_update_reads(tmp_path):
    policy = tiny_policy(tmp_path)
    batch = collate(rollout(policy, 8, history="all"), policy, WHOLE, 0.0)
    torch.testing.assert_close(policy.evaluate_decisions(batch.sequences).values, batch.values_M, rtol=0, atol=1e-5)
    assert batch.values_M.std() > 0.01


def test_the_kl_is_taken_to_the_model_without_its_adapter(tmp_path):
    policy = tiny_policy(tmp_path)
    batch = collate(rollout(policy, 8), policy, WHOLE, 0.1)
    with torch.no_grad():
        own = policy.evaluate_decisions(batch.sequences).logprobs
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.zero_()
        base = policy.evaluate_decisions(batch.sequences).logprobs
    assert batch.kl_ref == pytest.approx(float((own - base).mean()), abs=1e-5)
    assert abs(batch.kl_ref) > 0.01


# ------------------------------------------------------------------------------------------------------ epochs


def test_epochs_end_when_the_policy_has_moved_far_enough(tmp_path):
    runs = {}
    for target in (None, 1e-4, 1e9):
        policy = tiny_policy(tmp_path)
        batch = collate(rollout(policy, 8), policy, WHOLE, 0.0)
        ppo = replace(WHOLE, ppo_epochs=4, mini_batch_size=4, target_kl=target)
        runs[target] = ppo_update(policy, adam(policy, 3e-2), batch, ppo, (0,))
    assert {target: stats["epochs"] for target, stats in runs.items()} == {None: 4, 1e-4: 1, 1e9: 4}
    assert runs[None]["updates"] == 8
    assert runs[None] == runs[1e9]


def test_what_ends_the_epochs_is_the_divergence_seen_in_the_last(tmp_path):
    """Not the mean since the first, in which one late jump would hardly show."""

    def stats(epochs, target=None):
        policy = tiny_policy(tmp_path)
        batch = collate(rollout(policy, 8), policy, WHOLE, 0.0)
        ppo = replace(WHOLE, ppo_epochs=epochs, mini_batch_size=4, target_kl=target)
        return ppo_update(policy, adam(policy, 3e-2), batch, ppo, (0,))

    means = [stats(epochs)["approx_kl"] for epochs in range(1, 5)]  # of all epochs so far
    own = [n * mean - (n - 1) * before for n, mean, before in zip(range(1, 5), means, [0, *means], strict=False)]
    last = max(range(4), key=lambda i: own[i])  # a target below it, above the others and above the mean since the first
    target = (own[last] + max(means[last], *own[:last], 0.0)) / 2
    assert max(means[last], *own[:last]) < target < own[last]
    assert stats(4, target)["epochs"] == last + 1


def test_every_epoch_has_a_shuffle_of_its_own(tmp_path, monkeypatch):
    policy, keys = tiny_policy(tmp_path), []
    batch = played(policy)

    def recorded(units, ppo, key):
        keys.append(key)
        return minibatches(units, ppo, key)

    monkeypatch.setattr(train_ppo, "minibatches", recorded)
    ppo_update(policy, adam(policy), batch, replace(WHOLE, ppo_epochs=3), (7, 5))
    assert keys == [(7, 5, 0), (7, 5, 1), (7, 5, 2)]


def test_statistics_are_means_over_decisions(tmp_path):
    """With a learning rate of 0 every epoch sees the same policy, so its statistics are those of one pass."""
    policy = tiny_policy(tmp_path)
    batch = played(policy)
    new = policy.evaluate_decisions(batch.sequences)
    _, sums = ppo_loss(
        new.logprobs, new.values, new.entropies, batch.old_logprobs_M, batch.values_M, batch.advantages_M,
        batch.returns_M, batch.weights_M, WHOLE,
    )  # fmt: skip
    stats = ppo_update(policy, adam(policy, 0.0), batch, replace(WHOLE, ppo_epochs=3, mini_batch_size=2), (0,))
    for name, total in sums.items():
        if name in train_ppo.GAPS:  # of the first minibatch alone
            continue
        scale = 1 if name == "ratio_max" else float(batch.weights_M.sum())
        assert stats[name] == pytest.approx(float(total) / scale, rel=1e-4, abs=1e-6), name
    assert stats["updates"] == 12


def test_the_learning_rate_and_the_clipped_norm_reach_the_parameters(tmp_path):
    """Plain gradient descent: the step is the gradient, scaled to the greatest norm, times the learning rate."""
    policy = tiny_policy(tmp_path)
    batch = played(policy)
    g = gradient(policy, batch)
    before = torch.cat([p.detach().flatten() for p in policy.trainable().values()])
    sgd = torch.optim.SGD(policy.trainable().values(), lr=0.5)
    stats = ppo_update(policy, sgd, batch, replace(WHOLE, max_grad_norm=0.01), (0,))
    after = torch.cat([p.detach().flatten() for p in policy.trainable().values()])
    torch.testing.assert_close(after, before - 0.5 * 0.01 * g / g.norm(), rtol=0, atol=1e-6)
    assert stats["grad_norm"] == pytest.approx(float(g.norm()), rel=1e-4)


def test_the_norm_that_is_told_is_the_mean_over_minibatches(tmp_path, monkeypatch):
    norms = []
    monkeypatch.setattr(train_ppo, "clip_grad_norm_", lambda *args: norms.append(clip_grad_norm_(*args)) or norms[-1])
    policy = tiny_policy(tmp_path)
    stats = ppo_update(policy, adam(policy), played(policy), replace(WHOLE, mini_batch_size=2, ppo_epochs=2), (0,))
    assert len(norms) == stats["updates"] == 8
    assert stats["grad_norm"] == pytest.approx(float(sum(norms)) / 8)


def test_a_step_hands_on_what_it_was_told(tmp_path, monkeypatch):
    """The fading bonus to the update, the KL to the reference (not to the average) to its coefficient, that and the
    moments of rewards to the next step, and to the curriculum every game but those that were cut off."""
    knobs = {"entropy_coef": 0.5, "entropy_final": 0.2, "num_train_steps": 5, "magnet_coef": 0.1, "init_kl_coef": 0.01}
    trainer = Trainer(micro_config(tmp_path, ppo=knobs, run={"seed": 7}), tmp_path)
    seen, told, scored, collated, ended = [], [], [], [], []
    real, keys = ppo_update, []

    def update(*args):
        seen.append(args[3].entropy_coef)
        keys.append(args[4])
        return real(*args)

    monkeypatch.setattr(train_ppo, "ppo_update", update)
    monkeypatch.setattr(trajectories, "adapt_kl_coef", lambda coef, *args: told.append(args[:2]) or 2 * coef)
    monkeypatch.setattr(trainer.curriculum, "update", lambda task, *args: scored.append((task.index, *args)))

    def recorded(episodes, policy, ppo, coef, moments, ranks):
        collated.append((coef, dict(moments)))
        return collate(episodes, policy, ppo, coef, moments, ranks)

    def cut(env, player, tasks):
        episodes, stage = play(env, player, tasks), trainer.curriculum.stage
        ended.extend((e.task.index, e.score if e.task.index % 4 != 1 else None, stage) for e in episodes)
        return [replace(e, outcome="truncated") if e.task.index % 4 == 1 else e for e in episodes]

    monkeypatch.setattr(train_ppo, "collate", recorded)
    monkeypatch.setattr(train_ppo, "play", cut)
    rows, moments = [], [{}]
    for _ in range(3):
        rows.append(trainer.step(StopSignal()))
        moments.append(dict(trainer.state.moments))
    assert seen == pytest.approx([0.5, 0.4, 0.3])
    assert keys == [(7, 0), (7, 1), (7, 2)], "of the shuffles"
    assert told == [(row["kl_ref"], row["decisions"]) for row in rows]
    assert told[2][0] not in (0, rows[2]["kl_average"])
    assert [coef for coef, _ in collated] == pytest.approx([0.01, 0.02, 0.04])
    assert [held for _, held in collated] == moments[:3]
    assert max(updates for updates, *_ in moments[3].values()) == 3
    assert scored == ended
    assert len({score for _, score, _ in ended}) > 1
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0


def test_updates_that_are_not_finite_are_counted_across_steps(tmp_path, monkeypatch):
    """A step may hold fewer updates than may be bad in a row."""
    knobs = {"mini_batch_size": 16, "ppo_epochs": 1}
    trainer = Trainer(micro_config(tmp_path, ppo=knobs), tmp_path)
    real, counted = train_ppo.ppo_loss, []

    def loss(*args):
        total, stats = real(*args)
        return (total if len(counted) == 2 else total * torch.nan), stats

    monkeypatch.setattr(train_ppo, "ppo_loss", loss)
    for _ in range(4):
        trainer.step(StopSignal())
        counted.append(trainer.state.bad_updates)
    assert counted == [1, 2, 0, 1]


@pytest.mark.parametrize("outcome", ["finished", "forfeited", "failed"])
def test_a_step_goes_on_playing_until_there_is_a_decision_to_train_on(tmp_path, monkeypatch, outcome):
    """In euchre and liars_dice_small others may end a game first, and a past self may forfeit it: a run of two games a
    step met that now and then, and could not be resumed either."""
    trainer = Trainer(micro_config(tmp_path), tmp_path)
    drawn: list[int] = []

    def over_early(env, player, tasks):
        drawn.extend(task.index for task in tasks)
        episodes = play(env, player, tasks)
        if tasks[0].index >= 32:
            return episodes
        lost = [replace(e, outcome=outcome, info=e.info | {"error": "lost"}) for e in episodes[: outcome == "failed"]]
        told = outcome if not lost else "finished"  # beside one game that failed, with its decisions
        return [*lost, *(replace(e, sequences={}, outcome=told) for e in episodes[len(lost) :])]

    monkeypatch.setattr(train_ppo, "play", over_early)
    row = trainer.step(StopSignal())
    assert drawn == list(range(48))
    assert (row["games"], sum(row["opponents"].values()), trainer.state.drawn) == (48, 48, 48)
    assert row["decisions"] >= 16
    assert row["updates"] > 0


def test_the_curriculum_learns_which_games_failed(tmp_path, monkeypatch):
    """Learnability drew a game that a server cannot play as one that is won half the time, until it ended the run."""
    trainer = Trainer(micro_config(tmp_path), tmp_path)
    update, told = trainer.curriculum.update, []
    monkeypatch.setattr(trainer.curriculum, "update", lambda *args: told.append(args[:2]) or update(*args))

    def first_fails(env, player, tasks):
        first, *others = play(env, player, tasks)
        return [replace(first, outcome="failed", info={"error": "lost"}), *others]

    monkeypatch.setattr(train_ppo, "play", first_fails)
    assert trainer.step(StopSignal())["failed"] == 1
    assert [task.index for task, _ in told] == list(range(16))
    assert [score is None for _, score in told] == [True] + [False] * 15


@pytest.mark.parametrize(
    ("outcome", "times", "cause"),
    [
        ("finished", 3, "no episode of this step holds a decision"),
        ("failed", 1, "16 of 16 episodes failed; the first: lost"),
    ],
)
def test_a_step_does_not_play_for_ever_what_holds_no_decision(tmp_path, monkeypatch, outcome, times, cause):
    trainer = Trainer(micro_config(tmp_path), tmp_path)
    played: list[int] = []

    def empty(env, player, tasks):
        played.append(len(tasks))
        return [Episode(task, "a", 0.5, outcome, info={"scores": {0: 0.5}, "error": "lost"}) for task in tasks]

    monkeypatch.setattr(train_ppo, "play", empty)
    monkeypatch.setattr(train_ppo, "MOST_EMPTY", 3)
    with pytest.raises(TrainingError, match=cause):
        trainer.step(StopSignal())
    assert played == [16] * times
    assert trainer.state.drawn == 0


def test_legal_mass_is_rewarded(tmp_path):
    policy = tiny_policy(tmp_path)
    batch = played(policy)
    batch = replace(batch, advantages_M=torch.zeros_like(batch.advantages_M))
    with torch.no_grad():
        before = policy.evaluate_decisions(batch.sequences, legal_mass=True).legal_mass.mean()
    ppo = replace(WHOLE, legal_mass_coef=1.0, vf_coef=0.0, entropy_coef=0.0)
    ppo_update(policy, adam(policy), batch, ppo, (0,))
    with torch.no_grad():
        assert policy.evaluate_decisions(batch.sequences, legal_mass=True).legal_mass.mean() > before + 0.1


def test_what_the_update_reads_of_the_legal_mass_is_that_of_a_pass_of_its_own(tmp_path):
    """By hand: the whole-vocabulary probability of what was allowed after each token; scores are not moved by it."""
    policy = tiny_policy(tmp_path)
    batch = played(policy)
    with torch.no_grad():
        plain, both = (policy.evaluate_decisions(batch.sequences, legal_mass=asked) for asked in (False, True))
        expected = []
        for s in batch.sequences:
            logp_TV = policy.base(torch.tensor([s.ids]), use_cache=False).logits[0].log_softmax(-1)
            for d in s.decisions:
                allowed = {p: [s.ids[p + 1]] for p in range(d.start - 1, d.stop - 1)}
                allowed |= dict(zip(d.positions, d.allowed, strict=True))
                expected.append(sum(logp_TV[p, ids].logsumexp(-1) for p, ids in allowed.items()))
    assert plain.legal_mass is None
    torch.testing.assert_close(both.legal_mass, torch.stack(expected), rtol=0, atol=1e-4)
    torch.testing.assert_close(tuple(both[:3]), tuple(plain[:3]), rtol=0, atol=1e-5)
    stats = ppo_update(policy, adam(policy, 0.0), batch, replace(WHOLE, legal_mass_coef=1e-9), (0,))
    assert stats["legal_mass"] == pytest.approx(float(both.legal_mass.exp().mean()), rel=1e-3)
    assert "legal_mass" not in ppo_update(policy, adam(policy, 0.0), batch, WHOLE, (0,))


# ------------------------------------------------------------------------------------------------------ faults


def spoiled(batch, policy, kind):
    """Make the loss not a number, or a head's gradient (or its norm alone) infinite while the loss is finite."""
    if kind != "loss":
        head, _, factor = kind.partition(" ")
        handle = next(policy.heads[head].parameters()).register_hook(lambda g: g * float(factor or "inf"))
        return batch, handle.remove
    advantages_M = batch.advantages_M.clone()
    advantages_M[-1] = torch.nan
    return replace(batch, advantages_M=advantages_M), lambda: None


@pytest.mark.parametrize("kind", ["loss", "value_head", "value_head 1e30", "state_head"])
def test_what_is_not_finite_changes_no_byte_and_is_counted(tmp_path, kind):
    policy, ppo = tiny_policy(tmp_path), replace(WHOLE, state_coef=0.1)
    states_of(policy)
    batch, optimizer = played(policy, ppo=ppo), adam(policy)
    ppo_update(policy, optimizer, batch, ppo, (0,))  # the optimizer has moments now

    def everything():
        tensors, rest = pack_optimizer(optimizer, list(policy.trainable()))
        return weights(policy), {name: t.numpy().tobytes() for name, t in tensors.items()}, rest

    before = everything()
    bad, restore = spoiled(batch, policy, kind)
    stats = ppo_update(policy, optimizer, bad, ppo, (0,))
    assert everything() == before
    assert (stats["skipped"], stats["updates"], stats["epochs"]) == (1, 0, 1)
    assert np.isnan([stats[name] for name in ("entropy", "grad_norm", "ratio_max")]).all()
    restore()
    good = ppo_update(policy, optimizer, batch, ppo, (0,))
    assert (good["skipped"], good["updates"]) == (0, 1)
    assert everything() != before
    assert good.keys() == stats.keys()


def test_one_bad_minibatch_leaves_the_others_and_their_statistics_alone(tmp_path):
    policy = tiny_policy(tmp_path)
    bad, _ = spoiled(played(policy), policy, "loss")
    stats = ppo_update(policy, adam(policy), bad, replace(WHOLE, mini_batch_size=4), (0,))
    assert (stats["skipped"], stats["updates"]) == (1, 1)
    assert all(np.isfinite(value) for value in stats.values())


def test_bad_minibatches_are_counted_in_a_row_across_steps_and_end_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(train_ppo, "MAX_BAD_UPDATES", 3)
    policy = tiny_policy(tmp_path)
    batch, optimizer = played(policy), adam(policy)
    bad, _ = spoiled(batch, policy, "loss")
    ppo = replace(WHOLE, mini_batch_size=1, ppo_epochs=2)  # one game of eight is bad
    last = [games for epoch in range(2) for games in minibatches(8, ppo, (0, epoch))].index([7])
    stats = ppo_update(policy, optimizer, bad, ppo, (0,), 2)
    assert (stats["skipped"], stats["updates"], stats["bad_updates"]) == ((1, 0, 3) if last == 0 else (2, 14, 0))
    whole = replace(ppo, mini_batch_size=8)
    stats = ppo_update(policy, optimizer, bad, whole, (0,), 0)
    assert (stats["skipped"], stats["bad_updates"]) == (2, 2)
    before = weights(policy)
    stats = ppo_update(policy, optimizer, bad, whole, (0,), 2)
    assert (stats["skipped"], stats["bad_updates"], stats["epochs"]) == (1, 3, 1)
    assert weights(policy) == before
    assert ppo_update(policy, optimizer, batch, whole, (0,), 2)["bad_updates"] == 0


def test_a_minibatch_is_a_mean_however_little_its_decisions_weigh(tmp_path):
    """Importance weights may add up to less than one decision."""
    policy = tiny_policy(tmp_path)
    batch, found = played(policy), []
    for scale in (1.0, 1e-3):
        members = list(range(len(batch.sequences)))
        _backward(policy, replace(batch, weights_M=scale * batch.weights_M), members, WHOLE)
        found.append([p.grad.clone() for p in policy.trainable().values() if p.grad is not None])
        for parameter in policy.trainable().values():
            parameter.grad = None
    for ours, others in zip(*found, strict=True):
        assert_close(ours, others, rtol=1e-3, atol=1e-7)


def test_a_minibatch_of_games_that_were_cut_off_moves_nothing(tmp_path):
    policy = tiny_policy(tmp_path)
    batch, optimizer = played(policy), adam(policy)
    ppo_update(policy, optimizer, batch, WHOLE, (0,))
    before = weights(policy)
    nothing = replace(batch, weights_M=torch.zeros_like(batch.weights_M))
    assert ppo_update(policy, optimizer, nothing, WHOLE, (0,))["updates"] == 0
    assert weights(policy) == before, "momentum alone moved the weights"
    some = batch.weights_M.clone()
    some[torch.cat([batch.spans[i] for i in batch.games[0]])] = 0.0
    stats = ppo_update(policy, optimizer, replace(batch, weights_M=some), replace(WHOLE, mini_batch_size=1), (0,))
    assert (stats["updates"], stats["skipped"]) == (7, 0)
    assert all(np.isfinite(value) for value in stats.values())


def out_of_memory(monkeypatch, *calls):
    """Let the backward passes of these numbers run out of memory."""
    real, count = torch.Tensor.backward, iter(range(10**6))

    def backward(self, *args, **kwargs):
        if next(count) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", backward)


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("at", [0, 1])
def test_running_out_of_memory_halves_the_batch_and_changes_nothing_else(tmp_path, monkeypatch, at):
    """In the first or in the second micro-batch of the first minibatch: the result is that of starting small."""
    results = []
    for tokens, calls in ((128, (at,)), (64, ())):
        policy = tiny_policy(tmp_path)
        batch, optimizer = played(policy), adam(policy)
        policy.tokens_per_batch = tokens
        out_of_memory(monkeypatch, *calls)
        stats = ppo_update(policy, optimizer, batch, replace(WHOLE, ppo_epochs=2, mini_batch_size=8), (0,))
        monkeypatch.undo()
        assert policy.tokens_per_batch == 64
        results.append((stats, weights(policy)))
    assert results[0] == results[1]


@pytest.mark.usefixtures("frozen")
def test_no_memory_for_a_single_sequence_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    policy = tiny_policy(tmp_path)
    batch = played(policy)
    out_of_memory(monkeypatch, *range(100))
    with pytest.raises(TrainingError, match=r"lower ppo\.max_seq_length"):
        ppo_update(policy, adam(policy), batch, WHOLE, (0,))
