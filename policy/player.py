"""The player: turns conversations into answers (``act``) and scores the answers for PPO (``evaluate_decisions``).

Shapes: D hidden size, V columns of the output layer, N rows of hidden states, M decisions.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint

from config.reader import blaming
from envs.types import Action, Decision, PromptTooLongError, Query, Sequence
from policy import cpu_memory
from policy.adapters import Adapters
from policy.attention import in_fixed_order
from policy.cache import Kept
from policy.chat import ANSWER_CHARS, END, ChatFormat, answer_trie
from policy.context import Context
from policy.conversations import Conversations, Turn
from policy.model import LINEARS, ModelConfig, load_model
from policy.network import AGAIN, ATTENDED, SHARED_PREFIX_MIN, Read, Reader, activation_bytes
from policy.state_head import StateHead
from policy.vocabulary import draw, invert, score
from utils import RuinedWeightsError, uniform

SAMPLE = "Game 0123456789: your move, x(1,1) -> bet?"  # many kinds of tokens
AHEAD = 0, 12  # choices of an answer read in one pass, on CPUs and on GPUs, where a pass costs more than a few tokens
HEAD_ROWS = 256  # rows of whole-vocabulary logits in memory at a time, where their gradient allows it


class Evaluation(NamedTuple):
    """Per decision (M), with gradients: log-probability and entropy in nats (sums over its tokens), value.

    ``legal_mass``, on request: log of the probability, without constraint, that the answer stays legal, over all its
    tokens, including the end of the turn and those that left no choice.
    ``evaluate_batch`` alone adds: ``prompts``, hidden states (M, D) at the prompts' last tokens, where values are read;
    and on request ``preferences``, the logits of the chosen tokens less the mean of the allowed ones, and ``spread``,
    half the sum of squares of these differences over the allowed tokens (M each, sums over its choices).
    """

    logprobs: Tensor
    entropies: Tensor
    values: Tensor
    legal_mass: Tensor | None = None
    prompts: Tensor | None = None
    preferences: Tensor | None = None
    spread: Tensor | None = None


@lru_cache(maxsize=4096)
def _may_follow(follow: str) -> np.ndarray:
    """Mask over ANSWER_CHARS."""
    return np.array([char in follow for char in ANSWER_CHARS])


def _must_be_finite(x: Tensor) -> None:
    if not bool(torch.isfinite(x).all()):
        raise RuinedWeightsError("the weights are ruined: what the model computes for a prompt is not finite")


class Policy(Adapters):
    """Answers queries (``act``) and scores the answers (``evaluate_decisions``), with one set of weights.

    ``Adapters`` holds the weights, ``reader`` runs tokens through them, ``conversations`` holds each seat's history.
    """

    def __init__(self, peft_model: Any, tokenizer: Any, config: Any) -> None:
        self.config: ModelConfig = config.model
        self.base = peft_model.get_base_model()
        self.trunk, self.lm_head = self.base.model, self.base.lm_head
        self.device = self.lm_head.weight.device
        self.value_head = nn.Linear(self.base.config.hidden_size, 1, dtype=torch.float32, device=self.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        super().__init__(peft_model, tokenizer, self.value_head, config.model.model_name)
        self.temperature, self.greedy = config.ppo.temperature, False
        self.max_seq_length = min(config.ppo.max_seq_length, self.base.config.max_position_embeddings)
        self.max_new_tokens = config.ppo.max_new_tokens
        self.constrained, self.seed = config.env.answer_mode == "constrained", config.run.seed
        self.reference = "reference" if "reference" in peft_model.peft_config else None
        self.context_grad = config.ppo.context_grad
        self.context: Context | None = None  # set while a step keeps what its rollouts read
        self.chat = ChatFormat(tokenizer, self.base.generation_config.eos_token_id)
        self.conversations = Conversations(self.chat)
        self._ahead = AHEAD[self.device.type != "cpu"]
        self._answer_weight_VD = self.lm_head.weight.detach()[[*self.chat.answer_ids.values()]].float()
        self._prefixes: dict[tuple[str, tuple[int, ...]], Kept | None] = {}
        layer = activation_bytes(self.base.config, LINEARS, self.lm_head.weight.itemsize)
        layer *= config.model.gradient_checkpointing
        self.reader = Reader(self.trunk, self.device, config.model.tokens_per_batch, layer)
        self.halve_batches, self.micro_batches = self.reader.halve_batches, self.reader.micro_batches
        self.release = self.conversations.release

    def learn_states(self, shapes: Mapping[str, Iterable[int]]) -> None:
        """Add a ``state_head``, trained too; ``shapes``: game -> the sizes of its information state tensors."""
        self.state_head = self.heads["state_head"] = StateHead(self.base.config.hidden_size, shapes, self.device)

    @property
    def tokens_per_batch(self) -> int:
        """The most tokens computed in one forward pass."""
        return self.reader.tokens_per_batch

    @tokens_per_batch.setter
    def tokens_per_batch(self, tokens: int) -> None:
        self.reader.set_limits(tokens)

    @property
    def average(self) -> str | None:
        """The name of the moving average's adapter, None where ``follow`` has made none."""
        return "average" if "average" in self.peft_model.peft_config else None

    def load(self, folder: Path) -> None:
        """As ``Adapters.load``; also clears what was cached with the previous weights."""
        super().load(folder)
        self.forget()

    @torch.no_grad()
    def check(self) -> None:
        """Read a short prompt, as a game would; RuinedWeightsError: weights or results are not finite."""
        _must_be_finite(get_total_norm(self.trainable().values()))  # hundreds of tensors, asked about at once
        ids, _ = self.chat.first_prompt([{"role": "system", "content": SAMPLE}, {"role": "user", "content": SAMPLE}])
        [hidden_D], _ = self.reader.read([Read(ids, None, False)])
        _must_be_finite(self.lm_head(hidden_D))
        _must_be_finite(self.value_head(hidden_D.to(self.value_head.weight.dtype)))

    def forget(self) -> None:
        """Clear caches and conversations; to be called before every update, whose weights differ, and around rollouts.

        A rollout could use what an evaluation has cached, but a resumed run, which lacks it, would round differently.
        """
        self._prefixes.clear()
        self.conversations.clear()
        self.reader.store.empty()
        if self.device.type == "cpu":
            cpu_memory.trim()

    @contextmanager
    def keeping_context(self) -> Iterator[None]:
        """Inside, without ``ppo.context_grad``, updates go on from the keys and values that rollouts have left behind.

        Call ``forget`` before entering.
        """
        if self.context_grad:
            yield
            return
        self.context = Context(self.reader.store)
        try:
            yield
        finally:
            self.context.release()
            self.context = None
            self.forget()

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
        limit = None if self.constrained else self.max_new_tokens
        turns = [self.conversations.open(query, self.max_seq_length, limit) for query in queries]
        new = [turn for turn in turns if turn and turn.cached is None]
        for turn, kept in zip(new, self._begin([(turn.ids, turn.before.shared) for turn in new]), strict=True):
            turn.cached = kept
        active = [turn for turn in turns if turn]
        while active:
            if unread := [turn for turn in active if turn.text not in turn.known]:
                self._read(unread)
            hidden_ND = torch.stack([turn.known[turn.text] for turn in active])
            (self._choose_legal if self.constrained else self._choose_free)(active, hidden_ND)
            active = [turn for turn in active if not self._finished(turn)]
        if self.context and self.active == "default":  # what past selves read is not trained on
            for turn in filter(None, turns):
                self.context.hold(turn.ids, turn.cached.path)
        return [self.conversations.close(turn) if turn else Action("", truncated=True) for turn in turns]

    def _read(self, turns: list[Turn]) -> None:
        """Read each conversation; the hidden state (D) after its last token goes into ``known``.

        Where few choices remain in the answer, the hidden states of all of them are read in the same pass.
        """
        reads, owners = list[Read](), list[tuple[Turn, str]]()
        for turn in turns:
            later = turn.trie.choices_after(turn.text) if turn.trie and self._ahead else []
            room = self.reader.tokens_per_batch / 4 > len(later) * len(turn.ids) / ATTENDED  # else it splits passes
            later = later if len(later) <= self._ahead and room else []
            goes_on = turn.trie is None or (not later and turn.trie.last_choice > len(turn.text))
            reads.append(Read(turn.ids, turn.cached, bool(self.context) or turn.stays or goes_on))
            reads += [Read(turn.ids + self.chat.answers_of(more), turn.cached, False) for more in later]
            owners += [(turn, turn.text + more) for more in ("", *later)]
        for (turn, text), hidden_D, kv in zip(owners, *self.reader.read(reads), strict=True):
            turn.known[text] = hidden_D
            if text == turn.text:
                turn.cached = kv

    def _begin(self, prompts: list[tuple[list[int], int]]) -> list[Kept | None]:
        """Keys and values of the system messages, each read once for all conversations that begin with it.

        ``prompts``: (tokens, how many of them are the system message). None where that is too short to be worth it.
        """
        keys = [(self.active, tuple(ids[:n])) if n >= SHARED_PREFIX_MIN else None for ids, n in prompts]
        if missing := list(dict.fromkeys(key for key in keys if key and key not in self._prefixes)):
            _, kept = self.reader.read([Read(prefix, None, keep=True) for _, prefix in missing])
            self._prefixes |= zip(missing, kept, strict=True)
        return [self._prefixes[key] if key else None for key in keys]

    def _answer_logprobs(self, hidden_ND: Tensor, follows: list[str]) -> Tensor:
        """Log-probability of each of ANSWER_CHARS where only those of ``follows`` are possible (fp64, CPU)."""
        logits_NV = (hidden_ND.float() @ self._answer_weight_VD.T / self.temperature).double().cpu()
        _must_be_finite(logits_NV)
        mask_NV = torch.from_numpy(np.stack([_may_follow(follow) for follow in follows]))
        return F.log_softmax(logits_NV.masked_fill(~mask_NV, -torch.inf), dim=-1)

    def _choose_legal(self, turns: list[Turn], hidden_ND: Tensor) -> None:
        """Sample the next character of each answer among those that continue a legal id."""
        follows = [turn.trie.follow[turn.text] for turn in turns if turn.trie]
        logp_NV = self._answer_logprobs(hidden_ND, follows)
        if self.greedy:
            picks_N = logp_NV.argmax(-1)
        else:
            picks_N = invert(logp_NV.exp().cumsum(-1), self._uniform(turns))[0]
        self._note_values(turns, hidden_ND)
        logprobs = logp_NV.gather(1, picks_N[:, None])[:, 0].tolist()
        for turn, follow, pick, logprob in zip(turns, follows, picks_N.tolist(), logprobs, strict=True):
            assert turn.trie is not None
            char = ANSWER_CHARS[pick]
            if len(follow) > 1:
                turn.record(self.chat.answer_ids[char], logprob, self.chat.answers_of(follow))
            before, turn.text = turn.text, turn.trie.completed(turn.text + char)
            turn.ids += self.chat.answers_of(turn.text[len(before) :])

    def _choose_free(self, turns: list[Turn], hidden_ND: Tensor) -> None:
        """Sample the next token of each answer from the whole vocabulary."""
        _must_be_finite(hidden_ND)
        self._note_values(turns, hidden_ND)
        start, rows = 0, HEAD_ROWS
        while start < len(turns):
            some = turns[start : start + rows]
            u_N = None if self.greedy else self._uniform(some).to(self.device)
            try:
                picks_N, logp_N = draw(hidden_ND[start : start + rows], self.lm_head.weight, u_N, self.temperature)
            except torch.OutOfMemoryError:
                if len(some) == 1:
                    raise
                rows = len(some) // 2
                continue
            start += rows
            for turn, pick, logprob in zip(some, picks_N.tolist(), logp_N.tolist(), strict=True):
                turn.record(pick, logprob)
                turn.ids.append(pick)
                turn.known = {}

    def _uniform(self, turns: list[Turn]) -> Tensor:
        """A uniform random number for each turn's next token, from the decision's own stream (fp64, CPU)."""
        keys = [(self.seed, *turn.query.rng_key, turn.written) for turn in turns]
        return torch.tensor([uniform(*key) for key in keys], dtype=torch.float64)

    def _note_values(self, turns: list[Turn], hidden_ND: Tensor) -> None:
        """Note the values of turns whose answer has not begun: they are read at the last token of the prompt."""
        for turn, value in zip(turns, self.value_head(hidden_ND.float())[:, 0].tolist(), strict=True):
            if not turn.written:
                turn.value = value

    def _finished(self, turn: Turn) -> bool:
        if turn.trie:
            return turn.text.endswith(END)
        return turn.ids[-1] in self.chat.ends or turn.written >= self.max_new_tokens

    @torch.no_grad()
    def action_probs(self, queries: Seq[Query]) -> list[dict[int, float]]:
        """Probability of every legal action (sums to 1), under the constraint and the temperature.

        PromptTooLongError: a prompt and its longest answer do not fit into ``max_seq_length``.
        """
        prompts = [self.chat.first_prompt(query.conversation) for query in queries]
        tries = [answer_trie(tuple(query.legal)) for query in queries]
        if any(len(ids) + trie.longest > self.max_seq_length for (ids, _), trie in zip(prompts, tries, strict=True)):
            raise PromptTooLongError
        probs = [dict.fromkeys(query.legal, 1.0) for query in queries]
        reads, choices = [], []
        for found, trie, (ids, _), kv in zip(probs, tries, prompts, self._begin(prompts), strict=True):
            for text, follow in trie.follow.items():
                if len(follow) > 1:
                    reads.append(Read(ids + self.chat.answers_of(text), kv, False))
                    choices.append((found, text, follow))
        if not reads:
            return probs
        hidden_ND, _ = self.reader.read(reads)
        probs_NV = self._answer_logprobs(hidden_ND, [follow for _, _, follow in choices]).exp().tolist()
        for (found, text, _), probs_V in zip(choices, probs_NV, strict=True):
            for action in found:
                answer = str(action) + END
                if answer.startswith(text):
                    found[action] *= probs_V[ANSWER_CHARS.index(answer[len(text)])]
        return probs

    # -- scoring -------------------------------------------------------------------------------------------------

    def evaluate_decisions(
        self, sequences: Seq[Sequence], adapter: str | None = None, legal_mass: bool = False
    ) -> Evaluation:
        """Score every decision of ``sequences``, in their order (M decisions), with gradients.

        Args:
            sequences: what was answered; read in micro-batches of ``tokens_per_batch``.
            adapter: score with another adapter (``"base"``: none) and without gradients.
            legal_mass: whether to compute it too; needs ``answer_mode: constrained``.
        """

        def score_micro_batch(part: list[Sequence]) -> list[Tensor]:
            return [x for x in self.evaluate_batch(part, legal_mass=legal_mass)[:4] if x is not None]

        with self.using(adapter), in_fixed_order(self.device):
            return Evaluation(*self.reader.in_micro_batches(score_micro_batch, sequences))

    def evaluate_batch(
        self, sequences: list[Sequence], entropy_grad: bool = True, legal_mass: bool = False, preferences: bool = False
    ) -> Evaluation:
        """``evaluate_decisions`` of one micro-batch (a group of ``micro_batches``), in a single pass.

        ``entropy_grad``: whether entropies have gradients too, which costs time where answers are free.
        ``preferences``: whether to compute them and the spread too; needs ``answer_mode: constrained``.
        """
        decisions = [d for s in sequences for d in s.decisions]

        def answer(d: Decision) -> Seq[int]:
            return range(d.start - 1, d.stop - 1) if legal_mass else d.positions

        wanted = [[(d.start - 1, *answer(d)) for d in s.decisions] for s in sequences]
        if self.context and torch.is_grad_enabled():
            hidden_ND = self._read_answers(sequences, wanted)
        else:
            hidden_ND = self.reader.hidden_at(sequences, [[*chain.from_iterable(at)] for at in wanted])
        lengths = torch.tensor([len(answer(d)) for d in decisions])
        value_rows = (lengths + 1).cumsum(0) - lengths - 1
        is_answer = torch.ones(len(hidden_ND), dtype=torch.bool)
        is_answer[value_rows] = False
        prompts_MD = hidden_ND[value_rows.to(self.device)].float()
        values_M = self.value_head(prompts_MD)[:, 0]
        answers_ND = hidden_ND[is_answer.nonzero()[:, 0].to(self.device)]
        mass_M = self._log_masses(answers_ND, sequences, lengths) if legal_mass else None
        if legal_mass:  # read at all tokens; log-probabilities count only those that were a choice
            is_choice = torch.tensor([p in d.positions for d in decisions for p in answer(d)])
            answers_ND = answers_ND[is_choice.nonzero()[:, 0].to(self.device)]
        zeros_M = torch.zeros(len(decisions), device=self.device)
        if not len(answers_ND):
            return Evaluation(zeros_M, zeros_M, values_M, mass_M, prompts_MD, *[zeros_M] * 2 * preferences)
        of_choices = self._choices(answers_ND, decisions, entropy_grad, preferences)
        counts = torch.tensor([len(d.positions) for d in decisions])
        owner_N = torch.repeat_interleave(torch.arange(len(decisions)), counts).to(self.device)
        logp_M, entropy_M, *others = (zeros_M.index_add(0, owner_N, x_N) for x_N in of_choices)
        return Evaluation(logp_M, entropy_M, values_M, mass_M, prompts_MD, *others)

    def _read_answers(self, sequences: list[Sequence], wanted: list[list[tuple[int, ...]]]) -> Tensor:
        """Hidden states at the ``wanted`` positions of each decision, after keys and values of the rollout.

        What the rollout did not read, because others played, is read now.
        """
        assert self.context
        befores = [s.ids[: s.decisions[-1].start - 1] for s in sequences]
        if missing := [Read(ids, None, keep=True) for ids in befores if self.context.find(ids) is None]:
            with torch.no_grad():
                _, kept = self.reader.read(missing)
            for read, kv in zip(missing, kept, strict=True):
                self.context.hold(read.ids, kv.path)
        rows, at, end = [], [], 0
        for s, before, decisions in zip(sequences, befores, wanted, strict=True):
            path = self.context.find(before)
            assert path is not None
            for positions in decisions:
                start, stop = positions[0], max(positions) + 1
                rows.append((path[:start], s.ids[start:stop]))
                at += [end + p - start for p in positions]
                end += stop - start
        return self.reader.hidden_after(rows)[torch.tensor(at, device=self.device)]

    def _choices(
        self, hidden_ND: Tensor, decisions: list[Decision], entropy_grad: bool, preferences: bool
    ) -> tuple[Tensor, ...]:
        """Log-probability of the chosen token, entropy, and on request preference and spread, at each choice (N)."""
        chosen_N = torch.tensor([c for d in decisions for c in d.chosen], device=self.device)
        if decisions[0].allowed is None:
            return score(hidden_ND, self.lm_head.weight, chosen_N, self.temperature, entropy_grad)
        columns_V, mask_NV = self._allowed([a for d in decisions for a in d.allowed or []])
        logits_NV = hidden_ND.float() @ self.lm_head.weight[columns_V].float().T / self.temperature
        logp_NV = F.log_softmax(logits_NV.masked_fill(~mask_NV, -torch.inf), dim=-1)
        entropy_N = -(logp_NV.exp() * logp_NV.masked_fill(~mask_NV, 0.0)).sum(-1)
        at_N1 = torch.searchsorted(columns_V, chosen_N)[:, None]
        found = logp_NV.gather(1, at_N1)[:, 0], entropy_N
        if not preferences:
            return found
        mean_N1 = logp_NV.masked_fill(~mask_NV, 0.0).sum(-1, keepdim=True) / mask_NV.sum(-1, keepdim=True)
        centred_NV = (logp_NV - mean_N1).masked_fill(~mask_NV, 0.0)
        return *found, centred_NV.gather(1, at_N1)[:, 0], centred_NV.square().sum(-1) / 2

    def _allowed(self, allowed: list[list[int]]) -> tuple[Tensor, Tensor]:
        """The sorted ids that occur in ``allowed`` (V), and a mask of those that each row allows (N, V)."""
        columns_V, at = np.unique(np.fromiter(chain.from_iterable(allowed), np.int64), return_inverse=True)
        mask_NV = np.zeros((len(allowed), len(columns_V)), dtype=bool)
        mask_NV[np.repeat(np.arange(len(allowed)), [len(a) for a in allowed]), at] = True
        return torch.from_numpy(columns_V).to(self.device), torch.from_numpy(mask_NV).to(self.device)

    def _log_masses(self, hidden_ND: Tensor, sequences: list[Sequence], lengths: Tensor) -> Tensor:
        """Log legal mass (M) from the hidden states before every token of the answers, ``lengths`` of them each."""
        allowed = []
        for s in sequences:
            for d in s.decisions:
                choices = dict(zip(d.positions, d.allowed or [], strict=True))
                allowed += [choices.get(p, [s.ids[p + 1]]) for p in range(d.start - 1, d.stop - 1)]
        columns_V, mask_NV = self._allowed(allowed)

        def mass(hidden_ND: Tensor, mask_NV: Tensor) -> Tensor:
            logits_NV = self.lm_head(hidden_ND).float().div_(self.temperature)
            legal_NV = logits_NV[:, columns_V].masked_fill(~mask_NV, -torch.inf)
            return legal_NV.logsumexp(-1) - logits_NV.logsumexp(-1)

        pieces = zip(hidden_ND.split(HEAD_ROWS), mask_NV.split(HEAD_ROWS), strict=True)
        mass_N = torch.cat([checkpoint(mass, h, m, **AGAIN) for h, m in pieces])
        owner_N = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(self.device)
        return torch.zeros(len(lengths), device=self.device).index_add(0, owner_N, mass_N)


def load_policy(config: Any) -> Policy:
    """Load base model, adapter and tokenizer; the value head is zero. ConfigError: one cannot be loaded or used.

    ``config``: an object with the sections ``model`` (ModelConfig), ``lora`` (LoraConfig), ``ppo`` (temperature,
    max_seq_length, max_new_tokens), ``env`` (answer_mode) and ``run`` (seed).
    """
    peft_model, tokenizer = load_model(config.model, config.lora, config.run.seed)
    policy = Policy(peft_model, tokenizer, config)
    key = "model_name" if config.model.adapter is None else "adapter"
    with blaming(f"model.{key}: {getattr(config.model, key)!r} cannot be used: ", RuinedWeightsError):
        policy.check()
    return policy
