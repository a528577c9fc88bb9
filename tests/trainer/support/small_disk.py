"""`python -m tests.trainer.support.small_disk FOLDER`.

In a mount namespace of its own, trains on a disk that holds its state or its results, but not both. Prints what came
of it as JSON.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.trainer.support import tiny_jobs, workers
from tests.trainer.support.tiny_jobs import KINDS
from tests.trainer.support.workers import Worker
from trainer.contract.train import TrainConfig
from trainer.core.ipc import WorkerJob, info_of
from trainer.standalone import run as standalone

PAGE = 4096


def taken(*places: Path) -> int:
    """Return the bytes that files occupy on a disk, in whole pages."""
    files = [p for place in places for p in (place, *place.rglob("*")) if p.is_file()]
    return sum(-(-p.stat().st_size // PAGE) * PAGE for p in files)


def begun(folder: Path, train: TrainConfig, data: Path, **more: Any) -> Worker:
    worker = Worker(folder, train, data, **more)
    job = WorkerJob.model_validate_json(worker.run.job.read_bytes())
    worker.run.job.write_text(job.model_copy(update={"save_every_s": 3600}).model_dump_json())
    return worker.start()


def mount(folder: Path, size: int, *, again: bool = False) -> None:
    option = f"{'remount,' * again}size={size}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", option, "none", str(folder)], check=True)


def main(folder: Path) -> dict[str, Any]:
    kind, data, disk = KINDS["causal_lm full"], folder / "rows.csv", folder / "disk"
    data.write_bytes(tiny_jobs.data(kind))
    disk.mkdir()
    train = TrainConfig.model_validate({**tiny_jobs.train(kind, folder / "model").model_dump(), "samples": {}})
    calm = begun(folder / "calm", train, data)
    calm.end()
    results = taken(*(calm.last / name for name in standalone.RESULTS if (calm.last / name).exists()))
    mount(disk, taken(calm.run.root) + results // 2)  # its results lie there twice for a moment
    full = begun(disk / "run", train, data)
    ended = full.end()
    left = [json.loads(info_of(p).read_text()) for p in full.run.waiting()]
    mount(disk, 1 << 30, again=True)
    again = begun(disk / "again", train, data, restore=full.last) if left else None
    return {
        "code": ended.code,
        "message": ended.message,
        "left": [(info["step"], info["complete"]) for info in left],
        "again": again and again.end().code,
        "same": again and workers.story(again.last) == workers.story(calm.last),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
