"""One canonical name for what clouds and drivers call a GPU; look-alikes keep a name of their own."""

import pytest

from providers.common.gpu_names import accelerator

MIB = 1024**2


@pytest.mark.parametrize(
    ("spelt", "mib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", None, "h100-sxm"),
        ("NVIDIA H100 PCIe", None, "h100-pcie"),
        ("NVIDIA H100 NVL", None, "h100-nvl"),
        ("H100 SXM", 81_559, "h100-sxm"),
        ("NVIDIA H200", None, "h200-sxm"),
        ("H200 NVL", 143_771, "h200-nvl"),
        ("GH200 SXM", 97_871, "gh200-sxm"),
        ("NVIDIA B200", None, "b200"),
        ("GB200", None, "gb200"),
        ("NVIDIA A100 80GB PCIe", None, "a100-80gb-pcie"),
        ("NVIDIA A100-SXM4-80GB", None, "a100-80gb-sxm"),
        ("A100 SXM4", 40_960, "a100-40gb"),
        ("A100 SXM4", 81_920, "a100-80gb-sxm"),
        ("A100 PCIE", 81_920, "a100-80gb-pcie"),
        ("NVIDIA L40S", None, "l40s"),
        ("NVIDIA L40", None, "l40"),
        ("NVIDIA L4", None, "l4"),
        ("NVIDIA GeForce RTX 4090", None, "rtx4090"),
        ("RTX 4090", 49_140, "rtx4090"),
        ("RTX 4090D", 24_564, "rtx-4090d"),
        ("RTX 4090 D", 24_564, "rtx-4090-d"),
        ("RTX 4090 Laptop GPU", 16_376, "rtx-4090-laptop-gpu"),
        ("NVIDIA RTX A6000", None, "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", None, "rtx-6000-ada-generation"),
    ],
)
def test_provider_gpu_names_map_to_canonical_names(spelt: str, mib: int | None, name: str) -> None:
    assert accelerator(spelt, mib and mib * MIB) == name
