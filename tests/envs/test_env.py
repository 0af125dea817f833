"""The OpenSpiel environment and its opponents: contract, prompts, seats, seeds, forfeits, bots."""

import dataclasses
import importlib
import itertools
import logging
import math
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyspiel
import pytest
from players import FunctionPlayer, random_player

import games
from config.reader import ConfigError
from env_wrapper import Action, EnvConfig, Task, make_env, parse_action, play
from envs import exact, openspiel, opponents
from envs.contract import check_contract, random_legal, transcript
from envs.openspiel import OpenSpielEnv, derive_seed
from envs.opponents import OpponentSpec, Stream, make_bot, parse_opponent
from envs.server_replies import ServerError, read_reply

NAMES = list(games.NAMES)


def task_id(name, config_id=0):
    return NAMES.index(name) * games.CONFIGS_PER_GAME + config_id


def new_env(**config):
    return lambda: OpenSpielEnv(EnvConfig(**config))


@pytest.mark.parametrize("name", NAMES)
def test_contract_of_every_game(name):
    check_contract(new_env(), Task(task_id(name, 1), 5))


OPPONENTS = [
    ("leduc_poker", "self"), ("goofspiel_small", "self"), ("hearts", "self"), ("kuhn_poker", "past:older"),
    ("hex_small", "mcts:20x2"), ("euchre", "mcts:10x1"), ("backgammon", "random"), ("goofspiel", "mcts:10x1"),
    ("blackjack", "mcts"), ("liars_dice_small", "ismcts:20x2"), ("leduc_poker", "ismcts:20x2"),
    ("gin_rummy", "ismcts:2x1"), ("euchre", "ismcts:10x1"), ("connect_four", "ismcts:10x1"),
    ("tic_tac_toe", "perfect"), ("kuhn_poker", "cfr"), ("goofspiel_small", "cfr:10"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "opponent"), OPPONENTS)
def test_contract_of_every_opponent(name, opponent):
    check_contract(new_env(prompt="compact"), Task(task_id(name, 1), 8, opponent))


def play_out(names, config_ids, seeds, prompt):
    tasks = [
        Task(task_id(name, c), seed, "random", index)
        for index, (name, c, seed) in enumerate((n, c, s) for n in names for c in config_ids for s in seeds)
    ]
    player = random_player()
    for episode in play({"prompt": prompt, "history_turns": 0}, player, tasks):
        assert episode.outcome == "finished", (episode.task, episode.info)
        assert episode.game == NAMES[episode.task.task_id // games.CONFIGS_PER_GAME]
        assert 0 <= episode.score <= 1
        assert episode.info["length"] == len(episode.info["history"]) > 0
    for query in player.queries:
        system, user = query.conversation
        assert system["content"]
        assert user["content"].strip()
        assert prompt == "compact" or "\nLegal Actions:\n" in user["content"]
    return tasks


@pytest.mark.parametrize("prompt", ["full", "compact"])
def test_random_play_of_every_game(prompt):
    play_out(NAMES, (0, 2), (0, 1), prompt)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", ["full", "compact"])
def test_random_play_of_every_game_at_length(name, prompt):
    assert len(play_out([name], range(5), range(20), prompt)) == 100


def test_full_prompt():
    step = make_env({"env_type": "openspiel"}).reset(Task(task_id("leduc_poker"), 0))
    game, params = games.decode_task_id(task_id("leduc_poker"))
    assert step.text == (
        "Current State:\nYour card: Queen of hearts\nPublic card: not dealt yet\nRound 1 betting: none yet\n"
        "Chips put in: you 1, opponent 1; pot 2\n\nYou are Player 0.\nLegal Actions:\n1 -> Call\n2 -> Raise\n\n"
        "Your choice (ID only):"
    )
    assert step.legal == {1: "Call", 2: "Raise"}
    assert game.rules(params) in step.info["system"]
    assert "ONLY the action ID" in step.info["system"]


@pytest.mark.parametrize(
    ("name", "listed"), [("leduc_poker", False), ("tic_tac_toe", False), ("hex", True), ("go", True)]
)
def test_compact_prompt_lists_the_legal_actions_where_they_do_not_follow_from_the_position(name, listed):
    env = new_env(prompt="compact")()
    step = env.reset(Task(task_id(name), 0))
    game = games.decode_task_id(task_id(name))[0]
    assert game.compact_actions == listed
    position, names = game.compact(env._state, step.info["seat"]), [f"{i} {label}" for i, label in step.legal.items()]
    assert step.text == (f"{position}\n{';'.join(names)}" if listed else position)
    assert step.info["system"] == name


@pytest.mark.parametrize("name", [game.name for game in games.GAMES if not game.compact_actions])
def test_where_legal_actions_are_left_out_the_prompt_determines_them(name):
    seeds = range(4 if name == "quoridor" else 25)  # its games are a hundred moves long
    tasks = [Task(task_id(name, c), seed, index=25 * c + seed) for c in range(6) for seed in seeds]
    player, legal = random_player(), {}
    play({"prompt": "compact", "history_turns": 0}, player, tasks)
    for query in player.queries:
        shown = tuple(message["content"] for message in query.conversation)
        assert legal.setdefault(shown, tuple(query.legal)) == tuple(query.legal), shown
    assert len(legal) > 5


def test_history_is_the_engines_own():
    env = new_env()()
    for name in ("goofspiel", "backgammon", "hearts"):
        rng, step = random.Random(0), env.reset(Task(task_id(name), 3))
        while not step.done:
            engine = [[move.player, move.action] for move in env._state.full_history()]
            assert step.info["history"] == engine
            step = env.step(random_legal(step, rng))
        assert len(step.info["history"]) > len(engine)


def test_seats_are_even_seats_first_two_only():
    env = new_env()()
    for name, expected in (("leduc_poker", [0, 1, 0, 1]), ("hearts", [0, 1, 0, 1]), ("2048", [0, 0, 0, 0])):
        assert [env.reset(Task(task_id(name), seed)).info["seat"] for seed in range(4)] == expected


def test_a_seed_that_is_not_given_derives_from_the_task_id():
    env = new_env()()
    for config_id in range(5):
        tid = task_id("leduc_poker", config_id)
        without = transcript(env, Task(tid), random_legal)
        assert without == transcript(env, Task(tid, derive_seed(tid)), random_legal)
    assert derive_seed(123456789) == 2668902308
    assert len({derive_seed(tid) for tid in range(10000)}) == 10000


@pytest.mark.parametrize("opponent", ["random", "mcts:5x1", "ismcts:5x1"])
@pytest.mark.parametrize("seed", [2**32 - 1, 2**32 - 4, 2**32, 2**31 - 6, -1, 10**30 + 1])
def test_any_integer_is_a_seed_modulo_2_32(seed, opponent):
    env = new_env()()
    wrapped = transcript(env, Task(task_id("leduc_poker"), seed % 2**32, opponent), random_legal)
    assert transcript(env, Task(task_id("leduc_poker"), seed, opponent), random_legal) == wrapped
    assert wrapped[-1].info["outcome"] == "finished"


def test_a_generator_is_made_once_and_seeded_for_each_episode(monkeypatch):
    """Making one takes a hundred times as long, which was four fifths of a short game."""
    made, new_generator = [], np.random.RandomState
    monkeypatch.setattr(np.random, "RandomState", lambda: made.append(1) or new_generator())
    Stream._spare.clear()
    for seed in range(100):
        assert Stream(seed).uniform() == new_generator(seed).random_sample()
    assert len(made) == 1


def test_stream_draws_what_randomstate_draws():
    rng = random.Random(0)
    for seed in [0, 1, 2**32 - 1, *(rng.randrange(2**32) for _ in range(200))]:
        stream, reference = Stream(seed), np.random.RandomState(seed)
        for _ in range(10):
            actions = sorted(rng.sample(range(5000), rng.randint(1, 300)))
            assert stream.choice(actions) == reference.choice(actions)
            weights = np.random.RandomState(rng.randrange(1000)).dirichlet([0.3] * len(actions)).tolist()
            assert stream.weighted(list(zip(actions, weights, strict=True))) == reference.choice(actions, p=weights)


RETRY = "Invalid response format. You must respond with ONLY the action ID number (e.g., '5'). This is attempt {} of 3."


def test_three_attempts_then_forfeit():
    env = new_env()()
    first = env.reset(Task(task_id("leduc_poker"), 1))
    assert first.info["attempt"] == 1
    for attempt in (1, 2):
        step = env.step("no idea")
        assert (step.text, step.legal, step.done) == (RETRY.format(attempt), first.legal, False)
        assert (step.info["attempt"], step.info["outcome"], step.info["seat"]) == (attempt + 1, None, 1)
    step = env.step("99")
    assert (step.done, step.score, step.legal, step.text) == (True, 0.0, {}, "")
    assert step.info["outcome"] == "forfeited"
    assert step.info["returns"] is None
    assert step.info["scores"] == {0: 0.5, 1: 0.0}
    with pytest.raises(RuntimeError, match="reset"):
        env.step("1")


def test_an_answer_in_time_leaves_no_trace_of_the_failed_ones():
    env = new_env()()
    plain = transcript(env, Task(task_id("leduc_poker"), 1), random_legal)
    env.reset(Task(task_id("leduc_poker"), 1))
    env.step("")
    assert env.step(str(plain[1].info["history"][len(plain[0].info["history"])][1])) == plain[1]


def test_who_answers_may_change_what_was_shown():
    """A player that strikes moves off its list does not change the rules."""
    env = OpenSpielEnv(EnvConfig())
    step = env.reset(Task(task_id("tic_tac_toe"), 0))
    step.legal.clear()
    step.info["history"].append([0, 8])
    assert env.step("none").info["history"] == []
    assert env.step("4").info["attempt"] == 1


def test_self_play_yields_every_seat_and_a_forfeit_costs_only_its_own():
    env = OpenSpielEnv(EnvConfig(), attempts=1)
    for seed, score in ((0, 0.5), (1, 0.0)):
        step = env.reset(Task(task_id("leduc_poker"), seed, "self"))
        assert (step.info["seat"], step.info["adapter"]) == (0, None)
        step = env.step("1")
        assert (step.info["seat"], step.info["adapter"]) == (1, None)
        step = env.step("?")
        assert step.info["scores"] == {0: 0.5, 1: 0.0}
        assert (step.score, step.info["seat"]) == (score, seed)
    hearts = transcript(new_env()(), Task(task_id("hearts"), 0, "self"), random_legal)
    assert {s.info["seat"] for s in hearts[:-1]} == {0, 1, 2, 3}
    assert set(hearts[-1].info["scores"]) == {0, 1, 2, 3}


def test_earlier_adapters_answer_for_the_other_seats():
    task = Task(task_id("euchre"), 3, "past:checkpoint-000500")
    steps = transcript(new_env()(), task, lambda step, rng: str(max(step.legal)))  # in which nobody goes alone
    adapters = {step.info["seat"]: step.info["adapter"] for step in steps[:-1]}
    assert adapters == {0: "checkpoint-000500", 1: None, 2: "checkpoint-000500", 3: "checkpoint-000500"}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("opponents", [True, False])
def test_a_prompt_that_no_longer_fits_costs_whose_it_is(seed, opponents):
    """An opponent's leaves the game undecided; the row is that of the task's own seat either way."""

    def choose(query):
        long = len(query.history) > 2 and (query.adapter is not None) == opponents
        return Action("", truncated=True) if long else next(iter(query.legal))

    [episode] = play(EnvConfig(), FunctionPlayer(choose), [Task(task_id("connect_four"), seed, "past:other")])
    assert (episode.outcome, episode.score) == ("truncated", 0.5 if opponents else 0.0)
    assert episode.info["seat"] == seed


def test_simultaneous_seats_choose_unseen_and_move_together():
    env = new_env()()
    first = env.reset(Task(task_id("goofspiel"), 0, "self"))
    second = env.step("7")
    assert (first.info["seat"], second.info["seat"]) == (0, 1)
    assert second.info["history"] == first.info["history"]
    other = new_env()()
    other.reset(Task(task_id("goofspiel"), 0, "self"))
    assert other.step("3").text == second.text
    third = env.step("2")
    assert third.info["history"][1:3] == [[0, 7], [1, 2]]


def test_reset_forgets_the_episode_before():
    env = new_env()()
    first = env.reset(Task(task_id("goofspiel"), 0, "self"))
    env.step("7")
    env.step("none")
    assert env.reset(Task(task_id("goofspiel"), 0, "self")) == first
    with pytest.raises(ValueError, match="out of range"):
        env.reset(Task(-1))
    with pytest.raises(RuntimeError):
        env.step("7")


@pytest.mark.parametrize("failing", ["reset", "step"])
def test_an_episode_that_failed_refuses_steps(monkeypatch, failing):
    """Its position is unknown, and legal were the actions of the one before."""
    env = new_env()()
    env.reset(Task(task_id("tic_tac_toe"), 0))
    with monkeypatch.context() as broken:
        broken.setattr(opponents.RandomBot, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            env.step("4") if failing == "step" else env.reset(Task(task_id("hex_small"), 1))
    with pytest.raises(RuntimeError, match="failed"):
        env.step("0")
    assert env.reset(Task(task_id("hex_small"), 1)).legal


def test_parser_edges():
    for protocol in ("affinetes", "affinetes_step"):
        assert parse_action("9" * 5000, {9: "nine"}, protocol) is None
    assert parse_action("hm", {3: "--"}) is None
    with pytest.raises(ValueError, match="affinetes or affinetes_step"):
        parse_action("1", {1: "one"}, "native")


def test_a_search_of_one_simulation_plays_at_random():
    tid = task_id("leduc_poker")
    played = play(EnvConfig(prompt="compact"), random_player(), [Task(tid, seed, "ismcts:1x2") for seed in range(8)])
    assert {episode.outcome for episode in played} == {"finished"}


@pytest.mark.parametrize("kind", ["mcts", "ismcts"])
def test_searching_bots_beat_random_ones(kind):
    tid, points = task_id("liars_dice_small", 1), []
    game, spiel = games.decode_task_id(tid)[0], openspiel.load_game(tid)
    for seed in range(60):
        state, chance = spiel.new_initial_state(), Stream(seed)
        specs = [OpponentSpec(kind, (60, 1)), OpponentSpec("random")]
        bots = [make_bot(game, spiel, specs[(p + seed) % 2], p, seed) for p in (0, 1)]
        while not state.is_terminal():
            if state.is_chance_node():
                state.apply_action(chance.weighted(state.chance_outcomes()))
            else:
                state.apply_action(bots[state.current_player()].step(state))
        points.append(state.returns()[seed % 2])
    assert np.mean(points) > 0.35


def test_ismcts_does_not_see_hidden_cards_and_mcts_does():
    tid = task_id("liars_dice")
    game, spiel = games.decode_task_id(tid)[0], openspiel.load_game(tid)
    moves: dict[str, list[int]] = {"ismcts": [], "mcts": []}
    for hidden in ([0, 0, 0, 0, 0], [5, 5, 5, 5, 5], [0, 1, 2, 3, 4]):
        state = spiel.new_initial_state()
        for die in [4, 3, 2, 1, 0, *hidden]:
            state.apply_action(die)
        for kind, played in moves.items():
            bot = make_bot(game, spiel, OpponentSpec(kind, (300, 1)), 0, 7)
            played.append(bot.step(state))
    assert len(set(moves["ismcts"])) == 1
    assert len(set(moves["mcts"])) > 1


@pytest.mark.parametrize("seat", [0, 1])
def test_ismcts_backs_values_up_from_the_side_of_the_player_who_moved(seat):
    class MoverWins:
        total_reward = 1.0

        def mcts_search(self, state):
            return self

    tid = task_id("kuhn_poker")
    spiel = openspiel.load_game(tid)
    state = spiel.new_initial_state()
    for action in [0, 1, 1][: 2 + seat]:  # two cards; seat 1 moves after a bet, seat 0 before it
        state.apply_action(action)
    bot: Any = make_bot(games.decode_task_id(tid)[0], spiel, OpponentSpec("ismcts", (3, 1)), seat, 0)
    bot._leaf = MoverWins()
    bot.step(state)
    root = bot._tree[state.information_state_string(seat)]
    if seat == 0:  # every move hands the winning turn to the opponent
        assert root == {0: [1, -1.0], 1: [1, -1.0]}
    else:  # folding loses the ante; calling a bet wins or loses two
        assert root[0] == [1, -1.0]
        assert abs(root[1][1]) == 2


@pytest.mark.parametrize("name", ["leduc_poker", "liars_dice", "gin_rummy", "euchre", "kuhn_poker"])
def test_ismcts_resamples_worlds_the_seat_cannot_tell_apart(name):
    tid = task_id(name)
    spiel = openspiel.load_game(tid)
    bot: Any = make_bot(games.decode_task_id(tid)[0], spiel, OpponentSpec("ismcts", (1, 1)), 0, 0)
    rng, stream, others, checked = random.Random(0), Stream(1), 0, 0
    while checked < 40:
        state = spiel.new_initial_state()
        while not state.is_terminal() and checked < 40:
            if not state.is_chance_node():
                seat = state.current_player()
                world = bot._resample(state, seat, stream)
                for view in ("observation_string", "information_state_string"):
                    if name != "liars_dice" or view == "information_state_string":
                        assert getattr(world, view)(seat) == getattr(state, view)(seat)
                others += str(world) != str(state)
                checked += 1
            state.apply_action(rng.choice(state.legal_actions()))
    assert others > 0


def test_no_world_of_euchre_deals_a_suit_that_was_not_followed():
    spiel = openspiel.load_game(tid := task_id("euchre"))
    bot: Any = make_bot(games.decode_task_id(tid)[0], spiel, OpponentSpec("ismcts", (1, 1)), 0, 0)
    rng, stream, plain, checked = random.Random(0), Stream(1), 0, 0

    def legal(world):
        replayed = spiel.new_initial_state()
        for action in world.history():
            if action not in replayed.legal_actions():
                return False
            replayed.apply_action(action)
        return True

    while checked < 200:
        state = spiel.new_initial_state()
        while not state.is_terminal():
            if not state.is_chance_node() and len(state.history()) > 35:  # some tricks have been played
                checked += 1
                plain += legal(state.resample_from_infostate(state.current_player(), stream.uniform))
                assert legal(bot._resample(state, state.current_player(), stream))
            state.apply_action(rng.choice(state.legal_actions()))
    assert plain < 0.95 * checked, "which OpenSpiel's own drawing does not see to"


def test_ismcts_tries_more_what_has_won_more_and_what_was_tried_less():
    """UCB1 with values scaled to [-1, 1]: total / visits + 1.414 (range / 2) sqrt(ln N / visits)."""
    bot: Any = make_bot(games.GAMES[games.NAMES.index("kuhn_poker")], openspiel.load_game(task_id("kuhn_poker")),
                        OpponentSpec("ismcts", (1, 1)), 0, 0)  # fmt: skip
    bot._low, bot._high, rng = -2.0, 2.0, random.Random(0)
    for _ in range(300):
        node = {action: [n := rng.randrange(1, 60), n * rng.uniform(-2, 2)] for action in range(4)}
        log_all = math.log(sum(n for n, _ in node.values()))
        bound = {a: total / n + 1.414 * 2 * math.sqrt(log_all / n) for a, (n, total) in node.items()}
        assert bot._select(node, [*node]) == max(bound, key=bound.__getitem__)


@pytest.mark.parametrize("name", ["liars_dice_small", "hex_small"])
def test_bots_are_the_public_ones_seed_for_seed(name):
    tid = task_id(name)
    game, spiel = games.decode_task_id(tid)[0], openspiel.load_game(tid)
    state = spiel.new_initial_state()
    while state.is_chance_node():
        state.apply_action(0)
    evaluator = pyspiel.RandomRolloutEvaluator(2, 40 + 2 + 1 + 3)
    reference = pyspiel.MCTSBot(spiel, evaluator, 1.414, 30, 256, True, 40 + 2 + 1 + 4, False)
    bot = make_bot(game, spiel, OpponentSpec("mcts", (30, 2)), 1, 40)
    assert [bot.step(state) for _ in range(20)] == [reference.step(state) for _ in range(20)]
    uniform = make_bot(game, spiel, OpponentSpec("random"), 0, 40)
    rng = np.random.RandomState(40 + 2 + 0 + 2)
    assert [uniform.step(state) for _ in range(20)] == [rng.choice(state.legal_actions()) for _ in range(20)]


@pytest.mark.parametrize("spec", ["ismcts:9x1", "cfr:5"])
@pytest.mark.parametrize("seat", [0, 1])
def test_bots_of_our_own_draw_numbers_that_dealt_no_card(spec, seat):
    """Those of the deal would tell what is hidden, and those of the other seat its moves."""
    tid = task_id("kuhn_poker")
    bot = make_bot(games.decode_task_id(tid)[0], openspiel.load_game(tid), parse_opponent(spec), seat, 40)
    rng = np.random.RandomState(40 + 2 + seat + 4)
    assert [bot._stream.uniform() for _ in range(5)] == [rng.random_sample() for _ in range(5)]


@pytest.mark.parametrize("seat", [0, 1])
def test_rollouts_of_each_game_and_seat_draw_numbers_of_their_own(seat, monkeypatch):
    """Those of the engine, and in gin rummy, which has dead ends, ours."""
    real, seeds = pyspiel.RandomRolloutEvaluator, []
    monkeypatch.setattr(pyspiel, "RandomRolloutEvaluator", lambda n, seed: seeds.append(seed) or real(n, seed))
    kuhn, gin = (task_id(*variant) for variant in (("kuhn_poker", 0), ("gin_rummy", 3)))
    bots: list[Any] = [
        make_bot(games.decode_task_id(tid)[0], openspiel.load_game(tid), parse_opponent(spec), seat, 40)
        for tid, spec in ((kuhn, "mcts:9x1"), (kuhn, "ismcts:9x1"), (gin, "ismcts:9x1"), (gin, "mcts:9x1"))
    ]
    assert seeds == [40 + 5 + seat] * 3
    streams = bots[2]._safe_leaf._stream, bots[3].evaluator._stream
    assert [stream.uniform() for stream in streams] == [np.random.RandomState(40 + 5 + seat).random_sample()] * 2
    assert bots[3]._random_state.random_sample() == np.random.RandomState(40 + 6 + seat).random_sample()


@pytest.mark.parametrize(("opponent", "rollouts"), [("mcts", 50), ("mcts_light", 5)])
def test_the_default_budget_is_the_games(opponent, rollouts, monkeypatch):
    built = []
    monkeypatch.setattr(pyspiel, "MCTSBot", lambda *args, **kwargs: built.append(args))
    monkeypatch.setattr(pyspiel, "RandomRolloutEvaluator", lambda rollouts, seed: built.append(rollouts))
    make_bot(games.GAMES[6], openspiel.load_game(task_id("hex")), parse_opponent(opponent), 1, 0)
    assert (built[1][3], built[0]) == (1000, rollouts)
    assert games.GAMES[6].mcts == (1000, 50)


@pytest.mark.parametrize("opponent", ["mcts", "ismcts"])
def test_games_without_search_fall_back_to_random_and_say_so_once(opponent, caplog, monkeypatch):
    """Also where threads begin several games at once, as in play."""
    opponents._say_once.cache_clear()
    monkeypatch.setattr(opponents.logger, "filter", lambda record: time.sleep(0.05) or True)

    def played(seed, *against):
        return transcript(new_env()(), Task(task_id("goofspiel"), seed, *against), random_legal)

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(3) as pool:
        assert [*pool.map(lambda seed: played(seed, opponent), range(3))] == [played(seed) for seed in range(3)]
    assert [record.getMessage() for record in caplog.records] == [
        f"goofspiel cannot be searched: its {opponent} opponents play at random"
    ]


@pytest.mark.parametrize("name", ["hearts", "phantom_ttt", "bridge"])
def test_ismcts_refuses_games_it_cannot_resample(name):
    with pytest.raises(ValueError, match=f"ismcts cannot play {name}: .*leduc_poker"):
        new_env()().reset(Task(task_id(name), 0, "ismcts"))


@pytest.mark.parametrize(("opponent", "name"), [("perfect", "leduc_poker"), ("cfr", "hex_small"), ("cfr", "chess")])
def test_who_solves_games_refuses_those_it_cannot(opponent, name):
    with pytest.raises(ValueError, match=f"opponent {opponent} cannot play {name}: "):
        new_env()().reset(Task(task_id(name), 0, opponent))


def test_a_solved_game_is_played_in_the_solutions_proportions():
    """Kuhn poker, seat 1 with the queen after a pass or a bet: as often as in the table, whatever seat 0 holds."""
    spiel, game, spec = openspiel.load_game(task_id("kuhn_poker")), games.GAMES[NAMES.index("kuhn_poker")], "cfr"
    table = exact.equilibrium_table(spiel, 300)
    for card, move in ((0, 0), (2, 0), (0, 1), (2, 1)):
        state = spiel.new_initial_state()
        for action in (card, 1, move):
            state.apply_action(action)
        bets = sum(make_bot(game, spiel, parse_opponent(spec), 1, seed).step(state) for seed in range(1000))
        assert bets / 1000 == pytest.approx(table[f"1{'pb'[move]}"][1], abs=0.05)
    assert table["1b"][1] == pytest.approx(1 / 3, abs=0.05)  # how often it calls in every equilibrium


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("random", OpponentSpec("random")),
        ("mcts", OpponentSpec("mcts")),
        ("mcts:25x1", OpponentSpec("mcts", (25, 1))),
        ("ismcts:100x20", OpponentSpec("ismcts", (100, 20))),
        ("perfect", OpponentSpec("perfect")),
        ("cfr", OpponentSpec("cfr", iterations=300)),
        ("cfr:20", OpponentSpec("cfr", iterations=20)),
        ("self", OpponentSpec("self")),
        ("past:checkpoint-000500", OpponentSpec("past", adapter="checkpoint-000500")),
    ],
)
def test_parse_opponent(text, spec):
    assert parse_opponent(text) == spec
    assert spec.searches == (spec.kind in ("mcts", "ismcts"))
    assert spec.solves == (spec.kind in ("perfect", "cfr"))


@pytest.mark.parametrize("text", ["", "Random", "mcts:", "mcts:0x5", "mcts:5", "mcts:-1x2", "mcts:1x2x3", "past:", "x",
                                  "cfr:0", "perfect:2"])  # fmt: skip
def test_parse_opponent_names_what_is_allowed(text):
    with pytest.raises(ValueError, match="allowed are random, mcts, mcts_light, mcts:SIMSxROLLOUTS") as error:
        parse_opponent(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("closed", ["", "2>&-"])
def test_engine_noise_is_kept_from_the_user(closed):
    program = (
        "import os, envs.openspiel\n"
        "from env_wrapper import Task, play, Action\n"
        "os.fstat(2)\n"  # nobody else's file, which would be silenced for a moment
        "class First:\n"
        "    def act(self, queries): return [Action(str(min(q.legal))) for q in queries]\n"
        "tasks = [Task(i * 10**8 + c, c, o) for i in (12, 14, 9) for c in range(3) for o in ('random', 'mcts:2x1')]\n"
        "print([e.outcome for e in play({}, First(), tasks)])\n"
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(["finished"] * 18)
    assert done.stderr == ""


def test_errors_of_the_engine_still_arrive():
    bad = dataclasses.replace(games.GAMES[0], name="bad", spiel_name="leduc_poker")
    with pytest.raises(ConfigError, match=r"^bad: .*wrong"):
        openspiel._table(bad, '{"wrong": 1}')


def test_bad_tasks_are_one_line():
    for task in (Task(-1), Task(len(NAMES) * games.CONFIGS_PER_GAME), Task(0, 0, "stockfish")):
        with pytest.raises(ValueError, match="allowed") as error:
            new_env()().reset(task)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("found", "ended"), [(-1e-17, "finished"), (-0.01, "failed"), (float("nan"), "failed")])
def test_a_game_that_returns_less_than_it_declares_fails_and_a_rounded_sum_does_not(monkeypatch, found, ended):
    monkeypatch.setattr(openspiel, "score", lambda *_: found)
    [episode] = play({}, random_player(), [Task(NAMES.index("hex_small") * games.CONFIGS_PER_GAME, 0)])
    assert (episode.outcome, episode.score) == (ended, 0.0)
    assert ended == "finished" or f"the score {found} is not in [0, 1]: see min_utility" in episode.info["error"]


def test_a_game_of_2048_that_is_won_scores_one_here_and_from_a_server():
    """Other tiles beside the last come on top of what the engine calls the most; the public score is above 1."""
    task = Task(NAMES.index("2048") * games.CONFIGS_PER_GAME, 0)
    spiel, returns = openspiel.load_game(task.task_id), [27_000.0]
    told = openspiel.score(spiel, returns, 0)
    assert told == pytest.approx(27_000 / 20_480)
    env = new_env()()
    env.reset(task)
    assert env._end(returns).score == 1
    answer = {"observation": "", "episode_id": "", "done": True, "reward": told, "info": {"returns": returns}}
    assert read_reply(answer, spiel).score == 1
    with pytest.raises(ServerError, match=r"the score 2.1 is not in \[0, 2\]"):
        read_reply(answer | {"reward": 2.1}, spiel)


def test_an_array_of_returns_is_read_as_a_servers_list():
    importlib.import_module("open_spiel.python.games.iterated_prisoners_dilemma")  # registers it
    spiel = pyspiel.load_game("python_iterated_prisoners_dilemma")
    history = [[0, 0], [1, 1], [-1, 1]]
    answer = {"observation": "", "episode_id": "", "done": True, "reward": 0.0, "info": {"history": history}}
    assert read_reply(answer, spiel).returns == [0.0, 10.0]


def test_who_play_together_are_measured_by_what_they_reach():
    together = pyspiel.load_game("tiny_hanabi")
    assert [openspiel.score(together, [points, points], 1) for points in (0, 4, 10)] == [0, 0.4, 1]


@pytest.mark.parametrize(("returns", "scores"), [([10, 0], [1, 0]), ([0, 10], [0, 1]), ([5, 5], [0.5, 0.5])])
def test_of_two_who_do_not_play_for_the_same_sum_the_one_with_more_has_won(returns, scores):
    """Only games of one's own are of this kind."""
    dilemma = pyspiel.load_game("matrix_pd")
    assert [openspiel.score(dilemma, returns, seat) for seat in (0, 1)] == scores


@pytest.mark.parametrize("past", [0, 1, 2, "all"])
def test_a_query_says_whether_the_next_conversation_extends_its_own(past):
    player = random_player()
    play(
        {"prompt": "compact", "history_turns": past},
        player,
        [Task(games.NAMES.index("tic_tac_toe") * games.CONFIGS_PER_GAME, seed=3, opponent="random")],
    )
    asked = player.queries
    assert len(asked) >= 3
    for query, after in itertools.pairwise(asked):
        assert query.continues == (after.conversation[: len(query.conversation)] == query.conversation)
