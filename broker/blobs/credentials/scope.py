"""What one attempt may do below `<installation>/`; every issuer of credentials says it in its cloud's own words."""

from dataclasses import dataclass

from broker.domain.ids import AttemptId, JobId
from trainer.contract import object_keys as keys


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Full keys in the bucket; a prefix allows every key that starts with it."""

    bucket: str
    root: str
    """What all keys of the installation start with, with the closing slash."""
    job: JobId
    attempt: AttemptId
    origin: JobId | None = None
    """The job whose checkpoints this one starts from."""

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Of all attempts of the job, and of its origin: resumed from."""
        jobs = (self.job,) if self.origin is None else (self.job, self.origin)
        return tuple(self.root + keys.checkpoints(job) for job in jobs)

    @property
    def own_checkpoints(self) -> str:
        return f"{self.root}{keys.checkpoints(self.job)}{self.attempt}/"

    @property
    def documents(self) -> str:
        """Spec, desired, grant, final and the log of the attempt."""
        return f"{self.root}attempts/{self.attempt}/"

    @property
    def read_prefixes(self) -> tuple[str, ...]:
        return (self.root + keys.job_data(self.job, ""), *self.checkpoints, self.documents)

    @property
    def read_objects(self) -> tuple[str, ...]:
        return (self.root + keys.BROKER_LEASE,)

    @property
    def write_prefixes(self) -> tuple[str, ...]:
        return (
            f"{self.root}{keys.HEARTBEATS}{self.attempt}/",
            self.root + keys.logs(self.attempt),
            self.own_checkpoints,
        )

    @property
    def write_objects(self) -> tuple[str, ...]:
        return (self.root + keys.final(self.attempt),)

    @property
    def list_prefixes(self) -> tuple[str, ...]:
        """A store that denies instead of saying "absent" is asked by listing; see
        `trainer.objectstore.objects.Objects.read`.
        """
        return (*self.checkpoints, self.documents)
