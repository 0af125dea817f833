"""Text that the base model wrote itself, and how far the policy has moved from reading it as the base does.

Games teach nothing of what else a model is used for, and updates of an adapter shift that too. Rehearsing what the old
weights say themselves (https://doi.org/10.1080/09540099550039318; by distributions, https://arxiv.org/abs/1606.09282)
needs no data set.
"""

from collections.abc import Sequence as Seq
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from envs.protocol import Sequence
from policy.network import Read
from policy.vocabulary import draw
from utils import uniform

TEXTS, TOKENS = 64, 64
AT_ONCE = 2  # texts a step


@torch.no_grad()
def write(policy: Any, seed: int) -> list[list[int]]:
    """``TEXTS`` texts of ``TOKENS`` tokens: any token, and what the base draws after it at temperature 1."""
    texts = [[int(uniform(seed, i, 0) * len(policy.tokenizer))] for i in range(TEXTS)]
    kept: list[Any] = [None] * TEXTS
    with policy.using("base"):
        for t in range(1, TOKENS):
            reads = [Read(text, kv, keep=True) for text, kv in zip(texts, kept, strict=True)]
            hidden_ND, kept = policy.reader.read(reads)
            u_N = torch.tensor([uniform(seed, i, t) for i in range(TEXTS)], dtype=torch.float64, device=policy.device)
            for text, token in zip(texts, draw(hidden_ND, policy.lm_head.weight, u_N, 1.0)[0].tolist(), strict=True):
                text.append(token)
    return texts


def texts_of(texts: Seq[list[int]], step: int) -> list[list[int]]:
    """Those of a step; all have their turn."""
    return [texts[(AT_ONCE * step + i) % len(texts)] for i in range(AT_ONCE)]


def divergence(policy: Any, texts: Seq[list[int]]) -> Tensor:
    """KL(base || policy) of the next token, in nats, summed over all tokens of the texts; with gradients.

    At most ``AT_ONCE * TOKENS`` rows of whole-vocabulary logits, when no other activations are held any more.
    """
    sequences, every = [Sequence(text) for text in texts], [list(range(len(text))) for text in texts]

    def logprobs() -> Tensor:
        return policy.lm_head(policy.reader.hidden_at(sequences, every)).float().log_softmax(-1)

    with policy.using("base"):
        base_NV = logprobs()
    return F.kl_div(logprobs(), base_NV, reduction="sum", log_target=True)
