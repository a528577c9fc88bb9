"""`gpubroker doctor --orphans` lists machines without a record, with and without a daemon, and destroys none."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from broker.blobs import ObstoreBlobs
from broker.domain.errors import OutcomeUnknown
from broker.domain.ids import AttemptId, Installation, instance_name
from broker.domain.instance import Caps, InstanceState, Observed
from broker.domain.job import Handle
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from tests.cli.conftest import Ran, invoke
from trainer.contract import object_keys as keys

HERE = Installation("abcd")
STRAY, BOUGHT = AttemptId("a" * 13), AttemptId("b" * 13)


@dataclass
class Listed:
    """Cloud that lists machines and allows no destroy."""

    name: str
    machines: list[Observed] = field(default_factory=list)
    down: bool = False
    caps: Caps = field(default_factory=lambda: Caps(spot=False, list_lag_s=15.0))

    async def list(self) -> Sequence[Observed]:
        if self.down:
            raise OutcomeUnknown(f"{self.name}: 503")
        return self.machines

    async def close(self) -> None: ...


def machine(attempt: AttemptId, cloud: str, id: str, **more: Any) -> Observed:
    handle = Handle(provider=cloud, id=id, name=instance_name(HERE, attempt), region="eu")
    return Observed(handle=handle, state=InstanceState.RUNNING, **more)


@pytest.fixture
def clouds(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Listed]:
    """Return a home with an installation, and two clouds."""
    home = own_home / "home"
    home.mkdir()
    (home / "installation").write_text(f"{HERE}\n")
    clouds = {"east": Listed("east"), "west": Listed("west")}
    monkeypatch.setattr("providers.registry.build", lambda *_, **__: clouds)
    return clouds


@pytest.fixture
async def daemon(own_home: Path, clouds: Mapping[str, Listed]) -> AsyncIterator[None]:
    """Hold the state of a daemon: its database, which answers, and the lock on it."""
    async with await EmbeddedPostgres.start(own_home / "home" / "postgres", durable=False) as server:
        await migrate(server.dsn)
        yield


def look(*words: str) -> Ran:
    return invoke("doctor", "--orphans", *words)


async def test_next_to_a_daemon_each_orphan_is_named_with_its_fate(
    own_home: Path, clouds: Mapping[str, Listed], daemon: None
) -> None:
    born = datetime.now(UTC) - timedelta(hours=3)
    clouds["east"].machines = [machine(STRAY, "east", "i-1", created_at=born, usd_per_hour=Decimal("1.25"))]
    clouds["west"].machines = [machine(BOUGHT, "west", "i-1")]
    blobs = ObstoreBlobs.open((own_home / "home" / "blobs").as_uri(), HERE)
    await blobs.put(keys.spec(BOUGHT), b"{}")
    ran = await asyncio.to_thread(look, "--json")
    assert ran.code == 1
    stray, bought = ran.document["orphans"]
    assert (stray["provider"], stray["id"], stray["name"]) == ("east", "i-1", "gb-abcd-" + "a" * 13)
    assert 3 * 3600 <= stray["age_s"] < 3 * 3600 + 120
    assert stray["usd_per_hour"] == "1.25"
    assert stray["next"] == "destroyed by the daemon within 55 s"
    assert (bought["provider"], bought["id"], bought["age_s"]) == ("west", "i-1", None)
    assert "a backup" in bought["next"]
    table = await asyncio.to_thread(look)
    assert table.code == 1
    assert "3 h" in table.out
    (own_home / "home" / "sweep-report-only").touch()
    (stray, _) = (await asyncio.to_thread(look, "--json")).document["orphans"]
    assert stray["next"].startswith("only reported")


async def test_a_silent_cloud_is_no_clean_bill(clouds: Mapping[str, Listed], daemon: None) -> None:
    assert (await asyncio.to_thread(look)).code == 0
    clouds["west"].down = True
    ran = await asyncio.to_thread(look, "--json")
    assert ran.code == 1
    assert ran.document["silent"] == {"west": "west: 503"}


def test_without_a_daemon_the_homes_database_decides(own_home: Path, clouds: Mapping[str, Listed]) -> None:
    async def once() -> None:
        async with await EmbeddedPostgres.start(own_home / "home" / "postgres", durable=False) as server:
            await migrate(server.dsn)

    asyncio.run(once())
    clouds["east"].machines = [machine(STRAY, "east", "i-1")]
    ran = look("--json")
    assert (ran.code, ran.document["judged_by"]) == (1, "the database")
    (stray,) = ran.document["orphans"]
    assert stray["next"].startswith("destroyed within 55 s while a daemon runs")
