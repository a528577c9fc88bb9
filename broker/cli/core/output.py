"""Output of a command. `--json` writes one document to stdout and text to stderr; otherwise text goes to stdout."""

import json
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Union

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from broker.cli.core.exit_codes import CliError, Exit
from broker.domain.formatting import visible

if TYPE_CHECKING:  # its import takes longer than the run of a command that reads no answer
    from pydantic import BaseModel

OutputForm = Literal["wide", "yaml", "json"]
Document = Union["BaseModel", dict[str, Any], list[Any]]
WIDE = 1000
"""Width in columns of an output that hides and wraps nothing."""
PLAIN_WIDTH = 160
"""Width in columns of an output that is not a terminal: wide enough that no table is cut in a log."""

_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
"""Sequences that set colour and weight of text (SGR), which the log of a program may use."""
_RESET = "\x1b[0m"


class VisibleConsole(Console):
    """Console that prints control characters of texts as escapes; only its own styles control the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(visible(text, keep="\n"), style)


class Output:
    """The output of one command."""

    def __init__(self, *, as_json: bool, form: OutputForm | None = None) -> None:
        """`form`: value of `-o`; None: tables that fit the terminal, or a JSON document with `as_json`."""
        self._form = "json" if as_json else form
        self.as_json = self._form in ("json", "yaml")
        stream = sys.stderr if self.as_json else sys.stdout
        width = WIDE if form == "wide" else None if stream.isatty() else PLAIN_WIDTH
        self.console = VisibleConsole(file=stream, width=width, highlight=False)
        """The console for text: stderr if the command writes a document, stdout otherwise."""

    @property
    def live(self) -> bool:
        """True when a display may redraw itself."""
        return self.console.is_terminal

    @property
    def is_interactive(self) -> bool:
        """True when the command may ask the user a question."""
        return not self.as_json and sys.stdin.isatty()

    def print(self, *parts: RenderableType) -> None:
        """Print lines or tables. A string is one line and no markup; its control characters are escaped."""
        for part in parts:
            line = isinstance(part, str)
            self.console.print(visible(part) if isinstance(part, str) else part, markup=False, soft_wrap=line)

    def secret(self, label: str, secret: str) -> None:
        """Print a secret once. With `--json` only the document contains it, because stderr often ends in logs."""
        if not self.as_json:
            self.print(label, secret)

    def document(self, document: Document) -> None:
        """Write the single document of `--json`, or of `-o json` and `-o yaml`."""
        if self._form == "yaml":
            write_yaml(document)
        elif self.as_json:
            write(document)

    def line(self, document: "BaseModel") -> None:
        """Write one document on one line, for streams."""
        sys.stdout.write(visible(document.model_dump_json()) + "\n")
        sys.stdout.flush()

    def log(self, text: str) -> None:
        """Write the log of a job: unchanged into a file or pipe, and without control of a terminal."""
        sys.stdout.write(terminal_log(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def error(self, error: CliError) -> None:
        """Write the error to stderr, and with `--json` also as the document."""
        for line in str(error).splitlines():
            sys.stderr.write(f"error: {visible(line)}\n")
        if self.as_json and not error.is_in_document:
            write_error(error)


def terminal_log(text: str) -> str:
    """Return a log for a terminal: lines, tabs and colours are kept, other control characters are escaped.

    A carriage return begins a line, so that progress bars are readable and no line is overwritten.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    parts = _COLOUR.split(lines)  # every second part is a colour
    visible_parts = (part if i % 2 else visible(part, keep="\n\t") for i, part in enumerate(parts))
    return "".join(visible_parts) + (_RESET if len(parts) > 1 else "")


def write(document: Document) -> None:
    """Write a document to stdout as JSON."""
    data = document if isinstance(document, dict | list) else document.model_dump(mode="json")
    sys.stdout.write(json.dumps(data, indent=2, default=str) + "\n")
    sys.stdout.flush()


def write_yaml(document: Document) -> None:
    """Write a document to stdout as YAML."""
    import yaml

    data = document if isinstance(document, dict | list) else document.model_dump(mode="json")
    yaml.safe_dump(data, sys.stdout, sort_keys=False, allow_unicode=False)
    sys.stdout.flush()


def write_error(error: CliError) -> None:
    """Write the `--json` document of a failed command."""
    problems = [{"field": field, "message": message} for field, message in error.problems]
    code = Exit(error.code)
    write({"error": {"kind": code.name.lower(), "exit": int(code), "message": str(error), "problems": problems}})
