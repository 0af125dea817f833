"""Alarms: each is raised by its own sign after its patience, once, and by nothing else; what a run does about it."""

import json
import random
from pathlib import Path

import pytest
from tiny_runs import rows, train

import train_ppo
from training import alarms
from training.alarms import ALARMS, respond, watch
from training.config import PPOConfig

QUIET = {"entropy": 1.0, "legal_mass": 0.9, "update_kl": 0.01, "logprob_gap_mean": 0.001, "explained_variance": 0.3,
         "grad_norm": 1.0, "score_mean": 0.7, "updates": 4.0, "opponents": {"random": 8}, "value_loss": 0.6,
         "games": 8, "truncated": 0, "failed": 0}  # fmt: skip
SIGNS = {
    "entropy": {"entropy": 0.04}, "legal_mass": {"legal_mass": 0.4}, "kl": {"update_kl": 0.31},
    "kl_average": {"kl_average": 0.51}, "logprob_gap": {"logprob_gap_mean": 0.21},
    "explained_variance": {"explained_variance": -0.6},
    "grad_norm": {"grad_norm": 50.0}, "score_drop": {"score_mean": 0.0},
    "nothing_trained": {"updates": 0.0}, "truncated": {"truncated": 5, "score_mean": 0.7 * 3 / 8},
}  # fmt: skip
PATIENCE = {alarm.name: alarm.patience for alarm in ALARMS}
# Just short of a sign; the last two are more than it is, after fifty steps of 1.
NEARLY = {"entropy": 0.051, "update_kl": 0.29, "kl_average": 0.49, "logprob_gap_mean": 0.19, "legal_mass": 0.46,
          "explained_variance": -0.49, "grad_norm": 9.5, "score_mean": 0.51, "truncated": 4}  # fmt: skip


def raised(rows_of_run, memory=None):
    """Step (from 1) and name of every alarm."""
    memory = {} if memory is None else memory
    return [(i, alarm.name) for i, row in enumerate(rows_of_run, 1) for alarm in watch(row, memory)]


def test_a_healthy_run_raises_none():
    assert raised([QUIET | {"score_mean": 0.7 - 0.1 * (i % 2), "grad_norm": 1 + i % 3} for i in range(300)]) == []


@pytest.mark.parametrize("name", sorted(PATIENCE))
def test_each_sign_raises_its_alarm_after_its_patience_and_once(name):
    assert set(SIGNS) == set(PATIENCE)
    bad = QUIET | SIGNS[name]
    patience = PATIENCE[name]
    found = raised([QUIET] * 50 + [bad] * 60)
    assert [alarm for _, alarm in found] == [name]
    # Running means fall and rise slowly: 0.7 * 0.95^n < 0.7 - 0.2, and 0.4 + 0.5 * 0.95^n < 0.9 / 2, from these n on.
    if first := {"score_drop": 7, "legal_mass": 45}.get(name):
        assert found[0][0] == 50 + first + patience - 1
        return
    assert found[0][0] == 50 + patience
    assert raised([QUIET] * 50 + [bad] * (patience - 1) + [QUIET] * 3 + [bad] * (patience - 1)) == []


@pytest.mark.parametrize("metric", NEARLY)
def test_what_is_nearly_a_sign_raises_nothing(metric):
    assert raised([QUIET] * 50 + [QUIET | {metric: NEARLY[metric]}] * 60) == []


def test_a_critic_that_is_right_is_not_blamed_for_returns_that_hardly_vary():
    """Where all games end alike there is nothing to explain: the critic was called worse than a constant."""
    assert raised([QUIET] * 9 + [QUIET | {"explained_variance": -10.8, "value_loss": 0.0014}] * 60) == []


def test_games_that_are_cut_off_are_told_as_that_and_are_no_collapse():
    longer = [QUIET | {"truncated": n, "score_mean": 0.7 * (8 - n) / 8} for n in (1, 2, 3, 4)]
    assert raised([QUIET] * 50 + [row for row in longer for _ in range(60)]) == []
    assert raised([QUIET] * 50 + [QUIET | {"truncated": 8, "score_mean": 0.0}] * 60) == [(55, "truncated")]
    assert raised([QUIET | {"failed": 4, "truncated": 2}] * 60) == []
    assert raised([QUIET | {"failed": 4, "truncated": 3}] * 60) == [(5, "truncated")]


def test_a_game_of_little_legal_mass_is_no_collapse_and_one_of_much_no_best():
    """A step's reading is of one game or two; those of another game were called a collapse of it."""
    found = []
    for seed in range(20):
        rng = random.Random(seed)
        drawn = [QUIET | {"legal_mass": rng.choice([0.97, 0.9, 0.8, 0.5, 0.25, 0.1, 0.02])} for _ in range(1000)]
        found += raised(drawn)
    assert len(found) <= 2  # in 20,000 steps; 147 where the reading itself was compared
    assert raised([QUIET | {"legal_mass": 1.0}, *[QUIET | {"legal_mass": 0.3}] * 60]) == []
    assert {name for _, name in raised([*drawn, *[QUIET | {"legal_mass": 0.1}] * 60])} == {"legal_mass"}


def test_patience_and_actions_are_those_of_the_manual():
    text = (Path(train_ppo.__file__).parent / "docs" / "metrics.md").read_text().split("## Alarms")[1].split("## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    told = {name: (int(steps), act or "warn") for name, _, steps, _, act in lines[2:]}
    assert told == {alarm.name: (alarm.patience, alarm.action) for alarm in ALARMS}


def test_an_alarm_is_raised_again_after_it_was_quiet():
    bad = QUIET | SIGNS["kl"]
    assert raised([QUIET, *[bad] * 4, QUIET, *[bad] * 4]) == [(4, "kl"), (9, "kl")]


def test_a_base_that_never_answered_legally_has_nothing_to_lose():
    masses = [1e-5, 1e-7] * 30 + [0.09] + [1e-3] * 30
    assert raised([QUIET | {"legal_mass": mass} for mass in masses]) == []


def test_a_new_stage_is_no_collapse():
    first, second = QUIET | {"score_mean": 0.9}, QUIET | {"score_mean": 0.2}
    assert raised([*[first] * 50, *[second] * 60]) != []
    assert raised([*[first] * 49, first | {"stage_change": "hard"}, *[second] * 60]) == []
    lost = QUIET | {"score_mean": 0.0}  # the new stage's mean is its own: 0.9 * 0.95^n < 0.9 - 0.2 from n = 5 on
    steps = [*[first] * 29, first | {"stage_change": "hard"}, *[first] * 25, *[lost] * 40]
    assert raised(steps) == [(55 + 5 + PATIENCE["score_drop"] - 1, "score_drop")]


def test_past_selves_who_grow_stronger_are_no_collapse():
    """The score falls by nature as each new past self joins; against fixed opponents alone it would be one."""
    easy, hard = QUIET | {"score_mean": 0.9}, QUIET | {"score_mean": 0.5}
    past = {"opponents": {"random": 4, "past:step-000100": 4}}
    assert raised([*[easy] * 50, *[hard] * 60]) != []
    assert raised([*[easy | past] * 50, *[hard | past] * 60]) == []
    assert raised([*[easy] * 50, *[hard | past] * 60]) == []
    assert raised([*[easy] * 50, hard | past, *[hard] * 60]) == []  # what was best before them is no measure after


def test_a_stage_that_changes_in_a_step_that_trained_nothing_is_no_collapse():
    first, second = QUIET | {"entropy": 3.0, "score_mean": 0.9}, QUIET | {"entropy": 0.1, "score_mean": 0.4}
    assert raised([*[first] * 49, first | {"updates": 0.0, "stage_change": "small"}, *[second] * 60]) == []


def raised_with(memory, mode, rows_of_run):
    """Steps at which ``respond`` raised something."""
    noted = [dict(row, step=i) for i, row in enumerate(rows_of_run, 1)]
    for row in noted:
        assert respond(row, memory, 1.0, PPOConfig(alarms=mode)) == 1.0
    return [(row["step"], name) for row in noted for name in row.get("alarms", ())]


def test_what_changes_while_alarms_are_off_is_no_collapse_when_they_are_on_again():
    easy, hard = QUIET | {"score_mean": 0.9}, QUIET | {"score_mean": 0.4}
    memory = {}
    assert raised_with(memory, "warn", [easy] * 50) == []
    assert raised_with(memory, "off", [easy | {"stage_change": "hard"}, *[hard] * 100]) == []
    assert raised_with(memory, "act", [hard] * 60) == []


def test_what_went_wrong_while_alarms_were_off_is_told_when_they_are_on_again():
    memory, silent = {}, QUIET | SIGNS["entropy"]
    assert raised_with(memory, "off", [*[QUIET] * 20, *[silent] * 20]) == []
    assert raised_with(memory, "warn", [silent] * 20) == [(PATIENCE["entropy"], "entropy")]


def test_steps_that_trained_nothing_are_told_though_they_have_no_other_metric():
    nothing = {"updates": 0.0, "opponents": {"random": 8}, "score_mean": 0.5}
    assert raised([nothing] * 9) == [(PATIENCE["nothing_trained"], "nothing_trained")]


def test_a_game_of_fewer_answers_is_no_collapse_of_the_entropy_either():
    first, second = QUIET | {"entropy": 3.0, "legal_mass": 0.9}, QUIET | {"entropy": 0.1, "legal_mass": 0.3}
    assert {name for _, name in raised([*[first] * 50, *[second] * 60])} == {"entropy", "legal_mass"}
    assert raised([*[first] * 49, first | {"stage_change": "small"}, *[second] * 60]) == []


@pytest.mark.parametrize("first", [1.0, 0.75])
def test_luck_in_the_first_steps_is_no_best(first):
    """Eight games a step, as the default has: the first steps say little."""
    assert raised([QUIET | {"score_mean": first}] * 2 + [QUIET | {"score_mean": 0.5}] * 60) == []
    draw = random.Random(0)
    for _ in range(50):
        scores = [sum(draw.random() < 0.5 for _ in range(8)) / 8 for _ in range(200)]
        assert raised([QUIET | {"score_mean": score} for score in scores]) == []


def test_luck_of_few_games_a_step_is_no_collapse_in_a_long_run_and_a_collapse_is_one():
    draw = random.Random(0)

    def play(chance, steps):
        return [QUIET | {"score_mean": sum(draw.random() < chance for _ in range(4)) / 4} for _ in range(steps)]

    assert raised(play(0.5, 20_000)) == []
    [(step, name)] = raised(play(0.75, 300) + play(0.0, 100))
    assert (name, step <= 300 + 25) == ("score_drop", True)


def test_a_first_step_without_decisions_does_not_silence_the_entropy():
    steps = [QUIET | {"entropy": 0.0}, *[QUIET] * 5, *[QUIET | SIGNS["entropy"]] * 20]
    assert [name for _, name in raised(steps)] == ["entropy"]


def test_models_that_were_never_legal_and_rows_without_the_metric_are_no_alarm():
    never = QUIET | {"legal_mass": 1e-6}
    free = {key: value for key, value in QUIET.items() if key not in ("legal_mass", "logprob_gap_mean")}
    assert raised([never] * 50) == raised([free] * 50) == []


# ------------------------------------------------------------------------------------------------------- in a run


def alarmed(monkeypatch, name, **changes):
    """Let one alarm see its sign in every step."""
    changed = [a._replace(sign=lambda row, m: True, patience=2, **changes) if a.name == name else a for a in ALARMS]
    monkeypatch.setattr(alarms, "ALARMS", tuple(changed))


def test_a_warning_is_in_the_log_and_in_the_row(tmp_path, monkeypatch, capsys):
    alarmed(monkeypatch, "kl")
    assert train(tmp_path) == 0
    assert [row.get("alarms") for row in rows(tmp_path)][:3] == [None, ["kl"], None]
    assert "step 2: alarm kl: one step moves the policy too far" in capsys.readouterr().err
    rates = [row["learning_rate"] for row in rows(tmp_path)]
    assert rates[2] > 0.7 * rates[1]


def test_an_alarm_may_slow_the_run_down(tmp_path, monkeypatch):
    alarmed(monkeypatch, "kl")
    for mode in ("act", "off"):
        (tmp_path / mode).mkdir()
        assert train(tmp_path / mode, "--set", f"ppo.alarms={mode}") == 0
    acted, off = ([row["learning_rate"] for row in rows(tmp_path / mode)] for mode in ("act", "off"))
    assert acted[:2] == off[:2]
    assert acted[2:] == pytest.approx([0.5 * rate for rate in off[2:]])


def test_an_alarm_slows_a_run_down_to_the_least_scale_and_no_further(monkeypatch):
    alarmed(monkeypatch, "kl")
    scale, memory = 1.0, {}
    for step in range(60):
        memory["kl" + alarms.COUNT] = 1  # raised in every step
        scale = respond(QUIET | {"step": step}, memory, scale, PPOConfig(alarms="act"))
    assert scale == alarms.LEAST_SCALE > 0


@pytest.mark.parametrize("mode", ["warn", "act", "off"])
def test_an_alarm_ends_a_run_where_it_may_act_alone(mode):
    fatal = alarms.fatal({"alarms": ["score_drop"]}, PPOConfig(alarms=mode))
    assert (fatal is not None) == (mode == "act")


def test_an_alarm_may_stop_the_run_with_a_checkpoint(tmp_path, monkeypatch, capsys):
    alarmed(monkeypatch, "score_drop")
    assert train(tmp_path, "--set", "ppo.alarms=act", "ppo.eval_freq=2") == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("training failed: after step 2: alarm score_drop: the score has fallen far below")
    assert message.endswith("checkpoint-000002")
    manifest = json.loads((tmp_path / "run/checkpoint-000002/manifest.json").read_text())
    assert manifest["score"] is not None  # it was evaluated before


def test_what_alarms_remember_survives_a_resume(tmp_path):
    for name, words in (("whole", []), ("halves", ["--set", "ppo.num_train_steps=3"])):
        (tmp_path / name).mkdir()
        assert train(tmp_path / name, "--set", "ppo.lr_final=1.0", *words) == 0
    resumed = ["--resume", "--force-config", "--set", "ppo.lr_final=1.0"]
    assert train(tmp_path / "halves", *resumed) == 0
    states = [json.loads((tmp_path / name / "run/checkpoint-000006/trainer_state.json").read_text())
              for name in ("whole", "halves")]  # fmt: skip
    assert states[0]["alarms"] == states[1]["alarms"]
    assert states[0]["alarms"]["score_rows"] == 6
