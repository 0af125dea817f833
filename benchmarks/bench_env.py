"""Games and decisions a second of the environments alone, prompts rendered, and the share raw OpenSpiel takes of it.

    python benchmarks/bench_env.py [--seconds 2] [--prompt full] [--json FILE]

Each workload plays scripted games against the random opponent in one thread for ``--seconds``, then replays the same
moves on bare ``pyspiel`` states, asking only what play itself needs: whose turn it is, the legal actions, the chance
outcomes, the returns. ``pyspiel_share`` is the second time over the first.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import parser, write
from envs.config import EnvConfig
from envs.openspiel import OpenSpielEnv, load_game
from envs.types import Task
from training.process import at_least, run_program

WORKLOADS = {
    "leduc_poker": 200_000_000,
    "liars_dice": 100_000_000,
    "goofspiel-8": 0,
    "hex-5": 600_000_000,
    "hex-11": 600_000_003,
    "othello": 400_000_000,
}


def choose(task, t, legal):
    x = (task.task_id * 1000003 + task.seed * 7919 + t * 104729 + 12345) % 2**31
    return str(legal[(((1103515245 * x + 12345) % 2**31) >> 8) % len(legal)])


def play_one(env, task):
    """Return (decisions, history) of one scripted game."""
    step, t = env.reset(task), 0
    while not step.done:
        step = env.step(choose(task, t, list(step.legal)))
        t += 1
    return t, step.info["history"]


def replay(game, history):
    """Replay a game on a bare state, with the calls no player can do without."""
    state, moves = game.new_initial_state(), iter(history)
    while not state.is_terminal():
        player = state.current_player()
        if state.is_chance_node():
            state.chance_outcomes()
            state.apply_action(next(moves)[1])
        elif player < 0:
            for seat in range(game.num_players()):
                state.legal_actions(seat)
            state.apply_actions([next(moves)[1] for _ in range(game.num_players())])
        else:
            state.legal_actions(player)
            state.apply_action(next(moves)[1])
    state.returns()


def measure(name, task_id, prompt, seconds):
    env, game = OpenSpielEnv(EnvConfig(prompt=prompt)), load_game(task_id)
    for seed in range(20):
        play_one(env, Task(task_id, seed))
    histories: list[list[list[int]]] = []
    decisions = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        asked, history = play_one(env, Task(task_id, len(histories)))
        histories.append(history)
        decisions += asked
    start = time.perf_counter()
    for history in histories:
        replay(game, history)
    raw = time.perf_counter() - start
    return {
        "game": name,
        "games_per_s": round(len(histories) / elapsed, 1),
        "decisions_per_s": round(decisions / elapsed, 1),
        "decisions_per_game": round(decisions / len(histories), 2),
        "pyspiel_share": round(raw / elapsed, 3),
    }


def main(argv=None):
    add = (flags := parser(__doc__)).add_argument
    add("--seconds", type=at_least(0.1), default=2.0, help="per workload")
    add("--prompt", choices=("full", "compact"), default="full")
    args = flags.parse_args(argv)
    rows = []
    for name, task_id in WORKLOADS.items():
        row = measure(name, task_id, args.prompt, args.seconds)
        rows.append(row)
        print(
            f"{name:12} {row['games_per_s']:9.1f} games/s {row['decisions_per_s']:9.1f} decisions/s "
            f"({row['decisions_per_game']} a game), pyspiel {row['pyspiel_share']:.0%}"
        )
    workload = {"prompt": args.prompt, "opponent": "random", "policy": "scripted", "threads": 1}
    write(args.json, workload, rows, {"pyspiel_share": {row["game"]: row["pyspiel_share"] for row in rows}})


if __name__ == "__main__":
    sys.exit(run_program(main))
