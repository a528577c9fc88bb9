"""A quote reports the same verdict of policies as admission reaches later."""

from decimal import Decimal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from broker.domain.offer import Offer, QuoteLine
from broker.policy.budgets import Applied, Hold, Refusal, entry, free_gpus, judge, purchase
from broker.quote.placement import choose, foresee
from tests.support.machines import NOW, offer, quoted
from tests.unit.broker.policy.test_budgets import applied, budget, policy, thresholds
from tests.unit.broker.quote.test_engine import markets

CAP = Decimal(20)
SMALL, LARGE = offer(id="small"), offer(id="large", gpus=8, usd_per_hour=Decimal(3))


def foreseen_message(
    *policies: Applied, market: tuple[Offer, ...] = (SMALL,), least: str = "0", usd: str = "20"
) -> str | None:
    found = foresee(
        quoted(market, cap_left=CAP),
        CAP,
        policies,
        NOW,
        min_budget=lambda _: Decimal(least),
        reserve=lambda _: Decimal(usd),
    )
    return None if found is None else f"{found.hold}: {found.reason}"


def test_no_message_is_given_when_no_policy_holds_the_job() -> None:
    assert foreseen_message() is None
    assert (
        foreseen_message(applied(policy(budgets=[budget("20")], max_gpus=1, max_jobs=1, approval_above_usd="20")))
        is None
    )


def test_each_kind_of_rule_has_its_message() -> None:
    assert foreseen_message(applied(policy(approval_above_usd="5"))) == (
        "approval: waits for approval: policy nlp requires it above a cap of $5.0000"
    )
    asks = policy(budgets=[budget("100", thresholds=thresholds(("0.5", "require_approval")))])
    assert (foreseen_message(applied(asks, charged="50")) or "")[:9] == "approval:"
    assert (
        foreseen_message(applied(policy(max_jobs=1), jobs=1))
        == "wait: waits for policy nlp: max_jobs is 1, 1 hold machines"
    )
    full = foreseen_message(applied(policy(budgets=[budget("30")]), charged="5", outstanding="6"))
    assert "has $5.0000 spent and $6.0000 reserved, and leaves less than the $20.00 it reserves" in (full or "")
    assert "more than the budget of $19.00 a day; lower its cap" in (
        foreseen_message(applied(policy(budgets=[budget("19")]))) or ""
    )


def test_max_duration_limits_the_reservation_that_is_judged() -> None:
    tight = applied(policy(budgets=[budget("10")]))
    assert foreseen_message(tight, usd="9") is None
    assert foreseen_message(tight) is not None


def test_costlier_machine_within_max_gpus_wins_or_the_smallest_explains() -> None:
    """A dearer machine that fits into max_gpus is chosen. If none fits, the message has the need of the smallest."""
    assert foreseen_message(applied(policy(max_gpus=2)), market=(SMALL, LARGE)) is None
    said = foreseen_message(applied(policy(max_gpus=9), gpus=9), market=(LARGE, SMALL))
    assert said == "wait: waits for policy nlp: max_gpus is 9, 9 are held, and it needs 1"


def test_cpu_job_starts_below_a_lowered_gpu_limit() -> None:
    """A job without GPUs starts even if more GPUs are held than a lowered limit allows."""
    over = [applied(policy(max_gpus=0), gpus=2)]
    bare = (offer(id="bare", gpus=0),)
    assert foreseen_message(*over, market=bare) is None
    assert placed(list(bare), over) is None
    assert (foreseen_message(*over) or "").startswith("wait: waits for policy nlp: max_gpus is 0, 2 are held")


def test_without_offers_only_rules_that_need_none_are_reported() -> None:
    full = applied(policy(budgets=[budget("1")]))
    assert foreseen_message(full, market=()) is None
    assert foreseen_message(full, least="20") is None, "the cap itself speaks against every offer"
    assert foreseen_message(applied(policy(max_jobs=0)), market=()) is not None


rules = st.fixed_dictionaries(
    {"max_jobs": st.integers(0, 2)},
    optional={
        "max_gpus": st.integers(0, 9),
        "approval_above_usd": st.sampled_from(["5", "50"]),
        "budgets": st.sampled_from(["10", "30", "100"]).map(lambda limit: [budget(limit)]),
    },
)
standing = st.tuples(st.sampled_from(["0", "10", "40"]), st.integers(0, 4), st.integers(0, 2))


def placed(market: list[Offer], applied: list[Applied]) -> Refusal | None:
    """Return the controller's verdict: the entry check, the offers within max_gpus, the choice, the admission."""
    if (first := judge(entry(CAP, None), applied, NOW)) is not None:
        return first
    room = free_gpus(applied)
    some = [one for one in market if room is None or one.gpus <= room[0]]
    line = choose(quoted(some, cap_left=CAP), cap_left=CAP, attempt_number=1, min_budget=_least).line
    if line is not None:
        return judge(purchase(line, _reserve(line), CAP, None), applied, NOW)
    without = choose(quoted(market, cap_left=CAP), cap_left=CAP, attempt_number=1, min_budget=_least).line
    return None if without is None else Refusal(hold=Hold.WAIT, policy="nlp", reason="max_gpus")


def _least(line: QuoteLine) -> Decimal:
    return line.offer.usd_per_hour


def _reserve(line: QuoteLine) -> Decimal:
    return 2 * line.offer.usd_per_hour


@given(markets, st.lists(st.tuples(rules, standing), max_size=3))
def test_the_forecast_equals_placement_and_admission(market: list[Offer], given_: list[tuple[Any, Any]]) -> None:
    held = [applied(policy(**some), charged, "0", gpus, jobs) for some, (charged, gpus, jobs) in given_]
    made = quoted(market, cap_left=CAP)
    foreseen, done = foresee(made, CAP, held, NOW, min_budget=_least, reserve=_reserve), placed(market, held)
    assert (foreseen and foreseen.hold) == (done and done.hold)
    if done is not None and foreseen is not None and done.reason != "max_gpus":
        assert foreseen == done
