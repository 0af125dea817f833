"""Checkpoints that survive a crash; for every program, stateless random numbers and the redaction of secrets."""

import fcntl
import glob
import hashlib
import json
import logging
import math
import os
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, SupportsIndex

from config.reader import ConfigError, load_config, printable, read_file, read_json, secrets, without  # noqa: F401
from games import NAMES

log = logging.getLogger(__name__)
PATIENCE = 30.0  # seconds to wait while another program writes into the same folder
POLL_SECONDS = 0.5  # between checks for a signal while waiting for threads

# ------------------------------------------------------------------------------------------------------- randomness


def uniform(*key: SupportsIndex) -> float:
    """Return a number in [0, 1) that depends on the integers ``key`` (signed, 64 bits each) and nothing else.

    Keys of different lengths are independent streams. About 1 µs; the same on every platform.
    """
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


# ---------------------------------------------------------------------------------------------------------- secrets

WORD = re.compile(r"[a-z]{1,11}")


def redact(value: Any, words: bool = True) -> Any:
    """Replace the secrets found in environment variables, in a text or in all strings of nested dicts and lists.

    ``words=False`` spares secrets that are short plain words or names of games. It is for files that are read back,
    where a password "random" must not rename an opponent.
    """
    found = secrets() if words else [s for s in secrets() if not WORD.fullmatch(s) and s not in NAMES]
    return without(found, value) if found else value


# ----------------------------------------------------------------------------------------------------- atomic files


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message is one line that names the file."""


class RuinedWeightsError(CheckpointError):
    """The weights turn a prompt into numbers that are not finite: they cannot play, and training cannot resume."""


def in_threads(function: Callable[[Any], Any], items: Iterable[Any], at_once: int | None) -> list[Any]:
    """Map the function over the items in ``at_once`` threads (None: the default), in order; a signal ends the wait."""
    pool = ThreadPoolExecutor(at_once)
    try:
        results = []
        for future in [pool.submit(function, item) for item in items]:
            while wait([future], POLL_SECONDS).not_done:
                pass  # a wait without a timeout would not notice a signal that arrives just before it
            results.append(future.result())
        return results
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def write_directory(target: Path, fill: Callable[[Path], object]) -> Path:
    """Replace ``target`` atomically with what ``fill(temporary directory)`` writes.

    If anything fails, a CheckpointError names the file, and ``target`` stays as it was; after a crash ``sweep`` (called
    by ``lock_run``) restores it. Programs that write into one folder wait for each other, up to ``PATIENCE`` seconds.
    """
    tmp, old = target.with_name(f".tmp-{target.name}"), target.with_name(f".old-{target.name}")
    with naming(f"{target.name}: "), _alone_in(target.parent):
        sweep(target.parent, glob.escape(target.name))  # and nothing else: the folder may hold other people's files
        try:
            tmp.mkdir(parents=True)
            fill(tmp)
            share(tmp)
            for path in [*sorted(tmp.rglob("*")), tmp]:
                _fsync(path)
            if target.exists():
                target.rename(old)
            else:
                _remove(target)  # a link that leads nowhere
            tmp.rename(target)
            _fsync(target.parent)
        finally:
            sweep(target.parent, glob.escape(target.name))
    return target


def share(folder: Path) -> None:
    """Let those read the files in a folder whom the umask lets; safetensors writes for their owner alone."""
    os.umask(mask := os.umask(0o077))
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait while another program writes into a folder, if its disk supports locks; give up after ``PATIENCE``."""
    with ExitStack() as stack:
        with suppress(OSError):
            descriptor, until = os.open(folder, os.O_RDONLY), time.monotonic() + PATIENCE
            stack.callback(os.close, descriptor)
            while time.monotonic() < until:
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.02)
            else:
                log.warning("%s: another program has locked it; it is not waited for any longer", folder)
        yield


def need_space(folder: Path, size: int) -> None:
    """Raise CheckpointError unless ``size`` bytes are free on the disk of a folder, which need not exist yet."""
    with naming(f"{folder}: "):
        place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        disk = shutil.disk_usage(place)
    if disk.free < size and disk.total:  # virtual file systems report 0 for both
        raise CheckpointError(f"{folder}: {size / 1e6:,.0f} MB are needed, its disk has {disk.free / 1e6:,.0f} MB free")


def write_file(target: Path, content: bytes) -> None:
    """Replace the file ``target`` atomically; CheckpointError names it if that fails."""
    tmp = target.with_name(f".tmp-{target.name}")
    with naming(f"{target.name}: "), _alone_in(target.parent):
        try:
            _remove(tmp)  # it may be a link to another file
            tmp.touch(exist_ok=False)  # fails if it could not be removed
            tmp.write_bytes(content)
            _fsync(tmp)
            tmp.replace(target)
        finally:
            _remove(tmp)


def sweep(directory: Path, name: str) -> None:
    """Undo what an interrupted ``write_directory`` or ``write_file`` of ``name`` (a glob) left in ``directory``."""
    for path in sorted(directory.glob(f".old-{name}")):
        if not (target := path.with_name(path.name.removeprefix(".old-"))).exists():
            path.rename(target)
        else:
            _remove(path)
    for path in sorted(directory.glob(f".tmp-{name}")):
        _remove(path)


def _remove(path: Path, renamed: Path | None = None) -> None:
    try:
        path = path.rename(renamed) if renamed else path
        (shutil.rmtree if path.is_dir() and not path.is_symlink() else os.unlink)(path)
    except OSError as exc:
        if os.path.lexists(path):  # if the name is needed, its next use fails
            log.warning("%s cannot be deleted: %s", path, exc.strerror)


def _fsync(path: Path) -> None:
    with naming(f"{path.name}: "):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn any exception into a CheckpointError that begins with ``what``, keeping the cause."""
    try:
        yield
    except ConfigError:  # its message says where already
        raise
    except Exception as exc:  # each format of an untrusted file fails in its own ways
        text = str(exc) if isinstance(exc, CheckpointError) else f"{type(exc).__name__}: {exc}"
        cause = exc.__cause__ if isinstance(exc, CheckpointError) else exc
        raise CheckpointError(what + printable(" ".join(redact(text).split()))) from cause


# ------------------------------------------------------------------------------------------------------ checkpoints

SCHEMA = 1
MANIFEST = "manifest.json"
LARGE = 2**34  # bytes of a file that must be there and not be holes
MOST_FILES = 1000  # in a checkpoint: a forged manifest could keep the hashing busy for ever
LIBRARIES = ("bitsandbytes", "numpy", "open_spiel", "peft", "safetensors", "tokenizers", "torch", "transformers")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint directory, whose contents are read on demand."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps completed when it was written."""
        return self.manifest["step"]

    def json(self, name: str) -> Any:
        """Read the document saved as ``name``."""
        return read_json(self.path / f"{name}.json")

    def tensors(self, name: str) -> dict[str, Any]:
        """Read the tensors saved as ``name``, onto the CPU."""
        from safetensors.torch import load_file

        with naming(f"{self.path.name}: {(file := f'{name}.safetensors')}: "):
            if file not in self.manifest["files"]:
                raise CheckpointError("is none of its files")
            return load_file(self.path / file)


def save_checkpoint(
    run_dir: str | Path,
    step: int,
    write: Callable[[Path], None],
    *,
    documents: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Any]],
    base: Mapping[str, Any] | None = None,
    score: float | None = None,
    scale: Any = None,
    keep_last: int = 0,
    keep_best: int = 1,
) -> Path:
    """Write ``checkpoint-NNNNNN/`` atomically, then delete superseded checkpoints; return the folder.

    Args:
        run_dir: the run's directory, locked by this process.
        step: steps completed. An existing checkpoint of the same step is replaced.
        write: writes adapter, value head and tokenizer into the directory it is given (``policy.save``).
        documents: name -> JSON-able object, written to ``<name>.json`` (trainer_state, curriculum, run_config).
        tensors: name -> flat dict of tensors, written to ``<name>.safetensors`` (optimizer, past).
        base: what the adapter belongs to, for the manifest (model, revision).
        score, scale: score at this step (higher is better), and what it measures (JSON-able).
        keep_last: newest verified checkpoints to keep; 0 keeps all.
        keep_best: checkpoints with the highest scores to keep besides, on each scale.

    Raises:
        CheckpointError: names the file. Nothing is left behind and older checkpoints are untouched.
    """

    def fill(tmp: Path) -> None:
        with naming("adapter and tokenizer: "):
            write(tmp)
        _write_state(tmp, documents, tensors)
        write_manifest(tmp, step, base or {}, score=score, scale=scale)

    path = write_directory(Path(run_dir) / f"checkpoint-{step:06d}", fill)
    with naming("older checkpoints: "):
        _retain(Path(run_dir), keep_last, keep_best)
    return path


def write_manifest(folder: Path, step: int, base: Mapping[str, Any], **more: Any) -> None:
    """Record the size and hash of each file in a folder, for ``verify_checkpoint`` to compare."""
    with naming(f"{MANIFEST}: "):
        manifest = {"schema": SCHEMA, "step": step, "base": dict(base), **more, "versions": versions()}
        manifest["files"] = {p.relative_to(folder).as_posix(): fingerprint(p) for p in folder.rglob("*") if p.is_file()}
        (folder / MANIFEST).write_text(_seal(manifest), encoding="utf-8")


def _write_state(tmp: Path, documents: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]) -> None:
    from safetensors.torch import save_file

    for name, document in documents.items():
        with naming(f"{name}.json: "):
            safe = redact(document, words=False) if name == "run_config" else document  # the others hold no free text
            text = json.dumps(safe, indent=1, allow_nan=False)
            (tmp / f"{name}.json").write_text(text, encoding="utf-8")
    for name, flat in tensors.items():
        with naming(f"{name}.safetensors: "):
            contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in flat.items()}
            save_file(contiguous, tmp / f"{name}.safetensors")


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Verify every byte of the checkpoint in ``path``; CheckpointError says in one line what is wrong with it."""
    if problems := verify_checkpoint(path):
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    return Checkpoint(Path(path), json.loads(read_file(Path(path) / MANIFEST)))


def check_base(name: str, found: Mapping[str, str | None], refuse: bool = True) -> None:
    """Make sure that the checkpoint in a folder plays on its own base and tokenizer; ``found``: their ``identity``.

    ConfigError: the model of that name has changed since (a warning without ``refuse``). A base of another name only
    causes a warning: it may be the same in another precision. So do other games.
    """
    if not (manifest := Path(name) / MANIFEST).exists():
        return
    trained = read_json(manifest).get("base")
    if not isinstance(trained, dict):
        raise ConfigError(f"{manifest}: base is no object")
    for part in ("weights", "tokenizer"):
        if trained.get(part, found[part]) != found[part]:
            problem = f"{name}: the {part} of {found['model']} are not those that it was trained with"
            if refuse and found["model"] == trained.get("model"):
                raise ConfigError(f"{problem}; --set model.model_name=... chooses another base")
            log.warning("%s", problem)
    if trained.get("games") not in (None, "", found.get("games")):
        log.warning("%s: your own games have changed since it was trained, so other games are played", name)


def latest_checkpoint(run_dir: str | Path, before: float = math.inf) -> Path | None:
    """Return the newest checkpoint that verifies, of a step smaller than ``before``; warn about each one skipped."""
    found = checkpoints_in(Path(run_dir))
    for path in sorted({*Path(run_dir).glob("checkpoint-*")} - {*found}):
        log.warning("%s is skipped: not a checkpoint's name", path)
    for path in found:
        if step_of(path) < before:
            if not (problems := verify_checkpoint(path)):
                return path
            log.warning("%s is skipped: %s", path, "; ".join(problems))
    return None


def verify_checkpoint(path: str | Path) -> list[str]:
    """Return the problems of the checkpoint in ``path``; an empty list if it is sound.

    Its files are untrusted: names that lead out of the directory are refused, and no file is parsed before its size
    and sha256 match the manifest, which carries its own digest.
    """
    path = Path(path)
    try:
        raw = read_file(path / MANIFEST)
    except ConfigError as exc:
        return [f"{MANIFEST}: {str(exc).rpartition('cannot be read: ')[2]}"]
    try:
        manifest = json.loads(raw)
        sealed = _seal({key: value for key, value in manifest.items() if key != "digest"}).encode() == raw
        files = {name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}
        schema, step = manifest["schema"], manifest["step"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return [f"{MANIFEST}: damaged"]
    if not sealed or type(step) is not int or len(files) > MOST_FILES:
        return [f"{MANIFEST}: damaged"]
    if schema != SCHEMA:
        return [f"{MANIFEST}: schema {schema}, but this program reads {SCHEMA}"]
    return [f"{name}: {problem}" for name, known in files.items() if (problem := _compare(path, name, *known))]


def pack_optimizer(optimizer: Any, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return AdamW's state as flat tensors (``exp_avg/<parameter>``) and a JSON-able remainder.

    ``names`` are the parameters' names, in the order of the optimizer's groups.
    """
    state = optimizer.state_dict()["state"]
    flat = {f"{key}/{names[i]}": value for i, part in state.items() for key, value in part.items()}
    return flat, {"names": list(names)}


def unpack_optimizer(optimizer: Any, tensors: Mapping[str, Any], rest: Mapping[str, Any], names: Sequence[str]) -> None:
    """Load what ``pack_optimizer`` returned; the optimizer keeps its own settings, such as the learning rate.

    CheckpointError: other parameters were saved, or tensors that cannot be their moments.
    """
    with naming("optimizer: "):
        if list(names) != rest["names"]:
            changed = sorted(set(names) ^ set(rest["names"])) or ["their order"]
            raise ValueError(f"saved for other parameters than the model's: {changed[0]} differs")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            at = names.index(name)
            fits = value.shape == (() if kind == "step" else parameters[at].shape) and value.is_floating_point()
            if not fits or not value.isfinite().all() or (kind != "exp_avg" and (value < 0).any()):
                raise ValueError(f"{key} is none of {name}")
            state.setdefault(at, {})[kind] = value
        if any(part.keys() != {"step", "exp_avg", "exp_avg_sq"} for part in state.values()):
            raise ValueError("moments are missing")
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def _seal(manifest: dict[str, Any]) -> str:
    """Serialise the manifest together with its own digest."""
    body = json.dumps(manifest, sort_keys=True)
    return json.dumps(manifest | {"digest": hashlib.sha256(body.encode()).hexdigest()}, indent=1, sort_keys=True)


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the installed ``LIBRARIES``."""
    found = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def fingerprint(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file; ConfigError: it is large and mostly holes, so reading it may never end."""
    stat = path.stat()
    if stat.st_size > LARGE and stat.st_blocks * 512 < stat.st_size / 2:
        raise ConfigError(f"{path}: of its {stat.st_size:,} bytes most are holes")
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _compare(directory: Path, name: str, size: Any, sha256: Any) -> str:
    try:
        path = (directory / name).resolve()
        if not stays_in(directory, name):
            return "leads out of the checkpoint"
        if not path.is_file():
            return "missing"
        if (found := path.stat().st_size) != size:
            return f"{found} bytes instead of {size}"
        return "" if fingerprint(path)["sha256"] == sha256 else "sha256 differs from the manifest's"
    except (OSError, ValueError, RuntimeError) as exc:
        return f"unreadable: {exc}"


def stays_in(directory: Path, name: str) -> bool:
    """Whether a file lies in the directory, followed through links: in the Hub's cache they lead to ../../blobs."""
    path, root = (directory / name).resolve(), directory.resolve()
    root = root.parents[1] if root.parent.name == "snapshots" and ".." not in Path(name).parts else root
    return path.is_relative_to(root)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("checkpoint-"))


def checkpoints_in(run_dir: Path) -> list[Path]:
    """Return the directories named like checkpoints, newest first."""
    found = [path for path in run_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]{6,18}", path.name)]
    return sorted(found, key=step_of, reverse=True)


def _score_of(path: Path) -> tuple[str, float]:
    """The scale and the value of a checkpoint's score; ("", 0) if it has none."""
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):  # damaged or forged
        manifest = json.loads(read_file(path / MANIFEST))
        if type(score := manifest["score"]) in (int, float) and score == score:
            return json.dumps(manifest.get("scale")), float(score)
    return "", 0.0


def _retain(run_dir: Path, keep_last: int, keep_best: int) -> None:
    """Keep the newest verified checkpoints and the best ones on each scale; if none verifies, delete nothing."""
    paths = checkpoints_in(run_dir)
    if not (kept := _first_verified(paths, keep_last)):
        return
    newest, scores = step_of(kept[0]), {path: _score_of(path) for path in paths}
    ranked = sorted(paths, key=lambda path: scores[path][1], reverse=True)
    for scale in {scale for scale, _ in scores.values() if scale}:
        kept += _first_verified([path for path in ranked if scores[path][0] == scale], keep_best)
    for path in paths:
        if path not in kept and step_of(path) < newest:
            _remove(path, path.with_name(f".tmp-{path.name}"))  # half deleted under its own name, it would look damaged


def _first_verified(paths: list[Path], count: int) -> list[Path]:
    return list(islice((path for path in paths if not verify_checkpoint(path)), count))
