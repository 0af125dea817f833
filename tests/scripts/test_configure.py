"""The wizard: for every machine a file that passes --dry-run and fits, its costs told, bad answers refused."""

import argparse
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from shapes import write_model

import train_ppo
from policy.model import load_architecture
from scripts import configure
from scripts.make_tiny_model import make_model, make_tokenizer
from training import memory, preflight
from training.config import parse_args, read_config
from training.process import ROOT
from utils import ConfigError, read_json

GB = 1e9


@pytest.fixture(scope="module")
def qwen3_4b(tmp_path_factory):
    """Everything of Qwen3-4B but its weights."""
    return str(write_model("Qwen3-4B", tmp_path_factory.mktemp("shape") / "Qwen3-4B"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(preflight, "SEARCH_SECONDS", 0.01)
    monkeypatch.setenv("COLUMNS", "120")


def configured(folder, *arguments):
    file = folder / "mine.json"
    assert configure.main(["--yes", "--output", str(file), "--games", "kuhn_poker", "tic_tac_toe", *arguments]) == 0
    return file


def config_of(file):
    return read_config(parse_args(["--config", str(file)], None))


def peak_of(config):
    architecture = load_architecture(config.model)
    parameters = memory.count_parameters(config.lora, architecture)
    measured = preflight.measure_prompts(config, preflight.ChatFormat(preflight.load_tokenizer(config.model)))
    return memory.peak(memory.estimate(config, parameters, architecture, measured)) / GB


@pytest.mark.parametrize(
    ("gpu", "four_bits"),
    [("8", True), pytest.param("10", True, marks=pytest.mark.slow), ("12", False),
     pytest.param("80", False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_gpus(qwen3_4b, tmp_path, capsys, gpu, four_bits):
    file = configured(tmp_path, "--gpu-memory", gpu, "--model", qwen3_4b, "--budget", "3200")
    told = capsys.readouterr().out
    config = config_of(file)
    assert config.model.use_4bit == four_bits
    assert config.model.gradient_checkpointing
    assert peak_of(config) <= 0.9 * float(gpu)
    assert config.ppo.num_train_steps == 100
    assert f"Machine: a GPU with {gpu} GB" in told
    assert told.count("chosen") == 1
    assert "3,200 games: 100 whole steps of 32 games" in told
    here = 2 if four_bits else 0  # this machine has no GPU
    assert train_ppo.main(["--config", str(file), "--dry-run", "--set", "ppo.eval_exact=never"]) == here
    assert f"{peak_of(config):.2f}" in told


def test_without_a_gpu(tiny_models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "machine_memory", lambda: 7_000_000_000)
    folder = str(tiny_models["qwen2"])
    file = configured(tmp_path, "--gpu-memory", "0", "--model", folder, "--budget", "10240")
    config = config_of(file)
    tiny = read_config(parse_args(["--config", str(configure.TINY)], None))
    assert config.model == replace(tiny.model, model_name=folder)
    assert config.env == tiny.env
    assert config.ppo == replace(tiny.ppo, num_train_steps=10, save_freq=1)
    assert [stage.games for stage in config.curriculum.stages] == [["kuhn_poker", "tic_tac_toe"]] * 2
    told = capsys.readouterr().out
    assert "Machine: no GPU, 7 GB of memory" in told
    assert "Memory, estimated, of 7.0 GB" in told
    assert train_ppo.main(["--config", str(file), "--dry-run"]) == 0
    assert " of the 7.0 GB of this machine" in capsys.readouterr().out


@pytest.mark.parametrize(("usual", "steps"), [(True, 196), (False, 20)])
def test_the_tiny_model_plays_more_games_unless_told(tiny_models, tmp_path, monkeypatch, usual, steps):
    folder = str(tiny_models["qwen2"])
    if usual:
        monkeypatch.setattr(configure, "TINY_MODEL", folder)
    config = config_of(configured(tmp_path, "--gpu-memory", "0", "--model", folder))
    assert config.ppo.num_train_steps == steps


def test_a_big_model_without_a_gpu_is_held_plain(qwen3_4b, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(configure, "ROOM", 100.0)
    config = config_of(configured(tmp_path, "--gpu-memory", "0", "--model", qwen3_4b))
    assert (config.model.device, config.model.use_4bit, config.model.dtype) == ("cpu", False, "float32")
    assert "4 bits" not in capsys.readouterr().out  # it needs a GPU, and is not offered


@pytest.mark.parametrize(("budget", "games"), [("20000", 40), ("4000", 20), ("100", 4)])
def test_a_run_is_evaluated_often_enough_to_be_judged(qwen3_4b, tmp_path, budget, games):
    ppo = config_of(configured(tmp_path, "--gpu-memory", "12", "--model", qwen3_4b, "--budget", budget)).ppo
    assert ppo.eval_games == games  # of two games, ten times: a tenth of the budget, but for the least of 4
    assert 1 <= ppo.eval_freq <= max(ppo.num_train_steps / 10, 1)


def test_the_largest_that_fits_is_taken(qwen3_4b, tmp_path):
    words = ["--model", qwen3_4b, "--games", "connect_four", "--opponents", "random", "--budget", "100"]
    for gpu in (12.0, 16.0, 40.0):
        found, _, _ = configure.options(configure.parse_args(words), True)
        chosen = configure.choose(found, gpu)
        assert chosen.peak <= 0.9 * gpu
        larger = [o for o in found if o.label == chosen.label and o.games_at_once > chosen.games_at_once]
        assert all(o.peak > 0.9 * gpu for o in larger)
        assert chosen.peak == pytest.approx(peak_of(configure.resolve(chosen.overlay)))


def test_a_model_that_reads_little_is_asked_for_no_more(tmp_path, monkeypatch):
    """The run would refuse the file: "reads 3000 tokens at most"."""
    monkeypatch.setattr(configure, "TINY_PARAMETERS", 0)  # with the default's 4096 tokens, not the tiny preset's
    make_model(400, 32, 2, 0.15, 0).save_pretrained(tmp_path)
    make_tokenizer(iter(["one or two words"] * 3), 400).save_pretrained(tmp_path)
    held = read_json(tmp_path / "config.json") | {"max_position_embeddings": 3000}
    (tmp_path / "config.json").write_text(json.dumps(held))
    file = configured(tmp_path, "--gpu-memory", "0", "--model", str(tmp_path), "--opponents", "random")
    assert config_of(file).ppo.max_seq_length == 3000
    preflight.look(config_of(file))


def test_choice():
    """Options stand in the order of preference: the first that fits; four games beside plain weights are too few."""
    found = [configure.Option("", 1, {}, peak) for peak in (30.0, 20.0, 14.0, 24.0, 9.0, 7.0)]
    for room, peak in ((34, 30.0), (24, 20.0), (16, 14.0), (15, 9.0), (8, 7.0)):
        assert configure.choose(found, room).peak == peak
    with pytest.raises(ConfigError, match=r"at least 7\.8 GB are needed, and there are 7\.0"):
        configure.choose(found, 7)


def test_search_time_is_told(tiny_models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(configure.os, "cpu_count", lambda: 4)
    index = configure.NAMES.index("kuhn_poker")
    seconds = {("mcts:50x1", index): (1.0, 3.0), ("mcts:50x1", index + 1): (1.0, 1.0)}
    monkeypatch.setattr(preflight, "search_seconds", lambda *_: seconds)
    configured(tmp_path, "--model", str(tiny_models["qwen2"]), "--gpu-memory", "0")
    told = capsys.readouterr().out
    assert "stage random: 0.00 s a step" in told
    assert re.search(r"stage mcts:50x1: \S+ s a step of \d+ games, on 4 threads", told)


def test_a_licence_for_research_only_is_told(tiny_models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(configure, "licence_of", lambda *_: "qwen-research")
    configured(tmp_path, "--model", str(tiny_models["qwen2"]), "--gpu-memory", "0")
    assert "which allows research only" in " ".join(capsys.readouterr().out.split())


def test_self_play_is_gated_by_random(tiny_models, tmp_path):
    config = config_of(configured(tmp_path, "--model", str(tiny_models["qwen2"]), "--opponents", "random", "self"))
    first, second = config.curriculum.stages
    [bound] = configure.stages(["perfect"], ["tic_tac_toe"])  # whom nobody beats: the stage would never be left
    assert (bound["opponent"], bound["gate_opponent"]) == ({"perfect": 4.0, "random": 1.0}, "random")
    assert (first.opponent, first.gate) == ("random", "random")
    assert (second.gate, set(second.mixture)) == ("random", {"self", "random"})  # else no game would count


def test_questions(tiny_models, tmp_path, monkeypatch, capsys):
    """Typed answers end in the file; a wrong one is said and asked again."""
    model = str(shutil.copytree(tiny_models["qwen2"], tmp_path / "my model"))
    bots = "mtcs", "random perfect", "random"
    answers = iter(["two names", model, "[/x]", "ches", "leduc_poker, kuhn_poker", *bots, "0", f"{10**20}", "512"])
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    file = tmp_path / "mine.json"
    assert configure.main(["--output", str(file), "--gpu-memory", "0"]) == 0
    assert not list(answers)
    told = capsys.readouterr().out
    assert "game '[/x]' is not known" in told
    assert "game 'ches' is not known" in told
    assert told.count("  random mcts mcts_light") == 1, "what may be answered is told once"
    assert "opponent 'mtcs' is not known" in told
    assert "opponent perfect cannot play leduc_poker" in " ".join(told.split())
    assert told.count("expected from 1 to 2,147,483,647 games") == 2
    config = config_of(file)
    assert [(s.opponent, s.games) for s in config.curriculum.stages] == [("random", ["leduc_poker", "kuhn_poker"])]
    assert config.ppo.num_train_steps == 1
    assert config.model.model_name == model


def test_what_cannot_be_played_is_said_before_the_next_question(tiny_models, tmp_path, monkeypatch, capsys):
    """A model without a tokenizer, and a game whose prompt does not fit."""
    model, mute = (shutil.copytree(tiny_models["qwen2"], tmp_path / name) for name in ("model", "mute"))
    (model / "config.json").write_text(json.dumps(read_json(model / "config.json") | {"max_position_embeddings": 64}))
    (mute / "chat_template.jinja").unlink()
    answers = iter([str(mute), str(model), "amazons", "kuhn_poker", "random", "512"])
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    assert configure.main(["--output", str(tmp_path / "mine.json"), "--gpu-memory", "0"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "chat template" in told
    assert "the first prompt and answer of amazons take" in told


def test_why_an_answer_is_refused_is_shown_without_what_a_terminal_would_obey(monkeypatch, capsys):
    """A model's files may say anything."""

    def check(words):
        if words == ["theirs"]:
            raise ValueError("odd\x1b[2J")

    answers = iter(["theirs", "mine"])
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    args = argparse.Namespace(model=None, yes=False)
    configure.ask(args, "model", "", "Model", "", check)
    assert args.model == ["mine"]
    assert r"odd\x1b[2J" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--games", "ches"), "--games: game 'ches' is not known, the nearest is chess: allowed are goofspiel"),
        (("--opponents", "mtcs"), "--opponents: opponent 'mtcs' is not known"),
        (
            ("--opponents", "past"),
            "--opponents: opponent 'past' is a run's own past selves: only curriculum.stages can",
        ),
        (("--opponents", "perfect"), "--opponents: curriculum.stages: stage 'perfect': opponent perfect cannot play"),
        (("--model", "./nothing"), "--model: model.model_name: there is no folder nothing"),
        (("--gpu-memory", "1"), "nothing fits: at least"),
        (("--gpu-memory", "0.4"), "nothing fits: at least"),
        (("--games-path", "my_games"), "--games-path: env: games_path 'my_games' is not allowed: a path from"),
        (("--output", "docs"), "--output docs: is a folder or a device; expected a file"),
    ],
)
def test_bad_usage_is_told_in_one_line(qwen3_4b, tmp_path, capsys, arguments, expected):
    model = () if "--model" in arguments else ("--model", qwen3_4b)
    file = tmp_path / "mine.json"
    assert configure.main(["--yes", "--output", str(file), "--games", "kuhn_poker", *model, *arguments]) == 2
    told, error = capsys.readouterr()
    assert "--gpu-memory" not in arguments or told == f"Machine: a GPU with {arguments[1]} GB\n"  # 0.4 was told as 0
    assert error.startswith(f"error: {expected}"), error
    assert error.count("\n") == 1
    assert not file.exists()


def test_no_text_of_somebodys_and_no_defaults_are_replaced(tmp_path, capsys, monkeypatch):
    mine, defaults, run = tmp_path / "README.md", tmp_path / "env_config.json", tmp_path / "run_config.json"
    preset = tmp_path / "presets" / "24gb.json"
    preset.parent.mkdir()
    monkeypatch.setattr(configure, "TINY", preset.with_name("tiny.json"))
    monkeypatch.setattr(configure, "DEFAULT_FILES", [*configure.DEFAULT_FILES, defaults])
    mine.write_text("# Mine")
    for file in (defaults, preset, run):
        file.write_text("{}")
    comes = "comes with this project or belongs to a run"
    for file, told in ((mine, "invalid JSON"), (defaults, comes), (preset, comes), (run, comes)):
        before = file.read_text()
        assert configure.main(["--yes", "--output", str(file), "--games", "kuhn_poker", "--gpu-memory", "0"]) == 2
        assert told in capsys.readouterr().err
        assert file.read_text() == before


def test_questions_that_nobody_answers(tiny_models, tmp_path, monkeypatch, capsys):
    """As without a terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: exec("raise EOFError"))
    model = str(tiny_models["qwen2"])
    assert configure.main(["--output", str(tmp_path / "mine.json"), "--gpu-memory", "0", "--model", model]) == 2
    assert capsys.readouterr().err == "error: the input ended before all questions were answered; --yes asks none\n"
    (file := tmp_path / "mine.json").write_text("mine")
    answered = ["--games", "kuhn_poker", "--opponents", "random", "--budget", "64"]
    assert configure.main(["--output", str(file), "--gpu-memory", "0", "--model", model, *answered]) == 2
    assert capsys.readouterr().err == "error: the input ended before all questions were answered; --yes asks none\n"
    assert file.read_text() == "mine"


@pytest.mark.parametrize("arguments", [("--budget", "0"), ("--gpu-memory", "-1"), ("--gpu-memory", "nan")])
def test_impossible_numbers(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        configure.parse_args(arguments)
    assert "expected at least" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "folder", "message"), [
    ("--output_dir", "mine", "unrecognized arguments: --output_dir mine"),
    ("--output", "mine/", "argument --output: mine/: is a folder; expected a file"),
])  # fmt: skip
def test_a_folder_is_no_place_for_the_file(capsys, flag, folder, message):
    with pytest.raises(SystemExit, match="2"):
        configure.parse_args([flag, folder])
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_file_that_is_there_is_kept(tiny_models, tmp_path, monkeypatch, capsys):
    file = tmp_path / "[" / "v1]" / "mine.json"  # brackets are no markup
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    answers = iter(["n"])
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    assert configure.main(["--gpu-memory", "0", "--output", str(file)]) == 2  # before any other question
    assert file.read_text() == "{}"
    flags = ["--model", str(tiny_models["qwen2"]), "--games", "kuhn_poker", "--opponents", "random", "--budget", "10"]
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.chdir(file.parent)
    capsys.readouterr()
    assert configure.main([*flags, "--gpu-memory", "0", "--output", str(file)]) == 0
    assert f"\n  python {ROOT / 'train_ppo.py'} --config mine.json\n" in capsys.readouterr().out  # as typed from here
    assert read_json(file)["ppo"]["num_train_steps"] == 1
    assert json.loads(file.read_text())["run"]["output_dir"] == "runs/mine"


def test_a_place_that_cannot_be_written_is_told_before_the_first_question(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert configure.main(["--output", str(tmp_path / "file" / "mine.json")]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {tmp_path / 'file'}: cannot be written: ")
    assert "?" not in shown.out
