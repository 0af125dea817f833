"""Text of the base's own, and what an adapter changes in the reading of it."""

from itertools import chain

import numpy as np
import pytest
import torch
from tiny import micro_config, tiny_policy

from policy import load_policy, rehearsal
from policy.rehearsal import AT_ONCE, TEXTS, TOKENS, Rehearsal, Text, divergence, read_by_base, write
from utils import uniform


def library(policy, texts, adapter):
    """Log-probabilities of the next token after every token, by the library's own forward pass (fp32)."""
    with torch.no_grad(), policy.using(None if adapter else "base"):
        return torch.cat([policy.peft_model(torch.tensor([text])).logits[0].double().log_softmax(-1) for text in texts])


def move(policy, by=0.05):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    policy.forget()


def test_texts_are_the_bases_own_whatever_the_adapter_has_become(tmp_path):
    policy = tiny_policy(tmp_path)
    texts = write(policy, (3, 1))
    move(policy)
    assert write(policy, (3, 1)) == texts != write(policy, (3, 2))
    assert policy.reader.store.held == 0
    assert {len(text) for text in texts} == {TOKENS}
    assert len(texts) == TEXTS
    assert len({text[0] for text in texts}) > TEXTS / 2
    for i, text in enumerate(texts[:8]):  # each token is where its random number falls in the library's distribution
        below = library(policy, [text], adapter=False).exp().cumsum(-1).numpy()
        u = np.array([uniform(3, 1, i, t) for t in range(1, TOKENS)])
        rows, tokens = np.arange(TOKENS - 1), np.array(text[1:])
        assert (u < below[rows, tokens] + 1e-5).all()
        assert (u > np.where(tokens > 0, below[rows, tokens - 1], 0.0) - 1e-5).all()


def test_words_that_the_model_has_no_place_for_begin_no_text(tmp_path):
    policy = tiny_policy(tmp_path)
    known = len(policy.lm_head.weight)
    policy.tokenizer.add_tokens([f"<extra-{i}>" for i in range(2 * known)])
    assert max(text[0] for text in write(policy, (0, 0))) < known


def test_the_divergence_is_the_librarys_and_vanishes_with_its_gradient_at_the_base(tmp_path):
    policy, texts = load_policy(micro_config(tmp_path)), [[5, 1, 4, 4, 2], [3, 9, 2], [5, 1, 8]]
    move(policy)
    rehearsed = read_by_base(policy, texts)
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            parameter.mul_("lora_B" not in name)  # the base again
    parameters = [p for n, p in policy.trainable().items() if not n.startswith("value_head")]
    at_base = divergence(policy, rehearsed)
    assert at_base.item() == pytest.approx(0.0, abs=1e-6)
    assert max(float(g.abs().max()) for g in torch.autograd.grad(at_base, parameters)) < 1e-5
    move(policy)
    base, now = library(policy, texts, adapter=False), library(policy, texts, adapter=True)
    expected = float((base.exp() * (base - now)).sum())
    assert expected > 0.01
    moved = divergence(policy, rehearsed)
    assert moved.item() == pytest.approx(expected, rel=1e-4)
    gradients = torch.autograd.grad(moved, parameters)
    with torch.no_grad():
        for parameter, g in zip(parameters, gradients, strict=True):
            parameter.sub_(1e-3 * g)
        assert float(divergence(policy, rehearsed)) < moved.item()


def test_every_text_has_its_turn_and_no_other(monkeypatch):
    monkeypatch.setattr(rehearsal, "write", lambda policy, key: [[*key, i] for i in range(TEXTS)])
    monkeypatch.setattr(rehearsal, "read_by_base", lambda policy, texts: [Text(ids, None) for ids in texts])
    steps = range(2 * TEXTS // AT_ONCE)
    found = Rehearsal(None, 7)
    texts = [found.texts(step) for step in steps]
    assert [text.ids for text in chain(*texts)] == [[7, number, i] for number in (0, 1) for i in range(TEXTS)]
    assert {len(of_step) for of_step in texts} == {AT_ONCE}
    assert [Rehearsal(None, 7).texts(step) for step in steps] == texts
