"""Rate limits by method, as Slack documents them: calls a minute for an app in a workspace, by tier.

`chat.postMessage` is special: about one a second into each channel. Real limits are looser at times, never tighter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

TIERS = {1: 1, 2: 20, 3: 50, 4: 100}
"""Calls a minute."""
METHODS = {
    "apps.connections.open": 1,
    "auth.test": 4,
    "chat.delete": 3,
    "chat.postEphemeral": 4,
    "chat.update": 3,
    "conversations.history": 3,
    "conversations.replies": 3,
    "files.completeUploadExternal": 4,
    "files.getUploadURLExternal": 4,
    "users.info": 4,
}
POST = "chat.postMessage"
POST_BURST = 4.0


@dataclass
class Bucket:
    """Token bucket that refills `rate` tokens a second up to `size`."""

    size: float
    rate: float
    tokens: float
    at: float

    def wait_s(self, now: float) -> float:
        """Take one token and return 0, or return the seconds until a token is available."""
        self.tokens = min(self.size, self.tokens + (now - self.at) * self.rate)
        self.at = now
        if self.tokens >= 1:
            self.tokens -= 1
            return 0.0
        return (1 - self.tokens) / self.rate


@dataclass
class Limits:
    """Rate limits of Slack's methods. `now`: monotonic seconds."""

    now: Callable[[], float]
    enforced: bool = False
    buckets: dict[tuple[str, str], Bucket] = field(default_factory=dict)

    def retry_after(self, method: str, channel: str) -> int:
        """Return whole seconds for `Retry-After`; 0: no wait."""
        if not self.enforced:
            return 0
        key = (method, channel if method == POST else "")
        bucket = self.buckets.get(key)
        if bucket is None:
            bucket = self.buckets[key] = self._fresh(method)
        return math.ceil(bucket.wait_s(self.now()))

    def _fresh(self, method: str) -> Bucket:
        if method == POST:
            return Bucket(size=POST_BURST, rate=1.0, tokens=POST_BURST, at=self.now())
        per_minute = float(TIERS[METHODS[method]])
        return Bucket(size=per_minute, rate=per_minute / 60, tokens=per_minute, at=self.now())
