"""What both stores ask before they write a policy, and what the audit keeps of it."""

from decimal import Decimal
from typing import Any

from broker.domain.job import Attempt, Job
from broker.domain.money import LedgerEntry, LedgerKind, show
from broker.domain.policy import Policy
from broker.domain.tenancy import AuditEntry, Tenant
from broker.policy.budgets import Hold, Refusal
from broker.store.rules import fences


def check(tenant: Tenant, policy: Policy) -> None:
    """Raises StoreError for a policy that is not the tenant's to make."""
    if not tenant.operator and policy.team != tenant.team:
        raise fences.refused(f"policy {policy.name}", "policies_team")


def changed(tenant: Tenant, before: Policy | None, after: Policy | None) -> AuditEntry:
    """The entry of a new version; `after` None: deleted."""
    policy = after or before
    assert policy is not None
    action = "policy.apply" if after else "policy.delete"
    return tenant.audit_entry(action, policy.name, team=policy.team or "", before=_plain(before), after=_plain(after))


def _plain(policy: Policy | None) -> dict[str, Any] | None:
    return None if policy is None else policy.model_dump(mode="json", exclude_defaults=True)


def extended(attempt: Attempt, usd: Decimal) -> LedgerEntry:
    """What a higher cap adds to the reservation of the attempt that runs."""
    return LedgerEntry(
        job_id=attempt.job_id, attempt_id=attempt.id, kind=LedgerKind.RESERVATION, usd=usd, note="cap raised"
    )


def no_higher_cap(job: Job, refusal: Refusal) -> str:
    """Why the cap of a job that runs is not raised."""
    if refusal.hold is Hold.APPROVAL:
        return f"{refusal.reason}; somebody with the scope manage can run: gpubroker approve {job.id} --up-to USD"
    return f"the cap of job {job.id} stays {show(job.cap_usd)}, since it runs and {refusal.reason}"
