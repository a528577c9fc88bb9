"""How far the attempts of a job came, and what they did twice."""

from collections.abc import Sequence
from typing import Protocol

from trainer.contract.documents import Final, Heartbeat


class AttemptProgress(Protocol):
    """An attempt, as a row or as a view."""

    @property
    def beat(self) -> Heartbeat | None: ...
    @property
    def final(self) -> Final | None: ...


def steps(run: AttemptProgress) -> tuple[int | None, int | None]:
    """(first, last) optimizer step; None when it never trained."""
    told = [document for document in (run.beat, run.final) if document is not None]
    if not told:
        return None, None
    resumed = next((one.resumed_from for one in told if one.resumed_from is not None), 0)
    return resumed, max(resumed, *(one.step for one in told))


def steps_redone(runs: Sequence[AttemptProgress]) -> int:
    """Over all resumes: the furthest step reached so far, less the step that the resume started from."""
    furthest = redone = 0
    for run in runs:
        start, end = steps(run)
        if start is None or end is None:
            continue
        redone += max(0, min(furthest, end) - start)
        furthest = max(furthest, end)
    return redone
