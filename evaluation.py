"""How good a player is: sampled games with intervals, exact values where the game is small enough.

Values are in [-1, 1]: 2 * score - 1, which in a zero-sum game is return / greatest return. Evaluation draws its
seeds from a range that training never uses, and every player compared gets the same deals in the same seats.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from curriculum import CurriculumConfig, TaskRange, eval_tasks, pool
from env_wrapper import Action, EnvConfig, Episode, Player, Query, Task, parse_action, play
from intervals import mean_interval, pair_means

DISTINCT = 60  # configurations of a game repeat after fewer


@dataclass(frozen=True)
class GameResult:
    """One game of an evaluation: the mean value of sampled play with its 95 % interval, and the exact value."""

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

    @property
    def share(self) -> float | None:
        """Where the exact value lies between random play (0) and the best response (1)."""
        if self.exact is None or self.random is None or self.ceiling is None:
            return None
        return (self.exact - self.random) / (self.ceiling - self.random)


def label(task_id: int) -> str:
    """The game's name, with its configuration where that is not the first: ``hex#1``."""
    from games import CONFIGS_PER_GAME, decode_task_id

    game, _ = decode_task_id(task_id)
    config_id = task_id % CONFIGS_PER_GAME
    return game.name + (f"#{config_id}" if config_id else "")


def game_sets(items: Seq[Any]) -> dict[str, list[TaskRange]]:
    """What to evaluate, one line of a table each: label -> tasks.

    An item is a game's name (all its configurations), ``name#config``, a task id, ``first-last`` of task ids, or a
    range of them as in a curriculum.

    Raises:
        ValueError: an item that is none of these, or does not exist.
    """
    found: dict[str, list[TaskRange]] = {}
    for item in items:
        for parts in pool([_game_set(item)]).values():
            found[_range_label(*parts[0])] = parts
    return found


def _game_set(item: Any) -> Any:
    from games import CONFIGS_PER_GAME, NAMES

    if not isinstance(item, str):
        return tuple(item)
    if (match := re.fullmatch(r"(\w+)#(\d+)", item)) and match[1] in NAMES and int(match[2]) < CONFIGS_PER_GAME:
        task_id = NAMES.index(match[1]) * CONFIGS_PER_GAME + int(match[2])
        return task_id, task_id
    if item not in NAMES and (match := re.fullmatch(r"(\d+)(?:-(\d+))?", item)):
        return int(match[1]), int(match[2] or match[1])
    return item


def _range_label(first: int, last: int) -> str:
    """A game's name and its configurations; the name alone where only the first one is meant, or there is but one."""
    from games import CONFIGS_PER_GAME, decode_task_id

    if first == last:
        return label(first)
    game, _ = decode_task_id(first)
    low, high = first % CONFIGS_PER_GAME, last % CONFIGS_PER_GAME
    if all(game.params(c) == game.params(low) for c in range(low, min(high, low + DISTINCT) + 1)):
        return game.name
    return game.name + ("#*" if high - low == CONFIGS_PER_GAME - 1 else f"#{low}-{high}")


def paired_tasks(game_sets: Seq[Seq[TaskRange]], games: int, seed: int, opponent: str) -> list[list[Task]]:
    """``games`` tasks (an even number) for each set: pairs of one task id, one game in each seat, on reserved seeds.

    Every player that is given the same arguments gets the same deals. The tasks' indices are negative: random
    streams that training never uses.
    """
    number = count(1)
    drawn = [eval_tasks(game_set, games // 2, seed, opponent) for game_set in game_sets]
    return [[replace(task, index=-next(number)) for task in tasks] for tasks in drawn]


def exact_table(player: Any, env_config: EnvConfig, task_id: int) -> dict | None:
    """The player's policy at every information state (None: the game is too large), each prompt without history.

    ``player`` needs ``action_probs(queries)``.
    """
    from envs import exact
    from envs.openspiel import system_message, table, user_message

    shared = table(task_id)
    if not exact.feasible(shared.spiel):
        return None

    def probs(states: list[tuple[Any, int]]) -> list[dict[int, float]]:
        queries = []
        for state, seat in states:
            legal = {a: state.action_to_string(seat, a) for a in state.legal_actions(seat)}
            text = user_message(shared.game, state, seat, legal, env_config.prompt)
            conversation = [
                {"role": "system", "content": system_message(shared, env_config.prompt)},
                {"role": "user", "content": text},
            ]
            queries.append(Query(0, seat, conversation, legal, (0, seat, 0, 1)))
        return player.action_probs(queries)

    return exact.tabulate(shared.spiel, probs)


def table_values(table: dict, task_id: int) -> tuple[float, float, float]:
    """Exact value of a tabular policy, of random play and of the best response, against uniform random, both seats."""
    from envs import exact
    from envs.openspiel import load_game

    game = load_game(task_id)
    scale = 2 * game.max_utility()
    own, random, best = (
        sum(exact.value_against_random(game, table)) / scale,
        sum(exact.random_values(game)) / scale,
        sum(exact.best_response_values(game)) / scale,
    )
    return own, random, best


def exact_values(player: Any, env_config: EnvConfig, task_id: int) -> tuple[float, float, float] | None:
    """``table_values`` of a player; None where the game is too large."""
    table = exact_table(player, env_config, task_id)
    return None if table is None else table_values(table, task_id)


def evaluate(
    player: Player,
    env_config: EnvConfig,
    task_ids: Seq[int],
    games: int = 200,
    opponent: str = "random",
    seed: int = 0,
    with_exact: bool = True,
) -> list[GameResult]:
    """Play ``games`` games of each task id, half in each seat, and summarise; failed ones are left out and counted.

    Raises:
        RuntimeError: every episode of a game failed.
    """
    trace = env_config.env_type == "trace"
    drawn = paired_tasks([_drawn_from(t, trace) for t in task_ids], games, seed, opponent)
    episodes = iter(play(env_config, player, [task for tasks in drawn for task in tasks]))
    results = []
    for task_id, tasks in zip(task_ids, drawn, strict=True):
        mine = [next(episodes) for _ in tasks]
        exactly = with_exact and not trace and hasattr(player, "action_probs")
        exact = exact_values(player, env_config, task_id) if exactly else None
        name = next((e.game for e in mine if e.outcome != "failed"), "trace") if trace else label(task_id)
        results.append(_result(name, mine, exact))
    return results


def _drawn_from(task_id: int, trace: bool) -> list[tuple[int, int]]:
    """Which tasks an evaluation of one task id draws: it alone, or of trace, where seeds choose no row, its level."""
    if not trace:
        return [(task_id, task_id)]
    from envs.trace import TASKS_PER_LEVEL

    return [(task_id, task_id // TASKS_PER_LEVEL * TASKS_PER_LEVEL + TASKS_PER_LEVEL - 1)]


def _result(name: str, episodes: list[Episode], exact: tuple[float, float, float] | None) -> GameResult:
    valid = [e for e in episodes if e.outcome != "failed"]
    if not valid:
        raise RuntimeError(f"every episode of {name} failed: {episodes[0].info.get('error')}")
    units = pair_means([None if e.outcome == "failed" else e.score for e in episodes])
    value, low, high = (2 * score - 1 for score in mean_interval([units], len(valid)))
    outcomes = {o: sum(e.outcome == o for e in episodes) for o in ("truncated", "forfeited", "failed")}
    own, random, ceiling = exact or (None, None, None)
    success = sum(e.score > 0.5 for e in valid) / len(valid)
    return GameResult(name, len(valid), value, low, high, success, own, random, ceiling, **outcomes)


def result_table(before: list[dict[str, Any]], after: list[GameResult]) -> tuple[str, dict[str, Any]]:
    """The closing table as text, and the same as the contents of ``summary.json``."""
    lines = [f"{'game':<20}{'before':>9}{'after':>9}   95 % interval     {'exact':>8}{'ceiling':>9}{'share':>8}"]
    games: dict[str, Any] = {}
    for old, new in zip(before, after, strict=True):
        exact, ceiling, share = (f"{v:.3f}" if v is not None else "-" for v in (new.exact, new.ceiling, new.share))
        lines.append(f"{new.game:<20}{old['value']:>+9.3f}{new.value:>+9.3f}   [{new.low:+.3f}, {new.high:+.3f}]  "
                     f"{exact:>8}{ceiling:>9}{share:>8}")  # fmt: skip
        games[new.game] = {
            "before": old["value"], "after": new.value, "interval": [new.low, new.high], "episodes": new.episodes,
            "exact_before": old["exact"], "exact_after": new.exact, "random": new.random, "ceiling": new.ceiling,
            "share_before": old["share"], "share": new.share, "exact": new.exact is not None,
        }  # fmt: skip

    def mean(key: str) -> float | None:
        shares = [g[key] for g in games.values() if g[key] is not None]
        return sum(shares) / len(shares) if shares else None

    summary = {"mean_share_of_ceiling": mean("share"), "mean_share_before": mean("share_before"), "games": games}
    if summary["mean_share_of_ceiling"] is not None:
        lines.append(f"mean share of the best-response ceiling: {summary['mean_share_before']:.3f} -> "
                     f"{summary['mean_share_of_ceiling']:.3f}")  # fmt: skip
    return "\n".join(lines), summary


def first_tasks(config: CurriculumConfig, env_type: str = "openspiel") -> list[int]:
    """The first task id of every game, or level of trace, in the stages: what evaluations are made on."""
    played = [ranges for stage in config.stages for ranges in pool(stage.games).values()]
    if env_type == "trace":
        from envs.trace import level_starts

        return sorted({start for ranges in played for part in ranges for start in level_starts(*part)})
    return sorted({ranges[0][0] for ranges in played})


def summarise(episodes: Seq[Episode]) -> dict[str, Any]:
    """What a step's episodes were: means over those that did not fail, per game too, and counts of outcomes."""
    valid = [e for e in episodes if e.outcome != "failed"]
    by_game: dict[str, list[float]] = {}
    for episode in valid:
        by_game.setdefault(episode.game, []).append(episode.score)
    outcomes = Counter(e.outcome for e in episodes)
    return {
        "games": len(episodes),
        "score_mean": sum(e.score for e in valid) / len(valid),
        "success_rate": sum(e.score > 0.5 for e in valid) / len(valid),
        **{outcome: outcomes[outcome] for outcome in ("truncated", "forfeited", "failed")},
        "retries": sum(e.info.get("retries", 0) for e in episodes),
        "opponents": dict(Counter(e.task.opponent for e in episodes)),
        **{f"score/{game}": sum(scores) / len(scores) for game, scores in sorted(by_game.items())},
    }


class _Recorder:
    """A player that notes what it was shown, what it answered and what it thought of the alternatives."""

    def __init__(self, player: Any) -> None:
        self.player = player
        self.turns: dict[int, list[dict[str, Any]]] = {}

    def act(self, queries: Seq[Query]) -> list[Action]:
        """Answer as the player does."""
        probs = self.player.action_probs(queries) if queries[0].legal else [{} for _ in queries]
        actions = self.player.act(queries)
        for query, action, p in zip(queries, actions, probs, strict=True):
            system, *_, user = (m["content"] for m in query.conversation)
            turn = {"seat": query.seat, "user": user, "answer": action.text, "legal": query.legal, "probs": p,
                    "action": parse_action(action.text, query.legal), "value": action.value}  # fmt: skip
            turns = self.turns.setdefault(query.episode, [])
            turns.append(turn if turns else {"system": system, **turn})
        return actions


def record(player: Any, env_config: EnvConfig, tasks: Seq[Task], step: int) -> list[dict[str, Any]]:
    """Play tasks and return them turn by turn, as rows of ``episodes.jsonl`` for the replay viewer."""
    size = env_config.games_at_once or len(tasks)
    if size < len(tasks):  # players see episodes numbered anew in each part
        parts = [tasks[i : i + size] for i in range(0, len(tasks), size)]
        return [row for part in parts for row in record(player, env_config, part, step)]
    recorder = _Recorder(player)
    episodes = play(env_config, recorder, tasks)
    rows = []
    for number, episode in enumerate(episodes):
        turns, info = recorder.turns.get(number, []), episode.info
        kept = {key: info.get(key) for key in ("seat", "returns", "history")}
        if env_config.env_type == "trace":
            kept["history"] = None  # there is no game to replay
        elif episode.outcome != "failed":
            _add_states(episode, turns)
        rows.append({"step": step, "game": episode.game, "task_id": episode.task.task_id, "seed": episode.task.seed,
                     "opponent": episode.task.opponent, "score": episode.score, "outcome": episode.outcome,
                     **kept, "turns": turns})  # fmt: skip
    return rows


def _add_states(episode: Episode, turns: list[dict[str, Any]]) -> None:
    """Replay an episode's history and give every recorded turn the position it was asked at."""
    from envs.openspiel import load_game

    game = load_game(episode.task.task_id)
    state, history, asked = game.new_initial_state(), list(episode.info["history"]), iter(turns)
    turn = next(asked, None)
    while history and not state.is_terminal():
        together = game.num_players() if state.is_simultaneous_node() else 1
        moves, history = history[:together], history[together:]
        for player, _ in moves:
            if turn and player == turn["seat"] and list(turn["legal"]) == state.legal_actions(player):
                turn["state"] = str(state)
                while turn and turn.get("action") is None:  # attempts that could not be read share the position
                    turn = next(asked, None)
                    if turn:
                        turn["state"] = str(state)
                turn = next(asked, None)
        if together == 1:
            state.apply_action(moves[0][1])
        else:
            state.apply_actions([action for _, action in moves])
