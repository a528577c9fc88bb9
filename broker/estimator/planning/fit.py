"""Whether a workload fits a kind of machine, by which plan it runs there, and how long it takes."""

from dataclasses import dataclass, replace
from functools import lru_cache

from broker.domain.offer import GIB, DropReason, Offer
from broker.domain.workload import DIVIDED, MemoryNeed, Plan, Workload
from broker.estimator.memory.evidence import evidence_of
from broker.estimator.memory.job_memory import divides
from broker.estimator.planning.corrections import NO_CORRECTIONS, Corrections
from broker.estimator.planning.plan_search import Planned, Planner
from broker.estimator.speed.hardware import PCIE4, PCIE5, TABLE, Hardware
from broker.estimator.speed.throughput import WorkloadTiming, corrected, pace

_PROBE = "; its longest rows are tried after the first step"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """`drop` is None when it fits; then `plan` is the best one. A workload without a shape has neither memory nor
    pace, and runs on all devices.
    """

    drop: DropReason | None
    reason: str
    memory: MemoryNeed | None = None
    pace: WorkloadTiming | None = None
    plan: Plan | None = None
    devices: int = 1


def probed(workload: Workload, plan: Plan | None) -> bool:
    """Nobody knows what its steps take, or nobody has measured it: an attempt tries its longest rows before the long
    run.
    """
    if workload.method == "script":
        return False
    if workload.shape is None or (plan is not None and plan.parallelism in DIVIDED):
        return True
    return evidence_of(workload.shape, several=False)[0] == "unchecked"


def computing(offer: Offer) -> Hardware | None:
    """The hardware that sets the time: the emulating one where there is one. None: no figures."""
    found = TABLE.get(offer.emulated_on or offer.accelerator)
    if found is None or offer.facts is None or offer.facts.interconnect != "pcie":
        return found
    return replace(found, link=min(found.link, PCIE5 if found.link > PCIE4 and found.bf16_flops > 5e14 else PCIE4))


@lru_cache(maxsize=256)
def _planner(workload: Workload, learned: Corrections) -> Planner:
    return Planner(workload, corrected=learned.need)


def planner(workload: Workload, learned: Corrections = NO_CORRECTIONS) -> Planner:
    """A job is quoted, submitted and placed again and again: what its steps take is worked out once."""
    return _planner(replace(workload, steps=0, eval_rows=0, data_bytes=0), learned)


def fit(
    workload: Workload, offer: Offer, *, nodes: int = 1, local: bool = False, learned: Corrections = NO_CORRECTIONS
) -> Fit:
    """`nodes` of `offer` against `workload`; only hardware is looked at. `local`: the weights lie on this machine.
    `learned`: what own runs say of such jobs.

    A simulated machine must hold what the real one would, though it computes elsewhere.
    """
    too_small = 0 < offer.gpu_memory_bytes <= workload.oom_device_bytes
    if workload.shape is None and not too_small:
        reason = f"{workload.unestimated or 'a script'}: its memory and its time are not known"
        reason += _PROBE * probed(workload, None)
        return Fit(drop=None, reason=reason, devices=max(1, offer.gpus) * nodes)
    if workload.shape is None or (too_small and not divides(workload)):
        return _ran_out(workload, offer)
    nominal, actual = TABLE.get(offer.accelerator), computing(offer)
    if nominal is None or actual is None:
        name = offer.accelerator if nominal is None else offer.emulated_on
        return Fit(
            drop=DropReason.UNKNOWN_HARDWARE, reason=f"no figures for {name}, so neither time nor price to finish"
        )
    if workload.precision == "bf16" and not nominal.bf16:
        return Fit(drop=DropReason.MEMORY, reason=f"{offer.accelerator} does not compute in bf16; use precision auto")
    there = max(1, offer.gpus if actual.gpu else 1) * nodes
    has = offer.gpu_memory_bytes or nominal.memory_bytes
    plans = planner(workload, learned)
    found = plans.best(nominal, has, there, computing=actual, nodes=nodes)
    need = found.memory
    if not found.fits and too_small:
        return _ran_out(workload, offer)
    if not found.fits:
        what = "per GPU" if nominal.gpu else "of memory"
        lacks = f"needs {need.required / GIB:.1f} GiB {what}, has {has / GIB:.1f}"
        return Fit(drop=DropReason.MEMORY, reason=lacks, memory=need)
    cores = 1 if actual.gpu else offer.emulated_vcpus or offer.vcpus
    at = corrected(plans.timing(found.plan, actual, nodes, cores), learned.speed(actual, workload))
    return Fit(
        drop=None,
        reason=_words(found, has, there) + _PROBE * probed(workload, found.plan),
        memory=need,
        pace=pace(workload, at, local=local),
        plan=found.plan,
        devices=found.plan.devices,
    )


def _ran_out(workload: Workload, offer: Offer) -> Fit:
    had, has = workload.oom_device_bytes / GIB, offer.gpu_memory_bytes / GIB
    return Fit(drop=DropReason.MEMORY, reason=f"it ran out of {had:.1f} GiB before; has {has:.1f}")


def _words(found: Planned, has: int, there: int) -> str:
    plan = found.plan
    text = (
        f"fits: {found.memory.required / GIB:.1f} of {has / GIB:.1f} GiB; {plan.accumulation} x {plan.micro_batch} rows"
    )
    if plan.devices > 1:
        text += f" on each of {plan.devices} GPUs ({plan.parallelism})"
    if plan.gradient_checkpointing:
        text += ", recomputing"
    if plan.devices < there:
        text += f"; uses {plan.devices} of {there} GPUs, the global batch allows no more"
    return text
