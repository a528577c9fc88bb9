"""Rate limiter, Retry-After handling and circuit breaker in front of one Provider.

Each cloud has its own gate, so that clouds do not delay each other. A gate refuses a call with `Throttled`: the call
was not sent.
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
"""Seconds of the average rate that may be called at once."""
URGENT_S = 15.0
"""Longest back-off in seconds that is added to the cloud's pause for listings and destroys: machines bill meanwhile."""
REPEATED_DESTROY_DELAY_S = 6.0
"""Extra delay in seconds for repeated destroys after throttling, so that first destroys and listings use the remaining
quota. It exceeds the interval at which an unsent destroy is tried again."""
GRAIN_S = 0.001
"""Shortest wait for a turn in seconds, because a clock may not advance by less."""
_FULL_JITTER = wait_random_exponential(multiplier=1.0, max=60.0)


def full_jitter_s(failures: int) -> float:
    """Return a back-off in seconds, uniform between 0 and 1, 2, 4 … 60 s."""
    state = RetryCallState(AsyncRetrying(), None, (), {})
    state.attempt_number = failures
    return _FULL_JITTER(state)


Silence = tuple[type[BaseException], ...]
_NO_ANSWER: Silence = (OutcomeUnknown, TimeoutError)
"""Errors that mean that the cloud does not answer. A cancelled call does not mean this, because the caller's timeout
may have begun long before the call."""


class CallPriority(IntEnum):
    """Order of waiting calls; calls of one priority go in order of arrival."""

    LIST = 0
    """A listing: it shows all machines, and proves that machines are absent."""
    END = 1
    """A destroy that the cloud has not accepted yet: the machine bills."""
    OTHER = 2
    REPEATED_DESTROY = 3
    """A destroy that is repeated until the machine is absent: there may be many."""

    @property
    def kind(self) -> "CallPriority":
        """Return the group of calls that pauses together after a refusal.

        Clouds count calls by kind: a cloud that refuses launches may still accept destroys.
        """
        return CallPriority.END if self is CallPriority.REPEATED_DESTROY else self


@dataclass(order=True)
class _QueueEntry:
    """Call that waits in the queue of a gate."""

    rank: CallPriority
    number: int
    first: asyncio.Event = field(default_factory=asyncio.Event, compare=False)


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """Limits of a gate."""

    waiting: int = 256
    """Calls that may wait for their turn; further calls are refused."""
    probe_s: float = 10.0
    """Timeout in seconds of a probe of a cloud that did not answer."""


class RateLimitedProvider:
    """`ports.Provider` that limits the calls of the wrapped provider.

    `back_off_s` returns the pause after a number of consecutive failures.
    """

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
        self._breakers = {kind: BreakerState() for kind in CallPriority if kind is kind.kind}
        """Breaker states by kind. A refusal pauses its own kind and OTHER. OTHER also counts missing answers."""
        self._bucket: Bucket | None = None
        self._queue: list[_QueueEntry] = []
        self._numbers = count()
        self._destroyed: set[str] = set()
        self._probe: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------------ rules

    async def _wait_turn(self, rank: CallPriority) -> None:
        """Wait for the turn of a call. Raises Throttled if the queue is full or the cloud asked for a pause."""
        if len(self._queue) >= self._limits.waiting:
            raise Throttled(f"{self.name}: {len(self._queue)} calls are already waiting", after_s=1.0)
        place = _QueueEntry(rank, next(self._numbers))
        insort(self._queue, place)
        try:
            while True:
                yields_s = REPEATED_DESTROY_DELAY_S if rank is CallPriority.REPEATED_DESTROY else 0.0
                if pause_s := self._breakers[rank.kind].wait_s(self._clock.monotonic(), yields_s=yields_s):
                    raise Throttled(f"{self.name} accepts no call for another {pause_s:.0f} s", after_s=pause_s)
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
    async def _recorded(self, rank: CallPriority, silence: Silence = _NO_ANSWER) -> AsyncIterator[None]:
        """Update the breaker by the end of one call. `silence`: errors that mean that the cloud does not answer."""
        try:
            yield
        except Throttled as e:
            now, jitter_s = self._clock.monotonic(), self._back_off_s(self._breakers[rank.kind].throttled + 1)
            if rank is not CallPriority.OTHER:
                jitter_s = min(URGENT_S, jitter_s)
            for kind in {rank.kind, CallPriority.OTHER}:
                self._breakers[kind] = after_throttled(self._breakers[kind], now, asked_s=e.after_s, jitter_s=jitter_s)
            raise
        except (OutcomeUnknown, TimeoutError, asyncio.CancelledError) as e:
            if isinstance(e, silence):
                self._record_no_answer()
            raise
        except ProviderError:
            self._record_answer(rank)
            raise
        else:
            self._record_answer(rank)

    def _record_answer(self, rank: CallPriority) -> None:
        for kind in {rank.kind, CallPriority.OTHER}:
            self._breakers[kind] = after_answer(self._breakers[kind])

    @property
    def _broken(self) -> bool:
        return self._breakers[CallPriority.OTHER].broken

    def _record_no_answer(self) -> None:
        state = self._breakers[CallPriority.OTHER] = after_silence(self._breakers[CallPriority.OTHER])
        if state.broken and (self._probe is None or self._probe.done()):
            log.warning("%s: %d calls without an answer; probing it in the background", self.name, state.silent)
            self._probe = asyncio.create_task(self._probe_until_answer(), name=f"is {self.name} back?")

    async def _probe_until_answer(self) -> None:
        """Probe the cloud until it answers; all other calls fail at once meanwhile."""
        tries = 0
        while self._broken:
            tries += 1
            pause_s = self._breakers[CallPriority.LIST].wait_s(self._clock.monotonic())
            await self._clock.sleep(max(1.0, min(URGENT_S, self._back_off_s(tries)), pause_s))
            try:
                async with asyncio.timeout(self._limits.probe_s), self._recorded(CallPriority.LIST):
                    await self._provider.list()
            except (ProviderError, TimeoutError):
                continue
            except Exception:  # a recovering cloud may send answers that the provider cannot parse
                log.exception("%s: the probe failed", self.name)
        log.warning("%s answers again", self.name)

    async def _call(
        self,
        call: Callable[[], Awaitable[T]],
        *,
        rank: CallPriority = CallPriority.OTHER,
        silence: Silence = _NO_ANSWER,
    ) -> T:
        if self._broken:
            raise Throttled(f"{self.name} does not answer; it is probed in the background", after_s=5.0)
        await self._wait_turn(rank)
        async with self._recorded(rank, silence):
            return await call()

    # ------------------------------------------------------------------------------------------------- ports.Provider

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def caps(self) -> Caps:
        return self._provider.caps

    @property
    def identity(self) -> str | None:
        return self._provider.identity

    @property
    def dropped(self) -> Mapping[str, int]:
        return self._provider.dropped

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        return await self._call(lambda: self._provider.offers(ask))

    def launcher_id(self) -> str:
        return self._provider.launcher_id()

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        return await self._provider.launcher(launched_by, name)

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        """Create machines, unless the breaker is open. Missing answers are not counted: the launcher may cause them."""
        return await self._call(lambda: self._provider.create(name, offer, boot), silence=())

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        await self._call(lambda: self._provider.confirm(handles, offer, boot))

    async def cancel(self, name: InstanceName) -> None:
        await self._provider.cancel(name)

    async def list(self) -> Sequence[Observed]:
        """List all machines. A cancelled call counts as a missing answer: its caller waited for this call only."""
        return await self._call(
            self._provider.list, rank=CallPriority.LIST, silence=(*_NO_ANSWER, asyncio.CancelledError)
        )

    async def destroy(self, handle: Handle) -> None:
        """Destroy a machine, even if the cloud does not answer, because that ends a bill."""
        rank = CallPriority.REPEATED_DESTROY if handle.id in self._destroyed else CallPriority.END
        await self._wait_turn(rank)
        async with self._recorded(rank):
            await self._provider.destroy(handle)
        self._destroyed.add(handle.id)

    async def reach(self, handle: Handle, command: Sequence[str], *, tty: bool) -> Sequence[str]:
        return await self._provider.reach(handle, command, tty=tty)

    async def check(self) -> str | None:
        """Check the cloud without the gate, because a user waits for the answer."""
        return await self._provider.check()

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self._provider.close()


def gated(providers: Mapping[str, Provider], rented: Container[str], clock: Clock) -> dict[str, Provider]:
    """Put each rented cloud behind its own gate; machines of this host need none."""
    return {
        name: RateLimitedProvider(provider, clock) if name in rented else provider
        for name, provider in providers.items()
    }
