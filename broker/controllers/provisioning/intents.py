"""Planned attempts, for which nothing was created yet: sent, or ended instead."""

from dataclasses import replace

from broker.billing.time_limits import out_of_time_message
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event
from broker.controllers.market.offers_by_id import Offers, OffersById
from broker.controllers.observation.restored_attempts import RestoredAttempts
from broker.domain.errors import BlobsUnavailable
from broker.domain.job import Reason
from broker.domain.money import LedgerEntry, LedgerKind
from broker.lifecycle.launch import outdated
from broker.lifecycle.launch_decision import CREATE_POLL_S
from broker.lifecycle.signals import required_end
from broker.lifecycle.state_machine import AttemptEvent
from broker.lifecycle.transitions import after_attempt, due_in_s, step
from broker.ports import Change, Leased


class Intents:
    def __init__(self, context: ControllerContext, restored: RestoredAttempts, offers: Offers) -> None:
        self._context = context
        self._restored = restored
        self._for_sale = OffersById(offers)

    async def change(self, one: Leased) -> tuple[Change, bool]:
        """What becomes of it, and whether its create is to be sent once that is committed. One that was sent already,
        as the blob store tells of a row that a backup brought back, is looked up instead.
        """
        attempt = one.attempt
        try:
            was_sent = await self._restored.was_sent(attempt)
            followed = not was_sent and await self._restored.was_superseded(one.job, attempt)
        except BlobsUnavailable as e:
            unknown = replace(attempt, detail=f"the blob store, which tells whether it was sent, cannot be read: {e}")
            return Change(attempt=(attempt, unknown), due_in_s=CREATE_POLL_S), False
        why = None if was_sent else self.never_sent(one)
        if why is None and followed:
            why = AttemptEvent.QUOTE_EXPIRED, "another attempt was bought after the backup that the database comes from"
        if why is not None:
            return self._never_mind(one, *why), False
        # When it was sent no row tells: not before this one was made, so from then on it is charged.
        at = attempt.created_at if was_sent else self._context.clock.now()
        sent = step(attempt, AttemptEvent.LEASE_TAKEN, at).attempt
        sent = replace(sent, launched_by=self._context.provider_of(attempt).launcher_id(), detail="")
        return Change(attempt=(attempt, sent), due_in_s=CREATE_POLL_S), not was_sent

    def never_sent(self, one: Leased) -> tuple[AttemptEvent, str] | None:
        """Why an planned attempt is not created after all, also in words."""
        now = self._context.clock.now()
        if (signal := required_end(one.attempt, one.job)) is not None:
            return signal, out_of_time_message(one.job, now) if signal is AttemptEvent.OUT_OF_TIME else signal.value
        if forbidden := self._context.forbidden(one.job.spec):
            return AttemptEvent.QUOTE_EXPIRED, forbidden
        age_s = (now - one.attempt.created_at).total_seconds()
        if age_s > self._context.rhythm.quote_ttl_s:
            return AttemptEvent.QUOTE_EXPIRED, f"its quote is {age_s:.0f} s old; {one.attempt.detail}".rstrip("; ")
        bought = one.attempt.line.offer
        rise = self._context.costs.price_rise
        change = outdated(bought, self._for_sale.get(bought.id), self._for_sale.seen_at(bought.provider), rise)
        return None if change is None else (AttemptEvent.QUOTE_EXPIRED, change)

    def _never_mind(self, one: Leased, why: AttemptEvent, words: str) -> Change:
        """Ends an attempt that nothing was created for."""
        now = self._context.clock.now()
        ended = replace(step(one.attempt, why, now).attempt, detail=words)
        reason = ended.reason or Reason.STOPPED
        job = after_attempt(one.job, ended, reason, words, now)
        given_back = LedgerEntry(
            job_id=job.id, attempt_id=ended.id, kind=LedgerKind.RELEASE, usd=one.attempt.reserved_usd, note=why.value
        )
        told = event(job, "attempt.ended", f"attempt {ended.number} ended before launch: {words}", attempt=ended)
        return Change(
            attempt=(one.attempt, ended), job=(one.job, job), ledger=(given_back,), events=(told,),
            due_in_s=due_in_s(job, now),
        )  # fmt: skip
