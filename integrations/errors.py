"""What all plugs raise where the stack they plug into is not there."""

from __future__ import annotations

from belayer_env.errors import SetupError

__all__ = ["TrainerUnavailable"]


class TrainerUnavailable(SetupError):
    """A trainer's package is wanted, and is not installed."""
