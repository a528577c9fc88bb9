"""Script that becomes a PostgreSQL program; `broker.store.embedded.server` runs it, and no module imports it.

    python -I -S exec_postgres.py PARENT_PID FOLDER BINARY [ARGUMENT...]

The process gives up root, because PostgreSQL refuses to run as root. It asks the kernel for SIGINT when its parent
dies. Then it executes the binary, so the postmaster has its PID. There are two ways to give up root. The first is a
user namespace that shows root as `nobody`; files still belong to root. Where a container runtime forbids namespaces,
the process becomes uid `nobody` and keeps only the capability CAP_DAC_OVERRIDE. Neither way changes the mode of a
parent folder or copies a binary.
"""

import ctypes
import os
import signal
import sys

NOBODY = 65534
CLONE_NEWUSER = 0x10000000
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 1, 8, 47, 2
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_OVERRIDE = 1
# The daemon's environment may hold keys; PostgreSQL gets none of it.
ENVIRONMENT = {"LC_ALL": "C", "TZ": "UTC", "PATH": "/usr/local/bin:/usr/bin:/bin"}

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError with errno if the result of a libc call is not 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter_user_namespace() -> None:
    """Show this root process as `nobody` to itself; on disk and to the kernel it stays root without capabilities."""
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(CLONE_NEWUSER), "unshare(CLONE_NEWUSER)")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {uid} 1"),
        ("gid_map", f"{NOBODY} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def user_namespace_works(folder: str, binary: str) -> bool:
    """Return True if a forked child may enter a user namespace and can still reach both paths from there."""
    child = os.fork()
    if child == 0:
        reachable = False
        try:
            enter_user_namespace()
            reachable = os.access(os.path.dirname(folder), os.W_OK | os.X_OK) and os.access(binary, os.X_OK)
        finally:
            os._exit(0 if reachable else 1)
    return os.waitpid(child, 0)[1] == 0


def become_nobody() -> None:
    """Switch to uid `nobody`, keeping only CAP_DAC_OVERRIDE (ambient, so that it survives the exec)."""
    check(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl(PR_SET_KEEPCAPS)")
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    bit = 1 << CAP_DAC_OVERRIDE
    sets = (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0)  # effective, permitted, inheritable; low words, high words
    check(libc.capset(header, sets), "capset")
    check(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0), "prctl(PR_CAP_AMBIENT_RAISE)")


def give(folder: str, uid: int) -> None:
    """Make `uid` the owner of the tree. The top folder changes last, so an interrupted run is repeated."""
    if os.stat(folder).st_uid == uid:
        return
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            os.chown(os.path.join(parent, name), uid, -1, follow_symlinks=False)
        os.chown(parent, uid, -1)


def leave_root(folder: str, binary: str) -> None:
    """Give up root, and make the new user the owner of `folder`, because PostgreSQL requires that."""
    if user_namespace_works(folder, binary):
        give(folder, os.geteuid())
        enter_user_namespace()
    else:
        give(folder, NOBODY)
        become_nobody()


def main() -> None:
    """Give up root, ask the kernel for SIGINT when the parent dies, and execute the binary."""
    parent, folder, binary, *arguments = sys.argv[1:]
    try:
        if os.geteuid() == 0:
            leave_root(folder, binary)
        # Set after the change of user, because that change clears the setting. SIGINT is PostgreSQL's fast shutdown.
        check(libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != int(parent):
            sys.exit("FATAL:  the daemon ended while PostgreSQL was starting")
        os.execve(binary, [binary, *arguments], ENVIRONMENT)
    except OSError as error:
        sys.exit(f"FATAL:  cannot run {binary} as an ordinary user: {error}; run the daemon as a non-root user")


if __name__ == "__main__":
    main()
