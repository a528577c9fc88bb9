"""Admission of users to the daemon's host, by the teams and tokens of the store; see `broker.policy.host_access`."""

from collections.abc import Awaitable, Callable
from functools import partial

from broker.blobs.connect import folder_of
from broker.controllers.base.context import ControllerContext
from broker.daemon.config import DaemonConfig, is_loopback
from broker.domain.tenancy import OPERATOR
from broker.policy.host_access import (
    HostAdmission,
    HostRules,
    HostUser,
    HostUsers,
    admit,
    is_shared,
    users_of,
    with_isolation,
)
from broker.ports import Clock, Store
from broker.preflight.model_folders import ModelFolders
from providers.local.isolation import HostSandbox

CACHED_S = 1.0
"""Seconds for which the list of users is reused. A user that the list lacks counts as a further user at once."""


class HostAdmissions:
    """Implements `broker.policy.host_access.HostAccess`."""

    def __init__(self, store: Store, rules: HostRules, clock: Clock, problem: Callable[[], Awaitable[str]]) -> None:
        """Keep the settings. `problem`: returns why this host cannot isolate jobs; empty: it can."""
        self._store = store
        self._problem = problem
        self._rules = rules
        self._clock = clock
        self._read: tuple[float, HostUsers] | None = None

    async def __call__(self, user: HostUser) -> HostAdmission:
        admission = admit(self._rules, await self._users(), user)
        return with_isolation(admission, await self._problem()) if admission.isolated else admission

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
        is_shared=partial(_is_shared, context, host_rules(config)),
    )


async def _is_shared(context: ControllerContext, rules: HostRules) -> bool:
    """Return True if the installation has several users now."""
    return is_shared(rules, await current_users(context.store, context.clock))


def host_sandbox(config: DaemonConfig) -> HostSandbox:
    """Return the builder of isolated machines, which hides the daemon's folders."""
    blobs = folder_of(config.blobs_url)
    return HostSandbox(hidden=(config.home, *([] if blobs is None else [blobs])), readable=config.model_roots)


def host_rules(config: DaemonConfig) -> HostRules:
    """Return the configured rules. A missing section `providers.local` lists no team."""
    local = config.providers.local
    hosts = [config.host] + ([] if config.grpc_port is None else [config.grpc_host])
    network = not all(is_loopback(host) for host in hosts)
    if local is None:
        return HostRules(network=network)
    return HostRules(teams=local.teams, trusted=local.trusted, network=network)
