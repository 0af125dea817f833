"""The rooms of the house (root modules and top-level packages with code) and who imports whom.

    python tests/tools/house.py         # rooms, arrows between them, circles of files
    python tests/tools/house.py lint    # the import contracts of pyproject.toml, held by import-linter

Tests and benchmarks are left out. The graph is read from the source: lazy imports count, nothing is executed.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {"tests", "benchmarks"}


def rooms(root: Path = ROOT) -> dict[str, Path]:
    """Name -> file or folder of every room."""
    files = {path.stem: path for path in root.glob("*.py")}
    folders = {path.parent.name: path.parent for path in root.glob("*/__init__.py")}
    return {name: path for name, path in sorted((files | folders).items()) if name not in OUTSIDE}


def sources(root: Path = ROOT) -> list[Path]:
    """Every file of product Python."""
    return [f for path in rooms(root).values() for f in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


@contextlib.contextmanager
def laid_out(root: Path = ROOT) -> Iterator[Path]:
    """A temporary folder of links in which each room is a package: grimp reads no single-file modules."""
    with tempfile.TemporaryDirectory() as name:
        for room, path in rooms(root).items():
            link = Path(name) / room
            if path.is_file():
                link.mkdir()
                link /= "__init__.py"
            link.symlink_to(path)
        yield Path(name)


class Counts(NamedTuple):
    """How the rooms hang together."""

    rooms: list[str]
    arrows: set[tuple[str, str]]  # (who imports, who is imported)
    circles: set[frozenset[str]]  # modules that import each other, directly or not


def count(root: Path = ROOT) -> Counts:
    """Count rooms, arrows and circles of the tree in ``root``."""
    code = "import grimp, json, sys; g = grimp.build_graph(*sys.argv[1:], cache_dir=None); "
    code += "print(json.dumps({m: sorted(g.find_modules_directly_imported_by(m)) for m in g.modules}))"
    with laid_out(root) as folder:
        done = subprocess.run(
            [sys.executable, "-c", code, *rooms(root)], cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        )
    imported: dict[str, list[str]] = json.loads(done.stdout)
    arrows = {(a.split(".")[0], b.split(".")[0]) for a, all_b in imported.items() for b in all_b}
    reached = {module: reach(imported, module) for module in imported}
    circles = {frozenset(n for n in reached[m] if m in reached[n]) for m in imported}
    return Counts(list(rooms(root)), {(a, b) for a, b in arrows if a != b}, circles - {frozenset()})


def reach(imported: dict[str, list[str]], module: str) -> set[str]:
    """Everything that a module imports, directly or not: itself too where the way leads back."""
    found: set[str] = set()
    todo = list(imported[module])
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += imported[name]
    return found


def lint(root: Path = ROOT) -> int:
    """Run import-linter on the tree in ``root``; return its exit code."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    options = ["--config", str(root / "pyproject.toml"), "--no-cache", "--no-logo"]
    with laid_out(root) as folder:  # which Python puts first on its path: the rooms found are those of this tree
        return subprocess.run([sys.executable, "-c", code, *options], cwd=folder, check=False).returncode


def main(words: list[str]) -> int:
    """Print the counts, or hold the contracts."""
    if words not in ([], ["lint"]):
        print("usage: python tests/tools/house.py [lint]", file=sys.stderr)
        return 2
    if words:
        return lint()
    counts = count()
    print(f"{len(counts.rooms)} rooms: {', '.join(counts.rooms)}")
    print(f"{len(counts.arrows)} arrows: {', '.join(f'{a} > {b}' for a, b in sorted(counts.arrows))}")
    print(f"{len(counts.circles)} circles" + "".join(f"\n    {', '.join(sorted(c))}" for c in counts.circles))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
