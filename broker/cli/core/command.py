"""Shared parts of all commands: common options, the API client, confirmation, and errors as exit codes."""

import asyncio
import functools
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from broker.cli.core.exit_codes import (
    BadInput,
    CliError,
    Exit,
    NotFoundExit,
    Refused,
    ServerProblem,
    Unauthorised,
    UnreachableExit,
    not_installed,
)
from broker.cli.core.output import Output, OutputForm
from broker.client.transport import errors
from broker.domain.formatting import visible

if TYPE_CHECKING:
    from broker.client.async_client import AsyncClient

Parameters = ParamSpec("Parameters")
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout, all other text to stderr.")]
Form = Annotated[
    OutputForm | None,
    typer.Option(
        "--output", "-o", metavar="wide|yaml|json", help="Show every column, or write the document as YAML or JSON."
    ),
]
JobArgument = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Job id, its first 4 or more characters, a name, or `last`."),
]
START_DAEMON = "start it with `gpubroker serve`, or name another with `gpubroker login URL` or GPUBROKER_URL"


Action = Callable[Parameters, Coroutine[Any, Any, None]]


def command(action: Action[Parameters]) -> Callable[Parameters, None]:
    """Return a function that runs an async command. An error becomes a message on stderr and an exit code."""

    @functools.wraps(action)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(action(*args, **kwargs))
        except (CliError, errors.ClientError, ModuleNotFoundError) as e:
            error = cli_error(e)
            Output(as_json=bool(kwargs.get("as_json")) or kwargs.get("form") == "json").error(error)
            raise typer.Exit(int(error.code)) from None
        except (KeyboardInterrupt, typer.Abort):
            raise typer.Exit(int(Exit.INTERRUPTED)) from None

    return run


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt a prompt. asyncio delivers SIGINT to the event loop, which a prompt blocks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def confirm(out: Output, question: str, *, yes: bool, verb: str, refusal: str) -> None:
    """Ask before an irreversible step. `verb`: names the step; `refusal`: message after the answer no.

    Raises Refused when the user answers no, BadInput when stdin is not a terminal.
    """
    if yes:
        return
    if not out.is_interactive:
        raise BadInput(f"not a terminal; pass -y to {verb} without confirmation")
    with interruptible():
        agreed = typer.confirm(visible(question), default=False)
    if not agreed:
        raise Refused(refusal)


def client(*, retry_for_s: float = 0.0) -> "AsyncClient":
    """Return a client of the configured daemon. Commands that work offline do not import it.

    Raises DaemonUnreachable when no daemon was ever started or logged in to, and Misconfigured.
    """
    from broker.client.async_client import AsyncClient

    return AsyncClient.found(retry_for_s=retry_for_s)


def cli_error(error: CliError | errors.ClientError | ModuleNotFoundError) -> CliError:
    """Return the error as a message and an exit code. Raises an error that is a fault of gpubroker itself."""
    if isinstance(error, CliError):
        return error
    if isinstance(error, ModuleNotFoundError):
        return not_installed(error)
    if isinstance(error, errors.NotSaved | errors.Misconfigured):
        return BadInput(str(error))
    if isinstance(error, errors.BrokenOff | errors.Damaged):
        return ServerProblem(str(error))
    if not isinstance(error, errors.ApiError):
        return UnreachableExit(f"{error}; {START_DAEMON}")
    problem = error.problem
    pairs = tuple((p.field, p.message) for p in problem.errors)
    text = "\n".join(f"{field}: {message}" if field else message for field, message in pairs) or problem.detail
    match problem.status:
        case 401 | 403:
            return Unauthorised(f"{text}; set GPUBROKER_TOKEN or run `gpubroker login URL`")
        case 404 | 410:
            return NotFoundExit(text)
        case 400 | 405 | 409 | 413 | 415 | 422 | 428:
            return BadInput(text, problems=pairs)
        case _:
            return ServerProblem(f"{text} ({problem.status}); see the daemon's log")
