"""Task status that a machine reports, read as over SSH: by a shell of another home."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from providers.skypilot import task_status as sky_job
from providers.skypilot.task_status import SkyJob, read_job, start_result

NOT_FOUND = "Error response from daemon: manifest unknown"
PULL = f"""{NOT_FOUND}
gpubroker-setup: the pull failed (3 of 3)
gpubroker-setup: cannot pull r.example/t@sha256:0; check trainer.image, and the registry's login if it is private
"""


def machine(home: Path, *, running_s: float | None = None, code: int | None = None, log: str = "") -> Sequence[str]:
    """Write the files of `start.sh` below `home`, and return argv as `SkyLauncher.ssh` gives it."""
    folder = home / ".gpubroker"
    (folder / "started").mkdir(parents=True)
    (folder / "log").write_text(log)
    if running_s is not None:
        (folder / "running").touch()
        os.utime(folder / "running", (time.time() - running_s,) * 2)
    if code is not None:
        (folder / "code").write_text(f"{code}\n")
    return shell(home)


def shell(home: Path) -> Sequence[str]:
    return ["env", "-i", f"HOME={home}", f"PATH={os.environ['PATH']}", "sh", "-c"]


def job(status: str, log: str = "", ran_s: float = 0.0) -> SkyJob:
    return SkyJob(status=status, ran_s=ran_s, log=log)


async def test_the_state_of_a_task_is_read_from_its_machine(tmp_path: Path) -> None:
    job = await read_job(machine(tmp_path, running_s=100, log="é\n" * 20_000 + PULL))
    assert job is not None
    assert (job.status, 100 <= job.ran_s < 130) == ("RUNNING", True)
    assert job.log.endswith(PULL)
    assert len(job.log) < 20_000


@pytest.mark.parametrize(
    ("running_s", "code", "status"),
    [
        (None, None, "SETTING_UP"), (None, 1, "FAILED_SETUP"), (9, None, "RUNNING"), (9, 0, "SUCCEEDED"),
        (9, 137, "FAILED"),
    ],
)  # fmt: skip
async def test_each_task_file_gives_its_job_status(
    tmp_path: Path, running_s: float | None, code: int | None, status: str
) -> None:
    job = await read_job(machine(tmp_path, running_s=running_s, code=code))
    assert job is not None
    assert job.status == status


async def test_a_machine_on_which_nothing_was_started_yet_has_no_job(tmp_path: Path) -> None:
    assert await read_job(shell(tmp_path)) is None
    assert await read_job(["false"]) is None
    (tmp_path / ".gpubroker").mkdir()
    assert await read_job(shell(tmp_path)) is None


async def test_a_machine_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sky_job, "READ_S", 0.2)
    assert await read_job(["sh", "-c", "exec sleep 60", "0"]) is None


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (job("SETTING_UP", PULL), False),
        (job("RUNNING", ran_s=1), False),
        (job("RUNNING", ran_s=61), True),
        (job("SUCCEEDED"), True),
        (job("RUNNING", "gpubroker-run: the trainer ended with 65", 1), True),
    ],
)
def test_a_task_that_ran_for_a_while_counts_as_started(seen: SkyJob, expected: bool) -> None:
    assert start_result(seen, []) is expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (
            job("FAILED_SETUP", PULL),
            "cannot pull r.example/t@sha256:0; check trainer.image, and the registry's login if it is private"
            f" (output: {NOT_FOUND})",
        ),
        (
            job("FAILED_SETUP", "gpubroker-setup: no trainer in this image"),
            "no trainer in this image",
        ),
        (
            # The machine waits to end itself, and so it is still said to run.
            job("RUNNING", "docker: no runtime\ngpubroker-run: the trainer ended with 125", 1),
            "the trainer cannot run on this machine (exit code 125); check trainer.image (output: docker: no runtime)",
        ),
        (job("FAILED"), "the machine's task ended as FAILED"),
    ],
)
def test_a_failure_is_reported_in_one_line_with_what_to_do(seen: SkyJob, expected: str) -> None:
    assert start_result(seen, []) == expected


def test_no_secret_is_reported() -> None:
    log = "GET https://store.example/t?key=s3cret\ngpubroker-setup: cannot fetch s3cret"
    result = start_result(job("FAILED_SETUP", log), ["s3cret"])
    assert result == "cannot fetch *** (output: GET https://store.example/t?key=***)"


def test_with_unknown_secrets_only_the_brokers_lines_are_shown() -> None:
    """An earlier daemon launched the machine."""
    log = "GET https://store.example/t?key=s3cret\ngpubroker-setup: cannot fetch the trainer"
    assert start_result(job("FAILED_SETUP", log), None) == "cannot fetch the trainer"


async def test_a_host_that_answers_without_end_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of a host without end is cut. The daemon would keep all of one poll's output in memory."""
    monkeypatch.setattr(sky_job, "READ_S", 600.0)
    begun = time.monotonic()
    assert await read_job(["sh", "-c", "exec yes", "0"]) is None
    assert time.monotonic() - begun < 300
