"""Tokens through the layers: the trunk of a Qwen model run layer by layer, and what is read with it, in batches.

The layers are the library's own modules, run one by one here so that cached keys, prefixes shared by many rows
(gradients included) and "the last layer only where it is read" need no patching of the library.

Shapes: B rows, T tokens, K read positions per row, P cached tokens, S keys attended to, L layers, H key-value heads,
E head size, D hidden size, N reads.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cache import Kept, SideBySide
from env_wrapper import Sequence
from fused import gated, linear, linears, norm

SHARED_PREFIX_MIN = 32  # tokens; a shorter system message costs less to recompute than to share
SLICE = 64  # queries at a time, of causal attention on the CPU
PREFIX_COST = 8  # in updates a row that attends to so many shared tokens takes the memory of one token of its own

Cache = list[tuple[Tensor, Tensor]]  # per layer: keys and values (B, kv heads, P, head size), rotated


def _rotate(x_BHTE: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    half = x_BHTE.shape[-1] // 2
    turned = torch.cat((-x_BHTE[..., half:], x_BHTE[..., :half]), dim=-1)
    return x_BHTE * cos_BTE[:, None] + turned * sin_BTE[:, None]


def _gather(x_BTD: Tensor, at_BK: Tensor) -> Tensor:
    return x_BTD.expand(len(at_BK), -1, -1).gather(1, at_BK[..., None].expand(-1, -1, x_BTD.shape[-1]))


@functools.lru_cache(maxsize=1)  # the layers of a pass share it, and keep it once for the backward pass
def _slice_mask(tokens: int, queries: int, dtype: torch.dtype) -> Tensor:
    """Its columns from ``tokens - start`` on are the mask of the ``queries`` tokens from ``start`` on."""
    return _mask(torch.arange(queries)[None] + tokens, tokens, tokens + queries, dtype)


def _attend(q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention to what ``mask`` allows; without one, each token to those up to itself."""
    groups, T = q_BHTE.shape[1] // k_BHSE.shape[1], q_BHTE.shape[2]
    if mask is None and not q_BHTE.is_cuda and T > SLICE:
        # The CPU's kernel works in blocks of up to 256 x 512, half of which lie in the future; slices waste less.
        mask, parts = _slice_mask(T, SLICE, q_BHTE.dtype), []
        for start in range(0, T, SLICE):
            end = min(start + SLICE, T)
            part = mask[..., : end - start, T - start : T - start + end]
            parts.append(_attend(q_BHTE[:, :, start:end], k_BHSE[:, :, :end], v_BHSE[:, :, :end], part, scale))
        return torch.cat(parts, 2)
    if mask is not None and q_BHTE.is_cuda:  # CUDA's masked kernels do not broadcast grouped heads
        k_BHSE, v_BHSE = (t.repeat_interleave(groups, 1) for t in (k_BHSE, v_BHSE))
    return F.scaled_dot_product_attention(
        q_BHTE, k_BHSE, v_BHSE, attn_mask=mask, is_causal=mask is None, scale=scale,
        enable_gqa=k_BHSE.shape[1] != q_BHTE.shape[1],
    )  # fmt: skip


def _run_layer(layer: Any, h_BTD: Tensor, rope: Any, past: Any, mask: Any, at_BK: Tensor | None, to_BT: Any = None):
    """One decoder layer. With ``at_BK`` keys and values are made for all T tokens, everything else only there.

    ``to_BT``: where the new keys and values are written into ``past``, in place.
    """
    attn = layer.self_attn
    x = norm(layer.input_layernorm, h_BTD)
    cos, sin = rope
    if at_BK is None:
        q, k, v = linears((attn.q_proj, attn.k_proj, attn.v_proj), x)
    else:
        k, v = linears((attn.k_proj, attn.v_proj), x)
    k, v = (y.view(*x.shape[:2], -1, attn.head_dim) for y in (k, v))
    k = _rotate((attn.k_norm(k) if hasattr(attn, "k_norm") else k).transpose(1, 2), cos, sin)
    v = v.transpose(1, 2).contiguous()  # not a view that keeps queries and keys in memory
    if at_BK is not None:
        h_BTD, x, cos, sin = _gather(h_BTD, at_BK), _gather(x, at_BK), _gather(cos, at_BK), _gather(sin, at_BK)
        q = linear(attn.q_proj, x)
    q = q.view(*x.shape[:2], -1, attn.head_dim)
    q = _rotate((attn.q_norm(q) if hasattr(attn, "q_norm") else q).transpose(1, 2), cos, sin)
    if to_BT is not None:
        rows_B1 = torch.arange(len(to_BT), device=to_BT.device)[:, None]
        for held, new in zip(past, (k, v), strict=True):
            held[rows_B1, :, to_BT] = new.transpose(1, 2)
        keys, values = past
    else:
        keys, values = (k, v) if past is None else (torch.cat((past[0], k), 2), torch.cat((past[1], v), 2))
    out_BHTE = _attend(q, keys, values, mask, attn.scaling)
    h = h_BTD + linear(attn.o_proj, out_BHTE.transpose(1, 2).reshape(*x.shape[:2], -1))
    x = gated(layer.mlp, norm(layer.post_attention_layernorm, h))
    return h + linear(layer.mlp.down_proj, x), k, v


def _mask(where_BT: Tensor, seen: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """What tokens at ``where_BT`` attend to, of ``tokens`` in a row: those up to themselves. Added to the scores.

    ``seen``: how many come before all of them. Comparing those too would cost more than attending to them.
    """
    mask_BTS = torch.zeros(*where_BT.shape, tokens, dtype=dtype, device=where_BT.device)
    later_BTS = torch.arange(seen, tokens, device=where_BT.device) > where_BT[..., None]
    mask_BTS[..., seen:].masked_fill_(later_BTS, -torch.inf)
    return mask_BTS[:, None]


def run_trunk(
    model: Any,
    ids_BT: Tensor,
    at_BK: Tensor,
    past: Cache | None = None,
    past_lens: Seq[int] | None = None,
    recompute: bool = False,
    keep: bool = True,
) -> tuple[Tensor, Cache]:
    """Run right-padded tokens through the layers and read hidden states at ``at_BK``.

    Args:
        model: the trunk (``Qwen2Model`` or ``Qwen3Model``).
        ids_BT: token ids; padding on the right may hold any id.
        at_BK: positions in ``ids_BT`` to read.
        past: keys and values of the P tokens that came before; with ``past_lens`` that many of each row did, the
            new ones are written behind them, in place, and there must be room.
        past_lens: see ``past``.
        recompute: gradient checkpointing, a layer at a time.
        keep: whether keys and values are wanted.

    Returns:
        Normed hidden states (B, K, D), and keys and values of the T new tokens (empty without ``keep``).
    """
    P = past[0][0].shape[2] if past else 0
    where_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None] + (P if past_lens is None else 0)
    if past_lens is not None:
        where_BT = where_BT + torch.tensor(past_lens, device=ids_BT.device)[:, None]
    h = model.embed_tokens(ids_BT)
    rope = model.rotary_emb(h, where_BT)
    seen, tokens = (P, P + ids_BT.shape[1]) if past_lens is None else (min(past_lens), P)
    mask = _mask(where_BT, seen, tokens, h.dtype) if past else None
    read_at_BK = where_BT.expand(len(ids_BT), -1).gather(1, at_BK.expand(len(ids_BT), -1))
    last_mask = _mask(read_at_BK, seen, tokens, h.dtype)
    to_BT = None if past_lens is None else where_BT
    cache: Cache = []
    for i, layer in enumerate(model.layers):
        last = i == len(model.layers) - 1
        read = (last_mask, at_BK) if last else (mask, None)
        args = (layer, h, rope, past[i] if past else None, *read, to_BT)
        h, k, v = checkpoint(_run_layer, *args, use_reentrant=False) if recompute else _run_layer(*args)
        if keep:
            cache.append((k, v))
    return norm(model.norm, h), cache


def _pad(rows: Seq[Seq[int]], device: torch.device) -> Tensor:
    """Right-pad lists of ints to a (B, T) tensor."""
    out = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return torch.from_numpy(out).to(device)


def _first_batch(costs: Iterable[int], budget: int) -> int:
    """How many rows, from the first on, stay within ``budget`` tokens when padded; at least one."""
    longest = count = 0
    for cost in costs:
        longest = max(longest, cost)
        if count and longest * (count + 1) > budget:
            break
        count += 1
    return count


def _size(read: Read) -> tuple[int, int]:
    return len(read.ids) - read.cached, len(read.ids)


def _expand(cache: Cache, rows: int) -> Cache:
    """Keys and values of one row as those of many, without a copy."""
    return [(k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)) for k, v in cache]


def shared_tokens(sequence: Sequence) -> int:
    """Length of the prefix that is worth reading once for all sequences that have it."""
    return sequence.shared if sequence.shared >= SHARED_PREFIX_MIN else 0


class Read(NamedTuple):
    """Tokens to read, of which the first have keys and values ``kv``; ``keep``: those of the others are wanted."""

    ids: Seq[int]
    kv: Kept | None
    keep: bool

    @property
    def cached(self) -> int:
        """How many tokens need not be read again."""
        return 0 if self.kv is None else self.kv.length


class Reader:
    """Reads rows of tokens with one model, as many at a time as ``tokens_per_batch`` allows.

    Rollouts ``read`` what comes next after cached keys and values; updates read whole sequences, ``hidden_at``.
    Where memory runs out and nothing is lost by it, batches are halved and what is missing is done again.
    """

    def __init__(self, trunk: Any, device: torch.device, tokens_per_batch: int, recompute: bool) -> None:
        self.trunk, self.device = trunk, device
        self.tokens_per_batch = tokens_per_batch
        self._recompute, self._longest_row = recompute, 0
        self._beside: SideBySide | None = None  # the last batch of conversations that go on

    def halve_batches(self) -> bool:
        """Halve ``tokens_per_batch`` after memory ran out; False where a batch was a single row already."""
        if self.tokens_per_batch <= max(self._longest_row, 64):
            return False
        self.tokens_per_batch //= 2
        gc.collect()  # what cycles still hold
        return True

    # -- rollouts ------------------------------------------------------------------------------------------------

    def read(self, reads: list[Read]) -> tuple[Tensor, list[Any]]:
        """Hidden state after the last token of each read (N, D), and keys and values; equal reads happen once."""
        rows: dict[tuple, list[int]] = {}
        for n, read in enumerate(reads):
            rows.setdefault((id(read.kv), tuple(read.ids[read.cached :])), []).append(n)
        todo = sorted(rows.values(), key=lambda members: _size(reads[members[0]]))
        self._longest_row = max(len(read.ids) for read in reads)
        results: list[Any] = [None] * len(reads)
        while todo:
            count = _first_batch((len(reads[members[0]].ids) for members in todo), self.tokens_per_batch)
            batch = [reads[m[0]]._replace(keep=any(reads[n].keep for n in m)) for m in todo[:count]]
            try:
                read_now = self.forward(batch)
            except torch.OutOfMemoryError:
                if not self.halve_batches():
                    raise
                continue
            for members, result in zip(todo[:count], read_now, strict=True):
                for n in members:
                    results[n] = result
            del todo[:count]
        return torch.stack([hidden_D for hidden_D, _ in results]), [kv for _, kv in results]

    def forward(self, reads: list[Read]) -> list[tuple[Tensor, Kept | None]]:
        """``read`` for one batch: hidden state, and keys and values where wanted, of each."""
        kvs = [read.kv for read in reads]
        if all(kv is kvs[0] for kv in kvs) and (len(kvs) > 1 or kvs[0] is None):  # nothing, or a prefix that all share
            return self._forward(reads, _expand(kvs[0].layers, len(reads)) if kvs[0] else None, None)
        beside, order = self._beside, self._beside.order_of(kvs) if self._beside else None
        if beside is None or order is None:
            beside = self._beside = None  # its memory first
            beside, order = SideBySide(kvs), list(range(len(kvs)))
        rows = [reads[n] for n in np.argsort(order)]
        past = beside.layers(max(len(read.ids) - read.cached for read in reads))
        results = self._forward(rows, past, beside.lengths)
        beside.rows = [kv for _, kv in results]
        self._beside = None if None in beside.rows else beside  # who is not kept is not read with the others again
        return [results[b] for b in order]

    def _forward(self, reads: list[Read], past: Cache | None, past_lens: Seq[int] | None) -> list:
        new = [read.ids[read.cached :] for read in reads]
        at_BK = torch.tensor([[len(ids) - 1] for ids in new], device=self.device)
        keep = any(read.keep for read in reads)
        read_BKD, cache = run_trunk(self.trunk, _pad(new, self.device), at_BK, past, past_lens, keep=keep)
        kvs: list[Kept | None] = [None] * len(reads)
        if keep:
            kv_BXHTE = torch.stack([x for pair in cache for x in pair], 1)
            for b, read in enumerate(reads):
                if read.keep:
                    kv = kv_BXHTE[b, :, :, : len(new[b])]
                    kvs[b] = read.kv.extended(kv) if read.kv else Kept(kv.clone())
        return list(zip(read_BKD[:, 0], kvs, strict=True))

    # -- updates -------------------------------------------------------------------------------------------------

    def micro_batches(self, sequences: Seq[Sequence]) -> list[list[int]]:
        """Split sequences into groups of similar length that share a prefix and fit ``tokens_per_batch``."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for i, sequence in enumerate(sequences):
            decision = sequence.decisions[-1]
            rows.setdefault(
                tuple(sequence.ids[: max([decision.start, *(p + 1 for p in decision.positions)])]), []
            ).append(i)
        groups: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        for row, members in rows.items():
            shared = shared_tokens(sequences[members[0]])
            groups.setdefault(row[:shared], []).append((len(row) - shared + shared // PREFIX_COST, members))
        self._longest_row = max(cost for group in groups.values() for cost, _ in group)
        batches = []
        for group in groups.values():
            group.sort(key=lambda row: row[0])
            while group:
                count = _first_batch((cost for cost, _ in group), self.tokens_per_batch)
                batches.append([i for _, members in group[:count] for i in members])
                del group[:count]
        return batches

    def in_micro_batches(self, score: Callable[[list[Sequence]], tuple[Tensor, ...]], sequences: Seq[Sequence]) -> list:
        """Score in micro-batches and put the decisions back in order; without gradients it survives lack of memory."""
        parts, order, todo = [], [], list(range(len(sequences)))
        while todo:
            try:
                for members in self.micro_batches([sequences[i] for i in todo]):
                    parts.append(score([sequences[todo[j]] for j in members]))
                    order += [todo[j] for j in members]
            except torch.OutOfMemoryError:
                if torch.is_grad_enabled() or not self.halve_batches():
                    raise
            todo = sorted({*todo} - {*order})
        first = np.cumsum([0] + [len(s.decisions) for s in sequences])
        decisions = np.concatenate([np.arange(first[i], first[i + 1]) for i in order])
        back = torch.from_numpy(np.argsort(decisions)).to(self.device)
        return [torch.cat(column)[back] for column in zip(*parts, strict=True)]

    def hidden_at(self, sequences: list[Sequence], positions: list[list[int]]) -> Tensor:
        """Hidden states (sum of positions, D) of sequences with one prefix; equal rows and the prefix once."""
        rows: dict[tuple[int, ...], tuple[int, dict[int, int]]] = {}
        picks = []
        for sequence, at in zip(sequences, positions, strict=True):
            row = tuple(sequence.ids[: max(at) + 1])  # nothing after the last position matters
            b, place = rows.setdefault(row, (len(rows), {}))
            picks += [(b, place.setdefault(p, len(place))) for p in at]
        recompute = self._recompute and torch.is_grad_enabled()
        shared = shared_tokens(sequences[0]) if len(rows) > 1 else 0
        past = None
        if shared:
            ids_BT = torch.tensor([sequences[0].ids[:shared]], device=self.device)
            _, cache = run_trunk(self.trunk, ids_BT, torch.zeros_like(ids_BT[:, :1]), recompute=recompute)
            past = _expand(cache, len(rows))
        ids_BT = _pad([row[shared:] for row in rows], self.device)
        at_BK = _pad([[p - shared for p in place] for _, place in rows.values()], self.device)
        read_BKD, _ = run_trunk(self.trunk, ids_BT, at_BK, past, recompute=recompute, keep=False)
        b_N, k_N = torch.tensor(picks, device=self.device).T
        return read_BKD[b_N, k_N]
