"""What the next attempt of a job has left to do, and how its plan changes after memory ran out."""

import re
from collections.abc import Sequence
from dataclasses import replace

from broker.decide.workload import remaining
from broker.domain.job import Job
from broker.domain.offer import Plan, Workload
from trainer.contract.keys import MANIFEST
from trainer.contract.train import TrainConfig

_MANIFEST = re.compile(rf"checkpoints/[^/]+/[^/]+/\d{{1,18}}-[^/]+/{re.escape(MANIFEST)}", re.ASCII)


def smaller_micro_batch(micro_batch: int, global_batch: int, changes: int) -> int:
    """Halved once a change, and still a divisor of the global batch, which stays as it is."""
    smaller = max(1, micro_batch >> changes)
    while global_batch % smaller:
        smaller -= 1
    return smaller


def as_planned(train: TrainConfig, plan: Plan | None, changes: int) -> TrainConfig:
    """What an attempt's machines are told: its plan's numbers. Where nothing was planned the trainer's own, and each
    time memory ran out half the micro-batch, with activations recomputed."""
    if plan is not None:
        rows, again = plan.micro_batch, plan.gradient_checkpointing
    else:
        rows = smaller_micro_batch(train.rows_at_once, train.global_batch, changes)
        again = train.recomputes or changes > 0
    return train.model_copy(update={"micro_batch": rows, "gradient_checkpointing": again})


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
    work = replace(job.workload, oom_changes=job.oom_changes)
    return remaining(work, step_of(resume_from[0])) if resume_from else work
