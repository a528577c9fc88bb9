"""A process that has imported what a daemon needs, and forks one as often as it is told: a start takes no imports.

It reads one order a line, `{"home": …, "cloud": …}`, forks a daemon and answers with its process number. It reaps
what dies, and ends all that lives when its orders end. The daemon is the product's own `broker.app.run`; only where
its machines come from, and how long rows are leased, are given to it here.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
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

LEASE_S = 1.5
PR_SET_PDEATHSIG = 1
READY = "ready"
"""A file in the home: `<process number>\\n` once it serves."""


def serve(order: dict[str, Any]) -> None:
    """Is the daemon, until killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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


def main() -> None:
    """The nursery itself. One thread, so a fork takes nothing along that is half done."""
    signal.signal(signal.SIGCHLD, _reap)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                serve(json.loads(line))
                code = 0
            except Exception as e:
                print(f"gpubroker serve: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        print(child, flush=True)


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
