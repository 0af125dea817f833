"""The program against the bare model without an adapter on the same rows: 1 is a program that costs nothing itself.

    python benchmarks/bench_limit.py [--model FOLDER] [--steps 3] [--set KEY=VALUE] [--json FILE]

Steps of the tiny preset (with ``--model``: 8 games of leduc_poker with full prompts, in bf16) are played and updated;
their rows are done again by the library's own forward (and backward) pass, as a plain user would batch them
(``benchmarks/limit.py``). What rows have in common is computed once by the program only: ``computed`` is what is left
of the rows. CPU seconds of the process, one thread.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train_ppo
from benchmarks.bench_train import PRESET, make_trainer, timed
from benchmarks.common import Clock, Row, parser, table, write
from benchmarks.limit import Call, bare_seconds, recorded_calls
from training.process import StopSignal, at_least, run_program

REAL = [
    "model.dtype=bfloat16", "model.tokens_per_batch=4096", "ppo.batch_size=8", "ppo.mini_batch_size=8",
    "ppo.ppo_epochs=1", "ppo.max_seq_length=2048", "env.prompt=full", "env.history_turns=all",
    'curriculum.stages=[{"name": "leduc", "opponent": "random", "games": [[200000000, 200000000]]}]',
]  # fmt: skip


def watched(calls: list[Call], function: Any) -> Any:
    """The function, its passes added to ``calls``: recording them takes microseconds."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with recorded_calls() as made:
            result = function(*args, **kwargs)
        calls.extend(made)
        return result

    return run


def measure(trainer: train_ppo.Trainer, stop: StopSignal) -> list[Row]:
    """A step of training, ``act`` and ``ppo_update`` timed, and the bare model on the passes made in either."""
    clock, parts = Clock(), {"rollout": list[Call](), "update": list[Call]()}
    act, update = trainer.policy.act, train_ppo.ppo_update
    with (
        mock.patch.object(trainer.policy, "act", watched(parts["rollout"], timed(clock, "rollout", act))),
        mock.patch.object(train_ppo, "ppo_update", watched(parts["update"], timed(clock, "update", update))),
    ):
        trainer.step(stop)
    rows = []
    for part, calls in parts.items():
        ours, bare = clock.seconds[part], bare_seconds(trainer.policy.trunk, calls, cuda=False)
        tokens, asked = sum(call.tokens for call in calls), sum(n for call in calls for n, _ in call.rows)
        rows.append({"part": part, "calls": len(calls), "tokens": asked, "computed": tokens / asked, "ours_s": ours,
                     "bare_s": bare, "of_limit": bare / ours})  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure; print rows and ratios (of the sums over all steps)."""
    add = (flags := parser(__doc__)).add_argument
    add("--model", metavar="FOLDER")
    add("--steps", type=at_least(1), default=3)
    add("--set", nargs="+", default=[], metavar="KEY=VALUE")
    args = flags.parse_args(argv)
    sets = ([f"model.model_name={args.model}", *REAL] if args.model else []) + args.set
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, StopSignal() as stop:
        trainer = make_trainer(folder, sets)
        measure(trainer, stop)  # warms up both
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
    sys.exit(run_program(main))
