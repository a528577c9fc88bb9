"""Results that one of several machines cannot write are retried by all machines for a limited time."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import tiny_jobs
from tests.trainer.support.crews import Crew
from trainer.contract.documents import ExitCode, Parallelism
from trainer.contract.train import TrainConfig
from trainer.core.errors import Drained
from trainer.core.ipc import SnapshotInfo, info_of
from trainer.training import result_writer as results

KIND = tiny_jobs.KINDS["causal_lm full"]
TRIES = len(results.PAUSES_S) + 1


def insist(monkeypatch: pytest.MonkeyPatch, *, why: str, waiting: bool) -> int:
    """Return the number of tries until the writer gave up; another process fails each time."""
    monkeypatch.setattr(results, "PAUSES_S", (0.0,) * (TRIES - 1))
    tried: list[int] = []
    asked: list[bool] = []

    def action() -> str:
        tried.append(1)
        return why

    def agree(fact: bool) -> bool:
        asked.append(fact)
        return fact or len(asked) % 2 == 1  # whether it failed is asked first, each time

    def nothing(*_: Any) -> None:
        pass

    with pytest.raises(results.ResultsNotWritten):
        results.write_with_retries(
            action, agree=agree, waiting=lambda: waiting and len(tried) < 50, leave=nothing, report=nothing,
            folder=Path("/"), needed_bytes=lambda: 0,
        )  # fmt: skip
    return len(tried)


def test_retries_are_limited_when_no_upload_can_free_space(monkeypatch: pytest.MonkeyPatch) -> None:
    assert insist(monkeypatch, why="", waiting=True) == TRIES
    assert insist(monkeypatch, why="full", waiting=False) == TRIES


def test_a_disk_that_others_fill_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert insist(monkeypatch, why="full", waiting=True) == 50 + TRIES - 1, "until they are gone"
    monkeypatch.setattr(results, "TIMEOUT_S", 0.0)
    assert insist(monkeypatch, why="full", waiting=True) == TRIES


def test_a_drain_is_obeyed_before_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "PAUSES_S", (0.0,))
    tried: list[str] = []

    def leave() -> None:
        raise Drained

    def action() -> str:
        tried.append("")
        return "full"

    same: Any = lambda fact: fact  # noqa: E731
    with pytest.raises(Drained):
        results.write_with_retries(
            action, agree=same, waiting=lambda: True, leave=leave, report=lambda *_: None, folder=Path("/"),
            needed_bytes=lambda: 0,
        )  # fmt: skip
    assert len(tried) == 1


def failing(times: int) -> None:
    """Fail the first `times` writes of a complete part."""
    from trainer.checkpoint.snapshot import Snapshots

    fill, failed = Snapshots._write_files, []

    def fails(self: Snapshots, folder: Path, copies: Any, snapshot: Any, *more: Any) -> None:
        if snapshot.complete and len(failed) < times:
            failed.append(1)
            raise OSError(5, "Input/output error")
        fill(self, folder, copies, snapshot, *more)

    Snapshots._write_files = fails  # type: ignore[method-assign]


def fails_once(rank: int) -> None:
    failing(rank)


def fails_always(rank: int) -> None:
    results.TIMEOUT_S = 0.0  # no agent takes away what was saved before the results
    failing(1000 * rank)


def divided(folder: Path, harm: Any) -> Crew:
    data = folder / "rows.csv"
    data.write_bytes(tiny_jobs.data(KIND))
    train = TrainConfig.model_validate({**tiny_jobs.train(KIND, folder / "model").model_dump(), "max_steps": 1})
    return Crew(folder / "crew", train, data, each=1, nodes=2, how=Parallelism(kind="fsdp"), harm=harm)


def newest(crew: Crew) -> list[SnapshotInfo]:
    """Return the newest snapshot on each machine."""
    return [SnapshotInfo.model_validate_json(info_of(run.waiting()[-1]).read_bytes()) for run in crew.runs]


def test_an_error_of_the_second_machine_is_tried_again_by_both(tmp_path: Path) -> None:
    """The first machine's complete part would wait for the second one's for ever."""
    crew = divided(tmp_path, fails_once).done()
    infos = newest(crew)
    assert [info.complete for info in infos] == [True, True]
    assert len({info.part.nonce for info in infos if info.part}) == 1, "they are of one try"
    assert (crew.last / "eval.json").exists()
    assert not any((run.root / "artifacts").exists() for run in crew.runs)


def test_second_machine_without_results_ends_the_job_not_the_training(tmp_path: Path) -> None:
    """The second machine cannot write the results, but the training is saved."""
    crew = divided(tmp_path, fails_always)
    for ended in crew.start().ends():
        assert ended.code == ExitCode.INFRASTRUCTURE
        assert "; the training itself is saved at step 1, the next attempt only writes them" in ended.message
    infos = newest(crew)
    assert [(info.step, info.complete) for info in infos] == [(1, False)] * 2
    assert len({info.part.nonce for info in infos if info.part}) == 1
