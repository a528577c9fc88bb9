"""Events that report the decisions of reviews: a move, or a new reason to stay on demand.

Used by the review controller, which writes them as notes. Decisions: `broker.quote.spot.review`.
"""

from broker.domain.job import Attempt, Event, Job
from broker.quote.job_placement import same_but_for_numbers
from broker.quote.spot.review import Move, Stay


def review_event(job: Job, attempt: Attempt, decision: Move | Stay) -> Event | None:
    """Return the event of a decision; None: nothing is new.

    A reason to stay that differs from the reported one in numbers only is not new. A script of unknown duration never
    moves, so its reason is not reported. An attempt on spot stays as a rule, which is no news either.
    """
    if isinstance(decision, Move):
        return Event(
            job_id=job.id,
            attempt_id=attempt.id,
            kind="attempt.moves",
            message=f"attempt {attempt.number} {decision.message}",
            data={"offer": decision.offer.id, "saved_usd": str(decision.saved_usd)},
        )
    is_spot = attempt.line.offer.spot
    if is_spot or job.workload.shape is None or same_but_for_numbers(decision.reason, attempt.stays):
        return None
    message = f"attempt {attempt.number} {decision.reason}"
    return Event(job_id=job.id, attempt_id=attempt.id, kind="attempt.stays", message=message)
