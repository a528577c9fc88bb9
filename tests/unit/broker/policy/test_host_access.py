"""Rule that decides whose jobs run on the daemon's host."""

import pytest

from broker.policy.host_access import (
    HostAdmission,
    HostRules,
    HostUser,
    HostUsers,
    admit,
    admit_all,
    is_shared,
    users_of,
    with_isolation,
)

LOCAL = HostUser(team="default", owner="local")
ANN = HostUser(team="red", owner="ann")
BOB = HostUser(team="default", owner="bob")
ALL = ("read", "submit", "manage", "admin")
ALONE = users_of(["default"], [(LOCAL, ALL)])
TWO_USERS = users_of(["default"], [(LOCAL, ALL), (BOB, ("submit",))])
TWO_TEAMS = users_of(["default", "red"], [(LOCAL, ALL)])


def test_single_user_on_loopback_needs_no_configuration() -> None:
    assert admit(HostRules(), ALONE, LOCAL) == HostAdmission()


@pytest.mark.parametrize("users", [TWO_USERS, TWO_TEAMS])
def test_second_user_or_team_isolates_the_operator_without_trust(users: HostUsers) -> None:
    assert admit(HostRules(), users, LOCAL) == HostAdmission(isolated=True)
    assert admit(HostRules(trusted=True), users, LOCAL) == HostAdmission()


def test_host_without_isolation_refuses_with_the_reason() -> None:
    isolated = HostAdmission(isolated=True)
    assert with_isolation(isolated, "") == isolated
    refusal = with_isolation(isolated, "no unshare").refusal
    assert "no unshare" in refusal
    assert "providers.local.trusted: true" in refusal
    assert with_isolation(HostAdmission(), "no unshare") == HostAdmission()


def test_network_listener_counts_as_several_users() -> None:
    assert is_shared(HostRules(network=True), ALONE)
    assert not is_shared(HostRules(), ALONE)
    assert admit(HostRules(network=True), ALONE, LOCAL).isolated


@pytest.mark.parametrize("user", [ANN, BOB])
@pytest.mark.parametrize("users", [ALONE, TWO_USERS, TWO_TEAMS])
@pytest.mark.parametrize("trusted", [False, True])
def test_unlisted_users_are_refused(user: HostUser, users: HostUsers, trusted: bool) -> None:
    """A list of users that is a moment old does not admit a new user."""
    admission = admit(HostRules(trusted=trusted), users, user)
    assert f"add {user.team} to providers.local.teams" in admission.refusal


def test_listed_teams_are_isolated_unless_trusted() -> None:
    assert admit(HostRules(teams=("red",)), TWO_TEAMS, ANN) == HostAdmission(isolated=True)
    assert admit(HostRules(teams=("red",), trusted=True), TWO_TEAMS, ANN) == HostAdmission()


def test_lesser_token_under_an_operators_name_makes_no_operator() -> None:
    """A manager may issue a token with any owner of the team."""
    spoofed = users_of(["default"], [(LOCAL, ALL), (LOCAL, ("read", "submit")), (BOB, ("manage",))])
    assert admit(HostRules(), spoofed, LOCAL).refusal


def test_tokens_that_only_read_totals_make_no_user() -> None:
    scraper = HostUser(team="default", owner="prometheus")
    assert not is_shared(HostRules(), users_of([], [(LOCAL, ALL), (scraper, ("metrics",))]))


async def test_installations_without_a_rule_admit_all() -> None:
    assert await admit_all(ANN) == admit(HostRules(), ALONE, LOCAL)
