"""Parts of invariant 4: the limits of policies on what all jobs hold and spend together, and the charges of attempts.

Each attempt pays for what its cloud bills, and for no more than what the broker could know.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING

from broker.billing.drain import drain_lead_s
from broker.domain.ids import AttemptId, InstanceName, JobId, attempt_of
from broker.domain.instance import SELF_STOP_S, InstanceState, Observed
from broker.domain.job import Attempt, Job
from broker.domain.money import ZERO, LedgerKind
from broker.domain.offer import Offer
from broker.ports import Charge
from tests.sim.cloud import MachineRecord
from tests.sim.faults import disturbed_s, lasted_s
from tests.sim.loop import Process
from tests.sim.prices import CLOCK_S, Charged, dearest, least

if TYPE_CHECKING:
    from tests.sim.world import World

SPENT = (LedgerKind.CHARGE, LedgerKind.ADJUSTMENT)
TOLD_S = 60.0
"""Seconds within which a broker has written what a listing showed."""
FRESH_S = 0.1
"""Seconds by which a listing must be younger than the limit to be certainly young enough."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Listing that one broker received; virtual seconds."""

    begun: float
    answered: float
    shown: frozenset[InstanceName]
    prices: Mapping[InstanceName, Sequence[Decimal]]
    """Listed prices of the machines of each name; only if prices move."""


def highest(offer: Offer) -> Decimal:
    """Return the highest dollars an hour that a machine may cost."""
    return max(offer.usd_per_hour, offer.on_demand_usd_per_hour or ZERO) if offer.price_moves else offer.usd_per_hour


class MoneyChecks:
    """Checks of charges against the true costs. A simulation lasts for less than a budget's window."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._listed: dict[str, list[Listed]] = {}
        """Listings that each broker's process received, in order."""
        self._surplus_seen: dict[AttemptId, dict[str, float]] = {}
        """Processes that received a listing with more machines than were bought, with the first time, by attempt."""
        self._sent: dict[AttemptId, float] = {}
        """Time at which each attempt's row recorded that its create may be sent."""
        self._lost_since: dict[str, float] = {}
        """Times of the restored backup, by processes that ended before the restore: it lacks their later writes."""
        self._asked: dict[tuple[str, AttemptId], Charged] = {}
        """Charges that each broker's process is about to write."""
        self._charges: dict[AttemptId, list[Charged]] = {}
        """Charges that were written, in order; only if prices move."""
        self._ledgers: dict[JobId, tuple[int, Decimal, Decimal]] = {}
        """Number of entries already added up, and their sums."""

    # ------------------------------------------------------------------------------------------------- what is known

    def listed(self, process: Process, begun: float, shown: Sequence[Observed]) -> None:
        there = frozenset(one.handle.name for one in shown if one.state is not InstanceState.GONE)
        stand = Counter(one.handle.name for one in shown if one.state is not InstanceState.GONE)
        for name in (name for name, machines in stand.items() if machines > 1):
            own = attempt_of(self._world.installation, name)
            attempt = None if own is None else self._world.backups.attempt(own)
            if attempt is not None and stand[name] > attempt.line.nodes:
                self._surplus_seen.setdefault(attempt.id, {}).setdefault(process.id, self._world.loop.time())
        prices: dict[InstanceName, list[Decimal]] = {}
        for machine in shown:
            if machine.usd_per_hour is not None:
                prices.setdefault(machine.handle.name, []).append(machine.usd_per_hour)
        one = Listed(begun=begun, answered=self._world.loop.time(), shown=there, prices=prices)
        self._listed.setdefault(process.id, []).append(one)

    def asked(self, process: Process, charges: Sequence[Charge]) -> None:
        """Record that a broker decides now, on its latest listing."""
        world = self._world
        if not world.prices.moves:
            return
        now, listed = world.loop.time(), self._listed.get(process.id, ())
        latest = listed[-1] if listed and now - listed[-1].begun <= world.intervals.billing_s - FRESH_S else None
        for charge in charges:
            attempt = world.state.attempts[charge.attempt_id].value
            prices = latest.prices.get(attempt.name, ()) if latest else ()
            charged = Charged(to=world.time_of(charge.to), asked=now)
            if latest and len(prices) >= attempt.line.nodes:
                charged = replace(charged, begun=latest.begun, price=max(prices))
            elif latest and prices:
                whole = (
                    charge.begun for charge in listed if len(charge.prices.get(attempt.name, ())) >= attempt.line.nodes
                )
                charged = replace(charged, partly=max(whole, default=latest.begun))
            self._asked[process.id, charge.attempt_id] = charged

    def charged(self, process: Process, charges: Sequence[Charge], held: Sequence[bool]) -> None:
        if not self._world.prices.moves:
            return
        for one, ok in zip(charges, held, strict=True):
            written = Charged(to=self._world.time_of(one.to), asked=self._world.loop.time())
            written = self._asked.pop((process.id, one.attempt_id), written)
            if ok:
                self._charges.setdefault(one.attempt_id, []).append(written)

    def charged_together(self, process: Process, charge: Charge | None) -> None:
        """Record a charge that is written together with another change, at its own price or otherwise at the last
        one.
        """
        if charge is not None and charge.prices:
            self.asked(process, [charge])
        if charge is not None:
            self.charged(process, [charge], [True])

    def restored(self, made_at: float) -> None:
        """Restore a backup of that moment."""
        self._lost_since |= {
            broker.id: made_at for broker in self._world.brokers() if broker.id not in self._lost_since
        }
        self._asked.clear()
        self._ledgers.clear()
        for own, written in self._charges.items():
            self._charges[own] = [broker for broker in written if broker.asked <= made_at]

    def sent(self, attempt: Attempt) -> None:
        """Record the time of a create as the row has it, because a restored backup may have lost the real one."""
        assert attempt.create_sent_at is not None
        at = min(self._world.loop.time(), self._world.time_of(attempt.create_sent_at))
        self._sent[attempt.id] = min(at, self._sent.get(attempt.id, at))

    def _unseen(self, process: Process, name: InstanceName, since: float) -> float:
        """Return the time at which a process knew that a machine was gone.

        It is the second consecutive listing without the machine after the last one with it, or the process's end.
        """
        without: list[float] = []
        for one in self._listed.get(process.id, ()):
            if one.begun >= since:
                without = [] if name in one.shown else [*without, one.answered]
        return min(without[1] if len(without) > 1 else self._world.loop.time(), process.died_at)

    def _known_to_all_brokers(self, attempt: Attempt, gone: float) -> float:
        """Return the time at which every broker had a listing without the machine. Brokers that are cut off, restart,
        or get lagging listings delay it. An attempt that never booted may also be charged for listings that brokers
        missed."""
        world, lag_s = self._world, self._world.cloud.caps.list_lag_s
        if attempt.booted_at is not None:
            since = max(gone, world.time_of(attempt.booted_at) + lag_s) + CLOCK_S
            return max(self._unseen(broker, attempt.name, since) for broker in world.brokers())
        assert attempt.terminating_since is not None
        since = max(gone, world.time_of(attempt.terminating_since)) + CLOCK_S
        kept_from = self._sent[attempt.id] - 3 * lag_s - 5 * world.intervals.list_s
        return max(
            self._unseen(broker, attempt.name, since) + self._gap_s(broker, kept_from) + lag_s
            for broker in world.brokers()
        )

    def _latest_self_stop(self, attempt: Attempt, gone: float) -> float:
        """Return the latest end of a machine that vanished while all brokers were away, from its dead-man's switch."""
        world, intervals, limits = self._world, self._world.intervals, self._world.limits
        left, back = world.happenings.away or (math.inf, math.inf)
        if attempt.first_beat_at is None or not left <= gone <= back:
            return math.inf
        margin_s = intervals.billing_s + intervals.deadman_s + attempt.line.offer.billing_quantum_s
        if world.time_of(attempt.first_beat_at) > left - TOLD_S:
            margin_s += world.cloud.caps.boot_deadline_s
        margin_s += world.state.jobs[attempt.job_id].value.spec.keep_on_failure
        return left + margin_s + limits.deadman_s + limits.drain_s + SELF_STOP_S

    def _gap_s(self, process: Process, since: float) -> float:
        """Return the longest time from the start of a listing to the answer of the next but one, after `since`. A
        launcher that ran on may have made a machine that all of them missed."""
        listed = self._listed.get(process.id, ())
        return max((b.answered - a.begun for a, b in zip(listed, listed[2:], strict=False) if b.answered >= since),
                   default=0.0)  # fmt: skip

    # ------------------------------------------------------------------------------------------------ what is checked

    def adds_up(self, job: Job, attempts: Sequence[Attempt]) -> None:
        """Check the sums after each write."""
        written, late = self._written(job.id)
        charged = sum((attempt.charged_usd for attempt in attempts), ZERO)
        if not written == charged == job.spent_usd:
            message = f"job {job.id}: {written} written, {charged} charged, {job.spent_usd} spent"
            self._world.fail("ledger_adds_up", message)
        if job.spent_usd - late > job.cap_usd:
            self._over_cap(job, attempts, late)

    def _written(self, job_id: JobId) -> tuple[Decimal, Decimal]:
        """Return the ledger's spent dollars, and the part of them for machines that came too late. The ledger only
        grows.
        """
        ledger = self._world.state.ledger[job_id]
        counted, spent, late = self._ledgers.get(job_id, (0, ZERO, ZERO))
        for entry in ledger[counted:]:
            spent += entry.usd if entry.kind in SPENT else ZERO
            late += entry.usd if entry.kind is LedgerKind.ADJUSTMENT else ZERO
        self._ledgers[job_id] = (len(ledger), spent, late)
        return spent, late

    def _over_cap(self, job: Job, attempts: Sequence[Attempt], late: Decimal) -> None:
        """Check the cap. An outage delays the destruction of a machine and costs its rate for as long. A surplus
        machine costs its rate until a broker lists it and the job has drained. `late`: dollars for machines that came
        after their attempt's end, against the promise of their launcher."""
        world, allowed = self._world, ZERO
        for attempt in attempts:
            since = world.time_of(attempt.create_sent_at or attempt.created_at)
            until = world.time_of(attempt.ended_at) if attempt.ended_at else world.loop.time()
            span = Decimal(str(disturbed_s(world.excuses, since, until)))
            allowed += highest(attempt.line.offer) * attempt.line.nodes * span / 3600
            allowed += highest(attempt.line.offer) * self._surplus_allowance_s(attempt, until) / 3600
        if job.spent_usd - late > job.cap_usd + allowed:
            message = f"job {job.id}: {job.spent_usd} of {job.cap_usd}, {allowed:.4f} allowed"
            world.fail("spend_within_cap", message)

    def _surplus_allowance_s(self, attempt: Attempt, until: float) -> Decimal:
        """Return the allowed seconds of all surplus machines together."""
        world, seconds = self._world, 0.0
        lead_s = TOLD_S + drain_lead_s(attempt, world.cloud.caps, world.intervals.drain_budget(world.limits.drain_s))
        told_at = min(self._surplus_seen.get(attempt.id, {}).values(), default=until)
        for one in world.watch.stands:
            if one.attempt == attempt.id and one.id in world.cloud.surplus:
                since = max(told_at, one.born)
                known = since + lead_s + disturbed_s(world.excuses, since, until)
                seconds += max(0.0, min(until, known) - one.born)
        return Decimal(str(seconds))

    def settled(self, attempt: Attempt, stands: Sequence[MachineRecord], settler: Process) -> None:
        """Check an attempt after its last charge. `stands`: its machines, as the cloud bills them."""
        ledger = [entry for entry in self._world.state.ledger[attempt.job_id] if entry.attempt_id == attempt.id]
        released = sum((entry.usd for entry in ledger if entry.kind is LedgerKind.RELEASE), ZERO)
        if released != max(ZERO, attempt.reserved_usd - attempt.charged_usd):
            message = f"{attempt.id}: {released} of {attempt.reserved_usd} released"
            self._world.fail("reservation_settled", message)
        true = self._least(attempt, stands, settler)
        if attempt.charged_usd < true:
            message = f"{attempt.id}: {attempt.charged_usd} charged, the cloud bills {true}"
            self._world.fail("charged_in_full", message)
        self._not_overbilled(attempt, stands)

    def _cost(self, one: MachineRecord) -> Decimal:
        ended = self._world.loop.time() if one.ended is None else one.ended
        return one.usd_per_hour * Decimal(str(round(ended - one.born, 3))) / 3600

    def _moves(self, attempt: Attempt) -> bool:
        return self._world.prices.moves and attempt.line.offer.price_moves

    def _least(self, attempt: Attempt, stands: Sequence[MachineRecord], settler: Process) -> Decimal:
        """Return the least that the machines must be charged.

        Three parts of their cost cannot be known and do not count. First, a price that no listing has shown yet.
        Second, surplus machines, if no broker that could record them got a listing with all at once. Third, the run
        time of an idle machine that did not end itself and went while all brokers were away."""
        stands = [self._with_provable_end(one) for one in stands]
        if self._world.cloud.surplus & {one.id for one in stands} and not self._surplus_was_recorded(attempt, settler):
            stands = sorted(stands, key=self._cost)[-attempt.line.nodes :]
        if not self._moves(attempt):
            return sum(map(self._cost, stands), ZERO)
        prices, offer, now = self._world.prices, attempt.line.offer, self._world.loop.time()
        charges, sent = self._charges.get(attempt.id, []), self._sent[attempt.id]
        spans, rises = [*prices.spans(offer, charges, sent, now)], [*prices.rises(offer, charges, sent)]
        return sum((least((s.born, now if s.ended is None else s.ended), spans, rises) for s in stands), ZERO)

    def _with_provable_end(self, one: MachineRecord) -> MachineRecord:
        """Return the machine with its provable end. Agents do not count the time in which they could not read the
        lease, and start from zero with their machine.
        """
        left, back = self._world.happenings.away or (math.inf, math.inf)
        if one.ended is None or not left <= one.ended <= back:
            return one
        waited_s = lasted_s(self._world.plan, "blobs.down_for_all", left, one.ended)
        unknown = self._world.body.is_stuck(one.id) or one.id in self._world.body.returned
        until = left if unknown else max(left, one.ended - waited_s)
        return replace(one, ended=max(one.born, until))

    def _surplus_was_recorded(self, attempt: Attempt, settler: Process) -> bool:
        """Return True if the settling process saw the surplus, or another process had the time to record it. That
        process ran and had a database, and no restored backup has lost its write."""
        shown, now = self._surplus_seen.get(attempt.id, {}), self._world.loop.time()

        def could(one: Process, first: float) -> bool:
            ends = min(one.died_at, now, self._lost_since.get(one.id, now))
            if one is settler:
                return first + CLOCK_S < now
            return ends - first - self._world.idle_s(one, first, ends) > TOLD_S

        return any(could(broker, shown[broker.id]) for broker in self._world.brokers() if broker.id in shown)

    def _not_overbilled(self, attempt: Attempt, stands: Sequence[MachineRecord]) -> None:
        """Check the charge of every machine: from the row that announced the create until all brokers knew that none is
        left.
        """
        begun, offer = self._sent[attempt.id], attempt.line.offer
        gone = max((one.ended for one in stands if one.ended is not None), default=begun)
        known = min(self._known_to_all_brokers(attempt, gone), self._latest_self_stop(attempt, gone))
        until = known + CLOCK_S + offer.billing_quantum_s
        one = offer.usd_per_hour * Decimal(str(round(until - begun, 3)))
        if self._moves(attempt):
            spans = self._world.prices.spans(offer, self._charges.get(attempt.id, []), begun, until)
            one = dearest([*spans], offer.billing_quantum_s)
        # An extra machine is charged until a listing without it reaches a broker: for the whole time at most.
        machines = attempt.line.nodes + sum(stand.id in self._world.cloud.surplus for stand in stands)
        most = one * machines / 3600
        charged = attempt.charged_usd - attempt.traffic_usd
        if charged > most:
            message = f"gone at {gone:.1f}, known at {known:.1f}"
            self._world.fail("not_overbilled", f"{attempt.id}: {charged} charged, at most {most:.6f}; {message}")

    def hold(self) -> None:
        """Check budgets after each admission, and each higher cap that reserves more. Admitted jobs stay, even if late
        machines, which have no reservation, have exceeded the budget since."""
        state = self._world.state
        live = [attempt for _, attempt in state.running()]
        for _, policy in state.policies.live():
            if policy.max_jobs is not None and len(live) > policy.max_jobs:
                self._world.fail("budget_holds", f"{len(live)} jobs hold machines, {policy.max_jobs} may")
            gpus = sum(one.line.offer.gpus * one.line.nodes for one in live)
            if policy.max_gpus is not None and gpus > policy.max_gpus:
                self._world.fail("budget_holds", f"{gpus} GPUs are held, {policy.max_gpus} may be")
            if not policy.budgets:
                continue
            spent = sum((e.usd for ledger in state.ledger.values() for e in ledger if e.kind in SPENT), ZERO)
            held = sum((max(ZERO, one.reserved_usd - one.charged_usd) for one in live), ZERO)
            for budget in policy.budgets:
                if spent + held > budget.limit_usd:
                    message = f"{spent} spent and {held} reserved of {budget.limit_usd}"
                    self._world.fail("budget_holds", message)
