"""What a seat knew when it was asked, as numbers to be told from its prompt (``ppo.state_coef``)."""

from itertools import chain

import torch
from torch import Tensor

from curriculum import CurriculumConfig, pool
from envs.openspiel import known, load_game, replay, table
from policy.state_head import State
from training.trajectories import Trajectory

SHAPE_TASKS = 64  # of each range, whose tensors are measured before a run; what has another size is not learnt


def known_states(rows: list[Trajectory]) -> list[State]:
    """What its seat knew at each decision (M): the game is played again from its history, which ``ply`` counts in."""
    found = []
    for row in rows:
        asked, ply, plies = dict[int, Tensor](), 0, {d.ply for d in row.decisions}
        for state, moves in replay(load_game(row.episode.task.task_id), row.episode.info["history"]):
            if ply in plies:
                asked[ply] = torch.tensor(known(state, row.seat)).clamp(0, 1)
            ply += len(moves)
        found += [(row.episode.game, asked[d.ply]) for d in row.decisions]
    return found


def state_shapes(curriculum: CurriculumConfig) -> dict[str, set[int]]:
    """The sizes of what ``known_states`` tells of each game: of the first ``SHAPE_TASKS`` tasks of each range."""
    shapes: dict[str, set[int]] = {}
    for first, last in chain.from_iterable(r for stage in curriculum.stages for r in pool(stage.games).values()):
        for task_id in range(first, min(last + 1, first + SHAPE_TASKS)):
            if size := len(known(table(task_id).spiel.new_initial_state(), 0)):
                shapes.setdefault(table(task_id).game.name, set()).add(size)
    return shapes
