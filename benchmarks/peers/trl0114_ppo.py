"""trl 0.11.4's PPOTrainer, the classic one: ``generate`` and ``step``; in w2 every turn is a sample of its own."""

import sys
import warnings

import torch
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from workloads import EOS, KL, LORA, LR, PAD, WORKLOADS, Clock, left_padded, model_folder, report, reward

warnings.filterwarnings("ignore")


def main(work):
    """Train and report."""
    path, clock = model_folder(work.vocab), Clock()
    model = AutoModelForCausalLMWithValueHead.from_pretrained(path, peft_config=LoraConfig(**LORA))
    config = PPOConfig(
        batch_size=work.samples, mini_batch_size=work.samples // work.minibatches, gradient_accumulation_steps=1,
        ppo_epochs=work.epochs, learning_rate=LR, init_kl_coef=KL, adap_kl_ctrl=False, seed=0,
    )  # fmt: skip
    trainer = PPOTrainer(config, model, ref_model=None, tokenizer=AutoTokenizer.from_pretrained(path))
    options = {"max_new_tokens": work.answer, "min_new_tokens": work.answer, "do_sample": True, "top_k": 0,
               "top_p": 1.0, "temperature": 1.0, "pad_token_id": PAD, "eos_token_id": EOS}  # fmt: skip
    for seed in range(work.updates + 1):
        clock.counting, prompts = seed > 0, work.prompts(seed)
        rows, answers = [[] for _ in prompts], [[] for _ in prompts]
        queries, responses, scores = [], [], []
        with clock("rollout"):
            for turn in range(work.turns):
                for row, turns in zip(rows, prompts, strict=True):
                    row += turns[turn]
                ids, mask = left_padded(rows)
                with torch.no_grad():
                    out = model.generate(input_ids=ids, attention_mask=mask, **options)[:, ids.shape[1] :]
                for b, row in enumerate(rows):
                    queries.append(torch.tensor(row))
                    responses.append(out[b].clone())
                    answers[b].append(out[b].tolist())
                    row += out[b].tolist()
                last = turn == work.turns - 1
                scores += [torch.tensor(reward(a) if last else 0.0) for a in answers]
        with clock("update"):
            trainer.step(queries, responses, scores)
    report("trl0114", work, clock.seconds, work.updates)


if __name__ == "__main__":
    main(WORKLOADS[sys.argv[1]])
