"""The message about a wrong clock states its direction."""

import pytest

from broker.runtime.clock import MAX_SKEW_S, clock_skew_message


@pytest.mark.parametrize("skew_s", [0.0, MAX_SKEW_S, -MAX_SKEW_S])
def test_a_small_clock_difference_is_not_reported(skew_s: float) -> None:
    assert clock_skew_message(skew_s) is None


@pytest.mark.parametrize(("skew_s", "words"), [(90.4, "is 90 s ahead of the"), (-7200.0, "is 7200 s behind the")])
def test_a_large_clock_difference_is_reported_with_the_fix(skew_s: float, words: str) -> None:
    message = clock_skew_message(skew_s) or ""
    assert words in message
    assert "set-ntp true" in message
