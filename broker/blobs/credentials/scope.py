"""Permissions of one attempt below `<installation>/`, which each issuer translates for its cloud."""

from dataclasses import dataclass

from broker.domain.ids import AttemptId, JobId
from trainer.contract import object_keys


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Permissions of one attempt as full keys in the bucket; a prefix allows every key that starts with it."""

    bucket: str
    root: str
    """Prefix of all keys of the installation, with the closing slash."""
    job: JobId
    attempt: AttemptId
    origin: JobId | None = None
    """The job whose checkpoints this one starts from."""

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Prefixes of the checkpoints of all attempts of the job and of its origin, from which it may resume."""
        jobs = (self.job,) if self.origin is None else (self.job, self.origin)
        return tuple(self.root + object_keys.checkpoints(job) for job in jobs)

    @property
    def own_checkpoints(self) -> str:
        return f"{self.root}{object_keys.checkpoints(self.job)}{self.attempt}/"

    @property
    def documents(self) -> str:
        """Spec, desired, grant, final and the log of the attempt."""
        return f"{self.root}attempts/{self.attempt}/"

    @property
    def read_prefixes(self) -> tuple[str, ...]:
        return (self.root + object_keys.job_data(self.job, ""), *self.checkpoints, self.documents)

    @property
    def read_objects(self) -> tuple[str, ...]:
        return (self.root + object_keys.BROKER_LEASE,)

    @property
    def write_prefixes(self) -> tuple[str, ...]:
        return (
            f"{self.root}{object_keys.HEARTBEATS}{self.attempt}/",
            self.root + object_keys.logs(self.attempt),
            self.own_checkpoints,
        )

    @property
    def write_objects(self) -> tuple[str, ...]:
        return (self.root + object_keys.final(self.attempt),)

    @property
    def list_prefixes(self) -> tuple[str, ...]:
        """Prefixes that may be listed, because some stores deny a read instead of reporting "absent".

        See `trainer.objectstore.objects.Objects.read`.
        """
        return (*self.checkpoints, self.documents)
