"""Twenty measured steps re-quote a job: one event, a forecast with its interval, corrected quotes, on both stores."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import cast

from broker.api.service.views import job_detail
from broker.cli.views.jobs import forecast_message
from broker.controllers.base.context import ControllerContext
from broker.controllers.market.observed_runs import ObservedRuns
from broker.controllers.monitoring.spend_guard import Guard
from broker.domain.instance import Caps
from broker.domain.job import AttemptState
from broker.domain.workload import ModelShape, Plan
from broker.notify.slack.replies import TITLES
from broker.ports import Blobs, Change, Lane, Provider, Store
from tests.conformance.samples import HOUR, ManualClock, admission, claimed_job, in_state, make_job, running, submitted
from tests.support import build
from trainer.contract.documents import Heartbeat


class CloudWithoutTeardown:
    name = "simulated"
    caps = Caps(spot=True, teardown_s=0)


def context_of(store: Store, clock: ManualClock, owner: str) -> ControllerContext:
    return ControllerContext(
        installation=build.INSTALLATION, owner=owner, store=store, blobs=cast(Blobs, None),
        providers={"simulated": cast(Provider, CloudWithoutTeardown())}, clock=clock,
    )  # fmt: skip


async def reach_step(store: Store, clock: ManualClock, step: int, after_s: float, **more: float) -> None:
    """Advance the time, and record a heartbeat at that step as the liveness controller does."""
    clock.time += timedelta(seconds=after_s)
    (leased,) = await store.claim_attempts(Lane.LIVENESS, owner="l", lease_s=60, limit=1)
    values = {"attempt": leased.attempt.id, "boot": "b", "seq": step, "phase": "training", "total_steps": 200}
    beat = Heartbeat.model_validate({**values, "step": step, **more})
    assert await store.apply([Change(attempt=(leased.attempt, replace(leased.attempt, beat=beat)))]) == [True]


async def test_twenty_steps_requote_a_job_once_for_two_brokers(store: Store) -> None:
    spec, clock = build.spec(cap_usd="10", resources={"spot": "never"}), ManualClock()
    _, job = await running(store, spec=spec, cap_usd=spec.cap_usd)
    guards = [Guard(context_of(store, clock, owner)) for owner in ("one", "two")]
    seen = []
    for step in (1, 10, 19, 20, 30, 40):
        await reach_step(store, clock, step, after_s=30)
        for guard in guards:
            await guard.step()
        events = await store.events(job.id, after=0, limit=99)
        seen.append(sum(event.kind == "job.requoted" for event in events))
    assert seen == [0, 0, 0, 1, 1, 1]
    (event,) = [event for event in events if event.kind == "job.requoted"]
    now = await store.job(job.id)
    assert now is not None
    assert now.forecast is not None
    assert now.forecast.interval is not None
    low, high = now.forecast.interval.usd_low, now.forecast.interval.usd_high
    assert low < now.forecast.usd < high
    assert Decimal(event.data["usd_low"]) < Decimal(event.data["usd"]) < Decimal(event.data["usd_high"])
    assert event.message.startswith("4.74 s a step measured: $")
    assert event.kind in TITLES
    shown = forecast_message(job_detail(now, await store.attempts(job.id)))
    assert f"90 % interval ${low:.4f} to ${high:.4f}" in shown


SHAPE = ModelShape(
    name="", family="llama", layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64,
    vocabulary=128_256, tied_embeddings=True, parameters=1_235_814_400, known=True,
)  # fmt: skip


async def test_a_running_attempt_corrects_other_quotes_from_its_requote_on(store: Store) -> None:
    clock, work = ManualClock(), replace(make_job().workload, shape=SHAPE, lora_r=16, micro_batch=8, global_batch=24)
    await submitted(store, workload=work)
    change = admission(await claimed_job(store))
    assert change.admit is not None
    line = replace(change.admit.line, plan=Plan(micro_batch=1))
    assert await store.apply([replace(change, admit=replace(change.admit, line=line))]) == [True]
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="launch", lease_s=HOUR, limit=1)
    trains = in_state(leased.attempt, AttemptState.TRAINING)
    assert await store.apply([Change(attempt=(leased.attempt, trains))]) == [True]
    context = context_of(store, clock, "one")
    guard, observed_runs = Guard(context), ObservedRuns(context)
    counts = []
    for step in (1, 19, 20, 40):
        await reach_step(store, clock, step, after_s=30, tokens_per_s=900.0 + step, peak_memory_bytes=8 << 30)
        await guard.step()
        before = observed_runs()
        await observed_runs.step()
        counts.append(len(observed_runs().speeds.get("l40s", ())))
    assert counts == [0, 0, 1, 1]
    assert observed_runs() is before, "later heartbeats do not invalidate the quotes"
    assert not observed_runs().peaks, "its memory counts at its end"
