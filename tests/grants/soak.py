"""A whole broker and a real agent on a store whose credentials end all the time: what is lost?"""

import asyncio
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import pairwise
from os import urandom
from pathlib import Path

from broker.blobs import GrantSettings, ObstoreBlobs
from broker.controllers.base.context import ControllerContext, Intervals
from broker.controllers.fleet import Fleet
from broker.controllers.market.poller import MarketIntervals, MarketPoller
from broker.domain.ids import Installation, JobId, job_id
from broker.domain.job import TERMINAL_JOB_STATES, Job
from broker.domain.spec import JobSpec
from broker.domain.tenancy import DEFAULT_TEAM, Tenant
from broker.domain.workload import Workload
from broker.ports import Upload
from broker.runtime.clock import SystemClock
from broker.runtime.control_loop import run_forever
from broker.runtime.secret_box import SecretBox
from providers.local.provider import LocalConfig, LocalProvider
from tests.grants.gate import ROLE, Gate
from tests.support.memory_store.store import MemoryStore
from trainer.contract import object_keys as keys
from trainer.contract.documents import Final, Limits, Manifest

HERE = Installation("soak")
TICKS = """
import os, pathlib, sys, time
tree = pathlib.Path(os.environ["GPUBROKER_CHECKPOINT_DIR"])
count = int((tree / "count").read_text()) if (tree / "count").exists() else 0
begun, total, every = time.monotonic() - count * float(sys.argv[2]), int(sys.argv[1]), float(sys.argv[2])
(tree / "weights").write_bytes(os.urandom(6 << 20))
while count < total:
    time.sleep(max(0.0, begun + (count + 1) * every - time.monotonic()))
    print("tick", count, flush=True)
    count += 1
    (tree / ".count").write_text(str(count))
    (tree / ".count").rename(tree / "count")
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    state: str
    attempts: int
    ticks: int
    ticks_lost: int
    """Lines of the program that are not in the log, plus those that its last checkpoint lacks."""
    checkpoints: int
    grants: int
    """Credentials that were issued, and used by the agent."""
    used: int
    denied: tuple[str, ...]
    expired: int
    """Requests with credentials that had ended."""
    beat_gap_s: float
    """Longest time between two beats."""
    events: tuple[str, ...]


@dataclass(kw_only=True)
class Soak:
    """Soak by a job on this machine that writes `ticks` lines, one every `tick_s`."""

    gate: Gate
    state: Path
    ticks: int
    tick_s: float
    save_s: float

    def __post_init__(self) -> None:
        self.clock, life_s = SystemClock(), self.gate.life_s
        self.store = MemoryStore(self.clock)
        settings = GrantSettings(role_arn=ROLE, sts_endpoint=self.gate.url)
        self.blobs = ObstoreBlobs.open(self.gate.place, HERE, options=self.gate.options(), grants=settings)
        self.provider = LocalProvider(LocalConfig(), installation=HERE, state=self.state, clock=self.clock)
        self.market = MarketPoller({"local": self.provider}, self.clock, MarketIntervals())
        self.context = ControllerContext(
            installation=HERE, owner="soak", store=self.store, blobs=self.blobs, providers={"local": self.provider},
            clock=self.clock,
            intervals=Intervals(poll_s=0.2, look_s=0.5, list_s=0.5, billing_s=1, deadman_s=1, grants_s=life_s / 20),
            limits=Limits(heartbeat_s=0.5, poll_s=life_s / 10, log_s=0.5, drain_s=30),
        )  # fmt: skip

    async def run(self, meanwhile: Callable[["Soak"], Coroutine[None, None, None]] | None = None) -> Outcome:
        """Run the job from submit to its end, while `meanwhile` disturbs it."""
        await self.market.step()
        fleet = Fleet.build(self.context, SecretBox(bytes(32)), self.market.offers, ())
        work = [asyncio.create_task(fleet.run()), asyncio.create_task(run_forever(self.market, self.clock))]
        try:
            job = await self._submit()
            disturbing = asyncio.create_task(meanwhile(self)) if meanwhile else None
            async with asyncio.timeout(self.ticks * self.tick_s + 600):
                while (stored_job := await self.store.job(job)) is None or stored_job.state not in TERMINAL_JOB_STATES:
                    await self.store.wait(f"job/{job}", 0.5)
            if disturbing is not None:
                await disturbing
            return await self._outcome(stored_job)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await self.provider.close()

    async def _submit(self) -> JobId:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            member = tarfile.TarInfo("main.py")
            member.size = len(TICKS)
            tar.addfile(member, io.BytesIO(TICKS.encode()))
        code, new = buffer.getvalue(), job_id(urandom(9))
        sha256 = hashlib.sha256(code).hexdigest()
        await self.blobs.put(keys.job_data(new, sha256), code)
        mine = self.store.as_tenant(Tenant(team=DEFAULT_TEAM, owner="me"))
        await mine.put_upload("me", Upload(sha256=sha256, bytes=len(code), name="code.tar", summary=None))
        command = ["python", "main.py", str(self.ticks), str(self.tick_s)]
        spec = JobSpec.model_validate({
            "name": "soak", "cap_usd": "1", "script": {"code": f"upload:{sha256}", "command": command},
            "checkpoint": {"every_s": self.save_s},
        })  # fmt: skip
        job = Job(
            id=new, owner="me", spec=spec, workload=Workload(shape=None, method="script"), created_at=self.clock.now(),
            cap_usd=spec.cap_usd,
        )  # fmt: skip
        await self.store.submit(job, key=None, body_sha256="", events=())
        return new

    async def _outcome(self, job: Job) -> Outcome:
        attempts = await self.store.attempts(job.id)
        log, count = "", 0
        for attempt in attempts:
            for chunk in await self.blobs.list(keys.logs(attempt.id)):
                log += (await self.blobs.get(chunk.key) or b"").decode()
        data = await self.blobs.get(keys.final(attempts[-1].id))
        final = Final.model_validate_json(data) if data else None
        if final is not None and final.checkpoint is not None:
            key = final.checkpoint.manifest
            manifest = Manifest.model_validate_json(await self.blobs.get(key) or b"")
            assert {file.path for file in manifest.files} == {"count", "weights"}
            count = int(await self.blobs.get(keys.files_prefix(key) + "count") or b"0")
        seen = {int(line.split()[1]) for line in log.splitlines() if line.startswith("tick ")}
        beats = sorted(t for key, times in self.gate.writes.items() if f"/{keys.HEARTBEATS}" in key for t in times)
        return Outcome(
            state=job.state.value,
            attempts=len(attempts),
            ticks=len(seen),
            ticks_lost=len(set(range(self.ticks)) - seen) + self.ticks - count,
            checkpoints=log.count("committed:"),
            grants=len(self.gate.sessions),
            used=len(self.gate.used),
            denied=tuple(self.gate.denied),
            expired=self.gate.expired,
            beat_gap_s=round(max((b - a for a, b in pairwise(beats)), default=0.0), 2),
            events=tuple(event.kind for event in await self.store.events(job.id, after=0, limit=100)),
        )


def as_json(outcome: Outcome, **more: object) -> str:
    """Return the figures as one line of JSON."""
    return json.dumps({**more, **outcome.__dict__}, default=list)
