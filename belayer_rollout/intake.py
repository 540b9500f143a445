"""From what a caller asks, or a journal has, to a run. Pure: nothing is sent, nothing is awaited."""

from __future__ import annotations

import operator
import uuid
from collections.abc import Sequence
from dataclasses import replace

from belayer_rollout.continuation import Done
from belayer_rollout.errors import InvalidRequest
from belayer_rollout.journal_base import LoggedRequest
from belayer_rollout.outlet import Outlet
from belayer_rollout.run import Run
from belayer_rollout.stops import StopWatch
from belayer_rollout.text import TextDecoder, decode_function
from belayer_rollout.types import Generation, ModelInfo, OnVersionChange, SamplingParams

__all__ = ["checked_rule", "finished", "run_of", "take_up"]

RULES = ("continue", "restart", "fail")


def checked_rule(rule: OnVersionChange) -> OnVersionChange:
    """The rule.

    Raises:
        InvalidRequest: there is no such rule."""
    if rule not in RULES:
        raise InvalidRequest(f"on_version_change is one of {RULES}, not {rule!r}")
    return rule


def run_of(
    prompt: Sequence[int],
    params: SamplingParams,
    session: str,
    request_id: str | None,
    rule: OnVersionChange,
    *,
    tokenizer: TextDecoder | None,
    inexact: Sequence[str],
    outlet: Outlet | None = None,
) -> Run:
    """The request as a run; ``inexact``: the workers that do not honour ``exact_resume``.

    Raises:
        InvalidRequest: it cannot be honoured."""
    try:
        token_ids = tuple(map(operator.index, prompt))
    except TypeError as error:
        raise InvalidRequest(f"prompt_token_ids must be integers: {error}") from error
    if not token_ids or min(token_ids) < 0:
        raise InvalidRequest("prompt_token_ids must hold at least one id, and none below 0")
    if params.exact_resume and inexact:
        raise InvalidRequest(f"exact_resume is asked for, and these workers lack it: {', '.join(inexact)}")
    if not params.stop:
        watch_stops = None
    elif tokenizer is None:
        raise InvalidRequest("stop strings need RolloutClient(tokenizer=...)")
    else:
        decode = decode_function(tokenizer, skip_special_tokens=params.extra.get("skip_special_tokens", True))

        def watch_stops() -> StopWatch:
            return StopWatch(decode, token_ids, params.stop, min_tokens=params.min_tokens)

    return Run(
        request_id or uuid.uuid4().hex,
        session,
        token_ids,
        params,
        checked_rule(rule),
        watch_stops=watch_stops,
        outlet=outlet,
        has_id=request_id is not None,
    )


def take_up(run: Run, logged: LoggedRequest, info: ModelInfo) -> Generation | Done | None:
    """Go on from what the journal has: the generation if it has ended, the end if its tokens are at one, None
    if there is more to generate. A stream begins with those tokens.

    Raises:
        InvalidRequest: the journal's request is another one."""
    asked = run.params if run.params.seed is not None else replace(run.params, seed=logged.params.seed)
    if (run.session, run.prompt, asked) != (logged.session, tuple(logged.prompt_token_ids), logged.params):
        raise InvalidRequest(f"the journal has another request under the id {run.request_id!r}")
    run.params, run.failovers, run.is_open = asked, logged.failovers, True
    ended = finished(run, logged)
    found = None if ended else run.restore([chunk for _, chunk in logged.chunks], info)
    if run.outlet is not None:
        for chunk in run.chunks(ended):
            run.outlet.put(chunk, None)
    return ended or found


def finished(run: Run, logged: LoggedRequest) -> Generation | None:
    """The generation of a journalled request; None if it has not ended."""
    if logged.finish_reason is None:
        return None
    run.stops = None
    run.failovers = logged.failovers
    run.restore([chunk for _, chunk in logged.chunks], ModelInfo())
    return run.generation(Done(logged.finish_reason, logged.stop_reason))
