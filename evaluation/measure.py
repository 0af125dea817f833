"""How good a player is: sampled games with confidence intervals, exact values where the game is small enough.

Values are in [-1, 1]: 2 * score - 1, which is return / greatest return where the greatest loss is as large.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

import numpy as np

from config.reader import ConfigError
from curriculum import TaskRange, eval_tasks, pool
from env_wrapper import play
from envs import exact
from envs.client import one_line
from envs.config import EnvConfig
from envs.openspiel import DISTINCT, load_game, luck, opposed, position, query_at, unknown_prompts
from envs.parser import parse_action
from envs.types import Action, Episode, Player, PromptTooLongError, Query, Task
from evaluation import tables
from evaluation.intervals import LEAST_PAIRS, less_luck, mean_interval, pair_means, paired_difference, whole_pairs
from evaluation.tables import VALUE, between, columns, shown_share
from games import CONFIGS_PER_GAME, NAMES, decode_task_id
from training.process import ProgramError
from utils import redact

log = logging.getLogger(__name__)

Row = dict[str, Any]  # a finished game: how it ended (see outcome) and what else is known
Progress = Callable[[str, int, int], Any]  # called with what is being done, how much is done, of how much
OVERALL = "overall"
MAX_FAILED_SHARE = 0.2  # of the games of a step or an evaluation; one of several may always fail
LEAST_DEALS = 50  # of a difference less luck: of fewer, too few differ between players that are much alike
STATES_AT_ONCE = 512  # information states between reports of progress


@dataclass(frozen=True)
class GameResult:
    """One game of an evaluation: the mean value of sampled play with its 95 % interval, counts and exact values."""

    game: str
    episodes: int
    value: float
    low: float
    high: float
    success: float  # share of games with score > 0.5
    exact: float | None = None  # exact expected value of sampled play against uniform random
    random: float | None = None  # exact value of uniform random play
    ceiling: float | None = None  # exact value of the best response to uniform random
    truncated: int = 0
    forfeited: int = 0
    failed: int = 0
    draw: float = 0.0  # share of games with score 0.5
    loss: float = 0.0
    adjusted: float | None = None  # the value less luck, and its 95 % interval; None where luck is not known
    adjusted_interval: list[float] | None = None
    legal_mass: float | None = None  # unrestricted probability of legal answers, mean over decisions
    nash_conv: float | None = None
    legal_rate: float | None = None  # share of answers that the parser took for a legal action
    free_play: dict[str, Any] | None = None  # value and legal_rate of unconstrained answers

    @property
    def share(self) -> float | None:
        """Where the value (exact, or else adjusted) lies between random play (0) and the best response to it (1).

        None: the ceiling is unknown, or no higher than random play.
        """
        known = (value for value in (self.exact, self.adjusted, self.value) if value is not None)
        return self._share_of(next(known))

    @property
    def share_interval(self) -> list[float] | None:
        """95 % interval of ``share`` where sampled play gives it; None where it is exact or unknown."""
        sampled = self.adjusted_interval or (self.low, self.high)
        ends = [self._share_of(end) for end in sampled if self.exact is None]
        return [end for end in ends if end is not None] or None

    def _share_of(self, value: float) -> float | None:
        if self.random is None or self.ceiling is None or self.ceiling - self.random <= 1e-12:
            return None
        return (value - self.random) / (self.ceiling - self.random)

    @property
    def grade(self) -> float:
        """The number for curves and for choosing the best checkpoint: an exact ``share``, or else the value.

        Not a sampled share: of small ceilings, as in poker, it is mostly noise, and would outweigh the other games.
        """
        return self.value if self.exact is None or self.share is None else self.share

    @property
    def row(self) -> dict[str, Any]:
        """The result as files hold it."""
        return vars(self) | {"share": self.share, "share_interval": self.share_interval}


def outcome(episode: Episode) -> Row:
    """How an episode ended: outcome, score and, where it can be told, luck; or the error where it failed."""
    if episode.outcome == "failed":
        return {"outcome": "failed", "score": None, "error": redact(episode.info["error"])}
    given_up = episode.outcome == "forfeited" and not episode.info["own_end"]  # undecided in training
    won = given_up and opposed(load_game(episode.task.task_id))  # not where others play on, nor of who cooperate
    row = {"outcome": episode.outcome, "score": 1.0 if won else episode.score}
    return row if (found := luck(episode)) is None else row | {"luck": sum(found[0])}


def tell_lost(match: str, rows: Seq[Row]) -> None:
    """Log how many games were cut off, and how many failed and why (where all did, that is an error of ``summary``)."""
    if cut := sum(row["outcome"] == "truncated" for row in rows):
        log.warning("%s: in %d of %d games a prompt did not fit ppo.max_seq_length; they are lost where it was the "
                    "player's", match, cut, len(rows))  # fmt: skip
    if 0 < len(failed := [row["error"] for row in rows if row["outcome"] == "failed"]) < len(rows):
        others = len(rows) - len(failed) - sum(map(len, whole_pairs([row["score"] for row in rows])))
        more = f", with {others} more of the same deals" if others else ""
        log.warning("%s: %d of %d games failed and are left out%s; the first: %s",
                    match, len(failed), len(rows), more, one_line(failed[0]))  # fmt: skip


def too_many_failed(failed: int, games: int) -> bool:
    """Whether infrastructure lost so many games of a step or an evaluation that it is worth nothing."""
    return failed > max(MAX_FAILED_SHARE * games, games > 1)


def legal_rate(episodes: Seq[Episode]) -> float | None:
    """Share of answers, retries included, that were parsed as a legal action; None: there were no answers."""
    played = [e for e in episodes if e.outcome != "failed"]
    illegal = sum(e.info["retries"] + (e.outcome == "forfeited" and e.info["own_end"]) for e in played)
    asked = sum(sum(e.info["n_decisions"].values()) + e.info["retries"] for e in played)
    unanswered = sum(e.outcome == "truncated" and e.info["own_end"] for e in played)  # the last query of each
    answers = asked - unanswered
    return 1 - illegal / answers if answers else None


def summary(game: str, strata: Seq[Seq[Row]], **exact: Any) -> GameResult:
    """Summarise the rows of one game, or of several with equal weights (a stratum each); rows come in pairs of seats.

    Where no pair is whole, the value may be of one seat, and has no place below a ceiling for both.
    ProgramError: all games failed.
    """
    rows = [row for stratum in strata for row in stratum]
    scores = [row["score"] for row in rows if row["score"] is not None]
    if not scores:
        raise ProgramError(f"every game of {game} failed; the first: {rows[0]['error']}")
    counted = [pairs for stratum in strata if (pairs := whole_pairs([row["score"] for row in stratum]))]
    if max(map(len, chain(*counted))) < 2 and exact.get("exact") is None:
        exact |= {"random": None, "ceiling": None}
    units = [np.array([sum(pair) / len(pair) for pair in pairs]) for pairs in counted]
    games = [sum(1 + len(pair) - len({*pair}) for pair in pairs) for pairs in counted]  # a won and a lost one: one
    value, low, high = (2 * end - 1 for end in mean_interval(units, games))
    exact |= _adjusted(strata, units, games)
    signs = [np.sign(np.array([*chain(*pairs)]) - 0.5) for pairs in counted]  # strata have equal weights, as above
    success, draw, loss = (float(np.mean([np.mean(sign_E == kind) for sign_E in signs])) for kind in (1, 0, -1))
    masses = [(row["legal_mass"], row["decisions"]) for row in rows if row.get("legal_mass") is not None]
    decisions = sum(n for _, n in masses)
    counts = {kind: sum(row["outcome"] == kind for row in rows) for kind in ("truncated", "failed")}
    own = sum(row["outcome"] == "forfeited" and not row["score"] for row in rows)  # by the player itself
    mass = sum(mass * n for mass, n in masses) / decisions if decisions else None
    return GameResult(game, len(scores), value, low, high, success, draw=draw, loss=loss, legal_mass=mass,
                      forfeited=own, **counts, **exact)  # fmt: skip


def _adjusted(strata: Seq[Seq[Row]], units: Seq[np.ndarray], games: Seq[int]) -> dict[str, Any]:
    """The value less luck, with its interval; {} where the luck of a game is not known, or there are few games."""
    if any("luck" not in row for stratum in strata for row in stratum if row["score"] is not None):
        return {}
    lucks = [luck for stratum in strata if len(luck := pair_means([row.get("luck") for row in stratum]))]
    if min(map(len, lucks)) < LEAST_PAIRS:
        return {}
    value, *ends = (2 * end - 1 for end in mean_interval([*map(less_luck, units, lucks)], games))
    return {"adjusted": value, "adjusted_interval": ends}


def differences(
    ours: Mapping[str, Seq[Row]], theirs: Mapping[str, Seq[Row]], averaged: Seq[str]
) -> list[dict[str, Any]]:
    """Difference of two players' values on the same deals: per game of both, and the mean over those of ``averaged``.

    ``adjusted`` is the difference less luck (``GameResult``), None where it is not known of a game.
    No mean where one of these has no difference. ProgramError: no deal was played to its end by both.
    """
    strata, lucks = dict[str, list[np.ndarray]](), dict[str, np.ndarray]()
    for game in [name for name in ours if name in theirs]:
        pairs = [*zip(ours[game], theirs[game], strict=True)]
        if len(deltas := _deltas(pairs, "score")):
            strata[game], lucks[game] = [deltas], _deltas(pairs, "luck")
        else:
            log.warning("%s: no difference, for no deal was played to its end by both players", game)
    if not strata:
        raise ProgramError("no deal was played to its end by both players")
    games = {game: [game] for game in strata}
    if len(averaged) > 1 and strata.keys() >= {*averaged}:  # a mean that lacked a game would be compared with others
        strata[OVERALL], games[OVERALL] = [strata[game][0] for game in averaged], [*averaged]
    rows = []
    for game, parts in strata.items():
        raw, less = paired_difference(parts), None
        both = [*zip(parts, [lucks[name] for name in games[game]], strict=True)]
        if all(len(units) == len(luck) >= LEAST_DEALS for units, luck in both):
            less = paired_difference([4 * less_luck((units + 2) / 4, luck / 4) - 2 for units, luck in both])
        rows.append({"game": game, "pairs": sum(map(len, parts)), "difference": raw.estimate,
                     "interval": [raw.low, raw.high], "p": raw.p, "adjusted": less and less.estimate,
                     "adjusted_interval": less and [less.low, less.high]})  # fmt: skip
    return rows


def _deltas(pairs: Seq[tuple[Row, Row]], key: str) -> np.ndarray:
    """Differences (deals,) of two players' values, or of their luck: of deals that both finished and that have it."""
    known: list[tuple[Any, Any]] = [(a.get(key), b.get(key)) for a, b in pairs]
    return pair_means([None if None in pair else 2 * (pair[0] - pair[1]) for pair in known])


def label(task_id: int) -> str:
    """The game's name, with the configuration where it is not the first: ``hex#1``."""
    game, _ = decode_task_id(task_id)
    config_id = task_id % CONFIGS_PER_GAME
    return game.name + (f"#{config_id}" if config_id else "")


def game_sets(items: Seq[Any]) -> dict[str, list[TaskRange]]:
    """The lines of a table of results, label -> tasks, from items as ``curriculum.pool`` takes them, and refuses."""
    return {_range_label(*parts[0]): parts for item in items for parts in pool([item]).values()}


def apart(sets: dict[str, list[TaskRange]]) -> list[str]:
    """The labels of the sets that are not contained in another one, so that a mean over them counts no game twice."""

    def within(parts: list[TaskRange], other: list[TaskRange]) -> bool:
        return all(any(first <= low and high <= last for first, last in other) for low, high in parts)

    return [name for name, parts in sets.items() if not any(x is not parts and within(parts, x) for x in sets.values())]


def _range_label(first: int, last: int) -> str:
    """A game's name and configurations; the name alone where only the first is meant, or all are the same."""
    if first == last:
        return label(first)
    game, _ = decode_task_id(first)
    low, high = first % CONFIGS_PER_GAME, last % CONFIGS_PER_GAME
    if all(game.params(c) == game.params(low) for c in range(low, min(high, low + DISTINCT) + 1)):
        return game.name
    return game.name + ("#*" if high - low == CONFIGS_PER_GAME - 1 else f"#{low}-{high}")


def paired_tasks(
    game_sets: Seq[Seq[TaskRange]], games: int, seed: int, opponent: str, deals: int = 0
) -> list[list[Task]]:
    """``games`` tasks (an even number) for each set: pairs of one task id, one game in each seat, on reserved seeds.

    The same arguments give the same deals, for any player. Task indices are negative, which gives random streams that
    training never uses. ``deals`` selects one of many independent series of deals and random streams.
    ValueError: ``games`` is not such a number.
    """
    if games < 2 or games % 2:
        raise ValueError(f"games {games}: an even number, 2 or more, half of them for each seat")
    number = count(1 + (deals << 32))
    drawn = [eval_tasks(game_set, games // 2, seed + (deals << 32), opponent) for game_set in game_sets]
    return [[replace(task, index=-next(number)) for task in tasks] for tasks in drawn]


def exact_table(player: Any, env_config: EnvConfig, task_id: int, progress: Progress = lambda *_: None) -> dict | None:
    """The player's policy at every information state, with the prompts of play; ``player`` needs ``action_probs``.

    None where the game is too large, where a prompt does not fit or cannot be made, or where a position does not tell
    it (``unknown_prompts``).
    """
    if not exact.feasible(load_game(task_id)) or unknown_prompts(task_id, env_config):
        return None

    def probs(states: list[tuple[Any, int]]) -> list[dict[int, float]]:
        found: list[dict[int, float]] = []
        for start in range(0, len(states), STATES_AT_ONCE):
            progress(f"evaluation: states of {label(task_id)}", start, len(states))
            part = states[start : start + STATES_AT_ONCE]
            found += player.action_probs([query_at(task_id, *place, env_config) for place in part])
        return found

    try:
        return exact.tabulate(load_game(task_id), probs)
    except PromptTooLongError:
        return None
    except ConfigError as error:
        log.warning("exact values left out: %s", error)
        return None


def ceilings(task_ids: Collection[int]) -> dict[str, float]:
    """Values against uniform random, mean of both seats, of random play and of the best response to it.

    {} where the task ids are of several games, or the game is too large.
    """
    game = load_game(min(task_ids))
    if any(load_game(other) is not game for other in task_ids) or not exact.feasible(game):
        return {}
    return {"random": mean_value(game, (0.0, 0.0)),  # zero-sum, and both seats play
            "ceiling": mean_value(game, exact.best_response_values(game))}  # fmt: skip


def mean_value(game: Any, returns: tuple[float, float]) -> float:
    """Mean of 2 * score - 1 over both seats, from their expected returns."""
    low, high = game.min_utility(), game.max_utility()
    return (sum(returns) - (low + high)) / (high - low)


def table_values(table: dict, task_id: int, nash: bool = False) -> dict[str, float]:
    """``ceilings``, and as ``exact`` the value of a tabular policy against uniform random.

    ``nash``: and NashConv, what both seats together would gain by best responses to the policy.
    """
    game = load_game(task_id)
    found = {"exact": mean_value(game, exact.value_against_random(game, table))} | ceilings([task_id])
    return found | ({"nash_conv": exact.nash_conv(game, table)} if nash else {})


def evaluate(
    player: Player,
    env_config: EnvConfig,
    task_ids: Seq[int | TaskRange],
    games: int = 200,
    opponent: str = "random",
    seed: int = 0,
    exact_tasks: Collection[int] | None = None,
    progress: Progress = lambda *_: None,
    nash: bool = False,
) -> list[GameResult]:
    """Play ``games`` games of each task id, half in each seat, and summarise; failed ones are left out and counted.

    The deals of a range are of task ids drawn from it, its results those of its first.

    Exact values, and with ``nash`` NashConv, are computed for ``exact_tasks`` (None: all), where the game is small
    enough and no episode was truncated. The ceiling against "random" is known of every game that is small enough.
    ValueError: ``games`` is not an even number. ProgramError: every episode of a game failed.
    """
    trace = env_config.env_type == "trace"
    ranges = [(item, item) if isinstance(item, int) else item for item in task_ids]
    drawn = paired_tasks([[part] for part in ranges], games, seed, opponent)
    everything = [task for tasks in drawn for task in tasks]
    episodes = iter(play(env_config, _Watched(player, len(everything), progress), everything))
    results, levels = [], dict[str, list[list[Episode]]]()
    for (task_id, _), tasks in zip(ranges, drawn, strict=True):
        mine = [next(episodes) for _ in tasks]
        if trace:  # several task ids may be of one level, and of files and servers all are of one name
            levels.setdefault(next((e.game for e in mine if e.outcome != "failed"), "trace"), []).append(mine)
            continue
        exactly = (exact_tasks is None or task_id in exact_tasks) and hasattr(player, "action_probs")
        exactly &= all(e.outcome != "truncated" for e in mine)  # exact values assume that prompts always fit
        table = exact_table(player, env_config, task_id, progress) if exactly else None
        known = table_values(table, task_id, nash) if table else ceilings([task_id]) if opponent == "random" else {}
        tell_lost(label(task_id), rows := [outcome(e) for e in mine])
        results.append(summary(label(task_id), [rows], legal_rate=legal_rate(mine), **known))
    for name, parts in levels.items():
        strata = [[outcome(e) for e in part] for part in parts]
        tell_lost(name, [*chain(*strata)])
        results.append(summary(name, strata, legal_rate=legal_rate([*chain(*parts)])))
    return results


class _Watched:
    """A player that reports how many of its games have ended."""

    def __init__(self, player: Player, games: int, progress: Progress) -> None:
        self.act, self._pass_on = player.act, getattr(player, "release", lambda episodes: None)
        self.leave_if_stopped = getattr(player, "leave_if_stopped", lambda: None)
        self._done, self._games, self._progress = 0, games, progress
        progress("evaluation: games", 0, games)

    def release(self, episodes: list[int]) -> None:
        self._done += len(episodes)
        self._progress("evaluation: games", self._done, self._games)
        self._pass_on(episodes)


def _free_play(found: dict[str, Any] | None) -> str | None:
    if not found:
        return None
    rate = found["legal_rate"]
    shown = "no answers" if rate is None else f"{100 if rate == 1 else min(100 * rate, 99.9):.3g}% legal"
    return f"{found['value']:{VALUE}}, {shown}"


def mean_grade(results: Seq[GameResult], exact_tasks: Collection[int]) -> float | None:
    """The mean ``grade``; None where a game that has exact values came without: its grade is of another kind."""
    grades = [r.grade for r in results]
    return float(np.mean(grades)) if sum(r.exact is not None for r in results) == len(exact_tasks) else None


def result_table(before: list[dict[str, Any]], after: list[GameResult]) -> tuple[str, dict[str, Any]]:
    """The closing table of a run as text, and the contents of ``summary.json``."""
    lines, games, known = [], dict[str, Any](), {old["game"]: old for old in before}
    for new in after:
        old = known.get(new.game, {})  # empty for a game that was not played before training
        free_before = old.get("free_play")
        lines.append({"game": new.game, "before": old.get("value"), "after": new.value,
                      "95 %": between(new.low, new.high),
                      "less luck": tables.less_luck(new.adjusted, new.adjusted_interval, new.exact),
                      "exact": new.exact, "ceiling": new.ceiling,
                      "share": shown_share(new.share, new.share_interval),
                      "NashConv before": old.get("nash_conv"), "NashConv": new.nash_conv,
                      "free before": _free_play(free_before), "free after": _free_play(new.free_play),
                      "failed": new.failed or None})  # fmt: skip
        games[new.game] = {
            "before": old.get("value"), "after": new.value, "interval": [new.low, new.high], "episodes": new.episodes,
            "adjusted": new.adjusted, "adjusted_interval": new.adjusted_interval,
            "exact_before": old.get("exact"), "exact_after": new.exact, "random": new.random, "ceiling": new.ceiling,
            "share_before": old.get("share"), "share": new.share, "share_interval": new.share_interval,
            "exact": new.exact is not None, "nash_conv_before": old.get("nash_conv"), "nash_conv": new.nash_conv,
            "free_play_before": free_before, "free_play": new.free_play, "failed": new.failed,
        }  # fmt: skip
    text = columns(lines, before=VALUE, after=VALUE, exact=VALUE, ceiling=VALUE)

    means = _mean_shares([game for game in games.values() if game["share"] is not None])
    if means["mean_share_of_ceiling"] is not None:
        was = shown_share(means["mean_share_before"], None) or "unknown"
        now = shown_share(means["mean_share_of_ceiling"], means["mean_share_interval"])
        known_of = sum(game["share"] is not None for game in games.values())
        some = f", {known_of} of {len(games)} games" if known_of < len(games) else ""
        text += f"\nmean share of the best-response ceiling{some}: {was} -> {now}"
    return text, means | {"games": games}


def _mean_shares(games: Seq[dict[str, Any]]) -> dict[str, Any]:
    """Means over the same games before and after; None where one is missing, the interval also where all are exact.

    The interval is Newcombe's: the root of the sum of squares of the games' distances to their ends.
    """
    befores, shares = ([game[key] for game in games] for key in ("share_before", "share"))
    before, after = (sum(s) / len(s) if s and None not in s else None for s in (befores, shares))
    interval = None
    if any(game["share_interval"] for game in games):
        ends = np.array([game["share_interval"] or [game["share"]] * 2 for game in games])
        below, above = np.linalg.norm(ends - np.array(shares)[:, None], axis=0) / len(games)
        interval = [after - below, after + above]
    return {"mean_share_of_ceiling": after, "mean_share_before": before, "mean_share_interval": interval}


class _Transcript:
    """A player that records prompts, answers, values and the probabilities of all legal actions."""

    def __init__(self, player: Any, tasks: Seq[Task], with_states: bool) -> None:
        self.player, self.tasks, self.with_states = player, tasks, with_states
        self.leave_if_stopped = getattr(player, "leave_if_stopped", lambda: None)
        self.release = getattr(player, "release", lambda episodes: None)
        self.turns: dict[int, list[dict[str, Any]]] = {}

    def act(self, queries: Seq[Query]) -> list[Action]:
        actions = self.player.act(queries)
        probs = iter(self._probs([q for q, a in zip(queries, actions, strict=True) if q.legal and not a.truncated]))
        for query, action in zip(queries, actions, strict=True):
            p = next(probs) if query.legal and not action.truncated else {}
            system, *_, user = (m["content"] for m in query.conversation)
            served = action.sequence is not None and action.sequence.decisions[-1].version is not None
            turn = {"seat": query.seat, "past": len(query.conversation) // 2 - 1, "user": user, "answer": action.text,
                    "legal": query.legal, "probs": p, "action": parse_action(action.text, query.legal),
                    "value": None if served else action.value}  # fmt: skip
            turn |= {"truncated": True} if action.truncated else {}  # there was no room for an answer
            if self.with_states:
                turn["state"] = str(position(self.tasks[query.episode].task_id, query.history))
            turns = self.turns.setdefault(query.episode, [])
            turns.append(turn if turns else {"system": system, **turn})
        return actions

    def _probs(self, queries: list[Query]) -> list[dict[int, float]]:
        """Of every legal action; {} where a free answer fits beside the prompt and the longest legal one does not."""
        try:
            return self.player.action_probs(queries) if queries else []
        except PromptTooLongError:
            return [{}] if len(queries) == 1 else [probs for query in queries for probs in self._probs([query])]


def record(player: Any, env_config: EnvConfig, tasks: Seq[Task], step: int) -> list[dict[str, Any]]:
    """Play tasks and return them turn by turn, as rows of ``episodes.jsonl`` for the replay viewer."""
    is_board = env_config.env_type == "openspiel"
    with_states = is_board and env_config.env_mode == "local"  # a server tells histories only at the end
    transcript = _Transcript(player, tasks, with_states)
    rows = []
    for number, episode in enumerate(play(env_config, transcript, tasks)):
        details = {key: episode.info.get(key) for key in ("seat", "returns", "history")}
        details["opponent"] = episode.task.opponent
        if not is_board:
            details["history"] = details["opponent"] = None  # there is no game to replay, and no opponent
        if episode.outcome == "failed":
            details["error"] = episode.info["error"]
            details["game"] = NAMES[episode.task.task_id // CONFIGS_PER_GAME] if is_board else "trace"
        rows.append({"step": step, "game": episode.game, "task_id": episode.task.task_id, "seed": episode.task.seed,
                     "score": episode.score, "outcome": episode.outcome,
                     **details, "turns": transcript.turns.get(number, [])})  # fmt: skip
    return rows
