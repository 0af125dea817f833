"""Everything that a run needs to resume exactly: its adaptive state, and how checkpoints save and restore it."""

import hashlib
import json
import logging
import os
import sys
import time
import traceback
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch

import utils
from config.reader import ConfigError, config_dict, config_diff, knob, make
from curriculum import Curriculum, evaluated
from envs.client import is_number
from envs.config import PLAYED_BY
from envs.trace import programs_digest
from policy.model import adapter_digest, identity
from policy.player import load_policy
from policy.rehearsal import Rehearsal
from policy.vllm_player import Engine
from training import alarms
from training.config import decay, past_every
from training.folder import METRICS, abandon_after, changed_parts, set_aside
from training.loggers import Loggers
from training.memory import checkpoint_bytes
from training.metrics import MetricsLog, finite
from training.positions import state_shapes
from training.preflight import exact_tasks
from training.process import StoppablePlayer, StopSignal, check_lock
from training.ranks import LONE, Ranks
from training.sweep import Sweeps
from training.trajectories import Moments
from utils import CheckpointError, latest_checkpoint, load_checkpoint, redact

log = logging.getLogger(__name__)

PLAY = {  # section -> keys: with others the same weights are another player, or play another game; games have a digest
    "env": [key for key in PLAYED_BY if key != "games_path"] + ["env_mode"],
    "ppo": ["temperature", "max_seq_length", "max_new_tokens"],
    "model": ["use_4bit", "use_nested_quant", "dtype"],
    "lora": ["lora_alpha"],
}
SAVE_SECONDS = 15 * 60  # between checkpoints, if ppo.save_freq steps take longer
GROW_STEPS = 50  # between attempts to double batches that were halved for lack of memory
FAILED_SAVES = 3  # checkpoints in a row that cannot be written before the run ends
# Numbers that the row of an interrupted step must hold for a resumed run to continue with it.
ROW_NUMBERS = ("reward_mean", "score_mean", "success_rate", "update_kl", "entropy", "games_per_s", "time_total")


@dataclass
class TrainerState:
    """The adaptive state outside of policy, optimizer and curriculum. All of it is in checkpoints."""

    step: int = knob(0, min=0)
    drawn: int = knob(0, min=0, max=2**53)  # index of the next task: none is drawn twice, even if batch_size changes
    kl_coef: float = knob(0.0, min=0)
    bad_updates: int = knob(0, min=0)
    tokens_per_batch: int = knob(0, min=1, max=2**30)
    moments: Moments = field(default_factory=dict)  # of terminal rewards, per game and seat
    before: list[dict[str, Any]] = field(default_factory=list)  # results of the first evaluation
    row: dict[str, Any] | None = None  # metrics of a step whose evaluation was interrupted by a signal
    lr_scale: float = knob(1.0, above=0, max=1)  # factor on the learning rate, set by alarms
    alarms: dict[str, Any] = field(default_factory=dict)  # what the alarms remember

    def check(self, step: int) -> None:
        """Raise ConfigError, before it can cost a step, for what types allow but no run has after ``step``."""
        row, free = self.row or {"step": step}, [r["free_play"] for r in self.before if r.get("free_play")]

        def holds(values: dict[str, Any], *keys: str) -> bool:
            return all(key in values and (values[key] is None or is_number(values[key])) for key in keys)

        sound = {
            "step": self.step == step,
            "moments": all(updates >= 0 and variance >= 0 for updates, _, variance in self.moments.values()),
            "before": all(type(r.get("game")) is str and holds(r, "value", "exact", "share") for r in self.before)
            and all(type(f) is dict and is_number(f.get("value")) and holds(f, "legal_rate") for f in free),
            "alarms": holds(self.alarms, *self.alarms),
            "row": row.get("step") == step
            and (self.row is None or (holds(row, *ROW_NUMBERS) and type(row.get("stage")) is str))
            and type(row.get("alarms", [])) is list
            and ("stage_change" in row) == ("stage_reason" in row),
        }
        if wrong := [name for name, good in sound.items() if not good]:
            raise ConfigError(f"trainer_state.{wrong[0]} is not that of a run after step {step}")


class Checkpointed:
    """The objects of a run, the player made of them, and how checkpoints save and restore them."""

    about: dict[str, Any]  # as in about.json, and when this process began
    exact: dict[int, float]  # tasks of the evaluation with exact values -> operations that these take
    loggers: Loggers
    lock: IO[str] | None = None  # on the run's folder, in the first process
    failed_saves = 0  # in a row
    midway = False  # whether a step has begun to change the weights, which must not be saved then
    saved_at = 0.0  # by time.monotonic
    scored: tuple[int, float | None] = (0, None)  # the step last evaluated or loaded, and its score

    def __init__(self, config: SimpleNamespace, run_dir: Path, ranks: Ranks = LONE) -> None:
        self.config, self.ppo, self.run_dir, self.ranks = config, config.ppo, run_dir, ranks
        if config.env.env_mode != "local":  # a server tells moves at the end: nobody knows which came before a decision
            self.ppo = replace(self.ppo, less_luck=False)
        self.policy = load_policy(config)
        self.base = {**identity(config.model, self.policy.base, self.policy.tokenizer), **programs_digest(config.env)}
        if config.model.adapter:
            self.base["adapter"] = adapter_digest(config.model.adapter)
            utils.check_base(os.path.expanduser(config.model.adapter), self.base, refuse=False)
        if self.ppo.state_coef:
            self.policy.learn_states(state_shapes(config.curriculum))
        self.names = list(trained := self.policy.trainable())  # in the optimizer's order
        self.optimizer = torch.optim.AdamW(trained.values(), lr=self.ppo.learning_rate, weight_decay=0.0, fused=True)
        self.curriculum = Curriculum(config.curriculum, config.run.seed)
        self.evaluated = evaluated(config.curriculum, config.env.env_type)  # task ids, before and after
        self.state = TrainerState(kl_coef=self.ppo.init_kl_coef, tokens_per_batch=self.policy.tokens_per_batch)
        self.metrics = MetricsLog(run_dir / METRICS)
        self.engine = Engine(self.policy, config.env, run_dir) if config.env.use_vllm else None
        self.exact = exact_tasks(config, self.policy.chat)
        self.rehearsal = Rehearsal(self.policy, config.run.seed)
        self.sweeps = Sweeps(self.policy, config.env)

    @property
    def entropy_coef(self) -> float:
        """The entropy bonus of the next step."""
        return self.ppo.entropy_coef * decay(self.ppo, self.state.step, self.ppo.entropy_final)

    # -- who plays -----------------------------------------------------------------------------------------------

    def player(self, stop: StopSignal, trained_on: bool = False) -> Any:
        """The policy, stopped by signals within a rollout or an evaluation; several processes stop between steps only.

        With ``env.use_vllm`` servers play, with the policy's current weights; for games that are ``trained_on``, with
        weights as old as ``env.max_staleness`` allows.
        """
        if self.engine:
            self.engine.stale = self.config.env.max_staleness if trained_on else 0
            self.engine.stop = lambda: stop.received
            if self.ranks.first:
                check_lock(self.run_dir, self.lock)  # in a folder that was moved, nothing is made anew
            self.engine.publish(self.state.step)
            return StoppablePlayer(self.engine, stop)
        return StoppablePlayer(self.policy, stop) if self.ranks.world == 1 else self.policy

    def keep_past(self) -> None:
        """Update the moving average of the policy, and now and then keep a copy as a past self."""
        if self.config.ppo.magnet_coef:
            self.policy.follow(self.state.step)
        every = past_every(self.config.ppo.num_train_steps)
        if "past" in self.config.curriculum.opponents and self.state.step % every == 0:
            name = f"step-{self.state.step:06d}"
            for removed in self.curriculum.add_past(name):
                self.policy.forget_past(removed)
            self.policy.keep_past(name)

    @property
    def frozen(self) -> list[str]:
        """Names of the run's frozen adapters: past selves, and the moving average."""
        return [*self.curriculum.past, *(["average"] if self.config.ppo.magnet_coef and self.state.step else [])]

    def agree_on_batches(self) -> None:
        """Let all processes compute as little at a time as the one with the least memory: the limit in checkpoints."""
        least = -int(self.ranks.largest(-self.policy.tokens_per_batch))
        if least < self.policy.tokens_per_batch:
            self.policy.tokens_per_batch = least

    def grow_batches(self) -> None:
        """Double the batches now and then, since memory may be free again; at the same steps in a resumed run."""
        self.agree_on_batches()
        if self.state.step % GROW_STEPS == 0:
            self.policy.tokens_per_batch = min(2 * self.policy.tokens_per_batch, self.config.model.tokens_per_batch)
        self.state.tokens_per_batch = self.policy.tokens_per_batch

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint, after forcing the metrics to disk so that a resumed run has no gap.

        CheckpointError: it cannot be written, or (RuinedWeightsError) the weights cannot play. TrainingError: its
        folder is not the run's any more.
        """
        self.saved_at = time.monotonic()
        self.state.tokens_per_batch = self.policy.tokens_per_batch  # an evaluation may have halved it
        if not self.ranks.first:
            return self.run_dir
        check_lock(self.run_dir, self.lock)
        self.policy.check()
        trained = sum(parameter.numel() for parameter in self.policy.trainable().values())
        past = {f"{name}/{key}": t for name in self.frozen for key, t in self.policy.past_adapter(name).items()}
        frozen = sum(tensor.numel() for tensor in past.values())
        utils.need_space(self.run_dir, checkpoint_bytes(trained, frozen))
        score = self.score
        if not self.config.ppo.eval_freq:  # then the best is the one furthest in the curriculum, by success rate
            stages = [stage.name for stage in self.curriculum.config.stages]
            rate = self.curriculum.success_rate if self.curriculum.settled else 0.0  # of a few games it may be luck
            score = stages.index(self.curriculum.stage.name) + rate
        self.metrics.sync()
        tensors, rest = utils.pack_optimizer(self.optimizer, self.names)
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
        """What the last digits of a run depend on besides its configuration."""
        card = torch.cuda.get_device_name(self.policy.device) if self.policy.device.type == "cuda" else "cpu"
        return {"threads": torch.get_num_threads(), "processes": self.ranks.world, "torch": torch.__version__,
                "device": card}  # fmt: skip

    def save_players(self) -> Path:
        """Write the trained adapter to ``final``, which is returned, and the moving average, if any, to ``average``."""

        def fill(adapter: str, folder: Path) -> None:
            self.policy.save(folder, adapter=adapter)
            config = json.dumps(self.safe_config, indent=1)  # the run's own copy may change later
            (folder / "run_config.json").write_text(config)
            utils.write_manifest(folder, self.state.step, self.base)

        check_lock(self.run_dir, self.lock)
        if "average" in self.frozen:
            utils.write_directory(self.run_dir / "average", partial(fill, "average"))
        elif (self.run_dir / "average").exists():  # from before the run was extended
            set_aside(self.run_dir / "average")
        return utils.write_directory(self.run_dir / "final", partial(fill, "default"))

    @property
    def safe_config(self) -> dict[str, Any]:
        """The configuration without secrets, as in checkpoints."""
        return redact(config_dict(vars(self.config)), words=False)

    @property
    def score(self) -> float | None:
        """Result of this step's evaluation; None if there was none."""
        step, score = self.scored
        return score if step == self.state.step else None

    @property
    def scale(self) -> str:
        """Digest of what a checkpoint's score depends on besides its weights; only equal scales are comparable."""
        config = self.safe_config
        asked = [config[section][key] for section, keys in PLAY.items() for key in keys]
        played: Any = config["curriculum"]["stages"]
        if self.config.ppo.eval_freq:  # games with exact values are scored as a share of their ceiling
            played = [[first for first, _ in self.evaluated], sorted(self.exact)]
        base = [self.base[part] for part in ("weights", "tokenizer", "games", "programs") if part in self.base]
        return hashlib.sha256(json.dumps([asked, played, base]).encode()).hexdigest()[:16]

    def is_due(self) -> bool:
        """Whether to write a checkpoint now: after ``ppo.save_freq`` steps, an evaluation, or ``SAVE_SECONDS``."""
        overdue = time.monotonic() - self.saved_at > SAVE_SECONDS
        return self.state.step % self.config.ppo.save_freq == 0 or self.scored[0] == self.state.step or overdue

    def save_if_possible(self) -> None:
        """Save between steps. If that fails, training continues without, unless it has failed too often in a row."""
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
        """Save when the run ends; return the checkpoint's path, or the newest sound one and why saving failed."""
        log.debug("what ended the run", exc_info=True)
        if not self.ranks.first:
            return "that of the first process"
        check_lock(self.run_dir, self.lock)
        if self.midway:
            return str(latest_checkpoint(self.run_dir) or "none yet")
        try:
            traceback.clear_frames(sys.exc_info()[2])  # they hold the tensors of a rollout that ran out of memory
            self.policy.forget()
            return str(self.save())
        except RuntimeError as error:  # the tensors of a device that failed may be lost
            return f"{latest_checkpoint(self.run_dir) or 'none'} ({' '.join(str(error).split())})"

    def load(self, path: Path, force: bool = False) -> bool:
        """Restore the state that a checkpoint saved, or the newest one before it whose weights can play.

        ``force``: even if base model, tokenizer, adapter, games or programs have changed, else a ConfigError. Returns
        whether knobs, or the run's folder, have changed. CheckpointError: it is not a whole checkpoint of this run.
        """
        saved = load_checkpoint(path)
        with utils.naming(f"{path}: "):
            base_changed = self._check_base(path, saved.manifest["base"], force)
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
            (state.get("row") or {}).setdefault("update_kl")  # in checkpoints before 2026-11-25
            asked = saved.json("run_config")["ppo"]["batch_size"]  # for each step, until 2026-11-24
            state.setdefault("drawn", saved.step * asked)
            self.state = make(TrainerState, state, "trainer_state")
            self.state.check(saved.step)
            if self.state.row:
                self.state.row = _numbers(self.state.row)
            self.state.alarms = _numbers(self.state.alarms)
            self.curriculum.load_state_dict(saved.json("curriculum"))
            changed = self._drop_what_changed(saved.json("run_config"), base_changed) or base_changed
            comparable = saved.manifest.get("scale", self.scale) == self.scale
            self.scored = (saved.step, saved.manifest.get("score") if comparable else None)
            self._load_frozen(saved)
        for what, now in self.arithmetic.items():
            if arithmetic[what] != now:
                log.warning("saved with %s %s, now %s: the resumed run will not be identical to the bit",
                            what, arithmetic[what], now)  # fmt: skip
        self.policy.tokens_per_batch = min(self.state.tokens_per_batch, self.config.model.tokens_per_batch)
        changed |= (elsewhere := path.parent.resolve() != self.run_dir.resolve())
        changed = bool(self.ranks.largest(changed))  # all have read it: from here on the first may write in its place
        if self.ranks.first:
            abandon_after(self.run_dir, self.state.step)
            self.metrics.truncate_to(self.state.step - (self.state.row is not None), may_lack=elsewhere)
        return changed

    def _load_optimizer(self, moments: dict[str, Any], rest: dict[str, Any]) -> None:
        """Load Adam's state, except for that of a state head which is not trained any more."""
        if not self.config.ppo.state_coef:
            moments = {key: t for key, t in moments.items() if "/state_head." not in key}
            rest = rest | {"names": [name for name in rest["names"] if not name.startswith("state_head.")]}
        utils.unpack_optimizer(self.optimizer, moments, rest, self.names)

    def _drop_what_changed(self, before: dict[str, Any], base_changed: bool) -> bool:
        """Forget adaptive state and results that belong to another configuration or base.

        Returns whether a knob other than ``run.output_dir`` has changed.
        """
        now = self.safe_config

        def differs(was: Any, is_now: dict[str, Any], *keys: str) -> bool:
            return isinstance(was, dict) and any(key in was and was[key] != is_now[key] for key in keys)

        if differs(before.get("ppo"), now["ppo"], "init_kl_coef"):
            self.state.kl_coef = self.config.ppo.init_kl_coef
        if differs(before.get("ppo"), now["ppo"], "learning_rate") or self.ppo.alarms == "off":
            self.state.lr_scale = 1.0
        if not differs(before.get("model"), vars(self.state), "tokens_per_batch"):  # it had not been reduced
            self.state.tokens_per_batch = self.config.model.tokens_per_batch
        play_changed = base_changed or any(differs(before.get(name), now[name], *keys) for name, keys in PLAY.items())
        if play_changed:
            unknown = dict.fromkeys(("value", "exact", "share"))
            self.state.before = [{"game": r["game"], **unknown} for r in self.state.before if self.state.step]
        were, are = ({s["name"]: s for s in c["curriculum"]["stages"]} for c in (before, now))
        name = self.curriculum.stage.name
        if play_changed or differs(were.get(name), are[name], "games", "opponent", "gate_opponent"):
            alarms.forget(self.state.alarms)
            self.curriculum.count_anew()
        return any(not line.startswith("run.output_dir") for line in config_diff(before, now))

    def _load_frozen(self, saved: utils.Checkpoint) -> None:
        expected = self.curriculum.past or "past.safetensors" in saved.manifest["files"]
        tensors = saved.tensors("past") if expected else {}
        for name in self.frozen:
            adapter = {key.removeprefix(f"{name}/"): t for key, t in tensors.items() if key.startswith(f"{name}/")}
            if not adapter and name != "average":
                raise CheckpointError(f"past.safetensors holds no {name}")
            self.policy.keep_past(name, adapter or None)  # a new average begins as a copy of the policy

    def _check_base(self, path: Path, base: dict[str, Any], force: bool) -> bool:
        """Whether another model plays, or other games are played, which is an error without ``force``."""
        parts = "weights", "tokenizer", "adapter", "games", "programs"
        changes = changed_parts(base, self.base, self.config.env, *parts)
        for told in changes.values():
            if not force:
                raise ConfigError(f"--resume: {path}: {told}; --force-config goes on")
            log.warning("%s: %s", path, told)
        return bool(changes.keys() - {"adapter"})  # model.adapter is only where the run began


def _numbers(saved: dict[str, Any]) -> dict[str, Any]:
    """Undo ``finite``: strict JSON holds null for a number that was not finite."""
    return {key: np.nan if value is None else value for key, value in saved.items()}
