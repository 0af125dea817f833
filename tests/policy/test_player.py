"""The player against brute force: the library's whole forward pass, one sequence at a time, in float64 afterwards."""

import copy
import itertools
import json
import math
import os
import resource
import shutil
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from env_wrapper import EnvConfig, Query, Sequence, Task, play
from games import CONFIGS_PER_GAME, NAMES
from policy import player as playing
from policy.network import CUTS, SHARED_PREFIX_MIN, Read, run_trunk
from policy.player import AHEAD
from policy.tree import Row, grow
from utils import ConfigError

TOLERANCE: dict[str, Any] = {"atol": 1e-5, "rtol": 0}


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def policy(request, new_policy):
    return new_policy(request.param, ppo={"max_seq_length": 4096})


@pytest.fixture
def qwen2(new_policy):
    """One that a test may change."""
    return new_policy()


class Recorder:
    """Passes questions on to a policy, and keeps them and the answers."""

    def __init__(self, policy):
        self.policy, self.log = policy, []

    def act(self, queries):
        actions = self.policy.act(queries)
        self.log += zip(queries, actions, strict=True)
        return actions

    def release(self, episodes):
        self.policy.release(episodes)


def tasks_of(*names, each=2, config=0):
    ids = [NAMES.index(name) * CONFIGS_PER_GAME + config for name in names]
    return [Task(task_id, seed=i, index=i) for i, task_id in enumerate(ids * each)]


def sequences_of(episodes):
    return [s for e in episodes for seat in sorted(e.sequences) for s in e.sequences[seat]]


def talk(*contents):
    roles = itertools.chain(["system"], itertools.cycle(["user", "assistant"]))
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def ask(conversation, legal, key=(0, 0, 0, 1), episode=0, adapter=None, continues=False):
    names = {action: f"move {action}" for action in legal}
    return Query(episode, key[1], conversation, names, key, adapter, continues)


RULES = "a long system message, the same for all who play this game " * 4
MIXED = [
    ask(talk(RULES, f"state {i % 3} {'x' * (i % 4)}"), [3, 12, 17, 120], (i, 0, 0, 1), episode=i) for i in range(9)
]
MIXED += [ask(talk("short", "state 5"), [0, 1, 2], (9, 0, 0, 1), episode=9)]


def brute_force(policy, sequence):
    """Per decision: log-probability, entropy, value, log legal mass."""
    with torch.no_grad():
        out = policy.peft_model(torch.tensor([sequence.ids]), output_hidden_states=True)
        values = policy.value_head(out.hidden_states[-1][0])[:, 0].tolist()
    logits = out.logits[0].double()
    rows = []
    for d in sequence.decisions:
        logprob = entropy = mass = 0.0
        allowed_at = d.allowed or [None] * len(d.positions)
        choices = dict(zip(d.positions, zip(d.chosen, allowed_at, strict=True), strict=True))
        for p in range(d.start - 1, d.stop - 1):
            token, allowed = choices.get(p, (sequence.ids[p + 1], [sequence.ids[p + 1]]))
            assert token == sequence.ids[p + 1]
            mass += float((logits[p] / policy.temperature).softmax(-1)[allowed].sum().log()) if allowed else 0.0
            if p in choices:
                columns = list(range(logits.shape[1])) if allowed is None else allowed
                logp = (logits[p, columns] / policy.temperature).log_softmax(-1)
                logprob += float(logp[columns.index(token)])
                entropy -= float((logp.exp() * logp).sum())
        rows.append((logprob, entropy, values[d.start - 1], mass))
    return rows


def check_scores(policy, sequences):
    """What was noted while sampling, what the update computes and brute force agree."""
    scores = policy.evaluate_decisions(sequences)
    decisions = [d for s in sequences for d in s.decisions]
    expected = torch.tensor([row for s in sequences for row in brute_force(policy, s)])
    assert_close(torch.tensor([d.logprob for d in decisions]), expected[:, 0], **TOLERANCE)
    assert_close(torch.tensor([d.value for d in decisions]), expected[:, 2], **TOLERANCE)
    for found, column in zip((scores.logprobs, scores.entropies, scores.values), expected.T, strict=False):
        assert_close(found.detach(), column, **TOLERANCE)
    for d in decisions:
        assert math.isclose(sum(d.token_logprobs), d.logprob, abs_tol=1e-12)
    return expected


# --------------------------------------------------------------------------------------------- sampling and scoring


@pytest.mark.parametrize("history", ["all", 1, 0])
def test_noted_log_probabilities_are_those_of_the_update(policy, history):
    """Real games with full prompts, cached from turn to turn, against the update's own forward pass."""
    player = Recorder(policy)
    tasks = tasks_of("leduc_poker", "liars_dice_small", "tic_tac_toe", "hex_small")
    episodes = play(EnvConfig(history_turns=history), player, tasks)
    sequences = sequences_of(episodes)
    decisions = sum(sum(e.info["n_decisions"].values()) for e in episodes)
    assert len(sequences) == (8 if history == "all" else decisions if history == 0 else len(sequences)) < decisions + 1
    assert min(s.shared for s in sequences) >= SHARED_PREFIX_MIN
    check_scores(policy, sequences)
    for query, action in player.log:
        prompt, shared = policy.chat.first_prompt(query.conversation)
        decision = next(d for d in action.sequence.decisions if d.start == len(prompt))
        assert action.sequence.ids[: decision.stop] == prompt + action.token_ids
        assert action.sequence.shared == shared
        assert int(action.text) in query.legal
    assert not policy.conversations._held, "finished episodes leave nothing behind"


@pytest.mark.parametrize(("name", "config"), [("liars_dice", 0), ("hex", 1)])
def test_ids_of_several_digits(policy, name, config):
    episodes = play(EnvConfig(prompt="compact", history_turns=0), policy, tasks_of(name, config=config))
    sequences = sequences_of(episodes)
    decisions = [d for s in sequences for d in s.decisions]
    assert any(len(d.positions) > 1 for d in decisions)
    check_scores(policy, sequences)
    assert all(e.info["retries"] == 0 for e in episodes)


def test_what_is_scored_twice_is_equal_to_the_bit(policy):
    sequences = sequences_of(play(EnvConfig(), policy, tasks_of("leduc_poker", "tic_tac_toe")))
    first = policy.evaluate_decisions(sequences)
    with torch.no_grad():
        again = policy.evaluate_decisions(sequences)
    assert first.logprobs.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("legal", [[0, 1, 2], [3, 12, 17, 120, 121, 2]])
def test_answers_are_drawn_as_action_probs_says(new_policy, legal, temperature):
    policy = new_policy(ppo={"temperature": temperature})
    queries = [ask(talk(RULES, "state"), legal, (i, 0, 0, 1)) for i in range(4000)]
    [probs] = policy.action_probs(queries[:1])
    assert sum(probs.values()) == pytest.approx(1)
    assert set(probs) == set(legal)
    actions = policy.act(queries)
    counts = {action: sum(a.text == str(action) for a in actions) for action in legal}
    assert sum(counts.values()) == 4000, "only legal ids"
    chi_square = sum((counts[a] - 4000 * p) ** 2 / (4000 * p) for a, p in probs.items())
    assert chi_square < {2: 13.8, 5: 20.5}[len(legal) - 1], "p < 0.001"
    for action in actions[:50]:
        assert action.logprob == pytest.approx(math.log(probs[int(action.text)]), abs=1e-5)


@pytest.mark.parametrize(("u", "answer"), [(0.0, "12"), (1 - 2**-53, "30")])
def test_the_ends_of_the_unit_interval_are_legal_too(qwen2, monkeypatch, u, answer):
    monkeypatch.setattr("policy.player.uniform", lambda *key: u)
    assert qwen2.act([ask(talk("s", "u"), [12, 13, 20, 30])])[0].text == answer


def test_action_probs_answers_each_query_even_the_same_one_twice(qwen2):
    query, forced = MIXED[0], ask(talk("s", "u"), [7])
    alone = qwen2.action_probs([query])[0]
    for probs in qwen2.action_probs([query, forced, query])[::2]:
        assert probs == pytest.approx(alone, abs=1e-6)
    assert qwen2.action_probs([forced]) == [{7: 1.0}]


def test_greedy_takes_the_likeliest_token_each_time(qwen2):
    qwen2.greedy = True
    actions = qwen2.act([ask(talk(RULES, "state"), [0, 1, 2], (i, 0, 0, 1)) for i in range(20)])
    [probs] = qwen2.action_probs([ask(talk(RULES, "state"), [0, 1, 2])])
    assert {a.text for a in actions} == {str(max(probs, key=probs.get))}


def rows_run(policy):
    """How many rows each batch through the first layer had."""
    rows = []
    policy.trunk.rotary_emb.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    return rows


def test_identical_questions_are_computed_once_and_answered_independently(qwen2):
    rows = rows_run(qwen2)
    same = talk("short", "state")
    asked = [ask(same, [3, 12, 17, 120], (i % 50, 0, 0, 1), i) for i in range(100)]
    actions = qwen2.act(asked)
    assert rows[0] == 1
    assert max(rows) <= 3, "as many as there are beginnings of answers"
    assert len({a.text for a in actions}) > 1
    assert [a.text for a in actions[:50]] == [a.text for a in actions[50:]], "the key decides"
    assert len({id(a.sequence) for a in actions}) == 100
    qwen2.seed += 1
    assert [a.text for a in qwen2.act(asked)] != [a.text for a in actions], "and the run's seed"


def test_the_system_message_is_read_once_for_all(qwen2):
    lengths = []
    qwen2.trunk.rotary_emb.register_forward_pre_hook(lambda m, x: lengths.append(x[0].shape[1]))
    qwen2.act(MIXED)
    shared = qwen2.chat.first_prompt(MIXED[0].conversation)[1]
    assert shared > SHARED_PREFIX_MIN
    assert lengths[0] == shared
    assert max(lengths[1:]) < shared
    before = len(lengths)
    qwen2.act(MIXED)
    assert shared not in lengths[before:]


# ------------------------------------------------------------------------------------------------ batch composition


def test_answers_do_not_depend_on_who_else_is_asked(qwen2):
    together = qwen2.act(MIXED)
    backwards = qwen2.act(MIXED[::-1])[::-1]
    alone = [qwen2.act([query])[0] for query in MIXED]
    qwen2.tokens_per_batch = 64
    in_pieces = qwen2.act(MIXED)
    for others in (backwards, alone, in_pieces):
        assert [a.token_ids for a in others] == [a.token_ids for a in together]
        assert [a.logprob for a in others] == pytest.approx([a.logprob for a in together], abs=1e-5)
        assert [a.value for a in others] == pytest.approx([a.value for a in together], abs=1e-5)


def test_no_more_is_read_ahead_than_a_pass_has_room_for(qwen2):
    """A pass that is cut within a conversation would read its prompt once more."""
    tokens, reads = [], {}
    qwen2.trunk.rotary_emb.register_forward_pre_hook(lambda m, x: tokens.append(x[0].shape[1]))
    for qwen2.tokens_per_batch in (16384, 256):
        for qwen2._ahead in (0, AHEAD[1]):
            tokens.clear()
            qwen2.forget()
            play(EnvConfig(history_turns=0), qwen2, tasks_of("liars_dice", "hex_small", each=3))
            reads[qwen2.tokens_per_batch, qwen2._ahead] = len(tokens), sum(tokens)
    assert reads[16384, AHEAD[1]][0] < reads[16384, 0][0]
    assert reads[256, AHEAD[1]][1] <= 1.1 * reads[256, 0][1]


@pytest.mark.parametrize("context_grad", [True, False])
@pytest.mark.parametrize("history", ["all", 0])
def test_the_places_of_an_answer_may_be_read_with_its_prompt(new_policy, monkeypatch, context_grad, history):
    """Which saves a GPU passes: numbers of two digits are chosen after one, not after two."""
    policy = new_policy(ppo={"context_grad": context_grad})
    assert policy._ahead == 0, "on a CPU tokens cost, and passes little"
    passes, kept, told = [], [], []
    policy.trunk.rotary_emb.register_forward_pre_hook(lambda *_: passes.append(1))
    read = policy.reader.read
    monkeypatch.setattr(
        policy.reader, "read", lambda reads: kept.extend(r.keep and r.kv is not None for r in reads) or read(reads)
    )
    for policy._ahead in (0, 1, AHEAD[1]):
        passes.clear()
        kept.clear()
        policy.forget()
        with policy.keeping_context():
            episodes = play(
                EnvConfig(history_turns=history), policy, tasks_of("liars_dice_small", "liars_dice", "kuhn_poker")
            )
            sequences = sequences_of(episodes)
            told.append((len(passes), [e.info["history"] for e in episodes], [s.ids for s in sequences]))
            check_scores(policy, sequences)
    (one_by_one, *same), (some, *_), (ahead, *_) = told
    assert all(others == same for _, *others in told)
    assert ahead < some < one_by_one
    assert any(kept) == (history == "all" or not context_grad), "what nobody goes on from is not kept"


def test_games_do_not_depend_on_what_else_is_played(qwen2):
    config, tasks = EnvConfig(prompt="compact", history_turns="all"), tasks_of("leduc_poker", "tic_tac_toe", each=3)
    together = play(config, qwen2, tasks)
    alone = [play(config, qwen2, [task])[0] for task in tasks]
    for a, b in zip(together, alone, strict=True):
        assert a.info["history"] == b.info["history"]
        for s, t in zip(sequences_of([a]), sequences_of([b]), strict=True):
            assert s.ids == t.ids
            assert [d.logprob for d in s.decisions] == pytest.approx([d.logprob for d in t.decisions], abs=1e-5)


@pytest.mark.parametrize("tokens_per_batch", [64, 700, 16384])
def test_scores_come_in_the_order_of_the_sequences(qwen2, tokens_per_batch):
    episodes = play(EnvConfig(history_turns=1), qwen2, tasks_of("leduc_poker", "tic_tac_toe", "hex_small"))
    sequences = sequences_of(episodes)
    sequences = sequences[::2] + sequences[1::2] + sequences[:2]  # some of them twice
    qwen2.tokens_per_batch = tokens_per_batch
    batches = qwen2.micro_batches(sequences)
    assert sorted(itertools.chain(*batches)) == list(range(len(sequences)))
    assert (len(batches) > 3) == (tokens_per_batch < 16384)
    check_scores(qwen2, sequences)


def test_a_minibatch_reads_its_shared_system_message_once(qwen2):
    sequences = sequences_of(play(EnvConfig(history_turns=0), qwen2, tasks_of("leduc_poker", each=4)))
    tokens = []
    qwen2.trunk.rotary_emb.register_forward_pre_hook(lambda m, x: tokens.append(x[0].shape[:2].numel()))
    qwen2.evaluate_decisions(sequences)
    assert len(tokens) == 1
    assert tokens[0] < sequences[0].shared + sum(len(s.ids) - s.shared for s in sequences)


# ------------------------------------------------------------------------------------------- conversations continue


def test_a_conversation_goes_on_after_the_tokens_that_were_read(qwen2):
    first = qwen2.act([ask(talk(RULES, "one"), [1, 2], continues=True)])[0]
    handed_out = copy.deepcopy(first)
    read = []
    qwen2.trunk.rotary_emb.register_forward_pre_hook(lambda m, x: read.append(x[0].shape[1]))
    second = qwen2.act([ask(talk(RULES, "one", first.text, "two"), [1, 2], (0, 0, 1, 1), continues=True)])[0]
    assert (first.extends, second.extends) == (False, True)
    assert second.sequence.ids[: len(first.sequence.ids)] == first.sequence.ids
    assert second.sequence.decisions[:-1] == first.sequence.decisions
    assert first == handed_out, "what was handed out never changes"
    assert max(read) < len(qwen2.chat.later(talk("", "two")[1:])) + 3
    check_scores(qwen2, [second.sequence])


def test_a_window_that_slides_is_read_afresh(qwen2):
    """Equal texts must not pass for the conversation that was kept: turns 2 and 3 of a window of 1 look alike."""
    turn = ["same", "5"]
    for t in range(4):
        conversation = talk(RULES, *turn * min(t, 1), "same")
        [action] = qwen2.act([ask(conversation, [5], (0, 0, t, 1), continues=t < 1)])
        prompt = qwen2.chat.first_prompt(conversation)[0]
        assert action.sequence.ids == prompt + action.token_ids


def test_another_conversation_of_the_same_seat_starts_anew(qwen2):
    qwen2.act([ask(talk(RULES, "one"), [1, 2], continues=True)])
    [action] = qwen2.act([ask(talk(RULES, "two"), [1, 2])])
    assert action.sequence.ids == qwen2.chat.first_prompt(talk(RULES, "two"))[0] + action.token_ids


def test_new_weights_read_everything_again(qwen2):
    before = [a.logprob for a in qwen2.act(MIXED)]
    for parameter in qwen2.trainable().values():
        parameter.data *= 1.1
    qwen2.forget()
    actions = qwen2.act(MIXED)
    check_scores(qwen2, [a.sequence for a in actions])
    assert [a.logprob for a in actions] != pytest.approx(before, abs=1e-3)


def test_a_prompt_that_does_not_fit_ends_the_episode(new_policy):
    policy = new_policy(ppo={"max_seq_length": 200})
    episodes = play(EnvConfig(prompt="compact", history_turns="all"), policy, tasks_of("connect_four", "kuhn_poker"))
    assert [e.outcome for e in episodes] == ["truncated", "finished"] * 2
    for sequence in sequences_of(episodes):
        assert len(sequence.ids) == sequence.decisions[-1].stop <= 200, "nothing after the last answer"
    check_scores(policy, sequences_of(episodes))
    prompt = len(policy.chat.first_prompt(talk("s", "u"))[0])
    for legal, limit in ([1, 2], 2), ([1, 123], 4):
        for spare in (limit, limit - 1):
            policy.max_seq_length = prompt + spare
            [action] = policy.act([ask(talk("s", "u"), legal)])
            assert action.truncated == (spare < limit), "room for the longest answer and the end of the turn"
            assert (action.sequence is None) == action.truncated


# ----------------------------------------------------------------------------------------------------- free answers


FREE = [ask(talk(RULES, f"state {i % 5}"), [1], (i, 0, 0, 1), i) for i in range(60)]


def ends(policy, actions):
    return [action for action in actions if action.token_ids[-1] == policy.chat.end_id]


@pytest.fixture
def free(new_policy):
    """Ends a part of its answers by itself within 6 tokens: a random model has to be pushed to."""
    policy = new_policy(env={"answer_mode": "free"}, ppo={"max_new_tokens": 6, "temperature": 1.5})
    end = policy.lm_head.weight.data[policy.chat.end_id]
    row = end.clone()
    for factor in (1, 2, 3, 4, 6, 8, -1, -2, -3, -4, -6, -8):
        end.copy_(factor * row)
        policy.forget()
        if 10 < len(ends(policy, policy.act(FREE))) < 50:
            return policy
    raise AssertionError("no factor leaves some answers open")


def test_free_answers_are_drawn_from_the_whole_vocabulary(free):
    actions, end = free.act(FREE), free.chat.end_id
    ended = ends(free, actions)
    for action in actions:
        [decision] = action.sequence.decisions
        assert decision.allowed is None
        assert end not in action.token_ids[:-1]
        assert len(action.token_ids) <= 6
        assert action in ended or len(action.token_ids) == 6
        assert action.sequence.ids[-1] == end, "a cut answer is closed for the conversation"
        assert decision.chosen == action.token_ids
        assert action.text == free.tokenizer.decode([t for t in action.token_ids if t != end], skip_special_tokens=True)
    check_scores(free, [a.sequence for a in actions])


def test_a_free_answer_ends_at_each_end_that_the_model_names(tiny_models, new_policy, tmp_path, monkeypatch):
    """As Qwen's do, and as vLLM reads it; the conversation goes on after the end of a turn."""
    folder = shutil.copytree(tiny_models["qwen2"], tmp_path / "base")
    held = json.loads((folder / "generation_config.json").read_text())
    held["eos_token_id"] = [held["eos_token_id"], held["pad_token_id"]]
    (folder / "generation_config.json").write_text(json.dumps(held))
    free = new_policy(str(folder), env={"answer_mode": "free"}, ppo={"max_new_tokens": 6})
    seven, (end, more) = free.chat.answer_ids["7"], held["eos_token_id"]
    drawn = iter([seven, more, seven])
    monkeypatch.setattr("policy.player.draw", lambda *_: (torch.tensor([next(drawn)]), torch.zeros(1)))
    [action] = free.act(FREE[:1])
    assert (action.text, action.token_ids) == ("7", [seven, more])
    assert action.sequence.ids[-3:] == [seven, more, end]
    assert action.sequence.decisions[0].chosen == action.token_ids
    free.chat.ends.append(seven)  # one that is no special token, which decoding would show
    assert free.chat.answer_text([free.chat.answer_ids["8"], seven]) == ("8", False)


def test_free_sampling_follows_the_probabilities(new_policy):
    free = new_policy(env={"answer_mode": "free"}, ppo={"max_new_tokens": 1, "temperature": 1.5})
    actions = free.act([ask(talk("s", "u"), [1], (i, 0, 0, 1), i) for i in range(3000)])
    prompt = torch.tensor([free.chat.first_prompt(talk("s", "u"))[0]])
    probs = (free.peft_model(prompt).logits[0, -1] / 1.5).softmax(-1)
    counts = torch.bincount(torch.tensor([a.token_ids[0] for a in actions]), minlength=len(probs))
    likely = probs > 0.005
    deviation = (counts[likely] - 3000 * probs[likely]) / (3000 * probs[likely] * (1 - probs[likely])).sqrt()
    assert likely.sum() > 5
    assert deviation.abs().max() < 4


@pytest.mark.parametrize("history", ["all", 0])
def test_a_second_attempt_continues_the_sampled_tokens(free, history):
    """Answers that cannot be parsed are asked again; the tokens stay those that were sampled."""
    player = Recorder(free)
    episodes = play(
        EnvConfig(prompt="compact", answer_mode="free", history_turns=history), player, tasks_of("leduc_poker", each=8)
    )
    assert any(e.info["retries"] for e in episodes)
    re_encoded = 0
    for sequence in sequences_of(episodes):
        asked = [(q, a) for q, a in player.log if a.sequence and a.sequence.decisions[0] is sequence.decisions[0]]
        ids: list[int] = []
        read = 0
        for query, action in asked:
            new = query.conversation[read:]
            ids += free.chat.later(new) if ids else free.chat.first_prompt(new)[0]
            ids += action.token_ids + [free.chat.end_id] * (action.token_ids[-1] != free.chat.end_id)
            read = len(query.conversation) + 1
            re_encoded += [*free.chat.encode(action.text), free.chat.end_id] != ids[-len(action.token_ids) :]
        assert sequence.ids == ids
        assert len(sequence.decisions) == len(asked)
    assert re_encoded, "or this test could not fail"
    assert max(len(s.decisions) for s in sequences_of(episodes)) >= 3
    check_scores(free, sequences_of(episodes))


def test_past_answers_without_their_thinking_leave_the_sampled_tokens_alone(free, monkeypatch):
    """A conversation whose past answer was shortened is read anew; what was sampled stays in its own sequence."""
    told = free.chat.answer_text
    monkeypatch.setattr(free.chat, "answer_text", lambda ids: (f"<think>{told(ids)[0]}</think>{ids[0] % 2}", True))
    player, env = Recorder(free), EnvConfig(protocol="affinetes", prompt="compact", answer_mode="free")
    episodes = play(env, player, tasks_of("kuhn_poker", "leduc_poker", each=4))
    sequences = sequences_of(episodes)
    assert {len(sequence.decisions) for sequence in sequences} == {1}
    assert len(sequences) == len(player.log)
    for query, action in player.log:
        prompt, _ = free.chat.first_prompt(query.conversation)
        assert action.sequence.ids == prompt + action.token_ids
        assert action.sequence in sequences
    assert max(len(query.conversation) for query, _ in player.log) > 2
    check_scores(free, sequences)


# ------------------------------------------------------------------------------------------------------- legal mass


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_legal_mass_is_the_product_over_the_whole_answer(new_policy, temperature):
    policy = new_policy(ppo={"temperature": temperature})
    sequences = [a.sequence for a in policy.act([*MIXED, ask(talk("s", "forced"), [105])])]
    sequences += sequences_of(play(EnvConfig(prompt="compact"), policy, tasks_of("leduc_poker", "liars_dice")))
    expected = check_scores(policy, sequences)[:, 3]
    policy.tokens_per_batch = 300
    mass_M = policy.evaluate_decisions(sequences, legal_mass=True).legal_mass
    assert_close(mass_M.detach(), expected, **TOLERANCE)
    assert mass_M.max() < 0
    mass_M.sum().backward()
    assert all(p.grad.abs().max() > 0 for n, p in policy.trainable().items() if "lora_" in n)


# --------------------------------------------------------------------------------------------------------- adapters


def flags(policy):
    return {name: p.requires_grad for name, p in policy.peft_model.named_parameters()}


def test_base_is_the_bare_model_to_the_bit(policy):
    from transformers import AutoModelForCausalLM

    bare = AutoModelForCausalLM.from_pretrained(policy.config.model_name).eval()
    tree = grow([Row(range(30)), Row(range(30, 60))], [range(30)] * 2, None, CUTS[0])
    with torch.no_grad():
        expected = run_trunk(bare.model, tree)
        with policy.using("base"):
            assert torch.equal(run_trunk(policy.trunk, tree), expected)
        assert not torch.allclose(run_trunk(policy.trunk, tree), expected, atol=1e-2)


def test_adapters_leave_no_trace(qwen2, tmp_path):
    expected = flags(qwen2)
    assert any(expected.values())
    before = qwen2.evaluate_decisions([a.sequence for a in qwen2.act(MIXED)])
    qwen2.save(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    qwen2.add_adapter("past", tmp_path)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == limits
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert {n: f for n, f in flags(qwen2).items() if ".past." not in n} == expected
    expected = flags(qwen2)
    assert not any(flag for name, flag in expected.items() if ".past." in name)
    with qwen2.using("past"), qwen2.using("base"), qwen2.using("past"):
        assert not torch.is_grad_enabled()
    with pytest.raises(RuntimeError), qwen2.using("base"):
        raise RuntimeError
    assert flags(qwen2) == expected
    sequences = [a.sequence for a in qwen2.act(MIXED)]
    assert torch.equal(qwen2.evaluate_decisions(sequences).logprobs, before.logprobs)
    assert not qwen2.evaluate_decisions(sequences, adapter="base").logprobs.requires_grad
    assert flags(qwen2) == expected
    with pytest.raises(ValueError, match="no adapter 'ghost': there are base, default, past"), qwen2.using("ghost"):
        pass
    for name in ("base", "past"):  # the second one would go on playing as the first
        with pytest.raises(ValueError, match="taken"):
            qwen2.add_adapter(name, tmp_path)


def test_an_adapter_may_have_a_name_that_occurs_in_those_of_weights(qwen2, tmp_path):
    qwen2.save(tmp_path)
    for name in ("y", "lora"):
        qwen2.add_adapter(name, tmp_path)
    state = qwen2.past_adapter("default")
    assert all(torch.equal(tensor, state[key]) for key, tensor in qwen2.past_adapter("lora").items())


def test_a_query_without_legal_actions_is_told(qwen2):
    for ask in (qwen2.act, qwen2.action_probs):
        with pytest.raises(ValueError, match=r"env\.answer_mode must be free"):
            ask([replace(MIXED[0], legal={})])


def test_a_past_self_stays_as_it_was_and_can_be_written_and_forgotten(qwen2, new_policy):
    """Kept at one moment, it answers later as the policy did then; so does its copy on another base."""
    sequences = [a.sequence for a in qwen2.act(MIXED)]
    flags = {name: p.requires_grad for name, p in qwen2.peft_model.named_parameters()}
    with torch.no_grad():
        then = qwen2.evaluate_decisions(sequences).logprobs
    qwen2.keep_past("step-000010")
    assert {n: p.requires_grad for n, p in qwen2.peft_model.named_parameters() if n in flags} == flags
    with torch.no_grad():
        for parameter in qwen2.trainable().values():
            parameter.add_(0.1)
        assert not torch.allclose(qwen2.evaluate_decisions(sequences).logprobs, then)
    assert torch.equal(qwen2.evaluate_decisions(sequences, adapter="step-000010").logprobs, then)
    other = new_policy(noise=9)
    names = list(other.trainable())
    other.keep_past("step-000010", qwen2.past_adapter("step-000010"))
    assert list(other.trainable()) == names
    assert not any(p.requires_grad for n, p in other.peft_model.named_parameters() if "step-000010" in n)
    assert torch.equal(other.evaluate_decisions(sequences, adapter="step-000010").logprobs, then)
    assert not any(p.requires_grad for n, p in other.peft_model.named_parameters() if "step-000010" in n)
    other.forget_past("step-000010")
    with pytest.raises(ValueError, match="no adapter"), other.using("step-000010"):
        pass
    assert len(other.evaluate_decisions(sequences).logprobs) == len(then)


def test_a_player_on_more_layers_than_the_policy_trains_plays_as_it_does_alone(new_policy, tmp_path):
    few, other = new_policy(lora={"target_modules": ("q_proj", "v_proj")}, noise=1), new_policy(noise=2)
    other.save(tmp_path)
    own, alone = few.action_probs(MIXED), other.action_probs(MIXED)
    few.add_adapter("other", tmp_path)
    few.forget()
    with few.using("other"):
        found = few.action_probs(MIXED)
    assert all(f == pytest.approx(a, abs=1e-5) for f, a in zip(found, alone, strict=True))
    assert few.action_probs(MIXED) == own


def test_a_head_that_is_a_pipe_is_not_waited_for(qwen2, tmp_path):
    qwen2.save(tmp_path)
    (tmp_path / "value_head.safetensors").unlink()
    os.mkfifo(tmp_path / "value_head.safetensors")
    with pytest.raises(ConfigError, match=r"holds no value_head\.safetensors"):
        qwen2.load(tmp_path)


def test_a_past_self_drops_nothing(qwen2):
    """Its layers are new, and PEFT makes them as if they were to be trained."""
    qwen2.keep_past("step-000010")
    assert not any(module.training for module in qwen2.peft_model.modules())


def test_a_past_self_of_other_tensors_is_refused(qwen2):
    name, mine = "base_model.model.model.norm.weight", qwen2.past_adapter("default")
    norm = qwen2.peft_model.get_parameter(name)
    before = norm.clone()
    for tensors in (mine | {name: torch.zeros_like(norm)}, {}, {key: t[:, :1] for key, t in mine.items()}):
        with pytest.raises(ConfigError, match="step-000010 does not fit "):
            qwen2.keep_past("step-000010", tensors)
    assert torch.equal(norm, before)
    assert list(qwen2.peft_model.peft_config) == ["default"]


def test_the_average_follows_the_policy_and_is_saved_as_a_player(qwen2, new_policy, tmp_path):
    sequences = [a.sequence for a in qwen2.act(MIXED)]
    assert qwen2.average is None
    qwen2.follow(1)
    own = {name: p.detach().clone() for name, p in qwen2.trainable().items()}
    assert torch.equal(qwen2.evaluate_decisions(sequences, adapter="average").logprobs,
                       qwen2.evaluate_decisions(sequences).logprobs)  # fmt: skip
    with torch.no_grad():
        for parameter in qwen2.trainable().values():
            parameter.add_(0.4)
    qwen2.follow(33)
    assert not any(p.requires_grad for n, p in qwen2.peft_model.named_parameters() if ".average." in n)
    expected = qwen2.evaluate_decisions(sequences, adapter=qwen2.average).logprobs
    qwen2.save(tmp_path / "average", adapter="average")
    other = new_policy(noise=9)
    other.load(tmp_path / "average")
    for name, parameter in other.trainable().items():
        if "lora_" in name:
            torch.testing.assert_close(parameter, own[name] + 0.08, rtol=0, atol=1e-6)
    assert torch.equal(other.evaluate_decisions(sequences).logprobs, expected)


def test_nested_adapters(qwen2, new_policy, tmp_path):
    new_policy(noise=5).save(tmp_path)
    qwen2.add_adapter("past", tmp_path)
    tree = grow([Row(range(30))], [range(30)], None, CUTS[0])

    def read():
        return run_trunk(qwen2.trunk, tree).detach()

    own = read()
    with qwen2.using("base"):
        base = read()
        with qwen2.using("past"):
            past = read()
        assert torch.equal(read(), base)
    with qwen2.using("past"):
        assert torch.equal(read(), past)
        with qwen2.using("base"):
            assert torch.equal(read(), base)
        assert torch.equal(read(), past)
    assert torch.equal(read(), own)
    assert not torch.allclose(own, past)


def test_players_of_several_adapters_are_asked_together(qwen2, new_policy, tmp_path):
    """Two turns each, with one long system message: what one adapter has read must not serve another."""
    others = {"past": new_policy(noise=5), "base": new_policy(fresh=True), None: new_policy()}
    others["past"].save(tmp_path)
    qwen2.add_adapter("past", tmp_path)
    answers: dict[int, str] = {}
    for turn in range(2):
        queries = []
        for i, adapter in enumerate([None, "base", "past"] * 3):
            conversation = talk(RULES, f"state {i // 3}", *([answers[i], "and then"] if turn else []))
            queries.append(ask(conversation, [3, 12, 17, 120], (i, 0, turn, 1), i, adapter, continues=True))
        actions = qwen2.act(queries)
        for i, (query, action) in enumerate(zip(queries, actions, strict=True)):
            [expected] = others[query.adapter].act([replace(query, adapter=None)])
            assert action.text == expected.text
            assert action.logprob == pytest.approx(expected.logprob, abs=1e-5)
            answers[i] = action.text


@pytest.mark.parametrize(("first", "then"), [(None, "base"), ("base", None)])
def test_a_conversation_that_another_adapter_has_read_is_read_afresh(qwen2, first, then):
    text = qwen2.act([ask(talk(RULES, "one"), [3, 12, 17], adapter=first, continues=True)])[0].text
    query = ask(talk(RULES, "one", text, "two"), [3, 12, 17], (0, 0, 1, 1), adapter=then)
    [found] = qwen2.act([query])
    qwen2.forget()
    [expected] = qwen2.act([query])
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
    assert (found.logprob, found.value) == pytest.approx((expected.logprob, expected.value), abs=1e-6)


def test_an_adapter_to_start_from_is_also_the_reference(qwen2, new_policy, tmp_path):
    qwen2.save(tmp_path)
    note = tmp_path / "adapter_config.json"
    note.write_text(note.read_text().replace(qwen2.config.model_name, "/elsewhere/base"))
    policy = new_policy(fresh=True, model={"adapter": str(tmp_path)})
    assert policy.reference == "reference"
    assert policy.peft_model.peft_config["default"].base_model_name_or_path == policy.config.model_name
    sequences = [a.sequence for a in qwen2.act(MIXED)]
    expected = qwen2.evaluate_decisions(sequences).logprobs
    assert torch.equal(policy.evaluate_decisions(sequences).logprobs, expected)
    for parameter in policy.trainable().values():
        parameter.data *= 1.1
    assert torch.equal(policy.evaluate_decisions(sequences, adapter="reference").logprobs, expected)
    assert not torch.allclose(policy.evaluate_decisions(sequences).logprobs, expected)
    assert {n for n, flag in flags(policy).items() if flag} == {n for n in policy.trainable() if "lora_" in n}
    assert qwen2.reference is None


# ------------------------------------------------------------------------------------------------------------ files


def test_saved_and_loaded_policies_are_equal_to_the_bit(qwen2, new_policy, tmp_path):
    qwen2.save(tmp_path)
    other = new_policy(fresh=True)
    sequences = [a.sequence for a in qwen2.act(MIXED)]
    assert [a.logprob for a in other.act(MIXED)] != [a.logprob for a in qwen2.act(MIXED)]
    other.load(tmp_path)
    for (name, a), b in zip(qwen2.trainable().items(), other.trainable().values(), strict=True):
        assert torch.equal(a, b), name
    assert other.act(MIXED) == qwen2.act(MIXED)
    expected, found = qwen2.evaluate_decisions(sequences), other.evaluate_decisions(sequences)
    assert all(torch.equal(a, b) for a, b in zip(expected[:3], found[:3], strict=True))


def test_a_saved_folder_is_what_peft_and_the_hub_expect(qwen2, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        qwen2.save(tmp_path / folder)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.json",
                     "tokenizer_config.json", "value_head.safetensors"]  # fmt: skip
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == qwen2.config.model_name
    assert config["target_modules"] == sorted(config["target_modules"])
    bare = AutoModelForCausalLM.from_pretrained(qwen2.config.model_name)
    plain = PeftModel.from_pretrained(bare, tmp_path / "a").eval()
    ids_BT = torch.arange(60).view(2, 30)
    with torch.no_grad():
        assert torch.equal(plain(ids_BT).logits, qwen2.peft_model(ids_BT).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.chat_template == qwen2.tokenizer.chat_template


@pytest.mark.parametrize("lora", [{"r": 5}, {"target_modules": ("q_proj",)}])
def test_a_checkpoint_of_another_shape_is_refused(qwen2, new_policy, tmp_path, lora):
    qwen2.save(tmp_path)
    other = new_policy(lora=lora)
    before = [p.clone() for p in other.trainable().values()]
    with pytest.raises(ConfigError, match="does not fit"):
        other.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, other.trainable().values(), strict=True))


# --------------------------------------------------------------------------------------------------- lack of memory


def short_of_memory(monkeypatch, most_tokens):
    """From now on the trunk fails on more than ``most_tokens`` tokens at a time."""
    from policy import network

    def run(model, tree, *args, **kwargs):
        if len(tree.ids_N) > most_tokens:
            raise torch.OutOfMemoryError("out of memory")
        return run_trunk(model, tree, *args, **kwargs)

    monkeypatch.setattr(network, "run_trunk", run)


@pytest.mark.usefixtures("frozen")
def test_a_rollout_survives_lack_of_memory(qwen2, monkeypatch):
    queries = [ask(talk("s", f"{i} state {'x ' * i}"), [3, 12, 17, 120], (i, 0, 0, 1), i) for i in range(40)]
    expected = qwen2.act(queries)
    longest = max(len(a.sequence.ids) for a in expected)
    short_of_memory(monkeypatch, 3 * longest)
    before = qwen2.tokens_per_batch
    actions = qwen2.act(queries)
    assert [a.token_ids for a in actions] == [a.token_ids for a in expected]
    assert [a.logprob for a in actions] == pytest.approx([a.logprob for a in expected], abs=1e-5)
    assert longest < qwen2.tokens_per_batch < before
    short_of_memory(monkeypatch, longest // 2)
    with pytest.raises(torch.OutOfMemoryError):
        qwen2.act(queries)


@pytest.mark.parametrize("most", [1, 4])
def test_free_answers_survive_lack_of_memory(new_policy, monkeypatch, most):
    """The whole vocabulary's logits of many answers may be too much where all else fits."""
    policy = new_policy(env={"answer_mode": "free"}, ppo={"max_new_tokens": 3})
    queries = [ask(talk("s", f"{i} state"), {}, (i, 0, 0, 1), i) for i in range(11)]
    expected, real = policy.act(queries), playing.draw

    def draw(hidden_ND, *args):
        if len(hidden_ND) > most:
            raise torch.OutOfMemoryError
        return real(hidden_ND, *args)

    monkeypatch.setattr(playing, "draw", draw)
    assert [a.token_ids for a in policy.act(queries)] == [a.token_ids for a in expected]
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        policy.act(queries)


@pytest.mark.usefixtures("frozen")
def test_scoring_without_gradients_survives_lack_of_memory(qwen2, monkeypatch):
    sequences = [a.sequence for a in qwen2.act(MIXED * 3)]
    sequences += sequences_of(play(EnvConfig(prompt="compact"), qwen2, tasks_of("leduc_poker", each=9)))
    with torch.no_grad():
        expected = qwen2.evaluate_decisions(sequences)
        short_of_memory(monkeypatch, max(len(s.ids) for s in sequences))
        found = qwen2.evaluate_decisions(sequences)
    for a, b in zip(expected[:3], found[:3], strict=True):
        assert_close(a, b, **TOLERANCE)
    qwen2.tokens_per_batch = 16384
    with pytest.raises(torch.OutOfMemoryError):
        qwen2.evaluate_decisions(sequences)


@pytest.mark.usefixtures("frozen")
def test_batches_are_halved_down_to_single_rows(qwen2):
    [action] = qwen2.act([ask(talk("1" * 150, "y"), [1, 2])])
    qwen2.evaluate_decisions([Sequence(action.sequence.ids, action.sequence.decisions)])
    qwen2.tokens_per_batch = 1000
    halved = [qwen2.tokens_per_batch for _ in range(9) if qwen2.halve_batches()]
    assert halved == [500, 250, 125], "150 tokens and a few fit one by one"
    [action] = qwen2.act([ask(talk("s", "u"), [1, 2])])
    assert qwen2.halve_batches()
    assert not qwen2.halve_batches(), "64 is small enough"


@pytest.mark.usefixtures("frozen")
@torch.no_grad()
def test_what_is_kept_of_a_conversation_does_not_keep_batches_from_being_halved(qwen2):
    ids = [5] * 150
    _, [kept] = qwen2.reader.read([Read(ids, None, True)])
    qwen2.reader.read([Read([*ids, 7], kept, False)])
    qwen2.tokens_per_batch = 1000
    assert [qwen2.tokens_per_batch for _ in range(9) if qwen2.halve_batches()] == [500, 250, 125, 62]
