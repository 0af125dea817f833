"""The MLP's gate, and norm and rotary embedding with hand-written gradients: less memory traffic, less kept.

Shapes: N tokens, D inputs, H heads, E head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from config.reader import ConfigError
from envs.client import is_number
from policy.lora import linears

BLOCK = 1 << 17  # numbers that fit into a core's cache
ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # others depend on the sequence length, so keys cannot be cached


def check_layers(architecture: Any, name: str) -> None:
    """Raise ConfigError where a base's configuration names a norm or a rotary embedding that is not computed here."""
    rope = getattr(architecture, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type", "default")) not in ROPE_TYPES:
        raise ConfigError(
            f"model.model_name: rope type {kind!r} of {name} is not supported; allowed: {', '.join(ROPE_TYPES)}"
        )
    if (share := rope.get("partial_rotary_factor")) not in (None, 1):  # of each head, that ``rotate`` rotates whole
        raise ConfigError(
            f"model.model_name: partial_rotary_factor {share!r:.80} of {name} is not supported; allowed: 1"
        )
    numbers: dict[str, Any] = {"rms_norm_eps": architecture.rms_norm_eps, "rope_theta": rope.get("rope_theta")}
    for key, number in numbers.items():
        if not is_number(number) or number <= 0:
            raise ConfigError(f"model.model_name: {key} {number!r} of {name} is no positive number")


def gated(mlp: Any, x_ND: Tensor) -> Tensor:
    """The activated gate times the up projection: what enters ``down_proj``."""
    gate, up = linears((mlp.gate_proj, mlp.up_proj), x_ND)
    return mlp.act_fn(gate) * up


def _blocks(*tensors: Tensor) -> zip:
    """Rows of several tensors, as many at a time as fit into the cache."""
    return zip(*(t.split(max(1, BLOCK // tensors[0].shape[-1])) for t in tensors), strict=True)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        out_ND, exact = torch.empty_like(x_ND), torch.promote_types(x_ND.dtype, torch.float32)
        inverse_N1 = x_ND.new_empty(len(x_ND), 1, dtype=exact)
        for x, out, inverse in _blocks(x_ND, out_ND, inverse_N1):
            x = x.to(exact)
            torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=inverse)
            inverse.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
            out.copy_(x * inverse).mul_(weight_D)
        ctx.save_for_backward(x_ND, weight_D, inverse_N1)
        return out_ND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_D, inverse_N1 = ctx.saved_tensors
        by_x_ND, weight_D = torch.empty_like(x_ND), weight_D.to(inverse_N1.dtype)
        for g, x, inverse, by_x in _blocks(grads[0], x_ND, inverse_N1, by_x_ND):
            g, x = g * weight_D, x.to(inverse.dtype)
            along = torch.linalg.vecdot(g, x)[:, None] * inverse**3 / -x.shape[-1]  # through the mean square
            by_x.copy_(g.mul_(inverse).addcmul_(x, along))
        return by_x_ND, None, None


def norm(module: Any, x_ND: Tensor) -> Tensor:
    """Root mean square normalisation over the last axis; its weight is frozen."""
    if x_ND.device.type != "cpu":  # one launch; it rounds once, where the library's module rounds twice
        return F.rms_norm(x_ND, module.weight.shape, module.weight, module.variance_epsilon)
    return _Norm.apply(x_ND.flatten(0, -2), module.weight, module.variance_epsilon).view_as(x_ND)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NHE: Tensor, cos_N1E: Tensor, sin_N1E: Tensor) -> Tensor:
        ctx.save_for_backward(cos_N1E, sin_N1E)
        half = x_NHE.shape[-1] // 2
        out_NHE = x_NHE * cos_N1E
        out_NHE[..., :half].addcmul_(x_NHE[..., half:], sin_N1E[..., :half], value=-1)
        out_NHE[..., half:].addcmul_(x_NHE[..., :half], sin_N1E[..., half:])
        return out_NHE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_N1E, sin_N1E = ctx.saved_tensors
        return _Rotate.apply(grads[0], cos_N1E, -sin_N1E), None, None


def rotate(x_NHE: Tensor, cos_N1E: Tensor, sin_N1E: Tensor) -> Tensor:
    """Rotary position embedding; in ``cos`` and ``sin`` both halves are equal."""
    return _Rotate.apply(x_NHE, cos_N1E, sin_N1E)
