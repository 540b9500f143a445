"""An inference worker that is killed in mid-generation, and a caller that does not notice. It needs no model:
the two servers make up their tokens, but speak as vLLM's do."""
# ruff: noqa: T201

import asyncio

from belayer_rollout import HttpWorker, RolloutClient, SamplingParams
from belayer_rollout.bench.scripted_process import ScriptedServer


async def main() -> None:
    """Stream 40 tokens; the server that gives them dies after the tenth."""
    with ScriptedServer(pace_s=0.01) as one, ScriptedServer(pace_s=0.01) as other:
        servers = {"one": one, "other": other}
        workers = [HttpWorker(server.url, name=name) for name, server in servers.items()]
        async with RolloutClient(workers) as client:
            tokens = []
            params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            async for chunk in client.stream([1, 2, 3], params, session="episode-3"):
                tokens += chunk.token_ids
                print(chunk.worker, *chunk.token_ids)
                if len(tokens) == 10:
                    servers[chunk.worker].kill()  # SIGKILL
            undisturbed = await client.generate([1, 2, 3], params)
        print("the same as without the fault:", tuple(tokens) == undisturbed.token_ids)


if __name__ == "__main__":
    asyncio.run(main())
