"""How often a spot machine is expected to be taken away: the cloud's word or an assumption, corrected by own history.

Preemptions of a cloud, region and GPU are taken as a Poisson process of unknown rate λ with the conjugate prior
Gamma(α, β) of mean α / β, which is the cloud's figure, or the assumption where it has none. After n preemptions in h
machine hours the posterior is Gamma(α + n, β + h), whose mean is expected (Gelman et al., Bayesian Data Analysis, 3rd
ed., section 2.6). α = 1 [assumed]: the stated rate weighs as much as having seen one preemption in the time it states.

The rate's own standard deviation is its mean / sqrt(α + n): what a P90 takes besides the chance of the number.
"""

from collections.abc import Mapping

from broker.domain.observation import SpotHours
from broker.domain.offer import Offer

ASSUMED_PER_HOUR = 1 / 3.7
"""Where the cloud does not say: the median time between preemptions of 26 AWS pools was 3.7 h."""
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
"""Of machines that nobody takes away: the interruptions of Llama 3's training that were not planned (arXiv 2407.21783,
section 3.3.4). Rented hosts may be worse."""
STRENGTH = 1.0
"""α."""
LEAST_PER_HOUR = 1e-3
"""A stated rate below this is no reason to disbelieve preemptions that were seen."""

Place = tuple[str, str, str, str]
"""(provider, cloud, region, accelerator)."""
History = Mapping[Place, SpotHours]


def place(offer: Offer) -> Place:
    return offer.provider, offer.cloud, offer.region, offer.accelerator


def place_of(seen: SpotHours) -> Place:
    return seen.provider, seen.cloud, seen.region, seen.accelerator


def expected_per_hour(stated: float | None, seen: SpotHours | None) -> float:
    """Of one spot machine. More preemptions never give less, more hours without one never give more."""
    prior = ASSUMED_PER_HOUR if stated is None else stated
    if seen is None:
        return prior
    hours = STRENGTH / max(prior, LEAST_PER_HOUR) + seen.hours
    known = (STRENGTH + seen.preemptions) / hours
    return known if seen.preemptions else min(prior, known)


def preemptions_per_s(offer: Offer, history: History) -> float:
    """Expected of one such machine; 0 on demand."""
    if not offer.spot:
        return 0.0
    stated = offer.preemptions_per_hour
    if not history:  # As `expected_per_hour` says; this is asked for each of tens of thousands of offers.
        return (ASSUMED_PER_HOUR if stated is None else stated) / 3600
    return expected_per_hour(stated, history.get(place(offer))) / 3600


def failures_per_hour(offer: Offer, nodes: int) -> float:
    """Of machines that nobody takes away, all of an attempt together."""
    return nodes * FAILURES_PER_GPU_HOUR * max(1, offer.gpus)


def losses_per_hour(offer: Offer, history: History, nodes: int) -> float:
    """Of all machines of an attempt together: one that is taken away or fails ends the work of all."""
    return nodes * preemptions_per_s(offer, history) * 3600 + failures_per_hour(offer, nodes)


def certainty(offer: Offer, history: History) -> float:
    """α + n of the posterior: the expected rate's standard deviation is the rate over the root of this."""
    seen = history.get(place(offer)) if history and offer.spot else None
    return STRENGTH + (seen.preemptions if seen else 0)


def basis(offer: Offer, history: History) -> str:
    """What is expected rests on this, in words; empty where it is the cloud's figure alone, or on demand."""
    if not offer.spot:
        return ""
    stated, seen = offer.preemptions_per_hour, history.get(place(offer))
    assumed = f"one in {1 / ASSUMED_PER_HOUR:.1f} h assumed"
    if seen is None:
        return f"preemptions unknown, {assumed}" if stated is None else ""
    rate = expected_per_hour(stated, seen)
    prior = assumed if stated is None else f"the cloud says {_often(stated)}"
    own = f"{seen.preemptions} in {seen.hours:.0f} h of own {offer.accelerator} spot machines there"
    return f"preemptions: {_often(rate)} expected by {own}, where {prior}"


def _often(per_hour: float) -> str:
    return f"one in {1 / per_hour:.1f} h" if per_hour > 0 else "none"
