"""The record of what a run is and what it runs on: its first lines on the terminal, ``about.json``, its report."""

import contextlib
import json
import os
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from config.reader import ConfigError, read_json
from curriculum import pool
from games import NAMES
from training.process import ROOT
from utils import CheckpointError, redact, versions, write_file


def begin(run_dir: Path, config: SimpleNamespace, start: Path | None) -> dict[str, Any]:
    """Write and return a run's record; one resumed from ``start`` in its own folder keeps its beginning and time."""
    games, opponents = ["trace"], list[str]()
    if config.env.env_type == "openspiel":
        games = list(dict.fromkeys(NAMES[i] for stage in config.curriculum.stages for i in pool(stage.games)))
        opponents = list(dict.fromkeys(name for stage in config.curriculum.stages for name in stage.mixture))
    about = {
        "model": config.model.model_name, "adapter": config.model.adapter, "folder": str(run_dir),
        "games": games, "opponents": opponents,
        "seed": config.run.seed, "steps": config.ppo.num_train_steps, "games_per_step": config.ppo.batch_size,
        "commit": commit(), "hardware": hardware(), "versions": versions(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": 0.0,
    }  # fmt: skip
    if start and start.parent.resolve() == run_dir.resolve():  # another folder may hold the record of another run
        with contextlib.suppress(ConfigError, ValueError, KeyError, TypeError, OverflowError):
            before = read_json(run_dir / "about.json")
            about |= {"started": str(before["started"])[:25], "seconds": min(max(float(before["seconds"]), 0.0), 1e9)}
    _write(run_dir, about)
    return about | {"since": time.monotonic()}


def end(run_dir: Path, about: dict[str, Any]) -> None:
    """Add the time that this process took to the record."""
    if about:
        _write(run_dir, about | {"seconds": about["seconds"] + time.monotonic() - about["since"]})


def _write(run_dir: Path, about: dict[str, Any]) -> None:
    kept = {key: value for key, value in about.items() if key != "since"}
    with contextlib.suppress(OSError, CheckpointError):  # not worth a run, which reports itself where it cannot write
        write_file(run_dir / "about.json", json.dumps(redact(kept, words=False), indent=1).encode())


def headline(about: dict[str, Any]) -> str:
    """Two lines that identify the run; "" where this process keeps no record."""
    if not about:
        return ""
    games = about["games"]
    names = ", ".join(games) if len(games) <= 6 else f"{len(games)} games"
    against = f" against {', '.join(about['opponents'])}" if about["opponents"] else ""
    place = (about["folder"], f"seed {about['seed']}", f"{about['steps']:,} steps of {about['games_per_step']:,} games",
             f"commit {about['commit']}", about["hardware"])  # fmt: skip
    return f"{about['model']} plays {names}{against}\n{' · '.join(place)}"


def commit() -> str:
    """This program's commit, followed by "+" if files differ; "unknown" outside of a repository or without git."""
    own = ["-C", str(ROOT), "--git-dir=.git"]  # not the repository of somebody who has unpacked this in one
    command = ["git", *own, "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:  # there is no git
        return "unknown"


def hardware() -> str:
    """Describe the machine."""
    machine = f"{os.cpu_count()} CPU cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        return machine
    count = torch.cuda.device_count()
    return f"{f'{count} x ' * (count > 1)}{torch.cuda.get_device_name(0)}, {machine}"
