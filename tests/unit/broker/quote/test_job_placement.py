"""Decisions about one queued job, from facts alone."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given

from broker.domain.job import Event, Job, JobState, Reason
from broker.domain.offer import ACCOUNT, Offer
from broker.domain.policy import Policy
from broker.estimator.planning.corrections import NO_CORRECTIONS
from broker.lifecycle.decisions.restored_decision import RestoredDecision
from broker.policy.budgets import Applied, PolicyUsage
from broker.quote.job_placement import decide_placement, placement_events
from broker.quote.placement_facts import (
    FactsNeeded,
    MarketFacts,
    MissingFacts,
    PlacementDecision,
    PlacementFacts,
    PlacementOutcome,
    PlacementSettings,
)
from tests.support import build
from tests.support.machines import CAPS, NOW, SCRIPT, WORK, offer, spec
from tests.unit.broker.quote.test_engine import caps_left, markets

SETTINGS = PlacementSettings(
    installation=build.INSTALLATION, caps={**CAPS, "new": CAPS["cloud"]}, drain_budget=build.drain_budget()
)
NONE_LOST = RestoredDecision()


def job(spec_changes: dict[str, Any] | None = None, **changes: Any) -> Job:
    values: dict[str, Any] = {"workload": SCRIPT, "spec": spec(**(spec_changes or {})), "cap_usd": Decimal(100)}
    return build.job(**values | changes)


def policy(standing: PolicyUsage | None = None, **rules: Any) -> Applied:
    found = Policy.model_validate({"name": "nlp", "team": "nlp", **rules})
    return Applied(id=1, policy=found, usage=standing or PolicyUsage())


def facts(queued: Job, offers: Sequence[Offer] | None = None, **changes: Any) -> PlacementFacts:
    market = None if offers is None else MarketFacts(offers=offers, resume_from=(), learned=NO_CORRECTIONS)
    values: dict[str, Any] = {"now": NOW, "policies_at": NOW, "settings": SETTINGS, "market": market}
    return PlacementFacts(job=queued, **values | changes)


def decide(queued: Job, offers: Sequence[Offer] = (), **changes: Any) -> PlacementDecision:
    decision = decide_placement(facts(queued, offers, **{"restored": NONE_LOST} | changes))
    assert isinstance(decision, PlacementDecision)
    assert decision.before == queued
    return decision


def only_event(decision: PlacementDecision) -> Event:
    (event,) = placement_events(decision)
    return event


def test_a_stopped_job_is_cancelled_before_anything_else() -> None:
    decision = decide(job(stop_requested=True, state=JobState.RECOVERING), forbidden="no")
    assert decision.outcome is PlacementOutcome.CANCELLED
    assert (decision.job.state, decision.job.finished_at) == (JobState.CANCELLED, NOW)
    assert only_event(decision).message == "cancelled"


def test_a_back_off_that_is_over_queues_silently() -> None:
    decision = decide(job(state=JobState.RECOVERING, due_at=NOW, reason="preempted"))
    assert decision.outcome is PlacementOutcome.BACK_OFF_OVER
    assert (decision.job.state, decision.job.reason, decision.job.due_at) == (JobState.QUEUED, "", None)
    assert placement_events(decision) == ()


def test_a_deadline_that_is_too_near_fails_the_job() -> None:
    deadline = (NOW + timedelta(seconds=SETTINGS.drain_budget.lead_s)).isoformat()
    decision = decide(job({"deadline": deadline}), [offer()])
    assert (decision.outcome, decision.job.state) == (PlacementOutcome.OUT_OF_TIME, JobState.FAILED)
    assert only_event(decision).kind == "job.failed"


def test_a_policy_asks_for_approval_once() -> None:
    """The event names the policy and the cap. While the job waits for approval nothing more is reported."""
    rules = [policy(approval_above_usd="1")]
    decision = decide(job(), [offer()], policies=rules)
    assert (decision.outcome, decision.job.state) == (PlacementOutcome.APPROVAL_NEEDED, JobState.AWAITING_APPROVAL)
    assert only_event(decision).data == {"policy": "nlp", "cap_usd": "100"}
    pending = decide(decision.job, [offer()], policies=rules)
    assert (pending.outcome, pending.job) == (PlacementOutcome.APPROVAL_PENDING, decision.job)
    assert placement_events(pending) == ()
    assert pending.due_in_s == SETTINGS.retry_s


@pytest.mark.parametrize("rules", [[], [policy(PolicyUsage(jobs=1), max_jobs=1)]])
def test_approval_is_waived_when_the_policy_has_changed(rules: list[Applied]) -> None:
    decision = decide(job(state=JobState.AWAITING_APPROVAL), policies=rules)
    assert (decision.outcome, decision.job.state) == (PlacementOutcome.APPROVAL_WAIVED, JobState.QUEUED)
    assert "the policy has changed" in only_event(decision).message


def test_a_full_policy_and_silent_providers_are_both_named() -> None:
    rules = [policy(PolicyUsage(jobs=1), max_jobs=1)]
    wait = decide(job(), policies=rules, troubles={"cloud": "no answer"})
    assert wait.outcome is PlacementOutcome.WAITING
    assert wait.job.reason.startswith("waits for policy nlp: max_jobs is 1")
    assert wait.job.reason.endswith("; cloud: no answer")
    other = decide(job({"resources": {"providers": ["mine"]}}), policies=rules, troubles={"cloud": "no answer"})
    assert "no answer" not in other.job.reason


def test_a_forbidden_job_waits_with_its_reason() -> None:
    assert decide(job(), [offer()], forbidden="remote code is off").job.reason == "remote code is off"


def test_an_unreadable_blob_store_keeps_the_job_waiting() -> None:
    wait = decide(job(), [offer()], unreadable="503")
    assert wait.job.reason == "the blob store cannot be read, so earlier attempts are unknown: 503"


def test_a_wait_is_reported_again_only_for_another_cause() -> None:
    first = decide(job(), forbidden="needs $5")
    assert only_event(first).kind == "job.waiting"
    assert placement_events(decide(first.job, forbidden="needs $7.5")) == ()
    assert placement_events(decide(first.job, forbidden="wants $7.5")) != ()


def test_facts_that_cost_requests_are_asked_for_in_turn() -> None:
    """The market first; attempts lost by a restore only once there is an offer to buy. The quote is kept."""
    market = decide_placement(facts(job()))
    assert isinstance(market, FactsNeeded)
    assert market.missing is MissingFacts.MARKET
    restored = decide_placement(facts(job(), [offer()]))
    assert isinstance(restored, FactsNeeded)
    assert restored.missing is MissingFacts.RESTORED
    assert restored.facts.quoted is not None
    decision = decide_placement(replace(restored.facts, restored=NONE_LOST))
    assert isinstance(decision, PlacementDecision)
    assert decision.admit is not None
    assert decision.admit.line is restored.facts.quoted.choice.line


def test_a_purchase_reserves_and_records_the_quote() -> None:
    cheap, dear = offer(id="a"), offer(id="b", usd_per_hour=Decimal(9))
    decision = decide(job(workload=WORK), [dear, cheap])
    attempt = decision.admit
    assert attempt is not None
    assert (decision.outcome, decision.job.state) == (PlacementOutcome.ADMITTED, JobState.ACTIVE)
    assert (attempt.number, decision.job.attempts, attempt.line.offer) == (1, 1, cheap)
    assert [entry.usd for entry in decision.ledger] == [attempt.reserved_usd]
    assert decision.record
    event = only_event(decision)
    assert (event.kind, event.attempt_id) == ("attempt.planned", attempt.id)
    assert event.data["dearest"]["offer"] == "b"
    assert [line["offer"] for line in event.data["offers"]] == ["a", "b"]


def test_a_purchase_without_a_known_time_names_no_dearest_offer() -> None:
    event = only_event(decide(job(), [offer()]))
    assert "dearest" not in event.data
    assert event.data["offers"] == []


def test_an_empty_market_waits_and_names_refusing_accounts() -> None:
    wait = decide(job(), [], excluded={f"{ACCOUNT}cloud/": "the key is refused"})
    assert wait.outcome is PlacementOutcome.WAITING
    assert wait.job.reason.startswith("the key is refused; no offers")


def test_a_cap_below_the_cheapest_finish_ends_the_job() -> None:
    capped = decide(job(cap_usd=Decimal("0.01")), [offer()])
    assert (capped.outcome, capped.job.state, capped.job.finished_at) == (PlacementOutcome.CAPPED, JobState.CAPPED, NOW)


def test_a_gpu_limit_of_a_policy_never_caps_a_job() -> None:
    """Offers beyond the limit are not quoted, so the broker cannot tell if the cap suffices for them."""
    wait = decide(job(cap_usd=Decimal("0.01")), [offer()], policies=[policy(max_gpus=1)])
    assert wait.outcome is PlacementOutcome.WAITING
    assert "max_gpus of policy nlp is 1" in wait.job.reason


def test_a_policy_can_refuse_the_purchase_itself() -> None:
    budgets = [{"limit_usd": "5", "per": "day"}]
    wait = decide(job(), [offer()], policies=[policy(PolicyUsage(charged=(Decimal(0),)), budgets=budgets)])
    assert wait.outcome is PlacementOutcome.WAITING
    assert "more than the budget" in wait.job.reason


def test_machines_of_lost_attempts_are_waited_for() -> None:
    wait = decide(job(), [offer()], restored=RestoredDecision(numbers=(1,), blocked="its machine runs"))
    assert (wait.outcome, wait.job.reason, wait.admit) == (PlacementOutcome.WAITING, "its machine runs", None)


@pytest.mark.parametrize("ended_for", [None, Reason.PREEMPTED])
def test_numbers_of_lost_attempts_are_skipped(ended_for: Reason | None) -> None:
    skipped = decide(job(), [offer()], restored=RestoredDecision(numbers=(1, 3), ended_for=ended_for))
    assert (skipped.outcome, skipped.job.attempts, skipped.job.state) == (
        PlacementOutcome.NUMBERS_SKIPPED, 3, JobState.QUEUED,
    )  # fmt: skip
    assert only_event(skipped).kind == "job.restored"


@pytest.mark.parametrize(
    ("ended_for", "state", "kind"),
    [(Reason.STOPPED, JobState.CANCELLED, "job.cancelled"), (Reason.CAPPED, JobState.CAPPED, "job.capped")],
)
def test_a_lost_attempt_that_ended_the_job_ends_it(ended_for: Reason, state: JobState, kind: str) -> None:
    ended = decide(job(), [offer()], restored=RestoredDecision(numbers=(2,), ended_for=ended_for))
    assert (ended.job.state, ended.job.attempts, ended.job.finished_at) == (state, 2, NOW)
    event = only_event(ended)
    assert (event.kind, event.message) == (kind, f"{ended_for.value} after the backup that this database comes from")


def test_a_local_model_is_bought_for_where_its_files_are() -> None:
    local = job({"train": {"model": "./model"}}, workload=WORK)
    assert decide(local, [offer()]).admit is None
    assert decide(local, [offer(provider="mine", id="mine/x")]).admit is not None


@given(markets, caps_left)
def test_an_attempt_is_admitted_exactly_when_an_offer_is_bought(market: list[Offer], left: Decimal) -> None:
    decision = decide(job(workload=WORK, cap_usd=left), market)
    bought = decision.outcome is PlacementOutcome.ADMITTED
    assert bought == (decision.admit is not None) == (decision.record is not None) == bool(decision.ledger)
    assert decision.admit is None or decision.admit.reserved_usd <= left
    assert decision.outcome in {PlacementOutcome.ADMITTED, PlacementOutcome.WAITING, PlacementOutcome.CAPPED}
    assert (decision.due_in_s > 0) == (decision.outcome is PlacementOutcome.WAITING)
    assert "\n" not in only_event(decision).message


@pytest.mark.parametrize(
    ("resources", "named_only", "is_shown"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"providers": ["mine"]}, True, True),
        ({"providers": ["new"]}, False, False),
    ],
)
def test_a_job_that_waits_for_a_busy_machine_says_for_which_job(
    resources: dict[str, Any], named_only: bool, is_shown: bool
) -> None:
    caps = {**SETTINGS.caps, "mine": replace(CAPS["mine"], named_only=named_only)}
    busy = offer(id="mine/x", provider="mine", cloud="mine", available=False, busy_with="b" * 13)
    decision = decide(job({"resources": resources}), [busy], settings=replace(SETTINGS, caps=caps))
    assert decision.outcome is PlacementOutcome.WAITING
    assert ("mine: busy with job bbbbbbbbbbbbb" in decision.job.reason) is is_shown
