"""The remote client against servers that err: a failed episode with a clear message, never a wrong score."""

import asyncio
import contextlib
import functools
import re
import socket
import sys
import threading
import time
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from players import FunctionPlayer, random_player
from serving import POSITION, RESET, answer, ok, running_server, scripted_server, task_id
from tiny import micro_config

import games
from env_wrapper import EnvConfig, Task, make_env, play
from envs import affinetes, client, server_replies
from envs.affinetes import ServerError
from envs.types import InterruptedRolloutError
from training import preflight
from utils import ConfigError


class PublicServer:
    """Answers by method: an object, or a list of (status, object) used up one by one, None hangs up."""

    def __init__(self, **replies):
        position = POSITION.format(game="leduc_poker")
        self.replies = {
            "reset": answer(RESET + position),
            "step": answer("Result: WIN", done=True, reward=0.75),
            "stop": {"status": "ok", "stopped": True},
        } | replies
        self.calls = []

    def __call__(self, method, kwargs):
        self.calls.append((method, kwargs))
        reply = self.replies[method]
        return reply.pop(0) if isinstance(reply, list) else ok(reply)

    @property
    def methods(self):
        return [method for method, _ in self.calls]


@contextlib.contextmanager
def env_on(server, **config):
    with scripted_server(server) as url:
        env = make_env({"env_mode": "url", "env_url": url, "env_timeout": 20.0} | config)
        yield env
        env.close()


TASK = Task(task_id("leduc_poker"), 4, "random")


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)


def test_the_prompt_of_a_public_server_is_shown_as_it_is():
    server = PublicServer()
    with env_on(server) as env:
        step = env.reset(TASK)
        assert step.text == POSITION.format(game="leduc_poker")
        assert step.legal == {3: "c1", 14: "take 2 -> now"}
        assert step.info["system"] == "# Game Rules\nBe first."
        end = env.step("<think>3</think>14")
        assert (end.done, end.score, end.legal) == (True, 0.75, {})
        assert end.info["outcome"] == "finished"
        assert end.info["scores"] == {0: 0.75}
        assert end.info["history"] == []
        with pytest.raises(RuntimeError, match="reset"):
            env.step("3")
    asked = {"task_id": TASK.task_id, "seed": 4, "opponent": "random"}
    played = [("reset", asked), ("step", {"action": "14", "episode_id": "e1"}), ("stop", {"episode_id": "e1"})]
    assert server.calls == played


@pytest.mark.parametrize(("turns", "path", "messages"), [("auto", None, 4), (0, None, 2), ("auto", "evaluate", 2)])
def test_past_turns_are_kept_where_the_text_is_a_public_servers(turns, path, messages):
    """Our description of a game of gin rummy tells all of it; the engine's leaves out what was discarded."""
    position, about = POSITION.format(game="gin_rummy"), told("gin_rummy") | ({"path": path} if path else {})
    server = PublicServer(reset=answer(RESET + position, **about), step=[ok(answer(position)), crash("boom")[0]])
    player = random_player()
    with scripted_server(server) as url:
        play(config_of(url, history_turns=turns), player, [Task(task_id("gin_rummy"), 4, "random")])
    assert [len(query.conversation) for query in player.queries] == [2, messages]


def test_retries_and_forfeits_stay_on_this_side():
    server = PublicServer()
    with env_on(server) as env:
        env.reset(TASK)
        assert "attempt 1 of 3" in env.step("what?").text
        assert env.step("99").info["attempt"] == 3
        end = env.step("")
        assert (end.score, end.info["outcome"], end.info["returns"]) == (0.0, "forfeited", None)
    assert server.methods == ["reset", "stop"]


def no_ids(game):
    return (
        RESET + f"Game: {game}\nYou are Player 0.\n\nCurrent State:\nP0 hand: 1 2\n\nWaiting for Player -2 to move..."
    )


def crash(message):
    return [(500, {"detail": f"{message}\nTraceback (most recent call last):\n  File x"})]


def told(name, **changes):
    return {"task_id": task_id(name), "game_name": name} | changes


DEFECTS = [
    (
        "goofspiel",
        {"reset": answer(no_ids("goofspiel"), **told("goofspiel"))},
        "no legal actions.*other cards than asked.*env.allowed_game_indices leaves it out",
    ),
    ("hearts", {"reset": crash("action_id != kInvalidAction")}, 'kInvalidAction.*"random", against which every run'),
    ("oware", {"reset": crash("Unknown parameter 'seeds_per_house'")}, "seeds_per_house.*cannot load"),
    ("blackjack", {"reset": crash("invalid literal for int(): 'T'")}, "literal.*at a Ten"),
    ("leduc_poker", {"step": crash("boom")}, "step: HTTP 500: boom$"),
    ("leduc_poker", {"step": answer("", error="invalid_action")}, "invalid_action"),
    ("leduc_poker", {"step": answer("", done=True, error="episode_not_found")}, "episode_not_found"),
    ("leduc_poker", {"step": answer("", done=True, reward=1.5)}, r"score 1.5 is not in \[0, 1\]"),
    ("leduc_poker", {"step": answer("", done=True, reward=None)}, "score None"),
    ("leduc_poker", {"step": answer("", done=True, reward=0.5) | {"truncated": True}}, "ended the episode early"),
    ("leduc_poker", {"step": answer("Your turn")}, "no legal actions"),
    ("leduc_poker", {"step": None}, "step: answered with 'None'"),
    ("leduc_poker", {"step": answer("x") | {"episode_id": None}}, "without an observation or an episode_id"),
    ("leduc_poker", {"step": answer("", done=True, reward=1.0) | {"episode_id": "e2"}}, "about another episode"),
    ("leduc_poker", {"step": [(200, ["what"])]}, "not the affinetes protocol"),
    ("leduc_poker", {"step": [(200, {"status": "success"})]}, "not the affinetes protocol"),
    ("leduc_poker", {"step": [(404, {"detail": "Method not found: step"})]}, "HTTP 404: Method not found: step"),
    ("leduc_poker", {"reset": answer(RESET, llm_player_id=None)}, "does not tell the seat"),
    ("leduc_poker", {"reset": answer(RESET, seed=5)}, "asked for .*'seed': 4.*plays leduc_poker with .*'seed': 5"),
    ("leduc_poker", {"reset": answer(RESET, opponent_type="mcts")}, "'opponent': 'mcts'"),
    ("kuhn_poker", {"reset": answer(RESET, **told("kuhn_poker", game_name="goofspiel"))}, "plays goofspiel"),
]


def config_of(url, **changes):
    return EnvConfig(env_mode="url", env_url=url, **({"env_timeout": 20.0} | changes))


@pytest.mark.parametrize(("name", "replies", "message"), DEFECTS)
def test_a_server_that_errs_fails_the_episode(name, replies, message):
    server = PublicServer(**replies)
    with scripted_server(server) as url:
        [episode] = play(config_of(url), random_player(), [Task(task_id(name), 4, "random")])
    assert (episode.outcome, episode.score) == ("failed", 0.0)
    error = episode.info["error"]
    assert error.startswith(f"ServerError: {name} on http://")
    assert re.search(message, error), error
    assert "\n" not in error
    assert len(error) < 600
    begun = replies.get("reset", answer(""))
    started = isinstance(begun, dict) and (begun["info"]["seed"], begun["info"]["opponent_type"]) == (4, "random")
    assert server.methods.count("stop") == started  # else it is not ours, or there is none


@pytest.mark.parametrize("env", [{}, {"env_type": "trace", "answer_mode": "free"}])
def test_an_episode_of_somebody_else_is_not_stopped(env):
    server = PublicServer(reset=answer(RESET, task_id=5, seed=9))
    with env_on(server, **env) as remote, pytest.raises(ServerError, match="asked for"):
        remote.reset(TASK)
    assert server.methods == ["reset"]


def test_a_failed_episode_leaves_the_others_alone():
    def mixed(method, kwargs):
        if method == "reset" and kwargs["seed"] == 1:
            return 500, {"detail": "boom"}
        reply = PublicServer()(method, kwargs)
        if method == "reset":
            reply[1]["result"]["info"]["seed"] = kwargs["seed"]
        return reply

    with scripted_server(mixed) as url:
        episodes = play(config_of(url), random_player(), [Task(task_id("leduc_poker"), s) for s in range(3)])
    assert [(e.outcome, e.score) for e in episodes] == [("finished", 0.75), ("failed", 0.0), ("finished", 0.75)]


@pytest.mark.parametrize("opponent", ["mcts:20x1", "ismcts"])
def test_public_servers_play_at_random_for_opponents_they_do_not_know(opponent):
    server = PublicServer(reset=answer(RESET, opponent_type=opponent))
    with env_on(server) as env, pytest.raises(ServerError, match="silently play at random"):
        env.reset(Task(task_id("leduc_poker"), 4, opponent))


@pytest.mark.parametrize("opponent", ["mcts:20x1", "perfect"])
def test_an_opponent_of_a_later_stage_that_no_public_server_has_is_told_before_the_first_step(tmp_path, opponent):
    def public(method, kwargs):
        told = {"task_id": kwargs.get("task_id"), "seed": kwargs.get("seed"), "opponent_type": kwargs.get("opponent")}
        return ok(answer(RESET + POSITION.format(game="leduc_poker"), **told)) if method == "reset" else ok({})

    games = [[task_id("leduc_poker")] * 2]
    against = {"first": "random", "next": "mcts", "last": {"random": 1, opponent: 1}}
    stages = [{"name": name, "games": games, "opponent": bots} for name, bots in against.items()]
    with scripted_server(public) as url:
        env, ppo = {"env_mode": "url", "env_url": url, "prompt": "full"}, {"max_seq_length": 4096}
        some, every = (micro_config(tmp_path, env=env, ppo=ppo, curriculum={"stages": s}) for s in (stages[:2], stages))
        _, _, chat = preflight.look(some)
        preflight.measure_prompts(some, chat, peek=True)
        with pytest.raises(ConfigError, match=rf"task 200000000 failed: .*{opponent}"):
            preflight.measure_prompts(every, chat, peek=True)


def test_every_opponent_is_tried_in_each_of_its_games_before_the_first_step(tmp_path):
    """Whether one can be played depends on the game: ismcts, say. Its games of several stages are begun once."""
    begun, refused = Counter(), set()

    def server(method, kwargs):
        if method != "reset":
            return ok({})
        played = kwargs["task_id"] // games.CONFIGS_PER_GAME, kwargs["opponent"]
        begun[played] += 1
        told = {"task_id": kwargs["task_id"], "seed": kwargs["seed"], "opponent_type": played[1]}
        name = games.NAMES[played[0]]
        error = "invalid_opponent" if played in refused else None
        return ok(answer(RESET + POSITION.format(game=name), error=error, game_name=name, path="evaluate", **told))

    leduc, hex_game = (games.NAMES.index(name) for name in ("leduc_poker", "hex"))
    stages = [
        {
            "name": "first",
            "games": ["leduc_poker", "hex"],
            "opponent": {"random": 1, "ismcts": 1},
            "gate_opponent": "random",
        },
        {"name": "last", "games": ["leduc_poker"], "opponent": "ismcts"},
    ]
    with scripted_server(server) as url:
        env, ppo = {"env_mode": "url", "env_url": url, "prompt": "full"}, {"max_seq_length": 4096}
        config = micro_config(tmp_path, env=env, ppo=ppo, curriculum={"stages": stages})
        _, _, chat = preflight.look(config)
        preflight.measure_prompts(config, chat, peek=True)
        assert (begun[leduc, "ismcts"], begun[hex_game, "ismcts"]) == (1, 1)
        refused.add((hex_game, "ismcts"))
        with pytest.raises(ConfigError, match=r"failed: ServerError: hex on .*invalid_opponent"):
            preflight.measure_prompts(config, chat, peek=True)


def test_tasks_that_no_server_can_play():
    server = PublicServer()
    with env_on(server) as env:
        for task, message in (
            (Task(-1), "0 to 2799999999"),
            (Task(0, 0, "self"), "'self' cannot play on a server"),
            (Task(0, 0, "past"), "'past' cannot play on a server"),
            (Task(0, 0, "past:x"), "cannot play on a server"),
            (Task(0, 0, "perfect"), "cannot play on a server"),
            (Task(0, 0, "cfr:5"), "cannot play on a server"),
            (Task(0, 0, "bad"), "allowed are random"),
        ):
            with pytest.raises(ValueError, match=message):
                env.reset(task)
    assert server.calls == []


def test_a_second_reset_and_an_early_close_stop_the_episode_once():
    server = PublicServer()
    with env_on(server) as env:
        env.reset(TASK)
        env.reset(TASK)
        env.close()
        env.close()
        with pytest.raises(RuntimeError, match="reset"):
            env.step("3")
    assert server.methods == ["reset", "stop", "reset", "stop"]


def test_an_episode_that_cannot_be_stopped_still_counts():
    server = PublicServer(stop=crash("lost") + crash("lost"))
    with scripted_server(server) as url:
        [episode] = play(config_of(url), random_player(), [TASK])
    assert (episode.outcome, episode.score) == ("finished", 0.75)


def test_a_server_that_is_gone_is_asked_once_to_stop_each_game_and_told_once(monkeypatch, caplog):
    """Its games have gone with it: nothing is to be repeated for seconds, and no line is due for each of them."""
    asked, post = [], client.HttpClient.post
    monkeypatch.setattr(affinetes, "_unstopped", set())
    monkeypatch.setattr(client.HttpClient, "post", lambda *args: asked.append(args[2]["method"]) or post(*args))
    for _ in range(3):
        with env_on(PublicServer()) as env:
            env.reset(TASK)
            env._server = affinetes.HttpConnection("http://127.0.0.1:9")
    assert asked == ["reset", "stop"] * 3
    [told] = caplog.messages
    assert told.startswith("http://127.0.0.1:9: an episode could not be stopped: no connection: ")


@pytest.mark.parametrize("ends", ["leave_if_stopped", "act"])
def test_after_a_signal_or_an_error_a_server_that_hangs_is_not_waited_for_game_by_game(monkeypatch, ends):
    """A player asks whether it is to stop, or fails; eight episodes cannot be stopped within ten seconds each."""
    monkeypatch.setattr("env_wrapper.LEAVING_SECONDS", 0.2)
    hung = threading.Event()

    def serve(method, _):
        if method == "reset":
            return ok(answer(RESET + POSITION.format(game="leduc_poker")))
        hung.wait(20)
        return ok({})

    error = InterruptedRolloutError if ends == "leave_if_stopped" else ArithmeticError

    def end(*_):
        raise error

    player = random_player()
    setattr(player, ends, end)
    with scripted_server(serve) as url:
        start = time.monotonic()
        with pytest.raises(error):
            play(config_of(url), player, [TASK] * 8)
        seconds = time.monotonic() - start
        hung.set()
    assert seconds < 5


# --- connections --------------------------------------------------------------------------------------------------

BUSY = (503, {"detail": "busy"})
LATER = (429, {"detail": "too many requests"})  # nothing was carried out


def test_an_episode_that_the_server_began_wrongly_refuses_steps():
    """Legal were the actions of the game before, and its id is known: it has to be stopped."""
    server = PublicServer()
    with env_on(server) as env:
        env.reset(TASK)
        server.replies["reset"] = answer(RESET, game_name="chess")
        with pytest.raises(ServerError, match="the server plays"):
            env.reset(TASK)
        with pytest.raises(RuntimeError, match="failed"):
            env.step("3")


def test_what_was_not_carried_out_is_repeated():
    server = PublicServer()
    server.replies["reset"] = [BUSY, (502, {}), None, (504, {}), ok(server.replies["reset"])]
    server.replies["step"] = [LATER, LATER, ok(server.replies["step"])]
    with env_on(server) as env:
        env.reset(TASK)
        assert env.step("3").score == 0.75
    assert server.methods == ["reset"] * 5 + ["step"] * 3 + ["stop"]


@pytest.mark.parametrize("reply", [(502, {}), (503, {}), (504, {}), (500, {}), None])
def test_a_step_that_may_have_been_played_is_not_repeated(reply):
    server = PublicServer(step=[reply, ok(answer("", done=True, reward=1.0))])
    with env_on(server) as env:
        env.reset(TASK)
        with pytest.raises(ServerError, match="step: "):
            env.step("3")
        with pytest.raises(RuntimeError, match="failed"):
            env.step("3")
    assert server.methods == ["reset", "step", "stop"]


def test_a_game_with_other_moves_than_were_sent_is_none():
    """A proxy that sends a step twice, say: the second is played where it happens to be legal."""
    with running_server() as url:
        env = make_env({"env_mode": "url", "env_url": url})
        for twice in (False, True):
            step = env.reset(TASK)
            if twice:
                env._server.call("step", {"action": "1", "episode_id": env._state}, 10)
            with pytest.raises(ServerError, match="its history has") if twice else contextlib.nullcontext():
                while not step.done:
                    step = env.step("1")


def test_results_agree_up_to_rounding_and_no_further():
    assert server_replies.close(0.5, 0.5 + 1e-7)
    assert server_replies.close(0.0, 1e-7)
    assert server_replies.close(1000.0, 1000.0005)
    assert not any(server_replies.close(*pair) for pair in ((0.5, 0.50001), (0.0, 1e-5), (1000.0, 1000.01)))


def test_an_answer_given_twice_in_a_game_is_refused():
    """The move has been played: the model would answer about the position before it, perhaps with a legal action."""
    with running_server() as url:
        env, task = make_env({"env_mode": "url", "env_url": url}), Task(task_id("tic_tac_toe"), 4)
        send, given = env._server.call, []
        env._server.call = lambda method, *rest: (given.append(send(method, *rest)), given[0])[1]
        env.reset(task)
        with pytest.raises(ServerError, match="step: the answer is the one given to the call before"):
            env.step("4")
        env._server.call = send


def test_cookies_are_not_kept():
    async def asked():
        pool = client.connections()
        async with pool:
            request = httpx.Request("GET", "http://127.0.0.1:1/")
            pool.cookies.extract_cookies(httpx.Response(200, headers={"Set-Cookie": "a=b"}, request=request))
            return len(pool.cookies.jar)

    assert asyncio.run(asked()) == 0


def test_repetition_ends():
    server = PublicServer(reset=[BUSY] * 20)
    with env_on(server) as env, pytest.raises(ServerError, match="HTTP 503: busy"):
        env.reset(TASK)
    assert server.methods == ["reset"] * client.ATTEMPTS


def test_a_server_that_starts_late_is_waited_for(monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.5)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
    env = make_env(config_of(url))
    with pytest.raises(ServerError, match="no connection"):
        make_env(config_of(url, env_timeout=0.2)).reset(TASK)
    late = threading.Timer(0.6, lambda: servers.enter_context(scripted_server(PublicServer(), url)))
    with contextlib.ExitStack() as servers:
        late.start()
        assert env.reset(TASK).legal
        env.close()


# --- configuration and docker -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env_mode": "url"}, "env_url '' is not allowed.*http://"),
        ({"env_mode": "url", "env_url": "localhost:8765"}, "env_url 'localhost:8765'"),
        ({"env_mode": "url", "env_url": "http://x:65536/"}, "env_url 'http://x:65536/'"),
        *(
            ({"env_url": f"http{url}"}, "^env_url is not allowed: .*without user, password or query$")
            for url in ("://user:secret@127.0.0.1:9100", "s://secret@x/", "://x/?key=secret", "://x/a#secret")
        ),
        ({"env_image": "https://me:secret@registry/games:1"}, "^env_image is not allowed: the name of an image"),
        ({"env_mode": "docker", "env_image": ""}, "env_image '' is not allowed"),
        ({"env_mode": "url", "env_url": "http://x", "prompt": "compact"}, "prompt 'compact'"),
        ({"env_mode": "url", "env_url": "http://x", "env_timeout": 0}, "env.env_timeout = 0"),
        ({"env_mode": "url", "env_url": "http://x", "env_timeout": "9"}, 'env.env_timeout = "9"'),
    ],
)
def test_what_a_server_needs_is_checked_before_anything_is_called(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        EnvConfig(**changes)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_docker_without_the_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "affinetes", None)
    with pytest.raises(ConfigError, match=r"pip install affinetes==0.2.0$"):
        make_env({"env_mode": "docker", "env_image": "image"})


class Container:
    """What ``affinetes.load_env`` returns: asynchronous methods, here those of a running server."""

    def __init__(self, url):
        self.client, self.cleaned = httpx.AsyncClient(base_url=url), False

    async def _call(self, method, kwargs):
        response = await self.client.post("/call", json={"method": method, "kwargs": kwargs})
        response.raise_for_status()
        return response.json()["result"]

    def __getattr__(self, method):
        return lambda **kwargs: self._call(method, kwargs)

    async def cleanup(self):
        self.cleaned = True


def test_docker_starts_one_container_for_all_games(monkeypatch):
    started = []
    affinetes._container.cache_clear()
    with running_server() as url:

        def load_env(**kwargs):
            started.append(kwargs)
            return Container(url)

        monkeypatch.setitem(sys.modules, "affinetes", types.SimpleNamespace(load_env=load_env))
        tasks = [Task(task_id(name), seed, "random") for name in ("leduc_poker", "hex") for seed in range(4)]
        docker = {"env_mode": "docker", "env_image": "games:1"}
        episodes = play(docker, FunctionPlayer(lambda query: min(query.legal)), tasks)
        local = play({}, FunctionPlayer(lambda query: min(query.legal)), tasks)
        assert [(e.outcome, e.score) for e in episodes] == [(e.outcome, e.score) for e in local]
        connection = affinetes._container("games:1")
        connection.close()
        assert connection._env.cleaned
    [made] = started
    assert made.pop("container_name").startswith("chat-games-")
    assert made == {"image": "games:1", "mode": "docker"}


def test_every_process_has_a_container_of_its_own(monkeypatch):
    """By name: affinetes would find another's, and the first to end would remove it under the other."""
    names = []
    monkeypatch.setitem(sys.modules, "affinetes", types.SimpleNamespace(load_env=lambda **kwargs: names.append(kwargs)))
    monkeypatch.setattr(affinetes, "atexit", types.SimpleNamespace(register=lambda function: None))
    for _ in range(2):
        affinetes.ContainerConnection("games:1")
    assert len({kwargs["container_name"] for kwargs in names}) == 2


def test_a_container_that_ends_slowly_is_waited_for_and_then_told_in_a_line(monkeypatch, caplog):
    """affinetes itself waits ten seconds before it kills one: giving up sooner left a traceback at the run's end."""
    assert affinetes.CLOSE_SECONDS >= 20
    module = types.SimpleNamespace(load_env=lambda **_: types.SimpleNamespace(cleanup=lambda: asyncio.sleep(60)))
    monkeypatch.setitem(sys.modules, "affinetes", module)
    monkeypatch.setattr(affinetes, "atexit", types.SimpleNamespace(register=lambda function: None))
    monkeypatch.setattr(affinetes, "CLOSE_SECONDS", 0.1)
    affinetes.ContainerConnection("games:1").close()
    assert caplog.messages == ["games:1: its container has not ended within 0.1 s"]


def test_docker_that_cannot_start_is_one_line(monkeypatch):
    def load_env(**kwargs):
        raise OSError("cannot reach\nthe daemon")

    affinetes._container.cache_clear()
    monkeypatch.setitem(sys.modules, "affinetes", types.SimpleNamespace(load_env=load_env))
    with pytest.raises(
        ConfigError, match=r"games:1 cannot be started \(docker pull games:1 fetches it\): cannot reach the daemon"
    ):
        make_env({"env_mode": "docker", "env_image": "games:1"})


def test_docker_that_takes_too_long_to_start_is_one_line(monkeypatch):
    affinetes._container.cache_clear()
    monkeypatch.setattr(affinetes, "START_SECONDS", 0.1)
    module = types.SimpleNamespace(load_env=lambda **_: time.sleep(1))
    monkeypatch.setitem(sys.modules, "affinetes", module)
    with pytest.raises(ConfigError, match=r"games:1 has not started within 0\.1 s$"):
        make_env({"env_mode": "docker", "env_image": "games:1"})


def test_a_container_that_hangs_or_raises_fails_the_call(monkeypatch):
    async def reset(**kwargs):
        if kwargs["seed"] == 4:
            raise ValueError("HTTP 500: bad\nTraceback (most")
        await asyncio.sleep(60)

    async def cleanup():
        pass

    container = types.SimpleNamespace(reset=reset, cleanup=cleanup)
    affinetes._container.cache_clear()
    monkeypatch.setitem(sys.modules, "affinetes", types.SimpleNamespace(load_env=lambda **kwargs: container))
    env = make_env({"env_mode": "docker", "env_image": "games:1", "env_timeout": 0.3})
    with pytest.raises(ServerError, match=r"reset: HTTP 500: bad$"):
        env.reset(TASK)
    with pytest.raises(ServerError, match=r"no answer within 0\.3 s"):
        env.reset(Task(TASK.task_id, 5))


@pytest.mark.parametrize(("replies", "ending"), [
    ({}, ("finished", 1.0)),
    ({"reset": answer("print(1)", task_id=8)}, ("failed", "asked for task 7, the server answered 'print\\(1\\)'")),
    ({"step": answer("another?")}, ("failed", "the server does not score the answer")),
    ({"step": answer("", done=True, reward=2)}, ("failed", r"score 2 is not in \[0, 1\]")),
    ({"step": answer("", error="episode_not_found")}, ("failed", "episode_not_found")),
])  # fmt: skip
def test_programs_of_a_trace_server(replies, ending):
    """Its observation is the question; what a game would tell besides is not read."""
    done = answer("Expected: 1", done=True, reward=1.0, returns=[5], history="x")
    server = PublicServer(**{"reset": answer("print(1)", task_id=7), "step": done} | replies)
    player = FunctionPlayer(lambda query: "1")
    with scripted_server(server) as url:
        config = {"env_type": "trace", "env_mode": "url", "env_url": url, "answer_mode": "free"}
        [episode] = play(config, player, [Task(7, 3)])
    outcome, said = ending
    assert episode.outcome == outcome
    if outcome == "failed":
        assert re.search(said, episode.info["error"])
        return
    assert (episode.score, episode.game, episode.info["scores"]) == (said, "trace", {0: 1.0})
    assert player.queries[0].conversation == [
        {"role": "system", "content": ""}, {"role": "user", "content": "print(1)"},
    ]  # fmt: skip
    asked = [("reset", {"task_id": 7, "seed": 3}), ("step", {"action": "1", "episode_id": "e1"})]
    assert server.calls == [*asked, ("stop", {"episode_id": "e1"})]


def test_clients_that_start_together_share_one_loop(monkeypatch):
    """Connections belong to one event loop: two of them end in "bound to a different event loop"."""
    together, slow = threading.Barrier(8), asyncio.new_event_loop

    def made_slowly():
        time.sleep(0.05)
        return slow()

    def call():
        together.wait()
        return client._loop()

    before = client._loop()
    monkeypatch.setattr(client, "_new_loop", functools.cache(client._new_loop.__wrapped__))
    monkeypatch.setattr(asyncio, "new_event_loop", made_slowly)
    with ThreadPoolExecutor(8) as threads:
        loops = {id(future.result()): future.result() for future in [threads.submit(call) for _ in range(8)]}
    for loop in loops.values():
        loop.call_soon_threadsafe(loop.stop)
    assert len(loops) == 1
    assert id(before) not in loops


def test_importing_the_client_is_not_the_servers_time(monkeypatch):
    """The first client brings httpx along, which takes longer than a short timeout."""

    class Slow:
        def __init__(self, url):
            time.sleep(0.4)

        def post(self, path, body, deadline):
            return (200, "") if time.monotonic() < deadline else (client.NO_ANSWER, "late")

    monkeypatch.setattr(affinetes, "HttpClient", Slow)
    affinetes.check_server(EnvConfig(env_mode="url", env_url="http://127.0.0.1:1", env_timeout=0.3))


def test_a_public_server_that_searches_for_somebody_else_is_there(monkeypatch):
    """It answers nothing meanwhile; 12 s were measured in liars_dice."""

    def post(client_, path, body, deadline):
        return (405, "") if deadline - time.monotonic() > 30 else (client.NO_ANSWER, "late")

    monkeypatch.setattr(client.HttpClient, "post", post)
    affinetes.check_server(EnvConfig(env_mode="url", env_url="http://127.0.0.1:1"))


def test_a_defect_of_public_servers_is_not_blamed_on_ones_own(monkeypatch):
    monkeypatch.setitem(affinetes.DEFECTS, "leduc_poker", "is out of chips")
    for path, blamed in ((None, True), (affinetes.EVALUATE_PATH, False)):
        first = answer(RESET + POSITION.format(game="leduc_poker"), **({"path": path} if path else {}))
        server = PublicServer(reset=[ok(first), *[(500, {"detail": "boom"})] * 9])
        with env_on(server) as env:
            env.reset(TASK)
            with pytest.raises(ServerError) as error:
                env.reset(TASK)
        assert ("known of public servers: is out of chips" in str(error.value)) == blamed


def test_a_refusal_of_ones_own_server_is_not_blamed_on_public_ones(monkeypatch):
    """Its first answer, since every episode has a client of its own."""
    monkeypatch.setitem(affinetes.DEFECTS, "leduc_poker", "is out of chips")
    with running_server() as url:
        task = Task(TASK.task_id, 4, "mcts:999999999x1")
        [episode] = play({"env_mode": "url", "env_url": url}, random_player(), [task])
    assert "searches more than this server allows" in episode.info["error"]
    assert "out of chips" not in episode.info["error"]


@pytest.fixture
def proxies(monkeypatch):
    """Sets the variables of a shell; connections that were made with others are no longer used."""

    def set_to(**named):
        for name, value in named.items():
            monkeypatch.setenv(name, value)
        client._pool.cache_clear()

    yield set_to
    client._pool.cache_clear()


@pytest.mark.parametrize("proxy", ["socks://127.0.0.1:7891/", "socks5://127.0.0.1:7891", "http://proxy:abc"])
def test_a_proxy_that_cannot_be_used_is_one_line(proxies, proxy):
    proxies(ALL_PROXY=proxy)
    with pytest.raises(
        ConfigError, match=r"the proxy that ALL_PROXY, HTTP_PROXY or HTTPS_PROXY names: .*(scheme|socks|port)"
    ):
        client.HttpClient("http://127.0.0.1:1")


@pytest.mark.parametrize("file", [__file__ + ".pem", __file__])
def test_certificates_that_cannot_be_read_are_one_line(proxies, file):
    client._tls.cache_clear()
    proxies(SSL_CERT_FILE=file)
    with pytest.raises(ConfigError, match=rf"^SSL_CERT_FILE={re.escape(file)}: .*(No such file|certificate)"):
        client.HttpClient("http://127.0.0.1:1")


def test_a_server_on_this_machine_is_asked_without_a_proxy(proxies):
    proxies(HTTP_PROXY="http://127.0.0.1:1", ALL_PROXY="http://127.0.0.1:1")
    with env_on(PublicServer()) as env:
        assert env.reset(TASK).legal
