"""Home and blob folder of the daemon: creates them private, locks the home, refuses folders that others can change."""

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.domain.errors import GpubrokerError, InvalidInput, Problem
from broker.paths import CONFIG_FILE
from broker.runtime.boot_clock import CLOCK_FILE
from broker.runtime.private_files import FULL, is_locked, private_folder

log = logging.getLogger(__name__)

OTHERS = stat.S_IRWXG | stat.S_IRWXO
ANYBODY_WRITES = stat.S_IWOTH
"""Mode bit of a folder that is refused. Group write access is removed instead, because umask 002 sets it on many
systems for the user's own group.
"""
LOCK = "lock"
SPOOL = ".uploads"
"""Folder in the home for uploads that are not in the blob store yet."""
WRITTEN = (CLOCK_FILE, "client.json", "installation", "master.key", "sweep-report-only")
"""Files that the daemon writes into its home. Others in it may be a user's, with any suffix."""
DRAFT = "[0-9a-f]" * 8
"""Suffix pattern of files that `private_files` and `secret_box` have not yet renamed to their final name."""
MARKS = (CONFIG_FILE, "installation", "master.key")
"""Files that identify a folder as a daemon's home, as opposed to a folder that was named by mistake."""
NOTHING = {"lost+found"}
"""Entries of an empty folder at the top of a new volume."""


class HomeInUse(GpubrokerError):
    """Raised if another daemon uses this home."""


class HomeFull(GpubrokerError):
    """Raised if the disk of the home is full."""


@contextmanager
def with_room(home: Path) -> Iterator[None]:
    """Context manager that raises HomeFull, a one-line error, in place of an OSError of a full disk."""
    try:
        yield
    except OSError as e:
        if e.errno not in FULL:
            raise
        where = e.filename or home
        raise HomeFull(f"home {home}: cannot write {where}: {e.strerror}; free space there, and start again") from e


def make_home(home: Path) -> None:
    """Create the home with mode 0700. Remove the permissions of other users from an existing home, with a log line.

    Raises InvalidInput if the folder cannot be created or closed, is writable for every user, or is not the home of a
    daemon.
    """
    try:
        private_folder(home)
        mode = _mode(home)
        if not mode & OTHERS:
            return
        entries = {entry.name for entry in home.iterdir()} - NOTHING
        if mode & ANYBODY_WRITES or (entries and entries.isdisjoint(MARKS)):
            raise _exposed("home", home, mode)
        home.chmod(mode & ~OTHERS)
    except PermissionError:
        if home.is_dir() and home.stat().st_uid != os.geteuid():
            raise _foreign(home) from None
        raise _unusable(home, "Permission denied") from None
    except OSError as e:
        raise _unusable(home, e.strerror) from None
    log.warning(
        "home %s had mode %04o, so others could read keys, database and blobs; it is closed to them now", home, mode
    )


@contextmanager
def holding(home: Path) -> Iterator[None]:
    """Lock the home against other daemons, which would use the same address, launchers and SkyPilot server.

    The kernel releases the lock of a dead daemon. Half-written files of a killed daemon, such as keys and tokens, are
    removed. Raises HomeInUse.
    """
    lock = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise HomeInUse(
                f"home {home} is in use by another gpubroker daemon (process {holder}): stop it, or choose another home"
            ) from None
        os.truncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        for name in WRITTEN:
            for draft in home.glob(f"{name}.{DRAFT}"):
                draft.unlink(missing_ok=True)
        yield
    finally:
        os.close(lock)


def is_held(home: Path) -> bool:
    """Return True if a daemon uses this home."""
    return is_locked(home / LOCK)


def check_blobs(folder: Path | None, home: Path) -> None:
    """Check a blob store that is a folder outside of the home, and create it with mode 0700 if it is missing.

    A folder that others can read is only logged, because the operator may want others to read results.
    `folder` None: the store is a bucket. Raises InvalidInput for a folder that every user can change, and for the
    folder of pending uploads.
    """
    if folder is None:
        return
    if folder.resolve().is_relative_to((home / SPOOL).resolve()):
        message = f"{folder}: each start removes the pending uploads in it; name another folder"
        raise InvalidInput(Problem(field="blobs", message=message))
    if folder.resolve().is_relative_to(home.resolve()):
        return
    try:
        private_folder(folder)
        mode = _mode(folder)
    except OSError as e:
        raise InvalidInput(Problem(field="blobs", message=f"{folder}: {e.strerror}; name another folder")) from None
    if mode & ANYBODY_WRITES:
        raise _exposed("blobs", folder, mode)
    if mode & OTHERS:
        log.warning("blobs: %s has mode %04o, so that others see data and results; chmod 700 closes it", folder, mode)


def _mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def _exposed(field: str, folder: Path, mode: int) -> InvalidInput:
    can = "change" if mode & ANYBODY_WRITES else "read"
    message = f"{folder} has mode {mode:04o}, so that others can {can} it; run chmod 700 on it, or name one below"
    return InvalidInput(Problem(field=field, message=message))


def _foreign(home: Path) -> InvalidInput:
    mismatch = f"{home} belongs to user id {home.stat().st_uid}, and this daemon runs as {os.geteuid()}"
    return InvalidInput(Problem(field="home", message=f"{mismatch}; run chown on it, or name another folder"))


def _unusable(home: Path, why: str | None) -> InvalidInput:
    return InvalidInput(Problem(field="home", message=f"{home}: {why}; name a folder that this user can write"))
