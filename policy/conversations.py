"""Conversations as token sequences, for local and vLLM players alike: a query opens a turn, an answer closes it.

A sequence never changes once it has been handed out. Each turn makes a new one that begins with a copy of the one
before: copying some hundred numbers costs microseconds, and nobody has to know who else holds a list.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from envs.types import Action, Decision, Message, Query, Sequence
from policy.chat import END, AnswerTrie, ChatFormat, answer_trie


@dataclass(eq=False, slots=True)
class Turn:
    """A query and its answer so far; nobody else holds its lists until it is closed."""

    query: Query
    trie: AnswerTrie | None  # None: the answer is free
    before: Sequence  # what this turn continues; empty where the conversation is read for the first time
    ids: list[int]  # the whole conversation
    decision: Decision  # the answer so far, as training will see it
    cached: Any = None  # keys and values of the tokens read so far
    text: str = ""  # of a legal answer, END included
    known: dict[str, Any] = field(default_factory=dict)  # beginning of ``text`` -> hidden state after it
    value: float = 0.0

    @property
    def written(self) -> int:
        """Tokens of the answer so far."""
        return len(self.ids) - self.decision.start

    @property
    def stays(self) -> bool:
        """Whether the next query may extend this conversation: the same seat's next turn, or a second attempt."""
        return self.query.continues or self.trie is None

    def record(self, chosen: int, logprob: float, allowed: list[int] | None = None) -> None:
        """Note a choice; to be called before its token is added to ``ids``."""
        decision = self.decision
        decision.positions.append(len(self.ids) - 1)
        decision.chosen.append(chosen)
        decision.token_logprobs.append(logprob)
        if decision.allowed is not None:
            decision.allowed.append(allowed or [])


_Held = tuple[list[Message], Sequence, Any]  # messages, their tokens, and keys and values of those


class Conversations:
    """What each seat of each running episode has read and written."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self._held: dict[tuple[int, int, str | None], _Held] = {}  # by episode, seat and adapter

    def open(self, query: Query, max_seq_length: int, free_tokens: int | None) -> Turn | None:
        """Add the prompt's tokens to the conversation that it extends, or start one.

        Returns None where prompt and longest answer do not fit into ``max_seq_length`` tokens. ``free_tokens``: length
        limit of a free answer; None: the answer is one of the legal ids.
        """
        trie = answer_trie(tuple(query.legal)) if free_tokens is None else None
        seat = query.episode, query.seat, query.adapter
        messages, before, cached = self._held.pop(seat, ([], Sequence([]), None))
        if messages and query.conversation[: len(messages)] == messages:
            prompt = self.chat.later(query.conversation[len(messages) :])
        else:
            prompt, shared = self.chat.first_prompt(query.conversation)
            before, cached = Sequence([], shared=shared), None
        start = len(before.ids) + len(prompt)
        if start + (trie.longest if trie else free_tokens or 0) > max_seq_length:
            return None
        decision = Decision(start, allowed=[] if trie else None, ply=len(query.history))
        return Turn(query, trie, before, [*before.ids, *prompt], decision, cached)

    def write(self, turn: Turn, tokens: list[int], logprobs: Seq[float]) -> None:
        """Write a whole answer, log-probabilities in nats; ValueError: it is not legal, and nothing is written."""
        choices: dict[int, list[int]] = {}
        if turn.trie:
            text, choices = self.chat.legal_answer(turn.trie, tokens)
            tokens, turn.text = self.chat.answers_of(text + END), text + END
        for i, token in enumerate(tokens):
            if turn.trie is None or i in choices:
                turn.record(token, logprobs[i], choices.get(i))
            turn.ids.append(token)

    def close(self, turn: Turn, version: int | None = None, learn: bool = True) -> Action:
        """The answer as an action; the conversation is kept where the seat's next query may extend it.

        ``version``: of the adapter that answered. ``learn``: whether to train on this decision.
        """
        tokens, text = turn.ids[turn.decision.start :], turn.text.removesuffix(END)
        if turn.trie is None:
            text, ended = self.chat.answer_text(tokens)
            if not ended:  # cut off at the limit: the conversation still needs the end of the turn
                turn.ids.append(self.chat.end_id)
        query, logprob = turn.query, sum(turn.decision.token_logprobs)
        decision = replace(turn.decision, stop=len(turn.ids), logprob=logprob, value=turn.value, version=version)
        decisions = [*turn.before.decisions, *([decision] if learn else [])]
        sequence = Sequence(turn.ids, decisions, turn.before.shared)
        if turn.stays:
            messages = [*query.conversation, {"role": "assistant", "content": text}]
            cached = turn.cached if query.continues else None  # not for a second attempt, which is rare
            self._held[query.episode, query.seat, query.adapter] = (messages, sequence, cached)
        return Action(text, tokens, decision.logprob, decision.value, sequence, extends=bool(turn.before.ids))

    def release(self, episodes: Seq[int]) -> None:
        """Forget the conversations of finished episodes."""
        ended = set(episodes)
        self._held = {seat: held for seat, held in self._held.items() if seat[0] not in ended}

    def clear(self) -> None:
        """Forget all conversations."""
        self._held.clear()
