"""Decision about attempts that a restored backup lacks: used numbers, machines to wait for, and their end."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.ids import AttemptId, attempt_id, instance_name
from broker.domain.job import Reason
from broker.lifecycle.backup_restore import AHEAD, possible_attempts
from broker.lifecycle.decisions.restored_decision import (
    DrainRecord,
    MissingRestoredFacts,
    RestoredDecision,
    RestoredFacts,
    RestoredFactsNeeded,
    RestoredMachine,
    RestoredMachines,
    decide_restored,
)
from tests.support import build
from trainer.contract.documents import Final, Outcome

JOB = replace(build.job(), attempts=2)
NEXT = attempt_id(JOB.id, 3)
ALL = possible_attempts(JOB)


@dataclass(frozen=True, kw_only=True)
class World:
    """The clouds and the blob store after the database was restored; attempts by number."""

    written: Set[int] = frozenset()
    listed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    unproven: Set[int] = frozenset()
    silent: Set[str] = frozenset()
    reason: Reason | None = None

    def answer(self, facts: RestoredFacts, needed: RestoredFactsNeeded) -> RestoredFacts:
        match needed.missing:
            case MissingRestoredFacts.SPECS:
                specs = {attempt: number in self.written for attempt, number in needed.attempts.items()}
                return replace(facts, specs={**facts.specs, **specs})
            case MissingRestoredFacts.MACHINES:
                machines = [self._machine(attempt, number) for attempt, number in needed.attempts.items()]
                return replace(facts, machines=RestoredMachines(machines=machines, silent=self.silent))
            case MissingRestoredFacts.END:
                return replace(facts, end=DrainRecord(reason=self.reason))

    def _machine(self, attempt: AttemptId, number: int) -> RestoredMachine:
        clouds = self.listed.get(number, ())
        is_absent = not clouds and number not in self.unproven
        name = instance_name(build.INSTALLATION, attempt)
        return RestoredMachine(number=number, name=name, clouds=clouds, is_absent=is_absent)


def decide(
    world: World, *, may_be_older: bool = True, traces: Set[int] = frozenset()
) -> tuple[RestoredDecision, list[RestoredFactsNeeded]]:
    """Return the decision, and what was asked for."""
    ids = {attempt for attempt, number in ALL.items() if number in traces}
    facts, asked = RestoredFacts(job=JOB, may_be_older=may_be_older, traces=ids), list[RestoredFactsNeeded]()
    while isinstance(decision := decide_restored(facts), RestoredFactsNeeded):
        asked.append(decision)
        facts = world.answer(facts, decision)
    return decision, asked


def test_a_job_of_this_process_costs_one_request() -> None:
    """Attempts are created in the order of their numbers."""
    decision, asked = decide(World(), may_be_older=False)
    assert decision == RestoredDecision()
    assert [needed.attempts for needed in asked] == [{NEXT: 3}]


def test_a_spec_of_the_next_attempt_makes_all_specs_needed() -> None:
    decision, asked = decide(World(written={3, 5}), may_be_older=False)
    assert decision.numbers == (3, 5)
    assert [len(needed.attempts) for needed in asked[:2]] == [1, AHEAD - 1], "no spec is read twice"


@pytest.mark.parametrize(("may_be_older", "traces"), [(True, frozenset[int]()), (False, {4})])
def test_a_suspect_job_needs_the_specs_of_all_candidates(may_be_older: bool, traces: Set[int]) -> None:
    _, asked = decide(World(), may_be_older=may_be_older, traces=traces)
    assert asked[0] == RestoredFactsNeeded(missing=MissingRestoredFacts.SPECS, attempts=ALL)


def test_the_first_listed_machine_is_named_before_an_unproven_absence() -> None:
    world = World(written={3, 4, 5}, unproven={3}, listed={4: ("aws", "vast"), 5: ("aws",)}, silent={"runpod"})
    blocked = decide(world)[0].blocked
    assert blocked is not None
    assert blocked.startswith("attempt 4 was bought after the backup")
    assert f"{instance_name(build.INSTALLATION, attempt_id(JOB.id, 4))} at aws, vast exists and bills" in blocked


def test_the_wait_tells_whether_the_listed_attempt_has_ended() -> None:
    machine = RestoredMachine(
        number=3, name=instance_name(build.INSTALLATION, NEXT), clouds=("aws",),
        final=Final(attempt=NEXT, outcome=Outcome.COMPLETED),
    )  # fmt: skip
    specs = {attempt: number == 3 for attempt, number in ALL.items()}
    facts = RestoredFacts(job=JOB, may_be_older=True, specs=specs, machines=RestoredMachines(machines=[machine]))
    decision = decide_restored(facts)
    assert isinstance(decision, RestoredDecision)
    assert "has ended (completed)" in (decision.blocked or "")


def test_a_silent_cloud_and_an_unproven_absence_hold_the_job() -> None:
    silent = decide(World(written={3}, silent={"vast"}))[0]
    assert (silent.blocked or "").endswith("vast did not answer; see gpubroker doctor")
    unproven = decide(World(written={3, 4}, unproven={4}))[0]
    assert (unproven.blocked or "").startswith("attempt 4 ")


def test_the_end_of_the_last_attempt_counts() -> None:
    decision, asked = decide(World(written={3, 4}, reason=Reason.STOPPED))
    assert decision == RestoredDecision(numbers=(3, 4), ended_for=Reason.STOPPED)
    assert asked[-1] == RestoredFactsNeeded(missing=MissingRestoredFacts.END, attempts={attempt_id(JOB.id, 4): 4})


numbers = st.sets(st.integers(3, 2 + AHEAD))


@given(
    written=numbers,
    traces=numbers,
    listed=numbers,
    unproven=numbers,
    silent=st.sets(st.sampled_from(["aws", "vast"])),
    may_be_older=st.booleans(),
)
def test_no_used_number_is_missed_and_no_machine_is_passed_over(
    written: set[int], traces: set[int], listed: set[int], unproven: set[int], silent: set[str], may_be_older: bool
) -> None:
    """A job continues only if every cloud has answered, and no machine of a used number may exist."""
    traces |= listed  # a listed machine is a trace
    world = World(written=written, listed=dict.fromkeys(listed, ("aws",)), unproven=unproven, silent=silent)
    decision, asked = decide(world, may_be_older=may_be_older, traces=traces)
    is_suspect = may_be_older or traces or 3 in written
    used = (written | traces) if is_suspect else set()
    assert decision.numbers == tuple(sorted(used))
    if used:
        assert (decision.blocked is None) == (not listed and not silent and not used & unproven)
    else:
        assert decision == RestoredDecision()
    assert len(asked) <= 4
