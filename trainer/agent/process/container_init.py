"""First process of the trainer's image: `python -m trainer.agent.process.container_init COMMAND...`.

It runs the command, which for RunPod is SkyPilot's start-up, and reaps the container's orphans. RunPod ends an
interruptible pod with a SIGTERM that only this process gets, and kills everything 5 s later (docs.runpod.io, "Spot vs.
on-demand instances"). The trainer's agent belongs to another user and is not its child, so a file carries the notice.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

NOTICE = Path("/run/gpubroker-notice")
"""File with the seconds that the container had left when it was written."""
GRACE_S = 5.0
"""RunPod's seconds between SIGTERM and SIGKILL."""
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores. Children would inherit that, and a shell could not undo it."""


class FirstProcess:
    """First process of one container. `notice` is the file that records a SIGTERM."""

    def __init__(self, notice: Path, grace_s: float = GRACE_S) -> None:
        self._notice, self._grace_s = notice, grace_s
        self._terminated_at: float | None = None
        self._child: int | None = None

    def run(self, argv: list[str]) -> int:
        """Run the command and return its exit code, as a shell reports it."""
        with contextlib.suppress(OSError):
            self._notice.unlink()  # left from before a restart
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, lambda *_: None)  # a terminal also sends it to the command
        try:
            self._child = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=IGNORED)
        except OSError as e:
            print(f"cannot start {argv[0]!r}: {e.strerror}; give a program of the image", file=sys.stderr)
            return 127
        if self._terminated_at is not None:
            os.kill(self._child, signal.SIGTERM)
        code = self._collect()
        if self._terminated_at is not None:  # the container ends with this process, but the agent may still save
            time.sleep(max(0.0, self._terminated_at + self._grace_s - time.monotonic()))
        return code if code >= 0 else 128 - code

    def _collect(self) -> int:
        while True:
            pid, status = os.wait()
            if pid == self._child:
                self._child = None
                return os.waitstatus_to_exitcode(status)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._terminated_at is None:
            self._terminated_at = time.monotonic()
            temporary = self._notice.with_name(self._notice.name + ".new")
            with contextlib.suppress(OSError):  # the notice is lost then, and the last checkpoint counts
                temporary.write_text(str(self._grace_s))
                temporary.replace(self._notice)
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):  # the process has just exited
                os.kill(self._child, signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Run as first process if root; in a container of another user, replace this process with the command."""
    if os.getuid() != 0:
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        os.execvp(argv[0], argv)
    return FirstProcess(NOTICE).run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
