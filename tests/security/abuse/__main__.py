"""Runs the attacks, one after the other, and prints one line for each and the sum as JSON."""

import argparse
import asyncio
import json
import sys

from tests.security.abuse.measure import Measured, measured
from tests.security.abuse.registry import attacks
from tests.security.abuse.target import target


async def run(names: list[str], seconds: float) -> dict[str, Measured]:
    """Return the figures of each attack. A daemon that an attack ended is replaced by a new one."""
    figures: dict[str, Measured] = {}
    left = list(names)
    while left:
        async with target() as running:
            while left and running.is_alive():
                name = left.pop(0)
                attack = attacks()[name]
                figures[name] = found = await measured(running, lambda: attack(running, seconds))  # noqa: B023
                verdict = "survived" if found.survived else "FAILED"
                print(
                    f"{name}: {verdict}, other team p99 {found.p99_ms:.0f} ms of {len(found.latencies_ms)} calls, "
                    f"{found.failed} failed, peak {found.peak_mb:.0f} MB, stall {found.stall_ms:.0f} ms",
                    flush=True,
                )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.security.abuse", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=sorted(attacks()), help="names of attacks; all by default")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each attack")
    options = parser.parse_args()
    figures = asyncio.run(run(options.only or list(attacks()), options.seconds))
    survived = sum(figure.survived for figure in figures.values())
    summary = {
        "attacks": len(figures),
        "survived": survived,
        "other_team_p99_ms": round(max(figure.p99_ms for figure in figures.values()), 1),
        "peak_mb": round(max(figure.peak_mb for figure in figures.values())),
        "loop_stall_max_ms": round(max(figure.stall_ms for figure in figures.values())),
    }
    print(json.dumps(summary))
    sys.exit(survived < len(figures))


if __name__ == "__main__":
    main()
