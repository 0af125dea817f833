"""Configuration: JSON files laid over each other and checked, in one line an error, against frozen dataclasses."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import logging
import math
import os
import reprlib
import stat
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from config import synonyms

log = logging.getLogger(__name__)
MOST_BYTES = 2**26  # of a file of settings or state
MOST_LEVELS = 100  # of lists and objects in one: what is deeper breaks whatever walks it
LARGEST = 2**53  # integer: the last up to which floating point numbers tell all apart
LIKE = 0.65  # least likeness of a key's last part to one that is named as the nearest


class ConfigError(ValueError):
    """A mistake of the user's, told in one line. Programs print it and exit with 2."""


@contextlib.contextmanager
def blaming(
    where: str = "", kinds: Any = ValueError, raising: Callable[[str], Exception] = ConfigError
) -> Iterator[None]:
    """Raise anew, with where it was, what is raised inside: exceptions of these ``kinds``."""
    try:
        yield
    except kinds as error:
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in f"{where}{error}")  # of files' names, say
        raise raising(line) from error


def knob(default: Any, *, min: Any = None, max: Any = None, above: Any = None, choices: Iterable[str] = ()) -> Any:
    """A dataclass field with limits (``choices``: of text) that hold for the value or each item of a list or object."""
    limits = {"min": min, "max": max, "above": above, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=limits)


def load_config(
    sections: Mapping[str, type],
    files: Iterable[str | Path | tuple[str, Any]] = (),
    sets: Iterable[str] = (),
    *,
    skip_unknown_sections: bool = False,
) -> dict[str, Any]:
    """Lay ``files``, then ``sets`` (``"ppo.learning_rate=2e-5"``) over the defaults of the sections' dataclasses.

    A file is an object of sections (or a pair of a name and such an object); later files and sets win, key by key. A
    key that stands outside of its section, or is a known synonym, is taken where the meaning is plain, and one line
    tells as which. A ``ValueError`` of a dataclass's ``__post_init__`` (checks across keys) is reported like any other
    mistake. ``skip_unknown_sections`` is for programs that need only a part of a run's configuration.

    Returns:
        Section name -> instance of its dataclass.

    Raises:
        ConfigError: names the file or ``--set``, the key path, the value, what is allowed, the nearest valid key.
    """
    layers: list[tuple[_Checker, dict[str, Any]]] = []
    for file in files:
        file, data = file if isinstance(file, tuple) else (file, read_json(file))
        if skip_unknown_sections and isinstance(data, dict):
            data = {name: part for name, part in data.items() if name in sections}
        layers.append(_Checker(f"{file}: ", sections).placed(data))
    layers += [_Checker("--set: ", sections).placed(_parse_set(item)) for item in sets]
    last = {path: given for _, given in layers for path in given}  # who corrects all earlier ones
    found = {}
    for section, cls in sections.items():  # what one makes known (env.games_path: games) the next may name
        values: dict[str, Any] = {}
        for checker, given in layers:
            for path, value in given.items():
                if path.startswith(f"{section}.") and (last[path] is given or isinstance(value, dict)):
                    checker.lay(values, path, value)
        found[section] = _Checker("", sections).make(cls, values, section)
    return found


def make(cls: type, data: Any, path: str) -> Any:
    """Return the dataclass that ``data`` describes; ConfigError names the key below ``path``."""
    reader = _Checker("", {path: cls})
    return reader.make(cls, reader.arguments(cls, data, path), path)


def check_values(config: Any, path: str) -> None:
    """Raise ConfigError where a dataclass that was made in Python holds what its knobs do not allow."""
    _Checker("", {}).arguments(type(config), vars(config), path)


def config_dict(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved configuration as JSON-able objects; ``load_config`` reads them back to equal instances."""
    return json.loads(json.dumps({name: dataclasses.asdict(config) for name, config in configs.items()}))


def config_diff(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """Return ``"ppo.gamma: 0.99 -> 1.0"`` for each key in which two results of ``config_dict`` differ."""
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        where, a, b = f"{path}{key}", old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += config_diff(a, b, f"{where}.")
        elif a != b or (key in old) != (key in new):
            lines.append(f"{where}: {_show(a)} -> {_show(b)}")
    return lines


def read_file(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return what a file holds, at most so many bytes.

    Raises:
        ConfigError: it is missing, unreadable, longer, or a pipe, device or folder, which may have no end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else a pipe waits for whoever writes to it
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
    """A text file as ``read_file`` reads it, its lines ended by "\\n"; ConfigError also where it is not UTF-8."""
    try:
        return io.StringIO(read_file(path, most).decode(encoding), newline=None).read()
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc


def read_json(path: str | Path) -> Any:
    """Parse a JSON file strictly: no duplicate key, no NaN or infinity.

    Raises:
        ConfigError: the file is missing, unreadable, or not such JSON (with the line number where there is one).
    """
    return parse_json(read_text(path), f"{path}: ")


def parse_json(text: str, source: str) -> Any:
    """JSON as ``read_json`` takes it; ConfigError, which begins with ``source``: it is none."""

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
        raise ConfigError(f"{source}invalid JSON in line {exc.lineno}: {exc.msg}") from exc
    except RecursionError as exc:
        raise ConfigError(f"{source}invalid JSON: nested too deeply") from exc
    except ValueError as exc:
        raise exc if isinstance(exc, ConfigError) else ConfigError(f"{source}invalid JSON: a number too long") from exc


def deeper_than(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested more than so deep, without descending any further."""
    level = [value]
    for _ in range(depth):
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [item for items in inner for item in items]
    return any(isinstance(item, dict | list) for item in level)


def _parse_set(item: str) -> Any:
    key, equals, text = item.partition("=")
    if not equals:
        raise ConfigError(f"--set: expected KEY.PATH=VALUE, not {_show(item)}")
    value = _word(text, f"--set: {_name(key)}: ")
    for part in reversed(key.strip().split(".")):
        value = {part: value}
    return value


def _word(text: str, source: str = "--set: ") -> Any:
    try:
        return parse_json(text, source)
    except ConfigError as exc:
        if not isinstance(exc.__cause__, json.JSONDecodeError):
            raise
        return text  # a word needs no quotes on a command line


@dataclasses.dataclass(frozen=True)
class _Checker:
    """Turns parsed JSON into dataclass instances; ``source`` begins each error."""

    source: str
    sections: Mapping[str, type]

    def placed(self, data: Any) -> tuple[_Checker, dict[str, Any]]:
        """This, and path -> value of what an object of sections holds."""
        if not isinstance(data, dict):
            raise ConfigError(f"{self.source}expected an object with the keys {', '.join(self.sections)}")
        found: dict[str, Any] = {}
        laid: dict[str, str] = {}  # path -> as it was typed
        for name, part in data.items():
            section = name if name in self.sections else synonyms.SECTIONS.get(_plain(name), "")
            if section in self.sections and not isinstance(part, dict):
                raise self.wrong(name, part, self.sections[section], {})
            outside = section not in self.sections
            for key, value in ({name: part} if outside else part).items():
                typed = name if outside else f"{name}.{key}"
                told, why = synonyms.GONE.get(typed, ((), ""))
                if told is None or value in told:
                    log.info("%s%s is left out: %s", self.source, typed, why)
                    continue
                path = self.place(typed, value, section)
                if path in laid:
                    raise self.twice(path, laid[path], typed)
                laid[path], found[path] = typed, value
        if moved := [f"{_name(typed)} is read as {path}" for path, typed in laid.items() if typed != path]:
            log.info("%s%s", self.source, ", ".join(moved))
        return self, found

    def place(self, typed: str, value: Any, section: str) -> str:
        """The path that a key, as typed, stands for: in its section, else in the only one that knows it."""
        key = typed.rpartition(".")[2]
        for name in dict.fromkeys((key, _plain(key), synonyms.KEYS.get(_plain(key), key))):
            homes = [home for home, cls in self.sections.items() if name in _knobs(cls)]
            if section in homes or len(homes) == 1:
                return f"{section if section in homes else homes[0]}.{name}"
        siblings = [f"{section}.{name}" for name in _knobs(self.sections[section])] if section in self.sections else []
        raise self.unknown(typed, value, siblings or self.sections)

    def lay(self, values: dict[str, Any], path: str, value: Any) -> None:
        section, _, key = path.partition(".")
        hint, limits = _knobs(self.sections[section])[key]
        lists = [kind for kind in (hint, *typing.get_args(hint)) if typing.get_origin(kind) in (list, tuple)]
        several = hint in lists or (isinstance(value, str) and "," in value)  # of a list, or of one or a list
        if self.source == "--set: " and lists and several and not isinstance(value, list):
            value = [_word(item) for item in value.split(",")] if isinstance(value, str) else [value]
        value = self.convert(value, hint, limits, path)
        settings = hint == dict[str, Any]  # they too are laid key by key
        values[key] = values.get(key, {}) | value if settings else value

    def arguments(self, cls: type, data: Any, path: str) -> dict[str, Any]:
        knobs, found, laid = _knobs(cls), {}, dict[str, str]()  # key -> as it was typed
        if not isinstance(data, dict):
            raise self.wrong(path, data, cls, {})
        for typed, value in data.items():
            key = typed if typed in knobs else synonyms.KEYS.get(_plain(typed), typed)
            if key not in knobs:
                raise self.unknown(f"{path}.{typed}", value, [f"{path}.{name}" for name in knobs])
            if key in laid:
                raise self.twice(f"{path}.{key}", laid[key], typed)
            laid[key], found[key] = typed, self.convert(value, *knobs[key], f"{path}.{key}")
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
            return self.make(cls, self.arguments(cls, value, path), path)
        elif origin in (list, tuple) and isinstance(value, list):
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
        nearest = max([*siblings, *everywhere], key=lambda known: _likeness(path[:99], known))
        last, its = path[:99].rpartition(".")[2], nearest.rpartition(".")[2]
        part = last in its.split("_") and path.partition(".")[0] == nearest.partition(".")[0]
        near = part or difflib.SequenceMatcher(None, last, its).ratio() >= LIKE
        hint = f"the nearest is {nearest}" if near else "docs/configuration.md lists them"
        hint = synonyms.HINTS.get(_plain(last), hint)
        return ConfigError(f"{self.source}{_name(path)} = {_show(value)}: no such key; {hint}")


def _plain(key: str) -> str:
    return key.strip().lower().replace("-", "_")


def _knobs(cls: type) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    hints = typing.get_type_hints(cls)
    return {field.name: (hints[field.name], field.metadata) for field in dataclasses.fields(cls)}


def _likeness(path: str, known: str) -> float:
    pairs = (path, known), (path.rpartition(".")[2], known.rpartition(".")[2])
    return sum(difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs)


def _is_a(value: Any, hint: Any) -> bool:
    if hint is float:
        return type(value) in (float, int)
    return hint is Any or (type(value) is hint and (hint is not str or _is_text(value)))


def _is_text(value: str) -> bool:
    """Whether files can hold it, and be called so: no zero characters, no halves of one."""
    return "\0" not in value and value == value.encode(errors="replace").decode()


def _within(value: Any, limits: Mapping[str, Any]) -> bool:
    low, high, above, choices = (limits.get(name) for name in ("min", "max", "above", "choices"))
    if choices and isinstance(value, str) and value not in choices:
        return False
    if type(value) not in (int, float):
        return True
    return (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)


def describe_field(hint: Any, limits: Mapping[str, Any]) -> str:
    """What a field of this type and these limits (a ``knob``'s) allows, in words."""
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


def _show(value: Any) -> str:
    scalar = value is None or isinstance(value, str | int | float)
    text = json.dumps(value) if scalar else reprlib.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
