"""The agent leaves an unfit machine before it loads anything, and reports the reason to the broker."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from trainer.agent.base import gpus
from trainer.agent.process import host_check as host
from trainer.contract.documents import Outcome
from trainer.core.errors import BadHost
from trainer.parallel import device_check as devices


def test_a_sound_machine_passes(tmp_path: Path) -> None:
    assert "products correct" in devices.check(torch.device("cpu"))
    assert host.disk(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_computes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.__matmul__

    def wrong(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        found = right(one, other)
        if found.ndim == 2:
            found[:, 3] += 1000
        return found

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    with pytest.raises(BadHost, match="the CPU computes wrong results"):
        devices.check(torch.device("cpu"))


def test_a_disk_that_takes_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(host.HostNotUsable, match="host: its disk cannot store 4 MiB: No space left") as e:
        host.disk(tmp_path)
    assert e.value.outcome is Outcome.INFRASTRUCTURE
    assert list(tmp_path.iterdir()) == []


def test_only_grave_driver_errors_fail_the_host_check() -> None:
    line = "4,1234,99,-;NVRM: Xid (PCI:0000:3b:00): {}, pid=77, name=python\n"
    assert host.xid(line.format(79)) == "the GPU at PCI:0000:3b:00 had Xid 79: it has fallen off the bus"
    assert host.xid(line.format(31) + line.format(13)) == "", "errors of a program are not the machine's"
    assert host.uncorrected("0\n2\n") == "GPU 1 had 2 memory errors that were not corrected"
    assert host.uncorrected("[N/A]\n0\n") == ""


def nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a script as nvidia-smi."""
    tool = folder / "nvidia-smi"
    tool.write_text(script)
    tool.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(tool))
    return tool


async def test_an_nvidia_smi_that_does_not_answer_is_killed_and_reaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    nvidia_smi(tmp_path, f"#!/bin/sh\necho $$ > {pid}\nexec sleep 60\n", monkeypatch)
    monkeypatch.setattr(host, "LIMIT_S", 1.0)
    assert await host._ecc() == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_an_nvidia_smi_that_cannot_start_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = nvidia_smi(tmp_path, "#!/bin/sh\necho 0\n", monkeypatch)
    assert await host._ecc() == "0\n"
    tool.unlink()
    assert await host._ecc() == ""


def test_a_machine_without_a_driver_reports_no_gpus() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has one")
    assert gpus.load() is None


def test_figures_that_one_gpu_does_not_tell_cost_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def power(gpu: int) -> int:
        if gpu == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 250_500

    told: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda number: number, "nvmlDeviceGetPowerUsage": power,
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=(100, 40)[gpu]),
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=(5, 7)[gpu]),
    }  # fmt: skip
    for name, answer in told.items():
        monkeypatch.setattr(pynvml, name, answer)
    assert gpus.load() == gpus.GpuUsage(utilisation=0.7, memory_bytes=7, power_w=250.5)
