"""Container tasks as Gymnasium envs, with full checkpoints and recovery true to the model's context."""

import gymnasium

from belayer_env.checkpoint import CheckpointRef
from belayer_env.env import ContainerEnv
from belayer_env.rollback import Conversation, Rollback
from belayer_env.runtimes import TierWarning
from belayer_env.spec import ExecResult, Limits, Task, Tier

__all__ = [
    "CheckpointRef",
    "ContainerEnv",
    "Conversation",
    "ExecResult",
    "Limits",
    "Rollback",
    "Task",
    "Tier",
    "TierWarning",
]

# Without Gymnasium's passive checker: it warns of text that its own Text space cannot hold.
gymnasium.register(
    "belayer/Container-v0", entry_point="belayer_env.env:ContainerEnv", disable_env_checker=True
)
