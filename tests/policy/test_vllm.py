"""Rollouts through servers: the same prompts and decisions as in process, the right adapter, and every fault."""

import asyncio
import inspect
import itertools
import os
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from starlette.responses import JSONResponse, PlainTextResponse
from tiny import LEDUC, micro_config, tiny_policy
from tiny_runs import rows, summary, train
from vllm_stand_in import stand_in

import train_ppo
from env_wrapper import Decision, EnvConfig, Query, Task, play
from games import CONFIGS_PER_GAME, NAMES
from policy.chat import answer_trie
from policy.model import ModelConfig
from policy.vllm_player import FAULTS_AT_MOST, Engine, EngineError
from policy.vllm_server import Server, addresses, check_servers
from training import alarms
from training.config import PPOConfig
from training.process import StopSignal, TrainingError, lock_run
from training.ranks import Ranks
from training.state import Checkpointed
from training.trajectories import rollout_scores
from utils import ConfigError

TTT, HEX = NAMES.index("tic_tac_toe") * CONFIGS_PER_GAME, NAMES.index("hex_small") * CONFIGS_PER_GAME + 1
TASKS = [Task((TTT, LEDUC, HEX)[i % 3], seed=i, index=i) for i in range(9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def running(folder):
    with stand_in(micro_config(folder)) as server:
        yield server


@pytest.fixture
def server(running):
    """The stand-in, sound and with nothing but its base model."""
    yield running
    if not running.running:
        running.start()
    running.faulty = lambda path, body: None
    running.ends = [running.policy.chat.end_id]
    running.requests.clear()
    running.keys.clear()


@pytest.fixture(scope="module")
def policies(folder):
    """Answer mode -> a policy whose adapter is random."""
    return {mode: tiny_policy(folder, env={"answer_mode": mode}) for mode in ("constrained", "free")}


@pytest.fixture
def policy(policies):
    return policies["constrained"]


@contextmanager
def engine_of(policy, folder, *servers, version=0, **env):
    urls = [server.url for server in servers]
    engine = Engine(policy, EnvConfig(**{"vllm_base_url": urls, "env_timeout": 30.0} | env), folder)
    engine.publish(version)
    try:
        yield engine
    finally:
        engine.close()


def games(player, tasks=TASKS, history=0, mode="constrained"):
    return play(EnvConfig(prompt="compact", history_turns=history, answer_mode=mode), player, tasks)


def sequences(episodes):
    return [s for e in episodes for seat in sorted(e.sequences) for s in e.sequences[seat]]


def decisions(episodes):
    return [d for s in sequences(episodes) for d in s.decisions]


def calls(server, path):
    return [body for called, body in server.requests if called == path]


# -- what is played and recorded ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "history"), [("constrained", 0), ("constrained", "all"), ("free", "all")])
def test_greedy_answers_are_recorded_as_the_policy_records_its_own(policies, server, tmp_path, mode, history):
    policy = policies[mode]
    policy.greedy = True
    try:
        own = games(policy, history=history, mode=mode)
        with engine_of(policy, tmp_path, server) as engine:
            served = games(engine, history=history, mode=mode)
    finally:
        policy.greedy = False
    assert [e.info["history"] for e in served] == [e.info["history"] for e in own]
    for mine, theirs in zip(sequences(own), sequences(served), strict=True):
        assert (theirs.ids, theirs.shared) == (mine.ids, mine.shared)
        for a, b in zip(mine.decisions, theirs.decisions, strict=True):
            assert (b.start, b.stop, b.positions, b.chosen) == (a.start, a.stop, a.positions, a.chosen)
            assert b.allowed == a.allowed
            assert b.token_logprobs == pytest.approx(a.token_logprobs, abs=1e-4)


@pytest.mark.parametrize(("mode", "history"), [("constrained", 0), ("constrained", "all"), ("free", "all")])
def test_the_learner_finds_the_log_probabilities_the_server_told(policies, server, tmp_path, mode, history):
    with engine_of(policies[mode], tmp_path, server, version=7) as engine:
        episodes = games(engine, history=history, mode=mode)
        with torch.no_grad():
            read = policies[mode].evaluate_decisions(sequences(episodes))
        engine.check_age(sequences(episodes))
    told = torch.tensor([d.logprob for d in decisions(episodes)])
    assert len(told) > 9
    assert (told < -0.1).any()
    assert (read.logprobs - told).abs().max() < 1e-4
    assert {d.version for d in decisions(episodes)} == {7}


def test_an_answer_depends_on_its_question_and_the_runs_seed_alone(policy, server, tmp_path, monkeypatch):
    with engine_of(policy, tmp_path, server) as engine:
        together = [e.info["history"] for e in games(engine)]
        alone = [games(engine, [task])[0].info["history"] for task in TASKS]
        others = [e.info["history"] for e in games(engine, [replace(t, index=t.index + 50) for t in TASKS])]
        monkeypatch.setattr(policy, "seed", policy.seed + 1)
        of_another_run = [e.info["history"] for e in games(engine)]
    assert together == alone
    assert together not in (others, of_another_run)


def test_an_answer_among_choices_ends_as_the_learner_ends_it_though_the_model_has_other_ends(
    policy, server, tmp_path, monkeypatch
):
    """As Qwen's has: where the server's grammar knew both, half of the answers were thrown away and asked again."""
    monkeypatch.setattr(policy.chat, "ends", [policy.chat.end_id, 0])
    server.ends = policy.chat.ends
    with engine_of(policy, tmp_path, server) as engine:
        episodes = games(engine)
        assert not engine.servers[0].told
    with torch.no_grad():
        read = policy.evaluate_decisions(sequences(episodes))
    told = torch.tensor([d.logprob for d in decisions(episodes)])
    assert len(calls(server, "completions")) == len(told) > 9
    assert (read.logprobs - told).abs().max() < 1e-4


def test_requests_leave_nothing_to_a_models_own_sampling_defaults(policy, server, tmp_path, monkeypatch):
    monkeypatch.setattr(policy.chat, "ends", [policy.chat.end_id, 0])
    monkeypatch.setattr(policy, "temperature", 0.7)
    with engine_of(policy, tmp_path, server) as engine:
        games(engine, TASKS[:2])
    body = calls(server, "completions")[0]
    plain = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert body | plain == body
    assert all(isinstance(token, int) for token in body["prompt"])
    assert body["structured_outputs"]["choice"] == [str(a) for a in range(9)]
    assert "guided_choice" not in body
    assert body["stop_token_ids"] == [policy.chat.end_id, 0]


def test_earlier_selves_answer_in_process(policy, server, tmp_path):
    with engine_of(policy, tmp_path, server) as engine:
        said = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
        queries = [Query(n, 0, said, {1: "x", 2: "y"}, (n, 0, 0, 1), "base" if n % 2 else None) for n in range(6)]
        actions = engine.act(queries)
    assert [a.sequence.decisions[0].version for a in actions] == [0, None] * 3
    assert len(calls(server, "completions")) == 3


def test_what_no_longer_fits_ends_the_game(policy, server, tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "max_seq_length", 60)
    with engine_of(policy, tmp_path, server) as engine:
        own, served = games(policy, history="all"), games(engine, history="all")
    assert {e.outcome for e in served} == {e.outcome for e in own} == {"finished", "truncated"}


# -- adapters ----------------------------------------------------------------------------------------------------


def test_every_version_gets_a_name_of_its_own_and_the_old_one_goes(policy, server, tmp_path):
    with engine_of(policy, tmp_path, server) as engine:
        for version in (1, 2, 2, 3):
            engine.publish(version)
        loaded = calls(server, "load_lora_adapter")
        assert [body["lora_name"][:14] for body in loaded] == [f"policy-00000{v}-" for v in range(4)]
        assert not any("load_inplace" in body for body in loaded)
        assert list(server.adapters) == [loaded[-1]["lora_name"]]
        assert sorted(p.name for p in (tmp_path / "adapters").iterdir()) == [b["lora_name"] for b in loaded[-2:]]
    assert not server.adapters


def test_adapters_of_a_process_that_was_killed_go_and_those_of_other_runs_stay(policy, server, tmp_path):
    with engine_of(policy, tmp_path / "other", server) as other:
        killed = Engine(policy, other.env, tmp_path / "mine")
        killed.publish(0)
        assert len(server.adapters) == 2
        with engine_of(policy, tmp_path / "mine", server, version=7) as engine:
            assert list(server.adapters) == [other.name(0), engine.name(7)]
        killed._runner.close()


def test_what_else_lies_among_the_adapters_stays(policy, server, tmp_path):
    left, cut, mine = (tmp_path / "adapters" / n for n in ("policy-1000007-abcdef", ".tmp-policy-000008-abcde", "mine"))
    for folder in (left, cut, mine):
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").touch()
    with engine_of(policy, tmp_path, server):
        assert (left.exists(), cut.exists(), mine.exists()) == (False, False, True)
    assert (mine / "adapter_model.safetensors").exists()


def test_new_weights_play_after_they_are_published(policy, server, tmp_path):
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    with engine_of(policy, tmp_path, server) as engine:
        games(engine)
        with torch.no_grad():
            for parameter in policy.trainable().values():
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        policy.forget()
        try:
            engine.publish(1)
            episodes = games(engine)
            with torch.no_grad():
                read = policy.evaluate_decisions(sequences(episodes))
        finally:
            for name, p in policy.trainable().items():
                p.data.copy_(before[name])
            policy.forget()
    told = torch.tensor([d.logprob for d in decisions(episodes)])
    assert (read.logprobs - told).abs().max() < 1e-4
    assert {d.version for d in decisions(episodes)} == {1}


def refuse_second(path, body):
    """No adapter but the first is taken."""
    if path == "load_lora_adapter" and not body.get("lora_name", "policy-000000").startswith("policy-000000"):
        return JSONResponse({"error": {"message": "rank too great"}}, 400)
    return None


def test_rollouts_older_than_allowed_are_an_error(policy, server, tmp_path):
    server.faulty = refuse_second
    with engine_of(policy, tmp_path, server, env_timeout=3.0, max_staleness=1) as engine:
        engine.publish(1)
        episodes = games(engine, TASKS[:3])
        engine.check_age(sequences(episodes))
        assert {d.version for d in decisions(episodes)} == {0}
        engine.stale = 0  # as in an evaluation
        with pytest.raises(EngineError, match="rank too great"):
            games(engine, TASKS[:3])
        engine.env = replace(engine.env, max_staleness=0)
        with pytest.raises(EngineError, match="made by adapter 0, the current one is 1"):
            engine.check_age(sequences(episodes))


@pytest.mark.parametrize("trained_on", [True, False])
def test_evaluations_are_of_the_newest_weights(trained_on):
    config = SimpleNamespace(env=EnvConfig(max_staleness=3))
    engine = SimpleNamespace(publish=lambda step: None)
    run = SimpleNamespace(engine=engine, config=config, state=SimpleNamespace(step=5), ranks=Ranks())
    run.run_dir, run.lock = None, None
    Checkpointed.player(run, StopSignal(), trained_on)
    assert engine.stale == (3 if trained_on else 0)


def test_nothing_is_published_into_a_folder_that_was_moved(tmp_path):
    lock = lock_run(tmp_path / "run")
    config = SimpleNamespace(env=EnvConfig())
    run = SimpleNamespace(engine=SimpleNamespace(), config=config, ranks=Ranks(), run_dir=tmp_path / "run", lock=lock)
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(TrainingError, match="the run's folder was moved"):
        Checkpointed.player(run, StopSignal())


def test_a_server_started_anew_gets_the_adapter_again(policy, server, tmp_path):
    with engine_of(policy, tmp_path, server) as engine:
        server.stop()
        server.start()
        episodes = games(engine)
        assert list(server.adapters) == [engine.name(0)]
    assert {e.outcome for e in episodes} == {"finished"}


def test_load_is_spread_and_a_dead_server_is_left_out_and_tried_again(policy, server, folder, tmp_path):
    with stand_in(micro_config(folder)) as other, engine_of(policy, tmp_path, server, other) as engine:
        both = games(engine)
        shares = [len(calls(s, "completions")) for s in (server, other)]
        assert min(shares) > sum(shares) / 4
        other.stop()
        assert [e.info["history"] for e in games(engine)] == [e.info["history"] for e in both]
        assert engine.servers[1].out
        other.start()
        other.requests.clear()
        engine.servers[1].retry_at = 0.0
        games(engine)
        assert not engine.servers[1].out
        assert calls(other, "completions")


def test_a_server_that_misses_its_first_retry_is_tried_again(monkeypatch):
    server = Server("http://nowhere")
    answers = [(0, "refused"), (0, "refused"), (200, ""), (200, "")]

    async def call(path, body=None, seconds=0.0):
        return answers.pop(0)

    monkeypatch.setattr(server, "call", call)
    server.later("request failed")
    asyncio.run(server.load("one", Path("one"), 1, 1.0))
    assert server.out
    assert server.retry_at < time.monotonic() + 60
    asyncio.run(server.load("one", Path("one"), 1, 1.0))
    assert not server.out
    answers += [(0, "lost"), (200, {"data": [{"id": "two"}]}), (200, ""), (200, "")]  # on its way back: it is loaded
    asyncio.run(server.load("two", Path("two"), 2, 1.0))
    assert (server.out, server.version) == (False, 2)


# -- what a server must be able to do ----------------------------------------------------------------------------


def changed_answer(change):
    """The stand-in's answers with a change to each choice."""

    class Changed(JSONResponse):
        def render(self, content):
            for choice in content.get("choices", []):
                change(choice)
            return super().render(content)

    return Changed


def raw(choice):
    choice["logprobs"]["token_logprobs"] = [p - 2 for p in choice["logprobs"]["token_logprobs"]]


def no_route(path, body):
    return PlainTextResponse("Not Found", 404) if path == "load_lora_adapter" else None


@pytest.mark.parametrize(
    ("change", "lack"),
    [
        (lambda choice: choice.pop("token_ids"), "needs token ids (text would"),
        (lambda choice: choice.update(logprobs=None), "needs log-probabilities (answers"),
        (raw, "needs log-probabilities under temperature and constraint (start it with --logprobs-mode"),
        (lambda choice: choice.update(text="free text"), "needs structured output (illegal"),
    ],
)
def test_training_needs_what_the_probe_finds_missing(server, tmp_path, monkeypatch, change, lack):
    monkeypatch.setattr("vllm_stand_in.JSONResponse", changed_answer(change))
    config = served_config(tmp_path, server)
    with pytest.raises(ConfigError) as error:
        check_servers(config)
    assert f"env.vllm_base_url {server.url}: training through it {lack}" in str(error.value)


def test_training_refuses_a_server_that_loads_no_adapters(server, tmp_path):
    server.faulty = no_route
    with pytest.raises(ConfigError, match=r"needs loading adapters \(it would play with the base weights for ever"):
        check_servers(served_config(tmp_path, server))


def served_config(folder, server, **sections):
    return micro_config(folder, env={"use_vllm": True, "vllm_base_url": server.url}, **sections)


def test_a_sound_server_is_trained_through_by_one_process_only(server, tmp_path):
    config = served_config(tmp_path, server)
    check_servers(config)
    with pytest.raises(ConfigError, match="one process trains beside the servers"):
        check_servers(config, processes=2)


def test_a_server_whose_model_has_several_ends_is_sound(server, tmp_path):
    """It chooses among them after the only answer, so that the end has no log-probability of 0."""
    server.ends = [server.policy.chat.end_id, 0]
    check_servers(served_config(tmp_path, server))


def test_another_model_or_too_short_a_context_is_found_before_training(server, tmp_path, monkeypatch):
    config = served_config(tmp_path, server)
    other = SimpleNamespace(**vars(config) | {"model": ModelConfig(model_name="Qwen/Qwen3-4B")})
    with pytest.raises(ConfigError, match=r"it serves .*, not model.model_name Qwen/Qwen3-4B"):
        check_servers(other)
    monkeypatch.setattr(server, "max_model_len", 100)
    with pytest.raises(ConfigError, match=r"it takes 100 tokens, ppo\.max_seq_length is 256"):
        check_servers(config)


def test_a_chat_server_is_told_what_it_lacks_for_training(server, tmp_path):
    server.faulty = lambda path, body: PlainTextResponse("no", 404) if path != "models" else None
    with pytest.raises(ConfigError, match=r"needs an answer to /v1/completions \(HTTP 404: no\)") as error:
        check_servers(served_config(tmp_path, server))
    lacks = ["token ids (", "log-probabilities (", "structured output (", "loading adapters ("]
    assert [lack for lack in lacks if lack not in str(error.value)] == []


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://a/v1", "127.0.0.1:8000", "http://me:secret@host/v1", "http://h/v1?key=secret", "http://h:65536/v1"),
        *([], ["http://a"] * 2),
    ],
)
def test_addresses_hold_no_secrets_and_name_each_server_once(url):
    with pytest.raises(ConfigError, match=r"env\.vllm_base_url: an address like") as error:
        addresses(EnvConfig(vllm_base_url=url))
    assert "secret" not in str(error.value)


def test_keys_come_from_the_environment_and_stay_there(server, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-123")
    assert served_run(tmp_path, server, ppo={"num_train_steps": 1}) == 0
    assert server.keys == {"Bearer sk-very-secret-123"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not any(b"sk-very-secret-123" in path.read_bytes() for path in files)
    assert "sk-very-secret-123" not in caplog.text + "".join(capfd.readouterr())


# -- training ----------------------------------------------------------------------------------------------------


def served_run(folder, server, *args, env=None, **sections):
    env = {"use_vllm": True, "vllm_base_url": server.url, "env_timeout": 20.0} | (env or {})
    sections["ppo"] = {"num_train_steps": 2} | sections.get("ppo", {})
    return train(folder, *args, env=env, **sections)


def test_the_learner_weights_what_the_sampler_did_and_reads_its_own_values(policy, server, tmp_path):
    with engine_of(policy, tmp_path, server) as engine:
        episodes = games(engine)
    played = decisions(episodes)
    with torch.no_grad():
        read = policy.evaluate_decisions(sequences(episodes))
    gaps = (-3.0, 1.0)  # the learner is e^3 times as likely to choose so: cut at 2
    for sequence, gap in zip(sequences(episodes), gaps, strict=False):
        sequence.decisions[0] = replace(sequence.decisions[0], logprob=sequence.decisions[0].logprob + gap)
    batch = train_ppo.collate(episodes, policy, PPOConfig(recompute_logprobs=False), 0.0)
    assert batch.weights_M[0] == 2.0
    assert float(batch.weights_M[1]) == pytest.approx(2.71828**-1, abs=1e-3)
    assert batch.weights_M[2:].tolist() == pytest.approx([1.0] * (len(played) - 2), abs=1e-3)
    assert torch.equal(batch.old_logprobs_M, read.logprobs)
    assert torch.equal(batch.values_M, read.values)
    assert batch.summary()["logprob_gap_max"] == pytest.approx(3.0, abs=1e-3)


def test_forced_moves_hide_no_server_that_plays_another_model():
    forced = [Decision(version=1)] * 3
    asked = [Decision(positions=[4], chosen=[1], logprob=-1.0, version=1)] * 2
    learner = SimpleNamespace(logprobs=torch.tensor([0.0] * 3 + [-0.5] * 2), values=torch.zeros(5))
    ranks = SimpleNamespace(score=lambda *_, **__: learner)
    with pytest.raises(EngineError, match=r"sampled is 0\.50 nats from the learner"):
        rollout_scores([SimpleNamespace(decisions=forced + asked)], [], None, PPOConfig(), ranks)
    learner.logprobs = learner.values = torch.zeros(3)
    rollout_scores([SimpleNamespace(decisions=forced)], [], None, PPOConfig(), ranks)


@pytest.mark.parametrize("gap", [0.1, -0.3])
def test_servers_that_play_another_model_are_refused(policy, server, tmp_path, gap):
    with engine_of(policy, tmp_path, server) as engine:
        episodes = games(engine)
    for sequence in sequences(episodes):
        sequence.decisions[:] = [replace(d, logprob=d.logprob + gap) for d in sequence.decisions]
    if gap < 0:
        with pytest.raises(EngineError, match="nats from the learner in the median"):
            train_ppo.collate(episodes, policy, PPOConfig(), 0.0)
    else:
        train_ppo.collate(episodes, policy, PPOConfig(), 0.0)


def test_a_gap_between_sampler_and_learner_raises_the_alarm():
    row = {"entropy": 1.0, "score_mean": 0.5, "update_kl": 0.0, "explained_variance": 0.0, "grad_norm": 1.0,
           "updates": 1.0, "opponents": {"random": 8}, "games": 8, "truncated": 0, "failed": 0}  # fmt: skip
    memory: dict[str, float] = {}
    raised = [alarms.watch(row | {"logprob_gap_mean": 0.3}, memory) for _ in range(3)]
    assert [[a.name for a in r] for r in raised] == [[], [], ["logprob_gap"]]


@pytest.fixture
def played(monkeypatch):
    """Of each step that was played: the versions of the adapters that made its decisions."""
    steps = []
    check = Engine.check_age

    def note(engine, held):
        held = list(held)
        steps.append({d.version for s in held for d in s.decisions})
        check(engine, held)

    monkeypatch.setattr(Engine, "check_age", note)
    return steps


def test_each_step_is_played_by_the_weights_of_the_step_before(server, tmp_path, played):
    assert served_run(tmp_path, server, ppo={"num_train_steps": 3}) == 0
    assert played == [{0}, {1}, {2}]
    assert max(row["logprob_gap_max"] for row in rows(tmp_path)) < 1e-4
    assert not server.adapters
    assert served_run(tmp_path, server, "--resume", "--force-config", ppo={"num_train_steps": 4}) == 0
    assert played[3:] == [{3}]


GOOFSPIEL = NAMES.index("goofspiel_small") * CONFIGS_PER_GAME
LEARNING = {"num_train_steps": 80, "batch_size": 64, "mini_batch_size": 32, "learning_rate": 1e-2, "lr_final": 0.1,
            "init_kl_coef": 0.0, "save_freq": 1000, "eval_exact": "auto"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_through_a_server_learns_as_much_as_in_process(server, tmp_path, played, seed):
    (tmp_path / "own").mkdir()
    (tmp_path / "served").mkdir()
    settings: dict[str, dict[str, Any]] = {"ppo": LEARNING, "curriculum": {
        "stages": [{"name": "only", "games": [[GOOFSPIEL, GOOFSPIEL]]}], "failure_replay_prob": 0.0}}  # fmt: skip
    assert train(tmp_path / "own", "--seed", str(seed), **settings) == 0
    env = {"env_timeout": 60.0}
    assert served_run(tmp_path / "served", server, "--seed", str(seed), env=env, **settings) == 0
    gap = max(row["logprob_gap_max"] for row in rows(tmp_path / "served"))
    own, served = (summary(tmp_path / kind)["mean_share_of_ceiling"] for kind in ("own", "served"))
    assert played == [{step} for step in range(LEARNING["num_train_steps"])]
    assert gap < 1e-4
    assert own > 0.5
    assert served == pytest.approx(own, abs=0.05)


# -- faults ------------------------------------------------------------------------------------------------------


class Fault:
    """A response to some of the completions of training steps (evaluations ask first): which, and what."""

    def __init__(self, response, first=0, count=10**9, path="completions", adapter="policy-000001"):
        self.response, self.wanted, self.path, self.adapter = response, range(first, first + count), path, adapter
        self.seen = -1

    def __call__(self, path, body):
        name = (body or {}).get("model" if self.path == "completions" else "lora_name") or ""
        if path != self.path or not name.startswith(self.adapter):
            return None
        self.seen += 1
        if self.seen not in self.wanted:
            return None
        return self.response(body) if inspect.isfunction(self.response) else self.response


def error(status):
    return JSONResponse({"error": {"message": "something"}}, status)


def wrong_tokens(body, model=None):
    choice = {"index": 0, "text": "7", "token_ids": [5], "logprobs": {"token_logprobs": [0.0]}}
    return JSONResponse({"model": model or body["model"], "choices": [choice]})


PATIENCE = 3.0  # seconds until a run gives up
GARBAGE = PlainTextResponse("<html>")
FAULTS = {  # name -> (fault, exit code, what the last line holds)
    "429, twice": (Fault(error(429), count=2), 0, ""),
    "429, for ever": (Fault(error(429)), 1, "HTTP 429"),
    "500, thrice": (Fault(error(500), count=3), 0, ""),
    "500, for ever": (Fault(error(500)), 1, "HTTP 500"),
    "garbage, thrice": (Fault(GARBAGE, count=3), 0, ""),
    "garbage, for ever": (Fault(GARBAGE), 1, "not an answer with token ids"),
    "another model's answer, for ever": (Fault(wrong_tokens(None, "policy")), 1, "not an answer with token ids"),
    "tokens that were not asked for, thrice": (Fault(wrong_tokens, count=3), 0, ""),
    "tokens that were not asked for, for ever": (Fault(wrong_tokens), 1, "no legal answer: "),
    "slow, for ever": (Fault(5.0), 1, "no answer within"),
    "an adapter refused, for ever": (Fault(error(400), path="load_lora_adapter"), 1, "it does not load"),
    "an adapter refused, twice": (Fault(error(500), count=2, path="load_lora_adapter"), 0, ""),
}


RARE = ("500, for ever", "429, for ever", "429, twice", "garbage, for ever", "another model's answer, for ever",
        "tokens that were not asked for, thrice", "an adapter refused, twice",
        "an adapter refused, for ever", "tokens that were not asked for, for ever")  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in RARE)) for n in FAULTS])
def test_faults_in_training(server, tmp_path, capsys, name):
    fault, code, said = FAULTS[name]
    fault.seen, server.faulty = -1, fault
    patience = {"env_timeout": PATIENCE if code else 20.0}
    assert served_run(tmp_path, server, env=patience, ppo={"eval_games": 2}) == code
    last = capsys.readouterr().err.strip().splitlines()[-1:] if code else [""]
    assert said in last[0]
    steps = rows(tmp_path)
    assert [row["failed"] for row in steps] == [0] * len(steps)
    assert len(steps) == (1 if code else 2)
    if code:
        assert last[0].startswith("training failed: after step 1: ")
        assert server.url in last[0]
        assert "checkpoint-000001" in last[0]
        assert (tmp_path / "run" / "checkpoint-000001").is_dir()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_server_that_dies_in_a_rollout(server, tmp_path, capsys, comes_back, monkeypatch):
    real, deaths = Engine.act, []

    def act(engine, queries):
        if engine.version == 1 and not deaths:
            deaths.append(1)
            server.stop()
            if comes_back:
                server.start()
        return real(engine, queries)

    monkeypatch.setattr(Engine, "act", act)
    patience = {"env_timeout": 20.0 if comes_back else PATIENCE}
    assert served_run(tmp_path, server, env=patience, ppo={"eval_games": 2}) == (0 if comes_back else 1)
    if not comes_back:
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("training failed: after step 1: no answer after 3 s")
        assert server.url in last
        assert "checkpoint-000001" in last


def test_one_question_that_a_server_cannot_answer_fails_its_game_alone(policy, server, tmp_path, monkeypatch):
    monkeypatch.setattr("policy.vllm_player.FIRST_WAIT", 0.02)
    seen = []

    def poison(path, body):
        if path == "completions":
            seen.append(body["seed"])
            return error(500) if body["seed"] == seen[0] else None
        return None

    server.faulty = poison
    with engine_of(policy, tmp_path, server) as engine:
        engine.servers[0].pause = 0.02
        episodes = games(engine)
    failed = [e for e in episodes if e.outcome == "failed"]
    assert len(failed) == 1
    assert f"no answer after 5 tries: {server.url}: HTTP 500" in failed[0].info["error"]
    assert {e.outcome for e in episodes if e not in failed} == {"finished"}


@pytest.mark.parametrize(
    ("mode", "odd"),
    [
        ("constrained", {"prompt_token_ids": [1, 2]}),
        ("constrained", {"finish_reason": "abort"}),
        ("free", {"token_ids": [0, 10**6]}),  # which the model has no place for
        ("free", {"logprobs": {"token_logprobs": [-7.0, 0.5]}}),
    ],
)
def test_an_answer_to_another_question_or_one_that_was_given_up_is_asked_again(policies, server, mode, odd, tmp_path):
    """A proxy that gives one answer twice, or to the wrong caller: it is legal here, but nobody sampled it here."""
    policy, seen = policies[mode], []

    def another(path, body):
        if path != "completions":
            return None
        seen.append(body["seed"])
        tokens = [*policy.chat.encode("0"), policy.chat.end_id]
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": [-7.0, 0.0]}, **odd}
        return JSONResponse({"model": body["model"], "choices": [choice]}) if len(seen) == 1 else None

    server.faulty = another
    with engine_of(policy, tmp_path, server) as engine:
        [only] = games(engine, TASKS[:1], mode=mode)
    assert only.outcome == "finished" if mode == "constrained" else only.outcome != "failed"
    assert -7 not in decisions([only])[0].token_logprobs
    assert seen[0] != seen[1]


def test_a_bad_answer_is_asked_again_with_another_seed_and_what_was_lost_with_the_same(policy, server, tmp_path):
    """The same seed brings the same answer, and that one is wanted where it was lost on the way."""
    seen = []

    def spoilt(path, body):
        if path != "completions":
            return None
        seen.append(body["seed"])
        return {1: error(500), 2: wrong_tokens(body)}.get(len(seen))

    server.faulty = spoilt
    with engine_of(policy, tmp_path, server) as engine:
        [only] = games(engine, TASKS[:1])
    assert only.outcome == "finished"
    assert seen[0] == seen[1] != seen[2]


def test_what_is_wrong_with_answers_is_told_once(policy, server, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("policy.vllm_player.FIRST_WAIT", 0.02)
    ids = itertools.count()
    server.faulty = lambda path, body: JSONResponse({"id": next(ids)}) if path == "completions" else None
    with engine_of(policy, tmp_path, server) as engine:
        engine.servers[0].pause = 0.02
        with pytest.raises(EngineError, match="not an answer with token ids"):
            games(engine)
    assert next(ids) == FAULTS_AT_MOST * len(TASKS)
    [told] = caplog.messages
    assert told.startswith(f"{server.url}: not an answer with token ids and log-probabilities: ")


def test_a_server_that_fails_now_and_then_is_told_once_a_step(policy, server, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("policy.vllm_player.FIRST_WAIT", 0.02)
    monkeypatch.setattr("policy.vllm_server.FIRST_WAIT", 0.02)
    calls = itertools.count()
    server.faulty = lambda path, body: error(500) if path == "completions" and next(calls) % 3 == 1 else None
    with engine_of(policy, tmp_path, server) as engine:
        engine.servers[0].pause = 0.02
        for version in range(2):
            engine.publish(version)
            for task in TASKS[:2]:
                assert {e.outcome for e in games(engine, [task])} == {"finished"}
        assert engine.servers[0].pause == 0.02, "it has answered since"
    assert next(calls) > 12
    assert [told.partition(": {")[0] for told in caplog.messages] == [f"{server.url}: HTTP 500"] * 2


def test_a_question_waits_as_long_as_it_may_however_many_come_before_it(policy, server, tmp_path, monkeypatch):
    """Those that have to queue are asked when the time of the first is over. A second passes with each look at it."""
    monkeypatch.setattr("policy.vllm_player.CALLS_AT_ONCE", 1)
    monkeypatch.setattr("policy.vllm_player.time", SimpleNamespace(monotonic=itertools.count().__next__))
    said = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with engine_of(policy, tmp_path, server) as engine:
        actions = engine.act([Query(n, 0, said, {1: "x", 2: "y"}, (n, 0, 0, 1)) for n in range(15)])
    assert [action.error for action in actions] == [""] * 15


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_more_often_than_a_broken_one(policy, server, tmp_path, monkeypatch, status):
    monkeypatch.setattr("policy.vllm_player.FIRST_WAIT", 0.02)
    seen = []

    def busy(path, body):
        if path == "completions":
            seen.append(body["seed"])
            return error(status) if body["seed"] == seen[0] and seen.count(seen[0]) <= FAULTS_AT_MOST + 1 else None
        return None

    server.faulty = busy
    with engine_of(policy, tmp_path, server) as engine:
        engine.servers[0].pause = 0.02
        episodes = games(engine, TASKS[:3])
    assert seen.count(seen[0]) == FAULTS_AT_MOST + 2
    assert {e.outcome for e in episodes} == {"finished"}


def test_a_server_that_is_down_or_refuses_the_first_adapter_is_bad_usage(server, tmp_path, capsys):
    server.faulty = Fault(error(400), path="load_lora_adapter", adapter="policy-000000")
    assert served_run(tmp_path, server) == 2
    assert f"error: env.vllm_base_url {server.url}: it does not load" in capsys.readouterr().err
    server.stop()
    assert served_run(tmp_path, server) == 2
    assert f"error: env.vllm_base_url {server.url}: no connection: " in capsys.readouterr().err


def test_connections_are_closed_before_the_server_does_it(policy, server, tmp_path, monkeypatch):
    """A server that closes one just as a question is sent would be left out, though nothing is wrong with it."""
    task = [Task(TTT, seed=0, index=0)]
    with engine_of(policy, tmp_path, server) as engine:
        server.peers.clear()
        games(engine, task)
        assert len(set(server.peers)) == 1
        time.sleep(0.2)
        games(engine, task)
        assert len(set(server.peers)) == 1
    monkeypatch.setattr("envs.client.KEEPALIVE_SECONDS", 0.1)
    with engine_of(policy, tmp_path, server) as engine:
        server.peers.clear()
        games(engine, task)
        time.sleep(0.2)
        games(engine, task)
        assert len(set(server.peers)) > 1


@pytest.mark.parametrize("silent", ["everything", pytest.param("load_lora_adapter", marks=pytest.mark.slow)])
def test_a_silent_server_holds_nobody_up_after_its_first_failure(policy, server, folder, tmp_path, silent):
    """Neither the next weights nor the games: they are played by the other, while it is asked to load them."""
    with (
        stand_in(micro_config(folder)) as other,
        engine_of(policy, tmp_path, server, other, env_timeout=9.0) as engine,
    ):
        other.faulty = lambda path, _: 20.0 if silent in ("everything", path) else None
        engine.publish(1)  # a third of the time that the settings give, once
        assert engine.servers[1].out
        for version, pause in ((2, 0.0), (3, 60.0)):
            engine.servers[1].retry_at = time.monotonic() + pause
            started = time.monotonic()
            if pause:
                engine.publish(version)
            assert {e.outcome for e in games(engine)} == {"finished"}
            assert time.monotonic() - started < 2.9
            assert engine.servers[0].version == engine.version
        other.faulty = lambda path, _: None
        engine.servers[1].retry_at = 0.0
        patience = time.monotonic() + 10
        while engine.servers[1].out and time.monotonic() < patience:  # it loads the weights while games are played
            games(engine)
            time.sleep(0.2)
        assert not engine.servers[1].out


def test_a_signal_ends_the_wait_for_a_server_that_loads_for_ever(policy, server, tmp_path):
    with engine_of(policy, tmp_path, server, env_timeout=60.0) as engine:
        server.faulty = lambda path, _: 20.0 if path == "load_lora_adapter" else None
        asked = time.monotonic()
        engine.stop = lambda: time.monotonic() > asked + 0.2
        with pytest.raises(train_ppo.InterruptedRolloutError):
            engine.publish(1)
        assert time.monotonic() - asked < 5
        server.faulty = lambda path, _: None


def test_a_signal_ends_the_wait_for_a_dead_server(policy, server, tmp_path):
    stop = SimpleNamespace(received=0)
    with engine_of(policy, tmp_path, server, env_timeout=60.0) as engine:
        engine.stop = lambda: stop.received
        server.stop()
        stop.received = 15
        with pytest.raises(train_ppo.InterruptedRolloutError):
            games(engine)


def test_a_signal_ends_a_long_pause(policy, server, tmp_path, monkeypatch):
    monkeypatch.setattr("policy.vllm_player.FIRST_WAIT", 30.0)
    with engine_of(policy, tmp_path, server, env_timeout=60.0) as engine:
        asked = time.monotonic()
        engine.stop = lambda: time.monotonic() > asked + 0.5
        server.faulty = lambda path, _: error(429) if path == "completions" else None
        with pytest.raises(train_ppo.InterruptedRolloutError):
            games(engine)
        assert time.monotonic() - asked < 10


def test_a_signal_ends_the_wait_for_a_silent_server(policy, server, tmp_path, monkeypatch):
    cancelled = []

    async def exchange(*_):
        try:
            await asyncio.sleep(50)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with engine_of(policy, tmp_path, server, env_timeout=60.0) as engine:
        asked = time.monotonic()
        engine.stop = lambda: time.monotonic() > asked + 0.2
        with monkeypatch.context() as silent:
            silent.setattr("policy.vllm_server.exchange", exchange)
            with pytest.raises(train_ppo.InterruptedRolloutError):
                games(engine)
        assert time.monotonic() - asked < 10
    assert cancelled


def start_server(folder, *words, **settings):
    """What scripts/serve_vllm.sh says and ends with, where vLLM would only say how it was called."""
    (folder / "vllm").write_text('#!/bin/sh\necho "$@"\n')
    (folder / "vllm").chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | settings
    script = Path(train_ppo.__file__).parent / "scripts" / "serve_vllm.sh"
    return subprocess.run(["bash", script, *words], capture_output=True, text=True, env=env)


@pytest.mark.parametrize(("rank", "taken"), [("4", "8"), ("16", "16"), ("20", "32"), ("300", "320")])
def test_the_server_is_started_with_the_learners_bits_a_rank_that_it_takes_and_a_share(tmp_path, rank, taken):
    done = start_server(tmp_path, "Qwen/Qwen3-4B", "--x", LORA_RANK=rank, BITS="4", SHARE="0.4")
    assert done.returncode == 0
    assert done.stdout.startswith("serve Qwen/Qwen3-4B ")
    assert f"--max-lora-rank {taken} " in done.stdout
    assert "--gpu-memory-utilization 0.4 " in done.stdout
    assert done.stdout.endswith("--quantization bitsandbytes --load-format bitsandbytes --x\n")
    # Whoever reaches the port can have adapters loaded; probabilities are those that answers are drawn with.
    for words in ("--host 127.0.0.1 ", "--enable-lora ", "--logprobs-mode processed_logprobs ",
                  "--generation-config vllm "):  # fmt: skip
        assert words in done.stdout


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"BITS": "8"}, "BITS=8: expected 4 or 16"),
        ({"LORA_RANK": "1000"}, "LORA_RANK=1000: expected 1 to 512"),
        ({"LORA_RANK": "four"}, "LORA_RANK=four: expected 1 to 512"),
    ],
)
def test_a_server_of_another_kind_is_not_started(tmp_path, settings, told):
    done = start_server(tmp_path, "Qwen/Qwen3-4B", **settings)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"serve_vllm: {told}\n")


@pytest.mark.parametrize("words", [[], [""], ["--port", "8001"]])
def test_a_server_whose_model_is_not_named_is_not_started(tmp_path, words):
    """vLLM would serve its own default model."""
    done = start_server(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("serve_vllm: usage: ")


def test_a_legal_answer_is_completed_where_one_way_is_left_and_nothing_else_is_taken(new_policy):
    chat, trie = new_policy().chat, answer_trie((3, 12, 17))
    ids, other = chat.answer_ids, max(chat.answer_ids.values()) + 1
    first, second = [ids[c] for c in "13"], [ids[c] for c in "27"]
    for said, text, choices in ("3", "3", {0: first}), ("3.", "3", {0: first}), ("12", "12", {0: first, 1: second}):
        found, allowed = chat.legal_answer(trie, [ids[c] for c in said])
        assert (found, {i: sorted(a) for i, a in allowed.items()}) == (text, {i: sorted(a) for i, a in choices.items()})
    for tokens in [[], *([ids[c] for c in said] for said in ("1", "4", "3.7", "3..", ".", "123", "12.3."))]:
        with pytest.raises(ValueError, match="no legal answer"):
            chat.legal_answer(trie, tokens)
    with pytest.raises(ValueError, match=f"<{other}>"):
        chat.legal_answer(trie, [ids["1"], other])
