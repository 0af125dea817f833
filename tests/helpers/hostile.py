"""Servers that misbehave on the wire and in what they say, for the tests of what they may cost."""

import copy
import gzip
import itertools
import json
import random
import socket
import threading
import time
from typing import Any

SECONDS = 0.4  # of a call

DEEP: list = []
for _ in range(300):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2**31,
    10**400,
    0.5,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "1",
    "x" * 10**6,
    "\x00\x1b[2J",
    "\ud800",
    "\n\n\n",
    "٣",
    "<img src=x onerror=alert(1)>",
    [],
    [[]],
    {},
    {"error": {}},
    DEEP,
    [0] * 10**5,
    [1, 0],
    [0.5, 0.5],
    [None, None],
    ["a", "b"],
    {"0": 1},
    [[0, 0]],
    [[-1, 0]] * 10**5,
]


def changed(answer, path, value):
    """A copy of an answer with another value at a dotted path; numbers are places in lists."""
    target = answer = copy.deepcopy(answer)
    for key in path.split("."):
        key = int(key) if key.isdigit() else key
        parent, target = target, target.get(key) if isinstance(target, dict) else target[key]
    parent[key] = (value(target) if target is not None else None) if callable(value) else value
    return answer


def body(text, head=b"", status=b"200 OK"):
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return b"HTTP/1.1 %s\r\n%sConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (status, head, len(data), data)


def dripped(pieces):
    """Send pieces for longer than a call may take."""

    def act(send, answer):
        deadline = time.monotonic() + 3 * SECONDS
        for piece in itertools.cycle(pieces):
            send(piece)
            time.sleep(0.01 if len(piece) < 1000 else 0)
            if time.monotonic() > deadline:
                break

    return act


def wire(make):
    return lambda send, answer: send(make(json.dumps(answer)))


OK = b"HTTP/1.1 200 OK\r\n"
WIRES = {
    "nothing": lambda send, answer: None,
    "silence": lambda send, answer: time.sleep(2 * SECONDS),
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
    """The true answer, changed."""
    return lambda send, answer: send(body(json.dumps(change(answer))))


def lies(fields):
    """Every field of an answer with every value in its place."""
    return {f"{f} {str(v)[:9]!r}": answers(lambda a, f=f, v=v: changed(a, f, v)) for f in fields for v in VALUES}


def some_of(misbehaviours, places, count):
    """Pairs of a misbehaviour and a place, drawn with a seed; ``count`` None: all of them."""
    cases = [(name, place) for name in misbehaviours for place in places]
    return cases if count is None else random.Random(20261122).sample(cases, count)


class HostileServer:
    """Says what ``truth(path, body)`` returns; where ``hostile(path, body)`` is true, ``act(send, answer)`` answers."""

    def __init__(self, act, truth, hostile):
        self.act, self.truth, self.hostile = act, truth, hostile
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
                path, length = head.split(b" ")[1].decode(), head.lower().partition(b"content-length: ")[2]
                length = int(length.split(b"\r\n")[0] or 0)
                while len(rest) < length:
                    rest += connection.recv(65536)
                asked = json.loads(rest) if rest else {}
                answer = self.truth(path, asked)
                act = self.act if self.hostile(path, asked) else answers(lambda a: a)
                act(connection.sendall, answer)
            except (OSError, IndexError):  # the other side has hung up
                pass
