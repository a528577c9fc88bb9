"""Dependencies and settings that every controller receives."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from broker.billing.drain import DrainBudget
from broker.domain.ids import Installation
from broker.domain.job import Attempt
from broker.domain.money import ZERO
from broker.domain.spec import JobSpec, Retention
from broker.lifecycle.liveness import LivenessTimeouts
from broker.policy.host_access import HostAccess, admit_all
from broker.ports import Blobs, Clock, Provider, Store
from broker.quote.placement_facts import PlacementSettings
from broker.runtime.claim_watch import ClaimWatch
from broker.runtime.peers import BrokerIdentity
from broker.runtime.spot_planner import InlinePlans, PlanRounds
from trainer.contract.documents import Limits


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Polling intervals, batch sizes and timeouts of the controllers, in seconds unless noted."""

    poll_s: float = 1.0
    """Seconds between two polls of an idle controller."""
    look_s: float = 2.0
    """Seconds between two polls of one live attempt."""
    list_s: float = 2.0
    """Seconds between two listings of one provider."""
    list_limit_s: float = 10.0
    """Timeout of one listing. After it, the cloud counts as unanswered."""
    billing_s: float = 15.0
    """Seconds between two charges."""
    sweep_s: float = 20.0
    """Seconds between two sweeps for orphans."""
    market_s: float = 30.0
    """Seconds between two polls of all offers."""
    grants_s: float = 15.0
    """Seconds between two checks for credentials that must be renewed."""
    observed_runs_s: float = 30.0
    """Seconds between two reads of the observations of ended attempts."""
    stored_s: float = 3600.0
    """Seconds between two checks of the stored data of a job that is not terminal."""
    review_s: float = 180.0
    """Seconds between two reviews of an attempt that may move to a cheaper offer. A new spot offer starts one at once.
    """
    deadman_s: float = 20.0
    """Seconds between two renewals of the broker's lease in the blob store, which agents watch."""
    lease_s: float = 30.0
    """Seconds for which a claim leases a row."""
    claim: int = 200
    """Maximum number of rows of one claim."""
    creates: int = 32
    """Maximum number of concurrent creates in this process."""
    quote_ttl_s: float = 300.0
    """Age after which a planned attempt is quoted again."""
    replace_s: float = 15.0
    """Seconds between two quotes of a job for which no offer fits."""
    sold_out_s: float = 120.0
    """Time for which an offer without capacity is not bought."""
    destroy_alert: int = 30
    """Number of failed destroys of one machine after which users are notified: about one minute."""

    @property
    def others_s(self) -> float:
        """Seconds within which another broker claims a due row if it can work on it: two rounds of the controllers."""
        return 2 * (self.poll_s + self.look_s)

    def drain_budget(self, drain_s: float) -> DrainBudget:
        """Return the budget of a drain.

        A round is the time until a controller reaches a row. One round passes before a drain begins. Four rounds follow
        the drain: detect its end, destroy, and check two listings, each begun after the event that the listing must
        show.
        """
        round_s = self.poll_s + min(1.0, self.look_s)
        return DrainBudget(
            detect_s=self.billing_s + round_s, drain_s=drain_s, teardown_proof_s=4 * round_s + 2 * self.list_s
        )


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """The operator's settings on prices and stored data."""

    price_rise: Decimal = Decimal("0.02")
    """Share by which an offer's price may have risen since the quote; a higher price is not bought."""
    storage_usd_per_gib_month: Decimal = ZERO
    """Price of the blob store."""
    retention: Retention = field(default_factory=Retention)
    """Default for jobs without a retention of their own. A None in it means for ever."""
    uploads_days: float | None = None
    """Days after which an upload that was not sent again is deleted; None: never."""


async def _always_right() -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class ControllerContext:
    """Dependencies of the controllers. `owner` names this broker process in leases."""

    installation: Installation
    owner: str
    store: Store
    blobs: Blobs
    providers: Mapping[str, Provider]
    clock: Clock
    intervals: Intervals = field(default_factory=Intervals)
    limits: Limits = field(default_factory=Limits)
    timeouts: LivenessTimeouts = field(default_factory=LivenessTimeouts)
    costs: CostSettings = field(default_factory=CostSettings)
    identity: BrokerIdentity = field(default_factory=BrokerIdentity)
    forbidden: Callable[[JobSpec], str] = lambda spec: ""
    """Returns why the installation does not run a job, in one line; empty: it does. The answer may change over time."""
    host_admission: HostAccess = admit_all
    """Returns whether the jobs of a user may run on the daemon's host. The answer may change over time."""
    is_clock_right: Callable[[], Awaitable[bool]] = _always_right
    """Reads the database's clock and returns False while that clock is not trusted. Actions that depend on that clock
    and cannot be undone, such as deletions, then wait.
    """

    plans: PlanRounds = field(default_factory=InlinePlans)
    """Source of spot plans. That of the daemon builds them in another process."""
    claim_watch: ClaimWatch = field(default_factory=ClaimWatch)
    """Outcomes of claims, for `/readyz`."""

    @property
    def no_wait_turns(self) -> Mapping[str, float]:
        """`turns` of a claim that takes due rows at once: zero seconds for every cloud.

        Drains and destroys use it. Even a broker that gets no answers from a cloud may reach it with a destroy.
        """
        return dict.fromkeys(self.providers, 0.0)

    @property
    def drain_budget(self) -> DrainBudget:
        return self.intervals.drain_budget(self.limits.drain_s)

    @property
    def placement_settings(self) -> PlacementSettings:
        """Properties of the installation on which every purchase depends."""
        return PlacementSettings(
            installation=self.installation,
            caps={name: provider.caps for name, provider in self.providers.items()},
            drain_budget=self.drain_budget,
            local_files=self.blobs.local,
            scoped_store=self.blobs.scopes,
            storage_usd_per_gib_month=self.costs.storage_usd_per_gib_month,
            retry_s=self.intervals.replace_s,
        )

    def provider_of(self, attempt: Attempt) -> Provider:
        """Return the provider of an attempt.

        Raises KeyError when the configuration no longer has a provider that has a live attempt.
        """
        return self.providers[attempt.line.offer.provider]
