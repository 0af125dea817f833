"""OpenSpiel games as an environment: seats, chance, opponents, prompts and scores.

``(task_id, seed, opponent)`` determines everything but the model's moves, exactly as in ``evaluate`` of the public
affinetes environment: the model sits at ``(seed % 2) % players``, chance draws from ``RandomState(seed)``, the bot in
seat p from ``RandomState(seed + 4 + p)``. A missing seed is derived from the task id. Every sum of a seed and an offset
is taken modulo 2^32, so that any integer is a seed.
"""

import contextlib
import difflib
import functools
import hashlib
import json
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyspiel

import games
from config.reader import ConfigError, blaming
from envs import exact
from envs.config import EnvConfig
from envs.opponents import Bot, RandomBot, Stream, make_bot, parse_opponent
from envs.parser import parse_action
from envs.prompts import RETRY, full_system, user_message
from envs.types import Episode, Query, Step, Task
from games.base import Game

DISTINCT = 60  # the parameters of our games repeat after at most so many configurations; no more of a user's are read
CHANCE = int(pyspiel.PlayerId.CHANCE)
SIMULTANEOUS = int(pyspiel.PlayerId.SIMULTANEOUS)
INVALID = pyspiel.INVALID_ACTION

KNOWN: dict[str, exact.Known] = {}  # opponents besides random whose every answer is known, by name
ATTEMPTS = 3  # answers to a decision before the episode is forfeited, as in the public environment


def derive_seed(task_id: int) -> int:
    """Return the seed of a task that has none: a stable 32-bit hash of the task id."""
    return int.from_bytes(hashlib.sha256(f"game:{task_id}".encode()).digest()[:8], "big") % 2**32


if sys.stderr is None:  # closed: the next file to be opened would be descriptor 2, and get what C++ writes
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
_fd_lock = threading.Lock()


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard what C++ writes to file descriptor 2; errors still arrive as exceptions."""
    with _fd_lock, contextlib.ExitStack() as later:
        if sys.stderr:
            sys.stderr.flush()
        saved = os.dup(2)
        later.callback(os.close, saved)
        later.callback(os.dup2, saved, 2)
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
        yield


@dataclass(frozen=True)
class Table:
    """A game with its parameters filled in: what all episodes of a configuration share."""

    game: Game
    spiel: Any  # the pyspiel.Game
    players: int
    systems: dict[str, str]  # prompt -> system message: rules and answer format (full), name and variant (compact)

    @property
    def hides(self) -> bool:
        """Whether the seats know different things."""
        return self.spiel.get_type().information != pyspiel.GameType.Information.PERFECT_INFORMATION


@functools.lru_cache(maxsize=4096)  # every configuration of a user's game may have parameters of its own
def _table(game: Game, params_json: str) -> Table:
    params = json.loads(params_json)  # passed as text, since nested parameters have no hash
    if (name := game.short_name) not in (known := pyspiel.registered_names()):
        near = "".join(f", the nearest is {other}" for other in difflib.get_close_matches(name, known, 1))
        raise ConfigError(f"OpenSpiel has no game {name!r}{near}; spiel_name gives its name there")
    with _silent_stderr(), blaming(f"{game.name}: ", pyspiel.SpielError):
        spiel = pyspiel.load_game(name, params)
    usual = game.params(0)
    variant = [f"{key}={value}" for key, value in params.items() if value != usual.get(key)]
    default = spiel.get_type().parameter_specification
    variant += [f"{key}={default[key]}" for key in usual if key not in params and key in default]
    systems = {"full": full_system(game.name, game.rules(params)), "compact": " ".join([game.name, *variant])}
    return Table(game, spiel, spiel.num_players(), systems)


@functools.lru_cache(maxsize=4096)  # saves decoding the ids in use
def table(task_id: int) -> Table:
    """Return the shared, cached table of a task; ValueError: the task id is out of range."""
    game, params = games.decode_task_id(task_id)
    return _table(game, json.dumps(params, sort_keys=True))


def tables(ranges: Iterable[tuple[int, int]]) -> list[Table]:
    """Return the tables of ranges of task ids, each once, with all parameters that occur in the ranges."""
    ids = chain.from_iterable(range(first, min(last, first + DISTINCT) + 1) for first, last in ranges)
    return list({id(found): found for found in map(table, ids)}.values())


def load_game(task_id: int) -> Any:
    """Return the cached ``pyspiel.Game`` of a task."""
    return table(task_id).spiel


def replay(spiel: Any, history: Sequence[Sequence[int]]) -> Iterator[tuple[Any, Sequence[Sequence[int]]]]:
    """Replay a recorded history, [[player, action], ...] with -1 for chance; ValueError if it makes an impossible move.

    Yields every position with the moves made in it, several where the seats move simultaneously, none in the last.
    The state is always the same object: clone it to keep a position.
    """
    state, at = spiel.new_initial_state(), 0
    while at < len(history):
        seats = range(state.num_players()) if state.is_simultaneous_node() else [state.current_player()]
        moves = history[at : at + len(seats)]
        if [player for player, _ in moves] != [*seats] or not all(_may(state, *move) for move in moves):
            raise ValueError(f"the moves {moves} of its history cannot be played after {at} others")
        yield state, moves
        if state.is_simultaneous_node():
            state.apply_actions([action for _, action in moves])
        else:
            state.apply_action(moves[0][1])
        at += len(moves)
    yield state, []


def move_name(game: Game, state: Any, player: int, action: int) -> str:
    """Return the name of a move in a recorded history."""
    if action < 0:
        return "-"
    with contextlib.suppress(Exception):  # a user's ``dealt`` may raise anything
        if player == CHANCE and game.dealt:
            return game.dealt(action)
    return state.action_to_string(player, action)


def _may(state: Any, player: int, action: int) -> bool:
    if player == CHANCE:  # not legal_actions, which in hearts lacks some of the pass directions that are drawn
        return action in dict(state.chance_outcomes())
    return action in (state.legal_actions(player) or [INVALID] * state.is_simultaneous_node())


def position(task_id: int, history: Sequence[Sequence[int]]) -> Any:
    """Return the state at the end of a recorded history; ValueError as in ``replay``."""
    [(state, _)] = deque(replay(load_game(task_id), history), maxlen=1)
    return state


def most_moves(spiel: Any) -> float:
    """Return after how many moves we end a game: in oware the engine raises at the next one, others need no limit."""
    return spiel.max_game_length() if spiel.get_type().short_name == "oware" else math.inf


def score(pyspiel_game: Any, returns: list[float], seat: int) -> float:
    """Map the returns of a finished game to [0, 1] for one seat, as the public environment does.

    In zero-sum, constant-sum, cooperative and one-player games it is the return's place between the game's lowest and
    highest utility. In general-sum games of two it is 1, 0.5 or 0 by comparison; of more it is 1 - rank / (players -
    1), where ties share the best rank. (The public environment has no constant-sum and no cooperative games.)
    """
    kind, own = pyspiel_game.get_type().utility, returns[seat]
    kinds = pyspiel.GameType.Utility
    if kind in (kinds.ZERO_SUM, kinds.CONSTANT_SUM, kinds.IDENTICAL) or len(returns) == 1:
        low, high = pyspiel_game.min_utility(), pyspiel_game.max_utility()
        return (own - low) / (high - low)
    if len(returns) == 2:
        other = returns[1 - seat]
        return 0.5 if own == other else float(own > other)
    return 1 - sorted(returns, reverse=True).index(own) / (len(returns) - 1)


def opposed(pyspiel_game: Any) -> bool:
    """Return whether two play, of whom one scores what the other lacks (see ``score``): not where they cooperate."""
    return pyspiel_game.num_players() == 2 and pyspiel_game.get_type().utility != pyspiel.GameType.Utility.IDENTICAL


def luck(episode: Episode) -> tuple[list[float], list[float]] | None:
    """Return ``exact.luck``, as parts of the score and as scores; None: too large a game or another opponent."""
    info, known = episode.info, KNOWN.get(episode.task.opponent)
    odds_known = known is not None or episode.task.opponent == "random"
    if not odds_known or episode.game not in games.NAMES or info.get("history") is None:
        return None
    spiel, history, seat = load_game(episode.task.task_id), info["history"], info["seat"]
    if not history and (sum(info["n_decisions"].values()), spiel.new_initial_state().current_player()) != (1, seat):
        return None  # a server has not told it; otherwise the first answer of all ended the game
    if (found := exact.luck(spiel, history, seat, known)) is None:
        return None
    low, width = spiel.min_utility(), spiel.max_utility() - spiel.min_utility()
    return [favour / width for favour in found[0]], [(worth - low) / width for worth in found[1]]


def query_at(task_id: int, state: Any, seat: int, config: EnvConfig) -> Query:
    """Return what a seat is asked in a position; ConfigError if the game (its ``describe``, say) fails there.

    Where something is hidden, the information state implies the seat's past turns and they come first, as in play.
    Where nothing is, many histories lead to one position, and it is shown without any (``unknown_prompts``).
    """
    shared, prompt = table(task_id), config.prompt
    past_turns = config.past_turns(shared.game.history_turns) if shared.hides else 0

    def ask(at: Any) -> tuple[dict[int, str], dict[str, str]]:
        with blaming(f"{shared.game.name}: a position has no prompt: ", Exception):
            legal = {a: at.action_to_string(seat, a) for a in at.legal_actions(seat)}
            return legal, {"role": "user", "content": user_message(shared.game, at, seat, legal, prompt)}

    turns = list[dict[str, str]]()
    history = [(move.player, move.action) for move in state.full_history()] if past_turns != 0 else []
    for before, moves in replay(shared.spiel, history):
        turns += [message for player, action in moves if player == seat and action != INVALID
                  for message in (ask(before)[1], {"role": "assistant", "content": str(action)})]  # fmt: skip
    legal, asked = ask(state)
    past = turns if past_turns is None else turns[-2 * past_turns :] if past_turns else []
    system = {"role": "system", "content": shared.systems[prompt]}
    return Query(0, seat, [system, *past, asked], legal, (0, seat, 0, 1))


def unknown_prompts(task_id: int, config: EnvConfig) -> str:
    """Why ``query_at`` cannot tell how a position is asked in play: "" if it can."""
    if config.env_mode != "local":
        return "are those of a server"
    shared = table(task_id)
    shown = not shared.hides and config.past_turns(shared.game.history_turns) != 0
    return "show the turns before, of which there are many to a position (env.history_turns=0 has none)" * shown


def known(state: Any, seat: int) -> list[float]:
    """Return OpenSpiel's tensor of what a seat knows: its information state, else its observation, else []."""
    kind = state.get_game().get_type()
    if kind.provides_information_state_tensor:
        return state.information_state_tensor(seat)
    return state.observation_tensor(seat) if kind.provides_observation_tensor else []


class OpenSpielEnv:
    """One episode at a time of any game against any opponent; see ``envs.types.Env``."""

    def __init__(self, config: EnvConfig, attempts: int = ATTEMPTS):
        self.config, self.attempts = config, attempts
        self._state: Any = None  # None: no episode, steps are refused
        self._adapters: dict[int, str | None] = {}
        self._history: list[list[int]] = []

    def reset(self, task: Task) -> Step:
        """Start the task's game and play on to the first decision of a model; ValueError: no such task or opponent."""
        self.close()
        opponent = parse_opponent(task.opponent)
        shared = self._table = table(task.task_id)
        self._system = shared.systems[self.config.prompt]
        seed = derive_seed(task.task_id) if task.seed is None else task.seed
        self._own_seat = (seed % 2) % shared.players
        self._adapters, self._bots = {self._own_seat: None}, dict[int, Bot]()
        others = [p for p in range(shared.players) if p != self._own_seat]
        if opponent.kind in ("self", "past"):
            self._adapters |= dict.fromkeys(others, opponent.adapter)
        else:
            self._bots = {p: make_bot(shared.game, shared.spiel, opponent, p, seed) for p in others}
        self._chance = Stream(seed)
        self._joint: list[int] = []  # what the first seats of a simultaneous node have chosen
        self._history, self._attempt, self._legal = [], 1, dict[int, str]()
        self._state = shared.spiel.new_initial_state()
        return self._advance()

    def step(self, text: str) -> Step:
        """Answer the last step's decision with the model's raw text; RuntimeError if no episode is running."""
        if self._state is None or not self._legal:
            raise RuntimeError("step without a running episode: it has ended, failed or was closed; call reset first")
        action = parse_action(text, self._legal)
        if action is not None:
            self._legal = {}  # until the next decision: if anything raises before it, nobody knows the position
            return self._play(action)
        if self._attempt >= self.attempts:
            return self._end(None)
        message = RETRY.format(attempt=self._attempt, attempts=self.attempts)
        self._attempt += 1
        return self._ask(message)

    def _play(self, action: int) -> Step:
        if self._state.is_simultaneous_node():
            self._joint.append(action)
        else:
            self._apply(self._seat, action)
        return self._advance()

    def close(self) -> None:
        """End the episode; further steps are refused until the next reset."""
        self._state = None

    def _advance(self) -> Step:
        """Play chance and bots until a model's seat has to decide or the game is over."""
        state = self._state
        while not state.is_terminal():
            player = state.current_player()
            if player == CHANCE:
                self._apply(CHANCE, self._chance.weighted(state.chance_outcomes()))
            elif player == SIMULTANEOUS:
                seat = self._next_simultaneous_seat()
                if seat is not None:
                    return self._decide(seat, state.legal_actions(seat))
            elif not (legal := state.legal_actions()):
                break  # a dead end of gin rummy (see has_dead_ends): the hand ends there without a score
            elif len(self._history) >= most_moves(self._table.spiel):
                break
            elif player in self._bots:
                self._apply(player, self._bot_action(player, legal))
            else:
                return self._decide(player, legal)
        return self._end(list(map(float, state.returns())))  # of a game written in Python, perhaps numpy's

    def _apply(self, player: int, action: int) -> None:
        self._state.apply_action(action)
        self._history.append([player, int(action)])

    def _bot_action(self, seat: int, legal: list[int]) -> int:
        if len(legal) == 1:
            return legal[0]
        bot = self._bots[seat]
        return bot.step(self._state, legal) if isinstance(bot, RandomBot) else bot.step(self._state)

    def _next_simultaneous_seat(self) -> int | None:
        """Return the next of the model's seats that has to choose, or None once all have chosen and moved."""
        for seat in range(len(self._joint), self._table.players):
            if not (legal := self._state.legal_actions(seat)):
                self._joint.append(INVALID)
            elif seat in self._bots:
                self._joint.append(self._bot_action(seat, legal))
            else:
                return seat
        self._state.apply_actions(self._joint)
        self._history += [[seat, action] for seat, action in enumerate(self._joint)]
        self._joint = []
        return None

    def _decide(self, seat: int, legal: list[int]) -> Step:
        self._seat, self._attempt = seat, 1
        self._legal = {action: self._state.action_to_string(seat, action) for action in legal}
        return self._ask(user_message(self._table.game, self._state, seat, self._legal, self.config.prompt))

    def _info(self, seat: int, outcome: str | None) -> dict[str, Any]:
        return {
            "game": self._table.game.name,
            "seat": seat,
            "own_seat": self._own_seat,
            "system": self._system,
            "attempt": self._attempt,
            "adapter": self._adapters.get(seat),
            "history": self._history.copy(),
            "history_turns": self._table.game.history_turns,
            "outcome": outcome,
        }

    def _ask(self, text: str) -> Step:
        legal = self._legal.copy()  # whoever answers may change it
        return Step(text, legal, False, 0.0, self._info(self._seat, None))

    def _end(self, returns: list[float] | None) -> Step:
        """End the episode; without returns the seat to move forfeits: it scores 0, and the others an undecided 0.5."""
        seats = range(self._table.players)
        if returns is None:
            outcome, scores = "forfeited", {p: 0.0 if p == self._seat else 0.5 for p in seats}
        else:  # 2048 can return more than its highest utility, and sums of a custom game may be rounded
            found = {p: score(self._table.spiel, returns, p) for p in seats}
            if wrong := [value for value in found.values() if not value > -1e-6]:  # nan, too
                raise ValueError(f"the score {wrong[0]} is not in [0, 1]: see min_utility")
            outcome, scores = "finished", {p: min(max(value, 0.0), 1.0) for p, value in found.items()}
        info = self._info(self._own_seat, outcome) | {"returns": returns, "scores": scores}
        self.close()
        return Step("", {}, True, scores[self._own_seat], info)
