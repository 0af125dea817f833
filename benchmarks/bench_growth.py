"""How the cost of a step grows: with games per batch, and with turns per game where the whole history is kept.

    python benchmarks/bench_growth.py [--steps 2] [--json FILE]

Games per batch: the tiny preset at 1, 2, 4 and 8 times 64 games, CPU seconds a decision. Turns per game: made-up
conversations of 5, 10 and 20 turns, played and updated as one sequence each, CPU seconds an episode: the tiny model
with turns of 14 tokens, answer included (connect_four's compact ones, the longest of the small games), and of 54, and
two layers of Qwen2.5-3B's size (random weights, fp32, 0.6 GB). The smaller a model and the longer the turns, the more
of its time is attention, whose work grows with the square of the length. One thread.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_train import make_trainer, measure
from benchmarks.common import Clock, Row, parser, table, write
from benchmarks.gpu_models import SHAPES, config_of
from benchmarks.recorded import Games, play_recorded
from envs.types import Task
from games import CONFIGS_PER_GAME, NAMES
from train_ppo import Trainer, collate, ppo_update
from training.process import at_least, run_program
from utils import uniform

GAMES_PER_BATCH = 64
WIDE = "2 layers of Qwen2.5-3B"
TALKS = (("tiny", 10, 48), ("tiny", 50, 12), (WIDE, 50, 2))  # model, digits of a message, conversations at once
TASK = NAMES.index("connect_four") * CONFIGS_PER_GAME  # lends its name and keeps its whole history
DIGITS = "0123456789" * 5


def batch_rows(steps: int) -> list[Row]:
    """CPU seconds a decision, by games per batch."""
    rows = []
    for factor in (1, 2, 4, 8):
        sets = [f"ppo.batch_size={GAMES_PER_BATCH * factor}", f"ppo.mini_batch_size={GAMES_PER_BATCH}"]
        row = measure(f"{GAMES_PER_BATCH * factor} games", steps * 8 // factor, sets)
        rows.append({"games": GAMES_PER_BATCH * factor, "decisions": row["decisions"],
                     "ms_a_decision": 1000 / row["decisions_per_cpu_s"]})  # fmt: skip
    return rows


def wide_model(folder: Path) -> Path:
    """Two layers of Qwen2.5-3B's size, with the tiny model's tokenizer."""
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained("models/tiny")
    Qwen2ForCausalLM(config_of(replace(SHAPES[0], layers=2, vocab=len(tokenizer)))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def talks(turns: int, digits: int, count: int) -> Games:
    """Conversations that differ from their first message on."""
    games: list[dict[str, Any]] = []
    for seed in range(count):
        texts = [f"{int(uniform(seed, turn) * 1e6):06}{DIGITS}"[:digits] for turn in range(turns)]
        games.append(
            {"seat": 0, "system": "talk", "score": float(seed % 2), "turns": [[t, list(range(10))] for t in texts]}
        )
    return {TASK: games}


def turn_row(trainer: Trainer, turns: int, digits: int, count: int, steps: int) -> Row:
    """CPU seconds an episode of so many turns."""
    clock, ppo = Clock(), trainer.ppo
    games = talks(turns, digits, count)
    for step in range(steps + 1):
        clock = Clock() if step == 1 else clock
        with clock("rollout"):
            tasks = [Task(TASK, seed, index=step * count + seed) for seed in range(count)]
            episodes = play_recorded(trainer.policy, tasks, games)
        with clock("update"):
            batch = collate(episodes, trainer.policy, ppo, 0.0)
            ppo_update(trainer.policy, trainer.optimizer, batch, ppo, (step,))
    tokens = sum(len(s.ids) for s in batch.sequences)
    assert len(batch.values_M) == turns * count
    parts = {f"{part}_ms": 1000 * s / steps / count for part, s in clock.seconds.items()}
    return {"turns": turns, "tokens": tokens / count, **parts, "ms_an_episode": sum(parts.values())}


def main(argv: list[str] | None = None) -> int:
    """Measure; print rows and ratios."""
    add = (flags := parser(__doc__)).add_argument
    add("--steps", type=at_least(1), default=2)
    args = flags.parse_args(argv)
    by_batch = batch_rows(args.steps)
    print(table(by_batch), "\n", flush=True)
    ratios = {"ms a decision, 8x the games over 1x": by_batch[-1]["ms_a_decision"] / by_batch[0]["ms_a_decision"]}
    by_turns: list[Row] = []
    for model, digits, count in TALKS:
        sets = ["ppo.max_seq_length=4096", f"ppo.batch_size={count}", f"ppo.mini_batch_size={max(1, count // 4)}"]
        with tempfile.TemporaryDirectory() as folder:
            if model == WIDE:
                sets.append(f"model.model_name={wide_model(Path(folder) / 'model')}")
            trainer = make_trainer(folder, sets)
            rows = [turn_row(trainer, turns, digits, count, args.steps) for turns in (5, 10, 20)]
            by_turns += [{"model": model, "digits": digits} | row for row in rows]
            trainer.metrics.close()
        ratio = by_turns[-1]["ms_an_episode"] / by_turns[-2]["ms_an_episode"]
        ratios[f"ms an episode, 20 turns over 10, {model}, {digits} digits a turn"] = ratio
    print(table(by_turns), "\n")
    print({name: round(ratio, 3) for name, ratio in ratios.items()})
    write(args.json, {"games": GAMES_PER_BATCH, "talks": TALKS}, by_batch + by_turns, ratios)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
