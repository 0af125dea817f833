"""Make a small chat model better at games by PPO with turn-level credit.

    python train_ppo.py --config config/presets/tiny.json      # a laptop
    python train_ppo.py                                        # Qwen3-4B in 4 bits, one GPU
    python train_ppo.py --resume                               # go on exactly where the last checkpoint was

A decision (one answer of the model, whole) is the unit of credit: generalised advantage estimation runs over a
seat's own decisions, and the ratio is exp(sum of new - sum of old log-probabilities over the answer's tokens);
with ``ppo.ratio: token`` each token has its own, with the advantage of its decision.

Shapes: S seats played (trajectories), T decisions of the longest, M decisions of the batch in a row, A tokens of the
longest answer.
References: PPO https://arxiv.org/abs/1707.06347, GAE https://arxiv.org/abs/1506.02438,
adaptive KL https://arxiv.org/abs/1909.08593, clip-higher https://arxiv.org/abs/2503.14476.
"""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import alarms
import utils
from curriculum import Curriculum, eval_tasks
from engine import Engine, EngineError
from env_wrapper import Episode, Sequence, play
from evaluation import GameResult, evaluate, first_tasks, record, result_table, summarise
from model import device_of, identity
from options import SECTIONS as SECTIONS  # part of the public names, for programs built on the trainer
from options import PPOConfig, parse_args, read_config
from options import RunConfig as RunConfig
from policy import Evaluation, Policy, load_policy, places
from preflight import check_prompts, describe
from ranks import Ranks
from runlog import (
    Console,
    InterruptedRolloutError,
    MetricsLog,
    StoppablePlayer,
    StopSignal,
    WandbLog,
    find_checkpoint,
    finite,
    lock_run,
    peak_memory_mb,
    progress_line,
    setup_logging,
)
from servers import check_servers
from settings import make
from utils import ConfigError, knob

log = logging.getLogger(__name__)

LOSS_PARTS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
LONE = Ranks()
LEGAL_MASS_SAMPLE = 64  # sequences whose legal mass is read each step, for the log
IMPORTANCE_CAP = 2.0  # truncated importance sampling, https://doi.org/10.1198/106186008X320456
MOMENTS_RATE = 0.05  # of the running moments of rewards: about the last 20 steps count
FAILED_SAVES = 3  # of checkpoints, in a row, that end the run


class TrainingError(RuntimeError):
    """Training cannot go on; the message is the last line of the program."""


class BrokenStepError(TrainingError):
    """Training cannot go on, and the weights are between two steps: nothing of it is worth a checkpoint."""


# ------------------------------------------------------------------------------------------------------ advantages


def turn_gae(
    rewards_ST: Tensor, values_ST: Tensor, mask_ST: Tensor, bootstrap_S: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over a seat's own decisions (https://arxiv.org/abs/1506.02438, eq. 16).

    Args:
        rewards_ST: reward received after each decision, up to the seat's next one.
        values_ST: V(s) at each decision.
        mask_ST: true for real decisions; every row is left-aligned.
        bootstrap_S: value after the last decision: 0 where the game ended, V where it was cut off.
        gamma: discount per decision.
        lam: GAE's lambda.

    Returns:
        Advantages and returns (advantage + value), zero outside the mask.
    """
    T = rewards_ST.shape[1]
    advantages_ST = torch.zeros_like(values_ST)
    next_advantage_S = torch.zeros_like(bootstrap_S)
    next_value_S = bootstrap_S.clone()
    for t in reversed(range(T)):
        real_S = mask_ST[:, t]
        delta_S = rewards_ST[:, t] + gamma * next_value_S - values_ST[:, t]
        advantage_S = delta_S + gamma * lam * next_advantage_S
        advantages_ST[:, t] = torch.where(real_S, advantage_S, 0.0)
        next_advantage_S = torch.where(real_S, advantage_S, next_advantage_S)
        next_value_S = torch.where(real_S, values_ST[:, t], next_value_S)
    return advantages_ST, torch.where(mask_ST, advantages_ST + values_ST, 0.0)


def whiten(x_M: Tensor, groups_M: Tensor | None = None, min_group: int = 8) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 (population), per group where it is large enough.

    Groups of at most ``min_group`` members use the statistics of all members of such groups together.
    """
    if groups_M is None:
        return (x_M - x_M.mean()) / (x_M.std(correction=0) + 1e-8)
    _, inverse_M, counts = groups_M.unique(return_inverse=True, return_counts=True)
    label_M = torch.where(counts[inverse_M] > min_group, inverse_M, -1)
    out_M = torch.zeros_like(x_M)
    for label in label_M.unique():
        members_M = label_M == label
        out_M[members_M] = whiten(x_M[members_M])
    return out_M


@dataclass
class Batch:
    """The decisions of a step, seat by seat. ``unit[i]`` is the game that sequence i belongs to."""

    sequences: list[Sequence]
    unit: list[int]
    old_logprobs_M: Tensor
    values_M: Tensor
    advantages_M: Tensor
    returns_M: Tensor
    weights_M: Tensor  # 0 for decisions that are not trained
    reward_mean: float  # terminal reward of a seat, in [-1, 1]
    kl_ref: float  # mean of log p - log p_ref over the decisions, in nats
    gap_M: Tensor | None = None  # |learner's - sampler's| log-probability before the update, where both were computed
    old_tokens_MA: Tensor | None = None  # ratio "token": log-probability of each of a decision's tokens, 0 after them
    token_mask_MA: Tensor | None = None  # ratio "token": 1 for those tokens

    def __post_init__(self) -> None:
        ends = np.cumsum([len(sequence.decisions) for sequence in self.sequences])
        self.spans = [torch.arange(e - len(s.decisions), e) for e, s in zip(ends, self.sequences, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Metrics of the batch; explained variance is that of the returns by the rollout's values."""
        returns_M, values_M = self.returns_M[self.weights_M > 0], self.values_M[self.weights_M > 0]
        variance = float(returns_M.var(correction=0)) if len(returns_M) else 0.0
        unexplained = float((returns_M - values_M).var(correction=0)) / variance if variance > 1e-12 else 1.0
        out = {"decisions": len(self.values_M), "reward_mean": self.reward_mean, "kl_ref": self.kl_ref,
               "explained_variance": 1 - unexplained}  # fmt: skip
        if self.gap_M is not None:
            out |= {"logprob_gap_mean": float(self.gap_M.mean()), "logprob_gap_max": float(self.gap_M.max())}
        return out


def standardise(rewards_S: Tensor, keys: list[str], moments: dict[str, tuple[float, float, float]]) -> Tensor:
    """Shift and scale terminal rewards by the running mean and deviation of their key, updated with them first.

    With gamma 1 the shift is a baseline per key; the scale lets one critic serve games whose rewards differ in
    size (leduc_poker's are a fifth of tic_tac_toe's). ``moments``: key -> (updates, mean, variance), changed here.
    """
    out_S = torch.empty_like(rewards_S)
    for key in sorted(set(keys)):
        members = [i for i, k in enumerate(keys) if k == key]
        x = rewards_S[members].double()
        updates, mean, variance = moments.get(key, (0.0, 0.0, 0.0))
        rate = max(1 / (updates + 1), MOMENTS_RATE)
        mean += rate * (float(x.mean()) - mean)
        variance += rate * (float(((x - mean) ** 2).mean()) - variance)
        moments[key] = (updates + 1, mean, variance)
        out_S[members] = ((x - mean) / max(variance**0.5, 0.05)).to(rewards_S.dtype)
    return out_S


def by_token(rows: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Lay rows of different lengths below each other, zeros after each, and mask what is real."""
    lengths_M = torch.tensor([len(row) for row in rows])
    mask_MA = torch.arange(max(1, int(lengths_M.max())))[None] < lengths_M[:, None]
    values_MA = torch.zeros(mask_MA.shape)
    values_MA[mask_MA] = torch.tensor([value for row in rows for value in row], dtype=values_MA.dtype)
    return values_MA, mask_MA.to(values_MA.dtype)


def _scored(policy: Policy, sequences: list[Sequence], ranks: Ranks, adapter: str | None = None) -> Evaluation:
    """``evaluate_decisions`` without gradients (CPU); of several processes each reads its share of the sequences."""
    mine, rows = ranks.share(sequences), []
    with torch.no_grad():
        read = Evaluation(*(x.cpu() for x in policy.evaluate_decisions(mine, adapter=adapter))) if mine else None
    if ranks.world == 1 and read:
        return read
    if read:
        sizes = [len(s.decisions) for s in mine]
        rows = list(zip(*([part.tolist() for part in x.split(sizes)] for x in read), strict=True))
    columns = [[m for part in column for m in part] for column in zip(*ranks.gather(rows), strict=True)]
    logprobs_M, entropies_M, values_M = (torch.tensor(column) for column in columns[:3])
    return Evaluation(logprobs_M, entropies_M, values_M, by_token(columns[3])[0])


def _baseline_key(episode: Episode, seat: int) -> str:
    """Games against oneself have another mean than those against a bot."""
    kind = episode.task.opponent.partition(":")[0]
    return f"{episode.game}/{seat}" + (f"/{kind}" if kind in ("self", "past") else "")


def collate(
    episodes: list[Episode],
    policy: Policy,
    ppo: PPOConfig,
    kl_coef: float,
    moments: dict[str, tuple[float, float, float]] | None = None,
    ranks: Ranks = LONE,
) -> Batch:
    """Turn episodes into decisions with advantages. Failed episodes must have been taken out.

    The terminal reward is 2 * score - 1 of the seat, standardised where ``moments`` are given. A truncated
    trajectory bootstraps from its last decision that fitted, which is not trained itself.
    """
    seats = [(n, e, seat) for n, e in enumerate(episodes) for seat in sorted(e.sequences) if e.sequences[seat]]
    chains = [[d for s in e.sequences[seat] for d in s.decisions] for _, e, seat in seats]
    sequences = [s for _, e, seat in seats for s in e.sequences[seat]]
    if not sequences:
        raise TrainingError("no episode of this step holds a decision to train on")
    lengths_S = torch.tensor([len(chain) for chain in chains])
    s_M = torch.repeat_interleave(torch.arange(len(chains)), lengths_S)
    t_M = places(lengths_S)
    last_S = lengths_S.cumsum(0) - 1

    def grid(x_M: Tensor) -> Tensor:
        out_ST = x_M.new_zeros(len(chains), int(lengths_S.max()))
        out_ST[s_M, t_M] = x_M
        return out_ST

    old_M = torch.tensor([d.logprob for chain in chains for d in chain])
    old_MA, mask_MA = by_token([d.token_logprobs for chain in chains for d in chain])
    gap_M, importance_M = None, torch.ones_like(old_M)
    values_M = torch.tensor([d.value for chain in chains for d in chain])
    served = chains[0][0].version is not None
    if ppo.recompute_logprobs or served:
        old = _scored(policy, sequences, ranks)
        gap_M = (old.logprobs - old_M).abs()
        if served:  # by a server, whose arithmetic is another, and which knows no values
            importance_M, values_M = (old.logprobs - old_M).exp().clamp(max=IMPORTANCE_CAP), old.values
        old_M, old_MA = old.logprobs, old.tokens
    kl_M = torch.zeros_like(old_M)
    if kl_coef:
        kl_M = old_M - _scored(policy, sequences, ranks, adapter=policy.reference or "base").logprobs
    rewards_S = torch.tensor([2 * (e.info["scores"] or {}).get(seat, e.score) - 1 for _, e, seat in seats])
    cut_S = torch.tensor([e.outcome == "truncated" for _, e, _ in seats])
    rewards_S = rewards_S[~cut_S]  # of games that have one
    reward_mean = float(rewards_S.mean()) if len(rewards_S) else 0.0
    if moments is not None:
        keys = [_baseline_key(e, seat) for _, e, seat in seats if e.outcome != "truncated"]
        rewards_S = standardise(rewards_S, keys, moments)
    rewards_M = -kl_coef * kl_M
    rewards_M[last_S[~cut_S]] += rewards_S
    weights_M = torch.ones_like(values_M)
    weights_M[last_S[cut_S]] = 0.0
    bootstrap_S = torch.where(cut_S, values_M[last_S], 0.0)
    chains_ST = (grid(rewards_M), grid(values_M), grid(weights_M) > 0, bootstrap_S, ppo.gamma)
    advantages_ST, returns_ST = turn_gae(*chains_ST, ppo.lam)
    if ppo.lam_critic is not None:  # https://arxiv.org/abs/2503.01491: long answers want less bias in the critic
        returns_ST = turn_gae(*chains_ST, ppo.lam_critic)[1]
    advantages_M, returns_M = advantages_ST[s_M, t_M], returns_ST[s_M, t_M]
    names = sorted({e.game for e in episodes})
    game_M = torch.tensor([names.index(e.game) for _, e, _ in seats])[s_M]
    trained_M = weights_M > 0
    advantages_M[trained_M] = whiten(advantages_M[trained_M], game_M[trained_M])
    weights_M = weights_M * importance_M
    unit = [n for n, e, seat in seats for _ in e.sequences[seat]]
    old_M, values_M, advantages_M, returns_M, weights_M = (
        x_M.to(policy.device) for x_M in (old_M, values_M, advantages_M, returns_M, weights_M)
    )
    return Batch(
        sequences,
        unit,
        old_M,
        values_M,
        advantages_M,
        returns_M,
        weights_M,
        reward_mean,
        float(kl_M.mean()),
        gap_M,
        *((old_MA.to(policy.device), mask_MA.to(policy.device)) if ppo.ratio == "token" else (None, None)),
    )


# ---------------------------------------------------------------------------------------------------------- update


def ppo_loss(
    logprobs_M: Tensor,
    values_M: Tensor,
    entropies_M: Tensor,
    old_logprobs_M: Tensor,
    old_values_M: Tensor,
    advantages_M: Tensor,
    returns_M: Tensor,
    weights_M: Tensor,
    ppo: PPOConfig,
    token_mask_AM: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate, clipped value loss and entropy bonus (https://arxiv.org/abs/1707.06347, eqs. 7 and 9).

    Every term is a sum over decisions weighted by ``weights_M``: the caller divides by the number of decisions
    of the whole optimizer step, so that the gradient does not depend on how it was cut into micro-batches.

    With ``token_mask_AM`` both log-probabilities are (A, M), a row for each token of the longest answer: each token
    has a ratio of its own, clipped alone, with the advantage of its decision. A decision's loss is the sum over its
    tokens, so that at ratio 1 the gradient is that of the whole answer's ratio.

    Returns:
        The loss (scalar) and the detached sums of its parts.
    """
    log_ratio_M = logprobs_M - old_logprobs_M
    ratio_M = log_ratio_M.exp()
    high = ppo.cliprange if ppo.cliprange_high is None else ppo.cliprange_high
    clipped_M = ratio_M.clamp(1 - ppo.cliprange, 1 + high)
    policy_M = torch.maximum(-advantages_M * ratio_M, -advantages_M * clipped_M)
    if token_mask_AM is not None:
        policy_M = (token_mask_AM * policy_M).sum(0)
    near_M = old_values_M + (values_M - old_values_M).clamp(-ppo.cliprange_value, ppo.cliprange_value)
    value_M = 0.5 * torch.maximum((values_M - returns_M) ** 2, (near_M - returns_M) ** 2)
    loss = (weights_M * (policy_M + ppo.vf_coef * value_M - ppo.entropy_coef * entropies_M)).sum()
    with torch.no_grad():
        parts = {
            "policy_loss": policy_M,
            "value_loss": value_M,
            "entropy": entropies_M,
            "approx_kl": ratio_M - 1 - log_ratio_M,  # http://joschu.net/blog/kl-approx.html, k3
            "clip_fraction": (ratio_M != clipped_M).float(),
        }
        if token_mask_AM is not None:
            parts["approx_kl"] = parts["approx_kl"].sum(0)
            parts["clip_fraction"] = parts["clip_fraction"].sum(0) / token_mask_AM.sum(0).clamp(min=1)
        stats = {name: (weights_M * part).sum() for name, part in parts.items()}
        stats["ratio_max"] = (weights_M * (ratio_M - 1).abs()).max()
    return loss, stats


def minibatches(units: int, ppo: PPOConfig, key: tuple[int, ...]) -> list[list[int]]:
    """Shuffle the games of a step, by a stream of their own, and cut them into optimizer steps."""
    size = ppo.mini_batch_size * ppo.gradient_accumulation_steps
    order = np.random.default_rng(key).permutation(units).tolist()
    return [order[i : i + size] for i in range(0, units, size)]


def _backward(
    policy: Policy, batch: Batch, members: list[int], ppo: PPOConfig, ranks: Ranks = LONE
) -> tuple[Tensor, dict[str, Any]]:
    """Add the gradient of this process's share of one optimizer step's sequences, micro-batch by micro-batch.

    Returns:
        The loss, and the sums of the statistics over the decisions.
    """
    count = batch.weights_M[torch.cat([batch.spans[i] for i in members])].sum().clamp(min=1)
    loss_sum = torch.zeros((), device=policy.device)
    sums: dict[str, Any] = {"decisions": count / ranks.world}
    members = ranks.share(members)
    for micro in policy.micro_batches([batch.sequences[i] for i in members]):
        sequences = [batch.sequences[members[j]] for j in micro]
        at_M = torch.cat([batch.spans[members[j]] for j in micro])
        new = policy.evaluate_decisions(sequences, entropy_grad=ppo.entropy_coef > 0)
        logprobs, old, mask_AM = new.logprobs, batch.old_logprobs_M[at_M], None
        if batch.old_tokens_MA is not None and batch.token_mask_MA is not None:
            logprobs, width = new.tokens.T, new.tokens.shape[1]
            old, mask_AM = batch.old_tokens_MA[at_M, :width].T, batch.token_mask_MA[at_M, :width].T
        loss, stats = ppo_loss(
            logprobs, new.values, new.entropies, old, batch.values_M[at_M], batch.advantages_M[at_M],
            batch.returns_M[at_M], batch.weights_M[at_M], ppo, mask_AM,
        )  # fmt: skip
        if ppo.legal_mass_coef:
            loss = loss - ppo.legal_mass_coef * (batch.weights_M[at_M] * policy.log_legal_mass(sequences)).sum()
        (loss / count).backward()
        loss_sum += loss.detach() / count
        _add(sums, stats)
    return loss_sum, sums


def _add(sums: dict[str, Any], stats: dict[str, Any]) -> None:
    for name, value in stats.items():
        sums[name] = max(sums.get(name, 0), value) if name == "ratio_max" else sums.get(name, 0) + value


def ppo_update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    ppo: PPOConfig,
    key: tuple[int, ...],
    bad: int = 0,
    ranks: Ranks = LONE,
) -> dict[str, float]:
    """Run the epochs of one step; return means over the decisions seen.

    A minibatch whose loss or gradient is not finite changes nothing and is counted (``skipped``); after
    ``max_bad_updates`` of them in a row, ``bad`` before this step included, the step is over (``bad_updates``: how
    many there were in a row at its end). When memory runs out the minibatch is done again with half as many tokens
    at a time. ``key`` seeds the shuffling.
    """
    of_unit: dict[int, list[int]] = {}
    for i, unit in enumerate(batch.unit):
        of_unit.setdefault(unit, []).append(i)
    units = list(of_unit)
    parameters = list(policy.trainable().values())
    totals: dict[str, Any] = dict.fromkeys((*LOSS_PARTS, "ratio_max", "decisions"), 0.0)
    stats = {"skipped": 0.0, "grad_norm": 0.0, "updates": 0.0, "epochs": 0.0, "bad_updates": bad}
    for epoch in range(ppo.ppo_epochs):
        before = (totals["approx_kl"], totals["decisions"])
        for games in minibatches(len(units), ppo, (*key, epoch)):
            members = [i for game in games for i in of_unit[units[game]]]
            loss, sums = _with_less_memory(policy, optimizer, lambda m=members: _backward(policy, batch, m, ppo, ranks))
            if ranks.world > 1:
                _add_up(ranks, parameters, loss, sums)
            norm = torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], ppo.max_grad_norm)
            if torch.isfinite(loss) and torch.isfinite(norm):
                optimizer.step()
                _add(totals, sums)
                stats["updates"] += 1
                stats["grad_norm"] += float(norm)
                stats["bad_updates"] = 0
            else:
                stats["skipped"] += 1
                stats["bad_updates"] += 1
            optimizer.zero_grad(set_to_none=True)
            if stats["bad_updates"] >= ppo.max_bad_updates:
                break
        stats["epochs"] += 1
        epoch_kl = float(totals["approx_kl"] - before[0]) / max(float(totals["decisions"] - before[1]), 1)
        over_kl = ppo.target_kl is not None and epoch_kl > ppo.target_kl
        if over_kl or stats["bad_updates"] >= ppo.max_bad_updates:
            break
    policy.weights_changed()
    stats["grad_norm"] /= max(stats["updates"], 1)
    stats["ratio_max"] = float(totals.pop("ratio_max"))
    decisions = float(totals.pop("decisions"))
    return stats | {name: float(total) / decisions if decisions else np.nan for name, total in totals.items()}


def _add_up(ranks: Ranks, parameters: list[torch.nn.Parameter], loss: Tensor, sums: dict[str, Any]) -> None:
    """Put together what the processes found for their shares of a minibatch: gradients, loss and statistics."""
    trained = [p for p in parameters if p.requires_grad]
    for parameter in trained:
        if parameter.grad is None:  # this process had no share, or none that reaches it
            parameter.grad = torch.zeros_like(parameter)
    largest = ranks.largest(float(sums.pop("ratio_max", 0.0)))
    for name in (*LOSS_PARTS, "decisions"):
        sums[name] = torch.as_tensor(sums.get(name, 0.0), device=loss.device, dtype=torch.float32).clone()
    ranks.add_up([*(p.grad for p in trained if p.grad is not None), loss, *sums.values()])
    sums["ratio_max"] = largest


def _with_less_memory(policy: Policy, optimizer: torch.optim.Optimizer, work: Any) -> tuple[Tensor, dict[str, Any]]:
    while True:
        try:
            return work()
        except torch.OutOfMemoryError as error:
            optimizer.zero_grad(set_to_none=True)
            if not policy.halve_batches():
                raise BrokenStepError(
                    "out of memory with a single sequence at a time: lower ppo.max_seq_length"
                ) from error


def learning_rate(ppo: PPOConfig, step: int) -> float:
    """Learning rate of a step (0-based): up over ``lr_warmup_steps``, then linearly down to ``lr_final`` of it."""
    warm = min(1.0, (step + 1) / (ppo.lr_warmup_steps + 1))
    return ppo.learning_rate * warm * decay(ppo, step, ppo.lr_final)


def decay(ppo: PPOConfig, step: int, final: float) -> float:
    """Linear from 1 at the first step to ``final`` at the last."""
    return 1 - (1 - final) * step / max(ppo.num_train_steps - 1, 1)


def adapt_kl_coef(kl_coef: float, kl: float, decisions: int, ppo: PPOConfig) -> float:
    """Proportional controller of the KL penalty (https://arxiv.org/abs/1909.08593, section 2.2)."""
    if not ppo.adap_kl_ctrl or not kl_coef:
        return kl_coef
    error = min(max(kl / ppo.target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * decisions / ppo.horizon)


# -------------------------------------------------------------------------------------------------------- training


@dataclass
class TrainerState:
    """Everything adaptive that is not in the policy, the optimizer or the curriculum. All of it is checkpointed."""

    step: int = knob(0, min=0)
    kl_coef: float = knob(0.0, min=0)
    bad_updates: int = knob(0, min=0)
    tokens_per_batch: int = knob(0, min=1)
    # Of terminal rewards, per game and seat.
    moments: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    before: list[dict[str, Any]] = field(default_factory=list)  # results of the first evaluation
    row: dict[str, Any] | None = None  # metrics of a step whose evaluation a signal cut short
    lr_scale: float = knob(1.0, above=0)  # on the learning rate: what alarms and lr_target_kl made of it
    critic_ready: bool = False  # the critic explains enough: its warm-up is over
    alarms: dict[str, Any] = field(default_factory=dict)  # what the alarms remember


def tasks_of(config: SimpleNamespace) -> list[int]:
    """The task ids that evaluations before and after are made on."""
    return first_tasks(config.curriculum, config.env.env_type)


class Trainer:
    """One run: the objects of a configuration, one method a chapter."""

    def __init__(self, config: SimpleNamespace, run_dir: Path, ranks: Ranks = LONE) -> None:
        self.config, self.ppo, self.run_dir, self.ranks = config, config.ppo, run_dir, ranks
        self.policy = load_policy(config)
        self.base = {"model": config.model.model_name, "revision": config.model.revision,
                     **identity(self.policy.base, self.policy.tokenizer)}  # fmt: skip
        self.names = list(self.policy.trainable())
        parameters = list(self.policy.trainable().values())
        self.optimizer = torch.optim.AdamW(parameters, lr=self.ppo.learning_rate, weight_decay=0.0)
        self.curriculum = Curriculum(config.curriculum, config.run.seed)
        self.state = TrainerState(kl_coef=self.ppo.init_kl_coef, tokens_per_batch=self.policy.tokens_per_batch)
        self.metrics = MetricsLog(run_dir / "metrics.jsonl")
        self.engine = Engine(self.policy, config.env, run_dir) if config.env.use_vllm else None
        self.failed_saves = 0

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, stop: StopSignal) -> dict[str, Any]:
        """Draw tasks, play them, update, tell the curriculum; return the row of metrics."""
        step, ppo, started = self.state.step, self.ppo, time.perf_counter()
        tasks = [self.curriculum.next(step * ppo.batch_size + i) for i in range(ppo.batch_size)]
        episodes = self.ranks.gather(play(self.config.env, self.player(stop), self.ranks.share(tasks)))
        played = time.perf_counter()
        valid = self.without_failed(episodes)
        if self.engine:
            self.engine.check_age(s for e in valid for sequences in e.sequences.values() for s in sequences)
        moments = dict(self.state.moments) if ppo.standardise_rewards else None
        batch = collate(valid, self.policy, ppo, self.state.kl_coef, moments, self.ranks)
        legal = self.legal_mass(batch)
        self.set_learning_rate(step)  # after collate: reading the reference makes the whole adapter trainable again
        now = replace(ppo, entropy_coef=ppo.entropy_coef * decay(ppo, step, ppo.entropy_final))
        key = (self.config.run.seed, step)
        stats = ppo_update(self.policy, self.optimizer, batch, now, key, self.state.bad_updates, self.ranks)
        self.state.bad_updates = int(stats.pop("bad_updates"))
        if self.state.bad_updates >= ppo.max_bad_updates and self.ranks.first:
            self.dump(batch, valid)
        self.state.moments = moments or {}
        decisions = len(batch.values_M)
        self.state.kl_coef = adapt_kl_coef(self.state.kl_coef, batch.kl_ref, decisions, ppo)
        self.state.tokens_per_batch = self.policy.tokens_per_batch
        stage, events = self.curriculum.stage.name, len(self.curriculum.events)
        for episode in valid:
            if episode.outcome != "truncated":
                self.curriculum.update(episode.task, episode.score)
        self.state.step += 1
        self.keep_past()
        ended = time.perf_counter()
        row = {"step": self.state.step, "stage": stage, **summarise(episodes), **batch.summary(), **legal, **stats}
        row |= {"kl_coef": self.state.kl_coef, "learning_rate": self.optimizer.param_groups[0]["lr"],
                "buffer_size": self.curriculum.buffer_size, "window_success": self.curriculum.success_rate,
                "gate_success": self.curriculum.gate_rate,
                "time_rollout": played - started, "time_update": ended - played, "time_total": ended - started,
                "games_per_s": len(episodes) / (ended - started), "decisions_per_s": decisions / (ended - started),
                "memory_mb": peak_memory_mb()}  # fmt: skip
        if len(self.curriculum.events) > events:
            row |= {"stage_change": self.curriculum.stage.name, "stage_reason": self.curriculum.last_change}
        self.respond(row)
        return row

    def respond(self, row: dict[str, Any]) -> None:
        """Adapt the learning rate to what the step did, end the critic's warm-up, raise alarms."""
        ppo, state = self.ppo, self.state
        if (
            ppo.lr_target_kl is not None
        ):  # the rule of thumb of https://arxiv.org/abs/1707.06347, section 4, on the rate
            if row["approx_kl"] > 2 * ppo.lr_target_kl:
                state.lr_scale = max(state.lr_scale / 1.5, alarms.LEAST_SCALE)
            elif row["approx_kl"] < ppo.lr_target_kl / 2:
                state.lr_scale = min(state.lr_scale * 1.5, 1.0)
        if ppo.critic_warmup_ev is not None and row["explained_variance"] >= ppo.critic_warmup_ev:
            state.critic_ready = True
        if ppo.alarms == "off" or not row["updates"] or state.step <= ppo.critic_warmup_steps:
            return
        raised = alarms.watch(row, state.alarms)
        if raised:
            row["alarms"] = [alarm.name for alarm in raised]
        for alarm in raised:
            log.warning("step %d: alarm %s: %s", state.step, alarm.name, alarm.meaning)
            if ppo.alarms == "act" and alarm.action == "slow":
                state.lr_scale = max(state.lr_scale * alarms.SLOWER, alarms.LEAST_SCALE)

    def player(self, stop: StopSignal) -> Any:
        """The policy, leaving a rollout or an evaluation on a signal; several processes agree on it between steps.

        With ``env.use_vllm`` servers play, with the policy's weights as they are now.
        """
        if self.engine:
            self.engine.stop = lambda: stop.received
            self.engine.publish(self.state.step)
            return StoppablePlayer(self.engine, stop)
        return StoppablePlayer(self.policy, stop) if self.ranks.world == 1 else self.policy

    def keep_past(self) -> None:
        """Every ``past_every`` steps the policy as it is becomes one of the opponents called ``past``."""
        if self.config.curriculum.plays_past and self.state.step % self.config.curriculum.past_every == 0:
            name = f"step-{self.state.step:06d}"
            for gone in self.curriculum.add_past(name):
                self.policy.forget_past(gone)
            self.policy.keep_past(name)

    def legal_mass(self, batch: Batch) -> dict[str, float]:
        """Probability that an unconstrained answer would have been legal, over the step's first decisions."""
        if not self.policy.constrained:
            return {}
        with torch.no_grad():
            mass = self.policy.log_legal_mass(batch.sequences[:LEGAL_MASS_SAMPLE]).exp().mean()
        return {"legal_mass": float(mass)}

    def without_failed(self, episodes: list[Episode]) -> list[Episode]:
        """Leave out what infrastructure lost; too much of it ends the run."""
        failed = [e for e in episodes if e.outcome == "failed"]
        if len(failed) > self.ppo.max_failed_share * len(episodes):
            cause = failed[0].info.get("error", "unknown")
            raise TrainingError(f"{len(failed)} of {len(episodes)} episodes failed; the first: {cause}")
        return [e for e in episodes if e.outcome != "failed"]

    def set_learning_rate(self, step: int) -> None:
        """Set the step's learning rate; during the critic's warm-up only the value head moves."""
        self.optimizer.param_groups[0]["lr"] = learning_rate(self.ppo, step) * self.state.lr_scale
        warm = step >= self.ppo.critic_warmup_steps or self.state.critic_ready
        for name, parameter in self.policy.trainable().items():
            parameter.requires_grad_(warm or name.startswith("value_head."))

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, stop: StopSignal) -> list[GameResult]:
        """Evaluate against uniform random on the games of the curriculum's stages, on reserved seeds."""
        player, tasks = self.player(stop), tasks_of(self.config)
        return self.ranks.alone(lambda: evaluate(player, self.config.env, tasks, self.ppo.eval_games))

    # -- files ---------------------------------------------------------------------------------------------------

    def dump(self, batch: Batch, episodes: list[Episode]) -> None:
        """Write what the updates that were not finite were made of to ``bad_batch.json``, for whoever looks into it."""
        tasks = [{"task_id": e.task.task_id, "seed": e.task.seed, "opponent": e.task.opponent} for e in episodes]
        rows = [{"task": tasks[unit], "ids": sequence.ids, "decisions": [asdict(d) for d in sequence.decisions],
                 "advantages": batch.advantages_M[span].tolist(), "returns": batch.returns_M[span].tolist(),
                 "old_logprobs": batch.old_logprobs_M[span].tolist()}
                for unit, sequence, span in zip(batch.unit, batch.sequences, batch.spans, strict=True)]  # fmt: skip
        (self.run_dir / "bad_batch.json").write_text(json.dumps({"step": self.state.step + 1, "sequences": rows}))

    def save(self, score: float | None = None) -> Path:
        """Write a checkpoint of everything; the metrics are on disk first, so that a resume finds no gap."""
        if not self.ranks.first:
            return self.run_dir
        self.metrics.sync()
        tensors, rest = utils.pack_optimizer(self.optimizer, self.names)
        past = {f"{name}/{key}": tensor for name in self.curriculum.past
                for key, tensor in self.policy.past_adapter(name).items()}  # fmt: skip
        state = finite(vars(self.state)) | {"optimizer": rest, "threads": torch.get_num_threads()}
        return utils.save_checkpoint(
            self.run_dir, self.state.step, self.policy.save,
            documents={"trainer_state": state, "curriculum": self.curriculum.state_dict(),
                       "run_config": utils.config_dict(vars(self.config))},
            tensors={"optimizer": tensors} | ({"past": past} if past else {}),
            base=self.base, score=score, keep_last=self.config.run.keep_last, keep_best=int(self.config.run.keep_best),
        )  # fmt: skip

    def save_if_possible(self, score: float | None) -> None:
        """Save at a boundary. Where that fails, training goes on to the next one, unless it has failed too often."""
        try:
            self.save(score)
            self.failed_saves = 0
        except utils.CheckpointError as error:
            self.failed_saves += 1
            if self.failed_saves == FAILED_SAVES:
                raise
            log.warning("training goes on without a checkpoint: %s", error)

    def save_at_the_end(self) -> str:
        """Save for the last time; return the checkpoint's path, or that of the newest sound one and what went wrong."""
        try:
            return str(self.save())
        except utils.CheckpointError as error:
            return f"{utils.latest_checkpoint(self.run_dir) or 'none'} ({error})"

    def load(self, path: Path, force: bool = False) -> None:
        """Go on exactly where a checkpoint was written.

        Args:
            path: the checkpoint.
            force: go on although its base model or tokenizer is another one.

        Raises:
            CheckpointError: it does not hold what a checkpoint of this run holds.
            ConfigError: it belongs to another base model, tokenizer or configuration.
        """
        saved = utils.load_checkpoint(path)
        with utils.naming(f"{path}: "):
            for part in ("weights", "tokenizer"):
                if saved.manifest["base"].get(part, self.base[part]) != self.base[part]:
                    changed = f"{path}: the {part} of {self.base['model']} are not those that it was trained with"
                    if not force:
                        raise ConfigError(f"--resume: {changed}; --force-config goes on")
                    log.warning("%s", changed)
            state = saved.json("trainer_state")
            self.policy.load(path)
            utils.unpack_optimizer(self.optimizer, saved.tensors("optimizer"), state.pop("optimizer"), self.names)
            threads = state.pop("threads")
            self.state = make(TrainerState, state, "trainer_state")
            if self.state.row:
                self.state.row = {key: np.nan if value is None else value for key, value in self.state.row.items()}
            self.state.alarms = {key: np.nan if value is None else value for key, value in self.state.alarms.items()}
            self.curriculum.load_state_dict(saved.json("curriculum"))
            past = saved.tensors("past") if self.curriculum.past else {}
            for name in self.curriculum.past:
                mine = {key.removeprefix(f"{name}/"): t for key, t in past.items() if key.startswith(f"{name}/")}
                self.policy.keep_past(name, mine)
        if threads != torch.get_num_threads():
            log.warning("saved with %s threads, now %d: the resumed run will not be identical to the bit",
                        threads, torch.get_num_threads())  # fmt: skip
        self.policy.tokens_per_batch = self.state.tokens_per_batch
        if self.ranks.first:
            utils.abandon_after(self.run_dir, self.state.step)
            self.metrics.truncate_to(self.state.step)


def train(config: SimpleNamespace, resume: str | None, force_config: bool = False, ranks: Ranks = LONE) -> int:
    """Run the training loop; return the exit code."""
    run_dir = Path(config.run.output_dir)
    resolved = utils.config_dict(vars(config))
    lock = lock_run(run_dir) if ranks.first else None
    start = ranks.alone(lambda: find_checkpoint(run_dir, resume, resolved, force_config))
    if ranks.first:
        (run_dir / "run_config.json").write_text(json.dumps(utils.redact(resolved), indent=1))
    trainer = Trainer(config, run_dir, ranks)
    if start is not None:
        trainer.load(start, force_config)
    ppo, state = config.ppo, trainer.state
    if state.step >= ppo.num_train_steps and (run_dir / "summary.json").exists():
        print(f"{run_dir} is finished: {state.step} of {ppo.num_train_steps} steps, see {run_dir / 'summary.json'}")
        return 0
    utils.rest_collector()
    mode = config.run.wandb_mode if ranks.first else "disabled"
    wandb = WandbLog(mode, run_dir, resolved, project=config.run.wandb_project)
    console = Console(ppo.num_train_steps, state.step, None if ranks.first else io.StringIO())
    code = 1
    try:
        with StopSignal() as stop:
            if start is None and ranks.first:
                trainer.metrics.truncate_to(0)
            code = training_loop(trainer, stop, console, wandb)
        return code
    finally:
        console.close()
        wandb.close(code)
        trainer.metrics.close()
        if trainer.engine:
            trainer.engine.close()
        if lock:
            lock.close()


def training_loop(trainer: Trainer, stop: StopSignal, console: Console, wandb: WandbLog) -> int:
    """Step until done, interrupted or unable to go on; checkpoint between steps only."""
    ppo, state, started, first = trainer.ppo, trainer.state, time.perf_counter(), trainer.state.step
    try:
        if not state.before:
            state.before = [vars(r) | {"share": r.share} for r in trainer.evaluate(stop)]
        while state.step < ppo.num_train_steps or state.row:
            row = state.row = state.row or trainer.step(stop)
            score = None
            if ppo.eval_freq and state.step % ppo.eval_freq == 0 and state.step < ppo.num_train_steps:
                results = trainer.evaluate(stop)
                score = float(np.mean([r.value if r.share is None else r.share for r in results]))
                row |= {f"eval/{r.game}": r.value if r.share is None else r.share for r in results}
            state.row = None
            if trainer.ranks.first:
                trainer.metrics.append(row)
            wandb.log(row)
            left = (ppo.num_train_steps - state.step) * (time.perf_counter() - started) / max(state.step - first, 1)
            console.update(state.step, progress_line(row, ppo.num_train_steps, left))
            if "stage_change" in row:
                console.say(f"stage {row['stage']} is passed: now {row['stage_change']} ({row['stage_reason']})")
            if state.bad_updates >= ppo.max_bad_updates:
                raise TrainingError(f"{state.bad_updates} minibatches in a row gave a loss or gradient that is not "
                                    f"finite; the last are in {trainer.run_dir / 'bad_batch.json'}")  # fmt: skip
            fatal = [a for a in alarms.ALARMS if a.name in row.get("alarms", ()) and a.action == "stop"]
            if fatal and ppo.alarms == "act":
                raise TrainingError(f"alarm {fatal[0].name}: {fatal[0].meaning}")
            if state.step % ppo.save_freq == 0 or score is not None:
                trainer.save_if_possible(score)
            stop.received = int(trainer.ranks.largest(stop.received))
            if stop.received:
                raise InterruptedRolloutError
        trainer.ranks.alone(lambda: finish(trainer, stop, console))
        return 0
    except InterruptedRolloutError:
        console.say(f"interrupted after step {state.step}; checkpoint: {trainer.save_at_the_end()}")
        return stop.exit_code
    except BrokenStepError as error:
        kept = utils.latest_checkpoint(trainer.run_dir) or "none yet"
        raise TrainingError(f"in step {state.step + 1}: {error}; checkpoint: {kept}") from error
    except (TrainingError, EngineError) as error:
        raise TrainingError(f"after step {state.step}: {error}; checkpoint: {trainer.save_at_the_end()}") from error


def finish(trainer: Trainer, stop: StopSignal, console: Console) -> None:
    """Evaluate, write the summary, sample games, the final adapter and the curves, and show them."""
    player = trainer.player(stop)
    results = evaluate(player, trainer.config.env, tasks_of(trainer.config), trainer.ppo.eval_games)
    tasks = [task for t in tasks_of(trainer.config) for task in eval_tasks([(t, t)], 3, 1)]
    rows = record(player, trainer.config.env, tasks, trainer.state.step)
    (trainer.run_dir / "episodes.jsonl").write_text("".join(json.dumps(utils.redact(row)) + "\n" for row in rows))
    checkpoint = trainer.save()
    final = utils.write_directory(trainer.run_dir / "final", trainer.policy.save)
    table, summary = result_table(trainer.state.before, results)
    summary |= {"steps": trainer.state.step, "seed": trainer.config.run.seed, "checkpoint": checkpoint.name}
    (trainer.run_dir / "summary.json").write_text(json.dumps(summary, indent=1))
    console.say(f"\n{table}\n\ncheckpoint: {checkpoint}\nadapter:    {final}")
    script = str(Path(__file__).parent / "scripts" / "visualize.py")
    drawn = subprocess.run(
        [sys.executable, script, "--checkpoint_dir", str(trainer.run_dir)], capture_output=True, text=True
    )
    if drawn.returncode:
        cause = (drawn.stderr.strip() or "unknown cause").splitlines()[-1]
        console.say(f"no curves were drawn: {cause}")
    else:
        console.say(f"curves:     {trainer.run_dir / 'curves.png'}\nreport:     {trainer.run_dir / 'report.html'}")


# ---------------------------------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    """Run the program; exit codes: 0 done, 1 training failed, 2 bad usage or configuration, 128 + signal."""
    setup_logging()
    args = parse_args(argv, __doc__)
    try:
        config = read_config(args)
        if args.dry_run:
            print(describe(config))
            return 0
        ranks = Ranks.join(device_of(config.model))
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        if config.env.env_type == "trace":
            from envs.trace import check_config

            check_config(config.env, tasks_of(config))
        check_prompts(config)
        if config.env.use_vllm:
            check_servers(config, ranks.world)
        return train(config, args.resume, args.force_config, ranks)
    except ConfigError as error:
        print(f"error: {utils.redact(str(error))}", file=sys.stderr)
        return 2
    except (TrainingError, utils.CheckpointError, torch.OutOfMemoryError, OSError) as error:
        print(f"training failed: {utils.redact(str(error))}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
