"""What every environment promises, checked on one task: ``check_contract(new_env, task)``."""

import random

import numpy as np
import pytest

from env_wrapper import Step

MANY_LEGAL = 30  # of more legal actions a sample is tried


def _pollute(noise):
    random.seed(noise)
    np.random.seed(noise)


def transcript(env, task, answer, noise=None):
    """All steps of an episode; ``noise`` reseeds the global generators before each."""
    steps: list[Step] = []
    rng = random.Random(0)
    while not steps or not steps[-1].done:
        if noise is not None:
            _pollute(noise + len(steps))
        steps.append(env.step(answer(steps[-1], rng)) if steps else env.reset(task))
        rng.random()
    return steps


def random_legal(step, rng):
    return str(rng.choice(list(step.legal)))


def check_contract(new_env, task, answer=random_legal):
    """Raise unless an environment is repeatable, closed to illegal answers and finished episodes, and scores in [0, 1].

    ``new_env`` makes an environment, ``answer(step, rng)`` gives a raw text for a decision. Returns the steps.
    """
    steps = transcript(new_env(), task, answer)
    env = new_env()
    assert transcript(env, task, answer, noise=1) == steps, "another environment plays another game"
    assert transcript(env, task, answer, noise=2) == steps, "a second reset plays another game"
    _check_end(env, new_env(), task, steps[-1])
    for position in {0, len(steps) // 2} if len(steps) > 1 else ():
        _check_answers(new_env, task, steps, position, answer)
    return steps


def _check_end(finished, fresh, task, last):
    assert last.legal == {}
    assert last.info["outcome"] == "finished"
    for value in (last.score, *last.info["scores"].values()):
        assert 0 <= value <= 1
    with pytest.raises(RuntimeError):
        finished.step("0")
    with pytest.raises(RuntimeError):
        fresh.step("0")
    fresh.reset(task)
    fresh.close()
    fresh.close()
    with pytest.raises(RuntimeError):
        fresh.step("0")


def _check_answers(new_env, task, steps, position, answer):
    """At one decision, every legal id moves on and an illegal one leaves the position as it was."""
    legal = steps[position].legal
    for action in random.Random(1).sample(list(legal), min(len(legal), MANY_LEGAL)):
        after = _answered(new_env(), task, answer, position, str(action))
        assert after.done or after.info["attempt"] == 1, f"legal action {action} was refused"
    if legal:
        after = _answered(new_env(), task, answer, position, str(max(legal) + 1))
        assert after.info["attempt"] == 2
        assert (after.legal, after.info["seat"]) == (legal, steps[position].info["seat"])
        assert after.info["history"] == steps[position].info["history"]


def _answered(env, task, answer, position, text):
    rng = random.Random(0)
    step = env.reset(task)
    rng.random()
    for _ in range(position):
        step = env.step(answer(step, rng))
        rng.random()
    return env.step(text)
