"""Send hostile HTTP and gRPC calls to the real application, over PostgreSQL.

    .venv/bin/python -m tests.api.fuzz --cases 100000 --seed 7

The last line is one JSON object; exit status 1 if the server was at fault. The same seed draws the same calls.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

from tests.api.fuzz import calls, http
from tests.api.fuzz.world import database, world

EXAMPLES = 25
"""Examples per HTTP operation in a round, in addition to those of schemathesis' other phases."""
GRPC_EXAMPLES = 80
"""Examples per gRPC method in a round."""


PLANNED = 24
"""Rounds with schemathesis' planned phase: each caller with each of the known ids."""


async def one_round(seed: int, phases: str) -> dict[str, int]:
    """Run one round with a new database, so that nothing grows over rounds. Faults are printed to stderr."""
    async with database() as dsn, world(dsn) as made:
        result = await http.fuzz(made, seed, EXAMPLES, phases=phases)
        if not result.good:
            print(result.report, file=sys.stderr)
        heard = [await calls.fuzz(made, method, seed, GRPC_EXAMPLES) for method in calls.METHODS]
    faults = [fault for one in heard for fault in one.faults]
    print(*faults, sep="\n", end="", file=sys.stderr)
    return {
        "cases": result.cases + sum(one.cases for one in heard),
        "http_5xx": result.http_5xx,
        "grpc_internal": len(faults),
        "schema_violations": result.schema_violations,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.api.fuzz", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=5000, help="at least so many; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each round draws anew")
    options = parser.parse_args(arguments)
    totals = {"cases": 0, "http_5xx": 0, "grpc_internal": 0, "schema_violations": 0}
    seed = first = options.seed * 1_000_000
    while totals["cases"] < options.cases:
        counts = asyncio.run(one_round(seed, http.PHASES if seed - first < PLANNED else http.AT_RANDOM))
        totals = {name: count + counts[name] for name, count in totals.items()}
        print(f"round {seed}: {json.dumps(counts)}", flush=True)
        seed += 1
    print(json.dumps(totals))
    return int(any(count for name, count in totals.items() if name != "cases"))


if __name__ == "__main__":
    sys.exit(main())
