"""The formulas of PPO, against hand-worked cases and against the papers' sums written out in float64 NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from train_ppo import decay, minibatches, ppo_loss, turn_gae, whiten
from training.config import PPOConfig
from training.trajectories import adapt_kl_coef

settings.register_profile("formulas", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("formulas")
NUMBERS = st.floats(-3, 3, allow_subnormal=False)


def t64(*rows):
    return torch.tensor(rows, dtype=torch.float64)


# -------------------------------------------------------------------------------------------------- advantages


def gae_reference(rewards, values, bootstrap, gamma, lam):
    """Schulman et al. 2016, eqs. 12 and 16, the sum over k written out; one seat's decisions."""
    after = np.append(values[1:], bootstrap)
    delta = rewards + gamma * after - values
    steps = np.arange(len(delta))
    return np.array([((gamma * lam) ** (steps[t:] - t) @ delta[t:]) for t in steps])


@st.composite
def seats(draw):
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    shape = (len(lengths), max(lengths))
    rewards, values = (
        draw(arrays(np.float64, shape, elements=NUMBERS)),
        draw(arrays(np.float64, shape, elements=NUMBERS)),
    )
    bootstrap = draw(arrays(np.float64, len(lengths), elements=NUMBERS))
    return lengths, rewards, values, bootstrap


@given(seats(), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_papers_sum(case, gamma, lam):
    lengths, rewards, values, bootstrap = case
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    rewards_ST, values_ST, mask_ST, bootstrap_S = map(torch.from_numpy, (rewards, values, mask, bootstrap))
    got, returns = turn_gae(rewards_ST, values_ST, mask_ST, bootstrap_S, gamma, lam)
    for s, n in enumerate(lengths):
        expected = gae_reference(rewards[s, :n], values[s, :n], bootstrap[s], gamma, lam)
        np.testing.assert_allclose(got[s, :n], expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(returns[s, :n], expected + values[s, :n], rtol=0, atol=1e-12)
        assert not got[s, n:].any()
        assert not returns[s, n:].any()


def test_gae_by_hand_when_the_game_ended_and_when_it_was_cut_off():
    rewards, values = t64([0, 1], [0, 0]), t64([0.5, 0.25], [0.5, 0.25])
    mask, bootstrap = torch.ones(2, 2, dtype=torch.bool), t64(0, 2)
    got, returns = turn_gae(rewards, values, mask, bootstrap, gamma=0.9, lam=0.8)
    # ended:   delta_1 = 1 - 0.25 = 0.75            delta_0 = 0.9 * 0.25 - 0.5 = -0.275
    # cut off: delta_1 = 0.9 * 2 - 0.25 = 1.55      delta_0 = -0.275
    expected = t64([-0.275 + 0.72 * 0.75, 0.75], [-0.275 + 0.72 * 1.55, 1.55])
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(returns, expected + values)


def test_gae_at_the_ends_of_gamma_and_lambda():
    rewards, values = t64([1, 2, 4]), t64([0.5, -1, 3])
    mask, end = torch.ones(1, 3, dtype=torch.bool), t64(0)

    def returns(gamma, lam):
        return turn_gae(rewards, values, mask, end, gamma, lam)[1].tolist()[0]

    assert returns(1, 1) == [7, 6, 4]  # Monte Carlo: the sum of what is still to come
    assert returns(1, 0) == [0, 5, 4]  # TD(0): reward + next value
    assert returns(0, 1) == [1, 2, 4]  # the reward at hand only
    assert returns(0.5, 1) == [3, 4, 4]


# --------------------------------------------------------------------------------------------------- whitening


@given(arrays(np.float64, st.integers(2, 30), elements=NUMBERS))
def test_whitening_is_the_standard_score_of_the_population(x):
    if x.std() < 1e-3:
        return
    expected = (x - x.mean()) / np.sqrt(np.mean((x - x.mean()) ** 2))
    np.testing.assert_allclose(whiten(torch.from_numpy(x)), expected, atol=1e-4)


def test_equal_values_whiten_to_zero():
    assert whiten(torch.full((5,), 0.7)).abs().max() < 1e-6
    assert whiten(t64(3)).tolist() == [0]
    # The mean of equal numbers is often a rounding away from them, and so is what was added up in another order.
    for count in (9, 13, 23, 64, 128, 777):
        for value in (-0.324, 0.1, -0.461, 2.3):
            x = torch.full((count,), value)
            x[1::2] = torch.nextafter(x[1::2], torch.tensor(9.0))
            assert not whiten(x).any(), (count, value)
    assert whiten(t64(1, 2, 4), None, t64(5, 5, 5)).tolist() == whiten(t64(1, 2, 4)).tolist(), "never scaled up by less"
    assert whiten(torch.zeros(0), torch.zeros(0)).tolist() == []


def test_what_two_readings_of_one_probability_differ_by_is_no_advantage():
    """Where all games end alike in the first step, the KL penalty alone is left: that of a policy to itself."""
    read_twice = 0.2 * 4e-6 * torch.tensor([1.0, -1.0, 0.5, 0.0])  # ppo.init_kl_coef, a rounding at 60 nats in fp32
    assert not whiten(read_twice).any()
    assert not whiten(read_twice, torch.zeros(4)).any()
    assert whiten(1e3 * read_twice).std(correction=0) == pytest.approx(1, abs=1e-4)


def test_groups_are_whitened_alone_and_the_others_by_all():
    rng = np.random.default_rng(0)
    x, group = rng.normal(size=9 + 8 + 3) * 5, np.repeat([2, 0, -1], [9, 8, 3])
    mixed = rng.permutation(len(x))
    got = whiten(torch.from_numpy(x[mixed]), torch.from_numpy(group[mixed])).numpy()
    expected = (x - x.mean()) / x.std()
    for members in (group == 2, group == 0):
        expected[members] = (x[members] - x[members].mean()) / x[members].std()
    np.testing.assert_allclose(got, expected[mixed], atol=1e-6)
    times = np.array([2.0, 3.0, 4.0])[group]  # as noisy, by group; -1: the last
    noisier = whiten(*map(torch.from_numpy, (x[mixed], group[mixed], (x * times)[mixed]))).numpy()
    expected[group >= 0] /= times[group >= 0]
    expected[group < 0] *= x.std() / (x * times).std()
    np.testing.assert_allclose(noisier, expected[mixed], atol=1e-6)


# -------------------------------------------------------------------------------------------------------- loss


COLUMN_NAMES = ("logprobs_M", "values_M", "entropies_M", "old_logprobs_M", "old_values_M", "advantages_M", "returns_M")


def loss_reference(columns, weight, ppo):
    """Schulman et al. 2017, eqs. 7 and 9, with the value clipped as in their code; decision by decision."""
    logp, value, entropy, old_logp, old_value, advantage, ret = columns
    total, parts = 0.0, dict.fromkeys(("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"), 0.0)
    for m in range(len(logp)):
        ratio = math.exp(logp[m] - old_logp[m])
        clipped = min(max(ratio, 1 - ppo.cliprange), 1 + ppo.cliprange)
        surrogate = min(ratio * advantage[m], clipped * advantage[m])
        near = min(max(value[m], old_value[m] - ppo.cliprange), old_value[m] + ppo.cliprange)
        squared = max((value[m] - ret[m]) ** 2, (near - ret[m]) ** 2) / 2
        k3 = ratio - 1 - math.log(ratio)
        total += weight[m] * (-surrogate + ppo.vf_coef * squared - ppo.entropy_coef * entropy[m])
        terms = (-surrogate, squared, entropy[m], k3, float(ratio != clipped))
        parts = {name: parts[name] + weight[m] * term for name, term in zip(parts, terms, strict=True)}
    return total, parts


COLUMNS = st.integers(1, 8).flatmap(lambda n: arrays(np.float64, (7, n), elements=st.floats(-1, 1)))
CLIPS = st.builds(PPOConfig, cliprange=st.floats(0.05, 0.5), vf_coef=st.floats(0, 1), entropy_coef=st.floats(0, 0.5))


@given(COLUMNS, CLIPS, st.data())
def test_loss_and_its_parts_are_the_papers(columns, ppo, data):
    weights = np.array(
        data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=columns.shape[1], max_size=columns.shape[1]))
    )
    named = {name: torch.from_numpy(column) for name, column in zip(COLUMN_NAMES, columns, strict=True)}
    loss, stats = ppo_loss(**named, weights_M=torch.from_numpy(weights), ppo=ppo)
    expected, parts = loss_reference(columns, weights, ppo)
    assert float(loss) == pytest.approx(expected, abs=1e-12)
    assert {name: float(stats[name]) for name in parts} == pytest.approx(parts, abs=1e-12)
    assert float(stats["ratio_max"]) == pytest.approx(
        np.max((weights > 0) * np.abs(np.exp(columns[0] - columns[3]) - 1))
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # above the upper bound 1.2 and still wanted: clipped
        (0.5, 2.0, -1.0, -1.0),  # far below, but the gradient leads back
        (0.5, -2.0, 1.6, 0.0),  # below the lower bound 0.8 and still unwanted: clipped
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_clipping_by_hand(ratio, advantage, loss, gradient):
    ppo = PPOConfig(cliprange=0.2, vf_coef=0)
    logp = t64(math.log(ratio)).requires_grad_()
    zero = torch.zeros(1, dtype=torch.float64)
    got, stats = ppo_loss(logp, zero, zero, zero, zero, t64(advantage), zero, zero + 1, ppo)
    got.backward()
    assert (got.item(), logp.grad.item()) == pytest.approx((loss, gradient))
    assert float(stats["clip_fraction"]) == (ratio in (0.5, 1.5))


@pytest.mark.parametrize(
    ("value", "ret", "loss", "gradient"),
    [(0.1, 1.0, 0.405, -0.9), (0.5, 1.0, 0.32, 0.0), (0.5, 0.0, 0.125, 0.5), (-0.5, 1.0, 1.125, -1.5)],
)
def test_value_clipping_by_hand(value, ret, loss, gradient):
    """Old value 0, range 0.2: moving more than that towards the return earns nothing more."""
    ppo = PPOConfig(cliprange=0.2, vf_coef=1)
    v = t64(value).requires_grad_()
    zero = torch.zeros(1, dtype=torch.float64)
    got, _ = ppo_loss(zero, v, zero, zero, zero, zero, t64(ret), zero + 1, ppo)
    got.backward()
    assert (got.item(), v.grad.item()) == pytest.approx((loss, gradient))


def test_entropy_is_rewarded_and_a_weight_of_zero_silences_a_decision():
    ppo = PPOConfig(entropy_coef=0.5, vf_coef=1)
    columns = torch.ones(7, 2, dtype=torch.float64).requires_grad_()
    loss, _ = ppo_loss(**dict(zip(COLUMN_NAMES, columns, strict=True)), weights_M=t64(1, 0), ppo=ppo)
    loss.backward()
    assert columns.grad is not None
    assert columns.grad[2].tolist() == [-0.5, 0]
    assert not columns.grad[:, 1].any()


@pytest.mark.parametrize("p", [0.5, 0.3, 0.01])
def test_without_a_clip_range_logits_follow_the_advantage_however_rare_the_answer(p):
    """The gradient by the logits lacks the factor p down to p = 1/4, and the bonus draws each logit to their mean."""
    ppo = PPOConfig(cliprange=None, vf_coef=0, entropy_coef=0.1)
    logits = t64(p, 0.4 * (1 - p), 0.6 * (1 - p)).log().requires_grad_()
    logp = logits.log_softmax(0)
    centred, zero = logp - logp.mean(), torch.zeros(1, dtype=torch.float64)
    loss, stats = ppo_loss(
        logp[:1],
        zero,
        zero,
        logp[:1].detach() + 1,
        zero,
        t64(2),
        zero,
        zero + 1,
        ppo,
        centred[:1],
        centred @ centred / 2,
    )
    [by_logits] = torch.autograd.grad(loss, logits)
    pull = -2 * min(1 / (math.e * p), 4) * (t64(1, 0, 0) - 1 / 3)
    torch.testing.assert_close(by_logits, pull + 0.1 * centred.detach())
    assert not stats["clip_fraction"]


def test_k3_estimates_the_kl_without_bias_and_is_never_negative():
    """Over all outcomes of the old policy, weighted by it, the k3 terms sum to KL(old || new)."""
    rng = np.random.default_rng(1)
    old, new = (np.log(rng.dirichlet(np.ones(6))) for _ in range(2))
    each = []
    for a in range(6):
        zero = torch.zeros(1, dtype=torch.float64)
        _, stats = ppo_loss(t64(new[a]), zero, zero, t64(old[a]), zero, zero, zero, zero + 1, PPOConfig())
        each.append(float(stats["approx_kl"]))
    assert min(each) >= 0
    assert np.exp(old) @ each == pytest.approx(np.exp(old) @ (old - new), abs=1e-12)


# ------------------------------------------------------------------------------------------------- controllers


def test_adaptive_kl_by_hand():
    ppo = PPOConfig(target=0.1, horizon=1000)
    assert adapt_kl_coef(0.2, 0.1, 50, ppo) == 0.2  # on target
    assert adapt_kl_coef(0.2, 0.11, 50, ppo) == pytest.approx(0.2 * (1 + 0.1 * 50 / 1000))
    assert adapt_kl_coef(0.2, 9.0, 50, ppo) == pytest.approx(0.2 * 1.01)  # the error is clipped to 0.2
    assert adapt_kl_coef(0.2, -9.0, 50, ppo) == pytest.approx(0.2 * 0.99)
    assert adapt_kl_coef(0.0, 9.0, 50, ppo) == 0
    assert [adapt_kl_coef(0.2, kl, 50, ppo) for kl in (math.nan, math.inf)] == [0.2, 0.2]  # else it is never a number
    assert adapt_kl_coef(0.2, 9.0, 50, PPOConfig(adap_kl_ctrl=False)) == 0.2
    assert adapt_kl_coef(0.2, 0.0, 60_000, ppo) == pytest.approx(0.2 * 0.8)  # never below 0: that would be a reward


@given(st.floats(1e-3, 1), st.floats(-1, 1), st.integers(1, 500), st.floats(0.01, 1))
def test_adaptive_kl_is_ziegler_et_al(coef, kl, decisions, target):
    error = np.clip((kl - target) / target, -0.2, 0.2)  # their e_t; K_beta is 1 / horizon a decision
    expected = coef * (1 + error * decisions / 10_000)
    assert adapt_kl_coef(coef, kl, decisions, PPOConfig(target=target)) == pytest.approx(expected)


def test_what_decays_does_so_linearly_over_the_run():
    ppo = PPOConfig(num_train_steps=5)
    assert [decay(ppo, step, 0.2) for step in range(5)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert decay(PPOConfig(num_train_steps=1), 0, 0.2) == 1
    assert decay(PPOConfig(), 5000, 1.0) == 1


def test_minibatches_are_a_new_shuffle_every_epoch_and_step():
    ppo = PPOConfig(batch_size=12, mini_batch_size=2, gradient_accumulation_steps=3)
    cut = minibatches(12, ppo, (0, 0, 0))
    assert [len(part) for part in cut] == [6, 6]
    assert sorted(cut[0] + cut[1]) == list(range(12))
    assert minibatches(12, ppo, (0, 0, 0)) == cut
    others = [minibatches(12, ppo, key) for key in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert all(other != cut for other in others)
    assert [len(part) for part in minibatches(11, ppo, (0, 0, 0))] == [6, 5]  # an episode failed
    assert [len(part) for part in minibatches(14, ppo, (0, 0, 0))] == [6, 8]  # two games would be a step of their own
    assert [len(part) for part in minibatches(2, ppo, (0, 0, 0))] == [2]
