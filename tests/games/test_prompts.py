"""Parameters and prompts of every game: present, complete, the same in both styles, and nothing hidden in them."""

import itertools
import re
from collections import defaultdict

import pytest
from games_support import acting, load, playthrough, prompts, rules

CONFIGS = {
    "goofspiel": 5, "liars_dice": 1, "leduc_poker": 1, "gin_rummy": 9, "othello": 1, "backgammon": 1, "hex": 4,
    "clobber": 3, "hearts": 8, "euchre": 4, "dots_and_boxes": 3, "kuhn_poker": 1, "tic_tac_toe": 1,
    "connect_four": 1, "liars_dice_small": 2, "goofspiel_small": 3, "hex_small": 2, "go": 2, "chess": 1, "checkers": 1,
    "quoridor": 4, "blackjack": 1, "phantom_ttt": 2, "2048": 1, "solitaire": 1, "bridge": 3, "amazons": 3, "oware": 3,
}  # fmt: skip
BOARD_GAMES = ("othello", "backgammon", "clobber", "dots_and_boxes", "tic_tac_toe", "connect_four", "hex", "hex_small")


# --- every decision has a prompt -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "config_id"), [(name, c) for name, n in CONFIGS.items() for c in range(n)])
def test_every_decision_can_be_described(name, config_id):
    text, styles = rules(name, config_id), set()
    assert 100 < len(text) < 2500
    assert "{" not in text
    assert max(map(len, text.splitlines())) < 700
    for state in itertools.islice(playthrough(name, config_id, seed=config_id), 150):
        for seat in [] if state.is_terminal() else acting(state):
            full, compact = prompts(name, state, seat)
            assert 0 < len(compact) <= len(full) < 8000
            assert all(line.strip() for line in full.splitlines() if name not in ("dots_and_boxes", "bridge"))
            styles.add((seat, full, compact))
    assert len(styles) == len({row[:2] for row in styles}) == len({row[::2] for row in styles})  # they tell the same


@pytest.mark.parametrize("name", BOARD_GAMES)
def test_board_determines_the_legal_moves(name):
    """Same prompt, same seat: same position, so the same legal moves; tried on positions of many games."""
    seen: dict = {}
    for seed in range(15):
        for state in playthrough(name, seed=seed):
            if not state.is_terminal():
                seat = state.current_player()
                for prompt in prompts(name, state, seat):
                    assert seen.setdefault((seat, prompt), state.legal_actions()) == state.legal_actions()
    assert len(seen) > 100


# --- information states -----------------------------------------------------------------------------------------


def decision_states(game):
    """Yield every state of the game in which somebody decides."""
    stack = [game.new_initial_state()]
    while stack:
        state = stack.pop()
        if state.is_terminal():
            continue
        if state.is_simultaneous_node():
            yield state
            for a in state.legal_actions(0):
                for b in state.legal_actions(1):
                    stack.append(state.clone())
                    stack[-1].apply_actions([a, b])
            continue
        if not state.is_chance_node():
            yield state
        stack.extend(state.child(a) for a in state.legal_actions())


@pytest.mark.parametrize(
    ("name", "count"), [("kuhn_poker", 12), ("leduc_poker", 936), ("liars_dice_small", 24576), ("goofspiel_small", 162)]
)
def test_prompt_and_information_state_are_one_to_one(name, count):
    """Both ways, in both styles: nothing hidden is shown and nothing known is left out."""
    to_prompt: dict = {}
    to_view: dict = {}
    for state in decision_states(load(name)):
        for seat in acting(state):
            view = (seat, state.information_state_string(seat))
            full, compact = prompts(name, state, seat)
            assert to_prompt.setdefault(view, (full, compact)) == (full, compact)
            assert to_view.setdefault((seat, "full", full), view) == view
            assert to_view.setdefault((seat, "compact", compact), view) == view
    assert len(to_prompt) == count
    assert len(to_view) == 2 * count


def swapped(state, game, first, second):
    """Replay the game with two cards exchanged in the chance outcomes; None if that makes the play impossible."""
    swap = {first: second, second: first}
    copy = game.new_initial_state()
    for action in state.history():
        deals_card = copy.is_chance_node() and len(copy.legal_actions()) > 4
        action = swap.get(action, action) if deals_card else action
        if action not in copy.legal_actions():
            return None
        copy.apply_action(action)
    return copy


def unseen_pairs(name, state, seat):
    """Yield pairs of unplayed cards that ``seat`` cannot tell apart and whose exchange leaves the play legal."""
    if name == "gin_rummy":
        own, opponent = state.hands()[seat], state.hands()[1 - seat]
        known = {*state.known_cards()[1 - seat], *own, *state.discard_pile(), state.upcard()}
        stock = [c for c in range(52) if c not in known and c not in opponent]
        drawn = {item.action for item in state.full_history() if item.player == -1}
        yield from ((a, b) for a in opponent if a not in known for b in stock if b not in drawn)
        return
    dealt = [item.action for item in state.full_history() if item.player == -1 and item.action < 52]
    shown = {item.action for item in state.full_history() if item.player != -1}
    hands: dict[int, list[int]] = {p: [] for p in range(4)}
    jacks = set() if name == "hearts" else {8, 9, 10, 11}  # a jack may change suit
    if name == "hearts":
        for i, card in enumerate(dealt[1:]):
            hands[i % 4].append(card)
    else:
        hands = {p: [c for c in range(24) if state.card_holder()[c] == p] for p in range(4)}
        shown |= {state.upcard()}
    others = [(p, c) for p in range(4) if p != seat for c in hands[p] if c not in shown]
    yield from ((a, b) for p, a in others for q, b in others if p < q and a % 4 == b % 4 and not jacks & {a, b})


def test_euchre_dealer_sees_the_own_discard_and_nobody_else_does():
    found = 0
    for seed in range(20):
        for state in playthrough("euchre", 2, seed):
            if state.is_terminal() or state.discard() < 0:
                continue
            card = "CDHS"[state.discard() % 4] + "9TJQKA"[state.discard() // 4]
            for seat in range(4):
                full, compact = prompts("euchre", state, seat)
                assert (f"You discarded {card}" in full) == (seat == state.dealer())
                assert (card in full) == (card in compact) == (seat == state.dealer())
            found += 1
    assert found > 50


@pytest.mark.parametrize(
    ("name", "config_id", "games"), [("phantom_ttt", 0, 300), ("phantom_ttt", 1, 300), ("blackjack", 0, 300)]
)
def test_prompt_and_information_state_determine_each_other(name, config_id, games):
    texts, infos, worlds = defaultdict(set), defaultdict(set), defaultdict(set)
    for seed in range(games):
        for state in playthrough(name, config_id, seed):
            if (seat := state.current_player()) < 0:
                continue
            info = (seat, state.information_state_string(seat))
            for text in prompts(name, state, seat):
                texts[info].add(text)
                infos[seat, text].add(info)
            worlds[info].add(str(state))
    assert max(map(len, texts.values())) == 2
    assert max(map(len, infos.values())) == 1
    assert name == "blackjack" or max(map(len, worlds.values())) > 3


def test_solitaire_shows_only_cards_turned_up():
    for state in itertools.islice(playthrough("solitaire", seed=1), 60):
        revealed = {a for a in state.history() if 1 <= a <= 52}
        known = {"A23456789TJQK"[(a - 1) % 13] + "♠♥♣♦"[(a - 1) // 13] for a in revealed}
        text = prompts("solitaire", state, 0)[0]
        shown = set(re.findall(r"[A2-9TJQK][♠♥♣♦]", text))
        tops = set(re.findall(r"[A2-9TJQK][♠♥♣♦]", text.splitlines()[1]))
        assert shown <= known
        assert text.count("##") - 1 == 52 - len(revealed)
        below = sum("A23456789TJQK".index(top[0]) for top in tops)
        assert len(shown) + below == len(known)
