"""Jobs in every state, for screenshots and browser tests."""

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from broker.domain.ids import AttemptId, job_id
from broker.domain.job import (
    RESTING_JOB_STATES,
    Attempt,
    AttemptState,
    Event,
    Forecast,
    ForecastInterval,
    Job,
    JobState,
    Reason,
)
from broker.domain.offer import DropReason, OfferSummary, Quote, QuoteLine
from broker.domain.spec import JobSpec
from broker.ports import Change, Charge, Note, Store
from broker.quote.decision_record import packed
from tests.conformance.samples import ManualClock, make_attempt, make_job, make_line
from trainer.contract import object_keys as keys
from trainer.contract.documents import CheckpointRef, Final, Heartbeat

LOSSES = 45


def line(cloud: str, gpu: str, per_hour: str, p50: str, *, spot: bool = True) -> QuoteLine:
    line = make_line()
    offer = replace(
        line.offer, cloud=cloud, accelerator=gpu, spot=spot, usd_per_hour=Decimal(per_hour), simulated=True,
        id=f"simulated/{cloud}/eu-1/{gpu}/{'spot' if spot else 'on-demand'}", region="eu-1",
        on_demand_usd_per_hour=Decimal(per_hour) * 2,
    )  # fmt: skip
    return replace(line, offer=offer, usd_p50=Decimal(p50), usd_p90=Decimal(p50) * Decimal("1.3"))


def spec(name: str, cap: str, labels: Mapping[str, str], lr: float | None = None) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": name, "cap_usd": cap, "labels": labels,
            "train": {
                **({} if lr is None else {"optim": {"lr": lr}}),
                "model": "HuggingFaceTB/SmolLM2-135M",
                "data": {"path": "upload:" + "a" * 64, "prompt": "Define {word}:", "completion": "{definition}"},
            },
        }
    )  # fmt: skip


async def add(
    store: Store,
    clock: ManualClock | None,
    now: datetime,
    name: str,
    state: JobState,
    attempts: list[dict[str, Any]],
    *,
    cap: str = "5.00",
    labels: Mapping[str, str] | None = None,
    reason: str = "",
    age_min: float = 90.0,
    forecast: str | None = None,
    owner: str = "ada",
    lr: float | None = None,
) -> Job:
    """Store a job that is `age_min` minutes old, with its attempts as `_buy` takes them."""
    born = now - timedelta(minutes=age_min)
    _set(clock, born)
    wanted = spec(name, cap, labels or {}, lr)
    job = make_job(id=job_id(os.urandom(9)), owner=owner, spec=wanted, created_at=born, cap_usd=Decimal(cap))
    submitted = _event(job, "job.submitted", f"{name} submitted, cap ${cap}")
    await store.submit(job, key=None, body_sha256="", events=[submitted])
    for number, changes in enumerate(attempts, 1):
        await _buy(store, clock, job, born, number, changes)
    current = await _current(store, job)
    ended = born + timedelta(minutes=attempts[-1].get("end", 0)) if attempts and state in RESTING_JOB_STATES else None
    end = replace(current, state=state, reason=reason, finished_at=ended)
    assert await store.apply([Change(job=(current, end))]) == [True]
    if forecast is not None:
        latest = (await store.attempts(job.id))[-1]
        usd, finish_at = Decimal(forecast), now + timedelta(minutes=38)
        interval = ForecastInterval(
            attempt=latest.number, usd_low=usd * 9 / 10, usd_high=usd * 11 / 10,
            finish_earliest=finish_at - timedelta(minutes=3), finish_latest=finish_at + timedelta(minutes=3),
        )  # fmt: skip
        made = Forecast(usd=usd, finish_at=finish_at, step_s=2.0, made_at=now, interval=interval)
        note = Note(attempt=latest, job=await _current(store, job), forecast=made, idle=None)
        assert await store.note([note]) == [True]
    _set(clock, now)
    return await _current(store, job)


def _set(clock: ManualClock | None, time: datetime) -> None:
    """Move the clock of a store in memory, which dates its rows by it."""
    if clock is not None:
        clock.time = time


async def _current(store: Store, job: Job) -> Job:
    current = await store.job(job.id)
    assert current is not None
    return current


async def _buy(
    store: Store, clock: ManualClock | None, job: Job, born: datetime, number: int, changes: Mapping[str, Any]
) -> None:
    """Store one attempt with its charges."""
    start = born + timedelta(minutes=changes["start"])
    _set(clock, start)
    current, line = await _current(store, job), changes["line"]
    attempt = make_attempt(job, number, line=line, created_at=start, reserved_usd=line.usd_p90)
    to = replace(current, state=JobState.ACTIVE, attempts=number, reason="")
    bought = f"buys {line.offer.cloud} {line.offer.accelerator} spot, expected ${line.usd_p50} to finish"
    planned = _event(job, "attempt.planned", bought, attempt.id)
    decision = packed(_market(line, born))
    bought_now = Change(job=(current, to), admit=attempt, decision=decision, events=(planned,))
    assert await store.apply([bought_now]) == [True]
    until = born + timedelta(minutes=changes.get("end", changes["start"] + 40))
    _set(clock, until)
    usd = Decimal(changes["usd"])
    charge = Charge(attempt_id=attempt.id, job_id=job.id, since=None, to=until, usd=usd)
    assert await store.apply([Change(charge=charge)]) == [True]
    (stored,) = [a for a in await store.attempts(job.id) if a.number == number]
    settled = replace(stored, **_times(job, stored, born, changes))
    kind = f"attempt.{settled.reason or settled.state}"
    event = _event(job, kind, changes.get("told", "as planned"), attempt.id)
    assert await store.apply([Change(attempt=(stored, settled), events=(event,))]) == [True]


def _event(job: Job, kind: str, message: str, attempt: AttemptId | None = None) -> Event:
    return Event(job_id=job.id, kind=kind, message=message, attempt_id=attempt)


def _market(bought: QuoteLine, now: datetime) -> Quote:
    offer = bought.offer
    kept = [OfferSummary(offer.id, offer.usd_per_hour, None, "fits, 0.71 of its memory", bought.usd_p50)]
    kept += [
        OfferSummary(f"simulated/{c}/us-{n}/a100-80gb/spot", Decimal("1.19") + n, None, "fits", Decimal("0.9") + n)
        for n, c in enumerate(("runpod", "vast", "lambda"))
    ]
    dropped = [
        OfferSummary(
            f"simulated/vast/us-{n}/rtx3060/spot", Decimal("0.09"), DropReason.MEMORY, "needs 14.2 GB of 12 GB", None
        )
        for n in range(6)
    ]
    return Quote(
        lines=(), considered=lambda: kept + dropped, made_at=now, expires_at=now, proposed_cap_usd=None, kept_count=4
    )


def _times(job: Job, attempt: Attempt, born: datetime, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attempt's times, heartbeat and charges. `given`: `start`, `end` in minutes after the job's start."""
    start, end, step = given["start"], given.get("end"), given.get("step", 0)

    def at(minutes: float) -> datetime:
        return born + timedelta(minutes=minutes)

    beat = Heartbeat.model_validate(
        {"attempt": attempt.id, "boot": "b", "seq": step, "phase": "training", "step": step, "total_steps": 450,
         "loss": 4.4 - step / 300, "tokens_per_s": 812.0, "resumed_from": given.get("resumed") or None,
         "gpu_utilisation": 0.93, "gpu_memory_bytes": 31 << 30}
    )  # fmt: skip
    changes: dict[str, Any] = {
        "state": given["state"], "create_sent_at": at(start + 0.2), "running_at": at(start + 1.5),
        "first_beat_at": at(start + 4), "beat": beat if step else None,
    }  # fmt: skip
    if end is None:
        return changes
    reason = given["reason"]
    final = Final.model_validate(
        {"attempt": attempt.id, "outcome": "completed", "step": step, "total_steps": 450,
         "checkpoint": CheckpointRef(manifest=keys.checkpoints(job.id) + "x/manifest.json", step=step).model_dump()}
    ) if reason is Reason.COMPLETED else None  # fmt: skip
    return changes | {
        "reason": reason, "draining_since": at(end - 0.8), "terminating_since": at(end - 0.4), "ended_at": at(end),
        "absent_at": at(end), "detail": given.get("detail", ""), "final": final,
    }  # fmt: skip


async def fill(store: Store, clock: ManualClock | None, now: datetime) -> dict[str, str]:
    """Fill an empty store; return the ids of a running and of an ended job."""
    spot, dear = line("runpod", "l40s", "0.79", "1.12"), line("vast", "rtx4090", "0.44", "0.93")
    taken = {"line": spot, "start": 1, "end": 31, "step": 170, "state": AttemptState.ENDED, "reason": Reason.PREEMPTED,
             "usd": "0.3950", "detail": "runpod took the machine at step 170; step 160 is saved",
             "told": "runpod took it"}  # fmt: skip
    again = {"line": dear, "start": 33, "step": 310, "resumed": 160, "state": AttemptState.TRAINING, "usd": "0.3812"}
    done = again | {"step": 450, "end": 84, "reason": Reason.COMPLETED, "state": AttemptState.ENDED}
    failed = "train.data: column 'text' is missing; name one of word, definition"
    plans: list[tuple[str, JobState, list[dict[str, Any]], dict[str, Any]]] = [
        ("pictures", JobState.FAILED,
         [{**taken, "reason": Reason.USER_ERROR, "step": 12, "detail": failed, "usd": "0.0713", "end": 6}],
         {"age_min": 300, "reason": failed}),
        ("summaries", JobState.CAPPED, [{**taken, "reason": Reason.CAPPED, "usd": "1.9980", "told": "saved, stopped"}],
         {"age_min": 260, "cap": "2.00", "owner": "grace", "reason": "the cap of $2.00 is spent; raise it"}),
        ("devils-dictionary", JobState.SUCCEEDED, [taken, done], {"age_min": 200, "labels": {"team": "nlp"}}),
        ("devils-dictionary-2", JobState.ACTIVE, [taken, again],
         {"age_min": 75, "labels": {"team": "nlp", "sweep": "lr-3e-4"}, "lr": 3e-4, "forecast": "1.0230"}),
        ("sentiment-de", JobState.QUEUED, [], {"age_min": 3, "reason": "no offer below $2.00 an hour fits"}),
    ]  # fmt: skip
    ids = {}
    for name, state, attempts, more in plans:
        ids[name] = (await add(store, clock, now, name, state, attempts, **more)).id
    return {"live": ids["devils-dictionary-2"], "over": ids["devils-dictionary"]}
