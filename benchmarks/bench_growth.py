"""How the cost of a step grows: with games per batch, and with turns per game where the whole history is kept.

    python benchmarks/bench_growth.py [--steps 2] [--json FILE]

Games per batch: the tiny preset at 1, 2, 4 and 8 times 64 games, CPU seconds a decision. Turns per game: made-up
conversations of 5, 10 and 20 turns of about 50 tokens, played and updated as one sequence each, CPU seconds an episode.
One thread; the model is the tiny one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_train import make_trainer, measure
from benchmarks.common import Clock, Row, table, write
from benchmarks.recorded import Games, play_recorded
from env_wrapper import Task
from games import CONFIGS_PER_GAME, NAMES
from train_ppo import Trainer, collate, ppo_update
from utils import uniform

GAMES_PER_BATCH, TALKS = 64, 16
TASK = NAMES.index("connect_four") * CONFIGS_PER_GAME  # lends its name and keeps its whole history
WORDS = "01234567890123456789012345678901234567890123"


def batch_rows(steps: int) -> list[Row]:
    """CPU seconds a decision, by games per batch."""
    rows = []
    for factor in (1, 2, 4, 8):
        sets = [f"ppo.batch_size={GAMES_PER_BATCH * factor}", f"ppo.mini_batch_size={GAMES_PER_BATCH}"]
        row = measure(f"{GAMES_PER_BATCH * factor} games", steps * 8 // factor, sets)
        rows.append({"games": GAMES_PER_BATCH * factor, "decisions": row["decisions"],
                     "ms_a_decision": 1000 / row["decisions_per_cpu_s"]})  # fmt: skip
    return rows


def talks(turns: int) -> Games:
    """Conversations that differ from their first message on."""
    games: list[dict[str, Any]] = []
    for seed in range(TALKS):
        texts = [str(int(uniform(seed, turn) * 1e6)) + WORDS for turn in range(turns)]
        games.append(
            {"seat": 0, "system": "talk", "score": float(seed % 2), "turns": [[t, list(range(10))] for t in texts]}
        )
    return {TASK: games}


def turn_row(trainer: Trainer, turns: int, steps: int) -> Row:
    """CPU seconds an episode of so many turns."""
    clock, ppo, games = Clock(), trainer.ppo, talks(turns)
    for step in range(steps + 1):
        clock = Clock() if step == 1 else clock
        with clock("rollout"):
            tasks = [Task(TASK, seed, index=step * TALKS + seed) for seed in range(TALKS)]
            episodes = play_recorded(trainer.policy, tasks, games)
        with clock("update"):
            batch = collate(episodes, trainer.policy, ppo, 0.0)
            ppo_update(trainer.policy, trainer.optimizer, batch, ppo, (step,))
    tokens = sum(len(s.ids) for s in batch.sequences)
    assert len(batch.values_M) == turns * TALKS
    parts = {f"{part}_ms": 1000 * s / steps / TALKS for part, s in clock.seconds.items()}
    return {"turns": turns, "tokens": tokens / TALKS, **parts, "ms_an_episode": sum(parts.values())}


def main(argv: list[str] | None = None) -> int:
    """Measure; print rows and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    by_batch = batch_rows(args.steps)
    print(table(by_batch), "\n", flush=True)
    sets = ["ppo.max_seq_length=4096", "ppo.batch_size=16", "ppo.mini_batch_size=4"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, sets)
        by_turns = [turn_row(trainer, turns, args.steps) for turns in (5, 10, 20)]
        trainer.metrics.close()
    print(table(by_turns), "\n")
    ratios = {
        "ms a decision, 8x the games over 1x": by_batch[-1]["ms_a_decision"] / by_batch[0]["ms_a_decision"],
        "ms an episode, 20 turns over 10": by_turns[-1]["ms_an_episode"] / by_turns[-2]["ms_an_episode"],
    }
    print({name: round(ratio, 3) for name, ratio in ratios.items()})
    write(args.json, {"games": GAMES_PER_BATCH, "talks": TALKS}, by_batch + by_turns, ratios)
    return 0


if __name__ == "__main__":
    sys.exit(main())
