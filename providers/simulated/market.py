"""Offers of the simulated clouds. Prices drift as a pure function of (seed, time).

The price levels are plausible, so that quotes look realistic, but they are not current prices.
"""

import functools
import random
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from broker.domain.money import from_float
from broker.domain.offer import GIB, DiskSale, GpuAsk, Offer
from providers.simulated.config import SimulatedConfig

NAME = "simulated"
_SWING = 0.15
"""Largest relative deviation of a spot price from its row's `spot`; on-demand prices are constant."""
LARGER_DISK = DiskSale(max_bytes=2048 * GIB, usd_per_gib_hour=Decimal("0.000137"))
"""About $0.10 per GiB and month, as most clouds ask."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRow:
    """One machine type of one cloud in some regions. Prices in dollars per hour, hazard in preemptions per hour."""

    cloud: str
    regions: tuple[str, ...]
    instance_type: str
    accelerator: str
    gpus: int
    gpu_gb: float
    on_demand: str
    spot: float | None = None
    hazard: float = 0.0
    vcpus: int = 16
    ram_gib: int = 96
    quantum_s: int = 1


ROWS = (
    SimulatedRow(
        cloud="runpod", regions=("us-ks-2", "eu-ro-1"), instance_type="1x-h100-sxm", accelerator="h100-sxm",
        gpus=1, gpu_gb=85.9, on_demand="2.99", spot=1.75, hazard=0.09),
    SimulatedRow(
        cloud="runpod", regions=("us-ks-2", "eu-ro-1"), instance_type="1x-a100-sxm", accelerator="a100-80gb-sxm",
        gpus=1, gpu_gb=85.9, on_demand="1.49", spot=0.95, hazard=0.07),
    SimulatedRow(
        cloud="runpod", regions=("us-ks-2",), instance_type="1x-l40s", accelerator="l40s",
        gpus=1, gpu_gb=48.0, on_demand="0.86", spot=0.26, hazard=0.12),
    SimulatedRow(
        cloud="runpod", regions=("eu-ro-1",), instance_type="1x-rtx4090", accelerator="rtx4090",
        gpus=1, gpu_gb=24.0, on_demand="0.69", spot=0.29, hazard=0.15),
    SimulatedRow(
        cloud="lambda", regions=("us-west-1", "us-south-2"), instance_type="gpu_1x_h100_sxm5", accelerator="h100-sxm",
        gpus=1, gpu_gb=85.9, on_demand="3.29", vcpus=26, ram_gib=225, quantum_s=60),
    SimulatedRow(
        cloud="lambda", regions=("us-west-1",), instance_type="gpu_1x_a100", accelerator="a100-40gb",
        gpus=1, gpu_gb=42.9, on_demand="1.29", vcpus=30, ram_gib=200, quantum_s=60),
    SimulatedRow(
        cloud="lambda", regions=("us-south-2",), instance_type="gpu_8x_h100_sxm5", accelerator="h100-sxm",
        gpus=8, gpu_gb=85.9, on_demand="23.92", vcpus=208, ram_gib=1800, quantum_s=60),
    SimulatedRow(
        cloud="vast", regions=("eu-se", "us-tx"), instance_type="1x-rtx4090", accelerator="rtx4090",
        gpus=1, gpu_gb=24.0, on_demand="0.36", spot=0.19, hazard=0.25, ram_gib=64),
    SimulatedRow(
        cloud="vast", regions=("eu-se",), instance_type="1x-h100-sxm", accelerator="h100-sxm",
        gpus=1, gpu_gb=85.9, on_demand="1.87", spot=1.35, hazard=0.2, ram_gib=128),
    # Too small for any job: shows how a quote explains dropped offers.
    SimulatedRow(
        cloud="vast", regions=("us-tx",), instance_type="1x-l4-slice", accelerator="l4",
        gpus=1, gpu_gb=1.0, on_demand="0.04", spot=0.02, hazard=0.3, vcpus=2, ram_gib=8),
    SimulatedRow(
        cloud="aws", regions=("us-east-1", "eu-west-1"), instance_type="g6e.xlarge", accelerator="l40s",
        gpus=1, gpu_gb=48.0, on_demand="1.861", spot=0.86, hazard=0.05, vcpus=4, ram_gib=32),
    SimulatedRow(
        cloud="aws", regions=("us-east-1",), instance_type="p5.4xlarge", accelerator="h100-sxm",
        gpus=1, gpu_gb=85.9, on_demand="6.88", spot=3.93, hazard=0.04, ram_gib=256),
    SimulatedRow(
        cloud="aws", regions=("us-east-1",), instance_type="p4de.24xlarge", accelerator="a100-80gb-sxm",
        gpus=8, gpu_gb=85.9, on_demand="27.45", spot=12.6, hazard=0.11, vcpus=96, ram_gib=1152),
)  # fmt: skip


def rng(seed: int, *purpose: object) -> random.Random:
    """Return a random generator for one purpose; equal arguments give equal generators in every process.

    Draws thus depend on the seed and the purpose, never on the order of the calls.
    """
    return random.Random("/".join((str(seed), *(str(part) for part in purpose))))


@functools.lru_cache(4096)
def uniform_draw(seed: int, *purpose: object) -> float:
    """Return one draw from [0, 1) for a purpose."""
    return rng(seed, *purpose).random()


def offers(config: SimulatedConfig, ask: GpuAsk, now: datetime, *, cores: int) -> list[Offer]:
    """Return all offers that match `ask`. `cores`: CPU cores of this host, which runs the simulated machines."""
    matching = []
    for row in ROWS:
        if row.gpus < ask.min_gpus or not _is_accepted(row.accelerator, ask.accelerators):
            continue
        for region in row.regions:
            if not ask.regions or region in ask.regions:
                matching += [
                    _offer(config, row, region, spot=spot, now=now, cores=cores)
                    for spot in (False, True)
                    if not spot or row.spot is not None
                ]
    return matching


def _is_accepted(accelerator: str, names: tuple[str, ...]) -> bool:
    """Return True if the accelerator has one of the names or begins with one, as `a100-40gb` with `a100`.

    Empty `names` accept every accelerator.
    """
    return not names or any(accelerator == name or accelerator.startswith(name + "-") for name in names)


def _offer(config: SimulatedConfig, row: SimulatedRow, region: str, *, spot: bool, now: datetime, cores: int) -> Offer:
    kind = "spot" if spot else "on-demand"
    offer_id = f"{NAME}/{row.cloud}/{region}/{row.instance_type}/{kind}"
    on_demand = Decimal(row.on_demand)
    return Offer(
        id=offer_id,
        provider=NAME,
        cloud=row.cloud,
        region=region,
        instance_type=row.instance_type,
        accelerator=row.accelerator,
        gpus=row.gpus,
        gpu_memory_bytes=int(row.gpu_gb * 1e9),
        vcpus=row.vcpus,
        ram_bytes=row.ram_gib * GIB,
        disk_bytes=200 * GIB,
        larger_disk=LARGER_DISK,
        spot=spot,
        usd_per_hour=min(_spot_price(config, row, offer_id, now), on_demand) if spot else on_demand,
        on_demand_usd_per_hour=on_demand,
        billing_quantum_s=row.quantum_s,
        available=uniform_draw(config.seed, "sold out", offer_id, _bucket(config, now)) >= config.sold_out,
        preemptions_per_hour=row.hazard * config.hazard_scale if spot else None,
        emulated_on="cpu",
        emulated_vcpus=cores,
        simulated=True,
        reaches_local_files=True,
        seen_at=now,
    )


def _bucket(config: SimulatedConfig, now: datetime) -> int:
    return int(now.timestamp() // config.price_bucket_s)


def _spot_price(config: SimulatedConfig, row: SimulatedRow, offer_id: str, now: datetime) -> Decimal:
    """Return the spot price, which moves linearly from the random level of one period to that of the next.

    The price is constant within a bucket of `price_bucket_s`.
    """
    assert row.spot is not None
    at = _bucket(config, now) * config.price_bucket_s / config.price_period_s
    period, share = int(at), at % 1.0
    before, after = (uniform_draw(config.seed, "price", offer_id, period + n) for n in (0, 1))
    level = before + (after - before) * share
    return from_float(round(row.spot * (1 + _SWING * (2 * level - 1)), 4))
