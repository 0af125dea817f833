"""Make an ordinary model folder out of a GGUF file, so that a run can start from it.

    python scripts/import_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-135m
    python scripts/import_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-135m --dtype float16

The weights are dequantised: the folder holds the values that the file stands for, as safetensors, with tokenizer, chat
template and configuration.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config.flags import FlagParser
from policy.model import ModelConfig, load_architecture, quietly, whole
from training.process import must_be_writable, run_program
from utils import ConfigError, write_directory

# How text is cut before merges: digits apart, then as GPT-2 (https://github.com/ggml-org/llama.cpp, llama-vocab.cpp).
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell")
AS_GPT_2 = ("", "gpt-2")
TENSORS = (r"(token_embd|output|output_norm)\.weight"
           r"|blk\.\d+\.((attn_(q|k|v|output|norm)|ffn_(gate|up|down|norm))\.weight{})")  # fmt: skip
OWN = {"qwen2": r"|attn_[qkv]\.bias", "qwen3": r"|attn_[qk]_norm\.weight"}  # architecture -> what only its layers have


def read_cut(file: Path) -> str:
    """How the file's tokenizer cuts text (``tokenizer.ggml.pre``).

    Raises:
        ConfigError: it is not known here, or the file holds what transformers would leave out in silence.
    """
    from gguf import GGUFReader
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    reader = GGUFReader(file)
    asked = ("general.architecture", "tokenizer.ggml.pre", "tokenizer.ggml.model", ".scaling.type")
    told = {key: field.contents() for key, field in reader.fields.items() if key.endswith(asked)}
    cut, own = str(told.pop("tokenizer.ggml.pre", "")), OWN.get(told.pop("general.architecture", ""), "")
    cut = cut if told.pop("tokenizer.ggml.model", "") == "gpt2" else ""  # SentencePiece cuts in its own way
    if cut not in (*GGUF_PRE_TOKENIZER_SPLITS, *DIGITS_APART, *AS_GPT_2):
        raise ConfigError(f"tokenizer.ggml.pre {cut!r}: how it cuts text is not known here")
    if scaled := next((f"{key} {value!r}" for key, value in told.items() if value != "none"), ""):
        raise ConfigError(f"{scaled}: scaled positions are not read")
    known = re.compile(TENSORS.format(own))
    if odd := next((tensor.name for tensor in reader.tensors if not known.fullmatch(tensor.name)), ""):
        raise ConfigError(f"{odd!r}: a tensor that has no place in the model")
    return cut


def load(file: Path, dtype: str) -> tuple[Any, Any]:
    """Model (plain weights, in ``dtype``) and tokenizer of a GGUF file.

    Raises:
        ConfigError: there is no such file, or what is in it cannot be used.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from policy.chat import ChatFormat

    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    options: dict[str, Any] = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    with tempfile.TemporaryDirectory() as alone, quietly():  # what lies beside it is not its own
        (Path(alone) / file.name).symlink_to(file.resolve())
        try:
            load_architecture(ModelConfig(alone), gguf_file=file.name)
            cut = read_cut(Path(alone) / file.name)
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=file.name)
            loaded = AutoModelForCausalLM.from_pretrained(
                alone, gguf_file=file.name, output_loading_info=True, **options
            )
        except Exception as error:  # somebody's file: cut short, of another format, of types that nobody knows
            cause = " ".join(str(error).replace(alone, str(file.parent)).split())[:300]
            raise ConfigError(f"{file}: cannot be read ({cause})") from error
    if cut in DIGITS_APART:  # transformers knows none of them, and cuts as GPT-2 alone
        apart = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(apart)
    ends = ChatFormat(tokenizer, tokenizer.eos_token_id).ends
    model = whole(loaded, f"{file}:")
    if wrong := [name for name, weight in model.named_parameters() if not torch.isfinite(weight).all()]:
        raise ConfigError(f"{file}: {wrong[0]} holds numbers that are not finite")
    model = model.to(getattr(torch, dtype))
    model.generation_config.eos_token_id = ends
    return model, tokenizer


def main(argv: list[str] | None = None) -> int:
    """Write the folder."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE.gguf")
    parser.add_argument("output", type=Path, metavar="FOLDER")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    args = parser.parse_args(argv)
    args.output = args.output.resolve()  # what a link leads to

    def run() -> None:
        if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
            raise ConfigError(f"{args.output} is there already: choose another folder")
        must_be_writable(args.output.parent)
        model, tokenizer = load(args.file, args.dtype)

        def fill(folder: Path) -> None:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        write_directory(args.output, fill)  # half a model would pass for one
        size = f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens"
        print(f"{args.output}: {model.config.model_type}, {size}")

    return run_program(run)


if __name__ == "__main__":
    sys.exit(main())
