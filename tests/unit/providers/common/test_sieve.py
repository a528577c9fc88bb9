"""The sieve on raw rows: what cannot be true or sold is counted before any price is added to it."""

from decimal import Decimal
from typing import Any

import pytest

from broker.domain.offer import GpuAsk
from providers.common.market_rules import OfferFilter, RawRow

ROW: dict[str, Any] = {"gpu": "H100 SXM", "gpus": 8, "architecture": "amd64", "maker": "nvidia", "contract_s": 2.6e6}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"maker": "amd"}, "not an NVIDIA GPU"),
        ({"maker": None, "gpu": "AMD Instinct MI300X OAM"}, "not an NVIDIA GPU"),
        ({"gpu": "Gaudi2"}, "not an NVIDIA GPU"),
        ({"architecture": "arm64"}, "ARM processor: the image is for x86-64"),
        ({"architecture": "aarch64"}, "ARM processor: the image is for x86-64"),
        ({"architecture": None, "gpu": "GH200 (96 GB)"}, "ARM processor: the image is for x86-64"),
        ({"gpu": "NVIDIA A100-SXM4-40GB MIG 3g.20gb"}, "share of a GPU"),
        ({"gpu": "GRID A100-40C"}, "share of a GPU"),
        ({"gpus": 0.5}, "share of a GPU"),
        ({"gpus": 1.5}, "share of a GPU"),
        ({"gpus": 0}, "no GPU"),
        ({"gpus": None}, "no GPU"),
        ({"gpu": "RTX 4090 Laptop GPU"}, "laptop or workstation variant of a GPU"),
        ({"gpu": "RTX PRO 6000 Blackwell Max-Q Workstation Edition"}, "laptop or workstation variant of a GPU"),
        ({"contract_s": 299}, "contract of the host ends within 5 min"),
        ({"contract_s": -5.0}, "contract of the host ends within 5 min"),
        ({"contract_s": "299.9"}, "contract of the host ends within 5 min"),
        ({"contract_s": "soon"}, "end of the host's contract that cannot be read"),
        ({"contract_s": float("nan")}, "end of the host's contract that cannot be read"),
        ({"gpus": True}, "no GPU"),
        ({"gpus": "0.5"}, "share of a GPU"),
        ({"gpus": float("nan")}, "no GPU"),
        ({"gpus": -1}, "no GPU"),
        ({"gpus": 4096}, "too many GPUs"),
        ({"gpu": "NVIDIA H100 MIG-1g10gb"}, "share of a GPU"),
        ({"gpu": "L40S-12A"}, "share of a GPU"),
        ({"gpu": "1/2 L40S"}, "share of a GPU"),
        ({"gpu": "0.25x A10"}, "share of a GPU"),
        ({"gpu": "RTX A6000 vWS"}, "share of a GPU"),
        ({"gpu": "GH200SXM"}, "ARM processor: the image is for x86-64"),
        ({"gpu": "NVIDIA GB10"}, "ARM processor: the image is for x86-64"),
        ({"gpu": "Jetson AGX Orin"}, "ARM processor: the image is for x86-64"),
        ({"architecture": " ARM64 "}, "ARM processor: the image is for x86-64"),
        ({"maker": None, "gpu": "Ascend 910B"}, "not an NVIDIA GPU"),
        ({"maker": "Advanced Micro Devices"}, "not an NVIDIA GPU"),
        ({"gpu": "NVIDIA Thor"}, "ARM processor: the image is for x86-64"),
        ({"gpu": ""}, "GPU without a name"),
        ({"gpu": " - "}, "GPU without a name"),
    ],
)
def test_row_that_cannot_be_sold_is_counted(changes: dict[str, Any], why: str) -> None:
    offer_filter = OfferFilter(GpuAsk())
    assert offer_filter.takes(RawRow(**ROW))
    assert not offer_filter.takes(RawRow(**(ROW | changes)))
    assert offer_filter.dropped == {why: 1}


@pytest.mark.parametrize(
    "changes",
    [{"gpus": "8"}, {"gpus": 8.0}, {"maker": "NVIDIA Corporation"}, {"contract_s": None}, {"contract_s": 300},
        {"gpu": "H100 2.0"},
        {"architecture": ""}, {"architecture": "unknown"}, {"architecture": "x86"}, {"maker": " "}, {"maker": "N/A"},
    ],
)  # fmt: skip
def test_unusual_forms_of_a_true_row_are_sold(changes: dict[str, Any]) -> None:
    offer_filter = OfferFilter(GpuAsk())
    assert offer_filter.takes(RawRow(**(ROW | changes)))
    assert offer_filter.dropped == {}


@pytest.mark.parametrize(
    ("price", "why"),
    [
        (0, "price 0 or less"), ("0.0000000000", "price 0 or less"), (-1.2, "price 0 or less"),
        (float("nan"), "price that is not a number"), (float("inf"), "price that is not a number"),
        ("free", "price that is not a number"), (True, "price that is not a number"),
        ("", "price that is not a number"),
        ({"usd": 1}, "price that is not a number"),
    ],
)  # fmt: skip
def test_price_that_cannot_be_true_is_counted(price: object, why: str) -> None:
    offer_filter = OfferFilter(GpuAsk())
    assert offer_filter.on_demand(price) is None
    assert offer_filter.spot(price, None) is None
    assert offer_filter.dropped == {why: 2}


def test_price_that_is_not_listed_is_no_fault() -> None:
    offer_filter = OfferFilter(GpuAsk())
    assert (offer_filter.on_demand(None), offer_filter.spot(None, Decimal(1))) == (None, None)
    assert offer_filter.dropped == {}


def test_spot_above_on_demand_is_counted_but_not_against_an_untrue_price() -> None:
    offer_filter = OfferFilter(GpuAsk())
    assert offer_filter.spot("14.30", offer_filter.on_demand("12")) is None
    assert offer_filter.spot("14.30", offer_filter.on_demand(0)) == Decimal("14.30")
    assert offer_filter.dropped == {"spot above on-demand": 1, "price 0 or less": 1}
