"""Plays contestants against opponents, a fixed number of games at a time, and keeps the results in a file.

And what is exact of a contestant, where the game is small enough.
"""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from config.reader import blaming, printable, read_file, read_json
from env_wrapper import play
from envs import exact
from envs.affinetes import check_server
from envs.client import is_number
from envs.config import PLAYED_BY, EnvConfig
from envs.openspiel import OpenSpielEnv, load_game, position, table, unknown_prompts
from envs.opponents import check_served, make_bot, parse_opponent, solution
from envs.types import Episode, Task
from evaluation.measure import Row, exact_table, outcome, table_values, tell_lost
from evaluation.players import Contestant, ModelPlayer, Seats
from training.console import Console
from training.process import ProgramError, must_be_writable
from utils import CheckpointError, ConfigError, in_threads, write_file

log = logging.getLogger(__name__)
MOST_BYTES = 2**31  # size limit of a file of results


class Arena:
    """Plays tasks in chunks, and keeps the rows of finished games in a JSON-lines file so that a run can be continued.

    The first line holds the settings. Chunks of ``games_at_once`` games (results depend on that number too) come in
    the same order each time: a chunk that is complete in the file is not played again, one that was cut short or in
    which a game failed is. Without a path nothing is kept.

    ConfigError: the file belongs to other settings, or is damaged; no server answers that is to host the games.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any], console: Console, games_at_once: int) -> None:
        self.console, self.games_at_once = console, games_at_once
        self._path, self._head = path, json.dumps({"settings": settings}) + "\n"
        self._done: list[str] = []  # lines of what is played, now or before: made once, as the file grows with each
        self._kept: list[Row] = []  # from the file, not used yet
        self._known = 0  # of those done: from the file
        self._written = (0, 0)  # inode and modification time of the file as this process wrote it last
        if path is None:
            return
        self._path = path = path.resolve()  # write to the target of a link
        with blaming("--output ", (ConfigError, CheckpointError)):
            text = read_file(path, MOST_BYTES).decode(errors="replace") if path.exists() else ""
            if text and not text.startswith(self._head):
                how = _first_difference(text, self._head)
                raise ConfigError(f"{path}: holds games with other settings{how}; repeat them, or name another file")
            self._write(text or self._head)  # a path that cannot be written fails before any game
        for number, line in enumerate(text.split("\n")[1:-1], 2):  # an incomplete last line is dropped
            with blaming(f"--output {path}: line {number} is damaged: ", (RecursionError, ValueError)):
                self._kept.append(json.loads(line))

    def play(self, own: Contestant, opponent: Contestant, game: str, tasks: Sequence[Task]) -> list[Row]:
        """Play the tasks, whose opponent strings name ``opponent``, and return their rows in order."""
        rows: list[Row] = []
        match = own.label + f" against {opponent.label}" * (own.env.env_type != "trace") + f", {game}"
        for start in range(0, len(tasks), self.games_at_once):
            chunk = tasks[start : start + self.games_at_once]
            played, self._kept = self._kept[: len(chunk)], self._kept[len(chunk) :]
            for number, (row, task) in enumerate(zip(played, chunk, strict=False), len(self._done) + 2):
                expected = _identity(own, opponent, game, task)
                if not isinstance(row, dict) or any(row.get(key) != value for key, value in expected.items()):
                    raise ConfigError(f"--output {self._path}: line {number} is another game than this command plays "
                                      "there; name another file")  # fmt: skip
                if not _is_result(row):
                    raise ConfigError(f"--output {self._path}: line {number} is no result of a game")
            fresh = len(played) < len(chunk) or any(row["outcome"] == "failed" for row in played)
            if fresh:
                if len(self._done) == self._known:  # the first: each game would ask a server that is gone five times
                    check_server(own.env)
                played = _rows(own, opponent, game, _episodes(own, opponent, chunk))
            rows += played
            self._done += [json.dumps(row) + "\n" for row in played]
            if not fresh:  # it took no time that tells how much is left
                self._known += len(chunk)
                self.console.total -= len(chunk)
                continue
            if self._path:
                later = [json.dumps(row) + "\n" for row in self._kept]
                self._write(self._head + "".join([*self._done, *later]))
            self.console.update(len(self._done) - self._known, f"{match}: {len(rows)}/{len(tasks)} games")
        if given := sum(row["outcome"] == "forfeited" and row["score"] == 1 for row in rows):
            log.warning(
                "%s: in %d of %d games the opponent gave no legal answer; they count as won", match, given, len(rows)
            )
        tell_lost(match, rows)
        return rows

    def _write(self, text: str) -> None:
        """Replace the file, unless another process has written to it: its games would be lost."""
        assert self._path
        if self._written != (0, 0) and self._stamp != self._written:
            raise ConfigError(
                f"--output {self._path}: it was changed meanwhile, perhaps by another evaluation; name another file"
            )
        write_file(self._path, text.encode())
        self._written = self._stamp

    @property
    def _stamp(self) -> tuple[int, int]:
        stat = self._path.stat() if self._path and self._path.exists() else None
        return (stat.st_ino, stat.st_mtime_ns) if stat else (0, 0)


def _first_difference(text: str, head: str) -> str:
    """Where the settings of a file differ from those of its command, in a clause."""
    with contextlib.suppress(LookupError, RecursionError, TypeError, ValueError):
        theirs, ours = (json.loads(line.split("\n")[0])["settings"] for line in (text, head))
        labels = [[player["label"] for player in settings["players"]] for settings in (theirs, ours)]
        for was, now in zip(*labels, strict=True):
            if was != now:  # the run has a newer checkpoint by now
                return f" ({printable(str(was))} played, not {now})"
        return next(f" ({key})" for key in ours if ours[key] != theirs.get(key))
    return ""


def check_match(own: Contestant, opponent: Contestant) -> None:
    """Raise ConfigError where the two cannot play each other."""
    if own.player is None and opponent.player is not None:
        raise ConfigError(f"{own.label} against {opponent.label}: name the model as the player, the bot as opponent")
    if own.player is not None and own.env.env_mode != "local":
        with blaming(f"{own.label}: env.env_mode {own.env.env_mode}: "):
            check_served(opponent.opponent)
    if own.player is not None and isinstance(opponent.player, ModelPlayer):
        differing = [f"env.{key}" for key in PLAYED_BY if getattr(own.env, key) != getattr(opponent.env, key)]
        if differing:
            raise ConfigError(f"{own.label} against {opponent.label}: {', '.join(differing)} of their run_config.json "
                              "differ: both must have the same prompts and answers")  # fmt: skip


def _episodes(own: Contestant, opponent: Contestant, tasks: Sequence[Task]) -> list[Episode]:
    if own.player is None:
        return in_threads(lambda task: play_bot(own.label, task), tasks, os.cpu_count())
    for player in (own.player, opponent.player):
        if isinstance(player, ModelPlayer):
            player.policy.forget()  # rules of other games: a chunk is the same whatever was played before it
    others = {} if opponent.player is None else {opponent.label: opponent.player}
    return play(own.env, Seats(own.player, others), tasks)


def play_bot(spec: str, task: Task) -> Episode:
    """Play a task with a bot in the model's seat: it is given the state of the game instead of a prompt."""
    env, shared = OpenSpielEnv(EnvConfig()), table(task.task_id)
    try:
        step = env.reset(task)
        seat, seed = step.info["seat"], task.seed or 0
        bot = make_bot(shared.game, shared.spiel, parse_opponent(spec), seat, seed)
        decisions = 0
        while not step.done:
            [action, *others] = step.legal
            if others:
                decisions, action = decisions + 1, bot.step(position(task.task_id, step.info["history"]))
            step = env.step(str(action))
    except Exception as error:  # a failing search or game costs this game alone
        return Episode(task, shared.game.name, 0.0, "failed", info={"error": f"{type(error).__name__}: {error}"})
    info = {key: step.info[key] for key in ("seat", "returns", "history")}
    info |= {"n_decisions": {seat: decisions}, "retries": 0, "length": len(info["history"])}
    return Episode(task, shared.game.name, step.score, "finished", info=info)


def match_scores(rows: Sequence[Row]) -> np.ndarray:
    """The scores of a match, a row a pair of games. Pairs with a failed game are left out.

    A game is drawn if either player's prompt no longer fitted.
    """
    ended = [0.5 if row["outcome"] == "truncated" else row["score"] for row in rows]
    scores = np.array(ended, dtype=float).reshape(-1, 2)  # None, of a failed game, becomes NaN
    scores = scores[~np.isnan(scores).any(axis=1)]
    if not len(scores):
        errors = [row["error"] for row in rows if row["outcome"] == "failed"]
        every = "game" if len(errors) == len(rows) else "pair of games"
        raise ProgramError(f"every {every} of {rows[0]['game']} failed; the first: {errors[0]}")
    return scores


def exact_results(player: Contestant, task_ids: set[int]) -> dict[str, float]:
    """Exact values against uniform random (the player's, random play's, the ceiling) and NashConv; {}: not computable.

    For a game that a server hosts they are not: its prompts are known only for positions that were met.
    """
    game, name = load_game(task_id := min(task_ids)), table(task_id).game.name
    several = any(load_game(other) is not game for other in task_ids)
    if several or not exact.feasible(game):
        small = f"of several configurations; name one: {name}#0" if several else "too large"
        why = small if exact.is_duel(game) else "no zero-sum game of two"
        log.warning("--exact: %s left out, %s", name, why)
        return {}
    if player.label == "random":
        policy_table = exact.uniform_table(game)
    elif player.player is None and (bot := parse_opponent(player.label)).solves:
        policy_table = solution(table(task_id).game, game, bot)
    elif not hasattr(player.player, "action_probs") or player.env.answer_mode == "free":
        log.warning("--exact: %s left out for %s, whose probabilities of moves are not known", name, player.label)
        return {}
    elif not (policy_table := exact_table(player.player, player.env, task_id) or {}):
        why = unknown_prompts(task_id, player.env) or "fail or do not fit ppo.max_seq_length"
        log.warning("--exact: %s left out for %s, whose prompts %s", name, player.label, why)
        return {}
    return table_values(policy_table, task_id, nash=True)


def must_take_tables(file: Path, output: Path | None) -> None:
    """Raise ConfigError or OSError where tables cannot be written there, or would replace something else."""
    with contextlib.suppress(FileNotFoundError):
        file.lstat()  # raises for a name that is too long, say
    if output and file == Path(os.path.realpath(output)):
        raise ConfigError("is the --output file, which holds the games; name another")
    if file.exists() and not file.is_file():
        raise ConfigError("is no regular file")
    if file.exists() and sys.stdout and os.path.samestat(file.stat(), os.fstat(1)):  # None: closed
        raise ConfigError("is where the tables are printed; name another file")
    if file.exists() and not _is_own(file):
        raise ConfigError("holds something else than tables of this program; name another file")
    must_be_writable(file.parent)


def _is_own(file: Path) -> bool:
    """Whether a file is empty or holds what ``--json`` wrote."""
    with contextlib.suppress(ConfigError, LookupError, TypeError):
        return not file.stat().st_size or read_json(file)["settings"]["players"] is not None
    return False


def _identity(own: Contestant, opponent: Contestant, game: str, task: Task) -> Row:
    return {"player": own.label, "opponent": opponent.label, "game": game, "task_id": task.task_id,
            "seed": task.seed, "index": task.index}  # fmt: skip


def _is_result(row: Row) -> bool:
    """Whether a row from a file holds a possible result of a game."""
    kind, score, mass, decisions = (row.get(key) for key in ("outcome", "score", "legal_mass", "decisions"))
    in_range = all(x is None or (is_number(x) and 0 <= x <= 1) for x in (score, mass))
    counted = mass is None or (type(decisions) is int and decisions >= 0 and is_number(decisions))
    scored = kind in ("finished", "truncated", "forfeited", "failed") and (score is None) == (kind == "failed")
    return scored and in_range and counted and is_number(row.get("luck", 0))


def _rows(own: Contestant, opponent: Contestant, game: str, episodes: Sequence[Episode]) -> list[Row]:
    answered = [e.sequences.get(e.info["seat"], []) if e.outcome != "failed" else [] for e in episodes]
    # Those of all games at once: each alone would take longer than it took to play it.
    masses = iter(own.player.legal_mass([*chain(*answered)]) if isinstance(own.player, ModelPlayer) else ())
    rows = [_identity(own, opponent, game, episode.task) | outcome(episode) for episode in episodes]
    for row, episode, sequences in zip(rows, episodes, answered, strict=True):
        if episode.outcome == "failed":
            continue
        info, mass = episode.info, [*islice(masses, sum(len(s.decisions) for s in sequences))]
        row |= {"seat": info["seat"], "returns": info["returns"], "moves": info["length"],
                "decisions": info["n_decisions"].get(info["seat"], 0), "retries": info["retries"],
                "legal_mass": min(sum(mass) / len(mass), 1.0) if mass else None}  # fmt: skip
    return rows
