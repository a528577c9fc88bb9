"""Forks daemons; an order is `{"home": …, "cloud": …}`, and for some `full`, `die_at` or a second cloud, `busy`.

The daemon is the product's own, with the test's clouds and a shorter lease of rows.
"""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import broker.daemon.app
from broker.controllers.base.context import Intervals
from broker.daemon.config import DaemonConfig
from broker.daemon.log_setup import set_up
from broker.domain.ids import Installation
from broker.lifecycle.decisions import launch_decision
from broker.runtime.provider_gate import gated
from tests.crash.forks import keep
from tests.crash.loopback_cloud import NAME, LoopbackProvider

LEASE_S = 1.5
BUSY = "busy"
"""The second cloud's name."""
READY = "ready"
"""A file in the home: `<process number>\\n` once it serves."""


def serve(order: dict[str, Any]) -> None:
    """Run the daemon until it is killed."""
    home = Path(order["home"])
    log = os.open(home / "daemon.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    if order.get("full"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    if "die_at" in order:
        sys.addaudithook(Watch(home, order["die_at"]).hears)
    config = DaemonConfig.load(home=home)
    _furnish({NAME: order["cloud"]} | ({BUSY: order["busy"]} if "busy" in order else {}))
    set_up("INFO")
    with asyncio.Runner() as runner:
        runner.run(broker.daemon.app.run(config, ready=lambda _: _tell(home)))


def _furnish(clouds: dict[str, str]) -> None:
    """Replace the providers with the clouds at these addresses, and shorten leases and the polls of launches.

    With several clouds each has a rate limiter, as rented clouds have.
    """
    intervals_of = broker.daemon.app.intervals_of

    def build(*_: Any, installation: Installation, state: Path, **__: Any) -> dict[str, LoopbackProvider]:
        return {name: LoopbackProvider(url, installation, state / name, name) for name, url in clouds.items()}

    def shorter(config: DaemonConfig) -> Intervals:
        return replace(intervals_of(config), lease_s=LEASE_S)

    broker.daemon.app.build = build  # type: ignore[attr-defined, assignment]
    broker.daemon.app.intervals_of = shorter
    if len(clouds) > 1:
        broker.daemon.app.gated = lambda providers, rented, clock: gated(providers, clouds, clock)  # type: ignore[attr-defined]
    launch_decision.CREATE_POLL_S = 0.3


def _tell(home: Path) -> None:
    draft = home / f"{READY}.{os.getpid()}"
    with contextlib.suppress(OSError):  # the disk may be full
        draft.write_text(f"{os.getpid()}\n")
        draft.replace(home / READY)


class Watch:
    """Observer of every effect on a file of the home, just before the effect. It logs the effect in a file next to the
    home. It kills the process at the effect number `die_at` (-1: never)."""

    def __init__(self, home: Path, die_at: int) -> None:
        self._home, self._die_at, self._seen = f"{home}/", die_at, 0
        self._log = os.open(watched(home), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def hears(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EFFECTS or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        path = arguments[EFFECTS[event]]
        path = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(path, str) or not path.startswith(self._home) or Path(path).name.startswith(READY):
            return
        os.write(self._log, f"{event} {path.removeprefix(self._home)}\n".encode())
        if self._seen == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self._seen += 1


EFFECTS = {"open": 0, "os.rename": 1, "os.link": 1, "os.remove": 0, "os.mkdir": 0, "os.chmod": 0, "os.truncate": 0}
"""Audit events of Python, and the index of the argument that is the file."""


def watched(home: Path) -> Path:
    """Return the path of the log of effects."""
    return home.with_name(f"{home.name}.watched")


if __name__ == "__main__":
    keep(serve)
