"""Linux system calls that Python 3.11 lacks: mounts, capabilities and Landlock.

Used inside a sandbox by `providers.local.sandbox` and `providers.local.confinement`, with the standard library only.
"""

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
"""Numbers of system calls, which are the same on all architectures."""
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_LAST_CAPABILITY = 63
_MNT_DETACH = 2
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
RDONLY, NOSUID, NODEV = 1, 2, 4
"""Attributes for `restrict_mount`."""
_SPECIAL_FILES = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12
"""Landlock rights to create character devices, sockets, FIFOs, block devices and symbolic links."""
_REFER = 1 << 13
"""Landlock right to rename and link across folders; it exists since the second version."""
_ABSTRACT_SOCKETS = 1
"""Landlock scope that hides abstract UNIX sockets of other processes; it exists since the sixth version."""
LANDLOCK_NEEDED = 2


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount a file system. Raises OSError with the target."""
    _check(_LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()), f"mount {target}")


def restrict_mount(target: str, attributes: int, *, recursive: bool = True) -> None:
    """Set attributes of a mount, and of all mounts below it. Attributes that are set already stay. Raises OSError."""
    flags = _AT_RECURSIVE if recursive else 0
    request = struct.pack("=QQQQ", attributes, 0, 0, 0)
    result = _LIBC.syscall(_MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, request, len(request))
    _check(result, f"mount_setattr {target}")


def pivot_root(root: str) -> None:
    """Make `root`, a mount, the root folder of this mount namespace, and detach the former root. Raises OSError."""
    os.chdir(root)
    _check(_LIBC.pivot_root(b".", b"."), f"pivot_root {root}")
    _check(_LIBC.umount2(b".", _MNT_DETACH), "umount of the former root")
    os.chdir("/")


def drop_bounding_set() -> None:
    """Remove all capabilities from those that a later exec could gain. Raises OSError."""
    for capability in range(_LAST_CAPABILITY + 1):
        if _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            if capability:  # the first number above the kernel's last capability
                return
            _check(-1, "drop of capabilities")


def drop_capabilities() -> None:
    """Give up all capabilities of this process. Raises OSError."""
    header, zero_data = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _check(_LIBC.capset(header, zero_data), "capset")


def refuse_new_privileges() -> None:
    """Keep this process and its children from gaining rights by setuid programs. Raises OSError."""
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0: it has none."""
    return max(0, int(_LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1)))


def restrict_special_files(allowed: Iterable[Path]) -> None:
    """Forbid the creation of symbolic links, FIFOs, sockets and devices outside the folders `allowed`.

    The daemon follows links below its blob store, so a job must not be able to place one there. Needs no_new_privs.
    Raises OSError.
    """
    version = landlock_version()
    if version < LANDLOCK_NEEDED:
        raise OSError(f"Landlock has version {version}; a kernel with version {LANDLOCK_NEEDED} is needed (Linux 5.19)")
    attributes = struct.pack("=QQQ", _SPECIAL_FILES | _REFER, 0, _ABSTRACT_SOCKETS)
    size = 24 if version >= 6 else 8
    rules = _LIBC.syscall(_LANDLOCK_CREATE, attributes, size, 0)
    _check(rules, "landlock_create_ruleset")
    _allow(rules, Path("/"), _REFER)
    for folder in allowed:
        _allow(rules, folder, _SPECIAL_FILES | _REFER)
    _check(_LIBC.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, folder: Path, rights: int) -> None:
    place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        _check(_LIBC.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, place), 0), f"landlock {folder}")
    finally:
        os.close(place)


def _check(result: int, action: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")
