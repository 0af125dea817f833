"""Episodes as the report shows them: every position of the game, and what was done and asked in it."""

import contextlib
from typing import Any

import games
from envs.openspiel import move_name, replay, table
from utils import ConfigError


def frames(episode: dict[str, Any]) -> list[dict[str, Any]]:
    """Replay an episode's history: the positions, and what was done in each.

    Returns:
        One frame a position: ``state`` (text), ``moves`` ([{player, action, name}, ...]: a run of chance
        events or the moves of a simultaneous node together; empty in the last frame). One of a user's own game that
        hides nothing has its file's ``text``, too.
    """
    found: list[dict[str, Any]] = []
    shared, seat = table(episode["task_id"]), episode.get("seat") or 0
    described = shared.game.name in games.OWN and not shared.hides
    for state, taken in replay(shared.spiel, episode["history"]):
        names = [move_name(shared.game, state, *move) for move in taken]
        moves = [{"player": p, "action": a, "name": n} for (p, a), n in zip(taken, names, strict=True)]
        if found and taken and taken[0][0] == -1 and found[-1]["moves"][0]["player"] == -1:
            found[-1]["moves"] += moves
        else:
            found.append({"state": str(state), "moves": moves})
            with contextlib.suppress(Exception):  # of somebody's file, which need not know positions without a decision
                found[-1] |= {"text": shared.game.describe(state, seat)} if described else {}
    return found


def replayable(episode: dict[str, Any]) -> dict[str, Any]:
    """The episode as the page shows it: frames, each with the indices of the turns answered in it.

    Raises:
        ConfigError: no episode's row, or the history does not fit the game of its task id.
    """
    try:
        turns, at = episode.get("turns", []), 0
        if not episode.get("history"):  # no board game: its turns one by one
            shown = [
                {"state": t.get("state", t.get("user", "")), "moves": [], "turns": [i]} for i, t in enumerate(turns)
            ]
            nothing = {"state": f"Nothing was asked: the game {episode.get('outcome')}.", "moves": [], "turns": []}
            return {**episode, "frames": shown or [nothing]}
        shown = frames(episode)
        for frame in shown:
            frame["turns"] = _answered(turns, at, frame)
            at += len(frame["turns"])
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:  # pyspiel's are RuntimeErrors
        place = f"episode of {episode.get('game')} at step {episode.get('step')}"
        raise ConfigError(f"{place}: cannot replay: {(str(error).strip() or repr(error)).splitlines()[0]}") from error
    return {**{key: value for key, value in episode.items() if key != "history"}, "frames": shown}


def _answered(turns: list[dict[str, Any]], start: int, frame: dict[str, Any]) -> list[int]:
    """Indices, from ``start`` on, of the turns that led to the frame's moves; failed attempts (action None) too."""
    left = {move["player"]: move["action"] for move in frame["moves"]}
    found = []
    for index, turn in enumerate(turns[start:], start):
        seat, action = turn.get("seat"), turn.get("action")
        if turn.get("state", frame["state"]) != frame["state"] or (action is not None and left.get(seat) != action):
            break
        if action is not None:
            del left[seat]  # a forced move is not asked: the next turn may be a later one
        found.append(index)
    return found
