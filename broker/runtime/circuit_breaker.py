"""When a cloud may be asked again: its own word (Retry-After), and a breaker for one that does not answer."""

from dataclasses import dataclass, replace

SILENT = 3
"""Calls in a row without an answer after which a cloud is not waited for any more."""
PAUSE_MAX_S = 300.0
"""Longest pause that a cloud's word is obeyed for: machines bill meanwhile, and are not watched."""


@dataclass(frozen=True, kw_only=True)
class BreakerState:
    """`again_at`: seconds of a monotonic clock before which the cloud wants no call."""

    again_at: float = float("-inf")
    throttled: int = 0
    """Times in a row."""
    silent: int = 0
    """Calls in a row without an answer."""

    @property
    def broken(self) -> bool:
        """Nobody waits for it; somebody tries now and then whether it is back."""
        return self.silent >= SILENT

    def wait_s(self, now: float, *, yields_s: float = 0.0) -> float:
        """0: the cloud may be asked. `yields_s`: how much longer whoever asks leaves it to others, once it refused."""
        return max(0.0, self.again_at + (yields_s if self.throttled else 0.0) - now)


def after_answer(pace: BreakerState) -> BreakerState:
    """It answered, whatever it said."""
    return replace(pace, throttled=0, silent=0)


def after_throttled(pace: BreakerState, now: float, *, asked_s: float, jitter_s: float) -> BreakerState:
    """No sooner than it asked for, and `jitter_s` of back-off: clients that were refused together come back apart."""
    pause_s = min(PAUSE_MAX_S, asked_s + jitter_s)
    return replace(pace, again_at=max(pace.again_at, now + pause_s), throttled=pace.throttled + 1, silent=0)


def after_silence(pace: BreakerState) -> BreakerState:
    return replace(pace, silent=pace.silent + 1)
