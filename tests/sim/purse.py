"""What policies let all jobs of a house hold and spend together: a part of invariant 4."""

from typing import TYPE_CHECKING

from broker.domain.job import LedgerKind
from broker.domain.money import ZERO

if TYPE_CHECKING:
    from tests.sim.world import World

SPENT = (LedgerKind.CHARGE, LedgerKind.ADJUSTMENT)


class Purse:
    """A house lasts for less than a budget's window."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def hold(self) -> None:
        """After each admission, and after each higher cap: what was let in before is never thrown out again."""
        state = self._world.state
        live = [attempt for _, attempt in state.running()]
        for _, policy in state.policies.live():
            if policy.max_jobs is not None and len(live) > policy.max_jobs:
                self._world.fail("budget_holds", f"{len(live)} jobs hold machines, {policy.max_jobs} may")
            gpus = sum(one.line.offer.gpus * one.line.nodes for one in live)
            if policy.max_gpus is not None and gpus > policy.max_gpus:
                self._world.fail("budget_holds", f"{gpus} GPUs are held, {policy.max_gpus} may be")
            if not policy.budgets:
                continue
            spent = sum((e.usd for ledger in state.ledger.values() for e in ledger if e.kind in SPENT), ZERO)
            held = sum((max(ZERO, one.reserved_usd - one.charged_usd) for one in live), ZERO)
            for budget in policy.budgets:
                if spent + held > budget.limit_usd:
                    told = f"{spent} spent and {held} reserved of {budget.limit_usd}"
                    self._world.fail("budget_holds", told)
