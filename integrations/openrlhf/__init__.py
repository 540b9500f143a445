"""Container envs for OpenRLHF's agent training: an executor for its rollout actors. Imports no OpenRLHF."""

from belayer_integrations.errors import TrainerUnavailable
from belayer_integrations.openrlhf.attempt import EngineFailed, EpisodeLost
from belayer_integrations.openrlhf.executor import agent_executor, as_user_message
from belayer_integrations.openrlhf.incarnation import ActorKeepsDying
from belayer_integrations.openrlhf.keeping import keep_actors_alive
from belayer_integrations.openrlhf.rollouts import NothingComesBack
from belayer_integrations.openrlhf.sampling import TurnAborted
from belayer_integrations.openrlhf.shadow import ShadowOptions, ShadowUnavailable
from belayer_integrations.openrlhf.weights import ActorRestarted, StaleWeights

__all__ = [
    "ActorKeepsDying",
    "ActorRestarted",
    "EngineFailed",
    "EpisodeLost",
    "NothingComesBack",
    "ShadowOptions",
    "ShadowUnavailable",
    "StaleWeights",
    "TrainerUnavailable",
    "TurnAborted",
    "agent_executor",
    "as_user_message",
    "keep_actors_alive",
]
