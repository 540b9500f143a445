"""An agent file for OpenRLHF's rollout actors, as a user would write one."""

from belayer_integrations.openrlhf import agent_executor

from tests.integrations.openrlhf_env import (
    MAX_TURN_TOKENS,
    MAX_TURNS,
    STEP_LIMIT_S,
    command,
    make_env,
    task_of,
)

AgentExecutor = agent_executor(
    task_of,
    max_turns=MAX_TURNS,
    max_turn_tokens=MAX_TURN_TOKENS,
    parse_action=command,
    step_timeout_s=STEP_LIMIT_S,
    env=make_env,
    runtime="runc",
)
