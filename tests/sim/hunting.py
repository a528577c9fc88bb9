"""Plants each mutant until a seed catches it."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.sim.mutants import MUTANTS, hunt

CAUGHT = Path(__file__).with_name("caught.json")
"""The seed and the invariant that caught each mutant, by the mutant's name. Whatever the product does otherwise makes
another house of a seed: so these are only where to look first."""


def mutants(seeds: Sequence[int], only: str | None, *, known: bool, note: bool) -> int:
    """Each must be caught by an invariant that is named for it. `known`: the seeds that caught them before come first;
    `note`: those that catch them now are written down."""
    known_by = json.loads(CAUGHT.read_text())
    needed: list[int] = []
    chosen = [mutant for mutant in MUTANTS if only is None or only in mutant.name]
    for mutant in chosen:
        before = known_by.get(mutant.name)
        order = [*([before["seed"]] if known and before else []), *seeds]
        found = hunt(mutant, order)
        said = f"{found.by} caught it at seed {order[found.tried - 1]}" if found.tried else "NOT CAUGHT"
        print(f"{mutant.name}: {said}{f'; besides {found.others}' if found.others else ''}", flush=True)
        if found.tried:
            needed.append(found.tried)
            known_by[mutant.name] = {"seed": order[found.tried - 1], "by": found.by}
        if note:
            kept = {mutant.name: known_by[mutant.name] for mutant in MUTANTS if mutant.name in known_by}
            CAUGHT.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps({"mutants": len(chosen), "caught": len(needed), "seeds_needed_max": max(needed, default=0)}))
    return 0 if len(needed) == len(chosen) else 1
