"""Steps of the wall clock of the daemon's host, and of its database."""

import shutil
import struct
import subprocess
import tempfile
from functools import partial
from pathlib import Path

from broker.store.embedded.server import find_bindir
from tests.reliability.figures import Figures
from tests.reliability.installation import ENDED, installation
from tests.reliability.registry import scenario

STEPS = {"hour_ahead": 3600, "hour_back": -3600, "day_ahead": 86_400, "day_back": -86_400}
SOURCE = Path(__file__).with_name("skew.c")


class WallClock:
    """Wall clock that the daemon, its database and its machines see."""

    def __init__(self, folder: Path) -> None:
        """Compile the library, and make programs of PostgreSQL that load it. Needs a C compiler."""
        folder.chmod(0o755)  # PostgreSQL runs as another user
        self._file, self.library = folder / "ahead", folder / "skew.so"
        self.set(0)
        argv = ["cc", "-shared", "-fPIC", "-O1", f'-DSKEW_FILE="{self._file}"', "-o", str(self.library), str(SOURCE)]
        subprocess.run(argv, check=True, capture_output=True, text=True)
        self.programs = folder / "bin"
        self.programs.mkdir()
        for name in ("initdb", "postgres"):
            program = self.programs / name
            program.write_text(f'#!/bin/sh\nLD_PRELOAD={self.library} exec {find_bindir() / name} "$@"\n')
            program.chmod(0o755)

    def set(self, ahead_s: int) -> None:
        """Set the clock so many seconds ahead of the right time."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", ahead_s))

    @property
    def command(self) -> tuple[str, ...]:
        return ("env", f"LD_PRELOAD={self.library}", f"GPUBROKER_PG_BINDIR={self.programs}")


async def stepped(ahead_s: int, figures: Figures) -> None:
    """Step the clock under a job, and back again."""
    folder = Path(tempfile.mkdtemp(prefix="gb-clock-"))
    try:
        clock = WallClock(folder)
        async with installation(figures, command=clock.command) as running:
            clock.set(ahead_s)
            await running.unready("database", "clock was set")
            before = await running.detail()
            clock.set(0)
            await running.ready()
            assert before.state not in ENDED - {"succeeded"}, before.reason
            await running.ends_well()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


for _name, _seconds in STEPS.items():
    scenario(
        "503 names the step; charges and deadlines ignore it; after the return no entry of the ledger has a wrong time",
        f"clock_{_name}",
    )(partial(stepped, _seconds))
