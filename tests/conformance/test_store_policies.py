"""Contract of every store for policies: write access, held jobs and single reports."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from broker.domain.errors import OverBudget, StaleVersion, StoreError
from broker.domain.job import JobState
from broker.domain.money import LedgerEntry, LedgerKind
from broker.domain.spending import SpendWindow
from broker.domain.tenancy import Tenant
from broker.ports import AuditFilter, Change, Store
from tests.conformance.policies import ANN, EVE, admit, budget, charge, end, policy, standing
from tests.conformance.samples import (
    HOUR,
    START,
    admission,
    claimed_job,
    make_event,
    running,
    submitted,
)

# ------------------------------------------------------------------------------------------------------------- writing


async def test_a_policy_has_versions_and_a_history(store: Store) -> None:
    first, second = policy(max_gpus=1), policy(max_gpus=2)
    stored = await store.put_policy(first)
    assert (stored.version, stored.policy, stored.changed_by) == (1, first, "gpubroker")
    assert await store.put_policy(first) == stored
    assert (await store.put_policy(second)).version == 2
    assert [one.policy for one in await store.policies()] == [second]
    assert not await store.delete_policy("default", "limits", 1)
    assert await store.delete_policy("default", "limits", 2)
    assert not await store.delete_policy("default", "limits")
    assert await store.policies() == []
    again = await store.put_policy(first)
    assert (again.version, again.id) == (4, stored.id)
    history = await store.policy_history("default", "limits")
    assert [(one.version, one.policy) for one in history] == [(4, first), (3, None), (2, second), (1, first)]
    assert await store.policy_history("default", "other") == []
    assert not await store.delete_policy("default", "other")


async def test_a_policy_replaces_only_the_version_that_was_seen(store: Store) -> None:
    first, second = policy(max_gpus=1), policy(max_gpus=2)
    with pytest.raises(StaleVersion, match="is not stored, but version 1 was edited"):
        await store.put_policy(first, replaces=1)
    assert (await store.put_policy(first, replaces=0)).version == 1
    for stale in (0, 2):
        with pytest.raises(StaleVersion, match="the policy limits of team default is at version 1"):
            await store.put_policy(second, replaces=stale)
    assert (await store.put_policy(first, replaces=0)).version == 1  # the repeat of a write whose answer was lost
    assert (await store.put_policy(second, replaces=1)).version == 2
    assert await store.delete_policy("default", "limits")
    with pytest.raises(StaleVersion, match="is deleted, but version 2 was edited"):
        await store.put_policy(first, replaces=2)
    assert (await store.put_policy(first, replaces=0)).version == 4
    assert len(await store.policy_history("default", "limits")) == 4


async def test_one_name_is_free_for_every_team_and_the_installation(store: Store) -> None:
    await store.put_team("web", "")
    for team in ("default", "web", None):
        await store.put_policy(policy(team=team, max_jobs=1))
    assert [one.policy.team for one in await store.policies()] == ["default", "web", None]


async def test_a_team_writes_its_own_policies_and_sees_no_others(store: Store) -> None:
    await store.put_team("web", "")
    ann, eve = store.as_tenant(ANN), store.as_tenant(EVE)
    await ann.put_policy(policy(max_gpus=1))
    await store.put_policy(policy(team=None, name="all", max_gpus=9))
    for other in (policy(max_gpus=7), policy(team=None, max_gpus=7)):
        with pytest.raises(StoreError, match="policies_team"):
            await eve.put_policy(other)
    assert not await eve.delete_policy("default", "limits")
    assert not await ann.delete_policy(None, "all")
    assert (await eve.policies(), (await eve.budgets())[1], await eve.policy_history("default", "limits")) == (
        [],
        [],
        [],
    )
    assert [one.policy.name for one in await ann.policies()] == ["limits"]
    assert [one.policy.name for one in (await ann.budgets())[1]] == ["limits"]
    operator = store.as_tenant(Tenant(team="web", owner="root", operator=True))
    assert len(await operator.policies()) == 2


async def test_every_version_is_in_the_audit(store: Store) -> None:
    ann = store.as_tenant(ANN)
    await ann.put_policy(policy(max_gpus=1))
    await ann.put_policy(policy(max_gpus=2))
    await ann.delete_policy("default", "limits")
    found = [(e.actor, e.action, e.target, e.before, e.after) for e in await ann.audit(AuditFilter(action="policy"))]
    one, two = ({"name": "limits", "team": "default", "max_gpus": n} for n in (1, 2))
    assert sorted(found, key=str) == sorted(
        [
            ("ann", "policy.apply", "limits", None, one),
            ("ann", "policy.apply", "limits", one, two),
            ("ann", "policy.delete", "limits", two, None),
        ],
        key=str,
    )


# ------------------------------------------------------------------------------------------------------------ admitting


@pytest.mark.parametrize(
    "rules",
    [
        {"budgets": [budget("20")]},
        {"budgets": [budget("500"), {"limit_usd": "20", "per": "day"}]},
        {"max_jobs": 2},
        {"max_gpus": 2},
    ],
)
async def test_the_third_job_of_two_that_fit_waits(store: Store, rules: dict[str, Any]) -> None:
    await store.put_policy(policy(**rules))
    assert [await admit(store) for _ in range(3)] == [True, True, False]
    now = await standing(store)
    assert (now.outstanding_usd, now.jobs, now.gpus) == (Decimal(19), 2, 2)


async def test_a_refused_admission_leaves_nothing(store: Store) -> None:
    await store.put_policy(policy(max_jobs=0))
    job = await submitted(store)
    held = await store.apply([admission(await claimed_job(store))])
    assert held == [False]
    assert await store.attempts(job.id) == []
    assert await store.ledger(job.id) == []
    assert await store.events(job.id, after=0, limit=9) == []
    stored_job = await store.job(job.id)
    assert stored_job is not None
    assert (stored_job.state, stored_job.attempts) == (JobState.QUEUED, 0)


async def test_admissions_of_one_batch_are_judged_one_after_the_other(store: Store) -> None:
    await store.put_policy(policy(budgets=[budget("30")]))
    for _ in range(5):
        await submitted(store)
    jobs = await store.claim_jobs([JobState.QUEUED], owner="p", lease_s=HOUR, limit=9)
    assert await store.apply([admission(job) for job in jobs]) == [True, True, True, False, False]
    assert (await standing(store)).outstanding_usd == Decimal("28.5")


@pytest.mark.parametrize(
    ("scope", "theirs"),
    [
        ({"team": "default"}, [True, True, False, False]),
        ({"team": None}, [True, False, False, False]),
        ({"team": None, "user": "ann"}, [True, True, True, False]),
        ({"team": "default", "user": "bob"}, [True, True, True, False]),
    ],
)
async def test_a_policy_limits_only_the_jobs_it_covers(store: Store, scope: dict[str, Any], theirs: list[bool]) -> None:
    await store.put_team("web", "")
    await store.put_policy(policy(max_jobs=1, **scope))
    everybody = [
        ("default", "ann"),
        ("web", "eve"),
        ("default", "bob"),
        ("default", "bob" if scope.get("user") == "bob" else "ann"),
    ]
    if scope.get("user") == "bob":
        everybody = [("default", "ann"), ("web", "bob"), ("default", "bob"), ("default", "bob")]
    assert [await admit(store, team=team, owner=owner) for team, owner in everybody] == theirs


async def test_every_policy_that_covers_a_job_must_allow_it(store: Store) -> None:
    for name, rules in (
        ("team", {"max_jobs": 5}),
        ("ann", {"user": "ann", "max_jobs": 1}),
        ("all", {"team": None, "max_jobs": 2}),
    ):
        await store.put_policy(policy(name=name, **rules))
    assert [await admit(store, owner=who) for who in ("ann", "ann", "bob", "bob")] == [True, False, True, False]


async def test_a_deleted_or_changed_policy_no_longer_limits_jobs(store: Store) -> None:
    await store.put_policy(policy(max_jobs=0))
    assert not await admit(store)
    await store.put_policy(policy(max_jobs=1))
    assert await admit(store)
    assert not await admit(store)
    await store.delete_policy("default", "limits")
    assert await admit(store)


# -------------------------------------------------------------------------------------------------------------- money


async def test_charges_move_from_reserved_to_spent_and_the_rest_is_released(store: Store) -> None:
    """A charge moves from reserved to spent, and the rest of the reservation is released."""
    await store.put_policy(policy(budgets=[budget("20"), {"limit_usd": "20", "per": "day"}]))
    _, job = await running(store)
    await charge(store, job, "3.5")
    now = await standing(store)
    assert (now.charged, now.outstanding_usd) == ((Decimal("3.5"),) * 2, Decimal(6))
    await charge(store, job, "7")  # more than was reserved: a late sighting
    now = await standing(store)
    assert (now.charged[0], now.outstanding_usd) == (Decimal("10.5"), 0)
    await end(store, job)
    await charge(store, job, "0.25", LedgerKind.ADJUSTMENT)
    now = await standing(store)
    assert (now.charged[0], now.outstanding_usd, now.jobs, now.gpus) == (Decimal("10.75"), 0, 0, 0)
    assert not await admit(store)  # $9.50 more is too much
    await store.put_policy(policy(budgets=[budget("20.25")]))
    assert await admit(store)


async def test_storage_counts_without_an_attempt(store: Store) -> None:
    await store.put_policy(policy(budgets=[budget("20")]))
    _, job = await running(store)
    attempt = (await store.attempts(job.id))[0]
    entry = LedgerEntry(job_id=job.id, attempt_id=attempt.id, kind=LedgerKind.ADJUSTMENT, usd=Decimal("1.25"))
    await store.apply([Change(ledger=(entry,), events=(make_event(job),))])
    assert (await standing(store)).charged == (Decimal("1.25"),)


@pytest.mark.parametrize("usd", ["NaN", "-1", "Infinity"])
async def test_amounts_that_are_not_finite_are_refused(store: Store, usd: str) -> None:
    await store.put_policy(policy(budgets=[budget("20")]))
    attempt, job = await running(store)
    entry = LedgerEntry(job_id=job.id, attempt_id=attempt.id, kind=LedgerKind.CHARGE, usd=Decimal(usd))
    with pytest.raises(StoreError):
        await store.apply([Change(ledger=(entry,))])
    with pytest.raises(StoreError):
        await charge(store, job, usd)
    assert (await standing(store)).charged == (0,)


# ------------------------------------------------------------------------------------------------------- raising a cap


async def test_a_higher_cap_reserves_the_difference_for_the_attempt_that_runs(store: Store) -> None:
    await store.put_policy(policy(budgets=[budget("25")]))
    attempt, job = await running(store)
    raised = await store.raise_cap(job.id, Decimal(20), make_event(job))
    assert raised is not None
    assert raised.cap_usd == 20
    (now,) = await store.attempts(job.id)
    assert (attempt.reserved_usd, now.reserved_usd) == (Decimal("9.5"), Decimal(20))
    assert [(e.kind, e.usd, e.note) for e in await store.ledger(job.id)][1:] == [
        (LedgerKind.RESERVATION, Decimal("10.5"), "cap raised")
    ]
    with pytest.raises(OverBudget, match=r"stays \$20.00, since it runs and waits for policy limits"):
        await store.raise_cap(job.id, Decimal("25.5"), make_event(job))
    assert [(await store.job(job.id)) == raised, (await store.attempts(job.id))[0] == now] == [True, True]


async def test_a_higher_cap_that_needs_approval_is_approved_first(store: Store) -> None:
    await store.put_policy(policy(approval_above_usd="15"))
    _, job = await running(store)
    with pytest.raises(OverBudget, match=f"gpubroker approve {job.id} --up-to USD"):
        await store.raise_cap(job.id, Decimal(20), make_event(job))
    await store.approve(job.id, Decimal(20), make_event(job))
    raised = await store.raise_cap(job.id, Decimal(20), make_event(job))
    assert raised is not None
    assert raised.cap_usd == 20


async def test_cap_of_an_idle_job_is_raised_without_a_reservation(store: Store) -> None:
    """The cap of a job that does not run is raised without a reservation."""
    await store.put_policy(policy(max_jobs=0, budgets=[budget("1")]))
    job = await submitted(store)
    raised = await store.raise_cap(job.id, Decimal(20), make_event(job))
    assert raised is not None
    assert (raised.cap_usd, await store.ledger(job.id)) == (20, [])


async def test_another_team_raises_no_cap(store: Store) -> None:
    await store.put_team("web", "")
    _, job = await running(store)
    assert await store.as_tenant(EVE).raise_cap(job.id, Decimal(20), make_event(job)) is None
    assert await store.as_tenant(EVE).approve(job.id, Decimal(20), make_event(job)) is None
    raised = await store.as_tenant(ANN).raise_cap(job.id, Decimal(20), make_event(job))
    assert raised is not None
    assert raised.cap_usd == 20
    (entry,) = await store.audit(AuditFilter(action="job.raise_cap"))
    assert (entry.actor, entry.usd) == ("ann", 10)


async def test_ledger_and_budgets_use_trusted_time_not_the_databases_clock(store: Store) -> None:
    """The database's clock is set a day ahead. No entry gets the wrong day, and no new day's budget opens."""
    await store.put_policy(policy(budgets=[{"limit_usd": "20", "per": "day"}]))
    _, job = await running(store)
    store.use_time(lambda: START)
    await charge(store, job, "3")
    now, (applied,) = await store.budgets()
    assert (now, applied.usage.charged) == (START, (Decimal(3),))
    (piece,) = (await store.paid(SpendWindow(since=START, until=START + timedelta(seconds=1)))).slices
    assert piece.usd == 3
    assert (await store.past(START)).now == START
