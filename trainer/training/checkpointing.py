"""Saves and restores the training state of a worker."""

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from pydantic import ValidationError

from trainer.checkpoint import snapshot
from trainer.checkpoint.snapshot import LocalSnapshot, StoredSnapshot
from trainer.contract.checkpoint_format import METRICS, BadFormat, Progress
from trainer.core import disk_space as room
from trainer.core.errors import Fault, UserFault
from trainer.core.ipc import RunFolder, WorkerJob
from trainer.models import identity as likeness
from trainer.models.base_identity import BaseIdentity
from trainer.optim import optimizers
from trainer.parallel import barrier as meeting
from trainer.parallel import ddp as parallel
from trainer.training.metrics_log import Journal
from trainer.training.model_selection import Selection
from trainer.training.reporter import Reporter

RETRY_S = 30.0
"""Seconds until a failed save is tried again."""


class CheckpointManager:
    """Checkpoint manager of one process; methods that all processes must enter say so."""

    def __init__(
        self,
        job: WorkerJob,
        run: RunFolder,
        *,
        accelerator: Accelerator,
        arrangement: parallel.DataParallel,
        model: Any,
        parameters: dict[str, Any],
        tokenizer: Any,
        optimizer: Any,
        selection: Selection,
        report: Reporter,
    ) -> None:
        """Create the manager; `optimizer` is the one that accelerate prepared."""
        self._job, self._run, self._accelerator, self._parallel = job, run, accelerator, arrangement
        self._model, self._parameters, self._optimizer = model, parameters, optimizer
        self._selection, self._report = selection, report
        self.snapshots = snapshot.Snapshots(run, arrangement.writer())
        self._base = BaseIdentity(job.train)
        self._likeness = likeness.of(job.train, tokenizer, job.job)
        self._metrics = run.root / METRICS
        self.journal = Journal(self._metrics)
        self._began = time.monotonic()
        self._saved: tuple[int, int] | None = None
        """Step and micro-batch of this process's newest snapshot without results; None: none, or it was replaced."""

    def start(self) -> None:
        """Start the time until the first save."""
        self._began = time.monotonic()

    def is_due(self) -> bool:
        """Return True if the next snapshot is due; earlier after a failed one."""
        interval = self._interval()
        if self.report_save_failure():
            self._began = time.monotonic() - interval + min(RETRY_S, interval)
        return time.monotonic() - self._began >= interval and not self.snapshots.busy

    def _interval(self) -> float:
        """Return the interval in seconds as set by the agent; never more than at the start."""
        most_s = self._job.save_every_s
        with contextlib.suppress(OSError, ValueError):
            return min(most_s, float(self._run.interval.read_text()))
        return most_s

    def report_save_failure(self) -> bool:
        """Return True if the last snapshot could not be written, and report it to the user."""
        why = self.snapshots.failure()
        if why:
            self._saved = None
            self._report.event("save_failed", f"a checkpoint could not be written, and the one before it counts: {why}")
        return bool(why)

    def save(self, progress: Progress, artifacts: Path | None = None, *, last: bool = False) -> None:
        """Begin a snapshot; all processes enter after the same micro-batch. `last`: nothing changes after it."""
        self._began = time.monotonic()
        scaler = self._accelerator.scaler
        progress = progress.model_copy(
            update={
                "environment": self._parallel.describe(),
                "scaler": scaler.state_dict() if scaler is not None else None,
                "base": self._base.name(),
                "fingerprint": self._likeness,
            }
        )
        grown = (
            {n: p.grad for n, p in self._parameters.items() if p.grad is not None} if progress.micro_batch_index else {}
        )
        model = self._parallel.held(self._parameters)
        held = {
            "model": model,
            "optimizer": self._parallel.held(optimizers.tensors(self._optimizer.optimizer, self._parameters)),
            "gradients": self._parallel.held(grown),
            "best": self._selection.held(model),
        }
        writer = self.snapshots.writer
        plan = self._parallel.plan(held, writer)
        if artifacts is None:
            self._saved = (progress.step, progress.micro_batch_index)
        if writer is None:
            return
        self.snapshots.begin(
            LocalSnapshot(
                progress=progress,
                held=writer.own(held),
                plan=plan,
                metrics=self._metrics,
                journalled=self.journal.flush(),
                artifacts=artifacts if self._accelerator.is_main_process else None,
                complete=artifacts is not None,
                still=last,
            )
        )

    def settle(self) -> None:
        """Wait for the snapshot under way; all processes enter, as one may take longer."""
        with meeting.long_barrier("checkpoint"):
            self.snapshots.join()
        self.report_save_failure()

    def has(self, progress: Progress) -> bool:
        """Return True if the newest snapshot is of this progress and all processes wrote it; all enter."""
        self.settle()
        (missing,) = self._parallel.any_rank(self._saved != (progress.step, progress.micro_batch_index))
        return not missing

    def finish(self, progress: Progress, artifacts: Path) -> str:
        """Write the complete checkpoint; return why it failed, or an empty text.

        All processes enter, with no snapshot under way.
        """
        self.save(progress, artifacts, last=True)
        self.snapshots.join()
        why = self.snapshots.failure()
        writer = self.snapshots.writer
        if not why and writer is not None and writer.part is not None:
            self._saved = None  # this snapshot replaces the newest one, even if another machine's part is not written
        return why

    def checkpoint_bytes(self, artifacts: Path) -> int:
        """Return this process's bytes of a complete checkpoint."""
        state = optimizers.tensors(self._optimizer.optimizer, self._parameters)
        tensors = (*self._parameters.values(), *state.values())
        held: int = sum(t.numel() * t.element_size() for t in tensors)
        return room.of_tree(artifacts) + held

    def restore(self, *, micro_rows: int) -> Progress:
        """Restore everything that the next step depends on, and return the progress; all processes enter.

        `micro_rows`: rows of a micro-batch now.

        Raises: Fault.
        """
        if self._job.restore is None:
            self._begin_journal(None)
            self._parallel.agree(Progress())
            return Progress()
        folder = Path(self._job.restore)
        try:
            progress = self._load_state(StoredSnapshot(folder), micro_rows)
            self._begin_journal(folder / METRICS)
        except (BadFormat, ValidationError) as e:
            raise Fault(f"checkpoint: verified, but it cannot be read ({type(e).__name__}: {e})") from None
        except (KeyError, ValueError) as e:
            told = f"checkpoint: verified, but it does not fit this job ({type(e).__name__}: {e})"
            raise UserFault(f"{told}; go on with the model and method that it was made with") from None
        self._parallel.agree(progress)
        if self._accelerator.is_local_main_process:
            shutil.rmtree(folder)
        self._report.say(f"resumed at step {progress.step}")
        here = self._parallel.describe()
        if progress.environment != here:
            self._report.event(
                "moved",
                f"the checkpoint was made on {progress.environment}, this is {here}: the data goes "
                "on exactly, the numbers within rounding",
            )
        return progress

    def _begin_journal(self, source: Path | None) -> None:
        """Begin the journal; only the first process of each machine does, and the first of all appends to it."""
        if self._accelerator.is_local_main_process:
            self.journal.begin(source)

    def _load_state(self, stored: StoredSnapshot, micro_rows: int) -> Progress:
        """Load the stored state. Raises: KeyError, ValueError when the tensors do not belong to this job."""
        self._base.check(stored.progress.base)
        likeness.check(self._job.train, stored.progress.fingerprint, self._likeness)
        self._parallel.settle(self._model)
        parallel.load_model(self._parameters, stored)
        progress = self._selection.restore(stored, self._parameters)
        parallel.load_optimizer(self._optimizer.optimizer, self._parameters, stored)
        if progress.micro_batch_index and self._parallel.world == 1 and progress.micro_rows == micro_rows:
            for name in stored.names("gradients"):
                gradient = stored.read("gradients", name)
                self._parameters[name].grad = gradient.to(self._accelerator.device)
        elif progress.micro_batch_index:  # the step is now divided differently, so it starts again
            progress = progress.model_copy(update={"micro_batch_index": 0, "micro_loss": 0.0})
        if progress.scaler is not None and self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(progress.scaler)
        return progress.model_copy(update={"scaler": None})
