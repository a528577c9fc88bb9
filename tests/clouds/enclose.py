"""Runs one program in its own namespaces, over its own root file system: `python -I enclose.py CONFIG`.

CONFIG is JSON. The program is process 1; it dies when the other end of the pipe `life` is closed.

  - `lower`: [path…]: read-only layers, uppermost first, with `upper`: a folder that has `up` and `work`
  - `root`: path: instead of both: this folder itself, writable (the bake)
  - `base`: n: user ids 0…65535 inside are n…n+65535 outside; without it the user namespace is the caller's
  - `network`: own|host
  - `binds`: [[path outside, path inside, read-only]…]
  - `argv`, `env`, `life`: fd, `keep`: [fd…]

There are two mount namespaces. In the first, the caller's user binds the files of the second under paths that the
second's user can reach. All other work happens in the second, in the machine's own user namespace.
"""

import ctypes
import json
import os
import select
import signal
import stat
import sys
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x20000000, 0x40000000, 0x2000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE, MNT_DETACH = 16384, 1 << 18, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
IDS = 65536
GATHERED = "/tmp"  # a tmpfs that only these mount namespaces have
STAGE = f"{GATHERED}/root"

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    check(libc.mount(*arguments), f"mount {kind or 'bind'} on {target}")


def bind(source: str, target: str, *, read_only: bool) -> None:
    mount(source, target, "", MS_BIND)
    if read_only:
        mount("none", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def gather(config: dict[str, Any]) -> None:
    """Bring the folders of `config` to where the machine's user can reach them."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    gathered = [(path, f"lower{n}", True) for n, path in enumerate(config.get("lower", ()))]
    gathered += [(config["upper"], "upper", False)] if "upper" in config else [(config["root"], "root", False)]
    gathered += [(path, f"bind{n}", read_only) for n, (path, _, read_only) in enumerate(config.get("binds", ()))]
    # Opened before the tmpfs hides what lies below it.
    opened = [(os.open(path, os.O_PATH), name, read_only) for path, name, read_only in gathered]
    mount("tmpfs", GATHERED, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    os.makedirs(STAGE)
    for fd, name, read_only in opened:
        target = Path(GATHERED, name)
        target.mkdir(exist_ok=True) if stat.S_ISDIR(os.fstat(fd).st_mode) else target.touch()
        bind(f"/proc/self/fd/{fd}", str(target), read_only=read_only)
        os.close(fd)


def mount_root(config: dict[str, Any]) -> None:
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    if "lower" not in config:
        return
    lower = ":".join(f"{GATHERED}/lower{n}" for n, _ in enumerate(config["lower"]))
    options = f"lowerdir={lower},upperdir={GATHERED}/upper/up,workdir={GATHERED}/upper/work,userxattr"
    mount("overlay", STAGE, "overlay", MS_NODEV, options)


def mount_devices() -> None:
    dev = f"{STAGE}/dev"
    mount("tmpfs", dev, "tmpfs", MS_NOSUID, "mode=755,size=64k")
    for name in DEVICES:
        Path(dev, name).touch()
        bind(f"/dev/{name}", f"{dev}/{name}", read_only=False)
    for name in ("pts", "shm"):
        os.mkdir(f"{dev}/{name}")
    mount("devpts", f"{dev}/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
    mount("tmpfs", f"{dev}/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd"}
    links |= {name: f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))}
    for name, target in links.items():
        os.symlink(target, f"{dev}/{name}")


def mount_rest(config: dict[str, Any]) -> None:
    mount("proc", f"{STAGE}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("tmpfs", f"{STAGE}/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    mount("tmpfs", f"{STAGE}/sys", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755,size=64k")
    os.mkdir(f"{STAGE}/sys/none")  # debootstrap mounts the real one over an empty /sys
    mount("none", f"{STAGE}/sys", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for n, (_, inside, read_only) in enumerate(config.get("binds", ())):
        source, target = Path(GATHERED, f"bind{n}"), Path(STAGE + inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(exist_ok=True) if source.is_dir() else target.touch()
        bind(str(source), str(target), read_only=read_only)


def leave_host() -> None:
    """Make STAGE the root and detach the old root, so that no path leads back."""
    os.chdir(STAGE)
    check(libc.pivot_root(b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def become_init(config: dict[str, Any]) -> None:
    mount_root(config)
    mount_devices()
    mount_rest(config)
    leave_host()
    for fd in config.get("keep", ()):
        os.set_inheritable(fd, True)  # all others close at exec
    os.setsid()
    os.umask(0o022)
    os.execve(config["argv"][0], config["argv"], config["env"])


def map_users(pid: int, base: int) -> None:
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(f"0 {base} {IDS}\n")


def enter_namespaces(config: dict[str, Any]) -> None:
    check(libc.unshare(CLONE_NEWNS), "unshare")
    gather(config)
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWCGROUP
    if config["network"] == "own":
        flags |= CLONE_NEWNET
    if "base" not in config:
        return check(libc.unshare(flags), "unshare")
    entered_r, entered_w = os.pipe()
    mapper = os.fork()
    if mapper == 0:  # stays in the old user namespace, whose root may write the map
        os.read(entered_r, 1)
        map_users(os.getppid(), config["base"])
        os._exit(0)
    check(libc.unshare(flags | CLONE_NEWUSER), "unshare")
    os.write(entered_w, b"x")
    if os.waitpid(mapper, 0)[1] != 0:
        raise OSError("could not map the user ids")
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")


def tend(child: int, life: int) -> int:
    """Wait for process 1, and kill it when the other end of `life` is closed."""
    pidfd = os.pidfd_open(child)
    if life in select.select([life, pidfd], [], [])[0]:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    config = json.loads(sys.argv[1])
    for fd in (config["life"], *config.get("keep", ())):
        os.set_inheritable(fd, False)
    try:
        enter_namespaces(config)
        child = os.fork()
        if child == 0:
            check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
            become_init(config)
    except OSError as e:
        sys.exit(f"enclose: {e.args[-1]}")
    code = tend(child, config["life"])
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
