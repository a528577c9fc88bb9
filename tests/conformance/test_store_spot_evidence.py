"""Contract of every store for what spot markets have shown, and the effect of this history on the spot policy."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

from broker.controllers.base.context import ControllerContext
from broker.controllers.market.observed_runs import ObservedRuns
from broker.domain.job import AttemptState, Reason
from broker.domain.market.offer_history import BucketFigures, MarketGroup, OfferSample, bucket_of
from broker.domain.market.spot_evidence import OwnSpotRun
from broker.domain.offer import Offer
from broker.estimator.planning.corrections import NO_CORRECTIONS, Corrections
from broker.ports import Change, Lane, Store
from broker.quote.engine import quote
from tests.conformance.samples import HOUR, START, ManualClock, admission, claimed_job, in_state, make_line, submitted
from tests.support import build
from tests.support.machines import CAPS, WORK, offer, spec

A = offer(id="a", region="zone-a", spot=True, usd_per_hour=Decimal("0.80"), on_demand_usd_per_hour=Decimal("2.50"))
B = replace(A, id="b", region="zone-b")
ON_DEMAND = offer(id="od")
SINCE = START - timedelta(days=14)


async def ran(store: Store, where: Offer, begin_h: float, hours: float, reason: Reason, *, nodes: int = 1) -> None:
    """Store an attempt on spot that began `begin_h` hours before now."""
    await submitted(store)
    asked = admission(await claimed_job(store))
    assert asked.admit is not None
    line = replace(make_line(), offer=where, nodes=nodes)
    assert await store.apply([replace(asked, admit=replace(asked.admit, line=line))]) == [True]
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="launch", lease_s=HOUR, limit=1)
    began = START - timedelta(hours=begin_h)
    ended = replace(
        in_state(leased.attempt, AttemptState.TERMINATING), create_sent_at=began, running_at=began, reason=reason,
        terminating_since=began + timedelta(hours=hours),
    )  # fmt: skip
    assert await store.apply([Change(attempt=(leased.attempt, ended))]) == [True]


async def learned(store: Store) -> Corrections:
    """Return the corrections as the daemon's controller reads them."""
    context = ControllerContext(
        installation=build.INSTALLATION, owner="broker", store=store, blobs=None, providers={}, clock=ManualClock()  # type: ignore[arg-type]
    )  # fmt: skip
    observed = ObservedRuns(context, lambda: [A, B, ON_DEMAND])
    await observed.step()
    return observed()


def preferred(corrections: Corrections) -> str | None:
    """Return the offer that a job with a deadline buys now."""
    deadline = (START + timedelta(hours=10)).isoformat()
    quoted = quote(
        spec(deadline=deadline), WORK, [A, B, ON_DEMAND], now=START, local_files=False, scoped_store=True,
        spent=Decimal(0), cap_left=Decimal(100), excluded={}, caps=CAPS, learned=corrections,
    )  # fmt: skip
    assert quoted.spot_outlook is not None
    return quoted.spot_outlook.offer_id


async def test_a_zone_that_preempts_often_is_avoided(store: Store) -> None:
    for number in range(12):
        await ran(store, A, 6 * number + 8, 0.3, Reason.PREEMPTED)
        await ran(store, B, 6 * number + 8, 5.0, Reason.STOPPED)
    assert preferred(NO_CORRECTIONS) == "a", "without history the prior and the id decide"
    known = await learned(store)
    assert preferred(replace(known, spots={})) == "b", "by the timelines alone"
    assert preferred(known) == "b"


async def test_refused_creates_and_listings_are_evidence(store: Store) -> None:
    now, group = bucket_of(START), MarketGroup.of(A)
    figures = [{group: BucketFigures(1, 1, 100)}, {}, {group: BucketFigures(1, 1, 100)}]
    await store.record_offers(
        [OfferSample(provider="cloud", bucket=now - 3 + n, figures=each) for n, each in enumerate(figures)]
    )
    await store.record_refusal(MarketGroup.of(B), now - 2)
    await store.record_refusal(MarketGroup.of(B)._replace(spot=False), now - 2)
    await store.record_refusal(MarketGroup.of(B), bucket_of(SINCE) - 1)
    minute = 5.0 * now
    assert (await learned(store)).markets == {
        (*group[:5], 1): ((minute - 15, True), (minute - 10, False), (minute - 5, True)),
        (*MarketGroup.of(B)[:5], 1): ((minute - 10, False),),
    }


async def test_own_machines_are_evidence_with_their_ages(store: Store) -> None:
    await ran(store, A, 3.0, 2.0, Reason.PREEMPTED, nodes=2)
    await ran(store, B, 3.0, 1.0, Reason.STOPPED)
    await ran(store, ON_DEMAND, 3.0, 1.0, Reason.STOPPED)
    await ran(store, A, 24 * 15, 1.0, Reason.STOPPED)
    runs = (await store.spot_evidence([], since=SINCE)).runs
    at = START.timestamp()
    assert sorted(runs) == [
        OwnSpotRun(MarketGroup.of(A), 2, at - 3 * HOUR, at - HOUR, True),
        OwnSpotRun(MarketGroup.of(B), 1, at - 3 * HOUR, at - 2 * HOUR, False),
    ]


async def test_unchanged_evidence_keeps_the_corrections(store: Store) -> None:
    context = ControllerContext(
        installation=build.INSTALLATION, owner="broker", store=store, blobs=None, providers={}, clock=ManualClock()  # type: ignore[arg-type]
    )  # fmt: skip
    await ran(store, A, 3.0, 2.0, Reason.PREEMPTED)
    observed = ObservedRuns(context, lambda: [A])
    await observed.step()
    first = observed()
    await observed._read_spots()
    assert observed() is first
