"""Provider of a simulated cloud market.

Prices, faults and lifetimes are drawn from a seed. The machines are processes of this host or exist in memory.
"""

import asyncio
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from broker.domain.errors import NoCapacity, OutcomeUnknown, Rejected, Throttled
from broker.domain.ids import Installation, InstanceName, attempt_of
from broker.domain.instance import BootSpec, Caps, InstanceState, Liveness, Observed
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer
from broker.ports import Clock
from providers.local.launcher_locks import LauncherLocks
from providers.local.machine import Machine, MachineBackend
from providers.local.process_backend import has_trainer
from providers.simulated.config import SimulatedConfig
from providers.simulated.lifetimes import Lifetimes
from providers.simulated.market import NAME, offers, rng, uniform_draw


@dataclass(kw_only=True)
class _Lag:
    """New machines that listings omit, and destroyed machines that listings show, because of the list lag."""

    hidden: dict[str, float] = field(default_factory=dict)
    """Monotonic seconds until which listings omit a new machine, by its name."""
    ghosts: dict[str, tuple[Observed, float]] = field(default_factory=dict)
    """Listing of a destroyed machine, and the monotonic seconds until which it is shown, by the machine's name."""


class SimulatedProvider:
    """`ports.Provider` on a `MachineBackend`. No other provider uses the folder `state`."""

    name = NAME

    def __init__(
        self, config: SimulatedConfig, backend: MachineBackend, *, installation: Installation, state: Path, clock: Clock
    ) -> None:
        self._config = config
        self._backend = backend
        self._installation = installation
        self._clock = clock
        self._launchers = LauncherLocks(state / "launchers")
        self._lifetimes = Lifetimes(config, state)
        self._cores = len(os.sched_getaffinity(0))
        self._calls: dict[str, int] = {}
        self._sold: dict[str, str] = {}
        self._live: Counter[str] = Counter()
        self._lag = _Lag()
        self._late: set[asyncio.Task[None]] = set()

    @property
    def caps(self) -> Caps:
        virtual = self._config.body == "virtual"
        return Caps(
            spot=True,
            notice_s=self._config.notice_s,
            list_lag_s=self._config.faults.list_lag_s,
            teardown_s=1.0,
            boot_s=self._config.virtual.boot_s if virtual else self._config.boot_s,
            boot_deadline_s=300.0,
            trust="own",
            self_stop="os_shutdown",
            reaches_local_files=True,
            lists_all=True,
            runs_on_host=not virtual and not self._config.trusted,
            simulated=True,
            has_trainer=virtual or has_trainer(),
        )

    @property
    def identity(self) -> str | None:
        return None

    @property
    def dropped(self) -> Mapping[str, int]:
        return {}

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        self._maybe_fail("offers")
        return offers(self._config, ask, self._clock.now(), cores=self._cores)

    def launcher_id(self) -> str:
        return self._launchers.id

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        return self._launchers.liveness(launched_by, name)

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        if attempt_of(self._installation, name) is None:
            raise Rejected(f"{name} is not a name of installation {self._installation}")
        if boot.nodes != 1:
            raise Rejected(f"{boot.nodes} nodes: simulated machines cannot share a job; ask for 1 node")
        self._maybe_fail("create", name)
        faults = self._config.faults
        if self._hits(faults.no_capacity, "no capacity", name) or (name not in self._sold and self._full(offer.id)):
            raise NoCapacity(f"{offer.id} is sold out")
        if self._hits(faults.lying_timeout, "lying", name):
            self._create_late(name, offer, boot)
            raise OutcomeUnknown(f"create {name}: timed out")
        with self._launchers.creating(name):
            handle = await self._create(name, offer, boot)
        if self._hits(faults.lost_reply, "lost", name):
            raise OutcomeUnknown(f"create {name}: the reply was lost")
        return [handle]

    async def list(self) -> Sequence[Observed]:
        self._maybe_fail("list")
        now = self._clock.monotonic()
        visible = [o for o in await self._backend.machines() if now >= self._lag.hidden.get(o.handle.name, -math.inf)]
        names = {o.handle.name for o in visible}
        self._lag.ghosts = {name: ghost for name, ghost in self._lag.ghosts.items() if now < ghost[1]}
        return visible + [ghost for name, (ghost, _) in self._lag.ghosts.items() if name not in names]

    async def destroy(self, handle: Handle) -> None:
        if handle.provider != self.name or attempt_of(self._installation, handle.name) is None:
            raise Rejected(f"{handle.name} at {handle.provider} is not a machine of installation {self._installation}")
        self._maybe_fail("destroy", handle.name)
        if self._config.faults.list_lag_s:
            for observed in await self._backend.machines():
                if observed.handle.name == handle.name and observed.state is not InstanceState.GONE:
                    ghost = replace(observed, state=InstanceState.RUNNING)
                    self._lag.ghosts[handle.name] = (ghost, self._clock.monotonic() + self._lag_s("ghost", handle.name))
        if (offer_id := self._sold.pop(handle.name, None)) is not None:
            self._live[offer_id] -= 1
        self._lag.hidden.pop(handle.name, None)
        await self._backend.destroy(handle.name)

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        """Do nothing: the listing has all facts about the machine."""

    async def cancel(self, name: InstanceName) -> None:
        """Do nothing: a create is too short to be cancelled."""

    async def reach(self, handle: Handle, command: Sequence[str], *, tty: bool) -> Sequence[str]:
        return self._backend.reach(handle.name, command)

    async def check(self) -> str | None:
        return None

    async def close(self) -> None:
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._backend.close()
        self._launchers.close()

    async def _create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Handle:
        if name not in self._sold:
            self._sold[name] = offer.id
            self._live[offer.id] += 1
            if self._config.faults.list_lag_s:
                self._lag.hidden[name] = self._clock.monotonic() + self._lag_s("hidden", name)
        wrong = uniform_draw(self._config.seed, "wrong machine", name) < self._config.faults.wrong_machine
        machine = Machine(
            name=name,
            provider=self.name,
            region=offer.region,
            accelerator=_other_than(offer.accelerator) if wrong else offer.accelerator,
            gpus=offer.gpus,
            spot=offer.spot,
            lifetime_s=self._lifetimes.of(name, offer),
            notice_s=self._config.notice_s,
        )
        return await self._backend.start(machine, boot)

    def _create_late(self, name: InstanceName, offer: Offer, boot: BootSpec) -> None:
        """Create the machine `lying_delay_s` after the caller's time-out. The launcher counts as ALIVE meanwhile."""
        stack = ExitStack()
        stack.enter_context(self._launchers.creating(name))

        async def late() -> None:
            with stack:
                await self._clock.sleep(self._config.faults.lying_delay_s)
                await self._create(name, offer, boot)

        task = asyncio.create_task(late(), name=f"late create of {name}")
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def _full(self, offer_id: str) -> bool:
        return self._live[offer_id] >= self._config.capacity

    def _maybe_fail(self, call: str, *purpose: str) -> None:
        if self._hits(self._config.faults.throttled, "429", call, *purpose):
            raise Throttled(f"{call}: 429 too many requests", after_s=1.0)
        if self._hits(self._config.faults.server_error, "5xx", call, *purpose):
            raise OutcomeUnknown(f"{call}: 503 service unavailable")

    def _hits(self, share: float, *purpose: str) -> bool:
        """Return True with probability `share`. The n-th draw for one purpose does not depend on other purposes."""
        if not share:
            return False
        key = "/".join(purpose)
        self._calls[key] = self._calls.get(key, 0) + 1
        return uniform_draw(self._config.seed, key, self._calls[key]) < share

    def _lag_s(self, *purpose: str) -> float:
        return rng(self._config.seed, "lag", *purpose).uniform(0.0, self._config.faults.list_lag_s)


def _other_than(accelerator: str) -> str:
    return "l4" if accelerator != "l4" else "a10g"
