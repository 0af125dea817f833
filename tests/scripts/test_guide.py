"""README.md and docs/guide.md do what they say: every command is run, as it is printed, on a small model.

The pages are followed from top to bottom in a copy of the project whose tiny preset is shorter. What needs a GPU is run
with --dry-run, on a folder with the shapes of Qwen3-4B; vLLM is stood in for by plain transformers behind the same
protocol.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from serving import http_server, said
from shapes import write_model

from config.flags import FlagParser
from games import NAMES
from training.config import DEFAULT_FILES, SECTIONS, load_sections

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/guide.md")
COMMAND = re.compile(r"(make|python|bash|source|vllm) ")
KEPT_OUT = {".git", ".venv", "runs", "models", "__pycache__", "wandb"}
SHORT = {"num_train_steps": 3, "batch_size": 32, "mini_batch_size": 32, "save_freq": 1, "eval_games": 8}
ANSWERS = {"scripts/configure.py": "\n\n\n\n", "scripts/play.py": "q\n"}  # typed


def steps_of(page):
    """What a page tells to do, in order: commands, and blocks of Python."""
    found: list[str] = []
    block: list[str] | None = None
    for line in (ROOT / page).read_text().splitlines():
        if block is not None and line == "```":
            found.append("\n".join(block))
            block = None
        elif block is not None:
            block.append(line)
        elif line == "```python":
            block = []
        elif line.startswith("    ") and COMMAND.match(line.strip()):
            found.append(re.sub(r"\s+#.*$", "", line.strip()))
    return found


def examples_of(program):
    """The commands that its --help shows, as words."""
    shown = ast.get_docstring(ast.parse((ROOT / program).read_text())).replace(" \\\n        --", " --")
    assert not re.search(r"\S {5,}--", shown), "lines are joined"
    lines = re.findall(r"^ {4}(python \S+\.py.*)$", shown, re.MULTILINE)
    return [re.split(r"\s{2,}", line)[0].split()[1:] for line in lines]


def is_command(step):
    return "\n" not in step and COMMAND.match(step) is not None


# ------------------------------------------------------------------------------------------------------- read only


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_files_and_flags_that_exist(page):
    commands = [step for step in steps_of(page) if is_command(step)]
    assert len(commands) >= 8
    for command in commands:
        words = command.split()
        if words[0] == "python":
            files = (words[1], "training/config.py", "evaluation/players.py")
            source = "".join((ROOT / file).read_text() for file in files)
            unknown = [word for word in words if word.startswith("--") and f'"{word}"' not in source]
            assert not unknown, command
        for word in words:
            if word.startswith("config/") and word not in ("config/mine.json", "config/other.json"):
                assert (ROOT / word).is_file(), command


PROGRAMS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "scripts").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("program", ["train_ppo.py", *PROGRAMS])
def test_examples_of_help_are_read_by_the_programs_they_name(program, monkeypatch):
    """Each flag with its values, and of configurations each file and knob; nothing is done."""

    class ReadError(Exception):
        pass

    def read(self, argv=None):
        raise ReadError(argparse.ArgumentParser.parse_args(self, argv))

    monkeypatch.setattr(FlagParser, "parse_args", read)
    assert examples_of(program)
    for named, *argv in examples_of(program):
        with pytest.raises(ReadError) as found:
            importlib.import_module(named.removesuffix(".py").replace("/", ".")).main(argv)
        args = found.value.args[0]
        load_sections([*DEFAULT_FILES, *getattr(args, "config", [])], getattr(args, "set", []))


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_knobs_images_and_pages_that_exist(page):
    text = (ROOT / page).read_text()
    knobs = {f"{name}.{field.name}" for name, section in SECTIONS.items() for field in dataclasses.fields(section)}
    named = set(re.findall(rf"`(?:--set )?((?:{'|'.join(SECTIONS)})\.\w+)", text))
    assert named
    assert named <= knobs
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_the_guides_table_of_games_is_that_of_the_code():
    rows = re.findall(r"^\| \d+ \w+ \|.*$", (ROOT / "docs" / "guide.md").read_text(), re.MULTILINE)
    assert re.findall(r"(\d+) (\w+)", "".join(rows)) == [(str(i), name) for i, name in enumerate(NAMES)]


def test_checkpoints_that_pages_name_are_some_that_make_train_leaves():
    ppo = json.loads((ROOT / "config" / "presets" / "tiny.json").read_text())["ppo"]
    text = "".join((ROOT / page).read_text() for page in (*PAGES, "docs/checkpoints.md"))
    named = {int(step) for step in re.findall(r"(?:runs/tiny-seed0|RUN)/checkpoint-(\d+)", text)}
    assert named
    assert named <= {*range(0, ppo["num_train_steps"] + 1, ppo["save_freq"])}


def test_symptoms_are_read_off_metrics_that_exist():
    table = (ROOT / "docs" / "guide.md").read_text().partition("| symptom |")[2].partition("\n\n")[0]
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    knobs_and_others = {"threshold", "constrained", "resume", "mcts", "mcts_light"}
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)*)`", table)) - knobs_and_others
    assert len(named) >= 12
    assert {name for name in named if f"`{name}`" not in metrics} == set()


# ------------------------------------------------------------------------------------------------------------- run


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A copy of the project with short runs; the default model is a folder without weights."""
    folder = tmp_path_factory.mktemp("guide") / "project"
    shutil.copytree(ROOT, folder, ignore=lambda _, names: {*names} & KEPT_OUT)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    shape = write_model("Qwen3-4B", folder / "models" / "Qwen3-4B")
    tiny, train = folder / "config" / "presets" / "tiny.json", folder / "config" / "train_config.json"
    settings = json.loads(tiny.read_text())
    settings["ppo"] |= SHORT
    tiny.write_text(json.dumps(settings))
    train.write_text(train.read_text().replace("Qwen/Qwen3-4B", str(shape)))
    return folder


def served(folder):
    """The merged model behind OpenAI's protocol, with nothing but transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    lock = threading.Lock()

    def answer(path, asked, headers):
        inputs = tokenizer.apply_chat_template(
            asked["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with lock:
            ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0][inputs["input_ids"].shape[1] :]
        return 200, said(tokenizer.decode(ids, skip_special_tokens=True))

    return http_server(answer)


def on_this_machine(command):
    """The command as it is run here: what would take a GPU or hours ends after --dry-run."""
    if command == "make test":
        return "make -n test"
    if command.startswith("python train_ppo.py") and "--dry-run" not in command:
        return f"{command.removesuffix(' --resume')} --dry-run"  # of a run that was not made here
    if command.startswith("python scripts/configure.py --yes"):
        return f"{command} --model models/Qwen3-4B"
    return command


def answers_and_stops(command, **options):
    """Start a server that runs until it is interrupted, here on a free port; it has to answer, and to end then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with subprocess.Popen(command.replace("8765", port).split(), **options) as server:
        try:
            for _ in range(240):
                with contextlib.suppress(OSError):
                    assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
                    break
                assert server.poll() is None, server.communicate()
                time.sleep(0.5)
            else:
                pytest.fail(f"{command}: no answer in two minutes")
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 130, server.communicate()
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(PAGES, key=lambda page: page == "README.md"))
def test_every_step_of_the_page_works(workplace, page):
    environment = os.environ | {"PATH": f"{workplace}/.venv/bin:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    with contextlib.ExitStack() as servers:
        address = ""
        (workplace / "config" / "mine.json").unlink(missing_ok=True)  # of the other page: replacing it is a question
        for step in steps_of(page):
            if step.startswith("vllm serve "):
                address = servers.enter_context(served(workplace / step.split()[2]))
                continue
            if step.startswith("python scripts/serve.py "):
                answers_and_stops(step, cwd=workplace, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                continue
            command = on_this_machine(step) if is_command(step) else step
            shell = ["bash", "-c", command] if is_command(step) else [sys.executable, "-c", command]
            shell[-1] = shell[-1].replace("http://127.0.0.1:8000", address or "http://127.0.0.1:8000")
            typed = next((text for script, text in ANSWERS.items() if script in command), "")
            done = subprocess.run(shell, cwd=workplace, env=environment, input=typed, capture_output=True, text=True)
            needs_gpu = "--dry-run" in command and "needs a CUDA device" in done.stderr
            assert done.returncode == (2 if needs_gpu else 0), (
                f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            )


@pytest.mark.slow
def test_what_the_guide_made(workplace):
    """The files it promises are there. Runs after the pages were followed."""
    for name in ("runs/tiny-seed0/report.html", "runs/tiny-seed0/curves.png", "runs/tiny-seed0/final",
                 "config/mine.json", "models/player/README.md", "models/player/merge_report.json",
                 "models/adapter/adapter_config.json"):  # fmt: skip
        assert (workplace / name).exists(), name
