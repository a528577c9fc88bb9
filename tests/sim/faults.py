"""Faults drawn from the seed: the plan, which can be shrunk fault by fault, and the faults active at a moment."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from broker.domain.ids import JobId
from providers.simulated.market import rng, uniform_draw
from tests.sim.strikes import Strikes

CALM_S = 1500.0
"""Virtual second after which no fault begins. All faults have ended by then, except an absence of all brokers."""
TAIL_S = 150.0
"""Seconds for which back-offs and leases last after a fault."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault during a span. `share`: share of calls, or a size; `target`: number of the broker, job or machine."""

    kind: str
    at: float
    for_s: float = 0.0
    share: float = 0.0
    target: int = 0

    def __str__(self) -> str:
        return f"{self.kind}(at={self.at:.0f}, for_s={self.for_s:.0f}, share={self.share:.3g}, target={self.target})"


SHARES: Mapping[str, tuple[float, float]] = {
    "cloud.429": (0.1, 0.6),
    "cloud.5xx": (0.1, 0.6),
    "cloud.lost_reply": (0.1, 0.7),
    "cloud.duplicate": (0.4, 1.0),
    "cloud.slow": (0.1, 0.6),
    "cloud.slow_create": (0.3, 1.0),
    "cloud.no_capacity": (0.3, 1.0),
    "cloud.down": (1.0, 1.0),
    "cloud.refuses": (1.0, 1.0),
    "cloud.no_credit": (1.0, 1.0),
    "cloud.cut": (1.0, 1.0),
    "cloud.wrong_machine": (0.4, 0.9),
    "cloud.list_omits": (0.2, 0.8),
    "cloud.list_stopped": (0.2, 0.8),
    "cloud.partial": (0.3, 1.0),
    "cloud.twice": (0.3, 1.0),
    "cloud.prices": (0.5, 3.0),
    "cloud.price_moves": (0.2, 2.0),
    "cloud.deaf": (0.5, 1.0),
    "cloud.short_life": (0.3, 0.9),
    "launcher.unknown": (1.0, 1.0),
    "kill.launching": (0.2, 0.7),
    "machine.torn_save": (0.1, 0.5),
    "store.down": (1.0, 1.0),
    "store.error": (0.05, 0.4),
    "store.unknown_commit": (0.05, 0.4),
    "blobs.down": (1.0, 1.0),
    "blobs.error": (0.05, 0.5),
    "blobs.down_for_all": (1.0, 1.0),
}
"""Kinds of faults with a duration, each with the range of the share of calls that it hits."""
WITH: Mapping[str, Sequence[tuple[str, float]]] = {
    "cloud.deaf": (("people.stop_launch", 0.5), ("cloud.slow_create", 0.7)),
    "launcher.unknown": (("cloud.lost_reply", 0.5),),
    "cloud.short_life": (("cloud.lost_reply", 0.3),),
}
"""Accompanying kinds, with their share. Without them the first kind would seldom meet its target."""
RARE = (
    "cloud.cut", "cloud.deaf", "cloud.duplicate", "cloud.no_capacity", "cloud.no_credit", "cloud.partial",
    "cloud.short_life", "cloud.twice", "cloud.wrong_machine", "kill.launching", "launcher.unknown",
    "machine.torn_save", "store.down", "store.error",
)  # fmt: skip
"""Kinds that strike only a create, a save, a destroy or one broker's calls, and are therefore drawn more often."""
AIMED = ("people.stop_launch", "people.stop_birth")
"""Kinds for plans that aim, drawn only together with others: a user stops a job as its machine is launched or starts to
run."""
INSTANTS = (
    "kill", "kill", "kill", "freeze", "freeze", "clock", "preempt", "preempt", "preempt_with_notice", "lose_node",
    "silence", "zombie_trainer", "stop", "stop", "raise_cap",
    "late_machine", "late_machine", "rot", "host_stops",
)  # fmt: skip
OF_JOBS = (
    "preempt", "preempt", "preempt", "preempt_with_notice", "lose_node", "silence", "zombie_trainer", "stop",
    "raise_cap", "late_machine", "rot", "host_stops",
)  # fmt: skip
"""Kinds of which one is drawn for each job, in addition to the faults of the installation."""
JOBS = (1, 2, 4, 8, 12, 16)
BENIGN = frozenset({
    "preempt", "preempt_with_notice", "lose_node", "silence", "zombie_trainer", "stop", "raise_cap", "cloud.prices",
    "cloud.no_capacity", "cloud.no_credit", "cloud.wrong_machine", "cloud.duplicate", "cloud.short_life",
    "cloud.partial", "cloud.twice", "machine.torn_save", "rot", "late_machine", "clock", "host_stops",
    "cloud.list_stopped", "cloud.price_moves", "trainer_fails", "node_stops", *AIMED,
})  # fmt: skip
"""Kinds that excuse neither delay nor overspending."""
OF_BROKERS = frozenset({
    "kill", "freeze", "cloud.cut", "store.down", "store.error", "store.unknown_commit", "blobs.down",
})  # fmt: skip
AWAY_S = (450.0, 700.0, 1500.0, 3000.0, 4000.0)
"""Seconds for which all brokers are away. Trainers may stop during the shortest, and have stopped after the longest."""
LOST_S = (60.0, 200.0, 600.0)
"""Seconds of the database's history that a restore of a backup loses."""
KINDS = (
    *SHARES, "people.stop_launch", "people.init_from", *dict.fromkeys(INSTANTS), "away", "restored", "trainer_fails",
    "node_stops",
)  # fmt: skip
"""All kinds that a seed draws. `people.init_from` (a start from another job's checkpoint) is drawn with a job, not in
the plan.
"""


def jobs_of(seed: int) -> int:
    """Return the number of jobs that are submitted."""
    return rng(seed, "jobs").choice(JOBS)


def plan_of(seed: int) -> tuple[Fault, ...]:
    """Return the faults of a seed: at least three of the installation, and one for each job.

    With some seeds all brokers are away for a while, a backup is restored, trainers fail, or a machine stops.
    """
    draw = rng(seed, "plan")
    found = [_instant(draw, OF_JOBS, draw.uniform(0, CALM_S * 0.7)) for _ in range(jobs_of(seed))]
    for _ in range(draw.randint(3, 14)):
        at = draw.uniform(0, CALM_S * 0.7)
        if draw.random() < 0.5:
            kind = draw.choice((*sorted(SHARES), *RARE, *RARE, *RARE))
            low, high = SHARES[kind]
            length_s = min(draw.choice((20, 60, 200, 500)) * draw.uniform(0.5, 1.5), CALM_S - at)
            drawn = [(kind, draw.uniform(low, high)), *WITH.get(kind, ())]
            target = draw.randrange(3)
            found += [Fault(kind=one, at=at, for_s=length_s, share=share, target=target) for one, share in drawn]
        else:
            found.append(_instant(draw, INSTANTS, at))
    if (draw := rng(seed, "away")).random() < 1 / 12:
        for_s = draw.choice(AWAY_S) * draw.uniform(0.9, 1.1)
        found.append(Fault(kind="away", at=draw.uniform(0, CALM_S / 2), for_s=for_s))
    elif (draw := rng(seed, "restored")).random() < 1 / 12:
        for_s = draw.choice(LOST_S) * draw.uniform(0.5, 1.0)
        found.append(Fault(kind="restored", at=draw.uniform(60, CALM_S / 2), for_s=for_s))
    found += _sometimes(seed, "trainer_fails") + _sometimes(seed, "node_stops")
    return tuple(sorted(found, key=lambda fault: fault.at))


def _sometimes(seed: int, kind: str) -> list[Fault]:
    """Return one to three faults with every sixth seed."""
    draw = rng(seed, kind)
    if draw.random() >= 1 / 6:
        return []
    return [_instant(draw, (kind,), draw.uniform(0, CALM_S * 0.7)) for _ in range(draw.randint(1, 3))]


def _instant(draw: random.Random, kinds: Sequence[str], at: float) -> Fault:
    kind = draw.choice(kinds)
    for_s, share = draw.choice((2.0, 20.0, 90.0, 200.0)) * draw.uniform(0.5, 1.5), draw.random()
    if kind == "clock":
        share = draw.choice((-3600.0, 3600.0)) * draw.uniform(0.01, 1.0)
    return Fault(kind=kind, at=at, for_s=min(for_s, CALM_S - at), share=share, target=draw.randrange(64))


@dataclass
class Weather:
    """Faults that are active at this moment. A draw for one purpose does not depend on draws for others."""

    seed: int
    strikes: Strikes
    brokers: int
    now: Mapping[str, list[Fault]] = field(default_factory=lambda: {kind: [] for kind in (*SHARES, *AIMED)})
    _draws: dict[str, int] = field(default_factory=dict)

    def hits(self, kind: str, broker: int | None = None, *, job: JobId | None = None) -> bool:
        """Return True if a fault of the kind strikes this call. `job`: its only target; None: the whole
        installation.
        """
        struck = bool(self.now[kind]) and self.lasts(kind, broker)
        if struck:
            self.strikes.note(kind, job)
        return struck

    def lasts(self, kind: str, broker: int | None = None) -> bool:
        """Decide like `hits`, without recording a strike."""
        everybody = broker is None or kind not in OF_BROKERS
        active = [f for f in self.now[kind] if everybody or f.target % self.brokers == broker]
        if not active:
            return False
        share = max(fault.share for fault in active)
        return share >= 1.0 or self.draw(kind) < share

    def strength(self, kind: str) -> float:
        return max((fault.share for fault in self.now[kind]), default=0.0)

    def draw(self, what: str) -> float:
        """Return the next number in [0, 1) for one purpose."""
        self._draws[what] = self._draws.get(what, 0) + 1
        return uniform_draw(self.seed, what, self._draws[what])


def at_work(plan: Sequence[Fault], since: float, until: float) -> int:
    """Return the number of the installation's faults that happened or were active in a span.

    Faults of one job are counted where they strike.
    """
    shared = (one for one in plan if one.kind in SHARES or one.kind in ("kill", "freeze", "clock", "away", "restored"))
    return sum(one.at <= until and one.at + one.for_s >= since for one in shared)


def excusing(plan: Sequence[Fault], brokers: int) -> tuple[Fault, ...]:
    """Return the faults of a plan that excuse an installation of so many brokers.

    A broker that is cut off from the cloud is no excuse while another one is not.
    """
    cuts = [one for one in plan if one.kind == "cloud.cut"]

    def alone(cut: Fault) -> bool:
        others = (o for o in cuts if o.target % brokers != cut.target % brokers)
        return not any(o.at <= cut.at + cut.for_s + TAIL_S and cut.at <= o.at + o.for_s + TAIL_S for o in others)

    return tuple(f for f in plan if f.kind not in BENIGN and not (f in cuts and brokers > 1 and alone(f)))


def disturbed_s(plan: Sequence[Fault], since: float, until: float) -> float:
    """Return seconds of a span in which some fault of `excusing`, or what it leaves behind, was at work."""
    total, reached = 0.0, since
    for fault in sorted(plan, key=lambda one: one.at):
        begins, ends = max(fault.at, reached), min(fault.at + fault.for_s + TAIL_S, until)
        if ends > begins:
            total, reached = total + ends - begins, ends
    return total


def lasted_s(plan: Sequence[Fault], kind: str, since: float, until: float) -> float:
    """Return seconds of a span in which faults of a kind lasted; each counts for half a minute more."""
    return sum(max(0.0, min(one.at + one.for_s + 30.0, until) - max(one.at, since)) for one in plan if one.kind == kind)
