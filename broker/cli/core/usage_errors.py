"""Usage errors: of typer before a command begins, and of a request that is built from arguments and options."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from typer.core import TyperGroup

from broker.api.core.problems import of_validation
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import write_error

Request = TypeVar("Request", bound=BaseModel)
PYDANTIC = "Value error, "
"""Prefix that pydantic adds to the message of a validator."""


class Root(TyperGroup):
    """The group of all commands. Typer itself prints the error to stderr and exits with 2."""

    arguments: Sequence[str] = ()

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        self.arguments = tuple(args)
        with self._rewording():
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: Any) -> Any:
        with self._rewording():
            return super().invoke(ctx)

    @contextmanager
    def _rewording(self) -> Iterator[None]:
        try:
            yield
        except typer.TyperException as e:
            e.message = e.message.removeprefix(PYDANTIC) + _hint(e)
            options = self.arguments[: self.arguments.index("--")] if "--" in self.arguments else self.arguments
            if "--json" in options:
                write_error(BadInput(e.format_message()))
            raise


def _hint(error: typer.TyperException) -> str:
    """Return a hint for an option of the remote program that was given to `exec` without `--`."""
    where = getattr(getattr(error, "ctx", None), "command_path", "")
    if where.endswith(" exec") and error.message.startswith("No such option"):
        return "; write -- before the program and its options: gpubroker exec JOB -- PROGRAM OPTIONS"
    return ""


def checked(model: type[Request], values: Mapping[str, Any], options: Mapping[str, str]) -> Request:
    """Return the request body. `options`: the option or argument that fills a field, by field.

    Raises BadInput naming the option, or the field if no option fills it.
    """
    try:
        return model.model_validate(values)
    except ValidationError as e:
        problems = of_validation(e, model, values).problems
        pairs = tuple((options.get(p.field.partition(".")[0], p.field), p.message) for p in problems)
        raise BadInput("\n".join(f"{place}: {message}" for place, message in pairs), problems=pairs) from None
