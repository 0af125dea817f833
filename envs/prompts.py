"""The texts of a game's prompts: rules and answer format, a position and its legal actions, a retry."""

from typing import Any

from games.base import Game

ANSWER_FORMAT = (
    "# Output Format\n"
    "Answer with ONLY the action ID number of one legal action: no words, no punctuation.\n"
    'Example: to choose "5 -> pass", answer: 5'
)
RETRY = (
    "Invalid response format. You must respond with ONLY the action ID number (e.g., '5'). "
    "This is attempt {attempt} of {attempts}."
)


def full_system(name: str, rules: str) -> str:
    """Return the system message of the full prompt."""
    return f"You are playing {name}.\n\n# Game Rules\n{rules}\n\n{ANSWER_FORMAT}"


def full_user(description: str, seat: int, legal: dict[int, str]) -> str:
    """Return the user message of the full prompt."""
    lines = "\n".join([f"{action} -> {name}" for action, name in legal.items()])
    return f"Current State:\n{description}\n\nYou are Player {seat}.\nLegal Actions:\n{lines}\n\nYour choice (ID only):"


def user_message(game: Game, state: Any, seat: int, legal: dict[int, str], prompt: str) -> str:
    """Return the user message of a decision: what the seat may know and its legal actions."""
    if prompt == "full":
        return full_user(game.describe(state, seat), seat, legal)
    if not game.compact_actions:
        return game.compact(state, seat)
    choices = ";".join([f"{action} {name}" for action, name in legal.items()])
    return f"{game.compact(state, seat)}\n{choices}"
