"""Write the golden playthroughs: ``python tests/tools/transcribe.py [GAME ...]`` (default: all games).

One text file a game: a whole episode as a person would read it. Make them anew only when a change of the prompts or of
the games is meant, and read the difference.
"""

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import games
from env_wrapper import EnvConfig, Task
from envs.openspiel import OpenSpielEnv

FOLDER = Path(__file__).resolve().parents[1] / "playthroughs"
FULL_DECISIONS = 3  # shown in both prompts; later ones in the compact prompt
SHOWN_DECISIONS = 30  # of longer games the others take one line
OPPONENTS = {"kuhn_poker": "self", "tic_tac_toe": "mcts:20x2"}


def scripted(task, number):
    """A stable choice for decision ``number``."""
    return int.from_bytes(hashlib.sha256(f"{task.task_id} {task.seed} {number}".encode()).digest()[:4], "big")


def transcribe(task, answers=None):
    """Return the lines of an episode, played with the given answers, or else by the script."""
    full, compact = (OpenSpielEnv(EnvConfig(prompt=prompt)) for prompt in ("full", "compact"))
    step, short = full.reset(task), compact.reset(task)
    lines = [f"game: {step.info['game']}", f"task_id: {task.task_id}", f"seed: {task.seed}"]
    lines += [f"opponent: {task.opponent}", "", "--- system (full prompt)", *step.info["system"].split("\n")]
    number = 0
    while not step.done:
        choice = answers[number] if answers else list(step.legal)[scripted(task, number) % len(step.legal)]
        lines += _decision(number, step, short) if number < SHOWN_DECISIONS else [_line(number, step)]
        lines.append(f"answer: {choice}")
        step, short = full.step(str(choice)), compact.step(str(choice))
        number += 1
    assert (short.score, short.info["history"]) == (step.score, step.info["history"])
    return lines + _end(step)


def _decision(number, step, short):
    lines = ["", f"--- decision {number + 1}, seat {step.info['seat']}"]
    if number < FULL_DECISIONS:
        lines += [*step.text.split("\n"), "--- the same in the compact prompt"]
    return [*lines, *short.text.split("\n"), f"legal: {' '.join(map(str, step.legal))}"]


def _line(number, step):
    return f"--- decision {number + 1}, seat {step.info['seat']}, {len(step.legal)} legal actions"


def _end(step):
    moves = " ".join(f"{player}:{action}" for player, action in step.info["history"])
    return ["", "--- end", f"outcome: {step.info['outcome']}", f"returns: {step.info['returns']}",
            f"scores: {step.info['scores']}", f"score of seat {step.info['seat']}: {step.score}",
            f"moves (player:action, -1 is chance): {moves}"]  # fmt: skip


def main(names):
    for index, name in enumerate(games.NAMES):
        if not names or name in names:
            task = Task(index * games.CONFIGS_PER_GAME + 1, 2 + index % 2, OPPONENTS.get(name, "random"))
            (FOLDER / f"{name}.txt").write_text("\n".join(transcribe(task)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
