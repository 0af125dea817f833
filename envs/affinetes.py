"""OpenSpiel games on a server that speaks the public affinetes protocol: ``env_mode`` url and docker.

The server plays the game; parser, retries and forfeits are those of the local environment. So are the prompts of
``scripts/serve.py``, rebuilt from the observation; those of public servers are shown as they are. If a server fails,
or plays another game than the one asked for, the episode fails with a ``ServerError`` and gets no score.
Public servers follow the ``reset``/``step`` path, whose seats and deals differ from those of ``evaluate`` for the same
(task_id, seed); ``scripts/serve.py`` follows ``evaluate``.
"""

import asyncio
import atexit
import contextlib
import functools
import logging
import secrets
import threading
import time
from concurrent.futures import Future, wait
from typing import Any

from config.reader import ConfigError, blaming
from envs.client import NO_ANSWER, NOT_SENT, HttpClient, one_line, parse, problem_of, wait_for
from envs.config import EnvConfig
from envs.openspiel import INVALID, OpenSpielEnv, derive_seed, score, table
from envs.opponents import SEEDS, check_served
from envs.prompts import full_system, full_user
from envs.server_replies import Reply, ServerError, close, info_of, read_position, read_reply
from envs.types import Step, Task

CHECK_SECONDS = 60.0  # for a server to answer at all, before a run: public ones do not while they search for others
START_SECONDS = 600.0  # for a container to start
STOP_SECONDS = 10.0  # for a server to forget an episode
CLOSE_SECONDS = 30.0  # for a container to end; affinetes kills it after ten
LOST = 503, NO_ANSWER, 502, 504  # statuses after which a call may have been carried out

EVALUATE_PATH = "evaluate"  # info["path"] of servers on which (task_id, seed, opponent) mean what they mean locally

RANDOM_RAISES = 'they raise with opponent "random", against which every run is evaluated'
DEFECTS = {
    "goofspiel": "they show no legal actions and play other cards than asked",
    "hearts": RANDOM_RAISES,
    "euchre": RANDOM_RAISES,
    "bridge": f"{RANDOM_RAISES}, and load only every third variant",
    "blackjack": "they raise at a Ten",
    "oware": "they cannot load it",
}

logger = logging.getLogger(__name__)
_unstopped = set[str]()  # servers that failed to stop an episode, which is told once


class HttpConnection:
    """``POST /call`` on a server's address."""

    def __init__(self, url: str):
        self._client = HttpClient(url)
        self.name = self._client.url

    def call(self, method: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Return the method's result; ServerError if there is none within ``seconds``, or the server reports an error.

        Calls that no server took are repeated, unless they would stop a game, which is then gone, too. Those that may
        have been carried out (a proxy also says 503 when it has lost the answer) are repeated only where that does no
        harm: never a step.
        """
        repeatable = {"step": (429, NOT_SENT), "stop": (429, *LOST)}.get(method, (429, NOT_SENT, *LOST))
        body = {"method": method, "args": [], "kwargs": arguments}
        status, text = self._client.call("call", body, seconds, repeatable.__contains__)
        answer: Any = None
        with contextlib.suppress(ValueError):
            answer = parse(text)
        answer = answer if isinstance(answer, dict) else {}
        if status == 200 and answer.get("status") == "success" and "result" in answer:
            return answer["result"]
        if status == 200:
            raise ServerError(f"not the affinetes protocol, or a failed call: {one_line(text)}")
        problem = str(answer["detail"]).split("Traceback")[0] if "detail" in answer else text
        raise ServerError(text if status <= 0 else problem_of(status, problem))


class ContainerConnection:
    """A container that the ``affinetes`` package starts; its asynchronous client lives in a thread of its own."""

    def __init__(self, image: str):
        self.name = image
        self._loop, started = asyncio.new_event_loop(), Future[Any]()
        threading.Thread(target=self._run, args=(image, started), name="affinetes", daemon=True).start()
        if started not in wait([started], START_SECONDS).done:
            raise ConfigError(f"env.env_mode docker: {image} has not started within {START_SECONDS:g} s")
        if error := started.exception():
            problem = f"cannot be started (docker pull {image} fetches it): {one_line(str(error))}"
            raise ConfigError(f"env.env_mode docker: {image} {problem}") from error
        self._env = started.result()
        atexit.register(self.close)

    def _run(self, image: str, started: Future[Any]) -> None:
        import affinetes

        logging.getLogger("affinetes").addFilter(lambda record: False)  # what it logs is also raised, and reported once
        asyncio.set_event_loop(self._loop)
        try:
            # By default processes share one container, and the first to end removes it.
            name = f"chat-games-{secrets.token_hex(8)}"
            started.set_result(affinetes.load_env(image=image, mode="docker", container_name=name))
        except Exception as error:  # of docker, ssh or the image; reported by the thread that waits for the start
            return started.set_exception(error)
        self._loop.run_forever()

    def call(self, method: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Return the method's result within ``seconds``, else raise ServerError."""
        try:
            return wait_for(getattr(self._env, method)(**arguments), self._loop, seconds)
        except TimeoutError:
            raise ServerError(f"no answer within {seconds:g} s") from None
        except Exception as error:  # of the container, as any exception, with the container's traceback in its text
            raise ServerError(one_line(str(error).split("Traceback")[0])) from error

    def close(self) -> None:
        """Stop the container; one that takes too long is only logged."""
        try:
            wait_for(self._env.cleanup(), self._loop, CLOSE_SECONDS)
        except TimeoutError:
            logger.warning("%s: its container has not ended within %g s", self.name, CLOSE_SECONDS)


_container = functools.cache(ContainerConnection)


def connect(config: EnvConfig) -> HttpConnection | ContainerConnection:
    """Return the configured connection; a container is started once, for all. ConfigError: it cannot be started."""
    if config.env_mode == "url":
        return HttpConnection(config.env_url)
    try:
        import affinetes  # noqa: F401
    except ImportError as error:
        raise ConfigError("env.env_mode docker needs the affinetes package: pip install affinetes==0.2.0") from error
    return _container(config.env_image)


def check_server(config: EnvConfig) -> None:
    """Check that there is a server, before a model is loaded; ConfigError if none answers or can be started."""
    if config.env_mode == "docker":
        connect(config)
    elif config.env_mode == "url":
        client = HttpClient(config.env_url)  # before the clock starts: it imports httpx
        status, text = client.post("health", {}, time.monotonic() + min(CHECK_SECONDS, config.env_timeout))
        if status in (NOT_SENT, NO_ANSWER):
            line = f"env.env_url: no server answers at {config.env_url} ({one_line(text)}); scripts/serve.py starts one"
            raise ConfigError(line)


class RemoteEnv(OpenSpielEnv):
    """One episode at a time on a server; see ``envs.types.Env``. ``_state`` is the server's id of the episode.

    ``history`` and ``returns`` in ``Step.info`` are what the server reports at the end: public servers report none
    (``[]`` and None).
    """

    _spiel: Any = None  # the ``pyspiel.Game`` of the episode; programs have none
    _ours = False  # whether the server is scripts/serve.py
    _last: Reply | None = None

    def __init__(self, config: EnvConfig):
        super().__init__(config)
        self._server = connect(config)

    def reset(self, task: Task) -> Step:
        """Start the task's game on the server.

        ValueError: task id out of range, or an opponent that servers cannot play. ServerError: another game is played.
        """
        self.close()
        check_served(task.opponent)
        self._table, self._attempt, self._legal = table(task.task_id), 1, {}
        self._name, self._spiel = self._table.game.name, self._table.spiel
        seed = derive_seed(task.task_id) if task.seed is None else task.seed
        asked = {"task_id": task.task_id, "seed": seed % SEEDS, "opponent": task.opponent}
        reply = self._call("reset", **asked)
        self._check_echo(asked, reply)
        self._seat = self._own_seat = reply.info["llm_player_id"]
        self._played = list[int]()
        rules, found, _ = reply.observation.partition("\n\n# Current Game State\n")
        self._head = rules + found if found else ""
        ours = full_system(self._table.game.name, rules.removeprefix("# Game Rules\n"))
        self._system = ours if self._ours else rules if found else ""
        return self._show(reply)

    def _play(self, action: int) -> Step:
        """Send a legal action; ServerError if the server refuses it, or fails."""
        self._attempt = 1
        self._played.append(action)
        reply = self._call("step", action=str(action), episode_id=self._state)
        if reply == self._last:  # a proxy gave it twice: the game is further, and a move has been counted
            raise self._error("step: the answer is the one given to the call before")
        return self._show(reply)

    def close(self) -> None:
        """Tell the server to forget the episode; a failure is only logged, once."""
        episode_id, self._state = self._state, None
        if episode_id is not None:
            try:
                self._server.call("stop", {"episode_id": episode_id}, min(STOP_SECONDS, self.config.env_timeout))
            except ServerError as error:
                if self._server.name not in _unstopped:
                    logger.warning("%s: an episode could not be stopped: %s", self._server.name, error)
                _unstopped.add(self._server.name)

    def _call(self, method: str, **arguments: Any) -> Reply:
        with blaming(f"{method}: ", ServerError, raising=self._error):
            answer = self._server.call(method, arguments, self.config.env_timeout)
            self._ours = self._ours or (info_of(answer) or {}).get("path") == EVALUATE_PATH  # in refusals, too
            reply = read_reply(answer, self._spiel)
            if reply.episode_id != arguments.get("episode_id", reply.episode_id):
                raise ServerError("the answer is about another episode")
            return reply

    def _error(self, problem: str) -> ServerError:
        defect = None if self._ours else DEFECTS.get(self._name)
        ways_out = "scripts/serve.py plays it, env.allowed_game_indices leaves it out"
        known = f" (known of public servers: {defect}; {ways_out})" if defect else ""
        return ServerError(f"{self._name} on {self._server.name}: {one_line(problem, 400)}{known}")

    def _check_echo(self, asked: dict[str, Any], reply: Reply) -> None:
        """Raise unless the server confirms that it plays the task asked for."""
        info = reply.info
        echo = {"task_id": info.get("task_id"), "seed": info.get("seed"), "opponent": info.get("opponent_type")}
        if echo == asked:  # else it may be somebody else's episode, which is not ours to stop
            self._state = reply.episode_id
        if echo != asked or info.get("game_name") not in (self._table.game.name, self._table.game.short_name):
            raise self._error(f"asked for {asked}, the server plays {info.get('game_name')} with {echo}")
        if asked["opponent"] not in ("random", "mcts") and not self._ours:
            raise self._error(f"public servers silently play at random for opponent {asked['opponent']!r}")
        seat, players = info.get("llm_player_id"), self._spiel.num_players()
        if type(seat) is not int or seat not in range(players):
            raise self._error(f"the server does not tell the seat, 0 to {players - 1}: {seat!r}")

    def _show(self, reply: Reply) -> Step:
        self._last = reply
        if reply.done:
            if self._ours and not reply.history:
                raise self._error("the game ended without its history, which servers of this path tell")
            moves = [action for player, action in reply.history if player == self._seat and action != INVALID]
            if reply.history and moves != self._played:
                raise self._error(f"its history has {moves} of seat {self._seat}, which played {self._played}")
            if reply.returns and not close(reply.score, min(score(self._spiel, reply.returns, self._seat), 1.0)):
                raise self._error(f"the score {reply.score} is not that of the returns {reply.returns}")
            return self._end(reply.returns, reply)
        shown = reply.observation.removeprefix(self._head)
        with blaming("", ServerError, raising=self._error):
            state, self._legal = read_position(shown)
        return self._ask(full_user(state, self._seat, self._legal) if self._ours else shown)

    def _info(self, seat: int, outcome: str | None) -> dict[str, Any]:
        info = super()._info(seat, outcome)
        return info if self._ours else info | {"history_turns": None}  # a public server's text may leave out the past

    def _end(self, returns: list[float] | None, reply: Reply | None = None) -> Step:
        info = self._info(self._seat, "finished" if reply else "forfeited")
        result = reply.score if reply else 0.0
        info |= {"returns": returns, "history": reply.history if reply else [], "scores": {self._seat: result}}
        self.close()
        return Step("", {}, True, result, info)


class RemoteTrace(RemoteEnv):
    """Programs on a trace server: the observation is the whole question, and one answer ends the episode.

    ``Step.info`` is that of ``TraceEnv`` without what servers do not report: match, exact, share, expected.
    """

    _name = "trace"

    def reset(self, task: Task) -> Step:
        """Ask for the task's program; ServerError if the server shows none, or another task's."""
        self.close()
        reply = self._call("reset", task_id=task.task_id, seed=task.seed)
        if same := reply.info.get("task_id", task.task_id) == task.task_id:
            self._state = reply.episode_id
        if reply.done or not same:
            raise self._error(f"asked for task {task.task_id}, the server answered {reply.observation!r}")
        return Step(reply.observation, {}, False, 0.0, self._info(0, None))

    def step(self, text: str) -> Step:
        """Let the server score the model's raw answer; RuntimeError if no episode is running."""
        if self._state is None:
            raise RuntimeError("step without a running episode: it has finished or was closed; call reset first")
        reply = self._call("step", action=text, episode_id=self._state)
        if not reply.done:
            raise self._error("the server does not score the answer")
        self.close()
        info = self._info(0, "finished") | {"returns": None, "scores": {0: reply.score}}
        return Step("", {}, True, reply.score, info)

    def _info(self, seat: int, outcome: str | None) -> dict[str, Any]:
        return {"game": self._name, "seat": seat, "system": "", "attempt": 1, "adapter": None, "history": [],
                "outcome": outcome}  # fmt: skip
