"""What a client counts, for Prometheus. Seconds. Each client has a registry of its own, so that several of
them in one process do not collide."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from belayer_rollout.routing import BreakerState

__all__ = ["ClientMetrics"]

_SHORT = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_BREAKER_LEVEL = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class ClientMetrics:
    """The metrics of one `RolloutClient`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.requests = Counter(
            "belayer_rollout_requests",
            "Requests that have ended, by how: a finish reason or the name of an error",
            ["outcome"],
            registry=self.registry,
        )
        self.tokens = Counter("belayer_rollout_tokens", "Tokens taken from workers", registry=self.registry)
        self.failovers = Counter(
            "belayer_rollout_failovers",
            "Requests that went on elsewhere, by the fault",
            ["cause"],
            registry=self.registry,
        )
        self.first_token = Histogram(
            "belayer_rollout_first_token_seconds",
            "From sending a request to its first token, queue time included",
            buckets=_LONG,
            registry=self.registry,
        )
        self.token_gap = Histogram(
            "belayer_rollout_token_gap_seconds",
            "Between chunks of one stream (a sample: some of each worker's, several times a second)",
            buckets=_SHORT,
            registry=self.registry,
        )
        self.failover_gap = Histogram(
            "belayer_rollout_failover_gap_seconds",
            "From a fault seen to the request's next token",
            buckets=_LONG,
            registry=self.registry,
        )
        self.commit = Histogram(
            "belayer_rollout_journal_commit_seconds",
            "From handing tokens to the journal until they are durable (a sample)",
            buckets=_SHORT,
            registry=self.registry,
        )
        self.in_flight = Gauge("belayer_rollout_in_flight", "Requests in flight", registry=self.registry)
        self.breaker = Gauge(
            "belayer_rollout_breaker",
            "Circuit breaker of a worker: 0 closed, 1 half-open, 2 open",
            ["worker"],
            registry=self.registry,
        )

    def show_breaker(self, worker: str, state: BreakerState) -> None:
        """A breaker has changed."""
        self.breaker.labels(worker).set(_BREAKER_LEVEL[state])

    def observe_gaps(self, gaps: Iterable[float]) -> None:
        """Some gaps of one worker."""
        for gap in gaps:
            self.token_gap.observe(gap)
