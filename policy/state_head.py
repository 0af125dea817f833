"""An auxiliary training task: predict what the seat knows of the position from the hidden state at the prompt's end.

A return gives one noisy number per decision. OpenSpiel's tensor of what the seat knows (cards, board, bets) gives
dozens of exact ones, and a model that has never seen such a board must learn to read it before it can play. Predicting
known game features from layers that the policy shares: https://arxiv.org/abs/1609.05521, "Game feature augmentation".
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GAIN = 10.0  # RMS of the scaled hidden states: at the adapter's learning rate, Adam then moves logits far enough

State = tuple[str, Tensor]  # game, and what the seat knows: numbers in [0, 1]


class StateHead(nn.Module):
    """A linear layer for each game and size of its tensor, all zero at first."""

    def __init__(self, hidden_size: int, shapes: Mapping[str, Iterable[int]], device: torch.device) -> None:
        super().__init__()
        self.length = GAIN * hidden_size**0.5
        self.layers = nn.ModuleDict({
            f"{game}-{size}": nn.Linear(hidden_size, size, dtype=torch.float32, device=device)
            for game in sorted(shapes) for size in sorted(shapes[game])
        })  # fmt: skip
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden_MD: Tensor, states: Sequence[State]) -> Tensor:
        """KL(state || prediction) of each decision (M), in nats, summed over the state's numbers.

        For numbers that are 0 or 1 that is -log P of the state; others count as probabilities. A state without a layer
        counts 0. ``hidden_MD``: the hidden states at the last tokens of the prompts.
        """
        hidden_MD = hidden_MD * (self.length / hidden_MD.norm(dim=1, keepdim=True))
        nats_M, names = hidden_MD.new_zeros(len(states)), [f"{game}-{len(x)}" for game, x in states]
        for name in sorted({*names} & {*self.layers}):
            at_K = torch.tensor([i for i, other in enumerate(names) if other == name], device=hidden_MD.device)
            target = torch.stack([x for n, (_, x) in zip(names, states, strict=True) if n == name]).to(hidden_MD)
            logits = self.layers[name](hidden_MD[at_K])
            nats_K = F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(1)
            nats_K = nats_K + (torch.xlogy(target, target) + torch.xlogy(1 - target, 1 - target)).sum(1)
            nats_M = nats_M.index_add(0, at_K, nats_K)
        return nats_M
