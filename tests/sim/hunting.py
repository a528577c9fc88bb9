"""Plants each mutant until a seed catches it."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.sim.many import pool
from tests.sim.mutants import MUTANTS, Hunt, Mutant, hunt

CAUGHT = Path(__file__).with_name("caught.json")
"""File with the seed and the invariant that caught each mutant. Every change of the product changes the simulation of a
seed, so these seeds are only tried first.
"""


def mutants(seeds: Sequence[int], only: str | None, *, known: bool, note: bool) -> int:
    """Plant mutants and report those that no seed catches by an invariant named for them.

    `known`: try the seeds of `CAUGHT` first. `note`: write the seeds that caught a mutant to `CAUGHT`.
    """
    known_by = json.loads(CAUGHT.read_text())
    needed: list[int] = []
    chosen = [mutant for mutant in MUTANTS if only is None or only in mutant.name]
    first = [known_by[one.name]["seed"] if known and one.name in known_by else None for one in chosen]
    orders = [list(seeds) if seed is None else [seed, *seeds] for seed in first]
    for mutant, order, found in zip(chosen, orders, _hunted(chosen, orders), strict=True):
        outcome = f"{found.by} caught it at seed {order[found.tried - 1]}" if found.tried else "NOT CAUGHT"
        print(f"{mutant.name}: {outcome}{f'; besides {found.others}' if found.others else ''}", flush=True)
        if found.tried:
            needed.append(found.tried)
            known_by[mutant.name] = {"seed": order[found.tried - 1], "by": found.by}
        if note:
            kept = {mutant.name: known_by[mutant.name] for mutant in MUTANTS if mutant.name in known_by}
            CAUGHT.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps({"mutants": len(chosen), "caught": len(needed), "seeds_needed_max": max(needed, default=0)}))
    return 0 if len(needed) == len(chosen) else 1


def _hunted(chosen: Sequence[Mutant], orders: Sequence[Sequence[int]]) -> Iterator[Hunt]:
    """Hunt several mutants at a time, each planted in a process of its own."""
    with pool(os.cpu_count() or 1) as processes:
        yield from processes.map(_hunt, [MUTANTS.index(one) for one in chosen], orders)


def _hunt(number: int, order: Sequence[int]) -> Hunt:
    return hunt(MUTANTS[number], order)
