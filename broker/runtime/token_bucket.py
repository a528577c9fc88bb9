"""Token bucket: rate limit of API tokens and of calls to a cloud."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TokenBucketRate:
    """Limit of a token bucket."""

    per_s: float
    """Average calls a second."""
    burst: int
    """Calls that may come at once."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Fill level of a token bucket at one moment."""

    left: float
    """Calls that were left at `at`."""
    at: float
    """Time of a monotonic clock in seconds."""


def take(bucket: Bucket | None, rate: TokenBucketRate, now: float) -> tuple[Bucket, float]:
    """Return the bucket after the call, and the seconds to wait: 0 if the call is allowed.

    `bucket` None: a bucket that was never used. A refused call takes nothing from the bucket.
    """
    full = float(rate.burst)
    left = full if bucket is None else min(full, bucket.left + max(0.0, now - bucket.at) * rate.per_s)
    if left >= 1.0:
        return Bucket(left=left - 1.0, at=now), 0.0
    return Bucket(left=left, at=now), (1.0 - left) / rate.per_s
