import ctypes
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyspiel
import pytest
from tables import all_games, best_response_table, games_of

from envs import exact

GOOFSPIEL = "goofspiel(imp_info=True,num_cards={},points_order=descending)"
GAMES = ["kuhn_poker", "leduc_poker", "tic_tac_toe", "hex(board_size=3)", GOOFSPIEL.format(4), GOOFSPIEL.format(5)]
ROOT = Path(__file__).parents[2]
LIARS_DICE = "liars_dice(numdice=1)"


def forget():
    """What is known of games."""
    exact._is_small.cache_clear()
    exact._explore.cache_clear()


def random_table(game, seed):
    rng = np.random.default_rng(seed)
    return exact.tabulate(
        game,
        lambda asked: [
            dict(zip(legal, rng.dirichlet(np.ones(len(legal))), strict=True))
            for legal in (state.legal_actions(seat) for state, seat in asked)
        ],
    )


@pytest.mark.parametrize(
    ("name", "ceiling"),
    [
        ("kuhn_poker", 0.229),
        ("leduc_poker", 0.1826),
        ("tic_tac_toe", 0.960),
        ("hex(board_size=3)", 0.978),
        (GOOFSPIEL.format(4), 0.708),
        (GOOFSPIEL.format(5), 0.775),
        pytest.param(LIARS_DICE, 0.781, marks=pytest.mark.slow),
    ],
)
def test_ceilings_are_the_known_ones_and_are_attained(name, ceiling):
    game = pyspiel.load_game(name)
    best = exact.best_response_values(game)
    assert np.mean(best) / game.max_utility() == pytest.approx(ceiling, abs=5e-4)
    table = best_response_table(game)
    assert all(sorted(probs.values())[-1] == 1 and sum(probs.values()) == 1 for probs in table.values())
    assert exact.value_against_random(game, table) == pytest.approx(best, abs=1e-12)


def worth_by_hand(game, table):
    """What each answer is worth, by walking all histories and asking OpenSpiel for the value of what follows."""
    turns, sums, weights = pyspiel.load_game_as_turn_based(str(game)), {}, {}
    policy = pyspiel.TabularPolicy({key: list(probs.items()) for key, probs in table.items()})

    def walk(state, odds):
        if state.is_chance_node():
            for action, p in state.chance_outcomes():
                walk(state.child(action), [o * p for o in odds])
        elif not state.is_terminal():
            seat = state.current_player()
            key = exact.info_key(state, seat) if "Current player" in str(next(iter(table))) else None
            key = key if key in table else pyspiel.State.information_state_string(state, seat)
            for action, p in table[key].items():
                child = state.child(action)
                found = (
                    child.returns() if child.is_terminal() else pyspiel.expected_returns(child, [policy] * 2, -1, True)
                )
                sums[key, action] = sums.get((key, action), 0) + odds[1 - seat] * found[seat]
                weights[key, action] = weights.get((key, action), 0) + odds[1 - seat]
                walk(child, [o * (p if i == seat else 1) for i, o in enumerate(odds)])

    walk(turns.new_initial_state(), [1.0, 1.0])  # odds of chance and of the moves of each seat
    return {key: total / weights[key] if weights[key] else 0.0 for key, total in sums.items()}


@pytest.mark.parametrize("never", [False, True])
@pytest.mark.parametrize("name", ["kuhn_poker", GOOFSPIEL.format(3)])
def test_what_answers_are_worth_is_what_openspiel_says_of_what_follows(name, never):
    """``never``: some answers are never given, by the seat itself or by the other."""
    game = pyspiel.load_game(name)
    table = random_table(game, 3)
    if never:
        table = {k: p if i % 2 else {a: float(a == max(p)) for a in p} for i, (k, p) in enumerate(table.items())}
    found = {(key, a): v for key, values in exact.answer_values(game, table).items() for a, v in values.items()}
    assert found == pytest.approx(worth_by_hand(game, table), abs=1e-9)


LEDUC_SLOWLY = pytest.param("leduc_poker", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["kuhn_poker", LEDUC_SLOWLY, "tic_tac_toe", GOOFSPIEL.format(4)])
def test_no_answer_of_an_equilibrium_is_worth_more_than_those_it_gives(name):
    game = pyspiel.load_game(name)
    perfect = name == "tic_tac_toe"
    table = exact.perfect_table(game) if perfect else exact.equilibrium_table(game, 1000)
    values = exact.answer_values(game, table)
    assert values.keys() == {info.key for info in exact.information_states(game)}
    gains = [
        max(values[key].values()) - sum(p * values[key][a] for a, p in probs.items()) for key, probs in table.items()
    ]
    assert min(gains) > -1e-9
    reached = sorted(gains)[: len(gains) // 2]  # elsewhere an equilibrium may play anything
    assert max(gains if perfect else reached) < 0.05
    uniform = exact.uniform_table(game)
    best = exact.best_response_values(game)
    root = exact.answer_values(game, uniform)
    assert max(map(max, (v.values() for v in root.values() if v))) >= max(best) - 1e-9


@pytest.mark.parametrize("seat", [0, 1])
@pytest.mark.parametrize(("name", "left"), [("kuhn_poker", 0.4), ("leduc_poker", 0.45), ("nim(pile_sizes=1;2;2)", 0.8)])
def test_luck_is_nothing_in_the_mean_whoever_plays_and_is_much_of_the_variance(name, left, seat):
    """A player that always wins has no variance, of which luck is none."""
    game = pyspiel.load_game(name)
    for table in (random_table(game, 3), best_response_table(game)):
        odds, returns, luck = games_of(game, table, seat)
        assert sum(odds) == pytest.approx(1)
        assert odds @ luck == pytest.approx(0, abs=1e-12)
        away = returns - odds @ returns
        slope = odds @ (away * luck) / max(odds @ luck**2, 1e-12)
        assert odds @ (away - slope * luck) ** 2 <= left * (odds @ away**2) + 1e-12


@pytest.mark.parametrize("seat", [0, 1])
@pytest.mark.parametrize("name", ["kuhn_poker", "nim(pile_sizes=1;2;2)"])
def test_all_luck_is_known_of_a_player_half_way_to_the_best_response(name, seat):
    """What is left are its own answers, which have nothing to do with luck: the slope is 1."""
    game = pyspiel.load_game(name)
    best, uniform = best_response_table(game), exact.uniform_table(game)
    table = {key: {a: p / 2 + best[key][a] / 2 for a, p in probs.items()} for key, probs in uniform.items()}
    odds, returns, luck = games_of(game, table, seat)
    assert odds @ (returns * luck) == pytest.approx(odds @ luck**2)


@pytest.mark.parametrize("seat", [0, 1])
@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker", "nim(pile_sizes=1;2;2)"])
def test_luck_against_a_known_player_is_that_of_its_own_moves(name, seat):
    game = pyspiel.load_game(name)
    opponent, mine = exact.Known(random_table(game, 7)), random_table(game, 3)
    odds, _, luck = games_of(game, mine, seat, opponent)
    assert odds @ luck == pytest.approx(0, abs=1e-12)
    _, best = exact._response(game, seat, opponent)
    uniform = exact.uniform_table(game)
    mine = {key: {a: p / 2 + (best.get(key) == a) / 2 for a, p in probs.items()} for key, probs in uniform.items()}
    odds, returns, luck = games_of(game, mine, seat, opponent)
    assert odds @ (returns * luck) == pytest.approx(odds @ luck**2)
    other = exact.Known(random_table(game, 8))  # told apart, though the game and the seat are the same
    assert games_of(game, mine, seat, other)[2] != pytest.approx(luck)


@pytest.mark.parametrize("seat", [0, 1])
@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker", "nim(pile_sizes=1;2;2)"])
def test_answers_are_worth_as_much_beside_each_other_less_luck(name, seat):
    """Which is what training may not change: only what all answers of an information state share may go."""
    game = pyspiel.load_game(name)
    sums = {}  # information state -> {answer: [probability, return, return less luck]}
    for odds, won, luck, history in all_games(game, random_table(game, 3), seat):
        state = game.new_initial_state()
        for player, action in history:
            if player == seat:
                answers = sums.setdefault(exact.info_key(state, seat), {})
                answers[action] = answers.get(action, 0) + odds * np.array([1, won, won - luck])
            state.apply_action(action)
    for answers in sums.values():
        raw, less = np.array([[raw / odds, less / odds] for odds, raw, less in answers.values()]).T
        assert less - less.mean() == pytest.approx(raw - raw.mean(), abs=1e-9)
    assert any(len(answers) > 1 for answers in sums.values())


@pytest.mark.parametrize("name", [GOOFSPIEL.format(4), "connect_four"])
def test_luck_is_not_told_where_seats_choose_at_once_or_the_game_is_too_large(name):
    assert exact.luck(pyspiel.load_game(name), [], 0) is None


@pytest.mark.parametrize(("name", "known"), [("kuhn_poker", 11 / 12), ("leduc_poker", 4.747222)])
def test_nash_conv_of_uniform_play_is_the_known_one(name, known):
    game = pyspiel.load_game(name)
    table = exact.uniform_table(game)
    assert exact.nash_conv(game, table) == pytest.approx(known, abs=1e-6)


def test_kuhn_equilibrium_has_no_nash_conv_and_its_known_value():
    """Kuhn 1950, the equilibrium with alpha = 1/3; action 1 is to bet or call."""
    bet = {"0": 1 / 3, "1": 0, "2": 1, "0pb": 0, "1pb": 2 / 3, "2pb": 1}
    bet |= {"0p": 1 / 3, "1p": 0, "2p": 1, "0b": 0, "1b": 1 / 3, "2b": 1}
    game = pyspiel.load_game("kuhn_poker")
    table = exact.tabulate(
        game, lambda asked: [{0: 1 - bet[k], 1: bet[k]} for k in (s.information_state_string(p) for s, p in asked)]
    )
    assert exact.nash_conv(game, table) == pytest.approx(0, abs=1e-12)
    assert exact._worth_to(game, 0, [table, table])(game.new_initial_state()) == pytest.approx(-1 / 18)


@pytest.mark.parametrize(("name", "value"), [("tic_tac_toe", 0), ("hex(board_size=3)", 1), ("hex(board_size=2)", 1)])
def test_perfect_play_cannot_be_exploited_and_has_the_known_value(name, value):
    game = pyspiel.load_game(name)
    table = exact.perfect_table(game)
    assert exact._worth_to(game, 0, [table, table])(game.new_initial_state()) == pytest.approx(value)
    assert exact.nash_conv(game, table) == pytest.approx(0, abs=1e-12)


def test_perfect_play_tries_every_move_that_is_as_good_as_the_best():
    game = pyspiel.load_game("tic_tac_toe")
    table, state = exact.perfect_table(game), game.new_initial_state()
    assert set(table[exact.info_key(state, 0)].values()) == {1 / 9}  # every first move draws
    state.apply_action(0)
    answers = table[exact.info_key(state, 1)]
    assert {action: p for action, p in answers.items() if p} == {4: 1}  # after a corner the middle alone does


@pytest.mark.parametrize(
    ("name", "iterations", "bound"),
    [("kuhn_poker", 300, 1e-3), ("leduc_poker", 100, 0.03), (GOOFSPIEL.format(4), 300, 5e-3)],
)
def test_an_equilibrium_comes_as_near_as_it_was_given_iterations(name, iterations, bound):
    game = pyspiel.load_game(name)
    found = [exact.nash_conv(game, exact.equilibrium_table(game, n)) for n in (iterations // 10, iterations)]
    assert 0 <= found[1] < min(bound, found[0])


def test_who_plays_best_is_not_known_of_other_games():
    with pytest.raises(ValueError, match="it hides information or has simultaneous moves; use cfr"):
        exact.perfect_table(pyspiel.load_game("kuhn_poker"))
    with pytest.raises(ValueError, match="it hides nothing; use perfect"):
        exact.equilibrium_table(pyspiel.load_game("tic_tac_toe"), 1)
    for solve, name in ((exact.perfect_table, "connect_four"), (lambda g: exact.equilibrium_table(g, 1), "hearts")):
        with pytest.raises(ValueError, match="has no exact values: allowed are two-player"):
            solve(pyspiel.load_game(name))


def uniform(legal):
    return dict.fromkeys(legal, 1 / len(legal))


@pytest.mark.parametrize("name", GAMES)
def test_random_play_is_worth_nothing_in_both_seats_together(name):
    game = pyspiel.load_game(name)
    even = exact.tabulate(game, lambda asked: [uniform(state.legal_actions(seat)) for state, seat in asked])
    assert sum(exact.value_against_random(game, even)) == pytest.approx(0, abs=1e-12)


def test_positions_and_histories_give_the_same_values():
    """The position graph against OpenSpiel's own algorithms on the full history tree, for a random policy."""
    game = pyspiel.load_game("hex(board_size=2)")
    table = random_table(game, seed=3)
    by_history, uniform = {}, {}
    stack = [game.new_initial_state()]
    while stack:
        state = stack.pop()
        if state.is_terminal():
            continue
        by_history[state.information_state_string()] = list(
            table[exact.info_key(state, state.current_player())].items()
        )
        uniform[state.information_state_string()] = [(a, 1 / len(state.legal_actions())) for a in state.legal_actions()]
        stack.extend(state.child(action) for action in state.legal_actions())
    assert len(by_history) > len(table)
    policy, even = pyspiel.TabularPolicy(by_history), pyspiel.TabularPolicy(uniform)
    root = game.new_initial_state()
    expected = (
        pyspiel.expected_returns(root, [policy, even], -1, True)[0],
        pyspiel.expected_returns(root, [even, policy], -1, True)[1],
    )
    assert exact.value_against_random(game, table) == pytest.approx(expected, abs=1e-12)
    assert exact.nash_conv(game, table) == pytest.approx(pyspiel.nash_conv(game, by_history), abs=1e-12)
    ceilings = [pyspiel.TabularBestResponse(game, seat, uniform).value_from_state(root) for seat in (0, 1)]
    assert exact.best_response_values(game) == pytest.approx(ceilings, abs=1e-12)


@pytest.mark.parametrize("name", [GOOFSPIEL.format(4), "leduc_poker", "tic_tac_toe"])
def test_values_agree_with_played_games(name):
    """The original game, simultaneous moves included, is played out; the mean lies within four standard errors."""
    game, rng = pyspiel.load_game(name), random.Random(7)
    table = random_table(game, seed=11)
    for seat, value in enumerate(exact.value_against_random(game, table)):
        returns = [play(game, table, seat, rng) for _ in range(3000)]
        assert abs(np.mean(returns) - value) < 4 * np.std(returns) / len(returns) ** 0.5


def play(game, table, seat, rng):
    def choose(state, player):
        if player != seat:
            return rng.choice(state.legal_actions(player))
        probs = table[exact.info_key(state, player)]
        return rng.choices(list(probs), list(probs.values()))[0]

    state = game.new_initial_state()
    while not state.is_terminal():
        if state.is_simultaneous_node():
            state.apply_actions([choose(state, player) for player in (0, 1)])
        elif state.is_chance_node():
            state.apply_action(rng.choices(*zip(*state.chance_outcomes(), strict=True))[0])
        else:
            state.apply_action(choose(state, state.current_player()))
    return state.returns()[seat]


@pytest.mark.parametrize(
    ("name", "count"),
    [("kuhn_poker", 12), ("leduc_poker", 936), ("tic_tac_toe", 4520), (LIARS_DICE, 24576), (GOOFSPIEL.format(4), 162)],
)
def test_information_states_are_complete_distinct_and_shown_as_in_play(name, count):
    infos = exact.information_states(pyspiel.load_game(name))
    assert len({info.key for info in infos}) == len(infos) == count
    for info in infos:
        assert info.state.get_game().get_type().short_name == name.split("(")[0]
        assert exact.info_key(info.state, info.seat) == info.key
        assert info.state.is_simultaneous_node() or info.state.current_player() == info.seat


def test_a_policy_is_asked_once_and_never_about_forced_moves():
    game, calls = pyspiel.load_game("tic_tac_toe"), []

    def probs_fn(asked):
        calls.append(asked)
        return [{state.legal_actions(seat)[-1]: np.float32(0.99999)} for state, seat in asked]

    table = exact.tabulate(game, probs_fn)
    assert len(calls) == 1
    assert 0 < len(calls[0]) < len(table)
    assert all(len(state.legal_actions(seat)) > 1 for state, seat in calls[0])
    assert all(sum(probs.values()) == 1 for probs in table.values())


@pytest.mark.parametrize(
    "answer", [{}, {0: 0.5, 1: 0.4}, {0: 1.5, 1: -0.5}, {0: 0.5, 7: 0.5}, {0: float("nan"), 1: 0.5}]
)
def test_an_answer_that_is_no_distribution_is_refused(answer):
    with pytest.raises(ValueError, match="not a distribution over the legal actions"):
        exact.tabulate(pyspiel.load_game("kuhn_poker"), lambda asked: [answer] * len(asked))


def test_too_few_answers_are_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        exact.tabulate(pyspiel.load_game("kuhn_poker"), lambda asked: [{0: 0.5, 1: 0.5}] * (len(asked) - 1))


@pytest.mark.parametrize(
    "name",
    [
        *("connect_four", "hex(board_size=4)", GOOFSPIEL.format(6), "chess", "gin_rummy", "2048", "hearts"),
        *("phantom_ttt", "blackjack", "backgammon", "kuhn_poker(players=3)"),
        "oshi_zumo(horizon=200)",  # hides what both choose at once
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("liars_dice(numdice=2)", "goofspiel")),
    ],
)
def test_games_beyond_the_bound_are_recognised_quickly(name):
    game = pyspiel.load_game(name)
    start = time.process_time()
    assert not exact.feasible(game)
    assert time.process_time() - start < 5
    for function in (exact.information_states, exact.best_response_values, exact.uniform_table):
        with pytest.raises(ValueError, match="has no exact values: allowed are two-player"):
            function(game)


def test_a_long_game_is_walked_in_little_memory():
    """Its positions are large: those that wait to be walked filled a gigabyte after a thousand of them."""
    walk = (
        "import pyspiel; from envs import exact; exact.MAX_HISTORIES = exact.MAX_MOVES = 1000\n"
        "assert not exact.feasible(pyspiel.load_game('oshi_zumo'))\n"
        "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"  # getrusage's is the parent's, too
    )
    done = subprocess.run([sys.executable, "-c", walk], capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(done.stdout) < 500_000  # kilobytes; 70,000 where it was written


@pytest.mark.slow
def test_the_usual_four_games_take_seconds():
    """All of them from cold caches, given the lookups."""
    forget()
    exact._positions.cache_clear()
    start = time.process_time()
    for name in ("leduc_poker", "tic_tac_toe", GOOFSPIEL.format(4), LIARS_DICE):
        game = pyspiel.load_game(name)
        table = random_table(game, seed=0)
        values = exact.value_against_random(game, table), exact.best_response_values.__wrapped__(game)
        assert all(value < ceiling for value, ceiling in zip(*values, strict=True))
        assert sum(values[1]) > 0
    assert time.process_time() - start < 15


@pytest.mark.parametrize("name", ["quoridor(board_size=3)", "oware(num_houses_per_player=2,num_seeds_per_house=1)"])
def test_positions_that_can_come_again_have_no_exact_values(name):
    assert not exact.feasible(pyspiel.load_game(name))


def test_whether_a_game_is_small_enough_is_found_out_once_however_many_are_played(monkeypatch):
    """Training asks of every game that it has played, of which some runs have sixty kinds."""
    walked = []
    monkeypatch.setattr(exact, "_walk", lambda text: walked.append(text) or [])
    forget()
    for _ in range(2):
        assert not any(exact.feasible(pyspiel.load_game(f"nim(pile_sizes=1;{n})")) for n in range(1, 41))
    forget()
    assert len(walked) == 40


def test_positions_that_their_texts_do_not_tell_apart_have_no_exact_values():
    """The noise of an end depends on the way to it, which the text of nim's positions does not tell."""
    assert not exact.feasible(pyspiel.load_game("add_noise(epsilon=1.,seed=1,game=nim(pile_sizes=2;3))"))
    assert exact.feasible(pyspiel.load_game("nim(pile_sizes=2;3)"))


def test_a_game_whose_seats_have_the_same_information_state_has_no_exact_values(monkeypatch, caplog):
    """One entry of the table answered for both of them."""
    shown, kuhn = pyspiel.State.information_state_string, pyspiel.load_game("kuhn_poker")
    with monkeypatch.context() as patched:  # the card without the bets
        patched.setattr(pyspiel.State, "information_state_string", lambda state, seat: shown(state, seat)[:1])
        forget()
        assert not exact.feasible(kuhn)
    forget()
    assert exact.feasible(kuhn)
    [told] = caplog.messages
    assert told == "kuhn_poker() has no exact values: ValueError: both seats have the information state '0'"


class Unobserved(pyspiel.Game):
    """Two guess one after the other, the second without having seen. Python can read its states, C++ cannot."""

    TYPE = pyspiel.GameType(
        "unobserved", "unobserved", pyspiel.GameType.Dynamics.SEQUENTIAL, pyspiel.GameType.ChanceMode.DETERMINISTIC,
        pyspiel.GameType.Information.IMPERFECT_INFORMATION, pyspiel.GameType.Utility.ZERO_SUM,
        pyspiel.GameType.RewardModel.TERMINAL, 2, 2, True, False, False, False, {},
    )  # fmt: skip

    def __init__(self, params=None):
        super().__init__(self.TYPE, pyspiel.GameInfo(2, 0, 2, -1.0, 1.0, 0.0, 2), params or {})

    def new_initial_state(self):
        return Guesses(self)


class Guesses(pyspiel.State):
    def __init__(self, game):
        super().__init__(game)
        self.moves = []

    def __str__(self):
        return str(self.moves)

    def current_player(self):
        return pyspiel.PlayerId.TERMINAL if self.is_terminal() else len(self.moves)

    def is_terminal(self):
        return len(self.moves) == 2

    def _legal_actions(self, player):
        return [0, 1]

    def _apply_action(self, action):
        self.moves.append(action)

    def _action_to_string(self, player, action):
        return str(action)

    def returns(self):
        won = 1.0 if len({*self.moves}) == 1 else -1.0
        return [won, -won] if self.is_terminal() else [0.0, 0.0]

    def information_state_string(self, player):
        return f"seat {player}"


def test_a_game_that_openspiel_s_algorithms_cannot_read_has_no_exact_values(caplog):
    """The states were found by Python's method; then the best response ended in a traceback."""
    pyspiel.register_game(Unobserved.TYPE, Unobserved)
    assert not exact.feasible(pyspiel.load_game("unobserved"))
    [told] = caplog.messages
    assert told.startswith("unobserved() has no exact values: AttributeError: ")
    assert "make_py_observer" in told


class Paid(pyspiel.Game):
    """Each takes a chip or gives one, then moves once more for nothing; positions tell how many moves were made."""

    TYPE = pyspiel.GameType(
        "paid", "paid", pyspiel.GameType.Dynamics.SEQUENTIAL, pyspiel.GameType.ChanceMode.DETERMINISTIC,
        pyspiel.GameType.Information.PERFECT_INFORMATION, pyspiel.GameType.Utility.ZERO_SUM,
        pyspiel.GameType.RewardModel.REWARDS, 2, 2, False, False, False, False, {},
    )  # fmt: skip

    def __init__(self, params=None):
        super().__init__(self.TYPE, pyspiel.GameInfo(2, 0, 2, -2.0, 2.0, 0.0, 4), params or {})

    def new_initial_state(self):
        return Payments(self)


class Payments(Guesses):
    def __str__(self):
        return f"after {len(self.moves)} moves"

    def current_player(self):
        return pyspiel.PlayerId.TERMINAL if self.is_terminal() else len(self.moves) % 2

    def is_terminal(self):
        return len(self.moves) == 4

    def returns(self):
        won = float(sum((1 - 2 * action) * (1 - 2 * (n % 2)) for n, action in enumerate(self.moves[:2])))
        return [won, -won]


def test_a_game_that_pays_on_the_way_has_no_exact_values_where_its_positions_do_not_tell_what_was_paid():
    """All ends had the text of the first that was found, and its return: the best response won nothing."""
    pyspiel.register_game(Paid.TYPE, Paid)
    assert not exact.feasible(pyspiel.load_game("paid"))


def test_a_game_that_fails_in_a_position_has_no_exact_values_and_the_log_says_why(caplog):
    """This one's text names a game that OpenSpiel does not know."""
    forget()
    assert not exact.feasible(pyspiel.load_game("restricted_nash_response(game=kuhn_poker())"))
    [told] = caplog.messages
    assert told.startswith("rnr_kuhn_poker(players=2) has no exact values: SpielError: Unknown game 'rnr_kuhn_poker'")
    assert "\n" not in told


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_a_best_response_gives_its_memory_back():
    """OpenSpiel's takes 0.4 GB of liars_dice_small, which a run kept beside all that it needed for its steps."""
    code = f"""
import psutil, pyspiel
from envs import exact
game, before = pyspiel.load_game({LIARS_DICE!r}), psutil.Process().memory_info().rss
exact._response(game, 0)
print(psutil.Process().memory_info().rss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150e6
