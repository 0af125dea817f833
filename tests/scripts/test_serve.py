"""scripts/serve.py over real HTTP: protocol, errors, concurrency, and the public client."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from players import FunctionPlayer, random_player
from serving import SERVE, running_server, server_process

import games
from config.reader import load_config
from curriculum import CurriculumConfig, pool
from env_wrapper import Task, play
from envs import openspiel
from envs.openspiel import derive_seed
from envs.types import Step
from scripts import serve
from scripts.serving import actor as actor_module
from scripts.serving.actor import Actor, HostedGame, RequestError, _lower_priority, read_task

SIZE = games.CONFIGS_PER_GAME


def task_id(name, config_id=1):
    return games.NAMES.index(name) * SIZE + config_id


@pytest.fixture(scope="module")
def server():
    with running_server() as url:
        yield url


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server, timeout=60) as client:
        yield client


def call(client, method, **kwargs):
    content = json.dumps(kwargs)  # with half characters as escapes, which httpx would not make
    response = client.post(f"/{method}", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["status"], answer["error"]) == ("success", None)
    return answer["result"]


def error_of(answer):
    return answer["info"]["error"]["type"]


def legal_ids(observation):
    listed = observation.split("Legal Actions:\n")[1].split("\n\n")[0]
    return [int(line.split(" -> ")[0]) for line in listed.splitlines()]


# --- whole games --------------------------------------------------------------------------------------------------

# The client's own process: it patches asyncio and logs. It plays like ``random_player`` does, and prints the ends.
CLIENT = """
import asyncio, json, re, sys
import affinetes

async def main(env, tasks):
    for task_id, seed in tasks:
        async with await env.openenv().reset(task_id=task_id, seed=seed, opponent="random") as session:
            answer, moves = session.last, 0
            while not answer["done"]:
                legal = re.findall(r"^ *(\\d+) -> ", answer["observation"].split("Legal Actions:")[1], re.M)
                answer = await session.step(legal[(7 * moves + seed) % len(legal)])
                moves += 1
        print(json.dumps([task_id, seed, moves, answer["reward"], answer["info"]["history"]]))
    await env.cleanup()

env = affinetes.load_env(mode="url", base_url=sys.argv[1])
asyncio.get_event_loop().run_until_complete(main(env, json.loads(sys.argv[2])))
"""


def test_the_public_client_plays_every_game_to_the_end(server):
    tasks = [(index * SIZE + 1, 4 + index % 2) for index in range(len(games.GAMES))]
    command = [sys.executable, "-c", CLIENT, server, json.dumps(tasks)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    played = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert [(t, s) for t, s, *_ in played] == tasks
    asked = [0] * len(tasks)

    def same_choice(query):
        legal = list(query.legal)
        asked[query.episode] += 1
        return legal[(7 * (asked[query.episode] - 1) + tasks[query.episode][1]) % len(legal)]

    episodes = play({"protocol": "affinetes"}, FunctionPlayer(same_choice), [Task(t, s) for t, s in tasks])
    for (_, _, moves, score, history), episode, decisions in zip(played, episodes, asked, strict=True):
        assert (moves, score, history) == (decisions, episode.score, episode.info["history"]), episode.game
        assert moves > 0


def outcome(episode):
    return episode.task, episode.game, episode.score, episode.outcome, episode.info


def test_games_over_http_are_the_local_ones_to_the_last_character(server):
    tasks = [Task(index * SIZE + 2, 6 + index % 2, "random", index) for index in range(len(games.GAMES))]
    tasks += [Task(task_id("leduc_poker"), None, "ismcts:20x1", 90), Task(task_id("hex_small"), 3, "mcts:20x2", 91)]
    here, there = random_player(), random_player()
    local = play({}, here, tasks)
    remote = play({"env_mode": "url", "env_url": server, "env_timeout": 60}, there, tasks)
    for ours, theirs in zip(local, remote, strict=True):
        ours.info["scores"] = {ours.info["seat"]: ours.info["scores"][ours.info["seat"]]}  # servers tell one seat's
        assert outcome(theirs) == outcome(ours)
    ordered = [sorted(player.queries, key=lambda query: (query.episode, query.rng_key)) for player in (here, there)]
    assert ordered[0] == ordered[1]


# --- the protocol -------------------------------------------------------------------------------------------------


def test_health_methods_and_both_ways_to_call(client):
    assert client.get("/health").json() == {"status": "ok"}
    listed = client.get("/methods").json()
    assert [method["name"] for method in listed["methods"]] == ["reset", "step", "state", "stop"]
    assert listed["methods"][1]["signature"].startswith("(action: str | None = None, episode_id: str | None = None)")
    asked = {"task_id": task_id("leduc_poker"), "seed": 0, "opponent": "random"}
    bodies = [("/reset", asked), ("/reset", {"args": [], "kwargs": asked}), ("/reset", {"args": list(asked.values())}),
              ("/call", {"method": "reset", "args": list(asked.values())}),
              ("/call", {"method": "reset", "kwargs": asked}),
              ("/reset", asked | {"task_id": str(asked["task_id"])}),
              ("/call", {"method": "reset", "kwargs": {"task_id": asked["task_id"], "seed": 0,
                                                       "kwargs": {"opponent": "random"}}})]  # fmt: skip
    answers = [client.post(path, json=body).json()["result"] for path, body in bodies]
    assert len({answer.pop("episode_id") for answer in answers}) == len(bodies)
    assert all(answer == answers[0] for answer in answers)


def test_reset_step_state_stop(client):
    first = call(client, "reset", task_id=task_id("leduc_poker"), seed=1, opponent="random")
    game, params = games.decode_task_id(task_id("leduc_poker"))
    assert first["observation"].startswith(f"# Game Rules\n{game.rules(params)}\n\n# Current Game State\nGame: leduc_")
    assert "You are Player 1.\n\nCurrent State:\nYour card: " in first["observation"]
    assert first["observation"].endswith("\n\nYour choice (action ID only):")
    assert (first["reward"], first["done"], first["truncated"]) == (0.0, False, False)
    known = {"task_id": task_id("leduc_poker"), "seed": 1, "game_name": "leduc_poker", "llm_player_id": 1,
             "opponent_type": "random", "path": "evaluate", "step_count": 0, "cumulative_reward": 0.0}  # fmt: skip
    assert first["info"] == known
    named = {"episode_id": first["episode_id"]}
    again = call(client, "state", **named)
    assert again == first | {"observation": first["observation"].split("# Current Game State\n")[1]}
    answer, rng = again, random.Random(0)
    while not answer["done"]:
        answer = call(client, "step", action=str(rng.choice(legal_ids(answer["observation"]))), **named)
    assert 0 <= answer["reward"] == answer["info"]["cumulative_reward"] <= 1
    assert answer["observation"].startswith("Game Over: leduc_poker\nYou were Player 1.\n\nFinal Returns: [")
    assert f"Normalized Score: {answer['reward']:.3f}\nResult: " in answer["observation"]
    assert len(answer["info"]["returns"]) == 2
    ended = call(client, "step", action="1", **named)
    assert (error_of(ended), ended["done"], ended["reward"]) == ("episode_done", True, 0.0)
    assert ended["info"]["error"]["retryable"] is True
    told = call(client, "state", **named)
    assert (told["done"], told["reward"]) == (True, answer["reward"])  # for who has lost the answer to the last step
    assert call(client, "stop", **named) == {"status": "ok", "stopped": True, **named}
    assert call(client, "stop", **named)["stopped"] is False
    assert call(client, "state", **named)["observation"] == "Episode not found."


@pytest.mark.parametrize(("score", "result"), [(1.0, "WIN"), (0.51, "WIN"), (0.5, "DRAW"), (0.49, "LOSS")])
def test_the_end_of_a_game_is_told_in_a_word(score, result):
    end = Step("", {}, True, score, {"game": "hex", "seat": 1, "returns": [-2.0, 2.0]})
    told = actor_module._end_text(end).splitlines()
    assert told[-3:] == ["Your Return: 2.0", f"Normalized Score: {score:.3f}", f"Result: {result}"]


def test_what_is_told_of_a_game_does_not_count_moves_that_it_hides(client):
    """How often the opponent tried in vain is its to know, until the end."""
    others = set()
    for seed in range(1, 41, 2):
        answer, own = call(client, "reset", task_id=task_id("phantom_ttt"), seed=seed, opponent="random"), 0
        while not answer["done"]:
            assert answer["info"]["step_count"] == own
            action, own = str(legal_ids(answer["observation"])[0]), own + 1
            answer = call(client, "step", action=action, episode_id=answer["episode_id"])
        others.add(answer["info"]["step_count"] - own)
    assert len(others) > 1


@pytest.mark.parametrize("action", ["99", "no idea", "", None, True, [1], {"id": 1}, "9" * 5000, "\ud800"])
def test_an_illegal_action_changes_nothing_and_may_be_repeated(client, action):
    first = call(client, "reset", task_id=task_id("hex_small"), seed=1, opponent="random")
    for _ in range(5):
        answer = call(client, "step", action=action, episode_id=first["episode_id"])
        assert (error_of(answer), answer["reward"], answer["done"]) == ("invalid_action", -0.01, False)
        assert answer["info"].pop("error")["retryable"] is True
        assert answer["info"] == first["info"]
        shown = str(action)[:100].replace("\ud800", "?")
        said = f'Invalid action: "{shown}"\n\nCould not parse a valid action ID. Please respond with just'
        assert answer["observation"].startswith(said)
        assert answer["observation"].endswith(first["observation"][first["observation"].index("\n\nLegal Actions:") :])
    legal = legal_ids(first["observation"])[0]
    after = call(client, "step", action=legal, episode_id=first["episode_id"])
    assert "error" not in after["info"]
    assert after["info"]["step_count"] == first["info"]["step_count"] + 2


@pytest.mark.parametrize(
    ("method", "kwargs", "kind", "says"),
    [
        ("step", {"action": "1"}, "no_episode_id", "episode_id"),
        ("step", {"action": "1", "episode_id": 5}, "no_episode_id", "episode_id"),
        ("step", {"action": "1", "episode_id": "x"}, "episode_not_found", "Episode not found."),
        ("step", {"action": "1", "episode_id": "\ud800"}, "episode_not_found", "Episode not found."),
        ("state", {}, "no_episode_id", "episode_id"),
        ("reset", {"task_id": -1}, "invalid_game", "0 to 2799999999"),
        ("reset", {"task_id": 28 * SIZE}, "invalid_game", "0 to 2799999999"),
        ("reset", {"task_id": "seven"}, "invalid_request", "task_id 'seven' is not an integer"),
        ("reset", {"task_id": 1.0}, "invalid_request", "task_id 1.0"),
        ("reset", {"task_id": True}, "invalid_request", "task_id True"),
        ("reset", {"task_id": 0, "seed": "1"}, "invalid_request", "seed '1'"),
        ("reset", {"task_id": 0, "opponent": 3}, "invalid_request", "opponent 3"),
        ("reset", {"task_id": 0, "opponent": "stockfish"}, "invalid_opponent", "allowed are random, mcts"),
        ("reset", {"task_id": 0, "opponent": "self"}, "invalid_opponent", "bots only"),
        ("reset", {"task_id": 22 * SIZE, "opponent": "cfr:999999999"}, "invalid_opponent", "solves games"),
        ("reset", {"task_id": 23 * SIZE, "opponent": "perfect"}, "invalid_opponent", "solves games"),
        ("reset", {"task_id": 0, "opponent": "past:" + "x" * 10**6}, "invalid_request", "opponent 'past:xxx"),
        ("reset", {"task_id": 6 * SIZE, "opponent": "mcts:100000000x1000"}, "invalid_opponent", "1000 simulations"),
        ("reset", {"task_id": 6 * SIZE, "opponent": "mcts:1001x1"}, "invalid_opponent", "1000 simulations"),
        ("reset", {"task_id": 6 * SIZE, "opponent": "mcts:500x101"}, "invalid_opponent", "50000 rollouts"),
        ("reset", {"task_id": 27 * SIZE, "opponent": "ismcts:1x99999999"}, "invalid_opponent", "50000 rollouts"),
        ("reset", {"task_id": 8 * SIZE, "opponent": "ismcts"}, "invalid_opponent", "hearts"),
        ("reset", {"task_id": 0, "mcts_max_simulations": 5}, "invalid_request", "mcts_max_simulations"),
        ("stop", {"episode": "x"}, "invalid_request", "episode"),
        ("stop", {"x" * 10**6: 1}, "invalid_request", "xxx ... xxx"),
    ],
)
def test_wrong_input_gets_the_error_object(client, method, kwargs, kind, says):
    answer = call(client, method, **kwargs)
    assert error_of(answer) == kind
    assert says in answer["info"]["error"]["message"]
    assert len(answer["observation"]) < 1100
    assert answer["observation"] == answer["info"]["error"]["message"]
    assert (answer["reward"], answer["done"], answer["truncated"]) == (0.0, True, True)
    named = kwargs["episode_id"].replace("\ud800", "?") if kind == "episode_not_found" else None
    assert answer["episode_id"] == named
    assert answer["info"].pop("error")["retryable"] is (kind in ("no_episode_id", "episode_not_found"))
    nothing = dict.fromkeys(("task_id", "seed", "game_name", "llm_player_id", "opponent_type"))
    assert answer["info"] == nothing | {"path": "evaluate", "step_count": 0, "cumulative_reward": 0.0}


def test_who_names_an_unknown_opponent_is_told_those_that_are_played(client):
    told = call(client, "reset", task_id=task_id("leduc_poker"), opponent="stockfish")["observation"]
    for opponent in told.partition("allowed are ")[2].replace("SIMSxROLLOUTS", "2x1").split(", "):
        assert "error" not in call(client, "reset", task_id=task_id("leduc_poker"), opponent=opponent)["info"]


def test_a_game_that_names_no_search_of_its_own_is_not_searched_without_bound(monkeypatch):
    """As one of the user's own may be; built-in ones that can be searched name one."""
    game, params = games.decode_task_id(23 * SIZE)
    monkeypatch.setattr(games, "decode_task_id", lambda _: (replace(game, mcts=None), params))
    assert read_task(23 * SIZE, 0, "mcts:100x10", 1.0).opponent == "mcts:100x10"
    for opponent in ("mcts:999999999x1", "mcts:101x1", "mcts:1x1001"):
        with pytest.raises(RequestError, match="allows in tic_tac_toe: 100 simulations, 1000 rollouts"):
            read_task(23 * SIZE, 0, opponent, 1.0)


def test_the_default_curriculum_can_be_played_here():
    """A search is limited only where there is one: in goofspiel search bots play at random."""
    file = SERVE.parents[1] / "config" / "curriculum_config.json"
    for stage in load_config({"curriculum": CurriculumConfig}, [file])["curriculum"].stages:
        for opponent, played in product(stage.mixture, pool(stage.games)):
            assert read_task(played * SIZE, 0, opponent, 1.0).opponent == opponent


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/call", b"{", 422), ("/call", b"[]", 422), ("/call", b"{}", 422), ("/call", b'{"method": 3}', 422),
        ("/call", b'{"method": "_find"}', 404), ("/call", b'{"method": "close"}', 404), ("/methods", b"{}", 404),
        ("/call", b'{"method": "reset", "args": {}}', 422), ("/reset", b"not json", 422), ("/reset", b"[1]", 422),
        ("/reset", b'{"kwargs": 3}', 422), ("/call", b'{"method": "reset", "task_id": 5}', 422),
        ("/reset", b'{"task_id": 5, "args": []}', 422), ("/__class__", b"{}", 404), ("/reset", b"[" * 100_000, 422),
        ("/reset", b" " * (2**20 + 1), 413), ("/evaluate", b'{"task_id": 0}', 404),
        ("/" + "x" * 5000, b"{}", 404),
    ],
)  # fmt: skip
def test_what_is_no_call_gets_an_http_error(client, path, body, status):
    response = client.post(path, content=body)
    assert response.status_code == status
    assert isinstance(response.json()["detail"], str)
    assert len(response.text) < 1100
    assert "Traceback" not in response.text


def test_wrong_verbs_and_paths(client):
    assert client.get("/reset").status_code == 405
    assert client.get("/nothing").status_code == 405
    assert client.post("/a/b").status_code == 404


def test_a_seed_and_a_task_that_are_not_given(client):
    answer = call(client, "reset", task_id=task_id("kuhn_poker"), opponent="random")
    assert answer["info"]["seed"] == derive_seed(task_id("kuhn_poker"))
    drawn = {call(client, "reset", opponent="random")["info"]["task_id"] for _ in range(4)}
    assert len(drawn) == 4
    assert all(0 <= drawn_id < len(games.GAMES) * SIZE for drawn_id in drawn)


# --- many at a time -----------------------------------------------------------------------------------------------


def play_over_http(url, task, seed, opponent, stop):
    """Play games until ``stop`` is set; return the number of decisions."""
    decisions, rng = 0, random.Random(seed)
    with httpx.Client(base_url=url, timeout=300) as client:
        while not stop.is_set():
            answer = call(client, "reset", task_id=task, seed=seed, opponent=opponent)
            while not answer["done"] and not stop.is_set():
                action = rng.choice(legal_ids(answer["observation"]))
                answer = call(client, "step", action=str(action), episode_id=answer["episode_id"])
                decisions += 1
            call(client, "stop", episode_id=answer["episode_id"])
    return decisions


# Asks for /health until its input closes; prints the seconds each call took.
PROBE = """
import http.client, select, sys, time
connection = http.client.HTTPConnection(sys.argv[1].removeprefix("http://"), timeout=60)
while not select.select([sys.stdin], [], [], 0.01)[0]:
    start = time.perf_counter()
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b'{"status":"ok"}'
    print(time.perf_counter() - start)
"""


def check_health(url, opponent, seconds):
    """16 concurrent games against a searching opponent; a process of its own measures /health."""
    stop = threading.Event()
    with ThreadPoolExecutor(16) as pool:
        tasks = [task_id(name) for name in ("hex", "liars_dice", "clobber", "euchre")] * 4
        players = [pool.submit(play_over_http, url, task, i, opponent, stop) for i, task in enumerate(tasks)]
        with subprocess.Popen([sys.executable, "-c", PROBE, url], stdin=-1, stdout=-1, text=True) as probe:
            time.sleep(seconds)
            measured, _ = probe.communicate()
        stop.set()
        decisions = sum(player.result() for player in players)
    took = sorted(1000 * float(line) for line in measured.splitlines())
    assert took[int(0.99 * len(took))] < 100  # milliseconds
    assert decisions >= 16


def test_health_is_prompt_during_16_searches(server):
    check_health(server, "mcts:300x10", 4)


@pytest.mark.slow
def test_health_is_prompt_during_16_searches_at_full_strength(server):
    check_health(server, "mcts", 60)


def test_games_without_search_do_not_wait_for_one_with():
    with (
        running_server("--search-threads", "1") as url,
        ThreadPoolExecutor(4) as pool,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        searching = [
            pool.submit(call, client, "reset", task_id=task_id("hex"), seed=1, opponent="mcts:1000x10")
            for _ in range(4)
        ]
        time.sleep(0.2)
        for seed in range(20):
            call(client, "reset", task_id=task_id("leduc_poker"), seed=seed, opponent="random")
        assert not all(search.done() for search in searching)
        assert all(search.result()["info"]["step_count"] == 1 for search in searching)


def test_steps_of_one_episode_take_turns(client):
    first = call(client, "reset", task_id=task_id("othello"), seed=0, opponent="mcts:200x5")
    legal = legal_ids(first["observation"])
    with ThreadPoolExecutor(4) as pool:
        send = [pool.submit(call, client, "step", action=legal[0], episode_id=first["episode_id"]) for _ in range(4)]
        answers = [sent.result() for sent in send]
    played = [answer for answer in answers if "error" not in answer["info"]]
    refused = [answer for answer in answers if "error" in answer["info"]]
    assert len(played) >= 1
    assert all(error_of(answer) == "invalid_action" for answer in refused)
    state = call(client, "state", episode_id=first["episode_id"])
    assert state["info"]["step_count"] == max(answer["info"]["step_count"] for answer in answers)


def test_who_waits_for_a_search_that_is_given_up_plays_nothing():
    """Its client hangs up, and the engine may still be at it."""

    async def played():
        actor = Actor("random", 10, 60.0, 1)
        name = (await actor.reset(task_id("hex_small"), 0))["episode_id"]
        game = actor._episodes[name]
        await game.lock.acquire()
        second = asyncio.ensure_future(actor.step("0", name))
        await asyncio.sleep(0)
        actor._drop(game)
        game.lock.release()
        with pytest.raises(RequestError, match="not found"):
            await second
        return game.env._history

    assert asyncio.run(played()) == []


def test_who_asks_while_the_server_stops_is_told_so(monkeypatch):
    """At Ctrl-C beside clients: forty lines for each call that waited for a thread, or came a moment later."""
    began, reset = threading.Event(), actor_module.StoppableEnv.reset
    monkeypatch.setattr(actor_module.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(
        actor_module.StoppableEnv, "reset", lambda *args: began.set() or time.sleep(0.2) or reset(*args)
    )

    async def asked():
        actor = Actor("random", 10, 60.0, 1)
        transport = httpx.ASGITransport(serve.make_app(actor))  # which raises what uvicorn would log
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:

            def ask():
                return asyncio.ensure_future(client.post("/reset", json={"task_id": task_id("hex_small"), "seed": 0}))

            calls = [ask() for _ in range(3)]
            await asyncio.to_thread(began.wait, 10)
            actor.close()
            return [answer.status_code for answer in await asyncio.gather(*calls, ask())]

    assert asyncio.run(asked()) == [200, 503, 503, 503]


@pytest.mark.parametrize("kind", [OSError, StopIteration, SystemExit])
@pytest.mark.parametrize("method", ["reset", "step"])
def test_whatever_a_game_raises_it_is_dropped_and_its_client_told(monkeypatch, method, kind):
    def fail(*_):
        raise kind("of a custom game")

    async def played():
        actor = Actor("random", 10, 60.0, 1)
        first = await actor.reset(task_id("hex_small"), 0)
        monkeypatch.setattr(actor_module.StoppableEnv, method, fail)
        asked = {"reset": (task_id("hex_small"), 1), "step": ("0", first["episode_id"])}[method]
        with pytest.raises((OSError, RuntimeError), match="of a custom game"):
            await asyncio.wait_for(actor.methods[method](*asked), 5)
        return len(actor._episodes)

    assert asyncio.run(played()) == (method == "reset")


def test_a_game_without_rules_takes_no_place_for_ever(monkeypatch):
    def unruled(task):
        found, params = games.GAMES[task // SIZE], {}
        return replace(found, rules=lambda _: 1 / 0), params

    actor, known = Actor("random", 10, 60.0, 1), games.decode_task_id
    monkeypatch.setattr(games, "decode_task_id", unruled)
    openspiel.table.cache_clear()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(actor.reset(task_id("hex_small"), 0))
    monkeypatch.setattr(games, "decode_task_id", known)
    openspiel.table.cache_clear()
    assert actor._episodes == {}


@pytest.mark.parametrize("nice", [0, 10, 19])
def test_searches_begin_whatever_the_priority(nice, monkeypatch):
    """Only who may raise priorities could set one that is higher than the process's own."""
    asked = []
    monkeypatch.setattr(actor_module.os, "nice", lambda _: nice)
    monkeypatch.setattr(actor_module.os, "setpriority", lambda *args: asked.append(args[2]))
    _lower_priority()
    assert asked == [min(nice + 5, 19)]

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(actor_module.os, "setpriority", refuse)
    _lower_priority()


def test_episodes_expire_and_are_limited():
    with (
        running_server("--max-episodes", "2", "--idle-seconds", "1.5") as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        asked = {"task_id": task_id("hex_small"), "seed": 0, "opponent": "random"}
        kept, idle = (call(client, "reset", **asked)["episode_id"] for _ in range(2))
        full = client.post("/reset", json=asked)
        assert (full.status_code, full.json()["detail"].startswith("2 episodes are running")) == (503, True)
        for _ in range(4):
            time.sleep(0.5)
            assert "error" not in call(client, "state", episode_id=kept)["info"]
        assert error_of(call(client, "state", episode_id=idle)) == "episode_not_found"
        call(client, "reset", **asked)
        assert client.post("/reset", json=asked).status_code == 503


def test_games_that_have_ended_make_room():
    asked = {"task_id": task_id("hex_small"), "seed": 0, "opponent": "random"}
    with thread_server(max_episodes=2) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        kept, _ = (call(client, "reset", **asked)["episode_id"] for _ in range(2))
        answer = call(client, "state", episode_id=kept)
        while not answer["done"]:
            answer = call(client, "step", action=legal_ids(answer["observation"])[0], episode_id=kept)
        call(client, "reset", **asked)
        assert error_of(call(client, "state", episode_id=kept)) == "episode_not_found"


# --- the program --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--port", "70000"], 2, "--port: 70000: expected at least 0 and at most 65535"),
        (["--opponent", "stockfish"], 2, "--opponent: opponent 'stockfish' is not known"),
        (["--opponent", "self"], 2, "bots only"),
        (["--max-episodes", "0"], 2, "--max-episodes: 0: expected at least 1"),
        (["--idle-seconds", "nan"], 2, "--idle-seconds: nan: expected at least 0.001"),
        (["--max-search", "0"], 2, "--max-search: 0: expected at least 0.001"),
        (["--games-path", "/none"], 2, "error: --games-path: games_path: /none is not a folder"),
        (["--search-threads", "-1"], 2, "--search-threads: -1: expected at least 0"),
    ],
)
def test_bad_usage_is_one_line(arguments, code, says):
    result = subprocess.run([sys.executable, str(SERVE), *arguments], capture_output=True, text=True)
    assert result.returncode == code
    assert says in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("closed", [">&-", "| true"])
def test_nobody_needs_to_read_the_address(closed):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f'"{sys.executable}" "{SERVE}" --port {port} {closed}'
    with subprocess.Popen(["bash", "-c", command], stderr=subprocess.PIPE, text=True, start_new_session=True) as shell:
        try:
            for _ in range(300):
                with contextlib.suppress(httpx.TransportError):
                    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
                    break
                assert shell.poll() is None, shell.stderr.read()
                time.sleep(0.1)
            else:
                pytest.fail("nobody answers")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)


def test_a_taken_port_is_one_line(server):
    result = subprocess.run(
        [sys.executable, str(SERVE), "--port", server.rpartition(":")[2]], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "cannot listen on 127.0.0.1" in result.stderr


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "no\0host", "256.1.1.1"])
def test_a_host_that_no_machine_has_is_one_line(host, capsys):
    assert serve.main(["--host", host, "--port", "0"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"serve: cannot listen on {host} port 0: ")


@contextlib.contextmanager
def thread_server(**settings):
    """The server in a thread of this process, where its clocks can be set; give its port."""
    actor = Actor("random", settings.get("max_episodes", 10), 3600, 1)
    server, listener = serve.GameServer(actor), serve._listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        actor.close()
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "drips",
    [
        [], [b"G"], [b"GET /health HTTP/1.1\r\n"] + [b"X: 1\r\n"] * 99, [b"\r\n"] * 99,
        [b"GET /health HTTP/1.1\r\n\r\n"] + [b"G", b"E", b"T", b" "] * 20,
        [b"POST /reset HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"{"],
        [b"POST /reset HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"] + [b"1\r\n \r\n"] * 99,
    ],
)  # fmt: skip
def test_a_client_that_takes_its_time_is_hung_up_on(monkeypatch, drips):
    monkeypatch.setattr(serve, "REQUEST_SECONDS", 0.5)
    with thread_server() as port, socket.create_connection(("127.0.0.1", port)) as slow:
        slow.settimeout(5)
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for drip in drips:
                slow.sendall(drip)
                time.sleep(0.03)
            while slow.recv(4096):
                pass
        assert time.monotonic() - start < 4.5


@pytest.mark.parametrize("requests", [40, 20_000])  # whose answers fit into a buffer of the server, or do not
def test_a_client_that_takes_no_answer_is_hung_up_on(monkeypatch, requests):
    def narrow(*where, listen=serve._listen):
        listener = listen(*where)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(serve, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(serve, "_listen", narrow)
    with thread_server() as port, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.setblocking(False)
        start, asked = time.monotonic(), b"GET /methods HTTP/1.1\r\nHost: x\r\n\r\n" * requests
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < start + 4:
                with contextlib.suppress(BlockingIOError):
                    asked = asked[deaf.send(asked or b"G") :]
                time.sleep(0.01)
        assert time.monotonic() < start + 4


def test_a_client_that_takes_its_answer_late_is_not_hung_up_on():
    protocol = object.__new__(serve.ImpatientProtocol)
    protocol.flow, protocol.loop, protocol.transport = Mock(), Mock(), Mock()
    protocol.pause_writing()
    protocol.loop.call_later.assert_called_once_with(serve.REQUEST_SECONDS, protocol.transport.abort)
    protocol.resume_writing()
    protocol.loop.call_later.return_value.cancel.assert_called_once_with()


def test_a_game_that_fails_costs_no_call_of_another(monkeypatch):
    with thread_server() as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        failing, other = (call(client, "reset", task_id=task_id("hex_small"), seed=seed) for seed in (0, 2))
        with monkeypatch.context() as patch:
            patch.setattr(actor_module.StoppableEnv, "step", lambda self, text: 1 / 0)
            failed = client.post("/step", json={"action": "0", "episode_id": failing["episode_id"]})
        assert (failed.status_code, failed.json()["detail"]) == (500, "ZeroDivisionError: division by zero")
        assert failed.headers["connection"] == "close"  # else the next call is lost, or is not: who is faster
        assert "error" not in call(client, "state", episode_id=other["episode_id"])["info"]


def test_a_body_on_its_way_when_the_server_stops_fills_no_log(caplog):
    with contextlib.ExitStack() as held:
        with thread_server() as port:
            slow = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            slow.sendall(b"POST /reset HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n{")
            time.sleep(0.3)
        assert slow.recv(4096).startswith(b"HTTP/1.1 503 ")
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_client_that_hangs_up_in_its_body_fills_no_log(caplog, capsys):
    with thread_server() as port:
        with socket.create_connection(("127.0.0.1", port)) as cut:
            cut.sendall(b"POST /reset HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n{")
        with socket.create_connection(("127.0.0.1", port)) as odd:
            odd.sendall(b"\x16\x03\x01\r\n\r\n")
        time.sleep(0.3)
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    assert [record for record in caplog.records if record.exc_info] == []
    assert capsys.readouterr().err == ""


def test_games_that_nobody_plays_give_way(monkeypatch):
    asked = {"task_id": task_id("hex_small"), "seed": 0, "opponent": "random"}
    with thread_server(max_episodes=5) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        kept, *_ = [call(client, "reset", **asked)["episode_id"] for _ in range(5)]
        assert client.post("/reset", json=asked).status_code == 503
        call(client, "state", episode_id=kept)
        with monkeypatch.context() as patch:
            patch.setattr(actor_module, "RECLAIM_SECONDS", 0)
            for _ in range(4):
                call(client, "reset", **asked)
        assert client.post("/reset", json=asked).status_code == 503
        assert "error" not in call(client, "state", episode_id=kept)["info"]


def test_who_thinks_is_kept_and_the_longest_unused_gives_way():
    actor, now = Actor("random", 2, 10.0, 1), time.monotonic()

    def unused_for(**seconds):
        actor._episodes = {
            name: HostedGame(name, Task(0), actor._quick_pool, used=now - age) for name, age in seconds.items()
        }
        return actor._episodes

    asyncio.run(unused_for(young=5, thinks=100, old=50)["thinks"].lock.acquire())
    actor._expire()
    assert {*actor._episodes} == {"young", "thinks"}
    actor._idle_seconds, seconds = 1e6, actor_module.RECLAIM_SECONDS
    unused_for(less=2 * seconds, more=3 * seconds)
    actor._make_room()
    assert {*actor._episodes} == {"less"}


def seconds_of_cpu(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def leave_searching(url, count):
    """Ask for games that take seconds of search each, and hang up on them."""
    body = json.dumps({"task_id": task_id("hex"), "seed": 1, "opponent": "mcts"}).encode()
    head = b"POST /reset HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    clients = [socket.create_connection(address) for _ in range(count)]
    for one in clients:
        one.sendall(head + body)
    time.sleep(0.5)
    return clients


def test_nobody_searches_for_a_client_that_is_gone():
    with server_process("--search-threads", "1") as (process, url):
        for one in leave_searching(url, 40):
            one.close()
        before = seconds_of_cpu(process)
        deadline = time.monotonic() + 30  # the search that runs ends, which takes a second or, on a busy machine, some
        while (now := seconds_of_cpu(process)) - before > 0.05 and time.monotonic() < deadline:
            before = now
            time.sleep(1)
        assert now - before <= 0.05
        assert now < 12  # of 40 searches at a second or more
        with httpx.Client(base_url=url) as client:
            assert not call(client, "reset", task_id=task_id("leduc_poker"), opponent="random")["done"]


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_searches_too(sign):
    with server_process("--search-threads", "1", "--max-search", "100") as (process, url):
        clients = leave_searching(url, 5)
        process.send_signal(sign)
        code = process.wait(8)
        assert code in (130, -signal.SIGTERM)
        assert "Traceback" not in process.stderr.read()
        for one in clients:
            one.close()


@pytest.mark.parametrize(
    "name", ["leduc_poker", "kuhn_poker", "hex_small", "liars_dice", "blackjack", "goofspiel_small"]
)
def test_illegal_answers_never_cost_the_result(client, name):
    """Each move after nothing and after three answers that are none: the same game, to the same end."""

    def result(seed, illegal):
        answer = call(client, "reset", task_id=task_id(name), seed=seed, opponent="random")
        while not answer["done"]:
            named = {"episode_id": answer["episode_id"]}
            for text in illegal:
                assert error_of(call(client, "step", action=text, **named)) == "invalid_action"
            legal = legal_ids(answer["observation"])
            answer = call(client, "step", action=str(legal[(3 + seed) % len(legal)]), **named)
        told = answer["info"]
        assert answer["observation"].count("Normalized Score") == 1
        return answer["reward"], told["returns"], told["history"]

    for seed in range(6):
        assert result(seed, ["x", "99999", ""]) == result(seed, [])


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "script"])
def test_interrupted_is_130(before):
    """Started from a terminal, and by a shell's ``&``, which has interrupts ignored."""
    was = signal.signal(signal.SIGINT, before)
    command = [sys.executable, str(SERVE), "--port", "0", "--opponent", "random"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, was)
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline().startswith("serving 28 games on http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert "Traceback" not in process.stderr.read()


def test_an_interrupt_is_not_lost_where_python_ignores_exceptions():
    """As in a callback while uvicorn imports its loop: what a handler raises there is printed, and that is all."""
    code = """
import os, signal, uvicorn
from scripts import serve

class Gone:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

factory = uvicorn.Config.get_loop_factory
uvicorn.Config.get_loop_factory = lambda config: Gone() and factory(config)
os._exit(serve.main(["--port", "0", "--opponent", "random"]))
"""
    command, root = [sys.executable, "-c", code], SERVE.parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=30)
    assert done.returncode == 130
    assert done.stderr == ""


def test_whoever_serves_may_choose_what_is_searched():
    """The bound is for clients."""
    assert serve._arguments(["--opponent", "mcts:1001x1"]).opponent == "mcts:1001x1"

    with running_server("--opponent", "mcts:1001x1") as url, httpx.Client(base_url=url, timeout=60) as asker:
        assert "error" not in call(asker, "reset", task_id=task_id("tic_tac_toe"), seed=1)["info"]
        refused = call(asker, "reset", task_id=task_id("tic_tac_toe"), seed=1, opponent="mcts:1001x1")
        assert "searches more than this server allows" in refused["info"]["error"]["message"]
