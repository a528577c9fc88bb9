"""Starts the task on launched machines, by SSH, in place of SkyPilot's job queue, Ray and agents: none is put on them.

SkyPilot knows machines whose runtime is ready without it (`ProvisionRuntimeMetadata`), and ours are said to be such.
Its own takes half a minute to set up, and downloads from three places. Launches of others go on as before.
"""

import dataclasses
import os
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

from sky import task as task_lib
from sky.backends import backend_utils
from sky.provision import common

from providers.skypilot import ssh as sky_ssh
from providers.skypilot.plugin.patch import Replacement, state_folder
from providers.skypilot.shared import PIN

POLL_S = {"runpod": 2, "vast": 5}
"""Between two looks whether a machine runs, where SkyPilot has 5 and 10 s."""


def ours() -> bool:
    """Whether the launch under way is gpubroker's: a team's server has others, too."""
    return PIN in os.environ


def ready(record: common.ProvisionRecord) -> common.ProvisionRecord:
    """The machines as they are, with nothing more for SkyPilot to set up."""
    done = common.ProvisionRuntimeMetadata(
        has_ray=False, has_skylet=False, has_job_queue=False, runtime_setup_done=True, setup_done=True
    )
    return dataclasses.replace(record, runtime_metadata=done) if ours() else record


def no_wheel(original: Replacement) -> Replacement:
    """SkyPilot would build its wheel for machines, for which pip downloads what builds it, and go through its own files
    at each launch. An empty folder is in its place.
    """

    def build_sky_wheel() -> tuple[Path, str]:
        if not ours():
            built: tuple[Path, str] = original()
            return built
        folder = state_folder() / "no-wheel"
        folder.mkdir(parents=True, exist_ok=True)
        return folder, folder.name

    return build_sky_wheel


def started_by_us(original: Replacement) -> Replacement:
    """SkyPilot would hand `setup` and `run` to its job queue."""

    def _execute(self: Any, handle: Any, task: Any, dryrun: bool = False) -> Any:
        if not ours():
            return original(self, handle, task, dryrun)
        way = way_in(handle)
        if not way:
            raise RuntimeError("gpubroker: SkyPilot has no address of what it launched")
        env = task_lib.get_plaintext_envs_and_secrets(task.envs_and_secrets)
        env["SKYPILOT_NODE_IPS"] = "\n".join(handle.cached_internal_ips)
        scripts = {"start.sh": _start_script(), "setup.sh": task.setup, "run.sh": task.run}
        nodes = []
        for rank, node in enumerate(way["nodes"]):
            given = env | {"SKYPILOT_NODE_RANK": str(rank)}
            lines = [f"{name}={shlex.quote(value)}\n" for name, value in given.items()]
            data = sky_ssh.packed({"env": "".join(lines), **scripts})
            nodes.append((sky_ssh.argv({**way, **node}, way["key"], tty=False), data))
        sky_ssh.start(nodes)
        return None

    return _execute


def way_in(handle: Any) -> dict[str, Any]:
    """Addresses of all machines, the first one's first, and the login; empty while they are not known."""
    hosts = getattr(handle, "cached_external_ips", None)
    ports = getattr(handle, "cached_external_ssh_ports", None)
    if not hosts or not ports:
        return {}
    login = backend_utils.ssh_credential_from_yaml(handle.cluster_yaml, ssh_user=handle.ssh_user)
    return {
        "nodes": [{"host": host, "port": port} for host, port in zip(hosts, ports, strict=True)],
        "user": login["ssh_user"],
        "key": Path(login["ssh_private_key"]).expanduser(),
        "proxy": login["ssh_proxy_command"],
    }


def _start_script() -> str:
    return (files("providers") / "machine" / "start.sh").read_text("utf-8")
