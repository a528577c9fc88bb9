"""CPU seconds of short commands, and the size of the base installation: `python -m benchmarks.cli_start`.

Each figure is the median of a command's user and system time. `gpubroker` runs from this environment, `sky` from this
one or from the one that `make venv` creates for it. `ls` asks a local daemon with 20 queued jobs. The base installation
(a wheel of this checkout) and dstack are installed from pip's index into temporary environments. The last line is JSON.
A figure that cannot be measured is null, and an earlier line gives the reason.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from broker.cli.spec.code_archive import pack
from broker.client.async_client import AsyncClient

ROOT = Path(__file__).parents[1]
GPUBROKER = (sys.executable, "-m", "broker.cli")
ESTIMATE = (*GPUBROKER, "estimate", "Qwen/Qwen2.5-0.5B", "--gpu", "L40S")
SKY_ENVIRONMENTS = (Path(sys.prefix), Path(f"{sys.prefix}-skypilot"))
JOBS = 20
CONFIG = "grpc: {port: null}\nproviders: {local: null, simulated: {sold_out: 1}}\n"
"""Configuration of the daemon: its market lists the jobs' GPU, and is sold out, so that the jobs stay queued."""
RUNS = 9


class Unmeasured(Exception):
    """A figure cannot be measured on this machine; the message is the reason."""


def cpu_s(command: Sequence[str | Path], environment: Mapping[str, str]) -> float:
    """Run a command and return its user and system time in seconds. Raises Unmeasured if it fails."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise Unmeasured(f"{' '.join(map(str, command))} exits with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def median_cpu_s(name: str, command: Sequence[str | Path], runs: int, environment: Mapping[str, str]) -> float | None:
    """Measure a command after one run that fills the caches, and print the result. None: it cannot be measured."""
    try:
        cpu_s(command, environment)
        times = [cpu_s(command, environment) for _ in range(runs)]
    except (OSError, Unmeasured) as e:
        print(f"{name}: not measured: {e}", flush=True)
        return None
    print(f"{name}: {statistics.median(times):.3f} s of CPU ({min(times):.3f} – {max(times):.3f})", flush=True)
    return round(statistics.median(times), 3)


@contextmanager
def daemon(home: Path) -> Iterator[dict[str, str]]:
    """Run a daemon with queued jobs, and yield the environment of its clients. Raises Unmeasured."""
    environment = {**os.environ, "GPUBROKER_HOME": str(home)}
    for name in ("GPUBROKER_URL", "GPUBROKER_TOKEN"):
        environment.pop(name, None)
    home.mkdir(mode=0o700)
    (home / "gpubroker.yaml").write_text(CONFIG)
    command = [*GPUBROKER, "serve", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        if process.stdout is None or not process.stdout.readline():
            raise Unmeasured("`gpubroker serve` did not start")
        asyncio.run(submit_jobs(json.loads((home / "client.json").read_text())))
        yield environment
    finally:
        process.terminate()
        process.wait()


async def submit_jobs(address: Mapping[str, str]) -> None:
    """Submit jobs for a GPU that is sold out."""
    archive = BytesIO()
    pack(ROOT / "examples" / "script", archive)
    async with AsyncClient(address["url"], address["token"]) as client:
        code = (await client.upload(archive.getvalue(), name="script", fmt="tar")).ref
        for n in range(JOBS):
            spec = {
                "name": f"job-{n}",
                "cap_usd": "5",
                "resources": {"accelerators": ["H100"]},
                "script": {"code": code, "command": ["python3", "count.py", "60"]},
            }
            await client.submit(spec, key=f"cli-start-{n}")


def environment_with(folder: Path, *packages: str | Path) -> Path:
    """Install packages into a new virtual environment. Raises Unmeasured."""
    run(sys.executable, "-m", "venv", folder)
    if packages:
        run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages)
    return folder


def run(*command: str | Path) -> None:
    """Run a command. Raises Unmeasured with the last line of its errors."""
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise Unmeasured((ran.stderr.strip() or ran.stdout.strip() or "no output").splitlines()[-1])


def base_install(folder: Path) -> tuple[float, int]:
    """Return the megabytes and the number of packages that `pip install gpubroker` adds. Raises Unmeasured."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    empty, full = environment_with(folder / "empty"), environment_with(folder / "base", *folder.glob("*.whl"))
    megabytes = (_bytes(full) - _bytes(empty)) / 1e6
    return round(megabytes, 1), len(_packages(full)) - len(_packages(empty))


def _bytes(environment: Path) -> int:
    return sum(file.stat().st_size for file in environment.rglob("*") if file.is_file() and not file.is_symlink())


def _packages(environment: Path) -> list[Path]:
    return [*environment.glob("lib/python*/site-packages/*.dist-info")]


def sky(_: Path) -> Path:
    """Return SkyPilot's program. Raises Unmeasured."""
    for place in SKY_ENVIRONMENTS:
        if (place / "bin" / "sky").exists():
            return place / "bin" / "sky"
    raise Unmeasured("no sky in the environment; `make venv` installs it")


def dstack(folder: Path) -> Path:
    """Install dstack and return its program. Raises Unmeasured."""
    return environment_with(folder / "dstack", "dstack") / "bin" / "dstack"


def measure(folder: Path, runs: int) -> dict[str, float | int | None]:
    """Return every figure by its name."""
    plain = dict(os.environ)
    figures: dict[str, float | int | None] = {
        "help_cpu_s": median_cpu_s("gpubroker --help", (*GPUBROKER, "--help"), runs, plain),
        "estimate_cpu_s": median_cpu_s("gpubroker estimate", ESTIMATE, runs, plain),
    }
    try:
        with daemon(folder / "home") as environment:
            figures["ls_cpu_s"] = median_cpu_s(f"gpubroker ls, {JOBS} jobs", (*GPUBROKER, "ls"), runs, environment)
    except Unmeasured as e:
        print(f"gpubroker ls: not measured: {e}", flush=True)
        figures["ls_cpu_s"] = None
    for name, program in (("sky", sky), ("dstack", dstack)):
        try:
            figures[f"{name}_help_cpu_s"] = median_cpu_s(f"{name} --help", (program(folder), "--help"), runs, plain)
        except Unmeasured as e:
            print(f"{name} --help: not measured: {e}", flush=True)
            figures[f"{name}_help_cpu_s"] = None
    try:
        figures["base_install_mb"], figures["base_packages"] = base_install(folder)
    except Unmeasured as e:
        print(f"base installation: not measured: {e}", flush=True)
        figures["base_install_mb"] = figures["base_packages"] = None
    return figures


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=RUNS, help="runs of each command")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpubroker-cli-start-") as folder:
        print(json.dumps(measure(Path(folder), given.runs)))


if __name__ == "__main__":
    main()
