"""Whose machines a home answers for, and what a database that is new to it may do with them."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from broker.config import CONFIG_FILE
from broker.domain.errors import GpubrokerError
from broker.domain.ids import INSTALLATION_LENGTH, Installation, base32
from broker.ports import Store
from providers.private import write_private

log = logging.getLogger("gpubroker")

INSTALLATION_FILE = "installation"
REPORT_ONLY = "sweep-report-only"
FIRST_MIGRATION = "0001_first.sql"


class OtherInstallation(GpubrokerError):
    """The home's machines are of another installation than the database."""


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
