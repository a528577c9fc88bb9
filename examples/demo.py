"""Run the example job from end to end on this machine: `make demo`, or `python -m examples.demo`.

Starts a daemon with a simulated market and submits examples/devils-dictionary.yaml through the command line's own code.
Shows the job through a preemption to its end. Writes `<home>/summary.json`, also as the last line of output. Meanwhile
the daemon may be killed and started again by hand: see the line that names its process.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from broker.api.schemas.jobs import JobDetail
from broker.cli.commands.web import link
from broker.cli.core.command import cli_error, client
from broker.cli.core.exit_codes import CliError
from broker.cli.core.output import Output
from broker.cli.jobs import jobs, submission
from broker.cli.jobs.watch import RETRY_FOR_S, watch
from broker.cli.spec.spec_file import load
from broker.cli.views import summary as summaryview
from broker.cli.views.summary_data import Summary
from broker.client.async_client import AsyncClient
from broker.client.transport.errors import ClientError
from broker.domain.job import JobState
from broker.paths import CLIENT_FILE, CONFIG_FILE

SPEC = Path(__file__).with_name("devils-dictionary.yaml")
KEPT = frozenset({"models"})
"""Entries of the home that `empty` keeps."""
MARK = ".demo"
"""File that marks a demo's home. Only a home with this file is emptied, and the file is removed last."""
START_S = 60.0
STOP_S = 30.0
LONG_S = 30 * 86_400.0
PREFERRED_PORT = 7070


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Return 0 if the job succeeded."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, default=Path(".demo"), help="state folder; emptied but for models/")
    parser.add_argument("--spec", type=Path, default=SPEC)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change the spec")
    parser.add_argument("--lifetime", type=float, default=90.0, help="seconds until the first spot machine is taken")
    options = parser.parse_args(arguments)
    home: Path = options.home.absolute()
    out = Output(as_json=False)
    try:
        started = time.monotonic()
        with running(home, options.lifetime, out):
            summary = asyncio.run(job(options.spec, tuple(options.set), home, out))
    except (CliError, ClientError) as e:
        out.error(e if isinstance(e, CliError) else cli_error(e))
        return 1
    except KeyboardInterrupt:
        out.print("stopped")
        return 130
    report = facts(summary, seconds=time.monotonic() - started)
    (home / "summary.json").write_text(json.dumps(report) + "\n")
    print(json.dumps(report), flush=True)
    return 0 if summary.state == JobState.SUCCEEDED else 1


@contextmanager
def running(home: Path, lifetime_s: float, out: Output | None = None) -> Iterator[None]:
    """Run a daemon on an emptied `home` that commands of this process and its children use. Raises CliError."""
    os.environ["GPUBROKER_HOME"] = str(home)
    for name in ("GPUBROKER_URL", "GPUBROKER_TOKEN"):
        os.environ.pop(name, None)
    empty(home)
    configure(home, lifetime_s)
    with daemon(home, out or Output(as_json=False)):
        yield


def empty(home: Path) -> None:
    """Delete an earlier demo's files. Raises CliError if a process of it still runs, or if `home` is not a demo's."""
    running = [p.pid for p in psutil.process_iter(["pid"]) if p.pid != os.getpid() and _below(p, home)]
    if running:
        pids = " ".join(map(str, running))
        raise CliError(f"an earlier demo still runs in {home}: stop it with `kill {pids}`, then start again")
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    old_entries = [child for child in home.iterdir() if child.name not in KEPT]
    if old_entries and not (home / MARK).exists():
        raise CliError(f"{home} holds {old_entries[0].name}, which no demo wrote: name another folder with --home")
    for child in sorted(old_entries, key=lambda c: c.name == MARK):
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def _below(process: psutil.Process, home: Path) -> bool:
    """Return True for a daemon of this home, its database, and its machines."""
    try:
        is_own = process.environ().get("GPUBROKER_HOME") == str(home) and "broker" in " ".join(process.cmdline())
        return is_own or Path(process.cwd()).is_relative_to(home)
    except (psutil.Error, OSError):
        return False


def configure(home: Path, lifetime_s: float) -> None:
    """Write a configuration: short intervals, and a market that preempts the first spot machine after `lifetime_s`."""
    config: dict[str, Any] = {
        "port": free_port(),
        "providers": {
            "local": None,
            "simulated": {"seed": 1911, "sold_out": 0, "lifetimes_s": [lifetime_s, *[LONG_S] * 20]},
        },
        "intervals": {"poll_s": 0.5, "look_s": 1, "list_s": 1, "billing_s": 2, "sweep_s": 15, "market_s": 10},
        "limits": {"heartbeat_s": 2, "poll_s": 2, "log_s": 2},
    }
    (home / MARK).touch()
    (home / CONFIG_FILE).write_text(yaml.safe_dump(config, sort_keys=False))


def free_port() -> int:
    """Return a port for the whole demo, so that a restarted daemon has the same address."""
    for port in (PREFERRED_PORT, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise CliError("no port is free on 127.0.0.1")


@contextmanager
def daemon(home: Path, out: Output) -> Iterator[None]:
    """Run `gpubroker serve` in a session of its own, so that Ctrl-C reaches the demo only; stop it at the end."""
    log = home / "daemon.log"
    command = [sys.executable, "-m", "broker.cli", "serve"]
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    try:
        _wait_until_ready(process, home, log)
        out.print(
            f"daemon: process {process.pid}, home {home}, log {log}",
            f"        try it: kill -9 {process.pid}; GPUBROKER_HOME={home} {sys.executable} -m broker.cli serve",
        )
        yield
    finally:
        _stop(process, out)


def _wait_until_ready(process: subprocess.Popen[bytes], home: Path, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not (home / CLIENT_FILE).exists():
        if process.poll() is not None:
            raise CliError(f"the daemon did not start: {_last_line(log)} (all of it: {log})")
        if time.monotonic() > deadline:
            raise CliError(f"the daemon did not answer within {START_S:.0f} s; see {log}")
        time.sleep(0.05)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "its log is empty"


def _stop(process: subprocess.Popen[bytes], out: Output) -> None:
    if process.poll() is not None:
        out.print("the demo's own daemon had ended; a daemon that you started keeps running: stop it with Ctrl-C")
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def job(spec: Path, settings: tuple[str, ...], home: Path, out: Output) -> Summary:
    """Submit the job and follow it to its end; on Ctrl-C cancel the job first."""
    async with client(retry_for_s=RETRY_FOR_S) as c:
        prepared = await submission.prepare(c, load(spec, settings))
        submission.show(out, prepared)
        prepared = submission.with_cap(out, prepared, yes=True)
        view = await submission.send(c, prepared, key=None)
        out.print(f"job {view.id} submitted: {view.name}, cap ${view.cap_usd:.2f}")
        out.print(
            f"watch it in a browser, within a minute: {await link(c)} (later: GPUBROKER_HOME={home} gpubroker web)"
        )
        try:
            detail = await watch(c, view.id, out)
        except asyncio.CancelledError:
            await _cancel(c, view.id, out)
            raise
        return await _results(c, detail, home / "results", out)


async def _cancel(c: AsyncClient, job_id: str, out: Output) -> None:
    out.print("cancelling the job, so that no machine is left")
    await c.cancel(job_id)
    async for _ in c.events(job_id):
        pass


async def _results(c: AsyncClient, detail: JobDetail, folder: Path, out: Output) -> Summary:
    summary = await jobs.summary_of(c, detail)
    if detail.state is JobState.SUCCEEDED:
        await jobs.fetch(c, detail, folder, out)
        summary = summary.at(folder)
    summaryview.show(out, summary)
    return summary


def facts(summary: Summary, *, seconds: float) -> dict[str, Any]:
    """Return the contents of `summary.json`; dollars as numbers, for reading only."""
    return {
        "state": summary.state,
        "attempts": len(summary.attempts),
        "preemptions": summary.preemptions,
        "steps_redone": summary.steps_redone,
        "usd": float(summary.usd),
        "usd_on_demand": None if summary.usd_on_demand is None else float(summary.usd_on_demand),
        "heldout_loss_before": summary.heldout_loss_before,
        "heldout_loss_after": summary.heldout_loss_after,
        "adapter": summary.adapter,
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
