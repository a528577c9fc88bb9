"""Messages for a full disk: bytes needed, bytes free, the limit and the fix."""

import errno
import resource
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_MESSAGES = tuple(
    f"{words} {number}{end}" for number in FULL for words, end in (("(os error", ")"), ("[errno", "]"))
)
"""Parts of the error messages of stores and `shutil` for a full disk, in lower case."""


def is_full(error: BaseException) -> bool:
    """Return True if the error is due to a full disk."""
    return getattr(error, "errno", None) in FULL or any(words in str(error).lower() for words in FULL_MESSAGES)


def disk_full_message(folder: Path, needed_bytes: int) -> str:
    """Return the message for a full disk.

    `needed_bytes`: bytes to be written in all. `folder`: target; the nearest existing parent is checked.
    """
    existing = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(existing).free
    space = f"about {format_bytes(needed_bytes)} are wanted, {format_bytes(free)} are free at {folder}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return f"{space}; free space there, or use a larger disk"
    limit_text = format_bytes(limit)
    return f"{space}, and no file may have more than {limit_text}; raise that limit (ulimit -f), or free space there"


def format_bytes(count: int) -> str:
    """Return a number of bytes for users."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def tree_bytes(folder: Path) -> int:
    """Return the bytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
