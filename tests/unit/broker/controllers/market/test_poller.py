"""Polls of clouds that answer, do not answer, or raise errors."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from broker.controllers.market.poller import MarketIntervals, MarketPoller
from broker.domain.errors import Rejected
from broker.domain.instance import Caps
from broker.domain.offer import GpuAsk, Offer
from providers.simulated.config import SimulatedConfig
from providers.simulated.market import offers
from tests.unit.providers.clocks import SteppedClock


class Cloud:
    """Provider with only the methods that the market calls."""

    caps = Caps(spot=True)

    def __init__(self, name: str, clock: SteppedClock) -> None:
        self.name, self._clock = name, clock
        self.fault: BaseException | None = None
        self.dropped: Mapping[str, int] = {"price 0 or less": 1}
        self.identity: str | None = None
        self.hangs = False
        self.sells = True

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        if self.hangs:
            await asyncio.Event().wait()
        if self.fault:
            raise self.fault
        if not self.sells:
            return []
        found = offers(SimulatedConfig(sold_out=0), ask, self._clock.now(), cores=2)[:3]
        return [replace(offer, provider=self.name) for offer in found]


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


def market(clock: SteppedClock, *clouds: Any, **intervals: float) -> MarketPoller:
    return MarketPoller({cloud.name: cloud for cloud in clouds}, clock, MarketIntervals(**intervals))


@pytest.mark.parametrize("fault", [Rejected("bad refuses the key (401): set BAD_KEY"), ValueError("a bug")])
async def test_a_cloud_that_fails_is_a_line_and_the_others_continue(clock: SteppedClock, fault: Exception) -> None:
    good, bad = Cloud("good", clock), Cloud("bad", clock)
    bad.fault = fault
    sold = market(clock, bad, good)
    await sold.step()
    assert {offer.provider for offer in sold.offers()} == {"good"}
    lines = {status.name: status for status in sold.status()}
    assert lines["good"].offers == 3
    assert lines["good"].dropped == {"price 0 or less": 1}
    assert lines["good"].error is None
    assert lines["bad"].seen_at is None
    assert lines["bad"].error is not None
    assert ("set BAD_KEY" in lines["bad"].error) is isinstance(fault, Rejected)


async def test_a_hanging_cloud_delays_no_other_cloud(clock: SteppedClock) -> None:
    good, bad = Cloud("good", clock), Cloud("bad", clock)
    bad.hangs = True
    sold = market(clock, bad, good, limit_s=0.05)
    await sold.step()
    assert {offer.provider for offer in sold.offers()} == {"good"}
    assert "no prices within 0.05 s" in str(sold.status()[0].error)


async def test_offers_of_a_silent_cloud_last_until_stale_and_its_error_clears(
    clock: SteppedClock,
) -> None:
    cloud = Cloud("one", clock)
    sold = market(clock, cloud, stale_s=600)
    await sold.step()
    cloud.fault = Rejected("no")
    clock.advance(599)
    await sold.step()
    assert sold.status()[0].offers == 3
    clock.advance(2)
    await sold.step()
    assert sold.offers() == ()
    cloud.fault = None
    await sold.step()
    assert (sold.status()[0].offers, sold.status()[0].error) == (3, None)


async def test_the_reason_for_no_offers_is_reported(clock: SteppedClock) -> None:
    good, bad, empty, refused = (Cloud(name, clock) for name in ("good", "bad", "empty", "refused"))
    bad.fault = Rejected("bad refuses the key (401): set BAD_KEY")
    for cloud in (empty, refused):
        cloud.sells = False
    empty.dropped, refused.dropped = {}, {"quota of 0 for p": 2, "no GPU": 7}
    sold = market(clock, good, bad, empty, refused)
    await sold.step()
    assert sold.troubles() == {
        "bad": "bad refuses the key (401): set BAD_KEY",
        "empty": "nothing is for sale",
        "refused": "left out: 7 no GPU, 2 quota of 0 for p",
    }
