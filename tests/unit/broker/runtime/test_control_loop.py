"""A controller's loop survives every error, backs off, and returns to its interval."""

import asyncio

import pytest

from broker.domain.errors import SchemaNewer, StoreUnavailable
from broker.runtime.control_loop import run_forever


class Sleepless:
    """A clock that records the pauses and ends the test after some of them."""

    def __init__(self, pauses: int) -> None:
        self.pauses: list[float] = []
        self._left = pauses

    def monotonic(self) -> float:
        return 0.0

    def now(self) -> object:
        raise AssertionError("not asked for")

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._left -= 1
        if not self._left:
            raise asyncio.CancelledError


class Scripted:
    name = "scripted"
    every_s = 1.0

    def __init__(self, *outcomes: bool | BaseException) -> None:
        self._outcomes = list(outcomes)

    async def step(self) -> bool:
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.mark.parametrize(
    ("outcomes", "pauses"),
    [
        ([True, False, True], [0, 1, 0]),
        ([StoreUnavailable("down"), StoreUnavailable("down"), ValueError("bug"), False], [1, 2, 4, 1]),
        ([asyncio.CancelledError(), False], [1, 1]),  # of what the step awaited; the loop was not cancelled
    ],
)
async def test_pauses_follow_what_a_step_found(outcomes: list[bool | BaseException], pauses: list[float]) -> None:
    clock = Sleepless(len(pauses))
    with pytest.raises(asyncio.CancelledError):
        await run_forever(Scripted(*outcomes), clock)  # type: ignore[arg-type]
    assert clock.pauses == pauses


async def test_back_off_has_a_bound() -> None:
    clock = Sleepless(20)
    with pytest.raises(asyncio.CancelledError):
        await run_forever(Scripted(*[StoreUnavailable("down")] * 20), clock)  # type: ignore[arg-type]
    assert max(clock.pauses) == 10


async def test_a_newer_schema_ends_the_loop() -> None:
    with pytest.raises(SchemaNewer):
        await run_forever(Scripted(SchemaNewer("the database's schema is newer")), Sleepless(9))  # type: ignore[arg-type]
