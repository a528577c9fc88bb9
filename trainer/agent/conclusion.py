"""Outcome of an attempt from the end of its program: pure rules on facts that `AttemptLifecycle` gathers."""

import signal
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainer.agent.base.state import Ending
from trainer.contract.documents import ExitCode, Outcome
from trainer.core.ipc import Ended

OUTCOMES: dict[int, Outcome] = {
    ExitCode.COMPLETED: Outcome.COMPLETED,
    ExitCode.DRAINED: Outcome.DRAINED,
    ExitCode.USER_ERROR: Outcome.USER_ERROR,
    ExitCode.DATA: Outcome.DATA,
    ExitCode.OOM: Outcome.OOM,
    ExitCode.INFRASTRUCTURE: Outcome.INFRASTRUCTURE,
}


@dataclass(frozen=True, kw_only=True)
class ProgramEnd:
    """Facts about the end of the worker or of the user's program."""

    code: int
    """Exit code; negative: the number of a signal."""
    script: bool
    asked: bool
    """True if the program was asked to end while it ran."""
    stopped: bool
    """True if the agent killed the program."""
    killed_for_memory: bool
    """True if the kernel killed a process of this control group for memory."""
    report: Ended | None
    """Report of the worker; None: it is a script, or it ended without a report."""
    last_line: str
    """Last line of the program's output."""


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """Meaning of the end of a program, before its last checkpoints are uploaded."""

    outcome: Outcome
    code: int
    message: str
    """Reason of a failure."""
    ran_out: Literal["device", "host"] | None
    """Memory that ran out; None: neither, or unknown."""
    bad_host: bool
    failed_by_peer: bool
    """True if the worker failed only because a process of another machine ended."""


class AttemptEnd(NamedTuple):
    """Outcome of an attempt, its message, and the program's exit code."""

    outcome: Outcome
    message: str
    code: int


def exit_outcome(code: int, *, script: bool, end_requested: bool, killed_for_memory: bool) -> Outcome:
    """Return the outcome of an exit code.

    A script that ends after it was asked to end is drained, unless its exit code is one of `OUTCOMES` for a failure.
    Unknown codes count as drained too, because torchrun then ends with 1.
    """
    if code not in OUTCOMES and killed_for_memory:
        return Outcome.OOM
    if script and end_requested and (code == 0 or code not in OUTCOMES):
        return Outcome.DRAINED
    return OUTCOMES.get(code, Outcome.USER_ERROR if script else Outcome.INFRASTRUCTURE)


def program_result(end: ProgramEnd) -> ProgramResult:
    """Return the meaning of a program's end."""
    report, code, bad_host, failed_by_peer = _own_report(end), end.code, False, False
    if report is not None and not end.stopped:
        # BACK without a new worker counts as drained: an end was requested during the rollback.
        code = ExitCode.DRAINED if report.code == ExitCode.BACK else report.code
        bad_host, failed_by_peer = report.bad_host, report.failed_by_peer
    outcome = exit_outcome(code, script=end.script, end_requested=end.asked, killed_for_memory=end.killed_for_memory)
    killed = outcome is Outcome.OOM and report is None and end.killed_for_memory
    ran_out: Literal["device", "host"] | None = None
    if outcome is Outcome.OOM:
        ran_out = "host" if killed else report.ran_out if report is not None else None
    message = (report.message if report is not None else "") or exit_message(end, code)
    return ProgramResult(
        outcome=Outcome.DRAINED if end.stopped else outcome,
        code=code,
        message="the kernel killed it for memory: the machine's own is too small" if killed else message,
        ran_out=ran_out,
        bad_host=bad_host,
        failed_by_peer=failed_by_peer,
    )


def _own_report(end: ProgramEnd) -> Ended | None:
    """Return the worker's report, or None if a kill of this machine's own process is the real cause.

    The report then only states that another process ended.
    """
    failed_by_peer = end.report is not None and end.report.failed_by_peer
    return None if failed_by_peer and end.code == 128 + signal.SIGKILL else end.report


def exit_message(end: ProgramEnd, code: int) -> str:
    """Return the message for a program that reported no reason."""
    how = f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
    last = f"; its last line: {end.last_line}" if end.last_line else ""
    return f"the {'program' if end.script else 'worker'} ended with {how}{last}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return str(number)


def attempt_end(result: ProgramResult, *, uploaded: bool, ending: Ending | None) -> AttemptEnd:
    """Return the end of the attempt; `uploaded`: the blob store has everything that the program saved.

    `ending`: why the attempt had to end early; None: it did not. The caller still verifies the results of a completed
    attempt.
    """
    outcome, code = result.outcome, result.code
    if outcome is Outcome.COMPLETED:
        if uploaded:
            return AttemptEnd(outcome, "", code)
        if ending is not None:
            return AttemptEnd(ending.outcome, f"{ending.reason}, before the results were in the blob store", code)
        return AttemptEnd(Outcome.INFRASTRUCTURE, "the results could not be written to the blob store in time", code)
    if outcome is Outcome.DRAINED and ending is not None:
        return AttemptEnd(ending.outcome, ending.reason, code)
    if outcome is Outcome.DRAINED:
        return AttemptEnd(outcome, "another machine of this job must end, so all machines end", code)
    return AttemptEnd(outcome, result.message, code)
