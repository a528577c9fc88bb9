"""Decides how a launching attempt advances: when its create has an outcome, and while it has none.

Used by the launch controller, which gathers the facts and applies the decisions. Rules: docs/design/lifecycle.md.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from broker.billing.accrual import no_machine_known
from broker.billing.prices import MachineSpan, extra_machine_changes
from broker.domain.instance import Caps, Observed
from broker.domain.job import Attempt, Handle, Job, PriceChange, Reason
from broker.domain.offer import Offer
from broker.lifecycle.account_refusals import AccountRefusal
from broker.lifecycle.launch import LaunchObservation, judge_launching
from broker.lifecycle.liveness import fault_message, mismatch_message
from broker.lifecycle.signals import SIGNALS, required_end
from broker.lifecycle.state_machine import AttemptEvent, Effect
from broker.lifecycle.transitions import reason_of, setup_reason, step

CREATE_POLL_S = 5.0
"""Seconds until a launching attempt is polled again."""
_SIGNAL_EVENTS = frozenset({AttemptEvent.STOP, *(meaning.event for meaning in SIGNALS.values())})


@dataclass(frozen=True, kw_only=True)
class Created:
    """The cloud answered with machines."""

    handles: tuple[Handle, ...]


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """The create never answered; listings show all its machines, and the provider confirmed that they are as bought."""

    handles: tuple[Handle, ...]


@dataclass(frozen=True, kw_only=True)
class NotConfirmed:
    """All machines are listed, and the provider could not check whether they are as bought."""

    handles: tuple[Handle, ...]
    message: str


@dataclass(frozen=True, kw_only=True)
class CreateRefused:
    """The cloud refused the purchase."""

    event: AttemptEvent
    """NO_CAPACITY or REJECTED."""
    message: str
    reason: Reason | None = None
    """Reason of the attempt's end; None: the reason that belongs to `event`."""
    account: AccountRefusal | None = None
    """Set when the refusal concerns the account and not only this offer."""
    is_sold_out: bool = False
    """True if the cloud reported that it has no capacity."""
    handles: tuple[Handle, ...] = ()
    """Machines that exist in spite of the refusal, and are charged."""


@dataclass(frozen=True, kw_only=True)
class JobUnusable:
    """A secret of the job is missing or unreadable, so no create was sent."""

    message: str


@dataclass(frozen=True, kw_only=True)
class CreateNotSent:
    """The blob store could not be written, so no cloud was asked."""

    message: str
    is_first: bool
    """True if this was the first create of that name and it failed before the cloud could be called."""


@dataclass(frozen=True, kw_only=True)
class CreateUnknown:
    """The create may or may not have bought machines."""

    message: str
    error: Exception | None = None
    """An unexpected exception, which the caller raises again after the outcome is written; None: there was none."""


CreateOutcome = Created | Adopted | NotConfirmed | CreateRefused | JobUnusable | CreateNotSent | CreateUnknown


class LaunchStep(StrEnum):
    """Ways in which a launching attempt can advance."""

    WAIT = "wait"
    CONFIRM = "confirm"
    """Ask the provider whether the listed machines are as bought; the answer is a `CreateOutcome`."""
    CREATE = "create"
    """Call create again under the same name: no machine exists and none will appear."""
    WRITE = "write"
    """Write the next state."""


class LaunchReport(StrEnum):
    """Events that report a decision."""

    NONE = "none"
    REFUSED = "refused"
    BOOTING = "booting"
    ENDED = "ended"


class LaunchCharge(StrEnum):
    """Charges that are written with a decision."""

    NONE = "none"
    UP_TO_NOW = "up to now"
    """All that is owed until now."""
    EXTRA_LISTED = "extra machines that are listed"
    EXTRA_CREATED = "extra machines that create returned"


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """All facts on which the advance of one launching attempt depends, while its create has not answered."""

    job: Job
    attempt: Attempt
    """The attempt as it was claimed."""
    caps: Caps
    now: datetime
    observation: LaunchObservation = field(default_factory=LaunchObservation)
    is_listed: bool = True
    """False when the cloud could not be listed just now: `observation` holds nothing then."""
    running_at: datetime | None = None
    """Time at which the machines ran according to the listings; None: no listing has shown them running."""
    look_s: float = 2.0
    """Seconds between two polls of a live attempt."""


@dataclass(frozen=True, kw_only=True)
class LaunchDecision:
    """The next state of a launching attempt, and what is written with it."""

    step: LaunchStep
    before: Attempt
    attempt: Attempt
    """The attempt after the decision; equal to `before` when nothing is written."""
    report: LaunchReport = LaunchReport.NONE
    message: str = ""
    """Text of the report REFUSED."""
    charge: LaunchCharge = LaunchCharge.NONE
    prices: tuple[PriceChange, ...] = ()
    """Price changes of the charge EXTRA_CREATED."""
    due_in_s: float = 0.0
    cancels_launcher: bool = False
    """True when the launcher must be asked to stop once the decision is written."""


def advance_launch(facts: LaunchFacts) -> LaunchDecision:
    """Return what becomes of an attempt whose create has not answered.

    A signal ends the attempt independently of listings. Create is called again only when the launcher is dead and the
    absence of its machines is proven.
    """
    attempt, observation, now = facts.attempt, facts.observation, facts.now
    if (signal := required_end(attempt, facts.job)) is not None:
        return _end_launch(attempt, signal, LaunchObservation(), now)
    if not facts.is_listed:
        return LaunchDecision(step=LaunchStep.WAIT, before=attempt, attempt=attempt, due_in_s=CREATE_POLL_S)
    observed = replace(attempt, running_at=facts.running_at)
    event = judge_launching(attempt, observation, facts.caps, now)
    if event is None:  # recorded now, because later listings may not show the machines that must be destroyed
        due_in_s = min(CREATE_POLL_S, facts.look_s)
        noted = replace(observed, handles=all_handles(observed, observation.listed))
        return LaunchDecision(step=LaunchStep.WAIT, before=attempt, attempt=noted, due_in_s=due_in_s)
    if event is AttemptEvent.CREATED:
        return LaunchDecision(step=LaunchStep.CONFIRM, before=observed, attempt=observed)
    if event is AttemptEvent.ABSENT:
        return LaunchDecision(
            step=LaunchStep.CREATE,
            before=observed,
            attempt=step(observed, event, now).attempt,
            charge=LaunchCharge.UP_TO_NOW,  # for the first create; the next one may be refused
            due_in_s=CREATE_POLL_S,
        )
    return _end_launch(observed, event, observation, now)


def after_create(
    attempt: Attempt, outcome: CreateOutcome, now: datetime, *, launcher_id: str, poll_s: float
) -> LaunchDecision:
    """Return the decision on the outcome of a create, or of the confirmation of listed machines.

    `launcher_id`: identity of this process as a launcher. `poll_s`: seconds until an unknown outcome is looked up.
    """
    match outcome:
        case Created(handles=handles):
            created = _created if len(handles) == attempt.line.nodes else _miscounted
            decision = created(attempt, handles, now)
            # The launcher has finished. If this host is lost later, no broker could prove that.
            return replace(decision, attempt=replace(decision.attempt, launched_by=""))
        case Adopted(handles=handles):
            return _created(attempt, handles, now)
        case NotConfirmed(handles=handles, message=message):
            detail = f"its agent runs, but its machines cannot be checked: {message}"
            return _write(attempt, replace(attempt, handles=handles, detail=detail), due_in_s=CREATE_POLL_S)
        case CreateRefused():
            return _refused(attempt, outcome, now)
        case JobUnusable(message=message):  # every offer would fail in the same way, so the job fails
            ended = step(attempt, AttemptEvent.REJECTED, now, reason=Reason.USER_ERROR).attempt
            return _write(attempt, replace(ended, detail=message), report=LaunchReport.REFUSED, message=message)
        case CreateNotSent():
            return _not_sent(attempt, outcome, now, launcher_id, poll_s)
    unknown = replace(attempt, detail=f"create's outcome is unknown: {outcome.message}")
    return _write(attempt, unknown, due_in_s=poll_s)


def all_handles(attempt: Attempt, listed: tuple[Observed, ...]) -> tuple[Handle, ...]:
    """Return the recorded machines and the listed ones, each once."""
    handles = (*attempt.handles, *(machine.handle for machine in listed))
    return tuple({handle.id: handle for handle in handles}.values())


def _created(attempt: Attempt, handles: tuple[Handle, ...], now: datetime) -> LaunchDecision:
    booting = replace(step(attempt, AttemptEvent.CREATED, now).attempt, handles=handles, detail="")
    return _write(attempt, booting, report=LaunchReport.BOOTING)


def _miscounted(attempt: Attempt, handles: tuple[Handle, ...], now: datetime) -> LaunchDecision:
    """End an attempt that got fewer or more machines than were bought.

    Create is not repeated for missing machines, because a launcher may wait for them for ever. Extra machines are
    charged.
    """
    detail = f"asked for {attempt.line.nodes} machines, got {len(handles)}"
    ended = replace(step(attempt, AttemptEvent.MISMATCH, now).attempt, handles=handles, detail=detail)
    spans = [MachineSpan(id=handle.id, since=None, shown=now, until=None) for handle in handles]
    prices = extra_machine_changes(attempt, attempt.prices, spans)
    charge = LaunchCharge.EXTRA_CREATED if prices else LaunchCharge.NONE
    return replace(_write(attempt, ended, report=LaunchReport.ENDED), charge=charge, prices=prices)


def _refused(attempt: Attempt, outcome: CreateRefused, now: datetime) -> LaunchDecision:
    message, detail = f"{attempt.line.offer.cloud}: {outcome.message}", outcome.message
    if outcome.account is not None:
        message = detail = f"{outcome.account.message} ({outcome.message})"
    ended = step(attempt, outcome.event, now, reason=outcome.reason).attempt
    ended = replace(ended, detail=detail, handles=outcome.handles or ended.handles)
    return _write(attempt, ended, report=LaunchReport.REFUSED, message=message)


def _not_sent(
    attempt: Attempt, outcome: CreateNotSent, now: datetime, launcher_id: str, poll_s: float
) -> LaunchDecision:
    """Release the attempt, so that any broker can send its create.

    After a first create that was certainly not sent, the attempt costs nothing and becomes planned again. Otherwise two
    listings must prove that no machine exists.
    """
    unsent = replace(attempt, launched_by="", detail=f"create was not sent: {outcome.message}")
    is_own = attempt.launched_by == launcher_id
    if outcome.is_first and is_own and no_machine_known(attempt) and attempt.charged_to is None:
        return _write(attempt, step(unsent, AttemptEvent.UNSENT, now).attempt, due_in_s=CREATE_POLL_S)
    return _write(attempt, unsent, due_in_s=poll_s)


def _end_launch(attempt: Attempt, event: AttemptEvent, observation: LaunchObservation, now: datetime) -> LaunchDecision:
    """End a launch: its machines are destroyed, and its launcher is asked to stop."""
    reason = setup_reason(observation.listed) if event is AttemptEvent.SETUP_FAILED else None
    if observation.final is not None:
        reason = reason_of(observation.final, None)  # termination determines the reason of a drain
    transition = step(attempt, event, now, reason=reason)
    # The message of the create says more about the cause than the event does.
    cause = f"{event.value} ({attempt.detail})" if attempt.detail else event.value
    detail = (
        observation.final.message
        if observation.final
        else _fault_message(attempt.line.offer, event, observation.listed) or cause
    )
    ended = replace(
        transition.attempt, final=observation.final, detail=detail, handles=all_handles(attempt, observation.listed)
    )
    return LaunchDecision(
        step=LaunchStep.WRITE,
        before=attempt,
        attempt=ended,
        report=LaunchReport.NONE if event in _SIGNAL_EVENTS else LaunchReport.ENDED,
        charge=LaunchCharge.EXTRA_LISTED,
        cancels_launcher=Effect.CANCEL in transition.effects,
    )


def _write(
    before: Attempt,
    attempt: Attempt,
    *,
    report: LaunchReport = LaunchReport.NONE,
    message: str = "",
    due_in_s: float = 0.0,
) -> LaunchDecision:
    return LaunchDecision(
        step=LaunchStep.WRITE, before=before, attempt=attempt, report=report, message=message, due_in_s=due_in_s
    )


def _fault_message(offer: Offer, event: AttemptEvent, listed: tuple[Observed, ...]) -> str | None:
    """Return what the listing shows of the cause; None: nothing."""
    if event is AttemptEvent.MISMATCH:
        return mismatch_message(offer, listed)
    return fault_message(listed) if event is AttemptEvent.SETUP_FAILED else None
