"""What each choice of the algorithm is worth: the tiny preset with one of them changed, over several seeds.

    python benchmarks/bench_ablation.py [--seeds 5] [--steps 100] [--only NAME ...] [--jobs 2] [--json FILE]

The outcome is the preset's own: the mean share of the best-response ceiling against a random opponent, exact, after a
whole (short) run with its schedules. Effects are differences to the preset on the same seed, with Student's interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import Row, table, write
from curriculum import first_tasks
from evaluation.intervals import student
from evaluation.measure import exact_values
from train_ppo import Trainer
from training.options import parse_args, read_config
from training.process import StopSignal

PRESET = "config/presets/tiny.json"
CHANGES: dict[str, list[str]] = {
    "games drawn uniformly, not by learnability": ["curriculum.sampling=uniform"],
    "one credit for the whole game (lambda 1)": ["ppo.lam=1.0"],
    "ten steps of critic warm-up": ["ppo.critic_warmup_steps=10"],
    "half the games against a pool of past selves": [
        'curriculum.stages=[{"name": "mix", "opponent": {"random": 0.5, "past": 0.5}, "gate_opponent": "random", '
        '"games": [[200000000, 200000000], [2300000000, 2300000000], [2500000000, 2500000000], '
        "[2600000000, 2600000000]]}]",
        "curriculum.past_every=20",
    ],
    "30 % of games repeat lost deals": ["curriculum.failure_replay_prob=0.3", "curriculum.replay_seed=same"],
    "30 % of games repeat lost games on new deals": [
        "curriculum.failure_replay_prob=0.3", "curriculum.replay_seed=fresh",
    ],
}  # fmt: skip


def train(name: str, seed: int, steps: int) -> Row:
    """A run; CPU seconds are those of its steps."""
    torch.set_num_threads(1)
    sets = [*CHANGES.get(name, []), f"run.seed={seed}", f"ppo.num_train_steps={steps}", "ppo.alarms=off"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--config", PRESET, "--no-wandb", "--output-dir", folder]
        config = read_config(parse_args([*arguments, *(x for item in sets for x in ("--set", item))], None))
        trainer, stop, start = Trainer(config, Path(folder)), StopSignal(), time.process_time()
        for _ in range(steps):
            trainer.step(stop)
        seconds, shares = time.process_time() - start, {}
        for task in first_tasks(config.curriculum):
            values = exact_values(trainer.policy, config.env, task)
            assert values is not None
            own, random, best = values
            shares[str(task)] = (own - random) / (best - random)
    return {"change": name, "seed": seed, "share": statistics.mean(shares.values()), "cpu_s": seconds, **shares}


def effect_row(name: str, rows: list[Row]) -> Row:
    """Difference to the preset over the seeds, of the mean and of each game."""
    base = {row["seed"]: row for row in rows if row["change"] == "preset"}
    mine = [row for row in rows if row["change"] == name]
    shown: Row = {"change": name, "share": statistics.mean(row["share"] for row in mine)}
    if name != "preset":
        gains = [row["share"] - base[row["seed"]]["share"] for row in mine]
        half = student(len(gains) - 1) * statistics.stdev(gains) / len(gains) ** 0.5
        mean = statistics.mean(gains)
        shown |= {"effect": f"{mean:+.3f}", "95 % interval": f"{mean - half:+.3f} to {mean + half:+.3f}"}
    return shown | {game: statistics.mean(row[game] for row in mine) for game in mine[0] if game.isdigit()}


def main(argv: list[str] | None = None) -> int:
    """Train everything; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=list(CHANGES), metavar="NAME", help="beginnings of their names")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    names = ["preset", *(name for name in CHANGES if name.startswith(tuple(args.only)))]
    runs = [(name, seed, args.steps) for seed in range(args.seeds) for name in names]
    rows = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(train, *run) for run in runs]:
            rows.append(done.result())
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    effects = [effect_row(name, rows) for name in names]
    print(table(effects))
    write(
        args.json,
        {"seeds": args.seeds, "steps": args.steps},
        rows,
        {row["change"]: row.get("effect") for row in effects},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
