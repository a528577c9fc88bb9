"""Absence is proven only where no listing that may lag or omit a machine can have hidden it."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Handle
from broker.lifecycle.observation.listing import ClockReading, Listing
from broker.lifecycle.observation.proof import AbsenceFacts, AbsenceProof, proof_listing, prove_absence
from tests.support import build

LAG_S = 10.0
NAME = build.attempt().name
MACHINE = Observed(handle=Handle(provider="simulated", id="i", name=NAME), state=InstanceState.RUNNING)
CLOCK = ClockReading(now=build.at(1000), monotonic=1000.0)
PACE_S = st.floats(0.25, 8)


def listings(times: Sequence[tuple[float, bool]]) -> list[Listing]:
    """Return listings that begin at the times, and take 0.1 s. True: the machine is shown."""
    return [
        Listing(begun=begun, answered=begun + 0.1, by_name={NAME: (MACHINE,)} if shows else {})
        for begun, shows in times
    ]


def proof(listed: Sequence[Listing], since: float | None, *, nodes: int = 1, **changes: object) -> AbsenceProof:
    facts = AbsenceFacts(listings=listed, clock=CLOCK, lag_s=LAG_S, name=NAME, nodes=nodes, since=since, **changes)  # type: ignore[arg-type]
    return prove_absence(facts)


@st.composite
def truthful(draw: st.DrawFn) -> tuple[list[Listing], float, float]:
    """Return (listings, birth, end) of a machine. Listings may lag, but no two in a row omit a machine that exists."""
    born, lasted = draw(st.floats(0, 60)), draw(st.floats(0, 60) | st.just(float("inf")))
    times, begun, has_omitted = [], 0.0, False
    for pace_s, lag_s, omits in draw(st.lists(st.tuples(PACE_S, st.floats(0, LAG_S), st.booleans()), max_size=25)):
        begun += pace_s
        exists = born <= begun - lag_s < born + lasted
        has_omitted = exists and omits and not has_omitted
        times.append((begun, exists and not has_omitted))
    return listings(times), born, born + lasted


@given(truthful(), st.floats(0, 60), st.booleans())
def test_an_existing_machine_is_never_proven_absent(
    case: tuple[list[Listing], float, float], later_s: float, is_birth_known: bool
) -> None:
    """Nothing is created after `since`; a machine that ended is proven to have ended no earlier than it did."""
    listed, born, ended = case
    since = born + later_s
    born_by = build.at(born) if is_birth_known else None
    result = proof(listed, since, born_by=born_by, handles=(MACHINE.handle,))
    if listed and ended > listed[-1].answered:
        assert not result.proven
        assert not result.lost
    if result.proven_at is not None:
        assert result.proven_at >= build.at(min(ended, since))


@given(
    st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=10),
    st.floats(-30, 60),
    st.floats(0, 20),
    st.floats(-30, 60),
)
def test_every_list_of_listings_has_an_answer(
    apart: list[tuple[float, bool]], since: float, lag_s: float, born: float
) -> None:
    """The machines may exist only after the first listing, so that few listings count."""
    times, begun = [], 0.0
    for pace_s, shows in apart:
        begun += pace_s
        times.append((begun, shows))
    listing = proof_listing(listings(times), lambda listed: listed.shows(NAME), since, lag_s, born)
    if listing is not None:
        assert listing.begun > since
        assert listing.begun - born >= lag_s


def test_one_late_listing_proves_nothing() -> None:
    """Two listings a lag apart omit it, and only the last began a lag after its birth."""
    listed = listings([(1, False), (12, False), (14, False)])
    assert proof_listing(listed, lambda listing: listing.shows(NAME), 0.0, LAG_S, 3.0) is None
    assert proof_listing(listed, lambda listing: listing.shows(NAME), 0.0, LAG_S, 2.0) is listed[2]


def test_without_a_time_only_missing_once_can_hold() -> None:
    listed = listings([(1, True), *((20 + second, False) for second in range(20))])
    assert proof(listed, None) == AbsenceProof()
    assert proof(listed[:2], None) == AbsenceProof(missing_once=True)
    assert proof(listed, 0.0).proven


def test_an_earlier_end_is_the_proven_one() -> None:
    listed = listings([(20 + second, False) for second in range(20)])
    known = build.at(5)
    assert proof(listed, 0.0, born_by=build.T0, missing_twice_at=known).proven_at == known
