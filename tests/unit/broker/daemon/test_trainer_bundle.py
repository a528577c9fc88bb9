"""Source of the trainer on rented machines: the operator's image, or the installation's code through the blob store."""

import asyncio
import io
import re
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from broker.blobs import ObstoreBlobs
from broker.controllers.provisioning.boot_spec import Boot
from broker.daemon.config import DaemonConfig
from broker.daemon.trainer_bundle import RECIPE, TrainerSource, bundle, image_of
from broker.domain.errors import InvalidInput, Rejected
from broker.domain.ids import Installation
from broker.domain.instance import TrainerBundle, TrainerImage
from broker.domain.spec import JobSpec
from broker.ports import Leased
from broker.runtime.clock import SystemClock
from broker.runtime.secret_box import SecretBox
from tests.conformance.samples import make_attempt, make_job
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.broker_rig import BrokerRig, config
from tests.support.rig.simulated_cloud import CloudFaults

ROOT = Path(__file__).parents[4]
IMAGE = "ghcr.io/team/trainer@sha256:" + "0a" * 32
HERE = Installation("abcd")


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    """Yield options of an S3 store on loopback that holds a bucket named `bucket`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    request = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=test/20200101/us-east-1/s3/aws4_request")
    urllib.request.urlopen(request).close()
    yield {
        "aws_endpoint": f"http://{host}:{port}", "aws_region": "us-east-1",
        "aws_access_key_id": "test", "aws_secret_access_key": "test",
    }  # fmt: skip
    server.stop()


def settings(home: Path, text: str) -> DaemonConfig:
    (home / "gpubroker.yaml").write_text(text)
    return DaemonConfig.load(home=home, env={})


# ------------------------------------------------------------------------------------------------------------ settings


def test_without_settings_there_is_no_image(tmp_path: Path) -> None:
    assert image_of(settings(tmp_path, "").trainer, {}) is None


@pytest.mark.parametrize("reference", [IMAGE, "host:5000/n@sha256:" + "b" * 64, "team/n:1.2@sha256:" + "b" * 64])
def test_an_image_with_a_digest_is_taken(tmp_path: Path, reference: str) -> None:
    config = settings(tmp_path, f"trainer: {{image: '{reference}', registry_username: robot}}").trainer
    image = image_of(config, {"GPUBROKER_REGISTRY_PASSWORD": "hush"})
    assert image == TrainerImage(reference=reference, username="robot", password="hush")
    assert "hush" not in repr(image)


@pytest.mark.parametrize("reference", ["ghcr.io/team/trainer:latest", "n@sha256:12", "a b@sha256:" + "b" * 64, ""])
def test_an_image_that_may_change_is_refused(tmp_path: Path, reference: str) -> None:
    with pytest.raises(InvalidInput, match=r"trainer\.image.*digest.*make image"):
        settings(tmp_path, f"trainer: {{image: '{reference}'}}")


def test_a_registry_login_without_user_or_password_is_refused(tmp_path: Path) -> None:
    named = settings(tmp_path, f"trainer: {{image: '{IMAGE}', registry_username: robot}}").trainer
    with pytest.raises(InvalidInput, match="set GPUBROKER_REGISTRY_PASSWORD"):
        image_of(named, {})
    nameless = settings(tmp_path, f"trainer: {{image: '{IMAGE}'}}").trainer
    with pytest.raises(InvalidInput, match=r"set trainer\.registry_username") as caught:
        image_of(nameless, {"GPUBROKER_REGISTRY_PASSWORD": "hush"})
    assert "hush" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- the bundle


def test_the_bundle_is_the_same_bytes_and_holds_what_an_installation_needs() -> None:
    assert bundle() == bundle()
    with tarfile.open(fileobj=io.BytesIO(bundle())) as tar:
        names = tar.getnames()
        assert {(m.mtime, m.uid, m.uname) for m in tar.getmembers()} == {(0, 0, "")}
        modes = {m.name: m.mode for m in tar.getmembers()}
    own = {p.relative_to(ROOT).as_posix() for p in (ROOT / "trainer").rglob("*.py")}
    assert set(names) == own | set(RECIPE)
    assert modes["deploy/trainer_install.sh"] == 0o755


def test_a_wheel_installs_the_recipe_where_the_daemon_finds_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    forced = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {path: f"broker/_trainer/{path}" for path in RECIPE}.items() <= forced.items()


async def test_the_bundle_is_uploaded_once_and_signed_for_each(bucket: dict[str, str]) -> None:
    blobs = ObstoreBlobs.open("s3://bucket/once", HERE, options=bucket)
    trainer_source, other = TrainerSource(blobs, None), TrainerSource(blobs, None)
    got = await asyncio.gather(trainer_source(), trainer_source(), other())
    assert len(await blobs.list("trainer/")) == 1
    for given in got:
        assert isinstance(given, TrainerBundle)
        with await asyncio.to_thread(urllib.request.urlopen, given.url) as answer:
            assert sha256(answer.read()).hexdigest() == given.sha256
        assert given.url not in repr(given)


async def test_a_store_without_signed_urls_is_refused_with_the_fix(tmp_path: Path) -> None:
    source = TrainerSource(ObstoreBlobs.open(tmp_path.as_uri(), HERE), None)
    with pytest.raises(Rejected, match=r"s3://.*or set trainer\.image"):
        await source()


async def test_with_an_image_nothing_is_uploaded(tmp_path: Path) -> None:
    blobs = ObstoreBlobs.open(tmp_path.as_uri(), HERE)
    image = TrainerImage(reference=IMAGE)
    assert await TrainerSource(blobs, image)() is image
    assert not await blobs.list("trainer/")


async def test_the_image_of_a_job_gets_the_bundle_next_to_an_operators_image(bucket: dict[str, str]) -> None:
    blobs = ObstoreBlobs.open("s3://bucket/both", HERE, options=bucket)
    source = TrainerSource(blobs, TrainerImage(reference=IMAGE))
    assert isinstance(await source(for_image=True), TrainerBundle)


# ------------------------------------------------------------------------------------------------------------ the boot


RENTED = {
    "notices": "imds", "agent_start_s": 300.0, "self_stop": "os_shutdown", "trust": "secure", "simulated": False,
    "reaches_local_files": False,
}  # fmt: skip
"""`Caps` of a cloud that rents."""


@pytest.mark.parametrize(
    ("caps", "given"),
    [
        (RENTED, {"GPUBROKER_SELF_STOP": "os_shutdown", "GPUBROKER_NOTICES": "imds"}),
        (RENTED | {"notices": "off", "self_stop": "none"}, {"GPUBROKER_SELF_STOP": "none", "GPUBROKER_NOTICES": "off"}),
        ({}, {}),
    ],
)
async def test_only_rented_machines_are_given_a_trainer(
    tmp_path: Path, caps: dict[str, Any], given: dict[str, str]
) -> None:
    rig = BrokerRig(store=MemoryStore(SystemClock()), config=config(), state=tmp_path, faults=CloudFaults(caps=caps))
    source = TrainerSource(rig.blobs, TrainerImage(reference=IMAGE))
    boot = Boot(context=rig.fleet("one").context, box=SecretBox(bytes(32)), trainer=source)
    job = make_job()
    made = await boot.prepare(Leased(attempt=make_attempt(job), job=job))
    await rig.provider.close()
    assert (made.trainer is not None) == bool(given)
    assert given.items() <= made.env.items()
    assert ("GPUBROKER_NOTICES" in made.env) == bool(given)


async def test_a_machine_without_an_image_installs_what_a_job_asks_for(tmp_path: Path) -> None:
    rig = BrokerRig(store=MemoryStore(SystemClock()), config=config(), state=tmp_path, faults=CloudFaults(caps=RENTED))
    source = TrainerSource(rig.blobs, TrainerImage(reference=IMAGE))
    boot = Boot(context=rig.fleet("one").context, box=SecretBox(bytes(32)), trainer=source)
    given = []
    tracked = {"mlflow": {"uri": "https://mlflow.example.org"}}
    for metrics, fp8 in (({}, False), (tracked, False), (tracked, True)):
        data = {"path": f"upload:{'a' * 64}", "format": "csv", "prompt": "{word}", "completion": "{definition}"}
        train = {"task": "causal_lm", "model": "gpt2", "data": data, "metrics": metrics, "fp8": fp8}
        job = make_job(spec=JobSpec.model_validate({"name": "n", "cap_usd": 1, "train": train}))
        made = await boot.prepare(Leased(attempt=make_attempt(job), job=job))
        given.append(made.env.get("GPUBROKER_EXTRAS"))
    await rig.provider.close()
    assert given == [None, "trackers", "trackers fp8"]


def test_the_recipe_takes_extras_by_name() -> None:
    def named(*extras: str) -> set[str]:
        command = [sys.executable, str(ROOT / "deploy" / "trainer_requirements.py"), *extras]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return {re.split("[<>=;# ]", line)[0] for line in done.stdout.splitlines()}

    assert named("trackers", "fp8") - named() == {"mlflow-skinny", "torchao", "wandb"}
