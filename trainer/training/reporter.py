"""Worker output: status, log lines, messages for the user, and the use of memory."""

import contextlib
import resource
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator

from trainer.contract.documents import MemoryUse
from trainer.core.ipc import MessageWriter, RunFolder, Status, replace

GIB = 1 << 30


class Reporter:
    """Reporter of one process; the first of a machine writes the status, the first of all writes messages."""

    def __init__(self, run: RunFolder, accelerator: Accelerator) -> None:
        self._run, self._accelerator = run, accelerator
        self._messages = MessageWriter(run)
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
            self._messages(kind, message)

    def flush(self) -> None:
        """Write events that a full disk delayed."""
        self._messages.flush()

    def log(self, line: str) -> None:
        if self._accelerator.is_main_process:
            print(line, flush=True)


def memory_line(model: torch.nn.Module, optimizer: Any, *, peak: int, expected: MemoryUse | None) -> str:
    """Return one line on the use of memory next to its estimate; `peak` bytes minus the model states is the rest."""
    parameters = list(model.parameters())
    states = {
        "weights": _bytes([*parameters, *model.buffers()]),
        "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer": _bytes(v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)),
    }
    states["activations and the rest"] = max(0, peak - sum(states.values()))
    estimates = expected and (expected.weights, expected.gradients, expected.optimizer, expected.activations)
    parts = [f"{name} {count / GIB:.2f}" for name, count in states.items()]
    if estimates:
        parts = [f"{part} (estimated {guess / GIB:.2f})" for part, guess in zip(parts, estimates, strict=True)]
    return f"GiB held: {', '.join(parts)}"


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this process's shards."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)
