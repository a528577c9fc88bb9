"""A machine's messages about its training become events; a machine that reports itself unfit is not rented again."""

from broker.domain.ids import JobId, attempt_id
from broker.domain.job import AttemptState
from tests.support.rig.broker_rig import SAVE_RARELY, SILENT, RigBuilder
from tests.support.rig.launcher_cloud import LauncherCloud, cloud_of
from trainer.contract import object_keys as keys
from trainer.contract.documents import AgentMessage, Final, Heartbeat, Outcome

FIRST = AgentMessage(seq=1, kind="skipped", message="step 7 is left out")
SECOND = AgentMessage(seq=2, kind="save_failed", message="no space left")


async def test_each_message_is_recorded_once_and_an_unfit_host_avoided(build_rig: RigBuilder) -> None:
    rig = build_rig(LauncherCloud, virtual=SILENT)
    cloud_of(rig).setup_allowed.set()

    async def heard(job: JobId) -> list[tuple[str, str]]:
        events = await rig.events(job)
        return [(e.kind, e.message) for e in events if e.kind.startswith("training.")]

    async with rig.running():
        job = await rig.submit(checkpoint=SAVE_RARELY)
        attempt = attempt_id(job, 1)

        async def is_in(state: AttemptState) -> bool:
            return (attempts := await rig.attempts(job)) != [] and attempts[0].state is state

        await rig.eventually(lambda: is_in(AttemptState.TRAINING))
        beat = Heartbeat(attempt=attempt, boot="b", seq=50, messages=(FIRST,))
        await rig.blobs.put(keys.heartbeat(attempt, 0), beat.model_dump_json().encode())

        async def one_is_heard() -> bool:
            return len(await heard(job)) == 1

        await rig.eventually(one_is_heard)
        unfit = Final(
            attempt=attempt, outcome=Outcome.INFRASTRUCTURE, message="host: the GPU computes wrongly", bad_host=True,
            boot="b", messages=(FIRST, SECOND),
        )  # fmt: skip
        await rig.blobs.put(keys.final(attempt), unfit.model_dump_json().encode())
        done = beat.model_copy(update={"seq": 51, "phase": "done"})
        await rig.blobs.put(keys.heartbeat(attempt, 0), done.model_dump_json().encode())
        await rig.eventually(lambda: is_in(AttemptState.ENDED))
        assert await heard(job) == [
            ("training.skipped", "attempt 1: step 7 is left out"), ("training.save_failed", "attempt 1: no space left"),
        ]  # fmt: skip
        reasons = (await rig.store.blocked_offers()).values()
        assert any("failed 1 x: host: the GPU computes wrongly" in reason for reason in reasons), reasons
        await rig.stop(job)
