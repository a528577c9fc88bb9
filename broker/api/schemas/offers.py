"""Offers and providers on the wire. Money is a decimal string of dollars, sizes are bytes."""

from datetime import datetime
from decimal import Decimal
from typing import Literal

from broker.api.schemas.base import Wire


class HostFactsView(Wire):
    """Properties of a machine other than its GPUs. null: its cloud does not report them."""

    host: str | None = None
    disk_usd_per_gib_month: Decimal | None = None
    disk_mb_s: float | None = None
    down_mbit_s: float | None = None
    up_mbit_s: float | None = None
    ingress_usd_per_gib: Decimal | None = None
    egress_usd_per_gib: Decimal | None = None
    cuda_max: str | None = None
    driver: str | None = None
    interconnect: str | None = None
    reliability: float | None = None


class OfferView(Wire):
    """One kind of machine that a cloud sells now."""

    id: str
    provider: str
    cloud: str
    region: str
    instance_type: str
    accelerator: str
    gpus: int
    gpu_memory_bytes: int
    vcpus: int
    ram_bytes: int
    disk_bytes: int
    spot: bool
    usd_per_hour: Decimal
    on_demand_usd_per_hour: Decimal | None = None
    billing_quantum_s: int
    available: bool | None = None
    """True if it can be bought now; null: the cloud does not report it."""
    preemptions_per_hour: float | None = None
    emulated_on: str | None = None
    simulated: bool
    """True: no real money, no real cloud."""
    trust: Literal["own", "secure", "community"] | None = None
    """Trust level of the host; null: that of its provider."""
    facts: HostFactsView | None = None
    """Further properties that the cloud reports."""
    source: str = "api"
    """Source of the price: `api` (the cloud's own, live) or `catalog price`."""
    seen_at: datetime


class ProviderStatusView(Wire):
    """State of one provider in the market."""

    name: str
    offers: int
    """Offers for sale now."""
    dropped: dict[str, int]
    """Rejected rows of the provider's listing, by reason."""
    seen_at: datetime | None = None
    """Time of its last answer; null: none yet."""
    error: str | None = None
    """Fault of the latest request; null: it was answered."""


class ProviderView(ProviderStatusView):
    """State of one provider, with the check of its credentials if requested."""

    problem: str | None = None
    """Missing credentials or permissions, with the fix; null: none, or not checked."""
    self_stop: str
    """Way in which a machine ends its own billing without the broker: `instance_key`, `os_shutdown` or `none`."""


class ProviderList(Wire):
    """Every configured provider."""

    items: tuple[ProviderView, ...]


class OfferList(Wire):
    items: tuple[OfferView, ...]
    total: int
    providers: tuple[ProviderStatusView, ...] = ()
    """Providers of the offers; a failing cloud is listed here."""
