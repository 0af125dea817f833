"""From episodes to a batch: who is paid what and when, what is trained, and in which order."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from env_wrapper import Decision, Episode, Sequence, Task
from envs import exact, openspiel
from envs.openspiel import load_game, luck
from games import CONFIGS_PER_GAME, NAMES
from policy.player import Evaluation
from train_ppo import LONE, Batch, Trainer, TrainingError, collate, whiten
from training import metrics
from training.config import PPOConfig
from training.metrics import ALIKE, mutual_information, summarise, timing
from training.trajectories import LEAST_SCALE, Trajectory, standardise


class Recorded:
    """Stands in for the policy: new log-probabilities are the rollout's less 0.01, the reference's less 0.5 * k."""

    reference, average = None, "average"
    device = torch.device("cpu")

    def evaluate_decisions(self, sequences, adapter=None, legal_mass=False):
        logged = [d.logprob for s in sequences for d in s.decisions]
        shift = [0.01 if adapter is None else 0.5 * k for k in range(len(logged))]
        logprobs = torch.tensor(logged) - torch.tensor(shift)
        return Evaluation(logprobs, logprobs, logprobs)


def episode(game, values, scores, outcome="finished", per_sequence=1):
    """An episode with a decision a value, ``values[seat]``, ``per_sequence`` decisions to a sequence."""
    sequences = {}
    for seat, seat_values in values.items():
        chain = [Decision(logprob=-0.1 * (i + 1) - seat, value=float(v)) for i, v in enumerate(seat_values)]
        cut = range(0, len(chain), per_sequence)
        sequences[seat] = [Sequence([1], chain[i : i + per_sequence]) for i in cut]
    own = min(values)
    return Episode(Task(0), game, scores.get(own, 0.0), outcome, sequences, {"scores": scores or None})


def gathered(episodes, kl_coef=0.0, moments=None, **knobs):
    ppo = PPOConfig(**({"gamma": 1.0, "lam": 1.0, "recompute_logprobs": False} | knobs))
    return collate(episodes, Recorded(), ppo, kl_coef, moments)  # type: ignore[arg-type]


def test_in_self_play_each_seat_is_paid_its_own_score():
    batch = gathered([episode("a", {0: [0, 0], 1: [0, 0, 0]}, {0: 1.0, 1: 0.0})])
    assert batch.returns_M.tolist() == [1, 1, -1, -1, -1]
    assert batch.reward_mean == 0


def test_a_score_is_mapped_to_minus_one_to_one_and_paid_after_the_last_decision():
    batch = gathered([episode("a", {0: [0, 0, 0]}, {0: 0.75})], gamma=0.5)
    assert batch.returns_M.tolist() == [0.125, 0.25, 0.5]


def test_decisions_are_in_the_order_of_episodes_seats_and_sequences():
    episodes = [
        episode("a", {1: [1, 2, 3], 0: [4, 5]}, {0: 1.0, 1: 0.0}, per_sequence=2),
        episode("b", {0: [6]}, {0: 0.0}),
    ]
    batch = gathered(episodes)
    assert batch.values_M.tolist() == [4, 5, 1, 2, 3, 6]
    assert [d.value for s in batch.sequences for d in s.decisions] == [4, 5, 1, 2, 3, 6]
    assert batch.unit == [0, 0, 0, 1]
    assert [span.tolist() for span in batch.spans] == [[0, 1], [2, 3], [4], [5]]
    torch.testing.assert_close(batch.old_logprobs_M, torch.tensor([-0.1, -0.2, -1.1, -1.2, -1.3, -0.1]))


def test_old_log_probabilities_are_the_rollouts_or_the_learners():
    episodes = [episode("a", {0: [0, 0]}, {0: 1.0})]
    torch.testing.assert_close(gathered(episodes).old_logprobs_M, torch.tensor([-0.1, -0.2]))
    recomputed = gathered(episodes, recompute_logprobs=True)
    torch.testing.assert_close(recomputed.old_logprobs_M, torch.tensor([-0.11, -0.21]))


def test_the_kl_penalty_is_paid_decision_by_decision():
    """log p - log p_ref is 0, 0.5, 1, ...: at 0.1 a nat the rewards before the score are 0, -0.05, -0.1, -0.15."""
    batch = gathered([episode("a", {0: [0, 0, 0, 0]}, {0: 1.0})], kl_coef=0.1)
    torch.testing.assert_close(batch.returns_M, torch.tensor([0.7, 0.7, 0.75, 0.85]))
    assert batch.kl_ref == 0.75
    assert gathered([episode("a", {0: [0, 0]}, {0: 1.0})]).kl_ref == 0


def test_the_magnet_pulls_each_decision_by_itself_after_whitening():
    episodes = [episode("a", {0: [0, 0, 0, 0]}, {0: 1.0}), episode("a", {0: [0, 0]}, {0: 0.0})]
    free, pulled = gathered(episodes), gathered(episodes, magnet_coef=0.4)
    gap_M = torch.tensor([0.5 * k for k in range(6)])  # log p - log p_average
    torch.testing.assert_close(pulled.advantages_M, free.advantages_M - 0.4 * gap_M)
    assert torch.equal(pulled.returns_M, free.returns_M)
    assert (free.kl_average, pulled.kl_average) == (0, gap_M.mean())


def test_the_gap_between_sampler_and_learner_is_measured_where_both_are_known():
    game = [episode("a", {0: [0, 0]}, {0: 1.0})]
    row = gathered(game, recompute_logprobs=True).summary()
    assert (row["logprob_gap_mean"], row["logprob_gap_max"]) == pytest.approx((0.01, 0.01), abs=1e-6)
    assert "logprob_gap_mean" not in gathered(game).summary()


def test_games_against_oneself_have_moments_of_their_own():
    moments: dict[str, tuple[float, float, float]] = {}
    games = [episode("a", {0: [0], 1: [0]}, {0: 1.0, 1: 0.0}) for _ in range(3)]
    for game, opponent in zip(games, ("random", "self", "past:step-000010"), strict=True):
        game.task = Task(0, opponent=opponent)
    gathered(games, moments=moments)
    assert set(moments) == {"a/0", "a/1", "a/0/self", "a/1/self", "a/0/past", "a/1/past"}


def test_an_end_is_final_but_a_cut_off_game_is_worth_what_was_expected():
    values = {0: [0.25, 0.5, 0.75]}
    ended = gathered([episode("a", values, {0: 0.0})])
    assert ended.returns_M.tolist() == [-1, -1, -1]
    assert ended.weights_M.tolist() == [1, 1, 1]
    cut = gathered([episode("a", values, {}, "truncated")], gamma=0.5)
    assert cut.returns_M.tolist() == [0.1875, 0.375, 0]  # the value of the last decision, discounted
    assert cut.weights_M.tolist() == [1, 1, 0]


def test_advantages_are_whitened_per_game_without_what_is_not_trained():
    rng = np.random.default_rng(2)
    many = {"a": rng.normal(size=9), "b": rng.normal(size=12)}
    episodes = [episode(game, {0: [value]}, {0: 1.0}) for game, values in many.items() for value in values]
    episodes.append(episode("b", {0: [0.3, 50.0]}, {}, "truncated"))
    batch = gathered(episodes, lam=0.0)
    parts = [batch.advantages_M[:9], batch.advantages_M[9:22]]
    for part in parts:
        assert float(part.mean()) == pytest.approx(0, abs=1e-6)
        assert float(part.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert batch.weights_M.tolist() == [1] * 22 + [0]
    assert batch.advantages_M[22] == 0
    few = gathered(episodes[1:], lam=0.0)  # eight of "a" say too little about themselves
    assert abs(float(few.advantages_M[:8].mean())) > 0.01


@pytest.mark.parametrize("others", [7, 40])
@pytest.mark.parametrize("won", [1.0, 0.0])
def test_a_long_game_that_is_alone_in_its_step_is_still_won_or_lost(others, won):
    """Whitened by itself it would have mean 0 either way, and with lambda 1 nothing else."""
    short = [episode("b", {0: [0]}, {0: float(i % 2)}) for i in range(others)]
    batch = gathered([episode("a", {0: [0] * 13}, {0: won}), *short])
    sign = 2 * won - 1
    assert (sign * batch.advantages_M[:13] > 0.3).all()
    untrained = [episode("a", {0: [0]}, {}, "truncated")] * 8  # of which no decision is left: "a" is still alone
    assert (sign * gathered([episode("a", {0: [0] * 13}, {0: won}), *untrained, *short]).advantages_M[:13] > 0.3).all()


def test_a_batch_that_is_dumped_says_of_each_sequence_which_game_it_is_of(tmp_path):
    games = [replace(episode("a", {0: [0], 1: [0]}, {0: 1.0, 1: 0.0}), task=Task(k, 7 + k, "self")) for k in (3, 5)]
    gathered(games).dump(tmp_path / "bad_batch.json", 1, games)
    found = json.loads((tmp_path / "bad_batch.json").read_text())["sequences"]
    tasks = [{"task_id": k, "seed": 7 + k, "opponent": "self"} for k in (3, 5)]
    assert [row["task"] for row in found] == [tasks[0], tasks[0], tasks[1], tasks[1]]
    assert all(row.keys() >= {"ids", "decisions", "advantages", "returns", "old_logprobs"} for row in found)


def test_a_step_without_a_single_decision_is_an_error():
    with pytest.raises(TrainingError, match="no episode of this step"):
        gathered([episode("a", {0: []}, {0: 1.0})])


def test_failed_episodes_are_left_out_and_too_many_end_the_run():
    good, bad = episode("a", {0: [0]}, {0: 1.0}), Episode(Task(0), "a", 0.0, "failed", {}, {"error": "OSError: x"})
    trainer = SimpleNamespace(engine=None)
    assert Trainer.without_failed(trainer, [good, bad, good, good, good]) == [good] * 4  # type: ignore[arg-type]
    assert Trainer.without_failed(trainer, [good, bad]) == [good]  # type: ignore[arg-type]
    for none_left in ([bad], [bad, bad]):
        with pytest.raises(TrainingError, match=r"of \d episodes failed"):
            Trainer.without_failed(trainer, none_left)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="2 of 5 episodes failed; the first: OSError: x"):
        Trainer.without_failed(trainer, [good, bad, good, good, bad])  # type: ignore[arg-type]


@pytest.mark.parametrize(("values", "expected"), [([1, 2, 3, 9], 1.0), ([0, 0, 0, 9], 0.0), ([3, 2, 1, 9], -3.0)])
def test_explained_variance_by_hand_over_what_is_trained(values, expected):
    zeros, returns, weights = torch.zeros(4), torch.tensor([1.0, 2, 3, 0]), torch.tensor([1.0, 1, 1, 0])
    sequences = [Sequence([1], [Decision()] * 4)]
    batch = Batch(sequences, [0], zeros, torch.tensor(values, dtype=torch.float), zeros, returns, weights, 0.0, 0.0)
    assert batch.summary()["explained_variance"] == pytest.approx(expected)
    assert batch.summary()["decisions"] == 4


# ------------------------------------------------------------------------------------------ rewards of a game and seat


KUHN_POKER, TIC_TAC_TOE = (NAMES.index(name) * CONFIGS_PER_GAME for name in ("kuhn_poker", "tic_tac_toe"))


def known_game(history, score, task_id=KUHN_POKER, opponent="random"):
    """Seat 0's game against random play, whose history is known."""
    decisions = [Decision(value=0.5, ply=ply) for ply, (player, _) in enumerate(history) if player == 0]
    info = {"scores": {0: score}, "seat": 0, "history": history, "n_decisions": {0: len(decisions)}}
    name = NAMES[task_id // CONFIGS_PER_GAME]
    return Episode(Task(task_id, 0, opponent), name, score, "finished", {0: [Sequence([1], decisions)]}, info)


def kuhn_games(**others):
    """In chips, by card: a king bets and is called (+2) or not (+1), a jack and a queen bet against a king (-2, +1)."""
    cards, scores = ((2, 1), (2, 1), (0, 2), (1, 2)), (1.0, 0.75, 0.0, 0.75)
    return [known_game([[-1, mine], [-1, other], [0, 1], [1, int(score in (0, 1))]], score, **others)
            for (mine, other), score in zip(cards, scores, strict=True)]  # fmt: skip


def test_an_opponents_lucky_moves_are_taken_off_where_they_happen_and_a_positions_worth_is_the_baseline():
    """A bet of a king brings 1.5 chips in the mean, any other one here -0.5."""
    games = kuhn_games()
    batch = gathered(games)
    means = torch.tensor([1.5, 1.5, -0.5, -0.5]) / 2
    torch.testing.assert_close(batch.returns_M, means)
    assert batch.reward_mean == pytest.approx((1 + 0.5 - 1 + 0.5) / 4), "of what was scored"
    worth = torch.tensor([2 * luck(game)[1][2] - 1 for game in games])
    called_or_not = (
        0.75 * 2 - 0.25
    )  # it answers a bet with three calls in four; betting and waiting are as good for a king
    assert 2 * worth[0] in [pytest.approx(bets * 1.5 + (1 - bets) * (1 + called_or_not) / 2) for bets in (0.25, 0.75)]
    assert len({*worth.tolist()}) == 3
    lucky = torch.tensor([1, 0.5, -1, 0.5]) - 0.5  # less the critic
    assert lucky.std() > 2 * (means - worth).std()
    torch.testing.assert_close(batch.advantages_M, whiten(means - worth, None, lucky))
    kept = batch.advantages_M.std(correction=0) / whiten(lucky).std(correction=0)
    assert kept == pytest.approx(float((means - worth).std() / lucky.std()), rel=1e-3), "noise is gone, not scaled up"


def test_luck_against_a_past_self_is_known_where_it_is_told_how_that_one_plays(monkeypatch):
    """One that never calls: that it folds is no luck then, only the cards are."""
    game = known_game([[-1, 2], [-1, 0], [0, 1], [1, 0]], 0.75, opponent="past:frozen")
    assert luck(game) is None
    folds = {
        key: {a: float(a == 0) for a in probs} for key, probs in exact.uniform_table(load_game(KUHN_POKER)).items()
    }
    monkeypatch.setitem(openspiel.KNOWN, "past:frozen", exact.Known(folds))
    favours, _ = luck(game)
    assert favours[3] == 0
    assert luck(known_game([[-1, 2], [-1, 0], [0, 1], [1, 0]], 0.75))[0][3] < 0, "random play calls half the time"


def test_a_position_against_somebody_known_is_worth_it_in_units_of_games_against_past_selves(monkeypatch):
    table = exact.uniform_table(load_game(KUHN_POKER))
    monkeypatch.setitem(openspiel.KNOWN, "past:frozen", exact.Known(table))
    others = {"kuhn_poker/0": (100.0, 0.9, 4.0)}  # of games against random play
    same = [gathered(kuhn_games(opponent=opponent), moments=others | {key: (100.0, 0.2, 0.25)})
            for opponent, key in (("past:frozen", "kuhn_poker/0/past"), ("random", "kuhn_poker/0"))]  # fmt: skip
    for name in ("returns_M", "advantages_M"):
        torch.testing.assert_close(getattr(same[0], name), getattr(same[1], name))


def test_luck_between_two_decisions_is_taken_off_after_the_first_and_discounted_as_it_is():
    """In kuhn_poker seat 0 passes with a king, and the other one bets: the pot is larger than in the mean."""
    game = known_game([[-1, 2], [-1, 0], [0, 0], [1, 1], [0, 1]], 1.0)
    bet = 2 * luck(game)[0][3]
    assert bet == pytest.approx(((0.75 * 2 - 0.25) - 1) / 2 / 2), "half the difference to no bet, in units of 2 chips"
    assert gathered([game]).returns_M.tolist() == pytest.approx([1 - bet, 1])
    board = known_game([[0, 4], [1, 1], [0, 0], [1, 2], [0, 8]], 1.0, TIC_TAC_TOE)  # seat 1 lets the diagonal be
    first, second = (2 * luck(board)[0][ply] for ply in (1, 3))
    assert min(first, second) > 0.005
    assert gathered([board]).returns_M.tolist() == pytest.approx([1 - second - first, 1 - second, 1])
    assert gathered([board], gamma=0.5).returns_M.tolist() == pytest.approx(
        [0.25 - second / 2 - first, 0.5 - second, 1]
    )


@pytest.mark.parametrize("knobs", [{"less_luck": False}, {"opponent": "self"}, {"opponent": "mcts:10x1"}])
def test_luck_that_is_not_known_or_not_wanted_stays_and_the_critic_is_the_baseline(knobs):
    """Of an opponent the odds are not known."""
    batch = gathered(kuhn_games(opponent=knobs.pop("opponent", "random")), **knobs)
    assert batch.returns_M.tolist() == [1, 0.5, -1, 0.5]
    torch.testing.assert_close(batch.advantages_M, whiten(batch.returns_M - 0.5))


def test_luck_is_taken_off_a_game_that_is_given_up_or_cut_off():
    """A player that could keep its luck by an illegal answer would learn to give one."""
    moves = [[-1, 2], [-1, 0], [0, 0], [1, 1]]
    lost = known_game([*moves, [0, 1]], 0.0)
    given_up = replace(lost, info=lost.info | {"history": moves}, outcome="forfeited")
    bet = 2 * luck(given_up)[0][3]
    assert gathered([given_up]).returns_M.tolist() == pytest.approx([-1 - bet, -1])
    board = known_game([[0, 4], [1, 1], [0, 0], [1, 2]], 0.0, TIC_TAC_TOE)
    first = 2 * luck(board)[0][1]
    cut = replace(board, outcome="truncated", info=board.info | {"n_decisions": {0: 3}})  # the third did not fit
    assert gathered([cut, given_up]).returns_M[0].item() == pytest.approx(0.5 - first)


def test_a_game_given_up_before_any_move_has_the_baseline_of_its_others():
    """With the critic's it taught to give up, wherever that was above the position's worth."""
    board = known_game([[0, 4], [1, 1], [0, 0], [1, 2], [0, 8]], 1.0, TIC_TAC_TOE)
    info = board.info | {"history": [], "n_decisions": {0: 1}}
    given_up = replace(board, score=0.0, outcome="forfeited", info=info, sequences={0: [Sequence([1], [Decision()])]})
    others, alone = Trajectory(0, board, 0).luck, Trajectory(0, given_up, 0).luck
    assert others is not None
    assert alone == ([0], others[1][:1])
    for moves, known in (({0: 2}, TIC_TAC_TOE), ({0: 1}, KUHN_POKER)):  # what a server has not told
        untold = replace(given_up, task=Task(known), info=info | {"n_decisions": moves})
        assert Trajectory(0, untold, 0).luck is None
    assert Trajectory(0, replace(given_up, info=info | {"history": None}), 0).luck is None


def test_what_is_known_is_standardised_as_the_rewards_are():
    moments = {"kuhn_poker/0": (100.0, 0.2, 0.25)}
    games = kuhn_games()
    batch = gathered(games, moments=moments)
    _, mean, variance = moments["kuhn_poker/0"]
    means, worth = torch.tensor([0.75, 0.75, -0.25, -0.25]), torch.tensor([2 * luck(game)[1][2] - 1 for game in games])
    scaled_S, luck_S = (
        (torch.tensor([1, 0.5, -1, 0.5]) - mean) / variance**0.5,
        torch.tensor([0.25, -0.25, -0.75, 0.75]),
    )
    torch.testing.assert_close(batch.returns_M, scaled_S - luck_S / variance**0.5)
    alike = gathered(games[:1] * 4, moments={"kuhn_poker/0": (100.0, 1.0, 0.0)})
    torch.testing.assert_close(alike.returns_M, -luck_S[[0] * 4] / LEAST_SCALE)
    torch.testing.assert_close(batch.advantages_M, whiten((means - worth) / variance**0.5, None, scaled_S - 0.5))


def test_rewards_are_standardised_by_the_running_moments_of_their_game_and_seat():
    """By hand: the first update takes the batch's moments, the second moves half way to the new batch's."""
    moments: dict[str, tuple[float, float, float]] = {}
    first = standardise(torch.tensor([1.0, 5.0, 3.0, -1.0] * 4), ["a/0", "b/0", "a/0", "b/0"] * 4, moments)
    assert first.tolist() == [-1, 1, 1, -1] * 4
    assert moments == {"a/0": (1, 2.0, 1.0), "b/0": (1, 2.0, 9.0)}
    second = standardise(torch.tensor([6.0] * 4), ["a/0"] * 4, moments)
    # mean 2 + (6 - 2) / 2 = 4, variance 1 + ((6 - 4)^2 - 1) / 2 = 2.5
    assert moments["a/0"] == (2, 4.0, 2.5)
    torch.testing.assert_close(second, torch.full((4,), 2 / 2.5**0.5))
    assert moments["b/0"] == (1, 2.0, 9.0)


def test_the_first_rewards_of_a_game_teach_where_a_step_has_one_of_them():
    """By hand: an eighth of the way from mean 0 and variance 1."""
    moments: dict[str, tuple[float, float, float]] = {}
    [first] = standardise(torch.ones(1), ["a/0"], moments).tolist()
    assert moments["a/0"] == (1, 0.125, 1 + (0.875**2 - 1) / 8)
    assert first == pytest.approx(0.875 / moments["a/0"][2] ** 0.5)
    results = [standardise(torch.tensor([x]), ["a/0"], moments).item() for x in (1.0, -1.0, 1.0, 1.0, -1.0)]
    assert [r > 0 for r in results] == [True, False, True, True, False]


def test_the_moments_of_rewards_never_stop_following():
    moments: dict[str, tuple[float, float, float]] = {"a/0": (1000, 0.0, 1.0)}
    standardise(torch.ones(1), ["a/0"], moments)
    assert moments["a/0"][:2] == (1001, 0.05)


def test_equal_rewards_are_not_blown_up():
    assert standardise(torch.full((8,), 0.3), ["a/0"] * 8, {}).abs().max() < 1e-5
    assert standardise(torch.tensor([0.31]), ["a/0"], {"a/0": (1000, 0.3, 0.0)}).abs().max() < 0.5


def test_in_a_batch_the_moments_are_kept_apart_by_seat_and_the_reported_reward_is_the_games():
    moments: dict[str, tuple[float, float, float]] = {}
    episodes = [episode("a", {0: [0], 1: [0]}, {0: 1.0, 1: 0.0}), episode("a", {0: [0], 1: [0]}, {0: 0.5, 1: 0.5})]
    batch = gathered(episodes * 4, moments=moments)
    assert {key: value[1] for key, value in moments.items()} == {"a/0": 0.5, "a/1": -0.5}
    assert batch.returns_M.tolist() == [1, -1, -1, 1] * 4
    assert batch.reward_mean == 0


def test_games_that_were_cut_off_tell_nothing_about_rewards():
    moments: dict[str, tuple[float, float, float]] = {}
    cut = episode("a", {0: [0, 0]}, {}, "truncated")
    batch = gathered([*[episode("a", {0: [0]}, {0: 1.0})] * 8, cut], moments=moments)
    assert moments == {"a/0": (1, 1.0, 0.0)}
    assert batch.reward_mean == 1
    assert math.isnan(gathered([cut], moments=moments).reward_mean)  # 0 would be a draw
    assert moments == {"a/0": (1, 1.0, 0.0)}


# ------------------------------------------------------------------------------------ what answers depend on


def answers(game, chosen, logprob, allowed=(4, 5), forced=()):
    """A game with a decision for each of ``chosen``, after a prompt of its own and the tokens that left no choice."""
    made = [Decision(1, positions=[len(forced)], chosen=[c], allowed=[list(allowed)], token_logprobs=[logprob])
            for c in chosen]  # fmt: skip
    return Episode(Task(0), game, 0.0, "finished", {0: [Sequence([chosen[0], *forced], made)]})


def test_answers_that_follow_the_position_tell_of_it_and_mixtures_or_constants_tell_nothing():
    n = 8 * ALIKE
    told = [answers("a", [4] * n, 0.0), answers("a", [5] * n, 0.0)]  # sure of itself, and not always the same
    assert mutual_information(told) == pytest.approx(math.log(2), abs=0.01)
    assert mutual_information([answers("a", [4, 5] * n, -math.log(2))]) == pytest.approx(0, abs=0.01)
    assert mutual_information([answers("a", [4] * n, 0.0)]) == 0
    # the same answers in two games, or where other actions are legal, are compared with nothing
    assert mutual_information([answers("a", [4] * n, 0.0), answers("b", [5] * n, 0.0)]) == 0
    assert mutual_information([answers("a", [4] * n, 0.0), answers("a", [5] * n, 0.0, (5, 6))]) == 0
    assert mutual_information([answers("a", [4] * n, 0.0), answers("a", [5] * n, 0.0, forced=[4])]) == 0
    assert mutual_information([answers("a", [5] * n, 0.0, forced=[4]), answers("a", [4] * n, 0.0, (4, 5), [5])]) == 0
    assert mutual_information([answers("a", [4, 5], 0.0)]) is None  # too few to say
    [[free]] = answers("a", list(range(n)), -math.log(n)).sequences.values()
    free = Sequence(free.ids, [replace(d, allowed=None) for d in free.decisions])
    assert mutual_information([Episode(Task(0), "a", 0.0, "finished", {0: [free]})]) is None  # most were never seen
    mixed = [*told, answers("b", [4] * 2 * n, 0.0)]
    assert mutual_information(mixed) == pytest.approx(math.log(2) / 2, abs=0.01)  # a mean over decisions


def test_chance_alone_is_not_taken_for_knowledge():
    """Counted entropies are too low by about (K - 1) / 2n, 0.16 here."""
    rng = np.random.default_rng(0)
    found = [mutual_information([answers("a", rng.integers(6, size=ALIKE).tolist(), -math.log(6), range(6))])
             for _ in range(400)]  # fmt: skip
    assert np.mean(found) == pytest.approx(0, abs=0.04)


def test_what_follows_an_answers_first_choice_is_not_compared():
    made = [Decision(1, positions=[0, 1], chosen=[4 + i % 2, 6 + i % 3], allowed=[[4, 5]], token_logprobs=[0.0, -1.0])
            for i in range(6 * ALIKE)]  # fmt: skip
    told = [Episode(Task(0), "a", 0.0, "finished", {0: [Sequence([1], made)]})]
    assert mutual_information(told) == pytest.approx(math.log(2), abs=0.01)


def test_a_steps_summary_tells_it_of_games_that_did_not_fail():
    good, other = answers("a", [4] * ALIKE, 0.0), answers("a", [5] * ALIKE, 0.0)
    assert summarise([good, other])["mutual_information"] == pytest.approx(math.log(2), abs=0.02)
    assert summarise([good, replace(other, outcome="failed")])["mutual_information"] == 0


def test_a_steps_summary_by_hand():
    """Failed games count as games alone, and a draw is no success."""
    games = [("a", 1.0, "finished"), ("a", 0.5, "finished"), ("b", 0.0, "forfeited"), ("b", 0.25, "truncated"),
             ("b", 0.0, "failed")]  # fmt: skip
    row = summarise([Episode(Task(0), game, score, end, {}, {"retries": 2}) for game, score, end in games])
    assert row["games"] == row["opponents"]["random"] == 5
    assert (row["score_mean"], row["success_rate"], row["retries"]) == (0.4375, 0.25, 10)
    assert (row["score/a"], row["score/b"]) == (0.75, 0.125)
    assert (row["truncated"], row["forfeited"], row["failed"]) == (1, 1, 1)


def test_why_games_of_a_step_failed_is_told_once_and_kept_in_the_log(caplog, monkeypatch):
    """Up to a fifth of each step's may, and the reason was nowhere."""
    monkeypatch.setattr(metrics, "_told", set())
    caplog.set_level("DEBUG", "training")
    good, bad = episode("a", {0: [0]}, {0: 1.0}), Episode(Task(0), "a", 0.0, "failed", {}, {"error": "OSError: x"})
    for _ in range(3):
        summarise([good, bad, bad, good, good])
    told = "2 of a step's 5 games failed and are left out; the first: OSError: x"
    expected = [("WARNING", told), ("DEBUG", told), ("DEBUG", told)]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == expected


def test_the_kl_is_to_the_adapter_that_a_run_began_with():
    """Where one was given; else to the base."""
    asked = []

    class Started(Recorded):
        def evaluate_decisions(self, sequences, adapter=None, legal_mass=False):
            asked.append(adapter)
            return super().evaluate_decisions(sequences, adapter, legal_mass)

    for reference in ("given", None):
        policy = Started()
        policy.reference = reference
        collate([episode("a", {0: [0]}, {0: 1.0})], policy, PPOConfig(recompute_logprobs=False), 0.1)
    assert asked == ["given", "base"]


def test_times_are_told_by_chapter():
    row = timing(10.0, 12.0, 15.0, 10, 20)
    assert (row["time_rollout"], row["time_update"], row["time_total"]) == (2, 3, 5)
    assert (row["games_per_s"], row["decisions_per_s"]) == (2, 4)


@pytest.mark.parametrize(("sequences", "read"), [(1, 1), (40, 3), (1600, 64)])
def test_a_sixteenth_of_a_step_is_read_again_after_its_updates(sequences, read):
    """Two decisions a sequence, of which the updates have made one twice as likely, and the other half as likely."""
    asked = []

    def evaluate_decisions(seen, adapter, legal_mass):
        asked.append((len(seen), legal_mass))
        moved_M = math.log(2) * torch.tensor([1.0, -1.0]).repeat(len(seen))
        mass_M = torch.tensor([0.1, 0.4]).repeat(len(seen)).log() if legal_mass else None
        return Evaluation(moved_M - torch.arange(2.0 * len(seen)) / 64, moved_M, moved_M, mass_M)

    old_M = -torch.arange(2.0 * sequences) / 64
    batch = SimpleNamespace(sequences=[None] * sequences, old_logprobs_M=old_M, targets_M=None)
    kl = {"update_kl": pytest.approx((1 - math.log(2) + math.log(2) - 0.5) / 2)}
    for constrained in (True, False):
        policy = SimpleNamespace(constrained=constrained, evaluate_decisions=evaluate_decisions)
        assert Batch.moved(batch, policy, True, LONE) == kl | (
            {"legal_mass": pytest.approx(0.25)} if constrained else {}
        )
        assert Batch.moved(batch, policy, False, LONE) == kl
    assert asked == [(read, True), (read, False), (read, False), (read, False)]
