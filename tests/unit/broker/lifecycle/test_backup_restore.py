"""Attempts without a row: facts that follow from a job's count and from the keys in the blob store."""

from dataclasses import replace

import pytest

from broker.domain.ids import attempt_id
from broker.domain.job import Reason
from broker.lifecycle.backup_restore import (
    AHEAD,
    attempts_without_row,
    drain_reason,
    possible_attempts,
    still_running_message,
    unproven_message,
)
from tests.support import build
from trainer.contract import object_keys as keys
from trainer.contract.documents import Desired, Final, Outcome

JOB = replace(build.active_job(), attempts=2)


def test_the_next_numbers_follow_the_last_in_order() -> None:
    assert [*possible_attempts(JOB).values()] == [*range(3, 3 + AHEAD)]
    assert next(iter(possible_attempts(JOB))) == attempt_id(JOB.id, 3)
    assert possible_attempts(JOB) is possible_attempts(JOB)  # a decision reads them three times, and each id is a hash


def test_an_attempt_is_known_by_its_number_whether_or_not_it_has_a_row() -> None:
    saved = [keys.checkpoint(JOB.id, attempt_id(JOB.id, number), 5, "n") + keys.MANIFEST for number in (1, 2, 3)]
    assert attempts_without_row(JOB, saved) == (attempt_id(JOB.id, 3),)
    assert attempts_without_row(JOB, saved[:2]) == ()


@pytest.mark.parametrize(
    ("reason", "ends"),
    [("stopped", Reason.STOPPED), ("capped", Reason.CAPPED), ("budget", None), ("preempted", None), ("", None)],
)
def test_only_a_stop_and_the_cap_end_the_job_of_such_a_drain(reason: str, ends: Reason | None) -> None:
    assert drain_reason(Desired(want="drain", reason=reason)) is ends


def test_wait_message_says_if_the_attempt_ended_and_which_cloud_is_silent() -> None:
    done = Final(attempt="a", outcome=Outcome.COMPLETED)
    assert "may still train: x exists and bills; wait until it is gone, or end it: gpubroker" in still_running_message(
        2, "x", None
    )
    assert "has ended (completed): x exists and bills; end it: gpubroker" in still_running_message(2, "x", done)
    assert unproven_message(2, ["b", "a"]).endswith("a, b did not answer; see gpubroker doctor")
    assert unproven_message(2, []).endswith("the clouds are asked")
