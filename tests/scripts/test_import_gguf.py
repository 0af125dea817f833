"""scripts/import_gguf.py: a GGUF file becomes a folder that a policy loads, with the logits it had; or one line."""

import copy
import functools
import json
import os
import tempfile

import numpy
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from policy.model import LINEARS
from scripts import import_gguf

gguf = pytest.importorskip("gguf")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = dict(zip(LINEARS, ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), strict=True))
PARTS |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write_gguf(path, model, words, architecture="llama", without=(), add=lambda writer: None):
    """The tiny Llama in a file as llama.cpp writes it: query and key rows of each head in its own order."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = sorted(words["model"]["vocab"], key=words["model"]["vocab"].get)
    added = sorted(words["added_tokens"], key=lambda token: token["id"])
    tokens = [*tokens, *(t["content"] for t in added if t["content"] not in tokens)]
    order = {t["content"]: t["id"] for t in added} | words["model"]["vocab"]
    tokens.sort(key=order.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in {a["content"] for a in added} else 1 for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in words["model"]["merges"]])
    writer.add_eos_token_id(order["<|im_end|>"])
    writer.add_bos_token_id(order["<|im_start|>"])
    writer.add_chat_template(TEMPLATE)
    add(writer)
    for name, tensor in model.state_dict().items():
        if name in without:
            continue
        parts = name.split(".")
        if name == "model.embed_tokens.weight":
            name = "token_embd.weight"
        elif name == "model.norm.weight":
            name = "output_norm.weight"
        elif parts[1] == "layers":
            name = f"blk.{parts[2]}.{PARTS[parts[-2]]}.weight"
            if parts[-2] in heads:
                tensor = tensor.unflatten(0, (heads[parts[-2]], 2, -1)).transpose(1, 2).flatten(0, 2)
        else:
            continue
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source(tiny_models):
    model = AutoModelForCausalLM.from_pretrained(tiny_models["llama"], dtype=torch.float32).eval()
    return model, json.loads((tiny_models["llama"] / "tokenizer.json").read_text())


def test_the_folder_holds_the_model_that_the_file_held(source, tmp_path, new_policy):
    model, words = source
    write_gguf(tmp_path / "tiny.gguf", model, words)
    folder = tmp_path / "made"
    assert import_gguf.main([str(tmp_path / "tiny.gguf"), str(folder), "--dtype", "float32"]) == 0
    read = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(60)[None]
    with torch.no_grad():
        assert_close(read(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("Raise 120, fold.")) == "Raise 120, fold."
    assert new_policy(str(folder)).chat.end_id == tokenizer.eos_token_id
    assert import_gguf.main([str(tmp_path / "tiny.gguf"), str(folder)]) == 2, "nothing is written over"


def refusal(capsys, *args):
    assert import_gguf.main([str(arg) for arg in args]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert os.path.join(tempfile.gettempdir(), "tmp") not in line  # a folder that is gone by now
    return line


def test_what_cannot_be_used_is_told_in_one_line(source, tmp_path, capsys):
    model, words = source
    assert refusal(capsys, tmp_path / "none.gguf", tmp_path / "out").endswith("no such file")
    assert refusal(capsys, tmp_path, tmp_path / "out").endswith("is a folder; expected a file .gguf")
    (tmp_path / "text.gguf").write_text("no GGUF")
    assert "cannot" in refusal(capsys, tmp_path / "text.gguf", tmp_path / "out")
    write_gguf(tmp_path / "gemma2.gguf", model, words, "gemma2")
    assert "'gemma2'" in refusal(capsys, tmp_path / "gemma2.gguf", tmp_path / "out")
    vocab, last = words["model"]["vocab"], "".join(words["model"]["merges"][-1])
    both = {"merges": [*words["model"]["merges"][:-1], ["1", "2"]]}
    both["vocab"] = {token: i for token, i in vocab.items() if token != last} | {"12": vocab[last]}
    write_gguf(tmp_path / "merged.gguf", model, words | {"model": both})
    assert "merges digits" in refusal(capsys, tmp_path / "merged.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_text_is_cut_as_the_file_says(source, tmp_path, capsys):
    """SmolLM keeps digits apart from the spaces before them; GPT-2 takes the last of these along."""
    cut = {}
    for name in ("smollm", "gpt-2", "qwen2"):
        write_gguf(tmp_path / f"{name}.gguf", *source, add=lambda writer, name=name: writer.add_tokenizer_pre(name))
        assert import_gguf.main([str(tmp_path / f"{name}.gguf"), str(tmp_path / name)]) == 0
        words = AutoTokenizer.from_pretrained(tmp_path / name).backend_tokenizer.pre_tokenizer
        cut[name] = [part for part, _ in words.pre_tokenize_str("\n  07")]
    assert cut == {"smollm": ["\u010a\u0120\u0120", "0", "7"], "gpt-2": ["\u010a\u0120", "\u012007"],
                   "qwen2": ["\u010a", "\u0120", "\u0120", "0", "7"]}  # fmt: skip
    write_gguf(tmp_path / "odd.gguf", *source, add=lambda writer: writer.add_tokenizer_pre("of tomorrow"))
    assert "'of tomorrow': how it splits text is not known" in refusal(capsys, tmp_path / "odd.gguf", tmp_path / "out")


def test_what_would_be_left_out_in_silence_is_refused(source, tmp_path, capsys):
    scaled = gguf.RopeScalingType.LINEAR
    write_gguf(tmp_path / "long.gguf", *source, add=lambda writer: writer.add_rope_scaling_type(scaled))
    told = refusal(capsys, tmp_path / "long.gguf", tmp_path / "out")
    assert "llama.rope.scaling.type 'linear': scaled positions are not supported" in told
    for key, harmless in (("scaling.factor", 1.0), ("scale_linear", 0.0), ("scaling.attn_factor", 1.0)):
        for value in (harmless, 4.0):
            add = functools.partial(gguf.GGUFWriter.add_float32, key=f"llama.rope.{key}", val=value)
            write_gguf(tmp_path / "long.gguf", *source, add=add)
            if value == harmless:
                assert import_gguf.read_pre_tokenizer(tmp_path / "long.gguf") == ""
            else:  # without a type, which llama.cpp takes for linear
                told = refusal(capsys, tmp_path / "long.gguf", tmp_path / "out")
                assert f"llama.rope.{key} 4.0: scaled positions are not supported" in told
    factors = numpy.ones(4, dtype="float32")
    odd = [("rope_freqs.weight", "llama"), ("blk.0.attn_q_norm.weight", "llama"), ("blk.0.attn_k_norm.weight", "qwen2")]
    odd += [(f"blk.1.attn_{x}.bias", architecture) for x in "qkv" for architecture in ("llama", "qwen3")]
    for name, architecture in odd:
        add = functools.partial(gguf.GGUFWriter.add_tensor, name=name, tensor=factors)
        write_gguf(tmp_path / "more.gguf", *source, architecture, add=add)
        told = refusal(capsys, tmp_path / "more.gguf", tmp_path / "out")
        assert f"'{name}': a tensor that has no place in the model" in told, architecture


def test_a_header_that_does_not_fit_its_tensors_makes_no_model(source, tmp_path, capsys, monkeypatch):
    """transformers makes up what is missing, drops layers beyond the count, and computes with any epsilon."""
    numbers, shapes = "is no positive number)", "holds weights of other shapes than its configuration names: model."
    for method, value, told in (
        ("block_count", 2, "('blk.2.attn_q.weight': a tensor that has no place in the model)"),
        ("block_count", None, "(lacks llama.block_count)"),
        ("feed_forward_length", 2**18, " bytes of weights, and its configuration names more than 75,519,488 numbers)"),
        ("layer_norm_rms_eps", None, "(lacks llama.attention.layer_norm_rms_epsilon)"),
        ("layer_norm_rms_eps", float("nan"), numbers),
        ("layer_norm_rms_eps", -1.0, numbers),
        ("rope_freq_base", 0.0, numbers),
        ("context_length", 0, "is none of 1 to 2147483648)"),
        ("feed_forward_length", 17, f"{shapes}layers.0.mlp.down_proj.weight is [32, 64], not [32, 17] and 8 more"),
        ("vocab_size", 5, f"{shapes}embed_tokens.weight is [400, 32], not [5, 32]"),
        ("chat_template", None, "(its tokenizer has no chat template; choose a chat (Instruct) model)"),
    ):
        with monkeypatch.context() as patch:
            write = getattr(gguf.GGUFWriter, f"add_{method}")
            changed = (lambda *_: None) if value is None else lambda writer, _, w=write, v=value: w(writer, v)
            patch.setattr(gguf.GGUFWriter, f"add_{method}", changed)
            write_gguf(tmp_path / "odd.gguf", *source)
        line = refusal(capsys, tmp_path / "odd.gguf", tmp_path / "out")
        assert line.endswith(told), (method, value, line)
        assert line.startswith(f"error: {tmp_path / 'odd.gguf'}"), line
    assert not (tmp_path / "out").exists()


def test_layers_without_number_are_refused_before_a_list_of_them_is_made(source, tmp_path, capsys, monkeypatch):
    """transformers would name the kind of each: gigabytes for a file of 400 bytes."""
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_block_count", lambda writer, _: writer.add_uint32("qwen2.block_count", 2**31)
    )
    write_gguf(tmp_path / "deep.gguf", *source, "qwen2")
    line = refusal(capsys, tmp_path / "deep.gguf", tmp_path / "out")
    assert line.endswith(f"(num_hidden_layers 2147483648 of {tmp_path} is none of 1 to 1000)")


def test_what_lies_beside_the_file_is_nobody_s_business(source, tmp_path):
    """A folder of downloads holds anything; a chat template or settings of another model there are not this file's."""
    beside = tmp_path / "downloads"
    (beside / "pictures.json").mkdir(parents=True)
    (beside / "tokenizer_config.json").write_text("{")
    (beside / "chat_template.jinja").write_text("{{ nothing.at.all }}")
    os.mkfifo(beside / "notes.txt")
    write_gguf(beside / "model.gguf", *source)
    assert import_gguf.main([str(beside / "model.gguf"), str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "chat_template.jinja").exists() or "nothing.at.all" not in (
        tmp_path / "out" / "chat_template.jinja").read_text()  # fmt: skip


def test_a_file_without_all_weights_or_with_ruined_ones_makes_no_model(source, tmp_path, capsys):
    model, words = source
    lost = "model.layers.0.self_attn.q_proj.weight"
    write_gguf(tmp_path / "lacks.gguf", model, words, without=(lost,))
    assert refusal(capsys, tmp_path / "lacks.gguf", tmp_path / "out") == (
        f"error: {tmp_path / 'lacks.gguf'}: lacks weights: {lost}"
    )
    ruined = copy.deepcopy(model)
    ruined.model.norm.weight.data[0] = torch.nan
    write_gguf(tmp_path / "ruined.gguf", ruined, words)
    line = refusal(capsys, tmp_path / "ruined.gguf", tmp_path / "out")
    assert line == f"error: {tmp_path / 'ruined.gguf'}: model.norm.weight holds numbers that are not finite"
    (tmp_path / "empty.gguf").write_bytes(b"")
    assert refusal(capsys, tmp_path / "empty.gguf", tmp_path / "out").startswith(f"error: {tmp_path / 'empty.gguf'}: ")
    assert not (tmp_path / "out").exists()


def test_a_model_that_could_not_be_written_whole_is_not_there(tmp_path, capsys, monkeypatch):
    class Large:
        def save_pretrained(self, folder):
            (folder / "config.json").write_text("{}")
            raise OSError(27, "File too large")

    monkeypatch.setattr(import_gguf, "load", lambda *_: (Large(), Large()))
    assert "File too large" in refusal(capsys, tmp_path / "a.gguf", tmp_path / "out")
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refusal(capsys, tmp_path / "a.gguf", tmp_path / "file" / "out")


def test_what_a_link_leads_to_is_written(source, tmp_path):
    write_gguf(tmp_path / "a.gguf", *source)
    (tmp_path / "disk").mkdir()
    for name, target in (("link", "disk"), ("ahead", "not_yet")):
        (tmp_path / name).symlink_to(target)
        assert import_gguf.main([str(tmp_path / "a.gguf"), str(tmp_path / name)]) == 0
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / target / "config.json").is_file()
