"""Rights that a member may grant, and their end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.tenancy import is_permanent_team, last_expiry, ungrantable_scopes
from tests.support.build import at

SCOPES = ["read", "submit", "manage", "metrics", "admin"]


@given(st.sets(st.sampled_from(SCOPES)), st.lists(st.sampled_from(SCOPES), unique=True))
def test_only_an_operator_grants_scopes_it_lacks(own: set[str], wanted: list[str]) -> None:
    given_out = set(wanted) - set(ungrantable_scopes(own, wanted))
    assert "admin" in own or given_out <= own - {"metrics", "admin"}
    assert "admin" not in own or given_out == set(wanted)


@pytest.mark.parametrize(("own", "wanted", "left"), [
    (["read", "manage"], ["read", "manage"], []),
    (["read", "manage"], ["read", "submit", "admin"], ["submit", "admin"]),
    (["metrics", "manage"], ["metrics"], ["metrics"]),
    (["admin"], ["metrics", "admin", "submit"], []),
])  # fmt: skip
def test_scopes_that_cannot_be_granted_are_named(own: list[str], wanted: list[str], left: list[str]) -> None:
    assert ungrantable_scopes(own, wanted) == left


@pytest.mark.parametrize(("ends", "over"), [
    ([], None),
    ([None], None),
    ([1, None], None),
    ([1, 9], None),
    ([1, 5], 5),
    ([3], 3),
])  # fmt: skip
def test_an_owner_ends_with_the_last_token(ends: list[int | None], over: int | None) -> None:
    times = [None if end is None else at(end) for end in ends]
    assert last_expiry(times, at(5)) == (None if over is None else at(over))


def test_the_default_team_stays() -> None:
    assert [is_permanent_team("default"), is_permanent_team("red")] == [True, False]
