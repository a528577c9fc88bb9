"""Pods as RunPod's two APIs list them, read into `Observed`."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Handle
from broker.domain.money import usd
from providers.common.cloud_values import as_integer, positive, text
from providers.runpod.gpu_types import accelerator_of

_MACHINE = "machine { gpuTypeId gpuDisplayName }"
GRAPHQL_PODS = f"query {{ myself {{ pods {{ id name desiredStatus costPerHr gpuCount podType {_MACHINE} }} }} }}"
_STATES = {
    "PROVISIONING": InstanceState.STARTING,
    "STARTING": InstanceState.STARTING,
    "RUNNING": InstanceState.RUNNING,
    "EXITED": InstanceState.STOPPED,
    "ERROR": InstanceState.STOPPED,
    "TERMINATED": InstanceState.STOPPED,
}
"""Instance state by `status` of REST v2 (schema `PodStatus`, OpenAPI document of 2026-08-20).

An evicted or failed pod may be billed until it is terminated. A terminated pod is absent once no listing has it.
"""
_GRAPHQL_STATES = {
    "CREATED": InstanceState.STARTING,
    "RESTARTING": InstanceState.STARTING,
    "RUNNING": InstanceState.RUNNING,
    "PAUSED": InstanceState.STOPPED,
    "EXITED": InstanceState.STOPPED,
    "DEAD": InstanceState.STOPPED,
    "TERMINATED": InstanceState.STOPPED,
}
"""Instance state by GraphQL's `desiredStatus` (all values)."""
_IS_SPOT = {"INTERRUPTABLE": True, "BID": True, "BACKGROUND": True, "RESERVED": False}


def observed(handle: Handle, pod: Mapping[str, Any], *, cuda_min: str) -> Observed:
    """Return a pod of REST v2. Raises KeyError, TypeError, ValueError or ArithmeticError for an unreadable one.

    An unreadable GPU, count or price counts as not reported, because the pod exists all the same.
    `cost` is the pod's price per hour, 0 while it is stopped. Unknown: whether it contains the disk, and whether the
    pod is interruptible, because REST v2 has no field for it. `cudaVersion` is the host's; null: not reported.
    """
    gpu = pod.get("gpu")
    gpu_id, count = (text(gpu.get("id")), as_integer(gpu.get("count"))) if isinstance(gpu, dict) else (None, None)
    return Observed(
        handle=handle,
        state=_STATES.get(pod["status"], InstanceState.UNKNOWN),
        accelerator=accelerator_of(gpu_id) if gpu_id else None,
        gpus=count,
        usd_per_hour=_rate(pod.get("cost")),
        fault=_fault(pod, cuda_min),
    )


def graphql_observed(handle: Handle, pod: Mapping[str, Any]) -> Observed:
    """Return a pod of GraphQL. Raises the errors of `observed`."""
    machine = pod.get("machine")
    facts = machine if isinstance(machine, dict) else {}
    gpu = text(facts.get("gpuTypeId")) or text(facts.get("gpuDisplayName"))
    return Observed(
        handle=handle,
        state=_GRAPHQL_STATES.get(pod["desiredStatus"], InstanceState.UNKNOWN),
        accelerator=accelerator_of(gpu) if gpu else None,
        gpus=as_integer(pod.get("gpuCount")),
        spot=_IS_SPOT.get(text(pod.get("podType")) or ""),
        usd_per_hour=_rate(pod.get("costPerHr")),
    )


def _rate(value: object) -> Decimal | None:
    """Return a price per hour; None: not reported, unreadable, or 0 while the pod is stopped."""
    return None if positive(value) is None else usd(str(value).strip())


def _fault(pod: Mapping[str, Any], cuda_min: str) -> str | None:
    """Return why the pod's container will never run, if RunPod reports it."""
    if pod["status"] == "ERROR":
        return "RunPod reports ERROR: the container cannot run on this host"
    cuda = pod.get("cudaVersion")
    if is_older(cuda, cuda_min):
        return f"the host's driver runs CUDA {cuda}, older than {cuda_min}"
    return None


def is_older(cuda: object, floor: str) -> bool:
    """Return True for a readable CUDA version below the floor."""
    try:
        return version(str(cuda).strip()) < version(floor)
    except ValueError:
        return False


def version(text: str) -> tuple[int, ...]:
    """Return a version's numbers, so that 12.11 is above 12.2. Raises ValueError."""
    return tuple(int(part) for part in text.split("."))
