"""OpenSpiel games on a server that speaks the public affinetes protocol: ``env_mode`` url and docker.

The server plays the game; prompts, parser, retries and forfeits are those of the local environment, rebuilt from the
observation text. A server that errs, or plays another game than the one asked for, makes the episode fail with a
``ServerError``: it never gives a score. Public servers follow the ``reset``/``step`` path, whose seats and deals
differ from ``evaluate`` for the same (task_id, seed); ``scripts/serve.py`` follows ``evaluate``.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
import time
from typing import Any, Protocol

from env_wrapper import EnvConfig, Step, Task, parse_action
from envs.openspiel import RETRY, derive_seed, full_system, full_user
from envs.opponents import SEEDS, parse_opponent
from games import decode_task_id

ATTEMPTS = 5  # of a call that found no server or an overloaded one
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds between them, doubling
CONNECT_SECONDS = 10.0
STOP_SECONDS = 10.0
# Connections idle for longer are not used again: servers close them after some 5 s, perhaps while a step is sent.
KEEPALIVE_SECONDS = 2.0
MAX_ANSWER_BYTES = 2**24
MOST_PLAYERS = 10  # of any game of OpenSpiel
ID_DIGITS = 9  # of an action's id

EVALUATE_PATH = "evaluate"  # info["path"] of servers on which (task_id, seed, opponent) mean what they mean locally

DEFECTS = {
    "goofspiel": "they show no legal actions and play other cards than asked",
    "hearts": 'they raise with opponent "random"; "mcts" plays',
    "euchre": 'they raise with opponent "random"; "mcts" plays',
    "bridge": 'they raise with opponent "random", and load only every third variant',
    "blackjack": "they raise at a Ten",
    "oware": "they cannot load it",
}

RULES = re.compile(r"# Game Rules\n(.*?)\n\n# Current Game State\n", re.DOTALL)
POSITION = re.compile(r"Current State:\n(?P<state>.*)\n\nLegal Actions:\n(?P<legal>.*)\n\nYour choice", re.DOTALL)
ACTION = re.compile(r"^ *(\d+) -> (.*)$", re.MULTILINE)

logger = logging.getLogger(__name__)


class ServerError(RuntimeError):
    """The server did not play the game that was asked for."""


def check_config(config: EnvConfig) -> None:
    """Check what ``env_mode`` url and docker need.

    Raises:
        ValueError: names the key, its value and what is allowed.
    """
    docker = config.env_mode == "docker"
    address = config.env_url.startswith(("http://", "https://"))
    timed = isinstance(config.env_timeout, int | float) and 0 < config.env_timeout < float("inf")
    checks = (
        ("env_type", config.env_type == "openspiel", "only openspiel is played on servers"),
        ("prompt", config.prompt == "full", "only the full prompt can be made from what servers show"),
        ("env_timeout", timed, "a number of seconds > 0"),
        ("env_url", docker or address, "env_mode url needs an address that starts with http:// or https://"),
        ("env_image", not docker or config.env_image, "env_mode docker needs the name of an image"),
    )
    for name, sound, allowed in checks:
        if not sound:
            raise ValueError(f"{name} {getattr(config, name)!r} is not allowed: {allowed}")


class Connection(Protocol):
    """A way to call the methods of a server."""

    name: str

    def call(self, method: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Return the result of a method within ``seconds``, else raise ServerError."""


@functools.cache
def _client() -> Any:
    import httpx

    limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_SECONDS)
    return httpx.Client(limits=limits)


class HttpConnection:
    """``POST /call`` on a server's address."""

    def __init__(self, url: str):
        self.name = url.rstrip("/")

    def call(self, method: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Return the method's result.

        Calls that found no server, or one that refused to take them (503), are repeated with growing pauses. Those
        that may have been carried out are repeated only if that does no harm: never a step.

        Raises:
            ServerError: no result within ``seconds``, or an error of the server's.
        """
        deadline = time.monotonic() + seconds
        wait = FIRST_WAIT
        for attempt in range(1, ATTEMPTS + 1):
            status, text = self._post(method, arguments, deadline)
            if status == 200:
                return _result(text)
            repeatable = status in (0, 503) or (method != "step" and status in (-1, 502, 504))
            if not repeatable or attempt == ATTEMPTS or time.monotonic() + wait >= deadline:
                raise ServerError(text if status <= 0 else f"HTTP {status}: {_detail(text)}")
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        raise AssertionError("unreachable")

    def _post(self, method: str, arguments: dict[str, Any], deadline: float) -> tuple[int, str]:
        """Return (HTTP status, body), (0, problem) if nothing was sent, (-1, problem) if no answer came."""
        import httpx

        left = max(deadline - time.monotonic(), 0.001)
        timeout = httpx.Timeout(left, connect=min(left, CONNECT_SECONDS))
        request = {"method": method, "args": [], "kwargs": arguments}
        try:
            with _client().stream("POST", f"{self.name}/call", json=request, timeout=timeout) as response:
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if time.monotonic() > deadline or len(body) > MAX_ANSWER_BYTES:
                        return -1, "the answer is too slow or too long"
                return response.status_code, body.decode(errors="replace")
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            return 0, f"no connection: {error}"
        except httpx.HTTPError as error:
            return -1, f"no answer: {type(error).__name__} {error}".rstrip()


def _result(text: str) -> Any:
    try:
        answer = json.loads(text)
        if answer["status"] == "success":
            return answer["result"]
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ServerError(f"not the affinetes protocol, or a failed call: {one_line(text)}")


def _detail(text: str) -> str:
    """Return the first line of a public server's ``{"detail": "message\\ntraceback"}``."""
    try:
        return one_line(str(json.loads(text)["detail"]).split("Traceback")[0])
    except (ValueError, TypeError, KeyError, RecursionError):
        return one_line(text)


def one_line(text: str, most: int = 200) -> str:
    """Return what a server sent as a line that does no harm on a terminal, at most so many characters."""
    line = " ".join(text.split())[:most]
    return "".join(character if character.isprintable() else "�" for character in line)


class ContainerConnection:
    """A container that the ``affinetes`` package starts; its asynchronous client lives in a thread of its own."""

    def __init__(self, image: str, host: str):
        import asyncio
        import atexit

        self.name = f"{image} on {host or 'this machine'}"
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._problem: Exception | None = None
        threading.Thread(target=self._run, args=(image, host), name="affinetes", daemon=True).start()
        self._started.wait()
        if self._problem:
            raise RuntimeError(
                f"env_mode docker: {image} cannot be started: {one_line(str(self._problem))}"
            ) from self._problem
        atexit.register(self.close)

    def _run(self, image: str, host: str) -> None:
        import asyncio

        import affinetes

        asyncio.set_event_loop(self._loop)
        try:
            self._env = affinetes.load_env(image=image, mode="docker", hosts=[host] if host else None)
        except Exception as error:  # docker, ssh, the image: told by whoever waits for the start, as its cause
            self._problem = error
            return
        finally:
            self._started.set()
        self._loop.run_forever()

    def call(self, method: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Return the method's result within ``seconds``, else raise ServerError."""
        import asyncio

        pending = asyncio.run_coroutine_threadsafe(getattr(self._env, method)(**arguments), self._loop)
        try:
            return pending.result(seconds)
        except TimeoutError:
            pending.cancel()
            raise ServerError(f"no answer within {seconds:g} s") from None
        except Exception as error:  # what the container raised arrives as any exception with its traceback as text
            raise ServerError(one_line(str(error).split("Traceback")[0])) from error

    def close(self) -> None:
        """Stop the container."""
        import asyncio

        asyncio.run_coroutine_threadsafe(self._env.cleanup(), self._loop).result(STOP_SECONDS)


@functools.cache
def _container(image: str, host: str) -> ContainerConnection:
    return ContainerConnection(image, host)


def connect(config: EnvConfig) -> Connection:
    """Return the connection of a configuration. A container is started once and shared by all environments.

    Raises:
        RuntimeError: docker without the affinetes package, or the container cannot be started.
    """
    if config.env_mode == "url":
        return HttpConnection(config.env_url)
    try:
        import affinetes  # noqa: F401
    except ImportError as error:
        raise RuntimeError("env_mode docker needs the affinetes package: pip install affinetes==0.2.0") from error
    return _container(config.env_image, config.env_host)


class RemoteEnv:
    """One episode at a time on a server; see ``env_wrapper.Env``.

    ``Step.info`` is that of ``OpenSpielEnv``; ``history`` and ``returns`` are those the server tells at the end:
    public servers tell none (``[]`` and None).
    """

    def __init__(self, config: EnvConfig):
        self.config = config
        self._server = connect(config)
        self._episode_id: str | None = None

    def reset(self, task: Task) -> Step:
        """Start the task's game on the server.

        Raises:
            ValueError: task id out of range, or an opponent that servers cannot play.
            ServerError: the server does not play this task.
        """
        self.close()
        if parse_opponent(task.opponent).kind in ("self", "past"):
            raise ValueError(f"opponent {task.opponent!r} cannot play on a server: choose random, mcts or ismcts")
        self._game, _ = decode_task_id(task.task_id)
        seed = derive_seed(task.task_id) if task.seed is None else task.seed
        asked = {"task_id": task.task_id, "seed": seed % SEEDS, "opponent": task.opponent}
        answer = self._call("reset", **asked)
        self._episode_id = answer["episode_id"]
        info, self._attempt = answer["info"], 1
        self._check_echo(asked, info)
        self._seat = info["llm_player_id"]
        rules = RULES.search(answer["observation"])
        self._system = full_system(self._game.name, rules[1] if rules else "")
        return self._show(answer)

    def step(self, text: str) -> Step:
        """Answer the last step's decision with the model's raw text.

        Raises:
            RuntimeError: there is no running episode.
            ServerError: the server refuses a legal action, or fails.
        """
        if self._episode_id is None:
            raise RuntimeError("step without a running episode: it has finished or was closed; call reset first")
        action = parse_action(text, self._legal)
        if action is None:
            if self._attempt >= self.config.max_attempts:
                return self._end("forfeited", 0.0, {})
            message = RETRY.format(attempt=self._attempt, attempts=self.config.max_attempts)
            self._attempt += 1
            return Step(message, self._legal, False, 0.0, self._info(None))
        self._attempt = 1
        return self._show(self._call("step", action=str(action), episode_id=self._episode_id))

    def close(self) -> None:
        """Tell the server to forget the episode; that it cannot be told is no error."""
        episode_id, self._episode_id = self._episode_id, None
        if episode_id is not None:
            try:
                self._server.call("stop", {"episode_id": episode_id}, min(STOP_SECONDS, self.config.env_timeout))
            except ServerError as error:
                logger.warning("%s: an episode could not be stopped: %s", self._server.name, error)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Return the server's answer to reset or step, checked for form and for errors."""
        try:
            answer = self._server.call(method, arguments, self.config.env_timeout)
        except ServerError as error:
            raise self._error(f"{method}: {error}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("info"), dict):
            raise self._error(f"{method} was answered with {one_line(str(answer))!r}")
        if refusal := answer["info"].get("error"):
            raise self._error(f"{method}: {one_line(str(refusal))}")
        if not isinstance(answer.get("observation"), str) or not isinstance(answer.get("episode_id"), str):
            raise self._error(f"{method} was answered without an observation or an episode_id")
        return answer

    def _error(self, problem: str) -> ServerError:
        defect = DEFECTS.get(self._game.name)
        known = f" (known of public servers: {defect}; scripts/serve.py plays it)" if defect else ""
        return ServerError(f"{self._game.name} on {self._server.name}: {one_line(problem, 400)}{known}")

    def _check_echo(self, asked: dict[str, Any], info: dict[str, Any]) -> None:
        """Raise unless the server says that it plays the task that was asked for."""
        told = {"task_id": info.get("task_id"), "seed": info.get("seed"), "opponent": info.get("opponent_type")}
        if told != asked or info.get("game_name") not in (self._game.name, self._game.short_name):
            raise self._error(f"asked for {asked}, the server plays {info.get('game_name')} with {told}")
        if asked["opponent"] not in ("random", "mcts") and info.get("path") != EVALUATE_PATH:
            raise self._error(f"public servers silently play at random for opponent {asked['opponent']!r}")
        if type(info.get("llm_player_id")) is not int or info["llm_player_id"] not in range(MOST_PLAYERS):
            raise self._error(f"the server does not tell the seat: {info.get('llm_player_id')!r}")

    def _show(self, answer: dict[str, Any]) -> Step:
        if answer.get("truncated"):
            raise self._error("the server ended the episode early")
        if answer.get("done"):
            score = answer.get("reward")
            if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
                raise self._error(f"the score {score!r} is not in [0, 1]")
            if not isinstance(answer["info"].get("history", []), list):
                raise self._error(f"the history {answer['info']['history']!r} is not a list")
            return self._end("finished", float(score), answer["info"])
        position = POSITION.search(answer["observation"])
        listed = ACTION.findall(position["legal"] if position else "")
        self._legal = {int(action): name for action, name in listed if len(action) <= ID_DIGITS}
        if position is None or not self._legal or len(self._legal) < len(listed):
            raise self._error(f"no legal actions in an observation that ends {one_line(answer['observation'][-80:])!r}")
        return Step(full_user(position["state"], self._seat, self._legal), self._legal, False, 0.0, self._info(None))

    def _info(self, outcome: str | None) -> dict[str, Any]:
        return {
            "game": self._game.name,
            "seat": self._seat,
            "system": self._system,
            "attempt": self._attempt,
            "adapter": None,
            "history": [],
            "outcome": outcome,
        }

    def _end(self, outcome: str, score: float, info: dict[str, Any]) -> Step:
        told = {"returns": info.get("returns"), "history": info.get("history", []), "scores": {self._seat: score}}
        self.close()
        return Step("", {}, True, score, self._info(outcome) | told)
