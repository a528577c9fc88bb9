"""Contents of the documents of an attempt's machine: `spec.json`, and the properties that a create asks for.

Used by `Boot`, which writes them, and by the check of a machine whose create had no answer.
"""

from collections.abc import Mapping
from typing import Any

from broker.controllers.base.context import ControllerContext
from broker.domain.instance import BootSpec, CloudOptions
from broker.domain.job import Attempt, Job
from broker.domain.money import ZERO
from broker.domain.workload import MemoryNeed
from broker.estimator.planning.fit import probed
from broker.estimator.planning.plan_search import world
from broker.lifecycle.recovery import planned_train_config
from trainer.contract import object_keys
from trainer.contract.documents import AttemptSpec, Cost, DataFile, MemoryUse
from trainer.dataset.readers import format_of

UPLOAD = "upload:"


def boot_properties(job: Job) -> BootSpec:
    """Return the properties that a job's machines must have, without their documents."""
    resources, script = job.spec.resources, job.spec.script
    image = None if script is None else script.image
    return BootSpec(nodes=resources.nodes, options=CloudOptions(**resources.aws.model_dump()), image=image)


def attempt_spec(attempt: Attempt, job: Job, context: ControllerContext, sizes: Mapping[str, int]) -> AttemptSpec:
    """Return `spec.json` of an attempt, which is the same for each of its creates.

    `sizes`: bytes of the job's inputs, by key.
    """
    spec = job.spec
    train = planned_train_config(spec.train, attempt.line.plan, job.remedy) if spec.train else None
    data = code = None
    if train is not None:
        data = _file(job, train.data.path, format_of(train.data.path, train.data.format), sizes)
    if spec.script is not None:
        code = _file(job, spec.script.code, "tar", sizes)
    offer = attempt.line.offer
    gpus = 0 if offer.emulated_on == "cpu" or offer.accelerator == "cpu" else offer.gpus
    return AttemptSpec(
        installation=context.installation,
        job=job.id,
        attempt=attempt.id,
        number=attempt.number,
        train=train,
        script=spec.script,
        data=data,
        code=code,
        checkpoint=spec.checkpoint,
        date=job.created_at.date().isoformat(),
        probe=probed(job.workload, attempt.line.plan),
        resume_from=attempt.resume_from,
        token_cache_bytes=attempt.line.rows_bytes if train is not None else 0,
        env=spec.env,
        secrets=spec.secrets,
        world=world(attempt.line.plan, nodes=spec.resources.nodes, gpus=gpus),
        limits=context.limits,
        cost=_cost(attempt, job),
        memory=_memory(attempt.line.memory),
    )


def _cost(attempt: Attempt, job: Job) -> Cost:
    before = max(ZERO, job.spent_usd - attempt.charged_usd)
    return Cost(before=before, per_hour=attempt.line.offer.usd_per_hour * attempt.line.nodes)


def _memory(need: MemoryNeed | None) -> MemoryUse | None:
    """Return the memory estimate of the plan, which the agent reports when memory runs out."""
    if need is None:
        return None
    return MemoryUse(
        weights=need.weights,
        gradients=need.gradients,
        optimizer=need.optimizer,
        activations=need.activations + need.logits,
    )


def upload_hash(reference: str) -> str:
    """Return the SHA-256 of the upload that a reference such as `upload:‹sha256›/name` names."""
    return reference.removeprefix(UPLOAD).split("/", 1)[0]


def _file(job: Job, reference: str, fmt: Any, sizes: Mapping[str, int]) -> DataFile:
    sha256 = upload_hash(reference)
    key = object_keys.job_data(job.id, sha256)
    return DataFile(key=key, sha256=sha256, bytes=sizes.get(key, 0), format=fmt)
