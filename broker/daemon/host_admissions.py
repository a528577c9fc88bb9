"""Admission of users to the daemon's host, by the teams and tokens of the store; see `broker.policy.host_access`."""

from broker.controllers.base.context import ControllerContext
from broker.daemon.config import DaemonConfig, is_loopback
from broker.domain.tenancy import OPERATOR
from broker.policy.host_access import HostAdmission, HostRules, HostUser, HostUsers, admit, is_shared, users_of
from broker.ports import Clock, Store
from broker.preflight.model_folders import ModelFolders

CACHED_S = 1.0
"""Seconds for which the list of users is reused. A user that the list lacks counts as a further user at once."""


class HostAdmissions:
    """Implements `broker.policy.host_access.HostAccess`."""

    def __init__(self, store: Store, rules: HostRules, clock: Clock) -> None:
        self._store = store
        self._rules = rules
        self._clock = clock
        self._read: tuple[float, HostUsers] | None = None

    async def __call__(self, user: HostUser) -> HostAdmission:
        return admit(self._rules, await self._users(), user)

    async def is_shared(self) -> bool:
        """Return True if the installation has several users now."""
        return is_shared(self._rules, await current_users(self._store, self._clock))

    async def _users(self) -> HostUsers:
        started = self._clock.monotonic()
        if self._read is None or not 0 <= started - self._read[0] < CACHED_S:
            self._read = started, await current_users(self._store, self._clock)
        return self._read[1]


async def current_users(store: Store, clock: Clock) -> HostUsers:
    """Return the users that have a valid token, and all teams."""
    rows, now = store.as_tenant(OPERATOR), clock.now()
    valid = [token for token in await rows.tokens() if token.expires_at is None or token.expires_at > now]
    users = [(HostUser(team=token.team, owner=token.owner), token.scopes) for token in valid]
    return users_of([team.name for team in await rows.teams()], users)


def model_folders(config: DaemonConfig, context: ControllerContext) -> ModelFolders:
    """Return the folders of this host that jobs may name as models."""
    return ModelFolders(
        roots=config.model_roots,
        reachable=any(provider.caps.reaches_local_files for provider in context.providers.values()),
        is_shared=HostAdmissions(context.store, host_rules(config), context.clock).is_shared,
    )


def host_rules(config: DaemonConfig) -> HostRules:
    """Return the configured rules. A missing section `providers.local` lists no team."""
    local = config.providers.local
    hosts = [config.host] + ([] if config.grpc_port is None else [config.grpc_host])
    network = not all(is_loopback(host) for host in hosts)
    if local is None:
        return HostRules(network=network)
    return HostRules(teams=local.teams, trusted=local.trusted, network=network)
