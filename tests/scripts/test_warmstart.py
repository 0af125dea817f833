"""Warm starts: the teacher plays what it says it plays, written as the policy's own games are, and is learnt from."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import KUHN, LEDUC, base_model, micro_config, micro_file, tiny_policy

from curriculum import Curriculum, eval_tasks, pool
from env_wrapper import EnvConfig, Query, Task, play
from envs import exact
from envs.openspiel import OpenSpielEnv, load_game
from envs.trace.env import expected_output
from evaluation.players import Roster
from games import CONFIGS_PER_GAME, NAMES
from policy.model import identity
from scripts import evaluate, merge, warmstart
from scripts.warmstart import Teacher, _tasks, check_teacher, clone, main
from train_ppo import Trainer
from utils import ConfigError, read_json, write_manifest

TTT, GOOFSPIEL = (NAMES.index(name) * CONFIGS_PER_GAME for name in ("tic_tac_toe", "goofspiel_small"))


def taught(policy, task_ids, spec, games=20, explore=0.0, history=0, opponent="random"):
    """Episodes of the teacher, and the teacher."""
    tasks = [replace(t, opponent=opponent) for task_id in task_ids for t in eval_tasks([(task_id, task_id)], games, 1)]
    tasks = [replace(t, index=i) for i, t in enumerate(tasks)]
    teacher = Teacher(policy, tasks, spec, 0, explore, EnvConfig())
    return play(EnvConfig(prompt="compact", history_turns=history), teacher, tasks), teacher


def test_a_search_that_plays_tic_tac_toe_hardly_ever_loses(tmp_path):
    policy = tiny_policy(tmp_path)
    episodes, _ = taught(policy, [TTT], "mcts:100x1", games=10)
    assert sum(e.score for e in episodes) / len(episodes) > 0.9
    weak, _ = taught(policy, [TTT], "mcts:100x1", games=10, explore=0.99)
    assert sum(e.score for e in weak) / len(weak) < 0.8


def test_an_equilibrium_is_played_in_its_proportions(tmp_path):
    """Kuhn poker: the frequencies of the first move, by card, are those of the solved game."""
    game = load_game(KUHN)
    policy = exact.equilibrium_table(game, 100)
    tasks = [Task(KUHN, seed=0, index=i) for i in range(1000)]
    teacher = Teacher(tiny_policy(tmp_path), tasks, "cfr:100", 0, 0.0, EnvConfig())
    for card in range(3):
        history = [[-1, card], [-1, (card + 1) % 3]]
        state = game.new_initial_state()
        for _, action in history:
            state.apply_action(action)
        bets = 0
        for i in range(1000):
            query = Query(i, 0, [], {0: "Pass", 1: "Bet"}, (i, 0, 0, 1), history=history)
            bets += int(teacher._answer(query)[0])
        assert bets / 1000 == pytest.approx(policy[exact.info_key(state, 0)][1], abs=0.05)


@pytest.mark.parametrize("history", [0, "all"])
def test_games_are_written_as_the_policy_writes_its_own(tmp_path, history):
    """Tokens, positions and choices are those of a policy that gives the same answers."""
    policy = tiny_policy(tmp_path)
    episodes, _ = taught(policy, [LEDUC, TTT], "mcts:10x1", games=4, history=history)
    tasks = [e.task for e in episodes]
    moves = {}

    class Copying(Teacher):
        def _answer(self, query):
            return str(moves[query.rng_key]), True

    class Noting:
        def act(self, queries):
            actions = policy.act(queries)
            moves.update({q.rng_key: int(a.text) for q, a in zip(queries, actions, strict=True)})
            return actions

        release = staticmethod(policy.release)

    config = EnvConfig(prompt="compact", history_turns=history)
    own = play(config, Noting(), tasks)
    copied = play(config, Copying(policy, tasks, "mcts", 0, 0.0, config), tasks)
    for a, b in zip(own, copied, strict=True):
        assert a.info["history"] == b.info["history"]
        for seat, sequences in a.sequences.items():
            assert [s.ids for s in sequences] == [s.ids for s in b.sequences[seat]]
            for x, y in zip(sequences, b.sequences[seat], strict=True):
                assert [(d.start, d.stop, d.positions, d.chosen, d.allowed) for d in x.decisions] == [
                    (d.start, d.stop, d.positions, d.chosen, d.allowed) for d in y.decisions]  # fmt: skip


def test_moves_played_to_explore_are_not_learnt(tmp_path):
    policy = tiny_policy(tmp_path)

    def answers(explore):
        episodes, _ = taught(policy, [TTT], "mcts:10x1", explore=explore)
        decisions = sum(e.info["n_decisions"][seat] for e in episodes for seat in e.sequences)
        return sum(len(s.decisions) for e in episodes for q in e.sequences.values() for s in q), decisions

    learnt, asked = answers(0.0)
    assert learnt == asked
    learnt, asked = answers(0.5)
    assert 0.35 < learnt / asked < 0.65


# ------------------------------------------------------------------------------------------------------ the program


def test_a_warm_start_is_legal_and_better_and_ppo_goes_on_from_it(tmp_path, capsys):
    stages = {"curriculum": {"stages": [{"name": "only", "games": [[KUHN, KUHN]]}]}}
    config = micro_file(tmp_path, ppo={"eval_games": 40}, **stages)
    out = tmp_path / "warm"
    words = ["--config", config, "--teacher", "cfr:50", "--episodes", "300", "--epochs", "6", "--batch", "16"]
    assert main([*words, "--output", str(out)]) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"\ncfr:50: 256/300 games played \| ETA \d+m\d\ds\ncfr:50: 300/300 games played \| ETA 0m00s\n", text
    )
    assert text.count("evaluation: games: 0 of 40") == 2  # before and after
    assert text.count("| legal mass 0.") >= 19  # a line every twentieth of the updates
    assert re.search(r"ceiling: \S+ -> \S+", text)
    table = ["--games", "kuhn_poker", "--num_episodes", "20", "--exact", "--json", str(tmp_path / "exact.json")]
    assert evaluate.main(["--checkpoint", str(out), *table]) == 0
    [kuhn] = json.loads((tmp_path / "exact.json").read_text())["tables"][0]["results"]
    assert kuhn["nash_conv"] < 0.4  # the base: 0.59; uniform play: 11/12
    policy = tiny_policy(tmp_path, model={"adapter": str(out)}, **stages)
    assert policy.reference == "reference"
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 4
    capsys.readouterr()
    card = ["--checkpoint", str(out), "--output", str(tmp_path / "card"), "--adapter-only", "--dry-run"]
    assert merge.main(card) == 0
    told = capsys.readouterr().out
    assert "by the answers of another player (cfr:50)" in told
    assert "No step of PPO was made." in told
    again = ["--set", f"model.adapter={out}", "lora.r=2", "--output", str(tmp_path / "again")]
    assert main([*words, *again]) == 2
    assert "lora.r = 2: " in capsys.readouterr().err, "its own rank would be trained"
    assert not re.search(r"by PPO|No data set|\| steps \||did not reach its end|^- ppo", told, re.MULTILINE)
    assert read_json(out / "manifest.json")["base"] == identity(
        micro_config(tmp_path).model, policy.base, policy.tokenizer
    )
    evaluated = Roster([], [], 0, False, None).contestant(str(out))
    assert evaluated.player.adapter in evaluated.player.policy.peft_model.peft_config
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--output", str(out)])
    assert stopped.value.code == 2
    assert f"--output {out}: is there already" in capsys.readouterr().err


def test_two_with_one_output_keep_both(tmp_path, monkeypatch, capsys):
    """Both find the name free at their start; the later one to end must not replace the other's adapter. No secret."""
    config = micro_file(
        tmp_path, ppo={"eval_games": 2}, curriculum={"stages": [{"name": "one", "games": ["kuhn_poker"]}]}
    )
    out = tmp_path / "warm"

    def clone(*args):
        out.mkdir()
        (out / "adapter_model.safetensors").write_text("of another one")

    monkeypatch.setattr(warmstart, "clone", clone)
    monkeypatch.setenv("HF_TOKEN", "canary-0123456789")
    secret = ["--set", "env.env_url=http://127.0.0.1:9/canary-0123456789"]
    assert main(["--config", config, "--teacher", "cfr:5", "--episodes", "4", "--output", f"{out}/", *secret]) == 0
    assert "127.0.0.1:9/[redacted]" in (tmp_path / "warm-2" / "run_config.json").read_text()
    assert (out / "adapter_model.safetensors").read_text() == "of another one"
    assert (tmp_path / "warm-2" / "adapter_model.safetensors").is_file()
    assert f"adapter: {out}-2\n" in capsys.readouterr().out


def test_what_it_starts_from_is_found_at_home_and_from_anywhere_afterwards(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # no shell writes the path in --set model.adapter=~/adapter out
    monkeypatch.chdir(Path(base_model()).parent)
    given = {"model": {"model_name": Path(base_model()).name, "adapter": "~/adapter"}}
    tiny_policy(tmp_path).save(tmp_path / "adapter")
    words = ["--config", micro_file(tmp_path, ppo={"eval_games": 2}, **given), "--set", "games=kuhn_poker"]
    words += ["--teacher", "cfr:5", "--episodes", "4", "--epochs", "1"]
    assert main([*words, "--output", str(tmp_path / "warm")]) == 0
    model = read_json(tmp_path / "warm" / "run_config.json")["model"]
    assert (model["model_name"], model["adapter"]) == (base_model(), str(tmp_path / "adapter"))


def test_an_adapter_that_was_ruined_is_not_kept(tmp_path, monkeypatch, capsys):
    def ruin(policy, *_):
        next(iter(policy.trainable().values())).data.fill_(torch.nan)
        return torch.nan, 0.0

    monkeypatch.setattr(warmstart, "with_less_memory", ruin)
    words = ["--config", micro_file(tmp_path, ppo={"eval_games": 2}), "--set", "games=kuhn_poker", "--epochs", "1"]
    assert main([*words, "--teacher", "cfr:5", "--episodes", "4", "--output", str(tmp_path / "out")]) == 2
    assert "the weights are ruined" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("during", ["evaluate", "play", "_backward"])
def test_an_interrupt_ends_the_picture_which_hides_the_terminals_cursor(tmp_path, monkeypatch, during):
    opened, closed = [], []

    class Noted(warmstart.Console):
        def __init__(self, total):
            super().__init__(total)
            opened.append(self)

        def close(self):
            super().close()
            closed.append(self)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(warmstart, "Console", Noted)
    monkeypatch.setattr(warmstart, during, interrupted)
    stages = {"curriculum": {"stages": [{"name": "only", "games": [[KUHN, KUHN]]}]}}
    words = ["--config", micro_file(tmp_path, **stages), "--teacher", "cfr:5", "--episodes", "4"]
    assert main([*words, "--output", str(tmp_path / "warm")]) == 130
    assert opened
    assert opened[-1] in closed


def test_what_was_learnt_is_kept_when_the_last_evaluation_fails(tmp_path, monkeypatch, capsys):
    measured, failing = warmstart._measure, iter([False, True])

    def measure(*args):
        if next(failing):
            raise torch.OutOfMemoryError("out of memory")
        return measured(*args)

    monkeypatch.setattr(warmstart, "_measure", measure)
    words = ["--config", micro_file(tmp_path, ppo={"eval_games": 2}), "--set", "games=kuhn_poker", "--epochs", "1"]
    words += ["--teacher", "cfr:5", "--episodes", "4", "--output", str(tmp_path / "out")]
    assert main(words) == 1
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    said = capsys.readouterr().out
    assert "cfr:5, 20% of its moves at random, played 4 games to their end, mean score" in said
    assert f"adapter: {tmp_path / 'out'}\ngo on:   python train_ppo.py" in said


def test_cloning_goes_on_in_smaller_batches_when_memory_runs_out(tmp_path, monkeypatch):
    policy, config = tiny_policy(tmp_path), micro_config(tmp_path)
    episodes, _ = taught(policy, [KUHN], "cfr:5")
    sequences = [s for e in episodes for seat in e.sequences.values() for s in seat if s.decisions]
    real, failing, read, store = policy.evaluate_batch, iter([True]), [], policy.reader.store
    store.hold(store.take(10), -1)

    def evaluate_batch(batch, **options):
        assert not len(store.layers[0][0]), "what an evaluation has read takes no room"
        if next(failing, False):
            raise torch.OutOfMemoryError
        read.append(len(batch))
        return real(batch, **options)

    monkeypatch.setattr(policy, "evaluate_batch", evaluate_batch)
    args = SimpleNamespace(learning_rate=1e-3, epochs=1, batch=len(sequences), legal_mass=1.0)
    budget = policy.tokens_per_batch
    clone(policy, sequences, config, args)
    assert policy.tokens_per_batch == budget // 2
    assert sum(read) == len(sequences)


def test_every_stage_is_taught(tmp_path, monkeypatch):
    stages = [{"name": game, "games": [game]} for game in ("kuhn_poker", "leduc_poker")]
    seen: list[int] = []

    class Noting(Teacher):
        def __init__(self, policy, tasks, *rest):
            seen.extend(task.task_id // CONFIGS_PER_GAME * CONFIGS_PER_GAME for task in tasks)
            super().__init__(policy, tasks, *rest)

    monkeypatch.setattr(warmstart, "Teacher", Noting)
    config = micro_file(tmp_path, ppo={"eval_games": 2}, curriculum={"stages": stages})
    words = ["--config", config, "--teacher", "cfr:5", "--episodes", "20", "--epochs", "1"]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    assert {task_id: seen.count(task_id) for task_id in seen} == {KUHN: 10, LEDUC: 10}


PROGRAMS = {
    "env": {"env_type": "trace", "prompt": "compact", "answer_mode": "free", "protocol": "affinetes"},
    "curriculum": {"stages": [{"name": "sums", "games": [[0, 19_999_999]]}]},
    "ppo": {"eval_games": 2, "max_new_tokens": 24},
}


def test_of_programs_what_they_print_is_taught(tmp_path):
    """A stop is part of the answer where there is room for it; an answer that does not fit is none."""
    policy, env = tiny_policy(tmp_path, **PROGRAMS), EnvConfig(**PROGRAMS["env"])
    tasks = [Task(level * 10_000_000 + i, index=i) for level in (0, 1) for i in range(4)]
    for most in (24, 1):
        policy.max_new_tokens = most
        episodes = play(env, Teacher(policy, tasks, "output", 0, 0.0, env), tasks)
        for episode in episodes:
            answer = policy.chat.encode(expected_output(env, episode.task))
            assert episode.outcome == ("finished" if len(answer) <= most else "truncated")
            for sequence in episode.sequences.get(0, []):
                assert episode.score == 1
                [decision] = sequence.decisions
                assert decision.allowed is None
                assert decision.chosen == [*answer, policy.chat.end_id][:most]
                assert sequence.ids[-1] == policy.chat.end_id
        outcomes = {episode.outcome for episode in episodes}
        assert outcomes == ({"finished"} if most == 24 else {"finished", "truncated"})


def test_a_run_plays_none_of_the_tasks_that_were_taught(tmp_path):
    """It played exactly those, in their order."""
    config = micro_config(tmp_path, **PROGRAMS)
    run = Curriculum(config.curriculum, config.run.seed)
    played = {(task.task_id, task.seed) for task in map(run.next, range(200))}
    assert not played & {(task.task_id, task.seed) for task in _tasks(config.curriculum, config.run.seed, 200)}


def test_programs_that_do_not_fit_are_told(tmp_path, capsys):
    config = micro_file(tmp_path, **PROGRAMS)
    words = ["--config", config, "--episodes", "8", "--epochs", "1", "--output", str(tmp_path / "out"), "--set"]
    told = "games were cut off: longer than ppo.max_seq_length or ppo.max_new_tokens\n"
    assert main([*words, "ppo.max_seq_length=30"]) == 2
    assert capsys.readouterr().err.endswith(f"error: 8 of 8 {told}")
    assert main([*words, "ppo.max_seq_length=66"]) == 0
    assert re.search(rf"[1-7] of 8 {told}", capsys.readouterr().out)


def test_a_model_that_never_answered_learns_to(tmp_path, capsys):
    out, config = tmp_path / "out", micro_file(tmp_path, **PROGRAMS)
    words = ["--config", config, "--episodes", "64", "--epochs", "4", "--batch", "16", "--learning-rate", "1e-2"]
    assert main([*words, "--output", str(out)]) == 0
    text = capsys.readouterr().out
    lost = [float(x) for x in re.findall(r"-log p of the teacher's answer (\S+)", text)]
    assert sum(lost[-4:]) < 0.8 * sum(lost[:4]), "of the same answers, in the last epoch and the first"
    assert "legal mass" not in text
    assert main([*words[:-1], "1e-2", "--teacher", "mcts", "--output", str(tmp_path / "other")]) == 2
    assert "--teacher mcts: for programs it must be output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("env.answer_mode=constrained", 'env.answer_mode = "constrained": expected "free" with programs'),
        ("ppo.max_new_tokens=1", "ppo.max_new_tokens = 1: too short for the output of level 1"),
        ("env.trace.source=nowhere", "env.trace: trace.source 'nowhere' is not there"),
        ("env.env_mode=url env.env_url=http://127.0.0.1:1 env.prompt=full", 'env.env_mode = "url": expected "local"'),
    ],
)
def test_programs_that_cannot_be_taught_are_told_before_a_model_is_loaded(tmp_path, capsys, monkeypatch, item, message):
    monkeypatch.setattr(warmstart, "load_policy", lambda config: pytest.fail("weights were loaded"))
    config = micro_file(tmp_path, **PROGRAMS)
    assert main(["--config", config, "--set", *item.split(), "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sections", "words", "message"),
    [
        (PROGRAMS, ["--explore", "0"], "--explore and --legal-mass: of games; leave them out with programs"),
        (PROGRAMS, ["--legal-mass", "1"], "--explore and --legal-mass: of games; leave them out with programs"),
        ({}, ["--set", "env.answer_mode=free"], 'env.answer_mode = "free": expected "constrained" with games'),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path, capsys, monkeypatch, sections, words, message):
    monkeypatch.setattr(warmstart, "load_policy", lambda config: pytest.fail("weights were loaded"))
    assert main(["--config", micro_file(tmp_path, **sections), "--output", str(tmp_path / "out"), *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(("spec", "game"), [("perfect", "hex_small"), ("cfr:2", "liars_dice_small")])
def test_a_teacher_of_the_first_configuration_alone_is_refused(spec, game):
    [ranges] = pool([game]).values()
    check_teacher(spec, [(ranges[0][0], ranges[0][0])], EnvConfig())
    with pytest.raises(ConfigError, match=f"--teacher: opponent {spec.partition(':')[0]} cannot play {game}: "):
        check_teacher(spec, ranges, EnvConfig())


def test_games_that_the_teacher_lost_to_a_failure_are_counted_and_no_score(tmp_path, monkeypatch, capsys):
    reset = OpenSpielEnv.reset

    def failing(self, task):
        if task.index < 0 and task.index % 2:  # not of an evaluation
            raise RuntimeError("no such\x1b luck")
        return reset(self, task)

    monkeypatch.setattr(OpenSpielEnv, "reset", failing)
    config = micro_file(tmp_path, ppo={"eval_games": 8})
    words = [
        "--config",
        config,
        "--teacher",
        "cfr:50",
        "--episodes",
        "40",
        "--epochs",
        "1",
        "--set",
        "games=kuhn_poker",
    ]
    warmstart.main([*words, "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "20 of 40 games failed; the first: RuntimeError: no such\\x1b luck" in printed
    [score] = re.findall(r"at random, played 20 games to their end, mean score (\S+): ", printed)
    assert float(score) > 0.4


def test_games_are_narrowed_as_in_training(tmp_path, capsys):
    words = ["--config", micro_file(tmp_path), "--output", str(tmp_path / "out")]
    assert main([*words, "--set", "games=2048", "--teacher", "cfr"]) == 2
    assert "--teacher: opponent cfr cannot play 2048: " in capsys.readouterr().err


def test_how_many_games_are_open_at_once_changes_nothing(tmp_path, monkeypatch):
    config = micro_file(tmp_path, ppo={"eval_games": 2})
    for at_once in (3, 256):
        monkeypatch.setattr(warmstart, "GAMES_AT_ONCE", at_once)
        words = ["--config", config, "--teacher", "mcts:10x1", "--episodes", "8", "--epochs", "1"]
        assert main([*words, "--output", str(tmp_path / str(at_once))]) == 0
    few, all_of_them = ((tmp_path / str(n) / "adapter_model.safetensors").read_bytes() for n in (3, 256))
    assert few == all_of_them


@pytest.mark.parametrize(
    ("spec", "task_id", "message"),
    [
        ("cfx", KUHN, "--teacher: opponent 'cfx' is not known"),
        ("cfr:0", KUHN, "--teacher: opponent 'cfr:0' is not known"),
        ("random", KUHN, "--teacher random: does not search"),
        ("cfr", TTT, "--teacher: opponent cfr cannot play tic_tac_toe: it hides nothing; use perfect"),
        ("perfect", KUHN, "--teacher: opponent perfect cannot play kuhn_poker: it hides information"),
        ("mcts", GOOFSPIEL, "--teacher mcts: cannot search goofspiel_small"),
    ],
)
def test_teachers_that_cannot_teach_are_refused(spec, task_id, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_teacher(spec, [(task_id, task_id)], EnvConfig())


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--episodes", "0"), ("--explore", "1"), ("--epochs", "-1"), ("--epochs", "1001"), ("--legal-mass", "-1"),
     ("--learning-rate", "nan")],
)  # fmt: skip
def test_numbers_out_of_range_are_told_in_one_line(tmp_path, capsys, flag, value):
    with pytest.raises(SystemExit) as stopped:
        main(["--output_dir", str(tmp_path / "out"), flag, value])
    assert stopped.value.code == 2
    assert f"{value}: expected" in capsys.readouterr().err


def test_answers_become_likely_and_legal_if_wanted_and_only_the_adapter_moves(tmp_path):
    """The value head is the critic's: its warm-up belongs to PPO."""
    reached = {}
    for weight in (0.0, 1.0):
        policy = tiny_policy(tmp_path)
        head = [p.detach().clone() for p in policy.value_head.parameters()]
        episodes, _ = taught(policy, [KUHN], "mcts:10x1", games=8)
        sequences = [s for e in episodes for q in e.sequences.values() for s in q]
        before = {n: p.detach().clone() for n, p in policy.trainable().items()}
        likely, legal = means(policy, sequences)
        how = SimpleNamespace(learning_rate=1e-2, epochs=10, batch=8, legal_mass=weight)
        clone(policy, sequences, micro_config(tmp_path), how)
        now_likely, reached[weight] = means(policy, sequences)
        assert now_likely > likely + 0.1
        moved = [n for n, p in policy.trainable().items() if not torch.equal(p, before[n])]
        assert len(moved) > 10
        assert all(torch.equal(a, b) for a, b in zip(head, policy.value_head.parameters(), strict=True))
    assert reached[1.0] > 5 * legal
    assert reached[1.0] > 2 * reached[0.0]


def test_an_adapter_of_another_base_is_told_before_it_is_trained(tmp_path, caplog):
    policy = tiny_policy(tmp_path)
    config = micro_config(tmp_path)
    found = identity(config.model, policy.base, policy.tokenizer)
    policy.save(tmp_path / "adapter")
    for weights, told in (("others", True), (found["weights"], False)):
        (tmp_path / "adapter" / "manifest.json").unlink(missing_ok=True)
        write_manifest(tmp_path / "adapter", 0, found | {"weights": weights})
        caplog.clear()
        Trainer(micro_config(tmp_path, model={"adapter": str(tmp_path / "adapter")}), tmp_path)
        assert ("adapter: the weights of " in caplog.text) == told


def test_the_rate_of_cloning_falls_to_nothing_and_its_gradient_is_clipped(tmp_path, monkeypatch):
    rates, config = [], micro_config(tmp_path, ppo={"max_grad_norm": 1e-3})

    class Watched(torch.optim.AdamW):
        def step(self, *args):
            rates.append(self.param_groups[0]["lr"])
            gradients = [p.grad for p in self.param_groups[0]["params"]]
            assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(1e-3, rel=1e-3)
            return super().step(*args)

    policy = tiny_policy(tmp_path)
    episodes, _ = taught(policy, [KUHN], "random", games=4)
    sequences = [s for e in episodes for q in e.sequences.values() for s in q][:4]
    monkeypatch.setattr(torch.optim, "AdamW", Watched)
    for given in (None, 0.02):
        rates.clear()
        clone(policy, sequences, config, SimpleNamespace(learning_rate=given, epochs=2, batch=2, legal_mass=0.0))
        assert rates == pytest.approx([(given or config.ppo.learning_rate) * part for part in (1, 0.75, 0.5, 0.25)])


def means(policy, sequences):
    """Of the answers' log-probability, and of the legal mass."""
    with torch.no_grad():
        legal = float(policy.evaluate_decisions(sequences, legal_mass=True).legal_mass.exp().mean())
        return float(policy.evaluate_decisions(sequences).logprobs.mean()), legal
