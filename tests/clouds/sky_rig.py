"""SkyPilot's own API server against the emulated clouds, with the daemon's launchers, purchases and tasks."""

import asyncio
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from broker.domain.ids import Installation, InstanceName
from broker.domain.instance import Liveness
from providers.common.cloud import Purchase
from providers.common.machine_task import MachineTask
from providers.skypilot.config import SkyConfig
from providers.skypilot.launcher import SkyLauncher
from providers.skypilot.plugin.shared import LOCK
from tests.clouds.bake import cache_folder
from tests.clouds.emulator import Clouds
from tests.clouds.wait import GUARD_S, POLL_S

INSTALLATION = Installation("abcd")
KEY = "test-key"
AWS_KEY = {"AWS_ACCESS_KEY_ID": "AKIAEMULATED", "AWS_SECRET_ACCESS_KEY": "test-key-of-aws"}
KEYS = {
    "lambda": {".lambda_cloud/lambda_keys": f"api_key = {KEY}\n".encode()},
    "runpod": {".runpod/config.toml": f'[default]\napi_key = "{KEY}"\n'.encode()},
    "vast": {".config/vastai/vast_api_key": KEY.encode()},
}
FILES = {path: content for files in KEYS.values() for path, content in files.items()}
TASK = MachineTask(
    setup="true",
    run="echo $WORD $SECRET_WORD > ~/ran",
    env={"WORD": "hello"},
    secrets={"SECRET_WORD": "s3cret-of-the-task"},
    image="docker:registry.example/trainer@sha256:" + "0" * 64,
)
PLAIN = MachineTask(setup=TASK.setup, run=TASK.run, env=TASK.env, secrets=TASK.secrets)


class NoRsync(RuntimeError):
    """Raised if this machine lacks rsync, which SkyPilot needs."""


def rsync(folder: Path) -> str:
    """Return a PATH with rsync: this host's, or the baked root's under its own loader. Raises NoRsync."""
    path = os.environ["PATH"]
    if shutil.which("rsync"):
        return path
    for root in sorted(cache_folder().glob("*/root")):
        loader = root / "lib64/ld-linux-x86-64.so.2"
        if (root / "usr/bin/rsync").exists() and loader.exists():
            script = folder / "rsync"
            libraries = ":".join(str(root / name) for name in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"))
            script.write_text(f'#!/bin/sh\nexec {loader} --library-path {libraries} {root}/usr/bin/rsync "$@"\n')
            script.chmod(script.stat().st_mode | stat.S_IXUSR)
            return f"{folder}:{path}"
    raise NoRsync("no rsync here: apt-get install rsync, or bake the machines (python -m tests.clouds.bake)")


def launcher(state: Path, clouds: Clouds | None = None, **settings: Any) -> SkyLauncher:
    """Return a launcher as the registry creates it; `clouds`: their addresses instead of the real ones."""
    state.mkdir(parents=True, exist_ok=True)
    own = settings.pop("env", {})
    env = own if "PATH" in own else {"PATH": rsync(state), **own}
    if clouds is not None:
        env |= {**clouds.environment, "GPUBROKER_LAMBDA_ENDPOINT": clouds.url}
    config = SkyConfig(env=env, **settings)
    return SkyLauncher(config, installation=INSTALLATION, state=state / "sky", keys=lambda: KEYS)


def name(last: str) -> InstanceName:
    return InstanceName(f"gb-{INSTALLATION}-{'a' * 12}{last}")


def of_lambda(region: str = "us-west-3") -> Purchase:
    row = {
        "InstanceType": "gpu_1x_h100_pcie", "AcceleratorName": "H100", "AcceleratorCount": "1", "vCPUs": "26",
        "MemoryGiB": "225", "Price": "2.49", "Region": region,
    }  # fmt: skip
    return Purchase(
        cloud="lambda", region=region, instance_type="gpu_1x_h100_pcie", use_spot=False,
        catalog={"lambda/vms.csv": [row]},
    )  # fmt: skip


def of_runpod(bid: str = "0.31") -> Purchase:
    row = {
        "InstanceType": "1x_L40S_SECURE", "AcceleratorName": "L40S", "AcceleratorCount": "1", "vCPUs": "4",
        "MemoryGiB": "48", "Price": "0.86", "SpotPrice": bid, "Region": "US", "AvailabilityZone": "US-GA-1",
    }  # fmt: skip
    return Purchase(
        cloud="runpod", region="US", zone="US-GA-1", instance_type="1x_L40S_SECURE", use_spot=True,
        catalog={"runpod/vms.csv": [row]},
    )  # fmt: skip


def of_community() -> Purchase:
    row = {
        "InstanceType": "1x_RTX4090_COMMUNITY", "AcceleratorName": "RTX4090", "AcceleratorCount": "1", "vCPUs": "4",
        "MemoryGiB": "24", "Price": "0.34", "SpotPrice": "", "Region": "US", "AvailabilityZone": "community",
    }  # fmt: skip
    return Purchase(
        cloud="runpod", region="US", zone="community", instance_type="1x_RTX4090_COMMUNITY", use_spot=False,
        catalog={"runpod/vms.csv": [row]},
    )  # fmt: skip


def of_vast(ask: str, price: float) -> Purchase:
    row = {
        "InstanceType": "1x-RTX_4090-32-65536", "AcceleratorName": "RTX4090", "AcceleratorCount": "1", "vCPUs": "32",
        "MemoryGiB": "64", "Price": "0.4", "SpotPrice": str(price), "Region": "Sweden, SE, EU",
    }  # fmt: skip
    return Purchase(
        cloud="vast", region="Sweden, SE, EU", instance_type="1x-RTX_4090-32-65536", use_spot=True, disk_gb=40,
        catalog={"vast/vms.csv": [row]}, config={"vast": {"create_instance_kwargs": {"price": price}}},
        pin={"ask": ask},
    )  # fmt: skip


def processes(state: Path) -> Mapping[int, psutil.Process]:
    """Return every living process of a server below `state`."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            env = process.environ()
            if LOCK in env and str(state) in env.get("HOME", "") and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process
        except psutil.Error:
            continue
    return found


def server(state: Path) -> psutil.Process:
    """Return the main process of the one server below `state`."""
    [found] = [p for p in processes(state).values() if "sky.server.server" in p.cmdline()]
    return found


async def certain_liveness(sky: SkyLauncher, server: str, wanted: InstanceName) -> Liveness:
    """Return a launch's liveness once it is known: after a kill it is unknown until the kernel frees the locks."""
    async with asyncio.timeout(GUARD_S):
        while (liveness := await sky.liveness(server, wanted)) is Liveness.UNKNOWN:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return liveness
