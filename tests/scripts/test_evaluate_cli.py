"""scripts/evaluate.py from its command line: the same table twice, resumed, compared, refused; and every player."""

import _thread
import argparse
import contextlib
import dataclasses
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyspiel
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import http_server, said
from tiny import KUHN, LEDUC, base_model, micro_config, tiny_policy
from tiny_runs import ROOT, STEPS, undisturbed_run

import env_wrapper
import train_ppo
import utils
from curriculum import CurriculumConfig, Stage
from env_wrapper import EnvConfig, Episode, Task
from envs import client, exact, openspiel
from envs.openspiel import OpenSpielEnv, load_game, position, query_at
from envs.opponents import parse_opponent
from evaluation import arena, players
from evaluation.arena import match_scores
from evaluation.measure import exact_table, paired_tasks, table_values
from evaluation.players import ChatPlayer, Roster
from games import CONFIGS_PER_GAME, NAMES
from policy import Policy, load_policy
from scripts import evaluate, merge, play
from scripts.exploit import train as exploit
from training.config import SECTIONS, PPOConfig
from training.console import Console
from training.preflight import check_opponents
from training.process import ProgramError, TrainingError
from utils import ConfigError


@pytest.fixture(scope="module")
def run():
    """A run's folder: kuhn_poker and leduc_poker, compact prompts."""
    return undisturbed_run() / "run"


@pytest.fixture(scope="module")
def checkpoint(run):
    return str(run / f"checkpoint-{STEPS:06d}")


def test_where_the_report_goes_is_looked_at_first_and_a_cut_off_adapter_is_a_line(run, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        evaluate.main(["--checkpoint", "nobody", "--json", "/proc/x.json"])
    assert ended.value.code == 2
    assert "--json /proc/x.json: /proc: cannot be written" in capsys.readouterr().err
    shutil.copytree(run, tmp_path / "run")
    weights = tmp_path / "run" / "final" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (weights.parent / "manifest.json").unlink()
    assert evaluate.main(["--checkpoint", str(weights.parent)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {weights.parent}: adapter_model.safetensors or adapter_config.json does not fit ")
    assert error.count("\n") == 1


def test_no_secret_of_the_environment_is_in_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "canary-0123456789")
    files = tmp_path / "games.jsonl", tmp_path / "tables.json"
    args = ["--checkpoint", "random", "--games", "kuhn_poker", "--episodes", "2", "--output", str(files[0])]
    args += ["--json", str(files[1]), "--set", "env.env_url=http://127.0.0.1:9/canary-0123456789"]
    for _ in range(2):  # the second continues the first
        assert evaluate.main(args) == 0
        assert all("127.0.0.1:9/[redacted]" in file.read_text() for file in files)
        assert not any("canary" in file.read_text() for file in files)


def command(*args, games=("kuhn_poker", "leduc_poker"), episodes=20):
    return [*args, *(["--games", *games] if games else []), "--num_episodes", str(episodes), "--games_at_once", "8"]


def table(capsys, *args, code=0, **options):
    """What the program prints; it has to end with ``code``."""
    assert evaluate.main(command(*args, **options)) == code
    return capsys.readouterr().out


def report(tmp_path, *args, **options):
    """What the program writes with --json."""
    assert evaluate.main(command(*args, "--json", str(tmp_path / "report.json"), **options)) == 0
    return json.loads((tmp_path / "report.json").read_text())


def played(path):
    """The rows of --output."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


# ---------------------------------------------------------------------------------------------------- the same again


def test_the_same_command_prints_the_same_table(checkpoint, capsys):
    first = table(capsys, "--checkpoint", checkpoint, "--exact")
    assert first == table(capsys, "--checkpoint", checkpoint, "--exact")
    assert first != table(capsys, "--checkpoint", checkpoint, "--exact", "--seed", "1")
    assert [line.split()[0] for line in first.splitlines()[1:5]] == ["game", "kuhn_poker", "leduc_poker", "overall"]


@pytest.mark.parametrize("cut", [0, 300, 0.4, 0.999])
def test_an_interrupted_evaluation_goes_on_where_it_was(checkpoint, tmp_path, capsys, monkeypatch, cut):
    output, asked, told = tmp_path / "games.jsonl", [], list[tuple[int, int]]()

    def counting(config, player, tasks):
        asked.extend(tasks)
        return env_wrapper.play(config, player, tasks)

    monkeypatch.setattr(arena, "play", counting)
    whole = table(capsys, "--checkpoint", checkpoint, "--output", str(output))
    data = output.read_bytes()
    assert len(asked) == len(played(output)) == 40
    asked.clear()
    head = data.index(b"\n") + 1
    torn = b"?" * 20_000 if cut == 0.4 else b""  # a row that was never finished, and longer than what will be there
    output.write_bytes(data[: int(cut * len(data)) if cut < 1 else head + cut] + torn)
    monkeypatch.setattr(Console, "update", lambda self, done, line: told.append((done, self.total)))
    assert table(capsys, "--checkpoint", checkpoint, "--output", str(output)) == whole
    assert output.read_bytes() == data
    kept = 0 if cut in (0, 300) else {0.4: 8, 0.999: 36}[cut]  # chunks are 8, 8 and 4 games of each of the two
    assert len(asked) == 40 - kept
    assert told[-1] == (40 - kept, 40 - kept)  # what is kept took no time that tells how much is left


def test_each_row_is_turned_into_text_once_however_many_follow(checkpoint, tmp_path, capsys, monkeypatch):
    output, texts = tmp_path / "games.jsonl", list[str]()

    def counting(value):
        texts.append(json.dumps(value))
        return texts[-1]

    monkeypatch.setattr(arena, "json", SimpleNamespace(dumps=counting, loads=json.loads))
    table(capsys, "--checkpoint", checkpoint, "--output", str(output))
    assert texts == output.read_text().splitlines()  # otherwise 100,000 games would cost their number squared


def test_games_that_failed_are_played_again_and_those_after_them_kept(checkpoint, tmp_path, capsys, monkeypatch):
    output, asked = tmp_path / "games.jsonl", []
    whole = table(capsys, "--checkpoint", checkpoint, "--output", str(output))
    data = output.read_text()
    lines = data.splitlines(keepends=True)
    row = json.loads(lines[10]) | {"outcome": "failed", "score": None, "error": "the server was away"}
    output.write_text("".join([*lines[:10], json.dumps(row) + "\n", *lines[11:]]))

    def counting(config, player, tasks):
        asked.extend(tasks)
        return env_wrapper.play(config, player, tasks)

    monkeypatch.setattr(arena, "play", counting)
    assert table(capsys, "--checkpoint", checkpoint, "--output", str(output)) == whole
    assert len(asked) == 8  # of its part of the games alone
    assert output.read_text() == data


def test_a_legal_mass_that_rounding_has_put_above_one_is_kept_and_read(checkpoint, tmp_path, capsys, monkeypatch):
    output = tmp_path / "games.jsonl"
    masses = SimpleNamespace(exp=lambda: torch.full((1000,), 1 + 1e-6))
    monkeypatch.setattr(Policy, "evaluate_decisions", lambda *_, **__: SimpleNamespace(legal_mass=masses))
    whole = table(capsys, "--checkpoint", checkpoint, "--output", str(output))
    assert {row["legal_mass"] for row in played(output)} == {1.0}
    assert table(capsys, "--checkpoint", checkpoint, "--output", str(output)) == whole


def test_each_game_has_its_own_legal_mass_and_those_of_many_are_computed_at_once(tmp_path, capsys, monkeypatch):
    """One by one they took four to ten times as long as the games."""
    output, calls, real, seen = tmp_path / "games.jsonl", [], players.ModelPlayer.legal_mass, list[Episode]()
    monkeypatch.setattr(players.ModelPlayer, "legal_mass", lambda self, asked: calls.append(self) or real(self, asked))
    monkeypatch.setattr(arena, "play", lambda *args: [seen.append(e) or e for e in env_wrapper.play(*args)])
    sets = ("model.use_4bit=false", "model.dtype=float32", "model.device=cpu", "env.prompt=full")
    table(capsys, "--model", base_model(), "--output", str(output), "--set", *sets, games=["leduc_poker"])
    assert len(calls) == 3, "of 8, 8 and 4 games"
    assert max(len(s.decisions) for e in seen for s in e.sequences[e.info["seat"]]) > 1, "a sequence is a conversation"
    for row, episode in zip(played(output), seen, strict=True):
        alone = real(calls[0], episode.sequences.get(row["seat"], []))
        assert row["legal_mass"] == (pytest.approx(np.mean(alone), rel=1e-5) if alone else None)
    assert len({row["legal_mass"] for row in played(output)}) > 3


def test_a_chunk_begins_with_nothing_read(tmp_path, monkeypatch, capsys):
    """Rules of all games and players stayed in memory, and a chunk that is played again later would lack them."""
    before, after = [], []

    def watched(env, seats, tasks):
        policy = seats.players[None].policy
        before.append(len(policy._prefixes))
        episodes = env_wrapper.play(env, seats, tasks)
        after.append(len(policy._prefixes))
        return episodes

    monkeypatch.setattr(arena, "play", watched)
    sets = ("model.use_4bit=false", "model.dtype=float32", "model.device=cpu", "env.prompt=full")
    table(capsys, "--model", base_model(), "--set", *sets, games=["kuhn_poker#0", "leduc_poker#0"], episodes=10)
    assert (before, after) == ([0] * 4, [1] * 4)


def test_nor_has_the_opponent_read_anything(monkeypatch):
    forgot, two = [], [object.__new__(players.ModelPlayer) for _ in range(2)]
    for number, player in enumerate(two):
        player.policy = SimpleNamespace(forget=partial(forgot.append, number))
    monkeypatch.setattr(arena, "play", lambda *args: [])
    arena._episodes(*(SimpleNamespace(player=player, label=str(id(player)), env=None) for player in two), [])
    assert forgot == [0, 1]


def test_a_row_of_a_file_tells_its_game(checkpoint, tmp_path, capsys, monkeypatch):
    output, seen, real = tmp_path / "games.jsonl", [], arena.play
    monkeypatch.setattr(arena, "play", lambda *args: [seen.append(e) or e for e in real(*args)])
    table(capsys, "--checkpoint", checkpoint, "--output", str(output), games=["leduc_poker"])
    for row, episode in zip(played(output), seen, strict=True):
        seat, info = row["seat"], episode.info
        assert row["decisions"] == sum(len(s.decisions) for s in episode.sequences[seat])
        assert (row["moves"], row["returns"], row["retries"]) == (len(info["history"]), info["returns"], 0)
    assert any(row["decisions"] != row["moves"] for row in played(output))


def test_a_finished_file_is_read_and_nothing_played(checkpoint, tmp_path, capsys, monkeypatch):
    args = ("--checkpoint", checkpoint, "--output", str(tmp_path / "games.jsonl"))
    whole = table(capsys, *args)
    monkeypatch.setattr(arena, "play", None)
    assert table(capsys, *args) == whole


def test_a_file_of_an_earlier_checkpoint_says_so(run, tmp_path, capsys):
    """The run has gone on since, and the command names the run."""
    for step in (5, 6):
        shutil.copytree(run / f"checkpoint-{step:06d}", tmp_path / "run" / f"checkpoint-{step:06d}")
        words = command("--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "out"), games=["kuhn_poker"])
        assert evaluate.main(words) == (0 if step == 5 else 2)
    told = "holds games with other settings (run/checkpoint-000005 played, not run/checkpoint-000006); repeat them, or "
    assert told in capsys.readouterr().err


def test_a_merged_model_is_not_put_in_4_bits_again(tmp_path, monkeypatch):
    """Nor does the adapter that a run began with keep its configuration from being used."""
    monkeypatch.setattr("policy.model.ROOT", tmp_path)  # where models lie, wherever the program is started
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "merge_report.json").write_text("{}")
    file = tmp_path / "run_config.json"
    file.write_text(json.dumps({"model": {"use_4bit": False, "adapter": "runs/warm"}}))
    for name, expected in ((tmp_path / "merged", False), ("merged", False), ("base", True), ("~unheard-of/m", True)):
        assert Roster([], [], 0, False, str(name)).config(None).model.use_4bit == expected
    again = Roster([], ["model.use_4bit=true"], 0, False, str(tmp_path / "merged"))
    assert again.config(None).model.use_4bit
    assert Roster([str(file)], [], 0, False, "m").config(None).model.adapter == "runs/warm"


def test_a_merged_model_plays_as_its_report_says(tmp_path):
    """Who has the folder alone could not know; and no report says more than that."""
    report = tmp_path / "merge_report.json"
    played = {
        "env": {"prompt": "compact", "history_turns": 0, "answer_mode": "free", "games_path": "/nowhere"},
        "ppo": {"temperature": 0.5, "max_new_tokens": 9, "batch_size": 3},
        "model": {"model_name": "other"},
    }
    report.write_text(json.dumps({"played": played}))
    usual = Roster([], [], 0, False, "base").config(None)
    config = Roster([], [], 0, False, str(tmp_path)).config(None)
    assert vars(config.env) == vars(usual.env) | {"prompt": "compact", "history_turns": 0, "answer_mode": "free"}
    assert (config.ppo.temperature, config.ppo.max_new_tokens) == (0.5, 9)
    assert config.ppo.batch_size == usual.ppo.batch_size
    assert config.model.model_name == str(tmp_path)
    asked = Roster([], [], 0, False, str(tmp_path)).contestant("http://127.0.0.1:1/v1")
    assert asked.env.prompt == "compact"
    assert asked.origin["temperature"] == 0.5
    wished = Roster([], ["env.prompt=full"], 0, False, str(tmp_path)).config(None)
    assert wished.env.prompt == "full"
    public = Roster([], [], 0, False, str(tmp_path), public=True).config(None)
    assert (public.env.prompt, public.env.protocol, public.ppo.max_new_tokens) == ("full", "affinetes", 1024)
    for wrong, told in (([1], "is no report of a merge"), ({"played": {"env": [1]}}, "is no report of a merge"),
                        ({"played": {"env": {"prompt": 1}}}, "env.prompt = 1")):  # fmt: skip
        report.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=f"{re.escape(str(report))}: {told}"):
            Roster([], [], 0, False, str(tmp_path)).config(None)


def test_a_file_of_other_settings_or_with_damage_is_refused(checkpoint, tmp_path, capsys):
    output = tmp_path / "games.jsonl"
    args = ("--checkpoint", checkpoint, "--output", str(output))
    table(capsys, *args)
    data = output.read_bytes()
    others = (("--seed", "1"), ("--greedy",), ("--set", "ppo.temperature=0.5"), ("--opponent", "mcts:2x1"))
    for words in (*(command(*args, *other) for other in others), [*command(*args), "--games-at-once", "4"],
                  [*command(*args), "--episodes", "6"]):  # fmt: skip
        assert evaluate.main(words) == 2
        assert "other settings" in capsys.readouterr().err
        assert output.read_bytes() == data
    lines = data.split(b"\n")
    for damage in (b"{", b"[" * 100_000):
        output.write_bytes(b"\n".join([*lines[:3], damage, *lines[4:]]))
        assert evaluate.main(command(*args)) == 2
        assert "line 4 is damaged" in capsys.readouterr().err


def test_two_evaluations_do_not_write_each_others_games_away(checkpoint, tmp_path, capsys, monkeypatch):
    output, calls = tmp_path / "games.jsonl", []
    args = ("--checkpoint", checkpoint, "--output", str(output))

    def beside_another(*played):
        calls.append(played)
        if len(calls) == 2:
            with monkeypatch.context() as patch:
                patch.setattr(arena, "play", env_wrapper.play)
                table(capsys, *args)
        return env_wrapper.play(*played)

    monkeypatch.setattr(arena, "play", beside_another)
    assert evaluate.main(command(*args)) == 2
    assert "it was changed meanwhile, perhaps by another evaluation; name another file" in capsys.readouterr().err
    assert len(played(output)) == 40


def test_an_interrupt_while_games_are_kept_loses_none_of_those_before(checkpoint, tmp_path, capsys, monkeypatch):
    output = tmp_path / "games.jsonl"
    args = ("--checkpoint", checkpoint, "--output", str(output))
    whole, sizes, write = table(capsys, *args), [], Path.write_bytes
    output.unlink()

    def torn(path, data):
        sizes.append(len(data))
        write(path, data[: len(data) // 2] if len(sizes) == 4 else data)
        if len(sizes) == 4:
            raise KeyboardInterrupt
        return len(data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", torn)
        assert evaluate.main(command(*args)) == 130
    assert len(output.read_bytes()) == sizes[2] > 1000
    assert table(capsys, *args) == whole


@pytest.mark.parametrize(("key", "value"), [
    ("score", 7.0), ("outcome", None), ("decisions", 10**400), ("luck", "much"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("score", "x"), ("score", None), ("outcome", "won"), ("legal_mass", 2), ("decisions", -1), ("decisions", "1"))),
])  # fmt: skip
def test_a_row_that_is_no_result_is_not_counted(checkpoint, tmp_path, capsys, key, value):
    output = tmp_path / "games.jsonl"
    args = ("--checkpoint", checkpoint, "--output", str(output))
    table(capsys, *args)
    lines = output.read_text().splitlines()
    row = json.dumps(json.loads(lines[4]) | {"legal_mass": 0.5, key: value})
    output.write_text("\n".join([*lines[:4], row, *lines[5:], ""]))
    assert evaluate.main(command(*args)) == 2
    assert "line 5 is no result of a game" in capsys.readouterr().err


def test_games_are_kept_where_a_link_leads(checkpoint, tmp_path, capsys):
    link, target = tmp_path / "link.jsonl", tmp_path / "games.jsonl"
    link.symlink_to(target)
    table(capsys, "--checkpoint", checkpoint, "--output", str(link))
    assert link.is_symlink()
    assert len(played(target)) == 40


def test_a_best_response_is_drawn_to_nothing_but_winning():
    pulls = {f.name for f in fields(PPOConfig) if f.name.endswith("_coef")} - {"vf_coef", "entropy_coef"}
    assert {name: exploit.SEARCH[name] for name in pulls} == dict.fromkeys(pulls, 0.0)


@pytest.mark.parametrize(("players", "expected"), [(None, 0.2), (0.1, 0.1)])
def test_a_best_response_has_ppos_surrogate_since_its_opponent_does_not_change(
    tmp_path, monkeypatch, players, expected
):
    """And no alarms, which tell of a collapse and slow down what runs into one."""
    seen = []
    monkeypatch.setattr(exploit, "_train", lambda own, *_: seen.append((own.ppo.cliprange, own.ppo.alarms)) or 0.5)
    config = micro_config(tmp_path, ppo={"cliprange": players})
    args = argparse.Namespace(exploit=2, exploit_steps=1, seed=0)
    exploit.best_response(config, tmp_path, [(0, 0)], args, tmp_path, None)
    assert seen == [(expected, "off")] * 2


@pytest.mark.parametrize(
    ("games", "answers", "told"),
    [([(KUHN, KUHN + 3)], "constrained", True), ([(KUHN, KUHN)], "free", False), ([(0, 0)], "constrained", False),
     ([(KUHN, KUHN), (LEDUC, LEDUC)], "constrained", False)],
)  # fmt: skip
def test_how_the_frozen_player_answers_is_known_while_responses_are_trained(tmp_path, games, answers, told):
    """In one small game, as it samples there."""
    env = replace(micro_config(tmp_path).env, answer_mode=answers)
    player = SimpleNamespace(player=tiny_policy(tmp_path), env=env, opponent="past:it")
    with contextlib.suppress(ZeroDivisionError), exploit.known(player, games, lambda *_: None):
        found = [(name, known.table) for name, known in openspiel.KNOWN.items()]
        table = exact_table(player.player, env, KUHN)
        assert found == ([("past:frozen", table), ("past:it", table)] if told else [])
        raise ZeroDivisionError
    assert not openspiel.KNOWN


@pytest.mark.parametrize("exactly", [True, False])
def test_responses_learn_and_are_measured_less_luck_where_exact_values_are_asked_for(
    tmp_path, run, monkeypatch, capsys, exactly
):
    seen = []
    monkeypatch.setattr(exploit, "best_response", lambda *_: seen.append([*openspiel.KNOWN]) or (run, [0.5]))
    args = ("--checkpoint", str(run), "--exploit", "1", *(["--exact"] if exactly else []))
    [table] = report(tmp_path, *args, games=["kuhn_poker"], episodes=40)["tables"]
    assert seen == [["past:frozen", "past:run/checkpoint-000006"] if exactly else []]
    assert [result["adjusted"] is not None for result in table["results"]] == [exactly]
    assert ("less luck" in capsys.readouterr().out) == exactly


def test_responses_are_trained_as_responses_but_for_what_is_set(tmp_path, run, monkeypatch):
    """Each of these had been overwritten without a word; a file that the player is asked with says nothing of them."""
    seen = []
    monkeypatch.setattr(exploit, "_train", lambda own, *_: seen.append(own.ppo) or 0.5)
    (tmp_path / "own.json").write_text('{"ppo": {"entropy_final": 1, "gamma": 0.5}}')
    words = [
        "--checkpoint",
        str(run),
        "--exploit",
        "1",
        "--games",
        "kuhn_poker",
        "--config",
        str(tmp_path / "own.json"),
    ]
    with contextlib.suppress(ConfigError):  # nothing was trained that could be played
        evaluate.Contest(evaluate.arguments([*words, "--set", "ppo.entropy_coef=0.7", "lr_final=0.9"])).exploit()
    [ppo] = seen
    assert (ppo.entropy_coef, ppo.lr_final, ppo.entropy_final, ppo.gamma) == (0.7, 0.9, 0.05, 0.5)


def test_best_responses_have_seeds_of_their_own_also_after_the_last_seed_that_is_allowed(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(exploit, "_train", lambda own, *_: seen.append(own.run.seed) or 0.5)
    args = argparse.Namespace(exploit=3, exploit_steps=1, seed=2**31 - 2)
    exploit.best_response(micro_config(tmp_path), tmp_path, [(0, 0)], args, tmp_path, None)
    assert seen == [2**31 - 2, 2**31 - 1, 0]


@pytest.mark.parametrize("program", [evaluate, play])
def test_programs_that_search_end_without_waiting_for_it(program, monkeypatch):
    left = []
    monkeypatch.setattr("training.process.leave", left.append)
    monkeypatch.setattr(sys, "argv", [program.__file__, "--model", "./nowhere", "--set", "model.use_4bit=false"])
    runpy.run_path(program.__file__, run_name="__main__")
    assert left == [2]


def test_after_an_interrupt_a_server_is_asked_nothing_more(monkeypatch):
    asked, over = [], threading.Event()

    def answer(self, query):
        asked.append(query)
        if len(asked) == 1:
            raise KeyboardInterrupt
        over.wait(30)

    monkeypatch.setattr(ChatPlayer, "_answer", answer)
    player = ChatPlayer("http://127.0.0.1:1/v1", "m", 1.0, 8, 0)
    with pytest.raises(KeyboardInterrupt):
        player.act(range(10 * players.CALLS_AT_ONCE))
    over.set()
    time.sleep(0.3)
    assert len(asked) <= 2 * players.CALLS_AT_ONCE


def test_games_are_not_kept_in_a_pipe(checkpoint, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert evaluate.main(command("--checkpoint", checkpoint, "--output", str(tmp_path / "pipe"))) == 2
    assert "is no regular file" in capsys.readouterr().err


def interrupt_while_it_waits():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.parametrize("how", [interrupt_while_it_waits, _thread.interrupt_main])
@pytest.mark.parametrize("player", ["checkpoint", "mcts:2x1"])
def test_an_interrupt_does_not_wait_for_a_search(checkpoint, tmp_path, monkeypatch, player, how):
    searching, over = threading.Event(), threading.Event()

    def search(self, *_):
        searching.set()
        over.wait(30)

    def interrupt():
        searching.wait(60)
        time.sleep(0.5)
        how()  # the second wakes nobody, as a signal that comes just before the wait

    monkeypatch.setattr(OpenSpielEnv, "_bot_action", search)
    monkeypatch.setattr(arena, "play_bot", search)
    sender = threading.Thread(target=interrupt)
    sender.start()
    started = time.monotonic()
    name = checkpoint if player == "checkpoint" else player
    try:
        args = command("--checkpoint", name, "--opponent", "mcts:2x1", games=["tic_tac_toe"], episodes=2)
        assert evaluate.main(args) == 130
        assert time.monotonic() - started < 20
    finally:
        over.set()
        sender.join()


def test_an_interrupt_does_not_wait_for_a_silent_server(tmp_path):
    came = threading.Event()

    def silent(path, request, headers):
        came.set()
        gone.wait(60)

    gone = threading.Event()
    with http_server(silent) as url:
        args = ["--base-url", f"{url}/v1", "--model", "m", "--games", "tic_tac_toe", "--episodes", "2"]
        with subprocess.Popen([sys.executable, evaluate.__file__, *args], stderr=subprocess.PIPE, text=True) as process:
            assert came.wait(60)
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            _, said = process.communicate(timeout=30)
            gone.set()
    assert process.returncode == 130
    assert time.monotonic() - started < 10
    assert said.splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in said


def test_a_row_of_another_game_is_not_taken_for_this_one(checkpoint, tmp_path, capsys):
    output = tmp_path / "games.jsonl"
    args = ("--checkpoint", checkpoint, "--output", str(output))
    table(capsys, *args)
    head, *lines = output.read_text().splitlines(keepends=True)
    for wrong in ([*lines[:3], *lines[4:]], [*lines[:3], "[]\n", *lines[4:]]):
        output.write_text("".join([head, *wrong]))
        assert evaluate.main(command(*args)) == 2
        assert "line 5 is another game than this command plays there" in capsys.readouterr().err


def test_games_of_one_kind_of_evaluation_are_not_those_of_another(checkpoint, tmp_path, capsys):
    output = ("--output", str(tmp_path / "games.jsonl"))
    plain = ("--checkpoint", "random", "mcts:2x1", "--opponent", "mcts:3x1")
    table(capsys, *plain, *output, games=["tic_tac_toe"])
    ladder = ("--ladder", "random", "mcts:2x1", "mcts:3x1")
    assert evaluate.main(command(*ladder, *output, games=["tic_tac_toe"])) == 2
    assert "another game than this command plays" in capsys.readouterr().err


def test_a_base_that_has_changed_is_told(checkpoint, tmp_path, capsys, monkeypatch):
    base = json.loads((Path(checkpoint) / "manifest.json").read_text())["base"]
    moved = shutil.copytree(base["model"], tmp_path / "moved")
    elsewhere = command("--checkpoint", checkpoint, "--set", f"model.model_name={moved}")
    assert evaluate.main(elsewhere) == 0
    assert "WARNING" not in capsys.readouterr().err
    monkeypatch.setattr("policy.model._digest", lambda folder: f"others of {folder}")
    told = f"{checkpoint}: the weights of {base['model']} are not those that it was trained with"
    assert evaluate.main(command("--checkpoint", checkpoint)) == 2
    assert told in capsys.readouterr().err
    assert evaluate.main(elsewhere) == 0
    assert f"WARNING: {told.replace(base['model'], str(moved))}" in capsys.readouterr().err
    assert merge.main(["--checkpoint", checkpoint, "--output", str(tmp_path / "merged"), "--deals", "2"]) == 2
    assert told in capsys.readouterr().err
    found = {"model": base["model"], "weights": base["weights"], "tokenizer": "another"}
    with pytest.raises(ConfigError, match=r"the tokenizer of .* are not those"):
        utils.check_base(checkpoint, found)


@pytest.mark.parametrize(("opponent", "said"), [("random", False), ("mcts:2x1", True)])
def test_what_exact_values_are_against_is_told_where_the_games_were_against_another(capsys, opponent, said):
    words = ["--checkpoint", "random", "--opponent", opponent, "--exact", "--games", "kuhn_poker#0", "--episodes", "2"]
    assert evaluate.main(words) == 0
    [heading] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("random against")]
    assert heading.endswith("; exact, ceiling and share: against random") == said


def test_sampled_play_against_random_has_its_share_of_the_ceiling(tmp_path):
    """The ceiling needs no model, so it is there without --exact; of other opponents none is known."""
    words = ["--checkpoint", "random", "--opponent"]
    kuhn, leduc, _ = report(tmp_path, *words, "random", episodes=20)["tables"][0]["results"]
    for result in (kuhn, leduc):
        ends = [result[end] / result["ceiling"] for end in ("value", "low", "high")]
        assert [result["share"], *result["share_interval"]] == pytest.approx(ends)
    assert kuhn["ceiling"] == pytest.approx(11 / 48)
    several = report(tmp_path, *words, "random", games=["tic_tac_toe#0", "hex#0-1"], episodes=4)["tables"][0]["results"]
    assert [result["share"] is None for result in several] == [False, True, True]
    assert report(tmp_path, *words, "mcts:2x1", episodes=2)["tables"][0]["results"][0]["share"] is None


def test_over_a_server_exact_values_are_left_out_and_that_is_said(caplog):
    """They would be those of prompts that the player never reads."""

    def first(queries):
        return [{action: float(action == min(q.legal)) for action in q.legal} for q in queries]

    asked = SimpleNamespace(label="mine", env=EnvConfig(), player=SimpleNamespace(action_probs=first))
    assert evaluate.exact_results(asked, {KUHN})["ceiling"] > 0
    assert evaluate.exact_results(asked, {NAMES.index("tic_tac_toe") * CONFIGS_PER_GAME}) == {}
    asked.env = EnvConfig(history_turns=0)
    sizes = [NAMES.index("hex_small") * CONFIGS_PER_GAME + k for k in range(2)]
    assert [evaluate.exact_results(asked, {size}) != {} for size in sizes] == [True, False], "of 3x3 and of 4x4"
    assert evaluate.exact_results(asked, set(sizes)) == {}, "one value is of one board"
    asked.env = EnvConfig(env_mode="url", env_url="http://127.0.0.1:9")
    assert evaluate.exact_results(asked, {KUHN}) == {}
    assert caplog.messages == [
        "--exact: tic_tac_toe left out for mine, whose prompts show the turns before, of which there are many to a "
        "position (env.history_turns=0 has none)",
        "--exact: hex_small left out, too large",
        "--exact: hex_small left out, of several configurations; name one: hex_small#0",
        "--exact: kuhn_poker left out for mine, whose prompts are those of a server",
    ]


@pytest.mark.parametrize("flags", [(), ("--exploit", "1", "--exploit-steps", "1")])
def test_exact_values_that_a_device_fails_to_compute_cost_no_table(checkpoint, monkeypatch, capsys, flags):
    """They come after all games."""
    real = evaluate.exact_results

    def failing(player, task_ids):
        if LEDUC in task_ids:
            raise torch.OutOfMemoryError("out of memory")
        return real(player, task_ids)

    monkeypatch.setattr(evaluate, "exact_results", failing)
    names = ["kuhn_poker#0", "leduc_poker#0"]
    assert evaluate.main(command("--checkpoint", checkpoint, "--exact", *flags, games=names, episodes=2)) == 1
    shown = capsys.readouterr()
    assert ["exact" in shown.out, *(game in shown.out for game in ("kuhn_poker", "leduc_poker"))] == [True] * 3
    assert shown.err.splitlines()[-1] == "error: out of memory"


@pytest.mark.parametrize("name", ["hearts", "blackjack"])
def test_a_game_for_one_or_four_is_not_called_too_large_for_exact_values(caplog, name):
    first = NAMES.index(name) * CONFIGS_PER_GAME
    asked = SimpleNamespace(label="random", env=EnvConfig(), player=None)
    assert evaluate.exact_results(asked, {first, first + 1}) == evaluate.exact_results(asked, {first}) == {}
    assert caplog.messages == [f"--exact: {name} left out, no zero-sum game of two"] * 2


def test_exact_values_of_free_answers_search_and_servers_are_left_out_and_that_is_said(caplog):
    """They were asked for, and their column was silently missing."""
    able, label = SimpleNamespace(action_probs=None), "--exact: kuhn_poker left out for {}"
    free = SimpleNamespace(label="free", env=EnvConfig(answer_mode="free"), player=able)
    server = SimpleNamespace(label="server", env=EnvConfig(), player=SimpleNamespace())
    search = SimpleNamespace(label="mcts:2x1", env=EnvConfig(), player=None)
    assert [evaluate.exact_results(asked, {KUHN}) for asked in (free, server, search)] == [{}] * 3
    whose = ", whose probabilities of moves are not known"
    assert caplog.messages == [label.format(asked.label) + whose for asked in (free, server, search)]


def test_an_adapter_without_settings_is_no_player_and_nobody_else_is_asked(checkpoint, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(checkpoint, tmp_path / "mine")
    (folder / "manifest.json").unlink()
    (folder / "adapter_config.json").unlink()
    assert evaluate.main(command("--checkpoint", str(folder))) == 2
    assert f"there is no adapter_config.json in {folder}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        evaluate.main(command("--checkpoint", checkpoint, "--opponent", "past:"))
    assert "--opponent past: names nobody" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("name", ["random", "mcts", "mcts_light", "ismcts", "mcts:20x1", "perfect", "cfr", "cfr:5"])
def test_every_opponent_can_be_a_contestant(name):
    contestant = Roster([], [], 0, False, None).contestant(name)
    assert contestant.label == name


def test_uniform_play_has_the_known_nash_conv(tmp_path):
    results = report(tmp_path, "--checkpoint", "random", "--exact", episodes=2)["tables"][0]["results"]
    kuhn, leduc = results[:2]
    assert kuhn["nash_conv"] == pytest.approx(11 / 12)
    assert leduc["nash_conv"] == pytest.approx(4.747222, abs=1e-6)
    assert (kuhn["share"], kuhn["exact"]) == pytest.approx((0.0, 0.0))


def test_tables_can_be_pasted_and_have_no_column_of_zeros(capsys):
    shown = table(capsys, "--checkpoint", "random", "--markdown", episodes=4)
    head, rule, *rows = [line for line in shown.splitlines() if line.startswith("|")]
    heads = ["game", "games", "value", "95 %", "success", "ceiling", "share"]
    assert [cell.strip() for cell in head.split("|")[1:-1]] == heads
    assert set(rule) <= set("|-:")
    assert [row.split("|")[1].strip() for row in rows] == ["kuhn_poker", "leduc_poker", "overall"]
    assert "draw" in table(capsys, "--checkpoint", "random", games=["tic_tac_toe"], episodes=40)


def test_a_checkpoint_plays_as_the_policy_that_was_saved(run, checkpoint, tmp_path):
    config = micro_config(tmp_path)
    policy = load_policy(config)
    policy.load(run / f"checkpoint-{STEPS:06d}")
    [tasks] = paired_tasks([[(LEDUC, LEDUC)]], 20, 0, "random", deals=1)
    expected = [e for k in range(0, 20, 8) for e in env_wrapper.play(config.env, policy, tasks[k : k + 8])]
    output = tmp_path / "games.jsonl"
    result = report(tmp_path, "--checkpoint", checkpoint, "--exact", "--output", str(output), games=["leduc_poker#0"])
    assert [(row["score"], row["seed"]) for row in played(output)] == [(e.score, e.task.seed) for e in expected]
    own, random, best = table_values(exact_table(policy, config.env, LEDUC), LEDUC).values()
    found = result["tables"][0]["results"][0]
    assert (found["exact"], found["ceiling"]) == pytest.approx((own, best), abs=1e-6)
    assert found["share"] == pytest.approx((own - random) / (best - random), abs=1e-5)
    sequences = expected[0].sequences[expected[0].info["seat"]]
    mass = policy.evaluate_decisions(sequences, legal_mass=True).legal_mass.exp().mean().item()
    assert played(output)[0]["legal_mass"] == pytest.approx(mass, rel=1e-4)


def test_a_checkpoint_is_not_measured_on_the_deals_by_which_it_was_chosen(tmp_path):
    output = tmp_path / "games.jsonl"
    report(tmp_path, "--checkpoint", "random", "--output", str(output), games=["leduc_poker#0"])
    [tasks] = paired_tasks([[(LEDUC, LEDUC)]], 20, 0, "random")
    assert not {row["seed"] for row in played(output)} & {t.seed for t in tasks}
    assert not {row["index"] for row in played(output)} & {t.index for t in tasks}


@pytest.mark.parametrize("greedy", [(), ("--greedy",)])
def test_exact_values_of_prompts_that_do_not_fit_are_left_out_and_the_others_are_told(
    checkpoint, tmp_path, capsys, greedy
):
    short = ("--set", 'env.history_turns="all"', "--set", "ppo.max_seq_length=42")  # the longest of leduc_poker has 43
    args = ("--checkpoint", checkpoint, "--exact", "--seed", "1", *greedy, *short)  # no game of which gets so far
    kuhn, leduc, _ = report(tmp_path, *args, games=["kuhn_poker", "leduc_poker"])["tables"][0]["results"]
    assert kuhn["exact"] is not None
    assert leduc["exact"] is None
    assert "--exact: leduc_poker left out for " in capsys.readouterr().err


def test_games_of_a_base_that_has_changed_are_not_taken_for_its_own(tmp_path, capsys):
    folder = shutil.copytree(base_model(), tmp_path / "base")
    args = ("--model", str(folder), "--set", "model.use_4bit=false", "--set", "model.dtype=float32")
    args = (*args, "--output", str(tmp_path / "games.jsonl"))
    table(capsys, *args, games=["kuhn_poker"])
    weights = load_file(folder / "model.safetensors")
    save_file({name: w * 1.5 for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    assert evaluate.main(command(*args, games=["kuhn_poker"])) == 2
    assert "holds games with other settings" in capsys.readouterr().err


def test_games_of_an_adapter_whose_settings_have_changed_are_not_taken_for_its_own(checkpoint, tmp_path, capsys):
    """With twice the ``lora_alpha``, the same weights are another player."""
    folder = shutil.copytree(checkpoint, tmp_path / "run" / "checkpoint-000006")
    (folder / "manifest.json").unlink()  # it would refuse the change
    args = ("--checkpoint", str(folder), "--output", str(tmp_path / "games.jsonl"))
    table(capsys, *args, games=["kuhn_poker"])
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 2 * settings["lora_alpha"]}))
    assert evaluate.main(command(*args, games=["kuhn_poker"])) == 2
    assert "holds games with other settings" in capsys.readouterr().err


def test_best_responses_in_several_games_are_gone_on_with(run, tmp_path, monkeypatch, capsys):
    sampled, act = {}, players.ModelPlayer.act

    def measured(player, queries):
        answers = act(player, queries)
        sampled[player.adapter] = not player.policy.greedy
        return answers

    monkeypatch.setattr(players.ModelPlayer, "act", measured)
    args = ("--checkpoint", str(run), "--exploit", "1", "--exploit-steps", "1", "--output", str(tmp_path / "o.jsonl"))
    games = ["kuhn_poker", "leduc_poker"]
    first, again = (table(capsys, *args, games=games, episodes=4) for _ in range(2))
    assert first == again
    assert "exact" not in first, "it was not asked for"
    assert sampled.pop("player0"), "what responses have learnt against"
    assert sampled
    assert not any(sampled.values()), "a response need not vary"


def test_players_of_one_policy_are_greedy_each_for_itself(checkpoint):
    found = Roster([], [], 0, False, None).contestant(checkpoint)
    sampling, greedy = found.player, players.ModelPlayer(found.player.policy, found.player.adapter, True)
    asked = [query_at(KUHN, i.state, i.seat, found.env) for i in exact.information_states(load_game(KUHN))]
    probs = sampling.action_probs(asked)
    assert all(0 < p < 1 for answers in probs for p in answers.values())
    likeliest = [max(answers, key=answers.get) for answers in probs]
    varied = set()
    for n in range(30):
        asked = [dataclasses.replace(query, rng_key=(n, k)) for k, query in enumerate(asked)]
        varied.add(tuple(int(action.text) for action in sampling.act(asked)))
        assert [answers[a] for answers, a in zip(greedy.action_probs(asked), likeliest, strict=True)] == [1.0] * 12
        assert [int(action.text) for action in greedy.act(asked)] == likeliest
    assert len(varied) > 1
    assert sampling.action_probs(asked) == probs


def test_greedy_play_is_exactly_the_likeliest_answers(checkpoint, tmp_path):
    args = ("--checkpoint", checkpoint, "--greedy", "--exact")
    result = report(tmp_path, *args, games=["kuhn_poker"], episodes=200)["tables"][0]["results"][0]
    assert result["low"] - 0.04 <= result["exact"] <= result["high"] + 0.04
    contestant = Roster([], [], 0, True, None).contestant(checkpoint)
    assert contestant.player.greedy
    sampled = report(tmp_path, "--checkpoint", checkpoint, "--exact", games=["kuhn_poker"])["tables"][0]["results"][0]
    assert sampled["exact"] != result["exact"]


def test_only_models_are_called_greedy(checkpoint, capsys):
    shown = table(capsys, "--checkpoint", checkpoint, "random", "--greedy", games=["kuhn_poker"], episodes=2)
    assert [", greedy, " in line for line in shown.splitlines() if " against " in line] == [True, False]


def test_the_table_counts_what_the_rows_say(checkpoint, tmp_path):
    output = tmp_path / "games.jsonl"
    result = report(tmp_path, "--checkpoint", checkpoint, "--output", str(output), episodes=40)
    [kuhn, leduc, overall] = result["tables"][0]["results"]
    rows = [row for row in played(output) if row["game"] == "leduc_poker"]
    scores = [row["score"] for row in rows]
    assert leduc["value"] == pytest.approx(2 * sum(scores) / 40 - 1)
    assert leduc["success"] == pytest.approx(sum(s > 0.5 for s in scores) / 40)
    assert leduc["success"] + leduc["draw"] + leduc["loss"] == pytest.approx(1)
    assert overall["value"] == pytest.approx((kuhn["value"] + leduc["value"]) / 2)
    assert overall["episodes"] == 80
    assert {row["seat"] for row in rows} == {0, 1}


def test_what_is_too_long_is_counted_and_told_and_scores_nothing(checkpoint, tmp_path, capsys):
    args = ("--checkpoint", checkpoint, "--set", "ppo.max_seq_length=16", "--set", "env.history_turns=all")
    output = tmp_path / "games.jsonl"
    [leduc] = report(tmp_path, *args, "--output", str(output), games=["leduc_poker"])["tables"][0]["results"]
    cut = [row for row in played(output) if row["outcome"] == "truncated"]
    assert leduc["truncated"] == len(cut) > 0
    told = f", leduc_poker: in {len(cut)} of 20 games a prompt did not fit ppo.max_seq_length; "
    assert capsys.readouterr().err.count(told) == 1
    assert {row["score"] for row in cut} == {0.0}
    assert leduc["episodes"] == 20
    exact = report(tmp_path, *args, "--exact", games=["leduc_poker"])["tables"][0]["results"][0]["exact"]
    assert exact is None  # it would be of a player whose prompts always fit
    report(tmp_path, *args, "--exact", "--greedy", games=["leduc_poker"])


def test_games_that_fail_are_left_out_and_when_all_do_nothing_is_reported(checkpoint, tmp_path, monkeypatch, capsys):
    reset, calls = OpenSpielEnv.reset, []

    def failing(self, task):
        calls.append(task)
        if len(calls) % every == 0:
            raise RuntimeError("no such luck")
        return reset(self, task)

    monkeypatch.setattr(OpenSpielEnv, "reset", failing)
    every = 5
    [kuhn] = report(tmp_path, "--checkpoint", checkpoint, games=["kuhn_poker"])["tables"][0]["results"]
    assert (kuhn["failed"], kuhn["episodes"]) == (4, 16)
    every, found = 4, tmp_path / "found.json"  # more than a fifth of them
    calls.clear()
    args = command("--checkpoint", checkpoint, "--json", str(found), games=["kuhn_poker"])
    assert evaluate.main(args) == 1
    [kuhn] = json.loads(found.read_text())["tables"][0]["results"]
    assert (kuhn["failed"], kuhn["episodes"]) == (5, 15)
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == "error: 5 of 20 games of kuhn_poker failed: too many to trust the rest"
    every = 1
    assert evaluate.main(command("--checkpoint", checkpoint, games=["kuhn_poker"])) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: every game of kuhn_poker failed; the first: RuntimeError: no such luck (")


def test_a_ladder_tells_of_the_games_that_failed(monkeypatch, capsys):
    """It says "20 games a pair and game", and has no column for them."""
    reset, failed = OpenSpielEnv.reset, (3, 10)

    def failing(self, task):
        if -task.index % 2**32 in failed:
            raise RuntimeError("no such luck")
        return reset(self, task)

    monkeypatch.setattr(OpenSpielEnv, "reset", failing)
    assert evaluate.main(command("--ladder", "random", "mcts:2x1", games=["kuhn_poker"])) == 0
    [told] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING")]
    assert told == ("WARNING: random against mcts:2x1, kuhn_poker: 2 of 20 games failed and are left out, with 2 "
                    "more of the same deals; the first: RuntimeError: no such luck")  # fmt: skip
    for step, which in ((1, "game"), (2, "pair of games")):
        failed = range(0, 21, step)
        assert evaluate.main(command("--ladder", "random", "mcts:2x1", games=["kuhn_poker"])) == 1
        out, err = capsys.readouterr()
        told = f"error: every {which} of kuhn_poker failed; the first: RuntimeError: no such luck"
        assert err.splitlines()[-1] == told
        assert "Ratings" not in out


def test_a_mean_that_would_lack_a_game_is_left_out(checkpoint, tmp_path, monkeypatch):
    """Beside another player's, of all games, it looked like one of the same games."""
    reset = OpenSpielEnv.reset

    def failing(self, task):
        if task.task_id // 100_000_000 == KUHN // 100_000_000:
            raise RuntimeError("no such luck")
        return reset(self, task)

    monkeypatch.setattr(OpenSpielEnv, "reset", failing)
    args = command("--checkpoint", checkpoint, "--json", str(tmp_path / "found.json"),
                   games=["kuhn_poker", "leduc_poker", "tic_tac_toe"])  # fmt: skip
    assert evaluate.main(args) == 1
    [table] = json.loads((tmp_path / "found.json").read_text())["tables"]
    assert [r["game"] for r in table["results"]] == ["leduc_poker", "tic_tac_toe"]


@pytest.mark.parametrize(
    "words",
    [("--checkpoint", "RUN"), ("--checkpoint", "RUN", "--exploit", "1", "--exploit-steps", "1"),
     ("--ladder", "RUN", "random", "base"), ("--compare", "RUN", "base"),
     pytest.param(("--checkpoint", "RUN", "--strength"), marks=pytest.mark.slow)],
    ids=lambda words: "".join(words[::2]),
)  # fmt: skip
def test_a_game_that_always_fails_costs_no_other_its_table(words, checkpoint, tmp_path, monkeypatch, capsys):
    reset = OpenSpielEnv.reset

    def failing(self, task):
        if task.task_id // 100_000_000 == KUHN // 100_000_000 and task.index < 0:  # not those of best responses
            raise RuntimeError("no such luck")
        return reset(self, task)

    monkeypatch.setattr(OpenSpielEnv, "reset", failing)
    found, words = tmp_path / "found.json", [checkpoint if word == "RUN" else word for word in words]
    args = command(*words, "--json", str(found), games=["kuhn_poker", "leduc_poker"])
    assert evaluate.main(args) == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith("error: every game of kuhn_poker failed; the first: RuntimeError: ")
    assert "leduc_poker" in printed.out
    assert "leduc_poker" in found.read_text()


def test_a_ladder_is_of_games_in_which_one_scores_what_the_other_lacks(monkeypatch, capsys):
    """Who cooperate score alike, and the one named second was rated by what the first one lacked."""
    words = command("--ladder", "random", "mcts:2x1", games=["kuhn_poker"], episodes=2)
    for name, code in (("tiny_hanabi", 2), ("matrix_pd", 0), ("kuhn_poker", 0)):
        monkeypatch.setattr(evaluate, "load_game", lambda task_id, name=name: pyspiel.load_game(name))
        assert evaluate.main(words) == code
        refused = "error: --ladder: kuhn_poker is not for two opposed players; choose other --games\n"
        assert (refused in capsys.readouterr().err) == (code == 2)


def test_a_prompt_that_no_longer_fits_is_a_draw_of_a_ladder_whoever_s_it_is():
    cut = [{"outcome": "truncated", "score": score} for score in (0.0, 0.5)]  # the player's, the opponent's
    whole = [{"outcome": "finished", "score": score} for score in (1.0, 0.0)]
    failed = [{"outcome": "failed", "score": None}, whole[0]]
    pots = [{"outcome": "finished", "score": score} for score in (0.54, 0.3)]
    assert match_scores([*cut, *whole, *failed, *pots]).tolist() == [[0.5, 0.5], [1.0, 0.0], [0.54, 0.3]]


def test_a_ladder_of_poker_has_the_better_player_above(tmp_path):
    """An equilibrium of kuhn_poker loses more hands to random play than it wins, and wins more chips."""
    result = report(tmp_path, "--ladder", "random", "cfr", games=["kuhn_poker"], episodes=4000)
    [cfr, _] = result["ladder"]
    assert cfr["player"] == "cfr"
    assert cfr["ratings"]["kuhn_poker"]["low"] > 0


def test_an_opponent_that_gives_no_legal_answer_loses_and_is_told_of(tmp_path, monkeypatch, capsys):
    """It was a draw, and stood in the table as if the player had given none."""
    info = {"own_end": False, "scores": {0: 0.5, 1: 0.5}, "seat": 0, "returns": None, "length": 1, "retries": 0}
    given = partial(Episode, game="kuhn_poker", score=0.5, outcome="forfeited", info=info | {"n_decisions": {0: 1}})
    monkeypatch.setattr(arena, "_episodes", lambda own, opponent, tasks: [given(task) for task in tasks])
    [result] = report(tmp_path, "--checkpoint", "random", games=["kuhn_poker"])["tables"][0]["results"]
    assert (result["value"], result["success"], result["forfeited"]) == (1.0, 1.0, 0)
    assert "in 20 of 20 games the opponent gave no legal answer; they count as won\n" in capsys.readouterr().err
    # Where others play on, nobody knows who would have won.
    [result] = report(tmp_path, "--checkpoint", "random", games=["hearts#0"])["tables"][0]["results"]
    assert (result["value"], result["forfeited"]) == (0.0, 0)
    assert "count as won" not in capsys.readouterr().err


def test_games_may_be_named_as_in_training(checkpoint):
    named = ["--set", 'env.allowed_game_indices=["leduc_poker"]']
    assert [*evaluate.Contest(evaluate.arguments(["--checkpoint", checkpoint, *named])).rows] == ["leduc_poker"]


def test_the_games_of_the_run_are_the_default(checkpoint, tmp_path):
    results = report(tmp_path, "--checkpoint", checkpoint, games=(), episodes=2)["tables"][0]["results"]
    assert [r["game"] for r in results] == ["kuhn_poker", "leduc_poker", "overall"]


# -------------------------------------------------------------------------------------------------------- comparisons


def test_a_checkpoint_does_not_differ_from_itself_and_is_compared_on_the_same_deals(checkpoint, tmp_path):
    output = tmp_path / "games.jsonl"
    same = report(tmp_path, "--compare", checkpoint, checkpoint)["comparison"]
    assert [(r["difference"], r["p"]) for r in same] == [(0.0, 1.0)] * 3
    result = report(tmp_path, "--compare", checkpoint, "base", "--output", str(output))
    deals = [
        [(r["task_id"], r["seed"]) for r in played(output) if r["player"] == t["player"]] for t in result["tables"]
    ]
    assert deals[0] == deals[1]
    assert len(deals[0]) == 40
    ours, theirs = (t["results"] for t in result["tables"])
    for row, a, b in zip(result["comparison"], ours, theirs, strict=True):
        assert row["difference"] == pytest.approx(a["value"] - b["value"])
        assert row["interval"][0] <= row["difference"] <= row["interval"][1]


def test_a_game_on_two_lines_counts_once_in_a_comparison(tmp_path):
    games = ["goofspiel_small", "goofspiel_small#0", "kuhn_poker"]
    result = report(tmp_path, "--compare", "mcts:20x1", "random", games=games, episodes=10)
    ours, theirs = (t["results"][-1] for t in result["tables"])
    over = result["comparison"][-1]
    assert (over["game"], over["pairs"], ours["episodes"]) == ("overall", 10, 20)
    assert over["difference"] == pytest.approx(ours["value"] - theirs["value"])


def test_a_better_player_is_found_better(tmp_path, capsys):
    [row] = report(tmp_path, "--compare", "mcts:100x5", "random", games=["kuhn_poker"], episodes=200)["comparison"]
    assert row["difference"] > 0.1
    assert row["p"] < 0.01
    assert row["interval"][0] > 0
    p, *less = capsys.readouterr().out.partition("difference")[2].splitlines()[1].split()[-4:]
    assert float(p) == pytest.approx(row["p"], rel=0.05), "a small p is not told as zero"
    low, high = row["adjusted_interval"]
    assert " ".join(less) == f"{row['adjusted']:+.3f} [{low:+.3f}, {high:+.3f}]"


def test_base_is_the_model_without_the_adapter(checkpoint, tmp_path):
    args = ("--exact",)
    by_name = report(tmp_path, "--checkpoint", checkpoint, "base", *args)["tables"][1]
    sets = ["env.prompt=compact", "env.history_turns=0", "model.use_4bit=false", "model.dtype=float32",
            "model.device=cpu", "ppo.max_seq_length=256"]  # fmt: skip
    sets = [part for item in sets for part in ("--set", item)]
    by_model = report(tmp_path, "--model", base_model(), *sets, *args)["tables"][0]
    assert by_model["results"] == by_name["results"]
    assert by_name["player"] == "base"


# ---------------------------------------------------------------------------------------------------------- opponents


def test_an_earlier_checkpoint_or_the_base_can_be_the_opponent(run, checkpoint, tmp_path, capsys):
    earlier = str(run / "checkpoint-000001")
    shown = table(capsys, "--checkpoint", checkpoint, "--opponent", f"past:{earlier}", games=["leduc_poker"])
    assert shown.startswith("run/checkpoint-000006 against run/checkpoint-000001, sampled")
    output = tmp_path / "games.jsonl"
    table(capsys, "--checkpoint", checkpoint, "--opponent", "base", "--output", str(output), games=["leduc_poker"])
    against_random = tmp_path / "random.jsonl"
    table(capsys, "--checkpoint", checkpoint, "--output", str(against_random), games=["leduc_poker"])
    assert [r["seed"] for r in played(output)] == [r["seed"] for r in played(against_random)]
    assert [r["returns"] for r in played(output)] != [r["returns"] for r in played(against_random)]


def test_each_seat_is_answered_by_its_own_player():
    asked: dict[str, list[env_wrapper.Query]] = {"own": [], "other": []}

    def player(name):
        def act(queries):
            asked[name] += queries
            return [env_wrapper.Action(str(next(iter(query.legal)))) for query in queries]

        return SimpleNamespace(act=act)

    seats = players.Seats(player("own"), {"other": player("other")})
    tasks = [Task(LEDUC, seed, "past:other") for seed in range(20)]
    env_wrapper.play(EnvConfig(), seats, tasks)
    assert all(query.seat == query.episode % 2 for query in asked["own"])
    assert all(query.seat != query.episode % 2 for query in asked["other"])
    assert {query.adapter for query in asked["own"] + asked["other"]} == {None}


@pytest.mark.parametrize("game", ["goofspiel_small", "leduc_poker", "tic_tac_toe", "hearts"])
def test_a_bot_in_the_models_seat_plays_a_whole_game(game):
    [[(task_id, _)]] = evaluate.game_sets([f"{game}#0"]).values()
    [tasks] = paired_tasks([[(task_id, task_id)]], 4, 0, "random")
    episodes = [arena.play_bot("mcts:5x1" if game != "hearts" else "random", task) for task in tasks]
    assert [e.info["seat"] for e in episodes] == [0, 1, 0, 1]
    for episode in episodes:
        assert episode.outcome == "finished", episode.info
        assert position(task_id, episode.info["history"]).returns() == episode.info["returns"]


def test_a_bot_in_the_models_seat_plays_each_deal_by_its_own_seed():
    ttt = NAMES.index("tic_tac_toe") * CONFIGS_PER_GAME
    games = [arena.play_bot("random", Task(ttt, seed, "random", seed)) for seed in range(0, 60, 2)]
    first = [episode.info["history"][0][1] for episode in games]
    assert first == [np.random.RandomState(seed + 2 + 0 + 2).choice(9) for seed in range(0, 60, 2)]
    assert len({*first}) > 6


# ------------------------------------------------------------------------------------------------------------- ladder


def test_a_ladder_rates_everyone_against_everyone(checkpoint, tmp_path, capsys):
    result = report(tmp_path, "--ladder", "random", "mcts:3x1", "mcts:100x2", "base", checkpoint, games=["kuhn_poker"])
    capsys.readouterr()
    labels = [row["player"] for row in result["ladder"]]
    assert sorted(labels) == sorted(["random", "mcts:3x1", "mcts:100x2", "base", "run/checkpoint-000006"])
    assert len(result["matches"]) == 10
    assert {m["games"] for m in result["matches"]} == {20}
    points = {row["player"]: row["ratings"]["overall"] for row in result["ladder"]}
    assert points["random"] == {"points": 0.0, "low": 0.0, "high": 0.0}
    for rating in points.values():
        assert rating["low"] <= rating["points"] <= rating["high"]


def test_every_match_of_a_ladder_has_deals_of_its_own(tmp_path, capsys):
    """On the same ones who is named early would have the same luck against everybody."""
    file = tmp_path / "games.jsonl"
    words = ["--ladder", "random", "cfr:1", "cfr:3", "--output", str(file)]
    assert evaluate.main(command(*words, games=["kuhn_poker"])) == 0
    matches = {(row["player"], row["opponent"]): set() for row in played(file)}
    for row in played(file):
        matches[row["player"], row["opponent"]].add(row["seed"])
    assert [len(seeds) for seeds in matches.values()] == [20] * 3
    assert len(set().union(*matches.values())) == 60
    [chosen_by] = paired_tasks([*evaluate.game_sets(["kuhn_poker"]).values()], 20, 0, "random")
    assert not {task.index for task in chosen_by} & {row["index"] for row in played(file)}


@pytest.mark.slow
def test_games_that_are_in_two_lines_count_once_in_the_mean(tmp_path):
    lines = ["kuhn_poker", "liars_dice_small#0", "liars_dice_small#0-1"]
    [shown] = report(tmp_path, "--checkpoint", "random", games=lines)["tables"]
    kuhn, _, liars, overall = shown["results"]
    assert overall["game"] == "overall"
    assert overall["value"] == pytest.approx((kuhn["value"] + liars["value"]) / 2)
    assert overall["episodes"] == 40
    [shown] = report(tmp_path, "--checkpoint", "random", games=lines[1:])["tables"]
    assert len(shown["results"]) == 2, "a mean of one line is no line"
    apart = lines, [lines[0], lines[2]]
    rated, alone = (report(tmp_path, "--ladder", "random", "mcts:2x1", games=g)["ladder"] for g in apart)
    of_search = [next(row["ratings"]["overall"] for row in r if row["player"] == "mcts:2x1") for r in (rated, alone)]
    assert of_search[0] == of_search[1]


def test_two_servers_of_one_model_are_told_apart():
    roster = Roster([], [], 0, False, "m")
    found = [roster.contestant(f"http://{host}/v1").label for host in ("a", "b", "a")]
    assert found == ["m", "m@http://b/v1", "m"]


@pytest.mark.parametrize("name", ["random", "base"])
def test_a_folder_that_is_called_as_a_player_is_not_meant(checkpoint, tmp_path, monkeypatch, name):
    models = Path("models").resolve()
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / "config").symlink_to(Path(evaluate.__file__).parents[1] / "config")
    (tmp_path / "models").symlink_to(models)
    assert evaluate.main(command("--ladder", name, checkpoint, "cfr:1", games=["kuhn_poker"])) == 0


@pytest.mark.parametrize("error", [utils.CheckpointError, TrainingError, torch.OutOfMemoryError])
def test_what_one_game_takes_is_not_lost_for_the_others(run, monkeypatch, capsys, error):
    """Hours went into each of them."""
    real = evaluate.Contest._exploited

    def exploited(self, arena, player, game):
        if game == "leduc_poker":
            raise error("no space left")
        return real(self, arena, player, game)

    monkeypatch.setattr(evaluate.Contest, "_exploited", exploited)
    shown = table(capsys, "--checkpoint", str(run), "--exploit", "1", "--exploit-steps", "1", code=1)
    assert "kuhn_poker" in shown
    assert "leduc_poker" not in shown


def test_the_ladders_default_is_base_random_and_search_of_three_strengths(checkpoint):
    args = evaluate.arguments(command("--ladder", "--checkpoint", checkpoint))
    names = evaluate.Contest(args).names
    assert names == ["base", "random", "mcts:10x1", "mcts:50x1", "mcts:200x1", checkpoint]


def test_a_model_that_nobody_plays_is_refused(checkpoint, capsys):
    assert evaluate.main(command("--checkpoint", checkpoint, "--model", "models/none")) == 2
    assert "error: --model models/none: base is not among the players" in capsys.readouterr().err


def test_players_of_folders_with_one_name_are_told_apart(checkpoint, tmp_path):
    names = [shutil.copytree(Path(checkpoint), tmp_path / side / "run" / "checkpoint-000001") for side in "ab"]
    found = report(tmp_path, "--compare", *map(str, names), games=["kuhn_poker"])
    labels = [shown["player"] for shown in found["tables"]]
    assert labels == ["run/checkpoint-000001", str(names[1])]


def test_a_player_has_its_checkpoints_name_however_it_is_named(checkpoint, tmp_path, monkeypatch):
    links = [tmp_path / "best", tmp_path / "the best"]
    for link in links:
        link.symlink_to(checkpoint)
    monkeypatch.chdir(checkpoint)
    roster, folder = Roster([], [], 0, False, None), Path(checkpoint).resolve()
    found = [roster.contestant(name) for name in (".", *map(str, links))]
    assert [player.label for player in found] == [
        f"{folder.parent.name}/{folder.name}", str(folder), f"{folder}@{tmp_path}/the_best"
    ]  # fmt: skip
    assert parse_opponent(found[2].opponent).adapter == found[2].label


def test_a_server_is_on_the_default_ladder_under_its_own_name():
    """``--model`` is its name there, and no model to be loaded here."""
    contest = SimpleNamespace(args=evaluate.arguments(["--ladder", "--base-url", "http://x/v1", "--model", "m"]))
    assert evaluate.Contest._names(contest) == ["random", "mcts:10x1", "mcts:50x1", "mcts:200x1", "http://x/v1"]
    contest.args.checkpoint = ["runs/x"]
    assert "base" not in evaluate.Contest._names(contest)


@pytest.mark.parametrize("held", ['{"step": 1}\n', "notes", "[1]", '{"settings": {"editor.tabSize": 4}}'])
def test_tables_replace_tables_alone(tmp_path, capsys, held):
    file = tmp_path / "metrics.jsonl"
    command = ["--checkpoint", "random", "--games", "tic_tac_toe", "--episodes", "2", "--json", str(file)]
    file.write_text(held)
    with pytest.raises(SystemExit) as ended:
        evaluate.main(command)
    assert ended.value.code == 2
    assert f"--json {file}: holds something else than tables of this program" in capsys.readouterr().err
    assert file.read_text() == held
    file.write_text("")
    for _ in range(2):
        assert evaluate.main(command) == 0
    assert "tables" in json.loads(file.read_text())


def test_tables_of_before_are_replaced_where_nobody_reads_what_is_printed(tmp_path):
    file = tmp_path / "tables.json"
    file.touch()
    command = [sys.executable, "scripts/evaluate.py", "--checkpoint=random", "--games=tic_tac_toe", "--episodes=2"]
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command, f"--json={file}"]
    done = subprocess.run(shell, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert "tables" in json.loads(file.read_text())


def test_tables_are_written_into_files_alone(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for name, why in ((tmp_path / "pipe", "is no regular file"), ("x" * 300, "[Errno 36] File name too long")):
        with pytest.raises(SystemExit) as ended:
            evaluate.main(["--checkpoint", "random", "--json", str(name)])
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"error: --json {name}: {why}")


def test_tables_as_json_and_tables_to_be_read_need_two_files(tmp_path, capsys):
    printed, stdout = tmp_path / "printed", os.dup(1)
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        try:
            with pytest.raises(SystemExit) as ended:
                evaluate.main(
                    ["--checkpoint", "random", "--games", "tic_tac_toe", "--episodes", "2", "--json", "/dev/stdout"]
                )
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
    assert ended.value.code == 2
    assert "error: --json /dev/stdout: is where the tables are printed" in capsys.readouterr().err


@pytest.mark.parametrize("base", [[], None, "x", {"weights": "0"}])
def test_a_manifest_of_odd_contents_is_a_line(checkpoint, tmp_path, capsys, base):
    shutil.copytree(checkpoint, tmp_path / "copy")
    manifest = json.loads((tmp_path / "copy" / "manifest.json").read_text())
    del manifest["digest"]
    (tmp_path / "copy" / "manifest.json").write_text(utils._seal(manifest | {"base": base}))
    code = evaluate.main(["--checkpoint", str(tmp_path / "copy"), "--games", "kuhn_poker", "--episodes", "2"])
    assert code == (0 if isinstance(base, dict) else 2)
    assert ("base is no object" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize("held", ["null", "[]"])
def test_an_adapter_without_settings_is_told_by_its_file(checkpoint, tmp_path, capsys, held):
    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "copy" / "manifest.json").unlink()
    (tmp_path / "copy" / "adapter_config.json").write_text(held)
    assert evaluate.main(["--checkpoint", str(tmp_path / "copy"), "--episodes", "2"]) == 2
    assert capsys.readouterr().err.endswith(f"{tmp_path}/copy/adapter_config.json: is no JSON object\n")


def test_a_part_of_an_adapter_is_no_player(run, tmp_path, capsys):
    """What lacks would be as at the start: the table would be the base's."""
    shutil.copytree(run, tmp_path / "run")
    final = tmp_path / "run" / "final"
    (final / "manifest.json").unlink()
    weights = load_file(final / "adapter_model.safetensors")
    lost = next(name for name in sorted(weights) if "lora_B" in name)
    save_file({name: x for name, x in weights.items() if name != lost}, final / "adapter_model.safetensors")
    assert evaluate.main(["--checkpoint", str(final)]) == 2
    error = capsys.readouterr().err
    assert f"lacks weights: {lost.replace('lora_B', 'lora_B.player0')}" in error
    assert error.count("\n") == 1
    config = micro_config(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.adapter: .* lacks weights: "):
        load_policy(SimpleNamespace(**vars(config) | {"model": dataclasses.replace(config.model, adapter=str(final))}))


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_told_so(run, tmp_path, capsys, monkeypatch):
    shutil.copytree(run, tmp_path / "run")

    def gone(policy, name, folder):
        shutil.rmtree(folder)
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr("policy.adapters.Adapters.add_adapter", gone)
    assert evaluate.main(["--checkpoint", str(tmp_path / "run")]) == 2
    assert f"its run has deleted checkpoint-{STEPS:06d} meanwhile; repeat the command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("players", "told"),
    [
        (["--compare", "base", "random"], "random: does not play the games of env.env_type trace"),
        (["--checkpoint", "base", "--opponent", "mcts"], "--opponent: programs (env.env_type trace) have none"),
        (["--checkpoint", "base", "--exact"], "--exact: programs (env.env_type trace) have none"),
        (["--ladder", "base", "random"], "env.env_type trace: programs have no opponents"),
        (["--strength", "--checkpoint", "base"], "env.env_type trace: programs have no opponents"),
    ],
)
def test_programs_are_not_compared_with_board_games(players, told, capsys):
    stages = 'curriculum.stages=[{"name": "sums", "games": [[0, 9]]}]'
    trace = ["--model", base_model(), "--set", "env.env_type=trace", "env.answer_mode=free", stages]
    trace += ["model.use_4bit=false", "model.dtype=float32", "model.device=cpu"]
    assert evaluate.main([*players, *trace]) == 2
    assert f"error: {told}" in capsys.readouterr().err


def test_programs_that_are_not_there_are_told_before_a_model_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate.Roster, "contestant", lambda *_: pytest.fail("a player was loaded"))
    stages = 'curriculum.stages=[{"name": "sums", "games": [[0, 9]]}]'
    trace = ["--model", base_model(), "--set", "env.env_type=trace", "env.answer_mode=free", stages]
    assert evaluate.main([*trace, "env.trace.source=nowhere"]) == 2
    assert "error: env.trace: trace.source 'nowhere' is not there" in capsys.readouterr().err
    (tmp_path / "one.py").write_text("print(1)")
    for game, first in (("kuhn_poker", KUHN), ("0-200000000", 100_000_000)):
        assert evaluate.main([*trace, f"env.trace.source={tmp_path}", "--games", game]) == 2
        assert f"error: env.trace: task_id {first} is out of range: allowed are 0 to 99" in capsys.readouterr().err


def test_programs_are_played_against_nobody(capsys):
    stages = 'curriculum.stages=[{"name": "a", "games": [[0, 9999999]]}]'
    sets = ["env.env_type=trace", "env.answer_mode=free", "env.prompt=compact", "ppo.max_new_tokens=2", stages]
    sets += ["model.use_4bit=false", "model.dtype=float32", "model.device=cpu"]
    assert evaluate.main(["--checkpoint", "base", "--model", base_model(), "--episodes", "4", "--set", *sets]) == 0
    out, err = capsys.readouterr()
    assert ", trace 0-9999999: 4/4 games" in err
    assert "against" not in out + err


@pytest.mark.parametrize(("words", "told"), [
    ("--checkpoint RUN --opponent mtcs", "mtcs: no such directory"),
    ("--checkpoint RUN --opponent mcts:0x1", "opponent 'mcts:0x1' is not known"),
    ("--checkpoint RUN --opponent perfect", "opponent perfect cannot play leduc_poker"),
    ("--checkpoint RUN --model m --opponent http://h:x/v1", "a server's address is like"),
    ("--checkpoint RUN --opponent EMPTY", "; expected a checkpoint or a run with one"),
    ("--compare RUN rnudom", "rnudom: no such directory"),
])  # fmt: skip
def test_every_name_is_looked_at_before_a_model_is_loaded(run, tmp_path, capsys, monkeypatch, words, told):
    """A mistyped one was told after the models before it, which may take minutes."""
    monkeypatch.setattr(players, "load_policy", lambda *_: pytest.fail("a model was loaded"))
    words = [{"RUN": str(run), "EMPTY": str(tmp_path)}.get(word, word) for word in words.split()]
    assert evaluate.main(command(*words, games=["leduc_poker"])) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert told in line


@pytest.mark.parametrize(
    ("bot", "game"),
    [("perfect", "hex_small"), pytest.param("cfr:2", "liars_dice_small", marks=pytest.mark.slow)],
)
def test_a_bot_that_cannot_play_all_configurations_is_refused_before_the_first_game(bot, game, capsys):
    """It could play the first one."""
    assert evaluate.main(command("--checkpoint", "random", "--opponent", bot, games=[f"{game}#0"])) == 0
    capsys.readouterr()
    assert evaluate.main(["--checkpoint", "random", "--opponent", bot, "--games", game]) == 2
    kind = bot.partition(":")[0]
    assert f"error: opponent {kind} cannot play {game}: " in capsys.readouterr().err
    stages = [Stage("one", [game], {"random": 1, bot: 1}, gate_opponent="random")]
    with pytest.raises(ConfigError, match=f"stage 'one': opponent {kind} cannot play {game}"):
        check_opponents(CurriculumConfig(stages))


def test_one_player_has_no_ladder(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(players, "load_policy", lambda config: pytest.fail("weights were loaded"))
    assert evaluate.main(command("--ladder", checkpoint)) == 2
    assert f"error: --ladder: nobody to play against {checkpoint}; name others" in capsys.readouterr().err


@pytest.mark.slow
def test_more_search_climbs_the_ladder(tmp_path):
    names = ("mcts:200x1", "random", "mcts:10x1", "mcts:50x1")
    result = report(tmp_path, "--ladder", *names, games=["tic_tac_toe", "connect_four"], episodes=60)
    assert [row["player"] for row in result["ladder"]] == ["mcts:200x1", "mcts:50x1", "mcts:10x1", "random"]


# ----------------------------------------------------------------------------------------------------------- strength


@pytest.mark.slow
def test_the_strength_table_has_a_cell_for_every_opponent_of_every_game(tmp_path):
    result = report(tmp_path, "--strength", "--checkpoint", "random", games=(), episodes=4)
    cells = [(cell["game"], cell["opponent"], cell["episodes"]) for cell in result["strength"]]
    assert cells == [(game, name, 4) for game, names in evaluate.STRENGTH.items() for name in names]
    assert 0 < result["cfr_nash_conv"]["kuhn_poker"] < 0.002
    assert 0 < result["cfr_nash_conv"]["leduc_poker"] < 0.01
    args = ["--strength", "--checkpoint", "random"]
    assert evaluate.arguments(args).episodes == 1000
    assert evaluate.arguments(args[1:]).episodes == 200


def test_in_the_strength_table_everybody_gets_the_same_deals_in_both_seats(checkpoint, tmp_path, capsys):
    output = tmp_path / "games.jsonl"
    args = ("--strength", "--checkpoint", checkpoint, "random", "--markdown", "--output", str(output))
    shown = table(capsys, *args, games=())
    head, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if "|" in line]
    assert head == ["player", "game", "opponent", "games", "value", "95 %", "won", "drawn", "lost"][: len(head)]
    assert [line[:3] for line in lines] == [
        [player, game, "cfr"]
        for player in ("run/checkpoint-000006", "random")
        for game in ("kuhn_poker", "leduc_poker")
    ]  # the run's games, of those that have cells
    rows = played(output)
    deals = {
        p: [(r["task_id"], r["seed"], r["seat"]) for r in rows if r["player"] == p] for p in {r["player"] for r in rows}
    }
    ours, theirs = deals.values()
    assert ours == theirs
    assert [seat for _, _, seat in ours] == [0, 1] * 20
    assert "cfr: 300 iterations; its NashConv: 0.0009 in kuhn_poker, 0.0046 in leduc_poker" in shown
    assert table(capsys, *args, games=()) == shown  # read from the file


def test_a_perfect_player_never_loses_and_equilibria_hold_their_own(tmp_path):
    [game] = report(tmp_path, "--checkpoint", "perfect", "--exact", games=["tic_tac_toe"])["tables"][0]["results"]
    assert (game["loss"], game["nash_conv"]) == (0, 0)
    assert 0.8 < game["exact"] < game["ceiling"]
    args = ("--checkpoint", "mcts:20x1", "--opponent", "perfect")
    [game] = report(tmp_path, *args, games=["tic_tac_toe"])["tables"][0]["results"]
    assert (game["success"], game["loss"] > 0.2) == (0, True)
    [kuhn] = report(tmp_path, "--checkpoint", "cfr:50", "--exact", games=["kuhn_poker"])["tables"][0]["results"]
    assert 0.003 < kuhn["nash_conv"] < 0.01


# ------------------------------------------------------------------------------------------------------------- servers


class Server:
    """An OpenAI-compatible server; ``answer`` maps a request and its number to (status, text), or bytes sent as is."""

    def __init__(self, answer):
        self.answer, self.requests, self.headers, self._lock = answer, [], [], threading.Lock()

    def __call__(self, path, body, headers):
        if not path.endswith("/chat/completions"):  # what else a server can do is asked, too
            return 404, ""
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            status, text = self.answer(body, len(self.requests))
        return status, said(text) if status == 200 and isinstance(text, str) else text


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(client, "LONGEST_WAIT", 0.001)
    with contextlib.ExitStack() as running:

        def start(answer):
            server = Server(answer)
            server.url = running.enter_context(http_server(server)) + "/v1"
            return server

        yield start


QUERY = env_wrapper.Query(0, 0, [{"role": "user", "content": "?"}], {0: "a", 1: "b"}, (0, 0, 0, 1))


def of_content(content, **more):
    return json.dumps({"choices": [{"message": {"content": content}, **more}]}).encode()


def first_legal(body, number):
    """The first of the actions listed in the last question, in words."""
    listed = re.findall(r"^(\d+) -> ", body["messages"][-1]["content"], re.MULTILINE)
    return 200, f"I play {listed[0]}"


def test_a_server_is_asked_for_free_answers(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test-0123456789")
    server = serve(first_legal)
    args = ("--model", "some/model", "--base_url", server.url)
    result = report(tmp_path, *args, games=["kuhn_poker"])
    [kuhn] = result["tables"][0]["results"]
    assert (kuhn["episodes"], kuhn["forfeited"], kuhn["legal_mass"]) == (20, 0, None)
    assert result["tables"][0]["player"] == "some/model"
    body = server.requests[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("some/model", 16, 1.0)
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    assert server.headers[0]["Authorization"] == "Bearer sk-of-the-test-0123456789"
    assert "sk-of-the-test" not in (tmp_path / "report.json").read_text()
    assert len(seeds := {b["seed"] for b in server.requests}) == len(server.requests)
    report(tmp_path, *args, "--greedy", "--seed", "1", games=["kuhn_poker"])
    assert server.requests[-1]["temperature"] == 0
    assert seeds.isdisjoint(b["seed"] for b in server.requests[len(seeds) :])


def test_answers_that_cannot_be_read_forfeit_after_three_attempts(serve, tmp_path):
    server = serve(lambda body, number: (200, "I would rather not"))
    [kuhn] = report(tmp_path, "--model", "m", "--base_url", server.url, games=["kuhn_poker"])["tables"][0]["results"]
    assert (kuhn["forfeited"], kuhn["value"]) == (20, -1.0)
    assert len(server.requests) == 60
    assert "attempt 2 of 3" in server.requests[-1]["messages"][-1]["content"]


@pytest.mark.parametrize(("content", "told"), [
    *((empty, "an empty answer (finish_reason: length) counts as illegal;") for empty in (None, "", " \n")),
    ("<think>\nOkay", "an answer that was cut off is read as far as it goes (finish_reason: length);"),
])  # fmt: skip
def test_empty_answers_and_those_that_are_cut_off_are_told_of_once(serve, caplog, content, told):
    """A model that thinks aloud forfeits every game where there is no room for it: nobody could see why."""
    server = serve(lambda body, number: (200, of_content(content, finish_reason="length")))
    actions = ChatPlayer(server.url, "m", 1.0, 4, 0).act([QUERY] * 16)
    assert not any(action.error for action in actions)
    [line] = caplog.messages
    assert line.endswith(f"{told} a model that thinks first needs more than ppo.max_new_tokens (4)")


@pytest.mark.parametrize(("content", "reason"), [
    ("1", "abort"), ("", "error"), *((odd, "stop") for odd in ({}, [], False, 0)),
])  # fmt: skip
def test_an_answer_that_the_server_broke_off_is_asked_for_again_not_counted(serve, content, reason):
    broken = of_content(content, finish_reason=reason)
    server = serve(lambda body, number: (200, broken) if number % 4 else (200, "0"))
    player = ChatPlayer(server.url, "m", 1.0, 4, 0)
    assert "not the answer of an OpenAI-compatible server" in player.act([QUERY])[0].error
    assert player.act([QUERY])[0].text == "0"
    assert len({request["seed"] for request in server.requests}) == 3  # one and the same may be broken off for ever


def test_a_server_that_is_asked_too_often_is_waited_for_and_that_is_told(serve, caplog, monkeypatch):
    """Limits are often per minute; half a minute of attempts ended the evaluation."""
    server = serve(lambda body, number: (429, "slow down") if number < 30 else (200, "1"))
    player = ChatPlayer(server.url, "m", 1.0, 4, 0)
    assert player.act([QUERY])[0].text == "1"
    assert [line.partition(": ")[2] for line in caplog.messages] == ["HTTP 429; it is asked again for up to 300 s"]
    monkeypatch.setattr(players, "LIMIT_SECONDS", 0.2)
    server.answer = lambda body, number: (429, "slow down")
    with pytest.raises(players.ProgramError, match=r"HTTP 429: slow down|no answer within"):
        player.act([QUERY])


def test_a_server_that_writes_slowly_is_waited_for_and_that_is_told_once(serve, caplog, monkeypatch):
    """A laptop that writes one answer at a time is asked for sixteen: five minutes ended the evaluation."""
    assert players.ANSWER_SECONDS / players.CALLS_AT_ONCE > 60
    monkeypatch.setattr(players, "SLOW_SECONDS", 0.2)
    one_at_a_time = threading.Lock()

    def answer(body, number):
        with one_at_a_time:
            time.sleep(0.15)
        return 200, "1"

    server = serve(answer)
    assert [action.text for action in ChatPlayer(server.url, "m", 1.0, 4, 0).act([QUERY] * 5)] == ["1"] * 5
    assert len(server.requests) == 5
    assert [line.partition(": ")[2] for line in caplog.messages] == [
        "no answer for 0.2 s; an answer is waited for up to 1800 s"
    ]
    ChatPlayer(serve(lambda body, number: (200, "1")).url, "m", 1.0, 4, 0).act([QUERY])
    time.sleep(0.3)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("status", [408, 429, 503])
@pytest.mark.parametrize("failures", [2, 3])
def test_a_server_that_stumbles_is_asked_again_and_that_is_told_once_if_it_lasts(serve, status, failures, caplog):
    server = serve(lambda body, number: (status, "busy") if number <= failures else (200, "1"))
    assert ChatPlayer(server.url, "m", 1.0, 4, 0).act([QUERY])[0].text == "1"
    assert len(server.requests) == failures + 1
    told = [f"{server.url}/chat/completions: HTTP {status}; it is asked again for "] * (failures == 3)
    assert [line.partition("for ")[0] + "for " for line in caplog.messages] == told


@pytest.mark.parametrize(
    ("status", "text"), [(401, "bad key sk-of-the-test-0123456789"), (500, "down"), (200, b"not JSON")]
)
def test_a_server_that_refuses_ends_the_evaluation(serve, tmp_path, capsys, monkeypatch, status, text):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test-0123456789")
    server = serve(lambda body, number: (status, text))
    args = command("--model", "m", "--base_url", server.url, games=["kuhn_poker"])
    assert evaluate.main(args) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert server.url in line
    assert "sk-of-the-test" not in line


@pytest.mark.parametrize("flag", ["--checkpoint", "--compare"])
def test_a_server_that_is_gone_costs_no_other_player_its_table(serve, tmp_path, capsys, flag):
    server = serve(lambda body, number: (500, "down"))
    kept = tmp_path / "games.jsonl"
    for _ in range(2):  # played, and read from the file
        args = command(flag, "random", server.url, "--model", "m", "--output", str(kept), games=["kuhn_poker"])
        assert evaluate.main(args) == 1
        out, err = capsys.readouterr()
        assert out.startswith("random against random")
        assert f"error: {server.url}/chat/completions: HTTP 500: down" in err.splitlines()
        assert "minus" not in out
    server.answer = first_legal
    assert evaluate.main(args) == 0
    assert "m against random" in capsys.readouterr().out


def test_a_server_of_games_that_is_gone_is_told_before_it_is_asked_for_each(checkpoint, capsys, monkeypatch):
    """Seven seconds a game, thirty at once; a minute a game where nothing even refuses."""
    with monkeypatch.context() as patch:
        patch.setattr(arena, "check_server", (asked := []).append)
        table(capsys, "--checkpoint", checkpoint, games=["leduc_poker"])
    assert len(asked) == 1, "later it may be away for a moment"
    gone = ("--set", "env.env_mode=url", "env.env_url=http://127.0.0.1:9")
    assert evaluate.main(command("--model", "m", "--base-url", "http://127.0.0.1:9/v1", *gone)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: env.env_url: no server answers at http://127.0.0.1:9 (no connection: ")


def test_nobody_plays_after_a_player_whose_server_is_gone(serve, tmp_path, capsys):
    """The file holds games in the order of the command: with those of a later player first it could not go on."""
    server = serve(lambda body, number: (500, "down"))
    args = command("--checkpoint", server.url, "random", "--model", "m", "--output", str(tmp_path / "games.jsonl"))
    assert evaluate.main(args) == 1
    assert capsys.readouterr().out == ""
    server.answer = first_legal
    assert evaluate.main(args) == 0


@pytest.mark.parametrize(("words", "shown"), [
    (["--strength", "--base-url", "URL"], "kuhn_poker"), (["--ladder", "random", "mcts:2x1", "URL"], "\nmcts:2x1  "),
    (["--ladder", "mcts:2x1", "mcts:3x1", "URL", "random"], "  +0 [+0, +0]  "),  # somebody who played is the zero
    (["--base-url", "URL"], "\nkuhn_poker  "), (["--compare", "random", "URL"], "random minus m,"),
])  # fmt: skip
def test_a_server_that_goes_costs_no_table_of_the_games_before(serve, tmp_path, capsys, words, shown):
    server = serve(lambda body, n: (500, "down") if "leduc" in str(body).lower() else first_legal(body, n))
    words = [server.url if word == "URL" else word for word in words]
    words += ["--model", "m", "--json", str(tmp_path / "tables.json")]
    assert evaluate.main(command(*words, games=["kuhn_poker", "leduc_poker"])) == 1
    out, err = capsys.readouterr()
    assert shown in out
    assert ("\nm " in out) == ("--compare" in words)  # nothing is known of who played no match of a ladder to its end
    told = f"{server.url}/chat/completions: HTTP 500: down"
    assert f"error: {told}" in err.splitlines()
    found = json.loads((tmp_path / "tables.json").read_text())
    assert found["missing"] == [told]
    for rows in (found.get("comparison", []), *(table["results"] for table in found.get("tables", [])[-1:])):
        assert [row["game"] for row in rows] in ([], ["kuhn_poker"])  # and no mean that lacks the other


def test_games_kept_before_a_server_went_are_continued_in_their_order(serve, tmp_path, capsys):
    """Those of the next player would have come where the lost game belongs."""
    server = serve(lambda body, n: (500, "down") if "leduc" in str(body).lower() else first_legal(body, n))
    file = tmp_path / "games.jsonl"
    words = ["--checkpoint", server.url, "random", "--model", "m", "--output", str(file)]
    args = command(*words, games=["kuhn_poker", "leduc_poker"])
    assert evaluate.main(args) == 1
    kept = file.read_text()
    assert {(row["player"], row["game"]) for row in map(json.loads, kept.splitlines()[1:])} == {("m", "kuhn_poker")}
    server.answer = first_legal
    assert evaluate.main(args) == 0
    assert file.read_text().startswith(kept)


@pytest.mark.parametrize("odd", [b"not JSON", b'{"choices": []}', b'{"choices": [{"message": {"content": 5}}]}'])
def test_an_odd_answer_of_a_server_is_asked_for_again_and_costs_its_game_alone(serve, odd, tmp_path):
    def answer(body, number):
        return (200, odd) if number % 7 == 0 or 30 <= number < 33 else first_legal(body, number)

    server = serve(answer)
    args = ("--model", "m", "--base_url", server.url, "--games_at_once", "1")
    [kuhn] = report(tmp_path, *args, games=["kuhn_poker"])["tables"][0]["results"]
    assert kuhn["episodes"] + kuhn["failed"] == 20
    assert kuhn["episodes"] >= 18


def test_an_answer_without_end_is_read_as_far_as_it_is_kept(serve, monkeypatch, caplog):
    """It was taken for no answer, and its game for one that failed: those that a model rambles in were left out."""
    monkeypatch.setattr(players, "MAX_CHARACTERS", 9)
    for content, told in (("1 or mayb", ""), ("1 or maybe not", "(finish_reason: 9 characters)")):
        server = serve(lambda body, number, content=content: (200, of_content(content)))
        [action] = ChatPlayer(server.url, "m", 1.0, None, 0).act([QUERY])
        assert (action.text, action.error) == ("1 or mayb", "")
        assert told in caplog.text
        assert bool(told) == bool(caplog.text)


def test_half_a_character_is_no_end_of_an_evaluation(serve, tmp_path):
    """It goes into the next question, which could not be sent."""

    def answer(body, number):
        if "->" not in body["messages"][-1]["content"]:  # it was illegal, and is asked again
            return 200, of_content("0")
        return (200, of_content("\ud83d")) if number == 3 else first_legal(body, number)

    args = ("--model", "m", "--base_url", serve(answer).url)
    [kuhn] = report(tmp_path, *args, games=["kuhn_poker"])["tables"][0]["results"]
    assert (kuhn["episodes"], kuhn["failed"]) == (20, 0)


@pytest.mark.parametrize("error", [{"code": 429, "message": "slow"}, {"message": "overloaded"}, "overloaded"])
def test_a_failure_in_an_answer_of_status_200_is_waited_for(serve, error, monkeypatch):
    server = serve(lambda body, number: (200, json.dumps({"error": error}).encode() if number < 5 else b"")
                   if number < 5 else (200, "1"))  # fmt: skip
    [action] = ChatPlayer(server.url, "m", 1.0, 4, 0).act([QUERY])
    assert (action.text, action.error) == ("1", "")


def test_games_on_a_server_are_not_few_at_a_time(tmp_path):
    roster = Roster([], [], 0, False, "m")
    assert roster.contestant("http://127.0.0.1:1/v1").env.games_at_once == 0
    (tmp_path / "own.json").write_text('{"env": {"games_at_once": 3}}')
    for own in ([], ["env.games_at_once=3"]), ([tmp_path / "own.json"], []):
        assert Roster(*own, 0, False, "m").contestant("http://127.0.0.1:1/v1").env.games_at_once == 3


def test_a_runs_configuration_says_how_it_was_trained_not_how_a_server_is_asked(checkpoint):
    """The guide gives one as --config. Games were few at a time, and the public protocol was refused."""
    file = str(Path(checkpoint).parent / "run_config.json")
    assert json.loads(Path(file).read_text())["env"]["games_at_once"] > 0
    for public in (False, True):
        player = Roster([file], [], 0, False, "m", public).contestant("http://127.0.0.1:1/v1")
        assert player.env.games_at_once == 0
        assert ("max_tokens" in player.origin) != public


@pytest.mark.parametrize("told", [
    "maximum context length is 10 tokens", "context_length_exceeded", "exceeds the available context size",
    "The decoder prompt (length 11) is longer than the maximum model length of 10.",
    "`inputs` tokens + `max_new_tokens` must be <= 9.", "`inputs` must have less than 9 tokens. Given: 11",
])  # fmt: skip
def test_a_prompt_that_the_server_finds_too_long_ends_the_game_truncated(serve, told, tmp_path, capsys):
    status = 422 if told.startswith("`") else 400
    server = serve(lambda body, number: (status, told))
    [kuhn] = report(tmp_path, "--model", "m", "--base_url", server.url, games=["kuhn_poker"])["tables"][0]["results"]
    assert kuhn["truncated"] == 20
    assert capsys.readouterr().err.count(f"HTTP {status}: {told}; such games count as truncated") == 1


def test_a_refusal_that_only_speaks_of_a_context_is_no_lost_game(serve, tmp_path, capsys):
    server = serve(lambda body, number: (400, "seed is not allowed in this context"))
    args = ("--model", "m", "--base-url", server.url, "--games", "kuhn_poker", "--episodes", "2")
    assert evaluate.main([*args, "--output", str(tmp_path / "out")]) == 1
    assert "HTTP 400: seed is not allowed in this context" in capsys.readouterr().err


def test_a_server_can_be_the_opponent(serve, checkpoint, tmp_path):
    """One that gives no legal answer, so that it shows who was asked for whom: in kuhn_poker both seats move."""
    server = serve(lambda body, number: (200, "none"))
    args = ("--checkpoint", checkpoint, "--model", "m", "--opponent", server.url)
    [found] = report(tmp_path, *args, games=["kuhn_poker"])["tables"]
    assert (found["opponent"], found["results"][0]["value"]) == ("m", 1.0)


@pytest.mark.parametrize("server_first", [False, True])
def test_a_server_meets_a_model_of_compact_prompts_in_a_ladder_whoever_is_named_first(serve, checkpoint, server_first):
    server = serve(lambda body, number: (200, body["messages"][-1]["content"].split("\n")[-1][0]))
    named = [checkpoint, server.url][:: -1 if server_first else 1]
    assert evaluate.main(command("--ladder", *named, "--model", "m", games=["kuhn_poker"])) == 0
    assert server.requests


def test_the_public_protocol_asks_forced_moves_free_answers_and_plays_mcts(serve, tmp_path):
    """tic_tac_toe's ninth stone is forced: the public environment asks for it, and so does its protocol here."""
    server = serve(first_legal)
    args = ("--model", "m", "--base_url", server.url, "--protocol", "affinetes")
    result = report(tmp_path, *args, "--opponent", "random", games=["tic_tac_toe"], episodes=40)
    forced = [b for b in server.requests if b["messages"][-1]["content"].count(" -> ") == 1]
    assert forced
    assert "# Game Rules" in forced[0]["messages"][0]["content"]
    assert len(forced[0]["messages"]) == 10  # the whole conversation: five questions, four answers, the system message
    env = result["settings"]["players"][0]["env"]
    assert (env["protocol"], env["answer_mode"], env["history_turns"]) == ("affinetes", "free", "all")
    assert {"max_tokens", "max_new_tokens"}.isdisjoint(server.requests[0])
    assert evaluate.Contest(evaluate.arguments(command(*args))).opponent_name == "mcts"


def test_the_public_protocol_cuts_answers_where_the_user_says_so(tmp_path):
    file = tmp_path / "own.json"
    file.write_text('{"ppo": {"max_new_tokens": 512, "max_seq_length": 2048}}')
    typed = ["max_tokens=512", "ppo.max_seq_length=2048"]
    for files, sets, limits in (
        ([], [], (None, 1024, 32768)),
        ([], typed, (512, 512, 2048)),
        ([file], [], (512, 512, 2048)),
    ):
        roster = Roster(files, sets, 0, False, "m", True)
        sent = roster.contestant("http://127.0.0.1:1/v1").origin.get("max_tokens")
        ppo = roster.config(None).ppo
        assert (sent, ppo.max_new_tokens, ppo.max_seq_length) == limits


@pytest.mark.parametrize("setting", ['"prompt": "compact"', '"history_turns": 2', '"answer_mode": "constrained"'])
def test_what_contradicts_the_public_protocol_is_refused(tmp_path, capsys, setting):
    """It was ignored."""
    (tmp_path / "own.json").write_text(f'{{"env": {{{setting}}}}}')
    key, value = setting.replace('"', "").split(": ")
    words = command("--model", "m", "--base-url", "http://127.0.0.1:1/v1", "--protocol", "affinetes")
    for own in (["--set", f"env.{key}={value}"], ["--config", str(tmp_path / "own.json")]):
        assert evaluate.main([*words, *own]) == 2
        assert f"error: --protocol affinetes: env.{key} = " in capsys.readouterr().err
    same = ["--config", str(tmp_path / "own.json"), "--set", *(f"env.{k}={v}" for k, v in players.AFFINETES.items())]
    assert evaluate.Contest(evaluate.arguments([*words, *same])).players[0].env.prompt == "full"


# -------------------------------------------------------------------------------------------------------- bad commands


def test_flags_mean_the_same_in_every_program(capsys):
    args = evaluate.arguments(["--run", "random", "--num-episodes=6", "--game", "hex"])
    assert (args.checkpoint, args.episodes, args.games) == (["random"], 6, ["hex"])
    args = play.arguments(["--run", "runs/x", "--games", "hex"])
    assert (args.opponent, args.game) == ("runs/x", "hex")
    with pytest.raises(SystemExit):
        evaluate.arguments(["--help"])
    shown = capsys.readouterr().out
    assert "--episodes" in shown
    assert "num_episodes" not in shown


@pytest.mark.parametrize(("given", "steps"), [((), 200), (("--exploit-steps", "7"), 7)])
def test_a_best_response_trains_for_200_steps_unless_told(given, steps):
    assert evaluate.arguments(["--checkpoint", "config", "--exploit", "1", *given]).exploit_steps == steps
    swept = ["--checkpoint", "config", "--set", "ppo.sweep=1", "ppo.num_train_steps=9"]
    assert evaluate.arguments(swept).exploit_steps == 200


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nobody to evaluate"),
        (["--checkpoint", "nowhere"], "nowhere: no such directory"),
        (["--checkpoint", "nowhere", "--exploit", "1"], "nowhere: no such directory"),
        (["--checkpoint", "random", "--exploit", "1"], "--exploit: needs --checkpoint with runs or their checkpoints"),
        (["--checkpoint", "mcts:0x1"], "opponent 'mcts:0x1' is not known"),
        (["--checkpoint", "random", "--opponent", "nobody"], "nobody: no such directory"),
        (["--checkpoint", "random", "--games", "ches"], "--games: game 'ches' is not known"),
        (["--checkpoint", "random", "--games", "hex#x"], "--games: hex#x is not known: expected NAME#CONFIG"),
        (["--checkpoint", "random", "--games", "9" * 5000], "--games: game '999"),
        (["--checkpoint", "random", "--num_episodes", "3"], "--episodes 3: an even number"),
        (["--checkpoint", "random", "--games_at_once", "0"], "--games-at-once: 0: expected at least 1"),
        (["--checkpoint", "random", "--set", "ppo.nothing=1"], "--set: ppo.nothing = 1: no such key"),
        (["--checkpoint", "base"], "base: the base of what?"),
        (["--checkpoint", "nowhere", "--games", "nim"], "nowhere: no such directory"),  # which might know the game
        (["--checkpoint", "random", "--set", "env.opponent=mcts"], "env.opponent: stages are not played here"),
        *(
            (["--checkpoint", "random", "--set", item], "env.opponent: stages are not played here")
            for item in ("opponent=mcts", "env.Opponent=mcts", "opponent-type=mcts", 'env={"opponent": "mcts"}')
        ),
        (["--checkpoint", "http://127.0.0.1:1/v1"], "--model must name the model"),
        (["--base_url", "http://127.0.0.1:1/v1", "--checkpoint", "random"], "--model must name the model"),
        (
            ["--base-url", "http://me:hunter2@127.0.0.1:1/v1", "--model", "m"],
            "a server's address is like http://127.0.0.1:8000/v1, without user, password or query",
        ),
        (
            ["--opponent", "https://me:hunter2@127.0.0.1/v1", "--checkpoint", "random"],
            "without user, password or query",
        ),
        *(
            (["--base-url", url, "--model", "m"], "a server's address is like http://127.0.0.1:8000/v1")
            for url in (
                "http://127.0.0.1:99999/v1",
                "http://127.0.0.1:0/v1",
                "http://h:x/v1",
                "http://[::1/v1",
                "127.0.0.1:8000/v1",
                "localhost:8000/v1",
                "HTTP://x/v1",
                "random",
            )
        ),
        *(
            (["--set", "model.adapter=runs/x/final", *player], "model.adapter = 'runs/x/final': nobody plays with it")
            for player in (["--model", "x"], ["--checkpoint", "random"])
        ),
        (["--model", "./nowhere", "--set", "model.use_4bit=false", "model.dtype=float32"], "there is no folder"),
        (["--compare", "random"], "--compare: expected two players, in one --compare, not 1"),
        (["--checkpoint", "random", "--set", "env.env_mode=url", "env.env_url=http://x"], "random: bots play here"),
        (["--ladder", "random", "mcts:2x1", "--games", "hearts"], "--ladder: hearts#* is not for two opposed"),
        (["--checkpoint", "random", "--output", "new/"], "--output: new/: is a folder; expected a file"),
        (["--checkpoint", "random", "--json", "new/"], "--json: new/: is a folder; expected a file"),
        (["--checkpoint", "x", "--output", "/nowhere/x.jsonl"], "--output /nowhere/x.jsonl: there is no such folder"),
        (["--checkpoint", "random", "--opponent", "ismcts", "--games", "hearts"], "ismcts cannot play hearts"),
        (["--checkpoint", "perfect", "--games", "leduc_poker"], "perfect cannot play leduc_poker"),
        (["--ladder", "random", "cfr", "--games", "tic_tac_toe"], "cfr cannot play tic_tac_toe: it hides nothing"),
        (["--strength"], "nobody to evaluate"),
        (["--strength", "--checkpoint", "random", "--opponent", "mcts"], "--strength names opponents itself"),
        (
            ["--strength", "--checkpoint", "random", "--games", "leduc_poker", "hex"],
            "--strength: nobody to measure hex",
        ),
        (["--strength", "--checkpoint", "perfect"], "perfect cannot play connect_four"),
        (["--compare", "random", "mcts:2x1", "--checkpoint", "random"], "leave out --checkpoint, and --base-url"),
        (["--compare", "random", "mcts:2x1", "--base-url", "http://x/v1", "--model", "m"], "leave out --checkpoint"),
        (["--ladder", "random", "mcts:2x1", "--checkpoint", "random"], "leave out --checkpoint"),
        (["--ladder", "--compare", "random", "mcts:2x1"], "--compare: not allowed with argument --ladder"),
        (["--compare", "random", "cfr", "--exploit", "1"], "--exploit: not allowed with argument --compare"),
        (["--checkpoint", "x", "--exploit", "1", "--base-url", "http://x/v1", "--model", "m"], "--exploit: needs"),
        (["--checkpoint", "random", "--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no such folder"),
        (["--checkpoint", "random", "--json", "/proc"], "--json /proc: is no regular file"),
        (
            ["--checkpoint", "random", "--json", "/x.json", "--output", "/x.json"],
            "--json /x.json: is the --output file",
        ),
        (["--checkpoint", "config", "--exploit", "1", "--greedy"], "--exploit: responses learn against sampled play"),
        (["--model", "models/tiny", "--exploit", "1"], "--exploit: needs --checkpoint with runs"),
        (["--checkpoint", "config", "mcts", "--exploit", "1"], "--exploit: needs --checkpoint with runs"),
        (["--compare", "random", "mcts", "--compare", "mcts", "ismcts"], "two players, in one --compare, not 4"),
        (["--checkpoint", "random", "--exploit-steps", "9"], "--exploit-steps 9: nothing is trained without --exploit"),
        (["--checkpoint", "config", "--exploit", "1", "--set", "ppo.num-train-steps=9"], "by --exploit-steps steps of"),
        (["--checkpoint", "config", "--exploit", "1", "--set", "ppo.sweep=0.5"], "by --exploit-steps steps of"),
        (["--checkpoint", "config", "--exploit", "1", "--set", 'ppo={"num_train_steps": 9}'], "by --exploit-steps"),
        (["--ladder", "random", "mcts:2x1", "--opponent", "random"], "leave out --opponent, and of --ladder --exact"),
        (["--checkpoint", "random", "--episodes", "many"], "--episodes: many: expected a whole number"),
        (["--checkpoint", "random", "--seed", str(2**31)], f"at least 0 and at most {2**31 - 1}"),
    ],
)
def test_a_bad_command_is_told_in_one_line(args, message, capsys):
    code: object
    try:
        code = evaluate.main(args)
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error.splitlines()[-1]
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_an_opponent_of_stages_is_refused_in_a_file_too(tmp_path, capsys):
    """There it was ignored. A whole run's configuration says whom it met in training, and may be given."""
    file = tmp_path / "own.json"
    words = ["--checkpoint", "random", "--games", "kuhn_poker", "--episodes", "2", "--config", str(file)]
    for key in ("opponent", "opponent_type"):
        file.write_text(json.dumps({"env": {key: "mcts"}}))
        with pytest.raises(SystemExit, match="2"):
            evaluate.main(words)
        told = f"error: --config {file}: env.opponent: stages are not played here; --opponent names the player's\n"
        assert capsys.readouterr().err == told
    file.write_text(json.dumps({"run": {"seed": 1}, "env": {"opponent": "mcts:2x1"}}))
    with pytest.raises(SystemExit, match="2"):
        evaluate.main(words)
    whole = {section: {} for section in SECTIONS} | {"env": {"opponent": "mcts"}}
    whole["curriculum"] = {"stages": [{"name": "a", "games": ["kuhn_poker"]}]}
    for allowed in ({"env": {"opponent": ""}}, whole):
        file.write_text(json.dumps(allowed))
        assert evaluate.main(words) == 0


def test_a_damaged_checkpoint_or_a_folder_that_is_none_is_refused(run, checkpoint, tmp_path, capsys):
    copy = tmp_path / "copy" / "checkpoint-000006"
    shutil.copytree(checkpoint, copy)
    (copy / "adapter_model.safetensors").write_bytes(b"broken")
    (tmp_path / "empty").mkdir()
    for folder, message in ((copy, "adapter_model.safetensors"), (copy.parent, "no checkpoint in it verifies"),
                            (tmp_path / "empty", "empty; expected ")):  # fmt: skip
        assert evaluate.main(command("--checkpoint", str(folder))) == 2
        assert message in capsys.readouterr().err


def test_a_run_stands_for_its_latest_checkpoint_and_its_final_adapter_can_be_named(run, tmp_path):
    result = report(tmp_path, "--checkpoint", str(run), str(run / "final"), games=["kuhn_poker"])
    latest, final = result["tables"]
    assert (latest["player"], final["player"]) == ("run/checkpoint-000006", "run/final")
    assert latest["results"] == final["results"]


def test_models_that_were_taught_different_prompts_do_not_meet(run, checkpoint, tmp_path, capsys):
    other = tmp_path / "other" / "checkpoint-000006"
    shutil.copytree(run / "final", other)
    (other / "manifest.json").unlink()
    config, own = (json.loads((run / "run_config.json").read_text()) for _ in range(2))
    config["env"]["prompt"] = "full"
    (other / "run_config.json").write_text(json.dumps(config))
    assert evaluate.main(command("--checkpoint", checkpoint, "--opponent", str(other), games=["kuhn_poker"])) == 2
    told = "env.prompt of their run_config.json differ: both must have the same prompts and answers"
    assert told in capsys.readouterr().err
    player = object.__new__(players.ModelPlayer)
    for key in ("env_type", "games_path", "prompt", "answer_mode", "history_turns", "protocol", "trace"):
        mine, another = (players.Contestant(label, {}, player=player) for label in "ab")
        vars(another.env)[key] = "another"
        with pytest.raises(ConfigError, match=rf"env\.{key} of their run_config\.json differ"):
            arena.check_match(mine, another)
    assert evaluate.main(command("--ladder", checkpoint, "random", str(other), games=["kuhn_poker"])) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "games" not in error  # none was played before
    config["env"] |= {"prompt": own["env"]["prompt"], "games_at_once": 7, "allowed_game_indices": ["kuhn_poker"]}
    (other / "run_config.json").write_text(json.dumps(config))
    assert evaluate.main(command("--checkpoint", checkpoint, "--opponent", str(other), games=["kuhn_poker"])) == 0


def test_opponents_that_servers_cannot_play_are_refused_before_the_first_game(run, checkpoint, capsys):
    server = ("--set", "env.env_mode=url", "env.env_url=http://127.0.0.1:1", "env.prompt=full")
    for asked in (
        ("--checkpoint", checkpoint, "--opponent", "cfr:5"),
        ("--checkpoint", checkpoint, "--opponent", "base"),
        ("--ladder", "random", checkpoint, "cfr:5"),
        ("--checkpoint", checkpoint, "--strength"),
        ("--checkpoint", checkpoint, "--exploit", "1"),
    ):
        assert evaluate.main(command(*asked, *server, games=["kuhn_poker"])) == 2
        error = capsys.readouterr().err
        if str(checkpoint) in asked:  # its run may be a stranger's, and so may the server that scores it
            assert f"{checkpoint}: its games are played and scored by http://127.0.0.1:1" in error
        assert "env.env_mode url: opponent" in error
        assert "cannot play on a server: choose from random, mcts" in error


def test_players_of_one_base_sample_each_as_its_own_run_did(run, tmp_path):
    other = shutil.copytree(run / "final", tmp_path / "other" / "checkpoint-000006")
    (other / "manifest.json").unlink()
    config = json.loads((run / "run_config.json").read_text())
    config["ppo"]["temperature"] = 0.25
    (other / "run_config.json").write_text(json.dumps(config))
    roster = Roster([], [], 0, False, None)
    policies = [roster.contestant(str(run)).player.policy, roster.contestant(str(other)).player.policy]
    assert [policy.temperature for policy in policies] == [1.0, 0.25]
    config["ppo"] |= {"temperature": 1.0, "num_train_steps": 999, "learning_rate": 0.5}
    (other / "run_config.json").write_text(json.dumps(config))
    again = shutil.copytree(other, tmp_path / "again" / "checkpoint-000006")
    assert roster.contestant(str(again)).player.policy is policies[0]  # no second base for what is only trained with


# ------------------------------------------------------------------------------------------------------ best responses


@pytest.mark.slow
def test_a_best_response_wins_from_a_frozen_player_no_more_than_the_exact_one(tmp_path, run, monkeypatch, capsys):
    """Two adapters learn against the run's last one; the better of them is played on deals nobody trained on."""
    against = set()

    def watched(env, player, tasks):
        against.update(task.opponent for task in tasks)
        return env_wrapper.play(env, player, tasks)

    monkeypatch.setattr(train_ppo, "play", watched)
    monkeypatch.setattr("training.console.QUIET_SECONDS", 0)
    learns = ("--set", "ppo.batch_size=64", "--set", "ppo.learning_rate=0.03", "--set", "ppo.recompute_logprobs=false")
    args = ("--checkpoint", str(run), "--exploit", "2", "--exploit_steps", "20", "--exact", *learns)
    found = report(tmp_path, *args, games=["kuhn_poker"], episodes=400)
    [result] = found["tables"][0]["results"]
    assert len(result["trained"]) == 2
    assert result["high"] > 0.7 * result["exploitability"]
    assert result["low"] < result["exploitability"]
    assert result["value"] > 0
    assert (found["tables"][0]["player"], found["tables"][0]["opponent"]) == ("best response", "run/checkpoint-000006")
    assert against == {"past:frozen"}
    told = capsys.readouterr()
    assert "20 steps each; exact: the best there is; trained: " in told.out
    assert "evaluation: states of kuhn_poker: 0 of 12\n" in told.err
    assert "best response 1/2: steps: 0 of 20\n" in told.err  # from where the time left is counted


def test_the_exact_value_beside_a_best_response_is_on_its_scale(run, tmp_path, monkeypatch):
    args, against, learn = ("--checkpoint", str(run), "--exact"), [], train_ppo.play

    def watched(env, player, tasks):
        frozen = player.policy.past_adapter("frozen")
        against.extend((task.opponent, frozen) for task in tasks)
        return learn(env, player, tasks)

    monkeypatch.setattr(train_ppo, "play", watched)
    exploited = report(tmp_path, *args, "--exploit", "1", "--exploit-steps", "1", games=["kuhn_poker"], episodes=2)
    [result] = exploited["tables"][0]["results"]
    assert (exploited["tables"][0]["player"], exploited["tables"][0]["opponent"][:4]) == ("best response", "run/")
    frozen = report(tmp_path, "--checkpoint", str(run), "--exact", games=["kuhn_poker"])["tables"][0]["results"][0]
    assert result["exploitability"] == pytest.approx(frozen["nash_conv"] / 2 / 2)  # a seat's share, of two chips
    assert {name for name, _ in against} == {"past:frozen"}
    player = load_file(run / "final" / "adapter_model.safetensors")
    assert all(torch.equal(against[0][1][key], tensor) for key, tensor in player.items())


def test_a_best_response_is_to_a_player_whose_configuration_lies_above_it(run, tmp_path, monkeypatch):
    """That of ``final/`` once did. The copy had none, and a folder was blamed that was gone by then."""
    shutil.copytree(run / "final", tmp_path / "run" / "final", ignore=lambda *_: ["run_config.json", "manifest.json"])
    shutil.copy(run / "run_config.json", tmp_path / "run")
    asked = []

    def best_response(config, *args):
        asked.append(config.env.prompt)
        raise ProgramError("seen")

    monkeypatch.setattr(exploit, "best_response", best_response)
    words = command("--checkpoint", str(tmp_path / "run" / "final"), "--exploit", "1", games=["kuhn_poker"])
    contest = evaluate.Contest(evaluate.arguments(words))
    contest.exploit()
    assert (asked, contest.lost) == (["compact"], ["seen"])


def test_a_best_response_is_to_the_player_as_it_was_though_its_run_deletes_it(run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / f"checkpoint-{STEPS:06d}" / "others").symlink_to(tmp_path)  # and is not read through
    asked = []

    def best_response(config, frozen, *args):
        assert (frozen / "others").is_symlink()
        asked.append((config.ppo.num_train_steps, (frozen / "adapter_model.safetensors").read_bytes()))
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        raise ConfigError("seen")

    monkeypatch.setattr(exploit, "best_response", best_response)
    words = command("--checkpoint", str(tmp_path / "run"), "--exploit", "1")
    contest = evaluate.Contest(evaluate.arguments(words))
    with pytest.raises(ConfigError, match="seen"):
        contest.exploit()
    assert asked[0][1] == (run / f"checkpoint-{STEPS:06d}" / "adapter_model.safetensors").read_bytes()
    assert not Path(contest.players[0].folder).is_relative_to(tmp_path)


def test_games_of_other_best_responses_are_not_taken_for_these(run, tmp_path):
    def settings(*words):
        args = evaluate.arguments(["--checkpoint", str(run), "--games", "kuhn_poker", *words])
        return evaluate.Contest(args).settings([])

    assert settings("--exploit", "1") == settings("--exploit", "1")
    (tmp_path / "slow.json").write_text('{"ppo": {"learning_rate": 1e-9}}')
    slow = settings("--exploit", "1", "--config", str(tmp_path / "slow.json"))
    others = (settings(), settings("--exploit", "2"), settings("--exploit", "1", "--exploit-steps", "30"),
              settings("--exploit", "1", "--exact"), slow)  # fmt: skip
    assert settings("--exploit", "1") not in others


def test_games_of_a_response_that_came_out_differently_are_not_taken_for_these(run, tmp_path, monkeypatch, capsys):
    """As with other threads or on another device: its games were shown beside the training scores of the new one."""
    args = ("--checkpoint", str(run), "--exploit", "1", "--exploit-steps", "1", "--output", str(tmp_path / "o.jsonl"))
    table(capsys, *args, games=["kuhn_poker"], episodes=4)
    monkeypatch.setitem(exploit.SEARCH, "max_grad_norm", 0.5)  # stands for another rounding
    assert evaluate.main(command(*args, games=["kuhn_poker"], episodes=4)) == 2
    assert "line 2 is another game than this command plays there; name another file" in capsys.readouterr().err


def test_of_several_responses_the_one_that_scored_best_while_learning_is_played(tmp_path, run, monkeypatch):
    scores, trained = iter([0.4, 0.9, 0.6]), []
    monkeypatch.setattr(exploit, "_train", lambda config, *args: trained.append(config) or next(scores))
    args = evaluate.arguments(["--checkpoint", str(run), "--exploit", "3"])
    roster = Roster([], [], 0, False, None)
    config = roster.config(str(run), [exploit.how_to_respond(roster.config(str(run)).ppo)])
    config.env = dataclasses.replace(config.env, use_vllm=True, vllm_base_url=["http://127.0.0.1:1"])
    config.model = dataclasses.replace(config.model, adapter="runs/warm")
    best, found = exploit.best_response(config, run, [(KUHN, KUHN)], args, tmp_path, Console(1))
    assert (best, found) == (tmp_path / "1" / "final", [0.4, 0.9, 0.6])
    assert not any(mine.env.use_vllm for mine in trained)  # servers hold another player's weights
    assert (roster.config(str(run)).ppo.context_grad, {mine.ppo.context_grad for mine in trained}) == (False, {True})
    assert len({mine.run.seed for mine in trained}) == 3
    assert {mine.model.adapter for mine in trained} == {None}


def test_a_response_is_judged_by_its_last_tenth_of_steps(tmp_path, run, monkeypatch):
    scores, made = iter(n / 20 for n in range(20)), []

    class Training:
        def __init__(self, *_):
            ignore = lambda *_: None  # noqa: E731
            self.layers = self  # as layers and weights of 4 bits know each other
            made.append(weakref.ref(self))
            self.policy, self.curriculum = SimpleNamespace(add_adapter=ignore), SimpleNamespace(past={})
            self.metrics, self.save_players = SimpleNamespace(close=ignore), ignore

        def step(self, stop):
            return {"score_mean": next(scores)}

    monkeypatch.setattr(train_ppo, "Trainer", Training)
    config = Roster([], [], 0, False, None).config(str(run))
    config.run = dataclasses.replace(config.run, output_dir=str(tmp_path / "response"))
    config.ppo = dataclasses.replace(config.ppo, num_train_steps=20)
    assert exploit._train(config, run, Console(1), "") == pytest.approx((18 + 19) / 2 / 20)
    assert made[0]() is None, "it takes no memory beside the next one"


def test_games_of_ones_own_that_were_edited_are_other_settings(checkpoint, tmp_path, capsys, monkeypatch):
    args = command("--checkpoint", checkpoint, "--output", str(tmp_path / "games.jsonl"), games=["kuhn_poker"])
    assert evaluate.main(args) == 0
    monkeypatch.setattr(evaluate, "own_digest", lambda: "another")
    assert evaluate.main(args) == 2
    assert "holds games with other settings" in capsys.readouterr().err


def test_the_configuration_of_a_checkpoint_is_its_own(run, tmp_path):
    """A run that was gone on with has another one above it."""
    shutil.copytree(run / f"checkpoint-{STEPS:06d}", folder := tmp_path / "run" / "checkpoint-000006")
    (folder.parent / "run_config.json").write_text("{}")
    assert players.run_config_file(folder) == folder / "run_config.json"


@pytest.mark.parametrize("game", ["blackjack", "hearts"])  # among four even play is not worth 0
def test_best_responses_are_to_those_who_win_what_another_loses(run, capsys, monkeypatch, game):
    monkeypatch.setattr(players, "load_policy", lambda config: pytest.fail("weights were loaded"))
    assert evaluate.main(command("--checkpoint", str(run), "--exploit", "1", games=[game])) == 2
    assert re.search(f"error: --exploit: {game}(#\\*)? is not for two opposed players", capsys.readouterr().err)
