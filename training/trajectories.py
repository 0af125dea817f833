"""The training data of a step: decisions, their rewards, and their log-probabilities and values under the policy.

Shapes: S trajectories (a seat of an episode each), M decisions of the batch in a row.
"""

import json
import logging
import math
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from envs.openspiel import luck
from envs.types import Decision, Episode, Sequence
from policy.player import Policy
from policy.rehearsal import Text
from policy.state_head import State
from policy.vllm_player import EngineError
from training.config import PPOConfig
from training.ranks import Ranks
from utils import CheckpointError, write_file

log = logging.getLogger(__name__)

MAX_GAP = 0.2  # nats: a larger median difference of sampler and learner means that the server has other weights
IMPORTANCE_CAP = 2.0  # truncated importance sampling, https://doi.org/10.1198/106186008X320456
MOMENTS_RATE = 0.05  # of the running moments of rewards: about the last 20 steps count
MOMENTS_GAMES = 8  # games of a step that may replace the moments; fewer change them in proportion
LEAST_SCALE = 0.05  # of rewards: smaller deviations are not scaled up to 1
WHITEN_ALONE = 9  # trajectories of a game in a step from which on its advantages are whitened separately
SAMPLE = 64  # the most sequences of a step that are scored again after its updates; a sixteenth if that is less

Moments = dict[str, tuple[float, float, float]]  # key -> (updates, mean, variance) of terminal rewards


@dataclass(frozen=True)
class Trajectory:
    """The decisions of one seat of an episode. ``unit`` is the episode's index in the step."""

    unit: int
    episode: Episode
    seat: int

    @property
    def sequences(self) -> list[Sequence]:
        """The seat's sequences, in order."""
        return self.episode.sequences[self.seat]

    @property
    def decisions(self) -> list[Decision]:
        """The seat's decisions, in order."""
        return [d for sequence in self.sequences for d in sequence.decisions]

    @property
    def reward(self) -> float:
        """The terminal reward: the seat's score, mapped to [-1, 1]."""
        return 2 * self.episode.info["scores"].get(self.seat, self.episode.score) - 1

    @property
    def luck(self) -> tuple[list[float], list[float]] | None:
        """By how much others' moves favoured the seat between a decision and its next one or the end, as a reward.

        And the reward that it stood to get at each decision (``exact.luck``). None: not known.
        """
        if (found := luck(self.episode)) is None:
            return None
        plies = [decision.ply for decision in self.decisions]
        favours = [2 * sum(found[0][start:end]) for start, end in pairwise([*plies, None])]
        return favours, [2 * found[1][ply] - 1 for ply in plies]

    @property
    def cut(self) -> bool:
        """Whether the game was truncated: it has no reward and is bootstrapped with the value of its last decision."""
        return self.episode.outcome == "truncated"

    @property
    def key(self) -> str:
        """Rewards with the same key are standardised together; self-play has another mean than games against a bot."""
        kind = self.episode.task.opponent.partition(":")[0]
        return f"{self.episode.game}/{self.seat}" + (f"/{kind}" if kind in ("self", "past") else "")


@dataclass
class Batch:
    """The decisions of a step, seat by seat; sequence i holds those of ``spans[i]``."""

    sequences: list[Sequence]
    unit: list[int]  # of each sequence: its game (``ppo.sweep``: share of positions), which minibatches do not cut
    old_logprobs_M: Tensor  # under the policy that played, see ``rollout_scores``
    values_M: Tensor  # of the same policy
    advantages_M: Tensor  # whitened, less the magnet's pull
    returns_M: Tensor
    weights_M: Tensor  # in the loss: 0 for decisions that are not trained, importance weights if a server sampled
    reward_mean: float  # mean terminal reward of a seat, in [-1, 1]
    kl_ref: float  # mean of log p - log p_ref over the decisions, in nats
    kl_average: float = 0.0  # the same for the policy's moving average, if there is one
    gap_M: Tensor | None = None  # |learner's - sampler's| log-probability before the update, if both are known
    states: Seq[State] = ()  # information state of each decision, with ``ppo.state_coef``
    texts: Seq[Text] = ()  # rehearsed in each update
    targets_M: Tensor | None = None  # log-probabilities to move to, with ``ppo.sweep``

    def __post_init__(self) -> None:
        sizes = [len(sequence.decisions) for sequence in self.sequences]
        self.spans = torch.arange(sum(sizes)).split(sizes)

    @property
    def games(self) -> list[list[int]]:
        """Indices of the sequences of each unit."""
        games: dict[int, list[int]] = {}
        for i, unit in enumerate(self.unit):
            games.setdefault(unit, []).append(i)
        return list(games.values())

    def moved(self, policy: Policy, legal_mass: bool, ranks: Ranks) -> dict[str, float]:
        """KL of the policy after the step's updates from the one that played, estimated on a sample.

        ``legal_mass``: also the probability that an unconstrained answer would be legal, if answers are constrained.
        """
        some = min(SAMPLE, -(-len(self.sequences) // 16))
        sample = self.sequences[:some] if self.targets_M is None else self.sequences
        new = ranks.score(policy, sample, legal_mass=legal_mass and policy.constrained)
        log_ratio_M = new.logprobs - self.old_logprobs_M[: len(new.logprobs)].cpu()
        kl_M = log_ratio_M.exp() - 1 - log_ratio_M  # k3, as in the loss
        found = {"update_kl": kl_M} | ({} if new.legal_mass is None else {"legal_mass": new.legal_mass.exp()})
        # With targets of all answers, not of those that the policy drew.
        weights_M = torch.ones_like(kl_M) if self.targets_M is None else self.weights_M.cpu()
        return {name: float((x_M * weights_M).sum() / weights_M.sum()) for name, x_M in found.items()}

    def summary(self) -> dict[str, Any]:
        """Metrics of the batch; the explained variance is that of the returns by the rollout's values."""
        returns_M, values_M = self.returns_M[self.weights_M > 0], self.values_M[self.weights_M > 0]
        variance = float(returns_M.var(correction=0)) if len(returns_M) else 0.0
        unexplained = float((returns_M - values_M).var(correction=0)) / variance if variance > 1e-12 else 1.0
        out = {"decisions": len(self.values_M), "reward_mean": self.reward_mean, "kl_ref": self.kl_ref,
               "kl_average": self.kl_average, "explained_variance": 1 - unexplained}  # fmt: skip
        if self.gap_M is not None:
            out |= {"logprob_gap_mean": float(self.gap_M.mean()), "logprob_gap_max": float(self.gap_M.max())}
        return out

    def dump(self, path: Path, step: int, episodes: Seq[Episode]) -> None:
        """Write the data of updates that were not finite, for debugging; failures are logged, as the run is ending."""
        rows = [{"ids": sequence.ids, "decisions": [asdict(d) for d in sequence.decisions],
                 "advantages": self.advantages_M[span].tolist(), "returns": self.returns_M[span].tolist(),
                 "old_logprobs": self.old_logprobs_M[span].tolist()}
                for sequence, span in zip(self.sequences, self.spans, strict=True)]  # fmt: skip
        for row, unit, span in zip(rows, self.unit, self.spans, strict=True):
            if self.targets_M is None:
                task = episodes[unit].task
                row["task"] = {"task_id": task.task_id, "seed": task.seed, "opponent": task.opponent}
            else:  # of positions, not of games
                row["targets"] = self.targets_M[span].tolist()
        try:
            write_file(path, json.dumps({"step": step, "sequences": rows}).encode())
        except CheckpointError as error:
            log.warning("%s", error)


def rollout_scores(
    rows: list[Trajectory], sequences: list[Sequence], policy: Policy, ppo: PPOConfig, ranks: Ranks
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scores of each decision (M) under the policy that played, from the rollout or recomputed by the training forward.

    Returns log-probabilities, values, weights in the loss (1 unless a server sampled), and the gap between the
    rollout's and the learner's log-probabilities if both are known. EngineError: a server plays another model.
    """
    decisions = [d for row in rows for d in row.decisions]
    logged_M = torch.tensor([d.logprob for d in decisions])
    values_M = torch.tensor([d.value for d in decisions])
    ones_M, served = torch.ones_like(logged_M), decisions[0].version is not None
    if not ppo.recompute_logprobs and not served:
        return logged_M, values_M, ones_M, None
    learner = ranks.score(policy, sequences, legal_mass=ppo.legal_mass_coef > 0)  # by the forward pass of the update
    gap_M = (learner.logprobs - logged_M).abs()
    if not served:
        return learner.logprobs, values_M, ones_M, gap_M
    asked_M = torch.tensor([bool(d.positions) for d in decisions])  # forced moves agree in any case
    if asked_M.any() and (gap := float(gap_M[asked_M].median())) > MAX_GAP:
        raise EngineError(
            f"what the servers sampled is {gap:.2f} nats from the learner in the median, {MAX_GAP} at most is allowed: "
            "serve the weights that are trained (BITS=4 bash scripts/serve_vllm.sh)"
        )
    # A server rounds differently, and computes no values.
    importance_M = (learner.logprobs - logged_M).exp().clamp(max=IMPORTANCE_CAP)
    return learner.logprobs, learner.values, importance_M, gap_M


def log_ratios(
    logprobs_M: Tensor, sequences: list[Sequence], policy: Policy, kl_coef: float, magnet_coef: float, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """log p - log p_reference and log p - log p_average of each decision (M); zeros if their coefficient is zero.

    Their means estimate the KL divergences of the policy from the two.
    """
    to_reference_M = to_average_M = torch.zeros_like(logprobs_M)
    if kl_coef:
        to_reference_M = logprobs_M - ranks.score(policy, sequences, adapter=policy.reference or "base").logprobs
    if magnet_coef and policy.average:
        to_average_M = logprobs_M - ranks.score(policy, sequences, adapter=policy.average).logprobs
    return to_reference_M, to_average_M


def adapt_kl_coef(kl_coef: float, kl: float, decisions: int, ppo: PPOConfig) -> float:
    """Proportional controller of the KL penalty (https://arxiv.org/abs/1909.08593, section 2.2).

    Decisions beyond ``horizon`` in a step have no effect: more than five horizons could turn the penalty into a reward.
    A KL that is not finite has none either: the coefficient would never be a number again.
    """
    if not ppo.adap_kl_ctrl or not kl_coef or not math.isfinite(kl):
        return kl_coef
    error = min(max(kl / ppo.target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * min(decisions / ppo.horizon, 1))


def standardise(rewards_S: Tensor, keys: list[str], moments: Moments) -> Tensor:
    """Shift and scale terminal rewards by the running mean and deviation of their key, which they update first.

    With gamma 1 the shift is a baseline per key; the scale lets one critic serve games whose rewards differ in
    size (leduc_poker's are a fifth of tic_tac_toe's). ``moments`` is updated in place. It starts from mean 0 and
    variance 1, and a step of few games does not replace it: a single reward would be its own mean.
    """
    out_S = torch.empty_like(rewards_S)
    for key in sorted(set(keys)):
        members = [i for i, k in enumerate(keys) if k == key]
        x = rewards_S[members].double()
        updates, mean, variance = moments.get(key, (0.0, 0.0, 1.0))
        rate = max(min(1 / (updates + 1), len(members) / MOMENTS_GAMES), MOMENTS_RATE)
        mean += rate * (float(x.mean()) - mean)
        variance += rate * (float(((x - mean) ** 2).mean()) - variance)
        moments[key] = (updates + 1, mean, variance)
        out_S[members] = ((x - mean) / max(variance**0.5, LEAST_SCALE)).to(rewards_S.dtype)
    return out_S


def rewards(rows: list[Trajectory], moments: Moments | None, less_luck: bool) -> tuple[Tensor, Tensor, Tensor, float]:
    """Rewards after each decision, the luck in them, baselines that are known (M each), and the mean score in [-1, 1].

    A seat is paid its score after its last decision, nothing if the game was cut off. Luck is 0 in the mean, whatever
    was answered: returns without it keep their means and lose variance. The baseline is what the position is worth to a
    player that is half a best response: it sees what is hidden, and need not be learnt. Not known, or not wanted
    (``less_luck``), they are 0 and NaN. If ``moments`` are given, all are standardised by them.
    """
    ended = [row for row in rows if not row.cut]
    scores_S = torch.tensor([row.reward for row in ended])
    scaled_S = scores_S if moments is None else standardise(scores_S, [row.key for row in ended], moments)
    scores, paid, taken, worth = iter(scaled_S.tolist()), list[float](), list[float](), list[float]()
    for row in rows:
        _, mean, variance = (moments or {}).get(row.key, (0.0, 0.0, 1.0))
        scale, decisions = max(variance**0.5, LEAST_SCALE), len(row.decisions)
        luck, stakes = (row.luck if less_luck else None) or ([0.0] * decisions, [math.nan] * decisions)
        paid += [0.0] * (decisions - 1) + [0.0 if row.cut else next(scores)]
        taken += [x / scale for x in luck]
        worth += [(x - mean) / scale for x in stakes]
    return torch.tensor(paid), torch.tensor(taken), torch.tensor(worth), float(scores_S.mean())


def game_groups(rows: list[Trajectory]) -> Tensor:
    """Groups for whitening advantages (S): the index of a trajectory's game, or -1 for games with few trajectories.

    A single trajectory, less its own mean, would say nothing about its win or loss.
    """
    names = sorted({row.episode.game for row in rows})
    game_S = torch.tensor([names.index(row.episode.game) for row in rows])
    trained_S = torch.tensor([float(len(row.decisions) > row.cut) for row in rows])
    return torch.where(torch.bincount(game_S, trained_S)[game_S] < WHITEN_ALONE, -1, game_S)
