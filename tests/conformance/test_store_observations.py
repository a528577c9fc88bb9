"""Contract of every store for the measurements of ended attempts and for a job's plan after memory ran out."""

from dataclasses import replace

from broker.domain.ids import AttemptId
from broker.domain.job import AttemptState, Job, JobState, PlanAdjustment, Reason
from broker.domain.tenancy import Tenant
from broker.domain.workload import Plan, RunObservation
from broker.ports import Change, Lane, Store
from tests.conformance.samples import HOUR, START, make_job, running

WORK = make_job().workload


def observation(
    attempt_id: AttemptId, *, hardware: str = "l40s", rate: float = 100.0, lora_r: int = 0
) -> RunObservation:
    return RunObservation(
        attempt_id=attempt_id, hardware=hardware, plan=Plan(micro_batch=1), nodes=1, cores=8,
        workload=replace(WORK, lora_r=lora_r), tokens_per_s=rate, peak_bytes=7, device_bytes=9,
    )  # fmt: skip


async def end(store: Store, *, seen: str = "l40s", rate: float = 100.0, stale: bool = False) -> tuple[bool, Job]:
    """End an attempt with its observation; `stale`: under a lease that was lost."""
    await running(store, AttemptState.TERMINATING)
    (attempt,) = await store.claim_attempts(Lane.TERMINATION, owner="a", lease_s=HOUR, limit=1)
    read = replace(attempt.attempt, epoch=attempt.attempt.epoch - stale)
    ended = replace(attempt.attempt, state=AttemptState.ENDED, reason=Reason.OOM, ended_at=START)
    remedy = PlanAdjustment(
        failed_plans=("micro-batch 8 on l40s",), micro_batch=4, memory_factor=1.25, oom_device_bytes=10
    )
    after = replace(attempt.job, state=JobState.RECOVERING, remedy=remedy)
    change = Change(
        attempt=(read, ended),
        job=(attempt.job, after),
        observation=observation(ended.id, hardware=seen, rate=rate),
    )
    (held,) = await store.apply([change])
    return held, attempt.job


async def test_observation_is_stored_with_the_attempts_end(store: Store) -> None:
    """An observation is kept with the end of its attempt and the plan with its job."""
    held, job = await end(store)
    assert held
    (stored,) = await store.observations(max_per_pair=9)
    assert stored == observation(stored.attempt_id)
    row = await store.job(job.id)
    assert row is not None
    assert row.remedy == PlanAdjustment(
        failed_plans=("micro-batch 8 on l40s",), micro_batch=4, memory_factor=1.25, oom_device_bytes=10
    )


async def test_an_end_that_was_refused_stores_no_observation(store: Store) -> None:
    held, job = await end(store, stale=True)
    assert not held
    assert await store.observations(max_per_pair=9) == []
    row = await store.job(job.id)
    assert row is not None
    assert row.remedy is None


async def test_the_latest_of_each_gpu_are_read_older_ones_first(store: Store) -> None:
    for rate in (1.0, 2.0, 3.0):
        await end(store, rate=rate)
        await end(store, rate=10 * rate, seen="l4")
    rates = [
        (observation.hardware, observation.tokens_per_s) for observation in await store.observations(max_per_pair=2)
    ]
    assert rates == [("l40s", 2.0), ("l4", 20.0), ("l40s", 3.0), ("l4", 30.0)]


async def test_all_teams_learn_from_one_table_that_no_team_can_read(store: Store) -> None:
    """Rows name no team, and the tenants' store has no method that reads them."""
    await end(store)
    tenant = store.as_tenant(Tenant(team="default", owner="ann", token_id="t"))
    assert not hasattr(tenant, "observations")
    (stored,) = await store.observations(max_per_pair=1)
    assert "ann" not in repr(stored)
