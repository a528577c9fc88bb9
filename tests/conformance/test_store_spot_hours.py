"""Contract of every store for the hours of spot machines and the number of their preemptions."""

from dataclasses import replace
from datetime import timedelta

from broker.domain.job import AttemptState, Reason
from broker.domain.tenancy import Tenant
from broker.domain.workload import SpotHours
from broker.ports import Change, Lane, Store
from tests.conformance.samples import HOUR, START, admission, claimed_job, in_state, make_line, submitted

EVER = 1e9
SENT = START - timedelta(hours=4)


async def stood(store: Store, hours: float | None, reason: Reason | None, *, nodes: int = 1, **offer: object) -> None:
    """Store an attempt that ended after `hours`; None: its create was never sent."""
    await submitted(store)
    job, line = await claimed_job(store), make_line()
    asked = admission(job)
    assert asked.admit is not None
    bought = replace(line, offer=replace(line.offer, **offer), nodes=nodes)  # type: ignore[arg-type]
    assert await store.apply([replace(asked, admit=replace(asked.admit, line=bought))]) == [True]
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="launch", lease_s=HOUR, limit=1)
    if hours is None:
        return
    ended = replace(
        in_state(leased.attempt, AttemptState.TERMINATING),
        create_sent_at=SENT, terminating_since=SENT + timedelta(hours=hours), reason=reason,
    )  # fmt: skip
    assert await store.apply([Change(attempt=(leased.attempt, ended))]) == [True]


def of(hours: float, preemptions: int, **where: str) -> SpotHours:
    values = {"provider": "simulated", "cloud": "alpha", "region": "eu", "accelerator": "l40s"} | where
    return SpotHours(**values, hours=hours, preemptions=preemptions)


async def test_spot_machines_are_added_up_by_market(store: Store) -> None:
    await stood(store, 2.0, Reason.PREEMPTED)
    await stood(store, 1.0, Reason.STOPPED)
    await stood(store, 0.5, Reason.PREEMPTED, region="us")
    await stood(store, 3.0, Reason.PREEMPTED, accelerator="l4", cloud="beta", provider="vast")
    assert list(await store.spot_hours(within_s=EVER)) == [
        of(3.0, 1), of(0.5, 1, region="us"), of(3.0, 1, provider="vast", cloud="beta", accelerator="l4"),
    ]  # fmt: skip


async def test_preemption_history_counts_every_requested_spot_node(store: Store) -> None:
    """On-demand attempts and attempts whose create was never sent do not count."""
    await stood(store, 2.0, Reason.PREEMPTED, nodes=3)
    await stood(store, 9.0, Reason.PREEMPTED, spot=False)
    await stood(store, None, None, region="us")
    assert list(await store.spot_hours(within_s=EVER)) == [of(6.0, 1)]


async def test_spot_hours_before_the_window_are_omitted(store: Store) -> None:
    await stood(store, 1.0, Reason.PREEMPTED)
    assert list(await store.spot_hours(within_s=HOUR)) == []


async def test_teams_cannot_read_spot_hours(store: Store) -> None:
    assert not hasattr(store.as_tenant(Tenant(team="default", owner="ann", token_id="t")), "spot_hours")
