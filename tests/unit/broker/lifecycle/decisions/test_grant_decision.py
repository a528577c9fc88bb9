"""Decision when credentials are renewed: at half of their life, and after growing pauses if that fails."""

from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.domain.job import AttemptState
from broker.lifecycle.decisions.grant_decision import (
    NEVER,
    REPORT_AFTER,
    RETRY_S,
    GrantDecision,
    GrantFacts,
    after_failure,
    decide_grant,
    renew_at,
)
from tests.support import build
from trainer.contract.documents import Grant

ATTEMPT = build.attempt()


def grant(life_s: float | None, *, issued_s: float = 0.0) -> Grant:
    seq = int(build.at(issued_s).timestamp() * 1000)
    expires_at = None if life_s is None else build.at(issued_s + life_s)
    return Grant(seq=seq, expires_at=expires_at, sealed="")


@given(issued_s=st.integers(0, 10**6), life_s=st.integers(2, 10**6), later_s=st.integers(0, 10**6))
def test_a_grant_is_renewed_from_half_of_its_life_on(issued_s: int, life_s: int, later_s: int) -> None:
    known, now = grant(life_s, issued_s=issued_s), build.at(issued_s + later_s)
    decision = decide_grant(GrantFacts(attempt=ATTEMPT, grant=known, now=now))
    assert decision.renews == (known if later_s >= life_s / 2 else None)
    assert decision.check_at == build.at(issued_s + life_s / 2)


def test_credentials_that_never_expire_are_never_renewed() -> None:
    decision = decide_grant(GrantFacts(attempt=ATTEMPT, grant=grant(None), now=build.at(10**6)))
    assert decision == GrantDecision(check_at=NEVER)
    assert renew_at(None) == NEVER


def test_a_grant_without_a_time_of_issue_is_due() -> None:
    assert renew_at(Grant(seq=0, expires_at=build.at(60), sealed="")) < build.T0


@pytest.mark.parametrize(("state", "check_at"), [(AttemptState.LAUNCHING, build.at(5)), (AttemptState.TRAINING, NEVER)])
def test_a_missing_grant_may_still_be_written_before_the_create(state: AttemptState, check_at: object) -> None:
    decision = decide_grant(GrantFacts(attempt=build.attempt(state), grant=None, now=build.at(5)))
    assert decision == GrantDecision(check_at=check_at)  # type: ignore[arg-type]


@given(failures=st.integers(1, 5000), every_s=st.floats(0.1, 30))
@example(failures=REPORT_AFTER, every_s=15.0)
def test_a_failing_renewal_is_repeated_with_pauses_and_reported_once(failures: int, every_s: float) -> None:
    decision = after_failure(build.active_job(), ATTEMPT, "403", failures=failures, now=build.T0, every_s=every_s)
    pause = decision.check_at - build.T0
    assert timedelta(seconds=min(every_s, RETRY_S)) - timedelta(milliseconds=1) <= pause <= timedelta(seconds=RETRY_S)
    following = after_failure(build.active_job(), ATTEMPT, "", failures=failures + 1, now=build.T0, every_s=every_s)
    assert following.check_at >= decision.check_at
    assert (decision.event is not None) == (failures == REPORT_AFTER)
    if decision.event is not None:
        assert (decision.event.kind, decision.event.attempt_id) == ("attempt.grant_failing", ATTEMPT.id)
        assert decision.event.message.endswith("its access to the blob store cannot be renewed: 403")
