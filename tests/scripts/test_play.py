"""The episode loop: rounds, conversations, forced moves, halves of a batch, failures."""

import dataclasses
import random
import re
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from players import FunctionPlayer, random_player

import env_wrapper
import games
from env_wrapper import Action, EnvConfig, Sequence, Task, make_env, play
from envs import openspiel
from envs.openspiel import OpenSpielEnv

NAMES = list(games.NAMES)


def tasks_of(*specs):
    return [
        Task(NAMES.index(name) * games.CONFIGS_PER_GAME, seed, opponent, 100 + i)
        for i, (name, seed, opponent) in enumerate(specs)
    ]


def results(episodes):
    return [(e.task, e.game, e.score, e.outcome, e.info) for e in episodes]


def test_rounds_ask_all_running_games_and_return_them_in_task_order():
    tasks = tasks_of(("leduc_poker", 0, "random"), ("othello", 1, "random"), ("kuhn_poker", 2, "random"))
    player = random_player()
    episodes = play({}, player, tasks)
    assert [e.task for e in episodes] == tasks
    assert [e.game for e in episodes] == ["leduc_poker", "othello", "kuhn_poker"]
    assert player.calls[0] == [0, 1, 2]
    running = [set(call) for call in player.calls]
    assert all(later <= earlier for earlier, later in pairwise(running))
    assert all(call == sorted(set(call)) for call in player.calls)
    assert sorted(player.released) == [0, 1, 2]
    for e in episodes:
        asked = [query for query in player.queries if query.episode == e.task.index - 100]
        assert e.info["n_decisions"] == {e.info["seat"]: len(asked)}
        assert e.info["length"] == len(e.info["history"])
        assert e.score == e.info["scores"][e.info["seat"]]


def test_a_game_does_not_depend_on_its_neighbours():
    tasks = tasks_of(*((name, 3, "random") for name in ("hex_small", "backgammon", "goofspiel")))
    alone = [play({}, random_player(), [task])[0] for task in tasks]
    assert results(play({}, random_player(), tasks)) == results(alone)


def test_the_whole_conversation_grows_by_answer_and_next_state():
    player = random_player()
    play({"history_turns": "all"}, player, tasks_of(("hex_small", 1, "random")))
    for before, after in pairwise(player.queries):
        assert after.conversation[: len(before.conversation)] == before.conversation
        assert after.conversation[len(before.conversation)]["role"] == "assistant"
        assert after.conversation[-1]["role"] == "user"
        assert before.continues
    first = player.queries[0].conversation
    assert [m["role"] for m in first] == ["system", "user"]
    assert len(player.queries) > 2


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_history_turns_keeps_the_last_turns(turns):
    whole, part = random_player(), random_player()
    tasks = tasks_of(("hex_small", 1, "random"), ("leduc_poker", 0, "random"))
    play({"history_turns": "all"}, whole, tasks)
    play({"history_turns": turns}, part, tasks)
    for everything, query in zip(whole.queries, part.queries, strict=True):
        kept = everything.conversation[1:][-2 * turns - 1 :]
        assert query.conversation == [everything.conversation[0], *kept]
    past = [len(query.conversation) // 2 - 1 for query in part.queries]
    assert max(past) == turns
    assert [query.continues for query in part.queries] == [count < turns for count in past]


@pytest.mark.parametrize("default", [None, 0, 1])
def test_auto_history_is_the_games_default(monkeypatch, default):
    def changed(task_id, known=openspiel.table):
        found = known(task_id)
        return dataclasses.replace(found, game=dataclasses.replace(found.game, history_turns=default))

    monkeypatch.setattr(openspiel, "table", changed)
    player, expected = random_player(), random_player()
    play({}, player, tasks_of(("hex_small", 1, "random")))
    play({"history_turns": "all" if default is None else default}, expected, tasks_of(("hex_small", 1, "random")))
    assert player.queries == expected.queries


def test_a_retry_belongs_to_its_turn():
    player = FunctionPlayer(lambda query: "hm" if query.rng_key[2] == 1 and query.rng_key[3] < 3 else min(query.legal))
    [episode] = play({"history_turns": 0}, player, tasks_of(("hex_small", 1, "random")))
    second = [query for query in player.queries if query.rng_key[2] == 1]
    assert [query.rng_key for query in second] == [(100, 1, 1, attempt) for attempt in (1, 2, 3)]
    assert [m["role"] for m in second[2].conversation] == ["system"] + ["user", "assistant"] * 2 + ["user"]
    assert second[2].conversation[:2] == second[0].conversation
    assert "attempt 2 of 3" in second[2].conversation[-1]["content"]
    third = next(query for query in player.queries if query.rng_key[2] == 2)
    assert len(third.conversation) == 2
    assert (episode.outcome, episode.info["retries"]) == ("finished", 2)
    assert episode.info["n_decisions"] == {1: len(player.queries) - 2}


def test_a_forfeit_ends_the_episode_with_0():
    [episode] = play({}, FunctionPlayer(lambda query: "?"), tasks_of(("othello", 0, "random")))
    assert (episode.outcome, episode.score, episode.info["returns"]) == ("forfeited", 0.0, None)
    assert (episode.info["retries"], episode.info["n_decisions"]) == (2, {0: 1})


def test_random_streams_of_decisions_never_meet():
    player = random_player()
    play({}, player, tasks_of(("leduc_poker", 0, "self"), ("goofspiel", 1, "self"), ("hearts", 0, "self")))
    keys = [query.rng_key for query in player.queries]
    assert len(set(keys)) == len(keys)
    assert all(
        key[0] == 100 + query.episode and key[1] == query.seat for key, query in zip(keys, player.queries, strict=True)
    )


def test_forced_moves_are_played_and_told_but_not_asked():
    native, public = random_player(), random_player()
    tasks = tasks_of(("gin_rummy", 0, "random"))
    [episode] = play({"history_turns": "all"}, native, tasks)
    assert all(len(query.legal) > 1 for query in native.queries)
    turns = (len(native.queries[-1].conversation) - 2) // 2
    assert turns == len(native.queries) - 1 + episode.info["forced"]
    assert episode.info["forced"] > 0
    [asked] = play({"protocol": "affinetes"}, public, tasks)
    assert any(len(query.legal) == 1 for query in public.queries)
    assert asked.info["forced"] == 0


@pytest.mark.parametrize(("protocol", "kept"), [("affinetes", "{}"), ("native", "<think>0 or 1?</think>\n{}")])
def test_of_past_answers_the_public_protocol_keeps_what_follows_the_thinking(protocol, kept):
    player = FunctionPlayer(lambda query: f"<think>0 or 1?</think>\n{min(query.legal)}")
    play({"protocol": protocol, "history_turns": "all"}, player, tasks_of(("hex_small", 1, "random")))
    past = [message["content"] for message in player.queries[-1].conversation if message["role"] == "assistant"]
    assert past == [kept.format(min(query.legal)) for query in player.queries[:-1]]


def test_self_play_keeps_a_conversation_and_sequences_for_each_seat():
    sequences = {(0, 0): Sequence([0]), (0, 1): Sequence([1])}

    def choose(query):
        sequence = sequences[query.episode, query.seat]
        return Action(str(max(query.legal)), sequence=sequence, extends=query.rng_key[2] > 0)

    player = FunctionPlayer(choose)
    [episode] = play({}, player, tasks_of(("leduc_poker", 0, "self")))
    assert episode.sequences == {0: [sequences[0, 0]], 1: [sequences[0, 1]]}
    cards = {query.seat: query.conversation[1]["content"].split("\n")[1] for query in player.queries}
    for query in player.queries:
        assert query.conversation[1]["content"].split("\n")[1] == cards[query.seat]
    assert cards[0] != cards[1]
    assert set(episode.info["n_decisions"]) == {0, 1}


def test_sequences_are_collected_in_order_longer_ones_replace_and_never_from_earlier_adapters():
    made = []

    def choose(query):
        if query.adapter is None:
            made.append(Sequence([7]))  # equal, not identical
        sequence = made[-1] if query.adapter is None else Sequence([9])
        return Action(str(min(query.legal)), sequence=sequence, extends=query.adapter is None and len(made) == 2)

    [episode] = play({}, FunctionPlayer(choose), tasks_of(("hex_small", 1, "past:old")))
    assert list(episode.sequences) == [1]
    assert [id(s) for s in episode.sequences[1]] == [id(s) for s in made[1:]]
    assert len(made) > 2
    assert episode.info["n_decisions"] == {1: len(made)}


def test_a_prompt_that_no_longer_fits_truncates_the_episode():
    player = FunctionPlayer(lambda query: Action(str(min(query.legal)), truncated=query.rng_key[2] == 2))
    first, second = play({}, player, tasks_of(("othello", 0, "random"), ("kuhn_poker", 0, "random")))
    assert (first.outcome, first.score, first.info["returns"]) == ("truncated", 0.0, None)
    assert first.info["n_decisions"] == {0: 3}
    assert second.outcome == "finished"
    assert sorted(player.released) == [0, 1]


class BrokenEnv(OpenSpielEnv):
    """Fails where the task's index says."""

    kind: type[BaseException] = OSError

    def reset(self, task):
        self.where = {100: "reset", 101: "step", 102: "close"}.get(task.index)
        self._fail("reset")
        return super().reset(task)

    def step(self, text):
        self._fail("step")
        return super().step(text)

    def close(self):
        over = hasattr(self, "_table") and self._state is None
        super().close()
        if over:
            self._fail("close")

    def _fail(self, where):
        if getattr(self, "where", None) == where:
            raise self.kind(f"no {where}")


@pytest.mark.parametrize(("opponent", "kind"), [("random", OSError), ("mcts:5x1", OSError), ("mcts:5x1", SystemExit)])
def test_a_failing_environment_costs_its_own_episode_only(monkeypatch, opponent, kind):
    monkeypatch.setattr(BrokenEnv, "kind", kind)
    tasks = tasks_of(*(("hex_small", 3, opponent) for _ in range(5)))
    sound = play({}, random_player(), tasks)
    monkeypatch.setattr(env_wrapper, "make_env", BrokenEnv)
    player = random_player()
    episodes = play({}, player, tasks)
    for episode, where in zip(episodes[:3], ("reset", "step", "close"), strict=True):
        assert (episode.outcome, episode.score, list(episode.info)) == ("failed", 0.0, ["error"])
        assert re.fullmatch(rf"{kind.__name__}: no {where} \(test_play.py:\d+\)", episode.info["error"])
    assert results(episodes[3:]) == results(sound[3:])
    assert sorted(player.released) == [0, 1, 2, 3, 4]


def test_the_place_of_a_failure_is_outside_the_libraries(monkeypatch):
    def reset(self, task):
        Path("/nowhere/at/all").read_text()

    monkeypatch.setattr(OpenSpielEnv, "reset", reset)
    [episode] = play({}, random_player(), tasks_of(("hex_small", 3, "random")))
    assert re.search(r"FileNotFoundError: .* \(test_play.py:\d+\)$", episode.info["error"])


def test_bad_tasks_fail_alone_but_bad_opponents_stop_the_play():
    failed, sound = play({}, random_player(), [Task(-5, 0), Task(0, 0)])
    assert failed.outcome == "failed"
    assert failed.info["error"].startswith("ValueError: task_id -5 is out of range")
    assert sound.outcome == "finished"
    with pytest.raises(ValueError, match="opponent 'nobody'"):
        play({}, random_player(), [Task(0, 0), Task(0, 0, "nobody")])


def test_the_players_errors_are_not_the_environments():
    closed = []

    class CountingEnv(OpenSpielEnv):
        def close(self):
            closed.append(self)
            super().close()

    def fail(query):
        raise KeyError("player")

    before = threading.active_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env_wrapper, "make_env", CountingEnv)
        with pytest.raises(KeyError):
            play({}, FunctionPlayer(fail), tasks_of(*(("hex_small", 0, "mcts:5x1") for _ in range(4))))
    assert len(set(closed)) == 4
    until = time.monotonic() + 10  # nobody waits for their searches, which end all the same
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.05)
    assert threading.active_count() == before


def test_every_query_needs_one_answer():
    class Silent:
        def act(self, queries):
            return []

    with pytest.raises(ValueError, match="0 of 2 queries"):
        play({}, Silent(), tasks_of(("hex", 0, "random"), ("hex", 1, "random")))


SEARCHED = [
    ("hex_small", 0, "mcts:30x2"), ("leduc_poker", 1, "mcts:30x2"), ("othello", 2, "random"), ("euchre", 3, "mcts:5x1"),
    ("kuhn_poker", 4, "ismcts:20x1"), ("connect_four", 5, "mcts:20x1"), ("liars_dice", 6, "ismcts:10x1"),
]  # fmt: skip


def test_thread_count_changes_neither_games_nor_batches(monkeypatch):
    players, played = [random_player() for _ in range(4)], []
    for threads, player in zip((1, 2, 2, 7), players, strict=True):
        monkeypatch.setattr("os.cpu_count", lambda threads=threads: threads)
        played.append(results(play(EnvConfig(), player, tasks_of(*SEARCHED))))
    assert played[0] == played[1] == played[2] == played[3]
    assert {outcome for _, _, _, outcome, _ in played[0]} == {"finished"}
    for player in players[1:]:
        assert player.calls == players[0].calls
        assert player.queries == players[0].queries


def test_with_search_two_fixed_halves_alternate():
    player = random_player()
    play({}, player, tasks_of(*SEARCHED))
    assert player.calls[0] == [0, 2, 4, 6]
    assert player.calls[1] == [1, 3, 5]
    assert all(len({episode % 2 for episode in call}) == 1 for call in player.calls)
    alone = random_player()
    play({}, alone, tasks_of(SEARCHED[2]))
    assert [q.rng_key[1:] for q in alone.queries] == [q.rng_key[1:] for q in player.queries if q.episode == 2]


def test_one_half_searches_while_the_player_answers_the_other(monkeypatch):
    stepping, acting = threading.Event(), threading.Event()
    met = []

    class MeetingEnv(OpenSpielEnv):
        def step(self, text):
            stepping.set()
            met.append(acting.wait(timeout=5))
            return super().step(text)

    def choose(query):
        if query.episode == 1:
            acting.set()
            met.append(stepping.wait(timeout=5))
        return min(query.legal)

    monkeypatch.setattr(env_wrapper, "make_env", MeetingEnv)
    play({}, FunctionPlayer(choose), tasks_of(("hex_small", 0, "mcts:2x1"), ("hex_small", 1, "mcts:2x1")))
    assert len(met) > 4
    assert all(met)


def test_nothing_to_play():
    assert play({}, random_player(), []) == []


def test_unknown_keys_and_values_are_one_line():
    cases: list[tuple[dict, str]] = [
        ({"env_typ": "openspiel"}, "env.env_typ .*nearest is env.env_type"),
        ({"env_type": "atari"}, 'env.env_type = "atari".*"openspiel", "trace"'),
        ({"prompt": "long"}, 'env.prompt = "long".*"full", "compact"'),
        ({"history_turns": -1}, "env.history_turns = -1.*integer >= 0"),
        ({"history_turns": True}, 'history_turns = true: expected one of "auto", "all" or an integer'),
        ({"games_at_once": -1}, "games_at_once = -1.*>= 0"),
        ({"games_at_once": 1.5}, "games_at_once = 1.5: expected an integer"),
    ]
    for config, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            make_env(config)
        assert "\n" not in str(error.value)
    for values in ({"prompt": "long"}, {"history_turns": -1}, {"history_turns": "x"}, {"games_at_once": -1}):
        with pytest.raises(ValueError, match=f"env.{next(iter(values))} = .*: expected"):
            EnvConfig(**values)
    assert isinstance(make_env(EnvConfig()), OpenSpielEnv)
    assert dataclasses.asdict(EnvConfig())["history_turns"] == "auto"


def test_global_generators_are_left_alone():
    random.seed(5)
    before = random.getstate()
    play({}, FunctionPlayer(lambda query: min(query.legal)), tasks_of(("backgammon", 0, "mcts:2x1")))
    assert random.getstate() == before
