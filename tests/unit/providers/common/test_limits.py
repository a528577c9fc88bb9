"""Calls of a cloud wait for its rate limit, or are refused before they are sent."""

import asyncio

import pytest

from broker.domain.errors import Throttled
from providers.common.call_rates import CallLimit, CallRates, LoopClock
from tests.unit.providers.clocks import InstantClock, SteppedClock

LIMITS = {
    "page": CallLimit(calls=1, per_s=1.0, longest_wait_s=20.0, source="test"),
    "search": CallLimit(calls=3, per_s=60.0, longest_wait_s=0.0, source="test"),
    "destroy": CallLimit(calls=1, per_s=3.0, longest_wait_s=7.0, source="test"),
}


async def test_concurrent_calls_are_apart_and_the_last_are_refused_unsent() -> None:
    clock, sent = SteppedClock(), list[float]()
    rates = CallRates("Cloud", LIMITS, clock)

    async def send() -> None:
        sent.append(clock.monotonic())

    calls = [asyncio.create_task(rates.call("destroy", send)) for _ in range(5)]
    for _ in range(12):
        for _ in range(5):
            await asyncio.sleep(0)
        clock.advance(1.0)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sent == [0.0, 3.0, 6.0]
    refusals = [result for result in results if isinstance(result, Throttled)]
    assert [refusal.after_s for refusal in refusals] == [9.0, 9.0]


async def test_kinds_have_limits_of_their_own() -> None:
    clock = InstantClock()
    rates = CallRates("Cloud", LIMITS, clock)
    for _ in range(3):
        await rates.turn("search")
    with pytest.raises(Throttled, match="Cloud accepts no search for another 60 s"):
        await rates.turn("search")
    assert (rates.free("search"), rates.free("page")) == (0, 1)
    await rates.turn("page")
    clock.advance(59.9)
    with pytest.raises(Throttled):
        await rates.turn("search")
    clock.advance(0.2)
    await rates.turn("search")
    assert rates.free("search") == 2
    rates.refused("search", 1.0)
    assert rates.free("search") == 0
    assert clock.slept == []


async def test_refused_call_is_repeated_after_the_pause() -> None:
    clock, answers = InstantClock(), iter([Throttled("429", after_s=5.0), "page 2"])
    rates = CallRates("Cloud", LIMITS, clock)

    async def send() -> str:
        answer = next(answers)
        if isinstance(answer, Throttled):
            raise answer
        return str(answer)

    assert await rates.call("page", send, tries=2) == "page 2"
    assert clock.slept == [5.0]


async def test_call_that_stays_refused_raises() -> None:
    rates = CallRates("Cloud", LIMITS, InstantClock())

    async def send() -> str:
        raise Throttled("429", after_s=0.1)

    with pytest.raises(Throttled):
        await rates.call("page", send, tries=3)


async def test_the_loop_clock_advances_by_a_sleep() -> None:
    clock = LoopClock()
    before = clock.monotonic()
    await clock.sleep(0.001)
    assert clock.monotonic() > before
