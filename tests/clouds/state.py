"""State of an emulated account: its machines, a log of all billable events, and calls that no real cloud would
accept.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

from tests.clouds.machine import Machine, Machines, MachineSpec

CloudName = Literal["lambda", "runpod", "vast", "aws"]
Kind = Literal["created", "running", "price", "evicted", "stopped", "resumed", "destroyed"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Change of a machine's rates at `at`: `usd_per_hour` for computing, and `storage_usd_per_hour` for the disk."""

    at: datetime
    cloud: CloudName
    id: str
    name: str
    kind: Kind
    usd_per_hour: Decimal
    storage_usd_per_hour: Decimal


@dataclass(frozen=True, kw_only=True)
class Call:
    """Received call of an API."""

    at: datetime
    cloud: CloudName
    call: str
    status: int


@dataclass(kw_only=True, eq=False)
class Rented:
    """One machine of the account."""

    id: str
    cloud: CloudName
    name: str
    gpu: str
    """Sold GPU in the cloud's terms."""
    gpus: int
    spot: bool
    usd_per_hour: Decimal
    """Price while the machine computes, as its cloud lists it."""
    disk_usd_per_hour: Decimal = Decimal(0)
    """Price of the disk while the machine computes, in addition to the listed price."""
    storage_usd_per_hour: Decimal = Decimal(0)
    """Price of storage while the machine exists, computing or not."""
    status: str
    """Status in the cloud's own terms."""
    created_at: datetime
    spec: MachineSpec
    machine: Machine | None = None
    gone_at: datetime | None = None
    """Time of the destruction; listings may show the machine for a while longer."""
    request: Mapping[str, Any]
    """The whole create request, which tests search for secrets."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further properties that the cloud reports of the machine."""
    turn: int = 0
    """Number of stops, resumes and ends. A boot that ends with another number than it began with is ignored."""


class World:
    """Account with all clouds. Every change of state goes through this class, so that the bill is complete."""

    def __init__(
        self, machines: Machines, *, api_key: str = "test-key", now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self.machines, self.api_key, self.now = machines, api_key, now
        self.rented: dict[str, Rented] = {}
        self.account = 1
        """Account of the current key."""
        self._owners: dict[str, int] = {}
        self.events: list[Event] = []
        self.calls: list[Call] = []
        self.violations: list[str] = []
        self.list_lag_s: Counter[str] = Counter()
        """Listing delay in seconds, by cloud: a new machine is not listed yet, and a destroyed one still is."""
        self.teardown_s: Counter[str] = Counter()
        """Seconds during which a destroyed machine is listed as being terminated, by cloud."""
        self.boots = asyncio.Event()
        """Event that boots wait for; while it is cleared, no machine comes up."""
        self.boots.set()
        self._changed = asyncio.Event()
        self._before_sale: dict[str, list[Callable[[], None]]] = {}
        self._net = secrets.randbelow(240) + 10
        self._made = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------------------- renting

    def address(self) -> tuple[str, int]:
        """Return a loopback address of its own, and a number that no other machine of this world has."""
        self._made += 1
        return f"127.{self._net}.{self._made // 250}.{self._made % 250 + 1}", self._made

    def at_next_sale(self, cloud: CloudName, change: Callable[[], None]) -> None:
        """Call `change` when the next create call has come in and before it is carried out."""
        self._before_sale.setdefault(cloud, []).append(change)

    def sale(self, cloud: CloudName) -> None:
        """Record that a create call came in."""
        for change in self._before_sale.pop(cloud, []):
            change()

    async def rent(self, rented: Rented, *, billed_from: Literal["created", "running"], running: str) -> None:
        """Record the machine and boot it; its status becomes `running` (in the cloud's words) once it is up."""
        self.rented[rented.id] = rented
        self._owners[rented.id] = self.account
        self._log(rented, "created", computing=billed_from == "created")
        self.spawn(self._boot(rented, running))

    async def _boot(self, rented: Rented, running: str) -> None:
        turn = rented.turn
        await self.boots.wait()
        if rented.turn != turn:
            return
        machine = rented.machine = await self.machines.boot(rented.spec)
        try:
            await machine.ready()
        except RuntimeError as e:
            rented.facts["boot_failed"] = str(e)
            return
        if rented.turn == turn:
            rented.status = running
            self._log(rented, "running", computing=True)
        elif rented.machine is machine:
            await machine.kill()

    async def stop(self, rented: Rented, status: str, kind: Literal["evicted", "stopped"]) -> None:
        """Stop the machine; it stays rented, and its disk may still cost money."""
        if rented.gone_at is not None:
            return
        rented.turn += 1
        rented.status = status
        self._log(rented, kind, computing=False)
        if rented.machine is not None:
            await rented.machine.kill()

    async def resume(
        self, rented: Rented, *, starting: str, running: str, billed_from: Literal["created", "running"] = "running"
    ) -> None:
        """Start a stopped machine again, here with an empty disk. `billed_from`: "created" is now."""
        rented.turn += 1
        rented.status = starting
        self._log(rented, "resumed", computing=billed_from == "created")
        self.spawn(self._boot(rented, running))

    async def destroy(self, rented: Rented, status: str, kind: Literal["evicted", "destroyed"] = "destroyed") -> None:
        """End the machine and its costs. A second call does nothing."""
        if rented.gone_at is not None:
            return
        rented.turn += 1
        rented.gone_at = self.now()
        rented.status = status
        self._log(rented, kind, computing=False, stored=False)
        if rented.machine is not None:
            await rented.machine.kill()

    def reprice(self, rented: Rented, usd_per_hour: Decimal) -> None:
        """Change the machine's rate as of now."""
        computing = self.events_of(rented.id)[-1].usd_per_hour > 0
        rented.usd_per_hour = usd_per_hour
        self._log(rented, "price", computing=computing)

    def _log(self, rented: Rented, kind: Kind, *, computing: bool, stored: bool = True) -> None:
        event = Event(
            at=rented.gone_at or self.now(), cloud=rented.cloud, id=rented.id, name=rented.name, kind=kind,
            usd_per_hour=rented.usd_per_hour + rented.disk_usd_per_hour if computing else Decimal(0),
            storage_usd_per_hour=rented.storage_usd_per_hour if stored else Decimal(0),
        )  # fmt: skip
        self.events.append(event)
        self._changed.set()

    # ------------------------------------------------------------------------------------------------------- looking

    def listed(self, cloud: CloudName) -> Sequence[Rented]:
        """Return the machines that a listing shows now, lag included; destroyed ones are listed until their lag and
        teardown end.
        """
        now, lag = self.now(), timedelta(seconds=self.list_lag_s[cloud])
        linger = lag + timedelta(seconds=self.teardown_s[cloud])
        return [
            r for r in self.rented.values()
            if (r.cloud, self._owners[r.id]) == (cloud, self.account)
            and r.created_at + lag <= now and (r.gone_at is None or now < r.gone_at + linger)
        ]  # fmt: skip

    def owned(self, cloud: CloudName, machine_id: str) -> Rented | None:
        """Return a machine that was not destroyed, regardless of listings."""
        rented = self.rented.get(machine_id)
        ours = rented is not None and rented.cloud == cloud and self._owners[machine_id] == self.account
        return rented if rented is not None and ours and rented.gone_at is None else None

    def named(self, prefix: str) -> Sequence[Rented]:
        """Return every machine ever created whose name begins with `prefix`; SkyPilot adds a suffix to the name."""
        return [r for r in self.rented.values() if r.name.startswith(prefix)]

    async def reach(self, machine_id: str, status: str, *, within_s: float = 60.0) -> Rented:
        """Wait until a machine has a status. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while self.rented[machine_id].status != status:
                self._changed.clear()
                await self._changed.wait()
        return self.rented[machine_id]

    def events_of(self, machine_id: str) -> Sequence[Event]:
        return [e for e in self.events if e.id == machine_id]

    def violate(self, cloud: str, what: str) -> None:
        """Record a call that the real API does not know, so that the test fails at its end."""
        self.violations.append(f"{cloud}: {what}")

    # ------------------------------------------------------------------------------------------------------- the end

    def spawn(self, work: Any) -> None:
        """Run a coroutine in the background, until it is done or the world is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.machines.close()
