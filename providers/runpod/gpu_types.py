"""RunPod's GPU types: SkyPilot's name and the hardware table's name by RunPod's id and by its display name.

The ids and display names were read from runpod/docs references/gpu-types.mdx on 2026-08-20.
"""

from types import MappingProxyType

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
_DISPLAY_NAMES = {
    "B200": "NVIDIA B200", "H200 SXM": "NVIDIA H200", "H100 SXM": "NVIDIA H100 80GB HBM3",
    "H100 NVL": "NVIDIA H100 NVL", "H100 PCIe": "NVIDIA H100 PCIe", "A100 SXM": "NVIDIA A100-SXM4-80GB",
    "A100 PCIe": "NVIDIA A100 80GB PCIe", "A40": "NVIDIA A40", "A30": "NVIDIA A30", "L40S": "NVIDIA L40S",
    "L40": "NVIDIA L40", "L4": "NVIDIA L4", "RTX 5090": "NVIDIA GeForce RTX 5090",
    "RTX 4090": "NVIDIA GeForce RTX 4090", "RTX 3090": "NVIDIA GeForce RTX 3090",
    "RTX 6000 Ada": "NVIDIA RTX 6000 Ada Generation", "RTX 5000 Ada": "NVIDIA RTX 5000 Ada Generation",
    "RTX A6000": "NVIDIA RTX A6000", "RTX A5000": "NVIDIA RTX A5000",
    "RTX PRO 6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}  # fmt: skip
_IDS = MappingProxyType({name.lower(): name for name in SKY_NAMES} | {k.lower(): v for k, v in _DISPLAY_NAMES.items()})
"""RunPod's id by lower-case id or display name. Only whole names match, so `RTX 4090 D` is not an RTX 4090."""


def accelerator_of(name: str) -> str:
    """Return the hardware table's name of a GPU type, the same for its id and its display name.

    An unknown type gets a plain slug, which differs from the names of all types that are sold.
    """
    if (gpu_id := _IDS.get(" ".join(name.split()).lower())) is not None:
        return accelerator(gpu_id, 80 * GB if "A100" in gpu_id else None)
    slug = accelerator(name, None)
    return f"{slug}-unknown-type" if slug in _SOLD else slug


_SOLD = frozenset(accelerator(gpu_id, 80 * GB if "A100" in gpu_id else None) for gpu_id in SKY_NAMES)
