"""Parity with the public environment's evaluate path: parameters, scores, parsers and whole games."""

import gzip
import json
import random
import re
from pathlib import Path

import pyspiel
import pytest
from players import random_player, scripted_player

import games
from env_wrapper import Task, parse_action, play
from envs.openspiel import load_game, score

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name):
    path = GOLDEN / name
    return json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())


def matched(rows, mismatches, number):
    """All rows match, and as many as were recorded: none is lost on the way here."""
    assert not mismatches, mismatches[:5]
    assert len(rows) == number


def test_params():
    rows = [row for row in golden("params.json")["rows"] if not row["load_error"]]

    def ours(row):
        game, params = games.decode_task_id(row["task_id"])
        spiel = load_game(row["task_id"])
        shape = (spiel.num_players(), spiel.num_distinct_actions(), spiel.min_utility(), spiel.max_utility())
        return game.name, params, str(spiel), *shape

    keys = ("game_name", "params", "game_str", "num_players", "num_distinct_actions", "min_utility", "max_utility")
    matched(rows, [row for row in rows if ours(row) != tuple(row[key] for key in keys)], 408)


def test_mcts_searches_as_much_as_there():
    """Simulations and rollouts of each, 0 where it plays at random, in the order of the games."""
    budgets = """0 3000x200 3000x200 500x10 1000x20 600x15 1000x50 1500x100 500x50 1000x100 1200x100 300x30 200x20
        500x50 800x80 0 3000x150 0 0 200x30 200x20 300x30"""
    ours = ["{}x{}".format(*game.mcts) if game.mcts else "0" for game in games.GAMES[:22]]
    assert ours == budgets.split()


def test_games_that_the_public_environment_cannot_load_are_the_intended_ones():
    rows = [row for row in golden("params.json")["rows"] if row["load_error"]]

    def intended(row):
        if row["game_name"] == "oware":
            return "oware", {"num_seeds_per_house": row["params"]["seeds_per_house"]}
        if "is_chicago" in row["params"]:
            return "bridge", {"use_double_dummy_result": False}
        return "bridge", {"dealer_vul": True, "non_dealer_vul": True}

    def ours(row):
        load_game(row["task_id"])
        game, params = games.decode_task_id(row["task_id"])
        return game.name, params

    matched(rows, [row for row in rows if ours(row) != intended(row)], 32)


def test_task_ids_never_wrap_around():
    edges = golden("params.json")["decode_edge"]
    for row in edges:
        task_id = row["task_id"]
        if not 0 <= task_id < len(games.GAMES) * games.CONFIGS_PER_GAME:
            with pytest.raises(ValueError, match=str(task_id)):
                load_game(task_id)
        else:
            same_game = games.decode_task_id(task_id)[0].name == row["game_name"]
            assert same_game == (row["game_idx"] < 22), task_id
    assert sum(row["task_id"] >= len(games.GAMES) * games.CONFIGS_PER_GAME for row in edges) >= 2


def test_scoring():
    rows = [row for row in golden("scoring.json")["rows"] if "game_str" in row]
    load = {text: pyspiel.load_game(text) for text in {row["game_str"] for row in rows}}
    ours = [score(load[row["game_str"]], row["returns"], row["player"]) for row in rows]
    matched(rows, [(row, s) for row, s in zip(rows, ours, strict=True) if s != row["score"]], 445)
    assert all((s > 0.5) == row["success"] for row, s in zip(rows, ours, strict=True))


@pytest.mark.parametrize("protocol", ["affinetes", "affinetes_step"])
def test_parser(protocol):
    data = golden("parser.json")
    contexts = {name: dict(map(tuple, c["action_strings"])) for name, c in data["contexts"].items()}

    def matches(row):
        text = row["response"]
        if row["response_repeat"]:
            text = row["response_repeat"][0] * row["response_repeat"][1]
        expected = row["llmbot_after_think_strip"]["action"] if protocol == "affinetes" else row["reset_step"]
        return parse_action(text, contexts[row["ctx"]], protocol) == expected

    matched(data["rows"], [row for row in data["rows"] if not matches(row)], 672)


def public_rules(text, legal):
    """The public parser, rule by rule as it is described (docs/compatibility.md), without regard to time."""
    text = text.strip()
    for tag in ("think", "thinking"):  # complete blocks, in any case
        text = re.sub(f"<{tag}>.*?</{tag}>", "", text, flags=re.DOTALL | re.IGNORECASE)
    for tag in ("</think>", "</thinking>"):  # stray closing tags, in lower case
        text = text.split(tag)[-1]
    for tag in ("<think>", "<thinking>"):  # unclosed ones, in any case
        text = re.split(tag, text, flags=re.IGNORECASE)[0]
    text = text.strip()
    if re.search(r"^\s*\d+\s*$", text):
        return int(text) if len(text) <= 4300 and int(text) in legal else None
    for action in sorted(legal):
        if re.search(rf"\b{action}\b", text):
            return action
    names = {}
    for action, name in legal.items():
        names[name.lower()] = action
        if squeezed := re.sub("[^a-z0-9]", "", name.lower()):
            names[squeezed] = action
    for name, action in names.items():
        squeezed = re.sub("[^a-z0-9]", "", name)
        if name in text.lower() or (squeezed and squeezed in re.sub("[^a-z0-9]", "", text.lower())):
            return action
    return None


WORDS = [
    "I play", "not", "because", "3.5", "-", "١", "²", "½", "K", "İ", "ſ", "\u00a0", "\n\n\n", ".", ":", "♠", "→",
    "1", "99999",
]  # fmt: skip
TAGS = [
    "<think>", "</think>", "<thinking>", "</thinking>", "<Think>", "</Think>", "<THINKING>", "</THINKING>",
    "<thinK>", "< think>",
]  # fmt: skip


def generated_answer(rng, legal):
    """A legal id or name, whole, squeezed, spaced oddly or in another case, among words and tags."""

    def piece():
        action, name = rng.choice(list(legal.items()))
        spaced = name.replace(" ", rng.choice(["", "  ", "\n", "-"]))
        squeezed = re.sub("[^A-Za-z0-9]", "", name)
        names = (name, squeezed, spaced, " ".join(name), name.upper(), name.lower(), name[:-1])
        kinds = (*names, str(action), f"0{action}", f"{action}.", f"x{action}")
        return rng.choice(kinds) if rng.random() < 0.6 else rng.choice(WORDS + TAGS * 2)

    return rng.choice(["", " ", "  "]).join(piece() for _ in range(rng.choice([1, 1, 2, 3, 5, 8])))


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_generated_answers_are_read_by_the_public_rules(count):
    rng, player = random.Random(count), random_player()
    tasks = [Task(index * games.CONFIGS_PER_GAME, 1, "random", index) for index in range(len(games.GAMES))]
    play({}, player, tasks)
    known = [[query.legal for query in player.queries if query.episode == i] for i in range(len(tasks))]
    positions = [rng.choice(known[number % len(known)]) for number in range(count)]
    answers = [(generated_answer(rng, legal), legal) for legal in positions]
    matched(answers, [a for a in answers if parse_action(*a) != public_rules(*a)], count)
    assert len({public_rules(*a) for a in answers}) > 100


@pytest.fixture(scope="module")
def evaluated():
    """(golden row, our episode, our player's queries) of each evaluate trajectory."""
    rows = golden("trajectories_evaluate.json.gz")["rows"]
    tasks = [Task(row["task_id"], row["seed"], row["opponent"], i) for i, row in enumerate(rows)]
    player = scripted_player(tasks)
    episodes = play({"protocol": "affinetes"}, player, tasks)
    queries = [[query for query in player.queries if query.episode == i] for i in range(len(rows))]
    return list(zip(rows, episodes, queries, strict=True))


def test_trajectories(evaluated):
    def matches(row, episode, queries):
        info = episode.info
        played = (episode.outcome, episode.game, info["seat"], info["history"], info["returns"], episode.score)
        spiel = row["task_name"].removeprefix("openspiel:")
        expected = ("finished", spiel, row["seat"], row["full_history"], row["all_returns"], row["score"])
        legal = [list(query.legal) for query in queries]
        return played == expected and legal == [decision["legal"] for decision in row["decisions"]]

    sound = [triple for triple in evaluated if not triple[0]["error"]]
    matched(sound, [triple[0]["task_id"] for triple in sound if not matches(*triple)], 61)


def test_the_conversation_has_the_public_form(evaluated):
    for row, _, queries in evaluated:
        if not row["error"]:
            roles = [[message["role"] for message in query.conversation] for query in queries]
            if games.decode_task_id(row["task_id"])[0].history_turns is None:
                assert [len(r) for r in roles] == [decision["n_messages"] for decision in row["decisions"]]
            assert all(r[0] == "system" and r[1:] == (["user", "assistant"] * len(r))[: len(r) - 1] for r in roles)


def test_trajectories_on_which_the_public_environment_raises_are_played(evaluated):
    broken = [(row, episode) for row, episode, _ in evaluated if row["error"]]
    matched(broken, [row for row, episode in broken if episode.outcome != "finished"], 5)
    for row, episode in broken:
        assert (row["game_name"] == "unknown") or episode.game == row["game_name"]
        started = row.get("full_history") or []
        assert episode.info["history"][: len(started)] == started
        assert episode.info["seat"] == row["seat"] if row.get("seat") is not None else True
