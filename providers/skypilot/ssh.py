"""The way to launched machines: ssh, as the daemon and its part inside SkyPilot's API server use it.

Files are handed over in a pipe, so that no secret is in an argument list, of here or of there.
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
"""Until a machine that its cloud calls ready answers by SSH, as SkyPilot has it."""
REFUSE_S = 30.0
"""Until one that answers does what it is told: it may still be booting."""
TRY_S = 60.0
AGAIN_S = 1.0
DELIVER = "umask 077; mkdir -p ~/.gpubroker && tar -xf - -C ~/.gpubroker --no-same-owner"
START = "umask 077; exec bash ~/.gpubroker/start.sh"
_OPTIONS = (
    "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "IdentitiesOnly=yes", "LogLevel=ERROR",
    "BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=15",
)  # fmt: skip
_NO_WAY = 255
"""What ssh ends with when it does not get through."""


def argv(way: Mapping[str, Any], key: Path, *, tty: bool) -> list[str]:
    """Ssh to the machine of `way` (host, port, user, proxy); a word for the remote shell may be appended."""
    options = [*_OPTIONS, *([f"ProxyCommand={way['proxy']}"] if way.get("proxy") else [])]
    flags = [word for option in options for word in ("-o", option)]
    login = f"{way['user']}@{way['host']}"
    return ["ssh", "-F", "none", "-tt" if tty else "-T", "-i", str(key), "-p", str(way["port"]), *flags, login]


def packed(files: Mapping[str, str]) -> bytes:
    """A tar of files that only their owner reads."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, text in files.items():
            content = text.encode()
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o600
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def start(nodes: Sequence[tuple[Sequence[str], bytes]]) -> None:
    """Runs `start.sh` on machines, each an ssh and a tar with it, once all of them answer and have their files.

    Raises RuntimeError with what the first that does not said.
    """
    _on_all(nodes, lambda node, stop: _tell(node[0], DELIVER, node[1], stop))
    _on_all(nodes, lambda node, stop: _tell(node[0], START, b"", stop))


def _on_all(
    nodes: Sequence[tuple[Sequence[str], bytes]],
    do: Callable[[tuple[Sequence[str], bytes], threading.Event], None],
) -> None:
    """The first in this thread, which a cancelled launch interrupts, and the others beside it."""
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


def _tell(ssh: Sequence[str], command: str, given: bytes, stop: threading.Event) -> None:
    begun = time.monotonic()
    answered: float | None = None
    while True:
        try:
            done = subprocess.run([*ssh, command], input=given, capture_output=True, timeout=TRY_S)
            code, said = done.returncode, done.stderr.decode("utf-8", "replace").strip()
        except subprocess.TimeoutExpired:
            code, said = _NO_WAY, f"no answer within {TRY_S:g} s"
        if code == 0:
            return
        now = time.monotonic()
        if code != _NO_WAY:
            answered = answered or now
        late = now > begun + ANSWER_S or (answered is not None and now > answered + REFUSE_S)
        if late or stop.wait(AGAIN_S):
            raise RuntimeError(f"gpubroker: ssh to {ssh[-1]} ended with {code}: {said[-400:]}")
