"""What a step is trained on: who decided what, what it was paid, and what the policy that played thought of it.

Shapes: S trajectories (a seat of an episode each), M decisions of the batch in a row.
"""

import json
import logging
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.types import Decision, Episode, Sequence
from policy.player import Policy
from policy.state_head import State
from policy.vllm_player import EngineError
from training.config import PPOConfig
from training.ranks import Ranks
from utils import CheckpointError, write_file

log = logging.getLogger(__name__)

MAX_GAP = 0.2  # nats: a server whose answers are further from the learner's, in the median, has other weights
IMPORTANCE_CAP = 2.0  # truncated importance sampling, https://doi.org/10.1198/106186008X320456
MOMENTS_RATE = 0.05  # of the running moments of rewards: about the last 20 steps count
MOMENTS_GAMES = 8  # in a step that may replace the moments; fewer move them by their share of it
WHITEN_ALONE = 9  # trajectories of a game in a step, at least, whose advantages are whitened by themselves

SAMPLE = 64  # sequences of a step that are read again after its updates, at most an eighth of them

Moments = dict[str, tuple[float, float, float]]  # key -> (updates, mean, variance) of terminal rewards


@dataclass(frozen=True)
class Trajectory:
    """What one seat of an episode decided. ``unit`` is the episode's place in the step."""

    unit: int
    episode: Episode
    seat: int

    @property
    def sequences(self) -> list[Sequence]:
        """The seat's sequences, in their order."""
        return self.episode.sequences[self.seat]

    @property
    def decisions(self) -> list[Decision]:
        """The seat's decisions, in their order."""
        return [d for sequence in self.sequences for d in sequence.decisions]

    @property
    def reward(self) -> float:
        """The terminal reward: the seat's score, mapped to [-1, 1]."""
        return 2 * self.episode.info["scores"].get(self.seat, self.episode.score) - 1

    @property
    def cut(self) -> bool:
        """Whether the game was cut off: it has no reward and bootstraps from its last decision that fitted."""
        return self.episode.outcome == "truncated"

    @property
    def key(self) -> str:
        """Whose rewards are standardised together; games against oneself have another mean than those against a bot."""
        kind = self.episode.task.opponent.partition(":")[0]
        return f"{self.episode.game}/{self.seat}" + (f"/{kind}" if kind in ("self", "past") else "")


@dataclass
class Batch:
    """The decisions of a step, seat by seat; sequence i holds those of ``spans[i]``."""

    sequences: list[Sequence]
    unit: list[int]  # the game, of the step's, that each sequence belongs to: minibatches are made of whole games
    old_logprobs_M: Tensor  # by the policy that played, as noted or as the learner reads them (``rollout_scores``)
    values_M: Tensor  # by the same policy
    advantages_M: Tensor  # whitened, less the magnet's pull
    returns_M: Tensor
    weights_M: Tensor  # in the loss: 0 for decisions that are not trained, not 1 where another program sampled
    reward_mean: float  # terminal reward of a seat, in [-1, 1]
    kl_ref: float  # mean of log p - log p_ref over the decisions, in nats
    kl_average: float = 0.0  # the same of the policy's moving average, where one is kept
    gap_M: Tensor | None = None  # |learner's - sampler's| log-probability before the update, where both were computed
    states: Seq[State] = ()  # of each decision, where they are learnt
    texts: Seq[list[int]] = ()  # what is rehearsed in each update

    def __post_init__(self) -> None:
        ends = np.cumsum([len(sequence.decisions) for sequence in self.sequences])
        self.spans = [torch.arange(e - len(s.decisions), e) for e, s in zip(ends, self.sequences, strict=True)]

    @property
    def games(self) -> list[list[int]]:
        """The sequences of each game."""
        games: dict[int, list[int]] = {}
        for i, unit in enumerate(self.unit):
            games.setdefault(unit, []).append(i)
        return list(games.values())

    def moved(self, policy: Policy, legal_mass: bool, ranks: Ranks) -> dict[str, float]:
        """How far the step's updates went, of a sample: KL of the weights as they are now from those that played.

        ``legal_mass``: and the probability that an unconstrained answer would be legal, where answers are constrained.
        """
        sample = self.sequences[: min(SAMPLE, -(-len(self.sequences) // 8))]
        read = ranks.score(policy, sample, legal_mass=legal_mass and policy.constrained)
        log_ratio_M = read.logprobs - self.old_logprobs_M[: len(read.logprobs)].cpu()
        found = {"update_kl": float((log_ratio_M.exp() - 1 - log_ratio_M).mean())}  # k3, as in the loss
        return found if read.legal_mass is None else found | {"legal_mass": float(read.legal_mass.exp().mean())}

    def summary(self) -> dict[str, Any]:
        """Metrics of the batch; explained variance is that of the returns by the rollout's values."""
        returns_M, values_M = self.returns_M[self.weights_M > 0], self.values_M[self.weights_M > 0]
        variance = float(returns_M.var(correction=0)) if len(returns_M) else 0.0
        unexplained = float((returns_M - values_M).var(correction=0)) / variance if variance > 1e-12 else 1.0
        out = {"decisions": len(self.values_M), "reward_mean": self.reward_mean, "kl_ref": self.kl_ref,
               "kl_average": self.kl_average, "explained_variance": 1 - unexplained}  # fmt: skip
        if self.gap_M is not None:
            out |= {"logprob_gap_mean": float(self.gap_M.mean()), "logprob_gap_max": float(self.gap_M.max())}
        return out

    def dump(self, path: Path, step: int, episodes: Seq[Episode]) -> None:
        """Write what updates that were not finite were made of, for whoever looks into it.

        The run has its end to come to: where it cannot be written, that is told.
        """
        tasks = [{"task_id": e.task.task_id, "seed": e.task.seed, "opponent": e.task.opponent} for e in episodes]
        rows = [{"task": tasks[unit], "ids": sequence.ids, "decisions": [asdict(d) for d in sequence.decisions],
                 "advantages": self.advantages_M[span].tolist(), "returns": self.returns_M[span].tolist(),
                 "old_logprobs": self.old_logprobs_M[span].tolist()}
                for unit, sequence, span in zip(self.unit, self.sequences, self.spans, strict=True)]  # fmt: skip
        try:
            write_file(path, json.dumps({"step": step, "sequences": rows}).encode())
        except CheckpointError as error:
            log.warning("%s", error)


def rollout_scores(
    rows: list[Trajectory], sequences: list[Sequence], policy: Policy, ppo: PPOConfig, ranks: Ranks
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What the policy that played thought of each decision (M), as the rollout noted it or the training forward reads.

    Returns:
        Log-probabilities, values, the weight in the loss (1 unless another program sampled), and where both
        log-probabilities are known the gap between them.

    Raises:
        EngineError: a server plays another model than the one that learns.
    """
    decisions = [d for row in rows for d in row.decisions]
    logged_M = torch.tensor([d.logprob for d in decisions])
    values_M = torch.tensor([d.value for d in decisions])
    ones_M, served = torch.ones_like(logged_M), decisions[0].version is not None
    if not ppo.recompute_logprobs and not served:
        return logged_M, values_M, ones_M, None
    read = ranks.score(policy, sequences, legal_mass=ppo.legal_mass_coef > 0)  # the update's own forward
    gap_M = (read.logprobs - logged_M).abs()
    if not served:
        return read.logprobs, values_M, ones_M, gap_M
    if (gap := float(gap_M.median())) > MAX_GAP:
        raise EngineError(
            f"what the servers sampled is {gap:.2f} nats from the learner in the median, {MAX_GAP} at most is allowed: "
            "serve the weights that are trained (BITS=4 bash scripts/serve_vllm.sh)"
        )
    # A server's arithmetic is another, and it knows no values.
    importance_M = (read.logprobs - logged_M).exp().clamp(max=IMPORTANCE_CAP)
    return read.logprobs, read.values, importance_M, gap_M


def log_ratios(
    logprobs_M: Tensor, sequences: list[Sequence], policy: Policy, kl_coef: float, magnet_coef: float, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """log p - log p_reference and log p - log p_average of each decision (M); zeros where nothing hangs on them.

    Their means estimate the KL divergences of the policy from the two.
    """

    def log_ratio(adapter: str) -> Tensor:
        return logprobs_M - ranks.score(policy, sequences, adapter=adapter).logprobs

    zeros_M = torch.zeros_like(logprobs_M)
    average = policy.average if magnet_coef else None
    to_reference_M = log_ratio(policy.reference or "base") if kl_coef else zeros_M
    return to_reference_M, log_ratio(average) if average else zeros_M


def standardise(rewards_S: Tensor, keys: list[str], moments: Moments) -> Tensor:
    """Shift and scale terminal rewards by the running mean and deviation of their key, updated with them first.

    With gamma 1 the shift is a baseline per key; the scale lets one critic serve games whose rewards differ in
    size (leduc_poker's are a fifth of tic_tac_toe's). ``moments`` are changed here. They begin at mean 0, variance 1,
    and a step of few games does not replace them: a single reward would be its own mean.
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
        out_S[members] = ((x - mean) / max(variance**0.5, 0.05)).to(rewards_S.dtype)
    return out_S


def terminal_rewards(rows: list[Trajectory], moments: Moments | None) -> tuple[Tensor, float]:
    """The rewards of trajectories that have one, standardised where ``moments`` are given, and their mean before."""
    rewards_S = torch.tensor([row.reward for row in rows])
    mean = float(rewards_S.mean()) if rows else 0.0
    return (rewards_S if moments is None else standardise(rewards_S, [row.key for row in rows], moments)), mean


def game_groups(rows: list[Trajectory]) -> Tensor:
    """Whose advantages are whitened together (S): the number of a trajectory's game, or -1 for games with few.

    The mean of a game that is alone in its step would take its win or loss away.
    """
    names = sorted({row.episode.game for row in rows})
    game_S = torch.tensor([names.index(row.episode.game) for row in rows])
    trained_S = torch.tensor([float(len(row.decisions) > row.cut) for row in rows])
    return torch.where(torch.bincount(game_S, trained_S)[game_S] < WHITEN_ALONE, -1, game_S)
