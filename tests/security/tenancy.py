"""`python -m tests.security.tenancy`: checks that no call shows team red anything of team blue. The last line is JSON.

Every call is made in two worlds: one with both teams, one without blue. Red's answers must be the same in both. Random
ids and times are replaced by their order of appearance.
"""

import argparse
import asyncio
import base64
import binascii
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from broker.ports import Store
from broker.store.embedded.server import USER, EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore
from tests.security.drivers import Driver, ServerFault
from tests.security.grpc_driver import GrpcDriver
from tests.security.http_driver import HttpDriver
from tests.security.world import World, world

STIR_EVERY = 4
"""Number of calls between two actions of blue."""
CURSOR = re.compile(r'(?:(?<="next":")|(?<="next": "))[\w-]+(?=")')
RANDOM = re.compile(
    r"gb_[a-z2-7]{8}_[a-z2-7]{32}"  # tokens
    r"|\b[a-z2-7]{32}\b"  # codes of sign-in links
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # UUIDs
    r"|\b[0-9a-f]{64}\b"  # hashes
    r"|\bgb-[a-z2-7]{4}-[a-z2-7]{13}\b|\b[a-z2-7]{13}\b|\b[a-z2-7]{8}\b"  # names of machines, ids
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?"  # times
    r"|whsec_[\w+/=-]+"  # secrets of webhooks
    r'|(?:"oldest_s"|"seconds"|"machine_hours"|"gpu_hours"):[\d.e-]+'  # how long
)


class Plain:
    """Normaliser that makes the answers of one world comparable with those of another."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def text(self, answer: str) -> str:
        return RANDOM.sub(self._named, CURSOR.sub(_opened, answer))

    def _named(self, found: re.Match[str]) -> str:
        if found[0].startswith('"'):
            return found[0].partition(":")[0]
        return self._names.setdefault(found[0], f"<{len(self._names)}>")


def _opened(found: re.Match[str]) -> str:
    """Return the decoded content of a cursor, so that its content is compared as well."""
    try:
        return base64.urlsafe_b64decode(found[0] + "=" * (-len(found[0]) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return found[0]


@dataclass
class Verdict:
    calls: int = 0
    leaks: list[str] = field(default_factory=list)


async def compare(driver: Driver, both: World, alone: World) -> Verdict:
    """Compare the answers of two worlds. A failure of the server counts as a leak. Raises Unplayed."""
    asked, again = driver.asks(both), driver.asks(alone)
    assert [ask.label for ask in asked] == [ask.label for ask in again]
    verdict = Verdict()
    plain = Plain(), Plain()
    for ask, twin in zip(asked, again, strict=True):
        if verdict.calls % STIR_EVERY == 0:
            await both.stir()
        verdict.calls += 1
        try:
            text = plain[0].text(await driver.answer(both, ask))
            expected = plain[1].text(await driver.answer(alone, twin))
        except ServerFault as fault:
            verdict.leaks.append(f"{driver.name} {ask.label}: {fault}")
            continue
        if text != expected:
            verdict.leaks.append(f"{driver.name} {ask.label}:\n  with blue:    {text!r}\n  without blue: {expected!r}")
    return verdict


async def play(drivers: Sequence[Driver], stores: Sequence[Store]) -> Verdict:
    """Compare the worlds of each driver. `stores`: two fresh ones per driver, in the drivers' order."""
    whole = Verdict()
    for number, driver in enumerate(drivers):
        async with (
            world(stores[2 * number], blue=True) as both,
            world(stores[2 * number + 1], blue=False) as alone,
        ):
            verdict = await compare(driver, both, alone)
        whole.calls += verdict.calls
        whole.leaks += verdict.leaks
    return whole


async def on_postgres(drivers: Sequence[Driver]) -> Verdict:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gb-"))
        server = await stack.enter_async_context(await EmbeddedPostgres.start(Path(folder), durable=False))
        stores = []
        for number in range(2 * len(drivers)):
            store = await PostgresStore.connect(await _database(server, f"world_{number}"))
            stack.push_async_callback(store.close)
            stores.append(store)
        return await play(drivers, stores)


async def _database(server: EmbeddedPostgres, name: str) -> str:
    connection = await asyncpg.connect(server.admin_dsn)
    try:
        await connection.execute(f"CREATE DATABASE {name} OWNER {USER}")
    finally:
        await connection.close()
    own = urlunsplit(urlsplit(server.dsn)._replace(path=f"/{name}"))
    await migrate(own)
    return own


DRIVERS: dict[str, Driver] = {driver.name: driver for driver in (HttpDriver(), GrpcDriver())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=sorted(DRIVERS), help="transport to test; default: all")
    given = parser.parse_args()
    drivers = [DRIVERS[given.transport]] if given.transport else list(DRIVERS.values())
    verdict = asyncio.run(on_postgres(drivers))
    for leak in verdict.leaks:
        print(leak, file=sys.stderr)
    print(json.dumps({"calls": verdict.calls, "leaks": len(verdict.leaks)}))
    sys.exit(1 if verdict.leaks else 0)


if __name__ == "__main__":
    main()
