"""The command line `gpubroker`. It talks to the HTTP API only; `serve` runs the daemon itself.

| package | holds |
|---|---|
| `main` | the commands by name, imported when they run |
| `jobs` | quote, submit, watch and change jobs |
| `commands` | login, init, policies, channels, tokens, spending, catalogs, estimates |
| `operator` | serve, doctor, sweep and the repair of an installation |
| `spec` | reading, overriding and checking a spec file |
| `convert` | task files of SkyPilot and dstack as specs |
| `views` | tables and summaries for the terminal |
| `core` | output, exit codes and error handling of all commands |
"""

import gc
import os
import sys
from errno import EIO

from broker.cli.core.exit_codes import Exit
from broker.runtime.private_files import FULL


def main() -> None:
    """Run the console script. The imports take some time, so Ctrl-C is handled from the first one on."""
    gc.disable()  # until the command's modules are imported, which creates many objects and drops few
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
        if isinstance(e.__context__, BrokenPipeError):  # rich and typer exit with 1 on a broken pipe
            _leave(Exit.OK)
        raise
    except OSError as e:
        if e.errno not in FULL | {EIO} or e.filename is not None:
            raise
        sys.stderr.write(f"error: stdout: {e.strerror}; write it elsewhere, the command may have taken effect\n")
        _leave(Exit.UNWRITTEN)
    finally:
        gc.freeze()  # a collection at exit would visit every imported object, which takes a fifth of a short command


def _leave(code: Exit) -> None:
    """Exit and discard buffered output, because the reader has closed the pipe or the disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(int(code))
