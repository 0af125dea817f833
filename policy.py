"""The player: turns conversations into answers (``act``) and scores the answers for PPO (``evaluate_decisions``).

Shapes: B rows, T tokens, K read positions per row, P cached tokens, L layers, H key-value heads, E head size,
D hidden size, V columns of the output layer, N rows of hidden states, M decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cache import Kept
from chat import ANSWER_CHARS, END, AnswerTrie, ChatFormat, answer_trie
from env_wrapper import Action, Decision, Message, Query, Sequence
from head import draw, invert, score
from model import ModelConfig, load_model
from network import Read, Reader, shared_tokens
from utils import ConfigError, uniform

HEAD_ROWS = 256  # rows of whole-vocabulary logits in memory at a time, where their gradient allows it


class Evaluation(NamedTuple):
    """Per decision (M), with gradients: log-probability and entropy in nats (sums over its tokens), value.

    ``tokens`` (M, A): the log-probability of each token that was a choice, zero after a decision's last.
    """

    logprobs: Tensor
    entropies: Tensor
    values: Tensor
    tokens: Tensor


def places(counts_M: Tensor) -> Tensor:
    """0, 1, ... within each of the groups of so many."""
    starts_M = counts_M.cumsum(0) - counts_M
    return torch.arange(int(counts_M.sum())) - torch.repeat_interleave(starts_M, counts_M)


@lru_cache(maxsize=4096)
def _may_follow(follow: str) -> np.ndarray:
    """Mask over ANSWER_CHARS."""
    return np.array([char in follow for char in ANSWER_CHARS])


@dataclass(eq=False, slots=True)
class _Turn:
    """A decision in the making: what is to be read, what was read, what was chosen."""

    query: Query
    sequence: Sequence
    decision: Decision
    trie: AnswerTrie | None  # None: the answer is free
    kv: Kept | None
    text: str = ""

    @property
    def written(self) -> int:
        """Tokens of the answer so far."""
        return len(self.sequence.ids) - self.decision.start

    @property
    def stays(self) -> bool:
        """Whether the next question may extend this conversation: the same seat's next turn, or a second attempt."""
        return self.query.continues or self.trie is None

    def read(self) -> Read:
        keep = self.stays or self.trie is None or self.trie.last_choice > len(self.text)
        return Read(self.sequence.ids, self.kv, keep)


_Session = tuple[list[Message], Sequence, Kept | None]  # what one seat of an episode has read and written so far
_NO_SESSION: _Session = ([], Sequence([]), None)

# --------------------------------------------------------------------------------------------------------------
# The player
# --------------------------------------------------------------------------------------------------------------


class Policy(Reader):
    """Answers queries (``act``) and scores what was answered (``evaluate_decisions``), with one set of weights."""

    def __init__(self, peft_model: Any, tokenizer: Any, config: Any) -> None:
        self.peft_model, self.tokenizer = peft_model, tokenizer
        self.config: ModelConfig = config.model
        self.base = peft_model.get_base_model()
        self.lm_head = self.base.lm_head
        super().__init__(self.base.model, self.lm_head.weight.device, self.config.tokens_per_batch,
                         self.config.gradient_checkpointing)  # fmt: skip
        self.chat = ChatFormat(tokenizer)
        self.value_head = nn.Linear(self.base.config.hidden_size, 1, dtype=torch.float32, device=self.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.temperature, self.greedy = config.ppo.temperature, False
        self.max_seq_length, self.max_new_tokens = config.ppo.max_seq_length, config.ppo.max_new_tokens
        self.constrained, self.seed = config.env.answer_mode == "constrained", config.run.seed
        self.reference = "reference" if "reference" in peft_model.peft_config else None
        self._active = "default"
        self._answer_weight_VD = self.lm_head.weight.detach()[[*self.chat.answer_ids.values()]].float()
        self._sessions: dict[tuple[int, int], _Session] = {}
        self._prefixes: dict[tuple[str, tuple[int, ...]], Kept | None] = {}

    # -- weights -------------------------------------------------------------------------------------------------

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of everything PPO moves: the adapter ``default`` and the value head."""
        named = {n: p for n, p in self.peft_model.named_parameters() if ".default." in n and "lora_" in n}
        return named | {f"value_head.{n}": p for n, p in self.value_head.named_parameters()}

    @contextmanager
    def using(self, adapter: str | None) -> Iterator[None]:
        """Read with another adapter; ``"base"`` is none at all, None the current one. No gradients inside.

        Raises:
            ValueError: no such adapter.
        """
        if adapter is None:
            yield
            return
        if adapter != "base" and adapter not in self.peft_model.peft_config:
            raise ValueError(f"no adapter {adapter!r}: there are base, {', '.join(self.peft_model.peft_config)}")
        before = self._active
        flags = [(p, p.requires_grad) for p in self.peft_model.parameters()]  # PEFT sets them when it switches
        try:
            self._activate(adapter)
            with torch.no_grad():
                yield
        finally:
            self._activate(before)
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    def _activate(self, adapter: str) -> None:
        if adapter == "base":
            self.peft_model.base_model.disable_adapter_layers()
        else:
            self.peft_model.base_model.enable_adapter_layers()
            self.peft_model.set_adapter(adapter)
        self._active = adapter

    def weights_changed(self) -> None:
        """Forget what was read with the old weights; to be called after every update."""
        self._prefixes.clear()
        self._sessions.clear()
        self._beside = None

    def release(self, episodes: Seq[int]) -> None:
        """Forget the conversations of finished episodes."""
        ended = set(episodes)
        for key in [k for k in self._sessions if k[0] in ended]:
            del self._sessions[key]

    # -- acting --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, queries: Seq[Query]) -> list[Action]:
        """Answer each query; the answers depend on the queries, the weights and the seed, never on timing."""
        actions: dict[int, Action] = {}
        for adapter in sorted({q.adapter for q in queries}, key=str):
            picked = [i for i, q in enumerate(queries) if q.adapter == adapter]
            with self.using(adapter):
                actions |= zip(picked, self._act([queries[i] for i in picked]), strict=True)
        return [actions[i] for i in range(len(queries))]

    def _act(self, queries: list[Query]) -> list[Action]:
        turns = [self._open(query) for query in queries]
        active = [turn for turn in turns if turn]
        while active:
            hidden_ND, kvs = self.read([turn.read() for turn in active])
            for turn, kv in zip(active, kvs, strict=True):
                turn.kv = kv
            (self._choose_legal if self.constrained else self._choose_free)(active, hidden_ND)
            active = [turn for turn in active if not self._finished(turn)]
        return [self._close(turn) if turn else Action("", truncated=True) for turn in turns]

    def _open(self, query: Query) -> _Turn | None:
        """Add the prompt's tokens to the conversation already read, or start one; None where they do not fit."""
        trie = answer_trie(tuple(query.legal)) if self.constrained else None
        messages, known, kv = self._sessions.pop((query.episode, query.seat), _NO_SESSION)
        sequence, prompt = self.chat.extend(query.conversation, messages, known)
        kv = kv if sequence is known else None
        start = len(sequence.ids) + len(prompt)
        if start + (trie.longest if trie else self.max_new_tokens) > self.max_seq_length:
            return None
        sequence.ids += prompt
        if kv is None:
            kv = self._prefix(sequence)
        return _Turn(query, sequence, Decision(start, start, allowed=[] if trie else None), trie, kv)

    def _prefix(self, sequence: Sequence) -> Kept | None:
        """Keys and values of the system message, read once for all conversations that begin with it."""
        ids = tuple(sequence.ids[: shared_tokens(sequence)])
        if not ids:
            return None
        key = (self._active, ids)
        if key not in self._prefixes:
            [(_, self._prefixes[key])] = self.forward([Read(ids, None, keep=True)])
        return self._prefixes[key]

    def _answer_logprobs(self, hidden_ND: Tensor, follows: list[str]) -> Tensor:
        """Log-probability of each of ANSWER_CHARS where only those of ``follows`` are possible (fp64, CPU)."""
        logits_NV = (hidden_ND.float() @ self._answer_weight_VD.T / self.temperature).double().cpu()
        mask_NV = torch.from_numpy(np.stack([_may_follow(follow) for follow in follows]))
        return F.log_softmax(logits_NV.masked_fill(~mask_NV, -torch.inf), dim=-1)

    def _choose_legal(self, turns: list[_Turn], hidden_ND: Tensor) -> None:
        """Sample the next character of each answer among those that continue a legal id."""
        follows = [turn.trie.follow[turn.text] for turn in turns if turn.trie]
        logp_NV = self._answer_logprobs(hidden_ND, follows)
        picks = self._draw(logp_NV, turns)
        self._note_values(turns, hidden_ND)
        ids = self.chat.answer_ids
        logprobs = logp_NV.gather(1, picks[:, None])[:, 0].tolist()
        for turn, follow, pick, logprob in zip(turns, follows, picks.tolist(), logprobs, strict=True):
            assert turn.trie is not None
            if len(follow) > 1:
                turn.decision.allowed.append(self.chat.answers_of(follow))  # type: ignore[union-attr]
                self._record(turn, ids[ANSWER_CHARS[pick]], logprob)
            char = ANSWER_CHARS[pick]
            chars = char + turn.trie.forced[turn.text + char]  # what follows without a choice is not asked for
            turn.text += chars
            turn.sequence.ids += self.chat.answers_of(chars)

    def _choose_free(self, turns: list[_Turn], hidden_ND: Tensor) -> None:
        """Sample the next token of each answer from the whole vocabulary."""
        self._note_values(turns, hidden_ND)
        for start in range(0, len(turns), HEAD_ROWS):
            some = turns[start : start + HEAD_ROWS]
            u_N = None if self.greedy else self._uniform(some).to(self.device)
            picks_N, logp_N = draw(hidden_ND[start : start + HEAD_ROWS], self.lm_head.weight, u_N, self.temperature)
            for turn, pick, logprob in zip(some, picks_N.tolist(), logp_N.tolist(), strict=True):
                self._record(turn, pick, logprob)
                turn.sequence.ids.append(pick)

    def _draw(self, logp_NV: Tensor, turns: list[_Turn]) -> Tensor:
        """Inverse-CDF sampling (greedy: the likeliest column)."""
        if self.greedy:
            return logp_NV.argmax(-1)
        return invert(logp_NV.double().exp().cumsum(-1), self._uniform(turns))[0]

    def _uniform(self, turns: list[_Turn]) -> Tensor:
        """A uniform number of the decision's own for each next token (fp64, CPU)."""
        keys = [(self.seed, *turn.query.rng_key, turn.written) for turn in turns]
        return torch.tensor([uniform(*key) for key in keys], dtype=torch.float64)

    def _note_values(self, turns: list[_Turn], hidden_ND: Tensor) -> None:
        """The value of a decision is read at the last token of its prompt."""
        for turn, value in zip(turns, self.value_head(hidden_ND.float())[:, 0].tolist(), strict=True):
            if not turn.written:
                turn.decision.value = value

    @staticmethod
    def _record(turn: _Turn, chosen: int, logprob: float) -> None:
        turn.decision.positions.append(len(turn.sequence.ids) - 1)
        turn.decision.chosen.append(chosen)
        turn.decision.token_logprobs.append(logprob)
        turn.decision.logprob += logprob

    def _finished(self, turn: _Turn) -> bool:
        if turn.trie:
            return turn.text.endswith(END)
        return turn.sequence.ids[-1] == self.chat.end_id or turn.written >= self.max_new_tokens

    def _close(self, turn: _Turn) -> Action:
        tokens, text = turn.sequence.ids[turn.decision.start :], turn.text.removesuffix(END)
        if turn.trie is None:
            text, ended = self.chat.answer_text(tokens)
            if not ended:  # cut at the limit: the conversation still needs the end of the turn
                turn.sequence.ids.append(self.chat.end_id)
        query, decision = turn.query, turn.decision
        decision.stop = len(turn.sequence.ids)
        turn.sequence.decisions.append(decision)
        if turn.stays:
            messages = [*query.conversation, {"role": "assistant", "content": text}]
            kv = turn.kv if query.continues else None  # a second attempt is too rare to keep them for
            self._sessions[query.episode, query.seat] = (messages, turn.sequence, kv)
        return Action(text, tokens, decision.logprob, decision.value, turn.sequence)

    @torch.no_grad()
    def action_probs(self, queries: Seq[Query]) -> list[dict[int, float]]:
        """Probability of every legal action (sums to 1), under the constraint and the temperature."""
        reads, nodes = [], []
        for i, query in enumerate(queries):
            ids, shared = self.chat.first_prompt(query.conversation)
            kv = self._prefix(Sequence(ids, shared=shared))
            for text, follow in answer_trie(tuple(query.legal)).follow.items():
                if len(follow) > 1:
                    answer = [self.chat.answer_ids[c] for c in text]
                    reads.append(Read(ids + answer, kv, False))
                    nodes.append((i, text, follow))
        probs = [dict.fromkeys(query.legal, 1.0) for query in queries]
        if not reads:
            return probs
        probs_NV = self._answer_logprobs(self.read(reads)[0], [follow for _, _, follow in nodes]).exp().tolist()
        for (i, text, _), probs_V in zip(nodes, probs_NV, strict=True):
            for action in queries[i].legal:
                answer_text = str(action) + END
                if answer_text.startswith(text):
                    probs[i][action] *= probs_V[ANSWER_CHARS.index(answer_text[len(text)])]
        return probs

    # -- scoring -------------------------------------------------------------------------------------------------

    def evaluate_decisions(
        self, sequences: Seq[Sequence], adapter: str | None = None, entropy_grad: bool = True
    ) -> Evaluation:
        """Score every decision of ``sequences``, in their order (M decisions), with gradients.

        ``adapter``: score with another adapter (``"base"``: none) and without gradients.
        ``entropy_grad``: whether gradients flow from the entropies too, which costs time over a whole vocabulary.
        """
        with self.using(adapter):
            width = max((len(d.positions) for s in sequences for d in s.decisions), default=0)
            read = partial(self._evaluate, width=max(width, 1), entropy_grad=entropy_grad)
            return Evaluation(*self.in_micro_batches(read, sequences))

    def log_legal_mass(self, sequences: Seq[Sequence]) -> Tensor:
        """Log of the unrestricted, untempered probability that each decision's answer stays legal (M), with gradients.

        The product runs over all tokens of the answer, the end of the turn included; a token that left no
        choice counts too. Needs ``answer_mode: constrained``.
        """
        return self.in_micro_batches(self._legal_mass, sequences)[0]

    def _evaluate(self, sequences: list[Sequence], width: int, entropy_grad: bool) -> tuple[Tensor, ...]:
        decisions = [d for s in sequences for d in s.decisions]
        hidden_ND = self.hidden_at(
            sequences, [[p for d in s.decisions for p in (d.start - 1, *d.positions)] for s in sequences]
        )
        counts = torch.tensor([len(d.positions) for d in decisions])
        value_rows = (counts + 1).cumsum(0) - counts - 1
        is_choice = torch.ones(len(hidden_ND), dtype=torch.bool)
        is_choice[value_rows] = False
        values_M = self.value_head(hidden_ND[value_rows.to(self.device)].float())[:, 0]
        zeros_M = torch.zeros(len(decisions), device=self.device)
        tokens_MA = zeros_M[:, None].repeat(1, width)
        if not counts.any():
            return zeros_M, zeros_M, values_M, tokens_MA
        logp_N, entropy_N = self._choices(hidden_ND[is_choice.to(self.device)], decisions, entropy_grad)
        owner_N = torch.repeat_interleave(torch.arange(len(decisions)), counts).to(self.device)
        place_N = places(counts).to(self.device)
        tokens_MA = tokens_MA.index_put((owner_N, place_N), logp_N)
        return zeros_M.index_add(0, owner_N, logp_N), zeros_M.index_add(0, owner_N, entropy_N), values_M, tokens_MA

    def _choices(self, hidden_ND: Tensor, decisions: list[Decision], entropy_grad: bool) -> tuple[Tensor, Tensor]:
        """Log-probability of what was chosen and entropy, per token-level choice (N)."""
        chosen_N = torch.tensor([c for d in decisions for c in d.chosen], device=self.device)
        if decisions[0].allowed is None:
            return score(hidden_ND, self.lm_head.weight, chosen_N, self.temperature, entropy_grad)
        columns_V, mask_NV = self._allowed([a for d in decisions for a in d.allowed or []])
        logits_NV = hidden_ND.float() @ self.lm_head.weight[columns_V].float().T / self.temperature
        logp_NV = F.log_softmax(logits_NV.masked_fill(~mask_NV, -torch.inf), dim=-1)
        entropy_N = -(logp_NV.exp() * logp_NV.masked_fill(~mask_NV, 0.0)).sum(-1)
        return logp_NV.gather(1, torch.searchsorted(columns_V, chosen_N)[:, None])[:, 0], entropy_N

    def _allowed(self, allowed: list[list[int]]) -> tuple[Tensor, Tensor]:
        """The ids that occur in ``allowed`` in order (V), and which of them each row allows (N, V)."""
        columns_V, at = np.unique(np.fromiter(chain.from_iterable(allowed), np.int64), return_inverse=True)
        mask_NV = np.zeros((len(allowed), len(columns_V)), dtype=bool)
        mask_NV[np.repeat(np.arange(len(allowed)), [len(a) for a in allowed]), at] = True
        return torch.from_numpy(columns_V).to(self.device), torch.from_numpy(mask_NV).to(self.device)

    def _legal_mass(self, sequences: list[Sequence]) -> tuple[Tensor]:
        decisions = [d for s in sequences for d in s.decisions]
        positions = [[p for d in s.decisions for p in range(d.start - 1, d.stop - 1)] for s in sequences]
        hidden_ND = self.hidden_at(sequences, positions)
        allowed = []
        for s, at in zip(sequences, positions, strict=True):
            choices = {p: a for d in s.decisions for p, a in zip(d.positions, d.allowed or [], strict=True)}
            allowed += [choices.get(p, [s.ids[p + 1]]) for p in at]
        columns_V, mask_NV = self._allowed(allowed)

        def mass(hidden_ND: Tensor, mask_NV: Tensor) -> Tensor:
            logits_NV = self.lm_head(hidden_ND).float()
            legal_NV = logits_NV[:, columns_V].masked_fill(~mask_NV, -torch.inf)
            return legal_NV.logsumexp(-1) - logits_NV.logsumexp(-1)

        pieces = zip(hidden_ND.split(HEAD_ROWS), mask_NV.split(HEAD_ROWS), strict=True)
        mass_N = torch.cat([checkpoint(mass, h, m, use_reentrant=False) for h, m in pieces])
        lengths = torch.tensor([d.stop - d.start for d in decisions])
        owner_N = torch.repeat_interleave(torch.arange(len(decisions)), lengths).to(self.device)
        return (torch.zeros(len(decisions), device=self.device).index_add(0, owner_N, mass_N),)

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the adapter as PEFT, vLLM and the Hub load it, with tokenizer, chat template and value head."""
        from safetensors.torch import save_file

        self.peft_model.save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        self.tokenizer.save_pretrained(folder)
        head = {name: p.detach().cpu().contiguous() for name, p in self.value_head.named_parameters()}
        save_file(head, folder / "value_head.safetensors")

    def load(self, folder: Path) -> None:
        """Read adapter and value head written by ``save`` into this policy, bit for bit.

        Raises:
            ConfigError: they are of another model or another LoRA configuration.
        """
        from peft import get_peft_model_state_dict, set_peft_model_state_dict
        from safetensors.torch import load_file

        adapter, head = (load_file(folder / f"{name}.safetensors") for name in ("adapter_model", "value_head"))
        mine = get_peft_model_state_dict(self.peft_model, save_embedding_layers=False)
        pairs = ((adapter, mine), (head, self.value_head.state_dict()))
        if any({n: t.shape for n, t in a.items()} != {n: t.shape for n, t in b.items()} for a, b in pairs):
            raise ConfigError(f"{folder}: its adapter does not fit {self.config.model_name} with this lora section")
        set_peft_model_state_dict(self.peft_model, adapter)
        self.value_head.load_state_dict(head)
        self.weights_changed()

    def keep_past(self, name: str, tensors: dict[str, Tensor] | None = None) -> None:
        """Add a frozen adapter to the base: the current one as it is now, or one that ``past_adapter`` returned."""
        from peft import set_peft_model_state_dict

        tensors = self.past_adapter("default") if tensors is None else tensors
        trained = {p: p.requires_grad for p in self.peft_model.parameters()}
        self.peft_model.add_adapter(name, self.peft_model.peft_config["default"])
        set_peft_model_state_dict(self.peft_model, tensors, adapter_name=name)
        for parameter in self.peft_model.parameters():
            parameter.requires_grad_(trained.get(parameter, False))

    def past_adapter(self, name: str) -> dict[str, Tensor]:
        """The tensors of an adapter, under the names that PEFT gives them in a file."""
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self.peft_model, adapter_name=name, save_embedding_layers=False)
        return {key: tensor.detach().cpu().clone() for key, tensor in state.items()}

    def forget_past(self, name: str) -> None:
        """Take a past self off the base."""
        self.peft_model.delete_adapter(name)

    def add_adapter(self, name: str, folder: Path) -> None:
        """Load another adapter onto the same base, frozen: an earlier self to play against."""
        if name in ("base", "default", "reference"):
            raise ValueError(f"adapter name {name!r} is taken: choose another")
        if name not in self.peft_model.peft_config:
            self.peft_model.load_adapter(str(folder), adapter_name=name, is_trainable=False)


def load_policy(config: Any) -> Policy:
    """Load base model, adapter, value head and tokenizer.

    Args:
        config: an object with the sections ``model`` (ModelConfig), ``lora`` (LoraConfig), ``ppo`` (temperature,
            max_seq_length, max_new_tokens), ``env`` (answer_mode) and ``run`` (seed).

    Raises:
        ConfigError: model, adapter or tokenizer cannot be loaded or used; one line, with the key.
    """
    peft_model, tokenizer = load_model(config.model, config.lora, config.run.seed)
    return Policy(peft_model, tokenizer, config)
