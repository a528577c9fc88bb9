"""Input of a quote, and the rules that exclude a kind of machine at any price."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from math import inf

from broker.domain.instance import Caps
from broker.domain.offer import ACCOUNT, HOST, DropReason, Offer, Trust
from broker.domain.spec import JobSpec
from broker.domain.workload import Workload
from broker.estimator.planning.corrections import Corrections
from broker.estimator.planning.fit import Fit
from broker.estimator.preemption_rate import certainty, preemptions_per_s
from broker.estimator.speed.hardware import matches
from broker.lifecycle.account_refusals import account_keys
from broker.quote.machine_cost import MachineCost
from broker.quote.spot.plan import PlanSource, plan_for

UNKNOWN_RUN_S = 86_400.0
"""Seconds for which a host's contract must cover a script without `max_duration`, after its set-up [assumed]."""
TIERS: Mapping[Trust, int] = {"community": 0, "secure": 1, "own": 2}


@dataclass(kw_only=True, slots=True)
class QuoteRequest:
    """The arguments of `quote`, with values derived from them for every offer."""

    spec: JobSpec
    workload: Workload
    now: datetime
    local_files: bool
    scoped_store: bool
    cap_left: Decimal
    excluded: Mapping[str, str]
    caps: Mapping[str, Caps]
    machine_s: float
    lead_s: float
    storage: float
    """Price of the blob store in dollars per GiB and month."""
    learned: Corrections
    measured_step_s: float | None = None
    """Seconds of a step that the job itself has measured; None: nothing measured."""
    plans: PlanSource = plan_for
    cap_micros: int = field(init=False)
    regions: frozenset[str] = field(init=False)
    nodes: int = field(init=False)
    limit: float = field(init=False)
    """Dollars an hour of all nodes; infinite: no limit."""
    deadline_s: float = field(init=False)
    """Seconds until the deadline; the P90 of the duration must not exceed them. Infinite: no deadline."""
    duration_s: float = field(init=False)
    """Seconds of machine time left; the P50 of the duration must not exceed them. Infinite: no limit."""
    has_time_limit: bool = field(init=False)
    """True if there is a deadline or a `max_duration`."""
    excludes_hosts: bool = field(init=False)
    """True if whole hosts are excluded."""
    excludes_accounts: bool = field(init=False)
    """True if accounts are excluded."""
    waited_s: float = 0.0
    """Seconds for which the job had no machine so far."""
    accepts_risk: bool = False
    """True if the P50 of the duration, instead of its P90, must meet the deadline."""
    fallback_s: float = inf
    """Seconds in which the fastest on-demand offer that is kept finishes all work; infinite: none is kept."""
    fits: dict[object, Fit] = field(init=False, default_factory=dict)
    """Memory and time by hardware, each computed once."""
    kinds: dict[object, MachineCost] = field(init=False, default_factory=dict)
    """Costs that offers share, by all facts on which they depend."""

    occupied: dict[object, float] = field(init=False, default_factory=dict)
    """Results of `occupied_s` by all facts on which they depend."""

    def __post_init__(self) -> None:
        spec, resources = self.spec, self.spec.resources
        self.cap_micros = int(self.cap_left * 1_000_000)
        self.regions, self.nodes = frozenset(resources.regions), resources.nodes
        self.limit = inf if resources.max_usd_per_hour is None else float(resources.max_usd_per_hour)
        self.deadline_s = inf if spec.deadline is None else (spec.deadline - self.now).total_seconds() - self.lead_s
        self.duration_s = inf if spec.max_duration is None else spec.max_duration - self.machine_s - self.lead_s
        self.has_time_limit = spec.deadline is not None or spec.max_duration is not None
        self.excludes_hosts = any(key.startswith(HOST) for key in self.excluded)
        self.excludes_accounts = any(key.startswith(ACCOUNT) for key in self.excluded)

    def excluded_by(self, offer: Offer) -> str | None:
        """Return the key that excludes the offer now; None: it may be bought."""
        if offer.id in self.excluded:
            return offer.id
        if self.excludes_hosts and offer.host_key in self.excluded:
            return offer.host_key
        return (
            next((key for key in account_keys(offer) if key in self.excluded), None) if self.excludes_accounts else None
        )

    def rate(self, offer: Offer) -> float:
        """Return the job's expected preemptions per second. The loss of any one machine stops all its machines."""
        return preemptions_per_s(offer, self.learned.spots) * self.nodes

    def finish_s(self, offer: Offer, kind: MachineCost) -> float:
        """Return the seconds that must meet the deadline if the job stays on offers of this kind."""
        return kind.p50(self.rate(offer)) if self.accepts_risk else self.p90(offer, kind)

    def fallback_finish_s(self, offer: Offer, kind: MachineCost) -> float:
        """Return the seconds that must meet the deadline if on-demand replaces a spot offer at a preemption in time.

        The finish of a job that is preempted after time t is linear in t, so it is latest at one end. At t = 0 all work
        is done on demand, after two changeovers. At the other end the run on the offer is undisturbed.
        """
        undisturbed_s = kind.p50(0.0) if self.accepts_risk else kind.p90(0.0, certainty(offer, self.learned.spots))
        return max(self.fallback_s + 2 * self.changeover_s(offer, kind), undisturbed_s)

    def changeover_s(self, offer: Offer, kind: MachineCost) -> float:
        """Return the seconds without progress that a preemption causes, with the proof that the machines are gone."""
        return kind.lost(self.rate(offer)) + kind.drained_s

    def occupied_s(self, offer: Offer, kind: MachineCost) -> float:
        """Return the seconds for which the host must exist: P90 of the job, at most `max_duration`, and a changeover.

        The run time of a script is unknown, so the rest of `max_duration` counts. Without it, `UNKNOWN_RUN_S` counts.
        """
        rate, sureness = self.rate(offer), certainty(offer, self.learned.spots)
        key = kind, rate, sureness
        if (occupied_s := self.occupied.get(key)) is None:
            run_s = min(kind.p90(rate, sureness), self.duration_s)
            if self.workload.shape is None:
                run_s = self.duration_s if self.duration_s < inf else run_s + UNKNOWN_RUN_S
            occupied_s = self.occupied[key] = run_s + kind.lost(rate) + kind.drained_s
        return occupied_s

    def p90(self, offer: Offer, kind: MachineCost) -> float:
        """Return the seconds within which nine of ten runs finish on the offer."""
        return kind.p90(self.rate(offer), certainty(offer, self.learned.spots))


def drop_reason(ask: QuoteRequest, offer: Offer, caps: Caps) -> tuple[DropReason, str] | None:
    """Return why no machine of this kind is allowed, with a message; None: it is allowed."""
    resources = ask.spec.resources
    gpus = max(1, offer.gpus)
    if (message := _provider_message(offer.provider, resources.providers, caps)) is not None:
        return DropReason.PROVIDER, message
    if resources.accelerators and not any(matches(a, offer.accelerator) for a in resources.accelerators):
        return DropReason.ACCELERATOR, f"accelerator {offer.accelerator}; asked for {', '.join(resources.accelerators)}"
    if resources.gpus not in ("auto", gpus):
        return DropReason.GPUS, f"{gpus} GPUs; asked for {resources.gpus}"
    if resources.nodes > 1 and not caps.multi_node:
        return DropReason.NODES, f"{offer.provider} does not support multi-node; asked for {resources.nodes} nodes"
    if resources.spot == ("never" if offer.spot else "only"):
        return DropReason.SPOT, f"{'spot' if offer.spot else 'on-demand'}; spot is {resources.spot!r} in the spec"
    is_local = offer.reaches_local_files or caps.reaches_local_files
    if ask.local_files and not is_local:
        return (
            DropReason.UNREACHABLE,
            "its machine cannot reach the blob store or model folder on this machine; use a bucket",
        )
    trust = offer.trust or caps.trust
    if TIERS[trust] < TIERS[resources.trust]:
        return DropReason.TRUST, f"a {trust} host; asked for trust {resources.trust}"
    if offer.spot and ask.spec.script is not None and not ask.spec.script.checkpoints:
        return (
            DropReason.NO_CHECKPOINTS,
            "spot, and the script writes no checkpoints: a preemption would lose all of it",
        )
    if trust == "community" and not (ask.scoped_store or is_local):
        return DropReason.UNSCOPED, (
            "a community host would get the blob store's own credentials; let the daemon scope them "
            "(docs/guide/images-and-storage.md), or ask for other providers"
        )
    if ask.spec.script is not None and ask.spec.script.image is not None and not caps.images:
        able = ", ".join(sorted(name for name, each in ask.caps.items() if each.images)) or "runpod or vast"
        return DropReason.NO_IMAGES, f"{offer.provider} runs no image of a job; use {able}, or leave out script.image"
    if ask.spec.train is not None and not caps.has_trainer:
        return DropReason.NO_TRAINER, "its machine lacks the trainer; run pip install 'gpubroker[trainer]' there"
    return None


def _provider_message(name: str, provider_names: Sequence[str], caps: Caps) -> str | None:
    """Return why the job does not use a provider; None: it may."""
    if name in provider_names:
        return None
    if provider_names:
        return f"provider {name}; asked for {', '.join(provider_names)}"
    if not caps.named_only:
        return None
    return (
        f"{name} runs only jobs that name it while a cloud is configured: ask for resources.providers: [{name}], "
        f"or set providers.{name}.usd_per_hour"
    )
