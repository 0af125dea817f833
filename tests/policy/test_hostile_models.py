"""Model servers that misbehave in generated ways: vLLM's, as training uses them, and chat servers, as evaluation does.

Each use of one ends in time: in an answer that was asked for, or in one line that names the server. A misbehaviour that
passes costs no answer. ``pytest tests/policy/test_hostile_models.py -s`` prints how many were tried.
"""

import time
from collections import Counter
from types import SimpleNamespace

import pytest
from hostile import SECONDS, WIRES, HostileServer, answers, changed, lies, some_of
from tiny import tiny_policy

from env_wrapper import EnvConfig, Query
from envs import client
from evaluation.players import ChatPlayer
from policy.vllm_player import Engine, EngineError
from policy.vllm_server import check_servers
from training.process import ProgramError
from utils import ConfigError

CARD, CHOICE = "data.0", "choices.0"
SAMPLED = [f"{CHOICE}.token_ids", f"{CHOICE}.logprobs.token_logprobs"]
USES = {  # of a server: what it is asked for -> the fields of the true answer
    "models": ["data", CARD, *(f"{CARD}.{name}" for name in ("id", "root", "max_model_len"))],
    "completions": ["model", "choices", CHOICE, f"{CHOICE}.text", f"{CHOICE}.logprobs", *SAMPLED],
    "load_lora_adapter": ["message"],
    "chat/completions": ["choices", CHOICE, f"{CHOICE}.message", f"{CHOICE}.message.content"],
}
SAMPLES = {
    "more tokens than asked for": lambda v: v * 3000,
    "one token more": lambda v: v + v[-1:],
    "none": lambda v: [],
    "backwards": lambda v: v[::-1],
    "negative": lambda v: [-x - 1 for x in v],
    "floats": lambda v: [float(x) + 0.5 for x in v],
    "as text": lambda v: [str(x) for x in v],
    "as truths": lambda v: [False for _ in v],
    "beyond all": lambda v: [-(10**400) for _ in v],
    "beyond what is told": lambda v: [-1e308 for _ in v],
    "nobody's": lambda v: [10**9 for _ in v],
    "nested": lambda v: [[x] for x in v],
    "as an object": lambda v: {str(x): x for x in v},
}


def sampled(change, *fields):
    return answers(lambda a: [a := changed(a, f, lambda v: change(v) if v else None) for f in fields][-1])


MISBEHAVIOURS = {
    use: {
        **WIRES,
        **lies(fields),
        **({f"{n} {len(f)}": sampled(s, *f) for n, s in SAMPLES.items() for f in (SAMPLED, SAMPLED[:1], SAMPLED[1:])}
           if use == "completions" else {}),
    }
    for use, fields in USES.items()
}  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("hostile"))


class Server(HostileServer):
    """A vLLM server, and a chat server, whose model always plays the first action; misbehaves from its first call."""

    def __init__(self, policy, act, use, calls=10**9):
        self.policy, self.use, self.left, self.misbehaviour = policy, use, calls, act
        super().__init__(act, self.say, self.misbehaves)
        self.url += "/v1"

    def misbehaves(self, path, asked):
        probed = path == "/v1/load_lora_adapter" and asked == {}  # without a name, which sound servers refuse
        mine = path == f"/v1/{self.use}" and not probed
        self.left -= mine
        self.act = WIRES["HTTP 400"] if probed else self.misbehaviour
        return probed or (mine and self.left >= 0)

    def say(self, path, asked):
        chat = self.policy.chat
        if path.endswith("chat/completions"):
            return {"choices": [{"index": 0, "message": {"role": "assistant", "content": "1"}}]}
        if path.endswith("completions"):
            word = asked.get("structured_outputs", {"choice": ["1"]})["choice"][0]
            tokens = [*chat.encode(word), chat.end_id]
            logprobs = {"token_logprobs": [0.0] * len(tokens)}
            return {"model": asked["model"], "choices": [{"text": word, "token_ids": tokens, "logprobs": logprobs}]}
        name = self.policy.config.model_name
        return {"data": [{"id": name, "root": name, "max_model_len": 4096}], "message": "done"}


def use_it(server, policy, folder, mode, seconds=1.5 * SECONDS):
    """All that training, or an evaluation, does with a server; what was answered."""
    said = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    queries = [Query(n, 0, said, {1: "x", 20: "y"}, (n, 0, 0, 1)) for n in range(2)]
    if server.use == "chat/completions":
        return [action.text for action in ChatPlayer(server.url, "m", 1.0, 4, 0).act(queries)]
    env = EnvConfig(vllm_base_url=server.url, env_timeout=seconds, answer_mode=mode)
    if server.use == "models":  # else it has been found out before
        check_servers(SimpleNamespace(env=env, model=policy.config, ppo=SimpleNamespace(max_seq_length=256)))
    policy.constrained = mode == "constrained"
    engine = Engine(policy, env, folder)
    try:
        engine.servers[0].pause = 0.02
        engine.publish(0)
        actions = engine.act(queries)
    finally:
        engine.close()
        policy.constrained = True
    for action in actions:
        if action.error:
            raise EngineError(action.error)
        assert len(action.token_ids) <= policy.max_new_tokens
        assert -1e6 < action.logprob <= 1e-2
    return [action.text for action in actions]


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_misbehaviour_is_believed_or_waited_for(policy, tmp_path, monkeypatch, many):
    for name in ("envs.client.FIRST_WAIT", "policy.vllm_server.FIRST_WAIT", "policy.vllm_player.FIRST_WAIT"):
        monkeypatch.setattr(name, 0.01)
    monkeypatch.setattr("policy.vllm_server.LONGEST_WAIT", 0.1)
    monkeypatch.setattr("evaluation.players.ANSWER_SECONDS", SECONDS)
    assert sum(map(len, MISBEHAVIOURS.values())) >= 60
    ends = Counter()
    for use, misbehaviours in MISBEHAVIOURS.items():
        places = [(calls, mode) for calls in (1, 10**9) for mode in ("constrained", "free")]
        for name, (calls, mode) in some_of(misbehaviours, places, 250 if many else 6):
            server, what = Server(policy, misbehaviours[name], use, calls), (use, name, calls, mode)
            start = time.monotonic()
            try:
                believed = calls == 1 and name not in WIRES  # asked again, it answers
                texts = use_it(server, policy, tmp_path, mode, (12 if believed else 1.5) * SECONDS)
                assert mode == "free" or use == "chat/completions" or set(texts) <= {"1", "20"}, what
                ends["answered"] += 1
            except (ConfigError, EngineError, ProgramError) as error:
                line = str(error)
                assert server.url in line, (what, line)
                assert line.isprintable(), (what, line)
                assert len(line) < 700, (what, line)
                ends["refused"] += 1
                assert not (believed and use in ("completions", "load_lora_adapter")), (what, line)
            finally:
                server.listener.close()
            assert time.monotonic() - start < 5 * SECONDS + 2.5, what  # and that for a busy machine
    print(f"\n{sum(map(len, MISBEHAVIOURS.values()))} misbehaviours, {ends.total()} uses: {dict(ends)}")
    assert min(ends["answered"], ends["refused"]) > 5


@pytest.mark.parametrize("key", ["sk-\n", "sk-é", "sk-\x01", "sk-of-me ", " "])
def test_a_key_that_no_header_can_hold_is_told_without_it(policy, tmp_path, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY: a key is printable ASCII"):
        use_it(Server(policy, WIRES["nothing"], "completions", 0), policy, tmp_path, "free")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        ChatPlayer("http://127.0.0.1:9/v1", "m", 1.0, 4, 0)


@pytest.mark.parametrize("before", [0, 150, 190, 1590])
def test_a_key_that_a_server_repeats_is_not_told_in_part(policy, tmp_path, monkeypatch, before):
    """What a server says is cut to a line, which could cut the key: the rest of it would pass for no secret."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-person-who-pays")
    status, text = 401, " " * (before - before % 200) + "x" * (before % 200) + "Bearer sk-of-a-person-who-pays"
    for problem in (client.problem_of(status, text), client.problem_of(status, {"error": text})):
        assert "sk-" not in problem
        assert problem.startswith("HTTP 401: ")


@pytest.mark.parametrize("url", ["http://a..b/v1", "http://127.0.0.1:99999/v1", "http://[::1/v1", "http://\u2028/v1"])
def test_an_address_that_is_none_is_told_in_one_line(url):
    status, problem = client.HttpClient(url).post("x", {}, time.monotonic() + SECONDS)
    assert status in (client.NOT_SENT, client.NO_ANSWER)
    assert client.one_line(problem)


def test_where_a_server_redirects_to_is_told(policy):
    """As from http to https; "HTTP 307: " and nothing more does not say what to do."""
    server = Server(policy, WIRES["a redirect"], "models")
    with pytest.raises(ConfigError, match=r"HTTP 307: it redirects to http://127\.0\.0\.1:1/, to be named instead$"):
        use_it(server, policy, None, "free")
    assert client.HttpClient(server.url).call("models", {}, SECONDS, lambda _: False)[0] == 307
