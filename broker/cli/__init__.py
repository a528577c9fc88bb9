"""`gpubroker`: the command line. Talks to the API only; `serve` is the daemon itself.

| module | holds |
|---|---|
| `main` | the commands by name |
| `submit`, `jobs`, `admin`, `daemon` | what they do, by concern |
| `submission`, `specfile`, `overrides`, `schema`, `template`, `pack` | from a spec file to a job |
| `watch`, `progress`, `summary`, `summaryview`, `plots`, `results` | from a job to its end and what it left |
| `quoteview`, `jobviews`, `sheet`, `words`, `doctor` | what people read |
| `shell`, `output`, `exits`, `usage`, `find` | what every command shares |
"""

import os
import sys
from errno import EIO

from broker.cli.core.exit_codes import Exit
from broker.runtime.private_files import FULL


def main() -> None:
    """The console script. Holds from its first import on: that takes a second in which people press Ctrl-C."""
    try:
        from broker.cli.main import app

        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(int(Exit.INTERRUPTED))
    except BrokenPipeError:
        _leave(Exit.OK)
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # so rich and typer end, with 1
            _leave(Exit.OK)
        raise
    except OSError as e:
        if e.errno not in FULL | {EIO} or e.filename is not None:
            raise
        sys.stderr.write(f"error: stdout: {e.strerror}; write it elsewhere, what was asked may have been done\n")
        _leave(Exit.UNWRITTEN)


def _leave(code: Exit) -> None:
    """Without what is left to write: the reader of a pipe has gone (`gpubroker ls | head`), or there is no room."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(int(code))
