"""Identifiers: lower-case base32 (RFC 4648, no padding), so that they fit DNS labels and cloud tags."""

import base64
import hashlib
from collections.abc import Callable
from typing import NewType

Installation = NewType("Installation", str)
JobId = NewType("JobId", str)
AttemptId = NewType("AttemptId", str)
InstanceName = NewType("InstanceName", str)

INSTALLATION_LENGTH = 4
ID_LENGTH = 13
JOB_ENTROPY = 9
"""Random bytes of a job's id."""
DRAWN_AT_ONCE = 64
"""Number of jobs for whose ids random bytes are drawn at once."""
PREFIX = "gb"


def base32(data: bytes, length: int) -> str:
    """Return the first `length` base32 digits of `data` (5 bits each)."""
    needed = -(-5 * length // 8)  # the encoding in Python takes long for the other bytes
    return base64.b32encode(data[:needed]).decode().lower().rstrip("=")[:length]


def job_id(entropy: bytes) -> JobId:
    """Return a job's id from at least 9 random bytes."""
    return JobId(base32(entropy, ID_LENGTH))


class JobIds:
    """Source of the ids of new jobs.

    Random bytes are drawn for many ids at once, because each draw lets another thread take the interpreter's lock.
    """

    def __init__(self, entropy: Callable[[int], bytes]) -> None:
        """`entropy(n)` returns n random bytes."""
        self._entropy = entropy
        self._drawn: list[bytes] = []

    def new(self) -> JobId:
        """Return the id of a new job."""
        if not self._drawn:
            data = self._entropy(JOB_ENTROPY * DRAWN_AT_ONCE)
            self._drawn = [data[first : first + JOB_ENTROPY] for first in range(0, len(data), JOB_ENTROPY)]
        return job_id(self._drawn.pop())


def attempt_id(job: JobId, number: int) -> AttemptId:
    """Return the id of a job's n-th attempt.

    The id follows from job and number, so that no retried call can create a second attempt.
    """
    return AttemptId(base32(hashlib.sha256(f"{job}/{number}".encode()).digest(), ID_LENGTH))


def instance_name(installation: Installation, attempt: AttemptId) -> InstanceName:
    """Return `gb-<installation:4>-<attempt:13>`.

    Its 21 characters leave space for suffixes; providers append and truncate (SkyPilot: from 35 characters on).
    """
    return InstanceName(f"{PREFIX}-{installation}-{attempt}")


def name_prefix(installation: Installation) -> str:
    """Return the prefix of the names of all instances of this installation, and of no other."""
    return f"{PREFIX}-{installation}-"


def attempt_of(installation: Installation, name: str) -> AttemptId | None:
    """Return the attempt that an instance name belongs to; None for a foreign or similar name."""
    prefix = name_prefix(installation)
    rest = name.removeprefix(prefix)
    if (
        not name.startswith(prefix)
        or len(rest) != ID_LENGTH
        or not set(rest) <= set("abcdefghijklmnopqrstuvwxyz234567")
    ):
        return None
    return AttemptId(rest)
