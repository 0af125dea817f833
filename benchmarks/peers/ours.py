"""The program's own policy and update on the peers' workloads: token ids in place of text, no game."""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from workloads import KL, LORA, LR, WORKLOADS, Clock, model_folder, report, reward

from envs.config import EnvConfig
from envs.types import Episode, Query, Task
from policy import load_policy
from policy.chat import ChatFormat
from policy.model import LoraConfig, ModelConfig
from train_ppo import collate, ppo_update
from training.config import PPOConfig, RunConfig


class IdChat(ChatFormat):
    """The policy's chat format, but a user message's content names a list of token ids."""

    def __init__(self, chat):
        self.__dict__ |= chat.__dict__
        self.ids = {}

    def first_prompt(self, conversation):
        return list(self.ids[conversation[1]["content"]]), 0

    def later(self, messages):
        return [token for m in messages if m["role"] == "user" for token in self.ids[m["content"]]]


def configuration(work):
    """The program's configuration that does the workload's work."""
    episodes = work.episodes // work.minibatches
    return SimpleNamespace(
        model=ModelConfig(
            model_name=model_folder(work.vocab), use_4bit=False, dtype="float32", device="cpu",
            gradient_checkpointing=False, tokens_per_batch=32768,
        ),
        lora=LoraConfig(r=LORA["r"], lora_alpha=LORA["lora_alpha"]),
        ppo=PPOConfig(
            legal_mass_coef=0.0,
            learning_rate=LR, batch_size=work.episodes, mini_batch_size=episodes, ppo_epochs=work.epochs,
            init_kl_coef=KL, target_kl=None, recompute_logprobs=False, max_new_tokens=work.answer, gamma=1.0,
        ),
        env=EnvConfig(answer_mode="free"),
        run=RunConfig(),
    )  # fmt: skip


def rollout(policy, work, seed):
    """Play all episodes turn by turn; the program ends an answer that was cut with a token of its own, which takes
    the place of the next prompt's first one."""
    prompts, chat = work.prompts(seed), policy.chat
    chat.ids = {f"{b} {t}": ids[t > 0 :] for b, turns in enumerate(prompts) for t, ids in enumerate(turns)}
    talks = [[{"role": "system", "content": ""}] for _ in prompts]
    for turn in range(work.turns):
        queries = []
        for b, talk in enumerate(talks):
            talk.append({"role": "user", "content": f"{b} {turn}"})
            key = (seed * work.episodes + b, 0, turn, 1)
            queries.append(Query(b, 0, list(talk), {}, key, continues=turn < work.turns - 1))
        actions = policy.act(queries)
        for talk, action in zip(talks, actions, strict=True):
            talk.append({"role": "assistant", "content": action.text})
    policy.release(range(work.episodes))
    episodes = []
    for b, action in enumerate(actions):
        score = reward([d.chosen for d in action.sequence.decisions])
        episodes.append(
            Episode(Task(b), "synthetic", score, "finished", {0: [action.sequence]}, {"scores": {0: score}})
        )
    return episodes


def main(work):
    """Run the updates and report."""
    config = configuration(work)
    policy, clock = load_policy(config), Clock()
    policy.chat = policy.conversations.chat = IdChat(policy.chat)
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=LR, weight_decay=0.01)
    for seed in range(work.updates + 1):
        clock.counting = seed > 0
        with clock("rollout"):
            episodes = rollout(policy, work, seed)
        with clock("score"):
            batch = collate(episodes, policy, config.ppo, KL)
            assert len(batch.values_M) == work.samples
        with clock("update"):
            ppo_update(policy, optimizer, batch, config.ppo, (seed,))
    report("ours", work, clock.seconds, work.updates)


if __name__ == "__main__":
    main(WORKLOADS[sys.argv[1]])
