"""What training on games does to other uses: perplexity on English prose, and answers to everyday questions.

``english.txt`` is from Alice's Adventures in Wonderland, the Gettysburg Address, the Declaration of Independence, Pride
and Prejudice, A Tale of Two Cities, Moby-Dick and A Scandal in Bohemia, all in the public domain.
"""

import logging
import math
from pathlib import Path
from typing import Any

import torch

from envs.types import Decision, Query, Sequence

log = logging.getLogger(__name__)

TEXT = Path(__file__).parent / "english.txt"
WINDOW = 512  # tokens of context
MIN_VOCABULARY = 4096  # a smaller tokenizer was made for games, and its model knows no English
ANSWER_TOKENS = 48
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "How many days are there in a week?",
    "What do bees make?",
    "Write one sentence about the sea.",
    "What is the opposite of hot?",
    "Which planet do we live on?",
    "Say hello in Spanish.",
    "What is 7 plus 5?",
    "Why do leaves fall in autumn?",
    "Give me a short recipe for an omelette.",
    "Who wrote Romeo and Juliet?",
    "What is a good name for a dog?",
    "Explain what a computer does.",
    "What should I take along on a rainy day?",
    "Finish the sentence: Once upon a time",
    "What is water made of?",
    "How do you thank somebody politely?",
    "Which animal says moo?",
    "Give me one tip for sleeping better.",
)


def perplexity(policy: Any, text: str) -> float:
    """exp(mean negative log-probability per token, in nats), in windows of ``WINDOW`` tokens."""
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    windows = [w for i in range(0, len(ids), WINDOW) if len(w := ids[i : i + WINDOW]) > 1]
    sequences = [Sequence(w, [Decision(1, len(w), positions=[*range(len(w) - 1)], chosen=w[1:])]) for w in windows]
    with torch.no_grad():
        total = float(policy.evaluate_decisions(sequences).logprobs.double().sum())
    return math.exp(-total / sum(len(s.ids) - 1 for s in sequences))


def answers(policy: Any) -> list[str]:
    """The likeliest answer to each of ``QUESTIONS``."""
    system = {"role": "system", "content": "You are a helpful assistant."}
    asked = [[system, {"role": "user", "content": question}] for question in QUESTIONS]
    queries = [Query(-1 - i, 0, conversation, {}, (i,)) for i, conversation in enumerate(asked)]
    try:
        return [action.text.strip() for action in policy.act(queries)]
    finally:
        policy.release([query.episode for query in queries])


def measure(policy: Any) -> dict[str, Any] | None:
    """Perplexity and answers without and with the adapter; None: the model never knew English, or the device failed."""
    if len(policy.tokenizer) < MIN_VOCABULARY:
        return None
    text = TEXT.read_text(encoding="utf-8")
    settings = {"temperature": 1.0, "greedy": True, "constrained": False, "max_new_tokens": ANSWER_TOKENS,
                "max_seq_length": WINDOW}  # fmt: skip
    saved = {name: getattr(policy, name) for name in settings}
    vars(policy).update(settings)
    try:
        after, answers_after = perplexity(policy, text), answers(policy)
        with policy.using("base"):
            before, answers_before = perplexity(policy, text), answers(policy)
    except RuntimeError as error:  # the results of the run are safe by then
        log.warning("perplexity and answers in English could not be measured: %s", " ".join(str(error).split()))
        return None
    finally:
        vars(policy).update(saved)
    rows = [list(row) for row in zip(QUESTIONS, answers_before, answers_after, strict=True)]
    return {"perplexity_before": before, "perplexity": after, "answers": rows}


def line(english: dict[str, Any]) -> str:
    """What ``measure`` found, as a line for the console."""
    same = sum(before == after for _, before, after in english["answers"])
    return (f"English:    perplexity {english['perplexity_before']:.2f} -> {english['perplexity']:.2f}; "
            f"{same} of {len(QUESTIONS)} answers to everyday questions are the same")  # fmt: skip
