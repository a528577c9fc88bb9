"""Links of Slack users to owners, on PostgreSQL."""

from collections.abc import Sequence

from broker.domain.notifications import SlackUser
from broker.store.postgres import row_codec
from broker.store.postgres.base import PostgresPart, write_audit
from broker.store.postgres.pool import QUERIES
from broker.store.rules import channels, fences


class PostgresSlackUsers(PostgresPart):
    async def put_slack_user(self, link: SlackUser) -> None:
        own = link.team, link.workspace, link.user
        async with self._pool.transaction("put_slack_user") as connection:
            records = await connection.fetch(QUERIES["lock_slack_user"], *own)
            await connection.execute(
                QUERIES["put_slack_user"], *own, link.owner, list(link.scopes), fences.clean(link.name), link.linked_by
            )
            before = slack_user(records[0]) if records else None
            await write_audit(connection, [channels.slack_linked(self._tenant, link, before)])

    async def slack_users(self, workspace: str | None = None, user: str | None = None) -> Sequence[SlackUser]:
        return [slack_user(row) for row in await self._pool.read("slack_users", workspace, user)]

    async def delete_slack_user(self, link: SlackUser) -> bool:
        async with self._pool.transaction("delete_slack_user") as connection:
            deleted = await connection.fetch(QUERIES["delete_slack_user"], link.team, link.workspace, link.user)
            await write_audit(connection, [channels.slack_unlinked(self._tenant, slack_user(row)) for row in deleted])
            return bool(deleted)


def slack_user(row: row_codec.Record) -> SlackUser:
    return SlackUser(
        team=row["team"],
        workspace=row["workspace"],
        user=row["slack_user"],
        owner=row["owner"],
        scopes=tuple(row["scopes"]),
        name=row["name"],
        linked_by=row["linked_by"],
        linked_at=row["linked_at"],
    )
