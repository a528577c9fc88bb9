"""Store operations on policies, and on the spending and machines of the jobs they cover."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Protocol

from broker.domain.ids import JobId
from broker.domain.job import Event, Job
from broker.domain.notifications import Notice
from broker.domain.policy import Policy, PolicyVersion, StoredPolicy
from broker.policy.budgets import Applied, Reached
from broker.policy.dry_run import History

JobOwner = tuple[str, str]
"""Team and owner of a job."""


class TenantPolicies(Protocol):
    """Part of `TenantStore`: a team has its own policies; only an operator has policies for several teams."""

    async def put_policy(self, policy: Policy, *, replaces: int | None = None) -> StoredPolicy:
        """Store a new version of the policy of that team and name.

        `replaces`: the version that the caller has seen (0: there is no such policy; None: any). If the policy is at
        another version, nothing is stored, and StaleVersion is raised. An identical policy leaves the version
        unchanged. Raises StoreError (rule `policies_team`) for a policy of another team.
        """
        ...

    async def delete_policy(self, team: str | None, name: str, version: int | None = None) -> bool:
        """Delete a policy, if it is at `version` (None: at any). Returns False if there is nothing to delete."""
        ...

    async def policies(self) -> Sequence[StoredPolicy]:
        """Return policies in the order of their creation."""
        ...

    async def policy_history(self, team: str | None, name: str) -> Sequence[PolicyVersion]:
        """Return versions, newest first, also of a deleted policy."""
        ...

    async def budgets(self) -> tuple[datetime, Sequence[Applied]]:
        """Return the database's time, and every policy with its status at that time."""
        ...

    async def past(self, since: datetime) -> History:
        """Return the ledger of storage, and of attempts that existed after `since`."""
        ...

    async def approve(
        self, job_id: JobId, up_to_usd: Decimal, event: Event, *, cap_usd: Decimal | None = None
    ) -> Job | None:
        """Record that a cap up to `up_to_usd` is approved, and queue a job that awaits approval.

        A job with another cap than `cap_usd` is left unchanged; None: any cap.
        A lower approval does not replace a higher one. A job in a terminal state is left unchanged.
        """
        ...


class GlobalPolicies(Protocol):
    """Part of `Store`, for the controllers."""

    async def applied(self, whose: Sequence[JobOwner]) -> tuple[datetime, Mapping[JobOwner, Sequence[Applied]]]:
        """Return the database's time, and the policies that cover each owner's jobs with their status."""
        ...

    async def post_threshold(self, policy_id: int, reached: Reached, notice: Notice, *, since: datetime) -> bool:
        """Post `notice` unless this threshold was posted at or after `since`.

        Returns True to only one of several brokers.
        """
        ...
