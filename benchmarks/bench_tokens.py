"""Tokens of the full prompt in Qwen's true vocabulary for every game, and what a step of a 3B model would take.

    python benchmarks/bench_tokens.py QWEN_TIKTOKEN [--model Qwen2.5-3B] [--json FILE]

``QWEN_TIKTOKEN``: see ``record_prompts.py``. Tokens are counted in up to four games of random play with the default
configuration; weights are not needed. Memory and times are predictions: memory as ``--dry-run`` estimates it, times
from the cards' data sheets (memory bandwidth, and dense bf16 products with fp32 sums, which are twice the card's fp32
rate) at the shares of them that ``USED`` assumes. Games of a step advance together: each pass over the model reads and
unpacks the 4-bit weights once, and its tokens cost their products; what games share is counted anew for each.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, table, write
from benchmarks.record_prompts import make_tokenizer, read_ranks
from chat import ChatFormat
from curriculum import CurriculumConfig, Stage
from games import NAMES
from model import load_architecture, load_tokenizer
from options import parse_args, read_config
from preflight import GB, Parameters, Prompts, count_parameters, measure_prompts, memory, peak
from tests.shapes import SHAPES, write_model


class Card(NamedTuple):
    """From the maker's data sheet."""

    name: str
    gigabytes: int
    bandwidth: float  # bytes a second
    products: float  # floating point operations a second


CARDS = [
    Card("RTX 3060, 12 GB", 12, 360e9, 25.5e12),
    Card("RTX 4060 Ti, 16 GB", 16, 288e9, 44.1e12),
    Card("RTX 3090, 24 GB", 24, 936e9, 71.2e12),
    Card("RTX 4090, 24 GB", 24, 1008e9, 165.2e12),
]
USED = {"bandwidth": 0.7, "products": 0.5}  # what a program gets of a data sheet's figures: an assumption
UNPACKED_BYTES = 0.5 + 2 + 2  # a 4-bit weight read, written as bf16, and read again
STEPS_GAMES = ("leduc_poker", "liars_dice")


def put_true_tokenizer(folder: Path, ranks: Path) -> None:
    """Replace the tokenizer in ``folder`` by Qwen's own; the chat template stays."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    template, known = AutoTokenizer.from_pretrained(folder).chat_template, read_ranks(ranks)
    PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(known, set(known)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    ).save_pretrained(folder)


def configuration(folder: Path, games: tuple[str, ...]) -> SimpleNamespace:
    """The default one with these games."""
    config = read_config(parse_args(["--set", f"model.model_name={folder}", "--set", "ppo.max_seq_length=32768"], None))
    config.curriculum = CurriculumConfig([Stage("all", list(games))])
    return config


def token_row(p: Prompts) -> Row:
    """Tokens of one game."""
    games, spread = len(p.episodes), [*p.first, *p.later]
    return {
        "game": p.game, "decisions a game": p.decisions / games, "first prompt": sum(p.first) / len(p.first),
        "a later turn": sum(p.later) / len(p.later) if p.later else None,
        "tokens a decision": sum(spread) / len(spread), "tokens a game": p.read / games, "longest": max(p.longest),
    }  # fmt: skip


def seconds(config: SimpleNamespace, parameters: Parameters, p: Prompts, card: Card) -> dict[str, float]:
    """Predicted seconds of a step of games like ``p``, by part."""
    ppo, weights = config.ppo, sum(parameters.linears)
    unpacked = weights * UNPACKED_BYTES / (card.bandwidth * USED["bandwidth"])  # a pass over all weights
    tokens = ppo.batch_size * p.read / len(p.episodes)
    forward = 2 * weights * tokens / (card.products * USED["products"])
    turns = max(sum(episode.info["n_decisions"].values()) for episode in p.episodes)
    batches = max(ppo.batch_size / ppo.mini_batch_size, math.ceil(tokens / config.model.tokens_per_batch))
    passes = 3 if config.model.gradient_checkpointing else 2  # forward, again for the backward pass, backward
    return {
        "rollout": turns * p.answer * unpacked + forward,
        "score": (ppo.recompute_logprobs + (ppo.init_kl_coef > 0)) * (unpacked * math.ceil(tokens / 4096) + forward),
        "update": ppo.ppo_epochs * passes * (unpacked * batches + forward),
    }


def card_row(card: Card, config: SimpleNamespace, parameters: Parameters, measured: dict[int, Prompts]) -> Row:
    """Memory and time of a step on a card, and the largest step that fits it."""
    architecture = load_architecture(config.model)
    bytes_needed = peak(memory(config, parameters, architecture, measured))
    parts = [seconds(config, parameters, p, card) for p in measured.values()]
    mean = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    most = config.ppo.batch_size

    def needed(games: int) -> float:
        env, ppo = replace(config.env, games_at_once=games), replace(config.ppo, batch_size=games)
        larger = SimpleNamespace(**vars(config) | {"env": env, "ppo": ppo})
        return peak(memory(larger, parameters, architecture, measured))

    while needed(2 * most) < 0.95 * card.gigabytes * GB:
        most *= 2
    columns = {f"{name} s": value for name, value in mean.items()}
    return {
        "card": card.name, "games a step": config.ppo.batch_size, "peak GB": bytes_needed / GB, **columns,
        "step s": sum(mean.values()), "most games at once": most,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Count, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=Path, metavar="QWEN_TIKTOKEN")
    parser.add_argument("--model", choices=sorted(SHAPES), default="Qwen2.5-3B")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(args.model, Path(name))
        put_true_tokenizer(folder, args.ranks)
        every, few = configuration(folder, tuple(NAMES)), configuration(folder, STEPS_GAMES)
        chat = ChatFormat(load_tokenizer(every.model))
        tokens = [token_row(p) for p in measure_prompts(every, chat).values()]
        print(table(tokens), "\n", flush=True)
        parameters = count_parameters(few.model, few.lora, load_architecture(few.model))
        measured = measure_prompts(few, chat)
        cards = [card_row(card, few, parameters, measured) for card in CARDS]
    print(f"{args.model} in 4 bits, predicted: {few.ppo.batch_size} games of {' or '.join(STEPS_GAMES)} a step\n")
    print(table(cards))
    write(args.json, {"model": args.model, "used": USED}, tokens + cards, {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
