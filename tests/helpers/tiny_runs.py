"""Runs of the program through its command line, and what two of them have to have in common."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import KUHN, LEDUC, micro_file

import train_ppo

# Keys of a row that differ between identical runs.
VOLATILE = {"time_rollout", "time_update", "time_total", "games_per_s", "decisions_per_s", "memory_mb"}
STEPS = 6
# Everything that adapts is in play: stages, replays, self-play, past selves, an evaluation, the magnet, rehearsal, the
# state head, constant contexts.
CLIMB: dict[str, Any] = {
    "stages": [
        {"name": "low", "games": [[KUHN, KUHN], [LEDUC, LEDUC]], "threshold": 0.0, "min_episodes": 30},
        {"name": "high", "games": [[LEDUC, LEDUC]], "opponent": {"random": 1.0, "self": 1.0, "past": 1.0}},
    ],
    "failure_replay_prob": 0.3,
}
ADAPTIVE: dict[str, dict[str, Any]] = {
    "ppo": {
        "eval_freq": 4,
        "eval_exact": "auto",
        "magnet_coef": 0.1,
        "rehearsal_coef": 0.5,
        "state_coef": 0.02,
        "context_grad": False,
    },
    "curriculum": CLIMB,
}
ROOT = Path(train_ppo.__file__).parent
# Before ``train_ppo.main`` in a process whose run is compared with one of ``program``.
FEW_TEXTS = "from policy import rehearsal; rehearsal.TEXTS, rehearsal.TOKENS = 8, 16"


class Drawing:
    """Stands in for ``subprocess``: draws no curves, which takes seconds, and keeps the command."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **options: Any) -> Any:
        """Take the command as done."""
        self.commands.append(command)
        return SimpleNamespace(returncode=0, stderr="")


def program(*args: str) -> int:
    """Run the program with few rehearsed texts; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("policy.rehearsal.TEXTS", 8)
        patch.setattr("policy.rehearsal.TOKENS", 16)
        return train_ppo.main(list(args))


def train(folder: Path, *args: str, **sections: dict[str, Any]) -> int:
    """Run the program with the micro configuration in ``folder/run``; return its exit code."""
    return program("--config", micro_file(folder, **sections), "--output-dir", str(folder / "run"), *args)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics, without what differs between identical runs."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [{key: value for key, value in json.loads(line).items() if key not in VOLATILE} for line in lines]


def final_bytes(folder: Path, step: int = STEPS) -> list[bytes]:
    """What was learnt: adapter, heads and optimizer in the checkpoint of a step."""
    found = sorted((folder / "run" / f"checkpoint-{step:06d}").glob("*.safetensors"))
    return [path.read_bytes() for path in found]


def summary(folder: Path) -> dict[str, Any]:
    """The run's summary."""
    return json.loads((folder / "run" / "summary.json").read_text())


def assert_same_run(folder: Path, other: Path) -> None:
    """Both runs went the same way, to the bit."""
    assert rows(folder) == rows(other)
    assert final_bytes(folder) == final_bytes(other)
    assert summary(folder) == summary(other)


@functools.cache
def _kept() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="undisturbed-")


@functools.cache
def undisturbed_run() -> Path:
    """A finished run, with a checkpoint after every step; made once per process."""
    assert train(Path(_kept().name), **ADAPTIVE) == 0
    return Path(_kept().name)


def copy_of(run: Path, folder: Path, step: int) -> None:
    """A run's folder as it was after ``step``, metrics of one step more and of half a row included."""
    (folder / "run").mkdir()
    shutil.copy(run / "about.json", folder / "run")
    for k in range(1, step + 1):
        shutil.copytree(run / f"checkpoint-{k:06d}", folder / "run" / f"checkpoint-{k:06d}")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "run" / "metrics.jsonl").write_text("".join(lines[: step + 1]) + lines[0][:40])
