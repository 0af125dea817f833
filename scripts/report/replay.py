"""Episodes as the report shows them: every position of the game, the moves made in it and the model's turns."""

import contextlib
from typing import Any

import games
from envs.openspiel import move_name, replay, table
from utils import ConfigError


def frames(episode: dict[str, Any]) -> list[dict[str, Any]]:
    """Replay an episode: one frame a position, with ``state`` (text) and ``moves``, [{player, action, name}, ...].

    Successive chance events share a frame, as do the moves of a simultaneous node; the last frame has no moves. Frames
    of a custom game that hides nothing also have ``text``, the position as the game's file describes it.
    """
    found: list[dict[str, Any]] = []
    shared, seat = table(episode["task_id"]), episode.get("seat") or 0
    if shared.game.name != episode["game"]:
        raise ValueError(f"task {episode['task_id']} is of {shared.game.name} here")
    described = shared.game.name in games.OWN and not shared.hides
    for state, taken in replay(shared.spiel, episode["history"]):
        moves = [{"player": p, "action": a, "name": move_name(shared.game, state, p, a)} for p, a in taken]
        if found and taken and taken[0][0] == -1 and found[-1]["moves"][0]["player"] == -1:
            found[-1]["moves"] += moves
        else:
            found.append({"state": str(state), "moves": moves})
            with contextlib.suppress(Exception):  # a custom game need not describe positions without a decision
                found[-1] |= {"text": shared.game.describe(state, seat)} if described else {}
    return found


def replayable(episode: dict[str, Any]) -> dict[str, Any]:
    """The episode with ``frames`` for its history, each with ``turns``: the indices of the turns answered in it.

    ``words``: a frame's state is a text of other kind than positions of its game. Without a board game, or with one
    that failed or cannot be replayed, there is a frame for each turn; ``lost`` then tells why it cannot be.
    ConfigError: not a row of an episode.
    """
    row, place = {**episode}, f"episode of {episode.get('game')} at step {episode.get('step')}"
    history, turns = row.pop("history", None), episode.get("turns", [])
    try:
        row["frames"] = [
            {"state": t.get("state", t.get("user", "")), "words": "state" not in t, "moves": [], "turns": [i]}
            for i, t in enumerate(turns)
        ]
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"{place}: its turns must be a list of objects") from error
    try:
        row["frames"] = _with_turns(frames(episode), turns) if history else row["frames"]
    except (LookupError, TypeError, ValueError, RuntimeError) as error:  # pyspiel's too, and a game that is not known
        row["lost"] = (str(error).strip() or repr(error)).splitlines()[0]
    told = f"Nothing was asked: the game {episode.get('outcome')}."
    row["frames"] = row["frames"] or [{"state": told, "words": True, "moves": [], "turns": []}]
    return row


def _with_turns(shown: list[dict[str, Any]], turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    at = 0
    for frame in shown:
        frame["turns"] = _answered(turns, at, frame)
        at += len(frame["turns"])
    return shown


def _answered(turns: list[dict[str, Any]], start: int, frame: dict[str, Any]) -> list[int]:
    """Indices, from ``start`` on, of the turns that led to the frame's moves; failed attempts (action None) too."""
    open_moves = {move["player"]: move["action"] for move in frame["moves"]}
    found = []
    for index, turn in enumerate(turns[start:], start):
        seat, action = turn.get("seat"), turn.get("action")
        if turn.get("state", frame["state"]) != frame["state"]:
            break
        if action is not None:
            if open_moves.get(seat) != action:
                break
            del open_moves[seat]  # a second equal move of this seat belongs to a later frame
        found.append(index)
    return found
