"""JSON body of a webhook: the event or notice, and the job's current state."""

import json
from typing import Any

from broker.domain.formatting import visible_document
from broker.domain.job import Attempt, Job
from broker.domain.notifications import Delivery, JobSnapshot

TEXT = 2000
"""Maximum characters of one text."""


def body(delivery: Delivery, snapshot: JobSnapshot | None) -> bytes:
    """Return JSON of `type`, `timestamp` (of the event) and `data`. Money is a string of dollars.

    Control characters other than line breaks and tabs are visible escapes within the texts.
    """
    occurrence = delivery.event or delivery.notice
    assert occurrence is not None, "a webhook is not refreshed"
    data: dict[str, Any] = {
        "message": occurrence.message[:TEXT],
        "detail": dict(occurrence.data),
        "folded": delivery.folded,
    }
    if delivery.event is not None:
        data |= {"job_id": delivery.event.job_id, "seq": delivery.event.seq, "attempt_id": delivery.event.attempt_id}
    if delivery.notice is not None:
        data |= {"notice_id": delivery.notice.id, "team": delivery.notice.team}
    if snapshot is not None:
        data["job"] = _job(snapshot.job, snapshot.attempts[-1] if snapshot.attempts else None)
    document = {
        "type": occurrence.kind,
        "timestamp": occurrence.at.isoformat() if occurrence.at else None,
        "data": data,
    }
    return json.dumps(visible_document(document), ensure_ascii=False, separators=(",", ":"), default=str).encode()


def _job(job: Job, attempt: Attempt | None) -> dict[str, Any]:
    return {
        "id": job.id,
        "name": job.spec.name,
        "team": job.team,
        "owner": job.owner,
        "state": job.state.value,
        "reason": job.reason[:TEXT],
        "spent_usd": str(job.spent_usd),
        "cap_usd": str(job.cap_usd),
        "attempts": job.attempts,
        "steps": job.workload.steps,
        "attempt": _attempt(attempt) if attempt is not None else None,
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    offer, beat = attempt.line.offer, attempt.beat
    return {
        "id": attempt.id,
        "number": attempt.number,
        "state": attempt.state.value,
        "reason": attempt.reason.value if attempt.reason else None,
        "cloud": offer.cloud,
        "region": offer.region,
        "accelerator": offer.accelerator,
        "gpus": offer.gpus,
        "spot": offer.spot,
        "usd_per_hour": str(offer.usd_per_hour),
        "charged_usd": str(attempt.charged_usd),
        "step": beat.step if beat else None,
        "loss": beat.loss if beat else None,
    }
