"""Protocol of the database: rows, leases and the ledger."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from broker.domain.ids import AttemptId, Installation
from broker.domain.job import Attempt, Job, JobState, Reason
from broker.domain.tenancy import Tenant
from broker.domain.workload import RunObservation, SpotHours
from broker.ports.changes import Change, Charge, Lane, Leased, Token
from broker.ports.channels import ChannelStore
from broker.ports.job_data import GlobalJobData
from broker.ports.offer_history import OfferHistoryStore
from broker.ports.policies import GlobalPolicies
from broker.ports.tenant_store import TenantStore


class Store(TenantStore, ChannelStore, GlobalPolicies, GlobalJobData, OfferHistoryStore, Protocol):
    """Rows, leases and the ledger. Ordering times are the database's own.

    Raises StoreUnavailable when the database cannot be reached or a commit's outcome is unknown.
    """

    def use_time(self, now: Callable[[], datetime]) -> None:
        """Use this time for new ledger entries and budgets' windows, instead of the database's clock."""
        ...

    # --- controllers
    async def claim_jobs(self, states: Sequence[JobState], *, owner: str, lease_s: float, limit: int) -> Sequence[Job]:
        """Lease due jobs in these states (or with a stop request), each with a higher epoch.

        Jobs with higher priority come first, older ones first among equals.
        """
        ...

    async def claim_attempts(
        self, lane: Lane, *, owner: str, lease_s: float, limit: int, turns: Mapping[str, float] | None = None
    ) -> Sequence[Leased]:
        """Lease due attempts of a lane, each with a higher epoch; those with a signal are due at once.

        `turns`: seconds by cloud for which a due row is left to other brokers first, unless it has a signal. The caller
        claims rows of these clouds only, since it cannot list the machines of others. None: any cloud, at once.
        """
        ...

    async def claim_reviews(
        self, *, owner: str, providers: Sequence[str], older_s: float, own_older_s: float, limit: int
    ) -> Sequence[Leased]:
        """Return training attempts without a signal whose review is due, oldest first, so that one broker reviews each.

        A review is due `older_s` seconds after the attempt was last returned to any broker, and `own_older_s` seconds
        after its last return to `owner`. A new attempt is due at once. Nothing is leased.
        """
        ...

    async def apply(self, changes: Sequence[Change]) -> Sequence[bool]:
        """Apply each change atomically. Return for each whether its fences held and every policy allows its admission.

        Admissions are judged in order; each one counts the admissions before it against the limits.
        """
        ...

    async def release(self, jobs: Sequence[Job], attempts: Sequence[Attempt], *, due_in_s: float) -> None:
        """Release leases without a change, fenced by epoch."""
        ...

    async def end_leases(self, *, owner: str) -> None:
        """End every lease on an attempt that `owner` has, in any lane and epoch.

        Used when an answer was lost, so that the owner does not know its leases. All rows are due at once, and writes
        under the ended leases are fenced off.
        """
        ...

    async def repair_due_times(self) -> None:
        """Make rows due now that are due or leased unusually late, as after the database's clock was set back.

        A lease that is ended early is fenced by a higher epoch. A row that is due early is checked once more.
        """
        ...

    async def live_attempts(self) -> Sequence[Leased]:
        """Return all attempts that have not ended, without a lease.

        Its cost grows with the queue, because placement makes attempts ahead of their creates: see `sent_attempts`.
        """
        ...

    async def sent_attempts(self) -> Sequence[Leased]:
        """Return the live attempts whose create was sent, without a lease (for every controller's round)."""
        ...

    async def attempts_by_id(self, ids: Sequence[AttemptId]) -> Mapping[AttemptId, Attempt]:
        """Return attempts, live or ended (for the sweep)."""
        ...

    async def unproven_launches(self) -> Sequence[Attempt]:
        """Return terminating attempts whose launcher is not known to be finished, leased or not."""
        ...

    async def mark_launchers_finished(self, attempts: Sequence[Attempt]) -> None:
        """Clear `launched_by` of terminating attempts where it is unchanged since it was read, leased or not.

        No lease is needed, because these launchers can create no more machines.
        """
        ...

    async def charge(self, charges: Sequence[Charge]) -> Sequence[bool]:
        """Write each charge atomically, for live and ended attempts. Return for each whether it was written.

        A charge is written only if the attempt is still charged up to `since`.
        """
        ...

    async def ended_at_host(
        self, host: str, reasons: Sequence[Reason], *, within_s: float, limit: int
    ) -> Sequence[Attempt]:
        """Return the latest attempts at a host (`Offer.host_key`) that ended for one of `reasons`, newest first."""
        ...

    async def upload_bytes(self, team: str, owner: str, sha256: str) -> int | None:
        """Return the size of an upload of any team; None: there is no such upload."""
        ...

    async def observations(self, *, max_per_pair: int) -> Sequence[RunObservation]:
        """Return the latest `max_per_pair` observations of a GPU, method and family, of all teams, older ones first."""
        ...

    async def spot_hours(self, *, within_s: float) -> Sequence[SpotHours]:
        """Return hours of spot machines requested within `within_s` seconds, of all teams, by cloud, region, GPU."""
        ...

    async def block_offer(self, key: str, reason: str, *, for_s: float) -> None:
        """Block a key for `for_s` seconds: an offer's id, or a host's key, which blocks all its offers."""
        ...

    async def blocked_offers(self) -> Mapping[str, str]:
        """Return the keys of `block_offer` that must not be bought now, with the reason."""
        ...

    # --- callers

    def as_tenant(self, tenant: Tenant) -> TenantStore:
        """Return the rows that `tenant` may access. The database enforces the limit where it can.

        The store's own methods of `TenantStore` act for the daemon, with access to the rows of every team.
        """
        ...

    async def token(self, secret_sha256: str) -> Token | None:
        """Return the token with this hash, also when it has expired."""
        ...

    async def end_session(self, session_id: str, *, for_s: float) -> None:
        """Record that a browser's session was signed out, for `for_s` seconds. A repeat changes nothing."""
        ...

    async def is_session_ended(self, session_id: str) -> bool: ...

    # --- the installation
    async def installation(self, proposed: Installation) -> Installation:
        """Return the installation of this database; record `proposed` first if the database is new."""
        ...

    async def blob_store(self, proposed: str) -> str:
        """Return the recorded mark of the installation's blob store; record `proposed` first if there is none."""
        ...

    async def adopt_blob_store(self, mark: str) -> None:
        """Record another blob store as that of this installation."""
        ...

    async def master_key(self, proposed: str | None) -> str | None:
        """Return the recorded mark of the key that seals the secrets; record `proposed` first if there is none."""
        ...

    async def adopt_master_key(self, mark: str) -> None:
        """Record another master key as that of this installation."""
        ...

    async def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return {"jobs": {state: n}, "attempts": {state: n}} for metrics."""
        ...

    async def ping(self) -> datetime:
        """Return the database's time during a successful transaction.

        Raises StoreUnavailable, and SchemaNewer once a newer broker has migrated the database.
        """
        ...

    async def check_pages(self) -> None:
        """Read the next pages of the jobs, attempts, ledger and policies. Raises StoreError if a page is damaged."""
        ...

    async def close(self) -> None: ...
