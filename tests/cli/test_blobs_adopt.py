"""`gpubroker blobs adopt`: after the loss of a blob store."""

import asyncio
from pathlib import Path

import pytest

from broker.blobs import ObstoreBlobs
from broker.daemon.home_dir import holding
from broker.daemon.installation import OtherBlobs, refuse_other_blobs
from broker.domain.ids import Installation
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore
from tests.cli.conftest import Ran, invoke

HERE = Installation("abcd")


def adopt(home: Path, *words: str) -> Ran:
    return invoke("blobs", "adopt", "--home", str(home), *words)


@pytest.fixture
def home(tmp_path: Path, postgres_dsn: str) -> Path:
    """Return a home whose blob store is in a folder of its own."""
    (tmp_path / "installation").write_text(HERE)
    (tmp_path / "gpubroker.yaml").write_text(f"database_url: {postgres_dsn}\nblobs: file://{tmp_path}/new\n")
    return tmp_path


def test_adopt_accepts_the_configured_store_in_place_of_a_lost_one(home: Path, postgres_dsn: str) -> None:
    async def starts(blobs: str) -> None:
        """Check the blob store as the daemon does."""
        store = await PostgresStore.connect(postgres_dsn)
        try:
            await store.installation(HERE)
            await refuse_other_blobs(store, ObstoreBlobs.open(f"file://{home}/{blobs}", HERE))
        finally:
            await store.close()

    asyncio.run(starts("old"))
    with pytest.raises(OtherBlobs):
        asyncio.run(starts("new"))
    refused = adopt(home)
    assert (refused.code, "pass -y" in refused.err) == (2, True), refused.err
    with pytest.raises(OtherBlobs):
        asyncio.run(starts("new"))
    done = adopt(home, "-y", "--json")
    assert (done.code, done.document["adopted"]) == (0, True), done.err
    asyncio.run(starts("new"))
    assert adopt(home, "-y", "--json").document["adopted"] is False


def test_adopt_is_refused_while_a_daemon_with_an_embedded_database_runs(home: Path, postgres_dsn: str) -> None:
    async def belongs() -> None:
        store = await PostgresStore.connect(postgres_dsn)
        await store.installation(HERE)
        await store.blob_store("another")
        await store.close()

    ran = adopt(home, "-y")
    assert (ran.code, "start the daemon once" in ran.err) == (2, True), ran.err
    asyncio.run(belongs())
    with holding(home):
        ran = adopt(home, "-y")
        assert (ran.code, "stop it first" in ran.err) == (2, True), ran.err
    assert adopt(home, "-y").code == 0


@pytest.mark.parametrize("words", [("launcher", "ls"), ("blobs", "adopt", "-y"), ("key", "adopt", "-y")])
def test_a_home_without_a_database_is_reported_first(own_home: Path, words: tuple[str, ...]) -> None:
    """The installation's id is absent from the home as well, but the missing database is reported first."""
    ran = invoke(*words, "--home", str(own_home / "wrong"))
    message = f"error: {own_home / 'wrong'} has no database; run this where the daemon runs, or give --home\n"
    assert (ran.code, ran.err) == (2, message)


def test_adopt_is_refused_while_a_daemon_uses_the_home(tmp_path: Path) -> None:
    (tmp_path / "gpubroker.yaml").write_text(f"blobs: file://{tmp_path}/new\n")

    async def beside_a_daemon() -> Ran:
        async with await EmbeddedPostgres.start(tmp_path / "postgres", durable=False) as server:
            await migrate(server.dsn)
            store = await PostgresStore.connect(server.dsn)
            await store.installation(HERE)
            await store.blob_store("another")
            await store.close()
            return await asyncio.to_thread(adopt, tmp_path, "-y", "--installation", HERE)

    ran = asyncio.run(beside_a_daemon())
    assert (ran.code, "a daemon runs" in ran.err, "stop it first" in ran.err) == (2, True, True), ran.err
    ran = adopt(tmp_path, "-y")
    assert (ran.code, "give --installation" in ran.err) == (2, True), ran.err
    ran = adopt(tmp_path, "-y", "--json", "--installation", HERE)
    assert (ran.code, ran.document["adopted"]) == (0, True), ran.err
