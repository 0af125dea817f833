"""What the benchmarks share: command lines, clocks, tables, the JSON file, and the machine they ran on."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from config.flags import FlagParser

Row = dict[str, Any]


class Clock:
    """Seconds per label: of the process on a CPU, of the wall with the device at rest on CUDA."""

    def __init__(self, cuda: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._cuda = cuda

    def now(self) -> float:
        """The time, in seconds."""
        if not self._cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        """Add the time spent inside to ``label``."""
        start = self.now()
        try:
            yield
        finally:
            self.seconds[label] = self.seconds.get(label, 0.0) + self.now() - start


def table(rows: list[Row], columns: list[str] | None = None) -> str:
    """Rows as a Markdown table; a column that a row lacks shows as ``-``."""
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([_shown(row.get(key)) for key in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:,.2f}"
    return str(value)


def parser(doc: str | None) -> FlagParser:
    """A command line with ``--json``."""
    made = FlagParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write the rows here too")
    return made


def machine() -> dict[str, Any]:
    """Versions and hardware that a figure depends on."""
    import transformers

    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    facts |= {"transformers": transformers.__version__, "cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        facts |= {"gpu": gpu.name, "gpu_gb": round(gpu.total_memory / 1e9, 1), "cuda": torch.version.cuda}
    return facts


def write(path: Path | None, workload: dict[str, Any], rows: list[Row], ratios: dict[str, Any]) -> None:
    """Write the result where ``--json`` asks for it."""
    if path:
        result = {"workload": workload | machine(), "rows": rows, "ratios": ratios}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
