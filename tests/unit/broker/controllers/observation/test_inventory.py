"""Absence is only proven by two listings that lie far enough apart and begin after the launcher was known dead."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.controllers.base.context import ControllerContext, Intervals
from broker.controllers.observation.inventory import Inventory
from broker.controllers.observation.listing_poller import UNANSWERED
from broker.domain.errors import OutcomeUnknown
from broker.domain.instance import Caps, InstanceState, Observed
from broker.domain.job import AttemptState, Handle
from broker.lifecycle.observation.history import CLOUD_CLOCK
from broker.ports import Blobs, Provider, Store
from tests.support import build
from tests.unit.providers.clocks import SteppedClock

LAG_S = 10.0
NAME = build.attempt().name
THERE = (Observed(handle=Handle(provider="scripted", id="i", name=NAME), state=InstanceState.RUNNING),)
STARTS = (replace(THERE[0], state=InstanceState.STARTING),)
ODD = (replace(THERE[0], state=InstanceState.UNKNOWN),)
GONE = (Observed(handle=Handle(provider="scripted", id="i", name=NAME), state=InstanceState.GONE),)


class Scripted:
    """A cloud whose next listing is set by the test."""

    name = "scripted"
    caps = Caps(spot=True, list_lag_s=LAG_S)
    now_lists: Sequence[Observed] = ()

    async def list(self) -> Sequence[Observed]:
        return self.now_lists


def inventory(cloud: Scripted, clock: SteppedClock, name: str = "scripted") -> Inventory:
    context = ControllerContext(
        installation=build.INSTALLATION, owner="test", store=cast(Store, None), blobs=cast(Blobs, None),
        providers={name: cast(Provider, cloud)}, clock=clock, intervals=Intervals(list_s=0),
    )  # fmt: skip
    return Inventory(context)


async def listed(looks: Sequence[tuple[float, Any]]) -> tuple[Inventory, list[float]]:
    """Return an inventory after looks at the given distances, and when each began."""
    cloud, clock = Scripted(), SteppedClock()
    seen, times = inventory(cloud, clock), []
    for apart, shown in looks:
        clock.advance(apart)
        cloud.now_lists = shown
        times.append(clock.monotonic())
        await seen.refresh("scripted")
    return seen, times


@pytest.mark.parametrize("looks", [[(1, ()), (LAG_S, ()), (1, ())], [(1, ()), (2, ()), (LAG_S, ()), (2, ())]])
async def test_two_empty_listings_a_lag_apart_prove_absence_from_the_second_on(
    looks: Sequence[tuple[float, Any]],
) -> None:
    seen, times = await listed(looks)
    found = seen.absence("scripted", NAME, times[0] - 1, born_by=build.T0 - timedelta(seconds=LAG_S)).proven_at
    assert found == build.T0 + timedelta(seconds=times[1])


@pytest.mark.parametrize(("born_by_s", "bill_ends"), [(None, 4), (100, 4), (8, 4), (3, 3), (-LAG_S, 1)])
async def test_a_machine_too_young_to_be_listed_is_billed(born_by_s: float | None, bill_ends: int) -> None:
    """`born_by_s`: second at which the machine is known to exist; None: the end of its launcher, at 5 s. All listings
    are empty.
    """
    seen, times = await listed([(6, ()), (2, ()), (5, ()), (4, ()), (3, ()), (5, ())])
    born_by = None if born_by_s is None else build.T0 + timedelta(seconds=born_by_s)
    found = seen.absence("scripted", NAME, 5, born_by=born_by).proven_at
    assert found == build.T0 + timedelta(seconds=times[bill_ends])


async def test_machine_missing_before_its_launcher_rested_was_gone_by_then() -> None:
    """The end stays known long after those listings are forgotten, while the machine is followed."""
    seen, times = await listed([(1, THERE), (1, ()), (1, ()), *[(LAG_S, ())] * 2])
    born_by = build.T0 - timedelta(seconds=LAG_S)
    assert seen.missing_twice_at("scripted", NAME, born_by=born_by) == build.T0 + timedelta(seconds=times[2])
    for _ in range(9):
        cast(SteppedClock, seen._context.clock).advance(LAG_S)
        await seen.refresh("scripted")
    found = seen.absence("scripted", NAME, times[-1] + 5 * LAG_S, born_by=born_by).proven_at
    assert found == build.T0 + timedelta(seconds=times[2])


async def test_a_machine_listed_once_is_tracked_before_the_first_query() -> None:
    """The first listings without the machine are forgotten by the end of the test; the proof of absence stays."""
    seen, times = await listed([(1, THERE), (1, ()), (1, ()), *[(LAG_S, ())] * 11])
    assert seen._listings["scripted"][0].begun > times[2]
    born_by = build.T0 - timedelta(seconds=LAG_S)
    assert seen.missing_twice_at("scripted", NAME, born_by=born_by) == build.T0 + timedelta(seconds=times[2])


async def test_later_process_relies_on_its_first_two_listings() -> None:
    """The process is first asked after its first listings are forgotten."""
    seen, times = await listed([(1, ()), (1, ()), *[(LAG_S, ())] * 11])
    assert seen._listings["scripted"][0].begun > times[1]
    born_by = build.T0 - timedelta(seconds=LAG_S)
    assert seen.absence("scripted", NAME, times[-1], born_by=born_by).proven_at is None
    assert seen.missing_twice_at("scripted", NAME, born_by=born_by) == build.T0 + timedelta(seconds=times[1])


async def test_process_relies_on_listings_after_its_first_ones() -> None:
    """Listings count if they begin a lag after the birth. The result stays when these listings are forgotten."""
    seen, times = await listed([(1, ()), (1, ()), *[(LAG_S, ())] * 11])
    assert seen._listings["scripted"][0].begun > times[3]
    assert seen.missing_twice_at("scripted", NAME, born_by=build.T0) == build.T0 + timedelta(seconds=times[3])


async def test_process_that_missed_a_birth_knows_the_last_absence() -> None:
    """The process had asked since the create, and was cut off from the database; those listings are forgotten as
    well.
    """
    seen, times = await listed([(1, ()), (5, ()), (5, ())])
    sent, born_by = (build.T0 + timedelta(seconds=at) for at in (0, 20))
    assert seen.missing_twice_at("scripted", NAME, born_by=None, sent_at=sent) is not None
    clock = cast(SteppedClock, seen._context.clock)
    for _ in range(100):
        clock.advance(5)
        times.append(clock.monotonic())
        await seen.refresh("scripted")
    grown = [at for at in times if at >= 20 + LAG_S]
    assert seen.missing_twice_at("scripted", NAME, born_by=born_by) == build.T0 + timedelta(seconds=grown[1])


async def test_a_listing_within_the_lag_of_a_birth_proves_no_absence() -> None:
    """The time at which the machine existed becomes known late, and no listing arrives for minutes after that."""
    seen, times = await listed([(39, ()), (3, ()), (300, ()), (5, ())])
    sent, born_by = (build.T0 + timedelta(seconds=at) for at in (0, 31))
    assert seen.missing_twice_at("scripted", NAME, born_by=None, sent_at=sent) is not None
    assert seen.missing_twice_at("scripted", NAME, born_by=born_by) == build.T0 + timedelta(seconds=times[2])


LINE = replace(build.line(), offer=replace(build.line().offer, provider="scripted"))
ENDING = build.attempt(AttemptState.TERMINATING, terminating_since=build.T0 + timedelta(seconds=20), line=LINE)


async def test_never_booted_machine_may_have_billed_while_unobservable() -> None:
    """The launcher cannot be judged for any length of time. One lag after the machine exists, two consecutive listings
    have to omit it.
    """
    seen, _ = await listed([(1, ()), *[(5, ())] * 40])
    assert seen.latest_possible_end(ENDING) == build.T0 + timedelta(seconds=20 + 2 * 5 + LAG_S)
    clock = cast(SteppedClock, seen._context.clock)
    for apart in (60, 5, 5, 5):
        clock.advance(apart)
        await seen.refresh("scripted")
    assert seen.latest_possible_end(ENDING) == build.T0 + timedelta(seconds=20 + 65 + LAG_S)


@pytest.mark.parametrize("sent_s", [0, 90])
async def test_process_without_history_bounds_the_lifetime(sent_s: float) -> None:
    """The process starts before or after the create, and is asked an hour later."""
    seen, _ = await listed([(1, ()), *[(5, ())] * 700])
    sent, ending = (build.T0 + timedelta(seconds=at) for at in (sent_s, 130))
    attempt = replace(ENDING, create_sent_at=sent, terminating_since=ending)
    assert seen.latest_possible_end(attempt) == ending + timedelta(seconds=2 * 5 + LAG_S)


async def test_a_listed_machine_that_never_booted_bills_until_unlisted() -> None:
    seen, times = await listed([(30, THERE), (5, ()), (5, ()), (5, ())])
    assert seen.latest_possible_end(ENDING) == build.T0 + timedelta(seconds=times[2] + 10 + LAG_S)
    cast(Scripted, seen._context.providers["scripted"]).now_lists = THERE
    await seen.refresh("scripted")
    assert seen.latest_possible_end(ENDING) is None


async def test_a_machine_that_may_still_boot_has_no_latest_end() -> None:
    seen, _ = await listed([(1, ()), *[(5, ())] * 5])
    assert seen.latest_possible_end(build.attempt(AttemptState.LAUNCHING, line=LINE)) is None


OWN = build.attempt(line=LINE)
SECOND = replace(THERE[0], handle=replace(THERE[0].handle, id="late"))
TWO = (*THERE, SECOND)


def spans_s(seen: Inventory, *, max_age_s: float = 15.0) -> dict[str, tuple[float | None, float | None]]:
    """Return the start and the end of each machine's span, in seconds."""

    def told(at: datetime | None) -> float | None:
        return None if at is None else (at - build.T0).total_seconds()

    return {span.id: (told(span.since), told(span.until)) for span in seen.machine_spans(OWN, max_age_s=max_age_s)}


async def test_the_last_absence_before_a_machines_birth_is_known() -> None:
    """A single listing or a lag may hide the machine, and before the first listings nothing is known."""
    looks = [(1, THERE), (5, THERE), (5, THERE), (5, TWO), (5, THERE), (5, TWO)]
    seen, times = await listed(looks)
    found = {"i": (None, None), "late": (times[1] - LAG_S, None)}
    assert spans_s(seen) == found
    seen.missing_twice_at("scripted", NAME, born_by=build.T0)  # it is followed by another bound now
    assert spans_s(seen) == found


async def test_the_clouds_start_time_counts_without_a_listing() -> None:
    """The clock of the cloud may be ahead, so the machine may have existed earlier than the cloud reports."""
    created_at = build.T0 + CLOUD_CLOCK
    seen, _ = await listed([(1, tuple(replace(one, created_at=created_at) for one in THERE))])
    assert spans_s(seen) == {"i": (0, None)}


async def test_fast_cloud_clock_moves_no_birth_behind_its_first_listing() -> None:
    ahead = tuple(replace(one, created_at=build.at(300)) for one in THERE)
    seen, times = await listed([(1, ahead)])
    assert spans_s(seen) == {"i": (times[0], None)}


async def test_a_database_clock_step_moves_no_recorded_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the daemon's clock moves no recorded moment. Otherwise a charged machine would later have another
    life.
    """
    seen, _ = await listed([(1, THERE), (5, THERE), (5, THERE), (5, TWO), (5, THERE), (5, THERE)])
    before, clock = spans_s(seen), cast(SteppedClock, seen._context.clock)
    late = clock.now() + timedelta(hours=8)
    monkeypatch.setattr(clock, "now", lambda: late)
    assert spans_s(seen) == before
    assert before["late"][1] is not None


@pytest.mark.parametrize(("born", "since"), [(1500.0, 1440.0), (30.0, 2 - LAG_S)])
async def test_cloud_gives_the_birth_after_a_long_listing_gap(born: float, since: float) -> None:
    late = (*THERE, replace(SECOND, created_at=build.at(born)))
    seen, _ = await listed([(1, THERE), (1, THERE), (5, THERE), (2000, late)])
    assert spans_s(seen)["late"] == (since, None)


async def test_the_first_absence_after_a_machines_end_is_known() -> None:
    """The end stays known long after those listings are forgotten, even of a machine in only one of them."""
    looks = [(1, THERE), (5, THERE), (5, TWO), (5, THERE), (5, THERE), *[(LAG_S, THERE)] * 11]
    seen, times = await listed(looks)
    assert seen._listings["scripted"][0].begun > times[4]
    assert spans_s(seen)["late"] == (times[0] - LAG_S, times[4]), "one listing alone may leave it out"
    seen, times = await listed([(1, TWO), (5, (*THERE, replace(SECOND, state=InstanceState.GONE))), (5, THERE)])
    assert spans_s(seen)["late"] == (None, times[1]), "one that calls it gone is enough"
    seen, _ = await listed([(1, TWO), (5, THERE), (5, THERE), (5, TWO)])
    assert spans_s(seen)["late"] == (None, None), "it exists after all"


async def test_an_old_listing_shows_no_machine_beyond_its_age() -> None:
    seen, times = await listed([(1, TWO), (5, TWO)])
    cast(SteppedClock, seen._context.clock).advance(20)
    assert spans_s(seen) == {"i": (None, times[1]), "late": (None, times[1])}
    assert spans_s(seen, max_age_s=25) == {"i": (None, None), "late": (None, None)}


async def test_an_unlisted_machine_never_existed() -> None:
    seen, _ = await listed([])
    assert spans_s(seen) == {}
    seen, _ = await listed([(1, ()), (1, GONE)])
    assert spans_s(seen) == {}
    elsewhere = replace(OWN, line=replace(LINE, offer=replace(LINE.offer, provider="another broker's")))
    assert not seen.machine_spans(elsewhere, max_age_s=15)


async def test_a_machine_omitted_by_one_listing_counts_as_missing_once() -> None:
    for looks, omitted in (
        ([(1, THERE)], False), ([(1, THERE), (1, ())], True), ([(1, THERE), (1, ()), (1, ())], False),
        ([(1, THERE), (1, GONE)], False), ([(1, ()), (1, THERE)], False), ([(1, ())], True), ([], False),
    ):  # fmt: skip
        seen, _ = await listed(looks)
        assert seen.absence("scripted", OWN.name, None).missing_once == omitted
    first, _ = await listed([(1, THERE)])
    assert first.absence("scripted", OWN.name, None, nodes=2).missing_once, (
        "no earlier listing shows what the process's first one leaves out"
    )


async def test_a_machine_listed_again_exists_again() -> None:
    seen, _ = await listed([(1, THERE), (1, ()), (1, ())])
    born_by = build.T0 - timedelta(seconds=LAG_S)
    assert seen.missing_twice_at("scripted", NAME, born_by=born_by) is not None
    cast(Scripted, seen._context.providers["scripted"]).now_lists = THERE
    await seen.refresh("scripted")
    assert seen.missing_twice_at("scripted", NAME, born_by=born_by) is None


async def test_young_machines_and_those_of_ended_attempts_are_not_tracked() -> None:
    seen, times = await listed([(1, ()), (1, ()), (LAG_S, ())])
    assert seen.missing_twice_at("scripted", NAME, born_by=build.T0 + timedelta(seconds=times[1])) is None
    assert seen.missing_twice_at("scripted", NAME, born_by=None) == build.T0 + timedelta(seconds=times[1])
    seen.keep(set())
    assert seen._histories["scripted"].names, "it may have been read before it came"
    seen.keep({build.attempt().id})
    seen.keep(set())
    assert seen._histories["scripted"].names
    seen.keep(set())
    assert not seen._histories["scripted"].names


async def test_a_machine_omitted_once_is_billed_until_listed_as_gone() -> None:
    seen, times = await listed([(1, THERE), (2, ()), (3, GONE), (LAG_S, GONE), (1, GONE)])
    found = seen.absence("scripted", NAME, 0, born_by=build.T0 - timedelta(seconds=LAG_S)).proven_at
    assert found == build.T0 + timedelta(seconds=times[2])


async def test_a_listing_before_the_launchers_death_proves_nothing() -> None:
    seen, times = await listed([(1, ()), (LAG_S, ()), (1, ())])
    assert not seen.absence("scripted", NAME, times[0]).proven


async def test_two_listings_within_the_lag_prove_nothing() -> None:
    seen, _ = await listed([(1, ()), (LAG_S / 2, ())])
    assert not seen.absence("scripted", NAME, 0).proven


async def test_one_listing_without_a_machine_among_lagging_ones_proves_nothing() -> None:
    """A machine that was just created is missing from two listings by the lag, and later omitted once."""
    seen, _ = await listed([(1, ()), (LAG_S / 2, ()), (LAG_S, ())])
    assert not seen.absence("scripted", NAME, 0).proven


async def test_a_machine_that_shows_again_takes_the_proof_back() -> None:
    seen, _ = await listed([(1, ()), (LAG_S, ()), (1, ()), (1, THERE)])
    assert not seen.absence("scripted", NAME, 0).proven


async def test_a_machine_listed_as_gone_counts_as_absent() -> None:
    seen, _ = await listed([(1, GONE), (LAG_S, GONE), (1, GONE)])
    assert seen.absence("scripted", NAME, 0).proven


@pytest.mark.parametrize(
    ("looks", "left_out"),
    [
        ([(LAG_S, THERE), (1, ()), (1.5, ()), (1.5, ())], True),
        ([(LAG_S, THERE), (1, ()), (4, GONE)], True),
        ([(LAG_S, THERE), (1, ()), (1, ()), (1, ())], False),  # not for long enough
        ([(LAG_S, THERE), (9, ())], False),  # a single one
        ([(LAG_S, ()), (1, ()), (2, THERE), (2, ()), (1, ())], False),
        ([(1, ()), (4, ()), (4, ())], False),  # they may show a time before it was created
    ],
)
async def test_a_machine_omitted_for_longer_than_the_lag_is_absent(
    looks: Sequence[tuple[float, Any]], left_out: bool
) -> None:
    seen, times = await listed(looks)
    assert seen.absence("scripted", NAME, times[0] - looks[0][0]).missing_for_seconds == left_out


@pytest.mark.parametrize("fault", [ValueError("not JSON"), TimeoutError("hangs")])
async def test_a_cloud_that_breaks_is_one_that_did_not_answer(fault: Exception) -> None:
    cloud = Scripted()

    async def broken() -> Sequence[Observed]:
        raise fault

    cloud.list = broken  # type: ignore[method-assign]
    assert await inventory(cloud, SteppedClock()).refresh_all(["scripted"]) == {"scripted"}


@given(st.lists(st.tuples(st.floats(0.5, 15), st.sampled_from([(), THERE, GONE])), max_size=12), st.floats(0, 60))
async def test_absence_is_never_proven_while_the_last_lag_shows_it(
    looks: list[tuple[float, Any]], since: float
) -> None:
    seen, times = await listed(looks)
    if seen.absence("scripted", NAME, since).proven:
        clean = [t for t, (_, shown) in zip(times, looks, strict=True) if t > since and shown != THERE]
        shows = [t for t, (_, shown) in zip(times, looks, strict=True) if shown == THERE]
        assert clean[-2] - clean[0] >= LAG_S
        assert not shows or shows[-1] < times[-1]


SENT = build.attempt(line=build.line(provider="scripted"))
"""Attempt whose create was sent when the clock began."""


async def test_machines_run_since_the_last_listing_that_showed_none_that_does() -> None:
    other = replace(STARTS[0], handle=replace(STARTS[0].handle, id="j"))
    seen, times = await listed([(20, ()), (5, STARTS), (5, (other, *THERE)), (5, THERE)])
    assert seen.running_at(SENT) == build.T0 + timedelta(seconds=times[1] - LAG_S)


async def test_starting_machines_have_no_known_run_time() -> None:
    seen, _ = await listed([(20, ()), (5, STARTS)])
    assert seen.running_at(SENT) is None


async def test_a_machine_that_may_run_counts_as_running() -> None:
    seen, times = await listed([(20, STARTS), (5, ODD), (5, THERE)])
    assert seen.running_at(SENT) == build.T0 + timedelta(seconds=times[0] - LAG_S)


async def test_machine_never_seen_starting_may_run_since_its_create() -> None:
    seen, _ = await listed([(500, THERE), (5, ()), (5, THERE)])
    assert seen.running_at(SENT) == SENT.create_sent_at


async def test_one_listing_that_leaves_out_what_runs_moves_its_start_no_further() -> None:
    """No listing arrives while the machine begins to run. One listing without it is ignored; two prove absence."""
    seen, times = await listed([(20, STARTS), (500, ()), (5, THERE)])
    assert seen.running_at(SENT) == build.T0 + timedelta(seconds=times[0] - LAG_S)
    seen, times = await listed([(20, STARTS), (500, ()), (5, ()), (5, THERE)])
    assert seen.running_at(SENT) == build.T0 + timedelta(seconds=times[1] - LAG_S)


async def test_a_recorded_start_time_is_kept() -> None:
    seen, _ = await listed([(20, ()), (500, STARTS), (5, THERE)])
    recorded = replace(SENT, running_at=build.at(7))
    assert seen.running_at(recorded) == build.at(7)


async def test_another_broker_s_cloud_is_one_that_did_not_answer() -> None:
    cloud = Scripted()
    found = inventory(cloud, SteppedClock())
    assert await found.refresh_all(["scripted", "elsewhere"]) == {"elsewhere"}


class UnreachableCloud(Scripted):
    """Cloud whose listings fail while `away` is true."""

    away = True

    async def list(self) -> Sequence[Observed]:
        if self.away:
            raise OutcomeUnknown("no connection")
        return await super().list()


async def test_broker_cut_off_from_a_cloud_leaves_its_rows_to_others() -> None:
    """A broker that gets no answers from a cloud leaves its rows to other brokers until it gets one."""
    cloud, clock = UnreachableCloud(), SteppedClock()
    seen = inventory(cloud, clock)
    turns = []
    for _ in range(UNANSWERED):
        turns.append(seen.turns["scripted"])
        assert await seen.refresh_all(["scripted"]) == {"scripted"}
        clock.advance(1)
    assert turns == [0.0] * UNANSWERED
    first = seen.turns["scripted"]
    assert first > 0
    for _ in range(UNANSWERED):
        await seen.refresh_all(["scripted"])
    assert seen.turns["scripted"] > first, "a broker with some answers comes first"
    cloud.away = False
    await seen.refresh("scripted")
    assert seen.turns["scripted"] == 0.0
