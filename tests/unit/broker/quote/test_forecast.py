"""The forecast follows what is measured, and people hear once of each crossing."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from math import exp
from typing import Any

import pytest

from broker.domain.instance import Caps
from broker.domain.job import Attempt, Forecast, Job
from broker.domain.offer import GIB, HostFacts
from broker.domain.workload import SpotHours
from broker.estimator.preemption_rate import History, failures_per_hour, place_of_offer
from broker.quote.forecast import (
    StepRateWindow,
    differs,
    forecast,
    late_message,
    measured_attempt,
    next_window,
    overrun_message,
    requote_message,
    sufficient_cap_usd,
)
from tests.support import build
from trainer.contract.documents import CheckpointRef, Heartbeat
from trainer.contract.save_interval import interval_s

CAPS = Caps(spot=True, teardown_s=0)
LINE = build.line(usd_per_hour=Decimal("3.6"), spot=False)


def beat(step: int, total: int = 100, **changes: Any) -> Heartbeat:
    return Heartbeat(**{"attempt": "x", "boot": "b", "seq": step, "step": step, "total_steps": total, **changes})


def at_step(step: int, **changes: Any) -> Attempt:
    return build.attempt(**{"line": LINE, "beat": beat(step), **changes})


def made(
    attempt: Attempt, job: Job, step_s: float | None = 10.0, at: float = 500, history: History | None = None
) -> Forecast:
    found = forecast(attempt, job, CAPS, step_s, build.at(at), history or {})
    assert found is not None
    return found


def job(cap: str = "10", **spec: Any) -> Job:
    changed = {"cap_usd": cap, **spec}
    return build.job(spec_changes=changed, state=build.active_job().state, attempts=1)


# --------------------------------------------------------------------------------------------------------------- pace


def test_the_step_time_includes_saves_and_evaluations() -> None:
    pace = next_window(None, at_step(0), 0)
    assert pace is None, "set-up"
    pace = next_window(pace, at_step(10), 100)
    assert pace == StepRateWindow(boot="b", since_s=100, since_step=10, at_s=100, step=10)
    assert pace.step_s is None
    pace = next_window(pace, at_step(10), 110)
    assert pace is not None
    assert pace.at_s == 100, "time without a step counts with the next"
    pace = next_window(pace, at_step(14), 160)
    assert pace is not None
    assert pace.step_s == 15


@pytest.mark.parametrize(("step", "at"), [(11, 500), (20, 110)])
def test_too_few_steps_give_no_forecast(step: int, at: float) -> None:
    pace = next_window(next_window(None, at_step(10), 100), at_step(step), at)
    assert pace is not None
    assert pace.step_s is None


def test_a_new_start_of_the_trainer_is_watched_again() -> None:
    pace = next_window(None, at_step(10), 100)
    resumed = next_window(pace, at_step(0, beat=beat(12, boot="other", resumed_from=5)), 200)
    assert resumed is not None
    assert (resumed.since_s, resumed.since_step) == (200, 12)
    assert next_window(pace, at_step(0, beat=beat(5, boot="other", resumed_from=5)), 200) is None
    back = next_window(pace, at_step(4), 200)
    assert back is not None
    assert back.since_step == 4
    assert next_window(pace, at_step(0, beat=None), 200) is None


# ----------------------------------------------------------------------------------------------------------- forecast


def test_the_rest_costs_its_steps_at_the_price_of_now() -> None:
    attempt = at_step(50)
    found = made(attempt, job())
    assert found.usd == Decimal("0.5") + Decimal("0.5"), "500 s so far and 500 s to come at a tenth of a cent"
    assert found.finish_at == build.at(1000)
    dearer = replace(attempt, prices=build.changes((500, "7.2")))
    assert made(dearer, job()).usd == Decimal("1.5")
    others = replace(job(), spent_usd=Decimal("2.5"))
    assert made(replace(attempt, charged_usd=Decimal("0.5")), others).usd == Decimal(3)


def test_preemptions_to_come_and_saves_cost_as_well() -> None:
    spot = replace(LINE, offer=replace(LINE.offer, spot=True, preemptions_per_hour=6.0))
    slow = made(at_step(50, line=spot, first_beat_at=build.at(150)), job(checkpoint={"every_s": 300}))
    assert slow.finish_at == build.at(500 + 500 / (1 - 300 / 600))
    often = replace(spot, offer=replace(spot.offer, preemptions_per_hour=600.0))
    assert made(at_step(50, line=often), job()).finish_at == build.at(500 + 5000)
    own = SpotHours(provider="simulated", cloud="runpod", region="eu", accelerator="l40s", hours=1e9, preemptions=10**9)
    disturbed = made(
        at_step(50, line=often, first_beat_at=build.at(150)), job(), history={place_of_offer(often.offer): own}
    )
    assert (disturbed.finish_at - build.at(1000)).total_seconds() == pytest.approx(500 / 11, abs=0.1), (
        "one an hour was seen, so the cloud's word counts for nothing: 300 s of each are lost"
    )
    facts = replace(LINE, offer=replace(LINE.offer, facts=HostFacts(egress_usd_per_gib=Decimal("0.1"))))
    saved = CheckpointRef(manifest="m", step=50, bytes=GIB)
    sending = at_step(0, line=facts, beat=beat(50, checkpoint=saved, sent_bytes=2 * GIB))
    assert made(sending, job(checkpoint={"every_s": 300})).usd == Decimal(1) + Decimal("0.1") * (2 + 2)


def test_a_preemption_loses_as_much_as_the_trainers_own_interval_lets_it() -> None:
    spot = replace(LINE, offer=replace(LINE.offer, spot=True, preemptions_per_hour=6.0))
    saved = CheckpointRef(manifest="m", step=50, bytes=GIB, save_s=10.0)
    running = at_step(50, line=spot, first_beat_at=build.at(150), beat=beat(50, checkpoint=saved))
    every_s = interval_s(10.0, 6.0 + failures_per_hour(spot.offer, 1), 300.0)
    assert 60 < every_s < 120
    lost_s = every_s / 2 + 10 + 150
    finish_at = made(running, job(checkpoint={"every_s": 300})).finish_at
    assert (finish_at - build.at(500)).total_seconds() == pytest.approx(500 / (1 - lost_s / 600), abs=1e-3)


def test_without_evidence_nothing_is_reported() -> None:
    for attempt, step_s in ((at_step(50), None), (at_step(0, beat=None), 1.0), (at_step(0, beat=beat(5, 0)), 1.0)):
        assert forecast(attempt, job(), CAPS, step_s, build.at(500), {}) is None


def test_an_overrun_is_reported_once_until_the_cap_suffices_again() -> None:
    """A cost of 1.0 is expected. A lower cap is reported; the report is withdrawn only if the cap is 5 % higher than
    the cost.
    """
    attempt = at_step(50)
    enough, short = job("1.01"), job("0.99")
    assert not made(attempt, enough).over_cap
    told = made(attempt, short)
    assert told.over_cap
    assert made(attempt, replace(enough, forecast=told)).over_cap, "hardly enough"
    assert not made(attempt, replace(job("1.06"), forecast=told)).over_cap


def test_a_late_finish_is_reported_once() -> None:
    attempt = at_step(50)
    late = made(attempt, job(deadline="2026-01-01T00:16:00Z"))
    assert late.late
    assert not made(attempt, job(deadline="2026-01-01T00:17:00Z")).late
    assert made(attempt, replace(job(deadline="2026-01-01T00:17:00Z"), forecast=late)).late
    assert made(attempt, job(max_duration=999)).late
    assert not made(attempt, job(max_duration=1001)).late


def test_the_words_say_by_how_much_and_what_helps() -> None:
    attempt, short = at_step(50, charged_usd=Decimal("0.5")), replace(job("0.9"), spent_usd=Decimal("0.5"))
    found = made(attempt, short)
    assert sufficient_cap_usd(found, short, Decimal("0.111")) == Decimal("1.17")
    words = overrun_message(found, short, Decimal("0.111"))
    assert words.startswith("expected to cost $1.0000 by its end at 2026-01-01 00:16 UTC (P50), $0.1000 above its cap")
    assert words.endswith(f"`gpubroker cap {short.id} 1.17` would suffice")
    timed = job(deadline="2026-01-01T00:10:00Z")
    assert "7 min after its deadline" in late_message(made(attempt, timed), attempt, timed, build.at(500))
    both = job(max_duration=600)
    assert "7 min after its deadline or max_duration" in late_message(made(attempt, both), attempt, both, build.at(500))
    assert late_message(found, attempt, short, build.at(500)), "the deadline was taken away meanwhile"


# ----------------------------------------------------------------------------------------------------------- interval


def test_twenty_steps_of_an_attempt_give_an_interval() -> None:
    """The deviation of a run is 4 % on a GPU; 1.645 deviations are a 90 % interval."""
    assert made(at_step(19), job()).interval is None
    assert made(at_step(0, beat=beat(39, resumed_from=20)), job()).interval is None
    found = made(at_step(50), job())
    assert found.interval is not None
    low_s, high_s = 500 / exp(1.645 * 0.04), 500 * exp(1.645 * 0.04)
    earliest, latest = ((at - build.at(500)).total_seconds() for at in (
        found.interval.finish_earliest, found.interval.finish_latest,
    ))  # fmt: skip
    assert earliest == pytest.approx(low_s, abs=1e-3)
    assert latest == pytest.approx(high_s, abs=1e-3)
    assert found.interval.usd_low == pytest.approx(Decimal(0.5 + low_s / 1000), abs=Decimal("0.0001"))
    assert found.interval.usd_high == pytest.approx(Decimal(0.5 + high_s / 1000), abs=Decimal("0.0001"))
    resumed = at_step(0, beat=beat(39, resumed_from=30))
    assert made(resumed, replace(job(), forecast=found)).interval is not None, "the attempt was measured before"
    assert made(replace(resumed, number=2), replace(job(), forecast=found)).interval is None
    assert (measured_attempt(None), measured_attempt(found)) == (0, 1)


def test_cpus_and_preemptions_widen_the_interval() -> None:
    def width(attempt: Attempt) -> float:
        interval = made(attempt, job(checkpoint={"every_s": 300})).interval
        assert interval is not None
        return (interval.finish_latest - build.at(500)) / (interval.finish_earliest - build.at(500))

    gpu = width(at_step(50))
    cpu = replace(LINE, offer=replace(LINE.offer, gpus=0))
    spot = replace(LINE, offer=replace(LINE.offer, spot=True, preemptions_per_hour=6.0))
    assert width(at_step(50, line=cpu)) == pytest.approx(gpu ** (0.15 / 0.04), rel=1e-3)
    assert width(at_step(50, line=spot)) > gpu * 2


def test_a_requote_names_forecast_interval_and_quote() -> None:
    attempt, paid = at_step(50), replace(job(), spent_usd=Decimal("2.5"))
    found = made(attempt, paid)
    assert found.interval is not None
    line = replace(LINE, usd_p50=Decimal("0.8"))
    message = requote_message(found, found.interval, replace(attempt, line=line), paid)
    assert message.startswith("10 s a step measured: $3.5000 by 2026-01-01 00:16 UTC (P50); 90 % interval $3.46")
    assert message.endswith(", 2026-01-01 00:16 UTC to 2026-01-01 00:17 UTC; quoted $3.3000 (P50)")
    script = replace(attempt, line=replace(LINE, usd_p50=None))
    assert "quoted" not in requote_message(found, found.interval, script, paid)


def test_small_changes_of_a_forecast_are_not_stored() -> None:
    found = made(at_step(50), job())
    assert differs(found, replace(found, interval=None))
    assert not differs(found, found)
    assert not differs(None, None)
    assert differs(found, None)
    assert differs(None, found)
    assert differs(replace(found, over_cap=True), found)
    assert differs(replace(found, finish_at=found.finish_at + timedelta(seconds=61)), found)
    assert differs(replace(found, usd=found.usd * 2), found)
    assert not differs(replace(found, usd=found.usd + Decimal("0.001")), found)
