"""Lambda's raw rows: GPUs of other makers, slices, ARM hosts and untrue prices are counted by reason."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from broker.domain.offer import GpuAsk
from providers.common.market_rules import OfferFilter
from providers.lambda_cloud.provider import LambdaCloud, LambdaConfig
from tests.unit.providers.clocks import SteppedClock
from tests.unit.providers.lambda_cloud.test_provider import KEY, OURS, Api, kind


@pytest.mark.parametrize(
    ("description", "cents", "why"),
    [
        ("H100 (80 GB SXM5)", 0, {"price 0 or less": 1}),
        ("H100 (80 GB SXM5)", -5, {"price 0 or less": 1}),
        ("H100 (80 GB SXM5)", None, {"no price": 1}),
        ("H100 (10 GB MIG)", 60, {"share of a GPU": 1}),
        ("GB300 (288 GB)", 900, {"ARM processor: the image is for x86-64": 1}),
        ("MI300X (192 GB)", 300, {"not an NVIDIA GPU": 1}),
    ],
)
async def test_unsuitable_rows_are_dropped_and_counted(
    tmp_path: Path, description: str, cents: Any, why: dict[str, int]
) -> None:
    api = Api()
    api.types = {"bad": kind("bad", description, 1, cents), "good": kind("good", "A10 (24 GB PCIe)", 1, 75)}
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    async with TestServer(app) as server:
        cloud = LambdaCloud(
            LambdaConfig(endpoint=f"http://{server.host}:{server.port}"), installation=OURS, clock=SteppedClock(),
            env={"LAMBDA_API_KEY": KEY}, home=tmp_path,
        )  # fmt: skip
        offer_filter = OfferFilter(GpuAsk())
        await cloud.rows(offer_filter)
        await cloud.close()
    assert ({offer.accelerator for offer in offer_filter.offers}, offer_filter.dropped) == ({"a10"}, why)
