"""Contract of every store for reviews of attempts: one broker reviews each attempt, in time."""

from broker.domain.job import AttemptState
from broker.ports import Lane, Note, Store
from tests.conformance.conftest import TimedStore
from tests.conformance.samples import HOUR, make_event, running

FAR = 1e6


async def claimed(
    store: Store, owner: str, older_s: float, own_older_s: float = FAR, *, limit: int = 9, providers: str = "simulated"
) -> list[str]:
    rows = await store.claim_reviews(
        owner=owner, providers=[providers], older_s=older_s, own_older_s=own_older_s, limit=limit
    )
    assert all(row.job.id == row.attempt.job_id for row in rows)
    return [row.attempt.id for row in rows]


async def test_one_broker_reviews_each_attempt_once_an_interval(timed_store: TimedStore) -> None:
    store = timed_store.store
    ids = [(await running(store))[0].id for _ in range(3)]
    first = await claimed(store, "a", 100, limit=2)
    second = await claimed(store, "b", 100)
    assert sorted(first + second) == sorted(ids)
    assert await claimed(store, "a", 100) == await claimed(store, "b", 100) == []
    await timed_store.pass_time(101)
    assert await claimed(store, "a", 200) == []
    assert await claimed(store, "b", 100, limit=2) == first  # the oldest first


async def test_market_news_makes_own_reviews_due(timed_store: TimedStore) -> None:
    store = timed_store.store
    await running(store)
    await running(store)
    (of_a,) = await claimed(store, "a", 100, limit=1)
    (of_b,) = await claimed(store, "b", 100)
    await timed_store.pass_time(10)
    assert await claimed(store, "a", 100, own_older_s=5) == [of_a]
    assert await claimed(store, "a", 100, own_older_s=5) == []
    assert await claimed(store, "b", 100, own_older_s=5) == [of_b]


async def test_only_training_attempts_of_own_clouds_are_reviewed(store: Store) -> None:
    await running(store, AttemptState.BOOTING)
    attempt, job = await running(store)
    await running(store, AttemptState.TERMINATING)
    assert await claimed(store, "a", 100, providers="other") == []
    assert await claimed(store, "a", 100) == [attempt.id]
    await store.request_stop(job.id, make_event(job))
    assert await claimed(store, "a", 0) == []


async def test_a_reason_to_stay_is_reported_by_one_broker(store: Store) -> None:
    attempt, job = await running(store)

    def note(reason: str) -> Note:
        report = make_event(job, "attempt.stays", message=reason)
        return Note(attempt=attempt, job=job, forecast=None, idle=None, stays=reason, events=(report,))

    assert await store.note([note("no spot\0offer")]) == [True]
    assert await store.note([note("no spot offer")]) == [False]  # another broker, which read the attempt before
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="a", lease_s=HOUR, limit=1)
    assert leased.attempt.stays == "no spot\ufffdoffer"
    events = await store.events(job.id, after=0, limit=99)
    assert [event.kind for event in events].count("attempt.stays") == 1
