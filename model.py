"""The network and its text: the base model, how it is held in memory, how tokens run through it, and chat format.

Shapes: B rows, T tokens, K read positions per row, P cached tokens, D hidden size, E head size. The layers are
the library's own modules, run one by one here so that cached keys, prefixes shared by many rows (gradients
included) and "the last layer only where it is read" need no patching of the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from env_wrapper import Message
from utils import ConfigError, knob

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ARCHITECTURES = ("qwen2", "qwen3")
END = "."  # stands for the end-of-turn token in an answer trie


@dataclass(frozen=True)
class ModelConfig:
    """Which base model, and how it is held in memory."""

    model_name: str = knob("Qwen/Qwen3-4B")  # Hub id or local folder
    revision: str | None = knob(None)  # Hub commit or tag; pin it for runs that must be repeatable
    adapter: str | None = knob(None)  # start from this LoRA adapter; it is then also the KL reference
    device: str = knob("auto", choices=("auto", "cuda", "cpu"))
    use_4bit: bool = True
    use_nested_quant: bool = True
    bnb_4bit_quant_type: str = knob("nf4", choices=("nf4", "fp4"))
    bnb_4bit_compute_dtype: str = knob("bfloat16", choices=("bfloat16", "float16", "float32"))
    dtype: str = knob("bfloat16", choices=("bfloat16", "float16", "float32"))  # of everything not quantised
    gradient_checkpointing: bool = False
    tokens_per_batch: int = knob(16384, min=64)  # padded tokens in one forward pass; memory against speed


@dataclass(frozen=True)
class LoraConfig:
    """The adapter, in PEFT's terms. Dropout is fixed at 0: with it the ratio is not 1 before the first update."""

    r: int = knob(16, min=1, max=1024)
    lora_alpha: int = knob(32, min=1)
    target_modules: tuple[str, ...] = LINEARS
    lora_dropout: float = knob(0.0, min=0.0, max=0.0)


def device_of(config: ModelConfig) -> str:
    """The device to use; refuses a 4-bit base on a CPU unless it was asked for by name.

    Raises:
        ConfigError: no CUDA device for what the configuration needs.
    """
    cuda = torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise ConfigError("model.device: 'cuda' was asked for, but torch finds no CUDA device")
    if config.device == "auto" and config.use_4bit and not cuda:
        raise ConfigError(
            f"model.use_4bit: {config.model_name} in 4 bits needs a CUDA device and there is none; "
            "to try it on this machine: make train, or --config config/presets/tiny.json"
        )
    return "cuda" if cuda and config.device != "cpu" else "cpu"


def _model_error(config: ModelConfig, error: Exception) -> ConfigError:
    hint = ""
    if "/" in config.model_name and not Path(config.model_name).exists():
        hint = "; no such local folder (scripts/make_tiny_model.py makes one), nor reachable on the Hub"
    return ConfigError(
        f"model.model_name: cannot load {config.model_name!r}{hint} ({str(error).splitlines()[0][:200]})"
    )


def load_architecture(config: ModelConfig) -> Any:
    """The base model's configuration (no weights).

    Raises:
        ConfigError: it cannot be read, or is not of a supported architecture.
    """
    from transformers import AutoConfig

    try:
        architecture = AutoConfig.from_pretrained(config.model_name, revision=config.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _model_error(config, error) from error
    sliding = "sliding_attention" in (getattr(architecture, "layer_types", None) or [])
    if architecture.model_type not in ARCHITECTURES or sliding:
        raise ConfigError(
            f"model.model_name: architecture {architecture.model_type!r} is not supported; "
            f"allowed: {', '.join(ARCHITECTURES)} without sliding windows"
        )
    return architecture


def load_tokenizer(config: ModelConfig) -> Any:
    """The base model's tokenizer. Raises ConfigError where it cannot be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.model_name, revision=config.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _model_error(config, error) from error


def load_model(config: ModelConfig, lora: LoraConfig, seed: int) -> tuple[Any, Any]:
    """Load base and tokenizer, and put the trainable adapter ``default`` on (from ``config.adapter`` or fresh).

    A given adapter is loaded a second time, frozen, as ``reference``: the KL is taken to where training began.

    Raises:
        ConfigError: one line that names the key.
    """
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    device = device_of(config)
    load_architecture(config)
    tokenizer = load_tokenizer(config)
    kwargs: dict[str, Any] = {"dtype": getattr(torch, config.dtype), "device_map": {"": device}}
    if config.use_4bit:
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=config.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=config.use_nested_quant,
            bnb_4bit_compute_dtype=getattr(torch, config.bnb_4bit_compute_dtype),
        )
    try:
        base = AutoModelForCausalLM.from_pretrained(
            config.model_name, revision=config.revision, trust_remote_code=False, **kwargs
        )
    except (OSError, ValueError, ImportError) as error:
        raise _model_error(config, error) from error
    guard_4bit_on_cpu(base)
    base.requires_grad_(False)
    torch.manual_seed(seed)  # the adapter's random half
    if config.adapter is None:
        model: Any = peft.get_peft_model(base, _peft_config(lora))
    else:
        try:
            model = peft.PeftModel.from_pretrained(base, config.adapter, is_trainable=True)
            model.load_adapter(config.adapter, adapter_name="reference", is_trainable=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.adapter: cannot load {config.adapter!r} ({str(error)[:200]})") from error
    return model.eval(), tokenizer


def _peft_config(lora: LoraConfig) -> Any:
    import peft

    return peft.LoraConfig(
        r=lora.r, lora_alpha=lora.lora_alpha, lora_dropout=lora.lora_dropout, bias="none", task_type="CAUSAL_LM",
        target_modules=list(lora.target_modules),
    )  # fmt: skip


def guard_4bit_on_cpu(model: nn.Module) -> int:
    """Keep bitsandbytes from repacking 4-bit weights for inference on CPUs with AVX512-BF16; return how many.

    The repacked form has no gradient: after the first rollout a base without biases would go on training
    with a normal looking loss and not one LoRA gradient. Must run before the first forward pass.
    """
    layers = [m for m in model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return len(layers)


Cache = list[tuple[Tensor, Tensor]]  # per layer: keys and values (B, kv heads, P, head size), rotated


def _rotate(x_BHTE: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    half = x_BHTE.shape[-1] // 2
    turned = torch.cat((-x_BHTE[..., half:], x_BHTE[..., :half]), dim=-1)
    return x_BHTE * cos_BTE[:, None] + turned * sin_BTE[:, None]


def _gather(x_BTD: Tensor, at_BK: Tensor) -> Tensor:
    return torch.take_along_dim(x_BTD, at_BK[..., None], dim=1)


def _run_layer(layer: Any, h_BTD: Tensor, rope: Any, past: Any, mask: Any, at_BK: Tensor | None):
    """One decoder layer. With ``at_BK`` keys and values are made for all T tokens, everything else only there."""
    attn = layer.self_attn
    x = layer.input_layernorm(h_BTD)
    heads = (*x.shape[:2], -1, attn.head_dim)
    k, v = attn.k_proj(x).view(heads), attn.v_proj(x).view(heads).transpose(1, 2)
    cos, sin = rope
    k = _rotate((attn.k_norm(k) if hasattr(attn, "k_norm") else k).transpose(1, 2), cos, sin)
    if at_BK is not None:
        h_BTD, x, cos, sin = _gather(h_BTD, at_BK), _gather(x, at_BK), _gather(cos, at_BK), _gather(sin, at_BK)
    q = attn.q_proj(x).view(*x.shape[:2], -1, attn.head_dim)
    q = _rotate((attn.q_norm(q) if hasattr(attn, "q_norm") else q).transpose(1, 2), cos, sin)
    keys, values = (k, v) if past is None else (torch.cat((past[0], k), 2), torch.cat((past[1], v), 2))
    if mask is not None and q.is_cuda:  # CUDA's masked kernels do not broadcast grouped heads
        keys, values = (t.repeat_interleave(attn.num_key_value_groups, 1) for t in (keys, values))
    out = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=mask is None, scale=attn.scaling,
        enable_gqa=keys.shape[1] != q.shape[1],
    )  # fmt: skip
    h = h_BTD + attn.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1))
    return h + layer.mlp(layer.post_attention_layernorm(h)), k, v


def run_trunk(
    model: Any,
    ids_BT: Tensor,
    at_BK: Tensor,
    past: Cache | None = None,
    past_len_B: Tensor | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Cache]:
    """Run right-padded tokens through the layers and read hidden states at ``at_BK``.

    Args:
        model: the trunk (``Qwen2Model`` or ``Qwen3Model``).
        ids_BT: token ids; padding on the right may hold any id.
        at_BK: positions in ``ids_BT`` to read.
        past: keys and values of what came before, right-padded to P.
        past_len_B: how many of the P are real.
        recompute: gradient checkpointing, a layer at a time.

    Returns:
        Normed hidden states (B, K, D), and keys and values of the T new tokens.
    """
    B, T = ids_BT.shape
    steps_T = torch.arange(T, device=ids_BT.device)
    mask = last_mask = None
    where_BT = steps_T.expand(B, T)
    if past is not None and past_len_B is not None:
        where_BT = where_BT + past_len_B[:, None]
        seen_BP = torch.arange(past[0][0].shape[2], device=ids_BT.device) < past_len_B[:, None]
        causal_TT = steps_T <= steps_T[:, None]
        mask = torch.cat((seen_BP[:, None].expand(-1, T, -1), causal_TT.expand(B, T, T)), -1)[:, None]
        new_BKT = steps_T <= at_BK[..., None]
        last_mask = torch.cat((seen_BP[:, None].expand(-1, at_BK.shape[1], -1), new_BKT), -1)[:, None]
    else:
        last_mask = (steps_T <= at_BK[..., None])[:, None]
    h = model.embed_tokens(ids_BT)
    rope = model.rotary_emb(h, where_BT)
    cache: Cache = []
    for i, layer in enumerate(model.layers):
        last = i == len(model.layers) - 1
        args = (layer, h, rope, past[i] if past else None, last_mask if last else mask, at_BK if last else None)
        h, k, v = checkpoint(_run_layer, *args, use_reentrant=False) if recompute else _run_layer(*args)
        cache.append((k, v))
    return model.norm(h), cache


# --------------------------------------------------------------------------------------------------------------
# Text to tokens
# --------------------------------------------------------------------------------------------------------------


class ChatFormat:
    """The text a chat template puts around messages, taken from the template once.

    History is never rendered again: a turn adds tokens after those that were sampled. That is only what the
    model will see elsewhere if the template keeps its prefix; where it does not (Qwen3 drops old think blocks)
    TRL's training variant of the template does, and is used and saved with the adapter.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        parts = self._parts()
        if parts[2] != parts[4]:
            tokenizer.chat_template = self._prefix_preserving(tokenizer)
            parts = self._parts()
        self.before_system, self.after_system, self.after_user, self.after_assistant, _ = parts
        self.end_id: int = self.encode(self.after_assistant)[0]
        self.next_user = self.after_assistant[len(tokenizer.decode([self.end_id])) :]
        self.digit_ids = {c: self.encode(c)[0] for c in "0123456789"} | {END: self.end_id}
        if self.encode("0123456789") != [self.digit_ids[c] for c in "0123456789"]:
            raise ConfigError("model.model_name: the tokenizer merges digits; single-digit tokens are needed")

    def _parts(self) -> list[str]:
        marks = ["SYSTEM-MARK", "USER-MARK", "ASSISTANT-MARK", "LAST-MARK"]
        roles = ["system", "user", "assistant", "user"]
        text = self.tokenizer.apply_chat_template(
            [{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)],
            tokenize=False, add_generation_prompt=True, enable_thinking=False,
        )  # fmt: skip
        parts = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found:
                raise ConfigError("model.model_name: its chat template does not show system, user and assistant turns")
            parts.append(before)
        return [*parts, text]

    @staticmethod
    def _prefix_preserving(tokenizer: Any) -> str:
        try:
            from trl import get_training_chat_template
        except ImportError as error:
            raise ConfigError(
                "this chat template rewrites history; install trl, which has one that does not"
            ) from error
        try:
            return get_training_chat_template(tokenizer) or tokenizer.chat_template
        except ValueError as error:
            raise ConfigError(f"model.model_name: its chat template rewrites history ({error})") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text, nothing added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    @lru_cache(maxsize=65536)  # noqa: B019  one format lives as long as the process
    def opening(self, system: str, user: str) -> tuple[list[int], int]:
        """Tokens of a first prompt, and how many of them are the system message."""
        head = self.encode(self.before_system + system)
        return head + self.encode(self.after_system + user + self.after_user), len(head)

    @lru_cache(maxsize=65536)  # noqa: B019
    def user_turn(self, user: str) -> list[int]:
        """Tokens of a later user message, after a finished answer, up to where the next answer starts."""
        return self.encode(self.next_user + user + self.after_user)

    def first_prompt(self, conversation: list[Message]) -> tuple[list[int], int]:
        """Tokens of a whole conversation read for the first time."""
        ids, shared = self.opening(conversation[0]["content"], conversation[1]["content"])
        return ids + self.later(conversation[2:]), shared

    def later(self, messages: list[Message]) -> list[int]:
        """Tokens of messages that follow a prompt: answers that were given for the model, and user turns."""
        ids: list[int] = []
        for message in messages:
            if message["role"] == "assistant":
                ids += [*self.encode(message["content"]), self.end_id]
            else:
                ids += self.user_turn(message["content"])
        return ids


@lru_cache(maxsize=16384)
def answer_trie(legal: tuple[int, ...]) -> dict[str, str]:
    """Map each prefix of a legal answer to the characters that may follow (``END``: the answer may stop)."""
    follow: dict[str, set[str]] = {}
    for action in legal:
        text = str(action) + END
        for i, char in enumerate(text):
            follow.setdefault(text[:i], set()).add(char)
    return {prefix: "".join(sorted(chars)) for prefix, chars in follow.items()}
