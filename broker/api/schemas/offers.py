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
    identity: str | None = None
    """Source and account of the credentials in use; null: the provider needs none, or they were not checked."""
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


class PricePoint(Wire):
    """Prices of one step of a series. Steps in which the cloud gave no answer have no point."""

    at: datetime
    """Start of the step."""
    lowest_usd: Decimal | None = None
    """Lowest price of a machine in dollars an hour; null: no offer was listed."""
    median_usd: Decimal | None = None
    """Median price of a machine in dollars an hour; null: no offer was listed."""
    available: float | None = None
    """Share of the time in which an offer was for sale, from 0 to 1; null: the cloud does not report it."""


class OfferSeriesView(Wire):
    """History of the offers of one GPU and count in one region and market."""

    provider: str
    cloud: str
    region: str
    accelerator: str
    gpus: int
    spot: bool
    points: tuple[PricePoint, ...]


class OfferHistoryView(Wire):
    """Prices and availability over time, the cheapest series first."""

    since: datetime
    until: datetime
    step_s: int
    """Seconds from one point to the next; a step without a point is unknown."""
    total: int
    """Number of matching series before the limit."""
    items: tuple[OfferSeriesView, ...]
