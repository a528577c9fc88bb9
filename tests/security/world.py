"""Served installation with the team red and, in one of two worlds, the team blue.

Both teams use the same names, so that a look-up by name alone finds the wrong team's row. In the world without blue,
all values of blue are unused values of the same form. Only blue's uploads are the same in both worlds, because their
name is their hash.
"""

import base64
import hashlib
import io
import os
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import aiohttp

from broker.domain.ids import AttemptId, JobId, base32, job_id
from broker.domain.job import AttemptState, Job, JobState
from broker.domain.notifications import SlackUser
from broker.domain.policy import Policy
from broker.domain.tenancy import Scope, Tenant
from broker.ports import Change, Charge, Lane, Store
from broker.quote.decision_record import packed
from tests.api import harness
from tests.api.harness import Running, memory_blobs, serving, spec
from tests.conformance.samples import HOUR, admission, in_state, make_event
from tests.support.machines import offer, quoted
from trainer.contract import object_keys as keys
from trainer.contract.documents import Manifest, ManifestFile

RED, BLUE = "red", "blue"
PERSON = "ann"
"""Name that exists in each team."""
RIGHTS: tuple[Scope, ...] = ("read", "submit", "manage")
SETTINGS = replace(harness.SETTINGS, heartbeat_s=0.05)
Headers = Mapping[str, str]


@dataclass
class Side:
    """Rows of one team, by the names that `http_asks` and the gRPC calls use."""

    headers: Headers
    jobs: dict[str, str]
    """Job ids by the keys running, resting and queued."""
    attempt: str
    token: str
    ref: str
    archive: str
    channel: str
    moment: str
    """Creation time of the team's first job, ISO 8601."""


@dataclass
class World:
    api: Running
    own: Side
    other: Side
    blue: bool
    stack: AsyncExitStack
    connections: dict[str, Any] = field(default_factory=dict)
    """Connections that drivers have opened; closed with the world."""
    acts: int = 0

    def cursor(self, entry: str) -> str:
        """Return the cursor of a page that begins at `entry`, a moment after red's first job was created."""
        then = datetime.fromisoformat(self.own.moment) + timedelta(microseconds=1)
        return base64.urlsafe_b64encode(f"{then.isoformat()} {entry}".encode()).decode().rstrip("=")

    async def stir(self) -> None:
        """Let blue act, so that red's answers would change if red saw anything of blue."""
        if not self.blue:
            return
        self.acts += 1
        api, headers, number = self.api, self.other.headers, self.acts
        match number % 6:
            case 0:
                body = spec(self.other.ref, labels={"who": "ann"})
                await api.call("POST", "/v1/jobs", {**headers, "Idempotency-Key": "shared"}, 202, json=body)
            case 1:
                await api.call("PUT", "/v1/secrets/BLUE_ONLY", headers, 204, json={"value": "x"})
            case 2:
                await api.call("POST", "/v1/tokens", headers, 201, json={"owner": PERSON, "scopes": ["read"]})
            case 3:
                await api.call("POST", "/v1/jobs", headers, 202, json=spec(self.other.ref, labels={"who": "ann"}))
            case 4:
                await api.upload(headers, data_set(str(number)), "words.csv")
            case _:
                event = make_event(Job(**{**vars(await self._job()), "id": JobId(self.other.jobs["running"])}))
                await api.service.store.apply([Change(events=(event,))])

    async def _job(self) -> Job:
        job = await self.api.service.store.job(JobId(self.other.jobs["running"]))
        assert job is not None
        return job


@asynccontextmanager
async def world(store: Store, *, blue: bool) -> AsyncIterator[World]:
    async with serving(store, memory_blobs(), settings=SETTINGS) as api, AsyncExitStack() as stack:
        # All teams see which offers are unavailable, but not the message of the launch that failed there.
        message = "blue's machine gb-test-1 did not start" if blue else "somebody's"
        await store.block_offer(api.market.items[0].id, message, for_s=HOUR)
        other = await _create_side(api, BLUE, "blue's own") if blue else _unused_side(api)
        own = await _create_side(api, RED, "red's own")
        yield World(api, own, other, blue, stack)


async def _create_side(api: Running, team: str, mark: str) -> Side:
    """Create a team with one row of each kind, and three jobs. `mark`: text in its data."""
    headers = await api.token(PERSON, *RIGHTS, team=team)
    spare = await api.call("POST", "/v1/tokens", headers, 201, json={"owner": PERSON, "scopes": ["read"]})
    ref = (await api.upload(headers, data_set(mark)))["ref"]
    archive = await api.upload(headers, _tar(mark), "code.tar")
    await api.call("PUT", "/v1/secrets/KEY", headers, 204, json={"value": "sealed"})
    await api.call("PUT", f"/v1/secrets/{team.upper()}_ONLY", headers, 204, json={"value": "sealed"})
    rows = api.service.store.as_tenant(Tenant(team=team, owner=PERSON))
    await rows.put_policy(Policy(name="limit", team=team, max_jobs=50, approval_above_usd=Decimal(50)))
    link = SlackUser(team=team, workspace="T1", user="U1", owner=PERSON, scopes=("read",), linked_by=PERSON)
    await rows.put_slack_user(replace(link, name=mark))
    channel = await _channel(api, headers)
    jobs, moments, attempt = {}, [], ""
    for name in ("running", "resting", "queued"):
        body = spec(ref, labels={"who": PERSON, "team": team})
        answer = await api.call("POST", "/v1/jobs", {**headers, "Idempotency-Key": name}, 202, json=body)
        jobs[name] = answer["id"]
        moments.append(answer["created_at"])
        if name == "running":
            attempt = await _run(api, JobId(jobs[name]), mark)
        elif name == "resting":
            await _fail(api, JobId(jobs[name]))
    return Side(headers, jobs, attempt, spare["id"], ref, archive["ref"], channel, moments[0])


async def _channel(api: Running, headers: Headers) -> str:
    """Create a channel, if the daemon serves channels at all."""
    wish = {"kind": "webhook", "name": "hook", "secrets": {"url": "https://hook.invalid/"}}
    async with api.http.post(f"{api.url}/v1/channels", headers=headers, json=wish) as response:
        answer: dict[str, Any] = await response.json()
    made: dict[str, Any] = answer.get("channel", answer)
    return str(made.get("id", "no channels"))


def _unused_side(api: Running) -> Side:
    """Return unused ids of the same form as those of a team."""
    return Side(
        headers={},
        jobs={name: job_id(os.urandom(9)) for name in ("running", "resting", "queued")},
        attempt=job_id(os.urandom(9)),
        token=base32(os.urandom(5), 8),
        ref="upload:" + hashlib.sha256(data_set("blue's own")).hexdigest(),
        archive="upload:" + hashlib.sha256(_tar("blue's own")).hexdigest(),
        channel=base32(os.urandom(9), 13),
        moment=datetime.now(UTC).isoformat(),
    )


async def _claimed(store: Store, job: JobId) -> Job:
    claimed = await store.claim_jobs([JobState.QUEUED], owner="world", lease_s=HOUR, limit=99)
    await store.release([row for row in claimed if row.id != job], [], due_in_s=0)
    return next(row for row in claimed if row.id == job)


async def _run(api: Running, job: JobId, mark: str) -> str:
    """Let a job train with a charge, a log and a checkpoint."""
    store, blobs = api.service.store, api.service.blobs
    row = await _claimed(store, job)
    change = replace(admission(row), decision=packed(quoted([offer(id=mark)])))
    assert change.admit is not None
    assert await store.apply([change]) == [True]
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="world", lease_s=HOUR, limit=9)
    training = Change(attempt=(leased.attempt, in_state(leased.attempt, AttemptState.TRAINING)), due_in_s=HOUR)
    assert await store.apply([training]) == [True]
    own = change.admit.id
    charge = Charge(
        attempt_id=own, job_id=job, since=None, to=datetime.now(UTC), usd=Decimal("0.25"),
        event=make_event(row, "attempt.charged"),
    )  # fmt: skip
    assert await store.charge([charge]) == [True]
    await blobs.put(keys.log_chunk(own, 0, "boot", 0), f"{mark}\n".encode())
    await _checkpoint(api, job, own, mark.encode())
    return str(own)


async def _checkpoint(api: Running, job: JobId, attempt: AttemptId, data: bytes) -> None:
    folder = keys.checkpoint(job, attempt, 5, "n0")
    file = ManifestFile(path="plan.txt", bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest = Manifest(job=job, attempt=attempt, step=5, kind="train", files=(file,), complete=False)
    await api.service.blobs.put(folder + keys.FILES + file.path, data)
    await api.service.blobs.put(folder + keys.MANIFEST, manifest.model_dump_json().encode())


async def _fail(api: Running, job: JobId) -> None:
    """Let a job end as failed."""
    row = await _claimed(api.service.store, job)
    ended = replace(row, state=JobState.FAILED, reason="of a test", finished_at=datetime.now(UTC))
    assert await api.service.store.apply([Change(job=(row, ended))]) == [True]


def data_set(mark: str) -> bytes:
    return "".join(["word,definition\n", *(f"{mark} {row},a definition\n" for row in range(40))]).encode()


def _tar(mark: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("main.py")
        member.size = len(mark)
        tar.addfile(member, io.BytesIO(mark.encode()))
    return packed.getvalue()


async def read(response: aiohttp.ClientResponse) -> str:
    """Return the body; of a stream only the part before its first keep-alive."""
    if response.content_type != "text/event-stream":
        return (await response.read()).decode(errors="replace")
    text = ""
    async for line in response.content:
        text += line.decode()
        if line.startswith((b": alive", b"event: end")):
            break
    return text
