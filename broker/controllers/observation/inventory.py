"""Inventory: what the listings of all clouds show and prove. Shared by the controllers of one process.

Steps: list clouds (`ListingPoller`); answer questions from the latest listing, from the listings in a row
(`broker.lifecycle.observation.proof`) and from the history (`broker.lifecycle.observation.history`).
Facts: listings, their times, both clocks, the lag of each cloud's listings. It takes no decision. `absence` serves
decisions about an attempt's state. `missing_twice_at`, `latest_possible_end`, `last_listed_at` and `machine_spans`
serve charges. See the table "Absence proofs" in docs/design/lifecycle.md.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import datetime, timedelta

from broker.billing.accrual import runs_since
from broker.billing.prices import MachineSpan
from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.listing_poller import ListingPoller
from broker.domain.ids import AttemptId, InstanceName, attempt_of
from broker.domain.instance import Observed
from broker.domain.job import Attempt, Handle
from broker.lifecycle.observation.history import NameHistory
from broker.lifecycle.observation.listing import Listing, last_begun_before_run
from broker.lifecycle.observation.proof import AbsenceFacts, AbsenceProof, prove_absence


class Inventory:
    """Machines of every provider, by its listings."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._poller = ListingPoller(context)
        self._listings, self._histories = self._poller.listings, self._poller.histories

    # ------------------------------------------------------------------------------------------------------- listings

    @property
    def refusals(self) -> Mapping[str, str]:
        """See `ListingPoller.refusals`."""
        return self._poller.refusals

    @property
    def turns(self) -> Mapping[str, float]:
        """See `ListingPoller.turns`."""
        return self._poller.turns

    def trouble(self, provider: str) -> str:
        """See `ListingPoller.trouble`."""
        return self._poller.trouble(provider)

    async def refresh(self, provider: str, *, max_age_s: float | None = None) -> None:
        """See `ListingPoller.refresh`."""
        await self._poller.refresh(provider, max_age_s=max_age_s)

    async def refresh_all(self, providers: Iterable[str], max_age_s: Mapping[str, float] = {}) -> set[str]:
        """See `ListingPoller.refresh_all`."""
        return await self._poller.refresh_all(providers, max_age_s)

    def keep(self, live: Set[AttemptId]) -> None:
        """Forget the history of names without a live attempt: see `CloudHistory.keep`."""
        installation = self._context.installation
        for history in self._histories.values():
            history.keep({name for name in history.names if attempt_of(installation, name) in live})

    # ------------------------------------------------------------------------------------------------- latest listing

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
        provider = attempt.line.offer.provider
        begun = last_begun_before_run(self._listings[provider], attempt.name, attempt.line.nodes)
        if begun is None:
            return None
        not_yet = None if begun == -math.inf else self._database_time(begun)
        return runs_since(attempt, not_yet, self._context.providers[provider].caps)

    # ------------------------------------------------------------------------------------------ absence, for the state

    def absence(
        self,
        provider: str,
        name: InstanceName,
        since: float | None,
        *,
        nodes: int = 1,
        born_by: datetime | None = None,
        handles: Sequence[Handle] = (),
    ) -> AbsenceProof:
        """Return what the listings prove about a name: see `AbsenceFacts`.

        With `born_by` the name is followed as by `missing_twice_at`.
        """
        facts = AbsenceFacts(
            listings=self._listings[provider],
            clock=self._poller.clock(),
            lag_s=self._lag_s(provider),
            name=name,
            nodes=nodes,
            since=since,
            born_by=born_by,
            missing_twice_at=self.missing_twice_at(provider, name, born_by=born_by) if born_by else None,
            handles=handles,
        )
        return prove_absence(facts)

    # -------------------------------------------------------------------------------------------- history, for charges

    def has_listed_twice(self, provider: str, since: float) -> bool:
        """See `CloudHistory.has_listed_twice`."""
        return self._histories[provider].has_listed_twice(since)

    def missing_twice_at(
        self, provider: str, name: InstanceName, *, born_by: datetime | None, sent_at: datetime | None = None
    ) -> datetime | None:
        """Return the answer time of the second listing in the current run of listings without a name.

        None: the run has fewer than two listings. This proves no absence: without `born_by` the machine may be too
        young to be listed, or not created yet. The name is followed from the first call on, so the result stays known
        after the listings are forgotten: see `CloudHistory.follow`.
        """
        missing_at = self._follow(provider, name, born_by, sent_at).missing_twice_at
        return None if missing_at is None else self._database_time(missing_at)

    def machine_spans(self, attempt: Attempt, *, max_age_s: float) -> Sequence[MachineSpan]:
        """Return the lifetimes of all machines that listings have shown under an attempt's name.

        If the latest listing is older than `max_age_s`, no machine is known to exist after it.
        """
        provider = attempt.line.offer.provider
        latest = self._recent(provider, math.inf)
        if latest is None:
            return ()
        known_until = None if self._recent(provider, max_age_s) else self._database_time(latest.answered)
        return self._histories[provider].machine_spans(attempt.name, known_until)

    def last_listed_at(self, attempt: Attempt) -> datetime | None:
        """Return the answer time of the latest listing that shows one of its machines; None: no listing shows any."""
        history = self._histories.get(attempt.line.offer.provider)
        return None if history is None else history.last_listed_at(attempt.name)

    def latest_possible_end(self, attempt: Attempt) -> datetime | None:
        """Return the latest end of billing for machines of a terminating attempt that never booted; None: unknown.

        A launcher whose death is not proven may create machines. A machine that exists for longer than the longest gap
        between listings plus their lag is listed. So an unlisted machine bills for at most that long after termination
        began and two listings omitted it. A time without listings counts as a gap.
        """
        provider = attempt.line.offer.provider
        missing_at = self.missing_twice_at(provider, attempt.name, born_by=None, sent_at=attempt.create_sent_at)
        if missing_at is None or attempt.terminating_since is None:
            return None
        unlisted_s = self._follow(provider, attempt.name, None, attempt.create_sent_at).gap_s + self._lag_s(provider)
        return max(missing_at, attempt.terminating_since) + timedelta(seconds=unlisted_s)

    def _follow(
        self, provider: str, name: InstanceName, born_by: datetime | None, sent_at: datetime | None
    ) -> NameHistory:
        history, listings, lag_s = self._histories[provider], self._listings[provider], self._lag_s(provider)
        return history.follow(name, listings, self._poller.clock(), lag_s, born_by=born_by, sent_at=sent_at)

    def _lag_s(self, provider: str) -> float:
        return self._context.providers[provider].caps.list_lag_s

    def _database_time(self, moment: float) -> datetime:
        return self._poller.clock().database_time(moment)
