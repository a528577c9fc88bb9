"""Correction of memory estimates after runs that ran out of memory."""

from broker.domain.workload import MemoryNeed

SHORT = 1.1
"""A run that ran out of memory needed at least a tenth more than the device had [assumed]."""
MOST = 2.5
"""Largest correction factor, so that one machine's report has a limited effect. The worst known estimate was 2.3 times
too low.
"""


def shortfall(device_bytes: int, need: MemoryNeed) -> float:
    """Return the factor that makes an estimate exceed `device_bytes`, after the run ran out of memory there.

    The factor is between 1 and `MOST`.
    """
    wanted = SHORT * device_bytes / (1 + need.margin) - need.context
    return min(MOST, max(1.0, wanted / need.peak))
