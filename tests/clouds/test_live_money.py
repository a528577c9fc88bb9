"""Spending guards of `python -m tests.live --max-usd`, against the emulators."""

from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from broker.domain.spec import JobSpec
from tests.clouds.emulator import Clouds
from tests.live.balance import balance
from tests.live.installation import LiveInstallation, sweep
from tests.live.spend import SCENARIOS, job, refusal, share

OURS = "gb-abcd-aaaaaaaaaaaaa-1a2b3c4d-head"
THEIRS = "gb-zzzz-aaaaaaaaaaaaa-1a2b3c4d-head"
KEYS = {"RUNPOD_API_KEY": "test-key", "VAST_API_KEY": "test-key", "LAMBDA_API_KEY": "test-key"}


@pytest.fixture
async def clouds(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clouds]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    async with Clouds() as clouds:
        yield clouds
        assert clouds.violations == []


@pytest.fixture
async def installation(clouds: Clouds, tmp_path: Path) -> AsyncIterator[LiveInstallation]:
    """Yield the state after a daemon of installation abcd ended, with listings that do not lag."""
    sections = {name: {"endpoint": clouds.url, "emulated": True} for name in ("runpod", "vast")}
    installation = LiveInstallation(
        tmp_path, ["runpod", "vast"], {"blobs": "s3://b/c", "providers": {**sections, "simulated": {}}}
    )
    (tmp_path / "installation").write_text("abcd\n")
    for name in installation.clouds:
        native: Any = installation.native(name)
        native.caps = replace(native.caps, list_lag_s=0.0)
    yield installation
    await installation.close()


async def rent(clouds: Clouds, name: str) -> None:
    """Rent a pod, and a machine of Vast."""
    asks = [str(ask.id) for ask in clouds.vast.offers.values() if not ask.rented]
    mutation = f"""mutation {{ podFindAndDeployOnDemand(input: {{
        name: "{name}", imageName: "i", gpuTypeId: "NVIDIA L40S", gpuCount: 1 }}) {{ id }} }}"""
    calls: list[tuple[str, str, Any]] = [
        ("POST", "/graphql", {"query": mutation}),
        ("PUT", f"/api/v0/asks/{asks[0]}/", {"image": "i", "label": name, "disk": 20}),
    ]
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer test-key"}) as http:
        for method, path, body in calls:
            async with http.request(method, clouds.url + path, json=body) as answer:
                assert answer.status == 200, await answer.text()


async def test_the_sweep_ends_what_the_run_rented_and_nothing_else(
    clouds: Clouds, installation: LiveInstallation
) -> None:
    await rent(clouds, OURS)
    await rent(clouds, THEIRS)
    assert await sweep(installation) == {}
    standing = {rented.name for rented in clouds.world.rented.values() if rented.id in clouds.bill().open()}
    assert standing == {THEIRS}


async def test_a_cloud_that_does_not_answer_the_sweep_is_reported(
    clouds: Clouds, installation: LiveInstallation
) -> None:
    await rent(clouds, OURS)
    clouds.control.fail(cloud="vast", call="instances", trouble="status", status=503, times=9)
    left = await sweep(installation)
    assert list(left) == ["vast"]
    assert "503" in left["vast"]


async def test_only_what_was_named_is_bought_from(installation: LiveInstallation) -> None:
    sections = installation.configuration["providers"]
    assert set(sections) == {"local", "runpod", "vast"}
    assert sections["local"] is None


async def test_the_balance_is_the_accounts(clouds: Clouds, tmp_path: Path) -> None:
    for cloud in ("runpod", "vast"):
        assert await balance(cloud, KEYS, tmp_path, clouds.url) == 100
    assert await balance("lambda", KEYS, tmp_path, clouds.url) is None
    assert await balance("vast", {}, tmp_path, clouds.url) is None


@pytest.mark.parametrize(("usd", "clouds", "cap"), [("2", 1, "0.66"), ("2", 4, "0.16"), ("10", 3, "1.11")])
def test_all_caps_together_hold_to_the_limit(usd: str, clouds: int, cap: str) -> None:
    given = share(Decimal(usd), ["x"] * clouds, list(SCENARIOS))
    assert given == Decimal(cap)
    assert given * clouds * len(SCENARIOS) <= Decimal(usd)


def test_the_job_is_one_that_the_broker_takes() -> None:
    document: Any = job("vast", Decimal("0.66"), steps=3)
    document["train"]["data"]["path"] = "upload://x"
    spec = JobSpec.model_validate(document)
    assert spec.cap_usd == Decimal("0.66")
    assert spec.resources.providers == ("vast",)


@pytest.mark.parametrize(
    ("usd", "blobs", "scenario", "said"),
    [
        ("2", "file:///tmp/x", "taken", "must be a bucket"),
        ("0.05", "s3://b/c", "taken", "less than"),
        ("2", "s3://b/c", "other", "no scenario other"),
        ("2", "s3://b/c", "taken", "no API key"),
    ],
)
def test_a_run_that_makes_no_sense_does_not_begin(
    usd: str, blobs: str, scenario: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VAST_API_KEY", raising=False)
    config = tmp_path / "gpubroker.yaml"
    config.write_text(f"blobs: {blobs}\n")
    assert said in refusal(["vast"], Decimal(usd), config, [scenario])
