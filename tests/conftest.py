"""Tiny Qwen models on disk, and policies on them, for all tests."""

import gc
import logging
import signal
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import Drawing

import train_ppo
from env_wrapper import EnvConfig
from policy import load_policy
from policy.model import LoraConfig, ModelConfig
from scripts import make_tiny_model
from training.config import PPOConfig, RunConfig
from training.process import _RunLog

# The tokenizer's words. Not the games' own: a change of their texts would make another model of every seed.
WORDS = """You are playing a game. Rules: two players take turns; the player with the higher card or the longest line
wins the pot. Your move must be the id of one legal action: answer with the number only, nothing else. Legal actions:
board round cards hand chips raise call fold pass bid dice face row column x o empty state player private public"""

signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup and a shell that runs tests aside ignore them
signal.signal(signal.SIGHUP, signal.SIG_DFL)
train_ppo.subprocess = Drawing()  # of runs in these processes, unless a test wants curves


@pytest.fixture(autouse=True, scope="module")
def thawed():
    """Let go of what runs of earlier modules froze (``training.process.rest_collector``)."""
    gc.unfreeze()


@pytest.fixture
def frozen():
    """Keep what is there now out of the collections that follow each lack of memory: half a second each."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def unheard():
    """Take down the handlers that a program run by the test set up: their streams end with the test."""
    yield
    for handler in [h for h in logging.getLogger().handlers if type(h) in (logging.StreamHandler, _RunLog)]:
        logging.getLogger().removeHandler(handler)
        handler.close()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Architecture -> folder of a random base of 32 hidden units and 3 layers; all have the same tokenizer."""
    tokenizer = make_tiny_model.make_tokenizer(iter([WORDS] * 3), 400)
    folders = {name: tmp_path_factory.mktemp(name) for name in ("qwen2", "qwen3", "llama")}
    for name, folder in folders.items():
        make_tiny_model.make_model(len(tokenizer), 32, 3, 0.15, 0, name).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


@pytest.fixture(scope="session")
def new_policy(tiny_models):
    """A function that loads a policy whose adapter and value head are random (a fresh adapter changes nothing)."""

    def new(architecture="qwen2", noise=0, *, fresh=False, model=None, lora=None, ppo=None, env=None):
        name = str(tiny_models.get(architecture, architecture))
        held = {"model_name": name, "use_4bit": False, "dtype": "float32", "device": "cpu"} | (model or {})
        config = SimpleNamespace(
            model=ModelConfig(**held),
            lora=LoraConfig(**{"r": 4, "lora_alpha": 8} | (lora or {})),
            ppo=PPOConfig(**{"max_seq_length": 2048} | (ppo or {})),
            env=EnvConfig(**env or {}),
            run=RunConfig(),
        )
        policy = load_policy(config)
        generator = torch.Generator().manual_seed(noise)
        for parameter in () if fresh else policy.trainable().values():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        return policy

    return new
