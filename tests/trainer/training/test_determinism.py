"""Deterministic kernels, with the settings that the worker uses on a GPU, tested on a CPU."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.trainer.support import tiny_jobs
from tests.trainer.support.crews import Crew, logged_steps
from tests.trainer.support.workers import Worker, finished, story
from trainer.contract.documents import ExitCode, Parallelism
from trainer.training import determinism as exact


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def lacking() -> None:
    """Add an operation without a deterministic kernel."""
    torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))


def test_an_operation_without_a_deterministic_kernel_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    exact.begin()
    done: list[int] = []

    def step() -> None:
        lacking()
        done.append(1)

    exact.require_or_report(exact.first_nondeterministic_operation(step))
    assert done == [1]
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert capsys.readouterr().out.startswith("notice: put_ has no kernel here that gives the same bits each time")


def test_deterministic_kernels_are_required_where_all_exist(capsys: pytest.CaptureFixture[str]) -> None:
    exact.begin()
    exact.require_or_report(exact.first_nondeterministic_operation(lambda: None))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "attention would add in any order"
    assert not torch.utils.deterministic.fill_uninitialized_memory, "every new tensor would be written twice"  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        lacking()
    assert capsys.readouterr().out == ""


def test_other_warnings_of_the_first_step_are_not_swallowed() -> None:
    exact.begin()
    with pytest.warns(UserWarning, match="something else"):
        assert exact.first_nondeterministic_operation(lambda: warnings.warn("something else", stacklevel=1)) == ""


def test_code_outside_of_training_may_be_nondeterministic() -> None:
    exact.begin()
    exact.require()
    with pytest.warns(UserWarning, match="deterministic"), exact.leniently():
        lacking()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    exact.begin()
    with exact.leniently():
        pass
    assert torch.is_deterministic_algorithms_warn_only_enabled(), "it was lenient before"


def as_on_a_gpu(rank: int) -> None:
    """Act as on a GPU. Each worker is a process of its own, so no state is restored."""
    from trainer.training.loop import TrainingLoop

    rehearse = TrainingLoop._check_determinism

    def rehearsed(loop: TrainingLoop) -> None:
        rehearse(loop)
        (loop._run.root / "rehearsed").touch()

    exact.begin()
    TrainingLoop._check_determinism = rehearsed  # type: ignore[method-assign]


def as_on_a_gpu_that_lacks_one(rank: int) -> None:
    from trainer.training.step import StepRunner

    as_on_a_gpu(rank)
    forward = StepRunner._forward

    def lacks(runner: StepRunner, *args: Any) -> torch.Tensor:
        loss = forward(runner, *args)
        loss.register_hook(lambda _: lacking())
        return loss

    StepRunner._forward = lacks  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["causal_lm lora", "image_classification full", "text_to_image lora"])
@pytest.mark.parametrize("harm", [as_on_a_gpu, as_on_a_gpu_that_lacks_one])
def test_the_step_that_is_tried_first_changes_nothing(name: str, harm: Any, tmp_path: Path) -> None:
    kind = tiny_jobs.KINDS[name]
    train, data = tiny_jobs.train(kind, tmp_path / "model"), tmp_path / f"rows.{kind.format}"
    data.write_bytes(tiny_jobs.data(kind))
    plain = finished(tmp_path / "plain", train, data)
    tried = Worker(tmp_path / "tried", train, data).start(harm)
    ended = tried.end()
    assert ended.code == ExitCode.COMPLETED, ended.message
    assert (tried.run.root / "rehearsed").exists()
    assert story(tried.last) == story(plain), "dropout and all"


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("harm", [as_on_a_gpu, as_on_a_gpu_that_lacks_one])
def test_packing_is_refused_where_processes_share_model_or_gradients(
    how: Literal["ddp", "fsdp"], harm: Any, tmp_path: Path
) -> None:
    """The processes share the gradients (DDP) or the model (FSDP)."""
    kind = tiny_jobs.KINDS["causal_lm full"]
    train, data = tiny_jobs.train(kind, tmp_path / "model"), tmp_path / f"rows.{kind.format}"
    data.write_bytes(tiny_jobs.data(kind))
    shared = Parallelism(kind=how)
    plain = Crew(tmp_path / "plain", train, data, each=2, how=shared).done()
    tried = Crew(tmp_path / "tried", train, data, each=2, how=shared, harm=harm).done()
    assert (tried.runs[0].root / "rehearsed").exists()
    assert logged_steps(tried.last) == logged_steps(plain.last)
