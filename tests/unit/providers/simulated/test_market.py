"""Prices, lifetimes and configuration of the simulated market; the names of GPUs; the registry."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from pydantic import ValidationError

from broker.blobs import ObstoreBlobs
from broker.domain.ids import Installation, InstanceName
from broker.domain.offer import GpuAsk, Offer
from providers.common.gpu_names import accelerator
from providers.local.gpus import Gpu
from providers.local.provider import LocalConfig, LocalProvider
from providers.registry import ProvidersConfig, build
from providers.simulated.config import Faults, SimulatedConfig
from providers.simulated.lifetimes import Lifetimes
from providers.simulated.market import offers
from tests.unit.providers.clocks import SteppedClock

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
OURS = Installation("aaaa")


def prices(seed: int, at: datetime) -> dict[str, Decimal]:
    config = SimulatedConfig(seed=seed)
    return {o.id: o.usd_per_hour for o in offers(config, GpuAsk(), at, cores=2)}


def test_prices_are_a_function_of_seed_and_time() -> None:
    assert prices(1, NOON) == prices(1, NOON)
    assert prices(1, NOON) == prices(1, NOON + timedelta(seconds=59))
    later, other = prices(1, NOON + timedelta(hours=2)), prices(2, NOON)
    for name, price in prices(1, NOON).items():
        if name.endswith("/spot"):
            assert len({price, later[name], other[name]}) > 1
            assert abs(later[name] / price - 1) < Decimal("0.5")
        else:
            assert price == later[name] == other[name]


def test_prices_drift_without_jumps() -> None:
    for minute in range(120):
        before, after = (prices(1, NOON + timedelta(minutes=minute + n)) for n in (0, 1))
        assert all(abs(after[name] / before[name] - 1) < Decimal("0.02") for name in before)


def test_the_market_shows_what_a_quote_must_explain() -> None:
    listed_offers = offers(SimulatedConfig(seed=1), GpuAsk(), NOON, cores=2)
    assert {o.cloud for o in listed_offers} == {"runpod", "lambda", "vast", "aws"}
    assert {o.accelerator for o in listed_offers} >= {"h100-sxm", "a100-80gb-sxm", "l40s", "rtx4090"}
    assert min(o.gpu_memory_bytes for o in listed_offers) < 2e9
    assert all((o.emulated_on, o.emulated_vcpus, o.provider) == ("cpu", 2, "simulated") for o in listed_offers)
    assert all((o.preemptions_per_hour is not None) == o.spot for o in listed_offers)
    sold_out = [o for hour in range(24)
                for o in offers(SimulatedConfig(seed=1), GpuAsk(), NOON + timedelta(hours=hour), cores=2)
                if not o.available]  # fmt: skip
    assert sold_out
    assert {o.gpus for o in offers(SimulatedConfig(), GpuAsk(min_gpus=8), NOON, cores=2)} == {8}


def spot_offer(*, spot: bool = True) -> Offer:
    return next(o for o in offers(SimulatedConfig(), GpuAsk(), NOON, cores=2) if o.spot == spot)


def test_scripted_lifetimes_are_handed_out_once_each_across_restarts(tmp_path: Path) -> None:
    config = SimulatedConfig(lifetimes_s=(75, 100_000), hazard_scale=0)
    names = [InstanceName(f"gb-aaaa-{letter * 13}") for letter in "abc"]
    assert Lifetimes(config, tmp_path).of(names[0], spot_offer(spot=False)) is None
    assert Lifetimes(config, tmp_path).of(names[0], spot_offer()) == 75
    again = Lifetimes(config, tmp_path)
    assert [again.of(name, spot_offer()) for name in names[:2]] == [75, 100_000]
    assert again.of(names[0], spot_offer()) == 75


def test_drawn_lifetimes_follow_the_hazard(tmp_path: Path) -> None:
    lifetimes, offer = Lifetimes(SimulatedConfig(), tmp_path), spot_offer()
    drawn = [lifetimes.of(InstanceName(f"gb-aaaa-{n:013d}"), offer) or 0 for n in range(2000)]
    assert offer.preemptions_per_hour
    mean_h = sum(drawn) / len(drawn) / 3600
    assert mean_h == pytest.approx(1 / offer.preemptions_per_hour, rel=0.1)


def test_a_share_is_a_share() -> None:
    with pytest.raises(ValidationError):
        Faults(throttled=1.5)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"), ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4"), ("NVIDIA L40", "l40"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA A10G", "a10g"), ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA H200", "h200-sxm"), ("NVIDIA B200", "b200"), ("Quadro K620", "quadro-k620"),
    ],
)  # fmt: skip
def test_devices_get_their_canonical_names(device: str, name: str) -> None:
    assert accelerator(device, None) == name


async def test_this_machine_offers_its_gpus_at_the_configured_price(tmp_path: Path) -> None:
    async def detect() -> list[Gpu]:
        return [Gpu(accelerator="l40s", memory_bytes=48_000_000_000)] * 2

    provider = LocalProvider(
        LocalConfig(usd_per_hour=Decimal("0.25")),
        installation=OURS, state=tmp_path, clock=SteppedClock(), detect=detect,
    )  # fmt: skip
    (offer,) = await provider.offers(GpuAsk(min_gpus=2, accelerators=("l40s",)))
    assert (offer.accelerator, offer.gpus, offer.gpu_memory_bytes) == ("l40s", 2, 48_000_000_000)
    assert offer.usd_per_hour == Decimal("0.25")
    assert await provider.offers(GpuAsk(min_gpus=3)) == []
    await provider.close()


async def test_the_registry_builds_what_is_configured(tmp_path: Path) -> None:
    blobs, clock = ObstoreBlobs.open("memory://", OURS), SteppedClock()
    config = ProvidersConfig(simulated=SimulatedConfig(body="virtual"))
    found = build(config, installation=OURS, state=tmp_path, clock=clock, blobs=blobs)
    assert {name: provider.name for name, provider in found.items()} == {"local": "local", "simulated": "simulated"}
    assert found["simulated"].caps.simulated
    for provider in found.values():
        await provider.close()
