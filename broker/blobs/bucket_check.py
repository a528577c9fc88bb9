"""Checks whether a store has the guarantees that the broker needs, for `gpubroker blobs init URL`."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from broker.blobs.credentials.issuers import GrantSettings
from broker.blobs.obstore_blobs import ObstoreBlobs
from broker.domain.blob_url import scheme_of
from broker.domain.errors import AlreadyExists, BlobError
from broker.domain.ids import ID_LENGTH, AttemptId, Installation, JobId, base32


@dataclass(frozen=True, kw_only=True)
class BucketCheck:
    """Result of one check of a store."""

    name: str
    ok: bool
    detail: str = ""
    """The observed fault and its fix; empty if `ok`."""


@dataclass(frozen=True, kw_only=True)
class BucketReport:
    """Results of all checks of a store, and the rights that the broker needs."""

    url: str
    checks: tuple[BucketCheck, ...]
    policy: str
    """The minimal rights that the broker needs: JSON for S3, prose for other stores."""

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


async def check_bucket(url: str, *, options: Mapping[str, str] | None = None) -> BucketReport:
    """Check writes, conditional writes, listings and deletions, and delete the test objects. Raises InvalidInput.

    Creates a missing folder, but no bucket. The test objects have a random prefix, so a check disturbs neither a store
    in use nor another check.
    """
    probe = Installation("check-" + base32(os.urandom(9), 13))
    blobs = ObstoreBlobs.open(url, probe, options=options)
    checks = [await _write_and_read(blobs)]
    if checks[0].ok:
        checks += [await _conditional_put(blobs), await _list_after_put(blobs), await _clean_up(blobs)]
    return BucketReport(url=url, checks=tuple(checks), policy=policy(url))


async def check_grants(
    url: str, *, options: Mapping[str, str] | None = None, grants: GrantSettings | None = None
) -> str | None:
    """Return one line on a problem with the credentials of attempts; None: there is no problem.

    Issues credentials once, and discards them. Raises InvalidInput.
    """
    probe = base32(os.urandom(9), ID_LENGTH)
    blobs = ObstoreBlobs.open(url, Installation("check"), options=options, grants=grants)
    if blobs.unscoped is None and not blobs.local:
        try:
            await blobs.grant(JobId(probe), AttemptId(probe))
        except BlobError as e:
            return f"blobs {url}: no attempt can start: {e}"
    return blobs.unscoped


async def _write_and_read(blobs: ObstoreBlobs) -> BucketCheck:
    name = "write and read"
    try:
        await blobs.put("probe/a", b"1")
        content = await blobs.get("probe/a")
    except BlobError as e:
        return BucketCheck(name=name, ok=False, detail=str(e))
    return BucketCheck(
        name=name,
        ok=content == b"1",
        detail="" if content == b"1" else f"wrote b'1', read {content!r}: use another store",
    )


async def _conditional_put(blobs: ObstoreBlobs) -> BucketCheck:
    """Check that put-if-absent replaces nothing: a late writer must not replace a manifest or a final report."""
    name = "conditional put"
    try:
        await blobs.put("probe/once", b"first", if_absent=True)
        await blobs.put("probe/once", b"second", if_absent=True)
    except AlreadyExists:
        return BucketCheck(name=name, ok=await blobs.get("probe/once") == b"first")
    except BlobError as e:
        return BucketCheck(name=name, ok=False, detail=str(e))
    return BucketCheck(
        name=name, ok=False, detail="a second put-if-absent replaced the first: use a store that supports If-None-Match"
    )


async def _list_after_put(blobs: ObstoreBlobs) -> BucketCheck:
    """Check that a LIST shows new and changed objects at once, because the broker reads heartbeats by LIST."""
    name = "list after put"
    try:
        await blobs.put("probe/listed", b"1")
        before = {info.key: info.etag for info in await blobs.list("probe/")}
        await blobs.put("probe/listed", b"22")
        after = {info.key: info.etag for info in await blobs.list("probe/")}
    except BlobError as e:
        return BucketCheck(name=name, ok=False, detail=str(e))
    if "probe/listed" not in before:
        return BucketCheck(
            name=name, ok=False, detail="a new object was missing from LIST: use a store that lists consistently"
        )
    changed = before["probe/listed"] != after.get("probe/listed")
    return BucketCheck(
        name=name, ok=changed, detail="" if changed else "the ETag did not change with the object: use another store"
    )


async def _clean_up(blobs: ObstoreBlobs) -> BucketCheck:
    name = "delete"
    try:
        for info in await blobs.list(""):
            await blobs.delete(info.key)
        left = await blobs.list("")
    except BlobError as e:
        return BucketCheck(name=name, ok=False, detail=str(e))
    detail = f"{len(left)} test objects could not be deleted: grant the right to delete" if left else ""
    return BucketCheck(name=name, ok=not left, detail=detail)


def policy(url: str) -> str:
    """Return the minimal rights that the broker's own credentials need on this store. Raises InvalidInput."""
    parts = urlsplit(url)
    where = parts.path.strip("/")
    match scheme_of(url):
        case "s3":
            return _s3_policy(parts.netloc, where)
        case "gs":
            return (
                f"Bucket {parts.netloc}: grant the broker's service account roles/storage.objectUser on the bucket "
                "(objects get, list, create, delete); uniform bucket-level access, no public access."
            )
        case "az":
            return (
                f"Container {parts.netloc}: assign the broker's identity 'Storage Blob Data Contributor' on it "
                "(read, list, write, delete); no anonymous access."
            )
        case "file":
            return f"Folder {parts.path}: owned by the daemon's user, mode 0700; only machines of this host can use it."
        case _:
            return "memory://: objects are lost when the process ends; for tests and simulation only."


def _s3_policy(bucket: str, prefix: str) -> str:
    below = f"{prefix}/*" if prefix else "*"
    listing: dict[str, object] = {
        "Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": [f"arn:aws:s3:::{bucket}"],
    }  # fmt: skip
    if prefix:
        listing["Condition"] = {"StringLike": {"s3:prefix": [below]}}
    objects = {
        "Effect": "Allow",
        "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
        "Resource": [f"arn:aws:s3:::{bucket}/{below}"],
    }
    return json.dumps({"Version": "2012-10-17", "Statement": [listing, objects]}, indent=2)
