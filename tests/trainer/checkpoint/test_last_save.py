"""The last save of a run is written from the live tensors, and equals any other save."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from tests.trainer.support.peak_memory import needs_a_new_peak
from trainer.checkpoint import snapshot
from trainer.checkpoint.snapshot import Held, LocalSnapshot, Snapshots, SnapshotWriter, StoredSnapshot
from trainer.contract.checkpoint_format import Progress
from trainer.core.ipc import RunFolder
from trainer.parallel import ddp as parallel

GUARD_S = 300.0
SIZE = 96 << 20
PEAK = """
import sys
from pathlib import Path
import torch
from tests.trainer.checkpoint.test_last_save import SIZE, saved

def kib(name):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0])

folder, still = Path(sys.argv[1]), sys.argv[2] == "still"
saved(folder / "warm", {"w": torch.ones(1 << 20)}, still=still)
weights = {"w": torch.ones(SIZE // 4)}
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kib("VmRSS")
saved(folder / "run", weights, still=still)
print(kib("VmHWM") - before)
"""


def saved(folder: Path, weights: dict[str, torch.Tensor], *, still: bool) -> StoredSnapshot:
    run = RunFolder(root=folder)
    run.snapshots.mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    held: Held = {"model": parallel.DataParallel(Accelerator(cpu=True)).held(weights), "optimizer": {}, "gradients": {}}
    plan = snapshot.joined([snapshot.writer_plan(held, SnapshotWriter())])
    snapshots = Snapshots(run, SnapshotWriter())
    progress = Progress(step=1)
    snapshots.begin(
        LocalSnapshot(progress=progress, held=held, plan=plan, metrics=folder / "metrics.jsonl", tensors_frozen=still)
    )
    snapshots.join()
    assert not snapshots.failure()
    (made,) = run.waiting()
    return StoredSnapshot(made)


@pytest.mark.parametrize("still", [True, False])
def test_the_last_save_holds_the_tensors(still: bool, tmp_path: Path) -> None:
    """Some tensors are not contiguous, and two share their memory."""
    base = torch.arange(12.0).reshape(3, 4)
    weights = {"a": base, "b": base, "part": base[1:], "across": base.T, "none": torch.empty(0)}
    stored = saved(tmp_path / "run", weights, still=still)
    for name, tensor in weights.items():
        assert torch.equal(stored.read("model", name), tensor), name


@needs_a_new_peak
def test_the_last_save_copies_no_tensor(tmp_path: Path) -> None:
    env = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}

    def peak(how: str) -> int:
        argv = [sys.executable, "-c", PEAK, str(tmp_path / how), how]
        completed = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=GUARD_S, check=True)
        return int(completed.stdout.splitlines()[-1]) << 10

    assert peak("still") < SIZE / 3
    assert peak("moving") > SIZE * 2 / 3, "what this test measures"
