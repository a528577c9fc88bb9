"""Capacity that can be bought, and the quote that joins it with what a job needs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Literal, NamedTuple

from broker.domain.workload import MemoryNeed, Plan, SpeedTier

GIB = 1024**3
HOST = "host:"
"""Begins the key of a physical host; no offer's id does."""
ACCOUNT = "account:"
"""Begins the keys of an account that refuses, which block all offers that depend on it; no offer's id does."""


@dataclass(frozen=True, kw_only=True)
class GpuAsk:
    """What `Provider.offers` is asked for: empty tuples mean any."""

    accelerators: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    min_gpus: int = 1


Trust = Literal["own", "secure", "community"]
"""Whose host it is: ours, a data centre that the cloud answers for, or anybody's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """What a cloud says of a machine beyond its GPUs; None where it does not say."""

    host: str | None = None
    """The cloud's name of the physical host, for a score from own history."""
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
    """Between the GPUs of one machine: `nvlink`, `pcie`."""
    reliability: float | None = None
    """0..1, as the cloud states it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One kind of machine that a cloud sells now, at one price."""

    id: str
    """Stable while the same thing is for sale: `<provider>/<cloud>/<region>/<type>/<spot|on-demand>`."""
    provider: str
    """Key in the registry: who creates it."""
    cloud: str
    """Whom the money goes to, as shown to people."""
    region: str
    instance_type: str
    accelerator: str
    """Canonical GPU name of the hardware table, e.g. `l40s`; `cpu` for a machine without one."""
    gpus: int
    gpu_memory_bytes: int
    """Of one GPU; for `cpu` the memory of the machine."""
    vcpus: int
    ram_bytes: int
    disk_bytes: int
    spot: bool
    usd_per_hour: Decimal
    on_demand_usd_per_hour: Decimal | None = None
    """Of the same machine; None when unknown."""
    billing_quantum_s: int = 1
    billed_from: Literal["created", "running"] = "created"
    """When the cloud begins to count: at the create, or once a machine runs."""
    billing_minimum_s: int = 0
    """The least that a machine is billed for once it stands."""
    price_moves: bool = False
    """The cloud goes on charging the market's price after the purchase, at most the on-demand price."""
    available: bool | None = None
    """None: the cloud does not say."""
    preemptions_per_hour: float | None = None
    """Expected rate; None when unknown or not spot."""
    emulated_on: str | None = None
    """Simulated machines compute on this hardware instead (`cpu`), so time is estimated for it."""
    emulated_vcpus: int = 0
    """Cores of the emulating machine; 0: as many as `vcpus`."""
    simulated: bool = False
    reaches_local_files: bool = False
    """True when the machine sees this host's folders (local, simulated)."""
    trust: Trust | None = None
    """None: as the provider's caps say."""
    facts: HostFacts | None = None
    purchase: Mapping[str, str] = field(default_factory=dict)
    """What its provider needs to buy exactly this (an ask's id, a GPU's own name, the bid); nobody else reads it."""
    source: str = "api"
    """Where the price comes from: `api` (the cloud's own, live) or `catalog price`."""
    seen_at: datetime

    @property
    def names_host(self) -> bool:
        return self.facts is not None and self.facts.host is not None

    @property
    def host_key(self) -> str:
        """What history and blocks are kept by: the physical host where the cloud names it, else the offer."""
        return f"{HOST}{self.cloud}/{self.facts.host}" if self.facts and self.facts.host is not None else self.id


@dataclass(frozen=True, kw_only=True)
class ProviderStatus:
    """What the market knows of one provider: a cloud that is down is a line, not an error."""

    name: str
    offers: int = 0
    """For sale now."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows of its last answer that were left out, by reason."""
    seen_at: datetime | None = None
    """Of its last answer; None: none yet."""
    error: str | None = None
    """Why the latest question got no answer, in one line; None: it did."""


class OfferVerdict(StrEnum):
    KEPT = "kept"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why an offer was dropped. The first that applies; those that pass by themselves come last."""

    PROVIDER = "provider"
    ACCELERATOR = "accelerator"
    REGION = "region"
    GPUS = "gpus"
    NODES = "nodes"
    SPOT = "spot"
    UNREACHABLE = "unreachable"
    UNSCOPED = "unscoped"
    NO_TRAINER = "no_trainer"
    UNKNOWN_HARDWARE = "unknown_hardware"
    MEMORY = "memory"
    HOST = "host"
    TRUST = "trust"
    NO_CHECKPOINTS = "no_checkpoints"
    PRICE = "price"
    HOURLY_LIMIT = "hourly_limit"
    PREEMPTED_TOO_OFTEN = "preempted_too_often"
    DEADLINE = "deadline"
    CAP = "cap"
    UNAVAILABLE = "unavailable"
    EXCLUDED = "excluded"


@dataclass(frozen=True, kw_only=True)
class CostParts:
    """What the expected dollars to finish consist of; P50."""

    machines: Decimal
    """In whole billing quanta, all of the following times included."""
    traffic: Decimal
    """In and out, where the cloud charges for it."""
    storage: Decimal
    """The bucket's: space for the checkpoints while the job runs."""
    requests: Decimal
    """The bucket's, of beats, logs and checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Hours:
    """What the expected time consists of; P50."""

    boot: float
    """From create to the agent's first beat, with the image."""
    load: float
    """Imports, weights and data."""
    training: float
    evaluation: float
    checkpoints: float
    """For which training stands still, and the last upload."""
    preemptions: float
    """Work lost, and machines changed."""


@dataclass(frozen=True, kw_only=True)
class QuoteLine:
    """One offer against the job: kept with its price to finish, or dropped with the reason."""

    offer: Offer
    verdict: OfferVerdict
    reason: str
    drop: DropReason | None = None
    """None for a kept line."""
    memory: MemoryNeed | None = None
    hours_p50: float | None = None
    hours_p90: float | None = None
    usd_p50: Decimal | None = None
    """Expected dollars to finish: work, set-up, checkpoints and lost work."""
    usd_p90: Decimal | None = None
    step_s: float | None = None
    evidence: str = ""
    """What the speed rests on, in words."""
    tier: SpeedTier | None = None
    """The same for programs; None: dropped, or nothing is known of the speed."""
    runs: int = 0
    """Own runs on such a GPU that it rests on."""
    nodes: int = 1
    """Machines of this kind that are bought together; every dollar above is for all of them."""
    plan: Plan | None = None
    """None: dropped, or nothing is known of what is to run."""
    hours: Hours | None = None
    costs: CostParts | None = None
    rows_bytes: int = 0
    """Of tokenised rows, the most that an attempt puts into the blob store for later ones; 0: none."""


class OfferSummary(NamedTuple):
    """What is kept of an offer when an attempt is bought."""

    offer: str
    """Its id."""
    usd_per_hour: Decimal
    drop: DropReason | None
    """None: it was kept."""
    reason: str
    usd_p50: Decimal | None
    """Expected dollars to finish; None: dropped, or not known."""


@dataclass(frozen=True, kw_only=True)
class Quote:
    """All offers, kept ones first by the spec's objective."""

    lines: Sequence[QuoteLine]
    """Every offer once. Built when looked at, since a market has tens of thousands."""
    considered: Callable[[], Iterable[OfferSummary]] = tuple
    """The same offers in the same order, at a fraction of the time: less is said of each."""
    made_at: datetime
    expires_at: datetime
    proposed_cap_usd: Decimal | None
    """What is spent already + P90 of the best line x 1.25; None when nothing is kept or its time is unknown."""
    kept: int = 0
    drops: Mapping[DropReason, int] = field(default_factory=dict)
    """Dropped offers by reason."""
    cheapest_usd: Decimal | None = None
    """Least expected dollars to finish on any offer that fits, also where the cap does not suffice."""
    unsold_regions: tuple[str, ...] = ()
    """Regions that the spec asks for and no offer is in, each with those that it may mean."""

    @property
    def best(self) -> QuoteLine | None:
        return self.lines[0] if self.lines and self.lines[0].verdict is OfferVerdict.KEPT else None
