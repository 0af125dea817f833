"""Players by name: checkpoints, base models, bots and servers; several of them in one episode."""

import argparse
import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from config.reader import blaming, load_config, printable, read_json
from env_wrapper import Sequence as Tokens
from envs.client import FIRST_WAIT, NO_ANSWER, NOT_SENT, HttpClient, bearer, one_line, parse, problem_of
from envs.config import EnvConfig, is_address
from envs.opponents import parse_opponent
from envs.trace import programs_digest
from envs.trace.sandbox import SandboxError
from envs.types import Action, Player, PromptTooLongError, Query
from policy import load_policy
from policy.model import LoraConfig, ModelConfig, folder_of, identity
from training.config import DEFAULT_FILES, SECTIONS, load_sections
from training.process import ProgramError, at_least
from utils import ConfigError, check_base, fingerprint, in_threads, latest_checkpoint, uniform, verify_checkpoint

log = logging.getLogger(__name__)

WEIGHTS = "adapter_model.safetensors"
MERGE_REPORT = "merge_report.json"  # beside a merged model: what it was made of, how it played, what it differs by
AS_PLAYED = {
    "env": ("env_type", "prompt", "answer_mode", "history_turns", "protocol"),
    "ppo": ("temperature", "max_seq_length", "max_new_tokens"),
}
WARM_START = "warmstart.json"  # beside an adapter that was taught, not trained by PPO: who taught it
BOTS = ("random", "mcts", "mcts_light", "ismcts", "perfect", "cfr")
PLAYERS = ("a checkpoint, a run, base, a bot (random, mcts, mcts_light, mcts:SIMSxROLLOUTS, ismcts, perfect, cfr) or "
           "an http(s) address")  # fmt: skip
NO_ADDRESS = "a server's address is like http://127.0.0.1:8000/v1, without user, password or query"
# Settings with which the public environment's evaluate asks a model.
AFFINETES = {"protocol": "affinetes", "answer_mode": "free", "history_turns": "all", "prompt": "full"}
# That sets no length limit. Unless the user does, servers get none, and local models get room to think.
UNLIMITED = 2**53
ROOM = {"max_new_tokens": 1024, "max_seq_length": 32768}
CALLS_AT_ONCE = 16
ODD_ANSWERS = 3  # malformed responses to a query, after which its game has failed
TRANSIENT = {NOT_SENT, NO_ANSWER, 408, 429, *range(500, 1000)}  # after which a call is repeated
# Not any error "in this context"; the last are TGI's.
TOO_LONG = re.compile(r"context.?(length|size|window)|model length|inputs\W+(tokens|must have)", re.IGNORECASE)
TOLD_AFTER = 3  # failures of a call; one alone may be a connection that had been idle
ATTEMPTS = 8  # at a call that the server does not answer, with half a minute of pauses in all
LIMIT_SECONDS = 300.0  # to be asked again for, by a server that says that it is asked too often
ANSWER_SECONDS = 1800.0  # for an answer: a laptop may write those of CALLS_AT_ONCE one after the other
SLOW_SECONDS = 60.0  # of waiting for an answer, after which that is told
GIVEN_UP = "abort", "error"  # finish reasons of an answer that the server broke off, not the model
MAX_CHARACTERS = 2**18  # of an answer


class ModelPlayer:
    """A policy with one of its adapters (``"base"``: none), which may be shared with players that are not greedy."""

    def __init__(self, policy: Any, adapter: str | None, greedy: bool) -> None:
        self.policy, self.adapter, self.greedy, self.release = policy, adapter, greedy, policy.release

    def act(self, queries: Sequence[Query]) -> list[Action]:
        """Answer with the adapter."""
        self.policy.greedy = self.greedy
        return self.policy.act([replace(query, adapter=self.adapter) for query in queries])

    def action_probs(self, queries: Sequence[Query]) -> list[dict[int, float]]:
        """Probability of every legal action in ``act``, 0 or 1 where greedy; raises as ``Policy.action_probs``."""
        if self.greedy:
            actions = self.act(queries)
            if any(action.truncated for action in actions):
                raise PromptTooLongError
            return [{a: float(str(a) == action.text) for a in query.legal}
                    for query, action in zip(queries, actions, strict=True)]  # fmt: skip
        with self.policy.using(self.adapter):
            return self.policy.action_probs(queries)

    def legal_mass(self, sequences: list[Tokens]) -> list[float]:
        """Probability of staying legal without the constraint, per decision; empty where answers are free anyway."""
        if not self.policy.constrained or not sequences:
            return []
        with self.policy.using(self.adapter):
            return self.policy.evaluate_decisions(sequences, legal_mass=True).legal_mass.exp().tolist()


class ChatClient(HttpClient):
    """A client that knows a failure inside an answer of status 200, as OpenRouter sends what goes wrong on the way."""

    def post(self, path: str, body: Any, deadline: float) -> tuple[int, str]:
        """Call once; of such an answer the status is its error's code."""
        status, text = super().post(path, body, deadline)
        with contextlib.suppress(LookupError, TypeError, ValueError):
            if status == 200 and "choices" not in (answer := parse(text)) and (error := answer["error"]):
                code = error.get("code") if isinstance(error, dict) else None
                status = code if type(code) is int and 400 <= code < 600 else 503
        return status, text


class ChatPlayer:
    """A model on an OpenAI-compatible server, asked for free answers; the key comes from OPENAI_API_KEY."""

    def __init__(self, base_url: str, model: str, temperature: float, max_tokens: int | None, seed: int) -> None:
        self._client = ChatClient(base_url, bearer())
        self.url = f"{self._client.url}/chat/completions"
        self.settings: dict[str, Any] = {"model": model, "temperature": temperature}
        if max_tokens is not None:
            self.settings["max_tokens"] = max_tokens
        self.seed = seed
        self._once = {kind: threading.Lock() for kind in ("answer", "length", "slow", "wait")}  # taken when told

    def act(self, queries: Sequence[Query]) -> list[Action]:
        """Answer the queries, several at a time.

        ProgramError: the server gives no answer after ``ATTEMPTS``, or refuses the request. After ``ODD_ANSWERS``
        malformed responses only the game of that query has failed.
        """
        return in_threads(self._answer, queries, CALLS_AT_ONCE)

    def _answer(self, query: Query) -> Action:
        asked = self.settings | {"messages": query.conversation}
        for again in range(ODD_ANSWERS):
            key = (self.seed, *query.rng_key, *[again] * (again > 0))  # the same seed may give the same answer
            status, text = self._call(asked | {"seed": int(2**31 * uniform(*key))})
            if status in (400, 413, 422) and TOO_LONG.search(text):
                most = self.settings.get("max_tokens")
                asked_for = f" (asked for up to {most} tokens: ppo.max_new_tokens)" if most else ""
                self._tell("length", f"{problem_of(status, text)}; such games count as truncated{asked_for}")
                return Action("", truncated=True)
            if status != 200:
                raise ProgramError(f"{self.url}: {problem_of(status, text)}")
            with contextlib.suppress(LookupError, TypeError, ValueError):
                choice = parse(text)["choices"][0]
                answer, reason = choice["message"]["content"], choice.get("finish_reason")
                answer = "" if answer is None else answer
                if isinstance(answer, str) and reason not in GIVEN_UP:
                    answer = answer.encode(errors="replace").decode()  # half a surrogate pair could not be sent back
                    cut, answer = len(answer) > MAX_CHARACTERS, answer[:MAX_CHARACTERS]
                    if cut or reason == "length" or not answer.strip():
                        self._warn(answer.strip(), f"{MAX_CHARACTERS} characters" if cut else reason)
                    return Action(answer)
        return Action("", error=f"{self.url}: not the answer of an OpenAI-compatible server: {one_line(text)}")

    def _call(self, body: Any) -> tuple[int, str]:
        """Ask until there is an answer: being asked too often passes with time, not with attempts."""
        start, failures = time.monotonic(), count(1)

        def passes(status: int) -> bool:
            if status not in TRANSIENT:
                return False
            if next(failures) == TOLD_AFTER:  # nothing else is seen of the wait
                most = f"for up to {LIMIT_SECONDS:g} s" if status == 429 else "for half a minute"
                self._tell("wait", f"{f'HTTP {status}' if status > 0 else 'no answer'}; it is asked again {most}")
            return True

        line = f"no answer for {SLOW_SECONDS:g} s; an answer is waited for up to {ANSWER_SECONDS:g} s"
        slow = threading.Timer(SLOW_SECONDS, self._tell, ("slow", line))
        slow.daemon = True
        slow.start()
        try:
            while True:
                left = start + ANSWER_SECONDS - time.monotonic()
                status, text = self._client.call("chat/completions", body, left, passes, ATTEMPTS)
                if status != 429 or time.monotonic() > start + LIMIT_SECONDS - FIRST_WAIT:
                    return status, text
        finally:
            slow.cancel()

    def _warn(self, answer: str, reason: object) -> None:
        what = "an answer that was cut off is read as far as it goes" if answer else "an empty answer"
        counts, most = "" if answer else " counts as illegal", self.settings.get("max_tokens", "without limit")
        why = f"(finish_reason: {one_line(str(reason))}){counts}; a model that thinks first needs more than"
        self._tell("answer", f"{what} {why} ppo.max_new_tokens ({most})")

    def _tell(self, kind: str, line: str) -> None:
        if self._once[kind].acquire(blocking=False):  # all answers may be so
            log.warning("%s: %s", self.url, line)


class Seats:
    """One player for the task's own seat, others for the seats of a ``past:LABEL`` opponent."""

    def __init__(self, own: Player, others: dict[str, Player]) -> None:
        self.players: dict[str | None, Player] = {None: own} | others

    def act(self, queries: Sequence[Query]) -> list[Action]:
        """Let each seat's player answer its queries."""
        actions: dict[int, Action] = {}
        for label, player in self.players.items():
            picked = [i for i, query in enumerate(queries) if query.adapter == label]
            if picked:
                asked = [replace(queries[i], adapter=None) for i in picked]
                actions |= zip(picked, player.act(asked), strict=True)
        return [actions[i] for i in range(len(queries))]

    def release(self, episodes: Sequence[int]) -> None:
        """Pass on which episodes ended to players that keep conversations."""
        for player in self.players.values():
            if release := getattr(player, "release", None):
                release(episodes)


@dataclass
class Contestant:
    """A player to evaluate or to play against. ``origin`` identifies it in files of results."""

    label: str
    origin: dict[str, Any]
    env: EnvConfig = field(default_factory=EnvConfig)
    player: Any = None  # None: a bot, which the environment plays
    folder: str | None = None  # of a checkpoint

    @property
    def opponent(self) -> str:
        """The opponent string of tasks played against it."""
        return self.label if self.player is None else f"past:{self.label}"

    @property
    def standing(self) -> int:
        """Of two, the lower plays the games with its own prompts: models, servers, which read any, then bots."""
        return 2 if self.player is None else int(not isinstance(self.player, ModelPlayer))


class Roster:
    """Finds contestants by name. Those with the same base and settings share one policy, with an adapter each.

    Args:
        files, sets: laid over a run's own configuration, as ``--config`` and ``--set`` are.
        seed: of the players' sampling.
        greedy: take the likeliest character each time instead of sampling; not always the likeliest answer.
        model: the model that ``base`` means, and that servers are asked for; None: that of the first checkpoint.
        public: models are asked as the public environment does.
    """

    def __init__(
        self, files: Sequence[str], sets: Sequence[str], seed: int, greedy: bool, model: str | None,
        public: bool = False,
    ) -> None:  # fmt: skip
        self.files, self.sets, self.seed, self.greedy, self.model = list(files), list(sets), seed, greedy, model
        self.public = public
        self._policies: dict[str, Any] = {}
        self._known: dict[str, Contestant] = {}

    def contestant(self, name: str, checkpoints: Sequence[str] = ()) -> Contestant:
        """Load by name: a bot's opponent string, ``base``, an http(s) address or a checkpoint's directory.

        ``checkpoints``: names of players, the first checkpoint among which has the base that ``base`` means.
        ConfigError: nothing of that name, or it cannot be loaded.
        """
        if name not in self._known:
            if is_path(name):
                found = self._checkpoint(name)
            else:
                self.check([name], checkpoints)
                bot = Contestant(name, {"bot": name})
                found = bot if is_bot(name) else self._base(checkpoints) if name == "base" else self._server(name)
            taken = self._has_label(found.label)
            self._known[name] = replace(found, label=_label(f"{found.label}@{name}")) if taken else found
        return self._known[name]

    def check_model(self, names: Sequence[str]) -> None:
        """Raise ConfigError where ``model`` is given and nobody named plays it."""
        if self.model and not any(name == "base" or name.startswith(("http://", "https://")) for name in names):
            raise ConfigError(f"--model {self.model}: base is not among the players, nor a server to be asked for it")

    def check(self, names: Sequence[str], checkpoints: Sequence[str] = ()) -> None:
        """Raise ConfigError for a name that means nobody; nothing is loaded."""
        for name in names:
            if is_path(name):
                run_config_file(find_adapter(name))
            elif is_bot(name):
                with blaming():
                    parse_opponent(name)
            elif name == "base":
                if not self.model and not any(map(is_path, checkpoints)):
                    raise ConfigError("base: the base of what? name a checkpoint too, or --model")
            elif not is_address(name):  # it is shown and kept in results, so it may hold no secret
                raise ConfigError(NO_ADDRESS)
            elif not self.model:
                raise ConfigError(f"{name}: --model must name the model that the server is to be asked for")

    def _has_label(self, label: str) -> bool:
        return any(other.label == label for other in self._known.values())

    def config(self, name: str | None, last: Sequence[Any] = ()) -> SimpleNamespace:
        """The configuration of a checkpoint's run; None: the default files, with ``model`` where there is one.

        ``last`` are more files, which only ``sets`` win over.
        """
        files = self._files_of_model() if name is None else [run_config_file(_folder(name))]
        sets = [f"model.model_name={json.dumps(self.model)}"] if name is None and self.model else []
        if len(files) > len(DEFAULT_FILES):
            sets.append("model.use_4bit=false")  # merging took 4 bits away: put in 4 bits again, it would be another
        config = self._load(files, [], ROOM, sets, last, skip_unknown_sections=True)
        own = load_config({"model": ModelConfig}, [*files, *self.files], skip_unknown_sections=True)["model"].adapter
        if config.model.adapter not in (own, None):
            raise ConfigError(f"model.adapter = {config.model.adapter!r}: nobody plays with it; name it as a player")
        return config

    def _files_of_model(self) -> list[Any]:
        """The default files; beside a merged model's, what its report says of how it was trained to play."""
        folder = folder_of(self.model) if self.model else None
        if folder is None or not (report := folder / MERGE_REPORT).is_file():
            return [*DEFAULT_FILES]
        with blaming(f"{report}: is no report of a merge: ", (AttributeError, TypeError)):
            told = read_json(report).get("played", {})  # a stranger's may say anything, such as where games are scored
            played = {part: told.get(part, {}).items() for part in AS_PLAYED}
        layer = {part: {key: x for key, x in items if key in AS_PLAYED[part]} for part, items in played.items()}
        return [*DEFAULT_FILES, (str(report), layer)]

    def _load(
        self, files: Sequence[Any], over: list[Any], ppo: dict[str, int], sets: Sequence[str] = (),
        last: Sequence[Any] = (), **options: bool
    ) -> SimpleNamespace:  # fmt: skip
        """``files`` and those of runs; ``over`` them, and the public environment's; then the user's own; ``last``."""
        runs = [file for file in self.files if is_of_a_run(file)]
        asked = [("--protocol affinetes", {"env": AFFINETES, "ppo": ppo})] if self.public else []
        own = [file for file in self.files if file not in runs]
        config = load_sections([*files, *runs, *over, *asked, *own, *last], [*sets, *self.sets], **options)
        for key, value in AFFINETES.items() if self.public else ():
            if (other := getattr(config.env, key)) != value:
                raise ConfigError(f"--protocol affinetes: env.{key} = {other!r}: expected {value!r}")
        return config

    def _policy(self, config: SimpleNamespace) -> Any:
        sections = vars(config) | {"model": replace(config.model, adapter=None), "lora": LoraConfig(r=1),
                                   "run": replace(config.run, seed=self.seed)}  # fmt: skip
        limits = as_played(config)["ppo"]
        key = repr((sections["model"], config.env.answer_mode, limits))  # all that matters of a run in play
        if key not in self._policies:
            self._policies[key] = load_policy(SimpleNamespace(**sections))
        return self._policies[key]

    def _base(self, checkpoints: Sequence[str]) -> Contestant:
        config = self.config(None if self.model else next(filter(is_path, checkpoints)))
        label, policy = _label(self.model) if self.model else "base", self._policy(config)
        origin = _origin(config, None) | {"base": identity(config.model, policy.base, policy.tokenizer)}
        return Contestant(label, origin, config.env, ModelPlayer(policy, "base", self.greedy))

    def _checkpoint(self, name: str) -> Contestant:
        folder = find_adapter(name)
        config = self.config(str(folder))  # not of ``name``: a run in training may have a newer checkpoint by now
        if where := {"url": config.env.env_url, "docker": config.env.env_image}.get(config.env.env_mode):
            log.warning("%s: its games are played and scored by %s", name, printable(str(where)))
        policy, adapter = self._policy(config), f"player{len(self._known)}"
        try:
            policy.add_adapter(adapter, folder)
        except Exception as error:  # the files may be anything
            if not folder.exists():
                raise ConfigError(f"{name}: its run has deleted {folder.name} meanwhile; repeat the command") from error
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            files = f"{WEIGHTS} or adapter_config.json"
            raise ConfigError(f"{name}: {files} does not fit {config.model.model_name} ({cause})") from error
        base = identity(config.model, policy.base, policy.tokenizer)
        check_base(str(folder), base)
        digest = fingerprint(folder / WEIGHTS)["sha256"]
        label = _label(f"{folder.resolve().parent.name}/{folder.name}")
        if self._has_label(label):
            label = _label(str(folder))
        settings = fingerprint(folder / "adapter_config.json")["sha256"]  # lora_alpha, say
        origin = _origin(config, digest) | {"base": base, "adapter_config": settings}
        return Contestant(label, origin, config.env, ModelPlayer(policy, adapter, self.greedy), str(folder))

    def _server(self, address: str) -> Contestant:
        assert self.model
        # Conversations on a server take no memory here, for which the default plays few games at a time.
        many = "--base-url", {"env": {"games_at_once": 0}}
        config = self._load(self._files_of_model(), [many], {"max_new_tokens": UNLIMITED})
        temperature, most = 0.0 if self.greedy else config.ppo.temperature, config.ppo.max_new_tokens
        player = ChatPlayer(address, self.model, temperature, None if most == UNLIMITED else most, self.seed)
        origin = player.settings | {"url": address} | _programs(config)
        return Contestant(_label(self.model), origin, config.env, player)


def _label(name: str) -> str:
    """A name as tables show it, one word."""
    return printable("_".join(name.split()))


def is_of_a_run(file: str) -> bool:
    """Whether a ``--config`` holds all of a run's knobs, which say how it was trained, not what is wished here."""
    given = read_json(file)
    return isinstance(given, dict) and given.keys() >= SECTIONS.keys()


def is_bot(name: str) -> bool:
    """Whether a name means a bot, whether there is such a one or not."""
    return name.partition(":")[0] in BOTS


def is_path(name: str) -> bool:
    """Whether a name means a folder, whether there is one or not."""
    return name != "base" and name.partition(":")[0] not in (*BOTS, "http", "https")


def is_folder(name: str) -> bool:
    """Whether a name means a folder; not where a folder is called like a bot, say."""
    return is_path(name) and Path(name).is_dir()


def player_flags(parser: argparse.ArgumentParser, seed: int | None = 0) -> None:
    """Add the flags that say how named players play; ``seed``: the default, None: the program draws one."""
    add = parser.add_argument
    add("--model", metavar="NAME", help="the model that base means, or to ask a server for")
    usual = "drawn" if seed is None else seed
    add("--seed", type=at_least(0, 2**31 - 1), default=seed, help=f"of deals and sampling (default {usual})")
    add("--greedy", action="store_true", help="the likeliest character at each place, not a sampled one")
    add("--config", action="append", default=[], metavar="FILE", help="differences to the run's configuration")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="e.g. model.use_4bit=false")


def as_played(config: SimpleNamespace) -> dict[str, dict[str, Any]]:
    """How a run's player is asked and answers, for the report beside its merged model: all that only the run knows."""
    return {part: {key: getattr(getattr(config, part), key) for key in keys} for part, keys in AS_PLAYED.items()}


def _origin(config: SimpleNamespace, adapter: str | None) -> dict[str, Any]:
    return {"model": vars(config.model), "adapter": adapter, **as_played(config)["ppo"], **_programs(config)}


def _programs(config: SimpleNamespace) -> dict[str, str]:
    with blaming("env.trace: ", (ValueError, SandboxError)):
        return programs_digest(config.env)


def _folder(name: str, allowed: str = PLAYERS) -> Path:
    """A checkpoint's directory: the one named, or the latest of the run named."""
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(f"{name}: no such directory; allowed are {allowed}")
    part = any((folder.parent / name).is_file() for name in ("run_config.json", "summary.json"))  # on another disk
    if (folder.is_symlink() and not part) or folder.name in ("", ".."):  # with other names and parents than its own
        folder = folder.resolve()
    if any(folder.glob("checkpoint-*")):
        if (latest := latest_checkpoint(folder)) is None:
            raise ConfigError(f"{name}: no checkpoint in it verifies")
        return latest
    return folder


def find_adapter(name: str, allowed: str = PLAYERS) -> Path:
    """A checkpoint's directory, or that of a run's latest one; ConfigError: there is none, or it is damaged."""
    folder = _folder(name, allowed)
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{name}: there is no {WEIGHTS} in {folder}; expected a checkpoint or a run with one")
    if (folder / "manifest.json").exists() and (problems := verify_checkpoint(folder)):
        raise ConfigError(f"{name}: {'; '.join(problems)}")
    if not (file := folder / "adapter_config.json").is_file():  # PEFT would ask the Hub for one
        raise ConfigError(f"{name}: there is no {file.name} in {folder}")
    if not isinstance(read_json(file), dict):
        raise ConfigError(f"{file}: is no JSON object")
    return folder


def run_config_file(folder: Path) -> Path:
    """The configuration a checkpoint was trained with; ConfigError: there is none."""
    for file in (folder / "run_config.json", folder.parent / "run_config.json"):
        if file.is_file():
            return file
    raise ConfigError(f"{folder}: there is no run_config.json in it or above it: not a checkpoint of a run")
