"""What faults cost a batch of rollouts: OpenRLHF's own agent function and Belayer's, both in its own actors.
``python -m belayer_integrations.openrlhf.bench``."""
