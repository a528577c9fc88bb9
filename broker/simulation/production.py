"""The daemon's decisions for a simulated job: the functions that placement and the review of attempts call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from broker.billing.drain import DrainBudget
from broker.domain.ids import Installation, JobId, attempt_id, instance_name
from broker.domain.instance import Caps
from broker.domain.job import Attempt, AttemptState, Forecast, Job, JobState
from broker.domain.offer import GIB, Offer, Quote, QuoteLine
from broker.domain.spec import JobSpec
from broker.domain.workload import ModelShape, SpotHours, Workload
from broker.estimator.planning.corrections import Corrections
from broker.estimator.spot_hazards import Market, market
from broker.quote.engine import quote
from broker.quote.placement import choose
from broker.quote.placement_facts import PlacementSettings
from broker.quote.spot.review import ActiveReview, Move, may_move, review_active
from broker.simulation.runs import SimulatedMachine, SimulatedRun
from broker.simulation.traces import Trace
from trainer.contract.documents import CheckpointRef, Heartbeat

START = datetime(2026, 1, 1, tzinfo=UTC)
"""Time of the first tick."""
INSTALLATION, JOB = Installation("simulation"), JobId("a" * 13)
CLOUD = "cloud"
MONEY = Decimal(1_000_000)
GPU = "h100-sxm"
WORK = Workload(
    shape=ModelShape(
        name="meta-llama/Llama-3.1-8B", family="llama", layers=32, hidden=4096, intermediate=14336, heads=32,
        kv_heads=8, head_dim=128, vocabulary=128256, tied_embeddings=False, parameters=8_030_261_248, known=True,
    ),
    method="lora", lora_r=16, gradient_checkpointing=True, micro_batch=1, global_batch=32, sequence=16_384,
    tokens_per_row=16_000, steps=1000, eval_rows=0,
)  # fmt: skip
"""The kind of work. Its number of steps follows from the hours of work of the run."""
SPEED_RUNS = [((GPU, "lora", "llama"), 0.0)] * 8
"""Runs whose speed was as estimated, so that the interval of the speed is narrow."""
LOST_S = 165.0
"""Seconds of a changeover that are lost work and the proof that the old machine is gone; the rest is set-up."""
DRAIN_BUDGET = DrainBudget(detect_s=10, drain_s=60, teardown_proof_s=7)


@dataclass
class ProductionPolicy:
    """The broker's decisions for one run. Machines have one GPU; their number is that of the traces."""

    run: SimulatedRun
    knows_speed: bool = True
    """False: no earlier run has confirmed the estimated speed."""
    reviews: bool = True
    """False: running attempts are never reviewed."""
    past: Sequence[Trace] = ()
    """Availability of the same zones until the run begins, which the broker has recorded; empty: no history."""
    _attempt: Attempt | None = None
    _timelines: dict[Market, list[tuple[float, bool]]] = field(default_factory=dict)
    """Changes of each zone that the run has observed."""
    _began_tick: int = 0
    """Tick in which the current machine was bought."""

    def __post_init__(self) -> None:
        first = self._offer(0, is_spot=False)
        for number, zone in enumerate(self.past):
            for tick, is_up in enumerate(zone.available, -len(zone.available)):
                self._record(number, tick, is_up=is_up)
        line = self._quote(Caps(spot=True, multi_node=True), WORK, [first], spots={}, deadline_s=None).lines[0]
        hours = line.hours
        assert hours is not None
        boot_s = max(1.0, self.run.changeover_s - hours.load * 3600 - LOST_S)
        self._caps = Caps(spot=True, multi_node=True, boot_s=boot_s)
        self._step_s = hours.training * 3600 / WORK.steps

    def __call__(self, run: SimulatedRun) -> SimulatedMachine | None:
        """Return the machine that placement buys now, or that the review of a live one moves to."""
        self._observe(run)
        if run.machine is not None and not (self.reviews and self._moves(run)):
            return run.machine
        run.machine = None  # a move pays a changeover, also if placement buys the same machine again
        line = self._placed(run)
        self._began_tick = run.tick
        if line is None:
            self._attempt = None
            return None
        attempt = attempt_id(JOB, 1)
        self._attempt = Attempt(
            id=attempt, job_id=JOB, number=1, name=instance_name(INSTALLATION, attempt), line=line, created_at=START,
            reserved_usd=MONEY, state=AttemptState.TRAINING,
        )  # fmt: skip
        zone = next(n for n, trace in enumerate(run.zones) if trace.name == line.offer.region)
        return SimulatedMachine("spot" if line.offer.spot else "on-demand", zone)

    @property
    def _now(self) -> datetime:
        return START + timedelta(seconds=self.run.tick * self.run.tick_s)

    @property
    def _nodes(self) -> int:
        return self.run.zones[0].nodes

    def _observe(self, run: SimulatedRun) -> None:
        """Add the changes of all zones in this tick to the timelines."""
        for number, zone in enumerate(run.zones):
            self._record(number, run.tick, is_up=zone.available[run.tick])

    def _record(self, zone: int, tick: int, *, is_up: bool) -> None:
        timeline = self._timelines.setdefault(market(self._offer(zone, is_spot=True), self._nodes), [])
        if not timeline or timeline[-1][1] is not is_up:
            timeline.append(((START.timestamp() + tick * self.run.tick_s) / 60, is_up))

    def _placed(self, run: SimulatedRun) -> QuoteLine | None:
        ranking = self._quote(
            self._caps,
            self._work(run),
            self._offers(run),
            spots=self._history(run),
            deadline_s=run.time_left_s,
            excluded={self._id(n, is_spot=True): "sold out" for n in range(len(run.zones)) if n not in _on_sale(run)},
        )
        return choose(ranking, cap_left=MONEY, attempt_number=1, min_budget=lambda line: Decimal(0)).line

    def _id(self, zone: int, *, is_spot: bool) -> str:
        return f"{self.run.zones[zone].name}/{'spot' if is_spot else 'on-demand'}"

    def _offer(self, zone: int, *, is_spot: bool) -> Offer:
        trace, tick = self.run.zones[zone], self.run.tick
        on_demand = Decimal(str(round(trace.on_demand_usd / self._nodes, 4)))
        price = Decimal(str(round(trace.spot_usd[tick] / self._nodes, 4))) if is_spot else on_demand
        return Offer(
            id=self._id(zone, is_spot=is_spot), provider=CLOUD, cloud=CLOUD, region=trace.name,
            instance_type=f"1x{GPU}", accelerator=GPU, gpus=1, gpu_memory_bytes=80 * GIB, vcpus=26,
            ram_bytes=200 * GIB, disk_bytes=10**12, spot=is_spot, usd_per_hour=price, seen_at=START,
            on_demand_usd_per_hour=on_demand if is_spot else None,
        )  # fmt: skip

    def _offers(self, run: SimulatedRun, *, on_sale: bool = False) -> list[Offer]:
        """Return spot and on-demand offers of every zone. `on_sale`: leave out spot that is sold out."""
        numbers = range(len(run.zones))
        spots = [number for number in numbers if not on_sale or number in _on_sale(run)]
        return [self._offer(n, is_spot=True) for n in spots] + [self._offer(n, is_spot=False) for n in numbers]

    def _work(self, run: SimulatedRun) -> Workload:
        return replace(WORK, steps=max(1, round(run.left_s / self._step_s)))

    def _moves(self, run: SimulatedRun) -> bool:
        """Return True if the review moves the attempt, which has saved all of its steps."""
        work, on_sale = self._work(run), _on_sale(run)
        if self._attempt is None or not on_sale:
            return False
        began = self._now - timedelta(seconds=(run.tick - self._began_tick) * run.tick_s)
        saved = CheckpointRef(manifest="m", step=1, save_s=10, stall_s=1, bytes=1)
        beat = Heartbeat(attempt=JOB, boot="b", seq=1, step=1, total_steps=WORK.steps, checkpoint=saved)
        line, machine = self._attempt.line, run.machine
        if machine is not None:  # at the price of now
            line = replace(line, offer=self._offer(machine.zone, is_spot=run.on_spot))
        attempt = replace(self._attempt, line=line, first_beat_at=began, create_sent_at=began, beat=beat)
        job = Job(
            id=JOB, owner="simulation", spec=self._spec(run.time_left_s), created_at=START, cap_usd=MONEY,
            workload=replace(work, steps=work.steps + 1), state=JobState.ACTIVE, attempts=1,
            forecast=Forecast(usd=MONEY, finish_at=self._now, step_s=self._step_s, made_at=self._now),
        )  # fmt: skip
        return may_move(job, attempt) and isinstance(review_active(self._review(run, job, attempt)), Move)

    def _review(self, run: SimulatedRun, job: Job, attempt: Attempt) -> ActiveReview:
        return ActiveReview(
            job=job,
            attempt=attempt,
            now=self._now,
            settings=PlacementSettings(installation=INSTALLATION, caps={CLOUD: self._caps}, drain_budget=DRAIN_BUDGET),
            offers=self._offers(run, on_sale=True),
            learned=self._learned(self._history(run)),
            policies_at=self._now,
        )

    def _history(self, run: SimulatedRun) -> dict[tuple[str, str, str, str], SpotHours]:
        """Return the job's own spot hours and preemptions of each zone."""
        return {
            (CLOUD, CLOUD, zone.name, GPU): SpotHours(
                provider=CLOUD, cloud=CLOUD, region=zone.name, accelerator=GPU, hours=spot_s / 3600,
                preemptions=preemptions,
            )
            for zone, spot_s, preemptions in zip(run.zones, run.spot_s, run.preemptions, strict=True)
            if spot_s
        }  # fmt: skip

    def _quote(
        self,
        caps: Caps,
        work: Workload,
        offers: Sequence[Offer],
        *,
        spots: Mapping[tuple[str, str, str, str], SpotHours],
        deadline_s: float | None,
        excluded: Mapping[str, str] | None = None,
    ) -> Quote:
        return quote(
            self._spec(deadline_s), work, offers, now=self._now, local_files=False, scoped_store=True, spent=Decimal(0),
            cap_left=MONEY, excluded=excluded or {}, caps={CLOUD: caps}, learned=self._learned(spots),
            measured_step_s=self._step_s if self.run.done_s else None,
        )  # fmt: skip

    def _learned(self, spots: Mapping[tuple[str, str, str, str], SpotHours]) -> Corrections:
        markets = {key: tuple(timeline) for key, timeline in self._timelines.items()}
        return Corrections(speeds={GPU: SPEED_RUNS} if self.knows_speed else {}, spots=dict(spots), markets=markets)

    def _spec(self, deadline_s: float | None) -> JobSpec:
        spec = {
            "name": "simulation",
            "cap_usd": str(MONEY),
            "train": {"model": "meta-llama/Llama-3.1-8B", "data": {"path": "rows.csv", "completion": "{text}"}},
            "resources": {"gpus": 1, "nodes": self._nodes},
        }
        if deadline_s is not None:
            spec["deadline"] = (self._now + timedelta(seconds=deadline_s)).isoformat()
        return JobSpec.model_validate(spec)


def _on_sale(run: SimulatedRun) -> list[int]:
    return [number for number, zone in enumerate(run.zones) if zone.available[run.tick]]
