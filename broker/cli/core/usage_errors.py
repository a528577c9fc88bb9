"""What typer itself refuses, before a command has begun: in our words, and with `--json` as the document."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import refusal

PYDANTIC = "Value error, "
"""What pydantic puts before the words of a check."""


class Root(TyperGroup):
    """The group of all commands. Typer draws the box on stderr and ends with 2 whatever is done here."""

    asked: Sequence[str] = ()

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        self.asked = tuple(args)
        with self._told():
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: Any) -> Any:
        with self._told():
            return super().invoke(ctx)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except typer.TyperException as e:
            e.message = e.message.removeprefix(PYDANTIC) + _hint(e)
            options = self.asked[: self.asked.index("--")] if "--" in self.asked else self.asked
            if "--json" in options:
                refusal(BadInput(e.format_message()))
            raise


def _hint(error: typer.TyperException) -> str:
    """A program's own option comes here when nobody said where its words begin."""
    where = getattr(getattr(error, "ctx", None), "command_path", "")
    if where.endswith(" exec") and error.message.startswith("No such option"):
        return "; write -- before the program and its options: gpubroker exec JOB -- PROGRAM OPTIONS"
    return ""
