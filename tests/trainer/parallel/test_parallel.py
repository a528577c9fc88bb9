"""Several processes give the same samples, losses and weights as one, for every kind of sharding."""

import json
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.conftest import rows
from tests.trainer.support.crews import Crew, logged_steps, tensors
from tests.trainer.support.harness import until
from tests.trainer.support.tiny_models import llama
from tests.trainer.support.workers import HANGS_S, killed_within_a_step
from trainer.contract.checkpoint_format import verify
from trainer.contract.data_config import DataConfig
from trainer.contract.documents import ExitCode, Parallelism
from trainer.contract.train import FullConfig, LoraConfig, OptimConfig, SamplesConfig, TrainConfig
from trainer.core.ipc import Ended, SnapshotInfo, Status, WorkerJob, info_of
from trainer.parallel.ddp import DataParallel

DDP = Parallelism()
FSDP = Parallelism(kind="fsdp")
HYBRID = Parallelism(kind="fsdp", shard=2)
TENSOR = Parallelism(kind="fsdp", tensor=2)
CONTEXT = Parallelism(kind="fsdp", context=2)
OFFLOADED = Parallelism(kind="fsdp", offload=True)
STEPS = 4
METHODS = {"lora": LoraConfig(r=4, dropout=0.2), "still lora": LoraConfig(r=4, dropout=0)}
"""`still lora` has no dropout, whose random numbers depend on the part of a layer that a process holds."""
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}
"""Tolerances for weights. Adam moves a weight by up to the rate, 1e-2, regardless of the size of its gradient. With a
gradient near zero the order of sums decides, and it differs in every run of four processes."""
Hire = Callable[..., Crew]


def job(model: Path, method: str, **more: Any) -> TrainConfig:
    """Return a job with dropout in adapters, rows of different lengths, and an empty last micro-batch."""
    return TrainConfig(
        **{
            "model": str(model),
            "method": METHODS.get(method, FullConfig()),
            "packing": method == "packed",
            "data": DataConfig(path="upload:x", prompt="{word} ", completion="{meaning}", eval_share=0.1),
            "optim": OptimConfig(lr=1e-2),
            "max_steps": STEPS,
            "global_batch": 18,
            "micro_batch": 2,
            "max_length": 32,
            "precision": "fp32",
            "samples": SamplesConfig(prompts=("w1",), max_new_tokens=2),
            **more,
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.csv"
    path.write_bytes(rows())
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Callable[[str], Path]:
    """Return the complete snapshot of one process, by method."""
    made: dict[str, Path] = {}

    def run(method: str) -> Path:
        if method not in made:
            folder = tmp_path_factory.mktemp("alone")
            made[method] = Crew(folder, job(model, method), data, each=1).done().last
        return made[method]

    return run


@pytest.fixture
def hire(tmp_path: Path, model: Path, data: Path) -> Iterator[Hire]:
    crews: list[Crew] = []

    def crew(each: int, how: Parallelism = DDP, *, method: str = "lora", **more: Any) -> Crew:
        config = job(model, method, **more.pop("train", {}))
        crews.append(Crew(tmp_path / f"crew-{len(crews)}", config, data, each=each, how=how, **more))
        return crews[-1]

    yield crew
    for made in crews:
        made.close()


def near(found: Path, expected: Path, tolerance: float = 1e-5) -> None:
    """Check that every step and weight is equal up to the order of sums."""
    assert len(logged_steps(found)) == len(logged_steps(expected)) == STEPS
    for one, other in zip(logged_steps(found), logged_steps(expected), strict=True):
        assert one == pytest.approx(other, rel=tolerance)
    weights = tensors(found)
    assert weights.keys() == tensors(expected).keys()
    for name, weight in tensors(expected).items():
        torch.testing.assert_close(weights[name], weight, **CLOSE)


def results(snapshot: Path, method: str) -> dict[str, Any]:
    """Return the tensors of the finished adapter or model."""
    from safetensors.torch import load_file

    folder = snapshot / ("adapter" if method in METHODS else "model")
    return load_file(next(folder.glob("*.safetensors")))


@pytest.mark.parametrize(
    ("each", "how", "method"),
    [
        pytest.param(2, DDP, "lora", id="ddp"),
        pytest.param(2, FSDP, "full", id="fsdp-full"),
        pytest.param(2, FSDP, "lora", id="fsdp-lora"),
        pytest.param(2, OFFLOADED, "full", id="fsdp-offloaded"),
        pytest.param(4, HYBRID, "lora", id="hybrid"),
        pytest.param(2, TENSOR, "still lora", id="tensor-lora"),
        pytest.param(4, TENSOR, "full", id="fsdp-tensor-full"),
        pytest.param(2, CONTEXT, "packed", id="context-packed"),
    ],
)
def test_many_processes_equal_one(
    each: int, how: Parallelism, method: str, hire: Hire, alone: Callable[[str], Path]
) -> None:
    found, expected = hire(each, how, method=method).done().last, alone(method)
    near(found, expected)
    verify(found)
    one, other = results(found, method), results(expected, method)
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert one[name].shape == tensor.shape
        torch.testing.assert_close(one[name], tensor, **CLOSE)
    assert json.loads((found / "samples.json").read_text()) == json.loads((expected / "samples.json").read_text())
    files = len(list(found.glob("model*.safetensors")))
    assert files == (each if how.tensor * how.context > 1 else {"ddp": 1, "fsdp": 2}[how.kind]), (
        "copies are not written twice"
    )


@pytest.mark.parametrize(("how", "method"), [(DDP, "lora"), (FSDP, "full")], ids=["ddp", "fsdp"])
def test_two_machines_equal_one_process(
    how: Parallelism, method: str, hire: Hire, alone: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each machine has a loopback address and a run folder. Of a sharded model each saves a part."""
    crew = hire(1, how, method=method, nodes=2).done()
    for run in crew.runs if how.kind == "fsdp" else crew.runs[:1]:
        shutil.copytree(run.waiting()[-1], tmp_path / "joined", dirs_exist_ok=True)
    verify(tmp_path / "joined")
    near(tmp_path / "joined", alone(method))


@pytest.mark.parametrize(
    ("each", "how", "method"), [(3, DDP, "lora"), (4, DDP, "full"), (2, FSDP, "full")], ids=["three", "four", "fsdp"]
)
def test_resume_by_as_many_processes_is_bitwise(each: int, how: Parallelism, method: str, hire: Hire) -> None:
    """A packed run computes once before the restore. Sums of three and more numbers depend on the order."""
    packed = {"packing": method == "full"}
    whole = hire(each, how, method=method, train=packed).done().last
    killed = hire(each, how, method=method, train=packed, harm=killed_within_a_step).start()
    for process in killed.processes:
        process.join(HANGS_S)
        assert process.exitcode == -signal.SIGKILL
    before = killed.last
    assert 0 < json.loads((before / "state.json").read_text())["step"] < STEPS
    last = hire(each, how, method=method, train=packed, restore=before).done().last
    assert logged_steps(last) == logged_steps(whole)
    for group in ("model", "optimizer"):
        one, other = tensors(last, group), tensors(whole, group)
        assert one.keys() == other.keys()
        assert all(bool((one[name] == other[name]).all()) for name in other), group


def test_a_run_continues_on_four_two_one_and_four_processes(hire: Hire, alone: Callable[[str], Path]) -> None:
    """The single process stops within a step; the four processes then restart that step."""
    four = hire(4, HYBRID, method="still lora").drained().last
    two = hire(2, TENSOR, method="still lora", restore=four).drained().last
    one = hire(1, method="still lora", restore=two).drained().last
    state = json.loads((one / "state.json").read_text())
    assert (state["step"], state["samples"]) == (2, 36)
    assert state["micro_batch_index"] > 0
    last = hire(4, TENSOR, method="still lora", restore=one).done().last
    near(last, alone("still lora"))
    assert json.loads((last / "state.json").read_text())["samples"] == STEPS * 18


def test_two_machines_stop_at_the_same_step_and_keep_a_part_each(hire: Hire, tmp_path: Path) -> None:
    crew = hire(2, FSDP, nodes=2, train={"max_steps": 10_000}).start()
    until(lambda: all(run.status.exists() and _status(run.status).step >= 1 for run in crew.runs), "both train")
    crew.runs[1].drain.touch()
    assert [ended.code for ended in crew.ends()] == [ExitCode.DRAINED] * 2
    found = [run.waiting()[-1] for run in crew.runs]
    infos = [SnapshotInfo.model_validate_json(info_of(folder).read_bytes()) for folder in found]
    assert infos[0].step == infos[1].step
    parts = [info.part for info in infos]
    assert [(p.node, p.nodes) for p in parts if p] == [(0, 2), (1, 2)]
    assert len({p.nonce for p in parts if p}) == 1
    shutil.copytree(found[0], tmp_path / "joined")
    with pytest.raises(Exception, match="is absent"):
        verify(tmp_path / "joined")
    shutil.copytree(found[1], tmp_path / "joined", dirs_exist_ok=True)
    verify(tmp_path / "joined")


def _status(path: Path) -> Status:
    return Status.model_validate_json(path.read_bytes())


def out_of_memory(rank: int) -> None:
    from trainer.training.step import StepRunner

    def fail(*_: Any) -> None:
        raise MemoryError

    if rank == 1:
        StepRunner._clip = fail  # type: ignore[method-assign, assignment]


def dead(rank: int) -> None:
    from trainer.training.step import StepRunner

    if rank == 1:
        StepRunner._clip = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]


def test_failing_process_reports_the_cause_and_its_peer_the_abort(hire: Hire) -> None:
    """The failed process reports its cause, the other only the abort."""
    ends = hire(1, FSDP, nodes=2, harm=out_of_memory).start().ends()
    assert (ends[1].code, ends[1].failed_by_peer) == (ExitCode.OOM, False)
    assert (ends[0].code, ends[0].failed_by_peer) == (ExitCode.INFRASTRUCTURE, True)
    assert ends[0].message.startswith("another process of this job has gone")


def wrong_wire(rank: int) -> None:
    import torch

    make = torch.full

    def other(size: Any, value: float, **how: Any) -> Any:
        return make(size, value + 1, **how)

    if rank == 1:
        torch.full = other  # the host check sends such tensors


def silent(rank: int) -> None:
    from trainer.parallel import device_check as devices

    devices.LIMIT_S = 1.0
    if rank == 1:
        devices._pairs = lambda *_: threading.Event().wait()  # type: ignore[assignment, return-value]


def test_corrupt_download_ends_the_attempt_before_loading(hire: Hire) -> None:
    """The host check sends tensors between the processes before anything is loaded."""
    (ended,) = hire(2, harm=wrong_wire).start().ends()
    assert (ended.code, ended.bad_host, ended.failed_by_peer) == (ExitCode.INFRASTRUCTURE, True, False)
    assert ended.message == "host: data from process 1 to 0 arrives corrupted"


def test_an_unreachable_process_is_named(hire: Hire) -> None:
    crew = hire(2, harm=silent).start()
    until(crew.runs[0].ended.exists, "process 0 ends")
    ended = Ended.model_validate_json(crew.runs[0].ended.read_bytes())
    assert (ended.code, ended.bad_host) == (ExitCode.INFRASTRUCTURE, True)
    assert ended.message.startswith("host: process 0 does not reach 1, or 1 does not reach it: ")


def test_on_one_machine_the_exit_code_of_the_failed_process_is_kept(hire: Hire) -> None:
    assert hire(2, harm=out_of_memory).start().ends()[0].code == ExitCode.OOM


def improving_only_in_second_process(rank: int) -> None:
    """Let every evaluation improve by one bit in the second process, and not at all in the first."""
    from trainer.parallel import barrier as meeting
    from trainer.parallel import ddp as parallel
    from trainer.training import evaluation as evaluate

    parallel.TIMEOUT, meeting.SILENT_S = (
        timedelta(seconds=20),
        20,
    )  # a process that stops early must not wait long for the other
    seen: list[float] = []

    def heldout(*_: Any, **__: Any) -> tuple[float, dict[str, float]]:
        seen.append(1.0 if rank == 0 else math.nextafter(seen[-1] if seen else 1.0, 0.0))
        return seen[-1], {"accuracy": 2.0 - seen[-1]}

    evaluate.heldout = heldout


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_all_processes_stop_early_by_the_score_of_the_first(metric: str, hire: Hire) -> None:
    """All processes use the first one's score; otherwise one would stop and the other would wait for it."""
    early = {"eval_every_steps": 1, "selection": {"metric": metric, "patience": 1}}
    last = hire(2, train={**early, "max_steps": 9}, harm=improving_only_in_second_process).done().last
    assert json.loads((last / "state.json").read_text())["scores"] == [[1, 1.0], [2, 1.0]]


@pytest.mark.parametrize(("precision", "word"), [("bf16", "bf16"), ("no", "fp32")])
def test_the_description_names_devices_versions_and_precision(precision: str, word: str) -> None:
    device = torch.device("cpu")
    alone: Any = SimpleNamespace(num_processes=1, process_index=0, device=device, mixed_precision=precision)
    versions = f"torch {torch.__version__}, transformers {version('transformers')}"
    assert DataParallel(alone).describe() == f"1 x cpu (ddp, {versions}, {word})"


def test_machines_that_restored_different_checkpoints_do_not_train(hire: Hire) -> None:
    saved = hire(1, nodes=2).drained().last
    crew = hire(1, nodes=2, restore=saved)
    fresh_start = WorkerJob.model_validate_json(crew.runs[1].job.read_bytes()).model_copy(update={"restore": None})
    crew.runs[1].job.write_text(fresh_start.model_dump_json())
    ended = crew.start().ends()[0]
    assert ended.code == ExitCode.INFRASTRUCTURE
    assert ended.message.startswith("checkpoint: some processes are at step 1, some at step 0")


def test_a_killed_process_ends_the_others(hire: Hire) -> None:
    ended = hire(2, harm=dead).start().ends()[0]
    assert (ended.code, ended.failed_by_peer) == (ExitCode.INFRASTRUCTURE, True)
