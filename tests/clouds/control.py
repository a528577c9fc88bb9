"""Control API by which tests set the clouds' behaviour: methods, and `POST /_ctl/<method>` with a JSON object."""

import asyncio
import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from decimal import Decimal
from typing import Any

from aiohttp import web

from tests.clouds.bill import Bill
from tests.clouds.faults import Fault, Faults
from tests.clouds.lambda_api import LambdaApi
from tests.clouds.runpod_api import RunPodApi
from tests.clouds.runpod_market import Pool
from tests.clouds.runpod_rest import Api, RunPodRest
from tests.clouds.state import CloudName, Rented, World
from tests.clouds.vast_api import VastApi
from tests.clouds.vast_market import VastOffer

DOORS = frozenset(
    {
        "capacity", "price", "preempt", "resume", "kill", "status", "sell_instead", "fail", "heal", "list_lag",
        "retire", "teardown", "hold_boots", "release_boots",
    }
)  # fmt: skip


class Control:
    """Test control of all emulated clouds. `what` is a Lambda type, a RunPod GPU id, or a Vast GPU name or offer id."""

    def __init__(
        self, world: World, faults: Faults, lambdas: LambdaApi, runpod: RunPodApi, rest: RunPodRest, vast: VastApi
    ) -> None:
        self._world, self._faults, self._rest = world, faults, rest
        self._lambda, self._runpod, self._vast = lambdas, runpod, vast

    # --------------------------------------------------------------------------------------------------------- market

    def capacity(self, cloud: CloudName, what: str, free: int, where: str | None = None) -> None:
        """Set the free capacity: machines at Lambda and Vast, GPUs at RunPod; `where`: in one place."""
        match cloud:
            case "lambda":
                row = self._lambda.types[what]
                row.free = dict.fromkeys(row.free if where is None else [where], free) | (
                    {} if where is None else {name: n for name, n in row.free.items() if name != where}
                )
            case "runpod":
                for pool in self._pools(what):
                    if where in {None, pool.data_center}:
                        pool.free = free
            case "vast":
                for n, offer in enumerate(self._vast_offers(what)):
                    offer.rented = n >= free

    def price(
        self, cloud: CloudName, what: str, usd_per_hour: float, spot: bool = False, at_next_sale: bool = False
    ) -> None:
        """Set a price (RunPod: of one GPU; spot: the lowest bid); `at_next_sale`: only at the next purchase."""

        def change() -> None:
            match cloud:
                case "lambda":
                    self._lambda.types[what].cents = round(usd_per_hour * 100)
                case "runpod":
                    for pool in self._pools(what):
                        setattr(pool, "floor" if spot else "price", usd_per_hour)
                case "vast":
                    for offer in self._vast_offers(what):
                        setattr(offer, "min_bid" if spot else "dph_base", usd_per_hour)

        if at_next_sale:
            self._world.at_next_sale(cloud, change)
        else:
            change()

    def _pools(self, what: str) -> Sequence[Pool]:
        found = [pool for pool in self._runpod.pools if pool.gpu == what]
        if not found:
            raise KeyError(f"RunPod has no {what}")
        return found

    def _vast_offers(self, what: str) -> Sequence[VastOffer]:
        offers = [offer for offer in self._vast.offers.values() if what in {offer.gpu, str(offer.id)}]
        if not offers:
            raise KeyError(f"Vast has no {what}")
        return offers

    def sell_instead(self, cloud: CloudName, what: str) -> None:
        """Sell `what` (Vast: an offer's id) to the next buyer instead of its choice, at the price of its choice."""
        match cloud:
            case "lambda":
                self._lambda.sell_instead = what
            case "runpod":
                self._runpod.sell_instead = what
            case "vast":
                self._vast.sell_instead = int(what)

    # ------------------------------------------------------------------------------------------------------- machines

    async def preempt(self, machine_id: str, notice_s: float = 0.0) -> None:
        """Take a machine away: RunPod's is EXITED, Vast's stopped, and both stay ours; Lambda's is terminated."""
        rented = self._rented(machine_id)
        if notice_s > 0:
            self._world.spawn(self._preempt_later(rented, notice_s))
        else:
            await self._take(rented)

    async def _preempt_later(self, rented: Rented, notice_s: float) -> None:
        await asyncio.sleep(notice_s)
        await self._take(rented)

    async def _take(self, rented: Rented) -> None:
        match rented.cloud:
            case "lambda":
                await self._world.destroy(rented, "terminated", "evicted")
            case "runpod":
                await self._world.stop(rented, "EXITED", "evicted")
            case "vast":
                rented.facts["state"] = "stopped"
                await self._world.stop(rented, "stopped", "evicted")

    async def resume(self, machine_id: str) -> None:
        """Start a preempted machine again, as Vast does by itself once a bid wins again."""
        rented = self._rented(machine_id)
        starting, running = ("loading", "running") if rented.cloud == "vast" else ("CREATED", "RUNNING")
        rented.facts["state"] = "running"
        await self._world.resume(rented, starting=starting, running=running)

    async def kill(self, machine_id: str) -> None:
        """Kill the machine without the cloud noticing, so that it still bills."""
        machine = self._rented(machine_id).machine
        if machine is not None:
            await machine.kill()

    def status(self, machine_id: str, status: str) -> None:
        """Set the status that the cloud reports of a machine, for example an undocumented one."""
        self._rented(machine_id).status = status

    def hold_boots(self) -> None:
        """Delay the boots of new machines until `release_boots`."""
        self._world.boots.clear()

    def release_boots(self) -> None:
        self._world.boots.set()

    def _rented(self, machine_id: str) -> Rented:
        return self._world.rented[machine_id]

    # ---------------------------------------------------------------------------------------------------------- calls

    def fail(self, **fault: Any) -> None:
        """Arm a `Fault` for the next calls; see there for the fields. Raises KeyError for an unknown call."""
        armed = Fault(**fault)
        known = {
            "lambda": self._lambda.calls, "runpod": {*self._runpod.calls, *self._rest.calls}, "vast": self._vast.calls,
        }[armed.cloud]  # fmt: skip
        if armed.call not in {"*", *known}:
            raise KeyError(f"{armed.cloud} has no call {armed.call}; it has {sorted(known)}")
        self._faults.arm(armed)

    def heal(self) -> None:
        """Remove all armed faults, and fail the calls that hang."""
        self._faults.disarm()

    def retire(self, api: Api, in_s: float = 0.0, status: int = 410) -> None:
        """End RunPod's `rest` or `graphql` in some seconds: each later call is answered with the status."""
        self._rest.retire(api, self._world.now() + timedelta(seconds=in_s), status)

    def list_lag(self, cloud: CloudName, seconds: int) -> None:
        self._world.list_lag_s[cloud] = seconds

    def teardown(self, cloud: CloudName, seconds: int) -> None:
        self._world.teardown_s[cloud] = seconds

    # ----------------------------------------------------------------------------------------------------------- HTTP

    def routes(self) -> Sequence[web.RouteDef]:
        return [web.get("/_ctl/state", self._state), web.post("/_ctl/{door}", self._door)]

    async def _door(self, request: web.Request) -> web.Response:
        door = request.match_info["door"]
        if door not in DOORS:
            return web.json_response({"error": f"there is no {door}; there are {sorted(DOORS)}"}, status=404)
        try:
            done = getattr(self, door)(**(await request.json() if request.can_read_body else {}))
            if inspect.isawaitable(done):
                await done
        except (TypeError, KeyError, ValueError) as e:
            return web.json_response({"error": f"{type(e).__name__}: {e}"}, status=400)
        return web.json_response({})

    async def _state(self, _: web.Request) -> web.Response:
        return web.json_response(self.state(), dumps=_dumps)

    def state(self) -> dict[str, Any]:
        """Return machines, events, calls, violations and the bill."""
        bill = Bill(self._world.events, self._world.now())
        machines = [
            {
                "id": r.id, "cloud": r.cloud, "name": r.name, "status": r.status, "gpu": r.gpu, "gpus": r.gpus,
                "spot": r.spot, "usd_per_hour": r.usd_per_hour, "ip": r.spec.ip, "ssh_port": r.spec.ssh_port,
                "ours": r.gone_at is None, "alive": r.machine is not None and r.machine.alive,
            }
            for r in self._world.rented.values()
        ]  # fmt: skip
        return {
            "machines": machines,
            "events": [asdict(event) for event in self._world.events],
            "calls": [asdict(call) for call in self._world.calls],
            "violations": self._world.violations,
            "bill": bill.by_name(),
            "open": list(bill.open()),
        }


def _dumps(value: Any) -> str:
    return json.dumps(value, default=lambda other: str(other) if isinstance(other, Decimal) else other.isoformat())
