"""Reads policies and their spending in one transaction, and checks admissions against them."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache

import asyncpg

from broker.domain.policy import Policy
from broker.policy.budgets import Applied, BudgetRequest, PolicyUsage, Refusal, judge
from broker.policy.windows import window_start
from broker.ports.policies import JobOwner
from broker.store.postgres.pool import QUERIES, BooksTime, Connection

NEVER: Sequence[datetime | None] = (None,)
"""Windows of a policy without budgets: a single window that contains no quarter-hour."""


@lru_cache(maxsize=1024)
def policy_of(document: str) -> Policy:
    return Policy.model_validate_json(document)


async def with_usage(
    connection: Connection, records: Sequence[asyncpg.Record], books: BooksTime
) -> tuple[datetime, dict[int, Applied]]:
    """Return the policies with the dollars, GPUs and jobs that count against them.

    Window starts follow from the trusted time, or from the database time that was read with the rows if there is none.
    If that time is slightly old, a window starts too early, which includes more spending, never less.
    """
    now = books.now() or records[0]["now"]
    policies = {row["id"]: policy_of(row["document"]) for row in records}
    parameters = [
        (key, policy.team, policy.user, start)
        for key, policy in policies.items()
        for start in [window_start(budget, policy.zone, now) for budget in policy.budgets] or NEVER
    ]
    ids, teams, people, starts = (list(column) for column in zip(*parameters, strict=True))
    applied: dict[int, Applied] = {}
    for row in await connection.fetch(QUERIES["standings"], ids, teams, people, starts):
        key = row["policy"]
        before = applied[key].usage.charged if key in applied else ()
        charged = (*before, row["charged"]) if policies[key].budgets else ()
        usage = PolicyUsage(charged=charged, outstanding_usd=row["outstanding"], gpus=row["gpus"], jobs=row["jobs"])
        applied[key] = Applied(id=key, policy=policies[key], usage=usage)
    return now, applied


class AdmissionBudget:
    """Remaining budget for admissions, which are judged one after the other under the policies' locks."""

    def __init__(self, now: datetime | None = None, applied: Mapping[int, Applied] | None = None) -> None:
        self._now = now
        self._applied = dict(applied or {})

    @classmethod
    async def locked(cls, connection: Connection, whose: Iterable[JobOwner], books: BooksTime) -> "AdmissionBudget":
        """Lock the policies that cover these jobs until the end of the transaction."""
        teams, owners = (list(column) for column in zip(*sorted(set(whose)), strict=True))
        await connection.execute(QUERIES["enter_admission"])
        records = await connection.fetch(QUERIES["lock_policies"], teams, owners)
        if not records:
            return cls()
        # Read after the locks were taken, so that all earlier admissions under them are included.
        return cls(*await with_usage(connection, records, books))

    def admit(self, ask: BudgetRequest, whose: JobOwner) -> Refusal | None:
        """Return why the request is refused; None: it is granted, and later requests see it as granted."""
        covering = [applied for applied in self._applied.values() if applied.policy.covers(*whose)]
        if not covering or self._now is None:
            return None
        refusal = judge(ask, covering, self._now)
        if refusal is None:
            self._applied |= {applied.id: applied.granted(ask) for applied in covering}
        return refusal
