"""Folders of models and adapters that somebody made: they load and play, or are refused in one line and in time.

``pytest tests/policy/test_hostile_folders.py -s`` prints how many were tried and how they ended.
"""

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import peft
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import base_model, micro_config, tiny_policy
from tiny_runs import train
from tokenizers import Tokenizer, decoders
from transformers import AutoModelForCausalLM

from policy import load_policy
from policy.bounded import check_growth
from policy.model import ModelConfig, _log_with_the_program, load_architecture
from training.process import setup_logging
from utils import ConfigError

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "unknown name": "{{ nothing.at.all }}",
    "no syntax": "{% for %}",
    "an exception": "{{ raise_exception('no\nway') }}",
    "a division": "{{ 1 / 0 }}",
    "a type": "{{ messages + 1 }}",
    "an escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "loops": NESTED,
    "loops in a filter": "{{ range(99999) | map('string') | map('length') | sum }}" * 999,
    "a great power": "{{ 10 ** 10 ** 8 }}",
    "a long text": "{{ 'a' * 10 ** 11 }}",
    "a wide format": "{{ '%999999999999d' % 1 }}",
    "the messages, many times": "{% for i in range(99999) %}{{ messages }}{% endfor %}",
    "a comparison that no signal ends": "{% set at = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set at.a = [at.a, at.a] %}{% set at.b = [at.b, at.b] %}{% endfor %}{{ at.a == at.b }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "nothing": " ",
    "no turns": "hello",
    "the last one only": "{{ messages[-1].content }}",
}


def edited(name, change):
    """Folders in which a file of JSON is changed."""

    def make(folder):
        file = folder / name
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return make


def written(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def piped(name, make=os.mkfifo):
    def put(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return put


def zeros(path):
    path.symlink_to("/dev/zero")


def templated(text):
    def make(folder):
        (folder / "chat_template.jinja").write_text(text)

    return make


def weighed(name, value):
    """The folder's first tensors of a kind hold this value."""

    def make(folder):
        [file] = folder.glob("*.safetensors") if not (folder / name).exists() else [folder / name]
        tensors = load_file(file)
        key = sorted(k for k in tensors if "lora_B" in k or "norm" in k)[0]
        tensors[key] = torch.full_like(tensors[key], value)
        save_file(tensors, file, metadata={"format": "pt"})

    return make


def doubling(folder):
    """A tokenizer that makes a million million letters of one."""
    more = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    edited("tokenizer.json", lambda c: c.update(normalizer={"type": "Sequence", "normalizers": 40 * [more]}))(folder)
    edited("tokenizer_config.json", lambda c: c.update(tokenizer_class="PreTrainedTokenizerFast"))(folder)
    edited("config.json", lambda c: c.update(model_type="llama"))(folder)


def elsewhere(folder):
    """Weights that no other check looks at."""
    (folder / "sub").mkdir()
    os.mkfifo(folder / "sub" / "w.safetensors")
    edited("config.json", lambda c: c.update(transformers_weights="sub/w.safetensors"))(folder)


def huge(*name):
    def make(folder):
        file = folder.joinpath(*name)
        file.parent.mkdir(exist_ok=True)
        file.touch()
        os.truncate(file, 2**40)

    return make


def rarely(folder):
    """A tokenizer that makes a million million letters of words that only prompts of games hold."""
    word = {"type": "Replace", "pattern": {"String": "Legal Actions"}, "content": "\u0101"}
    more = {"type": "Replace", "pattern": {"String": "\u0101"}, "content": "\u0101" * 1000}
    steps = {"type": "Sequence", "normalizers": [{"type": "NFC"}, word, *[more] * 4]}
    edited("tokenizer.json", lambda c: c.update(normalizer=steps))(folder)
    edited("tokenizer_config.json", lambda c: c.update(tokenizer_class="PreTrainedTokenizerFast"))(folder)
    edited("config.json", lambda c: c.update(model_type="llama"))(folder)


EXPONENTIAL = r"(([a-z_.0-9]+)+)+!"
MODELS = {
    **{f"template: {name}": templated(text) for name, text in TEMPLATES.items()},
    **{f"{key} {value!r:.9}": edited("config.json", lambda c, k=key, v=value: c.update({k: v}))
       for key, value in (("hidden_size", 2**40), ("num_hidden_layers", 10**9), ("vocab_size", -1),
                          ("intermediate_size", 2**60), ("num_attention_heads", 0), ("hidden_size", "32"),
                          ("model_type", []), ("rope_parameters", {"rope_type": 7}), ("torch_dtype", "float7"),
                          ("num_labels", 3 * 10**6), ("num_labels", 10**30), ("partial_rotary_factor", 0.5),
                          ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}))},
    **{f"generation_config.json {data[:5]!r}": written("generation_config.json", data) for data in (b"{", b"[]")},
    "fewer weights than named": edited("config.json", lambda c: c.update(intermediate_size=2**18)),
    "larger heads than held": edited("config.json", lambda c: c.update(head_dim=2**14)),
    "an index that leads elsewhere": written("model.safetensors.index.json", b'{"weight_map": {"a": "sub/pipe"}}'),
    "an end that is a list": edited("generation_config.json", lambda c: c.update(eos_token_id=[[0]])),
    "a tokenizer that doubles": doubling, "a tokenizer that doubles rare words": rarely,
    "weights somewhere else": elsewhere, "a template without end": huge("additional_chat_templates", "a.jinja"),
    **{key: edited(file, lambda c, k=key: c.update({k: ["sub/x.json"]}))
       for key, file in (("configuration_files", "config.json"), ("fast_tokenizer_files", "tokenizer_config.json"),
                         ("gguf_file", "tokenizer_config.json"), ("vocab", "tokenizer_config.json"))},
    **{f"{name} is a {make.__name__}": piped(name, make)
       for name in ("config.json", "tokenizer.json", "model.safetensors") for make in (os.mkfifo, zeros)},
    **{f"{name} {data[:5]!r}": written(name, data) for name in ("config.json", "tokenizer.json")
       for data in (b"", b"[" * 10**5, b"\xff\x00", b'{"a": ' + b"9" * 5000 + b"}")},
    "no token for a digit": edited("tokenizer.json", lambda c: c.update(
        model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "u"})),
    "a length of words": edited("tokenizer_config.json", lambda c: c.update(model_max_length="x")),
    "no tokenizer.json": lambda folder: (folder / "tokenizer.json").unlink(),
    "weights of a great header": written("model.safetensors", b"\xff" * 8 + b"{}"),
    "weights without bytes": written("model.safetensors", b""),
    "a tokenizer as large as the disk": lambda folder: os.truncate(folder / "tokenizer.json", 2**40),
    "not a number": weighed("model.safetensors", torch.nan),
    "infinite": weighed("model.safetensors", torch.inf),
}  # fmt: skip
ADAPTERS = {
    **{f"{key} {value!r:.20}": edited("adapter_config.json", lambda c, k=key, v=value: c.update({k: v}))
       for key, value in (("target_modules", EXPONENTIAL), ("target_modules", "("), ("target_modules", 7), ("r", -1),
                          ("r", 10**9), ("rank_pattern", {EXPONENTIAL: 3}), ("exclude_modules", EXPONENTIAL),
                          ("peft_type", "NONE"), ("lora_alpha", "x"), ("target_modules", ["lm_head"]))},
    **{f"{name} is a {make.__name__}": piped(name, make)
       for name in ("adapter_config.json", "adapter_model.safetensors") for make in (os.mkfifo, zeros)},
    "deep": written("adapter_config.json", b"[" * 10**5),
    "weights cut off": lambda folder: os.truncate(folder / "adapter_model.safetensors", 1000),
    "not a number": weighed("adapter_model.safetensors", torch.nan),
    "finite, and ruined": weighed("adapter_model.safetensors", 1e38),
}  # fmt: skip
# Whose limits nothing else in the quick suite holds, and what is said of them.
QUICK = {
    "num_labels 3000000": "num_labels 3000000 of ", "partial_rotary_factor 0.5": "partial_rotary_factor 0.5 of ",
    "rope_scaling {'rope_ty": "partial_rotary_factor 0.25 of ",
    "generation_config.json b'{'": "generation_config.json: is no JSON object",
    "generation_config.json b'[]'": "generation_config.json: is no JSON object",
    "fewer weights than named": " bytes of weights, and its ", "larger heads than held": " bytes of weights, and its ",
    "an index that leads elsewhere": "expected a file beside it", "an end that is a list": "has the eos_token_id [0]",
    "a tokenizer that doubles": " may make ", "a tokenizer that doubles rare words": " may make 1000000000000 ",
    "weights somewhere else": "transformers_weights of ", "a template without end": "a.jinja",
    "configuration_files": "configuration_files of ", "fast_tokenizer_files": "fast_tokenizer_files of ",
    "gguf_file": "gguf_file of ", "vocab": "vocab of ",
}  # fmt: skip
ALL = [("model_name", name) for name in MODELS] + [("adapter", name) for name in ADAPTERS]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Knob -> a sound folder of it."""
    adapter = tmp_path_factory.mktemp("sound") / "adapter"
    tiny_policy(tmp_path_factory.mktemp("policy")).save(adapter)
    return {"model_name": Path(base_model()), "adapter": adapter}


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_folder_hangs_or_is_more_than_a_line(sound, tmp_path, monkeypatch, capfd, many):
    monkeypatch.setattr("policy.chat.TEMPLATE_SECONDS", 0.5)
    monkeypatch.setattr("policy.model.ADAPTER_SECONDS", 3.0)
    assert len(ALL) >= 40
    loaded = []
    few = [*ALL[::4], *(("model_name", name) for name in QUICK)]
    for n, (key, name) in enumerate(ALL if many else few):
        folder, start = tmp_path / str(n), time.monotonic()
        shutil.copytree(sound[key], folder)
        {"model_name": MODELS, "adapter": ADAPTERS}[key][name](folder)
        try:
            load_policy(micro_config(tmp_path, model={key: str(folder)})).check()
            loaded.append(name)
        except ConfigError as error:
            line = str(error)
            assert line.startswith(f"model.{key}: "), (key, name, line)
            assert "\n" not in line, (key, name, line)
            assert len(line) < 700, (key, name, line)
            assert QUICK.get(name, "") in line, (key, name, line)
        assert time.monotonic() - start < 15, (key, name)
        shutil.rmtree(folder)
    assert "Traceback" not in capfd.readouterr().err
    assert set(loaded) <= {"torch_dtype 'float7'"}  # model.dtype decides


def test_a_template_that_no_signal_ends_outlives_nobody(tmp_path):
    """Whoever would have ended its process was killed first: it computed for ever."""
    code = """
import os, sys; sys.path.insert(0, {root!r})
from policy.bounded import apart

def work():
    print(os.getpid(), flush=True)
    a, b = [1], [1]
    for _ in range(60):
        a, b = [a, a], [b, b]
    return str(a == b)

apart(work, 0.5, 2**40)
"""
    command = [sys.executable, "-c", code.format(root=str(Path(__file__).parents[2]))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "it still computes"
            time.sleep(0.1)


def test_a_tokenizer_as_they_are_may_replace_spaces(sound, tmp_path):
    """As SentencePiece's do: a mark for each space, and one before the text."""
    folder = shutil.copytree(sound["model_name"], tmp_path / "model")
    steps = [{"type": "Prepend", "prepend": "\u2581"},
             {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]  # fmt: skip
    edited("tokenizer.json", lambda c: c.update(normalizer={"type": "Sequence", "normalizers": steps}))(folder)
    check_growth(Tokenizer.from_file(str(folder / "tokenizer.json")), "one")
    check_growth(None, "one without")


def test_a_tokenizer_may_make_little_more_of_an_answer_either():
    """What a model says is put together by its decoder."""
    rust = Tokenizer.from_file(f"{base_model()}/tokenizer.json")
    more = decoders.Replace("a", "a" * 1000)
    rust.decoder = decoders.Sequence([rust.decoder, more, more])
    with pytest.raises(
        ConfigError, match=r"^model\.model_name: the tokenizer of mine may make 1000000 characters of one; "
    ):
        check_growth(rust, "mine")


def test_a_model_on_the_hub_names_no_other_files_either(monkeypatch):
    found = ({"model_type": "qwen2", "transformers_weights": "sub/w.safetensors"}, {})
    monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", lambda *_, **__: found)
    with pytest.raises(
        ConfigError, match=r"^model\.model_name: transformers_weights of owner/name names files to read "
    ):
        load_architecture(ModelConfig(model_name="owner/name"))


def test_a_template_that_no_signal_ends_is_killed(sound, tmp_path, monkeypatch):
    monkeypatch.setattr("policy.chat.TEMPLATE_SECONDS", 0.1)
    folder = shutil.copytree(sound["model_name"], tmp_path / "model")
    MODELS["template: a comparison that no signal ends"](folder)
    with pytest.raises(ConfigError, match=r"its chat template fails: TimeoutError it takes more than 0\.1 s$"):
        load_policy(micro_config(tmp_path, model={"model_name": str(folder)}))


@pytest.mark.parametrize("name", ["no token for a digit", "a length of words"])
def test_a_tokenizer_that_gives_no_tokens_is_refused(sound, tmp_path, name):
    folder = shutil.copytree(sound["model_name"], tmp_path / "model")
    MODELS[name](folder)
    with pytest.raises(ConfigError, match=r"^model\.model_name: its tokenizer gives no tokens: "):
        load_policy(micro_config(tmp_path, model={"model_name": str(folder)}))


def refusals(policy, folder):
    """What is said of an adapter to start from, and of one beside others."""
    with pytest.raises(ConfigError) as alone:
        tiny_policy(folder.parent, model={"adapter": str(folder)})
    with pytest.raises(ConfigError) as beside:
        policy.add_adapter("other", folder)
    assert list(policy.peft_model.peft_config) == ["default"]
    return str(alone.value), str(beside.value)


@pytest.mark.filterwarnings("ignore")  # of settings that kinds do not share
def test_adapters_that_are_no_lora_or_change_the_base_are_refused(sound, tmp_path):
    """The base is what the reference, past selves and the KL are read with."""
    policy = tiny_policy(tmp_path)
    before = {name: p.clone() for name, p in policy.peft_model.named_parameters()}
    kinds = [("peft_type", kind, "allowed: LORA") for kind in ("IA3", "LN_TUNING")]
    kinds += [(key, value, f"is not plain LoRA: {key} is set in its adapter_config.json")
              for key, value in (("layer_replication", [[0, 1]]), ("alora_invocation_tokens", [3]))]  # fmt: skip
    kinds += [(key, value, "(rank 65536 is named and 4 is held)")
              for key, value in (("r", 2**16), ("rank_pattern", {"q_proj": 2**16}))]  # fmt: skip
    kinds += [("init_lora_weights", init, "path_initial_model_for_weight_conversion)")
              for init in ("pissa", "pissa_niter_4", "OLoRA", "corda")]  # fmt: skip
    for n, (key, value, told) in enumerate(kinds):
        folder = shutil.copytree(sound["adapter"], tmp_path / str(n))
        edited("adapter_config.json", lambda c, key=key, value=value: c.update({key: value}))(folder)
        [said] = set(refusals(policy, folder))
        assert said.startswith("model.adapter: ")
        assert f"'{folder}' " in said
        assert told in said
    after = dict(policy.peft_model.named_parameters())
    assert all(torch.equal(p, after.pop(name)) for name, p in before.items())
    assert not after


@pytest.mark.parametrize(("options", "named"), [
    ({"modules_to_save": ["norm"]}, "norm.weight"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens."),
    ({"target_modules": ["q_proj", "lm_head"]}, "lm_head."),
    ({"trainable_token_indices": [3, 4]}, "embed_tokens.token_adapter.trainable_tokens_delta"),
    ({"bias": "all"}, "_proj.bias"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # of tied embeddings
def test_what_would_be_in_an_adapter_and_not_be_trained_is_refused(tmp_path, options, named):
    base = AutoModelForCausalLM.from_pretrained(base_model())
    options = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options
    peft.get_peft_model(base, peft.LoraConfig(r=2, **options)).save_pretrained(tmp_path / "adapter")
    for said in refusals(tiny_policy(tmp_path), tmp_path / "adapter"):
        assert "holds more than LoRA on linear layers below the output layer: base_model.model." in said
        assert named in said


def test_an_adapter_for_more_layers_than_it_is_put_on_is_refused(sound, tmp_path):
    folder = shutil.copytree(sound["adapter"], tmp_path / "adapter")
    edited("adapter_config.json", lambda c: c.update(layers_to_transform=[0]))(folder)
    for said in refusals(tiny_policy(tmp_path), folder):
        assert " holds weights that have no place in the model: base_model.model.model.layers.1." in said


def test_no_file_of_an_adapter_is_copied_over_what_players_share(sound, tmp_path):
    """Names that PEFT finds in the model as they are: of the base, and of an adapter that is put on already."""
    policy = tiny_policy(tmp_path)
    before = {name: p.clone() for name, p in policy.peft_model.named_parameters()}
    for n, name in enumerate(["norm.weight", "embed_tokens.weight", "layers.0.self_attn.q_proj.base_layer.weight",
                              "layers.0.self_attn.q_proj.lora_A.default.weight"]):  # fmt: skip
        name, folder = f"base_model.model.model.{name}", shutil.copytree(sound["adapter"], tmp_path / str(n))
        tensors = load_file(folder / "adapter_model.safetensors") | {name: torch.zeros_like(before[name])}
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        [said] = set(refusals(policy, folder))
        assert said.endswith(f" holds more than LoRA on linear layers below the output layer: {name}")
    after = dict(policy.peft_model.named_parameters())
    assert all(torch.equal(p, after[name]) for name, p in before.items())


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=str)
@pytest.mark.filterwarnings("ignore")  # of a shape that PEFT itself gave
def test_kinds_of_lora_that_leave_the_base_alone_can_be_used(tmp_path, options):
    base = AutoModelForCausalLM.from_pretrained(base_model())
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    peft.get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    tiny_policy(tmp_path).add_adapter("other", tmp_path / "adapter")


def test_the_program_says_so_before_and_in_a_run(sound, tmp_path, capsys):
    """An adapter of infinities, by the command line."""
    folder = tmp_path / "adapter"
    shutil.copytree(sound["adapter"], folder)
    ADAPTERS["not a number"](folder)
    assert train(tmp_path, model={"adapter": str(folder)}) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: model.adapter: '{folder}' cannot be used: the weights are ruined: ")


@pytest.mark.parametrize("library", ["transformers", "huggingface_hub"])
def test_a_library_with_a_handler_of_its_own_is_heard_once(library, capsys):
    setup_logging()
    logging.getLogger(library).addHandler(logging.StreamHandler())
    _log_with_the_program()
    logging.getLogger(library).warning("a line")
    assert capsys.readouterr().err == "WARNING: a line\n"


def test_what_transformers_logs_is_the_programs_own_log(sound, tmp_path, capsys, monkeypatch):
    """Once, in one line, without secrets and control characters: it quotes the folder's files."""
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    folder = shutil.copytree(sound["model_name"], tmp_path / "model")
    edited("config.json", lambda c: c.update(rope_parameters={"rope_type": "\x1b[2J0123456789abcdef"}))(folder)
    assert train(tmp_path, model={"model_name": str(folder)}) == 2
    said = capsys.readouterr().err
    assert [line.split(":")[0] for line in said.splitlines()] == ["WARNING", "error"], said
    assert "rope" in said.splitlines()[0]
    assert "\x1b" not in said
    assert "0123456789abcdef" not in said
