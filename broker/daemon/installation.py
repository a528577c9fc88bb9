"""Checks at the start that home, database and blob store belong to the same installation."""

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
from trainer.contract import object_keys

log = logging.getLogger("gpubroker")

INSTALLATION_FILE = "installation"
REPORT_ONLY = "sweep-report-only"
"""File in the home: while it exists, the sweep reports orphans and destroys nothing."""
FIRST_MIGRATION = "0001_initial.sql"
MARK_LENGTH = 16
MARK = re.compile(f"[a-z2-7]{{{MARK_LENGTH}}}")


class OtherInstallation(GpubrokerError):
    """Raised if home and database belong to different installations."""


class OtherBlobs(GpubrokerError):
    """Raised if the blob store is not the one that holds the data of the database's jobs."""


async def installation_of(store: Store, home: Path) -> Installation:
    """Return the installation id that names the machines: the database's, or the home's if the database is new.

    Raises OtherInstallation if the two ids differ, because then no broker would list the home's machines.
    """
    file = home / INSTALLATION_FILE
    home_id = file.read_text().strip() if file.exists() else None
    installation = await store.installation(Installation(home_id or base32(os.urandom(5), INSTALLATION_LENGTH)))
    if home_id and installation != home_id:
        raise OtherInstallation(
            f"the database is of installation {installation} and the home {home} of {home_id}; correct database_url in "
            f"{CONFIG_FILE}, or remove {file} by hand once no machine gb-{home_id}-… exists"
        )
    if not home_id:
        write_private(file, f"{installation}\n".encode(), durable=True)
    return installation


async def mark_of(blobs: Blobs) -> str:
    """Return the mark that identifies the blob store, after writing one if it has none.

    Raises BlobsUnavailable, and OtherBlobs if the mark is damaged.
    """
    new_mark = base32(os.urandom(10), MARK_LENGTH)
    try:
        if await blobs.get(object_keys.BLOB_STORE) is None:
            await blobs.put(object_keys.BLOB_STORE, new_mark.encode(), if_absent=True)
    except AlreadyExists:
        pass  # another broker has written its mark since the check
    mark = (await blobs.get(object_keys.BLOB_STORE) or b"").decode(errors="replace").strip()
    if not MARK.fullmatch(mark):
        raise OtherBlobs(
            f"{object_keys.BLOB_STORE} in the blob store is damaged, so its owner is unknown: remove that object, "
            "and if this is the store of the database's jobs: gpubroker blobs adopt"
        )
    return mark


async def refuse_other_blobs(store: Store, blobs: Blobs) -> None:
    """Raise OtherBlobs if the blob store is not the one that the database's jobs use.

    A broker with another blob store would receive no heartbeat of the machines, and destroy them. If the blob store
    cannot be reached, the daemon starts anyway, with a warning.
    """
    try:
        mark = await mark_of(blobs)
    except BlobsUnavailable as e:
        log.warning("cannot check whether this is the blob store of the database's jobs: %s", e)
        return
    if await store.blob_store(mark) != mark:
        raise OtherBlobs(
            "the blob store is not the one that this database's jobs use: correct `blobs`, which all brokers "
            f"share; after a move copy all objects, and overwrite {object_keys.BLOB_STORE}; if this is the right store "
            "and its mark was lost, or the old store is lost: gpubroker blobs adopt"
        )


def mark_new(home: Path, migrations: Sequence[str]) -> None:
    """Restrict the sweep to reports if the database is new and the home is not.

    A new database does not list machines that this home created before. The mark is written before the first
    migration, because afterwards a new database cannot be recognised. The mark stays until a user removes it.
    """
    if FIRST_MIGRATION in migrations and (home / INSTALLATION_FILE).exists():
        text = "The sweep only reports orphans (see the log) until this file is removed.\n"
        write_private(home / REPORT_ONLY, text.encode(), durable=True)


def only_report(home: Path) -> bool:
    """Return True, with a warning in the log, if the sweep must only report orphans."""
    mark = home / REPORT_ONLY
    if mark.exists():
        log.warning("the database is new to this home: the sweep only reports orphans until you remove %s", mark)
    return mark.exists()
