"""What a step's rollouts have read, for its updates: keys and values of prompts, constants under the gradient.

An update then computes only the last token of each prompt and the answer. Otherwise gradients go through all tokens
before them too, a hundred for each decision.
"""

from collections.abc import Sequence as Seq

import numpy as np

from policy.cache import Store
from policy.tree import Ints

ROOT = -1


class Context:
    """A slot of the store for each node of the prefix tree of what was read; the slots are held until ``release``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next: dict[tuple[int, int], int] = {}  # (slot of a token, next token) -> slot of that one

    def hold(self, ids: Seq[int], path: Ints) -> None:
        """Hold ``path``, the slots of the first tokens of ``ids``, as far as equal ones are not held."""
        place, new = ROOT, []
        for token, slot in zip(ids, path.tolist(), strict=False):
            if (held := self._next.get((place, token))) is None:
                self._next[place, token] = held = slot
                new.append(slot)
            place = held
        self._store.hold(np.array(new, np.int64), 1)

    def find(self, ids: Seq[int]) -> Ints | None:
        """The slots of ``ids``; None: some are not held."""
        place, path = ROOT, []
        for token in ids:
            if (place := self._next.get((place, token), ROOT)) == ROOT:
                return None
            path.append(place)
        return np.array(path, np.int64)

    def release(self) -> None:
        """Let go of all slots; to be called once, at the end."""
        self._store.hold(np.fromiter(self._next.values(), np.int64, len(self._next)), -1)
