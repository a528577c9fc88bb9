"""Stable exit codes, and the errors that carry them.

| error | code | cause |
|---|---|---|
| BadInput | 2 | an argument, a spec or a data set is invalid |
| NotFoundExit | 3 | no such job, token, secret or file |
| UnreachableExit | 4 | no daemon answers |
| Unauthorised | 5 | no token, a wrong token, or a token without the scope |
| Capped | 6 | the job reached its cap |
| JobFailed | 1 | the job failed or was cancelled |
| Refused | 7 | the user answered no |
| ServerProblem | 8 | the daemon failed: try again, or see its log |
| Outdated | 9 | `serve`: the database belongs to a newer gpubroker |
"""

from enum import IntEnum

OWN_PACKAGES = ("broker", "providers", "trainer")


class Exit(IntEnum):
    """Exit code of a command."""

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
    """The output could not be written. Only `main` in `broker/cli/__init__.py` exits with this code."""
    INTERRUPTED = 130


MEANINGS: dict[Exit, str] = {
    Exit.OK: "success, and a watched job succeeded",
    Exit.JOB_FAILED: "the watched job failed or was cancelled, or a check found a problem",
    Exit.BAD_INPUT: "an argument, the spec, the data or the cap is invalid; nothing was created",
    Exit.NOT_FOUND: "no such job, token, secret or file",
    Exit.UNREACHABLE: "no daemon answers at the address",
    Exit.UNAUTHORISED: "no token, a wrong token, or a token without the required scope",
    Exit.CAPPED: "the watched job reached its cap (`gpubroker cap JOB USD` raises it)",
    Exit.REFUSED: "the confirmation was answered with no; nothing was created",
    Exit.SERVER_PROBLEM: "the daemon had an internal error, or is unavailable",
    Exit.OUTDATED: "`serve`: a newer gpubroker has migrated the database; this version does not start, or stops",
    Exit.UNWRITTEN: "the output could not be written (disk full); the command may have taken effect",
    Exit.INTERRUPTED: "interrupted by Ctrl-C; a submitted job keeps running",
}


class CliError(Exception):
    """A message for the user, with an exit code. `problems`: (field, message) pairs, if there are several."""

    code = Exit.SERVER_PROBLEM

    def __init__(
        self, message: str, *, problems: tuple[tuple[str, str], ...] = (), is_in_document: bool = False
    ) -> None:
        """`is_in_document`: the JSON document already contains the error, so `--json` writes no second document."""
        super().__init__(message)
        self.problems = problems
        self.is_in_document = is_in_document


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


def not_installed(error: ModuleNotFoundError) -> BadInput:
    """Return the refusal of a command that needs a package of the daemon. Raises `error` if the package is our own."""
    package = (error.name or "").partition(".")[0]
    if not package or package in OWN_PACKAGES:
        raise error
    return BadInput(
        f"this command needs the packages of the daemon ({package} is missing); run `pip install 'gpubroker[server]'`"
    )
