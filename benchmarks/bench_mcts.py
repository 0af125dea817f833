"""Searching opponents: moves a second on one core and on all, against OpenSpiel's Python search, and beside a model.

    python benchmarks/bench_mcts.py [--positions 24] [--games 16] [--json FILE]

Moves: the same random positions, each searched by a bot of its own with the game's public budget; the comparison with
Python has a fiftieth of the simulations on both sides. Step: games against ``mcts`` with the tiny model, wall time of
the rollout over max(M, (M + S) / cores), where M is the model's time and S the rest, in CPU seconds. Needs a quiet
machine.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.bench_train import make_trainer
from benchmarks.common import Row, table, write
from env_wrapper import play
from envs.openspiel import table as table_of
from envs.opponents import UCT_C, make_bot, parse_opponent
from envs.protocol import Task

GAMES = {"leduc_poker": 200_000_000, "hex-5": 600_000_000}
PYTHON_SHARE = 50  # of the simulations, in the comparison with the slow search


def positions(task_id: int, count: int) -> list[Any]:
    """Positions of random play in which somebody has a choice."""
    rng, found = random.Random(0), list[Any]()
    while len(found) < count:
        state = table_of(task_id).spiel.new_initial_state()
        while not state.is_terminal() and len(found) < count:
            if not state.is_chance_node() and len(state.legal_actions()) > 1 and rng.random() < 0.5:
                found.append(state.clone())
            state.apply_action(rng.choice(state.legal_actions()))
    return found


def moves_per_s(bots: list[Any], states: list[Any], threads: int) -> float:
    """Moves a second of wall time, every bot on its own position."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(lambda bot, state: bot.step(state), bots, states))
        return len(states) / (time.perf_counter() - start)


def python_bot(spiel: Any, simulations: int, rollouts: int, seed: int) -> Any:
    """OpenSpiel's search in Python."""
    from open_spiel.python.algorithms.mcts import MCTSBot, RandomRolloutEvaluator

    evaluator = RandomRolloutEvaluator(rollouts, np.random.RandomState(seed))
    return MCTSBot(spiel, UCT_C, simulations, evaluator, random_state=np.random.RandomState(seed))


def move_row(name: str, task_id: int, count: int, cores: int) -> Row:
    """Moves a second of one game."""
    states, shared = positions(task_id, count), table_of(task_id)
    simulations, rollouts = shared.game.mcts or (1, 1)
    few = simulations // PYTHON_SHARE

    def bots(spec: str) -> list[Any]:
        parsed = parse_opponent(spec)
        return [make_bot(shared.game, shared.spiel, parsed, s.current_player(), i) for i, s in enumerate(states)]

    slow_bots = [python_bot(shared.spiel, few, rollouts, i) for i in range(count)]
    one, all_cores = (moves_per_s(bots("mcts"), states, threads) for threads in (1, cores))
    fast, slow = moves_per_s(bots(f"mcts:{few}x{rollouts}"), states, 1), moves_per_s(slow_bots, states, 1)
    return {"game": name, "budget": f"{simulations}x{rollouts}", "one_core": one, "all_cores": all_cores,
            "all_over_one": all_cores / one, "over_python": fast / slow}  # fmt: skip


def step_row(games: int, cores: int) -> Row:
    """The rollout of a step against ``mcts``."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, [])
        trainer.metrics.close()
    ids, model, act = list(GAMES.values()), [0.0], trainer.policy.act

    def timed(queries: Any) -> Any:
        start = time.thread_time()
        actions = act(queries)
        model[0] += time.thread_time() - start
        return actions

    trainer.policy.act = timed  # type: ignore[method-assign]
    start, cpu = time.perf_counter(), time.process_time()
    play(trainer.config.env, trainer.policy, [Task(ids[i % 2], i, "mcts", i) for i in range(games)])
    wall, search = time.perf_counter() - start, time.process_time() - cpu - model[0]
    bound = max(model[0], (model[0] + search) / cores)
    return {"games": games, "model_cpu_s": model[0], "search_cpu_s": search, "wall_s": wall, "of_bound": wall / bound}


def main(argv: list[str] | None = None) -> int:
    """Measure; print rows and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=24)
    parser.add_argument("--games", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    rows = [move_row(name, task_id, args.positions, cores) for name, task_id in GAMES.items()]
    step = step_row(args.games, cores)
    print(f"{table(rows)}\n\n{table([step])}")
    ratios = {row["game"]: {key: row[key] for key in ("all_over_one", "over_python")} for row in rows}
    write(args.json, {"cores": cores}, [*rows, step], {"moves": ratios, "step of bound": step["of_bound"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
