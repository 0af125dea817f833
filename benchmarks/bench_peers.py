"""The program against other ways to do the same PPO work: samples a CPU second, peak memory.

    python benchmarks/bench_peers.py [--workloads w1 w2 w3] [--peers floor trl116 trl112 trl0114] [--json FILE]

Workloads and model: ``benchmarks/peers/workloads.py``. Each run is a process of its own with one thread, and runs of
ours and of the peers alternate; the best of ``--repeat`` counts. ``floor`` (a plain loop) and ``trl116`` run in this
environment, ``trl112`` and ``trl0114`` in virtual environments that are made in ``--venvs`` when first asked for.

Differences in the work: GRPO (trl116) has no critic; trl112 trains a whole second model as critic and runs a third as
reward; with w2, trl0114 and trl112's kind of trainer read every turn's history again (trl112 cannot do w2 at all).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, parser, table, write
from training.process import ProgramError, at_least, run_program

PEERS = Path(__file__).resolve().parent / "peers"


@dataclass(frozen=True)
class Peer:
    """A script in peers/, and the packages of its own environment (none: this environment)."""

    script: str
    packages: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ("w1", "w2", "w3")


KNOWN = {
    "floor": Peer("floor.py"),
    "trl116": Peer("trl116_grpo.py"),
    "trl112": Peer(
        "trl112_ppo.py",
        ("torch==2.13.0", "trl==1.12.0", "transformers==5.23.0", "accelerate==1.15.0", "peft==0.21.2",
         "datasets==5.2.0"),
        ("w1", "w3"),
    ),
    "trl0114": Peer(
        "trl0114_ppo.py",
        ("torch==2.13.0", "trl==0.11.4", "transformers==4.45.2", "accelerate==0.34.2", "peft==0.13.2",
         "datasets==2.21.0", "numpy<2", "pyarrow<20", "pandas<3", "rich", "psutil"),
    ),
}  # fmt: skip


def interpreter(name: str, peer: Peer, venvs: Path) -> str:
    """The Python of a peer's environment, made if need be."""
    if not peer.packages:
        return sys.executable
    folder = (venvs / name).resolve()  # runs start in another folder
    python, complete, wanted = folder / "bin" / "python", folder / "complete", "\n".join(peer.packages)
    if not complete.exists() or complete.read_text() != wanted:
        print(f"{name}: installing {', '.join(peer.packages)} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *peer.packages], check=True)
        complete.write_text(wanted)
    return str(python)


def run(python: str, script: str, workload: str) -> Row:
    """One process; its line of results.

    Raises:
        ProgramError: it failed; with the last line of its error output.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([python, script, workload], cwd=PEERS, env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise ProgramError(f"{script} {workload}: {(done.stderr.strip() or 'no result').splitlines()[-1]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def main(argv: list[str] | None = None) -> int:
    """Run ours and the peers; print rows and ratios."""
    add = (flags := parser(__doc__)).add_argument
    add("--workloads", nargs="+", action="store", choices=("w1", "w2", "w3"), default=["w1", "w2", "w3"])
    add("--peers", nargs="+", action="store", choices=tuple(KNOWN), default=["floor"])
    add("--repeat", type=at_least(1), default=2)
    add("--venvs", type=Path, default=Path("out/venvs"))
    args = flags.parse_args(argv)
    scripts: dict[str, tuple[str, str, tuple[str, ...]]] = {"ours": (sys.executable, "ours.py", ("w1", "w2", "w3"))}
    for name in args.peers:
        peer = KNOWN[name]
        scripts[name] = (interpreter(name, peer, args.venvs), peer.script, peer.workloads)
    rows: list[Row] = []
    ratios: dict[str, dict[str, float]] = {"speed": {}, "memory": {}}
    for workload in args.workloads:
        able = {name: script for name, script in scripts.items() if workload in script[2]}
        best: dict[str, Row] = {}
        for _ in range(args.repeat):
            for name, (python, script, _) in able.items():
                row = run(python, script, workload)
                if name not in best or row["samples_per_cpu_s"] > best[name]["samples_per_cpu_s"]:
                    best[name] = row
        rows += best.values()
        print(table(list(best.values())), "\n", flush=True)
        for name in best.keys() - {"ours"}:
            speed, memory = ("samples_per_cpu_s", "peak_rss_mib")
            ratios["speed"][f"{workload} ours/{name}"] = best["ours"][speed] / best[name][speed]
            ratios["memory"][f"{workload} ours/{name}"] = best["ours"][memory] / best[name][memory]
        write(args.json, {"workloads": args.workloads, "repeat": args.repeat}, rows, ratios)  # a later one may fail
    print(table([{"ratio": key, "speed": ratios["speed"][key], "memory": ratios["memory"][key]}
                 for key in ratios["speed"]]))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
