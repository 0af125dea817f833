"""Bytes of the tensors that live at once, counted operation by operation; on the meta device they need no memory."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from benchmarks import operations
from env_wrapper import play
from envs.types import Task
from policy.chat import ANSWER_CHARS, END
from policy.model import _put_adapter_on, load_architecture, load_tokenizer
from policy.player import Policy
from train_ppo import _backward, collate, minibatches
from utils import uniform

COUNTER = operations.Counter()  # never entered: it counts nothing


class Peak(TorchDispatchMode):
    """Counts the storages that are made inside and how long they live; ``most``: bytes at the fullest moment."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.now, self.most = device, 0, 0
        self._living: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what one operation makes."""
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.device.type == self.device:
                self.note(made)
        return out

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage from here on, once."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._living:
            return

        def gone(_: Any) -> None:
            del self._living[key]
            self.now -= size

        self._living[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


class Blind(Policy):
    """A player on the meta device, which has no numbers to choose by: it plays what the estimate's games played."""

    _next: list[int]

    def _choose_legal(self, turns: list[Any], hidden_ND: Any) -> None:
        answers = ([*map(str, t.query.legal)][int(uniform(*t.query.rng_key) * len(t.query.legal))] + END for t in turns)
        self._next = [ANSWER_CHARS.index(answer[len(t.text)]) for t, answer in zip(turns, answers, strict=True)]
        super()._choose_legal(turns, hidden_ND)

    def _answer_logprobs(self, hidden_ND: Any, follows: list[str]) -> Any:
        hidden_ND.float() @ self._answer_weight_VD.T
        return F.one_hot(torch.tensor(self._next), len(ANSWER_CHARS)).double().log()

    def _note_values(self, turns: list[Any], hidden_ND: Any) -> None:
        for turn in turns:
            turn.value = 0.0


def weightless(config: SimpleNamespace, layers: int) -> Blind:
    """The policy of a configuration at its true shapes; in 4 bits with stand-ins for bitsandbytes' layers."""
    architecture = load_architecture(config.model)
    architecture.num_hidden_layers = layers
    if hasattr(architecture, "layer_types"):
        architecture.layer_types = ["full_attention"] * layers
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(architecture, dtype=getattr(torch, config.model.dtype))
        base.requires_grad_(False)
        peft_model = _put_adapter_on(base, config.model, config.lora)
        for module in base.model.modules() if config.model.use_4bit else ():
            if hasattr(module, "base_layer"):
                module.base_layer = operations.FourBit(module.base_layer, COUNTER, config.model.use_nested_quant)
    return Blind(peft_model.eval(), load_tokenizer(config.model), config)


def peaks(config: SimpleNamespace, tasks: list[Task]) -> dict[str, float]:
    """Bytes of a step on ``tasks``: what is there before it, and at the fullest moment of rollout and of update.

    Each layer more adds as much: what all of them take follows from three and five.
    """
    three, five = (_peaks(config, tasks, layers) for layers in (3, 5))
    more = (load_architecture(config.model).num_hidden_layers - 3) / 2
    return {name: size + more * (five[name] - size) for name, size in three.items()}


def _peaks(config: SimpleNamespace, tasks: list[Task], layers: int) -> dict[str, float]:
    policy, peak = weightless(config, layers), Peak("meta")
    parameters = list(policy.trainable().values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for tensor in [*policy.peft_model.parameters(), *policy.value_head.parameters()]:
        peak.note(tensor)
    for parameter in parameters:  # Adam's moments, which a first step would make
        optimizer.state[parameter] = {"moments": torch.empty(2, *parameter.shape, device="meta")}
        peak.note(optimizer.state[parameter]["moments"])
    found: dict[str, float] = {"held": peak.now}
    with peak, operations.gpu_kernels(COUNTER), policy.keeping_context():
        episodes = play(config.env, policy, tasks)
        found["rollout"], peak.most = peak.most, peak.now
        batch = collate(episodes, policy, config.ppo, 0.0)
        policy.forget()
        for chosen in minibatches(len(batch.games), config.ppo, (0,)):
            _backward(policy, batch, [i for game in chosen for i in batch.games[game]], config.ppo)
            optimizer.zero_grad(set_to_none=True)
    found["update"] = peak.most
    return found
