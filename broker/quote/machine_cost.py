"""Seconds and dollars of a workload on one kind of machine, independent of an offer's price and hazard.

A machine is billed from create to confirmed absence. Symbols: set-up s, work w, interval of checkpoints τ, last upload
f, rate of preemptions λ. A checkpoint pauses training for c and is safe after C. Each preemption costs half an
interval, the checkpoint in progress and another set-up.

The expected time is `s + w (1 + c/τ) / (1 - λ (τ/2 + C + s)) + f` (Young's and Daly's form). τ is the interval that the
trainer itself will choose. Lifetimes of spot machines are heavy-tailed, so on 26 real pools the predicted cost was 6 to
16 points too low.
"""

from dataclasses import dataclass, field
from decimal import Decimal
from math import ceil, floor, inf, log2, sqrt

from broker.domain.instance import Caps
from broker.domain.offer import GB, GIB, CostParts, DropReason, HostFacts, Hours, Offer
from broker.domain.spec import Resources
from broker.domain.workload import Workload
from broker.estimator.memory.host_memory import host_bytes
from broker.estimator.planning.fit import Fit
from broker.estimator.preemption_rate import failures_per_hour
from broker.estimator.speed.throughput import DOWNLOAD_BYTES_PER_S
from trainer.contract.save_interval import interval_s

Z90 = 1.2816
"""Normal quantile, for the time of preemptions."""
SETUP_SPREAD = 1.5
"""P90 / P50 of the set-up [assumed]."""
UPLOAD_BYTES_PER_S = 50e6
"""Upload rate of the last checkpoint to a bucket [assumed]; earlier uploads run during training."""
IMAGE_PULL = 5 * GIB
"""Compressed size of the trainer's image [assumed]; providers' boot times include its pull at the rate above."""
IMAGE_DISK = 12 * GIB
"""Unpacked size of the image [assumed]."""
KEPT_CHECKPOINTS = 2
"""One checkpoint is being written while the previous one exists."""
REQUESTS_AN_HOUR = 720
"""A heartbeat and a part of the log every 10 s."""
USD_A_REQUEST = 5e-6
"""S3's list price of a PUT; Google's and R2's are within 10 %."""
MIN_CORES, WANTED_CORES = 2, 4
MIN_RAM, WANTED_RAM = 8 * GIB, 16 * GIB
"""Recommended values for each GPU that computes; with less than the minimum it would wait for its host."""
HOURS_A_MONTH = 730
MBIT = 125_000


@dataclass(frozen=True, kw_only=True)
class NetworkRates:
    """Network rates and traffic prices of a machine, in bytes/s and dollars a GiB."""

    down: float = DOWNLOAD_BYTES_PER_S
    up: float = UPLOAD_BYTES_PER_S
    ingress: float = 0.0
    egress: float = 0.0


def line_key(facts: HostFacts) -> tuple[object, ...]:
    """Return the facts that determine times and traffic; offers with the same key have the same network rates."""
    down, up = _half_octaves(facts.down_mbit_s), _half_octaves(facts.up_mbit_s)
    return facts.interconnect == "pcie", down, up, facts.ingress_usd_per_gib, facts.egress_usd_per_gib


def _half_octaves(mbit_s: float | None) -> int:
    """Return a rate in steps of the square root of two; 0: unknown."""
    return floor(2 * log2(mbit_s)) if mbit_s and mbit_s > 1 else 0


def network_rates(facts: HostFacts | None) -> NetworkRates:
    """Return the slower of the assumed rates and the rates that the cloud states."""
    if facts is None:
        return NetworkRates()
    down, up = (MBIT * 2.0 ** (_half_octaves(rate) / 2) for rate in (facts.down_mbit_s, facts.up_mbit_s))
    return NetworkRates(
        down=min(DOWNLOAD_BYTES_PER_S, down) if facts.down_mbit_s else DOWNLOAD_BYTES_PER_S,
        up=min(UPLOAD_BYTES_PER_S, up) if facts.up_mbit_s else UPLOAD_BYTES_PER_S,
        ingress=float(facts.ingress_usd_per_gib or 0),
        egress=float(facts.egress_usd_per_gib or 0),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficCost:
    """Dollars for traffic of all nodes."""

    is_charged: bool
    """True if the cloud charges for traffic."""
    setup: float
    """Dollars of each set-up."""
    checkpoint: float
    """Dollars of a checkpoint."""
    token_cache: float
    """Dollars of the tokenised rows, which are uploaded once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketCost:
    """Dollars an hour for the bucket of the blob store."""

    space: float
    total: float
    """Space and requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostDemands:
    """Least resources of a host by the spec; 0: no demand."""

    cpus: int = 0
    memory_gb: int = 0
    disk_gb: int = 0

    @classmethod
    def of(cls, resources: Resources) -> "HostDemands":
        return cls(cpus=resources.cpus or 0, memory_gb=resources.memory_gb or 0, disk_gb=resources.disk_gb or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNeeds:
    """Resources that a host must have: the larger of the spec's demands and what is estimated."""

    gpus: int
    """GPUs of one machine that compute; 0: only the demands count, because the host is emulated or nothing is
    estimated.
    """
    demands: HostDemands
    cores: int
    process_bytes: int
    """Bytes of RAM that the job's processes and copies take."""
    ram: int
    """Bytes, including those of a run that was too large before."""
    disk: int
    """Bytes."""


@dataclass(kw_only=True, slots=True, eq=False)
class MachineCost:
    """Costs that all offers of one machine type at one provider share; seconds, and dollars for all nodes."""

    fit: Fit
    drop: DropReason | None
    reason: str
    caps: Caps
    quantum: float
    least_billed: float
    teardown: float
    setup: float
    """Boot, image, model and data."""
    work: float
    """Steps and evaluations."""
    stall: float
    """Pause of training at a checkpoint."""
    saving: float
    """Time from the start of a checkpoint until it is safe."""
    max_lost_work_s: float
    """Maximum seconds of work that may be lost, from the spec."""
    failures: float
    """Failures of machines an hour, excluding preemptions."""
    max_interval_s: float = field(init=False)
    low_hazard: float = field(init=False)
    """Preemptions a second up to which checkpoints are `max_interval_s` apart."""
    final: float
    """Duration of the last upload."""
    standing: float
    """Billed seconds without work."""
    undisturbed: tuple[float, float] = field(init=False)
    """Billed hours and dollars of traffic without preemption."""
    traffic_usd: TrafficCost
    bucket: BucketCost
    bucket_usd: float = field(init=False)
    """Dollars an hour for the bucket; a field of its own, because quotes read it for tens of thousands of offers."""
    steady_work: float = field(init=False)
    """Seconds of work and pauses while checkpoints are `max_interval_s` apart."""
    steady_lost: float = field(init=False)
    """Seconds that a preemption costs while checkpoints are `max_interval_s` apart."""
    is_traffic_charged: bool = field(init=False)
    """True if the cloud charges for traffic; a field of its own for the same reason."""
    host: HostNeeds

    def __post_init__(self) -> None:
        self.max_interval_s = max(self.saving, interval_s(self.saving, 0.0, self.max_lost_work_s))
        # Young's sqrt(2 C / λ), which is below Daly's interval and C, exceeds the work that may be lost.
        self.low_hazard = 2 * self.saving / self.max_lost_work_s**2 - self.failures / 3600 if self.saving else inf
        self.bucket_usd, self.is_traffic_charged = self.bucket.total, self.traffic_usd.is_charged
        self.steady_work = self.work * (1 + self.stall / self.max_interval_s) if self.max_interval_s else self.work
        self.steady_lost = self.max_interval_s / 2 + self.saving + self.setup
        self.undisturbed = self.billed(self.p50(0.0)), self.traffic(0.0)

    @property
    def drained_s(self) -> float:
        """Return seconds from the end of an attempt to the proven absence of its machines, at most."""
        return self.teardown + 2 * self.caps.list_lag_s + self.quantum

    def every(self, rate: float) -> float:
        """Return seconds between the starts of two checkpoints at `rate` preemptions a second; they do not overlap."""
        if rate <= self.low_hazard:
            return self.max_interval_s
        return max(self.saving, interval_s(self.saving, self.failures + 3600 * rate, self.max_lost_work_s))

    def lost(self, rate: float) -> float:
        """Return seconds that a preemption costs."""
        return self.every(rate) / 2 + self.saving + self.setup

    def worked(self, rate: float) -> float:
        """Return expected seconds from the first step to the last, with pauses, lost work and repeated set-ups.

        Infinite if preemptions leave no time for work.
        """
        every = self.every(rate)
        calm = 1 - rate * (every / 2 + self.saving + self.setup)
        return self.work * (1 + self.stall / every) / calm if calm > 0 else inf

    def p50(self, rate: float) -> float:
        """Return expected seconds at `rate` preemptions a second."""
        return self.setup + self.worked(rate) + self.final

    def p90(self, rate: float, certainty: float) -> float:
        """Return the seconds within which nine of ten runs finish.

        The margin covers the spread of the speed, of the number of preemptions, and of the preemption rate. The rate's
        standard deviation is `rate / sqrt(certainty)` (`hazard`).

        With work w, m = λ w / (1 - λ l) losses of l each are expected. The number of losses is Poisson distributed with
        variance m. The rate changes the elapsed time by its derivative w l / (1 - λ l)² (delta method).
        """
        spread, lost_s = self.fit.pace.spread if self.fit.pace else 1.0, self.lost(rate)
        calm, work = 1 - rate * lost_s, self.worked(rate) * spread
        losses = rate * work
        chance = sqrt(losses + (losses / calm) ** 2 / certainty)
        return (self.setup + self.final) * SETUP_SPREAD + work + Z90 * chance * lost_s

    def billed(self, seconds: float) -> float:
        """Return billed hours for `seconds` and the teardown, in whole quanta."""
        return ceil(max(seconds + self.teardown, self.least_billed) / self.quantum) * self.quantum / 3600

    def usd(self, price: float, rate: float) -> float:
        """Return expected dollars to finish, or infinity.

        `price`: dollars an hour of all nodes; `rate`: preemptions a second. The code repeats `p50`, `billed` and
        `traffic` in one call, because quotes call it for tens of thousands of offers.
        """
        if rate <= self.low_hazard:
            calm = 1 - rate * self.steady_lost
            work = self.steady_work / calm if calm > 0 else inf
        else:
            work = self.worked(rate)
        if work == inf:
            return inf
        seconds = self.standing + work
        if seconds < self.least_billed:
            seconds = self.least_billed
        usd = (price + self.bucket_usd) * (ceil(seconds / self.quantum) * self.quantum / 3600)
        return usd + self.traffic(rate) if self.is_traffic_charged else usd

    def traffic(self, rate: float) -> float:
        """Return expected dollars of traffic."""
        work, usd = self.worked(rate), self.traffic_usd
        return usd.token_cache + usd.setup * (1 + rate * work) + usd.checkpoint * work / self.every(rate)

    def hours(self, rate: float) -> Hours:
        """Return the components of the expected time, which must be known."""
        pace = self.fit.pace
        assert pace is not None
        return Hours(
            boot=(self.setup - pace.load_s) / 3600,
            load=pace.load_s / 3600,
            training=pace.training_s / 3600,
            evaluation=pace.evaluation_s / 3600,
            checkpoints=(self.work * self.stall / self.every(rate) + self.final) / 3600,
            preemptions=(self.worked(rate) - self.work * (1 + self.stall / self.every(rate))) / 3600,
        )

    def costs(self, rate: float, price: float) -> CostParts:
        """Return the components of the expected dollars at `price` dollars an hour of all nodes."""
        hours = self.billed(self.p50(rate))
        bucket = self.bucket
        parts = (price * hours, self.traffic(rate), bucket.space * hours, (bucket.total - bucket.space) * hours)
        machines, traffic, storage, requests = (Decimal(round(1e6 * usd)).scaleb(-6) for usd in parts)
        return CostParts(machines=machines, traffic=traffic, storage=storage, requests=requests)


def shortage_message(offer: Offer, needs: HostNeeds) -> str:
    """Return which resource of the host is too small. A value of 0 in an offer means that it is unknown."""
    demands = needs.demands
    if offer.vcpus < demands.cpus:
        available = f"{offer.vcpus} CPU cores" if offer.vcpus > 0 else "unknown number of CPU cores"
        return f"{available}; resources.cpus asks for {demands.cpus}"
    if offer.ram_bytes < demands.memory_gb * GB:
        return f"{_gb(offer.ram_bytes)} of RAM; resources.memory_gb asks for {demands.memory_gb}"
    if offer.disk_bytes < demands.disk_gb * GB:
        limit = f", {_gb(offer.larger_disk.max_bytes)} at most" if offer.larger_disk else ""
        return f"{_gb(offer.disk_bytes)} of disk{limit}; resources.disk_gb asks for {demands.disk_gb}"
    if offer.vcpus < needs.cores:
        return f"{offer.vcpus} CPU cores for {needs.gpus} GPUs; {MIN_CORES} for each are the minimum"
    available = f"{offer.ram_bytes / GIB:.0f} GiB of RAM"
    if offer.ram_bytes < MIN_RAM * needs.gpus:
        return f"{available} for {needs.gpus} GPUs; {MIN_RAM // GIB} for each are the minimum"
    if offer.ram_bytes < needs.process_bytes:
        needed = f"{needs.process_bytes / GIB:.0f} for processes, the weights they read and a copy of a checkpoint"
        return f"{available}; {needed}"
    if offer.ram_bytes < needs.ram:
        return f"{available}; the job ran out of {(needs.ram - 1) / GIB:.0f} before"
    return f"{offer.disk_bytes / GIB:.0f} GiB of disk; {needs.disk / GIB:.0f} for image, model, data and checkpoints"


def _gb(size: int) -> str:
    return f"{size / GB:.4g} GB" if size > 0 else "unknown size"


def scarcity_note(offer: Offer, demands: HostNeeds) -> str:
    """Return a note on resources of the host that suffice but are below the recommendation; empty: none."""
    if offer.vcpus >= WANTED_CORES * demands.gpus and offer.ram_bytes >= WANTED_RAM * demands.gpus:
        return ""
    return f"; {offer.vcpus} cores and {offer.ram_bytes / GIB:.0f} GiB of RAM are few for {demands.gpus} GPUs"


def kind_of(
    workload: Workload,
    offer: Offer,
    fits: Fit,
    caps: Caps,
    verdict: tuple[DropReason | None, str],
    *,
    nodes: int,
    storage_usd_per_gib_month: float,
    demands: HostDemands,
) -> MachineCost:
    """Return the cost of a kind of machine. `verdict`: why it is not allowed, or None with a message."""
    lines, pace = network_rates(offer.facts), fits.pace
    is_local = offer.emulated_on is not None or offer.reaches_local_files or caps.reaches_local_files
    fetched, saved = (pace.fetched_bytes, pace.checkpoint_bytes) if pace and not is_local else (0, 0)
    moved = fetched + (0 if is_local else IMAGE_PULL)
    slower, load_s = moved * (1 / lines.down - 1 / DOWNLOAD_BYTES_PER_S), pace.load_s if pace else 0.0
    rows, setup, final = (workload.data_bytes if saved else 0), caps.boot_s + load_s + slower, saved / lines.up
    return MachineCost(
        fit=fits,
        drop=verdict[0],
        reason=verdict[1],
        caps=caps,
        quantum=max(1.0, offer.billing_quantum_s),
        least_billed=offer.billing_minimum_s,
        teardown=caps.teardown_s,
        setup=setup,
        work=pace.work_s if pace else 0.0,
        stall=pace.stall_s if pace else 0.0,
        saving=pace.stall_s + final if pace else 0.0,
        max_lost_work_s=workload.checkpoint_every_s,
        failures=failures_per_hour(offer, nodes),
        final=final,
        standing=setup + final + caps.teardown_s,
        traffic_usd=_traffic_cost(lines, moved, saved, rows, nodes),
        bucket=_bucket_cost(KEPT_CHECKPOINTS * saved + rows, storage_usd_per_gib_month, nodes),
        host=_host_needs(workload, offer, fits, nodes, demands),
    )


def _traffic_cost(lines: NetworkRates, moved: int, saved: int, rows: int, nodes: int) -> TrafficCost:
    """Return the traffic's cost: bytes moved in a set-up, saved in a checkpoint, and of tokenised rows."""
    return TrafficCost(
        is_charged=bool(lines.ingress or lines.egress),
        setup=lines.ingress * moved / GIB * nodes,
        checkpoint=lines.egress * saved / GIB,
        token_cache=lines.egress * rows / GIB,
    )


def _bucket_cost(stored_bytes: int, usd_per_gib_month: float, nodes: int) -> BucketCost:
    space = stored_bytes / GIB * usd_per_gib_month / HOURS_A_MONTH
    requests = REQUESTS_AN_HOUR * USD_A_REQUEST * nodes if usd_per_gib_month else 0.0
    return BucketCost(space=space, total=space + requests)


def _host_needs(workload: Workload, offer: Offer, fits: Fit, nodes: int, demands: HostDemands) -> HostNeeds:
    pace = fits.pace
    gpus = 0 if offer.emulated_on or offer.gpus < 1 or pace is None else -(-fits.devices // nodes)
    process_bytes = 0
    if gpus and pace and fits.plan:
        process_bytes = host_bytes(workload, fits.plan, states=pace.checkpoint_bytes, nodes=nodes)
    disk = IMAGE_DISK + pace.fetched_bytes + KEPT_CHECKPOINTS * pace.checkpoint_bytes if pace and gpus else 0
    oom_bytes = workload.oom_host_bytes + (workload.oom_host_bytes > 0)
    return HostNeeds(
        gpus=gpus,
        demands=demands,
        cores=max(MIN_CORES * gpus, demands.cpus),
        process_bytes=process_bytes,
        ram=max(MIN_RAM * gpus, process_bytes, oom_bytes, demands.memory_gb * GB),
        disk=max(disk, demands.disk_gb * GB),
    )
