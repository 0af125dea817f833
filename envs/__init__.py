"""The worlds: what the rooms of the project tell each other, and one room an environment.

``types`` of what everything exchanges · ``config`` the knobs · ``openspiel`` games in this process, with
their ``prompts``, ``opponents``, exact values (``exact``) and ``ratings`` · ``affinetes`` games on servers · ``trace``
programs · ``parser`` text to action · ``contract`` what every environment promises, checked by playing. Only this
package imports pyspiel.
"""

from envs.config import EnvConfig, TraceConfig
from envs.types import Action, Decision, Env, Episode, Message, Player, Query, Sequence, Step, Task

__all__ = [
    "Action", "Decision", "Env", "EnvConfig", "Episode", "Message", "Player", "Query", "Sequence", "Step", "Task",
    "TraceConfig",
]  # fmt: skip
