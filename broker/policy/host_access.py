"""Rule that decides who may run code on the daemon's host, and whether it runs isolated from the daemon.

Used by submit, placement, launch and shell. See docs/guide/teams.md.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass

from broker.domain.tenancy import DEFAULT_TEAM


@dataclass(frozen=True, kw_only=True)
class HostRules:
    """Configuration of jobs on the daemon's host."""

    teams: tuple[str, ...] = ()
    """Teams whose jobs may run on the host of an installation with several users."""
    trusted: bool = False
    """True: admitted jobs run as the daemon's user although there are several users."""
    network: bool = False
    """True: an API of the daemon listens on an address other than loopback."""


@dataclass(frozen=True, kw_only=True)
class HostUser:
    """One user: a team and an owner of valid tokens."""

    team: str
    owner: str


@dataclass(frozen=True, kw_only=True)
class HostUsers:
    """Users of the installation, by their valid tokens."""

    teams: Collection[str] = frozenset({DEFAULT_TEAM})
    users: Collection[HostUser] = frozenset()
    operators: Collection[HostUser] = frozenset()
    """Users who can submit only by tokens with the scope `admin`."""


@dataclass(frozen=True, kw_only=True)
class HostAdmission:
    """Answer for the jobs of one user."""

    refusal: str = ""
    """Why the jobs may not run on the daemon's host, in one line; empty: they may."""
    isolated: bool = False
    """True: the jobs must run isolated from the daemon and from other jobs."""


def users_of(teams: Iterable[str], tokens: Iterable[tuple[HostUser, Collection[str]]]) -> HostUsers:
    """Return the users of an installation. `tokens`: user and scopes of each valid token.

    A token that only reads totals (`metrics`) makes no user. A user with a lesser token that can submit is no operator,
    because managers issue such tokens under any owner of the team.
    """
    tokens = [(user, scopes) for user, scopes in tokens if not set(scopes) <= {"metrics"}]
    admins = {user for user, scopes in tokens if "admin" in scopes}
    lesser = {user for user, scopes in tokens if "submit" in scopes and "admin" not in scopes}
    users = frozenset(user for user, _ in tokens)
    return HostUsers(teams=frozenset(teams) | {DEFAULT_TEAM}, users=users, operators=frozenset(admins - lesser))


def is_shared(rules: HostRules, users: HostUsers, user: HostUser | None = None) -> bool:
    """Return True for a second team, a second user or a listener that is not on loopback.

    `user` counts in addition to `users`, so a job of a user that `users` lacks is never the only user's job.
    """
    teams, known_users = {*users.teams}, {*users.users}
    if user is not None:
        teams.add(user.team)
        known_users.add(user)
    return rules.network or len(teams) > 1 or len(known_users) > 1


def admit(rules: HostRules, users: HostUsers, user: HostUser) -> HostAdmission:
    """Return whether jobs of `user` may run on the daemon's host.

    The single user of an installation on loopback is always admitted, because the host is that user's own.
    """
    if not is_shared(rules, users, user):
        return HostAdmission()
    if user.team not in rules.teams and user not in users.operators:
        return HostAdmission(
            refusal="the daemon's host runs jobs of operators and of listed teams only; choose another provider, or "
            f"ask an operator to add {user.team} to providers.local.teams in gpubroker.yaml"
        )
    return HostAdmission(isolated=not rules.trusted)


def with_isolation(admission: HostAdmission, problem: str) -> HostAdmission:
    """Return the admission on a host that cannot isolate jobs because of `problem`; empty: it can."""
    if not admission.isolated or not problem:
        return admission
    return HostAdmission(
        refusal=f"jobs on the daemon's host cannot be isolated: {problem}. There are several users, and the jobs could "
        "read the daemon's keys and all teams' data; choose another provider, or set providers.local.trusted: true in "
        "gpubroker.yaml if admitted users may"
    )


HostAccess = Callable[[HostUser], Awaitable[HostAdmission]]
"""Returns the current admission of a user."""


async def admit_all(user: HostUser) -> HostAdmission:
    """Admit every user: an installation without a rule."""
    return HostAdmission()
