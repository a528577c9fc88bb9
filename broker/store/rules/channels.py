"""What both stores say of channels: entries of the audit, and how long things are remembered."""

import re
from collections.abc import Mapping
from typing import Any

from broker.domain.notifications import Channel
from broker.domain.tenancy import AuditEntry, Tenant

NOTICE_ID = re.compile(r"[A-Za-z0-9_:-]{1,200}")
"""As the schema has it: a dot would blur what a webhook signs."""
IDLE_S = 90 * 86_400.0
"""How long an idle stream's state, a notice and its id are remembered."""
TOO_OLD = "too old"
TOO_MANY = "too many"


def added(tenant: Tenant, channel: Channel) -> AuditEntry:
    return tenant.audit_entry("channel.add", channel.id, team=channel.team or "", after=_shown(channel))


def changed(tenant: Tenant, before: Channel, after: Channel) -> AuditEntry:
    """That a secret changed is told, never which it is."""
    told = {**_shown(after), **({"secrets": "changed"} if before.sealed != after.sealed else {})}
    return tenant.audit_entry("channel.change", before.id, team=before.team or "", before=_shown(before), after=told)


def removed(tenant: Tenant, channel: Channel) -> AuditEntry:
    return tenant.audit_entry("channel.remove", channel.id, team=channel.team or "", before=_shown(channel))


def _shown(channel: Channel) -> Mapping[str, Any]:
    return {
        "name": channel.name,
        "kind": channel.kind,
        "events": list(channel.events),
        "config": dict(channel.config),
        "enabled": channel.enabled,
    }
