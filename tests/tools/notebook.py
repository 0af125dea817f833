"""Make examples/minimal_ppo.ipynb of examples/minimal_ppo.py, and run it.

    python tests/tools/notebook.py        # half a minute; writes the notebook with what it printed and drew

The script is in jupytext's percent format: `# %% [markdown]` begins a cell of text, `# %%` one of code, and
`# %% active="ipynb"` one of code that is a comment in the script. The docstring is the first text.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import v4

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, NOTEBOOK = ROOT / "examples/minimal_ppo.py", ROOT / "examples/minimal_ppo.ipynb"
NOISE = ("stream", "stderr")  # what libraries tell each other


def cells(source: str) -> list[tuple[str, str]]:
    """(kind, text) of each cell of a script: "markdown" or "code"."""
    doc = ast.get_docstring(ast.parse(source), clean=False) or ""
    found = [("markdown", f"# {doc.strip()}")]
    first, *parts = re.split(r"^# %%(.*)\n", source.partition(f'"""{doc}"""')[2], flags=re.MULTILINE)
    for mark, text in zip(["", *parts[::2]], [first, *parts[1::2]], strict=True):
        commented = mark.strip() in ("[markdown]", 'active="ipynb"')
        text = re.sub(r"^# ?", "", text, flags=re.MULTILINE) if commented else text
        found.append(("markdown" if "markdown" in mark else "code", text.strip()))
    return found


def notebook(source: str) -> Any:
    """The notebook of a script, not yet run."""
    made = v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    for number, (kind, text) in enumerate(cells(source)):
        cell = (v4.new_markdown_cell if kind == "markdown" else v4.new_code_cell)(text)
        cell["id"] = f"cell-{number}"  # a random one by default: the file would differ each time
        made.cells.append(cell)
    return made


def run(made: Any) -> Any:
    """Execute a notebook in place; what libraries write to stderr is left out."""
    NotebookClient(made, timeout=None, record_timing=False).execute()
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if (out.output_type, out.get("name")) != NOISE]
    return made


if __name__ == "__main__":
    nbformat.write(run(notebook(SCRIPT.read_text())), NOTEBOOK)
    print(f"{NOTEBOOK.relative_to(ROOT)}: {NOTEBOOK.stat().st_size:,} bytes")
