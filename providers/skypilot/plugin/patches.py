"""What our plugin changes in SkyPilot, each change one row of `PATCHES`.

Account keys never reach a machine, a purchase is the one that was quoted, and what a launch does can be proven from
outside. A SkyPilot that is not exactly the one they were written for is refused.
"""

import importlib
import inspect
import io
import json
import os
from collections.abc import Callable
from typing import Any

import pandas
from sky import exceptions
from sky.utils import annotations, registry, status_lib

from providers.skypilot.plugin import aws_patches as sky_aws
from providers.skypilot.plugin import fresh_keys as sky_keys
from providers.skypilot.plugin import task_start as sky_start
from providers.skypilot.plugin.patch import Patch, Replacement, pin, private, state_folder
from providers.skypilot.server_locks import launch_lock
from providers.skypilot.shared import ANYWHERE, CLOUDS, NOTHING, ROWS

# -------------------------------------------------------------------------------------------------------- one launch


def _launch_under_lock(original: Replacement) -> Replacement:
    """Holds the name's lock, and says why a cloud refused where SkyPilot says only that nothing was left to try."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        cluster = kwargs.get("cluster_name")
        if cluster is None:
            return original(*args, **kwargs)
        _causes.clear()
        _asked.clear()
        with launch_lock(state_folder(), cluster):
            try:
                return original(*args, **kwargs)
            except exceptions.ResourcesUnavailableError as e:
                if _causes:
                    e.args = ("; ".join(dict.fromkeys(_causes)), *e.args[1:])
                raise
            except Exception as e:
                if _asked:
                    raise
                raise RuntimeError(f"{NOTHING}{type(e).__name__}: {e}") from e

    return launch


_causes: list[str] = []
_asked: list[str] = []
"""What clouds said, and what they were asked for, in the launch under way: a worker carries out one at a time."""


def _counted(original: Replacement) -> Replacement:
    """Before this, nothing is created; after it, only the task is left to be started."""

    def run_instances(provider_name: str, *args: Any, **kwargs: Any) -> Any:
        _asked.append(provider_name)
        return sky_start.ready(original(provider_name, *args, **kwargs))

    return run_instances


def _remembered(original: Replacement) -> Replacement:
    """SkyPilot tells this function alone what a cloud said."""

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
    """Machines get no credential file of any cloud, and with them goes SkyPilot's own SSH key of all machines."""

    def get_cloud_credential_file_mounts(*args: Any, **kwargs: Any) -> dict[str, str]:
        return {}

    return get_cloud_credential_file_mounts


# ------------------------------------------------------------------------------------------------------------- RunPod


def _anywhere(original: Replacement) -> Replacement:
    """A catalog needs a zone, which SkyPilot takes for the data centre; community hosts have none."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "zone": None if kwargs["zone"] == ANYWHERE else kwargs["zone"]})

    return launch


# --------------------------------------------------------------------------------------------------------------- Vast


class _GuardedVast:
    """Vast's SDK as SkyPilot uses it, buying the ask that was quoted and writing no key to the machine."""

    def __init__(self, sdk: Any) -> None:
        self._sdk = sdk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sdk, name)

    def search_offers(self, **kwargs: Any) -> Any:
        """The ask itself, where SkyPilot would buy the first that it finds; whether it stands is said at the sale."""
        ask = pin().get("ask")
        return self._sdk.search_offers(**kwargs) if ask is None else [{"id": int(ask)}]

    def create_instance(self, **kwargs: Any) -> Any:
        key = self._sdk.client.api_key
        kwargs["onstart_cmd"] = kwargs.get("onstart_cmd", "").replace(f'echo "{key}" > ~/.vast_api_key;', "")
        kwargs["cancel_unavail"] = True  # else a machine that is taken meanwhile is ours all the same, stopped
        if key in json.dumps(kwargs, default=str):
            raise RuntimeError("gpubroker: the account key would have reached the machine; nothing was created")
        return self._sdk.create_instance(**kwargs)


def _guarded_vast(original: Replacement) -> Replacement:
    def vast() -> Any:
        sdk = original()
        if getattr(sdk, "client", None) is None:
            raise RuntimeError("gpubroker: SkyPilot's Vast needs vastai-sdk 1.0 or newer: pip install 'vastai-sdk>=1'")
        return _GuardedVast(sdk)

    return vast


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
    """Reads a catalog again at the first use in each request: RunPod's bid is what stands there.

    A team's server has catalogs of its own; there the purchase's rows come with the request and go before them.
    """

    @annotations.lru_cache(scope="request")
    def _load_df(self: Any) -> Any:
        self._df = None
        frame = inspect.unwrap(original)(self)
        given = [rows for file, rows in json.loads(os.environ.get(ROWS, "{}")).items() if self._filename.endswith(file)]
        if not given:
            return frame
        mine = pandas.read_csv(io.StringIO(pandas.DataFrame(given[0]).to_csv(index=False)))
        same = frame["InstanceType"].isin(mine["InstanceType"]) & frame["Region"].isin(mine["Region"])
        return pandas.concat([mine, frame[~same]], ignore_index=True)

    return _load_df  # type: ignore[no-any-return]


def _fresh_aws(original: Replacement) -> Replacement:
    """AWS's frame, mapped to the account's zones, is kept in a variable of its own."""

    def clear_request_level_cache() -> None:
        setattr(importlib.import_module("sky.catalog.aws_catalog"), "_user_df", None)  # noqa: B010
        original()

    return clear_request_level_cache


# ---------------------------------------------------------------------------------------------- a server of one daemon


def _no_doubt(original: Replacement) -> Replacement:
    """All our clouds are in use: what is bought was listed with the same key a moment ago, and SkyPilot's own check,
    made once and cached, would leave out for good a cloud that did not answer then.
    """

    def get_cached_enabled_clouds_or_refresh(*args: Any, **kwargs: Any) -> Any:
        if not private():
            return original(*args, **kwargs)
        return [registry.CLOUD_REGISTRY.from_str(cloud) for cloud in CLOUDS]

    return get_cached_enabled_clouds_or_refresh


def _no_check(original: Replacement) -> Replacement:
    """A server asks every cloud when it starts."""

    def check(*args: Any, **kwargs: Any) -> Any:
        return {} if private() else original(*args, **kwargs)

    return check


def _no_daemons(original: Any) -> Any:
    """Watching machines is the native half's part; each of these costs a process of 170 MB."""
    return [] if private() else original


# ---------------------------------------------------------------------------------------------------------- endpoints


def _endpoint(variable: str, path: str) -> Callable[[str], str]:
    """A cloud's address, moved by a variable: for tests and for proxies."""
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
    Patch("sky.provision", "run_instances", "provider_name region cluster_name cluster_name_on_cloud config", _counted),
    Patch(
        "sky.backends.cloud_vm_ray_backend", "FailoverCloudErrorHandlerV2.update_blocklist_on_error",
        "blocked_resources launchable_resources region zones error", _remembered,
    ),
    Patch(
        "sky.backends.cloud_vm_ray_backend", "CloudVmRayBackend._execute", "self handle task dryrun",
        sky_start.started_by_us,
    ),
    Patch("sky.backends.wheel_utils", "build_sky_wheel", "", sky_start.no_wheel),
    Patch("sky.provision.runpod.instance", "POLL_INTERVAL", None, lambda _: sky_start.POLL_S["runpod"]),
    Patch("sky.provision.vast.instance", "POLL_INTERVAL", None, lambda _: sky_start.POLL_S["vast"]),
    Patch("sky.check", "get_cloud_credential_file_mounts", "excluded_clouds", _no_credentials),
    Patch("sky.provision.aws.config", "_configure_iam_role", "iam", sky_aws.no_instance_role),
    Patch("sky.provision.aws", "bootstrap_instances", "region cluster_name config", sky_aws.machine_as_bought),
    Patch("sky.adaptors.vast", "vast", "", _guarded_vast),
    Patch("sky.provision.runpod.utils", "launch", _POD, _anywhere),
    Patch("sky.provision.vast.instance", "_filter_instances", _FILTER, _vast[1]),
    Patch("sky.provision.runpod.instance", "_filter_instances", _FILTER, _runpod[1]),
    Patch("sky.provision.vast", "query_instances", _QUERY, _vast[0]),
    Patch("sky.provision.runpod", "query_instances", _QUERY, _runpod[0]),
    Patch(
        "sky.server.requests.executor", "override_request_env_and_config", "request_body request_id request_name",
        sky_keys.fresh_keys,
    ),
    Patch("sky.catalog.common", "LazyDataFrame._load_df", "self", _fresh_frame),
    Patch("sky.utils.annotations", "clear_request_level_cache", "", _fresh_aws),
    Patch(
        "sky.check", "get_cached_enabled_clouds_or_refresh", "capability raise_if_no_cloud_access", _no_doubt,
    ),
    Patch("sky.check", "check", None, _no_check),
    Patch("sky.server.daemons", "INTERNAL_REQUEST_DAEMONS", None, _no_daemons),
    Patch(
        "sky.provision.lambda_cloud.lambda_utils", "API_ENDPOINT", None,
        _endpoint("GPUBROKER_LAMBDA_ENDPOINT", "/api/v1"),
    ),
)  # fmt: skip
