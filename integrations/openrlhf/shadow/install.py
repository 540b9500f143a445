"""A shadow pair put where OpenRLHF's rollout actor makes its engine, for that one call."""

from __future__ import annotations

from typing import Any

from belayer_integrations.openrlhf.shadow.options import ShadowOptions, ShadowUnavailable

__all__ = ["engine_of", "install"]

_NAME = "AsyncLLMEngine"


def install(options: ShadowOptions) -> bool:
    """Let the next ``vllm.AsyncLLMEngine.from_engine_args`` of this process make a shadow pair's facade; the
    one after it makes vLLM's own again. Does nothing, and says so, outside of a Ray actor: there it would be
    somebody else's engine."""
    import ray
    import vllm

    if not (ray.is_initialized() and ray.get_runtime_context().get_actor_id()):
        return False
    had_one, before = _NAME in vars(vllm), vars(vllm).get(_NAME)

    def restore() -> None:
        if had_one:
            setattr(vllm, _NAME, before)
        else:
            vars(vllm).pop(_NAME, None)

    class Once:
        """In place of vLLM's class."""

        @staticmethod
        def from_engine_args(engine_args: Any) -> Any:
            """One facade."""
            from belayer_integrations.openrlhf.shadow.engine import ShadowEngine

            restore()
            return ShadowEngine.from_engine_args(engine_args, options)

    setattr(vllm, _NAME, Once)
    return True


def engine_of(actor: Any) -> Any:
    """The facade in a rollout actor.

    Raises:
        ShadowUnavailable: the actor made itself another engine."""
    from belayer_integrations.openrlhf.shadow.engine import ShadowEngine

    engine = getattr(actor, "llm", None)
    if not isinstance(engine, ShadowEngine):
        raise ShadowUnavailable(
            f"shadow=True, and the rollout actor has {type(engine).__name__} for an engine: this is not the "
            "OpenRLHF that it was made for, 0.11.2"
        )
    return engine
