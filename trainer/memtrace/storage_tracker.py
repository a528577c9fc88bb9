"""Tracker of the bytes of live tensors during a step, which follows their storages through torch's dispatcher.

On the meta device, operations create the same storages as on a real device, but without memory or arithmetic.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
BY_INDEX = frozenset({aten.index.Tensor, aten._index_put_impl_.default, aten.index_put_.default})
"""Operations whose result size depends on the values of a mask, which the meta device lacks."""


ALONE = 4, 2
"""Reference counts of a tensor and of its storage within a dispatch mode, if only autograd holds both (torch 2.13)."""


def in_backward() -> bool:
    """Return True during a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def _adds_in_place(func: Any, args: Sequence[Any]) -> bool:
    """Return True if autograd, without this dispatch mode, would add a tensor's second gradient to the first in place.

    It does so if the first gradient is not a view and has no other holder. Under a dispatch mode torch always allocates
    the sum (input_buffer.cpp, `can_accumulate_inplace`).
    """
    if func is not aten.add.Tensor or not in_backward() or torch.is_grad_enabled():
        return False
    first, second = args
    if not isinstance(second, torch.Tensor) or (first.shape, first.dtype) != (second.shape, second.dtype):
        return False  # an operation of a module's own backward
    storage = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return bool((first._use_count(), storage) == ALONE)


class Storages(TorchDispatchMode):
    """Sums the live storages of one device by category; `peaks` has the worst moment of every segment of the step.

    `block`: granularity of the device's allocator in bytes. `on_operation` is called before each operation.
    A storage that existed before the trace is not counted, unless `hold` adds it.
    """

    def __init__(self, device: str, *, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._block = device, block
        self._live: dict[weakref.ref[torch.UntypedStorage], tuple[int, str]] = {}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.bytes: Counter[str] = Counter()
        self.total = 0
        self.segment, self.category = "", "temporary"
        self.peaks: dict[str, tuple[int, dict[str, int]]] = {}
        self.on_operation: Callable[[], None] = lambda: None
        self.replacements: list[Callable[[Any, Any, Mapping[str, Any]], Any]] = []
        """Functions that replace some operations with parts of the same memory use, and return None for all others."""
        self._only: str | None = None
        self.answer = True
        """Value of a boolean meta tensor if Python code reads the tensor, as models do to check for padding tokens."""

    def hold(self, tensor: torch.Tensor, category: str) -> None:
        """Count the tensor's storage under this category from now on."""
        if tensor.device.type == self._device:
            self._count(tensor.untyped_storage(), category)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage whose size changed without an operation."""
        if storage.device.type == self._device:
            reference = self._known.get(id(storage))
            self._count(storage, self._only or (self._live[reference][1] if reference else self.category))

    def _count(self, storage: torch.UntypedStorage, category: str) -> None:
        size = -(-storage.nbytes() // self._block) * self._block
        reference = self._known.get(id(storage))
        if reference is not None:
            before, old_category = self._live[reference]
            self.bytes[old_category] -= before
            self.total -= before
        elif size:
            key = id(storage)
            reference = weakref.ref(storage, lambda ref: self._freed(ref, key))
            self._known[key] = reference
        else:
            return
        self._live[reference] = size, category
        self.bytes[category] += size
        self.total += size
        self._mark()

    @contextlib.contextmanager
    def all_as(self, category: str) -> Iterator[None]:
        """Count everything that is allocated within the block under this category, in every segment."""
        before, self._only = self._only, category
        try:
            yield
        finally:
            self._only = before

    def _freed(self, ref: "weakref.ref[torch.UntypedStorage]", key: int) -> None:
        size, category = self._live.pop(ref)
        if self._known.get(key) is ref:
            del self._known[key]
        self.bytes[category] -= size
        self.total -= size

    def _mark(self) -> None:
        if self.total > self.peaks.get(self.segment, (0, {}))[0]:
            self.peaks[self.segment] = self.total, dict(self.bytes)

    def enter(self, segment: str, category: str) -> None:
        """Begin a segment; its allocations have this category."""
        self.segment, self.category = segment, category
        self._mark()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then dispatches the operation again for this process's parts
        self.on_operation()
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return self.answer if args[0].dtype is torch.bool else 1.0
        if func in BY_INDEX:
            args = (args[0], [n for index in args[1] for n in self._numbers(index)], *args[2:])
        if _adds_in_place(func, args):
            return args[0].add_(args[1])
        out = None
        for part in self.replacements:
            with self:  # the parts are traced too
                out = part(func, args, kwargs or {})
            if out is not None:
                break
        if out is None:
            out = func(*args, **(kwargs or {}))
        for result in (out,) if isinstance(out, torch.Tensor) else out if isinstance(out, (tuple, list)) else ():
            if isinstance(result, torch.Tensor) and id(result.untyped_storage()) not in self._known:
                self.hold(result, self._only or self.category)
        return out

    def _numbers(self, index: Any) -> tuple[Any, ...]:
        """Return a mask as the indices of its true elements, as every device uses it; on meta all are true."""
        if not isinstance(index, torch.Tensor) or index.dtype is not torch.bool:
            return (index,)
        all_true = index.numel(), index.ndim
        indices = index.new_empty(all_true, dtype=torch.long) if index.is_meta else index.nonzero()
        self.hold(indices, self._only or self.category)
        return indices.unbind(1)
