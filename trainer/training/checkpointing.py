"""Saves and restores the training state of a worker."""

import contextlib
import shutil
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from trainer.checkpoint import snapshot
from trainer.checkpoint.snapshot import Local, LocalSnapshot, StoredSnapshot
from trainer.contract.checkpoint_format import METRICS, BadFormat, Progress
from trainer.core import disk_space
from trainer.core.errors import Fault, UserFault
from trainer.core.ipc import RunFolder, WorkerJob
from trainer.models import identity
from trainer.models.base_identity import BaseIdentity
from trainer.optim import optimizers
from trainer.parallel import barrier, ddp
from trainer.training.metrics_log import Journal
from trainer.training.model_selection import Selection
from trainer.training.reporter import Reporter
from trainer.training.setup import TrainedModel

RETRY_S = 30.0
"""Seconds until a failed save is tried again."""


class Unsaved(Enum):
    """Reason why no snapshot holds the training state without results."""

    NEVER = "no snapshot has begun"
    FAILED = "the newest snapshot could not be written"
    REPLACED = "the snapshot with the results replaces the newest one"


@dataclass(frozen=True)
class SavedAt:
    """Position in the training at which this process's newest snapshot without results was taken."""

    step: int
    micro_batch_index: int

    @classmethod
    def of(cls, progress: Progress) -> "SavedAt":
        return cls(progress.step, progress.micro_batch_index)


SaveState = SavedAt | Unsaved


@dataclass(frozen=True, kw_only=True)
class CheckpointSources:
    """Parts of a training that its checkpoints hold or describe."""

    job: WorkerJob
    run: RunFolder
    trained: TrainedModel
    tokenizer: Any
    selection: Selection
    report: Reporter


class CheckpointManager:
    """Checkpoint manager of one process. Where a docstring says "all processes enter", the method is collective."""

    def __init__(self, sources: CheckpointSources) -> None:
        self._sources, self._trained, self._report = sources, sources.trained, sources.report
        self._accelerator, self._arrangement = self._trained.accelerator, self._trained.arrangement
        job = sources.job
        self.snapshots = snapshot.Snapshots(sources.run, self._arrangement.writer())
        self._base = BaseIdentity(job.train)
        self._fingerprint = identity.fingerprint(job.train, sources.tokenizer, job.job)
        self._metrics = sources.run.root / METRICS
        self.journal = Journal(self._metrics)
        self._began = time.monotonic()
        self._save_state: SaveState = Unsaved.NEVER

    def start(self) -> None:
        """Start the time until the first save."""
        self._began = time.monotonic()

    def is_due(self) -> bool:
        """Return True if the next snapshot is due. After a failed one it is due within RETRY_S."""
        interval = self._interval()
        if self.report_save_failure():
            self._began = time.monotonic() - interval + min(RETRY_S, interval)
        return time.monotonic() - self._began >= interval and not self.snapshots.busy

    def _interval(self) -> float:
        """Return the seconds between saves: those of the job, unless the agent set fewer."""
        longest_s = self._sources.job.save_every_s
        with contextlib.suppress(OSError, ValueError):
            return min(longest_s, float(self._sources.run.interval.read_text()))
        return longest_s

    def report_save_failure(self) -> bool:
        """Return True if the last snapshot could not be written, and report it to the user."""
        reason = self.snapshots.failure()
        if reason:
            self._save_state = Unsaved.FAILED
            message = f"a checkpoint could not be written, and the one before it counts: {reason}"
            self._report.event("save_failed", message)
        return bool(reason)

    def save(self, progress: Progress, artifacts: Path | None = None, *, last: bool = False) -> None:
        """Begin a snapshot; all processes enter after the same micro-batch.

        `last`: True if no tensor changes until the snapshot is written.
        """
        self._began = time.monotonic()
        progress = self._described(progress)
        local_state, writer = self._local_parts(with_gradients=progress.micro_batch_index > 0), self.snapshots.writer
        plan = self._arrangement.plan(local_state, writer)
        if artifacts is None:
            self._save_state = SavedAt.of(progress)
        if writer is None:
            return
        self.snapshots.begin(
            LocalSnapshot(
                progress=progress,
                held=writer.owned(local_state),
                plan=plan,
                metrics=self._metrics,
                journalled=self.journal.flush(),
                artifacts=artifacts if self._accelerator.is_main_process else None,
                complete=artifacts is not None,
                tensors_frozen=last,
            )
        )

    def _described(self, progress: Progress) -> Progress:
        """Return the progress with the environment, scaler and fingerprints that a later start compares or restores."""
        scaler = self._accelerator.scaler
        return progress.model_copy(
            update={
                "environment": self._arrangement.describe(),
                "scaler": scaler.state_dict() if scaler is not None else None,
                "base": self._base.name(),
                "fingerprint": self._fingerprint,
            }
        )

    def _local_parts(self, *, with_gradients: bool) -> dict[str, dict[str, Local]]:
        """Return this process's parts of the training state, by the groups of a checkpoint."""
        parameters, hold = self._trained.parameters, self._arrangement.held
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None} if with_gradients else {}
        model = hold(parameters)
        return {
            "model": model,
            "optimizer": hold(self._moments()),
            "gradients": hold(gradients),
            "best": self._sources.selection.held(model),
        }

    def _moments(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's tensors by name."""
        return optimizers.tensors(self._trained.optimizer.optimizer, self._trained.parameters)

    def settle(self) -> None:
        """Wait for the snapshot under way; all processes enter, as one may take longer."""
        with barrier.long_barrier("checkpoint"):
            self.snapshots.join()
        self.report_save_failure()

    def has(self, progress: Progress) -> bool:
        """Return True if the newest snapshot is of this progress and all processes wrote it; all enter."""
        self.settle()
        (missing,) = self._arrangement.any_rank(self._save_state != SavedAt.of(progress))
        return not missing

    def finish(self, progress: Progress, artifacts: Path) -> str:
        """Write the checkpoint with the results; return why it failed, or an empty text.

        All processes enter, with no snapshot under way.
        """
        self.save(progress, artifacts, last=True)
        self.snapshots.join()
        reason = self.snapshots.failure()
        writer = self.snapshots.writer
        if not reason and writer is not None and writer.part is not None:
            self._save_state = Unsaved.REPLACED  # even if another machine could not write its part
        return reason

    def checkpoint_bytes(self, artifacts: Path) -> int:
        """Return this process's bytes of a checkpoint with the results."""
        tensors = (*self._trained.parameters.values(), *self._moments().values())
        state: int = sum(t.numel() * t.element_size() for t in tensors)
        return disk_space.tree_bytes(artifacts) + state

    def restore(self, *, micro_rows: int) -> Progress:
        """Restore everything that the next step depends on, and return the progress; all processes enter.

        `micro_rows`: rows of a micro-batch in this run.

        Raises: Fault.
        """
        if self._sources.job.restore is None:
            self._begin_journal(None)
            self._arrangement.agree(Progress())
            return Progress()
        folder = Path(self._sources.job.restore)
        try:
            progress = self._load_state(StoredSnapshot(folder), micro_rows)
            self._begin_journal(folder / METRICS)
        except (BadFormat, ValidationError) as e:
            raise Fault(f"checkpoint: verified, but it cannot be read ({type(e).__name__}: {e})") from None
        except (KeyError, ValueError) as e:
            problem = f"checkpoint: verified, but it does not fit this job ({type(e).__name__}: {e})"
            raise UserFault(f"{problem}; continue with the model and method that it was made with") from None
        self._arrangement.agree(progress)
        if self._accelerator.is_local_main_process:
            shutil.rmtree(folder)
        self._report.log(f"resumed at step {progress.step}")
        self._report_move(progress)
        return progress

    def _report_move(self, progress: Progress) -> None:
        """Report a resume with other processes, devices or versions."""
        arrangement = self._arrangement.describe()
        if progress.environment != arrangement:
            self._report.event(
                "moved",
                f"the checkpoint was made on {progress.environment}, this is {arrangement}: the data "
                "continues exactly, the numbers agree within rounding",
            )

    def _begin_journal(self, source: Path | None) -> None:
        """Begin the journal on the first process of each machine; only the first process of all appends to it."""
        if self._accelerator.is_local_main_process:
            self.journal.begin(source)

    def _load_state(self, stored: StoredSnapshot, micro_rows: int) -> Progress:
        """Load the stored state. Raises: KeyError, ValueError when the tensors do not belong to this job."""
        parameters = self._trained.parameters
        self._base.check(stored.progress.base)
        identity.check(self._sources.job.train, stored.progress.fingerprint, self._fingerprint)
        self._arrangement.reshard(self._trained.bare)
        ddp.load_model(parameters, stored)
        progress = self._sources.selection.restore(stored, parameters)
        ddp.load_optimizer(self._trained.optimizer.optimizer, parameters, stored)
        if progress.micro_batch_index and self._arrangement.world == 1 and progress.micro_rows == micro_rows:
            for name in stored.names("gradients"):
                parameters[name].grad = stored.read("gradients", name).to(self._accelerator.device)
        elif progress.micro_batch_index:  # the step is now divided differently, so it starts again
            progress = progress.model_copy(update={"micro_batch_index": 0, "micro_loss": 0.0})
        if progress.scaler is not None and self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(progress.scaler)
        return progress.model_copy(update={"scaler": None})
