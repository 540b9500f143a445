"""An agent file for OpenRLHF's rollout actors whose engine is a shadow pair."""

from belayer_integrations.openrlhf import agent_executor

from tests.integrations.openrlhf_env import STEP_LIMIT_S, command, make_env, task_of

MAX_TURNS = 3
MAX_TURN_TOKENS = 80

AgentExecutor = agent_executor(
    task_of,
    max_turns=MAX_TURNS,
    max_turn_tokens=MAX_TURN_TOKENS,
    parse_action=command,
    step_timeout_s=STEP_LIMIT_S,
    env=make_env,
    runtime="runc",
    shadow=True,
)
