"""Whose machines a home answers for, and what a database that is new to it may do with them."""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from broker.domain.errors import AlreadyExists, BlobsUnavailable, GpubrokerError
from broker.domain.ids import INSTALLATION_LENGTH, Installation, base32
from broker.paths import CONFIG_FILE
from broker.ports import Blobs, Store
from broker.runtime.private_files import write_private
from trainer.contract import object_keys as keys

log = logging.getLogger("gpubroker")

INSTALLATION_FILE = "installation"
REPORT_ONLY = "sweep-report-only"
FIRST_MIGRATION = "0001_initial.sql"
MARK_LENGTH = 16
MARK = re.compile(f"[a-z2-7]{{{MARK_LENGTH}}}")


class OtherInstallation(GpubrokerError):
    """The home's machines are of another installation than the database."""


class OtherBlobs(GpubrokerError):
    """The blob store is not the one that the database's jobs lie in."""


async def installation_of(store: Store, home: Path) -> Installation:
    """The id that names our machines: the database's, or on a new one the home's.

    Raises OtherInstallation, since nobody would list the home's machines any more.
    """
    file = home / INSTALLATION_FILE
    known = file.read_text().strip() if file.exists() else None
    installation = await store.installation(Installation(known or base32(os.urandom(5), INSTALLATION_LENGTH)))
    if known and installation != known:
        raise OtherInstallation(
            f"the database is of installation {installation} and the home {home} of {known}; correct database_url in "
            f"{CONFIG_FILE}, or remove {file} by hand once no machine gb-{known}-… stands"
        )
    if not known:
        write_private(file, f"{installation}\n".encode(), durable=True)
    return installation


async def mark_of(blobs: Blobs) -> str:
    """Which blob store this is; one without a mark gets one. Raises BlobsUnavailable, OtherBlobs."""
    new = base32(os.urandom(10), MARK_LENGTH)
    try:
        if await blobs.get(keys.BLOB_STORE) is None:
            await blobs.put(keys.BLOB_STORE, new.encode(), if_absent=True)
    except AlreadyExists:
        pass  # another broker's
    mark = (await blobs.get(keys.BLOB_STORE) or b"").decode(errors="replace").strip()
    if not MARK.fullmatch(mark):
        raise OtherBlobs(
            f"{keys.BLOB_STORE} in the blob store is damaged, so whose it is cannot be told: remove that object, and "
            "if this is the store of the database's jobs: gpubroker blobs adopt"
        )
    return mark


async def refuse_other_blobs(store: Store, blobs: Blobs) -> None:
    """Of two brokers with a blob store each, one hears no beat of what the other buys, and ends it.

    Raises OtherBlobs. A blob store that is away tells nothing, and keeps nobody.
    """
    try:
        mark = await mark_of(blobs)
    except BlobsUnavailable as e:
        log.warning("whether this is the blob store of the database's jobs cannot be told: %s", e)
        return
    if await store.blob_store(mark) != mark:
        raise OtherBlobs(
            "the blob store is not the one that this database's jobs lie in: correct `blobs`, which all brokers "
            f"share; after a move copy all, {keys.BLOB_STORE} over the one that is there by now; if this is the right "
            "one, and its mark was lost, or the old one is lost: gpubroker blobs adopt"
        )


def mark_new(home: Path, migrations: Sequence[str]) -> None:
    """On a new database under an old home, machines may stand that this database never knew: look, do not touch.

    Written before the first migration, after which the database looks like any other. Lasts over restarts, until a
    person has looked and removes the mark.
    """
    if FIRST_MIGRATION in migrations and (home / INSTALLATION_FILE).exists():
        text = "The sweep only reports orphans (see the log) until this file is removed.\n"
        write_private(home / REPORT_ONLY, text.encode(), durable=True)


def only_report(home: Path) -> bool:
    mark = home / REPORT_ONLY
    if mark.exists():
        log.warning("the database is new to this home: the sweep only reports orphans until you remove %s", mark)
    return mark.exists()
