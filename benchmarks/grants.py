"""A real job on credentials that live for a minute, renewed by the broker: is anything lost?

    python -m benchmarks.grants --life 60 --seconds 300

S3 and STS are moto, behind a gate that enforces the session policy of every key and refuses ended keys. Broker, agent
and job are real. The job writes one line a second and a checkpoint every ten. The last line is JSON.
"""

import argparse
import asyncio
import logging
import tempfile
import time
from pathlib import Path

from tests.grants.gate import gated
from tests.grants.soak import Outcome, Soak, as_json


async def measure(life_s: float, seconds: int) -> Outcome:
    async with gated(life_s) as gate:
        with tempfile.TemporaryDirectory(prefix="gb-") as folder:
            soak = Soak(gate=gate, state=Path(folder), ticks=seconds, tick_s=1.0, save_s=10.0)
            return await soak.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--life", type=float, default=60.0)
    parser.add_argument("--seconds", type=int, default=300)
    args = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    begun = time.perf_counter()
    outcome = asyncio.run(measure(args.life, args.seconds))
    print(as_json(outcome, life_s=args.life, run_s=args.seconds, seconds=round(time.perf_counter() - begun, 1)))


if __name__ == "__main__":
    main()
