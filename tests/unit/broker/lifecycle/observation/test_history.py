"""The history of listed names equals what all listings together would show."""

import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Handle
from broker.lifecycle.observation.history import CLOUD_CLOCK, CloudHistory, born_after
from broker.lifecycle.observation.listing import ClockReading, Listing, last_begun_before_run
from tests.support import build

NAME = build.attempt().name
RUNS = Observed(handle=Handle(provider="simulated", id="i", name=NAME), state=InstanceState.RUNNING)
GONE = replace(RUNS, state=InstanceState.GONE)
SHOWN = st.sampled_from([(), (RUNS,), (GONE,)])
LOOKS = st.lists(st.tuples(st.floats(0.5, 30), SHOWN), min_size=1, max_size=15)


def at(moment: float) -> ClockReading:
    return ClockReading(now=build.at(moment), monotonic=moment)


def recorded(looks: Sequence[tuple[float, tuple[Observed, ...]]], kept: int) -> tuple[CloudHistory, list[Listing]]:
    """Return a history after listings at these distances, of which the last `kept` are remembered, and all listings."""
    history, listings, begun = CloudHistory(), [], 0.0
    for apart, machines in looks:
        begun += apart
        listings.append(Listing(begun=begun, answered=begun + 0.1, by_name={NAME: machines}))
        history.record(listings[-kept:], at(begun + 0.1), 10.0)
    return history, listings


@given(LOOKS, st.integers(2, 20))
def test_forgotten_listings_still_count_as_missing(looks: list[tuple[float, tuple[Observed, ...]]], kept: int) -> None:
    """The name is followed from its first listing on."""
    history, listings = recorded([(1.0, (RUNS,)), *looks], kept)
    trailing: list[Listing] = []
    for listing in listings:
        trailing = [] if listing.shows(NAME) else [*trailing, listing]
    known = history.follow(NAME, listings[-kept:], at(listings[-1].answered), 10.0, born_by=None)
    assert known.missing_twice_at == (trailing[1].answered if len(trailing) > 1 else None)
    assert known.missing_from == (trailing[0].begun if trailing else math.inf)


@given(LOOKS)
def test_a_machine_ends_when_called_gone_or_omitted_twice(looks: list[tuple[float, tuple[Observed, ...]]]) -> None:
    history, listings = recorded(looks, 20)
    shows = [index for index, listing in enumerate(listings) if listing.shows(NAME)]
    spans = history.machine_spans(NAME, None)
    assert bool(spans) == bool(shows)
    if shows:
        after = listings[shows[-1] + 1 :]
        ends = [listing.answered for index, listing in enumerate(after) if index or listing.by_name[NAME]]
        assert spans[0].until == (build.at(ends[0]) if ends else None)
        assert spans[0].shown == build.at(listings[shows[0]].answered)
        assert history.last_listed_at(NAME) == build.at(listings[shows[-1]].answered)


@given(st.floats(0, 1000), st.none() | st.floats(0, 1000), st.none() | st.floats(0, 60), st.floats(0, 1000))
def test_a_machine_never_existed_before_its_recorded_birth(
    born: float, absent_s: float | None, ahead_s: float | None, later_s: float
) -> None:
    """The clock of its cloud may be ahead, so what the cloud reports as its creation may be later than it was."""
    absent_at = None if absent_s is None else build.at(born - absent_s)
    created_at = None if ahead_s is None else build.at(born + ahead_s)
    since = born_after(absent_at, created_at, build.at(born + later_s))
    assert (since is None) == (absent_at is None and created_at is None)
    assert since is None or since <= build.at(born)


def test_the_later_limit_of_a_birth_counts() -> None:
    created, shown = build.at(100), build.at(400)
    assert born_after(None, created, shown) == created - CLOUD_CLOCK
    assert born_after(build.at(90), created, shown) == build.at(90)
    assert born_after(build.at(20), created, shown) == created - CLOUD_CLOCK
    assert born_after(build.at(20), None, shown) == build.at(20)
    assert born_after(None, shown + 2 * CLOUD_CLOCK, shown) == shown
    assert born_after(None, None, shown) is None


def test_a_name_of_no_live_attempt_is_forgotten_at_the_second_call() -> None:
    history, _ = recorded([(1.0, (RUNS,))], 20)
    history.keep(set())
    history.keep({NAME})
    history.keep(set())
    assert NAME in history.names
    history.keep(set())
    assert NAME not in history.names
    assert history.machine_spans(NAME, None) == ()
    assert history.last_listed_at(NAME) is None


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_clocks_convert_both_ways(monotonic: float, moment: float) -> None:
    reading = ClockReading(now=build.at(5), monotonic=monotonic)
    assert abs(reading.monotonic_time(reading.database_time(moment)) - moment) < 1e-3
    assert reading.database_time(monotonic) == build.at(5)


@given(st.lists(st.sampled_from([(), (RUNS,), (replace(RUNS, state=InstanceState.STARTING),)]), max_size=10))
def test_machines_run_after_the_listing_before_the_first_that_runs(shown: list[tuple[Observed, ...]]) -> None:
    listings = [
        Listing(begun=float(index), answered=index + 0.1, by_name={NAME: machines})
        for index, machines in enumerate(shown)
    ]
    begun = last_begun_before_run(listings, NAME, 1)
    runs = [index for index, machines in enumerate(shown) if RUNS in machines]
    if not runs:
        assert begun is None
    elif runs[0] == 0:
        assert begun == -math.inf
    else:
        assert begun is not None
        assert begun <= runs[0] - 1
        assert begun >= runs[0] - 2 or not shown[runs[0] - 1]


def test_two_listings_begin_after_a_moment() -> None:
    history, listings = recorded([(1.0, ()), (1.0, ()), (1.0, ())], 20)
    assert history.has_listed_twice(listings[1].begun)
    assert not history.has_listed_twice(listings[1].begun + 0.01)
    assert not CloudHistory().has_listed_twice(-math.inf)
