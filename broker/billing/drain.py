"""Duration of a drain, and the lead before a limit at which it must begin; `caps.py` holds the formulas."""

from dataclasses import dataclass, replace

from broker.domain.instance import Caps
from broker.domain.job import Attempt
from broker.domain.offer import Offer

MIN_DRAIN_S = 30.0
"""Minimum drain time: the agent must receive the request and finish a step, even after a quick save."""


@dataclass(frozen=True, kw_only=True)
class DrainBudget:
    """Times that the broker itself needs, in seconds; their sum protects the cap."""

    detect_s: float
    """Longest time from the moment at which a drain is due to its start: one billing interval and one round."""
    drain_s: float
    """Longest duration of a drain."""
    teardown_proof_s: float
    """Time from the end of a drain to proven absence, excluding cloud time: detect, destroy, two listings without it.
    """

    @property
    def lead_s(self) -> float:
        """Total of these times, without the cloud's own times. A machine with less time left is drained at once."""
        return self.detect_s + self.drain_s + self.teardown_proof_s


def capped_drain_s(attempt: Attempt, drain_s: float) -> float:
    """Return the drain timeout at the cap: 3 × the last save, or `drain_s` before the first save."""
    saved = attempt.beat.checkpoint if attempt.beat else None
    return min(drain_s, max(MIN_DRAIN_S, 3 * saved.save_s)) if saved else drain_s


def drain_lead_s(attempt: Attempt, caps: Caps, drain_budget: DrainBudget) -> float:
    """Return seconds before the cap at which a drain must start."""
    return lead_s(
        attempt.line.offer, caps, replace(drain_budget, drain_s=capped_drain_s(attempt, drain_budget.drain_s))
    )


def lead_s(offer: Offer, caps: Caps, drain_budget: DrainBudget) -> float:
    """Return the lead before a limit: drain budget, teardown, two list lags and a billing quantum."""
    return drain_budget.lead_s + caps.teardown_s + 2 * caps.list_lag_s + offer.billing_quantum_s
