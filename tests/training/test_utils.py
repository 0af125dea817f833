"""Random numbers without state, secrets, and what a checkpoint gives back and keeps."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from saving import damage, names, save

import utils
from config.reader import ConfigError, config_dict, load_config
from training.config import DEFAULT_FILES, SECTIONS
from training.folder import abandon_after, find_checkpoint
from training.process import lock_run
from utils import CheckpointError, latest_checkpoint, load_checkpoint, verify_checkpoint

ROOT = Path(__file__).parents[2]


# ------------------------------------------------------------------------------------------------------- random numbers


def test_uniform_is_the_same_everywhere():
    """Values computed with another program: ``b2sum -l 64`` of the keys as little-endian 64-bit integers."""
    assert utils.uniform() == 0.7058483037031942
    assert utils.uniform(0) == 0.09686719122320409
    assert utils.uniform(1, 2, 3) == 0.7069603535111167
    assert utils.uniform(-(2**63), 2**63 - 1) == 0.8755432902341689


def test_uniform_takes_numpy_integers_as_integers_and_no_floats():
    assert utils.uniform(np.int64(5), np.uint8(7)) == utils.uniform(5, 7)
    with pytest.raises(Exception, match="required argument is not an integer"):
        utils.uniform(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [lambda i: (i,), lambda i: (7, i, 0), lambda i: (i << 32,), lambda i: (i % 2, -i)])
def test_uniform_is_uniform_and_uncorrelated_along_any_part_of_the_key(key):
    n, bins = 20_000, 64
    draws = np.array([utils.uniform(*key(i)) for i in range(n)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.bincount((draws * bins).astype(int), minlength=bins)
    chi2 = ((counts - n / bins) ** 2 / (n / bins)).sum()
    assert 25 < chi2 < 120  # 63 degrees of freedom: about 5 standard deviations; too even is wrong too
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(draws[:-lag], draws[lag:])[0, 1]) < 5 / n**0.5


def test_keys_of_different_length_differ():
    assert len({utils.uniform(), utils.uniform(0), utils.uniform(0, 0), utils.uniform(0, 0, 0)}) == 4


# -------------------------------------------------------------------------------------------------------------- secrets


def test_redact_removes_every_secret_of_the_environment(monkeypatch):
    secrets = {
        "HF_TOKEN": "hf_canary1",
        "WANDB_API_KEY": "canary2",
        "MY_SECRET": "canary2-longer",
        "DB_PASSWORD": "p@ss99",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHORT_TOKEN", "the")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "harmless")
    text = "the harmless hf_canary1 canary2-longer canary2 p@ss99"
    assert utils.redact(text) == "the harmless [redacted] [redacted] [redacted] [redacted]"
    assert utils.redact({"canary2": 1}) == {"canary2": 1}, "keys are names of ours"
    assert utils.redact({"a": [text[4:12], ("canary2",)], "n": 1.5}) == {"a": ["harmless", ["[redacted]"]], "n": 1.5}


@pytest.mark.parametrize("secret", ["k" * 160, 'p"a\\s s-word'])
def test_a_secret_in_a_message_is_hidden_before_it_is_cut(monkeypatch, secret):
    monkeypatch.setenv("OPENAI_API_KEY", secret)
    with pytest.raises(utils.ConfigError) as refused:
        utils.load_config(SECTIONS, [], [f"env.api={secret}"])
    assert secret[:8] not in str(refused.value)
    assert "[redacted]" in str(refused.value)
    for value in ([secret], {"a": [secret]}, {secret: 1}):
        with pytest.raises(utils.ConfigError) as refused:
            utils.load_config(SECTIONS, [], [f"env.env_url={json.dumps(value)}"])
        assert secret[:8] not in str(refused.value)
        assert secret[-8:] not in str(refused.value)
        assert "[redacted]" in str(refused.value)


def test_the_second_interrupt_gives_the_terminal_its_cursor_back():
    """Whoever draws a progress line hides it, and is not asked any more."""
    code = "import os, signal, time; from training import process; process.TOGETHER = 0.0\nwith process.StopSignal():\n"
    code += "    for _ in range(2):\n        time.sleep(0.01); os.kill(os.getpid(), signal.SIGINT)\n"
    ours, theirs = os.openpty()
    ended = subprocess.run([sys.executable, "-c", code], stdout=theirs, cwd=ROOT, check=False)
    os.close(theirs)
    assert ended.returncode == 128 + 2
    assert os.read(ours, 100) == b"\x1b[?25h\r\n"
    os.close(ours)
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=False)
    assert (piped.returncode, piped.stdout) == (128 + 2, b"")


NAMES_OF_SECRETS = [
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "GITHUB_PAT",
    "DB_PASS",
    "DB_PASSWD",
    "PGPASSWORD",
    "MYSQL_PWD",
    "SSH_KEY_PASSPHRASE",
    "STRIPE_SECRET_KEY",
    "GH_TOKEN",
    "TOKEN",
    "APIKEY",
    "AZURE_CLIENT_SECRET",
    "GOOGLE_CREDENTIALS",
    "TLS_PRIVATE_KEY",
    "NPM_AUTH",
    "HF_TOKEN_2",
    "NGROK_AUTHTOKEN",
    "ACCESSTOKEN",
    "JWT",
    "SIGNING_KEY_B64",
    "WANDB_KEY1",
    "MYSQL_PW",
    "BEARER",
    "AUTHORIZATION",
    "SESSION_COOKIE",
]


@pytest.mark.parametrize("name", [*NAMES_OF_SECRETS, *map(str.lower, NAMES_OF_SECRETS[:3])])
def test_secrets_have_many_names(monkeypatch, name):
    monkeypatch.setenv(name, "canary-77")
    assert utils.redact("a canary-77") == "a [redacted]"


@pytest.mark.parametrize("name", ["PWD", "TOKENIZERS_PARALLELISM", "KEYBOARD", "PATH", "PATCH", "MONKEYS", "COMPASS",
                                  "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY", "KEY_TIMEOUT", "PYTHONPATH"])  # fmt: skip
def test_other_variables_are_no_secrets(monkeypatch, name):
    monkeypatch.setenv(name, "harmless-77")
    assert utils.redact("a harmless-77") == "a harmless-77"


@pytest.mark.parametrize("address", [
    "postgres://me:canary-77@host/db", "redis://:canary-77@host", "http://canary-77@127.0.0.1:1",
    "https://canary-77:@host", "someone:canary-77@proxy:3128",
])  # fmt: skip
def test_a_password_within_an_address_is_a_secret(monkeypatch, address):
    monkeypatch.setenv("SOME_ADDRESS", address)
    assert utils.redact("canary-77 of someone at host") == "[redacted] of someone at host"


@pytest.mark.parametrize("address", [
    "ssh://harmless-77@host", "harmless-77@host:path", "image:harmless-77@sha256:00", "http://host/harmless-77@x",
    "http://harmless-77:80/a@b",
])  # fmt: skip
def test_other_parts_of_addresses_are_no_secrets(monkeypatch, address):
    monkeypatch.setenv("SOME_ADDRESS", address)
    assert utils.redact("a harmless-77") == "a harmless-77"


def test_redaction_does_not_change_what_is_read_again(tmp_path, monkeypatch):
    for name, word in (("SOME_TOKEN", "random"), ("DB_PASS", "leduc_poker"), ("HF_TOKEN", "hf_x1234567")):
        monkeypatch.setenv(name, word)
    state = {"opponent": "random", "game": "leduc_poker", "free": "hf_x1234567"}
    documents = dict.fromkeys(("trainer_state", "curriculum", "run_config"), state)
    saved = load_checkpoint(save(tmp_path, 1, documents=documents))
    assert [saved.json(name) for name in documents] == [state, state, state | {"free": "[redacted]"}]
    assert utils.redact("random leduc_poker") == "[redacted] [redacted]"  # in what is only shown


def test_a_file_that_is_not_in_the_manifest_is_not_read(tmp_path):
    """It may be a pipe, which would be waited for, and whose bytes nobody has verified."""
    path = save(tmp_path, 1, tensors={})
    os.mkfifo(path / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: is none of its files"):
        load_checkpoint(path).tensors("optimizer")


def test_no_secret_reaches_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-12345")
    path = save(tmp_path, 1, documents={"run_config": {"env": {"url": "http://x?key=sk-canary-12345"}}})
    assert all(b"canary" not in file.read_bytes() for file in path.rglob("*") if file.is_file())


# ----------------------------------------------------------------------------------------------------------- round trip


def test_what_is_saved_is_loaded(tmp_path):
    documents = {"trainer_state": {"x": 0.1 + 0.2, "none": None, "list": [1, "é"]}, "curriculum": {}}
    tensors = {"optimizer": {"a": torch.randn(3, 4).T, "b": torch.tensor(7, dtype=torch.int64)}}
    path = save(tmp_path, 500, documents=documents, tensors=tensors, score=0.5)
    assert path == tmp_path / "checkpoint-000500"
    checkpoint = load_checkpoint(path)
    assert checkpoint.step == 500
    assert {name: checkpoint.json(name) for name in documents} == documents
    loaded = checkpoint.tensors("optimizer")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors["optimizer"].items())
    assert checkpoint.manifest["base"] == {"model": "tiny", "revision": "abc"}
    assert checkpoint.manifest["versions"]["torch"] == metadata.version("torch")  # torch.__version__ may add +cu130
    assert "bitsandbytes" in checkpoint.manifest["versions"], "whose kernels a 4-bit run's last digits depend on"
    assert "chat_templates/tool.jinja" in checkpoint.manifest["files"]
    assert not {"config.json", "manifest.json"} & set(checkpoint.manifest["files"])


def test_what_is_left_of_another_package_costs_no_run(tmp_path, monkeypatch):
    """A pip that was interrupted leaves a folder that names nothing; whatever was trained ended with a traceback."""
    (tmp_path / "another-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert utils.versions.__wrapped__() == utils.versions()


def test_the_same_state_gives_the_same_bytes(tmp_path):
    a, b = save(tmp_path / "a", 3), save(tmp_path / "b", 3)
    files = [p.relative_to(a) for p in a.rglob("*") if p.is_file()]
    assert [(a / f).read_bytes() for f in files] == [(b / f).read_bytes() for f in files]


def test_optimizer_goes_on_exactly(tmp_path):
    def model_and_optimizer():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95))

    def train(model, optimizer, steps):
        for i in steps:
            optimizer.zero_grad()
            model(torch.full((2, 4), float(i))).square().sum().backward()
            optimizer.step()

    model, optimizer = model_and_optimizer()
    parameters = [name for name, _ in model.named_parameters()]
    train(model, optimizer, range(3))
    tensors, rest = utils.pack_optimizer(optimizer, parameters)
    path = save(tmp_path, 3, documents={"trainer_state": rest}, tensors={"optimizer": tensors})
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, optimizer, range(3, 6))

    other, resumed = model_and_optimizer()
    other.load_state_dict(weights)
    checkpoint = load_checkpoint(path)
    loaded, rest = checkpoint.tensors("optimizer"), checkpoint.json("trainer_state")
    utils.unpack_optimizer(resumed, loaded, rest, parameters)
    assert utils.pack_optimizer(resumed, parameters)[0].keys() == tensors.keys()
    train(other, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(CheckpointError, match=r"other parameters than the model's: 1\.bias differs"):
        utils.unpack_optimizer(resumed, loaded, rest, parameters[:-1])


@pytest.mark.parametrize("value", [-1.0, float("inf")])
def test_moments_that_cannot_be_are_refused(value):
    """The root of a negative one would ruin the weights in the next step."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    tensors, rest = utils.pack_optimizer(optimizer, ["weight"])
    forged = tensors | {"exp_avg_sq/weight": torch.full((2,), value)}
    with pytest.raises(CheckpointError, match=r"^optimizer: ValueError: exp_avg_sq/weight is none of weight$"):
        utils.unpack_optimizer(optimizer, forged, rest, ["weight"])
    utils.unpack_optimizer(optimizer, tensors, rest, ["weight"])


def test_what_a_damaged_file_says_is_printable_in_the_message():
    with (
        pytest.raises(CheckpointError, match=r"^optimizer: ValueError: \\x1b\[2J differs$"),
        utils.naming("optimizer: "),
    ):
        raise ValueError("\x1b[2J\ndiffers")


# ------------------------------------------------------------------------------------------------------------ retention


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, score in [(1, 0.5), (2, 0.9), (3, None), (4, 0.9), (5, 0.1), (6, None)]:
        save(tmp_path, step, score=score, keep_last=2)
    assert names(tmp_path) == ["checkpoint-000004", "checkpoint-000005", "checkpoint-000006"]


def test_each_scale_has_a_best_of_its_own(tmp_path):
    """A stage and its success rate are no mean of an evaluation; checkpoints of before do not say which."""
    scored = [(1.7, "a"), (0.5, "b"), (0.9, "b"), (0.6, "b"), (0.95, "c"), (0.2, "b"), (10**400, "b")]
    for step, (score, scale) in enumerate(scored, 1):
        save(tmp_path, step, score=score, scale=scale, keep_last=0)
    save(tmp_path, 9, score=None, scale="b", keep_last=1)
    assert names(tmp_path) == [f"checkpoint-{step:06d}" for step in (1, 3, 5, 9)]
    manifest = json.loads((tmp_path / "checkpoint-000003" / "manifest.json").read_text())
    del manifest["scale"], manifest["digest"]
    (tmp_path / "checkpoint-000003" / "manifest.json").write_text(utils._seal(manifest))
    save(tmp_path, 10, score=0.3, scale="b", keep_last=1)
    assert names(tmp_path) == [f"checkpoint-{step:06d}" for step in (1, 3, 5, 10)]


def test_a_best_checkpoint_that_is_damaged_is_none(tmp_path):
    for step, score in [(1, 0.5), (2, 0.9)]:
        save(tmp_path, step, score=score)
    damage(tmp_path / "checkpoint-000002")
    for step in (3, 4):
        save(tmp_path, step, keep_last=1)
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000004"]


def test_without_a_limit_all_are_kept(tmp_path):
    for step in range(1, 5):
        save(tmp_path, step)
    assert len(names(tmp_path)) == 4


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    for step in range(1, 4):
        save(tmp_path, step)
    damage(tmp_path / "checkpoint-000003")
    save(tmp_path, 4, keep_last=2)
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-000004"
    assert verify_checkpoint(tmp_path / "checkpoint-000002") == []
    assert not (tmp_path / "checkpoint-000001").exists()


def test_what_is_written_may_be_read_by_whom_the_umask_lets(tmp_path):
    def fill(folder):
        (folder / "secret").touch(0o600)  # as safetensors writes

    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            utils.write_directory(tmp_path / "out", fill)
        finally:
            os.umask(before)
        assert (tmp_path / "out" / "secret").stat().st_mode & 0o777 == mode


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(utils, "_fsync", lambda path: events.append(path.name))
    monkeypatch.setattr(Path, "replace", lambda path, target: events.append(target.name))
    utils.write_file(tmp_path / "rows", b"1")
    assert events == [".tmp-rows", "rows"]


def test_writing_a_directory_leaves_what_others_have_beside_it(tmp_path):
    """Model makers and merges write where their users say: perhaps into a home folder."""
    others = [".tmp-drafts", ".old-notes", "notes", ".old-todo"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".tmp-mine").mkdir()
    utils.write_directory(tmp_path / "mine", lambda folder: (folder / "a").touch())
    assert names(tmp_path) == sorted([*others, "mine"])


def test_programs_that_write_one_folder_or_file_wait_for_each_other(tmp_path):
    """Two ``make train`` in a fresh clone both make the model; two evaluations may be given one file."""

    def write(text):
        def fill(folder):
            for name in "abcd":
                (folder / name).write_text(text)
                time.sleep(0.01)

        for _ in range(3):
            utils.write_directory(tmp_path / "new" / "model", fill)
            for _ in range(30):
                utils.write_file(tmp_path / "rows", text.encode())

    (tmp_path / "new").mkdir()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, ["one", "two"]))
    assert len({path.read_text() for path in (tmp_path / "new" / "model").iterdir()}) == 1
    assert names(tmp_path) == ["new", "rows"]
    assert names(tmp_path / "new") == ["model"]


def test_a_folder_that_somebody_else_has_locked_is_written_all_the_same(tmp_path, monkeypatch, caplog):
    """As under ``flock FOLDER python ...``, or beside a program that was stopped: it would wait for ever."""
    monkeypatch.setattr(utils, "PATIENCE", 0.2)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    started = time.monotonic()
    try:
        utils.write_file(tmp_path / "a", b"1")
    finally:
        os.close(held)
    assert (tmp_path / "a").read_bytes() == b"1"
    assert 0.2 <= time.monotonic() - started < 5
    assert caplog.messages == [f"{tmp_path}: another program has locked it; it is not waited for any longer"]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_the_last_verified_one_is_never_deleted(tmp_path, monkeypatch, keep_last):
    """The disk loses what it was given: each new checkpoint is damaged as soon as it is in place."""
    good = save(tmp_path, 1, score=0.1)
    write = utils.write_directory

    def write_badly(target, fill):
        path = write(target, fill)
        damage(path)
        return path

    monkeypatch.setattr(utils, "write_directory", write_badly)
    for step in range(2, 6):
        save(tmp_path, step, score=0.2, keep_last=keep_last)
    assert latest_checkpoint(tmp_path) == good
    assert len(names(tmp_path)) == 5  # nor are newer ones, damaged as they are: they may hold what can be rescued


def test_a_link_that_leads_nowhere_is_replaced(tmp_path):
    """Such as a player's folder that was moved to a disk which is gone: every resume failed at its end."""
    (tmp_path / "final").symlink_to(tmp_path / "gone")
    utils.write_directory(tmp_path / "final", lambda folder: (folder / "a").touch())
    assert (names(tmp_path), names(tmp_path / "final")) == (["final"], ["a"])


def test_a_deletion_that_is_cut_short_leaves_no_damaged_checkpoint_in_sight(tmp_path, monkeypatch, caplog):
    """The new checkpoint is whole: the run goes on, and may be resumed."""

    def give_up_halfway(path):
        (path / "trainer_state.json").unlink()
        raise OSError(5, "Input/output error")

    for step in (1, 2):
        save(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", give_up_halfway)
    utils._retain(tmp_path, keep_last=1, keep_best=0)
    assert [line for line in caplog.messages if "checkpoint-000001 cannot be deleted: Input/output error" in line]
    lock_run(tmp_path).close()
    monkeypatch.undo()
    lock_run(tmp_path).close()
    assert names(tmp_path) == [".lock", "checkpoint-000002"]


def test_a_checkpoint_that_cannot_even_be_renamed_costs_no_save(tmp_path, monkeypatch, caplog):
    """One that its owner made immutable, say; others are deleted all the same."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    rename = Path.rename

    def refuse(path, target):
        if path.name == "checkpoint-000002":
            raise PermissionError(1, "Operation not permitted")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    save(tmp_path, 4, keep_last=1, keep_best=0)
    assert [line for line in caplog.messages if "checkpoint-000002 cannot be deleted: Operation not permitted" in line]
    assert names(tmp_path) == ["checkpoint-000002", "checkpoint-000004"]


@pytest.mark.parametrize("broken", ["glob", "is_dir"])
def test_a_disk_that_fails_for_a_moment_costs_this_save_alone(tmp_path, monkeypatch, broken):
    """Wherever it fails: what is no CheckpointError would end the run without another try."""

    def fail(*args, **kwargs):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, broken, fail)
    write = partial(save, tmp_path, 1) if broken == "glob" else partial(utils.need_space, tmp_path, 1)
    with pytest.raises(utils.CheckpointError, match="Stale file handle"):
        write()


def test_a_disk_that_tells_no_size_is_not_full(tmp_path, monkeypatch):
    """Virtual ones say 0 of 0 bytes."""
    for total, full in ((0, False), (10**9, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, total=total: SimpleNamespace(total=total, free=0))
        with pytest.raises(utils.CheckpointError) if full else nullcontext():
            utils.need_space(tmp_path, 1)


def test_nothing_is_deleted_where_nothing_verifies(tmp_path):
    for step in (1, 2):
        damage(save(tmp_path, step))
    utils._retain(tmp_path, keep_last=1, keep_best=1)
    assert len(names(tmp_path)) == 2


def test_a_run_that_goes_on_from_an_earlier_step_sets_the_later_ones_aside(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "metrics.jsonl").write_text("first")
    for name in ("average", "final"):
        (tmp_path / name).mkdir()
    for name in ("episodes.jsonl", "summary.json"):
        (tmp_path / name).write_text("of step 3")
    abandon_after(tmp_path, 1)
    aside = [
        "abandoned-000002",
        "abandoned-000003",
        "abandoned-average",
        "abandoned-episodes.jsonl",
        "abandoned-final",
        "abandoned-metrics.jsonl",
        "abandoned-summary.json",
    ]
    assert names(tmp_path) == [*aside, "checkpoint-000001", "metrics.jsonl"]
    first = (tmp_path / "abandoned-000002" / "manifest.json").read_bytes()
    abandon_after(tmp_path, 1)
    assert names(tmp_path) == [*aside, "checkpoint-000001", "metrics.jsonl"], "nothing came after it"
    (tmp_path / "metrics.jsonl").write_text("second")
    save(tmp_path, 2)
    abandon_after(tmp_path, 1)
    assert {*names(tmp_path)} - {*aside} == {"abandoned-000002-2", "abandoned-metrics-2.jsonl", "checkpoint-000001",
                                             "metrics.jsonl"}  # fmt: skip
    assert (tmp_path / "abandoned-000002" / "manifest.json").read_bytes() == first, "the first is still there"
    assert [(tmp_path / f"{name}metrics{n}.jsonl").read_text() for name, n in
            (("abandoned-", ""), ("abandoned-", "-2"), ("", ""))] == ["first", "second", "second"]  # fmt: skip


def test_a_resume_that_is_refused_sets_nothing_aside_where_it_was_to_go_on(tmp_path):
    config = config_dict(load_config(SECTIONS, DEFAULT_FILES))
    saved = save(tmp_path / "run", 3, documents={"run_config": config})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("of a run without a checkpoint")
    config["ppo"]["gamma"] = 0.5
    with pytest.raises(ConfigError, match=r"ppo\.gamma: 1\.0 -> 0\.5"):
        find_checkpoint(tmp_path / "other", str(saved), config, force_config=False)
    assert names(tmp_path / "other") == ["metrics.jsonl"]
    assert find_checkpoint(tmp_path / "other", str(saved), config, force_config=True) == saved
    assert names(tmp_path / "other") == ["abandoned-metrics.jsonl"]


# --------------------------------------------------------------------------------------------------------------- layout


def test_importing_stays_light():
    heavy = "torch", "numpy", "wandb", "safetensors", "rich"
    ours = "utils, config.reader, training.process, training.metrics, training.console"
    code = f"import sys, {ours}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_link_that_cannot_be_removed_is_not_written_through(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / ".tmp-file").symlink_to(tmp_path / "mine")

    def refuse(path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(CheckpointError, match=r"file: .*File exists"):
        utils.write_file(tmp_path / "file", b"new")
    assert (tmp_path / "mine").read_text() == "precious"
