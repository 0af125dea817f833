"""Rollouts through vLLM servers: prompts and answers are sent as token ids, and each update publishes a new adapter.

Adapters have a version in their names and are never overwritten in place. Servers that do not answer are left out and
tried again later; ``docs/scaling.md`` says how to start them.
"""

import asyncio
import math
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, TypeVar

from envs.client import is_number, one_line, problem_of
from envs.config import EnvConfig
from envs.types import Action, InterruptedRolloutError, Query, Sequence
from policy.conversations import Conversations, Turn
from policy.player import Policy
from policy.vllm_server import FIRST_WAIT, LONGEST_WAIT, PLAIN, Server, addresses
from utils import ConfigError, uniform, write_directory

T = TypeVar("T")
LISTEN_SECONDS = 0.5  # between checks whether the run is to stop
CALLS_AT_ONCE = 512  # requests in flight; servers queue what they cannot take yet
FAULTS_AT_MOST = 5  # errors or malformed answers to a query, after which its episode has failed
LEAST_LOGPROB = -1e4  # lowest plausible log-probability of a sampled token
ATTEMPTS_IN_TIME = 3  # a request times out after this fraction of ``env_timeout``, so that another server can be asked


class EngineError(RuntimeError):
    """No server answers any more, or other weights have played than should: older ones, or another model's."""


class Engine:
    """Answers queries through the servers of ``env.vllm_base_url``; ``policy`` answers those for other adapters.

    Every request has its own seed, so that an answer depends on query, weights and server but not on other requests in
    flight. ``stop()`` says whether the run is to stop; it is asked now and then while servers are waited for.
    """

    def __init__(self, policy: Policy, env: EnvConfig, folder: Path) -> None:
        self.policy, self.env = policy, env
        self.stop: Callable[[], Any] = lambda: False
        self.folder, self.run = folder.resolve() / "adapters", secrets.token_hex(3)
        self.version, self._kept = -1, list[Path]()
        self.stale = env.max_staleness  # updates by which a server may be behind; 0 in evaluations
        self._runner = asyncio.Runner()
        self.servers = [Server(url) for url in addresses(env)]
        self._slots = asyncio.Semaphore(CALLS_AT_ONCE)
        self._loads = set[asyncio.Future[Any]]()  # adapters that are being loaded while games go on
        self._heard = 0.0  # time of the last good answer, or of the first request
        self.conversations = Conversations(policy.chat)
        self.action_probs = policy.action_probs  # the learner has the weights that were published

    def name(self, version: int) -> str:
        """An adapter's name, unique among runs on the same servers and across resumes of this one."""
        return f"policy-{version:06d}-{self.run}"

    # -- weights -------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Write the policy's adapter and load it into the servers, unless that version is published already.

        ConfigError: a server refuses the first adapter; loading later ones is retried in ``act``.
        InterruptedRolloutError: the run is to stop.
        """
        if version == self.version:
            return
        first, self.version = self.version < 0, version
        for name in ("policy-??????*-*", ".tmp-policy-??????*-*") if first else ():  # of earlier processes of this run
            for path in self.folder.glob(name):
                shutil.rmtree(path, ignore_errors=True)
        self._kept.append(write_directory(self.folder / self.name(version), self.policy.save))
        for server in self.servers:
            server.told.clear()
        asked = [s for s in self.servers if s.may_be_tried or not (s.out or s.retry_at == math.inf)]
        self._runner.run(self._unless_stopped(_together(map(self._load, asked))))
        refused = [f"{server.url}: {server.problem}" for server in self.servers if server.version is None]
        if first and refused:
            raise ConfigError(f"env.vllm_base_url {'; '.join(refused)}")
        while len(self._kept) > max(2, 1 + self.env.max_staleness):
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)

    async def _load(self, server: Server) -> None:
        name, seconds = self.name(self.version), self.env.env_timeout / ATTEMPTS_IN_TIME
        await server.load(name, self.folder / name, self.version, seconds)

    def check_age(self, sequences: Iterable[Sequence]) -> None:
        """Raise EngineError where a decision is more than ``max_staleness`` updates old, or of unknown age."""
        for version in {decision.version for sequence in sequences for decision in sequence.decisions}:
            if version is None or self.version - version > self.env.max_staleness:
                raise EngineError(f"a decision was made by adapter {version}, the current one is {self.version}: more "
                                  f"than env.max_staleness {self.env.max_staleness} updates old")  # fmt: skip

    def close(self) -> None:
        """Unload this run's adapters from servers that still answer, and close all connections."""
        self._runner.run(_together(server.close() for server in self.servers))
        self._runner.close()

    # -- acting --------------------------------------------------------------------------------------------------

    def release(self, episodes: Seq[int]) -> None:
        """Forget the conversations of finished episodes."""
        self.conversations.release(episodes)
        self.policy.release(episodes)

    def act(self, queries: Seq[Query]) -> list[Action]:
        """Answer all queries concurrently. A query without a usable answer fails its episode.

        EngineError: none of several queries got an answer, or no server is left. InterruptedRolloutError: the run is to
        stop.
        """
        others = [i for i, query in enumerate(queries) if query.adapter is not None]
        mine = [i for i, query in enumerate(queries) if query.adapter is None]
        actions = dict(zip(others, self.policy.act([queries[i] for i in others]), strict=True))
        self._heard = time.monotonic()
        answers = self._runner.run(_together(self._answer(queries[i]) for i in mine))
        if mine and all(a.error for a in answers) and (len(mine) > 1 or not any(map(self._may_play, self.servers))):
            raise EngineError(answers[0].error)
        actions |= zip(mine, answers, strict=True)
        return [actions[i] for i in range(len(queries))]

    def _request(self, turn: Turn, version: int, bad: int) -> dict[str, Any]:
        again = (bad,) if bad else ()  # the same seed would give the same bad answer
        seed = int(2**31 * uniform(self.policy.seed, *turn.query.rng_key, *again))
        body = {"model": self.name(version), "prompt": turn.ids, "seed": seed, "logprobs": 0, "return_token_ids": True,
                "temperature": 0.0 if self.policy.greedy else self.policy.temperature,
                "stop_token_ids": self.policy.chat.ends, **PLAIN}  # fmt: skip
        if turn.trie is None:
            return body | {"max_tokens": self.policy.max_new_tokens}
        # A grammar may allow all ends of a model after a choice (vLLM's pull request 49227); the learner has one there.
        return body | {"max_tokens": turn.trie.longest, "allowed_token_ids": [*self.policy.chat.answer_ids.values()],
                       "structured_outputs": {"choice": [str(action) for action in turn.query.legal]}}  # fmt: skip

    async def _answer(self, query: Query) -> Action:
        """Ask until there is an answer, time is up, or too many answers are bad."""
        free_tokens = None if self.policy.constrained else self.policy.max_new_tokens
        turn = self.conversations.open(query, self.policy.max_seq_length, free_tokens)
        if turn is None:
            return Action("", truncated=True)
        async with self._slots:
            wait, faults, bad, problem = FIRST_WAIT, 0, 0, ""
            asked, patience = time.monotonic(), self.env.env_timeout
            while (left := min(asked, self._heard) + patience - time.monotonic()) > 0 and faults < FAULTS_AT_MOST:
                if self.stop():
                    raise InterruptedRolloutError
                if server := await self._choose():
                    version = server.version or 0
                    body = self._request(turn, version, bad)
                    status, answer = await self._ask(server, body, left)
                    try:
                        self._write(turn, answer, version, body["max_tokens"])
                    except ValueError as error:
                        problem = str(error) if status == 200 else problem_of(status, answer)
                        bad += status == 200
                    else:
                        server.pause, server.problem, self._heard = FIRST_WAIT, "", time.monotonic()
                        return self.conversations.close(turn, version)
                    if status != 429:
                        server.later(problem)  # 404: it has been restarted and lacks the adapter
                    faults += status > 0 and status not in (404, 429, 503)  # these pass with time
                await self._unless_stopped(asyncio.sleep(min(wait, left)))
                wait = min(2 * wait, LONGEST_WAIT)
            problem = "; ".join(f"{server.url}: {server.problem or problem}" for server in self.servers)
            tried = f"{faults} tries" if faults == FAULTS_AT_MOST else f"{patience:g} s"
            return Action("", error=f"no answer after {tried}: {problem}")

    async def _ask(self, server: Server, body: dict[str, Any], left: float) -> tuple[int, Any]:
        seconds = min(left, self.env.env_timeout / ATTEMPTS_IN_TIME)
        server.in_flight += 1
        try:
            return await self._unless_stopped(server.call("completions", body, seconds))
        finally:
            server.in_flight -= 1

    async def _unless_stopped(self, work: Awaitable[T]) -> T:
        """Wait for it, checking now and then whether the run is to stop."""
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait({task}, timeout=LISTEN_SECONDS))[0]:
            if self.stop():
                raise InterruptedRolloutError
        return task.result()

    async def _choose(self) -> Server | None:
        """The usable server with the fewest requests. Starts loading where one is out or behind and its pause is over.

        Waits for that only where no server is usable.
        """
        for server in self.servers:
            if (server.out or server.version != self.version) and server.may_be_tried:
                server.retry_at = math.inf  # so that no other query tries at the same time
                load = asyncio.ensure_future(self._load(server))
                self._loads.add(load)
                load.add_done_callback(self._loads.discard)
        if self._loads and not any(map(self._may_play, self.servers)):
            await self._unless_stopped(asyncio.wait(self._loads, return_when=asyncio.FIRST_COMPLETED))
        return min((s for s in self.servers if self._may_play(s)), key=lambda s: s.in_flight, default=None)

    def _may_play(self, server: Server) -> bool:
        return not server.out and server.version is not None and self.version - server.version <= self.stale

    def _write(self, turn: Turn, answer: Any, version: int, most: int) -> None:
        """Write a server's answer of at most ``most`` tokens; ValueError: it is malformed, and nothing is written."""
        tokens, logprobs = _sampled(answer, self.name(version), turn.ids, self.policy.base.config.vocab_size)
        if len(tokens) > most or not set(self.policy.chat.ends).isdisjoint(tokens[:-1]):
            raise ValueError(f"too many tokens, or some after the end: {len(tokens)} where {most} were asked for")
        self.conversations.write(turn, tokens, logprobs)


async def _together(work: Iterable[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*work))


def _sampled(answer: Any, model: str, prompt: list[int], vocabulary: int) -> tuple[list[int], list[float]]:
    """Token ids and log-probabilities of a response to /v1/completions; ValueError: malformed, or another's."""
    try:
        choice = answer["choices"][0]
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        valid = answer["model"] == model and choice.get("prompt_token_ids") in (None, prompt)
        valid = valid and choice.get("finish_reason") in (None, "stop", "length")  # else it may be cut short anywhere
        valid = valid and len(tokens) == len(logprobs) > 0
        valid = valid and all(type(t) is int and 0 <= t < vocabulary for t in tokens)
        valid = valid and all(is_number(p) and LEAST_LOGPROB <= p <= 1e-3 for p in logprobs)
    except (TypeError, KeyError, IndexError):
        valid = False
    if not valid:
        raise ValueError(f"not an answer with token ids and log-probabilities: {one_line(str(answer))}")
    return tokens, logprobs
