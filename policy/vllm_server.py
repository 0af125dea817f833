"""A vLLM server as training uses it: its capabilities, the adapters it holds, and calls that never raise."""

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.client import CONNECT_SECONDS, bearer, connections, exchange, is_number, one_line, parse, problem_of
from envs.config import EnvConfig, is_address
from utils import ConfigError

log = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.25, 30.0  # seconds before another attempt, doubled each time
PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}  # overrides the model's own defaults
PROBE_CHOICE = "73"


def addresses(env: EnvConfig) -> list[str]:
    """The addresses of a configuration's servers; ConfigError: not plain http(s) addresses, or one occurs twice."""
    urls = [env.vllm_base_url] if isinstance(env.vllm_base_url, str) else env.vllm_base_url
    if not urls or len(set(urls)) < len(urls) or not all(map(is_address, urls)):
        raise ConfigError("env.vllm_base_url: an address like http://127.0.0.1:8000/v1 or a list of different ones, "
                          "without user, password or key (that comes from OPENAI_API_KEY)")  # fmt: skip
    return [url.rstrip("/") for url in urls]


@dataclass(eq=False)
class Server:
    """One server and its state, as far as it is known. Times are of ``time.monotonic``."""

    url: str
    version: int | None = None  # of its newest adapter
    loaded: list[str] = field(default_factory=list)
    in_flight: int = 0
    out: bool = False  # not used until an adapter has been loaded again
    retry_at: float = 0.0
    pause: float = FIRST_WAIT
    problem: str = ""
    told: set[str] = field(default_factory=set)  # kinds of problems since the newest adapter was published
    headers: dict[str, str] = field(default_factory=bearer)
    idle: list[Any] = field(default_factory=list)  # one pool per connection: a shared pool searches all its connections

    @property
    def may_be_tried(self) -> bool:
        """Whether its pause is over and no attempt is under way."""
        return time.monotonic() >= self.retry_at

    async def call(self, path: str, body: Any = None, seconds: float = CONNECT_SECONDS) -> tuple[int, Any]:
        """POST (GET without a body) to a path; (HTTP status, object or text), see ``envs.client.exchange``."""
        pool = self.idle.pop() if self.idle else connections()
        try:
            status, text = await exchange(pool, f"{self.url}/{path}", body, seconds, self.headers)
        finally:
            self.idle.append(pool)
        try:
            return status, parse(text) if status > 0 else text
        except ValueError:
            return status, text

    async def close(self) -> None:
        """Unload its adapters, if it still answers, and close all connections."""
        for name in self.loaded if not self.out else ():
            await self.call("unload_lora_adapter", {"lora_name": name})
        for client in self.idle:
            await client.aclose()

    def later(self, problem: str, out: bool = True) -> None:
        """Note a problem: an adapter is loaded again after a pause. Until then the old one plays, unless ``out``."""
        waiting, self.out = self.out and time.monotonic() < self.retry_at, out
        if waiting:  # many requests fail together: one failure
            return
        if (kind := problem.partition(":")[0]) not in self.told:  # what it quotes differs each time
            log.warning("%s: %s", self.url, problem)
        self.told.add(kind)
        self.problem = problem
        self.retry_at = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, LONGEST_WAIT)

    async def load(self, name: str, path: Path, version: int, seconds: float) -> None:
        """Load an adapter under a new name and unload the older ones, those of a process of this run that died too."""
        self.retry_at = math.inf
        status, answer = await self.call("load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, seconds)
        if status != 200 and name in _models((await self.call("models"))[1]):
            status = 200  # an earlier attempt succeeded, and its response was lost
        if status != 200:
            self.retry_at = 0.0  # this attempt is over: ``later`` must count it as a new failure
            self.later(f"it does not load {path}: {problem_of(status, answer)}", self.out or status <= 0)
            return
        old, self.loaded = self.loaded, [name]
        self.out, self.version, self.retry_at = False, version, 0.0
        held = _models((await self.call("models", seconds=seconds))[1])
        old += [other for other, card in held.items() if Path(str(card.get("root"))).parent == path.parent]
        for gone in set(old) - {name}:
            await self.call("unload_lora_adapter", {"lora_name": gone}, seconds)


def _models(answer: Any) -> dict[str, dict[str, Any]]:
    """Name -> card, from a response of /v1/models."""
    try:
        return {card["id"]: card for card in answer["data"] if isinstance(card["id"], str)}
    except (TypeError, KeyError):
        return {}


# ----------------------------------------------------------------------------------------------------- capabilities

COSTS = {  # capability -> what happens without it
    "token ids": "text would have to be tokenised again, not always as it was sampled",
    "log-probabilities": "answers that are off-policy could not be weighted",
    "log-probabilities under temperature and constraint": "start it with --logprobs-mode processed_logprobs",
    "structured output": "illegal answers are possible: they are asked again, then forfeit",
    "loading adapters": "it would play with the base weights for ever; start it with --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
}


async def probe(server: Server, model: str, seconds: float) -> list[str]:
    """The capabilities that a server lacks, found by a short completion and by loading an adapter without a name."""
    body = {"model": model, "prompt": [0, 1], "max_tokens": len(PROBE_CHOICE) + 1, "temperature": 1.0, "logprobs": 0,
            "return_token_ids": True, "structured_outputs": {"choice": [PROBE_CHOICE]}, **PLAIN}  # fmt: skip
    status, answer = await server.call("completions", body, seconds)
    adapters, _ = await server.call("load_lora_adapter", {}, seconds)
    try:
        choice = answer["choices"][0] if status == 200 else {}
        logprobs = [p for p in (choice.get("logprobs") or {}).get("token_logprobs") or [] if is_number(p)]
    except (TypeError, KeyError, IndexError, AttributeError):
        choice, logprobs = {}, []
    free = choice.get("text") != PROBE_CHOICE
    # The only choice has log-probability 0. What ends it may have less: some models have several ends.
    raw = bool(logprobs) and not free and abs(sum(logprobs[: len(PROBE_CHOICE)])) > 1e-3
    lacks = [not choice.get("token_ids"), not logprobs, raw, free, adapters not in (400, 422)]
    refused = [] if status == 200 else [f"an answer to /v1/completions ({problem_of(status, answer)})"]
    return refused + [f"{name} ({cost})" for (name, cost), lack in zip(COSTS.items(), lacks, strict=True) if lack]


def check_servers(config: Any, processes: int = 1) -> None:
    """Make sure, before any model is loaded, that all servers can be used for training, by a single process.

    A ConfigError names the server, what it lacks and what happens without it.
    """
    if processes > 1:
        raise ConfigError("env.use_vllm: one process trains beside the servers; start it without torchrun")

    async def ask() -> None:
        for server in map(Server, addresses(config.env)):
            problem = await _unfit(server, config, min(60.0, config.env.env_timeout))
            await server.close()
            if problem:
                raise ConfigError(f"env.vllm_base_url {server.url}: {problem}")

    asyncio.run(ask())


async def _unfit(server: Server, config: Any, seconds: float) -> str:
    status, answer = await server.call("models", seconds=seconds)
    models, wanted = _models(answer), config.model.model_name
    if status != 200:
        unstarted = "; start it with scripts/serve_vllm.sh, or set env.use_vllm to false" if status <= 0 else ""
        return problem_of(status, answer) + unstarted
    fits = [m for m, c in models.items() if Path(wanted).name in (Path(m).name, Path(str(c.get("root"))).name)]
    if not models:  # some servers list no model before the first request
        fits, models = [wanted], {wanted: {}}
    if not fits:
        return f"it serves {one_line(', '.join(models)) or 'nothing'}, not model.model_name {wanted}"
    longest = models[fits[0]].get("max_model_len", math.inf)
    if not is_number(longest) and longest != math.inf:
        return f"max_model_len {one_line(repr(longest))} of its model is no number"
    if longest < config.ppo.max_seq_length:
        return f"it takes {longest} tokens, ppo.max_seq_length is {config.ppo.max_seq_length}"
    lacks = await probe(server, fits[0], seconds)
    if config.env.answer_mode == "free":
        lacks = [lack for lack in lacks if not lack.startswith("structured")]
    return f"training through it needs {'; '.join(lacks)}" if lacks else ""
