"""A CUDA device that is not there: tensors stay on the CPU, but say that they are on cuda:0.

Where an operation is given tensors of both devices, as a GPU would refuse it, it is noted in ``Pretended.mixed``; what
makes the host wait for the device, or copies from it, is counted in ``Pretended.waits``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, ROOT = torch.device("cuda", 0), str(Path(__file__).parents[2])
SAYS: dict[Any, Any] = {torch.Tensor.device: CUDA, torch.Tensor.is_cuda: True, torch.Tensor.is_cpu: False}
TO_HOST = ("tolist", "item", "__float__", "__bool__", "__int__", "__index__")
WAITS = ("nonzero", "masked_select", "equal", "is_nonzero", "_unique", "unique", "bincount")


def _where() -> str:
    """The line of the program that is at work."""
    frame = sys._getframe(1)
    while (at := frame.f_code.co_filename) == __file__ or not at.startswith(ROOT) or "/.venv/" in at:
        if frame.f_back is None:
            return "?"
        frame = frame.f_back
    return f"{Path(at).name}:{frame.f_lineno}"


class Pretended:
    """What lies on the device, by storage, and what was noted."""

    def __init__(self) -> None:
        self.mixed: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._there: dict[int, StorageWeakRef] = {}
        self.placed: list[bool] = []  # where what is made now goes, if that is said

    def put(self, tensor: torch.Tensor) -> None:
        """Pretend that a tensor is on the device."""
        ref = StorageWeakRef(tensor.untyped_storage())
        self._there[ref.cdata] = ref

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is on the device."""
        ref = self._there.get(tensor.untyped_storage()._cdata)
        if ref is not None and ref.expired():
            del self._there[ref.cdata]
            return False
        return ref is not None

    def put_module(self, module: torch.nn.Module) -> None:
        """All of a module's tensors, those of 4-bit weights included."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.put(tensor)
            state = getattr(tensor, "quant_state", None)
            parts = [state, getattr(state, "state2", None)] if state is not None else []
            for value in (value for part in parts if part is not None for value in vars(part).values()):
                if isinstance(value, torch.Tensor):
                    self.put(value)

    @contextmanager
    def placing(self, there: bool) -> Iterator[None]:
        """What is made inside lies on the device, or on the host."""
        self.placed.append(there)
        try:
            yield
        finally:
            self.placed.pop()


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: bool, device: Pretended) -> torch.Tensor:
        ctx.there, ctx.device = there, device
        with device.placing(there):
            return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        with ctx.device.placing(not ctx.there):
            return grads[0].clone(), None, None


class _Functions(TorchFunctionMode):
    """Answers what tensors say of their device, and moves them."""

    def __init__(self, device: Pretended) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, device = dict(kwargs or {}), getattr(func, "__name__", ""), self.device
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name == "__get__":
            says = SAYS.get(getattr(func, "__self__", None)) if x is not None and device.has(x) else None
            return func(*args, **kwargs) if says is None else says
        if func is torch.Tensor.backward:  # in it, this mode would be off
            with _Functions(device):
                run, ones = torch.autograd.graph._engine_run_backward, torch.ones_like(args[0])
                return run((args[0],), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        if x is not None and name in ("to", "cuda", "cpu"):
            return self._move(x, name, list(args[1:]), kwargs)
        if x is not None and device.has(x):
            if name in TO_HOST:
                device.waits[f"{name} {_where()}"] += 1
            elif name in ("numpy", "__array__"):
                device.mixed[f"{name} {_where()}"] += 1
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "meta":
            with device.placing(torch.device(kwargs.pop("device")).type == "cuda"):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _move(self, x: torch.Tensor, name: str, rest: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        device = self.device
        for like in [p for p in rest if isinstance(p, torch.Tensor)]:
            rest += [CUDA if device.has(like) else torch.device("cpu"), like.dtype]
        places = [p for p in (*rest, kwargs.get("device")) if isinstance(p, str | torch.device)]
        there = name == "cuda" if name != "to" else torch.device(places[0]).type == "cuda" if places else device.has(x)
        dtypes = [d for d in (*rest, kwargs.get("dtype")) if isinstance(d, torch.dtype)]
        if there != device.has(x):
            if not there:
                device.waits[f"{name} {_where()}"] += 1
            x = _Move.apply(x, there, device)
        return torch.Tensor.to(x, dtypes[0]) if dtypes and dtypes[0] != x.dtype else x


class _Operations(TorchDispatchMode):
    """Refuses, as a GPU would, operations on tensors of both devices."""

    def __init__(self, device: Pretended) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, name = self.device, func.overloadpacket.__name__
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        there = [device.has(t) for t in tensors]
        if any(there) and not all(there):
            on_host = [t for t, on_device in zip(tensors, there, strict=True) if not on_device and t.dim()]
            indexing = name == "index" and there[0]  # an index on the host is copied
            if on_host and not indexing and name != "copy_":
                device.mixed[f"{name} {_where()}"] += 1
        out = func(*args, **(kwargs or {}))
        to = device.has(args[0]) if name == "copy_" else device.placed[-1] if device.placed else any(there)
        if to:
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor):
                    device.put(t)
        masked = name == "index" and any(isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in args[1])
        if any(there) and (masked or name.startswith(WAITS)):
            device.waits[f"{name} {_where()}"] += 1
        return out


@contextmanager
def pretend() -> Iterator[Pretended]:
    """Pretend inside that there is a CUDA device."""
    device, checks = Pretended(), checkpoint._allowed_determinism_checks_to_fns
    with mock.patch.dict(checks, default=checks["none"]), _Functions(device), _Operations(device):
        yield device
