"""Programs as an environment: predict what a Python program prints.

``env`` the environment and the sources of its tasks · ``programs`` an endless stream of them, by level, written with
``writer`` out of ``constructs_easy`` and ``constructs_hard`` · ``prints`` puts debug prints in · ``scoring`` compares
answers · ``sandbox`` runs untrusted programs, each in an ``interpreter`` that ``confine`` locks in.
"""

from envs.config import TraceConfig
from envs.trace.env import TASKS_PER_LEVEL, TraceEnv, check_config, level_parts, load_programs, programs_digest
from envs.trace.prints import inject, inject_safe
from envs.trace.scoring import score

__all__ = [
    "TASKS_PER_LEVEL", "TraceConfig", "TraceEnv", "check_config", "inject", "inject_safe", "level_parts",
    "load_programs", "programs_digest", "score",
]  # fmt: skip
