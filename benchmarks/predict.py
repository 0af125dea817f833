"""Seconds and memory of a training step from counted operations: for GPUs that are not here, and held against this CPU.

    python benchmarks/predict.py                     # Qwen on a list of cards
    python benchmarks/predict.py --check tiny smol   # predicts steps on this CPU and measures them, one thread

A step of the program's own is played on a network of one narrow layer, which has the same passes: the same tokens,
trees and buckets. Every pass is done again at the true shapes on the meta device, where each operation that would run
is counted: arithmetic, bytes read and written, launches. An operation takes the largest of arithmetic / peak, bytes /
bandwidth and the cost of a launch; what is not the network's (games, prompts, trees, sampling) is what the narrow step
took here, less its own operations.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

import train_ppo
from benchmarks.common import Clock, Row, parser, table, write
from benchmarks.gpu_models import SHAPES
from benchmarks.gpu_models import config_of as architecture_of
from benchmarks.operations import Counter, Op, aten, gpu_kernels, trunk_of
from benchmarks.recorded import tokenizer
from policy import cpu_memory, network, player
from policy.cache import Store
from policy.chat import ChatFormat
from policy.model import LoraConfig, ModelConfig, load_tokenizer
from policy.tree import Row as TreeRow
from policy.tree import Tree, grow
from scripts.make_tiny_model import make_model
from training import memory, preflight
from training.config import parse_args, read_config
from training.memory import count_parameters
from training.process import StopSignal, rest_collector, run_program


def counted_in(layers: int, passes: Seq[Pass], config: SimpleNamespace, architecture: Any) -> list[Op]:
    """A GPU's operations for some passes through so many layers."""
    counter = Counter()
    with torch.device("meta"):
        trunk = trunk_of(architecture, config.model, config.lora, layers, counter)
        store = Store(trunk)
        slots = 1 + max((int(p.tree.slots_N.max()) for p in passes), default=0)
        store.layers = [(store._room(slots), store._room(slots)) for _ in trunk.layers]
        for p in passes:
            with counter, gpu_kernels(counter), torch.set_grad_enabled(p.part == "update"):
                hidden = network.run_trunk(trunk, p.tree, store if p.past else None, layers * p.recompute)
                if p.part == "update":
                    hidden.sum().backward()
    return counter.ops


def counted(passes: Seq[Pass], config: SimpleNamespace, architecture: Any) -> list[tuple[Op, int]]:
    """A GPU's operations for some passes, and how often each runs: three layers, less two, are one in the middle."""
    middle = architecture.num_hidden_layers - 2
    two, three = (counted_in(layers, passes, config, architecture) for layers in (2, 3))
    return [*((op, middle) for op in three), *((op, 1 - middle) for op in two)]


def in_bits(config: SimpleNamespace, four_bit: bool) -> SimpleNamespace:
    """The configuration with its base in 4 bits or not."""
    return SimpleNamespace(**vars(config) | {"model": replace(config.model, use_4bit=four_bit)})


# ------------------------------------------------------------------------------------------------------ a whole step


@dataclass
class Pass:
    """One pass through the layers: its tree, of which part of a step, and how it is run."""

    part: str  # rollout, score or update
    tree: Tree
    past: bool
    recompute: bool


@dataclass
class Step:
    """What one step of a configuration does."""

    passes: list[Pass]
    read: int  # tokens of the training sequences
    decisions: int
    updates: int
    seconds: float  # of CPU, that it took here
    ops: list[tuple[Op, int]]  # where they were counted


@contextmanager
def recorded(policy: Any) -> Iterator[list[Pass]]:
    """Collect the passes of a policy made inside."""
    passes: list[Pass] = []
    real, act, acting = network.run_trunk, policy.act, [False]

    def run_trunk(model: Any, tree: Tree, store: Any = None, recompute: int = 0, held: Any = None) -> torch.Tensor:
        part = "rollout" if acting[0] else "update" if torch.is_grad_enabled() else "score"
        passes.append(Pass(part, tree, store is not None, recompute > 0))
        return real(model, tree, store, recompute, held)

    def playing(queries: Any) -> Any:
        acting[0] = True
        try:
            return act(queries)
        finally:
            acting[0] = False

    with mock.patch.object(network, "run_trunk", run_trunk), mock.patch.object(policy, "act", playing):
        yield passes


def narrow(config: SimpleNamespace, folder: Path) -> SimpleNamespace:
    """The configuration with a network of one layer of 16 numbers in place of its own, and the same tokenizer."""
    tokenizer = load_tokenizer(config.model)
    make_model(max(tokenizer.get_vocab().values()) + 1, 16, 1, 0.15, 0, "qwen3").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = replace(config.model, model_name=str(folder), use_4bit=False, dtype="float32", device="cpu")
    return SimpleNamespace(**vars(config) | {"model": model})


def play_steps(config: SimpleNamespace, gpu: bool = False) -> list[Step]:
    """A step of a configuration, after one that warms up, and another one whose operations are counted.

    ``gpu``: trees are cut, and answers read, as for a GPU.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder, StopSignal() as stop, ExitStack() as stack:
        if gpu:
            stack.enter_context(mock.patch.object(network, "CUTS", network.CUTS[1:] * 2))
            stack.enter_context(mock.patch.object(player, "AHEAD", player.AHEAD[1:] * 2))
        trainer = train_ppo.Trainer(config, Path(folder))
        rest_collector()
        trainer.step(stop)
        for counter in (None, Counter()):
            collate, batches, clock = train_ppo.collate, list[Any](), Clock()

            def collating(*args: Any, collate: Any = collate, batches: list[Any] = batches) -> Any:
                batches.append(collate(*args))
                return batches[-1]

            with (
                recorded(trainer.policy) as passes,
                mock.patch.object(train_ppo, "collate", collating),
                clock("step"),
                counter or nullcontext(),
            ):
                row = trainer.step(stop)
            tokens = sum(len(s.ids) for s in batches[0].sequences)
            found.append(Step(passes, tokens, row["decisions"], int(row["updates"]), clock.seconds["step"],
                              [(op, 1) for op in counter.ops] if counter else []))  # fmt: skip
        trainer.metrics.close()
    return found


def forward_equivalents(step: Step, part: str) -> float:
    """Tokens computed in a part, in whole readings of the step's sequences.

    A training pass counts forward, the backward pass through a frozen base as much again, and what is recomputed.
    """
    some = [p for p in step.passes if p.part == part]
    return sum((1 + (part == "update") + p.recompute) * len(p.tree.ids_N) for p in some) / step.read


# ------------------------------------------------------------------------------------------------------------ prices


BOUNDS = ("arithmetic", "bytes", "launches")


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet; bf16 with fp32 sums, without sparsity."""

    name: str
    gb: float
    gb_per_s: float
    tflops: float
    bandwidth_share: float = 0.75  # of both, what is assumed to be reached
    peak_share: float = 0.5
    launch_us: float = 8.0  # assumed: an operation from Python; the H100's is of the one machine that was measured

    def is_called(self, name: str, gb: float) -> bool:
        """Whether a device with this name and memory is this card, not one of its family."""
        return self.name.partition(",")[0] in name and 0.9 < gb / self.gb < 1.15

    def costs(self, op: Op) -> tuple[float, float, float]:
        """Seconds of an operation's arithmetic, of moving its bytes, of launching it."""
        moving = op.bytes / (self.gb_per_s * 1e9 * self.bandwidth_share)
        return op.flops / (self.tflops * 1e12 * self.peak_share), moving, op.launches * self.launch_us / 1e6

    def seconds(self, op: Op) -> float:
        """What an operation takes."""
        return max(self.costs(op))

    def bound(self, op: Op) -> str:
        """Which of the three that is."""
        return max(zip(self.costs(op), BOUNDS, strict=True))[1]


CARDS = (
    Card("RTX 3060, 12 GB", 12, 360, 25.5),
    Card("RTX 4090, 24 GB", 24, 1008, 165),
    Card("A100, 40 GB", 40, 1555, 312),
    Card("H100 80GB HBM3, SXM", 80, 3350, 989, launch_us=40.0),
)
COLD = 1 << 26  # bytes that are more than a cache holds
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)  # bytes that an operation touches
SIDES = (16, 64, 256, 1024)  # smallest sides of products
# Of operations on each number, with how many operands: those of a kind cost alike.
KINDS: dict[str, tuple[int, Any]] = {
    "plain": (2, torch.mul),
    "slow": (1, torch.nn.functional.silu),
    "gather": (1, lambda x: x.index_select(0, torch.arange(len(x)))),
}
# Of products with a side of n: the operands' shapes, the work, and its operations over n.
PRODUCTS: dict[str, tuple[tuple[Any, ...], Any, float]] = {
    "mm": ((lambda n: (512, n), lambda n: (n, 576)), lambda a, b: torch.mm(torch.mm(a, b), b.T), 4 * 512 * 576),
    "bmm": ((lambda n: (12, 192, n), lambda n: (320, 12, n)), lambda a, b: torch.matmul(a, b.permute(1, 2, 0)),
            2 * 12 * 192 * 320),
    "_scaled_dot_product_flash_attention_for_cpu": (
        (lambda n: (4, 3, 192, n), lambda n: (4, 320, 3, n)),
        lambda q, k: torch.nn.functional.scaled_dot_product_attention(
            q, k.transpose(1, 2), k.transpose(1, 2), attn_mask=q.new_zeros(4, 1, 192, 320)), 4 * 12 * 192 * 320),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        (lambda n: (4, 3, 192, n), lambda n: (4, 320, 3, n)),
        lambda q, k: aten._scaled_dot_product_flash_attention_for_cpu_backward(
            q, q, k.transpose(1, 2), k.transpose(1, 2), q, q.new_zeros(4, 3, 192, dtype=torch.float32), 0.0, False,
            attn_mask=q.new_zeros(4, 1, 192, 320)), 10 * 12 * 192 * 320),
}  # fmt: skip
SLOW = ("silu", "silu_backward", "_softmax", "exp", "_log_softmax", "linalg_vector_norm", "rsqrt_")
GATHERS = ("index_select", "index_copy_", "index_add_", "embedding", "index", "clone", "cat")


class Processor:
    """This machine's CPU, measured: one thread, seconds of the process."""

    def __init__(self) -> None:
        dtypes = (torch.float32, torch.bfloat16)
        self.kinds = {(kind, dtype): [self._of_bytes(*of, dtype, size) for size in SIZES]
                      for kind, of in KINDS.items() for dtype in dtypes}  # fmt: skip
        self.products = {(kind, dtype): [self._of_products(kind, dtype, side) for side in SIDES]
                         for kind in PRODUCTS for dtype in dtypes}  # fmt: skip
        self.python = self._of_an_operation() - self.kinds["plain", torch.float32][0]

    @staticmethod
    def _timed(work: Any, items: list[Any]) -> float:
        """Seconds of ``work`` on each of ``items`` in turn, over and over for a fifth of a second."""
        count, start = 0, time.process_time()
        made = [None] * len(items)  # what comes out is not in a cache either
        while (spent := time.process_time() - start) < 0.2:
            for i, item in enumerate(items):
                made[i] = work(item)
            count += len(items)
        return spent / count

    def _of_bytes(self, operands: int, function: Any, dtype: torch.dtype, size: int) -> float:
        """Seconds of an operation that reads and writes so many bytes, which no cache holds."""
        shape = (operands, max(size // dtype.itemsize // (operands + 1) // 64, 1), 64)
        many = [torch.randn(shape).to(dtype) for _ in range(min(max(COLD // size, 1), 256))]
        return self._timed(lambda x: function(*x), many)

    def _of_an_operation(self) -> float:
        """Seconds of one of the network's operations on next to nothing, the program's own Python included."""
        config = make_model(64, 16, 2, 0.15, 0, "qwen3").config
        trunk, counter = (
            trunk_of(config, ModelConfig(use_4bit=False, dtype="float32"), LoraConfig(), 2, Counter()),
            Counter(),
        )
        tree = grow([TreeRow([1])], [[0]], None, network.CUTS[0])
        with torch.no_grad():
            with counter:
                network.run_trunk(trunk, tree)
            return self._timed(lambda _: network.run_trunk(trunk, tree), [None]) / counter.launches

    def _of_products(self, kind: str, dtype: torch.dtype, side: int) -> float:
        """Operations a second of products with such a smallest side."""
        shapes, work, flops = PRODUCTS[kind]
        size = dtype.itemsize * sum(math.prod(shape(side)) for shape in shapes)
        many = [[torch.randn(shape(side)).to(dtype) for shape in shapes] for _ in range(min(max(COLD // size, 1), 64))]
        return flops * side / self._timed(lambda given: work(*given), many)

    def seconds(self, op: Op) -> float:
        """What an operation takes."""
        kind = "slow" if op.name in SLOW else "gather" if op.name in GATHERS else "plain"
        dtype = op.dtype if op.dtype == torch.bfloat16 else torch.float32
        moving = float(np.interp(op.bytes, SIZES, self.kinds[kind, dtype]))
        if not op.flops:
            return moving + self.python
        rate = np.interp(
            math.log(max(op.least, 1)),
            [math.log(side) for side in SIDES],
            self.products[op.name if op.name in PRODUCTS else "mm", op.dtype],
        )
        reading = float(np.interp(op.bytes, SIZES, self.kinds["plain", torch.float32]))
        return self.python + max(op.flops / float(rate), reading)


def priced(device: Any, ops: Seq[tuple[Op, float]]) -> float:
    """Seconds of operations on a device."""
    return sum(device.seconds(op) * times for op, times in ops)


# ------------------------------------------------------------------------------------------------------------- tables


def whole_step(step: Step, config: SimpleNamespace, architecture: Any) -> dict[str, list[tuple[Op, int]]]:
    """A GPU's operations of each part of a step; to the layers come the optimizer and the legal mass's vocabulary."""
    parts = {part: [p for p in step.passes if p.part == part] for part in ("rollout", "score", "update")}
    found = {part: counted(passes, config, architecture) for part, passes in parts.items()}
    trained = count_parameters(config.lora, architecture).trainable
    adam = Op(
        "adam", 0, 48 * trained, 100, torch.float32
    )  # gradient twice for its norm, weights and moments in and out
    part = "update" if config.ppo.legal_mass_coef else "score"
    rows = sum(len(p.tree.reads_U) for p in parts[part])
    logits = rows * architecture.vocab_size
    size = 2 * architecture.vocab_size * architecture.hidden_size + 24 * logits
    mass = Op("mass", 2 * logits * architecture.hidden_size, size, 10, torch.bfloat16)
    found[part].append((mass, 3 if part == "update" else 1))  # forwards, then once more and backwards
    found["update"].append((adam, step.updates))
    return found


def card_rows(name: str, four_bit: bool, cards: Seq[Card], sets: Seq[str] = (), steps: int = 6) -> list[Row]:
    """A row a card: seconds of a step of the default configuration's first stage, the mean of some, and peak memory."""
    shape = next(s for s in SHAPES if s.name == name)
    architecture = architecture_of(shape)
    with tempfile.TemporaryDirectory() as folder:
        architecture.save_pretrained(folder)
        tokenizer(shape.architecture).save_pretrained(folder)
        options = [f"model.model_name={folder}", f"model.use_4bit={json.dumps(four_bit)}", *sets]
        config = read_config(parse_args([*(a for o in options for a in ("--set", o)), "--no-wandb"], None))
        torch.set_num_threads(1)
        processor, played, host = Processor(), list[Step](), 0.0
        for seed in range(steps):
            config.run = replace(config.run, seed=seed)
            with tempfile.TemporaryDirectory() as small:
                step, other = play_steps(narrow(config, Path(small)), gpu=True)
            played.append(step)
            host += host_seconds(processor, step, other) / steps
        measured = preflight.measure_prompts(config, ChatFormat(load_tokenizer(config.model)))
        gpu = SimpleNamespace(**vars(config) | {"model": replace(config.model, device="cuda")})
        held = memory.estimate(gpu, count_parameters(config.lora, architecture), architecture, measured)
    again = [whole_step(step, config, architecture) for step in played]
    for p in (p for step in played for p in step.passes):
        p.recompute = False
    kept = [whole_step(step, config, architecture) for step in played]
    tokens = max(len(p.tree.ids_N) for step in played for p in step.passes if p.part == "update")
    layer = network.activation_bytes(architecture, config.lora.target_modules, 2)
    always = sum(memory.held(gpu, count_parameters(config.lora, architecture)).values())
    rows = []
    for card in cards:
        layers_kept = network.layers_kept(card.gb * 1e9 - always, tokens, architecture, layer, 2)
        share = layers_kept / architecture.num_hidden_layers
        mixed = [[(op, n * part) for ops, part in ((a["update"], 1 - share), (k["update"], share)) for op, n in ops]
                 for a, k in zip(again, kept, strict=True)]  # fmt: skip
        whole = [step | {"update": update} for step, update in zip(again, mixed, strict=True)]
        parts = {p: sum(priced(card, w[p]) for w in whole) / steps for p in ("rollout", "score", "update")}
        ops = [op for w in whole for part in w.values() for op in part]
        total = sum(card.seconds(op) * n for op, n in ops)
        bound = {why: sum(card.seconds(op) * n for op, n in ops if card.bound(op) == why) / total for why in BOUNDS}
        rows.append({"card": card.name, "model": name, "base": "NF4" if four_bit else "bf16",
                     **{f"{p} s": s for p, s in parts.items()}, "host s": host, "step s": sum(parts.values()) + host,
                     "layers kept": layers_kept, "peak GB": memory.peak(held) / 1e9,
                     **{why: f"{share:.0%}" for why, share in bound.items()}})  # fmt: skip
    return rows


def host_seconds(processor: Processor, step: Step, other: Step) -> float:
    """What a step took here beside the network's operations; they were counted in ``other``."""
    return step.seconds - priced(processor, other.ops) * step.decisions / other.decisions


def check_row(preset: str, sets: Seq[str]) -> Row:
    """A preset's step on this CPU, predicted and measured."""
    config = read_config(parse_args(["--config", preset, "--no-wandb", *(a for o in sets for a in ("--set", o))], None))
    torch.set_num_threads(1)
    cpu_memory.keep_freed()
    processor = Processor()
    with tempfile.TemporaryDirectory() as folder:
        small, small_counted = play_steps(narrow(config, Path(folder)))
    step, other = play_steps(config)
    host = host_seconds(processor, small, small_counted) * step.decisions / small.decisions
    ops_s = priced(processor, other.ops) * step.decisions / other.decisions  # of the step after, with as many games
    return {"preset": preset, "set": " ".join(sets), "ops": len(other.ops), "ops s": ops_s, "host s": host,
            "predicted s": ops_s + host, "measured s": step.seconds,
            "predicted / measured": (ops_s + host) / step.seconds}  # fmt: skip


SMOL = ["model.dtype=bfloat16", "ppo.batch_size=32", "ppo.mini_batch_size=8"]


def main(argv: list[str] | None = None) -> int:
    """Print one of the two tables."""
    add = (flags := parser(__doc__)).add_argument
    add("--check", nargs="+", choices=("tiny", "smol"), default=[], help="predicted and measured here")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE")
    args = flags.parse_args(argv)
    if args.check:
        rows = [
            check_row(f"config/presets/{name}.json", [*(SMOL if name == "smol" else []), *args.set])
            for name in args.check
        ]
    else:
        kinds = [("Qwen3-4B", True), ("Qwen3-4B", False), ("Qwen2.5-3B", True)]
        rows = [row for name, four_bit in kinds for row in card_rows(name, four_bit, CARDS, args.set)]
    print(table(rows))
    write(args.json, {"set": args.set}, rows, {})
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
