"""A host that delivers other hardware than it sold is avoided at once, a failing host after its second failure. Both
blocks expire.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.job import Attempt, AttemptState, Reason
from broker.domain.offer import HostFacts
from broker.lifecycle.host_reputation import (
    HALF_LIFE_S,
    MAX_BLOCK_S,
    OFFER_HALF_LIFE_S,
    WEIGHTS,
    judge_host,
    score,
    weight,
)
from tests.support import build
from trainer.contract.documents import Final, Outcome

NOW = build.at(10 * 86_400)


def ended(
    reason: Reason | None = Reason.MISMATCH, *, ago_s: float = 0.0, host: str | None = "h", **changes: Any
) -> Attempt:
    at = build.at(10 * 86_400 - ago_s)
    facts = HostFacts(host=host) if host else None
    values: dict[str, Any] = {"create_sent_at": at, "terminating_since": at, "ended_at": at, "reason": reason}
    return build.attempt(AttemptState.ENDED, line=build.line(facts=facts), **(values | changes))


def test_a_lie_alone_is_enough_and_a_failure_is_not() -> None:
    blocked = judge_host([ended(Reason.MISMATCH, detail="asked for l40s, got t4")], NOW)
    assert blocked is not None
    assert blocked.for_s == pytest.approx(2 * HALF_LIFE_S)
    assert blocked.reason == "avoided for 48 h, failed 1 x: asked for l40s, got t4"
    assert judge_host([ended(Reason.INFRASTRUCTURE)], NOW) is None
    twice = judge_host([ended(Reason.HUNG), ended(Reason.INFRASTRUCTURE, ago_s=3600)], NOW)
    assert twice is not None
    assert twice.reason.endswith("failed 2 x: hung")
    assert judge_host([ended(Reason.HUNG), ended(Reason.HUNG, ago_s=HALF_LIFE_S)], NOW) is None


def test_early_preemptions_count_against_hosts_and_market_ones_do_not() -> None:
    """Late preemptions do not count against a host either."""
    early = ended(Reason.PREEMPTED)
    assert judge_host([early, early], NOW) is None
    assert judge_host([early, early, early], NOW) is not None
    assert weight(ended(Reason.PREEMPTED, terminating_since=build.at(11 * 86_400))) == 0
    assert weight(ended(Reason.PREEMPTED, host=None)) == 0
    assert weight(ended(Reason.PREEMPTED, create_sent_at=None)) == 0
    assert weight(ended(Reason.PREEMPTED, terminating_since=None)) == 0


def test_an_offer_without_a_named_host_is_forgiven_sooner() -> None:
    blocked = judge_host([ended(host=None)], NOW)
    assert blocked is not None
    assert blocked.for_s == pytest.approx(2 * OFFER_HALF_LIFE_S)


@pytest.mark.parametrize("reason", [None, *(r for r in Reason if r not in WEIGHTS)])
def test_other_ends_say_nothing_of_the_host(reason: Reason | None) -> None:
    assert weight(ended(reason)) == 0
    assert judge_host([ended(reason), ended()], NOW) is None


def test_a_host_without_history_is_not_avoided() -> None:
    assert judge_host([], NOW) is None


@given(st.lists(st.tuples(st.sampled_from(Reason), st.floats(-1000, 1e7)), max_size=50), st.floats(0, 1e6))
def test_a_score_only_falls_with_time_and_a_block_always_ends(
    history: list[tuple[Reason, float]], later_s: float
) -> None:
    attempts = [ended(reason, ago_s=ago_s) for reason, ago_s in history]
    assert score(attempts, build.at(10 * 86_400 + later_s)) <= score(attempts, NOW) + 1e-9
    blocked = judge_host(attempts, NOW)
    assert blocked is None or 0 < blocked.for_s <= MAX_BLOCK_S


def test_a_host_that_failed_the_machine_check_is_avoided_at_once() -> None:
    unfit = Final(attempt="a", outcome=Outcome.INFRASTRUCTURE, message="host: GPU 1 computes wrongly", bad_host=True)
    blocked = judge_host([ended(Reason.INFRASTRUCTURE, final=unfit, detail=unfit.message)], NOW)
    assert blocked is not None
    assert blocked.reason == "avoided for 48 h, failed 1 x: host: GPU 1 computes wrongly"
