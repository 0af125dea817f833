"""trl 1.16's GRPOTrainer learns a game with SmolLM2-135M: see ``learning.py``.

The program's own games, prompts and LoRA; answers are sampled from the whole vocabulary, as TRL does. 8 games on each
deal are a group; games of several decisions are one row, in which what the user says between has no gradient.
"""

import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from dataclasses import replace as changed

import torch
from datasets import Dataset
from learning import GAMES, Marks, Path, configuration
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from env_wrapper import Task, play
from envs.types import Action
from policy.chat import ChatFormat

warnings.filterwarnings("ignore")
# Games on a deal; sampled tokens of an answer; rows in memory, of which 32 take more than 21 GB.
GROUP, ANSWER, AT_ONCE = 8, 4, 8


@dataclass
class Row:
    """An episode as TRL wants it: what it began with, what came after, and which of that was sampled."""

    prompt: list = field(default_factory=list)
    completion: list = field(default_factory=list)
    mask: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)

    def add(self, ids, logprobs, sampled):
        """Some tokens more."""
        self.completion += ids
        self.mask += [int(sampled)] * len(ids)
        self.logprobs += logprobs


class Player:
    """Answers by ``generate``, from the whole conversation each time."""

    def __init__(self, model, tokenizer, chat):
        self.model, self.tokenizer, self.chat, self.rows = model, tokenizer, chat, {}

    def act(self, queries):
        """One action a query; who answered illegally is not asked again, which would be another pass."""
        asked, queries = queries, [query for query in queries if query.rng_key[-1] == 1]
        new = iter(self._generate(queries) if queries else [])
        return [next(new) if query.rng_key[-1] == 1 else Action("") for query in asked]

    def _generate(self, queries):
        prompts = [self.chat.first_prompt(query.conversation)[0] for query in queries]
        inputs = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            out = self.model.generate(
                **inputs, max_new_tokens=ANSWER, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                pad_token_id=self.tokenizer.pad_token_id, eos_token_id=self.chat.end_id,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        new = out.sequences[:, inputs["input_ids"].shape[1] :]
        chosen = torch.stack(out.scores, 1).float().log_softmax(-1).gather(-1, new[..., None]).squeeze(-1)
        return [self._note(*each) for each in zip(queries, prompts, new.tolist(), chosen.tolist(), strict=True)]

    def _note(self, query, prompt, tokens, logprobs):
        n = tokens.index(self.chat.end_id) + 1 if self.chat.end_id in tokens else len(tokens)
        row = self.rows.setdefault(query.episode, Row(prompt))
        seen = len(row.prompt) + len(row.completion)
        row.add(prompt[seen:], [0.0] * len(prompt[seen:]), False)
        row.add(tokens[:n], logprobs[:n], True)
        return Action(self.chat.answer_text(tokens[:n])[0])


def main(game, seed, steps, seconds, folder):
    """Train until the time is over."""
    task, config = configuration(game, int(seed), "env.answer_mode=free", f"ppo.max_new_tokens={ANSWER}")
    tokenizer = AutoTokenizer.from_pretrained(config.model.model_name)
    model = AutoModelForCausalLM.from_pretrained(config.model.model_name, dtype=torch.bfloat16)
    chat, env = ChatFormat(tokenizer), changed(config.env, games_at_once=0)

    def rollout(prompts, trainer):
        player = Player(trainer.accelerator.unwrap_model(trainer.model).eval(), tokenizer, chat)
        episodes = play(env, player, [Task(task, int(deal), "random", i) for i, deal in enumerate(prompts)])
        trainer.model.train()
        rows = [player.rows[i] for i in range(len(prompts))]
        return {"prompt_ids": [r.prompt for r in rows], "completion_ids": [r.completion for r in rows],
                "logprobs": [r.logprobs for r in rows], "env_mask": [r.mask for r in rows],
                "score": [e.score for e in episodes]}  # fmt: skip

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.marks = Marks(model.save_pretrained, float(seconds), Path(folder))
            self.marks.after_a_step(0)

        def on_step_end(self, args, state, control, **kwargs):
            step = state.global_step
            control.should_training_stop = self.marks.after_a_step(step, step == int(steps))

    ppo, run = config.ppo, tempfile.TemporaryDirectory()
    arguments = GRPOConfig(
        output_dir=run.name, per_device_train_batch_size=AT_ONCE, num_generations=GROUP, num_iterations=1,
        gradient_accumulation_steps=GAMES // AT_ONCE, max_completion_length=1024,
        max_steps=int(steps), temperature=1.0, top_k=0, top_p=1.0, learning_rate=ppo.learning_rate, use_cpu=True,
        bf16=False, fp16=False, gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
        logging_steps=1, seed=int(seed),
    )  # fmt: skip
    lora = config.lora
    GRPOTrainer(
        model=model, reward_funcs=lambda score=None, **_: list(score), args=arguments, rollout_func=rollout,
        train_dataset=Dataset.from_dict({"prompt": [str(10_000 + i) for i in range(int(steps) * GAMES)]}),
        processing_class=tokenizer, callbacks=[Watch()],
        peft_config=LoraConfig(r=lora.r, lora_alpha=lora.lora_alpha, target_modules=list(lora.target_modules)),
    ).train()  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
