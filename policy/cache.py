"""Keys and values of all conversations in one store; a conversation is a list of its tokens' slots in it.

Shapes: C slots, H key-value heads, E head size.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from policy.tree import Ints


class Store:
    """Keys and values of each layer, (C, H, E) each; slots are counted references, reused once nobody holds them."""

    def __init__(self, trunk: Any) -> None:
        self._weight, attn = trunk.embed_tokens.weight, trunk.layers[0].self_attn
        self._shape = trunk.config.num_key_value_heads, attn.head_dim
        self.layers = [(self._room(0), self._room(0)) for _ in trunk.layers]
        self._holders = np.zeros(0, dtype=np.int32)  # reference count of each slot

    def _room(self, slots: int) -> Tensor:
        return self._weight.new_zeros(slots, *self._shape)

    def take(self, tokens: int) -> Ints:
        """Allocate slots, held once by the caller; nothing is allocated where memory runs out."""
        free = np.flatnonzero(self._holders == 0)
        if len(free) < tokens:
            needed = len(self._holders) + tokens - len(free)
            try:
                self._grow(needed + len(self._holders) // 4)
            except torch.OutOfMemoryError:
                self._grow(needed)
            free = np.flatnonzero(self._holders == 0)
        slots = free[:tokens]
        self._holders[slots] = 1
        return slots

    def _grow(self, room: int) -> None:
        for i, pair in enumerate(self.layers):  # one layer at a time, which is in memory twice meanwhile
            if (more := room - len(pair[0])) > 0:  # else it had grown before memory ran out
                self.layers[i] = tuple(torch.cat((x, self._room(more))) for x in pair)  # type: ignore[assignment]
        self._holders = np.concatenate((self._holders, np.zeros(room - len(self._holders), np.int32)))

    def empty(self) -> None:
        """Free the memory where nobody holds a slot."""
        if not self.held:
            self.layers = [(self._room(0), self._room(0)) for _ in self.layers]
            self._holders = self._holders[:0]  # else ``take`` would grow to the former size at once

    def hold(self, path: Ints, by: int) -> None:
        """Add ``by`` (1 or -1) to the reference counts of slots."""
        self._holders[path] += by

    @property
    def held(self) -> int:
        """Slots in use."""
        return int((self._holders > 0).sum())


class Kept:
    """Slots of a conversation's first tokens, or of an update's, which never change; freed with the last holder."""

    def __init__(self, store: Store, path: Ints) -> None:
        self._store, self.path = store, path
        store.hold(path, 1)

    def __del__(self) -> None:
        self._store.hold(self.path, -1)
