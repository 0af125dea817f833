"""Run folders that a disk or a hand has changed: a resume goes on, or says why not in a line, and loses nothing.

``pytest tests/faults/test_damaged_runs.py -m slow -s`` prints how many were tried and how they ended.
"""

import json
import os
import random
import shutil
import time
from collections import Counter

import pytest
from hostile import VALUES
from saving import flip
from tiny_runs import (
    ADAPTIVE,
    STEPS,
    assert_same_run,
    copy_of,
    final_bytes,
    rows,
    summary,
    train,
    undisturbed_run,
)

import utils

LAST = 4  # the newest checkpoint of the folders
OWN = ("metrics.jsonl", "run_config.json", "run.log", ".lock", "about.json", "episodes.jsonl", "summary.json")


def truncated(path, rng):
    os.truncate(path, rng.choice((0, 1, path.stat().st_size // 2, path.stat().st_size - 1)))


def flipped(path, rng):
    data = path.read_bytes()
    path.write_bytes(flip(data, rng.randrange(8 * len(data))))


def missing(path, rng):
    path.unlink()


def another_kind(path, rng):
    path.unlink()
    make = rng.choice([os.mkfifo, os.mkdir, lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to("nowhere"),
                       lambda p: p.symlink_to(".")])  # fmt: skip
    make(path)


def another_type(path, rng):
    path.write_text(json.dumps(rng.choice([v for v in VALUES if v != 10**400])))


def spoiled(tree, rng):
    """The tree with a value replaced by another; the deeper ones as likely as the shallow."""
    places = []

    def walk(node):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(tree)
    node, key = rng.choice(places)
    if isinstance(node, dict) and rng.random() < 0.2:
        del node[key]
    else:
        node[key] = rng.choice([v for v in VALUES if v != 10**400 and v == v and v != float("inf")])
    return tree


def forged(path, rng):
    """Well-formed but for one value, and the manifest with it."""
    path.write_text(json.dumps(spoiled(json.loads(path.read_text()), rng)))
    file = path.parent / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest.pop("digest", None)
    if path != file and isinstance(manifest.get("files"), dict):
        manifest["files"][path.name] = utils.fingerprint(path)
    file.write_text(utils._seal(manifest))


KINDS = (truncated, flipped, missing, another_kind, another_type, forged)
FORGED = ("trainer_state.json", "curriculum.json", "run_config.json", "manifest.json", "adapter_config.json")


def damage(run, seed):
    """Damage one file of a run; what and how."""
    rng = random.Random(seed)
    kind, newest = KINDS[seed % len(KINDS)], run / f"checkpoint-{LAST:06d}"
    files = [newest / name for name in FORGED[: 4 + (seed % 7 == 0)]]
    if kind is not forged:
        files = [*newest.iterdir(), *(run / name for name in OWN)]
    file = rng.choice(sorted(files))
    kind(file, rng)
    return f"seed {seed}: {file.relative_to(run)} {kind.__name__}"


def row_of(line):
    """A line of metrics as a row; None: damaged."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def intact(run):
    """Every checkpoint that verifies, whatever it is called by now, and every row of metrics, wherever it stands."""
    found = {p.name.rpartition("-")[2] for p in run.glob("*-0*") if p.is_dir() and not utils.verify_checkpoint(p)}
    lines = [line for p in run.glob("*metrics*.jsonl") if p.is_file() for line in p.read_bytes().splitlines()]
    return found, {row["step"] for row in map(row_of, lines) if row}


@pytest.mark.slow
def test_no_damage_to_a_run_hangs_it_or_costs_what_is_sound(tmp_path, capsys):
    ends = Counter()
    for seed in range(300):
        folder = tmp_path / str(seed)
        folder.mkdir()
        copy_of(undisturbed_run() / "run", folder, LAST)
        run = folder / "run"
        for name in OWN[1:]:
            (run / name).write_text((undisturbed_run() / "run" / name).read_text())
        what, (checkpoints, steps) = damage(run, seed), intact(run)
        kept = steps.intersection(range(1, LAST))
        capsys.readouterr()
        started = time.monotonic()
        code = train(folder, "--resume", **ADAPTIVE)
        told = capsys.readouterr().err
        assert time.monotonic() - started < 30, what
        assert "Traceback" not in told, (what, told)
        ends[code] += 1
        if code:
            line = told.splitlines()[-1]
            assert line.startswith(("error: ", "training failed: ")), (what, line)
            assert line.isprintable(), (what, line)
            assert len(line) < 1500, (what, line)
        elif "metrics.jsonl" in what:  # what a row was before is known to nobody
            assert final_bytes(folder) == final_bytes(undisturbed_run()), what
            assert summary(folder) == summary(undisturbed_run()), what
        elif "forged" not in what:
            assert_same_run(folder, undisturbed_run())
        else:
            assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1)), what
        after = intact(run)
        assert checkpoints - {"000000"} <= after[0], what
        assert kept <= after[1], what
        shutil.rmtree(folder)
    print(f"\n{ends.total()} damaged run folders, exit codes {dict(ends)}; hangs, tracebacks, lost results: 0")
    assert ends[0] > 2
