"""The next machine finds exactly the committed checkpoints after a kill of a machine during a save."""

from collections.abc import AsyncIterator

import pytest

from tests.crash.checkpoints import (
    STORES,
    Bench,
    CrashCounts,
    Kill,
    Saved,
    StoreKind,
    bench,
    drawn,
    enumerate_points,
    killed_at,
)
from tests.crash.gate import Point
from tests.crash.scenes import commit
from tests.crash.trainee import KEEP

KILLS = 5
"""Number of kills in each of the four tests."""
STEPS = (
    "worker:write model.safetensors",
    "worker:rename snapshot",
    "agent:create manifest.json",
    "agent:delete manifest.json",
    "blob:put manifest.json",
    "blob:post adapter_model.safetensors",
)
"""Steps that must be among the points: a shard, a snapshot, a commit, a prune, and in an S3 a commit and a part."""


@pytest.fixture(scope="module")
async def machines() -> AsyncIterator[Bench]:
    async with bench() as shared:
        yield shared


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("store", STORES)
async def test_machines_killed_at_steps_of_a_save_and_at_any_time(machines: Bench, store: StoreKind, part: int) -> None:
    found, seed = CrashCounts(), int(commit(), 16) + part
    kills = drawn(await enumerate_points(machines, store), KILLS, seed)
    await killed_at(machines, store, kills, seed, found)
    assert found.broken == []
    assert found.kills >= KILLS - len(found.missed)


async def test_a_checkpoint_that_lacks_bytes_is_seen(machines: Bench) -> None:
    """The audit finds a checkpoint with another step's bytes, and a manifest that its files contradict."""
    found = CrashCounts()
    saved = Saved(machines, "folder", found)
    await saved.life(None)
    damaged = [*saved.store.glob("**/model.safetensors")]
    assert len(damaged) >= KEEP  # more if the machine ended between a commit and its prune
    for file in damaged:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    await saved.life(None)
    assert (found.torn_commits, found.torn_loads, found.without_a_good_one) == (len(damaged), 0, 1)


async def test_the_steps_of_a_save_are_found(machines: Bench) -> None:
    names = {str(kill) for store in STORES for kill in await enumerate_points(machines, store)}
    for what in STEPS:
        assert {f"the machine, before {what}#1", f"the machine, after {what}#1"} <= names
    assert str(Kill(point=Point(name="agent:remove snapshot", number=3, moment="after"), worker_only=True)) in names
