"""What GitHub reads: the workflow calls what the project calls, the citation is of this version, links lead there."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import house
import pytest
import yaml

PROJECT = tomllib.loads((house.ROOT / "pyproject.toml").read_text())["project"]


def test_the_workflow_runs_what_every_change_must_pass():
    workflow = yaml.safe_load((house.ROOT / ".github/workflows/ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["check"]["steps"] if "run" in step] == [".ci/run"]
    assert os.access(house.ROOT / ".ci/run", os.X_OK)
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("own", [False, True], ids=["through a link", "a file of ones own"])
def test_setting_up_ends_with_its_stamp_wherever_it_and_its_requirements_lie(tmp_path, own):
    (tmp_path / "copy/scripts").mkdir(parents=True)
    python = tmp_path / "copy/.venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    for name in ("scripts/setup.sh", "requirements.txt"):
        shutil.copy(house.ROOT / name, tmp_path / "copy" / name)
    (tmp_path / "mine.txt").write_text("")
    (tmp_path / "link.sh").symlink_to("copy/scripts/setup.sh")
    command = ["bash", tmp_path / "link.sh", *([tmp_path / "mine.txt"] if own else [])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    stamp = "mine" if own else "requirements"
    assert (tmp_path / f"copy/.venv/{stamp}.installed").exists()


SETUP_PYTHON = """#!/bin/sh
case "$*" in
*"pip show"*) exit 1 ;;
*"pip config"*) env | sed -n 's/^PIP_EXTRA_INDEX_URL=/:env:.extra-index-url=/p'; yes | head -99999 ;;
*version_info\\[*) echo 3.12 ;;
esac
"""


@pytest.mark.parametrize(("variables", "free_gb", "told", "code"), [
    ({}, 20, "20 GB free", 0), ({}, 5, "5 GB free on this disk", 1),
    ({"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org/whl/cpu"}, 5, "", 0),
    ({"PIP_EXTRA_INDEX_URL": "https://mirror.example/simple", "GPU": "1"}, 5, "5 GB free on this disk", 1),
    ({"PYTHON": "/no/such/python"}, 20, "PYTHON=/no/such/python is not the version of the .venv", 1),
])  # fmt: skip
def test_setting_up_minds_what_it_was_told(tmp_path, variables, free_gb, told, code):
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "requirements.txt"):
        shutil.copy(house.ROOT / name, tmp_path / name)
    bin_ = tmp_path / "bin"
    df = f"#!/bin/sh\necho a b c d; echo a b c {free_gb * 1048576}\n"
    for path, text in ((tmp_path / ".venv/bin/python", SETUP_PYTHON), (bin_ / "df", df)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    if "GPU" in variables:
        shutil.copy(bin_ / "df", bin_ / "nvidia-smi")
    env = {"PATH": f"{bin_}:/usr/bin:/bin", **variables}
    done = subprocess.run(["bash", "scripts/setup.sh"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert told in done.stdout + done.stderr
    advised = not (variables or code or shutil.which("nvidia-smi", path=env["PATH"]))
    assert ("to save them, start again with" in done.stdout) == advised


@pytest.mark.parametrize(("changed", "asked", "broken_off"), [
    ("requirements.txt", [[], ["requirements-dev.txt"], []], False),
    ("requirements.txt", [[], ["requirements-dev.txt"], []], True),
    ("requirements-dev.txt", [["requirements-dev.txt"]] * 3, True),
])  # fmt: skip
def test_going_back_to_requirements_of_before_installs_them_again(tmp_path, changed, asked, broken_off):
    """Their stamp was still there, and the newer packages stayed."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python, log = tmp_path / ".venv/bin/python", tmp_path / "log"
    shutil.copy(house.ROOT / "scripts/setup.sh", tmp_path / "scripts")
    python.write_text(f'#!/bin/sh\ncase "$*" in *"pip install"*torch==*) cat {changed} >>log; exit $FAIL;; esac')
    python.chmod(0o755)
    for name in ("requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text("torch==0\n")
    for pinned, words, fail in zip(("torch==1", "torch==2", "torch==1"), asked, (0, int(broken_off), 0), strict=True):
        (tmp_path / changed).write_text(f"{pinned}\n")
        command, env = ["bash", "scripts/setup.sh", *words], os.environ | {"FAIL": str(fail)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == fail, done.stderr
    assert log.read_text().split() == ["torch==1", "torch==2", "torch==1"]


@pytest.mark.parametrize(("name", "version"), [("python3.99", None), ("python3", (3, 10)), ("python3", (3, 15))])
@pytest.mark.parametrize("named", [True, False])
def test_a_python_that_is_not_there_or_has_no_wheels_is_refused(tmp_path, name, version, named):
    (tmp_path / "scripts").mkdir()
    for file in ("scripts/setup.sh", "requirements.txt"):
        shutil.copy(house.ROOT / file, tmp_path / file)
    for tool in ("bash", "dirname", "readlink", "cat", "cksum", "basename"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    if version:
        python = tmp_path / name
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = {version}; $2"\n')
        python.chmod(0o755)
    env = {"PATH": str(tmp_path)} | ({"PYTHON": name} if named else {})
    done = subprocess.run(["bash", "scripts/setup.sh"], cwd=tmp_path, env=env, capture_output=True, text=True)
    what = f"PYTHON={name} is no Python from 3.11 to 3.14" if named else "no Python from 3.11 to 3.14 found;"
    assert done.returncode == 1
    assert done.stderr.startswith(f"setup: {what}"), done.stderr


def trained_by(*words):
    """The words of the command by which ``make`` would train."""
    command = ["make", "--dry-run", "--no-print-directory", "--assume-old=.venv/requirements.installed", *words]
    shown = subprocess.run(command, cwd=house.ROOT, capture_output=True, text=True, timeout=20, check=True).stdout
    return shlex.split(next(line for line in shown.splitlines() if " train_ppo.py " in line))


@pytest.mark.parametrize("name", ["my config.json", "tiny.json"])
def test_a_run_gets_a_folder_of_its_configurations_name(name):
    words = trained_by("train", f"CONFIG=config/{name}")
    assert words[words.index("--config") + 1] == f"config/{name}"
    assert words[words.index("--output-dir") + 1].startswith(f"runs/{name.removesuffix('.json')}-seed0")


def test_a_run_that_goes_on_stays_where_it_is_and_as_it_was():
    assert trained_by("train", "ARGS=--resume runs/tiny-seed0")[1:] == ["train_ppo.py", "--resume", "runs/tiny-seed0"]
    words = trained_by("train", "OUT=runs/x", "ARGS=--resume")
    assert words[words.index("--output-dir") :] == ["--output-dir", "runs/x", "--resume"]


def test_arguments_with_quotes_and_spaces_reach_the_pretrained_model_s_run():
    stage = 'curriculum.stages=[{"name": "two words", "games": ["kuhn_poker"]}]'
    words = trained_by("smol", f"ARGS=--no-wandb --set {shlex.quote(stage)}")
    assert words[words.index("--config") + 1] == "config/presets/smol.json"
    assert words[words.index("--output-dir") + 1].startswith("runs/smol-seed0")
    assert words[-3:] == ["--no-wandb", "--set", stage]
    assert any(word.startswith("model.dtype=") for word in words)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((house.ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["title"].startswith(f"{PROJECT['name']}: ")
    assert {"cff-version", "message", "authors"} <= set(citation)
    assert f"## {PROJECT['version']}" in (house.ROOT / "docs/CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", [".github/CONTRIBUTING.md", "docs/CHANGELOG.md"])
def test_pages_name_files_and_targets_that_exist(page):
    text = (house.ROOT / page).read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert links
    assert [link for link in links if not ((house.ROOT / page).parent / link).exists()] == []
    named = re.findall(r"(?:tests|docs|examples|benchmarks|games|\.ci|\.github)/[\w./]*", text)
    assert [name for name in named if not (house.ROOT / name.rstrip(".")).exists()] == []
    makefile = (house.ROOT / "Makefile").read_text()
    assert [t for t in re.findall(r"make ([a-z-]+)  ", text) if not re.search(rf"^{t}\b.*:", makefile, re.M)] == []
