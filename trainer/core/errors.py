"""Failures of the worker: each carries an exit code, from which the agent derives the cause, and one line."""

from trainer.contract.documents import ExitCode


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
