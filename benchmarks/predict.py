"""Seconds and memory of a training step from counted operations: for GPUs that are not here, and held against this CPU.

    python benchmarks/predict.py                     # Qwen on a list of cards
    python benchmarks/predict.py --check tiny smol   # predicts steps on this CPU and measures them, one thread

A step of the program's own is played on a network of one narrow layer, which has the same passes: the same tokens,
trees and buckets. Every pass is done again at the true shapes on the meta device, where each operation that would run
is counted: arithmetic, bytes read and written, launches. An operation takes the largest of arithmetic / peak, bytes /
bandwidth and the cost of a launch; what is not the network's (games, prompts, trees, sampling) is what the narrow step
took here, less its own operations.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import train_ppo
from benchmarks.common import Clock
from policy import attention, layers, network
from policy.model import LoraConfig, ModelConfig, _put_adapter_on, load_tokenizer
from policy.tree import Tree
from scripts.make_tiny_model import make_model
from training.process import StopSignal
from utils import rest_collector

FUSED_ROWS = 8  # up to so many rows bitsandbytes 0.50 multiplies 4-bit weights without unpacking them first
NO_LAUNCH = ("empty", "new_empty", "_unsafe_view", "detach", "_reshape_alias", "lift_fresh", "set_", "is_same_size")


class Op(NamedTuple):
    """One operation that a device would run."""

    flops: float
    bytes: float
    launches: int
    dtype: torch.dtype


class Counter(TorchDispatchMode):
    """Collects the operations made inside; views and empty tensors are none."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if made and not (self.quiet or func.is_view or name.startswith(NO_LAUNCH)):
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            count = flop_registry.get(func.overloadpacket)
            self.add(count(*args, **(kwargs or {}), out_val=out) if count else 0, _touched(name, given, made), made[0])
        return out

    def add(self, flops: float, touched: float, like: torch.Tensor, launches: int = 1) -> None:
        """One operation more."""
        self.ops.append(Op(flops, touched, launches, like.dtype))

    @property
    def launches(self) -> int:
        """How many kernels."""
        return sum(op.launches for op in self.ops)

    @contextmanager
    def fused(self, flops: float, launches: int, *touched: torch.Tensor) -> Iterator[None]:
        """What is done inside is one operation of a GPU, which reads and writes ``touched``."""
        if not self.quiet:
            self.add(flops, sum(t.numel() * t.element_size() for t in touched), touched[0], launches)
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before


def _touched(name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    """Bytes read and written: of a gather or a scatter only the rows that move."""
    if name in ("index_select", "index", "embedding", "gather"):
        return 2.0 * sum(t.numel() * t.element_size() for t in made)
    if name in ("index_copy_", "index_add_", "index_put_"):
        return 3.0 * given[-1].numel() * given[-1].element_size()
    return float(sum(t.numel() * t.element_size() for t in [*given, *made]))


# -------------------------------------------------------------------------------------------- a GPU's own operations


class _Fused(torch.autograd.Function):
    """A function of ``tensors`` shaped like the first: one kernel forward, two backward, 2.5 times the arithmetic."""

    @staticmethod
    def forward(ctx: Any, counter: Counter, flops: float, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.counter, ctx.flops = counter, flops
        ctx.save_for_backward(*tensors)
        with counter.fused(flops, 1, tensors[0], *tensors):
            return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        with ctx.counter.fused(2.5 * ctx.flops, 2, grads[0], *tensors, *tensors):
            return None, None, *(torch.empty_like(t) for t in tensors)


class FourBit(torch.nn.Module):
    """Stands for bitsandbytes' layer: packed weights without bytes."""

    def __init__(self, linear: torch.nn.Linear, counter: Counter, nested: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.counter = linear.in_features, linear.out_features, counter
        packed = torch.empty(linear.weight.numel() // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.weight.quant_state = self  # type: ignore[attr-defined]
        self.bias, self.unpacking = linear.bias, 3 if nested else 1  # launches

    def unpacked(self) -> torch.Tensor:
        """The weights (O, D), as the kernels write them."""
        out = torch.empty(self.out_features, self.in_features, dtype=torch.bfloat16, device="meta")
        with self.counter.fused(0, self.unpacking, out, self.weight):
            return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias."""
        if len(x) > FUSED_ROWS:
            return torch.nn.functional.linear(x, self.unpacked(), self.bias)
        out = x.new_empty(len(x), self.out_features)
        with self.counter.fused(2 * x.numel() * self.out_features, 1, x, out, self.weight):
            return out


@contextmanager
def gpu_kernels(counter: Counter) -> Iterator[None]:
    """Attention, norms and unpacking count as the kernels that a GPU has for them."""

    def sdpa(q: Any, k: Any, v: Any, attn_mask: Any, scale: float) -> torch.Tensor:
        return _Fused.apply(counter, 4 * q.numel() * k.shape[2], q, k, v, attn_mask)

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (attention.F, "scaled_dot_product_attention", sdpa),
            (layers.F, "rms_norm", lambda x, *_: _Fused.apply(counter, 0, x)),
            (layers, "_weight", lambda base, dtype: base.unpacked() if hasattr(base, "unpacked") else base.weight),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def on_meta(architecture: Any, counter: Counter, four_bit: bool, nested: bool = True, lora: Any = None) -> Any:
    """The trunk with its adapter, without bytes; two layers, of which the last one reads."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
        base.requires_grad_(False)
        trunk = _put_adapter_on(base, ModelConfig(), lora or LoraConfig()).get_base_model().model
    if four_bit:
        for module in trunk.modules():
            if hasattr(module, "base_layer"):
                module.base_layer = FourBit(module.base_layer, counter, nested)
    return trunk


# ------------------------------------------------------------------------------------------------------ a whole step


@dataclass
class Pass:
    """One pass through the layers: its tree, of which part of a step, and how it is run."""

    part: str  # rollout, score or update
    tree: Tree
    past: bool
    recompute: bool


@dataclass
class Step:
    """What one step of a configuration does."""

    passes: list[Pass]
    read: int  # tokens of the training sequences
    decisions: int
    updates: int
    seconds: float  # of CPU, that it took here


@contextmanager
def recorded(policy: Any) -> Iterator[list[Pass]]:
    """Collect the passes of a policy made inside."""
    passes: list[Pass] = []
    real, act, acting = network.run_trunk, policy.act, [False]

    def run_trunk(model: Any, tree: Tree, store: Any = None, recompute: bool = False) -> torch.Tensor:
        part = "rollout" if acting[0] else "update" if torch.is_grad_enabled() else "score"
        passes.append(Pass(part, tree, store is not None, recompute))
        return real(model, tree, store, recompute)

    def playing(queries: Any) -> Any:
        acting[0] = True
        try:
            return act(queries)
        finally:
            acting[0] = False

    with mock.patch.object(network, "run_trunk", run_trunk), mock.patch.object(policy, "act", playing):
        yield passes


def narrow(config: SimpleNamespace, folder: Path) -> SimpleNamespace:
    """The configuration with a network of one layer of 16 numbers in place of its own, and the same tokenizer."""
    tokenizer = load_tokenizer(config.model)
    make_model(len(tokenizer), 16, 1, 0.15, 0, "qwen3").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = replace(config.model, model_name=str(folder), use_4bit=False, dtype="float32", device="cpu")
    return SimpleNamespace(**vars(config) | {"model": model})


def play_step(config: SimpleNamespace, gpu: bool, steps: int = 1) -> list[Step]:
    """Steps of a configuration as they are, after one that warms up; ``gpu``: cut as for a GPU."""
    found = []
    with tempfile.TemporaryDirectory() as folder, StopSignal() as stop, ExitStack() as stack:
        if gpu:
            stack.enter_context(mock.patch.object(network, "QUERIES", network.QUERIES[1:] * 2))
        trainer = train_ppo.Trainer(config, Path(folder))
        rest_collector()
        trainer.step(stop)
        for _ in range(steps):
            collate, batches, clock = train_ppo.collate, list[Any](), Clock()

            def collating(*args: Any, collate: Any = collate, batches: list[Any] = batches) -> Any:
                batches.append(collate(*args))
                return batches[-1]

            with recorded(trainer.policy) as passes, mock.patch.object(train_ppo, "collate", collating), clock("step"):
                row = trainer.step(stop)
            tokens = sum(len(s.ids) for s in batches[0].sequences)
            found.append(Step(passes, tokens, row["decisions"], int(row["updates"]), clock.seconds["step"]))
        trainer.metrics.close()
    return found


def forward_equivalents(step: Step, part: str) -> float:
    """Tokens computed in a part, in whole readings of the step's sequences.

    A training pass counts forward, the backward pass through a frozen base as much again, and what is recomputed.
    """
    some = [p for p in step.passes if p.part == part]
    return sum((1 + (part == "update") + p.recompute) * len(p.tree.ids_N) for p in some) / step.read
