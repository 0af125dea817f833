"""trl 1.16's GRPOTrainer with token ids as prompts: 8 answers a prompt, reference by switching the adapter off.

It has no critic. In w2 its rollout function generates turn by turn and returns one row an episode.
"""

import sys
import tempfile
import time
import warnings

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workloads import EOS, KL, LORA, LR, PAD, WORKLOADS, Clock, left_padded, model_folder, report, reward

warnings.filterwarnings("ignore")


class Marks(TrainerCallback):
    """CPU time at the beginning of each update, and at the end of all."""

    def __init__(self, steps, clock):
        self.steps, self.clock, self.times = steps, clock, []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % self.steps == 0:
            self.times.append(time.process_time())
            self.clock.counting = state.global_step >= self.steps

    def on_train_end(self, *args, **kwargs):
        self.times.append(time.process_time())


class Trainer(GRPOTrainer):
    """Prompts are numbers that name token ids; generation and scoring are timed."""

    clock, prompts, counts = Clock(), [], {"rollout": 0, "both": 0}

    def _tokenize_prompts(self, prompts):
        return [self.prompts[int(p)] for p in prompts], None, {}

    def _generate_single_turn(self, *args, **kwargs):
        self.counts["rollout"] += self.clock.counting
        with self.clock("rollout"):
            return super()._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        self.counts["both"] += self.clock.counting
        with self.clock("both"):
            return super()._generate_and_score_completions(inputs)


def turn_by_turn(work):
    """The rollout function of w2: whole history to ``generate`` at every turn."""
    seed = iter(range(100))

    def rollout(prompts, trainer):
        Trainer.counts["rollout"] += Trainer.clock.counting
        with Trainer.clock("rollout"):
            shown, model = work.prompts(next(seed)), trainer.accelerator.unwrap_model(trainer.model).eval()
            rows, mask, logprobs, answers = ([[] for _ in shown] for _ in range(4))
            for turn in range(work.turns):
                for row, m, lp, turns in zip(rows, mask, logprobs, shown, strict=True):
                    row += turns[turn]
                    m += [0] * len(turns[turn]) * (turn > 0)
                    lp += [0.0] * len(turns[turn]) * (turn > 0)
                ids, attention = left_padded(rows)
                with torch.no_grad():
                    out = model.generate(
                        input_ids=ids, attention_mask=attention, max_new_tokens=work.answer, min_new_tokens=work.answer,
                        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=PAD, eos_token_id=EOS,
                        return_dict_in_generate=True, output_scores=True,
                    )  # fmt: skip
                new = out.sequences[:, ids.shape[1] :]
                chosen = torch.stack(out.scores, 1).log_softmax(-1).gather(-1, new[..., None]).squeeze(-1)
                for b in range(work.episodes):
                    answers[b].append(new[b].tolist())
                    rows[b] += new[b].tolist()
                    mask[b] += [1] * work.answer
                    logprobs[b] += chosen[b].tolist()
            model.train()
            first = [turns[0] for turns in shown]
            completions = [row[len(prompt) :] for row, prompt in zip(rows, first, strict=True)]
            return {"prompt_ids": first, "completion_ids": completions, "logprobs": logprobs, "env_mask": mask,
                    "score": [reward(a) for a in answers]}  # fmt: skip

    return rollout


def main(work):
    """Train and report; the last batch is generated outside the timed window, so parts are means of what is in it."""
    path, steps, updates = model_folder(work.vocab), work.epochs * work.minibatches, work.updates
    single, run = work.turns == 1, tempfile.TemporaryDirectory()
    Trainer.prompts = [turns[0] for seed in range(updates + 2) for turns in work.prompts(seed)]
    config = GRPOConfig(
        output_dir=run.name, per_device_train_batch_size=work.episodes // work.minibatches,
        gradient_accumulation_steps=1, steps_per_generation=work.minibatches, num_iterations=work.epochs,
        num_generations=8 if single else 4, max_completion_length=work.answer if single else 2000,
        max_steps=steps * (updates + 1), beta=KL, temperature=1.0, top_k=0, top_p=1.0, learning_rate=LR, use_cpu=True,
        bf16=False, fp16=False, gradient_checkpointing=False, report_to="none", logging_steps=steps,
        save_strategy="no", disable_tqdm=True, seed=0,
        **({"generation_kwargs": {"min_new_tokens": work.answer}} if single else {}),
    )  # fmt: skip

    def scores(completion_ids=None, score=None, **kwargs):
        return list(score) if score is not None else [reward([ids]) for ids in completion_ids]

    marks = Marks(steps, Trainer.clock)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), reward_funcs=scores, args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(Trainer.prompts))]}),
        processing_class=AutoTokenizer.from_pretrained(path), peft_config=LoraConfig(**LORA), callbacks=[marks],
        **({} if single else {"rollout_func": turn_by_turn(work)}),
    )  # fmt: skip
    trainer.train()
    spent, counts = Trainer.clock.seconds, Trainer.counts
    rollout, both = spent["rollout"] / max(counts["rollout"], 1), spent["both"] / max(counts["both"], 1)
    update = (marks.times[-1] - marks.times[1] - spent["both"]) / updates
    parts = {"rollout": rollout, "score": both - rollout, "update": update}
    report("trl116", work, {part: s * updates for part, s in parts.items()}, updates)


if __name__ == "__main__":
    main(WORKLOADS[sys.argv[1]])
