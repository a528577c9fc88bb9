"""Plans a job's next attempt: the remaining work, and the changed plan after the job ran out of memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from broker.domain.job import Attempt, Job, PlanAdjustment
from broker.domain.offer import GIB, QuoteLine
from broker.domain.workload import MemoryNeed, Plan, Workload
from broker.estimator.memory.evidence import shortfall
from broker.estimator.memory.job_memory import may_shard
from broker.estimator.planning.plan_search import Planner, shards_of
from broker.estimator.speed.hardware import TABLE
from broker.estimator.workload import remaining
from trainer.contract.object_keys import manifests, step_of
from trainer.contract.train import TrainConfig

MAX_CHANGES = 2
"""Number of changes of one job's plan after it ran out of memory."""
MAX_NEED_SHARE = 0.8
"""Largest estimated need of a changed plan, as a share of the failed plan's need. The real shortfall is unknown
[assumed].
"""


def adjust_plan(job: Job, line: QuoteLine, *, host: bool) -> PlanAdjustment:
    """Return the changed plan after `job` ran out of memory on `line`.

    The order of changes: a smaller micro-batch, gradient checkpointing, a larger machine. `host`: the host memory of a
    machine with GPUs ran out, so only a machine with more host memory helps.
    """
    offer, before = line.offer, job.remedy or PlanAdjustment(failed_plans=())
    changed = replace(before, failed_plans=(*before.failed_plans, _plan_message(job, line, host=host)))
    if host:
        return replace(changed, oom_host_bytes=max(before.oom_host_bytes, offer.ram_bytes))
    ran = _as_run(job, line)
    if (need := _need(ran, line)) is not None:
        factor = shortfall(offer.gpu_memory_bytes, need)
        changed = replace(changed, memory_factor=max(before.memory_factor, factor))
    plan = _next_plan(ran, line)
    if plan is None:
        shards = shards_of(line.plan, line.nodes) if line.plan else 1
        return replace(
            changed,
            oom_device_bytes=max(before.oom_device_bytes, offer.gpu_memory_bytes),
            oom_shards=max(before.oom_shards, shards),
            oom_micro_batch=min(filter(None, (before.oom_micro_batch, ran.micro_batch))),
        )
    return replace(changed, micro_batch=plan.micro_batch, gradient_checkpointing=plan.gradient_checkpointing)


def _as_run(job: Job, line: QuoteLine) -> Workload:
    """Return the job's workload with the plan that ran on the machines of `line`."""
    work, plan = adjusted_workload(job), line.plan
    if plan is None:
        return work
    return replace(work, micro_batch=plan.micro_batch, gradient_checkpointing=plan.gradient_checkpointing)


def _need(ran: Workload, line: QuoteLine) -> MemoryNeed | None:
    """Return the estimate without the corrections of earlier runs; None: there is no estimator."""
    device = TABLE.get(line.offer.accelerator)
    if device is None or ran.shape is None:
        return None
    plan = line.plan or Plan(micro_batch=ran.micro_batch)
    plan = replace(plan, micro_batch=ran.micro_batch, gradient_checkpointing=ran.gradient_checkpointing)
    return Planner(ran).need(plan, device, line.nodes)


def _smaller_plans(ran: Workload, devices: int) -> Iterator[Workload]:
    """Yield plans that need less memory, the fastest first.

    All plans have the same global batch and the same number of `devices`, which share the model under FSDP.
    """
    sizes = [size for size in range(ran.micro_batch - 1, 0, -1) if ran.global_batch % (size * devices) == 0]
    for size in sizes:
        yield replace(ran, micro_batch=size)
    if not ran.gradient_checkpointing:
        for size in (ran.micro_batch, *sizes):
            yield replace(ran, micro_batch=size, gradient_checkpointing=True)


def _next_plan(ran: Workload, line: QuoteLine) -> Workload | None:
    """Return the first plan that needs at most `MAX_NEED_SHARE` of the memory; None: only a larger machine helps.

    Without an estimate, the first smaller plan is returned.
    """
    if ran.method == "script":
        return None
    before = _need(ran, line)
    for plan in _smaller_plans(ran, line.plan.devices if line.plan else 1):
        after = _need(plan, line)
        if before is None or after is None or after.required <= MAX_NEED_SHARE * before.required:
            return plan
    return None


def _plan_message(job: Job, line: QuoteLine, *, host: bool) -> str:
    offer, ran = line.offer, _as_run(job, line)
    size = offer.ram_bytes if host else offer.gpu_memory_bytes
    where = f"{offer.accelerator} ({size / GIB:.1f} GiB{' of the machine' if host else ''})"
    if ran.method == "script":
        return where
    return f"micro-batch {ran.micro_batch}{' with checkpointing' if ran.gradient_checkpointing else ''} on {where}"


def adjustment_message(job: Job, line: QuoteLine, after: PlanAdjustment) -> str:
    """Return the changes of the next attempt, in one line."""
    before, ran, words = job.remedy or PlanAdjustment(failed_plans=()), _as_run(job, line), []
    if after.micro_batch not in (0, ran.micro_batch):
        words.append(f"micro-batch {after.micro_batch} instead of {ran.micro_batch}")
    if after.gradient_checkpointing and not ran.gradient_checkpointing:
        words.append("gradient checkpointing on")
    if after.oom_device_bytes > before.oom_device_bytes:
        more = f", or the model divided between more than {after.oom_shards} devices" if may_shard(ran) else ""
        words.append(f"only machines with more than {after.oom_device_bytes / GIB:.1f} GiB a device{more}")
    if after.oom_host_bytes > before.oom_host_bytes:
        words.append(f"only machines with more than {after.oom_host_bytes / GIB:.1f} GiB of memory")
    same = "" if ran.method == "script" else f"; global batch {ran.global_batch} as before"
    return f"memory ran out: next with {', '.join(words)}{same}"


def given_up_message(job: Job, line: QuoteLine, *, host: bool) -> str:
    """Return the reason of failure of a job that ran out of memory again after its last change of plan."""
    tried = [*(job.remedy.failed_plans if job.remedy else ()), _plan_message(job, line, host=host)]
    times = "once" if len(tried) == 1 else f"{len(tried)} times"
    script = job.workload.method == "script"
    fix = "a larger machine" if script else "a shorter max_length, method lora, or larger GPUs"
    return f"memory ran out {times}: {'; '.join(tried)}; ask for {fix}"


def adjusted_workload(job: Job) -> Workload:
    """Return the whole job's workload, with plans limited by the job's earlier out-of-memory failures."""
    work, changed = job.workload, job.remedy
    if changed is None:
        return work
    max_micro_batch = changed.micro_batch
    return replace(
        work,
        max_micro_batch=max_micro_batch,
        micro_batch=min(work.micro_batch, max_micro_batch) if max_micro_batch else work.micro_batch,
        gradient_checkpointing=changed.gradient_checkpointing or work.gradient_checkpointing,
        free_checkpointing=work.free_checkpointing and not changed.gradient_checkpointing,
        memory_factor=changed.memory_factor,
        oom_device_bytes=changed.oom_device_bytes,
        oom_shards=changed.oom_shards,
        oom_micro_batch=changed.oom_micro_batch,
        oom_host_bytes=changed.oom_host_bytes,
    )


def planned_train_config(train: TrainConfig, plan: Plan | None, changed: PlanAdjustment | None) -> TrainConfig:
    """Return the training config of an attempt's machines with the numbers of its plan.

    Without a plan the trainer's own numbers are used, within the limits of earlier out-of-memory failures.
    """
    if plan is not None:
        micro_batch, recompute = plan.micro_batch, plan.gradient_checkpointing
    else:
        max_micro_batch = changed.micro_batch if changed else 0
        micro_batch = min(train.micro_batch_rows, max_micro_batch or train.micro_batch_rows)
        recompute = train.recomputes or (changed is not None and changed.gradient_checkpointing)
    return train.model_copy(update={"micro_batch": micro_batch, "gradient_checkpointing": recompute})


def furthest_first(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the manifests below `checkpoints/`, the furthest step first, and by key within one step."""
    return tuple(sorted(manifests(keys), key=lambda key: (-step_of(key), key)))


def lasting_manifests(manifests: Sequence[str], attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """Return the manifests that are not deleted while a job on several machines starts from them.

    Each machine lists the manifests itself, and a live attempt removes its older manifests. Manifests of live attempts
    are therefore used only if no ended attempt has any.
    """
    live = {attempt.id for attempt in attempts if attempt.live}
    ended = tuple(key for key in manifests if key.split("/")[2] not in live)
    return ended or tuple(manifests)


def workload_left(job: Job, resume_from: Sequence[str]) -> Workload:
    """Return the workload that remains after the furthest checkpoint, with plans limited as in `adjusted_workload`."""
    work = adjusted_workload(job)
    return remaining(work, step_of(resume_from[0])) if resume_from else work
