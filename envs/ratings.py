"""Rates players by the scores of the games between them: a Bradley-Terry fit with bootstrap intervals."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

# Wins and losses added to each pair of players, also to pairs that a ladder broken off left unplayed: the Jeffreys
# prior of a game that is won or lost. Without it a player that wins every game would have an infinite rating.
PRIOR = 0.5
RESAMPLES = 1000


class Rating(NamedTuple):
    """Points on the Elo scale, where 400 points share scores 10 to 1, and the ends of their 95 % interval."""

    points: float
    low: float
    high: float


def rate(matches: Mapping[tuple[int, int], Sequence[np.ndarray]], players: int, anchor: int) -> list[Rating]:
    """Return each player's rating relative to player ``anchor``, whose rating is 0.

    A game is as many wins as its score, half of one if it is drawn. So a pot counts by its size, and many small ones
    that are won cannot hide a large one that is lost.
    The interval resamples the units of each match, separately for each game. A won and a lost unit, each ``PRIOR``
    times as likely as a played one, are added, because who won every game of a match may lose the next one. That
    pulls ratings that are far apart together, so each end is the farther of the percentile and its mirror image about
    the rating (the basic bootstrap). An interval has no upper end if the anchor scored neither against the player nor
    against somebody who did, and so on, and no lower end in the opposite case (Ford 1957, "Solution of a Ranking
    Problem from Binary Comparisons").

    ``matches`` is (i, j) -> for each game an array (units, games of a unit) of i's scores, in [0, 1].
    """
    rng = np.random.default_rng(0)
    wins = np.zeros((1 + RESAMPLES, players, players))  # how often i won against j: as played, then resampled
    for (i, j), games in matches.items():
        for results in games:
            won = np.append(results.sum(), _resample(results, rng))
            wins[:, i, j] += won
            wins[:, j, i] += results.size - won
    fitted, *samples = _fit(wins, anchor)
    lows, highs = np.quantile(samples, (0.025, 0.975), axis=0)
    lows, highs = np.minimum(lows, 2 * fitted - highs), np.maximum(highs, 2 * fitted - lows)
    scored = np.eye(players, dtype=bool)  # whether i scored against j
    for (i, j), games in matches.items():
        scored[i, j] |= any((units > 0).any() for units in games)
        scored[j, i] |= any((units < 1).any() for units in games)
    scored = np.linalg.matrix_power(scored, players)  # or against somebody who did, and so on
    highs[~scored[anchor]], lows[~scored[:, anchor]] = np.inf, -np.inf
    return [Rating(float(p), float(low), float(high)) for p, low, high in zip(fitted, lows, highs, strict=True)]


def _resample(results: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return i's wins (RESAMPLES,) in as many units as ``results`` has, drawn from them and a won and a lost one."""
    pool, which = np.unique(np.append(results.sum(1), (results.shape[1], 0)), return_inverse=True)
    weights = np.bincount(which, np.append(np.ones(len(results)), (PRIOR, PRIOR)))
    return rng.multinomial(len(results), weights / weights.sum(), RESAMPLES) @ pool  # units that are alike at once


def _fit(wins: np.ndarray, anchor: int) -> np.ndarray:
    """Return the most likely points (samples, players) under P(i wins against j) = 1 / (1 + exp(s_j - s_i)).

    By Newton's method for all samples at once: the log-likelihood of ``wins`` (samples, players, players) is concave,
    and once the anchor is held, strictly so.
    """
    wins = wins + PRIOR * (1 - np.eye(wins.shape[-1]))
    games = wins + wins.swapaxes(1, 2)
    strength = np.zeros(wins.shape[:2])
    others = np.arange(wins.shape[-1]) != anchor
    step = np.ones(1)
    while np.abs(step).max() > 1e-6:  # nats; the error left is about its square
        expected = 1 / (1 + np.exp(strength[:, None, :] - strength[:, :, None]))
        gradient = (wins - games * expected).sum(-1)
        curvature = games * expected * (1 - expected)
        hessian = curvature.sum(-1)[:, :, None] * np.eye(wins.shape[-1]) - curvature
        step = np.linalg.solve(hessian[:, others][:, :, others], gradient[:, others, None])[..., 0]
        step /= np.maximum(1, np.abs(step).max(-1, keepdims=True))  # full ones may lead away from the maximum
        strength[:, others] += step
    return strength * 400 / np.log(10)
