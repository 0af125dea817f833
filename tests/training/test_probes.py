"""Probe games: each is learnt, and each of the faults planted in PPO is found by its own probe and by no other."""

from collections.abc import Callable

import pytest
from probes import PROBES, run

import train_ppo
from policy.player import Policy
from training.trajectories import Trajectory

advantages, turn_gae, ppo_loss, allowed = train_ppo.advantages, train_ppo.turn_gae, train_ppo.ppo_loss, Policy._allowed


def learns_the_opposite(logprobs, values, entropies, old_logprobs, old_values, advantages_M, returns, *rest):
    return ppo_loss(logprobs, values, entropies, old_logprobs, old_values, advantages_M, -returns, *rest)


def goes_on_after_the_end(rewards_M, values_M, trained_M, lengths_S, bootstrap_S, ppo):
    return advantages(rewards_M, values_M, trained_M, lengths_S, values_M[lengths_S.cumsum(0) - 1], ppo)


def trains_the_next_one(rewards_M, values_M, trained_M, *rest):
    if not hasattr(trained_M, "shifted"):  # advantages are computed with luck and without, from one mask
        trained_M.copy_(trained_M.roll(1))
        trained_M.shifted = True
    return advantages(rewards_M, values_M, trained_M, *rest)


def allows_what_another_state_does(self, of_each):
    kinds = sorted({tuple(ids) for ids in of_each})
    return allowed(self, [list(kinds[kinds.index(tuple(ids)) - 1]) for ids in of_each])


def pays_the_turn_before(rewards_ST, *rest):
    advantages_ST, returns_ST = turn_gae(rewards_ST, *rest)
    return advantages_ST.roll(-1, dims=1), returns_ST


def compares_with_itself(logprobs, values, entropies, old_logprobs, *rest):
    return ppo_loss(logprobs, values, entropies, logprobs.detach(), *rest)


def reward_of_the_other(self):
    scores = self.episode.info["scores"]
    others = [score for seat, score in scores.items() if seat != self.seat]
    return 2 * (others or [scores[self.seat]])[0] - 1


FAULTS: dict[str, tuple[str, object, str, Callable | property]] = {
    "critic: the returns' sign": ("critic", train_ppo, "ppo_loss", learns_the_opposite),
    "critic: bootstraps through the end": ("critic", train_ppo, "advantages", goes_on_after_the_end),
    "mask: trained decisions shifted by one": ("mask", train_ppo, "advantages", trains_the_next_one),
    "mask: another state's legal actions": ("mask", Policy, "_allowed", allows_what_another_state_does),
    "credit: the turn before is paid": ("credit", train_ppo, "turn_gae", pays_the_turn_before),
    "ratio: to the policy itself": ("ratio", train_ppo, "ppo_loss", compares_with_itself),
    "seat: paid the other's score": ("seat", Trajectory, "reward", property(reward_of_the_other)),
}


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_is_learnt(name, tmp_path):
    assert run(PROBES[name], tmp_path)


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["own", "all"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_its_own_probe_and_by_no_other(fault, everywhere, tmp_path, monkeypatch):
    home, owner, name, faulty = FAULTS[fault]
    monkeypatch.setattr(owner, name, faulty)
    probes = PROBES if everywhere else {home: PROBES[home]}
    assert {name for name, probe in probes.items() if not run(probe, tmp_path)} == {home}


def test_every_probe_has_a_fault_to_find():
    assert {home for home, *_ in FAULTS.values()} == set(PROBES)
