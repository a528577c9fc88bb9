"""Runner of train jobs: one worker, or several after rollbacks, with its data, checkpoints and trackers."""

import contextlib
import os
from pathlib import Path

from trainer.agent.base import prepare
from trainer.agent.base.background import background
from trainer.agent.base.prepare import UnusableInput
from trainer.agent.conclusion import AttemptEnd
from trainer.agent.lifecycle import AttemptLifecycle
from trainer.agent.process import host_check
from trainer.agent.process.child import Child, child_environment, worker_argv, worker_defaults
from trainer.agent.upload import token_cache
from trainer.agent.upload.checkpoint_uploader import Saver
from trainer.checkpoint import protocol
from trainer.checkpoint.protocol import Origin
from trainer.contract.checkpoint_format import RowSkip
from trainer.contract.documents import AttemptSpec, DataFile, ExitCode, Outcome
from trainer.contract.train import TrainConfig
from trainer.core.ipc import WorkerJob, replace
from trainer.objectstore.objects import ObjectStoreError


class TrainRunner:
    """Train job of one attempt."""

    def __init__(self, lifecycle: AttemptLifecycle, spec: AttemptSpec, train: TrainConfig) -> None:
        self._lifecycle, self._spec, self._train = lifecycle, spec, train
        self._env, self._state = lifecycle.env, lifecycle.state
        self._origin = Origin(job=spec.job, attempt=spec.attempt, kind="train")
        self._restored = lifecycle.env.workdir / "restore"

    async def run(self) -> AttemptEnd:
        """Train until the end, with a new worker after each rollback. Raises: UnusableInput, ObjectStoreError."""
        spec, lifecycle, objects = self._spec, self._lifecycle, self._lifecycle.objects
        if spec.data is None:
            raise UnusableInput(Outcome.DATA, "spec.json: a train job needs data")
        self._state.phase = "loading"
        lifecycle.log_line(await host_check.check(self._state.run.root, gpus=spec.world.gpus_per_node))
        data = await lifecycle.fetch(prepare.fetch(objects, spec.data, self._env.workdir / "data"))
        if self._env.node == 0:
            await lifecycle.trackers.start(spec, lifecycle.secrets)
        root, log = self._state.run.root, lifecycle.log_line
        known_cache = await lifecycle.fetch(token_cache.fetch(objects, spec, root, log))
        sender = token_cache.Sender(objects, self._state, spec, known_cache=known_cache, log=log)
        jumps: tuple[RowSkip, ...] = ()
        while True:
            child = await self._start_worker(spec.data, data, jumps)
            async with (
                lifecycle.uploading(spec, self._origin, lifecycle.save_interval(spec)) as saver,
                background(sender.run()),
            ):
                code = await lifecycle.supervise(child, saver, ask=self._state.run.drain.touch)
                self._state.phase = "saving"
                lifecycle.heartbeats.now()
                # The end of this block cancels an upload, and all its bytes would then be sent again. A script job does
                # not wait here, because its last snapshot is not taken yet.
                await saver.settle()
            report = lifecycle.worker_report()
            if report is None or report.code != ExitCode.BACK or self._state.ending is not None:
                return await lifecycle.conclude(child, code, saver, script=False)
            jumps = report.jumps
            await self._roll_back(saver, jumps[-1].step)

    async def _start_worker(self, file: DataFile, data: Path, jumps: tuple[RowSkip, ...]) -> Child:
        """Start the worker from the newest checkpoint that has applied the row skips."""
        spec, run = self._spec, self._state.run
        self._state.phase = "loading"
        restored = await self._lifecycle.restore(spec, self._origin, self._restored, jumps)
        job = self._worker_job(file, data, jumps, str(self._restored) if restored else None)
        replace(run.job, job.model_dump_json())
        env = worker_defaults(child_environment(os.environ, spec.env, self._lifecycle.secrets))
        if spec.world.gpus_per_node == 0:
            env["CUDA_VISIBLE_DEVICES"] = ""
        child = await Child.start(worker_argv(spec.world, self._env, run), env, Path.cwd())
        self._state.phase = None
        return child

    def _worker_job(self, file: DataFile, data: Path, jumps: tuple[RowSkip, ...], restore: str | None) -> WorkerJob:
        spec = self._spec
        return WorkerJob(
            train=self._train,
            data=str(data),
            data_format=file.format,
            data_sha256=file.sha256,
            date=spec.date,
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
            restore=restore,
        )

    async def _roll_back(self, saver: Saver, step: int) -> None:
        """Commit the newest snapshot, then remove all checkpoints after `step`, so that no start resumes from them.

        Raises: ObjectStoreError.
        """
        with contextlib.suppress(ObjectStoreError, OSError):
            await saver.once()
        objects = self._lifecycle.objects
        await prepare.retry_while_unreachable(
            lambda: protocol.remove_after(objects, self._origin, step), prepare.RETRY_FOR_S
        )
        self._state.run.renew()
