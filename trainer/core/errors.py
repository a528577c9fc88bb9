"""Failures of the worker, each with an exit code and one line, and the end of a process without teardown."""

import os
import sys
from typing import NoReturn

from trainer.contract.documents import ExitCode, Outcome


class Fault(Exception):
    """Base of faults: `code` is the worker's exit code, the message names the place and the fix."""

    code = ExitCode.INFRASTRUCTURE


class BadHost(Fault):
    """This machine is unfit; another machine may be fit."""


class UserFault(Fault):
    """The configuration is at fault."""

    code = ExitCode.USER_ERROR


class DataFault(Fault):
    """The dataset is at fault."""

    code = ExitCode.DATA


class Drained(Exception):
    """The agent requested a save and a stop; raised to leave the loop."""


def leave(code: int) -> NoReturn:
    """End the process without the interpreter's teardown.

    The object store's native threads may still handle a cancelled call. Such a thread in a half-finalised
    interpreter aborts the process, which loses the exit code. All data is written by now.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


EXIT = {
    Outcome.COMPLETED: ExitCode.COMPLETED,
    Outcome.DRAINED: ExitCode.DRAINED,
    Outcome.DEADMAN: ExitCode.DRAINED,
    Outcome.USER_ERROR: ExitCode.USER_ERROR,
    Outcome.DATA: ExitCode.DATA,
    Outcome.OOM: ExitCode.OOM,
    Outcome.INFRASTRUCTURE: ExitCode.INFRASTRUCTURE,
}
