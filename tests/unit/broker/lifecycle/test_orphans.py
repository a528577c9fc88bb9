"""The sweep destroys machines without an owner, and never a foreign machine."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.ids import Installation, InstanceName, attempt_of
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import AttemptState, Handle
from broker.lifecycle.orphans import Orphan, orphans, spared_message
from providers.common.skypilot_names import cluster_of
from tests.support import build


def observed(name: str, state: InstanceState = InstanceState.RUNNING, id: str = "i-1") -> Observed:
    return Observed(handle=Handle(provider="simulated", id=id, name=InstanceName(name)), state=state)


LIVE = build.attempt(handles=(Handle(provider="simulated", id="i-1", name=build.attempt().name),))
ENDED = build.attempt(AttemptState.ENDED, ended_at=build.T0)


def test_a_live_attempts_machine_is_no_orphan() -> None:
    assert orphans(build.INSTALLATION, [observed(LIVE.name)], {LIVE.id: LIVE}) == ()


def test_unknown_ended_and_second_machines_are_orphans() -> None:
    machine, twin = observed(LIVE.name), observed(LIVE.name, id="i-2")
    assert orphans(build.INSTALLATION, [machine], {}) == (
        Orphan(observed=machine, id=LIVE.id, attempt=None, why="no attempt of ours has this name", born=None),
    )
    assert orphans(build.INSTALLATION, [machine], {ENDED.id: ENDED}) == (
        Orphan(observed=machine, id=ENDED.id, attempt=ENDED, why="its attempt has ended", born=None),
    )
    assert orphans(build.INSTALLATION, [machine, twin], {LIVE.id: LIVE}) == (
        Orphan(observed=twin, id=LIVE.id, attempt=LIVE, why="a second machine under one name", born=None),
    )


def test_orphans_birth_is_its_first_living_machine_if_all_are_dated() -> None:
    """An orphan's birth is that of the first existing machine under its name, if the cloud dates all of them."""
    first, second = (
        replace(observed(ENDED.name, id=i), created_at=build.at(at)) for i, at in (("i-1", 60), ("i-2", 70))
    )
    gone = replace(observed(ENDED.name, InstanceState.GONE, id="i-0"), created_at=build.at(0))
    silent, other = observed(ENDED.name, id="i-3"), replace(observed("gb-other"), created_at=build.at(1))
    found = orphans(build.INSTALLATION, [gone, second, first, other], {ENDED.id: ENDED})
    assert [orphan.born for orphan in found] == [build.at(60)] * 2
    found = orphans(build.INSTALLATION, [first, silent], {ENDED.id: ENDED})
    assert [orphan.born for orphan in found] == [None] * 2


def test_gone_and_foreign_machines_hide_no_orphan() -> None:
    """Machines that the cloud lists as gone, and foreign machines, hide no orphan behind them."""
    gone, foreign, ours = (
        observed(LIVE.name, InstanceState.GONE),
        observed("gb-othr-aaaaaaaaaaaaa"),
        observed(LIVE.name),
    )
    found = orphans(build.INSTALLATION, [gone, foreign, ours, gone], {})
    assert [orphan.observed for orphan in found] == [ours]


def test_the_machines_of_a_launch_appear_one_by_one_and_none_is_an_orphan() -> None:
    one, two = observed(LIVE.name), observed(LIVE.name, id="i-2")
    launching = replace(LIVE, state=AttemptState.LAUNCHING)
    assert orphans(build.INSTALLATION, [one, two], {LIVE.id: launching}) == ()
    unrecorded = replace(LIVE, handles=())
    assert orphans(build.INSTALLATION, [one, two], {LIVE.id: unrecorded}) == ()


@pytest.mark.parametrize(
    "name",
    ["gb-test", "gb-test-", "gb-test-short", "gb-othr-aaaaaaaaaaaaa", "gb-test-AAAAAAAAAAAAA", "gb-testx-aaaaaaaaaaaaa",
     "gb-test-aaaaaaaaaaaaa-2", "xgb-test-aaaaaaaaaaaaa", "gb-test-aaaaaaaaaaaa1"],
)  # fmt: skip
def test_look_alike_names_are_foreign(name: str) -> None:
    assert orphans(build.INSTALLATION, [observed(name)], {}) == ()


OUR_NAME = re.compile("gb-test-[a-z2-7]{13}", re.ASCII)
OUR_LABEL = re.compile(OUR_NAME.pattern + "(-[0-9a-f]{8}(-(head|worker))?)?", re.ASCII)
OURS = st.from_regex(OUR_NAME, fullmatch=True)
LOOKS_LIKE = str.maketrans(
    {"a": "\N{CYRILLIC SMALL LETTER A}", "e": "\N{CYRILLIC SMALL LETTER IE}", "-": "\N{NON-BREAKING HYPHEN}", "t": "T",
     "2": "\N{FULLWIDTH DIGIT TWO}", "g": "\N{LATIN SMALL LETTER SCRIPT G}"}
)  # fmt: skip
MUTATIONS = (
    str.upper, str.title, lambda n: n.translate(LOOKS_LIKE), lambda n: n.replace("gb-test", "gb-abcd"),
    lambda n: n.replace("gb-test", "gb-test2"), lambda n: f"x{n}", lambda n: f"my-{n}-copy", lambda n: f"{n}-copy",
    lambda n: f"{n}-1a2b3c4d-head-old", lambda n: f"{n}a", lambda n: n[:-1], lambda n: f" {n}", lambda n: f"{n}\n",
    lambda n: f"{n}-1A2B3C4D", lambda n: n.replace("-", "_"), lambda n: n + "\0", lambda n: n[::-1],
)  # fmt: skip
"""Changes that other parties make to a name of ours; few of them leave it as it is."""


def alike(name: str, twists: Iterable[Callable[[str], str]]) -> str:
    for twist in twists:
        name = twist(name)
    return name


names = st.text(max_size=40) | OURS | st.builds(alike, OURS, st.lists(st.sampled_from(MUTATIONS), max_size=2))


@given(names)
def test_only_exactly_our_names_are_ours(name: str) -> None:
    """The test has a rule of its own, so that only an error in both rules passes. A listed label may have SkyPilot's
    suffix.
    """
    ours = attempt_of(build.INSTALLATION, name)
    assert (ours is not None) is (OUR_NAME.fullmatch(name) is not None)
    assert len(orphans(build.INSTALLATION, [observed(name)], {})) == (ours is not None)
    assert (cluster_of(build.INSTALLATION, name) is not None) is (OUR_LABEL.fullmatch(name) is not None)
    assert attempt_of(Installation("abcd"), name) is None or name.startswith("gb-abcd-")


@given(OURS, st.from_regex("-[0-9a-f]{8}(-(head|worker))?", fullmatch=True))
def test_names_suffixed_by_skypilot_are_recognised(name: str, suffix: str) -> None:
    """A machine that is not recognised would bill for ever."""
    assert cluster_of(build.INSTALLATION, name + suffix) == name


def test_orphans_newer_than_the_database_are_only_reported() -> None:
    (unknown,) = orphans(build.INSTALLATION, [observed(LIVE.name)], {})
    (late,) = orphans(build.INSTALLATION, [observed(ENDED.name)], {ENDED.id: ENDED})
    assert spared_message(unknown, report_only=False, was_bought=False) is None
    assert spared_message(late, report_only=False, was_bought=None) is None
    assert [
        spared_message(orphan, report_only=True, was_bought=bought)
        for orphan in (unknown, late)
        for bought in (False, None)
    ] == ["only reported: the database is new to this home"] * 4
    assert [spared_message(unknown, report_only=False, was_bought=bought) for bought in (True, None)] == [
        "only reported: this installation bought it, so the database is older than the machine (a backup?)",
        "only reported: the blob store, which records its buyer, cannot be read",
    ]
