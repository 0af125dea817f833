"""How large things are before they exist: numbers of a model, bytes of its weights, activations and checkpoints."""

from dataclasses import dataclass
from typing import Any

import torch

from policy.model import LoraConfig, ModelConfig

GB = 1e9
QUANT_BLOCK = 64  # weights that share a scale in bitsandbytes' 4-bit formats
NESTED_BLOCK = 256  # scales that share a scale when they are quantised themselves
CODE_BYTES = 16 * 4  # the table of the 16 values, kept with every layer
NESTED_BYTES = 256 * 4 + 4  # the table of the scales' values and their offset, likewise
TOKENIZER_BYTES = 2**24  # with its template, the states and the manifest


def size_of(dtype: str) -> int:
    """Bytes of a number."""
    return getattr(torch, dtype).itemsize


@dataclass(frozen=True)
class Parameters:
    """How many numbers the network has, by how they are held."""

    linears: tuple[int, ...]  # weights of each linear layer of the trunk: what 4 bits apply to
    other: int  # embedding, output layer (once if tied), norms, biases
    adapter: int
    value_head: int
    state_head: int = 0

    @property
    def trainable(self) -> int:
        """What PPO moves."""
        return self.adapter + self.value_head + self.state_head

    @property
    def total(self) -> int:
        """What there is."""
        return sum(self.linears) + self.other + self.trainable


def count_parameters(model: ModelConfig, lora: LoraConfig, architecture: Any) -> Parameters:
    """Count on the meta device, where tensors have shapes and no bytes.

    LoRA (https://arxiv.org/abs/2106.09685, section 4.1) adds ``r * (inputs + outputs)`` to a linear layer.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
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
    size = size_of(model.dtype)
    if not model.use_4bit:
        return (sum(parameters.linears) + parameters.other) * size
    total = parameters.other * size
    for weights in parameters.linears:
        scales = -(-weights // QUANT_BLOCK)
        nested = scales + 4 * -(-scales // NESTED_BLOCK) + NESTED_BYTES
        total += weights // 2 + CODE_BYTES + (nested if model.use_nested_quant else 4 * scales)
    return total


def checkpoint_bytes(trained: int) -> int:
    """Bytes of a checkpoint, at least: what is trained, Adam's moments, the tokenizer."""
    return 12 * trained + TOKENIZER_BYTES
