"""Offers and providers on the wire. Money is a decimal string of dollars, sizes are bytes."""

from datetime import datetime
from decimal import Decimal
from typing import Literal

from broker.api.schemas.base import Wire


class HostFactsView(Wire):
    """A machine beyond its GPUs; null where its cloud does not say."""

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
    """null: the cloud does not say."""
    preemptions_per_hour: float | None = None
    emulated_on: str | None = None
    simulated: bool
    """True: no real money, no real cloud."""
    trust: Literal["own", "secure", "community"] | None = None
    """null: as its provider is."""
    facts: HostFactsView | None = None
    """What else the cloud says of the machine."""
    source: str = "api"
    """Where the price comes from: `api` (the cloud's own, live) or `catalog price`."""
    seen_at: datetime


class ProviderStatusView(Wire):
    """What the market knows of one provider."""

    name: str
    offers: int
    """For sale now."""
    dropped: dict[str, int]
    """Rows that were left out, by reason."""
    seen_at: datetime | None = None
    """Of its last answer."""
    error: str | None = None
    """Why the latest question got none."""


class ProviderView(ProviderStatusView):
    """With what its credentials are worth, when that was asked."""

    problem: str | None = None
    """What is missing and how to get it; null: nothing, or not asked."""
    self_stop: str
    """How a machine ends its own billing when the broker is gone: `instance_key`, `os_shutdown` or `none`."""


class ProviderList(Wire):
    """Every configured provider."""

    items: tuple[ProviderView, ...]


class OfferList(Wire):
    items: tuple[OfferView, ...]
    total: int
    providers: tuple[ProviderStatusView, ...] = ()
    """Where they come from; a cloud that is down is a line here."""
