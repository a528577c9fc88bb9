"""Observations of ended attempts correct later quotes, and a job out of memory continues with another plan."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from broker.controllers.market.observed_runs import ObservedRuns
from broker.domain.ids import AttemptId
from broker.domain.job import AttemptState, JobState, Reason
from broker.domain.workload import ModelShape, Plan, RunObservation, SpotHours
from broker.estimator.planning.corrections import NO_CORRECTIONS
from broker.estimator.preemption_rate import place_of_offer
from tests.conformance.samples import make_job
from tests.support.rig.broker_rig import RigBuilder
from tests.support.rig.launcher_cloud import LauncherCloud, cloud_of
from trainer.contract import object_keys as keys
from trainer.contract.documents import AttemptSpec, Final, Outcome, Parallelism

SHAPE = ModelShape(
    name="", family="llama", layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64,
    vocabulary=128_256, tied_embeddings=True, parameters=1_235_814_400, known=True,
)  # fmt: skip
WORK = replace(make_job().workload, shape=SHAPE, lora_r=16, micro_batch=8, global_batch=24)
TRAIN = {
    "model": "m", "data": {"path": "upload:" + "0" * 64, "format": "csv", "completion": "{a}"},
    "micro_batch": 8, "global_batch": 24,
}  # fmt: skip


async def test_each_process_reads_the_new_observations_of_all_processes(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = build_rig().fleet("one")
    observed: list[RunObservation] = []

    async def observations(*, max_per_pair: int) -> Sequence[RunObservation]:
        return observed[-max_per_pair:]

    monkeypatch.setattr(fleet.context.store, "observations", observations)
    lessons = ObservedRuns(fleet.context)
    await lessons.step()
    assert lessons() is NO_CORRECTIONS
    for number, rate in enumerate((900.0, 1000.0, 1100.0)):
        observed.append(
            RunObservation(
                attempt_id=AttemptId(f"a{number}"), hardware="l40s", plan=Plan(micro_batch=1), nodes=1, cores=8,
                workload=WORK, tokens_per_s=rate,
            )
        )  # fmt: skip
    await lessons.step()
    learned = lessons()
    assert len(learned.speeds["l40s"]) == 3
    await lessons.step()
    assert lessons() is learned  # nothing new: quotes keep what was worked out
    observed.append(replace(observed[0], attempt_id=AttemptId("a3")))
    await lessons.step()
    assert len(lessons().speeds["l40s"]) == 4


async def test_own_spot_history_is_read_at_once_and_then_now_and_then(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = build_rig().fleet("one")
    asked: list[float] = []

    async def spot_hours(*, within_s: float) -> Sequence[SpotHours]:
        asked.append(within_s)
        return [SpotHours(provider="v", cloud="v", region="eu", accelerator="l4", hours=9.0, preemptions=len(asked))]

    monkeypatch.setattr(fleet.context.store, "spot_hours", spot_hours)
    lessons = ObservedRuns(fleet.context)
    await lessons.step()
    first = lessons()
    assert [spot.preemptions for spot in first.spots.values()] == [1]
    for _ in range(19):
        await lessons.step()
    assert lessons() is first
    await lessons.step()
    assert [spot.preemptions for spot in lessons().spots.values()] == [2]


async def test_a_real_spot_attempt_becomes_history_of_its_own_market(build_rig: RigBuilder) -> None:
    rig = build_rig()
    async with rig.running():
        job = await rig.submit(workload=WORK)
        await rig.state_of(job, JobState.SUCCEEDED)
        (attempt,) = await rig.attempts(job)
    lessons = ObservedRuns(rig.fleet("two").context)
    await lessons.step()
    offer = attempt.line.offer
    assert (lessons().spots[place_of_offer(offer)].hours > 0) if offer.spot else not lessons().spots


async def test_finished_jobs_are_the_record_that_later_quotes_name(build_rig: RigBuilder) -> None:
    rig = build_rig()
    async with rig.running():
        job = await rig.submit(workload=WORK)
        await rig.state_of(job, JobState.SUCCEEDED)
        (attempt,) = await rig.attempts(job)
    lessons = ObservedRuns(rig.fleet("two").context)
    await lessons.step()
    offer, tier = attempt.line.offer, attempt.line.tier
    assert tier is not None
    assert "of 1 finished jobs of this tier within P90" in lessons().records[tier, offer.simulated]


async def test_out_of_memory_changes_the_plan_twice_then_fails_the_job(
    build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt of a virtual machine writes that its memory ran out, as soon as it trains."""
    rig = build_rig()
    put = rig.blobs.put

    async def short(key: str, data: bytes, *, if_absent: bool = False) -> object:
        if key.startswith(keys.HEARTBEATS):
            attempt = keys.attempt_of_heartbeat(key)
            last = Final(attempt=attempt, outcome=Outcome.OOM, message="GPU memory is too small", ran_out="device")
            await put(keys.final(attempt), last.model_dump_json().encode())
        return await put(key, data, if_absent=if_absent)

    monkeypatch.setattr(rig.blobs, "put", short)
    async with rig.running():
        job = await rig.submit(WORK, script=None, train=TRAIN)
        failed = await rig.state_of(job, JobState.FAILED)
        attempts = await rig.attempts(job)
        events = await rig.store.events(job, after=0, limit=200)
        specs = [await rig.blobs.get(keys.spec(one.id)) for one in attempts]
    assert [one.reason for one in attempts] == [Reason.OOM] * 3
    assert all(one.state is AttemptState.ENDED for one in attempts)
    rows = [one.line.plan.micro_batch for one in attempts if one.line.plan]
    assert rows[0] == 8 > rows[1] > rows[2]
    assert failed.reason.startswith("memory ran out 3 times: micro-batch ")
    assert failed.remedy is not None
    assert len(failed.remedy.failed_plans) == 2
    for one in attempts:
        assert one.line.plan is not None
        plan = one.line.plan
        assert plan.micro_batch * plan.accumulation * plan.devices == WORK.global_batch
    trained = [AttemptSpec.model_validate_json(spec).train for spec in specs if spec]
    assert [train.micro_batch for train in trained if train] == rows
    assert {train.global_batch for train in trained if train} == {WORK.global_batch}
    messages = [event.message for event in events if event.kind == "job.replanned"]
    assert len(messages) == 2
    assert all(line.endswith("; global batch 24 as before") for line in messages)


async def test_model_too_large_for_one_gpu_is_sharded_and_preferred(
    build_rig: RigBuilder,
) -> None:
    """Eight billion weights in full take 120 GiB; H100s have 80."""
    large = replace(
        SHAPE, layers=32, hidden=4096, intermediate=14336, kv_heads=8, head_dim=128, tied_embeddings=False,
        parameters=8_030_261_248,
    )  # fmt: skip
    work = replace(
        WORK, shape=large, method="full", lora_r=0, micro_batch=1, global_batch=8, gradient_checkpointing=True
    )
    rig = build_rig(LauncherCloud)
    cloud_of(rig).setup_allowed.set()
    async with rig.running():
        resources = {"nodes": 2, "accelerators": ["h100"]}
        train = TRAIN | {"micro_batch": 1, "global_batch": 8}
        job = await rig.submit(work, script=None, train=train, resources=resources, cap_usd="10000")
        await rig.state_of(job, JobState.SUCCEEDED)
        attempts = await rig.attempts(job)
        wanted = await rig.blobs.get(keys.spec(attempts[0].id))
    assert wanted is not None
    spec = AttemptSpec.model_validate_json(wanted)
    assert attempts[0].line.plan == Plan(
        parallelism="fsdp", devices=2, micro_batch=1, accumulation=4, gradient_checkpointing=True
    )
    assert (spec.world.nodes, spec.world.parallelism) == (2, Parallelism(kind="fsdp"))
    assert spec.probe


async def test_an_ended_attempt_stores_its_measured_speed_and_plan(build_rig: RigBuilder) -> None:
    rig = build_rig()
    async with rig.running():
        job = await rig.submit(workload=WORK)
        await rig.state_of(job, JobState.SUCCEEDED)
        (attempt,) = await rig.attempts(job)
        (observation,) = await rig.store.observations(max_per_pair=9)
    assert observation.attempt_id == attempt.id
    assert observation.tokens_per_s == attempt.final.tokens_per_s if attempt.final else False
    assert observation.plan == attempt.line.plan
