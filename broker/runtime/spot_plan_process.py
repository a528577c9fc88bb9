"""Process that builds spot plans, so that no build takes the event loop's CPU time or the interpreter's lock.

It reads keys as JSON lines and writes tables, each after its length. `broker.runtime.spot_planner` starts it. It ends
at the end of its input, so it also ends after the daemon was killed.
"""

import json
import os
import sys
from collections.abc import Iterable
from struct import Struct
from typing import BinaryIO, Final

from broker.quote.spot.plan import SpotPlan, SpotPlanKey

LENGTH: Final = Struct("!Q")
"""Number of bytes of the table that follows."""
NICENESS: Final = 10
"""Lower priority than the daemon, which must stay responsive on a host with one core."""


def serve(keys: Iterable[bytes], answers: BinaryIO) -> None:
    """Build the plan of each key, in order."""
    for line in keys:
        packed = SpotPlan(SpotPlanKey(**json.loads(line))).packed()
        answers.write(LENGTH.pack(len(packed)) + packed)
        answers.flush()


if __name__ == "__main__":
    os.nice(NICENESS)
    serve(sys.stdin.buffer, sys.stdout.buffer)
