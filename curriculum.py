"""What to play next: stages of rising difficulty, replay of failed tasks, and tasks drawn by what they can teach."""

import logging
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import games
from config.reader import ConfigError, check_values, knob
from envs.opponents import parse_opponent
from envs.trace import level_parts
from envs.types import Task
from utils import uniform

# The environment derives seat, deal and opponent from the seed. The lower half of NumPy's seeds is for training, the
# upper half for evaluation (except for the last few thousand: offsets of the seed must stay below 2^32).
TRAIN_SEEDS = range(0, 2**31)
EVAL_SEEDS = range(2**31, 2**32 - 4096)

SUCCESS = 0.5  # a score above it is a success: a draw is not
WINDOW, LONGEST = 100, 10_000  # games that success rates are computed from: at least, and with rare games at most
GATE_GAMES = 5  # least denominator of a game's success rate at the gate: one lucky game does not pass it
BUFFER_SIZE = 1000  # failed tasks that are remembered; the oldest makes room
LEARNABILITY_FLOOR = 0.05  # least weight of a game, where p(1 - p) is at most 0.25, and of a past self
FORGIVEN_AFTER = 2  # consecutive successes that remove a task from the failure buffer
RATE_STEP = 0.05  # of the moving success rate behind learnability: about the last 20 games count
CHANGING = "self", "past"  # opponents that change with the policy
PAST_SIZE = 5  # past selves that are kept; the one beaten most makes room
LEAST, MOST = 1e-9, 1e9  # weight of a game or opponent
PAST_STEP = 0.01  # of the moving mean score against each past self: about the last 100 games count

# First keys of the random streams, so that no two purposes share numbers.
_REPLAY, _ENTRY, _CELL, _TASK, _SEED, _EVAL, _PAST = range(101, 108)

TaskRange = tuple[int, int]  # first and last task id, both included
Key = tuple[int, int | None, str]  # task id, seed (None where replays get a fresh one), opponent
Entry = tuple[int | None, float, int]  # seed, score of the last failure, successes in a row since
GameSet = Iterable[str | TaskRange]  # what ``pool`` takes


@dataclass(frozen=True)
class Stage:
    """One rung. It is left when the success rate against ``gate_opponent`` reaches ``threshold``; the last never is."""

    name: str  # shown in metrics
    games: list[str | TaskRange] | dict[str, float]  # NAME, NAME#CONFIG, [first, last] task ids; or NAME: weight
    opponent: str | dict[str, float] = "random"  # one, or a mixture with weights
    gate_opponent: str | None = None  # whose games count; the opponent itself unless that is a mixture, self or past
    threshold: float = knob(0.5, min=0, max=1)  # success rate that ends the stage, of the game won least
    min_episodes: int = knob(100, min=1)  # counted games before the stage can be left

    def __post_init__(self) -> None:
        check_values(self, "stage")  # for those made in Python, too
        if not self.games:
            raise ValueError("games is empty: name at least one game or [first, last] range of task ids")
        pool(self.games)
        if not self.mixture:
            raise ValueError("opponent: a mixture needs opponents")
        for name, weights in (("games", self.games), ("opponent", self.mixture)):
            if isinstance(weights, dict) and not all(LEAST <= weight <= MOST for weight in weights.values()):
                raise ValueError(f"{name}: weights are numbers from {LEAST:g} to {MOST:g}")
        for spec in [*self.mixture, *([self.gate_opponent] if self.gate_opponent else [])]:
            if spec.startswith("past:"):
                raise ValueError(f"opponent {spec!r}: past alone is allowed, which is chosen among them")
            if spec != "past":
                parse_opponent(spec)
        if self.gate_opponent in CHANGING:
            raise ValueError(f"gate_opponent {self.gate_opponent!r} changes with the policy: random or a search bot")

    @property
    def mixture(self) -> dict[str, float]:
        """Opponent -> weight."""
        return {self.opponent: 1.0} if isinstance(self.opponent, str) else self.opponent

    @property
    def weights(self) -> dict[int, float]:
        """Game index -> its relative frequency."""
        return {game: sum(weights) if weights else 1.0 for game, weights in self.range_weights.items()}

    @property
    def range_weights(self) -> dict[int, list[float]]:
        """Game index -> relative frequency of each of its ranges; []: in proportion to their numbers of tasks."""
        found: dict[int, list[float]] = {game: [] for game in pool(self.games)}
        for item, weight in self.games.items() if isinstance(self.games, dict) else ():
            for game, ranges in pool([item]).items():
                found[game] += [weight] * len(ranges)
        return found

    @property
    def gate(self) -> str | None:
        """The fixed opponent whose games count towards the threshold; None: no games count."""
        if self.gate_opponent or not isinstance(self.opponent, str):
            return self.gate_opponent
        return None if self.opponent in CHANGING else self.opponent


@dataclass(frozen=True)
class CurriculumConfig:
    """What is played when. The defaults of a run are in ``config/curriculum_config.json``."""

    stages: list[Stage]  # in their order
    failure_replay_prob: float = knob(0.3, min=0, max=0.9)  # share of tasks drawn from failed ones
    replay_seed: str = knob("same", choices=("same", "fresh"))  # replay the very deal, or the task with a new one
    sampling: str = knob("uniform", choices=("uniform", "learnability"))  # learnability: games by p(1 - p) of success

    @property
    def opponents(self) -> set[str]:
        """The opponents of all stages; ``self`` is the current policy, ``past`` an earlier one."""
        return {opponent for stage in self.stages for opponent in stage.mixture}

    def __post_init__(self) -> None:
        check_values(self, "curriculum")
        names = [stage.name for stage in self.stages]
        if not names or len(set(names)) < len(names):
            raise ValueError("stages: give at least one, each with a name of its own")
        for stage in self.stages[:-1]:
            if stage.gate not in stage.mixture:
                raise ValueError(
                    f"stage {stage.name!r} could never be left: gate_opponent must be a fixed opponent that is played"
                )


def pool(game_set: GameSet) -> dict[int, list[TaskRange]]:
    """Return game index -> ranges of task ids that ``game_set`` selects; ValueError: one that does not exist.

    An item is a game's name (all its configurations), ``NAME#CONFIG`` or ``NAME#FIRST-LAST``, a task id or
    ``FIRST-LAST`` as text, or a pair of task ids; a range may span games.
    """
    size, found = games.CONFIGS_PER_GAME, dict[int, list[TaskRange]]()
    for item in game_set:
        first, last = _ids(item) if isinstance(item, str) else item
        if not 0 <= first <= last < len(games.NAMES) * size:
            raise ValueError(f"tasks {[first, last]} are out of range: 0 <= first <= last < {len(games.NAMES) * size}")
        for index in range(first // size, last // size + 1):
            found.setdefault(index, []).append((max(first, index * size), min(last, index * size + size - 1)))
    return found


def _ids(item: str) -> TaskRange:
    """First and last task id of a textual item of a ``GameSet``."""
    name, marked, configs = item.partition("#")
    digits = configs if marked else name
    numbers = None if item in games.NAMES else re.fullmatch("([0-9]{1,99})(?:-([0-9]{1,99}))?", digits)
    if numbers and not marked:
        if numbers[2] is None and 0 < int(numbers[1]) < len(games.NAMES):
            _tell_task(int(numbers[1]))
        return int(numbers[1]), int(numbers[2] or numbers[1])
    start = games.NAMES.index(games.find(name)) * games.CONFIGS_PER_GAME
    first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, games.CONFIGS_PER_GAME - 1)
    if marked and not numbers and configs != "*":  # as in the labels of tables
        raise ValueError(f"{item} is not known: expected NAME#CONFIG, NAME#FIRST-LAST or NAME#*")
    if last >= games.CONFIGS_PER_GAME:
        raise ValueError(f"{item} is out of range: configurations are below {games.CONFIGS_PER_GAME}")
    return start + first, start + last


@cache  # once is enough
def _tell_task(number: int) -> None:
    meant = f"{number} is the task {games.NAMES[0]}#{number}; game {number} is {games.NAMES[number]}"
    logging.getLogger(__name__).warning("%s", meant)


def eval_tasks(game_set: GameSet, n_per_seat: int, seed: int, opponent: str = "random") -> list[Task]:
    """Return ``2 * n_per_seat`` tasks per game, on seeds that training never uses.

    They come in pairs of one task id and two neighbouring seeds, even then odd, so that each pair covers both seats
    (seat = seed % 2 % players). But for their index, a game's tasks do not depend on what else is evaluated.
    """
    tasks: list[Task] = []
    for game, ranges in pool(game_set).items():
        start, taken = ranges[0][0], set[int]()
        key = _EVAL, seed, game if start == game * games.CONFIGS_PER_GAME else -start  # levels of trace share a game
        for k in range(n_per_seat):
            pair, attempt = 0, 0
            while not pair or pair in taken:
                pair = EVAL_SEEDS.start + 2 * int(uniform(*key, k, attempt) * (len(EVAL_SEEDS) // 2))
                attempt += 1
            taken.add(pair)
            task_id = _draw_task(ranges, uniform(*key, k))
            tasks += [Task(task_id, pair + seat, opponent, index=len(tasks) + seat) for seat in (0, 1)]
    return tasks


def evaluated(config: CurriculumConfig, env_type: str) -> list[TaskRange]:
    """First and last task ids to draw the deals of an evaluation from, in the order of the ids.

    Of every game in the stages its first configuration. Of programs, which may ignore seeds, the part of a level that a
    stage names; of parts with the same start the longest.
    """
    played = [ranges for stage in config.stages for ranges in pool(stage.games).values()]
    if env_type == "trace":
        parts = [part for ranges in played for stage_part in ranges for part in level_parts(*stage_part)]
        return sorted(dict(sorted(parts)).items())
    return sorted({(ranges[0][0],) * 2 for ranges in played})


def first_tasks(config: CurriculumConfig, env_type: str) -> list[int]:
    """The first task id of every game, or level of trace, in the stages: the tasks that are evaluated."""
    return [first for first, _ in evaluated(config, env_type)]


class Curriculum:
    """Draws tasks and adapts to their scores.

    ``next`` has no side effects: it depends on (run_seed, index) and on the calls of the other methods, whose effects
    are all in ``state_dict``. A resumed run therefore draws the tasks that the uninterrupted one would have drawn.
    """

    def __init__(self, config: CurriculumConfig, run_seed: int) -> None:
        self.config = config
        self.run_seed = run_seed
        self._stage = 0
        self._episodes = 0
        self._buffer: dict[Key, Entry] = {}  # task -> its last failure
        self._rates: dict[tuple[int, str], float] = {}  # (game index, opponent) -> moving success rate
        self.past: dict[str, float] = {}  # name of each past self -> moving mean of the score against it, oldest first
        self._pools = [pool(stage.games) for stage in config.stages]
        self._weights = [stage.weights for stage in config.stages]
        self._range_weights = [stage.range_weights for stage in config.stages]
        self._window = self._windowed([])

    @property
    def stage(self) -> Stage:
        """The current stage."""
        return self.config.stages[self._stage]

    @property
    def success_rate(self) -> float:
        """Share of successes in the window; 0 if it is empty."""
        return sum(success for _, success in self._window) / max(1, len(self._window))

    @property
    def settled(self) -> bool:
        """Whether the stage has had enough games for its success rate to count."""
        return self._episodes >= self.stage.min_episodes

    @property
    def gate_rate(self) -> float:
        """The success rate of the game won least, which is compared with the stage's threshold.

        In a mean, games that are won would outvote those that are not: docs/log.md, 2026-11-21.
        """
        by_game: dict[int, list[int]] = {game: [] for game in self._pools[self._stage]}
        for game, success in self._window:
            if game in by_game:  # a run may be resumed with other games
                by_game[game].append(success)
        return min(sum(won) / max(GATE_GAMES, len(won)) for won in by_game.values())

    def _windowed(self, results: Iterable[tuple[int, int]]) -> deque[tuple[int, int]]:
        """The latest (game index, 1 for a success), with ``GATE_GAMES`` of the stage's rarest game, or twice as many.

        Learnability draws a game that is always won a fifth as often as one that is won half the time.
        """
        weights = self._weights[self._stage].values()
        spare = 2 if self.config.sampling == "uniform" else 0.25 / LEARNABILITY_FLOOR
        size = min(math.ceil(spare * GATE_GAMES * sum(weights) / min(weights)), LONGEST)
        return deque(results, maxlen=max(WINDOW, size))

    @property
    def rates(self) -> dict[str, float | None]:
        """Both rates as metrics; None if no game has counted yet, as in self-play or after a change of stage."""
        if not self._window:
            return dict.fromkeys(("window_success", "gate_success"))
        return {"window_success": self.success_rate, "gate_success": self.gate_rate}

    def announcement(self, env_type: str = "openspiel") -> str:
        """One line about the current stage: number, name, and (not of trace) games and opponents."""
        name = f"Stage {self._stage + 1}/{len(self.config.stages)}, {self.stage.name}"
        played = ", ".join(games.NAMES[game] for game in self._pools[self._stage])
        return name if env_type == "trace" else f"{name}: {played} against {', '.join(self.stage.mixture)}"

    @property
    def buffer_size(self) -> int:
        """Number of tasks in the failure buffer."""
        return len(self._buffer)

    def next(self, index: int) -> Task:
        """Return the task of draw ``index``: from the failure buffer or from the stage."""
        fresh_seed = int(uniform(_SEED, self.run_seed, index) * len(TRAIN_SEEDS))
        if self._buffer and uniform(_REPLAY, self.run_seed, index) < self.config.failure_replay_prob:
            weights = [1 - score for _, score, _ in self._buffer.values()]
            entry = _choose(list(self._buffer.items()), weights, uniform(_ENTRY, self.run_seed, index))
            (task_id, _, opponent), (seed, _, _) = entry
            seed = seed if self.config.replay_seed == "same" else fresh_seed
            return Task(task_id, seed, opponent, index, replay=True)
        ranges = self._pools[self._stage]
        cells = [(game, opponent) for game in ranges for opponent in self.stage.mixture]
        game, opponent = _choose(cells, [self._weight(*cell) for cell in cells], uniform(_CELL, self.run_seed, index))
        weights = self._range_weights[self._stage][game]
        task_id = _draw_task(ranges[game], uniform(_TASK, self.run_seed, index), weights)
        return Task(task_id, fresh_seed, self._past_self(index) if opponent == "past" else opponent, index)

    def _past_self(self, index: int) -> str:
        """Choose a past self, preferring those that still win; the current policy while there is none.

        The weight (1 - score)^2 is that of prioritised fictitious self-play
        (https://doi.org/10.1038/s41586-019-1724-z, "hard" opponents), with a floor.
        """
        if not self.past:
            return "self"
        weights = [max((1 - score) ** 2, LEARNABILITY_FLOOR) for score in self.past.values()]
        return f"past:{_choose(list(self.past), weights, uniform(_PAST, self.run_seed, index))}"

    def add_past(self, name: str) -> list[str]:
        """Add a past self; return those that had to make room for it, the most beaten ones."""
        removed = []
        while len(self.past) >= PAST_SIZE:
            removed.append(max(self.past, key=self.past.__getitem__))
            del self.past[removed[-1]]
        self.past[name] = 0.5
        return removed

    def update(self, task: Task, score: float | None, drawn_in: Stage | None = None) -> str | None:
        """Take in the result of a task that ``next`` returned; say why that ended the stage, or None if it did not.

        ``score``: None where the game was cut off or failed: it counts only as one that teaches nothing (``_weight``).
        ``drawn_in``: the stage it was drawn in; None: the current one.

        A replay updates only its entry in the failure buffer, since replays would bias the success rate towards hard
        deals. Other games against that stage's gate opponent enter the window, and the buffer if they fail.
        """
        if score is not None and not 0 <= score <= 1:
            raise ValueError(f"score {score!r} of task {task.task_id} is not in [0, 1]")
        success, stage = score is not None and score > SUCCESS, self.config.stages.index(drawn_in or self.stage)
        counts = task.opponent == self.config.stages[stage].gate and _holds(self._pools[stage], task.task_id)
        if score is not None:
            self._update_buffer(task, score, may_enter=counts)
        if task.replay:
            return None
        kind, _, name = task.opponent.partition(":")
        cell = (task.task_id // games.CONFIGS_PER_GAME, "past" if kind == "past" else task.opponent)
        rate = self._rates.get(cell, 0.5)
        self._rates[cell] = rate + RATE_STEP * (success - rate)
        if score is None:
            return None
        if kind == "past" and name in self.past:
            self.past[name] += PAST_STEP * (score - self.past[name])
        # A game drawn before the stage changed, in the same step, says nothing about the new stage.
        if counts and stage == self._stage:
            self._window.append((cell[0], int(success)))
            self._episodes += 1
            return self._maybe_advance()
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return everything that calls have changed, JSON-able and exact."""
        return {
            "stage": self.stage.name,
            "episodes": self._episodes,
            "window": [list(item) for item in self._window],
            "failure_buffer": [[*key, *entry] for key, entry in self._buffer.items()],
            "rates": [[*cell, rate] for cell, rate in self._rates.items()],
            "past": [[name, score] for name, score in self.past.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a ``state_dict``, except for failed tasks that no stage plays any more.

        ConfigError: it is malformed, holds impossible numbers, or names a stage that is not configured.
        """
        names = [stage.name for stage in self.config.stages]
        if isinstance(state, dict) and state.get("stage") not in names:
            problem = f"the run was in stage {state.get('stage')!r}, which is none of {', '.join(names)}"
            raise ConfigError(f"curriculum.stages: {problem}: give the one to go on in that name")
        try:
            stage = names.index(state["stage"])
            episodes = int(state["episodes"])
            window = [(int(game), int(success)) for game, success in state["window"]]
            buffer: dict[Key, Entry] = {}
            for task_id, _, opponent, seed, score, streak in state["failure_buffer"]:
                if seed is not None:
                    seed = TRAIN_SEEDS.index(int(seed))  # itself; ValueError for one that nothing was drawn with
                key = self._key(int(task_id), seed, str(opponent))  # curriculum.replay_seed may have changed
                buffer[key] = (seed, float(score), int(streak))
            rates = {(int(game), str(opponent)): float(rate) for game, opponent, rate in state["rates"]}
            past = {str(name): float(score) for name, score in state.get("past", [])}
            shares = [*rates.values(), *past.values(), *(success for _, success in window)]
            shares += [score for _, score, _ in buffer.values()]
            counts = [episodes, *(streak for _, _, streak in buffer.values())]
            if not all(0 <= share <= 1 for share in shares) or min(counts) < 0:
                raise ValueError("scores, rates and successes are from 0 to 1, counts 0 or more")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
            raise ConfigError(f"curriculum state does not fit the stages {', '.join(names)}: {exc!r}") from exc
        self._stage, self._episodes, self._rates, self.past = stage, episodes, rates, past
        self._window = self._windowed(window)
        # A changed configuration may have no stage in which some of the failures would count.
        stages = list(zip(self.config.stages, self._pools, strict=True))
        self._buffer = {
            key: entry for key, entry in buffer.items()
            if any(key[2] == s.gate and _holds(ranges, key[0]) for s, ranges in stages)
        }  # fmt: skip

    def count_anew(self) -> None:
        """Restart the stage's success rate."""
        self._episodes, self._window = 0, self._windowed([])

    def _weight(self, game: int, opponent: str) -> float:
        weight = self.stage.mixture[opponent] * self._weights[self._stage][game]
        if self.config.sampling == "uniform":
            return weight
        rate = self._rates.get((game, opponent), 0.5)
        return weight * max(rate * (1 - rate), LEARNABILITY_FLOOR)

    def _key(self, task_id: int, seed: int | None, opponent: str) -> Key:
        return task_id, seed if self.config.replay_seed == "same" else None, opponent

    def _update_buffer(self, task: Task, score: float, may_enter: bool) -> None:
        key = self._key(task.task_id, task.seed, task.opponent)
        entry = self._buffer.get(key)
        if score <= SUCCESS:
            if entry or may_enter:
                self._buffer[key] = (task.seed, float(score), 0)
        elif entry:
            # Keep the priority of the last failure: after a win 1 - score is 0, and it would never be drawn again.
            seed, failed_score, streak = entry
            self._buffer[key] = (seed, failed_score, streak + 1)
            if streak + 1 >= FORGIVEN_AFTER:
                del self._buffer[key]
        while len(self._buffer) > BUFFER_SIZE:
            del self._buffer[next(iter(self._buffer))]

    def _maybe_advance(self) -> str | None:
        last, threshold, episodes = self._stage == len(self.config.stages) - 1, self.stage.threshold, self._episodes
        if last or not self.settled or (rate := self.gate_rate) < threshold:
            return None
        self._stage += 1
        self.count_anew()
        return f"success of the game won least {rate:.2f}, threshold {threshold:g}, after {episodes} games"


def _holds(ranges: Mapping[int, Iterable[TaskRange]], task_id: int) -> bool:
    return any(first <= task_id <= last for first, last in ranges.get(task_id // games.CONFIGS_PER_GAME, ()))


def _draw_task(ranges: Sequence[TaskRange], u: float, weights: Sequence[float] = ()) -> int:
    """Return the task id at fraction ``u`` of all ids in ``ranges``, each as long as its weight if there are any."""
    if len(weights) > 1:
        ends = list(accumulate(weights))
        i = next((i for i, end in enumerate(ends) if u * ends[-1] < end), len(ends) - 1)
        ranges, u = ranges[i : i + 1], min(max((u * ends[-1] - ends[i]) / weights[i] + 1, 0.0), 1 - 2**-53)
    position = int(u * sum(last - first + 1 for first, last in ranges))
    for first, last in ranges:
        if position <= last - first:
            return first + position
        position -= last - first + 1
    raise AssertionError("u must be below 1")


def _choose(items: Sequence[Any], weights: Iterable[float], u: float) -> Any:
    """Return the item at fraction ``u`` of the total weight."""
    sums = list(accumulate(weights))
    return next((item for item, total in zip(items, sums, strict=True) if u * sums[-1] < total), items[-1])
