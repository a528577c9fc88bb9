"""The daemon's own host does not win by being free next to a rented cloud, and says which job occupies it."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from broker.domain.ids import Installation, InstanceName, JobId
from broker.domain.instance import BootSpec
from broker.domain.offer import GpuAsk
from broker.runtime.clock import SystemClock
from providers.local.provider import LocalConfig, LocalProvider
from providers.registry import ProvidersConfig, build
from tests.api.harness import memory_blobs

OURS = Installation("aaaa")
NAME = InstanceName("gb-aaaa-aaaaaaaaaaaaa")
JOB = JobId("b" * 13)


@pytest.fixture
async def open_host(tmp_path: Path) -> AsyncIterator[Callable[..., LocalProvider]]:
    opened: list[LocalProvider] = []

    def make(config: LocalConfig | None = None, **settings: Any) -> LocalProvider:
        provider = LocalProvider(
            config or LocalConfig(), installation=OURS, state=tmp_path, clock=SystemClock(),
            argv=("sleep", "1000"), **settings,
        )  # fmt: skip
        opened.append(provider)
        return provider

    yield make
    for provider in opened:
        for observed in await provider.list():
            await provider.destroy(observed.handle)
        await provider.close()


@pytest.mark.parametrize(
    ("config", "beside_rented", "named_only"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"teams": ["red"]}, True, True),
        ({"usd_per_hour": "0.25"}, True, False),
        ({"usd_per_hour": "0"}, True, False),
    ],
    ids=["alone", "next to a cloud", "only teams", "a price", "free on purpose"],
)
def test_a_free_host_next_to_a_cloud_runs_only_jobs_that_name_it(
    config: dict[str, Any], beside_rented: bool, named_only: bool, open_host: Callable[..., LocalProvider]
) -> None:
    provider = open_host(LocalConfig.model_validate(config), beside_rented=beside_rented)
    assert provider.caps.named_only is named_only


@pytest.mark.parametrize("section", ["runpod", "vast", "lambda", "aws"])
async def test_each_rented_cloud_makes_the_host_one_that_is_named(section: str, tmp_path: Path) -> None:
    config = ProvidersConfig.model_validate({section: {}})
    found = build(config, installation=OURS, state=tmp_path, clock=SystemClock(), blobs=memory_blobs())
    assert found["local"].caps.named_only
    for provider in found.values():
        await provider.close()


async def test_a_busy_host_names_its_job(open_host: Callable[..., LocalProvider]) -> None:
    provider = open_host()
    (free,) = await provider.offers(GpuAsk())
    assert (free.available, free.busy_with) == (True, "")
    await provider.create(NAME, free, BootSpec(job=JOB))
    for seen_by in (provider, open_host()):  # another daemon reads it from the machine's record
        (busy,) = await seen_by.offers(GpuAsk())
        assert (busy.available, busy.busy_with) == (False, JOB)
