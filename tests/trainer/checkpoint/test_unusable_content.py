"""Absent, cut or unreadable objects: a check returns False, and the uploader continues."""

from pathlib import Path

import pytest

from tests.trainer.support.token_store import store_url
from trainer.agent import deliver_results
from trainer.agent.base.environment import Environment
from trainer.agent.base.state import AgentState
from trainer.agent.upload.checkpoint_uploader import Saver
from trainer.checkpoint import protocol
from trainer.checkpoint.protocol import Origin
from trainer.contract import object_keys as keys
from trainer.contract.documents import Manifest
from trainer.contract.output import OutputConfig
from trainer.contract.train import CheckpointConfig
from trainer.core.ipc import RunFolder, SnapshotInfo, SnapshotPart, info_of
from trainer.objectstore.objects import BadContent, Objects, ObjectStoreError

ORIGIN = Origin(job="job", attempt="a", kind="train")
UNREADABLE = (b"", b"{", b"{}", b"[]", b"\xff\xfe", b'{"version": "x"}')
"""Contents of a JSON document that no schema of the trainer accepts."""
NONCE = "same"


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects.open(store_url(tmp_path), {}, "inst")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store" / "inst"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(root=tmp_path / "run")
    run.make()
    return run


@pytest.fixture
def state(tmp_path: Path, run: RunFolder) -> AgentState:
    env = Environment(blobs=store_url(tmp_path), installation="inst", attempt="a", workdir=tmp_path)
    return AgentState(env=env, run=run)


async def results(objects: Objects, folder: Path, *, complete: bool = True) -> str:
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "weights").write_bytes(b"\0" * 100)
    (folder / "eval.json").write_text("{}")
    key, _ = await protocol.commit(objects, ORIGIN, folder, step=3, complete=complete, taken_s=0.0)
    return key


async def test_whole_results_are_verified(objects: Objects, tmp_path: Path) -> None:
    assert await protocol.verified(objects, await results(objects, tmp_path / "whole"))
    assert not await protocol.verified(objects, await results(objects, tmp_path / "part", complete=False))


@pytest.mark.parametrize("harm", ["missing", "cut", "longer", "no manifest", *UNREADABLE])
async def test_harmed_results_are_not_verified(
    objects: Objects, store: Path, tmp_path: Path, harm: str | bytes
) -> None:
    key = await results(objects, tmp_path / "whole")
    file = store / keys.files_prefix(key) / "adapter" / "weights"
    match harm:
        case "missing":
            file.unlink()
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "longer":
            file.write_bytes(file.read_bytes() + b"\0")
        case "no manifest":
            (store / key).unlink()
        case bytes():
            (store / key).write_bytes(harm)
    assert not await protocol.verified(objects, key)


@pytest.mark.parametrize("content", [None, *UNREADABLE])
async def test_delivery_reports_an_unusable_manifest(
    objects: Objects, store: Path, tmp_path: Path, content: bytes | None
) -> None:
    key = await results(objects, tmp_path / "whole")
    (store / key).unlink()
    if content is not None:
        (store / key).write_bytes(content)
    output = OutputConfig.model_validate({"copy_to": {"url": (tmp_path / "copy").as_uri()}})
    reason = await deliver_results.deliver(
        objects, key, output, folder=tmp_path / "results", job="job", secrets={},
        endpoint=None, report=lambda kind, message: None, pauses_s=(),
    )  # fmt: skip
    assert "its manifest" in reason


def snapshot(run: RunFolder, step: int, nodes: int) -> None:
    folder = run.snapshots / f"{step:010d}-000001"
    folder.mkdir()
    (folder / "state.json").write_text(f"step {step}")
    part = SnapshotPart(node=0, nodes=nodes, nonce=NONCE)
    info_of(folder).write_text(SnapshotInfo(step=step, taken_s=0.0, stall_s=0.0, part=part).model_dump_json())


async def offer(objects: Objects, folder: Path, step: int) -> None:
    """Upload the other machine's part."""
    folder.mkdir()
    (folder / "b.bin").write_text(f"step {step}")
    part = SnapshotPart(node=1, nodes=2, nonce=NONCE)
    await protocol.offer(objects, ORIGIN, folder, step=step, complete=False, part=part)


@pytest.mark.parametrize("name", ["part-1.json", "manifest.json"])
@pytest.mark.parametrize("content", UNREADABLE)
async def test_uploader_leaves_a_snapshot_whose_place_is_taken(
    objects: Objects, store: Path, state: AgentState, run: RunFolder, tmp_path: Path, name: str, content: bytes
) -> None:
    await offer(objects, tmp_path / "one", 1)
    place = store / keys.checkpoint(ORIGIN.job, ORIGIN.attempt, 1, NONCE) / name
    place.write_bytes(content)
    config, lines = CheckpointConfig(), list[str]()
    saver = Saver(objects, state, ORIGIN, config=config, guard=None, log=lines.append, committed=lambda cost_s: None)
    snapshot(run, 1, nodes=2)
    await saver.once()
    assert run.waiting() == []
    assert state.checkpoint is None
    assert [message.kind for message in state.messages()] == ["save_failed"]

    await offer(objects, tmp_path / "two", 2)
    snapshot(run, 2, nodes=2)
    await saver.once()
    assert state.checkpoint is not None
    assert state.checkpoint.step == 2


@pytest.mark.parametrize("content", [None, *UNREADABLE])
async def test_manifest_errors_are_those_of_the_protocol(
    objects: Objects, store: Path, tmp_path: Path, content: bytes | None
) -> None:
    key = await results(objects, tmp_path / "whole")
    assert isinstance(await protocol.read_manifest(objects, key), Manifest)
    (store / key).unlink()
    if content is not None:
        (store / key).write_bytes(content)
    with pytest.raises((BadContent, ObjectStoreError)):
        await protocol.read_manifest(objects, key)
