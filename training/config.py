"""The knobs of a run and the command line that sets them, for ``train_ppo.py`` and the scripts.

Dataclasses of sections are defined beside their users: model and lora in ``policy/model.py``, env in
``envs/config.py``, curriculum in ``curriculum.py``. Those of the trainer, ppo and run, are defined here, so that
scripts can read a run's configuration without importing the trainer.
"""

import argparse
import json
import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from config.flags import FlagParser
from config.reader import ConfigError, blaming, check_values, config_dict, knob, load_config, printable, read_json
from curriculum import CurriculumConfig, Stage, pool
from env_wrapper import check_games
from envs.config import EnvConfig
from games import NAMES, find
from policy.model import LoraConfig, ModelConfig
from training.loggers import NAMES as LOGGERS
from training.process import ROOT, at_least, lock_run
from utils import CheckpointError, checkpoints_in, latest_checkpoint, load_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PPOConfig:
    """The algorithm. What was tried, and what came of it: docs/log.md, docs/results.md."""

    learning_rate: float = knob(1e-4, above=0, max=1e30)  # of AdamW, at the first step
    lr_final: float = knob(1.0, min=0, max=1)  # share of the learning rate left at the last step (linear decay)
    num_train_steps: int = knob(10_000, min=1)  # of the whole run: batch_size games, then updates with them
    batch_size: int = knob(8, min=2, max=2**20)  # games a step
    mini_batch_size: int = knob(8, min=1)  # games; model.tokens_per_batch cuts them into forward passes
    gradient_accumulation_steps: int = knob(1, min=1)  # times that many games make one optimizer step
    ppo_epochs: int = knob(1, min=1)  # passes over a step's decisions; target_kl ends them early
    cliprange: float | None = knob(0.2, above=0, max=1)  # of the ratio, and of how far a value moves; null: NeuRD
    vf_coef: float = knob(0.1, min=0)  # weight of the value loss
    entropy_coef: float = knob(0.05, min=0)  # weight of the entropy bonus, per nat (NeuRD: of the logits' spread)
    entropy_final: float = knob(1.0, min=0, max=1)  # share of it left at the last step (linear decay)
    magnet_coef: float = knob(0.0, min=0)  # on the KL to the adapter's own moving average, for self-play; 0: none
    sweep: float = knob(0.0, min=0)  # step of mirror descent in all positions of small self-play games; 0: plays games
    legal_mass_coef: float = knob(0.1, min=0)  # weight of -log P(legal answer) where nothing constrains it
    context_grad: bool = True  # gradients also through what comes before an answer; false: only through its own tokens
    rehearsal_coef: float = knob(0.0, min=0)  # on the KL to the base over text that the base wrote itself; 0: none
    state_coef: float = knob(0.0, min=0)  # on telling what OpenSpiel's tensor of the position says, from a prompt's end
    gamma: float = knob(1.0, min=0, max=1)  # discount per decision
    less_luck: bool = True  # advantages less the luck of deals and random opponents, where known (docs/metrics.md)
    lam: float = knob(0.95, min=0, max=1)  # GAE's lambda, over a seat's own decisions
    adap_kl_ctrl: bool = True  # whether the coefficient follows target
    init_kl_coef: float = knob(0.0, min=0)  # per nat and decision; 0: no KL penalty and no reference pass
    target: float = knob(0.1, above=0)  # nats a decision, for the adaptive controller
    horizon: int = knob(10_000, min=1)  # decisions over which the controller reacts
    target_kl: float | None = knob(0.1, above=0)  # approximate KL to the rollout policy that ends a step's epochs
    max_grad_norm: float = knob(1.0, above=0)  # gradients are clipped to this norm
    recompute_logprobs: bool = False  # old log-probabilities by the training forward (bf16 decoding differs)
    temperature: float = knob(1.0, min=1e-3)  # of sampling and of what is trained, alike
    max_seq_length: int = knob(4096, min=16)  # tokens; a game that no longer fits is truncated, never cut silently
    max_new_tokens: int = knob(16, min=1)  # of a free answer
    save_freq: int = knob(500, min=1)  # steps between checkpoints
    eval_freq: int = knob(0, min=0)  # 0: before and after only
    eval_games: int = knob(4, min=2, max=2**20)  # per game of the evaluation, half of them in each seat
    eval_exact: str = knob("auto", choices=("auto", "always", "never"))  # exact values; auto: where reading is cheap
    alarms: str = knob("warn", choices=("off", "warn", "act"))  # act: slow down or stop (docs/metrics.md, Alarms)

    def __post_init__(self) -> None:
        check_values(self, "ppo")
        if self.eval_games % 2:
            raise ValueError(f"eval_games {self.eval_games}: an even number, half of them for each seat")
        games, mini, accumulated = self.batch_size, self.mini_batch_size, self.gradient_accumulation_steps
        if games % (mini * accumulated):
            per_update = mini * accumulated
            fits = [f"batch_size {-(-games // per_update) * per_update}"]
            fits += [f"mini_batch_size {math.gcd(games // accumulated, mini)}"] if games % accumulated == 0 else []
            fits += [f"gradient_accumulation_steps {math.gcd(games // mini, accumulated)}"] if games % mini == 0 else []
            raise ValueError(
                f"batch_size {games} is not divisible by mini_batch_size * gradient_accumulation_steps "
                f"= {mini} * {accumulated} = {per_update}: {' or '.join(fits)} fits"
            )


@dataclass(frozen=True)
class RunConfig:
    """Where results go and what varies between repetitions."""

    output_dir: str = "runs/default"  # where everything of the run goes
    seed: int = knob(0, min=0, max=2**31 - 1)  # of tasks, sampling and shuffling
    logger: str | tuple[str, ...] = knob("auto", choices=LOGGERS)  # one or several; auto: W&B where one is logged in
    keep_last: int = knob(2, min=1)  # checkpoints, beside the best (by evaluation; ppo.eval_freq 0: by recent games)
    threads: int = knob(0, min=0, max=1024)  # CPU threads of runs, warm starts; 0: torch's. Exact resume needs as many

    def __post_init__(self) -> None:
        check_values(self, "run")
        if not self.output_dir.strip():
            raise ValueError("output_dir: is empty; expected a folder, e.g. runs/first")


SECTIONS: dict[str, type] = {
    "model": ModelConfig, "lora": LoraConfig, "ppo": PPOConfig, "env": EnvConfig, "curriculum": CurriculumConfig,
    "run": RunConfig,
}  # fmt: skip
PAST_EVERY, PAST_SHARE = 100, 20  # steps between past selves; in a shorter run, this fraction of it
OLD_GAMES_PATH = "OPENSPIEL_AGENTS_PATH"  # environment variable: default of env.games_path for a fresh run
DEFAULT_FILES = [ROOT / "config" / f"{name}_config.json" for name in ("train", "env", "curriculum")]


def parse_args(argv: Sequence[str] | None, doc: str | None) -> argparse.Namespace:
    """Read the command line."""
    parser = FlagParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", "--env-config", "--train-config", "--curriculum-config", action="append", default=[],
        metavar="FILE", help="differences to the default files, or to the run that goes on")  # fmt: skip
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="e.g. ppo.learning_rate=2e-5")
    add("--resume", "--resume-from", "--resume-from-checkpoint", nargs="?", const="", metavar="RUN",
        help="a run's folder or one of its checkpoints; without it, the run in --output-dir")  # fmt: skip
    add("--force-config", action="store_true", help="resume although the configuration has changed")
    add("--output-dir", "--checkpoint-dir", "--output", metavar="DIR", help="where the run is written")
    add("--seed", type=at_least(0), help="of deals, sampling and shuffling")
    add("--dry-run", action="store_true", help="check and describe everything, load no weights")
    add("--no-wandb", action="store_true", help="send nothing anywhere: run.logger=none")
    return parser.parse_args(argv)


def read_config(args: argparse.Namespace) -> SimpleNamespace:
    """Read the configuration from files and command line, and check it; ConfigError explains mistakes in one line.

    A resumed run reads it from its checkpoint, whose path ``args.resume`` becomes. If the run continues in its own
    folder, ``args.seen`` lists the checkpoints found in it, which was not locked at that time.
    """
    sets = [f"run.output_dir={json.dumps(args.output_dir)}"] if args.output_dir is not None else []
    sets += [f"run.seed={args.seed}"] if args.seed is not None else []
    sets += args.set  # last: make always gives both flags, and takes --set in ARGS
    sets += ['run.logger="none"'] if args.no_wandb else []
    files: list[Any] = [*DEFAULT_FILES]
    args.seen = None
    if args.force_config and args.resume is None:
        raise ConfigError("--force-config: nothing is resumed without --resume")
    if args.resume is None and (own := os.environ.get(OLD_GAMES_PATH)):
        files.append(("environment", {OLD_GAMES_PATH: own}))
    if args.resume is not None:
        place = Path(expanduser(args.resume or load_config(SECTIONS, [*files, *args.config], sets)["run"].output_dir))
        if any(place.glob(".old-checkpoint-*")) and not args.dry_run:  # killed between two renames
            with suppress(ConfigError):  # then another process holds the run, and repairs it
                lock_run(place).close()
        seen = [path.name for path in checkpoints_in(place)]
        checkpoint = checkpoint_in(place)
        args.resume, files = str(checkpoint), [checkpoint / "run_config.json"]
        sets.insert(0, f"run.output_dir={json.dumps(str(checkpoint.parent))}")
    config = load_sections([*files, *args.config], sets)
    if args.resume is not None and "[redacted]" in json.dumps(config_dict(vars(config))):
        raise ConfigError(f"--resume: {args.resume} keeps no secrets: give what held one again, with --config or --set")
    make_paths_absolute(config)
    if args.resume is not None:
        home = Path(config.run.output_dir).resolve() == checkpoint.parent
        if home and checkpoint.name.startswith("abandoned-"):  # the run's metrics are of another branch
            raise ConfigError(f"--resume: {checkpoint} was set aside, and the run went on without it; "
                              "--output-dir goes on from it in another folder")  # fmt: skip
        if home and place.resolve() == checkpoint.parent:
            args.seen = seen
        elif home and not any((checkpoint.parent / name).is_file() for name in ("about.json", "metrics.jsonl")):
            raise ConfigError(f"--resume: {checkpoint.parent} is not the folder of a run (it has no about.json), and "
                              "this one would write there; --output-dir names another")  # fmt: skip
        _refuse_to_widen(config, read_json(files[0]))
        given = load_config(SECTIONS, [*DEFAULT_FILES, *args.config], sets)["env"].vllm_base_url
        _keep_key(config.env, asked=given != EnvConfig().vllm_base_url)
    config.curriculum = narrowed(config.curriculum, config.env)
    return config


def load_sections(
    files: Iterable[str | Path | tuple[str, Any]], sets: Sequence[str] = (), **options: bool
) -> SimpleNamespace:
    """All sections of a configuration, as ``load_config`` reads them; also registers and checks the user's games."""
    config = SimpleNamespace(**load_config(SECTIONS, files, sets, **options))
    if config.env.answer_mode == "free":  # the legal mass matters only for answers that are constrained in training
        config.ppo = replace(config.ppo, legal_mass_coef=0.0)
    check_games()
    return config


def check_sections(config: SimpleNamespace) -> None:
    """Raise ConfigError for knobs of ``ppo`` that need another ``env``; an address nobody will call gets a line."""
    if config.env.env_url and config.env.env_mode != "url":
        logger.warning("env.env_url: no game is played there with env.env_mode=%s", config.env.env_mode)
    if config.ppo.state_coef and (config.env.env_type, config.env.env_mode) != ("openspiel", "local"):
        raise ConfigError("ppo.state_coef: only positions of games that are played here are known; 0 elsewhere")
    if config.ppo.cliprange is None and config.env.answer_mode != "constrained":
        raise ConfigError("ppo.cliprange = null: NeuRD needs to know which answers are legal, which "
                          f"env.answer_mode = {config.env.answer_mode!r} does not say: expected a number")  # fmt: skip


def decay(ppo: PPOConfig, step: int, final: float) -> float:
    """Linear decay from 1 at the first step (0) to ``final`` at the last."""
    return 1 - (1 - final) * step / max(ppo.num_train_steps - 1, 1)


def checkpoint_in(place: Path) -> Path:
    """The checkpoint in ``place``, or the newest of the run there that verifies; ConfigError if there is none."""
    if not place.is_dir():
        raise ConfigError(f"--resume: there is no folder {place}; expected a run's folder or one of its checkpoints")
    place = place.resolve()  # "." and links have other parents than the run
    named = re.fullmatch(r"checkpoint-\d+", place.name) or (place / "trainer_state.json").exists()
    if not named and not any(place.glob("checkpoint-*")):
        raise ConfigError(f"--resume: there is no checkpoint in {place}; a run that wrote none begins anew without "
                          "--resume")  # fmt: skip
    path = place if named else latest_checkpoint(place)
    if path is None:
        raise ConfigError(f"--resume: no checkpoint that verifies in {place}")
    with blaming("--resume: ", CheckpointError):
        return load_checkpoint(path).path


def past_every(steps: int) -> int:
    """Steps between two past selves in a run of ``steps``."""
    return max(min(steps // PAST_SHARE, PAST_EVERY), 1)


def make_paths_absolute(config: SimpleNamespace) -> None:
    """Let programs started in another folder find models and programs; models of the project itself stay relative."""
    config.run = replace(config.run, output_dir=expanduser(config.run.output_dir))
    with blaming("run.output_dir: ", OSError), suppress(FileNotFoundError, NotADirectoryError):
        os.stat(config.run.output_dir)  # fails for a name too long, say, or a link to itself
    model, source = config.model, config.env.trace.get("source")
    name = Path(expanduser(model.model_name))
    if name.is_dir() and not ((ROOT / name).is_dir() and name.samefile(ROOT / name)):
        config.model = replace(model, model_name=str(name.absolute()))
    if model.adapter and Path(expanduser(model.adapter)).exists():
        config.model = replace(config.model, adapter=str(Path(expanduser(model.adapter)).absolute()))
    if source and source != "generator" and (programs := Path(expanduser(source))).exists():
        config.env = replace(config.env, trace=config.env.trace | {"source": str(programs.absolute())})


def _keep_key(env: EnvConfig, asked: bool) -> None:
    """Raise ConfigError where OPENAI_API_KEY would go to another machine that a checkpoint alone names."""
    urls = [env.vllm_base_url] if isinstance(env.vllm_base_url, str) else env.vllm_base_url
    away = [url for url in urls if urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1")]
    if env.use_vllm and away and os.environ.get("OPENAI_API_KEY") and not asked:
        raise ConfigError(f"env.vllm_base_url: the checkpoint names {printable(away[0])}, which would be told your "
                          "OPENAI_API_KEY; give the address again with --set, or unset the key")  # fmt: skip


def _refuse_to_widen(config: SimpleNamespace, saved: dict[str, Any]) -> None:
    """Raise ConfigError if a knob that ``narrowed`` the checkpoint's stages is reset: that cannot be undone."""
    env, stages = saved.get("env", {}), saved.get("curriculum", {}).get("stages")
    for key in ("allowed_game_indices", "opponent"):
        reset = env.get(key) and not getattr(config.env, key)
        if reset and config_dict(vars(config))["curriculum"]["stages"] == stages:
            raise ConfigError(f"env.{key}: the checkpoint's stages are narrowed to it already: give curriculum.stages")


def narrowed(curriculum: CurriculumConfig, env: EnvConfig) -> CurriculumConfig:
    """The curriculum with ``env.allowed_game_indices`` and ``env.opponent`` applied to every stage.

    Every stage plays all the games named and no other: its own tasks of a game, else those of the first stage that
    plays it, else all tasks of the game.

    ConfigError: no such game, or a stage that cannot be played against that opponent.
    """
    named = _named_games(env)
    opponent: dict[str, Any] = {"opponent": env.opponent, "gate_opponent": None} if env.opponent else {}
    first_ranges = pool([NAMES[i] for i in named])
    for stage in reversed(curriculum.stages):
        first_ranges |= pool(stage.games)

    def narrow(stage: Stage) -> Stage:
        ranges, weights = first_ranges | pool(stage.games), stage.weights
        mean = sum(weights.values()) / len(weights)  # for games that the stage does not name
        games: Any = [list(part) for i in named for part in ranges[i]]
        if isinstance(stage.games, dict):
            games = defaultdict(float)
            for i in named:
                split = stage.range_weights.get(i, [mean / len(ranges[i])] * len(ranges[i]))
                for (first, last), weight in zip(ranges[i], split, strict=True):
                    games[f"{first}-{last}"] += weight
            games = dict(games)  # dataclasses.asdict cannot copy a defaultdict before Python 3.12
        with blaming(f"stage {stage.name!r}: ", raising=ValueError):
            return replace(stage, games=games if named else stage.games, **opponent)

    with blaming(f"env.opponent = {env.opponent!r}: "):
        return replace(curriculum, stages=[narrow(stage) for stage in curriculum.stages])


def _named_games(env: EnvConfig) -> list[int]:
    """The indices of ``env.allowed_game_indices``, each once."""
    items, count = env.allowed_game_indices, len(NAMES)
    if items and env.env_type == "trace":
        raise ConfigError("env.allowed_game_indices: programs have levels, not games; curriculum.stages names them")
    if env.opponent and env.env_type == "trace":
        raise ConfigError("env.opponent: programs (env.env_type trace) have none")
    try:
        names = [NAMES[i] if isinstance(i, int) and i in range(count) else find(str(i)) for i in items]
    except ValueError as error:
        raise ConfigError(f"env.allowed_game_indices: {error}; or an index, 0 to {count - 1}") from error
    return [NAMES.index(name) for name in dict.fromkeys(names)]
