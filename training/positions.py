"""Information states of the seats to move, which the state head predicts from their prompts (``ppo.state_coef``)."""

from itertools import chain

import torch
from torch import Tensor

from curriculum import CurriculumConfig, pool
from envs.openspiel import known, load_game, replay, table
from policy.state_head import State
from training.trajectories import Trajectory

SHAPE_TASKS = 64  # of each range, whose tensors are measured before a run; other sizes are not learnt


def known_states(rows: list[Trajectory]) -> list[State]:
    """The seat's information state at each decision (M), found by replaying the game's history up to its ``ply``."""
    found = []
    for row in rows:
        tensors, ply, plies = dict[int, Tensor](), 0, {d.ply for d in row.decisions}
        for state, moves in replay(load_game(row.episode.task.task_id), row.episode.info["history"]):
            if ply in plies:
                tensors[ply] = torch.tensor(known(state, row.seat)).clamp(0, 1)
            ply += len(moves)
        found += [(row.episode.game, tensors[d.ply]) for d in row.decisions]
    return found


def state_shapes(curriculum: CurriculumConfig) -> dict[str, set[int]]:
    """Game -> sizes of its tensors in ``known_states``, from the first ``SHAPE_TASKS`` tasks of each range."""
    shapes: dict[str, set[int]] = {}
    for first, last in chain.from_iterable(r for stage in curriculum.stages for r in pool(stage.games).values()):
        for task_id in range(first, min(last + 1, first + SHAPE_TASKS)):
            if size := len(known(table(task_id).spiel.new_initial_state(), 0)):
                shapes.setdefault(table(task_id).game.name, set()).add(size)
    return shapes
