"""Intervals, tests of differences, ratings and the tasks of an evaluation: against published and exact values."""

import json
import math
import re
import sys
import tracemalloc
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyspiel
import pytest
import torch
from players import FunctionPlayer
from shapes import write_model
from tables import best_response_table, games_of
from tiny import base_model, micro_config, tiny_policy

import env_wrapper
import games
import train_ppo
from curriculum import EVAL_SEEDS, first_tasks
from env_wrapper import Action, Decision, EnvConfig, Episode, Sequence, Task, play
from envs import exact, openspiel, ratings
from envs.openspiel import load_game, position, query_at, unknown_prompts
from envs.ratings import rate
from envs.types import InterruptedRolloutError, PromptTooLongError
from evaluation import english, intervals, measure
from evaluation.intervals import mean_interval, pair_means, paired_difference, student, wilson
from evaluation.measure import (
    GameResult,
    columns,
    evaluate,
    exact_table,
    game_sets,
    legal_rate,
    mean_grade,
    paired_tasks,
    record,
    result_table,
    summary,
    table_values,
)  # fmt: skip
from policy import load_policy, network, player
from policy.chat import ChatFormat
from policy.model import load_tokenizer
from scripts.make_tiny_model import make_model
from training import preflight
from training.config import parse_args, read_config
from utils import uniform

KUHN, LEDUC, TIC_TAC_TOE = (
    games.NAMES.index(name) * games.CONFIGS_PER_GAME for name in ("kuhn_poker", "leduc_poker", "tic_tac_toe")
)
GAMES_OF_AN_EVALUATION = 200


class TablePlayer:
    """Plays a table of ``exact``; it knows the position from the prompts that every information state is shown."""

    def __init__(self, task_id, table, seed=0):
        from envs.openspiel import table as shared_table
        from envs.prompts import user_message

        shared, self.seed = shared_table(task_id), seed
        self.probs = {}
        for info in exact.information_states(shared.spiel):
            legal = {a: info.state.action_to_string(info.seat, a) for a in info.state.legal_actions(info.seat)}
            self.probs[user_message(shared.game, info.state, info.seat, legal, "full")] = table[info.key]

    def act(self, queries):
        return [Action(str(self._choose(query))) for query in queries]

    def _choose(self, query):
        probs, u = self.probs[query.conversation[-1]["content"]], uniform(self.seed, *query.rng_key)
        ends = np.cumsum(list(probs.values()))
        return list(probs)[int(np.searchsorted(ends, u * ends[-1], side="right"))]


def outcomes_against_random(task_id, table, seat):
    """Return -> probability of the player in ``seat``, by walking the whole game (positions met twice once)."""
    game = load_game(task_id)
    known: dict[str, dict[float, float]] = {}
    uniform_table = exact.uniform_table(game)
    perfect = task_id == TIC_TAC_TOE

    def walk(state):
        key = str(state) if perfect else state.history_str()
        if key not in known:
            total: dict[float, float] = defaultdict(float)
            known[key] = total
            if state.is_terminal():
                total[state.returns()[seat]] = 1.0
                return total
            if state.is_chance_node():
                moves = state.chance_outcomes()
            else:
                mover = state.current_player()
                moves = (table if mover == seat else uniform_table)[exact.info_key(state, mover)].items()
            for action, probability in moves:
                for value, share in walk(state.child(action)).items() if probability else ():
                    total[value] += probability * share
        return known[key]

    return walk(game.new_initial_state())


def mixture(task_id, share):
    """A player between uniform random (0) and the best response to it (1)."""
    game = load_game(task_id)
    best, uniform_table = best_response_table(game), exact.uniform_table(game)
    return {k: {a: share * best[k][a] + (1 - share) * p[a] for a in p} for k, p in uniform_table.items()}


# --------------------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),  # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_is_that_of_newcombes_table(hits, n, low, high):
    found = wilson(hits / n, n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(1 - hits / n, n)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - high, 1 - low), abs=5e-5)


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.706), (5, 2.571), (9, 2.262), (30, 2.042), (99, 1.984)])
def test_students_quantile_is_that_of_the_tables(degrees, value):
    assert student(degrees) == pytest.approx(value, abs=5e-4)


def test_units_are_pairs_of_seats_without_what_failed():
    assert pair_means([1.0, 0.0, None, 0.5, None, None, 1.0, 1.0]).tolist() == [0.5, 1.0]
    assert pair_means([None, 0.5, None, None]).tolist() == [0.5]


def test_the_mean_interval_is_students_where_scores_are_far_from_the_ends():
    units = np.random.default_rng(0).normal(0.5, 0.02, 50)
    found = mean_interval([units], [100])
    half = student(49) * units.std(ddof=1) / 50**0.5
    assert found == pytest.approx((units.mean(), units.mean() - half, units.mean() + half), abs=2e-5)


def test_pairs_that_win_in_one_seat_and_lose_in_the_other_are_surer_than_their_games():
    opposed = mean_interval([np.array([0.5, 0.5, 0.5, 0.6] * 10)], [80])
    together = mean_interval([np.array([0.0, 1.0] * 20)], [80])
    assert opposed.high - opposed.low < 0.04
    assert 0.25 < together.high - together.low < 0.35  # as 40 games, not as 80: 0.31 against 0.22


@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_games_that_all_end_alike_still_leave_doubt(score):
    found = mean_interval([np.full(50, score)], [100])
    assert found.estimate == score
    assert 0 <= found.low <= score <= found.high <= 1
    assert 0.03 < found.high - found.low < 0.25


@pytest.mark.parametrize("expected", [1, 3, 5, 8, 20])
def test_rare_losses_among_draws_are_within_the_interval(expected):
    """1,000 games; by the standard error alone 86 to 92 of 100 intervals would contain the score."""
    rng, held, wide = np.random.default_rng(expected), 0, []
    for _ in range(500):
        units = np.where(rng.random((500, 2)) < expected / 1000, 0.0, 0.5).mean(1)
        found = mean_interval([units], [1000])
        held += found.low <= 0.5 - expected / 2000 <= found.high
        wide.append(found.high - found.low)
    assert held / 500 > 0.94
    assert np.mean(wide) < 0.012, "nor is it as wide as that of a thousand won or lost games, 0.06"


@pytest.mark.parametrize("expected", [3, 5, 8])
def test_rare_deals_that_differ_are_within_the_interval_of_a_difference(expected):
    rng, truth = np.random.default_rng(expected), -2 * expected / 100
    found = [paired_difference([np.where(rng.random(100) < expected / 100, -2.0, 0.0)]) for _ in range(500)]
    assert sum(f.low <= truth <= f.high for f in found) / 500 > 0.93


@pytest.mark.parametrize("expected", [2, 3, 5])
@pytest.mark.parametrize(
    "kind", ["another game always won", "always won in one seat", "a difference of all that can be"]
)
def test_rare_units_are_within_the_interval_whatever_the_others_are(kind, expected):
    """Two games, one always won, the other lost but for a few: 79 to 87 of 100 intervals held the mean."""
    rng, held = np.random.default_rng(expected), 0
    for _ in range(300):
        rare = rng.random(100) < expected / 100
        if kind == "another game always won":
            found, truth = mean_interval([np.ones(100), rare / 2], [200, 200]), 0.5 + expected / 400
        elif kind == "always won in one seat":
            found, truth = mean_interval([0.5 + rare / 2], [100]), 0.5 + expected / 200
        else:
            found, truth = paired_difference([np.where(rare, 0.0, 2.0)]), 2 - expected / 50
        held += found.low <= truth <= found.high
    assert held / 300 > 0.93


def test_a_won_and_a_lost_game_may_be_of_two_seats():
    """Always won in one seat, lost in the other: only the games of a seat tell how rarely that is otherwise."""
    rows = [{"outcome": "finished", "score": score} for score in (1.0, 0.0)]
    drawn = [{"outcome": "finished", "score": 0.5}] * 2
    seats, draws, lone = (summary("g", [part]) for part in (rows * 50, drawn * 50, rows))
    assert draws.high == pytest.approx(wilson(0, 100, student(49)).high)
    assert seats.high == pytest.approx(wilson(0, 50, student(49)).high)
    assert (lone.low, lone.high) == (-1.0, 1.0)


def test_games_of_a_single_pair_each_tell_how_much_pairs_vary():
    """Of twenty games with a pair each 36 of 100 intervals held the mean, since no game had a variance."""
    rng, held, wide = np.random.default_rng(0), [0, 0], []
    for _ in range(300):
        units = [(rng.random((1, 2)) < 0.5).mean(1) for _ in range(20)]
        found = mean_interval(units, [2] * 20), paired_difference([2 * part - 1 for part in units])
        held = [n + (i.low <= truth <= i.high) for n, i, truth in zip(held, found, (0.5, 0.0), strict=True)]
        wide.append(found[1].high - found[1].low)
    assert min(held) / 300 > 0.93
    assert np.mean(wide) < 1, "nor is it the whole scale, 4"


def test_strata_have_equal_weights_whatever_their_size():
    many, few = np.full(400, 0.9), np.linspace(0.0, 0.2, 10)
    assert mean_interval([many, few], [800, 20]).estimate == pytest.approx(0.5)
    units = np.random.default_rng(0).normal(0.5, 0.1, 100)
    one, two = mean_interval([units], [200]), mean_interval([units, units], [200, 200])
    assert (two.high - two.low) / (one.high - one.low) == pytest.approx(0.5**0.5, rel=0.02)


@pytest.mark.parametrize("task_id", [LEDUC, pytest.param(TIC_TAC_TOE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_95_in_100_intervals_contain_the_exact_score(task_id, share):
    """2,000 evaluations of 200 games, drawn from the exact distribution of outcomes in each seat."""
    table, span = mixture(task_id, share), 2 * load_game(task_id).max_utility()
    rng, seats = np.random.default_rng(int(10 * share)), []
    for seat in (0, 1):
        outcomes = outcomes_against_random(task_id, table, seat)
        scores = np.array([value / span + 0.5 for value in outcomes])
        seats.append(rng.choice(scores, p=list(outcomes.values()), size=(2000, GAMES_OF_AN_EVALUATION // 2)))
    truth = table_values(table, task_id)["exact"] / 2 + 0.5
    found = [mean_interval([units], [GAMES_OF_AN_EVALUATION]) for units in (seats[0] + seats[1]) / 2]
    coverage = sum(interval.low <= truth <= interval.high for interval in found) / 2000
    assert 0.935 <= coverage <= 0.965


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("games", [40, 200])
def test_95_in_100_intervals_less_luck_contain_the_exact_value_and_are_narrower(share, games):
    """1,000 evaluations of kuhn_poker, drawn from all games there can be."""
    game, table, seats = load_game(KUHN), mixture(KUHN, share), []
    rng, truth = np.random.default_rng(games + int(10 * share)), table_values(table, KUHN)["exact"]
    for seat in (0, 1):
        odds, *rest = games_of(game, table, seat)
        score, luck = np.array(rest)[:, rng.choice(len(odds), p=odds / sum(odds), size=(1000, games // 2))] / 4
        seats.append((score + 0.5, luck))
    held, widths = 0, []
    for first, second in zip(zip(*seats[0], strict=True), zip(*seats[1], strict=True), strict=True):
        pairs = [({"score": a, "luck": b}, {"score": c, "luck": d}) for a, b, c, d in zip(*first, *second, strict=True)]
        found = summary("kuhn_poker", [[row | {"outcome": "finished"} for pair in pairs for row in pair]])
        low, high = found.adjusted_interval
        held += low <= truth <= high
        widths.append((high - low) / (found.high - found.low))
    assert 930 <= held <= 972
    assert np.mean(widths) < {0.0: 0.62, 0.5: 0.5, 1.0: 0.2}[share]


def test_95_in_100_differences_less_luck_contain_the_exact_one_and_are_narrower():
    """500 comparisons of two players of kuhn_poker; a mean with another game is less luck where both are."""
    game, rng, players, exactly = load_game(KUHN), np.random.default_rng(0), [], []
    for table in (mixture(KUHN, 0.9), mixture(KUHN, 0.5)):
        exactly.append(table_values(table, KUHN)["exact"])
        rows = np.empty((500, 100), dtype=object)
        for seat in (0, 1):
            odds, *rest = games_of(game, table, seat)
            ended = np.array([{"score": won / 4 + 0.5, "luck": luck / 4} for won, luck in zip(*rest, strict=True)])
            rows[:, seat::2] = rng.choice(ended, p=odds / sum(odds), size=(500, 50))
        players.append(rows.tolist())
    held, widths = 0, []
    for ours, theirs in zip(*players, strict=True):
        [found] = measure.differences({"kuhn_poker": ours}, {"kuhn_poker": theirs}, ["kuhn_poker"])
        low, high = found["adjusted_interval"]
        held += low <= exactly[0] - exactly[1] <= high
        widths.append((high - low) / (found["interval"][1] - found["interval"][0]))
    assert 465 <= held <= 486
    assert np.mean(widths) < 0.6

    def adjusted(ours, theirs):
        return [row["adjusted"] for row in measure.differences(ours, theirs, [*ours])]

    two = [{"kuhn_poker": rows, "hex": others[0]} for rows, others in zip((ours, theirs), players, strict=True)]
    a, b, overall = adjusted(*two)
    assert (a, overall) == (found["adjusted"], pytest.approx((a + b) / 2))
    two[1]["hex"] = [{"score": row["score"]} for row in theirs]
    assert adjusted(*two) == [found["adjusted"], None, None]
    assert adjusted({"kuhn_poker": ours[:98]}, {"kuhn_poker": theirs[:98]}) == [None]


def test_scores_less_luck_vary_as_the_line_does_that_is_drawn_through_them():
    """Far from the mean luck, where the line's slope says most about its height at no luck."""
    heights, told = [], []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        luck = rng.normal(0.2, 0.2, 30)
        units = 0.4 + 0.5 * luck + rng.normal(0, 0.1, 30)
        less = intervals.less_luck(units, luck)
        assert less.mean() == pytest.approx(np.polyfit(luck, units, 1)[1])
        heights.append(less.mean())
        told.append(less.var(ddof=1) / 30)
    assert 0.95 < np.mean(told) / np.var(heights) < 1.25


def test_scores_of_which_luck_says_too_much_or_nothing_stay_as_they_are():
    steep = np.linspace(0.0, 1.0, 20)
    assert intervals.less_luck(steep, steep + 1) is steep, "they would be below 0"
    assert intervals.less_luck(steep, np.zeros(20)) is steep
    for n in range(20, 60):  # luck of one unit alone, through which the line goes
        less = intervals.less_luck(np.random.default_rng(n).random(n), np.eye(n)[0])
        assert np.abs(less - 0.5).max() < 1


def test_luck_is_taken_off_where_it_is_known_of_forty_games_against_random_play():
    player = TablePlayer(LEDUC, mixture(LEDUC, 0.9))
    tasks = paired_tasks([[(LEDUC, LEDUC)]], 60, 0, "random")[0]
    rows = [measure.outcome(e) for e in play(EnvConfig(), player, tasks)]
    [found] = evaluate(player, EnvConfig(), [LEDUC], 60)
    told = summary("leduc_poker", [rows], random=found.random, ceiling=found.ceiling)
    assert (found.adjusted, found.adjusted_interval) == (told.adjusted, told.adjusted_interval)
    assert found.low < found.adjusted_interval[0] < found.adjusted < found.adjusted_interval[1] < found.high
    exactly = table_values(mixture(LEDUC, 0.9), LEDUC)["exact"]
    assert found.adjusted_interval[0] < exactly < found.adjusted_interval[1]
    span = found.ceiling - found.random
    assert found.share == pytest.approx((found.adjusted - found.random) / span)
    assert found.share_interval == pytest.approx([(end - found.random) / span for end in found.adjusted_interval])
    broken = [*rows[:-1], {"outcome": "failed", "score": None, "error": "gone"}]
    assert summary("leduc_poker", [broken]).adjusted == summary("leduc_poker", [rows[:-2]]).adjusted is not None
    older = [{k: v for k, v in row.items() if k != "luck"} for row in rows]
    for other in (rows[:38], [*rows[:-1], older[-1]]):
        assert summary("leduc_poker", [other]).adjusted is None
    assert summary("overall", [rows, older]).adjusted is None
    assert evaluate(player, EnvConfig(), [LEDUC], 40, "mcts:2x1", exact_tasks=[])[0].adjusted is None


def test_failures_of_one_seat_do_not_weigh_for_the_other():
    """Seat 0 wins, seat 1 loses, and every second of its games fails: the value is that of no seat, 0."""
    won, lost = {"score": 1.0, "outcome": "finished"}, {"score": 0.0, "outcome": "finished"}
    failed = {"score": None, "outcome": "failed", "error": ""}
    found = summary("hex", [[won, lost, won, failed] * 50])
    assert (found.value, found.success, found.loss, found.failed) == (0.0, 0.5, 0.5, 50)


def test_the_value_of_one_seat_has_no_share_of_a_ceiling_for_both():
    """Random play, whose games all failed in the second seat, had a third of tic_tac_toe's ceiling."""
    won, failed = {"outcome": "finished", "score": 1.0}, {"outcome": "failed", "score": None, "error": "?"}
    known = {"random": 0.0, "ceiling": 0.96}
    assert summary("a", [[won, failed] * 20], **known).row["share"] is None
    assert summary("a", [[won, failed] * 20], exact=0.48, **known).share == 0.5
    assert summary("a", [[won, failed] * 20 + [won, won]], **known).share == 1 / 0.96


def test_games_of_which_some_failed_count_the_same_in_every_column():
    won = [{"score": 1.0, "outcome": "finished"}] * 20
    lost = [{"score": 0.0, "outcome": "finished"}] * 2 + [{"score": None, "outcome": "failed", "error": ""}] * 18
    drawn = [{"score": 0.5, "outcome": "finished"}] * 4
    both = summary("overall", [won, lost])
    assert (both.value, both.success, both.loss, both.draw) == (0.0, 0.5, 0.5, 0.0)
    assert (both.episodes, both.failed) == (22, 18)
    three = summary("overall", [won, lost, drawn])
    assert (three.success, three.loss, three.draw) == pytest.approx((1 / 3, 1 / 3, 1 / 3))


@pytest.mark.parametrize("task_id", [LEDUC, TIC_TAC_TOE])
def test_played_games_have_the_exact_distribution_of_outcomes(task_id):
    table, span = mixture(task_id, 0.5), 2 * load_game(task_id).max_utility()
    [tasks] = paired_tasks([[(task_id, task_id)]], 1000, 7, "random")
    episodes = play(EnvConfig(), TablePlayer(task_id, table), tasks)
    for seat in (0, 1):
        seen = Counter(round((e.score - 0.5) * span, 6) for e in episodes if e.info["seat"] == seat)
        expected = {value: 500 * p for value, p in outcomes_against_random(task_id, table, seat).items() if p > 0.01}
        chi2 = sum((seen[value] - n) ** 2 / n for value, n in expected.items())
        assert chi2 < 3 * len(expected) + 10


@pytest.mark.parametrize("games", [0, 1, 5, -2])
def test_games_that_are_no_pairs_are_refused(games):
    with pytest.raises(ValueError, match=rf"games {games}: an even number, 2 or more"):
        evaluate(TablePlayer(LEDUC, mixture(LEDUC, 0.5)), EnvConfig(), [LEDUC], games=games)


# -------------------------------------------------------------------------------------------------------- differences


def test_a_game_whose_deals_nobody_else_finished_is_named(caplog):
    """A deal counts when both players have both its games: here each has failed in another seat."""
    row = {"score": 0.5}
    whole = {"hex": [row, row], "leduc_poker": [row, {"score": None}]}
    other = {"hex": [row, row], "leduc_poker": [{"score": None}, row]}
    assert [found["game"] for found in measure.differences(whole, other, list(whole))] == ["hex"]
    assert caplog.messages == ["leduc_poker: no difference, for no deal was played to its end by both players"]


def test_a_mean_difference_is_of_all_games_or_there_is_none():
    row = {"score": 0.5}
    ours = {game: [row, row] for game in ("hex", "go", "chess")}
    theirs = ours | {"chess": [{"score": None}] * 2}
    assert [found["game"] for found in measure.differences(ours, theirs, list(ours))] == ["hex", "go"]
    assert [found["game"] for found in measure.differences(ours, theirs, ["hex", "go"])] == ["hex", "go", "overall"]


def test_a_p_value_says_what_the_interval_says():
    """Sign flips gave p below 0.05 beside intervals that held zero, where a few units differ much and many little."""
    rng, apart = np.random.default_rng(0), 0
    for n in range(400):
        rare = rng.random((1 + n % 3, 60)) < rng.uniform(0, 0.1)
        strata = [np.where(row, -2.0, rng.choice([0.0, 0.1, rng.normal(0, 0.3)])) for row in rare]
        found = paired_difference(strata)
        assert (found.p < 0.05) == (not found.low <= 0 <= found.high)
        apart += found.p < 0.05
    assert 40 < apart < 360, "both kinds are among them"


def test_an_interval_that_may_miss_more_is_narrower_in_every_case():
    """Spread units, all alike, nearly all alike: each has a width of its own, and p is found among them."""
    for units in (np.linspace(0, 1, 50), np.ones(50), np.where(np.arange(50) < 3, 0.0, 0.5)):
        widths = [high - low for _, low, high in (mean_interval([units], [50], missed) for missed in (0.01, 0.05, 0.3))]
        assert widths[0] > 1.2 * widths[1] > 1.2 * 1.2 * widths[2] > 0


def test_the_p_value_of_many_deals_is_that_of_students_t():
    from scipy.stats import ttest_1samp

    for shift in (0.0, 0.01, 0.02, 0.04):
        units = np.random.default_rng(1).normal(shift, 0.3, 1000)
        assert paired_difference([units]).p == pytest.approx(ttest_1samp(units, 0).pvalue, rel=0.1)
    assert paired_difference([np.ones(1000)]).p == pytest.approx(1e-12)


@pytest.mark.parametrize("rare", [1, 3, 5])
def test_equal_players_are_rarely_told_apart_however_skewed_their_differences(rare):
    """Sign flips told them apart in 35, 17 and 11 of 100 evaluations."""
    rng, often = np.random.default_rng(rare), 2 * rare / (100 - rare)
    found = [paired_difference([np.where(rng.random(100) < rare / 100, -2.0, often)]).p for _ in range(500)]
    assert np.mean(np.array(found) < 0.05) < 0.07


def test_the_interval_of_a_difference_is_as_wide_as_the_standard_error_says():
    units = np.random.default_rng(1).normal(0.1, 0.3, 400)
    found = paired_difference([units])
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * 0.3 / 20, rel=0.1)
    assert found == paired_difference([units])


def test_intervals_of_differences_of_few_deals_are_not_too_narrow():
    """Of normal differences, 10 deals: with the normal quantile 8 % of the intervals miss the truth."""
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(600):
        found = paired_difference([rng.normal(0.1, 0.2, 10)])
        missed += not found.low <= 0.1 <= found.high
    assert 15 <= missed <= 45


def test_a_single_deal_says_nothing():
    assert paired_difference([np.array([0.5])])[:3] == (0.5, -2.0, 2.0)


def test_strata_of_a_difference_are_averaged_and_players_that_play_alike_do_not_differ():
    assert paired_difference([np.full(10, 0.4), np.full(300, 0.2)]).estimate == pytest.approx(0.3)
    alike = paired_difference([np.zeros(20)])
    assert (alike.estimate, alike.p) == (0.0, 1.0)
    assert alike.low == pytest.approx(-alike.high)


def test_deals_that_were_all_alike_do_not_make_a_difference_certain():
    """One deal in ten ends otherwise: the interval of twenty that show none of them still holds the truth."""
    for units in (np.zeros(20), np.ones(20)):
        found = paired_difference([units])
        assert found.low <= units[0] - 0.1 * (units[0] + 2) < units[0] + 0.1 * (2 - units[0]) <= found.high
    three = paired_difference([np.ones(3)])
    assert three.low < 0  # as p, 0.25, says
    assert paired_difference([np.zeros(2000)]).high < 0.004


def test_a_mean_that_hangs_on_one_of_several_games_has_that_games_degrees_of_freedom(monkeypatch):
    """By Welch and Satterthwaite: beside games that hardly vary, ten units of one game say as much as ten units."""
    asked: list[float] = []
    monkeypatch.setattr(intervals, "student", lambda degrees, missed: asked.append(degrees) or 2.0)
    rng = np.random.default_rng(0)
    wide, narrow = 0.5 + rng.normal(0, 0.2, 10), 0.5 + rng.normal(0, 0.002, (2, 10))
    mean_interval([wide, *narrow], [10] * 3)
    mean_interval([wide, wide, wide], [10] * 3)
    mean_interval([wide, wide, wide[:5]], [10, 10, 5])
    v = np.array([wide.var(ddof=1) / 10] * 2 + [wide[:5].var(ddof=1) / 5])
    assert asked == pytest.approx([9, 27, v.sum() ** 2 / (v**2 / [9, 9, 4]).sum()], rel=1e-3)
    mean_interval([np.full(10, 0.5), np.full(4, 0.2)], [10, 4])
    assert asked[-1] == 12, "of games without variance all units count"


def test_a_game_of_a_single_deal_is_not_known_for_certain():
    """It is taken to vary as the others do: half of the mean hangs on it."""
    many = np.random.default_rng(0).normal(0, 0.3, 100)
    found = paired_difference([many, np.array([1.0])])
    assert found.high - found.low > 0.9 * 1.96 * many.std()
    assert paired_difference([many, many]).high - paired_difference([many, many]).low < 0.2


def test_no_difference_is_greater_than_values_allow():
    assert 1.9 < paired_difference([np.array([2.0, 2.0, 2.0, -1.0])]).high <= 2.0
    assert -2.0 <= paired_difference([np.array([-2.0, -2.0, -2.0, 1.0])]).low < -1.9


def test_the_mean_share_before_training_is_of_the_games_that_it_is_of_after():
    def result(game, exact):
        return GameResult(game, 1, 0.0, 0.0, 0.0, 0.0, exact=exact, random=0.0, ceiling=1.0)

    text, found = result_table([vars(result("a", 0.1)) | {"share": 0.1}], [result("a", 0.5), result("b", 0.7)])
    assert (found["mean_share_before"], found["mean_share_of_ceiling"]) == (None, 0.6)
    assert text.endswith("unknown -> 0.600")
    before = [vars(result(game, 0.1)) | {"share": 0.1} for game in ("a", "b")]
    free = {"value": 0.4, "legal_rate": 0.996}
    assert "99.6% legal" in result_table([], [replace(result("a", 0.5), free_play=free)])[0]
    for legal, told in ((1.0, "100%"), (0.99996, "99.9%")):  # what is said to be legal always was
        rated = replace(result("a", 0.5), free_play=free | {"legal_rate": legal})
        assert f"{told} legal" in result_table([], [rated])[0]
    free["legal_rate"] = None
    assert "+0.400, no answers" in result_table([], [replace(result("a", 0.5), free_play=free)])[0]
    text, found = result_table(before, [result("a", 0.5), replace(result("b", None), ceiling=None)])
    assert (found["mean_share_before"], found["mean_share_of_ceiling"]) == (0.1, 0.5)
    assert text.endswith("\nmean share of the best-response ceiling, 1 of 2 games: 0.100 -> 0.500")


def test_a_checkpoint_is_not_chosen_by_grades_of_two_kinds():
    exact = GameResult("a", 4, 0.14, 0.0, 0.3, 0.5, exact=0.1, random=0.0, ceiling=0.2)
    sampled = GameResult("b", 4, 0.3, 0.0, 0.3, 0.5)
    assert mean_grade([exact, sampled], [1]) == pytest.approx((0.5 + 0.3) / 2)
    cut_off = replace(exact, exact=None, truncated=1)  # 0.14 would be compared with 0.5 of the step before
    assert mean_grade([cut_off, sampled], [1]) is None


def test_the_summary_of_a_game_holds_each_number_in_its_place():
    numbers = {"value": 0.1, "low": 0.05, "high": 0.2, "success": 0.5, "exact": 0.3, "random": 0.0, "ceiling": 1.0}
    before = {"game": "a", "value": -0.1, "exact": -0.2, "share": -0.3, "nash_conv": 4.0, "free_play": "then"}
    numbers |= {"adjusted": 0.12, "adjusted_interval": [0.1, 0.15]}
    after = GameResult("a", 40, **numbers, nash_conv=2.0, free_play={"value": 0.4, "legal_rate": 1.0}, failed=3)
    before["free_play"] = then = {"value": 0.7, "legal_rate": 0.8}
    text, found = result_table([before], [after])
    assert "less luck" not in text, "the exact value says more"
    assert "+0.120 [+0.100, +0.150]" in result_table([before], [replace(after, exact=None)])[0]
    assert found["games"]["a"] == {
        "before": -0.1, "after": 0.1, "interval": [0.05, 0.2], "episodes": 40,
        "adjusted": 0.12, "adjusted_interval": [0.1, 0.15], "exact_before": -0.2, "exact_after": 0.3,
        "random": 0.0, "ceiling": 1.0, "share_before": -0.3, "share": 0.3, "share_interval": None, "exact": True,
        "nash_conv_before": 4.0, "nash_conv": 2.0, "free_play_before": then, "free_play": after.free_play, "failed": 3,
    }  # fmt: skip


def test_shares_of_sampled_play_have_intervals_and_so_has_their_mean():
    def result(game, value, **more):
        return GameResult(game, 40, value, value - 0.08, value + 0.06, 0.0, random=0.0, **more)

    after = [result("a", 0.3, ceiling=0.5), result("b", 0.9, exact=0.8, ceiling=1.0), result("c", 0.5, ceiling=1.0)]
    text, found = result_table([], after)
    shares = [game["share"] for game in found["games"].values()]
    assert shares == pytest.approx([0.6, 0.8, 0.5])
    assert found["games"]["b"]["share_interval"] is None
    mean, low, high = sum(shares) / 3, math.hypot(0.16, 0.08) / 3, math.hypot(0.12, 0.06) / 3
    assert found["mean_share_interval"] == pytest.approx([mean - low, mean + high])
    assert text.splitlines()[-1].endswith("unknown -> 0.633 [0.57, 0.68]")
    told = [line.split("  ")[-1].strip() for line in text.splitlines()[1:4]]
    assert told == ["0.600 [0.44, 0.72]", "0.800", "0.500 [0.42, 0.56]"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table", "model"])
def test_a_player_is_seldom_found_better_than_itself(kind, tmp_path):
    """500 comparisons of one player with itself, 60 real games each, the two sampling with different seeds."""
    player: Any = TablePlayer(LEDUC, mixture(LEDUC, 0.5)) if kind == "table" else tiny_policy(tmp_path)
    config = EnvConfig() if kind == "table" else micro_config(tmp_path).env
    false = {"p": 0, "interval": 0}
    for trial in range(500):
        [tasks] = paired_tasks([[(LEDUC, LEDUC)]], 60, trial, "random")
        scores = []
        for player.seed in (1, 2):
            scores.append([episode.score for episode in play(config, player, tasks)])
        found = paired_difference([pair_means(np.subtract(*scores).tolist())])
        false["p"] += int(found.p < 0.05)
        false["interval"] += int(not found.low <= 0 <= found.high)
    assert max(false.values()) <= 35


# ------------------------------------------------------------------------------------------------------------ ratings


def test_ratings_are_elos_where_the_odds_are_known():
    wins = np.array([[1.0, 1.0]] * 1500 + [[0.0, 0.0]] * 500)
    [strong, weak] = rate({(0, 1): [wins]}, 2, anchor=1)
    assert weak == (0.0, 0.0, 0.0)
    assert strong.points == pytest.approx(190.85, abs=1)  # 400 log10(3)
    assert strong.low < strong.points < strong.high
    assert strong.high - strong.low == pytest.approx(2 * 1.96 * 400 / np.log(10) / (2000 * 0.75 * 0.25) ** 0.5, rel=0.1)


def test_a_rating_counts_what_is_won_and_not_how_often():
    """A bluffer wins three small pots of four, and loses more with the fourth; it was rated above its opponent."""
    bluffs = np.array([[0.54, 0.54], [0.54, 0.30]] * 500)
    [bluffer, other] = rate({(0, 1): [bluffs]}, 2, anchor=1)
    share = bluffs.mean()
    assert bluffer.points == pytest.approx(400 * math.log10(share / (1 - share)), abs=0.5)
    assert bluffer.high < 0 == other.points
    halves = rate({(0, 1): [np.where(bluffs > 0.5, 1.0, 0.0)]}, 2, anchor=1)
    assert halves[0].low > 100, "won hands alone"


def test_draws_count_half_for_each_and_unbeaten_players_have_finite_ratings():
    drawn, unbeaten = np.full((50, 2), 0.5), np.ones((50, 2))
    rated = rate({(0, 1): [drawn], (0, 2): [unbeaten], (1, 2): [unbeaten]}, 3, anchor=2)
    assert rated[0].points == pytest.approx(rated[1].points, abs=1)
    assert 400 < rated[0].points < 2000
    half_drawn = np.array([[1.0, 0.5]] * 1000)  # three points of four, as three wins in four games
    assert rate({(0, 1): [half_drawn]}, 2, anchor=1)[0].points == pytest.approx(190.85, abs=1)


def test_a_player_that_won_all_its_games_is_not_rated_without_doubt():
    lows = [rate({(0, 1): [np.ones((n, 2))]}, 2, anchor=1)[0] for n in (5, 500)]
    assert all(rating.low < rating.points - 100 for rating in lows)
    assert lows[0].points < lows[1].low + 200


def test_intervals_of_players_far_apart_contain_what_they_are(monkeypatch):
    monkeypatch.setattr(ratings, "RESAMPLES", 100)
    true, rng, found = np.array([0, 60, 60, 300, 800, 1000]), np.random.default_rng(0), []
    for _ in range(30):
        odds = {(i, j): 1 / (1 + 10 ** ((true[j] - true[i]) / 400)) for i in range(6) for j in range(i)}
        rated = rate({pair: [(rng.random((50, 2)) < p).astype(float)] for pair, p in odds.items()}, 6, anchor=0)
        ends = zip(rated, true, strict=True)
        found.append([r.low <= min(elo, r.points) <= max(elo, r.points) <= r.high for r, elo in ends])
    assert np.mean(found, axis=0).min() > 0.8  # of 30: 0.95 less almost four standard errors


def test_resamples_vary_as_draws_of_the_units_and_a_won_and_a_lost_one_and_take_no_memory_for_each():
    """A ladder of 10,000 pairs of games a match took hundreds of megabytes, and a second a match."""
    rng = np.random.default_rng(0)
    for units in (rng.choice([0.0, 0.5, 1.0], (10_000, 2), p=[0.01, 0.01, 0.98]), np.ones((1, 2))):
        tracemalloc.start()
        wins = ratings._resample(units, rng)
        assert tracemalloc.get_traced_memory()[1] < 2e6
        tracemalloc.stop()
        pool, n = np.append(units.sum(1), (2.0, 0.0)), len(units)
        odds = np.append(np.ones(n), (ratings.PRIOR, ratings.PRIOR)) / (n + 2 * ratings.PRIOR)
        mean, variance = n * (odds @ pool), n * (odds @ pool**2 - (odds @ pool) ** 2)
        assert wins.shape == (ratings.RESAMPLES,)
        assert wins.mean() == pytest.approx(mean, abs=4 * math.sqrt(variance / len(wins)))
        assert wins.var() == pytest.approx(variance, rel=0.2)


def test_who_won_everything_has_no_upper_end_and_who_lost_it_no_lower(monkeypatch):
    monkeypatch.setattr(ratings, "RESAMPLES", 50)
    won, mixed = np.ones((50, 2)), np.array([[1.0, 0.0]] * 25 + [[1.0, 1.0]] * 25)
    best, anchor, worst = rate({(0, 1): [won], (0, 2): [won, won], (1, 2): [won]}, 3, anchor=1)
    assert (best.high, anchor.high, worst.low) == (np.inf, 0.0, -np.inf)
    assert best.low > 0 > worst.high
    tiers = {(0, 1): [mixed], (0, 2): [won], (1, 2): [won]}
    assert [r.low for r in rate(tiers, 3, anchor=1) if r.high < np.inf][1:] == [0.0, -np.inf]
    assert [r.high for r in rate(tiers, 3, anchor=2)] == [np.inf, np.inf, 0.0]  # of whom the anchor has beaten nobody
    chain = {(0, 1): [mixed], (1, 2): [mixed], (0, 2): [won]}
    assert all(np.isfinite(r).all() for r in rate(chain, 3, anchor=2)), "it scored against who scored against the best"


TIERS = {(i, j): (2400, 2400) for i in range(6) for j in range(i)}
WON = {(1, 0): 1200, (2, 0): 2160, (2, 1): 2160, (4, 3): 2160, (5, 3): 2328, (5, 4): 1920}
TIERS |= {pair: (won, 2400) for pair, won in WON.items()}
# Newton's own steps lead to infinity.
FAR = {(2, 0): (1, 5000), (2, 1): (1, 5000), (3, 0): (5000, 5000), (3, 1): (1, 10)}


@pytest.mark.parametrize(("won", "players", "anchor"), [(TIERS, 6, 4), (FAR, 4, 0)])
def test_the_fit_is_the_likeliest_one_where_players_sweep_each_other(won, players, anchor):
    """By hand: with PRIOR wins and losses added a pair, the games a player wins are those it is expected to."""
    of = {(i, j): won.get((i, j), (0, 0)) for i in range(players) for j in range(i)}
    played = {pair: [np.repeat([[1.0], [0.0]], [w, n - w], axis=0)] for pair, (w, n) in of.items()}
    points = [rating.points for rating in rate(played, players, anchor)]
    for rated in range(players):
        over = 0.0
        for (i, j), [units] in played.items():
            expected = 1 / (1 + 10 ** ((points[j] - points[i]) / 400))
            beyond = units.sum() + ratings.PRIOR - (len(units) + 2 * ratings.PRIOR) * expected
            over += beyond * ((i == rated) - (j == rated))
        assert abs(over) < 1e-3


def test_a_rating_uses_all_games_and_orders_players_that_met_only_through_others():
    better = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 0.5]] * 20)
    rated = rate({(0, 1): [better, better], (2, 1): [1 - better]}, 3, anchor=1)
    assert rated[0].points > 100 > -100 > rated[2].points


# -------------------------------------------------------------------------------------------------------------- tasks


def test_an_item_is_a_name_a_configuration_a_task_or_a_range():
    hexes, size = games.NAMES.index("hex") * games.CONFIGS_PER_GAME, games.CONFIGS_PER_GAME
    assert game_sets(["hex", "hex#3", f"{hexes}", f"{hexes + 1}-{hexes + 2}", [LEDUC, LEDUC]]) == {
        "hex#*": [(hexes, hexes + size - 1)], "hex#3": [(hexes + 3, hexes + 3)], "hex": [(hexes, hexes)],
        "hex#1-2": [(hexes + 1, hexes + 2)], "leduc_poker": [(LEDUC, LEDUC)],
    }  # fmt: skip
    assert game_sets(["kuhn_poker"]) == {"kuhn_poker": [(KUHN, KUHN + size - 1)]}  # one configuration, whatever the id
    assert list(game_sets([[KUHN + size - 1, KUHN + size]])) == ["kuhn_poker#99999999", "tic_tac_toe"]
    assert list(game_sets(["2048"])) == ["2048"]  # the game, not the task


def test_a_set_counts_unless_all_of_it_lies_in_one_other():
    sets = {
        "partly": [(0, 4), (20, 24)],
        "whole": [(0, 9), (12, 14)],
        "in two parts": [(2, 3), (13, 13)],
        "in": [(5, 5)],
    }
    assert measure.apart(sets) == ["partly", "whole"]


@pytest.mark.parametrize("item", ["ches", "hex#x", "ches#1", "5-3", "9900000000", f"hex#{10**8}", "hex#-1"])
def test_an_item_that_does_not_exist_is_refused(item):
    with pytest.raises(ValueError, match=r"known|out of range"):
        game_sets([item])


def test_everyone_gets_the_same_deals_in_both_seats_and_on_reserved_seeds():
    sets = list(game_sets(["leduc_poker", "hex"]).values())
    leduc, hexes = paired_tasks(sets, 20, 3, "random")
    against_search = paired_tasks(sets, 20, 3, "mcts:5x1")
    for ours, theirs in zip(leduc + hexes, against_search[0] + against_search[1], strict=True):
        assert (ours.task_id, ours.seed, ours.index) == (theirs.task_id, theirs.seed, theirs.index)
    for even, odd in zip(hexes[::2], hexes[1::2], strict=True):
        assert even.task_id == odd.task_id
        assert even.seed is not None
        assert (even.seed % 2, odd.seed) == (0, even.seed + 1)
    tasks = leduc + hexes
    assert all(task.seed in EVAL_SEEDS for task in tasks)
    assert len({task.index for task in tasks}) == 40
    assert max(task.index for task in tasks) < 0
    assert len({task.task_id for task in hexes}) > 4
    other = paired_tasks(sets, 20, 4, "random")
    assert not {task.seed for task in other[0]} & {task.seed for task in leduc}
    anew = [task for some in paired_tasks(sets, 20, 3, "random", deals=1) for task in some]
    assert not {task.seed for task in anew} & {task.seed for task in tasks}
    assert not {task.index for task in anew} & {task.index for task in tasks}, "by which a model samples"


def test_values_of_the_uniform_player_and_of_the_best_response_are_those_of_their_tables():
    game = load_game(KUHN)
    own, random, best = table_values(exact.uniform_table(game), KUHN).values()
    assert own == pytest.approx(random)
    assert best > random
    assert table_values(best_response_table(game), KUHN)["exact"] == pytest.approx(best)
    assert table_values(exact.uniform_table(game), KUHN)["random"] == pytest.approx(
        0.0
    )  # 1/8 in one seat, -1/8 in the other


def test_exact_values_are_on_the_scale_of_scores_where_more_can_be_won_than_lost(monkeypatch):
    kuhn, uneven = load_game(KUHN), SimpleNamespace(min_utility=lambda: -2.0, max_utility=lambda: 10.0)
    gains = {"value_against_random": (0.5, 0.0), "best_response_values": (1.5, 0.5)}
    monkeypatch.setattr(exact, "feasible", lambda game: True)
    for name, seats in gains.items():
        monkeypatch.setattr(exact, name, lambda *_, seats=seats: seats)
    for game in (kuhn, uneven):
        monkeypatch.setattr(measure, "load_game", lambda task_id, game=game: game)
        low, high = game.min_utility(), game.max_utility()
        told = table_values({}, KUHN)
        for found, seats in zip(told.values(), ((0.5, 0.0), (0.0, 0.0), (1.5, 0.5)), strict=True):
            assert found == pytest.approx(np.mean([2 * (own - low) / (high - low) - 1 for own in seats]))
    assert told["random"] == pytest.approx(-2 / 3)


def test_a_description_that_fails_costs_the_exact_values_and_not_the_evaluation(monkeypatch, caplog):
    shown = openspiel.user_message

    def forgetful(game, state, *rest):
        return shown(game, state, *rest) if state.move_number() < 3 else {}["this position"]

    monkeypatch.setattr(openspiel, "user_message", forgetful)
    assert exact_table(SimpleNamespace(action_probs=None), EnvConfig(), KUHN) is None
    assert caplog.messages == ["exact values left out: kuhn_poker: a position has no prompt: 'this position'"]


def test_the_share_lies_between_random_play_and_the_best_response():
    def share(exact, ceiling):
        return GameResult("g", 1, 0.0, 0.0, 0.0, 0.0, exact=exact, random=0.2, ceiling=ceiling).share

    assert [share(value, 0.8) for value in (0.2, 0.8, 0.35, -0.1)] == pytest.approx([0, 1, 0.25, -0.5])
    assert share(1.0, 0.2) is None
    assert share(None, None) is None
    sampled = GameResult("g", 1, 0.5, 0.35, 0.71, 0.0, random=0.2, ceiling=0.8)
    assert (sampled.share, *sampled.share_interval) == pytest.approx((0.5, 0.25, 0.85))
    assert (replace(sampled, exact=0.5).share_interval, replace(sampled, ceiling=None).share_interval) == (None, None)
    known = GameResult("g", 1, -0.4, 0.0, 0.0, 0.0, exact=0.5, random=0.2, ceiling=0.8)
    assert (known.grade, replace(known, exact=None).grade) == (pytest.approx(0.5), -0.4)


def test_exact_values_are_not_of_players_whose_games_are_cut_off(caplog):
    """The tree of exact values has no end that prompts have. A run's evaluation counted such games lost in silence."""
    table = exact.uniform_table(load_game(KUHN))
    for cut in (False, True):
        player: Any = TablePlayer(KUHN, table)
        player.action_probs = lambda queries: [{a: 1 / len(q.legal) for a in q.legal} for q in queries]
        act, left = player.act, iter([cut])
        player.act = lambda queries, act=act, left=left: [
            replace(action, truncated=True) if next(left, False) else action for action in act(queries)
        ]
        [result] = evaluate(player, EnvConfig(), [KUHN], games=8)
        assert (result.truncated, result.exact is None) == (cut, cut)
    assert caplog.messages == [
        "kuhn_poker: in 1 of 8 games a prompt did not fit ppo.max_seq_length; they are lost where it was the player's"
    ]


def test_legal_mass_is_a_mean_over_decisions():
    rows = [
        {"outcome": "finished", "score": 1.0, "legal_mass": mass, "decisions": n} for mass, n in ((0.9, 1), (0.3, 5))
    ]
    assert summary("g", [rows]).legal_mass == pytest.approx(0.4)


def test_a_task_of_the_evaluation_is_played_as_any_other():
    [tasks] = paired_tasks([[(KUHN, KUHN)]], 2, 0, "random")
    episodes = play(EnvConfig(), TablePlayer(KUHN, exact.uniform_table(load_game(KUHN))), tasks)
    assert [e.info["seat"] for e in episodes] == [0, 1]
    assert isinstance(tasks[0], Task)


# ------------------------------------------------------------------------------------------------ what it costs


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """The default configuration, with prompts no shorter than Qwen3's own; and on a network of one layer."""
    folder = write_model("Qwen3-4B", tmp_path_factory.mktemp("shape") / "Qwen3-4B")
    config = read_config(parse_args(["--set", f"model.model_name={folder}"], None))
    small = tmp_path_factory.mktemp("small")
    tokenizer = load_tokenizer(config.model)
    make_model(len(tokenizer), 16, 1, 0.15, 0, "qwen3").save_pretrained(small)
    tokenizer.save_pretrained(small)
    model = replace(config.model, model_name=str(small), use_4bit=False, dtype="float32", device="cpu")
    return config, SimpleNamespace(**vars(config) | {"model": model})


@pytest.mark.slow
@pytest.mark.parametrize("ahead", player.AHEAD)
def test_the_default_run_takes_at_most_300_forward_passes_before_its_first_step(default_run, monkeypatch, ahead):
    config, small = default_run
    monkeypatch.setattr(player, "AHEAD", (ahead, ahead))
    chat = ChatFormat(load_tokenizer(config.model))
    measured = preflight.measure_prompts(config, chat)
    for game, first, later in (("tic_tac_toe", 284, 100), ("leduc_poker", 350, 92), ("clobber", 646, 214)):
        prompts = measured[games.NAMES.index(game)]  # Qwen's own counts: docs/results.md, "Memory estimates"
        assert np.mean(prompts.first) >= first
        assert np.mean(prompts.later) >= later
    assert preflight.exact_tasks(config, chat) == {}
    policy, passes, real, told = load_policy(small), [], network.run_trunk, []
    monkeypatch.setattr(network, "run_trunk", lambda *args, **options: passes.append(1) or real(*args, **options))
    tasks = first_tasks(config.curriculum, config.env.env_type)
    results = evaluate(policy, config.env, tasks, config.ppo.eval_games, exact_tasks=(),
                       progress=lambda *progress: told.append(progress))  # fmt: skip
    assert len(results) == 12
    assert len(passes) <= 300
    assert preflight.evaluation_work(config, chat)[0] == pytest.approx(len(passes), rel=0.25)
    assert told[0] == ("evaluation: games", 0, 48)
    assert told[-1] == ("evaluation: games", 48, 48)
    assert len(told) > 20


@pytest.mark.parametrize(
    ("preset", "exact", "chosen"),
    [
        ("tiny", "auto", ["leduc_poker", "tic_tac_toe", "liars_dice_small", "goofspiel_small"]),
        ("tiny", "never", []),
        ("big", "auto", ["kuhn_poker"]),
        ("big", "always", ["kuhn_poker", "leduc_poker"]),  # tic_tac_toe is asked with the turns before
    ],
)
def test_exact_values_are_computed_where_they_are_cheap_for_the_model_or_asked_for(default_run, preset, exact, chosen):
    sets = [f"ppo.eval_exact={exact}"]
    if preset == "tiny":
        sets.append(f"model.model_name={base_model()}")
        config = read_config(
            parse_args(["--config", "config/presets/tiny.json", *(w for s in sets for w in ("--set", s))], None)
        )
    else:
        sets += [f"model.model_name={default_run[0].model.model_name}"]
        config = read_config(parse_args([w for s in sets for w in ("--set", s)], None))
        stage = replace(config.curriculum.stages[0], games=["kuhn_poker", "leduc_poker", "tic_tac_toe", "connect_four"])
        config.curriculum = replace(config.curriculum, stages=[stage])
    costs = preflight.exact_tasks(config, ChatFormat(load_tokenizer(config.model)))
    assert {task_id: games.NAMES[task_id // games.CONFIGS_PER_GAME] for task_id in costs} == {
        games.NAMES.index(name) * games.CONFIGS_PER_GAME: name for name in chosen
    }


def test_operations_are_two_a_weight_and_token_read(tmp_path):
    """Kuhn poker: 12 information states, of two legal actions of one digit each."""
    chat = ChatFormat(load_tokenizer(micro_config(tmp_path).model))
    tokens = 0
    for info in exact.information_states(load_game(KUHN)):
        ids, shared = chat.first_prompt(query_at(KUHN, info.state, info.seat, EnvConfig()).conversation)
        tokens += len(ids) - shared
    assert preflight.exact_operations(KUHN, EnvConfig(), chat, 1000) == pytest.approx(2 * 1000 * tokens)
    assert preflight.exact_operations(KUHN + 4 * games.CONFIGS_PER_GAME, EnvConfig(), chat, 1) > 0


@pytest.mark.parametrize("turns", ["auto", "all", 0, 1, 2])
@pytest.mark.parametrize("prompt", ["full", "compact"])
@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker", "liars_dice_small", "goofspiel_small", "tic_tac_toe"])
def test_exact_values_ask_what_play_asks(name, prompt, turns):
    """Each question of games played at random against oneself, word for word; else there are none: a player of 0.80
    in tic_tac_toe was told to be worth 0.25 exactly."""
    config = EnvConfig(history_turns=turns, prompt=prompt)
    task_id = games.NAMES.index(name) * games.CONFIGS_PER_GAME
    known, past = not unknown_prompts(task_id, config), []
    assert known == (name != "tic_tac_toe" or turns == 0)
    if not known:
        assert exact_table(None, config, task_id) is None

    class Asked:
        def act(self, queries):
            for q in queries:
                found = query_at(task_id, position(task_id, q.history), q.seat, config)
                assert found.conversation == q.conversation or not known
                assert found.legal == q.legal
                past.append(len(q.conversation) // 2 - 1)
            return [Action(str([*q.legal][hash(q.rng_key) % len(q.legal)])) for q in queries]

        def release(self, episodes):
            pass

    tasks = [Task(task_id, seed, "self", index) for index, seed in enumerate(range(12))]
    assert all(e.outcome == "finished" for e in play(config, Asked(), tasks))
    assert max(past) == (0 if turns == 0 else 1 if turns == 1 or name == "kuhn_poker" else max(2, max(past)))


def test_exact_values_are_those_asked_for_and_tell_how_far_they_are(tmp_path):
    policy, config, told = tiny_policy(tmp_path), micro_config(tmp_path).env, []
    tell = lambda *progress: told.append(progress)  # noqa: E731
    kuhn, leduc = evaluate(policy, config, [KUHN, LEDUC], 2, exact_tasks=[LEDUC], progress=tell)
    assert kuhn.exact is None
    assert kuhn.share == pytest.approx(kuhn.value / (11 / 48))  # 11/12 chips are won in both seats together, of 2 each
    assert evaluate(policy, config, [KUHN], 2, "mcts:2x1", exact_tasks=[])[0].share is None  # ceilings are of random
    assert leduc.exact is not None
    states = [progress for progress in told if progress[0] == "evaluation: states of leduc_poker"]
    assert [done for _, done, _ in states] == [0, 512]
    assert states[0][2] == 936
    assert leduc.exact == table_values(exact_table(policy, config, LEDUC), LEDUC)["exact"]


def test_the_legal_rate_counts_answers_that_were_asked_for_again():
    class Stubborn:
        """Illegal twice, then legal; in seat 1 illegal for ever."""

        def act(self, queries):
            legal = [q.rng_key[-1] == 3 and q.seat == 0 for q in queries]
            return [
                Action(str(next(iter(q.legal))) if fine else "none") for q, fine in zip(queries, legal, strict=True)
            ]

    [found] = evaluate(Stubborn(), EnvConfig(), [TIC_TAC_TOE], 2)
    episodes = play(EnvConfig(), Stubborn(), paired_tasks([[(TIC_TAC_TOE, TIC_TAC_TOE)]], 2, 0, "random")[0])
    decisions = episodes[0].info["n_decisions"][0]
    assert found.forfeited == 1
    assert found.legal_rate == pytest.approx(decisions / (3 * decisions + 3))


def test_dry_run_tells_what_the_evaluation_takes(tmp_path):
    said = preflight.describe(micro_config(tmp_path, ppo={"legal_mass_coef": 0.1, "eval_exact": "auto"}))
    assert re.search(
        r"evaluation, before and after: 4 games of each of 2, about [1-9] forward passes and \d+ tok", said
    )
    assert "tokens; exact values of leduc_poker, kuhn_poker (ppo.eval_exact auto)" in said
    assert "and as many games with free answers (ppo.legal_mass_coef > 0)" in said
    assert "tokens if each is legal and takes ppo.max_new_tokens" in said, "an illegal one is asked for again, twice"
    assert "its matrix products take 0m00s each time at this machine's speed, less where positions" in said
    said = preflight.describe(micro_config(tmp_path, env={"answer_mode": "free"}))
    assert "tokens if each is legal and takes ppo.max_new_tokens; exact values of no game" in said


@pytest.mark.slow
def test_the_smol_preset_begins(tmp_path, capsys):
    """One step of 8 games with the pretrained model that ``make test-all`` fetches."""
    sets = ["ppo.num_train_steps=1", "ppo.batch_size=8", "ppo.mini_batch_size=8", "ppo.eval_games=2",
            "ppo.eval_exact=never", "ppo.max_new_tokens=3", "model.dtype=float32"]  # fmt: skip
    args = ["--config", "config/presets/smol.json", "--output-dir", str(tmp_path / "run")]
    assert train_ppo.main([*args, *(word for value in sets for word in ("--set", value))]) == 0
    shown = capsys.readouterr().out
    assert "free before" in shown
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["games"]
    assert found.keys() == {"leduc_poker", "kuhn_poker", "tic_tac_toe", "liars_dice_small"}


def test_english_that_a_device_fails_to_read_costs_nothing_else(monkeypatch, caplog):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out\nof memory")

    monkeypatch.setattr(english, "MIN_VOCABULARY", 0)
    monkeypatch.setattr(english, "perplexity", fail)
    policy = SimpleNamespace(tokenizer=[], temperature=1.0, greedy=False, constrained=True, max_new_tokens=1,
                             max_seq_length=1)  # fmt: skip
    assert english.measure(policy) is None
    assert caplog.messages == ["perplexity and answers in English could not be measured: CUDA out of memory"]
    assert policy.constrained


def test_what_became_of_the_english_is_told_of_models_that_know_any(monkeypatch):
    policy = tiny_policy(Path(base_model()), ppo={"max_seq_length": 24, "temperature": 0.5})
    assert english.measure(policy) is None  # 529 tokens made for games
    monkeypatch.setattr(english, "MIN_VOCABULARY", 0)
    monkeypatch.setattr(english, "ANSWER_TOKENS", 4)
    kept = (policy.temperature, policy.greedy, policy.constrained, policy.max_new_tokens)
    found = english.measure(policy)
    assert (policy.temperature, policy.greedy, policy.constrained, policy.max_new_tokens) == kept
    assert not policy.conversations._held
    ids = policy.tokenizer(english.TEXT.read_text(), add_special_tokens=False)["input_ids"]
    for adapter, measured in (("base", found["perplexity_before"]), (None, found["perplexity"])):
        windows = [torch.tensor([ids[i : i + english.WINDOW]]) for i in range(0, len(ids), english.WINDOW)]
        with policy.using(adapter), torch.no_grad():
            logps = [policy.peft_model(w).logits[0, :-1].log_softmax(-1).gather(1, w[0, 1:, None]) for w in windows]
        assert measured == pytest.approx(float(torch.cat(logps).mean().neg().exp()), rel=1e-4)
    assert [question for question, _, _ in found["answers"]] == list(english.QUESTIONS)
    assert any(before != after for _, before, after in found["answers"])
    assert sum(bool(before and after) for _, before, after in found["answers"]) > 10
    policy.seed += 1
    assert english.measure(policy) == found, "the answers are the likeliest"
    same = sum(before == after for _, before, after in found["answers"])
    assert f"; {same} of 20 answers" in english.line(found)


def test_answers_of_an_opponent_are_not_the_players():
    """It never answers legally, and forfeits; or its prompt does not fit."""
    config = EnvConfig(answer_mode="free")
    tasks = [Task(LEDUC, seed, "past:x", seed) for seed in range(20)]

    def one(query):
        return Action(
            str(next(iter(query.legal))) if query.adapter is None else "none", truncated=cut and bool(query.adapter)
        )

    for cut in (False, True):
        player = SimpleNamespace(act=lambda queries: [one(query) for query in queries])
        episodes = play(config, player, tasks)
        assert {e.outcome for e in episodes} == {"truncated" if cut else "forfeited"}
        assert legal_rate(episodes) == 1.0
        assert sum(e.info["retries"] for e in episodes) == 0


class Leaving:
    """A player whose run is to stop."""

    def action_probs(self, queries):
        return [dict.fromkeys(query.legal, 1.0) for query in queries]

    def act(self, queries):
        return [Action(str(query.legal and next(iter(query.legal)))) for query in queries]

    def leave_if_stopped(self):
        raise InterruptedRolloutError


def test_an_evaluation_that_waits_for_threads_can_be_left(monkeypatch):
    monkeypatch.setattr(env_wrapper, "POLL_SECONDS", 0.0)
    with pytest.raises(InterruptedRolloutError):
        evaluate(Leaving(), EnvConfig(), [TIC_TAC_TOE], 4, "mcts:100x100")
    with pytest.raises(InterruptedRolloutError):
        record(Leaving(), EnvConfig(), [Task(TIC_TAC_TOE, 0, "mcts:100x100", 0)], 1)


def test_games_that_were_recorded_are_not_kept_by_the_player():
    ended: list[int] = []
    player = FunctionPlayer(lambda query: str(next(iter(query.legal))))
    player.action_probs = lambda queries: [dict.fromkeys(query.legal, 1.0) for query in queries]
    player.release = ended.extend
    tasks = [Task(TIC_TAC_TOE, seed, "random", seed) for seed in range(3)]
    rows = record(player, EnvConfig(), tasks, 1)
    assert sorted(ended) == [0, 1, 2]
    assert record(player, EnvConfig(games_at_once=2), tasks, 1) == rows
    assert sorted(ended) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("version", "value"), [(None, 0.25), (3, None)])
def test_a_turn_that_a_server_played_shows_no_value(version, value):
    """No critic is served with the policy: 0.000 was shown, as if it expected that."""

    class Served(FunctionPlayer):
        def act(self, queries):
            made = Sequence([1], [Decision(version=version)])
            return [replace(action, value=0.25, sequence=made) for action in super().act(queries)]

    player = Served(lambda query: str(next(iter(query.legal))))
    player.action_probs = lambda queries: [dict.fromkeys(query.legal, 1.0) for query in queries]
    [row] = record(player, EnvConfig(), [Task(KUHN, 1, "random", 1)], 1)
    assert {turn["value"] for turn in row["turns"]} == {value}


def test_a_free_answer_that_fits_is_recorded_where_the_longest_legal_one_does_not():
    class Short(FunctionPlayer):
        def action_probs(self, queries):
            if any(len(query.legal) > 2 for query in queries):
                raise PromptTooLongError
            return [dict.fromkeys(query.legal, 0.5) for query in queries]

    player = Short(lambda query: str(next(iter(query.legal))))
    tasks = [Task(task_id, 1, "random", 1) for task_id in (KUHN, TIC_TAC_TOE, KUHN)]
    rows = record(player, EnvConfig(answer_mode="free"), tasks, 1)
    assert [row["outcome"] for row in rows] == ["finished"] * 3
    for row in rows:
        assert row["turns"]
        assert all(turn["action"] is not None for turn in row["turns"])
        assert [bool(turn["probs"]) for turn in row["turns"]] == [len(turn["legal"]) == 2 for turn in row["turns"]]


def test_a_recorded_game_that_failed_tells_why(monkeypatch):
    raising = [replace(game, params=lambda config_id: {1: 1 / 0} if config_id else {}) for game in games.GAMES]
    monkeypatch.setattr(games, "GAMES", raising)  # one's own may raise where no check looked
    player = FunctionPlayer(lambda query: str(next(iter(query.legal))))
    player.action_probs = lambda queries: [dict.fromkeys(query.legal, 1.0) for query in queries]
    # no other test plays configuration 4321, whose rules would be remembered
    tasks = [Task(KUHN, 1, "perfect", 1), Task(KUHN + 4321, 1, "random", 1), Task(KUHN, 1, "random", 1)]
    rows = record(player, EnvConfig(), tasks, 1)
    assert [row["outcome"] for row in rows] == ["failed", "failed", "finished"]
    assert [row.get("error", "").partition(":")[0] for row in rows] == ["ValueError", "ZeroDivisionError", ""]
    assert [row["game"] for row in rows] == ["kuhn_poker"] * 3


def test_a_game_whose_prompt_no_longer_fits_is_recorded_to_there():
    """What it thought of the alternatives is not asked where nothing can be read."""
    policy = tiny_policy(Path(base_model()), ppo={"max_seq_length": 18})
    rows = record(policy, EnvConfig(prompt="compact", history_turns="all"), [Task(LEDUC, 1, "random", 1)], 1)
    assert rows[0]["outcome"] == "truncated"
    assert [bool(turn["probs"]) for turn in rows[0]["turns"]] == [True] * (len(rows[0]["turns"]) - 1) + [False]
    assert [turn["past"] for turn in rows[0]["turns"]] == [*range(len(rows[0]["turns"]))]
    assert [turn.get("truncated", False) for turn in rows[0]["turns"]] == [
        not turn["probs"] for turn in rows[0]["turns"]
    ]
    assert len(rows[0]["turns"]) > 1


def test_the_luck_of_a_game_is_that_of_all_its_moves_the_deal_included():
    moves = [[-1, 2], [-1, 0], [0, 1], [1, 1]]
    favours, _ = exact.luck(load_game(KUHN), moves, 0)
    assert min(favours[0], favours[3]) > 0.4, "a king that is called"
    info = {"seat": 0, "history": moves, "n_decisions": {0: 1}, "own_end": True}
    found = measure.outcome(Episode(Task(KUHN, 0), "kuhn_poker", 1.0, "finished", info=info))
    assert found["luck"] == pytest.approx(sum(favours) / 4), "chips from -2 to 2 as a score from 0 to 1"


@pytest.mark.parametrize(("name", "own", "score"), [
    ("kuhn_poker", True, 0.0), ("kuhn_poker", False, 1.0), ("hearts", True, 0.0), ("hearts", False, 0.5),
    ("tiny_hanabi", True, 0.0), ("tiny_hanabi", False, 0.5), ("matrix_pd", False, 1.0),
])  # fmt: skip
def test_who_gives_no_legal_answer_has_lost_to_the_other(monkeypatch, name, own, score):
    """In evaluations; in training a game that the opponent gave up is undecided. It was a draw here, too.

    Where several play on, nobody knows who would have won, and who cooperate win nothing by it.
    """
    game = pyspiel.load_game(name)
    monkeypatch.setattr(measure, "load_game", lambda task_id: game)
    info = {"own_end": own, "scores": {seat: 0.5 * (seat != own) for seat in range(game.num_players())}}
    given = measure.outcome(Episode(Task(KUHN, 0, "base", 0), "kuhn_poker", 0.5 * (not own), "forfeited", info=info))
    assert given == {"outcome": "forfeited", "score": score}
    result = measure.summary("kuhn_poker", [[given, given | {"outcome": "finished"}]])
    assert result.forfeited == own
    assert result.value == 2 * score - 1
    assert result.success == (score == 1)


def test_a_question_without_an_answer_is_no_legal_answer():
    task = Task(KUHN, 0, "random", 0)
    ended = Episode(task, "kuhn_poker", 1.0, "finished", info={"retries": 0, "n_decisions": {0: 2}, "own_end": True})
    cut = Episode(task, "kuhn_poker", 0.0, "truncated", info={"retries": 1, "n_decisions": {0: 2}, "own_end": True})
    never = Episode(task, "kuhn_poker", 0.0, "truncated", info={"retries": 0, "n_decisions": {0: 1}, "own_end": True})
    assert legal_rate([ended, cut]) == pytest.approx(3 / 4)
    assert legal_rate([never]) is None


def test_programs_of_one_name_are_one_row(tmp_path):
    """Files have no levels: ranges of task ids that a stage names are drawn from the same rows."""
    (tmp_path / "a.jsonl").write_text('{"program": "print(1)"}\n{"program": "print(2)"}\n')
    config = EnvConfig(env_type="trace", answer_mode="free", trace={"source": str(tmp_path / "a.jsonl")})
    [result] = evaluate(
        FunctionPlayer(lambda query: "1"), config, [(n, n + 9) for n in (0, 10_000_000, 20_000_000)], games=6
    )
    assert (result.game, result.episodes) == ("trace", 18)
    assert -0.6 < result.value < 0.6


@pytest.mark.parametrize(("style", "seen", "heads"), [
    ("plain", True, [["game", "value", "95 %"], ["game", "share"]]),
    ("plain", False, [["game", "value", "95 %", "share"]]),
    ("github", True, [["game", "value", "95 %", "share"]]),
])  # fmt: skip
def test_a_table_goes_on_below_where_the_terminal_is_too_narrow(monkeypatch, style, seen, heads):
    """Each of its lines was broken in two; what is piped or pasted stays whole."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: seen)
    row = {"value": 0.5, "95 %": "[-1.000, +1.000]", "share": "0.123 [0.10, 0.20]"}
    text = columns([{"game": game, **row} for game in ("hex", "go")], style)
    assert [re.split(r"  +", part.splitlines()[0].replace("|", " ").strip()) for part in text.split("\n\n")] == heads
    assert max(map(len, text.splitlines())) <= 40 or len(heads) == 1
    assert columns([{"game": "hex"}], style).splitlines()[-1].strip("| ") == "hex"
    text = columns([{"player": None, "game": "hex", "opponent": "mcts:10x1", **row}], style)
    assert text.count("mcts:10x1") == text.count("hex") == len(text.split("\n\n")) >= len(heads)
