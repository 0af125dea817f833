"""Attention over a tree of tokens: bucket by bucket, keys gathered along each run's path, gradients summed in fp32.

Shapes: N queries or keys in a flat list, Q query heads, H key-value heads, G = Q / H, E head size; R runs, T queries
and S keys of a bucket, K of which have gradients.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from policy.tree import Bucket, Ints

aten = torch.ops.aten

# cuDNN's kernel, torch's first choice on sm90, builds a graph for each new shape. With a mask and 64 keys more than a
# multiple of 128 it has returned NaN as the gradient of the queries (pytorch/pytorch#196678).
torch.backends.cuda.enable_cudnn_sdp(False)

if os.environ.get("CUBLAS_WORKSPACE_CONFIG") != ":16:8":  # for ``in_fixed_order``; read at the first product
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


@contextmanager
def in_fixed_order(device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms on a GPU: gradients, and so the weights of a resumed run, are the same to the bit.

    Otherwise attention and ``index_add`` sum in the order in which blocks happen to finish. Not for sampling, whose
    cumulative sums have no deterministic kernel. On a CPU the order is fixed anyway. Source:
    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    if device.type != "cuda":
        yield
        return
    switch: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), switch.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    switch.fill_uninitialized_memory = False  # it costs a launch for each new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        switch.fill_uninitialized_memory = before[1]


class PaddedRows(NamedTuple):
    """A bucket on the device of the model; ``mask`` (R, 1, T G, S) is added to the scores."""

    queries: Tensor  # (R T) index of the query in each place; 0 in empty places
    empty: Tensor | None  # (R T, 1, 1) mask of empty places; None: there are none
    keys: Tensor
    mask: Tensor
    shape: tuple[int, int]  # R, T
    own_3K: Tensor | None = None  # run, place and token of the keys that have gradients; None: all have, or none


class Runs(NamedTuple):
    """The buckets of a pass, and each query's place (N) in their concatenation."""

    buckets: list[PaddedRows]
    places_N: Tensor
    held: Any = None  # what keeps the keys of the pass where they are stored, until the backward pass


def prepare(
    buckets: list[Bucket], groups: int, dtype: torch.dtype, device: torch.device, slots_N: Ints | None, held: Any
) -> Runs:
    """Buckets as tensors, with their masks.

    ``slots_N``: the slots of the tokens of the pass, if their keys alone have gradients.
    """
    rows, places_N = [], np.empty(sum(len(bucket.queries) for bucket in buckets), np.int64)
    start = 0
    for bucket in buckets:
        (R, T), S = bucket.positions.shape, bucket.keys.shape[1]
        queries, empty = np.zeros(R * T, np.int64), np.ones(R * T, bool)
        queries[bucket.places], empty[bucket.places] = bucket.queries, False
        places_N[bucket.queries], start = start + bucket.places, start + R * T
        queries_, positions, keys = (torch.from_numpy(x).to(device) for x in (queries, bucket.positions, bucket.keys))
        blanks = torch.from_numpy(empty)[:, None, None].to(device) if empty.any() else None
        future = torch.arange(S, device=device) > positions[..., None]
        mask = torch.zeros(R, 1, T, 1, S, dtype=dtype, device=device).masked_fill_(future[:, None, :, None], -torch.inf)
        mask = mask.expand(-1, -1, -1, groups, -1).reshape(R, 1, T * groups, S)
        own_3K = None if slots_N is None else torch.from_numpy(_own(bucket.keys, slots_N)).to(device)
        rows.append(PaddedRows(queries_, blanks, keys, mask, (R, T), own_3K))
    return Runs(rows, torch.from_numpy(places_N).to(device), held)


def _own(keys_RS: Ints, slots_N: Ints) -> Ints:
    """Which of the keys lie in ``slots_N``: their runs, their places, and which of the slots it is (3, K)."""
    number = np.full(max(keys_RS.max(), slots_N.max()) + 1, -1)
    number[slots_N] = np.arange(len(slots_N))
    run_K, place_K = np.nonzero(number[keys_RS] >= 0)
    return np.stack((run_K, place_K, number[keys_RS[run_K, place_K]]))


def _queries(x_NQE: Tensor, run: PaddedRows, heads: int, blank: bool = False) -> Tensor:
    """(R, H, T G, E): query heads of one key-value head become further queries, so keys need not be repeated.

    ``blank``: fill empty places with zeros.
    """
    (R, T), (_, Q, E) = run.shape, x_NQE.shape
    x = x_NQE.index_select(0, run.queries)
    if blank and run.empty is not None:
        x.masked_fill_(run.empty, 0)
    return x.view(R, T, heads, Q // heads, E).transpose(1, 2).reshape(R, heads, T * (Q // heads), E)


def _put_back(parts_RHGE: list[Tensor], runs: Runs, like_NQE: Tensor) -> Tensor:
    """The inverse of ``_queries``, over all buckets (N, Q, E)."""
    flat, (_, Q, E) = [], like_NQE.shape
    for x, run in zip(parts_RHGE, runs.buckets, strict=True):
        (R, T), heads = run.shape, x.shape[1]
        flat.append(x.reshape(R, heads, T, Q // heads, E).transpose(1, 2).reshape(R * T, Q, E))
    return (torch.cat(flat) if len(flat) > 1 else flat[0]).index_select(0, runs.places_N).to(like_NQE.dtype)


def _keys(x_NHE: Tensor, run: PaddedRows) -> Tensor:
    """(R, H, S, E)."""
    R, S = run.keys.shape
    return x_NHE.index_select(0, run.keys.flatten()).view(R, S, *x_NHE.shape[1:]).transpose(1, 2)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output, and on CPUs each query's log-sum-exp, for the backward pass."""
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale), q.new_empty(0)


def _backward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, mask: Tensor, scale: float, *o: Tensor) -> Any:
    """Gradients of queries, keys and values, from that of the output; ``o``: on CPUs, the output itself."""
    if o:  # and the log-sum-exps, which autograd would compute once more
        # Not in bf16: each head's products there cost 0.3 ms before they begin, up to twice the time.
        g, q, k, v, out, mask = (x.float() for x in (g, q, k, v, *o, mask))
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=scale
        )
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return torch.autograd.grad(out, (q, k, v), g)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_NQE: Tensor, k_NHE: Tensor, v_NHE: Tensor, runs: Runs, scale: float, stored: Any) -> Tensor:
        outs, sums = [], []
        all_k, all_v = stored or (k_NHE, v_NHE)
        for run in runs.buckets:
            q, k, v = _queries(q_NQE, run, k_NHE.shape[1]), _keys(all_k, run), _keys(all_v, run)
            out, lse = _forward(q, k, v, run.mask, scale)
            outs.append(out)
            sums.append(lse)
        out_NQE = _put_back(outs, runs, q_NQE)
        ctx.save_for_backward(q_NQE, k_NHE, v_NHE, out_NQE, *sums)
        ctx.runs, ctx.scale, ctx.stored = runs, scale, stored
        return out_NQE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [g_NQE], (q_NQE, k_NHE, v_NHE, out_NQE, *sums) = grads, ctx.saved_tensors
        by_q, heads = list[Tensor](), k_NHE.shape[1]
        all_k, all_v = ctx.stored or (k_NHE, v_NHE)
        total = torch.promote_types(k_NHE.dtype, torch.float32)  # one key may be on a thousand paths
        by_kv = k_NHE.new_zeros(len(k_NHE), 2 * k_NHE[0].numel(), dtype=total)  # one sum: 13 launches in a fixed order
        for run, lse in zip(ctx.runs.buckets, sums, strict=True):
            read = (q_NQE, g_NQE, out_NQE) if len(lse) else (q_NQE, g_NQE)  # a GPU computes the output again
            q, g, *o = (_queries(x, run, heads, blank=x is g_NQE) for x in read)
            grads = _backward(q, _keys(all_k, run), _keys(all_v, run), g, lse, run.mask, ctx.scale, *o)
            by_q.append(grads[0])
            to, both = run.keys.flatten(), [x.transpose(1, 2) for x in grads[1:]]  # (R, S, H, E)
            if run.own_3K is not None:  # the others are constants
                *where, to = run.own_3K
                both = [x[*where] for x in both]
            by_kv.index_add_(0, to, torch.stack(both, -3).view(-1, by_kv.shape[1]).to(total))
        by_k, by_v = (x.view_as(k_NHE).to(k_NHE.dtype) for x in by_kv.chunk(2, 1))
        by_q_NQE = _put_back(by_q, ctx.runs, q_NQE)
        if ctx.stored:  # let go with what autograd saved: the graph may live on while the store grows
            ctx.stored = ctx.runs = None
        return by_q_NQE, by_k, by_v, None, None, None


def attend(
    q_NQE: Tensor, k_NHE: Tensor, v_NHE: Tensor, runs: Runs, scale: float, stored: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Attention of each query to the keys on its path, with scores softmax(scale q k) (N, Q, E).

    ``stored``: keys and values by slot, those of ``k`` and ``v`` among them; gradients go to ``k`` and ``v`` alone.
    """
    return _Attend.apply(q_NQE, k_NHE, v_NHE, runs, scale, stored)
