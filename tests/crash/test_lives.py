"""Each life reaches the passages and ends that its name promises, and a sample of kills within the lives."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.crash import scenes
from tests.crash.gate import Gate, Point
from tests.crash.lives import LIVES, PLAIN, life_of
from tests.crash.scenes import Totals, commit, enumerate_points, kill_at, sampled
from tests.crash.services import SharedServices, open_services

OTHERS = [name for name in LIVES if name]
DEEDS = [
    Point(name=f"{name}/{passage}", number=1, moment=moment)
    for name in OTHERS
    for passage in LIVES[name].passes
    for moment in ("before", "after")
]
"""Passages that the lives other than the plain one exist to reach."""
TESTS = 4


@pytest.fixture(scope="module")
async def services() -> AsyncIterator[SharedServices]:
    async with open_services(seed=int(commit(), 16)) as services:
        yield services


@pytest.mark.parametrize("name", OTHERS)
async def test_a_life_reaches_its_passages_and_ends(services: SharedServices, name: str) -> None:
    """Each life has the passages and the attempts' ends that it names, or `enumerate_points` raises."""
    points = await enumerate_points(services, name)
    assert {life_of(point) for point in points} == {name}


async def test_crash_points_are_named_and_held_calls_can_be_aborted() -> None:
    """The current part prefixes a passage's name, and a held passage may be refused."""

    async def refuse() -> bool:
        return False

    gate = Gate(opens={"b": "part"}, hold_at=Point(name="part/c", number=1, moment="before"), hold=refuse)
    assert [gate.called(name) for name in ("a", "b", "a")] == ["a", "part/b", "part/a"]
    name = gate.called("c")
    assert not await gate.passes_async(name, gate.number(name), "before")
    assert await gate.passes_async(name, gate.number(name), "before")


async def test_a_life_that_becomes_another_one_is_reported(
    services: SharedServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIVES, "stopped", replace(LIVES["stopped"], act=PLAIN.act))
    monkeypatch.setattr(scenes, "TRIES", 1)
    with pytest.raises(AssertionError, match=r"did not come by commit:apply\(draining\)"):
        await enumerate_points(services, "stopped")


async def test_a_create_whose_reply_is_lost_is_adopted(services: SharedServices) -> None:
    """One create and one machine exist, even if the daemon is killed before it records the unknown outcome."""
    for moment in ("before", "after"):
        totals = Totals()
        await kill_at(services, Point(name="unheard/commit:apply(launching)", number=1, moment=moment), totals)
        assert (totals.broken, totals.kills) == ([], 1)


@pytest.mark.parametrize("number", range(TESTS))
async def test_a_daemon_killed_at_actions_of_users_or_the_cloud(services: SharedServices, number: int) -> None:
    totals, point = Totals(), sampled(DEEDS, commit(), len(DEEDS) // TESTS)[number]
    await kill_at(services, point, totals)
    assert (totals.broken, totals.jobs > 0) == ([], True), point
