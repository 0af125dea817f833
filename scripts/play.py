"""Play a game against a checkpoint in the terminal.

    python scripts/play.py --checkpoint runs/tiny --game tic_tac_toe
    python scripts/play.py --opponent mcts:200x1 --game connect_four --seat 1

Answer with the number of an action. ``?`` shows what the model would play in your place, ``q`` ends the game.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from env_wrapper import Action, EnvConfig, Episode, Player, Query, Task, make_env, play
from envs.openspiel import load_game
from evaluation import game_sets
from runlog import setup_logging
from scripts.arena import catch_up
from scripts.players import Contestant, Roster, Seats, ServerError
from utils import ConfigError, redact


class QuitError(Exception):
    """The person has had enough."""


class Table:
    """The same game once more, played along move by move, to draw positions as the full prompt describes them.

    What a player is shown may be terser (``prompt: compact``); a person gets the board.
    """

    def __init__(self, config: EnvConfig, task: Task) -> None:
        self.env = make_env(replace(config, prompt="full"))
        self.skips_forced = config.protocol != "affinetes"
        self.step = self.env.reset(task)
        self._forced_moves()

    def answer(self, text: str) -> None:
        """Play the answer of the seat to move."""
        self.step = self.env.step(text)
        self._forced_moves()

    def _forced_moves(self) -> None:
        while self.skips_forced and len(self.step.legal) == 1:
            self.step = self.env.step(str(next(iter(self.step.legal))))


class Person:
    """Someone at the terminal, who sees the table and answers with action ids."""

    def __init__(self, table: Table, adviser: Any) -> None:
        self.table, self.adviser = table, adviser

    def act(self, queries: Sequence[Query]) -> list[Action]:
        """Show the position and wait for a legal answer.

        Raises:
            QuitError: ``q``, or the end of the input.
        """
        [query] = queries
        print(f"\n{_position(self.table.step.text)}")
        print("\n".join(f"  {action:>4}  {name}" for action, name in query.legal.items()))
        while True:
            text = _ask("your move (? for the model's opinion, q to quit): ")
            if text in ("q", "quit"):
                raise QuitError
            if text == "?":
                print(self._opinion(query))
            elif text not in map(str, query.legal):
                print(f"{text!r} is none of the legal actions {', '.join(map(str, query.legal))}")
            else:
                return [Action(text)]

    def _opinion(self, query: Query) -> str:
        if not hasattr(self.adviser, "action_probs"):
            return "this opponent has no probabilities to show"
        [probs] = self.adviser.action_probs([query])
        ranked = sorted(probs.items(), key=lambda item: -item[1])
        return "\n".join(f"  {action:>4}  {p:6.1%}  {query.legal[action]}" for action, p in ranked)


class Followed:
    """Passes questions on and plays the answers at the table too."""

    def __init__(self, player: Player, table: Table) -> None:
        self.player, self.table = player, table

    def act(self, queries: Sequence[Query]) -> list[Action]:
        """Answer as the player does."""
        actions = self.player.act(queries)
        for action in actions:
            self.table.answer(action.text)
        return actions


def _ask(prompt: str) -> str:
    try:
        text = input(prompt).strip()
    except EOFError:
        raise QuitError from None
    if not sys.stdin.isatty():
        print(text)
    return text


def _position(text: str) -> str:
    """The position of a full prompt; its list of actions is drawn otherwise."""
    return text.removeprefix("Current State:\n").partition("\nLegal Actions:\n")[0]


def play_one(opponent: Contestant, task: Task) -> Episode:
    """Play one task, the person in its own seat.

    Raises:
        QuitError: the person ended it.
        ConfigError: a bot that cannot play this game.
    """
    config = replace(opponent.env, env_mode="local")
    try:
        table = Table(config, task)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    others = {} if opponent.player is None else {opponent.label: opponent.player}
    seats = Seats(Person(table, opponent.player), others)
    [episode] = play(config, Followed(seats, table), [task])
    return episode


def ending(episode: Episode) -> str:
    """The last position, with nothing hidden any more, and who won."""
    state = load_game(episode.task.task_id).new_initial_state()
    catch_up(state, episode.info["history"])
    result = "win" if episode.score > 0.5 else "lose" if episode.score < 0.5 else "draw"
    seat, returns = episode.info["seat"], episode.info["returns"]
    return f"\n{state}\n\nyou {result}: score {episode.score:.3f}, returns {returns}, you were player {seat}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", "--opponent", dest="opponent", metavar="PLAYER", default="base",
        help="whom to play against: a checkpoint, a run, base, a bot or an http(s) address")  # fmt: skip
    add("--game", default="tic_tac_toe", help="NAME, NAME#CONFIG or a task id (default tic_tac_toe)")
    add("--seat", type=int, choices=(0, 1), default=0, help="yours (default 0)")
    add("--seed", type=int, default=0, help="of the deal and of the opponent (default 0)")
    add("--greedy", action="store_true", help="the likeliest answer instead of a sampled one")
    add("--model", metavar="NAME", help="the model that base means, or to ask a server for")
    add("--config", action="append", default=[], metavar="FILE", help="differences to the run's configuration")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. model.use_4bit=false")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed {args.seed}: at least 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Play; exit codes: 0 played or quit, 1 the game failed, 2 bad usage, 130 interrupted."""
    setup_logging()
    args = arguments(argv)
    try:
        try:
            [(first, _)] = next(iter(game_sets([args.game]).values()))
        except ValueError as error:
            raise ConfigError(f"--game: {error}") from error
        opponent = Roster(args.config, args.set, args.seed, args.greedy, args.model).contestant(args.opponent)
        # The environment seats the player at seed % 2; deals are numbered so that every seed is another one.
        episode = play_one(opponent, Task(first, 2 * args.seed + args.seat, opponent.opponent))
    except ConfigError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"the game failed: {redact(str(error))}", file=sys.stderr)
        return 1
    except QuitError:
        print("\nbye")
        return 0
    except KeyboardInterrupt:
        return 130
    if episode.outcome == "failed":
        print(f"the game failed: {redact(episode.info['error'])}", file=sys.stderr)
        return 1
    print(ending(episode))
    return 0


if __name__ == "__main__":
    sys.exit(main())
