"""A plain PPO loop as one writes it with transformers and peft: cached decoding, one row an episode in the update,
logits only where something was sampled. No logging, no checkpoint, no environment."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache
from workloads import EOS, KL, LORA, LR, PAD, WORKLOADS, Clock, left_padded, model_folder, report, reward


class Net:
    """Base with adapter, value head, optimizer."""

    def __init__(self, work):
        self.base = AutoModelForCausalLM.from_pretrained(model_folder(work.vocab), dtype=torch.float32)
        self.peft = get_peft_model(self.base, LoraConfig(**LORA))
        self.value = torch.nn.Linear(self.base.config.hidden_size, 1)
        self.parameters = [p for p in self.peft.parameters() if p.requires_grad] + [*self.value.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR)

    def head(self, hidden):
        """Log-probabilities (the end of turn is never chosen) and values."""
        logits = self.base.lm_head(hidden).clone()
        logits[..., EOS] = -torch.inf
        return logits.log_softmax(-1), self.value(hidden).squeeze(-1)

    def score(self, ids, mask, at, chosen):
        """Log-probability of what was chosen after the positions ``at``, and the values there."""
        hidden = self.base.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        logprobs, values = self.head(torch.take_along_dim(hidden, at[..., None], 1))
        return logprobs.gather(-1, chosen[..., None]).squeeze(-1), values


@torch.no_grad()
def rollout(net, work, prompts):
    """Play all episodes turn by turn with one cache; rows of ids, positions, log-probabilities and values."""
    cache, B = DynamicCache(config=net.base.config), work.episodes
    mask, length = torch.zeros(B, 0, dtype=torch.long), torch.zeros(B, dtype=torch.long)
    rows, at, logprobs, values = ([[] for _ in range(B)] for _ in range(4))
    last = [[] for _ in range(B)]
    for turn in range(work.turns):
        ids, new = left_padded([last[b] + prompts[b][turn] for b in range(B)])
        where = (length[:, None] + new.cumsum(1) - 1).clamp(min=0)
        mask, length = torch.cat([mask, new], 1), length + new.sum(1)
        for b in range(B):
            rows[b] += prompts[b][turn]
        for i in range(work.answer):
            out = net.base.model(
                input_ids=ids, attention_mask=mask, position_ids=where, past_key_values=cache, use_cache=True
            )
            logp, value = net.head(out.last_hidden_state[:, -1])
            pick = torch.multinomial(logp.exp(), 1)
            chosen = logp.gather(1, pick)[:, 0].tolist()
            for b, token in enumerate(pick[:, 0].tolist()):
                at[b].append(len(rows[b]) - 1)
                rows[b].append(token)
                logprobs[b].append(chosen[b])
                values[b].append(float(value[b]))
            if i < work.answer - 1:
                ids, where = pick, length[:, None].clone()
                mask, length = torch.cat([mask, mask.new_ones(B, 1)], 1), length + 1
        last = [[row[-1]] for row in rows]
    return rows, torch.tensor(at), torch.tensor(logprobs), torch.tensor(values)


def advantages(rewards, values):
    """Generalised advantage estimation over tokens, lambda 0.95; advantages whitened."""
    out, last = torch.zeros_like(rewards), 0.0
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
        last = rewards[:, t] + following - values[:, t] + 0.95 * last
        out[:, t] = last
    return (out - out.mean()) / (out.std() + 1e-8), out + values


def update(net, work, ids, mask, at, chosen, old, values, adv, returns):
    """The epochs of one step."""
    for _ in range(work.epochs):
        for mb in torch.randperm(work.episodes).chunk(work.minibatches):
            keep = slice(None, -1) if work.turns == 1 else slice(None)
            new, value = net.score(ids[mb, keep], None if work.turns == 1 else mask[mb], at[mb], chosen[mb])
            ratio, a = (new - old[mb]).exp(), adv[mb]
            policy = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)).mean()
            near = values[mb] + (value - values[mb]).clamp(-0.2, 0.2)
            critic = 0.5 * torch.max((value - returns[mb]) ** 2, (near - returns[mb]) ** 2).mean()
            (policy + 0.1 * critic).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters, 1.0)
            net.optimizer.step()
            net.optimizer.zero_grad()


def main(work):
    """Run the updates and report."""
    torch.manual_seed(0)
    net, clock = Net(work), Clock()
    for seed in range(work.updates + 1):
        clock.counting, prompts = seed > 0, work.prompts(seed)
        with clock("rollout"):
            rows, at, old, values = rollout(net, work, prompts)
            length = max(map(len, rows))
            ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
            mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
            chosen = ids.gather(1, at + 1)
        with clock("score"), torch.no_grad():
            with net.peft.disable_adapter():
                reference, _ = net.score(ids, None if work.turns == 1 else mask, at, chosen)
            rewards = -KL * (old - reference)
            answers = chosen.view(work.episodes, work.turns, work.answer).tolist()
            rewards[:, -1] += torch.tensor([reward(answer) for answer in answers])
            adv, returns = advantages(rewards, values)
        with clock("update"):
            update(net, work, ids, mask, at, chosen, old, values, adv, returns)
    report("floor", work, clock.seconds, work.updates)


if __name__ == "__main__":
    main(WORKLOADS[sys.argv[1]])
