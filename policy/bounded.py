"""Limits on the time and memory that files of strangers may cost: configurations, weights, templates, adapters."""

import json
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from config.reader import read_file, read_json
from utils import ConfigError

SIZES = {  # upper bounds of numbers in a config.json, by which libraries take memory
    "hidden_size": 2**17, "intermediate_size": 2**19, "num_hidden_layers": 1000, "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12, "vocab_size": 2**22, "max_position_embeddings": 2**31, "num_labels": 2**12,
}  # fmt: skip
READ = ("config.json", "tokenizer_config.json", "generation_config.json")  # what they hold is looked at
TEXTS = (".json", ".jinja", ".txt", ".model")  # files that libraries read whole
REDIRECTS = (  # keys that name files to read
    "transformers_weights", "configuration_files", "fast_tokenizer_files", "gguf_file", "vocab", "merges",
)  # fmt: skip
GROWTH = 2**12  # the most characters that a tokenizer may make of one, if each replacement finds what others made


def check_sizes(written: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError for a number of a model's configuration that is none of its ``SIZES``."""
    for key, most in SIZES.items():
        if key in written and (type(size := written[key]) is not int or not 0 < size <= most):
            raise ConfigError(f"model.model_name: {key} {size!r:.80} of {name} is none of 1 to {most}")


def check_folder(key: str, name: str) -> None:
    """Raise ConfigError where a folder holds a text that is too large or a file that is not a regular one.

    Libraries would wait for a pipe, or read a device without end.
    """
    folder = Path(os.path.expanduser(name))
    if folder.is_file():
        raise ConfigError(f"model.{key}: {name!r} is a file; expected a folder")
    for path in sorted([*folder.glob("*"), *folder.glob("*chat_templates/*")]):
        try:
            text, written = read_file(path) if path.suffix in TEXTS else b"", None
            with suppress(ValueError, RecursionError):  # damaged: whoever reads it says so
                written = json.loads(text.decode()) if path.name in READ else None
            if path.name == "generation_config.json" and not isinstance(written, dict):
                raise ConfigError(f"{path}: is no JSON object")  # transformers would go on without its eos_token_id
            check_redirects(written, name)
            if path.suffix == ".safetensors" and not path.is_file():
                raise ConfigError(f"{path}: is no regular file")
            if path.name.endswith(".safetensors.index.json"):
                check_index(path)
        except ConfigError as error:
            raise ConfigError(f"model.{key}: cannot load {name!r} ({error})") from error


def check_redirects(written: Any, name: str) -> None:
    """Raise ConfigError where a configuration names other files to read than those that are looked at here."""
    for key in REDIRECTS:
        if isinstance(written, dict) and written.get(key) is not None:
            raise ConfigError(f"{key} of {name} names files to read instead of the usual ones; remove it")


def check_growth(tokenizer: Any, name: str) -> None:
    """Raise ConfigError where the replacements of a tokenizer could make a text very much longer.

    ``tokenizer``: of the library tokenizers; None: there is nothing to look at.
    """
    for part in (tokenizer.normalizer, tokenizer.decoder) if tokenizer else ():
        steps, most = [json.loads(part.__getstate__())] if part else [], 1
        while steps:
            step = steps.pop()
            inner = [value if isinstance(value, list) else [value] for value in step.values()]
            steps += [item for item in chain(*inner) if isinstance(item, dict)]
            most *= max(1, *(len(step.get(key) or "") for key in ("content", "prepend")))
        if most > GROWTH:
            raise ConfigError(f"model.model_name: the tokenizer of {name} may make {most} characters of one; "
                              f"expected at most {GROWTH}")  # fmt: skip


def check_weights(architecture: Any, files: Iterable[Path], name: str, bits: int = 4) -> None:
    """Raise ConfigError where files hold fewer weights, even in so few bits each, than a configuration names.

    Libraries make room for all of them, and fill it with random numbers.
    """
    held, size = sum(path.stat().st_size for path in files), architecture.hidden_size
    heads = architecture.num_attention_heads + architecture.num_key_value_heads
    head = getattr(architecture, "head_dim", None) or size // architecture.num_attention_heads
    layer = 3 * architecture.intermediate_size + 2 * heads * head
    named = size * (architecture.vocab_size + architecture.num_hidden_layers * layer)
    if 0 < 8 * held < bits * named:
        raise ConfigError(f"model.model_name: {name} holds {held:,} bytes of weights, and its configuration names "
                          f"more than {named:,} numbers")  # fmt: skip


def check_index(path: Path) -> None:
    """Raise ConfigError where an index of weights names anything but files beside it."""
    shards = index.get("weight_map") if isinstance(index := read_json(path), dict) else None
    for shard in shards.values() if isinstance(shards, dict) else ():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ConfigError(f"{path}: names {shard!r:.80}: expected a file beside it")


@contextmanager
def bounded(seconds: float, spare_bytes: int) -> Iterator[None]:
    """Limit the time (TimeoutError) and the memory (MemoryError) a library may spend on an untrusted file.

    Has no effect outside of the main thread, where signals are not delivered.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    limits, held = resource.getrlimit(resource.RLIMIT_AS), psutil.Process().memory_info().vms
    room = min(size for size in (held + spare_bytes, *limits) if size != resource.RLIM_INFINITY)
    room = room if sys.platform == "linux" else limits[0]  # other systems count reserved address space
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def apart(work: Callable[[], str], seconds: float, spare_bytes: int) -> str:
    """The text that ``work`` makes in a process of its own, ``bounded``, and killed where that does not end it.

    ``bounded`` alone does not: no handler of a signal runs while C compares two nested lists, which may take for ever.

    Only Linux forks safely; elsewhere it is bounded alone. RuntimeError: what went wrong in that process.
    """
    if sys.platform != "linux":
        with bounded(seconds, spare_bytes):
            return work()
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        most = math.ceil(seconds) + 1  # of the processor: nobody kills it if this process is killed first
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        try:
            with bounded(seconds, spare_bytes):
                theirs.send((work(), ""))
        except BaseException as error:
            theirs.send(("", f"{type(error).__name__} {error}"))

    child = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    child.start()
    theirs.close()
    text, problem = "", f"TimeoutError it takes more than {seconds:g} s"
    try:
        if ours.poll(seconds + 1):
            text, problem = ours.recv()
    except EOFError:
        problem = "it ended the process"
    finally:
        child.kill()
        child.join()
        ours.close()
    if problem:
        raise RuntimeError(problem)
    return text
