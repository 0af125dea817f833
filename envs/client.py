"""JSON over HTTP to servers that nobody vouches for: every call ends, at most so late and with at most so much."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

ATTEMPTS = 5  # of a call that may be repeated
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds between them, doubling
CONNECT_SECONDS = 10.0
# Connections idle for longer are not used again: servers close them after some 5 s, perhaps while a step is sent.
KEEPALIVE_SECONDS = 2.0
GRACE_SECONDS = 1.0  # for the loop to end a call that is past its deadline
MAX_ANSWER_BYTES = 2**22

NOT_SENT, NO_ANSWER = 0, -1  # instead of an HTTP status: nothing reached the server; it may have done what was asked


def one_line(text: str, most: int = 200) -> str:
    """Return what a server sent as a line that does no harm on a terminal, at most so many characters."""
    line = " ".join(text[: 8 * most].split())[:most]
    return "".join(character if character.isprintable() else "�" for character in line)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all clients, in a thread of its own: only awaiting can be cut off at a deadline."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


def wait_for(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop, seconds: float) -> Any:
    """Return the result of ``work``, done in ``loop`` while the calling thread waits; TimeoutError at its deadline."""
    pending = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return pending.result(seconds)
    finally:
        pending.cancel()


class HttpClient:
    """POSTs JSON below one address, from any thread.

    ``headers`` go with every request. Compressed answers are refused: a few bytes of them could fill the memory.
    """

    def __init__(self, url: str, headers: dict[str, str] | None = None, most_bytes: int = MAX_ANSWER_BYTES):
        self.url, self.most_bytes = url.rstrip("/"), most_bytes
        self._headers = {"Accept-Encoding": "identity"} | (headers or {})
        _pool()  # the first one takes a while, which is no call's time

    def call(self, path: str, body: Any, seconds: float, repeatable: Callable[[int], bool]) -> tuple[int, str]:
        """Return (HTTP status, text), or (NOT_SENT or NO_ANSWER, the problem), after ``seconds`` at the latest.

        Calls whose status is ``repeatable`` are made up to ATTEMPTS times, with growing pauses.
        """
        deadline, wait = time.monotonic() + seconds, FIRST_WAIT
        for attempt in range(1, ATTEMPTS + 1):
            status, text = self.post(path, body, deadline)
            last = attempt == ATTEMPTS or time.monotonic() + wait >= deadline
            if status == 200 or last or not repeatable(status):
                break
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        return status, text

    def post(self, path: str, body: Any, deadline: float) -> tuple[int, str]:
        """Like ``call``, without repetition; ``deadline`` is of ``time.monotonic``."""
        left = max(deadline - time.monotonic(), 0.001)
        try:
            return wait_for(self._post(path, body, left), _loop(), left + GRACE_SECONDS)
        except TimeoutError:
            return NO_ANSWER, "no answer in time"

    async def _post(self, path: str, body: Any, seconds: float) -> tuple[int, str]:
        import httpx

        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        url, answer = f"{self.url}/{path}", bytearray()
        try:
            async with (
                asyncio.timeout(seconds),  # httpx has one for each read, which dripped headers and 100s never meet
                _pool().stream("POST", url, json=body, headers=self._headers, timeout=timeout) as response,
            ):
                if response.headers.get("content-encoding", "identity") != "identity":
                    return NO_ANSWER, "the answer is compressed, which nobody asked for"
                async for chunk in response.aiter_raw():
                    answer += chunk
                    if len(answer) > self.most_bytes:
                        return NO_ANSWER, f"the answer is longer than {self.most_bytes} bytes"
                return response.status_code, answer.decode(errors="replace")
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            return NOT_SENT, f"no connection: {error}"
        except httpx.HTTPError as error:
            return NO_ANSWER, f"no answer: {type(error).__name__} {error}".rstrip()


@functools.cache
def _pool() -> Any:
    """The connections of all clients, used in their event loop alone."""
    import httpx

    return httpx.AsyncClient(limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_SECONDS))
