"""Summary of a job's work and costs, from its attempts."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from broker.api.schemas.jobs import AttemptView, JobDetail
from broker.api.schemas.offers import OfferView
from broker.api.service import views
from broker.billing.spending import report
from broker.cli.core import formatting as words
from broker.cli.jobs import artifacts as results
from broker.cli.views import summary as view
from broker.cli.views.summary_data import Sample, steps_redone, summarise
from broker.domain.ids import AttemptId
from broker.domain.job import AttemptState, JobState, Reason
from broker.domain.money import LedgerCategory
from broker.domain.spec import JobSpec
from broker.domain.spending import Paid, PaidAttempt, Slice
from tests.support import build
from trainer.contract.documents import Final, Heartbeat, Outcome

T0 = datetime(2026, 1, 1, tzinfo=UTC)
OFFER: dict[str, Any] = {
    "id": "simulated/vast/us/x/spot", "provider": "simulated", "cloud": "vast", "region": "us", "instance_type": "x",
    "accelerator": "l40s", "gpus": 1, "gpu_memory_bytes": 48 * 1024**3, "vcpus": 8, "ram_bytes": 1, "disk_bytes": 1,
    "billing_quantum_s": 1, "simulated": True, "seen_at": T0,
}  # fmt: skip


def attempt(number: int, start: int | None, end: int, why: Reason, usd: str = "0.10", spot: bool = True) -> AttemptView:
    """Return an ended attempt that resumed at `start` and came to `end`; at $1 an hour on spot, $2 on demand."""
    price = Decimal(1 if spot else 2)
    offer = OfferView(**OFFER, spot=spot, usd_per_hour=price, on_demand_usd_per_hour=Decimal(2))
    beat = Heartbeat(attempt="a" * 13, boot="b", seq=1, step=end, total_steps=45, resumed_from=start)
    final = None
    if why is Reason.COMPLETED:
        final = Final(
            attempt="a" * 13, outcome=Outcome.COMPLETED, step=end, resumed_from=start,
            heldout_loss_before=4.0, heldout_loss_after=3.0,
        )  # fmt: skip
    return AttemptView.model_validate(
        {
            "id": "a" * 13, "number": number, "instance": "gb", "state": AttemptState.ENDED, "reason": why,
            "detail": "",
            "offer": offer, "hours_p50": None, "usd_p50": None, "created_at": T0, "create_sent_at": T0,
            "first_beat_at": T0, "ended_at": T0 + timedelta(minutes=6), "reserved_usd": Decimal(1),
            "charged_usd": Decimal(usd), "resume_from": (), "beat": beat, "final": final,
        }
    )  # fmt: skip


def job(*runs: AttemptView) -> JobDetail:
    spec = JobSpec.model_validate({"name": "n", "cap_usd": 1, "script": {"code": "upload:x", "command": ["a"]}})
    return JobDetail(
        id="j" * 13, name="n", team="red", owner="ada", state=JobState.SUCCEEDED, reason="", labels={}, created_at=T0,  # type: ignore[arg-type]
        finished_at=T0 + timedelta(minutes=20), cap_usd=Decimal(1),
        spent_usd=sum((r.charged_usd for r in runs), Decimal(0)), attempts=len(runs), retries_used=0,
        stop_requested=False, retry_of=None, spec=spec, reserved_usd=Decimal(0), runs=runs,
    )  # fmt: skip


def test_redone_steps_lie_between_checkpoint_and_furthest_step() -> None:
    first = attempt(1, None, 20, Reason.PREEMPTED)
    assert steps_redone((first, attempt(2, 17, 45, Reason.COMPLETED))) == 3
    # the second came to step 18 only, so one step was redone by it and three by the third
    assert steps_redone((first, attempt(2, 17, 18, Reason.PREEMPTED), attempt(3, 17, 45, Reason.COMPLETED))) == 1 + 3
    assert steps_redone((first, attempt(2, None, 45, Reason.COMPLETED))) == 20
    assert steps_redone((first, attempt(2, 20, 45, Reason.COMPLETED))) == 0


def test_an_attempt_without_a_heartbeat_redoes_nothing() -> None:
    silent = attempt(2, None, 0, Reason.NO_CAPACITY).model_copy(update={"beat": None})
    runs = (attempt(1, None, 20, Reason.PREEMPTED), silent, attempt(3, 18, 45, Reason.COMPLETED))
    assert steps_redone(runs) == 2
    summary = summarise(job(*runs), ("a", "b", "c"), (), ())
    assert [(a.start_step, a.end_step) for a in summary.attempts] == [(0, 20), (None, None), (18, 45)]
    assert (summary.steps, summary.preemptions) == (45, 1)


def test_on_demand_is_the_same_figure_as_in_the_spending_report() -> None:
    """The summary and `spend` compare the useful hours with the machine charges, and count lost work as paid."""
    beat = Heartbeat(attempt="a" * 13, boot="b", seq=1, step=20, total_steps=45)
    rows = [
        build.attempt(
            AttemptState.ENDED, number=1, line=build.line(), reason=Reason.PREEMPTED, beat=beat,
            first_beat_at=build.at(60), terminating_since=build.at(3600), absent_at=build.at(3600),
            ended_at=build.at(3600), charged_usd=Decimal("0.40"), traffic_usd=Decimal("0.04"),
        ),
        build.attempt(
            AttemptState.ENDED, number=2, line=build.line(spot=False, usd_per_hour=Decimal("0.90")),
            reason=Reason.COMPLETED, beat=beat, first_beat_at=build.at(60), absent_at=build.at(1800),
            ended_at=build.at(1800), charged_usd=Decimal("0.45"),
        ),
    ]  # fmt: skip
    rows[1] = replace(rows[1], id=AttemptId(f"{rows[1].id}-2"))
    summary = summarise(job(*(views.attempt(row) for row in rows)), ("a", "b"), (), ())
    paid = Paid(
        slices=[
            Slice(
                job_id=row.job_id, attempt_id=row.id, category=LedgerCategory.COMPUTE, day=build.T0.date(),
                usd=row.charged_usd - row.traffic_usd,
            )
            for row in rows
        ],
        attempts={row.id: PaidAttempt(attempt=row, compute_usd=row.charged_usd - row.traffic_usd) for row in rows},
        jobs={},
    )  # fmt: skip
    total = report(paid, "job").total
    assert summary.usd_on_demand == pytest.approx(total.on_demand_usd, abs=Decimal("0.000002"))
    assert summary.usd_compared == total.on_demand_of_usd == Decimal("0.81")
    assert summary.usd_lost == pytest.approx(total.lost_usd, abs=Decimal("0.000002"))
    assert summary.usd_lost > 0
    (money,) = [text for text in view.lines(summary) if "on demand" in text]
    assert "the useful time on demand: $0." in money
    assert "for lost work included" in money


def test_an_unknown_on_demand_price_makes_the_whole_unknown() -> None:
    known, unknown = attempt(1, None, 45, Reason.COMPLETED), attempt(2, None, 45, Reason.COMPLETED)
    known = known.model_copy(update={"on_demand_usd": Decimal("0.2")})
    assert summarise(job(known, unknown), ("a", "b"), (), ()).usd_on_demand is None
    assert (known.number, summarise(job(known), ("a",), (), ()).usd_on_demand) == (1, Decimal("0.2"))


def test_documents_are_json() -> None:
    sample = Sample(prompt="p", base="b", tuned="t")
    run = attempt(1, None, 5, Reason.COMPLETED).model_copy(update={"on_demand_usd": Decimal("0.200000")})
    document = summarise(job(run), ("a",), ((1, 2.0),), (sample,)).document()
    assert document["usd"] == "0.10"
    assert document["attempts"][0]["usd_on_demand"] == "0.200000"
    assert document["samples"] == [{"prompt": "p", "base": "b", "tuned": "t"}]


def test_metrics_of_a_redone_step_count_once_and_rubbish_is_skipped() -> None:
    raw = b'{"step": 1, "loss": 3}\n{"step": 2, "loss": 2.5}\nnot json\n{"step": 2, "loss": 2.0}\n[]\n'
    assert results.losses(raw) == ((1, 3.0), (2, 2.0))
    assert results.read_samples(b"{}") == ()
    assert results.read_samples(b"\xff") == ()


def test_the_purchase_is_shown_with_its_machines_and_their_price() -> None:
    run = attempt(1, None, 20, Reason.COMPLETED)
    one, three = words.machine(run), words.machine(run.model_copy(update={"nodes": 3}))
    assert f" {words.money(run.offer.usd_per_hour)}/h" in one
    assert "nodes" not in one
    assert f" 3 nodes of {words.gpu(run.offer)} " in three
    assert three.endswith(f" {words.money(3 * run.offer.usd_per_hour)}/h")


def test_an_attempt_names_its_machines() -> None:
    bought = build.attempt(line=replace(build.line(), nodes=3))
    assert views.attempt(bought).nodes == 3
