"""Simulated users, who submit jobs, repeat unanswered submissions, stop jobs, raise caps, and give up after a while."""

import asyncio
import random
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from broker.domain.errors import GpubrokerError, StoreUnavailable
from broker.domain.ids import JobId, job_id
from broker.domain.job import Event, Job, JobState
from broker.domain.money import ZERO
from broker.domain.policy import Action, Budget, BudgetPeriod, Policy, Threshold
from broker.domain.spec import JobSpec
from broker.domain.tenancy import DEFAULT_TEAM, Tenant
from broker.domain.workload import Workload
from providers.simulated.market import rng
from tests.sim.connections import StoreConnection
from tests.sim.faults import CALM_S, TAIL_S, Fault
from tests.sim.loop import EPOCH, Process
from tests.sim.measures import attempt_of_machine

if TYPE_CHECKING:
    from tests.sim.world import World

PEOPLE = Tenant(team=DEFAULT_TEAM, owner="me")
HEIRS = 0.15
"""Share of jobs that start from another job's checkpoint, if there is one."""
WAIT_S = 1200.0
"""Seconds after the last fault until users give up jobs that wait for a reported reason. Unsuitable hosts are avoided
for hours. Users return after the same time: a job that ran meanwhile may have spent its cap."""


class People:
    def __init__(self, world: "World") -> None:
        self._world = world

    async def submit(self, number: int) -> None:
        world, draw = self._world, rng(self._world.seed, "job", number)
        await asyncio.sleep(draw.uniform(0, 700) if number else 1.0)
        lost = any(one.kind == "lose_node" and one.target % world.expected == number for one in world.plan)
        spec = _spec(draw, number, several=lost)
        job = Job(
            id=JobId(""), owner="me", spec=spec, workload=Workload(shape=None, method="script"),
            created_at=EPOCH + timedelta(seconds=world.loop.time()), cap_usd=spec.cap_usd,
        )  # fmt: skip
        keep_s = rng(world.seed, "keeps", number).choice((0, 0, 0, 0, 300, 2000))
        job = replace(job, spec=job.spec.model_copy(update={"keep_on_failure": keep_s}))
        if draw.random() < HEIRS and (origin := self._origin(draw)) is not None:
            job = replace(job, spec=job.spec.model_copy(update={"init_from": f"job/{origin}"}))
        world.asked += 1
        door: Any = StoreConnection(world, Process("people"), 0, world.store.as_tenant(PEOPLE))
        again = True
        while again:
            job = replace(job, id=job_id(draw.randbytes(9)))  # as every request does; keys tell of the same
            try:
                submitted, _ = await door.submit(job, key=f"key-{number}", body_sha256="", events=())
                again = world.weather.draw("impatient") < 0.1 or submitted.id in world.backups.jobs
            except StoreUnavailable:
                await asyncio.sleep(5.0)
        if not world.watch.answered(f"key-{number}", submitted.id):
            return
        if submitted.spec.init_from:
            world.strikes.note("people.init_from", submitted.id)
        world.jobs.append(submitted.id)
        world.submitted[submitted.id] = world.loop.time()
        asked = spec.resources
        limits = f"${spec.cap_usd}, {spec.max_duration or 'no'} s, saves every {spec.checkpoint.max_loss_s} s"
        what = f"{asked.nodes} x {'/'.join(asked.accelerators) or 'any'}, spot {asked.spot}"
        what += f", from {job.spec.init_from}" if job.spec.init_from else ""
        world.note("people", f"submitted {submitted.id}: {what}, {limits}")

    def _origin(self, draw: random.Random) -> JobId | None:
        """Return a job with a committed checkpoint, which `init_from` requires; the job may still run."""
        may = [own for own in self._world.jobs if self._world.watch.keeping.saved(own)]
        return draw.choice(may) if may else None

    async def decide(self, fault: Fault) -> None:
        """Stop a job, or raise its cap."""
        world = self._world
        if not world.jobs:
            return
        own = world.jobs[fault.target % len(world.jobs)]
        world.own[own] = world.own.get(own, 0) + 1
        world.strikes.note(fault.kind, own)
        tenant = world.store.as_tenant(PEOPLE)
        try:
            if fault.kind == "stop":
                await tenant.request_stop(own, Event(job_id=own, kind="job.stop_requested", message="stop"))
            else:
                raised, held = world.state.jobs[own].value.cap_usd + 1, self._reserved(own)
                await tenant.raise_cap(own, raised, Event(job_id=own, kind="job.cap_raised", message="more"))
                if self._reserved(own) > held:
                    world.watch.budgets.hold()
        except GpubrokerError as e:
            world.note("people", f"{fault.kind}: {e}")

    def _reserved(self, own: JobId) -> Decimal:
        """Return the dollars that all attempts of the job reserve. A full budget refuses only changes that reserve
        more.
        """
        state = self._world.state
        return sum((state.attempts[one].value.reserved_usd for one in state.of_job[own]), ZERO)

    async def stop(self, machine: str) -> None:
        """Stop the job for which this machine was bought."""
        row = self._world.state.attempts.get(attempt_of_machine(machine))
        if row is not None:
            stop = Event(job_id=row.value.job_id, kind="job.stop_requested", message="stop")
            await self._world.store.as_tenant(PEOPLE).request_stop(row.value.job_id, stop)

    async def lose_patience(self) -> None:
        world = self._world
        await asyncio.sleep(CALM_S + TAIL_S)
        while True:
            await asyncio.sleep(WAIT_S)
            for own in world.jobs:
                job = world.state.jobs[own].value
                if job.state is JobState.QUEUED and job.reason:
                    world.note("people", f"stop {own}, which waits: {job.reason}")
                    stop = Event(job_id=own, kind="job.stop_requested", message="stop")
                    await world.store.as_tenant(PEOPLE).request_stop(own, stop)


def policy_of(seed: int, jobs: int) -> Policy | None:
    """Return a policy on what all jobs hold and spend, with one seed in seven. A simulation takes less than a day."""
    draw = rng(seed, "policy")
    if draw.random() > 0.15:
        return None
    actions = draw.choice(((), (), (Action.STOP_LAUNCHES,), (Action.DRAIN,)))
    budget = Budget(
        limit_usd=Decimal(str(round(jobs * draw.uniform(1, 5), 2))), per=BudgetPeriod.WEEK,
        thresholds=tuple(Threshold(at=Decimal("0.9"), action=action) for action in actions),
    )  # fmt: skip
    return Policy(
        name="all", budgets=(budget,) if draw.random() < 0.7 else (),
        max_jobs=draw.choice((None, 2, 4)), max_gpus=draw.choice((None, 16, 32, 64)),
        approval_above_usd=Decimal(1000),
    )  # fmt: skip


def _spec(draw: random.Random, number: int, *, several: bool) -> JobSpec:
    values: dict[str, Any] = {
        "name": f"job-{number}", "cap_usd": draw.choice(("0.1", "0.3", "2", "10")),
        "script": {"code": "upload:" + "0" * 64, "command": ["true"]},
        "checkpoint": {"every_s": draw.choice((20, 60, 300))},
        "resources": {
            "nodes": max(draw.choice((1, 1, 1, 2)), 2 if several else 1),
            "spot": draw.choice(("allowed", "never", "only")),
            "accelerators": draw.choice(([], ["h100-sxm"], ["l40s", "rtx4090"])),
        },
    }  # fmt: skip
    if draw.random() < 0.2:
        values["secrets"] = ["TOKEN"]
    if draw.random() < 0.2:
        values["max_duration"] = draw.choice((200, 1000))
    return JobSpec.model_validate(values)
