"""What both stores write into the audit about links to Slack."""

from typing import Any

from broker.domain.notifications import SlackUser
from broker.domain.tenancy import AuditEntry, Tenant


def linked(tenant: Tenant, link: SlackUser, before: SlackUser | None) -> AuditEntry:
    was = _rights(before) if before is not None else None
    return tenant.audit_entry("slack.link", _target(link), team=link.team, before=was, after=_rights(link))


def unlinked(tenant: Tenant, link: SlackUser) -> AuditEntry:
    return tenant.audit_entry("slack.unlink", _target(link), team=link.team, before=_rights(link))


def _target(link: SlackUser) -> str:
    return f"{link.workspace}/{link.user}"


def _rights(link: SlackUser) -> dict[str, Any]:
    return {"owner": link.owner, "scopes": list(link.scopes)}
