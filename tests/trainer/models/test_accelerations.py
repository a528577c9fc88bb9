"""Switches that a machine may lack: the run continues without them and logs a notice."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.models.test_methods import job
from tests.trainer.support import tiny_jobs
from tests.trainer.support.crews import Crew, logged_steps, tensors
from tests.trainer.support.tiny_models import llama
from tests.trainer.support.workers import HANGS_S, Worker, killed_within_a_step, story
from trainer.__main__ import main
from trainer.contract.documents import ExitCode, Parallelism
from trainer.models import accelerations as switches
from trainer.parallel import fsdp as shares


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
    assert switches.attention("flash") is None
    assert switches.attention("eager") == "eager"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[:2] for line in lines] == [["notice", " train.tf32"], ["notice", " train.attention"]]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"tensor": 3}, "tensor 3: "),
        ({"tensor": 2, "context": 2}, "tensor 2 and context 2: "),
        ({}, "fsdp: "),
        ({"kind": "ddp"}, ""),
    ],
)
def test_sharding_with_one_process_is_reported(
    how: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate import Accelerator

    arrangement = shares.build_arrangement(
        Parallelism.model_validate({"kind": "fsdp", **how}), Accelerator(cpu=True), "fp32"
    )
    assert not arrangement.divided
    line = f"notice: {said}a single process trains here, so nothing is sharded\n"
    assert capsys.readouterr().out == (line if said else "")


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--fsdp"], "--fsdp"), (["--tensor", "2"], "--tensor"), (["--save-every", "5"], "--save-every")],
)
def test_an_option_of_a_run_alone_asks_for_its_configuration(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["trainer", *options])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {said} needs --config FILE\n")


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
    """Trace and differentiate as in production, without the C++ compiler, which takes a minute."""
    import functools

    import torch

    torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


def test_compiled_layers_learn_as_plain_ones(model: Path, data: Path, tmp_path: Path) -> None:
    train = job(model, method={"kind": "lora", "r": 4, "dropout": 0}, precision="fp32", max_steps=2)
    plain = Crew(tmp_path / "plain", train, data, each=1).done().last
    compiled = train.model_copy(update={"compile": True, "attention": "eager"})
    found = Crew(tmp_path / "compiled", compiled, data, each=1, harm=quick_compiler).done().last
    for one, other in zip(logged_steps(found), logged_steps(plain), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_fp8_falls_back_where_the_machine_or_the_model_has_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    cpu, layer = torch.device("cpu"), torch.nn.Sequential(torch.nn.Linear(16, 32))
    assert not switches.fp8([layer], cpu)
    monkeypatch.setattr(switches, "_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not switches.fp8([layer], torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(switches.importlib.util, "find_spec", lambda name: None)
    assert not switches.fp8([layer], torch.device("cuda"))
    assert type(layer[0]) is torch.nn.Linear
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("notice: train.fp8: ").split(";")[0] for line in lines] == [
        "the CPU has no fp8",
        "NVIDIA A100 has no fp8",
        "torchao is not on this machine (pip install 'gpubroker[fp8]')",
    ]


def test_fp8_is_for_linear_modules_that_are_trained_and_take_it(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    pytest.importorskip("torchao", reason="extra fp8")

    class Own(torch.nn.Linear):
        """A subclass of Linear, like a quantised layer or one with adapters."""

    frozen = torch.nn.Linear(16, 32).requires_grad_(requires_grad=False)
    layer = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(16, 40), Own(16, 32), frozen)
    kinds, weights = [type(module) for module in layer], [module.weight for module in layer]
    assert switches.fp8([layer], torch.device("cpu"), emulate=True)
    assert [type(module) is kind for module, kind in zip(layer, kinds, strict=True)] == [False, True, True, True]
    assert all(module.weight is weight for module, weight in zip(layer, weights, strict=True)), "by the same names"
    assert capsys.readouterr().out == ""
    assert not switches.fp8([frozen], torch.device("cpu"), emulate=True)
    assert "no linear module is trained whole" in capsys.readouterr().out


def test_fp8_over_divided_weights_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    pytest.importorskip("torchao", reason="extra fp8")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        layer = torch.nn.Sequential(torch.nn.Linear(16, 32))
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        assert not switches.fp8(iter([layer]), torch.device("cpu"), emulate=True)
    finally:
        distributed.destroy_process_group()
    assert "the weights are divided among the processes (FSDP or tensor parallelism)" in capsys.readouterr().out


def emulated_fp8(rank: int) -> None:
    import functools

    switches.fp8 = functools.partial(switches.fp8, emulate=True)


def killed_in_fp8(rank: int) -> None:
    emulated_fp8(rank)
    killed_within_a_step(rank)


def test_a_run_in_fp8_learns_and_resumes_bit_for_bit(model: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="extra fp8")
    train = job(model, method={"kind": "full"}, precision="fp32", fp8=True)

    def finished(name: str, fp8: bool = True, **more: Any) -> Path:
        made = train.model_copy(update={"fp8": fp8})
        worker = Worker(tmp_path / name, made, data, **more).start(emulated_fp8)
        ended = worker.end()
        assert ended.code == ExitCode.COMPLETED, ended.message
        return worker.last

    killed = Worker(tmp_path / "killed", train, data).start(killed_in_fp8)
    whole = finished("whole")
    killed.process.join(HANGS_S)
    assert story(finished("resumed", restore=killed.last)) == story(whole)
    plain = finished("plain", fp8=False)
    assert sorted(tensors(whole)) == sorted(tensors(plain))
    for one, other in zip(logged_steps(whole), logged_steps(plain), strict=True):
        assert one[1] != other[1], "it is another arithmetic"
        assert one[1] == pytest.approx(other[1], rel=0.05)


def test_a_lora_continues_without_fp8(model: Path, data: Path, tmp_path: Path) -> None:
    """fp8 does not apply to a frozen base, and does not pay for the small ranks of adapters."""
    plain = job(model, method={"kind": "lora", "r": 16}, max_steps=2)
    runs = [
        Crew(tmp_path / str(fp8), plain.model_copy(update={"fp8": fp8}), data, each=1, harm=emulated_fp8).done().last
        for fp8 in (True, False)
    ]
    assert logged_steps(runs[0]) == logged_steps(runs[1])


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="the extra fp8 is not installed")
def test_torchao_warnings_about_other_hardware_are_not_logged() -> None:
    argv = [sys.executable, "-c", "import trainer.models.loading, torchao.quantization"]
    assert subprocess.run(argv, capture_output=True, text=True, check=True, timeout=600).stderr == ""
