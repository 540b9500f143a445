"""``python3 -m belayer_integrations.openrlhf.train``: OpenRLHF's `openrlhf.cli.train_ppo_ray`, with all its
flags, and rollout actors that are started again when they die (`keep_actors_alive`)."""

from __future__ import annotations

import runpy

from belayer_integrations.openrlhf.keeping import keep_actors_alive

__all__ = ["main"]


def main() -> None:
    """Takes the command line of this process.

    Raises:
        TrainerUnavailable: OpenRLHF is not installed."""
    keep_actors_alive()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
