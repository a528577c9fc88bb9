"""Starts the task on launched machines by SSH, without SkyPilot's job queue, Ray and agents on the machines.

SkyPilot supports machines that need no runtime setup (`ProvisionRuntimeMetadata`); the plugin declares its machines as
such. SkyPilot's runtime takes half a minute to set up and downloads from three places. Launches of other users of a
team's server do not change.
"""

import dataclasses
import os
import shlex
from pathlib import Path
from typing import Any

from sky import task as task_lib
from sky.backends import backend_utils
from sky.provision import common

from . import ssh
from .patch import Replacement, state_folder
from .shared import PIN, PLUGIN_FILES

POLL_S = {"runpod": 2, "vast": 5}
"""Seconds between two checks whether a machine runs, by cloud; SkyPilot uses 5 and 10 s."""


def is_ours() -> bool:
    """Return True if the current launch is gpubroker's; a team's server also runs other launches."""
    return PIN in os.environ


def without_runtime_setup(record: common.ProvisionRecord) -> common.ProvisionRecord:
    """Return the record of a create with the mark that SkyPilot has nothing to set up on its machines."""
    metadata = common.ProvisionRuntimeMetadata(
        has_ray=False, has_skylet=False, has_job_queue=False, runtime_setup_done=True, setup_done=True
    )
    return dataclasses.replace(record, runtime_metadata=metadata) if is_ours() else record


def no_wheel(original: Replacement) -> Replacement:
    """Return `build_sky_wheel` that returns an empty folder for gpubroker's launches.

    SkyPilot would build its wheel for the machines: pip downloads the build tools, and each launch scans its files.
    """

    def build_sky_wheel() -> tuple[Path, str]:
        if not is_ours():
            wheel: tuple[Path, str] = original()
            return wheel
        folder = state_folder() / "no-wheel"
        folder.mkdir(parents=True, exist_ok=True)
        return folder, folder.name

    return build_sky_wheel


def started_over_ssh(original: Replacement) -> Replacement:
    """Return `_execute` that starts gpubroker's tasks over SSH; SkyPilot would use its job queue."""

    def _execute(self: Any, handle: Any, task: Any, dryrun: bool = False) -> Any:
        if not is_ours():
            return original(self, handle, task, dryrun)
        login = ssh_login(handle)
        if not login:
            raise RuntimeError("gpubroker: SkyPilot has no address of the machine that it launched")
        env = task_lib.get_plaintext_envs_and_secrets(task.envs_and_secrets)
        env["SKYPILOT_NODE_IPS"] = "\n".join(handle.cached_internal_ips)
        scripts = {"start.sh": PLUGIN_FILES["start.sh"].decode(), "setup.sh": task.setup, "run.sh": task.run}
        known_hosts = ssh.known_hosts_file(state_folder(), handle.get_cluster_name())
        nodes = []
        for rank, node in enumerate(login["nodes"]):
            node_env = env | {"SKYPILOT_NODE_RANK": str(rank)}
            lines = [f"{name}={shlex.quote(value)}\n" for name, value in node_env.items()]
            data = ssh.owner_only_tar({"env": "".join(lines), **scripts})
            nodes.append((ssh.argv({**login, **node}, login["key"], known_hosts, tty=False), data))
        ssh.start_tasks(nodes)
        return None

    return _execute


def ssh_login(handle: Any) -> dict[str, Any]:
    """Return the addresses of all machines, the head node first, and the login; empty before SkyPilot has them."""
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
