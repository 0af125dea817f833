"""Rows of tokens as a tree: what several rows begin with is one run of tokens, in one flat list without padding.

Rows are sorted, so that each shares its beginning with the row before it: of every row only what is new becomes tokens
of the pass, and its path says where the keys and values of all its tokens lie. Numbers only; no model here.

Shapes: N tokens computed in a pass, U of them read, R runs of queries in a bucket, T queries and S keys of a run.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

Ints = np.ndarray  # of int64
NOTHING: Ints = np.zeros(0, dtype=np.int64)
ALIGNED = 16  # keys of a bucket come in such numbers: CUDA's kernels want masks with such rows, CPUs take half the time


class Row(NamedTuple):
    """What one row adds to a pass: its ids from ``len(past)`` on; ``past``: slots of the keys of those before."""

    ids: Seq[int]
    past: Ints = NOTHING


class Cut(NamedTuple):
    """How queries come into buckets: the more of them, the fewer scores are computed for nothing."""

    most: int  # queries of a run; longer ones are cut, so that less is computed of what a causal mask hides
    waste: float  # of a bucket's scores, padding included, to those that are wanted
    small: int  # scores that cost less than a bucket of their own


class Bucket(NamedTuple):
    """Runs of queries that attend to about as many keys, side by side; ``keys`` are right-padded to 16, 32, ..."""

    queries: Ints  # (total queries) which of the pass's queries, run by run
    places: Ints  # (total queries) where they stand in (R, T), flat
    positions: Ints  # (R, T) of each query in its path: it sees the keys up to there; 0 where there is none
    keys: Ints  # (R, S) slots; beyond a run's own, those again


class Tree(NamedTuple):
    """The tokens of a pass."""

    ids_N: Ints
    positions_N: Ints
    slots_N: Ints  # where keys and values of each token go
    reads_U: Ints  # the tokens that are read, in order
    flat: list[Ints]  # of each row: which of the N its own tokens are
    paths: list[Ints]  # of each row: the slots of all its tokens, those of its past first
    full: list[Bucket]  # every token attends
    last: list[Bucket]  # only those that are read do


def common(a: Seq[int], b: Seq[int]) -> int:
    """Length of the common beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def new_tokens(rows: Seq[Row]) -> Iterator[tuple[int, int]]:
    """Of each row, sorted: how many of its tokens the row before has computed already, and how many are its own."""
    before: Row | None = None
    for row in rows:
        shared = common(before.ids, row.ids) if before is not None and before.past is row.past else 0
        yield shared, len(row.ids) - shared
        before = row


class _QueryRun(NamedTuple):
    """Queries of one row, side by side, and the keys that the last of them sees."""

    T: int
    S: int
    queries: Ints
    positions: Ints
    keys: Ints


def _cut(queries: Ints, positions: Ints, path: Ints, most: int) -> Iterator[_QueryRun]:
    """The runs of a row, of at most ``most`` queries."""
    for i in range(0, len(queries), most):
        at = positions[i : i + most]
        seen = int(at[-1]) + 1
        yield _QueryRun(len(at), seen, queries[i : i + most], at, path[:seen])


def _buckets(runs: list[_QueryRun], cut: Cut) -> list[Bucket]:
    """Runs in buckets of similar size."""
    buckets, wanted, tallest, widest = [], 0, 0, 0
    group: list[_QueryRun] = []
    for run in sorted(runs, key=lambda run: run[:2]):
        T, S = run[:2]
        tallest, widest, wanted = max(tallest, T), max(widest, S), wanted + T * S
        if group and (len(group) + 1) * tallest * widest > cut.waste * wanted + cut.small:
            buckets.append(_bucket(group))
            group, wanted, tallest, widest = [], T * S, T, S
        group.append(run)
    return [*buckets, _bucket(group)] if group else buckets


def _bucket(runs: list[_QueryRun]) -> Bucket:
    T_R, S_R, queries, positions, keys = zip(*runs, strict=True)
    real_RT = np.arange(max(T_R)) < np.array(T_R)[:, None]
    at_RS = np.arange(-(-max(S_R) // ALIGNED) * ALIGNED) % np.array(S_R)[:, None]
    positions_RT = np.zeros(real_RT.shape, np.int64)
    positions_RT[real_RT] = np.concatenate(positions)
    # Beyond its end a path begins again: were one key in all those places, a GPU would add its gradients one by one.
    keys_RS = np.concatenate(keys)[at_RS + np.cumsum([0, *S_R[:-1]])[:, None]]
    return Bucket(np.concatenate(queries), np.flatnonzero(real_RT), positions_RT, keys_RS)


def grow(rows: Seq[Row], reads: Seq[Seq[int]], take: Callable[[int], Ints] | None, cut: Cut) -> Tree:
    """The tree of ``rows``, which must be sorted (by past, then by ids).

    Args:
        rows: none of them empty or equal.
        reads: of each row the positions that are read, counted from its first token after ``past``.
        take: gives as many slots, for keys and values of the tokens computed; None: each goes to its place in the pass.
        cut: how queries come into buckets.
    """
    sizes = list(new_tokens(rows))
    total = sum(own for _, own in sizes)
    slots_N = np.arange(total) if take is None else take(total)
    ids_N, positions_N, owner_N = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
    flat: list[Ints] = []
    paths: list[Ints] = []
    runs: list[_QueryRun] = []
    last: list[_QueryRun] = []
    end = 0
    for r, (row, (shared, own)) in enumerate(zip(rows, sizes, strict=True)):
        start, end = end, end + own
        mine = np.arange(start, end)
        flat.append(np.concatenate((flat[-1][:shared], mine)) if shared else mine)
        paths.append(np.concatenate((row.past, slots_N[flat[-1]])) if len(row.past) else slots_N[flat[-1]])
        at = np.arange(own) + len(row.past) + shared
        ids_N[start:end], positions_N[start:end], owner_N[start:end] = row.ids[shared:], at, r
        runs += _cut(mine, at, paths[-1], cut.most)
    reads_U = np.unique(np.concatenate([path[list(read)] for path, read in zip(flat, reads, strict=True)]))
    for which in np.split(np.arange(len(reads_U)), np.flatnonzero(np.diff(owner_N[reads_U])) + 1):
        read_N = reads_U[which]
        last += _cut(which, positions_N[read_N], paths[owner_N[read_N[0]]], cut.most)
    return Tree(ids_N, positions_N, slots_N, reads_U, flat, paths, _buckets(runs, cut), _buckets(last, cut))
