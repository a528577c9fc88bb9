"""Many rows at once, so that neither a slow nor a broken one holds the others up."""

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
"""Rows whose clouds and blobs are asked at the same time."""
SHARE = 0.5
"""Of the lease: what a row may take, so that the answers of the others are written before theirs lapse."""


async def decide_batch(
    context: ControllerContext, what: str, rows: Sequence[Row], decide: Callable[[Row], Awaitable[Answer]]
) -> list[tuple[Row, Answer]]:
    """Every row that could be decided, with its answer; the others keep their lease, and so are due when it lapses.

    Raises what happened to the first when none could be decided: then it is no single row that is at fault.
    """
    if not rows:
        return []
    gate = asyncio.Semaphore(AT_ONCE)
    limit_s = context.rhythm.lease_s * SHARE
    begun = asyncio.get_running_loop().time()

    async def one(row: Row) -> tuple[Row, Answer]:
        async with gate, asyncio.timeout_at(begun + limit_s):
            return row, await decide(row)

    if len(rows) == 1:  # most of the time, and then a task of its own is the most of the cost
        return [await one(rows[0])]
    done = await asyncio.gather(*(one(row) for row in rows), return_exceptions=True)
    answers = [answer for answer in done if not isinstance(answer, BaseException)]
    failures = [error for error in done if isinstance(error, BaseException)]
    if failures and not answers:
        raise failures[0]
    for error in failures:
        expected = isinstance(error, GpubrokerError | TimeoutError)
        log.warning("%s of one row: %s: %s", what, type(error).__name__, error, exc_info=None if expected else error)
    return answers
