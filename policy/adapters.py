"""The LoRA adapters on one base: which one is active, which parameters are trained, saving, loading and averaging."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from policy.bounded import bounded, check_folder
from policy.chat import ChatFormat
from policy.model import ADAPTER_BYTES, ADAPTER_SECONDS, ON_CPU, check_kind, must_be_used
from utils import ConfigError

AVERAGE_POWER = 7  # exponent of polynomial-decay averaging: it covers about the last eighth of the run so far


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _lora_layers(peft_model: Any) -> list[Any]:
    return [module for module in peft_model.modules() if hasattr(module, "lora_A")]


class Adapters:
    """The adapter ``default`` and the ``heads`` (value_head, ...), which are trained, and frozen adapters beside them.

    ``active`` is the name of the adapter in use; ``"base"``: none.
    """

    chat: ChatFormat

    def __init__(self, peft_model: Any, tokenizer: Any, value_head: nn.Linear, model_name: str) -> None:
        self.peft_model, self.tokenizer = peft_model, tokenizer
        self.heads: dict[str, nn.Module] = {"value_head": value_head}
        self.model_name = model_name
        self.active = "default"
        self._layers = _lora_layers(peft_model)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of everything PPO trains: the adapter ``default`` and the heads."""
        named = {n: p for n, p in self.peft_model.named_parameters() if ".default." in n and "lora_" in n}
        return named | {f"{name}.{n}": p for name, head in self.heads.items() for n, p in head.named_parameters()}

    @contextmanager
    def using(self, adapter: str | None) -> Iterator[None]:
        """Use another adapter, without gradients; ``"base"``: none. None: the current one, gradients included.

        ValueError: no such adapter.
        """
        if adapter is None:
            yield
            return
        if adapter != "base" and adapter not in self.peft_model.peft_config:
            raise ValueError(f"no adapter {adapter!r}: there are base, {', '.join(self.peft_model.peft_config)}")
        before = self.active
        try:
            self._activate(adapter)
            with torch.no_grad():
                yield
        finally:
            self._activate(before)

    def _activate(self, adapter: str) -> None:
        """Tell each layer its adapter.

        PEFT's own functions walk over all modules, 40 ms each time with SmolLM2-135M, and change what is trained.
        """
        for layer in self._layers:
            layer._disable_adapters, layer._active_adapter = adapter == "base", [adapter]
        self.active = adapter

    def save(self, folder: Path, adapter: str = "default") -> None:
        """Write an adapter in the layout that PEFT, vLLM and the Hub load, with tokenizer, chat template and heads."""
        # PEFT's own function would put other adapters than "default" into a subfolder, and write an empty model card.
        kept = copy(self.peft_model.peft_config["default"])
        kept.inference_mode, kept.task_type = True, "CAUSAL_LM"
        kept.save_pretrained(folder)
        save_file(self.past_adapter(adapter), folder / "adapter_model.safetensors", {"format": "pt"})
        self.chat.save(folder)
        for name, head in self.heads.items():
            tensors = {n: p.detach().cpu().contiguous() for n, p in head.named_parameters()}
            save_file(tensors, folder / f"{name}.safetensors")

    def load(self, folder: Path) -> None:
        """Load what ``save`` wrote into ``default`` and the heads; ConfigError: it is of another model or LoRA."""
        from peft import set_peft_model_state_dict

        if missing := [name for name in self.heads if not (folder / f"{name}.safetensors").is_file()]:
            raise ConfigError(f"{folder} holds no {missing[0]}.safetensors: it was trained without it")
        ours = {"adapter_model": self.past_adapter("default")} | {n: h.state_dict() for n, h in self.heads.items()}
        theirs = {name: load_file(folder / f"{name}.safetensors") for name in ours}
        for name in ours:
            if _shapes(theirs[name]) != _shapes(ours[name]):
                what = "these games" if name == "state_head" else f"{self.model_name} with this lora section"
                raise ConfigError(f"{folder}: its {name} does not fit {what}")
        set_peft_model_state_dict(self.peft_model, theirs["adapter_model"])
        for name, head in self.heads.items():
            head.load_state_dict(theirs[name])

    def keep_past(self, name: str, tensors: dict[str, Tensor] | None = None) -> None:
        """Add a frozen adapter to the base: a copy of the current one, or ``tensors`` as ``past_adapter`` returns them.

        ConfigError: names or shapes are not those of an adapter; PEFT would copy other tensors over the base.
        """
        from peft import set_peft_model_state_dict

        current = self.past_adapter("default")
        tensors = current if tensors is None else tensors
        if _shapes(tensors) != _shapes(current):
            raise ConfigError(f"past.safetensors: {name} does not fit {self.model_name} with this lora section")
        self.peft_model.add_adapter(name, self.peft_model.peft_config["default"])
        set_peft_model_state_dict(self.peft_model, tensors, adapter_name=name)
        self.peft_model.set_requires_grad(name, False)
        self.peft_model.eval()  # the dropout of its layers, which are new, as of the others

    def past_adapter(self, name: str) -> dict[str, Tensor]:
        """A copy of an adapter's tensors on the CPU, under the names that PEFT gives them in a file."""
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self.peft_model, adapter_name=name, save_embedding_layers=False)
        return {key: tensor.detach().cpu().clone() for key, tensor in state.items()}

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move the adapter ``average`` towards the current one after ``step`` (1, 2, ...); the first call makes a copy.

        Polynomial-decay averaging (https://arxiv.org/abs/1212.1824): it follows closely while the policy still changes
        much, and averages over more steps later.
        """
        if "average" not in self.peft_model.peft_config:
            return self.keep_past("average")
        weight = (AVERAGE_POWER + 1) / (step + AVERAGE_POWER)
        parameters = dict(self.peft_model.named_parameters())
        for name, parameter in self.trainable().items():
            if name in parameters:
                parameters[name.replace(".default.", ".average.")].lerp_(parameter, weight)

    def forget_past(self, name: str) -> None:
        """Remove a frozen adapter."""
        self.peft_model.delete_adapter(name)

    def add_adapter(self, name: str, folder: Path) -> None:
        """Load a frozen adapter from a folder onto the same base, to be played against.

        ValueError: the name is taken. ConfigError: the folder cannot be used, lacks weights, or holds more than LoRA on
        linear layers.
        """
        if name in ("average", "base", "reference", *self.peft_model.peft_config):
            raise ValueError(f"adapter name {name!r} is taken: choose another")
        check_folder("adapter", str(folder))
        check_kind(str(folder))
        with bounded(ADAPTER_SECONDS, ADAPTER_BYTES):
            found = self.peft_model.load_adapter(str(folder), adapter_name=name, is_trainable=False, **ON_CPU)
        # PEFT counts the keys that the name occurs in: of an adapter "y" every one with "layers".
        found.missing_keys[:] = [key for key in found.missing_keys if f".{name}." in key]
        self._layers = _lora_layers(self.peft_model)  # it may be on more of them
        try:
            must_be_used(found, f"adapter {folder}")
        except ConfigError:
            self.peft_model.delete_adapter(name)
            raise
