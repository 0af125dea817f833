"""Operations that a pass would run, counted at the true shapes on the meta device, a GPU's own kernels among them."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from policy import attention, layers, lora
from policy.model import LoraConfig, ModelConfig, _put_adapter_on

FUSED_ROWS = 8  # up to so many rows bitsandbytes 0.50 multiplies 4-bit weights without unpacking them first
NO_LAUNCH = ("empty", "new_empty", "_unsafe_view", "detach", "_reshape_alias", "lift_fresh", "set_", "is_same_size")

aten = torch.ops.aten
FLOPS = flop_registry | {
    aten.addmm_: flop_registry[aten.addmm],
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 4 * q.numel() * k.shape[2],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, *_, **__: 10 * q.numel() * k.shape[2],
}


class Op(NamedTuple):
    """One operation that a device would run. ``least``: the smallest side of a product of matrices, 0: it is none."""

    name: str
    flops: float
    bytes: float
    launches: int
    dtype: torch.dtype
    least: int = 0


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
            count = FLOPS.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            least = min(*made[0].shape[-2:], given[-2].shape[-1]) if count else 0
            self.ops.append(Op(name, flops, _touched(name, given, made), 1, made[0].dtype, least))
        return out

    @property
    def launches(self) -> int:
        """How many kernels."""
        return sum(op.launches for op in self.ops)

    @contextmanager
    def fused(self, flops: float, launches: int, *touched: torch.Tensor) -> Iterator[None]:
        """What is done inside is one operation of a GPU, which reads and writes ``touched``."""
        if not self.quiet:
            size = sum(t.numel() * t.element_size() for t in touched)
            least = min(touched[0].shape[-2:]) if flops else 0
            self.ops.append(Op("fused", flops, size, launches, touched[0].dtype, least))
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before


def _touched(name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    """Bytes read and written: of a gather or a scatter only the rows that move, of what makes zeros only those."""
    if name.startswith(("new_", "zeros", "ones", "full")):
        given = []
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
            (lora, "_weight", lambda base, dtype: base.unpacked() if hasattr(base, "unpacked") else base.weight),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def trunk_of(architecture: Any, held: ModelConfig, lora: LoraConfig, layers: int, counter: Counter) -> Any:
    """The trunk of so many layers with its adapter, on the device of the context: without bytes."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(architecture)
    config.num_hidden_layers = layers
    if hasattr(config, "layer_types"):
        config.layer_types = ["full_attention"] * layers
    base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, held.dtype))
    base.requires_grad_(False)
    trunk = _put_adapter_on(base, replace(held, adapter=None), lora).get_base_model().model
    for module in trunk.modules() if held.use_4bit else ():
        if hasattr(module, "base_layer"):
            module.base_layer = FourBit(module.base_layer, counter, held.use_nested_quant)
    return trunk
