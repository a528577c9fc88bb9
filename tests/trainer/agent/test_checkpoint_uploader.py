"""Snapshots on disk become complete checkpoints or none, even if an upload is interrupted."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support.token_store import store_url
from trainer.agent.base.environment import Environment
from trainer.agent.base.state import AgentState
from trainer.agent.upload.checkpoint_uploader import Saver
from trainer.checkpoint import protocol as checkpoint
from trainer.checkpoint.protocol import Origin
from trainer.contract.documents import Manifest
from trainer.contract.train import CheckpointConfig
from trainer.core.ipc import RunFolder, SnapshotInfo, SnapshotPart, info_of
from trainer.objectstore.objects import Objects

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
ORIGIN = Origin(job="job", attempt="a", kind="train")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(root=tmp_path / "run")
    run.make()
    return run


@pytest.fixture
def saver(tmp_path: Path, run: RunFolder) -> Saver:
    url = store_url(tmp_path)
    env = Environment(blobs=url, installation="inst", attempt="a", workdir=tmp_path)
    state, objects = AgentState(env=env, run=run), Objects.open(url, {}, "inst")
    return Saver(
        objects,
        state,
        ORIGIN,
        config=CheckpointConfig(keep=5),
        guard=None,
        log=lambda line: None,
        committed=lambda cost_s: None,
    )


def snapshot(run: RunFolder, step: int) -> Path:
    folder = run.snapshots / f"{step:010d}-000001"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(f"{name} of step {step}")
    info_of(folder).write_text(SnapshotInfo(step=step, taken_s=0.0, stall_s=0.0).model_dump_json())
    return folder


async def committed(saver: Saver) -> list[Manifest]:
    manifests = [await saver._objects.read(key) for key in await checkpoint.own_manifests(saver._objects, ORIGIN)]
    return [Manifest.model_validate_json(data) for data in manifests if data]


class Slow:
    """A removal that deletes one file and then waits for `go_on`."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._remove = shutil.rmtree

    def __call__(self, folder: Path, *more: Any, **options: Any) -> None:
        (folder / FILES[0]).unlink()
        self.begun.set()
        self.go_on.wait(60)
        self._remove(folder, *more, **options)


@pytest.mark.parametrize("steps", [(1,), (1, 2)], ids=["committed", "overtaken"])
async def test_a_snapshot_in_removal_is_not_uploaded_again(
    saver: Saver, run: RunFolder, steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training and the upload in progress end while a snapshot is removed in a thread."""
    for step in steps:
        snapshot(run, step)
    slow = Slow()
    monkeypatch.setattr(shutil, "rmtree", slow)
    saving = asyncio.create_task(saver.once())
    assert await asyncio.to_thread(slow.begun.wait, 60)
    saving.cancel()
    await asyncio.gather(saving, return_exceptions=True)
    monkeypatch.undo()
    assert await saver.flush()
    slow.go_on.set()
    manifests = await committed(saver)
    assert {manifest.step for manifest in manifests} == {steps[-1]}
    assert all({file.path for file in manifest.files} == set(FILES) for manifest in manifests)


async def test_an_upload_that_is_cut_short_is_made_again(saver: Saver, run: RunFolder) -> None:
    snapshot(run, 1)
    saving = asyncio.create_task(saver.once())
    await asyncio.sleep(0)
    saving.cancel()
    await asyncio.gather(saving, return_exceptions=True)
    assert await saver.flush()
    assert [manifest.step for manifest in await committed(saver)] == [1]
    assert not list(run.snapshots.iterdir())


async def test_after_a_failure_a_part_that_is_missing_is_not_waited_for_long(
    saver: Saver, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = snapshot(run, 7)
    info = SnapshotInfo(step=7, taken_s=0.0, stall_s=0.0, part=SnapshotPart(node=0, nodes=2, nonce="x"))
    info_of(folder).write_text(info.model_dump_json())
    monkeypatch.setattr("trainer.agent.upload.checkpoint_uploader.PARTS_S", 0.0)
    assert await saver.flush(failed=True)
    assert await committed(saver) == []
    assert run.waiting() == []
