"""How fast one token may call: a token bucket."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TokenBucketRate:
    """`per_s` calls a second in the long run, `burst` at once."""

    per_s: float
    burst: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """What was left at one moment of a monotonic clock (seconds)."""

    left: float
    at: float


def take(bucket: Bucket | None, rate: TokenBucketRate, now: float) -> tuple[Bucket, float]:
    """(the bucket afterwards, 0 when the call is let through, else the seconds until one will be).

    None is a bucket that was never taken from. A call that is refused takes nothing.
    """
    full = float(rate.burst)
    left = full if bucket is None else min(full, bucket.left + max(0.0, now - bucket.at) * rate.per_s)
    if left >= 1.0:
        return Bucket(left=left - 1.0, at=now), 0.0
    return Bucket(left=left, at=now), (1.0 - left) / rate.per_s
