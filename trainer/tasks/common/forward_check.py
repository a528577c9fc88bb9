"""Forward passes on the meta device, which show without weights whether a model takes the inputs of a row.

`trainer.preflight` checks rows by them before a purchase. The meta device computes shapes and no numbers.
"""

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
META = torch.device("meta")
MAX_OPERATIONS = 30_000
"""Largest number of operations of a forward pass; a layer that loops over the tokens would need minutes."""
UNFIT = re.compile(r"\bsizes?\b|shape|channel|dimension|must match|out of (range|bounds)|unexpected keyword", re.I)
"""Words in errors about inputs that do not fit; other errors may be limits of the meta device."""


class ForwardUnknown(Exception):
    """Forward pass that the meta device cannot compute, e.g. because a layer reads numbers. Says nothing of the row."""


class ForwardRefused(Exception):
    """Forward pass that fails on every device; the message is the model's first line."""


class _Stopped(Exception):
    """End of `TaskModel.loss_sum` after its first forward pass."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs


class _AnyNumbers(TorchDispatchMode):
    """Answers questions about numbers that the meta device lacks: every mask is true, every number 1."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._operations += 1
        if self._operations > MAX_OPERATIONS:
            raise NotImplementedError(f"it takes more than {MAX_OPERATIONS:,} operations")
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype is torch.bool or 1
        if func is aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.long)
        return func(*args, **(kwargs or {}))


class _FirstPass:
    """Model on the meta device for `TaskModel.loss_sum`, which its first forward pass ends."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, **inputs: Any) -> Any:
        raise _Stopped(forward(self._model, **inputs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def disable_adapter(self) -> Any:
        """Return a block without effect: the model has no adapters."""
        return contextlib.nullcontext()


def forward(model: Any, **inputs: Any) -> Any:
    """Return the outputs of a model on the meta device. Raises ForwardRefused, ForwardUnknown."""
    try:
        with torch.no_grad(), _AnyNumbers():
            return model(**inputs)
    except NotImplementedError as e:
        raise ForwardUnknown(_line(e)) from None
    except (ValueError, IndexError, TypeError, RuntimeError) as e:
        raise (ForwardRefused if UNFIT.search(str(e)) else ForwardUnknown)(_line(e)) from None
    except Exception as e:  # Code of a model may raise anything; the training then names it.
        raise ForwardUnknown(f"{type(e).__name__}: {_line(e)}") from None


def check_example(task: Any, model: Any, example: Any) -> None:
    """Run the task's collator and one forward pass of an example. `model`: of `TaskModel.build_hollow`.

    Raises ForwardRefused if collator or model cannot take the example, ForwardUnknown if that cannot be computed.
    """
    try:
        batch = task.data.collate([example], META)
    except (ValueError, IndexError, TypeError) as e:
        raise ForwardRefused(_line(e)) from None
    try:
        task.model.loss_sum(_FirstPass(model), batch)
    except _Stopped as stopped:
        _check_logits(getattr(stopped.outputs, "logits", None), batch)


def _check_logits(logits: Any, batch: dict[str, torch.Tensor]) -> None:
    """Raise ForwardRefused if there is not one prediction for each token that the batch has a target for."""
    targets = batch.get("labels")
    if not isinstance(logits, torch.Tensor) or targets is None or targets.ndim < 2 or logits.ndim < 3:
        return
    if logits.shape[:2] != targets.shape:
        raise ForwardRefused(f"it makes predictions for {logits.shape[1]} of {targets.shape[1]} tokens")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
