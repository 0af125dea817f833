"""Token counts of a few random games: what a model would read, write and cache, without a model."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from curriculum import Curriculum, Stage, eval_tasks, evaluated
from env_wrapper import play
from envs.types import Action, Episode, Query, Task
from policy import player
from policy.chat import ChatFormat, answer_trie
from policy.network import ATTENDED, batches
from policy.tree import Row, new_tokens
from utils import ConfigError, uniform

PLAYED = 128  # most games of a step that are played to estimate its memory; the rest is extrapolated
SKIPPED = 20  # programs without an answer, in a row, that are skipped before that is an error


@dataclass
class Prompts:
    """A random player for ``play``, which counts the tokens that a model would have read and written."""

    chat: ChatFormat
    free_answer: int  # tokens of an answer; 0: those of the longest legal action
    peek: bool  # end each game after its first prompt
    ahead: int = 0  # places of an answer that are read at once
    first: list[int] = field(default_factory=list)  # tokens of the first prompt of each conversation
    later: list[int] = field(default_factory=list)  # tokens added by each later prompt
    answer: int = 0  # tokens of the longest answer
    asked: list[tuple[int, int, int]] = field(default_factory=list)  # an answer's new tokens, prompt, forward passes
    work: list[float] = field(default_factory=list)  # tokens of each forward pass, counted as ``batches`` does
    longest: dict[tuple[int, int], int] = field(default_factory=dict)  # prompt of each conversation, with its answer
    episodes: list[Episode] = field(default_factory=list)
    slots: int = 0  # most tokens whose keys and values are held at once, with common beginnings counted once
    at_work: int = 0  # most tokens read in one round, likewise
    distinct: int = 0  # tokens of the training sequences of a step, likewise
    rows: dict[int, list[list[int]]] = field(default_factory=lambda: defaultdict(list))  # episode -> its sequences
    _last: dict[tuple[int, int], tuple[int, list[int]]] = field(default_factory=dict)  # messages and ids of a prompt
    _rows: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # the ids, with room for a free answer
    _open: set[tuple[int, int]] = field(default_factory=set)  # conversations that continue

    @property
    def game(self) -> str:
        """The name of the game, where it played only one."""
        return self.episodes[0].game

    @property
    def read(self) -> int:
        """Tokens of the prompts of all games, each read once."""
        return sum(self.first) + sum(self.later)

    def act(self, queries: Sequence[Query]) -> list[Action]:
        """Count tokens and answer at random."""
        keys = [(query.episode, query.seat) for query in queries]
        known = _distinct(
            self._last[key][1] for key, q in zip(keys, queries, strict=True) if q.continues and key in self._last
        )
        actions = [self._answer(query) for query in queries]
        asked = self.asked[-len(queries) :]
        for read in range(max(passes for *_, passes in asked)):
            costs = [(1 if read else new) + prompt / ATTENDED for new, prompt, passes in asked if passes > read]
            self.work.append(sum(costs))
        self.at_work = max(self.at_work, _distinct(self._last[key][1] for key in keys) - known)
        self._open |= {key for key, query in zip(keys, queries, strict=True) if query.continues}
        self.slots = max(self.slots, _distinct(self._rows[key] for key in {*keys, *self._open}))
        return actions

    def release(self, episodes: Sequence[int]) -> None:
        """Games that have ended hold no keys and values."""
        self._open = {key for key in self._open if key[0] not in episodes}

    def micro_batch(self, games: int, budget: int) -> int:
        """Tokens of the fullest forward pass of updates on ``games`` games, in batches of ``budget`` tokens."""
        fullest, played = 0, [*self.rows.values()]
        for i in range(0, len(played), games):
            rows = [Row(ids) for ids in sorted({tuple(ids) for some in played[i : i + games] for ids in some})]
            fullest = max(fullest, *(_distinct(row.ids for row in rows[part]) for part in batches(rows, budget)))
        return fullest

    def _answer(self, query: Query) -> Action:
        key, messages = (query.episode, query.seat), len(query.conversation)
        ids, shared = self.chat.first_prompt(query.conversation)
        tokens = len(ids)
        answer = self.free_answer or max(map(len, map(str, query.legal))) + 1  # a token a digit, and the end
        before = self._last.get(key)
        goes_on = before is not None and messages > before[0]
        added = tokens - len(before[1]) if before and goes_on else tokens
        (self.later if before else self.first).append(added)
        self.answer = max(self.answer, answer)
        if before and goes_on:
            self.rows[query.episode].remove(self._rows[key])
        self._last[key], self._rows[key] = (messages, ids), ids + [-1 - len(self.asked)] * self.free_answer
        self.rows[query.episode].append(self._rows[key])
        self.longest[key] = max(self.longest.get(key, 0), tokens + answer)
        choices = [*map(str, query.legal)] or [""]  # a task without legal actions takes any text
        text = choices[int(uniform(*query.rng_key) * len(choices))]
        chosen = answer_trie(tuple(query.legal)).passes(text, self.ahead) if text else 0
        self.asked.append((added if goes_on else tokens - shared, tokens, self.free_answer or chosen))
        return Action(text, truncated=self.peek)


def _distinct(rows: Iterable[Sequence[int]]) -> int:
    """Number of tokens in the rows, with common beginnings counted once."""
    return sum(own for _, own in new_tokens([Row(row) for row in sorted(map(tuple, rows))]))


def count_tokens(config: SimpleNamespace, chat: ChatFormat, tasks: list[Task], peek: bool) -> Prompts:
    """Play these tasks at random and count tokens; a program without an answer is replaced by the next.

    ConfigError: a game failed, or too many programs in a row, or an answer leaves no room for a prompt.
    """
    free, answer = config.env.answer_mode == "free", config.ppo.max_new_tokens
    most, asked_freely = config.ppo.max_seq_length, free or config.ppo.legal_mass_coef  # then evaluations do
    if asked_freely and answer >= most:  # each of its tokens is counted one by one
        holds = f"ppo.max_seq_length, {most}, which holds prompt and answer"
        raise ConfigError(f"ppo.max_new_tokens = {answer}: expected fewer tokens than {holds}")
    for _ in range(SKIPPED):
        prompts = Prompts(chat, answer if free else 0, peek, player.AHEAD[config.model.device != "cpu"])
        prompts.episodes = play(replace(config.env, games_at_once=0), prompts, tasks)
        failed = [e for e in prompts.episodes if e.outcome == "failed"]
        if not all("NoAnswerError" in e.info["error"] for e in failed):
            break
        if not failed:
            return prompts
        tasks = [replace(e.task, task_id=e.task.task_id + (e.outcome == "failed")) for e in prompts.episodes]
    raise ConfigError(f"curriculum.stages: task {failed[0].task.task_id} failed: {failed[0].info['error']}")


def play_step(config: SimpleNamespace, chat: ChatFormat, stage: Stage) -> Prompts:
    """Count the tokens of a stage's step, played at random without searching opponents; at most ``PLAYED`` games."""
    env, games = config.env, config.ppo.batch_size
    curriculum = Curriculum(replace(config.curriculum, stages=(stage,), failure_replay_prob=0.0), config.run.seed)
    opponent = "self" if {"self", "past"} & {*stage.mixture} else "random"  # the first past self is the policy itself
    tasks = [replace(curriculum.next(i), opponent=opponent) for i in range(min(games, PLAYED))]
    opened, whole = min(games, env.games_at_once or games), count_tokens(config, chat, [], False)
    at_once = min(opened, len(tasks))
    for i in range(0, len(tasks), at_once):
        part = count_tokens(config, chat, tasks[i : i + at_once], False)
        whole.slots, whole.at_work = max(whole.slots, part.slots), max(whole.at_work, part.at_work)
        whole.rows |= {i + n: rows for n, rows in part.rows.items()}
    whole.slots, whole.at_work = (n * opened // at_once for n in (whole.slots, whole.at_work))
    whole.distinct = _distinct(ids for rows in whole.rows.values() for ids in rows) * games // len(tasks)
    return whole


def evaluation_work(config: SimpleNamespace, chat: ChatFormat) -> tuple[float, float]:
    """Forward passes and tokens of the games of one evaluation; about ``PLAYED`` of them are played at random."""
    env, tasks = config.env, evaluated(config.curriculum, config.env.env_type)
    in_each_seat = min(config.ppo.eval_games, max(PLAYED // len(tasks), 2)) // 2
    drawn = [task for part in tasks for task in eval_tasks([part], in_each_seat, 0)]
    games = config.ppo.eval_games * len(tasks)
    opened = min(env.games_at_once or games, games)
    at_once, passes, tokens = min(opened, len(drawn)), 0.0, 0.0
    for i in range(0, len(drawn), at_once):
        played = count_tokens(config, chat, drawn[i : i + at_once], False)
        passes += sum(max(work * opened / at_once / config.model.tokens_per_batch, 1) for work in played.work)
        tokens += sum(new + max(reads - 1, 0) for new, _, reads in played.asked)  # the first pass reads the prompt
    more = games / len(drawn)
    return passes * more * at_once / opened, tokens * more
