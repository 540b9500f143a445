"""The agent file of Belayer's side, with a second engine that takes over from one that dies."""

from belayer_integrations.openrlhf.bench.our_executor import drilled_executor

AgentExecutor = drilled_executor(shadow=True)
