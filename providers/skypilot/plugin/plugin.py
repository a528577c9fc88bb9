"""gpubroker's plugin for SkyPilot's API server, which loads it into each of its processes."""

import fcntl
import hmac
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sky
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from sky.server import plugins

from .launch_locks import is_launching, remove_stale_launch_files
from .patch import state_folder
from .patches import PATCHES
from .shared import DEAD, LOCK, PLUGIN_VERSION, SERVERS, SKY_VERSION, TOKEN, TOKEN_HEADER
from .ssh import known_hosts_file
from .task_start import ssh_login


class GpuBroker(plugins.BasePlugin):
    """Plugin class that the file of `SKYPILOT_SERVER_PLUGINS_CONFIG` names."""

    @property
    def name(self) -> str:
        return "gpubroker"

    @property
    def version(self) -> str:
        return PLUGIN_VERSION

    def install(self, extension_context: plugins.ExtensionContext) -> None:
        if sky.__version__ != SKY_VERSION:
            raise RuntimeError(f"gpubroker needs skypilot=={SKY_VERSION}, not {sky.__version__}: pip install it")
        _hold_server_lock()
        for patch in PATCHES:
            patch.apply()
        if extension_context.app is not None:
            remove_stale_launch_files(state_folder())
            _guard_http(extension_context.app)


# ------------------------------------------------------------------------------------------------------ proof of life


def _hold_server_lock() -> None:
    """Hold a shared flock on the server's file until this process ends.

    Raises RuntimeError if the server was declared dead. The file stays open on purpose: the kernel releases the lock
    when the process ends.
    """
    server = os.environ.get(LOCK)
    if not server or server in _held:
        return
    lock = os.open(state_folder() / SERVERS / server, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    if os.read(lock, len(DEAD)) == DEAD:
        raise RuntimeError(f"gpubroker: API server {server} was declared dead; nothing runs in its name")
    _held[server] = lock


_held: dict[str, int] = {}


# ----------------------------------------------------------------------------------------------------- the HTTP server


def _guard_http(app: FastAPI) -> None:
    """Require the token for each request, because every user of this host can reach the loopback port."""
    token = os.environ.get(TOKEN)

    async def require_token(request: Request, call_next: Callable[[Request], Any]) -> Any:
        if token and not hmac.compare_digest(request.headers.get(TOKEN_HEADER, ""), token):
            return JSONResponse({"detail": "this API server belongs to a gpubroker daemon"}, status_code=401)
        return await call_next(request)

    app.middleware("http")(require_token)
    app.add_api_route("/gpubroker/launching/{cluster}", _is_launching, methods=["GET"])
    app.add_api_route("/gpubroker/ssh/{cluster}", _ssh_login, methods=["GET"])


def _is_launching(cluster: str) -> dict[str, bool]:
    """Return whether a worker acts on the cluster now; the status of its request does not show this."""
    return {"launching": is_launching(state_folder(), Path(cluster).name)}


def _ssh_login(cluster: str) -> dict[str, Any]:
    """Return address and login of each machine; empty for a cluster that SkyPilot has no record of."""
    from sky import global_user_state

    login = ssh_login(global_user_state.get_handle_from_cluster_name(cluster))
    if not login:
        return {}
    pinned = known_hosts_file(state_folder(), cluster)
    known_hosts = pinned.read_text() if pinned.exists() else ""
    return login | {"key": login["key"].read_text(), "known_hosts": known_hosts}
