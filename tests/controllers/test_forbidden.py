"""A job whose model code the installation no longer allows gets no machine."""

from functools import partial

from broker.daemon.preflight_adapter import forbidden
from broker.domain.job import AttemptState, JobState, Reason
from broker.domain.spec import JobSpec
from tests.support.rig.broker_rig import RigBuilder

TRAIN = {
    "model": "owner/name",
    "revision": "0123456789abcdef0123456789abcdef01234567",
    "trust_remote_code": True,
    "data": {"path": "upload:" + "0" * 64, "completion": "{a}", "format": "csv"},
}
WHY = "train.trust_remote_code: the code of 'owner/name' is not allowed; an administrator can allow it"


async def test_a_queued_job_waits_until_its_model_s_code_is_allowed_again(build_rig: RigBuilder) -> None:
    allowed: list[str] = []
    rig = build_rig()
    rig.forbidden = partial(forbidden, allowed)
    async with rig.running():
        job = await rig.submit(script=None, train=TRAIN)
        other = await rig.submit()
        held = await rig.until(job, lambda j: j.reason != "")
        assert held.reason.startswith(WHY)
        assert (held.state, await rig.attempts(job)) == (JobState.QUEUED, [])
        await rig.state_of(other, JobState.SUCCEEDED)
        assert [e.kind for e in await rig.events(job)] == ["job.waiting"], "people hear of it once"
        allowed.append("owner/*")
        await rig.state_of(job, JobState.SUCCEEDED)


async def test_an_admitted_job_whose_code_becomes_forbidden_is_not_created(build_rig: RigBuilder) -> None:
    asked: list[str] = []
    again = False

    def once(spec: JobSpec) -> str:
        asked.append(spec.name)
        return "" if again or len(asked) == 1 else WHY

    rig = build_rig()
    rig.forbidden = once
    async with rig.running():
        job = await rig.submit()
        await rig.until(job, lambda j: j.reason.startswith(WHY) and j.state is JobState.QUEUED)
        (never,) = await rig.attempts(job)
        assert (never.state, never.detail, never.create_sent_at) == (AttemptState.ENDED, WHY, None)
        assert never.reason is Reason.QUOTE_EXPIRED
        again = True
        await rig.state_of(job, JobState.SUCCEEDED)
