"""Stand-ins for launcher, launch server and agents that need no SkyPilot and no machine, but call the cloud's API."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from broker.blobs import ObstoreBlobs
from broker.domain.errors import AlreadyExists, NoCapacity, OutcomeUnknown, Rejected
from broker.domain.ids import Installation, InstanceName
from broker.domain.instance import Liveness
from providers.common.cloud import Purchase
from providers.common.machine_task import MachineTask
from providers.runpod.market import SKY_NAMES
from tests.clouds.emulator import Clouds
from tests.clouds.machine import MachineSpec, PaperMachine, PaperMachines
from tests.clouds.state import Rented
from tests.clouds.warp import Life, Point, held
from trainer.contract import object_keys as keys
from trainer.contract.documents import AttemptSpec, CheckpointRef, Desired, Final, Heartbeat, Manifest, Outcome

POLL_S = 5.0
"""Seconds between two polls of a booting machine by the launch server."""
QUEUE_S = 40.0
"""Seconds that SkyPilot works before its first call to the cloud; longer than a proof of absence takes."""
BOOT_S = 30.0
STEPS, STEP_S = 6, 5.0
"""Number of the agent's steps, and seconds per step."""
USER = "1a2b3c4d"
KEY = "ssh-ed25519 AAAA server"

# ------------------------------------------------------------------------------------------------------------ machines


class FarBlobs(ObstoreBlobs):
    """Memory store that claims to be reachable by rented machines, with credentials for each attempt."""

    local = False
    scopes = True

    async def _call(self, verb: str, key: str, call: Any) -> Any:
        with held():
            return await super()._call(verb, key, call)

    @classmethod
    def in_memory(cls, installation: Installation) -> "FarBlobs":
        return cls.open("memory://", installation)


class SlowMachine(PaperMachine):
    async def ready(self) -> None:
        await asyncio.sleep(BOOT_S)
        await super().ready()


class SlowMachines(PaperMachines):
    """Paper machines whose boots take time."""

    async def boot(self, spec: MachineSpec) -> PaperMachine:
        machine = SlowMachine(spec)
        self.booted.append(machine)
        return machine


class Agents:
    """Agents of the machines, which write the documents of the trainer's contract while their machine runs."""

    def __init__(self, blobs: FarBlobs) -> None:
        self._blobs = blobs
        self._tasks: set[asyncio.Task[None]] = set()
        self.started: Counter[str] = Counter()
        """Number of agent starts by attempt."""

    def start(self, rented: Rented, attempt: str) -> None:
        self.started[attempt] += 1
        task = asyncio.create_task(self._run(rented, attempt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, rented: Rented, attempt: str) -> None:
        data = await self._blobs.get(keys.spec(attempt))
        assert data is not None, "the agent was started before its spec was there"
        spec, boot, saved = AttemptSpec.model_validate_json(data), rented.id[:8], None
        for step in range(1, STEPS + 1):
            await asyncio.sleep(STEP_S)
            if rented.machine is None or not rented.machine.alive:
                return
            told = await self._blobs.get(keys.desired(attempt))
            drains = told is not None and Desired.model_validate_json(told).want != "run"
            saved = await self._save(spec, step, complete=step == STEPS)
            done = drains or step == STEPS
            if done:
                outcome = Outcome.DRAINED if drains else Outcome.COMPLETED
                final = Final(attempt=attempt, outcome=outcome, step=step, total_steps=STEPS, checkpoint=saved)
                with suppress(AlreadyExists):
                    await self._blobs.put(keys.final(attempt), final.model_dump_json().encode(), if_absent=True)
            phase = "done" if done else "training"
            beat = Heartbeat(
                attempt=attempt, boot=boot, seq=step, phase=phase, step=step, total_steps=STEPS, checkpoint=saved
            )
            await self._blobs.put(keys.heartbeat(attempt, 0), beat.model_dump_json().encode())
            if done:
                return

    async def _save(self, spec: AttemptSpec, step: int, *, complete: bool) -> CheckpointRef:
        key = keys.checkpoint(spec.job, spec.attempt, step, "paper") + keys.MANIFEST
        manifest = Manifest(job=spec.job, attempt=spec.attempt, step=step, kind="script", files=(), complete=complete)
        await self._blobs.put(key, manifest.model_dump_json().encode())
        return CheckpointRef(manifest=key, step=step)


# ---------------------------------------------------------------------------------------------------- the launch server


class Server:
    """Server that launches call by call like SkyPilot's, and continues after its caller has gone."""

    def __init__(self, number: int, clouds: Clouds, agents: Agents, point: Point) -> None:
        self.id = f"server-{number}"
        self.life = Life()
        self.running: dict[InstanceName, asyncio.Task[None]] = {}
        self._locks: dict[InstanceName, asyncio.Lock] = {}
        """Lock of each cluster, as in SkyPilot: launches under one name run one after the other."""
        self._clouds, self._agents, self._point = clouds, agents, point
        self._http = aiohttp.ClientSession(headers={"Authorization": "Bearer test-key"})

    def begin(self, name: InstanceName, purchase: Purchase, task: MachineTask) -> asyncio.Task[None]:
        self.life.check()
        work = self.running[name] = asyncio.create_task(self._in_turn(name, purchase, task))

        def over(done: asyncio.Task[None]) -> None:
            if self.running.get(name) is done:
                del self.running[name]

        work.add_done_callback(over)
        return work

    async def _in_turn(self, name: InstanceName, purchase: Purchase, task: MachineTask) -> None:
        async with self._locks.setdefault(name, asyncio.Lock()):
            await self._launch(name, purchase, task)

    def kill(self) -> None:
        self.life.over = True
        for work in list(self.running.values()):
            work.cancel()

    async def close(self) -> None:
        self.kill()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        await self._http.close()

    def _at(self, point: str) -> None:
        self._point.reached(point, self.life)

    async def _launch(self, name: InstanceName, purchase: Purchase, task: MachineTask) -> None:
        self._at("the server has begun")
        await asyncio.sleep(QUEUE_S)
        machine_id = await self._buy(f"{name}-{USER}-head", purchase)
        self._at("create has answered")
        rented = self._clouds.world.rented[machine_id]
        await asyncio.sleep(POLL_S)
        self._at("the machine boots")
        while not await self._is_up(rented):  # noqa: ASYNC110 - the cloud tells nobody
            await asyncio.sleep(POLL_S)
        self._at("the machine is up")
        await asyncio.sleep(2 * POLL_S)  # packages, files
        self._at("the machine is set up")
        if rented.machine is None or not rented.machine.alive:
            raise OutcomeUnknown(f"{name}: the machine does not answer")
        self._agents.start(rented, task.env["GPUBROKER_ATTEMPT"])
        self._at("the agent is started")
        await asyncio.sleep(2 * POLL_S)
        self._at("the agent has beaten")

    async def _buy(self, name: str, purchase: Purchase) -> str:
        buy = {"lambda": self._at_lambda, "runpod": self._at_runpod, "vast": self._at_vast}[purchase.cloud]
        return await buy(name, purchase)

    async def _call(self, method: str, path: str, body: Any = None, *, point: str = "") -> Any:
        """Call the cloud. `point`: kill point after the cloud executed the call and before the answer is read."""
        self.life.check()
        with held():
            async with self._http.request(method, self._clouds.url + path, json=body) as answer:
                if point:
                    self._at(point)
                text, status = await answer.text(), answer.status
        self.life.check()
        if any(sign in text for sign in ("insufficient-capacity", "no longer any instances", "no_such_ask")):
            raise NoCapacity(text)
        if status != 200 or '"errors"' in text:
            raise Rejected(f"{method} {path}: {status} {text}")
        return await answer.json()

    async def _create(self, method: str, path: str, body: Any) -> Any:
        self._at("before the create request")
        return await self._call(method, path, body, point="the create request is answered unread")

    async def _is_up(self, rented: Rented) -> bool:
        match rented.cloud:
            case "lambda":
                shown = (await self._call("GET", "/api/v1/instances"))["data"]
                return any(m["id"] == rented.id and m["status"] == "active" for m in shown)
            case "runpod":
                shown = (await self._ask("query { myself { pods { id desiredStatus } } }"))["myself"]["pods"]
                return any(m["id"] == rented.id and m["desiredStatus"] == "RUNNING" for m in shown)
        shown = (await self._call("GET", "/api/v1/instances/"))["instances"]
        return any(str(m["id"]) == rented.id and m["actual_status"] == "running" for m in shown)

    async def _at_lambda(self, name: str, purchase: Purchase) -> str:
        shown = (await self._call("GET", "/api/v1/instances"))["data"]
        if standing := [m["id"] for m in shown if m["name"] == name]:
            return str(standing[0])
        self._at("before the key is registered")
        if not (await self._call("GET", "/api/v1/ssh-keys"))["data"]:
            await self._call("POST", "/api/v1/ssh-keys", {"name": "server", "public_key": KEY})
        self._at("the key is registered")
        body = {
            "region_name": purchase.region, "instance_type_name": purchase.instance_type,
            "ssh_key_names": ["server"], "quantity": 1, "name": name,
        }  # fmt: skip
        answer = await self._create("POST", "/api/v1/instance-operations/launch", body)
        return str(answer["data"]["instance_ids"][0])

    async def _at_runpod(self, name: str, purchase: Purchase) -> str:
        shown = (await self._ask("query { myself { pods { id name } } }"))["myself"]["pods"]
        if standing := [m["id"] for m in shown if m["name"] == name]:
            return str(standing[0])
        self._at("before the key is registered")
        await self._ask(f'mutation {{ updateUserSettings(input: {{ pubKey: "{KEY}" }}) {{ id }} }}')
        self._at("the key is registered")
        count, gpu, _tier, zone, price = purchase.instance_type.split("_")
        kind = next(runpods for runpods, skys in SKY_NAMES.items() if skys == gpu)
        gpus = int(count.removesuffix("x"))
        bid = f"bidPerGpu: {float(price) / gpus}, " if purchase.use_spot else ""
        call = "podRentInterruptable" if purchase.use_spot else "podFindAndDeployOnDemand"
        query = (
            f'mutation {{ {call}(input: {{ {bid}name: "{name}", imageName: "i", gpuTypeId: "{kind}",'
            f' cloudType: SECURE, gpuCount: {gpus}, containerDiskInGb: {purchase.disk_gb}, dataCenterId: "{zone}"'
            " }) { id } }"
        )
        return str((await self._create("POST", "/graphql", {"query": query}))["data"][call]["id"])

    async def _ask(self, query: str) -> Any:
        return (await self._call("POST", "/graphql", {"query": query}))["data"]

    async def _at_vast(self, name: str, purchase: Purchase) -> str:
        shown = (await self._call("GET", "/api/v1/instances/"))["instances"]
        if standing := [m["id"] for m in shown if m["label"] == name]:
            return str(standing[0])
        self._at("before the key is registered")
        if not await self._call("GET", "/api/v0/ssh/"):
            await self._call("POST", "/api/v0/ssh/", {"ssh_key": KEY})
        self._at("the key is registered")
        ask = int(purchase.pin["ask"])
        if not (await self._call("POST", "/api/v0/bundles/", {"id": {"eq": ask}}))["offers"]:
            raise NoCapacity(f"ask {ask} is gone")
        extra: Any = purchase.config.get("vast", {})
        body = {"client_id": "me", "image": "i", "label": name, "disk": purchase.disk_gb, "runtype": "ssh"}
        body |= extra.get("create_instance_kwargs", {})
        return str((await self._create("PUT", f"/api/v0/asks/{ask}/", body))["new_contract"])


class Host:
    """Host of the server: a new server replaces a dead one at the next access."""

    def __init__(self, make: Callable[[int], Server]) -> None:
        self._make = make
        self.servers: list[Server] = []

    @property
    def server(self) -> Server:
        if not self.servers or self.servers[-1].life.over:
            self.servers.append(self._make(len(self.servers) + 1))
        return self.servers[-1]

    def known(self, server_id: str) -> Server | None:
        return next((server for server in self.servers if server.id == server_id), None)

    def kill(self) -> None:
        self.server.kill()

    async def close(self) -> None:
        for server in self.servers:
            await server.close()


class PaperLauncher:
    """`providers.common.cloud.Launcher` that uses the host's server, which a later broker adopts."""

    def __init__(self, host: Host, life: Life, point: Point) -> None:
        self._host, self._life, self._point = host, life, point
        self._under_way: Counter[str] = Counter()

    @property
    def id(self) -> str:
        return self._host.server.id

    async def launch(self, name: InstanceName, purchase: Purchase, task: MachineTask) -> None:
        self._under_way[name] += 1
        try:
            self._point.reached("before the launch is asked for", self._life)
            work = self._host.server.begin(name, purchase, task)
            self._point.reached("the launch is asked for", self._life)
            await asyncio.wait([work])
            self._life.check()
            if work.cancelled():
                raise OutcomeUnknown(f"{name}: the server is gone")
            try:
                work.result()
            except aiohttp.ClientError as e:
                raise OutcomeUnknown(f"{name}: {type(e).__name__}") from None
            self._point.reached("the launch is answered", self._life)
        finally:
            self._under_way -= Counter({name: 1})

    async def liveness(self, launched_by: str, name: InstanceName) -> Liveness:
        if self._under_way[name]:
            return Liveness.ALIVE
        server = self._host.known(launched_by)
        if server is None:
            return Liveness.UNKNOWN
        return Liveness.ALIVE if name in server.running and not server.life.over else Liveness.DEAD

    async def started(self, name: InstanceName) -> bool | str:
        return True

    async def ssh(self, name: InstanceName, *, tty: bool) -> Sequence[str]:
        raise Rejected(f"{name} exists on paper")

    async def cancel(self, name: InstanceName) -> None:
        if (work := self._host.server.running.get(name)) is not None:
            work.cancel()

    async def forget(self, name: InstanceName) -> None:
        """Do nothing: the server keeps no records."""

    async def close(self) -> None:
        """Do nothing: the server continues."""
