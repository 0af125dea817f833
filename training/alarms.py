"""Signs that a run is going wrong: how each shows in the metrics, what it means, and what the run does about it.

A sign must hold for ``patience`` steps in a row; its alarm is then raised once, and again only after it has ceased.
What alarms remember is a flat dict of numbers, which checkpoints hold.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from training.config import PPOConfig

log = logging.getLogger(__name__)

SLOWER = 0.5  # factor on the learning rate for an alarm with action slow
LEAST_SCALE = 0.05  # of the configured learning rate: slowing down further would not help
SMOOTHING = 0.05  # of the running score and gradient norm: about the last 20 steps count
LUCK = 10  # standard deviations: the most that 100,000 steps of equal play put between the running score and its best
SETTLED = 0.02  # value_loss of a critic that is right, however little of returns that hardly vary it explains
COUNT = "_steps"  # suffix of the number of steps in a row that show an alarm's sign

Row = Mapping[str, Any]
Memory = dict[str, Any]


class Alarm(NamedTuple):
    """``sign`` gets a row of metrics and the memory; ``action`` is warn, slow (halve the learning rate) or stop."""

    name: str
    meaning: str
    patience: int
    action: str
    sign: Callable[[Row, Memory], bool]


NOTHING_TRAINED = Alarm(
    "nothing_trained", "no decision was trained on: see truncated (raise ppo.max_seq_length) and skipped", 3, "stop",
    lambda row, m: not row["updates"],
)  # fmt: skip
ALARMS = (
    NOTHING_TRAINED,
    Alarm("entropy", "the policy has all but stopped exploring: raise ppo.entropy_coef or lower the learning rate",
          10, "warn", lambda row, m: row["entropy"] < 0.05 * m["entropy_first"]),
    Alarm("legal_mass", "unconstrained answers are no longer legal: raise ppo.legal_mass_coef", 5, "warn",
          lambda row, m: m.get("legal_mass_now", 1.0) < 0.5 * m.get("legal_mass_best", 0.0) > 0.05),
    Alarm("kl", "one step moves the policy too far from the one that played", 3, "slow",
          lambda row, m: row["update_kl"] > 0.3),
    Alarm("kl_average", "self-play runs away from its own past: raise ppo.magnet_coef or ppo.entropy_coef", 10, "warn",
          lambda row, m: row.get("kl_average", 0.0) > 0.5),
    Alarm("logprob_gap", "sampler and learner disagree about what was played: the ratios start wrong", 3, "stop",
          lambda row, m: row.get("logprob_gap_mean", 0.0) > 0.2),
    Alarm("explained_variance", "the critic predicts worse than a constant: lower ppo.vf_coef or the learning rate",
          20, "warn", lambda row, m: row["explained_variance"] < -0.5 and row["value_loss"] > SETTLED),
    Alarm("grad_norm", "the gradient is ten times its usual size", 3, "slow",
          lambda row, m: row["grad_norm"] > 10 * m["grad_norm_usual"] > 0),
    Alarm("truncated", "most games are cut off: raise ppo.max_seq_length or lower env.history_turns", 5, "warn",
          lambda row, m: row["truncated"] > (row["games"] - row["failed"]) / 2),
    Alarm("score_drop", "the score has fallen far below the best of this stage: go back to an earlier checkpoint",
          10, "stop", lambda row, m: m.get("score_now", 0.0) < m.get("score_best", 0.0) - _luck(m)),
)  # fmt: skip


def respond(row: dict[str, Any], memory: Memory, lr_scale: float, ppo: PPOConfig) -> float:
    """Raise the alarms of a step and note them in ``row``; return the new scale of the learning rate.

    With ``ppo.alarms`` off the memory is still updated, but the counts of steps start again when alarms are on.
    """
    raised = watch(row, memory)
    if ppo.alarms == "off":
        memory.update((name, 0) for name in memory if name.endswith(COUNT))
        return lr_scale
    if raised:
        row["alarms"] = [alarm.name for alarm in raised]
    for alarm in raised:
        log.warning("step %d: alarm %s: %s", row["step"], alarm.name, alarm.meaning)
        if ppo.alarms == "act" and alarm.action == "slow":
            lr_scale = max(lr_scale * SLOWER, LEAST_SCALE)
    return lr_scale


def fatal(row: Row, ppo: PPOConfig) -> Alarm | None:
    """The alarm of this step that ends the run, or None."""
    raised = (a for a in ALARMS if a.name in row.get("alarms", ()) and a.action == "stop")
    return next(raised, None) if ppo.alarms == "act" else None


def watch(row: Row, memory: Memory) -> list[Alarm]:
    """Update ``memory`` in place with a step's metrics, and return the alarms that the step raises.

    A change of stage resets score, entropy and legal mass: another opponent or game is no collapse.
    """
    raised, trained = [], bool(row["updates"])
    if trained:
        _remember(row, memory)
    for alarm in ALARMS if trained else (NOTHING_TRAINED,):
        count = f"{alarm.name}{COUNT}"
        memory[count] = memory.get(count, 0) + 1 if alarm.sign(row, memory) else 0
        if memory[count] == alarm.patience:
            raised.append(alarm)
    if trained:  # only now: an outlier must not be compared with an average that includes it
        usual = memory["grad_norm_usual"] or row["grad_norm"]
        memory["grad_norm_usual"] = usual + SMOOTHING * (min(row["grad_norm"], 2 * usual) - usual)
    if "stage_change" in row:
        forget(memory)
    return raised


def _remember(row: Row, memory: Memory) -> None:
    memory["entropy_first"] = memory.get("entropy_first") or row["entropy"]
    memory.setdefault("grad_norm_usual", 0.0)
    if "legal_mass" in row:  # of a sixteenth of the games at most, so one reading says little
        n, mean = memory.get("legal_mass_rows", 0) + 1, memory.get("legal_mass_now", 0.0)
        memory["legal_mass_rows"] = n
        memory["legal_mass_now"] = mean + max(1 / n, SMOOTHING) * (row["legal_mass"] - mean)
        if n >= 1 / SMOOTHING:
            memory["legal_mass_best"] = max(memory.get("legal_mass_best", 0.0), memory["legal_mass_now"])
    if any(opponent.startswith("past:") for opponent in row["opponents"]):  # they grow stronger with the policy
        forget(memory, "score")
        return
    valid = row["games"] - row["failed"]
    if not (ended := valid - row["truncated"]):
        return
    # Games cut off score 0, and become more as play gets better and longer: no collapse.
    score = row["score_mean"] * valid / ended
    rows, now = memory.get("score_rows", 0) + 1, memory.get("score_now", 0.0)
    # Equal weights at first: with few games a step, a lucky first step would make the next ones look like a collapse.
    memory["score_now"] = now + max(1 / rows, SMOOTHING) * (score - now)
    memory["score_rows"] = rows
    change, noise = score - memory.get("score_last", score), memory.get("score_noise", 0.0)
    memory["score_last"] = score
    # Variance of a step, from differences of neighbours: a collapse enters it only once and cannot hide itself.
    memory["score_noise"] = noise + (change * change / 2 - noise) / rows
    if rows >= 1 / SMOOTHING:
        memory["score_best"] = max(memory.get("score_best", 0.0), memory["score_now"])


def _luck(memory: Memory) -> float:
    """How far the running score may fall below its best by chance alone, with so few games a step."""
    return max(0.2, LUCK * math.sqrt(max(0.0, memory.get("score_noise", 0.0)) * SMOOTHING / (2 - SMOOTHING)))


def forget(memory: Memory, *signs: str) -> None:
    """Forget the references of these signs; by default of all that depend on games and opponents."""
    signs = signs or ("score", "entropy", "legal_mass")
    for name in [name for name in memory if name.startswith(signs)]:
        del memory[name]
