"""Lifecycle of an attempt that train jobs and script jobs share: fetch, renew, supervise, conclude, finish."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from trainer.agent import deliver_results
from trainer.agent.base import prepare
from trainer.agent.base.background import background
from trainer.agent.base.environment import Environment
from trainer.agent.base.prepare import UnusableInput
from trainer.agent.base.state import AgentState
from trainer.agent.conclusion import AttemptEnd, ProgramEnd, attempt_end, program_result
from trainer.agent.final_report import FinalReport
from trainer.agent.process.child import Child, kill_descendants
from trainer.agent.process.tracker_launcher import Trackers
from trainer.agent.upload.checkpoint_uploader import Saver
from trainer.agent.upload.heartbeat import HeartbeatSender
from trainer.agent.upload.log_buffer import LogBuffer, Redactor
from trainer.agent.upload.log_shipper import Shipper
from trainer.agent.upload.save_interval import SaveInterval
from trainer.checkpoint.protocol import Origin
from trainer.contract.checkpoint_format import RowSkip
from trainer.contract.documents import AttemptSpec, Outcome, Sealed
from trainer.core.ipc import Ended, RunFolder
from trainer.objectstore.objects import Objects

ACTIVITY_S = 0.25
"""Seconds between checks of the drain budget."""
T = TypeVar("T")


class AttemptLifecycle:
    """Services of one attempt and the steps that both kinds of jobs use."""

    def __init__(
        self, env: Environment, echo: Callable[[str], None] | None, folder: Path | None, secrets: Mapping[str, str]
    ) -> None:
        self.env = env
        self.objects = Objects.open(env.blobs, env.store_options, env.installation)
        self.state = AgentState(env=env, run=RunFolder(root=env.workdir / "run"))
        self._sealed = Sealed(secrets=dict(secrets))
        self.log = LogBuffer(Redactor(self._sealed.secrets), echo=echo)
        self.heartbeats = HeartbeatSender(self.objects, self.state)
        self.shipper = Shipper(self.objects, self.log, env, self.state)
        self.final_report = FinalReport(self.objects, env, self.state, heartbeats=self.heartbeats, shipper=self.shipper)
        self.trackers = Trackers(self.state.run, folder or env.workdir, report=self.report)
        self.heartbeats.redact = self.log.redact
        self._grant_seq = -1
        self._failed_by_peer = False
        """True if this machine failed only because a process of another machine ended."""

    @property
    def secrets(self) -> Mapping[str, str]:
        """Values of the job's secrets, as of the newest grant."""
        return self._sealed.secrets

    def log_line(self, line: str) -> None:
        """Write a line of the agent into the log."""
        self.log.add_line(f"[agent] {line}")

    def report(self, kind: str, message: str) -> None:
        """Report a message to the user and in the log; `kind` as in `AgentMessage`."""
        self.log_line(message)
        self.state.add_message(kind, message)

    async def renew(self) -> None:
        """Apply a newer grant: credentials of the store, and values of the secrets."""
        read = await prepare.read_grant(self.objects, self.env, self._sealed.grant_url or self.env.grant_url)
        if read is None or read[0].seq <= self._grant_seq:
            return
        self._grant_seq, self._sealed = read[0].seq, read[1]
        self.log.redact = self.heartbeats.redact = Redactor(self._sealed.secrets)
        if self._sealed.store_options:
            self.objects.renew(self.env.blobs, {**self.env.store_options, **self._sealed.store_options})

    async def fetch(self, action: Awaitable[T]) -> T:
        """Await `action`, without a time limit until the attempt must end.

        After a drain request the limit is the drain budget; after a stop request it is zero.

        Raises: UnusableInput when the time is over.
        """
        try:
            async with self.state.in_time():
                return await action
        except TimeoutError:
            if (ending := self.state.ending) is None:
                raise
            raise UnusableInput(ending.outcome, f"{ending.reason}; the attempt was still being prepared") from None

    async def restore(self, spec: AttemptSpec, origin: Origin, folder: Path, jumps: tuple[RowSkip, ...] = ()) -> bool:
        """Restore the newest usable checkpoint into `folder`; return False if there is none."""
        restored = await self.fetch(prepare.restore(self.objects, spec, origin, folder, self.log_line, jumps))
        if restored is not None:
            key, manifest = restored
            self.state.resumed_from = manifest.step
            self.log_line(f"resuming from step {manifest.step}: {key}")
        elif spec.resume_from:
            message = f"no checkpoint of the {len(spec.resume_from)} named could be used; starting from the beginning"
            if jumps or self.env.node:
                self.log_line(message)
            else:
                self.report("started_over", message)
        self.heartbeats.now()
        return restored is not None

    def save_interval(self, spec: AttemptSpec) -> SaveInterval:
        """Return the interval between saves, which adapts to the cost of a save."""
        config, losses = spec.checkpoint, spec.losses_per_hour
        return SaveInterval(self.state.run, config=config, losses_per_hour=losses, report=self.report)

    @contextlib.asynccontextmanager
    async def uploading(self, spec: AttemptSpec, origin: Origin, interval: SaveInterval) -> AsyncIterator[Saver]:
        """Upload snapshots on this machine while the caller's block runs."""

        def committed(cost_s: float) -> None:
            interval.saved(cost_s)
            self.heartbeats.now()

        config, guard = spec.checkpoint, spec.train.guard if spec.train else None
        saver = Saver(
            self.objects, self.state, origin, config=config, guard=guard, log=self.log_line, committed=committed
        )
        async with background(saver.run()):
            yield saver

    async def supervise(self, child: Child, saver: Saver, ask: Callable[[], None]) -> int:
        """Wait for the child's end and return its exit code.

        If the attempt must end first, `ask` asks the child to end, and the agent kills it after `drain_s`.
        """
        output = asyncio.ensure_future(child.pump(self.log.feed))
        exited = asyncio.ensure_future(child.wait())
        end_requested = asyncio.ensure_future(self.state.ending_asked.wait())
        await asyncio.wait({exited, end_requested}, return_when=asyncio.FIRST_COMPLETED)
        if not exited.done():
            await self._end_child(child, saver, ask, exited)
        end_requested.cancel()
        code = await exited
        kill_descendants(self.trackers.pids)
        await output
        self.log.end()
        if self.state.ending is not None:
            await saver.settle()
        return code

    async def _end_child(
        self, child: Child, saver: Saver, ask: Callable[[], None], exited: asyncio.Future[int]
    ) -> None:
        """Ask the child to end, and kill the child when the drain budget is used up."""
        if (ending := self.state.ending) is None:
            return
        self.state.choose_final_save(saver.save_s, saver.finish_s)
        self.log_line(f"ending: {ending.reason}")
        child.asked = True
        self.state.phase = "draining"
        self.heartbeats.now()
        if ending.save:
            ask()
        while not exited.done() and ending.save and self.state.drain_left_s > 0:
            await asyncio.wait({exited}, timeout=min(ACTIVITY_S, self.state.drain_left_s))
        if not exited.done():
            self.log_line(f"the program {'did not end in time; it ' if ending.save else ''}is killed")
            child.kill(self.trackers.pids)

    def worker_report(self) -> Ended | None:
        """Return the worker's report of its end; None if there is none that can be read."""
        try:
            return Ended.model_validate_json(self.state.run.ended.read_bytes())
        except (OSError, ValidationError):
            return None

    async def conclude(
        self, child: Child, code: int, saver: Saver, *, script: bool, complete: bool = True
    ) -> AttemptEnd:
        """Upload the last checkpoints and return the end of the attempt.

        `complete`: True if a snapshot holds everything that the program left.
        """
        result = program_result(self._program_end(child, code, script=script))
        self.state.ran_out, self.state.bad_host = result.ran_out, result.bad_host
        self._failed_by_peer = result.failed_by_peer
        self.state.phase = "saving"
        self.heartbeats.now()
        failed = result.outcome not in (Outcome.COMPLETED, Outcome.DRAINED)
        uploaded = await saver.flush(failed=failed) and complete
        end = attempt_end(result, uploaded=uploaded, ending=self.state.ending)
        if end.outcome is not Outcome.COMPLETED:
            return end
        outcome, message = await self._completed(script=script)
        return AttemptEnd(outcome, message, end.code)

    def _program_end(self, child: Child, code: int, *, script: bool) -> ProgramEnd:
        return ProgramEnd(
            code=code,
            script=script,
            asked=child.asked,
            stopped=child.stopped,
            killed_for_memory=child.killed_for_memory,
            report=self.worker_report(),
            last_line=self.log.last,
        )

    async def _completed(self, *, script: bool) -> tuple[Outcome, str]:
        """Return the outcome of a success after verifying the results, and deliver a training's results.

        A script that leaves no file has no results.
        """
        spec, key = self.state.spec, self.state.complete
        assert spec is not None
        if self.env.node > 0 or (script and key is None):
            return Outcome.COMPLETED, ""
        if key is None or not await deliver_results.verified(self.objects, key):
            return Outcome.INFRASTRUCTURE, "the results are not in the blob store as their manifest says"
        if spec.train is None:
            return Outcome.COMPLETED, ""
        return Outcome.COMPLETED, await deliver_results.deliver(
            self.objects,
            key,
            spec.train.output,
            folder=self.env.workdir / "results",
            job=spec.job,
            secrets=self.secrets,
            endpoint=spec.env.get("HF_ENDPOINT") or os.environ.get("HF_ENDPOINT"),
            report=self.report,
            within=self.state.in_time,
        )

    async def finish(self, outcome: Outcome, message: str, code: int | None) -> Outcome:
        """Log the outcome, finish the trackers, and write the final report."""
        self.log_line(f"{outcome}: {message}" if message else str(outcome))
        await self.trackers.finish(outcome, self.state.drain_left_s)
        return await self.final_report.write(outcome, message, code, failed_by_peer=self._failed_by_peer)
