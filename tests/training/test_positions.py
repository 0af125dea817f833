"""What seats knew, played again from a game's history, against what they were asked."""

import pytest
import torch
from tiny import tiny_policy

import games
from curriculum import CurriculumConfig, Stage
from env_wrapper import Action, Decision, EnvConfig, Sequence, Task, play
from envs.openspiel import known, load_game, position, query_at
from training.positions import known_states, state_shapes
from training.trajectories import Trajectory

SIZE = games.CONFIGS_PER_GAME


class Noting:
    """Answers with the middle legal id, now and then not, and notes each question and what was known of it."""

    def __init__(self, task_id, free=False):
        self.task_id, self.free, self.asked, self.sequences = task_id, free, {}, {}

    def act(self, queries):
        return [self.answer(query) for query in queries]

    def answer(self, query):
        seen = self.asked.setdefault(query.seat, [])
        wrong = self.free and query.rng_key[3] == 1 and len(seen) % 3 == 1
        seen.append(known(position(self.task_id, query.history), query.seat))
        before = self.sequences.get(query.seat, Sequence([]))
        decision = Decision(1, 2, ply=len(query.history))
        self.sequences[query.seat] = Sequence([1, 2], [*before.decisions, decision])
        text = "none" if wrong else str(list(query.legal)[len(query.legal) // 2])
        return Action(text, sequence=self.sequences[query.seat], extends=bool(before.decisions))


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize(
    "name", ["tic_tac_toe", "leduc_poker", "goofspiel", "gin_rummy", "oware", "phantom_ttt", "backgammon"]
)
def test_what_a_seat_knew_is_that_of_its_questions(name, free):
    task_id = games.NAMES.index(name) * SIZE
    player = Noting(task_id, free)
    [episode] = play(EnvConfig(answer_mode="free" if free else "constrained"), player, [Task(task_id, 5, "self")])
    assert episode.outcome == "finished"
    assert (episode.info["retries"] > 0) == free
    rows = [Trajectory(0, episode, seat) for seat in sorted(episode.sequences)]
    expected = [(name, torch.tensor(x).clamp(0, 1)) for seat in sorted(player.asked) for x in player.asked[seat]]
    found = known_states(rows)
    assert len({tuple(x.tolist()) for _, x in found}) > 2
    assert [game for game, _ in found] == [game for game, _ in expected]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


def test_numbers_above_1_count_as_1():
    """Of five men on a point backgammon's tensor says more than 1, of which the logarithm of the rest is NaN."""
    task_id = games.NAMES.index("backgammon") * SIZE
    player = Noting(task_id)
    [episode] = play(EnvConfig(), player, [Task(task_id, 5, "random")])
    found = known_states([Trajectory(0, episode, seat) for seat in sorted(episode.sequences)])
    assert max(max(x) for seat in player.asked.values() for x in seat) > 1
    assert max(float(x.max()) for _, x in found) == 1.0
    assert min(float(x.min()) for _, x in found) == 0.0


def test_decisions_of_the_policy_say_at_which_ply_they_were_asked(tmp_path):
    policy, task_id = tiny_policy(tmp_path), games.NAMES.index("leduc_poker") * SIZE
    [episode] = play(EnvConfig(prompt="compact", history_turns=0), policy, [Task(task_id, 3, "self")])
    asked = set()
    for seat, sequences in episode.sequences.items():
        for decision in (d for s in sequences for d in s.decisions):
            state = position(task_id, episode.info["history"][: decision.ply])
            assert state.current_player() == seat
            [query] = [query_at(task_id, state, seat, EnvConfig(prompt="compact", history_turns=0))]
            ids, _ = policy.chat.first_prompt(query.conversation)
            assert any(s.ids[: decision.start] == ids for s in sequences)
            asked.add(decision.ply)
    assert len(asked) > 2


def test_shapes_are_those_of_all_sizes_of_a_games_boards():
    def shapes(*named):
        return state_shapes(CurriculumConfig([Stage("one", list(named)), Stage("two", ["leduc_poker"])]))

    assert shapes("kuhn_poker#0") == {"kuhn_poker": {11}, "leduc_poker": {30}}
    boards = {9 * load_game(games.NAMES.index("hex") * SIZE + i).new_initial_state().num_distinct_actions()
              for i in range(8)}  # fmt: skip
    assert shapes("hex") == {"hex": boards, "leduc_poker": {30}}
    assert len(boards) == 4
    assert shapes(f"hex#{8 * 10**6}") == {"hex": {min(boards)}, "leduc_poker": {30}}
    assert set(shapes(*games.NAMES)) == {*games.NAMES}
