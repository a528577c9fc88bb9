"""SSH access to launched machines, for the daemon and for the plugin inside SkyPilot's API server.

A file of the attempt pins its machines' host keys: `host_keys` writes the key that a machine gets at its create;
otherwise the first contact pins what the machine shows. Another key stops the connection.
Files travel through a pipe, so that no secret appears in an argument list of either machine.
"""

import io
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ANSWER_S = 600.0
"""Seconds within which a machine that its cloud lists as ready must answer by SSH; SkyPilot uses the same limit."""
COMMAND_RETRY_S = 30.0
"""Seconds for which a failing command is repeated on a machine that answers but may still be booting."""
TRY_S = 60.0
"""Timeout of one SSH call in seconds."""
RETRY_DELAY_S = 1.0
"""Seconds between two SSH calls."""
DELIVER = "umask 077; mkdir -p ~/.gpubroker && tar -xf - -C ~/.gpubroker --no-same-owner"
START = "umask 077; exec bash ~/.gpubroker/start.sh"
_OPTIONS = (
    "GlobalKnownHostsFile=/dev/null", "UpdateHostKeys=no", "IdentitiesOnly=yes",
    "LogLevel=ERROR", "BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=15",
)  # fmt: skip
KNOWN_HOSTS = "known_hosts"
"""Subfolder of the state folder with a file for each cluster, which is one attempt."""
ANY_HOST = "* "
"""Begin of a file with a key that was given to the machines at their create. It holds for every address."""
_REFUSED_KEY = "Host key verification failed"
"""Text of ssh about a machine that shows another host key than the pinned one."""
_SSH_FAILED = 255
"""Exit code of ssh for a failed connection."""


def known_hosts_file(state: Path, cluster: str) -> Path:
    """Return the file with the pinned host keys of a cluster. Its folder exists afterwards, the file may not."""
    folder = state / KNOWN_HOSTS
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / Path(cluster).name


def changed_key_message(target: str, output: str) -> str | None:
    """Return an error if the output of ssh says that a machine shows another host key; None: it does not."""
    if _REFUSED_KEY not in output:
        return None
    return (
        f"ssh to {target} stopped: the machine shows another host key than the pinned one, so it was replaced or "
        "the connection is intercepted; nothing was sent; `gpubroker cancel` ends the job and its machine"
    )


def argv(login: Mapping[str, Any], key: Path, known_hosts: Path, *, tty: bool) -> list[str]:
    """Return the ssh command for `login` (host, port, user, proxy).

    The caller may append one argument, the command for the remote shell. ssh reads the path of `known_hosts` as a word
    of its configuration, in which `%` begins a variable. `accept-new` would accept a key of another type in addition to
    the given one.
    """
    is_given = known_hosts.exists() and known_hosts.read_text().startswith(ANY_HOST)
    pinned = str(known_hosts).replace("%", "%%")
    options = [
        *_OPTIONS,
        f"StrictHostKeyChecking={'yes' if is_given else 'accept-new'}",
        f'UserKnownHostsFile="{pinned}"',
        *([f"ProxyCommand={login['proxy']}"] if login.get("proxy") else []),
    ]
    flags = [word for option in options for word in ("-o", option)]
    target = f"{login['user']}@{login['host']}"
    return ["ssh", "-F", "none", "-tt" if tty else "-T", "-i", str(key), "-p", str(login["port"]), *flags, target]


def owner_only_tar(files: Mapping[str, str]) -> bytes:
    """Return a tar archive of `files` (text by name) that only their owner may read."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, text in files.items():
            content = text.encode()
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o600
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def start_tasks(nodes: Sequence[tuple[Sequence[str], bytes]]) -> None:
    """Run `start.sh` on all machines after each of them has received its files.

    `nodes`: the ssh command and the tar archive of each machine.
    Raises RuntimeError with the output of the first machine that fails.
    """
    _on_all(nodes, lambda node, stop: _run_remote(node[0], DELIVER, node[1], stop))
    _on_all(nodes, lambda node, stop: _run_remote(node[0], START, b"", stop))


def _on_all(
    nodes: Sequence[tuple[Sequence[str], bytes]],
    do: Callable[[tuple[Sequence[str], bytes], threading.Event], None],
) -> None:
    """Call `do` for all nodes at once: in this thread for the first node, in a pool for the other nodes.

    If the launch is cancelled, an exception interrupts this thread, which then stops the retries in the pool.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(max(1, len(nodes) - 1)) as pool:
        others = [pool.submit(do, node, stop) for node in nodes[1:]]
        try:
            do(nodes[0], stop)
            for other in others:
                other.result()
        except BaseException:
            stop.set()
            raise


def _run_remote(ssh: Sequence[str], command: str, stdin: bytes, stop: threading.Event) -> None:
    started_at = time.monotonic()
    answered_at: float | None = None
    while True:
        try:
            process = subprocess.run([*ssh, command], input=stdin, capture_output=True, timeout=TRY_S)
            exit_code, output = process.returncode, process.stderr.decode("utf-8", "replace").strip()
        except subprocess.TimeoutExpired:
            exit_code, output = _SSH_FAILED, f"no answer within {TRY_S:g} s"
        if exit_code == 0:
            return
        if exit_code == _SSH_FAILED and (changed := changed_key_message(ssh[-1], output)):
            raise RuntimeError(f"gpubroker: {changed}")
        now = time.monotonic()
        if exit_code != _SSH_FAILED:
            answered_at = answered_at or now
        is_late = now > started_at + ANSWER_S or (answered_at is not None and now > answered_at + COMMAND_RETRY_S)
        if is_late or stop.wait(RETRY_DELAY_S):
            raise RuntimeError(f"gpubroker: ssh to {ssh[-1]} ended with {exit_code}: {output[-400:]}")
