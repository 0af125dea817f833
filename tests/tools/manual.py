"""The page about every knob, made from the dataclasses: default, range, the comment beside the field, and evidence.

python tests/tools/manual.py > docs/configuration.md
"""

import ast
import dataclasses
import inspect
import io
import json
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config.reader import config_dict, config_diff, describe_field, load_config, read_json  # noqa: E402
from curriculum import Stage  # noqa: E402
from envs.config import TraceConfig  # noqa: E402
from training.config import DEFAULT_FILES, SECTIONS  # noqa: E402

TABLES = SECTIONS | {"curriculum.stages": Stage, "env.trace": TraceConfig}  # everything that can be set
EVIDENCE = ("results.md", "log.md", "scaling.md", "trace.md", "guide.md")
HEAD = """# Configuration

Made by `python tests/tools/manual.py > docs/configuration.md`; a test holds it equal to the code. The defaults of a run
are in `config/train_config.json`, `env_config.json` and `curriculum_config.json`, which agree with these but for the
stages, `env.games_at_once` (8) and `curriculum.replay_seed` (fresh). "Moved by" are the presets that give the knob
another value than a run's default (of a stage, those that name it), "told in" the pages that say what came of it. What
is no knob any more, and why: [log.md](log.md), 2026-11-22.
"""


def manual(sections: Mapping[str, type]) -> str:
    """The page: a table for each section."""
    presets = {path.stem: _moved(path) for path in sorted((ROOT / "config" / "presets").glob("*.json"))}
    pages = {page: (ROOT / "docs" / page).read_text() for page in EVIDENCE}
    parts = [HEAD]
    for path, cls in sections.items():
        rows = ["| knob | default | range | what it does | moved by | told in |", "|---|---|---|---|---|---|"]
        comments, hints = _comments(cls), typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            moved = [name for name, knobs in presets.items() if f"{path}.{field.name}" in knobs]
            told = [f"[{page}]({page})" for page, text in pages.items() if _names(text, path, field.name)]
            cells = (f"`{field.name}`", _default(field), describe_field(hints[field.name], field.metadata),
                     comments[field.name], ", ".join(moved), ", ".join(told))  # fmt: skip
            rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        first = (inspect.getdoc(cls) or "").partition("\n")[0]
        parts.append(f"## `{path}`\n\n{first}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _moved(preset: Path) -> set[str]:
    """The knobs that a preset moves, and those that its stages name."""
    before, after = (config_dict(load_config(SECTIONS, [*DEFAULT_FILES, *more])) for more in ([], [preset]))
    named = {key for stage in read_json(preset).get("curriculum", {}).get("stages", []) for key in stage}
    return {line.partition(":")[0] for line in config_diff(before, after)} | {f"curriculum.stages.{k}" for k in named}


def _names(text: str, path: str, name: str) -> bool:
    return bool(re.search(rf"\b{re.escape(path)}\.{name}\b|`{name}[`:= ]", text))


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{json.dumps(field.default)}`"
    made = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    return "required" if made is None else f"`{json.dumps(made)}`"


def _comments(cls: type) -> dict[str, str]:
    """Field -> the comment on its lines."""
    source = textwrap.dedent(inspect.getsource(cls))
    spoken = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    [tree] = ast.parse(source).body
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found[node.target.id] = " ".join(t.string.lstrip("# ") for t in spoken if t.start[0] in lines)
    return found


if __name__ == "__main__":
    print(manual(TABLES), end="")
