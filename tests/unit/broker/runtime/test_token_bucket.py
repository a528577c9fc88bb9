"""The token bucket allows exactly the stated rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.runtime.token_bucket import Bucket, TokenBucketRate, take


@given(
    st.integers(1, 20),
    st.floats(0.1, 100),
    st.lists(st.floats(0, 5), min_size=1, max_size=100),
)
def test_never_more_than_the_burst_and_the_rate(burst: int, per_s: float, gaps: list[float]) -> None:
    rate, bucket, now, through = TokenBucketRate(per_s=per_s, burst=burst), None, 100.0, 0
    for gap in gaps:
        now += gap
        bucket, wait_s = take(bucket, rate, now)
        through += wait_s == 0
        assert 0 <= bucket.left <= burst
    assert through <= burst + per_s * (now - 100.0) + 1e-6


@given(st.floats(0, 0.999), st.floats(0.1, 100))
def test_a_caller_that_waits_as_asked_is_admitted(left: float, per_s: float) -> None:
    rate = TokenBucketRate(per_s=per_s, burst=5)
    bucket, wait_s = take(Bucket(left=left, at=7.0), rate, 7.0)
    assert wait_s > 0
    assert take(bucket, rate, 7.0 + wait_s + 1e-6)[1] == 0
    assert take(bucket, rate, 7.0 + wait_s * 0.99)[1] > 0 or wait_s < 1e-6


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket, _ = take(None, TokenBucketRate(per_s=1, burst=1), 10.0)
    assert take(bucket, TokenBucketRate(per_s=1, burst=1), 5.0)[1] == pytest.approx(1.0)
