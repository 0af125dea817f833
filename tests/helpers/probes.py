"""Five games of a few states, each of which can only be learnt where one part of PPO is right.

After the probing environments of https://andyljones.com/posts/rl-debugging.html. They are played and learnt by the
trainer itself: only the environment is another. A probe switches off what it does not look at: where the critic is not
asked for its opinion (``vf_coef`` 0: every value stays 0), where each decision is paid alone (``lam`` 0), where a step
is one pass over one minibatch (every ratio is 1). That is why a fault in one part fails one probe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny import KUHN, micro_config

import env_wrapper
from envs.types import Query, Step, Task
from train_ppo import Trainer
from training.process import StopSignal

SYSTEM = "You play."
LEGAL = {0: "a", 1: "b"}
TOO_LONG = "x " * 200  # does not fit into the micro policy's context: the game is cut off there
Turn = tuple[int, str, dict[int, str]]  # who is shown what, and may answer what


@dataclass(frozen=True)
class Probe:
    """A game, how it is learnt, and what must have been learnt then.

    Attributes:
        turns: a game's number -> its turns; every other game shows another state.
        scores: a game's number and all answers -> each seat's score.
        passed: the trainer after ``steps`` steps -> whether the probe found nothing.
    """

    turns: Callable[[int], list[Turn]]
    scores: Callable[[int, list[int]], dict[int, float]]
    passed: Callable[[Trainer], bool]
    steps: int = 12
    ppo: dict[str, Any] = field(default_factory=dict)


class ProbeEnv:
    """``envs.types.Env`` for one probe."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def reset(self, task: Task) -> Step:
        """Begin the game of this number."""
        self.number, self.answers = task.index, list[int]()
        self.turns = self.probe.turns(task.index)
        return self._show()

    def step(self, text: str) -> Step:
        """Take an answer."""
        self.answers.append(int(text))
        return self._show()

    def close(self) -> None:
        """Nothing is held."""

    def _show(self) -> Step:
        info: dict[str, Any] = {"game": "probe", "system": SYSTEM, "attempt": 1, "adapter": None, "history": []}
        if len(self.answers) < len(self.turns):
            seat, text, legal = self.turns[len(self.answers)]
            return Step(text, legal, False, 0.0, info | {"seat": seat, "outcome": None})
        scores = self.probe.scores(self.number, self.answers)
        info |= {"seat": 0, "outcome": "finished", "returns": list(scores.values()), "scores": scores}
        return Step("", {}, True, scores[0], info)


def query(seat: int, text: str, legal: dict[int, str], *before: str) -> Query:
    """The question of a turn, after earlier questions and answers of the game."""
    said = [{"role": role, "content": part} for part, role in zip(before, ("user", "assistant") * 9, strict=False)]
    conversation = [{"role": "system", "content": SYSTEM}, *said, {"role": "user", "content": text}]
    return Query(0, seat, conversation, legal, (0, seat, 0, 1))


def probability(trainer: Trainer, answer: int, *asked: Any) -> float:
    """Of an answer to the question of ``query(*asked)``."""
    return trainer.policy.action_probs([query(*asked)])[0][answer]


def value(trainer: Trainer, *asked: Any) -> float:
    """What the critic thinks of the question of ``query(*asked)``."""
    [action] = trainer.policy.act([query(*asked)])
    trainer.policy.release([0])
    return action.value


def run(probe: Probe, folder: Path) -> bool:
    """Let the trainer learn the probe's game; return whether it passed."""
    ppo = {"batch_size": 32, "mini_batch_size": 32, "ppo_epochs": 1, "vf_coef": 0.0, "entropy_coef": 0.0, "lam": 0.0,
           "gamma": 1.0, "init_kl_coef": 0.0, "target_kl": None, "lr_final": 1.0, "recompute_logprobs": False,
           "learning_rate": 5e-3, "alarms": "off"}  # fmt: skip
    stage = {"name": "probe", "games": [[KUHN, KUHN]], "opponent": "self"}
    config = micro_config(folder, ppo=ppo | probe.ppo, env={"history_turns": "all"}, curriculum={"stages": [stage]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env_wrapper, "make_env", lambda config: ProbeEnv(probe))
        trainer = Trainer(config, folder)
        for _ in range(probe.steps):
            trainer.step(StopSignal())
    trainer.metrics.close()
    return probe.passed(trainer)


def shown(number: int) -> str:
    """The state of a game: every other one shows a J, the others a K."""
    return "JK"[number % 2]


def right(number: int, answer: int) -> float:
    """The score of an answer: 1 to a K, 0 to a J."""
    return float(answer == number % 2)


def learnt(trainer: Trainer, seat: int = 0, *before: str) -> float:
    """The lesser probability of the right answer to a J and to a K."""
    return min(probability(trainer, n, seat, shown(n), LEGAL, *before) for n in (0, 1))


# ------------------------------------------------------------------------------------------------------- the probes

# Critic: whatever the answer, a K is worth 1 and a J -1. Nothing can be learnt but that.
CRITIC = Probe(
    turns=lambda n: [(0, shown(n), LEGAL)],
    scores=lambda n, answers: {0: float(n % 2)},
    passed=lambda trainer: abs(value(trainer, 0, "K", LEGAL) - 1) < 0.25 > abs(value(trainer, 0, "J", LEGAL) + 1),
    steps=20,
    ppo={"vf_coef": 1.0, "learning_rate": 1e-2},
)


# Mask: every second game is cut off after its first answer, which is therefore not trained; the others are paid at
# once. Who trains the wrong ones learns nothing. To a J and to a K other answers are legal.
MASKED = {"J": {0: "a", 1: "b"}, "K": {2: "c", 3: "d"}}  # 1 and 2 are right


def mask_turns(number: int) -> list[Turn]:
    """A question; in every second game another that is too long to be read."""
    word = shown(number // 2)
    question = (0, word, MASKED[word])
    return [question] if number % 2 == 0 else [question, (0, TOO_LONG, LEGAL)]


MASK = Probe(
    turns=mask_turns,
    scores=lambda n, answers: {0: float(answers[0] in (1, 2))},
    passed=lambda trainer: (
        min(probability(trainer, 1, 0, "J", MASKED["J"]), probability(trainer, 2, 0, "K", MASKED["K"])) > 0.9
    ),
)

# Credit: two questions a game, and the second answer alone is paid.
CREDIT = Probe(
    turns=lambda n: [(0, "Q", LEGAL), (0, shown(n), LEGAL)],
    scores=lambda n, answers: {0: right(n, answers[1])},
    passed=lambda trainer: learnt(trainer, 0, "Q", "0") > 0.9,
)

# Ratio: answer 0 is right, which the base gives once in four times. One step of many passes ends soon after the clip
# (Adam's momentum carries it on); without it, when nothing else is ever answered.
RATIO = Probe(
    turns=lambda n: [(0, "Q", LEGAL)],
    scores=lambda n, answers: {0: 1.0 - answers[0]},
    passed=lambda trainer: 0.5 < probability(trainer, 0, 0, "Q", LEGAL) < 0.85,
    steps=1,
    ppo={"ppo_epochs": 40, "learning_rate": 5e-4},
)

# Seat: each seat is asked alone and paid for its own answer.
SEAT = Probe(
    turns=lambda n: [(0, shown(n), LEGAL), (1, "Q " + shown(n // 2), LEGAL)],
    scores=lambda n, answers: {0: right(n, answers[0]), 1: right(n // 2, answers[1])},
    passed=lambda trainer: (
        min(learnt(trainer), *(probability(trainer, n, 1, "Q " + shown(n), LEGAL) for n in (0, 1))) > 0.9
    ),
)

PROBES = {"critic": CRITIC, "mask": MASK, "credit": CREDIT, "ratio": RATIO, "seat": SEAT}
