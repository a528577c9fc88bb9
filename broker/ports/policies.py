"""Policies in the store, and what the jobs that they cover have spent and hold."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Protocol

from broker.domain.ids import JobId
from broker.domain.job import Event, Job
from broker.domain.notifications import Notice
from broker.domain.policy import KeptPolicy, Policy, PolicyVersion
from broker.policy.budgets import Applied, Reached
from broker.policy.dry_run import History

JobOwner = tuple[str, str]
"""A job's team and owner."""


class TenantPolicies(Protocol):
    """A team has its own policies; those of more than one team are the operator's."""

    async def put_policy(self, policy: Policy) -> KeptPolicy:
        """A new version of the policy of that team and name; the same once more leaves the version as it is.

        Raises StoreError (rule `policies_team`) for another team's.
        """
        ...

    async def delete_policy(self, team: str | None, name: str) -> bool: ...

    async def policies(self) -> Sequence[KeptPolicy]:
        """In the order in which they were made."""
        ...

    async def policy_history(self, team: str | None, name: str) -> Sequence[PolicyVersion]:
        """Newest first, also of a deleted one."""
        ...

    async def budgets(self) -> tuple[datetime, Sequence[Applied]]:
        """Every policy with its standing at a moment of the database's clock."""
        ...

    async def past(self, since: datetime) -> History:
        """What the ledger tells of attempts that lived after `since`, and of storage."""
        ...

    async def approve(self, job_id: JobId, up_to_usd: Decimal, event: Event) -> Job | None:
        """Remembers that a cap up to `up_to_usd` is approved, never less than before; a job that awaits it is queued.

        At rest for good: unchanged.
        """
        ...


class GlobalPolicies(Protocol):
    """For the controllers."""

    async def applied(self, whose: Sequence[JobOwner]) -> tuple[datetime, Mapping[JobOwner, Sequence[Applied]]]:
        """The policies that cover jobs of each, with their standing, at a moment of the database's clock."""
        ...

    async def tell_threshold(self, policy_id: int, found: Reached, notice: Notice, *, since: datetime) -> bool:
        """Posts `notice` unless this threshold was told at or after `since`. One of two brokers gets True."""
        ...
