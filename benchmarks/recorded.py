"""Recorded games in place of OpenSpiel's: the same prompts on every machine, through the program's own episode loop."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import env_wrapper
from benchmarks.record_prompts import GAMES
from envs.config import EnvConfig
from envs.types import Episode, Player, Step, Task
from games import decode_task_id

HERE = Path(__file__).resolve().parent
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ think }}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ think }}{% endif %}"
)
THINK = {"qwen2": "", "qwen3": "<think>\\n\\n</think>\\n\\n"}  # Qwen3 does not think: an empty block before each answer


def tokenizer(architecture: str) -> Any:
    """The recorded part of Qwen's tokenizer, with a chat template that keeps its prefix."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(HERE / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = f'{{% set think = "{THINK[architecture]}" %}}' + CHATML
    return fast


Games = dict[int, list[dict[str, Any]]]  # task id -> by seed: seat, system, score, turns ([text, legal ids])


@functools.cache
def recorded_games() -> Games:
    """The games of prompts.json."""
    games = json.loads((HERE / "prompts.json").read_text())
    return {GAMES[name]: [episodes[0] | episode for episode in episodes] for name, episodes in games.items()}


def tasks(names: list[str], count: int) -> list[Task]:
    """``count`` recorded games, taken from ``names`` in turn."""
    return [Task(GAMES[names[i % len(names)]], i // len(names), index=i) for i in range(count)]


class RecordedEnv:
    """Shows the turns of a recorded game one after the other, whatever is answered."""

    def __init__(self, games: Games) -> None:
        self._games = games

    def reset(self, task: Task) -> Step:
        """Start the recorded game ``task.seed``."""
        self._game = self._games[task.task_id][task.seed or 0]
        self._known, self._turn = decode_task_id(task.task_id)[0], -1
        return self.step("")

    def step(self, text: str) -> Step:
        """Show the next turn, or the end."""
        self._turn += 1
        seat, turns = self._game["seat"], self._game["turns"]
        info = {"seat": seat, "system": self._game["system"], "attempt": 1, "adapter": None, "game": self._known.name,
                "history": [], "history_turns": self._known.history_turns, "outcome": None}  # fmt: skip
        if self._turn == len(turns):
            score = self._game["score"]
            return Step("", {}, True, score, info | {"outcome": "finished", "scores": {seat: score}})
        shown, legal = turns[self._turn]
        return Step(shown, dict.fromkeys(legal, ""), False, 0.0, info)

    def close(self) -> None:
        """Nothing is held."""


def play_recorded(player: Player, some: list[Task], games: Games | None = None) -> list[Episode]:
    """Play recorded games (None: those of prompts.json) with the program's own loop."""
    library = recorded_games() if games is None else games
    with mock.patch.object(env_wrapper, "make_env", side_effect=lambda config: RecordedEnv(library)):
        return env_wrapper.play(EnvConfig(), player, some)
