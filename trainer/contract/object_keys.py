"""Where each object lies. Every key is below `<installation>/`; see docs/reference/objects.md for who writes what."""

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


def node_of_beat(key: str) -> int | None:
    """The machine of its attempt, from 0; None: it is not a key of `beat`."""
    node = key.rpartition("/")[2]
    return int(node) if node.isascii() and node.isdigit() and key == beat(attempt_of_beat(key), int(node)) else None


def logs(attempt: str) -> str:
    return f"attempts/{attempt}/log/"


def log_chunk(attempt: str, node: int, boot: str, number: int) -> str:
    """Chunks of one boot sort in the order in which they were written."""
    return f"attempts/{attempt}/log/{node}/{boot}-{number:010d}"


def checkpoints(job: str) -> str:
    return f"checkpoints/{job}/"


COMPLETE = "results-"
"""Before the nonce, which has no letter as late: of one step the results sort as the newest, whatever was saved
before them."""


def checkpoint(job: str, attempt: str, step: int, nonce: str, *, complete: bool = False) -> str:
    """The folder of one checkpoint; the nonce keeps an uncommitted folder from ever being used again."""
    return f"checkpoints/{job}/{attempt}/{step:010d}-{COMPLETE if complete else ''}{nonce}/"


MANIFEST = "manifest.json"
_MANIFEST = re.compile(rf"checkpoints/[^/]+/[^/]+/\d{{1,18}}-[^/]+/{re.escape(MANIFEST)}", re.ASCII)


FILES = "files/"
"""Below a checkpoint's folder, what is in it: apart, so that a file of any name is not taken for the protocol's own."""


def is_manifest(key: str) -> bool:
    """Whether it is a checkpoint's, and no file of that name within one."""
    return _MANIFEST.fullmatch(key) is not None


def manifests(among: Iterable[str]) -> Iterator[str]:
    """The manifests' keys. A machine may write what it likes below `checkpoints/`: others are left out."""
    return filter(is_manifest, among)


def files_of(manifest: str) -> str:
    """What the keys of a checkpoint's files begin with."""
    return manifest.removesuffix(MANIFEST) + FILES


def step_of(manifest: str) -> int:
    """The step that a manifest's key carries."""
    return int(manifest.split("/")[-2].partition("-")[0])


def rows(job: str, attempt: str, identity: str, nonce: str) -> str:
    """The folder of what an attempt made of the job's rows; `identity`: a hash of all that they depend on. Among its
    checkpoints, whose rights and retention it shares, and never taken for one.
    """
    return f"{checkpoints(job)}{attempt}/rows-{identity}-{nonce}/"


_ROWS = re.compile(r"checkpoints/[^/]+/[^/]+/rows-[^/]+/.+", re.DOTALL)
_ROWS_MANIFEST = re.compile(rf"checkpoints/[^/]+/[^/]+/rows-[^/]+/{re.escape(MANIFEST)}")


def is_of_rows(key: str) -> bool:
    """Whether it is a part of tokenised rows."""
    return _ROWS.fullmatch(key) is not None


def rows_manifests(among: Iterable[str]) -> Iterator[str]:
    """The manifests of tokenised rows."""
    return filter(_ROWS_MANIFEST.fullmatch, among)


def rows_identity(manifest: str) -> str:
    """The identity that a manifest's key carries."""
    return manifest.split("/")[-2].removeprefix("rows-").rpartition("-")[0]


BROKER_LEASE = "broker/lease"
BLOB_STORE = "broker/store"
"""Which blob store this is; brokers alone read it."""
