"""The machine told apart before anything is downloaded: a driver too old, a card too old, too small or too full."""

import os
import subprocess
from pathlib import Path

import huggingface_hub
import pytest
import torch

import train_ppo
from policy import model
from policy.model import ModelConfig, device_of
from training import preflight
from training.config import parse_args, read_config
from training.memory import Parameters
from utils import ConfigError

QWEN3_4B = Parameters((5_000_000,) * 720, 400_000_000, 33_000_000, 2561)


@pytest.fixture
def card(monkeypatch):
    """A function that pretends a card with these figures."""

    def pretend(capability=(8, 9), free=23.0, total=24.0):
        fakes = {"is_available": True, "get_device_capability": capability, "get_device_name": "NVIDIA Card",
                 "mem_get_info": (free * 1e9, total * 1e9)}  # fmt: skip
        for name, value in fakes.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

    return pretend


@pytest.fixture
def smi(monkeypatch):
    """A function that pretends what nvidia-smi prints; None: it is not there."""

    def pretend(printed):
        def run(*args, **options):
            if printed is None:
                raise FileNotFoundError
            return subprocess.CompletedProcess(args, 0, printed, "")

        monkeypatch.setattr(model.subprocess, "run", run)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # also where there is a card

    return pretend


def refusal(check, *args):
    with pytest.raises(ConfigError) as error:
        check(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("cuda", "words"), [("13.0", "is built for CUDA 13.0"), (None, "is built without CUDA")])
def test_a_card_that_torch_cannot_use_is_named_with_its_driver_and_a_wheel(smi, monkeypatch, cuda, words):
    smi("NVIDIA GeForce RTX 4090, 550.54.14\n")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for config in (ModelConfig(), ModelConfig(device="cuda", use_4bit=False)):
        said = refusal(device_of, config)
        assert all(part in said for part in ("NVIDIA GeForce RTX 4090", "550.54.14", words, "580.65", "whl/cu126"))


def test_a_machine_without_a_card_is_told_nothing_of_drivers(smi):
    smi(None)
    assert "driver" not in refusal(device_of, ModelConfig())


def test_a_card_that_torch_has_no_kernels_for_is_told(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "compute_90"])
    card(capability=(7, 0))
    assert "has no kernels for" in refusal(device_of, ModelConfig(dtype="float16"))
    card(capability=(7, 5))
    assert device_of(ModelConfig(dtype="float16")) == "cuda"


def test_what_is_downloaded_is_shown_where_loading_is_not():
    from transformers.utils import logging

    logging.enable_progress_bar()
    with model.quietly():
        assert not logging.is_progress_bar_enabled()
        assert not huggingface_hub.utils.are_progress_bars_disabled()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bfloat16_wants_a_card_that_has_it(card, dtype):
    card(capability=(7, 5))
    if dtype == "float16":
        assert device_of(ModelConfig(dtype=dtype)) == "cuda"
    else:
        assert "sm75" in refusal(device_of, ModelConfig(dtype=dtype))


@pytest.mark.parametrize(
    ("free", "total", "words"),
    [(1.9, 2.0, "has 2.0 GB, which are too few"), (1.5, 24.0, "of which other programs hold 22.5")],
)
def test_a_card_without_room_is_refused_and_told_why(card, free, total, words):
    config = read_config(parse_args([], None))
    card(free=free, total=total)
    assert words in refusal(preflight.check_card, config, QWEN3_4B)
    card(free=20.0)
    preflight.check_card(config, QWEN3_4B)


def test_the_allocator_is_told_to_grow_before_torch_is_there():
    """And by nobody else: what the user has set stays."""
    lines = Path(train_ppo.__file__).read_text().splitlines()
    [told] = [i for i, line in enumerate(lines) if "expandable_segments:True" in line]
    assert lines[told].startswith('os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF"')
    assert told < lines.index("import torch")
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"]
