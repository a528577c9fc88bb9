"""Teams, tokens and the audit log on PostgreSQL."""

from collections.abc import Sequence

import asyncpg

from broker.domain.tenancy import AuditEntry, Team
from broker.ports import AuditFilter, Token
from broker.store.postgres import row_codec
from broker.store.postgres.base import PostgresPart, write_audit
from broker.store.postgres.pool import QUERIES
from broker.store.postgres.slack_users import slack_user
from broker.store.rules import channels, fences


class PostgresTeams(PostgresPart):
    async def put_token(self, token: Token, secret_sha256: str) -> bool:
        values = list(token.scopes), token.created_at, token.expires_at, fences.clean(token.note), secret_sha256
        async with self._pool.transaction("put_token") as connection:
            inserted = await connection.fetch(QUERIES["put_token"], token.id, token.team, token.owner, *values)
            if inserted:
                await write_audit(connection, [fences.token_made(self._tenant, token)])
            return bool(inserted)

    async def tokens(self) -> Sequence[Token]:
        return [row_codec.token(row) for row in await self._pool.read("tokens")]

    async def delete_token(self, token_id: str) -> bool:
        async with self._pool.transaction("delete_token") as connection:
            await connection.execute(QUERIES["enter_revocation"])
            records = await connection.fetch(QUERIES["delete_token"], token_id)
            await write_audit(connection, [fences.token_revoked(self._tenant, row_codec.token(row)) for row in records])
            for row in records:
                unlinked = await connection.fetch(QUERIES["unlink_tokenless"], row["team"], row["owner"])
                await write_audit(
                    connection, [channels.slack_unlinked(self._tenant, slack_user(link)) for link in unlinked]
                )
            return bool(records)

    async def put_team(self, name: str, note: str) -> Team | None:
        async with self._pool.transaction("put_team") as connection:
            records = await connection.fetch(QUERIES["put_team"], name, fences.clean(note))
            await write_audit(connection, [self._tenant.audit_entry("team.create", name, team=name) for _ in records])
            return row_codec.team(records[0]) if records else None

    async def teams(self) -> Sequence[Team]:
        return [row_codec.team(row) for row in await self._pool.read("teams")]

    async def delete_team(self, name: str) -> bool:
        async with self._pool.transaction("delete_team") as connection:
            try:
                records = await connection.fetch(QUERIES["delete_team"], name)
            except asyncpg.ForeignKeyViolationError:
                raise fences.team_in_use(name) from None
            await write_audit(connection, [self._tenant.audit_entry("team.delete", name, team=name) for _ in records])
            return bool(records)

    async def audit(self, where: AuditFilter) -> Sequence[AuditEntry]:
        records = await self._pool.read(
            "audit",
            where.team,
            where.actor,
            where.action,
            where.target,
            where.since,
            where.until,
            *(where.before or (None, None)),
            where.limit,
        )
        return [row_codec.audit_entry(row) for row in records]
