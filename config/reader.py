"""Layered JSON configuration, checked against frozen dataclasses; every mistake is reported in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import json
import logging
import math
import os
import re
import reprlib
import stat
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from config import synonyms

log = logging.getLogger(__name__)
PRESETS = Path(__file__).resolve().parent / "presets"
MOST_BYTES = 2**26  # in a file of settings or state
MOST_LEVELS = 100  # of nested lists and objects: deeper ones break recursive functions
LARGEST = 2**53  # integer: larger ones are not all exact in floating point
SECRET_NAME = re.compile(
    r"PASSW|PASSPHRASE|SECRET|API_?KEY|PRIVATE_?KEY|CREDENTIAL|BEARER|AUTHORIZATION|(AUTH|ACCESS)TOKEN|_PWD$|"
    r"(_|^)TOKENS?(_|$)|(_|^)(PASS|PW|PAT|KEY|AUTH|JWT|COOKIE)(_B64|_?\d+)?$",
    re.IGNORECASE,
)
# USER:SECRET@ with or without a scheme, and SECRET@ over HTTP; not ssh://USER@, nor NAME:TAG@sha256: of an image.
SECRET_IN_ADDRESS = re.compile(r"(?:(?:://|^)[^/:@\s]*:|https?://(?=[^/:@\s]+:?@))([^/@\s]+?):?@(?!sha256:)")
SECRET_LENGTH = 6  # shorter values would match everywhere
LIKE = 0.65  # similarity from which on the last part of a key is suggested as the nearest


class ConfigError(ValueError):
    """A mistake of the user's, explained in one line. Programs print it and exit with 2."""


def printable(text: str) -> str:
    """The text as it may be shown: whatever a terminal would obey, but for ends of lines, stands there as an escape."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


@contextlib.contextmanager
def blaming(
    where: str = "", kinds: Any = ValueError, raising: Callable[[str], Exception] = ConfigError
) -> Iterator[None]:
    """Re-raise exceptions of these ``kinds`` as ``raising``, with ``where`` before their message."""
    try:
        yield
    except kinds as error:
        raise raising(printable(f"{where}{error}").replace("\n", "\\n")) from error


def knob(default: Any, *, min: Any = None, max: Any = None, above: Any = None, choices: Iterable[str] = ()) -> Any:
    """A dataclass field with limits (``choices``: for text) on its value or on each item of its list or object."""
    limits = {"min": min, "max": max, "above": above, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=limits)


def load_config(
    sections: Mapping[str, type],
    files: Iterable[str | Path | tuple[str, Any]] = (),
    sets: Iterable[str] = (),
    *,
    skip_unknown_sections: bool = False,
) -> dict[str, Any]:
    """Lay ``files``, then ``sets`` (``"ppo.learning_rate=2e-5"``) over the defaults; return section name -> dataclass.

    A file is an object of sections (or a pair of a name and such an object); later files and sets win, key by key. A
    key outside of its section, or a known synonym, is accepted where it is unambiguous, and logged.
    ``skip_unknown_sections`` is for programs that need only a part of a run's configuration.

    Mistakes, and a ``ValueError`` of a dataclass's ``__post_init__`` (checks across keys), become a ConfigError that
    names the file or ``--set``, the key path, the value, and what is allowed or the nearest valid key.
    """
    layers: list[tuple[_Checker, dict[str, Any]]] = []
    for file in files:
        file, data = file if isinstance(file, tuple) else (file, _read_settings(file))
        if skip_unknown_sections and isinstance(data, dict):
            data = {name: part for name, part in data.items() if name in sections}
        layers.append(_Checker(f"{file}: ", sections).placed(data))
    layers += [_Checker("--set: ", sections).placed(_parse_set(item)) for item in sets]
    last = {path: given for _, given in layers for path in given}  # who corrects all earlier ones
    found = {}
    for section, cls in sections.items():  # in order: making env registers games, which curriculum may name
        values: dict[str, Any] = {}
        for checker, given in layers:
            for path, value in given.items():
                if path.startswith(f"{section}.") and (last[path] is given or isinstance(value, dict)):
                    checker.lay(values, path, value)
        found[section] = _Checker("", sections).make(cls, values, section)
    return found


def _read_settings(file: str | Path) -> Any:
    try:
        return read_json(file)
    except ConfigError as error:
        known, name = {preset.stem: preset for preset in PRESETS.iterdir()}, Path(file).name.removesuffix(".json")
        near = [name] if name in known else difflib.get_close_matches(name, known, 1)
        if not isinstance(error.__cause__, FileNotFoundError) or not near:
            raise
        raise ConfigError(f"{error}; the {'nearest ' * (near[0] != name)}preset is {known[near[0]]}") from error


def make(cls: type, data: Any, path: str) -> Any:
    """Return the dataclass that ``data`` describes; ConfigError names the key below ``path``."""
    checker = _Checker("", {path: cls})
    return checker.make(cls, checker.arguments(cls, data, path), path)


def check_values(config: Any, path: str) -> None:
    """Raise ConfigError for values that a dataclass created in Python holds against the limits of its knobs."""
    _Checker("", {}).arguments(type(config), vars(config), path)


def config_dict(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved configuration as JSON-able objects; ``load_config`` reads them back to equal instances."""
    return json.loads(json.dumps({name: dataclasses.asdict(config) for name, config in configs.items()}))


def config_diff(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """Return a line like ``"ppo.gamma: 0.99 -> 1.0"`` for each difference of two results of ``config_dict``."""
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        where, a, b = f"{path}{key}", old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += config_diff(a, b, f"{where}.")
        elif a != b and _are_parts(a) and _are_parts(b) and len(a) == len(b):  # stages; whole, they are cut off alike
            was, now = ({f"[{i}]": part for i, part in enumerate(parts)} for parts in (a, b))
            lines.append(f"{where}: {', '.join(config_diff(was, now))}")
        elif a != b or (key in old) != (key in new):
            lines.append(f"{where}: {_show(a)} -> {_show(b)}")
    return lines


def read_file(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Read a file; ConfigError if it is missing, longer than ``most`` bytes, or not regular (a pipe may never end)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path}: cannot be read: is no regular file")
            data = file.read(most + 1)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise exc if isinstance(exc, ConfigError) else ConfigError(f"{path}: cannot be read: {exc}") from exc
    if len(data) > most:
        raise ConfigError(f"{path}: cannot be read: is longer than {most:,} bytes")
    return data


def read_text(path: str | Path, most: int = MOST_BYTES, encoding: str = "utf-8-sig") -> str:
    """Read a UTF-8 file with lines that end in "\\n"; ConfigError as for ``read_file``, and for other encodings."""
    try:
        return io.StringIO(read_file(path, most).decode(encoding), newline=None).read()
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc


def read_json(path: str | Path) -> Any:
    """Parse JSON strictly: no duplicate key, no NaN or infinity; ConfigError, with the line if known, if that fails."""
    return parse_json(read_text(path), f"{path}: ")


def parse_json(text: str, source: str) -> Any:
    """Parse JSON as strictly as ``read_json``; the message of a ConfigError begins with ``source``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{source}the key {_show(key)} stands twice in one object")
            found[key] = value
        return found

    def finite(literal: str) -> float:
        if not math.isfinite(float(literal)):
            raise ConfigError(f"{source}{_show(literal)} is not allowed: numbers are finite")
        return float(literal)

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
        if deeper_than(value, MOST_LEVELS):
            raise RecursionError
        return value
    except json.JSONDecodeError as exc:
        found = _show(text[exc.pos :].split("\n")[0].strip()) if text[exc.pos :].strip() else "the end"
        raise ConfigError(f"{source}invalid JSON in line {exc.lineno}, at {found}: {exc.msg}") from exc
    except RecursionError as exc:
        raise ConfigError(f"{source}invalid JSON: nested too deeply") from exc
    except ValueError as exc:
        raise exc if isinstance(exc, ConfigError) else ConfigError(f"{source}invalid JSON: a number too long") from exc


def deeper_than(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested more than ``depth`` levels deep. Descends no further than that."""
    level = [value]
    for _ in range(depth):
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [item for items in inner for item in items]
    return any(isinstance(item, dict | list) for item in level)


def _parse_set(item: str) -> Any:
    key, equals, text = item.partition("=")
    if not equals:
        hint = "" if "." in item else "; a list is written a,b"
        raise ConfigError(f"--set: expected KEY.PATH=VALUE without spaces, not {_show(item)}{hint}")
    value = _word(text, f"--set: {_name(key)}: ")
    for part in reversed(key.strip().split(".", 2)):  # no knob lies deeper
        value = {part: value}
    return value


def _word(text: str, source: str = "--set: ") -> Any:
    try:
        return parse_json(text, source)
    except ConfigError as exc:
        if not isinstance(exc.__cause__, json.JSONDecodeError):
            raise
        if text.startswith(("[", "{")):  # the shell has taken its quotes
            raise ConfigError(f"{exc}; write it between single quotes") from exc
        return text  # on the command line, strings need no quotes


@dataclasses.dataclass(frozen=True)
class _Checker:
    """Turns parsed JSON into dataclass instances; every error message begins with ``source``."""

    source: str
    sections: Mapping[str, type]

    def placed(self, data: Any) -> tuple[_Checker, dict[str, Any]]:
        """Return this checker, and path -> value of everything in an object of sections."""
        if not isinstance(data, dict):
            raise ConfigError(f"{self.source}expected an object with the keys {', '.join(self.sections)}")
        found: dict[str, Any] = {}
        typed_as: dict[str, str] = {}  # path -> the key that the user wrote
        for name, part in data.items():
            section = name if name in self.sections else synonyms.SECTIONS.get(_plain(name), "")
            if section in self.sections and not isinstance(part, dict):
                raise self.wrong(name, part, self.sections[section], {})
            outside = section not in self.sections
            for key, value in ({name: part} if outside else part).items():
                typed = name if outside else f"{name}.{key}"
                ignored, reason = synonyms.GONE.get(typed, ((), ""))
                if ignored is None or value in ignored:
                    log.info("%s%s is left out: %s", self.source, typed, reason)
                    continue
                path = self.place(typed, value, section)
                if path in typed_as:
                    raise self.twice(path, typed_as[path], typed)
                typed_as[path], found[path] = typed, value
        if moved := [f"{_name(typed)} is read as {path}" for path, typed in typed_as.items() if typed != path]:
            log.info("%s%s", self.source, ", ".join(moved))
        return self, found

    def place(self, typed: str, value: Any, section: str) -> str:
        """The path meant by a key as it was typed: in the section given, else in the only one that has such a key."""
        key = typed.rpartition(".")[2]
        for name in dict.fromkeys((key, _plain(key), synonyms.KEYS.get(_plain(key), key))):
            homes = [home for home, cls in self.sections.items() if name in _knobs(cls)]
            if section in homes or len(homes) == 1:
                return f"{section if section in homes else homes[0]}.{name}"
        siblings = [f"{section}.{name}" for name in _knobs(self.sections[section])] if section in self.sections else []
        raise self.unknown(typed, value, siblings or self.sections)

    def lay(self, values: dict[str, Any], path: str, value: Any) -> None:
        """Set the knob at ``path`` among the ``values`` of its section. ``--set`` may write a list as ``a,b``."""
        section, _, key = path.partition(".")
        hint, limits = _knobs(self.sections[section])[key]
        lists = [kind for kind in (hint, *typing.get_args(hint)) if typing.get_origin(kind) in (list, tuple)]
        several = hint in lists or (isinstance(value, str) and "," in value)  # "a" may stay one string, "a,b" may not
        if self.source == "--set: " and lists and several and not isinstance(value, list | dict):
            value = [_word(item) for item in value.split(",")] if isinstance(value, str) else [value]
        if self.source == "--set: " and type(value) is int and hint in (str, str | None) and not limits.get("choices"):
            value = str(value)  # the name of a folder, or a revision, may be all digits
        value = self.convert(value, hint, limits, path)
        values[key] = values.get(key, {}) | value if hint == dict[str, Any] else value  # env.trace: key by key

    def arguments(self, cls: type, data: Any, path: str) -> dict[str, Any]:
        knobs, found, typed_as = _knobs(cls), {}, dict[str, str]()  # key -> as the user wrote it
        if not isinstance(data, dict):
            raise self.wrong(path, data, cls, {})
        for typed, value in data.items():
            key = typed if typed in knobs else synonyms.KEYS.get(_plain(typed), typed)
            if key not in knobs:
                raise self.unknown(f"{path}.{typed}", value, [f"{path}.{name}" for name in knobs])
            if key in typed_as:
                raise self.twice(f"{path}.{key}", typed_as[key], typed)
            typed_as[key], found[key] = typed, self.convert(value, *knobs[key], f"{path}.{key}")
        return found

    def make(self, cls: type, arguments: Mapping[str, Any], path: str) -> Any:
        for field in dataclasses.fields(cls):
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and field.name not in arguments:
                allowed = describe_field(*_knobs(cls)[field.name])
                raise ConfigError(f"{self.source}{path}.{field.name} is missing: expected {allowed}")
        with blaming(f"{self.source}{path}: "):
            return cls(**arguments)

    def convert(self, value: Any, hint: Any, limits: Mapping[str, Any], path: str) -> Any:
        origin, kinds = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            kinds = tuple(kind for kind in kinds if typing.get_origin(kind) is type(value)) or kinds
            if len(kinds) == 1:
                return self.convert(value, kinds[0], limits, path)
            for kind in kinds:
                try:
                    return self.convert(value, kind, limits, path)
                except ConfigError:
                    continue
        elif dataclasses.is_dataclass(hint):
            cls = typing.cast(type, hint)
            made = isinstance(value, cls)  # in Python, where it has checked itself
            return value if made else self.make(cls, self.arguments(cls, value, path), path)
        elif origin in (list, tuple) and isinstance(value, list | tuple):
            if origin is list or kinds[1:] == (...,):
                kinds = kinds[:1] * len(value)
            if len(kinds) == len(value):
                return origin(self.convert(v, kinds[i], limits, f"{path}[{i}]") for i, v in enumerate(value))
        elif origin is dict and isinstance(value, dict):
            return {key: self.convert(v, kinds[1], limits, f"{path}.{key}") for key, v in value.items()}
        elif type(value) is int and abs(value) > LARGEST:
            raise ConfigError(f"{self.source}{_name(path)} = {_show(value)}: expected a number of at most {LARGEST}")
        elif _is_a(value, hint) and _within(value, limits):
            return float(value) if hint is float else value
        raise self.wrong(path, value, hint, limits)

    def wrong(self, path: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> ConfigError:
        return ConfigError(f"{self.source}{_name(path)} = {_show(value)}: expected {describe_field(hint, limits)}")

    def twice(self, path: str, first: str, second: str) -> ConfigError:
        return ConfigError(f"{self.source}{path} is given twice: as {_name(first)} and {_name(second)}")

    def unknown(self, path: str, value: Any, siblings: Iterable[str]) -> ConfigError:
        everywhere = [f"{name}.{key}" for name, cls in self.sections.items() for key in _knobs(cls)]
        typed = path[:99].lower()
        nearest = max([*siblings, *everywhere], key=lambda known: _likeness(typed, known))
        last, suggested = typed.rpartition(".")[2], nearest.rpartition(".")[2]
        word_of = last in suggested.split("_") and typed.partition(".")[0] == nearest.partition(".")[0]
        near = word_of or difflib.SequenceMatcher(None, last, suggested).ratio() >= LIKE
        hint = f"the nearest is {nearest}" if near else "docs/configuration.md lists them"
        hint = synonyms.HINTS.get(_plain(last), hint)
        return ConfigError(f"{self.source}{_name(path)} = {_show(value)}: no such key; {hint}")


def _plain(key: str) -> str:
    return key.strip().lower().replace("-", "_")


@functools.cache
def _knobs(cls: type) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    hints = typing.get_type_hints(cls)
    return {field.name: (hints[field.name], field.metadata) for field in dataclasses.fields(cls)}


def _likeness(path: str, known: str) -> float:
    pairs = (path, known), (path.rpartition(".")[2], known.rpartition(".")[2])
    return sum(difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs)


def _is_a(value: Any, hint: Any) -> bool:
    if hint is float:
        return type(value) in (float, int)
    if type(value) is str and ("\0" in value or value != value.encode(errors="replace").decode()):
        return hint is Any  # null characters and lone surrogates can be neither written to files nor name them
    return hint is Any or type(value) is hint


def _within(value: Any, limits: Mapping[str, Any]) -> bool:
    low, high, above, choices = (limits.get(name) for name in ("min", "max", "above", "choices"))
    if isinstance(value, str):
        return not choices or value in choices
    if type(value) not in (int, float):
        return True
    return (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)


def describe_field(hint: Any, limits: Mapping[str, Any]) -> str:
    """Describe the values that a field of this type and with these limits (of a ``knob``) accepts."""
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_field(kind, limits) for kind in kinds)
    if dataclasses.is_dataclass(hint):
        return f"an object with the keys {', '.join(_knobs(typing.cast(type, hint)))}"
    if origin is tuple and kinds[1:] != (...,):
        return f"a list of [{', '.join(describe_field(kind, limits) for kind in kinds)}]"
    if origin in (list, tuple, dict):
        noun, item = ("an object", kinds[1]) if origin is dict else ("a list", kinds[0])
        return f"{noun} of ({describe_field(item, limits)})"
    if limits.get("choices") and hint is str:
        return f"one of {', '.join(map(_show, limits['choices']))}"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    if hint not in (int, float):
        return names.get(hint, "any value")
    signs = (("min", ">="), ("above", ">"), ("max", "<="))
    bounds = [f"{sign} {limits[name]}" for name, sign in signs if limits.get(name) is not None]
    return " ".join([names[hint], " and ".join(bounds)]).strip()


def _name(path: str) -> str:
    return path if path and path.isprintable() and len(path) <= 80 else _show(path)


def _are_parts(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(isinstance(part, dict) for part in value)


def _show(value: Any) -> str:
    value = without(secrets(), value, keys=True)  # while whole: cut, or with quotes escaped, none is known again
    scalar = value is None or isinstance(value, str | int | float)
    text = printable(json.dumps(value, ensure_ascii=False)) if scalar else reprlib.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def secrets() -> list[str]:
    """The secrets in environment variables, by the variables' names and in addresses; the longest first."""
    found = [text for name, text in os.environ.items() if SECRET_NAME.search(name)]
    found += [text for value in os.environ.values() for text in SECRET_IN_ADDRESS.findall(value)]
    return sorted({text for text in found if len(text) >= SECRET_LENGTH}, key=len, reverse=True)


def without(found: Iterable[str], value: Any, keys: bool = False) -> Any:
    """A text, or nested lists and dicts with the texts in them, with each secret replaced; ``keys``: in keys too."""
    if isinstance(value, str):
        for secret in found:
            value = value.replace(secret, "[redacted]")
    if isinstance(value, list | tuple):
        return [without(found, item, keys) for item in value]
    if isinstance(value, Mapping):
        return {without(found, key) if keys else key: without(found, item, keys) for key, item in value.items()}
    return value
