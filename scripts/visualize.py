"""Curves and a self-contained report of one or several runs.

    python scripts/visualize.py --checkpoint_dir RUN [RUN ...] [--output DIR]

Reads the run directories that training writes (metrics.jsonl; summary.json, run_config.json and episodes.jsonl
where they exist) and writes ``curves.png`` and ``report.html``, which opens from disk without a network.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ASSETS = Path(__file__).resolve().parent / "report"
MAX_POINTS = 1500  # of a line in the page
MAX_EPISODES = 200  # of a run in the page, the latest
# Okabe and Ito's colour-blind-safe palette (Okabe & Ito 2008, "Color Universal Design"), best on white first.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":", "-.")


class RunError(ValueError):
    """A run directory that cannot be read; the message is one line: what, where, what is expected."""


@dataclass(frozen=True)
class Panel:
    """A chart: metric keys (one ending in "/" stands for all keys that begin with it) and how to draw them."""

    title: str
    keys: tuple[str, ...]
    unit: str = ""
    smooth: bool = False  # rolling mean with a 95 % band over the faint raw line
    marks: bool = False  # few points: draw them
    limits: tuple[float, float] | None = None


PANELS = (
    Panel("Score", ("score_mean",), "mean score of a step, 0 to 1", smooth=True),
    Panel("Success", ("window_success", "gate_success", "success_rate"), "share of games", smooth=True, limits=(0, 1)),
    Panel("Evaluation", ("eval/",), "share of the ceiling; value where that is unknown", marks=True),
    Panel("Score by game", ("score/",), "rolling mean", smooth=True),
    Panel("Success by game", ("success/",), "rolling mean", smooth=True, limits=(0, 1)),
    Panel("KL", ("kl_ref", "approx_kl"), "nats a decision"),
    Panel("KL coefficient", ("kl_coef",)),
    Panel("Entropy", ("entropy",), "nats a decision"),
    Panel("Clip fraction", ("clip_fraction",), "share of decisions"),
    Panel("Largest change of a probability", ("ratio_max",), "|new / old - 1|"),
    Panel("Explained variance", ("explained_variance",), "of the returns, by the critic"),
    Panel("Losses", ("policy_loss", "value_loss")),
    Panel("Gradient norm", ("grad_norm",)),
    Panel("Legal mass", ("legal_mass",), "unrestricted probability of legal answers"),
    Panel("Learning rate", ("learning_rate",)),
    Panel("Throughput", ("games_per_s", "decisions_per_s"), "per second"),
    Panel("Time of a step", ("time_rollout", "time_update", "time_total"), "seconds"),
    Panel("Memory", ("memory_mb",), "MB"),
    Panel("Failure buffer", ("buffer_size",), "entries"),
    Panel("Games cut short and answers retried", ("truncated", "forfeited", "failed", "retries"), "per step"),
)


@dataclass
class Series:
    """One line. ``y`` is raw; ``mean``, ``low`` and ``high`` (empty unless smoothed) belong to the same ``x``."""

    run: int
    key: str
    x: list[float]
    y: list[float]
    mean: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass
class Run:
    """What a run directory holds; the optional files are empty where they are missing."""

    name: str
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any]
    episodes: list[dict[str, Any]]

    @property
    def stages(self) -> list[tuple[float, str]]:
        """(step, text) of each stage change: what is entered, and why."""
        changes = [row for row in self.rows if row.get("stage_change")]
        keys = ("stage_change", "stage_reason")
        return [(row["step"], ": ".join(str(row[key]) for key in keys if row.get(key))) for row in changes]

    @property
    def window(self) -> int:
        """Steps of the rolling mean: a twentieth of the run, from 5 to 50."""
        return max(5, min(50, len(self.rows) // 20))


def load_run(directory: Path) -> Run:
    """Read a run directory.

    Raises:
        RunError: there is no metrics.jsonl, or a file in the directory is damaged.
    """
    if not directory.is_dir():
        raise RunError(f"{directory}: no such directory")
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise RunError(f"{path}: not found; a run directory has a metrics.jsonl, written by training")
    rows = _read_lines(path, _check_metrics)
    if not rows:
        raise RunError(f"{path}: no step in it yet")
    episodes_path = directory / "episodes.jsonl"
    episodes = _read_lines(episodes_path, _check_episode) if episodes_path.is_file() else []
    summary = _read_object(directory / "summary.json")
    if not isinstance(summary.get("games", {}), dict):
        raise RunError(f"{directory / 'summary.json'}: games must be an object of one entry a game")
    name = directory.resolve().name
    return Run(name, rows, _read_object(directory / "run_config.json"), summary, episodes[-MAX_EPISODES:])


def _read_lines(path: Path, check: Callable[[dict[str, Any]], str]) -> list[dict[str, Any]]:
    """Parse JSON lines. A last line without its newline is still being written, and is left out."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RunError(f"{path} line {number}: not JSON: {error}") from None
        problem = check(row) if isinstance(row, dict) else "not a JSON object"
        if problem:
            raise RunError(f"{path} line {number}: {problem}")
        rows.append(row)
    return rows


def _check_metrics(row: dict[str, Any]) -> str:
    return "" if _finite(row.get("step")) else f"step must be a number, not {row.get('step')!r}"


def _check_episode(row: dict[str, Any]) -> str:
    if not isinstance(row.get("game"), str):
        return f"game must be a name, not {row.get('game')!r}"
    for key in ("history", "turns"):
        if not isinstance(row.get(key) or [], list):
            return f"{key} must be a list, not {row[key]!r}"
    if not all(isinstance(turn, dict) for turn in row.get("turns") or []):
        return "turns must be objects"
    moves = row.get("history") or []
    if not all(isinstance(m, list) and len(m) == 2 and all(isinstance(i, int) for i in m) for m in moves):
        return "history must be [player, action] pairs"
    return ""


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RunError(f"{path}: not a JSON object")
    return value


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def rolling(y: Sequence[float], window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Trailing mean of the last ``window`` values and its 95 % band, mean ± 1.96 standard errors."""
    values = np.asarray(y, dtype=float)
    centre = values.mean()  # keeps the squares small beside their differences
    totals, squares = (np.concatenate([[0.0], np.cumsum(v)]) for v in (values - centre, (values - centre) ** 2))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    count = end - start
    mean = (totals[end] - totals[start]) / count
    variance = np.maximum(0, squares[end] - squares[start] - count * mean**2) / np.maximum(1, count - 1)
    error = 1.96 * np.sqrt(variance / count)
    return mean + centre, mean + centre - error, mean + centre + error


def panel_series(panel: Panel, runs: Sequence[Run]) -> list[Series]:
    """The lines of a panel: its keys that have finite numbers in a run; none where all of them are always 0."""
    found = []
    for index, run in enumerate(runs):
        present = dict.fromkeys(key for row in run.rows for key in row)
        prefixes = tuple(key for key in panel.keys if key.endswith("/"))
        keys = [key for key in present if key in panel.keys or (prefixes and key.startswith(prefixes))]
        for key in sorted(keys) if prefixes else sorted(keys, key=panel.keys.index):
            points = [(row["step"], row[key]) for row in run.rows if _finite(row.get(key))]
            if not points:
                continue
            series = Series(index, key, [x for x, _ in points], [y for _, y in points])
            if panel.smooth and key not in ("window_success", "gate_success"):
                series.mean, series.low, series.high = (a.tolist() for a in rolling(series.y, run.window))
            found.append(series)
    return found if any(any(series.y) for series in found) else []


def opponent_shares(run: Run) -> tuple[list[float], dict[str, list[float]]]:
    """Steps, and the rolling share of each opponent in their games; nothing where there is only one opponent.

    A row's ``opponents`` is {name: games}.
    """
    steps, mixes = [], []
    for row in run.rows:
        counts = row.get("opponents")
        if isinstance(counts, dict) and counts and all(_finite(n) and n > 0 for n in counts.values()):
            steps.append(row["step"])
            mixes.append({name: n / sum(counts.values()) for name, n in counts.items()})
    names = dict.fromkeys(name for mix in mixes for name in mix)
    if len(names) < 2:
        return [], {}
    return steps, {n: rolling([mix.get(n, 0.0) for mix in mixes], run.window)[0].tolist() for n in names}


def draw_curves(run_dir: Path | str) -> Path:
    """Draw ``curves.png`` of one run into its directory and return its path.

    Raises:
        RunError: the directory holds no readable run.
    """
    run_dir = Path(run_dir)
    return _draw([load_run(run_dir)], run_dir / "curves.png")


def _draw(runs: Sequence[Run], path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [(panel, series) for panel in PANELS if (series := panel_series(panel, runs))]
    mixes = [(run, *opponent_shares(run)) for run in runs if opponent_shares(run)[1]]
    columns = 3
    rows = math.ceil((len(drawn) + len(mixes)) / columns)
    figure = Figure(figsize=(16, 3.1 * max(rows, 1)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(" · ".join(run.name for run in runs), fontsize=13)
    axes = list(figure.subplots(max(rows, 1), columns, squeeze=False).flat)
    for axis, (panel, series) in zip(axes, drawn, strict=False):
        _draw_panel(axis, panel, series, runs)
    for axis, (run, steps, shares) in zip(axes[len(drawn) :], mixes, strict=False):
        axis.stackplot(steps, *shares.values(), labels=list(shares), colors=PALETTE, alpha=0.8)
        axis.set_ylim(0, 1)
        _finish(axis, "Opponents" + (f", {run.name}" if len(runs) > 1 else ""), "share of games", len(shares))
    for axis in axes[len(drawn) + len(mixes) :]:
        axis.set_axis_off()
    figure.savefig(path)
    return path


def style(series: Sequence[Series], one: Series, runs: int) -> tuple[int, int]:
    """(colour, dash) of a line: colours tell keys apart, or runs where there is one key; dashes the other."""
    keys = list(dict.fromkeys(s.key for s in series))
    if len(keys) == 1:
        return one.run, 0
    index = keys.index(one.key)
    return index, one.run if runs > 1 else index // len(PALETTE)


def _label(series: Sequence[Series], one: Series, runs: Sequence[Run]) -> str:
    key = one.key.split("/", 1)[-1]
    if len(runs) == 1:
        return key
    return runs[one.run].name if len({s.key for s in series}) == 1 else f"{key}, {runs[one.run].name}"


def _draw_panel(axis: Any, panel: Panel, series: Sequence[Series], runs: Sequence[Run]) -> None:
    for one in series:
        colour, dash = style(series, one, len(runs))
        look: dict[str, Any] = {"color": PALETTE[colour % len(PALETTE)], "linestyle": DASHES[dash % len(DASHES)]}
        label = _label(series, one, runs)
        if one.mean:
            if len(series) <= 3:
                axis.plot(one.x, one.y, color=look["color"], alpha=0.25, linewidth=0.8)
            if len(series) <= 8:
                axis.fill_between(one.x, one.low, one.high, color=look["color"], alpha=0.15, linewidth=0)
        axis.plot(one.x, one.mean or one.y, label=label, marker="o" if panel.marks else "", markersize=4, **look)
    for run in runs:
        for step, text in run.stages:
            axis.axvline(step, color="#777777", linewidth=0.8, linestyle=":")
            if panel.title == "Score":
                name = text.partition(":")[0]
                axis.annotate(name, (step, 1), xycoords=("data", "axes fraction"), rotation=90, fontsize=7, va="top")
    if panel.limits:
        axis.set_ylim(panel.limits[0] - 0.02, panel.limits[1] + 0.02)
    _finish(axis, panel.title, panel.unit, len(series))


def _finish(axis: Any, title: str, unit: str, lines: int) -> None:
    axis.set_title(f"{title}  ({unit})" if unit else title, fontsize=10, loc="left")
    axis.set_xlabel("step", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if lines > 6:
        axis.legend(fontsize=6, ncols=1 + (lines > 14), frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    elif lines > 1:
        axis.legend(fontsize=7, framealpha=0.6)


def _thin(values: list[float], stride: int) -> list[float]:
    return [float(f"{value:.5g}") for value in values[::stride]]


def _page_panels(runs: Sequence[Run]) -> list[dict[str, Any]]:
    panels = []
    for panel in PANELS:
        series = panel_series(panel, runs)
        lines = []
        for one in series:
            stride = math.ceil(len(one.x) / MAX_POINTS)
            thin = {name: _thin(getattr(one, name), stride) for name in ("x", "y", "mean", "low", "high")}
            colour, dash = style(series, one, len(runs))
            lines.append({**thin, "label": _label(series, one, runs), "colour": colour, "dash": dash})
        if lines:
            panels.append({**asdict(panel), "lines": lines})
    for run in runs:
        steps, shares = opponent_shares(run)
        stride = math.ceil(len(steps) / MAX_POINTS) or 1
        if shares:
            title = "Opponents" + (f", {run.name}" if len(runs) > 1 else "")
            stack = [{"label": name, "y": _thin(y, stride)} for name, y in shares.items()]
            panels.append({"title": title, "unit": "share of games", "stack": stack, "x": _thin(steps, stride)})
    return panels


def write_report(runs: Sequence[Run], path: Path) -> Path:
    """Write the page: assets and data in one file that asks for nothing else."""
    from scripts.report.replay import replayable

    data = {
        "panels": _page_panels(runs),
        "runs": [
            {
                "name": run.name,
                "steps": run.rows[-1]["step"],
                "window": run.window,
                "stages": run.stages,
                "config": run.config,
                "summary": run.summary,
                "last": run.rows[-1],
                "episodes": [replayable(episode) for episode in run.episodes],
            }
            for run in runs
        ],
    }
    page = (ASSETS / "page.html").read_text(encoding="utf-8")
    for name in ("style.css", "charts.js", "boards.js", "page.js"):
        page = page.replace(f"/*{name}*/", (ASSETS / name).read_text(encoding="utf-8"))
    text = json.dumps(_plain(data), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    path.write_text(page.replace("/*data*/", text), encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    """Replace what JSON cannot carry (NaN, infinities) by null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(argv: Sequence[str] | None = None) -> int:
    """Write curves.png and report.html; 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(description="Draw the curves and write the report of one or several runs.")
    parser.add_argument("--checkpoint_dir", nargs="+", type=Path, required=True, metavar="RUN", help="run directories")
    parser.add_argument("--output", type=Path, help="where to write (default: the first run directory)")
    args = parser.parse_args(argv)
    output = args.output or args.checkpoint_dir[0]
    try:
        runs = [load_run(directory) for directory in args.checkpoint_dir]
        output.mkdir(parents=True, exist_ok=True)
        print(_draw(runs, output / "curves.png"))
        print(write_report(runs, output / "report.html"))
    except (ValueError, OSError) as error:
        print(f"visualize: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
