"""Where words go: with `--json` one document to stdout and all talk to stderr, else everything to stdout."""

import json
import sys
from typing import Any

from pydantic import BaseModel
from rich.console import Console, RenderableType

from broker.cli.core.exit_codes import CliError, Exit

Document = BaseModel | dict[str, Any] | list[Any]
PLAIN_WIDTH = 160
"""Columns where nobody looks at a terminal: wide enough that no table is cut in a log."""


class Output:
    """One command's output."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        stream = sys.stderr if as_json else sys.stdout
        self.talk = Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False)
        """For people."""

    @property
    def live(self) -> bool:
        """True when a display may redraw itself."""
        return self.talk.is_terminal

    @property
    def asks(self) -> bool:
        """True when there is somebody to ask."""
        return not self.as_json and sys.stdin.isatty()

    def say(self, *parts: RenderableType) -> None:
        """A line (no markup is read in plain strings) or a table for people."""
        for part in parts:
            self.talk.print(part, markup=False, soft_wrap=isinstance(part, str))

    def secret(self, told: str, secret: str) -> None:
        """What is shown once. With `--json` it is in the document alone: what goes to stderr ends in logs."""
        if not self.as_json:
            self.say(told, secret)

    def document(self, document: Document) -> None:
        """The one document of `--json`."""
        if self.as_json:
            write(document)

    def line(self, document: BaseModel) -> None:
        """One document a line, for what has no end."""
        sys.stdout.write(document.model_dump_json() + "\n")
        sys.stdout.flush()

    def error(self, error: CliError) -> None:
        """The line for people to stderr; with `--json` the same as the document."""
        for line in str(error).splitlines():
            sys.stderr.write(f"error: {line}\n")
        if self.as_json and not error.told:
            refusal(error)


def write(document: Document) -> None:
    """To stdout, as JSON."""
    data = document.model_dump(mode="json") if isinstance(document, BaseModel) else document
    sys.stdout.write(json.dumps(data, indent=2, default=str) + "\n")
    sys.stdout.flush()


def refusal(error: CliError) -> None:
    """The document of `--json` where a command came to nothing."""
    problems = [{"field": field, "message": message} for field, message in error.problems]
    code = Exit(error.code)
    write({"error": {"kind": code.name.lower(), "exit": int(code), "message": str(error), "problems": problems}})
