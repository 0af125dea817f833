"""The trunk against the library's own forward pass, chat formats against the templates, and what loading refuses."""

import errno
import importlib.resources
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoTokenizer

from config.reader import ConfigError, load_config
from envs import client
from policy import network
from policy.attention import PaddedRows, Runs, attend
from policy.chat import ChatFormat, answer_trie
from policy.model import (
    LoraConfig,
    ModelConfig,
    _cpu,
    _load_base,
    adapter_digest,
    device_of,
    load_architecture,
    load_model,
    load_tokenizer,
)  # fmt: skip
from policy.network import CUTS, Read, run_trunk
from policy.tree import Cut, Row, grow
from scripts import make_tiny_model
from scripts.make_tiny_model import make_model, make_tokenizer, prompts

BOTH = pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def policy(request, new_policy):
    return new_policy(request.param)


def random_ids(*shape, seed=0):
    return torch.randint(0, 300, shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------------ trunk


def tree_rows():
    """A system prompt that rows share, nested branchings, rows that are beginnings of others, one by itself."""
    text = random_ids(200).tolist()
    rows = [text[:50] + [i] * 30 for i in range(5)] + [text[:50] + [3] * 30 + [i] * 9 for i in range(3)]
    rows += [text[:50], text[:90], text, [*text[:20], 7, *text[:150]], [5, 6, 7], [9]]
    return sorted(rows)


def read_tree(policy, rows, reads, cut=CUTS[0], **options):
    """Hidden states of each row's reads, from one pass."""
    tree = grow([Row(row) for row in rows], reads, None, cut)
    hidden_UD = run_trunk(policy.trunk, tree, **options)
    at = [np.searchsorted(tree.reads_U, flat[read]) for flat, read in zip(tree.flat, reads, strict=True)]
    return tree, [hidden_UD[torch.from_numpy(x)] for x in at]


def test_a_tree_holds_every_beginning_once():
    rows = tree_rows()
    tree = grow([Row(row) for row in rows], [[0]] * len(rows), None, CUTS[0])
    assert len(tree.ids_N) == len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})
    for row, flat in zip(rows, tree.flat, strict=True):
        assert tree.ids_N[flat].tolist() == row
        assert tree.positions_N[flat].tolist() == list(range(len(row)))
    assert {bucket.keys.shape[1] % 16 for bucket in [*tree.full, *tree.last]} == {0}, (
        "masks as CUDA's kernels want them"
    )


def gradients(policy, parts, weights):
    policy.peft_model.zero_grad()
    sum((part.float() * weight).sum() for part, weight in zip(parts, weights, strict=True)).backward()
    return {name: p.grad.clone() for name, p in policy.peft_model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("cut", [Cut(1000, 2.0, 1 << 20), Cut(16, 1.05, 1 << 10)])
@pytest.mark.parametrize("recompute", [0, 3])
def test_values_and_gradients_of_a_tree_are_those_of_the_library_row_by_row(policy, recompute, cut):
    rows = tree_rows()
    reads = [sorted({len(row) - 1, len(row) // 2, 0}) for row in rows]
    _, found = read_tree(policy, rows, reads, cut, recompute=recompute)
    model = policy.base.model
    expected = [model(torch.tensor([row])).last_hidden_state[0, read] for row, read in zip(rows, reads, strict=True)]
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, atol=2e-5, rtol=0)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(part.shape, generator=generator) for part in expected]
    wanted, got = gradients(policy, expected, weights), gradients(policy, found, weights)
    assert len(wanted) == 3 * 7 * 2
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0
        assert (got[name] - gradient).norm() <= 2e-5 * gradient.norm(), name


def test_gradients_are_the_same_to_the_bit_however_many_layers_are_computed_again(policy, monkeypatch):
    rows, runs = tree_rows(), []
    run_layer = network._run_layer
    monkeypatch.setattr(network, "_run_layer", lambda *args: runs.append(0) or run_layer(*args))
    found = []
    for recompute in (0, 1, 3):
        _, parts = read_tree(policy, rows, [[len(row) - 1] for row in rows], recompute=recompute)
        found.append(gradients(policy, parts, [1.0] * len(parts)))
        assert len(runs) == 3 + recompute, "layers run, those of the backward pass included"
        runs.clear()
    for other in found[1:]:
        assert all(torch.equal(gradient, other[name]) for name, gradient in found[0].items())


def error(found, exact):
    return float(sum((a.float() - b).square().sum() for a, b in zip(found, exact, strict=True)) ** 0.5)


def test_in_bfloat16_a_tree_is_as_near_to_the_exact_gradient_as_the_library_is(policy, new_policy):
    """The prefix is in 64 rows: their gradients must not be added up in bfloat16."""
    architecture = policy.base.config.model_type
    text = random_ids(40).tolist()
    rows = sorted([*text, i, *text[:5]] for i in range(64))
    reads, found = [[len(row) - 1] for row in rows], {}
    weights = [w[None] for w in torch.randn(64, 32, generator=torch.Generator().manual_seed(2))]
    for name, dtype in (("exact", "float32"), ("tree", "bfloat16"), ("library", "bfloat16")):
        other = new_policy(architecture, model={"dtype": dtype})
        if name == "tree":
            parts = read_tree(other, rows, reads)[1]
        else:
            parts = list(other.base.model(torch.tensor(rows)).last_hidden_state[:, -1:])
            parts = [part[0][None] for part in parts]
        found[name] = [p.detach().float() for p in parts], list(gradients(other, parts, weights).values())
    for tree, library, exact in zip(found["tree"], found["library"], found["exact"], strict=True):
        assert error(tree, exact) < 1.3 * error(library, exact)


def test_places_that_no_key_fills_name_different_ones():
    """A GPU that adds up in a fixed order adds what falls to one key one by one."""
    rows = [Row([i, *range(100, 103 + 3 * i)]) for i in range(1, 30)]
    [bucket] = grow(rows, [[0]] * len(rows), None, Cut(256, 1.25, 1 << 19)).full
    R, S = bucket.keys.shape
    most = np.bincount(bucket.keys.flatten()).max()
    assert len(rows) == R
    assert most <= S // 4, "the shortest path goes round so often"
    for row, keys, own in zip(rows, bucket.keys, np.cumsum([0] + [len(row.ids) for row in rows]), strict=False):
        assert keys[: len(row.ids)].tolist() == list(range(own, own + len(row.ids)))
        assert set(keys) <= set(range(own, own + len(row.ids)))


def test_gradients_of_a_key_in_many_paths_are_added_up_in_fp32():
    """A quarter each from 1,024 buckets: in bfloat16 the sum stays where a quarter is less than half a digit."""
    R, S = 1024, 4
    mask = torch.zeros(1, 1, 1, S, dtype=torch.bfloat16)
    buckets = [PaddedRows(torch.tensor([i]), None, torch.arange(S)[None], mask, (1, 1)) for i in range(R)]
    runs = Runs(buckets, torch.arange(R))
    q, k, v = (torch.ones(n, 1, 8, dtype=torch.bfloat16, requires_grad=True) for n in (R, S, S))
    attend(q, k, v, runs, 1.0).sum().backward()
    assert_close(v.grad, torch.full_like(v, R / S), rtol=0.01, atol=0)


def test_what_was_cached_need_not_be_read_again(policy):
    """Conversations with 0, 6, 17 and 30 tokens read go on in one pass, two of them from the same beginning."""
    cached = [0, 6, 17, 17, 30]
    rows = [random_ids(40, seed=i).tolist() for i in (0, 1, 2, 2, 3)]
    rows[3] = [*rows[3][:20], 1, 2, 3]
    with torch.no_grad():
        begun = [Read(row[:c], None, True) for row, c in zip(rows[1:], cached[1:], strict=True)]
        kvs = dict(zip(cached[1:], policy.reader.read(begun)[1], strict=True))
        hidden_ND, _ = policy.reader.read([Read(r, kvs.get(c), True) for r, c in zip(rows, cached, strict=True)])
        for row, hidden_D in zip(rows, hidden_ND, strict=True):
            expected_D = policy.base.model(torch.tensor([row])).last_hidden_state[0, -1]
            assert_close(hidden_D, expected_D, atol=1e-5, rtol=0)


@pytest.mark.parametrize("off", ["base", "some", "two"])
def test_adapters_that_are_off_partial_or_several_are_honoured(new_policy, off):
    policy = new_policy(lora={"target_modules": ("q_proj", "v_proj", "up_proj")} if off == "some" else None)
    ids = random_ids(30).tolist()
    if off == "two":
        policy.keep_past("past")
        policy.peft_model.base_model.set_adapter(["default", "past"])
    with torch.no_grad(), policy.using("base" if off == "base" else None):
        found = read_tree(policy, [ids], [[29]])[1][0]
        assert_close(found, policy.base.model(torch.tensor([ids])).last_hidden_state[0, -1:], atol=1e-5, rtol=0)


def test_adapters_are_changed_as_peft_does_without_its_walks(new_policy, monkeypatch):
    """Its functions walk over all modules thrice, 40 ms each time with SmolLM2-135M: longer than a small step."""
    policy = new_policy()
    policy.keep_past("past")
    for parameter in policy.trainable().values():
        parameter.data += 0.1
    ids, trained = (
        torch.tensor([random_ids(30).tolist()]),
        {n for n, p in policy.trainable().items() if p.requires_grad},
    )
    assert trained

    def told():
        layers = [module for module in policy.peft_model.modules() if hasattr(module, "lora_A")]
        with torch.no_grad():
            return {(m.disable_adapters, *([] if m.disable_adapters else m.active_adapters)) for m in layers}, (
                policy.base.model(ids).last_hidden_state
            )

    expected = {}
    for name in ("past", "default"):
        policy.peft_model.set_adapter(name)
        expected[name] = told()
    with policy.peft_model.disable_adapter():
        expected["base"] = told()
    for name in ("default", "past", "base", "past", "default"):
        with monkeypatch.context() as walks:
            walks.setattr(torch.nn.Module, "named_modules", None)
            context = policy.using(name)
            context.__enter__()
        (state, hidden), (peft_state, peft_hidden) = told(), expected[name]
        assert state == peft_state
        assert torch.equal(hidden, peft_hidden)
        context.__exit__(None, None, None)
        assert {n for n, p in policy.trainable().items() if p.requires_grad} == trained
    assert not torch.equal(expected["base"][1], expected["past"][1])
    assert not torch.equal(expected["default"][1], expected["past"][1])


def test_the_last_layer_runs_only_where_it_is_read(policy, monkeypatch):
    rows, gated = [], network.gated
    monkeypatch.setattr(network, "gated", lambda mlp, x: rows.append(len(x)) or gated(mlp, x))
    texts = random_ids(2, 40).tolist()
    read_tree(policy, sorted(texts), [[39], [12]])
    assert rows == [80, 80, 2]


# ------------------------------------------------------------------------------------------------------ chat format


def template(name):
    return importlib.resources.files("trl").joinpath("chat_templates", f"{name}.jinja").read_text()


def test_the_tiny_tokenizer_is_loaded_as_it_was_trained_and_a_stone_is_one_token(tmp_path):
    texts = prompts(("tic_tac_toe", "leduc_poker", "connect_four"), 60)
    trained = make_tokenizer(texts, 600)
    make_model(len(trained), 32, 1, 0.15, 0).save_pretrained(tmp_path)
    trained.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(model_name=str(tmp_path)))
    assert [loaded.encode(text) for text in texts] == [trained.encode(text) for text in texts]
    assert loaded.tokenize("-a+b+e") == ["-a", "+b", "+e"]
    assert loaded.tokenize("+da-db") == ["+da", "-db"]
    assert len(loaded.tokenize("Ks/Jh crc/r")) == 4
    config = load_architecture(ModelConfig(model_name=str(tmp_path)))
    assert (loaded.eos_token_id, loaded.pad_token_id) == (config.eos_token_id, config.pad_token_id)


def qwen_tokenizer(tiny_models, name):
    """The tiny tokenizer with Qwen's template and the tokens it uses."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_models["qwen2"])
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.chat_template = template(name)
    return tokenizer


TALK = [
    {"role": "system", "content": "You play a game.\nAnswer with an id."},
    {"role": "user", "content": "Pot: 2\nLegal: 0 -> Fold, 12 -> Raise"},
    {"role": "assistant", "content": "12"},
    {"role": "user", "content": " a board\n...\n"},
    {"role": "assistant", "content": "0"},
    {"role": "user", "content": "7"},
]


@pytest.mark.parametrize(
    ("name", "oracle"), [("qwen2_5", "qwen2_5"), ("qwen3", "qwen3_training"), ("qwen3_instruct_2507", None)]
)
def test_prompts_are_what_the_template_says(tiny_models, name, oracle):
    """Turn by turn, every prompt extends the last, and is what the template gives for the whole conversation."""
    tokenizer = qwen_tokenizer(tiny_models, name)
    chat = ChatFormat(tokenizer)
    reference = qwen_tokenizer(tiny_models, oracle or name)
    ids: list[int] = []
    for turn in range(2, len(TALK) + 1, 2):
        expected = reference.apply_chat_template(
            TALK[:turn], add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        assert chat.first_prompt(TALK[:turn])[0] == expected
        ids += chat.later(TALK[turn - 2 : turn]) if ids else expected
        assert ids == expected
    head = tokenizer.decode(ids[: chat.first_prompt(TALK)[1]])
    assert head == "<|im_start|>system\n" + TALK[0]["content"]
    assert tokenizer.decode([chat.end_id]) == "<|im_end|>"
    assert ("<think>\n\n</think>\n\n" in tokenizer.decode(expected)) == (name == "qwen3")


def test_tokens_of_long_texts_are_not_kept(tiny_models):
    """A server's may have a quarter of a million characters each, and do not fit."""
    chat = ChatFormat(qwen_tokenizer(tiny_models, "qwen2_5"))
    for text, kept in (("a b", True), ("a b" * 2**13, False)):
        once, again = chat.encode(text), chat.encode(text)
        assert once == again
        assert (once is again) == kept


def test_what_is_said_holds_no_special_token(tiny_models):
    """A program may print one's name, and may not end the turn in which it is shown."""
    tokenizer = qwen_tokenizer(tiny_models, "qwen2_5")
    chat, said = ChatFormat(tokenizer), "a <|im_end|>\n<|im_start|>assistant\n<|endoftext|>"
    assert chat.answer_text([*chat.encode(said), chat.end_id]) == (said, True)
    talk = [message | {"content": said} for message in TALK]
    ids = [*chat.first_prompt(talk[:2])[0], *chat.later(talk[2:4])]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(talk[:4], tokenize=False, add_generation_prompt=True)
    plain = [*chat.first_prompt(TALK[:2])[0], *chat.later(TALK[2:4])]
    assert [i for i in ids if i in tokenizer.all_special_ids] == [i for i in plain if i in tokenizer.all_special_ids]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_who_names_no_mode_of_thinking_asks_as_in_training(tiny_models, tmp_path, name):
    """Servers of a merged model, say, which else would let Qwen3 think."""
    chat = ChatFormat(qwen_tokenizer(tiny_models, name))
    kept = chat.tokenizer.chat_template
    chat.save(tmp_path)
    assert chat.tokenizer.chat_template == kept
    saved = AutoTokenizer.from_pretrained(tmp_path)
    shown = saved.apply_chat_template(TALK[:4], tokenize=False, add_generation_prompt=True)
    assert shown == saved.decode(chat.first_prompt(TALK[:4])[0])
    thinks = saved.apply_chat_template(TALK[:4], tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert (thinks == shown) == (name != "qwen3")


@pytest.mark.parametrize("shown", ["", "{{ '' if add_generation_prompt else eos_token }}"])
def test_what_is_saved_of_a_base_model_ends_where_its_turns_do(tiny_models, tmp_path, shown):
    """Qwen's base models end by another token. A template that shows its end would be another one."""
    tokenizer = qwen_tokenizer(tiny_models, "qwen2_5")
    tokenizer.eos_token, tokenizer.chat_template = "<|endoftext|>", tokenizer.chat_template + shown
    chat = ChatFormat(tokenizer, tokenizer.eos_token_id)
    chat.save(tmp_path)
    assert tokenizer.convert_ids_to_tokens(chat.ends) == ["<|im_end|>", "<|endoftext|>"]
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == ("<|endoftext|>" if shown else "<|im_end|>")


def test_the_template_that_was_used_is_the_one_that_is_saved(tiny_models):
    tokenizer = qwen_tokenizer(tiny_models, "qwen3")
    ChatFormat(tokenizer)
    assert tokenizer.chat_template == template("qwen3_training")


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}".replace("m.content", "m.role"), "does not show"),
        (
            "{% for m in messages %}{% if m.role == 'assistant' and loop.index > messages|length - 3 %}(old){% endif %}"
            "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{{ '!' if add_generation_prompt }}",
            "rewrites history",
        ),
        ("{% for m in messages %}<|im_end|>{{ m.content.strip('a') }}{% endfor %}<|im_end|>", "around each message"),
    ],
)
def test_templates_that_cannot_be_extended_are_refused(tiny_models, chat_template, message):
    tokenizer = qwen_tokenizer(tiny_models, "qwen2_5")
    tokenizer.chat_template = chat_template
    with pytest.raises(ConfigError, match=message):
        ChatFormat(tokenizer)


@pytest.mark.parametrize("default", [True, False])
def test_of_several_templates_the_default_one_is_used(tiny_models, tmp_path, default):
    folder = shutil.copytree(tiny_models["qwen2"], tmp_path / "base")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 1 / 0 }}")
    told = (folder / "chat_template.jinja").read_text()
    if default:
        assert ChatFormat(load_tokenizer(ModelConfig(str(folder)))).tokenizer.chat_template == told
    else:
        (folder / "chat_template.jinja").unlink()
        with pytest.raises(ConfigError, match="no chat template"):
            ChatFormat(load_tokenizer(ModelConfig(str(folder))))


def test_a_tokenizer_that_merges_digits_is_refused(tiny_models):
    tokenizer = qwen_tokenizer(tiny_models, "qwen2_5")
    tokenizer.add_tokens(["12"])
    with pytest.raises(ConfigError, match="merges digits"):
        ChatFormat(tokenizer)


def test_answer_trie_holds_the_legal_ids_and_nothing_else():
    trie = answer_trie((1, 12, 120, 30))
    assert trie.follow == {"": "13", "1": ".2", "12": ".0", "120": ".", "3": "0", "30": "."}
    assert (trie.longest, trie.last_choice) == (4, 2)
    assert answer_trie((45,)).last_choice == -1


# ---------------------------------------------------------------------------------------------------------- loading


def refusal(config):
    with pytest.raises(ConfigError) as error:
        load_architecture(config)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("model.model_name: ")
    return message


@pytest.mark.parametrize("name", ["models/none", "./none", "/none", "~/none"])
def test_a_missing_folder_is_told_in_one_line(name):
    assert f"no folder {name.removeprefix('./')}" in refusal(ModelConfig(name))


def test_an_adapter_or_a_run_that_is_named_as_the_base_is_told_where_it_belongs(tmp_path):
    """Transformers missed a config.json."""
    (tmp_path / "checkpoint-000020").mkdir()
    (tmp_path / "checkpoint-000020/adapter_config.json").write_text("{}")
    run, adapter = str(tmp_path), str(tmp_path / "checkpoint-000020")
    of_run, of_adapter = refusal(ModelConfig(run)), refusal(ModelConfig(adapter))
    assert of_run.startswith(f"model.model_name: {run} is a run; expected its base. ")
    assert f": --resume {run}, or model.adapter={run}/final; " in of_run
    assert of_adapter.startswith(f"model.model_name: {adapter} is an adapter; expected its base. ")
    assert f": model.adapter={adapter}; " in of_adapter
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))  # a base that was trained further
    assert load_architecture(ModelConfig(run, use_4bit=False)).model_type == "llama"


def test_a_folder_that_is_no_model_is_told_as_such(tmp_path):
    """A library's words were: should have a `model_type` key in its config.json, which is not there."""
    assert refusal(ModelConfig(str(tmp_path))) == f"model.model_name: {tmp_path} is no model: it has no config.json"


def test_a_base_in_the_users_home_is_found_where_no_shell_wrote_its_path_out(tiny_models, monkeypatch):
    folder = Path(tiny_models["qwen2"])
    monkeypatch.setenv("HOME", str(folder.parent))  # as after --set model.model_name=~/qwen2
    assert load_architecture(ModelConfig(f"~/{folder.name}")).model_type == "qwen2"
    assert load_tokenizer(ModelConfig(f"~/{folder.name}")).chat_template


def test_a_tokenizer_of_another_model_is_refused_and_a_word_that_nobody_says_is_not(tiny_models, tmp_path):
    folder = shutil.copytree(tiny_models["qwen2"], tmp_path / "odd")
    tokenizer = load_tokenizer(ModelConfig(str(folder)))
    tokenizer.add_special_tokens({"pad_token": "[MORE]"})  # as some fine-tuned models have it
    tokenizer.save_pretrained(folder)
    assert len(load_tokenizer(ModelConfig(str(folder)))) == len(tokenizer)
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"vocab_size": 99})
    )
    with pytest.raises(ConfigError, match=f"ids up to {len(tokenizer) - 2}, but the model embeds only 99"):
        load_tokenizer(ModelConfig(str(folder)))


def test_other_architectures_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma", "hidden_size": 64}))
    assert "'gemma'" in refusal(ModelConfig(str(tmp_path)))
    for odd in ({"use_sliding_window": True, "max_window_layers": 1}, {"layer_types": ["chunked_attention"] * 2},
                {"per_layer_config": {"1": {"num_key_value_heads": 1}}}):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_hidden_layers": 2} | odd))
        said = refusal(ModelConfig(str(tmp_path)))
        assert "allowed: qwen2, qwen3, llama without sliding windows or layers that differ" in said
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rope_parameters": rope}))
    assert "rope type 'dynamic'" in refusal(ModelConfig(str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    refusal(ModelConfig(str(tmp_path)))


@pytest.mark.parametrize("use_4bit", [False, True])
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan of FOLDER is no positive number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps -1e-06 of FOLDER is no positive number"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta 0 of FOLDER is no positive number"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0 of FOLDER is none of 1 to 2147483648"),
        (
            {"intermediate_size": 65},
            "'FOLDER' holds weights of other shapes than its configuration names: "
            "model.layers.0.mlp.down_proj.weight is [32, 64], not [32, 65] and 8 more",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_its_weights_is_refused(
    tiny_models, tmp_path, caplog, changed, told, use_4bit
):
    folder = shutil.copytree(tiny_models["qwen2"], tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ConfigError) as problem:
        load_model(ModelConfig(str(folder), use_4bit=use_4bit, dtype="float32", device="cpu"), LoraConfig(), 0)
    assert str(problem.value) == f"model.model_name: {told.replace('FOLDER', str(folder))}"
    assert not caplog.records, "no table beside the line"


def test_bases_that_are_kept_quantised_are_refused_but_for_4_bits_where_4_bits_are_asked_for(tmp_path):
    four = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for kept in (four, {"quant_method": "gptq", "bits": 4}, four | {"load_in_4bit": False, "load_in_8bit": True}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": kept}))
        assert "is kept quantised; allowed: weights that are not" in refusal(ModelConfig(str(tmp_path), use_4bit=False))
        if kept == four:
            load_architecture(ModelConfig(str(tmp_path)))
        else:
            refusal(ModelConfig(str(tmp_path)))


def test_a_folder_without_weights_is_told_in_one_line(tiny_models, tmp_path):
    for file in tiny_models["qwen2"].iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = ModelConfig(str(tmp_path), use_4bit=False, device="cpu")
    with pytest.raises(ConfigError, match=r"^model\.model_name: cannot load .*\)$"):
        load_model(config, LoraConfig(), 0)


@pytest.mark.parametrize(("key", "value"), [("target_modules", ["q_proj", "lm_head"]), ("r", 0), ("lora_alpha", -1)])
def test_adapters_that_ppo_cannot_train_are_refused(key, value):
    with pytest.raises(ConfigError, match=f"lora.{key}"):
        load_config({"lora": LoraConfig}, sets=[f"lora.{key}={json.dumps(value)}"])


def test_four_bits_without_bitsandbytes_are_refused_by_name(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^model\.use_4bit: Qwen/Qwen3-4B .* bitsandbytes, which is not installed: "):
        device_of(ModelConfig(device="cpu"))
    assert device_of(ModelConfig(device="cpu", use_4bit=False)) == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_what_needs_a_cuda_device_is_refused_without_one():
    with pytest.raises(ConfigError, match=r"^model\.use_4bit: .* needs a CUDA device .*tiny\.json$"):
        device_of(ModelConfig())
    with pytest.raises(ConfigError, match=r"^model\.device"):
        device_of(ModelConfig(device="cuda", use_4bit=False))
    assert device_of(ModelConfig(device="cpu")) == device_of(ModelConfig(use_4bit=False)) == "cpu"


@pytest.mark.parametrize(("dtype", "there", "told"), [
    ("bfloat16", ["avx2"], True), ("float16", ["avx512_bf16"], True), ("float32", [], False),
    ("bfloat16", ["amx_bf16"], False), ("float16", ["fp16_arith"], False),
])  # fmt: skip
def test_a_type_that_a_cpu_has_no_arithmetic_for_is_told_once(monkeypatch, caplog, dtype, there, told):
    known = dict.fromkeys(("avx2", "avx512_bf16", "amx_bf16", "fp16_arith"), False) | dict.fromkeys(there, True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    _cpu.cache_clear()
    for _ in range(2):
        assert device_of(ModelConfig(device="cpu", use_4bit=False, dtype=dtype)) == "cpu"
    assert [f"this CPU has no {dtype} arithmetic" in line for line in caplog.messages] == [True] * told
    _cpu.cache_clear()


def test_an_adapter_that_does_not_fit_is_told_in_one_line(new_policy, tmp_path):
    new_policy(lora={"target_modules": ("q_proj",)}).save(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_config.json"
    weights.write_text(weights.read_text().replace('"r": 4', '"r": 5'))
    with pytest.raises(ConfigError, match=r"^model\.adapter: cannot load .*\)$"):
        new_policy(model={"adapter": str(tmp_path / "adapter")})


@pytest.mark.slow
def test_loading_says_nothing(tiny_models):
    program = (
        "from types import SimpleNamespace as S; from policy.model import *; from training.config import *\n"
        "from policy import *\n"
        f"load_policy(S(model=ModelConfig({str(tiny_models['qwen2'])!r}, use_4bit=False, dtype='float32',\n"
        "  device='cpu'), lora=LoraConfig(), ppo=PPOConfig(), env=EnvConfig(), run=RunConfig()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_weights_go_to_the_card_of_this_process(tmp_path, monkeypatch):
    """ "cuda" alone is the first card to every thread that loads them, on whichever process."""
    import transformers

    places = []

    def from_pretrained(*args, **kwargs):
        places.append(kwargs["device_map"])
        raise OSError("no weights")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(ConfigError, match="no weights"):
        _load_base(ModelConfig(str(tmp_path), use_4bit=False), "cuda")
    assert places == [{"": 1}]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a knob of glibc")
def test_freed_memory_is_used_again_without_asking_the_kernel(new_policy):
    """In a process of its own, because other tests have set the knob."""
    program = """if True:
        import resource, torch
        from policy.cpu_memory import keep_freed
        faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        def cycle():
            before = faults()
            held = [torch.ones(1 << 22) for _ in range(8)]
            del held
            return faults() - before
        assert keep_freed()
        for _ in range(4):  # until the heap is as large as it gets
            cycle()
        print(cycle() + cycle())
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # pages; without the knob mostly 65,000, but how glibc decides is its own affair


def test_a_base_that_lacks_weights_is_refused_and_none_are_made_up(tiny_models, tmp_path):
    shutil.copytree(tiny_models["qwen2"], tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    lost = [name for name in weights if name.endswith("layers.0.self_attn.q_proj.weight")]
    lost += [name for name in weights if name.endswith("norm.weight")][:1]
    for name in lost:
        del weights[name]
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model.model_name: '.*base' lacks weights: model\.\S+weight and 1 more"):
        load_model(ModelConfig(str(tmp_path / "base"), use_4bit=False, device="cpu", dtype="float32"), LoraConfig(), 0)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a knob of glibc")
def test_holes_between_what_is_in_use_go_back_to_the_kernel():
    program = """if True:
        import re, torch
        from pathlib import Path
        from policy import cpu_memory

        def anonymous():  # pages of libraries come and go
            return 1024 * int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

        cpu_memory.keep_freed()
        cpu_memory.give_back()  # notes what is in use
        cpu_memory.IDLE = 1 << 28
        cpu_memory._libc().malloc_trim(0)  # else what is free already would be used first, or go with the holes
        cpu_memory.give_back()
        before = anonymous()
        held = [torch.ones(1 << 18) for _ in range(1000)]  # a megabyte each
        del held[::2], held[::2], held[::2]
        torn = anonymous()
        cpu_memory.give_back()
        print(torn - before, anonymous() - before, sum(x.nbytes for x in held))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    torn, left, used = map(int, done.stdout.split())
    assert torn > 9e8
    assert used < left < used + 1e8


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a knob of glibc")
def test_what_a_rollout_has_freed_is_not_left_beside_the_update(new_policy):
    policy = new_policy()
    held = [torch.ones(1 << 18) for _ in range(300)]  # a megabyte each
    del held[::2]
    torn = psutil.Process().memory_info().rss
    policy.forget()
    assert psutil.Process().memory_info().rss < torn - 1e8


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a knob of glibc")
def test_what_the_next_pass_needs_is_not_given_back_before_it():
    program = """if True:
        import psutil, torch
        from policy import cpu_memory

        cpu_memory.keep_freed()
        cpu_memory.IDLE = 1 << 28
        before = psutil.Process().memory_info().rss
        for _ in range(4):
            cpu_memory.give_back()
            kept = psutil.Process().memory_info().rss
            del [torch.ones(1 << 18) for _ in range(500)][:]
        print(kept - before)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) > 4e8


def test_what_follows_without_a_choice_is_known_to_its_end():
    trie = answer_trie((3, 12, 140, 141))
    assert [trie.completed(prefix) for prefix in ("3", "1", "12", "14", "140", "12.")] == [
        "3.", "1", "12.", "14", "140.", "12."
    ]  # fmt: skip
    assert answer_trie((3, 120)).completed("1") == "120."


def test_a_base_is_made_anew_when_the_texts_it_reads_change(tmp_path, monkeypatch, capsys):
    said = []
    for games in (("kuhn_poker",), ("kuhn_poker",), ("tic_tac_toe",)):
        monkeypatch.setattr(make_tiny_model, "TEACHING_GAMES", games)
        assert make_tiny_model.main([str(tmp_path / "base"), "--layers", "1", "--hidden", "16"]) == 0
        said.append("already there" in capsys.readouterr().out)
    assert said == [False, True, False]
    [before] = tmp_path.glob("base-*")  # with which the runs of before go on
    recipes = [json.loads((folder / "recipe.json").read_text())["texts"] for folder in (before, tmp_path / "base")]
    assert recipes[0] != recipes[1]
    assert (before / "model.safetensors").is_file()


def test_room_for_tokens_without_number_is_not_asked_for(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        make_tiny_model.main([str(tmp_path / "base"), "--vocab", str(2**31 - 1)])
    assert capsys.readouterr().err.endswith(": expected at least 300 and at most 1048576\n")


def test_a_base_that_cannot_be_made_anew_leaves_the_one_that_was_there(tmp_path, monkeypatch, capsys):
    words = [str(tmp_path / "base"), "--layers", "1", "--hidden", "16"]
    assert make_tiny_model.main(words) == 0
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    monkeypatch.setattr(make_tiny_model, "TEACHING_GAMES", ("tic_tac_toe",))

    class Full:
        def save_pretrained(self, folder):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(make_tiny_model, "make_model", lambda *args: Full())
    assert make_tiny_model.main(words) == 2
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before


@pytest.fixture
def on_the_hub(new_policy, tmp_path, monkeypatch):
    """An adapter in the Hub's cache, and no Hub."""
    import huggingface_hub

    folder = tmp_path / "cache" / "models--me--adapter"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    new_policy().save(folder / "snapshots" / "abc")
    for module in (huggingface_hub.constants, huggingface_hub.file_download):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "cache"), raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    client.hub_problem.cache_clear()
    yield folder / "snapshots" / "abc" / "adapter_model.safetensors"
    client.hub_problem.cache_clear()


def test_an_adapter_of_the_hub_that_is_on_this_disk_needs_no_hub(on_the_hub, new_policy):
    policy = new_policy(model={"adapter": "me/adapter"})
    assert len(known := adapter_digest(policy.config.adapter)) == 64
    save_file({key: tensor + 1 for key, tensor in load_file(on_the_hub).items()}, on_the_hub)
    assert adapter_digest(policy.config.adapter) != known
    with pytest.raises(ConfigError, match=r"^model\.adapter: cannot load 'me/other' \(it is not on this disk, and "):
        new_policy(model={"adapter": "me/other"})


def test_an_error_of_another_kind_is_not_called_a_missing_adapter(on_the_hub, new_policy, monkeypatch):
    """A wrong argument of ours was: adapters of the Hub could never be loaded, and "offline" hid why."""
    monkeypatch.setattr("peft.load_peft_weights", lambda name, **options: unknown)  # noqa: F821
    with pytest.raises(ConfigError, match=r"^model\.adapter: cannot load 'me/adapter' \(name 'unknown' is not defined"):
        new_policy(model={"adapter": "me/adapter"})


def test_no_policy_reads_more_tokens_than_its_model(new_policy):
    """Evaluations of public protocols give any model 32,768 tokens; positions beyond its own are noise."""
    policy = new_policy(ppo={"max_seq_length": 10**6})
    assert policy.max_seq_length == policy.base.config.max_position_embeddings


def test_a_saved_adapter_says_what_it_is_for_and_the_live_one_is_still_trained(new_policy, tmp_path):
    policy = new_policy(model={}, lora={"r": 2})
    policy.peft_model.peft_config["default"].task_type = None
    policy.save(tmp_path / "adapter")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (told["inference_mode"], told["task_type"]) == (True, "CAUSAL_LM")
    assert not policy.peft_model.peft_config["default"].inference_mode
