"""scripts/play.py with a scripted person: what is shown, what is asked, what is played, what is refused."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyspiel
import pytest
from tiny_runs import STEPS, undisturbed_run

import games
from env_wrapper import Action, EnvConfig, Episode, Query, Task
from envs.openspiel import move_name, table
from evaluation.measure import game_sets
from evaluation.players import Contestant, Roster
from scripts import play

ROOT = Path(play.__file__).parents[1]


@pytest.fixture(scope="module")
def checkpoint():
    """Of a run on kuhn_poker and leduc_poker with compact prompts."""
    return str(undisturbed_run() / "run" / f"checkpoint-{STEPS:06d}")


@pytest.fixture
def person(monkeypatch):
    """Type these lines, then close the input."""

    def types(*lines):
        answers = iter(lines)

        def ask(prompt):
            print(prompt, end="")
            try:
                return next(answers)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", ask)
        return answers

    return types


def task_of(name):
    [[(first, _)]] = game_sets([f"{name}#0"]).values()
    return first


class FirstLegal:
    """Answers with the first legal action, and keeps the questions."""

    def __init__(self):
        self.queries = []

    def act(self, queries):
        self.queries += queries
        return [Action(str(next(iter(query.legal)))) for query in queries]


# ---------------------------------------------------------------------------------------------------------- a game


def test_a_whole_game_is_drawn_played_and_told(person, capsys):
    person("4", "3", "5")
    opponent = Contestant("first", {}, EnvConfig(prompt="compact"), FirstLegal())
    episode = play.play_one(opponent, Task(task_of("tic_tac_toe"), 0, opponent.opponent))
    shown = capsys.readouterr().out
    assert [move for _, move in episode.info["history"]] == [4, 0, 3, 1, 5]
    assert (episode.score, episode.outcome) == (1.0, "finished")
    assert "0 . . .\n1 . . .\n2 . . ." in shown
    assert "0 o . .\n1 . x .\n2 . . ." in shown
    assert "   4  x(1,1)" in shown
    assert "oo.\nxxx\n..." in play.ending(episode)
    assert "you win: score 1.000" in play.ending(episode)
    assert "Legal Actions" not in shown


@pytest.mark.parametrize(("answer", "told"), [
    (Action("no"), "the game was not decided: the opponent gave no legal answer"),
    (Action("", truncated=True), "the game was not decided: the opponent has no room for the conversation any more"),
])  # fmt: skip
def test_a_game_that_the_opponent_leaves_is_no_draw(person, answer, told):
    class Leaving:
        def act(self, queries):
            return [answer for _ in queries]

    person("4")
    opponent = Contestant("leaving", {}, EnvConfig(answer_mode="free"), Leaving())
    episode = play.play_one(opponent, Task(task_of("tic_tac_toe"), 0, opponent.opponent))
    assert "x" in play.ending(episode)
    assert play.ending(episode).endswith(told)


def test_the_model_is_asked_as_it_was_taught_and_the_person_sees_the_board(person, capsys):
    person("4", "2", "q")
    model = FirstLegal()
    opponent = Contestant("first", {}, EnvConfig(prompt="compact", history_turns=0), model)
    with pytest.raises(EOFError):
        play.play_one(opponent, Task(task_of("tic_tac_toe"), 1, opponent.opponent))
    assert [len(query.conversation) for query in model.queries] == [2, 2, 2]
    assert model.queries[0].conversation[0]["content"] == "tic_tac_toe"
    assert "0 x . .\n1 . . .\n2 . . ." in capsys.readouterr().out
    assert {query.seat for query in model.queries} == {0}


def test_illegal_answers_are_asked_again_and_never_played(person, capsys):
    person("44", "o(0,0)", "", "-1", "4", "q")
    opponent = Contestant("first", {}, EnvConfig(), FirstLegal())
    with pytest.raises(EOFError):
        play.play_one(opponent, Task(task_of("tic_tac_toe"), 0, opponent.opponent))
    shown = capsys.readouterr().out
    assert shown.count("is none of the legal actions, numbers or names: 0, 1, 2, 3, 4, 5, 6, 7, 8") == 4
    assert "0 o . .\n1 . x .\n2 . . ." in shown


@pytest.mark.parametrize(
    ("text", "action"),
    [("4", 4), ("x(1,1)", 4), ("X(1, 1)", 4), ("o(1,1)", None), ("", None), ("draw", None), ("nf6", 1),
     ("Bxc4", 2), ("bxc4", 3), ("BXC4", None), ("24/18 24/20", 5), ("7", 0), ("13/11", 6), ("d4", 9),
     ("B d4", 9), ("pass", 12), ("bid: 14", 13)],
)  # fmt: skip
def test_moves_can_be_named_in_whatever_case_that_leaves_one(text, action):
    legal = {
        4: "x(1,1)",
        1: "Nf6",
        2: "Bxc4",
        3: "bxc4",
        5: "5 - 24/18 24/20",
        7: "8",
        0: "7",
        6: "6 - 13/11",
        8: "8 - 13/11",
        9: "B d4",
        10: "Player: 0 Draw",
        11: "Player: 1 Draw",
        12: "Player: 0 Pass",
        13: "[P0]Bid: 14",
    }
    assert play.meant(text, legal) == (7 if text == "7" else action)  # a number is an action's id, not a name


def test_forced_moves_are_played_and_the_two_tables_stay_together(person, capsys):
    person("4", "1", "3", "8")  # the ninth stone, which wins, is nobody's choice
    opponent = Contestant("first", {}, EnvConfig(prompt="compact"), FirstLegal())
    episode = play.play_one(opponent, Task(task_of("tic_tac_toe"), 0, opponent.opponent))
    assert [move for _, move in episode.info["history"]] == [4, 0, 1, 2, 3, 5, 8, 6, 7]
    assert capsys.readouterr().out.count("your move") == 4
    assert episode.score == 1.0


def test_the_person_sees_the_position_that_is_asked_about_after_forced_moves_too(monkeypatch, capsys):
    asked, real = [], play.Person.act

    def noting(self, queries):
        asked.append(queries[0].conversation[-1]["content"])
        return real(self, queries)

    monkeypatch.setattr(play.Person, "act", noting)
    monkeypatch.setattr(play, "_ask", lambda prompt: asked[-1].partition("Legal Actions:\n")[2].partition(" ->")[0])
    opponent = Contestant("first", {}, EnvConfig(), FirstLegal())
    episode = play.play_one(opponent, Task(task_of("checkers"), 0, opponent.opponent))
    assert episode.outcome == "finished"
    assert episode.info["forced"] > 0
    assert len(asked) > 10
    shown = capsys.readouterr().out
    assert all(text.removeprefix("Current State:\n").partition("\nLegal")[0] in shown for text in asked)


def test_both_bid_at_once_and_unseen(person, capsys):
    person("3", "0", "1")
    opponent = Contestant("first", {}, EnvConfig(prompt="compact"), FirstLegal())
    episode = play.play_one(opponent, Task(task_of("goofspiel_small"), 1, opponent.opponent))
    bids = [(seat, move) for seat, move in episode.info["history"] if seat >= 0]
    assert bids == [(0, 0), (1, 3), (0, 1), (1, 0), (0, 2), (1, 1)]
    assert "Round 1: prize 4, your bid 4, you won" in capsys.readouterr().out
    assert "Points: you 4, opponent 6\nRound 1: prize 4, your bid 4, you won" in play.ending(episode)
    assert "With nothing hidden:\n" in play.ending(episode)


@pytest.mark.parametrize(("name", "told"), [
    ("goofspiel", "Points: you "), ("liars_dice", "Bids so far: you 1-1, opponent "), ("blackjack", "(total "),
])  # fmt: skip
def test_the_end_of_a_game_is_told_in_its_words(name, told):
    task = Task(task_of(name), 0, "random")
    [episode] = play.play(EnvConfig(), FirstLegal(), [task])
    end = play.ending(episode)
    assert told in end
    assert end.index(told) < end.index("With nothing hidden:") < end.index("score ")


def test_hidden_cards_stay_hidden_until_the_end(person, capsys):
    person("1", "1", "1", "1")
    opponent = Contestant("first", {}, EnvConfig(), FirstLegal())
    episode = play.play_one(opponent, Task(task_of("kuhn_poker"), 0, opponent.opponent))
    shown = capsys.readouterr().out
    own, other = (move for seat, move in episode.info["history"] if seat == -1)
    names = ("Jack", "Queen", "King")
    assert names[own] in shown
    assert names[other] not in shown
    assert f"Dealt, to Player 0 first: {names[own]}, {names[other]}" in play.ending(episode)


def test_a_file_that_does_not_know_the_end_keeps_nobody_from_hearing_who_won(person, monkeypatch):
    person("1", "1", "1", "1")
    opponent = Contestant("first", {}, EnvConfig(), FirstLegal())
    episode = play.play_one(opponent, Task(task_of("kuhn_poker"), 0, opponent.opponent))
    own = replace(games.GAMES[games.NAMES.index("kuhn_poker")], dealt=lambda card: "JQ"[card - 3])
    monkeypatch.setattr(play, "table", lambda task_id: replace(table(task_id), game=own))
    assert "you were player 0" in play.ending(episode)
    state = table(task_of("kuhn_poker")).spiel.new_initial_state()
    assert move_name(own, state, -1, 0) == "Deal:0"


def test_who_wins_at_a_table_of_three_is_told_by_what_they_won(monkeypatch):
    three = pyspiel.load_game("leduc_poker", {"players": 3}).new_initial_state()
    monkeypatch.setattr(play, "position", lambda task_id, history: three)
    info = {"history": [], "seat": 0, "returns": [2.0, -1.0, -1.0]}
    task = Task(task_of("leduc_poker"), 0)
    told = play.ending(Episode(task, "leduc_poker", score=15 / 39, outcome="finished", info=info))
    assert "you win: score 0.385" in told


def test_a_paid_out_pot_is_not_shown_as_chips_put_in(person, capsys):
    person(*["1"] * 8)
    opponent = Contestant("first", {}, EnvConfig(), FirstLegal())
    episode = play.play_one(opponent, Task(task_of("leduc_poker"), 0, opponent.opponent))
    assert "Chips put in: you 1, opponent 1; pot 2" in capsys.readouterr().out
    assert "Chips" not in play.ending(episode)
    assert "Round 1 betting: " in play.ending(episode)


@pytest.mark.parametrize("seat", [0, 1])
def test_a_bot_can_be_played_against_in_either_seat(person, seat, capsys):
    person(*[str(square) for _ in range(5) for square in range(9)])
    code = play.main(["--opponent", "mcts:20x1", "--game", "tic_tac_toe", "--seat", str(seat), "--seed", "3"])
    shown = capsys.readouterr().out
    assert code == 0
    assert f"you were player {seat}" in shown
    assert f"You are Player {seat}." in shown


def test_the_models_opinion_is_its_probabilities(person, checkpoint, capsys):
    person("?", "q")
    assert play.main(["--checkpoint", checkpoint, "--game", "leduc_poker", "--seed", "2"]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines() if "%" in line]
    opinion = {int(action): float(share.rstrip("%")) for action, share, *_ in lines}
    assert sum(opinion.values()) == pytest.approx(100, abs=0.2)
    assert list(opinion.values()) == sorted(opinion.values(), reverse=True)
    contestant = Roster([], [], 0, False, None).contestant(checkpoint)
    seen: list[Query] = []

    class Spy(FirstLegal):
        def act(self, queries):
            seen.extend(queries)
            raise EOFError

    from env_wrapper import play as play_tasks
    from evaluation.players import Seats

    tasks = [Task(task_of("leduc_poker"), 4, contestant.opponent)]
    with pytest.raises(EOFError):
        play_tasks(contestant.env, Seats(Spy(), {contestant.label: contestant.player}), tasks)
    [probs] = contestant.player.action_probs(seen)
    assert opinion == pytest.approx({action: 100 * p for action, p in probs.items()}, abs=0.06)


def test_a_bot_has_no_opinion(person, capsys):
    person("?")
    assert play.main(["--opponent", "random"]) == 0
    assert "no probabilities to show" in capsys.readouterr().out


def test_a_position_that_does_not_fit_has_no_opinion(person, capsys):
    class Short(FirstLegal):
        def action_probs(self, queries):
            raise play.PromptTooLongError

    person("?", *["1"] * 3)
    opponent = Contestant("first", {}, EnvConfig(), Short())
    play.play_one(opponent, Task(task_of("kuhn_poker"), 0, opponent.opponent))
    assert "does not fit into what the model may read" in capsys.readouterr().out


def test_many_actions_leave_the_position_on_the_screen(person, capsys, monkeypatch):
    """The 49 actions of hex, a line each, moved the board out of a terminal of 24 lines."""

    class Even(FirstLegal):
        def action_probs(self, queries):
            return [{action: 1 / len(query.legal) for action in query.legal} for query in queries]

    monkeypatch.setenv("COLUMNS", "80")
    person("?")
    opponent = Contestant("first", {}, EnvConfig(), Even())
    [(first, _)] = game_sets(["hex#1"])["hex#1"]
    with pytest.raises(EOFError):
        play.play_one(opponent, Task(first, 0, opponent.opponent))
    position, opinion = capsys.readouterr().out.split("quit): ")[:2]
    assert len(position.splitlines()) < 24
    assert max(map(len, position.splitlines())) <= 80
    assert "\n     0  a1     1  b1" in position
    assert position.rstrip().endswith("48  g7\nyour move (? for the model's opinion, q to")
    _, *lines, others = opinion.splitlines()[: play.MOST_LINES + 2]
    assert lines[:2] == ["     0    2.0%  a1", "     1    2.0%  b1"]
    assert others == "         81.6%  the other 40"


def test_the_seed_is_the_deal(person, capsys):
    deals = []
    for seed in ("0", "0", "1", "2", "3"):
        person("q")
        play.main(["--opponent", "random", "--game", "hearts", "--seed", seed])
        deals.append(capsys.readouterr().out)
    assert deals[0] == deals[1]
    assert len(set(deals)) == 4


def test_without_a_seed_each_game_is_another_and_can_be_played_again(person, capsys):
    def dealt(*more):
        person("q")
        assert play.main(["--opponent", "random", "--game", "hearts", *more]) == 0
        return capsys.readouterr().out

    first, second = dealt(), dealt()
    assert first != second
    seed = re.match(r"--seed (\d+) is this deal\n", first)[1]
    assert dealt("--seed", seed) == first


def test_it_works_with_piped_input():
    command = [sys.executable, str(ROOT / "scripts" / "play.py"), "--opponent", "random", "--game", "kuhn_poker"]
    done = subprocess.run(command, input="1\n1\n1\n", capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "you were player 0" in done.stdout
    assert done.stderr == ""


# -------------------------------------------------------------------------------------------------------- bad commands


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--checkpoint", "nowhere"], "nowhere: no such directory"),
        (["--checkpoint", "nowhere", "--game", "nim"], "nowhere: no such directory"),  # nor are its games of one's own
        (["--opponent", "mcts:x"], "opponent 'mcts:x' is not known"),
        ([], "nobody to play with: expected --checkpoint RUN, --opponent mcts:200x1 or --model NAME (its base)"),
        (["--opponent", "random", "--greedy"], "random: a bot has no such settings: leave out --greedy, --set but"),
        (["--opponent", "mcts", "--set", "ppo.temperature=2"], "mcts: a bot has no such settings: leave out --greedy"),
        (["--opponent", "random", "--model", "models/tiny"], "--model models/tiny: base is not among the players"),
        (["--opponent", "random", "--game", "ches"], "--game: game 'ches' is not known"),
        (["--checkpoint", "nowhere", "--opponent", "random"], "--opponent: not allowed with argument --checkpoint"),
        (["--run", "nowhere", "--opponent", "random"], "--opponent: not allowed with argument --checkpoint"),
        (["--opponent", "random", "--seat", "2"], "invalid choice: 2"),
        (["--opponent", "random", "--seat", "1", "--game", "2048"], "error: --seat: 2048 has one player, in seat 0"),
        (["--opponent", "random", "--seed", "-1"], "--seed: -1: expected at least 0"),
        (["--opponent", "ismcts", "--game", "phantom_ttt"], "ismcts cannot play phantom_ttt"),
        (["--opponent", "perfect", "--game", "connect_four"], "opponent perfect cannot play connect_four: "),
    ],
)
def test_a_bad_command_is_told_in_one_line(args, message, capsys):
    code: object
    try:
        code = play.main(args)
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error.splitlines()[-1]


def test_every_game_can_be_opened(person, capsys):
    for name in games.NAMES:
        person("q")
        one = ["--game", f"{name}#0", "--seed", "0"]  # in some deals of euchre North is never asked: 853910
        assert play.main(["--opponent", "random", *one]) == 0, name
        assert "your move" in capsys.readouterr().out, name


def test_programs_are_no_games_to_play(capsys):
    assert play.main(["--opponent", "random", "--set", "env.env_type=trace", "env.answer_mode=free"]) == 2
    assert capsys.readouterr().err == "error: random: was trained on env_type trace, and this plays games\n"
