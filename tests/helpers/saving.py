"""A small checkpoint to save, for the tests of checkpoints."""

import json
import random
from typing import Any

import torch

import utils
from utils import save_checkpoint


def write_adapter(folder):
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 4)
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "tool.jinja").write_text("{{ messages }}")


def save(run_dir, step, **changed):
    options: dict[str, Any] = {
        "documents": {"trainer_state": {"step": step, "kl_coef": 0.1}, "run_config": {"ppo": {"gamma": 0.99}}},
        "tensors": {"optimizer": {"exp_avg/a": torch.full((3, 2), float(step))}},
        "base": {"model": "tiny", "revision": "abc"},
        "write": write_adapter,
    } | changed
    return save_checkpoint(run_dir, step, options.pop("write"), **options)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def damage(path):
    with (path / "adapter_model.safetensors").open("r+b") as file:
        file.write(b"damage")


def seal_again(file):
    """Put a file of a checkpoint that has been changed into its manifest."""
    path = file.parent / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    manifest["files"][file.name] = utils.fingerprint(file)
    path.write_text(utils._seal(manifest))
    assert utils.verify_checkpoint(file.parent) == []


def flip(data, bit):
    return data[: bit // 8] + bytes([data[bit // 8] ^ (1 << bit % 8)]) + data[bit // 8 + 1 :]


def damages(data):
    """Cut off at four lengths, and one bit flipped at twenty places."""
    size, rng = len(data), random.Random(0)
    yield from (data[:n] for n in (0, 1, size // 2, size - 1))
    yield from (flip(data, bit) for bit in rng.sample(range(8 * size), 20))
