"""Keys and values of what was read: kept conversation by conversation, and laid side by side for a batch.

Shapes: B rows, P cached tokens, T new tokens, S tokens that a row has room for, X = 2 x layers (keys, values,
keys, ...), H key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor


def _room(tokens: int) -> int:
    """What to allocate: growing by a quarter at a time, a token is copied a few times however long the whole gets."""
    return tokens + tokens // 4


class Kept:
    """Keys and values of a conversation's first tokens. They never change: any number may go on from them.

    Whoever is first writes behind them in the same memory, the others copy.
    """

    def __init__(self, kv_XHPE: Tensor) -> None:
        self._buffer_XHSE, self.length = kv_XHPE, kv_XHPE.shape[2]
        self._written = [self.length]  # of the buffer; one list for all that share it

    @property
    def tensor(self) -> Tensor:
        """(X, H, P, E), a view."""
        return self._buffer_XHSE[:, :, : self.length]

    @property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, as a batch of one row."""
        layers = self.tensor[:, None].unbind(0)
        return list(zip(layers[0::2], layers[1::2], strict=True))

    def extended(self, kv_XHTE: Tensor) -> Kept:
        """The conversation with T more tokens."""
        end = self.length + kv_XHTE.shape[2]
        longer = Kept(self._buffer_XHSE)
        if self._written[0] != self.length or self._buffer_XHSE.shape[2] < end:
            X, H, _, E = kv_XHTE.shape
            longer = Kept(kv_XHTE.new_empty(X, H, _room(end), E))
            longer._buffer_XHSE[:, :, : self.length] = self.tensor
        else:
            longer._written = self._written
        longer._buffer_XHSE[:, :, self.length : end] = kv_XHTE
        longer._written[0] = longer.length = end
        return longer


class SideBySide:
    """Several conversations as one batch; what they go on with is written behind each row's own tokens, in place."""

    def __init__(self, rows: Seq[Kept | None]) -> None:
        self.rows = list(rows)
        first = next(row for row in rows if row)
        X, H, _, E = first.tensor.shape
        self._buffer_XBHSE = first.tensor.new_zeros(X, len(rows), H, _room(max(self.lengths)), E)
        for b, row in enumerate(self.rows):
            if row:
                self._buffer_XBHSE[:, b, :, : row.length] = row.tensor

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [row.length if row else 0 for row in self.rows]

    def order_of(self, rows: Seq[Kept | None]) -> list[int] | None:
        """Where each of ``rows`` lies; None unless they are these rows, each once."""
        at = {id(row): b for b, row in enumerate(self.rows)}
        order = [at.get(id(row), -1) for row in rows]
        return order if sorted(order) == list(range(len(self.rows))) else None

    def layers(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (B, H, S, E) of each layer, with room for ``tokens`` more behind the longest row."""
        needed = max(self.lengths) + tokens
        if self._buffer_XBHSE.shape[3] < needed:
            X, B, H, S, E = self._buffer_XBHSE.shape
            grown = self._buffer_XBHSE.new_zeros(X, B, H, _room(needed), E)
            grown[:, :, :, :S] = self._buffer_XBHSE
            self._buffer_XBHSE = grown
        layers = self._buffer_XBHSE[:, :, :, :needed].unbind(0)
        return list(zip(layers[0::2], layers[1::2], strict=True))
