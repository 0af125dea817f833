"""Advantages, losses and their gradients against those of trl 0.11.4's classic PPOTrainer on the same batch.

    python benchmarks/peers/parity_trl0114.py [--venvs out/venvs]

The peer runs in its own environment (made when first asked for, see ``bench_peers.py``); a decision here is a token
there. Its whitening divides by n - 1, so that both losses get the advantages whitened here.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

S, T, GAMMA, LAM, CLIP, VF = 64, 7, 0.97, 0.9, 0.2, 0.4


def batch():
    """Random decisions in double precision; every row is left-aligned, and the ratios leave the clip range."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, T + 1, (S,), generator=g)
    mask = torch.arange(T) < lengths[:, None]

    def normal(scale):
        return scale * torch.randn(S, T, generator=g, dtype=torch.float64)

    return mask, normal(1.0) * mask, normal(0.5), normal(0.3) - 1, normal(0.3), normal(0.3)


def theirs():
    """In the peer's environment: its results as JSON."""
    from trl import PPOTrainer

    mask, rewards, values, old, change, moved = batch()
    settings = {"gamma": GAMMA, "lam": LAM, "whiten_rewards": False, "cliprange": CLIP, "cliprange_value": CLIP,
                "vf_coef": VF, "ratio_threshold": 10.0}  # fmt: skip
    trainer = SimpleNamespace(config=SimpleNamespace(**settings))
    m = mask.double()
    masked, _, returns = PPOTrainer.compute_advantages(trainer, values, rewards, m)
    raw = returns - masked
    advantages = (raw - raw[mask].mean()) / (raw[mask].std(correction=0) + 1e-8) * m
    new, predicted = (old + change).requires_grad_(), (values + moved).requires_grad_()
    policy, value, _ = PPOTrainer.loss(
        trainer, old, masked, torch.zeros(S, T, 2, dtype=torch.float64), predicted, new, m, advantages, returns
    )
    (policy + value).backward()
    out = {"advantages": raw * m, "returns": returns * m, "policy loss": policy, "value loss": value,
           "gradient by log-probabilities": new.grad * m, "gradient by values": predicted.grad * m}  # fmt: skip
    print(json.dumps({name: x.tolist() for name, x in out.items()}))


def ours():
    """The same by this program."""
    from train_ppo import ppo_loss, turn_gae, whiten
    from training.config import PPOConfig

    mask, rewards, values, old, change, moved = batch()
    ppo = PPOConfig(cliprange=CLIP, vf_coef=VF)
    raw, returns = turn_gae(rewards, values, mask, torch.zeros(S, dtype=torch.float64), GAMMA, LAM)
    new, predicted = (old + change).requires_grad_(), (values + moved).requires_grad_()
    parts = (new[mask], predicted[mask], torch.zeros(int(mask.sum())), old[mask], values[mask], whiten(raw[mask]))
    loss, sums = ppo_loss(*parts, returns[mask], torch.ones(int(mask.sum())), ppo)
    (loss / mask.sum()).backward()
    return {"advantages": raw, "returns": returns, "policy loss": sums["policy_loss"] / mask.sum(),
            "value loss": VF * sums["value_loss"] / mask.sum(), "gradient by log-probabilities": new.grad,
            "gradient by values": predicted.grad}  # fmt: skip


def main():
    """Print the largest difference of each; 1 where one is more than rounding."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from benchmarks.bench_peers import KNOWN, interpreter

    venvs = Path(sys.argv[2]) if "--venvs" in sys.argv else Path("out/venvs")
    python = interpreter("trl0114", KNOWN["trl0114"], venvs)
    done = subprocess.run([python, __file__, "--theirs"], capture_output=True, text=True, check=True)
    their, worst = json.loads(done.stdout.splitlines()[-1]), 0.0
    for name, x in ours().items():
        expected = torch.tensor(their[name], dtype=torch.float64)
        difference = float((x.detach() - expected).abs().max())
        worst = max(worst, difference)
        print(f"{name:<32} largest {float(expected.abs().max()):.4f}, largest difference {difference:.1e}")
    return int(worst > 1e-9)


if __name__ == "__main__":
    sys.exit(theirs() if "--theirs" in sys.argv else main())
