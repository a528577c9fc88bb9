"""Proof that a machine cannot see or touch the host: root inside the machine searches for planted objects."""

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

CHECKOUT = Path(__file__).parent.parent.parent
PROBE = Path(__file__).with_name("root") / "probe.py"
NAMESPACES = ("mnt", "pid", "net", "uts", "ipc", "user", "cgroup")


class NotIsolated(RuntimeError):
    """Raised if a machine can see or touch the host, with the findings. No machine is booted then."""


class Inside(Protocol):
    async def run(self, *argv: str) -> tuple[int, str]:
        """Return exit status and output of a command run inside as root."""
        ...


@contextmanager
def planted() -> Iterator[Mapping[str, Any]]:
    """Yield objects of the host that a machine must not find, in the probe's format."""
    marker = f"marker-of-the-host-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory() as folder, socket.socket() as tcp:
        file, path = Path(folder, marker), str(Path(folder, f"{marker}.sock"))
        file.write_text(marker)
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        with socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_UNIX) as abstract:
            unix.bind(path)
            unix.listen()
            abstract.bind(f"\0{marker}")
            abstract.listen()
            process = subprocess.Popen([sys.executable, "-c", "input()", marker], stdin=subprocess.PIPE)
            try:
                yield {
                    "marker": marker, "process": marker, "hostname": socket.gethostname(),
                    "paths": [str(file), str(CHECKOUT / "pyproject.toml"), str(Path(__file__))],
                    "tcp": tcp.getsockname(), "unix": path, "abstract": marker,
                    "namespaces": {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES},
                }  # fmt: skip
            finally:
                process.kill()
                process.communicate()


def found_on_host(facts: Mapping[str, Any]) -> list[str]:
    """Return the probe's findings on the host itself, where it must find everything to prove anything."""
    facts = {**facts, "on_host": True, "walk": str(Path(facts["unix"]).parent)}
    done = subprocess.run([sys.executable, "-I", PROBE, json.dumps(facts)], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


async def found_inside(machine: Inside, facts: Mapping[str, Any]) -> list[str]:
    code, output = await machine.run("/usr/bin/python3", "-I", "-c", PROBE.read_text(),
                                     json.dumps({**facts, "on_host": False, "walk": "/"}))  # fmt: skip
    if code != 0:
        raise NotIsolated(f"the probe failed inside: {output[-500:]}")
    found: list[str] = json.loads(output)
    return found


async def prove(machine: Inside) -> None:
    """Return if the probe finds everything on the host and nothing inside. Raises NotIsolated."""
    with planted() as facts:
        seen = await asyncio.to_thread(found_on_host, facts)
        expected = [f"sees {path}" for path in facts["paths"]] + ["sees process", "connects to", "has the host's name"]
        expected += [f"shares the host's {kind} namespace" for kind in NAMESPACES]
        for words in expected:
            if not any(line.startswith(words) for line in seen):
                raise NotIsolated(f"the probe proves nothing: on the host itself it did not find '{words}'")
        leaks = await found_inside(machine, facts)
    if leaks:
        raise NotIsolated(f"a machine {'; '.join(leaks)}")
