"""`python -m tests.live` against the emulators: unchanged clouds have no findings, and every change is reported."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from graphql import build_schema

from broker.domain.job import Handle
from providers.registry import CLOUD_CLASSES, ProvidersConfig
from tests.clouds import lambda_api
from tests.clouds.emulator import Clouds
from tests.clouds.runpod_api import SDL
from tests.clouds.vast_market import VastOffer
from tests.live.__main__ import main
from tests.live.answers import OURS, Answers
from tests.live.guard import Forbidden, allowed, reading
from tests.live.look import CloudFindings, look
from tests.unit.providers.aws_front import front, moto_server
from tests.unit.providers.clocks import SteppedClock

ENV = dict.fromkeys(("RUNPOD_API_KEY", "VAST_API_KEY", "LAMBDA_API_KEY"), "test-key") | {
    "AWS_ACCESS_KEY_ID": "AKIAEMULATED", "AWS_SECRET_ACCESS_KEY": "test-key", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
RENTS: dict[str, tuple[str, str, Any]] = {
    "runpod": ("POST", "/graphql", {"query": """mutation { podRentInterruptable(input: {
        bidPerGpu: 0.5, name: "anybody-head", imageName: "i", gpuTypeId: "NVIDIA L40S", gpuCount: 1 }) { id } }"""}),
    "vast": ("PUT", "/api/v0/asks/{ask}/", {"image": "i", "label": "anybody-head", "disk": 20}),
    "lambda": ("POST", "/api/v1/instance-operations/launch", {
        "region_name": "us-east-1", "instance_type_name": "gpu_1x_a100_sxm4", "ssh_key_names": ["k"], "name": None}),
}  # fmt: skip
RENTED = tuple(RENTS)


@pytest.fixture
async def clouds() -> AsyncIterator[Clouds]:
    async with Clouds() as clouds:
        yield clouds


async def rent(clouds: Clouds, cloud: str) -> None:
    """Rent a machine that belongs to no installation."""
    method, path, body = RENTS[cloud]
    url = clouds.url + path.format(ask=next(iter(clouds.vast.offers)))
    headers = {"Authorization": "Bearer test-key"}
    async with aiohttp.ClientSession() as http:
        if cloud == "lambda":
            await http.post(f"{clouds.url}/api/v1/ssh-keys", json={"name": "k", "public_key": "p"}, headers=headers)
        async with http.request(method, url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()


async def seen(clouds: Clouds, cloud: str, home: Path) -> CloudFindings:
    return await look(cloud, clouds.url, ENV, home)


def told(found: CloudFindings) -> dict[str, tuple[str, bool]]:
    return {difference.field: (difference.what, difference.needed) for difference in found.differences}


# ------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("cloud", RENTED)
async def test_an_emulator_is_as_its_schema_says(clouds: Clouds, cloud: str, tmp_path: Path) -> None:
    await rent(clouds, cloud)
    found = await seen(clouds, cloud, tmp_path)
    assert (found.differences, found.error, found.ok) == ([], "", True)
    assert found.machines == 1
    assert found.offers > 5
    assert clouds.violations == []


def renamed(row: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in row.items()}


async def test_a_field_of_vast_that_we_need_is_gone(
    clouds: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., dict[str, Any]] = VastOffer.shown
    monkeypatch.setattr(VastOffer, "shown", lambda *a, **k: renamed(real(*a, **k), "gpu_ram", "gpu_memory"))
    found = await seen(clouds, "vast", tmp_path)
    assert told(found) == {
        "bundles.offers[].gpu_ram": ("gone", True),
        "bundles.offers[].gpu_memory": ("new (int)", False),
    }
    assert not found.ok
    assert "cannot be read" in found.error


async def test_a_missing_optional_field_is_reported_and_no_failure(
    clouds: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., dict[str, Any]] = VastOffer.shown
    monkeypatch.setattr(VastOffer, "shown", lambda *a, **k: renamed(real(*a, **k), "score", "rating"))
    found = await seen(clouds, "vast", tmp_path)
    assert told(found)["bundles.offers[].score"] == ("gone", False)
    assert found.ok


async def test_a_type_of_lambda_differs(clouds: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = lambda_api._type
    monkeypatch.setattr(
        lambda_api, "_type", lambda row: real(row) | {"price_cents_per_hour": str(real(row)["price_cents_per_hour"])}
    )
    found = await seen(clouds, "lambda", tmp_path)
    field = "instance-types.data.*.instance_type.price_cents_per_hour"
    assert told(found) == {field: ("string, was int", True)}
    assert not found.ok


async def test_a_machine_that_we_could_not_read_is_reported(
    clouds: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rent(clouds, "vast")
    real = clouds.vast._shown
    monkeypatch.setattr(clouds.vast, "_shown", lambda rented: renamed(real(rented), "actual_status", "state"))
    found = await seen(clouds, "vast", tmp_path)
    assert told(found)["instances.instances[].actual_status"] == ("gone", True)


@pytest.mark.parametrize(
    ("old", "new", "field", "what"),
    [
        ("minMemory: Int", "minMemory: String", "LowestPrice.minMemory", "String, was Int"),
        ('"fetch" minVcpu: Int', '"fetch" minVcpus: Int', "LowestPrice.minVcpu", "gone"),
        ('"sky" bidPerGpu: Float!', '"sky" bid: Float!', "PodRentInterruptableInput.bidPerGpu", "gone"),
        ('"client" minDisk: Int\n  "client" minMem', '"client" minDisk: Int\n  "x" must: Int!\n  "client" minMem',
         "GpuLowestPriceInput.must", "new and required (Int!)"),
    ],
)  # fmt: skip
async def test_runpods_own_description_differs(
    clouds: Clouds, tmp_path: Path, old: str, new: str, field: str, what: str
) -> None:
    text = SDL.read_text()
    assert text.count(old) >= 1
    clouds.runpod.schema = build_schema(text.replace(old, new, 1))
    found = await seen(clouds, "runpod", tmp_path)
    assert told(found)[field] == (what, True)
    assert not found.ok


# --------------------------------------------------------------------------------------------------------- never buys


@pytest.mark.parametrize("cloud", CLOUD_CLASSES)
async def test_a_provider_that_would_destroy_cannot(clouds: Clouds, cloud: str, tmp_path: Path) -> None:
    if cloud in RENTED:
        await rent(clouds, cloud)
    section = ProvidersConfig.model_validate({cloud: {"endpoint": clouds.url}}).rented()[cloud]
    native = CLOUD_CLASSES[cloud][0](section, installation=OURS, clock=SteppedClock(), env=ENV, home=tmp_path)
    machine = next(iter(clouds.world.rented), "i-0123456789abcdef0")
    handle = Handle(provider=cloud, id=machine, name="gb-live-aaaaaaaaaaaaa", region="us-east-1")  # type: ignore[arg-type]
    calls = len(clouds.world.calls)
    with reading(Answers(cloud)), pytest.raises(Forbidden, match="nothing was sent"):
        await native.destroy(handle)
    await native.close()
    assert len(clouds.world.calls) == calls


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/api/v0/asks/1/", {}),
        ("DELETE", "/api/v0/instances/1/", {}),
        ("POST", "/api/v1/instance-operations/launch", {}),
        ("POST", "/api/v1/instances", {}),
        ("POST", "/graphql", None),
        ("POST", "/graphql", {"query": "mutation { podTerminate(input: {podId: 1}) }"}),
        ("POST", "/graphql", {"query": "query a { myself { id } } mutation b { podTerminate(input: {podId: 1}) }"}),
        ("POST", "/graphql", {"query": "subscription { pods }"}),
        ("POST", "/graphql", {"query": "no GraphQL {"}),
        ("GET", "/graphql?query=mutation", None),
    ],
)
def test_only_read_requests_are_allowed(method: str, path: str, body: Any) -> None:
    assert not allowed(method, path, body)


# ------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--read-only"),
        (["--max-usd", "2", "--cloud", "runpod"], "--yes-spend-money"),
        (["--yes-spend-money", "--cloud", "runpod"], "--max-usd"),
        (["--max-usd", "2", "--yes-spend-money"], "--cloud"),
        (["--max-usd", "2", "--yes-spend-money", "--cloud", "runpod"], "--config"),
        (["--read-only", "--max-usd", "2"], "spends nothing"),
        (["--read-only", "--cloud", "gcp"], "no cloud gcp"),
    ],
)
def test_money_is_never_spent_by_mistake(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


async def run(home: Path, *words: str, **env: str) -> tuple[int, str, dict[str, Any]]:
    kept = {"PATH": os.environ["PATH"], "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.live", "--read-only", *words, env=kept | env, stdout=asyncio.subprocess.PIPE
    )
    text = (await process.communicate())[0].decode()
    assert process.returncode is not None
    return process.returncode, text, json.loads(text.splitlines()[-1])


async def test_missing_keys_are_reported_with_their_source(tmp_path: Path) -> None:
    code, text, document = await run(tmp_path)
    assert (code, document["ok"]) == (0, True)
    assert all(document["clouds"][cloud]["skipped"] for cloud in CLOUD_CLASSES)
    for place in ("console.runpod.io", "cloud.vast.ai", "cloud.lambda.ai", "aws configure"):
        assert place in text


async def test_a_cloud_that_was_named_must_have_a_key(tmp_path: Path) -> None:
    code, _, document = await run(tmp_path, "--cloud", "vast")
    assert (code, document["ok"]) == (1, False)


async def test_a_wrong_key_is_one_line(clouds: Clouds, tmp_path: Path) -> None:
    code, text, document = await run(
        tmp_path, "--cloud", "vast", "--endpoint", f"vast={clouds.url}", VAST_API_KEY="other"
    )
    assert (code, document["ok"]) == (1, False)
    assert "refuses the key" in document["clouds"]["vast"]["error"]
    assert "other" not in text


async def test_aws_answers_are_checked_as_they_are_read(tmp_path: Path) -> None:
    with moto_server() as moto:
        async with front(moto) as (made, url):
            made.on_demand, made.spot = {("g6e.xlarge", "us-east-1"): "1.861"}, {("g6e.xlarge", "us-east-1a"): "0.7"}
            made.quotas, made.scores = {"Running On-Demand G and VT instances": 64.0}, {"use1-az1": 3}
            made.disk = {"us-east-1": "0.08"}
            code, text, document = await run(tmp_path, "--cloud", "aws", "--endpoint", f"aws={url}", **ENV)
            assert (code, document["clouds"]["aws"]["differences"]) == (0, []), text
            assert document["clouds"]["aws"]["offers"] == 2
            made.rewritten = {"sizeInMiB>": "sizeInMB>"}
            code, text, document = await run(tmp_path, "--cloud", "aws", "--endpoint", f"aws={url}", **ENV)
            changed = {d["field"]: d["what"] for d in document["clouds"]["aws"]["differences"]}
            assert code == 1
            assert changed["DescribeInstanceTypes.InstanceTypes[].MemoryInfo.SizeInMiB"] == "gone"
