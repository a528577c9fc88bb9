"""Time that this host counts since its boot, and the trusted reading that a restarted daemon continues from.

The time includes a suspended host's sleep, for which clouds bill. `DatabaseClock` uses both.
"""

import json
import logging
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from broker.billing.trusted_time import ClockAnchor
from broker.runtime.private_files import write_private

log = logging.getLogger(__name__)

CLOCK_FILE = "clock.json"
"""File of the home with the latest trusted reading."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_seconds() -> float:
    """Return the seconds since the boot, with the time asleep where the system counts it (Linux)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, kw_only=True)
class AnchorFile:
    """File with the latest trusted reading of this boot of this host."""

    path: Path
    boot_id: Path = BOOT_ID

    def read(self) -> ClockAnchor | None:
        """Return the reading; None: there is none, it is damaged, or it is from another boot."""
        try:
            document = json.loads(self.path.read_text())
            if document["boot"] != self.boot_id.read_text().strip():
                return None
            wall = datetime.fromisoformat(document["wall"])
            return ClockAnchor(wall=wall, counted_s=float(document["counted_s"])) if wall.tzinfo else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, anchor: ClockAnchor) -> None:
        """Write the reading. A failure is logged only, because the daemon runs without the file."""
        try:
            boot = self.boot_id.read_text().strip()
        except OSError:
            return
        document = {"boot": boot, "wall": anchor.wall.isoformat(), "counted_s": anchor.counted_s}
        try:
            write_private(self.path, json.dumps(document).encode())
        except OSError as e:
            log.debug("%s cannot be written: %s", self.path, e)
