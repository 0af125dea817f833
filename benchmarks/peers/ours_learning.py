"""The program learns a game with SmolLM2-135M: see ``learning.py``."""

import sys
import tempfile
from pathlib import Path

from learning import Marks, configuration

import train_ppo
from policy import cpu_memory
from training.process import StopSignal, rest_collector


def main(game, seed, steps, seconds, folder, *sets):
    """Train until the time is over."""
    _, config = configuration(game, int(seed), f"ppo.num_train_steps={steps}", *sets)
    cpu_memory.keep_freed()
    with tempfile.TemporaryDirectory() as run, StopSignal() as stop:
        trainer = train_ppo.Trainer(config, Path(run))
        rest_collector()
        marks, step = Marks(trainer.policy.save, float(seconds), Path(folder)), 0
        while not marks.after_a_step(step, step == int(steps)) and step < int(steps):
            trainer.step(stop)
            step += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
