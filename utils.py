"""What survives a crash: checkpoints. And for every program: random numbers without state, logs without secrets."""

import fcntl
import glob
import hashlib
import json
import logging
import math
import os
import re
import resource
import shutil
import signal
import struct
import sys
import threading
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

import psutil

from config.reader import ConfigError, load_config, read_file, read_json  # noqa: F401, load_config is handed on
from games import NAMES

log = logging.getLogger(__name__)
PATIENCE = 30.0  # seconds that a program waits for another one to write into the same folder
POLL_SECONDS = 0.5  # between looks at whether a signal has come, while threads are waited for

# ------------------------------------------------------------------------------------------------------- randomness


def uniform(*key: SupportsIndex) -> float:
    """Return a number in [0, 1) that is a function of the integers ``key`` alone (64 bits each, signed).

    Keys of different lengths are independent streams. About 1 µs; the same on every platform.
    """
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


# ---------------------------------------------------------------------------------------------------------- secrets

SECRET_NAME = re.compile(
    r"PASSW|PASSPHRASE|SECRET|API_?KEY|PRIVATE_?KEY|CREDENTIAL|BEARER|AUTHORIZATION|(AUTH|ACCESS)TOKEN|_PWD$|"
    r"(_|^)TOKENS?(_|$)|(_|^)(PASS|PW|PAT|KEY|AUTH|JWT|COOKIE)(_B64|_?\d+)?$",
    re.IGNORECASE,
)
# USER:SECRET@ with a scheme or none, and HTTP's SECRET@; neither ssh://USER@ nor an image's NAME:TAG@sha256:
SECRET_IN_ADDRESS = re.compile(r"(?:(?:://|^)[^/:@\s]*:|https?://(?=[^/:@\s]+:?@))([^/@\s]+?):?@(?!sha256:)")
SECRET_LENGTH = 6  # shorter values are words that occur everywhere
WORD = re.compile(r"[a-z]{1,11}")


def redact(value: Any, words: bool = True) -> Any:
    """Return text, or the strings within dicts and lists, without the secrets that the environment holds.

    ``words``: also where they are short plain words or names of games. What is read again keeps those: else a secret
    "random" would rename an opponent.
    """
    held = [text for name, text in os.environ.items() if SECRET_NAME.search(name)]
    held += [text for place in os.environ.values() for text in SECRET_IN_ADDRESS.findall(place)]
    secrets = {text for text in held if len(text) >= SECRET_LENGTH}
    if not words:
        secrets = {text for text in secrets if not WORD.fullmatch(text) and text not in NAMES}
    return _redact(value, sorted(secrets, key=len, reverse=True)) if secrets else value


def _redact(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "[redacted]")
    elif isinstance(value, Mapping):
        return {key: _redact(item, secrets) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        return [_redact(item, secrets) for item in value]
    return value


# ---------------------------------------------------------------------------------------------- files that are whole


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. One line that names the file."""


class RuinedWeightsError(CheckpointError):
    """What the weights make of a prompt is not finite: they cannot play, and are no checkpoint to go on from."""


def in_threads(function: Callable[[Any], Any], items: Iterable[Any], at_once: int | None) -> list[Any]:
    """What the function makes of the items, in order, by so many threads at a time; a signal ends the wait."""
    pool = ThreadPoolExecutor(at_once)
    try:
        results = []
        for future in [pool.submit(function, item) for item in items]:
            while wait([future], POLL_SECONDS).not_done:
                pass  # in turns: a wait for good would hear of a signal that comes just before it at its end
            results.append(future.result())
        return results
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def bounded(seconds: float, spare_bytes: int) -> Iterator[None]:
    """End what a stranger's file makes a library do, once it takes too long (TimeoutError) or too much (MemoryError).

    A thread that is not the main one cannot be bounded so, and is not.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    limits, held = resource.getrlimit(resource.RLIMIT_AS), psutil.Process().memory_info().vms
    room = min(size for size in (held + spare_bytes, *limits) if size != resource.RLIM_INFINITY)
    room = room if sys.platform == "linux" else limits[0]  # others count address space that nobody uses
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def write_directory(target: Path, fill: Callable[[Path], object]) -> Path:
    """Make ``target`` hold what ``fill(temporary directory)`` writes, wholly or not at all.

    An existing target is replaced. Whatever goes wrong, ``target`` is as before; after a crash ``sweep`` (which
    ``lock_run`` calls) makes it so. Programs that write into one folder wait for each other, half a minute.

    Raises:
        CheckpointError: names the file that could not be written.
    """
    tmp, old = target.with_name(f".tmp-{target.name}"), target.with_name(f".old-{target.name}")
    with naming(f"{target.name}: "), _alone_in(target.parent):
        sweep(target.parent, glob.escape(target.name))  # others there may be anybody's
        try:
            tmp.mkdir(parents=True)
            fill(tmp)
            os.umask(mask := os.umask(0o077))
            for path in [*sorted(tmp.rglob("*")), tmp]:
                if path.is_file():  # safetensors lets nobody else read what it writes
                    path.chmod(0o666 & ~mask)
                _fsync(path)
            if target.exists():
                target.rename(old)
            tmp.rename(target)
            _fsync(target.parent)
        finally:
            sweep(target.parent, glob.escape(target.name))
    return target


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait while another program writes into a folder, where its disk has locks; but not for one that has stopped."""
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
    """Make sure that so many bytes are free on the disk of a folder, which need not be there; else CheckpointError."""
    with naming(f"{folder}: "):
        place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        disk = shutil.disk_usage(place)
    if disk.free < size and disk.total:  # what is no disk has 0 of both
        raise CheckpointError(f"{folder}: {size / 1e6:,.0f} MB are needed, its disk has {disk.free / 1e6:,.0f} MB free")


def write_file(target: Path, content: bytes) -> None:
    """Make the file ``target`` hold ``content``, wholly or not at all; CheckpointError names it where that fails."""
    tmp = target.with_name(f".tmp-{target.name}")
    with naming(f"{target.name}: "), _alone_in(target.parent):
        try:
            _remove(tmp)  # also what is a link to another file
            tmp.touch(exist_ok=False)  # where that failed
            tmp.write_bytes(content)
            _fsync(tmp)
            tmp.replace(target)
        finally:
            _remove(tmp)


def sweep(directory: Path, name: str) -> None:
    """Undo what an interrupted ``write_directory`` or ``write_file`` left in ``directory``; of ``name`` alone."""
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
        if os.path.lexists(path):  # whoever needs its name will tell
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
    """Prefix a failure with where it happened, keeping the cause."""
    try:
        yield
    except ConfigError:  # a line of its own
        raise
    except Exception as exc:  # files of strangers fail in as many ways as they have formats
        text = str(exc) if isinstance(exc, CheckpointError) else f"{type(exc).__name__}: {exc}"
        cause = exc.__cause__ if isinstance(exc, CheckpointError) else exc
        raise CheckpointError(what + " ".join(redact(text).split())) from cause


# ------------------------------------------------------------------------------------------------------ checkpoints

SCHEMA = 1
MANIFEST = "manifest.json"
MOST_FILES = 1000  # of a checkpoint; a forged manifest could have one hashed without end
LIBRARIES = ("numpy", "open_spiel", "peft", "safetensors", "tokenizers", "torch", "transformers")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint directory. Its contents are read when asked for."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps done when it was written."""
        return self.manifest["step"]

    def json(self, name: str) -> Any:
        """Return the document saved as ``name``."""
        return read_json(self.path / f"{name}.json")

    def tensors(self, name: str) -> dict[str, Any]:
        """Return the tensors saved as ``name``, on the CPU."""
        from safetensors.torch import load_file

        with naming(f"{self.path.name}: {name}.safetensors: "):
            return load_file(self.path / f"{name}.safetensors")


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
    """Write ``checkpoint-NNNNNN/`` atomically, then delete those that are no longer to be kept; return its folder.

    Args:
        run_dir: the run's directory, locked by this process.
        step: steps done. An existing checkpoint of the same step is replaced.
        write: writes adapter, value head and tokenizer into the directory it is given (``policy.save``).
        documents: name -> JSON-able object, written to ``<name>.json`` (trainer_state, curriculum, run_config).
        tensors: name -> flat dict of tensors, written to ``<name>.safetensors`` (optimizer).
        base: what the adapter belongs to, for the manifest (model, revision).
        score, scale: at this step, higher is better, and what it is of (JSON-able); each scale has a best of its own.
        keep_last: newest verified checkpoints to keep; 0 keeps all.
        keep_best: checkpoints with the highest scores to keep besides.

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
    """Note what a folder holds, by which ``verify_checkpoint`` finds what has changed since."""
    with naming(f"{MANIFEST}: "):
        manifest = {"schema": SCHEMA, "step": step, "base": dict(base), **more, "versions": versions()}
        manifest["files"] = {p.relative_to(folder).as_posix(): fingerprint(p) for p in folder.rglob("*") if p.is_file()}
        (folder / MANIFEST).write_text(_seal(manifest), encoding="utf-8")


def _write_state(tmp: Path, documents: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]) -> None:
    from safetensors.torch import save_file

    for name, document in documents.items():
        with naming(f"{name}.json: "):
            shown = redact(document, words=False) if name == "run_config" else document  # the others hold no texts
            text = json.dumps(shown, indent=1, allow_nan=False)
            (tmp / f"{name}.json").write_text(text, encoding="utf-8")
    for name, flat in tensors.items():
        with naming(f"{name}.safetensors: "):
            whole = {key: tensor.detach().cpu().contiguous() for key, tensor in flat.items()}
            save_file(whole, tmp / f"{name}.safetensors")


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Verify every byte of the checkpoint in ``path`` and return it; CheckpointError: what is wrong, in one line."""
    if problems := verify_checkpoint(path):
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    return Checkpoint(Path(path), json.loads(read_file(Path(path) / MANIFEST)))


def latest_checkpoint(run_dir: str | Path, before: float = math.inf) -> Path | None:
    """Return the newest checkpoint of a step ``before`` this one that verifies, None where there is none.

    Warns of each that is passed over.
    """
    for path in checkpoints_in(Path(run_dir)):
        if step_of(path) >= before:
            continue
        problems = verify_checkpoint(path)
        if not problems:
            return path
        log.warning("%s is skipped: %s", path, "; ".join(problems))
    return None


def verify_checkpoint(path: str | Path) -> list[str]:
    """Return what is wrong with the checkpoint in ``path``, an empty list if nothing is.

    Its files are untrusted: names that lead out of the directory are refused, and nothing is interpreted before
    its size and sha256 agree with the manifest, whose own digest guards it.
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
    """Return AdamW's state as flat tensors (``exp_avg/<parameter>``) and a JSON-able rest.

    ``names`` are those of its parameters, in the order of its groups.
    """
    state = optimizer.state_dict()["state"]
    flat = {f"{key}/{names[i]}": value for i, part in state.items() for key, value in part.items()}
    return flat, {"names": list(names)}


def unpack_optimizer(optimizer: Any, tensors: Mapping[str, Any], rest: Mapping[str, Any], names: Sequence[str]) -> None:
    """Load what ``pack_optimizer`` returned; settings such as the learning rate stay the optimizer's own.

    Raises:
        CheckpointError: the parameters are not those that were saved, or their moments are none.
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
    """Return the manifest as text, its own digest included."""
    body = json.dumps(manifest, sort_keys=True)
    return json.dumps(manifest | {"digest": hashlib.sha256(body.encode()).hexdigest()}, indent=1, sort_keys=True)


@cache
def versions() -> dict[str, str]:
    """Of Python and of those ``LIBRARIES`` that are installed."""
    installed = {dist.name.lower().replace("-", "_"): dist.version for dist in metadata.distributions()}
    return {"python": sys.version.split()[0], **{name: installed[name] for name in LIBRARIES if name in installed}}


def fingerprint(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _compare(directory: Path, name: str, size: Any, sha256: Any) -> str:
    try:
        path, root = (directory / name).resolve(), directory.resolve()  # in the Hub's cache: a link to ../../blobs
        root = root.parents[1] if root.parent.name == "snapshots" and ".." not in Path(name).parts else root
        if not path.is_relative_to(root):
            return "leads out of the checkpoint"
        if not path.is_file():
            return "missing"
        if (found := path.stat().st_size) != size:
            return f"{found} bytes instead of {size}"
        return "" if fingerprint(path)["sha256"] == sha256 else "sha256 differs from the manifest's"
    except (OSError, ValueError, RuntimeError) as exc:
        return f"unreadable: {exc}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("checkpoint-"))


def checkpoints_in(run_dir: Path) -> list[Path]:
    """Return the directories named as checkpoints, newest first."""
    found = []
    for path in run_dir.glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-[0-9]{6,18}", path.name):
            found.append(path)
        else:
            log.warning("%s is skipped: not a checkpoint's name", path)
    return sorted(found, key=step_of, reverse=True)


def _score_of(path: Path) -> tuple[str, float]:
    """What a checkpoint's score is of, and the score; "", 0: it has none."""
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):  # damaged, or forged
        manifest = json.loads(read_file(path / MANIFEST))
        if type(score := manifest["score"]) in (int, float) and score == score:
            return json.dumps(manifest.get("scale")), float(score)
    return "", 0.0


def _retain(run_dir: Path, keep_last: int, keep_best: int) -> None:
    """Delete all but the newest and, on each scale, the best verified checkpoints; without a verified one, nothing."""
    paths = checkpoints_in(run_dir)
    scores = {path: _score_of(path) for path in paths}
    ranked, best = sorted(paths, key=lambda path: scores[path][1], reverse=True), list[Path]()
    for scale in {scale for scale, _ in scores.values() if scale}:
        best += _first_verified([path for path in ranked if scores[path][0] == scale], keep_best)
    newest = _first_verified(paths, keep_last)
    for path in paths:
        if newest and path not in newest + best and step_of(path) < step_of(newest[0]):
            _remove(path, path.with_name(f".tmp-{path.name}"))  # under its own name, half of it would look damaged


def _first_verified(paths: list[Path], count: int) -> list[Path]:
    return list(islice((path for path in paths if not verify_checkpoint(path)), count))
