"""Parts of a decoder layer in fp32 with gradients of their own: fewer, larger products and fewer passes over memory.

Shapes: N tokens, D inputs, O outputs, R rank of an adapter, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Adapted:
    """Frozen linear layers of one input, each with its adapter, as one matrix: x (W + s B A)^T + bias."""

    def __init__(self, modules: Seq[Any]) -> None:
        name = modules[0].active_adapters[0]
        bases = [module.base_layer for module in modules]
        self.weights = [base.weight for base in bases]
        self.bias = None if bases[0].bias is None else torch.cat([base.bias for base in bases])
        self.scales = [module.scaling[name] for module in modules]
        self.factors = [f[name].weight for module in modules for f in (module.lora_A, module.lora_B)]  # A, B, A, B...


def one_matrix(modules: Seq[Any], x: Tensor) -> bool:
    """Whether ``modules`` can be taken together, and it pays: rows are as many as what merging them costs."""
    for module in modules:
        base = getattr(module, "base_layer", None)
        if type(base) is not nn.Linear or module.disable_adapters or len(module.active_adapters) != 1:
            return False
        name = module.active_adapters[0]
        if name not in module.lora_A or name in module.lora_variant or base.weight.dtype != torch.float32:
            return False
        if x.shape[:-1].numel() < base.in_features or (base.bias is None) != (modules[0].base_layer.bias is None):
            return False
    return True


def _merge(layers: _Adapted, factors: Seq[Tensor]) -> Tensor:
    sizes = [len(W) for W in layers.weights]
    merged_OD = layers.weights[0].new_empty(sum(sizes), layers.weights[0].shape[1])
    parts = zip(merged_OD.split(sizes), layers.weights, factors[0::2], factors[1::2], layers.scales, strict=True)
    for part_OD, W, A, B, scale in parts:
        torch.addmm(W, B, A, alpha=scale, out=part_OD)
    return merged_OD


def _gradients(
    layers: _Adapted, g_NO: Tensor, x_ND: Tensor, merged_OD: Tensor, factors: Seq[Tensor], wanted: Seq[bool]
) -> list[Tensor | None]:
    """Gradients by x and by each factor; the adapters' are made for all layers at once, and cut apart."""
    grads: list[Tensor | None] = [g_NO @ merged_OD if wanted[0] else None]
    if not any(wanted[1:]):
        return grads + [None] * len(factors)
    A_RD = torch.cat(tuple(factors[0::2]))
    B_OR = torch.block_diag(*(B * scale for B, scale in zip(factors[1::2], layers.scales, strict=True)))
    by_A_RD, by_B_OR = (g_NO @ B_OR).T @ x_ND, g_NO.T @ (x_ND @ A_RD.T)
    row = column = 0
    for B, scale in zip(factors[1::2], layers.scales, strict=True):
        rows, columns = slice(row, row + B.shape[0]), slice(column, column + B.shape[1])
        grads += [by_A_RD[columns], by_B_OR[rows, columns] * scale]
        row, column = rows.stop, columns.stop
    return grads


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: _Adapted, x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        merged_OD = _merge(layers, factors)
        ctx.save_for_backward(x, merged_OD, *factors)
        ctx.layers = layers
        return F.linear(x, merged_OD, layers.bias).split([len(W) for W in layers.weights], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, merged_OD, *factors = ctx.saved_tensors
        g_NO = (grads[0] if len(grads) == 1 else torch.cat(grads, -1)).flatten(0, -2)
        by_x, *rest = _gradients(ctx.layers, g_NO, x.flatten(0, -2), merged_OD, factors, ctx.needs_input_grad[1:])
        return None, None if by_x is None else by_x.view_as(x), *rest


class _Gated(torch.autograd.Function):
    """silu(x G^T) * (x U^T)."""

    @staticmethod
    def forward(ctx: Any, layers: _Adapted, x: Tensor, *factors: Tensor) -> Tensor:
        merged_OD = _merge(layers, factors)
        both = F.linear(x, merged_OD, layers.bias)
        ctx.save_for_backward(x, both, merged_OD, *factors)
        ctx.layers = layers
        gate, up = both.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, both, merged_OD, *factors = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        g = torch.empty_like(both)
        by_gate, by_up = g.chunk(2, -1)
        torch.mul(grads[0], F.silu(gate), out=by_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=by_gate)
        g_NO, x_ND = g.flatten(0, -2), x.flatten(0, -2)
        by_x, *rest = _gradients(ctx.layers, g_NO, x_ND, merged_OD, factors, ctx.needs_input_grad[1:])
        return None, None if by_x is None else by_x.view_as(x), *rest


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        g = grads[0] * weight
        along = torch.linalg.vecdot(g, x)[..., None] * inverse**3 / -x.shape[-1]
        return g.mul_(inverse).addcmul_(x, along), None, None


def linears(modules: Seq[Any], x: Tensor) -> tuple[Tensor, ...]:
    """Linear layers of one input, each with its adapter."""
    if not one_matrix(modules, x):
        return tuple(module(x) for module in modules)
    layers = _Adapted(modules)
    return _Linears.apply(layers, x, *layers.factors)


def linear(module: Any, x: Tensor) -> Tensor:
    """A linear layer with its adapter."""
    return linears((module,), x)[0]


def gated(mlp: Any, x: Tensor) -> Tensor:
    """The MLP's gate and its other branch, multiplied."""
    modules = (mlp.gate_proj, mlp.up_proj)
    if mlp.config.hidden_act == "silu" and one_matrix(modules, x):
        layers = _Adapted(modules)
        return _Gated.apply(layers, x, *layers.factors)
    gate, up = linears(modules, x)
    return mlp.act_fn(gate) * up


def norm(module: Any, x: Tensor) -> Tensor:
    """Root mean square normalisation; its weight is frozen."""
    if x.dtype != torch.float32 or (module.weight.requires_grad and torch.is_grad_enabled()):
        return module(x)
    return _Norm.apply(x, module.weight, module.variance_epsilon)
