"""The knobs of the environments: how games are played and shown, and where the programs of trace come from."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import games
from config.reader import blaming, check_values, knob, make

# Without user and password, which would end up wherever the configuration is written: run_config.json, reports, logs.
ADDRESS, IMAGE = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?"), re.compile(r"[^\s@]*(@sha256:[0-9a-f]+)?")


def is_address(text: str) -> bool:
    """Whether a text is a plain http(s) address whose port, if it names one, can exist."""
    try:
        return bool(ADDRESS.fullmatch(text)) and urlsplit(text).port != 0
    except ValueError:  # of a port beyond 65535, or half a bracket
        return False


SECRET_FREE: dict[str, tuple[Callable[[str], Any], str]] = {
    "env_url": (is_address, "an address like http://127.0.0.1:8765 without user, password or query"),
    "env_image": (IMAGE.fullmatch, "the name of an image, without user or password"),
}
# What players must have in common to share one table; the other knobs say how games are run, not what is played.
PLAYED_BY = "env_type", "games_path", "prompt", "answer_mode", "history_turns", "protocol", "trace"


@dataclass(frozen=True)
class EnvConfig:
    """How games are played and shown. Opponents and games come with the tasks."""

    env_type: str = knob("openspiel", choices=("openspiel", "trace"))  # games, or programs whose output is predicted
    allowed_game_indices: list[int | str] = field(default_factory=list, hash=False)  # or names; not the stages' own
    games_path: str = ""  # folder with games of your own, an absolute path or one from ~ on: adding_a_game.md
    opponent: str = ""  # instead of the stages' own; empty: theirs
    env_mode: str = knob("local", choices=("local", "url", "docker"))  # the latter two: on an affinetes server
    prompt: str = knob("full", choices=("full", "compact"))  # compact: no rules, a terse state
    answer_mode: str = knob("constrained", choices=("constrained", "free"))  # constrained to legal answers, or free
    history_turns: str | int = knob("auto", min=0, choices=("auto", "all"))  # past turns kept; "auto": as needed
    protocol: str = knob("native", choices=("native", "affinetes"))  # affinetes: asks and judges as public servers do
    games_at_once: int = knob(0, min=0)  # games open together, each with what was read of it; 0: all
    env_url: str = ""  # url: the server, for example http://127.0.0.1:8765
    env_timeout: float = knob(600.0, above=0, max=1e9)  # seconds of a call to a server, repetitions included
    env_image: str = "affinefoundation/game:openspiel"  # docker: the image of the server
    use_vllm: bool = False  # train_ppo.py's games are played through vLLM servers, see docs/scaling.md
    vllm_base_url: str | list[str] = "http://127.0.0.1:8000/v1"  # one server, or several
    max_staleness: int = knob(0, min=0)  # updates by which the weights that play may be behind
    trace: dict[str, Any] = field(default_factory=dict, hash=False)  # of env_type trace: TraceConfig

    def past_turns(self, default: int | None) -> int | None:
        """Return how many past turns a conversation keeps (None: all) in a game whose own number is ``default``."""
        if isinstance(self.history_turns, int):
            return self.history_turns
        return default if self.history_turns == "auto" and self.env_type == "openspiel" else None

    def __post_init__(self) -> None:
        if self.games_path:
            self._add_games()
        check_values(self, "env")  # for configurations made in Python, too
        for name, (form, allowed) in SECRET_FREE.items():
            value = getattr(self, name)
            if value and not form(value):
                shown = "" if set("@?#") & set(value) else f" {value!r}"  # do not repeat what may hold a password
                raise ValueError(f"{name}{shown} is not allowed: {allowed}")
        if self.env_mode != "local" and self.prompt != "full":
            allowed = "only the full prompt can be made from what servers show"
            raise ValueError(f"prompt {self.prompt!r} is not allowed: {allowed}")
        if self.env_mode == "url" and not self.env_url:
            allowed = "env_mode url needs an address that starts with http:// or https://"
            raise ValueError(f"env_url '' is not allowed: {allowed}")
        if self.env_mode == "docker" and not self.env_image:
            raise ValueError("env_image '' is not allowed: env_mode docker needs the name of an image")
        make(TraceConfig, self.trace, "trace")

    def _add_games(self) -> None:
        # Whoever loads a run's configuration runs its games' code, so a stranger's must not name a relative folder: nor
        # through /proc, which knows where this program was started.
        folder = Path(os.path.expanduser(self.games_path))
        if not folder.is_absolute() or any(f"{os.path.realpath(p)}/".startswith("/proc/") for p in folder.parents):
            raise ValueError(f"games_path {self.games_path!r} is not allowed: a path from / or ~ on, not in /proc")
        with blaming("games_path: ", raising=ValueError):
            games.add(self.games_path)


@dataclass(frozen=True)
class TraceConfig:
    """Where the programs come from, how well they are contained, and how answers count."""

    source: str = "generator"  # generator | folder of .jsonl and .py files | .jsonl file | Hub dataset "owner/name"
    partial_credit: bool = False  # score the share of correct leading lines instead of right or wrong
    sandbox_min_level: int = knob(1, min=0, max=2)  # refuse to run programs of others below it; see docs/trace.md
