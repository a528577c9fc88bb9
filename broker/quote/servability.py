"""Decides whether any configured provider can ever serve a job, so that no job is queued for ever.

Used by quote and submit when all current offers are dropped for lasting reasons. A cloud may sell tomorrow what it does
not list today. So the rules judge imagined offers: every GPU that a provider may sell, on an ample host.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any

from broker.domain.errors import Problem
from broker.domain.formatting import unsold_regions
from broker.domain.instance import Caps
from broker.domain.offer import GIB, DropReason, Offer, ProviderStatus, Quote, QuoteLine
from broker.domain.spec import JobSpec, Resources
from broker.domain.workload import Workload
from broker.estimator.planning.corrections import NO_CORRECTIONS, Corrections
from broker.estimator.speed.hardware import TABLE, matches
from broker.quote.engine import quote
from broker.quote.spot.plan import no_plan

PASSING = frozenset(
    {
        DropReason.PRICE,
        DropReason.HOURLY_LIMIT,
        DropReason.PREEMPTED_TOO_OFTEN,
        DropReason.CONTRACT,
        DropReason.DEADLINE,
        DropReason.CAP,
        DropReason.UNAVAILABLE,
        DropReason.EXCLUDED,
    }
)
"""Reasons that depend on prices, time and capacity, and may pass. All other reasons last."""
RULES = (
    *(DropReason.PROVIDER, DropReason.ACCELERATOR, DropReason.GPUS, DropReason.NODES, DropReason.SPOT),
    *(DropReason.UNREACHABLE, DropReason.TRUST, DropReason.NO_CHECKPOINTS, DropReason.UNSCOPED, DropReason.NO_TRAINER),
    *(DropReason.NO_IMAGES, DropReason.UNKNOWN_HARDWARE, DropReason.MEMORY, DropReason.REGION, DropReason.HOST),
)
"""Lasting reasons in the order in which the rules are applied. A later one means that more requirements are met."""
COUNTS = (1, 2, 4, 8, 16)
"""GPUs of imagined machines; no cloud sells a machine with more."""
AMPLE_DISK = 1024 * 1024 * GIB
NODES = (2, 4, 8, 16)
"""Numbers of machines that a message may suggest."""


@dataclass(frozen=True, kw_only=True)
class ServableMarket:
    """The configured providers and the facts about the installation that decide which offers a job can use."""

    caps: Mapping[str, Caps]
    status: Sequence[ProviderStatus]
    offers: Sequence[Offer]
    now: datetime
    local_files: bool
    scoped_store: bool
    learned: Corrections = NO_CORRECTIONS
    """Corrections of the estimator, the same as for quotes; otherwise quotes and this rule would disagree about
    memory.
    """


def may_be_served(quoted: Quote) -> bool:
    """Return True if an offer is kept, or dropped for a reason that may pass."""
    return quoted.kept_count > 0 or not PASSING.isdisjoint(quoted.drops)


def unserved(spec: JobSpec, workload: Workload, market: ServableMarket) -> Problem | None:
    """Return which requirement no provider meets and what would be served; None: a provider may serve the job.

    A provider that has not answered yet may sell anything.
    """
    if not _is_known(spec.resources, market):
        return None
    offers = list(_imagined(spec.resources, market))
    quoted = _judged(spec, workload, market, offers)
    if not offers or may_be_served(quoted):
        return None
    farthest = max(quoted.lines, key=lambda line: RULES.index(_drop(line)))
    allowed = spec.resources.providers
    why = _why(spec.resources, farthest, {o.region for o in offers if not allowed or o.provider in allowed})
    for field, change, text in _relaxations(spec):
        relaxed = spec.model_copy(update={"resources": spec.resources.model_copy(update=change)})
        served = _served(_judged(relaxed, workload, market, offers))
        if served:
            best = min(served, key=lambda offer: _distance(spec.resources, offer))
            fix = text.format(machine=_machine(best), best=best)
            return Problem(field=f"resources.{field}", message=f"{why}; {fix}")
    drop = _drop(farthest)
    field = "script.image" if drop is DropReason.NO_IMAGES else "resources"
    return Problem(field=field, message=f"{why}; {_smaller(spec, workload, drop)}")


def _is_known(resources: Resources, market: ServableMarket) -> bool:
    """Return True if every provider that the job may use has answered, and each `lists_all` provider lists an offer.

    A job that may use no configured provider is refused by an earlier check.
    """
    listed = {offer.provider for offer in market.offers}
    statuses = {
        status.name: status for status in market.status if not resources.providers or status.name in resources.providers
    }
    return bool(statuses) and all(
        status.seen_at is not None and (name in listed or not market.caps[name].lists_all)
        for name, status in statuses.items()
    )


def _imagined(resources: Resources, market: ServableMarket) -> Iterator[Offer]:
    """Yield offers that providers may ever sell: listed offers of `lists_all` providers, imagined offers of others."""
    region = resources.regions[0] if resources.regions else "any"
    counts = sorted({*COUNTS, *([resources.gpus] if resources.gpus != "auto" and resources.gpus <= COUNTS[-1] else [])})
    sizes: dict[str, dict[str, int]] = {name: _sellable(caps) for name, caps in market.caps.items()}
    for offer in market.offers:
        if offer.provider not in market.caps:
            continue
        if market.caps[offer.provider].lists_all:
            yield replace(offer, disk_bytes=max(offer.disk_bytes, AMPLE_DISK))  # a running job may fill it for now
        elif offer.gpus:
            sizes[offer.provider].setdefault(offer.accelerator, offer.gpu_memory_bytes)
    for name, caps in market.caps.items():
        for accelerator, size in () if caps.lists_all else sizes[name].items():
            for gpus in counts:
                for spot in (False, True) if caps.spot else (False,):
                    yield Offer(
                        id=f"{name}/{accelerator}/{gpus}/{spot}", provider=name, cloud=name, region=region,
                        instance_type="any", accelerator=accelerator, gpus=gpus, gpu_memory_bytes=size, vcpus=1024,
                        ram_bytes=16 * 1024 * GIB, disk_bytes=AMPLE_DISK, spot=spot, usd_per_hour=Decimal(1),
                        trust="own" if caps.trust == "own" else "secure", seen_at=market.now,
                    )  # fmt: skip


def _sellable(caps: Caps) -> dict[str, int]:
    """Return the memory of a GPU by name, for the GPUs that a provider may sell."""
    memory_sizes = {name: hardware.memory_bytes for name, hardware in TABLE.items() if hardware.gpu}
    return (
        memory_sizes
        if caps.accelerators is None
        else {name: memory_sizes[name] for name in caps.accelerators if name in memory_sizes}
    )


def _judged(spec: JobSpec, workload: Workload, market: ServableMarket, offers: Sequence[Offer]) -> Quote:
    return quote(
        spec, workload, offers, now=market.now, local_files=market.local_files, scoped_store=market.scoped_store,
        spent=Decimal(0), cap_left=spec.cap_usd, excluded={}, caps=market.caps,
        learned=market.learned, plans=no_plan,
    )  # fmt: skip


def _drop(line: QuoteLine) -> DropReason:
    assert line.drop is not None  # the quote keeps no offer
    return line.drop


def _served(quoted: Quote) -> list[Offer]:
    return [line.offer for line in quoted.lines if line.drop is None or line.drop in PASSING]


def _relaxations(spec: JobSpec) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (field, change, fix) for each requirement that can be relaxed, the least change first."""
    resources = spec.resources
    if resources.gpus != "auto":
        yield "gpus", {"gpus": "auto"}, "{machine} would do, or gpus: auto"
    if resources.spot != "allowed":
        yield "spot", {"spot": "allowed"}, "with spot: allowed, {machine} would do"
    if resources.accelerators:
        yield "accelerators", {"accelerators": ()}, "the nearest that would do is {machine}"
        yield "accelerators", {"accelerators": (), "gpus": "auto"}, "the nearest that would do is {machine}"
    if resources.regions:
        yield "regions", {"regions": ()}, "in region {best.region}, {machine} would do"
    yield from _host_relaxations(resources)
    if resources.trust == "own":
        yield "trust", {"trust": "secure"}, "with trust: secure, {machine} would do"
    if resources.trust != "community":
        yield "trust", {"trust": "community"}, "with trust: community, {machine} would do"
    if resources.nodes > 1:
        yield "nodes", {"nodes": 1}, "one node of {machine} would do"
    if resources.providers:
        yield "providers", {"providers": ()}, "without providers, {machine} would do"
    batch = spec.train.global_batch if spec.train is not None else 0
    for nodes in NODES:
        if nodes > resources.nodes and isinstance(batch, int) and batch % nodes == 0:
            yield "nodes", {"nodes": nodes}, f"{nodes} nodes of {{machine}} would do"


def _host_relaxations(resources: Resources) -> Iterator[tuple[str, dict[str, Any], str]]:
    for field in ("cpus", "memory_gb", "disk_gb"):
        if getattr(resources, field) is not None:
            yield field, {field: None}, f"without {field}, {{machine}} would do"


def _distance(resources: Resources, offer: Offer) -> tuple[object, ...]:
    """Return how far an offer is from the requested GPU; without one, the smallest machine is nearest."""
    sizes = [
        h.memory_bytes for name, h in TABLE.items() if any(matches(pattern, name) for pattern in resources.accelerators)
    ]
    gap = min((abs(offer.gpu_memory_bytes - size) for size in sizes), default=0)
    count = abs(offer.gpus - resources.gpus) if resources.gpus != "auto" else offer.gpus
    return not offer.gpus, gap, count, offer.gpus, offer.gpu_memory_bytes, offer.id


def _machine(offer: Offer) -> str:
    return f"{offer.gpus}× {offer.accelerator} at {offer.provider}" if offer.gpus else f"the CPU at {offer.provider}"


def _why(resources: Resources, line: QuoteLine, regions: Collection[str]) -> str:
    """Return the requirement that no provider meets. `regions`: where something is sold."""
    gpus, names, unsold = (
        resources.gpus,
        " or ".join(resources.accelerators),
        ", ".join(unsold_regions(resources.regions, regions)),
    )
    count = f"{gpus} {names or 'GPUs'}" if gpus != "auto" else names or "GPU"
    texts = {
        DropReason.PROVIDER: f"{', '.join(resources.providers)} can never serve this job",
        DropReason.ACCELERATOR: f"no provider that the job may use ever sells {names}",
        DropReason.GPUS: f"no provider that the job may use ever sells a machine with {count}",
        DropReason.NODES: f"no provider that the job may use connects {resources.nodes} machines",
        DropReason.SPOT: f"no provider that the job may use sells such a machine with spot: {resources.spot}",
        DropReason.TRUST: f"no provider that the job may use has hosts of trust {resources.trust}",
        DropReason.REGION: f"no provider that the job may use sells in {unsold}",
    }
    offer, drop = line.offer, _drop(line)
    best = f"no machine can ever serve this job: on {_machine(offer)}: {line.reason}"
    return texts.get(drop, best)


def _smaller(spec: JobSpec, workload: Workload, drop: DropReason) -> str:
    """Return the fix if relaxing no single requirement of `resources` helps."""
    if drop is not DropReason.MEMORY or spec.train is None:
        return "change resources, or configure a provider that meets them"
    methods = " or ".join(_lighter_methods(workload))
    return f"use a smaller model or max_length{f', or method {methods}' if methods else ''}"


def _lighter_methods(workload: Workload) -> Iterator[str]:
    """Yield the methods that need less memory. Mixtures and diffusion models refuse qlora."""
    if workload.method == "full":
        yield "lora"
    refuses = workload.task == "text_to_image" or (workload.shape is not None and workload.shape.experts > 0)
    if workload.method != "qlora" and not refuses:
        yield "qlora"
