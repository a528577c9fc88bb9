"""What SkyPilot's books on a machine say of its job, read as over SSH: by a shell of another home."""

import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from providers import sky_job
from providers.sky_job import SkyJob, look, verdict

HEAD = """2026-11-21 18:41:16,222\tINFO worker.py:1719 -- Connected to Ray cluster at \x1b[1mhttp://127.0.0.1:8266\x1b[22m
\x1b[2m├── \x1b[0m\x1b[2mWaiting for task resources on 1 node.\x1b[0m
"""
SETUP, RUN, WORKER = (
    "\x1b[36m(setup pid=487)\x1b[0m ",
    "(gb-x, pid=900) ",
    "\x1b[36m(worker1, rank=1, pid=9, ip=10.0.0.3)\x1b[0m ",
)
NOT_FOUND = "Error response from daemon: manifest unknown"
PULL = f"""{HEAD}{SETUP}{NOT_FOUND}
{SETUP}gpubroker-setup: the pull failed (3 of 3)
{SETUP}gpubroker-setup: cannot pull r.example/t@sha256:0; check trainer.image, and the registry's login if it is private
ERROR: \x1b[31mJob 1's setup failed. Failed workers: (pid=487, returncode=1). See error logs above.\x1b[0m
"""


def machine(home: Path, status: str, *, start_at: float = -1, log: str = "") -> Sequence[str]:
    """SkyPilot's books below `home`, and argv as `SkyLauncher.ssh` gives it."""
    (home / ".sky").mkdir()
    folder = home / "sky_logs/1-gb-x"
    folder.mkdir(parents=True)
    (folder / "run.log").write_text(log)
    books = sqlite3.connect(home / ".sky/jobs.db")
    books.execute("CREATE TABLE jobs (job_id INTEGER PRIMARY KEY, status TEXT, start_at FLOAT, log_dir TEXT)")
    books.execute("INSERT INTO jobs VALUES (1, ?, ?, '~/sky_logs/1-gb-x')", (status, start_at))
    books.commit()
    books.close()
    return shell(home)


def shell(home: Path) -> Sequence[str]:
    return ["env", "-i", f"HOME={home}", f"PATH={os.environ['PATH']}", "sh", "-c"]


def job(status: str, log: str = "", ran_s: float = 0.0) -> SkyJob:
    return SkyJob(status=status, ran_s=ran_s, log=log)


async def test_the_books_are_read(tmp_path: Path) -> None:
    seen = await look(machine(tmp_path, "RUNNING", start_at=time.time() - 100, log=HEAD + "é\n" * 20_000 + PULL))
    assert seen is not None
    assert (seen.status, 100 <= seen.ran_s < 130) == ("RUNNING", True)
    assert seen.log.endswith(PULL)
    assert len(seen.log) < 20_000


async def test_a_machine_of_which_nothing_is_known_yet_has_no_job(tmp_path: Path) -> None:
    assert await look(shell(tmp_path)) is None
    assert await look(["false"]) is None
    ssh = machine(tmp_path, "SETTING_UP")
    books = sqlite3.connect(tmp_path / ".sky/jobs.db")
    books.execute("DELETE FROM jobs")
    books.commit()
    assert await look(ssh) is None


async def test_a_machine_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sky_job, "LOOK_S", 0.2)
    assert await look(["sh", "-c", "exec sleep 60", "0"]) is None


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (job("PENDING"), False),
        (job("SETTING_UP", PULL), False),
        (job("RUNNING", ran_s=1), False),
        (job("RUNNING", ran_s=61), True),
        (job("SUCCEEDED"), True),
        (job("RUNNING", f"{RUN}gpubroker-run: the trainer ended with 65", 1), True),
    ],
)
def test_a_job_that_has_not_failed_runs_once_it_has_for_a_while(seen: SkyJob, expected: bool) -> None:
    assert verdict(seen, []) is expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (
            job("FAILED_SETUP", PULL),
            "cannot pull r.example/t@sha256:0; check trainer.image, and the registry's login if it is private"
            f" (it said: {NOT_FOUND})",
        ),
        (
            job("FAILED_SETUP", f"{WORKER}gpubroker-setup: no trainer in this image"),
            "no trainer in this image",
        ),
        (
            # The machine waits to end itself, and so SkyPilot still says RUNNING.
            job("RUNNING", f"{RUN}docker: no runtime\n{RUN}gpubroker-run: the trainer ended with 125", 1),
            "the trainer cannot run on this machine (exit code 125); check trainer.image (it said: docker: no runtime)",
        ),
        (job("FAILED_DRIVER", HEAD), "SkyPilot says FAILED_DRIVER of the machine's job"),
        (job("CANCELLED"), "SkyPilot says CANCELLED of the machine's job"),
    ],
)
def test_a_failure_is_told_in_one_line_with_what_to_do(seen: SkyJob, expected: str) -> None:
    assert verdict(seen, []) == expected


def test_no_secret_is_told() -> None:
    log = f"{SETUP}GET https://store.example/t?key=s3cret\n{SETUP}gpubroker-setup: cannot fetch s3cret"
    told = verdict(job("FAILED_SETUP", log), ["s3cret"])
    assert told == "cannot fetch *** (it said: GET https://store.example/t?key=***)"


def test_of_a_task_whose_secrets_are_not_known_only_our_own_words_are_told() -> None:
    """A former daemon has launched it."""
    log = f"{SETUP}GET https://store.example/t?key=s3cret\n{SETUP}gpubroker-setup: cannot fetch the trainer"
    assert verdict(job("FAILED_SETUP", log), None) == "cannot fetch the trainer"


async def test_a_host_that_answers_without_end_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what it sends within the time of one look is kept in the daemon's memory."""
    monkeypatch.setattr(sky_job, "LOOK_S", 20.0)
    begun = time.monotonic()
    assert await look(["sh", "-c", "exec yes", "0"]) is None
    assert time.monotonic() - begun < 10
