"""Contract of every store for decision records, which are stored with an attempt and visible to its team alone."""

from dataclasses import replace

from broker.domain.tenancy import Tenant
from broker.ports import Store
from tests.conformance.samples import admission, claimed_job, submitted

RECORD = b"every offer"


def of(team: str) -> Tenant:
    return Tenant(team=team, owner="ann", token_id="t")


async def test_a_decision_is_kept_with_the_attempt_that_it_led_to(store: Store) -> None:
    job = await submitted(store)
    change = replace(admission(await claimed_job(store)), decision=RECORD)
    assert change.admit is not None
    assert await store.as_tenant(of(job.team)).decision(change.admit.id) is None
    assert await store.apply([change]) == [True]
    assert await store.as_tenant(of(job.team)).decision(change.admit.id) == RECORD
    assert await store.as_tenant(of("another")).decision(change.admit.id) is None


async def test_a_refused_admission_stores_no_decision(store: Store) -> None:
    job = await submitted(store)
    change = replace(admission(await claimed_job(store)), decision=RECORD)
    assert change.admit is not None
    assert change.job is not None
    stale = replace(change, job=(replace(change.job[0], epoch=change.job[0].epoch - 1), change.job[1]))
    assert await store.apply([stale]) == [False]
    assert await store.as_tenant(of(job.team)).decision(change.admit.id) is None


async def test_an_attempt_without_a_decision_reads_as_none(store: Store) -> None:
    job = await submitted(store)
    change = replace(admission(await claimed_job(store)), decision=None)
    assert change.admit is not None
    assert await store.apply([change]) == [True]
    assert await store.as_tenant(of(job.team)).decision(change.admit.id) is None
