"""Whether a workload fits a kind of machine, on how many of its GPUs it runs, and how long it takes there.

Data parallel only: every GPU holds everything.
"""

from dataclasses import dataclass

from broker.decide.experience import NOTHING, Experience
from broker.decide.hardware import TABLE, Hardware
from broker.decide.memory import memory
from broker.decide.throughput import Pace, pace, useful_devices
from broker.domain.offer import GIB, Drop, MemoryNeed, Offer, Workload


@dataclass(frozen=True, kw_only=True)
class Fit:
    """`drop` is None when it fits; then `devices` are used. A workload without a shape has neither memory nor pace."""

    drop: Drop | None
    reason: str
    memory: MemoryNeed | None = None
    pace: Pace | None = None
    devices: int = 1


def computing(offer: Offer) -> Hardware | None:
    """The hardware that sets the time: the emulating one where there is one. None: no figures."""
    return TABLE.get(offer.emulated_on or offer.accelerator)


def _too_small(workload: Workload, offer: Offer) -> str | None:
    """Why this very job, which has run out of memory before, needs a larger machine."""
    if 0 < offer.gpu_memory_bytes <= workload.memory_above:
        return f"it ran out of {workload.memory_above / GIB:.1f} GiB before; has {offer.gpu_memory_bytes / GIB:.1f}"
    return None


def fit(workload: Workload, offer: Offer, *, nodes: int = 1, local: bool = False, learned: Experience = NOTHING) -> Fit:
    """`nodes` of `offer` against `workload`; only hardware is looked at. `local`: the weights lie on this machine.
    `learned`: what own runs say of such jobs.

    A simulated machine must hold what the real one would, though it computes elsewhere.
    """
    if (why := _too_small(workload, offer)) is not None:
        return Fit(drop=Drop.MEMORY, reason=why)
    if workload.shape is None:
        reason = f"{workload.unestimated or 'a script'}: its memory and its time are not known"
        return Fit(drop=None, reason=reason, devices=max(1, offer.gpus) * nodes)
    nominal, actual = TABLE.get(offer.accelerator), computing(offer)
    if nominal is None or actual is None:
        name = offer.accelerator if nominal is None else offer.emulated_on
        return Fit(drop=Drop.UNKNOWN_HARDWARE, reason=f"no figures for {name}, so neither time nor price to finish")
    if workload.precision == "bf16" and not nominal.bf16:
        return Fit(drop=Drop.MEMORY, reason=f"{offer.accelerator} does not compute in bf16; use precision auto")
    there = max(1, offer.gpus if actual.gpu else 1) * nodes
    devices = useful_devices(workload, there)
    need = memory(workload, bf16=nominal.bf16, gpu=nominal.gpu, devices=devices)
    assert need is not None
    need = learned.need(workload, need, gpu=nominal.gpu)
    has = offer.gpu_memory_bytes or nominal.memory_bytes
    if need.required > has:
        what = "per GPU" if nominal.gpu else "of memory"
        reason = f"needs {need.required / GIB:.1f} GiB {what}, has {has / GIB:.1f}"
        return Fit(drop=Drop.MEMORY, reason=reason, memory=need)
    reason = f"fits: {need.required / GIB:.1f} of {has / GIB:.1f} GiB"
    if actual.gpu and devices < there:
        reason += f"; uses {devices} of {there} GPUs, global_batch / micro_batch allows no more"
    return Fit(
        drop=None,
        reason=reason,
        memory=need,
        pace=pace(
            workload,
            actual,
            cores=offer.emulated_vcpus or offer.vcpus,
            devices=devices,
            nodes=nodes,
            local=local,
            learned=learned.speed(actual, workload),
        ),
        devices=devices,
    )
