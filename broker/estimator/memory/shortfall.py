"""By how much runs needed more memory than was estimated."""

from broker.domain.workload import MemoryNeed

SHORT = 1.1
"""What ran out of memory wanted at least a tenth more than there was [assumed]."""
MOST = 2.5
"""Memory is corrected to so many times the estimate at most, whatever one machine says: the worst known estimate was
2.3 times too low."""


def shortfall(device_bytes: int, need: MemoryNeed) -> float:
    """What an estimate is to be multiplied by after it ran out of `device_bytes`, so that it does not fit there any
    more; between 1 and `MOST`.
    """
    wanted = SHORT * device_bytes / (1 + need.margin) - need.context
    return min(MOST, max(1.0, wanted / need.peak))
