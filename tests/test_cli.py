"""Broken configurations at the command line: exit code 2 and one line that names what, where and what is allowed.

``pytest tests/test_cli.py -s`` prints the lines.
"""

import fcntl
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import micro_file

import train_ppo

ROOT = Path(train_ppo.__file__).parent
SLOWEST_REFUSAL = 3.0  # CPU seconds of the whole process, most of them the import of torch


def only(field, value="[0, 0]"):
    return f'curriculum.stages=[{{"name": "s", "games": [{value}], {field}}}]'


def games(value):
    return f'curriculum.stages=[{{"name": "s", "games": [{value}]}}]'


BROKEN = {
    "ppo.batch_sise=8": "--set: ppo.batch_sise = 8: no such key; the nearest is ppo.batch_size",
    "pop.batch_size=8": "--set: pop = {'batch_size': 8}: no such key; the nearest is ppo",
    "ppo.batch_size=eight": '--set: ppo.batch_size = "eight": expected an integer >= 1',
    "ppo.gamma=1.5": "--set: ppo.gamma = 1.5: expected a number >= 0 and <= 1",
    "ppo.learning_rate=NaN": '--set: ppo.learning_rate: "NaN" is not allowed: numbers are finite',
    "ppo.mini_batch_size=3": "ppo: batch_size 8 is not divisible by mini_batch_size * gradient_accumulation_steps "
    "= 3 * 1 = 3",
    "ppo.batch_size": '--set: expected KEY.PATH=VALUE, not "ppo.batch_size"',
    "lora.lora_dropout=0.1": "--set: lora.lora_dropout = 0.1: expected 0.0",
    'lora.target_modules=["q_prj"]': '--set: lora.target_modules[0] = "q_prj": expected one of "q_proj", "k_proj", ',
    "model.dtype=int8": '--set: model.dtype = "int8": expected one of "bfloat16", "float16", "float32"',
    "model.device=cuda": "model.device: 'cuda' was asked for, but torch finds no CUDA device",
    "model.use_4bit=true": "model.use_4bit: Qwen/Qwen3-4B in 4 bits needs a CUDA device and there is none; "
    "to try it on this machine: make train, or --config config/presets/tiny.json",
    "env.prompt=short": "env: prompt 'short' is not allowed: choose full or compact",
    "env.history_turns=-2": 'env: history_turns -2 is not allowed: "auto", "all" or an integer >= 0',
    games("99"): "--set: curriculum.stages[0].games[0] = 99: expected a string or a list of [an integer, an integer]",
    games("[9900000000, 9900000000]"): "--set: curriculum.stages[0]: tasks [9900000000, 9900000000] are out of range: "
    "0 <= first <= last < 2800000000",
    games("[5, 3]"): "--set: curriculum.stages[0]: tasks [5, 3] are out of range: 0 <= first <= last < 2800000000",
    games('"ches"'): "--set: curriculum.stages[0]: game 'ches' is not known: allowed are goofspiel, liars_dice, ",
    only('"threshold": 2'): "--set: curriculum.stages[0].threshold = 2: expected a number >= 0 and <= 1",
    only('"opponent": "mtcs:10x1"'): "--set: curriculum.stages[0]: opponent 'mtcs:10x1' is not known: allowed are "
    "random, mcts, mcts_light, mcts:SIMSxROLLOUTS, ",
    "env.allowed_game_indices=[28]": "env.allowed_game_indices: no stage plays a game of [28]; the stages play "
    "[0, 1, 2, 6, 7, 16, 23, 24, 25, 27]",
    "env.opponent=minimax": "env.opponent = 'minimax': stage 'easy': opponent 'minimax' is not known: allowed are "
    "random, mcts, ",
    "env.opponent=self": "env.opponent = 'self': stage 'easy' could never be left: ",
    "curriculum.stages=[]": "curriculum: stages: give at least one, each with a name of its own",
}  # fmt: skip

FILES = {
    '{"ppo": {"gamma": 1.0,}}': "invalid JSON in line 1: ",
    '{"ppo": {"gamma": 1.0, "gamma": 0.9}}': 'the key "gamma" stands twice in one object',
    '{"ppo": {"lerning_rate": 1e-5}}': "ppo.lerning_rate = 1e-05: no such key; the nearest is ppo.learning_rate",
    "[]": "expected an object with the keys model, lora, ppo, env, curriculum, run",
}


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def refused(capsys, request):
    """Run the program; return the one line with which it refuses its arguments."""

    def refusal(*arguments):
        capsys.readouterr()
        code = train_ppo.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert code == 2
        assert not out
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        if request.config.getoption("capture") == "no":
            print(f"\n{' '.join(map(str, arguments))}\n    {err.strip()}")
        return err.removeprefix("error: ").rstrip("\n")

    return refusal


@pytest.mark.parametrize("item", BROKEN)
def test_broken_set(refused, item):
    line = refused("--set", item)
    assert line == BROKEN[item] or (BROKEN[item].endswith(" ") and line.startswith(BROKEN[item]))


@pytest.mark.parametrize("text", FILES)
def test_broken_file(refused, tmp_path, text):
    file = tmp_path / "broken.json"
    file.write_text(text)
    assert refused("--config", file).startswith(f"{file}: {FILES[text]}")


def test_missing_file(refused, tmp_path):
    missing = tmp_path / "missing.json"
    assert refused("--config", missing) == f"{missing}: cannot be read: No such file or directory"


def test_negative_seed(refused):
    assert refused("--seed", "-1") == "--set: run.seed = -1: expected an integer >= 0 and <= 2147483647"


def test_model_folder_that_is_not_there(refused, tmp_path):
    file = micro_file(tmp_path, model={"model_name": "models/nope"})
    line = refused("--config", file, "--output-dir", tmp_path / "run")
    assert line == "model.model_name: there is no folder models/nope (scripts/make_tiny_model.py makes a tiny one)"
    assert line == refused("--config", file, "--dry-run")


def test_adapter_that_is_not_there(refused, tmp_path):
    file = micro_file(tmp_path, model={"adapter": str(tmp_path / "nope")})
    line = refused("--config", file, "--output-dir", tmp_path / "run")
    assert line.startswith(f"model.adapter: cannot load '{tmp_path / 'nope'}'")


def test_prompts_that_cannot_fit(refused, tmp_path):
    file = micro_file(tmp_path, ppo={"max_seq_length": 64}, env={"prompt": "full"})
    assert refused("--config", file, "--dry-run").startswith("ppo.max_seq_length = 64: the first prompt and answer of ")


def test_nothing_to_resume(refused, tmp_path):
    line = refused("--config", micro_file(tmp_path), "--output-dir", tmp_path / "run", "--resume")
    assert line == f"--resume: no checkpoint that verifies in {tmp_path / 'run'}"


def test_checkpoint_that_is_not_there(refused, tmp_path):
    line = refused("--config", micro_file(tmp_path), "--output-dir", tmp_path / "run", "--resume", tmp_path / "nope")
    assert line == f"--resume: {tmp_path / 'nope'}: manifest.json: No such file or directory"


def test_run_that_would_be_overwritten(refused, tmp_path):
    (tmp_path / "run" / "checkpoint-000001").mkdir(parents=True)
    line = refused("--config", micro_file(tmp_path), "--output-dir", tmp_path / "run")
    assert line.startswith(f"run.output_dir: {tmp_path / 'run'} holds checkpoints; --resume goes on")


def test_folder_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").touch()
    line = refused("--config", micro_file(tmp_path), "--output-dir", tmp_path / "file" / "run")
    assert line == f"{tmp_path / 'file' / 'run'}: cannot be written: Not a directory"


def test_folder_in_use(refused, tmp_path):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        lock.write("1234")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = refused("--config", micro_file(tmp_path), "--output-dir", tmp_path / "run")
    assert line == f"{tmp_path / 'run'}: in use by another run (process 1234)"


def test_default_model_is_refused_at_once_without_cuda():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "train_ppo.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "config/presets/tiny.json" in result.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SLOWEST_REFUSAL
