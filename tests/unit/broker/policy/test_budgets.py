"""Decisions of policies, and the messages of their refusals."""

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.job import AttemptState, Signal
from broker.domain.money import ZERO
from broker.domain.policy import Action, Policy
from broker.policy.budgets import (
    Applied,
    BudgetRequest,
    Hold,
    PolicyUsage,
    admission,
    drains,
    entry,
    extension,
    free_gpus,
    judge,
    reached,
    reached_message,
)
from tests.support.build import active_job, attempt, line

NOW = datetime(2026, 3, 4, 12, tzinfo=UTC)
money = st.decimals(0, 100, places=6)


def policy(**rules: Any) -> Policy:
    return Policy.model_validate({"name": "nlp", "team": "nlp", **rules})


def budget(limit: str = "100", **more: Any) -> dict[str, Any]:
    return {"limit_usd": limit, "per": "day", **more}


def thresholds(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"at": at, "action": action} for at, action in pairs]


def applied(rules: Policy, charged: str = "0", outstanding: str = "0", gpus: int = 0, jobs: int = 0) -> Applied:
    standing = PolicyUsage(
        charged=tuple(Decimal(charged) for _ in rules.budgets),
        outstanding_usd=Decimal(outstanding),
        gpus=gpus,
        jobs=jobs,
    )
    return Applied(id=1, policy=rules, usage=standing)


def ask(usd: str = "10", **changes: Any) -> BudgetRequest:
    values: dict[str, Any] = {"reserve_usd": Decimal(usd), "cap_usd": Decimal(usd), "gpus": 1, "jobs": 1}
    return BudgetRequest(**values | changes)


def told(wanted: BudgetRequest, *policies: Applied) -> tuple[Hold, str] | None:
    refusal = judge(wanted, policies, NOW)
    return None if refusal is None else (refusal.hold, refusal.reason)


@given(money, money, money, money)
def test_charged_and_reserved_never_pass_the_limit(
    limit: Decimal, charged: Decimal, outstanding: Decimal, wanted: Decimal
) -> None:
    one = applied(policy(budgets=[budget(str(limit + 1))]), str(charged), str(outstanding))
    fits = charged + outstanding + wanted <= limit + 1
    assert (judge(ask(str(wanted)), [one], NOW) is None) == fits


@given(st.lists(money, max_size=30))
def test_successive_admissions_never_jointly_pass_the_limit(wishes: list[Decimal]) -> None:
    one = applied(policy(budgets=[budget("150")], max_jobs=7))
    granted = ZERO
    for usd in wishes:
        if judge(ask(str(usd)), [one], NOW) is None:
            one, granted = replace(one, usage=one.usage.plus(ask(str(usd)))), granted + usd
    assert granted == one.usage.outstanding_usd <= 150
    assert one.usage.jobs == one.usage.gpus <= 7


def test_every_policy_must_allow_a_launch() -> None:
    roomy, tight = applied(policy(budgets=[budget()])), applied(policy(name="ann", user="ann", budgets=[budget("5")]))
    assert told(ask("5"), roomy, tight) is None
    refusal = judge(ask("6"), [roomy, tight], NOW)
    assert refusal is not None
    assert (refusal.hold, refusal.policy) == (Hold.WAIT, "ann")


def test_a_waiting_job_states_its_reason_and_end() -> None:
    one = applied(policy(timezone="Asia/Tokyo", budgets=[budget()]), "60", "35.5")
    assert told(ask(), one) == (
        Hold.WAIT,
        "waits for policy nlp: the budget of $100.00 a day has $60.00 spent and $35.50 reserved, and leaves less than "
        "the $10.00 it reserves; the next day begins 2026-03-05 00:00 Asia/Tokyo",
    )
    rolling = applied(policy(budgets=[budget(window="rolling")]), "95")
    assert told(ask(), rolling) == (
        Hold.WAIT,
        "waits for policy nlp: the budget of $100.00 a rolling day has $95.00 spent and $0.0000 reserved, and leaves "
        "less than the $10.00 it reserves",
    )


def test_a_job_that_can_never_start_states_that() -> None:
    reason = told(ask("200"), applied(policy(budgets=[budget()])))
    assert reason is not None
    assert "more than the budget of $100.00 a day; lower its cap or raise the limit" in reason[1]


def test_other_teams_spending_is_not_shown_to_a_team() -> None:
    everywhere = policy(
        team=None, budgets=[budget(thresholds=thresholds(("0.5", "stop_launches")))], max_gpus=4, max_jobs=4
    )
    quiet = everywhere.model_copy(update={"budgets": policy(budgets=[budget()]).budgets})
    found = [
        told(ask(), applied(everywhere, "77.77")),
        told(ask(), applied(quiet, "77.77", "22.22")),
        told(ask(), applied(everywhere, gpus=4)),
        told(ask(), applied(everywhere, jobs=4)),
    ]
    for one in found:
        assert one is not None
        assert "77" not in one[1]
        assert "22" not in one[1]
        assert "held" not in one[1]


def test_machines_and_jobs_are_counted() -> None:
    limits = policy(max_gpus=4, max_jobs=2)
    assert told(ask(gpus=2), applied(limits, gpus=2, jobs=1)) is None
    assert told(ask(gpus=3), applied(limits, gpus=2, jobs=1)) == (
        Hold.WAIT, "waits for policy nlp: max_gpus is 4, 2 are held, and it needs 3",
    )  # fmt: skip
    assert told(ask(), applied(limits, gpus=2, jobs=2)) == (
        Hold.WAIT, "waits for policy nlp: max_jobs is 2, 2 hold machines",
    )  # fmt: skip


def test_a_granted_ask_is_counted() -> None:
    one = applied(policy(max_jobs=1)).granted(ask())
    assert (one.usage.outstanding_usd, one.usage.gpus, one.usage.jobs) == (10, 1, 1)


def test_a_higher_cap_of_a_running_job_is_no_launch() -> None:
    limits = policy(
        max_gpus=1, max_jobs=1, budgets=[budget(thresholds=thresholds(("0.5", "stop_launches"), ("0.9", "drain")))]
    )
    raised = ask("10", gpus=0, jobs=0)
    assert told(raised, applied(limits, "60", gpus=2, jobs=2)) is None
    assert told(raised, applied(limits, "85", "6")) is not None
    assert told(raised, applied(limits, "90")) is not None


@pytest.mark.parametrize(("action", "hold"), [("stop_launches", Hold.WAIT), ("drain", Hold.WAIT), ("notify", None)])
def test_thresholds_apply_to_spent_dollars(action: str, hold: Hold | None) -> None:
    limits = policy(budgets=[budget(thresholds=thresholds(("0.8", action)))])
    assert told(ask(), applied(limits, "79.999999")) is None
    assert told(ask(), applied(limits, "60", "30")) is None
    found = told(ask(), applied(limits, "80"))
    assert (found and found[0]) == hold
    if found is not None:
        assert "nothing is launched once 80% of $100.00 a day is spent ($80.00 is)" in found[1]


def test_approval_is_asked_for_once_a_cap() -> None:
    limits = policy(approval_above_usd="50")
    assert told(ask("50"), applied(limits)) is None
    assert told(ask("50.01"), applied(limits)) == (
        Hold.APPROVAL, "waits for approval: policy nlp requires it above a cap of $50.00",
    )  # fmt: skip
    assert told(ask("60", approved_usd=Decimal(60)), applied(limits)) is None
    assert told(ask("60", approved_usd=Decimal(59)), applied(limits)) is not None


def test_approval_precedes_limits_and_raises_none() -> None:
    limits = policy(budgets=[budget(thresholds=thresholds(("0.5", "require_approval")))])
    held = told(ask(), applied(limits, "50", "45"))
    assert held == (
        Hold.APPROVAL, "waits for approval: policy nlp requires it once 50% of $100.00 a day is spent ($50.00 is)",
    )  # fmt: skip
    after = told(ask(approved_usd=Decimal(10)), applied(limits, "50", "45"))
    assert after is not None
    assert after[0] is Hold.WAIT
    assert told(ask(approved_usd=Decimal(10)), applied(limits, "50", "40")) is None


def test_a_budget_that_is_used_up_is_known_before_a_price_is() -> None:
    one = applied(policy(budgets=[budget()]), "100.01")
    assert told(ask("0"), one) == (
        Hold.WAIT,
        "waits for policy nlp: the budget of $100.00 a day is used up; the next day begins 2026-03-05 00:00 UTC",
    )


def test_the_tightest_policy_limits_the_gpus_of_an_attempt() -> None:
    assert free_gpus([]) is None
    assert free_gpus([applied(policy(max_jobs=1))]) is None
    wide, tight = applied(policy(max_gpus=8), gpus=3), applied(policy(max_gpus=4), gpus=3)
    assert free_gpus([wide, tight]) == (1, "max_gpus of policy nlp is 4, of which 1 are free")
    assert free_gpus([applied(policy(max_gpus=4, team=None), gpus=9)]) == (0, "max_gpus of policy nlp is 4")


def test_an_attempt_asks_for_all_its_machines() -> None:
    bought = attempt(reserved_usd=Decimal(3), line=replace(line(gpus=4), nodes=2))
    assert admission(bought, Decimal(5), None) == ask("3", cap_usd=Decimal(5), gpus=8)
    assert admission(bought, Decimal(5), Decimal(4)).approved_usd == 4


@pytest.mark.parametrize(
    ("job_changes", "attempt_changes", "more"),
    [
        ({}, {}, "5"),
        ({"spent_usd": Decimal(2)}, {"charged_usd": Decimal("0.5")}, "3.5"),
        ({}, {"reserved_usd": Decimal(9)}, "0"),
        ({}, {"signal": Signal.CAP}, None),
        ({}, {"state": AttemptState.TERMINATING}, None),
        ({"spec_changes": {"max_duration": 60}}, {}, None),
    ],
)
def test_a_higher_cap_reserves_the_difference(
    job_changes: dict[str, Any], attempt_changes: dict[str, Any], more: str | None
) -> None:
    runs = attempt(**{"reserved_usd": Decimal(1), **attempt_changes})
    wanted = extension(active_job(**job_changes), runs, Decimal(6))
    assert (wanted and wanted.reserve_usd) == (more and Decimal(more))
    assert wanted is None or (wanted.gpus, wanted.jobs, wanted.cap_usd) == (0, 0, 6)
    assert wanted is None or wanted.approved_usd is None
    assert extension(active_job(), None, Decimal(6)) is None


def test_a_higher_cap_that_was_approved_before_is_not_asked_for_again() -> None:
    wanted = extension(active_job(approved_usd=Decimal(6)), attempt(reserved_usd=Decimal(1)), Decimal(6))
    assert wanted is not None
    assert told(wanted, applied(policy(approval_above_usd="5"))) is None


def test_the_threshold_message_names_amounts_and_consequences() -> None:
    limits = policy(timezone="Asia/Tokyo", budgets=[budget(thresholds=thresholds(("0.5", "notify"), ("0.9", "drain")))])
    first, last = reached(limits, PolicyUsage(charged=(Decimal(91),)))
    assert reached_message(limits, first, NOW) == (
        "policy nlp (team nlp): $91.00 of $100.00 a day is spent, 50% is reached"
    )
    assert reached_message(limits, last, NOW) == (
        "policy nlp (team nlp): $91.00 of $100.00 a day is spent, 90% is reached; nothing more is launched, and what "
        "runs saves a checkpoint and stops until 2026-03-05 00:00 Asia/Tokyo"
    )
    rolling = policy(budgets=[budget(window="rolling", thresholds=thresholds(("0.5", "stop_launches")))])
    (only,) = reached(rolling, PolicyUsage(charged=(Decimal(51),)))
    assert reached_message(rolling, only, NOW).endswith("50% is reached; nothing more is launched")


def test_reached_thresholds_in_order_and_the_drain_among_them() -> None:
    limits = policy(
        budgets=[budget(thresholds=thresholds(("0.5", "notify"), ("0.9", "drain"))), budget("1000", per="month")]
    )
    halfway = PolicyUsage(charged=(Decimal(50), Decimal(900)))
    assert [one.threshold.action for one in reached(limits, halfway)] == [Action.NOTIFY]
    assert drains(limits, halfway) is None
    found = drains(limits, replace(halfway, charged=(Decimal(91), Decimal(900))))
    assert found is not None
    assert found.charged_usd == 91


def test_a_cap_that_was_approved_is_not_asked_for_again() -> None:
    rules = applied(policy(approval_above_usd="5"))
    assert judge(entry(Decimal(10), Decimal(10)), [rules], NOW) is None
    refusal = judge(entry(Decimal(10), Decimal(9)), [rules], NOW)
    assert refusal is not None
    assert refusal.hold is Hold.APPROVAL


def test_the_first_of_equally_tight_policies_is_named() -> None:
    ann, bob = applied(policy(name="ann", max_gpus=4), gpus=4), applied(policy(name="bob", max_gpus=8), gpus=8)
    assert free_gpus([ann, bob]) == (0, "max_gpus of policy ann is 4, of which 0 are free")


def test_a_limit_that_was_lowered_below_what_is_held_leaves_nothing_free() -> None:
    found = free_gpus([applied(policy(max_gpus=4), gpus=6)])
    assert found == (0, "max_gpus of policy nlp is 4, of which 0 are free")


def test_a_reservation_as_high_as_the_budget_can_start_some_day() -> None:
    found = told(ask("100"), applied(policy(budgets=[budget()]), "1"))
    assert found is not None
    assert "lower its cap" not in found[1]
    assert "the next day begins" in found[1]


def test_a_budget_without_its_spending_is_an_error() -> None:
    limits = policy(budgets=[budget(), budget("1000", per="month")])
    one = Applied(id=1, policy=limits, usage=PolicyUsage(charged=(ZERO,)))
    with pytest.raises(ValueError, match="shorter"):
        judge(ask(), [one], NOW)
