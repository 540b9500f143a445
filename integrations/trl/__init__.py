"""Container envs for TRL's GRPOTrainer: a rollout_func and an environment_factory. Imports no TRL itself."""

from belayer_integrations.actions import last_command
from belayer_integrations.errors import TrainerUnavailable
from belayer_integrations.trl.environment import EnvironmentFactory, environment_factory
from belayer_integrations.trl.generation import Generate, Turn, TurnRequest
from belayer_integrations.trl.rollout import RolloutFunc, container_reward, make_rollout_func

__all__ = [
    "EnvironmentFactory",
    "Generate",
    "RolloutFunc",
    "TrainerUnavailable",
    "Turn",
    "TurnRequest",
    "container_reward",
    "environment_factory",
    "last_command",
    "make_rollout_func",
]
