"""Bytes that a run takes at its fullest moment, estimated before it starts (docs/results.md, "Memory estimates")."""

from types import SimpleNamespace
from typing import Any

from curriculum import first_tasks
from policy.cpu_memory import IDLE, KERNEL_BYTES, KERNELS
from policy.network import activation_bytes, head_size
from policy.player import HEAD_ROWS
from policy.vocabulary import COLUMNS
from training.prompts import Prompts, play_step
from training.sizes import GB, Parameters, size_of, weight_bytes

ADAM_BYTES = 16  # a trained fp32 weight, its gradient and Adam's two moments
TURNS = "rollout", "evaluation", "update: layers", "update: logits"  # what is never there at the same time
LIBRARY_BYTES = 0.5 * GB  # torch, transformers, PEFT and OpenSpiel on a CPU: 0.48 to 0.53 measured
CONTEXT_BYTES = 0.8 * GB  # CUDA context, kernels and the allocator's rounding: an assumption
SPARE = 1.25  # slots for keys and values to those in use, after the store has grown
LOGITS_BYTES = 36  # at the fullest moment of the legal mass's backward pass, eight copies in fp32 and two in bf16


def estimate(
    config: SimpleNamespace, parameters: Parameters, architecture: Any, measured: dict[int, Prompts]
) -> dict[str, float]:
    """Bytes by part. Rollout, evaluation and update take turns; the other parts are always there.

    What a rollout holds is counted in games of a step of each stage, played at random: keys and values of all
    conversations, the spare slots of ``policy.cache.Store``, one layer's while it grows, and one layer's activations.
    An evaluation holds as much a game. The update runs the fullest micro-batch of those games: first the output layer
    goes back, with the activations of all layers kept, then one layer after the other. On a CPU what the C library
    keeps of freed memory comes on top.
    """
    model, ppo, layers = config.model, config.ppo, architecture.num_hidden_layers
    size = size_of(model.dtype)
    layer = activation_bytes(architecture, config.lora.target_modules, size)
    kv = 2 * architecture.num_key_value_heads * head_size(architecture) * size  # a token's keys and values in one layer
    kept = architecture.hidden_size * size if model.gradient_checkpointing else layer
    chat = next(iter(measured.values())).chat
    played = [play_step(config, chat, stage) for stage in config.curriculum.stages]
    evaluated, at_once = (
        ppo.eval_games * len(first_tasks(config.curriculum, config.env.env_type)),
        config.env.games_at_once,
    )

    def reading(games: int) -> float:
        more = max(min(games, at_once or games) / min(ppo.batch_size, at_once or ppo.batch_size), 1)
        return max(more * SPARE * p.slots * kv * (layers + 1) + min(more * p.at_work, model.tokens_per_batch) * layer
                   for p in played)  # fmt: skip

    tokens = max(
        p.micro_batch(ppo.mini_batch_size * ppo.gradient_accumulation_steps, model.tokens_per_batch) for p in played
    )
    choices = tokens * max(p.answer * p.decisions / p.read for p in measured.values())
    columns = len("0123456789.")
    if ppo.legal_mass_coef > 0:
        choices, columns = min(choices, HEAD_ROWS), architecture.vocab_size
    elif config.env.answer_mode == "free":
        columns = min(COLUMNS, architecture.vocab_size)
    turns = {
        "rollout": reading(ppo.batch_size),
        "evaluation": reading(evaluated),
        "update: layers": tokens * (kept * layers + 2 * layer),
        "update: logits": tokens * kept * layers + choices * columns * LOGITS_BYTES,
    }
    idle = min(IDLE, max(turns.values())) if model.device == "cpu" else 0.0
    return held(config, parameters) | {"freed and kept": idle} | turns


def held(config: SimpleNamespace, parameters: Parameters) -> dict[str, float]:
    """Bytes of what is always there, by part."""
    model = config.model
    process = CONTEXT_BYTES
    if model.device == "cpu":
        process = LIBRARY_BYTES + KERNELS * KERNEL_BYTES * (model.dtype != "float32")
    return {
        "base weights": weight_bytes(parameters, model),
        "adapter, gradient, Adam": ADAM_BYTES * parameters.trainable + 4 * parameters.adapter * bool(model.adapter),
        "workspace": 2 * max(parameters.linears) * size_of(model.dtype) * model.use_4bit,
        "process": process,
    }


def peak(parts: dict[str, float]) -> float:
    """Bytes needed at once, of the parts that ``estimate`` returns."""
    return sum(parts[name] for name in {*parts} - {*TURNS}) + max(parts[name] for name in TURNS)
