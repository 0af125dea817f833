"""What the layers below all adapters make of each token: no update moves it, so updates need not compute it again.

A rollout leaves it behind, and each pass over what was played begins with the first layer that has an adapter.

Shapes: N tokens of a pass, D hidden size, C tokens there is room for.
"""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policy.tree import Ints, Row, Tree

NOWHERE = -1  # the place of a token that there was no memory for


class LowerLayers:
    """Hidden states that enter layer ``count``, each held once at a token's place in the tree of all that was read.

    The tree is ``_next``: from a token's place and the token after it to that one's place; 0 is before the first.
    """

    def __init__(self, trunk: Any, count: int) -> None:
        self.count, self._trunk = count, trunk
        self._next: dict[tuple[int, int], int] = {}
        self._hidden_CD = trunk.embed_tokens.weight.new_empty(0, trunk.config.hidden_size)
        self._of_slots = np.full(0, NOWHERE)  # of each slot of the store for keys and values: its token's place

    def are_plain(self) -> bool:
        """Whether no adapter in use is in these layers: another run's, loaded to be played against, may be."""
        adapted = (m for layer in self._trunk.layers[: self.count] for m in layer.modules() if hasattr(m, "lora_A"))
        return not any(not m.disable_adapters and {*m.active_adapters} & {*m.lora_A} for m in adapted)

    def find(self, rows: Seq[Row], tree: Tree) -> Tensor | None:
        """What enters layer ``count`` (N, D), where all of it is held; ``rows`` have no past."""
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
        """Hold what enters layer ``count``, where memory allows.

        ``stored``: keys and values of the tokens are at the tree's slots, where later rows may go on from them.
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
        except torch.OutOfMemoryError:  # of these tokens nothing is held: what reads them asks all layers
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
        places, first = np.unique(places_N, return_index=True)  # equal rows may go on from keys held twice
        known = places != NOWHERE
        to, of = (torch.from_numpy(x[known]).to(hidden_ND.device) for x in (places, first))
        self._hidden_CD[to] = hidden_ND[of]
