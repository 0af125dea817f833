"""Programs are alike: what --help shows, and what flags are called."""

import contextlib
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ["train_ppo", *(f"scripts.{path.stem}" for path in sorted((ROOT / "scripts").glob("[a-z]*.py")))]
# One meaning, one name: how long it is, whom it is about, where it goes.
NAMES = {"--num-episodes", "--num-games", "--checkpoint-dir", "--adapters", "--run-dir", "--out", "--output-file"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_shows_two_examples_and_flags_by_their_usual_names(name, capsys):
    program = importlib.import_module(name)
    with pytest.raises(SystemExit) as ended:
        program.main(["--help"])
    assert ended.value.code == 0
    shown, file = capsys.readouterr().out, name.replace(".", "/") + ".py"
    assert len(re.findall(rf"^ +python {file} ?.*$", shown, re.MULTILINE)) >= 2
    flags = set(re.findall(r"^ +(--[\w-]+)", shown, re.MULTILINE))
    assert not {flag for flag in flags if "_" in flag} | flags & NAMES


@pytest.mark.parametrize(
    ("name", "others"),
    [("train_ppo", []), ("scripts.evaluate", ["--checkpoint", "base"]), ("scripts.warmstart", ["--output", "x"])],
)
def test_settings_are_given_one_by_one_or_together(name, others, capsys):
    program = importlib.import_module(name)
    with contextlib.suppress(SystemExit):
        program.main([*others, "--set", "model.dtype=float32", "ppo.gama=1", "--set", "ppo.gamma=1"])
    assert "--set: ppo.gama = 1: no such key; the nearest is ppo.gamma" in capsys.readouterr().err
