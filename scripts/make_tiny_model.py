"""Build a tiny Qwen2-architecture chat model and its tokenizer, offline, in seconds.

    python scripts/make_tiny_model.py models/tiny
    python scripts/make_tiny_model.py models/wider --hidden 128 --layers 4 --seed 0

The base is random and stays frozen: everything a run learns is in the LoRA adapter and the value head. What makes such
a base useful is an initializer range well above the library's 0.02 (docs/log.md).
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import config.start  # noqa: F401, before libraries load

from config.flags import FlagParser
from env_wrapper import play
from envs.config import EnvConfig
from envs.types import Action, Task
from games import CONFIGS_PER_GAME, NAMES
from training.process import at_least, must_be_writable, run_program
from utils import ConfigError, fingerprint, naming, read_json, uniform, write_directory, write_file

PAD, END = 0, 1  # ids of <|endoftext|> and <|im_end|>
# Two tokens a message instead of ChatML's five, which would be many beside prompts of 8 to 18 tokens.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'assistant' %}{{ '<|im_start|>' }}{% endif %}"
    "{{ m.content + '<|im_end|>' }}{% endfor %}"
)
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
WRITTEN = {"chat_template.jinja", "config.json", "generation_config.json", "recipe.json", "special_tokens_map.json",
           "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
TEACHING_GAMES = ("leduc_poker", "tic_tac_toe", "kuhn_poker", "connect_four", "liars_dice_small",
                  "goofspiel_small", "hex_small")  # fmt: skip


def prompts(games: Sequence[str], episodes: int) -> list[str]:
    """The messages, in compact form, that a model reads in ``episodes`` random games of each of ``games``.

    System messages are cut after the game's name: with the variant they would lead to another tokenizer, and so to
    another model for each seed.
    """
    seen: list[str] = []

    class PromptCollector:
        def act(self, queries):
            for system, *rest in (q.conversation for q in queries):
                seen.extend([system["content"].partition(" ")[0], *(m["content"] for m in rest)])
            picks = [list(q.legal)[int(uniform(*q.rng_key) * len(q.legal))] for q in queries]
            return [Action(str(pick)) for pick in picks]

    tasks = [
        Task(NAMES.index(name) * CONFIGS_PER_GAME + i % 3, seed=i, index=i) for name in games for i in range(episodes)
    ]
    play(EnvConfig(prompt="compact", history_turns=0), PromptCollector(), tasks)
    return seen


def make_tokenizer(texts: Iterable[str], vocab_size: int):
    """Train a byte-level BPE of at most ``vocab_size`` tokens that splits text as Qwen's does (digits apart)."""
    from transformers import Qwen2Tokenizer

    empty = Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast = empty.train_new_from_iterator(texts, vocab_size, new_special_tokens=["<|im_start|>"], show_progress=False)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(vocab_size: int, hidden: int, layers: int, init_range: float, seed: int, architecture: str = "qwen2"):
    """Return a randomly initialised Qwen2, Qwen3 or Llama causal LM (fp32, tied embeddings)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=init_range,
        bos_token_id=None,
        pad_token_id=PAD,
        eos_token_id=END,
        **({"head_dim": hidden // 4} if architecture == "qwen3" else {}),  # its default is 128 at every size
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def main(argv: list[str] | None = None) -> int:
    """Write model, tokenizer and recipe.json to a folder, unless it holds the same already."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("output", type=Path, nargs="?", default=Path("models/tiny"))
    add("--hidden", type=at_least(8, 2**14), default=64, help="hidden size, a multiple of 8 (default %(default)s)")
    add("--layers", type=at_least(1, 1000), default=2, help="default %(default)s")
    add("--vocab", type=at_least(300, 2**20), default=1024, help="at most (default %(default)s; the texts give 529)")
    add("--init-range", type=at_least(0.0, 10.0), default=0.2, help="default %(default)s")
    add("--architecture", choices=("qwen2", "qwen3", "llama"), default="qwen2", help="default %(default)s")
    add("--seed", type=at_least(0, 2**31 - 1), default=2, help="of the weights (default 2: plays about as chance)")
    args = parser.parse_args(argv)
    if args.hidden % 8:
        parser.error(f"--hidden {args.hidden}: expected a multiple of 8")
    return run_program(lambda: run(args))


def _files(folder: Path) -> dict[str, Any]:
    return {path.name: fingerprint(path) for path in sorted(folder.iterdir()) if path.name != "recipe.json"}


def run(args: argparse.Namespace) -> None:
    """Make the model, unless it is there."""
    from transformers.utils import logging

    must_be_writable(args.output)
    recipe_file, present = args.output / "recipe.json", {path.name for path in args.output.iterdir()}
    weights = {name for name in present if WEIGHTS.fullmatch(name)}
    if present - WRITTEN - weights or (present and not recipe_file.exists()):
        raise ConfigError(f"{args.output}: holds files of yours, which would be replaced; name another folder")
    texts = prompts(TEACHING_GAMES, 300)
    recipe = {k: v for k, v in vars(args).items() if k != "output"}
    recipe["texts"] = hashlib.sha256("\0".join(texts).encode()).hexdigest()  # they determine the tokenizer
    old_recipe = read_json(recipe_file) if weights else {}
    old_files = old_recipe.pop("files", None) if isinstance(old_recipe, dict) else None
    if old_recipe == recipe and old_files in (None, _files(args.output)):  # None: from before files were recorded
        with naming(f"{args.output}: "):  # make compares its time
            write_file(recipe_file, json.dumps(recipe | {"files": _files(args.output)}, indent=1).encode())
        print(f"{args.output} is already there")
        return
    logging.disable_progress_bar()
    tokenizer = make_tokenizer(texts, args.vocab)
    model = make_model(len(tokenizer), args.hidden, args.layers, args.init_range, args.seed, args.architecture)

    def fill(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "recipe.json").write_text(json.dumps(recipe | {"files": _files(folder)}, indent=1))

    folder = args.output.resolve()
    with naming(f"{args.output}: "):
        if weights and old_recipe != recipe:  # runs on the old model can be resumed with no other: keep a copy
            aside = folder.with_name(f"{folder.name}-{fingerprint(recipe_file)['sha256'][:8]}")
            if not aside.exists():
                write_directory(aside, lambda copy: shutil.copytree(folder, copy, dirs_exist_ok=True))
                print(f"the model that was there is now {aside}; its runs go on with --resume RUN --force-config "
                      f"--set model.model_name={aside}")  # fmt: skip
        write_directory(folder, fill)
    print(f"{args.output}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    sys.exit(main())
