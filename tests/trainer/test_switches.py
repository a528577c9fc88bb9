"""Switches that a machine may not have: the run goes on without, and a line of the log says so."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer import tiny_jobs
from tests.trainer.crews import Crew, told
from tests.trainer.heads import llama
from tests.trainer.test_methods import job
from trainer import switches


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_bytes(tiny_jobs.data(tiny_jobs.KINDS["causal_lm lora"]))
    return path


def test_tf32_and_flash_fall_back_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert not switches.tf32(torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == "highest"
    assert switches.attention("flash") == "sdpa"
    assert switches.attention("eager") == "eager"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[:2] for line in lines] == [["notice", " train.tf32"], ["notice", " train.attention"]]


def test_without_a_compiler_the_layers_run_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")

    monkeypatch.setattr(torch, "compile", broken)
    assert not switches.compiled([torch.nn.Linear(2, 2)], torch.device("cpu"))
    line = capsys.readouterr().out
    assert line.startswith("notice: train.compile: torch.compile does not work on this machine (Failed to find C comp")
    assert line.count("\n") == 1


def quick_compiler(rank: int) -> None:
    """Traces and differentiates as in production, and leaves out the C++ compiler, which takes a minute."""
    import functools

    import torch

    torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


def test_compiled_layers_learn_the_same(model: Path, data: Path, tmp_path: Path) -> None:
    train = job(model, method={"kind": "lora", "r": 4, "dropout": 0}, precision="fp32", max_steps=2)
    plain = Crew(tmp_path / "plain", train, data, each=1).done().last
    compiled = train.model_copy(update={"compile": True, "attention": "eager"})
    found = Crew(tmp_path / "compiled", compiled, data, each=1, harm=quick_compiler).done().last
    for one, other in zip(told(found), told(plain), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
