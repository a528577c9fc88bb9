"""gpubroker's part inside SkyPilot's API server, loaded through its plugin door into every one of its processes.

Account keys never reach a machine, a purchase is the one that was quoted, and what a launch does can be proven from
outside. Everything is one row of `PATCHES`; a SkyPilot that is not exactly the one they were written for is refused.
"""

import fcntl
import functools
import hmac
import importlib
import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sky
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from sky.server import plugins
from sky.utils import annotations, status_lib

from providers.sky_facts import (
    ASK,
    DEAD,
    LAUNCHING,
    LOCK,
    PLUGIN_VERSION,
    SERVERS,
    SKY_VERSION,
    STATE,
    TOKEN,
    TOKEN_HEADER,
)

Replacement = Callable[..., Any]


class GpuBroker(plugins.BasePlugin):
    """The class that `SKYPILOT_SERVER_PLUGINS_CONFIG` names."""

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
            _guard_door(extension_context.app)


class Patch:
    """One attribute of SkyPilot, replaced by what `make` returns for the original; twice is once."""

    def __init__(self, module: str, attribute: str, parameters: str | None, make: Callable[[Any], Any]) -> None:
        """`parameters`: names that the original must have, in order; None for a plain value."""
        self.module, self.attribute, self._parameters, self._make = module, attribute, parameters, make

    def apply(self) -> None:
        """Raises RuntimeError with one line when SkyPilot is not what the patch was written for."""
        path = self.attribute.split(".")
        holder: Any = importlib.import_module(self.module)
        for part in path[:-1]:
            holder = getattr(holder, part, None)
        original = getattr(holder, path[-1], None)
        if getattr(original, "gpubroker", False):
            return
        if original is None:
            raise RuntimeError(
                f"gpubroker: {self.module}.{self.attribute} is not in this SkyPilot: install {SKY_VERSION}"
            )
        if self._parameters is not None:
            found = " ".join(inspect.signature(original).parameters)
            if found != self._parameters:
                raise RuntimeError(
                    f"gpubroker: {self.module}.{self.attribute}({found}) is not SkyPilot {SKY_VERSION}'s"
                )
        replacement = self._make(original)
        if callable(replacement):
            functools.update_wrapper(replacement, original)
            replacement.gpubroker = True
        setattr(holder, path[-1], replacement)


# ------------------------------------------------------------------------------------------------------ proof of life


def _hold_server_lock() -> None:
    """A shared flock on the server's file until this process ends; a server that was declared dead does not begin.

    It is left open on purpose: the kernel lets go of it with the process.
    """
    server = os.environ.get(LOCK)
    if not server or server in _held:
        return
    lock = os.open(_state() / SERVERS / server, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    if os.read(lock, len(DEAD)) == DEAD:
        raise RuntimeError(f"gpubroker: API server {server} was declared dead; nothing runs in its name")
    _held[server] = lock


_held: dict[str, int] = {}


def _state() -> Path:
    return Path(os.environ.get(STATE) or "~/.sky/gpubroker").expanduser()


@contextmanager
def _launching(cluster: str) -> Iterator[None]:
    """A shared flock on the cluster's name while a worker acts on it, which a request's status does not tell:
    a cancelled one is marked before its worker has stopped."""
    folder = _state() / LAUNCHING
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / cluster).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def _launch_under_lock(original: Replacement) -> Replacement:
    """Holds the name's lock, and tells all causes of a failure where SkyPilot tells only that there was none left."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        cluster = kwargs.get("cluster_name")
        if cluster is None:
            return original(*args, **kwargs)
        with _launching(cluster):
            try:
                return original(*args, **kwargs)
            except sky.exceptions.ResourcesUnavailableError as e:
                causes = "; ".join(f"{type(cause).__name__}: {cause}" for cause in e.failover_history)
                e.args = (f"{e} [causes: {causes}]", *e.args[1:])
                raise

    return launch


# ------------------------------------------------------------------------------------------------------- account keys


def _no_credentials(original: Replacement) -> Replacement:
    """Machines get no credential file of any cloud, and with them goes SkyPilot's own SSH key of all machines."""

    def get_cloud_credential_file_mounts(*args: Any, **kwargs: Any) -> dict[str, str]:
        return {}

    return get_cloud_credential_file_mounts


def _no_instance_role(original: Replacement) -> Replacement:
    """SkyPilot would create and attach a role with all rights on EC2 and S3, which anybody on the machine can use."""

    def _configure_iam_role(iam: Any) -> dict[str, str]:
        return {}

    return _configure_iam_role


def _plain_aws_machine(original: Replacement) -> Replacement:
    """No role where we asked for none, and a machine that shuts down is gone."""

    def bootstrap_instances(*args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        if not config.node_config.get("IamInstanceProfile"):
            config.node_config.pop("IamInstanceProfile", None)
        config.node_config["InstanceInitiatedShutdownBehavior"] = "terminate"
        return config

    return bootstrap_instances


# --------------------------------------------------------------------------------------------------------------- Vast


class _GuardedVast:
    """Vast's SDK as SkyPilot uses it, buying the ask that was quoted and writing no key to the machine."""

    def __init__(self, sdk: Any, ask: str | None = None) -> None:
        self._sdk, self._ask = sdk, ask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sdk, name)

    def search_offers(self, **kwargs: Any) -> Any:
        """The ask itself: whether it still stands is what the create call answers."""
        return self._sdk.search_offers(**kwargs) if self._ask is None else [{"id": int(self._ask)}]

    def create_instance(self, **kwargs: Any) -> Any:
        key = self._sdk.client.api_key
        kwargs["onstart_cmd"] = kwargs.get("onstart_cmd", "").replace(f'echo "{key}" > ~/.vast_api_key;', "")
        if self._ask is not None:
            kwargs["cancel_unavail"] = True
        if key in json.dumps(kwargs, default=str):
            raise RuntimeError("gpubroker: the account key would have reached the machine; nothing was created")
        return self._sdk.create_instance(**kwargs)


def _guarded_vast(original: Replacement) -> Replacement:
    def vast() -> Any:
        sdk = original()
        if getattr(sdk, "client", None) is None:
            raise RuntimeError("gpubroker: SkyPilot's Vast needs vastai-sdk 1.0 or newer: pip install 'vastai-sdk>=1'")
        return _GuardedVast(sdk, _ask[-1] if _ask else None)

    return vast


_ask: list[str] = []
"""The ask of the launch under way in this process; a worker carries out one at a time."""


def _pinned_launch(original: Replacement) -> Replacement:
    """Takes the ask out of the creation's arguments; without one SkyPilot would buy the first that it finds."""

    def launch(*args: Any, create_instance_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        wanted = dict(create_instance_kwargs or {})
        ask = wanted.pop(ASK, None)
        if ask is None:
            return original(*args, create_instance_kwargs=wanted, **kwargs)
        _ask.append(str(ask))
        try:
            return original(*args, create_instance_kwargs=wanted, **kwargs)
        finally:
            _ask.pop()

    return launch


# ------------------------------------------------------------------------------------------- states SkyPilot knows not


def _known_states(
    cloud: str, known: dict[str, Any], gone: frozenset[str]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(query_instances that knows no unknown state, _filter_instances that does not wait for what has ended)."""

    def querying(original: Replacement) -> Replacement:
        def query_instances(
            cluster_name: str,
            cluster_name_on_cloud: str,
            provider_config: dict[str, Any] | None = None,
            non_terminated_only: bool = True,
            retry_if_missing: bool = False,
        ) -> dict[str, tuple[Any, str | None]]:
            listed = importlib.import_module(f"sky.provision.{cloud}.instance")
            instances = listed._filter_instances(cluster_name_on_cloud, None)
            return {i: (known.get(one["status"], status_lib.ClusterStatus.INIT), None) for i, one in instances.items()}

        return query_instances

    def filtering(original: Replacement) -> Replacement:
        def _filter_instances(
            cluster_name_on_cloud: str, status_filters: list[str] | None, head_only: bool = False
        ) -> dict[str, Any]:
            if status_filters == ["RUNNING"]:
                for one in original(cluster_name_on_cloud, sorted(gone), head_only).values():
                    raise RuntimeError(f"gpubroker: {one['name']} is {one['status']} before it was ready")
            found: dict[str, Any] = original(cluster_name_on_cloud, status_filters, head_only)
            return found

        return _filter_instances

    return querying, filtering


_INIT, _UP, _STOPPED = status_lib.ClusterStatus.INIT, status_lib.ClusterStatus.UP, status_lib.ClusterStatus.STOPPED
_runpod = _known_states("runpod", {"RUNNING": _UP}, frozenset({"EXITED", "TERMINATED", "DEAD"}))
_vast = _known_states(
    "vast",
    {"RUNNING": _UP, "EXITED": _STOPPED, "STOPPED": _STOPPED, "OFFLINE": _STOPPED},
    frozenset({"EXITED", "STOPPED", "OFFLINE"}),
)

# ----------------------------------------------------------------------------------------------------------- catalogs


def _fresh_frame(original: Replacement) -> Replacement:
    """Reads a catalog again at the first use in each request: RunPod's bid is what stands there."""

    @annotations.lru_cache(scope="request")
    def _load_df(self: Any) -> Any:
        self._df = None
        return inspect.unwrap(original)(self)

    return _load_df  # type: ignore[no-any-return]


def _fresh_aws(original: Replacement) -> Replacement:
    """AWS's frame, mapped to the account's zones, is kept in a variable of its own."""

    def clear_request_level_cache() -> None:
        setattr(importlib.import_module("sky.catalog.aws_catalog"), "_user_df", None)  # noqa: B010
        original()

    return clear_request_level_cache


# ---------------------------------------------------------------------------------------------------------- endpoints


def _endpoint(variable: str) -> Callable[[str], str]:
    """A cloud's address, moved by a variable: for tests and for proxies."""
    return lambda original: os.environ.get(variable, original)


_FILTER = "cluster_name_on_cloud status_filters head_only"
_QUERY = "cluster_name cluster_name_on_cloud provider_config non_terminated_only retry_if_missing"

PATCHES = (
    Patch("sky.execution", "launch", None, _launch_under_lock),
    Patch("sky.check", "get_cloud_credential_file_mounts", "excluded_clouds", _no_credentials),
    Patch("sky.provision.aws.config", "_configure_iam_role", "iam", _no_instance_role),
    Patch("sky.provision.aws", "bootstrap_instances", "region cluster_name config", _plain_aws_machine),
    Patch("sky.adaptors.vast", "vast", "", _guarded_vast),
    Patch(
        "sky.provision.vast.utils", "launch",
        "name instance_type region disk_size image_name ports preemptible secure_only private_docker_registry login "
        "create_instance_kwargs ssh_public_key", _pinned_launch,
    ),
    Patch("sky.provision.vast.instance", "_filter_instances", _FILTER, _vast[1]),
    Patch("sky.provision.runpod.instance", "_filter_instances", _FILTER, _runpod[1]),
    Patch("sky.provision.vast", "query_instances", _QUERY, _vast[0]),
    Patch("sky.provision.runpod", "query_instances", _QUERY, _runpod[0]),
    Patch("sky.catalog.common", "LazyDataFrame._load_df", "self", _fresh_frame),
    Patch("sky.utils.annotations", "clear_request_level_cache", "", _fresh_aws),
    Patch("sky.provision.lambda_cloud.lambda_utils", "API_ENDPOINT", None, _endpoint("GPUBROKER_LAMBDA_ENDPOINT")),
    Patch("sky.adaptors.runpod", "_REST_BASE", None, _endpoint("GPUBROKER_RUNPOD_REST")),
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------- the HTTP server


def _guard_door(app: FastAPI) -> None:
    """Only who has the token gets in: the port is on loopback, but so is every user of this host."""
    token = os.environ.get(TOKEN)

    async def knock(request: Request, call_next: Callable[[Request], Any]) -> Any:
        if token and not hmac.compare_digest(request.headers.get(TOKEN_HEADER, ""), token):
            return JSONResponse({"detail": "this API server belongs to a gpubroker daemon"}, status_code=401)
        return await call_next(request)

    app.middleware("http")(knock)
    app.add_api_route("/gpubroker/launching/{cluster}", _is_launching, methods=["GET"])
    app.add_api_route("/gpubroker/ssh/{cluster}", _way_in, methods=["GET"])


def _is_launching(cluster: str) -> dict[str, bool]:
    """Whether a worker acts on the name at this moment, whatever the request's status says."""
    path = _state() / LAUNCHING / Path(cluster).name
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return {"launching": False}
    except BlockingIOError:
        return {"launching": True}
    return {"launching": False}


def _way_in(cluster: str) -> dict[str, Any]:
    """Address and login of node 0; empty for a cluster that SkyPilot has no record of."""
    from sky import global_user_state
    from sky.backends import backend_utils

    handle = global_user_state.get_handle_from_cluster_name(cluster)
    ips, ports = getattr(handle, "cached_external_ips", None), getattr(handle, "cached_external_ssh_ports", None)
    if not ips or not ports:
        return {}
    login = backend_utils.ssh_credential_from_yaml(handle.cluster_yaml, ssh_user=handle.ssh_user)
    return {
        "host": ips[0],
        "port": ports[0],
        "user": login["ssh_user"],
        "key": Path(login["ssh_private_key"]).expanduser().read_text(),
        "proxy": login["ssh_proxy_command"],
    }
