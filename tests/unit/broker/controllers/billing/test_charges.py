"""Longest time that a machine may have run unobserved, from the last moment at which a broker knew of it."""

from dataclasses import replace
from typing import Any

import pytest

from broker.controllers.billing.charges import self_stopped_by
from broker.domain.instance import SELF_STOP_S, Caps, InstanceState, Observed, SelfStop
from broker.domain.job import Handle
from tests.support import build
from tests.unit.broker.controllers.observation.test_inventory import NAME, Scripted, inventory
from tests.unit.providers.clocks import SteppedClock

SENT_S, BOOTED_S, BEAT_S, CHARGED_S, SHOWN_S = 2.0, 5.0, 10.0, 100.0, 5000.0
BOOT_S = Caps(spot=True, list_lag_s=0).boot_deadline_s
THERE = (Observed(handle=Handle(provider="simulated", id="i", name=NAME), state=InstanceState.RUNNING),)


async def alone_until(
    *, charged_s: float | None, shown: bool, self_stop: SelfStop = "os_shutdown", **known: Any
) -> float | None:
    """Return seconds after the start; with a listing at `SHOWN_S`."""
    cloud, clock = Scripted(), SteppedClock()
    cloud.caps = Caps(spot=True, list_lag_s=0, self_stop=self_stop)
    seen = inventory(cloud, clock, "simulated")
    clock.advance(SHOWN_S)
    cloud.now_lists = THERE if shown else ()
    await seen.refresh("simulated")
    charged_to = None if charged_s is None else build.at(charged_s)
    sent = build.attempt(create_sent_at=build.at(SENT_S), charged_to=charged_to)
    booted = replace(sent, booted_at=build.at(BOOTED_S), first_beat_at=build.at(BEAT_S))
    attempt = replace(booted, **known)
    found = self_stopped_by(seen._context, seen, attempt, build.active_job())
    return None if found is None else (found - build.T0).total_seconds()


@pytest.mark.parametrize(
    ("charged_s", "shown", "since_s"),
    [
        (CHARGED_S, False, CHARGED_S), (CHARGED_S, True, SHOWN_S),
        (None, False, BEAT_S), (BOOTED_S, False, BEAT_S), (None, True, SHOWN_S),
    ],
)  # fmt: skip
async def test_the_self_stop_counts_from_the_brokers_last_sighting(
    charged_s: float | None, shown: bool, since_s: float
) -> None:
    found = await alone_until(charged_s=charged_s, shown=shown)
    context = inventory(Scripted(), SteppedClock())._context
    charged_late_s = 1 + context.intervals.billing_s + context.intervals.deadman_s
    assert found == since_s + charged_late_s + context.limits.deadman_s + context.limits.drain_s + SELF_STOP_S


async def test_first_heartbeat_read_after_an_absence_met_the_boot_deadline() -> None:
    """The brokers read the heartbeat only when they are back, but it was written before the boot deadline."""
    in_time = await alone_until(charged_s=None, shown=False)
    late = await alone_until(charged_s=None, shown=False, first_beat_at=build.at(SENT_S + BOOT_S + 4000))
    assert in_time is not None
    assert late == in_time - BEAT_S + SENT_S + BOOT_S


async def test_machine_booted_during_an_absence_is_not_assumed_to_exist() -> None:
    """The brokers left right after the create was sent. An hour later they learn of both the boot and the
    heartbeats.
    """
    back_s = 3600.0
    told = {"booted_at": build.at(back_s), "first_beat_at": build.at(back_s + 5)}
    late = await alone_until(charged_s=None, shown=False, **told)
    assert late == await alone_until(charged_s=None, shown=False, first_beat_at=build.at(SENT_S + BOOT_S))


async def test_a_machine_without_heartbeat_or_self_stop_has_no_latest_end() -> None:
    assert await alone_until(charged_s=CHARGED_S, shown=False, first_beat_at=None) is None
    assert await alone_until(charged_s=CHARGED_S, shown=False, self_stop="none") is None
