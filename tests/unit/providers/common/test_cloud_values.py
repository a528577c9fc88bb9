"""Values in unusual forms are read as the fact that they state, or as no fact."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from providers.common.cloud_values import as_integer, flag, moment, money, number, positive, text


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (8, 8.0), ("8", 8.0), (" 8.5 ", 8.5), (Decimal("0.1"), 0.1), (True, None), (None, None), ("", None),
        ("eight", None), (float("nan"), None), ("inf", None), (10**400, None), ([8], None),
    ],
)  # fmt: skip
def test_numbers_are_read_from_texts_and_never_from_booleans(value: object, read: float | None) -> None:
    assert number(value) == read
    assert positive(value) == read
    assert as_integer(value) == (None if read is None or not read.is_integer() else int(read))


@pytest.mark.parametrize("value", [0, -1, "0.0", "-3"])
def test_numbers_of_0_or_less_are_not_positive(value: object) -> None:
    assert positive(value) is None


@pytest.mark.parametrize("value", [-0.01, "-1", "nan", "free", True, float("inf"), {}])
def test_amounts_that_cannot_be_true_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not an amount of money"):
        money(value)
    assert (money(None), money("0"), money(" 0.10 ")) == (None, Decimal(0), Decimal("0.10"))


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (True, True), (False, False), ("true", True), (" False ", False), ("1", True), (0, False), ("no", False),
        (None, None), ("", None), ("maybe", None), (2, None), (1.5, None), ([], None),
    ],
)  # fmt: skip
def test_truth_values_are_read_from_texts(value: object, read: bool | None) -> None:
    assert flag(value) is read


@pytest.mark.parametrize(
    ("value", "read"), [(7, "7"), (" a ", "a"), ("", None), (None, None), (True, None), ([], None)]
)
def test_texts_are_read_from_numbers(value: object, read: str | None) -> None:
    assert text(value) == read


THEN = datetime(2026, 11, 28, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    "value",
    [
        THEN.timestamp(), str(THEN.timestamp()), THEN.timestamp() * 1000, "2026-11-28T12:00:00Z", "2026-11-28T12:00:00",
        "2026-11-28T13:00:00+01:00",
    ],
)  # fmt: skip
def test_clocks_of_all_forms_give_the_same_time(value: object) -> None:
    assert moment(value) == THEN


@pytest.mark.parametrize("value", [0, 1, -5, "", None, "soon", True, float("nan"), 1e300, [], "0001-01-01T00:00:00"])
def test_implausible_times_count_as_missing(value: object) -> None:
    assert moment(value) is None
