"""What partial credit does for answers of several lines: PPO with and without it, from the same weak start.

    python benchmarks/bench_partial.py --seeds 5 --json out.json        # about 15 CPU minutes

A tiny model is taught by supervised learning, for a few updates only, to print what two-line programs print, until it
is right about once in fifty times. PPO goes on from there twice per seed: scored 1 for a right answer and 0 otherwise,
and scored by the share of leading lines that are right (``env.trace.partial_credit``).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from env_wrapper import Decision, Sequence, Task, make_env
from options import DEFAULT_FILES, SECTIONS
from policy import load_policy
from runlog import StopSignal
from train_ppo import Trainer
from utils import load_config

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS, TAUGHT_UPDATES, STEPS, LAST = 400, 36, 60, 10
T_975 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}  # Student's t, seeds - 1 degrees of freedom


def configuration(folder: Path, seed: int, partial: bool, adapter: str | None) -> SimpleNamespace:
    """The preset ``trace_tiny`` on the two-line programs."""
    sets = [
        f'env.trace.source="{folder / "two.jsonl"}"', "env.trace.max_prints=0", "ppo.max_new_tokens=4",
        f"ppo.num_train_steps={STEPS}", f"run.seed={seed}", f"env.trace.partial_credit={json.dumps(partial)}",
        f'curriculum.stages=[{{"name": "two lines", "games": [[0, {PROGRAMS - 1}]]}}]',
        f'run.output_dir="{folder / "run"}"',
    ]  # fmt: skip
    sets += [f'model.adapter="{adapter}"'] if adapter else []
    files = [*(ROOT / name for name in DEFAULT_FILES), ROOT / "config" / "presets" / "trace_tiny.json"]
    return SimpleNamespace(**load_config(SECTIONS, files, sets))


def write_programs(path: Path) -> None:
    """Programs that print two digits, each on a line of its own."""
    rng, rows = random.Random(1), []
    for _ in range(PROGRAMS):
        a, b = rng.randrange(10), rng.randrange(10)
        v, w = rng.sample("abcdxyz", 2)
        rows.append(json.dumps({"program": f"{v} = {a}\nprint({v})\n{w} = {b}\nprint({w})"}))
    path.write_text("\n".join(rows))


def teach(config: SimpleNamespace, folder: Path) -> str:
    """Write an adapter that has seen the right answers in a few updates."""
    policy, env, data = load_policy(config), make_env(config.env), []
    for task_id in range(PROGRAMS):
        step = env.reset(Task(task_id))
        ids, shared = policy.chat.first_prompt([
            {"role": "system", "content": step.info["system"]}, {"role": "user", "content": step.text}])  # fmt: skip
        answer = [*policy.chat.encode(env._task.expected), policy.chat.end_id]  # type: ignore[attr-defined]
        positions = [len(ids) - 1 + i for i in range(len(answer))]
        data.append(Sequence(ids + answer, [Decision(len(ids), len(ids) + len(answer), positions, answer)], shared))
    optimizer, rng = torch.optim.AdamW(policy.trainable().values(), lr=3e-3), random.Random(0)
    for _ in range(TAUGHT_UPDATES):
        (-policy.evaluate_decisions(rng.sample(data, 128)).logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    (folder / "taught").mkdir()
    policy.save(folder / "taught")
    return str(folder / "taught")


def train(config: SimpleNamespace) -> tuple[float, float]:
    """Share of wholly right answers in the first and in the last steps. A share of lines above 0.5 is all of two."""
    Path(config.run.output_dir).mkdir(exist_ok=True)
    trainer, rates = Trainer(replace_run(config), Path(config.run.output_dir)), []
    for _ in range(STEPS):
        rates.append(trainer.step(StopSignal())["success_rate"])
    return statistics.mean(rates[:5]), statistics.mean(rates[-LAST:])


def replace_run(config: SimpleNamespace) -> SimpleNamespace:
    """The configuration without alarms: what they say is not measured here."""
    return SimpleNamespace(**vars(config) | {"ppo": replace(config.ppo, alarms="off")})


def main() -> None:
    """Run both for every seed and print the difference with its interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, choices=sorted(T_975))
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_programs(folder / "two.jsonl")
        adapter = teach(configuration(folder, 0, False, None), folder)
        for seed in range(args.seeds):
            for partial in (True, False):
                first, last = train(configuration(folder, seed, partial, adapter))
                rows.append({"seed": seed, "partial_credit": partial, "first": first, "last": last})
                print(f"seed {seed}  partial credit {partial!s:<5}  right answers: first steps {first:.3f}, "
                      f"last {last:.3f}", flush=True)  # fmt: skip
    gains = [a["last"] - b["last"] for a, b in zip(rows[0::2], rows[1::2], strict=True)]
    half = T_975[args.seeds] * statistics.stdev(gains) / args.seeds**0.5
    mean = statistics.mean(gains)
    print(f"gain in right answers: {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}] over {args.seeds} seeds")
    if args.json:
        workload = {"programs": PROGRAMS, "steps": STEPS, "taught_updates": TAUGHT_UPDATES}
        ratios = {"gain": mean, "half_width": half}
        Path(args.json).write_text(json.dumps({"workload": workload, "rows": rows, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
