"""The agent file of Belayer's side."""

from belayer_integrations.openrlhf.bench.our_executor import drilled_executor

AgentExecutor = drilled_executor()
