"""Several processes that train one policy: each plays its share of the games, all hold the same batch and weights.

Started by ``torchrun`` or ``accelerate launch`` (which sets WORLD_SIZE); without it everything here is the identity.
This is data parallelism: each process holds the whole base model, and only the adapter's gradients are exchanged.
Sharding a 4-bit base would save nothing, since it fits one GPU.
"""

import logging
import math
import os
import traceback
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from datetime import timedelta
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from config.reader import ConfigError, blaming
from envs.types import Sequence
from policy.player import Evaluation, Policy
from training.process import TrainingError, cause_of

log = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE = timedelta(hours=12)  # the first process evaluates and plots alone while the others wait


def add_up(sums: dict[str, Any], stats: dict[str, Any]) -> None:
    """Add the statistics of a part of a minibatch to its sums; of those called ``_max`` keep the larger."""
    for name, value in stats.items():  # as tensors, without waiting for a GPU
        join = torch.maximum if name.endswith("_max") else torch.add
        sums[name] = join(*map(torch.as_tensor, (sums[name], value)))


def means(totals: dict[str, Any]) -> dict[str, float]:
    """Divide the sums by ``totals["decisions"]``, except for those called ``_max``; NaN where there are none."""
    device = getattr(totals["decisions"], "device", "cpu")
    values = torch.stack([torch.as_tensor(total, device=device) for total in totals.values()]).tolist()  # one transfer
    count = (sums := dict(zip(totals, values, strict=True))).pop("decisions")
    return {n: (x if n.endswith("_max") else x / count) if count else math.nan for n, x in sums.items()}


class SharedError(TrainingError):
    """Training cannot continue, as every process knows; the others still wait for what the first does ``alone``."""


class Ranks:
    """This process's place among those that train together: ``rank`` of ``world``."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    @classmethod
    def join(cls, device: str) -> Self:
        """The place that the launcher gave this process. Communicates over NCCL between GPUs, gloo between CPUs.

        ConfigError: the launcher started fewer processes than it was asked for, or more than there are GPUs; or they
        cannot reach each other, where MASTER_PORT is in use, say.
        """
        launched = {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= os.environ.keys()
        if launched and "WORLD_SIZE" not in os.environ:  # with --cpu, or a single GPU, it silently does that
            raise ConfigError(
                "accelerate launch has started one process, not several: use torchrun --standalone --nproc_per_node "
                "2 train_ppo.py ... (of GPUs there must be as many), or accelerate launch --num_processes 1"
            )
        with blaming("WORLD_SIZE and its like, which a launcher sets: ", (ValueError, RuntimeError)):
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                return cls()
            from accelerate import PartialState

            if device != "cpu" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
                raise ConfigError(f"{os.environ['LOCAL_WORLD_SIZE']} processes on {torch.cuda.device_count()} GPUs: "
                                  "--nproc_per_node at most as many")  # fmt: skip
            state = PartialState(cpu=device == "cpu", timeout=PATIENCE)
            if state.num_processes == 1:
                raise ConfigError("WORLD_SIZE says that there are others, LOCAL_RANK is missing: torchrun sets both")
        if not state.is_main_process:  # the first one speaks for all
            logging.getLogger().setLevel(logging.ERROR)
        return cls(state.process_index, state.num_processes)

    @property
    def first(self) -> bool:
        """Whether this process writes the files and speaks to the user."""
        return self.rank == 0

    def share(self, items: Seq[T]) -> list[T]:
        """This process's share of a list that all processes hold: every ``world``-th item."""
        return list(items[self.rank :: self.world])

    def gather(self, mine: list[T]) -> list[T]:
        """Undo ``share``: return the whole list, in its order, in every process."""
        if self.world == 1:
            return mine
        parts: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(parts, mine)
        return [part[i] for i in range(len(parts[0])) for part in parts if i < len(part)]

    def agreed(self, work: Callable[[], T]) -> T:
        """The result of what every process does; if one fails, all end, the first of them last.

        The first process raises SharedError, and may do something alone before the others end.
        """
        if self.world == 1:
            return work()
        done, cause, failed = list[T](), ("", ""), None
        try:
            done = [work()]
        except Exception as error:  # of any kind: the others wait for this process
            failed = error
            cause = f"process {self.rank}: {cause_of(error)}", traceback.format_exc()
            traceback.clear_frames(error.__traceback__)  # they hold the tensors of a rollout that ran out of memory
        if not (causes := [cause for cause in self.gather([cause]) if cause[0]]):
            return done[0]
        log.debug("what failed in a %s", "\n".join(map(": ".join, causes)))  # all, in the log of the first process
        if not self.first:
            self.alone(lambda: None)
            raise SystemExit(1)
        raise SharedError(causes[0][0]) from failed

    def together(self, work: Callable[[], list[T]]) -> list[T]:
        """``gather`` the results of all processes, if they are ``agreed``."""
        return self.gather(self.agreed(work))

    def add_up(self, tensors: Seq[Tensor]) -> None:
        """Sum each tensor over several processes, in place, with a single message."""
        flat = torch.cat([t.detach().reshape(-1).float() for t in tensors])
        torch.distributed.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def largest(self, number: float) -> float:
        """The largest of the processes' numbers, in every process."""
        return float(np.max(self.gather([number]))) if self.world > 1 else number  # NaN wins

    def alone(self, work: Callable[[], T]) -> T:
        """Work in the first process only and give every process the result; if it fails, all end."""
        if self.world == 1:
            return work()
        result: list[Any] = [None, True]  # and whether it failed
        try:
            if self.first:
                result = [work(), False]
        finally:
            torch.distributed.broadcast_object_list(result)
        if result[1]:
            raise SystemExit(1)
        return result[0]

    def add_up_gradients(self, parameters: Iterable[torch.nn.Parameter], loss: Tensor, sums: dict[str, Any]) -> None:
        """Sum a minibatch's gradients, loss and statistics over the processes, in place; take the largest ``_max``."""
        if self.world == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        reached = torch.tensor([p.grad is not None for p in trained], dtype=torch.float32, device=loss.device)
        for parameter in trained:
            if parameter.grad is None:  # not reached by this process's share
                parameter.grad = torch.zeros_like(parameter)
        largest = {name: self.largest(float(sums.pop(name))) for name in [*sums] if name.endswith("_max")}
        for name, value in sums.items():
            sums[name] = torch.as_tensor(value, device=loss.device, dtype=torch.float32).clone()
        self.add_up([*(p.grad for p in trained if p.grad is not None), reached, loss, *sums.values()])
        for parameter, shares in zip(trained, reached.tolist(), strict=True):
            if not shares:  # reached by no process: with a gradient of zero, momentum would still move it
                parameter.grad = None
        sums |= largest

    def score(
        self, policy: Policy, sequences: Seq[Sequence], adapter: str | None = None, legal_mass: bool = False
    ) -> Evaluation:
        """``policy.evaluate_decisions`` without gradients, its result on the CPU; each process computes its share."""
        mine = self.share(sequences)

        def columns() -> list[Tensor]:
            with torch.no_grad():
                read = policy.evaluate_decisions(mine, adapter=adapter, legal_mass=legal_mass) if mine else ()
            return [x_M.cpu() for x_M in read if x_M is not None]

        def rows() -> list[tuple[list[float], ...]]:
            sizes = [len(s.decisions) for s in mine]
            return list(zip(*([part.tolist() for part in x_M.split(sizes)] for x_M in columns()), strict=True))

        if self.world == 1:
            return Evaluation(*columns())
        gathered = zip(*self.together(rows), strict=True)
        return Evaluation(*(torch.tensor([x for part in column for x in part]) for column in gathered))

    def close(self) -> None:
        """Leave the process group, so that the processes end without warnings."""
        if self.world > 1:
            torch.distributed.destroy_process_group()


LONE = Ranks()
