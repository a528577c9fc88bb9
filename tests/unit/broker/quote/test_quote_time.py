"""An offer that is expected to miss the job's time is not bought."""

from datetime import timedelta
from typing import Any

import pytest

from broker.domain.instance import Caps
from broker.domain.offer import DropReason, QuoteLine
from broker.domain.workload import Workload
from broker.quote.engine import quote
from tests.support.machines import NOW, SCRIPT, WORK, offer, quoted, spec

CAPS = {"cloud": Caps(spot=True, teardown_s=30, list_lag_s=10, boot_s=60)}


def line(work: Workload = WORK, *, machine_s: float = 0, lead_s: float = 0, **changes: Any) -> QuoteLine:
    made = quote(
        spec(**changes), work, [offer()], now=NOW, local_files=False, scoped_store=True, spent=0 * offer().usd_per_hour,
        cap_left=100 * offer().usd_per_hour, excluded={}, caps=CAPS, machine_s=machine_s, lead_s=lead_s,
    )  # fmt: skip
    (only,) = made.lines
    return only


KEPT = quoted([offer()], caps=CAPS).lines[0]
assert KEPT.hours_p50 is not None
assert KEPT.hours_p90 is not None
P50_S, P90_S = KEPT.hours_p50 * 3600, KEPT.hours_p90 * 3600
DRAINED_S = 30 + 2 * 10 + 1
"""Teardown, list lags and a quantum."""


@pytest.mark.parametrize(
    ("lead_s", "spare_s", "drop"), [(0, 1, None), (0, -1, DropReason.DEADLINE), (135, 100, DropReason.DEADLINE)]
)
def test_the_p90_must_keep_the_deadline_and_leave_time_for_the_drain(
    lead_s: float, spare_s: float, drop: DropReason | None
) -> None:
    deadline = NOW + timedelta(seconds=P90_S + DRAINED_S + spare_s)
    assert line(deadline=deadline, lead_s=lead_s).drop is drop


def test_the_p50_must_fit_into_the_machine_time_that_is_left() -> None:
    most = int(P50_S + DRAINED_S) + 2
    assert most < P90_S
    assert line(max_duration=most).drop is None
    late = line(max_duration=most, machine_s=10)
    assert late.drop is DropReason.DEADLINE
    assert f"takes {P50_S / 3600:.2f} h (P50), {P90_S / 3600:.2f} h (P90): 0.00 h too long" in late.reason


def test_of_a_script_only_the_set_up_is_known() -> None:
    assert line(SCRIPT, deadline=NOW + timedelta(seconds=60 * 1.5 + DRAINED_S + 1)).drop is None
    assert line(SCRIPT, deadline=NOW + timedelta(seconds=60 * 1.5 + DRAINED_S - 1)).drop is DropReason.DEADLINE
