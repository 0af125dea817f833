"""trl 1.12's experimental PPOTrainer, the last release that has one: a whole second model as critic, a third as reward.

It takes one fixed length a batch and has no turns: w1 and w3 only.
"""

import sys
import tempfile
import time
import warnings

import torch
import trl.experimental.ppo.ppo_trainer as module
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer
from workloads import KL, LORA, LR, WORKLOADS, Clock, model_folder, report

warnings.filterwarnings("ignore")
clock, times = Clock(), []
generate = module.batch_generation


def timed(*args, **kwargs):
    """Generation, timed."""
    with clock("rollout"):
        return generate(*args, **kwargs)


class Marks(TrainerCallback):
    """CPU time after each update."""

    def on_step_end(self, *args, **kwargs):
        times.append(time.process_time())
        clock.counting = True


def main(work):
    """Train and report."""
    path, updates, run = model_folder(work.vocab), work.updates, tempfile.TemporaryDirectory()
    rows = [turns[0] for seed in range(updates + 1) for turns in work.prompts(seed)]
    config = PPOConfig(
        output_dir=run.name, per_device_train_batch_size=work.episodes, gradient_accumulation_steps=1,
        num_mini_batches=work.minibatches, num_ppo_epochs=work.epochs, response_length=work.answer, temperature=1.0,
        local_rollout_forward_batch_size=work.episodes, total_episodes=len(rows), learning_rate=LR, kl_coef=KL,
        num_sample_generations=0, report_to="none", use_cpu=True, bf16=False, fp16=False, save_strategy="no", seed=0,
        gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip

    def scorer():
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)

    module.batch_generation = timed
    trainer = PPOTrainer(
        args=config, processing_class=AutoTokenizer.from_pretrained(path), ref_model=None,
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), reward_model=scorer(),
        value_model=scorer(), train_dataset=Dataset.from_dict({"input_ids": rows}), peft_config=LoraConfig(**LORA),
        callbacks=[Marks()],
    )  # fmt: skip
    assert trainer.args.local_mini_batch_size == work.episodes // work.minibatches
    trainer.train()
    rollout = clock.seconds["rollout"]
    report("trl112", work, {"rollout": rollout, "update": times[updates] - times[0] - rollout}, updates)


if __name__ == "__main__":
    main(WORKLOADS[sys.argv[1]])
