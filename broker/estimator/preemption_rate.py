"""Expected preemption rate of spot machines: the cloud's figure or an assumption, corrected by own history.

Preemptions of a cloud, region and GPU are modelled as a Poisson process of unknown rate λ. The conjugate prior is
Gamma(α, β). Its mean α / β is the cloud's figure, or the assumption if the cloud has none. After n preemptions in
h machine hours the posterior is Gamma(α + n, β + h), and its mean is the expected rate. See Gelman et al., Bayesian
Data Analysis, 3rd ed., section 2.6. α = 1 [assumed]: the stated rate weighs as much as one observed preemption in the
time it states.

The standard deviation of the rate is its mean / sqrt(α + n). A P90 adds it to the randomness of the count.
"""

from collections.abc import Mapping

from broker.domain.offer import Offer
from broker.domain.workload import SpotHours

ASSUMED_PER_HOUR = 1 / 3.7
"""Assumption if the cloud has no figure: the median time between preemptions of 26 AWS pools was 3.7 h."""
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
"""Failure rate of machines that are never preempted: the unplanned interruptions of Llama 3's training (arXiv
2407.21783, section 3.3.4). Rented hosts may be worse.
"""
STRENGTH = 1.0
"""α of the prior."""
MIN_PER_HOUR = 1e-3
"""Lowest rate of the prior, so that a cloud's lower figure cannot outweigh observed preemptions."""

Place = tuple[str, str, str, str]
"""(provider, cloud, region, accelerator)."""
History = Mapping[Place, SpotHours]


def place_of_offer(offer: Offer) -> Place:
    return offer.provider, offer.cloud, offer.region, offer.accelerator


def place_of(hours: SpotHours) -> Place:
    return hours.provider, hours.cloud, hours.region, hours.accelerator


def expected_per_hour(stated: float | None, history: SpotHours | None) -> float:
    """Return the expected rate of one spot machine.

    More preemptions never lower it, and more hours without a preemption never raise it.
    """
    prior = ASSUMED_PER_HOUR if stated is None else stated
    if history is None:
        return prior
    prior_hours = STRENGTH / max(prior, MIN_PER_HOUR) + history.hours
    posterior = (STRENGTH + history.preemptions) / prior_hours
    return posterior if history.preemptions else min(prior, posterior)


def preemptions_per_s(offer: Offer, history: History) -> float:
    """Return the expected rate of one such machine; 0 on demand."""
    if not offer.spot:
        return 0.0
    stated = offer.preemptions_per_hour
    if not history:  # Shortcut of `expected_per_hour`, because a quote calls this for tens of thousands of offers.
        return (ASSUMED_PER_HOUR if stated is None else stated) / 3600
    return expected_per_hour(stated, history.get(place_of_offer(offer))) / 3600


def failures_per_hour(offer: Offer, nodes: int) -> float:
    """Return the failure rate of all machines of an attempt together, preemptions excluded."""
    return nodes * FAILURES_PER_GPU_HOUR * max(1, offer.gpus)


def losses_per_hour(offer: Offer, history: History, nodes: int) -> float:
    """Return the rate of preemptions and failures of all machines of an attempt; one loss ends the work of all."""
    return nodes * preemptions_per_s(offer, history) * 3600 + failures_per_hour(offer, nodes)


def certainty(offer: Offer, history: History) -> float:
    """Return α + n of the posterior: the relative standard deviation of the expected rate is 1 over its square root."""
    spot_hours = history.get(place_of_offer(offer)) if history and offer.spot else None
    return STRENGTH + (spot_hours.preemptions if spot_hours else 0)


def basis(offer: Offer, history: History) -> str:
    """Return the basis of the rate in words; empty on demand, and if it is the cloud's figure alone."""
    if not offer.spot:
        return ""
    stated, spot_hours = offer.preemptions_per_hour, history.get(place_of_offer(offer))
    assumed = f"one in {1 / ASSUMED_PER_HOUR:.1f} h assumed"
    if spot_hours is None:
        return f"preemptions unknown, {assumed}" if stated is None else ""
    rate = expected_per_hour(stated, spot_hours)
    prior = assumed if stated is None else f"the cloud says {_often(stated)}"
    observed = f"{spot_hours.preemptions} in {spot_hours.hours:.0f} h of own {offer.accelerator} spot machines there"
    return f"preemptions: {_often(rate)} expected by {observed}, where {prior}"


def _often(per_hour: float) -> str:
    return f"one in {1 / per_hour:.1f} h" if per_hour > 0 else "none"
