"""The output layer over a whole vocabulary, a slice of columns at a time: scoring tokens, and sampling them.

Scoring holds nothing of size N x V, sampling one such tensor. With gradients, the derivatives of the log-probability
(and of the entropy, on request) by the hidden state are computed along the way: the backward pass repeats nothing.

Shapes: N rows, D hidden size, V tokens of the vocabulary, C columns of a slice, S slices.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 4096  # of a slice: its logits, for some hundred rows, fit into a CPU's cache


def _logits(hidden_ND: Tensor, weight_CD: Tensor, temperature: float) -> Tensor:
    logits_NC = F.linear(hidden_ND, weight_CD)
    return (logits_NC if logits_NC.dtype == torch.float64 else logits_NC.float()) / temperature


class _Sums:
    """Running sums over the vocabulary of exp(z), z exp(z), W exp(z), W z exp(z), for logits z given slice by slice.

    z is relative to the largest logit so far, ``peak_N``, for numerical stability. The sums with W leave out the chosen
    token: its W would swallow what all others add where it is likely, since low precision rounds the sum.
    """

    def __init__(self, like_N: Tensor) -> None:
        self.peak_N = torch.full_like(like_N, -torch.inf)
        self.sums: list[Tensor] = []

    def add(self, logits_NC: Tensor, weight_CD: Tensor, pulls: int, at_N: Tensor) -> None:
        """Add a slice, with the chosen tokens at ``at_N`` of it; ``pulls``: how many of the sums with W are needed."""
        before_N, self.peak_N = self.peak_N, torch.maximum(self.peak_N, logits_NC.amax(1))
        below_NC = logits_NC - self.peak_N[:, None]
        exp_NC = below_NC.exp()
        weighted_NC = exp_NC * below_NC
        new = [exp_NC.sum(1, keepdim=True), weighted_NC.sum(1, keepdim=True)]
        for x_NC in (exp_NC, weighted_NC)[:pulls]:
            others_NC = x_NC.masked_fill_(torch.arange(len(weight_CD), device=at_N.device) == at_N[:, None], 0)
            new.append((others_NC.to(weight_CD.dtype) @ weight_CD).to(x_NC.dtype))
        if self.sums:
            fall_N1 = (before_N - self.peak_N)[:, None]
            for plain, weighted in zip(self.sums[::2], self.sums[1::2], strict=False):
                weighted.addcmul_(plain, fall_N1)
            new = [x.addcmul_(old, fall_N1.exp()) for x, old in zip(new, self.sums, strict=True)]
        self.sums = new


class _Score(torch.autograd.Function):
    """Log-probability and entropy with their gradients by the hidden state; the layer itself is frozen."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, chosen_N: Tensor, temperature: float, pulls: int
    ) -> tuple[Tensor, Tensor]:
        logit_N = hidden_ND.new_zeros(len(hidden_ND), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
        over = _Sums(logit_N)
        for start in range(0, len(weight_VD), COLUMNS):
            weight_CD = weight_VD[start : start + COLUMNS]
            logits_NC = _logits(hidden_ND, weight_CD, temperature)
            at_N = chosen_N - start
            over.add(logits_NC, weight_CD, pulls, at_N)
            inside_N = (at_N >= 0) & (at_N < len(weight_CD))
            here_N = logits_NC.gather(1, at_N.clamp(0, len(weight_CD) - 1)[:, None])[:, 0]
            logit_N = torch.where(inside_N, here_N, logit_N)
        total_N1, mean_N1, *pulls_ND = over.sums
        mean_N1, pulls_ND = mean_N1 / total_N1, [pull_ND / total_N1 for pull_ND in pulls_ND]
        log_total_N = over.peak_N + total_N1[:, 0].log()
        grads, below_N1, own_ND = [], (logit_N - over.peak_N)[:, None], weight_VD[chosen_N].to(logit_N.dtype)
        p_N1 = below_N1.exp() / total_N1
        if pulls:
            grads.append(((1 - p_N1) * own_ND - pulls_ND[0]) / temperature)
        if pulls > 1:
            own = p_N1 * (mean_N1 - below_N1) * own_ND
            grads.append((mean_N1 * pulls_ND[0] - pulls_ND[1] + own) / temperature)
        ctx.save_for_backward(*(grad_ND.to(hidden_ND.dtype) for grad_ND in grads))
        return logit_N - log_total_N, total_N1[:, 0].log() - mean_N1[:, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden = [g_N[:, None] * grad_ND for g_N, grad_ND in zip(grads, ctx.saved_tensors, strict=False)]
        return sum(by_hidden[1:], by_hidden[0]), None, None, None, None


def score(
    hidden_ND: Tensor, weight_VD: Tensor, chosen_N: Tensor, temperature: float, entropy_grad: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probability of the chosen token and entropy of softmax(hidden W^T / temperature), in nats (N, N).

    Gradients flow to ``hidden_ND``, of the entropy only with ``entropy_grad``; once, not twice.
    """
    wanted = torch.is_grad_enabled() and hidden_ND.requires_grad
    logp_N, entropy_N = _Score.apply(hidden_ND, weight_VD, chosen_N, temperature, wanted * (1 + entropy_grad))
    return logp_N, entropy_N if entropy_grad else entropy_N.detach()


def invert(cdf_NV: Tensor, u_N: Tensor) -> tuple[Tensor, Tensor]:
    """The column in which a share u of each row's total falls, and how far into that column, from 0 to 1; fp64."""
    total_N = cdf_NV[:, -1]
    below_N = torch.nextafter(total_N, torch.zeros_like(u_N))  # rounding must not reach past the last column
    aim_N1 = torch.minimum(u_N * total_N, below_N)[:, None]
    at_N1 = torch.searchsorted(cdf_NV, aim_N1, right=True)
    before_N1 = F.pad(cdf_NV, (1, 0)).gather(1, at_N1)
    return at_N1[:, 0], ((aim_N1 - before_N1) / (cdf_NV.gather(1, at_N1) - before_N1))[:, 0]


def draw(hidden_ND: Tensor, weight_VD: Tensor, u_N: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens sampled from softmax(hidden W^T / temperature), and their log-probabilities (fp64).

    ``u_N``: one uniform number per row (fp64), for inverse transform sampling: first the slice, then the token in it.
    None: the likeliest token.
    """
    pieces = [_logits(hidden_ND, weight_CD, temperature) for weight_CD in weight_VD.split(COLUMNS)]
    mass_NS = torch.stack([piece_NC.logsumexp(1) for piece_NC in pieces], 1).double()
    mass_NS -= mass_NS.logsumexp(1, keepdim=True)
    if u_N is None:
        slice_N = torch.stack([piece_NC.amax(1) for piece_NC in pieces], 1).argmax(1)
    else:
        slice_N, u_N = invert(mass_NS.exp().cumsum(1), u_N)
    pieces[-1] = F.pad(pieces[-1], (0, min(COLUMNS, len(weight_VD)) - pieces[-1].shape[1]), value=-torch.inf)
    rows = [pieces[s][n] for n, s in enumerate(slice_N.tolist())]
    logp_NC = torch.stack(rows).double().log_softmax(1)
    at_N = logp_NC.argmax(1) if u_N is None else invert(logp_NC.exp().cumsum(1), u_N)[0]
    logp_N = logp_NC.gather(1, at_N[:, None])[:, 0] + mass_NS.gather(1, slice_N[:, None])[:, 0]
    return slice_N * COLUMNS + at_N, logp_N
