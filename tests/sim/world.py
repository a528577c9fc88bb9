"""Installation in virtual time: one to three brokers with the production wiring, one store, cloud and blob store, and
users. Everything follows from the seed and the plan of faults."""

import asyncio
import logging
import random
import shutil
import tempfile
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from broker.controllers.base.context import Intervals
from broker.controllers.fleet import Fleet
from broker.controllers.market.poller import MarketIntervals, MarketPoller
from broker.controllers.termination.orphan_sweep import Sweep
from broker.domain.ids import AttemptId, InstanceName, JobId
from broker.domain.job import RESTING_JOB_STATES, Attempt
from broker.ports import Blobs, Lane, Store
from broker.runtime.clock import DatabaseClock
from providers.local.machine import Machine
from providers.simulated.config import SimulatedConfig
from providers.simulated.market import rng
from tests.sim import people
from tests.sim.backups import Backups
from tests.sim.bodies import Body
from tests.sim.cloud import SWEEPS, CloudConnection, DrawnCloud, Launch
from tests.sim.connections import BlobConnection, NoHints, Objects, StoreConnection
from tests.sim.daemon import Errors, daemon
from tests.sim.disk import trainers
from tests.sim.faults import CALM_S, TAIL_S, Fault, Weather, at_work, excusing, jobs_of, lasted_s
from tests.sim.happenings import Happenings
from tests.sim.invariants import CANARY, INVARIANTS, Watch
from tests.sim.loop import EPOCH, Livelock, Process, SimClock, SimLoop, Sleep, context_of
from tests.sim.measures import attempt_of_machine
from tests.sim.moves import Moves
from tests.sim.omitting import OmittingGate
from tests.sim.outcome import Outcome
from tests.sim.prices import Prices
from tests.sim.strikes import Strikes
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.broker_rig import BOX, CLOUD, INSTALLATION, build_fleet
from trainer.contract import object_keys as keys
from trainer.contract.documents import Limits

DRAIN_S = 6000.0
"""Seconds after the last fault within which all jobs must end."""
DRAIN_PREEMPTED_S = 3 * DRAIN_S
"""The same if a job on spot only has had MANY_ATTEMPTS attempts. Each preemption after progress is free, and the bound
on preemptions without progress alone may take longer than DRAIN_S.
"""
MANY_ATTEMPTS = 8
TICK_S = 10.0


@dataclass(kw_only=True)
class Slot:
    """Host of a broker, with the host's clock."""

    number: int
    skew_s: float
    clock: SimClock
    process: Process
    gate: OmittingGate | None = None
    starts: int = 0


class World:
    installation = INSTALLATION
    intervals = Intervals(
        poll_s=5, look_s=5, list_s=5, billing_s=15, sweep_s=20, market_s=60, grants_s=60, deadman_s=30, lease_s=30,
        replace_s=30, sold_out_s=60, stored_s=60, review_s=60,
    )  # fmt: skip
    limits = Limits(heartbeat_s=10, poll_s=10, deadman_s=400, drain_s=60)

    def __init__(self, seed: int, plan: Sequence[Fault], *, hints: bool = True) -> None:
        """Prepare. `hints` False: drop messages that only shorten a wait, such as a cloud's notice of an end."""
        self.seed, self.plan, self.hints = seed, plan, hints
        self.loop = SimLoop(seed)
        self.loop.on_kill = self.kill
        random.seed(f"{seed}/global")
        self._pauses = random.Random(f"{seed}/pauses")
        self._draw = rng(seed, "world")
        self.strikes = Strikes(now=self.loop.time)
        self.trace: list[str] = []
        self.violation: tuple[str, str] | None = None
        self.launches: list[Launch] = []
        self.objects = Objects()
        self.prices = Prices(seed, plan)
        self.watch = Watch(self)
        self.people = people.People(self)
        self.happenings, self.backups, self.moves = Happenings(self), Backups(self), Moves(self)
        self.jobs: list[JobId] = []
        self.submitted: dict[JobId, float] = {}
        self.own: dict[JobId, int] = {}
        """Number of faults of one job's machines or of users' requests about the job, by job."""
        self.blinks = self._draw.choice((0.0, 0.08))
        """Share of machines that a listing omits, never twice in a row."""
        self.asked, self.expected = 0, jobs_of(seed)
        self.late: set[InstanceName] = set()
        """Machines created after the end of their attempts, by launchers that the cloud wrongly reported as dead."""
        self._pinged: dict[str, float] = {}
        self.touched_at = 0.0
        """Time of the last write of the brokers' lease."""
        self._processes: dict[str, Process] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="gb-sim-"))
        clock = SimClock(self.loop)
        self.store = MemoryStore(clock)
        self.state = self.store._state
        if not hints:
            self.state.hints = NoHints()
        config = self._config()
        self.body = Body(cast(Blobs, BlobConnection(self, None)), clock, config.virtual, seed=seed)
        self.cloud = DrawnCloud(config, self.body, installation=self.installation, state=self.folder, clock=clock)
        self.body.world = self.cloud.world = self
        self.slots = self._seats()
        self.weather = Weather(seed=seed, strikes=self.strikes, brokers=len(self.slots))
        self.excuses = excusing(plan, len(self.slots))

    def _seats(self) -> list[Slot]:
        """Return the places of the brokers. With every fourth seed their clocks disagree."""
        clock_skew_message = self._draw.random() < 0.25
        brokers = self._draw.choice((1, 1, 2, 2, 3))
        return [self._slot(n, self._draw.uniform(-3600, 3600) if clock_skew_message else 0.0) for n in range(brokers)]

    def _config(self) -> SimulatedConfig:
        draw = self._draw
        return SimulatedConfig.model_validate(
            {
                "body": "virtual", "seed": self.seed, "sold_out": draw.choice((0, 0.05, 0.3)),
                "hazard_scale": draw.choice((0, 0, 0, 10, 40)), "notice_s": draw.choice((0, 30, 120)) * self.hints,
                "faults": {"list_lag_s": draw.choice((0, 5, 30))},
                "virtual": {
                    "run_s": draw.choice((200, 600, 1500)), "boot_s": draw.choice((5, 30)), "beat_s": 10, "tick_s": 1,
                },
            }
        )  # fmt: skip

    def _slot(self, number: int, skew_s: float) -> Slot:
        unstarted = Process(f"b{number}.0", dead=True)
        clock = SimClock(self.loop, skew_s=skew_s)
        return Slot(number=number, skew_s=skew_s, clock=clock, process=unstarted)

    # --- what is recorded

    def note(self, who: str, what: str) -> None:
        self.trace.append(f"{self.loop.time():9.2f} {who:6} {what}")

    def fail(self, name: str, message: str) -> None:
        """End the run at the first violation."""
        assert name in INVARIANTS, name
        if self.violation is None:
            self.violation = (name, message)
            self.note("!", f"{name}: {message}")
            self.loop.stop()

    def time_of(self, moment: datetime) -> float:
        return (moment - EPOCH).total_seconds()

    def born(self, machine: Machine) -> None:
        self.note("cloud", f"created {machine.name}")
        self.watch.born(machine)
        for gate in (slot.gate for slot in self.slots if slot.gate is not None):
            gate.another(machine.name)
        if self.weather.hits("people.stop_birth", job=self.job_of(machine.name)):
            self.spawn(self.people.stop(machine.name), "stop")

    def destroyed(self, name: InstanceName) -> None:
        self.note("cloud", f"destroyed {name}")
        self.watch.died(name, self.loop.time())

    def over(self, name: str) -> None:
        one = self.body._instances.get(name)
        if one is None:
            return  # it was destroyed while it saved
        self.note("cloud", f"over {name}")
        at = min(self.loop.time(), one.dies_at)
        self.watch.died(name, at)
        if keys.final(one.attempt) not in self.objects.data and self.body.announced_s(one) < 1.0:
            self.watch.lost(AttemptId(one.attempt), at)

    def pinged(self, process: Process) -> None:
        self._pinged[process.id] = self.loop.time()

    def touched_lease(self) -> None:
        self.touched_at = self.loop.time()
        if self.touched_at - max(self._pinged.values(), default=-1e9) > 1.0 + self._longest_freeze():
            self.fail("lease_needs_database", "the brokers' lease was touched without a transaction right before")

    def _longest_freeze(self) -> float:
        return max((fault.for_s for fault in self.plan if fault.kind == "freeze"), default=0.0)

    def launching(self, name: str, by: str | None = None) -> bool:
        return any(launch.name == name and by in (None, launch.launched_by) for launch in self.launches)

    def job_of(self, machine_id: str) -> JobId | None:
        attempt = self.backups.attempt(attempt_of_machine(machine_id))
        return None if attempt is None else attempt.job_id

    def lineage(self, job: str) -> str:
        """Return the job whose training the weights continue: the origin of the job, or of its origin in turn."""
        stored = self.backups.job(JobId(job))
        origin = None if stored is None else stored.spec.origin
        return job if origin is None else self.lineage(origin)

    def struck(self, kind: str, machine_id: str) -> None:
        """Record a machine's fault as a fault of the job that it was bought for."""
        if (own := self.job_of(machine_id)) is not None:
            self.strikes.note(kind, own)
            self.own[own] = self.own.get(own, 0) + 1

    def tears_save(self, machine_id: str) -> bool:
        """Return True if a machine dies in the middle of a save."""
        return self.weather.hits("machine.torn_save", job=self.job_of(machine_id))

    def brokers(self) -> Iterable[Process]:
        """Return all brokers that ever ran."""
        return self._processes.values()

    def idle_s(self, process: Process, since: float, until: float) -> float:
        """Return seconds of a span in which it could write nothing: it was frozen, or its database was down."""
        number = int(process.id[1:].split(".")[0])
        own = [fault for fault in self.plan if fault.target % len(self.slots) == number]
        return sum(lasted_s(own, kind, since, until) for kind in ("store.down", "freeze"))

    def is_dead(self, process_id: str) -> bool:
        return process_id in self._processes and self._processes[process_id].dead

    def live(self) -> list[Attempt]:
        return [self.state.attempts[i].value for lane in Lane for i in self.state.by_lane[lane]]

    # --- what is done

    async def pause(self, least_s: float, most_s: float) -> None:
        await Sleep(self.loop, self._pauses.uniform(least_s, most_s))

    def sometimes(self, share: float) -> bool:
        return self._pauses.random() < share

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task of the world, which continues after its caller's death."""
        return self.loop.create_task(work, name=name, context=context_of(None))

    def start(self, slot: Slot) -> None:
        slot.starts += 1
        process = Process(f"b{slot.number}.{slot.starts}", skew_s=slot.skew_s)
        slot.process = self._processes[process.id] = process
        slot.clock = SimClock(self.loop, skew_s=slot.skew_s, zero_s=1000.0 * slot.starts)
        store = cast(Store, StoreConnection(self, process, slot.number, self.store))
        clock = DatabaseClock(store, slot.clock)
        provider = slot.gate = OmittingGate(self, CloudConnection(self, process, clock, slot.number), clock)
        market = MarketPoller({CLOUD: provider}, clock, MarketIntervals(poll_s=self.intervals.market_s))
        fleet = build_fleet(
            owner=process.id, store=store, blobs=cast(Blobs, BlobConnection(self, slot.number)), provider=provider,
            clock=clock, offers=market.offers, troubles=market.troubles, intervals=self.intervals, limits=self.limits,
        )  # fmt: skip
        _mark_sweeps(fleet)
        self.moves.begin(fleet)
        self.note(process.id, "starts")
        task = self.loop.create_task(daemon(clock, market, fleet), context=context_of(process))
        task.add_done_callback(lambda done: self._stopped(process, done), context=context_of(None))
        self.watch.able()

    def _stopped(self, process: Process, done: asyncio.Task[Any]) -> None:
        self.fail("no_internal_error", f"{process.id} ended: {done!r}")

    def kill(self, process: Process) -> None:
        process.dead, process.died_at, process.kill_at = True, self.loop.time(), None
        self.loop.keep_tasks_of(process)
        self.note(process.id, f"killed after {process.steps} steps")
        self.watch.able()

    # --- the story

    def run(self) -> Outcome:
        handler = Errors(self.fail)
        root = logging.getLogger()
        root.addHandler(handler)
        asyncio.set_event_loop(self.loop)
        main = self.spawn(self._live(), "world")
        main.add_done_callback(lambda _: self.loop.stop(), context=context_of(None))
        try:
            with trainers(self.loop.time):
                self.loop.run_forever()
            if self.violation is None and main.done() and main.exception() is not None:
                raise cast(BaseException, main.exception())
        except Livelock as e:
            self.fail("drains", f"without end {e}")
        finally:
            root.removeHandler(handler)
            shutil.rmtree(self.folder, ignore_errors=True)
        measures = self.watch.measures
        return Outcome(
            seed=self.seed, violation=self.violation, trace=tuple(self.trace), steps=self.loop.ran,
            faults=len(self.plan), states=tuple(self.state.jobs[i].value.state.value for i in self.jobs),
            lives=tuple(map(self._met, filter(self.is_over, self.jobs))),
            leak_ages=tuple(measures.leak_ages), leak_ages_raw=tuple(measures.leak_ages_raw),
            detects=tuple(measures.detects), detects_raw=tuple(measures.detects_raw),
            strikes=self.strikes.lifetimes({i: self._life(i) for i in self.jobs if self.is_over(i)}),
        )  # fmt: skip

    async def _live(self) -> None:
        for slot in self.slots:
            self.start(slot)
        for fault in self.plan:
            self.spawn(self.happenings.happen(fault), fault.kind)
        await self.store.as_tenant(people.PEOPLE).put_secret("me", "TOKEN", BOX.seal(CANARY))
        if (policy := people.policy_of(self.seed, self.expected)) is not None:
            await self.store.put_policy(policy)
        for number in range(self.expected):
            self.spawn(self.people.submit(number), f"submit {number}")
        self.spawn(self.people.lose_patience(), "patience")
        calm_at = max(fault.at + fault.for_s for fault in self.plan) if self.plan else 0.0
        while self.loop.time() < calm_at or not self._over():
            await asyncio.sleep(TICK_S)
            self.watch.tick()
            await self.watch.strangers()
            if self.loop.time() > max(CALM_S, calm_at) + TAIL_S + self._drain_s():
                left = [f"{i} {self.state.jobs[i].value.state}" for i in self.jobs] + list(self.cloud.standing())
                self.fail("drains", f"left: {', '.join(left)}")

    def _drain_s(self) -> float:
        """Return the seconds within which all jobs must end."""
        jobs = (self.state.jobs[i].value for i in self.jobs)
        preempted = any(job.spec.resources.spot == "only" and job.attempts > MANY_ATTEMPTS for job in jobs)
        return DRAIN_PREEMPTED_S if preempted else DRAIN_S

    def _over(self) -> bool:
        if len(self.jobs) < self.expected:
            return False
        return all(map(self.is_over, self.jobs)) and not self.live() and not self.cloud.standing()

    def is_over(self, job: JobId) -> bool:
        return self.state.jobs[job].value.state in RESTING_JOB_STATES

    def _life(self, job: JobId) -> tuple[float, float]:
        ended = self.state.jobs[job].value.finished_at
        return self.submitted[job], self.loop.time() if ended is None else self.time_of(ended)

    def _met(self, job: JobId) -> int:
        """Return the number of faults that a job has met."""
        return at_work(self.plan, *self._life(job)) + self.own.get(job, 0)


def _mark_sweeps(fleet: Fleet) -> None:
    """Mark the sweep's calls, so that the cloud can identify the caller of a destroy."""
    (sweep,) = (controller for controller in fleet.controllers if isinstance(controller, Sweep))
    step = sweep.step

    async def marked() -> bool:
        SWEEPS.set(True)
        return await step()

    sweep.step = marked  # type: ignore[method-assign]
