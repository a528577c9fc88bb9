"""A home belongs to one installation; a database or a blob store of another one is refused."""

from pathlib import Path

import pytest

from broker.daemon.installation import OtherBlobs, OtherInstallation, installation_of, mark_of, refuse_other_blobs
from broker.domain.ids import Installation
from broker.runtime.clock import SystemClock
from tests.api.harness import memory_blobs
from tests.support.memory_store.store import MemoryStore
from trainer.contract import object_keys as keys

OURS, THEIRS = Installation("aaaa"), Installation("bbbb")


async def of(installation: Installation) -> MemoryStore:
    store = MemoryStore(SystemClock())
    await store.installation(installation)
    return store


async def test_foreign_database_is_refused_and_the_home_keeps_its_own(tmp_path: Path) -> None:
    """No broker would list the machines of the home's own installation."""
    (tmp_path / "installation").write_text("aaaa\n")
    with pytest.raises(OtherInstallation, match=r"of installation bbbb and the home .* of aaaa; correct database_url"):
        await installation_of(await of(THEIRS), tmp_path)
    assert (tmp_path / "installation").read_text() == "aaaa\n"


async def test_a_new_home_takes_the_database_s(tmp_path: Path) -> None:
    assert await installation_of(await of(THEIRS), tmp_path) == THEIRS
    assert (tmp_path / "installation").read_text() == "bbbb\n"


async def test_broker_with_its_own_blob_store_is_refused_until_adopted() -> None:
    """A broker with another blob store would read no heartbeat of the others' machines, and end these machines."""
    store = await of(OURS)
    shared, own = memory_blobs(), memory_blobs()
    await refuse_other_blobs(store, shared)
    await refuse_other_blobs(store, shared)
    with pytest.raises(OtherBlobs, match="correct `blobs`"):
        await refuse_other_blobs(store, own)
    await store.adopt_blob_store(await mark_of(own))
    await refuse_other_blobs(store, own)
    with pytest.raises(OtherBlobs):
        await refuse_other_blobs(store, shared)


async def test_a_blob_store_that_was_moved_with_its_objects_is_the_same() -> None:
    store, old, new = await of(OURS), memory_blobs(), memory_blobs()
    await refuse_other_blobs(store, old)
    for blob in await old.list(""):
        await new.put(blob.key, await old.get(blob.key) or b"")
    await refuse_other_blobs(store, new)


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe", b"aaaa"])
async def test_a_blob_store_whose_mark_is_damaged_is_refused_with_the_fix(damaged: bytes) -> None:
    store, blobs = await of(OURS), memory_blobs()
    await refuse_other_blobs(store, blobs)
    mark = await blobs.get(keys.BLOB_STORE) or b""
    await blobs.put(keys.BLOB_STORE, damaged)
    with pytest.raises(OtherBlobs, match=r"broker/store in the blob store is damaged, .*: remove that object"):
        await refuse_other_blobs(store, blobs)
    await blobs.put(keys.BLOB_STORE, mark + b"\n")
    await refuse_other_blobs(store, blobs)


async def test_a_new_database_takes_the_home_s(tmp_path: Path) -> None:
    (tmp_path / "installation").write_text("aaaa\n")
    store = MemoryStore(SystemClock())
    assert await installation_of(store, tmp_path) == OURS
    assert await store.installation(THEIRS) == OURS
