"""A rollout client whose tokens outlive its workers: durable journal, failover, shadow workers."""
