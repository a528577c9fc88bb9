"""Process that has imported all modules and forks a child for each order, so that a child's start takes no imports.

It reads one order per line, as JSON, forks a child that carries out the order, and answers with the child's PID. It
reaps its children, and kills all of them at the end of its input.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1


def keep(carry_out: Callable[[dict[str, Any]], None]) -> None:
    """Run the nursery. It has one thread, so that a fork copies no half-finished work."""
    signal.signal(signal.SIGCHLD, _reap)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _child(carry_out, json.loads(line))
        print(child, flush=True)


def _child(carry_out: Callable[[dict[str, Any]], None], order: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    code = 1
    try:
        carry_out(order)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    keep(lambda order: time.sleep(order["seconds"]))  # for tests of the process that gives the orders
