"""Jobs of one placement round that do not differ in what a quote reads share one quote."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from broker.domain.job import Job, PlanAdjustment
from broker.domain.offer import GIB, Offer
from broker.estimator.planning.corrections import NO_CORRECTIONS
from broker.quote.job_placement import decide_placement
from broker.quote.placement_facts import FactsNeeded, MarketFacts, PlacementDecision, QuoteCache
from tests.support.machines import CAPS, NOW, SCRIPT, WORK, offer, spec
from tests.unit.broker.quote.test_job_placement import NONE_LOST, SETTINGS, facts, job, policy

NO_IMAGES = replace(CAPS["cloud"], images=False)
SETTINGS_WITHOUT_IMAGES = replace(SETTINGS, caps={**CAPS, "cloud": NO_IMAGES})
MARKET = (
    offer(id="a", usd_per_hour=Decimal("2.10")),
    offer(id="b", spot=True, usd_per_hour=Decimal("0.90"), available=False),
    offer(id="c", gpu_memory_bytes=24 * GIB, usd_per_hour=Decimal("0.60")),
    offer(id="d", region="us", usd_per_hour=Decimal("1.50")),
    offer(id="e", gpus=4, usd_per_hour=Decimal("6.00")),
    offer(id="mine/x", provider="mine", cloud="mine", usd_per_hour=Decimal("3.00")),
)

EXCLUDED: dict[str, str] = {}


def _decide(queued: Job, offers: Sequence[Offer], quotes: QuoteCache, **changes: Any) -> PlacementDecision:
    market = MarketFacts(offers=offers, resume_from=(), learned=NO_CORRECTIONS, quotes=quotes)
    values: dict[str, Any] = {
        "restored": NONE_LOST,
        "settings": SETTINGS_WITHOUT_IMAGES,
        "excluded": EXCLUDED,
        "market": market,
    }
    decision = decide_placement(facts(queued, **values | changes))
    assert not isinstance(decision, FactsNeeded)
    return decision


def _script(**changes: Any) -> Job:
    given = spec().model_dump(exclude={"train"}) | {"script": {"code": "code.tar", "command": ["true"], **changes}}
    return job(workload=SCRIPT, spec=type(spec()).model_validate(given))


LIKE = job(workload=WORK)
OTHERS = {
    "cap": job(workload=WORK, cap_usd=Decimal(1)),
    "spent": job(workload=WORK, spent_usd=Decimal(99)),
    "memory": job(workload=WORK, remedy=PlanAdjustment(failed_plans=("a plan",), memory_factor=9.0)),
    "work": job(workload=replace(WORK, steps=5)),
    "region": job({"resources": {"regions": ["us"]}}, workload=WORK),
    "worth": job({"hour_worth_usd": "0"}, workload=WORK),
    "local": job({"train": {"model": "./model"}}, workload=WORK),
    "deadline": job({"deadline": (NOW + timedelta(hours=5)).isoformat()}, workload=WORK),
    "time": job({"max_duration": "5m"}, workload=WORK),
    "script": _script(),
    "image": _script(image="ghcr.io/lab/work:1"),
    "checkpoints": _script(checkpoints=True),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_shared_cache_changes_no_decision(other: str) -> None:
    """Every fact of a job that a quote reads separates the job from the others of its round."""
    quotes = QuoteCache()
    for queued in (LIKE, OTHERS["script"], OTHERS[other], LIKE):
        assert _decide(queued, MARKET, quotes) == _decide(queued, MARKET, QuoteCache())


def test_a_gpu_limit_of_a_policy_separates_quotes() -> None:
    quotes, limited = QuoteCache(), [policy(max_gpus=1)]
    four = job({"resources": {"gpus": 4}}, workload=WORK)
    assert _decide(four, MARKET, quotes).admit is not None
    assert _decide(four, MARKET, quotes, policies=limited).admit is None


def test_like_jobs_share_a_quote_and_its_record() -> None:
    quotes = QuoteCache()
    first, second = (_decide(job(workload=WORK, id=name * 13), MARKET, quotes) for name in "ab")
    assert first.record is second.record is not None
    assert _decide(LIKE, MARKET, QuoteCache()).record is not first.record


def test_new_offers_begin_a_new_quote() -> None:
    quotes = QuoteCache()
    assert _decide(LIKE, MARKET, quotes).admit is not None
    assert _decide(LIKE, MARKET, quotes, excluded={o.id: "sold out" for o in MARKET}).admit is None
    assert _decide(LIKE, (), quotes).admit is None


def test_a_shared_wait_counts_the_time_of_each_job() -> None:
    """The job that has waited longest buys on demand, although the first job of its round still waits for spot."""
    market = [offer(id="gone", spot=True, usd_per_hour=Decimal("0.30"), available=False), offer()]
    quotes = QuoteCache()
    new, old = (job(workload=WORK, created_at=NOW - timedelta(hours=hours)) for hours in (0, 500))
    assert _decide(new, market, quotes).admit is None
    assert _decide(old, market, quotes).admit is not None
    urgent = job({"hour_worth_usd": "100"}, workload=WORK, created_at=NOW)
    assert _decide(urgent, market, quotes).admit is not None
