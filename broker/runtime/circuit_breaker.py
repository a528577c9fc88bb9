"""Pause after refusals of a cloud (Retry-After plus back-off), and a circuit breaker for a cloud without answers."""

from dataclasses import dataclass, replace

SILENT = 3
"""Number of consecutive calls without an answer after which the breaker opens."""
PAUSE_MAX_S = 300.0
"""Longest pause in seconds after a refusal, even if the cloud asks for more: machines bill unwatched meanwhile."""


@dataclass(frozen=True, kw_only=True)
class BreakerState:
    """State of the circuit breaker for one kind of calls to a cloud."""

    again_at: float = float("-inf")
    """Earliest time of the next call after a refusal, in seconds of a monotonic clock."""
    throttled: int = 0
    """Number of consecutive refusals."""
    silent: int = 0
    """Number of consecutive calls without an answer."""

    @property
    def broken(self) -> bool:
        """True if the breaker is open: calls fail at once, and a background task probes the cloud."""
        return self.silent >= SILENT

    def wait_s(self, now: float, *, yields_s: float = 0.0) -> float:
        """Return the seconds until the next call; 0: now. `yields_s`: extra delay after a refusal, for other calls."""
        return max(0.0, self.again_at + (yields_s if self.throttled else 0.0) - now)


def after_answer(state: BreakerState) -> BreakerState:
    """Return the state after an answer of any kind."""
    return replace(state, throttled=0, silent=0)


def after_throttled(state: BreakerState, now: float, *, asked_s: float, jitter_s: float) -> BreakerState:
    """Return the state after a refusal: pause for `asked_s`, plus `jitter_s` to spread the retries of clients."""
    pause_s = min(PAUSE_MAX_S, asked_s + jitter_s)
    return replace(state, again_at=max(state.again_at, now + pause_s), throttled=state.throttled + 1, silent=0)


def after_silence(state: BreakerState) -> BreakerState:
    """Return the state after a call without an answer."""
    return replace(state, silent=state.silent + 1)
