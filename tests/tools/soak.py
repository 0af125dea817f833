"""Ten thousand tiny steps of the real program: memory, file descriptors, time a step and rows stay what they were.

    python tests/tools/soak.py         # 10,000 steps, a table, exit 1: something grew
    python tests/tools/soak.py 500     # fewer

Measured from outside, tenth by tenth; the first tenth is warming up. Time is that of the processor, so that other
programs do not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from tiny import KUHN, micro_file
from tiny_runs import ROOT

SECTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"batch_size": 4, "mini_batch_size": 4, "ppo_epochs": 1, "eval_games": 2, "learning_rate": 1e-4},
    "curriculum": {"stages": [{"name": "only", "games": [[KUHN, KUHN]]}]},
    "run": {"logger": "none", "keep_last": 2},
}
GROWTH_MB = 8.0  # of memory from the second tenth to the last: less than a kilobyte a step
DRIFT = 1.1  # of the time a step


class Sample(NamedTuple):
    """The process after a number of steps."""

    steps: int
    memory_mb: float
    descriptors: int
    threads: int
    cpu_s: float


def sample(process: int, metrics: Path) -> Sample:
    """Look at the running process."""
    folder = Path("/proc") / str(process)
    pages, threads = int((folder / "statm").read_text().split()[1]), len(list((folder / "task").iterdir()))
    user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    memory_mb = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    cpu_s = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return Sample(steps, memory_mb, len(list((folder / "fd").iterdir())), threads, cpu_s)


def run(folder: Path, steps: int) -> list[Sample]:
    """Train, and return a sample at the end of each tenth."""
    sections = SECTIONS | {"ppo": SECTIONS["ppo"] | {"num_train_steps": steps, "save_freq": max(steps // 10, 1)}}
    arguments = ["--config", micro_file(folder, **sections), "--output-dir", str(folder / "run")]
    samples: list[Sample] = []
    with (folder / "output.txt").open("w") as output:
        command = [sys.executable, str(ROOT / "train_ppo.py"), *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        while process.poll() is None:
            now = sample(process.pid, folder / "run" / "metrics.jsonl")
            if len(samples) < 10 and now.steps >= (len(samples) + 1) * steps // 10 - 1:
                samples.append(now)
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}\n{(folder / 'output.txt').read_text()[-3000:]}")
    return samples


def main(steps: int = 10_000) -> int:
    """Run, print the table, judge."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        samples = run(Path(name), steps)
        rows = [json.loads(line)["step"] for line in (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()]
    paces = [(b.cpu_s - a.cpu_s) / (b.steps - a.steps) * 1000 for a, b in pairwise(samples)]
    print("steps    memory MB  descriptors  threads  CPU ms a step")
    for one, pace in zip(samples, [float("nan"), *paces], strict=True):
        print(f"{one.steps:6} {one.memory_mb:11.1f} {one.descriptors:12} {one.threads:8} {pace:14.2f}")
    second, last = samples[1], samples[-1]
    drift = paces[-1] / paces[0]
    verdicts = {
        f"memory: {last.memory_mb - second.memory_mb:+.1f} MB": last.memory_mb - second.memory_mb < GROWTH_MB,
        f"descriptors: {last.descriptors - second.descriptors:+d}": last.descriptors <= second.descriptors,
        f"threads: {last.threads - second.threads:+d}": last.threads <= second.threads,
        f"time a step: times {drift:.3f}": drift < DRIFT,
        f"rows: {len(rows)} of {steps}": rows == list(range(1, steps + 1)),
    }
    for text, sound in verdicts.items():
        print(("ok   " if sound else "BAD  ") + text)
    return int(not all(verdicts.values()))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
