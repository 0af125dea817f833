"""Keys and values: what is kept never changes, rows side by side grow in place, and nothing is read twice."""

import pytest
import torch
from torch.testing import assert_close

from cache import Kept, SideBySide
from network import Read


def piece(tokens, seed):
    return torch.randn(4, 2, tokens, 3, generator=torch.Generator().manual_seed(seed))


def test_many_go_on_from_one_beginning_without_touching_each_other():
    start = Kept(piece(5, 0)).extended(piece(40, 1))  # leaves room behind itself
    first, second = start.extended(piece(3, 2)), start.extended(piece(4, 3))
    third = first.extended(piece(1, 4))
    assert first.tensor.data_ptr() == start.tensor.data_ptr(), "the first goes on in place"
    whole = torch.cat((piece(5, 0), piece(40, 1)), 2)
    for kept, parts in ((start, []), (first, [(3, 2)]), (second, [(4, 3)]), (third, [(3, 2), (1, 4)])):
        assert torch.equal(kept.tensor, torch.cat([whole, *(piece(*part) for part in parts)], 2))
        assert kept.length == kept.tensor.shape[2]


def test_a_long_conversation_is_copied_few_times():
    kept, copies = Kept(piece(1, 0)), 0
    for t in range(1000):
        before = kept.tensor.data_ptr()
        kept = kept.extended(piece(1, t))
        copies += kept.tensor.data_ptr() != before
    assert copies < 40
    assert torch.equal(kept.tensor[:, :, 1:], torch.cat([piece(1, t) for t in range(1000)], 2))


def test_rows_side_by_side_find_their_places_and_keep_their_tokens_when_they_grow():
    rows = [Kept(piece(5, 0)), None, Kept(piece(9, 1))]
    beside = SideBySide(rows)
    assert beside.lengths == [5, 0, 9]
    for tokens in (1, 50):
        for layer, pair in enumerate(beside.layers(tokens)):
            for x, held in enumerate(pair):
                assert held.shape == (3, 2, 9 + tokens, 3)
                assert torch.equal(held[0, :, :5], piece(5, 0)[2 * layer + x])
                assert torch.equal(held[2, :, :9], piece(9, 1)[2 * layer + x])
    assert beside.order_of([rows[2], rows[0], rows[1]]) == [2, 0, 1]
    for others in (rows[:2], [rows[0], rows[0], rows[2]], [*rows, None], [rows[0], None, Kept(piece(9, 1))]):
        assert beside.order_of(others) is None


@pytest.fixture
def qwen2(new_policy):
    return new_policy()


@pytest.fixture
def laid_out(monkeypatch):
    """How many batches of conversations were put together from single ones."""
    made = []
    init = SideBySide.__init__
    monkeypatch.setattr(SideBySide, "__init__", lambda self, rows: made.append(len(rows)) or init(self, rows))
    return made


def ids_of(length, seed):
    return torch.randint(5, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_same_conversations_go_on_in_place_in_any_order_and_others_are_put_together_afresh(qwen2, laid_out):
    """Six steps of five conversations of different lengths: the hidden states are those of reading all again."""
    rows = [ids_of(4 + 3 * i, i) for i in range(5)]
    kvs = [None] * 5
    plan = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [3, 0, 4, 1, 2], [1, 3], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]]
    with torch.no_grad():
        for step, members in enumerate(plan):
            for i in members:
                rows[i] = rows[i] + ids_of(1 + (i + step) % 3, 10 * step + i)
            hidden_ND, new = qwen2.read([Read(rows[i], kvs[i], True) for i in members])
            afresh_ND, _ = qwen2.read([Read(rows[i], None, False) for i in members])
            assert_close(hidden_ND, afresh_ND, atol=1e-5, rtol=0)
            for i, kv in zip(members, new, strict=True):
                kvs[i] = kv
    assert laid_out == [5, 2, 5], "steps 1, 3 and 4 (counted from 0)"


@torch.no_grad()
def test_nothing_is_held_for_conversations_that_are_over(qwen2):
    kvs = qwen2.read([Read(ids_of(9, i), None, True) for i in range(3)])[1]
    longer = [[*ids_of(9, i), 7] for i in range(3)]
    qwen2.read([Read(ids, kv, True) for ids, kv in zip(longer, kvs, strict=True)])
    assert qwen2._beside is not None
    qwen2.read([Read([*ids, 8], kv, False) for ids, kv in zip(longer, kvs, strict=True)])
    assert qwen2._beside is None
