"""What the bare model costs on the tokens that the program has to compute.

The program's forward passes are recorded (rows, tokens without padding, cached tokens) and done again with the
library's own forward pass and random ids: no padding, no sampling, no bookkeeping, no Python around it. Where the
program saves (equal rows and shared prefixes once) the limit saves too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import network
from benchmarks.common import Clock


@dataclass(frozen=True)
class Call:
    """One forward pass: ``rows`` rows, ``tokens`` real tokens in all, ``cached`` tokens a row may attend to."""

    rows: int
    tokens: int
    cached: int
    reads: int  # positions read per row
    grad: bool


@contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Collect the forward passes made inside."""
    calls: list[Call] = []
    run_trunk = network.run_trunk

    def recording(model: Any, ids_BT: Any, at_BK: Any, past: Any = None, past_lens: Any = None, **options: Any) -> Any:
        rows, length = ids_BT.shape
        tokens = length if rows == 1 else int((at_BK.max(1).values + 1).sum())  # nothing after the last read is needed
        cached = past[0][0].shape[2] if past else 0
        if past_lens is not None:
            cached = round(sum(past_lens) / len(past_lens))
        calls.append(Call(rows, tokens, cached, at_BK.shape[1], torch.is_grad_enabled()))
        return run_trunk(model, ids_BT, at_BK, past, past_lens, **options)

    with mock.patch.object(network, "run_trunk", recording):
        yield calls


def _cache(trunk: Any, rows: int, cached: int) -> Any:
    from transformers import DynamicCache

    cache, config, weight = DynamicCache(), trunk.config, trunk.embed_tokens.weight
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, cached, head)
    for layer in range(config.num_hidden_layers if cached else 0):
        kv = torch.randn(shape, device=weight.device, dtype=weight.dtype).expand(rows, -1, -1, -1)
        cache.update(kv, kv, layer)
    return cache


def bare(trunk: Any, call: Call, clock: Clock) -> None:
    """Do one call with the library's forward pass (and backward pass); time it as ``bare``."""
    length = -(-call.tokens // call.rows)
    ids_BT = torch.randint(trunk.config.vocab_size, (call.rows, length), device=trunk.embed_tokens.weight.device)
    cache = _cache(trunk, call.rows, call.cached)
    with torch.set_grad_enabled(call.grad), clock("bare"):
        hidden_BTD = trunk(input_ids=ids_BT, past_key_values=cache, use_cache=True).last_hidden_state
        if call.grad:
            hidden_BTD[:, -call.reads :].sum().backward()


def bare_seconds(trunk: Any, calls: list[Call], cuda: bool) -> float:
    """Seconds of the bare model for all ``calls``, gradients thrown away."""
    clock = Clock(cuda)
    for call in calls:
        bare(trunk, call, clock)
        for parameter in trunk.parameters():
            parameter.grad = None
    return clock.seconds.get("bare", 0.0)
