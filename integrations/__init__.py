"""Belayer's plugs: trainers, agents and benchmarks on container envs and rollout clients."""
