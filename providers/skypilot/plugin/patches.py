"""Changes that the plugin makes in SkyPilot, each one row of `PATCHES`.

They keep account keys off machines, buy exactly what was quoted, and make the state of a launch provable from outside.
The plugin refuses a SkyPilot other than the version for which they were written.
"""

import importlib
import inspect
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pandas
from sky import exceptions
from sky.utils import annotations, registry, status_lib

from . import aws_patches, task_start
from .launch_locks import launch_lock
from .patch import Patch, Replacement, is_private_server, pin, state_folder
from .shared import CLOUDS, COMMUNITY_ZONE, NOTHING_REQUESTED, ROWS

# -------------------------------------------------------------------------------------------------------- one launch


def _launch_under_lock(original: Replacement) -> Replacement:
    """Return `launch` under the cluster's lock, with the clouds' own errors in its exception.

    SkyPilot's own exception reports only that no option is left.
    """

    def launch(*args: Any, **kwargs: Any) -> Any:
        cluster = kwargs.get("cluster_name")
        if cluster is None:
            return original(*args, **kwargs)
        _causes.clear()
        _creates.clear()
        with launch_lock(state_folder(), cluster):
            try:
                return original(*args, **kwargs)
            except exceptions.ResourcesUnavailableError as e:
                if _causes:
                    e.args = ("; ".join(dict.fromkeys(_causes)), *e.args[1:])
                raise
            except Exception as e:
                if _creates:
                    raise
                raise RuntimeError(f"{NOTHING_REQUESTED}{type(e).__name__}: {e}") from e

    return launch


_causes: list[str] = []
"""Errors of the clouds in the current launch; a worker carries out one launch at a time."""
_creates: list[str] = []
"""Names of the clouds that were asked for machines in the current launch."""


def _records_creates(original: Replacement) -> Replacement:
    """Return `run_instances` that records the create and marks the machines as set up.

    Before this function nothing has been created; after it only the task must be started.
    """

    def run_instances(provider_name: str, *args: Any, **kwargs: Any) -> Any:
        _creates.append(provider_name)
        return task_start.without_runtime_setup(original(provider_name, *args, **kwargs))

    return run_instances


def _records_causes(original: Replacement) -> Replacement:
    """Return the function that also records the cloud's error, because SkyPilot passes it to no other function."""

    def update_blocklist_on_error(
        blocked_resources: Any, launchable_resources: Any, region: Any, zones: Any, error: Exception
    ) -> None:
        cause: BaseException | None = error
        while cause is not None:
            _causes.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__
        original(blocked_resources, launchable_resources, region, zones, error)

    return update_blocklist_on_error


# ------------------------------------------------------------------------------------------------------- account keys


def _no_credentials(original: Replacement) -> Replacement:
    """Return a function without credential files.

    No machine gets a credential file of any cloud, nor SkyPilot's SSH key for all machines.
    """

    def get_cloud_credential_file_mounts(*args: Any, **kwargs: Any) -> dict[str, str]:
        return {}

    return get_cloud_credential_file_mounts


def _fresh_keys(original: Replacement) -> Replacement:
    """Return the function that drops cached keys before each request.

    A worker serves many requests, and three clients read their keys only once. SkyPilot itself drops AWS's session
    with each request.
    """

    def override_request_env_and_config(*args: Any, **kwargs: Any) -> Any:
        if (adaptor := sys.modules.get("sky.adaptors.vast")) is not None:
            adaptor._vast_sdk = None  # type: ignore[attr-defined]
        if (runpod := sys.modules.get("runpod")) is not None:
            runpod.api_key = (runpod.get_credentials(runpod.profile) or {}).get("api_key")  # type: ignore[attr-defined]
        if (machines := sys.modules.get("sky.provision.lambda_cloud.instance")) is not None:
            machines._lambda_client = None  # type: ignore[attr-defined]
        return original(*args, **kwargs)

    return override_request_env_and_config


# ------------------------------------------------------------------------------------------------------------- RunPod


def _pod_as_bought(original: Replacement) -> Replacement:
    """Return `launch` without a data centre for community hosts, and with the purchase's CUDA versions.

    A catalog row needs a zone, and SkyPilot uses it as the data centre, but community hosts have none.
    """

    def launch(*args: Any, **kwargs: Any) -> Any:
        for module, name in (("runpod", "create_pod"), ("sky.provision.runpod.api.commands", "create_spot_pod")):
            holder = importlib.import_module(module)
            if not hasattr(getattr(holder, name), "gpubroker"):
                setattr(holder, name, _with_cuda_versions(getattr(holder, name)))
        return original(*args, **{**kwargs, "zone": None if kwargs["zone"] == COMMUNITY_ZONE else kwargs["zone"]})

    return launch


def _with_cuda_versions(original: Replacement) -> Replacement:
    """Return a GraphQL create that allows only hosts with the purchase's CUDA versions."""

    def create(*args: Any, **kwargs: Any) -> Any:
        if versions := [version for version in pin().get("cuda", "").split(",") if version]:
            kwargs["allowed_cuda_versions"] = versions
        return original(*args, **kwargs)

    create.gpubroker = True  # type: ignore[attr-defined]
    return create


def _with_cuda_floor(original: Replacement) -> Replacement:
    """Return the REST request that sets the purchase's CUDA floor in a create.

    SkyPilot 0.14.1 creates no pod by REST; its pull request 10846 does, by `POST /pods` with `gpu`.
    """

    def rest_request(method: str, path: str, json: Any = None, **kwargs: Any) -> Any:
        floor = pin().get("cuda_min")
        if (method, path) == ("POST", "/pods") and floor and isinstance(json, dict) and "gpu" in json:
            json = {**json, "gpu": {**json["gpu"], "minCudaVersion": floor}}
        return original(method, path, json, **kwargs)

    return rest_request


def _rest_base(original: str) -> str:
    """Return the address of RunPod's REST API, or of the emulator in `RUNPOD_API_BASE_URL` with the same version."""
    base = os.environ.get("RUNPOD_API_BASE_URL")
    return base.rstrip("/") + "/" + original.rpartition("/")[2] if base else original


# --------------------------------------------------------------------------------------------------------------- Vast


class _GuardedVast:
    """Vast's SDK for SkyPilot that buys the quoted ask and writes no key to the machine."""

    def __init__(self, sdk: Any) -> None:
        self._sdk = sdk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sdk, name)

    def search_offers(self, **kwargs: Any) -> Any:
        """Return the quoted ask alone, because SkyPilot buys the first result.

        The purchase fails if the ask no longer exists.
        """
        ask = pin().get("ask")
        return self._sdk.search_offers(**kwargs) if ask is None else [{"id": int(ask)}]

    def create_instance(self, **kwargs: Any) -> Any:
        key = self._sdk.client.api_key
        kwargs["onstart_cmd"] = kwargs.get("onstart_cmd", "").replace(f'echo "{key}" > ~/.vast_api_key;', "")
        # Without this option Vast creates a stopped instance if the machine is no longer free.
        kwargs["cancel_unavail"] = True
        if key in json.dumps(kwargs, default=str):
            raise RuntimeError("gpubroker: the account key would have reached the machine; nothing was created")
        return self._sdk.create_instance(**kwargs)


def _guarded_vast(original: Replacement) -> Replacement:
    def vast() -> Any:
        return _GuardedVast(original())

    return vast


# -------------------------------------------------------------------------------------------- unknown machine states


def _state_patches(
    cloud: str, known: dict[str, Any], ended: frozenset[str]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return patches for states that SkyPilot does not know.

    The first is for `query_instances`: an unknown state becomes INIT. The second is for `_filter_instances`: it raises
    for a machine that has ended instead of waiting for it.
    """

    def querying(original: Replacement) -> Replacement:
        def query_instances(
            cluster_name: str,
            cluster_name_on_cloud: str,
            provider_config: dict[str, Any] | None = None,
            non_terminated_only: bool = True,
            retry_if_missing: bool = False,
        ) -> dict[str, tuple[Any, str | None]]:
            module = importlib.import_module(f"sky.provision.{cloud}.instance")
            instances = module._filter_instances(cluster_name_on_cloud, None)
            return {
                instance_id: (known.get(instance["status"], status_lib.ClusterStatus.INIT), None)
                for instance_id, instance in instances.items()
            }

        return query_instances

    def filtering(original: Replacement) -> Replacement:
        def _filter_instances(
            cluster_name_on_cloud: str, status_filters: list[str] | None, head_only: bool = False
        ) -> dict[str, Any]:
            if status_filters == ["RUNNING"]:
                for instance in original(cluster_name_on_cloud, sorted(ended), head_only).values():
                    raise RuntimeError(f"gpubroker: {instance['name']} is {instance['status']} before it was ready")
            instances: dict[str, Any] = original(cluster_name_on_cloud, status_filters, head_only)
            return instances

        return _filter_instances

    return querying, filtering


_INIT, _UP, _STOPPED = status_lib.ClusterStatus.INIT, status_lib.ClusterStatus.UP, status_lib.ClusterStatus.STOPPED
_runpod = _state_patches("runpod", {"RUNNING": _UP}, frozenset({"EXITED", "TERMINATED", "DEAD", "ERROR"}))
_vast = _state_patches(
    "vast",
    {"RUNNING": _UP, "EXITED": _STOPPED, "STOPPED": _STOPPED, "OFFLINE": _STOPPED},
    frozenset({"EXITED", "STOPPED", "OFFLINE"}),
)

# ----------------------------------------------------------------------------------------------------------- catalogs


def _fresh_catalog(original: Replacement) -> Replacement:
    """Return `_load_df` that reads a catalog again at the first use in each request.

    RunPod's bid is the price in the catalog. A team's server has its own catalogs; there the request contains the
    purchase's rows, and they replace the catalog's rows for the same machines.
    """

    @annotations.lru_cache(scope="request")
    def _load_df(self: Any) -> Any:
        self._df = None
        frame = inspect.unwrap(original)(self)
        sent = [rows for file, rows in json.loads(os.environ.get(ROWS, "{}")).items() if self._filename.endswith(file)]
        if not sent:
            return frame
        purchase = pandas.read_csv(io.StringIO(pandas.DataFrame(sent[0]).to_csv(index=False)))
        is_replaced = frame["InstanceType"].isin(purchase["InstanceType"]) & frame["Region"].isin(purchase["Region"])
        return pandas.concat([purchase, frame[~is_replaced]], ignore_index=True)

    return _load_df  # type: ignore[no-any-return]


def _fresh_aws_catalog(original: Replacement) -> Replacement:
    """Return the function that also drops AWS's catalog, which SkyPilot caches in a separate variable."""

    def clear_request_level_cache() -> None:
        setattr(importlib.import_module("sky.catalog.aws_catalog"), "_user_df", None)  # noqa: B010
        original()

    return clear_request_level_cache


# ---------------------------------------------------------------------------------------------- a server of one daemon


def _all_clouds_enabled(original: Replacement) -> Replacement:
    """Return a function that enables all clouds on a daemon's own server.

    The broker listed each purchase with the same key a moment before. SkyPilot checks once and caches the result, so
    it would exclude for good a cloud that did not answer at that time.
    """

    def get_cached_enabled_clouds_or_refresh(*args: Any, **kwargs: Any) -> Any:
        if not is_private_server():
            return original(*args, **kwargs)
        return [registry.CLOUD_REGISTRY.from_str(cloud) for cloud in CLOUDS]

    return get_cached_enabled_clouds_or_refresh


def _no_check(original: Replacement) -> Replacement:
    """Return `check` that does nothing on a daemon's own server, because the check at its start asks every cloud."""

    def check(*args: Any, **kwargs: Any) -> Any:
        return {} if is_private_server() else original(*args, **kwargs)

    return check


def _no_daemons(original: Any) -> Any:
    """Return no background daemons on a daemon's own server.

    The broker watches the machines itself, and each background daemon is a process of 170 MB.
    """
    return [] if is_private_server() else original


# ---------------------------------------------------------------------------------------------------------- endpoints


def _endpoint(variable: str, path: str) -> Callable[[str], str]:
    """Return a function that replaces a cloud's address with the address in `variable`, for tests and proxies."""
    base = os.environ.get(variable)
    return lambda original: base.rstrip("/") + path if base else original


_FILTER = "cluster_name_on_cloud status_filters head_only"
_POD = (
    "cluster_name node_type instance_type region zone disk_size image_name ports public_key preemptible bid_per_gpu "
    "docker_login_config network_volume_id volume_mount_path"
)
_QUERY = "cluster_name cluster_name_on_cloud provider_config non_terminated_only retry_if_missing"

PATCHES = (
    Patch("sky.execution", "launch", None, _launch_under_lock),
    Patch(
        "sky.provision", "run_instances", "provider_name region cluster_name cluster_name_on_cloud config",
        _records_creates,
    ),
    Patch(
        "sky.backends.cloud_vm_ray_backend", "FailoverCloudErrorHandlerV2.update_blocklist_on_error",
        "blocked_resources launchable_resources region zones error", _records_causes,
    ),
    Patch(
        "sky.backends.cloud_vm_ray_backend", "CloudVmRayBackend._execute", "self handle task dryrun",
        task_start.started_over_ssh,
    ),
    Patch("sky.backends.wheel_utils", "build_sky_wheel", "", task_start.no_wheel),
    Patch("sky.provision.runpod.instance", "POLL_INTERVAL", None, lambda _: task_start.POLL_S["runpod"]),
    Patch("sky.provision.vast.instance", "POLL_INTERVAL", None, lambda _: task_start.POLL_S["vast"]),
    Patch("sky.check", "get_cloud_credential_file_mounts", "excluded_clouds", _no_credentials),
    Patch("sky.provision.aws.config", "_configure_iam_role", "iam", aws_patches.no_instance_role),
    Patch("sky.provision.aws", "bootstrap_instances", "region cluster_name config", aws_patches.machine_as_bought),
    Patch("sky.adaptors.vast", "vast", "", _guarded_vast),
    Patch("sky.provision.runpod.utils", "launch", _POD, _pod_as_bought),
    Patch("sky.adaptors.runpod", "rest_request", None, _with_cuda_floor),
    Patch("sky.adaptors.runpod", "_REST_BASE", None, _rest_base),
    Patch("sky.provision.vast.instance", "_filter_instances", _FILTER, _vast[1]),
    Patch("sky.provision.runpod.instance", "_filter_instances", _FILTER, _runpod[1]),
    Patch("sky.provision.vast", "query_instances", _QUERY, _vast[0]),
    Patch("sky.provision.runpod", "query_instances", _QUERY, _runpod[0]),
    Patch(
        "sky.server.requests.executor", "override_request_env_and_config", "request_body request_id request_name",
        _fresh_keys,
    ),
    Patch("sky.catalog.common", "LazyDataFrame._load_df", "self", _fresh_catalog),
    Patch("sky.utils.annotations", "clear_request_level_cache", "", _fresh_aws_catalog),
    Patch(
        "sky.check", "get_cached_enabled_clouds_or_refresh", "capability raise_if_no_cloud_access", _all_clouds_enabled,
    ),
    Patch("sky.check", "check", None, _no_check),
    Patch("sky.server.daemons", "INTERNAL_REQUEST_DAEMONS", None, _no_daemons),
    Patch(
        "sky.provision.lambda_cloud.lambda_utils", "API_ENDPOINT", None,
        _endpoint("GPUBROKER_LAMBDA_ENDPOINT", "/api/v1"),
    ),
)  # fmt: skip
