"""Wrong keys, broken clouds and impossible requests: one line names cloud, cause and fix; other clouds continue."""

import asyncio
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from broker.cli.main import app as command_line
from broker.client.async_client import AsyncClient
from broker.client.transport.errors import ApiError
from broker.daemon.app import _work, building, write_client_file
from broker.daemon.config import DaemonConfig
from broker.daemon.listeners import listening
from broker.domain.errors import InvalidInput, ProviderError, Rejected, Throttled
from broker.domain.ids import Installation
from broker.domain.job import JobState
from broker.domain.offer import GpuAsk
from broker.runtime.clock import SystemClock
from providers.aws.provider import AwsCloud, AwsConfig
from providers.common.account_guard import Account
from providers.common.cloud import CloudProvider
from providers.lambda_cloud.provider import LambdaCloud, LambdaConfig
from providers.registry import check_skypilot
from providers.runpod.provider import RunpodCloud, RunpodConfig
from providers.vast.provider import VastCloud, VastConfig
from tests.clouds.emulator import Clouds
from tests.clouds.paper import Host, PaperLauncher
from tests.clouds.warp import Life

KEY = "a-key-that-nobody-may-see"
REST = ("lambda", "runpod", "vast")
NAMES = {"lambda": "Lambda", "runpod": "RunPod", "vast": "Vast", "aws": "AWS"}
BROKEN: Mapping[str, tuple[int, str]] = {
    "500": (500, "Internal Server Error"),
    "502 with a page": (502, "<html>\n<body>\nbad gateway\n</body></html>"),
    "429": (429, "slow down"),
    "a page": (200, "<!doctype html>\n<title>Log in</title>"),
    "nothing": (200, ""),
    "half an answer": (200, '{"data": ['),
    "null": (200, "null"),
    "a list": (200, "[1, 2]"),
    "an empty object": (200, "{}"),
    "other types": (200, '{"data": 7, "offers": 7, "instances": 7, "id": [], "credit": "x"}'),
}
NONSENSE = '{"data": [7], "offers": [7], "instances": [7]}'
EXPIRED = """<?xml version="1.0" encoding="UTF-8"?><Response><Errors><Error><Code>{0}</Code>
<Message>The security token included in the request is expired</Message></Error></Errors><RequestID>1</RequestID>
</Response>"""


@asynccontextmanager
async def answering(status: int, text: str, *, hangs: bool = False) -> AsyncIterator[str]:
    """Yield a cloud that answers every request with `answer`."""
    released = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        if hangs:
            await released.wait()
        return web.Response(status=status, text=text, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")
        released.set()


def provider(name: str, url: str, home: Path, *, key: str | None = KEY) -> CloudProvider:
    """Return a provider for calls other than launches: its launcher is never called."""
    env = {} if key is None else {f"{name.upper()}_API_KEY": key}
    if name == "aws" and key is not None:
        env = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": key, "AWS_SESSION_TOKEN": key}
    env["AWS_EC2_METADATA_DISABLED"] = "true"
    installation = Installation("abcd")
    given: Any = {"installation": installation, "clock": SystemClock(), "env": env, "home": home}
    clouds: Mapping[str, Any] = {
        "lambda": lambda: LambdaCloud(LambdaConfig(endpoint=url), **given),
        "runpod": lambda: RunpodCloud(RunpodConfig(endpoint=url), **given),
        "vast": lambda: VastCloud(VastConfig(endpoint=url), **given),
        "aws": lambda: AwsCloud(AwsConfig(endpoint=url, regions=("us-east-1",)), **given),
    }
    nobody: Any = None
    launcher = PaperLauncher(Host(nobody), Life(), nobody)
    cloud = clouds[name]()
    return CloudProvider(cloud, launcher, Account(cloud, home / "account.json"), installation=installation)


def one_line(name: str, said: object) -> str:
    """Return the user's message after a check: it has the cloud's name, no line break, no dump and no key."""
    text = str(said)
    assert NAMES[name] in text
    assert "\n" not in text
    assert len(text) < 400
    assert KEY not in text
    return text


@pytest.mark.parametrize("answer", BROKEN)
@pytest.mark.parametrize("name", REST)
async def test_a_broken_cloud_sells_nothing_and_proves_no_absence(name: str, answer: str, tmp_path: Path) -> None:
    async with answering(*BROKEN[answer]) as url:
        cloud = provider(name, url, tmp_path)
        with pytest.raises(ProviderError) as sold:
            await cloud.offers(GpuAsk())
        one_line(name, sold.value)
        with pytest.raises(ProviderError) as listed:
            await cloud.list()
        one_line(name, listed.value)
        one_line(name, await cloud.check())
        assert isinstance(sold.value, Throttled) == (answer == "429")
        await cloud.close()


@pytest.mark.parametrize("name", ["lambda", "vast"])
async def test_rows_of_nonsense_are_counted_and_prove_no_absence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def account() -> tuple[str, ...]:
        return ("me",)

    async with answering(200, NONSENSE) as url:
        cloud = provider(name, url, tmp_path)
        monkeypatch.setattr(cloud._cloud, "account", account)
        assert await cloud.offers(GpuAsk()) == []
        assert cloud.dropped == {"unreadable": 1}
        with pytest.raises(ProviderError) as e:
            await cloud.list()
        one_line(name, e.value)
        await cloud.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("runpod", '{"pods": [], "data": {"myself": 7}}'),
        ("runpod", '{"pods": [], "data": {"myself": {"id": "u", "clientBalance": "lots"}}}'),
        ("vast", '{"id": 1, "credit": "lots"}'),
    ],
)
async def test_an_account_that_cannot_be_read_does_not_work(name: str, text: str, tmp_path: Path) -> None:
    async with answering(200, text) as url:
        cloud = provider(name, url, tmp_path)
        one_line(name, await cloud.check())
        await cloud.close()


@pytest.mark.parametrize("name", REST)
async def test_a_cloud_that_hangs_is_left(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.common.http_json.TIMEOUT_S", 0.05)
    async with answering(200, "", hangs=True) as url:
        cloud = provider(name, url, tmp_path)
        with pytest.raises(ProviderError, match="Timeout") as e:
            await cloud.offers(GpuAsk())
        one_line(name, e.value)
        assert "Timeout" in one_line(name, await cloud.check())
        await cloud.close()


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("name", REST)
async def test_a_wrong_key_is_reported_with_the_place_of_a_new_one(name: str, status: int, tmp_path: Path) -> None:
    async with answering(status, f'{{"message": "key {KEY} is wrong"}}') as url:
        cloud = provider(name, url, tmp_path)
        with pytest.raises(Rejected) as e:
            await cloud.offers(GpuAsk())
        for said in (e.value, await cloud.check()):
            assert "refuses the key" in one_line(name, said)
            assert "https://" in str(said)
            assert f"{name.upper()}_API_KEY" in str(said)
        await cloud.close()


@pytest.mark.parametrize("name", REST)
async def test_no_key_is_reported_without_asking_the_cloud(name: str, tmp_path: Path) -> None:
    cloud = provider(name, "http://127.0.0.1:9", tmp_path, key=None)
    with pytest.raises(Rejected) as e:
        await cloud.offers(GpuAsk())
    for said in (e.value, await cloud.check()):
        assert "no API key" in one_line(name, said)
        assert f"{name.upper()}_API_KEY" in str(said)
    await cloud.close()


@pytest.mark.parametrize(
    ("code", "status", "fix"),
    [
        ("RequestExpired", 400, "aws sso login"),
        ("ExpiredToken", 403, "aws sso login"),
        ("AuthFailure", 401, "aws configure"),
    ],
)
async def test_keys_that_aws_takes_no_more(code: str, status: int, fix: str, tmp_path: Path) -> None:
    async with answering(status, EXPIRED.format(code)) as url:
        cloud = provider("aws", url, tmp_path)
        for call in (cloud.offers(GpuAsk()), cloud.list()):
            with pytest.raises(Rejected) as e:
                await call
            assert fix in one_line("aws", e.value)
        assert fix in one_line("aws", await cloud.check())
        await cloud.close()


async def test_no_keys_for_aws(tmp_path: Path) -> None:
    cloud = provider("aws", "http://127.0.0.1:9", tmp_path, key=None)
    with pytest.raises(Rejected) as e:
        await cloud.offers(GpuAsk())
    for said in (e.value, await cloud.check()):
        assert "AWS_ACCESS_KEY_ID" in one_line("aws", said)
    await cloud.close()


@pytest.mark.parametrize("answer", ["500", "a page", "nothing", "null"])
async def test_a_broken_answer_of_aws_is_a_provider_error(answer: str, tmp_path: Path) -> None:
    async with answering(*BROKEN[answer]) as url:
        cloud = provider("aws", url, tmp_path)
        for call in (cloud.offers(GpuAsk()), cloud.list()):
            with pytest.raises(ProviderError) as e:
                await call
            one_line("aws", e.value)
        one_line("aws", await cloud.check())
        await cloud.close()


# --------------------------------------------------------------------------------------------------------- the daemon


@dataclass(frozen=True, kw_only=True)
class Daemon:
    """Daemon with all parts of `gpubroker serve`, in this process."""

    client: AsyncClient

    async def waits(self, **resources: Any) -> str:
        """Return the reason for which a script with these resources waits."""
        job = await self._submit(resources)
        async with asyncio.timeout(300):
            while not (stored_job := await self.client.job(job)).reason:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)
        events = (await self.client.events_now(job)).items
        assert stored_job.state is JobState.QUEUED
        assert stored_job.reason in {event.message for event in events if event.kind == "job.waiting"}
        return stored_job.reason

    async def refuses(self, **resources: Any) -> str:
        """Return the line with which a script with these resources is refused."""
        with pytest.raises(ApiError) as refused:
            await self._submit(resources)
        return str(refused.value)

    async def succeeds(self, **resources: Any) -> None:
        job = await self._submit(resources)
        async with asyncio.timeout(300):
            while (await self.client.job(job)).state is not JobState.SUCCEEDED:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _submit(self, resources: Mapping[str, Any]) -> str:
        with io.BytesIO() as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                tar.addfile(tarfile.TarInfo("empty"))
            upload = await self.client.upload(packed.getvalue(), name="code.tar", fmt="tar")
        script = {"code": upload.ref, "command": ["true"]}
        spec = {"name": "wish", "cap_usd": "5", "script": script, "resources": dict(resources)}
        return str((await self.client.submit(spec, key=os.urandom(8).hex())).id)


@asynccontextmanager
async def daemon(
    dsn: str, home: Path, clouds: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Daemon]:
    """Start a daemon with a folder as its blob store, the given clouds, and virtual machines that always work."""
    for name in ("GPUBROKER_URL", "GPUBROKER_TOKEN", "VAST_API_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    keys = {"RUNPOD_API_KEY": "test-key", "LAMBDA_API_KEY": KEY, "AWS_SECRET_ACCESS_KEY": KEY, "AWS_ACCESS_KEY_ID": "A"}
    places = {"HOME": str(home), "GPUBROKER_HOME": str(home / "broker"), "XDG_CONFIG_HOME": str(home / "config")}
    for name, value in (keys | places | {"AWS_EC2_METADATA_DISABLED": "true"}).items():
        monkeypatch.setenv(name, value)
    virtual = {"body": "virtual", "hazard_scale": 0, "sold_out": 0, "virtual": {"run_s": 0.2, "boot_s": 0.05}}
    config = {
        "port": 0, "database_url": dsn, "intervals": {"poll_s": 0.05, "look_s": 0.1, "list_s": 0.05, "market_s": 0.5},
        "providers": {"local": None, "simulated": virtual, **clouds},
    }  # fmt: skip
    (home / "broker").mkdir()
    (home / "broker" / "gpubroker.yaml").write_text(yaml.safe_dump(config))
    async with building(DaemonConfig.load()) as built, listening(built.config, built.application) as at:
        await write_client_file(built, at)
        work = asyncio.create_task(_work(built))
        token = json.loads((home / "broker" / "client.json").read_text())["token"]
        try:
            async with AsyncClient(at.url, token) as client:
                yield Daemon(client=client)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def run(*words: str) -> str:
    """Return the command's output."""
    result = await asyncio.to_thread(CliRunner(env={"COLUMNS": "1000"}).invoke, command_line, list(words))
    return result.output


async def test_each_cloud_says_what_it_lacks_and_the_others_continue(
    postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    says = {
        "vast": "Vast: no API key; make one at https://cloud.vast.ai/manage-keys/",
        "lambda": "Lambda refuses the key (401): make one at https://cloud.lambda.ai/api-keys",
        "aws": "log in again with `aws sso login`",
    }
    async with Clouds() as clouds, answering(400, EXPIRED.format("RequestExpired")) as expired:
        sections = {
            "runpod": {"endpoint": clouds.url, "emulated": True},
            "vast": {"endpoint": clouds.url, "emulated": True},
            "lambda": {"endpoint": clouds.url, "emulated": True},
            "aws": {"endpoint": expired, "emulated": True, "regions": ["us-east-1"]},
        }
        async with daemon(postgres_dsn, tmp_path, sections, monkeypatch) as broker:
            offers = {status.name: status for status in (await broker.client.offers()).providers}
            checked = {status.name: status for status in (await broker.client.check_providers()).items}
            shown, doctor = await run("offers"), await run("doctor")
            for name, words in says.items():
                assert words in one_line(name, offers[name].error)
                assert words in one_line(name, checked[name].problem)
                assert name == "aws" or checked[name].identity
                assert f"{name}: 0 offers; DOWN: " in shown
                assert words in shown
                assert any(words in line for line in doctor.splitlines() if line.startswith(f"PROBLEM  {name}"))
                reason = await broker.waits(providers=[name])
                assert words in reason
                assert not any(other in reason for which, other in says.items() if which != name)
            assert offers["runpod"].offers > 0
            assert offers["runpod"].error is None
            assert "use a bucket" in await broker.refuses(providers=["runpod"])
            assert "PROBLEM  grants: rented machines cannot reach a local folder; set blobs to s3://" in doctor
            assert "sells in nowhere-1" in await broker.refuses(regions=["nowhere-1"], providers=["simulated"])
            await broker.succeeds()
        for text in (shown, doctor, caplog.text):
            assert KEY not in text
        assert clouds.violations == []


async def test_a_sold_out_cloud_is_no_reason_to_refuse_what_others_sell(
    postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is a folder here, so a job for RunPod alone can never be served; a sold-out pool may sell tomorrow."""
    async with Clouds() as clouds:
        for pool in clouds.runpod.pools:
            pool.free = 0
        sections = {"runpod": {"endpoint": clouds.url, "emulated": True}}
        async with daemon(postgres_dsn, tmp_path, sections, monkeypatch) as broker:
            assert "use a bucket" in await broker.refuses(providers=["runpod"])
            await broker.succeeds(providers=["runpod", "simulated"])


async def test_a_cloud_that_hangs_keeps_the_daemon_from_nothing(
    postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.daemon.app.FIRST_PRICES_S", 0.5)
    async with answering(200, "", hangs=True) as url:
        sections = {"runpod": {"endpoint": url, "emulated": True}}
        async with asyncio.timeout(300), daemon(postgres_dsn, tmp_path, sections, monkeypatch) as broker:
            await broker.succeeds()


def test_a_cloud_without_skypilots_environment(tmp_path: Path) -> None:
    """Refused before anything starts, rather than at the first purchase."""
    config = DaemonConfig.load(home=tmp_path, providers={"vast": {}, "sky": {"python": str(tmp_path / "no")}})
    with pytest.raises(InvalidInput, match=r"vast: .* run `gpubroker clouds install`, or remove the section"):
        check_skypilot(config.providers, tmp_path / "providers")
    elsewhere = DaemonConfig.load(home=tmp_path, providers={"vast": {}, "sky": {"url": "http://sky.example"}})
    check_skypilot(elsewhere.providers, tmp_path / "providers")


@pytest.mark.parametrize("image", ["registry.example/trainer", "registry.example/trainer:latest"])
def test_an_image_that_is_not_pinned(image: str, tmp_path: Path) -> None:
    (tmp_path / "gpubroker.yaml").write_text(f"trainer: {{image: '{image}'}}\n")
    with pytest.raises(InvalidInput, match=r"trainer\.image: .*needs a digest, since tags move") as e:
        DaemonConfig.load(home=tmp_path)
    assert "\n" not in str(e.value)
