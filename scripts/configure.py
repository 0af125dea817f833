"""Write a configuration for this machine: ask for model, games, opponents and budget, and say what they cost.

    python scripts/configure.py                                                          asks
    python scripts/configure.py --yes --model Qwen/Qwen3-4B --games hex --opponents random mcts:50x1 --budget 20000
    python scripts/configure.py --yes --gpu-memory 12                                    for another machine

Flags answer questions in advance; ``--yes`` takes the default for the rest. The file holds differences to the default
configuration, for ``python train_ppo.py --config FILE``. Memory and search times are those that --dry-run estimates.
"""

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
if __name__ == "__main__":
    import config.start  # noqa: F401, before libraries load

import torch
from rich.console import Console
from rich.markup import escape
from rich.prompt import Confirm, IntPrompt, Prompt
from tabulate import tabulate

from config.flags import FlagParser, file_name, one_line
from config.reader import blaming
from curriculum import pool
from envs.opponents import parse_opponent
from games import NAMES
from policy.chat import ChatFormat
from policy.model import load_architecture, load_tokenizer
from scripts.export.publish import licence_of, licence_warning
from training import memory, preflight
from training.config import DEFAULT_FILES, load_sections
from training.memory import GB, Parameters, count_parameters
from training.process import ROOT, at_least, command, must_be_writable, run_program
from utils import ConfigError, read_json, write_file

TINY = ROOT / "config" / "presets" / "tiny.json"
TINY_MODEL = "models/tiny"
MODELS = {
    "Qwen/Qwen3-4B": "the default",
    "Qwen/Qwen2.5-3B-Instruct": "smaller, research only",
    TINY_MODEL: "made here in seconds, for trying things on a CPU",
}
DEFAULT_GAMES = "tic_tac_toe kuhn_poker leduc_poker connect_four"
DEFAULT_OPPONENTS = "random mcts:50x1"
TINY_PARAMETERS = 10_000_000  # fewer: one of scripts/make_tiny_model.py's, which begins with random weights
SIZES = ((32, 16384), (16, 8192), (8, 4096), (4, 2048), (2, 1024))  # games_at_once, tokens_per_batch
WELL_FED = 8  # the least games_at_once for which plain weights are worth their memory
ROOM = 0.9  # share of the memory that estimates may fill
GAMES_A_STEP = 32
EVALUATIONS = 10  # of a run whose model is not tiny, so that its curve tells whether it learns


@dataclass(frozen=True)
class Option:
    """One way to hold the model in memory."""

    label: str
    games_at_once: int
    overlay: dict[str, dict[str, Any]]  # section -> key -> value, over the default configuration
    peak: float  # GB


def resolve(overlay: dict[str, dict[str, Any]]) -> SimpleNamespace:
    """The default configuration with an overlay."""
    return load_sections([*DEFAULT_FILES, ("--set", overlay)])


def stages(opponents: list[str], games: list[str]) -> list[dict[str, Any]]:
    """A stage for each opponent. Where the score cannot show skill, games against random decide when it ends.

    That is self-play, whose games have an even mean for any skill, and opponents that nobody beats.
    """

    def against(opponent: str) -> dict[str, Any]:
        if opponent != "self" and not parse_opponent(opponent).solves:
            return {"opponent": opponent}
        return {"opponent": {opponent: 4.0, "random": 1.0}, "gate_opponent": "random"}

    return [{"name": opponent, "games": games, "threshold": 0.6} | against(opponent) for opponent in opponents]


def base_overlay(args: argparse.Namespace, gpu: bool, tiny: bool) -> dict[str, dict[str, Any]]:
    """The settings that do not depend on how the model is held; for a tiny model on top of the tiny preset's."""
    overlay = read_json(TINY) if tiny else {"model": {}, "ppo": {}, "env": {}, "curriculum": {}, "run": {}}
    if not tiny:
        overlay["ppo"] |= {"batch_size": GAMES_A_STEP, "mini_batch_size": 8, "gradient_accumulation_steps": 1}
        overlay["model"] |= {} if gpu else {"device": "cpu", "use_4bit": False, "dtype": "float32"}
        fair = args.budget // (10 * EVALUATIONS * len(pool(args.games)))  # a tenth of the budget for them all
        overlay["ppo"]["eval_games"] = min(max(fair // 2 * 2, 4), 40)
    steps = math.ceil(args.budget / overlay["ppo"]["batch_size"])
    overlay["model"]["model_name"] = args.model[0]
    overlay["env"] |= {"games_path": args.games_path} if args.games_path else {}
    often = max(1, steps // EVALUATIONS)
    overlay["ppo"] |= {"num_train_steps": steps, "save_freq": often} | ({} if tiny else {"eval_freq": often})
    overlay["curriculum"]["stages"] = stages(args.opponents, args.games)
    overlay["run"]["output_dir"] = f"runs/{args.output.stem}"
    return overlay


def shared(args: argparse.Namespace, gpu: bool) -> tuple[dict[str, dict[str, Any]], Any, Parameters]:
    """What all ways to hold the model share: the settings, its architecture and its parameters."""
    plain = resolve({"model": {"model_name": args.model[0]}})
    architecture = load_architecture(plain.model)
    parameters = count_parameters(plain.lora, architecture)
    overlay = base_overlay(args, gpu, parameters.total < TINY_PARAMETERS)
    if resolve(overlay).ppo.max_seq_length > architecture.max_position_embeddings:  # no run would start so
        overlay["ppo"]["max_seq_length"] = architecture.max_position_embeddings
    return overlay, architecture, parameters


def options(args: argparse.Namespace, gpu: bool) -> tuple[list[Option], SimpleNamespace, dict[int, Any]]:
    """Every way to hold the model, best first; the configuration they share; ``measure_prompts`` of its games.

    Plain weights are better than 4 bits where WELL_FED games or more fit beside them; then more games are better.
    ConfigError: the model or its tokenizer cannot be read, or a prompt does not fit.
    """
    overlay, architecture, parameters = shared(args, gpu)
    config, tiny = resolve(overlay), parameters.total < TINY_PARAMETERS
    measured = preflight.measure_prompts(config, ChatFormat(load_tokenizer(config.model)))
    sizes = [(config.env.games_at_once, config.model.tokens_per_batch)] if tiny else SIZES
    ways = [(False, *size) for size in sizes]
    if gpu and not tiny:
        ways = [way for way in ways if way[1] >= WELL_FED] + [(True, *size) for size in sizes]
    found = []
    for four_bits, games, tokens in ways:
        model = overlay["model"] | {"use_4bit": four_bits, "tokens_per_batch": tokens}
        way = overlay | {"model": model, "env": overlay["env"] | {"games_at_once": games}}
        peak = memory.peak(memory.estimate(resolve(way), parameters, architecture, measured)) / GB
        found.append(Option("4 bits" if four_bits else config.model.dtype, games, way, peak))
    return found, config, measured


def choose(found: Sequence[Option], room: float) -> Option:
    """The first that fits into ``room`` GB; ConfigError: none does."""
    for option in found:
        if option.peak <= ROOM * room:
            return option
    least = min(option.peak for option in found)
    raise ConfigError(f"nothing fits: at least {least / ROOM:.1f} GB are needed, and there are {room:.1f}; "
                      "choose a smaller model or games with shorter prompts")  # fmt: skip


# --------------------------------------------------------------------------------------------------------- questions


def ask(
    args: argparse.Namespace, flag: str, default: str, question: str, hint: str, check: Callable[[list[str]], Any]
) -> None:
    """Set a flag to words, each once: those given, with ``--yes`` the default, else typed until ``check`` accepts them.

    ``check`` raises ValueError for words that it refuses; ConfigError: it refuses words that were not typed.
    """
    given, console = getattr(args, flag), Console(highlight=False)
    if typed := given is None and not args.yes:
        console.print(hint, style="dim")
    while True:
        words = given or default.split()
        if typed:
            answer = Prompt.ask(question, default=default, console=console)
            words = [answer] if flag == "model" else answer.replace(",", " ").split()  # folders may have blanks
        words = list(dict.fromkeys(words))
        setattr(args, flag, words)
        try:
            check(words)
            return
        except ValueError as error:
            if not typed:
                raise ConfigError(f"--{flag}: {error}") from error
            console.print(one_line(error), style="red", markup=False)


def ask_all(args: argparse.Namespace, gpu: bool) -> None:
    """Set what the command line leaves open."""

    def check_model(words: list[str]) -> None:
        if len(words) != 1:
            raise ValueError("expected one name")
        model = resolve({"model": {"model_name": words[0]}}).model
        load_architecture(model)
        ChatFormat(load_tokenizer(model))

    def check_games(words: list[str]) -> None:
        pool(words)
        asked = argparse.Namespace(**vars(args) | {"games": words, "opponents": ["random"], "budget": 1})
        config = resolve(shared(asked, gpu)[0])
        preflight.measure_prompts(config, ChatFormat(load_tokenizer(config.model)), peek=True)

    def check_opponents(words: list[str]) -> None:
        known = [word for word in words if parse_opponent(word)]
        preflight.check_opponents(resolve({"curriculum": {"stages": stages(known, args.games)}}).curriculum)

    default, hint = next(iter(MODELS)) if gpu else TINY_MODEL, "\n".join(f"  {n}: {note}" for n, note in MODELS.items())
    ask(args, "model", default, "Model (a name on the Hub or a folder)", hint, check_model)
    ask(args, "games", DEFAULT_GAMES, "Games", "  " + " ".join(NAMES), check_games)
    hint = "  random mcts mcts_light mcts:SIMSxROLLOUTS ismcts perfect cfr self"
    ask(args, "opponents", DEFAULT_OPPONENTS, "Opponents, a stage each", hint, check_opponents)
    usual = 200_000 if args.model == [TINY_MODEL] else 20_000
    while not 1 <= (args.budget or 0) < 2**31:
        if args.budget is not None:
            print(f"expected from 1 to {2**31 - 1:,} games")
        args.budget = usual if args.yes else IntPrompt.ask("Games to play", default=usual)


# ----------------------------------------------------------------------------------------------------------- program


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=file_name, default=Path("config/mine.json"), metavar="FILE", help="default %(default)s")
    add("--model", nargs=1, metavar="NAME",
        help=f"on the Hub, or a folder (default {next(iter(MODELS))}; without a GPU {TINY_MODEL})")  # fmt: skip
    add("--games", nargs="+", metavar="GAME", help=f"default {DEFAULT_GAMES}")
    add("--games-path", metavar="DIR", default="", help="with games of your own: adding_a_game.md")
    add("--opponents", nargs="+", metavar="OPPONENT", help=f"a stage each, in this order (default {DEFAULT_OPPONENTS})")
    add("--budget", type=at_least(1), metavar="N", help=f"games to play (default 20,000; of {TINY_MODEL} 200,000)")
    add("--gpu-memory", type=at_least(0.0), metavar="GB", help="of another machine's GPU; 0: it has none")
    add("--yes", action="store_true", help="ask nothing; replace the file if it exists")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Ask, estimate, write."""
    gpu = args.gpu_memory
    if gpu is None and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0).total_memory / GB
    room = gpu or memory.machine_memory() / GB
    print(f"Machine: a GPU with {gpu:.3g} GB" if gpu else f"Machine: no GPU, {room:.0f} GB of memory")
    with blaming("--games-path: "):
        resolve({"env": {"games_path": args.games_path}})  # registers custom games, so that --games may name them
    if args.output.exists() and not args.output.is_file():
        raise ConfigError(f"--output {args.output}: is a folder or a device; expected a file")
    place, ours = args.output.resolve(), [*DEFAULT_FILES, TINY.parents[1] / "trace_config.json"]
    if place in ours or place.parent == TINY.parent or place.name == "run_config.json":
        raise ConfigError(f"--output {args.output}: comes with this project or belongs to a run; name another file")
    if args.output.exists() and args.yes:  # a file that is no configuration is refused, not replaced
        load_sections([*DEFAULT_FILES, args.output])
    must_be_writable(args.output.absolute().parent)
    if args.output.exists() and not args.yes and not Confirm.ask(escape(f"Replace {args.output}?")):
        raise ConfigError(f"--output {args.output}: is kept; name another file")
    ask_all(args, bool(gpu))
    found, config, measured = options(args, bool(gpu))
    chosen = choose(found, room)
    lines = [(option.label, option.games_at_once or "all", option.overlay["model"]["tokens_per_batch"], option.peak,
              "chosen" if option is chosen else "fits" if option.peak <= ROOM * room else "too big")
             for option in found]  # fmt: skip
    table = tabulate(lines, ("weights", "games open", "tokens a batch", "GB at the peak", ""), floatfmt=".2f")
    search = preflight.say_search(config, preflight.search_seconds(config, measured), os.cpu_count() or 1)
    title = f"Memory, estimated, of {room:.1f} GB"
    print("", *preflight.say_prompts(config, measured), "", title, table, "", *search, sep="\n")
    print(f"{args.budget:,} games: {config.ppo.num_train_steps:,} whole steps of {config.ppo.batch_size:,} games.\n"
          "Training itself is not estimated: its progress line tells the time left after the first step.")  # fmt: skip
    licence = licence_of(args.model[0])
    if licence and (warning := licence_warning(args.model[0], licence)):
        print(warning)
    write_file(args.output, (json.dumps(chosen.overlay, indent=1) + "\n").encode())
    train = command("train_ppo.py", "--config", str(args.output))
    print(f"{args.output} is written. Go on with\n  {train} --dry-run\n  {train}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; exit codes: 0 done, 2 bad usage or nothing fits, 130 interrupted."""
    args = parse_args(argv)

    def asked() -> None:
        try:
            run(args)
        except EOFError as error:
            raise ConfigError("the input ended before all questions were answered; --yes asks none") from error

    return run_program(asked)


if __name__ == "__main__":
    sys.exit(main())
