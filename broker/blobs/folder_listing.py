"""Listing of a blob store in a folder that holds names which obstore refuses.

A job on the daemon's host writes below its own prefixes. One file with such a name must not hide the objects of others.
"""

import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from broker.ports import BlobInfo

_STAGED = re.compile(r"#\d+$")
"""End of the name of an object that obstore is writing."""


def list_folder(root: Path, prefix: str) -> Iterator[BlobInfo]:
    """Yield the objects below `<root>/<prefix>`, without links, special files and unusable names.

    A folder that its owner closed to this process counts as empty. Raises OSError for any other fault of the disk.
    """
    return _objects(root / prefix, prefix)


def _objects(folder: Path, prefix: str) -> Iterator[BlobInfo]:
    try:
        with os.scandir(folder) as entries:
            names = [entry for entry in entries if _is_usable(entry.name)]
    except (PermissionError, FileNotFoundError):
        return
    for entry in names:
        if entry.is_dir(follow_symlinks=False):
            yield from _objects(Path(entry.path), f"{prefix}{entry.name}/")
        elif entry.is_file(follow_symlinks=False):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            etag = f'"{status.st_ino:x}-{status.st_mtime_ns // 1000:x}-{status.st_size:x}"'
            written_at = datetime.fromtimestamp(status.st_mtime, UTC)
            yield BlobInfo(key=prefix + entry.name, bytes=status.st_size, etag=etag, written_at=written_at)


def _is_usable(name: str) -> bool:
    """Return False for control characters, bytes that are not UTF-8, and objects that are being written."""
    return name.isprintable() and not _STAGED.search(name)
