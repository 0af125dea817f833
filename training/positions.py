"""Information states of the seats to move, which the state head predicts from their prompts (``ppo.state_coef``)."""

import torch
from torch import Tensor

from curriculum import CurriculumConfig, pool
from envs.openspiel import known, load_game, replay, tables
from policy.state_head import State
from training.trajectories import Trajectory


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
    """Game -> sizes of its tensors in ``known_states``, with all parameters that occur in the stages."""
    shapes: dict[str, set[int]] = {}
    ranges = (part for stage in curriculum.stages for parts in pool(stage.games).values() for part in parts)
    for shared in tables(ranges):
        if size := len(known(shared.spiel.new_initial_state(), 0)):
            shapes.setdefault(shared.game.name, set()).add(size)
    return shapes
