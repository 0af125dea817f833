"""Attention of a tree of tokens: bucket by bucket, keys gathered along each run's path, gradients added up in fp32.

Shapes: N queries or keys in a flat list, Q query heads, H key-value heads, G = Q / H, E head size; R runs, T queries
and S keys of a bucket.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from policy.tree import Bucket

aten = torch.ops.aten

# cuDNN's kernel, torch's first choice on sm90, builds a graph for each new shape; with a mask, and 64 keys more than a
# multiple of 128, it has returned NaN as the gradient of the queries (pytorch/pytorch#196678).
torch.backends.cuda.enable_cudnn_sdp(False)


class PaddedRows(NamedTuple):
    """A bucket on the device of the model; ``mask`` (R, 1, T G, S) is added to the scores."""

    queries: Tensor
    places: Tensor
    keys: Tensor
    mask: Tensor
    shape: tuple[int, int]  # R, T


def prepare(buckets: list[Bucket], groups: int, dtype: torch.dtype, device: torch.device) -> list[PaddedRows]:
    """Buckets as tensors, with their masks."""
    runs = []
    for bucket in buckets:
        (R, T), S = bucket.positions.shape, bucket.keys.shape[1]
        queries, places, positions, keys = (torch.from_numpy(x).to(device) for x in bucket)
        hidden = torch.arange(S, device=device) > positions[..., None]
        mask = torch.zeros(R, 1, T, 1, S, dtype=dtype, device=device).masked_fill_(hidden[:, None, :, None], -torch.inf)
        mask = mask.expand(-1, -1, -1, groups, -1).reshape(R, 1, T * groups, S)
        runs.append(PaddedRows(queries, places, keys, mask, (R, T)))
    return runs


def _queries(x_NQE: Tensor, run: PaddedRows, heads: int) -> Tensor:
    """(R, H, T G, E): the query heads of one key-value head are further queries; keys need not be repeated."""
    (R, T), (_, Q, E) = run.shape, x_NQE.shape
    x = x_NQE.index_select(0, run.queries)
    if len(x) < R * T:
        x = x.new_zeros(R * T, Q, E).index_copy_(0, run.places, x)
    return x.view(R, T, heads, Q // heads, E).transpose(1, 2).reshape(R, heads, T * (Q // heads), E)


def _put_back(x_RHGE: Tensor, run: PaddedRows, to_NQE: Tensor) -> None:
    (R, T), (_, Q, E) = run.shape, to_NQE.shape
    x = x_RHGE.reshape(R, -1, T, Q // x_RHGE.shape[1], E).transpose(1, 2).reshape(R * T, Q, E)
    to_NQE.index_copy_(0, run.queries, x.index_select(0, run.places) if len(run.places) < len(x) else x)


def _keys(x_NHE: Tensor, run: PaddedRows) -> Tensor:
    """(R, H, S, E)."""
    R, S = run.keys.shape
    return x_NHE.index_select(0, run.keys.flatten()).view(R, S, *x_NHE.shape[1:]).transpose(1, 2)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output, and what the backward pass wants besides: on CPUs the logarithm of each query's sum."""
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale), q.new_empty(0)


def _backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, g: Tensor, lse: Tensor, mask: Tensor, scale: float) -> Any:
    """Gradients of queries, keys and values, from that of the output."""
    if q.device.type == "cpu":  # given the sums, which autograd would compute once more
        # Not in bf16, of which each head's products cost 0.3 ms before they begin: up to twice the time.
        g, q, k, v, out, mask = (x.float() for x in (g, q, k, v, out, mask))
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=scale
        )
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return torch.autograd.grad(out, (q, k, v), g)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_NQE: Tensor, k_NHE: Tensor, v_NHE: Tensor, runs: list[PaddedRows], scale: float) -> Tensor:
        out_NQE, sums = torch.empty_like(q_NQE, memory_format=torch.contiguous_format), []
        for run in runs:
            q, k, v = _queries(q_NQE, run, k_NHE.shape[1]), _keys(k_NHE, run), _keys(v_NHE, run)
            out, lse = _forward(q, k, v, run.mask, scale)
            _put_back(out, run, out_NQE)
            sums.append(lse)
        ctx.save_for_backward(q_NQE, k_NHE, v_NHE, out_NQE, *sums)
        ctx.runs, ctx.scale = runs, scale
        return out_NQE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NQE, k_NHE, v_NHE, out_NQE, *sums = ctx.saved_tensors
        [g_NQE] = grads
        by_q, heads = torch.empty_like(q_NQE, memory_format=torch.contiguous_format), k_NHE.shape[1]
        total = torch.promote_types(k_NHE.dtype, torch.float32)  # one key may be in a thousand paths
        by_k, by_v = (k_NHE.new_zeros(len(k_NHE), k_NHE[0].numel(), dtype=total) for _ in range(2))
        for run, lse in zip(ctx.runs, sums, strict=True):
            q, g, out = (_queries(x, run, heads) for x in (q_NQE, g_NQE, out_NQE))
            grads = _backward(q, _keys(k_NHE, run), _keys(v_NHE, run), out, g, lse, run.mask, ctx.scale)
            _put_back(grads[0].to(by_q.dtype), run, by_q)
            for by, x in zip((by_k, by_v), grads[1:], strict=True):
                by.index_add_(0, run.keys.flatten(), x.transpose(1, 2).reshape(-1, by.shape[1]).to(total))
        return by_q, by_k.view_as(k_NHE).to(k_NHE.dtype), by_v.view_as(v_NHE).to(v_NHE.dtype), None, None


def attend(q_NQE: Tensor, k_NHE: Tensor, v_NHE: Tensor, runs: list[PaddedRows], scale: float) -> Tensor:
    """Each query's mean of the values on its path, weighted by softmax(scale q k) (N, Q, E)."""
    return _Attend.apply(q_NQE, k_NHE, v_NHE, runs, scale)
