"""Credentials are renewed at half of their life, from what `grant.json` says."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import cast

import pytest

from broker.blobs import ObstoreBlobs
from broker.controllers.base.context import ControllerContext
from broker.controllers.provisioning.boot_spec import Boot
from broker.controllers.provisioning.store_grants import Granting, Grants
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import AttemptId, JobId
from broker.domain.instance import Caps
from broker.domain.job import AttemptState, Event
from broker.domain.tenancy import Tenant
from broker.ports import Change, Leased, Provider, Store, StoreAccess
from broker.runtime.secret_box import SecretBox
from broker.store.postgres.store import PostgresStore
from tests.support import build
from tests.support.memory_store.store import MemoryStore
from trainer.contract import object_keys as keys
from trainer.contract.documents import Grant

LIFE_S = 60.0
BOX = SecretBox(bytes(32))
ATTEMPT = build.attempt()


class Clock:
    def __init__(self) -> None:
        self.time = build.T0

    def now(self) -> datetime:
        return self.time

    def monotonic(self) -> float:
        return (self.time - build.T0).total_seconds()

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")


class Issuing(ObstoreBlobs):
    """A remote store, but for its place; hands out numbered credentials."""

    clock: Clock
    number = 0
    life_s: float | None = LIFE_S
    down = False
    asked: list[tuple[JobId, AttemptId, JobId | None]]

    @property
    def local(self) -> bool:
        return False

    async def grant(self, job: JobId, attempt: AttemptId, *, origin: JobId | None = None) -> StoreAccess:
        self.asked.append((job, attempt, origin))
        if self.down:
            raise BlobsUnavailable("STS: no credentials for the attempt: 403 AccessDenied")
        self.number += 1
        ends = None if self.life_s is None else self.clock.time + timedelta(seconds=self.life_s)
        return StoreAccess(url="s3://b", options={"token": f"t{self.number}"}, scoped=True, expires_at=ends)


class Live:
    """The store's live attempts, and what was written."""

    def __init__(self, *live: Leased) -> None:
        self.live, self.events = live, list[Event]()

    async def sent_attempts(self) -> Sequence[Leased]:
        return self.live

    def as_tenant(self, tenant: Tenant) -> "Live":
        return self

    async def upload_bytes(self, team: str, owner: str, sha256: str) -> None:
        return None

    async def apply(self, changes: Sequence[Change]) -> Sequence[bool]:
        self.events += [event for change in changes for event in change.events]
        return [True for _ in changes]


class GrantRig:
    def __init__(self, *live: Leased) -> None:
        self.clock = Clock()
        self.blobs = Issuing.open("memory://", build.INSTALLATION)
        self.blobs.clock, self.blobs.asked = self.clock, []
        self.store = Live(*(live or (Leased(attempt=ATTEMPT, job=build.active_job()),)))

    def context(self) -> ControllerContext:
        return ControllerContext(
            installation=build.INSTALLATION, owner="test", store=cast(Store, self.store), blobs=self.blobs,
            providers={"simulated": cast(Provider, None)}, clock=self.clock,
        )  # fmt: skip

    def controller(self) -> Grants:
        """Return the controller of a process that has just started."""
        context = self.context()
        return Grants(context, Granting(context=context, box=BOX))

    async def launch(self, **secrets: str) -> None:
        granting = Granting(context=self.context(), box=BOX)
        await granting.issue(self.store.live[0].job, ATTEMPT, secrets)

    async def pass_time(self, seconds: float) -> None:
        self.clock.time += timedelta(seconds=seconds)

    async def grant(self) -> Grant:
        data = await self.blobs.get(keys.grant(ATTEMPT.id))
        assert data is not None
        return Grant.model_validate_json(data)

    async def token(self) -> str:
        return BOX.open_for(ATTEMPT.id, (await self.grant()).sealed).store_options["token"]


async def test_renewed_at_half_life_with_a_higher_seq_and_the_same_secrets() -> None:
    rig = GrantRig()
    await rig.launch(HF_TOKEN="hidden")
    controller, first = rig.controller(), await rig.grant()
    await controller.step()
    await rig.pass_time(LIFE_S / 2 - 1)
    await controller.step()
    assert await rig.grant() == first
    await rig.pass_time(1)
    await controller.step()
    second = await rig.grant()
    assert second.seq > first.seq
    assert second.expires_at == rig.clock.time + timedelta(seconds=LIFE_S)
    sealed = BOX.open_for(ATTEMPT.id, second.sealed)
    assert (sealed.store_options, sealed.secrets) == ({"token": "t2"}, {"HF_TOKEN": "hidden"})
    assert "hidden" not in second.model_dump_json()


async def test_a_restarted_broker_renews_by_what_the_grant_says() -> None:
    rig = GrantRig()
    await rig.launch()
    await rig.pass_time(LIFE_S / 2)
    await rig.controller().step()
    assert await rig.token() == "t2"
    await rig.controller().step()
    assert await rig.token() == "t2"


async def test_two_brokers_renew_once() -> None:
    rig = GrantRig()
    await rig.launch()
    one, other = rig.controller(), rig.controller()
    for _ in range(6):
        await one.step()
        await other.step()
        await rig.pass_time(LIFE_S / 4)
    assert rig.blobs.number == 1 + 2
    assert rig.store.events == []


async def test_concurrent_renewals_leave_the_newer_grant() -> None:
    rig = GrantRig()
    await rig.launch()
    first = await rig.grant()
    context = rig.context()
    granting = Granting(context=context, box=BOX)
    for _ in range(2):
        await granting.issue(build.active_job(), ATTEMPT, {}, after=first)
    assert (await rig.grant()).seq > first.seq


async def test_a_clock_that_was_set_back_never_lowers_seq() -> None:
    rig = GrantRig()
    await rig.launch()
    first = await rig.grant()
    rig.clock.time -= timedelta(hours=1)
    granted = await Granting(context=rig.context(), box=BOX).issue(build.active_job(), ATTEMPT, {}, after=first)
    second = granted.grant
    assert second is not None
    assert second.seq == first.seq + 1


async def test_a_grant_without_expiry_is_not_renewed() -> None:
    rig = GrantRig()
    rig.blobs.life_s = None
    await rig.launch(HF_TOKEN="hidden")
    controller, first = rig.controller(), await rig.grant()
    assert first.expires_at is None
    assert BOX.open_for(ATTEMPT.id, first.sealed).store_options == {}
    await rig.pass_time(1e9)
    await controller.step()
    assert await rig.grant() == first


async def test_an_attempt_without_a_grant_is_asked_for_until_it_is_launched() -> None:
    launching = Leased(attempt=replace(ATTEMPT, state=AttemptState.LAUNCHING), job=build.active_job())
    rig = GrantRig(launching)
    controller = rig.controller()
    await controller.step()
    assert rig.blobs.number == 0
    await rig.launch()
    await rig.pass_time(LIFE_S / 2)
    await controller.step()
    assert rig.blobs.number == 2


@pytest.mark.parametrize("state", [AttemptState.PLANNED, AttemptState.TERMINATING, AttemptState.ENDED])
async def test_a_machine_that_is_not_there_or_is_being_destroyed_gets_nothing(state: AttemptState) -> None:
    rig = GrantRig(Leased(attempt=replace(ATTEMPT, state=state), job=build.active_job()))
    await rig.launch()
    await rig.pass_time(LIFE_S)
    await rig.controller().step()
    assert rig.blobs.number == 1


async def test_a_failed_renewal_is_retried_with_growing_pauses_and_reported_once() -> None:
    rig = GrantRig()
    await rig.launch()
    await rig.pass_time(LIFE_S / 2)
    rig.blobs.down = True
    controller = rig.controller()
    for _ in range(400):
        await controller.step()
        await rig.pass_time(1)
    (event,) = rig.store.events
    assert (event.kind, event.attempt_id) == ("attempt.grant_failing", ATTEMPT.id)
    assert "cannot be renewed: STS: no credentials for the attempt: 403 AccessDenied" in event.message
    # 15, 30, then every 60 s
    assert len(rig.blobs.asked) - 1 == 3 + (400 - 45 - 1) // 60
    rig.blobs.down = False
    await rig.pass_time(60)
    await controller.step()
    assert await rig.token() == "t2"
    rig.blobs.down = True
    await rig.pass_time(LIFE_S / 2)
    for _ in range(100):
        await controller.step()
        await rig.pass_time(1)
    assert len(rig.store.events) == 2


async def test_a_failing_renewal_delays_no_other() -> None:
    other = replace(ATTEMPT, id=AttemptId("z" * 13), job_id=JobId("y" * 13))
    rig = GrantRig(
        Leased(attempt=ATTEMPT, job=build.active_job()),
        Leased(attempt=other, job=build.active_job(id=JobId("y" * 13))),
    )
    await rig.launch()
    await rig.blobs.put(keys.grant(other.id), b"not a grant")
    await rig.pass_time(LIFE_S / 2)
    await rig.controller().step()
    assert await rig.token() == "t2"


async def test_the_job_that_a_job_starts_from_can_be_read_after_renewal_too() -> None:
    job = build.active_job(spec_changes={"init_from": f"job/{'o' * 13}"})
    rig = GrantRig(Leased(attempt=ATTEMPT, job=job))
    await rig.launch()
    await rig.pass_time(LIFE_S / 2)
    await rig.controller().step()
    assert rig.blobs.asked == [(job.id, ATTEMPT.id, JobId("o" * 13))] * 2


@pytest.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest, postgres_dsn: str) -> AsyncIterator[Store]:
    made: Store = MemoryStore(Clock()) if request.param == "memory" else await PostgresStore.connect(postgres_dsn)
    yield made
    await made.close()


async def test_the_event_is_written_by_a_real_store(store: Store) -> None:
    rig = GrantRig()
    await rig.launch()
    job = build.job()
    await store.submit(job, key=None, body_sha256="", events=())

    class Both(Live):
        async def apply(self, changes: Sequence[Change]) -> Sequence[bool]:
            return await store.apply(changes)

    rig.store = Both(*rig.store.live)
    rig.blobs.down = True
    controller = rig.controller()
    for _ in range(100):
        await rig.pass_time(LIFE_S)
        await controller.step()
    assert [e.kind for e in await store.events(job.id, after=0, limit=9)] == ["attempt.grant_failing"]


async def test_a_folder_store_causes_no_renewal_round() -> None:
    rig = GrantRig()
    context = replace(rig.context(), store=cast(Store, None), blobs=ObstoreBlobs.open("memory://", build.INSTALLATION))
    assert await Grants(context, Granting(context=context, box=BOX)).step() is False


async def test_boot_passes_the_grant_that_it_writes() -> None:
    rig = GrantRig()

    class Machines:
        caps = Caps(spot=True)

    context = replace(rig.context(), providers={"simulated": cast(Provider, Machines())})
    boot = await Boot(context=context, box=BOX).prepare(rig.store.live[0])
    assert boot.secret_env["GPUBROKER_STORE_OPTIONS"] == '{"token": "t1"}'
    assert await rig.token() == "t1"
