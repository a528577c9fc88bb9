"""Agent of one machine: runs one attempt from the first heartbeat to `final.json`."""

import asyncio
import contextlib
import os
import secrets
import signal
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from trainer.agent import deliver_results as deliver
from trainer.agent import preemption_notice as notices
from trainer.agent.base import prepare
from trainer.agent.base.background import background
from trainer.agent.base.environment import Environment
from trainer.agent.base.prepare import UnusableInput
from trainer.agent.base.state import AgentState
from trainer.agent.desired_state import DesiredStateWatcher
from trainer.agent.final_report import FinalReport
from trainer.agent.process import host_check as host
from trainer.agent.process.child import Child, child_environment, kill_descendants, worker_argv, worker_defaults
from trainer.agent.process.tracker_launcher import Trackers
from trainer.agent.upload import token_cache as rows
from trainer.agent.upload.checkpoint_uploader import Saver
from trainer.agent.upload.heartbeat import Beater
from trainer.agent.upload.log_buffer import LogBuffer, Redactor
from trainer.agent.upload.log_shipper import Shipper
from trainer.agent.upload.save_interval import SaveInterval
from trainer.agent.upload.script_snapshots import ScriptTree
from trainer.checkpoint import protocol as checkpoint
from trainer.checkpoint.protocol import Origin
from trainer.contract import object_keys as keys
from trainer.contract.checkpoint_format import RowSkip
from trainer.contract.documents import AttemptSpec, ExitCode, Outcome, Sealed
from trainer.core.errors import EXIT
from trainer.core.ipc import Ended, RunFolder, WorkerJob, replace
from trainer.core.parent_death import adopt_orphans, make_undumpable
from trainer.objectstore.objects import Objects, ObjectStoreError

ACTIVITY_S = 0.25
T = TypeVar("T")


class Agent:
    """Agent of one attempt; `echo` receives every redacted log line."""

    def __init__(
        self,
        env: Environment,
        echo: Callable[[str], None] | None = None,
        *,
        folder: Path | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """Create an agent.

        `folder` outlives the attempt and holds files of trackers. `secrets` are used when no grant delivers
        them.
        """
        self._env = env
        self._objects = Objects.open(env.blobs, env.store_options, env.installation)
        self._state = AgentState(env=env, run=RunFolder(root=env.workdir / "run"))
        self._sealed = Sealed(secrets=dict(secrets or {}))
        self._log = LogBuffer(Redactor(self._sealed.secrets), echo=echo)
        self._beater = Beater(self._objects, self._state)
        self._shipper = Shipper(self._objects, self._log, env, self._state)
        self._last_word = FinalReport(self._objects, env, self._state, beater=self._beater, shipper=self._shipper)
        self._trackers = Trackers(self._state.run, folder or env.workdir, tell=self._tell)
        self._beater.redact = self._log.redact
        self._grant_seq = -1
        self._pulled = False
        """True if this machine failed only because a process of another machine ended."""

    async def run(self) -> Outcome:
        """Run the attempt to its end, write `final.json`, and return the outcome."""
        asked_by = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            asked_by.append(signal.SIGHUP)
        for number in asked_by:
            asyncio.get_running_loop().add_signal_handler(number, self._state.end, Outcome.DRAINED, "asked by a signal")
        adopt_orphans()
        self._state.run.make()
        code: int | None = None
        async with background(self._beater.run(), self._shipper.run()):
            try:
                outcome, message, code = await self._attempt()
            except UnusableInput as e:
                outcome, message = e.outcome, str(e)
                self._state.bad_host = isinstance(e, host.HostNotUsable)
            except ObjectStoreError as e:
                outcome, message = Outcome.INFRASTRUCTURE, str(e)
            except Exception as e:  # the broker must not wait for a machine on which nothing runs
                self._log.feed(traceback.format_exc().encode())
                outcome, message = Outcome.INFRASTRUCTURE, f"the agent failed: {type(e).__name__}: {e}"
            finally:
                kill_descendants(self._trackers.pids)
            return await self._finish(outcome, self._log.redact(message), code)

    async def _attempt(self) -> tuple[Outcome, str, int | None]:
        await prepare.insist(self._renew, prepare.PATIENCE_S)
        spec = await prepare.read_spec(self._objects, self._env.attempt)
        self._state.spec, self._state.limits = spec, spec.limits
        if await self._objects.read(keys.final(self._env.attempt)) is not None:
            raise UnusableInput(Outcome.INFRASTRUCTURE, "this attempt has ended already; a new one needs a new id")
        if missing := [name for name in spec.secrets if name not in self._sealed.secrets]:
            raise UnusableInput(Outcome.USER_ERROR, f"secret {missing[0]!r} has no value; set it and submit again")
        orders = DesiredStateWatcher(self._objects, self._state, self._renew, self._say)
        watching = [orders.run()]
        if asked := notices.endpoint():
            watching.append(notices.watching(asked, self._state, say=self._say, hurry=self._beater.now))
        async with background(*watching):
            outcome, message, code = await (self._train(spec) if spec.train else self._script(spec))
            await self._last_word.hear(outcome, message, self._say)  # the watcher still follows desired.json
            return outcome, message, code

    async def _fetched(self, fetch: Awaitable[T]) -> T:
        """Await `fetch` within the time that the attempt has left: none after a stop, the drain budget after a drain.

        Raises: UnusableInput when that time is over.
        """
        try:
            async with self._state.in_time():
                return await fetch
        except TimeoutError:
            if (ending := self._state.ending) is None:
                raise
            raise UnusableInput(ending.outcome, f"{ending.reason}; it was still being prepared") from None

    async def _renew(self) -> None:
        """Apply a newer grant: credentials of the store, and values of the secrets."""
        got = await prepare.read_grant(self._objects, self._env, self._sealed.grant_url or self._env.grant_url)
        if got is None or got[0].seq <= self._grant_seq:
            return
        self._grant_seq, self._sealed = got[0].seq, got[1]
        self._log.redact = self._beater.redact = Redactor(self._sealed.secrets)
        if self._sealed.store_options:
            self._objects.renew(self._env.blobs, {**self._env.store_options, **self._sealed.store_options})

    async def _train(self, spec: AttemptSpec) -> tuple[Outcome, str, int]:
        assert spec.train is not None
        if spec.data is None:
            raise UnusableInput(Outcome.DATA, "spec.json: a train job needs data")
        self._state.phase = "loading"
        self._say(await host.check(self._state.run.root, gpus=spec.world.gpus_per_node))
        data = await self._fetched(prepare.fetch(self._objects, spec.data, self._env.workdir / "data"))
        if self._env.node == 0:
            await self._trackers.start(spec, self._sealed.secrets)
        known = await self._fetched(rows.fetch(self._objects, spec, self._state.run.root, self._say))
        sender = rows.Sender(self._objects, self._state, spec, known=known, say=self._say)
        origin = Origin(job=spec.job, attempt=spec.attempt, kind="train")
        jumps: tuple[RowSkip, ...] = ()
        while True:
            child = await self._start_worker(spec, origin, data, jumps)
            async with self._saving(spec, origin) as saver, background(sender.run()):
                code = await self._supervise(child, saver, ask=self._state.run.drain.touch)
                self._state.phase = "saving"
                self._beater.now()
                # A restarted agent would send a partial upload again. For a script, the last snapshot is still to come.
                await saver.settle()
            ended = self._ended()
            if ended is None or ended.code != ExitCode.BACK or self._state.ending is not None:
                return await self._conclude(child, code, saver, script=False)
            jumps = ended.jumps
            await self._go_back(saver, origin, jumps[-1].step)

    async def _start_worker(self, spec: AttemptSpec, origin: Origin, data: Path, jumps: tuple[RowSkip, ...]) -> Child:
        """Start the worker from the newest checkpoint that has applied the row skips."""
        assert spec.train is not None
        assert spec.data is not None
        self._state.phase = "loading"
        restored = await self._restore(spec, origin, self._env.workdir / "restore", jumps)
        job = WorkerJob(
            train=spec.train,
            data=str(data),
            data_format=spec.data.format,
            data_sha256=spec.data.sha256,
            job=spec.job,
            number=spec.number,
            cost=spec.cost,
            memory=spec.memory,
            began=self._state.began,
            probe=spec.probe,
            save_every_s=spec.checkpoint.max_loss_s,
            jumps=jumps,
            gpus=spec.world.gpus_per_node,
            parallelism=spec.world.parallelism,
            restore=str(self._env.workdir / "restore") if restored else None,
        )
        replace(self._state.run.job, job.model_dump_json())
        env = worker_defaults(child_environment(os.environ, spec.env, self._sealed.secrets))
        if spec.world.gpus_per_node == 0:
            env["CUDA_VISIBLE_DEVICES"] = ""
        child = await Child.start(worker_argv(spec.world, self._env, self._state.run), env, Path.cwd())
        self._state.phase = None
        return child

    async def _go_back(self, saver: Saver, origin: Origin, step: int) -> None:
        """Roll back to `step`: remove later checkpoints, so that no start resumes from them."""
        with contextlib.suppress(ObjectStoreError, OSError):
            await saver.once()
        await prepare.insist(lambda: checkpoint.remove_after(self._objects, origin, step), prepare.PATIENCE_S)
        self._state.run.renew()

    async def _script(self, spec: AttemptSpec) -> tuple[Outcome, str, int]:
        assert spec.script is not None
        self._state.phase = "loading"
        code_folder, tree = self._env.workdir / f"code-{secrets.token_hex(4)}", self._env.workdir / "checkpoint"
        if spec.code is not None:
            archive = await self._fetched(prepare.fetch(self._objects, spec.code, self._env.workdir / "code.tar"))
            await asyncio.to_thread(prepare.unpack, archive, code_folder)
        code_folder.mkdir(exist_ok=True)
        extra = {**spec.env, "GPUBROKER_CHECKPOINT_DIR": str(tree)}
        if spec.data is not None:
            data = prepare.fetch(self._objects, spec.data, self._env.workdir / "data")
            extra["GPUBROKER_DATA"] = str(await self._fetched(data))
        origin = Origin(job=spec.job, attempt=spec.attempt, kind="script")
        await self._restore(spec, origin, tree)
        tree.mkdir(exist_ok=True)
        step, pace = self._state.resumed_from or 0, self._paced(spec)
        snapshots = ScriptTree(tree, self._state.run, every_s=lambda: pace.every_s, step=step, tell=self._tell)
        saves = self._env.node == 0  # checkpoints of several machines would replace each other
        if not saves:
            self._say("what lies in this machine's checkpoint folder is not saved: the first machine's alone is")
        env = child_environment(os.environ, extra, self._sealed.secrets)
        child = await Child.start(spec.script.command, env, code_folder)
        self._state.phase = "training"
        async with self._saving(spec, origin, pace) as saver, background(*([snapshots.run()] if saves else [])):
            code = await self._supervise(child, saver, ask=child.terminate)
        whole = True
        if saves and not (child.stopped and self._state.ending and not self._state.ending.save):
            whole = await snapshots.last(complete=code == 0 and not child.asked)
        return await self._conclude(child, code, saver, script=True, whole=whole)

    async def _restore(self, spec: AttemptSpec, origin: Origin, folder: Path, jumps: tuple[RowSkip, ...] = ()) -> bool:
        found = await self._fetched(prepare.restore(self._objects, spec, origin, folder, self._say, jumps))
        if found is not None:
            self._state.resumed_from = found[1].step
            self._say(f"resuming from step {found[1].step}: {found[0]}")
        elif spec.resume_from:
            said = f"no checkpoint of the {len(spec.resume_from)} named could be used; starting from the beginning"
            if jumps or self._env.node:
                self._say(said)
            else:
                self._tell("started_over", said)
        self._beater.now()
        return found is not None

    @contextlib.asynccontextmanager
    async def _saving(
        self, spec: AttemptSpec, origin: Origin, pace: SaveInterval | None = None
    ) -> AsyncIterator[Saver]:
        """Upload snapshots on this machine while the caller's block runs."""
        pacing = pace or self._paced(spec)

        def committed(cost_s: float) -> None:
            pacing.saved(cost_s)
            self._beater.now()

        config, guard = spec.checkpoint, spec.train.guard if spec.train else None
        saver = Saver(
            self._objects, self._state, origin, config=config, guard=guard, say=self._say, committed=committed
        )
        async with background(saver.run()):
            yield saver

    def _paced(self, spec: AttemptSpec) -> SaveInterval:
        config, losses = spec.checkpoint, spec.losses_per_hour
        return SaveInterval(self._state.run, config=config, losses_per_hour=losses, tell=self._tell)

    def _tell(self, kind: str, message: str) -> None:
        """Report a message in the events and in the log."""
        self._say(message)
        self._state.tell(kind, message)

    async def _supervise(self, child: Child, saver: Saver, ask: Callable[[], None]) -> int:
        """Wait for the child's end.

        If the attempt must end first, ask the child to end, and kill it after `drain_s`.
        """
        output = asyncio.ensure_future(child.pump(self._log.feed))
        exited = asyncio.ensure_future(child.wait())
        asked = asyncio.ensure_future(self._state.ending_asked.wait())
        await asyncio.wait({exited, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not exited.done() and (ending := self._state.ending):
            self._state.choose_final_save(saver.save_s, saver.finish_s)
            self._say(f"ending: {ending.reason}")
            child.asked = True
            self._state.phase = "draining"
            self._beater.now()
            if ending.save:
                ask()
            while not exited.done() and ending.save and self._state.drain_left_s > 0:
                await asyncio.wait({exited}, timeout=min(ACTIVITY_S, self._state.drain_left_s))
            if not exited.done():
                self._say(f"the program {'did not end in time; it ' if ending.save else ''}is killed")
                child.kill(self._trackers.pids)
        asked.cancel()
        code = await exited
        kill_descendants(self._trackers.pids)
        await output
        self._log.end()
        if self._state.ending is not None:
            await saver.settle()
        return code

    async def _conclude(
        self, child: Child, code: int, saver: Saver, *, script: bool, whole: bool = True
    ) -> tuple[Outcome, str, int]:
        """Map the child's end to an outcome. `whole`: a snapshot holds everything that the program left."""
        ended = self._ended()
        if ended is not None and ended.pulled and code == 128 + signal.SIGKILL:
            ended = None  # one of this machine's own processes was killed, and that is the reason
        if ended is not None and not child.stopped:
            back = ended.code == ExitCode.BACK  # the worker was asked to end meanwhile
            self._state.bad_host = ended.bad_host
            code, self._pulled = (ExitCode.DRAINED if back else ended.code), ended.pulled
        outcome = child.outcome(code, script=script)
        killed = outcome is Outcome.OOM and ended is None and child.killed_for_memory
        if outcome is Outcome.OOM:
            self._state.ran_out = "host" if killed else ended.ran_out if ended is not None else None
        if child.stopped:
            outcome = Outcome.DRAINED
        self._state.phase = "saving"
        self._beater.now()
        failed = outcome not in (Outcome.COMPLETED, Outcome.DRAINED)
        safe = await saver.flush(failed=failed) and whole
        ending = self._state.ending
        if outcome is Outcome.COMPLETED:
            if safe:
                return *(await self._completed(script=script)), code
            if ending is not None:
                return ending.outcome, f"{ending.reason}, before the results were in the blob store", code
            return Outcome.INFRASTRUCTURE, "the results could not be written to the blob store in time", code
        if outcome is Outcome.DRAINED and ending is not None:
            return ending.outcome, ending.reason, code
        if outcome is Outcome.DRAINED:
            return outcome, "another machine of this job is to end, so all of them do", code
        if killed:
            return outcome, "the kernel killed it for memory: the machine's own is too small", code
        return outcome, (ended.message if ended is not None else "") or self._how_it_ended(code, script=script), code

    def _how_it_ended(self, code: int, *, script: bool) -> str:
        """Return a message for a child that reported no reason."""
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = f"; its last line: {self._log.last}" if self._log.last else ""
        return f"the {'program' if script else 'worker'} ended with {how}{last}"

    async def _completed(self, *, script: bool) -> tuple[Outcome, str]:
        """Return the outcome of a success after verifying the results, and deliver a training's results.

        A script that leaves no file has no results.
        """
        spec, key = self._state.spec, self._state.complete
        assert spec is not None
        if self._env.node > 0 or (script and key is None):
            return Outcome.COMPLETED, ""
        if key is None or not await deliver.verified(self._objects, key):
            return Outcome.INFRASTRUCTURE, "the results are not in the blob store as their manifest says"
        if spec.train is None:
            return Outcome.COMPLETED, ""
        return Outcome.COMPLETED, await deliver.deliver(
            self._objects,
            key,
            spec.train.output,
            folder=self._env.workdir / "results",
            job=spec.job,
            secrets=self._sealed.secrets,
            endpoint=spec.env.get("HF_ENDPOINT") or os.environ.get("HF_ENDPOINT"),
            tell=self._tell,
            within=self._state.in_time,
        )

    def _ended(self) -> Ended | None:
        try:
            return Ended.model_validate_json(self._state.run.ended.read_bytes())
        except (OSError, ValidationError):
            return None

    async def _finish(self, outcome: Outcome, message: str, code: int | None) -> Outcome:
        """Log the outcome, finish the trackers, and write the final report."""
        self._say(f"{outcome}: {message}" if message else str(outcome))
        await self._trackers.finish(outcome, self._state.drain_left_s)
        return await self._last_word.speak(outcome, message, code, pulled=self._pulled)

    def _say(self, line: str) -> None:
        self._log.say(f"[agent] {line}")


def main(env: Environment) -> int:
    """Run the agent and return its exit code."""
    # Only on rented machines: the broker finds the processes of a local machine by their readable environment.
    if "GPUBROKER_WAY" in os.environ:
        make_undumpable()
    return int(EXIT[asyncio.run(Agent(env).run())])
