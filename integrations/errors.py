"""What all plugs raise where the stack they plug into is not there."""

from __future__ import annotations

from belayer_env.errors import SetupError

__all__ = ["TrainerUnavailable", "openrlhf_unavailable"]


class TrainerUnavailable(SetupError):
    """A trainer's package is wanted, and is not installed."""


def openrlhf_unavailable(error: ImportError) -> TrainerUnavailable:
    """For an import of OpenRLHF that failed: what is missing, and its remedy."""
    return TrainerUnavailable(
        f"{error.name or 'OpenRLHF'} cannot be imported ({error}): pip install openrlhf==0.11.2, or in a "
        "clone of Belayer scripts/install-trainers"
    )
