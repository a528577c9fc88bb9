"""Searches for the host from inside a machine as root: `python3 -I -c … FACTS`. Prints a JSON list of findings.

FACTS describes objects that exist outside, created by tests/clouds/isolation.py. On the host the probe must find all.
"""

import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MOUNTS = {"overlay", "proc", "tmpfs", "devpts"}
DEVICES = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "console"}
UNWRITABLE = (
    "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/drop_caches",
    "/proc/kcore", "/dev/mem", "/dev/kmsg",
)  # fmt: skip


def files(facts: dict[str, Any]) -> Iterator[str]:
    for path in facts["paths"]:
        for seen in (path, f"/proc/1/root{path}"):
            if os.path.lexists(seen):
                yield f"sees {seen}"
    for folder, folders, entries in os.walk(facts["walk"]):
        if folder == "/":
            folders[:] = [name for name in folders if name not in ("proc", "sys")]
        for name in entries:
            if facts["marker"] in name:
                yield f"sees {folder}/{name}"


def beyond_chroot(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the classic way out of a chroot, which pivot_root closes."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.makedirs("/tmp/probe", exist_ok=True)
        os.chroot("/tmp/probe")
        for _ in range(64):
            os.chdir("..")
        os.chroot(".")
        os.write(write, b"".join(path.encode() + b"\n" for path in facts["paths"] if os.path.lexists(path)))
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read, encoding="utf-8") as found:
        for line in found:
            yield f"reaches {line.strip()} by chroot"


def processes(facts: dict[str, Any]) -> Iterator[str]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if int(file.parent.name) != os.getpid() and facts["process"] in file.read_text(errors="replace"):
                yield f"sees process {file.parent.name} of the host"
        except OSError:
            continue


def names(facts: dict[str, Any]) -> Iterator[str]:
    if socket.gethostname() == facts["hostname"]:
        yield "has the host's name"
    for kind, identity in facts["namespaces"].items():
        if os.readlink(f"/proc/self/ns/{kind}") == identity:
            yield f"shares the host's {kind} namespace"
    inside, outside, _ = Path("/proc/self/uid_map").read_text().split()[:3]
    if inside == outside:
        yield "its root is the host's root"


def mounts(facts: dict[str, Any]) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point, kind = left.split()[4], right.split()[0]
        is_device = point.startswith("/dev/") and stat.S_ISCHR(os.stat(point).st_mode)
        if kind not in MOUNTS and not is_device:
            yield f"has a {kind} mounted on {point}"


def network(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the host's addresses and sockets that can be reached; `names` checks the network namespace."""
    addresses: list[Any] = [tuple(facts["tcp"]), facts["unix"], "\0" + facts["abstract"]]
    for address in addresses:
        with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as sock:
            sock.settimeout(2)
            try:
                sock.connect(address)
            except OSError:
                continue
            yield f"connects to {address!r} of the host"
    for line in Path("/proc/net/unix").read_text().splitlines():
        if facts["marker"] in line:
            yield "sees the host's unix sockets"
    for _, interface in socket.if_nameindex():
        if interface not in ("lo", "eth0", "sit0", "tunl0", "ip6tnl0"):
            yield f"has the network interface {interface}"


def devices(facts: dict[str, Any]) -> Iterator[str]:
    for path in Path("/dev").rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and path.name not in DEVICES and path.parent.name != "pts"):
            yield f"has the device {path}"
    for kind in (stat.S_IFBLK, stat.S_IFCHR):
        try:
            os.mknod("/tmp/probe-node", kind | 0o600, os.makedev(8, 0) if kind == stat.S_IFBLK else os.makedev(1, 1))
        except OSError:
            continue
        try:
            os.close(os.open("/tmp/probe-node", os.O_RDONLY))
            yield "makes and opens devices"
        except OSError:
            pass
        os.unlink("/tmp/probe-node")
    for name in UNWRITABLE:
        try:
            os.close(os.open(name, os.O_WRONLY))
        except OSError:
            continue
        yield f"may write {name}"


HARMLESS: tuple[Callable[[dict[str, Any]], Iterator[str]], ...] = (files, processes, names, network)
"""Checks that change nothing, so that they can also run on the host."""


def main() -> None:
    facts = json.loads(sys.argv[1])
    looks = HARMLESS if facts["on_host"] else (*HARMLESS, beyond_chroot, mounts, devices)
    print(json.dumps([found for look in looks for found in look(facts)]))


if __name__ == "__main__":
    main()
