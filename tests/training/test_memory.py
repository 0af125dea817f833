"""What ``--dry-run`` says of memory, held against the tensors of a step and against a process."""

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peaks import peaks
from shapes import write_model
from tiny import micro_config, tiny_policy

from curriculum import Curriculum
from env_wrapper import Task
from games import CONFIGS_PER_GAME, NAMES
from policy.chat import ChatFormat
from policy.model import load_architecture, load_tokenizer
from training import memory, metrics, preflight, token_counts
from training.config import parse_args, read_config
from training.metrics import peak_memory_mb
from training.token_counts import play_step

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "config" / "presets"
OURS = "process", "freed and kept"  # what is no tensor


def config_of(folder, preset, stage, shape, *sets):
    """A preset with one of its stages, at the true shape of a model that need not be there."""
    sets = [f"model.model_name={write_model(shape, folder / shape)}", *sets] if shape else sets
    given = ["--config", str(PRESETS / f"{preset}.json")] if preset != "default" else []
    config = read_config(parse_args([*given, *(a for s in sets for a in ("--set", s)), "--no-wandb"], None))
    stages = (config.curriculum.stages[stage],)
    config.curriculum = replace(config.curriculum, stages=stages, failure_replay_prob=0.0)
    return config


def estimated(config):
    architecture = load_architecture(config.model)
    parameters = memory.count_parameters(config.lora, architecture)
    measured = preflight.measure_prompts(config, ChatFormat(load_tokenizer(config.model)))
    return memory.estimate(config, parameters, architecture, measured)


CASES = [
    ("default", 0, "Qwen3-4B"),
    pytest.param(("qwen2.5-3b", 0, "Qwen2.5-3B"), marks=pytest.mark.slow),
    ("default", 0, "Qwen3-4B", "ppo.context_grad=false", "ppo.batch_size=32"),
    pytest.param(("documents", 0, "Qwen3-4B", "ppo.recompute_logprobs=false"), marks=pytest.mark.slow),
    *(pytest.param((preset, stage, "Qwen3-4B"), marks=pytest.mark.slow)  # default, hard: 43 % too high
      for preset, stage in (("12gb", 0), ("24gb", 0), ("default", 1), ("12gb", 1), ("24gb", 1), ("24gb", 2))),
    pytest.param(("all_games", 0, "Qwen3-4B"), marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_step_takes_the_memory_that_was_estimated(tmp_path, case):
    """Rollout and update of the first step, at the true shapes, on the meta device."""
    config = config_of(tmp_path, *case)
    parts = estimated(config)
    tasks = [Curriculum(config.curriculum, 0).next(i) for i in range(config.ppo.batch_size)]
    counted = peaks(config, [replace(task, opponent="random") for task in tasks])
    none = dict.fromkeys((*OURS, *memory.TURNS), 0.0)
    for part, turns in {"rollout": ["rollout"], "update": ["update: layers", "update: logits"]}.items():
        told = memory.peak(parts | none | {turn: parts[turn] for turn in turns})
        assert told == pytest.approx(counted[part], rel=0.2), part


def test_players_beside_the_policy_are_counted(tmp_path):
    """Its average, its past, and what it began from: an adapter of four bytes a number each."""
    alone, magnet, past, begun = (
        memory.held(config, memory.count_parameters(config.lora, load_architecture(config.model)))["other adapters"]
        for config in (
            micro_config(tmp_path, ppo={"magnet_coef": magnet}, model={"adapter": adapter}, curriculum={"stages": [
                {"name": "only", "games": ["kuhn_poker"], "opponent": opponent}]})
            for magnet, opponent, adapter in ((0, "self", None), (0.1, "self", None), (0, "past", None),
                                              (0, "self", "runs/a"))
        )
    )  # fmt: skip
    assert alone == 0
    assert magnet == begun == 4 * sum(p.numel() for n, p in tiny_policy(tmp_path).trainable().items() if "lora" in n)
    assert past % magnet == 0 < past


def test_the_tokens_of_a_step_grow_with_its_games(tmp_path):
    """Of more games than are counted, too."""
    stage = {"name": "only", "games": [[NAMES.index("tic_tac_toe") * CONFIGS_PER_GAME] * 2]}
    few, many = (
        play_step(config, ChatFormat(load_tokenizer(config.model)), config.curriculum.stages[0]).distinct
        for n in (token_counts.PLAYED, 8 * token_counts.PLAYED)
        for config in [micro_config(tmp_path, ppo={"batch_size": n}, curriculum={"stages": [stage]})]
    )
    assert many == pytest.approx(8 * few, rel=0.01)


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_tells_the_memory_of_its_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 0)
    assert peak_memory_mb() > 1
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2**30)
    assert peak_memory_mb() == 1024


@pytest.mark.parametrize(("system", "held"), [("linux", 3 * 2**10), ("darwin", 3 * 2**20)])  # KiB and bytes
def test_where_there_is_no_proc_the_systems_own_unit_is_read(monkeypatch, system, held):
    monkeypatch.setattr(metrics, "STATUS", Path("/nowhere"))
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=held))
    assert peak_memory_mb() == 3


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "smol"])
def test_a_process_on_a_cpu_takes_the_memory_that_was_estimated(tmp_path, preset):
    """A step of the whole process, by the kernel's own count of what it ever held; smol takes minutes."""
    if not (ROOT / "models" / {"tiny": "tiny", "smol": "smollm2-135m"}[preset]).exists():
        pytest.skip("the model is not there")
    has_bf16 = any("bf16" in name for name, there in torch.cpu.get_capabilities().items() if there is True)
    dtype = "bfloat16" if preset == "smol" and has_bf16 else "float32"  # as `make smol`; imitated, it takes an hour
    config = config_of(tmp_path, preset, 0, None, f"model.dtype={dtype}")
    script = """
import sys
from pathlib import Path
from training.metrics import peak_memory_mb
from training.token_counts import play_step
from train_ppo import StopSignal, Trainer, parse_args, read_config
with StopSignal() as stop:
    Trainer(read_config(parse_args(sys.argv[2:], None)), Path(sys.argv[1])).step(stop)
print(peak_memory_mb())
"""
    knobs = ["--config", str(PRESETS / f"{preset}.json"), "--set", f"model.dtype={config.model.dtype}", "--no-wandb"]
    command = [sys.executable, "-c", script, str(tmp_path), *knobs]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    assert memory.peak(estimated(config)) == pytest.approx(float(done.stdout) * 2**20, rel=0.2)


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
def test_products_of_ever_new_shapes_do_not_fill_the_memory():
    """Each shape's compiled product took a megabyte, and a thousand were kept."""
    script = """
import psutil
import torch
from policy import cpu_memory
torch.set_num_threads(1)
cpu_memory.keep_freed()
weight = torch.ones(192, 64, dtype=torch.bfloat16)
def run(start, end):
    for rows in range(start, end):
        torch.nn.functional.linear(torch.ones(rows, 64, dtype=torch.bfloat16), weight)
    cpu_memory._libc().malloc_trim(0)  # what is free is not held by a kernel
    return psutil.Process().memory_info().rss
before = run(2, 200)
print((run(200, 700) - before) / 500)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 20_000, "bytes a shape"


def test_a_process_tells_its_own_peak_and_not_that_of_the_one_that_started_it():
    """The kernel's ``ru_maxrss`` begins at the parent's."""
    ballast = torch.ones(2**27)  # 0.5 GB
    script = """
import psutil
from training.metrics import peak_memory_mb
held = bytearray(b"x") * (300 << 20)
print(peak_memory_mb(), psutil.Process().memory_info().rss / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    peak, resident = map(float, done.stdout.split())
    assert peak == pytest.approx(resident, rel=0.01)
    assert peak < 450 < ballast.nbytes / 2**20


def test_games_that_are_not_open_at_once_do_not_count_at_once(tmp_path):
    """Of 1,024 games, 128 open at a time hold an eighth of the keys and values."""
    most, few = (
        estimated(config_of(tmp_path, "tiny", 0, None, "ppo.batch_size=1024", f"env.games_at_once={at_once}"))
        for at_once in (0, 128)
    )
    assert few["rollout"] == pytest.approx(most["rollout"] / 8, rel=0.3)


@pytest.mark.parametrize("opponent", ["self", "past"])
def test_the_seat_that_waits_holds_its_keys_too(tmp_path, opponent):
    """Against oneself, and a past self, each game is two conversations, which share only what they begin with."""
    stage = {"name": "only", "games": ["connect_four"]}

    def slots(opponent):
        config = micro_config(tmp_path, env={"prompt": "full", "history_turns": "all"}, ppo={"max_seq_length": 8192},
                              curriculum={"stages": [stage | {"opponent": opponent}]})  # fmt: skip
        chat = ChatFormat(load_tokenizer(config.model))
        return play_step(config, chat, config.curriculum.stages[0]).slots

    assert slots(opponent) > 1.6 * slots("random")


def test_a_free_answer_is_held_and_learnt_from_as_long_as_it_may_be(tmp_path):
    def counted(mode):
        config = micro_config(tmp_path, env={"answer_mode": mode}, ppo={"max_new_tokens": 300, "max_seq_length": 1024},
                              curriculum={"stages": [{"name": "only", "games": ["kuhn_poker"]}]})  # fmt: skip
        chat = ChatFormat(load_tokenizer(config.model))
        return play_step(config, chat, config.curriculum.stages[0])

    long, short = counted("free"), counted("constrained")
    games = len(long.rows)
    assert games > 1
    assert long.slots >= short.slots + games * 300
    assert long.distinct >= short.distinct + games * 300
    assert long.micro_batch(4, 16384) >= short.micro_batch(4, 16384) + 4 * 300


def test_what_is_read_at_a_later_turn_is_only_what_is_new(tmp_path):
    """A conversation grows, but what is held already is not read again: the first prompt is the most of all rounds."""
    config = config_of(tmp_path, "default", 0, "Qwen3-4B")
    tic_tac_toe = Task(2_300_000_000, 0, "random")
    counted = token_counts.count_tokens(config, ChatFormat(load_tokenizer(config.model)), [tic_tac_toe], False)
    assert len(counted.later) > 1
    assert counted.at_work == counted.first[0] < counted.slots


def test_plain_weights_without_a_gpu_are_told_as_what_a_cpu_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = preflight.describe(config_of(tmp_path, "tiny", 0, None, "model.device=auto"))
    assert "of this machine" in said
    assert "CUDA" not in said
