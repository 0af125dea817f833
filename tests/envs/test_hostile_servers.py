"""Game servers that misbehave in generated ways: each call ends in time, in a sound result or one line that names it.

The game behind them is real, so that a result that gets through must be the true one, to the last move of its
history. ``pytest tests/envs/test_hostile_servers.py -s`` prints how many misbehaviours were tried and how they ended.
"""

import copy
import gzip
import itertools
import json
import random
import socket
import threading
import time

import pytest
from players import FunctionPlayer
from serving import task_id

from env_wrapper import EnvConfig, Task, play
from envs import client
from scripts.serving.actor import HostedGame

SECONDS = 0.4  # of a call
TASK = Task(task_id("leduc_poker"), 3, "random")
PLAYER = FunctionPlayer(lambda query: max(query.legal) if 1 not in query.legal else 1)

DEEP: list = []
for _ in range(300):
    DEEP = [DEEP]
VALUES = [
    None, True, False, -1, 0, 1, 2**31, 10**400, 0.5, -0.5, 1e308, float("nan"), float("inf"), "", "x", "0", "1",
    "x" * 10**6, "\x00\x1b[2J", "\ud800", "\n\n\n", "٣", "<img src=x onerror=alert(1)>", [], [[]], {},
    {"error": {}}, DEEP, [0] * 10**5, [1, 0], [0.5, 0.5], [None, None], ["a", "b"], {"0": 1}, [[0, 0]],
    [[-1, 0]] * 10**5,
]  # fmt: skip
FIELDS = ["observation", "reward", "done", "truncated", "episode_id", "info", "info.task_id", "info.seed", "info.error",
          "info.game_name", "info.llm_player_id", "info.opponent_type", "info.history", "info.returns"]  # fmt: skip
HISTORIES = [
    lambda h: h[:-1],
    lambda h: [*h, h[-1]],
    lambda h: h[::-1],
    lambda h: h[1:],
    lambda h: h * 1000,
    lambda h: [[1 - p if p >= 0 else p, a] for p, a in h],
    lambda h: [[p, a + 1] for p, a in h],
    lambda h: [[p, -a - 1] for p, a in h],
    lambda h: [[p, float(a)] for p, a in h],
    lambda h: [[p, str(a)] for p, a in h],
    lambda h: [[p, a, 0] for p, a in h],
    lambda h: [[p] for p, _ in h],
    lambda h: [[p, 99999] for p, a in h],
    lambda h: [[p, 2**70] for p, a in h],
    lambda h: [[p, bool(a)] for p, a in h],
    lambda h: [[p, [a]] for p, a in h],
    lambda h: dict(enumerate(h)),
    lambda h: [None] * len(h),
    lambda h: [[9, a] for p, a in h],
    lambda h: [[a, p] for p, a in h],
]
POSITIONS = [
    lambda t: t.replace("Legal Actions:", ""),
    lambda t: t.replace(" -> ", " => "),
    lambda t: t + t,
    lambda t: t[::-1],
    lambda t: ("Current State:\n" + "\n\nLegal Actions:\n") * 8000,
    lambda t: "Current State:\n" * 15000 + t,
    lambda t: t.replace("Your choice", "\n\nYour choice" * 15000),
    lambda t: "# Game Rules\n" * 15000,
    lambda t: t.replace("  1 ->", "  " + "9" * 5000 + " ->"),
    lambda t: t.replace("  1 ->", "  -1 ->"),
    lambda t: t.replace("Legal Actions:\n", "Legal Actions:\n" + "".join(f"  {i} -> a\n" for i in range(15000))),
    lambda t: t.replace("Legal Actions:\n", "Legal Actions:\n  1 -> a\n  1 -> b\n"),
    lambda t: "\n" * 200_000 + t,
    lambda t: t.replace("Legal Actions:\n", "Legal Actions:\n" + " " * 200_000),
    lambda t: t.replace("1", "१"),
]


def changed(result, path, value):
    result, parent = copy.deepcopy(result), None
    target = result
    for key in path.split("."):
        parent, target = target, target.get(key)
    parent[path.rpartition(".")[2]] = (value(target) if target is not None else None) if callable(value) else value
    return result


def body(text, head=b"", status=b"200 OK"):
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status, head, len(data), data)


def said(result):
    return json.dumps({"status": "success", "result": result, "error": None})


def dripped(pieces):
    """Send pieces for longer than a call may take."""

    def act(send, result):
        deadline = time.monotonic() + 3 * SECONDS
        for piece in itertools.cycle(pieces):
            send(piece)
            time.sleep(0.01 if len(piece) < 1000 else 0)
            if time.monotonic() > deadline:
                break

    return act


def wire(make):
    return lambda send, result: send(make(said(result)))


OK = b"HTTP/1.1 200 OK\r\n"
WIRES = {
    "nothing": lambda send, result: None,
    "silence": lambda send, result: time.sleep(2 * SECONDS),
    "drips of a status line": dripped([b"H", b"T", b"T"]),
    "drips of headers": dripped([OK, *[b"X: y\r\n"] * 10**6]),
    "drips of one header": dripped([OK + b"X: ", *[b"y"] * 10**6]),
    "100 for ever": dripped([b"HTTP/1.1 100 Continue\r\n\r\n"]),
    "100 for ever, fast": dripped([b"HTTP/1.1 100 Continue\r\n\r\n" * 1000]),
    "103": dripped([b"HTTP/1.1 103 Early\r\n\r\n"]),
    "drips of a body": dripped([OK + b"Content-Length: 99999\r\n\r\n", *[b" "] * 10**6]),
    "drips of chunks": dripped([OK + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 10**6]),
    "an endless body": dripped([OK + b"\r\n", *[b" " * 65536] * 10**6]),
    "an endless header": dripped([OK + b"X: ", *[b"y" * 65536] * 10**6]),
    "garbage": wire(lambda t: bytes(range(256)) * 9),
    "no status": wire(lambda t: b"\r\n\r\n" + t.encode()),
    "no HTTP": wire(lambda t: t.encode()),
    "a short body": wire(lambda t: OK + b"Content-Length: 99999\r\n\r\n" + t.encode()),
    "a long body": wire(lambda t: body(t).replace(b"Content-Length: ", b"Content-Length: 00") + b"more"),
    "a negative length": wire(lambda t: OK + b"Content-Length: -1\r\n\r\n" + t.encode()),
    "two lengths": wire(lambda t: OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n" + t.encode()),
    "bad chunks": wire(lambda t: OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + t.encode()),
    "a huge chunk": wire(lambda t: OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + t.encode()),
    "compressed": wire(lambda t: body(gzip.compress(t.encode()), b"Content-Encoding: gzip\r\n")),
    "a bomb": wire(lambda t: body(gzip.compress(b" " * 2**26), b"Content-Encoding: gzip\r\n")),
    "a double bomb": wire(
        lambda t: body(gzip.compress(gzip.compress(b" " * 2**27)), b"Content-Encoding: gzip, gzip\r\n")
    ),
    "told to be gzip": wire(lambda t: body(t, b"Content-Encoding: gzip\r\n")),
    "UTF-16": wire(lambda t: body(t.encode("utf-16"))),
    "a redirect": wire(lambda t: body(t, b"Location: http://127.0.0.1:1/\r\n", b"307 Temporary Redirect")),
    "a switch": wire(lambda t: b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n" + t.encode()),
    "no content": wire(lambda t: b"HTTP/1.1 204 No Content\r\n\r\n"),
    "HTTP/1.0": wire(lambda t: b"HTTP/1.0 200 OK\r\n\r\n" + t.encode()),
    "twice": wire(lambda t: body(t) * 2),
    "a BOM": wire(lambda t: body("\ufeff" + t)),
    "a zero": wire(lambda t: body("\0" + t)),
    "cut off": wire(lambda t: body(t[: len(t) // 2])),
    "bad UTF-8": wire(lambda t: body(t.encode()[:-2] + b"\xff}")),
    "deep": wire(lambda t: body("[" * 10**5)),
    "a long number": wire(lambda t: body('{"status": ' + "9" * 10**5)),
    "a list": wire(lambda t: body(f"[{t}]")),
    "failed": wire(lambda t: body(t.replace("success", "failed"))),
    "keys twice": wire(lambda t: body(t[:-1] + ', "result": {}}')),
    "5 MB": wire(lambda t: body(t + " " * (5 << 20))),
    **{
        f"HTTP {n}": wire(lambda t, n=n: body(t, status=b"%d No" % n))
        for n in (201, 400, 401, 404, 418, 429, 500, 599, 999)
    },
}


def answers(change):
    return lambda send, result: send(body(said(change(result))))


MISBEHAVIOURS = {
    **WIRES,
    **{f"{f} {str(v)[:9]!r}": answers(lambda r, f=f, v=v: changed(r, f, v)) for f in FIELDS for v in VALUES},
    **{f"history {i}": answers(lambda r, h=h: changed(r, "info.history", h)) for i, h in enumerate(HISTORIES)},
    **{f"position {i}": answers(lambda r, p=p: changed(r, "observation", p)) for i, p in enumerate(POSITIONS)},
    **{f"without {f}": answers(lambda r, f=f: {k: v for k, v in r.items() if k != f}) for f in FIELDS[:6]},
    **{
        f"returns x {x}": answers(lambda r, x=x: changed(r, "info.returns", lambda v: [x * u for u in v]))
        for x in (-1, 2, 99)
    },
    **{
        f"score {x}": answers(lambda r, x=x: changed(r, "reward", x))
        for x in (0.0, 1.0, 0.25, 1 + 1e-9, -1e-9, "0.5", [0.5])
    },
}


class HostileServer:
    """Plays truly, but for the ``at``-th call of reset or step, which ``act(send, result)`` answers."""

    def __init__(self, act, at):
        self.act, self.at, self.calls, self.episode = act, at, 0, None
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with connection:
            try:
                head, _, rest = connection.recv(65536).partition(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                while len(rest) < length:
                    rest += connection.recv(65536)
                request = json.loads(rest)
                result = self.result(request["method"], request["kwargs"])
                self.calls += request["method"] != "stop"
                hostile = request["method"] != "stop" and self.calls == self.at
                (self.act if hostile else answers(lambda r: r))(connection.sendall, result)
            except (OSError, IndexError):  # the other side has hung up
                pass

    def result(self, method, kwargs):
        if method == "reset":
            self.episode = HostedGame("e1", TASK, None)
            self.episode.step = self.episode.env.reset(TASK)
        if method == "step":
            self.episode.step = self.episode.env.step(kwargs["action"])
        return {"status": "ok"} if method == "stop" else self.episode.response(self.episode.step.score)


@pytest.fixture(scope="module")
def truth():
    [episode] = play({}, PLAYER, [TASK])
    assert episode.outcome == "finished"
    assert episode.info["n_decisions"] == {1: 2}  # a reset, a step that goes on, a step that ends: calls 1 to 3
    return episode


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_misbehaviour_costs_more_than_its_episode(truth, monkeypatch, many):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
    assert len(MISBEHAVIOURS) >= 60
    cases = [(name, at) for name in MISBEHAVIOURS for at in (1, 2, 3)]
    if not many:
        lies = [(name, 3) for name in MISBEHAVIOURS if name.startswith(("history ", "returns x", "score "))]
        cases = lies + random.Random(20261122).sample(cases, 150) + [(name, 1) for name in list(WIRES)[:12]]
    ends = {"failed": 0, "finished": 0}
    for name, at in cases:
        server = HostileServer(MISBEHAVIOURS[name], at)
        start = time.monotonic()
        config = EnvConfig(env_mode="url", env_url=server.url, env_timeout=SECONDS)
        [episode] = play(config, PLAYER, [TASK])
        took, what = time.monotonic() - start, (name, at, episode.info)
        server.listener.close()
        ends[episode.outcome] += 1
        assert took < SECONDS + 2.5, what  # and that for a busy machine
        if episode.outcome == "failed":
            error = episode.info["error"]
            assert error.startswith(f"ServerError: leduc_poker on {server.url}: "), what
            assert error.isprintable(), what
            assert len(error) < 700, what
        else:
            assert episode.score == truth.score, what
            assert episode.info["history"] in ([], truth.info["history"]), what
            assert episode.info["returns"] in (None, truth.info["returns"]), what
    print(f"\n{len(MISBEHAVIOURS)} misbehaviours, {len(cases)} games: {ends}")
    assert min(ends.values()) > 10
