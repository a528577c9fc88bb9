"""Rules of notification channels and Slack links, for every store: limits of the outbox and audit entries."""

import re
from collections.abc import Mapping
from typing import Any

from broker.domain.notifications import Channel, SlackUser
from broker.domain.tenancy import AuditEntry, Tenant

NOTICE_ID = re.compile(r"[A-Za-z0-9_:-]{1,200}")
"""The same pattern as in the schema. A dot is not allowed, because it separates the parts that a webhook signs."""
IDLE_S = 90 * 86_400.0
"""Seconds for which the state of an idle stream, a notice and its id are kept."""
TOO_OLD = "too old"
TOO_MANY = "too many"


def added(tenant: Tenant, channel: Channel) -> AuditEntry:
    return tenant.audit_entry("channel.add", channel.id, team=channel.team or "", after=_audit_fields(channel))


def changed(tenant: Tenant, before: Channel, after: Channel) -> AuditEntry:
    """Return the audit entry of a changed channel. It records that a secret changed, but not the secret."""
    after_view = {**_audit_fields(after), **({"secrets": "changed"} if before.sealed != after.sealed else {})}
    return tenant.audit_entry(
        "channel.change", before.id, team=before.team or "", before=_audit_fields(before), after=after_view
    )


def removed(tenant: Tenant, channel: Channel) -> AuditEntry:
    return tenant.audit_entry("channel.remove", channel.id, team=channel.team or "", before=_audit_fields(channel))


def _audit_fields(channel: Channel) -> Mapping[str, Any]:
    return {
        "name": channel.name,
        "kind": channel.kind,
        "events": list(channel.events),
        "config": dict(channel.config),
        "enabled": channel.enabled,
    }


def slack_linked(tenant: Tenant, link: SlackUser, before: SlackUser | None) -> AuditEntry:
    """Return the audit entry of a new or changed link of a Slack user; `before` None: the link is new."""
    rights_before = _slack_rights(before) if before is not None else None
    return tenant.audit_entry(
        "slack.link", _slack_target(link), team=link.team, before=rights_before, after=_slack_rights(link)
    )


def slack_unlinked(tenant: Tenant, link: SlackUser) -> AuditEntry:
    return tenant.audit_entry("slack.unlink", _slack_target(link), team=link.team, before=_slack_rights(link))


def _slack_target(link: SlackUser) -> str:
    return f"{link.workspace}/{link.user}"


def _slack_rights(link: SlackUser) -> dict[str, Any]:
    return {"owner": link.owner, "scopes": list(link.scopes)}
