"""Ends that engines do not tell: gin rummy's after a knock with melds of three alone, and oware's after 1000 turns."""

import math
import random
import subprocess
import sys

import pytest

import games
from env_wrapper import EnvConfig, Task
from envs import openspiel
from envs.openspiel import OpenSpielEnv
from games.gin_rummy import DRAW_UPCARD, KNOCK, RANKS, SUITS

TASK_ID = games.NAMES.index("gin_rummy") * games.CONFIGS_PER_GAME + 3
HANDS = "Js Jc Jd Qs Qc Qd Ks Kc As 2s 3s 5h 6d 9h 8c 2d"  # of seats 0 and 1
DEAL = [RANKS.index(card[0]) + 13 * SUITS.index(card[1]) for card in (HANDS + " Kd").split()]

SEARCH = f"""
import sys, pyspiel
from games.gin_rummy import GAME as game
from envs.opponents import make_bot, parse_opponent
size, deal = int(sys.argv[1]), {DEAL}
spiel = pyspiel.load_game("gin_rummy", {{"hand_size": size}})
state = spiel.new_initial_state()
for action in [*deal[8 - size : 8], *deal[8 : 8 + size], deal[-1], {DRAW_UPCARD}]:
    state.apply_action(action)
assert {KNOCK} in state.legal_actions()
for opponent in ("mcts:40x2", "ismcts:40x2"):
    bots = [make_bot(game, spiel, parse_opponent(opponent), 0, 7) for _ in range(2)]
    first, second = [[bot.step(state) for _ in range(2)] for bot in bots]
    assert first == second and set(first) <= set(state.legal_actions()) - {{{KNOCK}}}, first
"""


def test_the_hand_ends_without_a_score(monkeypatch):
    deal = iter(DEAL)
    monkeypatch.setattr(openspiel.Stream, "weighted", lambda stream, outcomes: next(deal))
    env = OpenSpielEnv(EnvConfig())
    step = env.reset(Task(TASK_ID, 0))
    assert step.legal[DRAW_UPCARD]
    drawn = env.step(str(DRAW_UPCARD))
    assert KNOCK in drawn.legal
    assert "Your deadwood after the best discard: 20\n" in drawn.text  # the engine says 0: nine cards, three melds
    end = env.step(str(KNOCK))
    assert (end.done, end.score, end.info["outcome"], end.info["returns"]) == (True, 0.5, "finished", [0.0, 0.0])


@pytest.mark.parametrize("size", [8, 5])  # 5: of a game of one's own
def test_searches_survive_it_and_never_knock_into_it(size):
    result = subprocess.run([sys.executable, "-c", SEARCH, str(size)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr or result.returncode


def test_oware_without_captures_is_a_draw_where_the_engine_takes_no_more_turns():
    env, turns, draw = OpenSpielEnv(EnvConfig()), 0, random.Random(0)
    oware = games.NAMES.index("oware")
    step = env.reset(Task(oware * games.CONFIGS_PER_GAME, 0, "self"))

    def captured(action):
        after = games.GAMES[oware].compact(env._state.child(action), 0)
        return sum(map(int, after.split()[1].split(":"))), draw.random()

    while not step.done:
        step, turns = env.step(str(min(step.legal, key=captured))), turns + 1
    assert (turns, step.score, step.info["outcome"]) == (1000, 0.5, "finished")
    others = [openspiel.load_game(i * games.CONFIGS_PER_GAME) for i in range(len(games.NAMES)) if i != oware]
    assert {openspiel.most_moves(spiel) for spiel in others} == {math.inf}
