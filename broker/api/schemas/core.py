"""What goes over the wire. Money is a decimal string of dollars, times are ISO 8601 in UTC, sizes are bytes."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field

from broker.api.schemas.base import Wire
from broker.api.schemas.job_data import ForecastView, StorageView
from broker.api.schemas.plans import CostsView, HoursView, MemoryView, PlanView
from broker.api.schemas.policies import HoldView
from broker.domain.ids import AttemptId, InstanceName, JobId
from broker.domain.job import AttemptState, JobState, Reason
from broker.domain.money import LedgerCategory, LedgerKind
from broker.domain.offer import DropReason, OfferVerdict
from broker.domain.spec import EnvName, IdleKind, JobSpec, Usd
from broker.domain.workload import SpeedTier
from trainer.contract.base import Config, Text
from trainer.contract.documents import Beat, Final

NO_CAP = Decimal(1_000_000)


# ----------------------------------------------------------------------------------------------------------- problems


class FieldProblem(Wire):
    field: str
    """Dotted path into the body (`train.data.prompt`), or the name of a parameter."""
    message: str
    """One line: what is wrong and what to do."""


class ProblemView(Wire):
    """An RFC 9457 problem (application/problem+json)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: tuple[FieldProblem, ...] = ()


# ------------------------------------------------------------------------------------------------------------- quotes


class QuoteSpec(JobSpec):
    """A job's spec; the cap may be left out, and the quote proposes one."""

    cap_usd: Usd = NO_CAP


class HostFactsView(Wire):
    """A machine beyond its GPUs; null where its cloud does not say."""

    host: str | None = None
    disk_usd_per_gib_month: Decimal | None = None
    disk_mb_s: float | None = None
    down_mbit_s: float | None = None
    up_mbit_s: float | None = None
    ingress_usd_per_gib: Decimal | None = None
    egress_usd_per_gib: Decimal | None = None
    cuda_max: str | None = None
    driver: str | None = None
    interconnect: str | None = None
    reliability: float | None = None


class OfferView(Wire):
    """One kind of machine that a cloud sells now."""

    id: str
    provider: str
    cloud: str
    region: str
    instance_type: str
    accelerator: str
    gpus: int
    gpu_memory_bytes: int
    vcpus: int
    ram_bytes: int
    disk_bytes: int
    spot: bool
    usd_per_hour: Decimal
    on_demand_usd_per_hour: Decimal | None = None
    billing_quantum_s: int
    available: bool | None = None
    """null: the cloud does not say."""
    preemptions_per_hour: float | None = None
    emulated_on: str | None = None
    simulated: bool
    """True: no real money, no real cloud."""
    trust: Literal["own", "secure", "community"] | None = None
    """null: as its provider is."""
    facts: HostFactsView | None = None
    """What else the cloud says of the machine."""
    source: str = "api"
    """Where the price comes from: `api` (the cloud's own, live) or `catalog price`."""
    seen_at: datetime


class ProviderStatusView(Wire):
    """What the market knows of one provider."""

    name: str
    offers: int
    """For sale now."""
    dropped: dict[str, int]
    """Rows that were left out, by reason."""
    seen_at: datetime | None = None
    """Of its last answer."""
    error: str | None = None
    """Why the latest question got none."""


class ProviderView(ProviderStatusView):
    """With what its credentials are worth, when that was asked."""

    problem: str | None = None
    """What is missing and how to get it; null: nothing, or not asked."""
    self_stop: str
    """How a machine ends its own billing when the broker is gone: `instance_key`, `os_shutdown` or `none`."""


class ProviderList(Wire):
    """Every configured provider."""

    items: tuple[ProviderView, ...]


class LineView(Wire):
    """One offer against the job."""

    offer: OfferView
    verdict: OfferVerdict
    reason: str
    """Why it was kept or dropped."""
    drop: DropReason | None = None
    """The same for programs; null for a kept line."""
    memory: MemoryView | None = None
    hours_p50: float | None = None
    hours_p90: float | None = None
    usd_p50: Decimal | None = None
    """Expected dollars to finish."""
    usd_p90: Decimal | None = None
    step_s: float | None = None
    evidence: str = ""
    """What the speed rests on."""
    tier: SpeedTier | None = None
    """The same for programs; null: dropped, or nothing is known of the speed."""
    runs: int = 0
    """Own runs on such a GPU that it rests on."""
    nodes: int = 1
    """Machines of this kind that are bought together; `hours` and dollars to finish are of all, `offer` is of one."""
    plan: PlanView | None = None
    """null: dropped, or nothing is known of what is to run."""
    hours: HoursView | None = None
    """What `hours_p50` consists of."""
    costs: CostsView | None = None
    """What `usd_p50` consists of."""


class QuoteView(Wire):
    """All offers against the job, kept ones first by its objective."""

    check: dict[str, Any]
    """What was found out about the data set and the model."""
    lines: tuple[LineView, ...]
    """At most the `limit` that was asked for."""
    kept: int
    """Offers kept in all."""
    drops: dict[DropReason, int]
    """Offers dropped in all, by reason."""
    proposed_cap_usd: Decimal | None
    """P90 of the best line x 1.25; null when nothing is kept."""
    cheapest_usd: Decimal | None
    """Least expected dollars to finish on any offer that fits, also where the cap does not suffice."""
    unsold_regions: tuple[str, ...] = ()
    """Regions that were asked for and no offer is in, each with those that it may mean."""
    held: HoldView | None = None
    """What a policy would do to the job now, with its cap or else the proposed one; null: none would hold it."""
    made_at: datetime
    expires_at: datetime


class OfferList(Wire):
    items: tuple[OfferView, ...]
    total: int
    providers: tuple[ProviderStatusView, ...] = ()
    """Where they come from; a cloud that is down is a line here."""


# --------------------------------------------------------------------------------------------------------------- jobs


class JobView(Wire):
    """A job in a list."""

    id: JobId
    name: str
    team: str
    owner: str
    state: JobState
    reason: str
    """One line: why it waits, or how it ended."""
    labels: dict[str, str]
    created_at: datetime
    finished_at: datetime | None
    cap_usd: Decimal
    spent_usd: Decimal
    attempts: int
    retries_used: int
    stop_requested: bool
    retry_of: JobId | None
    forecast: ForecastView | None = None
    """Of a job that runs; null: nothing is known yet."""


class AttemptView(Wire):
    """One purchase for a job."""

    id: AttemptId
    number: int
    instance: InstanceName
    state: AttemptState
    reason: Reason | None
    detail: str
    offer: OfferView
    nodes: int = 1
    """Machines of this kind that were bought together."""
    hours_p50: float | None
    usd_p50: Decimal | None
    evidence: str = ""
    """What the speed of the estimate rested on."""
    observed_runs: int = 0
    """Own runs on such a GPU that it rested on."""
    created_at: datetime
    create_sent_at: datetime | None
    first_beat_at: datetime | None
    ended_at: datetime | None
    reserved_usd: Decimal
    charged_usd: Decimal
    """Machines and traffic."""
    traffic_usd: Decimal = Decimal(0)
    """The part of it that is for traffic."""
    usd_per_hour: Decimal | None = None
    """Of one machine, as last read back; `offer` holds what was bought."""
    idle: IdleKind | None = None
    """Why it counts as idle; null: it works, or may."""
    resume_from: tuple[str, ...]
    """Keys of the manifests offered for resuming, newest first."""
    beat: Beat | None
    """The latest sign of life of node 0: step, loss, tokens/s."""
    final: Final | None


class JobDetail(JobView):
    """A job with its attempts."""

    spec: JobSpec
    reserved_usd: Decimal
    """Still held for the live attempt."""
    storage: StorageView | None = None
    """null: nobody has looked yet."""
    ran_out_of_memory: tuple[str, ...] = ()
    """Plans that did, oldest first; the present one needs less, at the same global batch."""
    runs: tuple[AttemptView, ...]
    """Attempts in the order of their numbers; the last one's `beat` is the live progress."""


class JobPage(Wire):
    items: tuple[JobView, ...]
    """Newest first."""
    next: str | None
    """Cursor for `?cursor=`; null on the last page."""


class CapChange(Config):
    """A higher cap."""

    cap_usd: Usd


# -------------------------------------------------------------------------------------------------------------- feeds


class EventView(Wire):
    seq: int
    """Counts within the job without gaps; the SSE id."""
    at: datetime | None
    kind: str
    message: str
    attempt_id: AttemptId | None
    data: dict[str, Any]


class EventList(Wire):
    items: tuple[EventView, ...]


class LedgerLine(Wire):
    attempt_id: AttemptId | None
    """null: storage, which outlives attempts."""
    kind: LedgerKind
    usd: Decimal
    note: str
    category: LedgerCategory = LedgerCategory.COMPUTE
    """The cap covers compute and egress."""


class LedgerList(Wire):
    items: tuple[LedgerLine, ...]


# -------------------------------------------------------------------------------------------------------------- files


class ArtifactView(Wire):
    path: str
    bytes: int
    sha256: str


class ArtifactList(Wire):
    """The files of the job's last committed checkpoint."""

    step: int | None
    """Optimizer step of the checkpoint; null while there is none."""
    complete: bool
    """True for the finished job's artifacts."""
    items: tuple[ArtifactView, ...]


class UploadView(Wire):
    ref: str
    """`upload:<sha256>`: what a spec names it by."""
    sha256: str
    bytes: int
    name: str
    summary: dict[str, Any] | None
    """The data check's findings; null for an archive."""


# -------------------------------------------------------------------------------------------------------------- admin


class SecretValue(Config):
    value: Annotated[Text, Field(min_length=1, max_length=32_768, json_schema_extra={"pattern": "^[^\\u0000]*$"})]
    """Encrypted before it is stored; never shown again."""


class SecretList(Wire):
    names: tuple[EnvName, ...]


class Health(Wire):
    """`checks`: the parts of /readyz; a part that is not well makes it a 503 problem instead, but for `clock`."""

    status: Literal["ok"]
    checks: dict[str, str] = Field(default_factory=dict)
