"""Capacity that can be bought, and the quote that combines it with a job's needs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Literal, NamedTuple

from broker.domain.money import ZERO, usd
from broker.domain.workload import MemoryNeed, Plan, SpeedTier

GB, GIB = 10**9, 1024**3
HOST = "host:"
"""Prefix of the key of a physical host; no offer's id begins with it."""
ACCOUNT = "account:"
"""Prefix of the keys of refusing accounts, which block all offers that depend on them; no offer's id begins with it."""


@dataclass(frozen=True, kw_only=True)
class GpuAsk:
    """Filter of `Provider.offers`; an empty tuple means any."""

    accelerators: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    min_gpus: int = 1


Trust = Literal["own", "secure", "community"]
"""Owner of the host: this installation, a vetted data centre, or anyone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Facts that a cloud lists about a machine other than its GPUs; None: not listed."""

    host: str | None = None
    """The cloud's name of the physical host, for its reputation in our history."""
    disk_usd_per_gib_month: Decimal | None = None
    disk_mb_s: float | None = None
    down_mbit_s: float | None = None
    up_mbit_s: float | None = None
    ingress_usd_per_gib: Decimal | None = None
    egress_usd_per_gib: Decimal | None = None
    cuda_max: str | None = None
    """Newest CUDA that the driver runs, e.g. `12.4`."""
    driver: str | None = None
    interconnect: str | None = None
    """Link between the GPUs of one machine: `nvlink`, `pcie`."""
    reliability: float | None = None
    """Share from 0 to 1, as the cloud states it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskSale:
    """Larger disks that a cloud sells with a machine."""

    max_bytes: int
    """Largest disk of the machine in bytes."""
    usd_per_gib_hour: Decimal


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One kind of machine that a cloud sells now, at one price."""

    id: str
    """Stable while the same machine is for sale: `<provider>/<cloud>/<region>/<type>/<spot|on-demand>`."""
    provider: str
    """Registry key of the provider that creates the machine."""
    cloud: str
    """The cloud that is paid, as shown to users."""
    region: str
    instance_type: str
    accelerator: str
    """Canonical GPU name of the hardware table, e.g. `l40s`; `cpu` for a machine without a GPU."""
    gpus: int
    gpu_memory_bytes: int
    """Bytes of one GPU; for `cpu` the memory of the machine."""
    vcpus: int
    ram_bytes: int
    disk_bytes: int
    spot: bool
    usd_per_hour: Decimal
    on_demand_usd_per_hour: Decimal | None = None
    """On-demand price of the same machine; None: unknown."""
    billing_quantum_s: int = 1
    billed_from: Literal["created", "running"] = "created"
    """Start of billing: the create, or the moment a machine runs."""
    billing_minimum_s: int = 0
    """Minimum seconds that are billed for a machine once it exists."""
    price_moves: bool = False
    """True when the cloud charges the current market price after the purchase, at most the on-demand price."""
    available: bool | None = None
    """True if the cloud reports capacity, False if it reports that the offer is sold out; None: it reports neither."""
    busy_with: str = ""
    """The job that occupies an own machine, if `available` is False; empty: not known."""
    preemptions_per_hour: float | None = None
    """Expected rate; None: unknown or not spot."""
    emulated_on: str | None = None
    """Hardware on which a simulated machine computes, e.g. `cpu`; it determines the time. None: `accelerator`."""
    emulated_vcpus: int = 0
    """Cores of the emulating machine; 0: as many as `vcpus`."""
    simulated: bool = False
    reaches_local_files: bool = False
    """True when the machine can read this host's folders (local, simulated)."""
    ends_at: datetime | None = None
    """Time at which the host's contract with its cloud ends, and the machine with it; None: no end is listed."""
    trust: Trust | None = None
    """None: the `trust` of the provider's caps applies."""
    facts: HostFacts | None = None
    larger_disk: DiskSale | None = None
    """None: no other size than `disk_bytes` is sold."""
    added_disk_usd_per_hour: Decimal = ZERO
    """Part of `usd_per_hour` that pays for a larger disk than the cloud's offer has."""
    purchase: Mapping[str, str] = field(default_factory=dict)
    """Data that only its provider reads to buy exactly this offer: an ask's id, a GPU's own name, the bid."""
    source: str = "api"
    """Origin of the price: `api` (the cloud's own, live) or `catalog price`."""
    seen_at: datetime

    @property
    def names_host(self) -> bool:
        return self.facts is not None and self.facts.host is not None

    @property
    def host_key(self) -> str:
        """Key for history and blocks: the physical host where the cloud names it, otherwise the offer."""
        return f"{HOST}{self.cloud}/{self.facts.host}" if self.facts and self.facts.host is not None else self.id

    def with_disk(self, wanted_bytes: int) -> "Offer":
        """Return the offer with a disk of `wanted_bytes` and its price, or itself if no larger disk is needed or sold.

        The price covers whole GiB. A price of zero stays, because it means that the price is unknown.
        """
        sale = self.larger_disk
        if self.disk_bytes >= wanted_bytes or sale is None or sale.max_bytes < wanted_bytes or self.usd_per_hour <= 0:
            return self
        added = usd(sale.usd_per_gib_hour * -(-(wanted_bytes - self.disk_bytes) // GIB))
        on_demand = self.on_demand_usd_per_hour
        return replace(
            self,
            disk_bytes=wanted_bytes,
            usd_per_hour=self.usd_per_hour + added,
            on_demand_usd_per_hour=None if on_demand is None else on_demand + added,
            added_disk_usd_per_hour=self.added_disk_usd_per_hour + added,
        )


@dataclass(frozen=True, kw_only=True)
class CredentialCheck:
    """Result of a check of one provider's credentials."""

    problem: str | None = None
    """Missing credentials or permissions, with the fix; None: none."""
    identity: str | None = None
    """Source and account of the credentials in use; None: the provider needs none."""


@dataclass(frozen=True, kw_only=True)
class ProviderStatus:
    """Market state of one provider: an unreachable cloud is a status, not an error."""

    name: str
    offers: int = 0
    """Number of offers for sale now."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows of its latest answer that were dropped, by reason."""
    seen_at: datetime | None = None
    """Time of its latest answer; None: none yet."""
    error: str | None = None
    """Why the latest request got no answer, in one line; None: it was answered."""


class OfferVerdict(StrEnum):
    KEPT = "kept"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why an offer was dropped.

    The first reason that applies is used; reasons that pass by themselves come last.
    """

    PROVIDER = "provider"
    ACCELERATOR = "accelerator"
    REGION = "region"
    GPUS = "gpus"
    NODES = "nodes"
    SPOT = "spot"
    UNREACHABLE = "unreachable"
    UNSCOPED = "unscoped"
    NO_TRAINER = "no_trainer"
    NO_IMAGES = "no_images"
    UNKNOWN_HARDWARE = "unknown_hardware"
    MEMORY = "memory"
    HOST = "host"
    TRUST = "trust"
    NO_CHECKPOINTS = "no_checkpoints"
    PRICE = "price"
    HOURLY_LIMIT = "hourly_limit"
    PREEMPTED_TOO_OFTEN = "preempted_too_often"
    CONTRACT = "contract"
    DEADLINE = "deadline"
    CAP = "cap"
    UNAVAILABLE = "unavailable"
    EXCLUDED = "excluded"


@dataclass(frozen=True, kw_only=True)
class CostParts:
    """Components of the expected dollars to finish; P50."""

    machines: Decimal
    """Machine cost, rounded up to whole billing quanta; covers all components of `Hours`."""
    traffic: Decimal
    """Incoming and outgoing traffic, where the cloud charges for it."""
    storage: Decimal
    """Space in the bucket for checkpoints while the job runs."""
    requests: Decimal
    """Requests to the bucket for heartbeats, logs and checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Hours:
    """Components of the expected time; P50."""

    boot: float
    """Time from create to the agent's first heartbeat, including the image."""
    load: float
    """Imports, weights and data."""
    training: float
    evaluation: float
    checkpoints: float
    """Pauses of training for saves, and the last upload."""
    preemptions: float
    """Lost work and changes of machines."""


@dataclass(frozen=True, kw_only=True)
class QuoteLine:
    """One offer assessed for the job: kept with its price to finish, or dropped with the reason."""

    offer: Offer
    verdict: OfferVerdict
    reason: str
    drop: DropReason | None = None
    """None: the line is kept."""
    memory: MemoryNeed | None = None
    hours_p50: float | None = None
    hours_p90: float | None = None
    usd_p50: Decimal | None = None
    """Expected dollars to finish: work, set-up, checkpoints and lost work."""
    usd_p90: Decimal | None = None
    step_s: float | None = None
    evidence: str = ""
    """Evidence behind the speed, in words."""
    tier: SpeedTier | None = None
    """Tier of the same evidence; None: the line is dropped, or its speed is unknown."""
    runs: int = 0
    """Number of own runs on such a GPU behind the speed."""
    nodes: int = 1
    """Machines of this kind that are bought together; every dollar amount is for all of them."""
    plan: Plan | None = None
    """None: the line is dropped, or the workload is unknown."""
    hours: Hours | None = None
    costs: CostParts | None = None
    rows_bytes: int = 0
    """Maximum bytes of tokenised rows that an attempt uploads for later attempts; 0: none."""


class OfferSummary(NamedTuple):
    """Record of an offer that is stored when an attempt is bought."""

    offer: str
    """The offer's id."""
    usd_per_hour: Decimal
    drop: DropReason | None
    """None: the offer was kept."""
    reason: str
    usd_p50: Decimal | None
    """Expected dollars to finish; None: dropped, or unknown."""


@dataclass(frozen=True, kw_only=True)
class SpotOutlook:
    """Expected dollars to finish for each action of a job with a deadline. None: the action could miss the deadline."""

    action: Literal["wait", "on-demand", "spot"]
    """The cheapest choice in time."""
    wait_usd: Decimal | None
    """Wait for sold-out spot, and then take the cheapest action."""
    demand_usd: Decimal | None
    """Buy on demand now, or stay there, and return to spot where that pays."""
    spot_usd: Decimal | None
    """Buy spot now; None also if none is for sale."""
    offer_id: str
    """The best spot offer: for sale if any is."""
    until: datetime
    """Latest time at which an on-demand offer must be bought to meet the deadline."""


@dataclass(frozen=True, kw_only=True)
class SoldOutSpot:
    """The cheapest spot offer that is sold out now, for a job without a deadline."""

    offer_id: str
    usd_p50: Decimal
    """Expected dollars to finish there."""
    hour_worth_usd: Decimal
    """Dollars that an hour of delay is worth; 0: delay costs nothing."""
    waited_s: float
    """Seconds for which the job had no machine so far."""


def _no_offer() -> None:
    """Return None, the answer of a quote without such an offer."""


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """Expected cost and end of a job that starts now by one policy."""

    action: Literal["buy", "wait"]
    market: Literal["spot", "on-demand"]
    """Market of the offer that is bought, or waited for."""
    offer_id: str
    reason: str
    usd_p10: Decimal
    usd_p50: Decimal
    """Expected dollars to finish."""
    usd_p90: Decimal
    finish_p50: datetime | None
    """Expected end. For a wait: the end if spot does not return before the wait is over; None: it has no limit."""
    finish_p90: datetime | None
    deadline_chance: float | None
    """Minimum chance of meeting the deadline, 0 to 1; None: no deadline."""


@dataclass(frozen=True, kw_only=True)
class Quote:
    """All offers, the kept ones first, ordered by the spec's objective."""

    lines: Sequence[QuoteLine]
    """Every offer once. Lines are built on access, since a market has tens of thousands."""
    considered: Callable[[], Iterable[OfferSummary]] = tuple
    """Returns shorter records of the same offers in the same order, faster than `lines` because it builds no lines."""
    made_at: datetime
    expires_at: datetime
    proposed_cap_usd: Decimal | None
    """Money spent already + 1.25 x P90 of the best line; None: no line is kept or its time is unknown."""
    kept_count: int = 0
    drops: Mapping[DropReason, int] = field(default_factory=dict)
    """Number of dropped offers by reason."""
    cheapest_usd: Decimal | None = None
    """Lowest expected dollars to finish on any offer that fits, even above the cap; None: unknown."""
    deadline_at_risk: bool = False
    """True if the P90 of no offer meets the deadline; the P50 of each kept offer does."""
    deadline: datetime | None = None
    """Time by which the job must have saved and drained; None: no deadline."""
    latest_on_demand_start: datetime | None = None
    """Latest time at which on-demand still meets the deadline by its P90; None: no deadline or no such offer."""
    best_on_demand: Callable[[], QuoteLine | None] = _no_offer
    """Returns the first kept on-demand line."""
    sold_out_spot: Callable[[], SoldOutSpot | None] = _no_offer
    """Returns the sold-out spot offer that a job without a deadline may wait for; None: there is none."""
    spot_outlook: SpotOutlook | None = None
    """None: no deadline, no on-demand offer that meets it, or no spot offer below its price."""
    preferred_line: Callable[[], QuoteLine | None] = _no_offer
    """Returns the kept line that the spot policy buys, if something is bought; None: it prefers none."""
    unsold_regions: tuple[str, ...] = ()
    """Regions of the spec without any offer, each with similar names of regions that have offers."""

    @property
    def best(self) -> QuoteLine | None:
        return self.lines[0] if self.lines and self.lines[0].verdict is OfferVerdict.KEPT else None
