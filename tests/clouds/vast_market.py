"""Offers of Vast's hosts: each row is one machine, sold once."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.clouds.bill import MONTH_H

GPUS: Mapping[str, tuple[int, float, float, str]] = {
    "H100 SXM": (81559, 1.93, 0.95, "nvlink"),
    "H100 PCIE": (81559, 1.75, 0.90, ""),
    "H100 NVL": (95830, 1.85, 0.92, ""),
    "A100 SXM4": (81920, 0.87, 0.45, "nvlink"),
    "A100 PCIE": (40960, 0.55, 0.28, ""),
    "L40S": (46068, 0.60, 0.31, ""),
    "RTX 4090": (24564, 0.40, 0.18, ""),
    "RTX 4090 48GB": (49140, 0.62, 0.30, ""),
}
"""MB of one GPU as nvidia-smi counts them, dollars on demand, floor of bids, link; sold under its first words."""
COUNTRIES = (
    "Germany, DE",
    "Sweden, SE",
    "Texas, US",
    "Oregon, US",
    "Quebec, CA",
    "Japan, JP",
    "Poland, PL",
    "Norway, NO",
)


@dataclass(kw_only=True)
class VastOffer:
    """Machine for rent. Prices are dollars an hour for the whole machine; sizes have the API's units."""

    id: int
    gpu: str
    gpu_ram_mb: int
    gpus: int = 1
    dph_base: float
    min_bid: float
    storage_cost: float = 0.15
    """Dollars for a GB and month."""
    cpus: float = 32.0
    cpu_ram_mb: int = 128 * 1024
    disk_gb: float = 500.0
    place: str | None = "Germany, DE"
    datacenter: bool = True
    reliability: float = 0.995
    verified: bool = True
    cuda: float = 12.8
    nvlink: float = 0.0
    rented: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields that override the true ones, for rows that cannot be true."""

    def shown(self, *, bid: bool, allocated_gb: float) -> dict[str, Any]:
        """Return the row of an answer, priced with so much disk."""
        base = self.min_bid if bid else self.dph_base
        disk = storage_usd_per_hour(self.storage_cost, allocated_gb)
        row = {
            "id": self.id, "ask_contract_id": self.id, "machine_id": self.id // 10, "host_id": self.id // 100,
            "bundle_id": self.id, "num_gpus": self.gpus, "gpu_name": self.gpu, "gpu_ram": self.gpu_ram_mb,
            "gpu_total_ram": self.gpu_ram_mb * self.gpus, "gpu_frac": 1.0, "gpu_arch": "nvidia", "gpu_mem_bw": 1000.0,
            "compute_cap": 890, "cuda_max_good": self.cuda, "driver_version": "570.86.15", "bw_nvlink": self.nvlink,
            "cpu_name": "AMD EPYC 9354", "cpu_arch": "amd64", "cpu_cores": int(self.cpus) * 2,
            "cpu_cores_effective": self.cpus, "cpu_ram": self.cpu_ram_mb, "disk_space": self.disk_gb,
            "disk_bw": 3000.0, "inet_up": 800.0, "inet_down": 900.0, "inet_up_cost": 0.005, "inet_down_cost": 0.005,
            "direct_port_count": 50, "pcie_bw": 24.0, "dph_base": base, "dph_total": base + disk,
            "min_bid": self.min_bid, "score": round(100 * self.reliability / max(base, 0.01), 3),
            "storage_cost": self.storage_cost, "storage_total_cost": disk, "dlperf": 100.0,
            "rentable": not self.rented, "rented": self.rented, "is_bid": bid, "external": None,
            "hosting_type": int(self.datacenter), "public_ipaddr": "127.0.0.1", "geolocation": self.place,
            "reliability": self.reliability, "reliability2": self.reliability,
            "verification": "verified" if self.verified else "unverified", "static_ip": True, "duration": 2.6e6,
            "end_date": None, "search": {"gpuCostPerHour": base, "diskHour": disk, "totalHour": base + disk},
        }  # fmt: skip
        return row | self.extra


def storage_usd_per_hour(usd_per_gb_month: float, gb: float) -> float:
    return usd_per_gb_month * gb / float(MONTH_H)


def _row(offer_id: int, kind: str, **changes: Any) -> VastOffer:
    ram, price, bid, link = GPUS[kind]
    gpus = int(changes.get("gpus", 1))
    values: dict[str, Any] = {
        "id": offer_id, "gpu": kind.removesuffix(" 48GB"), "gpu_ram_mb": ram, "dph_base": round(price * gpus, 4),
        "min_bid": round(bid * gpus, 4), "nvlink": 450.0 if link else 0.0,
    }  # fmt: skip
    return VastOffer(**values | changes)


def vast_market() -> list[VastOffer]:
    """Return a small market with every GPU, two tiers of host, and prices of early 2026."""
    return [
        _row(70010, "RTX 4090"),
        _row(70020, "RTX 4090", dph_base=0.37, min_bid=0.16, datacenter=False, reliability=0.97, place="Poland, PL"),
        _row(70030, "RTX 4090", gpus=4, cpus=64.0, cpu_ram_mb=512 * 1024, place="Texas, US"),
        _row(70040, "RTX 4090 48GB", datacenter=False, place="Quebec, CA"),
        _row(70050, "L40S", place="Sweden, SE"),
        _row(70060, "A100 SXM4", place="Norway, NO"),
        _row(70070, "A100 SXM4", gpus=8, cpus=192.0, cpu_ram_mb=2048 * 1024, disk_gb=8000.0, place="Oregon, US"),
        _row(70080, "A100 PCIE", place="Japan, JP"),
        _row(70090, "H100 SXM", place="Norway, NO"),
        _row(70100, "H100 PCIE", place="Germany, DE"),
        _row(70110, "H100 NVL", datacenter=False, place="Texas, US"),
    ]


def impossible_rows() -> list[VastOffer]:
    """Return rows that cannot be true, as real markets sometimes list them."""
    return [
        _row(79010, "RTX 4090", dph_base=0.0, min_bid=0.0),
        _row(79020, "L40S", min_bid=0.90),
        _row(79030, "H100 SXM", gpu_ram_mb=80),
        _row(79040, "RTX 4090", gpu_ram_mb=24564 * 1024),
        _row(79050, "A100 SXM4", gpus=0, dph_base=0.5, min_bid=0.2),
        _row(79060, "RTX 4090", extra={"gpu_name": "MI300X", "gpu_arch": "amd"}),
        _row(79070, "A100 PCIE", extra={"cpu_arch": "arm64"}),
        _row(79080, "A100 SXM4", extra={"gpu_name": "A100 SXM4 MIG 3g.20gb", "gpu_ram": 19968}),
        _row(79090, "RTX 4090", extra={"gpu_name": "RTX 4090 Laptop", "gpu_ram": 16376}),
        _row(79100, "RTX 4090", extra={"duration": 180.0}),
    ]


def many_offers(count: int, *, seed: int = 1) -> list[VastOffer]:
    """Return a market of any size, the same for the same seed."""
    chance = random.Random(seed)
    kinds = list(GPUS)
    rows = []
    for n in range(count):
        kind, gpus, gb = chance.choice(kinds), chance.choice((1, 1, 1, 2, 4, 8)), chance.choice((64, 96, 128))
        price = round(GPUS[kind][1] * gpus * chance.uniform(0.8, 1.6), 4)
        rows.append(
            _row(
                100_000 + 10 * n, kind, gpus=gpus, dph_base=price, min_bid=round(price * chance.uniform(0.35, 0.7), 4),
                cpus=float(chance.choice((16, 32, 48, 64)) * gpus), cpu_ram_mb=gb * 1024 * gpus,
                disk_gb=float(chance.randrange(50, 4000)), place=chance.choice(COUNTRIES),
                datacenter=chance.random() < 0.4, reliability=round(chance.uniform(0.9, 0.9999), 4),
                verified=chance.random() < 0.8, cuda=chance.choice((12.2, 12.4, 12.8, 13.0)),
            )
        )  # fmt: skip
    return rows
