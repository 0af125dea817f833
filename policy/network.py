"""Forward passes: the model's layers run one by one (``run_trunk``), and the batching around them (``Reader``).

The layers are the library's own modules, called here so that a beginning that several rows share is computed once
(gradients included), cached keys can be extended, and the last layer runs only where its output is read.

Shapes: N tokens computed in a pass, U of them read, D hidden size, H heads, E head size.
"""

import gc
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from envs.types import Sequence
from policy import cpu_memory
from policy.attention import Runs, attend, prepare
from policy.cache import Kept, Store
from policy.layers import gated, norm, rotate
from policy.lora import linear, linears
from policy.tree import Cut, Ints, Row, Tree, grow, new_tokens

SHARED_PREFIX_MIN = 32  # tokens; a shorter system message costs less to read again than to keep
CUTS = Cut(128, 1.05, 1 << 14), Cut(256, 1.25, 1 << 19)  # on CPUs, and on GPUs, where a launch costs more
RESERVE = 2 << 30  # bytes of GPU memory kept free of activations: for the output layer, and for what is not foreseen
AGAIN: Any = {"use_reentrant": False, "preserve_rng_state": False}  # options of checkpoint(); no layer is random
ATTENDED = 16  # tokens attended to cost about as much as one token computed


class _Pass(NamedTuple):
    """What the layers of a pass share; ``reads_U`` is set for the last layer only."""

    cos_N1E: Tensor
    sin_N1E: Tensor
    runs: Runs
    reads_U: Tensor | None
    slots_N: Tensor


def _run_layer(layer: Any, h_ND: Tensor, common: _Pass, stored: tuple[Tensor, Tensor] | None) -> Tensor:
    """One decoder layer: keys and values of all tokens, everything else only where it is read.

    ``stored``: keys and values of this layer in the store, into which the new ones are written.
    """
    attn = layer.self_attn
    cos, sin, x_ND = common.cos_N1E, common.sin_N1E, norm(layer.input_layernorm, h_ND)
    if common.reads_U is None:
        q, k, v = linears((attn.q_proj, attn.k_proj, attn.v_proj), x_ND)
    else:
        k, v = linears((attn.k_proj, attn.v_proj), x_ND)
        h_ND, x_ND = h_ND[common.reads_U], x_ND[common.reads_U]
        q = linear(attn.q_proj, x_ND)
    q, k, v = (y.view(len(y), -1, attn.head_dim) for y in (q, k, v))
    if hasattr(attn, "q_norm"):
        q, k = norm(attn.q_norm, q), norm(attn.k_norm, k)
    k = rotate(k, cos, sin)
    q = rotate(q, cos, sin) if common.reads_U is None else rotate(q, cos[common.reads_U], sin[common.reads_U])
    if stored:
        for x, new in zip(stored, (k, v), strict=True):
            x.index_copy_(0, common.slots_N, new.detach())
    out = attend(q, k, v, common.runs, attn.scaling, stored).flatten(1)
    h_ND = h_ND + linear(attn.o_proj, out)
    return h_ND + linear(layer.mlp.down_proj, gated(layer.mlp, norm(layer.post_attention_layernorm, h_ND)))


def head_size(architecture: Any) -> int:
    """Numbers per attention head."""
    return getattr(architecture, "head_dim", None) or architecture.hidden_size // architecture.num_attention_heads


def activation_bytes(architecture: Any, targets: Collection[str], size: int) -> int:
    """Bytes that autograd keeps per token and layer of ``run_trunk``, for the backward pass with a frozen base.

    Kept are the inputs of both norms and their scales (fp32), the input of each group of linears that has an adapter
    (o_proj's is the attention's output), queries, keys, values and output of the attention, and in the MLP both
    branches, one of them before and after its activation. ``targets``: names of the linears with an adapter; ``size``:
    bytes per number.
    """
    h, f = architecture.hidden_size, architecture.intermediate_size
    heads, kv_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    q, k = heads * head_size(architecture), kv_heads * head_size(architecture)
    groups = {("q_proj", "k_proj", "v_proj"): h, ("gate_proj", "up_proj"): h, ("down_proj",): f}
    inputs = sum(width for names, width in groups.items() if set(names) & set(targets))
    normed = architecture.model_type == "qwen3"  # queries and keys are
    scales = 4 * (2 + heads + normed * (heads + kv_heads))  # and, on CPUs, each head's sum over the keys
    return scales + size * (2 * h + inputs + (2 + normed) * (q + k) + 3 * f)


def layers_kept(free: float, tokens: int, architecture: Any, layer: int, size: int) -> int:
    """How many layers can keep the activations of a pass in ``free`` bytes; ``layer``: ``activation_bytes``."""
    layers, entry = architecture.num_hidden_layers, architecture.hidden_size * size
    room = free - RESERVE - tokens * (layers * entry + 2 * layer)
    return min(max(int(room / (tokens * (layer - entry))), 0), layers)


def run_trunk(
    model: Any, tree: Tree, store: Store | None = None, recompute: int = 0, held: Kept | None = None
) -> Tensor:
    """Run a tree of tokens through the layers.

    Args:
        model: the trunk (``Qwen2Model``, ``Qwen3Model`` or ``LlamaModel``).
        tree: the tokens, and which of them are read.
        store: holds keys and values at the tree's slots, past and new ones; None: no past, none kept. The past are
            constants: gradients go through the new tokens alone.
        recompute: how many of the first layers keep only their input and are computed again in the backward pass.
        held: for gradients with a store: what holds the tree's slots; the graph keeps it until the backward pass.

    Returns:
        Normed hidden states of the tokens that are read (U, D), in the order of ``tree.reads_U``.
    """
    device, config = model.embed_tokens.weight.device, model.config
    if device.type == "cpu":
        cpu_memory.give_back()
    ids_N, positions_N, slots_N, reads_U = (torch.from_numpy(x).to(device) for x in tree[:4])
    h_ND = model.embed_tokens(ids_N)
    cos_NE, sin_NE = (x[0] for x in model.rotary_emb(h_ND[None], positions_N[None]))
    groups = config.num_attention_heads // config.num_key_value_heads
    new = tree.slots_N if store and torch.is_grad_enabled() else None
    full, last = (prepare(buckets, groups, h_ND.dtype, device, new, held) for buckets in (tree.full, tree.last))
    common = _Pass(cos_NE[:, None], sin_NE[:, None], full, None, slots_N)
    for i, layer in enumerate(model.layers):
        if i == len(model.layers) - 1:
            common = common._replace(runs=last, reads_U=reads_U)
        args = (layer, h_ND, common, store.layers[i] if store else None)
        h_ND = checkpoint(_run_layer, *args, **AGAIN) if i < recompute else _run_layer(*args)
    return norm(model.norm, h_ND)


def batches(rows: Seq[Row], budget: int) -> Iterator[slice]:
    """Split sorted rows into passes of at most ``budget`` tokens, counting ``ATTENDED`` attended ones as one token."""
    start = cost = 0
    for i, (row, (_, own)) in enumerate(zip(rows, new_tokens(rows), strict=True)):
        attention = (len(row.past) + len(row.ids)) // ATTENDED
        if i > start and cost + own + attention > budget:
            yield slice(start, i)
            start, cost, own = i, 0, len(row.ids)  # a new pass shares nothing with the one before
        cost += own + attention
    yield slice(start, len(rows))


class Read(NamedTuple):
    """Tokens to read; ``kv`` holds the first ones already, ``keep`` asks for the keys and values of all of them."""

    ids: Seq[int]
    kv: Kept | None
    keep: bool


class Reader:
    """Runs tokens through one model, as many at a time as ``tokens_per_batch`` allows.

    Rollouts ``read`` on after cached keys and values; updates read whole sequences (``hidden_at``), or go on from what
    rollouts have read (``hidden_after``). Where memory runs out in a pass without gradients, batches are halved and the
    rest is done again.
    ``layer_bytes``: ``activation_bytes`` where layers are computed again in the backward pass; 0: they are not.
    """

    def __init__(self, trunk: Any, device: torch.device, tokens_per_batch: int, layer_bytes: int) -> None:
        self.trunk, self.device, self._layer_bytes, self._longest_row = trunk, device, layer_bytes, 0
        self._kept = 0  # layers that kept their activations in the last pass although they could be computed again
        self.set_limits(tokens_per_batch)
        self.store = Store(trunk)

    def set_limits(self, tokens_per_batch: int) -> None:
        """Set the tokens per pass; all layers may keep their activations again, if there is memory."""
        self.tokens_per_batch, self._most_kept = tokens_per_batch, len(self.trunk.layers)

    def _recomputed(self, tokens: int) -> int:
        """How many layers of a pass are computed again in the backward pass; results do not depend on it.

        On a GPU as few as the free memory, including what torch's allocator has reserved, allows.
        """
        layers, self._kept = len(self.trunk.layers), 0
        if not self._layer_bytes or not torch.is_grad_enabled():
            return 0
        if self.device.type == "cuda":
            reserved = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            free, size = torch.cuda.mem_get_info(self.device)[0] + reserved, self.trunk.embed_tokens.weight.itemsize
            most = layers_kept(free, tokens, self.trunk.config, self._layer_bytes, size)
            self._kept = min(most, self._most_kept)
        return layers - self._kept

    def halve_batches(self) -> bool:
        """After memory ran out: halve the layers that keep activations, else ``tokens_per_batch``; False: it cannot."""
        if self._kept:
            self._most_kept, self._kept = self._kept // 2, 0
            return True
        if self.tokens_per_batch <= max(self._longest_row, 64):
            return False
        self.tokens_per_batch //= 2
        gc.collect()  # tensors in reference cycles
        return True

    # -- rollouts ------------------------------------------------------------------------------------------------

    def read(self, reads: list[Read]) -> tuple[Tensor, list[Any]]:
        """Hidden state after the last token of each read (N, D), and keys and values; equal reads are computed once."""
        rank: dict[int, int] = {}
        rows: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        own = [Row(r.ids[len(r.kv.path) :], r.kv.path) if r.kv else Row(r.ids) for r in reads]
        for n, (read, row) in enumerate(zip(reads, own, strict=True)):
            past = rank.setdefault(id(read.kv), len(rank))
            rows.setdefault((past, tuple(row.ids)), []).append(n)
        todo = [rows[key] for key in sorted(rows)]
        self._longest_row, self._kept = max(len(ids) + (len(past) + len(ids)) // ATTENDED for ids, past in own), 0
        results: list[Any] = [None] * len(reads)
        while todo:
            wanted = [reads[m[0]]._replace(keep=any(reads[n].keep for n in m)) for m in todo]
            new = [own[m[0]] for m in todo]
            batch = next(batches(new, self.tokens_per_batch))
            try:
                read_now = self.forward(wanted[batch], new[batch])
            except torch.OutOfMemoryError:
                if not self.halve_batches():
                    raise
                continue
            for members, result in zip(todo[batch], read_now, strict=True):
                for n in members:
                    results[n] = result
            del todo[batch]
        return torch.stack([hidden_D for hidden_D, _ in results]), [kv for _, kv in results]

    def forward(self, reads: list[Read], rows: list[Row]) -> list[tuple[Tensor, Kept | None]]:
        """``read`` for one batch of sorted ``rows``: the hidden state of each, and keys and values where asked for."""
        store = self.store if any(read.keep or read.kv for read in reads) else None
        ends = [[len(row.ids) - 1] for row in rows]
        tree = grow(rows, ends, store.take if store else None, CUTS[self.device.type != "cpu"])
        try:
            hidden_UD = run_trunk(self.trunk, tree, store)
            kvs = [Kept(store, path) if store and r.keep else None for r, path in zip(reads, tree.paths, strict=True)]
        finally:
            if store:
                store.hold(tree.slots_N, -1)
        at = np.searchsorted(tree.reads_U, [flat[-1] for flat in tree.flat])
        return list(zip(hidden_UD[torch.from_numpy(at).to(self.device)], kvs, strict=True))

    # -- updates -------------------------------------------------------------------------------------------------

    def micro_batches(self, sequences: Seq[Sequence]) -> list[list[int]]:
        """Split sequences into groups that fit ``tokens_per_batch``; those that begin alike lie together."""
        if not sequences:  # a minibatch may have fewer sequences than there are processes
            return []
        members: dict[tuple[int, ...], list[int]] = {}
        for i, sequence in enumerate(sequences):
            decision = sequence.decisions[-1]
            end = max([decision.start, *(p + 1 for p in decision.positions)])
            members.setdefault(tuple(sequence.ids[:end]), []).append(i)
        rows = [Row(ids) for ids in sorted(members)]
        self._longest_row = max(len(row.ids) for row in rows)
        return [
            [i for row in rows[part] for i in members[tuple(row.ids)]] for part in batches(rows, self.tokens_per_batch)
        ]

    def in_micro_batches(self, score: Callable[[list[Sequence]], Seq[Tensor]], sequences: Seq[Sequence]) -> list:
        """Score in micro-batches, restoring the decisions' order. Without gradients it retries when memory runs out."""
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
        """Hidden states of sequences at ``positions`` (their total number, D); shared beginnings are computed once."""
        ends = [tuple(s.ids[: max(at) + 1]) for s, at in zip(sequences, positions, strict=True)]
        index = {row: r for r, row in enumerate(sorted(set(ends)))}
        reads: list[list[int]] = [[] for _ in index]
        for row, at in zip(ends, positions, strict=True):
            reads[index[row]] += at
        rows = [Row(row) for row in index]
        tree = grow(rows, reads, None, CUTS[self.device.type != "cpu"])
        hidden_UD = run_trunk(self.trunk, tree, recompute=self._recomputed(len(tree.ids_N)))
        wanted = [tree.flat[index[row]][at] for row, at in zip(ends, positions, strict=True)]
        return hidden_UD[torch.from_numpy(np.searchsorted(tree.reads_U, np.concatenate(wanted))).to(self.device)]

    def hidden_after(self, rows: Seq[tuple[Ints, Seq[int]]]) -> Tensor:
        """Hidden states of all tokens of ``rows`` (their number, D), with gradients through these tokens alone.

        A row holds the slots of what comes before it, and its ids; equal rows are computed once.
        """
        pasts = {int(past[-1]): past for past, _ in rows}  # paths of a tree: the last slot tells them apart
        index = {key: r for r, key in enumerate(sorted({(int(past[-1]), tuple(ids)) for past, ids in rows}))}
        unlike = [Row(ids, pasts[last]) for last, ids in index]
        cut = CUTS[self.device.type != "cpu"]
        tree = grow(unlike, [range(len(row.ids)) for row in unlike], self.store.take, cut)
        held = Kept(self.store, tree.slots_N)
        self.store.hold(tree.slots_N, -1)
        hidden_ND = run_trunk(self.trunk, tree, self.store, self._recomputed(len(tree.ids_N)), held)
        at = np.concatenate([tree.flat[index[int(past[-1]), tuple(ids)]] for past, ids in rows])
        return hidden_ND[torch.from_numpy(at).to(self.device)]
