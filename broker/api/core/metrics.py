"""Prometheus metrics: requests of this process, and the installation's state at the time of the scrape."""

from collections.abc import Callable
from decimal import Decimal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from broker.domain.job import AttemptState, JobState
from broker.ports import Store

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """Metrics named `gpubroker_*`. Labels are bounded: routes, methods and states, never ids or owners."""

    def __init__(
        self, store: Store, skew: Callable[[], float], streams: Callable[[], int], lag: Callable[[], float]
    ) -> None:
        """Create the metrics.

        `skew()`: seconds that this host's wall clock is ahead of the database's; `streams()`: open streams; `lag()`:
        seconds of the largest lag of the event loop lately.
        """
        self._store = store
        self.registry = CollectorRegistry()
        self._latency = Histogram(
            "gpubroker_http_request_seconds",
            "Time to answer, streams included",
            ("method", "route"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._answers = Counter(
            "gpubroker_http_requests", "Requests answered", ("method", "route", "status"), registry=self.registry
        )
        self._calls = Histogram(
            "gpubroker_grpc_call_seconds",
            "Time to answer, streams included",
            ("method", "code"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._jobs = Gauge("gpubroker_jobs", "Jobs by state", ("state",), registry=self.registry)
        self._attempts = Gauge("gpubroker_attempts", "Attempts by state", ("state",), registry=self.registry)
        self._rate = Gauge("gpubroker_live_usd_per_hour", "Price of all live attempts", registry=self.registry)
        self._charged = Gauge("gpubroker_live_charged_usd", "Charged so far for live attempts", registry=self.registry)
        self._add_gauge("gpubroker_clock_skew_seconds", "This host's wall clock less the database's", skew)
        self._add_gauge(
            "gpubroker_open_streams", "Followers, uploads, downloads and shells over HTTP and gRPC", streams
        )
        self._add_gauge("gpubroker_event_loop_lag_seconds", "Largest lag of the event loop in the last 60 s", lag)

    def _add_gauge(self, name: str, text: str, function: Callable[[], float]) -> None:
        """Add a gauge that is read at each scrape."""
        Gauge(name, text, registry=self.registry).set_function(function)

    def served(self, method: str, route: str, status: int, seconds: float) -> None:
        self._latency.labels(method, route).observe(seconds)
        self._answers.labels(method, route, str(status)).inc()

    def called(self, method: str, code: str, seconds: float) -> None:
        """Count a call of an existing gRPC method."""
        self._calls.labels(method, code).observe(seconds)

    async def render(self) -> bytes:
        """Return the metrics in Prometheus' text format. Raises StoreUnavailable."""
        counts = await self._store.counts()
        for state in JobState:
            self._jobs.labels(state.value).set(counts["jobs"].get(state, 0))
        for phase in AttemptState:
            self._attempts.labels(phase.value).set(counts["attempts"].get(phase, 0))
        live = [leased.attempt for leased in await self._store.sent_attempts()]
        self._rate.set(
            float(sum((a.line.offer.usd_per_hour * a.line.nodes for a in live if a.create_sent_at), Decimal(0)))
        )
        self._charged.set(float(sum((a.charged_usd for a in live), Decimal(0))))
        return generate_latest(self.registry)
