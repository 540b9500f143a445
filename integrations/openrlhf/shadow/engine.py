"""What OpenRLHF's rollout actor takes for its vLLM engine: a rollout client over a shadow pair. Seconds."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belayer_integrations.openrlhf.bubbles import SESSION
from belayer_integrations.openrlhf.shadow.options import (
    PairArguments,
    ShadowOptions,
    ShadowUnavailable,
    pair_arguments,
)
from belayer_integrations.openrlhf.shadow.receiver import WeightReceiver
from belayer_integrations.openrlhf.shadow.requests import Seeds, asked, output_of

from belayer_rollout import RolloutClient, ShadowPair
from belayer_rollout.drive import Budget
from belayer_rollout.errors import UpdateFailed
from belayer_rollout.pace import PaceLimits
from belayer_rollout.pair_engine import EngineFactory
from belayer_rollout.pair_state import PairState
from belayer_rollout.types import Generation

if TYPE_CHECKING:
    from vllm import RequestOutput

__all__ = ["ShadowEngine"]

log = logging.getLogger(__name__)

UPDATES_TRIED = 3
"""A shadow that dies while it loads an update fails that one: the next engine loads it."""

PACE = PaceLimits(
    # The pair watches its engine itself; what is left to the client are streams that an engine forgot.
    floor_s=60.0,
    ceiling_s=120.0,
    unlearnt_s=60.0,
    first_token_s=120.0,
    probe_s=60.0,
    lost_s=3600.0,
    queue_s=math.inf,  # a batch of rollouts is sent at once
)


class ShadowEngine:
    """The part of vLLM's `AsyncLLM` that `RolloutRayActor` calls, by the same names. One event loop, that of
    the first call, in which the pair is started.

    No journal on disk: what an actor's death would leave in one, nobody would take up, as its requests are
    those of its own episodes. Tokens so far are in its memory, which is what outlives an engine."""

    def __init__(
        self,
        arguments: PairArguments,
        tokenizer: Any,
        options: ShadowOptions,
        *,
        memory: str = "host",
        make_engine: EngineFactory | None = None,
    ) -> None:
        """``memory``, ``make_engine``: as `ShadowPair`'s."""
        self.pair = ShadowPair(
            arguments.model,
            engine_args=arguments.engine_args,
            memory=memory,
            stall_s=options.stall_s,
            wait_s=options.wait_s,
            make_engine=make_engine,
        )
        self.output_processor = _Count()
        self._arguments = arguments
        self._options = options
        self._tokenizer = tokenizer
        self._tokenizer_end = getattr(tokenizer, "eos_token_id", None)
        self._seeds = Seeds(arguments.seed)
        self._receiver = WeightReceiver(self._place, self._put_in_force)
        self._client: RolloutClient | None = None
        self._starting = asyncio.Lock()

    @classmethod
    def from_engine_args(cls, engine_args: Any, options: ShadowOptions) -> ShadowEngine:
        """In place of vLLM's own; starts nothing yet.

        Raises:
            ShadowUnavailable: an argument cannot be honoured."""
        from transformers import AutoTokenizer
        from vllm.platforms import current_platform

        is_cuda = bool(current_platform.is_cuda())
        # Its __post_init__ changes some: compare with one that went through it, too.
        default = type(engine_args)(model=engine_args.model)
        changed = {
            field.name: value
            for field in fields(engine_args)
            if (value := getattr(engine_args, field.name)) != getattr(default, field.name)
        }
        arguments = pair_arguments(engine_args.model, changed, os.environ, options=options, is_cuda=is_cuda)
        tokenizer = AutoTokenizer.from_pretrained(
            engine_args.tokenizer or engine_args.model,
            trust_remote_code=engine_args.trust_remote_code,
            revision=engine_args.tokenizer_revision or engine_args.revision,
        )
        return cls(arguments, tokenizer, options, memory="cuda:0" if is_cuda else "host")

    async def is_sleeping(self) -> bool:
        """No. The actor's first call, before it takes any other: the pair is started here.

        Raises:
            RolloutError: it cannot be."""
        await self._started()
        return False

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """The request's output, once it has ended, whatever has become of engines meanwhile.

        Raises:
            ShadowUnavailable: there are images.
            InvalidRequest: the parameters ask for what a pair does not give.
            RolloutError: the engine refuses the request, or is lost for good."""
        if prompt.get("multi_modal_data"):
            raise ShadowUnavailable("shadow=True does not go together with images")
        ids: Sequence[int] = prompt["prompt_token_ids"]
        self.output_processor.num_unfinished += 1
        try:
            client = await self._started()
            info = await client.model_info()
            version = await self.pair.weight_version()
            params = asked(
                sampling_params,
                prompt=ids,
                seed=lambda: self._seeds.draw(ids, version),
                max_model_len=info.max_model_len,
                end_tokens=info.eos_token_ids,
                tokenizer_end=self._tokenizer_end,
                has_processed_logprobs=self._arguments.has_processed_logprobs,
            )
            made = await self._unless_broken(client.generate(ids, params, session=SESSION.get()))
        finally:
            self.output_processor.num_unfinished -= 1
        yield output_of(
            made,
            sampling_params,
            self._tokenizer,
            request_id=request_id,
            tokenizer_end=self._tokenizer_end,
        )

    def hint_bubble(self, session: str) -> float | None:
        """Seconds until that session's running request is likely to end; see `RolloutClient.hint_bubble`."""
        return None if self._client is None else self._client.hint_bubble(session)

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """Upstream's calls into its worker extension, of which those for weights over a group have a meaning
        here; see `WeightReceiver`.

        Raises:
            ShadowUnavailable: another one.
            RolloutError: an update could not be put in force; the weights of before are."""
        if method == "init_process_group":
            await self._receiver.join(*args)
            return [None]
        if method == "update_weight":
            await self._receiver.receive(*args)
            return [None]
        if method == "update_weight_cuda_ipc":
            raise ShadowUnavailable(
                "shadow=True does not go together with weights over CUDA IPC: leave out "
                "--train.colocate_all, or train with --train.async_enable"
            )
        raise ShadowUnavailable(f"shadow=True knows no {method!r} of OpenRLHF's engines: made for 0.11.2")

    async def pause_generation(self, *, mode: str = "keep", clear_cache: bool = True) -> None:
        """No token until `resume_generation`; requests stay. KV goes with the weights that it is of, and not
        here.

        Raises:
            ShadowUnavailable: another mode than "keep"."""
        if mode != "keep":
            raise ShadowUnavailable(f"shadow=True knows only pauses that keep requests, not {mode!r}")
        await self._started()
        await self.pair.pause()

    async def resume_generation(self) -> None:
        """Go on."""
        await self.pair.resume()

    async def reset_prefix_cache(self) -> bool:
        """Nothing to do: the pair drops what it cached whenever its weights change."""
        return True

    async def sleep(self, level: int = 1) -> None:
        """Raises:
        ShadowUnavailable: always."""
        raise ShadowUnavailable("shadow=True does not go together with --vllm.enable_sleep")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """It never sleeps."""

    async def close(self) -> None:
        """End it. Upstream never does: its actors are killed, and everything of the pair ends with them."""
        if self._client is not None:
            await self._client.aclose()

    async def _unless_broken(self, generating: Coroutine[Any, Any, Generation]) -> Generation:
        """What comes of it; or, once no engine can be built any more, why: nothing is left to try then."""
        request = asyncio.ensure_future(generating)
        broken = asyncio.ensure_future(self.pair.wait_for(PairState.BROKEN, timeout_s=math.inf))
        try:
            await asyncio.wait({request, broken}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                await self.pair.weight_version()  # raises the reason
            return await request
        finally:
            broken.cancel()
            if not request.done():
                request.cancel()
                await asyncio.wait({request})

    async def _started(self) -> RolloutClient:
        if self._client is None:
            async with self._starting:
                if self._client is None:
                    wait_s = self._options.wait_s
                    client = RolloutClient(
                        [self.pair],
                        tokenizer=self._tokenizer,
                        pace=PACE,
                        budget=Budget(seconds=2 * wait_s),
                        max_in_flight=1 << 20,
                    )
                    try:
                        await client.start()
                    except BaseException:
                        await client.aclose()
                        raise
                    self._client = client
        return self._client

    def _place(self) -> Path:
        if self.pair.directory is None:
            raise RuntimeError("the pair was not started")
        return self.pair.directory

    async def _put_in_force(self, directory: Path) -> None:
        version = await self.pair.weight_version() + 1
        for tries_left in reversed(range(UPDATES_TRIED)):
            try:
                await self.pair.update_weights(version, directory)
            except UpdateFailed as error:
                if not tries_left:
                    raise
                log.warning("weights %d are loaded again: %s", version, error)
            else:
                return


class _Count:
    """Stands for vLLM's output processor."""

    def __init__(self) -> None:
        self.num_unfinished = 0

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return self.num_unfinished
