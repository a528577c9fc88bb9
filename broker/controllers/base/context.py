"""What every controller is given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from broker.billing.drain import DrainBudget
from broker.domain.ids import Installation
from broker.domain.job import Attempt
from broker.domain.money import ZERO
from broker.domain.spec import JobSpec, Retention
from broker.lifecycle.liveness import LivenessTimeouts
from broker.ports import Blobs, Clock, Provider, Store
from broker.runtime.peers import BrokerIdentity
from trainer.contract.documents import Limits


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """How often, how many, how patient; seconds."""

    poll_s: float = 1.0
    """Between two looks of an idle controller."""
    look_s: float = 2.0
    """Between two looks at one live attempt."""
    list_s: float = 2.0
    """Between two listings of one provider."""
    list_limit_s: float = 10.0
    """How long one listing may take; after that nothing new is known."""
    billing_s: float = 15.0
    sweep_s: float = 20.0
    market_s: float = 30.0
    grants_s: float = 15.0
    """Between two looks for credentials that are to be renewed."""
    lessons_s: float = 30.0
    """Between two looks at what ended attempts have shown."""
    stored_s: float = 3600.0
    """Between two looks at what a job that is not at rest keeps."""
    deadman_s: float = 20.0
    lease_s: float = 30.0
    claim: int = 200
    """Rows of one claim."""
    creates: int = 32
    """Creates under way at once in this process."""
    quote_ttl_s: float = 300.0
    """An intent older than this is quoted again."""
    replace_s: float = 15.0
    """Between two quotes of a job that fits nowhere."""
    sold_out_s: float = 120.0
    """How long an offer without capacity is left alone."""
    destroy_alert: int = 30
    """Failed destroys of one machine after which people are told: a minute of them."""

    @property
    def others_s(self) -> float:
        """By then a broker that can has claimed a row that is due: two rounds of its controllers."""
        return 2 * (self.poll_s + self.look_s)

    def tempo(self, drain_s: float) -> DrainBudget:
        """A round is what a controller takes to come to a row. One until a drain begins; four after it: to notice its
        end, to destroy, and to look twice, each at a listing that begins after what it is to show.
        """
        round_s = self.poll_s + min(1.0, self.look_s)
        return DrainBudget(
            detect_s=self.billing_s + round_s, drain_s=drain_s, teardown_proof_s=4 * round_s + 2 * self.list_s
        )


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """What the operator says of money and of keeping data."""

    price_rise: Decimal = Decimal("0.02")
    """Share by which an offer may have become dearer since it was quoted, to be bought all the same."""
    storage_usd_per_gib_month: Decimal = ZERO
    """Of the blob store."""
    retention: Retention = field(default_factory=Retention)
    """Of jobs that say nothing; None in it: for ever."""
    uploads_days: float | None = None
    """After which an upload that nobody sent again is deleted; None: never."""


@dataclass(frozen=True, kw_only=True)
class ControllerContext:
    """The house's rooms as seen from a controller; `owner` names this broker process in leases."""

    installation: Installation
    owner: str
    store: Store
    blobs: Blobs
    providers: Mapping[str, Provider]
    clock: Clock
    rhythm: Intervals = field(default_factory=Intervals)
    limits: Limits = field(default_factory=Limits)
    patience: LivenessTimeouts = field(default_factory=LivenessTimeouts)
    costs: CostSettings = field(default_factory=CostSettings)
    seat: BrokerIdentity = field(default_factory=BrokerIdentity)
    forbidden: Callable[[JobSpec], str] = lambda spec: ""
    """Why the installation does not let a job run, in one line; empty: it does. It may have let it once."""

    @property
    def at_once(self) -> Mapping[str, float]:
        """Turns of a claim that leaves nothing to other brokers: ends of bills are asked for by whoever is first, and
        a cloud that is not heard may hear.
        """
        return dict.fromkeys(self.providers, 0.0)

    @property
    def tempo(self) -> DrainBudget:
        return self.rhythm.tempo(self.limits.drain_s)

    def provider_of(self, attempt: Attempt) -> Provider:
        """Raises KeyError when the configuration lost a provider that still has a live attempt."""
        return self.providers[attempt.line.offer.provider]
