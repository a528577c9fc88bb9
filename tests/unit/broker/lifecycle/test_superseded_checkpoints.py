"""Files of a running job's dead attempts that may be deleted, and those that its current attempt may still need."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.ids import attempt_id
from broker.domain.job import RESTING_JOB_STATES, Attempt, AttemptState, JobState, Reason
from broker.lifecycle.recovery import furthest_first
from broker.lifecycle.superseded_checkpoints import UNCOMMITTED_S, superseded
from tests.support import build
from trainer.contract import object_keys as keys
from trainer.contract.object_keys import step_of

ENDED_AT = build.at(0)
LATER = build.at(UNCOMMITTED_S + 1)


def attempts(*states: AttemptState) -> list[Attempt]:
    return [
        build.attempt(
            state, id=attempt_id(build.JOB_ID, number), number=number,
            reason=Reason.PREEMPTED if state is AttemptState.ENDED else None,
            ended_at=ENDED_AT if state is AttemptState.ENDED else None,
        )
        for number, state in enumerate(states, 1)
    ]  # fmt: skip


DEAD, DEAD_TOO, LIVE = attempts(AttemptState.ENDED, AttemptState.ENDED, AttemptState.TRAINING)


def files(step: int, of: Attempt, *, committed: bool = True) -> list[str]:
    folder = keys.checkpoint(build.JOB_ID, of.id, step, "n")
    return [folder + "a.safetensors", folder + "tree/b.json", *([folder + keys.MANIFEST] if committed else [])]


def rows(of: Attempt, *, committed: bool = True, identity: str = "e" * 64, nonce: str = "n") -> list[str]:
    folder = keys.token_cache(build.JOB_ID, of.id, identity, nonce)
    return [folder + "files/rows.bin/000000", *([folder + keys.MANIFEST] if committed else [])]


def gone(
    found: list[str],
    *,
    keep: int = 2,
    every: int | None = None,
    now: Any = ENDED_AT,
    of: Any = (DEAD, DEAD_TOO, LIVE),
    **spec: Any,
) -> set[str]:
    kept = {"keep": keep, "keep_every": every}
    job = build.active_job(spec_changes={"checkpoint": kept, **spec}, attempts=len(of))
    return set(superseded(job, of, found, now))


def test_dead_attempts_checkpoints_go_after_two_commits_of_the_current_one() -> None:
    old = [*files(10, DEAD), *files(20, DEAD_TOO)]
    assert gone([*old, *files(30, LIVE)]) == set(), "one may be torn"
    assert gone([*old, *files(30, LIVE), *files(40, LIVE)]) == set(old)


def test_the_furthest_one_that_the_guard_could_go_back_to_stays() -> None:
    """Three bad steps are left out, then it goes back 100: from behind 1060 to 957 or later."""
    older, furthest, near, nearer = files(900, DEAD), files(957, DEAD), files(958, DEAD_TOO), files(1000, DEAD_TOO)
    found = [*older, *furthest, *near, *nearer, *files(1060, LIVE), *files(1120, LIVE)]
    train = {"model": "m", "data": {"path": "upload:00", "completion": "{a}"}}
    assert gone(found, script=None, train=train) == {*older, *nearer}, "the one behind it is the next"
    never = {**train, "guard": {"rollbacks": 0}}
    assert gone(found, script=None, train=never) == {*older, *furthest, *near, *nearer}


def test_within_each_the_manifest_goes_first() -> None:
    found = [*files(10, DEAD), *files(20, DEAD), *files(30, LIVE), *files(40, LIVE)]
    doomed = superseded(build.active_job(), (DEAD, LIVE), found, ENDED_AT)
    manifests = [key.endswith("/" + keys.MANIFEST) for key in doomed]
    assert manifests == sorted(manifests, reverse=True)
    assert sum(manifests) == 2


def test_a_job_that_keeps_more_waits_for_more_commits() -> None:
    found = [*files(10, DEAD), *files(30, LIVE), *files(40, LIVE)]
    assert gone(found, keep=3) == set()
    assert gone([*found, *files(50, LIVE)], keep=3) == set(files(10, DEAD))


def test_checkpoints_not_superseded_twice_stay() -> None:
    """The current attempt resumed from an earlier checkpoint, as the furthest was torn; or it has not come so far
    yet.
    """
    found = [*files(10, DEAD), *files(30, DEAD), *files(31, DEAD), *files(30, LIVE), *files(40, LIVE)]
    assert gone(found) == {*files(10, DEAD), *files(30, DEAD)}


def test_milestones_of_dead_attempts_stay() -> None:
    found = [*files(10, DEAD), *files(15, DEAD), *files(20, DEAD_TOO), *files(30, LIVE), *files(40, LIVE)]
    assert gone(found, every=20) == {*files(10, DEAD), *files(15, DEAD)}


def test_commits_of_another_dead_attempt_supersede_nothing() -> None:
    assert gone([*files(10, DEAD), *files(20, DEAD_TOO), *files(30, DEAD_TOO), *files(40, LIVE)]) == set()


def test_uncommitted_folders_go_once_no_agent_can_commit_them() -> None:
    old, new = files(10, DEAD, committed=False), files(35, DEAD, committed=False)
    found = [*old, *new, *files(30, LIVE), *files(40, LIVE), *files(20, LIVE, committed=False)]
    assert gone(found, now=build.at(UNCOMMITTED_S)) == set()
    assert gone(found, now=LATER) == set(old), "the current attempt's own are its own business"


def test_token_caches_stay_and_torn_ones_go_once_uncommittable() -> None:
    whole, torn = rows(DEAD), rows(DEAD_TOO, committed=False)
    found = [*whole, *torn, *rows(LIVE, committed=False), *files(30, LIVE), *files(40, LIVE)]
    assert gone(found, now=build.at(UNCOMMITTED_S)) == set()
    assert gone(found, now=LATER) == set(torn)


def test_only_the_last_attempts_copy_of_a_token_cache_stays() -> None:
    """Each attempt that could not fetch the rows has uploaded a whole copy."""
    old, newer, other, torn = rows(DEAD), rows(DEAD_TOO), rows(DEAD, identity="f" * 64), rows(DEAD, nonce="m")[:1]
    found = [*old, *newer, *other, *torn]
    assert gone(found, now=build.at(UNCOMMITTED_S)) == set(), "who outlived its attempt may still put them"
    assert gone(found, now=LATER) == {*old, *torn}, "though the current attempt has saved nothing"
    assert gone([*found, *rows(LIVE)], now=LATER) == {*old, *newer, *torn}
    assert gone(found, of=(DEAD, DEAD_TOO), now=LATER) == {*old, *torn}, "between two attempts, too"
    assert gone([*rows(DEAD), *rows(LIVE, committed=False)], now=LATER) == set(), "it is not whole yet"
    assert gone([*rows(LIVE), *rows(LIVE, nonce="m")], now=LATER) == set(), "a live one removes its own"


@pytest.mark.parametrize("state", sorted(RESTING_JOB_STATES))
def test_an_idle_job_is_skipped(state: JobState) -> None:
    job = build.job(state=state, finished_at=LATER, attempts=2)
    found = [*files(10, DEAD), *files(30, LIVE), *files(40, LIVE)]
    assert superseded(job, (DEAD, LIVE), found, LATER) == ()


def test_between_two_attempts_everything_stays() -> None:
    found = [*files(10, DEAD), *files(30, DEAD_TOO), *files(40, DEAD_TOO)]
    assert gone(found, of=(DEAD, DEAD_TOO), now=LATER) == set()
    assert gone(found, of=(), now=LATER) == set()


def test_foreign_objects_are_never_deleted() -> None:
    stray = [
        f"checkpoints/{build.JOB_ID}/stray",
        f"checkpoints/{build.JOB_ID}/{DEAD.id}/stray",
        f"checkpoints/{build.JOB_ID}/{DEAD.id}/x-n/{keys.MANIFEST}",
        *files(10, build.attempt(AttemptState.ENDED, id=attempt_id(build.JOB_ID, 9))),
        *rows(build.attempt(AttemptState.ENDED, id=attempt_id(build.JOB_ID, 9))),
        *rows(DEAD),
    ]
    assert gone([*stray, *files(30, LIVE), *files(40, LIVE)], now=LATER) == set()


folders = st.tuples(st.integers(0, 9), st.sampled_from([DEAD, DEAD_TOO, LIVE]), st.booleans())


@given(st.lists(folders, max_size=12), st.integers(2, 3), st.sampled_from([ENDED_AT, LATER]))
def test_the_furthest_kept_checkpoints_are_never_superseded(made: list[Any], keep: int, now: Any) -> None:
    found = sorted({key for step, of, committed in made for key in files(step, of, committed=committed)})
    doomed = gone(found, keep=keep, now=now)
    manifests = furthest_first(found)
    left = [key for key in manifests if key not in doomed]
    assert [step_of(key) for key in left][:keep] == [step_of(key) for key in manifests][:keep]
    assert not any(LIVE.id in key for key in doomed)
    assert gone([key for key in found if key not in doomed], keep=keep, now=now) == set(), "all at once"
