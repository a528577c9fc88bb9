"""Use of this machine's GPUs, as the driver reports it by NVML."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    """Use of all GPUs. None: the driver does not report it, as for parts of a GPU (MIG)."""

    utilisation: float | None
    """Mean utilisation, 0 to 1."""
    memory_bytes: int | None
    """Bytes in use by all programs on the GPU with the most in use."""
    power_w: float | None
    """Watts of all GPUs together."""


def load() -> GpuUsage | None:
    """Return the use of the GPUs, or None without a driver. Takes milliseconds, but hangs if the driver hangs."""
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
    mean_busy = sum(busy) / len(busy) if busy else None
    return GpuUsage(utilisation=mean_busy, memory_bytes=max(used, default=None), power_w=sum(power) if power else None)


def memory_bytes() -> int | None:
    """Return the memory of the smallest GPU in bytes, or None without a driver."""
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
