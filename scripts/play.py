"""Play a game against a checkpoint in the terminal.

    python scripts/play.py --checkpoint runs/tiny-seed0 --game tic_tac_toe
    python scripts/play.py --opponent mcts:200x1 --game connect_four --seat 1

Answer with the number or the name of an action (``4`` or ``x(1,1)``). ``?`` shows what the model would play in your
place, ``q`` quits.
"""

import argparse
import contextlib
import random
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import config.start  # noqa: F401, before libraries load

from config.flags import FlagParser
from config.reader import ConfigError, blaming
from env_wrapper import make_env, play
from envs.openspiel import position, table
from envs.types import Action, Episode, PromptTooLongError, Query, Task
from evaluation.measure import game_sets
from evaluation.players import Contestant, Roster, Seats, is_bot, is_folder, player_flags
from training.process import ProgramError, leave, run_program

MOST_LINES = 9  # of legal actions, one below the other: more would move the position off the screen


class Person:
    """Whoever sits at the terminal. They see the whole board, however tersely the model is shown it."""

    def __init__(self, task_id: int, adviser: Any) -> None:
        self.task_id, self.adviser = task_id, adviser

    def act(self, queries: Sequence[Query]) -> list[Action]:
        """Show the position and wait for a legal answer; EOFError after ``q`` or at the end of the input."""
        [query] = queries
        state, game = position(self.task_id, query.history), table(self.task_id).game
        print(f"\n{game.describe(state, query.seat)}\n\nYou are Player {query.seat}.")
        print(_menu(query.legal))
        while True:
            text = _ask("your move (? for the model's opinion, q to quit): ")
            if text in ("q", "quit"):
                raise EOFError
            if text == "?":
                print(self._opinion(query))
            elif (action := meant(text, query.legal)) is None:
                print(f"{text!r} is none of the legal actions, numbers or names: {', '.join(map(str, query.legal))}")
            else:
                return [Action(str(action))]

    def _opinion(self, query: Query) -> str:
        if not hasattr(self.adviser, "action_probs"):
            return "this opponent has no probabilities to show"
        try:
            [probs] = self.adviser.action_probs([query])
        except PromptTooLongError:
            return "the position does not fit into what the model may read"
        ranked = sorted(probs.items(), key=lambda item: -item[1])
        shown, rest = ranked[:MOST_LINES], ranked[MOST_LINES:]
        lines = [f"  {action:>4}  {p:6.1%}  {query.legal[action]}" for action, p in shown]
        others = [f"        {sum(p for _, p in rest):6.1%}  the other {len(rest)}"] if rest else []
        return "\n".join(lines + others)


def _menu(legal: dict[int, str]) -> str:
    """The legal actions, side by side where they are many."""
    items = [f"  {action:>4}  {name}" for action, name in legal.items()]
    width = max(map(len, items))
    across = max(1, shutil.get_terminal_size().columns // width) if len(items) > MOST_LINES else 1
    rows = ["".join(item.ljust(width) for item in items[i : i + across]) for i in range(0, len(items), across)]
    return "\n".join(row.rstrip() for row in rows)


def meant(text: str, legal: dict[int, str]) -> int | None:
    """The action with this number or name, or whose name ends in these words; None where none or several match.

    A name as it is written is preferred to one that differs in case or spaces, and that to a name's last words.
    """
    if text in map(str, legal):
        return int(text)
    # As in backgammon, and in goofspiel: whose card it is, is no part of it.
    unnumbered = {a: re.sub(r"^\[P\d+\]", "", name.removeprefix(f"{a} - ")) for a, name in legal.items()}
    words, plain = text.lower().split(), "".join(text.lower().split())
    exact = [action for action, name in legal.items() if text == name]
    alike = [action for action, name in unnumbered.items() if plain == "".join(name.lower().split())]
    if all(unnumbered[action] != legal[action] for action in alike):  # backgammon's dice in either order: one move
        alike = alike[:1]
    ending = [a for a, name in legal.items() if not text.isdigit() and words == name.lower().split()[-len(words) :]]
    found = exact or alike or ending
    return found[0] if len(found) == 1 else None


def _ask(prompt: str) -> str:
    text = input(prompt).strip()
    if not sys.stdin.isatty():
        print(text)
    return text


def play_one(opponent: Contestant, task: Task) -> Episode:
    """Play with the person in the task's own seat; EOFError: they quit, ConfigError: a bot cannot play this game."""
    config = replace(opponent.env, env_mode="local")
    with blaming():
        make_env(config).reset(task)
    others = {} if opponent.player is None else {opponent.label: opponent.player}
    [episode] = play(config, Seats(Person(task.task_id, opponent.player), others), [task])
    return episode


def ending(episode: Episode) -> str:
    """The last position, with nothing hidden any more, and who won."""
    game, history = table(episode.task.task_id).game, episode.info["history"]
    state: Any = position(episode.task.task_id, history)
    if episode.outcome != "finished":  # by the opponent: the person is asked until an answer is legal
        why = {"forfeited": "gave no legal answer", "truncated": "has no room for the conversation any more"}
        return f"\n{state}\n\nthe game was not decided: the opponent {why[episode.outcome]}"
    seat, returns, kind = episode.info["seat"], episode.info["returns"], state.get_game().get_type()
    zero_sum = kind.utility.name == "ZERO_SUM"
    ahead = returns[seat] if zero_sum else episode.score - 0.5  # with three players a score of 0.5 is not a draw
    result = "win" if ahead > 0 else "lose" if ahead < 0 else "draw"
    with contextlib.suppress(Exception):  # a custom game need not describe final positions; the engine's text remains
        if game.dealt:
            dealt = ", ".join(game.dealt(action) for player, action in history if player == -1)
            state = f"{game.describe(state, seat)}\nDealt, to Player 0 first: {dealt}"
        elif kind.information.name != "PERFECT_INFORMATION" or kind.dynamics.name != "SEQUENTIAL":  # boards say it all
            state = f"{game.describe(state, seat)}\n\nWith nothing hidden:\n{state}"
    return f"\n{state}\n\nyou {result}: score {episode.score:.3f}, returns {returns}, you were player {seat}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    who = parser.add_mutually_exclusive_group().add_argument  # one of them would silently win
    who("--checkpoint", dest="opponent", metavar="PLAYER", default="base", help="whom to play against: a checkpoint, "
        "a run, base, a bot or an http(s) address")  # fmt: skip
    who("--opponent", metavar="PLAYER", default="base", help="the same")
    add("--game", default="tic_tac_toe", help="NAME, NAME#CONFIG or a task id (default tic_tac_toe)")
    add("--seat", type=int, choices=(0, 1), default=0, help="yours (default 0)")
    player_flags(parser, None)
    args = parser.parse_args(argv)
    if args.opponent == "base" and not args.model:
        parser.error("nobody to play with: expected --checkpoint RUN, --opponent mcts:200x1 or --model NAME (its base)")
    if args.seed is None:  # whoever plays again wants another game
        args.seed = random.randrange(1_000_000)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Play; exit codes: 0 played or quit, 1 the game failed, 2 bad usage, 130 interrupted."""
    args = arguments(argv)

    def run() -> None:
        roster = Roster(args.config, args.set, args.seed, args.greedy, args.model)
        roster.check_model([args.opponent])
        roster.check([args.opponent])  # before --game, which may name a game of the run's own
        config = roster.config(args.opponent if is_folder(args.opponent) else None)  # registers its env.games_path
        if config.env.env_type != "openspiel":
            raise ConfigError(f"{args.opponent}: was trained on env_type {config.env.env_type}, and this plays games")
        if is_bot(args.opponent) and (args.greedy or any("games_path" not in item for item in args.set)):
            raise ConfigError(f"{args.opponent}: a bot has no such settings: leave out --greedy, --set but games_path")
        with blaming("--game: "):
            [(first, _)] = next(iter(game_sets([args.game]).values()))
        if args.seat >= table(first).players:
            raise ConfigError(f"--seat: {args.game} has one player, in seat 0")
        opponent = roster.contestant(args.opponent)
        print(f"--seed {args.seed} is this deal")
        # The environment seats the player at seed % 2: each --seed is another deal, which both seats can play.
        try:
            episode = play_one(opponent, Task(first, 2 * args.seed + args.seat, opponent.opponent))
        except EOFError:
            print("\nbye")
            return
        if episode.outcome == "failed":
            raise ProgramError(f"the game failed: {episode.info['error']}")
        print(ending(episode))

    return run_program(run)


if __name__ == "__main__":
    leave(main())
