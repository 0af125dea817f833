"""A stand-in for a vLLM server with LoRA: the endpoints that training uses, answered by a real model.

Log-probabilities are those under temperature and constraint (``--logprobs-mode processed_logprobs``); an answer, also
one among choices, ends with any of the server's ``ends`` or of the request's ``stop_token_ids``; adapters are read from
disk when they are loaded. Requests that arrive within a few milliseconds are answered together. As vLLM 0.32 answered:
an adapter's name twice is 400, an unknown one 404, and ``guided_choice`` is taken and ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from policy import Policy, load_policy
from policy.network import Read

GATHER_SECONDS = 0.004


class Row:
    """One prompt on its way to an answer."""

    def __init__(self, body: dict[str, Any], ids: list[int], adapter: str | None, choices: list[tuple[int, ...]],
                 ends: list[int]):  # fmt: skip
        self.body, self.ids, self.adapter, self.choices = body, list(ids), adapter, choices
        self.ends = {*ends, *body.get("stop_token_ids", [])}
        self.prompt, self.kv = len(ids), None
        self.logprobs: list[float] = []
        self.finish: str | None = None
        self.rng = np.random.default_rng(body.get("seed"))
        self.done: asyncio.Future[Row] = asyncio.get_running_loop().create_future()

    @property
    def answer(self) -> tuple[int, ...]:
        return tuple(self.ids[self.prompt :])

    def allowed(self) -> list[int] | None:
        """Token ids that may come next; None: all."""
        listed = self.body.get("allowed_token_ids")
        if not self.choices:
            return listed
        n, answer = len(self.answer), self.answer
        fits = [c for c in self.choices if c[:n] == answer]
        grammar = {token for c in fits for token in (c[n : n + 1] or self.ends)}
        return sorted(grammar.intersection(listed or grammar))

    def take(self, token: int, logprob: float) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in self.ends:
            self.finish = "stop"
        elif len(self.answer) >= self.body["max_tokens"]:
            self.finish = "length"


class StandIn:
    """A server on a free port, in a thread. ``requests``: (path, body) of every call.

    ``faulty(path, body)`` may return a response to give instead, a number of seconds to wait first, or None.
    """

    def __init__(self, policy: Policy, name: str, max_model_len: int = 4096) -> None:
        self.policy, self.name, self.max_model_len = policy, name, max_model_len
        self.adapters: dict[str, str] = {}  # name -> path, in the order of loading
        self.requests: list[tuple[str, Any]] = []
        self.keys: set[str | None] = set()  # Authorization headers that came
        self.peers: list[tuple[str, int]] = []  # the address that each call came from
        self.faulty: Callable[[str, Any], Any] = lambda path, body: None
        self.ends = [policy.chat.end_id]
        self._waiting: list[Row] = []
        self._batch: asyncio.Task[None] | None = None
        self._server: uvicorn.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def running(self) -> bool:
        return self._server is not None and not self._server.should_exit

    # -- running -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to answer; on the same port as before where there was one."""
        routes = [Route("/health", self._health), Route("/v1/models", self._models)]
        for path in ("completions", "load_lora_adapter", "unload_lora_adapter"):
            routes.append(Route(f"/v1/{path}", self._handle, methods=["POST"]))
        config = uvicorn.Config(Starlette(routes=routes), "127.0.0.1", self.port, log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        threading.Thread(target=self._server.run, daemon=True).start()
        while not self._server.started:
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        """End at once, as a process that dies: adapters are forgotten."""
        assert self._server is not None
        self._server.force_exit = self._server.should_exit = True
        while self._server.servers and self._server.servers[0].is_serving():
            time.sleep(0.01)
        for name in self.adapters:
            self.policy.forget_past(name)
        self.adapters, self._waiting, self._batch = {}, [], None

    # -- endpoints -----------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return PlainTextResponse("")

    async def _models(self, request: Request) -> Response:
        if (fault := self.faulty("models", None)) is not None:
            return fault
        cards = [{"id": self.name, "object": "model", "root": self.name, "max_model_len": self.max_model_len}]
        cards += [{"id": n, "object": "model", "root": p, "parent": self.name} for n, p in self.adapters.items()]
        return JSONResponse({"object": "list", "data": cards})

    async def _handle(self, request: Request) -> Response:
        path, body = request.url.path.removeprefix("/v1/"), await request.json()
        self.requests.append((path, body))
        self.keys.add(request.headers.get("authorization"))
        self.peers.append((request.client.host, request.client.port) if request.client else ("", 0))
        fault = self.faulty(path, body)
        if isinstance(fault, int | float):
            await asyncio.sleep(fault)
        elif fault is not None:
            return fault
        return await {"completions": self._complete, "load_lora_adapter": self._load,
                      "unload_lora_adapter": self._unload}[path](body)  # fmt: skip

    async def _load(self, body: dict[str, Any]) -> Response:
        name, path = body.get("lora_name"), body.get("lora_path")
        if not name or not path:
            return _error(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if not (Path(path) / "adapter_model.safetensors").is_file():
            return _error(404, f"No adapter found for {path}")
        await self._quiet()
        self.policy.add_adapter(name, Path(path))
        self.adapters[name] = path
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, body: dict[str, Any]) -> Response:
        name = body.get("lora_name")
        if name not in self.adapters:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        await self._quiet()
        self.policy.forget_past(name)
        self.policy.forget()
        del self.adapters[name]
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _complete(self, body: dict[str, Any]) -> Response:
        model = body.get("model")
        if model != self.name and model not in self.adapters:
            return _error(404, f"The model `{model}` does not exist.")
        prompts = body["prompt"]
        if isinstance(prompts, str):
            prompts = [self.policy.tokenizer.encode(prompts)]
        elif isinstance(prompts[0], int):
            prompts = [prompts]
        if max(map(len, prompts)) + body["max_tokens"] > self.max_model_len:
            return _error(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        words = (body.get("structured_outputs") or {}).get("choice") or []
        choices = [tuple(self.policy.tokenizer.encode(word, add_special_tokens=False)) for word in words]
        rows = [Row(body, ids, None if model == self.name else model, choices, self.ends) for ids in prompts]
        self._waiting += rows
        if self._batch is None or self._batch.done():
            self._batch = asyncio.create_task(self._work())
        await asyncio.gather(*(row.done for row in rows))
        return JSONResponse({"id": "cmpl-1", "object": "text_completion", "created": int(time.time()), "model": model,
                             "choices": [self._choice(i, row) for i, row in enumerate(rows)]})  # fmt: skip

    def _choice(self, index: int, row: Row) -> dict[str, Any]:
        text = self.policy.tokenizer.decode([t for t in row.answer if t not in row.ends])
        choice = {"index": index, "text": text, "finish_reason": row.finish, "logprobs": None}
        if row.body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": row.logprobs, "tokens": [f"token_id:{t}" for t in row.answer]}
        if row.body.get("return_token_ids"):
            choice |= {"token_ids": list(row.answer), "prompt_token_ids": row.ids[: row.prompt]}
        return choice

    # -- the model -----------------------------------------------------------------------------------------------

    async def _quiet(self) -> None:
        """Wait until nothing is being computed: adapters are not changed below a batch."""
        while self._batch and not self._batch.done():
            await asyncio.sleep(0.001)

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(GATHER_SECONDS)
            if not self._waiting:
                return
            rows, self._waiting = self._waiting, []
            for adapter in sorted({row.adapter for row in rows}, key=str):
                mine = [row for row in rows if row.adapter == adapter]
                await asyncio.to_thread(self._generate, mine, adapter)
            for row in rows:
                if not row.done.done():
                    row.done.set_result(row)

    @torch.no_grad()
    def _generate(self, rows: list[Row], adapter: str | None) -> None:
        with self.policy.using(adapter or "base"):
            while active := [row for row in rows if not row.finish]:
                hidden_ND, kvs = self.policy.reader.read([Read(row.ids, row.kv, True) for row in active])
                logits_NV = self.policy.lm_head(hidden_ND).double()
                for row, logits_V, kv in zip(active, logits_NV, kvs, strict=True):
                    row.kv = kv
                    self._sample(row, logits_V)

    def _sample(self, row: Row, logits_V: torch.Tensor) -> None:
        temperature = row.body.get("temperature", 1.0)
        if (allowed := row.allowed()) is not None:
            mask_V = torch.ones_like(logits_V, dtype=torch.bool)
            mask_V[allowed] = False
            logits_V = logits_V.masked_fill(mask_V, -torch.inf)
        logp_V = torch.log_softmax(logits_V / (temperature or 1.0), -1)
        probs = logp_V.exp().numpy()
        token = int(row.rng.choice(len(probs), p=probs / probs.sum())) if temperature else int(logp_V.argmax())
        row.take(token, float(logp_V[token]))


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status}}, status)


@contextlib.contextmanager
def stand_in(config: SimpleNamespace, **settings: Any) -> Iterator[StandIn]:
    """A running server with the base model of a training configuration."""
    server = StandIn(load_policy(config), config.model.model_name, **settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()
