"""A Qwen of 32 hidden units and runs of a few seconds with it, for the tests of training."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from config.reader import load_config
from env_wrapper import EnvConfig, Episode, Task, play
from games import CONFIGS_PER_GAME, NAMES
from policy import Policy, load_policy
from policy.model import quietly
from scripts.make_tiny_model import make_model, make_tokenizer, prompts
from training.config import SECTIONS

KUHN, LEDUC = (NAMES.index(name) * CONFIGS_PER_GAME for name in ("kuhn_poker", "leduc_poker"))
STAGE = {"name": "only", "games": [[KUHN, KUHN], [LEDUC, LEDUC]]}
MICRO: dict[str, dict[str, Any]] = {
    "model": {"use_4bit": False, "dtype": "float32", "device": "cpu"},
    "lora": {"r": 4, "lora_alpha": 8},
    "ppo": {
        "learning_rate": 1e-2, "num_train_steps": 6, "batch_size": 16, "mini_batch_size": 8, "ppo_epochs": 2,
        "init_kl_coef": 0.05, "horizon": 100, "entropy_coef": 0.01, "lr_final": 0.5, "save_freq": 1, "eval_games": 4,
        "eval_exact": "never", "max_seq_length": 256, "gamma": 0.99, "legal_mass_coef": 0.0, "recompute_logprobs": True,
    },
    "env": {"prompt": "compact", "history_turns": 0},
    "curriculum": {"stages": [STAGE]},
    "run": {"logger": "none", "keep_last": 20},
}  # fmt: skip


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="tiny-base-")


@functools.cache
def base_model() -> str:
    """The folder of a random base and its tokenizer, made once per process."""
    tokenizer = make_tokenizer(prompts(("kuhn_poker", "leduc_poker", "tic_tac_toe"), 10), 320)
    with quietly():  # whichever test is the first reads what it prints itself, and no bar
        make_model(len(tokenizer), 32, 2, 0.15, 0).save_pretrained(_folder().name)
    tokenizer.save_pretrained(_folder().name)
    return _folder().name


def micro(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The micro configuration with differences, section by section."""
    values = {name: part | sections.get(name, {}) for name, part in MICRO.items()}
    values["model"] = {"model_name": base_model()} | values["model"]
    return values


def micro_file(folder: Path, **sections: dict[str, Any]) -> str:
    """``micro`` as a file for ``--config``."""
    path = folder / "micro.json"
    path.write_text(json.dumps(micro(**sections)))
    return str(path)


def micro_config(folder: Path, **sections: dict[str, Any]) -> SimpleNamespace:
    """``micro`` as the trainer's configuration objects."""
    return SimpleNamespace(**load_config(SECTIONS, [micro_file(folder, **sections)]))


def tiny_policy(folder: Path, seed: int = 0, **sections: dict[str, Any]) -> Policy:
    """A policy whose adapter and value head are random: a fresh adapter has no gradient in half of its matrices."""
    policy = load_policy(micro_config(folder, **sections))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def rollout(policy: Policy, games: int = 8, opponent: str = "random", history: Any = 0) -> list[Episode]:
    """Episodes of tic_tac_toe (many decisions), leduc_poker and hex on 4x4 (answers of two choices) in turn."""
    ids = [NAMES.index("tic_tac_toe") * CONFIGS_PER_GAME, LEDUC, NAMES.index("hex_small") * CONFIGS_PER_GAME + 1]
    tasks = [Task(ids[i % 3], seed=i, opponent=opponent, index=i) for i in range(games)]
    return play(EnvConfig(prompt="compact", history_turns=history), policy, tasks)
