"""Forks daemons; an order is `{"home": …, "cloud": …}`.

The daemon is the product's own `broker.app.run`; only where its machines come from, and how long rows are leased, are
given to it here.
"""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

import broker.app
from broker.config import DaemonConfig
from broker.controllers import launch
from broker.controllers.context import Rhythm
from broker.domain.ids import Installation
from broker.logs import set_up
from tests.crash.cloud import NAME, PaperProvider
from tests.crash.forks import keep

LEASE_S = 1.5
READY = "ready"
"""A file in the home: `<process number>\\n` once it serves."""


def serve(order: dict[str, Any]) -> None:
    """Is the daemon, until killed."""
    home = Path(order["home"])
    log = os.open(home / "daemon.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    config = DaemonConfig.load(home=home)
    _furnish(order["cloud"])
    set_up("INFO")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(broker.app.run(config, ready=lambda _: _tell(home)))


def _furnish(cloud: str) -> None:
    """The cloud at that address, leases that the dead hold for a moment only, and early looks at what was launched."""
    rhythm_of = broker.app.rhythm_of

    def build(*_: Any, installation: Installation, state: Path, **__: Any) -> dict[str, PaperProvider]:
        return {NAME: PaperProvider(cloud, installation, state / NAME)}

    def shorter(config: DaemonConfig) -> Rhythm:
        return replace(rhythm_of(config), lease_s=LEASE_S)

    broker.app.build = build  # type: ignore[attr-defined, assignment]
    broker.app.rhythm_of = shorter
    launch.CREATE_LOOK_S = 0.3


def _tell(home: Path) -> None:
    draft = home / f"{READY}.{os.getpid()}"
    draft.write_text(f"{os.getpid()}\n")
    draft.replace(home / READY)


if __name__ == "__main__":
    keep(serve)
