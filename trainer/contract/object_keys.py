"""Keys of all objects in the blob store, below `<installation>/`; docs/reference/objects.md names the writers."""

import re
from collections.abc import Iterable, Iterator

JOB_DATA = "data/"


def job_data(job: str, sha256: str) -> str:
    """Return the key of a job's own copy of an upload, which only the job's attempts read.

    All copies of a job start with `data/<job>.`. The layout is flat because two new directories for each job would
    dominate the cost of a submit in a folder store.
    """
    return f"{JOB_DATA}{job}.{sha256}"


def job_of_data(key: str) -> str:
    """Return the job whose copy of an upload has this key."""
    return key.removeprefix(JOB_DATA).partition(".")[0]


def upload(sha256: str) -> str:
    """Return the key of an upload that is not part of a job; only the broker reads the object."""
    return f"uploads/{sha256}"


ATTEMPTS = "attempts/"


def spec(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}/spec.json"


def desired(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}/desired.json"


def grant(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}/grant.json"


def final(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}/final.json"


HEARTBEATS = "heartbeats/"


def heartbeat(attempt: str, node: int) -> str:
    return f"{HEARTBEATS}{attempt}/{node}"


def attempt_of_heartbeat(key: str) -> str:
    """Return the attempt that a key below `heartbeats/` belongs to."""
    return key.removeprefix(HEARTBEATS).split("/", 1)[0]


def node_of_heartbeat(key: str) -> int | None:
    """Return the number of the machine within its attempt, from 0, or None if the key is not that of a heartbeat."""
    node = key.rpartition("/")[2]
    return (
        int(node)
        if node.isascii() and node.isdigit() and key == heartbeat(attempt_of_heartbeat(key), int(node))
        else None
    )


def logs(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}/log/"


def log_chunk(attempt: str, node: int, boot: str, number: int) -> str:
    """Return the key of a log chunk. Chunks of one boot sort in the order in which they were written."""
    return f"{ATTEMPTS}{attempt}/log/{node}/{boot}-{number:010d}"


def checkpoints(job: str) -> str:
    return f"checkpoints/{job}/"


RESULTS_PREFIX = "results-"
"""Prefix of the nonce of a complete checkpoint. Other nonces are hexadecimal and sort before this prefix, so a complete
checkpoint sorts as the newest of its step.
"""


def checkpoint(job: str, attempt: str, step: int, nonce: str, *, complete: bool = False) -> str:
    """Return the folder of one checkpoint; the nonce ensures that no save reuses an uncommitted folder."""
    return f"checkpoints/{job}/{attempt}/{step:010d}-{RESULTS_PREFIX if complete else ''}{nonce}/"


MANIFEST = "manifest.json"
_MANIFEST = re.compile(rf"checkpoints/[^/]+/[^/]+/\d{{1,18}}-[^/]+/{re.escape(MANIFEST)}", re.ASCII)


FILES = "files/"
"""Folder of the files within a checkpoint, so that no user file can have the name of the manifest."""


def is_manifest(key: str) -> bool:
    """Return True if the key is a checkpoint's manifest, not a file of that name within a checkpoint."""
    return _MANIFEST.fullmatch(key) is not None


def manifests(listed: Iterable[str]) -> Iterator[str]:
    """Return the keys of manifests. A machine may write other objects below `checkpoints/`; the result omits them."""
    return filter(is_manifest, listed)


def files_prefix(manifest: str) -> str:
    """Return the prefix of the keys of a checkpoint's files."""
    return manifest.removesuffix(MANIFEST) + FILES


def step_of(manifest: str) -> int:
    """Return the step in a manifest's key."""
    return int(manifest.split("/")[-2].partition("-")[0])


def token_cache(job: str, attempt: str, identity: str, nonce: str) -> str:
    """Return the folder of an attempt's token cache.

    `identity` is a hash of everything that the tokens depend on. The folder is in the folder of the attempt's
    checkpoints, so it has their permissions and retention. Its name never matches the name of a checkpoint.
    """
    return f"{checkpoints(job)}{attempt}/token-cache-{identity}-{nonce}/"


_TOKEN_CACHE = re.compile(r"checkpoints/[^/]+/[^/]+/token-cache-[^/]+/.+", re.DOTALL)
_TOKEN_CACHE_MANIFEST = re.compile(rf"checkpoints/[^/]+/[^/]+/token-cache-[^/]+/{re.escape(MANIFEST)}")


def is_in_token_cache(key: str) -> bool:
    """Return True if the object is part of a token cache."""
    return _TOKEN_CACHE.fullmatch(key) is not None


def token_cache_manifests(among: Iterable[str]) -> Iterator[str]:
    """Return the keys of manifests of token caches."""
    return filter(_TOKEN_CACHE_MANIFEST.fullmatch, among)


def token_cache_identity(manifest: str) -> str:
    """Return the identity in the key of a token cache's manifest."""
    return manifest.split("/")[-2].removeprefix("token-cache-").rpartition("-")[0]


BROKER_LEASE = "broker/lease"
BLOB_STORE = "broker/store"
"""Key of the object with the blob store's id; only brokers read this object."""
