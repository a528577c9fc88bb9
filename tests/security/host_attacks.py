"""Script of a job that attacks the daemon on its host. Prints `{attack: result}`; a blocked attack has null.

It uses the standard library only, because it runs as a job: `python host_attacks.py HOME DAEMON_PID`.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

HOME, DAEMON = Path(sys.argv[1]), int(sys.argv[2])
STORE = Path("/run/gpubroker/blobs")
LIBC = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH = 16
PRIVATE = ("/tmp", "/proc", os.environ["HOME"])


def read_file(name: str) -> str:
    return f"{len((HOME / name).read_bytes())} bytes"


def list_home() -> str:
    names = sorted(path.name for path in HOME.iterdir())
    return "" if set(names) <= {"blobs", "providers"} else str(names)


def other_blobs() -> str:
    """Return objects of other jobs. The store's folders lead to the job's own objects only."""
    if not STORE.is_dir():
        return "no store, so nothing was tried"
    files = [path for path in STORE.rglob("*") if path.is_file()]
    jobs = {path.relative_to(STORE).parts[2] for path in files if "checkpoints" in path.parts}
    data = {path.name.split(".")[0] for path in files if "data" in path.parts}
    uploads = [path for path in files if "uploads" in path.parts]
    return str((jobs, data, uploads)) if len(jobs | data) > 1 or uploads else ""


def database() -> str:
    elsewhere = [*Path("/tmp").glob("gpubroker-*"), *Path("/run/user").glob("*/gpubroker-*")]
    for folder in (HOME, *elsewhere):
        for path in folder.rglob(".s.PGSQL.5432"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                return f"connected to {path}"
    return ""


def daemons_environment() -> str:
    return f"{len(Path(f'/proc/{DAEMON}/environ').read_bytes())} bytes"


def other_processes() -> str:
    """Return processes that do not belong to this job."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().decode(errors="replace").replace("\0", " ")
        if "serve" in words.split() or "postgres" in words:
            commands.append(words)
    return str(commands or "")


def kill_daemon() -> str:
    os.kill(DAEMON, signal.SIGKILL)
    return "killed"


def trace_daemon() -> str:
    return "attached" if LIBC.ptrace(PTRACE_ATTACH, DAEMON, 0, 0) == 0 else ""


def trace_first_process() -> str:
    return "attached" if LIBC.ptrace(PTRACE_ATTACH, 1, 0, 0) == 0 else ""


def change_interpreter() -> str:
    path = Path(sysconfig.get_paths()["purelib"], "attack.pth")
    path.write_text("")
    return str(path)


def change_kernel_setting() -> str:
    Path("/proc/sys/kernel/core_pattern").write_text("|/tmp/x")
    return "written"


def become_root_of_the_host() -> str:
    os.setuid(0)
    return "uid 0" if Path("/proc/self/uid_map").read_text().split()[1] == "0" else ""


def read_host_root() -> str:
    return str(os.listdir("/proc/1/root/etc"))


def mount_the_disk() -> str:
    outcome = subprocess.run(["mount", "-t", "tmpfs", "x", "/tmp"], capture_output=True, check=False)
    return "mounted" if outcome.returncode == 0 else ""


def make_a_device() -> str:
    os.mknod("/tmp/disk", 0o060666, os.makedev(254, 0))
    return "made"


def link_in_store() -> str:
    """Return a symbolic link in the store, through which the daemon would read its key for the job's owner."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        target, options = line.split()[4:6]
        if options.startswith("rw") and target not in PRIVATE and not target.startswith("/dev/"):
            for name, make in (("link", lambda at: os.symlink(HOME / "master.key", at)), ("pipe", os.mkfifo)):
                try:
                    make(f"{target}/{name}")
                except OSError:
                    continue
                return f"{target}/{name}"
    return ""


def own_specification() -> str:
    for path in STORE.glob("*/attempts/*/spec.json"):
        path.unlink()
        return str(path)
    return ""


ATTACKS: dict[str, Callable[[], str]] = {
    "master key": lambda: read_file("master.key"),
    "client.json": lambda: read_file("client.json"),
    "configuration": lambda: read_file("gpubroker.yaml"),
    "home": list_home,
    "blobs of others": other_blobs,
    "database": database,
    "environment of the daemon": daemons_environment,
    "processes": other_processes,
    "kill": kill_daemon,
    "ptrace": trace_daemon,
    "ptrace of the first process": trace_first_process,
    "interpreter": change_interpreter,
    "kernel setting": change_kernel_setting,
    "root": become_root_of_the_host,
    "root folder": read_host_root,
    "mount": mount_the_disk,
    "device": make_a_device,
    "link in the store": link_in_store,
    "specification": own_specification,
}


def main() -> None:
    results: dict[str, str | None] = {}
    for name, attack in ATTACKS.items():
        try:
            results[name] = attack() or None
        except OSError:
            results[name] = None
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
