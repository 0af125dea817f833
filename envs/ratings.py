"""Rates players by the scores of the games between them: OpenSpiel's Bradley-Terry fit with bootstrap intervals."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyspiel

# Wins and losses added to each pair of players, also to pairs that a ladder broken off left unplayed: the Jeffreys
# prior of a game that is won or lost. Without it a player that wins every game would have an infinite rating.
PRIOR = 0.5
WHOLE = 256  # into so many parts a game is divided, because the fit counts whole ones
RESAMPLES = 1000


class Rating(NamedTuple):
    """Points on the Elo scale, where 400 points share scores 10 to 1, and the ends of their 95 % interval."""

    points: float
    low: float
    high: float


def rate(matches: Mapping[tuple[int, int], Sequence[np.ndarray]], players: int, anchor: int) -> list[Rating]:
    """Return each player's rating relative to player ``anchor``, whose rating is 0.

    The fit is that of Hunter 2004, "MM Algorithms for Generalized Bradley-Terry Models"; of a
    game each player wins the share that its score is, half of a draw. So a pot counts by its size, and many small ones
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
    fitted = _fit(matches, players, anchor)
    samples = []
    for _ in range(RESAMPLES):
        drawn = {pair: [_resample(results, rng) for results in games] for pair, games in matches.items()}
        samples.append(_fit(drawn, players, anchor))
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
    """Draw as many units from those played and one won and one lost unit, each ``PRIOR`` times as likely."""
    pool = np.concatenate((results, np.ones_like(results[:1]), np.zeros_like(results[:1])))
    weights = np.append(np.ones(len(results)), (PRIOR, PRIOR))
    return pool[rng.choice(len(pool), size=len(results), p=weights / weights.sum())]


def _fit(matches: Mapping[tuple[int, int], Sequence[np.ndarray]], players: int, anchor: int) -> np.ndarray:
    parts = np.zeros((players, players), dtype=int)
    for (i, j), games in matches.items():
        for scores in games:
            won = round(WHOLE * scores.sum())
            parts[i, j] += won
            parts[j, i] += WHOLE * scores.size - won
    options = pyspiel.elo.default_elo_options()
    options.smoothing_factor = PRIOR * WHOLE
    options.convergence_delta, options.max_iterations = 1e-14, 200_000  # the defaults stop too early after clean sweeps
    fit = pyspiel.elo.compute_ratings_from_matrices
    points = fit(win_matrix=parts.tolist(), draw_matrix=np.zeros_like(parts).tolist(), options=options)
    return np.array(points) - points[anchor]
