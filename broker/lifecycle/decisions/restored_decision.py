"""Decides which attempt numbers a restored backup lacks, and whether the job must wait for their machines.

Used by placement before it issues an attempt number, through `broker.controllers.observation.restored_attempts`.
Rules and texts: `broker.lifecycle.backup_restore`.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

from broker.domain.ids import AttemptId, InstanceName
from broker.domain.job import Job, Reason
from broker.lifecycle.backup_restore import possible_attempts, still_running_message, unproven_message
from trainer.contract.documents import Final


@dataclass(frozen=True, kw_only=True)
class RestoredMachine:
    """Machines of an attempt that has no row, as the listings show them."""

    number: int
    name: InstanceName
    clouds: tuple[str, ...] = ()
    """Clouds that list a machine of this name."""
    is_absent: bool = False
    """True if the listings of all clouds prove that no machine of this name exists."""
    final: Final | None = None
    """Final report of the attempt; read only for the first machine that is listed."""


@dataclass(frozen=True, kw_only=True)
class RestoredMachines:
    """Machines of all attempts without a row, in the order of their numbers."""

    machines: Sequence[RestoredMachine]
    silent: Set[str] = frozenset()
    """Clouds that did not answer the latest request for a listing."""


@dataclass(frozen=True, kw_only=True)
class DrainRecord:
    """End of the last attempt without a row. `reason`: why the job ended with it; None: the job continues."""

    reason: Reason | None


@dataclass(frozen=True, kw_only=True)
class RestoredFacts:
    """All facts on which the decision about one job depends."""

    job: Job
    may_be_older: bool
    """True if the job's row may come from a backup, and no earlier decision has ruled out attempts without a row."""
    traces: Set[AttemptId] = frozenset()
    """Candidates with a checkpoint, a listed machine, or a proof of absence that has begun."""
    specs: Mapping[AttemptId, bool] = field(default_factory=dict)
    """True for a candidate whose spec exists, which is written before every create. No entry: not gathered yet."""
    machines: RestoredMachines | None = None
    """None: not gathered yet."""
    end: DrainRecord | None = None
    """None: not gathered yet."""


class MissingRestoredFacts(StrEnum):
    """Facts that cost requests to the blob store or to clouds."""

    SPECS = "specs"
    MACHINES = "machines"
    END = "end"


@dataclass(frozen=True, kw_only=True)
class RestoredFactsNeeded:
    """Answer of `decide_restored` when the decision depends on facts that were not gathered."""

    missing: MissingRestoredFacts
    attempts: Mapping[AttemptId, int]
    """Attempts whose facts are missing, with their numbers in order."""


@dataclass(frozen=True, kw_only=True)
class RestoredDecision:
    """Attempts of the job that a restored backup does not contain."""

    numbers: Sequence[int] = ()
    """Attempt numbers after the job's last number that were already used; empty: none."""
    blocked: str | None = None
    """Reason why the job waits for the machines of these attempts; None: their absence is proven."""
    ended_for: Reason | None = None
    """Reason for which the last of these attempts ended the job; None: it did not end the job."""


def decide_restored(facts: RestoredFacts) -> RestoredDecision | RestoredFactsNeeded:
    """Return the decision about one job, or the facts that the decision still needs.

    Attempts are created in the order of their numbers. So if the row is no older than this process, the spec of the
    next attempt suffices to rule out all attempts without a row.
    """
    candidates = possible_attempts(facts.job)
    following = next(iter(candidates))
    is_suspect = facts.may_be_older or bool(facts.traces) or facts.specs.get(following, False)
    needed = candidates if is_suspect else {following: candidates[following]}
    if unread := {attempt: number for attempt, number in needed.items() if attempt not in facts.specs}:
        return RestoredFactsNeeded(missing=MissingRestoredFacts.SPECS, attempts=unread)
    used = {a: number for a, number in candidates.items() if a in facts.traces or facts.specs.get(a, False)}
    if not used:
        return RestoredDecision()
    numbers = tuple(used.values())
    if facts.machines is None:
        return RestoredFactsNeeded(missing=MissingRestoredFacts.MACHINES, attempts=used)
    if (blocked := _wait_message(facts.machines)) is not None:
        return RestoredDecision(numbers=numbers, blocked=blocked)
    if facts.end is None:
        last = [*used][-1]
        return RestoredFactsNeeded(missing=MissingRestoredFacts.END, attempts={last: used[last]})
    return RestoredDecision(numbers=numbers, ended_for=facts.end.reason)


def _wait_message(listed: RestoredMachines) -> str | None:
    """Return why the job must wait for these machines; None: their absence is proven at every cloud."""
    for machine in listed.machines:
        if machine.clouds:
            where = f"{machine.name} at {', '.join(machine.clouds)}"
            return still_running_message(machine.number, where, machine.final)
    for machine in listed.machines:
        if listed.silent or not machine.is_absent:
            return unproven_message(machine.number, listed.silent)
    return None
