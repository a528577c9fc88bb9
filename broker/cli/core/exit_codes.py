"""Exit codes that scripts can rely on, and the errors that carry them.

CliError
├── BadInput         2   an argument, a spec or a data set is at fault
├── NotFound         3   no such job, token, secret, file
├── Unreachable      4   no daemon answers
├── Unauthorised     5   no token, a wrong one, or one without the scope
├── Capped           6   the job reached its cap
├── JobFailed        1   the job failed or was cancelled
├── Refused          7   the person said no
├── ServerProblem    8   the daemon could not do it: try again, or see its log
└── Outdated         9   `serve`: the database belongs to a newer gpubroker
"""

from enum import IntEnum


class Exit(IntEnum):
    """What a command leaves to its caller."""

    OK = 0
    JOB_FAILED = 1
    BAD_INPUT = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    UNAUTHORISED = 5
    CAPPED = 6
    REFUSED = 7
    SERVER_PROBLEM = 8
    OUTDATED = 9
    UNWRITTEN = 10
    """Of no CliError: `broker.cli.main` leaves it."""
    INTERRUPTED = 130


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done, and a watched job succeeded",
    Exit.JOB_FAILED: "the watched job failed or was cancelled, or a check found a problem",
    Exit.BAD_INPUT: "an argument, the spec, the data or the cap is at fault, and nothing was created",
    Exit.NOT_FOUND: "no such job, token, secret or file",
    Exit.UNREACHABLE: "no daemon answers at the address",
    Exit.UNAUTHORISED: "no token, a wrong token, or one without the needed scope",
    Exit.CAPPED: "the watched job reached its cap (`gpubroker cap JOB USD` raises it)",
    Exit.REFUSED: "the question was answered with no, and nothing was created",
    Exit.SERVER_PROBLEM: "the daemon answered with an error of its own, or cannot work now",
    Exit.OUTDATED: "`serve`: a newer gpubroker has migrated the database, so this one does not start, or stops",
    Exit.UNWRITTEN: "the output could not be written (a full disk); what was asked may have been done",
    Exit.INTERRUPTED: "Ctrl-C, and a submitted job goes on",
}


class CliError(Exception):
    """One line for people, and an exit code; `problems` are (place, message) pairs where there are several."""

    code = Exit.SERVER_PROBLEM

    def __init__(self, message: str, *, problems: tuple[tuple[str, str], ...] = (), told: bool = False) -> None:
        """`told`: the command's own document says it already, and `--json` has but one."""
        super().__init__(message)
        self.problems = problems
        self.told = told


class BadInput(CliError):
    code = Exit.BAD_INPUT


class NotFoundExit(CliError):
    code = Exit.NOT_FOUND


class UnreachableExit(CliError):
    code = Exit.UNREACHABLE


class Unauthorised(CliError):
    code = Exit.UNAUTHORISED


class Capped(CliError):
    code = Exit.CAPPED


class JobFailed(CliError):
    code = Exit.JOB_FAILED


class Refused(CliError):
    code = Exit.REFUSED


class ServerProblem(CliError):
    code = Exit.SERVER_PROBLEM


class Outdated(CliError):
    code = Exit.OUTDATED
