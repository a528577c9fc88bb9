"""Notifications: which are sent, folded, repeated and given up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.ids import JobId
from broker.domain.job import Event
from broker.domain.notifications import Delivery
from broker.reporting.delivery import (
    BACK_OFF_S,
    DISABLE_AFTER,
    GIVE_UP_AFTER,
    MAX_PAUSE_S,
    PROGRESS,
    back_off_s,
    channel_after,
    fold,
    hopeless,
    is_subscribed,
)

JOB = JobId("a" * 13)
JITTER = st.floats(0, 1, exclude_max=True)


def deliveries(kinds: list[str]) -> list[Delivery]:
    events = [Event(job_id=JOB, kind=kind, message="m", seq=n) for n, kind in enumerate(kinds)]
    return [Delivery(stream=JOB, event=event) for event in events]


@pytest.mark.parametrize(
    ("patterns", "kind", "wanted"),
    [
        ((), "job.x", True),
        (("job.x",), "job.x", True),
        (("job.x",), "job.xy", False),
        (("job.*",), "job.x", True),
        (("job.*",), "jobs", False),
        (("*",), "anything", True),
        (("attempt.*", "job.x"), "job.x", True),
    ],
)
def test_a_channel_wants_what_its_patterns_name(patterns: tuple[str, ...], kind: str, wanted: bool) -> None:
    assert is_subscribed(patterns, kind) is wanted


def test_only_the_latest_progress_is_reported_in_its_own_place() -> None:
    told = fold(deliveries(["job.waiting", "attempt.planned", "job.waiting", "attempt.ended"]))
    assert [(one.kind, one.folded, rows) for one, rows in told] == [
        ("attempt.planned", 0, (1,)),
        ("job.waiting", 1, (0, 2)),
        ("attempt.ended", 0, (3,)),
    ]


@given(st.lists(st.sampled_from([*sorted(PROGRESS), "attempt.preempted", "job.succeeded"])))
def test_folding_loses_no_other_delivery_and_keeps_the_order(kinds: list[str]) -> None:
    told = fold(deliveries(kinds))
    assert sorted(row for _, rows in told for row in rows) == list(range(len(kinds)))
    assert [rows[-1] for _, rows in told] == sorted(rows[-1] for _, rows in told)
    assert [kinds[rows[-1]] for _, rows in told if kinds[rows[-1]] not in PROGRESS] == [
        kind for kind in kinds if kind not in PROGRESS
    ]
    for one, rows in told:
        assert one.folded == len(rows) - 1
        assert {kinds[row] for row in rows} == {one.kind}
    shown = [one.kind for one, _ in told if one.kind in PROGRESS]
    assert len(shown) == len(set(shown))


@given(st.integers(1, 10_000), JITTER)
def test_back_off_grows_to_its_bound_and_is_never_the_same_for_all(failures: int, jitter: float) -> None:
    least, most = BACK_OFF_S
    assert least / 2 <= back_off_s(failures, jitter) <= most
    assert back_off_s(failures, 0) <= back_off_s(failures + 1, 0)
    assert back_off_s(failures, jitter) <= back_off_s(failures, 0)


def test_the_first_failures_wait_little() -> None:
    assert [back_off_s(n, 0) for n in (1, 2, 3, 20)] == [1, 2, 4, 300]


def test_a_channel_that_takes_anything_works() -> None:
    move = channel_after(7, delivered=True, failed=True, pause_s=0, jitter=0)
    assert (move.failures, move.wait_s, move.disable) == (0, 0, False)


def test_a_failing_channel_is_paused_for_longer_each_time() -> None:
    first = channel_after(0, delivered=False, failed=True, pause_s=0, jitter=0)
    third = channel_after(2, delivered=False, failed=True, pause_s=0, jitter=0)
    assert (first.failures, first.wait_s, third.failures, third.wait_s) == (1, 1, 3, 4)


def test_a_pause_is_obeyed_bounded_and_no_failure() -> None:
    move = channel_after(3, delivered=False, failed=False, pause_s=30, jitter=0)
    assert (move.failures, move.wait_s) == (3, 30)
    assert channel_after(0, delivered=True, failed=False, pause_s=1e9, jitter=0).wait_s == MAX_PAUSE_S
    assert channel_after(0, delivered=False, failed=True, pause_s=30, jitter=0).wait_s == 30


def test_a_channel_is_disabled_after_about_a_day_and_not_after_an_hour() -> None:
    assert not channel_after(DISABLE_AFTER - 2, delivered=False, failed=True, pause_s=0, jitter=0).disable
    assert channel_after(DISABLE_AFTER - 1, delivered=False, failed=True, pause_s=0, jitter=0).disable
    waited = sum(back_off_s(n, 0.5) for n in range(1, DISABLE_AFTER + 1))
    assert 20 * 3600 < waited < 36 * 3600


def test_one_delivery_is_given_up_only_while_its_channel_takes_others() -> None:
    assert hopeless(GIVE_UP_AFTER, 0)
    assert not hopeless(GIVE_UP_AFTER - 1, 0)
    assert not hopeless(GIVE_UP_AFTER, GIVE_UP_AFTER)
    assert sum(back_off_s(n, 0.5) for n in range(1, GIVE_UP_AFTER)) > 3600 / 2
