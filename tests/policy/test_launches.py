"""What a GPU would be asked to do, counted without one: launches a layer, and the passes of a default step."""

import numpy as np
import pytest
import torch
from shapes import SHAPES, write_model

from benchmarks import predict
from benchmarks.gpu_models import config_of
from policy.tree import Row, grow
from training.config import parse_args, read_config

CUT = predict.network.CUTS[1]


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """The default configuration, with prompts no shorter than Qwen3's own."""
    folder = write_model("Qwen3-4B", tmp_path_factory.mktemp("shape") / "Qwen3-4B")
    return read_config(parse_args(["--set", f"model.model_name={folder}", "--no-wandb"], None))


def launches(config, shape, tree, part, recompute=False):
    """Of a layer that is neither the first to run after an update nor the last."""
    passes = [predict.Pass(part, tree, part == "rollout", recompute)]
    architecture = config_of(SHAPES[shape])
    two, three = (predict.counted_in(layers, passes, config, architecture) for layers in (2, 3))
    return sum(op.launches for op in three) - sum(op.launches for op in two)


def decode():
    """One token after each of 8 conversations."""
    rows = [Row([1], np.arange(i * 700, i * 700 + 600 + 10 * i)) for i in range(8)]
    return grow(rows, [[0]] * 8, lambda tokens: np.arange(8000, 8000 + tokens), CUT)


def training():
    """836 tokens of two games that begin alike."""
    rows = [Row([1] * 50 + [2 + i] * 393) for i in range(2)]
    return grow(rows, [[100, 200, 442]] * 2, None, CUT)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("four_bit", [True, False])
def test_a_layer_takes_few_launches(default, shape, four_bit):
    """A layer that is computed again in 4 bits takes 21 more, bitsandbytes': 1 to unpack each of 7 weights, 3 times."""
    config = predict.in_bits(default, four_bit)
    assert launches(config, shape, decode(), "rollout") <= 70
    kept, again = (launches(config, shape, training(), "update", recompute) for recompute in (False, True))
    assert 0 < kept < again, "what is kept is not computed again"
    assert kept <= 156 + 14 * four_bit, "of a layer that keeps its activations"
    assert again <= 193 + 21 * four_bit, "of one that is computed again"


def test_operations_are_counted_by_their_arithmetic_and_the_bytes_that_move():
    large, rows, to = torch.ones(1000, 1000), torch.tensor([1]), torch.ones(4, 8)
    with predict.Counter() as counter:
        large.new_zeros(3)
        to.addmm_(torch.ones(4, 2), torch.ones(2, 8))
        large.index_select(0, rows)
        large.bfloat16().view(-1)
    zeros, *_, product, gather, cast = counter.ops
    assert zeros.bytes == 3 * 4
    assert product.flops == 2 * 4 * 2 * 8
    assert product.bytes == 4 * (4 * 8 * 2 + 4 * 2 + 2 * 8)
    assert gather.bytes == 2 * 1000 * 4
    assert (cast.bytes, cast.dtype) == (6e6, torch.bfloat16)


@pytest.mark.slow
def test_a_default_step_takes_few_passes(default, tmp_path):
    step, _ = predict.play_steps(predict.narrow(default, tmp_path), gpu=True)
    read = {part: predict.forward_equivalents(step, part) for part in ("rollout", "score", "update")}
    assert read["rollout"] <= 1
    assert read["score"] <= 1.25  # the reference; a sixteenth of the sequences again
    assert sum(read.values()) <= 6
    rows = [len(p.tree.paths) for p in step.passes if p.part == "rollout"]
    assert rows[0] > 1, "the system messages of all games are read in one pass"
    assert max(rows) >= 7, "no round of 8 games is cut"
    assert np.mean(rows) >= 2.5  # as long as the longest game lasts, and their lengths differ by ten times
