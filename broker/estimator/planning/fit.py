"""Fit of a workload on a machine: the drop reason or the plan, and the duration."""

from dataclasses import dataclass, replace
from functools import lru_cache

from broker.domain.offer import GIB, DropReason, Offer
from broker.domain.workload import DIVIDED, MemoryNeed, Plan, Workload
from broker.estimator.memory.evidence import evidence_of
from broker.estimator.memory.job_memory import may_shard
from broker.estimator.planning.corrections import NO_CORRECTIONS, Corrections
from broker.estimator.planning.plan_search import Planned, Planner
from broker.estimator.speed.hardware import PCIE4, PCIE5, TABLE, Hardware
from broker.estimator.speed.throughput import WorkloadTiming, corrected, pace

_PROBE = "; its longest rows are tried after the first step"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Result of fitting a workload on a machine.

    `drop` is None if it fits; then `plan` is the best plan. A workload without a shape has neither memory nor pace, and
    uses all devices.
    """

    drop: DropReason | None
    reason: str
    memory: MemoryNeed | None = None
    pace: WorkloadTiming | None = None
    plan: Plan | None = None
    devices: int = 1


def probed(workload: Workload, plan: Plan | None) -> bool:
    """Return whether an attempt tries its longest rows before the long run.

    It does so if the memory of its steps is unknown or was never measured.
    """
    if workload.method == "script":
        return False
    if workload.shape is None or (plan is not None and plan.parallelism in DIVIDED):
        return True
    return evidence_of(workload.shape, several=False)[0] == "unchecked"


def computing(offer: Offer) -> Hardware | None:
    """Return the hardware that determines the time: the emulating one, if any. None: no figures exist."""
    hardware = TABLE.get(offer.emulated_on or offer.accelerator)
    if hardware is None or offer.facts is None or offer.facts.interconnect != "pcie":
        return hardware
    return replace(
        hardware, link=min(hardware.link, PCIE5 if hardware.link > PCIE4 and hardware.bf16_flops > 5e14 else PCIE4)
    )


@lru_cache(maxsize=256)
def _planner(workload: Workload, learned: Corrections) -> Planner:
    return Planner(workload, corrected=learned.need)


def planner(workload: Workload, learned: Corrections = NO_CORRECTIONS) -> Planner:
    """Return the planner of the workload. It is cached, because one job is quoted, submitted and placed many times."""
    return _planner(replace(workload, steps=0, eval_rows=0, data_bytes=0), learned)


def fit(
    workload: Workload, offer: Offer, *, nodes: int = 1, local: bool = False, learned: Corrections = NO_CORRECTIONS
) -> Fit:
    """Fit the workload on `nodes` machines of the offer; only the hardware is considered.

    `local`: the weights are on this machine. `learned`: corrections from own runs of such jobs. A simulated machine
    must have the memory of the real one, though it computes on other hardware.
    """
    too_small = 0 < offer.gpu_memory_bytes <= workload.oom_device_bytes
    if workload.shape is None and not too_small:
        reason = f"{workload.unestimated or 'a script'}: its memory and its time are not known"
        reason += _PROBE * probed(workload, None)
        return Fit(drop=None, reason=reason, devices=max(1, offer.gpus) * nodes)
    if workload.shape is None or (too_small and not may_shard(workload)):
        return _ran_out(workload, offer)
    nominal, actual = TABLE.get(offer.accelerator), computing(offer)
    if nominal is None or actual is None:
        name = offer.accelerator if nominal is None else offer.emulated_on
        reason = f"no figures for {name}, so neither time nor price to finish"
        return Fit(drop=DropReason.UNKNOWN_HARDWARE, reason=reason)
    if workload.precision == "bf16" and not nominal.bf16:
        return Fit(drop=DropReason.MEMORY, reason=f"{offer.accelerator} does not compute in bf16; use precision auto")
    devices = max(1, offer.gpus if actual.gpu else 1) * nodes
    available = offer.gpu_memory_bytes or nominal.memory_bytes
    plans = planner(workload, learned)
    best = plans.best(nominal, available, devices, computing=actual, nodes=nodes)
    if not best.fits:
        return _ran_out(workload, offer) if too_small else _too_large(best, available, gpu=nominal.gpu)
    cores = 1 if actual.gpu else offer.emulated_vcpus or offer.vcpus
    timing = corrected(plans.timing(best.plan, actual, nodes, cores), learned.speed(actual, workload))
    return Fit(
        drop=None,
        reason=_fits_message(best, available, devices) + _PROBE * probed(workload, best.plan),
        memory=best.memory,
        pace=pace(workload, timing, local=local),
        plan=best.plan,
        devices=best.plan.devices,
    )


def _too_large(best: Planned, available: int, *, gpu: bool) -> Fit:
    """Return the drop of a workload whose smallest plan needs more memory than is available."""
    where = "per GPU" if gpu else "of memory"
    reason = f"needs {best.memory.required / GIB:.1f} GiB {where}, has {available / GIB:.1f}"
    return Fit(drop=DropReason.MEMORY, reason=reason, memory=best.memory)


def _ran_out(workload: Workload, offer: Offer) -> Fit:
    had_gib, has_gib = workload.oom_device_bytes / GIB, offer.gpu_memory_bytes / GIB
    return Fit(drop=DropReason.MEMORY, reason=f"ran out of {had_gib:.1f} GiB before; this has {has_gib:.1f}")


def _fits_message(planned: Planned, available: int, devices: int) -> str:
    plan = planned.plan
    text = f"fits: {planned.memory.required / GIB:.1f} of {available / GIB:.1f} GiB"
    text += f"; {plan.accumulation} x {plan.micro_batch} rows"
    if plan.devices > 1:
        text += f" on each of {plan.devices} GPUs ({plan.parallelism})"
    if plan.gradient_checkpointing:
        text += ", recomputing"
    if plan.devices < devices:
        text += f"; uses {plan.devices} of {devices} GPUs, the global batch allows no more"
    return text
