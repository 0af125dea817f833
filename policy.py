"""The player: turns conversations into answers (``act``) and scores the answers for PPO (``evaluate_decisions``).

Shapes: B rows, T tokens, K read positions per row, P cached tokens, D hidden size, V columns of the output
layer, N token-level choices, M decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from env_wrapper import Action, Decision, Message, Query, Sequence
from model import END, Cache, ChatFormat, ModelConfig, answer_trie, load_model, run_trunk
from utils import uniform

SHARED_PREFIX_MIN = 32  # tokens; a shorter system message costs less to recompute than to share


class Evaluation(NamedTuple):
    """Per decision (M), with gradients: log-probability and entropy in nats (sums over its tokens), value."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor


def _pad(rows: Seq[Seq[int]], device: torch.device) -> Tensor:
    """Right-pad lists of ints to a (B, T) tensor."""
    out = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return torch.from_numpy(out).to(device)


def _chunks(items: list, tokens, budget: int) -> Iterator[list]:
    """Cut a list that is sorted by length into runs whose padded size stays within ``budget`` tokens."""
    chunk: list = []
    longest = 0
    for item in items:
        longest = max(longest, tokens(item))
        if chunk and longest * (len(chunk) + 1) > budget:
            yield chunk
            chunk, longest = [], tokens(item)
        chunk.append(item)
    if chunk:
        yield chunk


def _read_positions(sequence: Sequence) -> list[int]:
    """Where a sequence is read to score it: before every choice, and where each decision's value stands."""
    return sorted({p for d in sequence.decisions for p in (d.start - 1, *d.positions)})


def _shared(sequence: Sequence) -> int:
    return sequence.shared if sequence.shared >= SHARED_PREFIX_MIN else 0


@dataclass(eq=False)
class _Turn:
    """A decision in the making: what is to be read, what was read, what was chosen."""

    query: Query
    sequence: Sequence
    trie: dict[str, str] | None
    kv: Tensor | None = None  # (layers, 2, kv heads, P, head size): keys and values of ids[:P]
    decision: Decision = field(default_factory=Decision)
    text: str = ""
    tokens: list[int] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return 0 if self.kv is None else self.kv.shape[3]

    @property
    def goes_on(self) -> bool:
        """Whether tokens will be read after this one, so that keys and values are worth keeping."""
        if self.query.continues or self.trie is None:
            return True
        return any(len(prefix) > len(self.text) and len(follow) > 1 for prefix, follow in self.trie.items())


# --------------------------------------------------------------------------------------------------------------
# The player
# --------------------------------------------------------------------------------------------------------------


class Policy:
    """Answers queries (``act``) and scores what was answered (``evaluate_decisions``), with one set of weights."""

    def __init__(self, peft_model: Any, tokenizer: Any, config: Any) -> None:
        self.peft_model, self.tokenizer = peft_model, tokenizer
        self.config: ModelConfig = config.model
        self.tokens_per_batch = config.model.tokens_per_batch  # halved when memory runs out
        self.base = peft_model.get_base_model()
        self.trunk, self.lm_head = self.base.model, self.base.lm_head
        self.device = self.lm_head.weight.device
        self.chat = ChatFormat(tokenizer)
        self.value_head = nn.Linear(self.base.config.hidden_size, 1, dtype=torch.float32, device=self.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.temperature, self.greedy = config.ppo.temperature, False
        self.max_seq_length, self.max_new_tokens = config.ppo.max_seq_length, config.ppo.max_new_tokens
        self.constrained, self.seed = config.env.answer_mode == "constrained", config.run.seed
        self.reference = "reference" if "reference" in getattr(peft_model, "peft_config", {}) else None
        self._sessions: dict[tuple[int, int], tuple[list[Message], Sequence, Tensor | None]] = {}
        self._prefixes: dict[tuple[int, ...], Tensor] = {}
        self._end_trie = "".join(sorted(self.chat.digit_ids))

    # -- weights -------------------------------------------------------------------------------------------------

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of everything PPO moves: the active adapter and the value head."""
        named = {n: p for n, p in self.peft_model.named_parameters() if ".default." in n and "lora_" in n}
        return named | {f"value_head.{n}": p for n, p in self.value_head.named_parameters()}

    @contextmanager
    def using(self, adapter: str | None) -> Iterator[None]:
        """Read with another adapter; ``"base"`` is none at all, None the current one. No gradients inside."""
        if adapter is None:
            yield
            return
        with torch.no_grad():
            try:
                if adapter == "base":
                    with self.peft_model.disable_adapter():
                        yield
                else:
                    self.peft_model.set_adapter(adapter)
                    yield
            finally:  # both ways of leaving PEFT's context touch requires_grad of adapters that are not trained
                self.peft_model.set_adapter("default")
                for name, parameter in self.peft_model.named_parameters():
                    parameter.requires_grad_(".default." in name and "lora_" in name)

    def weights_changed(self) -> None:
        """Forget what was read with the old weights; to be called after every update."""
        self._prefixes.clear()
        self._sessions.clear()

    def release(self, episodes: Seq[int]) -> None:
        """Forget the conversations of finished episodes."""
        ended = set(episodes)
        for key in [k for k in self._sessions if k[0] in ended]:
            del self._sessions[key]

    # -- acting --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, queries: Seq[Query]) -> list[Action]:
        """Answer each query; the answers depend on the queries, the weights and the seed, never on timing."""
        actions: list[Action | None] = [None] * len(queries)
        for adapter in sorted({q.adapter for q in queries}, key=str):
            picked = [i for i, q in enumerate(queries) if q.adapter == adapter]
            with self.using(adapter):
                for i, action in zip(picked, self._act([queries[i] for i in picked]), strict=True):
                    actions[i] = action
            if adapter is not None:
                self._prefixes.clear()
        return actions  # type: ignore[return-value]

    def _act(self, queries: list[Query]) -> list[Action]:
        turns = [self._open(query) for query in queries]
        room = [self._fits(turn) for turn in turns]
        active = [turn for turn, fits in zip(turns, room, strict=True) if fits]
        while active:
            hidden_ND = self._read(active)
            if self.constrained:
                self._choose_legal(active, hidden_ND)
            else:
                self._choose_free(active, hidden_ND)
            active = [turn for turn in active if not self._finished(turn)]
        return [self._close(t) if fits else Action("", truncated=True) for t, fits in zip(turns, room, strict=True)]

    def _open(self, query: Query) -> _Turn:
        """Tokens of the prompt: appended to the conversation already read, or read afresh."""
        trie = answer_trie(tuple(query.legal)) if self.constrained else None
        known = self._sessions.get((query.episode, query.seat))
        if known and query.conversation[: len(known[0])] == known[0]:
            messages, sequence, kv = known
            sequence.ids.extend(self.chat.later(query.conversation[len(messages) :]))
        else:
            ids, shared = self.chat.first_prompt(query.conversation)
            sequence = Sequence(ids, shared=shared)
            kv = self._prefix(tuple(ids[:shared])) if shared >= SHARED_PREFIX_MIN else None
        start = len(sequence.ids)
        decision = Decision(start, start, allowed=[] if self.constrained else None)
        return _Turn(query, sequence, trie, kv, decision)

    def _prefix(self, ids: tuple[int, ...]) -> Tensor:
        if ids not in self._prefixes:
            ids_BT = torch.tensor([ids], device=self.device)
            _, cache = run_trunk(self.trunk, ids_BT, torch.zeros_like(ids_BT[:, :1]))
            self._prefixes[ids] = torch.stack([torch.stack((k[0], v[0])) for k, v in cache])
        return self._prefixes[ids]

    def _fits(self, turn: _Turn) -> bool:
        longest = max(map(len, turn.trie)) + 1 if turn.trie else self.max_new_tokens
        return len(turn.sequence.ids) + longest <= self.max_seq_length

    def _read(self, turns: list[_Turn]) -> Tensor:
        """Hidden state after the last token of each turn (N, D); rows that are the same are computed once."""
        rows: dict[tuple, list[int]] = {}
        for n, turn in enumerate(turns):
            rows.setdefault((id(turn.kv), tuple(turn.sequence.ids[turn.cached :])), []).append(n)
        order = sorted(rows.items(), key=lambda row: (len(row[0][1]), turns[row[1][0]].cached))
        hidden_ND = torch.empty(len(turns), self.base.config.hidden_size, dtype=self.lm_head.weight.dtype,
                                device=self.device)  # fmt: skip
        for chunk in _chunks(order, lambda row: len(row[0][1]) + turns[row[1][0]].cached, self.tokens_per_batch):
            members = [row[1] for row in chunk]
            past, past_len_B = self._stack([turns[m[0]].kv for m in members])
            lengths = [len(row[0][1]) for row in chunk]
            at_BK = torch.tensor(lengths, device=self.device)[:, None] - 1
            read_BKD, cache = run_trunk(
                self.trunk, _pad([row[0][1] for row in chunk], self.device), at_BK, past, past_len_B
            )
            for b, member in enumerate(members):
                for n in member:
                    hidden_ND[n] = read_BKD[b, 0]
                    if turns[n].goes_on:
                        new = torch.stack(
                            [torch.stack((k[b, :, : lengths[b]], v[b, :, : lengths[b]])) for k, v in cache]
                        )
                        kv = turns[n].kv
                        turns[n].kv = new if kv is None else torch.cat((kv, new), 3)
        return hidden_ND

    def _stack(self, kvs: list[Tensor | None]) -> tuple[Cache | None, Tensor | None]:
        """Pad cached keys and values of several rows to one batch."""
        lengths = [0 if kv is None else kv.shape[3] for kv in kvs]
        if not max(lengths):
            return None, None
        first = next(kv for kv in kvs if kv is not None)
        batch = first.new_zeros(len(kvs), *first.shape[:3], max(lengths), first.shape[4])
        for b, kv in enumerate(kvs):
            if kv is not None:
                batch[b, ..., : lengths[b], :] = kv
        return [(layer[:, 0], layer[:, 1]) for layer in batch.unbind(1)], torch.tensor(lengths, device=self.device)

    def _choose_legal(self, turns: list[_Turn], hidden_ND: Tensor) -> None:
        """Sample the next character of each answer among those that continue a legal id."""
        chars = self._end_trie
        columns = torch.tensor([self.chat.digit_ids[c] for c in chars], device=self.device)
        logits_NV = (
            (hidden_ND.float() @ self.lm_head.weight[columns].float().T / self.temperature).double().cpu().numpy()
        )
        values_N = self.value_head(hidden_ND.float())[:, 0].tolist()
        index = {c: v for v, c in enumerate(chars)}
        for turn, logits_V, value in zip(turns, logits_NV, values_N, strict=True):
            assert turn.trie is not None
            allowed = turn.trie[turn.text]
            if not turn.text:
                turn.decision.value = value
            if len(allowed) > 1:
                logp = logits_V[[index[c] for c in allowed]]
                logp = logp - np.logaddexp.reduce(logp)
                pick = int(logp.argmax()) if self.greedy else self._draw(np.exp(logp), turn)
                self._record(turn, [self.chat.digit_ids[c] for c in allowed], pick, float(logp[pick]))
                self._append(turn, allowed[pick])
            else:
                self._append(turn, allowed)
            while not self._finished(turn) and len(turn.trie[turn.text]) == 1:
                self._append(turn, turn.trie[turn.text])

    def _choose_free(self, turns: list[_Turn], hidden_ND: Tensor) -> None:
        """Sample the next token of each answer from the whole vocabulary."""
        logp_NV = F.log_softmax(self.lm_head(hidden_ND).float() / self.temperature, dim=-1)
        values_N = self.value_head(hidden_ND.float())[:, 0].tolist()
        for n, turn in enumerate(turns):
            if not turn.tokens:
                turn.decision.value = values_N[n]
            if self.greedy:
                token = int(logp_NV[n].argmax())
            else:
                token = self._draw(logp_NV[n].double().exp().cpu().numpy(), turn)
            self._record(turn, None, token, float(logp_NV[n, token]))
            turn.tokens.append(token)
            turn.sequence.ids.append(token)

    def _draw(self, probs_V: np.ndarray, turn: _Turn) -> int:
        """Inverse-CDF sampling with the decision's own uniform number."""
        cdf = probs_V.cumsum()
        u = uniform(self.seed, *turn.query.rng_key, len(turn.tokens)) * cdf[-1]
        return min(int(np.searchsorted(cdf, u, side="right")), len(cdf) - 1)

    @staticmethod
    def _record(turn: _Turn, allowed: list[int] | None, pick: int, logprob: float) -> None:
        decision = turn.decision
        decision.positions.append(len(turn.sequence.ids) - 1)
        if allowed is not None and decision.allowed is not None:
            decision.allowed.append(allowed)
        decision.chosen.append(pick if allowed is None else allowed[pick])
        decision.token_logprobs.append(logprob)
        decision.logprob += logprob

    def _append(self, turn: _Turn, char: str) -> None:
        turn.text += char
        turn.tokens.append(self.chat.digit_ids[char])
        turn.sequence.ids.append(self.chat.digit_ids[char])

    def _finished(self, turn: _Turn) -> bool:
        if turn.trie is not None:
            return turn.text.endswith(END)
        return bool(turn.tokens) and (turn.tokens[-1] == self.chat.end_id or len(turn.tokens) >= self.max_new_tokens)

    def _close(self, turn: _Turn) -> Action:
        if turn.trie is None:
            ended = turn.tokens[-1] == self.chat.end_id
            text = self.tokenizer.decode(turn.tokens[:-1] if ended else turn.tokens, skip_special_tokens=True)
            if not ended:  # cut at the limit: the conversation still needs the end of the turn
                turn.sequence.ids.append(self.chat.end_id)
        else:
            text = turn.text.removesuffix(END)
        query, decision = turn.query, turn.decision
        decision.stop = len(turn.sequence.ids)
        turn.sequence.decisions.append(decision)
        if query.continues:
            messages = [*query.conversation, {"role": "assistant", "content": text}]
            self._sessions[query.episode, query.seat] = (messages, turn.sequence, turn.kv)
        return Action(text, turn.tokens, decision.logprob, decision.value, turn.sequence)

    @torch.no_grad()
    def action_probs(self, queries: Seq[Query]) -> list[dict[int, float]]:
        """Probability of every legal action (sums to 1), under the constraint and the temperature."""
        nodes: list[_Turn] = []
        for query in queries:
            ids, shared = self.chat.first_prompt(query.conversation)
            kv = self._prefix(tuple(ids[:shared])) if shared >= SHARED_PREFIX_MIN else None
            for text, follow in answer_trie(tuple(query.legal)).items():
                if len(follow) > 1:
                    answer = [self.chat.digit_ids[c] for c in text]
                    nodes.append(_Turn(query, Sequence(ids + answer), {text: follow}, kv, text=text))
        probs = [dict.fromkeys(query.legal, 1.0) for query in queries]
        if not nodes:
            return probs
        columns = torch.tensor([self.chat.digit_ids[c] for c in self._end_trie], device=self.device)
        hidden_ND = self._read(nodes).float()
        logits_NV = (hidden_ND @ self.lm_head.weight[columns].float().T / self.temperature).double().cpu().numpy()
        of = {id(query): p for query, p in zip(queries, probs, strict=True)}
        for node, logits_V in zip(nodes, logits_NV, strict=True):
            assert node.trie is not None
            follow = node.trie[node.text]
            logp = logits_V[[self._end_trie.index(c) for c in follow]]
            share = dict(zip(follow, np.exp(logp - np.logaddexp.reduce(logp)), strict=True))
            for action in node.query.legal:
                answer_text = str(action) + END
                if answer_text.startswith(node.text):
                    of[id(node.query)][action] *= float(share[answer_text[len(node.text)]])
        return probs

    # -- scoring -------------------------------------------------------------------------------------------------

    def micro_batches(self, sequences: Seq[Sequence]) -> list[list[int]]:
        """Split sequences into groups of similar length that share a prefix and fit ``tokens_per_batch``."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for i, sequence in enumerate(sequences):
            rows.setdefault(tuple(sequence.ids[: _read_positions(sequence)[-1] + 1]), []).append(i)
        groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], list[int]]]] = {}
        for row, members in rows.items():
            groups.setdefault(row[: _shared(sequences[members[0]])], []).append((row, members))
        batches = []
        for group in groups.values():
            group.sort(key=lambda item: len(item[0]))
            for chunk in _chunks(group, lambda item: len(item[0]), self.tokens_per_batch):
                batches.append([i for _, members in chunk for i in members])
        return batches

    def evaluate_decisions(self, sequences: Seq[Sequence], adapter: str | None = None) -> Evaluation:
        """Score every decision of ``sequences``, in their order (M decisions), with gradients.

        ``adapter``: score with another adapter (``"base"``: none) and without gradients.
        """
        if adapter is not None:
            with self.using(adapter):
                return self.evaluate_decisions(sequences)
        parts: list[Evaluation] = []
        order: list[int] = []
        first = np.cumsum([0] + [len(s.decisions) for s in sequences])
        for members in self.micro_batches(sequences):
            parts.append(self._evaluate([sequences[i] for i in members]))
            order += [m for i in members for m in range(first[i], first[i + 1])]
        back = torch.tensor(np.argsort(order), device=self.device)
        return Evaluation(*(torch.cat(column)[back] for column in zip(*parts, strict=True)))

    def _evaluate(self, sequences: list[Sequence]) -> Evaluation:
        decisions = [d for s in sequences for d in s.decisions]
        reads = [(s, _read_positions(s)) for s in sequences]
        hidden = self._hidden_at(reads)
        value_rows, choice_rows, owner = [], [], []
        n = m = 0
        for (_, at), sequence in zip(reads, sequences, strict=True):
            place = {p: n + k for k, p in enumerate(at)}
            for decision in sequence.decisions:
                value_rows.append(place[decision.start - 1])
                choice_rows += [place[p] for p in decision.positions]
                owner += [m] * len(decision.positions)
                m += 1
            n += len(at)
        values_M = self.value_head(hidden[value_rows].float())[:, 0]
        zeros_M = torch.zeros(len(decisions), device=self.device)
        if not choice_rows:
            return Evaluation(zeros_M, zeros_M, values_M)
        logp_N, entropy_N = self._choices(hidden[choice_rows], decisions)
        owner_N = torch.tensor(owner, device=self.device)
        return Evaluation(zeros_M.index_add(0, owner_N, logp_N), zeros_M.index_add(0, owner_N, entropy_N), values_M)

    def _hidden_at(self, reads: list[tuple[Sequence, list[int]]]) -> Tensor:
        """Hidden states (sum of positions, D) of all read positions; equal rows and a shared prefix once."""
        rows: dict[tuple[int, ...], int] = {}
        wanted: list[set[int]] = []
        row_of: list[int] = []
        for sequence, at in reads:
            b = rows.setdefault(tuple(sequence.ids[: at[-1] + 1]), len(rows))  # nothing after the last read matters
            if b == len(wanted):
                wanted.append(set())
            wanted[b].update(at)
            row_of.append(b)
        ats = [sorted(w) for w in wanted]
        shared = _shared(reads[0][0])
        recompute = self.config.gradient_checkpointing and torch.is_grad_enabled()
        past = past_len_B = None
        if shared:
            ids_BT = torch.tensor([next(iter(rows))[:shared]], device=self.device)
            _, cache = run_trunk(self.trunk, ids_BT, torch.zeros_like(ids_BT[:, :1]), recompute=recompute)
            past = [(k.expand(len(rows), -1, -1, -1), v.expand(len(rows), -1, -1, -1)) for k, v in cache]
            past_len_B = torch.full((len(rows),), shared, device=self.device)
        ids_BT = _pad([row[shared:] for row in rows], self.device)
        at_BK = _pad([[p - shared for p in at] for at in ats], self.device)
        read_BKD, _ = run_trunk(self.trunk, ids_BT, at_BK, past, past_len_B, recompute)
        pick = [(b, ats[b].index(p)) for b, (_, at) in zip(row_of, reads, strict=True) for p in at]
        index = torch.tensor(pick, device=self.device)
        return read_BKD[index[:, 0], index[:, 1]]

    def _choices(self, hidden_ND: Tensor, decisions: list[Decision]) -> tuple[Tensor, Tensor]:
        """Log-probability of what was chosen and entropy, per token-level choice (N)."""
        chosen = [c for d in decisions for c in d.chosen]
        if decisions[0].allowed is None:
            chosen_N = torch.tensor(chosen, device=self.device)
            logits_NV = self.lm_head(hidden_ND).float() / self.temperature
            logp_NV = F.log_softmax(logits_NV, dim=-1)
            entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
            return logp_NV.gather(1, chosen_N[:, None])[:, 0], entropy_N
        allowed = [a for d in decisions for a in (d.allowed or [])]
        columns = sorted({t for a in allowed for t in a})
        index = {t: v for v, t in enumerate(columns)}
        mask = np.zeros((len(allowed), len(columns)), dtype=bool)
        for n, tokens in enumerate(allowed):
            mask[n, [index[t] for t in tokens]] = True
        mask_NV = torch.from_numpy(mask).to(self.device)
        weight_VD = self.lm_head.weight[torch.tensor(columns, device=self.device)].float()
        logits_NV = (hidden_ND.float() @ weight_VD.T / self.temperature).masked_fill(~mask_NV, -torch.inf)
        logp_NV = F.log_softmax(logits_NV, dim=-1)
        entropy_N = -(logp_NV.exp() * logp_NV.masked_fill(~mask_NV, 0.0)).sum(-1)
        chosen_N = torch.tensor([index[t] for t in chosen], device=self.device)
        return logp_NV.gather(1, chosen_N[:, None])[:, 0], entropy_N

    def log_legal_mass(self, sequences: list[Sequence]) -> Tensor:
        """Log of the unrestricted, untempered probability that each decision's answer stays legal (M).

        The product runs over all tokens of the answer, the end of the turn included; a token that left no
        choice counts too. Needs ``answer_mode: constrained``; the sequences must fit one micro-batch.
        """
        allowed, owner, reads, m = [], [], [], 0
        for sequence in sequences:
            at = [p for d in sequence.decisions for p in range(d.start - 1, d.stop - 1)]
            reads.append((sequence, at))
            for d in sequence.decisions:
                choices = dict(zip(d.positions, d.allowed or [], strict=True))
                allowed += [choices.get(p, [sequence.ids[p + 1]]) for p in range(d.start - 1, d.stop - 1)]
                owner += [m] * (d.stop - d.start)
                m += 1
        logits_NV = self.lm_head(self._hidden_at(reads)).float()
        mask_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
        for n, tokens in enumerate(allowed):
            mask_NV[n, tokens] = True
        mass_N = logits_NV.masked_fill(~mask_NV, -torch.inf).logsumexp(-1) - logits_NV.logsumexp(-1)
        return torch.zeros(m, device=self.device).index_add(0, torch.tensor(owner, device=self.device), mass_N)

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the adapter as PEFT, vLLM and the Hub load it, with tokenizer, chat template and value head."""
        from safetensors.torch import save_file

        self.peft_model.save_pretrained(folder, selected_adapters=["default"])
        self.tokenizer.save_pretrained(folder)
        head = {name: p.detach().cpu().contiguous() for name, p in self.value_head.named_parameters()}
        save_file(head, folder / "value_head.safetensors")

    def load(self, folder: Path) -> None:
        """Read adapter and value head written by ``save`` into this policy, bit for bit."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        set_peft_model_state_dict(self.peft_model, load_file(folder / "adapter_model.safetensors"))
        self.value_head.load_state_dict(load_file(folder / "value_head.safetensors"))
        self.weights_changed()

    def add_adapter(self, name: str, folder: Path) -> None:
        """Load another adapter onto the same base, frozen: an earlier self to play against."""
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
