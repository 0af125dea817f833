"""Make an ordinary model folder out of a GGUF file, so that a run can start from it.

    python scripts/import_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-135m
    python scripts/import_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-135m --dtype float16

The weights are dequantised: the folder holds the values that the file stands for, as safetensors, with tokenizer, chat
template and configuration.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config.flags import FlagParser
from policy.model import ModelConfig, load_architecture, quietly, whole
from training.process import must_be_writable, run_program
from utils import ConfigError, write_directory


def load(file: Path, dtype: str) -> tuple[Any, Any]:
    """Model (plain weights, in ``dtype``) and tokenizer of a GGUF file.

    Raises:
        ConfigError: there is no such file, or what is in it cannot be used.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from policy.chat import ChatFormat

    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    options: dict[str, Any] = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    with tempfile.TemporaryDirectory() as alone, quietly():  # what lies beside it is not its own
        (Path(alone) / file.name).symlink_to(file.resolve())
        try:
            load_architecture(ModelConfig(alone), gguf_file=file.name)
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=file.name)
            loaded = AutoModelForCausalLM.from_pretrained(
                alone, gguf_file=file.name, output_loading_info=True, **options
            )
        except Exception as error:  # somebody's file: cut short, of another format, of types that nobody knows
            cause = " ".join(str(error).replace(alone, str(file.parent)).split())[:300]
            raise ConfigError(f"{file}: cannot be read ({cause})") from error
    ChatFormat(tokenizer)
    model = whole(loaded, f"{file}:")
    if wrong := [name for name, weight in model.named_parameters() if not torch.isfinite(weight).all()]:
        raise ConfigError(f"{file}: {wrong[0]} holds numbers that are not finite")
    model = model.to(getattr(torch, dtype))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
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
