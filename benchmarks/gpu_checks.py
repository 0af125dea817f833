"""What must hold on the device besides speed: gradients, sampler and learner agree, memory is flat; and a profile."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.common import Row
from benchmarks.recorded import play_recorded
from envs.types import Episode, Sequence, Task
from policy import Policy
from train_ppo import collate, ppo_update
from training.config import PPOConfig

TOP_KERNELS = 12


def adamw(policy: Policy) -> torch.optim.Optimizer:
    """The trainer's optimizer."""
    return torch.optim.AdamW(policy.trainable().values(), lr=1e-3, weight_decay=0.0, fused=True)


def sequences_of(episodes: list[Episode]) -> list[Sequence]:
    """All sequences of some episodes, in order."""
    return [s for e in episodes for seat in sorted(e.sequences) for s in e.sequences[seat]]


def _gaps(policy: Policy, games: list[Task]) -> tuple[Row, list[Sequence]]:
    """How far the log-probabilities of sampling are from those of the training forward pass, in nats a decision."""
    sequences = sequences_of(play_recorded(policy, games))
    sampled_M = torch.tensor([d.logprob for s in sequences for d in s.decisions])
    with torch.no_grad():
        learner_M = policy.evaluate_decisions(sequences).logprobs.cpu()
    gap_M = (sampled_M - learner_M).abs()
    policy.forget()
    return {"decisions": len(gap_M), "gap_max": float(gap_M.max()), "gap_mean": float(gap_M.mean())}, sequences


def gradients_and_gaps(policy: Policy, games: list[Task]) -> list[Row]:
    """LoRA tensors that a gradient reaches after a rollout, and the gaps of constrained and of free answers.

    The adapter gets noise first: the second half of a fresh one is zero, and so is the gradient of its first half.
    """
    lora = {name: p for name, p in policy.trainable().items() if "lora_" in name}
    generator = torch.Generator(policy.device).manual_seed(0)
    with torch.no_grad():
        for parameter in lora.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator, device=parameter.device), alpha=0.01)
    policy.forget()
    gap, sequences = _gaps(policy, games)
    for sequence in sequences[::4]:
        new = policy.evaluate_decisions([sequence])
        (new.logprobs.sum() + new.values.sum()).backward()
    reached = [p.grad is not None and bool(torch.isfinite(p.grad).all()) and bool(p.grad.any()) for p in lora.values()]
    for parameter in policy.trainable().values():
        parameter.grad = None
    policy.constrained = False
    try:
        free, _ = _gaps(policy, games[:2])
    finally:
        policy.constrained = True
    rows = [{"answers": "constrained", **gap, "lora_tensors": len(lora), "with_gradient": sum(reached)}]
    return [*rows, {"answers": "free", **free}]


def self_test(policy: Policy, games: list[Task], cuda: bool) -> list[Row]:
    """One step under the profiler: which attention ran, what was held, launches a second; then gradients and gaps."""
    from torch.profiler import ProfilerActivity

    optimizer = adamw(policy)
    ppo = PPOConfig(batch_size=2, mini_batch_size=2, ppo_epochs=1, target_kl=None)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=kinds) as profiler:
        start = time.perf_counter()
        batch = collate(play_recorded(policy, games), policy, ppo, ppo.init_kl_coef, {})
        ppo_update(policy, optimizer, batch, ppo, (0, 0))
        if cuda:
            torch.cuda.synchronize()
        wall = time.perf_counter() - start
    calls = {event.key: event.count for event in profiler.key_averages()}
    attention = [name for name in calls if name.startswith("aten::_scaled_dot_product_") and "backward" not in name]
    launches = sum(n for name, n in calls.items() if not cuda or name.startswith(("cudaLaunch", "cuLaunch")))
    row = {"attention": ", ".join(sorted(name.removeprefix("aten::_scaled_dot_product_") for name in attention)),
           "seconds": wall, "launches": launches, "launches_per_s": launches / wall,
           "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if cuda else None}  # fmt: skip
    if "cudnn" in row["attention"]:
        raise RuntimeError(f"attention ran as {row['attention']}: cuDNN's builds a graph for each new shape")
    before_M = policy.evaluate_decisions(batch.sequences).logprobs.detach()
    ppo_update(policy, optimizer, batch, ppo, (0, 1))
    if torch.equal(before_M, policy.evaluate_decisions(batch.sequences).logprobs.detach()):
        raise RuntimeError("an update has changed nothing of what the model answers")
    return [row, *gradients_and_gaps(policy, games)]


def prompts(policy: Policy, games: dict[str, list[Task]]) -> list[Row]:
    """Tokens and decisions a game, as the model reads it."""
    rows = []
    for name, some in games.items():
        episodes = play_recorded(policy, some)
        sequences, count = sequences_of(episodes), len(episodes)
        decisions, tokens = sum(len(s.decisions) for s in sequences), sum(len(s.ids) for s in sequences)
        rows.append({"game": name, "decisions_a_game": decisions / count, "tokens_a_game": tokens / count,
                     "longest": max(len(s.ids) for s in sequences), "system_tokens": sequences[0].shared})  # fmt: skip
    policy.forget()
    return rows


def flat_memory(policy: Policy, games: list[Task], steps: int) -> list[Row]:
    """Memory over many small steps: the highest peak, and what was held, in their first and in their last fifth."""
    ppo = PPOConfig(batch_size=2, mini_batch_size=2, ppo_epochs=1, target_kl=None)
    optimizer = adamw(policy)
    cuda, peaks, held = torch.cuda.is_available(), [], []
    for step in range(steps):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        batch = collate(play_recorded(policy, games), policy, ppo, ppo.init_kl_coef, {})
        ppo_update(policy, optimizer, batch, ppo, (0, step))
        peaks.append(torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0)
        held.append(torch.cuda.memory_allocated() / 1e9 if cuda else 0.0)
    fifth = max(steps // 5, 1)
    if not cuda:
        return [{"steps": steps}]
    return [{"steps": steps, "first_peak_gb": max(peaks[:fifth]), "last_peak_gb": max(peaks[-fifth:]),
             "first_held_gb": max(held[:fifth]), "last_held_gb": max(held[-fifth:])}]  # fmt: skip


def profile(policy: Policy, games: list[Task], cuda: bool) -> list[Row]:
    """The kernels that take most time in a rollout and in one optimizer step of its games; the device's idle share."""
    optimizer = adamw(policy)
    episodes: list[Episode] = []
    rows = _profiled("rollout", lambda: episodes.extend(play_recorded(policy, games)), cuda)
    one = PPOConfig(batch_size=2, mini_batch_size=2, ppo_epochs=1, target_kl=None, recompute_logprobs=False)
    batch = collate(episodes[:2], policy, one, 0.0, {})
    return rows + _profiled("update", lambda: ppo_update(policy, optimizer, batch, one, (0, 0)), cuda)


def _profiled(part: str, work: Any, cuda: bool) -> list[Row]:
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profiler:
        start = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        wall = time.perf_counter() - start
    column = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [event for event in profiler.key_averages() if getattr(event, column) > 0]  # no calls of the runtime
    kernels = sorted(events, key=lambda event: -getattr(event, column))
    busy = sum(getattr(event, column) for event in kernels) / 1e6
    rows = [{"part": part, "kernel": "all", "calls": sum(e.count for e in kernels), "seconds": busy,
             "of_wall": busy / wall}]  # fmt: skip
    for event in kernels[:TOP_KERNELS]:
        seconds = getattr(event, column) / 1e6
        name = event.key.replace("|", "/")[:90]
        rows.append({"part": part, "kernel": name, "calls": event.count, "seconds": seconds, "of_wall": seconds / wall})
    return rows
