"""Lists the clouds of a process, each at most once at a time, and keeps the answers.

Steps: skip a cloud whose latest listing is young enough, list it, store the answer and its history, forget old answers.
A cloud that does not answer is remembered with its error, since other brokers may reach it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from broker.controllers.base.context import ControllerContext
from broker.domain.errors import OutcomeUnknown, ProviderError, Rejected
from broker.domain.ids import InstanceName
from broker.domain.instance import Observed
from broker.lifecycle.account_refusals import provider_key
from broker.lifecycle.observation.history import CloudHistory
from broker.lifecycle.observation.listing import ClockReading, Listing
from broker.runtime.background_tasks import gather_all

log = logging.getLogger(__name__)

UNANSWERED = 3
"""Consecutive listings without an answer after which due rows of the cloud are left to other brokers first."""
MAX_TURNS = 4


class ListingPoller:
    """Lists every provider."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self.listings: dict[str, deque[Listing]] = {name: deque() for name in context.providers}
        """Latest listings of each cloud, enough of them to prove absence."""
        self.histories = {name: CloudHistory() for name in context.providers}
        self._locks = {name: asyncio.Lock() for name in context.providers}
        self._unanswered = dict.fromkeys(context.providers, 0)
        """Number of listings in a row without an answer."""
        self._errors: dict[str, ProviderError] = {}
        """Error of the latest listing; no entry: it answered."""

    @property
    def refusals(self) -> Mapping[str, str]:
        """Return the reason for each cloud that refuses to list machines, by the key that blocks purchases there."""
        return {
            provider_key(name): f"{name} refuses to list its machines: {error}"
            for name, error in self._errors.items()
            if isinstance(error, Rejected)
        }

    @property
    def turns(self) -> Mapping[str, float]:
        """Seconds for which due rows of each cloud are left to other brokers first.

        A broker that is cut off from a cloud would otherwise hold the rows that another broker could work on. The wait
        grows with each failed listing, because the other brokers may get few answers too.
        """
        turn_s = self._context.intervals.others_s
        return {name: turn_s * min(MAX_TURNS, count // UNANSWERED) for name, count in self._unanswered.items()}

    def trouble(self, provider: str) -> str:
        """Return the error of the latest listing; empty: it answered."""
        return str(self._errors.get(provider, ""))

    def clock(self) -> ClockReading:
        """Read both clocks."""
        return ClockReading(now=self._context.clock.now(), monotonic=self._context.clock.monotonic())

    async def refresh_all(self, providers: Iterable[str], max_age_s: Mapping[str, float] = {}) -> set[str]:
        """List clouds concurrently, and return those that did not answer.

        `max_age_s`: seconds, by cloud, for which the latest listing is used instead of a new one. Default: `list_s`.
        """

        async def has_failed(provider: str) -> bool:
            try:
                await self.refresh(provider, max_age_s=max_age_s.get(provider))
            except ProviderError:
                return True
            return False

        names = list(providers)
        failures = await gather_all(map(has_failed, names))
        return {name for name, is_failure in zip(names, failures, strict=True) if is_failure}

    async def refresh(self, provider: str, *, max_age_s: float | None = None) -> None:
        """List the cloud, unless the latest listing is younger than `max_age_s`.

        Raises ProviderError when the cloud does not answer.
        """
        if provider not in self._locks:
            raise OutcomeUnknown(f"{provider} is a cloud of another broker on this database; it is not configured here")
        clock = self._context.clock
        limit_s = self._context.intervals.list_s if max_age_s is None else max_age_s
        async with self._locks[provider]:
            listings = self.listings[provider]
            begun = clock.monotonic()
            if listings and begun - listings[-1].begun < limit_s:
                return
            self._unanswered[provider] += 1
            try:
                machines = await self._list(provider)
            except ProviderError as e:
                self._errors[provider] = e
                raise
            self._unanswered[provider] = 0
            self._errors.pop(provider, None)
            listings.append(Listing(begun=begun, answered=clock.monotonic(), by_name=_by_name(machines)))
            lag_s = self._context.providers[provider].caps.list_lag_s
            self._forget(listings, begun, lag_s)
            self.histories[provider].record(listings, self.clock(), lag_s)

    async def _list(self, provider: str) -> Sequence[Observed]:
        """List one cloud. A timeout or a bug in its code counts as no answer, so that other clouds are not affected."""
        limit_s = self._context.intervals.list_limit_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._context.providers[provider].list()
        except ProviderError:
            raise
        except TimeoutError as e:
            raise OutcomeUnknown(f"{provider}: no listing within {limit_s:g} s") from e
        except Exception as e:
            log.exception("listing %s failed", provider)
            raise OutcomeUnknown(f"{provider}: {type(e).__name__} while listing") from e

    def _forget(self, listings: deque[Listing], now: float, lag_s: float) -> None:
        """Keep listings for long enough to prove absence: two of them `list_lag_s` after a first one."""
        horizon_s = 3 * lag_s + 5 * self._context.intervals.list_s
        while len(listings) > 4 and now - listings[0].begun > horizon_s:
            listings.popleft()


def _by_name(machines: Sequence[Observed]) -> Mapping[InstanceName, tuple[Observed, ...]]:
    by_name: dict[InstanceName, tuple[Observed, ...]] = {}
    for machine in machines:
        by_name[machine.handle.name] = (*by_name.get(machine.handle.name, ()), machine)
    return by_name
