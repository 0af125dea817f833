"""Validates what a game server answers: only plain data of known types, ranges, depth and size comes out."""

import math
import re
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from config.reader import blaming, deeper_than
from envs.client import MAX_DEPTH, is_number, one_line
from envs.openspiel import most_moves, replay

# Limits on an answer: the longest games and prompts stay below them by a factor of ten or more.
MAX_TEXT = 2**18
MAX_ACTIONS = 10_000
MAX_MOVES = 100_000
close = partial(math.isclose, rel_tol=1e-6, abs_tol=1e-6)  # whether two results are equal up to rounding
ID = re.compile(r"[0-9]{1,9}")
HARMFUL = re.compile(r"[^\n\t -~\u00a0-\ud7ff\ue000-\U0010ffff]")  # control characters, surrogates


class ServerError(RuntimeError):
    """The server did not play the game that was asked for."""


@dataclass(frozen=True)
class Reply:
    """An answer to reset or step, checked by ``read_reply``; ``history`` [] and ``returns`` None: not reported."""

    observation: str
    episode_id: str
    done: bool
    score: float  # in [0, 1] when done
    info: dict[str, Any]  # as sent: unchecked, trust only what echoes the request
    history: list[list[int]]
    returns: list[float] | None


def info_of(answer: Any) -> dict[str, Any] | None:
    """Return the ``info`` of an answer, unchecked; None if it has none."""
    info = answer.get("info") if isinstance(answer, dict) else None
    return info if isinstance(info, dict) else None


def read_reply(answer: Any, game: Any) -> Reply:
    """Return what a server answered to reset or step, as plain data that need not be checked again.

    ``answer`` is the decoded JSON, ``game`` the ``pyspiel.Game`` that it should be about, on which a reported history
    is replayed. None: it is about a program, and reported returns and history are ignored.

    ServerError: a refusal, or anything of a wrong type, range, depth or size, or at odds with the game.
    """
    if deeper_than(answer, MAX_DEPTH):
        raise ServerError(f"an answer nested more than {MAX_DEPTH} deep")
    if (info := info_of(answer)) is None:
        raise ServerError(f"answered with {one_line(str(answer))!r}")
    if refusal := info.get("error"):
        raise ServerError(str(refusal))
    text, episode_id, done = answer.get("observation"), answer.get("episode_id"), answer.get("done", False)
    if not isinstance(text, str) or not isinstance(episode_id, str):
        raise ServerError("answered without an observation or an episode_id")
    if len(text) > MAX_TEXT or HARMFUL.search(text) or len(episode_id) > MAX_TEXT or HARMFUL.search(episode_id):
        raise ServerError(f"text of more than {MAX_TEXT} characters, or with control characters")
    if answer.get("truncated", False) is not False:
        raise ServerError("the server ended the episode early")
    if type(done) is not bool:
        raise ServerError(f"done {one_line(repr(done))} is neither true nor false")
    if not done:
        return Reply(text, episode_id, False, 0.0, info, [], None)
    reward = answer.get("reward")
    if not is_number(reward) or not 0 <= reward <= _most(game):
        raise ServerError(f"the score {one_line(repr(reward))} is not in [0, {_most(game)}]")
    reported = info if game else {}
    returns, history = _returns(reported.get("returns"), game), _history(reported.get("history"))
    if history:
        with blaming(raising=ServerError):
            [(state, _)] = deque(replay(game, history), maxlen=1)
        if not state.is_terminal() and state.legal_actions() and len(history) < most_moves(game):
            raise ServerError("its history does not end with the game")
        played = list(map(float, state.returns()))
        if returns is not None and not all(map(close, returns, played)):
            raise ServerError(f"the returns {returns} are not those of its history, {played}")
        returns = played
    return Reply(text, episode_id, True, min(float(reward), 1.0), info, history, returns)


def _most(game: Any) -> int:
    """Return the highest possible score: 2048's highest utility is that of one tile, but a won game has others too."""
    return 2 if game and game.get_type().short_name == "2048" else 1


def _returns(reported: Any, game: Any) -> list[float] | None:
    if reported is None:
        return None
    players, low, high = game.num_players(), game.min_utility(), _most(game) * game.max_utility()
    numbers = isinstance(reported, list) and len(reported) == players and all(map(is_number, reported))
    if not numbers or not all(low <= value <= high for value in reported):
        raise ServerError(f"the returns {one_line(repr(reported))} are not {players} numbers in [{low:g}, {high:g}]")
    return [float(value) for value in reported]


def _history(reported: Any) -> list[list[int]]:
    if reported is None:
        return []
    if not isinstance(reported, list) or len(reported) > MAX_MOVES:
        raise ServerError(f"the history {one_line(repr(reported))} is not a list of at most {MAX_MOVES} moves")
    for move in reported:
        if not isinstance(move, list) or len(move) != 2 or not all(type(part) is int for part in move):
            raise ServerError(f"the move {one_line(repr(move))} of its history is not [player, action]")
    return reported


def read_position(observation: str) -> tuple[str, dict[int, str]]:
    """Return an observation's state text and legal actions, in linear time; ServerError if there are no sound ones."""
    rest = observation.partition("Current State:\n")[2].rpartition("\n\nYour choice")[0]
    state, _, listed = rest.rpartition("\n\nLegal Actions:\n")
    lines = [line.lstrip(" ").partition(" -> ") for line in listed.split("\n")]
    actions = [(number, name) for number, arrow, name in lines if arrow]
    legal = {int(number): name for number, name in actions[:MAX_ACTIONS] if ID.fullmatch(number)}
    if not legal or len(legal) < len(actions):
        raise ServerError(f"no legal actions in an observation that ends {one_line(observation[-80:])!r}")
    return state, legal
