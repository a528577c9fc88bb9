"""Listing of a folder store in which a job has written names that obstore refuses."""

import os
from pathlib import Path

import pytest

from broker.blobs.obstore_blobs import ObstoreBlobs
from broker.domain.ids import Installation

NAMES = (b"\xff", b"a\nb", b"\x1b[2J")


@pytest.mark.parametrize("name", NAMES)
async def test_unusable_name_of_one_job_hides_no_object_of_others(tmp_path: Path, name: bytes) -> None:
    """The entries of the other jobs, with their e_tags, are the same as before."""
    blobs = ObstoreBlobs.open(tmp_path.as_uri(), Installation("i"))
    for key in ("heartbeats/a/0", "heartbeats/b/0", "heartbeats/c/sub/é"):
        await blobs.put(key, b"beat")
    before = await blobs.list("heartbeats/")
    assert [info.key for info in before] == ["heartbeats/a/0", "heartbeats/b/0", "heartbeats/c/sub/é"]
    folder = os.fsencode(tmp_path / "i" / "heartbeats" / "a")
    Path(os.fsdecode(folder + b"/" + name)).touch()
    (tmp_path / "i" / "heartbeats" / "a" / "link").symlink_to("/etc")
    (tmp_path / "i" / "heartbeats" / "a" / "0#7").touch()
    assert await blobs.list("heartbeats/") == before


async def test_closed_folder_of_one_job_hides_no_object_of_others(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads every folder")
    blobs = ObstoreBlobs.open(tmp_path.as_uri(), Installation("i"))
    await blobs.put("heartbeats/b/0", b"beat")
    (tmp_path / "i" / "heartbeats" / "a").mkdir(mode=0)
    assert [info.key for info in await blobs.list("heartbeats/")] == ["heartbeats/b/0"]
