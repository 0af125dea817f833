"""What strangers send and what nobody may see: code of models, pickles, secrets. And the table of faults."""

import ast
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from test_survival import REMOTE, SMALL, arguments, own_base, process
from tiny import tiny_policy
from tiny_runs import ROOT, train

# -------------------------------------------------------------------------------------------------------------- secrets

CANARIES = {name: f"canary-{name.lower()}-0123456789" for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")}


def with_secrets(**sections):
    """A configuration that holds one, as in an address."""
    url = f"http://127.0.0.1:9/{CANARIES['HF_TOKEN']}"
    return SMALL | {"env": {"env_url": url}, "ppo": {"num_train_steps": 2}} | sections


def assert_no_secret_in(folder, most=20):
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert len(written) > most
    assert [str(path) for path in written if b"canary" in path.read_bytes()] == []
    return written


def test_no_secret_of_the_environment_is_in_any_file_or_line_of_a_run(tmp_path, monkeypatch, capfd):
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    sections = with_secrets()
    assert train(tmp_path, **sections) == 0
    assert train(tmp_path, "--resume", **sections) == 0  # what is redacted is no change of the configuration
    assert "[redacted]" in (tmp_path / "run" / "run_config.json").read_text()
    assert_no_secret_in(tmp_path / "run")
    monkeypatch.setenv("FOLDER_TOKEN", place := "canary-folder")
    assert train(tmp_path, "--dry-run", "--set", f"run.output_dir={tmp_path / place}", **sections) == 0
    refused = REMOTE | {"env": REMOTE["env"] | sections["env"] | {"env_timeout": 0.2}}
    assert train(tmp_path, "--set", "run.output_dir=elsewhere", **refused) == 2
    out, err = capfd.readouterr()
    assert "[redacted]" in err
    assert "canary" not in out + err


@pytest.mark.slow
def test_no_secret_is_in_any_file_or_line_of_a_run_with_wandb_and_curves(tmp_path):
    ended = process("", *arguments(tmp_path, **with_secrets(run={"logger": "offline"})), env=CANARIES)
    assert ended.returncode == 0, ended.stderr
    assert "canary" not in ended.stdout + ended.stderr
    written = assert_no_secret_in(tmp_path / "run")
    assert any("wandb" in path.parts for path in written)
    assert tmp_path / "run" / "curves.png" in written


# ---------------------------------------------------------------------------------------------------- code of strangers


def own_files():
    names = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    files = [ROOT / name for name in names] or list(ROOT.glob("*.py"))
    return [path for path in files if path.exists() and path.name != "test_faults.py"]  # which makes a malicious one


def test_nothing_of_ours_reads_pickles_or_runs_the_code_of_a_model():
    modules = {"pickle", "cPickle", "_pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
    for path in own_files():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not modules & {name.split(".")[0] for name in names}, path
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("torch.load", "numpy.load", "np.load"), path
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg in ("trust_remote_code", "allow_pickle"):
                    assert ast.unparse(keyword.value) == "False", path


@pytest.mark.parametrize("item", ["model.trust_remote_code=true", 'model={"trust_remote_code": true}'])
def test_no_configuration_switches_the_code_of_a_model_on(tmp_path, capsys, item):
    assert train(tmp_path, "--set", item) == 2
    assert "trust_remote_code" in capsys.readouterr().err


def test_code_that_comes_with_a_model_is_not_run(tmp_path, capsys):
    """Neither that which its configuration and tokenizer name, nor that in pickled weights or adapters."""
    folder = Path(own_base(tmp_path)["model_name"])
    trap = f"open({str(tmp_path / 'executed')!r}, 'w')\nclass C: pass\n"
    (folder / "trap.py").write_text(trap)
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        names = {"AutoConfig": "trap.C", "AutoModelForCausalLM": "trap.C", "AutoTokenizer": ["trap.C", "trap.C"]}
        (folder / name).write_text(json.dumps(content | {"auto_map": names, "model_type": "trap"}))
    assert train(tmp_path, model={"model_name": str(folder)}) == 2
    assert "cannot load" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


class Payload:
    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (self.place,)


def test_weights_and_adapters_that_are_pickles_are_refused(tmp_path, capsys):
    payload = Payload(str(tmp_path / "executed"))
    folder = Path(own_base(tmp_path)["model_name"])
    (folder / "model.safetensors").unlink()
    torch.save(payload, folder / "pytorch_model.bin")
    assert train(tmp_path, model={"model_name": str(folder)}) == 2
    assert "cannot load" in capsys.readouterr().err
    adapter = tmp_path / "adapter"
    tiny_policy(tmp_path).save(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(payload, adapter / "adapter_model.bin")
    assert train(tmp_path, model={"adapter": str(adapter)}) == 2
    assert "cannot load" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


# ------------------------------------------------------------------------------------------------------------ the docs


def test_every_test_in_the_table_of_faults_exists():
    table = (ROOT / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    assert rows == [str(number) for number in range(1, 34)]
    named = re.findall(r"`(test_\w+)\.(\w+)`", table)
    assert len(named) > 33
    for file, name in named:
        [path] = (ROOT / "tests").glob(f"*/{file}.py")
        source = path.read_text()
        assert f"def test_{name}(" in source, f"{file}.{name}"
