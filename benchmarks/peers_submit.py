"""Measure submits to other projects' servers: `python -m benchmarks.peers_submit --skypilot --dstack-venv FOLDER`.

The last line is JSON. Each server runs on this machine as its package starts it, in a folder that is removed. It has
its SQLite database, no cloud and no backend. Clients are closed loops over aiohttp, as in `benchmarks.submit
--transport aiohttp`. The servers do different work before they answer: see docs/reports/2026-11-27-benchmarks.md. The
benchmark installs nothing: SkyPilot comes with the extra `clouds`, and dstack (`dstack[server]`) must be in a virtual
environment of its own.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp

from benchmarks.submit import figures

Submit = Callable[[aiohttp.ClientSession, str], Awaitable[None]]
"""Function that submits one job of this name and returns when the server has accepted the job."""
START_S = 120.0
TASK = "name: benchmark\nrun: 'true'\n"


@asynccontextmanager
async def server(argv: list[str], env: Mapping[str, str], folder: Path, health: str) -> AsyncIterator[None]:
    """Start a server in a process group of its own, wait until `health` answers, and kill the group at the end."""
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=folder, env={**os.environ, "HOME": str(folder), **env}, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            while True:
                with suppress(aiohttp.ClientError):
                    async with session.get(health) as answer:
                        if answer.status < 500:
                            break
                if process.returncode is not None:
                    raise SystemExit((folder / "log").read_text()[-2000:])
                await asyncio.sleep(0.2)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@asynccontextmanager
async def dstack(venv: Path, folder: Path) -> AsyncIterator[Submit]:
    """Yield a submit by `POST /api/project/main/runs/apply`. The task has no image, so no registry is queried."""
    token, url = uuid.uuid4().hex, f"http://127.0.0.1:{free_port()}"
    env = {
        "DSTACK_SERVER_DIR": str(folder / "server"),
        "DSTACK_SERVER_ADMIN_TOKEN": token,
        "DSTACK_SERVER_LOG_LEVEL": "ERROR",
    }
    argv = [str(venv / "bin" / "dstack"), "server", "--host", "127.0.0.1", "--port", url.rpartition(":")[2], "-y"]
    async with server(argv, env, folder, f"{url}/healthcheck"):

        async def submit(session: aiohttp.ClientSession, name: str) -> None:
            configuration = {"type": "task", "commands": ["true"]}
            spec = {"run_name": name, "configuration": configuration, "ssh_key_pub": "ssh-ed25519 AAAA benchmark"}
            body = {"plan": {"run_spec": spec}, "force": False}
            headers = {"Authorization": f"Bearer {token}"}
            async with session.post(f"{url}/api/project/main/runs/apply", json=body, headers=headers) as answer:
                await accepted(answer)

        yield submit


@asynccontextmanager
async def skypilot(folder: Path) -> AsyncIterator[Submit]:
    """Yield a submit by `POST /launch`, which answers once the request is in the database, before a worker runs it."""
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    env = {"SKYPILOT_API_SERVER_LOCAL_PORT": port, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "SPT_NOENV": "1"}
    argv = [sys.executable, "-m", "sky.server.server", "--host", "127.0.0.1", "--port", port]
    common = {
        "env_vars": {"SKYPILOT_USER_ID": "benchmark", "SKYPILOT_USER": "benchmark"},
        "entrypoint": "benchmark",
        "entrypoint_command": "benchmark",
        "using_remote_api_server": False,
        "override_skypilot_config": {},
        "override_skypilot_config_path": None,
    }
    async with server(argv, env, folder, f"{url}/api/health"):

        async def submit(session: aiohttp.ClientSession, name: str) -> None:
            body = {**common, "task": TASK, "cluster_name": name, "dryrun": True, "quiet_optimizer": True}
            headers = {"X-SkyPilot-API-Version": "62"}
            async with session.post(f"{url}/launch", json=body, headers=headers) as answer:
                await accepted(answer)

        yield submit


async def accepted(answer: aiohttp.ClientResponse) -> None:
    text = await answer.text()
    if answer.status != 200:
        raise SystemExit(f"refused: {answer.status} {text[:500]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def measure(submit: Submit, clients: int, requests: int) -> dict[str, Any]:
    run, left = uuid.uuid4().hex[:8], iter(range(requests))

    async def client() -> list[float]:
        taken = []
        async with aiohttp.ClientSession() as session:
            for number in left:
                started = perf_counter()
                await submit(session, f"b{run}-{number}")
                taken.append(perf_counter() - started)
        return taken

    started = perf_counter()
    latencies = await asyncio.gather(*(client() for _ in range(clients)))
    return {"clients": clients, **figures([t for latency in latencies for t in latency], perf_counter() - started)}


async def benchmark(given: argparse.Namespace) -> list[dict[str, Any]]:
    runs = []
    for peer in (["skypilot"] if given.skypilot else []) + (["dstack"] if given.dstack_venv else []):
        with tempfile.TemporaryDirectory(prefix="gb-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            async with dstack(given.dstack_venv, folder) if peer == "dstack" else skypilot(folder) as submit:
                await measure(submit, 1, 10)
                for clients in map(int, given.clients.split(",")):
                    runs.append({"server": peer, **await measure(submit, clients, given.requests)})
                    print(
                        "{server}: {clients} clients, p50 {p50_ms} ms, p99 {p99_ms} ms".format(**runs[-1]), flush=True
                    )
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skypilot", action="store_true", help="measure SkyPilot's API server of this environment")
    parser.add_argument("--dstack-venv", type=Path, help="virtual environment with dstack[server]")
    parser.add_argument("--clients", default="1,10", help="numbers of clients, separated by commas")
    parser.add_argument("--requests", type=int, default=200, help="jobs for each number of clients")
    print(json.dumps({"runs": asyncio.run(benchmark(parser.parse_args()))}))


if __name__ == "__main__":
    main()
