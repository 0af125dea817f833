"""Whether two models are the same player: log-probabilities of the same decisions, and the same deals, greedily."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from env_wrapper import Action, Episode, Query, Task, play
from env_wrapper import Sequence as Tokens
from evaluation import first_tasks, paired_tasks
from intervals import pair_means, paired_difference

RECORDED = 40  # deals whose decisions are recorded


class ProofError(RuntimeError):
    """Nothing could be compared, or the comparison failed: told in one line."""


@dataclass(frozen=True)
class Played:
    """What one model does: log-probabilities of given decisions, and its greedy games, all in order."""

    logprobs_M: torch.Tensor
    moves: list[list[str]]  # a list a deal
    scores: list[float | None]  # None: lost to infrastructure
    games: list[str]


class _Moves:
    """A player that notes its answers."""

    def __init__(self, player: Any) -> None:
        self.player = player
        self.moves: dict[int, list[str]] = defaultdict(list)

    def act(self, queries: Sequence[Query]) -> list[Action]:
        actions = self.player.act(queries)
        for query, action in zip(queries, actions, strict=True):
            self.moves[query.episode].append(action.text)
        return actions

    def release(self, episodes: Sequence[int]) -> None:
        self.player.release(episodes)


def deals(config: SimpleNamespace, count: int, seed: int) -> list[Task]:
    """At least ``count`` deals of the run's games against uniform random, in pairs of seats, on reserved seeds."""
    ids = first_tasks(config.curriculum, config.env.env_type)
    each = 2 * math.ceil(count / 2 / len(ids))
    return [task for tasks in paired_tasks([[(i, i)] for i in ids], each, seed, "random") for task in tasks]


def record_decisions(policy: Any, config: SimpleNamespace) -> list[Tokens]:
    """Token ids with the decisions of some sampled games."""
    episodes = play(config.env, policy, deals(config, RECORDED, seed=1))
    found = [s for e in episodes for sequences in e.sequences.values() for s in sequences if s.decisions]
    if not found:
        causes = {e.info.get("error", e.outcome) for e in episodes}
        raise ProofError(f"no decision could be recorded: {' '.join(sorted(map(str, causes)))[:300]}")
    return found


def observe(policy: Any, config: SimpleNamespace, sequences: list[Tokens], count: int) -> Played:
    """Score the recorded decisions, and play ``count`` deals greedily."""
    with torch.no_grad():
        logprobs_M = policy.evaluate_decisions(sequences).logprobs.float().cpu()
    player, tasks = _Moves(policy), deals(config, count, seed=2)
    policy.greedy = True
    try:
        episodes = play(config.env, player, tasks)
    finally:
        policy.greedy = False
    return Played(logprobs_M, [player.moves[i] for i in range(len(tasks))], [_score(e) for e in episodes],
                  [e.game for e in episodes])  # fmt: skip


def _score(episode: Episode) -> float | None:
    return None if episode.outcome == "failed" else episode.score


def compare(before: Played, after: Played, effect: float) -> dict[str, Any]:
    """The differences. Moves are compared up to the first that differs: after it the positions are others."""
    apart_M = (after.logprobs_M - before.logprobs_M).abs()
    same = moves = whole = 0
    for ours, theirs in zip(before.moves, after.moves, strict=True):
        equal = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
        same, moves, whole = same + equal, moves + min(equal + 1, len(ours)), whole + (equal == len(ours))
    scores: dict[str, list[float | None]] = defaultdict(list)
    for game, a, b in zip(before.games, before.scores, after.scores, strict=True):
        scores[game].append(None if a is None or b is None else b - a)
    strata = [units for deltas in scores.values() if len(units := pair_means(deltas))]
    if not strata:
        raise ProofError("no deal was played to its end by both models")
    found = paired_difference(strata)
    return {
        "decisions": len(apart_M), "mean_difference": float(apart_M.mean()), "max_difference": float(apart_M.max()),
        "effect": effect, "deals": len(before.moves), "identical_deals": whole / len(before.moves), "moves": moves,
        "identical_moves": same / moves if moves else 1.0,
        "score_before": _mean(before.scores), "score_after": _mean(after.scores),
        "score_difference": found.estimate, "score_interval": [found.low, found.high],
    }  # fmt: skip


def _mean(scores: list[float | None]) -> float:
    known = [score for score in scores if score is not None]
    return sum(known) / len(known)


def say(proof: dict[str, Any]) -> str:
    """One comparison in a sentence."""
    low, high = proof["score_interval"]
    return (f"log-probabilities of {proof['decisions']} decisions differ by {proof['mean_difference']:.2g} nats on "
            f"average and {proof['max_difference']:.2g} at most (the adapter itself moves them by "
            f"{proof['effect']:.2g}); over {proof['deals']} deals played greedily {proof['identical_moves']:.2%} of "
            f"{proof['moves']} moves are the same, and the score differs by {proof['score_difference']:+.4f} "
            f"(95 %: {low:+.4f} to {high:+.4f}).")  # fmt: skip
