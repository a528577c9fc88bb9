"""A store's folder that was removed: the agent reports it, and does not create an empty one in its place."""

from pathlib import Path

import pytest

from trainer.objectstore.objects import Objects, ObjectStoreError


async def test_an_agent_does_not_create_a_removed_store_again(tmp_path: Path) -> None:
    root = tmp_path / "blobs"
    root.mkdir()
    objects = Objects.open(root.as_uri(), {}, "inst")
    await objects.write("a", b"1")
    root.rename(tmp_path / "moved")
    content = tmp_path / "content"
    content.write_bytes(b"2")
    for attempt in (objects.write("b", b"2"), objects.create("c", b"2"), objects.upload("d", content)):
        with pytest.raises(ObjectStoreError, match="is gone"):
            await attempt
    assert not root.exists()
