"""A run without a network, broken off, gone on with and uploaded: W&B's own program reads what it wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving import http_server
from test_survival import arguments, process
from tiny_runs import rows

FAILS = """
steps, real, train_ppo.show = iter(range(99)), train_ppo.Trainer.without_failed, lambda *_: None
def fails_in_the_fourth_step(self, episodes):
    if next(steps) == 3:
        raise OSError("no space")
    return real(self, episodes)
train_ppo.Trainer.without_failed = fails_in_the_fourth_step"""


class Server:
    """As much of W&B's server as `wandb sync` asks for."""

    def __init__(self):
        self.history, self.runs = [], []

    def __call__(self, path, request, headers):
        project = {"id": "p", "name": "chat-games-ppo", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "b", "name": "r", "config": "{}", "summaryMetrics": "{}", "eventsTail": "[]",
                  "project": project, "historyLineCount": len(self.history),
                  "historyTail": json.dumps(self.history[-1:]), "wandbConfig": '{"t": 1}',
                  "eventsLineCount": 0, "logLineCount": 0}  # fmt: skip
        if sent := request.get("files", {}).get("wandb-history.jsonl"):
            self.history[sent["offset"] :] = sent["content"]
        if request.get("operationName") == "RunResumeStatus":
            self.runs.append(request["variables"]["name"])
        known = {"RunResumeStatus": {"model": project | {"bucket": bucket if self.history else None}},
                 "UpsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": not self.history}},
                 "ServerFeaturesQuery": {"serverInfo": {"features": []}},
                 "CreateRunFiles": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}}  # fmt: skip
        return 200, json.dumps({"data": known.get(request.get("operationName"), {})})


@pytest.mark.slow
def test_an_offline_run_that_failed_goes_on_as_one_run_with_every_row_once(tmp_path):
    pytest.importorskip("wandb")
    settings = {"ppo": {"num_train_steps": 4, "save_freq": 2}, "run": {"logger": "wandb"}}
    failed = process(FAILS, *arguments(tmp_path, **settings), env={"WANDB_MODE": "offline"})
    assert failed.stderr.splitlines()[-1] == "training failed: no space"
    assert (tmp_path / "run" / "wandb_id").read_text().split()[1] == "3"  # the checkpoint is of the second
    on = process("train_ppo.show = lambda *_: None", "--resume", str(tmp_path / "run"), env={"WANDB_MODE": "offline"})
    assert on.returncode == 0, on.stderr
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    server = Server()
    with http_server(server) as url:
        command = [Path(sys.executable).parent / "wandb", "sync", "--yes", *folders]
        keys = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "WANDB_ERROR_REPORTING": "false"}
        sent = subprocess.run(command, env=os.environ | keys, capture_output=True, text=True, timeout=60)
    assert sent.returncode == 0, sent.stderr
    assert len(folders) == len(server.runs) == 2
    assert {folder.name.rpartition("-")[2] for folder in folders} == set(server.runs)
    found = [json.loads(row) for row in server.history]
    assert [row["_step"] for row in found] == [1, 2, 3, 4]
    assert [row["score_mean"] for row in found] == [row["score_mean"] for row in rows(tmp_path)]
