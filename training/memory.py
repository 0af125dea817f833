"""Estimates of the memory and disk space of a run, before it starts (docs/results.md, "Memory estimates").

First the sizes of parameters, weights and checkpoints; then what is held at the same time.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
import torch

from config.reader import blaming
from curriculum import PAST_SIZE, first_tasks
from policy.cpu_memory import IDLE, KERNEL_BYTES, KERNELS
from policy.model import LoraConfig, ModelConfig
from policy.network import activation_bytes, head_size
from policy.player import HEAD_ROWS
from policy.vocabulary import COLUMNS
from training.process import TrainingError
from training.token_counts import Prompts, play_step

T = TypeVar("T")

GB = 1e9
QUANT_BLOCK = 64  # weights that share a scale in bitsandbytes' 4-bit formats
NESTED_BLOCK = 256  # scales that share a scale when they are quantised themselves
CODE_BYTES = 16 * 4  # the table of the 16 values, stored with every layer
NESTED_BYTES = 256 * 4 + 4  # the table of the scales' values and their offset, likewise
CONTAINER_MEMORY = Path("/sys/fs/cgroup/memory.max")  # bytes, or "max"
TOKENIZER_BYTES = 2**24  # with its template, the states and the manifest
ADAM_BYTES = 16  # a trained fp32 weight, its gradient and Adam's two moments
TURNS = "rollout", "evaluation", "update: layers", "update: logits"  # parts that never coexist
LIBRARY_BYTES = 0.5 * GB  # torch, transformers, PEFT and OpenSpiel on a CPU: 0.48 to 0.53 measured
CONTEXT_BYTES = 0.8 * GB  # CUDA context, kernels and the allocator's rounding: an assumption
SPARE = 1.25  # slots for keys and values to those in use, after the store has grown
LOGITS_BYTES = 36  # a logit at the peak of the legal mass's backward pass: eight copies in fp32 and two in bf16


def machine_memory() -> int:
    """Bytes of this machine's memory, or the limit of its container."""
    room = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # "max"
        room = min(room, int(CONTAINER_MEMORY.read_text()))
    return room


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, by how they are stored."""

    linears: tuple[int, ...]  # weights of each linear layer of the trunk: those that are quantised to 4 bits
    other: int  # embedding, output layer (once if tied), norms, biases
    adapter: int
    value_head: int
    state_head: int = 0

    @property
    def trainable(self) -> int:
        """Parameters that PPO trains."""
        return self.adapter + self.value_head + self.state_head

    @property
    def total(self) -> int:
        """All parameters, frozen ones included."""
        return sum(self.linears) + self.other + self.trainable


def count_parameters(lora: LoraConfig, architecture: Any) -> Parameters:
    """Count parameters on the meta device, where tensors take no memory.

    LoRA (https://arxiv.org/abs/2106.09685, section 4.1) adds ``r * (inputs + outputs)`` to a linear layer. ConfigError:
    the library can make no model of this architecture.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), blaming("model.model_name: its config.json makes no model: ", Exception):
        base = AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    trunk = {n: m for n, m in base.model.named_modules() if isinstance(m, torch.nn.Linear)}
    linears = tuple(m.weight.numel() for m in trunk.values())
    adapted = [m for name, m in trunk.items() if name.rpartition(".")[2] in lora.target_modules]
    adapter = sum(lora.r * (m.in_features + m.out_features) for m in adapted)
    other = sum(p.numel() for p in base.parameters()) - sum(linears)
    return Parameters(linears, other, adapter, architecture.hidden_size + 1)


def weight_bytes(parameters: Parameters, model: ModelConfig) -> int:
    """Bytes of the frozen base.

    In 4 bits (QLoRA, https://arxiv.org/abs/2305.14314, section 3): half a byte a weight and a scale per 64
    weights: 4 bytes, or with nested quantisation 1 byte and 4 more per 256 scales. Embedding, output layer, norms
    and biases keep ``model.dtype``.
    """
    size = getattr(torch, model.dtype).itemsize
    if not model.use_4bit:
        return (sum(parameters.linears) + parameters.other) * size
    total = parameters.other * size
    for weights in parameters.linears:
        scales = -(-weights // QUANT_BLOCK)
        nested = scales + 4 * -(-scales // NESTED_BLOCK) + NESTED_BYTES
        total += weights // 2 + CODE_BYTES + (nested if model.use_nested_quant else 4 * scales)
    return total


def checkpoint_bytes(trained: int, frozen: int) -> int:
    """Least bytes of a checkpoint: trained parameters, Adam's moments, frozen adapters, the tokenizer."""
    return 12 * trained + 4 * frozen + TOKENIZER_BYTES


def frozen_adapters(config: SimpleNamespace) -> int:
    """The most adapters that a run holds besides the trained one: past selves, the average."""
    return PAST_SIZE * ("past" in config.curriculum.opponents) + bool(config.ppo.magnet_coef)


def estimate(
    config: SimpleNamespace, parameters: Parameters, architecture: Any, measured: dict[int, Prompts]
) -> dict[str, float]:
    """Bytes by part. Rollout, evaluation and update (``TURNS``) alternate; the other parts are permanent.

    A rollout holds keys and values of all conversations, the spare slots of ``policy.cache.Store``, one layer's keys
    and values while the store grows, and one layer's activations; tokens are counted in a step of each stage, played at
    random. An evaluation holds as much per game. The update runs the fullest micro-batch of those games: first the
    backward pass of the output layer, with what all layers keep, then that of each layer in turn; a full one with
    ``sweep``, which updates all positions. Without ``context_grad``, rollout and update hold keys and values of all the
    step's tokens, and a micro-batch computes only the answers. On a CPU half of the largest turn may stay when freed.
    """
    model, ppo, layers = config.model, config.ppo, architecture.num_hidden_layers
    size = getattr(torch, model.dtype).itemsize
    layer = activation_bytes(architecture, config.lora.target_modules, size)
    kv = 2 * architecture.num_key_value_heads * head_size(architecture) * size  # a token's keys and values in one layer
    kept = architecture.hidden_size * size if model.gradient_checkpointing else layer
    chat = next(iter(measured.values())).chat
    played, at_once = [play_step(config, chat, stage) for stage in config.curriculum.stages], config.env.games_at_once
    evaluated = ppo.eval_games * len(first_tasks(config.curriculum, config.env.env_type))
    context = 0 if ppo.context_grad else max(p.distinct for p in played)

    def playing(games: int, held: int = 0) -> float:
        scale = max(min(games, at_once or games) / min(ppo.batch_size, at_once or ppo.batch_size), 1)
        return max(SPARE * max(scale * p.slots, held) * kv * (layers + 1)
                   + min(scale * p.at_work, model.tokens_per_batch) * layer for p in played)  # fmt: skip

    games = ppo.mini_batch_size * ppo.gradient_accumulation_steps
    tokens = model.tokens_per_batch if ppo.sweep else max(p.micro_batch(games, model.tokens_per_batch) for p in played)
    answers = tokens * max(p.answer * len(p.asked) / max(p.read, 1) for p in measured.values())
    choices, columns = answers, len("0123456789.")
    if ppo.legal_mass_coef > 0:
        choices, columns = min(choices, HEAD_ROWS), architecture.vocab_size
    elif config.env.answer_mode == "free":
        columns = min(COLUMNS, architecture.vocab_size)
    computed, constants = (answers, SPARE * (context + answers) * kv * layers) if context else (tokens, 0)
    turns = {
        "rollout": playing(ppo.batch_size, context),
        "evaluation": playing(evaluated),
        "update: layers": constants + computed * (kept * layers + 2 * layer),
        "update: logits": constants + computed * kept * layers + choices * columns * LOGITS_BYTES,
    }
    idle = min(IDLE, max(turns.values()) / 2) if model.device == "cpu" else 0.0
    return held(config, parameters) | {"freed and kept": idle} | turns


def held(config: SimpleNamespace, parameters: Parameters) -> dict[str, float]:
    """Bytes of the permanent parts."""
    model = config.model
    process = CONTEXT_BYTES
    if model.device == "cpu":
        process = LIBRARY_BYTES + KERNELS * KERNEL_BYTES * (model.dtype != "float32")
    return {
        "base weights": weight_bytes(parameters, model),
        "adapter, gradient, Adam": ADAM_BYTES * parameters.trainable,
        "other adapters": 4 * parameters.adapter * (bool(model.adapter) + frozen_adapters(config)),
        "workspace": 2 * max(parameters.linears) * getattr(torch, model.dtype).itemsize * model.use_4bit,
        "process": process,
    }


def peak(parts: dict[str, float]) -> float:
    """Most bytes needed at the same time, given the parts that ``estimate`` returns."""
    return sum(parts[name] for name in {*parts} - {*TURNS}) + max(parts[name] for name in TURNS)


def with_less_memory(policy: Any, optimizer: torch.optim.Optimizer, work: Callable[[], T]) -> T:
    """Return ``work()``, which accumulates gradients; each time memory runs out, repeat it with smaller batches.

    TrainingError: even one sequence at a time is too much.
    """
    while True:
        try:
            return work()
        except torch.OutOfMemoryError as error:
            optimizer.zero_grad(set_to_none=True)
            if not policy.halve_batches():
                whole = " or ppo.batch_size, whose keys and values are all held (ppo.context_grad=true holds none)"
                more = whole if getattr(policy, "context", None) else ""
                where = f"out of memory with one sequence at a time: lower ppo.max_seq_length{more}"
                raise TrainingError(where) from error
