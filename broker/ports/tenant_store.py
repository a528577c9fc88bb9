"""Protocol of the store for the API: operations that are restricted to one team."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Protocol

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt, Event, Job
from broker.domain.money import LedgerEntry
from broker.domain.spending import FinishedJob, Paid, SpendWindow
from broker.domain.tenancy import AuditEntry, Team
from broker.ports.changes import AuditFilter, JobFilter, Token, Upload
from broker.ports.channels import TenantChannels, TenantSlack
from broker.ports.job_data import TenantJobData
from broker.ports.offer_history import TenantOfferHistory
from broker.ports.policies import TenantPolicies


class SpendingStore(Protocol):
    """Part of `TenantStore`: payments."""

    async def paid(self, window: SpendWindow) -> Paid:
        """Return the charges and adjustments of the window by attempt, category and local day."""
        ...

    async def finished(self, window: SpendWindow, *, limit: int) -> Sequence[FinishedJob]:
        """Return the jobs that succeeded in the window and had a heartbeat, the latest first."""
        ...


class TenantStore(
    TenantChannels, TenantPolicies, TenantSlack, SpendingStore, TenantJobData, TenantOfferHistory, Protocol
):
    """Store operations that are restricted to the tenant's rows; see `Store.as_tenant`.

    Every write leaves an audit entry of its caller, in the same transaction.
    """

    async def submit(self, job: Job, *, key: str | None, body_sha256: str, events: Sequence[Event]) -> tuple[Job, bool]:
        """Store a job durably: return it and True, or the job that this key created before and False.

        Raises IdempotencyConflict when the owner used `key` with another body.
        """
        ...

    async def job(self, job_id: JobId) -> Job | None: ...
    async def jobs(self, where: JobFilter) -> Sequence[Job]: ...
    async def attempts(self, job_id: JobId) -> Sequence[Attempt]:
        """Return attempts in the order of their numbers."""
        ...

    async def request_stop(self, job_id: JobId, event: Event) -> Job | None:
        """Set `stop_requested` and make the job and its attempts due; the event is written only the first time."""
        ...

    async def raise_cap(self, job_id: JobId, cap_usd: Decimal, event: Event) -> Job | None:
        """Raise a job's cap; a `capped` job becomes `queued` and due for placement.

        Nothing changes if the cap is not higher, or if the job is capped and its own input was deleted. The running
        attempt reserves the difference in the same transaction. Raises OverBudget if a policy refuses.
        """
        ...

    async def events(self, job_id: JobId, *, after: int, limit: int) -> Sequence[Event]: ...
    async def ledger(self, job_id: JobId) -> Sequence[LedgerEntry]: ...
    async def decision(self, attempt_id: AttemptId) -> bytes | None:
        """Return the decision record of an attempt (`Change.decision`); None: there is none."""
        ...

    async def wait(self, topic: str, timeout_s: float) -> bool:
        """Return True if a change of `topic` ("jobs", or "job/<id>") was signalled within the timeout.

        A signal carries no data, so the caller reads the rows again.
        """
        ...

    # --- of one user: `owner` belongs to the tenant's own team, for every tenant
    async def put_secret(self, owner: str, name: str, sealed: bytes) -> None: ...
    async def secrets(self, owner: str, names: Sequence[str] | None = None) -> Mapping[str, bytes]:
        """Return sealed values by name; all of the owner's when `names` is None."""
        ...

    async def delete_secret(self, owner: str, name: str) -> bool: ...

    async def put_upload(self, owner: str, upload: Upload) -> None: ...
    async def upload(self, owner: str, sha256: str) -> Upload | None: ...

    # --- the team
    async def put_token(self, token: Token, secret_sha256: str) -> bool:
        """Store a token. Returns False if a token has this id already."""
        ...

    async def tokens(self) -> Sequence[Token]:
        """Return tokens of the team (all, for an operator), oldest first, including expired ones."""
        ...

    async def delete_token(self, token_id: str) -> bool: ...

    async def put_team(self, name: str, note: str) -> Team | None:
        """Create a team; operators only. Returns None when there is one of that name already."""
        ...

    async def teams(self) -> Sequence[Team]:
        """Return the caller's team (all, for an operator), by name."""
        ...

    async def delete_team(self, name: str) -> bool:
        """Delete a team with its tokens, secrets and uploads. Raises InUse when it has, or had, a job."""
        ...

    async def audit(self, where: AuditFilter) -> Sequence[AuditEntry]:
        """Return audit entries, newest first."""
        ...
