"""Models of the true shapes with random weights, made layer by layer on the device: no download and no file.

A layer's weights are drawn in bf16 and, for 4 bits, quantised before the next layer's are drawn: memory is never much
above that of the finished model. What is left out against loading a checkpoint is reading the file.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.recorded import tokenizer
from envs.config import EnvConfig
from policy import Policy
from policy.model import LoraConfig, ModelConfig, _put_adapter_on, guard_4bit_on_cpu
from training.config import PPOConfig, RunConfig

INIT_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """A model's sizes, as in its config.json on the Hub."""

    name: str
    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head: int = 128
    vocab: int = 151_936


SHAPES = (Shape("Qwen2.5-3B", "qwen2", 2048, 36, 16, 2, 11008), Shape("Qwen3-4B", "qwen3", 2560, 36, 32, 8, 9728))
TOYS = tuple(replace(s, hidden=64, layers=2, heads=4, kv_heads=2, mlp=128, head=16) for s in SHAPES)


def config_of(shape: Shape) -> Any:
    """The library's configuration of a shape."""
    from transformers import Qwen2Config, Qwen3Config

    kind = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}[shape.architecture]
    extra = {"head_dim": shape.head} if shape.architecture == "qwen3" else {}
    return kind(
        vocab_size=shape.vocab, hidden_size=shape.hidden, num_hidden_layers=shape.layers, tie_word_embeddings=True,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, intermediate_size=shape.mlp,
        max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **extra,
    )  # fmt: skip


def _draw(name: str, parameter: nn.Parameter, device: str) -> torch.Tensor:
    data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    if "norm" in name:
        return data.fill_(1.0)
    return data.zero_() if name.endswith("bias") else data.normal_(0, INIT_STD)


def _in_4_bits(linear: nn.Linear, device: str) -> nn.Module:
    """A drawn linear layer as bitsandbytes keeps it: NF4, scales as by default, bf16 arithmetic."""
    import bitsandbytes as bnb

    nested = ModelConfig().use_nested_quant
    held = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=torch.bfloat16,
        compress_statistics=nested, quant_type="nf4", device="meta",
    )  # fmt: skip
    weight: Any = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=nested, quant_type="nf4", module=held
    )
    held.weight, held.bias = weight.to(device), linear.bias
    return held


def make_base(shape: Shape, four_bit: bool, device: str) -> Any:
    """A causal language model of this shape; the output layer and the embedding stay in bf16."""
    from transformers import AutoModelForCausalLM

    config = config_of(shape)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.model.rotary_emb = type(base.model.rotary_emb)(config).to(device)
    for path, module in list(base.named_modules()):
        if path == "lm_head":
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            drawn = _draw(f"{path}.{name}", parameter, device)
            setattr(module, name, nn.Parameter(drawn, requires_grad=False))
        if four_bit and isinstance(module, nn.Linear):
            parent, _, child = path.rpartition(".")
            setattr(base.get_submodule(parent), child, _in_4_bits(module, device))
            module.weight = None  # type: ignore[assignment]
    base.lm_head.weight = base.model.embed_tokens.weight
    base.is_loaded_in_4bit = four_bit  # where PEFT looks for it
    guard_4bit_on_cpu(base)
    return base


def settings(shape: Shape, four_bit: bool, ppo: PPOConfig, **held: Any) -> SimpleNamespace:
    """The program's configuration for such a model; ``held`` goes to its model section."""
    model = ModelConfig(model_name=f"{shape.name} (random)", use_4bit=four_bit, **held)
    return SimpleNamespace(model=model, lora=LoraConfig(), ppo=ppo, env=EnvConfig(), run=RunConfig())


def make_peft_model(shape: Shape, four_bit: bool, device: str) -> Any:
    """The base with the program's LoRA adapter on it."""
    torch.manual_seed(0)
    return _put_adapter_on(make_base(shape, four_bit, device), ModelConfig(), LoraConfig()).eval()


def make_policy(peft_model: Any, shape: Shape, config: SimpleNamespace) -> Policy:
    """The program's policy around a model; several may share one."""
    return Policy(peft_model, tokenizer(shape.architecture), config)


def forget() -> None:
    """Return the memory of models that are no longer referred to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
