"""The benchmarks measure what they say: recorded games, true tokens, calls of the model, and the files they write."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from players import random_player

from benchmarks import (
    bench_engine,
    bench_growth,
    bench_learning,
    bench_limit,
    bench_peers,
    bench_train,
    gpu_bench,
    predict,
)
from benchmarks.common import Clock
from benchmarks.limit import bare_seconds, recorded_calls
from benchmarks.record_prompts import GAMES
from benchmarks.recorded import play_recorded, recorded_games, tasks, tokenizer
from env_wrapper import EnvConfig, Task, make_env
from policy.chat import ChatFormat
from training.process import StopSignal

ROOT = Path(bench_train.__file__).parents[1]


def written(path):
    result = json.loads(path.read_text())
    assert set(result) == {"workload", "rows", "ratios"}
    assert result["rows"]
    return result


@pytest.mark.parametrize(("name", "words", "told"), [
    ("bench_env", ["--seconds", "nan"], "argument --seconds: nan: expected at least 0.1"),
    ("bench_engine", ["--answers", "0"], "argument --answers: 0: expected at least 1"),
    ("bench_growth", ["--steps", "x"], "argument --steps: x: expected a whole number"),
    ("bench_learning", ["--game", "ches"], "argument --game: invalid choice: 'ches'"),
    ("bench_limit", ["--model", "./nothing"], "model.model_name: there is no folder nothing"),
    ("bench_peers", ["--workloads", "w4"], "argument --workloads: invalid choice: 'w4'"),
    ("bench_train", ["--set", "nope=1"], "--set: nope = 1: no such key"),
    ("predict", ["--set", "nope=1"], "--set: nope = 1: no such key"),
])  # fmt: skip
def test_a_wrong_command_is_a_line(monkeypatch, capsys, name, words, told):
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", GAMES)
def test_a_recorded_game_begins_as_the_real_one(name):
    episode = recorded_games()[GAMES[name]][3]
    step = make_env(EnvConfig()).reset(Task(GAMES[name], 3))
    assert (step.info["system"], step.text, list(step.legal)) == (episode["system"], *episode["turns"][0])


def test_what_was_learnt_of_another_game_is_not_graded_again(tmp_path, monkeypatch):
    graded = []
    monkeypatch.setattr(bench_learning.subprocess, "run", lambda words, **_: Path(words[-1]).mkdir(parents=True))
    monkeypatch.setattr(bench_learning, "grades", lambda game, folder: graded.append((game, folder)) or [])
    for name in ("table", "write", "draw"):
        monkeypatch.setattr(bench_learning, name, lambda *args: "")
    for words in ([], ["--game", "leduc_poker"], ["--seed", "1"], ["--seconds", "60"], []):
        bench_learning.main([*words, "--folder", str(tmp_path)])
    folders = [folder for _, folder in graded]
    assert len(folders) == 10
    assert len({*folders}) == 8, "the last is the first again"


def test_a_learner_that_ended_early_learns_again(tmp_path, monkeypatch):
    def ends_early(words, **_):
        (Path(words[-1]) / "000060").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_learning, "grades", lambda *args: pytest.fail("what it had learnt is graded"))
    monkeypatch.setattr(bench_learning.subprocess, "run", ends_early)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            bench_learning.main(["--folder", str(tmp_path)])


@pytest.mark.parametrize(("steps", "seconds", "expected"), [(4, 1000, [0, 4]), (100, 60, [0, 5])])
def test_a_learners_last_step_is_kept(tmp_path, monkeypatch, steps, seconds, expected):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # which the import changes
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "peers")
    import learning

    times, kept = iter(10.0 * n for n in range(100)), []
    monkeypatch.setattr(learning.time, "process_time", lambda: next(times))
    marks, step = learning.Marks(lambda folder: kept.append(step), seconds, tmp_path), 0
    while not marks.after_a_step(step, step == steps) and step < steps:
        step += 1
    assert kept == expected


def test_recorded_games_are_played_by_the_episode_loop():
    player, games = random_player(), tasks(["clobber-5", "hex-5"], 4)
    turns = [recorded_games()[task.task_id][task.seed or 0]["turns"] for task in games]
    episodes = play_recorded(player, games)
    for number, episode in enumerate(episodes):
        asked = [(q.conversation[-1]["content"], list(q.legal)) for q in player.queries if q.episode == number]
        assert episode.outcome == "finished"
        assert asked == [(text, legal) for text, legal in turns[number] if len(legal) > 1]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_the_tokenizer_has_qwens_ids_and_keeps_every_recorded_text(architecture):
    fast = tokenizer(architecture)
    chat = ChatFormat(fast)
    assert chat.end_id == 151645
    assert chat.encode("0123456789") == tuple(range(15, 25))
    assert fast.encode("<think>") == [151667]
    assert ("<think>" in chat.after_user) is (architecture == "qwen3")
    for episodes in recorded_games().values():
        for text in (episodes[0]["system"], *(text for e in episodes for text, _ in e["turns"])):
            assert fast.decode(fast.encode(text)) == text
    assert fast.encode("Current State:") == [5405, 3234, 25]


def test_recorded_calls_count_real_tokens_and_shared_ones_once(new_policy):
    policy = new_policy(ppo={"max_seq_length": 8192})
    episodes = play_recorded(policy, tasks(["hex-5"], 2))
    sequences = [s for e in episodes for s in next(iter(e.sequences.values()))]
    with recorded_calls() as calls, torch.no_grad():
        policy.evaluate_decisions(sequences)
    rows = {tuple(s.ids[: max(s.decisions[0].start, *(p + 1 for p in s.decisions[0].positions))]) for s in sequences}
    beginnings = {row[: i + 1] for row in rows for i in range(len(row))}
    batches = policy.micro_batches(sequences)
    assert len(calls) == len(batches)
    assert len(beginnings) <= sum(c.tokens for c in calls) <= len(beginnings) + len(batches) * max(map(len, rows))
    assert sorted(n for c in calls for n, _ in c.rows) == sorted(map(len, rows))
    assert not any(call.grad for call in calls)


def test_the_bare_model_leaves_no_gradient_and_the_adapter_on(new_policy):
    policy = new_policy(ppo={"max_seq_length": 8192})
    sequences = [s for e in play_recorded(policy, tasks(["leduc_poker"], 2)) for s in next(iter(e.sequences.values()))]
    with recorded_calls() as calls:
        policy.evaluate_decisions(sequences).logprobs.sum().backward()
    assert any(call.grad for call in calls)
    for parameter in policy.trainable().values():
        parameter.grad = None
    with torch.no_grad():
        before_M = policy.evaluate_decisions(sequences).logprobs
        assert bare_seconds(policy.trunk, calls, cuda=False) > 0
        assert torch.equal(policy.evaluate_decisions(sequences).logprobs, before_M), "the adapter is on again"
    assert all(p.grad is None for p in policy.trainable().values())


def test_the_bare_model_is_given_the_passes_of_play_and_of_updates_alone(tmp_path, monkeypatch):
    """Not those that score what was played, before and after the update."""
    given = []
    monkeypatch.setattr(bench_limit, "bare_seconds", lambda trunk, calls, cuda: given.append(calls) or 1.0)
    sets = ["ppo.batch_size=8", "ppo.mini_batch_size=8", "ppo.recompute_logprobs=true"]
    trainer = bench_train.make_trainer(str(tmp_path), sets)
    with StopSignal() as stop, predict.recorded(trainer.policy) as passes:
        bench_limit.measure(trainer, stop)
    trainer.metrics.close()
    assert any(p.part == "score" for p in passes)
    for calls, part in zip(given, ("rollout", "update"), strict=True):
        assert [call.tokens for call in calls] == [len(p.tree.ids_N) for p in passes if p.part == part]


@pytest.mark.parametrize(("name", "gb", "card"), [
    ("NVIDIA A100-SXM4-40GB", 42.4, "A100"), ("NVIDIA A100-SXM4-80GB", 85.1, None), ("NVIDIA H100 PCIe", 85.0, None),
    ("NVIDIA H100 80GB HBM3", 85.0, "H100"), ("NVIDIA GeForce RTX 4090 Laptop GPU", 17.2, None),
])  # fmt: skip
def test_a_card_is_not_taken_for_another_of_its_family(name, gb, card):
    found = [known.name for known in predict.CARDS if known.is_called(name, gb)]
    assert [known[:4] for known in found] == ([card] if card else [])


def test_a_clock_adds_cpu_seconds_also_when_the_work_fails():
    clock = Clock()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), clock("work"):
            print(sum(range(200_000)) / 0)
    assert clock.seconds["work"] > 0.002


def test_gpu_bench_needs_a_gpu(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_bench.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_row_that_fails_or_comes_too_late_stops_nothing(tmp_path, monkeypatch):
    report = gpu_bench.Report(tmp_path, budget=100)
    report.measure("load", {"model": "a"}, lambda: [{"x": 1 / 0}])
    report.measure("load", {"model": "b"}, lambda: [{"x": 2.0}])
    late = gpu_bench.Report(tmp_path / "late", budget=0)
    late.measure("load", {"model": "c"}, lambda: [{"x": 3.0}])
    assert [row.get("x") for row in written(tmp_path / "gpu.json")["rows"]] == [None, 2.0]
    assert "ZeroDivisionError" in (tmp_path / "gpu.md").read_text()
    assert (late.rows, late.skipped) == ([], ["load c: no time left"])


def test_a_long_measurement_does_not_keep_shorter_ones_from_being_made(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(gpu_bench.time, "monotonic", lambda: now[0])
    report = gpu_bench.Report(tmp_path, budget=100)

    def takes(seconds):
        def work():
            now[0] += seconds
            return [{"x": 1.0}]

        return work

    for model, batch, seconds in (("a", 32, 60), ("a", 8, 10), ("b", 32, 60)):
        report.measure("load", {"model": model, "batch": batch}, takes(seconds))
    assert (len(report.rows), report.skipped) == (2, ["load b 32: no time left"])


@pytest.mark.slow
def test_a_peer_that_fails_is_told_with_its_cause():
    with pytest.raises(RuntimeError, match=r"floor.py w9: KeyError: 'w9'"):
        bench_peers.run(sys.executable, "floor.py", "w9")


def test_peers_are_compared_at_their_best(tmp_path, monkeypatch):
    speeds = {"ours.py": iter([3.0, 4.0]), "floor.py": iter([2.0, 1.0])}

    def run(python, script, workload):
        return {"peer": script, "samples_per_cpu_s": next(speeds[script]), "peak_rss_mib": 10.0}

    monkeypatch.setattr(bench_peers, "run", run)
    assert bench_peers.main(["--workloads", "w2", "--repeat", "2", "--json", str(tmp_path / "peers.json")]) == 0
    assert written(tmp_path / "peers.json")["ratios"] == {
        "speed": {"w2 ours/floor": 2.0},
        "memory": {"w2 ours/floor": 1.0},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "args"),
    [
        (bench_train, ["--steps", "1"]),
        (bench_train, ["--steps", "1", "--full"]),
        (bench_limit, ["--steps", "1"]),
        (bench_growth, ["--steps", "1"]),
        (bench_engine, ["--answers", "256"]),
        (bench_peers, ["--workloads", "w1", "--repeat", "1"]),
    ],
)
def test_benchmarks_write_their_results(benchmark, args, tmp_path):
    assert benchmark.main([*args, "--json", str(tmp_path / "result.json")]) == 0
    assert written(tmp_path / "result.json")["ratios"]


@pytest.mark.slow
def test_gpu_sh_runs_through_on_toy_shapes(tmp_path):
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--cpu-smoke"]
    env = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = written(tmp_path / "gpu.json")
    assert [row for row in result["rows"] if "failed" in row] == []
    rows = {
        kind: [row for row in result["rows"] if row["kind"] == kind] for kind in ("load", "step", "check", "profile")
    }
    assert [len(rows["load"]), len(rows["step"])] == [4, 8]
    constrained = [row for row in rows["check"] if row["answers"] == "constrained"]
    assert all(row["with_gradient"] == row["lora_tensors"] == 28 for row in constrained)
    assert all(row["gap_max"] < 0.05 for row in rows["check"])
    assert all(row["update_of_limit"] > 0 and row["not_finite"] == 0 for row in rows["step"])
    assert rows["profile"]
    assert "## step" in (tmp_path / "gpu.md").read_text()


def test_a_peers_environment_is_found_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "venvs" / "trl112").mkdir(parents=True)
    peer, made = bench_peers.KNOWN["trl112"], []
    (tmp_path / "venvs" / "trl112" / "complete").write_text("\n".join(peer.packages))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_peers.subprocess, "run", lambda words, **_: made.append(words))
    python = bench_peers.interpreter("trl112", peer, Path("venvs"))
    assert Path(python) == tmp_path / "venvs" / "trl112" / "bin" / "python"
    assert made == []
    bench_peers.interpreter("trl112", replace(peer, packages=("trl==1.13.0",)), Path("venvs"))
    assert made[-1][-1] == "trl==1.13.0", "its pins have changed since"
