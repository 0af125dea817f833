"""Rows of tokens as a prefix tree: a beginning that several rows share occurs once, in one flat list without padding.

Rows are sorted, so that each shares its beginning with the row before it. Only a row's new tokens are computed, and its
path says in which slots the keys and values of all its tokens lie. Index arithmetic only; no model here.

Shapes: N tokens computed in a pass, U of them read, R runs of queries in a bucket, T queries and S keys of a run.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

Ints = np.ndarray  # of int64
NOTHING: Ints = np.zeros(0, dtype=np.int64)
ALIGNED = 16  # keys of a bucket are padded to multiples of this: CUDA's kernels need it, CPUs take half the time


class Row(NamedTuple):
    """One row of a pass: the ids after its cached beginning; ``past``: slots of the keys of that beginning."""

    ids: Sequence[int]
    past: Ints = NOTHING


class Cut(NamedTuple):
    """How queries are cut into buckets: more buckets launch more kernels and compute fewer useless scores."""

    most: int  # queries of a run; longer ones are cut, so that fewer masked scores are computed
    waste: float  # the most scores of a bucket, padding included, for each useful one
    small: int  # useless scores that cost less than another bucket


class Bucket(NamedTuple):
    """Runs of queries that attend to about as many keys, side by side; ``keys`` are right-padded to 16, 32, ..."""

    queries: Ints  # (total queries) which of the pass's queries, run by run
    places: Ints  # (total queries) their flat indices in (R, T)
    positions: Ints  # (R, T) of each query in its path: it attends to keys up to there; 0 where there is no query
    keys: Ints  # (R, S) slots; a shorter run's own are repeated as padding


class Tree(NamedTuple):
    """The tokens of a pass."""

    ids_N: Ints
    positions_N: Ints
    slots_N: Ints  # where keys and values of each token go
    reads_U: Ints  # the tokens that are read, in order
    flat: list[Ints]  # for each row, indices of its tokens among the N
    paths: list[Ints]  # for each row, slots of all its tokens, its past first
    full: list[Bucket]  # all tokens as queries
    last: list[Bucket]  # only the tokens that are read, for the last layer


def new_tokens(rows: Sequence[Row]) -> Iterator[tuple[int, int]]:
    """For each of the sorted rows: how many of its tokens it shares with the row before, and how many are new."""
    for before, row in pairwise((Row(()), *rows)):
        shared = 0
        if before.past is row.past:
            differing = (i for i, (x, y) in enumerate(zip(before.ids, row.ids, strict=False)) if x != y)
            shared = next(differing, min(len(before.ids), len(row.ids)))
        yield shared, len(row.ids) - shared


class _QueryRun(NamedTuple):
    """Consecutive queries of one row (T), and the keys that the last of them attends to (S)."""

    queries: Ints
    positions: Ints
    keys: Ints


def _cut(queries: Ints, positions: Ints, path: Ints, most: int) -> Iterator[_QueryRun]:
    """The runs of a row, of at most ``most`` queries."""
    for i in range(0, len(queries), most):
        at = positions[i : i + most]
        yield _QueryRun(queries[i : i + most], at, path[: at[-1] + 1])


def _buckets(runs: list[_QueryRun], cut: Cut) -> list[Bucket]:
    """Runs in buckets of similar size."""
    buckets, useful, most_S = [], 0, 0
    group: list[_QueryRun] = []
    for run in sorted(runs, key=lambda run: (len(run.queries), len(run.keys))):
        T, S = len(run.queries), len(run.keys)  # T only grows
        most_S, useful = max(most_S, S), useful + T * S
        if group and (len(group) + 1) * T * most_S > cut.waste * useful + cut.small:
            buckets.append(_bucket(group))
            group, useful, most_S = [], T * S, S
        group.append(run)
    return [*buckets, _bucket(group)] if group else buckets


def _bucket(runs: list[_QueryRun]) -> Bucket:
    queries, positions, keys = zip(*runs, strict=True)
    T_R, S_R = np.array([*map(len, queries)]), np.array([*map(len, keys)])
    real_RT = np.arange(T_R.max()) < T_R[:, None]
    at_RS = np.arange(-(-S_R.max() // ALIGNED) * ALIGNED) % S_R[:, None]
    positions_RT = np.zeros(real_RT.shape, np.int64)
    positions_RT[real_RT] = np.concatenate(positions)
    # Padding repeats the whole path: with one key in all those places a GPU would add their gradients one by one.
    keys_RS = np.concatenate(keys)[at_RS + np.cumsum([0, *S_R[:-1]])[:, None]]
    return Bucket(np.concatenate(queries), np.flatnonzero(real_RT), positions_RT, keys_RS)


def grow(rows: Sequence[Row], reads: Sequence[Sequence[int]], take: Callable[[int], Ints] | None, cut: Cut) -> Tree:
    """The tree of ``rows``, which must be sorted (by past, then by ids).

    Args:
        rows: none of them empty or equal.
        reads: for each row, the positions that are read, counted from its first token after ``past``.
        take: allocates so many slots for keys and values; None: a token's slot is its index in the pass.
        cut: how queries are cut into buckets.
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
