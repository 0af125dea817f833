"""The peers' common ground: the tiny model, the three workloads and the report. Any transformers from 4.45 on.

The model is a random Qwen2 (hidden 128, 4 layers, 4 heads over 2, fp32, tied head) with LoRA of rank 8 on its seven
linear layers; prompts are random token ids. Workloads:

w1  64 prompts of 128 tokens, 4 sampled tokens each; 4 epochs of 4 minibatches; vocabulary 1,000
w2  16 episodes of 10 turns, 80-120 new tokens a turn, 3 sampled tokens a turn; 1 epoch of 4; the unit is the turn
w3  w1 with Qwen's vocabulary of 151,936; 1 epoch of 8 minibatches

Each peer is one file, run as ``python PEER.py WORKLOAD``; it prints one line of JSON, times in CPU seconds of the
process. The first update warms up and is not counted.
"""

import json
import os
import random
import resource
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false",
               "ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": "", "TRL_EXPERIMENTAL_SILENCE": "1"}  # fmt: skip

import torch  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

EOS, PAD, FIRST, LAST = 2, 0, 3, 899  # token ids; prompts hold FIRST..LAST
KL, LR, TURN_LENGTHS = 0.05, 1e-4, (80, 120)
TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'assistant' %}{{ '<|im_start|>' }}{% endif %}"
    "{{ m.content + '<|im_end|>' }}{% endfor %}"
)
LORA = {
    "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none", "task_type": "CAUSAL_LM",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Sizes of one update. A sample is an answer: a response of w1 and w3, a turn of w2."""

    name: str
    episodes: int
    turns: int
    answer: int  # sampled tokens a turn
    epochs: int
    minibatches: int
    vocab: int
    updates: int  # timed ones

    @property
    def samples(self):
        return self.episodes * self.turns

    def prompts(self, seed):
        """Token ids a turn of each episode."""
        rng = random.Random(seed)
        lengths = (128, 128) if self.turns == 1 else TURN_LENGTHS
        return [
            [[rng.randint(FIRST, LAST) for _ in range(rng.randint(*lengths))] for _ in range(self.turns)]
            for _ in range(self.episodes)
        ]


WORKLOADS = {
    w.name: w
    for w in (
        Workload("w1", 64, 1, 4, 4, 4, 1000, 2),
        Workload("w2", 16, 10, 3, 1, 4, 1000, 1),
        Workload("w3", 64, 1, 4, 1, 8, 151_936, 1),
    )
}


def reward(answers):
    """Score of an episode from the tokens of its answers: whether the first tokens' sum is a multiple of 7."""
    return float(sum(answer[0] for answer in answers) % 7 == 0)


def model_folder(vocab):
    """A folder with the model and a tokenizer (for libraries that want one), made once a version of transformers."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = Path(tempfile.gettempdir()) / f"peer-model-{transformers.__version__}-{vocab}"
    if not (folder / "tokenizer_config.json").exists():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=vocab, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=256, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=EOS, pad_token_id=PAD,
        )  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(folder)
        letters = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = decoders.ByteLevel()
        raw.add_special_tokens(letters[:3])
        fast = PreTrainedTokenizerFast(
            tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
        )
        fast.chat_template = TEMPLATE
        fast.save_pretrained(folder)
    return str(folder)


class Clock:
    """CPU seconds of the process a part, of what follows the first update."""

    def __init__(self):
        self.seconds, self.counting = {}, False

    @contextmanager
    def __call__(self, part):
        start = time.process_time()
        yield
        if self.counting:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - start


def left_padded(rows):
    """Ids and mask of rows padded on the left."""
    length = max(map(len, rows))
    ids, mask = torch.full((len(rows), length), PAD), torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :] = torch.tensor(row)
        mask[i, length - len(row) :] = 1
    return ids, mask


def report(peer, work, seconds, updates):
    """Print the result: samples a CPU second over ``updates`` updates, seconds an update, peak memory."""
    import transformers

    total = sum(seconds.values())
    row = {"peer": peer, "workload": work.name, "samples_per_cpu_s": work.samples * updates / total}
    row |= {f"{part}_s": s / updates for part, s in seconds.items()}
    row["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("RESULT " + json.dumps(row | {"transformers": transformers.__version__}), flush=True)
