"""Memory, speed and correctness of whole PPO steps at the true model shapes; see gpu.sh.

    python benchmarks/gpu_bench.py --out out/gpu [--budget 500] [--cpu-smoke]

Weights are random, prompts are recorded games against random opponents (benchmarks/prompts.json): full prompts,
constrained answers, one epoch, minibatches of 8 games. Every row is written when it is measured: ``gpu.json`` and
``gpu.md`` in ``--out`` are complete at any time.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import gpu_checks, predict
from benchmarks.common import Clock, Row, machine, table, write
from benchmarks.gpu_models import SHAPES, TOYS, Shape, forget, make_peft_model, make_policy, settings
from benchmarks.gpu_models import config_of as architecture_of
from benchmarks.limit import bare_seconds, recorded_calls
from benchmarks.recorded import play_recorded, tasks
from envs.types import Episode
from policy import Policy
from train_ppo import LONE, collate, ppo_update
from training.config import PPOConfig

CARDS = ["leduc_poker", "liars_dice"]
FIVE = [*CARDS, "goofspiel", "hex-5", "clobber-5"]
GB = 1e9


@dataclass(frozen=True)
class Workload:
    """The games of a step and how the update holds them in memory."""

    name: str
    games: list[str]
    batch: int
    checkpointing: bool = True


@dataclass(frozen=True)
class Plan:
    """What is measured where."""

    shapes: tuple[Shape, ...]
    workloads: tuple[Workload, ...]
    epochs: int
    timed_steps: int
    memory_steps: int
    device: str


GPU_PLAN = Plan(
    SHAPES[::-1],  # the default's first: of a slow card its step is the one to know
    (
        Workload("cards", CARDS, 8),
        Workload("five games", FIVE, 8),
        Workload("five games", FIVE, 32),
        Workload("five games", FIVE, 8, checkpointing=False),
    ),
    epochs=1, timed_steps=1, memory_steps=50, device="cuda",
)  # fmt: skip
SMOKE_PLAN = Plan(
    TOYS, (Workload("cards", CARDS, 2), Workload("five games", FIVE, 4, checkpointing=False)),
    epochs=2, timed_steps=1, memory_steps=6, device="cpu",
)  # fmt: skip


class Report:
    """The rows so far, on disk and on screen, and what was skipped and why."""

    def __init__(self, out: Path, budget: float) -> None:
        self.out, self.rows, self.skipped = out, list[Row](), list[str]()
        self._end = time.monotonic() + budget
        self._longest: dict[str, float] = {}
        out.mkdir(parents=True, exist_ok=True)

    def measure(self, kind: str, name: Row, work: Callable[[], list[Row]]) -> None:
        """Add what ``work`` measures, unless time is running out; its failure is a row too and stops nothing."""
        what, start = " ".join([kind, *map(str, name.values())]), time.monotonic()
        alike = f"{kind} {name.get('batch')}"
        if start + self._longest.get(alike, 0) > self._end:
            self.skip(f"{what}: no time left")
            return
        try:
            rows = work()
        except Exception as error:  # one measurement that fails must not cost the others
            traceback.print_exc()
            rows = [{"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}]
            forget()
        took = time.monotonic() - start
        self._longest[alike] = max(took, self._longest.get(alike, 0))
        self.rows += [{"kind": kind, **name, **row} for row in rows]
        print(table([name | row for row in rows]), f"({took:.0f} s)", flush=True)
        self.save()

    def skip(self, what: str) -> None:
        """Say what is not measured."""
        print(f"skipped: {what}", flush=True)
        self.skipped.append(what)
        self.save()

    def save(self) -> None:
        """Write gpu.json and gpu.md."""
        workload = {"weights": "random", "prompts": "recorded, full", "answers": "constrained", "skipped": self.skipped}
        steps = [row for row in self.rows if row["kind"] == "step" and "failed" not in row]
        ratios = {" ".join(str(row[k]) for k in ("model", "precision", "games", "batch", "checkpointing")):
                  {k: row[k] for k in ("rollout_of_limit", "update_of_limit")} for row in steps}  # fmt: skip
        write(self.out / "gpu.json", workload, self.rows, ratios)
        parts = ["# True shapes, random weights", ", ".join(f"{k} {v}" for k, v in machine().items())]
        for kind in dict.fromkeys(row["kind"] for row in self.rows):
            rows = [{k: v for k, v in row.items() if k != "kind"} for row in self.rows if row["kind"] == kind]
            parts += [f"## {kind}", table(rows)]
        parts += ["## skipped", "\n".join(f"* {what}" for what in self.skipped)] if self.skipped else []
        (self.out / "gpu.md").write_text("\n\n".join(parts) + "\n")


def memory(reset: bool = False) -> tuple[float | None, float | None]:
    """Peak of what tensors take and of what the allocator holds, in GB; None without CUDA."""
    if not torch.cuda.is_available():
        return None, None
    peaks = torch.cuda.max_memory_allocated() / GB, torch.cuda.max_memory_reserved() / GB
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return peaks


def config_of(shape: Shape, four_bit: bool, work: Workload, plan: Plan) -> SimpleNamespace:
    """The program's configuration for a workload."""
    minibatch = min(PPOConfig.mini_batch_size, work.batch)
    ppo = PPOConfig(batch_size=work.batch, mini_batch_size=minibatch, ppo_epochs=plan.epochs, target_kl=None)
    return settings(shape, four_bit, ppo, device=plan.device, gradient_checkpointing=work.checkpointing)


def roll(policy: Policy, work: Workload, clock: Clock) -> list[Episode]:
    """The rollout of a step; raises RuntimeError where a game fails."""
    with clock("rollout"):
        episodes = play_recorded(policy, tasks(work.games, work.batch))
    failed = [e.info["error"] for e in episodes if e.outcome == "failed"]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(episodes)} episodes failed: {failed[0]}")
    return episodes


def learn(policy: Policy, optimizer: Any, episodes: list[Episode], ppo: PPOConfig, clock: Clock) -> Row:
    """The rest of a step, as the trainer does it; counts."""
    with clock("score"):
        batch = collate(episodes, policy, ppo, ppo.init_kl_coef, {})
    with clock("update"):
        not_finite = ppo_update(policy, optimizer, batch, ppo, (0, 0))["skipped"]
    with clock("score"):
        batch.moved(policy, not ppo.legal_mass_coef, LONE)
    tokens = sum(len(sequence.ids) for sequence in batch.sequences)
    return {"decisions": len(batch.values_M), "tokens": tokens, "not_finite": not_finite}


def step_rows(peft_model: Any, shape: Shape, four_bit: bool, work: Workload, plan: Plan) -> list[Row]:
    """A step that warms up and is recorded, ``plan.timed_steps`` that are timed, and the bare model on the same."""
    config, cuda = config_of(shape, four_bit, work, plan), plan.device == "cuda"
    policy = make_policy(peft_model, shape, config)
    if work.checkpointing:
        policy.reader._most_kept = 0  # as on a card that has no room: here all layers might keep their activations
    optimizer = gpu_checks.adamw(policy)
    with predict.recorded(policy) as passes:
        with recorded_calls() as acting:
            episodes = roll(policy, work, Clock())
        with recorded_calls() as learning:
            learn(policy, optimizer, episodes, config.ppo, Clock())
    clock, peaks = Clock(cuda), Row()
    for _ in range(plan.timed_steps):
        memory(reset=True)
        episodes = roll(policy, work, clock)
        peaks["rollout_gb"] = memory(reset=True)[0]
        counts = learn(policy, optimizer, episodes, config.ppo, clock)
        peaks["update_gb"], peaks["held_gb"] = memory()
    seconds = {part: total / plan.timed_steps for part, total in clock.seconds.items()}
    read = sum(call.tokens for call in acting)
    of_limit: list[float | None] = [None, None]
    with suppress(torch.OutOfMemoryError):  # the bare model keeps all activations: such a card is told the step alone
        for _ in range(2):  # the first time loads kernels
            limits = [bare_seconds(policy.trunk, calls, cuda) for calls in (acting, [c for c in learning if c.grad])]
        of_limit = [limits[0] / seconds["rollout"], limits[1] / seconds["update"]]
    return [{
        **counts, **peaks, **{f"{part}_s": s for part, s in seconds.items()}, "step_s": sum(seconds.values()),
        "predicted_s": predicted(passes, shape, config, plan.epochs * work.batch // config.ppo.mini_batch_size),
        "tokens_per_batch": policy.reader.tokens_per_batch,  # halved where memory ran out
        "rollout_decisions_per_s": counts["decisions"] / seconds["rollout"], "read_tokens": read,
        "read_tokens_per_s": read / seconds["rollout"], "rollout_of_limit": of_limit[0], "update_of_limit": of_limit[1],
    }]  # fmt: skip


def predicted(passes: list[predict.Pass], shape: Shape, config: SimpleNamespace, updates: int) -> float | None:
    """Seconds that ``predict.py`` gives such a step on this card; None for a card that it does not know."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    card = next((c for c in predict.CARDS if gpu and c.is_called(gpu.name, gpu.total_memory / GB)), None)
    if card is None:
        return None
    parts = predict.whole_step(predict.Step(passes, 0, 0, updates, 0.0, []), config, architecture_of(shape))
    return sum(predict.priced(card, ops) for ops in parts.values())


def self_test(shape: Shape, four_bit: bool, plan: Plan) -> list[Row]:
    """What must be seen on a device before anything is measured, in a minute, on two layers of a true shape."""
    work = Workload("cards", CARDS, 2, checkpointing=False)
    policy = make_policy(make_peft_model(shape, four_bit, plan.device), shape, config_of(shape, four_bit, work, plan))
    return gpu_checks.self_test(policy, tasks(CARDS, 2), plan.device == "cuda")


def measure_model(report: Report, shape: Shape, precision: str, plan: Plan) -> None:
    """All rows of one model in one precision."""
    name, four_bit = {"model": shape.name, "precision": precision}, precision == "nf4"
    held: list[Any] = []

    def load() -> list[Row]:
        memory(reset=True)
        start = time.monotonic()
        held.append(make_peft_model(shape, four_bit, plan.device))
        trained = sum(p.numel() for p in held[0].parameters() if p.requires_grad)
        peak = memory(reset=True)[0]
        now = torch.cuda.memory_allocated() / GB if plan.device == "cuda" else None
        return [{"loaded_gb": now, "peak_gb": peak, "seconds": time.monotonic() - start, "trained": trained}]

    report.measure("load", name, load)
    if not held:
        return
    for work in plan.workloads:
        label = name | {"games": work.name, "batch": work.batch, "checkpointing": work.checkpointing}
        report.measure("step", label, partial(step_rows, held[0], shape, four_bit, work, plan))
        forget()
    first = replace(plan.workloads[0], checkpointing=True)
    config = config_of(shape, four_bit, first, plan)
    policy = make_policy(held[0], shape, config)
    report.measure("check", name, lambda: gpu_checks.gradients_and_gaps(policy, tasks(FIVE, 5)))
    if shape is plan.shapes[0]:
        report.measure("prompts", name, lambda: gpu_checks.prompts(policy, {game: tasks([game], 8) for game in FIVE}))
        report.measure("profile", name, lambda: gpu_checks.profile(policy, tasks(FIVE, 8), plan.device == "cuda"))
        report.measure("memory", name, lambda: gpu_checks.flat_memory(policy, tasks(CARDS, 2), plan.memory_steps))


def main(argv: list[str] | None = None) -> int:
    """Measure all models within the budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--budget", type=float, default=500.0, help="seconds; nothing is begun that may end later")
    parser.add_argument("--cpu-smoke", action="store_true", help="everything on a CPU, with toy shapes")
    args = parser.parse_args(argv)
    if not args.cpu_smoke and not torch.cuda.is_available():
        print("error: torch finds no CUDA device; --cpu-smoke runs everything on toy shapes", file=sys.stderr)
        return 2
    plan, report = SMOKE_PLAN if args.cpu_smoke else GPU_PLAN, Report(args.out, args.budget)
    precisions = ["nf4", "bf16"]
    if not importlib.util.find_spec("bitsandbytes"):
        report.skip("nf4: bitsandbytes is not installed")
        precisions.remove("nf4")
    small = replace(plan.shapes[-1], name=f"{plan.shapes[-1].name}, 2 layers", layers=2)
    report.measure("self-test", {"model": small.name, "precision": precisions[0]},
                   lambda: self_test(small, precisions[0] == "nf4", plan))  # fmt: skip
    for precision in precisions:
        for shape in plan.shapes:
            measure_model(report, shape, precision, plan)
            forget()
    report.save()
    print(f"\n{(args.out / 'gpu.md').read_text()}\nwritten: {args.out / 'gpu.md'}, {args.out / 'gpu.json'}")
    return 1 if any("failed" in row for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
