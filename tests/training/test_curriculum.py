"""What is played next: stages, the success window, the failure buffer, and seeds that evaluation never shares."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import curriculum as curriculum_module
import games
from curriculum import EVAL_SEEDS, TRAIN_SEEDS, Curriculum, CurriculumConfig, Stage, eval_tasks, pool
from env_wrapper import Task
from utils import ConfigError

SIZE = games.CONFIGS_PER_GAME
LEDUC, HEX, KUHN = (games.NAMES.index(name) for name in ("leduc_poker", "hex", "kuhn_poker"))


def one_stage(**options):
    return CurriculumConfig([Stage("only", options.pop("games", ["leduc_poker"]))], **options)


def two_stages(first, **options):
    return CurriculumConfig([first, Stage("last", ["hex"], "mcts")], **options)


def task(index, game=LEDUC, opponent="random", config_id=None):
    return Task(game * SIZE + (index if config_id is None else config_id), 1000 + index, opponent, index)


def seed_of(drawn):
    assert drawn.seed is not None
    return drawn.seed


def feed(curriculum, outcomes, start=0, **where):
    for i, outcome in enumerate(outcomes, start):
        curriculum.update(task(i, **where), float(outcome))


def run(curriculum, indices, step=8):
    """Draw and play as the trainer does: all tasks of a step first, then all results in the same order."""
    drawn = []
    for first in range(indices.start, indices.stop, step):
        tasks = [curriculum.next(i) for i in range(first, first + step)]
        for t in tasks:
            curriculum.update(t, random.Random(f"{t.task_id} {t.seed} {t.index}").choice([0.0, 0.5, 0.7, 1.0]))
        drawn += tasks
    return drawn


# -------------------------------------------------------------------------------------------------------------- drawing


def test_next_changes_nothing_and_depends_on_seed_and_index_alone():
    config = one_stage(games=["leduc_poker", "hex"])
    a, b = Curriculum(config, 1), Curriculum(config, 1)
    before = json.dumps(a.state_dict())
    forwards = [a.next(i) for i in range(50)]
    assert [b.next(i) for i in reversed(range(50))] == forwards[::-1]
    assert json.dumps(a.state_dict()) == before
    assert [Curriculum(config, 2).next(i) for i in range(50)] != forwards


def test_tasks_come_from_the_stage_in_equal_shares_of_games():
    ranges = [(HEX * SIZE + 1, HEX * SIZE + 3), (KUHN * SIZE, KUHN * SIZE)]
    curriculum = Curriculum(one_stage(games=["leduc_poker", *ranges]), 0)
    drawn = Counter(curriculum.next(i).task_id for i in range(9000))
    by_game: Counter[int] = Counter()
    for task_id, count in drawn.items():
        by_game[task_id // SIZE] += count
    assert set(by_game) == {LEDUC, HEX, KUHN}
    assert all(abs(count - 3000) < 5 * 45 for count in by_game.values())
    assert {task_id for task_id in drawn if task_id // SIZE == HEX} == {HEX * SIZE + c for c in (1, 2, 3)}
    assert all(abs(drawn[HEX * SIZE + c] - 1000) < 5 * 30 for c in (1, 2, 3))
    assert len(drawn) > 2900  # the tasks of a named game are all of its ids


def test_games_follow_their_weights():
    stage = Stage("mixed", {"leduc_poker": 3, "hex#1": 0.5, "hex#2-3": 0.5, "kuhn_poker": 1})
    curriculum = Curriculum(CurriculumConfig([stage]), 0)
    tasks = [curriculum.next(i).task_id for i in range(5000)]
    drawn, hexes = (
        Counter(task // SIZE for task in tasks),
        Counter(task % SIZE for task in tasks if task // SIZE == HEX),
    )
    expected = {LEDUC: 3000, HEX: 1000, KUHN: 1000}
    assert drawn.keys() == expected.keys()
    assert all(abs(drawn[game] - count) < 5 * 35 for game, count in expected.items())
    assert all(abs(hexes[config] - count) < 5 * 22 for config, count in ((1, 500), (2, 250), (3, 250)))


def test_opponents_follow_their_weights():
    stage = Stage("mixed", ["leduc_poker"], {"random": 3, "mcts:50x1": 1}, gate_opponent="random")
    curriculum = Curriculum(CurriculumConfig([stage]), 0)
    drawn = Counter(curriculum.next(i).opponent for i in range(4000))
    assert set(drawn) == {"random", "mcts:50x1"}
    assert abs(drawn["random"] - 3000) < 5 * 28


def test_a_range_may_span_games():
    assert pool([(SIZE - 1, 2 * SIZE)]) == {
        0: [(SIZE - 1, SIZE - 1)], 1: [(SIZE, 2 * SIZE - 1)], 2: [(2 * SIZE, 2 * SIZE)],
    }  # fmt: skip


def test_a_number_that_could_be_meant_for_a_game_is_told_once_to_be_a_task(caplog):
    curriculum_module._tell_task.cache_clear()
    for _ in range(2):
        assert pool(["23", "0", "28", "23-40", "hex#23"])[0] == [(23, 23), (0, 0), (28, 28), (23, 40)]
    assert caplog.messages == ["23 is the task goofspiel#23; game 23 is tic_tac_toe"]


def test_training_never_draws_a_seed_of_the_evaluation():
    assert TRAIN_SEEDS.stop <= EVAL_SEEDS.start
    assert EVAL_SEEDS.stop < 2**32
    for replay_seed in ("same", "fresh"):
        curriculum = Curriculum(one_stage(replay_seed=replay_seed, failure_replay_prob=0.9), 0)
        drawn = run(curriculum, range(8000))
        assert all(t.seed in TRAIN_SEEDS for t in drawn)
        assert max(t.seed for t in drawn) > 0.99 * TRAIN_SEEDS.stop  # the whole range is used, both seats alike
    odd = [seed_of(Curriculum(one_stage(), 0).next(i)) % 2 for i in range(1000)]
    assert abs(sum(odd) - 500) < 5 * 16


@pytest.mark.slow
def test_training_never_draws_a_seed_of_the_evaluation_in_a_million_draws(monkeypatch):
    monkeypatch.setattr(curriculum_module, "BUFFER_SIZE", 10)
    curriculum = Curriculum(one_stage(), 0)
    assert all(t.seed in TRAIN_SEEDS for t in run(curriculum, range(1_000_000)))


def test_evaluation_tasks_are_pairs_that_cover_both_seats():
    tasks = eval_tasks(["leduc_poker", (HEX * SIZE, HEX * SIZE + 1)], 200, seed=5, opponent="mcts")
    assert len(tasks) == 800
    assert len({(t.task_id // SIZE, t.seed) for t in tasks}) == 800
    assert [t.index for t in tasks] == list(range(800))
    for even, odd in zip(tasks[::2], tasks[1::2], strict=True):
        assert (even.task_id, seed_of(even) + 1) == (odd.task_id, odd.seed)
        assert seed_of(even) % 2 == 0
        assert even.seed in EVAL_SEEDS
        assert odd.seed in EVAL_SEEDS
    assert tasks[400:] != tasks[:400]
    key = [(t.task_id, t.seed) for t in tasks]
    assert [(t.task_id, t.seed) for t in eval_tasks([(HEX * SIZE, HEX * SIZE + 1)], 200, 5)] == key[400:]
    assert [(t.task_id, t.seed) for t in eval_tasks(["leduc_poker"], 200, 6)] != key[:400]


def test_configurations_of_a_game_and_levels_of_programs_have_draws_of_their_own():
    """Of a file of 100 programs, whose rows are task ids modulo 100, each level asked the same ones."""
    levels = [eval_tasks([(start, start + 9_999_999)], 20, 0) for start in (0, 10_000_000, 20_000_000)]
    rows = [tuple(t.task_id % 100 for t in tasks) for tasks in levels]
    assert len({*rows}) == 3
    boards = [tuple(seed_of(t) for t in eval_tasks([(HEX * SIZE + c, HEX * SIZE + c)], 20, 0)) for c in range(3)]
    assert len({*boards}) == 3


def test_evaluation_repeats_no_deal(monkeypatch):
    monkeypatch.setattr(curriculum_module, "EVAL_SEEDS", range(2**31, 2**31 + 8))
    assert sorted(seed_of(t) - 2**31 for t in eval_tasks(["hex"], 4, seed=0)) == list(range(8))


# --------------------------------------------------------------------------------------------------------------- stages


def test_a_stage_is_left_at_its_threshold_over_a_full_window_and_the_window_is_cleared():
    curriculum = Curriculum(two_stages(Stage("first", ["leduc_poker"], threshold=0.6)), 0)
    feed(curriculum, [1] * 59 + [0] * 40)
    assert (curriculum.stage.name, len(curriculum._window)) == ("first", 99)
    reason = curriculum.update(task(99), 1.0)
    assert (curriculum.stage.name, len(curriculum._window), curriculum.success_rate) == ("last", 0, 0.0)
    assert reason == "success of the game won least 0.60, threshold 0.6, after 100 games"


def test_one_success_too_few_does_not_leave_the_stage():
    curriculum = Curriculum(two_stages(Stage("first", ["leduc_poker"], threshold=0.6)), 0)
    feed(curriculum, [1] * 59 + [0] * 41)
    assert curriculum.stage.name == "first"
    assert curriculum.success_rate == curriculum.gate_rate == 0.59


def test_the_window_rolls():
    curriculum = Curriculum(one_stage(), 0)
    feed(curriculum, [0] * 100 + [1] * 70)
    assert (len(curriculum._window), curriculum.success_rate) == (100, 0.7)


def test_what_was_drawn_before_a_change_of_stage_does_not_count_for_the_next():
    """Levels of programs share a game's index: 128 programs of level 0 in one step would pass three stages at once."""
    levels = [Stage(f"level {k}", [(HEX * SIZE + 10 * k, HEX * SIZE + 10 * k + 9)], min_episodes=20) for k in range(4)]
    curriculum = Curriculum(CurriculumConfig(levels), 0)
    step = [curriculum.next(i) for i in range(128)]
    changes = [reason for t in step if (reason := curriculum.update(t, 1.0))]
    assert (len(changes), curriculum.stage.name) == (1, "level 1")
    assert curriculum.state_dict()["episodes"] == 0
    assert curriculum.rates == {"window_success": None, "gate_success": None}  # not 0: nobody has lost there


def test_nor_does_it_where_the_next_has_the_same_games():
    mixed = Stage("mixed", ["leduc_poker"], {"random": 1, "mcts:10x1": 1}, "random", threshold=0.7)
    stages = [Stage("easy", ["leduc_poker"]), mixed, Stage("hard", ["leduc_poker"], "mcts:10x1")]
    curriculum = Curriculum(CurriculumConfig(stages), 0)
    drawn_in, step = curriculum.stage, [curriculum.next(i) for i in range(256)]
    changes = [reason for t in step if (reason := curriculum.update(t, 1.0, drawn_in))]
    assert (len(changes), curriculum.stage.name) == (1, "mixed")


def test_what_is_lost_after_a_change_of_stage_is_remembered_as_the_stage_it_was_drawn_in_counts():
    mixed = Stage("mixed", ["leduc_poker"], {"random": 1, "mcts:10x1": 1}, "random", min_episodes=5)
    curriculum = Curriculum(CurriculumConfig([mixed, Stage("hard", ["leduc_poker"], "mcts:10x1")]), 0)
    drawn_in, step = curriculum.stage, [curriculum.next(i) for i in range(64)]
    for t in step:
        curriculum.update(t, float(curriculum.stage is drawn_in), drawn_in)
    assert curriculum.stage.name == "hard"
    assert curriculum.buffer_size == sum(t.opponent == "random" for t in step) - 5
    assert {entry[2] for entry in curriculum.state_dict()["failure_buffer"]} == {"random"}
    again = Curriculum(curriculum.config, 0)
    again.load_state_dict(curriculum.state_dict())
    assert again.state_dict() == curriculum.state_dict()


def test_min_episodes_counts_games_and_not_the_window():
    curriculum = Curriculum(two_stages(Stage("first", ["leduc_poker"], min_episodes=150)), 0)
    feed(curriculum, [1] * 149)
    assert curriculum.stage.name == "first"
    feed(curriculum, [1], start=149)
    assert curriculum.stage.name == "last"


def test_each_stage_counts_its_own_games():
    stages = [Stage(name, ["leduc_poker"], min_episodes=10) for name in ("a", "b", "c")]
    curriculum = Curriculum(CurriculumConfig(stages), 0)
    feed(curriculum, [1] * 19)
    assert curriculum.stage.name == "b"
    assert curriculum.update(task(19), 1.0).endswith("after 10 games")
    assert curriculum.stage.name == "c"


def test_the_last_stage_has_no_ceiling():
    curriculum = Curriculum(one_stage(), 0)
    feed(curriculum, [1] * 500)
    assert (curriculum.stage.name, curriculum.success_rate) == ("only", 1.0)


def test_a_draw_is_not_a_success():
    curriculum = Curriculum(one_stage(), 0)
    feed(curriculum, [0.5, 0.51])
    assert (curriculum.success_rate, curriculum.buffer_size) == (0.5, 1)


def test_one_easy_game_and_one_hard_game():
    config = two_stages(Stage("first", ["leduc_poker", "kuhn_poker"], threshold=0.6))
    curriculum = Curriculum(config, 0)
    for i in range(0, 98, 2):
        feed(curriculum, [1], start=i)
        feed(curriculum, [i < 60], start=i + 1, game=KUHN)
    assert (curriculum.success_rate, curriculum.gate_rate) == (79 / 98, 30 / 49)
    feed(curriculum, [1, 0], start=98, game=KUHN)
    assert curriculum.stage.name == "last"  # both games are at the threshold
    curriculum = Curriculum(config, 0)
    for i in range(0, 100, 2):
        feed(curriculum, [1], start=i)
        feed(curriculum, [i < 20], start=i + 1, game=KUHN)
    assert curriculum.stage.name == "first"  # 1.0 and 0.2


def test_many_games_of_an_easy_game_do_not_outvote_few_of_a_hard_one():
    config = two_stages(Stage("first", ["leduc_poker", "kuhn_poker"], threshold=0.6))
    curriculum = Curriculum(config, 0)
    feed(curriculum, [1] * 200)
    assert (curriculum.stage.name, curriculum.success_rate) == ("first", 1.0)  # the other was not played at all
    feed(curriculum, [0] * 10, start=200, game=KUHN)
    assert (curriculum.stage.name, curriculum.gate_rate) == ("first", 0.0)


@pytest.mark.parametrize(("won", "passes"), [(0.1, False), (1.0, True)])
def test_a_stage_is_not_left_on_a_lucky_game_of_a_rare_kind(won, passes):
    first = Stage("first", {"tic_tac_toe": 99, "hex_small": 1}, "random", threshold=0.6, min_episodes=20)
    for seed in range(10):
        curriculum = Curriculum(CurriculumConfig([first, Stage("second", ["hex"], "random")]), seed)
        rng, rare = random.Random(seed), games.NAMES.index("hex_small")
        for i in range(2000):
            task = curriculum.next(i)
            rate = won if task.task_id // games.CONFIGS_PER_GAME == rare else 0.9
            curriculum.update(task, float(rng.random() < rate))
        assert (curriculum.stage.name == "second") == passes
    rarest = Curriculum(one_stage(games={"tic_tac_toe": 1e9, "hex_small": 1e-9}), 0)
    assert rarest._window.maxlen == curriculum_module.LONGEST, "of a kind that never comes"


def test_only_games_against_the_gate_opponent_count():
    stage = Stage("first", ["leduc_poker"], {"random": 1, "self": 1, "mcts": 1, "past": 1}, gate_opponent="random")
    curriculum = Curriculum(two_stages(stage), 0)
    for opponent in ("self", "past", "past:checkpoint-000100", "mcts"):
        feed(curriculum, [1, 0] * 100, opponent=opponent)
    assert (len(curriculum._window), curriculum.buffer_size) == (0, 0)
    feed(curriculum, [1, 0], start=500)
    assert (len(curriculum._window), curriculum.buffer_size) == (2, 1)


def test_self_play_alone_never_counts():
    curriculum = Curriculum(CurriculumConfig([Stage("only", ["leduc_poker"], "self")]), 0)
    feed(curriculum, [1, 0] * 100, opponent="self")
    assert (len(curriculum._window), curriculum.buffer_size) == (0, 0)


# ------------------------------------------------------------------------------------------------------- failure buffer


def replays(curriculum, indices):
    stored = {(key[0], key[2]) for key in curriculum._buffer}
    return [t for t in map(curriculum.next, indices) if (t.task_id, t.opponent) in stored]


def test_failures_return_in_the_stated_share_as_the_very_same_task():
    curriculum = Curriculum(one_stage(), 0)
    feed(curriculum, [0, 1, 0.5])
    assert curriculum.buffer_size == 2
    again = replays(curriculum, range(10_000, 20_000))
    assert {(t.task_id, t.seed) for t in again} == {(LEDUC * SIZE, 1000), (LEDUC * SIZE + 2, 1002)}
    assert abs(len(again) - 3000) < 5 * 46
    lost = sum(t.task_id == LEDUC * SIZE for t in again)
    assert abs(lost / len(again) - 1 / 1.5) < 0.05  # priority 1 - score: 1 for the loss, 0.5 for the draw


def test_fresh_seeds_replay_the_task_with_another_deal():
    curriculum = Curriculum(one_stage(replay_seed="fresh"), 0)
    feed(curriculum, [0])
    again = replays(curriculum, range(1000, 2000))
    assert {t.task_id for t in again} == {LEDUC * SIZE}
    assert len({t.seed for t in again}) == len(again) > 200
    curriculum.update(again[0], 1.0)
    curriculum.update(again[1], 1.0)
    assert curriculum.buffer_size == 0


@pytest.mark.parametrize(("before", "after"), [("same", "fresh"), ("fresh", "same")])
def test_failures_are_found_again_by_a_run_that_goes_on_with_other_replays(before, after):
    first, then = (Curriculum(one_stage(replay_seed=kind), 0) for kind in (before, after))
    feed(first, [0, 0])
    then.load_state_dict(first.state_dict())
    assert then.buffer_size == 2
    for t in replays(then, range(1000, 1100)):
        then.update(t, 1.0)
    assert then.buffer_size == 0


def test_two_successes_in_a_row_leave_the_buffer():
    curriculum = Curriculum(one_stage(), 0)
    for score, size in [(0.0, 1), (1.0, 1), (0.5, 1), (1.0, 1), (1.0, 0), (1.0, 0)]:
        curriculum.update(task(0), score)
        assert curriculum.buffer_size == size


def test_a_task_that_was_won_once_is_drawn_as_often_as_before():
    curriculum = Curriculum(one_stage(), 0)
    feed(curriculum, [0, 0])
    curriculum.update(task(0), 1.0)
    again = Counter(t.seed for t in replays(curriculum, range(100, 2100)))
    assert abs(again[1000] - again[1001]) < 5 * 25


def test_the_oldest_failure_makes_room(monkeypatch):
    monkeypatch.setattr(curriculum_module, "BUFFER_SIZE", 3)
    curriculum = Curriculum(one_stage(), 0)
    feed(curriculum, [0] * 5)
    assert [key[0] - LEDUC * SIZE for key in curriculum._buffer] == [2, 3, 4]


def test_replays_do_not_feed_the_window():
    curriculum = Curriculum(one_stage(), 0)
    feed(curriculum, [0, 0])
    again = replays(curriculum, range(100, 200))
    for t in again:
        curriculum.update(t, 0.0)
    assert len(again) > 10
    assert (len(curriculum._window), curriculum.buffer_size) == (2, 2)
    fresh = next(t for t in map(curriculum.next, range(200, 300)) if t.seed not in (1000, 1001))
    curriculum.update(fresh, 1.0)
    assert len(curriculum._window) == 3


def test_what_was_drawn_afresh_counts_although_the_same_task_was_lost_meanwhile():
    """All of a step is drawn before any of it is told; here every draw is of one task."""
    stage = Stage("only", [[LEDUC * SIZE, LEDUC * SIZE]])
    curriculum = Curriculum(CurriculumConfig(stages=(stage,), failure_replay_prob=0.5, replay_seed="fresh"), 0)
    drawn = [curriculum.next(i) for i in range(64)]
    for t in drawn:
        curriculum.update(t, 0.0)
    assert len(curriculum._window) == 64
    again = [curriculum.next(i) for i in range(64, 128)]
    for t in again:
        curriculum.update(t, 1.0)  # the entry is forgiven after two of them
    assert len(curriculum._window) == min(100, 64 + sum(not t.replay for t in again))
    assert 10 < sum(t.replay for t in again) < 54


def test_replays_of_an_earlier_stage_can_still_leave_the_buffer():
    curriculum = Curriculum(two_stages(Stage("first", ["leduc_poker"], threshold=0.5, min_episodes=4)), 0)
    feed(curriculum, [0, 1, 1, 1])
    assert (curriculum.stage.name, curriculum.buffer_size) == ("last", 1)
    for t in replays(curriculum, range(100, 200))[:2]:
        curriculum.update(t, 1.0)
    assert (curriculum.buffer_size, len(curriculum._window)) == (0, 0)


def test_failures_of_an_earlier_stage_start_the_count_anew():
    curriculum = Curriculum(two_stages(Stage("first", ["leduc_poker"], threshold=0.5, min_episodes=4)), 0)
    feed(curriculum, [0, 1, 1, 1])
    for score, size in [(1.0, 1), (0.0, 1), (1.0, 1), (1.0, 0)]:
        curriculum.update(task(0), score)
        assert curriculum.buffer_size == size


# --------------------------------------------------------------------------------------------------------- learnability


def test_learnability_prefers_games_that_are_neither_won_nor_lost():
    config = one_stage(games=["leduc_poker", "hex", "kuhn_poker"], sampling="learnability", failure_replay_prob=0.0)
    curriculum = Curriculum(config, 0)
    feed(curriculum, [1] * 200, game=LEDUC)
    feed(curriculum, [0] * 200, game=HEX)
    feed(curriculum, [1, 0] * 100, game=KUHN)
    drawn = Counter(curriculum.next(i).task_id // SIZE for i in range(7000))
    assert abs(drawn[KUHN] - 5000) < 5 * 38  # p(1-p) = 0.25 against the floor of 0.05 twice
    assert abs(drawn[LEDUC] - 1000) < 5 * 30
    assert abs(drawn[HEX] - 1000) < 5 * 30


def test_the_window_holds_enough_of_a_game_that_is_always_won():
    """Of nine games, of which it was drawn a fifth as often as the others, two or three were too few to be passed."""
    curriculum = Curriculum(one_stage(games=games.NAMES[:9], sampling="learnability", failure_replay_prob=0.0), 0)
    held = []
    for i in range(2000):
        drawn = curriculum.next(i)
        curriculum.update(drawn, float(drawn.task_id // SIZE == LEDUC or i % 2))
        held.append(curriculum._window.count((LEDUC, 1)))
    assert sum(held[1000:]) / 1000 >= curriculum_module.GATE_GAMES


@pytest.mark.parametrize("env_type", ["openspiel", "trace"])
def test_programs_announce_the_stage_alone(env_type):
    """Levels are the generator's: those of a source of one's own have none."""
    told = Curriculum(one_stage(games=[(0, 9_999_999)]), 0).announcement(env_type)
    assert told == "Stage 1/1, only" + ": goofspiel against random" * (env_type == "openspiel")


def test_games_that_are_always_cut_off_are_drawn_no_more_than_those_that_are_learnt():
    """Nobody learns from them: they were drawn five times as often as games that are won."""
    played = ["leduc_poker", "hex", "kuhn_poker"]
    curriculum = Curriculum(one_stage(games=played, sampling="learnability", failure_replay_prob=0.0), 0)
    drawn = Counter[int]()
    for index in range(4000):
        game = (fresh := curriculum.next(index)).task_id // SIZE
        drawn[game] += index >= 2000
        assert curriculum.update(fresh, None if game == HEX else 1.0) is None
    assert max(drawn.values()) < 1.4 * min(drawn.values())
    assert curriculum.buffer_size == 0
    assert curriculum.rates["window_success"] == 1.0


def test_replays_do_not_teach_learnability():
    """They are of games that were lost, so a game would look harder than it is."""
    curriculum = Curriculum(one_stage(games=["kuhn_poker", "hex"], sampling="learnability"), 0)
    before = dict(curriculum._rates)
    for index in range(200):
        curriculum.update(replace(curriculum.next(index), replay=True), 0.0)
    assert curriculum._rates == before


def test_a_rate_and_a_past_selfs_score_move_a_little_with_each_game():
    """By a twentieth and a hundredth: with few games between two of its draws, more would be noise."""
    curriculum = with_past([0.5], failure_replay_prob=0.0)
    [name] = curriculum.past
    before = curriculum.past[name]
    curriculum.update(task(0, opponent=f"past:{name}"), 1.0)
    assert curriculum.past[name] == pytest.approx(before + 0.01 * (1 - before))
    fresh = Curriculum(one_stage(), 0)
    fresh.update(task(0), 1.0)
    assert fresh._rates[LEDUC, "random"] == pytest.approx(0.525)
    fresh.update(task(0), 0.5)  # no success, whatever chips it brought
    assert fresh._rates[LEDUC, "random"] == pytest.approx(0.525 * 0.95)


def test_games_against_any_past_self_teach_learnability_one_rate():
    stage = Stage("only", ["leduc_poker", "hex"], "past")
    curriculum = Curriculum(CurriculumConfig([stage], sampling="learnability", failure_replay_prob=0.0), 0)
    curriculum.past.update({"a": 0.5, "b": 0.5})
    for i in range(200):
        for name in ("a", "b"):
            curriculum.update(Task(HEX * SIZE, i, f"past:{name}", i), 1.0)
    assert [cell[:2] for cell in curriculum.state_dict()["rates"]] == [[HEX, "past"]]
    drawn = Counter(curriculum.next(i).task_id // SIZE for i in range(6000))
    assert abs(drawn[LEDUC] - 5000) < 5 * 29  # p(1-p) = 0.25 against the floor of 0.05


def test_unknown_games_are_as_interesting_as_any():
    config = one_stage(games=["leduc_poker", "hex"], sampling="learnability")
    drawn = Counter(Curriculum(config, 0).next(i).task_id // SIZE for i in range(2000))
    assert abs(drawn[LEDUC] - 1000) < 5 * 23


# ---------------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("replay_seed", ["same", "fresh"])
@pytest.mark.parametrize("sampling", ["uniform", "learnability"])
@pytest.mark.parametrize("stop", [0, 8, 160, 400, 600])
def test_a_resumed_curriculum_goes_on_exactly(replay_seed, sampling, stop):
    stage = Stage("first", ["leduc_poker", "hex"], {"random": 2, "mcts": 1}, gate_opponent="random", threshold=0.5)
    config = two_stages(stage, sampling=sampling, replay_seed=replay_seed)
    undisturbed = Curriculum(config, 3)
    drawn = run(undisturbed, range(600))
    assert undisturbed.stage.name == "last"
    first = Curriculum(config, 3)
    run(first, range(stop))
    text = json.dumps(first.state_dict())
    resumed = Curriculum(config, 3)
    resumed.load_state_dict(json.loads(text))
    assert json.dumps(resumed.state_dict()) == text
    assert run(resumed, range(stop, 600)) == drawn[stop:]
    assert json.dumps(resumed.state_dict()) == json.dumps(undisturbed.state_dict())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(["stage", "episodes", "window", "failure_buffer", "rates", "past"]), json_values)
@example("episodes", float("inf"))
def test_a_malformed_state_is_refused_whole_or_loaded(key, value):
    curriculum = Curriculum(one_stage(), 0)
    feed(curriculum, [0, 1, 1])
    before = json.dumps(curriculum.state_dict())
    broken = {**Curriculum(one_stage(), 0).state_dict(), key: value}
    try:
        curriculum.load_state_dict(broken)
    except ValueError:
        assert json.dumps(curriculum.state_dict()) == before
    else:
        json.dumps(curriculum.state_dict())
        curriculum.next(0)
        curriculum.update(task(0), 1.0)


def test_a_state_of_other_stages_is_refused():
    state = Curriculum(one_stage(), 0).state_dict()
    other = Curriculum(CurriculumConfig([Stage("other", ["hex"])]), 0)
    with pytest.raises(
        ValueError, match="was in stage 'only', which is none of other: give the one to go on in that name"
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "wrong",
    [
        {"past": [["a", 1e308]]}, {"past": [["a", -1e200]]}, {"rates": [[LEDUC, "random", 1.5]]}, {"episodes": -1},
        {"window": [[LEDUC, 7]]}, {"failure_buffer": [[LEDUC * SIZE, 1, "random", 1, 5.0, 0]]},
        {"failure_buffer": [[LEDUC * SIZE, 1, "random", 1, 0.0, -9]]},
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(wrong):
    curriculum = Curriculum(one_stage(), 0)
    with pytest.raises(ConfigError, match="scores, rates and successes are from 0 to 1, counts 0 or more"):
        curriculum.load_state_dict(curriculum.state_dict() | wrong)


@pytest.mark.parametrize("seed", [-1, 2**31, 2**70])
def test_a_failure_on_a_seed_that_training_never_draws_is_refused(seed):
    curriculum = Curriculum(one_stage(), 0)
    failures = {"failure_buffer": [[LEDUC * SIZE, 1, "random", seed, 0.0, 0]]}
    with pytest.raises(ConfigError, match=f"{seed} is not in range"):
        curriculum.load_state_dict(curriculum.state_dict() | failures)


def test_a_failed_task_without_a_seed_is_remembered_across_a_resume():
    curriculum, again = Curriculum(one_stage(), 0), Curriculum(one_stage(), 0)
    curriculum.update(Task(LEDUC * SIZE), 0.0)
    again.load_state_dict(curriculum.state_dict())
    assert again.state_dict() == curriculum.state_dict()


@pytest.mark.parametrize("opponent", ["bogus", "mcts:100000000x1000", "self", "past", "past:a"])
def test_failures_that_nobody_could_have_had_are_forgotten(opponent):
    curriculum = Curriculum(CurriculumConfig([Stage("only", ["leduc_poker"], **PAST)]), 0)
    others = [(LEDUC * SIZE, opponent), (HEX * SIZE, "random"), (10**12, "random"), (-1, "random")]
    entries = [[task_id, 1, against, 1, 0.0, 0] for task_id, against in [(LEDUC * SIZE, "random"), *others]]
    curriculum.load_state_dict(curriculum.state_dict() | {"failure_buffer": entries})
    assert curriculum.state_dict()["failure_buffer"] == entries[:1]


def test_failures_that_no_stage_plays_are_forgotten():
    both = [Stage("first", ["leduc_poker"], "mcts"), Stage("last", ["leduc_poker", "hex#3"], "random")]
    curriculum = Curriculum(CurriculumConfig(both[1:]), 0)
    feed(curriculum, [0, 1, 0])
    feed(curriculum, [0], game=HEX, config_id=3)
    state = curriculum.state_dict() | {"stage": "first"}
    assert curriculum.buffer_size == 3
    last = ((["leduc_poker", "hex"], "random", 3), (["leduc_poker"], "random", 2),
            (["hex#3", "hex#4"], "random", 1), (["leduc_poker", "hex"], "perfect", 0))  # fmt: skip
    for games_, opponent, left in last:
        other = Curriculum(CurriculumConfig([both[0], Stage("last", games_, opponent)]), 0)
        other.load_state_dict(state)
        assert other.buffer_size == left
        assert other.state_dict()["episodes"] == 4
        other.count_anew()
        assert (other.state_dict()["episodes"], other.state_dict()["window"]) == (0, [])


# --------------------------------------------------------------------------------------------------------- bad usage


@pytest.mark.parametrize("score", [-0.1, 1.1, float("nan")])
def test_scores_out_of_range_are_refused(score):
    with pytest.raises(ValueError, match=r"score .* is not in \[0, 1\]"):
        Curriculum(one_stage(), 0).update(task(0), score)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"games": []}, "games is empty"),
        ({"games": ["ludo"]}, "game 'ludo' is not known: allowed are goofspiel, "),
        ({"games": [(99 * SIZE, 99 * SIZE)]}, r"tasks \[9900000000, 9900000000\] are out of range"),
        ({"games": [(5, 4)]}, "out of range"),
        ({"games": ["hex#"]}, "hex# is not known: expected NAME#CONFIG"),  # all of hex, as if there were no mark
        ({"games": ["hex#²"]}, "hex#² is not known"),
        ({"games": ["hex#１"]}, "hex#１ is not known"),  # a digit of another script
        ({"games": ["hex#-1"]}, "hex#-1 is not known"),
        ({"games": [(-1, 4)]}, "out of range"),
        ({"opponent": "stockfish"}, "opponent 'stockfish' is not known"),
        ({"opponent": {}}, "a mixture needs opponents"),
        (
            {"games": {"goofspiel_small#0-2": -1, "goofspiel_small#3-4": 3}},
            "games: weights are numbers from 1e-09 to 1e.09",
        ),
        ({"games": {"hex": 1e300, "kuhn_poker": 1e-300}}, "games: weights are numbers from 1e-09 to 1e.09"),
        ({"opponent": {"random": 0.0}}, "opponent: weights are numbers from 1e-09 to 1e.09"),
        ({"opponent": "past:step-000010"}, "past alone is allowed"),
        ({"opponent": {"random": 1e200, "mcts": 1}}, "opponent: weights are numbers from"),
        ({"opponent": {"random": 1.0, "mtcs": 1.0}}, "opponent 'mtcs' is not known"),
        ({"gate_opponent": "self"}, "gate_opponent 'self' changes with the policy"),
    ],
)
def test_impossible_stages(options, message):
    with pytest.raises(ValueError, match=message):
        Stage(**{"name": "x", "games": ["hex"]} | options)


@pytest.mark.parametrize(
    "stage",
    [
        Stage("x", ["hex"], "self"),
        Stage("x", ["hex"], {"random": 1.0, "mcts": 1.0}),
        Stage("x", ["hex"], "random", gate_opponent="mcts"),
    ],
)
def test_a_stage_that_could_never_be_left_is_refused(stage):
    with pytest.raises(ValueError, match="stage 'x' could never be left"):
        two_stages(stage)
    CurriculumConfig([stage])


def test_stage_names_are_unique():
    with pytest.raises(ValueError, match="a name of its own"):
        CurriculumConfig([Stage("x", ["hex"]), Stage("x", ["hex"])])


# ---------------------------------------------------------------------------------------------------------- past selves

PAST = {"opponent": {"random": 1.0, "past": 3.0}, "gate_opponent": "random"}


def with_past(scores, **options):
    """A curriculum with past selves a, b, c, ... against which the mean score is known."""
    curriculum = Curriculum(CurriculumConfig([Stage("only", ["leduc_poker"], **PAST)], **options), 0)
    for name in "abcdefg"[: len(scores)]:
        curriculum.add_past(name)
    for _ in range(1200):
        for name, score in zip("abcdefg", scores, strict=False):
            curriculum.update(task(10_000, opponent=f"past:{name}"), score)
    return curriculum


def test_before_there_is_a_past_self_the_policy_plays_itself():
    curriculum = Curriculum(CurriculumConfig([Stage("only", ["leduc_poker"], **PAST)]), 0)
    drawn = Counter(curriculum.next(i).opponent for i in range(4000))
    assert drawn.keys() == {"random", "self"}
    assert drawn["self"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_past_selves_that_still_win_are_chosen_first():
    curriculum = with_past([0.25, 0.5, 0.99], failure_replay_prob=0.0)
    assert curriculum.past == pytest.approx({"a": 0.25, "b": 0.5, "c": 0.99}, abs=1e-3)
    drawn = Counter(curriculum.next(i).opponent for i in range(8000))
    weights = {"past:a": 0.75**2, "past:b": 0.5**2, "past:c": 0.05}  # the last by the floor
    for opponent, weight in weights.items():
        share = 0.75 * weight / sum(weights.values())
        assert drawn[opponent] / 8000 == pytest.approx(share, abs=0.02), opponent


def test_the_most_beaten_past_self_makes_room(monkeypatch):
    monkeypatch.setattr(curriculum_module, "PAST_SIZE", 3)
    curriculum = with_past([0.5, 0.8, 0.6])
    assert curriculum.add_past("new") == ["b"]
    assert list(curriculum.past) == ["a", "c", "new"]
    assert curriculum.past["new"] == 0.5


def test_games_against_the_past_feed_neither_window_nor_failures():
    curriculum = with_past([0.0])
    assert (len(curriculum._window), curriculum.buffer_size) == (0, 0)
    curriculum.update(task(1, opponent="past:forgotten"), 0.0)  # it made room in the very step it was played in
    assert list(curriculum.past) == ["a"]


def test_past_selves_survive_a_resume():
    before = with_past([0.25, 0.5, 0.9])
    after = Curriculum(before.config, 0)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert (after.past, list(after.past)) == (before.past, list(before.past))
    assert [after.next(i) for i in range(200)] == [before.next(i) for i in range(200)]


def test_what_a_stage_could_be_played_against_is_what_it_takes():
    with pytest.raises(ValueError, match=r"in training also self and past$"):
        Stage("a", ["tic_tac_toe"], "pastt")
