"""Two processes that train together: the same run as one process makes, one set of files, exact resume."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from saving import seal_again
from tiny import LEDUC, micro_config, micro_file
from tiny_runs import ADAPTIVE, ROOT, assert_same_run, copy_of, final_bytes, rows, train, undisturbed_run

import train_ppo
from env_wrapper import Task, play
from policy import load_policy
from training import ranks, state
from training.config import PPOConfig
from training.process import TrainingError, lock_run
from training.ranks import Ranks, SharedError
from training.state import Checkpointed
from utils import ConfigError

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train_ppo.py"]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def command(folder, *words):
    folder.mkdir(exist_ok=True)
    return [*LAUNCH, "--config", micro_file(folder, **ADAPTIVE), "--output-dir", str(folder / "run"), *words]


def run(folder, *words):
    done = subprocess.run(command(folder, *words), cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def parameters(folder, step):
    checkpoint = folder / "run" / f"checkpoint-{step:06d}"
    names = ("adapter_model", "value_head", "state_head")
    return {key: x for name in names for key, x in load_file(checkpoint / f"{name}.safetensors").items()}


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(tmp_path, monkeypatch):
    """The first update differs by rounding alone; later ones too, as long as no draw falls on the other side of it."""
    few = ("--set", "ppo.num_train_steps=4", "--set", "ppo.eval_games=2")
    printed = run(tmp_path / "two", *few)
    (tmp_path / "one").mkdir()
    assert train_ppo.main(command(tmp_path / "one", *few)[len(LAUNCH) :]) == 0
    assert printed.count("Step 1/4") == 1  # one of them speaks
    for step, tolerance in ((2, 1e-5), (4, 1e-3)):  # step 1 is the critic's alone
        one, two = (parameters(tmp_path / name, step) for name in ("one", "two"))
        assert max(float((one[name] - two[name]).abs().max()) for name in one) < tolerance
    pairs = list(zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True))
    assert len(pairs) == 4
    for one, two in pairs:
        assert {k: one[k] for k in ("stage", "games", "score_mean", "decisions", "opponents", "updates")} == {
            k: two[k] for k in ("stage", "games", "score_mean", "decisions", "opponents", "updates")}  # fmt: skip
        for name in (
            "policy_loss",
            "value_loss",
            "entropy",
            "approx_kl",
            "grad_norm",
            "ratio_max",
            "clip_fraction",
            "rehearsal_kl",
            "state_loss",
        ):
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_two_processes_resume_exactly_after_a_signal_to_both(tmp_path):
    run(tmp_path / "whole")
    with subprocess.Popen(command(tmp_path / "cut"), cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith("Step 3/"):
                process.send_signal(signal.SIGTERM)  # the launcher passes it on
                break
        assert process.wait(60) != 0
    left = len(rows(tmp_path / "cut"))
    assert 3 <= left < 6
    run(tmp_path / "cut", "--resume")
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    assert final_bytes(tmp_path / "cut") == final_bytes(tmp_path / "whole")


@pytest.mark.slow
def test_what_ends_the_first_process_ends_the_other(tmp_path):
    """A directory that is in use: only the first process looks, and the second does not wait for it for ever."""
    (tmp_path / "run").mkdir()
    started = time.monotonic()
    with lock_run(tmp_path / "run"):
        done = subprocess.run(command(tmp_path), cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stderr.count("in use by another run") == 1
    assert "process group" not in done.stderr.partition("torch.distributed.elastic")[0]
    assert "closed by peer" not in done.stderr
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("rank", [0, 1])
def test_what_all_processes_know_is_told_by_the_first_once_it_has_saved(tmp_path, rank):
    """An alarm that stops, say: the launcher ends the first one half a minute after another has gone."""
    waited = []

    class Place(Ranks):
        def alone(self, work):
            waited.append(self.rank)
            return "checkpoint-000007"

    def fail(stop):
        raise SharedError("alarm score_drop")

    state = SimpleNamespace(before=[1], step=7, row=None)
    trainer = SimpleNamespace(ppo=SimpleNamespace(num_train_steps=9), state=state, ranks=Place(rank, 2), step=fail,
                              midway=False, save_at_the_end=None, config=micro_config(tmp_path),
                              curriculum=SimpleNamespace(announcement=lambda kind: ""))  # fmt: skip
    with pytest.raises(SystemExit if rank else TrainingError) as ended:
        train_ppo.training_loop(trainer, None, SimpleNamespace(say=lambda line: None))
    assert waited == [rank]
    assert rank or str(ended.value) == "after step 7: alarm score_drop; checkpoint: checkpoint-000007"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_failed_in_another_process_is_in_the_log_and_holds_no_memory(monkeypatch, caplog, rank):
    held = []

    def work():
        big = torch.zeros(3)
        held.append(weakref.ref(big))
        raise ValueError("no such tile")

    place = Ranks(0, 2)
    found = [("", ""), ("process 1: ValueError: no such tile", "Traceback: in play")] if rank else None
    monkeypatch.setattr(place, "gather", lambda mine: found or [*mine, ("", "")])
    caplog.set_level(logging.DEBUG)
    with pytest.raises(SharedError, match=f"process {rank}: ValueError: no such tile") as error:
        place.together(list if rank else work)
    assert "in play" in caplog.text if rank else "in work" in caplog.text
    assert error.value is not None
    assert not any(ref() is not None for ref in held)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_score_that_fails_in_one_process_ends_all(monkeypatch, rank):
    place = Ranks(0, 2)
    found = [("", ""), ("process 1: no room", "")] if rank else None
    monkeypatch.setattr(place, "gather", lambda mine: found or [*mine, ("", "")])

    def fail(*args, **options):
        raise RuntimeError("no room")

    with pytest.raises(SharedError, match=f"process {rank}: no room"):
        place.score(SimpleNamespace(evaluate_decisions=fail), [] if rank else [SimpleNamespace(decisions=[])])


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_that_fails_in_one_process_ends_all(monkeypatch, rank):
    """Its memory runs out, say: else the first would tell of a connection that is gone, and of nothing else."""
    place = Ranks(0, 2)
    found = [("", ""), ("process 1: no room", "")] if rank else None
    monkeypatch.setattr(place, "gather", lambda mine: found or [*mine, ("", "")])

    def backward(*args):
        if not rank:
            raise RuntimeError("no room")
        return torch.zeros(()), {}

    monkeypatch.setattr(train_ppo, "_backward", backward)
    policy = SimpleNamespace(trainable=dict, forget=lambda: None, device=torch.device("cpu"))
    with pytest.raises(SharedError, match=f"process {rank}: no room"):
        train_ppo.ppo_update(policy, None, SimpleNamespace(games=[[0]]), PPOConfig(), (0,), ranks=place)


def test_what_the_first_process_made_reaches_all_and_where_it_failed_all_end(monkeypatch):
    sent = []
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda result: sent.append([*result]))
    assert Ranks(0, 2).alone(lambda: "made") == "made"
    with pytest.raises(OSError, match="disk"):
        Ranks(0, 2).alone(lambda: (_ for _ in ()).throw(OSError("disk")))
    of_the_first = iter(sent[:])
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda result: result.__setitem__(
        slice(None), next(of_the_first)))  # fmt: skip
    assert Ranks(1, 2).alone(lambda: pytest.fail("not its work")) == "made"
    with pytest.raises(SystemExit):
        Ranks(1, 2).alone(lambda: pytest.fail("not its work"))


def test_only_the_first_process_names_a_checkpoint_when_it_ends_by_itself():
    trainer = SimpleNamespace(ranks=Ranks(1, 2))
    assert Checkpointed.save_at_the_end(trainer) == "that of the first process"


@pytest.mark.parametrize(("limits", "least"), [((256, 128), 128), ((128, 256), 128), ((64, 64), 64)])
def test_all_compute_as_little_at_a_time_as_the_one_with_the_least_memory(monkeypatch, limits, least):
    for rank, own in enumerate(limits):
        place, policy = Ranks(rank, 2), SimpleNamespace(tokens_per_batch=own)
        monkeypatch.setattr(place, "gather", lambda mine: [-limit for limit in limits])
        Checkpointed.agree_on_batches(SimpleNamespace(ranks=place, policy=policy))
        assert policy.tokens_per_batch == least


def test_limits_are_agreed_on_before_games_and_before_a_checkpoint(tmp_path, monkeypatch):
    """The other process has room for 100 tokens at first, then for 80."""
    others, play_games, seen = iter([-100, -80]), train_ppo.play, []

    def largest(ranks, number):
        return max(number, next(others)) if number < 0 else number

    def noted(config, player, tasks):
        seen.append(player.policy.tokens_per_batch)
        return play_games(config, player, tasks)

    monkeypatch.setattr(Ranks, "largest", largest)
    monkeypatch.setattr(train_ppo, "play", noted)
    assert train(tmp_path, "--set", "ppo.num_train_steps=1") == 0
    assert seen == [100]
    saved = json.loads((tmp_path / "run" / "checkpoint-000001" / "trainer_state.json").read_text())
    assert saved["tokens_per_batch"] == 80


def test_all_have_read_a_checkpoint_before_anything_is_set_aside(tmp_path, monkeypatch):
    copy_of(undisturbed_run() / "run", tmp_path, 5)
    events, abandon = [], state.abandon_after
    monkeypatch.setattr(Ranks, "largest", lambda ranks, number: events.append("all are here") or number)
    monkeypatch.setattr(state, "abandon_after", lambda *args: events.append("set aside") or abandon(*args))
    assert train(tmp_path, "--resume", **ADAPTIVE) == 0
    assert events[:2] == ["all are here", "set aside"]


@pytest.mark.parametrize("rank", [0, 1])
def test_that_a_run_is_finished_is_said_once(tmp_path, capsys, rank):
    class Place(Ranks):
        def alone(self, work):
            return True

    assert train_ppo.train(micro_config(tmp_path, run={"output_dir": str(tmp_path)}), "run", ranks=Place(rank, 2)) == 0
    assert ("is finished" in capsys.readouterr().out) == (rank == 0)


LATE = """
import os, sys, time
from pathlib import Path
import train_ppo
from policy import Policy
load, found = Policy.load, Path(__file__).with_name("weights-" + os.environ["RANK"])
def late(self, path):
    load(self, path)
    if os.environ["RANK"] == "1":
        time.sleep(4)
Policy.load = late
state = train_ppo.Trainer.refuse_to_go_on
def told(self, row):
    total = sum(float(p.detach().double().sum()) for p in self.policy.trainable().values())
    with found.open("a") as file:  # the two processes' standard output is one pipe, where lines may be cut
        file.write(f"{total}\\n")
    return state(self, row)
train_ppo.Trainer.refuse_to_go_on = told
sys.exit(train_ppo.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("ruined", [False, True])
def test_the_first_process_replaces_a_checkpoint_once_all_have_read_it(tmp_path, ruined):
    """A resume with other settings writes it again, one whose weights are ruined is set aside."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    copy_of(undisturbed_run() / "run", tmp_path, 3)
    newest = tmp_path / "run" / "checkpoint-000003"
    if ruined:
        file = newest / "adapter_model.safetensors"
        save_file({k: x * torch.nan for k, x in load_file(file).items()}, file, metadata={"format": "pt"})
    else:  # an alarm has halved the rate, which another one ends
        file = newest / "trainer_state.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lr_scale": 0.5}))
    seal_again(file)
    words = command(tmp_path, "--resume", "--set", "ppo.learning_rate=0.005", "ppo.num_train_steps=4")
    words[words.index("train_ppo.py")] = str(script)
    done = subprocess.run(words, cwd=ROOT, env=ENV | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [(tmp_path / f"weights-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert len(set(found[0])) == (2 if ruined else 1)
    assert found[0] == found[1]
    assert (tmp_path / "run" / "abandoned-000003").exists() == ruined


FAILING = """
import os, sys
import train_ppo
play, calls = train_ppo.play, []
def failing(*args):
    calls.append(0)
    if len(calls) == 3 and os.environ["RANK"] == "%d":
        raise RuntimeError("no such tile")
    return play(*args)
train_ppo.play = failing
sys.exit(train_ppo.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_what_ends_one_process_s_games_ends_all_after_a_checkpoint(tmp_path, failing):
    """Whoever it is, the first process saves the last whole step and says what happened; nobody waits for ever."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING % failing)
    words = command(tmp_path, "--set", "ppo.eval_games=2", "--set", "ppo.save_freq=100")
    words[words.index("train_ppo.py")] = str(script)
    env = ENV | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("training failed: ")]
    saved = tmp_path / "run" / "checkpoint-000002"
    assert line == f"training failed: after step 2: process {failing}: no such tile; checkpoint: {saved}"
    assert parameters(tmp_path, 2)


SLOW = """
import sys, time
import train_ppo, utils
write = utils.write_directory
def slow(target, fill):
    if "000000" not in target.name:
        time.sleep(3)
    return write(target, fill)
utils.write_directory = slow
close = train_ppo.Loggers.close
def closing(self, code):
    time.sleep(3)
    close(self, code)
    print("closed", flush=True)
train_ppo.Loggers.close = closing
sys.exit(train_ppo.main())
"""


@pytest.mark.slow
def test_a_signal_to_the_first_process_alone_lets_it_save(tmp_path):
    """Its number stands in .lock. Once another process has gone, the launcher ends whoever is left."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    words = command(tmp_path, "--set", "ppo.save_freq=100", "ppo.num_train_steps=100")
    words[words.index("train_ppo.py")] = str(script)
    env = ENV | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith("Step 3/"):
                os.kill(int((tmp_path / "run" / ".lock").read_text()), signal.SIGTERM)
                break
        said = process.stdout.read() if process.stdout else ""
    assert "interrupted after step " in said
    assert said.count("closed") == 2
    step = int(said.partition("interrupted after step ")[2].partition(";")[0])
    assert parameters(tmp_path, step)


@pytest.mark.parametrize("found", [[1.0, math.nan], [math.nan, 1.0]])
def test_what_is_no_number_in_one_process_is_the_largest_in_all(monkeypatch, found):
    ranks = Ranks(0, 2)
    monkeypatch.setattr(ranks, "gather", lambda mine: found)
    assert math.isnan(ranks.largest(1.0))


def test_a_launcher_that_starts_one_process_only_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (Ranks.join("cpu").rank, Ranks.join("cpu").world) == (0, 1)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ConfigError, match="has started one process, not several: use torchrun"):
        Ranks.join("cpu")


@pytest.mark.parametrize("size", ["", "two", "2"])
def test_a_launchers_variable_that_makes_no_sense_is_told(monkeypatch, size):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE and its like"):
        Ranks.join("cpu")


def test_a_port_that_another_program_holds_is_told(monkeypatch):
    def join(**options):
        raise torch.distributed.DistNetworkError("The server socket has failed to listen\nport: 29500, EADDRINUSE")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(accelerate, "PartialState", join)
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE and its like.*failed to listen.*EADDRINUSE$") as error:
        Ranks.join("cpu")
    assert "\n" not in str(error.value)


def test_launchers_that_say_too_little_or_start_too_many_are_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(accelerate, "PartialState", lambda **options: SimpleNamespace(num_processes=1))
    with pytest.raises(ConfigError, match="LOCAL_RANK is missing"):
        Ranks.join("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 processes on 1 GPUs: --nproc_per_node at most as many"):
        Ranks.join("cuda")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_process_warns_for_all(monkeypatch, rank):
    joined = SimpleNamespace(process_index=rank, num_processes=2, is_main_process=not rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked = []
    monkeypatch.setattr(accelerate, "PartialState", lambda **options: asked.append(options) or joined)
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    assert Ranks.join("cpu").rank == rank
    assert logging.getLogger().level == (logging.ERROR if rank else logging.INFO)
    assert asked == [{"cpu": True, "timeout": ranks.PATIENCE}]  # the others wait while the first one evaluates


@pytest.mark.parametrize(("rank", "waits"), [("0", 0), ("1", 1)])
def test_a_mistake_in_a_command_is_told_by_the_first_unless_it_does_not_meet_it(monkeypatch, capsys, rank, waits):
    """Each of them reads the command, and launchers end the others once one has failed."""
    said = []
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(time, "sleep", lambda seconds: said.append(capsys.readouterr().err))
    assert train_ppo.main(["--set", "ppo.learning_rate=x"]) == 2
    assert said == [""] * waits
    assert capsys.readouterr().err.count("error: --set: ppo.learning_rate") == 1


def test_shares_are_put_together_in_their_order(monkeypatch):
    """Three processes, whose messages are handed over here."""
    items = list(range(8))
    shares = [Ranks(r, 3).share(items) for r in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]

    def all_gather_object(parts, mine):
        assert mine == shares[1]
        parts[:] = shares

    monkeypatch.setattr(ranks.torch.distributed, "all_gather_object", all_gather_object)
    assert Ranks(1, 3).gather(shares[1]) == items


def test_sums_reach_every_tensor_in_its_shape(monkeypatch):
    monkeypatch.setattr(ranks.torch.distributed, "all_reduce", lambda flat: flat.mul_(2))
    tensors = [torch.ones(2, 3), torch.tensor(5.0), torch.arange(4.0)]
    Ranks(0, 2).add_up(tensors)
    assert [t.tolist() for t in tensors] == [[[2, 2, 2], [2, 2, 2]], 10, [0, 2, 4, 6]]


def test_what_another_process_has_reached_moves_here_too_and_what_none_has_stays(monkeypatch):
    """A gradient of zero would not do: momentum would still move the weights, as it does not where one trains alone."""
    place = Ranks(0, 2)
    mine, theirs, nobodys = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    mine.grad, loss, sums = torch.ones(2), torch.tensor(1.0), {"decisions": 3.0, "ratio_max": 0.5}
    other = torch.tensor([0.0, 0, 5, 6, 0, 0, 0, 1, 0, 2, 4])  # gradients, which were reached, loss, decisions
    monkeypatch.setattr(ranks.torch.distributed, "all_reduce", lambda flat: flat.add_(other))
    monkeypatch.setattr(place, "gather", lambda mine: [*mine, 0.75])
    place.add_up_gradients([mine, theirs, nobodys], loss, sums)
    assert (mine.grad.tolist(), theirs.grad.tolist(), nobodys.grad) == ([1, 1], [5, 6], None)
    assert (float(loss), {name: float(x) for name, x in sums.items()}) == (3, {"decisions": 7, "ratio_max": 0.75})


def test_a_process_without_a_share_of_a_minibatch_adds_nothing(tmp_path):
    """More processes than sequences: the preset of the documents has minibatches of two."""
    config = micro_config(tmp_path)
    policy, tasks = load_policy(config), [Task(LEDUC, seed, "random", seed) for seed in range(2)]
    batch = train_ppo.collate(play(config.env, policy, tasks), policy, config.ppo, 0.0)
    for rank, share in ((0, True), (2, False)):
        loss, sums = train_ppo._backward(policy, batch, [0], config.ppo, Ranks(rank, 3))
        assert bool(float(loss)) == share
        assert float(sums["decisions"]) == pytest.approx(float(batch.weights_M[batch.spans[0]].sum()) / 3)
