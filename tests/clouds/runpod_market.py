"""RunPod's market: GPU types, and the number and prices of each in every data centre."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(kw_only=True)
class Gpu:
    """GPU type. `max_count`: largest number in one pod."""

    id: str
    name: str
    memory_gb: int
    max_count: int = 8


@dataclass(kw_only=True)
class Pool:
    """GPUs of one type in one place and tier. Prices are dollars per GPU and hour."""

    gpu: str
    country: str
    data_center: str | None
    """Data centre; None: community hosts, which are in none."""
    price: float
    floor: float | None
    """Lowest accepted bid; None: no spot here."""
    free: int = 16
    vcpus: int = 8
    """Number of vCPUs per GPU."""
    memory_gb: int = 64

    @property
    def secure(self) -> bool:
        return self.data_center is not None


GPUS = (
    Gpu(id="NVIDIA H100 80GB HBM3", name="H100 SXM", memory_gb=80),
    Gpu(id="NVIDIA H100 PCIe", name="H100 PCIe", memory_gb=80),
    Gpu(id="NVIDIA H100 NVL", name="H100 NVL", memory_gb=94),
    Gpu(id="NVIDIA A100 80GB PCIe", name="A100 PCIe", memory_gb=80),
    Gpu(id="NVIDIA A100-SXM4-80GB", name="A100 SXM", memory_gb=80),
    Gpu(id="NVIDIA L40S", name="L40S", memory_gb=48),
    Gpu(id="NVIDIA GeForce RTX 4090", name="RTX 4090", memory_gb=24),
    Gpu(id="NVIDIA RTX A6000", name="RTX A6000", memory_gb=48),
)

DATA_CENTERS: Mapping[str, str] = {
    "US-KS-2": "US", "US-TX-3": "US", "US-GA-1": "US", "EU-RO-1": "RO", "EU-SE-1": "SE", "EUR-IS-1": "IS",
    "CA-MTL-1": "CA", "AP-JP-1": "JP",
}  # fmt: skip
"""Country by data centre (SkyPilot 0.14.1, fetch_runpod.py: REGION_ZONES)."""


_POOLS = (
    ("NVIDIA H100 80GB HBM3", "US-KS-2", 2.69, 1.75, 20, 125),
    ("NVIDIA H100 80GB HBM3", "EU-SE-1", 2.79, 1.80, 20, 125),
    ("NVIDIA H100 PCIe", "CA-MTL-1", 2.39, 1.25, 16, 176),
    ("NVIDIA A100 80GB PCIe", "US-TX-3", 1.64, 0.82, 8, 117),
    ("NVIDIA A100 80GB PCIe", "EU-RO-1", 1.69, 0.85, 8, 117),
    ("NVIDIA A100-SXM4-80GB", "US-KS-2", 1.89, 0.95, 16, 117),
    ("NVIDIA L40S", "US-GA-1", 0.86, 0.26, 12, 62),
    ("NVIDIA L40S", "EU-RO-1", 0.89, None, 12, 62),
    ("NVIDIA GeForce RTX 4090", "EU-RO-1", 0.59, 0.29, 6, 41),
    ("NVIDIA GeForce RTX 4090", "EUR-IS-1", 0.61, 0.30, 6, 41),
)
"""Data centre pools, prices of early 2026: GPU, data centre, on-demand, lowest bid, vCPUs and GB of RAM per GPU."""


def runpod_market() -> list[Pool]:
    """Return the pools of both tiers: data centres, and community hosts."""
    secure = [
        Pool(
            gpu=gpu, country=DATA_CENTERS[place], data_center=place, price=price, floor=floor, vcpus=vcpus, memory_gb=gb
        )
        for gpu, place, price, floor, vcpus, gb in _POOLS
    ]
    return [
        *secure,
        Pool(gpu="NVIDIA GeForce RTX 4090", country="US", data_center=None, price=0.34, floor=0.20, memory_gb=48),
        Pool(gpu="NVIDIA RTX A6000", country="CZ", data_center=None, price=0.33, floor=0.17, memory_gb=50),
    ]
