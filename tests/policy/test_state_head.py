"""Readouts of what a seat knows, from the hidden state that its answer is drawn from."""

import pytest
import torch
from pretend_cuda import pretend
from tiny import rollout, tiny_policy
from torch.testing import assert_close

from policy.state_head import GAIN, StateHead
from utils import ConfigError, RuinedWeightsError

SHAPES = {"b": {3}, "a": {2, 3}}
STATES = [("a", torch.tensor([1.0, 0.0])), ("b", torch.tensor([0.0, 1.0, 0.25])), ("a", torch.tensor([1.0, 1.0, 0.0])),
          ("a", torch.ones(5)), ("c", torch.ones(2)), ("a", torch.tensor([0.0, 0.0]))]  # fmt: skip


def head_of(**options):
    head = StateHead(4, SHAPES, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator, **options)
    return head


def test_each_game_and_size_has_a_layer_of_its_own():
    head, hidden_MD = head_of(std=0.1), torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    expected = []
    for (game, wanted), hidden in zip(STATES, hidden_MD, strict=True):
        if f"{game}-{len(wanted)}" not in ("a-2", "a-3", "b-3"):
            expected.append(torch.zeros(()))
            continue
        layer = head.layers[f"{game}-{len(wanted)}"]
        p = torch.sigmoid(layer.weight @ (hidden / hidden.norm() * GAIN * 2) + layer.bias)
        certain = torch.distributions.Bernoulli(wanted).entropy().sum()  # of a number between 0 and 1
        expected.append(-(wanted * p.log() + (1 - wanted) * (1 - p).log()).sum() - certain)
    assert_close(head(hidden_MD, STATES), torch.stack(expected))
    assert head(hidden_MD, STATES).tolist()[3:5] == [0.0, 0.0]


def test_a_gpu_is_not_asked_which_positions_it_was_told():
    head = head_of(std=0.1)
    with pretend() as device:
        device.put_module(head)
        head(torch.ones(6, 4).to("cuda"), STATES).sum().backward()
    assert not device.waits
    assert not device.mixed


def test_it_begins_without_an_opinion_or_a_gradient_for_what_it_reads():
    head = StateHead(4, SHAPES, torch.device("cpu"))
    hidden_MD = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    nats_M = head(hidden_MD, STATES)
    quarter = torch.distributions.Bernoulli(torch.tensor(0.25)).entropy()  # which nobody can tell with less
    expected = torch.tensor([2, 3, 3, 0, 0, 2]) * torch.tensor(2.0).log() - quarter * torch.tensor([0, 1, 0, 0, 0, 0])
    assert_close(nats_M, expected)
    nats_M.sum().backward()
    assert hidden_MD.grad.abs().max() == 0
    assert {name: p.grad is not None for name, p in head.layers.named_parameters()} == {
        f"{layer}.{part}": True for layer in ("a-2", "a-3", "b-3") for part in ("weight", "bias")
    }


def test_prompts_are_what_values_are_read_from_whatever_else_is_asked_for(tmp_path):
    policy = tiny_policy(tmp_path)
    sequences = [s for e in rollout(policy) for seat in e.sequences.values() for s in seat]
    for legal_mass in (False, True):
        read = policy.evaluate_batch(sequences, legal_mass=legal_mass)
        assert_close(policy.value_head(read.prompts)[:, 0], read.values)
        logged = [d.value for s in sequences for d in s.decisions]
        assert read.values.tolist() == pytest.approx(logged, abs=1e-4)


def test_a_head_of_other_games_is_named(tmp_path):
    policy = tiny_policy(tmp_path)
    policy.learn_states({"a": [3]})
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved")
    policy.learn_states({"b": [3]})
    with pytest.raises(ConfigError, match="its state_head does not fit these games"):
        policy.load(tmp_path / "saved")


def test_one_weight_that_is_not_finite_is_noticed_in_any_tensor_that_is_trained(tmp_path):
    policy = tiny_policy(tmp_path)
    policy.learn_states({"a": [3]})  # is read in updates alone: no game would show it
    policy.check()
    for parameter in policy.trainable().values():
        sound = parameter.detach().clone()
        for value in (torch.nan, torch.inf):
            with torch.no_grad():
                parameter.view(-1)[-1] = value
            with pytest.raises(RuinedWeightsError, match="not finite"):
                policy.check()
            with torch.no_grad():
                parameter.copy_(sound)
    policy.check()
