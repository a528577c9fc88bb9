"""Impossible rows are counted by reason and never repaired; offers that were not asked for are skipped."""

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from broker.domain.offer import GIB, GpuAsk, Offer
from providers.common.market_rules import OfferFilter

OFFER = Offer(
    id="p/c/r/t/on-demand", provider="p", cloud="c", region="DE", instance_type="t", accelerator="h100-sxm", gpus=2,
    gpu_memory_bytes=80 * 10**9, vcpus=16, ram_bytes=64 * GIB, disk_bytes=100 * GIB, spot=False,
    usd_per_hour=Decimal(2), on_demand_usd_per_hour=Decimal(2), seen_at=datetime(2026, 1, 1, tzinfo=UTC),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"usd_per_hour": Decimal(0)}, "price 0 or less"),
        ({"usd_per_hour": Decimal(-1)}, "price 0 or less"),
        ({"spot": True, "usd_per_hour": Decimal(3)}, "spot above on-demand"),
        ({"gpu_memory_bytes": 80 * 10**6}, "memory of h100-sxm out of range"),
        ({"gpu_memory_bytes": 80 * 10**12}, "memory of h100-sxm out of range"),
        ({"accelerator": "unheard-of", "gpu_memory_bytes": 24}, "memory of unheard-of out of range"),
        ({"gpus": 0}, "no GPU, no processor or no memory"),
        ({"vcpus": 0}, "no GPU, no processor or no memory"),
        ({"ram_bytes": 64}, "no GPU, no processor or no memory"),
    ],
)
def test_untrue_rows_are_counted(changes: dict[str, Any], why: str) -> None:
    offer_filter = OfferFilter(GpuAsk())
    offer_filter.add(OFFER)
    for _ in range(2):
        offer_filter.add(replace(OFFER, **changes))
    assert offer_filter.offers == [OFFER]
    assert offer_filter.dropped == {why: 2}


@pytest.mark.parametrize(
    ("accelerator", "gb"),
    [("h100-nvl", 94), ("h100-nvl", 100.5), ("h200-sxm", 141), ("b200", 192.3), ("rtx4090", 25.8), ("rtx4090", 51.5)],
)
def test_both_readings_of_a_gigabyte_pass(accelerator: str, gb: float) -> None:
    offer_filter = OfferFilter(GpuAsk())
    offer_filter.add(replace(OFFER, accelerator=accelerator, gpu_memory_bytes=int(gb * 10**9)))
    assert len(offer_filter.offers) == 1


def test_spot_without_a_known_on_demand_price_passes() -> None:
    offer_filter = OfferFilter(GpuAsk())
    offer_filter.add(replace(OFFER, spot=True, on_demand_usd_per_hour=None))
    assert len(offer_filter.offers) == 1


@pytest.mark.parametrize(
    ("ask", "kept"),
    [
        (GpuAsk(accelerators=("h100",)), True),
        (GpuAsk(accelerators=("h100-sxm", "l4")), True),
        (GpuAsk(accelerators=("h10",)), False),
        (GpuAsk(accelerators=("h100-pcie",)), False),
        (GpuAsk(regions=("DE",)), True),
        (GpuAsk(regions=("US",)), False),
        (GpuAsk(min_gpus=2), True),
        (GpuAsk(min_gpus=3), False),
    ],
)
def test_offers_outside_the_configured_bounds_are_dropped(ask: GpuAsk, kept: bool) -> None:
    offer_filter = OfferFilter(ask)
    offer_filter.add(OFFER)
    assert (len(offer_filter.offers), offer_filter.dropped) == (int(kept), {})
