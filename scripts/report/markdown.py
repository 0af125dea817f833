"""``report.md``: a run's results on a page for pasting into issues and the like."""

import json
from collections.abc import Sequence
from typing import Any

from config.flags import one_line
from config.reader import config_dict, config_diff, load_config
from envs.client import is_number

HEADS = {"before": "before", "after": "after", "interval": "95 %", "adjusted": "less luck",
         "adjusted_interval": "95 % of that", "exact_after": "exact", "ceiling": "ceiling",
         "share": "share", "share_interval": "95 % of share", "nash_conv_before": "NashConv before",
         "nash_conv": "NashConv", "free_play_before": "free play before", "free_play": "free play",
         "failed": "failed"}  # fmt: skip
PROGRAMS = "Values are 2 * score - 1, in [-1, 1], of programs predicted."
BOARDS = ("Values are 2 * score - 1 against uniform random, in [-1, 1]; share is where the exact value, or with an "
          "interval that of sampled play (less luck where that is known), lies between random play (0) and the best "
          "response (1).")  # fmt: skip
HARMLESS = str.maketrans({"|": "/", "<": "&lt;", "[": "&#91;", "@": "&#64;"})


def plain(value: Any) -> str:
    """Any text, whoever wrote it, as one cell of a table: no links, pictures or other markup of its own."""
    return one_line(value).translate(HARMLESS).replace("://", "&#58;//").replace("www.", "www&#46;")


def table(rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = [f"| {' | '.join(plain(cell) for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def results(games: dict[str, dict[str, Any]]) -> str:
    """The table of the evaluation, without columns that are unknown for every game."""
    games = {name: {**g, "failed": g.get("failed") or None} for name, g in games.items()}
    for game in (game for game in games.values() if game.get("exact_after") is not None):  # which says more
        game |= dict.fromkeys(("adjusted", "adjusted_interval"))
    keys = [key for key in HEADS if any(g.get(key) is not None for g in games.values())]
    rows = [[name, *(_cell(g, key) for key in keys)] for name, g in games.items()]
    return table([["game", *(HEADS[key] for key in keys)], *rows])


def _cell(game: dict[str, Any], key: str) -> str:
    value = game.get(key)
    if key == "failed":
        return f"{value}" if is_number(value) else "-"
    if isinstance(value, dict):  # free play
        rate: Any = value.get("legal_rate")
        legal = f"{100 if rate == 1 else min(100 * rate, 99.9):.3g}% legal" if is_number(rate) else "no answers"
        return f"{_number(value.get('value'))}, {legal}"
    return _number(value)


def _number(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join("-" if isinstance(x, list) else _number(x) for x in value)
    return f"{value:+.3f}" if is_number(value) else "-"


def page(name: str, about: Sequence[tuple[str, str]], versions: Any, summary: dict[str, Any], config: Any) -> str:
    """The page of one run."""
    from training.config import DEFAULT_FILES, SECTIONS

    parts = [f"# {plain(name)}", table([["", ""], *about])]
    if summary.get("games"):
        parts += ["## Evaluation", results(summary["games"])]
        parts.append(PROGRAMS if config.get("env", {}).get("env_type") == "trace" else BOARDS)
        share, games = summary.get("mean_share_of_ceiling"), summary["games"].values()
        some = f"{sum(is_number(game.get('share')) for game in games)} of {len(games)} games"
        ends = summary.get("mean_share_interval")
        within = f", 95 % interval {_number(ends)}" if ends else ""
        parts += [f"Mean share of the ceiling, {some}: {share:.3f}{within}"] if is_number(share) else []
    if "outdated" in summary:
        parts.append(f"It has gone on since it was evaluated at step {plain(summary['outdated'])}.")
    parts += ["## Curves", "![curves](curves.png)"]
    if config:
        changed = config_diff(config_dict(load_config(SECTIONS, DEFAULT_FILES)), config)
        told = [line for line in changed if not line.startswith(("run.output_dir", "run.seed"))]
        stages = f"curriculum.stages: {json.dumps(config.get('curriculum', {}).get('stages'))}"
        told = [stages if line.startswith("curriculum.stages") and line.endswith("...") else line for line in told]
        lines = [f"* `{one_line(line).replace('`', '')}`" for line in told]
        parts += ["## Settings that differ from the defaults", "\n".join(lines) or "None."]
    if isinstance(versions, dict):
        parts += ["## Versions", ", ".join(f"{plain(k)} {plain(v)}" for k, v in versions.items())]
    return "\n\n".join(parts) + "\n"
