"""How the worker fails: every fault carries the exit code that tells the agent whose it is, and one line."""

from trainer.contract.documents import ExitCode


class Fault(Exception):
    """Base: `code` is the worker's exit code, the message names the place and the fix."""

    code = ExitCode.INFRASTRUCTURE


class BadHost(Fault):
    """This machine is not fit; another one may be."""


class UserFault(Fault):
    """The configuration is at fault."""

    code = ExitCode.USER_ERROR


class DataFault(Fault):
    """The data set is at fault."""

    code = ExitCode.DATA


class Drained(Exception):
    """The agent asked to save and stop; raised where the loop can be left."""
