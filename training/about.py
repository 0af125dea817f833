"""What a run is and what it runs on, for whoever looks at it later: its first lines, ``about.json``, its report."""

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
from utils import CheckpointError, redact, versions, write_file

ROOT = Path(__file__).parents[1]


def begin(run_dir: Path, config: SimpleNamespace, resumed: bool) -> dict[str, Any]:
    """Write and return what is known when a run starts; one that goes on keeps its start and the time it took."""
    played = [NAMES[i] for stage in config.curriculum.stages for i in pool(stage.games)]
    against = [opponent for stage in config.curriculum.stages for opponent in stage.mixture]
    about = {
        "model": config.model.model_name, "adapter": config.model.adapter, "folder": str(run_dir),
        "games": list(dict.fromkeys(played)) if config.env.env_type == "openspiel" else ["trace"],
        "opponents": list(dict.fromkeys(against)) if config.env.env_type == "openspiel" else [],
        "seed": config.run.seed, "steps": config.ppo.num_train_steps, "games_per_step": config.ppo.batch_size,
        "commit": commit(), "hardware": hardware(), "versions": versions(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": 0.0,
    }  # fmt: skip
    if resumed:
        with contextlib.suppress(ConfigError, ValueError, KeyError, TypeError, OverflowError):
            before = read_json(run_dir / "about.json")
            about |= {"started": str(before["started"])[:25], "seconds": min(max(float(before["seconds"]), 0.0), 1e9)}
    _write(run_dir, about)
    return about | {"since": time.monotonic()}


def end(run_dir: Path, about: dict[str, Any]) -> None:
    """Add the time this process took."""
    if about:
        _write(run_dir, about | {"seconds": about["seconds"] + time.monotonic() - about["since"]})


def _write(run_dir: Path, about: dict[str, Any]) -> None:
    kept = {key: value for key, value in about.items() if key != "since"}
    with contextlib.suppress(OSError, CheckpointError):  # a luxury: the run itself tells where it cannot write
        write_file(run_dir / "about.json", json.dumps(redact(kept, words=False), indent=1).encode())


def headline(about: dict[str, Any]) -> str:
    """Two lines that say which run this is."""
    if not about:
        return ""
    games = about["games"]
    names = ", ".join(games) if len(games) <= 6 else f"{len(games)} games"
    against = f" against {', '.join(about['opponents'])}" if about["opponents"] else ""
    place = (about["folder"], f"seed {about['seed']}", f"{about['steps']:,} steps of {about['games_per_step']:,} games",
             f"commit {about['commit']}", about["hardware"])  # fmt: skip
    return f"{about['model']} plays {names}{against}\n{' · '.join(place)}"


def commit() -> str:
    """The version of this program, "+" where files differ from it; "unknown" outside of a repository or without git."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"]
    try:
        told = subprocess.run(words, capture_output=True, text=True)
    except OSError:  # there is no git
        return "unknown"
    return told.stdout.strip() or "unknown"


def hardware() -> str:
    """The machine in words."""
    machine = f"{os.cpu_count()} CPU cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = torch.cuda.get_device_name(0) if count else ""
    return f"{f'{count} x ' * (count > 1)}{names}, {machine}" if count else machine
