"""The common ground of learners on SmolLM2-135M: the configuration, the games of a step, and marks in CPU seconds.

Each learner is one file, run as ``python LEARNER.py GAME SEED STEPS CPU_SECONDS FOLDER`` (ours takes ``KEY=VALUE``
besides). It saves its adapter before the first step, after each that ends ``EVERY`` seconds of CPU time, and after the
last one, as ``FOLDER/SECONDS``; saving is not counted.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
               "TRL_EXPERIMENTAL_SILENCE": "1"}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from games import CONFIGS_PER_GAME, NAMES  # noqa: E402
from training.config import parse_args, read_config  # noqa: E402

GAMES, MINIBATCH, EVERY = 64, 32, 60.0


def configuration(game: str, seed: int, *sets: str):
    """Preset ``smol`` with one game, in bf16, and the game's task id."""
    task = NAMES.index(game) * CONFIGS_PER_GAME
    stages = [{"name": "only", "opponent": "random", "games": [[task, task]]}]
    given = {"run.seed": seed, "ppo.batch_size": GAMES, "ppo.mini_batch_size": MINIBATCH,
             "model.dtype": "bfloat16", "model.model_name": str(ROOT / "models/smollm2-135m"),
             "curriculum.stages": json.dumps(stages)}  # fmt: skip
    sets = (*(f"{key}={value}" for key, value in given.items()), *sets)
    words = ["--config", str(ROOT / "config/presets/smol.json"), "--no-wandb", "--set", *sets]
    torch.set_num_threads(1)
    return task, read_config(parse_args(words, None))


class Marks:
    """Saves the adapter as CPU time goes on."""

    def __init__(self, save, seconds: float, folder: Path):
        self.save, self.seconds, self.folder, self.due = save, seconds, folder, 0.0
        self.start = time.process_time()

    def after_a_step(self, step: int, last: bool = False) -> bool:
        """Save where it is due; whether the time is over."""
        now = time.process_time()
        spent = now - self.start
        if last or spent >= min(self.seconds, self.due):
            print(f"{spent:.0f} CPU s, step {step}", flush=True)
            self.save(self.folder / f"{spent:06.0f}")
            self.due = spent + EVERY
        self.start += time.process_time() - now
        return spent >= self.seconds
