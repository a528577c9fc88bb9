"""Timeouts of the harness, whose errors name the pending step and the current state."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType


class Within:
    """`async with Within(60, "it serves", log):` raises TimeoutError if the block takes longer or itself times out.

    The message names the step and ends with the text that `log` returns.
    """

    def __init__(self, seconds: float, what: str, details: Callable[[], str] = lambda: "") -> None:
        self._seconds, self._what, self._details = seconds, what, details
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
            if isinstance(error, TimeoutError):
                raise error
        except TimeoutError as e:
            words = (f"not within {self._seconds:g} s: {self._what}", self._details())
            raise TimeoutError("\n".join(part for part in words if part)) from e


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Add the name to any exception that the block raises."""
    try:
        yield
    except BaseException as e:
        e.add_note(f"during: {what}")
        raise
