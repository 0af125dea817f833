"""Learning from whole small games: all positions at once with exact values, instead of played games (``ppo.sweep``).

Against oneself, games are noisy teachers: most of what one says of an answer is its deal, and what was answered later.
Where a game is small, the model can be asked in every position, and what each legal answer is worth follows without
luck. A step of magnetic mirror descent (https://arxiv.org/abs/2206.05825) says what its log-probabilities should be,
and the update moves them there.

Shapes: M answers, one after the other for each legal answer in each position.
"""

from collections.abc import Sequence as Seq
from itertools import chain
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from config.reader import ConfigError
from curriculum import pool
from envs import exact
from envs.config import EnvConfig
from envs.openspiel import load_game, query_at, table, tables, unknown_prompts
from envs.types import Query, Sequence, Task
from policy.chat import END
from policy.conversations import Conversations
from policy.player import Policy
from training.config import PPOConfig
from training.ranks import Ranks
from training.trajectories import Batch

LEAST = -12.0  # nats: least log-probability asked for. Errors of all answers count alike, and rarer ones decide nothing


def check_sweep(config: SimpleNamespace) -> None:
    """Raise ConfigError where ``ppo.sweep`` is on and does not suit the games, or a knob would do nothing."""
    env, ppo = config.env, config.ppo
    if not ppo.sweep:
        return
    if (env.env_type, env.env_mode, env.answer_mode, env.use_vllm) != ("openspiel", "local", "constrained", False):
        raise ConfigError("ppo.sweep: only for games that are played here with constrained answers; 0 elsewhere")
    if config.curriculum.opponents != {"self"}:
        raise ConfigError("ppo.sweep: only for games against oneself: expected the opponent self in every stage")
    for name in ("init_kl_coef", "state_coef"):
        if getattr(ppo, name):
            raise ConfigError(f"ppo.{name}: does nothing with ppo.sweep, which learns from no games; expected 0")
    if not ppo.context_grad:
        raise ConfigError("ppo.context_grad = false: with ppo.sweep no games were played that read it; expected true")
    ranges = [*chain.from_iterable(pool([item for stage in config.curriculum.stages for item in stage.games]).values())]
    for shared in tables(ranges):
        if not exact.feasible(shared.spiel):
            told = "has no exact values: expected small games; in curriculum.stages NAME#0 is a first variant"
            raise ConfigError(f"ppo.sweep: {shared.systems['compact']} {told}")
    for first, _ in ranges:
        if why := unknown_prompts(first, env):
            raise ConfigError(f"ppo.sweep: positions of {load_game(first)} {why}")


class Positions(NamedTuple):
    """The positions of a game in which a seat has a choice, and an answered conversation for each legal answer."""

    keys: list[str]
    actions: list[list[int]]
    sequences: list[Sequence]


class Sweeps:
    """Makes a batch of all positions of the games in play. How they are asked is found out once."""

    def __init__(self, policy: Policy, env: EnvConfig) -> None:
        self.policy, self.env = policy, env
        self._known: dict[tuple[str, str], Positions] = {}  # by the game's name, and OpenSpiel's text of the variant

    def batch(self, tasks: Seq[Task], ppo: PPOConfig, ranks: Ranks) -> Batch:
        """All positions of the games of these tasks, and targets for the update.

        They are dealt out into ``ppo.batch_size`` units, so that minibatches have positions from everywhere.
        Weights are the policy's probabilities, so that statistics are means over positions of what it does there.
        ConfigError: a conversation does not fit into ``ppo.max_seq_length``.
        """
        ids: dict[tuple[str, str], int] = {}
        for task in sorted(tasks, key=lambda task: task.task_id):
            found = table(task.task_id)
            ids[found.game.name, str(found.spiel)] = task.task_id
        games = {key: self._positions(key, task_id) for key, task_id in ids.items()}
        sequences = [sequence for found in games.values() for sequence in found.sequences]
        read = ranks.score(self.policy, sequences)
        pull_M = torch.zeros_like(read.logprobs)
        if ppo.magnet_coef and self.policy.average:
            pull_M = read.logprobs - ranks.score(self.policy, sequences, adapter=self.policy.average).logprobs
        sizes = [len(found.sequences) for found in games.values()]
        parts = zip(ids.values(), games.values(), read.logprobs.split(sizes), strict=True)
        worth_M, mean_M = (torch.cat(column) for column in zip(*(_worth(*part) for part in parts), strict=True))
        aim_M = worth_M - ppo.entropy_coef * read.logprobs - ppo.magnet_coef * pull_M
        choices = [len(actions) for found in games.values() for actions in found.actions]
        targets = (read.logprobs + ppo.sweep * aim_M).split(choices)
        weights_M, device = read.logprobs.exp(), self.policy.device
        return Batch(
            sequences=sequences,
            unit=[n % ppo.batch_size for n, size in enumerate(choices) for _ in range(size)],
            old_logprobs_M=read.logprobs.to(device),
            values_M=read.values.to(device),
            advantages_M=torch.zeros_like(weights_M, device=device),  # the targets take the surrogate's place
            returns_M=mean_M.to(device),
            weights_M=weights_M.to(device),
            reward_mean=0.0,
            kl_ref=0.0,
            kl_average=float((weights_M * pull_M).sum() / weights_M.sum()),
            targets_M=torch.cat([part.log_softmax(0) for part in targets]).clamp(min=LEAST).to(device),
        )

    def _positions(self, game: tuple[str, str], task_id: int) -> Positions:
        if game not in self._known:
            infos = [i for i in exact.information_states(load_game(task_id)) if len(i.state.legal_actions(i.seat)) > 1]
            queries = [query_at(task_id, info.state, info.seat, self.env) for info in infos]
            sequences = [self._answered(query, action) for query in queries for action in query.legal]
            self._known[game] = Positions([i.key for i in infos], [[*query.legal] for query in queries], sequences)
        return self._known[game]

    def _answered(self, query: Query, action: int) -> Sequence:
        conversations, tokens = Conversations(self.policy.chat), self.policy.chat.answers_of(f"{action}{END}")
        turn = conversations.open(query, self.policy.max_seq_length, None)
        if turn is None:
            raise ConfigError(
                f"ppo.max_seq_length = {self.policy.max_seq_length}: a position is longer; ppo.sweep needs all"
            )
        conversations.write(turn, tokens, [0.0] * len(tokens))
        sequence = conversations.close(turn).sequence
        assert sequence is not None
        return sequence


def _worth(task_id: int, found: Positions, logprobs_M: Tensor) -> tuple[Tensor, Tensor]:
    """What each answer is worth to its seat, and all of its position in the mean (M), in [-1, 1] as 2 * score - 1."""
    game, probs = load_game(task_id), logprobs_M.exp().double()
    by_position = probs.split([len(actions) for actions in found.actions])
    table = exact.uniform_table(game)
    for key, actions, p in zip(found.keys, found.actions, by_position, strict=True):
        table[key] = dict(zip(actions, (p / p.sum()).tolist(), strict=True))
    values, worth, mean = exact.answer_values(game, table), list[float](), list[float]()
    for key, actions in zip(found.keys, found.actions, strict=True):
        worth += [values[key][a] for a in actions]
        mean += [sum(table[key][a] * values[key][a] for a in actions)] * len(actions)
    low, high = game.min_utility(), game.max_utility()
    worth_M, mean_M = ((2 * torch.tensor(x) - low - high) / (high - low) for x in (worth, mean))
    return worth_M, mean_M
