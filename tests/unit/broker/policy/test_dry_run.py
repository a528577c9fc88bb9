"""Past launches replayed under a policy."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.domain.ids import JobId
from broker.domain.policy import Policy
from broker.policy.dry_run import History, LedgerAttempt, StorageSpending, dry_run
from broker.policy.windows import QUARTER

NOW = datetime(2026, 3, 31, tzinfo=UTC)
SINCE = NOW - timedelta(days=30)
DAY = timedelta(days=1)


def policy(**rules: Any) -> Policy:
    return Policy.model_validate({"name": "nlp", "team": "nlp", **rules})


def past(job: str, at: datetime, hours: int = 2, usd: str = "1", **changes: Any) -> LedgerAttempt:
    """Return an attempt that was charged `usd` in each hour."""
    values: dict[str, Any] = {
        "job_id": JobId(job), "number": 1, "team": "nlp", "owner": "ann", "gpus": 1, "cap_usd": Decimal(20),
        "reserved_usd": Decimal(20), "at": at, "ended_at": at + hours * timedelta(hours=1),
        "charges": tuple((at + n * timedelta(hours=1), Decimal(usd)) for n in range(hours)),
    }  # fmt: skip
    return LedgerAttempt(**values | changes)


def history(*attempts: LedgerAttempt, others: tuple[StorageSpending, ...] = ()) -> History:
    return History(now=NOW, attempts=attempts, others=others)


def test_a_policy_whose_limits_suffice_changes_nothing() -> None:
    done = dry_run(policy(max_gpus=8), SINCE, history(past("a", SINCE), past("b", SINCE + DAY)))
    assert (done.launches, done.held, done.drained, done.asked, done.crossed) == (2, (), (), (), ())
    assert (done.usd_spent, done.usd_not_spent) == (Decimal(4), 0)
    assert (done.since, done.until) == (SINCE, NOW)


def test_without_a_past_there_is_nothing_to_say() -> None:
    done = dry_run(policy(max_gpus=8), SINCE, history())
    assert (done.launches, done.usd_spent, done.usd_not_spent) == (0, 0, 0)


def test_jobs_of_other_teams_are_not_covered() -> None:
    done = dry_run(
        policy(max_gpus=0),
        SINCE,
        history(
            past("a", SINCE, team="vision"),
            others=(StorageSpending(team="vision", owner="ann", at=SINCE, usd=Decimal(3)),),
        ),
    )
    assert (done.launches, done.usd_spent) == (0, 0)


def test_a_launch_waits_for_the_one_before_it_and_is_charged_later() -> None:
    first, second = past("a", SINCE, 2), past("b", SINCE + timedelta(hours=1, minutes=5), 2)
    done = dry_run(policy(max_jobs=1), SINCE, history(first, second))
    assert [(row.job_id, row.attempt, row.at, row.until) for row in done.held] == [("b", 1, second.at, first.ended_at)]
    assert "max_jobs is 1, 1 hold machines" in done.held[0].reason
    assert done.usd_not_spent == 0


def test_a_launch_at_the_moment_of_an_end_does_not_wait() -> None:
    done = dry_run(policy(max_jobs=1), SINCE, history(past("a", SINCE, 2), past("b", SINCE + timedelta(hours=2))))
    assert (done.launches, done.held) == (2, ())


def test_a_launch_held_to_the_end_spends_nothing() -> None:
    done = dry_run(policy(max_gpus=0), SINCE, history(past("a", SINCE), past("a", SINCE + DAY, number=2, usd="5")))
    assert [(row.job_id, row.attempt, row.until) for row in done.held] == [("a", 1, None)]
    assert done.launches == 1  # the second attempt never came up
    assert (done.usd_spent, done.usd_not_spent) == (Decimal(12), Decimal(12))


def test_a_budget_holds_a_launch_to_the_next_day() -> None:
    rules = policy(budgets=[{"limit_usd": "30", "per": "day"}])
    evening = SINCE + timedelta(hours=20)
    done = dry_run(rules, SINCE, history(past("a", SINCE, 12, "1"), past("b", evening, 1, "1")))
    assert [(row.job_id, row.until) for row in done.held] == [("b", SINCE + DAY)]


def test_the_next_attempt_follows_the_one_that_came_later() -> None:
    gap = timedelta(minutes=10)
    blocker = past("a", SINCE, 5)
    one = past("b", SINCE + timedelta(hours=4), 1)
    two = past("b", SINCE + timedelta(hours=5) + gap, 1, number=2)
    late = past("c", SINCE + timedelta(hours=6, minutes=5), 1)
    done = dry_run(policy(max_jobs=1), SINCE, history(blocker, one, two, late))
    assert [(held.job_id, held.attempt, held.until) for held in done.held] == [
        ("b", 1, SINCE + timedelta(hours=5)),
        # b's second attempt comes at 6:10 as before the hold plus an hour, and c is before it
        ("b", 2, SINCE + timedelta(hours=7, minutes=5)),
    ]


def test_a_drained_job_continues_in_the_next_period() -> None:
    rules = policy(budgets=[{"limit_usd": "40", "per": "day", "thresholds": [{"at": "0.25", "action": "drain"}]}])
    long = past("a", SINCE, 15, "1")
    done = dry_run(rules, SINCE, history(long))
    assert [(row.job_id, row.attempt, row.at) for row in done.drained] == [("a", 1, SINCE + timedelta(hours=9))]
    assert [(row.at, row.until) for row in done.held] == [(SINCE + timedelta(hours=9), SINCE + DAY)]
    assert [(row.budget, row.share, row.action.value) for row in done.crossed] == [
        ("day/calendar", Decimal("0.25"), "drain")
    ]
    assert done.usd_not_spent == 0


def test_a_job_of_days_is_drained_every_day_and_ends_once() -> None:
    rules = policy(budgets=[{"limit_usd": "40", "per": "day", "thresholds": [{"at": "0.25", "action": "drain"}]}])
    done = dry_run(rules, SINCE, history(past("a", SINCE, 30), past("a", SINCE + 2 * DAY, 1, number=2)))
    assert [one.at for one in done.drained] == [SINCE + timedelta(hours=h) for h in (9, 34, 58)]
    assert (done.launches, done.usd_not_spent) == (2, 0)


def test_a_threshold_is_reported_once_a_period() -> None:
    rules = policy(budgets=[{"limit_usd": "40", "per": "day", "thresholds": [{"at": "0.05", "action": "notify"}]}])
    done = dry_run(rules, SINCE, history(*(past(name, SINCE + n * DAY, 3) for n, name in enumerate("abc"))))
    assert [one.at for one in done.crossed] == [SINCE + n * DAY + timedelta(hours=1) for n in range(3)]


def test_approval_is_asked_once_a_job_and_taken_to_come() -> None:
    rules = policy(approval_above_usd="10", max_jobs=1)
    done = dry_run(rules, SINCE, history(past("a", SINCE), past("a", SINCE + DAY, number=2), past("b", SINCE + DAY)))
    assert [(row.job_id, row.at) for row in done.asked] == [("a", SINCE), ("b", SINCE + DAY)]
    assert len(done.held) == 1


def test_spending_before_the_period_counts_without_being_judged() -> None:
    rules = policy(budgets=[{"limit_usd": "22", "per": "week", "window": "rolling"}], max_jobs=5)
    before = past("a", SINCE - DAY, 3)
    stored = StorageSpending(team="nlp", owner="bob", at=SINCE - DAY, usd=Decimal(1))
    done = dry_run(rules, SINCE, history(before, past("b", SINCE), others=(stored,)))
    assert (done.launches, done.usd_spent) == (1, Decimal(2))
    assert [(row.job_id, row.until) for row in done.held] == [("b", SINCE - DAY + timedelta(days=7) + QUARTER)]


def test_running_attempts_hold_their_reservation() -> None:
    running = past("a", SINCE, 2, ended_at=None)
    done = dry_run(policy(max_jobs=1), SINCE, history(running, past("b", SINCE + DAY)))
    assert [(row.job_id, row.until) for row in done.held] == [("b", None)]
    assert done.usd_not_spent == 2


attempts = st.builds(
    lambda job, hour, hours, usd: past(f"job{job}", SINCE + timedelta(minutes=17 * hour), hours, usd),
    st.integers(0, 10**6), st.integers(0, 2000), st.integers(1, 20), st.sampled_from(["0.5", "1", "3"]),
)  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(st.lists(attempts, max_size=12, unique_by=lambda one: one.job_id))
def test_money_is_neither_made_nor_lost(given_: list[LedgerAttempt]) -> None:
    rules = policy(
        budgets=[{"limit_usd": "45", "per": "day", "thresholds": [{"at": "0.4", "action": "drain"}]}], max_jobs=2
    )
    done = dry_run(rules, SINCE, history(*given_))
    assert done.usd_spent == sum(usd for one in given_ for _, usd in one.charges)
    assert 0 <= done.usd_not_spent <= done.usd_spent
    assert done.launches == len(given_)


def test_storage_counts_in_the_quarter_hour_in_which_a_window_begins() -> None:
    rules = policy(budgets=[{"limit_usd": "20.5", "per": "day"}])
    stored = StorageSpending(team="nlp", owner="bob", at=SINCE + DAY, usd=Decimal(1))
    first, second = past("z", SINCE), past("a", SINCE + DAY + 2 * QUARTER)
    done = dry_run(rules, SINCE, history(first, second, others=(stored,)))
    assert [(one.at, one.until) for one in done.held] == [(SINCE + DAY + 2 * QUARTER, SINCE + 2 * DAY)]
    before = StorageSpending(team="nlp", owner="bob", at=SINCE + DAY - QUARTER, usd=Decimal(1))
    assert dry_run(rules, SINCE, history(past("a", SINCE + DAY), others=(before,))).held == ()
