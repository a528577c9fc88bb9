"""A store's folder that is missing: the agent reports it, and does not create an empty one in its place."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from trainer.objectstore.objects import Objects, ObjectStoreError

Operation = Callable[[Objects, Path], Awaitable[object]]
OPERATIONS: dict[str, Operation] = {
    "read": lambda objects, _: objects.read("a"),
    "write": lambda objects, _: objects.write("b", b"2"),
    "create": lambda objects, _: objects.create("c", b"2"),
    "upload": lambda objects, content: objects.upload("d", content),
    "download": lambda objects, content: objects.download("a", content, size=1, sha256=""),
    "list": lambda objects, _: objects.keys("x/"),
    "delete": lambda objects, _: objects.delete("a"),
}


@pytest.fixture
def content(tmp_path: Path) -> Path:
    file = tmp_path / "content"
    file.write_bytes(b"2")
    return file


@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_agent_does_not_create_a_removed_store_again(tmp_path: Path, content: Path, name: str) -> None:
    root = tmp_path / "blobs"
    root.mkdir()
    objects = Objects.open(root.as_uri(), {}, "inst")
    await objects.write("a", b"1")
    root.rename(tmp_path / "moved")
    with pytest.raises(ObjectStoreError, match="is missing; mount it"):
        await OPERATIONS[name](objects, content)
    assert not root.exists()


@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_agent_that_starts_without_the_store_does_not_create_it(
    tmp_path: Path, content: Path, name: str
) -> None:
    """A network file system that is not mounted yet: an empty folder would say that no broker exists."""
    root = tmp_path / "blobs"
    objects = Objects.open(root.as_uri(), {}, "inst")
    objects.renew(root.as_uri(), {})
    with pytest.raises(ObjectStoreError, match="is missing; mount it"):
        await OPERATIONS[name](objects, content)
    assert not root.exists()


async def test_an_agent_uses_the_store_once_it_is_mounted(tmp_path: Path) -> None:
    root = tmp_path / "blobs"
    objects = Objects.open(root.as_uri(), {}, "inst")
    root.mkdir()
    await objects.write("a", b"1")
    await objects.delete("a")
    assert await objects.create("a", b"2")
    assert await objects.read("a") == b"2"
