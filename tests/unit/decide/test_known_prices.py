"""A price that users know lies in the quote's interval, for rows of a stated length."""

from benchmarks.known_price import known


def test_mistral_7b_on_an_l40s_is_about_ten_minutes_and_45_cents() -> None:
    found = known()
    assert found.contains, found
    assert 5 < found.minutes[0] < 10 < found.minutes[1] < 20


def test_short_rows_are_done_sooner_than_that() -> None:
    assert not known(128).contains
