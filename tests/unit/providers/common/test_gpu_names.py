"""One canonical name for what clouds and drivers call a GPU; look-alikes keep a name of their own."""

import pytest

from broker.domain.gpu_names import gpu_name
from broker.estimator.speed.hardware import TABLE, matches
from providers.common.gpu_names import accelerator, name_fault

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
        ("NVIDIA RTX 6000 Ada Generation", None, "rtx-6000-ada"),
        ("RTX 6000Ada", 49_140, "rtx-6000-ada"),
        ("A100 PCIE", 40_384, "a100-40gb-pcie"),
        ("A100-SXM-64GB", None, "a100-64gb"),
        ("B200 (SXM6)", None, "b200"),
        ("A10 (24 GB PCIe)", None, "a10"),
    ],
)
def test_provider_gpu_names_map_to_canonical_names(spelt: str, mib: int | None, name: str) -> None:
    assert accelerator(spelt, mib and mib * MIB) == name


@pytest.mark.parametrize(
    "other",
    [
        "A100X", "A30X", "A800 PCIE", "A40", "A16", "RTX A1000", "NVIDIA RTX A1000 6GB Laptop GPU", "RTX 4090 D",
        "RTX 4090D", "RTX 4090 Ti", "L40G", "L20", "H20", "H800", "GH200 SXM", "GB200", "RTX A6000 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "GRID A100-40C", "NVIDIA L40S-48Q",
        "NVIDIA A10G-24Q", "A10", "A10M", "Quadro RTX 6000", "RTX 6000 Ada", "MI300X", "NVIDIA A100 80GB PCIe LC",
    ],
)  # fmt: skip
def test_look_alikes_match_no_gpu_of_the_hardware_table(other: str) -> None:
    assert accelerator(other, None) not in TABLE
    assert accelerator(other, 80 * 10**9) not in TABLE


@pytest.mark.parametrize(
    ("gpu_id", "display"),
    [
        ("NVIDIA GeForce RTX 5090", "RTX 5090"), ("NVIDIA GeForce RTX 3090", "RTX 3090"), ("NVIDIA A40", "A40"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("NVIDIA RTX 5000 Ada Generation", "RTX 5000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"), ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA RTX 4000 Ada Generation", "RTX 4000 Ada"), ("NVIDIA H200", "H200 SXM"), ("Tesla T4", "T4"),
        ("NVIDIA RTX 2000 Ada Generation", "RTX 2000 Ada"), ("NVIDIA H100 80GB HBM3", "H100 SXM"),
    ],
)  # fmt: skip
def test_id_and_display_name_are_one_gpu(gpu_id: str, display: str) -> None:
    assert accelerator(gpu_id, None) == accelerator(display, None)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3", "H100 PCIe", "H100 NVL", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "A100 80GB PCIe",
        "A100-SXM4-40GB", "A100-PCIE-40GB", "NVIDIA B200", "L40S", "RTX 4090", "NVIDIA RTX A6000", "A10G", "NVIDIA L4",
    ],
)  # fmt: skip
def test_a_users_name_matches_the_clouds_name(name: str) -> None:
    assert accelerator(name, None) in TABLE
    assert matches(gpu_name(name), accelerator(name, None))
    assert name_fault(name) is None
