"""The daemon's folders, which hold keys, the database and what people trained on: who else can look into them."""

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.domain.errors import GpubrokerError, InvalidInput, Problem
from broker.paths import CONFIG_FILE
from broker.runtime.private_files import FULL, is_locked, private_folder

log = logging.getLogger(__name__)

OTHERS = stat.S_IRWXG | stat.S_IRWXO
ANYBODY_WRITES = stat.S_IWOTH
"""What a group may write is closed instead: under the umask 002 of many systems it is the user's own."""
LOCK = "lock"
SPOOL = ".uploads"
"""Of files that are on their way to the blob store."""
WRITTEN = ("client.json", "installation", "master.key", "sweep-report-only")
DRAFT = "[0-9a-f]" * 8
"""How `broker.runtime.private_files` and `broker.runtime.secret_box` name what is not yet in its place."""
MARKS = (CONFIG_FILE, "installation", "master.key")
"""What tells that a folder is a daemon's home, and not one that somebody has named by mistake."""
NOTHING = {"lost+found"}
"""In the top folder of a new volume."""


class HomeInUse(GpubrokerError):
    """Another daemon works in this home."""


class HomeFull(GpubrokerError):
    """The disk takes no more."""


@contextmanager
def with_room(home: Path) -> Iterator[None]:
    """Says in one line that the disk is full. Raises HomeFull in place of such an OSError."""
    try:
        yield
    except OSError as e:
        if e.errno not in FULL:
            raise
        where = e.filename or home
        raise HomeFull(f"home {home}: cannot write {where}: {e.strerror}; make room there, and start again") from e


def make_home(home: Path) -> None:
    """Makes it with mode 0700; one that others could look into is closed to them, which the log says.

    Raises InvalidInput for one that cannot be made or closed, that anybody can change, or that is no home of a daemon.
    """
    try:
        private_folder(home)
        mode = _mode(home)
        if not mode & OTHERS:
            return
        found = {entry.name for entry in home.iterdir()} - NOTHING
        if mode & ANYBODY_WRITES or (found and found.isdisjoint(MARKS)):
            raise _open("home", home, mode)
        home.chmod(mode & ~OTHERS)
    except PermissionError:
        if home.is_dir() and home.stat().st_uid != os.geteuid():
            raise _foreign(home) from None
        raise _unusable(home, "Permission denied") from None
    except OSError as e:
        raise _unusable(home, e.strerror) from None
    log.warning("home %s had mode %04o, open to others: keys, database and blobs; it is closed now", home, mode)


@contextmanager
def holding(home: Path) -> Iterator[None]:
    """While inside, no other daemon works in this home: it would take this one's address, launchers and SkyPilot server
    for its own. The kernel lets go of a dead one's. What a killed one left half written, keys and tokens among it, is
    removed. Raises HomeInUse.
    """
    lock = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise HomeInUse(
                f"home {home} is in use by another gpubroker daemon (process {holder}): stop that one, or choose "
                "another home"
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
    """Whether a daemon works in this home."""
    return is_locked(home / LOCK)


def check_blobs(folder: Path | None, home: Path) -> None:
    """Of a blob store that is a folder outside of the home; it is made with mode 0700 where it is missing.

    Others may be meant to read what jobs leave there, so that is only told in the log. None is a bucket. Raises
    InvalidInput for one that anybody can change, and for the folder of uploads on their way.
    """
    if folder is None:
        return
    if folder.resolve().is_relative_to((home / SPOOL).resolve()):
        message = f"{folder}: uploads on their way lie there, which each start removes; name another folder"
        raise InvalidInput(Problem(field="blobs", message=message))
    if folder.resolve().is_relative_to(home.resolve()):
        return
    try:
        private_folder(folder)
        mode = _mode(folder)
    except OSError as e:
        raise InvalidInput(Problem(field="blobs", message=f"{folder}: {e.strerror}; name another folder")) from None
    if mode & ANYBODY_WRITES:
        raise _open("blobs", folder, mode)
    if mode & OTHERS:
        log.warning("blobs: %s has mode %04o, so that others see data and results; chmod 700 closes it", folder, mode)


def _mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def _open(field: str, folder: Path, mode: int) -> InvalidInput:
    can = "change" if mode & ANYBODY_WRITES else "read"
    message = f"{folder} has mode {mode:04o}, so that others can {can} it; run chmod 700 on it, or name one below"
    return InvalidInput(Problem(field=field, message=message))


def _foreign(home: Path) -> InvalidInput:
    whose = f"{home} belongs to user id {home.stat().st_uid}, and this daemon runs as {os.geteuid()}"
    return InvalidInput(Problem(field="home", message=f"{whose}; run chown on it, or name another folder"))


def _unusable(home: Path, why: str | None) -> InvalidInput:
    return InvalidInput(Problem(field="home", message=f"{home}: {why}; name a folder that this user can write"))
