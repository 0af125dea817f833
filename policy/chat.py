"""Text to tokens: a chat template taken apart, and the trie of legal answers."""

from __future__ import annotations

import copy
import string
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from config.reader import blaming
from envs.client import one_line
from envs.types import Message
from policy.bounded import apart
from utils import ConfigError

TEMPLATE_SECONDS, TEMPLATE_BYTES = 5.0, 2**31  # limits on rendering a few words
TEMPLATE_CHARACTERS = 2**16
ASKED = {"enable_thinking": False}  # template options in training
THINKING_OFF = "{%- set enable_thinking = enable_thinking | default(false) -%}"
END = "."  # stands for the end-of-turn token in an answer
DIGITS = "0123456789"
ANSWER_CHARS = END + DIGITS
KEPT_CHARACTERS = 2**13  # longest text whose tokens are kept: thousands of longer ones would fill the memory

_rendered: dict[str, str] = {}  # by template, words and messages: a process each is slow where models share them


class ChatFormat:
    """The text that a chat template puts around messages, extracted from the template once.

    History is never rendered again: a turn appends tokens to those that were sampled. Other programs will see the same
    prompt only if the template leaves earlier turns as they are. Where it does not (Qwen3 drops old think blocks),
    TRL's training variant of the template is used, and saved with the adapter.

    ``ends``: further tokens that end an answer, as ``generation_config.eos_token_id``: an id, several or None.
    ConfigError: the tokenizer has no such template, or merges digits.
    """

    def __init__(self, tokenizer: Any, ends: int | list[int] | None = None) -> None:
        self.tokenizer = tokenizer
        self._special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._kept = lru_cache(maxsize=8192)(self._encode)
        # Characters of ANSWER_CHARS -> their tokens; the same list each time.
        self.answers_of = lru_cache(maxsize=4096)(lambda chars: [self.answer_ids[char] for char in chars])
        with blaming("model.model_name: its tokenizer gives no tokens: ", (LookupError, TypeError)):
            self._take_apart(ends)

    def _take_apart(self, ends: int | list[int] | None) -> None:
        tokenizer, parts = self.tokenizer, self._parts()
        if parts[2] != parts[4]:
            tokenizer.chat_template = self._prefix_preserving()
            parts = self._parts()
        self.before_system, self.after_system, self.after_user, self.after_assistant, _ = parts
        self.end_id: int = self._tokens(self.after_assistant)[0]
        others = ends if isinstance(ends, list) else [ends]
        if odd := [i for i in others if i is not None and type(i) is not int]:
            raise ConfigError(f"model.model_name: its generation_config.json has the eos_token_id {odd[0]!r:.80}")
        self.ends = [self.end_id, *(i for i in others if i not in (None, self.end_id))]
        self.next_user = self.after_assistant[len(tokenizer.decode([self.end_id])) :]
        self.answer_ids = {END: self.end_id} | {digit: self.encode(digit)[0] for digit in DIGITS}
        if self.encode(DIGITS) != tuple(self.answer_ids[digit] for digit in DIGITS):
            raise ConfigError("model.model_name: the tokenizer merges digits; single-digit tokens are needed")
        roles = ("system", "user", "assistant", "user", "assistant", "user")
        contents = ("a b", "c", "1", "d", "20", "e")
        talk = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        self._thinks = True  # Qwen3 does unless told not to; a template that fails without the option is taken to
        with suppress(ConfigError):
            self._thinks = self._render(talk, {}) != self._render(talk)
        if tuple(self.first_prompt(talk)[0]) != self._tokens(self._render(talk)):
            raise ConfigError("model.model_name: its chat template is not a text around each message; Qwen's is needed")
        if self.end_id in tokenizer.added_tokens_decoder and "eos_token" not in tokenizer.chat_template:
            tokenizer.eos_token_id = self.end_id  # base models have another one: programs would generate past the turn

    def save(self, folder: Path) -> None:
        """Write the tokenizer, with a template that does not think unless asked to, as in training."""
        saved = copy.copy(self.tokenizer)
        if self._thinks:
            saved.chat_template = THINKING_OFF + saved.chat_template
        saved.save_pretrained(folder)

    def _render(self, messages: list[Message], options: dict[str, bool] = ASKED) -> str:
        """Apply the template, a program by whoever made the model: it may fail, or never end."""

        def rendered() -> str:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
            if len(text) > TEMPLATE_CHARACTERS:
                raise ValueError(f"it makes {len(text):,} characters of a few words")
            self._tokens(text + string.printable)  # a tokenizer is a program, too
            return text

        rust = self.tokenizer.backend_tokenizer
        steps = rust.normalizer, rust.pre_tokenizer, self.tokenizer.special_tokens_map
        key = str((self.tokenizer.chat_template, *steps, messages, options))
        try:
            if key not in _rendered:
                _rendered[key] = apart(rendered, TEMPLATE_SECONDS, TEMPLATE_BYTES)
            return _rendered[key]
        except Exception as error:  # a program may raise anything
            raise ConfigError(f"model.model_name: its chat template fails: {one_line(str(error))}") from error

    def _parts(self) -> list[str]:
        """The texts before, between and after a system, a user, an assistant and a last user message."""
        if not self.tokenizer.chat_template:
            raise ConfigError("model.model_name: its tokenizer has no chat template; choose a chat (Instruct) model")
        marks = ["SYSTEM-MARK", "USER-MARK", "ASSISTANT-MARK", "LAST-MARK"]
        roles = ["system", "user", "assistant", "user"]
        text = self._render([{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)])
        parts = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found:
                raise ConfigError("model.model_name: its chat template does not show system, user and assistant turns")
            parts.append(before)
        return [*parts, text]

    def _prefix_preserving(self) -> str:
        rewrites = "model.model_name: its chat template rewrites history, and trl has no variant that keeps it: "
        with blaming(rewrites, (ImportError, ValueError)):
            from trl import get_training_chat_template

            return get_training_chat_template(self.tokenizer) or self.tokenizer.chat_template

    def _tokens(self, text: str, **options: bool) -> tuple[int, ...]:
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False, **options))
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of a library in Rust, which only its name tells apart
                raise
            raise ConfigError(f"model.model_name: its tokenizer fails: {one_line(str(error))}") from error

    def encode(self, text: str, before: str = "", after: str = "") -> tuple[int, ...]:
        """Tokens of a message between parts of the template; special tokens are recognised only in the parts."""
        if len(text) > KEPT_CHARACTERS:
            return self._encode(text, before, after)
        return self._kept(text, before, after)

    def _encode(self, text: str, before: str, after: str) -> tuple[int, ...]:
        if any(special in text for special in self._special):
            spelt = self._tokens(text, split_special_tokens=True)
            return (*self._tokens(before), *spelt, *self._tokens(after))
        return self._tokens(before + text + after)

    def first_prompt(self, conversation: list[Message]) -> tuple[list[int], int]:
        """Tokens of a whole conversation, and how many of them are the system message."""
        system = self.encode(conversation[0]["content"], self.before_system)
        user = self.encode(conversation[1]["content"], self.after_system, self.after_user)
        return [*system, *user, *self.later(conversation[2:])], len(system)

    def answer_text(self, tokens: list[int]) -> tuple[str, bool]:
        """The text of a sampled answer, and whether its last token is ``end_id``, the end of the turn."""
        words = tokens[:-1] if {*tokens[-1:]} & {*self.ends} else tokens
        return self.tokenizer.decode(words, skip_special_tokens=True), tokens[-1:] == [self.end_id]

    def legal_answer(self, trie: AnswerTrie, tokens: list[int]) -> tuple[str, dict[int, list[int]]]:
        """The text of an answer sampled among legal ones, and its choices: index of the token -> allowed ids.

        ValueError: the tokens are not a legal answer; tokens without a choice may be missing at the end.
        """
        chars = {token: char for char, token in self.answer_ids.items()}
        text = trie.completed("".join(chars.get(token, f"<{token}>") for token in tokens))
        if not text.endswith(END) or END not in trie.follow.get(text[:-1], ""):
            raise ValueError(f"no legal answer: {text!r}")
        follows = (trie.follow[text[:i]] for i in range(len(tokens)))
        return text[:-1], {i: self.answers_of(follow) for i, follow in enumerate(follows) if len(follow) > 1}

    def later(self, messages: list[Message]) -> list[int]:
        """Tokens of messages that follow a prompt: assistant turns that were not sampled, and user turns."""
        ids: list[int] = []
        for message in messages:
            if message["role"] == "assistant":
                ids += (*self.encode(message["content"]), self.end_id)
            else:
                ids += self.encode(message["content"], self.next_user, self.after_user)
        return ids


@dataclass(frozen=True)
class AnswerTrie:
    """Legal answers, character by character (``ANSWER_CHARS``), each ended by ``END``."""

    follow: dict[str, str]  # prefix of an answer -> characters that may come next, in the order of ANSWER_CHARS
    longest: int  # characters of the longest answer, END included
    last_choice: int  # length of the longest prefix that leaves a choice; -1 where none does

    def completed(self, text: str) -> str:
        """``text`` and the characters that follow it without a choice."""
        while len(follow := self.follow.get(text, "")) == 1:
            text += follow
        return text

    def choices_after(self, text: str) -> list[str]:
        """The continuations of ``text`` that end at another choice."""
        others = (p for p, chars in self.follow.items() if len(chars) > 1 and p != text)
        return [p[len(text) :] for p in others if p.startswith(text)]

    def passes(self, answer: str, ahead: int) -> int:
        """Forward passes that sampling ``answer`` takes where up to ``ahead`` choices are read in one pass."""
        known, passes = set[str](), 0
        for text in (answer[:i] for i in range(len(answer) + 1)):
            if len(self.follow[text]) > 1 and text not in known:
                later = self.choices_after(text) if ahead else []
                known |= {text + more for more in later if len(later) <= ahead}
                passes += 1
        return passes


@lru_cache(maxsize=1024)  # a trie of 289 actions takes 23 KB
def answer_trie(legal: tuple[int, ...]) -> AnswerTrie:
    """The trie of the legal action ids; ValueError if there are none."""
    if not legal:
        raise ValueError("a query without legal actions, as programs make: env.answer_mode must be free")
    follow: dict[str, set[str]] = {}
    for action in legal:
        text = str(action) + END
        for i, char in enumerate(text):
            follow.setdefault(text[:i], set()).add(char)
    choices = [len(prefix) for prefix, chars in follow.items() if len(chars) > 1]
    ordered = {prefix: "".join(sorted(chars)) for prefix, chars in follow.items()}
    return AnswerTrie(ordered, max(map(len, follow)) + 1, max(choices, default=-1))
