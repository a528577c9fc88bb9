"""The door to the database: rows, leases and the ledger."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

from broker.domain.ids import AttemptId, Installation
from broker.domain.job import Attempt, Job, JobState, Reason
from broker.domain.observation import RunObservation, SpotHours
from broker.domain.tenancy import Tenant
from broker.ports.changes import Change, Charge, Lane, Leased, Token
from broker.ports.channels import ChannelStore
from broker.ports.job_data import GlobalJobData
from broker.ports.policies import GlobalPolicies
from broker.ports.tenant_store import TenantStore


class Store(TenantStore, ChannelStore, GlobalPolicies, GlobalJobData, Protocol):
    """Rows, leases and the ledger. Times that order things are the database's own.

    Raises StoreUnavailable when the database cannot be reached or a commit's fate is unknown.
    """

    # --- controllers
    async def claim_jobs(self, states: Sequence[JobState], *, owner: str, lease_s: float, limit: int) -> Sequence[Job]:
        """Due jobs in these states (or with a stop request), each under a lease with a higher epoch.

        By priority, the older of equals first.
        """
        ...

    async def claim_attempts(
        self, lane: Lane, *, owner: str, lease_s: float, limit: int, turns: Mapping[str, float] | None = None
    ) -> Sequence[Leased]:
        """Due attempts of a lane, likewise; those with a signal are due at once.

        `turns`: the clouds of whoever claims, who has nothing to ask about machines of others, and for how many seconds
        a row that is due there is left to other brokers first, unless it has a signal; None: any, at once.
        """
        ...

    async def apply(self, changes: Sequence[Change]) -> Sequence[bool]:
        """Each change atomically; True where its fences held and, for an admission, every policy allows it.

        Admissions are judged one after the other, each with those before it.
        """
        ...

    async def release(self, jobs: Sequence[Job], attempts: Sequence[Attempt], *, due_in_s: float) -> None:
        """Gives leases back without a change, fenced by epoch."""
        ...

    async def end_leases(self, *, owner: str) -> None:
        """Ends every lease on an attempt that `owner` has, in whatever lane and epoch: an answer was lost, so that it
        does not know what it holds. All are due at once, and what was read under those leases is fenced off.
        """
        ...

    async def live_attempts(self) -> Sequence[Leased]:
        """All attempts that have not ended, without a lease (for billing and the sweep)."""
        ...

    async def attempts_by_id(self, ids: Sequence[AttemptId]) -> Mapping[AttemptId, Attempt]:
        """Live or ended (for the sweep)."""
        ...

    async def unproven_launches(self) -> Sequence[Attempt]:
        """Terminating attempts with a launcher that is not known to be through, whoever has leased them."""
        ...

    async def launchers_through(self, attempts: Sequence[Attempt]) -> None:
        """Clears `launched_by` where it is as it was read and the attempt is terminating still, whoever has leased it:
        from there on nothing can create its machine, and no lease is needed to say so.
        """
        ...

    async def charge(self, charges: Sequence[Charge]) -> Sequence[bool]:
        """Each charge atomically, of live attempts or ended ones; True where the attempt was charged up to `since`."""
        ...

    async def ended_at_host(
        self, host: str, reasons: Sequence[Reason], *, within_s: float, limit: int
    ) -> Sequence[Attempt]:
        """The latest attempts at a host (`Offer.host_key`) that ended for one of `reasons`, newest first."""
        ...

    async def observations(self, *, each: int) -> Sequence[RunObservation]:
        """What ended attempts showed, of all teams: the latest `each` of a GPU, method and family, older ones first."""
        ...

    async def spot_hours(self, *, within_s: float) -> Sequence[SpotHours]:
        """Of the spot machines that were asked for within so many seconds, of all teams; by cloud, region, GPU."""
        ...

    async def block_offer(self, key: str, reason: str, *, for_s: float) -> None:
        """`key`: an offer's id, or a host's key, which blocks all its offers."""
        ...

    async def blocked_offers(self) -> Mapping[str, str]:
        """Keys of `block_offer` that are not to be bought now, with the reason."""
        ...

    # --- who asks

    def as_tenant(self, tenant: Tenant) -> TenantStore:
        """The same rows as far as `tenant` may see them, held by the database itself where it can.

        The store's own methods of `TenantStore` are the house's: they see every team.
        """
        ...

    async def token(self, secret_sha256: str) -> Token | None:
        """Whose it is; an expired one as well."""
        ...

    # --- the house
    async def installation(self, proposed: Installation) -> Installation:
        """The one that this database belongs to; `proposed` becomes it on a new database."""
        ...

    async def blob_store(self, proposed: str) -> str:
        """The mark of the blob store that its jobs lie in, of an installation that is known; `proposed` becomes it
        where there is none.
        """
        ...

    async def adopt_blob_store(self, mark: str) -> None:
        """From now on they lie in this one."""
        ...

    async def master_key(self, proposed: str | None) -> str | None:
        """The mark of the key that its secrets are sealed by, of an installation that is known; `proposed` becomes it
        where there is none.
        """
        ...

    async def adopt_master_key(self, mark: str) -> None:
        """From now on they are sealed by this one."""
        ...

    async def counts(self) -> Mapping[str, Mapping[str, int]]:
        """{"jobs": {state: n}, "attempts": {state: n}} for metrics."""
        ...

    async def ping(self) -> datetime:
        """A successful transaction, and the database's time during it.

        Raises StoreUnavailable, and SchemaNewer once a newer broker has migrated the database.
        """
        ...

    async def close(self) -> None: ...
