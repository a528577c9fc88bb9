"""Identifiers. All are lower-case base32 (RFC 4648, no padding), so that they fit DNS labels and cloud tags."""

import base64
import hashlib
from typing import NewType

Installation = NewType("Installation", str)
JobId = NewType("JobId", str)
AttemptId = NewType("AttemptId", str)
InstanceName = NewType("InstanceName", str)

INSTALLATION_LENGTH = 4
ID_LENGTH = 13
PREFIX = "gb"


def base32(data: bytes, length: int) -> str:
    """The first `length` base32 digits of `data` (5 bits each)."""
    return base64.b32encode(data).decode().lower().rstrip("=")[:length]


def job_id(entropy: bytes) -> JobId:
    """A job's id from at least 9 random bytes."""
    return JobId(base32(entropy, ID_LENGTH))


def attempt_id(job: JobId, number: int) -> AttemptId:
    """The id of a job's n-th attempt follows from the intent, so that no retry of a call can invent a second one."""
    return AttemptId(base32(hashlib.sha256(f"{job}/{number}".encode()).digest(), ID_LENGTH))


def instance_name(installation: Installation, attempt: AttemptId) -> InstanceName:
    """`gb-<installation:4>-<attempt:13>`: 21 characters; providers append and truncate (SkyPilot: from 35 on)."""
    return InstanceName(f"{PREFIX}-{installation}-{attempt}")


def name_prefix(installation: Installation) -> str:
    """What every instance of this installation, and no other's, starts with."""
    return f"{PREFIX}-{installation}-"


def attempt_of(installation: Installation, name: str) -> AttemptId | None:
    """The attempt that an instance name belongs to; None for a foreign or look-alike name."""
    prefix = name_prefix(installation)
    rest = name.removeprefix(prefix)
    if (
        not name.startswith(prefix)
        or len(rest) != ID_LENGTH
        or not set(rest) <= set("abcdefghijklmnopqrstuvwxyz234567")
    ):
        return None
    return AttemptId(rest)
