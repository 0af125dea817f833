"""Broken configurations at the command line: exit code 2 and one line that names what, where and what is allowed."""

import json
import logging
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from tiny import STAGE, base_model, micro_file
from tiny_runs import copy_of, final_bytes, rows, train

import policy.model as policy_model
import train_ppo
import utils
from envs import affinetes, client
from envs.trace.env import load_programs
from evaluation import measure
from games import NAMES
from training.config import parse_args, read_config

ROOT = Path(train_ppo.__file__).parent
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
SLOWEST_REFUSAL = 2.0  # times the CPU seconds that importing torch takes: the same on a slow or busy machine


def only(field, value="[0, 0]"):
    return f'curriculum.stages=[{{"name": "s", "games": [{value}], {field}}}]'


def games(value):
    return f'curriculum.stages=[{{"name": "s", "games": [{value}]}}]'


BROKEN = {
    "ppo.batch_sise=8": "--set: ppo.batch_sise = 8: no such key; the nearest is ppo.batch_size",
    "model.name=x": '--set: model.name = "x": no such key; the nearest is model.model_name',
    "model.path=x": '--set: model.path = "x": no such key; docs/configuration.md lists them',
    "env.allowed_game_indices=dots": "env.allowed_game_indices: game 'dots' is not known, the nearest is "
    "dots_and_boxes: allowed are ",
    "pop.batch_size=8": "--set: pop = {'batch_size': 8}: no such key; the nearest is ppo",
    "ppo.batch_size=eight": '--set: ppo.batch_size = "eight": expected an integer >= 2 and ',
    "ppo.gamma=1.5": "--set: ppo.gamma = 1.5: expected a number >= 0 and <= 1",
    "ppo.learning_rate=NaN": '--set: ppo.learning_rate: "NaN" is not allowed: numbers are finite',
    "ppo.mini_batch_size=3": "ppo: batch_size 8 is not divisible by mini_batch_size * gradient_accumulation_steps "
    "= 3 * 1 = 3: batch_size 9 or mini_batch_size 1 fits",
    "run.output_dir=": "run: output_dir: is empty; expected a folder, e.g. runs/first",
    "ppo.batch_size=1000000000": "--set: ppo.batch_size = 1000000000: expected an integer >= 2 and ",
    "ppo.eval_games=1000000000": "--set: ppo.eval_games = 1000000000: expected an integer >= 2 and ",
    "ppo.eval_games=5": "ppo: eval_games 5: an even number, half of them for each seat",
    "ppo.temperature=1e-45": "--set: ppo.temperature = 1e-45: expected a number >= 0.001",
    "run.threads=3000000000": "--set: run.threads = 3000000000: expected an integer >= 0 and <= 1024",
    "model.tokens_per_batch=2000000000": "--set: model.tokens_per_batch = 2000000000: expected an integer >= 64 and ",
    "ppo.batch_size": '--set: expected KEY.PATH=VALUE without spaces, not "ppo.batch_size"',
    "PPO.Learning_Rate=1e-3": "--set: PPO = {'Learning_Rate': 0.001}: no such key; the nearest is ppo",
    "lora.lora_dropout=0.1": "--set: lora.lora_dropout = 0.1: no such key; there is no dropout: with it the ratio is "
    "not 1 before the first update",
    "ppo.lr_end=1e-5": "--set: ppo.lr_end = 1e-05: no such key; ppo.lr_final is a share of "
    "ppo.learning_rate, not a rate",
    "bf16=true": "--set: bf16 = true: no such key; model.dtype says so: float16 or bfloat16",
    'lora.target_modules=["q_prj"]': '--set: lora.target_modules[0] = "q_prj": expected one of "q_proj", "k_proj", ',
    "model.dtype=int8": '--set: model.dtype = "int8": expected one of "bfloat16", "float16", "float32"',
    "model.device=cuda": "model.device: 'cuda' was asked for, but torch finds no CUDA device; slower, and with the "
    "same weights: --set model.device=cpu",
    "model.use_4bit=true": "model.use_4bit: Qwen/Qwen3-4B in 4 bits needs a CUDA device and there is none; "
    "slow: --set model.device=cpu; to try it on this machine: make train, or --config config/presets/tiny.json",
    "env.prompt=short": '--set: env.prompt = "short": expected one of "full", "compact"',
    "env.history_turns=-2": '--set: env.history_turns = -2: expected one of "auto", "all" or an integer >= 0',
    games("99"): "--set: curriculum.stages[0].games[0] = 99: expected a string or a list of [an integer, an integer]",
    games("[9900000000, 9900000000]"): "--set: curriculum.stages[0]: tasks [9900000000, 9900000000] are out of range: "
    "0 <= first <= last < 2800000000",
    games("[5, 3]"): "--set: curriculum.stages[0]: tasks [5, 3] are out of range: 0 <= first <= last < 2800000000",
    games('"ches"'): "--set: curriculum.stages[0]: game 'ches' is not known, the nearest is chess: allowed are ",
    only('"threshold": 2'): "--set: curriculum.stages[0].threshold = 2: expected a number >= 0 and <= 1",
    only('"opponent": "mtcs:10x1"'): "--set: curriculum.stages[0]: opponent 'mtcs:10x1' is not known: allowed are "
    "random, mcts, mcts_light, mcts:SIMSxROLLOUTS, ",
    "env.allowed_game_indices=[28]": "env.allowed_game_indices: game '28' is not known: allowed are goofspiel, "
    f"{', '.join(NAMES[1:])}, and those of env.games_path; or an index, 0 to 27",
    "env.allowed_game_indices=[true]": "--set: env.allowed_game_indices[0] = true: expected an integer or a string",
    "env.allowed_game_indices=-1": "env.allowed_game_indices: game '-1' is not known: allowed are goofspiel, ",
    games('"hex#100000000"'): "--set: curriculum.stages[0]: hex#100000000 is out of range: configurations are below ",
    only('"progression_threshold": 0.5, "threshold": 0.6', "[0, 9]"): "--set: curriculum.stages[0].threshold is given "
    "twice: as progression_threshold and threshold",
    'curriculum.stages=[{"name": "s", "games": {"hex": 0}}]': "--set: curriculum.stages[0]: games: weights are numbers "
    "from 1e-09 to 1e+09",
    "env.opponent=minimax": "env.opponent = 'minimax': stage 'easy': opponent 'minimax' is not known: allowed are "
    "random, mcts, ",
    "env.opponent=self": "env.opponent = 'self': stage 'easy' could never be left: ",
    "curriculum.stages=[]": "curriculum: stages: give at least one, each with a name of its own",
}  # fmt: skip

FILES = {
    '{"ppo": {"gamma": 1.0,}}': "invalid JSON in line 1, at ",
    '{"ppo": {"gamma": 1.0, "gamma": 0.9}}': 'the key "gamma" stands twice in one object',
    '{"ppo": {"lerning_rate": 1e-5}}': "ppo.lerning_rate = 1e-05: no such key; the nearest is ppo.learning_rate",
    "[]": "expected an object with the keys model, lora, ppo, env, curriculum, run",
}


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def refused(capsys):
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
    for name, preset in (("tiny", "tiny"), ("qwen2.5-3b", "qwen2.5-3b"), (tmp_path / "12gb.json", "12gb")):
        known = ROOT / "config" / "presets" / f"{preset}.json"
        assert refused("--config", name) == f"{name}: cannot be read: No such file or directory; the preset is {known}"
    near = ROOT / "config" / "presets" / "tiny.json"
    assert refused("--config", "tinny.json").endswith(f"No such file or directory; the nearest preset is {near}")
    (tmp_path / "12gb.json").write_text("{")  # which is there, and no preset's fault
    assert "the preset is" not in refused("--config", tmp_path / "12gb.json")


def test_negative_seed(capsys):
    with pytest.raises(SystemExit, match="2"):
        train_ppo.main(["--seed", "-1"])
    assert capsys.readouterr().err == "error: argument --seed: -1: expected at least 0 and at most 2147483647\n"


def test_model_folder_that_is_not_there(refused, tmp_path):
    file = micro_file(tmp_path, model={"model_name": "models/nope"})
    line = refused("--config", file, "--output-dir", tmp_path / "run")
    assert line == "model.model_name: there is no folder models/nope (scripts/make_tiny_model.py makes a tiny one)"
    assert line == refused("--config", file, "--dry-run")
    assert line == refused("--config", file, "--set", "model.use_4bit=true")  # which no device would help
    line = refused("--dry-run", "--set", "model.model_name=/nowhere/smollm2-135m", "model.use_4bit=false")
    assert line.endswith("there is no folder /nowhere/smollm2-135m (make models/smollm2-135m/config.json fetches it)")


def test_adapter_that_is_not_there(refused, tmp_path):
    file = micro_file(tmp_path, model={"adapter": str(tmp_path / "nope")})
    line = refused("--config", file, "--output-dir", tmp_path / "run")
    assert line == f"model.adapter: there is no folder {tmp_path / 'nope'}; if it was moved: --set model.adapter=FOLDER"


def test_nothing_to_resume(refused, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    line = refused("--config", micro_file(tmp_path), "--output-dir", tmp_path / "run", "--resume")
    assert line == (f"--resume: there is no checkpoint in {tmp_path / 'run'}; "
                    "a run that wrote none begins anew without --resume")  # fmt: skip
    (tmp_path / "run" / "checkpoint-000001").mkdir()
    assert train_ppo.main(["--resume", str(tmp_path / "run")]) == 2
    assert f"error: --resume: no checkpoint that verifies in {tmp_path / 'run'}\n" in capsys.readouterr().err
    assert refused("--force-config") == "--force-config: nothing is resumed without --resume"


def test_checkpoint_that_is_not_there(refused, tmp_path):
    line = refused("--config", micro_file(tmp_path), "--output-dir", tmp_path / "run", "--resume", tmp_path / "nope")
    expected = "expected a run's folder or one of its checkpoints"
    assert line == f"--resume: there is no folder {tmp_path / 'nope'}; {expected}"
    (tmp_path / "checkpoint-000001").mkdir()
    line = refused("--resume", tmp_path / "checkpoint-000001")
    assert line == f"--resume: {tmp_path / 'checkpoint-000001'}: manifest.json: No such file or directory"


def test_run_that_would_be_overwritten(refused, tmp_path):
    (tmp_path / "run" / "checkpoint-000001").mkdir(parents=True)
    line = refused("--config", micro_file(tmp_path), "--output-dir", tmp_path / "run")
    assert line.startswith(f"run.output_dir: {tmp_path / 'run'} holds checkpoints; --resume goes on")


def cpu_seconds(*command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return result, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_default_model_is_refused_at_once_without_cuda():
    result, seconds = cpu_seconds(str(ROOT / "train_ppo.py"))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "config/presets/tiny.json" in result.stderr
    assert seconds < SLOWEST_REFUSAL * cpu_seconds("-c", "import torch")[1]


# ----------------------------------------------------------------------------------------------------- as it is typed

TYPED = [
    pytest.param(typed.strip("`"), int(now[0]), now.partition("`")[2].rstrip("`"), id=typed.strip("`"))
    for typed, _, now in (line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `--"))
]


def test_the_table_of_inputs_is_read():
    assert len(TYPED) > 30
    assert {code for _, code, _ in (row.values for row in TYPED)} == {0, 2}


@pytest.mark.parametrize(("typed", "code", "line"), TYPED)
def test_what_is_plainly_meant_is_taken_else_a_line_helps(refused, tmp_path, monkeypatch, typed, code, line):
    monkeypatch.setenv("CHUTES_API_KEY", "canary-0123456789")  # what another trainer of these games asks for
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    monkeypatch.setattr(affinetes, "CHECK_SECONDS", 1.0)
    monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)  # the lines that tell how a key was read
    (tmp_path / "flat.json").write_text('{"env_type": "openspiel", "opponent": "random", "gamma": 0.5}')
    monkeypatch.chdir(tmp_path)
    arguments = typed.split()
    if code:
        told = refused(*arguments)
        assert told == line or (line.endswith(" ...") and told.startswith(line[:-3]))
        return
    section, key, value = re.split(r" = |\.", line, maxsplit=2)
    assert getattr(vars(read_config(parse_args(arguments, None)))[section], key) == json.loads(value)
    assert utils.redact("key canary-0123456789") == "key [redacted]"


@pytest.mark.parametrize(("setting", "told"), [
    ("run.output_dir={}/file/x", "run.output_dir: {}/file is no folder that can be written into"),
    ("run.output_dir={}/loop/x", "run.output_dir: [Errno 40] Too many levels of symbolic links: '{}/loop/x'"),
    ("run.output_dir={}/held", "run.output_dir: {}/held holds checkpoints; --resume goes on"),
    ("run.output_dir={}/player", "run.output_dir: {}/player is a model, checkpoint or player, which a run would"),
    ("run.output_dir={}/base", "run.output_dir: {}/base is a model, checkpoint or player, which a run would damage"),
    ("model.adapter={}/file", "model.adapter: '{}/file' is a file; expected a folder"),
    ("model.adapter={}/held", "model.adapter: '{}/held' holds no adapter_config.json"),
    ("model.adapter={}/none", "model.adapter: there is no folder {}/none; if it was moved: "),
    ("lora.target_modules=[]", "lora: target_modules is empty: name at least one of q_proj"),
    ("model.model_name=", "model: model_name is empty; is a variable of the shell not set?"),
    ("model.revision=", "model: revision is empty; is a variable of the shell not set?"),
    ("ppo.cliprange=null env.answer_mode=free", "ppo.cliprange = null: NeuRD needs to know which answers are legal"),
])  # fmt: skip
def test_a_dry_run_refuses_what_could_not_start_and_touches_nothing(refused, tmp_path, setting, told):
    (tmp_path / "held" / "checkpoint-000001").mkdir(parents=True)
    (tmp_path / "held" / "metrics.jsonl").write_text("{}")
    (tmp_path / "player").mkdir()
    (tmp_path / "player" / "adapter_config.json").write_text("{}")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.rglob("*"))
    line = refused("--config", micro_file(tmp_path.parent), "--dry-run", "--set", *setting.format(tmp_path).split())
    assert line.startswith(told.format(tmp_path)), line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_that_cannot_be_had_is_one_line_at_once(refused, monkeypatch):
    """The Hub's library would try for half a minute, in 23 lines."""
    tried = []

    class NoNetwork:
        def head(self, url, **options):
            tried.append(url)
            raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "get_session", NoNetwork)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    client.hub_problem.cache_clear()
    for _ in range(2):
        line = refused("--dry-run", "--set", "model.use_4bit=false", "--set", "model.model_name=nobody/nothing")
        assert line == ("model.model_name: cannot load 'nobody/nothing' (it is not on this disk, and "
                        "https://huggingface.co cannot be reached: no route)")  # fmt: skip
    program = ["--set", "env.env_type=trace", "env.answer_mode=free", "env.trace.source=my/programs"]
    assert refused("--dry-run", *program, "curriculum.stages=" + json.dumps([{"name": "own", "games": [[0, 9]]}])) == (
        "env.trace: trace.source 'my/programs' cannot be read from the Hub: https://huggingface.co cannot be reached: "
        "no route")  # fmt: skip
    assert len(tried) == 1
    client.hub_problem.cache_clear()


def test_make_changes_nothing_of_a_run_that_is_resumed():
    for goal in ("train", "smol"):
        words = ["make", "-n", "-o", ".venv/requirements.installed", goal, "ARGS=--resume RUN"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        [line] = [line for line in done.stdout.splitlines() if "train_ppo.py" in line]
        assert line.split()[1:] == ["train_ppo.py", "--resume", "RUN"]


def test_make_lets_setup_choose_the_python_that_is_named():
    """Of the environment's variables make passes those on that it knows itself as it knows them."""
    assert "\nPYTHON" not in (ROOT / "Makefile").read_text()


def test_make_smol_has_a_configuration_of_its_own():
    words = ["make", "-n", "-o", ".venv/requirements.installed", "smol", "CONFIG=config/presets/trace_smol.json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "make smol has its own CONFIG" in done.stderr


def test_a_folder_that_a_variable_of_the_shell_names_is_no_runs():
    words = ["make", "-n", "-o", ".venv/requirements.installed", "train"]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ | {"OUT": "/mine"}
    )
    assert "/mine" not in done.stdout


def test_a_setting_overrides_the_flags_that_make_gives():
    words = ["--seed", "0", "--output-dir", "runs/a", "--no-wandb"]
    words += ["--set", "run.seed=3", "run.output_dir=runs/b", "run.logger=wandb"]
    run = read_config(parse_args(words, None)).run
    assert (run.seed, run.output_dir, run.logger) == (3, "runs/b", "none")  # what promises to send nothing, keeps it


def test_a_model_of_the_projects_own_is_found_from_anywhere(tmp_path, monkeypatch):
    shutil.copytree(base_model(), tmp_path / "models" / "base")
    monkeypatch.setattr(policy_model, "ROOT", tmp_path)
    monkeypatch.chdir("/")
    model = policy_model.ModelConfig("models/base")
    assert policy_model.load_architecture(model).hidden_size == 32
    assert policy_model.load_tokenizer(model).chat_template


def test_programs_are_named_so_that_they_are_found_from_anywhere(tmp_path, monkeypatch):
    """The generator stays one, whatever lies in the folder where the program is started."""
    for name in ("generator", "programs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.py").write_text("print(1)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def source(given):
        return read_config(parse_args(["--set", f"env.trace.source={given}"], None)).env.trace["source"]

    assert source("generator") == "generator"
    assert source("programs") == source("~/programs") == str(tmp_path / "programs")
    assert source("") == ""
    assert load_programs("~/programs") == load_programs("programs")


def test_a_model_folder_without_a_tokenizer(refused, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(base_model(), base)
    (base / "tokenizer.json").unlink()
    line = refused("--config", micro_file(tmp_path, model={"model_name": str(base)}), "--dry-run")
    assert line.startswith(f"model.model_name: {base} has no tokenizer: one of tokenizer.json, ")


# ------------------------------------------------------------------------------------------- from the checkpoint alone


FIVE = ("ppo.gamma=0.9", "ppo.lam=0.8", "ppo.num_train_steps=3", "lr_final=1", "ppo.entropy_coef=0.02")
SETS = [word for item in FIVE for word in ("--set", item)]


@pytest.mark.parametrize("form", [
    ["--resume", "RUN"], pytest.param(["--resume", "RUN/checkpoint-000001"], marks=pytest.mark.slow),
    pytest.param(["--resume", "--output-dir", "RUN"], marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_goes_on_from_its_folder_alone(tmp_path, monkeypatch, form):
    """A relative base model, five ``--set``, and the resume from another folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base_model(), "base")
    assert train(tmp_path, *SETS, model={"model_name": "base"}) == 0
    (tmp_path / "copy").mkdir()
    copy_of(tmp_path / "run", tmp_path / "copy", 1)
    (tmp_path / "micro.json").unlink()
    monkeypatch.chdir("/")
    assert train_ppo.main([word.replace("RUN", str(tmp_path / "copy" / "run")) for word in form]) == 0
    assert rows(tmp_path / "copy") == rows(tmp_path)
    assert final_bytes(tmp_path / "copy", 3) == final_bytes(tmp_path, 3)


def test_more_steps_are_an_ordinary_continuation(tmp_path, capsys):
    """With no decay over the steps, to the byte the run that was asked for them at once."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder, steps in ((whole, 3), (part, 2)):
        folder.mkdir()
        assert train(folder, *SETS, "--set", f"steps={steps}") == 0
    assert train_ppo.main(["--resume", str(part / "run")]) == 0
    assert "is finished: see" in capsys.readouterr().out
    assert (
        train_ppo.main(["--resume", str(part / "run"), "--set", "ppo.num_train_steps=3", "--set", "save_freq=9"]) == 0
    )
    told = [line for line in capsys.readouterr().err.splitlines() if "goes on from" in line]
    with_what = "ppo.num_train_steps: 2 -> 3; ppo.save_freq: 1 -> 9"
    assert told == [f"INFO: goes on from {part / 'run' / 'checkpoint-000002'} with {with_what}"]
    assert (rows(part), final_bytes(part, 3)) == (rows(whole), final_bytes(whole, 3))
    assert " goes on from " in (part / "run" / "run.log").read_text()
    assert re.search(r"^20\d\d-\d\d-\d\d \S+ Step 3/3 \|", (part / "run" / "run.log").read_text(), re.MULTILINE)


def test_another_decay_is_told_and_another_meaning_is_refused(tmp_path, capsys, refused):
    assert train(tmp_path, "--set", "ppo.num_train_steps=1") == 0
    run = str(tmp_path / "run")
    line = refused("--resume", run, "--set", "ppo.num_train_steps=2", "--seed", "1", "--set", "ppo.gamma=0.5")
    assert line.startswith("--resume: the configuration has changed since checkpoint-000001: ppo.gamma: 0.99 -> 0.5; ")
    assert "run.seed: 0 -> 1; --force-config goes on" in line
    assert train_ppo.main(["--resume", run, "--set", "ppo.num_train_steps=2"]) == 0
    assert "; ppo.lr_final is now reached at the new last step" in capsys.readouterr().err


def test_an_interrupt_and_a_failure_tell_the_command_that_goes_on(tmp_path, monkeypatch, capsys):
    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    real = train_ppo.ppo_update
    monkeypatch.setattr(train_ppo, "ppo_update", interrupted)
    assert train(tmp_path, "--set", "ppo.num_train_steps=2") == 130
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("go on with: ")
    assert command.endswith(f"train_ppo.py --resume {tmp_path / 'run'}")
    monkeypatch.setattr(measure, "MAX_FAILED_SHARE", -1.0)
    monkeypatch.setattr(train_ppo.Trainer, "without_failed", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    assert train_ppo.main(["--resume", str(tmp_path / "run")]) == 1
    where = tmp_path / "run" / "checkpoint-000001"
    told = f"training failed: after step 1: OSError: no space; checkpoint: {where}"
    assert capsys.readouterr().err.splitlines()[-2:] == [f"go on with: {command}", told]
    monkeypatch.undo()
    python, script, *words = shlex.split(command)
    assert [os.path.abspath(word) for word in (python, script)] == [sys.executable, train_ppo.__file__]
    assert train_ppo.main(words) == 0
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_metrics_of_a_run_that_left_no_checkpoint_are_set_aside(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "run" / "wandb_id").write_text("12345678 400")
    (tmp_path / "run" / "final").mkdir()
    (tmp_path / "run" / "final" / "adapter_config.json").write_text("{}")
    assert train(tmp_path, "--set", "ppo.num_train_steps=1") == 0
    told = "holds no checkpoint: what a run left there is set aside as abandoned-metrics.jsonl, abandoned-wandb_id, "
    told += "abandoned-final"
    assert f"WARNING: {tmp_path / 'run'} {told}\n" in capsys.readouterr().err
    assert (tmp_path / "run" / "abandoned-metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / "run" / "abandoned-final" / "adapter_config.json").read_text() == "{}"
    assert [row["step"] for row in rows(tmp_path)] == [1]


@pytest.mark.slow
def test_files_of_ones_own_are_set_aside(tmp_path, monkeypatch, capsys):
    """A run in the folder that somebody works in."""
    names = ("run_config.json", "report.md", "report.html", "curves.png")
    (tmp_path / "run").mkdir()
    for name in names:
        (tmp_path / "run" / name).write_text("mine")
    assert train(tmp_path, "--set", "ppo.num_train_steps=1") == 0
    assert all((tmp_path / "run" / f"abandoned-{name}").read_text() == "mine" for name in names)


def test_without_evaluations_a_later_stage_is_better_than_any_window_of_an_earlier_one(tmp_path):
    easy = STAGE | {"name": "easy", "threshold": 0, "min_episodes": 16}
    stages = {"stages": [easy, STAGE | {"name": "hard", "threshold": 1}]}
    assert train(tmp_path, "--set", "ppo.num_train_steps=3", "--set", "eval_freq=0", curriculum=stages) == 0
    manifest = json.loads((tmp_path / "run" / "checkpoint-000003" / "manifest.json").read_text())
    assert 1 <= manifest["score"] <= 2


@pytest.mark.parametrize(("every", "scored"), [(0, [True, True]), (1, [True, True])])
def test_without_evaluations_the_best_checkpoint_is_that_of_the_best_window(tmp_path, every, scored):
    settled = {"stages": [STAGE | {"min_episodes": 20}]}  # after the second step of 16 games
    assert train(tmp_path, "--set", "ppo.num_train_steps=2", "--set", f"eval_freq={every}", curriculum=settled) == 0
    manifests = [tmp_path / "run" / f"checkpoint-00000{step}" / "manifest.json" for step in (1, 2)]
    scores = [json.loads(path.read_text())["score"] for path in manifests]
    assert [score is not None for score in scores] == scored
    assert every or scores == [0.0, rows(tmp_path)[1]["window_success"]]
