"""Boot data of an attempt's machine: `spec.json`, `grant.json` and the environment of its agent.

Used by the launch controller before each create.
"""

import json
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Protocol

from broker.controllers.base.context import ControllerContext
from broker.controllers.provisioning.attempt_documents import attempt_spec, boot_properties, upload_hash
from broker.controllers.provisioning.store_grants import Granting
from broker.domain.errors import AlreadyExists, GpubrokerError
from broker.domain.instance import SELF_STOP_S, BootSpec, HostIsolation, TrainerBundle, TrainerImage
from broker.domain.job import Attempt, Job
from broker.domain.tenancy import Tenant
from broker.estimator.planning.corrections import NO_CORRECTIONS, LearnedCorrections
from broker.estimator.preemption_rate import losses_per_hour
from broker.policy.host_access import HostUser
from broker.ports import Leased, TenantStore
from broker.runtime.secret_box import SecretBox, SecretsError
from trainer.contract import object_keys
from trainer.contract.train import TrainConfig


class Unusable(GpubrokerError):
    """Raised if a secret of the job is missing or unreadable, or its host refuses the owner. No create is sent."""


class TrainerOf(Protocol):
    """Source of the trainer for rented machines."""

    def __call__(self, *, for_image: bool) -> Awaitable[TrainerImage | TrainerBundle]:
        """Return the trainer. `for_image`: the machine runs a job's image, into which only a bundle can be installed.

        Raises Rejected if it cannot be provided, and BlobsUnavailable.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Boot:
    """Writes `spec.json` and `grant.json`, and builds the environment of the agent."""

    context: ControllerContext
    box: SecretBox
    trainer: TrainerOf | None = None
    """Returns the trainer for rented machines; None: no machine needs it."""
    learned: LearnedCorrections = lambda: NO_CORRECTIONS
    """Returns the corrections from own runs."""

    async def prepare(self, leased: Leased) -> BootSpec:
        """Write the documents of an attempt, and return its boot spec.

        Raises Unusable when a secret is missing, or when the owner's jobs may not run on the daemon's host any more.
        Raises Rejected when the trainer cannot be provided, BlobsUnavailable when the blob store cannot be written.
        """
        attempt, job = leased.attempt, leased.job
        isolation = await self._isolation(leased)
        secrets = await self._secrets(job)
        granted = await Granting(context=self.context, box=self.box).issue(job, attempt, secrets)
        access = granted.access
        secret_env = {"GPUBROKER_ATTEMPT_KEY": self.box.attempt_key(attempt.id).decode()}
        if access.options:
            secret_env["GPUBROKER_STORE_OPTIONS"] = json.dumps(dict(access.options))
        if granted.url:
            secret_env["GPUBROKER_GRANT_URL"] = granted.url
        env = {
            "GPUBROKER_BLOBS": access.url,
            "GPUBROKER_INSTALLATION": self.context.installation,
            "GPUBROKER_ATTEMPT": attempt.id,
        }
        caps = self.context.provider_of(attempt).caps
        trainer = None
        if caps.agent_start_s is not None and self.trainer is not None:
            has_image = job.spec.script is not None and job.spec.script.image is not None
            trainer = await self.trainer(for_image=has_image)
            env |= {
                "GPUBROKER_SELF_STOP": caps.self_stop,
                "GPUBROKER_SELF_STOP_S": str(round(SELF_STOP_S + job.spec.keep_on_failure)),
            }
            env |= {"GPUBROKER_NOTICES": caps.notices}
            if has_image:
                env |= {"GPUBROKER_AGENT_ONLY": "1"}
            if job.spec.train is not None and (extras := _extras(job.spec.train)):
                env |= {"GPUBROKER_EXTRAS": extras}
        await self._put_spec(attempt, job)  # last, because a spec means that a create may have been sent
        return replace(
            boot_properties(job), env=env, secret_env=secret_env, trainer=trainer, job=job.id, isolation=isolation
        )

    async def _isolation(self, leased: Leased) -> HostIsolation | None:
        """Return the isolation that the owner's jobs need on the daemon's host; None: another host, or no isolation.

        The admission is read again right before the create, because a user may have been added since the placement.
        """
        job = leased.job
        if not self.context.provider_of(leased.attempt).caps.runs_on_host:
            return None
        admission = await self.context.host_admission(HostUser(team=job.team, owner=job.owner))
        if admission.refusal:
            raise Unusable(admission.refusal)
        return HostIsolation(job=job.id, origin=job.spec.origin) if admission.isolated else None

    async def _secrets(self, job: Job) -> dict[str, str]:
        if not job.spec.secrets:
            return {}
        stored = await self._as_owner(job).secrets(job.owner, job.spec.secrets)
        missing = [name for name in job.spec.secrets if name not in stored]
        if missing:
            raise Unusable(f"secret {missing[0]} is no longer set; run `gpubroker secret set {missing[0]}` and retry")
        return {name: self._opened(name, sealed) for name, sealed in stored.items()}

    def _opened(self, name: str, sealed: bytes) -> str:
        try:
            return self.box.open(sealed)
        except SecretsError as e:
            raise Unusable(f"secret {name}: {e}") from e

    def _as_owner(self, job: Job) -> TenantStore:
        return self.context.store.as_tenant(Tenant(team=job.team, owner=job.owner))

    async def _sizes(self, job: Job) -> dict[str, int]:
        """Return the bytes of the job's inputs, by key."""
        references = [job.spec.train.data.path] if job.spec.train else []
        references += [job.spec.script.code] if job.spec.script else []
        hashes = [upload_hash(reference) for reference in references]
        sizes = {sha256: await self.context.store.upload_bytes(job.team, job.owner, sha256) for sha256 in hashes}
        return {object_keys.job_data(job.id, sha256): size for sha256, size in sizes.items() if size is not None}

    async def _put_spec(self, attempt: Attempt, job: Job) -> None:
        sizes = await self._sizes(job)
        spec = attempt_spec(attempt, job, self.context, sizes)
        losses = losses_per_hour(attempt.line.offer, self.learned().spots, attempt.line.nodes)
        spec = spec.model_copy(update={"losses_per_hour": losses})
        try:
            await self.context.blobs.put(object_keys.spec(attempt.id), spec.model_dump_json().encode(), if_absent=True)
        except AlreadyExists:
            return  # an earlier create of this attempt wrote the same content


def _extras(train: TrainConfig) -> str:
    """Return the optional packages of the trainer that a machine without an image installs for this job."""
    extras = {"trackers": train.metrics.trackers, "fp8": train.fp8}
    return " ".join(name for name, is_wanted in extras.items() if is_wanted)
