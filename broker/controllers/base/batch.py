"""Decides many rows concurrently, so that a slow or failing row does not delay the others."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from broker.controllers.base.context import ControllerContext
from broker.domain.errors import GpubrokerError

log = logging.getLogger(__name__)
Row = TypeVar("Row")
Answer = TypeVar("Answer")

AT_ONCE = 32
"""Maximum number of rows that are decided at the same time."""
SHARE = 0.5
"""Share of the lease after which undecided rows time out, so that decisions are written before the leases expire."""


async def decide_batch(
    context: ControllerContext, name: str, rows: Sequence[Row], decide: Callable[[Row], Awaitable[Answer]]
) -> list[tuple[Row, Answer]]:
    """Return each row that could be decided, with its decision.

    A row that fails or times out keeps its lease, and becomes due when the lease expires. If all rows fail, the first
    error is raised, because the cause is then not a single row. `name`: the controller's name, for the log.
    """
    if not rows:
        return []
    gate = asyncio.Semaphore(AT_ONCE)
    limit_s = context.intervals.lease_s * SHARE
    begun = asyncio.get_running_loop().time()

    async def decide_row(row: Row) -> tuple[Row, Answer]:
        async with gate, asyncio.timeout_at(begun + limit_s):
            return row, await decide(row)

    if len(rows) == 1:  # the usual case; creating a task would cost more than the decision
        return [await decide_row(rows[0])]
    outcomes = await asyncio.gather(*(decide_row(row) for row in rows), return_exceptions=True)
    answers = [answer for answer in outcomes if not isinstance(answer, BaseException)]
    failures = [error for error in outcomes if isinstance(error, BaseException)]
    if failures and not answers:
        raise failures[0]
    for error in failures:
        expected = isinstance(error, GpubrokerError | TimeoutError)
        log.warning("%s of one row: %s: %s", name, type(error).__name__, error, exc_info=None if expected else error)
    return answers
