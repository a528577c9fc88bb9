"""The store as one team sees it: everything that the API asks."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Protocol

from broker.domain.ids import AttemptId, JobId
from broker.domain.job import Attempt, Event, Job, LedgerEntry
from broker.domain.tenancy import AuditEntry, Team
from broker.ports.changes import AuditFilter, JobFilter, Token, Upload
from broker.ports.channels import TenantChannels
from broker.ports.job_data import TenantJobData
from broker.ports.policies import TenantPolicies
from broker.ports.slack_users import TenantSlack
from broker.ports.spending import SpendingStore


class TenantStore(TenantChannels, TenantPolicies, TenantSlack, SpendingStore, TenantJobData, Protocol):
    """Another team's rows do not exist here, whatever is asked; see `Store.as_tenant`.

    Every write leaves an audit entry of whoever asks, in the same transaction.
    """

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
        """Sets a higher cap; a `capped` job becomes due for placement as `queued`. Unchanged where it is not
        higher, or where the job is capped and its own input was deleted.

        The attempt that runs reserves the difference in the same transaction. Raises OverBudget where a policy refuses.
        """
        ...

    async def events(self, job_id: JobId, *, after: int, limit: int) -> Sequence[Event]: ...
    async def ledger(self, job_id: JobId) -> Sequence[LedgerEntry]: ...
    async def decision(self, attempt_id: AttemptId) -> bytes | None:
        """Why it was bought, as `Change.decision` had it; None: nothing was kept, or there is no such attempt."""
        ...

    async def wait(self, topic: str, timeout_s: float) -> bool:
        """True when somebody hinted at `topic` ("jobs", or "job/<id>"): only shortens a wait, never replaces a read."""
        ...

    # --- of one person: whoever the tenant is, `owner` is looked for in the tenant's own team only
    async def put_secret(self, owner: str, name: str, sealed: bytes) -> None: ...
    async def secrets(self, owner: str, names: Sequence[str] | None = None) -> Mapping[str, bytes]:
        """Sealed values by name; all of the owner's when `names` is None."""
        ...

    async def delete_secret(self, owner: str, name: str) -> bool: ...

    async def put_upload(self, owner: str, upload: Upload) -> None: ...
    async def upload(self, owner: str, sha256: str) -> Upload | None: ...

    # --- the team
    async def put_token(self, token: Token, secret_sha256: str) -> None: ...

    async def tokens(self) -> Sequence[Token]:
        """Of the team (all, for an operator), oldest first, expired ones as well."""
        ...

    async def delete_token(self, token_id: str) -> bool: ...

    async def put_team(self, name: str, note: str) -> Team | None:
        """By operators only. None when there is one of that name already."""
        ...

    async def teams(self) -> Sequence[Team]:
        """The own one (all, for an operator), by name."""
        ...

    async def delete_team(self, name: str) -> bool:
        """With its tokens, secrets and uploads. Raises InUse when it has, or had, a job."""
        ...

    async def audit(self, where: AuditFilter) -> Sequence[AuditEntry]:
        """Newest first."""
        ...
