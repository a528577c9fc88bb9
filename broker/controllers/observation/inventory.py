"""What the clouds list, remembered long enough to prove absence."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import datetime, timedelta

from broker.billing.accrual import runs_since
from broker.billing.prices import MachineSpan
from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.listing import Followed, ListedMachine, Listing
from broker.domain.errors import OutcomeUnknown, ProviderError, Rejected
from broker.domain.ids import AttemptId, InstanceName, attempt_of
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Attempt, Handle
from broker.lifecycle.account_refusals import provider_key
from broker.runtime.background_tasks import gather_all

log = logging.getLogger(__name__)

LEFT_OUT_S = 3.0
"""Listings that agree for so long."""
UNHEARD = 3
"""Listings in a row without an answer after which another broker may know more of that cloud."""
MOST_TURNS = 4
CLOUD_CLOCK = timedelta(seconds=60)
"""By so much a cloud's clock may be ahead."""
TIMES = 20_000
"""Of listings that are remembered: half a day and more of them."""


class Inventory:
    """Listings of every provider, shared by the controllers of one process."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._listings: dict[str, deque[Listing]] = {name: deque() for name in context.providers}
        self._locks = {name: asyncio.Lock() for name in context.providers}
        self._followed: dict[str, dict[InstanceName, Followed]] = {name: {} for name in context.providers}
        self._others: dict[str, set[InstanceName]] = {name: set() for name in context.providers}
        """Names of no live attempt, when that was told last."""
        self._times: dict[str, deque[tuple[float, float]]] = {n: deque(maxlen=TIMES) for n in context.providers}
        """When listings began and had answered, also those that are forgotten. What is not followed none has shown."""
        self._unheard = dict.fromkeys(context.providers, 0)
        """Listings in a row that had no answer."""
        self._trouble: dict[str, ProviderError] = {}
        """Why the last one had none."""

    @property
    def refusals(self) -> Mapping[str, str]:
        """Clouds that would neither show nor end what is bought there, by the key that blocks them, with the reason."""
        return {
            provider_key(name): f"{name} refuses to list its machines: {why}"
            for name, why in self._trouble.items()
            if isinstance(why, Rejected)
        }

    @property
    def turns(self) -> Mapping[str, float]:
        """For each cloud how long rows that are due there are left to other brokers first, in seconds.

        One that is cut off from a cloud would hold the rows of a broker that reaches it, each time that they are due.
        The longer it has heard nothing, the later it comes, since others may hear little too.
        """
        turn_s = self._context.rhythm.others_s
        return {name: turn_s * min(MOST_TURNS, unheard // UNHEARD) for name, unheard in self._unheard.items()}

    async def refresh(self, provider: str, *, max_age_s: float | None = None) -> None:
        """Lists the cloud unless the latest listing is young enough. Raises ProviderError: nothing new is known."""
        if provider not in self._locks:
            raise OutcomeUnknown(f"{provider} is a cloud of another broker on this database; it is not configured here")
        clock = self._context.clock
        limit = self._context.rhythm.list_s if max_age_s is None else max_age_s
        async with self._locks[provider]:
            kept = self._listings[provider]
            begun = clock.monotonic()
            if kept and begun - kept[-1].begun < limit:
                return
            self._unheard[provider] += 1
            try:
                observed = await self._list(provider)
            except ProviderError as e:
                self._trouble[provider] = e
                raise
            self._unheard[provider] = 0
            self._trouble.pop(provider, None)
            by_name: dict[InstanceName, tuple[Observed, ...]] = {}
            for machine in observed:
                by_name[machine.handle.name] = (*by_name.get(machine.handle.name, ()), machine)
            kept.append(Listing(begun=begun, answered=clock.monotonic(), by_name=by_name))
            self._times[provider].append((begun, kept[-1].answered))
            self._forget(provider, begun)
            self._follow(provider, kept[-1])

    def _follow(self, provider: str, listing: Listing) -> None:
        """Whoever asks later may find the listings forgotten."""
        followed, listings = self._followed[provider], [*self._listings[provider]]
        answered = self._by_the_wall(listing.answered)
        for name in listing.shown:
            one = followed.setdefault(name, Followed(born_by=None, grown=-math.inf))
            for machine in listing.standing(name):
                if machine.handle.id not in one.machines:
                    since = self._born_after(provider, machine, answered)
                    one.machines[machine.handle.id] = ListedMachine(since=since, shown=answered, last=answered)
        for name, one in followed.items():
            one.heard(listings, name)
            now = {machine.handle.id: machine for machine in listing.by_name.get(name, ())}
            for own, shown in one.machines.items():
                shown.heard(now.get(own), answered)

    def _born_after(self, provider: str, machine: Observed, shown: datetime) -> datetime | None:
        """When what the latest listing is the first to show did not stand yet: a lag before the two listings before it,
        or when its cloud says that it was born, whose clock may be wrong. None: neither is known.
        """
        times, born = self._times[provider], machine.created_at
        if len(times) > 2:
            unlisted = self._by_the_wall(times[-3][0] - self._context.providers[provider].caps.list_lag_s)
            born = unlisted if born is None else max(unlisted, born - CLOUD_CLOCK)
        return None if born is None else min(born, shown)

    def trouble(self, provider: str) -> str:
        """Why the last listing failed; empty: it did not."""
        return str(self._trouble.get(provider, ""))

    async def refresh_all(self, providers: Iterable[str], max_age_s: Mapping[str, float] = {}) -> set[str]:
        """Lists them at the same time; returns those that did not answer. `max_age_s`: where it is not the usual."""

        async def failed(provider: str) -> bool:
            try:
                await self.refresh(provider, max_age_s=max_age_s.get(provider))
            except ProviderError:
                return True
            return False

        names = list(providers)
        bad = await gather_all(map(failed, names))
        return {name for name, one in zip(names, bad, strict=True) if one}

    async def _list(self, provider: str) -> Sequence[Observed]:
        """A cloud that hangs, or whose code breaks, is one that did not answer: it must not stop the others."""
        limit_s = self._context.rhythm.list_limit_s
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
        """Keeps enough for two listings `list_lag_s` after a first one, and no more."""
        kept = self._listings[provider]
        horizon = 3 * self._context.providers[provider].caps.list_lag_s + 5 * self._context.rhythm.list_s
        while len(kept) > 4 and now - kept[0].begun > horizon:
            kept.popleft()

    def keep(self, live: Set[AttemptId]) -> None:
        """Follows no others any more that it was told of before: `live` may have been read before a machine came that
        is listed.
        """
        own = self._context.installation
        for provider, followed in self._followed.items():
            others = {name for name in followed if attempt_of(own, name) not in live}
            self._followed[provider] = {
                name: one for name, one in followed.items() if name not in others & self._others[provider]
            }
            self._others[provider] = others

    def listed_twice(self, provider: str, since: float) -> bool:
        """What stood then, and still does, has been shown: a single listing may have left it out."""
        times = self._times[provider]
        return len(times) > 1 and times[-2][0] >= since

    def latest(self, provider: str) -> Listing | None:
        kept = self._listings[provider]
        return kept[-1] if kept else None

    def shows(self, provider: str, name: InstanceName) -> bool:
        """The latest listing does; see `Listing.shows`."""
        listing = self.latest(provider)
        return listing is not None and listing.shows(name)

    def seen(self, provider: str, name: InstanceName) -> tuple[Observed, ...]:
        """What the latest listing shows under a name, gone ones included."""
        listing = self.latest(provider)
        return listing.by_name.get(name, ()) if listing else ()

    def fresh(self, attempt: Attempt, *, max_age_s: float) -> tuple[Observed, ...]:
        """What a listing that is young enough shows of an attempt's machines; nothing where there is none."""
        listing = self._young(attempt.line.offer.provider, max_age_s)
        return listing.by_name.get(attempt.name, ()) if listing else ()

    def _young(self, provider: str, max_age_s: float) -> Listing | None:
        """The latest listing, unless it is older, or of another broker's cloud."""
        listing = self.latest(provider) if provider in self._listings else None
        old = listing is None or self._context.clock.monotonic() - listing.begun > max_age_s
        return None if old else listing

    def running_at(self, attempt: Attempt) -> datetime | None:
        """As recorded, else what the listings tell of it by the wall clock; None: no machine of it has run yet."""
        if attempt.running_at is not None:
            return attempt.running_at
        provider, not_yet, without = attempt.line.offer.provider, None, None
        for listing in self._listings[provider]:
            shown = listing.by_name.get(attempt.name, ())
            if any(o.state is not InstanceState.STARTING for o in shown):
                return runs_since(attempt, not_yet, self._context.providers[provider].caps)
            if len(shown) >= attempt.line.nodes:
                not_yet, without = self._by_the_wall(listing.begun), None
            else:  # one listing alone may leave out what runs
                not_yet, without = without or not_yet, self._by_the_wall(listing.begun)
        return None

    def absent_since(
        self, provider: str, name: InstanceName, since: float, *, born_by: datetime | None = None
    ) -> datetime | None:
        """None from a first one on shows it, all begun after `since`, and two of them at least `list_lag_s` after the
        first (which counts where nothing lags): those before may lag, and a single one may leave out what stands there.

        Then the moment up to which it may have stood, by the house's clock: when the second of them had answered that
        began a lag after its birth. Earlier ones may leave it out because it is young. Else None. `born_by`: when all
        of it stood, by the house's clock; None: not known to, so by `since`, after which nothing is created any more.
        What stood and has been left out ever since was gone before `since` as well.
        """
        unseen = self.unseen_since(provider, name, born_by=born_by) if born_by else None  # followed from the first look
        proven = self._absent_since(provider, since, lambda listing: listing.shows(name), born_by=born_by)
        return min(proven, unseen) if proven and unseen else proven

    def unseen_since(
        self, provider: str, name: InstanceName, *, born_by: datetime | None, sent_at: datetime | None = None
    ) -> datetime | None:
        """When the second of the listings in a row up to now had answered that do not show it, by the house's clock;
        None: there are no two. No proof: without `born_by` it may be too young to be listed, or not created yet.

        From when it was first shown, or asked for, it is followed, so that this is known long after those listings are
        forgotten. Of what it was never shown, and could not read of, a process knows by the times of its listings
        since it stood, or since `sent_at`, when its create was on its way.
        """
        one = self._followed[provider].get(name)
        if one is None or one.born_by != born_by:
            lag = self._context.providers[provider].caps.list_lag_s
            stood = sent_at if born_by is None else born_by + timedelta(seconds=lag)
            grown = -math.inf if stood is None else self._by_monotonic(stood)
            known = Followed(born_by=born_by, grown=grown, machines=one.machines if one else {})
            if one is not None and one.unseen is not None and one.unlisted >= grown:
                known.unlisted, known.unseen = one.unlisted, one.unseen
            elif stood is not None and (one is None or one.unseen is not None):  # none has shown it since it has grown
                self._never_shown(provider, known)
            known.heard([*self._listings[provider]], name)
            one = self._followed[provider][name] = known
        return None if one.unseen is None else self._by_the_wall(one.unseen)

    def _never_shown(self, provider: str, one: Followed) -> None:
        """No listing has shown it since it has grown."""
        times = [time for time in self._times[provider] if time[0] >= one.grown]
        if len(times) > 1:
            one.unlisted, one.unseen = times[0][0], times[1][1]
        one.gap_s = max((later[1] - first[0] for first, later in zip(times, times[2:], strict=False)), default=0.0)

    def stood(self, attempt: Attempt, *, max_age_s: float) -> Sequence[MachineSpan]:
        """All machines that listings have shown under an attempt's name. Where no listing is young enough, it is known
        of none that it stands after the latest.
        """
        provider = attempt.line.offer.provider
        one, latest = self._followed.get(provider, {}).get(attempt.name), self._young(provider, math.inf)
        if one is None or latest is None:
            return ()
        told_to = None if self._young(provider, max_age_s) else self._by_the_wall(latest.answered)
        return [
            MachineSpan(id=own, since=shown.since, shown=shown.shown, until=shown.gone or told_to)
            for own, shown in one.machines.items()
        ]

    def last_shown(self, attempt: Attempt) -> datetime | None:
        """When the latest listing had answered that shows any of its machines; None: none has."""
        one = self._followed.get(attempt.line.offer.provider, {}).get(attempt.name)
        return max((shown.last for shown in one.machines.values()), default=None) if one else None

    def stood_until(self, attempt: Attempt) -> datetime | None:
        """Up to when what is on its way out and never booted may have billed, by the house's clock; None: not known.

        A launcher that nobody can judge may create until it can be. But what stands for longer than two listings and
        their lag is shown; so beyond the last time that it may have been there, no more than the longest time for which
        something could have stood unlisted. A time without listings is such a time.
        """
        provider = attempt.line.offer.provider
        unseen = self.unseen_since(provider, attempt.name, born_by=None, sent_at=attempt.create_sent_at)
        if unseen is None or attempt.terminating_since is None:
            return None
        unlisted_s = self._followed[provider][attempt.name].gap_s + self._context.providers[provider].caps.list_lag_s
        return max(unseen, attempt.terminating_since) + timedelta(seconds=unlisted_s)

    def left_out(self, provider: str, name: InstanceName, since: float) -> bool:
        """The listings of the last seconds all leave it out, though it stood at `since`, more than a lag before each.

        So none of them shows a time before it was created, and a single one that leaves out what stands there is not
        enough. It says nothing of what may be created later: that takes `absent_since`.
        """
        first = since + self._context.providers[provider].caps.list_lag_s
        without: list[Listing] = []
        for listing in self._listings[provider]:
            without = [] if listing.begun <= first or listing.shows(name) else [*without, listing]
        return len(without) >= 2 and without[-1].begun - without[0].begun >= LEFT_OUT_S

    def omits(self, provider: str, name: InstanceName, nodes: int) -> bool:
        """The latest listing leaves a machine out that the one before it shows; the first of all, one of `nodes`."""
        before, last = ([None, None, *self._listings[provider]])[-2:]
        if before is None:
            return last is not None and len(last.by_name.get(name, ())) < nodes
        return last is not None and any(last.one(one.handle) is None for one in before.standing(name))

    def lost(self, provider: str, handles: Sequence[Handle], since: float) -> Set[str]:
        """The same proof for each of these machines: the ids of those that are absent."""

        def absent(handle: Handle) -> bool:
            return self._absent_since(provider, since, lambda listing: listing.shows_one(handle)) is not None

        return {handle.id for handle in handles if absent(handle)}

    def _absent_since(
        self, provider: str, since: float, shows: Callable[[Listing], bool], *, born_by: datetime | None = None
    ) -> datetime | None:
        latest = self.latest(provider)
        if latest is None or shows(latest):
            return None
        lag = self._context.providers[provider].caps.list_lag_s
        without: list[Listing] = []
        for listing in self._listings[provider]:
            if listing.begun <= since:
                continue
            without = [] if shows(listing) else [*without, listing]
        if len(without) < 2 or without[-2].begun - without[0].begun < lag:
            return None
        born = since if born_by is None else min(since, self._by_monotonic(born_by))
        grown = [listing for listing in without if listing.begun - born >= lag]
        return self._by_the_wall(grown[1].answered)

    def _by_the_wall(self, moment: float) -> datetime:
        """A moment of the monotonic clock."""
        clock = self._context.clock
        return clock.now() - timedelta(seconds=clock.monotonic() - moment)

    def _by_monotonic(self, moment: datetime) -> float:
        clock = self._context.clock
        return clock.monotonic() - (clock.now() - moment).total_seconds()
