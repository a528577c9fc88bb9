"""Teams, tokens and the audit in memory."""

from collections.abc import Sequence

from broker.domain.tenancy import AuditEntry, Team
from broker.ports import AuditFilter, Token
from broker.store.rules import channels as channel_rules
from broker.store.rules import fences
from tests.support.memory_store.state import MemoryPart


class MemoryTeams(MemoryPart):
    async def put_token(self, token: Token, secret_sha256: str) -> bool:
        if not self._sees(token.team) or token.team not in self._state.teams:
            raise fences.refused(f"token {token.id}", "tokens_team")
        if any(stored.id == token.id for stored in self._state.tokens.values()):
            return False
        self._state.tokens[secret_sha256] = token
        self._state.write_audit(fences.token_made(self._tenant, token))
        return True

    async def tokens(self) -> Sequence[Token]:
        seen = (token for token in self._state.tokens.values() if self._sees(token.team))
        return sorted(seen, key=lambda token: (token.created_at, token.id))

    async def delete_token(self, token_id: str) -> bool:
        for secret, token in self._state.tokens.items():
            if token.id == token_id and self._sees(token.team):
                del self._state.tokens[secret]
                self._state.write_audit(fences.token_revoked(self._tenant, token))
                self._unlink(token)
                return True
        return False

    def _unlink(self, token: Token) -> None:
        """Remove the Slack links of an owner whose last token is gone."""
        state, whose = self._state, (token.team, token.owner)
        if any((left.team, left.owner) == whose for left in state.tokens.values()):
            return
        for own, link in list(state.slack_users.items()):
            if (link.team, link.owner) == whose:
                del state.slack_users[own]
                state.write_audit(channel_rules.slack_unlinked(self._tenant, link))

    async def put_team(self, name: str, note: str) -> Team | None:
        if not self._tenant.operator:
            raise fences.refused(f"team {name}", "made_by_operator")
        if name in self._state.teams:
            return None
        team = Team(name=name, created_at=self._state.clock.now(), note=fences.clean(note))
        self._state.teams[name] = team
        self._state.write_audit(self._tenant.audit_entry("team.create", name, team=name))
        return team

    async def teams(self) -> Sequence[Team]:
        return [team for name, team in sorted(self._state.teams.items()) if self._sees(name)]

    async def delete_team(self, name: str) -> bool:
        state = self._state
        if not self._tenant.operator or name not in state.teams:
            return False
        if any(row.value.team == name for row in state.jobs.values()):
            raise fences.team_in_use(name)
        del state.teams[name]
        state.tokens = {secret: token for secret, token in state.tokens.items() if token.team != name}
        state.secrets = {own: sealed for own, sealed in state.secrets.items() if own[0] != name}
        state.uploads = {own: upload for own, upload in state.uploads.items() if own[0] != name}
        state.slack_users = {own: link for own, link in state.slack_users.items() if own[0] != name}
        state.write_audit(self._tenant.audit_entry("team.delete", name, team=name))
        return True

    async def audit(self, where: AuditFilter) -> Sequence[AuditEntry]:
        found = [entry for entry in self._state.audit if self._sees(entry.team) and _matches(entry, where)]
        return sorted(found, key=lambda entry: (entry.at, entry.id), reverse=True)[: where.limit]


def _matches(entry: AuditEntry, where: AuditFilter) -> bool:
    at = entry.at
    return (
        at is not None
        and (where.team is None or entry.team == where.team)
        and (where.actor is None or entry.actor == where.actor)
        and (where.action is None or entry.action == where.action or entry.action.startswith(where.action + "."))
        and (where.target is None or entry.target == where.target)
        and (where.since is None or at >= where.since)
        and (where.until is None or at < where.until)
        and (where.before is None or (at, entry.id) < where.before)
    )
