"""Claims that fail, hang or stop, as `/readyz` reports them."""

import asyncio

import pytest

from broker.domain.errors import StoreError
from broker.runtime.claim_watch import SLOW_S, STALLED_S, ClaimWatch


class Seconds:
    """Monotonic clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def watch(seconds: Seconds) -> ClaimWatch:
    return ClaimWatch(seconds)


def test_a_failed_claim_is_a_fault_until_that_controller_claims_again(watch: ClaimWatch) -> None:
    assert watch.fault() == ""
    with pytest.raises(StoreError), watch.claiming("launch"):
        raise StoreError("invalid page in block 0\nDETAIL: x")
    with watch.claiming("liveness"):
        pass
    assert watch.fault() == "claims failing: launch: invalid page in block 0"
    with watch.claiming("launch"):
        pass
    assert watch.fault() == ""


def test_a_claim_without_an_answer_is_a_fault(watch: ClaimWatch, seconds: Seconds) -> None:
    with watch.claiming("launch"):
        seconds.now = SLOW_S
        assert watch.fault() == ""
        seconds.now += 1
        assert watch.fault() == "claims failing: launch: the database has not answered a claim for 4 s"
    assert watch.fault() == ""


def test_a_controller_that_stopped_claiming_is_a_fault(watch: ClaimWatch, seconds: Seconds) -> None:
    with watch.claiming("launch"):
        pass
    seconds.now = STALLED_S + 1
    assert watch.fault() == "claims failing: launch has claimed nothing for 91 s; see the daemon's log"


def test_a_cancelled_claim_at_the_daemons_end_is_no_fault(watch: ClaimWatch) -> None:
    with pytest.raises(asyncio.CancelledError), watch.claiming("launch"):
        raise asyncio.CancelledError
    assert watch.fault() == ""
