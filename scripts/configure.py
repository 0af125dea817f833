"""A configuration for this machine: asks for model, games, opponents and budget, says what each costs, writes a file.

    python scripts/configure.py                                                          asks
    python scripts/configure.py --yes --model Qwen/Qwen3-4B --games hex --opponents random mcts:50x1 --budget 20000
    python scripts/configure.py --yes --gpu-memory 12 --cores 8                          for another machine

What a flag answers is not asked; ``--yes`` takes the default for everything else. The file holds differences to the
default configuration, for ``python train_ppo.py --config FILE``. Memory and search are the estimates of --dry-run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich import box
from rich.console import Console
from rich.prompt import Confirm, IntPrompt, Prompt
from rich.table import Table

import preflight
from chat import ChatFormat
from curriculum import pool
from envs.opponents import parse_opponent
from games import NAMES
from model import load_architecture, load_tokenizer
from options import DEFAULT_FILES, SECTIONS
from scripts.publish import licence_of, licence_warning
from utils import ConfigError, load_config, read_json, redact

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "config" / "presets" / "tiny.json"
MODELS = {
    "Qwen/Qwen3-4B": "the default",
    "Qwen/Qwen2.5-3B-Instruct": "smaller, research only",
    "models/tiny": "made here in seconds, for trying things on a CPU",
}
DEFAULT_GAMES = ("tic_tac_toe", "kuhn_poker", "leduc_poker", "connect_four")
TINY_MODEL = "models/tiny"
DEFAULT_OPPONENTS = ("random", "mcts:50x1")
TINY_PARAMETERS = 10_000_000  # below it is one of scripts/make_tiny_model.py's, which learns from nothing
SIZES = ((32, 16384), (16, 8192), (8, 4096), (4, 2048), (2, 1024))  # games open together, tokens a batch
WELL_FED = 8  # games open together from which on plain weights are worth their memory
ROOM = 0.9  # share of the memory that estimates may fill
GAMES_A_STEP = 32


@dataclass(frozen=True)
class Machine:
    """What there is to train on."""

    gpu: float | None  # GB; None: none
    room: float  # GB of the GPU's memory, or without one of the machine's
    cores: int

    def __str__(self) -> str:
        what = f"a GPU with {self.gpu:.0f} GB" if self.gpu else f"no GPU, {self.room:.0f} GB of memory"
        return f"{what}, {self.cores} cores"


@dataclass(frozen=True)
class Plan:
    """What the user wants."""

    model: str
    games: list[str]
    opponents: list[str]  # a stage each
    budget: int  # games to play


@dataclass(frozen=True)
class Option:
    """One way to hold the model in memory, with its costs in GB."""

    label: str
    games_at_once: int
    overlay: dict[str, dict[str, Any]]
    parts: dict[str, float]
    peak: float


def look(gpu_memory: float | None, cores: int | None) -> Machine:
    """This machine, or the one described."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / preflight.GB
    gpu = gpu_memory
    if gpu is None and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0).total_memory / preflight.GB
    return Machine(gpu or None, gpu or memory, cores or len(os.sched_getaffinity(0)))


# ------------------------------------------------------------------------------------------------------ the settings


def resolve(overlay: dict[str, dict[str, Any]]) -> SimpleNamespace:
    """The whole configuration that an overlay makes."""
    sets = [f"{name}.{key}={json.dumps(value)}" for name, part in overlay.items() for key, value in part.items()]
    return SimpleNamespace(**load_config(SECTIONS, [ROOT / name for name in DEFAULT_FILES], sets))


def base_overlay(plan: Plan, machine: Machine, tiny: bool, name: str) -> dict[str, dict[str, Any]]:
    """All that does not depend on how the model is held. A tiny model takes the tiny preset's settings."""
    overlay = read_json(TINY) if tiny else {"model": {}, "ppo": {}, "env": {}, "curriculum": {}, "run": {}}
    if not tiny:
        overlay["ppo"] |= {"batch_size": GAMES_A_STEP, "mini_batch_size": 8, "gradient_accumulation_steps": 1}
        overlay["model"] |= {} if machine.gpu else {"device": "cpu", "use_4bit": False, "dtype": "float32"}
    steps = math.ceil(plan.budget / overlay["ppo"]["batch_size"])
    overlay["model"]["model_name"] = plan.model
    overlay["ppo"] |= {"num_train_steps": steps, "save_freq": max(1, steps // 10)}
    overlay["curriculum"]["stages"] = [_stage(opponent, plan.games) for opponent in plan.opponents]
    overlay["run"]["output_dir"] = f"runs/{name}"
    return overlay


def _stage(opponent: str, games: list[str]) -> dict[str, Any]:
    stage = {"name": opponent, "games": games, "opponent": opponent, "threshold": 0.6}
    if opponent == "self":  # its mean is a draw whatever is learnt: some games against random tell how good it is
        stage |= {"opponent": {"self": 4.0, "random": 1.0}, "gate_opponent": "random"}
    return stage


def options(plan: Plan, machine: Machine, name: str) -> tuple[list[Option], SimpleNamespace, dict[int, Any]]:
    """Every way to hold the model, the configuration they share, and what its games' prompts measure.

    Raises:
        ConfigError: the model or its tokenizer cannot be read, or a prompt does not fit.
    """
    plain = resolve({"model": {"model_name": plan.model}})
    architecture = load_architecture(plain.model)
    parameters = preflight.count_parameters(plain.model, plain.lora, architecture)
    tiny = parameters.total < TINY_PARAMETERS
    overlay = base_overlay(plan, machine, tiny, name)
    config = resolve(overlay)
    measured = preflight.measure_prompts(config, ChatFormat(load_tokenizer(config.model)))
    ways: dict[str, dict[str, Any]] = {config.model.dtype: {"use_4bit": False}}
    if machine.gpu and not tiny:
        ways["4 bits"] = {"use_4bit": True}
    sizes = [(config.env.games_at_once, config.model.tokens_per_batch)] if tiny else SIZES
    found = []
    for label, held in ways.items():
        for games, tokens in sizes:
            one = {section: dict(part) for section, part in overlay.items()}
            one["model"] |= held | {"tokens_per_batch": tokens}
            one["env"]["games_at_once"] = games
            parts = preflight.memory(resolve(one), parameters, architecture, measured)
            gigabytes = {part: size / preflight.GB for part, size in parts.items()}
            found.append(Option(label, games, one, gigabytes, preflight.peak(parts) / preflight.GB))
    return found, config, measured


def choose(found: Sequence[Option], machine: Machine) -> Option:
    """Plain weights where at least WELL_FED games still fit beside them, else 4 bits, each with most games open.

    Raises:
        ConfigError: nothing fits.
    """
    fitting = [option for option in found if option.peak <= ROOM * machine.room]
    if not fitting:
        least = min(option.peak for option in found)
        raise ConfigError(f"nothing fits: at least {least / ROOM:.1f} GB are needed, and there are {machine.room:.1f}; "
                          "choose a smaller model or games with shorter prompts")  # fmt: skip
    plain = [option for option in fitting if not option.overlay["model"]["use_4bit"]]
    fed = [option for option in plain if option.games_at_once >= WELL_FED or not option.games_at_once]
    return (fed or [option for option in fitting if option not in plain] or plain)[0]


# ---------------------------------------------------------------------------------------------------- what it costs


def games_table(config: SimpleNamespace, measured: dict[int, Any], seconds: dict[tuple[str, int], Any]) -> Table:
    """What each game reads, and what each opponent's search takes."""
    table = Table(title="\nGames", title_justify="left", box=box.SIMPLE)
    searching = sorted({opponent for opponent, _ in seconds})
    columns = ["longest, tokens", "decisions", *(f"{o}, s a game" for o in searching)]
    table.add_column("game")
    for column in columns:
        table.add_column(column, justify="right")
    for index, prompts in measured.items():
        longest = max(prompts.longest)
        note = " (cut off)" if longest > config.ppo.max_seq_length else ""
        spent = [f"{seconds[o, index][1]:.3f}" if (o, index) in seconds else "-" for o in searching]
        table.add_row(prompts.game, f"{longest}{note}", f"{prompts.decisions / len(prompts.first):.1f}", *spent)
    return table


def options_table(found: Sequence[Option], chosen: Option, machine: Machine) -> Table:
    """What each way to hold the model takes."""
    table = Table(title=f"Memory, estimated, of {machine.room:.1f} GB", title_justify="left", box=box.SIMPLE)
    for column in ("weights", "games open", "tokens a batch", "base", "playing", "update", "peak", ""):
        table.add_column(column, justify="left" if column in ("weights", "") else "right")
    for option in found:
        parts = option.parts
        update = parts["update: activations"] + parts["update: logits"]
        sizes = (parts["base weights"], max(parts["rollout"], parts["evaluation"]), update, option.peak)
        verdict = "chosen" if option is chosen else "fits" if option.peak <= ROOM * machine.room else "too big"
        tokens = str(option.overlay["model"]["tokens_per_batch"])
        table.add_row(option.label, str(option.games_at_once or "all"), tokens,
                      *(f"{size:.2f}" for size in sizes), verdict)  # fmt: skip
    return table


def search_lines(plan: Plan, seconds: dict[tuple[str, int], Any], cores: int) -> list[str]:
    """How long the search takes of which opponent, were the whole budget played against it."""
    lines = []
    for opponent in plan.opponents:
        spent = [game for (name, _), (_, game) in seconds.items() if name == opponent]
        if not spent:
            lines.append(f"{opponent}: no search")
            continue
        minutes = math.ceil(plan.budget * sum(spent) / len(plan.games) / cores / 60)
        time = f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
        lines.append(f"{opponent}: {time} of search on {cores} cores, were all games played against it")
    return lines


# --------------------------------------------------------------------------------------------------------- questions


class Wizard:
    """Asks for what the command line leaves open; what is wrong is said and asked again."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console

    def ask(self, flag: str, default: str, question: str, check: Callable[[list[str]], list[str]]) -> list[str]:
        """A checked list of words: from the flag, from the default with ``--yes``, else typed.

        Raises:
            ConfigError: the flag's value is wrong.
        """
        given = getattr(self.args, flag)
        if given is not None or self.args.yes:
            return check(default.split() if given is None else given if isinstance(given, list) else [given])
        while True:
            words = Prompt.ask(question, default=default, console=self.console).replace(",", " ").split()
            try:
                return check(words)
            except ConfigError as error:
                self.console.print(f"[red]{error}")

    def plan(self, machine: Machine) -> Plan:
        """All answers."""
        default = next(iter(MODELS)) if machine.gpu else TINY_MODEL
        if not self.args.yes:
            self.console.print(*(f"  {name}: {note}" for name, note in MODELS.items()), sep="\n")
        [model] = self.ask("model", default, "Model (a name on the Hub or a folder)", check_model)
        if not self.args.yes:
            self.console.print("  " + " ".join(NAMES), style="dim")
        games = self.ask("games", " ".join(DEFAULT_GAMES), "Games", check_games)
        if not self.args.yes:
            self.console.print("  random mcts mcts_light mcts:SIMSxROLLOUTS ismcts self", style="dim")
        opponents = self.ask("opponents", " ".join(DEFAULT_OPPONENTS), "Opponents, a stage each", check_opponents)
        budget = self.args.budget
        usual = 200_000 if model == TINY_MODEL else 20_000
        while budget is None or budget < 1:
            budget = usual if self.args.yes else IntPrompt.ask("Games to play", default=usual, console=self.console)
        return Plan(model, games, opponents, budget)


def check_model(words: list[str]) -> list[str]:
    """One model that can be read."""
    if len(words) != 1:
        raise ConfigError(f"--model {' '.join(words)}: expected one name")
    load_architecture(resolve({"model": {"model_name": words[0]}}).model)
    return words


def check_games(words: list[str]) -> list[str]:
    """Names of games, each once."""
    try:
        pool(words)
    except ValueError as error:
        raise ConfigError(f"--games: {error}") from error
    if not words:
        raise ConfigError("--games: name at least one")
    return list(dict.fromkeys(words))


def check_opponents(words: list[str]) -> list[str]:
    """Opponents, each once."""
    for word in words:
        try:
            kind = parse_opponent(word).kind
        except ValueError as error:
            raise ConfigError(f"--opponents: {error}") from error
        if kind == "past":
            raise ConfigError(f"--opponents: {word} needs checkpoints to play against; write it into the file yourself")
    if not words:
        raise ConfigError("--opponents: name at least one")
    return list(dict.fromkeys(words))


# ----------------------------------------------------------------------------------------------------------- program


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("config/mine.json"), metavar="FILE")
    parser.add_argument("--model", metavar="NAME", help="on the Hub, or a folder")
    parser.add_argument("--games", nargs="+", metavar="GAME")
    parser.add_argument("--opponents", nargs="+", metavar="OPPONENT", help="a stage each, in this order")
    parser.add_argument("--budget", type=int, metavar="N", help="games to play")
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="of another machine's GPU; 0: it has none")
    parser.add_argument("--cores", type=int, metavar="N", help="of another machine")
    parser.add_argument("--yes", action="store_true", help="ask nothing; replace the file if it is there")
    args = parser.parse_args(argv)
    for flag, least in (("budget", 1), ("gpu_memory", 0), ("cores", 1)):
        value = getattr(args, flag)
        if value is not None and not least <= value < math.inf:
            parser.error(f"--{flag.replace('_', '-')} {value}: expected at least {least}")
    return args


def run(args: argparse.Namespace, console: Console) -> int:
    """Ask, estimate, write; return the exit code."""
    machine = look(args.gpu_memory, args.cores)
    console.print(f"Machine: {machine}")
    plan = Wizard(args, console).plan(machine)
    found, config, measured = options(plan, machine, args.output.stem)
    chosen = choose(found, machine)
    seconds = preflight.search_seconds(config, measured)
    console.print(games_table(config, measured, seconds), options_table(found, chosen, machine))
    steps = chosen.overlay["ppo"]["num_train_steps"]
    console.print(f"{plan.budget:,} games are {steps:,} steps of {chosen.overlay['ppo']['batch_size']}.",
                  *search_lines(plan, seconds, machine.cores), sep="\n")  # fmt: skip
    console.print("Training itself is not estimated: its progress line tells the time left after the first step.")
    licence = licence_of(plan.model)
    if licence and (warning := licence_warning(plan.model, licence)):
        console.print(f"[yellow]{warning}")
    write(chosen, args, console)
    return 0


def write(chosen: Option, args: argparse.Namespace, console: Console) -> None:
    """Write the file, if it is new or may be replaced, and say how to go on."""
    if args.output.exists() and not args.yes and not Confirm.ask(f"Replace {args.output}?", console=console):
        raise ConfigError(f"--output {args.output}: is kept; name another file")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(chosen.overlay, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {args.output}: cannot be written: {error.strerror}") from error
    console.print(f"{args.output} is written. Go on with\n"
                  f"  python train_ppo.py --config {args.output} --dry-run\n"
                  f"  python train_ppo.py --config {args.output}", soft_wrap=True)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; exit codes: 0 done, 2 bad usage or nothing fits, 130 interrupted."""
    console = Console(highlight=False)
    try:
        return run(parse_args(argv), console)
    except ConfigError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        return 130


if __name__ == "__main__":
    sys.exit(main())
