"""Linear layers with LoRA adapters, forward and backward, with no more matrix products than LoRA needs.

The adapter's output is added to the base's in the dtype of the computation, whatever dtype the base's weights have.

Shapes: N tokens, D inputs, O outputs, R rank of an adapter.
"""

from collections.abc import Sequence as Seq
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


def _count_the_write(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Increase the parameters' versions, as fused optimizers do not: ``_Adapted.cast`` relies on them."""
    torch.autograd.graph.increment_version([p for group in optimizer.param_groups for p in group["params"]])


register_optimizer_step_post_hook(_count_the_write)


def _weight(base: Any, dtype: torch.dtype) -> Tensor:
    """The weights of a linear layer (O, D), dequantised where they are in 4 bits."""
    if not hasattr(base.weight, "quant_state"):
        return base.weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(base.weight, base.weight.quant_state).to(dtype)


class _Adapted:
    """Frozen linear layers that share an input, with their adapters: x W^T + bias + x A^T (s B)^T."""

    def __init__(self, modules: Seq[Any]) -> None:
        self.bases, self.scales, self.factors = [], [], []
        self._kept = modules[0].__dict__
        for module in modules:
            name = adapter_of(module)
            self.bases.append(getattr(module, "base_layer", module))
            self.scales.append(module.scaling[name] if name else None)
            if name:
                self.factors += [module.lora_A[name].weight, module.lora_B[name].weight]

    def cast(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor | None]]:
        """The A of all layers stacked (R, D), and each layer's s B (O, its rank) or None, in ``dtype``.

        Cached on GPUs, where each launch costs, until a factor is replaced or written to.
        """
        state = [dtype, *((id(x), x._version) for x in self.factors)]
        if (kept := self._kept.get("_cast")) and kept[0] == state:
            return kept[1]
        pairs = iter(self.factors[1::2])
        scaled = [None if s is None else (next(pairs) * s).to(dtype) for s in self.scales]
        result = torch.cat(tuple(self.factors[0::2])).to(dtype), scaled
        if result[0].device.type != "cpu":
            self._kept["_cast"] = state, result, self.factors  # kept alive, so that their ids are not reused
        return result


def adapter_of(module: Any) -> str | None:
    """The name of a layer's active adapter, None where there is none; NotImplementedError: not one plain adapter."""
    if not hasattr(module, "base_layer") or module.disable_adapters:
        return None
    names = [name for name in module.active_adapters if name in module.lora_A]
    special = any(name in module.lora_variant or module.lora_B[name].bias is not None for name in names)
    if len(names) > 1 or module.merged or special:
        raise NotImplementedError
    return names[0] if names else None


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: _Adapted, x_ND: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        A_RD, scaled = layers.cast(x_ND.dtype)
        inner_NR, start, outs = F.linear(x_ND, A_RD), 0, []
        for base, B_OR in zip(layers.bases, scaled, strict=True):
            out_NO = base(x_ND)
            if B_OR is not None:
                out_NO.addmm_(inner_NR[:, start : start + B_OR.shape[1]], B_OR.T)
                start += B_OR.shape[1]
            outs.append(out_NO)
        ctx.save_for_backward(x_ND, *factors)
        ctx.layers = layers
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, *factors = ctx.saved_tensors
        A_RD, scaled = ctx.layers.cast(x_ND.dtype)
        inner_NR, start, by_inner, by_factors = F.linear(x_ND, A_RD), 0, [], []
        by_x_ND = None
        for base, B_OR, scale, g_NO in zip(ctx.layers.bases, scaled, ctx.layers.scales, grads, strict=True):
            if ctx.needs_input_grad[1]:
                W_OD = _weight(base, g_NO.dtype)
                by_x_ND = g_NO @ W_OD if by_x_ND is None else by_x_ND.addmm_(g_NO, W_OD)
            if B_OR is not None:
                by_B = (inner_NR[:, start : start + B_OR.shape[1]].T @ g_NO).T  # autograd would copy it into B's layout
                start += B_OR.shape[1]
                by_inner.append(g_NO @ B_OR)
                by_factors += [None, torch.empty_like(B_OR, dtype=factors[0].dtype).copy_(by_B).mul_(scale)]
        by_inner_NR = torch.cat(by_inner, 1)
        by_A_RD = (by_inner_NR.T @ x_ND).to(factors[0].dtype)
        by_factors[0::2] = by_A_RD.split([len(A) for A in factors[0::2]])
        return None, None if by_x_ND is None else by_x_ND.addmm_(by_inner_NR, A_RD), *by_factors


def linears(modules: Seq[Any], x_ND: Tensor) -> tuple[Tensor, ...]:
    """Linear layers that share an input, each with its adapter."""
    try:
        layers = _Adapted(modules)
    except NotImplementedError:
        return tuple(module(x_ND) for module in modules)
    if not layers.factors:
        return tuple(base(x_ND) for base in layers.bases)
    return _Linears.apply(layers, x_ND, *layers.factors)


def linear(module: Any, x_ND: Tensor) -> Tensor:
    """A linear layer with its adapter."""
    return linears((module,), x_ND)[0]
