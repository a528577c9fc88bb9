"""Between the controllers and a cloud: no faster than it takes, not before it asked for, no waiting for a dead one.

One gate a cloud, so that nothing of one is in the way of another. What a gate refuses is `Throttled`: nothing was done.
"""

import asyncio
import logging
import math
from bisect import insort
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, wait_random_exponential

from broker.domain.errors import OutcomeUnknown, ProviderError, Throttled
from broker.domain.ids import InstanceName
from broker.domain.instance import BootSpec, Caps, Liveness, Observed
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer
from broker.ports import Clock, Provider
from broker.runtime.circuit_breaker import BreakerState, after_answer, after_silence, after_throttled
from broker.runtime.token_bucket import Bucket, TokenBucketRate, take

log = logging.getLogger(__name__)
T = TypeVar("T")

BURST_S = 4.0
"""So many seconds' worth of calls may come at once."""
URGENT_S = 15.0
"""Longest back-off of our own for listings and destroys, beyond what the cloud asks for: machines bill meanwhile."""
YIELDS_S = 6.0
"""So long after the pause that a refusal brought, destroys go that the cloud has taken before: else most calls that it
lets through are of machines that are gone already. Longer than whoever has one that was never taken looks away."""
GRAIN_S = 0.001
"""Least wait for a turn: by less, a clock may not move."""
_FULL_JITTER = wait_random_exponential(multiplier=1.0, max=60.0)


def full_jitter_s(failures: int) -> float:
    """Uniform between 0 and 1, 2, 4 … 60 s."""
    state = RetryCallState(AsyncRetrying(), None, (), {})
    state.attempt_number = failures
    return _FULL_JITTER(state)


Silence = tuple[type[BaseException], ...]
_UNHEARD: Silence = (OutcomeUnknown, TimeoutError)
"""A call that is cut is not among them: its caller's time was over, which may have begun long before the call."""


class CallPriority(IntEnum):
    """Who goes first; of the same, who came first."""

    LIST = 0
    """One shows all machines, and proves their absence."""
    END = 1
    """A destroy that the cloud has not taken yet: the machine bills."""
    OTHER = 2
    REPEATED_DESTROY = 3
    """A destroy that is repeated until the machine is absent: there is no end of them."""

    @property
    def kind(self) -> "CallPriority":
        """What waits together when the cloud wants a pause. Clouds count calls by what they do: one that will launch
        nothing now may well end a bill.
        """
        return CallPriority.END if self is CallPriority.REPEATED_DESTROY else self


@dataclass(order=True)
class _QueueEntry:
    """In the queue of a gate."""

    rank: CallPriority
    number: int
    first: asyncio.Event = field(default_factory=asyncio.Event, compare=False)


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    waiting: int = 256
    """Calls that wait for their turn; more are refused."""
    probe_s: float = 10.0
    """How long a cloud that did not answer may take to show that it is back."""


class RateLimitedProvider:
    """`ports.Provider` around another. `back_off_s`: the pause after so many failures in a row."""

    def __init__(
        self,
        provider: Provider,
        clock: Clock,
        limits: GateLimits = GateLimits(),
        back_off_s: Callable[[int], float] = full_jitter_s,
    ) -> None:
        self._provider, self._clock, self._limits, self._back_off_s = provider, clock, limits, back_off_s
        self._rate = TokenBucketRate(
            per_s=provider.caps.calls_per_s, burst=math.ceil(BURST_S * provider.caps.calls_per_s)
        )
        self._paces = {kind: BreakerState() for kind in CallPriority if kind is kind.kind}
        """A refusal holds up its own kind, and whatever is no listing and no destroy; of silence the latter tells."""
        self._bucket: Bucket | None = None
        self._queue: list[_QueueEntry] = []
        self._numbers = count()
        self._destroyed: set[str] = set()
        self._probe: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------------ the rules

    async def _turn(self, rank: CallPriority) -> None:
        """Raises Throttled where it will not come, or not soon."""
        if len(self._queue) >= self._limits.waiting:
            raise Throttled(f"{self.name}: {len(self._queue)} calls wait for their turn already", after_s=1.0)
        place = _QueueEntry(rank, next(self._numbers))
        insort(self._queue, place)
        try:
            while True:
                yields_s = YIELDS_S if rank is CallPriority.REPEATED_DESTROY else 0.0
                if pause_s := self._paces[rank.kind].wait_s(self._clock.monotonic(), yields_s=yields_s):
                    raise Throttled(f"{self.name} wants no call for another {pause_s:.0f} s", after_s=pause_s)
                if self._queue[0] is not place:
                    place.first.clear()
                    await place.first.wait()
                    continue
                self._bucket, wait_s = take(self._bucket, self._rate, self._clock.monotonic())
                if not wait_s:
                    return
                await self._clock.sleep(max(GRAIN_S, wait_s))
        finally:
            self._queue.remove(place)
            if self._queue:
                self._queue[0].first.set()

    @asynccontextmanager
    async def _asking(self, rank: CallPriority, silence: Silence = _UNHEARD) -> AsyncIterator[None]:
        """One call, and what its end says of the cloud. `silence`: the ends that mean it does not answer."""
        try:
            yield
        except Throttled as e:
            now, jitter_s = self._clock.monotonic(), self._back_off_s(self._paces[rank.kind].throttled + 1)
            if rank is not CallPriority.OTHER:
                jitter_s = min(URGENT_S, jitter_s)
            for kind in {rank.kind, CallPriority.OTHER}:
                self._paces[kind] = after_throttled(self._paces[kind], now, asked_s=e.after_s, jitter_s=jitter_s)
            raise
        except (OutcomeUnknown, TimeoutError, asyncio.CancelledError) as e:
            if isinstance(e, silence):
                self._fell_silent()
            raise
        except ProviderError:
            self._answered(rank)
            raise
        else:
            self._answered(rank)

    def _answered(self, rank: CallPriority) -> None:
        for kind in {rank.kind, CallPriority.OTHER}:
            self._paces[kind] = after_answer(self._paces[kind])

    @property
    def _broken(self) -> bool:
        return self._paces[CallPriority.OTHER].broken

    def _fell_silent(self) -> None:
        pace = self._paces[CallPriority.OTHER] = after_silence(self._paces[CallPriority.OTHER])
        if pace.broken and (self._probe is None or self._probe.done()):
            log.warning("%s: %d calls without an answer; it is tried in the background", self.name, pace.silent)
            self._probe = asyncio.create_task(self._try(), name=f"is {self.name} back?")

    async def _try(self) -> None:
        """Until it answers: nobody else waits for it."""
        tries = 0
        while self._broken:
            tries += 1
            pause_s = self._paces[CallPriority.LIST].wait_s(self._clock.monotonic())
            await self._clock.sleep(max(1.0, min(URGENT_S, self._back_off_s(tries)), pause_s))
            try:
                async with asyncio.timeout(self._limits.probe_s), self._asking(CallPriority.LIST):
                    await self._provider.list()
            except (ProviderError, TimeoutError):
                continue
            except Exception:  # an answer that our code breaks at, as those of a cloud that comes back may be
                log.exception("%s: trying whether it is back", self.name)
        log.warning("%s answers again", self.name)

    async def _ask(
        self, call: Callable[[], Awaitable[T]], *, rank: CallPriority = CallPriority.OTHER, silence: Silence = _UNHEARD
    ) -> T:
        if self._broken:
            raise Throttled(f"{self.name} does not answer; it is tried in the background", after_s=5.0)
        await self._turn(rank)
        async with self._asking(rank, silence):
            return await call()

    # ------------------------------------------------------------------------------------------------- ports.Provider

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def caps(self) -> Caps:
        return self._provider.caps

    @property
    def dropped(self) -> Mapping[str, int]:
        return self._provider.dropped

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        return await self._ask(lambda: self._provider.offers(ask))

    def launcher_id(self) -> str:
        return self._provider.launcher_id()

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        return await self._provider.launcher(launched_by, name)

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        """Where the cloud cannot be watched, nothing is bought. Its silence may be its launcher's."""
        return await self._ask(lambda: self._provider.create(name, offer, boot), silence=())

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        await self._ask(lambda: self._provider.confirm(handles, offer, boot))

    async def cancel(self, name: InstanceName) -> None:
        await self._provider.cancel(name)

    async def list(self) -> Sequence[Observed]:
        """Whoever cuts this has waited for it, and for nothing else."""
        return await self._ask(self._provider.list, rank=CallPriority.LIST, silence=(*_UNHEARD, asyncio.CancelledError))

    async def destroy(self, handle: Handle) -> None:
        """Asked for also of a cloud that does not answer: it ends a bill."""
        rank = CallPriority.REPEATED_DESTROY if handle.id in self._destroyed else CallPriority.END
        await self._turn(rank)
        async with self._asking(rank):
            await self._provider.destroy(handle)
        self._destroyed.add(handle.id)

    async def reach(self, handle: Handle, command: Sequence[str], *, tty: bool) -> Sequence[str]:
        return await self._provider.reach(handle, command, tty=tty)

    async def check(self) -> str | None:
        """A person asks, so the cloud is asked."""
        return await self._provider.check()

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self._provider.close()


def gated(providers: Mapping[str, Provider], rented: Container[str], clock: Clock) -> dict[str, Provider]:
    """Each rented cloud behind a gate of its own; machines of this host need none."""
    return {name: RateLimitedProvider(one, clock) if name in rented else one for name, one in providers.items()}
