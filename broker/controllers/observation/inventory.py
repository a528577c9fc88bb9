"""Listings of all clouds, kept long enough to prove absence. Shared by the controllers of one process.

`absence` serves decisions about an attempt's state. `missing_twice_at`, `latest_possible_end`, `last_listed_at` and
`machine_spans` serve charges. See the table "Absence proofs" in docs/design/lifecycle.md.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import datetime, timedelta

from broker.billing.accrual import runs_since
from broker.billing.prices import MachineSpan
from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.absence import (
    AbsenceProof,
    missing_for_seconds,
    missing_once,
    proof_listing,
    trailing_without,
)
from broker.controllers.observation.listing import Followed, ListedMachine, Listing
from broker.domain.errors import OutcomeUnknown, ProviderError, Rejected
from broker.domain.ids import AttemptId, InstanceName, attempt_of
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Attempt, Handle
from broker.lifecycle.account_refusals import provider_key
from broker.runtime.background_tasks import gather_all

log = logging.getLogger(__name__)

UNANSWERED = 3
"""Listings in a row without an answer after which another broker may know more about that cloud."""
MAX_TURNS = 4
CLOUD_CLOCK = timedelta(seconds=60)
"""Time by which a cloud's clock may be ahead."""
TIMES = 20_000
"""Number of listings whose times are kept: those of half a day or more."""


class Inventory:
    """Lists every provider, and answers what its listings show and prove."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._listings: dict[str, deque[Listing]] = {name: deque() for name in context.providers}
        self._locks = {name: asyncio.Lock() for name in context.providers}
        self._followed: dict[str, dict[InstanceName, Followed]] = {name: {} for name in context.providers}
        self._others: dict[str, set[InstanceName]] = {name: set() for name in context.providers}
        """Names that belonged to no live attempt at the latest call of `keep`."""
        self._times: dict[str, deque[tuple[float, float]]] = {n: deque(maxlen=TIMES) for n in context.providers}
        """Begin and answer of listings, including forgotten listings. Every name of a live attempt that these listings
        showed is in `_followed`.
        """
        self._unanswered = dict.fromkeys(context.providers, 0)
        """Number of listings in a row without an answer."""
        self._trouble: dict[str, ProviderError] = {}
        """Error of the latest listing; no entry: it answered."""

    @property
    def refusals(self) -> Mapping[str, str]:
        """Clouds that refuse to list machines, so nothing is bought there: the reason by the key that blocks them."""
        return {
            provider_key(name): f"{name} refuses to list its machines: {error}"
            for name, error in self._trouble.items()
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

    async def refresh(self, provider: str, *, max_age_s: float | None = None) -> None:
        """List the cloud, unless the latest listing is younger than `max_age_s`.

        Raises ProviderError when the cloud does not answer.
        """
        if provider not in self._locks:
            raise OutcomeUnknown(f"{provider} is a cloud of another broker on this database; it is not configured here")
        clock = self._context.clock
        limit = self._context.intervals.list_s if max_age_s is None else max_age_s
        async with self._locks[provider]:
            listings = self._listings[provider]
            begun = clock.monotonic()
            if listings and begun - listings[-1].begun < limit:
                return
            self._unanswered[provider] += 1
            try:
                observed = await self._list(provider)
            except ProviderError as e:
                self._trouble[provider] = e
                raise
            self._unanswered[provider] = 0
            self._trouble.pop(provider, None)
            by_name: dict[InstanceName, tuple[Observed, ...]] = {}
            for machine in observed:
                by_name[machine.handle.name] = (*by_name.get(machine.handle.name, ()), machine)
            listings.append(Listing(begun=begun, answered=clock.monotonic(), by_name=by_name))
            self._times[provider].append((begun, listings[-1].answered))
            self._forget(provider, begun)
            self._follow(provider, listings[-1])

    def _follow(self, provider: str, listing: Listing) -> None:
        """Record the latest listing in the history of each name, since the listing itself is forgotten soon."""
        followed, listings = self._followed[provider], [*self._listings[provider]]
        answered = self._by_the_wall(listing.answered)
        for name in listing.shown:
            history = followed.setdefault(name, Followed(born_by=None, grown=-math.inf))
            for machine in listing.existing(name):
                if machine.handle.id not in history.machines:
                    since = self._born_after(provider, machine, answered)
                    history.machines[machine.handle.id] = ListedMachine(since=since, shown=answered, last=answered)
        for name, history in followed.items():
            history.record(listings, name)
            listed = {machine.handle.id: machine for machine in listing.by_name.get(name, ())}
            for machine_id, listed_machine in history.machines.items():
                listed_machine.record(listed.get(machine_id), answered)

    def _born_after(self, provider: str, machine: Observed, shown: datetime) -> datetime | None:
        """Return the latest time at which a machine that was just listed for the first time did not exist.

        The later of two limits applies: a list lag before the two previous listings began, and the cloud's creation
        time less a possible error of its clock. Before the third listing, only the creation time applies, uncorrected.
        The result is at most `shown`. None: neither limit is known.
        """
        times, born = self._times[provider], machine.created_at
        if len(times) > 2:
            unlisted = self._by_the_wall(times[-3][0] - self._context.providers[provider].caps.list_lag_s)
            born = unlisted if born is None else max(unlisted, born - CLOUD_CLOCK)
        return None if born is None else min(born, shown)

    def trouble(self, provider: str) -> str:
        """Return the error of the latest listing; empty: it answered."""
        return str(self._trouble.get(provider, ""))

    async def refresh_all(self, providers: Iterable[str], max_age_s: Mapping[str, float] = {}) -> set[str]:
        """List clouds concurrently, and return those that did not answer.

        `max_age_s`: age of a listing that is young enough, where it is not the usual `list_s`.
        """

        async def failed(provider: str) -> bool:
            try:
                await self.refresh(provider, max_age_s=max_age_s.get(provider))
            except ProviderError:
                return True
            return False

        names = list(providers)
        failures = await gather_all(map(failed, names))
        return {name for name, has_failed in zip(names, failures, strict=True) if has_failed}

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

    def _forget(self, provider: str, now: float) -> None:
        """Keep listings for long enough to prove absence: two of them `list_lag_s` after a first one."""
        listings = self._listings[provider]
        horizon = 3 * self._context.providers[provider].caps.list_lag_s + 5 * self._context.intervals.list_s
        while len(listings) > 4 and now - listings[0].begun > horizon:
            listings.popleft()

    def keep(self, live: Set[AttemptId]) -> None:
        """Forget the history of names without a live attempt.

        A name is forgotten at the second such call in a row, because `live` may have been read before a listed machine
        was created.
        """
        installation = self._context.installation
        for provider, followed in self._followed.items():
            others = {name for name in followed if attempt_of(installation, name) not in live}
            self._followed[provider] = {
                name: history for name, history in followed.items() if name not in others & self._others[provider]
            }
            self._others[provider] = others

    def has_listed_twice(self, provider: str, since: float) -> bool:
        """Return True if two listings have begun since then, so that a machine that existed all the time was shown."""
        times = self._times[provider]
        return len(times) > 1 and times[-2][0] >= since

    def latest(self, provider: str) -> Listing | None:
        listings = self._listings[provider]
        return listings[-1] if listings else None

    def is_listed(self, provider: str, name: InstanceName) -> bool:
        """Return True if the latest listing shows the name; see `Listing.shows`."""
        listing = self.latest(provider)
        return listing is not None and listing.shows(name)

    def listed(self, provider: str, name: InstanceName) -> tuple[Observed, ...]:
        """Return the machines of a name in the latest listing, gone ones included."""
        listing = self.latest(provider)
        return listing.by_name.get(name, ()) if listing else ()

    def recently_listed(self, attempt: Attempt, *, max_age_s: float) -> tuple[Observed, ...]:
        """Return an attempt's machines in the latest listing; none if that listing is older than `max_age_s`."""
        listing = self._recent(attempt.line.offer.provider, max_age_s)
        return listing.by_name.get(attempt.name, ()) if listing else ()

    def _recent(self, provider: str, max_age_s: float) -> Listing | None:
        """Return the latest listing; None: it is older, there is none, or the cloud is not configured here."""
        listing = self.latest(provider) if provider in self._listings else None
        is_old = listing is None or self._context.clock.monotonic() - listing.begun > max_age_s
        return None if is_old else listing

    def running_at(self, attempt: Attempt) -> datetime | None:
        """Return the time at which an attempt's machines ran: the recorded one, otherwise by the listings.

        None: no listing has shown one of its machines running.
        """
        if attempt.running_at is not None:
            return attempt.running_at
        provider, not_yet, without = attempt.line.offer.provider, None, None
        for listing in self._listings[provider]:
            shown = listing.by_name.get(attempt.name, ())
            if any(machine.state is not InstanceState.STARTING for machine in shown):
                return runs_since(attempt, not_yet, self._context.providers[provider].caps)
            if len(shown) >= attempt.line.nodes:
                not_yet, without = self._by_the_wall(listing.begun), None
            else:  # a single listing may omit a running machine
                not_yet, without = without or not_yet, self._by_the_wall(listing.begun)
        return None

    # ------------------------------------------------------------------------------------------- absence, for the state

    def absence(
        self,
        provider: str,
        name: InstanceName,
        since: float,
        *,
        born_by: datetime | None = None,
        handles: Sequence[Handle] = (),
    ) -> AbsenceProof:
        """Return what the listings after `since` (monotonic) prove about a name.

        `since`: time from which no machine of this name can be created any more, or from which an existing machine was
        watched. `born_by`: see `proven_absent_at`. `handles`: machines whose absence is proven one by one.
        """
        return AbsenceProof(
            missing_for_seconds=self.is_missing_for_seconds(provider, name, since),
            proven_at=self.proven_absent_at(provider, name, since, born_by=born_by),
            lost=self._lost(provider, handles, since),
        )

    def omits(self, provider: str, name: InstanceName, nodes: int) -> bool:
        """Return whether a machine is missing once: see `absence.missing_once`."""
        return missing_once(self._listings[provider], name, nodes)

    def is_missing_for_seconds(self, provider: str, name: InstanceName, since: float) -> bool:
        """Return whether machines that existed at `since` are missing for seconds: see `missing_for_seconds`."""
        grown = since + self._context.providers[provider].caps.list_lag_s
        return missing_for_seconds(self._listings[provider], name, grown)

    def proven_absent_at(
        self, provider: str, name: InstanceName, since: float, *, born_by: datetime | None = None
    ) -> datetime | None:
        """Return the latest time at which machines of a name may have existed; None: absence is not proven.

        That is the answer of the second listing of the proof that began a lag after their birth. Earlier listings may
        omit a machine because it is young. `born_by`: database time at which all machines existed; None: unknown, so
        `since` is used. A machine that existed and has been omitted ever since was gone before `since` as well.
        """
        unseen = self.missing_twice_at(provider, name, born_by=born_by) if born_by else None
        proven = self._absent_since(provider, since, lambda listing: listing.shows(name), born_by=born_by)
        return min(proven, unseen) if proven and unseen else proven

    def _lost(self, provider: str, handles: Sequence[Handle], since: float) -> frozenset[str]:
        """Return the ids of the machines whose absence is proven one by one."""

        def is_absent(handle: Handle) -> bool:
            return self._absent_since(provider, since, lambda listing: listing.shows_machine(handle)) is not None

        return frozenset(handle.id for handle in handles if is_absent(handle))

    def _absent_since(
        self, provider: str, since: float, shows: Callable[[Listing], bool], *, born_by: datetime | None = None
    ) -> datetime | None:
        latest = self.latest(provider)
        if latest is None or shows(latest):
            return None
        without = trailing_without(self._listings[provider], shows, since)
        born = since if born_by is None else min(since, self._by_monotonic(born_by))
        listing = proof_listing(without, self._context.providers[provider].caps.list_lag_s, born)
        return None if listing is None else self._by_the_wall(listing.answered)

    # --------------------------------------------------------------------------------------------- history, for charges

    def missing_twice_at(
        self, provider: str, name: InstanceName, *, born_by: datetime | None, sent_at: datetime | None = None
    ) -> datetime | None:
        """Return when the second of the listings in a row, up to now, had answered that do not show a name.

        None: there are fewer than two. This proves no absence: without `born_by` the machine may be too young to be
        listed, or not created yet. `sent_at`: time at which its create was sent.

        The name is followed from its first listing or from the first call, so the answer outlives the listings. For a
        name that was never listed, the times of all listings since `born_by` or `sent_at` are used.
        """
        history = self._followed[provider].get(name)
        if history is None or history.born_by != born_by:
            lag = self._context.providers[provider].caps.list_lag_s
            existed_at = sent_at if born_by is None else born_by + timedelta(seconds=lag)
            grown = -math.inf if existed_at is None else self._by_monotonic(existed_at)
            renewed = Followed(born_by=born_by, grown=grown, machines=history.machines if history else {})
            if history is not None and history.unseen is not None and history.unlisted >= grown:
                renewed.unlisted, renewed.unseen = history.unlisted, history.unseen
            elif existed_at is not None and (history is None or history.unseen is not None):
                self._never_shown(provider, renewed)
            renewed.record([*self._listings[provider]], name)
            history = self._followed[provider][name] = renewed
        return None if history.unseen is None else self._by_the_wall(history.unseen)

    def _never_shown(self, provider: str, history: Followed) -> None:
        """Record that no listing has shown the name since it could be listed."""
        times = [time for time in self._times[provider] if time[0] >= history.grown]
        if len(times) > 1:
            history.unlisted, history.unseen = times[0][0], times[1][1]
        gaps = (later[1] - first[0] for first, later in zip(times, times[2:], strict=False))
        history.gap_s = max(gaps, default=0.0)

    def machine_spans(self, attempt: Attempt, *, max_age_s: float) -> Sequence[MachineSpan]:
        """Return the lifetimes of all machines that listings have shown under an attempt's name.

        If the latest listing is older than `max_age_s`, no machine is known to exist after it.
        """
        provider = attempt.line.offer.provider
        history = self._followed.get(provider, {}).get(attempt.name)
        latest = self._recent(provider, math.inf)
        if history is None or latest is None:
            return ()
        known_until = None if self._recent(provider, max_age_s) else self._by_the_wall(latest.answered)
        return [
            MachineSpan(id=machine_id, since=listed.since, shown=listed.shown, until=listed.gone or known_until)
            for machine_id, listed in history.machines.items()
        ]

    def last_listed_at(self, attempt: Attempt) -> datetime | None:
        """Return when the latest listing had answered that shows one of its machines; None: no listing did."""
        history = self._followed.get(attempt.line.offer.provider, {}).get(attempt.name)
        return max((machine.last for machine in history.machines.values()), default=None) if history else None

    def latest_possible_end(self, attempt: Attempt) -> datetime | None:
        """Return until when machines of a terminating attempt that never booted may have billed; None: unknown.

        A launcher whose death is not proven may create machines. But a machine that exists for longer than two listings
        and their lag is shown. So beyond its last possible sighting it existed for at most the longest gap between
        listings and a lag. A time without listings counts as such a gap.
        """
        provider = attempt.line.offer.provider
        unseen = self.missing_twice_at(provider, attempt.name, born_by=None, sent_at=attempt.create_sent_at)
        if unseen is None or attempt.terminating_since is None:
            return None
        unlisted_s = self._followed[provider][attempt.name].gap_s + self._context.providers[provider].caps.list_lag_s
        return max(unseen, attempt.terminating_since) + timedelta(seconds=unlisted_s)

    def _by_the_wall(self, moment: float) -> datetime:
        """Convert a time of the monotonic clock to the database clock."""
        clock = self._context.clock
        return clock.now() - timedelta(seconds=clock.monotonic() - moment)

    def _by_monotonic(self, moment: datetime) -> float:
        """Convert a time of the database clock to the monotonic clock."""
        clock = self._context.clock
        return clock.monotonic() - (clock.now() - moment).total_seconds()
