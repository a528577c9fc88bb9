"""The control API: failures on demand, and over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.clouds.conftest import Time
from tests.clouds.emulator import Clouds
from tests.clouds.machine import MachineSpec, PaperMachine, PaperMachines

POD = 'mutation { podFindAndDeployOnDemand(input: {name: "gb-x-head", gpuTypeId: "NVIDIA L40S"}) { id } }'


@pytest.fixture
async def session(clouds: Clouds) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(clouds.url, headers={"Authorization": "Bearer test-key"}) as session:
        yield session


async def graphql(session: aiohttp.ClientSession, query: str) -> Any:
    async with session.post("/graphql", json={"query": query}) as answer:
        return await answer.json()


async def test_a_call_can_be_answered_with_any_status_and_a_pause(
    session: aiohttp.ClientSession, clouds: Clouds
) -> None:
    clouds.control.fail(cloud="lambda", call="instances", status=429, retry_after_s=7)
    clouds.control.fail(cloud="lambda", call="instances", status=500)
    async with session.get("/api/v1/instances") as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
    async with session.get("/api/v1/instances") as answer:
        assert answer.status == 500
    async with session.get("/api/v1/instances") as answer:
        assert answer.status == 200
    assert [c.status for c in clouds.world.calls] == [429, 500, 200]


@pytest.mark.parametrize("done", [True, False])
async def test_a_create_whose_answer_is_lost(session: aiohttp.ClientSession, clouds: Clouds, done: bool) -> None:
    clouds.control.fail(cloud="runpod", call="podFindAndDeployOnDemand", trouble="drop", done=done)
    with pytest.raises(aiohttp.ClientError):
        await graphql(session, POD)
    assert clouds.bill().made("gb-x") == int(done)


async def test_a_call_that_hangs_is_let_go(session: aiohttp.ClientSession, clouds: Clouds) -> None:
    clouds.control.fail(cloud="runpod", trouble="hang")
    call = asyncio.create_task(graphql(session, POD))
    _, pending = await asyncio.wait([call], timeout=0.1)
    assert pending
    clouds.control.heal()
    with pytest.raises(aiohttp.ClientError):
        await call


async def test_new_and_destroyed_machines_show_late(session: aiohttp.ClientSession, clouds: Clouds, time: Time) -> None:
    clouds.control.list_lag("runpod", 10)
    clouds.control.teardown("runpod", 5)
    pod = (await graphql(session, POD))["data"]["podFindAndDeployOnDemand"]["id"]
    listing = "{ myself { pods { id desiredStatus } } }"
    assert (await graphql(session, listing))["data"]["myself"]["pods"] == []
    time.pass_by(10)
    assert len((await graphql(session, listing))["data"]["myself"]["pods"]) == 1
    await graphql(session, f'mutation {{ podTerminate(input: {{podId: "{pod}"}}) }}')
    time.pass_by(14)
    assert (await graphql(session, listing))["data"]["myself"]["pods"] == [{"id": pod, "desiredStatus": "TERMINATED"}]
    time.pass_by(1)
    assert (await graphql(session, listing))["data"]["myself"]["pods"] == []


async def test_a_machine_that_is_taken_while_it_boots_never_comes_up(
    session: aiohttp.ClientSession, clouds: Clouds
) -> None:
    clouds.control.hold_boots()
    pod = (await graphql(session, POD))["data"]["podFindAndDeployOnDemand"]["id"]
    await clouds.control.preempt(pod)
    clouds.control.release_boots()
    await asyncio.sleep(0)
    assert clouds.world.rented[pod].status == "EXITED"
    assert [event.kind for event in clouds.world.events] == ["created", "evicted"]


async def test_a_machine_dies_and_its_cloud_has_not_noticed(session: aiohttp.ClientSession, clouds: Clouds) -> None:
    pod = (await graphql(session, POD))["data"]["podFindAndDeployOnDemand"]["id"]
    rented = await clouds.world.reach(pod, "RUNNING")
    await clouds.control.kill(pod)
    assert rented.machine is not None
    assert not rented.machine.alive
    assert rented.status == "RUNNING"


async def test_the_control_api_works_over_http(session: aiohttp.ClientSession, clouds: Clouds) -> None:
    pod = (await graphql(session, POD))["data"]["podFindAndDeployOnDemand"]["id"]
    await clouds.world.reach(pod, "RUNNING")
    for door, said in (
        ("preempt", {"machine_id": pod}),
        ("capacity", {"cloud": "runpod", "what": "NVIDIA L40S", "free": 0}),
        ("fail", {"cloud": "lambda", "status": 503}),
        ("heal", {}),
    ):
        async with session.post(f"/_ctl/{door}", json=said) as answer:
            assert answer.status == 200, door
    async with session.get("/_ctl/state") as answer:
        state = await answer.json()
    assert [(m["id"], m["status"], m["ours"]) for m in state["machines"]] == [(pod, "EXITED", True)]
    assert state["open"] == [pod]
    assert "errors" in await graphql(session, POD)


@pytest.mark.parametrize(
    ("door", "said", "status"),
    [
        ("nothing", {}, 404),
        ("kill", {"machine_id": "x"}, 400),
        ("list_lag", {"x": 1}, 400),
        ("fail", {"cloud": "vast", "call": "bundle"}, 400),
        ("capacity", {"cloud": "runpod", "what": "L40S", "free": 0}, 400),
        ("price", {"cloud": "vast", "what": "H100", "usd_per_hour": 1}, 400),
    ],
)
async def test_the_control_api_names_unknown_commands(
    session: aiohttp.ClientSession, door: str, said: dict[str, object], status: int
) -> None:
    async with session.post(f"/_ctl/{door}", json=said) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]


class _Gated(PaperMachines):
    """Machines that boot only when the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.came_up = asyncio.Event()

    async def boot(self, spec: MachineSpec) -> PaperMachine:
        machine = await super().boot(spec)
        ready = machine.ready

        async def later() -> None:
            await self.gate.wait()
            self.came_up.set()
            await ready()

        machine.ready = later  # type: ignore[method-assign]
        return machine


async def test_a_machine_that_comes_up_too_late_is_killed_and_not_billed(time: Time) -> None:
    machines = _Gated()
    headers = {"Authorization": "Bearer test-key"}
    async with (
        Clouds(machines, now=lambda: time.now) as clouds,
        aiohttp.ClientSession(clouds.url, headers=headers) as http,
    ):
        pod = (await graphql(http, POD))["data"]["podFindAndDeployOnDemand"]["id"]
        await graphql(http, f'mutation {{ podTerminate(input: {{podId: "{pod}"}}) }}')
        machines.booted[0].alive = True  # like a machine that continues to boot although it was destroyed
        machines.gate.set()
        await machines.came_up.wait()
        await asyncio.sleep(0)
        assert [event.kind for event in clouds.world.events] == ["created", "destroyed"]
        assert not machines.booted[0].alive
