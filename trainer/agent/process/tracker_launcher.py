"""Starts the processes that send a run's figures to trackers; the attempt never depends on them."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.agent.process.child import child_environment, descendants, kill_descendants
from trainer.agent.process.tracker_process import TrackJob
from trainer.contract.documents import AttemptSpec
from trainer.core.ipc import RunFolder, replace

LIMIT_S = 30.0
"""Longest time in seconds in which trackers may send the last figures at the end of the attempt."""
KINDS = ("wandb", "mlflow")


class Trackers:
    """Tracker processes of one attempt, on its first machine."""

    def __init__(self, run: RunFolder, folder: Path, *, report: Callable[[str, str], None]) -> None:
        """Prepare without starting a process. `folder`: where the trackers keep their files."""
        self._run, self._folder, self._report = run, folder, report
        self._processes: list[asyncio.subprocess.Process] = []

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of all trackers and their descendants."""
        alive = [p.pid for p in self._processes if p.returncode is None]
        return frozenset(alive) | {below.pid for pid in alive for below in descendants(pid)}

    async def start(self, spec: AttemptSpec, secrets: Mapping[str, str]) -> None:
        """Start the trackers of `train.metrics`; each sees only the secrets that are assigned to it by name."""
        assert spec.train is not None
        metrics = spec.train.metrics
        kinds = [kind for kind in KINDS if getattr(metrics, kind) is not None]
        if not kinds:
            return
        settings = spec.train.model_dump(mode="json", exclude={"data": {"path"}, "output": True, "metrics": True})
        job = TrackJob(metrics=metrics, run=spec.run or spec.job, parameters=settings, folder=str(self._folder))
        replace(self._run.track, job.model_dump_json())
        own = {name: secrets[name] for name in metrics.secrets if name in secrets}
        for kind in kinds:
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "trainer.agent.process.tracker_process", str(self._run.root), kind),
                    env=child_environment(os.environ, spec.env, own),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                )
            )

    async def finish(self, outcome: str, left_s: float) -> None:
        """Wait until the trackers have sent the last figures, `left_s` seconds at most, then end the trackers."""
        if not self._processes:
            return
        with contextlib.suppress(OSError):
            replace(self._run.track_end, outcome)
        until = time.monotonic() + min(LIMIT_S, left_s)
        for process in self._processes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await process.wait()
        for process in self._processes:
            if process.returncode:
                self._report(
                    "tracker_failed", f"a tracker ended with exit code {process.returncode} before it sent all figures"
                )
            if process.returncode is None:
                self._report("tracker_failed", f"a tracker did not send the last figures within {LIMIT_S:.0f} s")
                kill_descendants()
                await process.wait()
