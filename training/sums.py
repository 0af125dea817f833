"""Statistics of an update: sums over decisions, minibatch by minibatch, and the means that they come to."""

from typing import Any

import numpy as np
import torch


def add_up(sums: dict[str, Any], stats: dict[str, Any]) -> None:
    """Add statistics of a part of a minibatch to its sums; of those called ``_max`` the larger."""
    for name, value in stats.items():  # as tensors: nobody waits for a GPU
        join = torch.maximum if name.endswith("_max") else torch.add
        sums[name] = join(*map(torch.as_tensor, (sums[name], value)))


def means(totals: dict[str, Any]) -> dict[str, float]:
    """Sums over ``totals["decisions"]`` decisions as means; what is called ``_max`` as it is."""
    device = getattr(totals["decisions"], "device", "cpu")
    values = torch.stack([torch.as_tensor(total, device=device) for total in totals.values()]).tolist()  # one wait
    count = (read := dict(zip(totals, values, strict=True))).pop("decisions")
    return {n: x if n.endswith("_max") else x / count if count else np.nan for n, x in read.items()}
