"""A standalone run whose store is full keeps its checkpoint on the disk, and the next start resumes from it."""

import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.support import tiny_jobs
from tests.trainer.support.harness import until
from tests.trainer.support.tiny_jobs import KINDS
from tests.trainer.support.token_store import store_url
from tests.trainer.support.workers import HANGS_S
from tests.trainer.training.test_full_disk import SMALL, cramped
from trainer.checkpoint import protocol as checkpoint
from trainer.checkpoint.protocol import Origin
from trainer.contract.documents import ExitCode
from trainer.core.ipc import RunFolder, SnapshotInfo, info_of
from trainer.objectstore.objects import Objects
from trainer.standalone import pending_checkpoint as leftover

KIND = KINDS["causal_lm full"]
ORIGIN = Origin(job="standalone", attempt="standalone-0001", kind="train")


class Run:
    """A standalone training on this machine, started without waiting for its end."""

    def __init__(self, folder: Path, *, full: bool = False) -> None:
        self.said, self.erred = folder / "said", folder / "erred"
        argv = [sys.executable, "-m", "tests.trainer.support.standalone_run", "--config", str(folder / "job.json")]
        with self.said.open("w") as said, self.erred.open("w") as erred:
            self.process = subprocess.Popen(
                [*argv, "--output", str(folder / "out"), "--save-every", "1"], stdout=said, stderr=erred,
                preexec_fn=(lambda: cramped(0)) if full else None,
            )  # fmt: skip

    def says(self, words: str) -> None:
        until(lambda: words in self.said.read_text() or self.process.poll() is not None, words)
        assert words in self.said.read_text(), self.erred.read_text()

    def end(self, *, asked: bool = True) -> tuple[int, str]:
        """Return (exit code, final message)."""
        if asked:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANGS_S), (self.erred.read_text().splitlines() or [""])[-1]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    train = tiny_jobs.train(KIND, tmp_path / "model").model_copy(update={"max_steps": 100_000})
    (tmp_path / "rows.csv").write_bytes(tiny_jobs.data(KIND))
    (tmp_path / "job.json").write_text(train.model_dump_json(exclude_none=True))
    return tmp_path


def test_a_run_resumes_from_a_checkpoint_that_a_full_store_refused(place: Path) -> None:
    first = Run(place)
    first.says("committed")
    resource.prlimit(first.process.pid, resource.RLIMIT_FSIZE, (SMALL, resource.RLIM_INFINITY))
    first.says("a checkpoint waits on disk")
    code, word = first.end()
    assert code == ExitCode.DRAINED
    said = re.match(r"the checkpoint of step (\d+), which stays in (\S+), could not be stored: ", word)
    assert said is not None, word
    step, stays = int(said[1]), Path(said[2])
    assert (stays / "model.safetensors").stat().st_size > SMALL
    assert [p.name for p in (place / "out/work").iterdir()] == ["run"], "what can be fetched again takes no space"

    code, word = Run(place, full=True).end(asked=False)
    assert code == ExitCode.INFRASTRUCTURE
    assert f"the checkpoint of step {step}, which stays in {stays}, could not be written: about " in word
    assert word.endswith("; start again then, and the run resumes")
    assert stays.exists()

    last = Run(place)
    last.says(f"resuming from step {step}: checkpoints/standalone/standalone-0001/{step:010d}-")
    assert last.end() == (ExitCode.DRAINED, "")
    assert not (place / "out/work").exists()


def waiting(run: RunFolder, step: int, *, complete: bool = False) -> Path:
    """Return a snapshot that its run left."""
    snapshot = run.snapshots / f"{step:010d}-000001"
    snapshot.mkdir()
    (snapshot / "state.json").write_text("{}")
    info_of(snapshot).write_text(SnapshotInfo(step=step, taken_s=0.0, stall_s=0.0, complete=complete).model_dump_json())
    return snapshot


async def test_a_committed_pending_checkpoint_is_not_committed_twice(tmp_path: Path) -> None:
    """The run was killed between the commit and the removal."""
    run, objects = RunFolder(root=tmp_path / "work/run"), Objects.open(store_url(tmp_path), {}, "standalone")
    assert leftover.pending_snapshot(run) is None
    run.make()
    for step, committed in ((3, 1), (5, 2), (5, 2)):
        snapshot = waiting(run, step)
        assert leftover.pending_snapshot(run) == snapshot
        await leftover.commit_pending(objects, ORIGIN, snapshot)
        assert leftover.pending_snapshot(run) is None
        assert len(await checkpoint.own_manifests(objects, ORIGIN)) == committed
    assert leftover.clean_up(tmp_path / "work", run, tmp_path / "store") == ""
    assert not (tmp_path / "work").exists()


async def test_results_are_brought_next_to_a_checkpoint_of_their_step(tmp_path: Path) -> None:
    """The training ended early right after a save, and the store was full at the results."""
    run, objects = RunFolder(root=tmp_path / "work/run"), Objects.open(store_url(tmp_path), {}, "standalone")
    run.make()
    for complete, verified in ((False, [False]), (True, [False, True]), (True, [False, True])):
        await leftover.commit_pending(objects, ORIGIN, waiting(run, 5, complete=complete))
        found = [await checkpoint.verified(objects, key) for key in await checkpoint.own_manifests(objects, ORIGIN)]
        assert sorted(found) == verified
        assert leftover.pending_snapshot(run) is None
