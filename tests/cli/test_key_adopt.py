"""`gpubroker key adopt`: after the loss of a master key."""

import asyncio
from pathlib import Path

import pytest

from broker.daemon.home_dir import holding
from broker.domain.ids import Installation
from broker.runtime.secret_box import MASTER_KEY_FILE, SecretsError, sealing
from broker.store.postgres.store import PostgresStore
from tests.cli.conftest import Ran, invoke

HERE = Installation("abcd")


def adopt(home: Path, *words: str) -> Ran:
    return invoke("key", "adopt", "--home", str(home), *words)


@pytest.fixture
def home(tmp_path: Path, postgres_dsn: str) -> Path:
    (tmp_path / "installation").write_text(HERE)
    (tmp_path / "gpubroker.yaml").write_text(f"database_url: {postgres_dsn}\n")
    return tmp_path


def test_key_adopt_accepts_a_new_master_key_in_place_of_a_lost_one(home: Path, postgres_dsn: str) -> None:
    async def starts() -> None:
        """Check the master key as the daemon does."""
        store = await PostgresStore.connect(postgres_dsn)
        try:
            await store.installation(HERE)
            await sealing(store, home / MASTER_KEY_FILE, {})
        finally:
            await store.close()

    asyncio.run(starts())
    (home / MASTER_KEY_FILE).unlink()
    with pytest.raises(SecretsError, match="gpubroker key adopt"):
        asyncio.run(starts())
    with holding(home):
        ran = adopt(home, "-y")
        assert (ran.code, "stop it first" in ran.err) == (2, True), ran.err
    refused = adopt(home)
    assert (refused.code, "pass -y" in refused.err) == (2, True), refused.err
    assert not (home / MASTER_KEY_FILE).exists()
    done = adopt(home, "-y", "--json")
    assert (done.code, done.document["adopted"]) == (0, True), done.err
    asyncio.run(starts())
    assert adopt(home, "-y", "--json").document["adopted"] is False
