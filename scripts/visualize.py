"""Curves and a self-contained report of one or several runs.

    python scripts/visualize.py --run runs/tiny-seed0
    python scripts/visualize.py --run runs/tiny-seed0 runs/other --output compared     several runs, side by side
    python scripts/visualize.py --run runs/tiny-seed0 --watch                          a page that follows the run

Reads the run directories that training writes (metrics.jsonl; summary.json, run_config.json, about.json and
episodes.jsonl where they exist) and writes ``curves.png``, ``report.html``, which opens from disk without a network,
and ``report.md``, for pasting.
"""

import argparse
import fcntl
import io
import json
import logging
import math
import os
import sys
import time
import warnings
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import config.start  # noqa: F401, before libraries load

from config.flags import FlagParser
from config.reader import MOST_LEVELS, blaming, deeper_than, make
from envs.client import is_number
from envs.config import EnvConfig
from scripts.report import markdown
from training.console import duration
from training.metrics import MOST_BYTES, finite
from training.process import ProgramError, at_least, must_be_writable, rest_collector, run_program
from utils import ConfigError, read_file, read_json, write_file

log = logging.getLogger(__name__)
ASSETS = Path(__file__).resolve().parent / "report"
MAX_POINTS = 1500  # of a line
MAX_EPISODES = 200  # of a run on the page: the latest
MAX_LINES = 100  # of a panel and run; so many stage changes too
MAX_NAME = 40  # characters of the name of a line or stage: charts with longer ones take minutes
LONGEST = 1e9  # seconds of a run that are shown
# Okabe and Ito's colour-blind-safe palette (Okabe & Ito 2008, "Color Universal Design"), best on white first.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":", "-.", (0, (9, 2)), (0, (5, 2, 1, 2, 1, 2)), (0, (1, 5)), (0, (9, 2, 4, 2)))


@dataclass(frozen=True)
class Panel:
    """A chart: metric keys (one that ends in "/" is a prefix) and how to draw them."""

    title: str
    keys: tuple[str, ...]
    unit: str = ""
    smooth: bool = False  # rolling mean with a 95 % band over the faint raw line
    marks: bool = False  # points are few: draw each
    limits: tuple[float, float] | None = None
    first: bool = False  # always visible on the page; the others are folded away


PANELS = (
    Panel("Score by game", ("score/",), "rolling mean, 0 to 1", smooth=True, first=True),
    Panel("Success", ("window_success", "gate_success", "success_rate"), "share of games", smooth=True, limits=(0, 1),
          first=True),
    Panel("Evaluation", ("eval/",), "exact share of the ceiling, else mean value", marks=True, first=True),
    Panel("Entropy", ("entropy", "mutual_information"), "nats a decision", first=True),
    Panel("KL", ("kl_ref", "kl_average", "update_kl"), "nats a decision", first=True),
    Panel("Explained variance", ("explained_variance",), "of the returns, by the critic", first=True),
    Panel("Score", ("score_mean",), "mean score of a step, 0 to 1", smooth=True),
    Panel("Opponents", ("opponent/",), "share of games, rolling mean", smooth=True, limits=(0, 1)),
    Panel("KL coefficient", ("kl_coef",)),
    Panel("Clip fraction", ("clip_fraction",), "share of decisions"),
    Panel("Largest change of a probability", ("ratio_max",), "|new / old - 1|"),
    Panel("Losses", ("policy_loss", "value_loss", "misfit")),
    Panel("Minibatches skipped", ("skipped",), "not finite, per step"),
    Panel("Gradient norm", ("grad_norm",)),
    Panel("Legal mass", ("legal_mass",), "unrestricted probability of legal answers"),
    Panel("Drift on the base's own text", ("rehearsal_kl",), "nats a token"),
    Panel("Reading the position", ("state_loss",), "nats a decision"),
    Panel("Learning rate", ("learning_rate",)),
    Panel("Throughput", ("games_per_s", "decisions_per_s"), "per second"),
    Panel("Time of a step", ("time_rollout", "time_update", "time_total"), "seconds"),
    Panel("Memory", ("memory_mb",), "MB"),
    Panel("Failure buffer", ("buffer_size",), "entries"),
    Panel("Games cut short and answers retried", ("truncated", "forfeited", "failed", "retries"), "per step"),
)  # fmt: skip


@dataclass
class RunData:
    """What a run directory holds; optional files that are missing are empty here."""

    name: str
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any]
    episodes: list[dict[str, Any]]
    about: dict[str, Any]

    @cached_property
    def keys(self) -> list[str]:
        """What some of the rows hold; found once, since every panel asks and there may be 100,000 rows."""
        return list(dict.fromkeys(chain.from_iterable(self.rows)))

    @property
    def stages(self) -> list[tuple[float, str]]:
        """(step, text) of the latest stage changes: the stage entered, and why."""
        changes = [row for row in self.rows if row.get("stage_change")][-MAX_LINES:]
        keys = (("stage_change", MAX_NAME), ("stage_reason", 5 * MAX_NAME))
        return [(r["step"], ": ".join(cut(str(r[key]), most) for key, most in keys if r.get(key))) for r in changes]

    @property
    def window(self) -> int:
        """Steps of the rolling mean: a twentieth of the run, from 5 to 50."""
        return max(5, min(50, len(self.rows) // 20))


def cut(name: str, most: int) -> str:
    """The name, of which no more than ``most`` characters are left, from both ends: names may begin alike."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[len(name) + 1 + most // 2 - most :]}"


def load_run(directory: Path) -> RunData:
    """Read a run directory; ConfigError: it has no metrics.jsonl, or one of its files is damaged."""
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{path}: not found; a run directory has a metrics.jsonl, written by training")
    rows = _read_lines(path)
    if not rows or not all(is_number(row.get("step")) for row in rows):
        raise ConfigError(f"{path}: expected at least one step, and a number for each")
    _opponent_shares(rows)
    episodes = _read_lines(directory / "episodes.jsonl")[-MAX_EPISODES:]
    files = [directory / name for name in ("run_config.json", "summary.json", "about.json")]
    config, summary, about = (read_json(file) if file.is_file() else {} for file in files)
    for file, content in zip(files, (config, summary, about), strict=True):
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: not a JSON object")
    config = {name: part for name, part in config.items() if isinstance(part, dict)}
    if path := config.get("env", {}).get("games_path"):  # registers its custom games, for the replay
        try:
            make(EnvConfig, {"games_path": path}, f"{files[0]}: env")
        except ConfigError as error:
            _warn_once(str(error))
    if is_number(summary.get("steps")) and summary["steps"] < rows[-1]["step"]:  # written before the run was resumed
        summary = {"outdated": summary["steps"]}
    games, english = summary.get("games", {}), summary.get("english") or {}
    if not isinstance(games, dict) or not all(isinstance(game, dict) for game in games.values()):
        raise ConfigError(f"{files[1]}: games must be an object of one object a game")
    answers = english.get("answers", []) if isinstance(english, dict) else None
    if not isinstance(answers, list) or not all(isinstance(answer, list) for answer in answers):
        raise ConfigError(f"{files[1]}: english must be an object, its answers a list of lists")
    return RunData(directory.resolve().name, rows, config, summary, episodes, about)


def load_runs(directories: Sequence[Path]) -> list[RunData]:
    """``load_run`` of each, named by as many folders at the end of its path as tell all runs apart."""
    parts = [directory.resolve().parts for directory in directories]
    candidates = [["/".join(path[-n:]) for path in parts] for n in range(1, max(map(len, parts)) + 1)]
    names = next((names for names in candidates if len({*names}) == len({*parts})), candidates[-1])
    return [replace(load_run(directory), name=name) for directory, name in zip(directories, names, strict=True)]


@cache
def _warn_once(text: str) -> None:
    """Log a warning that a page which is written every few seconds would repeat."""
    log.warning("%s", text)


def _opponent_shares(rows: list[dict[str, Any]]) -> None:
    """Add ``opponent/NAME``, the share of a step's games, to each row, where a run has several opponents."""
    mixes, games = [Counter[str]() for _ in rows], Counter[str]()
    for row, mix in zip(rows, mixes, strict=True):
        counts = row.get("opponents")
        for name, n in counts.items() if isinstance(counts, dict) else ():
            if is_number(n) and n > 0:
                mix["past" if name.startswith("past:") else name] += n  # there may be a hundred past selves
    for mix in mixes:
        games.update(mix)
    names = [name for name, _ in games.most_common(MAX_LINES)]
    for row, mix in zip(rows, mixes, strict=True):
        if mix and len(names) > 1:
            row |= {f"opponent/{name}": mix.get(name, 0) / sum(mix.values()) for name in names}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Parse JSON lines; [] where there is no file. A last line without a newline is still being written: skipped."""
    rows: list[dict[str, Any]] = []
    try:
        for line in read_file(path, MOST_BYTES).decode().split("\n")[:-1] if os.path.lexists(path) else ():
            rows.append(json.loads(line))
            if not isinstance(rows[-1], dict):
                raise ValueError("not a JSON object")
            if deeper_than(rows[-1], MOST_LEVELS):
                raise ValueError("nested too deeply")
    except (ValueError, RecursionError) as error:  # not text, not JSON, or nested too deeply
        raise ConfigError(f"{path}: cannot be read after line {len(rows)}: {error}") from error
    return rows


def rolling(y: Sequence[float], window: int) -> list[list[float]]:
    """Mean, low and high: the trailing mean of ``window`` values and its 95 % band, by Student's t of at least 5."""
    import pandas
    from scipy.special import stdtrit

    whole = pandas.Series(y, dtype=float)
    part = whole.rolling(window, min_periods=1)
    mean, error = part.mean(), (stdtrit(part.count() - 1, 0.975) * part.sem()).where(part.count() >= 5, 0.0)
    return [series.where(whole.notna()).tolist() for series in (mean, mean - error, mean + error)]


def heading(run: RunData) -> list[tuple[str, str]]:
    """(head, text) of each known fact about the run: what was trained, on what, for how long."""
    about, row = run.about, run.rows[-1]
    mix, each = row.get("opponents"), about.get("games_per_step", row.get("games"))
    seconds = min(sum(r["time_total"] for r in run.rows if is_number(r.get("time_total"))), LONGEST)
    listed = (r["alarms"] for r in run.rows if isinstance(r.get("alarms"), list))
    alarms = Counter(name for name in chain(*listed) if isinstance(name, str))
    facts = {
        "model": about.get("model") or run.config.get("model", {}).get("model_name"),
        "games": _listed(about.get("games")) or _listed([k[6:] for k in row if k.startswith("score/")]),
        "against": _listed(about["opponents"] if "opponents" in about else [*mix] if isinstance(mix, dict) else ()),
        "steps": f"{row['step']:,}" + (f", of {each:,} games each" if is_number(each) else ""),
        "seed": about.get("seed"),
        "started": f"{str(about['started']).replace('T', ' ')[:16]} UTC" if about.get("started") else None,
        "commit": about.get("commit"), "hardware": about.get("hardware"),
        "time": f"{duration(seconds)} in steps" if seconds else None,
        "alarms": ", ".join(f"{cut(name, MAX_NAME)}: {n}" for name, n in alarms.most_common(MAX_LINES)),
    }  # fmt: skip
    if is_number(about.get("seconds")) and about["seconds"] >= max(seconds, 1e-9):  # less: it was killed and resumed
        facts["time"] = f"{duration(min(about['seconds'], LONGEST))} in all, {duration(seconds)} in steps"
    return [(head, " ".join(str(fact).split())) for head, fact in facts.items() if fact not in (None, "")]


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list) else ""


def panels(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """The panels that have lines to draw, for the PNG and for the page."""
    return [{**asdict(panel), "lines": lines} for panel in PANELS if (lines := panel_lines(panel, runs))]


def panel_lines(panel: Panel, runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """A line for each run and key that has finite numbers; most keys get none where these are always 0.

    ``y`` is raw, NaN where a step has no number; ``mean``, ``low`` and ``high`` (empty unless smoothed) belong to the
    same ``x``. Colours tell keys apart and dashes runs; where there is one key, colours tell runs apart.
    """
    found: list[tuple[int, str, dict[str, Any], bool]] = []
    for index, run in enumerate(runs):
        prefixes = tuple(key for key in panel.keys if key.endswith("/"))
        keys = [key for key in run.keys if key in panel.keys or (prefixes and key.startswith(prefixes))]
        for key in (sorted(keys) if prefixes else sorted(keys, key=panel.keys.index))[:MAX_LINES]:
            points = [(row["step"], row[key]) for row in run.rows if key in row]
            x, y = [at for at, _ in points], [value if is_number(value) else math.nan for _, value in points]
            if all(map(math.isnan, y)):
                continue
            smooth = panel.smooth and key not in ("window_success", "gate_success")
            bands = rolling(y, run.window) if smooth else [[]] * 3
            kept = _thin(y, single=not smooth)
            drawn = ([float(f"{values[i]:.5g}") for i in kept] if values else [] for values in (y, *bands))
            line: dict[str, Any] = {"x": [x[i] for i in kept]}
            line |= zip(("y", "mean", "low", "high"), drawn, strict=True)
            # A game that is never won is worth a line.
            shows = any(value and not math.isnan(value) for value in y) or key.startswith(("score", "eval/"))
            found.append((index, key, line, shows))
    # A success rate that is always 0 says something beside others, a penalty that is switched off does not.
    if panel.limits is None or not any(shows for *_, shows in found):
        found = [part for part in found if part[-1]]
    keys = list(dict.fromkeys(key for _, key, *_ in found))
    grades = [_grade(runs[index], key) for index, key, *_ in found]
    for (index, key, line, _), grade in zip(found, grades, strict=True):
        name, run_name, place = cut(key.split("/", 1)[-1], MAX_NAME), runs[index].name, keys.index(key)
        name += grade if len({*grades}) > 1 else ""
        dash = index * math.ceil(len(keys) / len(PALETTE)) + place // len(PALETTE)
        line |= {"colour": index, "dash": 0} if len(keys) == 1 else {"colour": place, "dash": dash}
        whose = f"{name}, {run_name}" if several_keys(panel.keys) else run_name
        line["label"] = whose if len(runs) > 1 else name
    return [line for _, _, line, _ in found]


def several_keys(keys: Sequence[str]) -> bool:
    """Whether a panel's title does not tell which metric a line is of, though it may be the only one there."""
    return len(keys) > 1 or keys[0].endswith("/")


def _grade(run: RunData, key: str) -> str:
    """What a line of evaluations is of, where the run's summary tells."""
    game = run.summary.get("games", {}).get(key.removeprefix("eval/")) if key.startswith("eval/") else None
    if game is None:
        return ""
    return " (share)" if game.get("exact") and is_number(game.get("share")) else " (value)"


def draw_curves(runs: Sequence[RunData], path: Path) -> Path:
    """Draw the panels of the runs into a PNG file; return its path."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["axes.formatter.useoffset"] = False  # label 956 MB as 956, not as 0 above "+9.56e2"
    rcParams["text.parse_math"] = False  # dollars in a run's name do not enclose a formula
    most = 25 if len(runs) > 1 else 81  # characters of a long name that are kept: all leave the panels no room
    runs = [replace(run, name=cut(run.name, most)) for run in runs]
    drawn, columns = panels(runs), 3
    rows = max(1, math.ceil(len(drawn) / columns))
    figure = Figure(figsize=(16, 3.1 * rows), dpi=100, layout="constrained")
    figure.suptitle(" · ".join(run.name for run in runs), fontsize=13)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, panel in zip(axes, drawn, strict=False):
        _draw_panel(axis, panel, runs)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    drawing = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph ")  # a name may be in any script; its boxes say enough
        figure.savefig(drawing, format="png")
    write_file(path, drawing.getvalue())  # replaces a link, and leaves its target as it is
    return path


def _draw_panel(axis: Any, panel: dict[str, Any], runs: Sequence[RunData]) -> None:
    lines, title, unit = panel["lines"], panel["title"], panel["unit"]
    for line in lines:
        x, colour = line["x"], PALETTE[line["colour"] % len(PALETTE)]
        if line["mean"]:
            if len(lines) <= 3:
                axis.plot(x, line["y"], color=colour, alpha=0.25, linewidth=0.8)
            if len(lines) <= 8:
                axis.fill_between(x, line["low"], line["high"], color=colour, alpha=0.15, linewidth=0)
        axis.plot(x, line["mean"] or line["y"], label=line["label"], color=colour, markersize=4,
                  marker="o" if panel["marks"] or len(x) == 1 else "",
                  linestyle=DASHES[line["dash"] % len(DASHES)])  # fmt: skip
    named, room = -math.inf, max(line["x"][-1] for line in lines) / 30
    for step, text in sorted(stage for run in runs for stage in run.stages):
        axis.axvline(step, color="#777777", linewidth=0.8, linestyle=":")
        if title == "Score" and step - named >= room:  # nearer names would lie on each other; the page has all
            named = step
            axis.text(step, 1, text.split(":")[0], transform=axis.get_xaxis_transform(), rotation=90, size=7, va="top")
    if limits := panel["limits"]:
        axis.set_ylim(limits[0] - 0.02, limits[1] + 0.02)
    axis.set_title(f"{title}  ({unit})" if unit else title, fontsize=10, loc="left")
    axis.set_xlabel("step", fontsize=8)
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)  # a lone step has none beside it
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if len(lines) > 4:  # within, they would hide what they name
        axis.legend(fontsize=6, ncols=1 + (len(lines) > 14), frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    elif len(runs) > 1 or several_keys(panel["keys"]):  # of several runs one may lack what the panel shows
        axis.legend(fontsize=7, framealpha=0.6)


def _thin(y: Sequence[float], single: bool) -> list[int]:
    """Indices of the points of a long line to draw: evenly spaced, and always the last, which is the present state.

    ``single``: where single values matter, the least and the greatest of each two strides instead, and a gap.
    """
    last, stride = len(y) - 1, math.ceil(len(y) / MAX_POINTS) or 1
    if not single or stride == 1:
        return [*range(last % stride, last + 1, stride)]
    kept = {last}
    for start in range(0, last + 1, 2 * stride):
        part = range(start, min(start + 2 * stride, last + 1))
        known = [i for i in part if not math.isnan(y[i])]
        kept |= {find(known, key=y.__getitem__) for find in (min, max) if known}
        kept.update([i for i in part if math.isnan(y[i])][:1])
    return sorted(kept)


def write_report(runs: Sequence[RunData], path: Path, again: float = 0) -> Path:
    """Write the page: one file with assets and data. It loads nothing, except itself every ``again`` seconds."""
    from scripts.report.replay import replayable

    shown = [[replayable(episode) for episode in run.episodes] for run in runs]
    for run, episodes in zip(runs, shown, strict=True):
        if lost := [f"step {row.get('step')}, {row.get('game')}: {row['lost']}" for row in episodes if "lost" in row]:
            _warn_once(f"{run.name}: {len(lost)} of {len(episodes)} games are shown turn by turn: {lost[0]}")
    data = {
        "panels": panels(runs),
        "seen": time.strftime("%H:%M:%S") if again else "",
        "runs": [
            {
                "name": run.name,
                "steps": run.rows[-1]["step"],
                "total": run.about.get("steps"),
                "window": run.window,
                "stages": run.stages,
                "config": run.config,
                "heading": heading(run),
                "summary": run.summary,
                "games": [*run.summary.get("games", {})],  # in a script, the name 2048 would come first
                "last": run.rows[-1],
                "episodes": episodes,
            }
            for run, episodes in zip(runs, shown, strict=True)
        ],
    }
    page = (ASSETS / "page.html").read_text(encoding="utf-8")
    for name in ("style.css", "charts.js", "boards.js", "page.js"):
        page = page.replace(f"/*{name}*/", (ASSETS / name).read_text(encoding="utf-8"))
    script = page.partition("<script>")[2].partition("</script>")[0].encode()
    digest = b64encode(sha256(script).digest()).decode()
    page = page.replace("/*script hash*/", f"sha256-{digest}")  # of the only script that browsers may run here
    text = json.dumps(finite(data), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    page = page.replace("<!--again-->", f'<meta http-equiv="refresh" content="{again:g}">' if again else "")
    write_file(path, page.replace("/*data*/", text).encode(errors="replace"))
    return path


MARK = b"<title>Run report</title>"  # in every page that this program writes
BEGUN = "metrics.jsonl", ".lock"  # the folder of a run that has begun has at least one of these


def follow(directories: Sequence[Path], output: Path, seconds: float) -> None:
    """Rewrite the page every so many seconds until all runs have ended."""
    printed = False
    while not all(_ended(directory) for directory in directories):
        metrics = [directory / "metrics.jsonl" for directory in directories]
        if all(file.is_file() and file.stat().st_size for file in metrics):  # empty until the first step is done
            output.mkdir(parents=True, exist_ok=True)
            page = write_report(load_runs(directories), output / "report.html", seconds)
            if not printed:
                print(page, flush=True)
            printed = True
        elif missing := next((d for d in directories if not any((d / f).exists() for f in BEGUN)), None):
            raise ConfigError(f"{missing}: there is no such run")
        time.sleep(seconds)


def _ended(directory: Path) -> bool:
    """Whether no process holds the run's lock; without one, whether its summary is newer than its last step."""
    try:
        with open(directory / ".lock", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a copy without hidden files, which may be growing; a disk without locks
        files = [directory / name for name in ("metrics.jsonl", "summary.json")]
        return all(file.is_file() for file in files) and files[0].stat().st_mtime <= files[1].stat().st_mtime
    return True


def _must_be_own(output: Path, runs: Sequence[Path]) -> None:
    """Raise ConfigError for the folder of a run that is not drawn, and for files that this program did not write."""
    page, own = output / "report.html", output.resolve() in [run.resolve() for run in runs]
    if not own and any((output / begun).exists() for begun in BEGUN):
        raise ConfigError(f"--output {output}: is the folder of another run; name another")
    if own or (page.is_file() and MARK in page.read_bytes()):
        return
    if there := [name for name in ("curves.png", "report.html", "report.md") if (output / name).exists()]:
        raise ConfigError(f"--output {output}: {there[0]} is there, and no report.html of this program; name another")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the three files; exit codes: 0 done, 1 curves.png could not be drawn, 2 bad input, 130 interrupted."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--run", nargs="+", type=Path, required=True, metavar="RUN", help="run directories")
    add("--output", "--output-dir", type=Path, metavar="DIR", help="where to write (default: the first run directory)")
    add("--watch", nargs="?", type=at_least(1, 86_400), const=10, metavar="SECONDS",
        help="write a page that reloads itself (every 10 seconds) until the runs have ended")  # fmt: skip
    args = parser.parse_args(argv)
    output = args.output or args.run[0]

    def run() -> None:
        _must_be_own(output, args.run)
        rest_collector()  # which else walks all rows of a long run again and again
        try:
            if args.watch:
                follow(args.run, output, args.watch)
        except KeyboardInterrupt:  # nobody follows it any more: the page must not say so for ever
            if (output / "report.html").is_file():
                write_report(load_runs(args.run), output / "report.html")
            raise
        runs = load_runs(args.run)
        must_be_writable(output)
        print(write_report(runs, output / "report.html"))
        pages = [markdown.page(r.name, heading(r), r.about.get("versions"), r.summary, r.config) for r in runs]
        write_file(output / "report.md", "\n".join(pages).encode(errors="replace"))
        print(output / "report.md")
        with blaming("no curves.png: ", (ImportError, ArithmeticError, TypeError, ValueError), ProgramError):
            print(draw_curves(runs, output / "curves.png"))

    return run_program(run)


if __name__ == "__main__":
    sys.exit(main())
