"""What the bare model costs on the rows that the program reads.

The program's passes are recorded (distinct rows: new tokens, cached tokens) and done again by the library's own forward
(and backward) pass without any adapter, as a plain user would: rows of similar length side by side, right-padded, keys
of what was read before in the library's cache. No sampling, no bookkeeping, no sharing of what rows have in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from benchmarks.common import Clock
from policy import network

PADDED = 4096  # tokens of a batch, padding included


@dataclass(frozen=True)
class Call:
    """One pass: of each distinct row (new tokens, cached tokens); ``tokens``: how many the program computed."""

    rows: tuple[tuple[int, int], ...]
    tokens: int
    grad: bool


@contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Collect the passes made inside."""
    calls: list[Call] = []
    grow = network.grow

    def recording(rows: Any, *args: Any) -> Any:
        tree = grow(rows, *args)
        sizes = tuple((len(row.ids), len(row.past)) for row in rows)
        calls.append(Call(sizes, len(tree.ids_N), torch.is_grad_enabled()))
        return tree

    with mock.patch.object(network, "grow", recording):
        yield calls


@contextmanager
def _without_adapters(trunk: Any) -> Iterator[None]:
    layers = [m for m in trunk.modules() if hasattr(m, "_disable_adapters")]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


def _cache(trunk: Any, rows: int, cached: int) -> Any:
    from transformers import DynamicCache

    if not cached:
        return None
    cache, config, weight = DynamicCache(), trunk.config, trunk.embed_tokens.weight
    shape = (1, config.num_key_value_heads, cached, network.head_size(config))
    for layer in range(config.num_hidden_layers):
        kv = torch.randn(shape, device=weight.device, dtype=weight.dtype).expand(rows, -1, -1, -1)
        cache.update(kv, kv, layer)
    return cache


def _batches(call: Call) -> Iterator[tuple[int, int, int]]:
    """Rows, their padded length, and cached tokens of each batch."""
    rows = sorted(call.rows, key=lambda row: (row[1], row[0]))
    while rows:
        count = 1
        while count < len(rows) and (count + 1) * max(n for n, _ in rows[: count + 1]) <= PADDED:
            count += 1
        yield count, max(n for n, _ in rows[:count]), round(sum(c for _, c in rows[:count]) / count)
        del rows[:count]


def bare(trunk: Any, call: Call, clock: Clock) -> None:
    """Do one call with the library's forward pass (and backward pass); time it as ``bare``."""
    for rows, length, cached in _batches(call):
        weight = trunk.embed_tokens.weight
        ids_BT = torch.randint(len(weight), (rows, length), device=weight.device)
        cache, inputs_BTD = _cache(trunk, rows, cached), weight.detach()[ids_BT].requires_grad_(call.grad)
        with torch.set_grad_enabled(call.grad), clock("bare"):
            past = {"past_key_values": cache, "use_cache": not call.grad}
            hidden_BTD = trunk(inputs_embeds=inputs_BTD, **past).last_hidden_state
            if call.grad:
                hidden_BTD[:, -1].sum().backward()


def bare_seconds(trunk: Any, calls: list[Call], cuda: bool) -> float:
    """Seconds of the bare model for all ``calls``."""
    clock = Clock(cuda)
    with _without_adapters(trunk):
        for call in calls:
            bare(trunk, call, clock)
    return clock.seconds.get("bare", 0.0)
