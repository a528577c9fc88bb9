"""Row-level security according to a database's catalogue, and the check that visible rows agree with it."""

from typing import TypeAlias

import asyncpg

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
API_ROLE = "gpubroker_api"

TABLES = """
SELECT c.relname AS name, c.relrowsecurity AND c.relforcerowsecurity AS forced,
    has_any_column_privilege($1, c.oid, 'SELECT') AS readable,
    has_any_column_privilege($1, c.oid, 'SELECT, INSERT, UPDATE, REFERENCES')
        OR has_table_privilege($1, c.oid, 'DELETE, TRUNCATE, TRIGGER') AS granted,
    array(SELECT attname::text FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped) AS columns
FROM pg_class c WHERE c.relkind IN ('r', 'p') AND c.relnamespace = 'public'::regnamespace ORDER BY c.relname
"""
TEAM_OF = {
    "team": "team",
    "job_id": "(SELECT team FROM jobs WHERE jobs.id = job_id)",
    "attempt_id": "(SELECT team FROM attempts JOIN jobs ON jobs.id = job_id WHERE attempts.id = attempt_id)",
    "channel_id": "(SELECT team FROM channels WHERE channels.id = channel_id)",
}
"""SQL for the team of a row, by the first of these columns that its table has."""


async def as_red(connection: Connection, statement: str) -> None:
    """Run a statement in a transaction as the API's role with the team red."""
    async with connection.transaction():
        await connection.execute(f"SET LOCAL ROLE {API_ROLE}")
        await connection.execute("SELECT set_config('gpubroker.team', 'red', true)")
        await connection.execute(statement)


async def tables(connection: Connection) -> list[asyncpg.Record]:
    return await connection.fetch(TABLES, API_ROLE)


def team_of(table: asyncpg.Record) -> str | None:
    """Return the expression for the team of a table's row."""
    if table["name"] == "teams":
        return "name"
    return next((text for column, text in TEAM_OF.items() if column in table["columns"]), None)


async def unprotected(connection: Connection) -> list[str]:
    """Return tables with team rows, or tables that the API can reach, without row-level security for every role."""
    wrong = []
    for table in await tables(connection):
        if (team_of(table) is not None or table["granted"]) and not table["forced"]:
            wrong.append(str(table["name"]))
    return wrong


async def shown(connection: Connection, team: str | None, *, operator: bool = False) -> dict[str, int]:
    """Return the number of rows by table that the API's role sees as this team; None: without the team setting."""
    found = {}
    readable = [table["name"] for table in await tables(connection) if table["readable"]]
    async with connection.transaction():
        await connection.execute(f"SET LOCAL ROLE {API_ROLE}")
        if team is not None:
            await connection.execute("SELECT set_config('gpubroker.team', $1, true)", team)
        if operator:
            await connection.execute("SELECT set_config('gpubroker.operator', 'on', true)")
        for name in readable:
            found[name] = await connection.fetchval(f"SELECT count(*) FROM {name}")
        await connection.execute("RESET ROLE; RESET gpubroker.team; RESET gpubroker.operator")
    return found


async def owned(connection: Connection, team: str | None = None) -> dict[str, int]:
    """Return the number of rows of that team (None: of all teams), by table, for tables that the API can read."""
    found = {}
    for table in await tables(connection):
        if table["readable"]:
            whose = team_of(table)
            assert whose is not None, f"{table['name']}: say in TEAM_OF whose its rows are"
            mine = f"WHERE {whose} = '{team}'" if team else ""
            found[str(table["name"])] = await connection.fetchval(f"SELECT count(*) FROM {table['name']} {mine}")
    return found


async def faults(connection: Connection, teams: tuple[str, ...]) -> list[str]:
    """Return a message for every table that shows a team other rows than its own."""
    wrong = []
    for team in teams:
        seen, own = await shown(connection, team), await owned(connection, team)
        wrong += [f"{team} sees {seen[name]} of {own[name]} rows of {name}" for name in own if seen[name] != own[name]]
    return wrong
