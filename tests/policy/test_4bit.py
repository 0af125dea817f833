"""PPO on a 4-bit base, on the CPU: the loader, gradients after a rollout, and losses against fp32 compute."""

import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn import Linear4bit

import train_ppo
from config.reader import ConfigError
from env_wrapper import EnvConfig, Task, play
from games import CONFIGS_PER_GAME, NAMES
from policy import Policy, model
from scripts.make_tiny_model import make_model
from training.config import PPOConfig

BOTH = pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
PPO = PPOConfig(learning_rate=1e-3, batch_size=24, mini_batch_size=12, ppo_epochs=1, less_luck=False)
FOUR_BITS = {"use_4bit": True, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def bases(tiny_models, tmp_path_factory):
    """Architecture -> folder of a base of 64 hidden units."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_models["qwen2"])
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in ("qwen2", "qwen3")}
    for name, folder in folders.items():
        make_model(len(tokenizer), 64, 2, 0.15, 0, name).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


def play_step(policy, step):
    games = [NAMES.index(name) * CONFIGS_PER_GAME for name in ("leduc_poker", "kuhn_poker")]
    tasks = [Task(games[i % 2], seed=i, index=i) for i in range(24 * step, 24 * step + 24)]
    return play(EnvConfig(prompt="compact", history_turns="all"), policy, tasks)


def train_step(policy, optimizer, episodes, step):
    batch = train_ppo.collate(episodes, policy, PPO, kl_coef=0.1)
    return train_ppo.ppo_update(policy, optimizer, batch, PPO, (0, step))


def optimizer_of(policy):
    return torch.optim.AdamW(list(policy.trainable().values()), lr=PPO.learning_rate, weight_decay=0.0)


def layers_of(policy):
    return [m for m in policy.peft_model.modules() if isinstance(m, Linear4bit)]


@pytest.mark.parametrize("nested", [None, True, False])
@BOTH
def test_the_base_is_held_in_4_bits(bases, new_policy, architecture, nested):
    """Its scales are not in 8 bits, if not asked for: on a GPU each product would wait for two launches more."""
    held = FOUR_BITS if nested is None else FOUR_BITS | {"use_nested_quant": nested}
    policy = new_policy(bases[architecture], model=held)
    layers = layers_of(policy)
    assert len(layers) == 2 * 7
    assert {(m.weight.dtype, m.weight.quant_state.nested) for m in layers} == {(torch.uint8, bool(nested))}
    assert {m.weight.quant_state.quant_type for m in layers} == {"nf4"}
    assert {m.compute_dtype for m in layers} == {policy.lm_head.weight.dtype} == {torch.bfloat16}
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}


def kept_in_4_bits(base, folder, skipped, packed="uint8"):
    """A copy of ``base`` whose weights are in 4 bits in its file, in tensors ``packed``, but for layers ``skipped``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    kinds = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": packed}
    kept = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped, **kinds)
    options = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}, "quantization_config": kept}
    AutoModelForCausalLM.from_pretrained(base, **options).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_base_that_is_kept_in_4_bits_computes_in_the_dtype_asked_for(bases, new_policy, tmp_path, dtype):
    """The library leaves embedding and norms in the file's dtype, and puts biases alone into the one asked for."""
    policy = new_policy(kept_in_4_bits(bases["qwen2"], tmp_path, None), model=FOUR_BITS | {"dtype": dtype})
    asked = getattr(torch, dtype)
    policy.check()
    assert {p.dtype for p in policy.base.parameters() if not p.requires_grad} == {torch.uint8, asked}
    assert {m.compute_dtype for m in layers_of(policy)} == {asked}


def test_4_bits_that_are_packed_in_floating_point_are_no_numbers(bases, new_policy, tmp_path):
    """FSDP wants them so; a cast would make other weights of them."""
    held = FOUR_BITS | {"dtype": "float32"}
    want, got = (
        new_policy(kept_in_4_bits(bases["qwen2"], tmp_path / packed, None, packed), model=held)
        for packed in ("uint8", "bfloat16")
    )
    for a, b in zip(layers_of(want), layers_of(got), strict=True):
        assert torch.equal(a.weight.data.view(torch.uint8).flatten(), b.weight.data.view(torch.uint8).flatten())


def test_a_base_whose_output_layer_is_in_4_bits_is_refused(bases, new_policy, tmp_path):
    """Scores are read from some of that layer's rows, which 4 bits do not have."""
    with pytest.raises(ConfigError, match=r"output layer of .* is kept in 4 bits"):
        new_policy(kept_in_4_bits(bases["qwen2"], tmp_path, []), model=FOUR_BITS)


@BOTH
def test_every_adapter_tensor_moves_in_three_steps(bases, new_policy, architecture):
    """Rollouts come first: on some CPUs they are what would cut the gradient (see ``guard_4bit_on_cpu``)."""
    policy = new_policy(bases[architecture], model=FOUR_BITS, fresh=True)
    optimizer = optimizer_of(policy)
    for step in range(3):
        before = {name: p.detach().clone() for name, p in policy.trainable().items()}
        stats = train_step(policy, optimizer, play_step(policy, step), step)
        assert stats["skipped"] == 0
        still = [name for name, p in policy.trainable().items() if torch.equal(p, before[name])]
        # B is zero at first, so A has no gradient in the first minibatch, but has one in the second
        assert not still, f"step {step}"


def gradients(policy, sequences):
    policy.evaluate_decisions(sequences).logprobs.sum().backward()
    return {name: p.grad for name, p in policy.trainable().items() if "lora_" in name}


@BOTH
def test_a_rollout_does_not_change_the_gradient(bases, new_policy, architecture):
    player, untouched = (new_policy(bases[architecture], model=FOUR_BITS) for _ in range(2))
    sequences = [s for e in play_step(player, 0) for seat in e.sequences.values() for s in seat]
    after, expected = gradients(player, sequences), gradients(untouched, sequences)
    assert all(torch.equal(after[name], gradient) and gradient.any() for name, gradient in expected.items())


@pytest.mark.skipif(not has_avx512bf16(), reason="only CPUs with AVX512-BF16 repack 4-bit weights for inference")
@pytest.mark.filterwarnings("ignore:bitsandbytes..gemv_4bit")
@BOTH
def test_without_the_guard_a_rollout_changes_the_gradient(bases, new_policy, architecture, monkeypatch):
    """If this fails, bitsandbytes has been mended and ``guard_4bit_on_cpu`` can go."""
    monkeypatch.setattr(model, "guard_4bit_on_cpu", lambda base: 0)
    monkeypatch.setattr(Policy, "check", lambda policy: None)  # it reads, too
    with pytest.raises((AssertionError, RuntimeError)):  # an error with biases, as Qwen2 has them; silent without
        test_a_rollout_does_not_change_the_gradient(bases, new_policy, architecture)


@BOTH
@pytest.mark.parametrize(
    ("compute", "tolerance"), [pytest.param("float32", 1e-4, marks=pytest.mark.slow), ("bfloat16", 0.02)]
)
def test_losses_are_those_of_fp32_compute(bases, new_policy, architecture, compute, tolerance, tmp_path):
    """The same episodes through the 4-bit base and through its dequantised weights in fp32, update by update.

    Advantages are whitened, so that the policy loss has a scale of 1 while it is near 0 itself.
    """
    exactly = FOUR_BITS | {"dtype": "float32"}
    donor = new_policy(bases[architecture], model=exactly)
    donor.peft_model.unload().dequantize().save_pretrained(tmp_path)
    donor.tokenizer.save_pretrained(tmp_path)
    low = new_policy(bases[architecture], model=exactly if compute == "float32" else FOUR_BITS, fresh=True)
    full = new_policy(str(tmp_path), fresh=True)
    assert not layers_of(full)
    pairs = [(policy, optimizer_of(policy)) for policy in (low, full)]
    for step in range(3):
        episodes = play_step(low, step)
        found, expected = (train_step(policy, optimizer, episodes, step) for policy, optimizer in pairs)
        assert found["value_loss"] == pytest.approx(expected["value_loss"], rel=tolerance)
        assert found["policy_loss"] == pytest.approx(expected["policy_loss"], abs=tolerance)
