"""Whether two models are the same player: their log-probabilities of the same decisions, and their greedy games."""

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch

from curriculum import evaluated
from env_wrapper import Sequence, play
from envs.types import Task
from evaluation.measure import Row, differences, outcome, paired_tasks
from training.process import ProgramError

RECORDED = 40  # deals whose decisions are recorded


@dataclass(frozen=True)
class Played:
    """What one model does: its log-probabilities of M given decisions, and its greedy games."""

    logprobs_M: torch.Tensor
    moves: list[list[list[int]]]  # deal -> decision -> tokens of the answer
    rows: dict[str, list[Row]]  # number of the game -> how its deals ended


def deals(config: SimpleNamespace, count: int, seed: int) -> list[list[Task]]:
    """At least ``count`` deals against uniform random, by game of the run; half in each seat, on reserved seeds."""
    ranges = evaluated(config.curriculum, config.env.env_type)
    each = 2 * math.ceil(count / 2 / len(ranges))
    return paired_tasks([[part] for part in ranges], each, seed, "random")


def record_decisions(policy: Any, config: SimpleNamespace) -> list[Sequence]:
    """Sample some games and return their token sequences with the decisions in them."""
    episodes = play(config.env, policy, [*chain(*deals(config, RECORDED, seed=1))])
    found = [s for e in episodes for sequences in e.sequences.values() for s in sequences if s.decisions]
    if not found:
        causes = {e.info.get("error", e.outcome) for e in episodes}
        raise ProgramError(f"no decision could be recorded: {' '.join(sorted(map(str, causes)))[:300]}")
    return found


def observe(policy: Any, config: SimpleNamespace, sequences: list[Sequence], count: int) -> Played:
    """Compute the log-probabilities of the recorded decisions, and play ``count`` deals greedily."""
    with torch.no_grad():
        logprobs_M = policy.evaluate_decisions(sequences).logprobs.float().cpu()
    policy.greedy, drawn = True, deals(config, count, seed=2)
    try:
        episodes = play(config.env, policy, [*chain(*drawn)])
    finally:
        policy.greedy = False
    moves, rows = [], defaultdict(list)
    of = [str(i) for i, tasks in enumerate(drawn) for _ in tasks]  # a game that failed at once has no name
    for name, episode in zip(of, episodes, strict=True):
        answered = [s for sequences in episode.sequences.values() for s in sequences]
        moves.append([s.ids[d.start : d.stop] for s in answered for d in s.decisions])
        rows[name].append(outcome(episode))
    return Played(logprobs_M, moves, rows)


def compare(before: Played, after: Played, effect: float) -> dict[str, Any]:
    """How far two models differ. A deal's moves count up to the first that differs: then the positions do, too."""
    difference_M = (after.logprobs_M - before.logprobs_M).abs()
    same = moves = 0
    for ours, theirs in zip(before.moves, after.moves, strict=True):
        pairs = enumerate(zip(ours, theirs, strict=False))  # a game that broke off has fewer moves
        equal = next((i for i, pair in pairs if pair[0] != pair[1]), min(len(ours), len(theirs)))
        same, moves = same + equal, moves + min(equal + 1, len(ours))
    found = differences(after.rows, before.rows, [*after.rows])
    whole = {*after.rows} <= {line["game"] for line in found}
    last = found[-1] if whole else {"difference": None, "interval": None}  # the mean, or that of the only game
    return {
        "decisions": len(difference_M), "mean_difference": float(difference_M.mean()),
        "max_difference": float(difference_M.max()), "effect": effect,
        "deals": len(before.moves), "moves": moves, "identical_moves": same / moves if moves else 1.0,
        "value_difference": last["difference"], "value_interval": last["interval"],
    }  # fmt: skip


def say(proof: dict[str, Any]) -> str:
    """What ``compare`` found, as a sentence."""
    value = "the mean value is not known, for all deals of a game failed"
    if proof["value_interval"]:
        low, high = proof["value_interval"]
        value = f"the mean value differs by {proof['value_difference']:+.4f} (95 %: {low:+.4f} to {high:+.4f})"
    return (f"log-probabilities of {proof['decisions']} decisions differ by {proof['mean_difference']:.2g} nats on "
            f"average and {proof['max_difference']:.2g} at most (the adapter itself moves them by "
            f"{proof['effect']:.2g}); over {proof['deals']} deals played greedily {proof['identical_moves']:.2%} of "
            f"{proof['moves']} moves are the same, and {value}.")  # fmt: skip
