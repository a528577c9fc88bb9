"""Draw the README's pictures from a real run: `python -m examples.pictures`.

Starts the demo's daemon on the simulated market. Runs `gpubroker quote`, `submit` and `watch` on a terminal, and writes
its screens to docs/img/quote.svg and docs/img/watch.svg. Needs the demo's model (`make model`) and about four minutes.
"""

import argparse
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from examples import demo

COLUMNS, ROWS = 132, 60
"""Size of the terminal in cells: the quote's table keeps all its columns at this width."""
LIFETIME_S = 90.0
"""Seconds until the simulated cloud takes the first machine."""
TIMEOUT_S = 900.0
"""Seconds after which a picture that has not appeared is an error."""
_RESUMED = re.compile(r"attempt 2 training.*\n.*?(\d+)/(\d+) .* left", re.MULTILINE)
"""Two last lines of `gpubroker watch` while the second machine trains: (step, steps)."""

_ESCAPE = re.compile(r"(\r\n|\n|\r|\x1b\[[0-9;?]*[A-Za-z])")
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


class Screen:
    """Lines of a terminal that appends, erases whole lines and moves the cursor up, as rich's live display does."""

    def __init__(self) -> None:
        self._lines = [""]
        self._row = 0

    def feed(self, text: str) -> None:
        """Apply output of a program. Colours stay in the lines as escape sequences."""
        for part in _ESCAPE.split(text):
            if part in ("\n", "\r\n"):
                self._row += 1
                if self._row == len(self._lines):
                    self._lines.append("")
            elif part.startswith("\x1b[") and not part.endswith("m"):
                self._control(part)
            elif part != "\r":
                self._lines[self._row] += part

    def _control(self, sequence: str) -> None:
        if sequence.endswith("K"):
            self._lines[self._row] = ""
        elif sequence.endswith("A"):
            self._row = max(0, self._row - int(sequence[2:-1] or 1))

    @property
    def text(self) -> Text:
        """Return the lines with their colours, without empty lines at both ends."""
        return Text.from_ansi("\n".join(self._lines).strip("\n"))


def svg(text: Text, *, title: str) -> str:
    """Return a picture of a terminal window that shows `text`; it loads no font from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(text, overflow="fold")
    return _FONT_FACE.sub("", console.export_svg(title=title))


@contextmanager
def terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `gpubroker` with `arguments` on a new terminal; yield the process and the terminal's file descriptor."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "broker.cli", *arguments],
        stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    try:
        yield process, master
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait()
        os.close(master)


def screen_of(*arguments: str, until: Callable[[str], bool] = lambda _: False) -> Text:
    """Return a command's screen at its end, or as soon as `until` accepts its text. Raises SystemExit on failure."""
    screen, deadline = Screen(), time.monotonic() + TIMEOUT_S
    with terminal(*arguments) as (process, descriptor):
        while (output := _next_output(descriptor, deadline)) is not None:
            screen.feed(output)
            if until(screen.text.plain):
                return screen.text
        if process.wait() != 0:
            sys.exit(f"gpubroker {' '.join(arguments)}: exit code {process.returncode}\n{screen.text.plain}")
    return screen.text


def _next_output(descriptor: int, deadline: float) -> str | None:
    """Return the next output, or None when the program has closed its terminal."""
    if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        sys.exit(f"nothing to draw within {TIMEOUT_S:.0f} s")
    try:
        output = os.read(descriptor, 65_536)
    except OSError:  # Linux reports a closed terminal as an I/O error
        return None
    return output.decode(errors="replace") if output else None


def resumed(text: str) -> bool:
    """Return True if the second machine has trained beyond half of the job's steps."""
    match = _RESUMED.search(text)
    return match is not None and 2 * int(match[1]) > int(match[2])


def draw(spec: Path, folder: Path) -> None:
    """Write both pictures into `folder`; the job is cancelled once its picture is taken."""
    quote = screen_of("quote", str(spec))
    (folder / "quote.svg").write_text(svg(quote, title=f"gpubroker quote {spec.name}"))
    screen_of("submit", "--yes", "--detach", str(spec))
    watched = screen_of("watch", "last", until=resumed)
    (folder / "watch.svg").write_text(svg(watched, title="gpubroker watch last"))
    screen_of("cancel", "last")
    screen_of("watch", "last", until=lambda text: "cancelled" in text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw both pictures. Return 0, or 1 when the daemon does not start."""
    parser = argparse.ArgumentParser(prog="python -m examples.pictures", description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, default=Path(".demo"), help="state folder; emptied but for models/")
    parser.add_argument("--spec", type=Path, default=demo.SPEC)
    parser.add_argument("--to", type=Path, default=Path("docs/img"), metavar="FOLDER", help="folder of the pictures")
    options = parser.parse_args(arguments)
    with demo.running(options.home.absolute(), LIFETIME_S):
        draw(options.spec, options.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
