"""Rules that hold after every write, every birth and death of a machine, and at the end. Each check has a name.
Numbers are those of "Invariants" in docs/design/architecture.md.

- 1 no_leak; 3 resume_furthest; 6 one_job_a_key; 7 ended_absent, launcher_at_rest; 9 resume_is_exact
- 2 one_live_attempt, one_machine_set, intent_first, create_once, issued_once, active_has_attempt
- 4 spend_within_cap, ledger_adds_up, charged_in_full, not_overbilled, reservation_settled, budget_holds
- 5 no_job_lost, legal_step, success_is_real; 8 live_state_ends, signal_is_heard, death_is_seen
- 10 manifest_last, torn_never_loaded, own_checkpoint, good_checkpoint_kept; 11 no_secret; 12 other_team_unseen
- 13 one_lease_holder, fenced; 14 lease_needs_database, broker_gone_stops; liveness: drains (the end itself)
- no number: foreign_untouched, spared_stands, orphan_grace, no_false_death, who_writes_what, no_internal_error,
- no number either: move_drains, move_is_free, retry_is_counted_once

Checks of durations run every ten virtual seconds: no_leak, live_state_ends, signal_is_heard, death_is_seen and
broker_gone_stops. `other_team_unseen` runs then too, because its answer changes with submissions only.
"""

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from broker.domain.ids import AttemptId, JobId, attempt_of
from broker.domain.job import Attempt, AttemptState, JobState, Reason
from broker.domain.tenancy import Tenant
from broker.lifecycle.state_machine import ATTEMPT_RULES, JOB_RULES
from broker.ports import Change, JobFilter
from providers.local.machine import Machine
from tests.sim.bodies import FAILURES
from tests.sim.cloud import MachineRecord
from tests.sim.faults import disturbed_s
from tests.sim.keeping import Keeping
from tests.sim.loop import Process
from tests.sim.measures import Measures, attempt_of_machine
from tests.sim.money_checks import MoneyChecks
from tests.sim.orphans import Orphans
from tests.sim.rows import Before, Leases
from trainer.contract import object_keys as keys
from trainer.contract.object_keys import step_of

if TYPE_CHECKING:
    from tests.sim.world import World

INVARIANTS = frozenset({
    "no_leak", "one_live_attempt", "one_machine_set", "intent_first", "create_once", "active_has_attempt",
    "resume_furthest", "spend_within_cap", "ledger_adds_up", "charged_in_full", "reservation_settled", "budget_holds",
    "no_job_lost", "legal_step", "success_is_real", "one_job_a_key", "ended_absent", "launcher_at_rest",
    "live_state_ends", "signal_is_heard", "resume_is_exact", "manifest_last", "torn_never_loaded", "own_checkpoint",
    "good_checkpoint_kept", "no_secret", "other_team_unseen", "one_lease_holder", "fenced", "lease_needs_database",
    "broker_gone_stops", "drains", "foreign_untouched", "orphan_grace", "no_false_death", "who_writes_what",
    "no_internal_error", "death_is_seen", "not_overbilled", "issued_once", "spared_stands", "move_drains",
    "move_is_free", "retry_is_counted_once",
})  # fmt: skip
CANARY = "canary-of-a-secret"
_NEXT = {(state, rule.next) for (state, _), rule in ATTEMPT_RULES.items()}
_JOB_NEXT = {(state, to) for (state, _), to in JOB_RULES.items()}
STRANGER = Tenant(team="others", owner="me")


class Watch:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._leases = Leases()
        self._entered: dict[AttemptId, float] = {}
        self._furthest: dict[JobId, int] = {}
        self._told_since, self._held = dict[AttemptId, float](), dict[AttemptId, float]()
        self.stands, self.born_at = list[MachineRecord](), dict[str, float]()
        """`born_at`: time of each machine's creation or latest restart, by the machine's id."""
        self.measures = Measures()
        self.keeping, self.budgets, self.orphans = Keeping(world), MoneyChecks(world), Orphans(world)
        self._acknowledged: dict[str, JobId] = {}
        """Jobs whose submission was answered, by idempotency key."""

    # ----------------------------------------------------------------------------------------------------- the people

    def answered(self, key: str, own: JobId) -> bool:
        """Record an answered submission; return False if it broke an invariant."""
        known, state = self._acknowledged.get(key), self._world.state
        if known not in (None, own) or own in (i for k, i in self._acknowledged.items() if k != key):
            self._fail("one_job_a_key", f"{key} made {known}, and now {own}")
        elif len(state.jobs) > self._world.asked:
            self._fail("one_job_a_key", f"{self._world.asked} keys made {len(state.jobs)} jobs")
        self._acknowledged[key] = own
        self._none_lost()
        return self._world.violation is None

    def _none_lost(self) -> None:
        jobs = self._world.state.jobs
        for key, own in self._acknowledged.items():
            if own not in jobs:
                self._fail("no_job_lost", f"{own} of {key} was answered, and is not there")

    async def strangers(self) -> None:
        """Check that a tenant of a team without jobs sees no job."""
        visible = await self._world.store.as_tenant(STRANGER).jobs(JobFilter())
        if visible:
            self._fail("other_team_unseen", f"{len(visible)} jobs of another team")

    def restored(self, jobs: Set[JobId], unsent: Set[AttemptId], made_at: float) -> None:
        """Forget the state after the backup. `jobs`: lost. `unsent`: attempts whose rows no longer record that their
        creates were sent.
        """
        self._acknowledged = {key: own for key, own in self._acknowledged.items() if own not in jobs}
        self._leases, self._told_since, self._held = Leases(), {}, {}
        self.orphans.restored()
        standing, late = self._world.cloud.standing(), self._world.backups.came_late(made_at)
        gone = {one.id for one in self.stands if one.attempt in unsent or one.id in late} - set(standing)
        self.stands = [one for one in self.stands if one.id not in gone]
        self.budgets.restored(made_at)
        self.measures.forget()

    def restored_at(self, now: float) -> None:
        """Record that brokers start on the restored database; deadlines for them begin."""
        world, standing = self._world, {*self._world.cloud.standing()}
        for machine_id in standing:
            row = world.state.attempts.get(attempt_of_machine(machine_id))
            if row is not None and row.value.state in (AttemptState.TERMINATING, AttemptState.ENDED):
                since = world.time_of(row.value.terminating_since or row.value.created_at)
                self.measures.unwanted(row.value.id, [machine_id], max(now, since + self._kept_s(row.value)))
        for one in world.live():
            self._entered[one.id] = now
            if world.backups.is_lost(one.id, standing):
                self.measures.lost(one.id, now)

    # ------------------------------------------------------------------------------------------------------- the store

    def before_store(self, name: str, args: tuple[Any, ...]) -> Before | None:
        if name not in ("apply", "charge"):
            return None
        state = self._world.state
        changes = args[0] if name == "apply" else [Change(charge=arg) for arg in args[0]]
        attempts = [c.attempt[0].id for c in changes if c.attempt] + [c.charge.attempt_id for c in changes if c.charge]
        jobs = {c.job[0].id for c in changes if c.job} | {state.attempts[i].value.job_id for i in attempts}
        return Before(
            jobs={i: state.jobs[i].value for i in sorted(jobs)},
            attempts={i: state.attempts[i].value for i in attempts},
        )

    def after_store(
        self, process: Process, name: str, args: Any, kwargs: dict[str, Any], before: Before | None, answer: Any
    ) -> None:
        if name in ("claim_jobs", "claim_attempts"):
            rows, now = [getattr(one, "attempt", one) for one in answer], self._world.loop.time()
            for violation in self._leases.claimed(kwargs["owner"], rows, now, now + kwargs["lease_s"]):
                self._fail("one_lease_holder", violation)
        elif name == "release":
            self._leases.released((*args[0], *args[1]))
        elif name == "end_leases":
            self._leases.ended(kwargs["owner"])
        elif name == "ping":
            self._world.pinged(process)
        elif name == "charge":
            self.budgets.charged(process, args[0], answer)
        elif name == "mark_launchers_finished":
            self._through(process, args[0])
        elif before is not None and name == "apply":
            for change in (change for change, held in zip(args[0], answer, strict=True) if held):
                self._applied(process, change, before)
        if before is not None:
            self._none_lost()
            for job_id in before.jobs:
                self.job_adds_up(job_id)

    def _through(self, process: Process, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if self._world.launching(attempt.name):
                self._fail("launcher_at_rest", f"{process.id} calls the launch of {attempt.name} over, which goes on")

    def _applied(self, process: Process, change: Change, before: Before) -> None:
        self.budgets.charged_together(process, change.charge)
        self._world.moves.written(change, before.jobs.get(change.job[0].id) if change.job else None)
        if change.attempt is not None:
            read, to = change.attempt
            was = before.attempts[read.id]
            if (was.epoch, was.state) != (read.epoch, read.state):
                self._fail("fenced", f"{process.id} read {read.state} under {read.epoch}, it was {was.state}")
            self._leases.released([read])
            if to.state is not was.state:
                if to.state is AttemptState.LAUNCHING:
                    self.budgets.sent(to)
                self._stepped(process, was, to)
        if change.job is not None:
            was_job, to_job = before.jobs[change.job[0].id], change.job[1]
            if was_job.state is not to_job.state:
                self._world.note(process.id, f"job {to_job.id} {was_job.state} -> {to_job.state} {to_job.reason}")
                if (was_job.state, to_job.state) not in _JOB_NEXT:
                    self._fail("legal_step", f"job {to_job.id}: {was_job.state} -> {to_job.state}")
                if to_job.state is JobState.SUCCEEDED:
                    self._succeeded(to_job.id)
            self._leases.released([change.job[0]])
        if change.admit is not None:
            self._admitted(process, change.admit)
            self.budgets.hold()
        for event in change.events:
            if CANARY in event.message:
                self._fail("no_secret", f"event {event.kind}")

    def _succeeded(self, own: JobId) -> None:
        finals = [self._world.objects.data.get(keys.final(i)) for i in self._world.state.of_job[own]]
        if not any(final and b'"completed"' in final[0] for final in finals):
            self._fail("success_is_real", f"{own} succeeded, and no machine said so")

    def _stepped(self, process: Process, was: Attempt, to: Attempt) -> None:
        reason = f" ({to.reason})" if to.reason else ""
        self._world.note(process.id, f"attempt {to.id} {was.state} -> {to.state}{reason} {to.detail}")
        self._entered[to.id] = self._world.loop.time()
        if to.state is AttemptState.BOOTING:
            bought = {handle.id for handle in to.handles}
            self.measures.wanted(to.id, self._world.cloud.surplus & bought)
            if bought <= {*self._world.cloud.standing()}:  # another one took the place of what died before
                self.measures.whole_again(to.id)
        if to.state in (AttemptState.TERMINATING, AttemptState.ENDED):
            still = [i for i in self._world.cloud.standing() if attempt_of_machine(i) == to.id]
            self.measures.unwanted(to.id, still, self._world.loop.time() + self._kept_s(to))
        if (was.state, to.state) not in _NEXT:
            self._fail("legal_step", f"attempt {to.id}: {was.state} -> {to.state}")
        standing = {i for i in self._world.cloud.standing() if i.startswith(to.name)}
        if to.state is AttemptState.TERMINATING and was.state is AttemptState.TRAINING:
            self._death(to, standing - self._world.body.stopped.keys() - self._returned() - self._world.cloud.surplus)
        if to.state is AttemptState.ENDED:
            self._furthest[to.job_id] = self.keeping.saved(to.job_id)
            if was.create_sent_at is not None:
                self._ended(process, to, standing)

    def _death(self, to: Attempt, standing: set[str]) -> None:
        if to.reason is Reason.PREEMPTED and to.final is None and len(standing) >= to.line.nodes:
            self._fail("no_false_death", f"{to.name} stands, and was taken for dead: {to.detail}")
        works = self._world.body.working() - self._returned()
        whole = (
            len(self._world.body.mates(to.name)) >= to.line.nodes - 1
        )  # one too many in the place of another is idle
        if to.reason is Reason.HUNG and to.name in works and whole:
            self._fail("no_false_death", f"{to.name} works, and was taken for hung")

    def _returned(self) -> set[str]:
        """Return machines that run again, although a broker may have polled them while they were stopped."""
        look_s = self._world.cloud.caps.list_lag_s + 60.0
        return {name for name, at in self._world.body.returned.items() if self.calm_s(at) < look_s}

    def _ended(self, process: Process, to: Attempt, standing: set[str]) -> None:
        if standing:
            self._fail("ended_absent", f"{to.id} ended, and {', '.join(sorted(standing))} stands")
        if self._world.launching(to.name):
            self._fail("ended_absent", f"{to.id} ended, and a launcher may still create {to.name}")
        if (at := self._world.body.died_at(to.name)) is not None:
            self.died(to.name, at)
        stands = [one for one in self.stands if one.attempt == to.id]
        self.budgets.settled(self._world.state.attempts[to.id].value, stands, process)

    def _admitted(self, process: Process, new: Attempt) -> None:
        self._entered[new.id] = self._world.loop.time()
        self._world.note(process.id, f"attempt {new.id} planned, number {new.number}, {new.line.offer.id}")
        if self._world.backups.issues_again(new):
            self._fail("issued_once", f"{new.id} is number {new.number} a second time")
        if not all(self.keeping.may_start_from(new.job_id, key) for key in new.resume_from):
            self._fail("own_checkpoint", f"{new.id} resumes from {new.resume_from}")
        found = step_of(new.resume_from[0]) if new.resume_from else 0
        if found < self._furthest.get(new.job_id, 0):
            self._fail("resume_furthest", f"{new.id} from step {found}, {self._furthest[new.job_id]} was saved")

    def job_adds_up(self, job_id: JobId) -> None:
        state = self._world.state
        job = state.jobs[job_id].value
        attempts = [state.attempts[i].value for i in state.of_job[job_id]]
        live = [attempt for attempt in attempts if attempt.live]
        if len(live) > 1:
            self._fail("one_live_attempt", f"job {job_id}: {', '.join(attempt.id for attempt in live)}")
        if (job.state is JobState.ACTIVE) != bool(live):
            self._fail("active_has_attempt", f"job {job_id} is {job.state} with {len(live)} live attempts")
        self.budgets.adds_up(job, attempts)

    # ------------------------------------------------------------------------------------------------------- the cloud

    def born(self, machine: Machine) -> None:
        self.stands_up(machine.name)
        found = attempt_of(self._world.installation, machine.name)
        row = self._world.state.attempts.get(found) if found else None
        if row is None or row.value.create_sent_at is None or found is None:
            self._fail("intent_first", f"{machine.name} was created, and no row tells of it")
            return
        attempt = row.value
        self.billed(machine.name)
        rows = [self._world.state.attempts[i].value for i in self._world.state.of_job[attempt.job_id]]
        unknown = (one for one in self._world.backups.attempts.values() if one.job_id == attempt.job_id)
        others = [one.name for one in (*rows, *unknown)]
        if machine.name in self._world.late:
            return
        both = [
            name
            for name in self._world.body.standing()
            if name in others and name not in (machine.name, *self._world.late)
        ]
        if both:
            self._fail("one_machine_set", f"{machine.name} was created beside {both[0]} of the same job")

    def billed(self, machine_id: str) -> None:
        """Record that one machine of an attempt bills as of now."""
        own = attempt_of_machine(machine_id)
        attempt = self._world.backups.attempt(own)
        assert attempt is not None
        price = attempt.line.offer.usd_per_hour
        self.born_at[machine_id] = self._world.loop.time()
        self.stands.append(MachineRecord(id=machine_id, attempt=own, usd_per_hour=price, born=self.born_at[machine_id]))

    def stands_up(self, machine_id: str) -> None:
        own, now = attempt_of_machine(machine_id), self._world.loop.time()
        self.measures.whole_again(own)
        row = self._world.state.attempts.get(own)
        if row is None or row.value.state in (AttemptState.TERMINATING, AttemptState.ENDED):
            self.measures.unwanted(own, [machine_id], now)

    def lost(self, own: AttemptId, at: float) -> None:
        """Record that a machine died without notice."""
        row = self._world.state.attempts.get(own)
        if row is not None and row.value.state not in (AttemptState.TERMINATING, AttemptState.ENDED):
            self.measures.lost(own, at)

    def died(self, machine_id: str, at: float) -> None:
        self.measures.gone(machine_id, at)
        for stand in self.stands:
            if stand.id == machine_id and stand.ended is None:
                stand.ended = at
        own = attempt_of_machine(machine_id)
        if (row := self._world.state.attempts.get(own)) is not None and row.value.state is AttemptState.LAUNCHING:
            self.measures.wanted(own, self._world.cloud.surplus)  # a surplus machine is then the only one to adopt

    def able(self) -> None:
        """Record which brokers can now observe a death or destroy a machine."""
        world, down = self._world, self._world.weather.lasts
        running = [s.number for s in world.slots if not (s.process.dead or s.process.frozen)]
        cut = (down("store.down", number) or down("cloud.cut", number) for number in running)
        act = not (down("cloud.down") or down("cloud.refuses") or all(cut))
        see = act and not down("blobs.down_for_all")
        self.measures.able(act=act and bool(running), see=see and bool(running), now=world.loop.time())

    # ----------------------------------------------------------------------------------------------------- the objects

    def before_put(self, key: str, data: bytes, *, by_broker: bool) -> None:
        if CANARY.encode() in data:
            self._fail("no_secret", key)
        if key == keys.BROKER_LEASE:
            self._world.touched_lease()
        if not by_broker and keys.is_manifest(key):
            self.keeping.before_manifest(key, data)
        if by_broker and (key.startswith(("checkpoints/", keys.HEARTBEATS)) or key.endswith("final.json")):
            self._fail("who_writes_what", f"a broker wrote {key}")
        if key.endswith("spec.json") and key in self._world.objects.data:
            self._fail("who_writes_what", f"{key} was written twice")

    # --------------------------------------------------------------------------------------------- now and then, at end

    def tick(self) -> None:
        """Check durations, from which the time of disturbances is subtracted."""
        world, now = self._world, self._world.loop.time()
        self.keeping.tick()
        self.orphans.tick()
        lag_s = world.cloud.caps.list_lag_s
        standing = world.cloud.standing()
        limits = {
            AttemptState.PLANNED: 90.0, AttemptState.LAUNCHING: 400.0, AttemptState.BOOTING: 400.0,
            AttemptState.DRAINING: world.limits.drain_s + 90, AttemptState.TERMINATING: 3 * lag_s + 200,
        }  # fmt: skip
        heard = {one.id: self._told_since.setdefault(one.id, now) for one in world.live() if self._is_told(one)}
        self._told_since = heard
        for own, since in heard.items():
            if self.calm_s(since) > 90:
                self._fail("signal_is_heard", f"{own} was told to end, and goes on for {now - since:.0f} s")
        for own, at in self.measures.unseen().items():
            since, attempt = max(at, self._entered.get(own, at)), world.state.attempts[own].value
            if {handle.id for handle in attempt.handles} <= {*standing} - world.body.stopped.keys():
                continue  # another machine under its name died: the recorded ones run, and count as hung in time
            if attempt.state is AttemptState.TRAINING and self.calm_s(since) > 3 * lag_s + 120:
                self._fail("death_is_seen", f"{own} lost a machine {now - since:.0f} s ago, and trains on")
        for one in world.live():
            if kept_s := self._kept_s(one):
                self._held[one.id] = min(now, self._entered[one.id] + kept_s)
            calm = self.calm_s(max(self._entered[one.id], self._held.get(one.id, 0.0)))
            if calm > limits.get(one.state, 7200.0):
                self._fail("live_state_ends", f"{one.id} is {one.state} for {calm:.0f} s: {one.detail}")

    def _kept_s(self, one: Attempt) -> float:
        """Return the seconds for which the machine of a failed attempt is kept; a stop by the user ends them."""
        job = self._world.state.jobs[one.job_id].value
        failed = one.state is AttemptState.TERMINATING and one.final is not None and one.final.outcome in FAILURES
        return job.spec.keep_on_failure if failed and not (job.stop_requested or one.signal) else 0.0

    def _is_told(self, one: Attempt) -> bool:
        stop_requested = one.signal is not None or self._world.state.jobs[one.job_id].value.stop_requested
        return stop_requested and one.state in (AttemptState.LAUNCHING, AttemptState.BOOTING, AttemptState.TRAINING)

    def entered_at(self, own: AttemptId) -> float:
        """Return the time at which the attempt entered its state."""
        return self._entered[own]

    def calm_s(self, since: float) -> float:
        """Return the seconds from `since` until now, without the spans that excuse a delay."""
        now = self._world.loop.time()
        return now - since - disturbed_s(self._world.excuses, since, now)

    def _fail(self, name: str, message: str) -> None:
        self._world.fail(name, message)
