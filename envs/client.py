"""JSON over HTTP to untrusted servers: every call is limited in time and in the size of its answer."""

import asyncio
import functools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Coroutine
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

from config.reader import ConfigError, blaming, deeper_than, parse_json

ATTEMPTS = 5  # of a call that may be repeated
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds between attempts, doubling
CONNECT_SECONDS = 10.0
HUB_SECONDS = 5.0  # until the Hub counts as out of reach
# Connections idle for longer are not reused: servers close them after some 5 s, perhaps while a step is being sent.
KEEPALIVE_SECONDS = 2.0
GRACE_SECONDS = 1.0  # for the loop to cancel a call that is past its deadline
MAX_ANSWER_BYTES = 2**22
MAX_DEPTH = 16  # of lists and objects in an answer

NOT_SENT, NO_ANSWER = 0, -1  # instead of an HTTP status: nothing reached the server; it may have done the call


def one_line(text: str, most: int = 200) -> str:
    """Return what a server sent as one line of at most ``most`` characters, harmless on a terminal.

    The key goes first, the only secret that servers are told: nobody would know it again where it is cut in the middle.
    """
    key = os.environ.get("OPENAI_API_KEY", "")
    text = text.replace(key, "[redacted]") if len(key) > 5 else text
    line = " ".join(text[: 8 * most].split())[:most]
    return "".join(character if character.isprintable() else "�" for character in line)


def parse(text: str) -> Any:
    """Return the JSON that a server sent; ValueError if it is not valid, or nested too deeply to be printed again."""
    answer = parse_json(text, "")
    if deeper_than(answer, MAX_DEPTH):
        raise ValueError("nested too deeply")
    return answer


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number that a float can hold: others would raise where they are used."""
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 2**63)


def problem_of(status: int, answer: Any) -> str:
    """Return a call's failure in one line."""
    text = one_line(answer if isinstance(answer, str) else json.dumps(answer))
    return text if status <= 0 else f"HTTP {status}: {text}"


def bearer() -> dict[str, str]:
    """Return the header for the key in OPENAI_API_KEY, if set; ConfigError if no header can hold it."""
    key = os.environ.get("OPENAI_API_KEY", "")
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ConfigError("OPENAI_API_KEY: a key is printable ASCII, without spaces around it or an end of line")
    return {"Authorization": f"Bearer {key}"} if key else {}


_making = threading.Lock()  # functools.cache would let threads whose first calls coincide each make a loop


@functools.cache
def _new_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all clients, in a thread of its own: only awaited calls can be cancelled."""
    with _making:
        return _new_loop()


def wait_for(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop, seconds: float) -> Any:
    """Run ``work`` in ``loop`` while the calling thread waits, and return its result; TimeoutError if too late."""
    pending = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return pending.result(seconds)
    finally:
        pending.cancel()


class HttpClient:
    """POSTs JSON to paths below one address, from any thread, with ``headers`` in every request."""

    def __init__(self, url: str, headers: dict[str, str] | None = None):
        self.url, self._headers = url.rstrip("/"), headers or {}
        _pool()  # slow the first time, which should not count as a call's time

    def call(
        self, path: str, body: Any, seconds: float, repeatable: Callable[[int], bool], attempts: int = ATTEMPTS
    ) -> tuple[int, str]:
        """Return (HTTP status, text), or (NOT_SENT or NO_ANSWER, the problem), within ``seconds``.

        Calls whose status is ``repeatable`` are made up to ``attempts`` times, with growing pauses.
        """
        deadline, wait = time.monotonic() + seconds, FIRST_WAIT
        for attempt in range(1, attempts + 1):
            status, text = self.post(path, body, deadline)
            last = attempt == attempts or time.monotonic() + wait >= deadline
            if status == 200 or last or not repeatable(status):
                break
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        return status, text

    def post(self, path: str, body: Any, deadline: float) -> tuple[int, str]:
        """Call once, until ``deadline`` (a ``time.monotonic``); return what ``call`` returns."""
        left = max(deadline - time.monotonic(), 0.001)
        try:
            work = exchange(_pool(), f"{self.url}/{path}", body, left, self._headers)
            return wait_for(work, _loop(), left + GRACE_SECONDS)
        except TimeoutError:
            return NO_ANSWER, f"no answer within {left:.1f} s"


async def exchange(pool: Any, url: str, body: Any, seconds: float, headers: dict[str, str]) -> tuple[int, str]:
    """POST JSON (None: GET) through a ``connections()`` pool and return what ``HttpClient.call`` returns.

    Compressed answers are refused: a few bytes could fill the memory.
    """
    import httpx

    timeout, answer = httpx.Timeout(None, connect=CONNECT_SECONDS), bytearray()
    asked = {"headers": headers | {"Accept-Encoding": "identity"}, "timeout": timeout}
    try:
        async with (
            asyncio.timeout(seconds),  # httpx's are per read: slowly dripped headers or 100s would never exceed them
            pool.stream("GET" if body is None else "POST", url, json=body, **asked) as response,
        ):
            if response.headers.get("content-encoding", "identity") != "identity":
                return NO_ANSWER, "the answer is compressed, which nobody asked for"
            if response.has_redirect_location:  # not followed: a secret or a move would go where nobody sent it
                return response.status_code, f"it redirects to {response.headers['location']}, to be named instead"
            async for chunk in response.aiter_raw():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    return NO_ANSWER, f"the answer is longer than {MAX_ANSWER_BYTES} bytes"
            return response.status_code, answer.decode(errors="replace")
    except TimeoutError:
        return NO_ANSWER, f"no answer within {seconds:g} s"
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        return NOT_SENT, f"no connection: {error}"
    except (httpx.HTTPError, OSError, ValueError, ExceptionGroup) as error:  # odd hosts and ports raise the last two
        cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        return NO_ANSWER, f"no answer: {type(cause).__name__} {cause}".rstrip()


@functools.cache
def hub_problem() -> str:
    """Why the Hub cannot be reached, "" if it can. Tried once: its library would try half a minute for each file."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "offline mode is on"
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as error:  # no network, no DNS, a timeout, a proxy: the client has its own exceptions for each
        constants.HF_HUB_OFFLINE = True
        return f"{constants.ENDPOINT} cannot be reached: {str(error) or type(error).__name__}"
    return ""


def connections() -> Any:
    """Return a new pool of connections to any servers, for use in a single event loop."""
    import httpx

    limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_SECONDS)
    direct = dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]"))  # never through the shell's proxy
    wrong = ValueError, ImportError, httpx.InvalidURL
    no_cookies = DefaultCookiePolicy(allowed_domains=[])  # a server could fill the memory with them
    with blaming(f"SSL_CERT_FILE={os.environ.get('SSL_CERT_FILE')}: ", OSError):
        tls = _tls()
    with blaming("the proxy that ALL_PROXY, HTTP_PROXY or HTTPS_PROXY names: ", wrong):
        return httpx.AsyncClient(limits=limits, verify=tls, mounts=direct, cookies=CookieJar(no_cookies))


_pool = functools.cache(connections)  # shared by all HttpClients


@functools.cache
def _tls() -> Any:
    import httpx

    return httpx.create_ssl_context()  # takes 50 ms, so all pools share it
