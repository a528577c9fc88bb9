"""A real agent under a whole broker, on credentials that live for seconds."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.grants.gate import Gate, gated
from tests.grants.soak import Soak

LIFE_S = 10.0
"""Renewed at half of it."""
GRACE_S = 20.0
"""Seconds by which a paused machine may be late to renew. The first key has long ended when the job ends."""


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    async with gated() as made:
        yield made


async def test_nothing_is_lost_over_many_lives_of_a_grant(gate: Gate, tmp_path: Path) -> None:
    await gate.fresh(LIFE_S, GRACE_S)
    outcome = await Soak(gate=gate, state=tmp_path, ticks=160, tick_s=0.25, save_s=1.0).run()
    assert (outcome.state, outcome.attempts, outcome.ticks, outcome.ticks_lost) == ("succeeded", 1, 160, 0)
    assert outcome.used >= 40 / LIFE_S
    assert outcome.checkpoints >= 3
    assert (outcome.denied, outcome.expired) == ((), 0)


async def test_expired_credentials_are_renewed_once_new_ones_exist(gate: Gate, tmp_path: Path) -> None:
    """Expired credentials are renewed once new credentials exist."""
    await gate.fresh(life_s=4.0)

    async def sts_is_away(soak: Soak) -> None:
        async with asyncio.timeout(300):
            while not any("checkpoints" in key for key in gate.writes):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            gate.issues = False
            while not gate.expired:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        gate.issues = True

    outcome = await Soak(gate=gate, state=tmp_path, ticks=80, tick_s=0.25, save_s=1.0).run(sts_is_away)
    assert outcome.expired > 0
    assert (outcome.state, outcome.attempts, outcome.ticks, outcome.ticks_lost) == ("succeeded", 1, 80, 0)
    assert outcome.denied == ()
