"""Seconds and dollars of a workload on one kind of machine, all that does not depend on the offer's price and hazard.

A machine is billed from create to confirmed absence. With set-up s, work w, a checkpoint every τ that stops training
for c and is safe after C, the last upload f and a rate of preemptions λ, each of which costs half an interval, the
checkpoint that was under way and another set-up, the expected time is s + w (1 + c/τ) / (1 - λ (τ/2 + C + s)) + f:
Young's and Daly's form. τ is what the trainer itself will choose. Lifetimes of spot machines are heavy-tailed, so on 26
real pools the prediction was 6 to 16 points of cost too low.
"""

from dataclasses import dataclass, field
from decimal import Decimal
from math import ceil, floor, inf, log2, sqrt
from typing import Any

from broker.domain.instance import Caps
from broker.domain.offer import GIB, CostParts, DropReason, HostFacts, Hours, Offer
from broker.domain.workload import Workload
from broker.estimator.memory.host_memory import host_bytes
from broker.estimator.planning.fit import Fit
from broker.estimator.preemption_rate import failures_per_hour
from broker.estimator.speed.throughput import DOWNLOAD_BYTES_PER_S
from trainer.contract.save_interval import interval_s

Z90 = 1.2816
"""Normal quantile, for the time that preemptions take."""
SETUP_SPREAD = 1.5
"""P90 / P50 of the set-up [assumed]."""
UPLOAD_BYTES_PER_S = 50e6
"""Of the last checkpoint, to a bucket [assumed]; the others go while training goes on."""
IMAGE_PULL = 5 * GIB
"""The trainer's image as it travels [assumed]; providers' boot times hold its pull over the line assumed above."""
IMAGE_DISK = 12 * GIB
"""The same unpacked [assumed]."""
KEPT_CHECKPOINTS = 2
"""One is being written beside the one before."""
REQUESTS_AN_HOUR = 720
"""A beat and a part of the log every 10 s."""
USD_A_REQUEST = 5e-6
"""S3's list price of a PUT; Google's and R2's are within 10 %."""
LEAST_CORES, WANTED_CORES = 2, 4
LEAST_RAM, WANTED_RAM = 8 * GIB, 16 * GIB
"""For each GPU that computes; with less than the least it would wait for its host."""
HOURS_A_MONTH = 730
MBIT = 125_000


@dataclass(frozen=True, kw_only=True)
class NetworkRates:
    """What a machine's line to the world is like; bytes/s, dollars a GiB."""

    down: float = DOWNLOAD_BYTES_PER_S
    up: float = UPLOAD_BYTES_PER_S
    ingress: float = 0.0
    egress: float = 0.0


def line_key(facts: HostFacts) -> tuple[object, ...]:
    """Of the facts that times and traffic follow from; offers that agree in it have the same lines."""
    down, up = _halves(facts.down_mbit_s), _halves(facts.up_mbit_s)
    return facts.interconnect == "pcie", down, up, facts.ingress_usd_per_gib, facts.egress_usd_per_gib


def _halves(mbit_s: float | None) -> int:
    """A rate in steps of the square root of two; 0: not said."""
    return floor(2 * log2(mbit_s)) if mbit_s and mbit_s > 1 else 0


def lines_of(facts: HostFacts | None) -> NetworkRates:
    """The slower of what is assumed and what the cloud states."""
    if facts is None:
        return NetworkRates()
    down, up = (MBIT * 2.0 ** (_halves(rate) / 2) for rate in (facts.down_mbit_s, facts.up_mbit_s))
    return NetworkRates(
        down=min(DOWNLOAD_BYTES_PER_S, down) if facts.down_mbit_s else DOWNLOAD_BYTES_PER_S,
        up=min(UPLOAD_BYTES_PER_S, up) if facts.up_mbit_s else UPLOAD_BYTES_PER_S,
        ingress=float(facts.ingress_usd_per_gib or 0),
        egress=float(facts.egress_usd_per_gib or 0),
    )


@dataclass(kw_only=True, slots=True, eq=False)
class MachineCost:
    """What is common to all offers of one machine type at one provider; seconds, dollars for all nodes."""

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
    """For which training stands still at a checkpoint."""
    saving: float
    """From the beginning of a checkpoint until it is safe."""
    max_lost_work_s: float
    """Of work that may be lost, as the spec says."""
    failures: float
    """Of machines, an hour, besides preemptions."""
    max_interval_s: float = field(init=False)
    low_hazard: float = field(init=False)
    """Up to so many preemptions a second, checkpoints are `longest` seconds apart."""
    final: float
    """The last upload."""
    standing: float
    """Billed seconds without work."""
    undisturbed: tuple[float, float] = field(init=False)
    """Billed hours and dollars of traffic without preemption."""
    moves: bool
    """Its traffic costs something."""
    entry_usd: float
    """Traffic of each set-up."""
    sent_usd: float
    """Traffic of a checkpoint."""
    rows_usd: float
    """Traffic of the tokenised rows, which are sent once."""
    space_usd: float
    aside_usd: float
    """The bucket's space, and with its requests, an hour."""
    gpus: int
    """Of one machine that compute; 0 where its host is not looked at, since it is emulated or nothing is known."""
    cores: int
    held: int
    """Bytes of RAM that the job's processes and copies take."""
    ram: int
    disk: int
    """What a host must have."""

    def __post_init__(self) -> None:
        self.max_interval_s = max(self.saving, interval_s(self.saving, 0.0, self.max_lost_work_s))
        # Young's sqrt(2 C / λ), which is less than Daly's interval and C, is more than may be lost.
        self.low_hazard = 2 * self.saving / self.max_lost_work_s**2 - self.failures / 3600 if self.saving else inf
        self.undisturbed = self.billed(self.p50(0.0)), self.traffic(0.0)

    def every(self, rate: float) -> float:
        """Seconds between the beginnings of two checkpoints, at `rate` preemptions a second; one waits for another."""
        if rate <= self.low_hazard:
            return self.max_interval_s
        return max(self.saving, interval_s(self.saving, self.failures + 3600 * rate, self.max_lost_work_s))

    def lost(self, rate: float) -> float:
        """Seconds that a preemption costs."""
        return self.every(rate) / 2 + self.saving + self.setup

    def worked(self, rate: float) -> float:
        """Expected seconds from the first step to the last, with stalls, lost work and other set-ups; infinite where
        preemptions leave no time for work.
        """
        every = self.every(rate)
        calm = 1 - rate * (every / 2 + self.saving + self.setup)
        return self.work * (1 + self.stall / every) / calm if calm > 0 else inf

    def p50(self, rate: float) -> float:
        """Expected seconds at `rate` preemptions a second."""
        return self.setup + self.worked(rate) + self.final

    def p90(self, rate: float, certainty: float) -> float:
        """Seconds that nine of ten runs keep, by the spread of the pace, of the number of preemptions, and of their
        rate, whose standard deviation is `rate / sqrt(certainty)` (`hazard`).

        With work w, m = λ w / (1 - λ l) losses of l each are expected. Their number is Poisson's, of variance m; the
        rate's moves the elapsed time by its derivative w l / (1 - λ l)² (the delta method).
        """
        spread, lost = self.fit.pace.spread if self.fit.pace else 1.0, self.lost(rate)
        calm, work = 1 - rate * lost, self.worked(rate) * spread
        losses = rate * work
        chance = sqrt(losses + (losses / calm) ** 2 / certainty)
        return (self.setup + self.final) * SETUP_SPREAD + work + Z90 * chance * lost

    def billed(self, seconds: float) -> float:
        """Hours on the bill for `seconds` and the teardown, in whole quanta."""
        return ceil(max(seconds + self.teardown, self.least_billed) / self.quantum) * self.quantum / 3600

    def usd(self, price: float, rate: float) -> float:
        """Expected dollars to finish at `price` dollars an hour of all nodes and `rate` preemptions a second, by what
        `p50`, `billed` and `traffic` say, in one call for each of tens of thousands of offers.
        """
        work = self.worked(rate)
        if work == inf:
            return inf
        seconds = self.standing + work
        if seconds < self.least_billed:
            seconds = self.least_billed
        usd = (price + self.aside_usd) * (ceil(seconds / self.quantum) * self.quantum / 3600)
        return usd + self.traffic(rate) if self.moves else usd

    def traffic(self, rate: float) -> float:
        """Expected dollars."""
        work = self.worked(rate)
        return self.rows_usd + self.entry_usd * (1 + rate * work) + self.sent_usd * work / self.every(rate)

    def hours(self, rate: float) -> Hours:
        """Of the expected time, where it is known."""
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
        """Of the expected dollars, at `price` dollars an hour of all nodes."""
        hours = self.billed(self.p50(rate))
        parts = (price * hours, self.traffic(rate), self.space_usd * hours, (self.aside_usd - self.space_usd) * hours)
        machines, traffic, storage, requests = (Decimal(round(1e6 * usd)).scaleb(-6) for usd in parts)
        return CostParts(machines=machines, traffic=traffic, storage=storage, requests=requests)


def short(offer: Offer, kind: MachineCost) -> str:
    """What its host has too little of."""
    if offer.vcpus < kind.cores:
        return f"{offer.vcpus} CPU cores for {kind.gpus} GPUs; {LEAST_CORES} for each are the least"
    has = f"{offer.ram_bytes / GIB:.0f} GiB of RAM"
    if offer.ram_bytes < LEAST_RAM * kind.gpus:
        return f"{has} for {kind.gpus} GPUs; {LEAST_RAM // GIB} for each are the least"
    if offer.ram_bytes < kind.held:
        return f"{has}; {kind.held / GIB:.0f} for processes, the weights that they read and a checkpoint's copy"
    if offer.ram_bytes < kind.ram:
        return f"{has}; the job ran out of {(kind.ram - 1) / GIB:.0f} before"
    return f"{offer.disk_bytes / GIB:.0f} GiB of disk; {kind.disk / GIB:.0f} for image, model, data and checkpoints"


def few(offer: Offer, kind: MachineCost) -> str:
    """What its host has less of than is wanted, though it will do; empty: nothing."""
    if offer.vcpus >= WANTED_CORES * kind.gpus and offer.ram_bytes >= WANTED_RAM * kind.gpus:
        return ""
    return f"; {offer.vcpus} cores and {offer.ram_bytes / GIB:.0f} GiB of RAM are few for {kind.gpus} GPUs"


def kind_of(
    workload: Workload,
    offer: Offer,
    fits: Fit,
    caps: Caps,
    verdict: tuple[DropReason | None, str],
    *,
    nodes: int,
    storage_usd_per_gib_month: float,
) -> MachineCost:
    """`verdict`: why no machine of this kind will do, or None with the words for one that does."""
    lines, pace = lines_of(offer.facts), fits.pace
    here = offer.emulated_on is not None or offer.reaches_local_files or caps.reaches_local_files
    fetched, saved = (pace.fetched_bytes, pace.checkpoint_bytes) if pace and not here else (0, 0)
    moved = fetched + (0 if here else IMAGE_PULL)
    slower = moved * (1 / lines.down - 1 / DOWNLOAD_BYTES_PER_S)
    rows = workload.data_bytes if saved else 0
    setup, final = caps.boot_s + (pace.load_s if pace else 0.0) + slower, saved / lines.up
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
        **_aside(lines, moved, saved, rows, nodes),
        **_space(KEPT_CHECKPOINTS * saved + rows, storage_usd_per_gib_month, nodes),
        **_host(workload, offer, fits, nodes),
    )


def _aside(lines: NetworkRates, moved: int, saved: int, rows: int, nodes: int) -> dict[str, Any]:
    """Of `Kind`: what goes over its lines, in dollars."""
    return {
        "moves": bool(lines.ingress or lines.egress),
        "entry_usd": lines.ingress * moved / GIB * nodes,
        "sent_usd": lines.egress * saved / GIB,
        "rows_usd": lines.egress * rows / GIB,
    }


def _space(kept: int, usd_per_gib_month: float, nodes: int) -> dict[str, Any]:
    """Of `Kind`: the bucket's space for `kept` bytes, and with its requests."""
    space = kept / GIB * usd_per_gib_month / HOURS_A_MONTH
    requests = REQUESTS_AN_HOUR * USD_A_REQUEST * nodes if usd_per_gib_month else 0.0
    return {"space_usd": space, "aside_usd": space + requests}


def _host(workload: Workload, offer: Offer, fits: Fit, nodes: int) -> dict[str, Any]:
    """Of `Kind`: what a host must have."""
    pace = fits.pace
    gpus = 0 if offer.emulated_on or offer.gpus < 1 or pace is None else -(-fits.devices // nodes)
    held = 0
    if gpus and pace and fits.plan:
        held = host_bytes(workload, fits.plan, states=pace.checkpoint_bytes, nodes=nodes)
    return {
        "gpus": gpus,
        "cores": LEAST_CORES * gpus,
        "held": held,
        "ram": max(LEAST_RAM * gpus, held, workload.oom_host_bytes + (workload.oom_host_bytes > 0)),
        "disk": IMAGE_DISK + pace.fetched_bytes + KEPT_CHECKPOINTS * pace.checkpoint_bytes if pace and gpus else 0,
    }
