"""Choice of the checkpoints of another job from which an attempt starts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.controllers.provisioning.placement import Placement
from broker.domain.ids import attempt_id, job_id
from broker.domain.job import AttemptState, Reason
from tests.support import build
from trainer.contract import object_keys as keys

ORIGIN = job_id(b"another on")
ENDED = build.attempt(AttemptState.ENDED, id=attempt_id(ORIGIN, 1), number=1, reason=Reason.PREEMPTED)
LIVE = build.attempt(AttemptState.TRAINING, id=attempt_id(ORIGIN, 2), number=2)
MILESTONE, LAST = (keys.checkpoint(ORIGIN, of.id, step, "n") + keys.MANIFEST for of, step in ((ENDED, 10), (LIVE, 900)))


class StoredAttempts:
    """Stored attempts and their blobs."""

    async def attempts(self, job: Any) -> Any:
        return {ORIGIN: (ENDED, LIVE)}[job]

    async def list(self, prefix: str, *, max_objects: int) -> Any:
        return [SimpleNamespace(key=key) for key in (MILESTONE, LAST) if key.startswith(prefix)]


@pytest.mark.parametrize(("nodes", "named"), [(1, (LAST, MILESTONE)), (2, (MILESTONE,))])
async def test_several_machines_start_only_from_a_kept_checkpoint_of_a_live_job(
    nodes: int, named: tuple[str, ...]
) -> None:
    """The last checkpoint of a running job may be deleted before the second machine reads it."""
    stored = StoredAttempts()
    context = SimpleNamespace(store=stored, blobs=stored, intervals=SimpleNamespace(poll_s=1.0))
    spec = build.spec(init_from=f"job/{ORIGIN}", resources={"nodes": nodes})
    job = replace(build.active_job(spec=spec), attempts=0)
    placement = Placement(cast(Any, context), cast(Any, None), lambda: [])
    assert await placement._resume_from(job) == named
