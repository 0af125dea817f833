"""Learning from whole games: what targets are made of, that the update reaches them, and where it is refused."""

import json
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import KUHN, LEDUC, micro_config, micro_file, tiny_policy
from tiny_runs import final_bytes, program, rows, summary, train

import games
import train_ppo
from env_wrapper import Task
from envs import exact, openspiel
from envs.openspiel import load_game
from evaluation.measure import exact_table
from games import CONFIGS_PER_GAME, NAMES
from scripts.exploit import train as exploit
from training import memory, preflight
from training.ranks import LONE
from training.sweep import LEAST, Sweeps

ALONE = [{"name": "self-play", "games": [[KUHN, KUHN]], "opponent": "self"}]
SWEEP = {"sweep": 1.0, "init_kl_coef": 0.0, "magnet_coef": 0.1, "entropy_coef": 0.05, "batch_size": 2,
         "mini_batch_size": 2, "ppo_epochs": 4, "target_kl": None, "max_grad_norm": 100.0}  # fmt: skip
GOOFSPIEL = NAMES.index("goofspiel_small") * CONFIGS_PER_GAME


def swept(folder, task_ids=(KUHN,), **ppo):
    """A policy, the knobs, and the batch of these games."""
    policy = tiny_policy(folder, ppo=SWEEP | ppo)
    config = micro_config(folder, ppo=SWEEP | ppo)
    if ppo.get("follows"):
        policy.follow(1)
    return policy, config, Sweeps(policy, config.env).batch([Task(t) for t in task_ids], config.ppo, LONE)


def by_position(batch):
    """(Prompt, then answers) -> indices of its answers."""
    places = defaultdict(list)
    for i, sequence in enumerate(batch.sequences):
        places[tuple(sequence.ids[: sequence.decisions[0].start])].append(i)
    return places


@pytest.mark.parametrize("task_id", [KUHN, LEDUC, GOOFSPIEL])
def test_all_answers_in_all_positions_are_there_with_their_probabilities(tmp_path, task_id):
    policy, config, batch = swept(tmp_path, [task_id])
    table = exact_table(policy, config.env, task_id)
    choices = [probs for probs in table.values() if len(probs) > 1]
    assert len(batch.sequences) == sum(map(len, choices))
    assert sorted(batch.old_logprobs_M.exp().tolist()) == pytest.approx(
        sorted(p for probs in choices for p in probs.values()), abs=1e-5
    )
    assert torch.equal(batch.weights_M, batch.old_logprobs_M.exp())
    for weights_A in batch.weights_M.split([*map(len, choices)]):
        assert float(weights_A.sum()) == pytest.approx(1, abs=1e-5)
    assert all(sequence.decisions[0].stop == len(sequence.ids) for sequence in batch.sequences)


def test_targets_are_a_step_of_mirror_descent(tmp_path):
    policy, config, batch = swept(tmp_path, entropy_coef=0.3, sweep=0.7, magnet_coef=0.0)
    table = exact_table(policy, config.env, KUHN)
    values = exact.answer_values(load_game(KUHN), table)
    expected = []
    for key, probs in table.items():
        p = torch.tensor([*probs.values()])
        worth = torch.tensor([*values[key].values()]) / 2  # kuhn_poker pays up to 2 chips
        aim = (p.log() + 0.7 * (worth - 0.3 * p.log())).log_softmax(0)
        expected += zip(p.log().tolist(), aim.tolist(), [float((p * worth).sum())] * len(p), strict=True)
    found = zip(batch.old_logprobs_M.tolist(), batch.targets_M.tolist(), batch.returns_M.tolist(), strict=True)
    for one, other in zip(sorted(found), sorted(expected), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_the_magnet_pulls_to_the_moving_average(tmp_path):
    policy = tiny_policy(tmp_path, ppo=SWEEP)
    config, tasks = micro_config(tmp_path, ppo=SWEEP | {"entropy_coef": 0.0, "magnet_coef": 0.5}), [Task(KUHN)]
    sweeps = Sweeps(policy, config.env)
    alone = sweeps.batch(tasks, config.ppo, LONE)
    policy.follow(1)
    average = alone.old_logprobs_M
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    moved = sweeps.batch(tasks, config.ppo, LONE)
    gap = moved.old_logprobs_M - average
    assert gap.abs().max() > 0.01
    free = sweeps.batch(tasks, micro_config(tmp_path, ppo=SWEEP | {"entropy_coef": 0.0, "magnet_coef": 0.0}).ppo, LONE)
    for at in by_position(moved).values():
        pulled = (free.targets_M[at] - 0.5 * gap[at]).log_softmax(0)
        assert moved.targets_M[at].tolist() == pytest.approx(pulled.tolist(), abs=1e-5)
    assert moved.kl_average == pytest.approx(float((moved.weights_M * gap).sum() / moved.weights_M.sum()), abs=1e-6)
    assert free.kl_average == 0


def test_nothing_is_asked_to_be_rarer_than_the_limit(tmp_path):
    *_, batch = swept(tmp_path, sweep=1e4, entropy_coef=0.0)
    assert float(batch.targets_M.min()) == LEAST
    assert all(float(batch.targets_M[at].max()) > -0.1 for at in by_position(batch).values())


def test_the_update_moves_log_probabilities_to_their_targets(tmp_path):
    policy, config, batch = swept(tmp_path, ppo_epochs=60, vf_coef=0.0, learning_rate=3e-3)
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=3e-3, weight_decay=0.0)
    stats = train_ppo.ppo_update(policy, optimizer, batch, config.ppo, (0,))
    assert stats["updates"] == 60
    first = float(((batch.old_logprobs_M - batch.targets_M) ** 2).sum() / 2 / batch.weights_M.sum())
    after = Sweeps(policy, config.env).batch([Task(KUHN)], config.ppo, LONE).old_logprobs_M
    left = float(((after - batch.targets_M) ** 2).sum() / 2 / batch.weights_M.sum())
    assert left < 0.02 * first
    assert stats["misfit"] < first
    kl = float((batch.weights_M * (batch.old_logprobs_M - after)).sum() / batch.weights_M.sum())
    assert batch.moved(policy, False, LONE)["update_kl"] == pytest.approx(kl, rel=1e-3)


def test_the_legal_mass_is_that_of_positions_not_of_answers(tmp_path):
    """In each an unconstrained answer has one, however many legal answers there are and whatever they are."""
    policy, _, batch = swept(tmp_path, [KUHN, LEDUC])
    mass_M = LONE.score(policy, batch.sequences, legal_mass=True).legal_mass.exp()
    places = by_position(batch).values()
    mean = sum(float((batch.weights_M[at] * mass_M[at]).sum()) for at in places) / len(places)
    assert abs(mean / float(mass_M.mean()) - 1) > 0.02
    assert batch.moved(policy, True, LONE)["legal_mass"] == pytest.approx(mean, rel=1e-4)


def test_positions_whose_updates_were_not_finite_can_be_looked_at(tmp_path):
    """They belong to no game, of which the step may have fewer than units."""
    *_, batch = swept(tmp_path)
    batch.dump(tmp_path / "bad_batch.json", 1, [])
    found = json.loads((tmp_path / "bad_batch.json").read_text())["sequences"]
    assert [target for row in found for target in row["targets"]] == batch.targets_M.tolist()
    assert not any("task" in row for row in found)


@pytest.fixture
def own(monkeypatch):
    """Task id of a second kuhn_poker; the next ones are leduc_poker with suits and without them."""

    def params(config_id):
        return {} if config_id == 0 else {"suit_isomorphism": config_id == 2}

    kuhn, leduc = (games.GAMES[task_id // CONFIGS_PER_GAME] for task_id in (KUHN, LEDUC))
    added = [replace(kuhn, name="own_kuhn", spiel_name="kuhn_poker"),
             replace(leduc, name="own_leduc", spiel_name="leduc_poker", params=params)]  # fmt: skip
    first = len(games.GAMES) * CONFIGS_PER_GAME
    monkeypatch.setattr(games, "GAMES", [*games.GAMES, *added])
    yield first
    openspiel.table.cache_clear()


def test_games_that_openspiel_knows_as_one_and_variants_of_one_are_all_learnt(tmp_path, own):
    *_, batch = swept(tmp_path, [KUHN, own])
    assert len(batch.sequences) == 2 * 2 * 12
    assert len(by_position(batch)) == 2 * 12
    leduc = own + CONFIGS_PER_GAME
    alone = [len(swept(tmp_path, [task_id])[2].sequences) for task_id in (leduc + 1, leduc + 2)]
    assert alone[0] > alone[1] > 0
    assert len(swept(tmp_path, [leduc + 1, leduc + 2])[2].sequences) == sum(alone)


def test_the_bonus_is_in_the_targets_and_counts_once(tmp_path, monkeypatch):
    *_, batch = swept(tmp_path)
    coefs = []
    monkeypatch.setattr(train_ppo, "ppo_update", lambda _, __, batch, ppo, *more: coefs.append(ppo.entropy_coef))
    trainer = train_ppo.Trainer(micro_config(tmp_path, ppo=SWEEP | {"entropy_coef": 0.5}), tmp_path / "run")
    for targets_M in (batch.targets_M, None):
        trainer.update(replace(batch, targets_M=targets_M))
    assert coefs == [0.0, 0.5]


def test_the_bonus_of_the_targets_falls_with_the_steps(tmp_path, monkeypatch):
    coefs, batch = [], Sweeps.batch
    monkeypatch.setattr(
        Sweeps, "batch", lambda self, tasks, ppo, *m: coefs.append(ppo.entropy_coef) or batch(self, tasks, ppo, *m)
    )
    knobs = SWEEP | {"entropy_coef": 0.5, "entropy_final": 0.2, "num_train_steps": 3, "ppo_epochs": 1}
    assert train(tmp_path, ppo=knobs, curriculum={"stages": ALONE}) == 0
    assert coefs == pytest.approx([0.5, 0.3, 0.1])


def test_each_game_has_values_of_its_own(tmp_path):
    *_, both = swept(tmp_path, [LEDUC, KUHN, LEDUC])
    alone = [swept(tmp_path, [task_id])[2] for task_id in sorted((KUHN, LEDUC))]
    for name in ("targets_M", "returns_M", "old_logprobs_M"):
        found = torch.cat([getattr(batch, name) for batch in alone])
        assert torch.allclose(getattr(both, name), found, atol=1e-4), name


@pytest.mark.parametrize(("size", "updates"), [(8, 1), (2, 4), (1, 8)])
def test_minibatches_hold_their_share_of_whole_positions(tmp_path, size, updates):
    policy, config, batch = swept(tmp_path, [LEDUC], batch_size=8, mini_batch_size=size, ppo_epochs=3)
    places = by_position(batch).values()
    units = [{batch.unit[i] for i in at} for at in places]
    assert all(len(unit) == 1 for unit in units)
    counts = [units.count({n}) for n in range(8)]
    assert sum(counts) == len(places)
    assert max(counts) - min(counts) <= 1
    beside = [set[int]().union(*units[i : i + 8]) for i in range(len(units) - 7)]
    assert all(len(found) == 8 for found in beside), "positions beside each other are much alike"
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-4)
    assert train_ppo.ppo_update(policy, optimizer, batch, config.ppo, (0,))["updates"] == 3 * updates


@pytest.mark.parametrize(("steps", "left"), [(12, 0.45), pytest.param(40, 0.1, marks=pytest.mark.slow)])
def test_a_run_comes_nearer_to_an_equilibrium_and_goes_on_exactly(tmp_path, steps, left):
    knobs = SWEEP | {"num_train_steps": steps, "save_freq": steps // 2, "learning_rate": 5e-3, "lr_final": 0.1,
                     "entropy_final": 0.1, "eval_exact": "always", "eval_games": 2, "ppo_epochs": 8}  # fmt: skip
    assert train(tmp_path, ppo=knobs, curriculum={"stages": ALONE}) == 0
    game = summary(tmp_path)["games"]["kuhn_poker"]
    assert game["nash_conv_before"] > 0.5
    assert game["nash_conv"] < left
    found = rows(tmp_path)
    assert [row["games"] for row in found] == [2] * steps
    assert {row["decisions"] for row in found} == {24}
    assert found[-1].keys() >= {"misfit", "kl_average", "update_kl", "entropy"}
    whole = final_bytes(tmp_path, steps)
    assert program("--resume", str(tmp_path / "run" / f"checkpoint-{steps // 2:06d}")) == 0
    assert rows(tmp_path) == found
    assert final_bytes(tmp_path, steps) == whole


def test_a_best_response_to_such_a_player_is_trained_by_games(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(exploit, "_train", lambda config, *_: begun.append(config.ppo) or 0.5)
    args = SimpleNamespace(exploit=1, exploit_steps=5, seed=0)
    for sweep in (1.0, 0.0):
        ppo = micro_config(tmp_path, ppo=SWEEP | {"sweep": sweep}).ppo
        config = micro_config(tmp_path, ppo=SWEEP | {"sweep": sweep} | exploit.how_to_respond(ppo)[1]["ppo"])
        exploit.best_response(config, tmp_path, [(KUHN, KUHN)], args, tmp_path / "out", None)
    swept, usual = begun
    assert (swept.sweep, swept.batch_size, swept.mini_batch_size, swept.ppo_epochs) == (0, 512, 64, 1)
    assert (usual.sweep, usual.batch_size, usual.mini_batch_size, usual.ppo_epochs) == (0, 2, 2, 4)


def test_memory_is_counted_of_whole_passes(tmp_path):
    parts = []
    for sweep in (1.0, 0.0):
        config = micro_config(tmp_path, ppo=SWEEP | {"sweep": sweep}, curriculum={"stages": ALONE})
        architecture, parameters, chat = preflight.look(config)
        measured = preflight.measure_prompts(config, chat)
        parts.append(memory.estimate(config, parameters, architecture, measured)["update: layers"])
    assert parts[0] > 50 * parts[1] > 0


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"curriculum": {"stages": [ALONE[0] | {"opponent": "random"}]}}, "expected the opponent self in every stage"),
        ({"curriculum": {"stages": [ALONE[0] | {"opponent": {"self": 1, "past": 1}}]}}, "expected the opponent self"),
        ({"curriculum": {"stages": [ALONE[0] | {"games": ["connect_four"]}]}}, "connect_four has no exact values"),
        ({"curriculum": {"stages": [ALONE[0] | {"games": ["tic_tac_toe"]}]}, "env": {"history_turns": "all"}},
         "positions of tic_tac_toe() show the turns before"),
        ({"env": {"answer_mode": "free"}}, "only for games that are played here with constrained answers"),
        ({"ppo": {"init_kl_coef": 0.1}}, "ppo.init_kl_coef: does nothing with ppo.sweep"),
        ({"ppo": {"state_coef": 0.1}}, "ppo.state_coef: does nothing with ppo.sweep"),
        ({"ppo": {"context_grad": False}}, "ppo.context_grad = false: with ppo.sweep no games were played that read"),
        ({"ppo": {"max_seq_length": 17}, "curriculum": {"stages": [ALONE[0] | {"games": ["leduc_poker"]}]}},
         "ppo.max_seq_length = 17: a position is longer"),
    ],
)  # fmt: skip
def test_what_does_not_suit_it_is_refused_in_one_line(tmp_path, capsys, sections, told):
    given = {"curriculum": {"stages": ALONE}} | sections | {"ppo": SWEEP | sections.get("ppo", {})}
    assert train_ppo.main(["--config", micro_file(tmp_path, **given), "--output-dir", str(tmp_path / "run")]) == 2
    assert told in capsys.readouterr().err.splitlines()[-1]
