"""Offers of the daemon's host, and the reason why the jobs of a user may not run there.

Used by placement; see `broker.policy.host_access`.
"""

from collections.abc import Mapping, Sequence

from broker.domain.instance import Caps
from broker.domain.offer import Offer
from broker.policy.host_access import HostAccess, HostUser
from broker.ports.policies import JobOwner


def host_offers(offers: Sequence[Offer], caps: Mapping[str, Caps]) -> tuple[str, ...]:
    """Return the ids of the offers whose jobs are processes of the daemon's host."""
    on_host = {name for name, cloud_caps in caps.items() if cloud_caps.runs_on_host}
    return tuple(offer.id for offer in offers if offer.provider in on_host) if on_host else ()


async def refused_offers(access: HostAccess, owner: JobOwner, on_host: Sequence[str]) -> Mapping[str, str]:
    """Return the reason by offer for an owner whose jobs may not run on the daemon's host; empty: they may."""
    if not on_host:
        return {}
    refusal = await host_refusal(access, owner)
    return dict.fromkeys(on_host, refusal) if refusal else {}


async def host_refusal(access: HostAccess, owner: JobOwner) -> str:
    """Return why the jobs of an owner may not run on the daemon's host now; empty: they may."""
    team, name = owner
    admission = await access(HostUser(team=team, owner=name))
    return admission.refusal
