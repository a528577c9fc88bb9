"""A wrong clock is said in words that tell which way."""

import pytest

from broker.runtime.clock_skew import MOST_S, skewed


@pytest.mark.parametrize("skew_s", [0.0, MOST_S, -MOST_S])
def test_a_little_is_not_worth_a_word(skew_s: float) -> None:
    assert skewed(skew_s) is None


@pytest.mark.parametrize(("skew_s", "words"), [(90.4, "is 90 s ahead of the"), (-7200.0, "is 7200 s behind the")])
def test_more_is_told_with_the_fix(skew_s: float, words: str) -> None:
    told = skewed(skew_s) or ""
    assert words in told
    assert "set-ntp true" in told
