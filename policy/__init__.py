"""The player: conversations in, answers out, and the answers scored for PPO.

``player`` acts and scores · ``adapters`` which weights play, to files and back · ``conversations`` what each seat has
read and written · ``chat`` text to tokens, and the tree of legal answers · ``model`` which base, held how · ``network``
tokens through the layers: rows as a ``tree``, a layer's parts in ``lora`` (products with their adapters), ``attention``
and ``layers``, keys and values in the ``cache``, those that a step's updates go on from in ``context`` ·
``cpu_memory`` what is freed · ``vocabulary`` the output layer over all words · ``rehearsal``, ``state_head`` what else
an update teaches · ``bounded`` what templates and adapters may cost · ``vllm_player`` where ``vllm_server``s answer.
Only this package imports transformers, peft, bitsandbytes and trl, but for the few that pyproject.toml names.
"""

from policy.model import LoraConfig, ModelConfig
from policy.player import Evaluation, Policy, load_policy

__all__ = ["Evaluation", "LoraConfig", "ModelConfig", "Policy", "load_policy"]
