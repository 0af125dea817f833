"""What the rules texts of the card and dice games claim, held against the engine."""

import random
import re
from collections import Counter

import pyspiel
import pytest
from games_support import advance, found, from_history, load, playthrough, prompts, rules

from games import GAMES, NAMES
from games.euchre import BIDS
from games.tricks import SEATS, parse_tricks


def test_kuhn_rules():
    game = load("kuhn_poker")
    for cards in [(a, b) for a in range(3) for b in range(3) if a != b]:
        sign = 1 if cards[0] > cards[1] else -1
        outcomes = {(0, 0): sign, (1, 1): 2 * sign, (1, 0): 1, (0, 1, 0): -1, (0, 1, 1): 2 * sign}
        for bets, value in outcomes.items():
            assert from_history(game, [*cards, *bets]).returns() == [value, -value]
    state = from_history(game, [2, 0, 0, 1])
    assert prompts("kuhn_poker", state, 0) == (
        "Your card: King\nBetting so far: you Pass, opponent Bet\nPot: 3 chips",
        "K pb",
    )


def test_leduc_rules():
    game = load("leduc_poker")
    fold, call, raise_ = 0, 1, 2
    jack, queen, other_queen, king, other_king = 0, 2, 3, 4, 5
    both_check = [call, call]

    def showdown(a, b, public):
        return from_history(game, [a, b, *both_check, public, *both_check]).returns()[0]

    assert showdown(king, queen, jack) == 1
    assert showdown(king, queen, other_queen) == -1
    assert showdown(queen, other_queen, jack) == 0
    assert from_history(game, [king, queen, raise_, fold]).returns() == [1, -1]
    assert from_history(game, [king, queen, raise_, raise_, fold]).returns() == [-3, 3]
    most = [raise_, raise_, call]
    assert from_history(game, [king, jack, *most, other_king, *most]).returns() == [13, -13]
    third = from_history(game, [king, jack, raise_, raise_])
    assert third.legal_actions() == [fold, call]
    assert from_history(game, [king, jack]).legal_actions() == [call, raise_]
    after_raise = from_history(game, [king, jack, call, raise_, call, other_king])
    assert after_raise.current_player() == 0
    assert prompts("leduc_poker", after_raise, 0) == (
        "Your card: King of spades\nPublic card: King of hearts\n"
        "Round 1 betting: you Call, opponent Raise, you Call\nRound 2 betting: none yet\n"
        "Chips put in: you 3, opponent 3; pot 6",
        "Ks/Kh crc/",
    )
    assert "-13 to +13" in rules("leduc_poker")


@pytest.mark.parametrize(("name", "config_id", "dice"), [("liars_dice", 0, 5), ("liars_dice_small", 0, 1)])
def test_liars_dice_rules(name, config_id, dice):
    game = load(name, config_id)
    first = from_history(game, [0] * (2 * dice))
    assert first.legal_actions() == list(range(12 * dice))
    assert f"Liar is ID {12 * dice}" in rules(name, config_id)
    for quantity in range(1, 2 * dice + 1):
        for face in range(1, 7):
            bid = 6 * (quantity - 1) + (face - 1)
            assert first.action_to_string(0, bid) == f"{quantity}-{face}"
    rng = random.Random(1)
    for _ in range(100):
        rolled, bid = [rng.randrange(6) for _ in range(2 * dice)], rng.randrange(12 * dice)
        after = from_history(game, [*rolled, bid])
        assert after.legal_actions() == [*range(bid + 1, 12 * dice), 12 * dice]
        after.apply_action(12 * dice)
        matching = sum(die in (bid % 6, 5) for die in rolled)
        assert (after.returns()[0] > 0) == (matching >= bid // 6 + 1)


def played_goofspiel(config_name, config_id, bids, prizes=None):
    state = load(config_name, config_id).new_initial_state()
    for i, pair in enumerate(bids):
        if state.is_chance_node():
            state.apply_action(prizes[i] - 1)
        state.apply_actions([card - 1 for card in pair])
    return state


def test_goofspiel_rules():
    state = played_goofspiel("goofspiel_small", 0, [(2, 1), (3, 3)])
    assert prompts("goofspiel_small", state, 1) == (
        "Current prize: 2\nPrizes still to come: 1\nYour hand: 2 4\nPoints: you 0, opponent 4\n"
        "Round 1: prize 4, your bid 1, opponent won\nRound 2: prize 3, your bid 3, tie",
        "b-da=cc",
    )
    over = played_goofspiel("goofspiel_small", 0, [(2, 1), (3, 3), (1, 4)])
    assert over.is_terminal()
    assert over.returns() == [1, -1]  # 4 + 1 points against 2: the last card was played automatically
    tied = played_goofspiel("goofspiel_small", 0, [(1, 1), (2, 2), (3, 3)])
    assert tied.returns() == [0, 0]
    assert "from the highest to the lowest" in rules("goofspiel_small")


@pytest.mark.parametrize("config_id", range(5))
def test_goofspiel_shows_both_hands(config_id):
    cards = 8 + 2 * config_id
    state = played_goofspiel("goofspiel", config_id, [(1, 2)], [5])
    state.apply_action(2)
    full, compact = prompts("goofspiel", state, 0)
    rest = " ".join(str(k) for k in range(3, cards + 1))
    assert f"Your hand: 2 {rest}\nOpponent's hand: 1 {rest}\nPoints: you 0, opponent 5\n" in full
    assert full.startswith("Current prize: 3\nPrizes still to come: 1 2 4 6 7 8")
    letters = "abcdefghijklmnop"[2:cards]
    assert compact == " ".join(["c", "b", *letters, "A", *letters.upper(), "0-5", "e-"])
    assert f"cards 1 to {cards}" in rules("goofspiel", config_id)
    assert "random order" in rules("goofspiel", config_id)
    assert len(list(playthrough("goofspiel", config_id))) - 1 == cards - 1


def trick_winner(trick, order, trumps=(), lead_cards=None):
    """Return the seat that wins: the highest trump, else the highest card of the suit led; order is low to high."""
    cards = [card for _, card in trick]
    candidates = [c for c in cards if c in trumps] or [c for c in cards if c in lead_cards]
    ranking = list(trumps) if candidates[0] in trumps else order
    return trick[cards.index(max(candidates, key=ranking.index))][0]


def hearts_winner(trick):
    suited = [rank + trick[0][1][1] for rank in "23456789TJQKA"]
    return trick_winner(trick, suited, lead_cards=suited)


@pytest.mark.parametrize("config_id", range(8))
def test_hearts_scoring_and_tricks(config_id):
    jack_bonus, no_trick_bonus = bool(config_id & 2), bool(config_id & 4)
    text = rules("hearts", config_id)
    assert ("(JD)" in text, "no trick" in text) == (jack_bonus, no_trick_bonus)
    moons = 0
    for seed in range(100):
        *_, over = playthrough("hearts", config_id, seed)
        tricks = parse_tricks(str(over))
        assert tricks[0][0][1] == "2C"
        taken: dict[int, list[str]] = {p: [] for p in range(4)}
        for trick, after in zip(tricks, [*tricks[1:], None], strict=True):
            winner = hearts_winner(trick)
            assert after is None or after[0][0] == winner
            taken[winner] += [card for _, card in trick]
        points = [sum(13 if c == "QS" else c[1] == "H" for c in taken[p]) for p in range(4)]
        if 26 in points:
            moons += 1
            points = [0 if n == 26 else 26 for n in points]
        elif no_trick_bonus:
            points = [n if taken[p] else -5 for p, n in enumerate(points)]
        if jack_bonus:
            points = [n - 10 * ("JD" in taken[p]) for p, n in enumerate(points)]
        assert over.returns() == [26 - n for n in points]
        if 26 not in points:
            told = ", ".join(f"{SEATS[p]} {n}" for p, n in enumerate(points))
            assert prompts("hearts", over, 1)[0].endswith(f"Points in finished tricks: {told}")
    assert moons > 0


def test_hearts_may_be_led_only_when_broken_and_no_points_fall_in_the_first_trick():
    tried = 0
    for seed in range(40):
        for state in playthrough("hearts", 0, seed):
            if state.is_terminal() or "Tricks" not in (view := state.information_state_string(state.current_player())):
                continue
            tricks, seat = parse_tricks(view), state.current_player()
            hand = found("hand: (.*)", prompts("hearts", state, seat)[0]).split()
            legal = {state.action_to_string(seat, a) for a in state.legal_actions()}
            running = tricks[-1] if len(tricks[-1]) < 4 else []
            harmless = {c for c in hand if c[1] != "H" and c != "QS"}
            if running and any(c[1] == running[0][1][1] for c in hand):
                assert all(c[1] == running[0][1][1] for c in legal)
            elif running:
                assert legal == (harmless if len(tricks) == 1 and harmless else set(hand))
            else:
                broken = any(c[1] == "H" or c == "QS" for trick in tricks for _, c in trick)
                no_heart = {c for c in hand if c[1] != "H"}
                assert legal == (set(hand) if broken or not no_heart else no_heart)
            tried += 1
    assert tried > 1000


@pytest.mark.parametrize("config_id", range(8))
def test_hearts_pass_direction(config_id):
    """The direction is drawn at random for every configuration, also with pass_cards False; left of North is East."""
    start = load("hearts", config_id).new_initial_state()
    names = [start.action_to_string(-1, a) for a, _ in start.chance_outcomes()]
    assert names == ["No Pass", "Left", "Across", "Right"]
    for state in playthrough("hearts", config_id, seed=0):
        if "Received" in str(state):
            break
    shift = {"Left": 1, "Across": 2, "Right": 3}[found("Direction: (.*)", str(state))]
    view = str(state).split("Received")
    gave = {k: set(cards.split()) for k, cards in re.findall(r"^([NESW]): (.*)$", view[0], re.M)}
    got = {k: set(cards.split()) for k, cards in re.findall(r"^([NESW]): (.*)$", view[1].split("Tricks")[0], re.M)}
    assert all(got["NESW"[(i + shift) % 4]] == gave["NESW"[i]] for i in range(4))


@pytest.mark.parametrize("name", ["hearts", "euchre"])
def test_every_card_played_is_told_in_order(name):
    """The plays on the prompts are the players' moves of the history, apart from passed and discarded cards."""
    for seed in range(5):
        for state in playthrough(name, 0, seed):
            moves = [
                (m.player, state.action_to_string(m.player, m.action)) for m in state.full_history() if m.player >= 0
            ]
            tricks = parse_tricks(str(state))
            count = sum(map(len, tricks))
            played = moves[len(moves) - count :]
            for seat in [] if state.is_terminal() else range(4):
                full, compact = prompts(name, state, seat)
                lines = [line.partition(": ")[2] for line in full.splitlines() if line.startswith("Trick ")]
                assert ", ".join(lines) == ", ".join(f"{SEATS[p]} {card}" for p, card in played)
                assert re.sub(r"[0-3]:| ", "", compact.split("|")[-1]) == "".join(card for _, card in played)
    assert len(played) > 12


@pytest.mark.parametrize("config_id", range(4))
def test_euchre_rules(config_id):
    lone_defence, stick = bool(config_id & 1), bool(config_id & 2)
    text = rules("euchre", config_id)
    assert ("from the dealer's left, whether one of them defends alone" in text, "must name" in text) == (
        lone_defence, stick)  # fmt: skip
    kinds: Counter = Counter()
    for seed in range(400):
        rng = random.Random(seed)

        def mostly_pass(state, rng=rng):
            legal = state.legal_actions()
            return 24 if 24 in legal and rng.random() < 0.8 else rng.choice(legal)

        *_, over = playthrough("euchre", config_id, seed, mostly_pass)
        if over.declarer() < 0:
            assert over.returns() == [0, 0, 0, 0]
            kinds["passed out"] += 1
            continue
        if asked := [m.player for m in over.full_history() if m.action in (29, 30) and m.player != over.declarer()]:
            defenders = [p for p in ((over.dealer() + 1 + k) % 4 for k in range(4)) if (p - over.declarer()) % 2]
            assert asked == defenders[: len(asked)]
        suit = "CDHS"[over.trump_suit()]
        bowers = [{"C": "S", "S": "C", "D": "H", "H": "D"}[suit] + "J", suit + "J"]
        trumps = [suit + rank for rank in "9TQKA"] + bowers
        tricks, leader = parse_tricks(str(over)), None
        makers = [over.declarer(), (over.declarer() + 2) % 4]
        alone, defended = bool(over.declarer_go_alone()), over.lone_defender() in range(4)
        won = 0
        for trick in tricks:
            assert leader is None or trick[0][0] == leader
            led = trick[0][1]
            suited = [led[0] + rank for rank in "9TJQKA"] if led not in trumps else trumps
            leader = trick_winner(trick, [c for c in suited if c not in trumps], trumps, suited)
            won += leader in makers
        value = -(4 if defended else 2) if won < 3 else 1 if won < 5 else 4 if alone else 2
        assert over.returns() == [value if p in makers else -value for p in range(4)]
        assert len(tricks[0]) == 4 - alone - defended
        active = (p % 4 for p in range(over.dealer() + 1, over.dealer() + 5))
        players = {p for p, _ in tricks[0]}
        assert tricks[0][0][0] == next(p for p in active if p in players)
        kinds[value, alone, defended] += 1
        assert f"Trump: {BIDS[25 + over.trump_suit()]}\n" in prompts("euchre", over, 0)[0]
    assert (kinds["passed out"] == 0) == stick
    assert any(d for v, a, d in (k for k in kinds if isinstance(k, tuple))) == lone_defence
    assert len(kinds) >= 5


def test_euchre_names_and_dealer_pick_up():
    for state in playthrough("euchre", 0, seed=4, choose=lambda s: s.legal_actions()[-1]):
        if state.is_terminal():
            break
        seat, actions = state.current_player(), state.legal_actions()
        names = dict(zip(actions, (state.action_to_string(seat, a) for a in actions), strict=True))
        words = {24: "Pass", 25: "Clubs", 26: "Diamonds", 27: "Hearts", 28: "Spades", 29: "Alone", 30: "Partner"}
        assert all(name == words.get(a, name) for a, name in names.items())
        hand = found("hand: (.*)", prompts("euchre", state, seat)[0]).split()
        if actions[-1] < 24:
            assert set(names.values()) <= set(hand)
        if "DISCARD" in str(state.current_phase()):
            upcard = found("Upcard: (.*)", prompts("euchre", state, seat)[0])
            assert seat == state.dealer()
            assert len(hand) == 6
            assert upcard in hand


# --- gin rummy -----------------------------------------------------------------------------------------------------


def gin_value(card):
    return min(card % 13 + 1, 10)


def near(a, b):
    return a != b and (a % 13 == b % 13 or (a // 13 == b // 13 and abs(a - b) == 1))


def knocking(state):
    """Knock and lay melds when possible, else draw from the stock and keep low cards that are near each other."""
    legal, phase = state.legal_actions(), str(state.current_phase())
    forced = [a for a in legal if a >= 55] or ([a for a in legal if a < 52] if "LAYOFF" in phase else [])
    if forced:
        return forced[0]
    if "DISCARD" not in phase:
        return 53 if 53 in legal else legal[-1]
    hand = state.hands()[state.current_player()]
    return max(legal, key=lambda a: (not any(near(a, b) for b in hand), gin_value(a)))


@pytest.mark.parametrize("config_id", [pytest.param(c, marks=[pytest.mark.slow] * (c != 4)) for c in range(9)])
def test_gin_rummy_rules(config_id):
    params = load("gin_rummy", config_id).get_parameters()
    text = rules("gin_rummy", config_id)
    assert f"one hand of {params['hand_size']} cards" in text
    assert f"at most {params['knock_card']}:" in text
    kinds: Counter = Counter()
    for seed in range(150):
        for state in playthrough("gin_rummy", config_id, seed, knocking):
            if not state.is_terminal() and "DISCARD" in str(state.current_phase()):
                full = prompts("gin_rummy", state, state.current_player())[0]
                deadwood = int(found(r"deadwood after the best discard: (\d+)", full))
                assert (55 in state.legal_actions()) == (deadwood <= params["knock_card"])
        if not state.is_terminal():
            kinds["stuck"] += 1
            continue
        if True not in state.knocked():
            assert state.returns() == [0, 0]
            assert state.stock_size() == 2
            kinds["wall"] += 1
            continue
        knocker = state.knocked().index(True)
        own, other = state.deadwood()[knocker], state.deadwood()[1 - knocker]
        kind = "gin" if own == 0 else "undercut" if other < own else "knock"
        kinds[kind] += 1
        assert state.returns()[knocker] == other - own + {"gin": 25, "undercut": -25, "knock": 0}[kind]
    assert kinds["knock"] > 2
    assert kinds["wall"] > 2
    assert kinds["stuck"] == (config_id in (4, 5))  # all nine cards melded, so every discard breaks the knock


def test_gin_rummy_ids_and_values():
    state = load("gin_rummy").new_initial_state()
    names = [state.action_to_string(0, a).split(": ")[-1] for a in range(241)]
    assert names[:52] == [rank + suit for suit in "scdh" for rank in "A23456789TJQK"]
    assert names[52:56] == ["Draw upcard", "Draw stock", "Pass", "Knock"]
    assert all(6 <= len(name) <= 10 for name in names[56:])
    assert not any("KsAs" in name or "KcAc" in name for name in names)


def test_gin_rummy_ends_when_both_give_the_upcard_back():
    state = load("gin_rummy").new_initial_state()
    rng = random.Random(0)
    while not state.is_player_node():
        advance(state, rng)
    for action in (52, state.upcard(), 52, state.upcard(), 52, state.upcard()):
        if state.is_terminal():
            break
        state.apply_action(action)
    assert state.is_terminal()
    assert state.returns() == [0, 0]


def test_gin_rummy_prompt_tells_what_the_opponent_took():
    state = load("gin_rummy").new_initial_state()
    rng = random.Random(0)
    while not state.is_player_node():
        advance(state, rng)
    card = "A23456789TJQK"[state.upcard() % 13] + "scdh"[state.upcard() // 13]
    state.apply_action(52)
    full, compact = prompts("gin_rummy", state, 1)
    assert f"Opponent's known cards: {card}\n" in full
    assert full.endswith("Turns so far (draw, discard): opp upcard")
    assert compact.endswith(f"|{card}|||{card}-u")


def gin_rummy_of(knocker, defender, upcard):
    """Two hands as they are dealt, the first upcard, and the first seat to move."""
    state = load("gin_rummy").new_initial_state()
    card = {name: c for c, name in enumerate(rank + suit for suit in "scdh" for rank in "A23456789TJQK")}
    for name in (*knocker.split(), *defender.split(), upcard):
        state.apply_action(card[name])
    return state, card


def test_gin_rummy_says_what_is_laid_off_and_what_is_melded():
    """After gin nothing is laid off: a pass gives the melds away."""
    state, card = gin_rummy_of("As 2s 3s 4s Kc Kd 7h", "5s 2h 9c 9d 9h Ks 4d", "Kh")
    for action in (52, 55, card["7h"]):
        state.apply_action(action)
    melds = {state.action_to_string(0, a).split(": ")[-1]: a for a in state.legal_actions()}
    for meld in ("As2s3s4s", "KcKdKh"):
        state.apply_action(melds[meld])
    state.apply_action(54)
    full, compact = prompts("gin_rummy", state, 1)
    assert "Phase: lay your own melds, then pass, which ends the hand" in full
    assert compact.startswith("me|")
    state.apply_action(54)
    assert state.is_terminal()


def test_gin_rummy_says_when_laying_off_is_over():
    state, card = gin_rummy_of("As 2s 3s 4s 2d Kd 3h", "5s 2h 9c 9d 9h Ks 4d", "2c")
    for action in (52, 55, card["Kd"]):
        state.apply_action(action)
    melds = {state.action_to_string(0, a).split(": ")[-1]: a for a in state.legal_actions()}
    for action in (melds["As2s3s4s"], 54):
        state.apply_action(action)
    laying_off = prompts("gin_rummy", state, 1)
    assert "Phase: lay cards off on the knocker's melds, then pass\n" in laying_off[0]
    state.apply_action(54)
    melding = prompts("gin_rummy", state, 1)
    assert "Phase: lay your own melds, then pass, which ends the hand\n" in melding[0]
    assert (laying_off[1][:3], melding[1][:3]) == ("la|", "me|")


def test_gin_rummy_compact_tells_the_first_upcard():
    found = []
    for upcard in ("8c", "9c"):
        state, card = gin_rummy_of("As 2s 3s 4s Kc Kd 7h", "5s 2h 9s 9d 9h Ks 4d", upcard)
        for action in (54, 54, 53, card["Ah"]):
            state.apply_action(action)
        found.append(prompts("gin_rummy", state, 0)[1])
    assert found[0].replace("8c", "9c") == found[1] != found[0]


def test_gin_rummy_says_that_a_knock_at_the_wall_takes_the_upcard():
    walls = 0
    for seed in range(40):
        for state in playthrough("gin_rummy", 0, seed):
            if not state.is_terminal() and "WALL" in str(state.current_phase()):
                walls += 1
                assert "knock with the upcard, or pass" in prompts("gin_rummy", state, state.current_player())[0]
    assert walls


def gathers(state, rng):
    """Draws from the stock, keeps what melds, knocks at the wall alone and lays nothing off."""
    legal, seat = state.legal_actions(), state.current_player()
    phase = str(state.current_phase()).rpartition(".")[2]
    if phase == "DISCARD":
        return min((a for a in legal if a != 55), key=lambda a: (state.child(a).deadwood()[seat], a))
    wished = {"DRAW": 53, "WALL": 55, "KNOCK": max(legal)}.get(phase, 54)
    return wished if wished in legal else rng.choice(legal)


def test_after_a_knock_at_the_wall_the_deadwood_of_gin_rummy_is_that_of_the_cards():
    """The engine's is 0 for both seats there; who believes it passes with a hand full of melds."""
    game, rng = GAMES[NAMES.index("gin_rummy")], random.Random(0)
    value = {rank: min(n, 10) for n, rank in enumerate("A23456789TJQK", 1)}
    misled = set()
    for _ in range(20):
        state, at_the_wall = (
            pyspiel.load_game("gin_rummy", {"hand_size": 7, "knock_card": 10}).new_initial_state(),
            False,
        )
        while not state.is_terminal():
            if state.is_chance_node():
                state.apply_action(rng.choice(state.chance_outcomes())[0])
                continue
            seat = state.current_player()
            text, action = game.describe(state, seat), gathers(state, rng)
            if at_the_wall:
                held = sum(value[card[0]] for card in re.search(r"Your hand: ?(.*)", text)[1].split())
                assert f"Your deadwood (all cards not laid down): {held}\n" in text
                assert f"|{held}|" in game.compact(state, seat)
                misled |= {game.compact(state, seat)[:2]} if held != state.deadwood()[seat] else set()
            at_the_wall |= action == 55 and "the stock is used up" in text
            state.apply_action(action)
    assert misled == {"kn", "la", "me"}


def test_who_can_only_draw_from_the_stock_in_gin_rummy_is_not_offered_the_upcard():
    state = pyspiel.load_game("gin_rummy", {"hand_size": 7, "knock_card": 10}).new_initial_state()
    while state.is_chance_node():
        state.apply_action(state.chance_outcomes()[0][0])
    game = GAMES[NAMES.index("gin_rummy")]
    assert "Phase: take the first upcard or pass" in game.describe(state, state.current_player())
    for _ in range(2):
        state.apply_action(54)
    assert state.legal_actions() == [53]
    assert "Phase: draw" in game.describe(state, state.current_player())
    assert game.compact(state, state.current_player()).startswith("dr|")
