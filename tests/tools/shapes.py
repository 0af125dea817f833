"""Folders with everything of a Qwen model but its weights: the true shapes, the true chat template, a local tokenizer.

python tests/tools/shapes.py Qwen3-4B FOLDER
python train_ppo.py --dry-run --set model.model_name=FOLDER
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_models import SHAPES as KNOWN
from benchmarks.gpu_models import config_of

SHAPES = {shape.name: shape for shape in KNOWN}
TEMPLATES = {"qwen2": "qwen2_5", "qwen3": "qwen3"}


def write_model(name: str, folder: Path) -> Path:
    """Write config, tokenizer and chat template of ``SHAPES[name]`` to ``folder``."""
    from envs.openspiel import table
    from games import CONFIGS_PER_GAME, GAMES
    from scripts.make_tiny_model import make_tokenizer

    config_of(SHAPES[name]).save_pretrained(folder)
    tokenizer = make_tokenizer((table(i * CONFIGS_PER_GAME).systems["full"] for i in range(len(GAMES))), 4000)
    trl = importlib.util.find_spec("trl")
    assert trl is not None
    assert trl.origin is not None
    template = f"{TEMPLATES[SHAPES[name].architecture]}.jinja"
    tokenizer.chat_template = (Path(trl.origin).parent / "chat_templates" / template).read_text()
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(write_model(sys.argv[1], Path(sys.argv[2])))
