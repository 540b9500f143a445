"""The hook that has dead rollout actors started again. Imports no OpenRLHF until it is called."""

from __future__ import annotations

from belayer_integrations.errors import openrlhf_unavailable

__all__ = ["keep_actors_alive"]


def keep_actors_alive() -> None:
    """From now on `create_vllm_engines` of OpenRLHF, in this process, makes rollout actors that Ray starts
    again when they die, as often as it takes: with the same arguments, in the same placement group. Calls of
    `generate_responses` that were under way go to the new one, and their container episodes are gone on with
    where they were (`agent_executor`), so that whoever waits for their samples just waits longer.

    Call it before the actors are made: in the process that runs `openrlhf.cli.train_ppo_ray`, as
    ``python3 -m belayer_integrations.openrlhf.train`` does. Idempotent.

    Raises:
        TrainerUnavailable: OpenRLHF is not installed."""
    try:
        import ray
        from openrlhf.trainer.ray import vllm_engine
    except ImportError as error:
        raise openrlhf_unavailable(error) from error
    from belayer_integrations.openrlhf.kept_actor import KeptRolloutActor

    if vllm_engine.RolloutRayActor.__ray_metadata__.class_name != KeptRolloutActor.__name__:
        vllm_engine.RolloutRayActor = ray.remote(max_restarts=-1)(KeptRolloutActor)
