"""Rate limits of the clouds' APIs, which the emulators enforce; no figure of the product goes into them."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.clouds.state import CloudName


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Calls that a cloud accepts within a window."""

    calls: int
    per_s: float
    penalty_s: float = 0.0
    """Seconds for which every further call is refused after a refusal."""
    source: str


LIMITS: Mapping[tuple[CloudName, str], Limit] = {
    ("vast", "bundles"): Limit(calls=10, per_s=60.0, source="vast-ai/docs search_offers.yaml: 10 a minute and address"),
    ("vast", "instances"): Limit(calls=1, per_s=1.0, source="vast-ai/docs show_instances.yaml: 1 s apart"),
    ("vast", "destroy-instance"): Limit(calls=1, per_s=3.0, source="vast-ai/docs auto_delete_api_v0_instances_id: 3"),
    ("vast", "create-instance"): Limit(
        calls=1, per_s=4.5, penalty_s=12.0, source="vast-ai/docs create_instance.yaml: 4.5 s apart, penalty of 12 s"
    ),
    ("lambda", "launch"): Limit(calls=1, per_s=12.0, source="docs.lambda.ai/public-cloud/cloud-api: one in 12 s"),
}
"""Limit by cloud and call; sources read 2026-11-28."""


@dataclass
class RateLimits:
    """Refuses calls above `LIMITS` once `enforced` is true."""

    enforced: bool = False
    """False for tests that make many direct calls, which are about another matter."""
    _sent: dict[tuple[CloudName, str], deque[float]] = field(default_factory=dict)
    _refused_until: dict[tuple[CloudName, str], float] = field(default_factory=dict)

    def accepts(self, cloud: CloudName, call: str, now: float) -> bool:
        """Return False for a call above the limit; `now`: monotonic seconds."""
        limit = LIMITS.get((cloud, call))
        if not self.enforced or limit is None:
            return True
        key, sent = (cloud, call), self._sent.setdefault((cloud, call), deque())
        while sent and now - sent[0] >= limit.per_s:
            sent.popleft()
        if len(sent) >= limit.calls or now < self._refused_until.get(key, now):
            self._refused_until[key] = now + limit.penalty_s
            return False
        sent.append(now)
        return True
