"""What --dry-run tells: its counts against real models, its estimates against what really happens."""

import contextlib
import json
import re
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file
from shapes import SHAPES, write_model
from tiny import KUHN, LEDUC, base_model, micro_config, micro_file

import train_ppo
import utils
from curriculum import eval_tasks, evaluated
from env_wrapper import Decision, EnvConfig, Sequence
from envs.prompts import RETRY
from envs.trace.env import TASKS_PER_LEVEL, NoAnswerError, expected_output
from envs.trace.sandbox import SandboxError
from evaluation.measure import evaluate
from games import CONFIGS_PER_GAME, NAMES
from policy import load_policy, network
from policy.chat import ChatFormat
from policy.model import LoraConfig, ModelConfig, load_architecture, load_model, load_tokenizer
from policy.network import activation_bytes
from scripts.export import proof
from scripts.make_tiny_model import make_model
from train_ppo import Trainer
from training import memory, preflight, token_counts
from training.config import DEFAULT_FILES, load_sections
from training.memory import count_parameters
from training.process import StopSignal
from utils import ConfigError

PRESETS = Path(train_ppo.__file__).parent / "config" / "presets"
LINEAR_SETS = [["q_proj", "v_proj"], list(LoraConfig().target_modules)]


def stage(*games, **options):
    tasks = [[NAMES.index(name) * CONFIGS_PER_GAME] * 2 for name in games]
    return {"stages": [{"name": "only", "games": tasks, **options}]}


def model_folder(folder, architecture="qwen2", layers=2, hidden=64, tied=True):
    """A random base of its own size; the tokenizer is none of its business."""
    model = make_model(400, hidden, layers, 0.15, 0, architecture)
    if not tied:
        model.config.tie_word_embeddings = False
        model = type(model)(model.config)
    model.save_pretrained(folder)
    return str(folder)


def chat_of(config):
    return ChatFormat(load_tokenizer(config.model))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return {name: write_model(name, tmp_path_factory.mktemp("shape") / name) for name in SHAPES}


# ----------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("targets", LINEAR_SETS, ids=["two", "all"])
@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), ("qwen3", True), ("qwen3", False)])
def test_parameters_are_those_of_the_real_model(tmp_path, architecture, tied, targets):
    folder = model_folder(tmp_path / "base", architecture, tied=tied)
    config = micro_config(tmp_path, lora={"target_modules": targets, "r": 5})
    tokenizer_folder = config.model.model_name
    load_tokenizer(config.model).save_pretrained(folder)
    config = micro_config(tmp_path, model={"model_name": folder}, lora={"target_modules": targets, "r": 5})
    assert tokenizer_folder != folder
    policy = load_policy(config)
    counted = memory.count_parameters(config.lora, load_architecture(config.model))
    real = sum(p.numel() for p in policy.peft_model.parameters()) + sum(
        p.numel() for p in policy.value_head.parameters()
    )
    assert counted.trainable == sum(p.numel() for p in policy.trainable().values())
    assert counted.total == real


@pytest.mark.parametrize(("name", "published"), zip(SHAPES, (3_085_938_688, 4_022_468_096), strict=True))
def test_parameters_of_the_true_shapes_are_the_published_ones(tmp_path, shapes, name, published):
    config = micro_config(tmp_path, model={"model_name": str(shapes[name])}, lora={"r": 16})
    counted = memory.count_parameters(config.lora, load_architecture(config.model))
    assert sum(counted.linears) + counted.other == published


# ---------------------------------------------------------------------------------------------------------- memory


def held_bytes(base):
    """Bytes of everything a loaded base holds, the constants of its 4-bit layers included, shared tensors once."""
    tensors = [p.data for n, p in base.named_parameters() if "lora_" not in n]
    for parameter in base.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            tensors += [state.absmax, state.code]
            tensors += [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_4_bit_weights_take_what_was_estimated(tmp_path, architecture, nested):
    folder = model_folder(tmp_path / "base", architecture, hidden=128)
    model = {"use_4bit": True, "use_nested_quant": nested, "dtype": "bfloat16"}
    config = micro_config(tmp_path, model=model)
    load_tokenizer(config.model).save_pretrained(folder)
    config = micro_config(tmp_path, model={**model, "model_name": folder})
    base, _ = load_model(config.model, config.lora, 0)
    counted = memory.count_parameters(config.lora, load_architecture(config.model))
    assert memory.weight_bytes(counted, config.model) == pytest.approx(held_bytes(base), rel=0.001)


def test_nested_quantisation_saves_what_its_paper_says(tmp_path, shapes):
    def bits(**model):
        config = micro_config(tmp_path, model={"model_name": str(shapes["Qwen3-4B"]), **model})
        counted = memory.count_parameters(config.lora, load_architecture(config.model))
        plain = counted.other * 4
        return 8 * (memory.weight_bytes(counted, config.model) - plain) / sum(counted.linears)

    assert bits(use_4bit=True, use_nested_quant=False) == pytest.approx(4.5, abs=0.001)
    assert bits(use_4bit=True, use_nested_quant=True) == pytest.approx(4.127, abs=0.001)
    assert bits(use_4bit=False) == 32


def saved_bytes(policy, tokens):
    """Bytes that autograd keeps for the backward pass of one sequence, weights aside."""
    weights = {
        t.untyped_storage().data_ptr() for t in [*policy.peft_model.parameters(), *policy.value_head.parameters()]
    }
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = [5] * tokens + [6]
    decision = Decision(tokens, tokens + 1, [tokens - 1], [6], [[5, 6]], [0.0])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = policy.evaluate_decisions([Sequence(ids, [decision])])
    assert result.logprobs.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


# In fp32 adapter and base may be merged for the product, which keeps a matrix a layer instead of r numbers a token.
@pytest.mark.parametrize(("dtype", "off"), [("float32", 0.06), ("bfloat16", 0.001)])
@pytest.mark.parametrize("targets", LINEAR_SETS, ids=["two", "all"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_a_layer_keeps_the_activations_that_were_estimated(tmp_path, architecture, targets, dtype, off):
    tokens, saved = 2048, []
    for layers in (3, 4):
        folder = model_folder(tmp_path / f"base{layers}", architecture, layers)
        load_tokenizer(micro_config(tmp_path).model).save_pretrained(folder)
        model = {"model_name": folder, "dtype": dtype, "gradient_checkpointing": False}
        config = micro_config(tmp_path, model=model, lora={"target_modules": targets}, ppo={"max_seq_length": 4096})
        saved.append(saved_bytes(load_policy(config), tokens))
    estimate = activation_bytes(load_architecture(config.model), targets, getattr(torch, dtype).itemsize) * tokens
    assert estimate == pytest.approx(saved[1] - saved[0], rel=off)


def estimated(folder, **sections):
    config = micro_config(folder, **sections)
    architecture = load_architecture(config.model)
    counted = memory.count_parameters(config.lora, architecture)
    return memory.estimate(config, counted, architecture, preflight.measure_prompts(config, chat_of(config)))


def test_memory_follows_the_knobs_that_are_there_to_save_it(tmp_path):
    def parts(**differences):
        ppo = {"batch_size": 64, "mini_batch_size": 64} | differences.get("ppo", {})
        model = {"gradient_checkpointing": False, "tokens_per_batch": 16384} | differences.get("model", {})
        env = {"games_at_once": 0} | differences.get("env", {})
        return estimated(tmp_path, ppo=ppo, model=model, env=env, lora=differences.get("lora", {}))

    plain, update, logits = parts(), "update: layers", "update: logits"
    assert parts(model={"gradient_checkpointing": True})[update] < plain[update]
    assert parts(model={"tokens_per_batch": 64})[update] < plain[update]
    assert parts(env={"answer_mode": "free"})[logits] > plain[logits]
    constant = parts(ppo={"context_grad": False})
    assert constant[update] < plain[update]
    assert constant[logits] < plain[logits]
    assert constant["rollout"] > plain["rollout"], "keys and values of games that have ended are held too"
    assert constant["evaluation"] == plain["evaluation"]
    more = parts(ppo={"context_grad": False, "batch_size": 128})
    grown = {name: more[name] - constant[name] for name in ("rollout", update)}
    assert grown[update] > grown["rollout"] / 4 > 0, "an update holds what the whole step has read"
    twice = parts(ppo={"batch_size": 128})
    assert plain["rollout"] < twice["rollout"] <= 2 * plain["rollout"], "games of a step begin alike"
    evaluated = parts(ppo={"eval_games": 128})  # of each of the two games
    assert evaluated["evaluation"] == pytest.approx(4 * evaluated["rollout"], rel=0.01)
    few = parts(env={"games_at_once": 4})
    assert few["rollout"] == few["evaluation"] < plain["rollout"] / 2
    turns = max(plain[name] for name in memory.TURNS)
    always = ("base weights", "adapter, gradient, Adam", "workspace", "process", "freed and kept")
    assert memory.peak(plain) == pytest.approx(sum(plain[name] for name in always) + turns)


# --------------------------------------------------------------------------------------------------------- prompts


def test_a_grown_conversation_is_read_piece_by_piece(tmp_path):
    config = micro_config(tmp_path, env={"history_turns": "all"}, curriculum=stage("tic_tac_toe"))
    (prompts,) = preflight.measure_prompts(config, chat_of(config)).values()
    assert len(prompts.episodes) == len(prompts.first) == len(prompts.longest) == 4
    assert prompts.answer == 2  # a digit and the end of the turn
    assert prompts.read == sum(prompts.longest.values()) - 2 * len(prompts.longest)


def test_a_conversation_without_history_is_read_anew_each_turn(tmp_path):
    config = micro_config(tmp_path, env={"history_turns": 0}, curriculum=stage("tic_tac_toe"))
    (prompts,) = preflight.measure_prompts(config, chat_of(config)).values()
    assert max(prompts.longest.values()) == max(prompts.first + prompts.later) + 2
    assert prompts.read > 2 * sum(prompts.longest.values())


def test_self_play_counts_both_seats(tmp_path):
    config = micro_config(tmp_path, curriculum=stage("kuhn_poker", opponent="self"))
    (prompts,) = preflight.measure_prompts(config, chat_of(config)).values()
    assert len(prompts.longest) > len(prompts.episodes)


def test_over_a_server_no_exact_value_is_planned(tmp_path):
    config = micro_config(tmp_path, ppo={"eval_exact": "auto"})
    assert preflight.exact_tasks(config, chat_of(config))
    config.env = EnvConfig(env_mode="url", env_url="http://127.0.0.1:9")
    assert preflight.exact_tasks(config, chat_of(config)) == {}


@pytest.mark.parametrize(("mode", "games", "told"), [
    ("constrained", ["kuhn_poker", "hex"], "hex are left out: too large, no zero-sum games of two, or "
     "asked with the turns before (env.history_turns)"),
    ("free", ["kuhn_poker"], "kuhn_poker are left out: they need games that are played here, with constrained answers"),
    ("constrained", ["kuhn_poker"], None),
])  # fmt: skip
def test_exact_values_that_are_always_wanted_and_left_out_are_named(tmp_path, caplog, mode, games, told):
    stages = {"stages": [{"name": "only", "games": games}]}
    config = micro_config(tmp_path, ppo={"eval_exact": "always"}, env={"answer_mode": mode}, curriculum=stages)
    found = preflight.exact_tasks(config, chat_of(config))
    assert [*found] == [KUHN] * (mode == "constrained")
    assert caplog.messages == ([f"ppo.eval_exact = always: exact values of {told}"] if told else [])


def test_programs_are_read_like_games(tmp_path):
    env = {"env_type": "trace", "answer_mode": "free", "prompt": "full", "history_turns": "auto"}
    levels = {"stages": [{"name": "only", "games": [[0, 99]]}]}
    config = micro_config(tmp_path, env=env, ppo={"max_seq_length": 4096, "max_new_tokens": 100}, curriculum=levels)
    (prompts,) = preflight.measure_prompts(config, chat_of(config)).values()
    assert prompts.game.startswith("trace")
    assert prompts.answer == 100
    assert min(prompts.first) > 100
    assert "evaluation" in preflight.describe(config)


def test_an_evaluation_of_programs_takes_the_passes_and_tokens_that_were_told(tmp_path, monkeypatch):
    """Two halves of them take turns, since programs are slow to run; others of a file; answers are read, too."""
    lines = [json.dumps({"program": f"print({n})" + f"\nprint({n})" * 9 * (n > 0)}) for n in range(8)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    env = {"env_type": "trace", "answer_mode": "free", "trace": {"source": str(tmp_path / "own.jsonl")}}
    ppo = {"max_seq_length": 2048, "max_new_tokens": 20, "eval_games": 8}
    levels = {"stages": [{"name": "only", "games": [[0, 9]]}]}
    config, sizes, run = micro_config(tmp_path, env=env, ppo=ppo, curriculum=levels), [], network.run_trunk
    told = preflight.evaluation_work(config, chat_of(config))
    policy = load_policy(config)

    def noting(model, tree, *rest, **options):
        sizes.append(len(tree[0]))
        return run(model, tree, *rest, **options)

    monkeypatch.setattr(network, "run_trunk", noting)
    evaluate(policy, config.env, [0], 8)
    assert told[0] == len(sizes) == 2 * 20
    assert sum(sizes) <= told[1], "less where programs begin alike"
    config.ppo = replace(config.ppo, max_new_tokens=15)
    assert preflight.evaluation_work(config, chat_of(config)) == (2 * 15, told[1] - 8 * 5)


def test_answers_that_leave_no_room_for_a_prompt_are_refused_before_they_are_counted(tmp_path):
    """Each token of an answer is written down: so many ended in a MemoryError, a hundred million took minutes."""
    config = micro_config(tmp_path, env={"answer_mode": "free"}, ppo={"max_seq_length": 256, "max_new_tokens": 2**53})
    told = r"^ppo\.max_new_tokens = 9007199254740992: expected fewer tokens than ppo\.max_seq_length, 256, which holds"
    with pytest.raises(ConfigError, match=told):
        preflight.measure_prompts(config, chat_of(config))


@pytest.mark.parametrize("check", [preflight.describe, preflight.check])
def test_the_free_games_of_an_evaluation_need_room_for_a_prompt_too(tmp_path, check):
    """--dry-run refused what the run itself began: all of its free play would have been cut off before an answer."""
    long = {"max_seq_length": 256, "max_new_tokens": 256}
    with pytest.raises(ConfigError, match=r"^ppo\.max_new_tokens = 256: expected fewer tokens"):
        check(micro_config(tmp_path, ppo=long | {"legal_mass_coef": 0.1}))
    check(micro_config(tmp_path, ppo=long | {"legal_mass_coef": 0.0}))  # nobody answers freely


@pytest.mark.parametrize("check", [preflight.describe, preflight.check])
def test_answers_too_short_for_what_programs_print_are_refused(tmp_path, check):
    env = {"env_type": "trace", "answer_mode": "free"}
    levels = {"stages": [{"name": "only", "games": [[0, 3 * TASKS_PER_LEVEL - 1]]}]}
    short = micro_config(tmp_path, env=env, ppo={"max_seq_length": 2048, "max_new_tokens": 16}, curriculum=levels)
    told = r"^ppo\.max_new_tokens = 16: too short for the output of level 2 \((\d+)% fit\); expected at least (\d+),"
    with pytest.raises(ConfigError, match=told) as refused:
        check(short)
    fits, needed = map(int, re.match(told, str(refused.value)).groups())
    tasks = eval_tasks([(2 * TASKS_PER_LEVEL, 3 * TASKS_PER_LEVEL - 1)], 50, short.run.seed)
    sizes = [len(chat_of(short).encode(expected_output(short.env, task))) for task in tasks]
    assert fits == sum(size <= 16 for size in sizes)
    assert sum(size <= needed for size in sizes) >= 95 > sum(size < needed for size in sizes)
    check(micro_config(tmp_path, env=env, ppo={"max_seq_length": 2048, "max_new_tokens": needed}, curriculum=levels))


def test_answers_as_long_as_a_refusal_asked_for_are_long_enough_where_some_programs_have_none(tmp_path, monkeypatch):
    """The number was that of one program too few; and what is wrong with one row of a dataset is of one program."""
    env = {"env_type": "trace", "answer_mode": "free"}
    levels = {"stages": [{"name": "only", "games": [[0, 99]]}]}
    failing = iter([NoAnswerError("no end"), ValueError("expected a program"), SandboxError("ended")])

    def output(config, task):
        if task.index > 96 and (error := next(failing, None)):
            raise error
        return "1\n" * task.index

    monkeypatch.setattr(preflight, "expected_output", output)
    config = micro_config(tmp_path, env=env, ppo={"max_new_tokens": 1}, curriculum=levels)
    with pytest.raises(ConfigError, match=r"too short .* expected at least \d+") as refused:
        preflight.say_answers(config, chat_of(config))
    failing = iter([NoAnswerError("no end"), ValueError("expected a program"), SandboxError("ended")])
    config.ppo = replace(config.ppo, max_new_tokens=int(re.search(r"at least (\d+)", str(refused.value))[1]))
    assert preflight.say_answers(config, chat_of(config))


def test_programs_are_not_chosen_by_learnability_and_that_is_said(tmp_path, caplog):
    """Success is counted of all programs together, so the setting had no effect."""
    env, levels = (
        {"env_type": "trace", "answer_mode": "free"},
        {"stages": [{"name": "only", "games": ["0-99", "300-399"]}]},
    )
    for sampling in ("uniform", "learnability"):
        preflight._check_programs(micro_config(tmp_path, env=env, curriculum=levels | {"sampling": sampling}))
    [told] = [line for line in caplog.messages if "sandbox" not in line]
    assert told == "curriculum.sampling = learnability: it chooses among games, and programs count as one"


@pytest.mark.parametrize(("check", "endless", "stopped"), [
    (preflight.check, 1, False), (preflight.describe, 5, True),
    pytest.param(preflight.describe, 1, False, marks=pytest.mark.slow),
    pytest.param(preflight.check, 5, True, marks=pytest.mark.slow),
])  # fmt: skip
def test_programs_without_an_answer_stop_a_run_where_they_are_many(tmp_path, caplog, check, endless, stopped):
    """Of ten; the episodes of a few fail, and that is all."""
    programs = ["print('x' * 10**7)"] * endless + [f"print({n})" for n in range(10 - endless)]
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps({"program": program}) for program in programs))
    env = {"env_type": "trace", "answer_mode": "free", "trace": {"source": str(tmp_path / "own.jsonl")}}
    levels = {"stages": [{"name": "only", "games": [[0, 9]]}]}
    config = micro_config(tmp_path, env=env, ppo={"max_seq_length": 2048, "max_new_tokens": 200}, curriculum=levels)
    if not stopped:
        preflight.check(config)
        assert "what is evaluated before and after is drawn from the programs trained on" in caplog.text
        [told] = preflight.say_answers(config, chat_of(config))
        assert told.splitlines()[-1].split()[0] == "programs"  # levels are the generator's
    told = r"^env\.trace: \d+ of \d+ programs have no answer; task_id \d+: the program does not finish here: output"
    with pytest.raises(ConfigError, match=told) if stopped else contextlib.nullcontext():
        check(config)


def test_a_dry_run_counts_the_passes_of_the_device_that_there_is(tmp_path, monkeypatch):
    """A GPU reads answers of several characters ahead, a CPU does not; "auto" was counted as a GPU everywhere."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    stages = {"stages": [{"name": "only", "games": ["liars_dice_small"]}]}
    told = {}
    for device in ("auto", "cpu"):
        config = micro_config(tmp_path, curriculum=stages, model={"device": device}, ppo={"max_seq_length": 2048})
        told[device] = re.search(r"about \d+ forward passes and [\d,]+ tokens", preflight.describe(config))[0]
    assert told["auto"] == told["cpu"]


def test_rows_that_no_stage_names_are_neither_checked_nor_evaluated(tmp_path):
    """Ids beyond a stage's were drawn too: they are rows of a file as well, since ids wrap around."""
    programs = [f"print({n})" for n in range(4)] + ["print('x' * 10**7)"] * 6
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps({"program": program}) for program in programs))
    env = {"env_type": "trace", "answer_mode": "free", "trace": {"source": str(tmp_path / "own.jsonl")}}
    stages = {
        "stages": [{"name": "first", "games": [[0, 1]]}, {"name": "then", "games": [[0, 3], [20000000, 20000003]]}]
    }
    config = micro_config(tmp_path, env=env, ppo={"max_seq_length": 2048, "max_new_tokens": 200}, curriculum=stages)
    assert evaluated(config.curriculum, "trace") == [(0, 3), (20000000, 20000003)]
    preflight.check(config)
    drawn = {task.task_id for tasks in proof.deals(config, 40, 1) for task in tasks}
    assert drawn == {*range(4), *range(20000000, 20000004)}


@pytest.mark.parametrize(("odd", "told"), [({"hidden_act": "none"}, "'none'"), ({"head_dim": None}, "NoneType"),
                                           ({"pad_token_id": 10**6}, "Padding_idx")])  # fmt: skip
def test_a_configuration_that_the_library_makes_no_model_of_is_one_line(tmp_path, odd, told):
    folder = shutil.copytree(base_model(), tmp_path / "odd")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | odd))
    with pytest.raises(ConfigError, match=f"^model.model_name: its config.json makes no model: .*{told}"):
        preflight.check(micro_config(tmp_path, model={"model_name": str(folder)}))


@pytest.mark.parametrize("check", [preflight.describe, preflight.check])
def test_more_tokens_than_the_model_reads_are_refused(tmp_path, check):
    config = micro_config(tmp_path, ppo={"max_seq_length": 10**6})
    with pytest.raises(ConfigError, match=r"^ppo\.max_seq_length = 1000000: .* reads \d+ tokens at most$"):
        check(config)


def test_free_answers_that_leave_no_room_to_ask_again_are_told(tmp_path, caplog):
    """The game would be cut off at the first illegal answer, and nothing would be trained on, without a word."""
    free = {"max_new_tokens": 40, "max_seq_length": 4096}
    roomy = micro_config(tmp_path, env={"answer_mode": "free"}, ppo=free)
    measured = preflight.measure_prompts(roomy, chat_of(roomy)).values()
    assert not caplog.records
    asked = [{"role": "assistant", "content": ""}, {"role": "user", "content": RETRY.format(attempt=1, attempts=3)}]
    again = chat_of(roomy).later(asked)
    enough = max(max(prompts.first) for prompts in measured) + 3 * 40 + 2 * len(again)
    for tight in (free | {"max_seq_length": enough}, free | {"max_seq_length": enough - 1}):
        preflight.measure_prompts(micro_config(tmp_path, env={"answer_mode": "free"}, ppo=tight), chat_of(roomy))
    [record] = caplog.records
    assert re.match(r"ppo\.max_seq_length = \d+: the 3 answers that (leduc|kuhn)_poker allows", record.getMessage())
    caplog.clear()
    preflight.measure_prompts(micro_config(tmp_path, ppo=tight), chat_of(roomy))  # constrained: never asked again
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"r": 8}, "lora.r = 8: {} was made with 4"),
        ({"lora_alpha": 5}, "lora.lora_alpha = 5: {} was made with 8"),
        ({"target_modules": ["q_proj"]}, 'lora.target_modules = ["q_proj"]: {} was made with ["v_proj", "q_proj"]'),
    ],
)
def test_a_lora_section_that_the_adapter_was_not_made_with_is_refused(tmp_path, caplog, change, told):
    """What trains is the adapter as it is: the section would be ignored, and a dry run count by it."""
    made = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(made | {"peft_type": "LORA"}))
    save_file({"q_proj.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter" / "adapter_model.safetensors")
    model = {"adapter": str(tmp_path / "adapter")}
    preflight.check_lora(micro_config(tmp_path, model=model, lora=made | {"target_modules": ["q_proj", "v_proj"]}))
    with pytest.raises(ConfigError) as refused:  # as every start asks, before anything is loaded
        preflight.check(micro_config(tmp_path, model=model, lora=made | change))
    assert str(refused.value).startswith(told.format(tmp_path / "adapter"))
    preflight.check(micro_config(tmp_path, model=model, lora=made | change), resume="run")  # it trains it already
    [record] = caplog.records
    assert record.getMessage() == f"{told.format(tmp_path / 'adapter')}, which is trained"


@pytest.mark.parametrize(
    "made",
    [
        {"target_modules": ".*_proj"},
        {"target_modules": ["layers.0.self_attn.q_proj"]},
        {"lora_alpha": 5.5},
    ],
)
def test_an_adapter_that_no_lora_section_can_tell_is_taken_as_it_is(tmp_path, made):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(made))
    preflight.check_lora(micro_config(tmp_path, model={"adapter": str(tmp_path / "adapter")}))


def test_all_that_differs_from_the_adapter_is_told_at_once(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 7}))
    with pytest.raises(
        ConfigError, match=r"^lora\.r = .* was made with 3; lora\.lora_alpha = .* 7; expected the same$"
    ):
        preflight.check_lora(micro_config(tmp_path, model={"adapter": str(tmp_path / "adapter")}))


@pytest.mark.parametrize(("opponent", "gate", "told"), [
    ("random", None, 0), ("self", None, 1), ({"random": 1.0}, None, 1), ({"self": 1.0, "random": 1.0}, "random", 0),
])  # fmt: skip
def test_failure_replay_without_games_that_count_is_told(tmp_path, caplog, opponent, gate, told):
    played = stage("kuhn_poker", opponent=opponent, gate_opponent=gate)
    config = micro_config(tmp_path, curriculum=played | {"failure_replay_prob": 0.3})
    preflight.check(config)
    assert sum("failure_replay_prob" in record.getMessage() for record in caplog.records) == told


@pytest.mark.parametrize("check", [preflight.describe, preflight.check])
def test_a_first_prompt_that_cannot_fit_is_refused(tmp_path, check):
    config = micro_config(tmp_path, env={"prompt": "full"}, ppo={"max_seq_length": 64})
    with pytest.raises(ConfigError, match=r"^ppo\.max_seq_length = 64: .* of leduc_poker take \d+ tokens; expected"):
        check(config)


@pytest.mark.parametrize("check", [preflight.describe, preflight.check])
@pytest.mark.parametrize(
    ("games", "opponent"),
    [
        (("leduc_poker", "tic_tac_toe"), "cfr"),
        (("tic_tac_toe", "kuhn_poker"), {"random": 0.5, "perfect": 0.5}),
        (("connect_four",), "perfect"),
        (("bridge",), "ismcts"),
    ],
)
def test_a_bot_that_cannot_play_a_game_of_its_stage_is_refused(tmp_path, check, games, opponent):
    config = micro_config(tmp_path, ppo={"max_seq_length": 4096}, curriculum=stage(*games, opponent=opponent))
    bot = opponent if isinstance(opponent, str) else "perfect"
    with pytest.raises(ConfigError, match=rf"stage 'only': opponent {bot} cannot play {games[-1]}"):
        check(config)


@pytest.mark.parametrize("sections", [{}, {"env": {"env_type": "trace", "answer_mode": "free"}}])
def test_a_gate_opponent_that_its_stage_does_not_play_is_refused_in_the_last_stage_too(tmp_path, sections):
    """No game of it would count. Runs that have one can still be evaluated: their configuration is read."""
    curriculum = stage("connect_four", opponent={"random": 1.0, "self": 1.0}, gate_opponent="perfect")
    told = "gate_opponent 'perfect' is not played in it: expected random, self$"
    with pytest.raises(ConfigError, match=told):
        preflight.check(micro_config(tmp_path, curriculum=curriculum, **sections))


def test_a_bot_that_solves_the_games_of_its_stage_is_taken_before_it_solves_them(tmp_path):
    curriculum = stage("kuhn_poker", opponent="cfr:999999999")
    preflight.check(micro_config(tmp_path, curriculum=curriculum))


def test_games_that_outgrow_the_limit_are_named(tmp_path):
    options = {"env": {"history_turns": "all"}, "curriculum": stage("kuhn_poker", "connect_four")}
    fits = preflight.describe(micro_config(tmp_path, ppo={"max_seq_length": 1024}, **options))
    assert "ppo.max_seq_length 1024 holds every prompt" in fits
    cut = preflight.describe(micro_config(tmp_path, ppo={"max_seq_length": 128}, **options))
    assert "ppo.max_seq_length 128 cuts off random games of connect_four (4 of 4); see env.history_turns" in cut


# ---------------------------------------------------------------------------------------------------------- search


def searched(folder, opponent, *games):
    config = micro_config(folder, curriculum=stage(*games, opponent=opponent))
    measured = preflight.measure_prompts(config, chat_of(config))
    return preflight.search_seconds(config, measured), measured


def test_a_long_search_is_scaled_from_a_short_one(tmp_path):
    short, _ = searched(tmp_path, "mcts:100x20", "connect_four")
    long, _ = searched(tmp_path, "mcts:10000x20", "connect_four")
    ((move, _),), ((longer, _),) = short.values(), long.values()
    assert 20 * move < longer < 500 * move


def test_a_game_takes_a_search_for_each_reply(tmp_path):
    seconds, measured = searched(tmp_path, "mcts:10x1", "leduc_poker")
    ((move, game),), (prompts,) = seconds.values(), measured.values()
    replies = [sum(player not in (-1, e.info["seat"]) for player, _ in e.info["history"]) for e in prompts.episodes]
    assert game == pytest.approx(move * sum(replies) / 4)


def test_many_rollouts_are_not_waited_for(tmp_path):
    started = time.monotonic()
    seconds, _ = searched(tmp_path, "mcts:1x100000000", "tic_tac_toe")
    assert min(move for move, _ in seconds.values()) > 10
    assert time.monotonic() - started < 60


def test_simultaneous_games_are_not_searched(tmp_path):
    seconds, _ = searched(tmp_path, "mcts:10x1", "goofspiel_small")
    assert list(seconds.values()) == [(0.0, 0.0)]


def test_steps_take_the_mixtures_share_of_the_search(tmp_path):
    def step(opponent, **games):
        config = micro_config(tmp_path, curriculum=stage("kuhn_poker", opponent=opponent, **games))
        index = NAMES.index("kuhn_poker")
        return preflight.say_search(config, {("mcts", index): (1.0, 3.0)}, 2)[-1]

    assert step("mcts") == "stage only: 24.00 s a step of 16 games, on 2 threads"
    assert step({"mcts": 1.0, "random": 3.0}) == "stage only: 6.00 s a step of 16 games, on 2 threads"
    weighted = {"games": {"kuhn_poker": 2, "leduc_poker": 4}}
    assert step("mcts", **weighted) == "stage only: 8.00 s a step of 16 games, on 2 threads"
    told = step({"mcts": 1.0, "random": 3.0}, gate_opponent="mcts")  # 0.3 of the games are replayed: against it
    assert told == "stage only: 11.40 s a step of 16 games, on 2 threads"


# ------------------------------------------------------------------------------------------------------ the report


def test_dry_run_describes_the_default_model_on_any_machine(monkeypatch, capsys, shapes):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sets = [f"model.model_name={shapes['Qwen3-4B']}", "ppo.eval_exact=never"]  # else games are walked through
    assert train_ppo.main(["--dry-run", "--set", *sets]) == 2
    out, err = capsys.readouterr()
    assert "33,032,705 trainable parameters (adapter 33,030,144, value head 2,561) of 4,055,500,801 in all" in out
    peak = re.search(r"at its peak +(\d+\.\d)", out)[1]  # to the tenth: 12gb's 6.3 GB were said to be 6
    assert re.search(rf"no CUDA device here: it needs one with about {peak[:-1]}\d GB", out)
    assert err.splitlines()[-1].startswith("error: model.use_4bit: ")
    assert "config/presets/tiny.json" in err
    name = shapes["Qwen3-4B"]
    told = [f" 'model.model_name=\"{name}\"'", " 'ppo.eval_exact=\"never\"'", ""]
    assert out.splitlines()[:4] == ["settings other than the defaults", *told]


@pytest.mark.parametrize("preset", [None, *sorted(path.stem for path in PRESETS.glob("*.json"))])
def test_the_settings_that_a_dry_run_tells_make_the_same_configuration(preset):
    config = load_sections([*DEFAULT_FILES, *([PRESETS / f"{preset}.json"] if preset else [])])
    head, *settings = preflight.say_settings(config)
    assert (head == "all settings are the defaults") == (not settings) == (preset is None)
    assert load_sections(DEFAULT_FILES, shlex.split(" ".join(settings))) == config


def test_the_dry_run_measures_with_as_many_threads_as_the_run_has(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(torch, "set_num_threads", done.append)
    monkeypatch.setattr(preflight, "_matmul_speed", lambda *_: done.append("speed") or 1.0)
    sets = ["run.threads=3", "ppo.eval_exact=never"]
    assert train_ppo.main(["--config", micro_file(tmp_path), "--dry-run", "--set", *sets]) == 0
    assert done == [3, "speed"]


@pytest.mark.parametrize("stall", [0.0, 0.05])
def test_measuring_a_slow_machine_takes_less_than_a_second(monkeypatch, stall):
    """A whole product of Qwen3-4B in bf16 takes a minute and more on a CPU that does not multiply bf16.

    A product that another program holds up (``stall`` seconds) says nothing of the machine.
    """
    now, speed, products = [0.0], 6e8, []

    def slow(x_BD, w_FD):
        products.append(w_FD)
        now[0] += 2 * x_BD.shape[0] * w_FD.numel() / speed + stall * (len(products) % 4 == 1)
        return torch.zeros(1, 1)

    monkeypatch.setattr(preflight, "linear", slow)
    monkeypatch.setattr(preflight, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    config = SimpleNamespace(model=ModelConfig(device="cpu", dtype="bfloat16", use_4bit=False))
    shape = SimpleNamespace(hidden_size=2560, intermediate_size=9728)
    for rows in (1, 400):
        now[0] = 0.0
        assert preflight._matmul_speed(config, shape, rows) == pytest.approx(speed)
        assert 0 < now[0] < 1


def test_dry_run_loads_no_weights(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    def refuse(*args, **options):
        raise AssertionError("weights were loaded")

    config = micro_config(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    text = preflight.describe(config)
    assert "kuhn_poker" in text
    assert "fits: about" in text


def test_an_answer_costs_its_new_tokens_and_then_one_a_pass(tmp_path):
    """Without history each prompt is new but for the system message, which is read once for all."""
    config = micro_config(tmp_path)
    chat, tasks = chat_of(config), eval_tasks([(NAMES.index("liars_dice_small") * CONFIGS_PER_GAME,) * 2], 4, 0)
    counted = token_counts.count_tokens(config, chat, tasks, False)
    [system] = {prompt - new for new, prompt, _ in counted.asked}
    assert system > 1
    assert {passes for *_, passes in counted.asked} == {1, 2}
    whole = sum(new + passes - 1 + passes * prompt / network.ATTENDED for new, prompt, passes in counted.asked)
    assert sum(counted.work) == pytest.approx(whole)


@pytest.mark.parametrize(("at_once", "budget"), [(0, 10**6), (8, 10**6), (0, 256)])
def test_an_evaluation_of_many_games_is_told_from_some_of_them(tmp_path, monkeypatch, at_once, budget):
    sections = {"ppo": {"eval_games": 60}, "env": {"games_at_once": at_once}, "model": {"tokens_per_batch": budget}}
    config = micro_config(tmp_path, **sections)
    passes, tokens = preflight.evaluation_work(config, chat_of(config))
    monkeypatch.setattr(token_counts, "PLAYED", 16)
    some = preflight.evaluation_work(config, chat_of(config))
    assert some == (pytest.approx(passes, rel=0.25), pytest.approx(tokens, rel=0.1))


def test_keeping_all_checkpoints_needs_room_for_those_there_will_be(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(preflight, "need_space", lambda folder, size: asked.append(size))
    for kept in (4, 10**6):
        config = micro_config(tmp_path, ppo={"num_train_steps": 3}, run={"keep_last": kept})
        parameters = count_parameters(config.lora, load_architecture(config.model))
        preflight.check_disk(config, parameters)
        config.ppo = replace(config.ppo, magnet_coef=0.1)
        preflight.check_disk(config, parameters)
    assert asked[:2] == asked[2:]
    assert asked[1] - asked[0] == 7 * 4 * parameters.adapter > 0, "four checkpoints and three more, with an average"


@pytest.mark.parametrize(("staleness", "folders"), [(0, 3), (1, 3), (4, 6)])
def test_adapters_for_servers_need_room_too(tmp_path, monkeypatch, staleness, folders):
    """Those that a game may still be played by, two at least, and one being written."""
    asked: list[int] = []
    monkeypatch.setattr(preflight, "need_space", lambda folder, size: asked.append(size))
    config = micro_config(tmp_path)
    parameters = count_parameters(config.lora, load_architecture(config.model))
    for served in (False, True):
        config.env = replace(config.env, use_vllm=served, max_staleness=staleness)
        preflight.check_disk(config, parameters)
    assert asked[1] - asked[0] == folders * (4 * parameters.adapter + memory.TOKENIZER_BYTES)


@pytest.mark.parametrize("mode", ["local", "url"])
def test_searches_of_a_server_are_not_told_at_this_machines_speed(tmp_path, monkeypatch, mode):
    stage = {"name": "s", "games": ["kuhn_poker#0"], "opponent": "mcts:5x1"}
    config = micro_config(tmp_path, curriculum={"stages": [stage]})
    measured = preflight.measure_prompts(config, chat_of(config))
    monkeypatch.setattr(preflight, "measure_prompts", lambda *_: measured)
    monkeypatch.setattr(preflight, "say_evaluation", lambda *_: [])
    monkeypatch.setattr(preflight, "say_answers", lambda *_: [])
    monkeypatch.setattr(memory, "estimate", lambda *_: dict.fromkeys(memory.TURNS, 1.0))
    address = "http://127.0.0.1:9" * (mode == "url")
    config.env = replace(config.env, env_mode=mode, env_url=address, prompt="full")
    assert ("search, estimated" in preflight.describe(config)) == (mode == "local")


def test_an_address_that_no_game_is_played_at_is_told(tmp_path, caplog):
    config = micro_config(tmp_path)
    preflight.check(config)
    assert caplog.messages == []
    config.env = replace(config.env, env_url="http://127.0.0.1:9")
    preflight.check(config)
    assert caplog.messages == ["env.env_url: no game is played there with env.env_mode=local"]


def test_positions_that_no_game_tells_cannot_be_learnt(tmp_path, monkeypatch):
    """It trained nothing, and its loss of 0 said that everything was read."""
    config = micro_config(tmp_path, ppo={"state_coef": 0.1})
    preflight.look(config)
    monkeypatch.setattr(preflight, "state_shapes", lambda curriculum: {})
    with pytest.raises(ConfigError, match=r"^ppo\.state_coef: none of the games has a tensor of what a seat knows; "):
        preflight.look(config)


def test_ends_of_answers_are_those_of_the_run_and_refused_before_it(tmp_path):
    """Of generation_config.json, or else of config.json; what is no id was refused once all weights were loaded."""
    folder = Path(shutil.copytree(base_model(), tmp_path / "base"))
    config = micro_config(tmp_path, model={"model_name": str(folder)})
    of_model = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [1, 3]}
    (folder / "config.json").write_text(json.dumps(of_model))
    for ends, written in (([1, 5, 4], {"eos_token_id": [5, 4]}), ([1], {}), ([1, 3], None)):
        (folder / "generation_config.json").unlink(missing_ok=True)
        if written is not None:
            (folder / "generation_config.json").write_text(json.dumps(written))
        assert preflight.look(config)[2].ends == load_policy(config).chat.ends == ends
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ConfigError, match=r"its generation_config\.json has the eos_token_id '</s>'"):
        preflight.look(config)


def test_games_that_ask_nothing_are_no_error(tmp_path):
    """As those of a game whose moves are all forced may be."""
    config = micro_config(tmp_path)
    measured = preflight.measure_prompts(config, chat_of(config))
    silent = {**measured, -1: token_counts.Prompts(chat_of(config), 0, False)}
    assert preflight.say_prompts(config, silent) == preflight.say_prompts(config, measured)
    parameters, architecture = (
        count_parameters(config.lora, load_architecture(config.model)),
        load_architecture(config.model),
    )
    assert memory.estimate(config, parameters, architecture, silent) == memory.estimate(
        config, parameters, architecture, measured
    )


def test_a_checkpoint_is_about_as_large_as_was_told(tmp_path):
    """Of each number trained Adam keeps two; past selves and the average are whole adapters beside it."""
    games = {"name": "only", "games": [[LEDUC, LEDUC]], "opponent": {"past": 1}}
    knobs = {"num_train_steps": 6, "magnet_coef": 0.1, "save_freq": 6, "batch_size": 8}
    config = micro_config(tmp_path, ppo=knobs, lora={"r": 64}, curriculum={"stages": [games]})
    trainer = Trainer(config, tmp_path)
    for _ in range(6):
        trainer.step(StopSignal())
    folder = trainer.save()
    frozen = memory.frozen_adapters(config)
    assert (frozen, len(trainer.frozen)) == (6, 6)
    trained = sum(p.numel() for p in trainer.policy.trainable().values())
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    told = memory.checkpoint_bytes(trained, frozen * trained) - memory.TOKENIZER_BYTES
    assert size == pytest.approx(told, rel=0.05)


def test_a_checkpoint_asks_for_no_room_for_heads_of_frozen_adapters(tmp_path, monkeypatch):
    """Only the trained adapter has heads; that of positions may be larger than the adapter."""
    asked: list[int] = []
    monkeypatch.setattr(utils, "need_space", lambda folder, size: asked.append(size))
    config = micro_config(tmp_path, ppo={"magnet_coef": 0.1, "state_coef": 0.1})
    trainer = Trainer(config, tmp_path)
    trainer.policy.follow(1)
    trainer.state.step = 1
    trainer.save()
    sizes = {name: parameter.numel() for name, parameter in trainer.policy.trainable().items()}
    adapter = sum(size for name, size in sizes.items() if "lora_" in name)
    assert asked == [memory.checkpoint_bytes(sum(sizes.values()), adapter)]


@pytest.mark.parametrize(("text", "room"), [("1000000\n", 1_000_000), ("max\n", None), (None, None)])
def test_a_container_has_the_memory_that_it_may_use(tmp_path, monkeypatch, text, room):
    monkeypatch.setattr(memory, "CONTAINER_MEMORY", tmp_path / "memory.max")
    if text:
        (tmp_path / "memory.max").write_text(text)
    assert memory.machine_memory() == (room or psutil.virtual_memory().total)


def test_the_games_with_free_answers_of_an_evaluation_are_told_with_it(tmp_path, monkeypatch):
    """As many as the constrained ones, of answers that may take ``ppo.max_new_tokens`` passes each."""
    monkeypatch.setattr(preflight, "_matmul_speed", lambda *_: 1.0)
    monkeypatch.setattr(preflight, "duration", str)

    def told(coefficient, **env):
        sets = {"legal_mass_coef": coefficient, "eval_exact": "never", "max_new_tokens": 5}
        said = preflight.describe(micro_config(tmp_path, ppo=sets, env=env))
        work = re.findall(r"about (\d+) forward passes and (\S+) tokens", said)
        return work, float(re.search(r"products take (\S+)", said)[1])

    constrained, free, both = told(0.0), told(0.0, answer_mode="free"), told(0.1)
    assert both[0] == constrained[0] + free[0]
    assert int(free[0][0][0]) > int(constrained[0][0][0])
    assert both[1] == pytest.approx(constrained[1] + free[1])
