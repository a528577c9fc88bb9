"""A job that starts from another job, whose running attempt prunes its older checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support.token_store import store_url
from trainer.agent.base import prepare
from trainer.checkpoint import protocol as checkpoint
from trainer.checkpoint.protocol import Origin
from trainer.contract import object_keys as keys
from trainer.contract.documents import AttemptSpec
from trainer.contract.train import CheckpointConfig
from trainer.objectstore.objects import Objects

SOURCE = Origin(job="source", attempt="s1", kind="script")
HEIR = Origin(job="heir", attempt="h1", kind="script")


class Source:
    """The other job's trainer, which keeps its newest two."""

    def __init__(self, folder: Path) -> None:
        self.objects, self._folder = Objects.open(store_url(folder), {}, "inst"), folder
        self.step = 0

    async def goes_on(self, saves: int) -> list[str]:
        """Run the agent, and return its checkpoints, the furthest first."""
        for _ in range(saves):
            self.step += 1
            made = self._folder / f"made-{self.step}"
            made.mkdir()
            (made / "state").write_text(f"step {self.step}")
            await checkpoint.commit(self.objects, SOURCE, made, step=self.step, complete=False, taken_s=0.0)
            await checkpoint.prune(self.objects, SOURCE, CheckpointConfig(keep=2), None)
        return await checkpoint.own_manifests(self.objects, SOURCE)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


async def started(source: Source, resume_from: list[str], folder: Path) -> tuple[int | None, list[str]]:
    """Return (first step of the job, reasons for which other checkpoints were passed over)."""
    told: list[str] = []
    spec: Any = AttemptSpec(installation="inst", job="heir", attempt="h1", number=1, resume_from=tuple(resume_from))
    found = await prepare.restore(source.objects, spec, HEIR, folder / "back", told.append)
    assert found is None or (folder / "back/state").read_text() == f"step {found[1].step}"
    return (found[1].step if found else None), told


async def test_a_deleted_origin_checkpoint_is_looked_up_again(source: Source, tmp_path: Path) -> None:
    named = await source.goes_on(2)
    await source.goes_on(3)
    step, told = await started(source, named, tmp_path)
    assert step == 5
    assert len(told) == 1, "the first that was named"


async def test_a_newer_checkpoint_of_the_origin_precedes_an_old_one(source: Source, tmp_path: Path) -> None:
    """An earlier attempt left an old checkpoint, and its newer ones were pruned. The newest checkpoint is restored."""
    old = Origin(job="source", attempt="s0", kind="script")
    made = tmp_path / "milestone"
    made.mkdir()
    (made / "state").write_text("step 1")
    milestone, _ = await checkpoint.commit(source.objects, old, made, step=1, complete=False, taken_s=0.0)
    source.step = 1
    named = [*await source.goes_on(2), milestone]
    await source.goes_on(3)
    assert (await started(source, named, tmp_path))[0] == 6
    for key in await checkpoint.own_manifests(source.objects, SOURCE):
        await source.objects.delete(key)
    assert (await started(source, named, tmp_path))[0] == 1, "but before nothing"


async def test_a_checkpoint_deleted_during_its_download_is_looked_up_again(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, download, saves = await source.goes_on(2), source.objects.download, [3, 3]

    async def later(key: str, path: Path, **promised: Any) -> None:
        if saves:
            await source.goes_on(saves.pop())
        await download(key, path, **promised)

    monkeypatch.setattr(source.objects, "download", later)
    assert (await started(source, named, tmp_path))[0] == 8


async def test_the_named_origin_checkpoint_is_preferred(source: Source, tmp_path: Path) -> None:
    """The quote assumed the named checkpoint."""
    named = await source.goes_on(2)
    await source.goes_on(1)
    assert await started(source, named, tmp_path) == (2, [])


async def test_the_search_for_a_sound_checkpoint_ends(source: Source, tmp_path: Path) -> None:
    named = await source.goes_on(2)
    for key in await source.goes_on(1):
        await source.objects.delete(keys.files_prefix(key) + "state")
    step, told = await started(source, named, tmp_path)
    assert step is None
    assert len(told) == 3, "each once"
