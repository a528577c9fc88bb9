"""Retention: the deleted files and their order, the files that are never deleted, and the cost of storage."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.controllers.base.context import Intervals
from broker.domain.ids import attempt_id
from broker.domain.job import RESTING_JOB_STATES, Attempt, AttemptState, Job, JobState, Reason, StoredData
from broker.domain.money import MICRO, ZERO, usd
from broker.domain.offer import GIB
from broker.domain.spec import Retention
from broker.lifecycle.retention import (
    CHECK_ENDED_S,
    KINDS,
    MIN_CHECK_S,
    QUEUED_CHECK_S,
    RESUMED_FROM,
    RetainedObjects,
    accrue,
    due_now,
    expired,
    last_checkpoint,
    leftovers,
    live_check_s,
    month_usd,
    next_check_s,
    origin_deleted_message,
    sort_objects,
)
from tests.support import build
from trainer.contract import object_keys as keys
from trainer.contract.documents import CheckpointRef, Final, Outcome
from trainer.contract.save_interval import milestones

ATTEMPT = build.attempt(AttemptState.ENDED, reason=Reason.COMPLETED, ended_at=build.at(0))
DAY = 86_400.0
SHORT = Retention(artifacts_days=3, checkpoints_days=2, logs_days=1, data_days=0)


def folder(step: int, attempt: str = ATTEMPT.id) -> str:
    return keys.checkpoint(build.JOB_ID, attempt, step, "n")


def files(step: int, attempt: str = ATTEMPT.id, *, committed: bool = True) -> list[tuple[str, int]]:
    found = [(folder(step, attempt) + "a.safetensors", 100)]
    return [*found, (folder(step, attempt) + keys.MANIFEST, 1)] if committed else found


def done(step: int, **changes: Any) -> Any:
    final = Final(
        attempt=ATTEMPT.id, outcome=Outcome.COMPLETED,
        checkpoint=CheckpointRef(manifest=folder(step) + keys.MANIFEST, step=step),
    )  # fmt: skip
    return replace(ATTEMPT, final=final, **changes)


def rested(state: JobState = JobState.SUCCEEDED, **changes: Any) -> Job:
    return build.job(**{"state": state, "finished_at": build.at(0), "attempts": 1, **changes})


DATA, LOG = keys.job_data(build.JOB_ID, "0" * 64), keys.log_chunk(ATTEMPT.id, 0, "b", 0)
SPEC = keys.spec(ATTEMPT.id)
EVERYTHING = [*files(10), *files(20), *files(30), (DATA, 7), (LOG, 5), (SPEC, 3)]


# ------------------------------------------------------------------------------------------------------------ sorting


@pytest.mark.parametrize("state", sorted(RESTING_JOB_STATES))
def test_token_caches_stay_with_the_checkpoints_of_a_resumable_job(state: JobState) -> None:
    whole = [
        keys.token_cache(build.JOB_ID, ATTEMPT.id, "e" * 64, "n") + name for name in ("files/rows.bin/0", keys.MANIFEST)
    ]
    torn = keys.token_cache(build.JOB_ID, ATTEMPT.id, "e" * 64, "m") + "files/rows.bin/0"
    found = [*files(10), *((key, 7) for key in (*whole, torn))]
    job = build.job(state=state, finished_at=build.at(0))
    kept = sort_objects(job, [ATTEMPT], found)
    assert kept.by_kind["checkpoints"].keys() >= {*whole, torn}, "what is paid for"
    doomed = {*leftovers(job, [ATTEMPT], kept)}
    assert doomed == ({*whole, torn} if state is JobState.SUCCEEDED else {torn})
    gone = build.job(state=state, finished_at=build.at(0), deleted={"checkpoints": build.at(1)})
    assert doomed | {*whole} <= {*leftovers(gone, [ATTEMPT], kept)}


def test_at_rest_the_last_attempt_s_tokenised_rows_stay_alone() -> None:
    """Neither the ids of attempts nor the listed keys are ordered."""
    tries = [replace(ATTEMPT, id=attempt_id(build.JOB_ID, number), number=number) for number in range(1, 6)]
    made = {one.id: keys.token_cache(build.JOB_ID, one.id, "e" * 64, "n") + keys.MANIFEST for one in tries}
    other = keys.token_cache(build.JOB_ID, tries[0].id, "f" * 64, "n") + keys.MANIFEST
    job = rested(JobState.CAPPED)
    for last in range(1, 6):
        there = [made[one.id] for one in tries[:last]]
        kept = sort_objects(job, tries, [(key, 7) for key in sorted([*there, other])])
        assert {*leftovers(job, tries, kept)} == {*there[:-1]}


def test_a_finished_job_s_last_checkpoint_is_its_results() -> None:
    kept = sort_objects(rested(), [done(30)], EVERYTHING)
    assert set(kept.by_kind["artifacts"]) == {key for key, _ in files(30)}
    assert set(kept.by_kind["checkpoints"]) == {key for key, _ in (*files(10), *files(20))}
    assert kept.by_kind["data"] == {DATA: 7}
    assert kept.by_kind["logs"] == {LOG: 5, SPEC: 3}
    assert kept.bytes == 3 * 101 + 7 + 5 + 3


@pytest.mark.parametrize("state", sorted(RESTING_JOB_STATES))
def test_the_kept_checkpoint_may_be_the_start_of_another_job(state: JobState) -> None:
    job = rested(state)
    kept = sort_objects(job, [done(30)], EVERYTHING)
    assert {key for key, _ in files(30)} <= set(kept.by_kind[last_checkpoint(job)])
    assert last_checkpoint(job) in RESUMED_FROM


def test_a_start_from_deleted_data_names_the_date() -> None:
    assert (
        origin_deleted_message(build.JOB_ID, build.T0)
        == f"job {build.JOB_ID} had its checkpoints deleted on 2026-01-01"
    )


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CAPPED, JobState.CANCELLED])
def test_other_jobs_have_checkpoints_only(state: JobState) -> None:
    kept = sort_objects(rested(state), [done(30)], EVERYTHING)
    assert not kept.by_kind["artifacts"]
    assert len(kept.by_kind["checkpoints"]) == 6


@pytest.mark.parametrize(
    "manifest",
    ["", keys.MANIFEST, f"checkpoints/other/x/1-n/{keys.MANIFEST}", f"checkpoints/{build.JOB_ID}/{ATTEMPT.id}/"],
)
def test_a_machine_cannot_name_another_s_folder_as_its_results(manifest: str) -> None:
    final = done(1).final.model_copy(update={"checkpoint": CheckpointRef(manifest=manifest, step=1)})
    assert not sort_objects(rested(), [replace(ATTEMPT, final=final)], EVERYTHING).by_kind["artifacts"]
    nothing = done(1).final.model_copy(update={"checkpoint": None})
    assert not sort_objects(rested(), [replace(ATTEMPT, final=nothing)], EVERYTHING).by_kind["artifacts"]
    assert not sort_objects(rested(), [], EVERYTHING).by_kind["artifacts"]


# ----------------------------------------------------------------------------------------------------------- deleting


def test_each_kind_expires_by_its_own_days() -> None:
    job = rested()
    assert expired(job, SHORT, build.at(0)) == ("data",)
    assert expired(job, SHORT, build.at(DAY)) == ("logs", "data")
    assert expired(job, SHORT, build.at(3 * DAY)) == KINDS
    assert expired(replace(job, deleted={"data": build.at(0)}), SHORT, build.at(0)) == ()
    assert expired(job, Retention(), build.at(1e9)) == (), "for ever"


def test_the_job_s_own_days_count_before_the_daemon_s() -> None:
    job = rested(spec=build.spec(retention={"logs_days": 5}))
    assert "logs" not in expired(job, SHORT, build.at(4 * DAY))
    assert "logs" in expired(job, SHORT, build.at(5 * DAY))


@given(
    st.sampled_from(sorted(set(JobState) - {JobState.SUCCEEDED, JobState.FAILED, JobState.CAPPED, JobState.CANCELLED}))
)
def test_nothing_of_a_job_that_is_not_at_rest_is_deleted(state: JobState) -> None:
    job = rested(state, deleted=dict.fromkeys(KINDS, build.at(0)))
    assert expired(replace(job, deleted={}), SHORT, build.at(1e9)) == ()
    assert leftovers(job, [done(30)], sort_objects(job, [done(30)], EVERYTHING)) == ()


def test_marked_data_is_deleted_manifests_first() -> None:
    job = rested(deleted={"artifacts": build.at(0), "logs": build.at(0)})
    doomed = leftovers(job, [done(30)], sort_objects(job, [done(30)], EVERYTHING))
    assert doomed[0] == folder(30) + keys.MANIFEST
    assert set(doomed) == {key for key, _ in files(30)} | {LOG, SPEC}


def test_a_file_named_like_a_manifest_is_no_manifest() -> None:
    """A checkpoint without a manifest must not count as committed. A listing would offer files in deletion."""
    named = [
        (folder(step) + keys.FILES + name, 1) for step in (40, 50) for name in ("manifest.json", "a/manifest.json")
    ]
    job = rested(JobState.CAPPED, spec=build.spec(checkpoint={"keep": 2}))
    doomed = leftovers(job, [], sort_objects(job, [], [*files(10), *files(20), *files(30), *named]))
    assert set(doomed) == {key for key, _ in (*files(10), *named)}
    assert doomed[0] == folder(10) + keys.MANIFEST


def test_the_furthest_checkpoints_of_any_attempt_stay_when_idle() -> None:
    objects = [*files(10), *files(20), *files(30, "b" * 13), *files(40, "b" * 13, committed=False)]
    job = rested(JobState.CAPPED)
    doomed = leftovers(job, [done(30)], sort_objects(job, [done(30)], objects))
    assert set(doomed) == {key for key, _ in (*files(10), *files(40, "b" * 13, committed=False))}
    torn = files(40, committed=False)
    assert leftovers(job, [], sort_objects(job, [], torn)) == (torn[0][0],)
    assert leftovers(job, [], RetainedObjects()) == ()


def test_milestones_stay_next_to_the_furthest_whichever_attempts_made_them() -> None:
    steps = [3, 8, 12, 19, 33, 35, 37]
    objects = [key for step in steps for key in files(step, "b" * 13 if step % 2 else ATTEMPT.id)]
    job = rested(JobState.CAPPED, spec=build.spec(checkpoint={"keep": 2, "keep_every": 10}))
    doomed = set(leftovers(job, [], sort_objects(job, [], objects)))
    stay = {key for key, _ in objects} - doomed
    assert {keys.step_of(key) for key in keys.manifests(stay)} == {12, 33, 35, 37}, "none at or after 0, one for 30"
    assert {keys.step_of(key) for key in keys.manifests(doomed)} == {3, 8, 19}
    forged = [(f"checkpoints/{build.JOB_ID}/x/10/{keys.MANIFEST}", 1)]
    assert leftovers(job, [], sort_objects(job, [], forged)) == (forged[0][0],), "no step, so no milestone"


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 25), st.integers(2, 4))
def test_deleted_checkpoints_do_not_change_the_milestones(steps: set[int], every: int, keep: int) -> None:
    def kept(among: list[str]) -> list[str]:
        return [key for key in among if key in {*among[-keep:], *milestones(among, every)}]

    made = [keys.checkpoint("j", "a", step, "n") + keys.MANIFEST for step in sorted(steps)]
    there: list[str] = []
    for key in made:
        there = kept([*there, key])
    assert there == kept(made)


def test_marked_checkpoints_all_go() -> None:
    job = rested(JobState.FAILED, deleted={"checkpoints": build.at(0)})
    assert len(leftovers(job, [done(30)], sort_objects(job, [done(30)], EVERYTHING))) == 6


# ------------------------------------------------------------------------------------------------------------- money


@given(
    st.lists(st.tuples(st.floats(min_value=0, max_value=1e6), st.integers(min_value=0, max_value=2**45)), max_size=8),
    st.decimals(min_value="0", max_value="1", places=3),
)
def test_storage_is_charged_for_its_time_and_each_cent_once(looks: list[tuple[float, int]], price: Decimal) -> None:
    stored: StoredData | None = None
    charged, now, least = ZERO, build.at(0), ZERO
    for after_s, size in looks:
        before, now = stored, now + timedelta(seconds=after_s)
        stored = accrue(before, size, price, now)
        due = due_now(before, stored)
        assert due >= 0
        charged += due
        if before is not None:
            least += price * min(before.bytes, size) / GIB * Decimal(repr(after_s)) / (730 * 3600)
    if stored is not None:
        assert charged == stored.charged_usd == usd(stored.accrued_usd)
        assert stored.accrued_usd >= least - MICRO


def test_a_month_of_a_gibibyte_costs_its_price() -> None:
    first = accrue(None, GIB, Decimal("0.023"), build.at(0))
    assert due_now(None, first) == ZERO
    month = accrue(first, GIB, Decimal("0.023"), build.at(730 * 3600))
    assert due_now(first, month) == Decimal("0.023") == month_usd(GIB, Decimal("0.023"))
    assert accrue(month, GIB, Decimal("0.023"), build.at(0)) == month, "a clock that went backwards"


def test_many_rounds_charge_no_more_than_one() -> None:
    stored = accrue(None, GIB, Decimal("0.023"), build.at(0))
    for n in range(1, 1001):
        stored = accrue(stored, GIB, Decimal("0.023"), build.at(n * 2628.0))
    assert stored.charged_usd - Decimal("0.023") <= MICRO


# --------------------------------------------------------------------------------------------------------------- looks


def test_a_job_is_visited_until_no_data_is_left() -> None:
    now, look = build.at(0), partial(next_check_s, live_s=7)
    assert look(build.active_job(), 5, SHORT, now) == 7
    assert look(rested(), 5, Retention(), now) == CHECK_ENDED_S
    assert look(rested(), 5, Retention(logs_days=0.001), now) == pytest.approx(86.4)
    assert look(rested(), 5, SHORT, now) == 0
    gone = rested(deleted=dict.fromkeys(KINDS, now))
    assert look(gone, 5, SHORT, now) == CHECK_ENDED_S
    assert look(gone, 0, SHORT, now) is None
    assert look(rested(), 0, Retention(), now) == CHECK_ENDED_S


def test_the_size_of_a_young_run_is_at_most_a_quarter_of_its_age_old() -> None:
    now = build.at(0)
    check = partial(live_check_s, now=now, max_s=3600)

    def aged(age_s: float) -> list[Attempt]:
        return [replace(build.attempt(), created_at=now - timedelta(seconds=age_s))]

    assert check([]) == QUEUED_CHECK_S
    assert [check(aged(age_s)) for age_s in (0, 600, 86_400)] == [MIN_CHECK_S, 150, 3600]
    assert live_check_s([], now, max_s=7) == 7


def test_stored_data_is_measured_daily_at_least() -> None:
    assert max(Intervals().stored_s, CHECK_ENDED_S) <= DAY
