"""Make a small chat model better at games by PPO with turn-level credit.

    python train_ppo.py --config config/presets/tiny.json      # a laptop
    python train_ppo.py                                        # Qwen3-4B in 4 bits, one GPU
    python train_ppo.py --resume                               # go on exactly where the last checkpoint was

A decision (one whole answer of the model) is the unit of credit: generalised advantage estimation runs over a
seat's own decisions, and the ratio is exp(sum of new - sum of old log-probabilities over the answer's tokens).

Shapes: S trajectories (one seat of an episode each), T decisions of the longest, M decisions of the batch in a row.
References: PPO https://arxiv.org/abs/1707.06347, GAE https://arxiv.org/abs/1506.02438,
adaptive KL https://arxiv.org/abs/1909.08593, magnetic mirror descent https://arxiv.org/abs/2206.05825.
"""

import io
import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # torch reads it on import
sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with PYTHONSAFEPATH
if __name__ == "__main__":
    import config.start  # noqa: F401, before libraries load

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

import utils
from config.flags import one_line
from config.reader import ConfigError, config_dict
from curriculum import eval_tasks
from env_wrapper import play
from envs.types import Episode, InterruptedRolloutError
from evaluation import english
from evaluation.measure import GameResult, Progress, evaluate, mean_grade, record, result_table, too_many_failed
from policy.attention import in_fixed_order
from policy.model import device_of
from policy.player import Policy
from policy.rehearsal import divergence
from training import alarms, preflight, process, trajectories
from training.about import begin, end, headline
from training.config import SECTIONS, PPOConfig, RunConfig, decay, parse_args, read_config  # noqa: F401, public
from training.console import Console
from training.folder import find_checkpoint, is_finished
from training.loggers import Loggers
from training.memory import with_less_memory
from training.metrics import summarise, timing
from training.positions import known_states
from training.process import StopSignal, TrainingError
from training.ranks import LONE, Ranks, SharedError, add_up, means
from training.state import Checkpointed
from training.trajectories import Batch, Moments, Trajectory, game_groups, log_ratios, rewards, rollout_scores

GAPS = ("logprob_gap_mean", "logprob_gap_max")  # |learner's - sampler's| log-probability
STATS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "legal_mass", "rehearsal_kl",
         "state_loss", "misfit", "ratio_max", *GAPS)  # fmt: skip
OPTIONAL = {
    "legal_mass": "legal_mass_coef",
    "rehearsal_kl": "rehearsal_coef",
    "state_loss": "state_coef",
    "misfit": "sweep",
}
UNCLIPPED = "state_head."  # its gradient would dominate the norm, and Adam does not depend on its scale
Key = tuple[int, ...]  # of a stream of random numbers
MOST_EMPTY = 100  # times that a step plays its games until one of them holds a decision
NEURD_CAP = 4.0  # of the weight 1 / p of an answer: what is rarer moves no further
MAX_BAD_UPDATES = 5  # minibatches in a row without a finite loss and gradient before the run ends


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


def whiten(x_M: Tensor, groups_M: Tensor | None = None, noisy_M: Tensor | None = None) -> Tensor:
    """Shift and scale to mean 0 and deviation 1 (population; that of ``noisy_M`` if larger), per group; -1: as all."""
    if not len(x_M):
        return x_M
    if x_M.std(correction=0) <= 1e-6 * x_M.abs().max().clamp(min=10):  # rounding errors must not be amplified
        return torch.zeros_like(x_M)
    noisy_M = x_M if noisy_M is None else noisy_M
    out_M = (x_M - x_M.mean()) / (torch.maximum(x_M.std(correction=0), noisy_M.std(correction=0)) + 1e-8)
    for group in [] if groups_M is None else groups_M.unique():
        if group >= 0:
            out_M[groups_M == group] = whiten(x_M[groups_M == group], None, noisy_M[groups_M == group])
    return out_M


def collate(
    episodes: list[Episode],
    policy: Policy,
    ppo: PPOConfig,
    kl_coef: float,
    moments: Moments | None = None,
    ranks: Ranks = LONE,
) -> Batch:
    """Turn episodes, without failed ones, into decisions with advantages.

    A trajectory receives its reward, standardised if ``moments`` are given, after its last decision, and the KL penalty
    after each. If truncated, it has no reward, and its last decision is not trained. GAE leaves out the magnet's pull.
    """
    rows = [Trajectory(n, e, seat) for n, e in enumerate(episodes) for seat in sorted(e.sequences) if e.sequences[seat]]
    if not rows:
        raise SharedError("no episode of this step holds a decision to train on")
    sequences = [sequence for row in rows for sequence in row.sequences]
    logprobs_M, values_M, importance_M, gap_M = rollout_scores(rows, sequences, policy, ppo, ranks)
    kl_M, pull_M = log_ratios(logprobs_M, sequences, policy, kl_coef, ppo.magnet_coef, ranks)
    lengths_S = torch.tensor([len(row.decisions) for row in rows])
    cut_S, last_S = torch.tensor([row.cut for row in rows]), lengths_S.cumsum(0) - 1
    rewards_M, luck_M, worth_M, reward_mean = rewards(rows, moments, ppo.less_luck)
    rewards_M -= kl_coef * kl_M
    trained_M = torch.ones_like(kl_M, dtype=torch.bool).index_fill(0, last_S[cut_S], False)
    bootstrap_S = torch.where(cut_S, values_M[last_S], 0.0)
    lucky_M, _ = advantages(rewards_M, values_M, trained_M, lengths_S, bootstrap_S, ppo)
    advantages_M, returns_M = advantages(rewards_M - luck_M, values_M, trained_M, lengths_S, bootstrap_S, ppo)
    advantages_M = torch.where(worth_M.isnan(), advantages_M, returns_M - worth_M)
    group_M = game_groups(rows).repeat_interleave(lengths_S)
    advantages_M[trained_M] = whiten(advantages_M[trained_M], group_M[trained_M], lucky_M[trained_M])
    advantages_M -= ppo.magnet_coef * pull_M  # magnetic mirror descent, with a magnet that moves
    return Batch(
        sequences=sequences,
        unit=[row.unit for row in rows for _ in row.sequences],
        old_logprobs_M=logprobs_M.to(policy.device),
        values_M=values_M.to(policy.device),
        advantages_M=advantages_M.to(policy.device),
        returns_M=returns_M.to(policy.device),
        weights_M=(trained_M * importance_M).to(policy.device),
        reward_mean=reward_mean,
        kl_ref=float(kl_M.mean()),
        kl_average=float(pull_M.mean()),
        gap_M=gap_M,
        states=known_states(rows) if ppo.state_coef else (),
    )


def advantages(
    rewards_M: Tensor, values_M: Tensor, trained_M: Tensor, lengths_S: Tensor, bootstrap_S: Tensor, ppo: PPOConfig
) -> tuple[Tensor, Tensor]:
    """``turn_gae`` of concatenated trajectories, ``lengths_S`` decisions each."""
    real_ST = torch.arange(int(lengths_S.max()))[None] < lengths_S[:, None]

    def grid(x_M: Tensor) -> Tensor:
        return x_M.new_zeros(real_ST.shape).masked_scatter(real_ST, x_M)

    mask_ST = grid(trained_M)
    advantages_ST, returns_ST = turn_gae(grid(rewards_M), grid(values_M), mask_ST, bootstrap_S, ppo.gamma, ppo.lam)
    return advantages_ST[real_ST], returns_ST[real_ST]


# -------------------------------------------------------------------------------------------------- loss and update


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
    preferences_M: Tensor | None = None,
    spread_M: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate, value loss and entropy bonus (https://arxiv.org/abs/1707.06347, eqs. 7 and 9).

    Every term is a sum over decisions weighted by ``weights_M``: the caller divides by the number of decisions of the
    whole optimizer step, so that the gradient does not depend on the micro-batches. The value loss is clipped as in
    OpenAI Baselines, not as in the paper. The second result holds statistics: detached sums, and ``_max`` values.
    With ``preferences_M`` and ``spread_M`` (see ``Evaluation``) Neural Replicator Dynamics replaces the surrogate
    (https://arxiv.org/abs/1906.00190): the gradient lacks the answer's own probability as a factor, bonus included.
    """
    log_ratio_M = logprobs_M - old_logprobs_M
    ratio_M, gap_M = log_ratio_M.exp(), log_ratio_M.abs()
    bonus_M, clip = entropies_M, ppo.cliprange or math.inf
    clipped_M = ratio_M.clamp(1 - clip, 1 + clip)
    policy_M = torch.maximum(-advantages_M * ratio_M, -advantages_M * clipped_M)
    near_M = old_values_M + (values_M - old_values_M).clamp(-clip, clip)
    value_M = 0.5 * torch.maximum((values_M - returns_M) ** 2, (near_M - returns_M) ** 2)
    if preferences_M is not None and spread_M is not None:
        policy_M = -advantages_M * (-old_logprobs_M).exp().clamp(max=NEURD_CAP) * preferences_M
        bonus_M = -spread_M
    loss = (weights_M * (policy_M + ppo.vf_coef * value_M - ppo.entropy_coef * bonus_M)).sum()
    with torch.no_grad():
        parts = {
            "policy_loss": policy_M,
            "value_loss": value_M,
            "entropy": entropies_M,
            "approx_kl": ratio_M - 1 - log_ratio_M,  # http://joschu.net/blog/kl-approx.html, k3
            "clip_fraction": (ratio_M != clipped_M).float(),
            "logprob_gap_mean": gap_M,
        }
        stats = {name: (weights_M * part).sum() for name, part in parts.items()}
        trained_M = weights_M > 0
        stats |= {"ratio_max": (trained_M * (ratio_M - 1).abs()).max(), "logprob_gap_max": (trained_M * gap_M).max()}
    return loss, stats


def minibatches(games: int, ppo: PPOConfig, key: Key) -> list[list[int]]:
    """Shuffle the games of a step, seeded with ``key``, and cut them into optimizer steps of 1/2 to 3/2 size."""
    size = ppo.mini_batch_size * ppo.gradient_accumulation_steps
    cuts = range(size, games - size // 2, size)  # a small remainder would move the weights as far as a full step
    return [part.tolist() for part in np.split(np.random.default_rng(key).permutation(games), cuts)]


def _backward(
    policy: Policy, batch: Batch, members: list[int], ppo: PPOConfig, ranks: Ranks = LONE
) -> tuple[Tensor, dict[str, Any]]:
    """Accumulate the gradient of this process's share of one optimizer step's sequences, micro-batch by micro-batch.

    Return the loss, and the sums of the statistics over the decisions.
    """
    count = batch.weights_M[torch.cat([batch.spans[i] for i in members])].sum()
    loss_sum = torch.zeros((), device=policy.device)
    sums: dict[str, Any] = dict.fromkeys(STATS, 0.0) | {"decisions": count / ranks.world}  # summed over processes later
    members = ranks.share(members)
    for micro in policy.micro_batches([batch.sequences[i] for i in members]):
        sequences = [batch.sequences[members[j]] for j in micro]
        at_M = torch.cat([batch.spans[members[j]] for j in micro])
        new = policy.evaluate_batch(sequences, ppo.entropy_coef > 0, ppo.legal_mass_coef > 0, ppo.cliprange is None)
        weights_M = batch.weights_M[at_M]
        loss, stats = ppo_loss(
            new.logprobs, new.values, new.entropies, batch.old_logprobs_M[at_M], batch.values_M[at_M],
            batch.advantages_M[at_M], batch.returns_M[at_M], weights_M, ppo, new.preferences, new.spread,
        )  # fmt: skip
        if new.legal_mass is not None:
            loss = loss - ppo.legal_mass_coef * (weights_M * new.legal_mass).sum()
            stats["legal_mass"] = (weights_M * new.legal_mass.detach().exp()).sum()
        if ppo.state_coef:
            nats = (weights_M * policy.state_head(new.prompts, [batch.states[i] for i in at_M.tolist()])).sum()
            loss, stats["state_loss"] = loss + ppo.state_coef * nats, nats.detach()
        if batch.targets_M is not None:  # in place of advantages
            misfit = ((new.logprobs - batch.targets_M[at_M]) ** 2).sum() / 2
            loss, stats["misfit"] = loss + misfit, misfit.detach()
        loss = loss / count.clamp(min=1e-8)
        loss.backward()
        loss_sum += loss.detach()
        add_up(sums, stats)
    if mine := ranks.share(batch.texts):
        kl = divergence(policy, mine) / sum(len(text.ids) for text in batch.texts)
        (ppo.rehearsal_coef * kl).backward()
        loss_sum += ppo.rehearsal_coef * kl.detach()
        sums["rehearsal_kl"] = kl.detach() * count
    return loss_sum, sums


def ppo_update(
    policy: Policy, optimizer: Optimizer, batch: Batch, ppo: PPOConfig, key: Key, bad: int = 0, ranks: Ranks = LONE
) -> dict[str, float]:
    """Run the epochs of one step; return means over the decisions seen.

    A minibatch whose loss or gradient is not finite changes nothing and is ``skipped``. ``MAX_BAD_UPDATES`` of them in
    a row, ``bad`` of which came before the step, end it; ``bad_updates`` is their number then. If memory runs out, the
    minibatch is repeated with smaller batches. ``GAPS`` are of the first one, read with the weights that played.
    """
    named, games, first = policy.trainable(), batch.games, dict[str, Any]()
    totals: dict[str, Any] = dict.fromkeys((*STATS, "decisions"), 0.0)
    policy.forget()
    stats = {"skipped": 0.0, "grad_norm": 0.0, "updates": 0.0, "epochs": 0.0, "bad_updates": bad}
    for epoch in range(ppo.ppo_epochs):
        before = (totals["approx_kl"], totals["decisions"])
        for chosen in minibatches(len(games), ppo, (*key, epoch)):
            members = [i for game in chosen for i in games[game]]
            work = partial(_backward, policy, batch, members, ppo, ranks)
            with in_fixed_order(policy.device):
                loss, sums = ranks.agreed(partial(with_less_memory, policy, optimizer, work))
            ranks.add_up_gradients(named.values(), loss, sums)
            if not sums["decisions"]:  # all of its games were truncated: only momentum would move the weights
                optimizer.zero_grad(set_to_none=True)
                continue
            first = first or sums
            reached: dict[str, Any] = {n: p for n, p in named.items() if p.grad is not None}
            norm = clip_grad_norm_([p for n, p in reached.items() if not n.startswith(UNCLIPPED)], ppo.max_grad_norm)
            sound = bool(torch.isfinite(loss + norm + get_total_norm([p.grad for p in reached.values()])))
            if sound:
                optimizer.step()
                add_up(totals, sums)
                stats["grad_norm"] += float(norm)
            stats["updates" if sound else "skipped"] += 1
            stats["bad_updates"] = 0 if sound else stats["bad_updates"] + 1
            optimizer.zero_grad(set_to_none=True)
            if stats["bad_updates"] >= MAX_BAD_UPDATES:
                break
        stats["epochs"] += 1
        epoch_kl = float(totals["approx_kl"] - before[0]) / max(float(totals["decisions"] - before[1]), 1)
        if epoch_kl > (ppo.target_kl or math.inf) or stats["bad_updates"] >= MAX_BAD_UPDATES:
            break
    stats["grad_norm"] /= stats["updates"] or math.nan
    for name in [name for name, coef in OPTIONAL.items() if not getattr(ppo, coef)]:
        del totals[name]
    return stats | means(totals) | means({name: first.get(name, 0.0) for name in (*GAPS, "decisions")})


# -------------------------------------------------------------------------------------------------------- one step


class Trainer(Checkpointed):
    """A training run, with a method for each part of a step; its objects and checkpoints are in training/state.py."""

    def step(self, stop: StopSignal) -> dict[str, Any]:
        """Draw tasks, play them (more if others end all of them first), update, and return the row of metrics."""
        state, ppo, started, episodes = self.state, self.ppo, time.perf_counter(), list[Episode]()
        texts = self.rehearsal.texts(state.step) if ppo.rehearsal_coef else []
        player = self.player(stop, trained_on=True)
        self.agree_on_batches()  # the first process may have met the end of its memory in an evaluation
        self.policy.forget()
        with self.policy.keeping_context():
            most, valid = MOST_EMPTY * ppo.batch_size, list[Episode]()
            while len(episodes) < most and not any(e.sequences for e in valid):
                tasks = [self.curriculum.next(state.drawn + len(episodes) + i) for i in range(ppo.batch_size)]
                episodes += self.ranks.together(partial(play, self.config.env, player, self.ranks.share(tasks)))
                valid = self.without_failed(episodes)
            self.policy.forget()
            played = time.perf_counter()

            moments = dict(state.moments)
            if ppo.sweep:
                batch = self.sweeps.batch(tasks, replace(ppo, entropy_coef=self.entropy_coef), self.ranks)
            else:
                batch = collate(valid, self.policy, ppo, state.kl_coef, moments, self.ranks)
            batch.texts = texts
            self.midway = True
            stats = self.update(batch)
            moved = batch.moved(self.policy, not ppo.legal_mass_coef, self.ranks)
        state.bad_updates, state.moments = int(stats.pop("bad_updates")), moments
        if state.bad_updates >= MAX_BAD_UPDATES and self.ranks.first:
            batch.dump(self.run_dir / "bad_batch.json", state.step + 1, valid)
        state.kl_coef = trajectories.adapt_kl_coef(state.kl_coef, batch.kl_ref, len(batch.values_M), ppo)

        stage = self.curriculum.stage
        scores = [None if e.outcome in ("truncated", "failed") else e.score for e in episodes]
        updated = [self.curriculum.update(e.task, s, stage) for e, s in zip(episodes, scores, strict=True)]
        state.step, state.drawn = state.step + 1, state.drawn + len(episodes)
        self.keep_past()
        self.grow_batches()
        row = {"step": state.step, "stage": stage.name, **summarise(episodes), **stats, **batch.summary(), **moved}
        row |= {"kl_coef": state.kl_coef, "learning_rate": self.optimizer.param_groups[0]["lr"],
                "buffer_size": self.curriculum.buffer_size, **self.curriculum.rates}  # fmt: skip
        if reasons := [reason for reason in updated if reason]:
            row |= {"stage_change": self.curriculum.stage.name, "stage_reason": reasons[-1]}
        row |= timing(started, played, time.perf_counter(), len(episodes), len(batch.values_M))
        state.lr_scale = alarms.respond(row, state.alarms, state.lr_scale, ppo)
        self.midway = False
        return row

    def update(self, batch: Batch) -> dict[str, float]:
        """Run PPO with the step's learning rate and entropy bonus, which targets hold already."""
        rate = self.ppo.learning_rate * decay(self.ppo, self.state.step, self.ppo.lr_final)
        self.optimizer.param_groups[0]["lr"] = rate * self.state.lr_scale
        ppo = replace(self.ppo, entropy_coef=self.entropy_coef if batch.targets_M is None else 0.0)
        key = (self.config.run.seed, self.state.step)
        return ppo_update(self.policy, self.optimizer, batch, ppo, key, self.state.bad_updates, self.ranks)

    def without_failed(self, episodes: list[Episode]) -> list[Episode]:
        """Drop episodes that failed; too many of them end the run, and so do answers by outdated weights."""
        failed = [e for e in episodes if e.outcome == "failed"]
        if too_many_failed(len(failed), len(episodes)):
            raise SharedError(f"{len(failed)} of {len(episodes)} episodes failed; the first: {failed[0].info['error']}")
        valid = [e for e in episodes if e.outcome != "failed"]
        if self.engine:
            self.engine.check_age(s for e in valid for sequences in e.sequences.values() for s in sequences)
        return valid

    def refuse_to_go_on(self, row: dict[str, Any]) -> None:
        """Raise SharedError if updates are persistently not finite, or an alarm ends the run."""
        if self.state.bad_updates >= MAX_BAD_UPDATES:
            raise SharedError(f"{self.state.bad_updates} minibatches in a row gave a loss or gradient that is not "
                                f"finite; the last are in {self.run_dir / 'bad_batch.json'}")  # fmt: skip
        if fatal := alarms.fatal(row, self.ppo):
            raise SharedError(f"alarm {fatal.name}: {fatal.meaning}")

    def evaluate(self, stop: StopSignal, tell: Progress) -> list[GameResult]:
        """Evaluate against uniform random on the games of the curriculum's stages, on reserved seeds.

        With ``legal_mass_coef``, which teaches legal answers, the same games are also played without constraint.
        """
        nash, games = not self.config.curriculum.opponents.isdisjoint(("past", "self")), self.ppo.eval_games
        measure = partial(evaluate, self.player(stop), self.config.env, self.evaluated, games, progress=tell, nash=nash)
        results, free = measure(exact_tasks=self.exact), list[GameResult]()
        if self.ppo.legal_mass_coef and self.policy.constrained:
            self.policy.constrained = False
            try:
                free = measure(exact_tasks=())
            finally:
                self.policy.constrained = True
        for r in (*results, *free):
            if too_many_failed(r.failed, r.failed + r.episodes):
                raise TrainingError(f"{r.failed} of {r.failed + r.episodes} games of {r.game} failed in an evaluation")
        free_play = [{"value": f.value, "legal_rate": f.legal_rate} for f in free]
        return [replace(r, free_play=f) for r, f in zip(results, free_play, strict=True)] if free else results


# --------------------------------------------------------------------------------------------------------- the run


def train(config: Any, resume: str | None, force_config: bool = False, ranks: Ranks = LONE, seen: Any = None) -> int:
    """Set up a run, train and close it; return the exit code. ``seen``: its checkpoints when ``resume`` was chosen."""
    run_dir = Path(config.run.output_dir)
    resolved = config_dict(vars(config))
    locks: list[Any] = []
    ranks.alone(lambda: locks.append(process.lock_run(run_dir, seen)))
    if resume is not None and ranks.alone(partial(is_finished, run_dir, resume, resolved, force_config)):
        if ranks.first:
            more = f"{process.draw_command(run_dir)} draws it; --set ppo.num_train_steps=N goes on to step N"
            print(f"{run_dir} is finished: see {run_dir / 'summary.json'}; {more}")
        return 0
    if ranks.first:
        process.log_into(run_dir)
    start = ranks.alone(lambda: find_checkpoint(run_dir, resume, resolved, force_config))
    console = Console(config.ppo.num_train_steps, None if ranks.first else io.StringIO(), config.ppo.eval_freq)
    trainer = Trainer(config, run_dir, ranks)
    trainer.lock = next(iter(locks), None)
    if start and trainer.load(start, force_config):
        with suppress(OSError):
            (run_dir / "episodes.jsonl").unlink()  # the mark of an end, which is made again
        trainer.save_if_possible()  # otherwise a crash before the next checkpoint would lose what has changed
    if ranks.first:
        utils.write_file(run_dir / "run_config.json", json.dumps(trainer.safe_config, indent=1).encode())
    trainer.about = begin(run_dir, config, start) if ranks.first else {}
    console.say(headline(trainer.about))
    process.rest_collector()
    step = trainer.state.step - bool(trainer.state.row) if start else None  # a row that awaits evaluation was not sent
    trainer.loggers = Loggers(config.run.logger if ranks.first else "none", run_dir, resolved, step)
    code = 1
    with StopSignal() as stop:
        try:
            code = training_loop(trainer, stop, console)
        finally:
            console.close()
            with suppress(TrainingError):
                process.check_lock(run_dir, trainer.lock)
                end(run_dir, trainer.about)
            trainer.loggers.close(code)
            trainer.metrics.close()
            if trainer.engine:
                trainer.engine.close()
            for lock in locks:
                lock.close()
        ranks.alone(lambda: None)  # the first has closed everything: launchers signal the processes that are left
    return code


def training_loop(trainer: Trainer, stop: StopSignal, console: Console) -> int:
    """Step until done, interrupted or unable to continue; checkpoint between steps only."""
    ppo, state, results, trainer.saved_at = trainer.ppo, trainer.state, None, time.monotonic()
    try:
        if not state.before:
            state.before = [r.row for r in trainer.ranks.alone(lambda: trainer.evaluate(stop, console.progress))]
            trainer.save_if_possible()  # a resumed run need not repeat the evaluation
        announcement = partial(trainer.curriculum.announcement, trainer.config.env.env_type)
        console.say(announcement())
        while state.step < ppo.num_train_steps or state.row:
            row = state.row = state.row or trainer.step(stop)  # a resumed run may begin with a step to evaluate
            results = None
            if ppo.eval_freq and state.step % ppo.eval_freq == 0:
                results = trainer.ranks.alone(lambda: trainer.evaluate(stop, console.progress))
                trainer.scored = state.step, mean_grade(results, trainer.exact)
                row |= {f"eval/{r.game}": r.grade for r in results}
            state.row = None
            if trainer.ranks.first:
                process.check_lock(trainer.run_dir, trainer.lock)
                trainer.metrics.append(row)
            trainer.loggers.log(row)
            console.step(row)
            if "stage_change" in row:
                console.say(f"{announcement()} ({row['stage']} is passed: {row['stage_reason']})")
            trainer.refuse_to_go_on(row)
            if trainer.is_due():
                trainer.save_if_possible()
            if agreed := int(trainer.ranks.largest(stop.received)):  # a signal from now on counts after the next step
                stop.received = agreed
                raise InterruptedRolloutError
        trainer.ranks.alone(lambda: finish(trainer, stop, console, results))
        return 0
    except InterruptedRolloutError:
        console.say(f"interrupted after step {state.step}; checkpoint: {trainer.ranks.alone(trainer.save_at_the_end)}")
        return 128 + stop.received  # as a shell reports it
    except ConfigError:
        raise
    except Exception as error:  # our own, of torch, a device or a server; a game of somebody's may raise anything
        when = f"in step {state.step + 1}" if trainer.midway else f"after step {state.step}"
        cause, ranks = process.cause_of(error), trainer.ranks if isinstance(error, SharedError) else LONE
        failure = TrainingError(f"{when}: {cause}; checkpoint: {ranks.alone(trainer.save_at_the_end)}")
        raise (failure if ranks.first else SystemExit(1)) from error


def finish(trainer: Trainer, stop: StopSignal, console: Console, results: list[GameResult] | None) -> None:
    """Save, evaluate and write the summary; then ``show``, when no result can be lost any more."""
    checkpoint, final = trainer.save(), trainer.save_players()
    table, summary = result_table(trainer.state.before, results or trainer.evaluate(stop, console.progress))
    summary |= {"steps": trainer.state.step, "seed": trainer.config.run.seed, "checkpoint": checkpoint.name}
    process.check_lock(trainer.run_dir, trainer.lock)
    utils.write_file(trainer.run_dir / "summary.json", json.dumps(summary, indent=1).encode())
    console.close()
    console.say(f"\n{table}\n\ncheckpoint: {checkpoint}\nadapter:    {final}\nWhat remains is for the report.")
    if idle := trainer.state.alarms.get("nothing_trained_steps") or trainer.state.step * (not trainer.optimizer.state):
        console.say(f"nothing was learnt after step {trainer.state.step - idle}: {alarms.NOTHING_TRAINED.meaning}")
    try:
        show(trainer, stop, console, summary)
    except InterruptedRolloutError:
        raise
    except Exception as error:  # of a device, a disk, a server or a game: the results are safe
        console.say(f"nothing is shown of it: {type(error).__name__}: {' '.join(str(error).split())}")


def show(trainer: Trainer, stop: StopSignal, console: Console, summary: dict[str, Any]) -> None:
    """Record games for the replay viewer (which marks the run as finished), measure the model's English, plot."""
    run_dir = trainer.run_dir
    tasks = [task for t in trainer.evaluated for task in eval_tasks([t], 3, 1)]
    rows = record(trainer.player(stop), trainer.config.env, tasks, trainer.state.step)
    trainer.loggers.games(rows)
    process.check_lock(run_dir, trainer.lock)
    if measured := english.measure(trainer.policy):
        utils.write_file(run_dir / "summary.json", json.dumps(summary | {"english": measured}, indent=1).encode())
        console.say(english.line(measured))
    utils.write_file(run_dir / "episodes.jsonl", "".join(json.dumps(utils.redact(r)) + "\n" for r in rows).encode())
    script = Path(__file__).resolve().parent / "scripts" / "visualize.py"
    end(run_dir, trainer.about)
    drawn = subprocess.run([sys.executable, script, f"--run={run_dir}"], capture_output=True, text=True)
    cause = (drawn.stderr.strip() or f"exit code {drawn.returncode}").splitlines()[-1]
    drawings = f"curves:     {run_dir / 'curves.png'}\nreport:     {run_dir / 'report.html'}"
    console.say(f"no curves were drawn: {cause}; {process.draw_command(run_dir)}" if drawn.returncode else drawings)


def main(argv: list[str] | None = None) -> int:
    """Run the program; exit codes: 0 done, 1 training failed, 2 bad usage or configuration, 128 + signal."""
    process.setup_logging()
    args = parse_args(argv, __doc__)
    config, ranks = None, LONE
    try:
        config = read_config(args)
        ranks = LONE if args.dry_run else Ranks.join(device_of(config.model))
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        preflight.check(config, ranks.world, args.dry_run, args.resume, args.force_config)
        if args.dry_run:
            return 0
        code = train(config, args.resume, args.force_config, ranks, args.seen)
        if code and ranks.first:
            process.say_how_to_go_on(__file__, config.run.output_dir, ranks.world, sys.stdout)
        ranks.close()
        return code
    except ConfigError as error:
        process.tell_for_all(error)
        return 2
    except KeyboardInterrupt:  # before training, when there is nothing to save yet
        print("error: interrupted", file=sys.stderr)
        return 130
    except (TrainingError, utils.CheckpointError, *process.device_errors(), OSError) as error:
        if config and ranks.first:
            process.say_how_to_go_on(__file__, config.run.output_dir, ranks.world, sys.stderr)
        print(f"{'training failed' if config else 'error'}: {one_line(utils.redact(str(error)))}", file=sys.stderr)
        return 1 if config else 2


if __name__ == "__main__":
    process.leave(main())
