"""Container envs for OpenRLHF's agent training: an executor for its rollout actors. Imports no OpenRLHF."""

from belayer_integrations.errors import TrainerUnavailable
from belayer_integrations.openrlhf.attempt import EngineFailed, EpisodeLost
from belayer_integrations.openrlhf.executor import agent_executor, as_user_message
from belayer_integrations.openrlhf.rollouts import NothingComesBack
from belayer_integrations.openrlhf.sampling import TurnAborted
from belayer_integrations.openrlhf.shadow import ShadowOptions, ShadowUnavailable

__all__ = [
    "EngineFailed",
    "EpisodeLost",
    "NothingComesBack",
    "ShadowOptions",
    "ShadowUnavailable",
    "TrainerUnavailable",
    "TurnAborted",
    "agent_executor",
    "as_user_message",
]
