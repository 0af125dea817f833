"""95 % confidence intervals of rates and mean scores, and the test of a difference on the same deals.

Scores are in [0, 1]. A *unit* is one independent observation: a pair of games of one task, one in each seat, whose
score is the mean of the two, so that both seats weigh the same. A *stratum* is the array of a game's units; several
strata are averaged with equal weights.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z = 1.959964  # the normal distribution's quantile at 0.975
ALIKE = 0.75  # share of units with the same score from which on the others count as rare
LEAST_P = 1e-12  # no smaller p-value is told
LEAST_PAIRS = 20  # to tell how much of the scores is luck
ROUNDING = 1e-15  # variance up to which units are all alike


class Interval(NamedTuple):
    """An estimate and the ends of its interval."""

    estimate: float
    low: float
    high: float


class Difference(NamedTuple):
    """A paired difference: estimate, ends of its interval, two-sided p-value of no difference."""

    estimate: float
    low: float
    high: float
    p: float


def wilson(rate: float, n: float, z: float = Z) -> Interval:
    """Wilson's score interval of a rate seen in ``n`` > 0 trials (Wilson 1927, "Probable Inference")."""
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(max(rate * (1 - rate), 0.0) / n + z * z / (4 * n * n))
    return Interval(rate, min(rate, max(centre - half, 0.0)), max(rate, min(centre + half, 1.0)))


def student(degrees: float, missed: float = 0.05) -> float:
    """Student's t, beyond whose two ends lies a share ``missed`` of the distribution."""
    from scipy.special import stdtrit

    return -float(stdtrit(degrees, missed / 2))


def whole_pairs(scores: Sequence[float | None]) -> list[list[float]]:
    """Scores in pairs of seats, without pairs in which a game failed (None): one seat would weigh more than the other.

    Where no pair is whole, the games that there are.
    """
    pairs = [[s for s in scores[i : i + 2] if s is not None] for i in range(0, len(scores), 2)]
    return [pair for pair in pairs if len(pair) == 2] or [pair for pair in pairs if pair]


def pair_means(scores: Sequence[float | None]) -> np.ndarray:
    """The units of ``whole_pairs``."""
    return np.array([sum(pair) / len(pair) for pair in whole_pairs(scores)])


def mean_interval(strata: Sequence[np.ndarray], games: Sequence[int], missed: float = 0.05) -> Interval:
    """Mean score over strata of at least one unit; ``missed``: share of the intervals that may not hold the mean.

    ``games``: how many observations each stratum stands for: its games, but one for a pair that ended in two ways.

    Wilson's interval for the number of won-or-lost games that would have this variance (the effective sample size of
    survey statistics, Kish 1965): it stays inside [0, 1] and, unlike a normal approximation, has a width for a player
    that always wins. Since one game may always be won and another hang on a few deals, it is at least as wide as the
    strata's own, combined by the root of the sum of squares of their distances to the means (Newcombe 1998, "Interval
    estimation for the difference between independent proportions").
    """
    if max(map(len, strata)) == 1:  # none has a variance
        strata, games = [np.concatenate(strata)], [sum(games)]
    mean = float(np.mean([units.mean() for units in strata]))
    # A stratum of a single unit has no sample variance: the mean of the others' is used.
    typical = np.mean([units.var(ddof=1) for units in strata if len(units) > 1] or [0.0])
    variances = [float(units.var(ddof=1) if len(units) > 1 else typical) / len(units) for units in strata]
    if not (degrees := _degrees(strata, variances)):  # a single unit says nothing
        return Interval(mean, 0.0, 1.0)
    z = student(degrees, missed)
    reaches = [_reach(*stratum, z) for stratum in zip(strata, variances, games, strict=True)]
    below, above = (math.hypot(*distances) / len(strata) for distances in zip(*reaches, strict=True))
    low, high = max(mean - below, 0.0), min(mean + above, 1.0)
    if (variance := sum(variances) / len(strata) ** 2) > ROUNDING:
        _, least, most = wilson(mean, mean * (1 - mean) / variance, z)
        low, high = min(low, least), max(high, most)
    return Interval(mean, low, high)


def less_luck(units: np.ndarray, luck: np.ndarray) -> np.ndarray:
    """Units less what their luck explains, which is 0 in the mean: as good an estimate, and one of less variance.

    A control variate with the slope of least squares: their mean is the line's height where there is no luck, and they
    are spread so that the variance of their mean is that of this height (Lavenberg and Welch 1981, "A perspective on
    the use of control variables"). Units that are too few, and those whose mean would leave [0, 1], stay as they are.
    """
    apart = luck - luck.mean()
    if len(units) < LEAST_PAIRS or not (total := apart @ apart) > ROUNDING:
        return units
    less, n = units - apart @ units / total * luck, len(units)
    mean, steady = less.mean(), math.sqrt(1 + n * luck.mean() ** 2 / total)
    own = 1 - 1 / n - apart**2 / total  # the less, the more a unit pulls the line to itself
    left = (less - mean) / np.maximum(own, 1 / n)  # HC3 (MacKinnon and White 1985)
    return mean + steady * (left - left.mean()) if 0 < mean < 1 else units


def _degrees(strata: Sequence[np.ndarray], variances: Sequence[float]) -> float:
    """Degrees of freedom of a mean over strata (Satterthwaite 1946): few, where one of them has all the variance."""
    known = [(v, len(units) - 1) for v, units in zip(variances, strata, strict=True) if len(units) > 1]
    if sum(v for v, _ in known) <= ROUNDING:
        return sum(n for _, n in known)
    return sum(v for v, _ in known) ** 2 / sum(v * v / n for v, n in known)


def _reach(units: np.ndarray, variance: float, games: int, z: float) -> tuple[float, float]:
    """How far the mean of a stratum may be below and above its estimate.

    Where all units have the same score, the share of others that may exist is the upper end of Wilson's interval of
    none among the games. Where nearly all have one score inside the scale, the mean depends on a few better or worse
    units, whose variance says little about how many to expect: one loss among a thousand draws has a standard error as
    large as itself. Wilson's intervals of both shares are then combined as those of strata.
    """
    mean, usual = float(units.mean()), float(np.median(units))
    if variance <= ROUNDING:
        unseen = wilson(0.0, games, z).high
        return unseen * mean, unseen * (1 - mean)
    _, low, high = wilson(mean, mean * (1 - mean) / variance, z)
    if len(units) == 1 or not 0 < usual < 1 or np.mean(units == usual) < ALIKE:
        return mean - low, high - mean
    away, far = units - usual, float(np.abs(units - usual).max())
    better, worse = (wilson(float(np.maximum(sign * away, 0).mean()) / far, len(units), z) for sign in (1, -1))
    return (max(mean - low, far * math.hypot(better.estimate - better.low, worse.high - worse.estimate)),
            max(high - mean, far * math.hypot(better.high - better.estimate, worse.estimate - worse.low)))  # fmt: skip


def paired_difference(strata: Sequence[np.ndarray]) -> Difference:
    """Mean of the units' differences over strata, from -2 to 2, with the interval of a mean score and its p-value.

    The p-value is the share ``missed`` from which on the interval leaves out zero (a test and its intervals are each
    other's inverse, Neyman 1937), so that neither says what the other denies.
    """
    from scipy.optimize import brentq

    scores, games = [(units + 2) / 4 for units in strata], [*map(len, strata)]

    def beside_zero(log_missed: float) -> float:  # how far zero is outside; negative within
        _, low, high = mean_interval(scores, games, math.exp(log_missed))
        return max(low - 0.5, 0.5 - high)

    estimate, low, high = (4 * end - 2 for end in mean_interval(scores, games))
    least = math.log(LEAST_P)
    if beside_zero(0.0) <= 0:  # not even a point is apart from it
        return Difference(estimate, low, high, 1.0)
    log_missed = least if beside_zero(least) > 0 else brentq(beside_zero, least, 0.0)
    return Difference(estimate, low, high, math.exp(log_missed))
