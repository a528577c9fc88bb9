"""Plants each mutant until a seed catches it."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.sim.mutants import MUTANTS, hunt

CAUGHT = Path(__file__).with_name("caught.json")
"""The seed that caught each mutant when it was written, by the mutant's name. Whatever the product does otherwise makes
another house of a seed: so these are only where to look first."""


def mutants(seeds: Sequence[int], only: str | None, *, known: bool, note: bool) -> int:
    """Each must be caught by an invariant that is named for it. `known`: the seeds that caught them before come first;
    `note`: those that catch them now are written down."""
    first = json.loads(CAUGHT.read_text())
    needed: list[int] = []
    chosen = [mutant for mutant in MUTANTS if only is None or only in mutant.name]
    for mutant in chosen:
        order = [*([first[mutant.name]] if known and mutant.name in first else []), *seeds]
        tried, others = hunt(mutant, order)
        said = f"caught by seed {order[tried - 1]}" if tried else "NOT CAUGHT"
        print(f"{mutant.name}: {said}{f'; besides {others}' if others else ''}", flush=True)
        if tried:
            needed.append(tried)
            first[mutant.name] = order[tried - 1]
    if note:
        kept = {mutant.name: first[mutant.name] for mutant in MUTANTS if mutant.name in first}
        CAUGHT.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps({"mutants": len(chosen), "caught": len(needed), "seeds_needed_max": max(needed, default=0)}))
    return 0 if len(needed) == len(chosen) else 1
