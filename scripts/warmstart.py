r"""Clone a teacher's answers into an adapter, for PPO to start from (``model.adapter``).

    python scripts/warmstart.py --config config/presets/leduc_selfplay.json --teacher cfr --output runs/warm
    python scripts/warmstart.py --config config/presets/tiny.json --set games=tic_tac_toe,leduc_poker \
        --teacher mcts:100x1 --episodes 500 --output runs/m
    python scripts/warmstart.py --config config/presets/trace_smol.json --episodes 3000 --epochs 1 \
        --batch 32 --learning-rate 1e-3 --output runs/trace-warm
    python train_ppo.py --config config/presets/leduc_selfplay.json --set model.adapter=runs/warm

A model that never answers legally, or never wins, learns nothing from rewards. The teacher plays the games of the
curriculum's stages through the same episode loop, prompts and tokens as training; the adapter learns to choose the
teacher's answers among the legal ones, and to answer legally without that constraint. PPO goes on from there; with
ppo.init_kl_coef above 0 it stays near. Teachers are opponents that search or solve: mcts (sees hidden cards), ismcts
(does not), cfr and cfr:ITERATIONS (near an equilibrium of small games that hide something), perfect (small games that
hide nothing). For programs (``env.env_type`` trace) the teacher is ``output``: what they print.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence as Seq
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # torch reads it when it is imported
if __name__ == "__main__":
    import config.start  # noqa: F401, before libraries load

import numpy as np
import torch

from config.flags import FlagParser, one_line
from config.reader import ConfigError, blaming, config_dict
from curriculum import Curriculum, CurriculumConfig, TaskRange, evaluated, pool
from env_wrapper import play
from envs.config import EnvConfig
from envs.openspiel import position, table, tables
from envs.opponents import RandomBot, make_bot, parse_opponent
from envs.trace import check_config
from envs.trace.env import expected_output
from envs.types import Action, Episode, Query, Sequence, Task
from evaluation.measure import GameResult, evaluate, result_table
from evaluation.players import WARM_START
from policy import Policy, load_policy
from policy.attention import in_fixed_order
from policy.chat import END, ChatFormat
from policy.conversations import Conversations
from policy.model import device_of, identity, load_tokenizer
from training.config import DEFAULT_FILES, load_sections, make_paths_absolute, narrowed
from training.console import Console
from training.memory import checkpoint_bytes, with_less_memory
from training.preflight import check_lora, exact_tasks, say_answers
from training.process import at_least, command, leave, must_be_writable, run_program
from utils import CheckpointError, in_threads, need_space, redact, uniform, write_directory, write_manifest

_MOVE, _EXPLORE = 201, 202  # first keys of random streams
GAMES_AT_ONCE = 256
OUTPUT = "output"  # the teacher for programs


def check_teacher(spec: str, ranges: Seq[TaskRange], env: EnvConfig) -> None:
    """Raise ConfigError, in one line, for a teacher that does not exist or cannot play one of the games."""
    if env.env_type == "trace":
        if spec != OUTPUT:
            raise ConfigError(f"--teacher {spec}: for programs it must be {OUTPUT}, what they print")
        return check_config(env, [first for first, _ in ranges])
    with blaming("--teacher: "):
        teacher = parse_opponent(spec)
    if not (teacher.searches or teacher.solves):
        raise ConfigError(f"--teacher {spec}: does not search; allowed are mcts, ismcts, cfr and perfect")
    for shared in tables(ranges):
        with blaming("--teacher: "):
            bot = make_bot(shared.game, shared.spiel, teacher, 0, 0)
        if isinstance(bot, RandomBot):
            raise ConfigError(f"--teacher {spec}: cannot search {shared.game.name}; name others with --set games=...")


class Teacher:
    """A player that answers as a bot does, or with what a program prints, in the policy's own conversations and tokens.

    With probability ``explore`` it plays a random move instead, which is not learnt from: the adapter must also see
    positions that the teacher would not reach.
    """

    def __init__(self, policy: Policy, tasks: Seq[Task], spec: str, seed: int, explore: float, env: EnvConfig) -> None:
        self.policy, self.conversations, self.env = policy, Conversations(policy.chat), env
        self.tasks, self.spec, self.seed, self.explore = tasks, spec, seed, explore
        self.release = self.conversations.release

    def act(self, queries: Seq[Query]) -> list[Action]:
        """Answer each query."""
        answers = in_threads(self._answer, queries, os.cpu_count())
        return [self._write(query, *answer) for query, answer in zip(queries, answers, strict=True)]

    def _answer(self, query: Query) -> tuple[str, bool]:
        """The answer to give, and whether it is the teacher's."""
        task, legal, u = self.tasks[query.episode], list(query.legal), uniform(self.seed, _MOVE, *query.rng_key)
        if not legal:
            return expected_output(self.env, task), True
        if uniform(self.seed, _EXPLORE, *query.rng_key) < self.explore:
            return str(legal[int(u * len(legal))]), False
        state, shared = position(task.task_id, query.history), table(task.task_id)
        bot = make_bot(shared.game, shared.spiel, parse_opponent(self.spec), query.seat, int(u * 2**31))
        return str(bot.step(state)), True

    def _write(self, query: Query, text: str, learn: bool) -> Action:
        chat, limit = self.policy.chat, None if query.legal else self.policy.max_new_tokens
        tokens = chat.answers_of(text + END) if query.legal else list(chat.encode(text))
        turn = self.conversations.open(query, self.policy.max_seq_length, limit)
        if turn is None or (limit is not None and len(tokens) > limit):
            return Action("", truncated=True)
        if limit is not None and len(tokens) < limit:
            tokens.append(chat.end_id)
        self.conversations.write(turn, tokens, [0.0] * len(tokens))
        return self.conversations.close(turn, learn=learn)


def clone(policy: Policy, sequences: list[Sequence], config: SimpleNamespace, args: argparse.Namespace) -> None:
    """Maximise the log-probability of the teacher's answers among the legal ones, and that of answering legally.

    Free answers have no legal ones: theirs is the log-probability over the whole vocabulary. RuinedWeightsError: the
    weights no longer give finite numbers.
    """
    rng = np.random.default_rng(config.run.seed)
    orders = [rng.permutation(len(sequences)) for _ in range(args.epochs)]
    batches = [order[i : i + args.batch] for order in orders for i in range(0, len(order), args.batch)]
    parameters = [p for name, p in policy.trainable().items() if not name.startswith("value_head.")]
    rate, total = args.learning_rate or config.ppo.learning_rate, len(batches)
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total)
    policy.forget()  # frees the keys and values that the evaluation cached
    with closing(Console(total)) as console:
        for step, picked in enumerate(batches, 1):
            batch = [sequences[i] for i in picked]
            with in_fixed_order(policy.device):
                unlikely, mass = with_less_memory(policy, optimizer, partial(_backward, policy, batch, args.legal_mass))
            torch.nn.utils.clip_grad_norm_(parameters, config.ppo.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            if step % max(1, total // 20) == 0:
                legal = f" | legal mass {mass:.3f}" if policy.constrained else ""
                console.update(step, f"Update {step}/{total} | -log p of the teacher's answer {unlikely:.3f}{legal}")
    policy.forget()
    policy.check()


def _backward(policy: Policy, batch: list[Sequence], legal_weight: float) -> tuple[float, float]:
    """Accumulate the gradient of some sequences; return the mean -log p of their answers and mean legal mass."""
    count, unlikely, mass = sum(len(s.decisions) for s in batch), 0.0, 0.0
    for micro in policy.micro_batches(batch):
        part = [batch[i] for i in micro]
        read = policy.evaluate_batch(part, entropy_grad=False, legal_mass=policy.constrained)
        loss = -read.logprobs.sum() / count
        unlikely += float(loss.detach())
        if read.legal_mass is not None:
            mass += float(read.legal_mass.detach().exp().sum()) / count
            loss = loss - legal_weight * read.legal_mass.sum() / count
        loss.backward()
    return unlikely, mass


def parse_args(argv: Seq[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", action="append", default=[], metavar="FILE", help="as for train_ppo.py")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="as for train_ppo.py")
    add("--teacher", help="for games an opponent that searches, or cfr, cfr:ITERATIONS, perfect (default mcts); "
        "for programs output")  # fmt: skip
    add("--episodes", type=at_least(1, 2**20), default=2048, help="of the teacher, in all stages (default 2048)")
    add("--explore", type=float, help="share of a game's moves played at random (default 0.2)")
    add("--epochs", type=at_least(1, 1000), default=4, help="default %(default)s")
    add("--batch", type=at_least(1), default=64, help="sequences an optimizer step (default %(default)s)")
    add("--legal-mass", type=at_least(0.0),
        help="weight of answering legally in games (default 1.0); 0 where answers stay constrained")  # fmt: skip
    add("--learning-rate", type=at_least(1e-12), default=None, help="falls linearly to 0; default: ppo.learning_rate")
    add("--output", "--output-dir", required=True, metavar="DIR", help="where the adapter is written")
    args = parser.parse_args(argv)
    if args.explore is not None and not 0 <= args.explore < 1:
        parser.error(f"--explore {args.explore:g}: expected a number >= 0 and < 1")
    with blaming(f"--output {args.output}: ", OSError, parser.error), suppress(FileNotFoundError):
        Path(args.output).lstat()  # fails for a name that is too long, say
        parser.error(f"--output {args.output}: is there already")
    return args


def _measure(policy: Policy, config: SimpleNamespace, tasks: list[TaskRange]) -> list[GameResult]:
    exactly, games = exact_tasks(config, policy.chat), config.ppo.eval_games
    with closing(Console(1)) as console:  # also after an interrupt: its picture hides the terminal's cursor
        return evaluate(policy, config.env, tasks, games, exact_tasks=exactly, progress=console.progress)


def _tasks(curriculum: CurriculumConfig, seed: int, count: int) -> list[Task]:
    """Tasks of all stages in turn; not those of a run, whose numbers are 0 and up: it would meet what it was taught."""
    stages = [Curriculum(replace(curriculum, stages=[stage]), seed) for stage in curriculum.stages]
    return [stages[i % len(stages)].next(-1 - i) for i in range(count)]


def _settle(args: argparse.Namespace, env: EnvConfig) -> None:
    """Fill in the flags that are of games alone; ConfigError where one of them, or the answers, would not count."""
    trace = env.env_type == "trace"
    if trace and (args.explore is not None or args.legal_mass is not None):
        raise ConfigError("--explore and --legal-mass: of games; leave them out with programs")
    what, expected = ("programs", "free") if trace else ("games", "constrained")
    if env.answer_mode != expected:
        raise ConfigError(f'env.answer_mode = "{env.answer_mode}": expected "{expected}" with {what}')
    args.explore = (0.0 if trace else 0.2) if args.explore is None else args.explore
    args.legal_mass = (0.0 if trace else 1.0) if args.legal_mass is None else args.legal_mass


def _report(spec: str, explore: float, episodes: Seq[Episode], answers: int) -> None:
    """Print how the teacher played; ConfigError where it made no decision to learn from."""
    ended = [e for e in episodes if e.outcome == "finished"]
    if lost := [e for e in episodes if e.outcome == "failed"]:
        print(f"{len(lost)} of {len(episodes)} games failed; the first: {one_line(redact(lost[0].info['error']))}")
    score = np.mean([e.score for e in ended]) if ended else math.nan
    at_random = f", {explore:.0%} of its moves at random," if explore else ""
    print(f"{spec}{at_random} played {len(ended)} games to their end, mean score {score:.3f}: {answers} to learn")
    cut = sum(e.outcome == "truncated" for e in episodes)
    told = f"{cut} of {len(episodes)} games were cut off: longer than ppo.max_seq_length or ppo.max_new_tokens"
    if not answers:
        raise ConfigError(told if cut else "--episodes: the teacher had nothing to decide")
    if cut:
        print(told)


def run(args: argparse.Namespace) -> None:
    """Evaluate, let the teacher play, learn from it, write the adapter, evaluate again; ConfigError in one line."""
    make_paths_absolute(config := load_sections([*DEFAULT_FILES, *args.config], args.set))
    if config.env.env_mode != "local":
        raise ConfigError(f'env.env_mode = "{config.env.env_mode}": expected "local": teachers play here')
    config.curriculum, trace = narrowed(config.curriculum, config.env), config.env.env_type == "trace"
    spec = args.teacher or (OUTPUT if trace else "mcts")
    _settle(args, config.env)
    shown_tasks = evaluated(config.curriculum, config.env.env_type)
    games = pool([item for stage in config.curriculum.stages for item in stage.games]).values()
    check_lora(config)
    check_teacher(spec, [(t, t) for t, _ in shown_tasks] if trace else [*chain(*games)], config.env)
    device_of(config.model)
    must_be_writable(Path(args.output).absolute().parent)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    say_answers(config, ChatFormat(load_tokenizer(config.model)))  # refuses programs whose output cannot be an answer
    policy = load_policy(config)
    with blaming("--output ", CheckpointError):
        need_space(Path(args.output), checkpoint_bytes(0, sum(p.numel() for p in policy.trainable().values())))
    before = _measure(policy, config, shown_tasks)
    seed, shown = config.run.seed, redact(config_dict(vars(config)), words=False)
    tasks = _tasks(config.curriculum, seed, args.episodes)
    episodes: list[Episode] = []
    teacher = Teacher(policy, tasks, spec, seed, args.explore, config.env)
    with closing(Console(len(tasks))) as console:
        for start in range(0, len(tasks), GAMES_AT_ONCE):
            together = tasks[start : start + GAMES_AT_ONCE]
            episodes += play(replace(config.env, games_at_once=0), teacher, together, start)
            console.update(len(episodes), f"{spec}: {len(episodes)}/{len(tasks)} games played")
    sequences = [s for e in episodes for seat in e.sequences.values() for s in seat if s.decisions]
    _report(spec, args.explore, episodes, sum(len(s.decisions) for s in sequences))
    clone(policy, sequences, config, args)

    def fill(folder: Path) -> None:
        policy.save(folder)
        (folder / "run_config.json").write_text(json.dumps(shown, indent=1))  # for evaluate.py
        (folder / WARM_START).write_text(json.dumps({"teacher": spec, "episodes": len(episodes)}))  # for model cards
        write_manifest(folder, 0, identity(config.model, policy.base, policy.tokenizer))

    output = _free(args.output)
    write_directory(Path(output).resolve(), fill)  # before the evaluation, which may fail
    print(f"adapter: {output}\ngo on:   {command('train_ppo.py', '...', f'--set=model.adapter={output}')}", flush=True)
    after = _measure(policy, config, shown_tasks)
    print("\n" + result_table([r.row for r in before], after)[0])


def _free(name: str) -> str:
    """The name, or the first free one of ``name-2``, ... where another program has taken it meanwhile."""
    return next(n for n in [name, *(f"{Path(name)}-{i}" for i in range(2, 1000))] if not Path(n).exists())


def main(argv: Seq[str] | None = None) -> int:
    """Run the program; exit codes: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted."""
    args = parse_args(argv)
    return run_program(lambda: run(args))


if __name__ == "__main__":
    leave(main())
