"""A cache of the hidden states below the first adapted layer: no update changes them, so they are computed once.

The rollout fills it, and every later pass over the same tokens starts at the first layer that has an adapter.

Shapes: N tokens of a pass, D hidden size, C tokens there is room for.
"""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policy.tree import Ints, Row, Tree

NOWHERE = -1  # the place of a token whose hidden state is not held


class LowerLayers:
    """Inputs of layer ``count``, one for each node of the prefix tree of all tokens read.

    The tree is ``_next``: (place of a token, next token) -> place of that one; place 0 is the root.
    """

    def __init__(self, trunk: Any, count: int) -> None:
        self.count, self._trunk = count, trunk
        self._next: dict[tuple[int, int], int] = {}
        self._hidden_CD = trunk.embed_tokens.weight.new_empty(0, trunk.config.hidden_size)
        self._of_slots = np.full(0, NOWHERE)  # place of the token in each slot of the key-value store

    def are_plain(self) -> bool:
        """Whether the active adapter leaves these layers alone; that of another run, an opponent's, may not."""
        adapted = (m for layer in self._trunk.layers[: self.count] for m in layer.modules() if hasattr(m, "lora_A"))
        return not any(not m.disable_adapters and {*m.active_adapters} & {*m.lora_A} for m in adapted)

    def find(self, rows: Seq[Row], tree: Tree) -> Tensor | None:
        """The inputs of layer ``count`` (N, D) if all of them are held, else None; ``rows`` have no past."""
        places_N = np.empty(len(tree.ids_N), np.int64)
        for row, flat in zip(rows, tree.flat, strict=True):
            place, path = 0, []
            for token in row.ids:
                place = self._next.get((place, token), NOWHERE)
                path.append(place)
            if place == NOWHERE:
                return None
            places_N[flat] = path
        return self._hidden_CD[torch.from_numpy(places_N).to(self._hidden_CD.device)]

    def hold(self, rows: Seq[Row], tree: Tree, stored: bool, hidden_ND: Tensor) -> None:
        """Keep the inputs of layer ``count``, where memory allows.

        ``stored``: keys and values of the tokens are in the tree's slots, so that later rows may continue them.
        """
        places_N, new = np.full(len(tree.ids_N), NOWHERE), dict[tuple[int, int], int]()
        for row, flat in zip(rows, tree.flat, strict=True):
            place, path = int(self._of_slots[row.past[-1]]) if len(row.past) else 0, []
            for token in row.ids if place != NOWHERE else ():
                key, free = (place, token), 1 + len(self._next) + len(new)
                place = self._next.get(key) or new.setdefault(key, free)
                path.append(place)
            places_N[flat] = path or NOWHERE
        try:
            self._write(places_N, hidden_ND.detach(), 1 + len(self._next) + len(new))
            self._next |= new
        except torch.OutOfMemoryError:  # later passes run these tokens through all layers
            places_N[:] = NOWHERE
        if stored:
            if (most := int(tree.slots_N.max()) + 1) > len(self._of_slots):
                self._of_slots = np.concatenate((self._of_slots, np.full(most - len(self._of_slots), NOWHERE)))
            self._of_slots[tree.slots_N] = places_N

    def _write(self, places_N: Ints, hidden_ND: Tensor, room: int) -> None:
        if room > len(self._hidden_CD):
            grown_CD = self._hidden_CD.new_empty(room + room // 4, self._hidden_CD.shape[1])
            grown_CD[: len(self._hidden_CD)] = self._hidden_CD
            self._hidden_CD = grown_CD
        places, first = np.unique(places_N, return_index=True)  # the same tokens may follow keys that are stored twice
        known = places != NOWHERE
        to, of = (torch.from_numpy(x[known]).to(hidden_ND.device) for x in (places, first))
        self._hidden_CD[to] = hidden_ND[of]
