"""The base model and its adapter: which ones, how they are loaded and held in memory, and what is refused."""

import functools
import importlib.util
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from config.reader import ConfigError, blaming, check_values, knob
from envs.client import hub_problem
from games import own_digest
from policy import cpu_memory
from policy.bounded import SIZES, bounded, check_folder, check_growth, check_redirects, check_sizes, check_weights
from policy.layers import check_layers
from utils import checkpoints_in, fingerprint, in_threads, verify_checkpoint

log = logging.getLogger(__name__)

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ARCHITECTURES = ("qwen2", "qwen3", "llama")
FULL = "full_attention"  # the only kind of layer that is computed here
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a tokenizer has at least one of them
INDEX = "https://download.pytorch.org/whl/"
ON_CPU: Any = {"torch_device": "cpu"}  # else PEFT reads a file onto the first GPU, whatever device the model is on
ADAPTER_SECONDS, ADAPTER_BYTES = 60.0, 2**35  # limits on PEFT loading an adapter: it may name layers by regexes
REPORTED: Any = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # for ``whole``, which names them
ROOT = Path(__file__).parents[1]
REWRITES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")  # such ``init_lora_weights`` change the base
# Settings that plain LoRA may have, or whose tensors are checked. Others act in ways of their own: they drop layers of
# the base (layer_replication), or wait for a token (alora_invocation_tokens).
PLAIN = {
    "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias", "lora_bias",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "megatron_core",
    "init_lora_weights", "eva_config", "corda_config", "loftq_config", "lora_ga_config", "runtime_config",
    "modules_to_save", "trainable_token_indices", "ensure_weight_tying", "qalora_group_size",
}  # fmt: skip
USUAL_RANK = 1024  # PEFT makes room for any rank that a file names, which could fill the memory
LORA = re.compile(r"\.lora_([AB]\.weight|B\.bias|magnitude_vector)$")  # how names of LoRA tensors end in a file


@dataclass(frozen=True)
class ModelConfig:
    """Which base model, and how it is held in memory."""

    model_name: str = knob("Qwen/Qwen3-4B")  # Hub id or local folder
    revision: str | None = knob(None)  # Hub commit or tag; pin it for runs that must be repeatable
    adapter: str | None = knob(None)  # start from this LoRA adapter; also what ppo.init_kl_coef above 0 holds to
    device: str = knob("auto", choices=("auto", "cuda", "cpu"))  # auto: CUDA where there is one
    use_4bit: bool = True  # hold the base in 4 bits; needs CUDA, or model.device cpu for slow trials
    use_nested_quant: bool = False  # 8-bit scales for weights put in 4 bits here: 0.2 GB less, 42 launches a layer more
    dtype: str = knob("bfloat16", choices=("bfloat16", "float16", "float32"))  # of everything not quantised
    gradient_checkpointing: bool = True  # recompute layers in the backward pass: slower, far less memory
    tokens_per_batch: int = knob(4096, min=64, max=2**30)  # computed in one forward pass, attention counted in

    def __post_init__(self) -> None:
        check_values(self, "model")
        for key in ("model_name", "revision"):  # "" would be the folder that the program was started in, and any commit
            if getattr(self, key) == "":
                raise ValueError(f"{key} is empty; is a variable of the shell not set?")


@dataclass(frozen=True)
class LoraConfig:
    """The adapter, in PEFT's terms. Without dropout: with it the ratio is not 1 before the first update."""

    r: int = knob(16, min=1, max=USUAL_RANK)  # rank
    lora_alpha: int = knob(32, min=1, max=2**20)  # the adapter is scaled by lora_alpha / r
    target_modules: tuple[str, ...] = knob(LINEARS, choices=LINEARS)  # linear layers that get an adapter

    def __post_init__(self) -> None:
        check_values(self, "lora")
        if not self.target_modules:
            raise ValueError(f"target_modules is empty: name at least one of {', '.join(LINEARS)}")


def why_no_cuda() -> str:
    """Why torch cannot use the NVIDIA card of this machine; "" where there is no card."""
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""
    card, _, driver = found.rpartition(", ")
    built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
    version = torch.__version__.partition("+")[0]
    install = f"{sys.executable} -m pip install --force-reinstall torch=={version} --index-url {INDEX}"
    return (
        f"there is a {card} with driver {driver}, but torch {torch.__version__} {built}: update the driver (CUDA 13 "
        f"needs 580.65 or later), or {install}cu126 (an older driver) or {INDEX}cu130"
    )


def device_of(config: ModelConfig) -> str:
    """The device to use; a 4-bit base runs on a CPU only where ``model.device`` says so.

    ConfigError: bitsandbytes or a CUDA device is needed and missing, the device does not support the dtype, or no
    device would help, since there is no such model.
    """
    _located(config.model_name, ask_hub=False)
    if config.use_4bit and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"model.use_4bit: {config.model_name} in 4 bits needs bitsandbytes, which is not installed: "
            "pip install bitsandbytes, or --set model.use_4bit=false"
        )
    if config.device == "cpu":
        return _cpu(config.dtype)
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        built = [int(name[3:]) for name in torch.cuda.get_arch_list() if name[:3] == "sm_" and name[3:].isdigit()]
        if 10 * major + minor < min(built, default=0):
            raise ConfigError(
                f"model.device: torch {torch.__version__} has no kernels for {torch.cuda.get_device_name()} "
                f"(sm{major}{minor}), only for sm{min(built)} and later: another build, or --set model.device=cpu"
            )
        if config.dtype == "bfloat16" and major < 8:
            raise ConfigError(
                f"model.dtype: {torch.cuda.get_device_name()} (sm{major}{minor}) has no bfloat16 arithmetic, which "
                "sm80 and later have; expected float16 or float32"
            )
        return "cuda"
    why = f" ({reason})" if (reason := why_no_cuda()) else ""
    if config.device == "cuda":
        raise ConfigError(f"model.device: 'cuda' was asked for, but torch finds no CUDA device{why}; slower, and with "
                          "the same weights: --set model.device=cpu")  # fmt: skip
    if config.use_4bit:
        raise ConfigError(
            f"model.use_4bit: {config.model_name} in 4 bits needs a CUDA device and there is none{why}; "
            "slow: --set model.device=cpu; to try it on this machine: make train, or --config config/presets/tiny.json"
        )
    return _cpu(config.dtype)


@functools.cache
def _cpu(dtype: str) -> str:
    """The name "cpu"; a warning, once, where it has to imitate the arithmetic of ``dtype``."""
    has = [name for name, there in torch.cpu.get_capabilities().items() if there is True]
    kind = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    if kind and not any(kind in name for name in has):
        log.warning("model.dtype: this CPU has no %s arithmetic, so that %s is several times slower than float32 "
                    "(--set model.dtype=float32, which takes twice the memory)", dtype, dtype)  # fmt: skip
    return "cpu"


def folder_of(name: str) -> Path | None:
    """The folder that a model's name means, here or in the repository; None: it is a name on the Hub."""
    path = Path(os.path.expanduser(name))
    return next((folder for folder in (path, ROOT / path) if folder.is_dir()), None)


def _located(name: str, ask_hub: bool = True) -> str:
    """The folder of a base model, wherever the program was started, or its name on the Hub; ConfigError: neither."""
    if folder := folder_of(name):
        adapter = (folder / "adapter_config.json").exists()
        if (adapter or checkpoints_in(folder)) and not (folder / "config.json").exists():
            kind = "an adapter" if adapter else "a run"
            ways = f"model.adapter={name}" if adapter else f"--resume {name}, or model.adapter={name}/final"
            raise ConfigError(f"model.model_name: {name} is {kind}; expected its base. Training goes on from it by: "
                              f"{ways}; it plays by: --checkpoint {name}")  # fmt: skip
        return str(folder)
    if name.startswith((".", "/", "~", "models/")):  # cannot be a name on the Hub
        tiny, smol = "scripts/make_tiny_model.py makes a tiny one", "make models/smollm2-135m/config.json fetches it"
        way = smol if Path(name).name == "smollm2-135m" else tiny
        raise ConfigError(f"model.model_name: there is no folder {Path(name)} ({way})")
    if ask_hub:
        hub_problem()
    return name


def check_adapter(config: ModelConfig) -> None:
    """Raise ConfigError where ``model.adapter`` is neither a usable adapter folder nor an adapter on the Hub."""
    if config.adapter is None:
        return
    check_folder("adapter", config.adapter)
    folder = Path(os.path.expanduser(config.adapter))
    if folder.is_dir() and not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"model.adapter: {config.adapter!r} holds no adapter_config.json; expected e.g. RUN/final")
    if (folder / "manifest.json").exists() and (problems := verify_checkpoint(folder)):
        raise ConfigError(f"model.adapter: {config.adapter!r}: {'; '.join(problems)}")
    if not folder.is_dir() and (folder.is_absolute() or config.adapter.startswith(".")):
        raise ConfigError(f"model.adapter: there is no folder {folder}; if it was moved: --set model.adapter=FOLDER")
    if not folder.is_dir():
        hub_problem()  # without a Hub only what is on this disk is looked for
    check_kind(config.adapter)


def check_kind(name: str) -> None:
    """Check what an adapter (a folder or a name on the Hub) contains before PEFT loads it.

    PEFT copies every tensor whose name the model knows, so a file could overwrite the base that all adapters share.
    ConfigError: it is not LoRA, its initialisation changes the base, or it holds more than LoRA's factors (biases,
    embeddings, copies of layers).
    """
    import peft

    with _loading("adapter", name), bounded(ADAPTER_SECONDS, ADAPTER_BYTES):
        peft_config, tensors = peft.PeftConfig.from_pretrained(name), peft.load_peft_weights(name, device="cpu")
        named = max(getattr(peft_config, "r", 0), *(getattr(peft_config, "rank_pattern", None) or {}).values(), 0)
        held = max((len(tensor) for key, tensor in tensors.items() if ".lora_A." in key), default=0)
        if named > max(held, USUAL_RANK):
            raise ValueError(f"rank {named} is named and {held} is held")
    kind = getattr(peft_config.peft_type, "value", None)
    init = str(getattr(peft_config, "init_lora_weights", "")).lower()
    if kind != "LORA":
        raise ConfigError(f"model.adapter: {name!r} is of PEFT's type {kind}; allowed: LORA")
    if init.startswith(REWRITES_BASE):
        raise ConfigError(
            f"model.adapter: {name!r} changes the base (init_lora_weights {init!r}); allowed: LoRA that does not "
            "(convert it first: PEFT's path_initial_model_for_weight_conversion)"
        )
    usual, told = vars(peft.LoraConfig()), PLAIN | vars(peft.PeftConfig()).keys()
    if odd := [key for key, value in vars(peft_config).items() if key not in told and value != usual.get(key)]:
        raise ConfigError(f"model.adapter: {name!r} is not plain LoRA: {odd[0]} is set in its adapter_config.json")
    if others := [key for key in tensors if not LORA.search(key) or "lm_head" in key]:
        more = "holds more than LoRA on linear layers below the output layer"
        raise ConfigError(f"model.adapter: {name!r} {more}: {others[0]}")


@contextmanager
def _loading(key: str, name: str) -> Iterator[None]:
    """Turn any exception into a ConfigError: damaged files fail in as many ways as there are formats and libraries."""
    try:
        yield
    except Exception as error:
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        missing = isinstance(error, OSError | ValueError)  # as the Hub's library and PEFT tell it, not a fault of ours
        elsewhere = not Path(_located(name) if key == "model_name" else name).is_dir()
        if missing and elsewhere and (problem := hub_problem()):
            cause = f"it is not on this disk, and {problem}"
        raise ConfigError(f"model.{key}: cannot load {name!r} ({cause})") from error


def load_architecture(config: ModelConfig, **files: str) -> Any:
    """The base model's configuration, without weights; ``files`` are passed on to transformers (``gguf_file``).

    ConfigError: it cannot be read, or the architecture is not supported.
    """
    from transformers import AutoConfig, PretrainedConfig

    _log_with_the_program()
    name = _located(config.model_name)
    check_folder("model_name", name)
    if not files and Path(name).is_dir() and not (Path(name) / "config.json").exists():
        raise ConfigError(f"model.model_name: {config.model_name} is no model: it has no config.json")
    with _loading("model_name", config.model_name):
        written = PretrainedConfig.get_config_dict(name, revision=config.revision, **files)[0]
    with blaming("model.model_name: "):
        check_redirects(written, config.model_name)
    check_sizes({key: size for key, size in written.items() if size is not None}, config.model_name)
    with _loading("model_name", config.model_name):
        architecture = AutoConfig.from_pretrained(name, revision=config.revision, trust_remote_code=False, **files)
    alike = not written.get("per_layer_config") and {*(getattr(architecture, "layer_types", None) or [FULL])} == {FULL}
    if architecture.model_type not in ARCHITECTURES or not alike:
        raise ConfigError(
            f"model.model_name: architecture {architecture.model_type!r} of {config.model_name} is not supported; "
            f"allowed: {', '.join(ARCHITECTURES)} without sliding windows or layers that differ"
        )
    quantised = getattr(architecture, "quantization_config", None)
    if quantised and not (config.use_4bit and quantised.get("load_in_4bit")):
        raise ConfigError(
            f"model.model_name: {config.model_name} is kept quantised; allowed: weights that are not, and with "
            "model.use_4bit those in bitsandbytes' 4 bits"
        )
    check_sizes({key: getattr(architecture, key) for key in SIZES}, config.model_name)
    check_layers(architecture, config.model_name)
    return architecture


def load_tokenizer(config: ModelConfig) -> Any:
    """The base model's tokenizer; ConfigError: it cannot be read, or the model is refused by ``load_architecture``."""
    from transformers import AutoTokenizer

    rows = load_architecture(config).vocab_size  # first: it looks for files that would never end
    name = _located(config.model_name)
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in TOKENIZER_FILES):
        raise ConfigError(f"model.model_name: {name} has no tokenizer: one of {', '.join(TOKENIZER_FILES)} is missing")
    with _loading("model_name", config.model_name):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=config.revision, trust_remote_code=False)
    check_growth(getattr(tokenizer, "backend_tokenizer", None), config.model_name)
    if isinstance(tokenizer.chat_template, dict):  # several templates: the one that libraries use by default
        tokenizer.chat_template = tokenizer.chat_template.get("default")
    template = str(tokenizer.chat_template)
    unused = {str(word) for word in tokenizer.added_tokens_decoder.values() if str(word) not in template}
    beyond = sorted(i for word, i in tokenizer.get_vocab().items() if i >= rows and word not in unused)
    if beyond:
        raise ConfigError(
            f"model.model_name: the tokenizer of {config.model_name} has token ids up to {beyond[-1]}, but the model "
            f"embeds only {rows}: they do not belong together"
        )
    return tokenizer


def ends_of(config: ModelConfig) -> Any:
    """The ``generation_config.eos_token_id`` that the base model will have once it is loaded; it may be damaged."""
    from transformers import GenerationConfig

    architecture = load_architecture(config)
    with _loading("model_name", config.model_name), suppress(OSError):  # no such file
        return GenerationConfig.from_pretrained(_located(config.model_name), revision=config.revision).eos_token_id
    return architecture.eos_token_id


def _says_more(record: logging.LogRecord) -> bool:
    """False: of optional kernels, or a table of weights that ``whole`` refuses in one line."""
    return not any(known in record.getMessage() for known in ("gemm_4bit_forward", "MISSING:", "MISMATCH:"))


def _log_with_the_program() -> None:
    """Let what these libraries log reach the root's handlers alone: they quote files, and would not leave out secrets.

    transformers has a handler of its own, and one more above it where the environment says CI; the Hub has both always.
    """
    for name in ("transformers", "huggingface_hub"):
        logger = logging.getLogger(name)
        logger.propagate = True
        for handler in [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]:
            logger.removeHandler(handler)


@contextmanager
def quietly() -> Iterator[None]:
    """Silence what libraries log while a model loads; errors and download progress still show."""
    import huggingface_hub.utils
    from transformers.utils import logging as transformers_logging

    for name in ("bitsandbytes.backends.cpu.ops", "transformers.modeling_utils"):
        logging.getLogger(name).addFilter(_says_more)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    if bars:
        huggingface_hub.utils.enable_progress_bars()  # transformers disabled these too: 8 GB would come in silence
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def load_model(config: ModelConfig, lora: LoraConfig, seed: int) -> tuple[Any, Any]:
    """Load base and tokenizer, and add the trainable adapter ``default`` (``config.adapter``, or a fresh one).

    A given adapter is also loaded frozen, as ``reference``: the KL penalty is taken to where training began.
    """
    device = device_of(config)
    if device == "cpu":
        cpu_memory.keep_freed()
    tokenizer = load_tokenizer(config)
    files = folder.glob("*.safetensors") if (folder := folder_of(config.model_name)) else ()
    check_weights(load_architecture(config), files, config.model_name)
    with quietly():
        base = _load_base(config, device)
        guard_4bit_on_cpu(base)
        base.requires_grad_(False)
        torch.manual_seed(seed)  # for LoRA's A, which is drawn; B is zero
        model = _put_adapter_on(base, config, lora)
    for peft_config in model.peft_config.values():  # checkpoints must not depend on a set's order or a local path
        peft_config.base_model_name_or_path, peft_config.revision = config.model_name, config.revision
        if not isinstance(peft_config.target_modules, str):
            peft_config.target_modules = sorted(peft_config.target_modules)
    return model.eval(), tokenizer


def _load_base(config: ModelConfig, device: str) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    # By number: weights are copied in threads, where plain "cuda" is the first GPU, not the current one.
    place = torch.cuda.current_device() if device == "cuda" else device
    kwargs: dict[str, Any] = {"dtype": getattr(torch, config.dtype), "device_map": {"": place}}
    if config.use_4bit:
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=config.use_nested_quant,
            bnb_4bit_compute_dtype=getattr(torch, config.dtype),
        )
    with _loading("model_name", config.model_name):
        loaded = AutoModelForCausalLM.from_pretrained(
            _located(config.model_name),
            revision=config.revision,
            trust_remote_code=False,
            use_safetensors=True,
            **REPORTED,
            **kwargs,
        )
    base = whole(loaded, f"model.model_name: {config.model_name!r}")
    if type(base.lm_head) is not nn.Linear:
        raise ConfigError(f"model.model_name: the output layer of {config.model_name} is kept in 4 bits, too; allowed: "
                          "4 bits in the layers below it")  # fmt: skip
    return _in_dtype(base, getattr(torch, config.dtype)) if config.use_4bit else base


def _in_dtype(base: Any, dtype: torch.dtype) -> Any:
    """A base with everything in ``dtype`` that is not in 4 bits; a file that is kept in 4 bits loads in its own."""
    for parameter in base.parameters():
        if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):  # 4 bits may be packed in bf16
            parameter.data = parameter.data.to(dtype)
    for layer in (m for m in base.modules() if hasattr(m, "compute_dtype")):
        layer.compute_dtype = dtype
    return base


def whole(loaded: Any, source: str) -> Any:
    """The model of ``from_pretrained(..., **REPORTED)``; ConfigError where weights are missing or of another shape."""
    model, info = loaded
    shapes = list(info["mismatched_keys"])
    for name, layer in model.named_modules():  # weights put in 4 bits are not compared there
        if four := getattr(getattr(layer, "weight", None), "quant_state", None):
            shapes.append((f"{name}.weight", four.shape, (layer.out_features, layer.in_features)))
    wrong = [f"{name} is {[*held]}, not {[*expected]}" for name, held, expected in shapes if held != expected]
    must_lack_nothing(wrong, source, "holds weights of other shapes than its configuration names")
    must_lack_nothing(info["missing_keys"], source)
    return model


def must_be_used(found: Any, source: str) -> None:
    """Raise ConfigError where PEFT missed weights in an adapter, or found some that it has no place for."""
    must_lack_nothing(found.missing_keys, source)
    must_lack_nothing(found.unexpected_keys, source, "holds weights that have no place in the model")


def must_lack_nothing(missing: Iterable[str], source: str, problem: str = "lacks weights") -> None:
    """Raise ConfigError where weights are missing from what was loaded: libraries initialise them at random."""
    if names := sorted(missing):
        others = f" and {len(names) - 1} more" if names[1:] else ""
        raise ConfigError(f"{source} {problem}: {names[0]}{others}")


def _put_adapter_on(base: Any, config: ModelConfig, lora: LoraConfig) -> Any:
    import peft

    if config.adapter is None:
        fresh = peft.LoraConfig(
            r=lora.r, lora_alpha=lora.lora_alpha, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
            target_modules=list(lora.target_modules),
        )  # fmt: skip
        return peft.get_peft_model(base, fresh)
    check_adapter(config)
    with _loading("adapter", config.adapter), bounded(ADAPTER_SECONDS, ADAPTER_BYTES):
        model = peft.PeftModel.from_pretrained(base, config.adapter, is_trainable=True, **ON_CPU)
        found = model.load_adapter(config.adapter, adapter_name="reference", is_trainable=False, **ON_CPU)
    must_be_used(found, f"model.adapter: {config.adapter!r}")
    return model


def identity(config: ModelConfig, base: Any, tokenizer: Any) -> dict[str, str | None]:
    """What a run's adapter belongs to: names, and digests of weights, tokenizer and games.

    In a local folder all weights are hashed (0.75 s of CPU per GB); a model on the Hub is identified by its commit.
    """
    words = tokenizer.backend_tokenizer.to_str() + (tokenizer.chat_template or "")
    commit = f"commit {getattr(base.config, '_commit_hash', None)}"
    return {
        "model": config.model_name, "revision": config.revision, "tokenizer": sha256(words.encode()).hexdigest(),
        "weights": weights_digest(config.model_name) or commit, "games": own_digest(),
    }  # fmt: skip


def adapter_digest(name: str) -> str:
    """Digest of the weights of an adapter that was loaded from a folder or from the Hub."""
    from huggingface_hub import try_to_load_from_cache

    local = Path(os.path.expanduser(name)).is_dir()
    cached = None if local else try_to_load_from_cache(name, "adapter_model.safetensors")
    return _digest(str(Path(cached).parent) if isinstance(cached, str) else name)


def weights_digest(name: str) -> str:
    """Digest of a base model's weights; "" where it is no folder."""
    return _digest(_located(name))


def _digest(folder: str) -> str:
    """Digest of the weights in a folder, whose shards are hashed in parallel; "" where there are none."""
    files = sorted(Path(os.path.expanduser(folder)).glob("*.safetensors"))
    found = zip(files, in_threads(fingerprint, files, None), strict=True)
    digests = [f"{path.name} {file['sha256']}" for path, file in found]
    return sha256("\n".join(digests).encode()).hexdigest() if digests else ""


def guard_4bit_on_cpu(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights for inference on CPUs with AVX512-BF16.

    The repacked form has no gradient: after the first rollout a base without biases would go on training with a
    loss that looks normal and no LoRA gradient at all. Call it before the first forward pass.
    """
    for layer in (m for m in model.modules() if hasattr(m, "support_avx512bf16_for_cpu")):
        layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
