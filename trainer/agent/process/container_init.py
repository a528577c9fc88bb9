"""The first process of the trainer's image: `python -m trainer.agent.process.container_init COMMAND...`.

It runs the command, which for RunPod is SkyPilot's start-up, and collects the container's orphans. RunPod ends an
interruptible pod with a SIGTERM that only this process gets, and kills all of it 5 s later (docs.runpod.io, "Spot vs.
on-demand instances"). The trainer's agent is another user's, and nobody's child here: it hears of it by a file.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

NOTICE = Path("/run/gpubroker-notice")
"""Holds for how many seconds the container had to live when it was written."""
GRACE_S = 5.0
"""RunPod's."""
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""By Python, and so by whatever it starts, unless it is told; a shell could not undo it."""


class FirstProcess:
    """Of one container. `notice`: where a SIGTERM is written down."""

    def __init__(self, notice: Path, grace_s: float = GRACE_S) -> None:
        self._notice, self._grace_s = notice, grace_s
        self._told_at: float | None = None
        self._child: int | None = None

    def run(self, argv: list[str]) -> int:
        """The command's exit code, as a shell has it."""
        with contextlib.suppress(OSError):
            self._notice.unlink()  # of before a restart
        signal.signal(signal.SIGTERM, self._hear)
        signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the command as well
        try:
            self._child = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=IGNORED)
        except OSError as e:
            print(f"cannot start {argv[0]!r}: {e.strerror}; give a program of the image", file=sys.stderr)
            return 127
        if self._told_at is not None:
            os.kill(self._child, signal.SIGTERM)
        code = self._collect()
        if self._told_at is not None:  # with this process everything ends, the agent's last save too
            time.sleep(max(0.0, self._told_at + self._grace_s - time.monotonic()))
        return code if code >= 0 else 128 - code

    def _collect(self) -> int:
        while True:
            pid, status = os.wait()
            if pid == self._child:
                self._child = None
                return os.waitstatus_to_exitcode(status)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._told_at is None:
            self._told_at = time.monotonic()
            aside = self._notice.with_name(self._notice.name + ".new")
            with contextlib.suppress(OSError):  # nobody hears of it then, and the last checkpoint counts
                aside.write_text(str(self._grace_s))
                aside.replace(self._notice)
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._child, signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Only root is the machine here; where the container was given to a user, the command is the first process."""
    if os.getuid() != 0:
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        os.execvp(argv[0], argv)
    return FirstProcess(NOTICE).run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
