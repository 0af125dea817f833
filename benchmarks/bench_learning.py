"""The program against TRL's GRPO: what SmolLM2-135M has learnt of a game after so many CPU seconds.

    python benchmarks/bench_learning.py [--game kuhn_poker] [--seconds 600] [--seed 0] [--folder out/learning]

Both learners begin with the same weights, play the same prompts against the same random opponent, 64 games a step, and
train the same LoRA at the same rate, one thread each, one after the other (``benchmarks/peers/learning.py``). Every
minute of CPU time their adapters are kept, and graded afterwards: exact value of play among legal answers as a share of
the best response's, and value and share of legal answers in 100 games of free play. A picture shows both. Learning
rates fall with the steps, which ``--pace`` has to let end with the time: it is of the machine in docs/results.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, table, write
from config.flags import FlagParser
from evaluation.measure import evaluate
from games import NAMES
from policy import load_policy
from training.process import at_least, run_program

PEERS = Path(__file__).resolve().parent / "peers"
LEARNERS = {"ours": "ours_learning.py", "trl 1.16 GRPO": "trl116_learning.py"}
FREE_GAMES = 100


def grades(game: str, folder: Path) -> list[Row]:
    """One row an adapter of a learner, in the order of time."""
    from learning import configuration

    rows = []
    for adapter in sorted(folder.iterdir()):
        task, config = configuration(game, 0)
        config.model = replace(config.model, adapter=str(adapter))
        policy = load_policy(config)
        [own] = evaluate(policy, config.env, [task], 2, seed=1)
        policy.constrained = False
        [free] = evaluate(policy, config.env, [task], FREE_GAMES, seed=1, exact_tasks=())
        rows.append({"CPU s": int(adapter.name), "exact": own.exact, "share": own.share, "free play": free.value,
                     "low": free.low, "high": free.high, "legal": free.legal_rate})  # fmt: skip
        print(folder.name, rows[-1], flush=True)
    return rows


def draw(found: dict[str, list[Row]], game: str, path: Path) -> None:
    """Both grades over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (name, rows), colour in zip(found.items(), ("#3366cc", "#dd8833"), strict=False):
        seconds, low, high = ([row[key] for row in rows] for key in ("CPU s", "low", "high"))
        axes[0].plot(seconds, [row["share"] for row in rows], "o-", color=colour, label=name)
        axes[1].plot(seconds, [row["free play"] for row in rows], "o-", color=colour, label=name)
        axes[1].fill_between(seconds, low, high, color=colour, alpha=0.15)
    axes[0].set(title="play among legal answers", ylabel="share of the best response, exact", xlabel="CPU seconds")
    axes[1].set(title=f"free play, {FREE_GAMES} games", ylabel="value (95 % interval)", xlabel="CPU seconds")
    axes[0].legend()
    figure.suptitle(f"SmolLM2-135M learns {game}, one thread")
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    """Train where a learner's folder is not there yet, grade, draw."""
    flags = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add("--game", choices=NAMES, metavar="GAME", default="kuhn_poker")
    add("--seconds", type=at_least(1), default=600)
    add("--seed", type=at_least(0), default=0)
    add("--pace", type=float, nargs=2, default=(9.5, 0.25), metavar=("OURS", "TRL"),
                        help="steps a minute")  # fmt: skip
    add("--folder", type=Path, default=Path("out/learning"))
    args = flags.parse_args(argv)
    found, what = {}, f"{args.game}-seed{args.seed}-{args.seconds}s"
    for (name, script), pace in zip(LEARNERS.items(), args.pace, strict=True):
        folder = args.folder.resolve() / f"{script.removesuffix('_learning.py')}-{what}"
        if not folder.exists():
            shutil.rmtree(part := folder.with_name(f"{folder.name}.part"), ignore_errors=True)  # of a run that failed
            given = [args.game, args.seed, max(1, round(pace * args.seconds / 60)), args.seconds, part]
            subprocess.run([sys.executable, script, *map(str, given)], cwd=PEERS, check=True,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
            part.rename(folder)
        found[name] = grades(args.game, folder)
    rows = [{"learner": name, **row} for name, of in found.items() for row in of]
    print(table(rows))
    write(args.folder / f"{what}.json", vars(args) | {"folder": str(args.folder)}, rows, {})
    draw(found, args.game, args.folder / f"{what}.png")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
