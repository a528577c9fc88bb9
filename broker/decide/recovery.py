"""What the next attempt of a job has left to do, and how its plan changes after memory ran out."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from broker.decide.hardware import TABLE
from broker.decide.memory import memory
from broker.decide.workload import remaining
from broker.domain.job import Job, Remedy
from broker.domain.offer import GIB, MemoryNeed, Offer, Workload
from trainer.contract.keys import MANIFEST
from trainer.contract.train import TrainConfig

_MANIFEST = re.compile(rf"checkpoints/[^/]+/[^/]+/\d{{1,18}}-[^/]+/{re.escape(MANIFEST)}", re.ASCII)


MAX_CHANGES = 2
"""Of one job's plan, for memory that ran out."""
LESS = 0.8
"""A changed plan is estimated to need a fifth less at least: by how much memory fell short is not known [assumed]."""
SHORT = 1.1
"""What ran out of memory wanted at least a tenth more than there was [assumed]."""
MOST = 2.5
"""Memory is corrected to so many times the estimate at most, whatever one machine says: the worst known estimate was
2.3 times too low."""


def shortfall(device_bytes: int, need: MemoryNeed) -> float:
    """What an estimate is to be multiplied by after it ran out of `device_bytes`, so that it does not fit there any
    more; between 1 and `MOST`."""
    wanted = SHORT * device_bytes / (1 + need.margin) - need.context
    return min(MOST, max(1.0, wanted / need.peak))


def _plans(work: Workload, devices: int) -> Iterator[Workload]:
    """Plans that need less memory, the one that costs least time first; the global batch is the same in all of them."""
    smaller = [size for size in range(_held(work, devices) - 1, 0, -1) if work.global_batch % size == 0]
    for size in smaller:
        yield replace(work, micro_batch=size)
    if not work.gradient_checkpointing:
        for size in (work.micro_batch, *smaller):
            yield replace(work, micro_batch=size, gradient_checkpointing=True)


def _need(work: Workload, offer: Offer, devices: int) -> MemoryNeed | None:
    """As estimated, without what this job or others have seen; None: nobody can tell."""
    device = TABLE.get(offer.accelerator)
    if device is None:
        return None
    held = replace(work, micro_batch=_held(work, devices))
    return memory(held, bf16=device.bf16, gpu=device.gpu, devices=devices)


def _next_plan(work: Workload, offer: Offer, devices: int) -> Workload | None:
    """The first plan that needs clearly less, or any smaller one where nobody can tell; None: only a larger machine."""
    if work.method == "script":
        return None
    before = _need(work, offer, devices)
    for plan in _plans(work, devices):
        after = _need(plan, offer, devices)
        if before is None or after is None or after.required <= LESS * before.required:
            return plan
    return None


def remedy(job: Job, offer: Offer, *, host: bool, devices: int = 1) -> Remedy:
    """How the plan changes after `job` has run out of memory on `offer`: a smaller micro-batch, then gradient
    checkpointing, then a larger machine. `host`: it was the memory of a machine with GPUs that ran out, which only a
    machine with more helps."""
    work, before = planned(job), job.remedy or Remedy(tried=())
    changed = _with_plan(replace(before, tried=(*before.tried, _words(work, offer, host=host))), work)
    if host:
        return replace(changed, ram_above=max(before.ram_above, offer.ram_bytes))
    if (need := _need(work, offer, devices)) is not None:
        short = shortfall(offer.gpu_memory_bytes, need)
        changed = replace(changed, memory_scale=max(before.memory_scale, short))
    plan = _next_plan(work, offer, devices)
    if plan is None:
        return replace(changed, memory_above=max(before.memory_above, offer.gpu_memory_bytes))
    return _with_plan(changed, plan)


def _held(work: Workload, devices: int) -> int:
    """Rows of a micro-batch on one device: its share of the global batch at most."""
    return min(work.micro_batch, -(-work.global_batch // devices))


def _with_plan(changed: Remedy, work: Workload) -> Remedy:
    if work.method == "script":
        return changed
    return replace(changed, micro_batch=work.micro_batch, gradient_checkpointing=work.gradient_checkpointing)


def _words(work: Workload, offer: Offer, *, host: bool) -> str:
    size = offer.ram_bytes if host else offer.gpu_memory_bytes
    where = f"{offer.accelerator} ({size / GIB:.1f} GiB{' of the machine' if host else ''})"
    if work.method == "script":
        return where
    return f"micro-batch {work.micro_batch}{' with checkpointing' if work.gradient_checkpointing else ''} on {where}"


def told(job: Job, after: Remedy) -> str:
    """What the next attempt does otherwise, in one line."""
    before, words = planned(job), []
    if after.micro_batch not in (0, before.micro_batch):
        words.append(f"micro-batch {after.micro_batch} instead of {before.micro_batch}")
    if after.gradient_checkpointing != before.gradient_checkpointing:
        words.append("gradient checkpointing on")
    if after.memory_above > before.memory_above:
        words.append(f"only machines with more than {after.memory_above / GIB:.1f} GiB a device")
    if after.ram_above > before.ram_above:
        words.append(f"only machines with more than {after.ram_above / GIB:.1f} GiB of memory")
    same = "" if before.method == "script" else f"; global batch {before.global_batch} as before"
    return f"memory ran out: next with {', '.join(words)}{same}"


def given_up(job: Job, offer: Offer, *, host: bool) -> str:
    """Why a job fails whose memory ran out once more than the plan may change."""
    work = planned(job)
    tried = [*(job.remedy.tried if job.remedy else ()), _words(work, offer, host=host)]
    fix = "a larger machine" if work.method == "script" else "a shorter max_length, method lora, or larger GPUs"
    times = "once" if len(tried) == 1 else f"{len(tried)} times"
    return f"memory ran out {times}: {'; '.join(tried)}; ask for {fix}"


def planned(job: Job) -> Workload:
    """The whole job, with the plan as memory has allowed it so far."""
    work, changed = job.workload, job.remedy
    if changed is None:
        return work
    return replace(
        work,
        micro_batch=changed.micro_batch or work.micro_batch,
        gradient_checkpointing=changed.gradient_checkpointing or work.gradient_checkpointing,
        memory_scale=changed.memory_scale,
        memory_above=changed.memory_above,
        ram_above=changed.ram_above,
    )


def plan_after_oom(train: TrainConfig, changed: Remedy | None) -> TrainConfig:
    """What the trainer is given: the plan is the job's, all else is as it was asked for."""
    if changed is None or not changed.micro_batch:
        return train
    plan = {"micro_batch": changed.micro_batch, "gradient_checkpointing": changed.gradient_checkpointing}
    return train.model_copy(update=plan)


def step_of(manifest: str) -> int:
    """The step that a manifest's key carries: `checkpoints/<job>/<attempt>/<step>-<nonce>/manifest.json`."""
    return int(manifest.removesuffix("/" + MANIFEST).rsplit("/", 1)[-1].split("-", 1)[0])


def furthest_first(keys: Sequence[str]) -> tuple[str, ...]:
    """Resume candidates among the keys below `checkpoints/`, the furthest step first; any order within one step.

    A machine may write what it likes there: keys that are no manifest's are left out.
    """
    return tuple(sorted(filter(_MANIFEST.fullmatch, keys), key=lambda key: (-step_of(key), key)))


def workload_left(job: Job, resume_from: Sequence[str]) -> Workload:
    """What is left to price: the steps after the furthest checkpoint, with the plan as memory allows it."""
    work = planned(job)
    return remaining(work, step_of(resume_from[0])) if resume_from else work
