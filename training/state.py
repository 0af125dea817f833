"""Everything a run needs to go on exactly where it was: what is adaptive, and all of it in and out of checkpoints."""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import sys
import time
import traceback
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch

import utils
from config.reader import ConfigError, blaming, config_dict, config_diff, knob, make, read_json
from config.synonyms import GONE
from curriculum import Curriculum, first_tasks
from envs.client import is_number
from envs.config import PLAYED_BY
from envs.trace import programs_digest
from policy.model import identity
from policy.player import Policy, load_policy
from policy.vllm_player import Engine
from training import alarms
from training.config import SECTIONS
from training.loggers import Loggers
from training.memory import checkpoint_bytes
from training.metrics import MetricsLog, finite
from training.positions import state_shapes
from training.process import StoppablePlayer, StopSignal, check_lock
from training.ranks import Ranks
from utils import CheckpointError, latest_checkpoint, load_checkpoint, redact

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
AT_THE_END = "summary.json", "episodes.jsonl", "final", "average"  # what a run leaves besides, of its last step
# How the model is asked, in evaluations too: keys of ``env``, and of ``ppo``. Games of the user's own have a digest.
SHOWN_BY = [key for key in PLAYED_BY if key != "games_path"]
ASKED = "temperature", "max_seq_length", "max_new_tokens"
SAVE_SECONDS = 15 * 60  # between checkpoints, where ppo.save_freq steps take longer
PAST_EVERY, PAST_SHARE = 100, 20  # a past self is kept after so many steps, or that part of a shorter run
GROW_STEPS = 50  # after which batches that were halved for lack of memory are tried at twice the size
FAILED_SAVES = 3  # of checkpoints, in a row, that end the run
# Numbers that a row must have which a resumed run goes on with.
ROW_NUMBERS = ("reward_mean", "score_mean", "success_rate", "update_kl", "entropy", "games_per_s", "time_total")
# An ordinary continuation may change these; the base model's folder and that of games are held to digests instead.
CONTINUES = (
    "ppo.num_train_steps", "ppo.learning_rate", "ppo.lr_", "ppo.save_freq", "ppo.eval_freq", "ppo.alarms",
    "env.games_path", "env.env_url", "env.env_timeout", "env.vllm_base_url",
    "run.output_dir", "run.logger", "run.keep", "run.threads",
)  # fmt: skip


@dataclass
class TrainerState:
    """Everything adaptive that is not in the policy, the optimizer or the curriculum. All of it is checkpointed."""

    step: int = knob(0, min=0)
    drawn: int = knob(0, min=0, max=2**53)  # tasks: none is drawn twice, however many a step has
    kl_coef: float = knob(0.0, min=0)
    bad_updates: int = knob(0, min=0)
    tokens_per_batch: int = knob(0, min=1, max=2**30)
    # Of terminal rewards, per game and seat.
    moments: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    before: list[dict[str, Any]] = field(default_factory=list)  # results of the first evaluation
    row: dict[str, Any] | None = None  # metrics of a step whose evaluation a signal cut short
    lr_scale: float = knob(1.0, above=0, max=1)  # on the learning rate: what alarms made of it
    alarms: dict[str, Any] = field(default_factory=dict)  # what the alarms remember

    def check(self, step: int) -> None:
        """Make sure of what types do not say, before a step is lost to it.

        Raises:
            ConfigError: this is not what a run can have been in after ``step``.
        """
        row, free = self.row or {"step": step}, [r["free_play"] for r in self.before if r.get("free_play")]

        def holds(found: dict[str, Any], *keys: str) -> bool:
            return all(key in found and (found[key] is None or is_number(found[key])) for key in keys)

        sound = {
            "step": self.step == step,
            "moments": all(updates >= 0 and variance >= 0 for updates, _, variance in self.moments.values()),
            "before": all(type(r.get("game")) is str and holds(r, "value", "exact", "share") for r in self.before)
            and all(type(f) is dict and is_number(f.get("value")) and is_number(f.get("legal_rate")) for f in free),
            "alarms": holds(self.alarms, *self.alarms),
            "row": row.get("step") == step
            and (self.row is None or (holds(row, *ROW_NUMBERS) and type(row.get("stage")) is str))
            and type(row.get("alarms", [])) is list
            and ("stage_change" in row) == ("stage_reason" in row),
        }
        if wrong := [name for name, good in sound.items() if not good]:
            raise ConfigError(f"trainer_state.{wrong[0]} is not that of a run after step {step}")


class Checkpointed:
    """The objects of a run: who plays with them, and how they are written to checkpoints and read from them."""

    about: dict[str, Any]  # as in about.json
    exact: dict[int, float]  # tasks of the evaluation with exact values
    loggers: Loggers
    lock: IO[str] | None = None  # on the run's folder, in the first process
    failed_saves = 0
    midway = False  # whether the weights are between two steps: not to be saved
    saved_at = 0.0  # by time.monotonic
    scored: tuple[int, float | None] = (0, None)  # the step last evaluated or loaded, and its score

    def __init__(self, config: SimpleNamespace, run_dir: Path, ranks: Ranks) -> None:
        self.config, self.ppo, self.run_dir, self.ranks = config, config.ppo, run_dir, ranks
        self.policy = load_policy(config)
        self.base = base_of(config, self.policy)  # which model, tokenizer, games and programs the adapter belongs to
        if self.ppo.state_coef:
            self.policy.learn_states(state_shapes(config.curriculum))
        self.names = list(self.policy.trainable())  # in the optimizer's order
        self.optimizer = torch.optim.AdamW(
            self.policy.trainable().values(), lr=self.ppo.learning_rate, weight_decay=0.0, fused=True
        )
        self.curriculum = Curriculum(config.curriculum, config.run.seed)
        self.evaluated = first_tasks(config.curriculum, config.env.env_type)  # task ids, before and after
        self.state = TrainerState(kl_coef=self.ppo.init_kl_coef, tokens_per_batch=self.policy.tokens_per_batch)
        self.metrics = MetricsLog(run_dir / METRICS)
        self.engine = Engine(self.policy, config.env, run_dir) if config.env.use_vllm else None

    # -- who plays -----------------------------------------------------------------------------------------------

    def player(self, stop: StopSignal, trained_on: bool = False) -> Any:
        """The policy, leaving a rollout or an evaluation on a signal; several processes agree on it between steps.

        With ``env.use_vllm`` servers play, with the policy's weights as they are now, or where games are
        ``trained_on`` with such as ``env.max_staleness`` allows.
        """
        if self.engine:
            self.engine.stale = self.config.env.max_staleness if trained_on else 0
            self.engine.stop = lambda: stop.received
            self.engine.publish(self.state.step)
            return StoppablePlayer(self.engine, stop)
        return StoppablePlayer(self.policy, stop) if self.ranks.world == 1 else self.policy

    def keep_past(self) -> None:
        """Let the average follow the policy, which becomes an opponent called ``past`` now and then."""
        if self.config.ppo.magnet_coef:
            self.policy.follow(self.state.step)
        every = past_every(self.config.ppo.num_train_steps)
        if "past" in self.config.curriculum.opponents and self.state.step % every == 0:
            name = f"step-{self.state.step:06d}"
            for gone in self.curriculum.add_past(name):
                self.policy.forget_past(gone)
            self.policy.keep_past(name)

    @property
    def frozen(self) -> list[str]:
        """The adapters that belong to the run beside the trained one: past selves, and the moving average."""
        return [*self.curriculum.past, *(["average"] if self.config.ppo.magnet_coef and self.state.step else [])]

    def grow_batches(self) -> None:
        """Now and then, at the same steps in a resumed run: what took the memory may be gone."""
        if self.state.step % GROW_STEPS == 0:
            self.policy.tokens_per_batch = min(2 * self.policy.tokens_per_batch, self.config.model.tokens_per_batch)
        self.state.tokens_per_batch = self.policy.tokens_per_batch

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint of everything; the metrics are on disk first, so that a resume finds no gap.

        Raises:
            CheckpointError: it cannot be written, or (RuinedWeightsError) could not be gone on from.
            TrainingError: the folder is not the run's any more.
        """
        self.saved_at = time.monotonic()
        self.state.tokens_per_batch = self.policy.tokens_per_batch  # an evaluation may have halved it
        if not self.ranks.first:
            return self.run_dir
        check_lock(self.run_dir, self.lock)
        self.policy.check()
        trained = sum(parameter.numel() for parameter in self.policy.trainable().values())
        utils.need_space(self.run_dir, checkpoint_bytes(trained, trained * len(self.frozen)))
        score = self.score
        if not self.config.ppo.eval_freq:  # the best is then that of the latest stage, by the window of its games
            stages = [stage.name for stage in self.curriculum.config.stages]
            rate = self.curriculum.success_rate if self.curriculum.settled else 0.0  # of three games it may be luck
            score = stages.index(self.curriculum.stage.name) + rate
        self.metrics.sync()
        tensors, rest = utils.pack_optimizer(self.optimizer, self.names)
        past = {f"{name}/{key}": tensor for name in self.frozen
                for key, tensor in self.policy.past_adapter(name).items()}  # fmt: skip
        state = finite(vars(self.state)) | {"optimizer": rest} | self.arithmetic
        return utils.save_checkpoint(
            self.run_dir, self.state.step, self.policy.save,
            documents={"trainer_state": state, "curriculum": self.curriculum.state_dict(),
                       "run_config": config_dict(vars(self.config))},
            tensors={"optimizer": tensors} | ({"past": past} if past else {}),
            base=self.base, score=score, scale=self.scale, keep_last=self.config.run.keep_last,
        )  # fmt: skip

    @property
    def arithmetic(self) -> dict[str, Any]:
        """What the last digits of a run hang on besides its configuration."""
        return {"threads": torch.get_num_threads(), "processes": self.ranks.world, "torch": torch.__version__,
                "device": self.policy.card}  # fmt: skip

    def save_players(self) -> Path:
        """Write the players: the last adapter, ``final``, whose folder is returned, and the average if one is kept."""

        def fill(adapter: str, folder: Path) -> None:
            self.policy.save(folder, adapter=adapter)
            (folder / "run_config.json").write_bytes(self.shown_config)  # that of the run may change
            utils.write_manifest(folder, self.state.step, self.base)

        check_lock(self.run_dir, self.lock)
        if "average" in self.frozen:
            utils.write_directory(self.run_dir / "average", partial(fill, "average"))
        elif (self.run_dir / "average").exists():  # of an earlier end
            set_aside(self.run_dir / "average")
        return utils.write_directory(self.run_dir / "final", partial(fill, "default"))

    @property
    def shown_config(self) -> bytes:
        """The configuration as files hold it, without secrets."""
        return json.dumps(self.safe_config, indent=1).encode()

    @property
    def safe_config(self) -> dict[str, Any]:
        """The configuration without secrets, as checkpoints keep it."""
        return redact(config_dict(vars(self.config)), words=False)

    @property
    def score(self) -> float | None:
        """What the evaluation of this step came to; None: there was none."""
        step, score = self.scored
        return score if step == self.state.step else None

    @property
    def scale(self) -> str:
        """Digest of what a checkpoint's score is of: who is asked, and how, about which tasks, or in which stages."""
        config = self.safe_config
        asked = [config["env"][key] for key in SHOWN_BY] + [config["ppo"][key] for key in ASKED]
        played: Any = config["curriculum"]["stages"]
        if self.config.ppo.eval_freq:  # where exact values are known, a share of the ceiling
            played = [self.evaluated, sorted(self.exact)]
        base = [self.base[part] for part in ("weights", "tokenizer", "games", "programs") if part in self.base]
        return hashlib.sha256(json.dumps([asked, played, base]).encode()).hexdigest()[:16]

    def is_due(self) -> bool:
        """Whether a checkpoint is to be written now: so many steps, after an evaluation, or by the clock."""
        overdue = time.monotonic() - self.saved_at > SAVE_SECONDS
        return self.state.step % self.config.ppo.save_freq == 0 or self.score is not None or overdue

    def save_if_possible(self) -> None:
        """Save at a boundary. Where that fails, training goes on to the next one, unless it has failed too often."""
        try:
            self.save()
            self.failed_saves = 0
        except utils.RuinedWeightsError:
            raise
        except CheckpointError as error:
            self.failed_saves += 1
            if self.failed_saves == FAILED_SAVES:
                raise
            log.warning("training goes on without a checkpoint: %s", error)

    def save_at_the_end(self) -> str:
        """Save for the last time; return the checkpoint's path, or that of the newest sound one and what went wrong."""
        log.debug("what ended the run", exc_info=True)
        check_lock(self.run_dir, self.lock)
        if self.midway:
            return str(latest_checkpoint(self.run_dir) or "none yet")
        try:
            traceback.clear_frames(sys.exc_info()[2])  # which hold what a rollout had read when memory ran out
            self.policy.forget()
            return str(self.save())
        except RuntimeError as error:  # a device that failed may not give its tensors back
            return f"{latest_checkpoint(self.run_dir) or 'none'} ({' '.join(str(error).split())})"

    def load(self, path: Path, force: bool = False) -> bool:
        """Go on exactly where a checkpoint was written, or the newest one before it whose weights can play.

        ``force``: although its base model, tokenizer, adapter, games or programs are others. Returns whether the run
        goes on with other knobs, or in another folder.

        Raises:
            CheckpointError: it does not hold what a checkpoint of this run holds.
            ConfigError: it belongs to another base model, tokenizer or configuration.
        """
        saved = load_checkpoint(path)
        with utils.naming(f"{path}: "):
            another = self._check_base(path, saved.manifest["base"], force)
            state = saved.json("trainer_state")
            self.policy.load(path)
            try:
                self.policy.check()
            except utils.RuinedWeightsError as error:
                if (older := latest_checkpoint(path.parent, before=saved.step)) is None:
                    raise
                log.warning("%s is skipped: %s", path, error)
                return self.load(older, force)
            self._load_optimizer(saved.tensors("optimizer"), state.pop("optimizer"))
            arithmetic = {key: state.pop(key, now) for key, now in self.arithmetic.items()}
            (state.get("row") or {}).setdefault("update_kl")  # checkpoints before 2026-11-25
            state.setdefault("drawn", saved.step * self.config.ppo.batch_size)  # checkpoints before 2026-11-24
            self.state = make(TrainerState, state, "trainer_state")
            self.state.check(saved.step)
            if self.state.row:
                self.state.row = _numbers(self.state.row)
            self.state.alarms = _numbers(self.state.alarms)
            self.curriculum.load_state_dict(saved.json("curriculum"))
            changed = self._drop_what_changed(saved.json("run_config"), another)
            comparable = saved.manifest.get("scale", self.scale) == self.scale
            self.scored = (saved.step, saved.manifest.get("score") if comparable else None)
            self._load_frozen(saved)
        for what, now in self.arithmetic.items():
            if arithmetic[what] != now:
                log.warning("saved with %s %s, now %s: the resumed run will not be identical to the bit",
                            what, arithmetic[what], now)  # fmt: skip
        self.policy.tokens_per_batch = min(self.state.tokens_per_batch, self.config.model.tokens_per_batch)
        if self.ranks.first:
            abandon_after(self.run_dir, self.state.step)
            self.metrics.truncate_to(self.state.step - (self.state.row is not None))
        return changed or path.parent.resolve() != self.run_dir.resolve()

    def _load_optimizer(self, moments: dict[str, Any], rest: dict[str, Any]) -> None:
        """Adam's state, without that of a head which is not trained any more."""
        if not self.config.ppo.state_coef:
            moments = {key: t for key, t in moments.items() if "/state_head." not in key}
            rest = rest | {"names": [name for name in rest["names"] if not name.startswith("state_head.")]}
        utils.unpack_optimizer(self.optimizer, moments, rest, self.names)

    def _drop_what_changed(self, before: dict[str, Any], another: bool) -> bool:
        """Forget what another configuration, or base, brought about: its penalty, and results of other play.

        Returns whether a knob has changed, but for where the run is.
        """
        now = self.safe_config

        def differs(was: Any, is_now: dict[str, Any], *keys: str) -> bool:
            return isinstance(was, dict) and any(key in was and was[key] != is_now[key] for key in keys)

        if differs(before.get("ppo"), now["ppo"], "init_kl_coef"):
            self.state.kl_coef = self.config.ppo.init_kl_coef
        if differs(before.get("ppo"), now["ppo"], "learning_rate") or self.ppo.alarms == "off":
            self.state.lr_scale = 1.0
        if not differs(before.get("model"), vars(self.state), "tokens_per_batch"):  # memory had sufficed so far
            self.state.tokens_per_batch = self.config.model.tokens_per_batch
        another |= differs(before.get("env"), now["env"], *SHOWN_BY) or differs(before.get("ppo"), now["ppo"], *ASKED)
        if another:
            unknown = dict.fromkeys(("value", "exact", "share"))
            self.state.before = [{"game": r["game"], **unknown} for r in self.state.before if self.state.step]
        were, are = ({s["name"]: s for s in c["curriculum"]["stages"]} for c in (before, now))
        name = self.curriculum.stage.name
        if another or differs(were.get(name), are[name], "games", "opponent", "gate_opponent"):
            alarms.forget(self.state.alarms)
            self.curriculum.count_anew()
        return any(not line.startswith("run.output_dir") for line in config_diff(before, now))

    def _load_frozen(self, saved: utils.Checkpoint) -> None:
        held = self.curriculum.past or "past.safetensors" in saved.manifest["files"]
        past = saved.tensors("past") if held else {}
        for name in self.frozen:
            mine = {key.removeprefix(f"{name}/"): t for key, t in past.items() if key.startswith(f"{name}/")}
            if not mine and name != "average":
                raise CheckpointError(f"past.safetensors holds no {name}")
            self.policy.keep_past(name, mine or None)  # an average that is new begins as a copy of the policy

    def _check_base(self, path: Path, base: dict[str, Any], force: bool) -> bool:
        """Whether somebody else plays, or other games, which only ``force`` allows."""
        changes = set()
        for part in ("weights", "tokenizer", "adapter", "games", "programs"):
            if base.get(part, self.base.get(part)) != self.base.get(part):
                env, model = self.config.env, self.base["model"]
                owner = {"games": env.games_path, "programs": env.trace.get("source")}.get(part, model)
                changed = f"{path}: the {part} of {owner or 'this program'} are not those that it was trained with"
                if not force:
                    raise ConfigError(f"--resume: {changed}; --force-config goes on")
                log.warning("%s", changed)
                changes.add(part)
        return bool(changes - {"adapter"})  # with which the run began


def past_every(steps: int) -> int:
    """After how many steps of a run of so many a past self is kept."""
    return max(min(steps // PAST_SHARE, PAST_EVERY), 1)


def base_of(config: SimpleNamespace, policy: Policy) -> dict[str, str | None]:
    """What a run's adapter belongs to: ``identity``, and a digest of the programs where they are somebody's."""
    return identity(config.model, policy.base, policy.tokenizer) | programs_digest(config.env)


def _numbers(saved: dict[str, Any]) -> dict[str, Any]:
    """Strict JSON holds null where a number was not finite."""
    return {key: np.nan if value is None else value for key, value in saved.items()}


def set_aside(path: Path, copied: bool = False) -> str:
    """Rename (or copy) a run's file or folder to ``abandoned-NAME``, numbered where there is one; returns the name."""
    first = path.with_name(f"abandoned-{path.name.removeprefix('checkpoint-')}")
    names = itertools.chain([first], (first.with_stem(f"{first.stem}-{n}") for n in itertools.count(2)))
    target = next(name for name in names if not os.path.lexists(name))
    if copied:
        utils.write_file(target, path.read_bytes())
    else:
        path.rename(target)
    return target.name


def abandon_after(run_dir: str | Path, step: int) -> None:
    """Set aside what came after ``step``, for a run that goes on from there: checkpoints, metrics, and its end."""
    directory = Path(run_dir)
    later = [path for path in utils.checkpoints_in(directory) if utils.step_of(path) > step]
    if not later:
        return
    metrics = directory / METRICS
    names = [set_aside(metrics, copied=True)] if metrics.exists() else []  # the run goes on in it
    # The checkpoints last: while one is left, what a kill has interrupted is done again.
    names += [set_aside(path) for name in AT_THE_END if (path := directory / name).exists()]
    names += [set_aside(path) for path in later]
    log.warning("%s: set aside as %s: the run goes on from step %d", directory, ", ".join(names), step)


def _take_folder(run_dir: Path, resume: str | None, look_only: bool) -> None:
    """Set aside what a run without checkpoints left in a run's folder; ConfigError for what must not be replaced."""
    for folder in (run_dir / "final", run_dir / "average"):  # written anew at the end
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "adapter_config.json").exists():
            raise ConfigError(
                f"run.output_dir: {folder} is there and is no adapter: it would be replaced; name another"
            )
    if resume is None or Path(resume).parent.resolve() != run_dir.resolve():
        if (run_dir / "adapter_config.json").exists() or any(run_dir.glob("*.safetensors")):
            raise ConfigError(f"run.output_dir: {run_dir} is a model, checkpoint or player, which a run would damage; "
                              "--resume goes on from a checkpoint, --output-dir starts another run")  # fmt: skip
        if any(run_dir.glob("checkpoint-*")):
            ways = "--resume goes on" if resume is None else f"--resume {run_dir} goes on"
            ways += ", --output-dir starts another"
            raise ConfigError(f"run.output_dir: {run_dir} holds checkpoints; {ways}")
        kept = [METRICS, "wandb_id", *AT_THE_END]
        if not (run_dir / "about.json").exists():  # then nobody's run was here, and these are the user's own
            kept += ["run_config.json", "curves.png", "report.html", "report.md"]
        left = [path for name in kept if (path := run_dir / name).exists()]
        if not look_only and (names := [set_aside(path) for path in left if path.is_dir() or path.stat().st_size]):
            log.warning("%s holds no checkpoint: what a run left there is set aside as %s", run_dir, ", ".join(names))


def find_checkpoint(
    run_dir: Path, resume: str | None, resolved: dict[str, Any], force_config: bool, look_only: bool = False
) -> Path | None:
    """The checkpoint to go on from (None: a fresh run; what one without checkpoints left is set aside).

    ``look_only``: nothing is set aside, nothing told.

    Raises:
        ConfigError: a run that would be overwritten, or knobs that may not change have changed since.
    """
    _take_folder(run_dir, resume, look_only)
    if resume is None:
        return None
    path = Path(resume)
    with blaming("--resume: ", CheckpointError):
        saved = load_checkpoint(path).json("run_config")
    for section, cls in SECTIONS.items():  # knobs that are newer than the checkpoint had their defaults
        known = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        known |= {f.name: f.default_factory() for f in fields(cls) if f.default_factory is not MISSING}
        held = {key: x for key, x in saved.get(section, {}).items() if f"{section}.{key}" not in GONE}
        saved[section] = json.loads(json.dumps(known)) | held
    changed = config_diff(saved, redact(resolved, words=False))
    refused = [line for line in changed if not line.startswith(CONTINUES)]
    if refused and not force_config:
        raise ConfigError(f"--resume: the configuration has changed since {path.name}: {'; '.join(refused)}; "
                          "--force-config goes on with the new one")  # fmt: skip
    if look_only:
        return path
    if any(line.startswith("ppo.num_train_steps") for line in changed):
        ends = [key for key in ("lr_final", "entropy_final") if resolved["ppo"][key] != 1]
        changed += [f"ppo.{key} is now reached at the new last step" for key in ends]
        every = past_every(resolved["ppo"]["num_train_steps"])
        plays = any("past" in stage["opponent"] for stage in resolved["curriculum"]["stages"])
        if plays and every != past_every(saved["ppo"]["num_train_steps"]):
            changed.append(f"a past self is now kept every {every} steps")
    told = [line for line in changed if not line.startswith("run.output_dir")]
    log.info("goes on from %s%s", path, f" with {'; '.join(told)}" if told else "")
    return path


def is_finished(run_dir: Path, checkpoint: str, resolved: dict[str, Any], force_config: bool) -> bool:
    """Whether a run has come to its end with this checkpoint, and no more steps, nor other knobs, are asked for."""
    step, ended = load_checkpoint(checkpoint).step, None
    with contextlib.suppress(ConfigError, TypeError, KeyError):  # there is none, or it is damaged: it is made again
        ended = read_json(run_dir / "summary.json")["steps"]  # perhaps of an earlier end, from which the run went on
    whole = step >= resolved["ppo"]["num_train_steps"] and ended == step and (run_dir / "episodes.jsonl").exists()
    return whole and bool(find_checkpoint(run_dir, checkpoint, resolved, force_config, look_only=True))
