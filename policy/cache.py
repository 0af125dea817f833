"""Keys and values of all conversations in one store; a conversation is the list of its tokens' places in it.

Shapes: C slots, H key-value heads, E head size.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from policy.tree import Ints


class Store:
    """Keys and values of each layer, (C, H, E) twice; a slot is used again once nobody holds it."""

    def __init__(self, trunk: Any) -> None:
        self._weight, attn = trunk.embed_tokens.weight, trunk.layers[0].self_attn
        self._shape = trunk.config.num_key_value_heads, attn.head_dim
        self.layers = [(self._room(0), self._room(0)) for _ in trunk.layers]
        self._holders = np.zeros(0, dtype=np.int32)  # of each slot

    def _room(self, slots: int) -> Tensor:
        return self._weight.new_zeros(slots, *self._shape)

    def take(self, tokens: int) -> Ints:
        """So many slots, held once by the caller. Where memory runs out nothing is taken."""
        free = np.flatnonzero(self._holders == 0)
        if len(free) < tokens or len(self.layers[-1][0]) < len(self._holders):
            short = max(tokens - len(free), 0)
            least = len(self._holders) + short
            try:
                self._grow(least + (len(self._holders) // 4 if short else 0))
            except torch.OutOfMemoryError:
                self._grow(least)
            free = np.flatnonzero(self._holders == 0)
        slots = free[:tokens]
        self._holders[slots] = 1
        return slots

    def _grow(self, room: int) -> None:
        for i, pair in enumerate(self.layers):  # one layer at a time is held twice
            if (more := room - len(pair[0])) > 0:  # else it had grown when memory ran out
                self.layers[i] = tuple(torch.cat((x, self._room(more))) for x in pair)  # type: ignore[assignment]
        self._holders = np.concatenate((self._holders, np.zeros(room - len(self._holders), np.int32)))

    def empty(self) -> None:
        """Give the memory back, where nobody holds anything."""
        if not self.held:
            self.layers = [(self._room(0), self._room(0)) for _ in self.layers]
            self._holders = self._holders[:0]  # else the next to take any would get as many as there ever were

    def hold(self, path: Ints, by: int) -> None:
        """Count one holder more (``by`` 1) or less (-1)."""
        self._holders[path] += by

    @property
    def held(self) -> int:
        """Slots in use."""
        return int((self._holders > 0).sum())


class Kept:
    """A conversation's first tokens. They never change: any number may go on from them; forgotten with the last."""

    def __init__(self, store: Store, path: Ints) -> None:
        self._store, self.path = store, path
        store.hold(path, 1)

    def __del__(self) -> None:
        self._store.hold(self.path, -1)
