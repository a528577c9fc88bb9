"""Checks before a policy is written, and its audit entries, shared by all stores."""

from decimal import Decimal
from typing import Any

from broker.domain.errors import StaleVersion
from broker.domain.job import Attempt, Job
from broker.domain.money import LedgerEntry, LedgerKind, format_usd
from broker.domain.policy import Policy
from broker.domain.tenancy import AuditEntry, Tenant
from broker.policy.budgets import Hold, Refusal
from broker.store.rules import fences


def check(tenant: Tenant, policy: Policy) -> None:
    """Raise StoreError for a policy of another team."""
    if not tenant.operator and policy.team != tenant.team:
        raise fences.refused(f"policy {policy.name}", "policies_team")


def check_version(policy: Policy, current: int, is_deleted: bool, replaces: int | None) -> None:
    """Raise StaleVersion unless the stored policy is at the version `replaces`. A deleted one also counts as 0."""
    if replaces in (None, current) or (replaces == 0 and is_deleted):
        return
    owner = f"team {policy.team}" if policy.team else "the installation"
    state = f"at version {current}" if not is_deleted else "deleted" if current else "not stored"
    history = f"version {replaces} was edited" if replaces else "it was written as a new policy"
    raise StaleVersion(
        f"not stored: the policy {policy.name} of {owner} is {state}, but {history}; open it and edit it again"
    )


def changed(tenant: Tenant, before: Policy | None, after: Policy | None) -> AuditEntry:
    """Return the audit entry of a new version; `after` None: the policy was deleted."""
    policy = after or before
    assert policy is not None
    action = "policy.apply" if after else "policy.delete"
    return tenant.audit_entry(action, policy.name, team=policy.team or "", before=_plain(before), after=_plain(after))


def _plain(policy: Policy | None) -> dict[str, Any] | None:
    return None if policy is None else policy.model_dump(mode="json", exclude_defaults=True)


def extended(attempt: Attempt, usd: Decimal) -> LedgerEntry:
    """Return the ledger entry by which a higher cap increases the reservation of the running attempt."""
    return LedgerEntry(
        job_id=attempt.job_id, attempt_id=attempt.id, kind=LedgerKind.RESERVATION, usd=usd, note="cap raised"
    )


def no_higher_cap(job: Job, refusal: Refusal) -> str:
    """Return why the cap of a running job is not raised."""
    if refusal.hold is Hold.APPROVAL:
        return f"{refusal.reason}; a user with the scope manage can run: gpubroker approve {job.id} --up-to USD"
    return f"the cap of job {job.id} stays {format_usd(job.cap_usd)}, since it runs and {refusal.reason}"
