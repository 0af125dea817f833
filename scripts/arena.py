"""Plays contestants against opponents, a fixed number of games at a time, and keeps what was played in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from env_wrapper import EnvConfig, Episode, Task, play
from envs.openspiel import OpenSpielEnv, table
from envs.opponents import make_bot, parse_opponent
from runlog import Console
from scripts.players import Contestant, ModelPlayer, Seats
from utils import ConfigError

Row = dict[str, Any]  # a finished game, as in the file


class EpisodeLog:
    """Rows of finished games in a JSON-lines file, whose first line holds the settings. It can be continued.

    Games are added in chunks, always in the same order, so that a file is continued where it ends: a chunk that is
    whole in it is not played again. Without a path nothing is kept.

    Raises:
        ConfigError: the file belongs to other settings, or is damaged.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path, self._head = path, json.dumps({"settings": settings}).encode() + b"\n"
        self._kept: list[tuple[Row, int]] = []  # rows not taken yet, each with the file's length up to its end
        self._length = len(self._head)  # of the file up to what was taken or added
        if path is None:
            return
        try:
            data = path.read_bytes() if path.exists() else b""
            if data:
                self._kept = self._read(data)
            else:
                path.write_bytes(self._head)
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror}") from error

    def _read(self, data: bytes) -> list[tuple[Row, int]]:
        if not data.startswith(self._head):
            raise ConfigError(
                f"--output {self._path}: holds games with other settings; repeat them, or name another file"
            )
        lines = data[len(self._head) :].split(b"\n")[:-1]  # a line cut short is left out
        rows, length = [], len(self._head)
        for number, line in enumerate(lines, 2):
            length += len(line) + 1
            try:
                rows.append((json.loads(line), length))
            except ValueError as error:
                raise ConfigError(f"--output {self._path}: line {number} is damaged: {error}") from error
        return rows

    def take(self, count: int) -> list[Row] | None:
        """The next chunk, if all ``count`` games of it are in the file."""
        if len(self._kept) < count:
            self._kept = []
            return None
        taken, self._kept = self._kept[:count], self._kept[count:]
        self._length = taken[-1][1]
        return [row for row, _ in taken]

    def add(self, rows: Sequence[Row]) -> None:
        """Write a chunk that was played after what was taken, over the remains of a chunk that was cut short."""
        if self._path:
            with self._path.open("r+b") as file:
                file.truncate(self._length)
                file.seek(self._length)
                file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
                self._length = file.tell()


class Arena:
    """Plays tasks chunk by chunk. ``games_at_once`` is the size of a chunk: it is part of what a seed determines."""

    def __init__(self, log: EpisodeLog, console: Console, games_at_once: int) -> None:
        self.log, self.console, self.games_at_once, self.done = log, console, games_at_once, 0

    def play(self, own: Contestant, opponent: Contestant, game: str, tasks: Sequence[Task]) -> list[Row]:
        """Play the tasks, whose opponent strings name ``opponent``, and return their rows in order."""
        rows: list[Row] = []
        for start in range(0, len(tasks), self.games_at_once):
            chunk = tasks[start : start + self.games_at_once]
            played = self.log.take(len(chunk))
            if played is None:
                played = [_row(own, opponent, game, e) for e in _episodes(own, opponent, chunk)]
                self.log.add(played)
            rows += played
            self.done += len(chunk)
            self.console.update(
                self.done, f"{own.label} against {opponent.label}, {game}: {len(rows)}/{len(tasks)} games"
            )
        return rows


def _episodes(own: Contestant, opponent: Contestant, tasks: Sequence[Task]) -> list[Episode]:
    if own.player is None:
        if opponent.player is not None:
            raise ConfigError(f"{own.label} against {opponent.label}: the other way round, the model is the player")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda task: play_bot(own.label, task), tasks))
    if isinstance(opponent.player, ModelPlayer) and opponent.env != own.env:
        raise ConfigError(f"{own.label} against {opponent.label}: they were trained with different prompts or answers "
                          "(env of their run_config.json) and cannot sit at one table")  # fmt: skip
    others = {} if opponent.player is None else {opponent.label: opponent.player}
    return play(own.env, Seats(own.player, others), tasks)


def play_bot(spec: str, task: Task) -> Episode:
    """Play a task with a bot in the model's seat. It is shown the position, so that there is no conversation."""
    env, shared = OpenSpielEnv(EnvConfig()), table(task.task_id)
    try:
        step = env.reset(task)
        seat, seed = step.info["seat"], task.seed or 0
        bot = make_bot(shared.game, shared.spiel, parse_opponent(spec), seat, seed)
        state, seen, decisions = shared.spiel.new_initial_state(), 0, 0
        while not step.done:
            catch_up(state, step.info["history"][seen:])
            seen = len(step.info["history"])
            decisions += len(step.legal) > 1
            step = env.step(str(bot.step(state) if len(step.legal) > 1 else next(iter(step.legal))))
    except Exception as error:
        return Episode(task, shared.game.name, 0.0, "failed", info={"error": f"{type(error).__name__}: {error}"})
    info = {key: step.info[key] for key in ("seat", "returns", "history")}
    info |= {"n_decisions": {seat: decisions}, "retries": 0, "length": len(info["history"])}
    return Episode(task, shared.game.name, step.score, "finished", info=info)


def catch_up(state: Any, moves: list[list[int]]) -> None:
    """Play further moves of a history."""
    while moves:
        if state.is_simultaneous_node():
            together, moves = moves[: state.num_players()], moves[state.num_players() :]
            state.apply_actions([action for _, action in together])
        else:
            state.apply_action(moves[0][1])
            moves = moves[1:]


def _row(own: Contestant, opponent: Contestant, game: str, episode: Episode) -> Row:
    task, info = episode.task, episode.info
    row: Row = {"player": own.label, "opponent": opponent.label, "game": game, "task_id": task.task_id,
                "seed": task.seed, "index": task.index, "outcome": episode.outcome}  # fmt: skip
    if episode.outcome == "failed":
        return row | {"score": None, "error": info["error"]}
    seat = info["seat"]
    sequences = episode.sequences.get(seat, [])
    mass = own.player.legal_mass(sequences) if isinstance(own.player, ModelPlayer) else []
    return row | {"score": episode.score, "seat": seat, "returns": info["returns"], "moves": info["length"],
                  "decisions": info["n_decisions"].get(seat, 0), "retries": info["retries"],
                  "legal_mass": sum(mass) / len(mass) if mass else None}  # fmt: skip
