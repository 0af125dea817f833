"""Folders with everything of a Qwen model but its weights: the true shapes, the true chat template, a local tokenizer.

python tests/tools/shapes.py Qwen3-4B FOLDER
python train_ppo.py --dry-run --set model.model_name=FOLDER
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SHAPES: dict[str, dict[str, Any]] = {  # from the models' config.json on the Hub
    "Qwen2.5-3B": {
        "architecture": "qwen2", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "intermediate_size": 11008, "vocab_size": 151936, "parameters": 3_085_938_688,
    },
    "Qwen3-4B": {
        "architecture": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
        "parameters": 4_022_468_096,
    },
}  # fmt: skip


def write_model(name: str, folder: Path) -> Path:
    """Write config, tokenizer and chat template of ``SHAPES[name]`` to ``folder``."""
    from transformers import Qwen2Config, Qwen3Config

    from envs.openspiel import table
    from games import CONFIGS_PER_GAME, GAMES
    from scripts.make_tiny_model import make_tokenizer

    shape = {k: v for k, v in SHAPES[name].items() if k not in ("architecture", "parameters")}
    kind, template = {"qwen2": (Qwen2Config, "qwen2_5"), "qwen3": (Qwen3Config, "qwen3")}[SHAPES[name]["architecture"]]
    kind(**shape, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
         max_position_embeddings=32768).save_pretrained(folder)  # fmt: skip
    tokenizer = make_tokenizer((table(i * CONFIGS_PER_GAME).system_full for i in range(len(GAMES))), 4000)
    trl = importlib.util.find_spec("trl")
    assert trl is not None
    assert trl.origin is not None
    tokenizer.chat_template = (Path(trl.origin).parent / "chat_templates" / f"{template}.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(write_model(sys.argv[1], Path(sys.argv[2])))
