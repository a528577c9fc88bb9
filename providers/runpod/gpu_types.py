"""RunPod's GPU types: SkyPilot's name by RunPod's id, and the hardware table's name by id or display name.

The ids were read from runpod/docs references/gpu-types.mdx on 2026-08-20.
"""

import re

from providers.common.gpu_names import GB, accelerator

SKY_NAMES = {
    "NVIDIA B200": "B200", "NVIDIA H200": "H200-SXM", "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA H100 NVL": "H100-NVL", "NVIDIA H100 PCIe": "H100", "NVIDIA A100-SXM4-80GB": "A100-80GB-SXM",
    "NVIDIA A100 80GB PCIe": "A100-80GB", "NVIDIA A40": "A40", "NVIDIA A30": "A30", "NVIDIA L40S": "L40S",
    "NVIDIA L40": "L40", "NVIDIA L4": "L4", "NVIDIA GeForce RTX 5090": "RTX5090", "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 3090": "RTX3090", "NVIDIA RTX 6000 Ada Generation": "RTX6000-Ada",
    "NVIDIA RTX 5000 Ada Generation": "RTX5000-Ada", "NVIDIA RTX A6000": "RTXA6000", "NVIDIA RTX A5000": "RTXA5000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTXPRO6000",
}  # fmt: skip
"""SkyPilot's name (`provision/runpod/utils.py`) by RunPod's id of a GPU type. SkyPilot cannot buy other types."""


def accelerator_of(name: str) -> str:
    """Return the hardware table's name of a GPU type, the same for its id and its display name.

    RunPod sells only A100s of 80 GB, and its display names (`A100 SXM`) omit the memory. A size in a name counts.
    """
    has_no_size = re.search(r"\d ?GB\b", name, re.I) is None
    return accelerator(name, 80 * GB if has_no_size and re.search(r"\bA100\b", name, re.I) else None)


def interconnect(name: str, gpus: int) -> str | None:
    """Return the link between the GPUs of a pod; None: a single GPU has none."""
    if gpus < 2:
        return None
    return "nvlink" if "sxm" in name or name == "b200" else "pcie"
