"""What the driver says of this machine's GPUs, by NVML."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    """None: the driver does not tell, as of parts of a GPU (MIG)."""

    utilisation: float | None
    """0..1, the mean of all."""
    memory_bytes: int | None
    """In use by whatever program, of the GPU that has the most in use."""
    power_w: float | None
    """Of all together."""


def load() -> GpuUsage | None:
    """None where there is no driver. Takes milliseconds, or hangs with a driver that does."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    busy, used, power = list[float](), list[int](), list[float]()
    try:
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            _add(busy, lambda of: pynvml.nvmlDeviceGetUtilizationRates(of).gpu / 100, handle)
            _add(used, lambda of: int(pynvml.nvmlDeviceGetMemoryInfo(of).used), handle)
            _add(power, lambda of: pynvml.nvmlDeviceGetPowerUsage(of) / 1000, handle)
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    mean = sum(busy) / len(busy) if busy else None
    return GpuUsage(utilisation=mean, memory_bytes=max(used, default=None), power_w=sum(power) if power else None)


def memory_bytes() -> int | None:
    """Of the smallest GPU; None where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return min((int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles), default=None)
    except pynvml.NVMLError:
        return None


def _add(figures: list[T], read: Callable[[Any], T], handle: Any) -> None:
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        figures.append(read(handle))
