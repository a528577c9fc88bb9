"""Several brokers share the reviews of attempts evenly, and review each in time."""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.controllers.base.context import ControllerContext
from broker.controllers.monitoring import attempt_review
from broker.controllers.monitoring.attempt_review import CLAIM, AttemptReview
from broker.controllers.observation.inventory import Inventory
from broker.ports import Blobs, Leased, Provider
from broker.quote.spot.review import ActiveReview, Stay
from tests.conformance.samples import START, ManualClock, running
from tests.support import build
from tests.support.memory_store.store import MemoryStore
from tests.unit.broker.controllers.observation.test_inventory import Scripted

ATTEMPTS, HOUR = 240, 3600.0
BLOBS = SimpleNamespace(local=True, scopes=False)


class ReviewedStore(MemoryStore):
    """Records which broker reviewed each attempt, and when."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.of_owner: Counter[str] = Counter()
        self.times: dict[str, list[float]] = {}

    async def claim_reviews(self, **asked: Any) -> Sequence[Leased]:
        cast(ManualClock, self._state.clock).time += timedelta(milliseconds=1)  # a query takes time
        rows = await super().claim_reviews(**asked)
        self.of_owner[asked["owner"]] += len(rows)
        for row in rows:
            self.times.setdefault(row.attempt.id, []).append(cast(ManualClock, self._state.clock).monotonic())
        return rows


class Brokers:
    """Reviews of several brokers on one store, in virtual time."""

    def __init__(self, count: int) -> None:
        self.clock = ManualClock()
        self.store = ReviewedStore(self.clock)
        self.offers = (build.offer(),)
        self.reviews = [self._review(f"broker-{number}") for number in range(count)]
        self.due = [0.0] * count

    def _review(self, owner: str) -> AttemptReview:
        context = ControllerContext(
            installation=build.INSTALLATION, owner=owner, store=self.store, blobs=cast(Blobs, BLOBS),
            providers={"simulated": cast(Provider, Scripted())}, clock=self.clock,
        )  # fmt: skip
        return AttemptReview(context, Inventory(context), lambda: self.offers)

    async def run_until(self, end_s: float) -> None:
        while (at := min(self.due)) < end_s:
            number = self.due.index(at)
            self.clock.time = START + timedelta(seconds=at)
            await self.reviews[number].step()
            self.due[number] = at + max(0.01, self.reviews[number].every_s)


@pytest.mark.parametrize("count", [1, 3])
async def test_brokers_share_the_reviews_and_none_is_late(count: int) -> None:
    brokers = Brokers(count)
    for _ in range(ATTEMPTS):
        await running(brokers.store)
    brokers.due = [brokers.clock.monotonic() + 5.0 * number for number in range(count)]
    await brokers.run_until(brokers.clock.monotonic() + HOUR)
    times = brokers.store.times.values()
    assert len(times) == ATTEMPTS
    limit_s = brokers.reviews[0]._context.intervals.review_s
    assert all(later - earlier <= limit_s for seen in times for earlier, later in pairwise(seen))
    assert sum(map(len, times)) <= ATTEMPTS * (HOUR / (limit_s - 20) + 1)  # no attempt is reviewed by every broker
    assert min(brokers.store.of_owner.values()) >= 0.7 * sum(map(len, times)) / count


async def test_a_cheaper_spot_offer_starts_one_review_of_each() -> None:
    brokers = Brokers(3)
    for _ in range(ATTEMPTS):
        await running(brokers.store)
    brokers.due = [brokers.clock.monotonic() + number for number in range(3)]
    await brokers.run_until(brokers.clock.monotonic() + 60)
    before, news_s = sum(map(len, brokers.store.times.values())), min(brokers.due)
    brokers.offers = (build.offer(usd_per_hour=build.offer().usd_per_hour / 2),)
    await brokers.run_until(max(brokers.due) + 20)
    assert all(seen[-1] >= news_s for seen in brokers.store.times.values())
    # The first claim after the news may come twice, because its moment is known up to the duration of a query only.
    assert sum(map(len, brokers.store.times.values())) - before in range(ATTEMPTS, ATTEMPTS + CLAIM + 1)


async def test_slow_reviews_are_not_late_by_their_own_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """240 reviews of 0.3 s would take 216 s with a pause of twice the time of their decisions."""
    brokers = Brokers(1)
    (review,), clock = brokers.reviews, brokers.clock
    for _ in range(ATTEMPTS):
        await running(brokers.store)

    def decide(facts: ActiveReview) -> Stay:
        clock.time += timedelta(seconds=0.3)
        return Stay(reason="no cheaper offer")

    review.decide = decide
    monkeypatch.setattr(attempt_review, "may_move", lambda job, attempt: True)
    while clock.monotonic() < HOUR:
        await review.step()
        clock.time += timedelta(seconds=max(0.01, review.every_s))
    limit_s = review._context.intervals.review_s
    assert len(brokers.store.times) == ATTEMPTS
    assert all(later - earlier <= limit_s for seen in brokers.store.times.values() for earlier, later in pairwise(seen))
