"""What is committed comes back byte for byte; what is torn, altered or foreign is never used."""

import asyncio
from pathlib import Path

import pytest

from trainer import checkpoint
from trainer.blobs import BadContent, Objects, StoreError, connect
from trainer.checkpoint import Origin
from trainer.contract import keys
from trainer.contract.rendezvous import CONTRACT_VERSION, Manifest
from trainer.contract.train import CheckpointConfig
from trainer.ipc import Part

ORIGIN = Origin(job="j", attempt="a", kind="script")


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects(connect((tmp_path / "store").as_uri(), {}), "inst")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store" / "inst"


async def save(objects: Objects, folder: Path, step: int, text: str = "state") -> str:
    folder = folder / f"snapshot-{step}"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.json").write_text(f"{text} {step}")
    (folder / "sub" / "b.bin").write_bytes(b"\0" * 1000 + bytes([step]))
    key, _ = await checkpoint.commit(objects, ORIGIN, folder, step=step, complete=False, started=0.0)
    return key


async def restored(
    objects: Objects, candidates: list[str], folder: Path, kind: str = "script"
) -> tuple[int, list[str]]:
    """(step that was restored or -1, what was told)."""
    told: list[str] = []
    found = await checkpoint.restore(objects, candidates, folder, kind=kind, tell=told.append)
    return (found[1].step if found else -1), told


async def test_commit_and_restore(objects: Objects, tmp_path: Path) -> None:
    key = await save(objects, tmp_path, 7)
    step, told = await restored(objects, [key], tmp_path / "back")
    assert (step, told) == (7, [])
    assert (tmp_path / "back" / "a.json").read_text() == "state 7"
    assert (tmp_path / "back" / "sub" / "b.bin").read_bytes() == b"\0" * 1000 + b"\7"


@pytest.mark.parametrize("harm", ["altered", "cut", "missing", "no manifest", "garbage"])
async def test_falls_back_to_the_one_before(objects: Objects, store: Path, tmp_path: Path, harm: str) -> None:
    good, bad = await save(objects, tmp_path, 1), await save(objects, tmp_path, 2)
    victim = (store / bad).parent / "sub" / "b.bin"
    match harm:
        case "altered":
            victim.write_bytes(b"\1" * victim.stat().st_size)
        case "cut":
            victim.write_bytes(victim.read_bytes()[:-1])
        case "missing":
            victim.unlink()
        case "no manifest":
            (store / bad).unlink()
        case "garbage":
            (store / bad).write_text("{")
    step, told = await restored(objects, [bad, good], tmp_path / "back")
    assert step == 1
    assert len(told) == 1
    assert bad in told[0]
    assert (tmp_path / "back" / "a.json").read_text() == "state 1"


async def test_nothing_usable_leaves_nothing(objects: Objects, store: Path, tmp_path: Path) -> None:
    bad = await save(objects, tmp_path, 2)
    ((store / bad).parent / "a.json").write_text("forged 2")
    step, _ = await restored(objects, [bad], tmp_path / "back")
    assert step == -1
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("path", ["../escape", "/tmp/escape", "sub/../../escape"])
async def test_a_manifest_cannot_leave_the_folder(objects: Objects, store: Path, tmp_path: Path, path: str) -> None:
    key = await save(objects, tmp_path, 3)
    manifest = Manifest.model_validate_json((store / key).read_bytes())
    forged = manifest.model_copy(update={"files": (manifest.files[0].model_copy(update={"path": path}),)})
    (store / key).write_text(forged.model_dump_json())
    step, told = await restored(objects, [key], tmp_path / "back")
    assert step == -1
    assert "leaves the folder" in told[0]
    assert not (tmp_path / "escape").exists()


async def test_another_kind_is_refused(objects: Objects, tmp_path: Path) -> None:
    key = await save(objects, tmp_path, 3)
    step, told = await restored(objects, [key], tmp_path / "back", kind="train")
    assert step == -1
    assert "script checkpoint" in told[0]


async def test_one_of_a_later_version_is_refused(objects: Objects, store: Path, tmp_path: Path) -> None:
    key = await save(objects, tmp_path, 3)
    manifest = Manifest.model_validate_json((store / key).read_bytes())
    (store / key).write_text(manifest.model_copy(update={"version": CONTRACT_VERSION + 1}).model_dump_json())
    step, told = await restored(objects, [key], tmp_path / "back")
    assert step == -1
    assert f"its version is {CONTRACT_VERSION + 1}, this trainer knows {CONTRACT_VERSION}" in told[0]


async def test_same_step_twice_uses_two_folders(objects: Objects, tmp_path: Path) -> None:
    first = await save(objects, tmp_path / "x", 5, "one")
    second = await save(objects, tmp_path / "y", 5, "two")
    assert first != second
    assert await restored(objects, [first], tmp_path / "back") == (5, [])
    assert (tmp_path / "back" / "a.json").read_text() == "one 5"


async def test_prune_keeps_the_newest_and_removes_torn_ones(objects: Objects, store: Path, tmp_path: Path) -> None:
    made = [await save(objects, tmp_path, step) for step in (1, 2, 3, 4)]
    torn = store / keys.checkpoint("j", "a", 2, "torn") / "a.json"
    torn.parent.mkdir()
    torn.write_text("x")
    being_written = store / keys.checkpoint("j", "a", 9, "new") / "a.json"
    being_written.parent.mkdir()
    being_written.write_text("x")
    other = store / keys.checkpoint("j", "another", 1, "x") / "manifest.json"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    await checkpoint.prune(objects, ORIGIN, CheckpointConfig(keep=2))
    assert await checkpoint.own(objects, ORIGIN) == [made[3], made[2]]
    left = set(await objects.keys(keys.checkpoints("j")))
    assert not any(k.startswith(("checkpoints/j/a/0000000001", "checkpoints/j/a/0000000002")) for k in left)
    assert being_written.exists()
    assert other.exists()
    assert (await restored(objects, [made[3]], tmp_path / "back"))[0] == 4
    assert (await restored(objects, [made[2]], tmp_path / "back"))[0] == 3


async def test_prune_keeps_the_job_s_milestones(objects: Objects, store: Path, tmp_path: Path) -> None:
    """The first at or after 10 is of an earlier attempt, so the first of this one's after 10 is none."""
    earlier = Origin(job="j", attempt="0", kind="script")
    (tmp_path / "file").mkdir()
    before, _ = await checkpoint.commit(objects, earlier, tmp_path / "file", step=11, complete=False, started=0.0)
    forged = store / "checkpoints/j/0/20/manifest.json"
    forged.parent.mkdir()
    forged.write_text("{}")
    made = {}
    for step in (14, 18, 23, 27, 31, 36, 38):
        made[step] = await save(objects, tmp_path, step)
        await checkpoint.prune(objects, ORIGIN, CheckpointConfig(keep=2, keep_every=10))
    assert await checkpoint.own(objects, ORIGIN) == [made[step] for step in (38, 36, 31, 23)]
    assert (await restored(objects, [made[23]], tmp_path / "back"))[0] == 23
    assert (store / before).exists()


async def test_create_does_not_overwrite(objects: Objects) -> None:
    assert await objects.create("k", b"one")
    assert await objects.create("k", b"one"), "a lost reply makes the same put happen twice"
    assert not await objects.create("k", b"two")
    assert await objects.read("k") == b"one"


async def test_download_refuses_what_was_not_promised(objects: Objects, tmp_path: Path) -> None:
    await objects.write("k", b"x" * 100)
    with pytest.raises(BadContent):
        await objects.download("k", tmp_path / "f", size=50, sha256="0" * 64)
    assert not (tmp_path / "f").exists()


def part(folder: Path, name: str, node: int) -> tuple[Path, Part]:
    made = folder / f"node-{node}"
    made.mkdir(parents=True)
    (made / f"{name}.json").write_text(name)
    return made, Part(node=node, nodes=2, nonce="same")


async def test_a_checkpoint_of_two_machines_waits_for_both(objects: Objects, store: Path, tmp_path: Path) -> None:
    mine, first = part(tmp_path, "a", 0)
    other, second = part(tmp_path, "b", 1)
    waits = asyncio.Event()

    def hopeless() -> bool:
        waits.set()
        assert not list(store.rglob("manifest.json"))
        return False

    committing = asyncio.ensure_future(
        checkpoint.commit_parts(
            objects, ORIGIN, mine, step=5, complete=False, started=0.0, part=first, hopeless=hopeless
        )
    )
    await waits.wait()
    await checkpoint.offer(objects, ORIGIN, other, step=5, part=second)
    committed = await committing
    assert committed is not None
    assert await restored(objects, [committed[0]], tmp_path / "back") == (5, [])
    assert {p.name for p in (tmp_path / "back").iterdir()} == {"a.json", "b.json"}


async def test_a_part_that_never_comes_is_not_waited_for(objects: Objects, store: Path, tmp_path: Path) -> None:
    mine, first = part(tmp_path, "a", 0)
    committed = await checkpoint.commit_parts(
        objects, ORIGIN, mine, step=5, complete=False, started=0.0, part=first, hopeless=lambda: True
    )
    assert committed is None
    assert not list(store.rglob("manifest.json"))


async def test_a_part_that_was_offered_and_is_gone_stops_the_commit(
    objects: Objects, store: Path, tmp_path: Path
) -> None:
    mine, first = part(tmp_path, "a", 0)
    other, second = part(tmp_path, "b", 1)
    await checkpoint.offer(objects, ORIGIN, other, step=5, part=second)
    next(store.rglob("b.json")).unlink()
    with pytest.raises(StoreError, match=r"b\.json was offered and is absent"):
        await checkpoint.commit_parts(
            objects, ORIGIN, mine, step=5, complete=False, started=0.0, part=first, hopeless=lambda: False
        )
    assert not list(store.rglob("manifest.json"))
