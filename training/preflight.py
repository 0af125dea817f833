"""Checks before a run starts, and what it would take: parameters, prompts, evaluation, memory, search. No weights.

Numbers of parameters and bytes of weights are exact, tokens are counted in a few random games; other memory and the
time of searches are estimates (docs/results.md, "Memory estimates").
"""

import contextlib
import dataclasses
import json
import logging
import os
import shlex
import time
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tabulate import tabulate
from torch.nn.functional import linear

from config.reader import ConfigError, blaming, config_dict, load_config, make, printable, read_json
from curriculum import Curriculum, CurriculumConfig, eval_tasks, evaluated, first_tasks, pool
from envs import exact
from envs.affinetes import check_server
from envs.config import EnvConfig
from envs.openspiel import ATTEMPTS, load_game, position, query_at, table, tables, unknown_prompts
from envs.opponents import RandomBot, make_bot, parse_opponent
from envs.prompts import RETRY
from envs.trace.env import TASKS_PER_LEVEL, check_config, expected_output
from envs.trace.programs import LEVELS
from envs.trace.sandbox import SandboxError
from envs.types import Episode, Task
from games import CONFIGS_PER_GAME, GAMES
from policy.chat import ChatFormat, answer_trie
from policy.model import LoraConfig, check_adapter, device_of, ends_of, load_architecture, load_tokenizer
from policy.state_head import StateHead
from policy.vllm_server import check_servers
from training import memory
from training.config import DEFAULT_FILES, SECTIONS, check_sections
from training.console import duration
from training.folder import find_checkpoint
from training.memory import GB, Parameters, checkpoint_bytes, count_parameters
from training.positions import state_shapes
from training.sweep import check_sweep
from training.token_counts import Prompts, count_tokens, evaluation_work
from utils import CheckpointError, load_checkpoint, need_space, redact

log = logging.getLogger(__name__)
SEARCH_SECONDS = 0.02  # least time to measure a search for, unless all of its simulations take less
EXACT_OPERATIONS = 3e13  # most for a game's exact values, with eval_exact auto: minutes of a CPU, a second of a GPU
MAX_CUT = 0.05  # share of a level's programs that may print more than an answer can hold
MAX_UNKNOWN = 0.2  # share of a level's programs that may exceed a limit of the sandbox: their episodes fail
ANSWER_SAMPLE = 100  # programs of each level whose output is measured
EXACT_SAMPLE = 64  # information states whose tokens are counted, of each game


# --------------------------------------------------------------------------------------------------------- prompts


def measure_prompts(config: SimpleNamespace, chat: ChatFormat, peek: bool = False) -> dict[int, Prompts]:
    """Game index -> token counts of four random games (``peek``: of their first prompts only).

    ConfigError: ``ppo.max_seq_length`` cannot hold a first prompt and answer, a game failed, or a bot cannot play it.
    """
    if config.env.env_type == "openspiel" and config.env.env_mode == "local":
        check_opponents(config.curriculum)
    everything = [item for stage in config.curriculum.stages for item in stage.games]
    opponent = "self" if "self" in config.curriculum.opponents else "random"
    tasks: dict[int, list[Task]] = defaultdict(list)
    for task in eval_tasks(everything, 2, config.run.seed, opponent):
        tasks[task.task_id // CONFIGS_PER_GAME].append(task)
    measured = {index: count_tokens(config, chat, tasks[index], peek) for index in tasks}
    if config.env.env_type == "openspiel" and config.env.env_mode != "local":  # only a server knows its opponents
        try_opponents(config, chat, opponent)
    needed, game = max((max(p.first, default=0) + p.answer, p.game) for p in measured.values())
    if needed > config.ppo.max_seq_length:
        others = "games in curriculum.stages" if config.env.env_type == "openspiel" else "programs"
        raise ConfigError(
            f"ppo.max_seq_length = {config.ppo.max_seq_length}: the first prompt and answer of {game} take {needed} "
            f"tokens; expected at least {needed}, a shorter env.prompt, or other {others}"
        )
    again = chat.later([{"role": "user", "content": RETRY.format(attempt=1, attempts=ATTEMPTS)}])
    retried = needed + (ATTEMPTS - 1) * (1 + len(again) + config.ppo.max_new_tokens)  # 1: the end of an answer
    free = config.env.env_type == "openspiel" and config.env.answer_mode == "free"
    if free and retried > config.ppo.max_seq_length:
        log.warning("ppo.max_seq_length = %d: the %d answers that %s allows to a decision may take %d tokens; games "
                    "that are cut off have no result", config.ppo.max_seq_length, ATTEMPTS, game, retried)  # fmt: skip
    return measured


def check_opponents(curriculum: CurriculumConfig) -> None:
    """Raise ConfigError if a bot of a stage cannot play one of its games. ``cfr`` needs only one iteration for that."""
    for stage in curriculum.stages:
        specs = [parse_opponent(name) for name in stage.mixture if name != "past"]
        played_on = tables(part for ranges in pool(stage.games).values() for part in ranges)
        for spec, played in product(specs, played_on):
            with blaming(f"curriculum.stages: stage {stage.name!r}: "):
                make_bot(played.game, played.spiel, replace(spec, iterations=1), seat=0, seed=0)


def try_opponents(config: SimpleNamespace, chat: ChatFormat, tried: str) -> None:
    """Begin a game against each opponent but ``tried`` in each game of its stages; ConfigError if one cannot be."""
    begun = {
        (name, task.task_id // CONFIGS_PER_GAME): task
        for stage in config.curriculum.stages
        for name in stage.mixture
        for task in eval_tasks(stage.games, 1, config.run.seed, name)[::2]  # of the two seats
    }
    for task in (task for (name, _), task in begun.items() if name != tried):
        count_tokens(config, chat, [task], peek=True)


def check_disk(config: SimpleNamespace, parameters: Parameters) -> None:
    """Raise ConfigError if the disk has no room for a run's checkpoints, one being written and the final adapter."""
    run_dir, kept = Path(config.run.output_dir), min(config.run.keep_last, config.ppo.num_train_steps + 1) + 3
    size = checkpoint_bytes(parameters.trainable, parameters.adapter * memory.frozen_adapters(config))
    folders = (max(2, 1 + config.env.max_staleness) + 1) * config.env.use_vllm  # still in use, and one being written
    served = folders * (4 * parameters.adapter + memory.TOKENIZER_BYTES)
    with blaming("run.output_dir: ", CheckpointError):
        need_space(run_dir, (2 if any(run_dir.glob("checkpoint-*")) else kept) * size + served)


def check_card(config: SimpleNamespace, parameters: Parameters) -> None:
    """Raise ConfigError if the GPU has no room for a run's permanent parts, before any of them is downloaded."""
    if device_of(config.model) != "cuda":
        return
    free, total = torch.cuda.mem_get_info()
    needed = sum(memory.held(config, parameters).values())
    if needed > free:
        others = f"of which other programs hold {(total - free) / GB:.1f}" if needed < total else "which are too few"
        raise ConfigError(
            f"model.model_name: {config.model.model_name} takes {needed / GB:.1f} GB before its first game, and "
            f"{torch.cuda.get_device_name()} has {total / GB:.1f} GB, {others}; --dry-run says what takes how much"
        )


def check_lora(config: SimpleNamespace, resume: str | None = None) -> None:
    """Raise ConfigError if the checkpoint ``resume``, or ``model.adapter``, a folder, was made with another ``lora``.

    That of ``model.adapter`` would be trained instead. A resumed run trains it already, so it is only warned.
    """
    if resume and config.model.adapter is None:
        differ = [line for line in _other_lora(config, resume) if not line.startswith("lora.lora_alpha")]
        if differ:  # in more than alpha, which changes no shape
            raise ConfigError(f"{'; '.join(differ)}; expected the same")
    if config.model.adapter is None or not Path(os.path.expanduser(config.model.adapter)).is_dir():
        return
    with blaming("model.adapter: ", ConfigError):
        differ = _other_lora(config, config.model.adapter)
    if differ and not resume:
        raise ConfigError(f"{'; '.join(differ)}; expected the same")
    for line in differ:
        log.warning("%s, which is trained", line)


def _other_lora(config: SimpleNamespace, adapter: str) -> list[str]:
    """A line for each key in which ``lora`` differs from that of the adapter in a folder."""
    made, differ = read_json(Path(os.path.expanduser(adapter)) / "adapter_config.json"), []
    if not isinstance(made, dict):
        return []
    for key, value in dataclasses.asdict(config.lora).items():
        held = made.get(key, value)
        try:
            theirs = getattr(make(LoraConfig, {key: held}, "lora"), key)
        except ConfigError:  # the section cannot express it: patterns, say, or single layers, which PEFT accepts too
            continue
        if (sorted(theirs) != sorted(value)) if key == "target_modules" else theirs != value:
            differ.append(f"lora.{key} = {json.dumps(value)}: {adapter} was made with {json.dumps(held)}")
    return differ


def look(config: SimpleNamespace) -> tuple[Any, Parameters, ChatFormat]:
    """The base's architecture, parameters and chat format.

    ConfigError: it cannot read ``ppo.max_seq_length`` tokens, or the disk is too small for its checkpoints.
    """
    architecture = load_architecture(config.model)  # first, since it reports a folder that is missing
    most = architecture.max_position_embeddings
    if config.ppo.max_seq_length > most:
        raise ConfigError(f"ppo.max_seq_length = {config.ppo.max_seq_length}: {config.model.model_name} reads {most} "
                          "tokens at most")  # fmt: skip
    parameters = count_parameters(config.lora, architecture)
    if config.ppo.state_coef:
        if not (outputs := sum(map(sum, state_shapes(config.curriculum).values()))):
            raise ConfigError("ppo.state_coef: none of the games has a tensor of what a seat knows; expected 0")
        parameters = replace(parameters, state_head=(architecture.hidden_size + 1) * outputs)
    check_disk(config, parameters)
    return architecture, parameters, ChatFormat(load_tokenizer(config.model), ends_of(config.model))


def say_answers(config: SimpleNamespace, chat: ChatFormat) -> list[str]:
    """Lines on how much of the output of each level's programs fits an answer; none for games and servers.

    ConfigError: more than ``MAX_CUT`` of a level's programs print more than ``ppo.max_new_tokens``, or the output of
    more than ``MAX_UNKNOWN`` cannot be determined.
    """
    if config.env.env_type != "trace" or config.env.env_mode != "local":
        return []
    limit, lines = config.ppo.max_new_tokens, []
    for part in evaluated(config.curriculum, "trace"):
        level = part[0] // TASKS_PER_LEVEL
        tasks = eval_tasks([part], ANSWER_SAMPLE // 2, config.run.seed)
        outputs, unknown = [], []
        for task in tasks:
            try:
                outputs.append(expected_output(config.env, task))
            except (ValueError, SandboxError) as error:  # of this program alone
                unknown.append(error)
            if len(unknown) > MAX_UNKNOWN * len(tasks):  # each may take ten seconds
                tried = len(outputs) + len(unknown)
                raise ConfigError(f"env.trace: {len(unknown)} of {tried} programs have no answer; {unknown[0]}")
        sizes = sorted(len(chat.encode(text)) for text in outputs)
        needed = sizes[-1 - int(MAX_CUT * len(sizes))]
        name = f"level {level}" if config.env.trace.get("source", "generator") == "generator" else "programs"
        lines.append((name, sum(size <= limit for size in sizes) / len(sizes), needed, sizes[-1]))
    if short := [(needed, f"{name} ({share:.0%} fit)") for name, share, needed, _ in lines if share < 1 - MAX_CUT]:
        raise ConfigError(
            f"ppo.max_new_tokens = {limit}: too short for the output of {', '.join(name for _, name in short)}; "
            f"expected at least {max(short)[0]}, enough for {1 - MAX_CUT:.0%} of them, or other programs"
        )
    return [_aligned(lines, ("outputs, in tokens", "share that fits", f"{1 - MAX_CUT:.0%} have", "longest"), ".3f")]


# ------------------------------------------------------------------------------------------------------ evaluation


def exact_operations(task_id: int, env: EnvConfig, chat: ChatFormat, weights: int) -> float:
    """Most operations of a game's exact values: two per weight and token of each position, without the shared prefix.

    Positions that begin alike are read together, which leaves nine tenths (kuhn_poker) to a sixth of that. Infinite if
    the game is too large, or what it is asked in play is not known.
    """
    if not exact.feasible(load_game(task_id)) or unknown_prompts(task_id, env):
        return float("inf")
    states = exact.information_states(load_game(task_id))
    sample, tokens = states[:: len(states) // EXACT_SAMPLE + 1], 0
    for info in sample:
        query = query_at(task_id, info.state, info.seat, env)
        ids, shared = chat.first_prompt(query.conversation)
        choices = sum(len(follow) > 1 for follow in answer_trie(tuple(query.legal)).follow.values())
        tokens += choices * (len(ids) - shared)
    return 2 * weights * len(states) * tokens / len(sample)


def exact_tasks(config: SimpleNamespace, chat: ChatFormat) -> dict[int, float]:
    """The tasks of the evaluation whose exact values ``ppo.eval_exact`` asks for -> their operations.

    "auto" limits operations, not seconds, so that what is computed does not depend on the machine.
    """
    env, limit = config.env, {"auto": EXACT_OPERATIONS, "always": 1e99, "never": -1.0}[config.ppo.eval_exact]
    tasks, costs = first_tasks(config.curriculum, env.env_type), dict[int, float]()
    if (env.env_type, env.answer_mode, env.env_mode) == ("openspiel", "constrained", "local") and limit >= 0:
        weights = sum(count_parameters(config.lora, load_architecture(config.model)).linears)
        costs = {t: exact_operations(t, env, chat, weights) for t in tasks}
    found = {task: cost for task, cost in costs.items() if cost <= limit}
    if config.ppo.eval_exact == "always" and (left := [task for task in tasks if task not in found]):
        large = "too large, no zero-sum games of two, or asked with the turns before (env.history_turns)"
        why = large if costs else "they need games that are played here, with constrained answers"
        names = "programs" if env.env_type == "trace" else ", ".join(GAMES[t // CONFIGS_PER_GAME].name for t in left)
        log.warning("ppo.eval_exact = always: exact values of %s are left out: %s", names, why)
    return found


def _matmul_speed(config: SimpleNamespace, architecture: Any, rows: int) -> float:
    """Operations per second of multiplying ``rows`` rows by a matrix of the model's MLP; ConfigError if it cannot."""
    kind = {"dtype": getattr(torch, config.model.dtype), "device": device_of(config.model)}
    x_BD = torch.ones(rows, architecture.hidden_size, **kind)
    w_FD = torch.ones(architecture.intermediate_size, architecture.hidden_size, **kind)

    def seconds(columns: int) -> float:
        start = time.perf_counter()
        float(linear(x_BD, w_FD[:columns])[0, 0])
        return time.perf_counter() - start

    columns, best = 1, 0.0
    while best < 0.025 and columns < len(w_FD):  # a whole product takes minutes in bf16 on a CPU that lacks it
        columns = min(2 * columns, len(w_FD))
        best = min(seconds(columns) for _ in range(3))  # another program may hold up single ones
    return 2 * rows * columns * architecture.hidden_size / best


def say_evaluation(config: SimpleNamespace, chat: ChatFormat, parameters: Parameters, architecture: Any) -> list[str]:
    """What is evaluated before and after the run, and how long its matrix products take."""
    work, free = [evaluation_work(config, chat)], replace(config.env, answer_mode="free")
    exactly, played = exact_tasks(config, chat), first_tasks(config.curriculum, config.env.env_type)
    names = ", ".join(GAMES[task // CONFIGS_PER_GAME].name for task in exactly) or "no game"
    names += " (only here are all positions at hand)" * (config.env.env_mode != "local")
    full = " if each is legal and takes ppo.max_new_tokens"  # an answer that is illegal is asked for again
    lines = [f"evaluation, before and after: {config.ppo.eval_games} games of each of {len(played)}, about "
             f"{work[0][0]:.0f} forward passes and {work[0][1]:,.0f} tokens{full * (config.env.answer_mode == 'free')}"
             f"; exact values of {names} (ppo.eval_exact {config.ppo.eval_exact})"]  # fmt: skip
    if config.ppo.legal_mass_coef and config.env.answer_mode == "constrained":
        work.append(evaluation_work(SimpleNamespace(**vars(config) | {"env": free}), chat))
        lines.append(f"and as many games with free answers (ppo.legal_mass_coef > 0), about {work[1][0]:.0f} forward "
                     f"passes and {work[1][1]:,.0f} tokens{full}")  # fmt: skip
    with contextlib.suppress(ConfigError):  # of a missing device, which ``check`` reports
        speeds = [_matmul_speed(config, architecture, max(round(tokens / passes), 1)) for passes, tokens in work]
        products = sum(2 * sum(parameters.linears) * w[1] / speed for w, speed in zip(work, speeds, strict=True))
        seconds = products + sum(exactly.values()) / speeds[0]
        lines.append(f"its matrix products take {duration(seconds)} each time at this machine's speed, less where "
                     "positions begin alike")  # fmt: skip
    return lines


# ---------------------------------------------------------------------------------------------------------- search


def search_seconds(config: SimpleNamespace, measured: dict[int, Prompts]) -> dict[tuple[str, int], tuple[float, float]]:
    """(opponent, game index) -> CPU seconds of search per move and per game, from one move of each random game."""
    pairs = {(o, i) for stage in config.curriculum.stages for o in stage.mixture for i in pool(stage.games)}
    seconds = {}
    for opponent, index in sorted((o, i) for o, i in pairs if o != "past" and parse_opponent(o).searches):
        episodes = measured[index].episodes
        move = sum(_move_seconds(opponent, e, k / len(episodes)) for k, e in enumerate(episodes)) / len(episodes)
        seconds[opponent, index] = move, move * sum(len(_replies(e)) for e in episodes) / len(episodes)
    return seconds


def _replies(episode: Episode) -> list[int]:
    """Indices of the opponents' moves in the history."""
    others = (-1, episode.info["seat"])  # chance and the policy
    return [i for i, (player, _) in enumerate(episode.info["history"]) if player not in others]


def _move_seconds(opponent: str, episode: Episode, place: float) -> float:
    """CPU seconds of a move at the fraction ``place`` of a game, scaled up from fewer simulations; 0: no search."""
    shared, spec, replies = table(episode.task.task_id), parse_opponent(opponent), _replies(episode)
    limit, history = spec.budget_in(shared.game), episode.info["history"]
    if limit is None or not replies or isinstance(make_bot(shared.game, shared.spiel, spec, 0, 0), RandomBot):
        return 0.0
    now = replies[int(place * len(replies))]
    state, tried, elapsed = position(episode.task.task_id, history[:now]), (0, 1), 0.0
    while elapsed < SEARCH_SECONDS and (not tried[0] or 2 * tried[0] * tried[1] < limit[0] * limit[1]):
        more = 2 * tried[0] * tried[1] or 1  # first rollouts, then simulations
        tried = max(more // limit[1], 1), min(more, limit[1])
        bot = make_bot(shared.game, shared.spiel, replace(spec, budget=tried), history[now][0], 0)
        start = time.thread_time()
        bot.step(state)
        elapsed = time.thread_time() - start
    return elapsed * limit[0] * limit[1] / (tried[0] * tried[1])


# ------------------------------------------------------------------------------------------------------- the report


def check(
    config: SimpleNamespace, processes: int = 1, dry_run: bool = False, resume: str | None = None, force: bool = False
) -> None:
    """Raise ConfigError for what would stop the run early or make a game useless; ``dry_run``: also say what it takes.

    ``resume``, and ``force`` in a dry run, are as for ``find_checkpoint``.
    """
    for stage in config.curriculum.stages:
        if stage.gate not in (None, *stage.mixture):
            raise ConfigError(f"curriculum.stages: stage {stage.name!r}: gate_opponent {stage.gate!r} is not played "
                              f"in it: expected {', '.join(stage.mixture)}")  # fmt: skip
    if config.env.env_type == "trace":
        _check_programs(config)
    check_sections(config)
    check_sweep(config)
    if config.env.env_mode != "local":
        check_server(config.env)
    check_adapter(config.model)
    check_lora(config, resume)
    if config.curriculum.failure_replay_prob and not any(s.gate for s in config.curriculum.stages):
        log.warning("curriculum.failure_replay_prob: nothing is replayed, as no stage has an opponent that counts")
    if dry_run:
        _check_run_folder(config, resume, force)
        print("\n".join(map(printable, redact(describe(config)).split("\n"))))  # names of stages may be anything
        device_of(config.model)
    else:
        _, parameters, chat = look(config)
        check_card(config, parameters)
        measure_prompts(config, chat, peek=True)
        say_answers(config, chat)
    if config.env.use_vllm:
        check_servers(config, processes)


def _check_programs(config: SimpleNamespace) -> None:
    """Raise ConfigError for settings that do not suit programs."""
    if config.env.answer_mode != "free":
        raise ConfigError(f'env.answer_mode = "{config.env.answer_mode}": expected "free" with env_type trace')
    tasks, end = first_tasks(config.curriculum, "trace"), LEVELS * TASKS_PER_LEVEL
    local, generated = config.env.env_mode == "local", config.env.trace.get("source", "generator") == "generator"
    if local and tasks[-1] >= end:
        raise ConfigError(f"curriculum.stages: task {tasks[-1]} is of a game, not of a program: expected 0 to "
                          f"{end - 1}, as in config/trace_config.json")  # fmt: skip
    for stage in config.curriculum.stages:
        if {*stage.mixture} != {"random"}:
            raise ConfigError(f"curriculum.stages: stage {stage.name!r}: opponent: programs (env.env_type trace) have "
                              "none; expected random, or nothing")  # fmt: skip
    if local:
        check_config(config.env, tasks)
    if config.curriculum.sampling == "learnability":
        log.warning("curriculum.sampling = learnability: it chooses among games, and programs count as one")
    if local and not generated:
        log.warning("env.trace.source: what is evaluated before and after is drawn from the programs trained on; "
                    "evaluate.py --set env.trace.source=OTHERS measures others")  # fmt: skip


def _check_run_folder(config: SimpleNamespace, resume: str | None, force: bool) -> None:
    """Raise ConfigError for a folder that the run cannot start in or resume from, without changing anything in it."""
    folder = Path(config.run.output_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"run.output_dir: {existing} is no folder that can be written into")
    path = find_checkpoint(folder, resume, config_dict(vars(config)), force, look_only=True)
    if path is None:
        return
    with blaming("--resume: ", CheckpointError):  # even with --force-config, saved state must fit
        saved = load_checkpoint(path)
        Curriculum(config.curriculum, config.run.seed).load_state_dict(saved.json("curriculum"))
    if config.ppo.state_coef and "state_head.safetensors" not in saved.manifest["files"]:
        raise ConfigError(f"ppo.state_coef: {path} was trained without it; expected 0")
    if config.ppo.state_coef:
        head = StateHead(1, state_shapes(config.curriculum), torch.device("meta"))
        if head.state_dict().keys() != saved.tensors("state_head").keys():
            raise ConfigError(f"ppo.state_coef: {path} learnt positions of other games; expected the same games, or 0")


def describe(config: SimpleNamespace) -> str:
    """What ``--dry-run`` prints; ConfigError for what would stop the run early or make a game useless."""
    architecture, parameters, chat = look(config)
    here = SimpleNamespace(**vars(config))
    with contextlib.suppress(ConfigError):  # of a missing device, which ``check`` reports
        here.model = replace(config.model, device=device_of(config.model))
    measured = measure_prompts(here, chat)
    parts = memory.estimate(here, parameters, architecture, measured)
    state_head = f", state head {parameters.state_head:,}" if parameters.state_head else ""
    counts = (
        f"{parameters.trainable:,} trainable parameters (adapter {parameters.adapter:,}, value head "
        f"{parameters.value_head:,}{state_head}) of {parameters.total:,} in all"
    )
    local = config.env.env_mode == "local"  # else a server searches, at its own speed
    search = say_search(config, search_seconds(config, measured), os.cpu_count() or 1) if local else []
    evaluation = say_evaluation(here, chat, parameters, architecture)
    prompts = say_prompts(config, measured) + say_answers(config, chat)
    chapters = [say_settings(config), [counts], prompts, evaluation, _say_memory(here, parts), search]
    return "\n\n".join("\n".join(lines) for lines in chapters if lines)


def say_settings(config: SimpleNamespace) -> list[str]:
    """The settings that are not the defaults, as a shell takes them after ``--set``."""
    defaults = config_dict(load_config(SECTIONS, DEFAULT_FILES))
    settings = [" " + shlex.quote(f"{section}.{knob}={json.dumps(value, ensure_ascii=False)}")
                for section, knobs in config_dict(vars(config)).items()
                for knob, value in knobs.items() if value != defaults[section][knob]]  # fmt: skip
    return ["settings other than the defaults" if settings else "all settings are the defaults", *settings]


def say_prompts(config: SimpleNamespace, measured: dict[int, Prompts]) -> list[str]:
    """Tokens of each game's prompts, and the games that exceed the limit."""
    limit = config.ppo.max_seq_length
    lines = [(p.game, max(p.first), max(p.later, default=0), max(p.longest.values()), len(p.asked) / len(p.first))
             for p in measured.values() if p.first]  # fmt: skip
    cut = [f"{p.game} ({sum(n > limit for n in p.longest.values())} of {len(p.longest)})" for p in measured.values()
           if max(p.longest.values(), default=0) > limit]  # fmt: skip
    verdict = f"cuts off random games of {', '.join(cut)}; see env.history_turns" if cut else "holds every prompt"
    head = ("most tokens", "first prompt", "later turns", "longest", "decisions")
    return [_aligned(lines, head, ".1f"), f"ppo.max_seq_length {limit} {verdict}"]


def _aligned(lines: Seq[Seq[Any]], head: Seq[str], form: str) -> str:
    return tabulate(lines, head, tablefmt="plain", floatfmt=form, stralign="right", colalign=("left",))


def _say_memory(config: SimpleNamespace, parts: dict[str, float]) -> list[str]:
    sizes = [(name, size / GB) for name, size in [*parts.items(), ("at its peak", memory.peak(parts))]]
    lines = ["memory, estimated (rollout, evaluation and update take turns)", _aligned(sizes, ("", "GB"), ".3f")]
    if config.model.device == "cpu":
        room, owner = memory.machine_memory(), "this machine"
    elif torch.cuda.is_available():
        room, owner = torch.cuda.mem_get_info()[0], f"{torch.cuda.get_device_name()} that are free"
    else:
        return [*lines, f"no CUDA device here: it needs one with about {memory.peak(parts) / GB:.1f} GB"]
    verdict = "fits" if memory.peak(parts) < room else "does not fit"
    return [*lines, f"{verdict}: about {memory.peak(parts) / GB:.1f} of the {room / GB:.1f} GB of {owner}"]


def say_search(config: SimpleNamespace, seconds: dict[tuple[str, int], tuple[float, float]], threads: int) -> list[str]:
    """Time of each opponent's search in each game, and in a step of each stage on ``threads`` threads."""
    if not seconds:
        return []
    spent = [(f"{GAMES[index].name} against {opponent}", *found) for (opponent, index), found in seconds.items()]
    lines = [_aligned(spent, ("search, estimated", "s a move", "s a game"), ".3f")]
    for stage in config.curriculum.stages:
        games, replays = stage.weights, config.curriculum.failure_replay_prob if stage.gate else 0.0
        shares = {o: w * (1 - replays) / sum(stage.mixture.values()) for o, w in stage.mixture.items()}
        shares |= {stage.gate: shares[stage.gate] + replays} if stage.gate else {}
        total = sum(w * g * seconds.get((o, i), (0, 0))[1] for o, w in shares.items() for i, g in games.items())
        step = config.ppo.batch_size * total / sum(games.values()) / threads
        lines.append(f"stage {stage.name}: {step:.2f} s a step of {config.ppo.batch_size} games, on {threads} threads")
    return lines
