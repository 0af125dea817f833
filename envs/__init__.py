"""The environments, and the types that the rest of the project exchanges with them.

``types`` what is exchanged · ``config`` the knobs · ``openspiel`` games in this process, with their ``prompts``,
``opponents``, exact values (``exact``) and ``ratings`` · ``affinetes`` games on servers, through ``client`` and
``server_replies`` · ``trace`` programs · ``parser`` text to action · ``contract`` what every environment promises,
checked by playing. Only this package imports pyspiel.
"""

from envs.config import EnvConfig, TraceConfig
from envs.types import Action, Decision, Env, Episode, Message, Player, Query, Sequence, Step, Task

__all__ = [
    "Action", "Decision", "Env", "EnvConfig", "Episode", "Message", "Player", "Query", "Sequence", "Step", "Task",
    "TraceConfig",
]  # fmt: skip
