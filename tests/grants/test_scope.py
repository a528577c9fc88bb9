"""Rights of a granted client, and their limits, against a gate that evaluates the policy of its issue."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import obstore
import pytest

from broker.blobs import GrantSettings, ObstoreBlobs
from broker.blobs.bucket_check import check_grants
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import AttemptId, Installation, JobId
from tests.grants.gate import ROLE, Gate, gated
from trainer.checkpoint import protocol as checkpoint
from trainer.checkpoint.protocol import Origin
from trainer.contract import object_keys as keys
from trainer.contract.train import CheckpointConfig
from trainer.objectstore.objects import BadContent, Objects, ObjectStoreError

HERE = Installation("abcd")
JOB, OTHER_JOB, ORIGIN_JOB = (JobId(letter * 13) for letter in "jko")
ATTEMPT, EARLIER, OTHER = (AttemptId(letter * 13) for letter in "abc")
SHA = "0" * 64


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Gate]:
    async with gated() as made:
        yield made


@pytest.fixture
async def gate(shared: Gate) -> Gate:
    await shared.fresh(life_s=3600.0)
    return shared


@pytest.fixture(params=[ROLE, None], ids=["role", "user"])
def blobs(request: pytest.FixtureRequest, gate: Gate) -> ObstoreBlobs:
    settings = GrantSettings(role_arn=request.param, sts_endpoint=gate.url)
    return ObstoreBlobs.open(gate.place, HERE, options=gate.options(), grants=settings)


@pytest.fixture
async def granted(blobs: ObstoreBlobs) -> Objects:
    access = await blobs.grant(JOB, ATTEMPT, origin=ORIGIN_JOB)
    return Objects.open(access.url, access.options, HERE)


async def test_a_grant_is_scoped_ends_and_holds_nothing_of_the_daemon(gate: Gate, blobs: ObstoreBlobs) -> None:
    access = await blobs.grant(JOB, ATTEMPT)
    assert (access.scoped, blobs.scopes, blobs.unscoped) == (True, True, None)
    assert access.expires_at is not None
    assert set(access.options) == {
        "aws_endpoint", "aws_region", "aws_access_key_id", "aws_secret_access_key", "aws_session_token",
    }  # fmt: skip
    assert not set(access.options.values()) & {gate.options()["aws_secret_access_key"], "operator"}
    assert access.options["aws_session_token"] not in repr(access)
    (session,) = gate.sessions.values()
    who = session.asked.get("RoleSessionName") or session.asked["Name"]
    assert who == f"gb-{ATTEMPT}"
    assert session.asked.get("RoleArn") == (ROLE if session.asked["Action"] == "AssumeRole" else None)


async def test_everything_that_the_trainer_does_is_allowed(
    gate: Gate, blobs: ObstoreBlobs, granted: Objects, tmp_path: Path
) -> None:
    await blobs.put(keys.spec(ATTEMPT), b"{}")
    await blobs.put(keys.BROKER_LEASE, b"lease")
    await blobs.put(keys.job_data(JOB, SHA), b"rows")
    assert await granted.read(keys.spec(ATTEMPT)) == b"{}"
    assert await granted.read(keys.BROKER_LEASE) == b"lease"
    for absent in (keys.desired(ATTEMPT), keys.grant(ATTEMPT), keys.final(ATTEMPT)):
        assert await granted.read(absent) is None
    with pytest.raises(BadContent):
        await granted.download(keys.job_data(JOB, SHA), tmp_path / "rows", size=4, sha256=SHA)
    for beat in (b"1", b"2"):
        await granted.write(keys.heartbeat(ATTEMPT, 0), beat)
    await granted.write(keys.log_chunk(ATTEMPT, 0, "boot", 0), b"line\n")
    assert await granted.create(keys.final(ATTEMPT), b"{}")
    assert await granted.create(keys.final(ATTEMPT), b"{}")
    assert not await granted.create(keys.final(ATTEMPT), b"{...}")
    assert gate.denied == []


async def test_checkpoints_are_saved_in_parts_restored_from_others_and_pruned(
    gate: Gate, blobs: ObstoreBlobs, granted: Objects, tmp_path: Path
) -> None:
    folder, origin = tmp_path / "snapshot", Origin(job=JOB, attempt=ATTEMPT, kind="script")
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(12 * 2**20))
    saved = []
    for step in (1, 2, 3):
        saved.append((await checkpoint.commit(granted, origin, folder, step=step, complete=False, taken_s=0.0))[0])
    await checkpoint.prune(granted, origin, CheckpointConfig(keep=2), None)
    assert await checkpoint.own_manifests(granted, origin) == saved[:0:-1]
    earlier = []
    for job in (JOB, ORIGIN_JOB):
        daemon = Objects.open(gate.place, gate.options(), HERE)
        old = Origin(job=job, attempt=EARLIER, kind="script")
        earlier.append((await checkpoint.commit(daemon, old, folder, step=9, complete=False, taken_s=0.0))[0])
    torn = keys.files_prefix(earlier[0]) + "weights"
    await blobs.delete(torn)
    told: list[str] = []
    found = await checkpoint.restore(granted, earlier, tmp_path / "restored", kind="script", log=told.append)
    assert found is not None
    assert found[0] == earlier[1]
    assert "absent" in told[0]
    assert earlier[1] in await granted.keys(keys.checkpoints(ORIGIN_JOB)), "a job that runs on has others by then"
    assert gate.denied == []


@pytest.mark.parametrize(
    "key",
    [
        keys.job_data(OTHER_JOB, SHA), keys.upload(SHA), keys.spec(OTHER), keys.grant(OTHER), keys.final(OTHER),
        keys.heartbeat(OTHER, 0), keys.log_chunk(OTHER, 0, "boot", 0), keys.checkpoint(OTHER_JOB, OTHER, 1, "n") + "f",
    ],
)  # fmt: skip
async def test_a_grant_cannot_read_objects_of_others(blobs: ObstoreBlobs, granted: Objects, key: str) -> None:
    await blobs.put(key, b"theirs")
    with pytest.raises(ObjectStoreError, match="cannot read"):
        await granted.read(key)
    await blobs.delete(key)
    with pytest.raises(ObjectStoreError, match="cannot read"):
        await granted.read(key)


@pytest.mark.parametrize(
    "key",
    [
        keys.spec(ATTEMPT), keys.desired(ATTEMPT), keys.grant(ATTEMPT), keys.BROKER_LEASE, keys.job_data(JOB, SHA),
        keys.checkpoint(JOB, EARLIER, 1, "n") + keys.MANIFEST, keys.checkpoint(ORIGIN_JOB, EARLIER, 1, "n") + "f",
        keys.heartbeat(OTHER, 0), keys.final(OTHER), keys.desired(OTHER), keys.upload(SHA),
        keys.log_chunk(OTHER, 0, "boot", 0), keys.job_data(OTHER_JOB, SHA), "anything",
    ],
)  # fmt: skip
async def test_a_grant_cannot_write_or_delete_objects_of_others(
    blobs: ObstoreBlobs, granted: Objects, key: str
) -> None:
    await blobs.put(key, b"kept")
    with pytest.raises(ObjectStoreError, match="cannot write"):
        await granted.write(key, b"forged")
    with pytest.raises(ObjectStoreError, match="cannot create"):
        await granted.create(key + "x", b"forged")
    with pytest.raises(ObjectStoreError, match="cannot delete"):
        await granted.delete(key)
    assert await blobs.get(key) == b"kept"


@pytest.mark.parametrize(
    "prefix", ["", "attempts/", "heartbeats/", "data/", "checkpoints/", "broker/", f"heartbeats/{OTHER}/"]
)
async def test_a_grant_cannot_list_sibling_prefixes(blobs: ObstoreBlobs, granted: Objects, prefix: str) -> None:
    await blobs.put(keys.heartbeat(OTHER, 0), b"1")
    with pytest.raises(ObjectStoreError, match="cannot list"):
        await granted.keys(prefix)


async def test_a_grant_sees_neither_the_bucket_nor_another_installation(blobs: ObstoreBlobs, gate: Gate) -> None:
    access = await blobs.grant(JOB, ATTEMPT)
    foreign = Objects.open(access.url, access.options, "efgh")
    with pytest.raises(ObjectStoreError):
        await foreign.read(keys.spec(ATTEMPT))
    whole = Objects.open(f"s3://{gate.bucket}", access.options, "team")
    with pytest.raises(ObjectStoreError):
        await whole.keys("")
    with pytest.raises(ObjectStoreError):
        await Objects.open(gate.place, {**access.options, "aws_session_token": "x"}, HERE).read("a")


async def test_a_grant_cannot_copy_objects_of_others(blobs: ObstoreBlobs) -> None:
    await blobs.put(keys.upload(SHA), b"theirs")
    access = await blobs.grant(JOB, ATTEMPT)
    thief, _ = Objects.open(access.url, access.options, HERE)._usable()
    with pytest.raises(obstore.exceptions.BaseError):
        await obstore.copy_async(thief, f"{HERE}/{keys.upload(SHA)}", f"{HERE}/{keys.heartbeat(ATTEMPT, 0)}")


async def test_credentials_that_have_ended_open_nothing(gate: Gate, blobs: ObstoreBlobs) -> None:
    gate.life_s = 0.0
    access = await blobs.grant(JOB, ATTEMPT)
    gate.life_s = 60.0
    objects = Objects.open(access.url, access.options, HERE)
    with pytest.raises(ObjectStoreError):
        await objects.write(keys.heartbeat(ATTEMPT, 0), b"1")
    assert gate.expired
    renewed = await blobs.grant(JOB, ATTEMPT)
    objects.renew(renewed.url, renewed.options)
    await objects.write(keys.heartbeat(ATTEMPT, 0), b"2")


async def test_a_refusal_of_sts_says_what_to_do(gate: Gate, blobs: ObstoreBlobs) -> None:
    gate.issues = False
    with pytest.raises(BlobsUnavailable, match="STS: no credentials for the attempt: 503") as error:
        await blobs.grant(JOB, ATTEMPT)
    assert "\n" not in str(error.value)


async def test_the_operator_is_notified_before_an_attempt_fails(gate: Gate) -> None:
    settings = GrantSettings(role_arn=ROLE, sts_endpoint=gate.url)
    assert await check_grants(gate.place, options=gate.options(), grants=settings) is None
    gate.issues = False
    said = await check_grants(gate.place, options=gate.options(), grants=settings)
    assert said is not None
    assert said.startswith(f"blobs {gate.place}: no attempt can start: STS: no credentials for the attempt: 503")
    without = await check_grants(gate.place, options=gate.options(), grants=GrantSettings(scope=False))
    assert "grants.scope is false" in (without or "")
    assert await check_grants("memory://") is None


async def test_a_policy_that_is_too_long_is_reported_before_it_is_sent(gate: Gate) -> None:
    url = f"s3://{'b' * 63}/{'p' * 60}"
    settings = GrantSettings(role_arn=ROLE, sts_endpoint=gate.url)
    blobs = ObstoreBlobs.open(url, HERE, options=gate.options(), grants=settings)
    with pytest.raises(BlobsUnavailable, match="2048 characters; use a bucket with a shorter name or prefix"):
        await blobs.grant(JOB, ATTEMPT, origin=ORIGIN_JOB)
    assert not gate.sessions


async def test_the_policy_names_its_own_prefixes_and_no_wildcard_action(gate: Gate, blobs: ObstoreBlobs) -> None:
    await blobs.grant(JOB, ATTEMPT)
    (session,) = gate.sessions.values()
    statements, bucket = session.policy["Statement"], f"arn:aws:s3:::{gate.bucket}"
    assert all("*" not in action for s in statements for action in s["Action"])
    for resource in (r for s in statements for r in s["Resource"]):
        assert resource == bucket or resource.startswith(f"{bucket}/team/runs/{HERE}/")
    assert len(json.dumps(session.policy, separators=(",", ":"))) < 1400
