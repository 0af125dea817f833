"""SIGKILL at random instants, then --resume, again and again: the end is the undisturbed run's, to the byte.

    python tests/tools/kills.py          # 10 kills, where they hit; exit 1: another end
    python tests/tools/kills.py 100 7    # 100 of them, another seed

One run in three plays against itself and past selves, one on a server (scripts/serve.py), and one with settings drawn
at random. The program is forked, imports done, so that a life of it costs a second. It tells a pipe what it enters and
leaves; the kill comes from outside, at a random moment after a random one of these marks: a resume that loads is one of
them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from serving import running_server
from tiny import KUHN, micro_file
from tiny_runs import CLIMB, VOLATILE, Drawing

import train_ppo
import utils

STEPS = 10
SECTIONS: dict[str, dict[str, Any]] = {
    "ppo": {
        "num_train_steps": STEPS,
        "magnet_coef": 0.1,
        "rehearsal_coef": 0.5,
        "state_coef": 0.02,
        "eval_freq": 4,
        "eval_exact": "auto",
        "save_freq": 1,
    },
    "curriculum": CLIMB,
    "run": {"logger": "none", "keep_last": 2},
}
SERVED: dict[str, dict[str, Any]] = {
    "ppo": SECTIONS["ppo"]
    | {"state_coef": 0.0, "max_seq_length": 1024, "batch_size": 8, "mini_batch_size": 4, "eval_games": 2},
    "curriculum": {"stages": [{"name": "only", "games": [[KUHN, KUHN]]}], "failure_replay_prob": 0.3},
    "run": SECTIONS["run"],
}
DRAWN: dict[str, dict[str, tuple[Any, ...]]] = {  # half of them, one of the values each
    "model": {"gradient_checkpointing": (False, True), "tokens_per_batch": (64, 512, 16384)},
    "lora": {"r": (1, 4), "target_modules": (["q_proj", "down_proj"], ["v_proj"], ["o_proj"])},
    "ppo": {
        "mini_batch_size": (4, 8, 16), "ppo_epochs": (1, 2, 3), "gamma": (0.5, 1.0), "lam": (0.0, 1.0),
        "magnet_coef": (0.0, 0.1), "rehearsal_coef": (0.0, 0.5), "state_coef": (0.0, 0.02),
        "context_grad": (False, True), "legal_mass_coef": (0.0, 0.1), "init_kl_coef": (0.0, 0.05),
        "adap_kl_ctrl": (False, True),
        "target_kl": (None, 1e-4, 0.1), "entropy_coef": (0.0, 0.3), "entropy_final": (0.0, 1.0), "lr_final": (0.0, 1.0),
        "max_grad_norm": (0.01, 1000.0),
        "temperature": (0.3, 1.0), "recompute_logprobs": (False, True), "alarms": ("off", "act"),
        "eval_freq": (0, 1, 3), "eval_exact": ("auto", "never"), "save_freq": (1, 2), "max_seq_length": (128, 512),
    },
    "env": {"answer_mode": ("constrained", "free"), "history_turns": (0, "auto", "all"), "games_at_once": (0, 3)},
    "curriculum": {"replay_seed": ("same", "fresh"), "sampling": ("uniform", "learnability")},
}  # fmt: skip
PHASES: dict[str, tuple[Any, str]] = {
    "rollout": (train_ppo, "play"),
    "update": (train_ppo, "ppo_update"),
    "save": (utils, "save_checkpoint"),
    "evaluation": (train_ppo, "evaluate"),
    "loading": (train_ppo.Trainer, "load"),
}
AIMS = ("rollout", "update", "save", "loading", "evaluation")
ONCE = ("loading", "evaluation")  # or so, in a life
ENTERED, LEFT = 1, 0
IN_A_RUN = 4  # kills


def mark_phases(pipe: int) -> None:
    """Let each phase write its number and whether it is entered or left; inherited by every fork."""

    def marked(function: Callable[..., Any], number: int) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            os.write(pipe, bytes([2 * number + ENTERED]))
            try:
                return function(*args, **options)
            finally:
                os.write(pipe, bytes([2 * number + LEFT]))

        return run

    for number, (owner, name) in enumerate(PHASES.values()):
        setattr(owner, name, marked(getattr(owner, name), number))
    train_ppo.subprocess = Drawing()  # type: ignore[assignment]


def start(folder: Path, pipe: int) -> int:
    """Fork the program, resuming where there is something to resume; return its process id."""
    resume = ["--resume"] if (folder / "run").exists() and utils.latest_checkpoint(folder / "run") else []
    child = os.fork()
    if child:
        return child
    os.chdir(folder)  # the same relative paths in every folder: they are part of the checkpoint
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 99
    try:
        code = train_ppo.main(["--config", "micro.json", "--output-dir", "run", *resume])
    finally:
        sys.stdout.flush()
        os._exit(code)


class Marks:
    """What the program said through the pipe, and when."""

    def __init__(self) -> None:
        self.end, self.pipe = os.pipe()
        os.set_blocking(self.end, False)
        self.inside: list[str] = []
        self.entered: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self._since: dict[str, float] = {}

    def read(self) -> None:
        """Take in what has arrived."""
        try:
            data = os.read(self.end, 4096)
        except BlockingIOError:
            return
        for number, kind in (divmod(byte, 2) for byte in data):
            phase = list(PHASES)[number]
            if kind == ENTERED:
                self.inside.append(phase)
                self.entered[phase] += 1
                self._since[phase] = time.perf_counter()
            else:
                self.inside.remove(phase)
                self.seconds[phase].append(time.perf_counter() - self._since[phase])

    def forget(self) -> None:
        """Begin with another process."""
        self.inside.clear()
        self.entered.clear()


def live(folder: Path, marks: Marks, aim: tuple[str, int, float] | None) -> str | None:
    """Run the program until it ends (None), or kill it; return the phase it died in.

    ``aim``: phase, how often it is entered before, seconds to wait then.
    """
    marks.forget()
    child = start(folder, marks.pipe)
    while True:
        marks.read()
        if aim and marks.entered[aim[0]] >= aim[1]:
            time.sleep(aim[2])
            os.kill(child, signal.SIGKILL)
        done, status = os.waitpid(child, 0 if aim and marks.entered[aim[0]] >= aim[1] else os.WNOHANG)
        if done:
            break
        time.sleep(0.0005)
    marks.read()
    if os.WIFSIGNALED(status):
        return marks.inside[-1] if marks.inside else "between"
    if os.WEXITSTATUS(status):
        raise SystemExit(f"exit code {os.WEXITSTATUS(status)}\n{(folder / 'output.txt').read_text()[-3000:]}")
    return None


def end_state(folder: Path) -> dict[str, Any]:
    """Everything a finished run left: each byte but those that tell the time."""
    run = folder / "run"
    others = (
        ".lock",
        "about.json",
        "metrics.jsonl",
        "run.log",
        "abandoned-metrics.jsonl",
    )  # of one process, or with times
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name not in others]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if key not in VOLATILE} for row in lines]
    return {str(path.relative_to(run)): path.read_bytes() for path in files} | {"metrics.jsonl": rows}


def new_folder(root: Path, name: str, sections: dict[str, dict[str, Any]]) -> Path:
    """A folder with the configuration, in which a run is to be."""
    (root / name).mkdir()
    micro_file(root / name, **sections)
    return root / name


def drawn(rng: random.Random) -> dict[str, dict[str, Any]]:
    """The first sections with some of ``DRAWN``."""
    found = dict(SECTIONS)
    for section, knobs in DRAWN.items():
        some = {knob: rng.choice(values) for knob, values in knobs.items() if rng.random() < 0.5}
        found[section] = found.get(section, {}) | some
    return found


def aim_at(folder: Path, phase: str, rng: random.Random, usual: dict[str, float]) -> tuple[str, int, float]:
    """Where to kill the next life; one that has nothing to load is killed in its rollouts."""
    phase = phase if phase not in ONCE or (folder / "run" / "checkpoint-000001").exists() else "rollout"
    return phase, 1 if phase in ONCE else rng.randint(1, 3), rng.random() * 1.2 * usual.get(phase, 0.03)


def main(kills: int = 10, seed: int = 0) -> int:
    """Kill and resume until there were ``kills``; 1 where an end differs from the undisturbed one's."""
    rng, marks, died, chains, different, early = random.Random(seed), Marks(), Counter[str](), 0, 0, 0
    mark_phases(marks.pipe)
    with tempfile.TemporaryDirectory(prefix="kills-") as root, running_server() as server:
        sort = [SECTIONS, SERVED | {"env": {"env_mode": "url", "env_url": server, "prompt": "full"}}, {}]
        expected: list[dict[str, Any]] = [{}, {}, {}]
        while died.total() < kills:
            which = chains % 3
            if which == 2:
                sort[which] = drawn(rng)
            if which == 2 or not expected[which]:
                whole = new_folder(Path(root), f"whole{chains}", sort[which])
                live(whole, marks, None)
                expected[which] = end_state(whole)
            usual = {phase: sorted(seconds)[len(seconds) // 2] for phase, seconds in marks.seconds.items() if seconds}
            folder, chains = new_folder(Path(root), f"run{chains}", sort[which]), chains + 1
            most = min(kills, died.total() + IN_A_RUN)
            while True:
                aim = aim_at(folder, AIMS[died.total() % len(AIMS)], rng, usual) if died.total() < most else None
                where = live(folder, marks, aim)
                if where is None:
                    break
                if utils.latest_checkpoint(folder / "run"):
                    died[where] += 1
                else:  # nothing to resume: the run starts anew
                    early += 1
            found = end_state(folder)
            names = expected[which].keys() | found.keys()
            wrong = sorted(name for name in names if expected[which].get(name) != found.get(name))
            different += bool(wrong)
            if wrong:
                print(json.dumps(sort[which]))
            print(f"run {chains}: {died.total()} kills so far, {wrong or 'the end is identical'}", flush=True)
    print(f"{died.total()} kills, each followed by --resume, in {chains} runs of {STEPS} steps: "
          f"{dict(died.most_common())}; {early} more before the first checkpoint")  # fmt: skip
    print(f"{chains - different} of {chains} ends are the undisturbed run's: {len(found)} files compared byte by byte")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
