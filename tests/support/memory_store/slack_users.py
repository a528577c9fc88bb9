"""Links of Slack users in memory."""

from collections.abc import Sequence
from dataclasses import replace

from broker.domain.notifications import SlackUser
from broker.store.rules import channels as channel_rules
from broker.store.rules import fences
from tests.support.memory_store.state import MemoryPart


class MemorySlackUsers(MemoryPart):
    async def put_slack_user(self, link: SlackUser) -> None:
        state, own = self._state, (link.team, link.workspace, link.user)
        if not self._sees(link.team) or link.team not in state.teams:
            raise fences.refused(f"link of {link.user}", "slack_users_team")
        before = state.slack_users.get(own)
        state.slack_users[own] = replace(link, name=fences.clean(link.name), linked_at=state.clock.now())
        state.write_audit(channel_rules.slack_linked(self._tenant, link, before))

    async def slack_users(self, workspace: str | None = None, user: str | None = None) -> Sequence[SlackUser]:
        links = (link for _, link in sorted(self._state.slack_users.items()) if self._sees(link.team))
        return [link for link in links if workspace in (None, link.workspace) and user in (None, link.user)]

    async def delete_slack_user(self, link: SlackUser) -> bool:
        own = (link.team, link.workspace, link.user)
        gone = self._state.slack_users.pop(own, None) if self._sees(link.team) else None
        if gone is not None:
            self._state.write_audit(channel_rules.slack_unlinked(self._tenant, gone))
        return gone is not None
