"""The output layer over a whole vocabulary against the plain formulas: values, gradients, draws."""

import pytest
import torch
from torch.testing import assert_close

from policy import vocabulary as head

VOCABULARIES = {"one slice": 300, "two and a part": 2 * head.COLUMNS + 77, "whole slices": 3 * head.COLUMNS}


def layer(vocabulary, dtype, rows=24):
    generator = torch.Generator().manual_seed(vocabulary)
    weight_VD = torch.randn(vocabulary, 16, generator=generator, dtype=dtype)
    hidden_ND = torch.randn(rows, 16, generator=generator, dtype=dtype)
    chosen_N = torch.randint(vocabulary, (rows,), generator=generator)
    chosen_N[:2] = torch.tensor([0, vocabulary - 1])
    return hidden_ND.requires_grad_(), weight_VD, chosen_N


def plain(hidden_ND, weight_VD, chosen_N, temperature):
    logp_NV = (hidden_ND @ weight_VD.T / temperature).log_softmax(-1)
    return logp_NV.gather(1, chosen_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 3e-5)])
@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_and_their_gradients_are_those_of_the_plain_formula(vocabulary, dtype, tolerance, temperature):
    hidden_ND, weight_VD, chosen_N = layer(vocabulary, dtype)
    found, expected = (f(hidden_ND, weight_VD, chosen_N, temperature) for f in (head.score, plain))
    for some in ((1, 0), (0, 1), (1, 0.3)):  # of the log-probability, of the entropy, of both
        loss, true = (sum(w * (x**2).sum() for w, x in zip(some, pair, strict=True)) for pair in (found, expected))
        assert_close(loss, true, rtol=tolerance, atol=tolerance)
        gradient, right = (torch.autograd.grad(x, hidden_ND, retain_graph=True)[0] for x in (loss, true))
        assert_close(gradient, right, rtol=tolerance, atol=tolerance * float(right.abs().max()))


def test_without_the_entropys_gradient_its_value_stays_and_nothing_else_changes():
    hidden_ND, weight_VD, chosen_N = layer(9000, torch.float64)
    logp_N, entropy_N = head.score(hidden_ND, weight_VD, chosen_N, 1.0, entropy_grad=False)
    both = head.score(hidden_ND, weight_VD, chosen_N, 1.0)
    assert torch.equal(logp_N, both[0])
    assert torch.equal(entropy_N, both[1])
    assert not entropy_N.requires_grad
    gradients = [torch.autograd.grad(x.sum(), hidden_ND)[0] for x in (logp_N, both[0])]
    assert torch.equal(*gradients)


def test_the_entropys_gradient_in_bf16_is_a_difference_of_small_numbers():
    """Large logits cancel in it: summed as they are, a third of the gradient was rounding."""
    generator = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(2 * head.COLUMNS + 77, 256, generator=generator).bfloat16() / 16
    hidden_ND = (12 * torch.randn(64, 256, generator=generator)).bfloat16()
    chosen_N, gradients = torch.zeros(64, dtype=torch.long), []
    for dtype in (torch.float64, torch.bfloat16):
        read_ND = hidden_ND.to(dtype).requires_grad_()
        _, entropy_N = head.score(read_ND, weight_VD.to(dtype), chosen_N, 1.0)
        gradients.append(torch.autograd.grad(entropy_N.sum(), read_ND)[0].double())
    exact, found = gradients
    assert float((found - exact).norm() / exact.norm()) < 0.12


def test_a_likely_tokens_gradient_in_bf16_is_what_the_others_pull():
    """Rows of an output layer have a mean, as real ones do; added up with the token's own, others were rounded away."""
    generator = torch.Generator().manual_seed(0)
    spread_VD, mean_D = (torch.randn(n, 256, generator=generator) / 16 for n in (head.COLUMNS + 77, 1))
    weight_VD = (spread_VD + mean_D).bfloat16()
    chosen_N, gradients = torch.randint(len(weight_VD), (64,), generator=generator), []
    hidden_ND = (17 * spread_VD[chosen_N]).bfloat16()
    for dtype in (torch.float64, torch.bfloat16):
        read_ND = hidden_ND.to(dtype).requires_grad_()
        logp_N, _ = head.score(read_ND, weight_VD.to(dtype), chosen_N, 1.0)
        gradients.append(torch.autograd.grad(logp_N.sum(), read_ND)[0].double())
    exact_ND, found_ND = gradients
    assert 0.99 < float(logp_N.detach().exp().median()) < 0.9999
    assert float(((found_ND - exact_ND).norm(dim=1) / exact_ND.norm(dim=1)).median()) < 0.1


def test_scoring_keeps_no_row_over_the_vocabulary_for_the_backward_pass():
    hidden_ND, weight_VD, chosen_N = layer(9000, torch.float32)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        head.score(hidden_ND, weight_VD, chosen_N, 1.0)
    assert sizes
    assert max(sizes) <= hidden_ND.numel()


def test_logits_far_apart_do_not_overflow():
    hidden_ND, weight_VD, chosen_N = layer(2 * head.COLUMNS, torch.float64)
    factor = torch.linspace(1, 60, len(weight_VD), dtype=torch.float64)[:, None]  # later slices hold the likely ones
    for weights in (weight_VD * factor, weight_VD * factor.flip(0)):
        for found, expected in zip(*(f(hidden_ND, weights, chosen_N, 0.5) for f in (head.score, plain)), strict=True):
            assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_draws_invert_the_distribution_function_in_the_order_of_the_tokens(vocabulary):
    hidden_ND, weight_VD, _ = layer(vocabulary, torch.float64, rows=400)
    u_N = torch.rand(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    picks_N, logp_N = head.draw(hidden_ND.detach(), weight_VD, u_N, 0.9)
    logp_NV = (hidden_ND.detach() @ weight_VD.T / 0.9).log_softmax(-1)
    assert torch.equal(picks_N, torch.searchsorted(logp_NV.exp().cumsum(1), u_N[:, None], right=True)[:, 0])
    assert_close(logp_N, logp_NV.gather(1, picks_N[:, None])[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_without_a_number_the_likeliest_token_is_taken(vocabulary):
    hidden_ND, weight_VD, _ = layer(vocabulary, torch.float32)
    picks_N, _ = head.draw(hidden_ND.detach(), weight_VD, None, 1.0)
    assert torch.equal(picks_N, (hidden_ND.detach() @ weight_VD.T).argmax(1))


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_tokens_that_are_possible(u):
    weight_VD = torch.zeros(head.COLUMNS + 100, 1)
    weight_VD[[5, head.COLUMNS + 3], 0] = 1.0  # all others have probability exp(-1000), which is 0
    picks_N, logp_N = head.draw(torch.full((2, 1), 1000.0), weight_VD, torch.full((2,), u, dtype=torch.float64), 1.0)
    assert picks_N.tolist() == [5 if u == 0 else head.COLUMNS + 3] * 2
    assert logp_N.tolist() == pytest.approx([-0.6931471805599453] * 2)


def test_rounding_does_not_reach_past_the_last_possible_column():
    at_N, share_N = head.invert(torch.tensor([[0.25, 1.0, 1.0]], dtype=torch.float64), torch.ones(1).double())
    assert at_N.tolist() == [1]
    assert share_N.tolist() == pytest.approx([1.0])
