"""Record the games that gpu.sh plays, and the part of Qwen's tokenizer that they need.

    python benchmarks/record_prompts.py QWEN_TIKTOKEN

Writes ``benchmarks/prompts.json`` (what a seat is shown in random play of five games: full prompts, random opponents)
and ``benchmarks/tokenizer.json``. ``QWEN_TIKTOKEN`` holds Qwen's byte-pair ranks, one ``base64 rank`` a line; the wheel
``dashscope`` carries it as ``resources/qwen.tiktoken``. With the two files a machine without the Hub
measures prompts of the true length in true tokens.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from env_wrapper import make_env
from envs.config import EnvConfig
from envs.types import Task
from utils import uniform

HERE = Path(__file__).resolve().parent
GAMES = {"leduc_poker": 200_000_000, "liars_dice": 100_000_000, "goofspiel": 0,
         "hex-5": 600_000_000, "clobber-5": 700_000_000}  # fmt: skip
EPISODES = 8
# As in the tokenizer.json of Qwen2.5 and Qwen3: how text is cut before byte pairs merge, and ids of control tokens.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645,
           "<think>": 151667, "</think>": 151668}  # fmt: skip
TEMPLATE_WORDS = "system\nuser\nassistant\n\n"

Pair = tuple[bytes, bytes]


def record(task_id: int, seed: int) -> dict[str, Any]:
    """One game of random play, as its own seat sees it: [text, legal ids] a turn, forced ones too."""
    env = make_env(EnvConfig())
    step = env.reset(Task(task_id, seed))
    game = {"seat": step.info["seat"], "system": step.info["system"], "turns": []}
    while not step.done:
        legal = list(step.legal)
        game["turns"].append([step.text, legal])
        step = env.step(str(legal[int(uniform(seed, len(game["turns"])) * len(legal))]))
    return game | {"score": step.score}


def merge(ranks: dict[bytes, int], word: bytes, below: int) -> list[bytes]:
    """Byte-pair encoding of a word with the merges whose rank is less than ``below``."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while len(parts) > 1:
        rank, i = min((ranks.get(parts[i] + parts[i + 1], below), i) for i in range(len(parts) - 1))
        if rank >= below:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def needed(ranks: dict[bytes, int], words: set[bytes]) -> tuple[set[bytes], list[Pair]]:
    """The tokens of the words with all that merge into them, and those merges in order."""
    todo = {part for word in words for part in merge(ranks, word, len(ranks))}
    tokens, merges = {bytes([b]) for b in range(256)}, {}
    while todo:
        token = todo.pop()
        if token not in tokens:
            left, right = merge(ranks, token, ranks[token])
            merges[left, right] = ranks[token]
            tokens.add(token)
            todo |= {left, right}
    return tokens, sorted(merges, key=lambda pair: merges[pair])


def make_tokenizer(ranks: dict[bytes, int], words: set[bytes]) -> Any:
    """A tokenizer with Qwen's ids that cuts ``words`` as Qwen's does."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokens, merges = needed(ranks, words)
    letters = bytes_to_unicode()

    def written(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    vocab = {written(token): ranks[token] for token in tokens} | CONTROL
    tokenizer = Tokenizer(models.BPE(vocab, [(written(a), written(b)) for a, b in merges]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=not token.endswith("think>")) for token in CONTROL])
    return tokenizer


def small_tokenizer(ranks: dict[bytes, int], texts: list[str]) -> Any:
    """One that knows what ``texts`` need, and cuts them as Qwen's does (checked)."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    words = [[word.encode() for word, _ in split.pre_tokenize_str(text)] for text in texts]
    tokenizer = make_tokenizer(ranks, {word for text in words for word in text})
    for text, cut in zip(texts, words, strict=True):
        assert tokenizer.encode(text).ids == [ranks[t] for word in cut for t in merge(ranks, word, len(ranks))], text
    return tokenizer


def read_ranks(file: Path) -> dict[bytes, int]:
    """Token -> rank, which is its id."""
    return {base64.b64decode(token): int(rank) for token, rank in map(str.split, file.read_text().splitlines())}


def all_texts(games: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Everything that was shown."""
    yield TEMPLATE_WORDS
    for episodes in games.values():
        for episode in episodes:
            yield episode["system"]
            yield from (text for text, _ in episode["turns"])


def main(argv: list[str] | None = None) -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=Path, metavar="QWEN_TIKTOKEN")
    ranks = read_ranks(parser.parse_args(argv).ranks)
    games = {name: [record(task_id, seed) for seed in range(EPISODES)] for name, task_id in GAMES.items()}
    small_tokenizer(ranks, list(all_texts(games))).save(str(HERE / "tokenizer.json"), pretty=False)
    for episodes in games.values():
        assert len({episode.pop("system") for episode in episodes[1:]} | {episodes[0]["system"]}) == 1
    rows = [f"{json.dumps(name)}: {json.dumps(episodes)}" for name, episodes in games.items()]
    (HERE / "prompts.json").write_text("{" + ",\n".join(rows) + "}\n")


if __name__ == "__main__":
    main()
