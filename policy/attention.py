"""Attention of a tree of tokens: bucket by bucket, keys gathered along each run's path, gradients added up in fp32.

Shapes: N queries or keys in a flat list, Q query heads, H key-value heads, G = Q / H, E head size; R runs, T queries
and S keys of a bucket.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from policy.tree import Bucket

SCORES = 1 << 19  # of a backward pass at once: what a core's cache holds
ALIGNED = 16  # CUDA's masked kernels want rows of masks that are


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
        mask = torch.zeros(R, 1, T, 1, -(-S // ALIGNED) * ALIGNED, dtype=dtype, device=device)
        hidden = torch.arange(S, device=device) > positions[..., None]
        mask[..., :S].masked_fill_(hidden[:, None, :, None], -torch.inf)
        mask = mask.expand(-1, -1, -1, groups, -1).reshape(R, 1, T * groups, -1)[..., :S]
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


def _gradients(*tensors: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Of queries, keys and values, from (queries, keys, values, output, its gradient, mask), a few runs at a time."""
    if tensors[0].device.type != "cpu":  # the library's kernels, five launches for thirty; on CPUs they are slower
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=tensors[5], scale=scale)
        return torch.autograd.grad(out, (q, k, v), tensors[4])
    found: list[list[Tensor]] = [[], [], []]
    at_once = max(1, SCORES // (tensors[0][0, ..., 0].numel() * tensors[1].shape[2]))
    for q, k, v, out, g, mask in zip(*(x.split(at_once) for x in tensors), strict=True):
        exact = torch.promote_types(q.dtype, torch.float32)  # of scores; products are in the computation's dtype
        p = torch.matmul(q.to(exact) * scale, k.to(exact).transpose(2, 3)).add_(mask).softmax(-1)
        by_v = torch.matmul(p.to(g.dtype).transpose(2, 3), g)
        by_p = torch.matmul(g, v.transpose(2, 3)).to(exact)
        by_p -= torch.linalg.vecdot(g.to(exact), out.to(exact))[..., None]
        by_s = by_p.mul_(p).to(q.dtype)
        by_q, by_k = torch.matmul(by_s, k).mul_(scale), torch.matmul(by_s.transpose(2, 3), q).mul_(scale)
        for parts, part in zip(found, (by_q, by_k, by_v), strict=True):
            parts.append(part)
    return torch.cat(found[0]), torch.cat(found[1]), torch.cat(found[2])


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_NQE: Tensor, k_NHE: Tensor, v_NHE: Tensor, runs: list[PaddedRows], scale: float) -> Tensor:
        out_NQE = torch.empty_like(q_NQE, memory_format=torch.contiguous_format)
        for run in runs:
            q, k, v = _queries(q_NQE, run, k_NHE.shape[1]), _keys(k_NHE, run), _keys(v_NHE, run)
            _put_back(F.scaled_dot_product_attention(q, k, v, attn_mask=run.mask, scale=scale), run, out_NQE)
        ctx.save_for_backward(q_NQE, k_NHE, v_NHE, out_NQE)
        ctx.runs, ctx.scale = runs, scale
        return out_NQE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NQE, k_NHE, v_NHE, out_NQE = ctx.saved_tensors
        [g_NQE] = grads
        by_q, heads = torch.empty_like(q_NQE, memory_format=torch.contiguous_format), k_NHE.shape[1]
        total = torch.promote_types(k_NHE.dtype, torch.float32)  # one key may be in a thousand paths
        by_k, by_v = (k_NHE.new_zeros(len(k_NHE), k_NHE[0].numel(), dtype=total) for _ in range(2))
        for run in ctx.runs:
            q, g, out = (_queries(x, run, heads) for x in (q_NQE, g_NQE, out_NQE))
            grads = _gradients(q, _keys(k_NHE, run), _keys(v_NHE, run), out, g, run.mask, scale=ctx.scale)
            _put_back(grads[0], run, by_q)
            for by, x in zip((by_k, by_v), grads[1:], strict=True):
                by.index_add_(0, run.keys.flatten(), x.transpose(1, 2).reshape(-1, by.shape[1]).to(total))
        return by_q, by_k.view_as(k_NHE).to(k_NHE.dtype), by_v.view_as(v_NHE).to(v_NHE.dtype), None, None


def attend(q_NQE: Tensor, k_NHE: Tensor, v_NHE: Tensor, runs: list[PaddedRows], scale: float) -> Tensor:
    """Each query's mean of the values on its path, weighted by softmax(scale q k) (N, Q, E)."""
    return _Attend.apply(q_NQE, k_NHE, v_NHE, runs, scale)
