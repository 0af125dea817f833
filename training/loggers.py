"""Trackers that a run is sent to: Weights & Biases, TensorBoard, trackio. None of them may end the run."""

import contextlib
import io
import json
import logging
import netrc
import os
import re
import secrets
import sys
import textwrap
import urllib.parse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils import CheckpointError, ConfigError, read_file, redact, write_file

log = logging.getLogger(__name__)

NAMES = ("auto", "wandb", "offline", "tensorboard", "trackio", "none", "online", "disabled")  # the last two: old names
PROJECT = "chat-games-ppo"
GAMES_SENT = 20
# What ``wandb_id`` holds: the id there, the last step that was sent, and its own path.
KEPT, MOST_KEPT = re.compile(rb"(\w{1,64})(?: (\d{1,9})(?: ([^\0]+))?)?"), 5000
Row = Mapping[str, Any]


class Sink(NamedTuple):
    """Where rows go. ``takes_back``: a resumed run replaces what was sent of steps after the one it resumes from."""

    log: Callable[[Row], Any]
    games: Callable[[Sequence[Row]], Any]
    close: Callable[[int], Any]  # with the exit code
    takes_back: bool = False


class Loggers:
    """All trackers that are configured and available. One that fails is switched off with a warning.

    ``names``: of ``NAMES``. "auto": W&B if one is logged in; "offline": W&B without a network, as by WANDB_MODE.
    ``step``: the step that the run resumes from, None for a fresh run. TensorBoard discards later steps; W&B and
    trackio cannot, so there a step stays as it was first sent.
    """

    def __init__(self, names: str | Sequence[str], run_dir: Path, config: Row, step: int | None = None) -> None:
        stages = config.get("curriculum", {}).get("stages", [])
        self._stages = {stage["name"]: number for number, stage in enumerate(stages)}
        self._open: dict[str, Sink] = {}
        self._kept, settings = Path(run_dir) / "wandb_id", redact(dict(config))
        self._id, self._sent = secrets.token_hex(4), step or 0
        with contextlib.suppress(ConfigError):  # without the file a new run begins there
            kept = KEPT.fullmatch(read_file(self._kept, MOST_KEPT)) if step is not None else None
            if step is not None and kept and not _copied(self._kept, kept):
                self._id, self._sent = kept[1].decode(), max(step, int(kept[2] or 0))
        for name in dict.fromkeys([names] if isinstance(names, str) else names):
            mode = "offline" if name == "offline" else os.environ.get("WANDB_MODE") or "online"
            if name == "tensorboard":
                self._begin(name, _tensorboard, Path(run_dir), settings, step)
            elif name == "trackio":
                self._begin(name, _trackio, Path(run_dir), settings, self._id)
            elif name not in ("none", "disabled") and (mode != "online" or _logged_in()):
                self._begin("wandb", _wandb, Path(run_dir), settings, self._id, mode)
            elif name in ("wandb", "online"):
                log.warning("wandb is off: there is neither WANDB_API_KEY nor a login (wandb login)")
        self._keep(self._sent)

    def log(self, row: Row) -> None:
        """Send one row of metrics under its ``step``, its stage also as a number, past selves as one opponent."""
        number = {"stage_number": self._stages[row["stage"]]} if row.get("stage") in self._stages else {}
        met = Counter[str]()
        for name, games in row.get("opponents", {}).items():
            met["past" if name.startswith("past:") else name] += games  # there may be a hundred of them
        sent = redact(dict(row) | number | ({"opponents": dict(met)} if met else {})) if self._open else {}
        self._each(lambda logger: logger.log(sent) if row["step"] > self._sent or logger.takes_back else None)
        self._keep(max(row["step"], self._sent))

    def games(self, rows: Sequence[Row]) -> None:
        """Send sample games, as rows of ``episodes.jsonl``."""
        kept = [redact(dict(row)) for row in rows[:GAMES_SENT]] if self._open else []
        self._each(lambda logger: logger.games(kept))

    def close(self, exit_code: int = 0) -> None:
        """Close all trackers."""
        self._each(lambda logger: logger.close(exit_code))

    def _keep(self, sent: int) -> None:
        self._sent = sent
        with contextlib.suppress(OSError, CheckpointError):
            if not all(logger.takes_back for logger in self._open.values()):
                write_file(self._kept, f"{self._id} {sent} ".encode() + os.fsencode(self._kept.resolve()))

    def _begin(self, name: str, kind: Callable[..., Sink], *about: Any) -> None:
        with self._guarded(name):
            self._open[name] = kind(*about)

    def _each(self, act: Callable[[Sink], Any]) -> None:
        for name, logger in list(self._open.items()):
            with self._guarded(name):
                act(logger)

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Any:
        try:
            yield
        except ModuleNotFoundError:
            self._open.pop(name, None)
            log.warning("%s is off: it is not installed (pip install %s)", name, name)
        except Exception as exc:  # neither a library nor the network may end the run
            self._open.pop(name, None)
            log.warning("%s is off from here: %s", name, redact(" ".join(f"{type(exc).__name__}: {exc}".split())))


def _copied(file: Path, kept: re.Match[bytes]) -> bool:
    """Whether the run that a ``wandb_id`` is of still lies where it was kept last: then this folder is a copy of it."""
    origin = Path(os.fsdecode(kept[3] or b""))
    with contextlib.suppress(ConfigError, OSError):
        there = KEPT.fullmatch(read_file(origin, MOST_KEPT))
        return there is not None and there[1] == kept[1] and not origin.samefile(file)
    return False  # it was moved, perhaps from another machine


def _wandb(run_dir: Path, config: Row, run_id: str, mode: Any) -> Sink:
    import wandb

    sys.argv = redact(sys.argv)  # it keeps the command line, where a secret may stand
    settings = wandb.Settings(init_timeout=20, silent=True)
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    run: Any = wandb.init(mode=mode, dir=str(run_dir), config=dict(config), id=run_id, resume="allow",
                          settings=settings, project=project)  # fmt: skip

    def games(rows: Sequence[Row]) -> None:
        run.log({"games": wandb.Table(columns=["game"], data=[[_as_text(row)] for row in rows])})

    return Sink(lambda row: run.log(row, step=row["step"]), games, lambda code: run.finish(exit_code=code))


def _tensorboard(run_dir: Path, config: Row, step: int | None) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=(step or 0) + 1, flush_secs=20)
    writer.add_text("configuration", f"```json\n{json.dumps(config, indent=1)}\n```", step)

    def send(row: Row) -> None:
        for key, value in _numbers(row).items():
            writer.add_scalar(key, value, row["step"])

    def games(rows: Sequence[Row]) -> None:
        for number, row in enumerate(rows):
            writer.add_text(f"games/{number}", _as_code(row), row.get("step"))

    return Sink(send, games, lambda code: writer.close(), takes_back=True)


def _trackio(run_dir: Path, config: Row, run_id: str) -> Sink:
    import trackio

    name = f"{run_dir.resolve().name}-{run_id}"
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints how to start its dashboard
        run: Any = trackio.init(project=project, name=name, config=dict(config), resume="allow", embed=False,
                                auto_log_gpu=False, auto_log_cpu=False)  # fmt: skip

    def games(rows: Sequence[Row]) -> None:
        text = "\n\n---\n\n".join(map(_as_code, rows))
        run.log({"games": trackio.Markdown(text)}, step=rows[-1].get("step") if rows else None)

    def close(exit_code: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            run.finish()

    return Sink(lambda row: run.log(_numbers(row), step=row["step"]), games, close)


def _numbers(row: Row) -> dict[str, float]:
    """The numbers of a row; those of nested rows are named by their path."""
    found = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "step"}
    for key, part in row.items():
        found |= {f"{key}/{k}": v for k, v in _numbers(part).items()} if isinstance(part, Mapping) else {}
    return found


def _as_text(row: Row) -> str:
    """A sample game as text: the last prompt and all of the model's answers."""
    turns = row.get("turns") or []
    answers = ", ".join(str(turn.get("legal", {}).get(turn.get("action"), turn.get("answer"))) for turn in turns)
    last = str(turns[-1].get("user", "")) if turns else ""
    against = f" against {row['opponent']}" if row.get("opponent") else ""
    head = f"{row.get('game')}{against}: {row.get('outcome')}, score {row.get('score')}"
    return f"{head}\n{last}\nplayed: {answers}"


def _as_code(row: Row) -> str:
    """A sample game as Markdown: indented, since a fence would end at the one of a program or of an answer."""
    return textwrap.indent(_as_text(row), "    ")


def _logged_in() -> bool:
    """Whether wandb would find a key, in the environment or (after ``wandb login``) in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, ValueError, netrc.NetrcParseError):  # ValueError: an invalid address, or text that is not UTF-8
        return False
