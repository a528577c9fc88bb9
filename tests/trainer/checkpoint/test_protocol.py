"""A committed checkpoint is restored byte for byte; a torn, altered or foreign one is never used."""

import asyncio
from pathlib import Path

import pytest

from trainer.checkpoint import protocol as checkpoint
from trainer.checkpoint.protocol import Origin
from trainer.contract import object_keys as keys
from trainer.contract.checkpoint_format import STATE, GuardState, Progress
from trainer.contract.documents import CONTRACT_VERSION, Manifest
from trainer.contract.guard import GuardConfig
from trainer.contract.train import CheckpointConfig
from trainer.core.ipc import SnapshotPart
from trainer.objectstore.objects import BadContent, Objects, ObjectStoreError, connect
from trainer.training import divergence as guard

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
    key, _ = await checkpoint.commit(objects, ORIGIN, folder, step=step, complete=False, taken_s=0.0)
    return key


async def restored(
    objects: Objects, candidates: list[str], folder: Path, kind: str = "script"
) -> tuple[int, list[str]]:
    """Restore a checkpoint; return its step, or -1 if none was restored, and the logged lines."""
    told: list[str] = []
    found = await checkpoint.restore(objects, candidates, folder, kind=kind, log=told.append)
    return (found[1].step if found else -1), told


async def test_a_committed_checkpoint_is_restored(objects: Objects, tmp_path: Path) -> None:
    key = await save(objects, tmp_path, 7)
    step, told = await restored(objects, [key], tmp_path / "back")
    assert (step, told) == (7, [])
    assert (tmp_path / "back" / "a.json").read_text() == "state 7"
    assert (tmp_path / "back" / "sub" / "b.bin").read_bytes() == b"\0" * 1000 + b"\7"


OWN = ("manifest.json", "snapshot.json", "part-1.json", "deep/manifest.json", "files/a", "files/manifest.json")
"""Names that the protocol has as well."""


async def test_files_named_like_the_protocol_s_own_come_back(objects: Objects, tmp_path: Path) -> None:
    made = []
    for step in (1, 2, 3):
        folder = tmp_path / f"snapshot-{step}"
        for name in OWN:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"{name} of {step}")
        key, manifest = await checkpoint.commit(objects, ORIGIN, folder, step=step, complete=True, taken_s=0.0)
        made.append(key)
        assert {file.path for file in manifest.files} == set(OWN)
        await checkpoint.prune(objects, ORIGIN, CheckpointConfig(keep=2), None)
    assert await checkpoint.own_manifests(objects, ORIGIN) == [made[2], made[1]]
    assert not [key for key in await objects.keys(ORIGIN.folder) if key.startswith(keys.files_prefix(made[0]))]
    assert await checkpoint.verified(objects, made[2])
    for key, step in ((made[2], 3), (made[1], 2)):
        assert await restored(objects, [key], tmp_path / "back") == (step, [])
        back = {p.relative_to(tmp_path / "back").as_posix() for p in (tmp_path / "back").rglob("*") if p.is_file()}
        assert back == set(OWN)
        assert all((tmp_path / "back" / name).read_text() == f"{name} of {step}" for name in OWN)


@pytest.mark.parametrize("harm", ["altered", "cut", "missing", "no manifest", "garbage"])
async def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    objects: Objects, store: Path, tmp_path: Path, harm: str
) -> None:
    good, bad = await save(objects, tmp_path, 1), await save(objects, tmp_path, 2)
    victim = store / keys.files_prefix(bad) / "sub" / "b.bin"
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


async def test_a_restore_without_a_usable_checkpoint_leaves_no_files(
    objects: Objects, store: Path, tmp_path: Path
) -> None:
    bad = await save(objects, tmp_path, 2)
    (store / keys.files_prefix(bad) / "a.json").write_text("forged 2")
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


@pytest.mark.parametrize("path", ["a//README.md", "a/./b", "sub/b\0.bin", "sub\0/b.bin", "a\n"])
async def test_a_path_that_no_store_takes_falls_back_to_the_one_before(
    objects: Objects, store: Path, tmp_path: Path, path: str
) -> None:
    good, bad = await save(objects, tmp_path, 1), await save(objects, tmp_path, 2)
    manifest = Manifest.model_validate_json((store / bad).read_bytes())
    forged = manifest.model_copy(update={"files": (manifest.files[0].model_copy(update={"path": path}),)})
    (store / bad).write_text(forged.model_dump_json())
    step, told = await restored(objects, [bad, good], tmp_path / "back")
    assert step == 1
    assert "can be no object's key" in told[0]


async def test_a_program_s_files_may_have_any_name_that_a_store_takes(objects: Objects, tmp_path: Path) -> None:
    names = ("two words", "größe.bin", "back\\slash", "a%2Fb", "...", "x:*<>|?#")
    (tmp_path / "snapshot").mkdir()
    for name in names:
        (tmp_path / "snapshot" / name).write_text(name)
    key, _ = await checkpoint.commit(objects, ORIGIN, tmp_path / "snapshot", step=1, complete=False, taken_s=0.0)
    assert await restored(objects, [key], tmp_path / "back") == (1, [])
    assert {path.name for path in (tmp_path / "back").iterdir()} == set(names)


async def test_a_checkpoint_of_another_kind_is_refused(objects: Objects, tmp_path: Path) -> None:
    key = await save(objects, tmp_path, 3)
    step, told = await restored(objects, [key], tmp_path / "back", kind="train")
    assert step == -1
    assert "script checkpoint" in told[0]


async def test_a_checkpoint_of_a_later_version_is_refused(objects: Objects, store: Path, tmp_path: Path) -> None:
    key = await save(objects, tmp_path, 3)
    manifest = Manifest.model_validate_json((store / key).read_bytes())
    (store / key).write_text(manifest.model_copy(update={"version": CONTRACT_VERSION + 1}).model_dump_json())
    step, told = await restored(objects, [key], tmp_path / "back")
    assert step == -1
    assert f"its version is {CONTRACT_VERSION + 1}, this trainer reads {CONTRACT_VERSION}" in told[0]


async def test_same_step_twice_uses_two_folders(objects: Objects, tmp_path: Path) -> None:
    first = await save(objects, tmp_path / "x", 5, "one")
    second = await save(objects, tmp_path / "y", 5, "two")
    assert first != second
    assert await restored(objects, [first], tmp_path / "back") == (5, [])
    assert (tmp_path / "back" / "a.json").read_text() == "one 5"


async def test_complete_results_rank_above_saves_of_the_same_step(objects: Objects, tmp_path: Path) -> None:
    """A training ends early right after a save. The results are the newest of the step, regardless of the nonces, and
    stay.
    """
    (tmp_path / "file").mkdir()
    (tmp_path / "file/a").touch()
    for attempt in map(str, range(8)):
        origin = Origin(job="j", attempt=attempt, kind="script")
        made = []
        for complete in (True, False, False):
            key, _ = await checkpoint.commit(objects, origin, tmp_path / "file", step=5, complete=complete, taken_s=0.0)
            made.append(key)
        assert await checkpoint.own_manifests(objects, origin) == [made[0], *sorted(made[1:], reverse=True)]
        await checkpoint.prune(objects, origin, CheckpointConfig(keep=2), None)
        assert await checkpoint.own_manifests(objects, origin) == [made[0], max(made[1:])]


async def test_prune_keeps_the_newest_and_removes_torn_ones(objects: Objects, store: Path, tmp_path: Path) -> None:
    made = [await save(objects, tmp_path, step) for step in (1, 2, 3, 4)]
    torn = store / keys.checkpoint("j", "a", 2, "torn") / "a.json"
    torn.parent.mkdir()
    torn.write_text("x")
    as_far = store / keys.checkpoint("j", "a", 4, "zzzzzzzz") / "a.json"  # sorts after the one that was committed
    as_far.parent.mkdir()
    as_far.write_text("x")
    being_written = store / keys.checkpoint("j", "a", 9, "new") / "a.json"
    being_written.parent.mkdir()
    being_written.write_text("x")
    other = store / keys.checkpoint("j", "another", 1, "x") / "manifest.json"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    await checkpoint.prune(objects, ORIGIN, CheckpointConfig(keep=2), None)
    assert await checkpoint.own_manifests(objects, ORIGIN) == [made[3], made[2]]
    left = set(await objects.keys(keys.checkpoints("j")))
    assert not any(k.startswith(("checkpoints/j/a/0000000001", "checkpoints/j/a/0000000002")) for k in left)
    assert not any(folder.exists() for folder in (torn.parent, as_far.parent, (store / made[0]).parent))
    assert being_written.exists()
    assert other.exists()
    assert (await restored(objects, [made[3]], tmp_path / "back"))[0] == 4
    assert (await restored(objects, [made[2]], tmp_path / "back"))[0] == 3


async def test_prune_keeps_the_job_s_milestones(objects: Objects, store: Path, tmp_path: Path) -> None:
    """The milestone at 10 belongs to an earlier attempt, so this attempt's first one after 10 is not a milestone."""
    earlier = Origin(job="j", attempt="0", kind="script")
    (tmp_path / "file").mkdir()
    before, _ = await checkpoint.commit(objects, earlier, tmp_path / "file", step=11, complete=False, taken_s=0.0)
    forged = store / "checkpoints/j/0/20/manifest.json"
    forged.parent.mkdir()
    forged.write_text("{}")
    made = {}
    for step in (14, 18, 23, 27, 31, 36, 38):
        made[step] = await save(objects, tmp_path, step)
        await checkpoint.prune(objects, ORIGIN, CheckpointConfig(keep=2, keep_every=10), None)
    assert await checkpoint.own_manifests(objects, ORIGIN) == [made[step] for step in (38, 36, 31, 23)]
    assert (await restored(objects, [made[23]], tmp_path / "back"))[0] == 23
    assert (store / before).exists()


async def test_prune_can_count_the_attempts_before_as_its_own(objects: Objects, store: Path, tmp_path: Path) -> None:
    """A standalone run has no broker that removes checkpoints of former attempts. The newest stay, from any attempt."""
    (tmp_path / "file").mkdir()
    (tmp_path / "file/a").touch()
    made = []
    for attempt, steps in (("1", (5, 12, 20)), ("2", (23, 28))):
        origin = Origin(job="j", attempt=attempt, kind="train")
        for step in steps:
            key, _ = await checkpoint.commit(objects, origin, tmp_path / "file", step=step, complete=False, taken_s=0.0)
            made.append(key)
    torn = store / "checkpoints/j/1/0000000018-torn/files/a"
    torn.parent.mkdir(parents=True)
    torn.touch()
    config, now = CheckpointConfig(keep=3, keep_every=10), Origin(job="j", attempt="3", kind="train")
    await checkpoint.prune(objects, now, config, None)
    assert all((store / key).exists() for key in made), "elsewhere they are the broker's"
    await checkpoint.prune(objects, now, config, None, earlier=True)
    left = [*keys.manifests(await objects.keys("checkpoints/"))]
    assert [keys.step_of(key) for key in left] == [12, 20, 23, 28], "the newest three, and the first from 10 on"
    assert {key.split("/files/")[0] for key in await objects.keys("checkpoints/") if "/files/" in key} == {
        key.removesuffix("/manifest.json") for key in left
    }


async def test_prune_leaves_a_training_something_to_go_back_to(objects: Objects, tmp_path: Path) -> None:
    """A rollback always finds a checkpoint shortly before its step, and never starts from the beginning."""
    wary, config = GuardConfig(skip=2, back_steps=10), CheckpointConfig(keep=2)
    for step in range(3, 150, 3):
        folder = tmp_path / f"at-{step}"
        folder.mkdir()
        (folder / STATE).write_text(Progress(step=step).model_dump_json())
        await checkpoint.commit(objects, ORIGIN, folder, step=step, complete=False, taken_s=0.0)
        await checkpoint.prune(objects, ORIGIN, config, wary)
        left = await checkpoint.own_manifests(objects, ORIGIN)
        assert len(left) <= 4
        for at in (keys.step_of(left[0]), keys.step_of(left[1:2][0] if left[1:] else left[0])):
            bad = Progress(step=at + 2, guard=GuardState(bad_steps=2))
            jumps = guard.rollback_plan(wary, bad, 4)
            found = await checkpoint.restore(
                objects, left, tmp_path / "back", kind="script", log=lambda line: None, jumps=jumps
            )
            if jumps[-1].step >= 3:
                assert found is not None, f"from behind step {at} back to the beginning"
                assert jumps[-1].step - found[1].step <= 2 * (10 + 2 + 3)


async def test_create_refuses_an_existing_object(objects: Objects) -> None:
    assert await objects.create("k", b"one")
    assert await objects.create("k", b"one"), "a lost reply makes the same put happen twice"
    assert not await objects.create("k", b"two")
    assert await objects.read("k") == b"one"


async def test_download_refuses_what_was_not_promised(objects: Objects, tmp_path: Path) -> None:
    await objects.write("k", b"x" * 100)
    with pytest.raises(BadContent):
        await objects.download("k", tmp_path / "f", size=50, sha256="0" * 64)
    assert not (tmp_path / "f").exists()


def part(folder: Path, name: str, node: int) -> tuple[Path, SnapshotPart]:
    made = folder / f"node-{node}"
    made.mkdir(parents=True)
    (made / f"{name}.json").write_text(name)
    return made, SnapshotPart(node=node, nodes=2, nonce="same")


async def test_a_checkpoint_of_two_machines_waits_for_both(objects: Objects, store: Path, tmp_path: Path) -> None:
    mine, first = part(tmp_path, "a", 0)
    other, second = part(tmp_path, "b", 1)
    waits = asyncio.Event()

    def should_give_up() -> bool:
        waits.set()
        assert not list(store.rglob("manifest.json"))
        return False

    committing = asyncio.ensure_future(
        checkpoint.commit_parts(
            objects, ORIGIN, mine, step=5, complete=False, taken_s=0.0, part=first, should_give_up=should_give_up
        )
    )
    await waits.wait()
    await checkpoint.offer(objects, ORIGIN, other, step=5, complete=False, part=second)
    committed = await committing
    assert committed is not None
    assert await restored(objects, [committed[0]], tmp_path / "back") == (5, [])
    assert {p.name for p in (tmp_path / "back").iterdir()} == {"a.json", "b.json"}


async def test_a_commit_whose_reply_was_lost_is_found_by_the_next_try(objects: Objects, tmp_path: Path) -> None:
    """The manifests of both tries differ only in the time of the save."""
    mine, first = part(tmp_path, "a", 0)
    alone = first.model_copy(update={"nodes": 1})
    keys_and_manifests = [
        await checkpoint.commit_parts(
            objects, ORIGIN, mine, step=5, complete=False, taken_s=taken_s, part=alone, should_give_up=lambda: False
        )
        for taken_s in (1.0, 100.0)
    ]
    assert keys_and_manifests[0] == keys_and_manifests[1]
    (mine / "a.json").write_text("another")
    with pytest.raises(BadContent, match="written by another process"):
        await checkpoint.commit_parts(
            objects, ORIGIN, mine, step=5, complete=False, taken_s=1.0, part=alone, should_give_up=lambda: False
        )


async def test_a_file_that_cannot_be_sent_ends_the_others_too(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = part(tmp_path, "a", 0)
    (mine / "b.json").write_text("b")
    begun, ended = asyncio.Event(), asyncio.Event()

    async def upload(self: Objects, key: str, *_: object) -> None:
        if key.endswith("a.json"):
            await begun.wait()
            raise ObjectStoreError("away")
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(Objects, "upload", upload)
    with pytest.raises(ObjectStoreError, match="away"):
        await checkpoint.commit(objects, ORIGIN, mine, step=5, complete=False, taken_s=0.0)
    assert ended.is_set()


async def test_a_part_that_never_comes_is_not_waited_for(objects: Objects, store: Path, tmp_path: Path) -> None:
    mine, first = part(tmp_path, "a", 0)
    committed = await checkpoint.commit_parts(
        objects, ORIGIN, mine, step=5, complete=False, taken_s=0.0, part=first, should_give_up=lambda: True
    )
    assert committed is None
    assert not list(store.rglob("manifest.json"))


async def test_a_part_that_was_offered_and_is_gone_stops_the_commit(
    objects: Objects, store: Path, tmp_path: Path
) -> None:
    mine, first = part(tmp_path, "a", 0)
    other, second = part(tmp_path, "b", 1)
    await checkpoint.offer(objects, ORIGIN, other, step=5, complete=False, part=second)
    next(store.rglob("b.json")).unlink()
    with pytest.raises(ObjectStoreError, match=r"b\.json was offered and is absent"):
        await checkpoint.commit_parts(
            objects, ORIGIN, mine, step=5, complete=False, taken_s=0.0, part=first, should_give_up=lambda: False
        )
    assert not list(store.rglob("manifest.json"))
