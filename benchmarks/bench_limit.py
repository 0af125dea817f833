"""The program against the bare model without an adapter on the same rows: 1 is a program that costs nothing itself.

    python benchmarks/bench_limit.py [--model FOLDER] [--steps 3] [--set KEY=VALUE] [--json FILE]

Steps of the tiny preset (with ``--model``: 8 games of leduc_poker with full prompts, in bf16) are played and updated;
their rows are done again by the library's own forward (and backward) pass, as a plain user would batch them
(``benchmarks/limit.py``). What rows have in common is computed once by the program only: ``computed`` is their
share in the rows. CPU seconds of the process, one thread.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train_ppo
from benchmarks.bench_train import PRESET, make_trainer, timed
from benchmarks.common import Clock, Row, table, write
from benchmarks.limit import Call, bare_seconds, recorded_calls
from training.process import StopSignal

REAL = [
    "model.dtype=bfloat16", "model.tokens_per_batch=4096", "ppo.batch_size=8", "ppo.mini_batch_size=8",
    "ppo.ppo_epochs=1", "ppo.max_seq_length=2048", "env.prompt=full", "env.history_turns=all",
    'curriculum.stages=[{"name": "leduc", "opponent": "random", "games": [[200000000, 200000000]]}]',
]  # fmt: skip


def one_step(trainer: train_ppo.Trainer, stop: StopSignal, clock: Clock) -> None:
    """A step of training: ``act`` inside rollouts and ``ppo_update`` are timed."""
    with (
        mock.patch.object(trainer.policy, "act", timed(clock, "rollout", trainer.policy.act)),
        mock.patch.object(train_ppo, "ppo_update", timed(clock, "update", train_ppo.ppo_update)),
    ):
        trainer.step(stop)


def measure(trainer: train_ppo.Trainer, stop: StopSignal) -> list[Row]:
    """One step, and the bare model on its forward passes (recorded in the step itself: that takes microseconds)."""
    clock = Clock()
    with recorded_calls() as calls:
        one_step(trainer, stop, clock)
    parts: dict[str, list[Call]] = {
        "rollout": [c for c in calls if not c.grad], "update": [c for c in calls if c.grad],
    }  # fmt: skip
    rows = []
    for part, some in parts.items():
        ours, bare = clock.seconds[part], bare_seconds(trainer.policy.trunk, some, cuda=False)
        tokens, asked = sum(call.tokens for call in some), sum(n for call in some for n, _ in call.rows)
        rows.append({"part": part, "calls": len(some), "tokens": asked, "computed": tokens / asked, "ours_s": ours,
                     "bare_s": bare, "of_limit": bare / ours, "peak_gb": peak_gb()})  # fmt: skip
    return rows


def peak_gb() -> float:
    """The most memory that the process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main(argv: list[str] | None = None) -> int:
    """Measure; print rows and ratios (of the sums over all steps)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    sets = ([f"model.model_name={args.model}", *REAL] if args.model else []) + args.set
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, StopSignal() as stop:
        trainer = make_trainer(folder, sets)
        one_step(trainer, stop, Clock())
        for step in range(args.steps):
            rows += [{"step": step, **row} for row in measure(trainer, stop)]
        trainer.metrics.close()
    ratios = {}
    for part in ("rollout", "update"):
        some = [row for row in rows if row["part"] == part]
        ratios[part] = sum(row["bare_s"] for row in some) / sum(row["ours_s"] for row in some)
    print(table(rows), "\n", {part: round(ratio, 3) for part, ratio in ratios.items()})
    write(args.json, {"preset": PRESET, "set": sets}, rows, ratios)
    return 0


if __name__ == "__main__":
    sys.exit(main())
