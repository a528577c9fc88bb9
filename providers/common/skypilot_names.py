"""Names in SkyPilot: its clusters, and the columns of its catalogs."""

import re
from collections.abc import Mapping

from broker.domain.ids import ID_LENGTH, Installation, InstanceName, attempt_of, name_prefix
from broker.domain.offer import GIB, Offer

_MIB = 1024**2
_SUFFIX = re.compile(r"(-[0-9a-f]{8}(-(head|worker))?)?")
"""`-<user hash>` and the node, as SkyPilot's `make_cluster_name_on_cloud` and its clouds add them.

A user's copy of a machine has another suffix, so the broker ignores the copy.
"""
_GPUS = {
    "h100-sxm": "H100-SXM", "h100-pcie": "H100", "h100-nvl": "H100-NVL", "h200-sxm": "H200-SXM", "b200": "B200",
    "a100-80gb-sxm": "A100-80GB-SXM", "a100-80gb-pcie": "A100-80GB", "a100-40gb": "A100", "a100-40gb-pcie": "A100",
    "l40s": "L40S", "rtx4090": "RTX4090", "a6000": "RTXA6000", "a10g": "A10G", "l4": "L4",
}  # fmt: skip


def cluster_of(installation: Installation, label: str | None) -> InstanceName | None:
    """Return the instance name in SkyPilot's `<name>-<user hash>[-head|-worker]`, or None for another installation."""
    length = len(name_prefix(installation)) + ID_LENGTH
    name, suffix = (label or "")[:length], (label or "")[length:]
    if attempt_of(installation, name) is None or not _SUFFIX.fullmatch(suffix):
        return None
    return InstanceName(name)


def gpu_columns(offer: Offer) -> Mapping[str, str]:
    """Return an offer's machine in the columns that all catalogs of SkyPilot share."""
    name = _GPUS.get(offer.accelerator, offer.accelerator.upper())
    mib = offer.gpu_memory_bytes // _MIB
    gpu = {"Name": name, "Manufacturer": "NVIDIA", "Count": offer.gpus, "MemoryInfo": {"SizeInMiB": mib}}
    return {
        "AcceleratorName": name,
        "AcceleratorCount": f"{offer.gpus}.0",
        "vCPUs": f"{offer.vcpus}.0",
        "MemoryGiB": f"{offer.ram_bytes / GIB:g}",
        "GpuInfo": str({"Gpus": [gpu], "TotalGpuMemoryInMiB": mib * offer.gpus}),
    }
