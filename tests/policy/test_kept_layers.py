"""How many layers of a training pass keep their activations on a GPU: as many as its free memory has room for."""

import pytest
import torch

from policy import network

TOKENS = 100


@pytest.fixture
def reader(new_policy, monkeypatch):
    """A reader that takes its device for a GPU, with 100 free bytes in the allocator's hands."""
    policy = new_policy("qwen2")
    reader = policy.reader
    reader.device = torch.device("cuda", 0)
    reader._layer_bytes = network.activation_bytes(policy.base.config, ("q_proj",), 4)
    free = {"bytes": 0.0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"] - 100, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    layers, entry = len(reader.trunk.layers), 4 * policy.base.config.hidden_size

    def leave(room):
        """Bytes for so many layers, beside what a pass takes that computes all of them again."""
        needed = network.RESERVE + TOKENS * (layers * entry + 2 * reader._layer_bytes)
        free["bytes"] = needed + room * TOKENS * (reader._layer_bytes - entry)

    reader.leave = leave
    return reader


def test_as_many_layers_keep_their_activations_as_there_is_room_for(reader):
    layers = len(reader.trunk.layers)
    for room, kept in ((-9, 0), (0.9, 0), (1.1, 1), (layers + 0.1, layers), (99, layers)):
        reader.leave(room)
        assert reader._recomputed(TOKENS) == layers - kept
    with torch.no_grad():
        assert reader._recomputed(TOKENS) == 0, "nothing is kept that could be computed again"


def test_after_a_lack_of_memory_fewer_layers_keep_theirs_and_then_batches_are_halved(reader):
    layers, tokens = len(reader.trunk.layers), reader.tokens_per_batch
    reader.leave(99)
    seen = []
    while reader.tokens_per_batch == tokens and len(seen) < 9:
        seen.append(layers - reader._recomputed(TOKENS))
        assert reader.halve_batches()
    assert seen == [layers // 2**i for i in range(len(seen) - 1)] + [0]
    assert reader.tokens_per_batch == tokens // 2
    assert reader._recomputed(TOKENS) == layers, "a smaller batch does not make the room again"
    reader.set_limits(tokens)
    assert reader._recomputed(TOKENS) == 0, "what took the memory may be gone"


def test_a_lack_of_memory_in_a_rollout_halves_its_batches_at_once(reader):
    reader.leave(99)
    reader._recomputed(TOKENS)
    with torch.no_grad():
        reader._recomputed(TOKENS)
    tokens = reader.tokens_per_batch
    assert reader.halve_batches()
    assert reader.tokens_per_batch == tokens // 2
