"""Whole steps on a CUDA device that is pretended: no tensor on the wrong device, and few waits for it."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pretend_cuda import pretend

import train_ppo
from env_wrapper import EnvConfig, Task, play
from games import CONFIGS_PER_GAME, NAMES
from policy import Policy, attention, network
from policy.model import LoraConfig, ModelConfig, load_model
from scripts.make_tiny_model import make_model
from training.config import PPOConfig, RunConfig

KUHN, LEDUC = (NAMES.index(name) * CONFIGS_PER_GAME for name in ("kuhn_poker", "leduc_poker"))
PPO = PPOConfig(batch_size=2, mini_batch_size=2, ppo_epochs=1, entropy_coef=0.01, max_new_tokens=2, target_kl=None)
LORA = LoraConfig(r=4, lora_alpha=8)
OPPONENTS = ("self", "past:step-000000")
WAITS_A_FORWARD = {True: 2, False: 5}  # constrained: logits, values; free: their check, and what was drawn, besides
WAITS_A_STEP = 20  # three columns of each score, finiteness of loss and norm, means of the statistics


@pytest.fixture(scope="module")
def bases(tiny_models, tmp_path_factory):
    """Architecture -> folder of a base of 64 hidden units, which is what a block of 4-bit weights takes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_models["qwen2"])
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in ("qwen2", "qwen3", "llama")}
    for name, folder in folders.items():
        make_model(len(tokenizer), 64, 2, 0.15, 0, name).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


@pytest.fixture(autouse=True, params=[0, 24e9], ids=["full", "empty"])
def room(request, monkeypatch):
    """Bytes that are free on the card: none of the layers keeps its activations, or all do."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (request.param, 24e9))


def load(folder, four_bit=False, dtype="bfloat16"):
    """Base and tokenizer; not while pretending: loading goes through the meta device."""
    config = ModelConfig(model_name=folder, use_4bit=four_bit, dtype=dtype, device="cpu", tokens_per_batch=256)
    return *load_model(config, LORA, 0), config


def player(peft_model, tokenizer, config, device=None, ppo=PPO):
    """A policy; all of its tensors say that they are on cuda:0, where a ``device`` is given."""
    if device:
        device.put_module(peft_model)
    env = EnvConfig(prompt="compact", history_turns="all")
    policy = Policy(peft_model, tokenizer, SimpleNamespace(model=config, lora=LORA, ppo=ppo, env=env, run=RunConfig()))
    assert policy.device.type == ("cuda" if device else "cpu")
    return policy


def step(policy, optimizer, opponent):
    ppo = replace(PPO, legal_mass_coef=0.05 * policy.constrained)
    tasks = [Task((KUHN, LEDUC)[i % 2], seed=i, opponent=opponent, index=i) for i in range(2)]
    policy.forget()
    with policy.keeping_context():
        episodes = play(EnvConfig(prompt="compact", history_turns="all"), policy, tasks)
        assert {e.outcome for e in episodes} <= {"finished", "forfeited"}
        batch = train_ppo.collate(episodes, policy, ppo, 0.1)
        return train_ppo.ppo_update(policy, optimizer, batch, ppo, (0, 0))


@pytest.mark.parametrize(("architecture", "four_bit"), [
    pytest.param(name, four_bit, marks=[pytest.mark.slow] * ((name, four_bit) not in {("qwen3", 1), ("llama", 0)}),
                 id=f"{name}-{'nf4' if four_bit else 'bf16'}")
    for name in ("qwen2", "qwen3", "llama") for four_bit in (False, True)
])  # fmt: skip
@pytest.mark.parametrize("context_grad", [True, False])
def test_no_operation_mixes_devices_and_few_wait(bases, monkeypatch, architecture, four_bit, context_grad):
    passes, real = [], network.run_trunk
    monkeypatch.setattr(network, "run_trunk", lambda *args, **options: passes.append(1) or real(*args, **options))
    loaded = load(bases[architecture], four_bit)
    with pretend() as device:
        policy = player(*loaded, device, replace(PPO, context_grad=context_grad))
        optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-3, fused=True)
        policy.keep_past("step-000000")
        for constrained in (True, False):
            policy.constrained = constrained
            passes.clear()
            device.waits.clear()
            for opponent in OPPONENTS:
                assert step(policy, optimizer, opponent)["skipped"] == 0
            most = WAITS_A_FORWARD[constrained] * len(passes) + WAITS_A_STEP * len(OPPONENTS)
            assert sum(device.waits.values()) <= most, device.waits
    assert not device.mixed


def test_a_tensor_made_on_the_host_is_noticed(bases, monkeypatch):
    real = network.prepare

    def forgetful(*args):
        runs = real(*args)
        return runs._replace(buckets=[run._replace(queries=run.queries.cpu()) for run in runs.buckets])

    monkeypatch.setattr(network, "prepare", forgetful)
    loaded = load(bases["qwen3"])
    with pretend() as device:
        player(*loaded, device).check()
    assert any(what.startswith("index_select attention.py") for what in device.mixed)


def test_a_check_of_all_weights_waits_a_few_times(bases):
    loaded = load(bases["qwen3"])
    with pretend() as device:
        policy = player(*loaded, device)
        device.waits.clear()
        policy.check()
    assert sum(device.waits.values()) <= 3 < len(policy.trainable()), device.waits


def trained(policy):
    """Statistics of three steps, and the weights then. Fused, as the trainer has it: such a step counts as no write."""
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-3, fused=True)
    stats = [step(policy, optimizer, "self") for _ in range(3)]
    return stats, [p.detach().cpu().clone() for p in policy.trainable().values()]


def test_a_gpu_adds_gradients_up_in_the_same_order_each_time(bases, monkeypatch):
    """But samples as it likes: cumulative sums have no kernel that would."""
    fixed: dict[str, set[bool]] = {"act": set(), "evaluate_batch": set(), "_backward": set()}
    filled = set[bool]()

    def noted(owner, name):
        real = getattr(owner, name)

        def note(*args, **options):
            fixed[name].add(torch.are_deterministic_algorithms_enabled())
            filled.add(torch.utils.deterministic.fill_uninitialized_memory and fixed[name] == {True})
            return real(*args, **options)

        monkeypatch.setattr(owner, name, note)

    noted(Policy, "act")
    noted(Policy, "evaluate_batch")
    noted(attention, "_backward")
    loaded = load(bases["qwen2"])
    with pretend() as device:
        trained(player(*loaded, device))
    assert fixed == {"act": {False}, "evaluate_batch": {True}, "_backward": {True}}
    assert filled == {False}, "new tensors are not filled, which would be a launch for each"
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8"), "with another one products raise then"
    trained(player(*load(bases["qwen2"])))
    assert fixed["evaluate_batch"] == {True, False}, "a CPU adds up in order anyway"


@pytest.mark.parametrize(("architecture", "context_grad"), [("qwen2", True), ("qwen3", True), ("llama", False)])
def test_the_ways_that_only_gpus_go_lead_to_the_same_weights(bases, architecture, context_grad):
    ppo = replace(PPO, context_grad=context_grad)
    stats, weights = trained(player(*load(bases[architecture], dtype="float32"), ppo=ppo))
    loaded = load(bases[architecture], dtype="float32")
    with pretend() as device:
        stats_there, there = trained(player(*loaded, device, ppo))
    for mine, other in zip(stats, stats_there, strict=True):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-4)
    for mine, other in zip(weights, there, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_attention_is_kept_from_cudnn():
    assert network.run_trunk  # whose import turns it off
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_adapters_are_read_where_the_model_is_and_not_onto_the_first_card(bases, tmp_path, monkeypatch):
    model, _, config = load(bases["qwen2"], dtype="float32")
    model.save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr("peft.peft_model.infer_device", lambda: pytest.fail("PEFT chose a device"))
    again = replace(config, adapter=str(tmp_path / "adapter"))
    player(*load_model(again, LORA, 0), again).add_adapter("other", tmp_path / "adapter")


def test_layers_that_are_computed_again_save_no_state_of_random_numbers(bases, monkeypatch):
    """It would be asked for once for each tensor that a layer is given."""
    asked = []
    monkeypatch.setattr(torch, "get_rng_state", lambda: asked.append(1) or torch.zeros(1, dtype=torch.uint8))
    policy = player(*load(bases["qwen3"], dtype="float32"))
    step(policy, torch.optim.AdamW(policy.trainable().values(), lr=1e-3, fused=True), "self")
    assert policy.reader._layer_bytes, "layers are computed again"
    assert not asked
