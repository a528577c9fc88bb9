"""Decides what happens to a queued job: buy an offer, wait, or end. Used by the placement controller.

`decide_placement` is pure. The rule names missing facts (`FactsNeeded`), so that the controller asks blob store and
clouds only if the decision depends on the answer. `placement_events` words the decision.
"""

import re
from collections.abc import Hashable
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

from broker.billing.caps import min_budget_usd, reservation, reserved
from broker.billing.time_limits import out_of_time
from broker.domain.ids import attempt_id, instance_name
from broker.domain.instance import Caps
from broker.domain.job import Attempt, Event, Job, JobState, Reason
from broker.domain.money import LedgerEntry, LedgerKind
from broker.domain.offer import Quote, QuoteLine, SoldOutSpot
from broker.lifecycle.account_refusals import refusing_accounts
from broker.lifecycle.decisions.restored_decision import RestoredDecision
from broker.lifecycle.recovery import adjusted_workload, workload_left
from broker.lifecycle.state_machine import JobEvent, next_job_state
from broker.policy.budgets import Hold, Refusal, admission, entry, free_gpus, judge
from broker.quote.engine import quote
from broker.quote.offer_rules import busy_message
from broker.quote.placement import Queue, choose
from broker.quote.placement_facts import (
    FactsNeeded,
    MarketFacts,
    MissingFacts,
    PlacementDecision,
    PlacementFacts,
    PlacementOutcome,
    QuotedMarket,
    SharedQuote,
)

_NUMBER = re.compile(r"[\d.,]+")


_Outcome = PlacementOutcome
_ENDED_BY_LOST_ATTEMPT = {
    Reason.STOPPED: (_Outcome.STOPPED_AFTER_BACKUP, JobEvent.STOP),
    Reason.CAPPED: (_Outcome.CAPPED_AFTER_BACKUP, JobEvent.CANNOT_FINISH),
}
_EVENT_KINDS = {
    _Outcome.CANCELLED: "job.cancelled",
    _Outcome.OUT_OF_TIME: "job.failed",
    _Outcome.APPROVAL_NEEDED: "job.awaiting_approval",
    _Outcome.APPROVAL_WAIVED: "job.approval_waived",
    _Outcome.WAITING: "job.waiting",
    _Outcome.CAPPED: "job.capped",
    _Outcome.NUMBERS_SKIPPED: "job.restored",
    _Outcome.STOPPED_AFTER_BACKUP: "job.cancelled",
    _Outcome.CAPPED_AFTER_BACKUP: "job.capped",
    _Outcome.ADMITTED: "attempt.planned",
}
"""Kind of the event that reports an outcome. An outcome without an entry is not reported."""


def decide_placement(facts: PlacementFacts) -> PlacementDecision | FactsNeeded:
    """Return the decision about one job, or the facts that the decision still needs."""
    return _without_policies(facts) or _by_policies(facts) or _on_market(facts)


def placement_events(decision: PlacementDecision) -> tuple[Event, ...]:
    """Return the events that report a decision; none while a job waits for the same cause as before."""
    kind = _EVENT_KINDS.get(decision.outcome)
    waits = decision.outcome is PlacementOutcome.WAITING
    if kind is None or (waits and same_but_for_numbers(decision.job.reason, decision.before.reason)):
        return ()
    attempt = decision.admit.id if decision.admit else None
    message = decision.message or decision.job.reason
    data = dict(decision.event_data)
    return (Event(job_id=decision.job.id, attempt_id=attempt, kind=kind, message=message, data=data),)


def _without_policies(facts: PlacementFacts) -> PlacementDecision | None:
    """Return the decision for a job that is stopped, recovering or out of time, otherwise None."""
    job = facts.job
    if job.stop_requested:
        return _end_job(facts, _Outcome.CANCELLED, JobEvent.STOP, "stopped before it ran", message="cancelled")
    if job.state is JobState.RECOVERING:
        return _requeue(facts, _Outcome.BACK_OFF_OVER, JobEvent.BACK_OFF_OVER)
    # A machine with less time than this would be drained as soon as it is bought.
    needed_s = facts.settings.drain_budget.lead_s
    if (late_message := out_of_time(job, facts.now, needed_s=needed_s)) is not None:
        return _end_job(facts, _Outcome.OUT_OF_TIME, JobEvent.OUT_OF_TIME, late_message)
    return None


def _by_policies(facts: PlacementFacts) -> PlacementDecision | None:
    """Return the decision for a job that a policy or the installation holds back, otherwise None."""
    job = facts.job
    refusal = judge(entry(job.cap_usd, job.approved_usd), facts.policies, facts.policies_at)
    if job.state is JobState.AWAITING_APPROVAL:
        if refusal is not None and refusal.hold is Hold.APPROVAL:
            waiting = replace(job, reason=refusal.reason)
            return _decision(facts, _Outcome.APPROVAL_PENDING, waiting, due_in_s=facts.settings.retry_s)
        message = "approval is not needed any more: the policy has changed"
        return _requeue(facts, _Outcome.APPROVAL_WAIVED, JobEvent.APPROVED, message=message)
    if refusal is not None:
        return _refuse(facts, refusal)
    return _wait(facts, facts.forbidden) if facts.forbidden else None


def _on_market(facts: PlacementFacts) -> PlacementDecision | FactsNeeded:
    """Return the decision for a job for which an offer may be bought now."""
    if facts.unreadable:
        return _wait(facts, f"the blob store cannot be read, so earlier attempts are unknown: {facts.unreadable}")
    if facts.market is None:
        return FactsNeeded(missing=MissingFacts.MARKET, facts=facts)
    quoted = facts.quoted or _quote(facts, facts.market)
    if quoted.choice.line is None:
        return _buy_nothing(facts, quoted)
    if facts.restored is None:
        return FactsNeeded(missing=MissingFacts.RESTORED, facts=replace(facts, quoted=quoted))
    if facts.restored.numbers:
        return _after_backup(facts, facts.restored)
    return _buy(facts, facts.market, quoted, quoted.choice.line)


def _quote(facts: PlacementFacts, market: MarketFacts) -> QuotedMarket:
    """Quote the offers that fit the policies' GPU limits, and choose one."""
    job, free_gpu_limit = facts.job, free_gpus(facts.policies)
    shared = _shared_quote(facts, market, None if free_gpu_limit is None else free_gpu_limit[0])
    market_quote = _quote_of_job(facts, shared.quote)
    cap_left, min_budget = reservation(job), partial(_min_budget_usd, facts)
    choice = choose(market_quote, cap_left=cap_left, attempt_number=job.attempts + 1, min_budget=min_budget)
    room_message = free_gpu_limit[1] if free_gpu_limit else ""
    return QuotedMarket(quote=market_quote, shared=shared, choice=choice, room_message=room_message)


def _shared_quote(facts: PlacementFacts, market: MarketFacts, gpu_limit: int | None) -> SharedQuote:
    """Return the quote of this job, or of a job of the same round that does not differ in what a quote reads."""
    make = partial(_market_quote, facts, market, gpu_limit)
    key = _quote_key(facts, market, gpu_limit)
    if key is None:
        return SharedQuote(quote=make())
    basis = (market.offers, market.learned, market.plans, facts.settings, facts.excluded)
    return market.quotes.shared(basis, key, make)


def _quote_key(facts: PlacementFacts, market: MarketFacts, gpu_limit: int | None) -> Hashable | None:
    """Return what a quote reads of the job, except the time; None: the time changes more than `_quote_of_job` does."""
    job, spec = facts.job, facts.job.spec
    if spec.deadline is not None or spec.max_duration is not None or job.forecast is not None or market.resume_from:
        return None
    script = None if spec.script is None else (spec.script.checkpoints, spec.script.image is None)
    money = (job.spent_usd, reservation(job), spec.hour_worth_usd)
    return (adjusted_workload(job), spec.resources, script, has_local_model(job), money, gpu_limit)


def _quote_of_job(facts: PlacementFacts, shared: Quote) -> Quote:
    """Return the quote with the times of this job."""
    now, waited_s = facts.now, _waited_s(facts)

    def sold_out_spot() -> SoldOutSpot | None:
        spot = shared.sold_out_spot()
        return None if spot is None else replace(spot, waited_s=waited_s)

    return replace(
        shared, made_at=now, expires_at=now + (shared.expires_at - shared.made_at), sold_out_spot=sold_out_spot
    )


def _waited_s(facts: PlacementFacts) -> float:
    return (facts.now - facts.job.created_at).total_seconds() - facts.job.machine_s


def _market_quote(facts: PlacementFacts, market: MarketFacts, gpu_limit: int | None) -> Quote:
    """Quote the offers that fit the policies' GPU limit."""
    job, settings, offers = facts.job, facts.settings, market.offers
    if gpu_limit is not None:
        offers = [offer for offer in offers if offer.gpus * job.spec.resources.nodes <= gpu_limit]
    return quote(
        job.spec,
        workload_left(job, market.resume_from),
        offers,
        now=facts.now,
        local_files=settings.local_files or has_local_model(job),
        scoped_store=settings.scoped_store,
        spent=job.spent_usd,
        cap_left=reservation(job),
        excluded=facts.excluded,
        caps=settings.caps,
        machine_s=job.machine_s,
        lead_s=settings.drain_budget.lead_s,
        storage_usd_per_gib_month=settings.storage_usd_per_gib_month,
        learned=market.learned,
        waited_s=_waited_s(facts),
        measured_step_s=job.forecast.step_s if job.forecast else None,
        plans=market.plans,
    )


def _buy_nothing(facts: PlacementFacts, quoted: QuotedMarket) -> PlacementDecision:
    """Let the job wait, or end it where the cap is below the cheapest finish."""
    choice, reason = quoted.choice, quoted.choice.reason
    if choice.queue is Queue.WAIT:
        reason = "; ".join([*refusing_accounts(facts.excluded, facts.job.spec.resources.providers), reason])
    reason = "; ".join([reason, *_busy_machines(facts)])
    if quoted.room_message:  # offers beyond the GPU limit were not quoted, so the cap may still suffice for them
        return _wait(facts, _with_troubles(facts, f"{reason}; {quoted.room_message}"))
    if choice.queue is Queue.CAPPED:
        return _end_job(facts, _Outcome.CAPPED, JobEvent.CANNOT_FINISH, reason)
    return _wait(facts, _with_troubles(facts, reason))


def _after_backup(facts: PlacementFacts, restored: RestoredDecision) -> PlacementDecision:
    """Skip the numbers of attempts that were bought after the backup, once their machines are proven absent."""
    if restored.blocked is not None:
        return _wait(facts, restored.blocked)
    last = restored.numbers[-1]
    after = replace(facts.job, attempts=last, reason="")
    ended = None if restored.ended_for is None else _ENDED_BY_LOST_ATTEMPT.get(restored.ended_for)
    if restored.ended_for is None or ended is None:
        message = f"attempts up to {last} were made after the backup that this database comes from; another follows"
        return _decision(facts, _Outcome.NUMBERS_SKIPPED, after, message=message)
    outcome, event = ended
    reason = f"{restored.ended_for.value} after the backup that this database comes from"
    return replace(_end_job(replace(facts, job=after), outcome, event, reason), before=facts.job)


def _buy(facts: PlacementFacts, market: MarketFacts, quoted: QuotedMarket, line: QuoteLine) -> PlacementDecision:
    """Admit an attempt with its reservation, unless a policy refuses this purchase."""
    job, installation = facts.job, facts.settings.installation
    number, new_id = job.attempts + 1, attempt_id(job.id, job.attempts + 1)
    attempt = Attempt(
        id=new_id,
        job_id=job.id,
        number=number,
        name=instance_name(installation, new_id),
        line=line,
        created_at=facts.now,
        reserved_usd=reserved(job, line, _caps(facts, line), facts.settings.drain_budget),
        resume_from=market.resume_from,
    )
    request = admission(attempt, job.cap_usd, job.approved_usd)
    if (refusal := judge(request, facts.policies, facts.policies_at)) is not None:
        return _refuse(facts, refusal)
    active = replace(job, state=next_job_state(job.state, JobEvent.ATTEMPT_PLANNED), attempts=number, reason="")
    offer = line.offer
    kind, usd = LedgerKind.RESERVATION, attempt.reserved_usd
    reservation_entry = LedgerEntry(job_id=job.id, attempt_id=new_id, kind=kind, usd=usd, note=offer.id)
    offers = _summary(quoted.quote)
    data = {"number": number, "offer": offer.id, "simulated": offer.simulated, "offers": offers}
    return PlacementDecision(
        outcome=PlacementOutcome.ADMITTED,
        before=job,
        job=active,
        message=quoted.choice.reason,
        admit=attempt,
        record=quoted.shared.record,
        ledger=(reservation_entry,),
        event_data=data | _dearest(quoted.quote),
    )


def _refuse(facts: PlacementFacts, refusal: Refusal) -> PlacementDecision:
    """Ask for approval, or let the job wait for the policy."""
    job = facts.job
    if refusal.hold is not Hold.APPROVAL:
        return _wait(facts, _with_troubles(facts, refusal.reason))
    waiting = replace(job, state=next_job_state(job.state, JobEvent.NEEDS_APPROVAL), reason=refusal.reason)
    data = {"policy": refusal.policy, "cap_usd": str(job.cap_usd)}
    due_in_s = facts.settings.retry_s
    return _decision(facts, _Outcome.APPROVAL_NEEDED, waiting, event_data=data, due_in_s=due_in_s)


def _wait(facts: PlacementFacts, reason: str) -> PlacementDecision:
    """Keep the job in its state, with the reason shown."""
    waiting = replace(facts.job, reason=reason)
    return _decision(facts, _Outcome.WAITING, waiting, due_in_s=facts.settings.retry_s)


def _requeue(facts: PlacementFacts, outcome: PlacementOutcome, event: JobEvent, message: str = "") -> PlacementDecision:
    queued = replace(facts.job, state=next_job_state(facts.job.state, event), reason="", due_at=None)
    return _decision(facts, outcome, queued, message=message)


def _end_job(
    facts: PlacementFacts, outcome: PlacementOutcome, event: JobEvent, reason: str, message: str = ""
) -> PlacementDecision:
    state = next_job_state(facts.job.state, event)
    ended = replace(facts.job, state=state, reason=reason, finished_at=facts.now)
    return _decision(facts, outcome, ended, message=message)


def _decision(facts: PlacementFacts, outcome: PlacementOutcome, job: Job, **parts: Any) -> PlacementDecision:
    return PlacementDecision(outcome=outcome, before=facts.job, job=job, **parts)


def _with_troubles(facts: PlacementFacts, reason: str) -> str:
    """Append why the providers that the job may use list no offers."""
    allowed = facts.job.spec.resources.providers
    troubles = [f"{name}: {why}" for name, why in facts.troubles.items() if not allowed or name in allowed]
    return "; ".join([reason, *troubles])


def _busy_machines(facts: PlacementFacts) -> list[str]:
    """Return which job occupies each own machine that this job may use."""
    providers, caps = facts.job.spec.resources.providers, facts.settings.caps
    offers = facts.market.offers if facts.market else ()
    return [
        f"{offer.provider}: {busy_message(offer)}"
        for offer in offers
        if offer.busy_with and (offer.provider in providers or not (providers or caps[offer.provider].named_only))
    ]


def same_but_for_numbers(reason: str, other: str) -> bool:
    """Return True if two reasons differ in prices and counts only, since these change with every quote."""
    return _NUMBER.sub("", reason) == _NUMBER.sub("", other)


def _caps(facts: PlacementFacts, line: QuoteLine) -> Caps:
    return facts.settings.caps[line.offer.provider]


def _min_budget_usd(facts: PlacementFacts, line: QuoteLine) -> Decimal:
    every_s = facts.job.spec.checkpoint.min_interval_s
    return min_budget_usd(line, _caps(facts, line), every_s, facts.settings.drain_budget)


def has_local_model(job: Job) -> bool:
    """Return True if the model is a folder of this host."""
    return job.spec.train is not None and job.spec.train.model.startswith(("/", "./", "../", "~"))


def _summary(market_quote: Quote) -> list[dict[str, object]]:
    """Return the best three offers, as the event of the purchase lists them."""
    return [
        {"offer": line.offer.id, "usd_p50": str(line.usd_p50), "usd_per_hour": str(line.offer.usd_per_hour)}
        for line in market_quote.lines[:3]
        if line.usd_p50 is not None
    ]


def _dearest(market_quote: Quote) -> dict[str, object]:
    """Return the most expensive eligible offer, against which the saving of the choice is computed."""
    line = market_quote.lines[market_quote.kept_count - 1] if market_quote.kept_count else None
    if line is None or line.usd_p50 is None:
        return {}
    return {"dearest": {"offer": line.offer.id, "usd_p50": str(line.usd_p50)}}
