"""Game servers that misbehave in generated ways: each call ends in time, in a sound result or one line that names it.

The game behind them is real, so that a result that gets through must be the true one, to the last move of its
history. ``pytest tests/envs/test_hostile_servers.py -s`` prints how many misbehaviours were tried and how they ended.
"""

import time

import pytest
from hostile import SECONDS, WIRES, HostileServer, answers, changed, lies, some_of
from players import FunctionPlayer
from serving import task_id

from env_wrapper import EnvConfig, Task, play
from envs import client
from scripts.serving.actor import HostedGame

TASK = Task(task_id("leduc_poker"), 3, "random")
PLAYER = FunctionPlayer(lambda query: max(query.legal) if 1 not in query.legal else 1)

INFO = ["task_id", "seed", "error", "game_name", "llm_player_id", "opponent_type", "history", "returns"]
FIELDS = ["observation", "reward", "done", "truncated", "episode_id", "info", *(f"info.{name}" for name in INFO)]
HISTORIES = [
    lambda h: h[:-1],
    lambda h: [*h, h[-1]],
    lambda h: h[::-1],
    lambda h: h[1:],
    lambda h: h * 1000,
    lambda h: [[1 - p if p >= 0 else p, a] for p, a in h],
    lambda h: [[p, a + 1] for p, a in h],
    lambda h: [[p, -a - 1] for p, a in h],
    lambda h: [[p, float(a)] for p, a in h],
    lambda h: [[p, str(a)] for p, a in h],
    lambda h: [[p, a, 0] for p, a in h],
    lambda h: [[p] for p, _ in h],
    lambda h: [[p, 99999] for p, a in h],
    lambda h: [[p, 2**70] for p, a in h],
    lambda h: [[p, bool(a)] for p, a in h],
    lambda h: [[p, [a]] for p, a in h],
    lambda h: dict(enumerate(h)),
    lambda h: [None] * len(h),
    lambda h: [[9, a] for p, a in h],
    lambda h: [[a, p] for p, a in h],
]
POSITIONS = [
    lambda t: t.replace("Legal Actions:", ""),
    lambda t: t.replace(" -> ", " => "),
    lambda t: t + t,
    lambda t: t[::-1],
    lambda t: ("Current State:\n" + "\n\nLegal Actions:\n") * 8000,
    lambda t: "Current State:\n" * 15000 + t,
    lambda t: t.replace("Your choice", "\n\nYour choice" * 15000),
    lambda t: "# Game Rules\n" * 15000,
    lambda t: t.replace("  1 ->", "  " + "9" * 5000 + " ->"),
    lambda t: t.replace("  1 ->", "  -1 ->"),
    lambda t: t.replace("Legal Actions:\n", "Legal Actions:\n" + "".join(f"  {i} -> a\n" for i in range(15000))),
    lambda t: t.replace("Legal Actions:\n", "Legal Actions:\n  1 -> a\n  1 -> b\n"),
    lambda t: "\n" * 200_000 + t,
    lambda t: t.replace("Legal Actions:\n", "Legal Actions:\n" + " " * 200_000),
    lambda t: t.replace("1", "१"),
]

MISBEHAVIOURS = {
    **WIRES,
    "failed": answers(lambda a: a | {"status": "failed"}),
    **lies([f"result.{field}" for field in FIELDS]),
    **{f"history {i}": answers(lambda a, h=h: changed(a, "result.info.history", h)) for i, h in enumerate(HISTORIES)},
    **{f"position {i}": answers(lambda a, p=p: changed(a, "result.observation", p)) for i, p in enumerate(POSITIONS)},
    **{
        f"without {f}": answers(lambda a, f=f: changed(a, "result", lambda r: {k: v for k, v in r.items() if k != f}))
        for f in FIELDS[:6]
    },
    **{
        f"returns x {x}": answers(lambda a, x=x: changed(a, "result.info.returns", lambda v: [x * u for u in v]))
        for x in (-1, 2, 99)
    },
    **{
        f"score {x}": answers(lambda a, x=x: changed(a, "result.reward", x))
        for x in (0.0, 1.0, 0.25, 1 + 1e-9, -1e-9, "0.5", [0.5])
    },
}


class Game:
    """A real game behind a server that misbehaves at its ``at``-th call of reset or step."""

    def __init__(self, at):
        self.at, self.calls, self.game = at, 0, None

    def result(self, path, asked):
        method = asked["method"]
        self.calls += method != "stop"
        if method == "reset":
            self.game = HostedGame("e1", TASK, None)
            self.game.step = self.game.env.reset(TASK)
        if method == "step":
            self.game.step = self.game.env.step(asked["kwargs"]["action"])
        result = {"status": "ok"} if method == "stop" else self.game.response(self.game.step.score)
        return {"status": "success", "result": result, "error": None}

    def hostile(self, path, asked):
        return asked["method"] != "stop" and self.calls == self.at


@pytest.fixture(scope="module")
def truth():
    [episode] = play({}, PLAYER, [TASK])
    assert episode.outcome == "finished"
    assert episode.info["n_decisions"] == {1: 2}  # a reset, a step that goes on, a step that ends: calls 1 to 3
    return episode


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_misbehaviour_costs_more_than_its_episode(truth, monkeypatch, many):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
    assert len(MISBEHAVIOURS) >= 60
    cases = some_of(MISBEHAVIOURS, (1, 2, 3), None if many else 70)
    if not many:
        cases += [(name, 3) for name in MISBEHAVIOURS if name.startswith(("history ", "returns x", "score "))]
    ends = {"failed": 0, "finished": 0}
    for name, at in cases:
        game = Game(at)
        server = HostileServer(MISBEHAVIOURS[name], game.result, game.hostile)
        start = time.monotonic()
        config = EnvConfig(env_mode="url", env_url=server.url, env_timeout=SECONDS)
        [episode] = play(config, PLAYER, [TASK])
        took, what = time.monotonic() - start, (name, at, episode.info)
        server.listener.close()
        ends[episode.outcome] += 1
        assert took < SECONDS + 2.5, what  # and that for a busy machine
        if episode.outcome == "failed":
            error = episode.info["error"]
            assert error.startswith(f"ServerError: leduc_poker on {server.url}: "), what
            assert error.isprintable(), what
            assert len(error) < 700, what
        else:
            assert episode.score == truth.score, what
            assert episode.info["history"] in ([], truth.info["history"]), what
            assert episode.info["returns"] in (None, truth.info["returns"]), what
    print(f"\n{len(MISBEHAVIOURS)} misbehaviours, {len(cases)} games: {ends}")
    assert min(ends.values()) > 10
