"""Decision about one check of a job's stored data, and about uploads without an owner."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.ids import attempt_id
from broker.domain.job import RESTING_JOB_STATES, Attempt, AttemptState, JobState, Reason
from broker.domain.offer import GIB
from broker.domain.spec import Retention
from broker.lifecycle.decisions.retention_decision import (
    DependentNeeded,
    ExpiryDecision,
    RetentionDecision,
    RetentionFacts,
    decide_retention,
    decide_uploads,
    expiry_event,
)
from broker.lifecycle.retention import CHECK_ENDED_S, KINDS, RESUMED_FROM, sort_objects
from tests.support import build
from trainer.contract import object_keys as keys

NOW = build.at(5 * 86_400)
SHORT = Retention(artifacts_days=3, checkpoints_days=2, logs_days=1, data_days=0)
FOREVER = Retention(artifacts_days=None, checkpoints_days=None, logs_days=None, data_days=None)
LOG_BYTES, DATA_BYTES = 5, 7


def attempts(count: int, last: AttemptState) -> tuple[Attempt, ...]:
    ended = {"reason": Reason.PREEMPTED, "ended_at": build.at(0)}
    return tuple(
        build.attempt(
            AttemptState.ENDED if number < count else last, id=attempt_id(build.JOB_ID, number), number=number,
            **(ended if number < count or last is AttemptState.ENDED else {}),
        )
        for number in range(1, count + 1)
    )  # fmt: skip


def checkpoint(step: int, number: int) -> list[tuple[str, int]]:
    folder = keys.checkpoint(build.JOB_ID, attempt_id(build.JOB_ID, number), step, "n")
    return [(folder + "a.safetensors", 100), (folder + keys.MANIFEST, 1)]


def facts(
    steps: dict[int, tuple[int, ...]] | None = None, *, state: JobState = JobState.CANCELLED, **changes: Any
) -> RetentionFacts:
    """Return the facts about a job with one attempt, unless `steps` has checkpoints of more, by attempt number."""
    steps = steps or {1: (10, 20, 30)}
    issued = changes.pop("issued", max(steps))
    is_resting = state in RESTING_JOB_STATES
    job = build.job(state=state, attempts=issued, finished_at=build.at(0) if is_resting else None)
    known = attempts(issued, AttemptState.ENDED if is_resting else AttemptState.TRAINING)
    objects = [row for number, saved in steps.items() for step in saved for row in checkpoint(step, number)]
    objects += [(keys.job_data(build.JOB_ID, "0" * 64), DATA_BYTES), (keys.spec(known[0].id), LOG_BYTES)]
    values: dict[str, Any] = {
        "job": job, "attempts": known, "retained": sort_objects(job, known, objects), "now": NOW, "defaults": FOREVER,
        "usd_per_gib_month": Decimal(GIB), "stored_s": 3600.0,
    }  # fmt: skip
    return RetentionFacts(**values | changes)


def last(facts: RetentionFacts, *, has_dependent: bool = False, refused: int = 0) -> RetentionDecision:
    """Return the last step of a check, of whose marks the database refuses the first `refused`."""
    while not isinstance(decision := decide_retention(facts), RetentionDecision):
        if isinstance(decision, DependentNeeded):
            facts = replace(facts, has_dependent=has_dependent)
            continue
        kinds = decision.marks[refused] if refused < len(decision.marks) else ()
        facts = replace(facts, job=replace(facts.job, deleted=dict.fromkeys(kinds, NOW)), is_marked=True)
    return decision


def deleted(decision: RetentionDecision) -> list[str]:
    return [key for batch in decision.deletions for key in batch]


def test_expired_kinds_are_marked_before_any_object_is_deleted() -> None:
    everything = facts(defaults=SHORT)
    assert decide_retention(everything) == ExpiryDecision(marks=(KINDS, ("logs", "data")))
    assert decide_retention(facts(defaults=Retention(checkpoints_days=1, logs_days=None))) == ExpiryDecision(
        marks=(("checkpoints",),)
    ), "there is nothing else to mark"


def test_a_refused_mark_deletes_only_what_was_marked() -> None:
    """Another job starts from the checkpoints, so the furthest of them stay."""
    everything = facts(defaults=SHORT)
    objects = {key for kind in everything.retained.by_kind.values() for key in kind}
    assert set(deleted(last(everything))) == objects
    partly = last(everything, refused=1, has_dependent=True)
    assert set(deleted(partly)) == {key for key in objects if not key.startswith("checkpoints/")}
    assert deleted(last(everything, refused=2, has_dependent=True)) == []


def test_a_dependent_is_asked_about_only_before_a_deletion() -> None:
    assert decide_retention(facts({1: (10, 20, 30)})) == DependentNeeded()
    assert isinstance(decide_retention(facts({1: (10, 20)})), RetentionDecision), "both are within checkpoint.keep"


def test_superseded_checkpoints_of_a_running_job_are_deleted() -> None:
    running = facts({1: (10,), 2: (20, 30)}, state=JobState.ACTIVE)
    assert set(deleted(last(running))) == {key for key, _ in checkpoint(10, 1)}
    assert deleted(last(running, has_dependent=True)) == []


def test_nothing_is_deleted_next_to_an_attempt_without_a_row() -> None:
    """The deletion stays due, so the job is checked again soon."""
    decision = decide_retention(facts({1: (10, 20, 30), 2: (40,)}, issued=1, defaults=SHORT))
    assert isinstance(decision, RetentionDecision)
    assert (deleted(decision), decision.due_in_s) == ([], CHECK_ENDED_S)
    unknown = attempt_id(build.JOB_ID, 2)
    assert f"the database does not know attempt {unknown}" in decision.held_back
    assert f"delete {keys.checkpoints(build.JOB_ID)}{unknown}/" in decision.held_back


def test_only_the_rest_is_charged_after_a_deletion() -> None:
    decision = last(facts(defaults=SHORT))
    assert (decision.stored.bytes, decision.due_in_s) == (0, None)
    assert last(facts({1: (10, 20, 30)})).stored.bytes == 2 * 101 + LOG_BYTES + DATA_BYTES


@given(
    steps=st.dictionaries(st.integers(1, 3), st.sets(st.integers(1, 40), max_size=5), min_size=1),
    state=st.sampled_from([JobState.ACTIVE, JobState.RECOVERING, *sorted(RESTING_JOB_STATES)]),
    defaults=st.sampled_from([SHORT, FOREVER]),
    has_dependent=st.booleans(),
    refused=st.integers(0, 2),
)
def test_a_check_deletes_known_objects_once_manifests_first(
    steps: dict[int, set[int]], state: JobState, defaults: Retention, has_dependent: bool, refused: int
) -> None:
    known = facts({n: tuple(sorted(found)) for n, found in steps.items()}, state=state, defaults=defaults)
    sizes = {key: size for kind in known.retained.by_kind.values() for key, size in kind.items()}
    decision = last(known, has_dependent=has_dependent, refused=refused)
    keys_deleted = deleted(decision)
    assert len(keys_deleted) == len(set(keys_deleted))
    assert decision.stored.bytes == sum(sizes.values()) - sum(sizes[key] for key in keys_deleted)
    assert [keys.is_manifest(key) for key in keys_deleted] == sorted(map(keys.is_manifest, keys_deleted), reverse=True)
    for batch in decision.deletions:
        assert len({*map(keys.is_manifest, batch)}) <= 1, "the files of a checkpoint wait for its manifest"
    if has_dependent:
        assert not [key for key in keys_deleted if key in known.retained.by_kind["checkpoints"]]


@pytest.mark.parametrize("kinds", [KINDS, tuple(sorted(RESUMED_FROM))])
def test_the_event_of_a_mark_names_the_kinds(kinds: Any) -> None:
    event = expiry_event(build.job(), kinds)
    assert (event.kind, event.data["kinds"]) == ("job.data_deleted", [*kinds])
    assert event.message == f"deleted, as its retention says: {', '.join(kinds)}"


@given(rounds=st.lists(st.tuples(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd"))), max_size=6))
def test_an_upload_is_deleted_if_two_checks_find_no_owner(rounds: list[tuple[set[str], set[str]]]) -> None:
    ownerless: Any = frozenset()
    previous: set[str] = set()
    for stored, owned in rounds:
        decision = decide_uploads(stored, owned, ownerless)
        ownerless, orphaned = decision.ownerless, stored - owned
        assert set(decision.deleted) == orphaned & previous
        previous = orphaned


def test_objects_beyond_the_limit_of_a_listing_are_checked_again() -> None:
    """A partial listing keeps the job of deleted objects due, because further objects may exist."""
    assert last(facts(defaults=SHORT)).due_in_s is None
    assert last(facts(defaults=SHORT, is_partial=True)).due_in_s == CHECK_ENDED_S
