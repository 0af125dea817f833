"""A run's folder: which checkpoint of it may be resumed with what, and what of it is set aside."""

import contextlib
import itertools
import json
import logging
import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import utils
from config.reader import ConfigError, blaming, config_diff, read_file, read_json
from config.synonyms import GONE
from envs.config import EnvConfig
from envs.trace import programs_digest
from games import own_digest
from training.config import SECTIONS, past_every
from training.metrics import MOST_BYTES
from utils import CheckpointError, load_checkpoint, redact

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
AT_THE_END = "summary.json", "episodes.jsonl", "final", "average"  # written after the last step
# A resumed run may change these freely. Games of one's own may move to another folder: their digest must be the same.
CONTINUES = (
    "ppo.num_train_steps", "ppo.learning_rate", "ppo.lr_", "ppo.save_freq", "ppo.eval_freq", "ppo.alarms",
    "env.games_path", "env.env_url", "env.env_timeout", "env.vllm_base_url",
    "run.output_dir", "run.logger", "run.keep", "run.threads",
)  # fmt: skip


def changed_parts(saved: dict[str, Any], now: dict[str, Any], env: EnvConfig, *parts: str) -> dict[str, str]:
    """Those of ``parts`` of a run's base whose ``saved`` digests are not those of ``now``, each with what to say."""
    owners = {"games": env.games_path, "programs": env.trace.get("source")}
    changes = [part for part in parts if saved.get(part, now.get(part)) != now.get(part)]
    told = {part: owners.get(part, now.get("model")) or "this program" for part in changes}
    return {part: f"the {part} of {owner} are not those that it was trained with" for part, owner in told.items()}


def set_aside(path: Path, copied: bool = False) -> str:
    """Rename (or copy) a run's file or folder to ``abandoned-NAME``, numbered if that exists; return the new name."""
    first = path.with_name(f"abandoned-{path.name.removeprefix('checkpoint-')}")
    names = itertools.chain([first], (first.with_stem(f"{first.stem}-{n}") for n in itertools.count(2)))
    target = next(name for name in names if not os.path.lexists(name))
    if copied:
        utils.write_file(target, read_file(path, MOST_BYTES))
    else:
        path.rename(target)
    return target.name


def abandon_after(run_dir: str | Path, step: int) -> None:
    """Set aside everything after ``step``, from which a run resumes: checkpoints, metrics, final results."""
    directory = Path(run_dir)
    later = [path for path in utils.checkpoints_in(directory) if utils.step_of(path) > step]
    if not later:
        return
    metrics = directory / METRICS
    names = [set_aside(metrics, copied=True)] if metrics.exists() else []  # the run continues to write to it
    # The checkpoints last: as long as one is left, a resume after a kill repeats all of this.
    names += [set_aside(path) for name in AT_THE_END if (path := directory / name).exists()]
    names += [set_aside(path) for path in later]
    log.warning("%s: set aside as %s: the run goes on from step %d", directory, ", ".join(names), step)


def _take_folder(run_dir: Path, resume: str | None, look_only: bool) -> None:
    """Set aside the leftovers of a run without checkpoints; ConfigError for files that must not be overwritten."""
    for path in (run_dir / "final", run_dir / "average"):  # replaced at the end of the run
        if path.is_dir() and any(path.iterdir()) and not (path / "adapter_config.json").exists():
            raise ConfigError(f"run.output_dir: {path} is there and is no adapter: it would be replaced; name another")
    if resume is None or Path(resume).parent.resolve() != run_dir.resolve():
        if (run_dir / "adapter_config.json").exists() or any(run_dir.glob("*.safetensors")):
            raise ConfigError(f"run.output_dir: {run_dir} is a model, checkpoint or player, which a run would damage; "
                              "--resume goes on from a checkpoint, --output-dir starts another run")  # fmt: skip
        if any(run_dir.glob("checkpoint-*")):
            ways = "--resume goes on" if resume is None else f"--resume {run_dir} goes on"
            ways += ", --output-dir starts another"
            raise ConfigError(f"run.output_dir: {run_dir} holds checkpoints; {ways}")
        kept = [METRICS, "wandb_id", *AT_THE_END]
        if not (run_dir / "about.json").exists():  # then no run was here, and these are the user's files
            kept += ["run_config.json", "curves.png", "report.html", "report.md"]
        left = [path for name in kept if (path := run_dir / name).exists()]
        if not look_only and (names := [set_aside(path) for path in left if path.is_dir() or path.stat().st_size]):
            log.warning("%s holds no checkpoint: what a run left there is set aside as %s", run_dir, ", ".join(names))


def find_checkpoint(
    run_dir: Path, resume: str | None, resolved: dict[str, Any], force_config: bool, look_only: bool = False
) -> Path | None:
    """The checkpoint to resume from; None for a fresh run, before which the leftovers in its folder are set aside.

    ``look_only``: neither set anything aside nor log anything. ConfigError: another run would be overwritten, or knobs
    that may not change, games or programs have changed since.
    """
    _take_folder(run_dir, resume, look_only or resume is not None)  # a resume may still be refused
    if resume is None:
        return None
    path = Path(resume)
    with blaming("--resume: ", CheckpointError):
        saved, done = (checkpoint := load_checkpoint(path)).json("run_config"), checkpoint.step
    for section, cls in SECTIONS.items():  # knobs newer than the checkpoint had their defaults
        defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        defaults |= {f.name: f.default_factory() for f in fields(cls) if f.default_factory is not MISSING}
        held = {key: x for key, x in saved.get(section, {}).items() if f"{section}.{key}" not in GONE}
        saved[section] = json.loads(json.dumps(defaults)) | held
    changed = config_diff(saved, redact(resolved, words=False))
    refused = [line for line in changed if not line.startswith(CONTINUES)]
    if refused and not force_config:
        raise ConfigError(f"--resume: the configuration has changed since {path.name}: {'; '.join(refused)}; "
                          "--force-config goes on with the new one")  # fmt: skip
    if resolved["ppo"]["num_train_steps"] < done:
        raise ConfigError(f"--resume: ppo.num_train_steps = {resolved['ppo']['num_train_steps']}: {path.name} has done "
                          f"{done} already; expected the last step of the whole run, not how many to add")  # fmt: skip
    env = EnvConfig(**resolved["env"])
    now = {"games": own_digest()} | programs_digest(env)  # the rest of its base is not loaded yet
    with blaming("--resume: ", CheckpointError), utils.naming(f"{path}: "):
        changes = changed_parts(checkpoint.manifest["base"], now, env, "games", "programs")
    if changes and not force_config:
        raise ConfigError(f"--resume: {path}: {next(iter(changes.values()))}; --force-config goes on")
    if look_only:
        return path
    _take_folder(run_dir, resume, look_only=False)
    if any(line.startswith("ppo.num_train_steps") for line in changed):
        changed += _moved_with_the_end(saved, resolved)
    changed = [line for line in changed if not line.startswith("run.output_dir")]
    place = f" in {run_dir}, without the earlier rows of metrics" if path.resolve().parent != run_dir.resolve() else ""
    log.info("goes on from %s%s%s", path, place, f" with {'; '.join(changed)}" if changed else "")
    return path


def _moved_with_the_end(saved: dict[str, Any], resolved: dict[str, Any]) -> list[str]:
    """What else another last step changes."""
    moved = [f"ppo.{key} is now reached at the new last step"
             for key in ("lr_final", "entropy_final") if resolved["ppo"][key] != 1]  # fmt: skip
    was, every = (past_every(config["ppo"]["num_train_steps"]) for config in (saved, resolved))
    plays = any("past" in stage["opponent"] for stage in resolved["curriculum"]["stages"])
    return [*moved, *([f"a past self is now kept every {every} steps"] if plays and every != was else [])]


def is_finished(run_dir: Path, checkpoint: str, resolved: dict[str, Any], force_config: bool) -> bool:
    """Whether the run ended with this checkpoint, and neither more steps nor other knobs are requested."""
    step, ended = load_checkpoint(checkpoint).step, None
    with contextlib.suppress(ConfigError, TypeError, KeyError):  # missing or damaged: written again
        ended = read_json(run_dir / "summary.json")["steps"]  # perhaps of an earlier end that the run has passed
    there = all((run_dir / name).exists() for name in ("episodes.jsonl", "final"))
    whole = step >= resolved["ppo"]["num_train_steps"] and ended == step and there
    try:
        return whole and bool(find_checkpoint(run_dir, checkpoint, resolved, False, look_only=True))
    except ConfigError:
        if not force_config:
            raise
        return False  # the end is made again, with the other knobs
