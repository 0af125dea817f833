"""Decisions a second of whole training steps, split into environment, rollout, update and the rest.

    python benchmarks/bench_train.py [--steps 4] [--full] [--set KEY=VALUE] [--json FILE]

The workload is the tiny preset's: four small games, compact prompts, uniform random opponents, one thread, CPU seconds
of the process. ``--full`` plays leduc_poker and hex-5 with full prompts and no history instead, twice: what rows begin
with is computed once, or by each of them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import train_ppo
from benchmarks.common import Clock, Row, parser, table, write
from policy import network, tree
from training.config import parse_args, read_config
from training.process import StopSignal, at_least, rest_collector, run_program

PRESET = "config/presets/tiny.json"
FULL = [
    "ppo.batch_size=16", "ppo.mini_batch_size=16", "ppo.max_seq_length=4096", 'env.prompt="full"',
    'curriculum.stages=[{"name": "two", "games": [[200000000, 200000000], [600000000, 600000000]]}]',
]  # fmt: skip


def make_trainer(folder: str, sets: list[str]) -> train_ppo.Trainer:
    """A trainer of the tiny preset, changed by ``sets``."""
    argv = ["--config", PRESET, "--output-dir", folder, "--no-wandb"]
    config = read_config(parse_args([*argv, *(part for item in sets for part in ("--set", item))], None))
    torch.set_num_threads(1)
    trainer = train_ppo.Trainer(config, Path(folder))
    rest_collector()  # as train_ppo.train does before its first step
    return trainer


def timed(clock: Clock, label: str, function: Any) -> Any:
    """The function, its time added to ``label``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with clock(label):
            return function(*args, **kwargs)

    return run


def measure(name: str, steps: int, sets: list[str]) -> Row:
    """Mean of ``steps`` steps after one that warms up."""
    clock, decisions, wall = Clock(), 0, 0.0
    with tempfile.TemporaryDirectory() as folder, StopSignal() as stop:
        trainer = make_trainer(folder, sets)
        trainer.step(stop)
        with (
            mock.patch.object(train_ppo, "play", timed(clock, "play", train_ppo.play)),
            mock.patch.object(train_ppo, "collate", timed(clock, "update", train_ppo.collate)),
            mock.patch.object(train_ppo, "ppo_update", timed(clock, "update", train_ppo.ppo_update)),
            mock.patch.object(trainer.policy, "act", timed(clock, "rollout", trainer.policy.act)),
        ):
            for _ in range(steps):
                start = time.perf_counter()
                with clock("step"):
                    decisions += trainer.step(stop)["decisions"]
                wall += time.perf_counter() - start
        trainer.metrics.close()
    spent = clock.seconds
    parts = {"environment": spent["play"] - spent["rollout"], "rollout": spent["rollout"], "update": spent["update"],
             "other": spent["step"] - spent["play"] - spent["update"]}  # fmt: skip
    return {"workload": name, "decisions_per_cpu_s": decisions / spent["step"], "decisions": decisions / steps,
            "step_cpu_s": spent["step"] / steps, "step_wall_s": wall / steps,
            **{part: s / spent["step"] for part, s in parts.items()}}  # fmt: skip


def nothing_shared(rows: Sequence[tree.Row]) -> Iterator[tuple[int, int]]:
    """``tree.new_tokens`` of rows that all compute their own beginning."""
    return ((0, len(row.ids)) for row in rows)


def main(argv: list[str] | None = None) -> int:
    """Measure; print rows and ratios."""
    add = (flags := parser(__doc__)).add_argument
    add("--steps", type=at_least(1), default=4)
    add("--full", action="store_true")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE")
    args = flags.parse_args(argv)
    ratios: dict[str, float] = {}
    if args.full:
        rows = [measure("full prompts", args.steps, FULL + args.set)]
        alone = [mock.patch.object(module, "new_tokens", nothing_shared) for module in (tree, network)]  # grown, cut
        with alone[0], alone[1]:
            rows.append(measure("full prompts, nothing shared", args.steps, FULL + args.set))
        speeds = [row["decisions_per_cpu_s"] for row in rows]
        ratios["shared over not"] = speeds[0] / speeds[1]
    else:
        rows = [measure("tiny preset", args.steps, args.set)]
        ratios = {part: rows[0][part] for part in ("environment", "rollout", "update", "other")}
    print(table(rows), "\n", {name: round(ratio, 3) for name, ratio in ratios.items()})
    write(args.json, {"preset": PRESET, "steps": args.steps, "set": args.set}, rows, ratios)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
