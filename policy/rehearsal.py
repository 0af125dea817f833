"""Rehearsal against forgetting: the KL divergence of policy and base model on text that the base sampled itself.

Training on games also shifts what else the model is used for. Rehearsing samples of the old weights
(https://doi.org/10.1080/09540099550039318; by distributions, https://arxiv.org/abs/1606.09282) needs no data set.
"""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from envs.types import Sequence
from policy.network import Read
from policy.vocabulary import draw
from utils import uniform

TEXTS, TOKENS = 64, 64
AT_ONCE = 2  # texts per step


class Text(NamedTuple):
    """A text of T tokens, and the base's log-probabilities of the token after each."""

    ids: list[int]
    base_TV: Tensor


class Rehearsal:
    """New texts for each step, the same after a resume; ``TEXTS`` of them are sampled at a time.

    No text is used twice: a rehearsed text drifts further afterwards than one that never was, because Adam overshoots
    along what is peculiar to it (docs/log.md).
    """

    def __init__(self, policy: Any, seed: int) -> None:
        self.policy, self.seed = policy, seed
        self._round, self._texts = -1, list[list[int]]()

    def texts(self, step: int) -> list[Text]:
        """The texts of a step."""
        number, place = divmod(AT_ONCE * step, TEXTS)
        if number != self._round:
            self._round, self._texts = number, write(self.policy, (self.seed, number))
        return read_by_base(self.policy, self._texts[place : place + AT_ONCE])


@torch.no_grad()
def write(policy: Any, key: Seq[int]) -> list[list[int]]:
    """``TEXTS`` texts of ``TOKENS`` tokens: a uniformly drawn one, continued by the base at temperature 1."""
    vocabulary = min(len(policy.tokenizer), len(policy.lm_head.weight))
    texts = [[int(uniform(*key, i, 0) * vocabulary)] for i in range(TEXTS)]
    kept: list[Any] = [None] * TEXTS
    with policy.using("base"):
        for t in range(1, TOKENS):
            reads = [Read(text, kv, keep=True) for text, kv in zip(texts, kept, strict=True)]
            hidden_ND, kept = policy.reader.read(reads)
            u_N = torch.tensor([uniform(*key, i, t) for i in range(TEXTS)], dtype=torch.float64, device=policy.device)
            for text, token in zip(texts, draw(hidden_ND, policy.lm_head.weight, u_N, 1.0)[0].tolist(), strict=True):
                text.append(token)
    return texts


def _logprobs(policy: Any, texts: Seq[list[int]]) -> Tensor:
    """Of the token after each token of the texts (their total number, V); whole rows of logits, in one pass."""
    sequences, positions = [Sequence(text) for text in texts], [list(range(len(text))) for text in texts]
    return policy.lm_head(policy.reader.hidden_at(sequences, positions)).float().log_softmax(-1)


def read_by_base(policy: Any, texts: Seq[list[int]]) -> list[Text]:
    """The texts as the base reads them: once for all updates of a step, as it never changes."""
    with policy.using("base"):
        found = _logprobs(policy, texts).split([len(text) for text in texts])
    return [Text(ids, base_TV) for ids, base_TV in zip(texts, found, strict=True)]


def divergence(policy: Any, texts: Seq[Text]) -> Tensor:
    """KL(base || policy) of the next token, in nats, summed over all tokens of the texts; with gradients.

    To be called when no other activations are held.
    """
    ids, base = zip(*texts, strict=True)
    return F.kl_div(_logprobs(policy, ids), torch.cat(base), reduction="sum", log_target=True)
