"""Dead-man's switch: renews the broker's lease. Agents shut down by themselves when it no longer changes.

Steps: complete a transaction of the database, write the lease with the next number to the blob store.
Facts: an answer of the database. Decisions: none; after an error of the database or blob store the lease stays as is.
"""

from broker.controllers.base.context import ControllerContext
from trainer.contract import object_keys
from trainer.contract.documents import Lease


class Deadman:
    """Renews the lease only after a successful transaction: a broker without its database counts as dead."""

    name = "deadman"

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._seq = 0
        self.every_s = context.intervals.deadman_s

    async def step(self) -> bool:
        await self._context.store.ping()
        self._seq += 1
        context, identity = self._context, self._context.identity
        lease = Lease(
            broker=context.owner, seq=self._seq, every_s=self.every_s, home=identity.home, clouds=dict(identity.clouds),
            database=identity.database,
        )  # fmt: skip
        await self._context.blobs.put(object_keys.BROKER_LEASE, lease.model_dump_json().encode())
        return False
