"""What a run would take, told before it starts: parameters, tokens per prompt, memory, search. Loads no weights.

Parameters and the bytes of the weights are exact, tokens are counted in a few random games, the rest of the memory
and the time of the search are estimates (docs/results.md, "Memory estimates").
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from chat import ChatFormat
from curriculum import eval_tasks, pool
from env_wrapper import Action, Episode, Query, Task, play
from evaluation import first_tasks
from games import CONFIGS_PER_GAME, GAMES
from model import LoraConfig, ModelConfig, device_of, load_architecture, load_tokenizer
from utils import ConfigError, uniform

GB = 1e9
QUANT_BLOCK = 64  # weights that share a scale in bitsandbytes' 4-bit formats
NESTED_BLOCK = 256  # scales that share a scale when they are quantised themselves
CODE_BYTES = 16 * 4  # the table of the 16 values, kept with every layer
NESTED_BYTES = 256 * 4 + 4  # the table of the scales' values and their offset, likewise
ADAM_BYTES = 16  # a trained fp32 weight, its gradient and Adam's two moments
CONTEXT_BYTES = 0.8 * GB  # CUDA context, kernels and the allocator's rounding: an assumption
LOGITS_BYTES = 24  # log-probabilities, probabilities, the gradients of both and of the logits, and one spare: fp32
SEARCH_SECONDS = 2.0  # spent on measuring the search
PLAYOUT_SECONDS = 1.0  # spent on random games of one game, after the first


def _size(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


# ------------------------------------------------------------------------------------------------------ parameters


@dataclass(frozen=True)
class Parameters:
    """How many numbers the network has, by how they are held."""

    linears: tuple[int, ...]  # weights of each linear layer of the trunk: what 4 bits apply to
    other: int  # embedding, output layer (once if tied), norms, biases
    adapter: int
    value_head: int

    @property
    def trainable(self) -> int:
        """What PPO moves."""
        return self.adapter + self.value_head

    @property
    def total(self) -> int:
        """What there is."""
        return sum(self.linears) + self.other + self.trainable


def count_parameters(model: ModelConfig, lora: LoraConfig, architecture: Any) -> Parameters:
    """Count on the meta device, where tensors have shapes and no bytes.

    LoRA (https://arxiv.org/abs/2106.09685, section 4.1) adds ``r * (inputs + outputs)`` to a linear layer.
    A local adapter to start from is counted in its file.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    trunk = {n: m for n, m in base.model.named_modules() if isinstance(m, torch.nn.Linear)}
    linears = tuple(m.weight.numel() for m in trunk.values())
    adapted = [m for name, m in trunk.items() if name.rpartition(".")[2] in lora.target_modules]
    adapter = sum(lora.r * (m.in_features + m.out_features) for m in adapted)
    if model.adapter and (file := Path(model.adapter) / "adapter_model.safetensors").is_file():
        adapter = _count_in_file(file)
    other = sum(p.numel() for p in base.parameters()) - sum(linears)
    return Parameters(linears, other, adapter, architecture.hidden_size + 1)


def _count_in_file(file: Path) -> int:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as tensors:
            return sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.adapter: cannot read {file} ({error})") from error


def weight_bytes(parameters: Parameters, model: ModelConfig) -> int:
    """Bytes of the frozen base.

    In 4 bits (QLoRA, https://arxiv.org/abs/2305.14314, section 3): half a byte a weight and a scale per 64
    weights: 4 bytes, or with nested quantisation 1 byte and 4 more per 256 scales. Embedding, output layer, norms
    and biases keep ``model.dtype``.
    """
    size = _size(model.dtype)
    if not model.use_4bit:
        return (sum(parameters.linears) + parameters.other) * size
    total = parameters.other * size
    for weights in parameters.linears:
        scales = -(-weights // QUANT_BLOCK)
        nested = scales + 4 * -(-scales // NESTED_BLOCK) + NESTED_BYTES
        total += weights // 2 + CODE_BYTES + (nested if model.use_nested_quant else 4 * scales)
    return total


# --------------------------------------------------------------------------------------------------------- prompts


@dataclass
class Prompts:
    """Token counts of one game from random play."""

    game: str = ""
    first: list[int] = field(default_factory=list)  # of the first prompt of each conversation
    later: list[int] = field(default_factory=list)  # read anew at each later turn
    longest: list[int] = field(default_factory=list)  # of the longest prompt of each conversation, and the answer
    answer: int = 0  # of the longest answer
    episodes: list[Episode] = field(default_factory=list)

    @property
    def decisions(self) -> int:
        """Answers given, in all games."""
        return len(self.first) + len(self.later)

    @property
    def read(self) -> int:
        """Tokens of the training sequences, of all games."""
        return sum(self.first) + sum(self.later)


class _Reader:
    """Plays at random and counts what a model would have read. ``peek``: it stops after the first prompt."""

    def __init__(self, chat: ChatFormat, config: SimpleNamespace, prompts: Prompts, peek: bool) -> None:
        self.chat, self.prompts, self.peek = chat, prompts, peek
        self.free_answer = config.ppo.max_new_tokens if config.env.answer_mode == "free" else 0
        self.seen: dict[int, tuple[int, int]] = {}  # seat -> messages and tokens of its last prompt
        self.longest: dict[int, int] = {}

    def act(self, queries: Seq[Query]) -> list[Action]:
        return [self.answer(query) for query in queries]

    def answer(self, query: Query) -> Action:
        tokens = len(self.chat.first_prompt(query.conversation)[0])
        answer = self.free_answer or max(map(len, map(str, query.legal))) + 1  # a token a digit, and the end
        before = self.seen.get(query.seat)
        goes_on = before is not None and len(query.conversation) > before[0]
        new = tokens - before[1] if before and goes_on else tokens
        (self.prompts.later if before else self.prompts.first).append(new)
        self.prompts.answer = max(self.prompts.answer, answer)
        self.seen[query.seat] = len(query.conversation), tokens
        self.longest[query.seat] = max(self.longest.get(query.seat, 0), tokens + answer)
        choices = [*map(str, query.legal)] or [""]  # a task without legal actions takes any text
        return Action(choices[int(uniform(*query.rng_key) * len(choices))], truncated=self.peek)


def measure_prompts(config: SimpleNamespace, chat: ChatFormat, peek: bool = False) -> dict[int, Prompts]:
    """Game index -> token counts from up to four random games (``peek``: from their first prompts).

    Raises:
        ConfigError: ``ppo.max_seq_length`` cannot hold a game's first prompt and answer, or a game failed.
    """
    everything = [item for stage in config.curriculum.stages for item in stage.games]
    opponent = "self" if any("self" in stage.mixture for stage in config.curriculum.stages) else "random"
    tasks: dict[int, list[Task]] = defaultdict(list)
    for task in eval_tasks(everything, 2, config.run.seed, opponent):
        tasks[task.task_id // CONFIGS_PER_GAME].append(task)
    measured = {index: _measure(config, chat, tasks[index], peek) for index in tasks}
    needed, game = max((max(p.first, default=0) + p.answer, p.game) for p in measured.values())
    if needed > config.ppo.max_seq_length:
        raise ConfigError(
            f"ppo.max_seq_length = {config.ppo.max_seq_length}: the first prompt and answer of {game} take {needed} "
            f"tokens; expected at least {needed}, a shorter env.prompt, or other games in curriculum.stages"
        )
    return measured


def _measure(config: SimpleNamespace, chat: ChatFormat, tasks: list[Task], peek: bool) -> Prompts:
    prompts, deadline = Prompts(), time.perf_counter() + PLAYOUT_SECONDS
    for task in tasks:
        reader = _Reader(chat, config, prompts, peek)
        (episode,) = play(config.env, reader, [task])
        if episode.outcome == "failed":
            raise ConfigError(f"curriculum.stages: task {task.task_id} failed: {episode.info['error']}")
        prompts.game = episode.game
        prompts.episodes.append(episode)
        prompts.longest += reader.longest.values()
        if time.perf_counter() > deadline:
            break
    return prompts


def check_prompts(config: SimpleNamespace) -> None:
    """Raise ConfigError where a game would always be cut off before its first answer; a second's work."""
    load_architecture(config.model)  # first: it tells a folder that is missing from a name on the Hub
    measure_prompts(config, ChatFormat(load_tokenizer(config.model)), peek=True)


# ---------------------------------------------------------------------------------------------------------- memory


def activation_bytes(architecture: Any, lora: LoraConfig, dtype: str) -> int:
    """Bytes that one token leaves behind in one layer for the backward pass, the base frozen.

    What autograd keeps of ``network.run_trunk``: the fp32 inputs and the scales of the norms; for each adapted
    linear its fp32 input (PEFT casts it; in fp32 neighbours share one; o_proj's is a copy on CPUs)
    and the r numbers between A and B; queries, keys, values, output and log-normalisers of the attention; in the MLP
    the gate before and (unless ``fused.gated`` makes it again) after its activation, and the other branch.
    """
    h, f, size = architecture.hidden_size, architecture.intermediate_size, _size(dtype)
    heads, kv_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    q, k = heads * _head(architecture), kv_heads * _head(architecture)
    groups: dict[tuple[str, ...], int] = {("q_proj", "k_proj", "v_proj"): h, ("gate_proj", "up_proj"): h}
    groups |= {("o_proj",): q, ("down_proj",): f}
    floats = 2 * (h + 1) + (q + k + heads + kv_heads if architecture.model_type == "qwen3" else 0) + heads
    for names, width in groups.items():
        count = len(set(names) & set(lora.target_modules))
        floats += width * (min(count, 1) if size == 4 else count) + lora.r * count
    gated = size == 4 and {"gate_proj", "up_proj"} <= set(lora.target_modules)
    return 4 * floats + size * (2 * q + 2 * k + (2 if gated else 3) * f)


def _head(architecture: Any) -> int:
    return getattr(architecture, "head_dim", None) or architecture.hidden_size // architecture.num_attention_heads


def memory(
    config: SimpleNamespace, parameters: Parameters, architecture: Any, measured: dict[int, Prompts]
) -> dict[str, float]:
    """Bytes by part. Rollout, evaluation and update take turns; the other parts are always there.

    Reading without gradients holds the keys and values of all conversations (of the stage with the longest) twice,
    old and new, the batch at work once more, and one layer's activations. The update runs one full micro-batch.
    """
    model, ppo, lora = config.model, config.ppo, config.lora
    size, layers = _size(model.dtype), architecture.num_hidden_layers
    layer = activation_bytes(architecture, lora, model.dtype)
    kv = 2 * architecture.num_key_value_heads * _head(architecture) * size  # a token's keys and values in one layer
    kept = architecture.hidden_size * size if model.gradient_checkpointing else layer
    ends = {i: min(max(p.longest), ppo.max_seq_length) * len(p.longest) / len(p.episodes) for i, p in measured.items()}
    stages = [pool(stage.games) for stage in config.curriculum.stages]
    game_tokens = max(sum(ends[i] for i in stage) / len(stage) for stage in stages)
    longest = min(max(max(p.longest) for p in measured.values()), ppo.max_seq_length)

    def reading(games: int) -> float:
        games = min(games, config.env.games_at_once or games)
        at_work = max(longest, min(games * game_tokens, model.tokens_per_batch))
        return (2 * games * game_tokens + at_work) * kv * layers + at_work * layer

    wanted = max(p.read / len(p.episodes) for p in measured.values()) * ppo.mini_batch_size
    tokens = max(longest, min(wanted * ppo.gradient_accumulation_steps, model.tokens_per_batch))
    choices = tokens * max(p.answer * p.decisions / p.read for p in measured.values())
    whole_vocabulary = config.env.answer_mode == "free" or ppo.legal_mass_coef > 0
    columns = architecture.vocab_size if whole_vocabulary else len("0123456789.")
    return {
        "base weights": weight_bytes(parameters, model),
        "adapter, gradient, Adam": ADAM_BYTES * parameters.trainable + 4 * parameters.adapter * bool(model.adapter),
        "workspace": CONTEXT_BYTES * (model.device != "cpu")
        + 2 * max(parameters.linears) * _size(model.bnb_4bit_compute_dtype) * model.use_4bit,
        "rollout": reading(ppo.batch_size),
        "evaluation": reading(ppo.eval_games * len(first_tasks(config.curriculum, config.env.env_type))),
        "update: activations": tokens * (kept * layers + 2 * layer),
        "update: logits": choices * columns * LOGITS_BYTES,
    }


def peak(parts: dict[str, float]) -> float:
    """Bytes needed at once, of the parts that ``memory`` returns."""
    always = parts["base weights"] + parts["adapter, gradient, Adam"] + parts["workspace"]
    update = parts["update: activations"] + parts["update: logits"]
    return always + max(parts["rollout"], parts["evaluation"], update)


# ---------------------------------------------------------------------------------------------------------- search


def search_seconds(config: SimpleNamespace, measured: dict[int, Prompts]) -> dict[tuple[str, int], tuple[float, float]]:
    """(opponent, game index) -> CPU seconds of search a move and a game.

    A move is measured at a place of its own in each random game, with more and more simulations until its share of
    ``SEARCH_SECONDS`` is spent, and scaled: a search takes time in proportion to its simulations.
    """
    from envs.opponents import parse_opponent

    pairs = {(o, i) for stage in config.curriculum.stages for o in stage.mixture for i in pool(stage.games)}
    searching = sorted((o, i) for o, i in pairs if o != "past" and parse_opponent(o).searches)
    seconds = {}
    for opponent, index in searching:
        episodes = measured[index].episodes
        n, budget = len(episodes), SEARCH_SECONDS / len(searching) / len(episodes)
        move = sum(_move_seconds(opponent, e, k / n, budget) for k, e in enumerate(episodes)) / n
        seconds[opponent, index] = move, move * sum(len(_replies(e)) for e in episodes) / n
    return seconds


def _replies(episode: Episode) -> list[int]:
    """Where in the history an opponent moved."""
    nobodies = (-1, episode.info["seat"])
    return [i for i, (player, _) in enumerate(episode.info["history"]) if player not in nobodies]


def _move_seconds(opponent: str, episode: Episode, place: float, budget: float) -> float:
    """Estimated CPU seconds of one move, ``place`` of the way through its game; 0 where there is nothing to search."""
    from envs.openspiel import table
    from envs.opponents import RandomBot, make_bot, parse_opponent

    shared, spec, replies = table(episode.task.task_id), parse_opponent(opponent), _replies(episode)
    limit = spec.budget_in(shared.game)
    if limit is None or not replies:
        return 0.0
    now = replies[int(place * len(replies))]
    seat = episode.info["history"][now][0]
    if isinstance(make_bot(shared.game, shared.spiel, spec, seat, 0), RandomBot):
        return 0.0
    state = shared.spiel.new_initial_state()
    for _, action in episode.info["history"][:now]:
        state.apply_action(action)
    simulations, done, elapsed = 1, 1, 0.0
    while elapsed < budget / 3 and simulations <= limit[0]:
        bot = make_bot(shared.game, shared.spiel, replace(spec, budget=(simulations, limit[1])), seat, 0)
        start = time.thread_time()
        bot.step(state)
        elapsed, done, simulations = time.thread_time() - start, simulations, 2 * simulations
    return elapsed * limit[0] / done


# ------------------------------------------------------------------------------------------------------- the report


def describe(config: SimpleNamespace) -> str:
    """What ``--dry-run`` prints; ConfigError for what would stop the run at its start or make a game useless."""
    architecture = load_architecture(config.model)
    chat = ChatFormat(load_tokenizer(config.model))
    parameters = count_parameters(config.model, config.lora, architecture)
    measured = measure_prompts(config, chat)
    parts = memory(config, parameters, architecture, measured)
    sections = [f"{name}: {json.dumps(dataclasses.asdict(part))}" for name, part in vars(config).items()]
    counts = (
        f"{parameters.trainable:,} trainable parameters (adapter {parameters.adapter:,}, value head "
        f"{parameters.value_head:,}) of {parameters.total:,} in all"
    )
    search = _say_search(config, search_seconds(config, measured))
    chapters = [sections, [counts], _say_prompts(config, measured), _say_memory(config, parts), search]
    try:
        device_of(config.model)
    except ConfigError as error:
        chapters.append([f"This machine cannot run it: {error}"])
    return "\n\n".join("\n".join(lines) for lines in chapters if lines)


def _say_prompts(config: SimpleNamespace, measured: dict[int, Prompts]) -> list[str]:
    def span(counts: list[int]) -> str:
        return f"{sum(counts) / len(counts):.0f} ({max(counts)})" if counts else "-"

    lines = [f"{'tokens, mean (max)':<20}{'first prompt':>14}{'later turns':>14}{'longest':>16}{'decisions':>12}"]
    cut, limit = [], config.ppo.max_seq_length
    for p in measured.values():
        columns = f"{p.game:<20}{span(p.first):>14}{span(p.later):>14}{span(p.longest):>16}"
        lines.append(f"{columns}{p.decisions / len(p.first):>12.1f}")
        if max(p.longest) > limit:
            cut.append(f"{p.game} ({sum(n > limit for n in p.longest)} of {len(p.longest)})")
    verdict = f"cuts off random games of {', '.join(cut)}; see env.history_turns" if cut else "holds every prompt"
    return [*lines, f"ppo.max_seq_length {limit} {verdict}"]


def _say_memory(config: SimpleNamespace, parts: dict[str, float]) -> list[str]:
    lines = ["memory, estimated (rollout, evaluation and update take turns)"]
    lines += [f"{name:<26}{size / GB:>10.3f} GB" for name, size in [*parts.items(), ("at its peak", peak(parts))]]
    if config.model.device == "cpu":
        room, owner = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"
    elif torch.cuda.is_available():
        room, owner = torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0)
    else:
        return [*lines, f"no CUDA device here: it needs one with about {peak(parts) / GB:.0f} GB"]
    verdict = "fits" if peak(parts) < room else "does not fit"
    return [*lines, f"{verdict}: about {peak(parts) / GB:.1f} of the {room / GB:.1f} GB of {owner}"]


def _say_search(config: SimpleNamespace, seconds: dict[tuple[str, int], tuple[float, float]]) -> list[str]:
    if not seconds:
        return []
    threads = config.env.search_threads or os.cpu_count() or 1
    lines = [f"{'search, estimated':<40}{'s a move':>10}{'s a game':>10}"]
    for (opponent, index), (move, game) in seconds.items():
        lines.append(f"{GAMES[index].name + ' against ' + opponent:<40}{move:>10.3f}{game:>10.2f}")
    for stage in config.curriculum.stages:
        played, weights = pool(stage.games), stage.mixture
        total = sum(w * seconds.get((o, i), (0, 0))[1] for o, w in weights.items() for i in played)
        step = config.ppo.batch_size * total / len(played) / sum(weights.values()) / threads
        lines.append(f"stage {stage.name}: {step:.2f} s a step of {config.ppo.batch_size} games, on {threads} threads")
    return lines
