"""`pip install gpubroker` installs client and `estimate`; commands of the daemon name the extra that they need."""

import json
import subprocess
import sys
from asyncio import to_thread

import pytest
from arro3.core import Array, DataType, Table
from arro3.io import write_parquet

from broker.cli.core.exit_codes import Exit
from tests.api.harness import Running
from tests.cli.base_install import hidden
from tests.cli.conftest import GOOD, Shell

HIDDEN = json.dumps(sorted(hidden()))
SERVER = ("blobs", "clouds", "key", "launcher", "serve", "sweep")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that finds the packages of the base installation only."""
    command = [sys.executable, "-m", "tests.cli.base_install", HIDDEN, *words]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_only_commands_of_the_daemon_need_more() -> None:
    ran = run()
    assert (ran.returncode, ran.stderr) == (0, "")
    assert sorted(line.split()[0] for line in ran.stdout.splitlines()) == [*SERVER]


@pytest.mark.parametrize(
    "words",
    [
        ("serve",), ("sweep",), ("blobs", "init", "memory://"), ("blobs", "adopt"), ("key", "adopt"),
        ("clouds", "install"), ("launcher", "ls"), ("launcher", "lost", "aaaaaaaaaaaaa"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_command_of_the_daemon_is_refused_in_one_line(words: tuple[str, ...]) -> None:
    ran = run(*words)
    assert ran.returncode == Exit.BAD_INPUT
    assert ran.stdout == ""
    assert ran.stderr.startswith("error: this command needs the packages of the daemon (")
    assert ran.stderr.endswith("); run `pip install 'gpubroker[server]'`\n")
    assert ran.stderr.count("\n") == 1


def test_help_and_estimate_work() -> None:
    ran = run("--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "Run the daemon until SIGINT" in ran.stdout
    ran = run("estimate", "HuggingFaceTB/SmolLM2-135M", "--gpu", "L40S")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "l40s: fits" in ran.stdout


async def test_the_client_works(api: Running, shell: Shell) -> None:
    spec = shell.spec()
    quoted = await to_thread(run, "quote", spec)
    assert (quoted.returncode, quoted.stderr) == (0, "")
    submitted = await to_thread(run, "submit", spec, "--yes", "--detach")
    assert (submitted.returncode, submitted.stderr) == (0, "")
    listed = await to_thread(run, "ls")
    assert listed.returncode == 0
    assert "cynic" in listed.stdout
    detail = await to_thread(run, "get", "last")
    assert detail.returncode == 0
    assert "cynic" in detail.stdout


def test_doctor_says_that_the_daemon_is_not_installed(own_home: object) -> None:
    ran = run("doctor")
    assert ran.returncode == Exit.JOB_FAILED
    assert "ok       installation: the client only; `pip install 'gpubroker[server]'` adds the daemon" in ran.stdout


async def test_the_daemon_reads_parquet_for_the_client(api: Running, shell: Shell) -> None:
    words = {"word": [f"word{i}" for i in range(40)], "definition": [f"what word {i} means" for i in range(40)]}
    write_parquet(
        Table.from_pydict({k: Array(v, DataType.utf8()) for k, v in words.items()}), shell.folder / "w.parquet"
    )
    ran = await to_thread(run, "quote", shell.spec(GOOD.replace("words.csv", "w.parquet")))
    assert (ran.returncode, ran.stderr) == (0, "")
