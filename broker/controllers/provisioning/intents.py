"""Planned attempts, for which nothing was created yet: decides whether their create is sent, or ends them.

Facts: signals, the age of the quote, the current offer, and creates that a restored backup lacks.
"""

from dataclasses import replace

from broker.billing.time_limits import out_of_time_message
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event
from broker.controllers.market.offers_by_id import Offers, OffersById
from broker.controllers.observation.restored_attempts import RestoredAttempts
from broker.domain.errors import BlobsUnavailable
from broker.domain.job import Reason
from broker.domain.money import LedgerEntry, LedgerKind
from broker.lifecycle.decisions.launch_decision import CREATE_POLL_S
from broker.lifecycle.launch import outdated
from broker.lifecycle.signals import required_end
from broker.lifecycle.state_machine import AttemptEvent
from broker.lifecycle.transitions import after_attempt, due_in_s, step
from broker.ports import Change, Leased


class Intents:
    def __init__(self, context: ControllerContext, restored: RestoredAttempts, offers: Offers) -> None:
        self._context = context
        self._restored = restored
        self._for_sale = OffersById(offers)

    async def change(self, row: Leased) -> tuple[Change, bool]:
        """Return the change of a planned attempt, and whether its create must be sent once the change is committed.

        If a restored backup returned the row and its create was sent already, which the blob store shows, the create is
        looked up instead.
        """
        attempt = row.attempt
        try:
            was_sent = await self._restored.was_sent(attempt)
            is_superseded = not was_sent and await self._restored.was_superseded(row.job, attempt)
        except BlobsUnavailable as e:
            unknown = replace(
                attempt, detail=f"the blob store cannot be read, so it is unknown whether its create was sent: {e}"
            )
            return Change(attempt=(attempt, unknown), due_in_s=CREATE_POLL_S), False
        end = None if was_sent else self.never_sent(row)
        if end is None and is_superseded:
            end = AttemptEvent.QUOTE_EXPIRED, "another attempt was bought after the backup that the database comes from"
        if end is not None:
            return self._end_unsent(row, *end), False
        # No row holds the time of the create. Charges begin at the planning time, because no create is sent earlier.
        at = attempt.created_at if was_sent else self._context.clock.now()
        sent = step(attempt, AttemptEvent.LEASE_TAKEN, at).attempt
        sent = replace(sent, launched_by=self._context.provider_of(attempt).launcher_id(), detail="")
        return Change(attempt=(attempt, sent), due_in_s=CREATE_POLL_S), not was_sent

    def never_sent(self, row: Leased) -> tuple[AttemptEvent, str] | None:
        """Return why a planned attempt is not created, as an event and as a sentence; None: it is created."""
        now = self._context.clock.now()
        if (signal := required_end(row.attempt, row.job)) is not None:
            return signal, out_of_time_message(row.job, now) if signal is AttemptEvent.OUT_OF_TIME else signal.value
        if forbidden := self._context.forbidden(row.job.spec):
            return AttemptEvent.QUOTE_EXPIRED, forbidden
        age_s = (now - row.attempt.created_at).total_seconds()
        if age_s > self._context.intervals.quote_ttl_s:
            return AttemptEvent.QUOTE_EXPIRED, f"its quote is {age_s:.0f} s old; {row.attempt.detail}".rstrip("; ")
        bought = row.attempt.line.offer
        rise = self._context.costs.price_rise
        market_change = outdated(bought, self._for_sale.get(bought.id), self._for_sale.seen_at(bought.provider), rise)
        return None if market_change is None else (AttemptEvent.QUOTE_EXPIRED, market_change)

    def _end_unsent(self, row: Leased, end: AttemptEvent, message: str) -> Change:
        """End an attempt for which nothing was created."""
        now = self._context.clock.now()
        ended = replace(step(row.attempt, end, now).attempt, detail=message)
        reason = ended.reason or Reason.STOPPED
        job = after_attempt(row.job, ended, reason, message, now)
        release = LedgerEntry(
            job_id=job.id, attempt_id=ended.id, kind=LedgerKind.RELEASE, usd=row.attempt.reserved_usd, note=end.value
        )
        report = event(job, "attempt.ended", f"attempt {ended.number} ended before launch: {message}", attempt=ended)
        return Change(
            attempt=(row.attempt, ended), job=(row.job, job), ledger=(release,), events=(report,),
            due_in_s=due_in_s(job, now),
        )  # fmt: skip
