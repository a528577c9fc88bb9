"""The last charge meets a tick of billing."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from broker.domain.job import JobState
from broker.domain.money import ZERO
from broker.ports import Change, Charge
from tests.support.rig.broker_rig import QUICK, RigBuilder


async def test_a_settlement_that_raced_billing_is_made_in_the_next_round(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for the lease's expiry would let billing continue past the machine's end."""
    rig = build_rig()
    rig.intervals = replace(QUICK, lease_s=600)
    lost: list[bool] = []
    apply = rig.store.apply

    async def after_billing(changes: Sequence[Change]) -> Sequence[bool]:
        settled = [change for change in changes if change.charge is not None and change.attempt is not None]
        if settled and not lost:
            await rig.store.charge([_tick(settled[0])])
            held = await apply(changes)
            lost.append(held[changes.index(settled[0])])
            return held
        return await apply(changes)

    monkeypatch.setattr(rig.store, "apply", after_billing)
    async with rig.running():
        job = await rig.submit()
        await rig.state_of(job, JobState.SUCCEEDED)
        assert lost == [False]
        (attempt,) = await rig.attempts(job)
        assert attempt.absent_at is not None
        assert attempt.charged_to is not None
        assert attempt.charged_to - attempt.absent_at < timedelta(seconds=60)


def _tick(settling: Change) -> Charge:
    """Return a charge up to a time that is later than the closing controller knows."""
    assert settling.charge is not None
    assert settling.attempt is not None
    attempt = settling.attempt[0]
    since = attempt.charged_to
    to = (since or attempt.created_at) + timedelta(milliseconds=1)
    return Charge(attempt_id=attempt.id, job_id=attempt.job_id, since=since, to=to, usd=ZERO)
