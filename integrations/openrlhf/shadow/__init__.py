"""A shadow pair in place of the engine of OpenRLHF's rollout actor: it survives its EngineCore's death."""

from belayer_integrations.openrlhf.shadow.options import ShadowOptions, ShadowUnavailable

__all__ = ["ShadowOptions", "ShadowUnavailable"]
