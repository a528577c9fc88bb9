"""Snapshots of a script's folder are complete, even if the script changes the folder or the disk fails meanwhile."""

import asyncio
import errno
import os
import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.test_agent import script
from tests.trainer.support.harness import Bench, until
from trainer.agent.upload import script_snapshots as script_tree
from trainer.agent.upload.script_snapshots import ScriptTree, listing
from trainer.contract.documents import Outcome
from trainer.core.ipc import RunFolder

SMALL = 64 << 10
LARGE = """
import os, pathlib, time
folder = pathlib.Path(os.environ["GPUBROKER_CHECKPOINT_DIR"])
print("begun", flush=True)
while not (folder / "go").exists():
    time.sleep(0.01)
(folder / "result").write_bytes(bytes(1 << 20))
"""


@pytest.fixture
def heard() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def tree(tmp_path: Path, heard: list[tuple[str, str]]) -> ScriptTree:
    run, folder = RunFolder(root=tmp_path / "run"), tmp_path / "tree"
    run.make()
    folder.mkdir()
    made = ScriptTree(folder, run, every_s=lambda: 300.0, step=0, report=lambda *words: heard.append(words))
    for name in ("a", "b"):
        (folder / name).write_text(name)
    return made


def taken(folder: Path) -> list[set[str]]:
    return [{p.name for p in one.iterdir()} for one in RunFolder(root=folder / "run").waiting()]


def test_a_folder_that_vanishes_during_a_snapshot_is_omitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program removes its oldest checkpoints during a snapshot; the snapshot leaves the removed folder out."""
    (tmp_path / "old" / "deep").mkdir(parents=True)
    (tmp_path / "kept").write_text("x")
    look = os.scandir

    def vanishing(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(path).name == "old":
            shutil.rmtree(path)
        return look(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert list(listing(tmp_path)) == ["kept"]


async def test_snapshots_around_an_interrupted_one_are_whole(
    tree: ScriptTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program ends during a snapshot, which continues in its thread."""
    copying, go_on, copy = threading.Event(), threading.Event(), script_tree._copy_whole

    def slow(source: Path, target: Path) -> bool:
        if source.name == "b" and not copying.is_set():
            copying.set()
            go_on.wait(60)
        return copy(source, target)

    monkeypatch.setattr(script_tree, "_copy_whole", slow)
    cut = asyncio.create_task(tree.snapshot(complete=False))
    assert await asyncio.to_thread(copying.wait, 60)
    cut.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    last = asyncio.create_task(tree.last(complete=True))
    await asyncio.sleep(0)
    go_on.set()
    assert await last
    assert taken(tmp_path) == [{"a", "b"}] * 2


async def test_a_disk_that_is_full_leaves_nothing_and_is_reported(
    tree: ScriptTree, tmp_path: Path, heard: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    monkeypatch.setattr(script_tree, "QUIET_S", 0.0)
    assert not await tree._take_when_quiet()
    assert not await tree.last(complete=True)
    assert [kind for kind, _ in heard] == ["save_failed"] * 2
    assert "No space left" in heard[0][1]
    assert list((tmp_path / "run" / "snapshots").iterdir()) == []
    monkeypatch.undo()
    assert await tree.last(complete=True)
    assert taken(tmp_path) == [{"a", "b"}]


NAMED = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["GPUBROKER_CHECKPOINT_DIR"])
names = "manifest.json", "snapshot.json", "part-1.json", "deep/manifest.json", "files/manifest.json"
print("found", all((folder / n).is_file() and (folder / n).read_text() == f"{n} is mine" for n in names), flush=True)
for name in names:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(f"{name} is mine")
print("written", flush=True)
while "--once" not in sys.argv:
    time.sleep(0.01)
"""


def test_a_program_s_files_may_be_named_like_the_protocol_s_own(bench: Bench) -> None:
    first = script(bench, NAMED)
    until(lambda: "written" in first.log, "its files")
    first.desire("drain")
    assert first.wait().outcome is Outcome.DRAINED
    second = script(bench, NAMED, "--once")
    final = second.wait()
    assert (final.outcome, final.message) == (Outcome.COMPLETED, "")
    assert ("found False" in first.log, "found True" in second.log) == (True, True)
    assert [manifest.complete for _, manifest in bench.committed()] == [True, False]


def test_a_start_from_zero_without_a_usable_checkpoint_is_reported(bench: Bench) -> None:
    lost = ("checkpoints/gone/a/0000000002-ab/manifest.json", "checkpoints/gone/a/0000000001-ab/manifest.json")
    final = script(bench, NAMED, "--once", resume_from=lost).wait()
    assert [(message.kind, message.message) for message in final.messages if message.kind == "started_over"] == [
        ("started_over", "no checkpoint of the 2 named could be used; starting from the beginning")
    ]
    assert "started_over" not in {message.kind for message in script(bench, NAMED, "--once").wait().messages}


def test_a_program_whose_results_cannot_be_saved_has_not_completed(bench: Bench) -> None:
    agent = script(bench, LARGE)
    until(lambda: "begun" in agent.log, "the program")
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (SMALL, resource.RLIM_INFINITY))
    (bench.folder / "work" / agent.attempt / "checkpoint" / "go").touch()
    final = agent.wait()
    assert final.outcome is Outcome.INFRASTRUCTURE
    assert final.message == "the results could not be written to the blob store in time"
    assert "save_failed" in {message.kind for message in final.messages}
    assert bench.committed() == []
