"""Outcome of a round of deliveries, from the errors and results of its streams."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.errors import ChannelRefused, NotDelivered, RetryAfter, Undeliverable
from broker.domain.job import JobState
from broker.domain.notifications import Channel, JobSnapshot
from broker.reporting.delivery import DISABLE_AFTER, GIVE_UP_AFTER, MAX_PAUSE_S, NOT_TAKEN
from broker.reporting.delivery_round import (
    ChannelResult,
    DeliveryFailure,
    StreamResult,
    close_channel,
    close_stream,
    failure_of,
    refresh_in_s,
)
from tests.support import build

CHANNEL = Channel(id="c1", kind="webhook", name="ops", team="nlp", created_at=build.at(0))
LINES = st.sampled_from(["", "503"])
RESULTS = st.builds(
    ChannelResult,
    channel=st.integers(0, 2 * DISABLE_AFTER).map(lambda failures: replace(CHANNEL, failures=failures)),
    is_delivered=st.booleans(),
    failed=LINES,
    paused=LINES,
    pause_s=st.floats(0, 1e6),
    refused=LINES,
)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (RetryAfter("busy", 3.0), DeliveryFailure.PAUSED),
        (ChannelRefused("gone"), DeliveryFailure.REFUSED),
        (Undeliverable("too long", "too long"), DeliveryFailure.GIVEN_UP),
        (NotDelivered("503"), DeliveryFailure.REPEATED),
        (ValueError("a bug"), DeliveryFailure.REPEATED),
    ],
)
def test_an_error_has_one_consequence(error: Exception, failure: DeliveryFailure) -> None:
    assert failure_of(error, is_refresh=False) is failure
    expected = DeliveryFailure.SKIPPED if failure is DeliveryFailure.REPEATED else failure
    assert failure_of(error, is_refresh=True) is expected


@given(result=RESULTS, jitter=st.floats(0, 1, exclude_max=True))
def test_a_channel_is_disabled_by_a_refusal_or_by_too_many_failures(result: ChannelResult, jitter: float) -> None:
    decision = close_channel(result, build.at(0), jitter=jitter)
    channel = decision.channel
    assert channel.enabled is not (bool(result.refused) or channel.failures >= DISABLE_AFTER)
    assert (decision.notice is None) is channel.enabled
    assert 0 <= decision.wait_s <= MAX_PAUSE_S
    if result.is_delivered:
        assert channel.failures == 0
    assert replace(channel, failures=0, reason="", enabled=True) == CHANNEL


def test_the_notice_names_the_last_error() -> None:
    failing = ChannelResult(channel=replace(CHANNEL, failures=DISABLE_AFTER - 1), failed="503")
    decision = close_channel(failing, build.at(0), jitter=0.0)
    assert decision.channel.reason == f"{DISABLE_AFTER} failures in a row, the last: 503"
    assert decision.notice is not None
    assert decision.notice.id == "channel-disabled-c1-20260101T000000"
    assert decision.notice.message.startswith(f"channel ops is disabled: {decision.channel.reason}; then")
    refused = close_channel(replace(failing, refused="gone"), build.at(0), jitter=0.0)
    assert refused.channel.reason == "gone"


@given(
    attempts=st.integers(1, 2 * GIVE_UP_AFTER),
    failures=st.integers(0, 2 * GIVE_UP_AFTER),
    jitter=st.floats(0, 1, exclude_max=True),
)
def test_a_failing_delivery_is_given_up_only_while_others_are_accepted(
    attempts: int, failures: int, jitter: float
) -> None:
    result = StreamResult(dropped={1: "folded"}, failing=(2, 3), attempts=attempts)
    decision = close_stream(result, channel_failures=failures, jitter=jitter)
    if attempts >= GIVE_UP_AFTER and failures < attempts:
        assert decision.dropped == {1: "folded", 2: NOT_TAKEN, 3: NOT_TAKEN}
        assert (decision.attempts, decision.due_in_s) == (0, 0.0)
    else:
        assert (decision.dropped, decision.attempts) == ({1: "folded"}, attempts)
        assert decision.due_in_s > 0


@pytest.mark.parametrize(("changes", "attempts"), [({}, 4), ({"done": (1,)}, 0), ({"dropped": {1: "too long"}}, 0)])
def test_a_stream_without_a_result_keeps_its_failures(changes: dict[str, Any], attempts: int) -> None:
    decision = close_stream(StreamResult(earlier_attempts=4, **changes), channel_failures=0, jitter=0.0)
    assert (decision.attempts, decision.due_in_s) == (attempts, 0.0)


def test_only_jobs_that_continue_are_refreshed() -> None:
    active = JobSnapshot(job=build.active_job())
    assert refresh_in_s(active, 30.0) == 30.0
    assert refresh_in_s(active, None) is None
    assert refresh_in_s(None, 30.0) is None
    ended = replace(build.active_job(), state=JobState.CANCELLED)
    assert refresh_in_s(JobSnapshot(job=ended), 30.0) is None
