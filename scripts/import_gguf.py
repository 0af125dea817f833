"""Convert a GGUF file to an ordinary model folder that a run can start from.

    python scripts/import_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-135m
    python scripts/import_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-135m --dtype float16

The weights are dequantised and written as safetensors, with tokenizer, chat template and configuration.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import config.start  # noqa: F401, before libraries load

from config.flags import FlagParser
from envs.client import one_line
from policy.bounded import check_weights
from policy.model import REPORTED, ModelConfig, load_architecture, quietly, whole
from training.process import must_be_writable, run_program
from utils import ConfigError, write_directory

# Pre-tokenizers that split off single digits, then split as GPT-2's does (llama-vocab.cpp of
# https://github.com/ggml-org/llama.cpp).
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell")
AS_GPT_2 = ("", "gpt-2")
TENSORS = (r"(token_embd|output|output_norm)\.weight"
           r"|blk\.(?P<layer>\d+)\.((attn_(q|k|v|output|norm)|ffn_(gate|up|down|norm))\.weight{})")  # fmt: skip
# What llama.cpp does not read a file without; where one is missing, transformers takes a default.
NEEDED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
          "attention.layer_norm_rms_epsilon")  # fmt: skip
# What transformers leaves out -> values that change nothing. llama.cpp takes an absent type for linear, and reads the
# factor's older name, scale_linear.
LEFT_OUT = {"rope.scaling.type": ("none",), "rope.scaling.factor": (0, 1), "rope.scale_linear": (0, 1),
            "rope.scaling.attn_factor": (1,)}  # fmt: skip
OWN = {"qwen2": r"|attn_[qkv]\.bias", "qwen3": r"|attn_[qk]_norm\.weight"}  # architecture -> tensors only it has


def read_pre_tokenizer(file: Path) -> str:
    """The file's ``tokenizer.ggml.pre``: how its tokenizer splits text before merges; "" for SentencePiece.

    ConfigError: it is unknown here, or the file lacks or holds something that transformers would silently make up or
    ignore.
    """
    from gguf import GGUFReader
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    reader = GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items() if len(field.types) == 1}  # no arrays
    kind = fields.get("general.architecture", "")
    pre = str(fields.get("tokenizer.ggml.pre", "")) if fields.get("tokenizer.ggml.model") == "gpt2" else ""
    if pre not in (*GGUF_PRE_TOKENIZER_SPLITS, *DIGITS_APART, *AS_GPT_2):
        raise ConfigError(f"tokenizer.ggml.pre {pre!r}: how it splits text is not known here")
    if lost := [key for key in NEEDED if f"{kind}.{key}" not in fields]:
        raise ConfigError(f"lacks {kind}.{lost[0]}")
    for key, harmless in LEFT_OUT.items():
        if (value := fields.get(f"{kind}.{key}", harmless[0])) not in harmless:
            raise ConfigError(f"{kind}.{key} {value!r}: scaled positions are not supported")
    known = re.compile(TENSORS.format(OWN.get(kind, "")))
    for name in (tensor.name for tensor in reader.tensors):
        place = known.fullmatch(name)
        if not place or int(place["layer"] or 0) >= fields[f"{kind}.block_count"]:
            raise ConfigError(f"{name!r}: a tensor that has no place in the model")
    return pre


def load(file: Path, dtype: str) -> tuple[Any, Any]:
    """Model (plain weights, in ``dtype``) and tokenizer of a GGUF file; ConfigError: it is missing or unusable."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from policy.chat import ChatFormat

    if not file.is_file():
        raise ConfigError(f"{file}: is a folder; expected a file .gguf" if file.is_dir() else f"{file}: no such file")
    options: dict[str, Any] = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    with tempfile.TemporaryDirectory() as folder, quietly():  # alone in it: transformers would read files beside it
        (Path(folder) / file.name).symlink_to(file.resolve())
        try:
            check_weights(load_architecture(ModelConfig(folder), gguf_file=file.name), [file], file.name, bits=1)
            pre = read_pre_tokenizer(Path(folder) / file.name)
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
            if pre in DIGITS_APART:  # transformers knows none of these and only splits as GPT-2's does
                splits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
                tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splits)
            ends = ChatFormat(tokenizer, tokenizer.eos_token_id).ends
            loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, **REPORTED, **options)
        except Exception as error:  # the file may be truncated, of another format or of unknown tensor types
            cause = one_line(str(error).removeprefix("model.model_name: ").replace(folder, str(file.parent)), 300)
            raise ConfigError(f"{file}: cannot be used ({cause})") from error
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
    add = parser.add_argument
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="default %(default)s")
    args = parser.parse_args(argv)
    args.output = args.output.resolve()  # a link's target is written, not the link replaced

    def run() -> None:
        if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
            raise ConfigError(f"{args.output} is there already: choose another folder")
        must_be_writable(args.output.parent)
        model, tokenizer = load(args.file, args.dtype)

        def fill(folder: Path) -> None:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        write_directory(args.output, fill)  # never half a model, which could be taken for a whole one
        size = f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens"
        print(f"{args.output}: {model.config.model_type}, {size}")

    return run_program(run)


if __name__ == "__main__":
    sys.exit(main())
