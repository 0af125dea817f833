"""Keys and values: one store, slots used again, what is kept never changes and nothing is read twice."""

import pytest
import torch
from torch.testing import assert_close

from policy.cache import Kept, Store
from policy.network import Read


@pytest.fixture
def qwen2(new_policy):
    return new_policy()


def ids_of(length, seed):
    return torch.randint(5, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_slot_is_used_again_once_nobody_holds_it(qwen2):
    store = Store(qwen2.trunk)
    slots = store.take(10)
    whole, part = Kept(store, slots), Kept(store, slots[:4])
    store.hold(slots, -1)
    assert (store.held, len(whole.path)) == (10, 10)
    assert not {*store.take(5)} & {*slots}
    del whole
    assert store.held == 4 + 5
    assert {*slots[4:]} <= {*store.take(8)}
    del part


def test_a_store_that_grows_keeps_what_it_holds(qwen2):
    store = Store(qwen2.trunk)
    slots = store.take(7)
    for i, pair in enumerate(store.layers):
        for x in pair:
            x[slots] = float(i + 1)
    store.take(1000)
    assert all((x[slots] == i + 1).all() for i, pair in enumerate(store.layers) for x in pair)


@torch.no_grad()
def test_an_empty_store_gives_its_memory_back_and_gets_as_much_again(qwen2):
    store, ids = qwen2.reader.store, ids_of(30, 0)
    [hidden_D], [kv] = qwen2.reader.read([Read(ids, None, True)])
    rooms = [len(x) for pair in store.layers for x in pair]
    store.empty()
    assert [len(x) for pair in store.layers for x in pair] == rooms, "somebody holds a conversation"
    del kv
    store.empty()
    assert {len(x) for pair in store.layers for x in pair} == {0}
    [again_D], [kv] = qwen2.reader.read([Read(ids, None, True)])
    assert_close(again_D, hidden_D, atol=0, rtol=0)
    assert [len(x) for pair in store.layers for x in pair] == rooms
    qwen2.reader.read([Read([*ids, 7], kv, True)])
    del kv
    qwen2.forget()
    assert store.held == len(store.layers[0][0]) == 0
    store.take(3)
    assert len(store.layers[0][0]) == 3, "as many as are wanted now, not as many as there ever were"


@torch.no_grad()
def test_conversations_go_on_in_any_company_and_leave_nothing_behind(qwen2):
    """Six steps of five conversations of different lengths: the hidden states are those of reading all again."""
    rows = [ids_of(4 + 3 * i, i) for i in range(5)]
    kvs = [None] * 5
    plan = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [3, 0, 4, 1, 2], [1, 3], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]]
    for step, members in enumerate(plan):
        for i in members:
            rows[i] = rows[i] + ids_of(1 + (i + step) % 3, 10 * step + i)
        hidden_ND, new = qwen2.reader.read([Read(rows[i], kvs[i], True) for i in members])
        afresh_ND, _ = qwen2.reader.read([Read(rows[i], None, False) for i in members])
        assert_close(hidden_ND, afresh_ND, atol=1e-5, rtol=0)
        for i, kv in zip(members, new, strict=True):
            kvs[i] = kv
    assert qwen2.reader.store.held == sum(map(len, rows))
    capacity = len(qwen2.reader.store.layers[0][0])
    kvs = new = kv = None
    assert qwen2.reader.store.held == 0
    qwen2.reader.read([Read(ids, None, True) for ids in rows])
    assert len(qwen2.reader.store.layers[0][0]) == capacity


@torch.no_grad()
def test_many_go_on_from_one_beginning_without_touching_each_other(qwen2):
    start = ids_of(20, 0)
    [kv] = qwen2.reader.read([Read(start, None, True)])[1]
    longer = [start + ids_of(3, i) for i in (1, 2)]
    ahead = qwen2.reader.read([Read(ids, kv, True) for ids in longer])[1]
    assert qwen2.reader.store.held == 20 + 3 + 3, "the beginning is held once"
    longest = [[*ids, 7] for ids in longer]
    hidden_ND, _ = qwen2.reader.read([Read(ids, kv, False) for ids, kv in zip(longest, ahead, strict=True)])
    assert_close(hidden_ND, qwen2.reader.read([Read(ids, None, False) for ids in longest])[0], atol=1e-5, rtol=0)
    _, [_, kept] = qwen2.reader.read([Read(start, None, False), Read(start, None, True)])
    assert len(kept.path) == 20, "of equal ones whoever asks for it"


@torch.no_grad()
def test_a_pass_that_fails_holds_nothing(qwen2, monkeypatch):
    def fails(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("policy.network.run_trunk", fails)
    qwen2.tokens_per_batch = 1
    with pytest.raises(torch.OutOfMemoryError):
        qwen2.reader.read([Read(ids_of(9, 0), None, True)])
    assert qwen2.reader.store.held == 0


def test_a_store_takes_no_more_than_it_must_where_there_is_no_more(qwen2, monkeypatch):
    store = qwen2.reader.store
    held, real = store.take(200), store._room

    def room(slots):
        if slots > 8:
            raise torch.OutOfMemoryError
        return real(slots)

    monkeypatch.setattr(store, "_room", room)
    free = len(store._holders) - 200
    slots = store.take(free + 8)
    assert len(slots) == free + 8
    assert all(len(x) == len(store._holders) == 208 + free for pair in store.layers for x in pair)
    for taken in (held, slots):
        store.hold(taken, -1)


def test_memory_that_runs_out_while_the_store_grows_loses_nothing(qwen2, monkeypatch):
    """At each layer in turn: what is held stays, nothing else counts as taken, and every slot has its room."""
    store = qwen2.reader.store
    real = store._room
    for last in range(1, 2 * len(store.layers), 2):
        held, asked = store.held, iter(range(100))

        def room(slots, asked=asked, last=last):
            if next(asked) >= last:
                raise torch.OutOfMemoryError
            return real(slots)

        monkeypatch.setattr(store, "_room", room)
        with pytest.raises(torch.OutOfMemoryError):
            store.take(len(store._holders) + 10)
        assert store.held == held
        assert all(len(x) >= len(store._holders) for pair in store.layers for x in pair)
        monkeypatch.setattr(store, "_room", real)
        slots = store.take(len(store._holders) + 5)
        assert all(len(x) > slots.max() for pair in store.layers for x in pair)
        store.hold(slots, -1)
