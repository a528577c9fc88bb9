"""Jobs under policies over both stores: they wait, await approval, drain and continue."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from broker.controllers.billing.budgets import Budgets
from broker.controllers.observation.inventory import Inventory
from broker.controllers.provisioning.placement import Placement
from broker.domain.job import AttemptState, Event, JobState, Reason, Signal
from broker.domain.money import LedgerKind
from broker.domain.notifications import NOTICES, Notice
from broker.domain.policy import Policy
from broker.ports import Note, Store
from tests.support.rig.broker_rig import RigBuilder
from tests.support.rig.simulated_cloud import CloudFaults


def policy(**rules: Any) -> Policy:
    return Policy.model_validate({"name": "limits", "team": "default", **rules})


def day(limit: str, *thresholds: tuple[str, str]) -> list[dict[str, Any]]:
    thresholds_of_policy = [{"at": at, "action": action} for at, action in thresholds]
    return [{"limit_usd": limit, "per": "day", "window": "rolling", "thresholds": thresholds_of_policy}]


async def test_a_job_waits_for_budget_and_says_so(build_rig: RigBuilder, store: Store) -> None:
    rig = build_rig(virtual={"run_s": 3600, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02, "steps": 100})
    await store.put_policy(policy(budgets=day("15")))
    async with rig.running():
        first = await rig.submit()
        await rig.state_of(first, JobState.ACTIVE)
        second = await rig.submit()
        waiting = await rig.until(second, lambda job: "waits for policy limits" in job.reason)
        assert (waiting.state, waiting.attempts) == (JobState.QUEUED, 0)
        assert "leaves less than the $10.00 it reserves" in waiting.reason
        rig.body._config = rig.body._config.model_copy(update={"run_s": 0.4})  # of the next machine
        await rig.stop(first)
        await rig.state_of(first, JobState.CANCELLED)
        await rig.state_of(second, JobState.SUCCEEDED)
    assert [event.kind for event in await rig.events(second)].count("job.waiting") == 1


async def test_purchases_are_limited_to_the_gpus_that_a_policy_leaves_free(build_rig: RigBuilder, store: Store) -> None:
    rig = build_rig()
    await store.put_policy(policy(max_gpus=0))
    async with rig.running():
        job = await rig.submit()
        waiting = await rig.until(
            job, lambda found: "max_gpus of policy limits is 0, of which 0 are free" in found.reason
        )
        assert waiting.state is JobState.QUEUED
        await store.put_policy(policy(max_gpus=1))
        await rig.state_of(job, JobState.SUCCEEDED)
    (attempt,) = await rig.attempts(job)
    assert attempt.line.offer.gpus * attempt.line.nodes == 1


async def test_max_gpus_counts_the_gpus_of_all_machines(build_rig: RigBuilder, store: Store) -> None:
    rig = build_rig(cloud_faults=CloudFaults(caps={"multi_node": True}))
    await rig.market.step()
    small = next(offer for offer in rig.market.offers() if offer.gpus == 1 and not offer.spot)
    cheap = replace(small, id=f"{small.id}/2", gpus=2, usd_per_hour=small.usd_per_hour / 2)
    await store.put_policy(policy(max_gpus=2))
    job = await rig.submit(resources={"nodes": 2})
    context = rig.fleet("one").context
    await Placement(context, Inventory(context), lambda: [cheap, small]).step()
    assert [attempt.line.offer.id for attempt in await rig.attempts(job)] == [small.id]


async def test_a_job_that_needs_approval_waits_for_it_and_is_asked_once(build_rig: RigBuilder, store: Store) -> None:
    rig = build_rig()
    await store.put_policy(policy(approval_above_usd="5"))
    async with rig.running():
        job = await rig.submit()
        waiting = await rig.state_of(job, JobState.AWAITING_APPROVAL)
        assert waiting.reason == "waits for approval: policy limits requires it above a cap of $5.0000"
        await store.approve(job, Decimal(10), Event(job_id=job, kind="job.approved", message="approved by ann"))
        await rig.state_of(job, JobState.SUCCEEDED)
    kinds = [event.kind for event in await rig.events(job)]
    assert (kinds.count("job.awaiting_approval"), kinds.count("job.approved")) == (1, 1)


async def test_job_awaiting_approval_can_be_stopped_and_is_freed_with_its_policy(
    build_rig: RigBuilder, store: Store
) -> None:
    """A job that awaits approval can be stopped and is freed with the policy."""
    rig = build_rig()
    await store.put_policy(policy(approval_above_usd="5"))
    async with rig.running():
        refused, other = await rig.submit(), await rig.submit()
        for job in (refused, other):
            await rig.state_of(job, JobState.AWAITING_APPROVAL)
        await rig.stop(refused)
        await rig.state_of(refused, JobState.CANCELLED)
        await store.delete_policy("default", "limits")
        await rig.state_of(other, JobState.SUCCEEDED)
    assert "job.approval_waived" in [event.kind for event in await rig.events(other)]


async def test_a_drained_job_waits_and_continues_when_the_budget_allows_it(build_rig: RigBuilder, store: Store) -> None:
    """The machine trains for an hour, so that it is drained on a slow computer, too."""
    rig = build_rig(virtual={"run_s": 3600, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02, "steps": 100})
    rig.limits = rig.limits.model_copy(update={"drain_s": 3600})
    tight = policy(budgets=day("0.06", ("0.0001", "notify"), ("0.0002", "drain")))
    await store.put_policy(tight)
    async with rig.running("one", "two"):
        job = await rig.submit(cap_usd="0.05")
        waiting = await rig.until(
            job, lambda found: found.state is JobState.QUEUED and "nothing is launched" in found.reason, within_s=120
        )
        (attempt,) = await rig.attempts(job)
        assert (attempt.reason, waiting.retries_used) == (Reason.BUDGET, 0)
        assert await rig.machines() == []
        rig.body._config = rig.body._config.model_copy(update={"run_s": 0.4})  # of the next machine
        await store.put_policy(policy(budgets=day("100")))
        done = await rig.state_of(job, JobState.SUCCEEDED)
    assert done.attempts == 2
    assert [event.kind for event in await rig.events(job)].count("job.budget_drain") == 1
    actions = [notice.data["action"] for notice in await notices(store)]
    assert sorted(actions) == ["drain", "notify"]  # once each, though two brokers looked


async def test_wrong_clock_of_the_database_delays_no_drain(build_rig: RigBuilder, store: Store) -> None:
    rig = build_rig(virtual={"run_s": 3600, "boot_s": 0.05, "beat_s": 0.1, "tick_s": 0.02, "steps": 100})

    async def is_clock_right() -> bool:
        return False

    async with rig.running():
        job = await rig.submit(cap_usd="5")
        await rig.until(job, lambda found: found.spent_usd > 0)
    await store.put_policy(policy(budgets=day("0.0001", ("0.0001", "drain"))))
    await Budgets(replace(rig.fleet("another").context, is_clock_right=is_clock_right)).step()
    assert (await rig.attempts(job))[0].signal is Signal.BUDGET


@pytest.mark.parametrize(
    ("signal", "reason", "then"),
    [(Signal.BUDGET, Reason.BUDGET, JobState.RECOVERING), (Signal.OUT_OF_TIME, Reason.OUT_OF_TIME, JobState.FAILED)],
)
async def test_an_attempt_signalled_before_its_launch_buys_no_machine(
    build_rig: RigBuilder, store: Store, signal: Signal, reason: Reason, then: JobState
) -> None:
    rig = build_rig()
    await rig.market.step()
    job = await rig.submit(max_duration=3600)
    fleet = rig.fleet("one")
    controllers = {controller.name: controller for controller in fleet.controllers}
    await controllers["placement"].step()
    (leased,) = await store.live_attempts()
    note = Note(attempt=leased.attempt, job=leased.job, forecast=None, idle=None, signal=signal)
    assert await store.note([note]) == [True]
    await controllers["launch"].step()
    (ended,) = await rig.attempts(job)
    assert (ended.state, ended.reason, ended.create_sent_at) == (AttemptState.ENDED, reason, None)
    assert await rig.machines() == []
    assert (await rig.state_of(job, then)).spent_usd == 0
    ledger = [(entry.kind, entry.usd) for entry in await store.ledger(job)]
    assert ledger == [(LedgerKind.RESERVATION, ended.reserved_usd), (LedgerKind.RELEASE, ended.reserved_usd)]


async def test_a_wait_reason_is_cleared_once_the_job_is_admitted(build_rig: RigBuilder, store: Store) -> None:
    rig = build_rig()
    await rig.market.step()
    job = await rig.submit()
    controllers = {controller.name: controller for controller in rig.fleet("one").controllers}
    await controllers["placement"].step()
    (leased,) = await store.live_attempts()
    await store.note([Note(attempt=leased.attempt, job=leased.job, forecast=None, idle=None, signal=Signal.BUDGET)])
    await controllers["launch"].step()
    assert (await rig.state_of(job, JobState.RECOVERING)).reason == "budget used up"
    await controllers["placement"].step()
    assert (await rig.state_of(job, JobState.QUEUED)).reason == ""
    await controllers["placement"].step()
    active = await rig.state_of(job, JobState.ACTIVE)
    again = (await rig.attempts(job))[-1]
    assert (active.reason, active.attempts, again.state, again.reason, again.signal) == (
        "", 2, AttemptState.PLANNED, None, None,
    )  # fmt: skip


async def test_each_budget_of_a_policy_is_reported_when_reached_at_once(build_rig: RigBuilder, store: Store) -> None:
    """All budgets of a policy are reported, even if they reach the same share at once."""
    rig = build_rig()
    first = day("0.006", ("0.0001", "notify"))
    await store.put_policy(policy(budgets=[*first, {**first[0], "per": "week"}]))
    async with rig.running():
        await rig.state_of(await rig.submit(cap_usd="0.005"), JobState.SUCCEEDED)
    await Budgets(rig.fleet("late").context).step()
    assert {notice.data["budget"] for notice in await notices(store)} == {"day/rolling/0.006", "week/rolling/0.006"}


async def notices(store: Store) -> list[Notice]:
    """Return the waiting notices that belong to no job."""
    streams = await store.claim_streams(["log"], busy=[], owner="test", lease_s=60, limit=99, depth=99)
    found = [one.delivery.notice for stream in streams if stream.name == NOTICES for one in stream.pending]
    return [notice for notice in found if notice is not None]
