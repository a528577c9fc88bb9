"""Worker output: status, log lines and messages for the user."""

import contextlib
import resource
from typing import Any

import torch
from accelerate import Accelerator

from trainer.core.ipc import MessageWriter, RunFolder, Status, replace


class Reporter:
    """Reporter of one process; the first of a machine writes the status, the first of all writes messages."""

    def __init__(self, run: RunFolder, accelerator: Accelerator) -> None:
        self._run, self._accelerator = run, accelerator
        self._people = MessageWriter(run)
        self.status = Status()

    def set(self, step: int, **changes: Any) -> None:
        """Change the status."""
        changes |= {"step": step, "peak_memory_bytes": self.peak()}
        self.status = self.status.model_copy(update=changes)
        if self._accelerator.is_local_main_process:
            with contextlib.suppress(OSError):  # disk full; later changes may be written again
                replace(self._run.status, self.status.model_dump_json())

    def peak(self) -> int:
        """Return the peak bytes of this process on the GPU, or on the machine without a GPU."""
        if self._accelerator.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def event(self, kind: str, message: str) -> None:
        """Report an event to the user; `kind` as in `AgentMessage`."""
        if self._accelerator.is_main_process:
            self._people(kind, message)

    def flush(self) -> None:
        """Write events that a full disk delayed."""
        self._people.flush()

    def say(self, line: str) -> None:
        if self._accelerator.is_main_process:
            print(line, flush=True)
