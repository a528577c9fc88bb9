"""How long a drain takes, and how long before a limit it must therefore begin."""

from dataclasses import dataclass, replace

from broker.domain.instance import Caps
from broker.domain.job import Attempt
from broker.domain.offer import Offer

LEAST_DRAIN_S = 30.0
"""The request has to be noticed and a step to be ended, however quick the last save was."""


@dataclass(frozen=True, kw_only=True)
class DrainBudget:
    """How quick the house itself is, in seconds; a cap is held by all of it."""

    detect_s: float
    """From the line that billing watches to the beginning of a drain, at the latest."""
    drain_s: float
    """What a drain may take at the most."""
    teardown_proof_s: float
    """From the end of a drain to a proven absence, less the cloud's own time: to be noticed, destroyed, and left out of
    two listings."""

    @property
    def lead_s(self) -> float:
        """A machine with less time than this is drained as soon as it is bought; the cloud's own time comes on top."""
        return self.detect_s + self.drain_s + self.teardown_proof_s


def capped_drain_s(attempt: Attempt, drain_s: float) -> float:
    """Seconds that a drain for the cap may take: three times the last save where there is one, else `drain_s`."""
    saved = attempt.beat.checkpoint if attempt.beat else None
    return min(drain_s, max(LEAST_DRAIN_S, 3 * saved.save_s)) if saved else drain_s


def drain_lead_s(attempt: Attempt, caps: Caps, drain_budget: DrainBudget) -> float:
    """Seconds before the cap at which a drain must start: tick, drain, hands, teardown, list lag and a quantum."""
    return lead_s(
        attempt.line.offer, caps, replace(drain_budget, drain_s=capped_drain_s(attempt, drain_budget.drain_s))
    )


def lead_s(offer: Offer, caps: Caps, drain_budget: DrainBudget) -> float:
    return drain_budget.lead_s + caps.teardown_s + 2 * caps.list_lag_s + offer.billing_quantum_s
