"""Clone the moves of a strong bot into an adapter, for PPO to start from (``model.adapter``).

    python scripts/warmstart.py --config config/presets/leduc_selfplay.json --teacher cfr --output runs/warm
    python train_ppo.py --config config/presets/leduc_selfplay.json --set model.adapter=runs/warm

A model that never answers legally, or never wins, learns nothing from rewards. The teacher plays the games of the
curriculum's stages through the same episode loop, prompts and tokens as training; the adapter learns to give its
answers among the legal ones, and to answer legally without that constraint. PPO then has the warm start as its
reference. Teachers: the searches that can be opponents (mcts sees hidden cards, ismcts does not), cfr[:ITERATIONS] (an
approximate equilibrium, for small two-player poker and dice).
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from chat import answer_trie
from curriculum import Curriculum
from env_wrapper import Action, Decision, Episode, Message, Query, Sequence, Task, play
from envs.opponents import RandomBot, make_bot, parse_opponent
from evaluation import evaluate, first_tasks, result_table
from model import device_of
from options import DEFAULT_FILES, SECTIONS, narrowed
from policy import Policy, load_policy
from runlog import Console
from utils import ConfigError, config_dict, load_config, uniform, write_directory

ROOT = Path(__file__).resolve().parents[1]
_MOVE, _EXPLORE = 201, 202  # first keys of random streams
CFR_ITERATIONS = 100
GAMES_AT_ONCE = 256


def _state(query: Query, task: Task) -> Any:
    """The game's position at a query."""
    from envs.openspiel import load_game

    state, history = load_game(task.task_id).new_initial_state(), list(query.history)
    while history:
        if state.is_simultaneous_node():
            together = state.num_players()
            state.apply_actions([action for _, action in history[:together]])
            history = history[together:]
        else:
            state.apply_action(history.pop(0)[1])
    return state


@functools.cache
def _equilibrium(game: str, iterations: int) -> Any:
    """The average policy of CFR+ (https://arxiv.org/abs/1407.5042) by OpenSpiel."""
    import pyspiel

    solver = pyspiel.CFRPlusSolver(pyspiel.load_game(game))
    for _ in range(iterations):
        solver.evaluate_and_update_policy()
    return solver.tabular_average_policy()


def check_teacher(spec: str, task_ids: Seq[int]) -> None:
    """Refuse a teacher that does not exist or cannot play one of the games.

    Raises:
        ConfigError: one line.
    """
    from envs import exact
    from envs.openspiel import table

    if not re.fullmatch(r"cfr(:[1-9]\d*)?", spec):
        try:
            searches = parse_opponent(spec).searches
        except ValueError as error:
            raise ConfigError(f"--teacher: {error}; or cfr, cfr:ITERATIONS") from error
        if not searches:
            raise ConfigError(f"--teacher {spec}: does not search; allowed are mcts, ismcts and cfr")
    for task_id in task_ids:
        shared = table(task_id)
        kind = shared.spiel.get_type()
        if spec.startswith("cfr"):
            able = (
                exact.feasible(shared.spiel)
                and "SEQUENTIAL" in str(kind.dynamics)
                and "IMPERFECT" in str(kind.information)
            )
        else:
            able = not isinstance(make_bot(shared.game, shared.spiel, parse_opponent(spec), 0, 0), RandomBot)
        if not able:
            raise ConfigError(f"--teacher {spec}: cannot play {shared.game.name}; name others with curriculum.stages")


class Teacher:
    """A player whose answers are a bot's, written down as the policy's own would be.

    With probability ``explore`` a random move is played instead, which is not learnt from: the adapter must know
    what to do after moves that the teacher would not make.
    """

    def __init__(self, policy: Policy, tasks: Seq[Task], spec: str, seed: int, explore: float, threads: int) -> None:
        self.chat, self.limit = policy.chat, policy.max_seq_length
        self.tasks, self.spec, self.seed, self.explore = tasks, spec, seed, explore
        self.pool = ThreadPoolExecutor(threads or None)
        self.sessions: dict[tuple[int, int], tuple[list[Message], Sequence]] = {}

    def act(self, queries: Seq[Query]) -> list[Action]:
        """Answer each query."""
        return [self._write(q, *move) for q, move in zip(queries, self.pool.map(self._move, queries), strict=True)]

    def release(self, episodes: Seq[int]) -> None:
        """Forget the conversations of finished episodes."""
        for key in [key for key in self.sessions if key[0] in set(episodes)]:
            del self.sessions[key]

    def _move(self, query: Query) -> tuple[int, bool]:
        """The move to play, and whether it is the teacher's."""
        legal, u = list(query.legal), uniform(self.seed, _MOVE, *query.rng_key)
        if uniform(self.seed, _EXPLORE, *query.rng_key) < self.explore:
            return legal[int(u * len(legal))], False
        from envs.openspiel import table

        task = self.tasks[query.episode]
        state, shared = _state(query, task), table(task.task_id)
        if self.spec.startswith("cfr"):
            policy = _equilibrium(str(shared.spiel), int(self.spec.partition(":")[2] or CFR_ITERATIONS))
            probs = policy.action_probabilities(state)
            sums = np.cumsum([probs.get(action, 0.0) for action in legal])
            return legal[min(int(np.searchsorted(sums, u * sums[-1], side="right")), len(legal) - 1)], True
        return make_bot(shared.game, shared.spiel, parse_opponent(self.spec), query.seat, int(u * 2**31)).step(
            state
        ), True

    def _write(self, query: Query, move: int, learn: bool) -> Action:
        messages, known = self.sessions.pop((query.episode, query.seat), ([], Sequence([])))
        sequence, prompt = self.chat.extend(query.conversation, messages, known)
        tokens, start = self.chat.answer_tokens(str(move)), len(sequence.ids) + len(prompt)
        if start + len(tokens) > self.limit:
            return Action("", truncated=True)
        sequence.ids += [*prompt, *tokens]
        _, choices = self.chat.legal_answer(answer_trie(tuple(query.legal)), tokens)
        if learn:
            at, chosen = [start + i - 1 for i in choices], [tokens[i] for i in choices]
            sequence.decisions.append(Decision(start, len(sequence.ids), at, chosen, list(choices.values())))
        if query.continues:
            answer = {"role": "assistant", "content": str(move)}
            self.sessions[query.episode, query.seat] = ([*query.conversation, answer], sequence)
        return Action(str(move), tokens, sequence=sequence)


def minibatches(sequences: list[Sequence], size: int, epochs: int, seed: int) -> Iterator[list[Sequence]]:
    """The sequences in another order each epoch, cut into optimizer steps."""
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(sequences)).tolist()
        for i in range(0, len(order), size):
            yield [sequences[j] for j in order[i : i + size]]


def clone(policy: Policy, sequences: list[Sequence], config: SimpleNamespace, args: argparse.Namespace) -> None:
    """Maximise the log-probability of the teacher's answers: among the legal ones, and of being legal at all."""
    parameters = [p for name, p in policy.trainable().items() if not name.startswith("value_head.")]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate or config.ppo.learning_rate, weight_decay=0.0)
    total, started = args.epochs * -(-len(sequences) // args.batch), time.perf_counter()
    for step, batch in enumerate(minibatches(sequences, args.batch, args.epochs, config.run.seed), 1):
        optimizer.param_groups[0]["lr"] = (args.learning_rate or config.ppo.learning_rate) * (1 - (step - 1) / total)
        count = sum(len(s.decisions) for s in batch)
        sums = torch.zeros(2)
        for micro in policy.micro_batches(batch):
            part = [batch[i] for i in micro]
            answers = policy.evaluate_decisions(part).logprobs.sum()
            with torch.set_grad_enabled(args.legal_mass > 0):
                legal = policy.log_legal_mass(part).sum()
            (-(answers + args.legal_mass * legal if args.legal_mass else answers) / count).backward()
            sums += torch.tensor([float(answers.detach()), float(legal.detach())]) / count
        torch.nn.utils.clip_grad_norm_(parameters, config.ppo.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, total // 20) == 0:
            pace = (time.perf_counter() - started) / step
            print(f"Update {step}/{total} | -log p of the teacher's answer {-sums[0]:.3f} | legal mass "
                  f"{sums[1].exp():.3f} | ETA {int(pace * (total - step))}s", flush=True)  # fmt: skip
    policy.weights_changed()


def parse_args(argv: Seq[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", action="append", default=[], metavar="FILE", help="as for train_ppo.py")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="as for train_ppo.py")
    add("--teacher", default="mcts", help="a search as of any opponent, or cfr, cfr:ITERATIONS")
    add("--games", type=int, default=2048, help="that the teacher plays, over all games of the stages")
    add("--explore", type=float, default=0.2, help="share of moves played at random, to see more positions")
    add("--epochs", type=int, default=4)
    add("--batch", type=int, default=64, help="sequences an optimizer step")
    add("--legal-mass", type=float, default=1.0, help="weight of being legal at all; 0 where answers stay constrained")
    add("--learning-rate", type=float, default=None, help="falls linearly to 0; default: ppo.learning_rate")
    add("--output", required=True, metavar="DIR", help="where the adapter is written")
    args = parser.parse_args(argv)
    for name, least in (("games", 1), ("epochs", 1), ("batch", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: expected an integer >= {least}")
    if not 0 <= args.legal_mass < float("inf"):
        parser.error(f"--legal-mass {args.legal_mass:g}: expected a number >= 0")
    if not 0 <= args.explore < 1:
        parser.error(f"--explore {args.explore:g}: expected a number >= 0 and < 1")
    if Path(args.output).exists():
        parser.error(f"--output {args.output}: is there already")
    return args


def run(args: argparse.Namespace) -> None:
    """Play, learn, evaluate before and after, write the adapter.

    Raises:
        ConfigError: one line.
    """
    config = SimpleNamespace(**load_config(SECTIONS, [*(ROOT / f for f in DEFAULT_FILES), *args.config], args.set))
    if config.env.env_type != "openspiel" or config.env.env_mode != "local":
        raise ConfigError("env.env_type, env.env_mode: teachers play local openspiel games only")
    config.curriculum = narrowed(config.curriculum, config.env)
    config.env = replace(config.env, answer_mode="constrained")
    tasks_shown = first_tasks(config.curriculum)
    check_teacher(args.teacher, tasks_shown)
    device_of(config.model)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    policy = load_policy(config)
    before = evaluate(policy, config.env, tasks_shown, config.ppo.eval_games)
    curriculum = Curriculum(config.curriculum, config.run.seed)
    tasks = [curriculum.next(i) for i in range(args.games)]
    started = time.perf_counter()
    episodes: list[Episode] = []
    console = Console(len(tasks))
    for start in range(0, len(tasks), GAMES_AT_ONCE):
        part = tasks[start : start + GAMES_AT_ONCE]
        teacher = Teacher(policy, part, args.teacher, config.run.seed, args.explore, config.env.search_threads)
        episodes += play(replace(config.env, games_at_once=0), teacher, part)
        console.update(len(episodes), f"{args.teacher}: {len(episodes)}/{len(tasks)} games played")
    console.close()
    sequences = [s for e in episodes for seat in e.sequences.values() for s in seat if s.decisions]
    answers, score = sum(len(s.decisions) for s in sequences), np.mean([e.score for e in episodes])
    seconds = time.perf_counter() - started
    print(f"{args.teacher} played {len(episodes)} games in {seconds:.0f} s, mean score {score:.3f}: {answers} to learn")
    if not sequences:
        raise ConfigError("--games: the teacher had nothing to decide")
    clone(policy, sequences, config, args)
    after = evaluate(policy, config.env, tasks_shown, config.ppo.eval_games)
    print("\n" + result_table([vars(r) | {"share": r.share} for r in before], after)[0])

    def fill(folder: Path) -> None:
        policy.save(folder)
        (folder / "run_config.json").write_text(json.dumps(config_dict(vars(config)), indent=1))  # for evaluate.py

    write_directory(Path(args.output).resolve(), fill)
    print(f"\nadapter: {args.output}\ngo on:   python train_ppo.py ... --set model.adapter={args.output}")


def main(argv: Seq[str] | None = None) -> int:
    """Run the program; exit codes: 0 done, 2 bad usage or configuration."""
    args = parse_args(argv)
    try:
        run(args)
        return 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
