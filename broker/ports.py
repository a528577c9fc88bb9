"""The doors of the house: what the controllers need of the outside, and nothing about how it is done.

Store, Provider, Blobs and Notifier each have a conformance suite in tests/conformance that every implementation passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Protocol

from broker.domain.ids import AttemptId, Installation, InstanceName, JobId
from broker.domain.instance import BootSpec, Caps, Liveness, Observed
from broker.domain.job import Attempt, Event, Handle, Job, JobState, LedgerEntry, LedgerKind, Reason
from broker.domain.offer import GpuAsk, Offer


class Clock(Protocol):
    """Time, injected: wall time for records, monotonic time for patience."""

    def now(self) -> datetime: ...
    def monotonic(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


# ---------------------------------------------------------------------------------------------------------- providers


class Provider(Protocol):
    """A cloud. Errors are those of `domain.errors.ProviderError`; what cannot be classified is OutcomeUnknown."""

    @property
    def name(self) -> str: ...
    @property
    def caps(self) -> Caps: ...
    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows of the last `offers` that were left out (they cannot be true, or cannot run the image), by reason."""
        ...

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        """What is for sale now. Raises Rejected (credentials), Throttled, OutcomeUnknown."""
        ...

    def launcher_id(self) -> str:
        """Identity of what would carry out a create asked for now; stored before the create is sent."""
        ...

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        """DEAD only when it is proven that this launcher can never again create `name`."""
        ...

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        """All nodes or none, one set a name. Raises NoCapacity, Rejected, Throttled, OutcomeUnknown."""
        ...

    async def cancel(self, name: InstanceName) -> None:
        """Asks whatever still carries out a create of `name` to stop; `launcher` tells when it has. Never raises."""
        ...

    async def list(self) -> Sequence[Observed]:
        """Everything under our prefix, from the cloud itself. Raises Throttled, OutcomeUnknown."""
        ...

    async def destroy(self, handle: Handle) -> None:
        """Asks for destruction; returning is no proof of absence. Raises Gone when it is absent already."""
        ...

    async def reach(self, handle: Handle, command: Sequence[str], *, tty: bool) -> Sequence[str]:
        """argv of a process of this host that runs `command` (empty: a shell) beside the agent on that machine.

        Raises Rejected when there is no way to it, Gone when it is absent.
        """
        ...

    async def check(self) -> str | None:
        """One read-only call: None when the credentials work, else what is missing and how to get it, in one line."""
        ...

    async def close(self) -> None:
        """Lets go of connections; machines go on."""
        ...


# -------------------------------------------------------------------------------------------------------------- blobs


@dataclass(frozen=True, kw_only=True)
class BlobInfo:
    key: str
    bytes: int
    etag: str
    """Changes with every write; compared, never parsed."""


class Blobs(Protocol):
    """The meeting place. Keys are relative to the installation. Raises BlobsUnavailable when nothing is known."""

    @property
    def local(self) -> bool:
        """True for a folder or memory: only this machine reaches it."""
        ...

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """Writes and returns the e_tag. Raises AlreadyExists with `if_absent`."""
        ...

    async def get(self, key: str) -> bytes | None:
        """The object's bytes; None when it is absent."""
        ...

    async def list(self, prefix: str) -> Sequence[BlobInfo]:
        """All objects below a prefix, in key order."""
        ...

    async def delete(self, key: str) -> None:
        """Absent is fine."""
        ...

    async def copy(self, source: str, target: str) -> None:
        """Server-side where the store can."""
        ...

    @property
    def scopes(self) -> bool:
        """True when `grant` limits what it hands out to the attempt's own part."""
        ...

    async def grant(self, job: JobId, attempt: AttemptId, *, origin: JobId | None = None) -> "StoreAccess":
        """What an instance is given to reach its own part; renewed before `expires_at`. Raises BlobsUnavailable.

        `origin`: the job whose checkpoints this one starts from, to be read as well.
        """
        ...

    async def sign(self, key: str, *, for_s: float) -> str:
        """A URL that reads one object for so long. Raises BlobError where the store has no such thing (a folder)."""
        ...


@dataclass(frozen=True, kw_only=True)
class StoreAccess:
    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Credentials and settings for obstore: handed over sealed or as secret environment."""
    scoped: bool = False
    """True when the credentials reach no more than the attempt's own part."""
    expires_at: datetime | None = None
    """None: they do not expire."""


# -------------------------------------------------------------------------------------------------------------- store


class Lane(StrEnum):
    """Which attempts a controller claims; the sets are disjoint, so that no two controllers fight over one.

    LAUNCH        intended, launching
    LIVENESS      booting, training, without a signal (the job's stop_requested, the attempt's cap_near)
    INTERRUPTION  draining; and booting, training with a signal
    TERMINATION   terminating
    """

    LAUNCH = "launch"
    LIVENESS = "liveness"
    INTERRUPTION = "interruption"
    TERMINATION = "termination"


@dataclass(frozen=True, kw_only=True)
class Leased:
    """An attempt under our lease, with its job as it was read in the same statement."""

    attempt: Attempt
    job: Job


@dataclass(frozen=True, kw_only=True)
class Charge:
    """Billing's write: applies only if the attempt is still charged up to `since`."""

    attempt_id: AttemptId
    job_id: JobId
    since: datetime | None
    """The attempt's `charged_to` as read."""
    to: datetime
    usd: Decimal
    """To add to the attempt's `charged_usd` and the job's `spent_usd`; one ledger entry, none when it is 0."""
    cap_near: bool = False
    """Raise the signal as well; it is never taken back for an attempt."""
    event: Event | None = None
    kind: LedgerKind = LedgerKind.CHARGE
    """`adjustment` for time after the attempt's end."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One atomic step. All of it happens or, when any fence fails, nothing.

    Fences: an attempt by (id, epoch, state) of `attempt[0]`; a job by (id, epoch, state) of `job[0]` when no attempt is
    written or admitted with it under an active job, else by (id, state, attempts).
    The controllers' columns of `attempt[1]` and `job[1]` are written, the API's and billing's are not.
    The lease is given up; the row is due again after `due_in_s`.
    """

    attempt: tuple[Attempt, Attempt] | None = None
    job: tuple[Job, Job] | None = None
    admit: Attempt | None = None
    """A new attempt: inserted with its reservation in the same transaction."""
    charge: Charge | None = None
    ledger: tuple[LedgerEntry, ...] = ()
    events: tuple[Event, ...] = ()
    due_in_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JobFilter:
    owner: str | None = None
    states: tuple[JobState, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    since: datetime | None = None
    until: datetime | None = None
    before: tuple[datetime, JobId] | None = None
    """Page on: jobs older than this, newest first."""
    limit: int = 50


@dataclass(frozen=True, kw_only=True)
class Token:
    id: str
    owner: str
    scopes: tuple[str, ...]
    created_at: datetime
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A data set or code archive that was uploaded: content-addressed."""

    sha256: str
    bytes: int
    name: str
    summary: Mapping[str, Any] | None
    """The data check's one-pass summary; None for an archive."""


class Store(Protocol):
    """Rows, leases and the ledger. Times that order things are the database's own.

    Raises StoreUnavailable when the database cannot be reached or a commit's fate is unknown.
    """

    # --- controllers
    async def claim_jobs(self, states: Sequence[JobState], *, owner: str, lease_s: float, limit: int) -> Sequence[Job]:
        """Due jobs in these states (or with a stop request), each under a lease with a higher epoch."""
        ...

    async def claim_attempts(self, lane: Lane, *, owner: str, lease_s: float, limit: int) -> Sequence[Leased]:
        """Due attempts of a lane, likewise; those with a signal are due at once."""
        ...

    async def apply(self, changes: Sequence[Change]) -> Sequence[bool]:
        """Each change atomically; True where its fences held."""
        ...

    async def release(self, jobs: Sequence[Job], attempts: Sequence[Attempt], *, due_in_s: float) -> None:
        """Gives leases back without a change, fenced by epoch."""
        ...

    async def live_attempts(self) -> Sequence[Leased]:
        """All attempts that have not ended, without a lease (for billing and the sweep)."""
        ...

    async def attempts_by_id(self, ids: Sequence[AttemptId]) -> Mapping[AttemptId, Attempt]:
        """Live or ended (for the sweep)."""
        ...

    async def charge(self, charges: Sequence[Charge]) -> Sequence[bool]:
        """Each charge atomically, of live attempts or ended ones; True where the attempt was charged up to `since`."""
        ...

    async def ended_at_host(
        self, host: str, reasons: Sequence[Reason], *, within_s: float, limit: int
    ) -> Sequence[Attempt]:
        """The latest attempts at a host (`Offer.host_key`) that ended for one of `reasons`, newest first."""
        ...

    async def block_offer(self, key: str, reason: str, *, for_s: float) -> None:
        """`key`: an offer's id, or a host's key, which blocks all its offers."""
        ...

    async def blocked_offers(self) -> Mapping[str, str]:
        """Keys of `block_offer` that are not to be bought now, with the reason."""
        ...

    async def claim_outbox(self, *, owner: str, lease_s: float, limit: int) -> Sequence[Event]:
        """Events that no notifier has had, oldest first, hidden from others for `lease_s`."""
        ...

    async def delivered(self, events: Sequence[Event]) -> None: ...

    # --- the API's use cases
    async def submit(self, job: Job, *, key: str | None, body_sha256: str, events: Sequence[Event]) -> tuple[Job, bool]:
        """Durable when it returns. (job, True), or the job that this key made before and False.

        Raises IdempotencyConflict when the owner used `key` with another body.
        """
        ...

    async def job(self, job_id: JobId) -> Job | None: ...
    async def jobs(self, where: JobFilter) -> Sequence[Job]: ...
    async def attempts(self, job_id: JobId) -> Sequence[Attempt]:
        """In the order of their numbers."""
        ...

    async def request_stop(self, job_id: JobId, event: Event) -> Job | None:
        """Sets `stop_requested` (once; the event is written only then) and makes everything of the job due."""
        ...

    async def raise_cap(self, job_id: JobId, cap_usd: Decimal, event: Event) -> Job | None:
        """Sets a higher cap; a `capped` job becomes due for placement as `queued`. Lower or equal: unchanged."""
        ...

    async def events(self, job_id: JobId, *, after: int, limit: int) -> Sequence[Event]: ...
    async def ledger(self, job_id: JobId) -> Sequence[LedgerEntry]: ...
    async def counts(self) -> Mapping[str, Mapping[str, int]]:
        """{"jobs": {state: n}, "attempts": {state: n}} for metrics."""
        ...

    async def wait(self, topic: str, timeout_s: float) -> bool:
        """True when somebody hinted at `topic` ("jobs", or "job/<id>"): only shortens a wait, never replaces a read."""
        ...

    async def put_token(self, token: Token, secret_sha256: str) -> None: ...
    async def token(self, secret_sha256: str) -> Token | None: ...
    async def tokens(self) -> Sequence[Token]: ...
    async def delete_token(self, token_id: str) -> bool: ...

    async def put_secret(self, owner: str, name: str, sealed: bytes) -> None: ...
    async def secrets(self, owner: str, names: Sequence[str] | None = None) -> Mapping[str, bytes]:
        """Sealed values by name; all of the owner's when `names` is None."""
        ...

    async def delete_secret(self, owner: str, name: str) -> bool: ...

    async def put_upload(self, owner: str, upload: Upload) -> None: ...
    async def upload(self, owner: str, sha256: str) -> Upload | None: ...

    # --- the house
    async def installation(self, proposed: Installation) -> Installation:
        """The one that this database belongs to; `proposed` becomes it on a new database."""
        ...

    async def ping(self) -> None:
        """A successful transaction. Raises StoreUnavailable."""
        ...

    async def close(self) -> None: ...


# ----------------------------------------------------------------------------------------------------------- notifier


class Notifier(Protocol):
    """Tells people. Delivery is at least once; `(job_id, seq)` tells repeats apart."""

    async def notify(self, event: Event) -> None:
        """Raises any exception when it was not delivered; it is tried again later."""
        ...
