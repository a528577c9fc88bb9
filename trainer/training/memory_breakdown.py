"""Use of memory when it ran out, compared with the estimate, in one line."""

from collections.abc import Iterable
from typing import Any

import torch

from trainer.contract.documents import MemoryUse

GIB = 1 << 30


def told(model: torch.nn.Module, optimizer: Any, *, peak: int, expected: MemoryUse | None) -> str:
    """Return the line; `peak` bytes minus the known states give the rest."""
    parameters = list(model.parameters())
    held = {
        "weights": _bytes([*parameters, *model.buffers()]),
        "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer": _bytes(v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)),
    }
    held["activations and all else"] = max(0, peak - sum(held.values()))
    guesses = expected and (expected.weights, expected.gradients, expected.optimizer, expected.activations)
    parts = [f"{name} {count / GIB:.2f}" for name, count in held.items()]
    if guesses:
        parts = [f"{part} (estimated {guess / GIB:.2f})" for part, guess in zip(parts, guesses, strict=True)]
    return f"GiB held: {', '.join(parts)}"


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this process's shards."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)
