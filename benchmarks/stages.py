"""Times at which a launch reached each of its stages: by the broker's rows and events, the cloud's log, the machine's
disk.

Nothing is watched while it happens but the file of the first step; files tell afterwards when they were made. Broker,
clouds and machines share one kernel's clock.
"""

import asyncio
import json
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from broker.api.schemas.jobs import AttemptView
from broker.domain.ids import Installation, JobId, attempt_id, instance_name
from tests.clouds.scenarios.scene import Scene
from tests.clouds.state import Rented

WORK = "var/tmp/gpubroker"
RUN = f"{WORK}/attempt/run"
METRICS = f"{RUN}/metrics.jsonl"
DISK = {
    "reach": "{home}/.gpubroker/start.sh",
    "task": WORK,
    "agent": RUN,
    "inputs": f"{RUN}/job.json",
    "model": METRICS,
}
"""Stages that end when this file of the machine is made, in order; what each of them is says `MEANING`."""
MEANING = {
    "noticed": "the cloud took it away, or said that it will → the broker has noticed",
    "ended": "… → drained if there was a notice, destroyed, and proven absent",
    "quote": "submitted, or ended → an offer is chosen and reserved for",
    "intent": "… → create_sent_at is committed",
    "request": "… → the cloud has been asked for the machine (SkyPilot's request)",
    "boot": "… → the cloud says that it runs (an emulated machine boots in a second)",
    "reach": "… → SkyPilot has seen that it runs, and it has taken our files by SSH",
    "task": "… → it is set up, and our `run` is under way",
    "agent": "… → the agent is up",
    "inputs": "… → spec, data and checkpoint are there",
    "model": "… → torch is imported and the model loaded",
    "step": "… → the first new step is done",
}
AFTER_BOOT = (*DISK, "step")
ATTEMPTS = 6
"""Maximum number of attempts of a job: some never train, because a machine is sold out or a price moved."""
POLL_S = 0.05


def seconds(at: datetime | None) -> float:
    if at is None:
        raise RuntimeError("a stage was never reached")
    return at.timestamp()


def split(begin: float, reached: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return seconds of each stage from when each of them ended, in order."""
    found = {}
    for name, at in reached:
        found[name] = at - begin
        begin = at
    return found


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each stage, so the values need not add up to the median of the sums."""
    return {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}


async def first_step(scene: Scene, job: str, *, after: int = 0, within_s: float = 400.0) -> tuple[Rented, float]:
    """Wait until an attempt later than the `after`-th has done a step; return its machine and the time."""
    installation = Installation((scene.home / "installation").read_text().strip())
    names = {n: instance_name(installation, attempt_id(JobId(job), n)) for n in range(after + 1, after + ATTEMPTS)}
    try:
        async with asyncio.timeout(within_s):
            while True:
                for number, name in names.items():
                    for rented in scene.clouds.world.named(name):
                        if _has_row(rented, number):
                            return rented, scene.clouds.world.now().timestamp()
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise RuntimeError(f"no step within {within_s:g} s\n{await scene.told(job)}") from None


def _has_row(rented: Rented, number: int) -> bool:
    """Return True if the attempt of that number has written a line of metrics; a checkpoint brings those of earlier
    ones.
    """
    root = rented.machine.root if rented.machine else None
    if root is None:
        return False
    try:
        lines = (root / METRICS).read_text().splitlines()
        return bool(lines) and json.loads(lines[-1])["attempt"] == number
    except (OSError, ValueError):  # not made yet, or written at this moment
        return False


def launched(scene: Scene, run: AttemptView, rented: Rented, step_at: float) -> list[tuple[str, float]]:
    """Return the stages that an attempt reached, from the choice of its offer to its first step."""
    root = rented.machine.root if rented.machine else None
    if root is None:
        raise RuntimeError(f"{rented.name} has no disk")
    logged = {event.kind: event.at for event in reversed(scene.clouds.world.events_of(rented.id))}
    home = "root" if rented.spec.user == "root" else f"home/{rented.spec.user}"
    return [
        ("quote", seconds(run.created_at)),
        ("intent", seconds(run.create_sent_at)),
        ("request", seconds(logged["created"])),
        ("boot", seconds(logged["running"])),
        *((stage, _born(root / file.format(home=home))) for stage, file in DISK.items()),
        ("step", step_at),
    ]


def _born(path: Path) -> float:
    """Return the birth time of a file, which Python cannot read on Linux."""
    completed = subprocess.run(["stat", "--format=%.6W", str(path)], capture_output=True, text=True)
    if completed.returncode or float(completed.stdout) <= 0:
        raise RuntimeError(
            f"when {path.name} was made is not known: {completed.stderr.strip() or 'no birth time here'}"
        )
    return float(completed.stdout)


def table(title: str, columns: Mapping[str, Mapping[str, float]]) -> str:
    """Return seconds by stage and cloud, the sum last."""
    names = [name for name in MEANING if any(name in column for column in columns.values())]
    lines = [f"\n{title}", f"{'':9}" + "".join(f"{cloud:>8}" for cloud in columns)]
    for name in names:
        lines.append(f"{name:9}" + "".join(f"{c.get(name, 0.0):8.2f}" for c in columns.values()) + f"  {MEANING[name]}")
    lines.append(f"{'sum':9}" + "".join(f"{sum(c.values()):8.2f}" for c in columns.values()))
    after = [sum(c[name] for name in AFTER_BOOT) for c in columns.values()]
    lines.append(f"{'of it':9}" + "".join(f"{one:8.2f}" for one in after) + "  after the boot")
    return "\n".join(lines)
