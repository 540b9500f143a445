"""An OpenAI-compatible endpoint in front of a rollout client: any client profits from the failover."""

from belayer_rollout.serve.app import make_app, run_app

__all__ = ["make_app", "run_app"]
