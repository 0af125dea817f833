"""The knobs of a run and the command line that sets them; ``train_ppo.py`` and the scripts read both from here.

Sections have their dataclasses beside their owners: model and lora in ``model.py``, env in ``env_wrapper.py``,
curriculum in ``curriculum.py``; ppo and run, which belong to the trainer, stand below so that the scripts can read a
run's configuration without the trainer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from curriculum import CurriculumConfig, Stage, pool
from env_wrapper import EnvConfig
from games import NAMES
from model import LoraConfig, ModelConfig
from utils import ConfigError, knob, load_config


@dataclass(frozen=True)
class PPOConfig:
    """The algorithm. What was tried, and what came of it: docs/log.md, docs/results.md."""

    learning_rate: float = knob(1e-5, above=0)
    lr_final: float = knob(1.0, min=0, max=1)  # share of the learning rate left at the last step (linear decay)
    lr_warmup_steps: int = knob(0, min=0)
    lr_target_kl: float | None = knob(None, above=0)  # rate / 1.5 above twice this KL, back up below half
    num_train_steps: int = knob(10_000, min=1)
    batch_size: int = knob(8, min=1)  # games a step
    mini_batch_size: int = knob(2, min=1)  # games; model.tokens_per_batch cuts them into forward passes
    gradient_accumulation_steps: int = knob(1, min=1)  # times that many games make one optimizer step
    ppo_epochs: int = knob(4, min=1)
    ratio: str = knob("decision", choices=("decision", "token"))  # what is clipped: whole answers, or each token
    cliprange: float = knob(0.2, above=0, max=1)
    cliprange_high: float | None = knob(None, above=0)  # upper clip range where it differs
    cliprange_value: float = knob(0.2, above=0)
    vf_coef: float = knob(0.1, min=0)
    entropy_coef: float = knob(0.0, min=0)
    entropy_final: float = knob(1.0, min=0, max=1)  # share of it left at the last step (linear decay)
    legal_mass_coef: float = knob(0.0, min=0)
    gamma: float = knob(0.99, min=0, max=1)
    lam: float = knob(0.95, min=0, max=1)
    lam_critic: float | None = knob(None, min=0, max=1)  # lambda of the critic's returns where it differs
    adap_kl_ctrl: bool = True
    init_kl_coef: float = knob(0.2, min=0)  # per nat and decision; 0: no KL penalty and no reference pass
    target: float = knob(0.1, above=0)  # nats a decision, for the adaptive controller
    horizon: int = knob(10_000, min=1)  # decisions over which the controller reacts
    target_kl: float | None = knob(0.1, above=0)  # approximate KL to the rollout policy that ends a step's epochs
    max_grad_norm: float = knob(1.0, above=0)
    critic_warmup_steps: int = knob(0, min=0)  # first steps that move the value head only
    critic_warmup_ev: float | None = knob(None, max=1)  # explained variance that ends them early
    standardise_rewards: bool = True  # by running mean and deviation of each (game, seat)
    recompute_logprobs: bool = True  # old log-probabilities by the training forward (bf16 decoding differs)
    temperature: float = knob(1.0, above=0)
    max_seq_length: int = knob(4096, min=16)
    max_new_tokens: int = knob(16, min=1)  # of a free answer
    save_freq: int = knob(500, min=1)
    eval_freq: int = knob(0, min=0)  # 0: before and after only
    eval_games: int = knob(200, min=2)  # per game of the evaluation, half of them in each seat
    max_failed_share: float = knob(0.2, min=0, max=1)  # of a step's episodes lost to infrastructure
    max_bad_updates: int = knob(5, min=1)  # non-finite minibatches in a row before the run stops
    alarms: str = knob("warn", choices=("off", "warn", "act"))  # act: slow down or stop, as alarms.py says

    def __post_init__(self) -> None:
        per_update = self.mini_batch_size * self.gradient_accumulation_steps
        if self.batch_size % per_update:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by mini_batch_size * gradient_accumulation_steps "
                f"= {self.mini_batch_size} * {self.gradient_accumulation_steps} = {per_update}"
            )


@dataclass(frozen=True)
class RunConfig:
    """Where results go and what varies between repetitions."""

    output_dir: str = "runs/default"
    seed: int = knob(0, min=0, max=2**31 - 1)
    wandb_mode: str = knob("auto", choices=("auto", "online", "offline", "disabled"))
    wandb_project: str = "chat-games-ppo"
    keep_last: int = knob(2, min=1)
    keep_best: bool = True
    threads: int = knob(0, min=0)  # CPU threads of torch; 0: its default. Exact resume needs the same number


SECTIONS: dict[str, type] = {
    "model": ModelConfig, "lora": LoraConfig, "ppo": PPOConfig, "env": EnvConfig, "curriculum": CurriculumConfig,
    "run": RunConfig,
}  # fmt: skip
DEFAULT_FILES = ("config/train_config.json", "config/env_config.json", "config/curriculum_config.json")


def parse_args(argv: Sequence[str] | None, doc: str | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="differences to the default files"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. ppo.learning_rate=2e-5")
    parser.add_argument("--resume", nargs="?", const="", metavar="CHECKPOINT", help="the latest one, or this one")
    parser.add_argument("--force-config", action="store_true", help="resume although the configuration has changed")
    parser.add_argument("--output-dir", metavar="DIR")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--dry-run", action="store_true", help="check and describe everything, load no weights")
    parser.add_argument("--no-wandb", action="store_true")
    return parser.parse_args(argv)


def read_config(args: argparse.Namespace) -> SimpleNamespace:
    """Lay the configuration together from files and command line, and check it.

    Raises:
        ConfigError: one line.
    """
    sets = list(args.set)
    sets += [f"run.output_dir={json.dumps(args.output_dir)}"] if args.output_dir else []
    sets += [f"run.seed={args.seed}"] if args.seed is not None else []
    sets += ['run.wandb_mode="disabled"'] if args.no_wandb else []
    here = Path(__file__).parent
    files = [here / name for name in DEFAULT_FILES] + [Path(name) for name in args.config]
    config = SimpleNamespace(**load_config(SECTIONS, files, sets))
    config.curriculum = narrowed(config.curriculum, config.env)
    return config


def narrowed(curriculum: CurriculumConfig, env: EnvConfig) -> CurriculumConfig:
    """The curriculum with ``env.allowed_game_indices`` and ``env.opponent`` applied to every stage.

    Stages that play none of the games are left out.

    Raises:
        ConfigError: no stage is left, or one cannot be played against that opponent.
    """
    allowed = env.allowed_game_indices or range(len(NAMES))
    opponent: dict[str, Any] = {"opponent": env.opponent, "gate_opponent": None} if env.opponent else {}

    def narrow(stage: Stage) -> Stage:
        ranges = pool(stage.games)
        games: list[Any] = [list(part) for i in allowed if i in ranges for part in ranges[i]]
        try:
            return replace(stage, games=games if env.allowed_game_indices else stage.games, **opponent)
        except ValueError as error:
            raise ValueError(f"stage {stage.name!r}: {error}") from error

    played = {i for stage in curriculum.stages for i in pool(stage.games)}
    if not played & set(allowed):
        raise ConfigError(
            f"env.allowed_game_indices: no stage plays a game of {list(allowed)}; the stages play {sorted(played)}"
        )
    try:
        return replace(curriculum, stages=[narrow(s) for s in curriculum.stages if set(pool(s.games)) & set(allowed)])
    except ValueError as error:
        raise ConfigError(f"env.opponent = {env.opponent!r}: {error}") from error
