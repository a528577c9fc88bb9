"""Where each object lies. Every key is below `<installation>/`; see docs/architecture.md for who writes what."""

import re
from collections.abc import Iterable, Iterator

JOB_DATA = "data/"


def job_data(job: str, sha256: str) -> str:
    """Content-addressed copy of an upload, for the job's attempts only (all keys that start with `data/<job>.`).

    Flat on purpose: in a folder store two new directories a job would cost more than everything else of a submit.
    """
    return f"{JOB_DATA}{job}.{sha256}"


def upload(sha256: str) -> str:
    """An upload that no job owns yet; the broker alone reads it."""
    return f"uploads/{sha256}"


def spec(attempt: str) -> str:
    return f"attempts/{attempt}/spec.json"


def desired(attempt: str) -> str:
    return f"attempts/{attempt}/desired.json"


def grant(attempt: str) -> str:
    return f"attempts/{attempt}/grant.json"


def final(attempt: str) -> str:
    return f"attempts/{attempt}/final.json"


BEATS = "beats/"


def beat(attempt: str, node: int) -> str:
    return f"{BEATS}{attempt}/{node}"


def attempt_of_beat(key: str) -> str:
    """The attempt that a key below `beats/` belongs to."""
    return key.removeprefix(BEATS).split("/", 1)[0]


def logs(attempt: str) -> str:
    return f"attempts/{attempt}/log/"


def log_chunk(attempt: str, node: int, boot: str, number: int) -> str:
    """Chunks of one boot sort in the order in which they were written."""
    return f"attempts/{attempt}/log/{node}/{boot}-{number:010d}"


def checkpoints(job: str) -> str:
    return f"checkpoints/{job}/"


def checkpoint(job: str, attempt: str, step: int, nonce: str) -> str:
    """The folder of one checkpoint; the nonce keeps an uncommitted folder from ever being used again."""
    return f"checkpoints/{job}/{attempt}/{step:010d}-{nonce}/"


MANIFEST = "manifest.json"
_MANIFEST = re.compile(rf"checkpoints/[^/]+/[^/]+/\d{{1,18}}-[^/]+/{re.escape(MANIFEST)}", re.ASCII)


def manifests(among: Iterable[str]) -> Iterator[str]:
    """The manifests' keys. A machine may write what it likes below `checkpoints/`: others are left out."""
    return filter(_MANIFEST.fullmatch, among)


def step_of(manifest: str) -> int:
    """The step that a manifest's key carries."""
    return int(manifest.split("/")[-2].partition("-")[0])


BROKER_LEASE = "broker/lease"
