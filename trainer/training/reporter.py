"""What the worker says: its status, lines of the log, and what people should hear of."""

import contextlib
import resource
from typing import Any

import torch
from accelerate import Accelerator

from trainer.core.ipc import MessageWriter, RunFolder, Status, replace


class Reporter:
    """One process's; the first of a machine has its status, the first of all speaks."""

    def __init__(self, run: RunFolder, accelerator: Accelerator) -> None:
        self._run, self._accelerator = run, accelerator
        self._people = MessageWriter(run)
        self.status = Status()

    def set(self, step: int, **changes: Any) -> None:
        """Changes the status."""
        changes |= {"step": step, "peak_memory_bytes": self.peak()}
        self.status = self.status.model_copy(update=changes)
        if self._accelerator.is_local_main_process:
            with contextlib.suppress(OSError):  # the disk is full; later ones may be told again
                replace(self._run.status, self.status.model_dump_json())

    def peak(self) -> int:
        """Bytes of the GPU, or of the machine where there is none, that this process has taken at the most."""
        if self._accelerator.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def event(self, kind: str, message: str) -> None:
        """What people should hear of; `kind` as in `Told`."""
        if self._accelerator.is_main_process:
            self._people(kind, message)

    def flush(self) -> None:
        """Events that a full disk held up."""
        self._people.flush()

    def say(self, line: str) -> None:
        if self._accelerator.is_main_process:
            print(line, flush=True)
