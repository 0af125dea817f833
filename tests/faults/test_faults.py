"""Checkpoints under every fault that a disk, a kill or a bad hand can cause."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from saving import damages, flip, names, save

import utils
from training.metrics import MetricsLog
from training.process import lock_run, log_into
from utils import CheckpointError, latest_checkpoint, load_checkpoint, verify_checkpoint

ROOT = Path(__file__).parents[2]


# --------------------------------------------------------------------------------------------------------------- damage


def test_every_damage_to_every_file_is_found_and_the_older_checkpoint_used(tmp_path, caplog):
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    files = [path for path in sorted(newer.rglob("*")) if path.is_file()]
    assert len(files) == 6
    for file in files:
        data = file.read_bytes()
        for damaged in damages(data):
            file.write_bytes(damaged)
            caplog.clear()
            assert latest_checkpoint(tmp_path) == older
            assert [r.levelname for r in caplog.records] == ["WARNING"]
            assert file.name in caplog.text
            with pytest.raises(CheckpointError, match=file.name):
                load_checkpoint(newer)
        file.write_bytes(data)
    assert latest_checkpoint(tmp_path) == newer


def test_every_byte_of_the_manifest_counts(tmp_path):
    path = save(tmp_path, 1)
    data = (path / "manifest.json").read_bytes()
    for at in range(len(data)):
        (path / "manifest.json").write_bytes(flip(data, 8 * at + at % 8))
        assert verify_checkpoint(path), f"byte {at}"


def test_missing_files_and_strange_names_are_passed_over_with_a_warning_each(tmp_path, caplog):
    good = save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").unlink()
    (save(tmp_path, 3) / "trainer_state.json").unlink()
    for junk in ("checkpoint-abc", "checkpoint-7", "checkpoint-000009", "step_abc", ".tmp-checkpoint-000008"):
        (tmp_path / junk).mkdir()
    (tmp_path / "checkpoint-000010").write_text("a file")
    assert latest_checkpoint(tmp_path) == good
    save(tmp_path, 4)  # which looks through the folder, too
    lines = sorted(record.getMessage().removeprefix(f"{tmp_path}/") for record in caplog.records)
    assert lines == [
        "checkpoint-000002 is skipped: manifest.json: No such file or directory",
        "checkpoint-000003 is skipped: trainer_state.json: missing",
        "checkpoint-000009 is skipped: manifest.json: No such file or directory",
        "checkpoint-000010 is skipped: manifest.json: Not a directory",
        "checkpoint-7 is skipped: not a checkpoint's name",
        "checkpoint-abc is skipped: not a checkpoint's name",
    ]


def test_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match=r"manifest\.json: No such file"):
        load_checkpoint(tmp_path)


def reseal(path, change):
    """Alter a manifest as somebody would who knows how it is sealed."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["digest"]
    change(manifest)
    (path / "manifest.json").write_text(utils._seal(manifest))


def test_other_schema_is_refused_with_the_reason(tmp_path):
    path = save(tmp_path, 1)
    reseal(path, lambda manifest: manifest.update(schema=2))
    assert verify_checkpoint(path) == ["manifest.json: schema 2, but this program reads 1"]


@pytest.mark.parametrize("step", ["1", True, 1.0])
def test_a_step_that_is_no_number_is_damage(tmp_path, step):
    path = save(tmp_path, 1)
    reseal(path, lambda manifest: manifest.update(step=step))
    assert verify_checkpoint(path) == ["manifest.json: damaged"]


def test_files_without_end_are_damage(tmp_path):
    path, more = save(tmp_path, 1), {f"{n}": {"size": 0, "sha256": ""} for n in range(utils.MOST_FILES)}
    reseal(path, lambda manifest: manifest["files"].update(more))
    assert verify_checkpoint(path) == ["manifest.json: damaged"]


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/hostname", "a/../../outside.txt", "link", "\0", "x" * 5000])
@pytest.mark.parametrize("where", ["run", "snapshots"])
def test_names_that_lead_out_of_the_checkpoint_are_refused(tmp_path, name, where):
    """In ``snapshots``, as the Hub's cache has them, links may lead to what lies beside it; names may not."""
    tmp_path = tmp_path / "outer" / where
    tmp_path.mkdir(parents=True)
    path = save(tmp_path, 1)
    (tmp_path / "outside.txt").write_text("private")
    (tmp_path.parents[1] / "outside.txt").write_text("private")
    (path / "link").symlink_to(tmp_path.parents[1] / "outside.txt")
    entry = utils.fingerprint(tmp_path / "outside.txt")
    reseal(path, lambda manifest: manifest["files"].update({name: entry}))
    (problem,) = verify_checkpoint(path)
    assert "leads out of the checkpoint" in problem or "unreadable" in problem


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path):
    path = save(tmp_path, 1)
    (path / "trainer_state.json").unlink()
    os.mkfifo(path / "trainer_state.json")
    assert verify_checkpoint(path) == ["trainer_state.json: missing"]


def pipe(path):
    os.mkfifo(path)


def zeros(path):
    path.symlink_to("/dev/zero")


def huge(path):
    path.touch()
    os.truncate(path, 2**43)


ENDLESS = [pipe, zeros, pytest.param(huge, marks=pytest.mark.slow), Path.mkdir]


def test_a_file_of_holes_that_a_forged_manifest_names_is_not_hashed(tmp_path):
    """A few kilobytes of an archive may hold a file of terabytes."""
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    manifest = json.loads((newer / "manifest.json").read_text())
    huge(newer / "x.bin")
    manifest["files"]["x.bin"] = {"size": 2**43, "sha256": "0" * 64}
    del manifest["digest"]
    (newer / "manifest.json").write_text(utils._seal(manifest))
    assert verify_checkpoint(newer) == [
        f"x.bin: unreadable: {newer / 'x.bin'}: of its 8,796,093,022,208 bytes most are holes"
    ]
    assert latest_checkpoint(tmp_path) == older
    small = tmp_path / "small"
    small.touch()
    os.truncate(small, 2**20)
    assert utils.fingerprint(small)["size"] == 2**20, "weights may be zeros, on a disk that packs them"


@pytest.mark.parametrize("make", ENDLESS)
def test_what_has_no_end_is_not_read(tmp_path, make, caplog):
    """In place of a manifest, of a file that it names, of metrics, of a file of settings or of a lock."""
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    for name in ("adapter_model.safetensors", "manifest.json"):
        (newer / name).unlink()
        make(newer / name)
        assert latest_checkpoint(tmp_path) == older
    for name in ("metrics.jsonl", "run_config.json", ".lock"):
        make(tmp_path / name)
    reads = [lambda: MetricsLog(tmp_path / "metrics.jsonl").truncate_to(1), lambda: lock_run(tmp_path),
             lambda: utils.read_json(tmp_path / "run_config.json")]  # fmt: skip
    for read in reads[: 2 if make is not huge else 1] + reads[2:]:
        with pytest.raises(utils.ConfigError, match=r"cannot be (read|written)"):
            read()
    make(tmp_path / "run.log")
    before = logging.getLogger().handlers[:]
    log_into(tmp_path)
    logging.getLogger("a run").warning("goes on")
    logging.getLogger().handlers[:] = before


def test_a_lock_that_is_a_link_leaves_the_file_it_leads_to_alone(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(utils.ConfigError, match="cannot be written"):
        lock_run(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize(
    "text", ["[]", "{}", "null", '{"files": []}', '{"files": {"a": 3}, "schema": 1, "step": 1}', "[" * 10**5, "\udcff"]
)
def test_any_manifest_is_read_without_harm(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    assert verify_checkpoint(tmp_path) == ["manifest.json: damaged"]


def test_a_malicious_pickle_is_never_executed(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    path = save(tmp_path, 1)
    torch.save(Payload(), path / "optimizer.safetensors")
    reseal(
        path, lambda m: m["files"].update({"optimizer.safetensors": utils.fingerprint(path / "optimizer.safetensors")})
    )
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: SafetensorError"):
        load_checkpoint(path).tensors("optimizer")
    assert not (tmp_path / "executed").exists()


# --------------------------------------------------------------------------------------------------------- failed saves


def poison(_folder):
    raise RuntimeError("cannot\nserialise")


POISONED: dict[str, dict] = {
    "adapter and tokenizer: RuntimeError: cannot serialise": {"write": poison},
    "trainer_state.json: TypeError": {"documents": {"trainer_state": {"x": object()}}},
    "curriculum.json: ValueError": {"documents": {"curriculum": {"x": float("nan")}}},
    "optimizer.safetensors: ": {"tensors": {"optimizer": {"x": "not a tensor"}}},
    "manifest.json: TypeError": {"base": {"model": object()}},
}


@pytest.mark.parametrize("message", POISONED)
@pytest.mark.parametrize("step", [2, 1], ids=["new", "replacing"])
def test_poison_leaves_everything_as_it_was(tmp_path, message, step):
    old = save(tmp_path, 1)
    before = (old / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError) as error:
        save(tmp_path, step, **POISONED[message])
    assert f"checkpoint-{step:06d}: {message}" in str(error.value)
    assert "\n" not in str(error.value)
    assert names(tmp_path) == ["checkpoint-000001"]
    assert (old / "manifest.json").read_bytes() == before
    assert verify_checkpoint(old) == []


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors"])
def test_a_full_disk_leaves_everything_as_it_was_and_names_the_file(tmp_path, file):
    """A limit on the size of files stands for the full disk: the write fails in the system, in the middle."""
    old = save(tmp_path, 1)
    large = {"tensors": {"optimizer": {"x": torch.zeros(1 << 20)}}} if file.startswith("optimizer") else {}
    limit = (1 << 16) if large else 512
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"checkpoint-000002: (optimizer\.safetensors|adapter and tokenizer): "
        ):
            save(tmp_path, 2, **large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == ["checkpoint-000001"]
    assert verify_checkpoint(old) == []


def test_a_failing_fsync_names_the_file(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"adapter_model\.safetensors: OSError: .*No space left on device"
    ) as error:
        save(tmp_path, 1)
    assert isinstance(error.value.__cause__, OSError)
    assert names(tmp_path) == []


def test_every_file_and_folder_is_synced_before_the_rename_and_the_parent_after(tmp_path, monkeypatch):
    events = []
    fsync, rename = utils._fsync, Path.rename

    def noted_fsync(path):
        events.append(path.name)
        fsync(path)

    def noted_rename(path, target):
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(utils, "_fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    path = save(tmp_path, 1)
    everything = {p.name for p in path.rglob("*")} | {".tmp-checkpoint-000001"}
    assert set(events[: events.index("rename")]) == everything
    assert events[events.index("rename") + 1 :] == [tmp_path.name]


# ----------------------------------------------------------------------------------------------------------------- kill

# Saves checkpoint after checkpoint, every second one twice, and dies of SIGKILL at the N-th visit to the file system.
CHILD = """
    import os, pathlib, signal, sys
    import utils

    run_dir, deadly = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    visits = 0

    def counted(function):
        def visit(*args, **options):
            global visits
            visits += 1
            if visits == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)
        return visit

    for owner, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "rmdir"), (os, "unlink"), (os, "open")):
        setattr(owner, name, counted(getattr(os, name)))
    pathlib.Path.write_text = counted(pathlib.Path.write_text)

    def write(folder):
        (folder / "adapter_model.safetensors").write_text("x" * 100_000)

    utils.sweep(run_dir, "*")
    start = utils.latest_checkpoint(run_dir)
    first = utils.load_checkpoint(start).step + 1 if start else 1
    for step in range(first, first + 4):
        for _ in range(1 + step % 2):
            utils.save_checkpoint(run_dir, step, write, documents={"trainer_state": {"step": step}}, tensors={},
                                  keep_last=2, keep_best=0)
"""


def run_child(run_dir, deadly):
    script = run_dir.parent / "child.py"
    script.write_text(textwrap.dedent(CHILD))
    command = [sys.executable, str(script), str(run_dir), str(deadly)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60).returncode


def check_survival(run_dir, reached):
    """After a kill: the newest checkpoint verifies, is not older than one seen before, and nothing else is needed."""
    utils.sweep(run_dir, "*")
    path = latest_checkpoint(run_dir)
    step = load_checkpoint(path).json("trainer_state")["step"] if path else 0
    assert not [name for name in names(run_dir) if name.startswith(".")]
    assert step >= reached
    return step


@pytest.mark.slow
def test_kill_at_any_visit_to_the_file_system(tmp_path, caplog):
    run_dir, reached, deaths = tmp_path / "run", 0, 0
    run_dir.mkdir()
    for deadly in range(1, 180, 6):
        deaths += run_child(run_dir, deadly) == -signal.SIGKILL
        reached = check_survival(run_dir, reached)
    assert deaths >= 20
    assert reached >= 20
    assert "skipped" not in caplog.text  # no half-written or half-deleted checkpoint was ever in sight


def test_kill_between_the_two_renames_of_a_replacement(tmp_path, monkeypatch):
    path = save(tmp_path, 1)
    path.rename(tmp_path / ".old-checkpoint-000001")
    (tmp_path / ".tmp-checkpoint-000001").mkdir()
    utils.sweep(tmp_path, "*")
    assert latest_checkpoint(tmp_path) == path
    assert names(tmp_path) == ["checkpoint-000001"]


@pytest.mark.slow
def test_kill_at_every_visit_to_the_file_system(tmp_path):
    for deadly in range(1, 400):
        run_dir = tmp_path / f"run{deadly}" / "run"
        run_dir.mkdir(parents=True)
        assert run_child(run_dir, 10**9) == 0
        reached = check_survival(run_dir, 4)
        if run_child(run_dir, deadly) == 0:
            break
        check_survival(run_dir, reached)
    assert 50 < deadly < 399
