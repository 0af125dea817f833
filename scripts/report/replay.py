"""Episodes as the report shows them: every position of the game, and what was done and asked in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envs.openspiel import load_game


def frames(episode: dict[str, Any]) -> list[dict[str, Any]]:
    """Replay an episode's history: the positions, and what was done in each.

    Returns:
        One frame a position: ``state`` (text), ``moves`` ([{player, action, name}, ...]: a run of chance
        events or the moves of a simultaneous node together; empty in the last frame).

    Raises:
        ValueError: the history does not fit the game of its task id.
    """
    history = [tuple(move) for move in episode.get("history", [])]
    found: list[dict[str, Any]] = []
    try:
        state = load_game(episode["task_id"]).new_initial_state()
        while history:
            size = state.num_players() if state.is_simultaneous_node() else 1
            taken, history = history[:size], history[size:]
            names = [state.action_to_string(*move) if move[1] >= 0 else "-" for move in taken]
            moves = [{"player": p, "action": a, "name": n} for (p, a), n in zip(taken, names, strict=True)]
            if found and taken[0][0] == -1 and found[-1]["moves"][0]["player"] == -1:
                found[-1]["moves"] += moves
            else:
                found.append({"state": str(state), "moves": moves})
            _apply(state, taken)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(
            f"episode of {episode['game']} at step {episode.get('step')}: cannot replay: {reason}"
        ) from None
    return [*found, {"state": str(state), "moves": []}]


def _apply(state: Any, moves: Sequence[tuple[int, int]]) -> None:
    if state.is_simultaneous_node():
        state.apply_actions([action for _, action in moves])
        return
    (player, action) = moves[0]
    # Of a chance node legal_actions is not always the whole: in hearts it leaves out pass directions that are drawn.
    legal = [a for a, _ in state.chance_outcomes()] if state.is_chance_node() else state.legal_actions()
    if player != state.current_player() or action not in legal:
        raise ValueError(f"player {player} cannot play {action} after {state.history()}")
    state.apply_action(action)


def _text_frames(episode: dict[str, Any]) -> list[dict[str, Any]]:
    """Frames of an episode that is no board game: its turns one by one."""
    turns = episode.get("turns", [])
    return [
        {"state": turn.get("state", turn.get("user", "")), "moves": [], "turns": [i]} for i, turn in enumerate(turns)
    ]


def replayable(episode: dict[str, Any]) -> dict[str, Any]:
    """The episode as the page shows it: frames, each with the indices of the turns answered in it."""
    if not episode.get("history"):
        return {**episode, "frames": _text_frames(episode)}
    turns, at = episode.get("turns", []), 0
    shown = frames(episode)
    for frame in shown:
        frame["turns"] = _answered(turns, at, frame)
        at += len(frame["turns"])
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
