"""Decides whether a running attempt moves to cheaper spot, or stays. Used by the review controller.

A move is a drain and a new attempt, which placement buys. `review_active` is pure. It quotes the rest of the job as
placement would after the drain, so that placement then buys the offer that the review has compared. An attempt on
spot moves to another spot offer only: see `_review_on_spot`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from broker.billing.accrual import machine_cost, machine_s
from broker.billing.caps import min_budget_usd, reservation, reserved
from broker.billing.drain import lead_s
from broker.billing.prices import ceiling, price_now
from broker.domain.instance import Caps
from broker.domain.job import Attempt, AttemptState, Job, Reason
from broker.domain.money import ZERO, format_usd, usd
from broker.domain.offer import Offer, Quote, QuoteLine, SpotOutlook
from broker.domain.spec import JobSpec
from broker.estimator.planning.corrections import Corrections
from broker.estimator.spot_hazards import market
from broker.estimator.workload import remaining
from broker.lifecycle.recovery import adjusted_workload
from broker.lifecycle.transitions import made_progress
from broker.policy.budgets import Applied, judge, purchase
from broker.quote.engine import quote
from broker.quote.job_placement import has_local_model
from broker.quote.placement import choose
from broker.quote.placement_facts import PlacementSettings
from broker.quote.spot.delay import delay_usd as usd_of_delay
from broker.quote.spot.plan import PlanSource, plan_for
from broker.quote.spot.policy import life_min

MIN_STAY_S = 1200.0
"""Seconds that an attempt trains before it may move."""
MAX_DOUBLINGS = 5
"""Maximum number of times that fruitless moves double the minimum stay."""
UNLIMITED_USD = Decimal(10**9)
"""Cap of the quote for staying, which no offer exceeds."""
MOVE_SHARE = Decimal("0.9")
"""An attempt without a deadline moves only if the move is expected to cost at most this share of staying."""
MIN_SPOT_STAY_S = 3600.0
"""Seconds that an attempt on spot trains before it may move to another spot offer."""
CHANGEOVERS_SAVED = 2
"""A move from spot to spot must save this multiple of what its changeover costs."""


@dataclass(frozen=True, kw_only=True)
class ActiveReview:
    """All facts on which the review of one active attempt depends."""

    job: Job
    attempt: Attempt
    now: datetime
    """Current time of the database clock."""
    settings: PlacementSettings
    offers: Sequence[Offer]
    """Offers on sale that may be bought now; see `shortlist`."""
    learned: Corrections
    """Corrections of the estimator from this installation's own runs."""
    plans: PlanSource = plan_for
    policies: Sequence[Applied] = ()
    """Policies that cover the job, with their spending at `policies_at`."""
    policies_at: datetime
    forbidden: str = ""
    """Reason why the installation does not run this job; empty: it does."""
    earlier: Sequence[Attempt] = ()
    """Ended attempts of the job, oldest first. The controller reads them only before a move."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """The attempt drains, and the job continues on a cheaper offer."""

    offer: Offer
    saved_usd: Decimal
    """Expected dollars saved against on-demand until the end of the job, all costs of the move included."""
    message: str


@dataclass(frozen=True, kw_only=True)
class Stay:
    """The attempt continues, with the reason in one line."""

    reason: str


def review_active(facts: ActiveReview) -> Move | Stay:
    """Return whether the attempt moves to spot now."""
    if (reason := _obstacle(facts)) is not None:
        return Stay(reason=reason)
    if facts.attempt.line.offer.spot:
        return _review_on_spot(facts)
    rest_quote, left_h = _quote(facts), _left_h(facts)
    if left_h is None:
        return Stay(reason="stays on demand: its duration is unknown")
    stay_usd = _running_usd(facts, left_h)
    planned = _planned_costs(facts, rest_quote.spot_outlook, stay_usd)
    if rest_quote.spot_outlook is not None and planned is not None and planned[0] >= planned[1]:
        return Stay(reason=_dearer_message(rest_quote.spot_outlook.offer_id, *planned))
    choice = choose(
        rest_quote,
        cap_left=_cap_left(facts),
        attempt_number=facts.job.attempts + 1,
        min_budget=lambda line: _least_usd(facts, line),
    )
    line = choice.line
    if line is None or not line.offer.spot or line.usd_p50 is None or rest_quote.deadline_at_risk:
        return Stay(reason=f"stays on demand: {_no_spot_message(rest_quote, choice.line)}")
    if planned is not None:
        return _unless_refused(facts, line, stay_usd - planned[0])
    delay_usd = _delay_usd(facts, (line.hours_p50 or 0.0) - left_h)
    if (move_usd := line.usd_p50 + _drain_usd(facts) + delay_usd) > stay_usd * MOVE_SHARE:
        return Stay(reason=_dearer_message(line.offer.id, move_usd, stay_usd))
    return _unless_refused(facts, line, stay_usd - move_usd)


def _review_on_spot(facts: ActiveReview) -> Move | Stay:
    """Return whether an attempt on spot moves to a cheaper spot offer.

    A new machine is expected to live as long as the market's history says, and the lower price counts for that time
    only. The saving must be several times the cost of the changeover, so that no move is made for a small difference.
    """
    rest_quote, left_h = _quote(facts), _left_h(facts)
    line = choose(
        rest_quote,
        cap_left=_cap_left(facts),
        attempt_number=facts.job.attempts + 1,
        min_budget=lambda line: _least_usd(facts, line),
    ).line
    if line is None or not _is_candidate(facts.attempt, line.offer) or rest_quote.deadline_at_risk:
        return Stay(reason="stays on spot: no other spot offer is cheaper or fits its deadline and cap")
    if left_h is None or not left_h or line.hours is None:
        return Stay(reason="stays on spot: its duration is unknown")
    hours = line.hours
    price_usd = line.offer.usd_per_hour * line.nodes
    work_h = hours.training + hours.evaluation + hours.checkpoints
    saved_per_h = _running_usd(facts, 1.0) - usd(price_usd * Decimal(repr(work_h / left_h)))
    life_h = life_min(facts.learned.markets, market(line.offer, line.nodes), facts.now.timestamp() / 60) / 60
    traffic_usd = line.costs.traffic if line.costs else ZERO
    change_usd = usd(price_usd * Decimal(repr(hours.boot + hours.load))) + _drain_usd(facts) + traffic_usd
    change_usd += _delay_usd(facts, hours.boot + hours.load)
    saved_usd = usd(saved_per_h * Decimal(repr(min(life_h, left_h)))) - change_usd
    if saved_usd < (CHANGEOVERS_SAVED - 1) * change_usd:
        return Stay(
            reason=f"stays on spot: a move to {line.offer.id} costs {format_usd(change_usd)} and saves too little"
        )
    return _unless_refused(facts, line, saved_usd)


def _planned_costs(
    facts: ActiveReview, outlook: SpotOutlook | None, stay_usd: Decimal
) -> tuple[Decimal, Decimal] | None:
    """Return the expected dollars to the end after a move and without it now; None: no plan compares them.

    `stay_usd`: dollars to the end on the running machine, which may be cheaper than what the market sells now.
    """
    if outlook is None or outlook.demand_usd is None or outlook.spot_usd is None:
        return None
    return outlook.spot_usd + _drain_usd(facts), min(outlook.demand_usd, stay_usd)


def _dearer_message(offer_id: str, move_usd: Decimal, stay_usd: Decimal) -> str:
    return (
        f"stays on demand: a move to {offer_id} is expected to cost {format_usd(move_usd)} to the end, "
        f"staying {format_usd(stay_usd)}"
    )


def _unless_refused(facts: ActiveReview, line: QuoteLine, saved_usd: Decimal) -> Move | Stay:
    """Return the move, unless a policy could hold back its purchase."""
    request = purchase(line, _reserve_usd(facts, line), facts.job.cap_usd, facts.job.approved_usd)
    # The request counts in addition to the running attempt: another job may take the place that the attempt gives up.
    if (refusal := judge(request, facts.policies, facts.policies_at)) is not None:
        return Stay(reason=f"stays: a move could lose its place, {refusal.reason}")
    return _move(line, saved_usd)


def _move(line: QuoteLine, saved_usd: Decimal) -> Move:
    offer = line.offer
    return Move(
        offer=offer,
        saved_usd=saved_usd,
        message=f"moves to spot in {offer.region} ({offer.cloud} {offer.instance_type}, "
        f"{format_usd(offer.usd_per_hour)}/h), saves {format_usd(saved_usd)}",
    )


def may_move(job: Job, attempt: Attempt) -> bool:
    """Return True if an attempt is of the kind that a review may move: it trains, and spot is allowed."""
    return (
        attempt.state is AttemptState.TRAINING
        and attempt.signal is None
        and attempt.line.offer.usd_per_hour > 0
        and not job.stop_requested
        and job.spec.resources.spot != "never"
    )


def required_stay_s(earlier: Sequence[Attempt], spot_s: float | None = None) -> float:
    """Return seconds that an attempt trains before it may move: doubled by each fruitless move in a row.

    A move is fruitless if the spot machines after it trained for less than the minimum stay. `spot_s`: seconds that
    the running attempt has trained on spot.
    """
    least_s, fruitless = MIN_STAY_S if spot_s is None else MIN_SPOT_STAY_S, 0
    after_s = spot_s or 0.0
    for attempt in reversed(earlier):
        if attempt.reason is Reason.MOVED:
            if after_s >= least_s:
                break
            fruitless, after_s = fruitless + 1, 0.0
        if attempt.line.offer.spot:
            after_s += _trained_s(attempt)
    return least_s * 2.0 ** min(fruitless, MAX_DOUBLINGS)


def _trained_s(attempt: Attempt) -> float:
    end = attempt.terminating_since or attempt.ended_at
    return (end - attempt.first_beat_at).total_seconds() if attempt.first_beat_at and end else 0.0


def _obstacle(facts: ActiveReview) -> str | None:
    """Return why the attempt cannot move now at any price; None: it can."""
    job, attempt = facts.job, facts.attempt
    if not may_move(job, attempt):
        return "stays: it does not train, or spot is not allowed"
    stays = f"stays on {'spot' if attempt.line.offer.spot else 'demand'}"
    if facts.forbidden:
        return f"{stays}: {facts.forbidden}"
    if job.spec.script is not None and not job.spec.script.checkpoints:
        return f"{stays}: the script writes no checkpoints, so a move would lose its work"
    if attempt.idle is not None or not made_progress(attempt):
        return f"{stays}: it has not saved a checkpoint of its own, so a move could lose work"
    trained_s = (facts.now - (attempt.first_beat_at or facts.now)).total_seconds()
    stay_s = required_stay_s(facts.earlier, trained_s if attempt.line.offer.spot else None)
    if trained_s < stay_s:
        return f"{stays}: it may move after {stay_s / 60:.0f} min of training"
    if not any(_is_candidate(attempt, offer) for offer in facts.offers):
        return f"{stays}: no {'cheaper ' if attempt.line.offer.spot else ''}spot offer is on sale"
    return None


def _is_candidate(attempt: Attempt, offer: Offer) -> bool:
    """Return True for a spot offer; an attempt on spot moves only to one of the same GPUs at a lower price."""
    own = attempt.line.offer
    if not offer.spot or not own.spot:
        return offer.spot
    is_same = (offer.accelerator, offer.gpus) == (own.accelerator, own.gpus)
    return is_same and offer.id != own.id and offer.usd_per_hour < price_now(attempt)


def _changeover_s(facts: ActiveReview) -> float:
    """Return the longest time from the decision to the purchase: drain, destroy and proof of absence."""
    return lead_s(facts.attempt.line.offer, _caps(facts), facts.settings.drain_budget)


def _quote(facts: ActiveReview) -> Quote:
    """Quote the rest of the job as placement would after the drain."""
    job, attempt, settings = facts.job, facts.attempt, facts.settings
    return quote(
        _spec_at_measured_speed(facts),
        remaining(adjusted_workload(job), _saved_step(attempt)),
        facts.offers,
        now=facts.now,
        local_files=settings.local_files or has_local_model(job),
        scoped_store=settings.scoped_store,
        spent=job.spent_usd,
        cap_left=_cap_left(facts),
        excluded={},
        caps=settings.caps,
        machine_s=job.machine_s + machine_s(attempt, facts.now),
        lead_s=settings.drain_budget.lead_s + _changeover_s(facts),
        storage_usd_per_gib_month=settings.storage_usd_per_gib_month,
        learned=facts.learned,
        on_demand=not attempt.line.offer.spot,
        measured_step_s=job.forecast.step_s if job.forecast else None,
        plans=facts.plans,
    )


def _spec_at_measured_speed(facts: ActiveReview) -> JobSpec:
    """Return the spec with a deadline that is earlier by as much as the attempt runs slower than estimated."""
    spec, expected, planned_s = facts.job.spec, facts.job.forecast, facts.attempt.line.step_s
    if spec.deadline is None or expected is None or not planned_s or expected.step_s <= planned_s:
        return spec
    left_s = (spec.deadline - facts.now).total_seconds() * planned_s / expected.step_s
    return spec.model_copy(update={"deadline": facts.now + timedelta(seconds=left_s)})


def _left_h(facts: ActiveReview) -> float | None:
    """Return the expected hours to finish on the running machines, which are set up already; None: unknown."""
    job, attempt, settings = facts.job, facts.attempt, facts.settings
    unlimited = job.spec.model_copy(update={"deadline": None, "max_duration": None})
    local_quote = quote(
        unlimited,
        remaining(adjusted_workload(job), attempt.beat.step if attempt.beat else 0),
        [attempt.line.offer],
        now=facts.now,
        local_files=False,
        scoped_store=True,
        spent=ZERO,
        cap_left=UNLIMITED_USD,
        excluded={},
        caps=settings.caps,
        learned=facts.learned,
    )
    hours = local_quote.best.hours if local_quote.best else None
    return None if hours is None else hours.training + hours.evaluation + hours.checkpoints


def _running_usd(facts: ActiveReview, hours: float) -> Decimal:
    """Return the dollars of the running machines for some hours."""
    return usd(price_now(facts.attempt) * facts.attempt.line.nodes * Decimal(repr(hours)))


def _drain_usd(facts: ActiveReview) -> Decimal:
    """Return the expected dollars of the drain."""
    return _running_usd(facts, _drain_s(facts) / 3600)


def _drain_s(facts: ActiveReview) -> float:
    """Return the expected seconds of the drain: the last save, the teardown, and half a minute for the order."""
    attempt, caps = facts.attempt, _caps(facts)
    saved = attempt.beat.checkpoint if attempt.beat else None
    return 30.0 + (saved.save_s if saved else 0.0) + caps.teardown_s + caps.list_lag_s


def _delay_usd(facts: ActiveReview, later_h: float) -> Decimal:
    """Return what a finish that is `later_h` and a drain later is worth to a job without a deadline."""
    spec = facts.job.spec
    worth_usd = spec.hour_worth_usd if spec.deadline is None else ZERO
    return usd(usd_of_delay(worth_usd, later_h + _drain_s(facts) / 3600))


def _cap_left(facts: ActiveReview) -> Decimal:
    """Return what is left under the cap after the longest drain at the highest price."""
    attempt, price = facts.attempt, price_now(facts.attempt)
    offer, nodes = attempt.line.offer, attempt.line.nodes
    longest = machine_cost(offer, nodes, timedelta(seconds=_changeover_s(facts)), ceiling(offer, price))
    return max(ZERO, reservation(facts.job) - longest)


def _reserve_usd(facts: ActiveReview, line: QuoteLine) -> Decimal:
    return reserved(facts.job, line, facts.settings.caps[line.offer.provider], facts.settings.drain_budget)


def _least_usd(facts: ActiveReview, line: QuoteLine) -> Decimal:
    every_s = facts.job.spec.checkpoint.min_interval_s
    return min_budget_usd(line, facts.settings.caps[line.offer.provider], every_s, facts.settings.drain_budget)


def _caps(facts: ActiveReview) -> Caps:
    return facts.settings.caps[facts.attempt.line.offer.provider]


def _saved_step(attempt: Attempt) -> int:
    """Return the step of the last committed checkpoint. The drain saves a later one unless it fails."""
    return attempt.beat.checkpoint.step if attempt.beat and attempt.beat.checkpoint else 0


def _no_spot_message(ranking: Quote, line: QuoteLine | None) -> str:
    """Return why the quote leads to no spot purchase."""
    if ranking.deadline_at_risk:
        return "the deadline leaves no time for a move"
    if line is not None and any(ranking.lines[place].offer.spot for place in range(ranking.kept_count)):
        return "on demand costs less than spot"
    return "no spot offer fits its deadline, cap and requirements"
